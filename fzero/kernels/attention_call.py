"""What a call of attention must have, whichever form serves it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def expect_attention(q: Any, k: Any, v: Any, *_: Any, scale: Any = None, documents: Any = None, **options: Any) -> None:
    """Raise ValueError unless q [B, T, H, K], k [B, S, G, K] and v [B, S, G, V] fit together, H being a multiple of G.

    scale: a number; one that is learned multiplies q. documents: a tensor of whole numbers.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4 or not x.dtype.is_floating_point or x.dtype != q.dtype:
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"attention: {name} is {got}; give tensors [B, T, heads, K] of one floating dtype")
    (b, _t, heads, size), (groups,) = q.shape, k.shape[2:3]
    if k.shape[0] != b or k.shape[3] != size or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"attention: q is {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}; k and v have q's rows, and as "
            "many tokens and heads as each other, and k the size of q's heads"
        )
    if not groups or heads % groups or not size:
        raise ValueError(
            f"attention: q has {heads} heads of {size} and k {groups}; give a multiple of k's heads, of 1 element or "
            "more"
        )
    if isinstance(scale, Tensor) or not (scale is None or (isinstance(scale, int | float) and math.isfinite(scale))):
        raise ValueError(f"attention: scale is {scale!r}; give a finite number, and multiply q by one that is learned")
    if documents is not None and not (
        isinstance(documents, Tensor) and documents.dim() == 2 and not documents.dtype.is_floating_point
    ):
        got = (
            f"{documents.dtype} {list(documents.shape)}" if isinstance(documents, Tensor) else type(documents).__name__
        )
        raise ValueError(f"attention: documents are {got}; give a tensor of whole numbers, [B, T]")


def widened(x: Tensor) -> Tensor:
    """x in float32 or wider: products of narrow numbers are exact there, so that no score is rounded before its
    softmax."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
