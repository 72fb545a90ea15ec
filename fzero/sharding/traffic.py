"""What a rank sends of parameters and gradients, in the numbers of elements that the ledger counts: the one closed form
beside it. The table of a plan, what a rank of a pipeline sends and the exposed time of a search read it.

Left out are the activations within a stage (tensor and context parallelism), losses, norms, and the largest magnitudes
of leaves that are gathered as float8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero.comm.axes import PP, RP
from fzero.comm.ledger import sent_elements
from fzero.comm.messages import bucket_groups, padded
from fzero.sharding.leaf_plan import COLLECTIVES, LeafPlan, Moves, is_coded

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
