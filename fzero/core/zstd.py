"""The package zstandard, imported where a .zst file or a compressed checkpoint is met."""

from __future__ import annotations

from types import ModuleType


def zstandard_for(what: str) -> ModuleType:
    """The module zstandard; raises ValueError with `what` needs it, such as the name of a file, where it is not
    installed.

    >>> zstandard_for("text.zst").decompress(zstandard_for("text.zst").compress(b"one"))
    b'one'
    """
    try:
        import zstandard
    except ModuleNotFoundError as error:
        if error.name != "zstandard":
            raise
        raise ValueError(f"{what}: this needs the package zstandard; pip install zstandard") from None
    return zstandard
