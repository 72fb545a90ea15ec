"""Counter-based random numbers: element e of a leaf depends on the key, the leaf's name and e only.

Words come from Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.3) in
integer tensor operations, so they are the same on every device, under vmap and inside a compiled graph. Element e is
word `e % 4` of the block with counter `e // 4`. To draw a slice of a leaf, give the global indices of its elements; the
rest is not drawn.

Floating values use only +, -, *, /, integer operations, and a square root corrected by these (torch's own on a CPU is
sometimes wrong in the last bit). IEEE 754 defines the rounding of each of these, whereas log and cos of a math library
differ between the vectorised body and the scalar tail of a loop. So a slice has the same bits as that part of the
whole.

On a CPU large draws run in C++ (prng.cpp): the same operations, so the same bits, twenty times as fast.

A key is an int64 tensor [2] of two 32-bit words.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import shutil
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fzero.core import cpp
from fzero.core.device import kind_of
from fzero.core.inverse_normal import CENTRE, FAR, NEAR, ndtri
from fzero.core.torch_private import get_current_dispatch_mode, peek_interpreter_stack

_MASK = 0xFFFFFFFF
# Elements drawn at a time: about forty temporaries of this size fit in a CPU's cache, and leave a GPU's memory free.
_CHUNK = {"cpu": 1 << 15}
_CHUNK_ELSEWHERE = 1 << 22
# _drawn counts the elements drawn on the CPU by calls for at least _SOME; from _MANY on the C++ is compiled (half a
# second).
_drawn, _SOME, _MANY = 0, 1 << 10, 1 << 22


def philox(counter: Sequence[Tensor | int], key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four 32-bit words (int64 tensors) of Philox4x32-10 for a counter of four 32-bit words, low word first.

    Shapes: the counter's words broadcast together; `key` is [2] (or [..., 2] with leading dims that broadcast with the
    counter).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key[..., 0], key[..., 1]
    for _ in range(10):
        # The product of two 32-bit words wraps around in int64, but its 64 bits are right.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    # The key is a tensor, and two rounds bring it into every word.
    assert isinstance(c0, Tensor) and isinstance(c1, Tensor) and isinstance(c2, Tensor) and isinstance(c3, Tensor)
    return c0, c1, c2, c3


def key(seed: int, device: torch.device | str | None = None) -> Tensor:
    """The key (int64 [2]) of a seed in [0, 2^64)."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is {seed}; it must be in [0, 2^64)")
    words = torch.tensor([seed & _MASK, seed >> 32], dtype=torch.int64)
    return words if device is None else words.to(device)


