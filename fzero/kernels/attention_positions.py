"""Attention of queries at any positions on keys at any others: what one rank of context parallelism computes.

    out[t] = sum_s softmax_s(scale q[t] . k[s]) v[s]      over the s that the query at position query[t] may see

A query sees the keys at positions up to its own that are in its document and that the pattern allows, as in
attention.py, wherever they are among the keys. `reference` defines this; a query that sees none has out 0.

Shapes: q and out [B, T, H, K], k and v [B, S, G, K] with H a multiple of G; positions int64 [T] and [S], or [B, T] and
[B, S] where rows differ; documents likewise, of queries and of keys. Nothing of T times S elements is kept.

`parts_of` gives a form's two passes on plain tensors, for parts of one softmax over several sets of keys: (out, the
log-sum-exp of each query's scores) in float32 or wider, and the gradients from the log-sum-exp over all sets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from fzero.kernels import attention_flash, attention_tiled
from fzero.kernels.attention_arguments import attend_by, expect_positions, softmax, widened
from fzero.kernels.attention_flash import flash_forward_at
from fzero.kernels.attention_flash_backward import flash_backward_at
from fzero.kernels.attention_pattern import FULL, Pattern
from fzero.kernels.attention_tiled import tiled_backward, tiled_forward
from fzero.kernels.cross_entropy_rows import cap_logits
from fzero.kernels.custom_operator import on_cuda, triton_runs
from fzero.kernels.registry import Form, Op

BLOCK = 128  # queries at a time


class Positions(NamedTuple):
    """The positions of queries and keys, int64 [T] and [S] or [B, T] and [B, S], and their documents or None."""

    query: Tensor
    key: Tensor
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None

    def rows(self, b: int) -> Positions:
        """The same as contiguous int64 [B, T] and [B, S]."""

        def wide(x: Tensor) -> Tensor:
            return x.to(torch.int64).expand(b, x.shape[-1]).contiguous()

        documents = (None if x is None else wide(x) for x in self[2:])
        return Positions(wide(self.query), wide(self.key), *documents)

    def queries(self, start: int, end: int) -> Positions:
        """The same of some of the queries."""
        documents = self.query_documents
        return self._replace(
            query=self.query[..., start:end],
            query_documents=documents if documents is None else documents[..., start:end],
        )

    def mask(self, pattern: Pattern) -> Tensor:
        """Which keys each query sees, bool [1 or B, T, S]."""
        pair_mask = pattern.visible(self.query[..., :, None], self.key[..., None, :])
        if self.query_documents is not None and self.key_documents is not None:
            pair_mask = pair_mask & (self.query_documents[..., :, None] == self.key_documents[..., None, :])
        return pair_mask if pair_mask.dim() == 3 else pair_mask[None]


class Scoring(NamedTuple):
    """What of attention is no tensor: the pattern, the scale of the scores, and their cap, 0 for none."""

    pattern: Pattern = FULL
    scale: float = 1.0
    cap: float = 0.0

    @property
    def numbers(self) -> list[int]:
        """The pattern in numbers, for operators."""
        return self.pattern.numbers

    @classmethod
    def of_numbers(cls, pattern: list[int], scale: float, cap: float) -> Scoring:
        """The value whose `numbers` are `pattern`."""
        return cls(Pattern.of_numbers(pattern), scale, cap)


def split_arguments(
    q: Tensor,
    query: Tensor,
    key: Tensor,
    *,
    pattern: Pattern = FULL,
    query_documents: Tensor | None = None,
    key_documents: Tensor | None = None,
    scale: float | None = None,
    cap: float = 0.0,
) -> tuple[Positions, Scoring]:
    """The arguments of a call behind q, k and v, which every form takes: (the Where, the How)."""
    scoring = Scoring(pattern, q.shape[-1] ** -0.5 if scale is None else scale, cap)
    return Positions(query, key, query_documents, key_documents), scoring


def reference(
    q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor, *, sinks: Tensor | None = None, **options: Any
) -> Tensor:
    """The definition: compute all scores, mask them, and take the softmax in float32 or wider, with sinks [H] as in
    attention.py. options: see `given`.
    """
    positions, scoring = split_arguments(q, query, key, **options)
    scores, has_key = _scores(q, k, positions, scoring)
    p = torch.where(has_key, softmax(torch.where(has_key, scores, 0.0), sinks), 0.0).to(v.dtype)
    return rearrange(torch.einsum("bgrts,bsgk->btgrk", p, v), "b t g r k -> b t (g r) k")


def _scores(q: Tensor, k: Tensor, positions: Positions, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """(scores [B, G, R, T, S] in float32 or wider, -inf of a pair that is not seen; whether a query sees any)."""
    q = rearrange(q, "b t (g r) k -> b g r t k", g=k.shape[2])
    scores = torch.einsum("bgrtk,bsgk->bgrts", widened(q), widened(k))
    scores = cap_logits(scores * scoring.scale, scoring.cap)
    mask = positions.mask(scoring.pattern)[:, None, None]
    return scores.masked_fill(~mask, float("-inf")), mask.any(-1, keepdim=True)


# ---- by blocks of queries, in PyTorch -------------------------------------------------------------------------------


def _blocks(t: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, t)) for start in range(0, t, BLOCK)]


def _concatenate(parts: list[Tensor], dim: int) -> Tensor:
    # A compiled `cat` of one tensor keeps its strides, and an eager one does not.
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()


def blocked_forward_at(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, K], log-sum-exp [B, H, T]) in float32 or wider."""
    outs, lses = [], []
    for start, end in _blocks(q.shape[1]):
        scores, has_key = _scores(q[:, start:end], k, positions.queries(start, end), scoring)
        top = torch.where(has_key, scores.amax(-1, keepdim=True), 0.0)
        p = torch.exp(scores - top)
        total = p.sum(-1, keepdim=True)
        out = torch.einsum("bgrts,bsgk->bgrtk", p.to(v.dtype), v).to(p.dtype)
        outs.append(rearrange(torch.where(has_key, out / total, 0.0), "b g r t k -> b t (g r) k"))
        lses.append(rearrange(top + torch.log(total), "b g r t 1 -> b (g r) t"))
    return _concatenate(outs, 1), _concatenate(lses, 2)


