"""Imports of large packages, undisturbed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """A context in which Python does not look for garbage: torch's import makes a million objects and hardly any
    garbage, and looking takes a tenth of its time.

    >>> with without_collection():
    ...     import json
    >>> gc.isenabled()
    True
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
