"""Attention: causal, with patterns and document masks, at any positions; and under block masks, which may look ahead.

    out[t] = sum_s softmax_s(scale q[t] . k[s]) v[s]      over the s that query t may see

With a cap c the score y = scale q[t] . k[s] becomes c tanh(y / c) (Gemma Team 2024, "Gemma 2", arXiv:2408.00118,
section 2.1). With a sink, a logit of each query head, the softmax has one more share, of no value: see
attention_arguments.py.

A query sees the keys at positions up to its own that are in its document and that the pattern allows; `reference`
defines this. The queries are the last T of the S positions, or both are at positions that are given. Under a block mask
a query sees the keys of the blocks that the mask has for its own (block_mask.py); padding is a document of its own. At
positions and under a mask a query that sees no key has out 0.

Shapes: q [B, T, H, K], k and v [B, S, G, K] with H a multiple of G, out [B, T, H, K].

`FORM_PASSES` gives a form's two passes on plain tensors, also for parts of one softmax over several sets of keys: (out,
the log-sum-exp of each query's scores), and the gradients from the log-sum-exp over all sets. Nothing of T times S
elements is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from fzero.core.device import kind_of
from fzero.kernels import (
    attention_arguments,
    attention_canonical,
    attention_flash,
    attention_library,
    attention_masked,
    attention_tiled,
)
from fzero.kernels.attention_arguments import (
    Positions,
    Scoring,
    attend_by,
    expect_attention,
    masked_scores,
    softmax,
)
from fzero.kernels.attention_flash import flash_forward, flash_forward_at
from fzero.kernels.attention_flash_backward import flash_backward, flash_backward_at
from fzero.kernels.attention_pattern import FULL, Pattern
from fzero.kernels.attention_tiled import (
    MAX_BLOCKS,
    MIN_BLOCK,
    blocked_attention,
    blocked_backward_at,
    blocked_forward_at,
    tiled_backward,
    tiled_forward,
)
from fzero.kernels.block_mask import BlockMask
from fzero.kernels.custom_operator import Fused, on_cuda, triton_runs
from fzero.kernels.registry import Form, Op, asked_for

MAX_POSITION = 2**30  # the kernels compute positions in 32 bits
Gradients = tuple[Tensor, Tensor, Tensor]


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    positions: Positions | None = None,
    mask: BlockMask | None = None,
    scale: float | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition: compute all scores, mask them, and take the softmax in float32 or wider. Shapes as at the top of
    the file; documents int [B, S]; positions: of queries and keys, and their documents, in place of `documents`; mask:
    in place of causality, pattern and positions; cap: of the scores, 0 for none; sinks [H].
    """
    t, s = q.shape[1], k.shape[1]
    if mask is not None:
        visible = mask.visible(t, s).to(q.device).expand(q.shape[2], -1, -1)
        pair_mask = visible.unflatten(0, (k.shape[2], -1))[None]
        if documents is not None:
            pair_mask = pair_mask & (documents[:, :, None] == documents[:, None, :])[:, None, None]
    else:
        places = positions or Positions.of_last(range(s - t, s), range(s), documents, q.device)
        pair_mask = places.mask(pattern)[:, None, None]
    scores = masked_scores(q, k, pair_mask, Scoring.of_call(q, pattern, scale, cap))
    if positions is None and mask is None:  # a query sees itself
        p = softmax(scores, sinks)
    else:
        has_key = pair_mask.any(-1, keepdim=True)
        p = torch.where(has_key, softmax(torch.where(has_key, scores, 0.0), sinks), 0.0)
    return rearrange(torch.einsum("bgrts,bsgk->btgrk", p.to(v.dtype), v), "b t g r k -> b t (g r) k")


# ---- the passes of forms --------------------------------------------------------------------------------------------


class FormPasses(NamedTuple):
    """The two passes of a form, on plain tensors: -> (out, lse), and -> (dq, dk, dv)."""

    forward: Callable[[Tensor, Tensor, Tensor, Positions, Scoring], tuple[Tensor, Tensor]]  # -> (out, lse)
    backward: Callable[..., Gradients]  # (q, k, v, positions, out, lse, g, scoring) -> (dq, dk, dv)


def _tiled_forward(q: Tensor, k: Tensor, v: Tensor, positions: Positions, scoring: Scoring) -> tuple[Tensor, Tensor]:
    wide = positions.query is not None
    return tiled_forward(q, k, v, *positions.rows(q.shape[0]), scoring.numbers, scoring.scale, scoring.cap, wide)


def _tiled_backward(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, out: Tensor, lse: Tensor, g: Tensor, scoring: Scoring
) -> Gradients:
    arguments = scoring.numbers, scoring.scale, scoring.cap, positions.query is not None
    return tiled_backward(q, k, v, *positions.rows(q.shape[0]), out, lse, g, *arguments)[:3]


