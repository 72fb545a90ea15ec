"""Attention of a chunk of a sequence's queries on a chunk of its keys: parts of one softmax, which `join` joins.

Both chunks are of neighbouring tokens, and their places are numbers of the host, so that a plan knows how many pairs of
a query and a key each part has. The forms are those of attention_positions.py.
Ref: Yao et al. 2024, "Fully pipelined distributed transformer", arXiv:2408.16978, section 4.

Shapes: q and out [B, N, H, K], k and v [B, S, G, K], lse [B, H, N]; out, lse and gradients in float32 or wider. The out
that a backward pass takes is that of the whole softmax, in q's dtype, and so is its lse.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.kernels import flops
from fzero.kernels.attention_positions import (
    FORM_PASSES,
    FormPasses,
    Positions,
    Scoring,
    blocked_backward_at,
    blocked_forward_at,
    choose_form,
)
from fzero.kernels.attention_ring import join as join
from fzero.kernels.custom_operator import operator


class ChunkAttention(NamedTuple):
    """How the chunks of a sequence attend: the name of a form in PARTS, and the documents int [B, T] of whole rows."""

    form: str
    scoring: Scoring
    documents: Tensor | None = None

    @classmethod
    def choose(
        cls, impl: str, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scoring: Scoring
    ) -> ChunkAttention:
        """Those whose form serves chunks such as these, which `impl` names; raises ValueError if it does not."""
        return cls(choose_form(impl, q, k, v, _positions(q, k, documents, 0, 0), scoring), scoring, documents)

    def first_key(self, query: int) -> int:
        """The first key that any query from position `query` on sees, wherever documents end."""
        return self.scoring.pattern.first_key(query)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, query: int, key: int) -> tuple[Tensor, Tensor]:
        """(out, lse) of queries from position `query` on, on keys from position `key` on."""
        if self.form == "blocked":  # PyTorch's products, which a count of memory or of FLOPs sees
            return blocked_forward_at(q, k, v, _positions(q, k, self.documents, query, key), self.scoring)
        return _forward_chunk(q, k, v, *self._numbers(query, key))

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, g: Tensor, query: int, key: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The part of these keys in the gradients by q, and the gradients by k and v of these queries alone."""
        if self.form == "blocked":
            positions = _positions(q, k, self.documents, query, key)
            return blocked_backward_at(q, k, v, positions, out, lse, g, self.scoring)
        return _backward_chunk(q, k, v, out, lse, g, *self._numbers(query, key))

    def _numbers(self, query: int, key: int) -> tuple[Any, ...]:
        scoring = self.scoring
        return self.documents, query, key, self.form, scoring.numbers, scoring.scale, scoring.cap


def _positions(q: Tensor, k: Tensor, documents: Tensor | None, query: int, key: int) -> Positions:
    """The positions and documents of chunks that begin at `query` and `key`."""
    query_end, key_end = query + q.shape[1], key + k.shape[1]
    positions = torch.arange(query, query_end, device=q.device), torch.arange(key, key_end, device=q.device)
    document_rows = (None, None) if documents is None else (documents[:, query:query_end], documents[:, key:key_end])
    return Positions(*positions, *document_rows)


SHARED = "Tensor? documents, int query, int key, str form, int[] pattern, float scale, float cap"


def _fake_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    (b, n, h, _k), wide = q.shape, torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape, dtype=wide), q.new_empty((b, h, n), dtype=wide)


def _fake_backward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape, dtype=wide), k.new_empty(k.shape, dtype=wide), v.new_empty(v.shape, dtype=wide)


@operator(
    f"attention_part(Tensor q, Tensor k, Tensor v, {SHARED}) -> (Tensor, Tensor)",
    _fake_forward,
    flop=flops.attention_chunk,
)
def _forward_chunk(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    passes, positions, scoring = _parse_arguments(q, k, *arguments)
    return passes.forward(q, k, v, positions, scoring)


@operator(
    f"attention_part_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor g, {SHARED}) -> "
    "(Tensor, Tensor, Tensor)",
    _fake_backward,
    flop=flops.attention_chunk_backward,
)
def _backward_chunk(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, g: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    passes, positions, scoring = _parse_arguments(q, k, *arguments)
    return passes.backward(q, k, v, positions, out, lse, g, scoring)


def _parse_arguments(
    q: Tensor,
    k: Tensor,
    documents: Tensor | None,
    query: int,
    key: int,
    form: str,
    *numbers: Any,
) -> tuple[FormPasses, Positions, Scoring]:
    return FORM_PASSES[form], _positions(q, k, documents, query, key), Scoring.of_numbers(*numbers)
