"""Error feedback for gradients that travel as codes: what rounding takes from a rank's term is added to what it sends
next.

    h = g + beta e        what is sent: the gradient, and a part of the error so far
    s = decode(encode(h))        what arrives
    e' = e + g - s

so that after any number of sends the sum of s, with e, is that of g. LoCo's moving average is beta times this e; beta =
1 is classical error feedback. Errors are divided by the loss scale. With codec.errors they rest in codes; what that
rounding takes is lost.

Sources: Xie et al. 2024, "LoCo: low-bit communication adaptor for large-scale model training", arXiv:2407.04480,
section 3; Seide et al. 2014, "1-bit stochastic gradient descent", Interspeech, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fzero.comm.axes import AXES, PP, RP
from fzero.comm.messages import pack, unpack
from fzero.core import pytree
from fzero.sharding.leaf_plan import Stored, is_coded
from fzero.sharding.mesh import Mesh
from fzero.sharding.slices import is_stacked, local_numel, local_shape, shard_dim
from fzero.sharding.spec import Spec

if TYPE_CHECKING:  # what it adds errors to, and no part of what a plan says of them
    from fzero.sharding.codec import Coder

Plan = Any  # fzero.sharding.plan.Plan, which prints what errors take
T = TypeVar("T")
Pieces = tuple[Tensor, ...]
Hops = dict[str, dict[str, T]]  # {"data" or "rp": {leaf: T}}: one for each sum that a leaf's gradient is sent to
ERRORS = "codec_error"  # their name in `TrainState.extra`
ERROR = f"extra/{ERRORS}/"  # how the name of one begins there: a hop and a leaf follow
SCALE = "_scale"  # behind the name of a hop: the scales of its errors in codes
HOPS = ("data", RP)  # between the ranks that share a leaf, of a node if there is hpz; between nodes


class StoredError(NamedTuple):
    """The shape, layout and dtype of a leaf's errors, or their scales, in a state."""

    shape: tuple[int, ...]
    spec: Spec
    dtype: torch.dtype


def hop_of(link: str) -> str:
    """The hop of the sum over a link, such as "dp+cp"."""
    return HOPS[0] if link.split("+")[0] in AXES.shards else link


def errors_of(plan: Plan) -> Hops[Stored]:
    """The errors of each leaf that a plan's codec keeps some of, [rows, senders, *layer], in each hop; {} for none.

    >>> import fzero
    >>> params, mesh = {"blocks/w": torch.zeros(3, 8, 32)}, fzero.fake_mesh({"dp": 4, "tp": 2})
    >>> plan = fzero.zero_plan(2, params, mesh, codec="grads=int8,loco")
    >>> shape, spec = errors_of(plan)["data"]["blocks/w"]
    >>> print(shape, spec)
    (3, 4, 8, 32) [·, ·/dp, ·, ·]
    """
    hops: Hops[Stored] = {}
    if plan.codec is None or plan.codec.loco is None:
        return hops
    users = {name: sorted({rank for _, rank in uses}) for name, uses in plan.users.items()}
    for name in sorted(plan.coded_grads):
        leaf, dim = plan.leaves[name], shard_dim(name)
        dims, lead, rows = list(leaf.compute.dims[dim:]), leaf.compute.dims[:dim] or ((),), leaf.compute.rows
        if name in users:
            lead, rows = ((PP,),), rows_of(users[name], plan.mesh.pp.size)
        first = leaf.shape[0] if is_stacked(name) else max(1, len(users.get(name, ())))
        path = [move for moves in leaf.moves for move in moves]
        for i, (op, link) in enumerate(path):
            if not is_coded(op, link):
                continue
            # Ranks over which the sum is still owed have other terms of it.
            senders = tuple(axis for _, later in path[i:] for axis in later.split("+") if axis != PP)
            spec = Spec((*lead, senders, *dims), rows=rows, parts=leaf.compute.parts)
            shape = (first, leaf.ranks("+".join(senders)), *leaf.shape[dim:])
            hops.setdefault(hop_of(link), {})[name] = Stored(shape, spec)
            dims[0] = (*dims[0], *link.split("+"))
    return hops