def _hash_words(name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


# The counter's high word states the purpose of a block, so that derived keys never coincide with drawn words.
_FOLD_INT, _FOLD_NAME, _SPLIT, _DRAW, _ROUND = 1, 2, 3, 0, 4


def fold_in(key: Tensor, data: int | str | Tensor) -> Tensor:
    """A new key from a key and an integer in [0, 2^63) (a tensor too) or a name."""
    if isinstance(data, int) and not 0 <= data < 1 << 63:
        raise ValueError(f"fold_in: {data} is outside [0, 2^63)")
    if isinstance(data, str):
        lo, hi = _hash_words(data)
        purpose = _FOLD_NAME
    else:
        lo, hi, purpose = data & _MASK, (data >> 32) & _MASK, _FOLD_INT
    zero = torch.zeros_like(key[..., 0])
    words = philox((zero + lo, zero + hi, zero, zero + purpose), key)
    return torch.stack(words[:2], -1)


def fold_in_all(key: Tensor, names: Sequence[str], n: int) -> Tensor:
    """The keys (int64 [n, names, 2]) fold_in(fold_in(key, name), i) of all names and of i = 0 .. n - 1, in as many
    operations as two of them."""

    def column(words: Iterable[int]) -> Tensor:  # a copy from the host would wait for a GPU
        return torch.stack([torch.full((), word, dtype=torch.int64, device=key.device) for word in words])

    lo, hi = map(column, zip(*map(_hash_words, names)))
    zero = torch.zeros_like(lo)
    named = torch.stack(philox((lo, hi, zero, zero + _FOLD_NAME), key)[:2], -1)
    return fold_in(named[None], torch.arange(n, dtype=torch.int64, device=key.device)[:, None])


def split(key: Tensor, n: int) -> Tensor:
    """Return `n` new keys, int64 [n, 2]."""
    counter = torch.arange(n, dtype=torch.int64, device=key.device)
    zero = torch.zeros_like(counter)
    return torch.stack(philox((counter, zero, zero, zero + _SPLIT), key)[:2], -1)


def bits(key: Tensor, shape: Sequence[int], *, first: int | Tensor = 0, index: Tensor | None = None) -> Tensor:
    """The 32-bit words (int64, in [0, 2^32)) of the elements with global indices first, first + 1, ..., as a tensor of
    `shape`.

    If `index` (int64, of `shape`) is given, it holds the global indices instead: any slice, in any order.
    """
    if (out := _in_cpp("bits", key, shape, torch.int64, first, index)) is not None:
        return out
    return _words(key, shape, first, index)


def _words(key: Tensor, shape: Sequence[int], first: int | Tensor, index: Tensor | None) -> Tensor:
    if index is not None:
        words = torch.stack(philox((*_block(index >> 2), 0, _DRAW), key), -1)
        return torch.gather(words, -1, (index & 3).unsqueeze(-1)).squeeze(-1)
    n = math.prod(shape)
    if isinstance(first, Tensor) or first % 4:
        # Draw whole blocks of four around the range, because it may begin inside a block.
        block = (first >> 2) + torch.arange(n // 4 + 2, dtype=torch.int64, device=key.device)
        words = torch.stack(philox((*_block(block), 0, _DRAW), key), -1).reshape(-1)
        take = (first & 3) + torch.arange(n, dtype=torch.int64, device=key.device)
        return words[take].reshape(shape)
    block = (first >> 2) + torch.arange((n + 3) // 4, dtype=torch.int64, device=key.device)
    words = torch.stack(philox((*_block(block), 0, _DRAW), key), -1)
    return words.reshape(-1)[:n].reshape(shape)


def _block(block: Tensor) -> tuple[Tensor, Tensor]:
    return block & _MASK, (block >> 32) & _MASK


def _uniform01(words: Tensor) -> Tensor:
    # float64, in the open interval (0, 1), symmetric about 1/2, exact.
    return (words.to(torch.float64) + 0.5) * 2.0**-32


def uniform(
    key: Tensor,
    shape: Sequence[int],
    low: float = 0.0,
    high: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    first: int | Tensor = 0,
    index: Tensor | None = None,
) -> Tensor:
    """Uniform values in [low, high] of `dtype`: the float64 value (word + 1/2) / 2^32, scaled, then rounded."""
    if (out := _in_cpp("uniform", key, shape, dtype, first, index, start=low, length=high - low)) is not None:
        return out
    return _elements(lambda w: low + (high - low) * _uniform01(w), key, shape, dtype, first, index)


def normal(
    key: Tensor,
    shape: Sequence[int],
    mean: float = 0.0,
    std: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    first: int | Tensor = 0,
    index: Tensor | None = None,
) -> Tensor:
    """Normal values: the inverse of the normal distribution function at the element's uniform value; |z| <= 6.34."""
    if (out := _in_cpp("normal", key, shape, dtype, first, index, mean=mean, std=std)) is not None:
        return out
    return _elements(lambda w: mean + std * ndtri(_uniform01(w)), key, shape, dtype, first, index)


def truncated_normal(
    key: Tensor,
    shape: Sequence[int],
    mean: float = 0.0,
    std: float = 1.0,
    *,
    bounds: tuple[float, float] = (-2.0, 2.0),
    dtype: torch.dtype = torch.float32,
    first: int | Tensor = 0,
    index: Tensor | None = None,
) -> Tensor:
    """Normal values conditioned on low <= z <= high, then `mean + std * z`; bounds: (low, high), in units of std."""
    low, high = bounds
    if not low < high:
        raise ValueError(f"truncated_normal: low is {low} and high is {high}; low must be the smaller")
    p_low, p_high = (0.5 * math.erfc(-z / math.sqrt(2.0)) for z in (low, high))
    numbers = {"start": p_low, "length": p_high - p_low, "mean": mean, "std": std, "low": low, "high": high}
    if (out := _in_cpp("normal", key, shape, dtype, first, index, **numbers)) is not None:
        return out

    def value(words: Tensor) -> Tensor:
        return mean + std * ndtri(p_low + (p_high - p_low) * _uniform01(words)).clamp(low, high)

    return _elements(value, key, shape, dtype, first, index)


def bernoulli(
    key: Tensor, p: float, shape: Sequence[int], *, first: int | Tensor = 0, index: Tensor | None = None
) -> Tensor:
    """Bool values, true with probability `p` (to within 2^-32): word < p 2^32."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"bernoulli: p is {p}; it must be in [0, 1]")
    below = round(p * 2.0**32)
    if (out := _in_cpp("bernoulli", key, shape, torch.bool, first, index, below=below)) is not None:
        return out
    return _words(key, shape, first, index) < below


def _elements(value, key, shape, dtype, first, index) -> Tensor:
    n, most = math.prod(shape), _CHUNK.get(kind_of(key), _CHUNK_ELSEWHERE)
    if n <= most or index is not None or isinstance(first, Tensor):
        return value(_words(key, shape, first, index)).to(dtype)
    parts = []
    for start in range(0, n, most):
        parts.append(value(_words(key, (min(most, n - start),), first + start, None)).to(dtype))
    return torch.cat(parts).reshape(shape)


def permutation(key: Tensor, n: int, index: Tensor) -> Tensor:
    """The images (int64, shape of `index`) of `index` under a pseudo-random bijection of range(n), in O(len(index))
    whatever n is.

    A Feistel network of six Philox rounds over 2 ceil(log2(n) / 2) bits; images outside range(n) are mapped again until
    they are inside (cycle walking; Black & Rogaway 2002, "Ciphers with arbitrary finite domains", method 2).
    """
    if not 1 <= n <= 1 << 62:
        raise ValueError(f"permutation: n is {n}; it must be in [1, 2^62]")
    if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < n):
        raise ValueError(f"permutation: an index is outside range({n})")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1

    def feistel(x: Tensor) -> Tensor:
        left, right = x >> half, x & mask
        for i in range(6):
            zero = torch.zeros_like(right)
            left, right = right, left ^ (philox((right, zero + i, zero, zero + _ROUND), key)[0] & mask)
        return (left << half) | right

    image = feistel(index.reshape(-1))
    while (outside := torch.nonzero(image >= n)[:, 0]).numel():
        image[outside] = feistel(image[outside])
    return image.reshape(index.shape)


class _Draw(ctypes.Structure):
    """The struct Draw of prng.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "index")),
        *((name, ctypes.c_int64) for name in ("first", "n", "key0", "key1", "kind", "wide", "below", "threads")),
        *((name, ctypes.c_double) for name in ("start", "length", "mean", "std", "low", "high")),
        *((name, ctypes.c_double * 16) for name in ("centre", "near", "far")),
    ]


