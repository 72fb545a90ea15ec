"""Causal attention with patterns and document masks.

    out[t] = sum_s softmax_s(scale q[t] . k[s]) v[s]      over the s that query t may see

With a cap c the score y = scale q[t] . k[s] becomes c tanh(y / c) (Gemma Team 2024, "Gemma 2", arXiv:2408.00118,
section 2.1). With a sink, a logit of each query head, the softmax has one more share, of no value: see
attention_sinks.py.

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
from fzero.kernels.attention_blocked import MAX_BLOCKS, MIN_BLOCK, blocked_attention
from fzero.kernels.attention_call import expect_attention, expect_with_lse, widened
from fzero.kernels.attention_flash import flash_forward
from fzero.kernels.attention_flash_backward import flash_backward
from fzero.kernels.attention_pattern import FULL, Pattern, visible_mask
from fzero.kernels.attention_sinks import attend_by, softmax
from fzero.kernels.cross_entropy_rows import cap_logits
from fzero.kernels.op_function import Fused, on_cuda, triton_runs
from fzero.kernels.registry import Form, Op

__all__ = ["FULL", "Pattern", "attention", "attention_with_lse"]
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
    scores = _scores(q, k, visible_mask(pattern, key[s - t :], key, documents), scale, cap)
    out = torch.einsum("bgrts,bsgk->btgrk", softmax(scores, sinks).to(v.dtype), v)
    return rearrange(out, "b t g r k -> b t (g r) k")


def _scores(q: Tensor, k: Tensor, mask: Tensor, scale: float | None, cap: float = 0.0) -> Tensor:
    """[B, G, R, T, S] in float32 or wider, -inf where `mask` [1 or B, T, S] is not."""
    q = rearrange(q, "b t (g r) k -> b g r t k", g=k.shape[2])
    scores = torch.einsum("bgrtk,bsgk->bgrts", widened(q), widened(k))
    scores = cap_logits(scores * (q.shape[-1] ** -0.5 if scale is None else scale), cap)
    return scores.masked_fill(~mask[:, None, None], float("-inf"))


def reference_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    query_documents: Tensor | None = None,
    scale: float | None = None,
    query_start: int | None = None,
    key_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return (out, the log-sum-exp of each query's scores, float32 or wider [B, H, T]) for queries and keys at any
    positions.

    Query i is at position query_start + i, key j at key_start + j; by default the queries are the last T of the keys'
    positions. If query_start >= key_start + S - 1, a full pattern sees all keys. documents: int [B, S], of the keys;
    query_documents: int [B, T], by default those of the keys at the queries' positions. A query that sees nothing has
    out 0, lse -inf and no gradient. So the parts of one softmax over several sets of keys can be joined: out = sum_i
    exp(lse_i - lse) out_i with lse = logsumexp_i lse_i.

    Raises ValueError if the documents of the queries are unknown.
    """
    t, s = q.shape[1], k.shape[1]
    query_start = _query_start(q, k, query_start, key_start)
    query, key = (torch.arange(start, start + n, device=q.device) for start, n in ((query_start, t), (key_start, s)))
    mask = pattern.sees(query[:, None], key[None, :])[None]
    if documents is not None:
        query_documents = _query_documents(documents, query_documents, query_start - key_start, t)
        mask = mask & (query_documents[:, :, None] == documents[:, None, :])
    scores = _scores(q, k, mask, scale)
    some = mask.any(-1)[:, None, None]
    scores = torch.where(some[..., None], scores, 0.0)
    p = torch.where(some[..., None], torch.softmax(scores, -1), 0.0)
    lse = torch.where(some, torch.logsumexp(scores, -1), float("-inf"))
    out = torch.einsum("bgrts,bsgk->btgrk", p.to(v.dtype), v)
    return rearrange(out, "b t g r k -> b t (g r) k"), rearrange(lse, "b g r t -> b (g r) t")


def _query_start(q: Tensor, k: Tensor, query_start: int | None, key_start: int) -> int:
    return key_start + k.shape[1] - q.shape[1] if query_start is None else query_start


def _query_documents(documents: Tensor, query_documents: Tensor | None, offset: int, t: int) -> Tensor:
    if query_documents is not None:
        return query_documents
    if not 0 <= offset <= documents.shape[1] - t:
        raise ValueError(
            f"attention: queries {offset} to {offset + t} are not among the {documents.shape[1]} keys; give "
            "query_documents"
        )
    return documents[:, offset : offset + t]


