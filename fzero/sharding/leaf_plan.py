"""LeafPlan: the layout of one leaf of the parameters, and what follows from it: how much a rank has, what is sent.

What a rank sends of parameters and gradients is counted in the ledger's elements, by the one closed form beside it. The
table of a plan, what a rank of a pipeline sends and the exposed time of a search read it.

Left out are the activations within a stage (tensor and context parallelism), losses, norms, and the largest magnitudes
of leaves that are gathered as float8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fzero.comm.axes import AXES, PP, RP, links_of
from fzero.comm.ledger import sent_elements
from fzero.comm.messages import bucket_groups, padded
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

    # ---- where an optimizer makes the sum of the gradient, see error_feedback.py ----

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


Plan = Any  # fzero.sharding.plan.Plan, which prints this
KINDS = ("activations", "gradients", "layers", "outside")
PASS, MICRO_BATCH, STEP = "pass", "micro-batch", "step"  # for each of what a transfer is made
WORDS = {"scatter": "psum_scatter {}", "psum": "psum {}", "gather": "all_gather {} of the gradient"}


class LeafTransfer(NamedTuple):
    """A collective of some leaves together, or of one layer of them."""

    words: str  # what it is, of the first of the leaves
    collective: str
    link: str
    itemsize: int  # bytes of an element
    elements: int  # that a rank sends: see `sent_elements`
    times: str  # PASS, MICRO_BATCH or STEP: it is made once in each of them


def transfers(
    plan: Plan, names: Sequence[str], shared_leaves: frozenset[str] = frozenset(), signs: bool = True
) -> Iterator[LeafTransfer]:
    """What a rank sends of leaves that are fetched together, of stacked ones of a layer; without what pp sends.

    shared_leaves: leaves for which a part before it on the rank gives a gradient too. signs: whether sums by signs are
    made so, or in full, as in a warm-up: every rank then gets the whole sum.
    """
    leaves = [plan.leaves[name] for name in names]
    over_nodes = [(leaf, RP, leaf.layer_numel(leaf.use)) for leaf in leaves if RP in leaf.use.axes]
    # What rests over rp as well is whole there by then.
    gathered = [
        (leaf, leaf.link, leaf.layer_numel(leaf.use) * (leaf.sizes[RP] if RP in leaf.use.axes else 1))
        for leaf in leaves
        if leaf.gathered
    ]
    for times, shards in ((STEP, over_nodes), (PASS, gathered)):
        pieces = [(leaf, link, *piece) for leaf, link, numel in shards for piece in pieces_of(plan, leaf, numel)]
        like = [torch.empty(numel, dtype=dtype, device="meta") for _, _, numel, dtype in pieces]
        for bucket in bucket_groups(like, [link for _, link, _, _ in pieces]):
            leaf, link, _, dtype = pieces[bucket[0]]
            full = sum(pieces[i][2] for i in bucket) * leaf.ranks(link)
            coding = " as float8" if leaf.name in plan.float8 else ""
            coding = f" as {plan.codec.params}" if leaf.name in plan.coded else coding
            words = f"all_gather rp{coding} for use a step" if times == STEP else f"all_gather {link} for use{coding}"
            sent = sent_elements("all_gather", full, leaf.ranks(link))
            yield LeafTransfer(words, "all_gather", link, dtype.itemsize, sent, times)
    yield from sums(plan, [leaf for leaf in leaves if leaf.trained], shared_leaves, signs)


def updates(plan: Plan, leaf: LeafPlan) -> Iterator[LeafTransfer]:
    """What a rank sends of a layer of a leaf behind the update."""
    if leaf.updated_in_shards:
        sent = sent_elements("all_gather", leaf.layer_numel(leaf.params), leaf.ranks(leaf.link))
        for words in ("after the update", *["of where ranks are"] * plan.local):
            words = f"all_gather {leaf.link} {words}"
            yield LeafTransfer(words, "all_gather", leaf.link, leaf.dtype.itemsize, sent, STEP)


def pieces_of(plan: Plan, leaf: LeafPlan, numel: int) -> list[tuple[int, torch.dtype]]:
    """(elements, dtype) of what travels of so many elements of a leaf."""
    if leaf.name not in plan.coded:
        return [(numel, torch.uint8 if leaf.name in plan.float8 else leaf.dtype)]
    return plan.codec.pieces(plan.codec.params, numel, leaf.shape[-1] // leaf.ranks("+".join(leaf.compute.dims[-1])))


def sums(plan: Plan, leaves: Sequence[LeafPlan], shared_leaves: frozenset[str], signs: bool) -> Iterator[LeafTransfer]:
    """The transfers of the sums of gradients of leaves, see `transfers`."""
    paths = {leaf.name: leaf.moves_within_stage for leaf in leaves}
    for leaf in (leaf for leaf in leaves if leaf.name in plan.sign_leaves):
        (micro_path, end), link, ranks = paths[leaf.name], leaf.sum_link, leaf.ranks(leaf.sum_link)
        paths[leaf.name] = micro_path, tuple(move for move in end if move[1] != link)
        if signs:
            size, words = int(plan.sign_bytes(leaf.name)) // leaf.layers, f"all_to_all and all_gather {link} of signs"
            for collective in ("all_to_all", "all_gather"):
                sent = sent_elements(collective, size, ranks)
                yield LeafTransfer(f"{words} a step", collective, link, 1, sent, STEP)
        else:
            sent = sent_elements("psum", leaf.layer_numel(leaf.summed), ranks)
            yield LeafTransfer(f"psum {link} a step", "psum", link, plan.reduce_dtype.itemsize, sent, STEP)
    numels = [leaf.layer_numel(leaf.compute) for leaf in leaves]
    grads = [torch.empty(numel, dtype=leaf.dtype, device="meta") for numel, leaf in zip(numels, leaves)]
    kinds = [(paths[leaf.name], leaf.name in shared_leaves, leaf.name in plan.coded_grads) for leaf in leaves]
    for bucket in bucket_groups(grads, kinds):
        (micro_path, end), is_shared, _ = kinds[bucket[0]]
        leaf, elements = leaves[bucket[0]], sum(numels[i] for i in bucket)
        elements = yield from walk(plan, leaf, micro_path, elements, MICRO_BATCH)
        if not is_shared or plan.reduce == "canonical":  # else the part before it ends the sum
            yield from walk(plan, leaf, end, elements, STEP)


def walk(plan: Plan, leaf: LeafPlan, path: Moves, elements: int, times: str) -> Iterator[Any]:
    """The transfers of a bucket of gradients of such leaves on a path; returns its elements behind it."""
    for op, link in path:
        ranks, words = leaf.ranks(link), WORDS[op].format(link)
        full = elements * ranks if op == "gather" else elements
        messages = [(COLLECTIVES[op], full, plan.reduce_dtype)]
        if leaf.name in plan.coded_grads and not plan.signs and is_coded(op, link):
            row, words = (full if op == "scatter" else padded(full, ranks)) // ranks, f"{words} as {plan.codec.grads}"
            pieces = plan.codec.pieces(plan.codec.grads, row * ranks, row)
            ways = ("all_to_all",) if op == "scatter" else ("all_to_all", "all_gather")
            messages = [(collective, *piece) for collective in ways for piece in pieces]
        words += f" a {times}" * (op != "gather")
        for collective, numel, dtype in messages:
            yield LeafTransfer(words, collective, link, dtype.itemsize, sent_elements(collective, numel, ranks), times)
        elements = elements // ranks if op == "scatter" else full
    return elements


def over_pp(plan: Plan, name: str, rank: int) -> Iterator[LeafTransfer]:
    """What a rank of pp sends of a leaf outside the layers."""
    leaf, users, p = plan.leaves[name], plan.users[name], plan.mesh.pp.size
    using_ranks, itemsize = {user for _, user in users}, leaf.dtype.itemsize
    if leaf.params.dims != leaf.use.dims:
        shard, words = leaf.numel(leaf.params), "gather pp for use a step"
        yield LeafTransfer(words, "gather_to", PP, itemsize, shard * len(using_ranks - {rank}), STEP)
        if leaf.link and rank in using_ranks and leaf.params.over_data and not leaf.use.over_data:
            sent = sent_elements("all_gather", shard * p * leaf.ranks(leaf.link), leaf.ranks(leaf.link))
            yield LeafTransfer(f"all_gather {leaf.link} for use a step", "all_gather", leaf.link, itemsize, sent, STEP)
    if leaf.trained:
        sent = leaf.numel(leaf.opt) * (p - 1) * sum(source == rank for _, source in users)
        yield LeafTransfer("scatter pp a step", "scatter_from", PP, plan.policy.accumulate.itemsize, sent, STEP)


# ---- a rank ----------------------------------------------------------------------------------------------------------


class RankTraffic(NamedTuple):
    """What a rank sends of one kind by one collective over one link, in elements or messages of a micro-batch."""

    kind: str  # of KINDS
    collective: str
    link: str
    itemsize: int  # bytes of an element; 0: of activations, in the dtype of products
    per_micro_batch: int  # for each micro-batch  # of "activations" and their "gradients" messages, else elements
    per_step: int  # once a step

    @property
    def amounts(self) -> tuple[int, int]:
        """`per_micro_batch` and `per_step`."""
        return self.per_micro_batch, self.per_step


def sent_of(plan: Plan, rank: int, signs: bool = True) -> tuple[RankTraffic, ...]:
    """What a rank of pp sends in a step, with parameters gathered again for each backward pass (as
    Execution(reshard=True) has them). A leaf that the head shares counts once without pp. signs: see `transfers`.

    >>> import fzero
    >>> from fzero import models
    >>> model = models.build(models.preset("llama-tiny"))
    >>> traffic = sent_of(fzero.zero_plan(0, model, fzero.fake_mesh({"pp": 2})), 0)
    >>> sorted((entry.kind, entry.collective, entry.per_micro_batch, entry.per_step) for entry in traffic)
    [('activations', 'message', 1, 0), ('outside', 'gather_to', 0, 32896), ('outside', 'scatter_from', 0, 32768)]
    """
    totals: dict[tuple[str, str, str, int], list[int]] = {}

    def add(kind: str, t: LeafTransfer, times: int = 1) -> None:
        if amount := t.elements * times:
            so_far = totals.setdefault((kind, t.collective, t.link, t.itemsize), [0, 0])
            so_far[t.times == STEP] += amount

    if plan.stages is not None:
        ranks = plan.stages.ranks
        for stage in plan.stages.chunks(rank):
            for kind, target in (("activations", stage + 1), ("gradients", stage - 1)):
                if 0 <= target < len(ranks) and ranks[target] != rank:
                    add(kind, LeafTransfer("", "message", PP, 0, 1, MICRO_BATCH))
    stacks: dict[str, list[str]] = {}
    for name, leaf in plan.leaves.items():
        if leaf.stacked:
            stacks.setdefault(name.split("/")[0], []).append(name)
    for names in stacks.values():
        layers = layers_of(plan.leaves[names[0]], rank)
        for t in transfers(plan, names, signs=signs):
            add("layers", t, layers * (2 if t.times == PASS else 1))
    visited: set[str] = set()
    for names in segments_outside(plan, rank):
        for t in transfers(plan, names, frozenset(visited & set(names)), signs):
            add("outside", t)
        visited |= set(names)
    for leaf in plan.leaves.values():
        for t in updates(plan, leaf):
            add("layers" if leaf.stacked else "outside", t, layers_of(leaf, rank))
    for name in plan.users:
        for t in over_pp(plan, name, rank):
            add("outside", t)
    ordered = sorted(totals.items(), key=lambda entry: KINDS.index(entry[0][0]))
    return tuple(RankTraffic(*key, *amounts) for key, amounts in ordered)


def layers_of(leaf: LeafPlan, rank: int) -> int:
    """The layers that a rank of pp has of a leaf; 1 of one that is not stacked."""
    rows = leaf.params.rows
    return 1 if not leaf.stacked else len(rows[rank]) if rows else leaf.shape[0]


def segments_outside(plan: Plan, rank: int) -> Iterator[list[str]]:
    """The leaves of each part outside the layers that a rank runs, in order."""
    parts: dict[tuple[int, int, str], list[str]] = {}
    for name, leaf in plan.leaves.items():
        whole = [(0, name.split("/")[0])] if plan.stages is None and not leaf.stacked else []
        for stage, segment in whole or plan.outside.get(name, ()):
            if plan.stages is None or plan.stages.ranks[stage] == rank:
                order = {"embed": 0, "head": 2}.get(segment, 1)  # in a stage the embedding is first and the head last
                parts.setdefault((stage, order, segment), []).append(name)
    return (parts[key] for key in sorted(parts))


def sent_by_link(plan: Plan, signs: bool = True) -> dict[str, tuple[int, int]]:
    """{link: bytes of parameters and gradients that a rank sends over it for a micro-batch, and once a step}, with pp
    of the rank that sends most; see `sent_of` for what is left out.

    >>> import fzero
    >>> params, mesh = {"w": torch.zeros(64, 512)}, fzero.fake_mesh({"dp": 2, "rp": 2})
    >>> fzero.zero_plan(3, params, mesh, codec="params=int8,grads=int4,hpz").sent_by_link()
    {'rp': (0, 12800), 'dp': (25600, 0)}
    """
    totals: dict[str, tuple[int, int]] = {}
    for rank in range(plan.mesh.pp.size):
        by_link: dict[str, list[int]] = {}
        for entry in sent_of(plan, rank, signs):
            if entry.itemsize:
                so_far = by_link.setdefault(entry.link, [0, 0])
                so_far[:] = (total + n * entry.itemsize for total, n in zip(so_far, entry.amounts))
        for link, (micro_batch_bytes, step_bytes) in by_link.items():
            max_micro, max_step = totals.get(link, (0, 0))
            totals[link] = max(max_micro, micro_batch_bytes), max(max_step, step_bytes)
    return totals