# Neutral values of the parameters that a kind of draw does not use.
_NUMBERS = {"start": 0.0, "length": 1.0, "mean": 0.0, "std": 1.0, "low": -math.inf, "high": math.inf, "below": 0}
_KINDS = {"bits": 0, "bernoulli": 1, "uniform": 2, "normal": 3}
_WRITTEN = (torch.float32, torch.float64)
_NARROWED = (torch.bfloat16, torch.float16)  # rounded from float32, as torch does
_COEFFICIENTS = [(ctypes.c_double * 16)(*top, *bottom) for top, bottom in (CENTRE, NEAR, FAR)]


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return cpp.library_by_gcc(__file__, cpp.EXACT) if shutil.which("g++") else None
    except (RuntimeError, OSError) as error:
        warnings.warn(
            f"random numbers are drawn without C++, with the same bits and twenty times as slowly: {error}",
            stacklevel=2,
        )
        return None


def _plain(
    key: Tensor, shape: Sequence[int], first: int | Tensor, index: Tensor | None, numbers: Iterable[float]
) -> bool:
    """Whether the C++ can be used: plain CPU tensors and numbers, and no transform, dispatch mode or tracing is
    active.
    """
    return (
        all(
            type(x) is Tensor and x.device.type == "cpu" and x.dtype == torch.int64
            for x in (key, index)
            if x is not None
        )
        and type(first) is int
        and 0 <= first < 1 << 62
        and all(isinstance(x, int | float) for x in numbers)
        and peek_interpreter_stack() is None
        and get_current_dispatch_mode() is None
        and not torch.compiler.is_compiling()
        and (index is None or index.shape == torch.Size(shape))
        and key.shape == (2,)
        and all(0 <= word <= _MASK for word in key.tolist())
    )


def _in_cpp(
    kind: str,
    key: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    first: int | Tensor,
    index: Tensor | None,
    **numbers: float,
) -> Tensor | None:
    """Draw the elements in C++; None if tensor operations must draw them."""
    global _drawn
    n = math.prod(shape)
    narrow = dtype in _NARROWED
    if not (narrow or dtype in _WRITTEN or kind in ("bits", "bernoulli")):
        return None
    if n < _SOME or not _plain(key, shape, first, index, numbers.values()):
        return None
    _drawn += n
    if _drawn < _MANY or (library := _library()) is None:
        return None
    key0, key1 = key.tolist()
    index = None if index is None else index.contiguous()
    flat = torch.empty(n, dtype=dtype, device="cpu")
    room = torch.empty(min(n, _CHUNK_ELSEWHERE), dtype=torch.float32, device="cpu") if narrow else flat
    for start in range(0, n, room.numel()):
        part = room[: n - start]
        draw = _Draw(
            out=part.data_ptr(), index=None if index is None else index.data_ptr() + 8 * start, first=first + start,
            n=part.numel(),
            key0=key0, key1=key1, kind=_KINDS[kind], wide=dtype == torch.float64, threads=torch.get_num_threads(),
            **dict(zip(("centre", "near", "far"), _COEFFICIENTS)), **_NUMBERS | numbers,
        )  # fmt: skip
        library.draw(ctypes.byref(draw))
        if narrow:
            flat[start : start + part.numel()] = part
    return flat.reshape(shape)
