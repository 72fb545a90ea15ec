"""Counter-based random numbers: element e of a leaf depends on the key, the leaf's name and e only.

Words come from Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.3) in
integer tensor operations, the same on every device, under vmap and inside a compiled graph. Element e is word `e % 4`
of the block with counter `e // 4`; a slice is drawn by the global indices of its elements.

Floating values use only +, -, *, /, integer operations, and a square root corrected by these, whose rounding IEEE 754
defines; log and cos of a math library differ between the body and the tail of a loop. So a slice has the bits of that
part of the whole. On a CPU large draws run in C++ (prng.cpp), with the same bits.

A key is an int64 tensor [2] of two 32-bit words.

The inverse of the normal distribution function: Wichura 1988, "Algorithm AS 241: the percentage points of the normal
distribution", routine PPND16 (relative error about 1e-16).
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

from fzero.core import compile_cache
from fzero.core.device import kind_of
from fzero.core.torch_private import get_current_dispatch_mode, peek_interpreter_stack

# Highest power first: central region, then the two tails.
CENTRE = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)  # fmt: skip


NEAR = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
     3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0),
)  # fmt: skip


FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)  # fmt: skip


def rational(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Tensor) -> Tensor:
    """The quotient of two polynomials at x, by Horner's rule."""
    values = []
    for poly in coefficients:
        value = x * poly[0] + poly[1]
        for c in poly[2:]:
            value = value * x + c
        values.append(value)
    return values[0] / values[1]


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive float64 values by exact steps only, absolute error below 1e-14 |log x| + 1e-15."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [1/2, 1)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    exponent = (exponent - low.to(torch.int32)).to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)  # |s| <= 0.1716: log m = 2 artanh s
    s2 = s * s
    series = torch.full_like(s, 1.0 / 19.0)
    for k in range(17, 0, -2):
        series = series * s2 + 1.0 / k
    return exponent * math.log(2.0) + 2.0 * s * series


def sqrt(x: Tensor) -> Tensor:
    """Square root of positive float64 values, rounded to nearest; torch's own (MKL) is wrong in the last bit for one
    value in 170.
    """
    root = torch.sqrt(x)
    # The remainder x - root^2, computed exactly from the root's two halves of 26 bits (Dekker's splitting).
    high = root * 134217729.0
    high = high - (high - root)
    low = root - high
    remainder = ((x - high * high) - 2.0 * high * low) - low * low
    return root + remainder / (2.0 * root)


def ndtri(p: Tensor) -> Tensor:
    """The standard normal values below which lies the fraction p of the distribution; float64, p in (0, 1)."""
    q = p - 0.5
    centre = q * rational(CENTRE, 0.180625 - q * q)
    r = sqrt(-log(torch.where(q < 0, p, 1.0 - p)))
    tail = torch.where(r <= 5.0, rational(NEAR, r - 1.6), rational(FAR, r - 5.0))
    return torch.where(q.abs() <= 0.425, centre, torch.where(q < 0, -tail, tail))


_MASK = 0xFFFFFFFF  # the lower word of an int64
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
        offsets = (first & 3) + torch.arange(n, dtype=torch.int64, device=key.device)
        return words[offsets].reshape(shape)
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
    threshold = round(p * 2.0**32)
    if (out := _in_cpp("bernoulli", key, shape, torch.bool, first, index, below=threshold)) is not None:
        return out
    return _words(key, shape, first, index) < threshold


def _elements(value, key, shape, dtype, first, index) -> Tensor:
    n, chunk = math.prod(shape), _CHUNK.get(kind_of(key), _CHUNK_ELSEWHERE)
    if n <= chunk or index is not None or isinstance(first, Tensor):
        return value(_words(key, shape, first, index)).to(dtype)
    parts = []
    for start in range(0, n, chunk):
        parts.append(value(_words(key, (min(chunk, n - start),), first + start, None)).to(dtype))
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
        high, low = x >> half, x & mask
        for i in range(6):
            zero = torch.zeros_like(low)
            high, low = low, high ^ (philox((low, zero + i, zero, zero + _ROUND), key)[0] & mask)
        return (high << half) | low

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
        return compile_cache.library_by_gcc(__file__, compile_cache.EXACT) if shutil.which("g++") else None
    except (RuntimeError, OSError) as error:
        warnings.warn(
            f"random numbers are drawn without C++, with the same bits and twenty times as slowly: {error}",
            stacklevel=2,
        )
        return None


def _plain(
    key: Tensor, shape: Sequence[int], first: int | Tensor, index: Tensor | None, numbers: Iterable[float]
) -> bool:
    """Whether the C++ can be used: plain CPU tensors and numbers, and no transform, mode or tracing is active."""
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
    buffer = torch.empty(min(n, _CHUNK_ELSEWHERE), dtype=torch.float32, device="cpu") if narrow else flat
    for start in range(0, n, buffer.numel()):
        chunk = buffer[: n - start]
        draw = _Draw(
            out=chunk.data_ptr(), index=None if index is None else index.data_ptr() + 8 * start, first=first + start,
            n=chunk.numel(),
            key0=key0, key1=key1, kind=_KINDS[kind], wide=dtype == torch.float64, threads=torch.get_num_threads(),
            **dict(zip(("centre", "near", "far"), _COEFFICIENTS)), **_NUMBERS | numbers,
        )  # fmt: skip
        library.draw(ctypes.byref(draw))
        if narrow:
            flat[start : start + chunk.numel()] = chunk
    return flat.reshape(shape)
