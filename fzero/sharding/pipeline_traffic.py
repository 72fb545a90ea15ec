"""What a rank of a pipeline sends in a step, in the numbers of elements that the ledger counts.

Left out: the activations within a stage (tensor and context parallelism), losses, norms, and the largest magnitudes of
float8 gathers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero.comm.axes import PP
from fzero.comm.bucket import bucket_groups
from fzero.comm.ledger import sent_elements
from fzero.sharding.leaf_plan import COLLECTIVES, LeafPlan, Moves

Plan = Any  # fzero.sharding.plan.Plan, which prints this
KINDS = ("activations", "gradients", "layers", "outside")


class RankTraffic(NamedTuple):
    """What a rank sends of one kind by one collective over one link, in elements or messages of a micro-batch."""

    kind: str  # of KINDS
    collective: str
    link: str
    itemsize: int  # bytes of an element; 0: of activations, in the dtype of products
    per_micro_batch: int  # for each micro-batch
    per_step: int  # once a step

    @property
    def amounts(self) -> tuple[int, int]:
        """`per_micro_batch` and `per_step`."""
        return self.per_micro_batch, self.per_step


class Sums:
    """Adds up what a rank sends."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, str, str, int], list[int]] = {}

    def add(self, kind: str, collective: str, link: str, itemsize: int, per_micro_batch: int, per_step: int) -> None:
        """Add elements of each micro-batch, and of a step."""
        if per_micro_batch or per_step:
            so_far = self.totals.setdefault((kind, collective, link, itemsize), [0, 0])
            so_far[0], so_far[1] = so_far[0] + per_micro_batch, so_far[1] + per_step

    def walk(self, kind: str, leaf: LeafPlan, path: Moves, itemsize: int, elements: int, times: tuple[int, int]) -> int:
        """Add the collectives of a path of such a leaf; return the elements behind it."""
        for op, link in path:
            ranks = leaf.ranks(link)
            full = elements * ranks if op == "gather" else elements
            sent = sent_elements(COLLECTIVES[op], full, ranks)
            self.add(kind, COLLECTIVES[op], link, itemsize, times[0] * sent, times[1] * sent)
            elements = elements // ranks if op == "scatter" else full
        return elements


def sent_by_rank(plan: Plan) -> tuple[tuple[RankTraffic, ...], ...]:
    """By rank of pp what it sends in a step, with parameters gathered again for each backward pass.

    >>> import fzero
    >>> from fzero import models
    >>> model = models.build(models.preset("llama-tiny"))
    >>> traffic = sent_by_rank(fzero.zero_plan(0, model, fzero.fake_mesh({"pp": 2})))
    >>> [(entry.kind, entry.collective, entry.per_micro_batch, entry.per_step) for entry in traffic[0]]
    [('activations', 'message', 1, 0), ('outside', 'gather_to', 0, 32896), ('outside', 'scatter_from', 0, 32768)]
    """
    return tuple(sent_of(plan, rank) for rank in range(plan.mesh.pp.size))


def sent_of(plan: Plan, rank: int) -> tuple[RankTraffic, ...]:
    """What a rank of pp sends in a step."""
    sums, ranks = Sums(), plan.stages.ranks
    for stage in plan.stages.chunks(rank):
        if stage + 1 < len(ranks) and ranks[stage + 1] != rank:
            sums.add("activations", "message", PP, 0, 1, 0)
        if stage and ranks[stage - 1] != rank:
            sums.add("gradients", "message", PP, 0, 1, 0)
    stacks: dict[str, list[str]] = {}
    for name, leaf in plan.leaves.items():
        if leaf.stacked:
            stacks.setdefault(name.split("/")[0], []).append(name)
    for names in stacks.values():
        layers = len(plan.leaves[names[0]].params.rows[rank])
        add_group(sums, plan, "layers", names, layers, 2, frozenset())
    visited: set[str] = set()
    for names in segments_outside(plan, rank):
        add_group(sums, plan, "outside", names, 1, 1, frozenset(visited & set(names)))
        visited |= set(names)
    add_over_pp(sums, plan, rank)
    add_updated(sums, plan, rank)
    ordered = sorted(sums.totals.items(), key=lambda entry: (KINDS.index(entry[0][0]), entry[0]))
    return tuple(RankTraffic(*key, *amounts) for key, amounts in ordered)


def segments_outside(plan: Plan, rank: int) -> Iterator[list[str]]:
    """The leaves of each part outside the layers that a rank runs, in the order of a forward pass."""
    parts: dict[tuple[int, int, str], list[str]] = {}
    for name, uses in plan.outside.items():
        for stage, segment in uses:
            if plan.stages.ranks[stage] == rank:
                parts.setdefault((stage, segment_order(segment), segment), []).append(name)
    return (parts[key] for key in sorted(parts))


def segment_order(segment: str) -> int:
    """The place of a part among those of one stage: the embedding first and the head last."""
    return {"embed": 0, "head": 2}.get(segment, 1)


