"""LeafPlan: the layout of one leaf of the parameters, and what follows from it: how much a rank has, what is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from fzero.comm.axes import AXES, PP, RP, links_of
from fzero.sharding.slices import is_stacked, local_numel, part_dim, shard_dim
from fzero.sharding.spec import Spec

Moves = tuple[tuple[str, str], ...]  # (operation, link: see comm.axes.links_of)
COLLECTIVES = {"scatter": "psum_scatter", "psum": "psum", "gather": "all_gather"}  # by operation


class Stored(NamedTuple):
    """The whole shape of what the ranks keep of a leaf, and its layout."""

    shape: tuple[int, ...]
    spec: Spec


def shard_axes(spec: Spec) -> list[str]:
    """The axes over which ZeRO shards a leaf that is used by `spec`."""
    return [axis for axis in AXES.shards if axis not in spec.axes]


def shard_over_data(name: str, shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> Spec:
    """The spec with dp, ep and cp on the leaf's first dim that does not count layers, if that divides."""
    dim, dims = shard_dim(name), list(spec.dims)
    axes = [axis for axis in shard_axes(spec) if axis == AXES.shards[0] or sizes[axis] > 1]
    if dim < len(shape) and shape[dim] % math.prod(sizes[a] for a in (*axes, *dims[dim])) == 0:
        dims[dim] = (*dims[dim], *axes)
    return replace(spec, dims=tuple(dims), partial=frozenset())


def is_coded(op: str, link: str) -> bool:
    """Whether an operation of `LeafPlan.moves` sends codes: a sum over ranks that have other tokens."""
    return op in ("scatter", "psum") and link.split("+")[0] in AXES.by_tokens


