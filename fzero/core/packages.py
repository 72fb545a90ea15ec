"""Packages that only some features need: imported where a feature is used, and named where they are missing."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

# Each package: what needs it, and what a machine without it does instead.
OPTIONAL = {
    "crc32c": ("checksums of checkpoints and corpora", ""),  # "": fzero/core/crc32c.py knows
    "zstandard": ("texts in .zst files, train.compress = zstd", "those are refused"),
    "tokenizers": ("every tokenizer but bytes", "those are refused"),
    "jinja2": ("chat templates", "conversations are refused"),
    "tensorstore": ("states on disks (memory nvme), folders in object stores (s3://, gs://)", "those are refused"),
    "matplotlib": ("pictures and reports", "a run ends without pictures, report is refused"),
    "tqdm": ("progress bars", "lines instead"),
    "pyarrow": ("texts in .parquet and .arrow files", "those are refused"),
    "tensorboard": ("logging beside metrics.jsonl", "refused"),
    "wandb": ("logging beside metrics.jsonl", "refused"),
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