def add_group(
    sums: Sums, plan: Plan, kind: str, names: Sequence[str], times: int, passes: int, shared_leaves: frozenset[str]
) -> None:
    """Add what is sent of `times` groups of leaves that are fetched together, and the sums of their gradients."""
    leaves = [plan.leaves[name] for name in names]
    shards = [leaf for leaf in leaves if leaf.gathered]
    dtypes = [torch.uint8 if leaf.name in plan.float8 else leaf.dtype for leaf in shards]
    numels = [leaf.layer_numel(leaf.use) for leaf in shards]
    like = [torch.empty(numel, dtype=dtype, device="meta") for numel, dtype in zip(numels, dtypes)]
    for bucket in bucket_groups(like, [leaf.link for leaf in shards]):
        first, elements = shards[bucket[0]], sum(numels[i] for i in bucket)
        path = (("gather", first.link),)
        sums.walk(kind, first, path, dtypes[bucket[0]].itemsize, elements, (times * passes, 0))
    trained = [leaf for leaf in leaves if leaf.trained]
    paths = {leaf.name: leaf.moves_within_stage for leaf in trained}
    for leaf in (leaf for leaf in trained if leaf.name in plan.sign_leaves):
        micro_path, end = paths[leaf.name]
        paths[leaf.name] = micro_path, tuple(move for move in end if move[1] != leaf.sum_link)
        size = int(plan.sign_bytes(leaf.name)) // leaf.layers * times
        for collective in ("all_to_all", "all_gather"):
            sent = sent_elements(collective, size, leaf.ranks(leaf.sum_link))
            sums.add(kind, collective, leaf.sum_link, 1, 0, sent)
    numels = [leaf.layer_numel(leaf.compute) for leaf in trained]
    grads = [torch.empty(numel, dtype=leaf.dtype, device="meta") for numel, leaf in zip(numels, trained)]
    kinds = [(paths[leaf.name], leaf.name in shared_leaves) for leaf in trained]
    width = plan.reduce_dtype.itemsize
    for bucket in bucket_groups(grads, kinds):
        (micro_path, end), is_shared = kinds[bucket[0]]
        first, elements = trained[bucket[0]], sum(numels[i] for i in bucket)
        elements = sums.walk(kind, first, micro_path, width, elements, (times, 0))
        if not is_shared or plan.reduce == "canonical":  # else the part before it ends the sum
            sums.walk(kind, first, end, width, elements, (0, times))


def add_over_pp(sums: Sums, plan: Plan, rank: int) -> None:
    """Add the leaves outside the layers that pp shards: to the ranks that use them, and their sums from there."""
    p = plan.mesh.pp.size
    for name, users in plan.users.items():
        leaf, using_ranks = plan.leaves[name], {user for _, user in users}
        size = leaf.dtype.itemsize
        if leaf.params.dims != leaf.use.dims:
            shard_numel = leaf.numel(leaf.params)
            sums.add("outside", "gather_to", PP, size, 0, shard_numel * len(using_ranks - {rank}))
            if leaf.link and rank in using_ranks and leaf.params.over_data and not leaf.use.over_data:
                sums.walk("outside", leaf, (("gather", leaf.link),), size, shard_numel * p, (0, 1))
        if leaf.trained:
            times = sum(source == rank for _, source in users)
            sent = leaf.numel(leaf.opt) * (p - 1) * times
            sums.add("outside", "scatter_from", PP, plan.policy.accumulate.itemsize, 0, sent)


def add_updated(sums: Sums, plan: Plan, rank: int) -> None:
    """Add the gathers over data ranks of what is updated in shards and used whole."""
    for leaf in plan.leaves.values():
        if leaf.updated_in_shards:
            layers = len(leaf.params.rows[rank]) if leaf.stacked else 1
            full_numel = leaf.layer_numel(leaf.params) * layers
            sent = sent_elements("all_gather", full_numel, leaf.ranks(leaf.link))
            kind = "layers" if leaf.stacked else "outside"
            sums.add(kind, "all_gather", leaf.link, leaf.dtype.itemsize, 0, sent)


def sent_table(plan: Plan) -> list[str]:
    """The lines of `print(plan)` that say what each rank of pp sends."""
    times = "a micro-batch", "an update" if plan.delayed else "a step"
    head = ("rank of pp", "activations", "gradients", *(f"{kind}, {period}" for kind in KINDS[2:] for period in times))
    rows: list[tuple[str, ...]] = [head]
    max_bytes = [0, 0]
    for rank, entries in enumerate(sent_by_rank(plan)):
        messages = [sum(entry.per_micro_batch for entry in entries if entry.kind == kind) for kind in KINDS[:2]]
        elements = [
            sum(entry.amounts[i] for entry in entries if entry.kind == kind) for kind in KINDS[2:] for i in (0, 1)
        ]
        max_bytes = [max(max_bytes[i], sum(entry.amounts[i] * entry.itemsize for entry in entries)) for i in (0, 1)]
        rows.append((str(rank), *(f"{n:,}" for n in (*messages, *elements))))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
    return [
        "sent by a rank: messages over its borders for each micro-batch (of a model's activations [B, T, D]), and "
        "elements of parameters and gradients",
        *lines,
        f"beside messages a rank sends at most {max_bytes[0]:,} bytes a micro-batch and {max_bytes[1]:,} {times[1]}; "
        f"sums of gradients travel in {str(plan.reduce_dtype).removeprefix('torch.')}",
    ]