@dataclass(frozen=True)
class LeafPlan:
    """The layout of one leaf of the parameters in each part of a step, and the dtype in which it rests.

    An axis in `compute.partial` is one over which the leaf, whole on every rank, is used differently, so that the sum
    of its gradient is owed. In `grads.partial` it is one over which the sum is still owed after a micro-batch; it is
    made once, at the end.

    >>> plan = fzero.zero_plan(1, {"w": torch.zeros(8, 2)}, fzero.fake_mesh({"dp": 4}))
    >>> leaf = plan.leaves["w"]
    >>> print(leaf.shape, leaf.params, leaf.grads, leaf.opt)
    (8, 2) [·, ·] [·, ·] +dp [·/dp, ·]
    """

    name: str
    shape: tuple[int, ...]  # of the whole leaf
    dtype: torch.dtype
    compute: Spec  # as the model's code sees it (a layer of it, once gathered)
    params: Spec  # at rest
    grads: Spec  # after the backward pass of a micro-batch
    opt: Spec  # of the optimizer's per-parameter state, and of the update
    use: Spec  # between the micro-batches of a step: at rest, but for a leaf that pp shards until it is used
    sizes: Mapping[str, int] = field(compare=False, repr=False)  # of the mesh's axes
    trained: bool = True  # False: no gradient, no optimizer state, no update; leaves that are not floating never are
    moved: bool = False  # by a rule of the model once a step, see models.base.Model.after

    @property
    def stacked(self) -> bool:
        """Whether the first dim counts layers."""
        return is_stacked(self.name)

    @property
    def is_matrix(self) -> bool:
        """Whether the leaf, or a layer of a stacked one, has two dims or more, and is floating-point."""
        return self.dtype.is_floating_point and len(self.shape) - shard_dim(self.name) >= 2

    @property
    def layers(self) -> int:
        """The layers that a rank has, the most over pp; 1 of a leaf that is not stacked."""
        return max(map(len, self.compute.rows), default=self.shape[0]) if self.stacked else 1

    def numel(self, spec: Spec) -> int:
        """The elements that a rank holds by a spec; of a leaf that is shared unevenly, those of the ranks with the
        most."""
        return local_numel(self.shape, spec, self.sizes)

    def layer_numel(self, spec: Spec) -> int:
        """The elements that a rank holds by a spec of a layer, or of a leaf that is not stacked."""
        return local_numel(self.shape[1:], spec.layer, self.sizes) if self.stacked else self.numel(spec)

    def ranks(self, link: str) -> int:
        """The number of ranks of an axis, or of a link such as "dp+cp"; 1 for no link, ""."""
        return math.prod(self.sizes[axis] for axis in link.split("+") if axis)

    @cached_property
    def link(self) -> str:
        """The link over which ZeRO shards the leaf; "" for none."""
        return "".join(links_of(shard_axes(self.compute), self.sizes))

    @property
    def gathered(self) -> bool:
        """Whether shards of the leaf are gathered over `link` for each use."""
        return bool(self.link) and self.use.over_data

    @property
    def updated_in_shards(self) -> bool:
        """Whether the leaf is trained, whole at rest, and gathered over `link` after the update of its shards."""
        return bool(self.link) and self.trained and self.opt.over_data and not self.params.over_data

    @cached_property
    def moves(self) -> tuple[Moves, Moves]:
        """The communication of the leaf's gradient: (after each micro-batch, once after the last)."""
        grads, opt = self.grads, self.opt
        owed = [(link, link.partition("+")[0]) for link in links_of(self.compute.partial_axes, self.sizes)]
        micro_path = [
            ("scatter" if axis in grads.axes else "psum", link) for link, axis in owed if axis not in grads.partial
        ]
        end = [
            ("scatter" if axis in opt.axes and axis not in grads.axes else "psum", link)
            for link, axis in owed
            if axis in grads.partial
        ]
        end += [("gather", self.link)] * bool(self.link and grads.over_data and not opt.over_data)
        return tuple(micro_path), tuple(end)

    @property
    def moves_within_stage(self) -> tuple[Moves, Moves]:
        """The moves but those over pp, which are made behind the row of a rank."""
        micro_path, end = (tuple(move for move in path if move[1] != PP) for path in self.moves)
        return micro_path, end

    @property
    def rounds_once(self) -> bool:
        """Whether each term of the gradient is rounded once on every way that it goes in codes: no "psum" does."""
        return not any(op == "psum" and is_coded(op, link) for path in self.moves for op, link in path)

    # ---- where an optimizer makes the sum of the gradient, see sign_sums.py ----

    @property
    def sum_link(self) -> str:
        """The link over which it does; "" for none."""
        return RP if self.sizes[RP] > 1 else self.link

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """The axes of that link."""
        return tuple(filter(None, self.sum_link.split("+")))

    @property
    def summed(self) -> Spec:
        """The layout of such a sum, which is whole over its link: over rp that in which the leaf is updated."""
        return self.opt if self.sizes[RP] > 1 else replace(self.compute, partial=frozenset())

    @property
    def served(self) -> Spec:
        """The layout of what each rank serves of the leaf: over dp as stage 1 shards it, over rp each part so once
        more."""
        if self.sizes[RP] == 1:
            return shard_over_data(self.name, self.shape, self.summed, self.sizes)
        dim, dims = shard_dim(self.name), list(self.summed.dims)
        if dim < len(self.shape) and self.shape[dim] % math.prod(self.sizes[axis] for axis in (*dims[dim], RP)) == 0:
            dims[dim] = (*dims[dim], RP)
        return replace(self.summed, dims=tuple(dims))

    @property
    def served_by_all(self) -> bool:
        """Whether the leaf is cut into blocks of whole bytes for all ranks of its link."""
        axes = {*self.sum_axes}
        return bool(axes) and axes <= {*self.served.axes} and self.numel(self.served) // self.layers % 8 == 0

    @property
    def terms(self) -> Stored:
        """The terms of the sum as the parts of one leaf."""
        dim, spec, shape, dims = shard_dim(self.name), self.summed, list(self.shape), list(self.summed.dims)
        if dim == len(shape):  # a number, or one of each layer
            dims, shape = [*dims, ()], [*shape, 1]
        dims[dim], shape[dim] = (*dims[dim], *self.sum_axes), shape[dim] * self.ranks(self.sum_link)
        ranks = shape[part_dim(spec)] // sum(spec.parts) if spec.parts else 1  # terms of each word, or of an expert
        return Stored(tuple(shape), replace(spec, dims=tuple(dims), parts=tuple(ranks * n for n in spec.parts)))

    @property
    def of_each_rank(self) -> Stored:
        """What each rank of the link has of the leaf, such as errors: [layers or 1, ranks, *layer]."""
        dim, dims, axes = shard_dim(self.name), self.summed.dims, self.sum_axes
        spec = Spec((*(dims[:dim] or ((),)), axes, *dims[dim:]), rows=self.compute.rows, parts=self.compute.parts)
        return Stored((self.shape[0] if dim else 1, self.ranks(self.sum_link), *self.shape[dim:]), spec)
