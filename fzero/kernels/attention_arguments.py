"""What every form of attention shares: positions, scores, sinks, and what a call must have.

Attention sinks: a logit of each query head that takes its share of the softmax and gives no value.

    out[t] = sum_s exp(x[t, s]) v[s] / (exp(sink) + sum_s exp(x[t, s]))      with the scores x of the keys that t sees

With lse the log-sum-exp of the scores, out is the one without a sink times sigmoid(lse - sink), and the log-sum-exp
with it is lse' = log(exp(lse) + exp(sink)). A backward pass that begins with out and the log-sum-exp, p = exp(x - lse),
ds = p (dp - g . out), is that with sinks if both are as they are with the sink.

    dsink = - sum_t exp(sink - lse'[t]) (g[t] . out[t])

Ref: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b model card", arXiv:2508.10925, section 2.3; Xiao et al. 2023, "Efficient
streaming language models with attention sinks", arXiv:2309.17453.

Shapes: out and g [B, T, H, K], lse [B, H, T] in float32 or wider, sinks [H] in any floating dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from fzero.kernels.attention_pattern import FULL, Pattern
from fzero.kernels.block_mask import BlockMask
from fzero.kernels.custom_operator import Fused, cap_logits

Tensors = tuple[Tensor, ...]
# Codes in pages, a block of `quantize` for each position and head, by their dtype.
PAGE_CODES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8_e4m3"}


class Positions(NamedTuple):
    """The positions of queries and keys, int64 [T] and [S] or [B, T] and [B, S], and their documents or None."""

    query: Tensor | None = None
    key: Tensor | None = None
    query_documents: Tensor | None = None
    key_documents: Tensor | None = None

    def rows(self, b: int) -> Positions:
        """The same as contiguous int64 [B, T] and [B, S]."""

        def wide(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(torch.int64).expand(b, x.shape[-1]).contiguous()

        return Positions(*map(wide, self))

    def queries(self, start: int, end: int) -> Positions:
        """The same of some of the queries."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[..., start:end]

        return self._replace(query=cut(self.query), query_documents=cut(self.query_documents))

    def mask(self, pattern: Pattern) -> Tensor:
        """Which keys each query sees, bool [1 or B, T, S]."""
        assert self.query is not None and self.key is not None
        pair_mask = pattern.visible(self.query[..., :, None], self.key[..., None, :])
        if self.query_documents is not None and self.key_documents is not None:
            pair_mask = pair_mask & (self.query_documents[..., :, None] == self.key_documents[..., None, :])
        return pair_mask if pair_mask.dim() == 3 else pair_mask[None]

    @classmethod
    def of_last(cls, queries: range, keys: range, documents: Tensor | None, device: torch.device) -> Positions:
        """Of queries and keys that lie side by side in a sequence, whose documents are int [B, length]."""
        query, key = (torch.arange(x.start, x.stop, device=device) for x in (queries, keys))
        of_both = () if documents is None else (documents[:, x.start : x.stop] for x in (queries, keys))
        return cls(query, key, *of_both)


class Scoring(NamedTuple):
    """What of attention is no tensor: the pattern, the scale, and the cap of scores."""

    pattern: Pattern = FULL
    scale: float = 1.0
    cap: float = 0.0

    @property
    def numbers(self) -> list[int]:
        """The pattern in numbers, for operators."""
        return self.pattern.numbers

    @classmethod
    def of_call(cls, q: Tensor, pattern: Pattern = FULL, scale: float | None = None, cap: float = 0.0) -> Scoring:
        """That of a call, whose scale is 1 / sqrt(K) if None is given."""
        return cls(pattern, q.shape[-1] ** -0.5 if scale is None else scale, cap)

    @classmethod
    def of_numbers(cls, pattern: list[int], scale: float, cap: float) -> Scoring:
        """The value whose `numbers` are `pattern`."""
        return cls(Pattern.of_numbers(pattern), scale, cap)


