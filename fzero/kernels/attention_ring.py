"""Attention by parts of one softmax: around a ring of ranks, and of chunks of a sequence.

Rank r holds the queries, keys and values of its own positions. In hop i it has the keys and values of rank r - i, which
it passes on while it computes its queries' attention on them. The parts are joined by their log-sum-exp:

    lse = log sum_i exp(lse_i),   out = sum_i exp(lse_i - lse) out_i        in float32, of float64 in float64

The backward pass sends keys and values again; their gradients travel behind them in float32 or wider, each rank adds
its own, and the last of c hops takes them home. Liu et al. 2023, "Ring attention with blockwise transformers",
arXiv:2310.01889, algorithm 1.

Hierarchical: groups of `inner` ranks next to each other exchange heads for positions among themselves (Jacobs et al.
2023, "DeepSpeed Ulysses", arXiv:2309.14509, section 3.1), and the ring is of groups, c / inner hops. Fang and Zhao
2024, "USP", arXiv:2405.07719, section 4. inner = 1 is the ring.

Sent by a rank for B sequences of T tokens on c ranks, in elements, with n = T / c:

    ring, forward    (c - 1) 2 B n G K
    backward         the same, and c 2 B n G K in float32 or wider
    hierarchical     c/u in place of c, for inner = u; and forward and backward (u - 1) / u B n (2 H + 2 G) K

Each pass is one operator of a traced graph, in which messages and products overlap: positions are its data, so one
graph serves every choice of blocks.

Chunks: attention of a chunk of a sequence's queries on a chunk of its keys, whose parts `join` joins. Both are of
neighbouring tokens, and their places are numbers of the host, so that a plan knows how many pairs of a query and a key
each part has. Ref: Yao et al. 2024, "Fully pipelined distributed transformer", arXiv:2408.16978, section 4.

Shapes of chunks: q and out [B, N, H, K], k and v [B, S, G, K], lse [B, H, N]; out, lse and gradients in float32 or
wider. The out that a backward pass takes is that of the whole softmax, in q's dtype, and so is its lse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.communicator import Axis, Communicator, communicator_of
from fzero.comm.operators import define_ordered
from fzero.comm.rank_tables import exchange_within
from fzero.core.autodiff import first_order
from fzero.core.device import is_traced, kind_of
from fzero.core.graph_passes import add_formula
from fzero.core.torch_private import FakeTensor
from fzero.kernels import attention_pattern
from fzero.kernels.attention import FORM_PASSES, FormPasses, attention, choose_form
from fzero.kernels.attention_arguments import (
    Positions,
    Scoring,
    attend_by,
    expect_heads,
    expect_integers,
    expect_scores,
)
from fzero.kernels.attention_pattern import FULL, Pattern
from fzero.kernels.attention_tiled import blocked_backward_at, blocked_forward_at
from fzero.kernels.custom_operator import OPENED, operator


class Ring:
    """One pass around a ring: of the ranks of `communicator`, those `stride` apart."""

    def __init__(
        self,
        communicator: Communicator,
        stride: int,
        positions: Tensor,
        documents: Tensor | None,
        passes: FormPasses,
        scoring: Scoring,
        leaf: str,
    ) -> None:
        self.communicator, self.positions, self.documents = communicator, positions, documents
        self.passes, self.scoring, self.leaf = passes, scoring, leaf
        size = communicator.size
        self.count, self.ring_rank = size // stride, communicator.rank // stride
        self.perm = [(rank, (rank + stride) % size) for rank in range(size)]

    def positions_at(self, hop: int) -> Positions:
        """The positions and documents of this rank's queries, and of the keys that it has in this hop."""
        query, key = self.positions[self.ring_rank], self.positions[(self.ring_rank - hop) % self.count]
        if self.documents is None:
            return Positions(query, key)
        return Positions(query, key, self.documents[:, query], self.documents[:, key])

    def pass_on(self, x: Tensor) -> Any:
        """Start to send x to the next rank, and to receive that of the last."""
        return self.communicator.start_ppermute(x, self.perm, self.leaf)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out like q, the log-sum-exp of each query's scores [B, H, n] in float32 or wider)."""
        keys_values, joined = torch.stack((k, v)), None
        for hop in range(self.count):
            pending = self.pass_on(keys_values) if hop + 1 < self.count else None
            positions = self.positions_at(hop)
            if may_see(positions):
                chunk = self.passes.forward(q, keys_values[0], keys_values[1], positions, self.scoring)
                joined = chunk if joined is None else join(joined, chunk)
            keys_values = keys_values if pending is None else pending.wait()
        assert joined is not None  # a query sees itself
        return joined[0].to(q.dtype), joined[1]

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients by q, k and v for the gradient g of out."""
        keys_values, arriving = torch.stack((k, v)), None
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        for hop in range(self.count):
            pending = self.pass_on(keys_values) if hop + 1 < self.count else None
            positions, kv_grads = self.positions_at(hop), None
            if may_see(positions):
                dq_term, *kv_terms = self.passes.backward(
                    q, keys_values[0], keys_values[1], positions, out, lse, g, self.scoring
                )
                dq, kv_grads = dq.add_(dq_term), torch.stack(kv_terms)
            earlier = None if arriving is None else arriving.wait()  # from the ranks that had these keys before
            if earlier is not None:
                kv_grads = earlier if kv_grads is None else kv_grads.add_(earlier)
            assert kv_grads is not None  # in the first hop a query sees itself
            arriving = self.pass_on(kv_grads)
            keys_values = keys_values if pending is None else pending.wait()
        assert arriving is not None
        dk, dv = arriving.wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def may_see(positions: Positions) -> bool:
    """False only if all keys are after all queries or in other documents, as the host can see."""
    # Values are looked at in the host's memory alone, as a GPU would be waited for.
    query, key = positions.query, positions.key
    if query is None or key is None or kind_of(query) != "cpu" or isinstance(query, FakeTensor) or is_traced(query):
        return True
    if int(key.min()) > int(query.max()):
        return False
    query_documents, key_documents = positions.query_documents, positions.key_documents
    if query_documents is None or key_documents is None:
        return True
    return bool(
        ((query_documents.amax(1) >= key_documents.amin(1)) & (key_documents.amax(1) >= query_documents.amin(1))).any()
    )


def join(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Join two parts (out [B, T, H, K], lse [B, H, T]) of a softmax, both in float32 or wider; their memory is used."""
    lse = torch.logaddexp(a[1], b[1])
    base = torch.where(lse == float("-inf"), 0.0, lse)
    first, second = (torch.exp(chunk_lse - base).transpose(1, 2)[..., None] for chunk_lse in (a[1], b[1]))
    return a[0].mul_(first).add_(b[0].mul_(second)), lse


