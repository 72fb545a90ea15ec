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

Sums over the ranks that have other data, in one bit for each element: what rounding takes is kept and sent later.

    x = term + e        of a rank: what it owes, and what it did not send before
    s, b                the mean of |x| over a block, or its root mean square, and the signs of x
    e' = x - s b        stays with the rank
    y = sum of s b over the ranks + f       on the rank that serves the block
    S, B, f' = y - S B                      the same again: S B is what arrives on all ranks

A block is the part of a layer of a leaf that one rank serves. Elements whose last sum is exactly 0 are masked: the sign
of a zero would be one of noise. The ranks are those of rp, where there are any, after full sums inside of each; else
all ranks that have other data.

Sources: Tang et al. 2021, "1-bit Adam: communication efficient large-scale training with Adam's convergence speed",
arXiv:2102.02888, algorithm 1 (the root mean square, which keeps the magnitude); Lu et al. 2022, "Maximizing
communication efficiency for large-scale training via 0/1 Adam", arXiv:2202.06009 (the mean of |x|).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fzero.comm.axes import AXES, PP, RP
from fzero.comm.collectives import start_all_gather, start_all_to_all, start_psum
from fzero.comm.messages import bucket_groups, pack, unpack
from fzero.core import pytree
from fzero.core.autodiff import reinterpret
from fzero.sharding.leaf_plan import Stored, is_coded
from fzero.sharding.mesh import Mesh
from fzero.sharding.slices import is_stacked, local_shape, narrow_part, shard_dim
from fzero.sharding.spec import Spec

Plan = Any  # fzero.sharding.plan.Plan, which prints what errors take


# ---- the code ----


def pack_signs(x: Tensor) -> Tensor:
    """The signs of x [.., n] as bits, uint8 [.., n / 8], 1 for not negative.

    >>> pack_signs(torch.tensor([1.0, -1.0, 0.0, -2.0, -1.0, -1.0, -1.0, 3.0]))
    tensor([133], dtype=torch.uint8)
    """
    bits = (x >= 0).view(*x.shape[:-1], -1, 8).to(torch.uint8)
    return bits.mul_(_powers(x.device)).sum(-1, dtype=torch.uint8)


