"""Names of a package that load when first used, as `__init__.pyi` beside its `__init__.py` lists them (SPEC 1).

The package lazy_loader does this too, but not for a name that is also a module's (optim.adamw).
"""

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
    """Make the names that the `__init__.pyi` of `package` imports, one a line, load when first used. Returns those for
    users, for `__all__`: a string in the stub begins those for contributors, which the package offers to the others.
    """
    module = sys.modules[package]
    sources: dict[str, tuple[str, str]] = {}
    public = None
    for line in Path(str(module.__file__)).with_suffix(".pyi").read_text(encoding="utf-8").splitlines():
        match line.split():
            case ["from", source, "import", name, *alias]:
                sources[alias[-1] if alias else name] = (source, name)
            case [alias, "=", name]:
                sources[alias] = sources.pop(name)
            case [word, *_] if word.startswith('"""'):
                public = len(sources)
    module.__dict__["_sources"] = sources
    module.__class__ = LazyPackage
    return list(sources)[:public]
