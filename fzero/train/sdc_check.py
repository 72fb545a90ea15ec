"""Detect silent corruption: compute each rank's micro-batch on another rank too, and compare replicas, as digests.

A processor that multiplies wrongly, or a memory that flips a bit, raises no error. But the gradient of a micro-batch is
a function: whoever computes it must get the same bits, and what the plan replicates must be equal.

Ref: Dixit et al. 2021, "Silent data corruptions at scale", arXiv:2102.11245; Gemini Team 2023, arXiv:2312.11805,
section 3 (deterministic replay against silent data corruption).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.comm.axes import AXES, DP, RP
from fzero.comm.rank_tables import device_of, gather_rows
from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.digest import Started, read_digests, start_digest
from fzero.core.precision import ScalerState
from fzero.models import base
from fzero.offload import Nvme
from fzero.optim import GradientTransformation
from fzero.sharding import Mesh, Plan
from fzero.sharding.prefetch import LeafGroup
from fzero.sharding.spec import Spec
from fzero.train.execution import Execution
from fzero.train.gradient import layer_draws, make_backward
from fzero.train.loss import LossFn, draws_of
from fzero.train.pipeline_executor import MicroBatches, Turn
from fzero.train.stage_exchange import StageSharing
from fzero.train.state import TrainState, expect_alive, state_specs

WORD = 1 << 64  # digests are modulo this


class Digests:
    """Takes gradients in place of a reducer; `digests` adds up by leaf."""

    def __init__(self) -> None:
        self.digests: dict[str, list[Started]] = {}

    def reduce_group(self, group: LeafGroup, names: Sequence[str], grads: list[Tensor], **_: Any) -> None:
        """Take (and empty) the gradients of a part; equal leaves add up."""
        for name, grad in zip(names, grads):
            layer = group.layer or 0
            value = start_digest(grad[None], (layer + 1, *grad.shape), (layer, *[0] * grad.dim()))
            self.digests.setdefault(name, []).append(value)
        grads.clear()


@checked()
def make_check(
    model: base.Model | LossFn,
    tx: GradientTransformation,
    plan: Plan,
    *,
    execution: Execution = Execution(),  # noqa: B008
    nvme: Nvme | None = None,
) -> Callable[[TrainState, Callable[[int], Any]], list[str]]:
    """Return the function `(state, part) -> lines` that looks for silent data corruption; [] if it finds none.

    There is a line for each difference between ranks that should be none; the lines are the same on all ranks.
    `part(m)` is micro-batch m of a batch, for any m below the number of data ranks R. Data rank r computes the loss and
    the gradient of micro-batch r, and those of micro-batch r - 1 (mod R), which rank r - 1 has computed; alone, it
    computes its own one twice. The state is not changed, and nothing is summed: the digests are of each rank's own
    values. Leaves on a disk are not compared. On a mesh with pp the ranks of a stage are compared with one another;
    what one of them computes wrongly goes on to other stages, whose ranks then differ too. The arguments are those of
    `make_train_step`.
    Communicates: for the parameters, as much as the passes of two micro-batches; and an all_gather of 8 bytes a leaf.

    >>> def loss(params, batch):
    ...     return (batch["x"] @ params["w"]).square().sum(), batch["x"].shape[0]
    >>> params, tx = {"w": torch.ones(2)}, fzero.optim.sgd(0.1)
    >>> plan = fzero.zero_plan(0, params, fzero.one_process())
    >>> check = make_check(loss, tx, plan)
    >>> check(fzero.init_state(params, tx, plan, seed=0), lambda m: {"x": torch.eye(2)})
    []

    Ref: Dixit et al. 2021, "Silent data corruptions at scale", arXiv:2102.11245.
    """
    backward, mesh, policy = make_backward(model, plan.with_slack(), execution, nvme), plan.mesh, plan.policy
    specs = state_specs(plan, tx)
    compared = ["the loss", *sorted(plan.trained_leaves)]
    shared = {name: spec for name, spec in pytree.named_leaves(specs).items() if copies(spec, mesh) > 1}

    def compute_digests(state: TrainState, m: int, micro_batch: Any) -> dict[str, list[Started]]:
        """The digests of the loss and the gradients; [] of those that are another pp rank's."""
        rows, sink = pytree.leaves(micro_batch)[0], Digests()
        # As in a step: float16 gradients need that room.
        seed = torch.ones((), device=state.step.device)
        if policy.loss_scale:
            assert isinstance(state.scaler, ScalerState)
            seed = state.scaler.scale / rows.numel()
        draws = layer_draws(draws_of(model, state), plan.layers, execution)
        params = StageSharing(plan, rows.device).gather(state.params)
        losses = backward([Turn(params, sink)], MicroBatches([micro_batch], [m * rows.shape[0]], draws), seed)
        digests = {"the loss": [start_digest(loss.total.detach()) for loss in losses], **sink.digests}
        return {name: digests.get(name, []) for name in compared}

    def check(state: TrainState, micro_batch: Callable[[int], Any]) -> list[str]:
        expect_alive(state)
        with torch.no_grad(), mesh.ledger.phase("check"):
            previous = (mesh.data_rank - mesh.ep.size) % mesh.data_size  # ranks of ep compute together
            local, repeat = (compute_digests(state, m, micro_batch(m)) for m in (mesh.data_rank, previous))
            leaves = pytree.named_leaves(state)
            replicated = {name: [start_digest(leaves[name])] for name in shared if isinstance(leaves[name], Tensor)}
            first, second, third = (gather_words(row, mesh) for row in read_sums([replicated, local, repeat]))
        return [*unlike(list(replicated), shared, first, mesh), *disagreeing(list(local), second, third, mesh)]

    return check


