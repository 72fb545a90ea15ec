"""What a rank of a pipeline sends in a step of the leaves' parameters and gradients, and over the borders of its
stages: in the numbers of elements that the ledger counts.

Left out are the activations within a stage (tensor and context parallelism), losses, norms, and the largest magnitudes
of leaves that are gathered as float8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero.comm.bucket import bucket_groups
from fzero.comm.ledger import sent_elements
from fzero.comm.rank_tables import links_of
from fzero.sharding import sign_sums
from fzero.sharding.gradient_paths import COLLECTIVES, Moves, moves, ranks_of, reduce_dtype, without_pp
from fzero.sharding.pipeline_plan import users_of
from fzero.sharding.sign_sums import layers_of, sign_bytes, sign_leaves
from fzero.sharding.slices import is_stacked, local_numel
from fzero.sharding.spec import Spec
from fzero.sharding.zero_specs import shard_axes

Plan = Any  # fzero.sharding.plan.Plan, which prints this
KINDS = ("activations", "gradients", "layers", "outside")


class RankTraffic(NamedTuple):
    """What a rank sends of one kind by one collective over one link.

    Of "activations" and their "gradients", over the borders of its stages, `per_micro_batch` is the number of messages;
    of "layers", and of "outside", the leaves outside the layers, `per_micro_batch` and `per_step` are elements.
    """

    kind: str  # of WHATS
    collective: str
    link: str
    itemsize: int  # bytes of an element; 0: of activations, in the dtype of products
    per_micro_batch: int  # for each micro-batch
    per_step: int  # once a step

    @property
    def amounts(self) -> tuple[int, int]:
        """`part` and `once`."""
        return self.per_micro_batch, self.per_step


class Sums:
    """Adds up what a rank sends."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes, self.totals = sizes, dict[tuple[str, str, str, int], list[int]]()

    def add(self, kind: str, collective: str, link: str, itemsize: int, per_micro_batch: int, per_step: int) -> None:
        """Add elements of each micro-batch, and of a step."""
        if per_micro_batch or per_step:
            so_far = self.totals.setdefault((kind, collective, link, itemsize), [0, 0])
            so_far[0], so_far[1] = so_far[0] + per_micro_batch, so_far[1] + per_step

    def gather(
        self, kind: str, link: str, itemsize: int, elements: int, per_micro_batch: int = 0, per_step: int = 0
    ) -> None:
        """Add gathers of so many elements, those of the whole tensor: `per_micro_batch` in each micro-batch, `per_step`
        in a step."""
        sent = sent_elements("all_gather", elements, ranks_of(link, self.sizes))
        self.add(kind, "all_gather", link, itemsize, per_micro_batch * sent, per_step * sent)

    def walk(self, kind: str, path: Moves, itemsize: int, elements: int, times: tuple[int, int]) -> int:
        """Add the collectives of a path of gradients, so often in a micro-batch and in a step; return the elements
        behind it."""
        for op, link in path:
            ranks = ranks_of(link, self.sizes)
            full = elements * ranks if op == "gather" else elements
            sent = sent_elements(COLLECTIVES[op], full, ranks)
            self.add(kind, COLLECTIVES[op], link, itemsize, times[0] * sent, times[1] * sent)
            elements = elements // ranks if op == "scatter" else full
        return elements


def sent_by_rank(plan: Plan) -> tuple[tuple[RankTraffic, ...], ...]:
    """By rank of pp what it sends in a step, with parameters gathered again for each backward pass (as
    Execution(reshard=True) has them).

    >>> import fzero
    >>> from fzero import models
    >>> model = models.build(models.preset("llama-tiny"))
    >>> traffic = sent_by_rank(fzero.zero_plan(0, model, fzero.fake_mesh({"pp": 2})))
    >>> [(entry.kind, entry.collective, entry.per_micro_batch, entry.per_step) for entry in traffic[0]]
    [('activations', 'message', 1, 0), ('outside', 'gather_to', 0, 32896), ('outside', 'scatter_from', 0, 32768)]
    """
    return tuple(sent_of(plan, rank) for rank in range(plan.sizes["pp"]))


def sent_of(plan: Plan, rank: int) -> tuple[RankTraffic, ...]:
    """What a rank of pp sends in a step."""
    sums, ranks = Sums(plan.sizes), plan.stages.ranks
    for stage in plan.stages.chunks(rank):
        if stage + 1 < len(ranks) and ranks[stage + 1] != rank:
            sums.add("activations", "message", "pp", 0, 1, 0)
        if stage and ranks[stage - 1] != rank:
            sums.add("gradients", "message", "pp", 0, 1, 0)
    stacks: dict[str, list[str]] = {}
    for name in plan.leaves:
        if is_stacked(name):
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


def layer_numel(plan: Plan, name: str, spec: Spec) -> int:
    """The elements of a leaf, or of a layer of a stacked one, that a rank holds under a spec."""
    shape = plan.leaves[name].shape
    if not is_stacked(name):
        return local_numel(shape, spec, plan.sizes)
    return local_numel(shape[1:], spec.layer, plan.sizes)