def masked_scores(q: Tensor, k: Tensor, pair_mask: Tensor, scoring: Scoring) -> Tensor:
    """The scores [B, G, R, T, S] in float32 or wider, -inf of a pair that is not seen."""
    q = rearrange(q, "b t (g r) k -> b g r t k", g=k.shape[2])
    scores = torch.einsum("bgrtk,bsgk->bgrts", widened(q), widened(k))
    return cap_logits(scores * scoring.scale, scoring.cap).masked_fill(~pair_mask, float("-inf"))


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The definition: the shares [B, G, R, T, S] of the keys; with sinks they sum to less than 1."""
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.to(scores.dtype).reshape(*scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) with the sinks, from those without."""
    sinks = sinks.to(lse.dtype)[:, None]
    share = rearrange(torch.sigmoid(lse - sinks), "b h t -> b t h 1")
    return (out * share).to(out.dtype), torch.logaddexp(lse, sinks.expand(lse.shape))


def gradient(out: Tensor, lse: Tensor, g: Tensor, sinks: Tensor) -> Tensor:
    """The gradient by the sinks for the gradient g of out; out and lse with sinks."""
    delta = torch.einsum("bthk,bthk->bht", g.to(lse.dtype), out.to(lse.dtype))
    return -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)


def attend_by(
    label: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[[Tensors, Tensors], Sequence[Tensor]],
    tensors: Sequence[Tensor],
    sinks: Tensor | None = None,
) -> Tensor:
    """out by the passes of a form, differentiable once by q, k, v and the sinks."""
    # forward(*tensors) -> (out, lse). backward((*tensors, out, lse), (g,)) -> the gradients of q, k and v.
    if sinks is None:
        return Fused(label, forward, backward, select_saved=lambda tensors, outputs: (*tensors, *outputs))(*tensors)

    def forward_with(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *extra: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = forward(q, k, v, *extra)
        return with_sinks(out, lse, sinks)

    def backward_with(saved: Tensors, grads: Tensors) -> Tensors:
        q, k, v, sinks, *extra, out, lse = saved
        return *backward((q, k, v, *extra, out, lse), grads), gradient(out, lse, grads[0], sinks)

    q, k, v, *extra = tensors
    fused = Fused(label, forward_with, backward_with, select_saved=lambda tensors, outputs: (*tensors, *outputs))
    return fused(q, k, v, sinks, *extra)


def expect_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    pattern: Any = FULL,
    documents: Any = None,
    positions: Any = None,
    mask: Any = None,
    scale: Any = None,
    cap: Any = 0.0,
    sinks: Any = None,
) -> None:
    """Raise ValueError for a call of `attention` that no form serves."""
    expect_heads(q, k, v, scale)
    expect_scores(q, pattern, cap, sinks)
    (b, t), s = q.shape[:2], k.shape[1]
    if mask is not None:
        options = {
            "pattern": pattern != FULL,
            "positions": positions is not None,
            "cap": cap,
            "sinks": sinks is not None,
        }
        return _expect_block_mask(q, k, v, mask, documents, [name for name, has_value in options.items() if has_value])
    if positions is not None:
        _expect_positions(positions, documents, q, s)
    elif t > s:
        raise ValueError(
            f"attention: there are {t} queries of {s} keys; the queries are the last of the keys' positions, at most "
            "as many"
        )
    expect_integers("documents", documents, q, [b, s])


def _expect_block_mask(q: Tensor, k: Tensor, v: Tensor, mask: Any, documents: Any, options: list[str]) -> None:
    if not isinstance(mask, BlockMask):
        raise ValueError(
            f"attention: the mask is a {type(mask).__name__}; give a BlockMask, as sliding_blocks makes one"
        )
    if options:
        raise ValueError(f"attention: a mask is given, and {', '.join(options)}; beside it give documents and scale")
    (b, t, heads), s = q.shape[:3], k.shape[1]
    if v.shape != k.shape:
        raise ValueError(f"attention: k is {list(k.shape)} and v {list(v.shape)}; they must be alike")
    mask.expect_sizes(t, s, heads)
    if mask.device.type != q.device.type:
        raise ValueError(f"attention: the mask is on {mask.device} and q on {q.device}; use mask.to(q.device), once")
    if documents is not None and t != s:
        raise ValueError(f"attention: documents are given, and {t} queries have {s} keys; they are of as many of both")
    expect_integers("documents", documents, q, [b, t])