def read_sums(tables: Sequence[Mapping[str, Sequence[Started]]]) -> list[list[int]]:
    """For each table the sums of its digests modulo 2^64, all of them read at once."""
    read = iter(read_digests([digest for table in tables for parts in table.values() for digest in parts]))
    return [[sum(next(read) for _ in parts) % WORD for parts in table.values()] for table in tables]


def gather_words(words: list[int], mesh: Mesh) -> list[list[int]]:
    """The 64-bit words of all ranks, by rank, as int64 of the same bits."""
    row = torch.tensor(
        [word - WORD if word >= WORD // 2 else word for word in words], dtype=torch.int64, device=device_of(mesh)
    )
    return gather_rows(row, mesh, leaf="digests").tolist()


def coordinates(mesh: Mesh) -> list[dict[str, int]]:
    """{axis: coordinate} of every rank."""
    names = AXES.by_rank
    return [dict(zip(names, point)) for point in itertools.product(*(range(mesh[name].size) for name in names))]


def copies(spec: Spec, mesh: Mesh) -> int:
    """The number of ranks that hold the same part of a leaf."""
    return math.prod(axis.size for axis in mesh.axes if axis.name not in spec.axes)


def replicas(spec: Spec, mesh: Mesh) -> list[list[int]]:
    """The ranks in groups that hold the same part of a leaf."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, point in enumerate(coordinates(mesh)):
        groups.setdefault(tuple(point[axis] for axis in spec.axes), []).append(rank)
    return list(groups.values())


def unlike(names: list[str], specs: dict[str, Spec], table: list[list[int]], mesh: Mesh) -> list[str]:
    """A line for each group of ranks whose replicas differ; the minority is to blame."""
    lines, reported = [], set()
    groups = {spec.axes: replicas(spec, mesh) for spec in specs.values()}
    for i, name in enumerate(names):
        for ranks in groups[specs[name].axes]:
            counts = Counter(table[r][i] for r in ranks)
            if len(counts) == 1:
                continue
            value, max_count = counts.most_common(1)[0]
            odd = tuple(r for r in ranks if table[r][i] != value) if 2 * max_count > len(ranks) else ()
            if (odd, tuple(ranks)) in reported:
                continue
            reported.add((odd, tuple(ranks)))
            group = f"{show(ranks)} should hold the same {name}"
            lines.append(
                f"{group} and {show(odd)} {'has' if len(odd) == 1 else 'have'} another one"
                if odd
                else f"{group} and do not"
            )
    return lines


def disagreeing(names: list[str], local: list[list[int]], repeat: list[list[int]], mesh: Mesh) -> list[str]:
    """A line for each rank whose micro-batch the next computes differently; one unlike both neighbours is to blame."""
    ranks = {tuple(point.values()): rank for rank, point in enumerate(coordinates(mesh))}
    mismatches = []
    rank_count = mesh.rp.size * mesh.dp.size  # of ranks with other micro-batches and the same experts
    for rank, point in enumerate(coordinates(mesh)):
        number = (point[RP] * mesh.dp.size + point[DP] + 1) % rank_count
        next_rank = ranks[tuple((point | {RP: number // mesh.dp.size, DP: number % mesh.dp.size}).values())]
        first = next((name for name, a, b in zip(names, local[rank], repeat[next_rank]) if a != b), None)
        if first is not None:
            mismatches.append((rank, next_rank, first))
    times = Counter(rank for a, b, _ in mismatches for rank in {a, b})
    lines = []
    for rank, next_rank, first in mismatches:
        if rank == next_rank:
            lines.append(f"rank {rank} computes one micro-batch twice and differs from itself, first in {first}")
            continue
        odd = [r for r in (rank, next_rank) if times[r] > 1] if rank_count > 2 else []
        blame = f"; rank {odd[0]} differs from another one too" if len(odd) == 1 else ""
        lines.append(f"rank {rank} and rank {next_rank} compute one micro-batch and differ, first in {first}{blame}")
    return lines


def show(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0, 1 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