def add_group(
    sums: Sums, plan: Plan, kind: str, names: Sequence[str], times: int, passes: int, shared_leaves: frozenset[str]
) -> None:
    """Add what is sent of leaves that are fetched together, `times` groups of them: gathers for so many passes of a
    micro-batch, and the sums of their gradients.

    shared_leaves: leaves for which a part before it on the rank gives a gradient too.
    """
    links, sizes = {name: link_of(plan, name) for name in names}, plan.sizes
    numels = {name: layer_numel(plan, name, plan.leaves[name].use) for name in names}
    shards = [name for name in names if links[name] and "dp" in plan.leaves[name].use.axes]
    dtypes = [torch.uint8 if name in plan.float8 else plan.leaves[name].dtype for name in shards]
    like = [torch.empty(numels[name], dtype=dtype, device="meta") for name, dtype in zip(shards, dtypes)]
    for bucket in bucket_groups(like, [links[name] for name in shards]):
        link = links[shards[bucket[0]]]
        gathered = sum(numels[shards[i]] for i in bucket) * ranks_of(link, sizes)
        sums.gather(kind, link, dtypes[bucket[0]].itemsize, gathered, per_micro_batch=times * passes)
    trained = [name for name in names if plan.leaves[name].trained]
    paths = {name: without_pp(path_of(plan, name)) for name in trained}
    for name in sign_leaves(plan) & set(trained):
        micro_path, end = paths[name]
        link = sign_sums.link_of(plan.leaves[name], sizes)
        paths[name] = micro_path, tuple(move for move in end if move[1] != link)
        size = int(sign_bytes(plan, name)) // layers_of(name, plan.leaves[name]) * times
        for collective in ("all_to_all", "all_gather"):
            sums.add(kind, collective, link, 1, 0, sent_elements(collective, size, ranks_of(link, plan.sizes)))
    full_numels = {name: layer_numel(plan, name, plan.leaves[name].compute) for name in trained}
    grads = [torch.empty(full_numels[name], dtype=plan.leaves[name].dtype, device="meta") for name in trained]
    kinds = [(paths[name], name in shared_leaves) for name in trained]
    width = reduce_dtype(plan).itemsize
    for bucket in bucket_groups(grads, kinds):
        (micro_path, end), is_shared = kinds[bucket[0]]
        elements = sum(full_numels[trained[i]] for i in bucket)
        elements = sums.walk(kind, micro_path, width, elements, (times, 0))
        if not is_shared or plan.reduce == "canonical":  # else the part before it ends the sum
            sums.walk(kind, end, width, elements, (0, times))


def link_of(plan: Plan, name: str) -> str:
    """The link over which ZeRO shards a leaf of a plan; "" for none."""
    return "".join(links_of(shard_axes(plan.leaves[name].compute), plan.sizes))


def path_of(plan: Plan, name: str) -> tuple[Moves, Moves]:
    """The `moves` of a leaf of a plan."""
    leaf = plan.leaves[name]
    return moves(leaf.compute, leaf.grads, leaf.opt, plan.sizes)


def add_over_pp(sums: Sums, plan: Plan, rank: int) -> None:
    """Add the leaves outside the layers that pp shards: to the ranks that use them, and their sums from there."""
    p = plan.sizes["pp"]
    for name, users in users_of(plan).items():
        link = link_of(plan, name)
        leaf, using_ranks = plan.leaves[name], {user for _, user in users}
        size = leaf.dtype.itemsize
        if leaf.params.dims != leaf.use.dims:
            shard_numel = local_numel(leaf.shape, leaf.params, plan.sizes)
            sums.add("outside", "gather_to", "pp", size, 0, shard_numel * len(using_ranks - {rank}))
            if link and rank in using_ranks and "dp" in leaf.params.axes and "dp" not in leaf.use.axes:
                sums.gather("outside", link, size, shard_numel * p * ranks_of(link, plan.sizes), per_step=1)
        if leaf.trained:
            sum_numel = local_numel(leaf.shape, leaf.opt, plan.sizes) * (p - 1)
            times = sum(source == rank for _, source in users)
            sums.add("outside", "scatter_from", "pp", plan.policy.accumulate.itemsize, 0, sum_numel * times)


def add_updated(sums: Sums, plan: Plan, rank: int) -> None:
    """Add the gathers over data ranks of what is updated in shards and used whole."""
    for name, leaf in plan.leaves.items():
        link = link_of(plan, name)
        if link and leaf.trained and "dp" in leaf.opt.axes and "dp" not in leaf.params.axes:
            layers = len(leaf.params.rows[rank]) if is_stacked(name) else 1
            full_numel = layer_numel(plan, name, leaf.params) * layers
            kind = "layers" if is_stacked(name) else "outside"
            sums.gather(kind, link, leaf.dtype.itemsize, full_numel, per_step=1)


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
        f"sums of gradients travel in {str(reduce_dtype(plan)).removeprefix('torch.')}",
    ]