def stored_errors(plan: Plan) -> Hops[StoredError]:
    """What a state has of the errors: of each itself, or its codes and, under its name with "_scale", their scales."""
    hops: Hops[StoredError] = {}
    for hop, leaves in errors_of(plan).items():
        coded = plan.codec.errors
        dtype = torch.uint8 if coded else plan.error_dtype
        hops[hop] = {name: StoredError(*stored, dtype) for name, stored in leaves.items()}
        if coded:
            hops[hop + SCALE] = {
                name: StoredError((*shape[:-1], -(-shape[-1] // plan.codec.block)), spec, torch.float32)
                for name, (shape, spec) in leaves.items()
            }
    return hops


def error_specs(stored: Hops[StoredError]) -> dict[str, Hops[Spec]]:
    """The entry of `TrainState.extra` for errors as specs: {"codec_error": {hop: {leaf: Spec}}}; {} without errors."""
    hops = {hop: {name: error.spec for name, error in errors.items()} for hop, errors in stored.items()}
    return {ERRORS: hops} if hops else {}


def first_errors(stored: Hops[StoredError], mesh: Mesh, device: torch.device | str) -> dict[str, Hops[Tensor]]:
    """The same entry before the first step: this rank's errors, zeros."""

    def zeros(error: StoredError) -> Tensor:
        return torch.zeros(local_shape(error.shape, error.spec, mesh), dtype=error.dtype, device=device)

    hops = {hop: {name: zeros(error) for name, error in errors.items()} for hop, errors in stored.items()}
    return {ERRORS: hops} if hops else {}


def rows_of(ranks: list[int], pp: int) -> tuple[tuple[int, ...], ...]:
    """By rank of pp the rows that it has, where each of `ranks` has one."""
    return tuple((ranks.index(rank),) if rank in ranks else () for rank in range(pp))


def error_bytes(plan: Plan) -> int:
    """The bytes of errors that a rank holds: the rank of pp with the most."""
    bytes_by_rank = [0] * plan.mesh.pp.size
    for shape, spec, dtype in (error for errors in plan.stored_errors.values() for error in errors.values()):
        rows = [len(rank_rows) for rank_rows in spec.rows] or [1] * len(bytes_by_rank)
        row_bytes = local_numel(shape, spec, plan.sizes) * dtype.itemsize // max(rows)  # of the rank with the most
        bytes_by_rank = [total + row_bytes * n for total, n in zip(bytes_by_rank, rows)]
    return max(bytes_by_rank)


class ErrorFeedback:
    """The errors of a step: the state's, and the new ones until it is known that the step is not skipped."""

    def __init__(
        self, plan: Plan, stored: Hops[Tensor], unit: Tensor, step: Tensor, storage_coder: Coder | None = None
    ) -> None:
        self.beta, self.stored, self.unit = plan.codec.loco, stored, unit
        self.storage_coder, self.dtype = storage_coder, plan.error_dtype
        # 0 in a step that begins without errors, else 1: a number on the device, for which nobody waits
        self.keep_factor = None if plan.codec.reset is None else (step % plan.codec.reset != 0).to(self.dtype)
        self.new: dict[tuple[str, str, int], Pieces] = {}

    def stored_pieces(self, stored: Hops[Tensor], hop: str, name: str, row: int) -> Pieces:
        """What a state has of the error of a row of a leaf, as views."""
        hops = (hop,) if self.storage_coder is None else (hop, hop + SCALE)
        return tuple(stored[group][name][row, 0] for group in hops)

    def read(self, pieces: Pieces) -> Tensor:
        """An error of what rests of it."""
        return (
            pieces[0]
            if self.storage_coder is None
            else self.storage_coder.decode(pieces, self.dtype, pieces[0].shape[-1])
        )

    def next_error(self, hop: str, name: str, row: int) -> Tensor:
        """The error to add to what this rank sends next of a row of a leaf."""
        if (hop, name, row) in self.new:
            return self.read(self.new[hop, name, row])
        error = self.read(self.stored_pieces(self.stored, hop, name, row))
        return error if self.keep_factor is None else error * self.keep_factor

    def coder(self, coder: Coder, link: str, names: Sequence[str], row: int, ranks: int) -> Coder:
        """A coder that adds the errors of these leaves to what it encodes for a link, and notes the new ones."""
        hop = hop_of(link)

        def encode(terms: Tensor) -> tuple[Tensor, ...]:
            errors = [self.next_error(hop, name, row) for name in names]
            shapes, error = [e.shape for e in errors], pack(errors, ranks, terms.dtype)
            unit = self.unit.to(terms.dtype)
            sent = coder.encode(torch.addcmul(terms, error, self.beta * unit))
            lost = coder.decode(sent, terms.dtype, terms.shape[1]).neg_().add_(terms)
            new = lost.div_(unit).add_(error)
            for name, value in zip(names, unpack(new, shapes)):
                value = value.to(self.dtype)
                self.new[hop, name, row] = (value,) if self.storage_coder is None else self.storage_coder.encode(value)
            return sent

        return coder._replace(encode=encode)

    @torch.no_grad()
    def settle(self, skipped: Tensor | None, *, donate: bool) -> Hops[Tensor]:
        """The errors after the step: as before if it is `skipped`."""
        stored = self.stored if donate else pytree.map(torch.clone, self.stored)
        if self.keep_factor is not None:  # codes whose scales are 0 stand for 0
            factors = (
                stored
                if self.storage_coder is None
                else {hop: leaves for hop, leaves in stored.items() if hop.endswith(SCALE)}
            )
            for leaf in pytree.leaves(factors):
                leaf.mul_(self.keep_factor)
        while self.new:
            key, new = self.new.popitem()
            for old, piece in zip(self.stored_pieces(stored, *key), new):
                old.copy_(piece if skipped is None else torch.where(skipped, old, piece))
        return stored
