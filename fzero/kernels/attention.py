"""Causal attention with patterns and document masks.

    out[t] = sum_s softmax_s(scale q[t] . k[s]) v[s]      over the s that query t may see

With a cap c the score y = scale q[t] . k[s] becomes c tanh(y / c) (Gemma Team 2024, "Gemma 2", arXiv:2408.00118,
section 2.1). With a sink, a logit of each query head, the softmax has one more share, of no value: see
attention_arguments.py.

A query sees the keys at positions up to its own that are in its document and that the pattern allows. `reference`
defines this.

Shapes: q [B, T, H, K], k and v [B, S, G, K] with H a multiple of G, out [B, T, H, K]; the queries are the last T of the
S positions.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from fzero.core.device import kind_of
from fzero.kernels import attention_flash, attention_library, attention_tiled
from fzero.kernels.attention_arguments import attend_by, expect_attention, softmax, widened
from fzero.kernels.attention_blocked import MAX_BLOCKS, MIN_BLOCK, blocked_attention
from fzero.kernels.attention_flash import flash_forward
from fzero.kernels.attention_flash_backward import flash_backward
from fzero.kernels.attention_pattern import FULL, Pattern, visible_mask
from fzero.kernels.cross_entropy_rows import cap_logits
from fzero.kernels.custom_operator import on_cuda, triton_runs
from fzero.kernels.registry import Form, Op

__all__ = ["FULL", "Pattern", "attention"]
MAX_POSITION = 2**30  # the kernels compute positions in 32 bits


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    scale: float | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition: compute all scores, mask them, and take the softmax in float32 or wider. Shapes as at the top of
    the file; documents int [B, S]; cap: of the scores, 0 for none; sinks [H].
    """
    t, s = q.shape[1], k.shape[1]
    key = torch.arange(s, device=q.device)
    mask = visible_mask(pattern, key[s - t :], key, documents)
    grouped = rearrange(q, "b t (g r) k -> b g r t k", g=k.shape[2])
    scores = torch.einsum("bgrtk,bsgk->bgrts", widened(grouped), widened(k))
    scores = cap_logits(scores * (q.shape[-1] ** -0.5 if scale is None else scale), cap)
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    out = torch.einsum("bgrts,bsgk->btgrk", softmax(scores, sinks).to(v.dtype), v)
    return rearrange(out, "b t g r k -> b t (g r) k")


def fused_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **_: Any) -> Tensor:
    """`reference` without pattern or documents by torch's own fused kernel, for as many queries as keys."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`reference` by the kernels of attention_flash.py."""
    offset = k.shape[1] - q.shape[1]
    document_pair = () if documents is None else (documents[:, offset:], documents)
    where = (pattern.numbers, q.shape[-1] ** -0.5 if scale is None else scale, offset, 0)

    def forward(q: Tensor, k: Tensor, v: Tensor, *documents: Tensor) -> tuple[Tensor, Tensor]:
        return flash_forward(q, k, v, *(documents or (None, None)), *where)

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v, *documents, out, lse = saved
        return flash_backward(grads[0], q, k, v, out, lse, *(documents or (None, None)), *where)

    return attend_by("flash attention", forward, backward, (q, k, v, *document_pair), sinks)


def _flash_serves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    scale: float | None = None,
    cap: float = 0.0,
    **options: Any,
) -> str:
    t, s = q.shape[1], k.shape[1]
    if reason := attention_flash.serves(q, k, v, scale, cap):
        return reason
    if t > s:
        return f"there are {t} queries of {s} positions; it takes at most as many"
    if max(s, pattern.size) > MAX_POSITION:
        return f"there are {s} keys and the pattern's size is {pattern.size}; both must be at most 2^30"
    return triton_runs(q, k, v) if documents is None else triton_runs(q, k, v, documents)


def _flash_preferred(q: Tensor, *tensors: Tensor, **options: Any) -> str:
    return (
        "one query makes one tile of each head, which goes through the keys alone"
        if q.shape[1] == 1
        else on_cuda(q, *tensors)
    )


def _blocked_serves(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    if q.shape[1] > k.shape[1]:
        return f"there are {q.shape[1]} queries of {k.shape[1]} positions; it takes at most as many"
    return "" if q.numel() else f"the queries {list(q.shape)} are empty, and blocks are not"


def _fused_serves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    **options: Any,
) -> str:
    if sinks is not None:
        return "it has no sinks"
    if pattern != FULL or documents is not None:
        return "it has neither patterns nor documents"
    if q.shape[1] != k.shape[1]:
        return f"there are {q.shape[1]} queries of {k.shape[1]} positions; it takes equal numbers"
    return "it does not cap scores" if cap else ""


def _fused_preferred(q: Tensor, *tensors: Tensor, **options: Any) -> str:
    """Measured on a CPU, forward and backward: blocked takes 0.5 to 1.0 of fused's time up to T = 1024, and more
    beyond.
    """
    if q.shape[1] > (1 if kind_of(q) == "cuda" else MIN_BLOCK * MAX_BLOCKS):
        return ""
    return "blocked takes 0.5 to 1.0 of its time on a CPU up to T = 1024"


def _blocked_preferred(q: Tensor, *tensors: Tensor, **options: Any) -> str:
    return "" if q.shape[1] > 1 else "one query needs no blocks"


def _flops(q: Tensor, k: Tensor, v: Tensor, *, pattern: Pattern = FULL, **options: Any) -> int:
    """FLOPs of the two products over the pairs that pattern and causality allow; documents are ignored."""
    pairs = pattern.pairs(k.shape[1] - q.shape[1], q.shape[1], k.shape[1])
    return 4 * q.shape[0] * q.shape[2] * q.shape[3] * pairs


def _bytes(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> int:
    return (2 * q.numel() + k.numel() + v.numel()) * q.element_size()


attention = Op(
    "attention",
    reference,
    Form("triton", flash_attention, supports=_flash_serves, prefers=_flash_preferred),
    *attention_library.forms(),
    Form("tiled", attention_tiled.tiled_attention, supports=attention_tiled.supports, prefers=attention_tiled.prefers),
    Form("fused", fused_attention, supports=_fused_serves, prefers=_fused_preferred),
    Form("blocked", blocked_attention, supports=_blocked_serves, prefers=_blocked_preferred),
    flops=_flops,
    bytes=_bytes,
    order=attention_library.order,
    expect=expect_attention,
)