def fused_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **_: Any) -> Tensor:
    """`reference` without pattern or documents by torch's own fused kernel, for as many queries as keys."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: tuple[Tensor, ...],
    pattern: Pattern,
    scale: float | None,
    query_start: int,
    key_start: int,
    results: int,
    sinks: Tensor | None = None,
) -> Any:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    where = (pattern.numbers, scale, query_start, key_start)

    def forward(q: Tensor, k: Tensor, v: Tensor, *documents: Tensor) -> tuple[Tensor, Tensor]:
        return flash_forward(q, k, v, *(documents or (None, None)), *where)

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v, *documents, out, lse = saved
        g, h = grads if results == 2 else (grads[0], None)
        return flash_backward(g, h, q, k, v, out, lse, *(documents or (None, None)), *where)

    if results == 1:
        return attend_by("flash attention", forward, backward, (q, k, v, *documents), sinks)
    run = Fused("flash attention", forward, backward, results, keep=lambda tensors, outputs: (*tensors, *outputs))
    return run(q, k, v, *documents)


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
    both = () if documents is None else (documents[:, offset:], documents)
    return _flash(q, k, v, both, pattern, scale, offset, 0, results=1, sinks=sinks)


def flash_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    query_documents: Tensor | None = None,
    scale: float | None = None,
    query_start: int | None = None,
    key_start: int = 0,
) -> tuple[Tensor, Tensor]:
    """`reference_with_lse` by the kernels of attention_flash.py."""
    query_start = _query_start(q, k, query_start, key_start)
    both = ()
    if documents is not None:
        both = (_query_documents(documents, query_documents, query_start - key_start, q.shape[1]), documents)
    return _flash(q, k, v, both, pattern, scale, query_start, key_start, results=2)


def _flash_serves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    scale: float | None = None,
    cap: float = 0.0,
    **options: Any,
) -> str:
    (b, t), s = q.shape[:2], k.shape[1]
    key_start = options.get("key_start", 0)
    query_start = _query_start(q, k, options.get("query_start"), key_start)
    documents = [x for x in (options.get("documents"), options.get("query_documents")) if x is not None]
    if why := attention_flash.serves(q, k, v, scale, cap):
        return why
    if any(x.shape != (b, n) for x, n in zip(documents, (s, t))):
        return f"documents are {[list(x.shape) for x in documents]}; they must be {[[b, s], [b, t]][: len(documents)]}"
    if min(query_start, key_start) < 0 or max(query_start + t, key_start + s, pattern.size) > MAX_POSITION:
        return (
            f"queries begin at {query_start} and keys at {key_start}; positions and a pattern's size must be in "
            "[0, 2^30]"
        )
    return triton_runs(q, k, v, *documents)


def _flash_preferred(q: Tensor, *rest: Tensor, **options: Any) -> str:
    return (
        "one query makes one tile of each head, which goes through the keys alone"
        if q.shape[1] == 1
        else on_cuda(q, *rest)
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


def _fused_preferred(q: Tensor, *rest: Tensor, **options: Any) -> str:
    """Measured on a CPU, forward and backward: blocked takes 0.5 to 1.0 of fused's time up to T = 1024, and more
    beyond.
    """
    if q.shape[1] > (1 if kind_of(q) == "cuda" else MIN_BLOCK * MAX_BLOCKS):
        return ""
    return "blocked takes 0.5 to 1.0 of its time on a CPU up to T = 1024"


def _blocked_preferred(q: Tensor, *rest: Tensor, **options: Any) -> str:
    return "" if q.shape[1] > 1 else "one query needs no blocks"


def _flops(q: Tensor, k: Tensor, v: Tensor, *, pattern: Pattern = FULL, **options: Any) -> int:
    """FLOPs of the two products over the pairs that pattern and causality allow; documents are ignored."""
    key_start = options.get("key_start", 0)
    start = _query_start(q, k, options.get("query_start"), key_start)
    before, seen = (pattern.pairs(start, q.shape[1], end) for end in (key_start, key_start + k.shape[1]))
    return 4 * q.shape[0] * q.shape[2] * q.shape[3] * (seen - before)


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
attention_with_lse = Op(
    "attention_with_lse",
    reference_with_lse,
    Form("triton", flash_attention_with_lse, supports=_flash_serves, prefers=on_cuda),
    flops=_flops,
    bytes=lambda q, k, v, **options: _bytes(q, k, v) + 4 * q.numel() // q.shape[-1],
    expect=expect_with_lse,
)