def _last_queries(q: Tensor, k: Tensor, documents: Tensor | None, scoring: Scoring) -> tuple[Any, ...]:
    """The arguments of flash attention in order."""
    offset = k.shape[1] - q.shape[1]
    of_queries = None if documents is None else documents[:, offset:]
    return of_queries, documents, scoring.numbers, scoring.scale, offset, 0


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, positions: Positions, scoring: Scoring) -> tuple[Tensor, Tensor]:
    if positions.query is None:
        return flash_forward(q, k, v, *_last_queries(q, k, positions.key_documents, scoring))
    return flash_forward_at(q, k, v, *positions.rows(q.shape[0]), scoring.numbers, scoring.scale)


def _flash_backward(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, out: Tensor, lse: Tensor, g: Tensor, scoring: Scoring
) -> Gradients:
    if positions.query is None:
        return flash_backward(g, q, k, v, out, lse, *_last_queries(q, k, positions.key_documents, scoring))
    return flash_backward_at(g, q, k, v, out, lse, *positions.rows(q.shape[0]), scoring.numbers, scoring.scale)


FORM_PASSES = {
    "triton": FormPasses(_flash_forward, _flash_backward),
    "tiled": FormPasses(_tiled_forward, _tiled_backward),
    "blocked": FormPasses(blocked_forward_at, blocked_backward_at),  # at positions alone
}


