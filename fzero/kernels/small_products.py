"""Whether torch's products of small tiles work on this CPU (AVX-512 or AMX), asked of torch itself in C++."""

from __future__ import annotations

import ctypes
import functools

import torch

from fzero.core import cpp


def _library() -> ctypes.CDLL:
    return cpp.library(__file__, cpp.CONTRACTED)


@functools.cache
def has_small_products(dtype: torch.dtype) -> bool:
    """Whether torch's `brgemm` takes this dtype here; False for others than bfloat16 and float32."""
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    return bool(getattr(_library(), f"works_{str(dtype).removeprefix('torch.')}")())
