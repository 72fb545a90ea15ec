"""Sums over the ranks that have other data, in one bit for each element: what rounding takes is kept and sent later.

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

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.collectives import start_all_gather, start_all_to_all, start_psum
from fzero.comm.messages import bucket_groups, pack, unpack
from fzero.core.autodiff import reinterpret
from fzero.sharding.leaf_plan import Stored
from fzero.sharding.slices import is_stacked, local_shape, narrow_part, shard_dim
from fzero.sharding.spec import Spec

Plan = Any  # fzero.sharding.plan.Plan, which prints what they send


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
