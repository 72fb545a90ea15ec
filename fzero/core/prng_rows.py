"""Random numbers of rows that have a key each: row r is what `prng` draws by its key alone, whatever is beside it.

On a CPU they run in C++ (prng.cpp) from some calls on, with the same bits.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fzero.core import prng
from fzero.core.torch_private import get_current_dispatch_mode, peek_interpreter_stack

# A call by tensor operations takes a third of a millisecond, the compilation half a second.
_calls, _SOME_CALLS = 0, 1000


def fold_rows(keys: Tensor, data: Tensor) -> Tensor:
    """The keys (int64 [M, 2]) fold_in(keys[r], data[r]) of keys [M, 2] and numbers in [0, 2^63), int64 [M].

    >>> keys = prng.split(prng.key(0), 3)
    >>> bool((fold_rows(keys, torch.tensor([5, 6, 7]))[1] == prng.fold_in(keys[1], 6)).all())
    True
    """
    if not _in_cpp(keys, data):
        return prng.fold_in(keys, data)
    library, keys, data = prng._library(), keys.contiguous(), data.contiguous()
    assert library is not None
    out = torch.empty_like(keys)
    n, purpose = ctypes.c_int64(len(keys)), ctypes.c_int64(prng._FOLD_INT)
    library.fold(*(ctypes.c_void_p(x.data_ptr()) for x in (keys, data, out)), n, purpose)
    return out


def uniform_rows(
    keys: Tensor,
    n: int,
    low: float = 0.0,
    high: float = 1.0,
    *,
    dtype: torch.dtype = torch.float32,
    index: Tensor | None = None,
) -> Tensor:
    """[M, n] of `dtype` (float32 or float64): row r is prng.uniform(keys[r], (n,), low, high), keys int64 [M, 2].

    index: int64 [M, n], the elements' numbers instead of 0 to n - 1.

    >>> keys = prng.split(prng.key(0), 3)
    >>> bool((uniform_rows(keys, 4)[2] == prng.uniform(keys[2], (4,))).all())
    True
    """
    if not _in_cpp(keys, index):
        step = max(1, prng._CHUNK_ELSEWHERE // max(n, 1))
        rows = [
            _by_torch(keys[i : i + step], n, index if index is None else index[i : i + step])
            for i in range(0, len(keys), step)
        ]
        unit = torch.cat(rows) if rows else torch.empty(0, n, dtype=torch.float64, device=keys.device)
        return (low + (high - low) * unit).to(dtype)
    library, keys = prng._library(), keys.contiguous()
    assert library is not None
    index = None if index is None else index.contiguous()
    out = torch.empty(len(keys), n, dtype=dtype, device="cpu")
    call = prng._Draw(
        out=out.data_ptr(), index=None if index is None else index.data_ptr(), n=n, kind=prng._KINDS["uniform"],
        wide=dtype == torch.float64, threads=torch.get_num_threads(), start=low, length=high - low,
    )  # fmt: skip
    library.draw_rows(ctypes.byref(call), ctypes.c_void_p(keys.data_ptr()), ctypes.c_int64(len(keys)))
    return out


def _by_torch(keys: Tensor, n: int, index: Tensor | None) -> Tensor:
    """The uniform values in (0, 1), float64 [M, n]."""
    keys = keys[:, None]
    if index is not None:
        return prng._uniform01(prng._words(keys, index.shape, 0, index))
    block = torch.arange((n + 3) // 4, dtype=torch.int64, device=keys.device)
    words = torch.stack(prng.philox((block, 0, 0, prng._DRAW), keys), -1)
    return prng._uniform01(words.reshape(len(keys), -1)[:, :n])


def _in_cpp(*tensors: Tensor | None) -> bool:
    """Whether the C++ serves: plain CPU tensors, and no transform, mode or tracing is active."""
    global _calls
    plain = all(x is None or (type(x) is Tensor and x.device.type == "cpu") for x in tensors)
    if not plain or peek_interpreter_stack() is not None or get_current_dispatch_mode() is not None:
        return False
    if torch.compiler.is_compiling():
        return False
    _calls += 1
    return _calls > _SOME_CALLS and prng._library() is not None
