"""Largest magnitudes that a kernel finds of what it writes (core.graph_passes says for whom and where).

A magnitude is compared by the bits of its float32, which are ordered as magnitudes are, NaN above infinity.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fzero.kernels.optional_triton import tl, triton

PART = 256  # the most numbers of a row whose largest magnitude a kernel of flat blocks keeps


@triton.jit
def bits_of(x):
    """The bits of |x| for x as it is stored, int32."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def store_largest(MOST, indices, bits, mask):
    """Store the magnitudes with these bits, which round to themselves in the dtype that they come from."""
    tl.store(MOST + indices, bits.to(tl.float32, bitcast=True).to(MOST.dtype.element_ty), mask=mask)


def segment_length(x: Tensor) -> int:
    """The length of the parts of a row of x [..., N]: a power of two, at most PART, that divides N.

    >>> part_of(torch.empty(2, 14336)), part_of(torch.empty(2, 48))
    (256, 16)
    """
    return math.gcd(x.shape[-1], PART) if x.dim() and x.shape[-1] else 1


def largest_like(x: Tensor, segment_size: int | None = None) -> Tensor:
    """An empty tensor [rows, parts] for the largest magnitudes of the parts of x [..., N], or of whole rows."""
    parts = 1 if segment_size is None else x.shape[-1] // segment_size
    return torch.empty((math.prod(x.shape[:-1]), parts), dtype=x.dtype, device=x.device)