def _expect_positions(positions: Any, documents: Any, q: Tensor, s: int) -> None:
    if not isinstance(positions, Positions):
        raise ValueError(
            f"attention: {_is('positions')} {_describe(positions)}; give Positions(query, key), or also the documents "
            "of both"
        )
    if documents is not None:
        raise ValueError(
            "attention: documents are given, and positions; give the documents to Positions, of both sides"
        )
    b, t = q.shape[:2]
    for name, places, n in (("query", positions.query, t), ("key", positions.key, s)):
        if not isinstance(places, Tensor) or places.dtype != torch.int64:
            raise ValueError(f"attention: {name} is {_describe(places)}; give positions, int64 {[n]} or {[b, n]}")
        expect_integers(name, places, q, [n], [b, n])
    expect_integers("query_documents", positions.query_documents, q, [t], [b, t])
    expect_integers("key_documents", positions.key_documents, q, [s], [b, s])
    if (positions.query_documents is None) != (positions.key_documents is None):
        missing = "query_documents" if positions.query_documents is None else "key_documents"
        raise ValueError(f"attention: {missing} are not given, and those of the other side are; give both or neither")


def expect_heads(q: Any, k: Any, v: Any, scale: Any = None) -> None:
    """Raise ValueError unless q [B, T, H, K], k [B, S, G, K], v [B, S, G, V] fit together, G dividing H."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4 or not x.dtype.is_floating_point or x.dtype != q.dtype:
            raise ValueError(
                f"attention: {name} is {_describe(x)}; give tensors [B, T, heads, K] of one floating dtype"
            )
        _expect_device(name, x, q)
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
    if scale is not None and not _is_number(scale):
        raise ValueError(
            f"attention: scale is {_describe(scale)}; give a finite number, and multiply q by one that is learned"
        )


def expect_scores(q: Tensor, pattern: Any, cap: Any = 0.0, sinks: Any = None) -> None:
    """Raise ValueError unless these are a pattern, a cap, and a sink for each head of q."""
    if not isinstance(pattern, Pattern):
        raise ValueError(
            f"attention: pattern is {_describe(pattern)}; give a Pattern, as Pattern.parse('full') makes one"
        )
    if not _is_number(cap) or cap < 0:
        raise ValueError(f"attention: cap is {_describe(cap)}; give a finite number above 0, or 0 for none")
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or not sinks.dtype.is_floating_point or list(sinks.shape) != [q.shape[2]]:
        raise ValueError(
            f"attention: sinks are {_describe(sinks)}; give one of each head of q, floating {[q.shape[2]]}"
        )
    _expect_device("sinks", sinks, q)


def expect_integers(name: str, x: Any, q: Tensor, *shapes: list[int]) -> None:
    """Raise ValueError unless x is None, or whole numbers of one of these shapes where q is."""
    if x is None:
        return
    integral = isinstance(x, Tensor) and not (x.dtype.is_floating_point or x.dtype.is_complex)
    if not integral or list(x.shape) not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"attention: {_is(name)} {_describe(x)}; give a tensor of whole numbers, {allowed}")
    _expect_device(name, x, q)


def _expect_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"attention: {_is(name)} on {x.device} and q on {q.device}; bring them to one device")


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | torch.SymFloat) and not isinstance(x, bool) and math.isfinite(x)


def _is(name: str) -> str:
    return f"{name} are" if name.endswith("s") else f"{name} is"


def _describe(x: Any) -> str:
    """A tensor by dtype and shape, a number or short text as it is, else the type."""
    if isinstance(x, Tensor):
        return f"{x.dtype} {list(x.shape)}"
    return repr(x) if isinstance(x, int | float | str) and len(repr(x)) < 40 else type(x).__name__


DOCUMENTS = "Tensor? query_documents, Tensor? key_documents"


PATTERN = "int[] pattern, float scale"


def outputs_of(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp [B, H, T]), not filled, of a form's queries."""
    b, t, h, _k = q.shape
    return q.new_empty(q.shape), q.new_empty((b, h, t), dtype=torch.float32)


def widened(x: Tensor) -> Tensor:
    """x in float32 or wider: products of narrow numbers are exact there, so that no score is rounded."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