def unpack_signs(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """1 and -1 [.., n] of bits [.., n / 8].

    >>> unpack_signs(torch.tensor([133], dtype=torch.uint8), torch.float32)
    tensor([ 1., -1.,  1., -1., -1., -1., -1.,  1.])
    """
    ones = bits[..., None].bitwise_and(_powers(bits.device)).ne_(0).view(*bits.shape[:-1], -1)
    return ones.to(dtype).mul_(2).sub_(1)


def _powers(device: torch.device) -> Tensor:
    return torch.ones(8, dtype=torch.uint8, device=device) << torch.arange(8, dtype=torch.uint8, device=device)


SCALES = ("mean", "rms")


def encode(x: Tensor, mask: Tensor, scale: str) -> tuple[Tensor, Tensor]:
    """(bits [.., n / 8], scales [..]) of x [.., n], where `mask` is True; scale: the mean of |x|, or "rms"."""
    size = torch.linalg.vector_norm(x, 1 if scale == "mean" else 2, -1)
    number = mask.sum(-1).clamp_(min=1).to(size.dtype)
    return pack_signs(x), size / (number if scale == "mean" else number.sqrt())


def decode(bits: Tensor, scale: Tensor, mask: Tensor) -> Tensor:
    """What `encode` stands for."""
    return unpack_signs(bits, scale.dtype).mul_(scale[..., None]).mul_(mask)


def to_message(bits: Tensor, scale: Tensor) -> Tensor:
    """One message [ranks, bytes] of bits [blocks, ranks, n / 8] and scales [blocks, ranks]."""
    ranks = bits.shape[1]
    of_ranks = reinterpret(scale.t().reshape(-1), torch.uint8).view(ranks, -1)
    return torch.cat([bits.transpose(0, 1).reshape(ranks, -1), of_ranks], 1)


def from_message(message: Tensor, blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(bits [blocks, ranks, n / 8], scales [blocks, ranks]) of a message [ranks, bytes]."""
    ranks, scales = message.shape[0], blocks * dtype.itemsize
    bits, scale = message.split([message.shape[1] - scales, scales], 1)
    return bits.reshape(ranks, blocks, -1).transpose(0, 1), reinterpret(scale.reshape(-1), dtype).view(
        ranks, blocks
    ).t()


# ---- the sums ----


class SignSums:
    """The sums of a plan with codec "grads=1bit" as its optimizer makes them."""

    def __init__(self, plan: Plan) -> None:
        self.mesh, self.reduce, self.dtype = plan.mesh, plan.reduce_dtype, plan.sum_dtype
        self.names, self.sum_leaves = plan.sign_leaves, plan.optimizer_sums
        leaves = {name: plan.leaves[name] for name in sorted(self.sum_leaves)}
        self.axes = {n: plan.mesh[leaf.sum_link] if leaf.sum_link else plan.mesh.link() for n, leaf in leaves.items()}
        self.shapes = {name: leaf.shape for name, leaf in leaves.items()}
        self.specs = {n: SumLayout(leaf.summed, leaf.of_each_rank, leaf.served, leaf.opt) for n, leaf in leaves.items()}

    def zeros(self, name: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(the sum of a leaf, this rank's errors, those of what it serves), all 0."""
        layout = self.specs[name]
        pairs = ((self.shapes[name], layout.full), layout.worker, (self.shapes[name], layout.served))
        sizes = [local_shape(shape, spec, self.mesh) for shape, spec in pairs]
        mean, worker, server = (torch.zeros(size, dtype=self.dtype, device=device) for size in sizes)
        return mean, worker, server

    def worker_zeros(self, name: str, device: torch.device) -> Tensor:
        """What a rank has of its own of a leaf, beside that of the others, all 0."""
        shape, spec = self.specs[name].worker
        return torch.zeros(local_shape(shape, spec, self.mesh), dtype=self.dtype, device=device)

    def ranks(self, name: str) -> int:
        """The number of terms of a leaf's sum."""
        return self.axes[name].size

    def updated_slice(self, name: str, full: Tensor) -> Tensor:
        """The part of a leaf's sum that this rank updates: a view."""
        layout, axis = self.specs[name], self.axes[name]
        cut = layout.opt.over_data and not layout.full.over_data
        return narrow_part(full, axis.rank, axis.size, shard_dim(name)) if cut else full

    def full_sums(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sums of these terms, which travel as they do without signs; `terms` is emptied."""
        names, pending = list(terms), []
        for bucket in bucket_groups([terms[n] for n in names], [self.axes[n].name for n in names]):
            chosen = [names[i] for i in bucket]
            tensors = [terms.pop(name) for name in chosen]
            shapes, bundle = [t.shape for t in tensors], pack(tensors, 1, self.reduce)
            pending.append((chosen, shapes, start_psum(bundle, self.axes[chosen[0]], leaf=" ".join(chosen))))
        totals: dict[str, Tensor] = {}
        for chosen, shapes, sums in pending:
            totals.update(zip(chosen, (x.to(self.dtype) for x in unpack(sums.wait(), shapes))))
        return totals

    def by_signs(
        self,
        sums: Mapping[str, Tensor],
        term: Callable[[str], Tensor],
        worker: Mapping[str, Tensor],
        server: Mapping[str, Tensor],
        scale: str,
    ) -> None:
        """Write the sums of `term(name)` over the ranks into `sums`, and the new errors into `worker` and `server`."""
        sent = {name: self.send(name, sums[name], term(name), worker[name], scale) for name in sums}
        served = {name: self.serve(name, sums[name], sent.pop(name).wait(), server[name], scale) for name in sums}
        for name, last in sums.items():
            blocks = self.blocks(name, last)
            coded = from_message(served.pop(name).wait(), blocks.shape[0], self.dtype)
            blocks.copy_(decode(*coded, blocks != 0))

    def blocks(self, name: str, x: Tensor) -> Tensor:
        """A leaf, whole over the ranks of its link, as [layers or 1, ranks, n]: a view."""
        return x.view(x.shape[0] if is_stacked(name) else 1, self.ranks(name), -1)

    def send(self, name: str, last: Tensor, term: Tensor, worker: Tensor, scale: str) -> Any:
        """Start to send a rank's signs; `worker` becomes what they leave out. `term` is overwritten."""
        x, error, mask = (
            self.blocks(name, term),
            worker.view(self.blocks(name, term).shape),
            self.blocks(name, last) != 0,
        )
        x.add_(error).mul_(mask)
        coded = encode(x, mask, scale)
        error.copy_(x.sub_(decode(*coded, mask)))
        return start_all_to_all(to_message(*coded), self.axes[name], leaf=name)

    def serve(self, name: str, last: Tensor, message: Tensor, server: Tensor, scale: str) -> Any:
        """Add up the blocks that this rank serves, and start to send their signs."""
        axis, blocks = self.axes[name], self.blocks(name, last)
        mask = blocks[:, axis.rank] != 0
        bits, scales = from_message(message, blocks.shape[0], self.dtype)
        error = server.view(mask.shape)
        error.mul_(mask)
        for rank in range(axis.size):
            error.add_(decode(bits[:, rank], scales[:, rank], mask))
        bits, scales = encode(error, mask, scale)
        error.sub_(decode(bits, scales, mask))
        return start_all_gather(to_message(bits[:, None], scales[:, None]), axis, leaf=name)


class SumLayout(NamedTuple):
    """The layouts of a leaf's sum, a rank's errors, served ones, and updates."""

    full: Spec
    worker: Stored
    served: Spec
    opt: Spec


if TYPE_CHECKING:  # what it adds errors to, and no part of what a plan says of them
    from fzero.sharding.codec import Coder

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
