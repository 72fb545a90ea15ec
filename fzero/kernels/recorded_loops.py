"""C++ loops that a record of calls has in place of torch's operators, with the same bits.

An operator of torch takes 2 us where its code lies in a cache, and 15 to 30 after the weights of a layer went through
it. A loop serves the tensors of the call that is recorded; None says that it does not.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.core import RecordedLoop, compile_cache
from fzero.kernels.custom_operator import address, cpp_runs

ADDITIONS = {torch.float32: "add_float32", torch.bfloat16: "add_bfloat16"}


def _add(args: Sequence[Any], out: Tensor) -> Callable[[], Any] | None:
    """out = a + b, of one shape and dtype."""
    if not all(isinstance(x, Tensor) and x.dtype == out.dtype and x.shape == out.shape for x in args):
        return None
    if out.dtype not in ADDITIONS or not _cpp_serves(*args, out):
        return None
    return _bind_addresses(ADDITIONS[out.dtype], (*args, out), out.numel())


def _copy_rows(args: Sequence[Any], out: Tensor) -> Callable[[], Any] | None:
    """table[indices] = rows, in place."""
    table, dim, indices, rows = args
    if dim != 0 or indices.dtype != torch.int64 or rows.dtype != table.dtype or not _cpp_serves(table, indices, rows):
        return None
    n = len(indices)
    copy = _bind_addresses("copy_rows", (table, indices, rows), n, rows.nbytes // max(1, n), len(table))

    def call() -> None:
        if (i := copy()) != n:
            raise IndexError(f"row {indices[i]} of a tensor of {len(table)} rows")

    return call


def _cpp_serves(*tensors: Tensor) -> bool:
    return all(x.is_contiguous() for x in tensors) and not cpp_runs(*tensors)


def _bind_addresses(name: str, tensors: Sequence[Tensor], *numbers: int) -> Callable[[], Any]:
    """A function of the library with its arguments."""
    function = getattr(compile_cache.library(__file__, compile_cache.EXACT), name)
    arguments = *(ctypes.c_void_p(address(x)) for x in tensors), *map(ctypes.c_int64, numbers)
    return functools.partial(function, *arguments)


RECORDED_LOOPS: dict[Any, RecordedLoop] = {
    torch.ops.aten.add.Tensor: _add,
    torch.ops.aten.index_copy_.default: _copy_rows,
}