# ---- operators ------------------------------------------------------------------------------------------------------

RING_ARGUMENTS = (
    "Tensor positions, Tensor? documents, int communicator, int stride, str form, int[] pattern, float scale, "
    "float cap, str leaf"
)


def _ring(positions: Tensor, documents: Tensor | None, arguments: Sequence[Any]) -> Ring:
    number, stride, form, pattern, scale, cap, leaf = arguments
    scoring = Scoring.of_numbers(pattern, scale, cap)
    return Ring(communicator_of(number), stride, positions, documents, FORM_PASSES[form], scoring, leaf)


def _forward(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None, *arguments: Any) -> Any:
    return _ring(positions, documents, arguments).forward(q, k, v)


def _forward_shapes(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    b, n, h, _k = q.shape
    return torch.empty_like(q), q.new_empty((b, h, n), dtype=torch.promote_types(q.dtype, torch.float32))


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    g: Tensor,
    positions: Tensor,
    documents: Tensor | None,
    *arguments: Any,
) -> Any:
    return _ring(positions, documents, arguments).backward(q, k, v, out, lse, g)


def _backward_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


ring_forward = define_ordered(
    "ring_forward", f"Tensor q, Tensor k, Tensor v, {RING_ARGUMENTS}", 2, _forward, _forward_shapes
)
ring_backward = define_ordered(
    "ring_backward",
    f"Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor g, {RING_ARGUMENTS}",
    3,
    _backward,
    _backward_shapes,
)
for ring_op, run, products in (
    (ring_forward, _forward, attention_pattern.FORWARD_PRODUCTS),
    (ring_backward, _backward, attention_pattern.BACKWARD_PRODUCTS),
):
    OPENED[ring_op] = run  # a count of memory sees what travels
    add_formula(ring_op.overloadpacket, attention_pattern.ring(products))


