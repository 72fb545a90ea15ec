"""Checksums: CRC-32C of bytes, of checkpoints and corpora, by the package crc32c or without it by C++ of our own; and
additive digests of tensors: a leaf's digest is the sum of the digests of its shards, however it is sharded.

The digest of a leaf is the sum modulo 2^64, over its elements, of

    z = bits + K1 (index + 1);  z = (z ^ (z >> 32)) K2;  z ^ (z >> 29)                       (each modulo 2^64)

where `bits` is the element's bit pattern as an unsigned integer and `index` its row-major index in the whole leaf. For
a fixed index the map is one to one, so a change of one element always changes the digest; other changes go unnoticed
with probability 2^-64. It is not cryptographic.

A sum of integers does not depend on the order, so a state has the same digest on every mesh, without sending it. Ref,
mixing steps: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import math
import shutil
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fzero.core import compile_cache, pytree
from fzero.core.copy_buckets import read_scalars

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
    """The loop of digest.cpp, compiled at first use; it runs without Python's lock."""
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


# Of SplitMix64: 2^64 over the golden ratio, and its first multiplier.
_K1, _K2, _MASK = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, (1 << 64) - 1
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtype by the bytes of an element
# Elements that the tensor operations process at a time. After _MANY elements in a process the C++ is compiled, which
# takes half a second.
_CHUNK = {"cpu": 1 << 15}
_CHUNK_ELSEWHERE = 1 << 22
_done, _MANY, _compiling = 0, 1 << 25, threading.Lock()


def digest(x: Tensor, shape: Sequence[int] | None = None, start: Sequence[int] | None = None) -> int:
    """The digest, in [0, 2^64), of a leaf, or of the block of one of this shape that begins at `start`."""
    return read_digests([start_digest(x, shape, start)])[0]


Started = int | Tensor  # a digest, or the int64 of its bits on a GPU


def start_digest(x: Tensor, shape: Sequence[int] | None = None, start: Sequence[int] | None = None) -> Started:
    """The same as `digest`, to be read by `read_digests`: the host does not wait for a GPU here."""
    if x.dtype not in DTYPES:
        raise ValueError(
            f"digest: {x.dtype} has none; there are {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
        )
    if (shape is None) != (start is None):
        raise ValueError("digest: shape and start of a block go together; give both, or neither for a whole leaf")
    leaf_shape, begin = tuple(x.shape if shape is None else shape), tuple((0,) * x.ndim if start is None else start)
    if not len(leaf_shape) == len(begin) == x.ndim or any(
        b < 0 or b + n > size for b, n, size in zip(begin, x.shape, leaf_shape)
    ):
        raise ValueError(
            f"digest: a block {list(x.shape)} at {list(begin)} is not inside a leaf of shape {list(leaf_shape)}"
        )
    steps = [math.prod(leaf_shape[dim + 1 :]) for dim in range(x.ndim)]
    return _start_strided(x, steps, sum(b * step for b, step in zip(begin, steps)))


def read_digests(started: Sequence[Started]) -> list[int]:
    """The digests, in [0, 2^64); those that a GPU sums are read by one copy, with one wait."""
    read = iter(read_scalars([value for value in started if isinstance(value, Tensor)]))
    return [int(next(read) if isinstance(value, Tensor) else value) & _MASK for value in started]


def digest_strided(x: Tensor, steps: Sequence[int], first: int) -> int:
    """The digest of elements of a leaf; `x[i, j, ...]` has the index first + i steps[0] + j steps[1] + ..."""
    return read_digests([_start_strided(x, steps, first)])[0]


def _start_strided(x: Tensor, steps: Sequence[int], first: int) -> Started:
    words = x.detach().view(_WORDS[x.dtype.itemsize])
    if not words.numel():
        return 0
    dims = _merge_dims(list(zip(words.shape, words.stride(), steps)))
    library = _library_if_worth(words)
    if library is None:
        return _digest_by_tensors(
            words.as_strided([d[0] for d in dims], [d[1] for d in dims]), [d[2] for d in dims], first
        )
    numbers = [(ctypes.c_int64 * len(dims))(*column) for column in zip(*dims)]
    return library.digest(ctypes.c_void_p(words.data_ptr()), words.element_size(), len(dims), *numbers, first)


