"""CRC-32C of bytes, the checksum of checkpoints and corpora: by the package crc32c, or without it by C++ of our own."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fzero.core import compile_cache

if TYPE_CHECKING:
    from collections.abc import Buffer  # from Python 3.12 on

Checksum = Callable[[Any, int], int]


def crc32c(data: Buffer, value: int = 0) -> int:
    """The CRC-32C, in [0, 2^32), of contiguous bytes: of an array, a memoryview, bytes, not copied.

    value: the checksum of the bytes before these. Raises ValueError for bytes that are not contiguous, and where there
    is nothing to compute it with.

    >>> crc32c(b"123456789") == crc32c(b"6789", crc32c(b"12345")) == 0xE3069283
    True
    """
    return _checksum()(data, value)


@functools.cache
def provider() -> str:
    """What computes checksums here: "crc32c" (the package), "C++", "google_crc32c", or "" for nothing."""
    if importlib.util.find_spec("crc32c"):
        with contextlib.suppress(ImportError):  # one that was built for another system
            importlib.import_module("crc32c")
            return "crc32c"
    if compile_cache.compiler():
        return "C++"
    return "google_crc32c" if importlib.util.find_spec("google_crc32c") else ""


@functools.cache
def _checksum() -> Checksum:
    """The function that computes checksums here."""
    match provider():
        case "crc32c":
            import crc32c

            return crc32c.crc32c
        case "C++":
            return by_cpp()
        case "google_crc32c":
            return by_google
    raise ValueError(
        "checksums of checkpoints and corpora: neither the package crc32c is installed nor a C++ compiler, g++ or "
        "clang++; pip install crc32c"
    )


def by_google(data: Buffer, value: int) -> int:
    """The checksum by the package google_crc32c, with Python's lock held."""
    import google_crc32c

    return google_crc32c.extend(value, _bytes_of(data))


def by_cpp(macro: str = "") -> Checksum:
    """The loop of crc32c.cpp, compiled at first use; it runs without Python's lock."""
    function = compile_cache.library(__file__, compile_cache.EXACT, macro).crc32c
    function.restype, function.argtypes = ctypes.c_uint32, [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32]

    def checksum(data: Buffer, value: int) -> int:
        array = _bytes_of(data)
        return function(array.__array_interface__["data"][0], array.size, value)

    return checksum


def _bytes_of(data: Buffer) -> np.ndarray:
    """The bytes of contiguous memory, as an array that only reads."""
    try:
        return np.frombuffer(memoryview(data).toreadonly(), np.uint8)
    except BufferError as error:
        raise ValueError(f"crc32c: {error}; give contiguous bytes") from None