# ---- the function ---------------------------------------------------------------------------------------------------


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    positions: Tensor,
    *,
    documents: Tensor | None = None,
    inner: int = 1,
    pattern: Pattern = FULL,
    scale: float | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    impl: str = "auto",
    leaf: str = "blocks/attn",
) -> Tensor:
    """Return the causal attention [B, n, H, K] of this rank's queries on the keys of all ranks of `axis`.

    q [B, n, H, K], k and v [B, n, G, K]: of this rank's positions. positions: int64 [c, n], those of each rank,
    together each of a sequence's T = c n once, the same on all ranks. documents: int [B, T] of the whole sequences, or
    None. inner: ranks of a group that exchange heads, see the top of the file; it divides c, H and G. sinks: [H], see
    attention_arguments. impl: the form of `attention`. Keys and values are passed on while the hop before is
    computed.

    Communicates: see the top of the file. Raises ValueError for shapes that do not fit, and under transforms that
    differentiate more than once or batch (vmap, jvp): form "gather" of context parallelism serves them.
    """
    options = {"pattern": pattern, "scale": scale, "cap": cap}
    expect_heads(q, k, v, scale)
    expect_scores(q, pattern, cap, sinks)
    _expect_fit(q, k, axis, positions, inner)
    expect_integers("documents", documents, q, [q.shape[0], positions.numel()])
    if axis.size == 1:
        row_documents = None if documents is None else documents[:, positions[0]]
        row = Positions(positions[0], positions[0], row_documents, row_documents)
        return attention(q, k, v, positions=row, impl=impl, sinks=sinks, **options)
    if not first_order():
        raise ValueError(
            "ring attention is differentiated once, and serves neither vmap nor jvp; use the form gather of context "
            "parallelism for other transforms"
        )
    assert axis.communicator is not None
    if inner > 1:
        q = exchange_within(q, axis, inner, 2, 1, leaf=leaf)
        k, v = exchange_within(torch.cat((k, v), -1), axis, inner, 2, 1, leaf=leaf).chunk(2, -1)
        sinks = None if sinks is None else sinks.chunk(inner)[axis.rank % inner]
    positions = positions.reshape(axis.size // inner, -1)
    scoring = Scoring.of_call(q, pattern, scale, cap)
    form = choose_form(impl, q, k, v, Positions(positions[0], positions[0]), scoring)
    arguments = axis.communicator.number, inner, form, scoring.numbers, scoring.scale, scoring.cap, leaf

    def forward(q: Tensor, k: Tensor, v: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        return ring_forward(q, k, v, *(data if len(data) > 1 else (*data, None)), *arguments)

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v, *data, out, lse = saved
        tensors = data if len(data) > 1 else (*data, None)
        return ring_backward(q, k, v, out, lse, grads[0].contiguous(), *tensors, *arguments)

    data = (positions,) if documents is None else (positions, documents)
    out = attend_by("ring attention", forward, backward, (q, k, v, *data), sinks)
    return exchange_within(out, axis, inner, 1, 2, leaf=leaf) if inner > 1 else out


def _expect_fit(q: Tensor, k: Tensor, axis: Axis, positions: Tensor, inner: int) -> None:
    """Raise ValueError naming what does not fit."""
    if positions.shape != (axis.size, q.shape[1]) or k.shape[1] != q.shape[1]:
        raise ValueError(
            f"ring attention: positions are {list(positions.shape)} and there are {q.shape[1]} queries and "
            f"{k.shape[1]} keys; positions must be {[axis.size, q.shape[1]]}, and keys as many as queries"
        )
    for label, size in ((axis.name, axis.size), ("the query heads", q.shape[2]), ("the key/value heads", k.shape[2])):
        if inner < 1 or size % inner:
            raise ValueError(
                f"ring attention: inner is {inner} and does not divide {label}, {size}; use "
                f"{math.gcd(axis.size, k.shape[2])}"
            )


class ChunkAttention(NamedTuple):
    """How the chunks of a sequence attend: a form, and the documents int [B, T]."""

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
        """The part of these keys in the gradients by q, and those by k and v."""
        if self.form == "blocked":
            positions = _positions(q, k, self.documents, query, key)
            return blocked_backward_at(q, k, v, positions, out, lse, g, self.scoring)
        return _backward_chunk(q, k, v, out, lse, g, *self._numbers(query, key))

    def _numbers(self, query: int, key: int) -> tuple[Any, ...]:
        scoring = self.scoring
        return self.documents, query, key, self.form, scoring.numbers, scoring.scale, scoring.cap


def _positions(q: Tensor, k: Tensor, documents: Tensor | None, query: int, key: int) -> Positions:
    """The positions and documents of chunks that begin at `query` and `key`."""
    queries, keys = range(query, query + q.shape[1]), range(key, key + k.shape[1])
    return Positions.of_last(queries, keys, documents, q.device)


CHUNK_ARGUMENTS = "Tensor? documents, int query, int key, str form, int[] pattern, float scale, float cap"


def _fake_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    (b, n, h, _k), wide = q.shape, torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape, dtype=wide), q.new_empty((b, h, n), dtype=wide)


def _fake_backward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape, dtype=wide), k.new_empty(k.shape, dtype=wide), v.new_empty(v.shape, dtype=wide)


@operator(
    f"attention_part(Tensor q, Tensor k, Tensor v, {CHUNK_ARGUMENTS}) -> (Tensor, Tensor)",
    _fake_forward,
    flop=attention_pattern.attention_chunk,
)
def _forward_chunk(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    passes, positions, scoring = _parse_arguments(q, k, *arguments)
    return passes.forward(q, k, v, positions, scoring)


@operator(
    f"attention_part_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor g, {CHUNK_ARGUMENTS}) -> "
    "(Tensor, Tensor, Tensor)",
    _fake_backward,
    flop=attention_pattern.attention_chunk_backward,
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