def digest_tree(tree: pytree.Tree) -> dict[str, int]:
    """Return {name: digest} of the leaves of a tree of whole tensors."""
    leaves = pytree.named_leaves(tree)
    return dict(zip(leaves, read_digests([start_digest(leaf) for leaf in leaves.values()])))


def combine(digests: dict[str, int]) -> int:
    """The digest of named leaves in [0, 2^64), linear in theirs: each times an odd number of its name."""
    return sum(value * _odd(name) for name, value in digests.items()) & _MASK


@functools.cache
def _odd(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1


def _merge_dims(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge dims (size, stride in memory, stride in the whole leaf) that are contiguous in both."""
    out: list[tuple[int, int, int]] = []
    for size, skip, step in [d for d in dims if d[0] != 1] or [(1, 1, 1)]:
        if out and out[-1][1] == size * skip and out[-1][2] == size * step:
            size *= out.pop()[0]
        out.append((size, skip, step))
    return out


def _library_if_worth(words: Tensor) -> ctypes.CDLL | None:
    """The C++ library, or None if it cannot read these words or too few elements were digested so far."""
    global _done
    if words.device.type != "cpu" or type(words) is not Tensor:
        return None
    _done += words.numel()
    if _done < _MANY:
        return None
    with _compiling:
        return _library()


def prepare() -> None:
    """Compile the C++ now, before a long series of digests; otherwise the first large call compiles it."""
    with _compiling:
        _library()


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = compile_cache.library_by_gcc(__file__, compile_cache.EXACT) if shutil.which("g++") else None
    except (RuntimeError, OSError) as error:
        warnings.warn(f"digests are made without C++, the same ones and many times as slowly: {error}", stacklevel=2)
        return None
    if library is not None:
        library.digest.restype = ctypes.c_uint64
        pointer = ctypes.POINTER(ctypes.c_int64)
        library.digest.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            pointer,
            pointer,
            pointer,
            ctypes.c_int64,
        ]
    return library


def _digest_by_tensors(words: Tensor, steps: list[int], first: int) -> Tensor:
    """The digest of signed words by tensor operations, a 0-dim int64; the index is first + sum_d i_d steps[d]."""
    chunk = _CHUNK.get(words.device.type, _CHUNK_ELSEWHERE)
    if words.numel() > chunk:
        # Split along the longest dim, which makes few pieces of even size.
        dim = max(range(words.ndim), key=lambda d: words.shape[d])
        inner = words.numel() // words.shape[dim]
        length = max(1, chunk // inner)
        if length < words.shape[dim]:
            pieces = range(0, words.shape[dim], length)
            total = torch.zeros((), dtype=torch.int64, device=words.device)
            for i in pieces:
                block = words.narrow(dim, i, min(length, words.shape[dim] - i))
                total += _digest_by_tensors(block, steps, first + i * steps[dim])
            return total
    index = torch.full((), _signed(_K1 * (first + 1)), dtype=torch.int64, device=words.device)
    for dim, step in enumerate(steps):
        offsets = torch.arange(words.shape[dim], device=words.device) * _signed(_K1 * step)
        index = index.unsqueeze(-1) + offsets  # int64 products and sums wrap modulo 2^64
    z = words.to(torch.int64)
    z = (z if words.dtype == torch.int64 else z & ((1 << 8 * words.element_size()) - 1)) + index
    # int64 shifts are arithmetic: mask the copies of the sign bit.
    z = (z ^ ((z >> 32) & 0xFFFFFFFF)) * _signed(_K2)
    z = z ^ ((z >> 29) & ((1 << 35) - 1))
    return z.sum()


def _signed(value: int) -> int:
    """The int64 with the same 64 bits as an unsigned value."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
