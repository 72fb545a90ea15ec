"""Packages: those that only some features need, and names of ours that load when first used.

The former are imported where a feature is used, and named where they are missing. Our names are those that
`__init__.pyi` beside a package's `__init__.py` lists (SPEC 1). The package lazy_loader does this too, but not for a
name that is also a module's (optim.adamw).
"""

from __future__ import annotations

import importlib
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


# Each package: what needs it, and what a machine without it does instead.
OPTIONAL = {
    "crc32c": ("checksums of checkpoints and corpora", ""),  # "": fzero/core/digest.py knows
    "zstandard": ("texts in .zst files, train.compress = zstd", "those are refused"),
    "tokenizers": ("every tokenizer but bytes", "those are refused"),
    "jinja2": ("chat templates", "conversations are refused"),
    "tensorstore": ("states on disks (memory nvme), folders in object stores (s3://, gs://)", "those are refused"),
    "matplotlib": ("pictures and reports", "a run ends without pictures, report is refused"),
    "tqdm": ("progress bars", "lines instead"),
    "pyarrow": ("texts in .parquet and .arrow files", "those are refused"),
    "llguidance": ("grammars of drawn texts", "those are refused"),
    "tensorboard": ("logging beside metrics.jsonl", "refused"),
    "wandb": ("logging beside metrics.jsonl", "refused"),
    "lm_eval": ("fzero evaluate", "refused"),
    "transformers": ("a check of imports and exports (tests)", ""),
    "triton": ("CUDA kernels", "those of PyTorch instead, slower"),
}


def installed(name: str) -> bool:
    """Whether a package can be imported here; it is not imported.

    >>> installed("torch"), installed("no_such_package")
    (True, False)
    """
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # what Python says of a module that is blocked, or of a stand-in for one
        return False


def load(name: str, use: str) -> ModuleType:
    """The module `name`; raises ValueError with `use`, which needs it, such as a file's name, where it is missing.

    >>> zstandard = load("zstandard", "text.zst")
    >>> load("no_such_package", "text.zst")
    Traceback (most recent call last):
    ValueError: text.zst: this needs the package no_such_package; pip install no_such_package
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if missing := missing_package(error):
            raise ValueError(explain(missing, use)) from None
        raise
    except ImportError as error:
        raise ValueError(
            f"{use}: the package {name} is here and does not load ({error}); remove it, and pip install {name}"
        ) from None


def missing_package(error: ModuleNotFoundError) -> str:
    """The package that an import did not find; "" for a module of one that is here."""
    name = (error.name or "").partition(".")[0]
    return "" if installed(name) else name


def explain(package: str, use: str) -> str:
    """The line of an error for a package that is missing."""
    return f"{use}: this needs the package {package}; pip install {package}"