def attend(
    form: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    positions: Positions | None = None,
    scale: float | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """`reference` by the passes of a form."""
    passes, scoring = FORM_PASSES[form], Scoring.of_call(q, pattern, scale, cap)
    places = positions or Positions(key_documents=documents)
    present = [x is not None for x in places]

    def places_of(tensors: Sequence[Tensor]) -> Positions:
        remaining = iter(tensors)
        return Positions(*(next(remaining) if is_present else None for is_present in present))

    def forward(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = passes.forward(q, k, v, places_of(tensors), scoring)
        return out.to(q.dtype), lse

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v, *tensors, out, lse = saved
        gradients = passes.backward(q, k, v, places_of(tensors), out, lse, *grads, scoring)
        return tuple(x.to(q.dtype) for x in gradients)

    tensors = q, k, v, *(x for x in places if x is not None)
    return attend_by(f"{form} attention", forward, backward, tensors, sinks)


def _by_triton(q: Tensor, k: Tensor, v: Tensor, *, mask: BlockMask | None = None, **options: Any) -> Tensor:
    if mask is not None:
        return attention_masked.attend_by_kernels(q, k, v, mask, **options)
    return attend("triton", q, k, v, **options)


def _by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    positions: Positions | None = None,
    mask: BlockMask | None = None,
    **options: Any,
) -> Tensor:
    if mask is not None:
        return attention_masked.attend_by_blocks(q, k, v, mask, **options)
    if positions is None:
        return blocked_attention(q, k, v, **options)
    return attend("blocked", q, k, v, positions=positions, **options)


def canonical_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    scale: float | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """`reference` in one order for each query; the gradients are those of another form."""
    scoring, s, t = Scoring.of_call(q, pattern, scale, cap), k.shape[1], q.shape[1]
    backward_form = "blocked" if attention_tiled.supports(q, k, v, scale=scale) else "tiled"
    inputs = (q, k, v, *(x for x in (sinks, documents) if x is not None))

    def options_of(tensors: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        remaining = iter(tensors)
        return tuple(None if x is None else next(remaining) for x in (sinks, documents))  # type: ignore[return-value]

    def forward(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        sinks, documents = options_of(tensors)
        return attention_canonical.canonical_forward(q, k, v, documents, sinks, scoring.numbers, *scoring[1:])

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v, *tensors, out, lse = saved
        sinks, documents = options_of(tensors)
        places = Positions(key_documents=documents)
        if backward_form == "blocked":
            places = Positions.of_last(range(s - t, s), range(s), documents, q.device)
        gradients = FORM_PASSES[backward_form].backward(q, k, v, places, out, lse, *grads, scoring)
        of_sinks = () if sinks is None else (attention_arguments.gradient(out, lse, grads[0], sinks),)
        return *(x.to(q.dtype) for x in gradients), *of_sinks

    return Fused("canonical attention", forward, backward, select_saved=lambda tensors, outs: (*tensors, *outs))(
        *inputs
    )


def fused_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **_: Any) -> Tensor:
    """`reference` without pattern or documents by torch's own fused kernel, for as many queries as keys."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


# ---- what forms serve -----------------------------------------------------------------------------------------------


def _flash_serves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    positions: Positions | None = None,
    mask: BlockMask | None = None,
    scale: float | None = None,
    cap: float = 0.0,
    **options: Any,
) -> str:
    t, s, in_order = q.shape[1], k.shape[1], positions is None and mask is None
    if reason := attention_flash.serves(q, k, v, scale, cap):
        return reason
    if mask is not None and not mask.unit:
        return f"the mask's blocks are of {mask.block} tokens; it takes multiples of 16"
    if in_order and t > s:
        return f"there are {t} queries of {s} positions; it takes at most as many"
    if in_order and max(s, pattern.size) > MAX_POSITION:
        return f"there are {s} keys and the pattern's size is {pattern.size}; both must be at most 2^30"
    return triton_runs(q, k, v, *(x for x in (documents, *(positions or ())) if x is not None))


def _flash_preferred(
    q: Tensor, *tensors: Tensor, positions: Positions | None = None, mask: BlockMask | None = None, **options: Any
) -> str:
    if positions is None and mask is None and q.shape[1] == 1:
        return "one query makes one tile of each head, which goes through the keys alone"
    return on_cuda(q, *tensors)


def _blocked_serves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    positions: Positions | None = None,
    mask: BlockMask | None = None,
    **options: Any,
) -> str:
    if mask is not None and kind_of(q) != "cpu":  # whose sums over blocks have no order elsewhere
        return "a tensor is not on the CPU"
    if mask is not None:
        return "" if q.numel() * k.numel() else f"the queries {list(q.shape)} or keys {list(k.shape)} are empty"
    if positions is not None:
        return ""
    if q.shape[1] > k.shape[1]:
        return f"there are {q.shape[1]} queries of {k.shape[1]} positions; it takes at most as many"
    return "" if q.numel() else f"the queries {list(q.shape)} are empty, and blocks are not"


def _blocked_preferred(
    q: Tensor, *tensors: Tensor, positions: Positions | None = None, mask: BlockMask | None = None, **options: Any
) -> str:
    return "" if q.shape[1] > 1 or positions is not None or mask is not None else "one query needs no blocks"


def _fused_serves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    documents: Tensor | None = None,
    positions: Positions | None = None,
    mask: BlockMask | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    **options: Any,
) -> str:
    if mask is not None:
        return "it has no block masks"
    if sinks is not None:
        return "it has no sinks"
    if positions is not None:
        return "it has no positions"
    if pattern != FULL or documents is not None:
        return "it has neither patterns nor documents"
    if q.shape[1] != k.shape[1]:
        return f"there are {q.shape[1]} queries of {k.shape[1]} positions; it takes equal numbers"
    return "it does not cap scores" if cap else ""


def _fused_preferred(q: Tensor, *tensors: Tensor, **options: Any) -> str:
    """Why "auto" should not take fused: blocked took 0.5 to 1.0 of its time up to T = 1024, and more beyond."""
    if q.shape[1] > (1 if kind_of(q) == "cuda" else MIN_BLOCK * MAX_BLOCKS):
        return ""
    return "blocked takes 0.5 to 1.0 of its time on a CPU up to T = 1024"


def _flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern = FULL,
    positions: Positions | None = None,
    mask: BlockMask | None = None,
    **options: Any,
) -> int:
    """FLOPs of the two products over the pairs that pattern and causality, or the mask, allow."""
    if mask is not None:
        pairs_by_head = mask.pairs(q.shape[1], k.shape[1])
        return 4 * q.shape[0] * q.shape[3] * int(pairs_by_head.sum()) * (q.shape[2] // len(pairs_by_head))
    if positions is not None:
        return 2 * q.numel() * k.shape[1]
    pairs = pattern.pairs(k.shape[1] - q.shape[1], q.shape[1], k.shape[1])
    return 4 * q.shape[0] * q.shape[2] * q.shape[3] * pairs


def _bytes(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> int:
    return (2 * q.numel() + k.numel() + v.numel()) * q.element_size()


attention = Op(
    "attention",
    reference,
    Form("triton", _by_triton, supports=_flash_serves, prefers=_flash_preferred),
    *attention_library.forms(),
    Form(
        "tiled", functools.partial(attend, "tiled"), supports=attention_tiled.supports, prefers=attention_tiled.prefers
    ),
    Form("fused", fused_attention, supports=_fused_serves, prefers=_fused_preferred),
    Form("blocked", _by_blocks, supports=_blocked_serves, prefers=_blocked_preferred),
    Form("canonical", canonical_attention, supports=attention_canonical.supports, prefers=asked_for),
    flops=_flops,
    bytes=_bytes,
    order=attention_library.order,
    expect=expect_attention,
)


def choose_form(impl: str, q: Tensor, k: Tensor, v: Tensor, positions: Positions, scoring: Scoring) -> str:
    """The form in FORM_PASSES that serves parts; raises ValueError if `impl` does not."""
    name, _ = attention.choose(impl, (q, k, v), {"positions": positions, **scoring._asdict()})
    return name if name in FORM_PASSES else "blocked"