def blocked_backward_at(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, out: Tensor, lse: Tensor, g: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by q, k and v in float32 or wider, from out and the log-sum-exp of all keys, for the gradient g of
    out."""
    groups, dqs = k.shape[2], []
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    delta = torch.einsum("bthk,bthk->bht", g.to(lse.dtype), out.to(lse.dtype))
    for start, end in _blocks(q.shape[1]):
        scores, _ = _scores(q[:, start:end], k, positions.queries(start, end), scoring)
        total, row_delta = (rearrange(x[:, :, start:end], "b (g r) t -> b g r t 1", g=groups) for x in (lse, delta))
        p = torch.exp(scores - torch.where(total == float("-inf"), 0.0, total))
        q_rows, g_rows = (rearrange(x[:, start:end], "b t (g r) k -> b g r t k", g=groups) for x in (q, g))
        ds = p * (torch.einsum("bgrtk,bsgk->bgrts", widened(g_rows), widened(v)) - row_delta) * scoring.scale
        if scoring.cap:  # the derivative of the cap, 0 where nothing is seen
            ds = ds * torch.where(scores == float("-inf"), 0.0, 1.0 - (scores / scoring.cap).square())
        dv += torch.einsum("bgrts,bgrtk->bsgk", p.to(g.dtype), g_rows)
        dk += torch.einsum("bgrts,bgrtk->bsgk", ds, widened(q_rows))
        dqs.append(rearrange(torch.einsum("bgrts,bsgk->bgrtk", ds, widened(k)), "b g r t k -> b t (g r) k"))
    return _concatenate(dqs, 1).to(lse.dtype), dk, dv


# ---- by tiles, in C++ -----------------------------------------------------------------------------------------------


def _tiled_forward(q: Tensor, k: Tensor, v: Tensor, positions: Positions, scoring: Scoring) -> tuple[Tensor, Tensor]:
    return tiled_forward(q, k, v, *positions.rows(q.shape[0]), scoring.numbers, scoring.scale, scoring.cap, True)


def _tiled_backward(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, out: Tensor, lse: Tensor, g: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    arguments = scoring.numbers, scoring.scale, scoring.cap, True
    return tiled_backward(q, k, v, *positions.rows(q.shape[0]), out, lse, g, *arguments)[:3]


# ---- by Triton's kernels --------------------------------------------------------------------------------------------


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, positions: Positions, scoring: Scoring) -> tuple[Tensor, Tensor]:
    return flash_forward_at(q, k, v, *positions.rows(q.shape[0]), scoring.numbers, scoring.scale)


def _flash_backward(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, out: Tensor, lse: Tensor, g: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor, Tensor]:
    return flash_backward_at(g, q, k, v, out, lse, *positions.rows(q.shape[0]), scoring.numbers, scoring.scale)


# ---- the operation --------------------------------------------------------------------------------------------------


class FormPasses(NamedTuple):
    """The two passes of a form, on plain tensors."""

    forward: Callable[[Tensor, Tensor, Tensor, Positions, Scoring], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


FORM_PASSES = {
    "triton": FormPasses(_flash_forward, _flash_backward),
    "tiled": FormPasses(_tiled_forward, _tiled_backward),
    "blocked": FormPasses(blocked_forward_at, blocked_backward_at),
}


def choose_form(impl: str, q: Tensor, k: Tensor, v: Tensor, positions: Positions, scoring: Scoring) -> str:
    """The name in PARTS of the form that serves; raises ValueError if `impl` is none, or does not serve."""
    options = {"pattern": scoring.pattern, "scale": scoring.scale, "cap": scoring.cap}
    name, _ = attention_at.choose(
        impl,
        (q, k, v, positions.query, positions.key),
        options | {"query_documents": positions.query_documents, "key_documents": positions.key_documents},
    )
    return name if name in FORM_PASSES else "blocked"


def _by(name: str) -> Callable[..., Tensor]:
    def attend(
        q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor, *, sinks: Tensor | None = None, **options: Any
    ) -> Tensor:
        (_, _, *documents), scoring = split_arguments(q, query, key, **options)
        passes = FORM_PASSES[name]

        def forward(q: Tensor, k: Tensor, v: Tensor, *positions: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = passes.forward(q, k, v, Positions(*positions), scoring)
            return out.to(q.dtype), lse

        def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            q, k, v, *positions, out, lse = saved
            gradients = passes.backward(q, k, v, Positions(*positions), out, lse, *grads, scoring)
            return tuple(x.to(q.dtype) for x in gradients)

        tensors = q, k, v, query, key, *(x for x in documents if x is not None)
        return attend_by(f"{name} attention", forward, backward, tensors, sinks)

    return attend


def _tiled_serves(q: Tensor, k: Tensor, v: Tensor, *positions: Tensor, **options: Any) -> str:
    return attention_tiled.serves(q, k, v, options.get("scale"))


def _tiled_preferred(q: Tensor, k: Tensor, v: Tensor, *positions: Tensor, **options: Any) -> str:
    return attention_tiled.prefers(q)


def _flash_serves(q: Tensor, k: Tensor, v: Tensor, *positions: Tensor, **options: Any) -> str:
    documents = (x for x in (options.get("query_documents"), options.get("key_documents")) if x is not None)
    reason = attention_flash.serves(q, k, v, options.get("scale"), options.get("cap", 0.0))
    return reason or triton_runs(q, k, v, *positions, *documents)


def _flops(q: Tensor, k: Tensor, v: Tensor, *positions: Tensor, **options: Any) -> int:
    """FLOPs of the two products if half of the pairs are seen, as under a causal mask; which are is data."""
    return 2 * q.numel() * k.shape[1]


def _bytes(q: Tensor, k: Tensor, v: Tensor, *positions: Tensor, **options: Any) -> int:
    return (2 * q.numel() + k.numel() + v.numel()) * q.element_size()


attention_at = Op(
    "attention_at",
    reference,
    Form("triton", _by("triton"), supports=_flash_serves, prefers=on_cuda),
    Form("tiled", _by("tiled"), supports=_tiled_serves, prefers=_tiled_preferred),
    Form("blocked", _by("blocked")),
    flops=_flops,
    bytes=_bytes,
    expect=expect_positions,
)
