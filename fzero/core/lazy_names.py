"""Names of a package that load when first used, as `__init__.pyi` beside its `__init__.py` lists them (Scientific
Python's SPEC 1). The package lazy_loader does this too, but not for a name that is also a module's (optim.adamw).
"""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """A package whose names, and modules, are imported when first used."""

    def __getattr__(self, name: str) -> Any:
        table = self.__dict__["_sources"]
        if name not in table and (name[0] == "_" or importlib.util.find_spec(f"{self.__name__}.{name}") is None):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, attribute = table.get(name, (self.__name__, name))
        if module != self.__name__ and hasattr(importlib.import_module(module), attribute):
            value = getattr(sys.modules[module], attribute)
        else:
            value = importlib.import_module(f"{module}.{attribute}")
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # An import of the module fzero.optim.adamw binds it as `adamw`, which is the name of its function.
        if isinstance(value, ModuleType) and self.__dict__["_sources"].get(name, ("", ""))[0] == value.__name__:
            return
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__dict__["_sources"]})


def attach(package: str) -> list[str]:
    """Make the names that the `__init__.pyi` of `package` imports load when first used; returns them, for `__all__`."""
    module = sys.modules[package]
    stub = ast.parse(Path(str(module.__file__)).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    sources = {alias.asname or alias.name: (node.module, alias.name) for node in imports for alias in node.names}
    for node in stub.body:
        match node:
            case ast.Assign(targets=[ast.Name(alias)], value=ast.Name(name)):
                sources[alias] = sources.pop(name)
    module.__dict__["_sources"] = sources
    module.__class__ = LazyPackage
    return list(sources)
