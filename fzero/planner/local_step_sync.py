"""What members that train apart (train/local_steps.py) take to agree: traced as a step is, and played on a device.

An agreement is the members' differences, in codes if there are any, their sum over rp, and the outer optimizer's
update. A step has its share of it, and of the means after each of the first `after` steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.comm.ledger import sent_elements
from fzero.core.device import FakeDevice, Target
from fzero.planner import fake_inductor
from fzero.planner.devices import Device
from fzero.planner.operations import ExecutedOp
from fzero.planner.step_trace import Tracer, Transfer, fake_state, shared_mesh, shared_model
from fzero.planner.timing import Timing, play_of, weighted_sum
from fzero.run.config.run_config import RunConfig
from fzero.run.measure.live_bytes import MemoryTrace, recorded
from fzero.run.setup import build

METRICS = 6  # numbers of a step that members add up, see `join` in run/setup/build_optim.py


class AgreementEvents(NamedTuple):
    """The events of an agreement."""

    events: tuple[ExecutedOp | Transfer, ...]

    @property
    def bytes(self) -> int:
        """What a rank sends over rp."""
        moves = [event for event in self.events if isinstance(event, Transfer) and event.axis == "rp"]
        return sum(move.bytes for move in moves if move.event == "start")


def trace_agreement(
    config: RunConfig, sizes: Mapping[str, int], rank: int, target: Target, full_mean: bool = False
) -> AgreementEvents:
    """The agreement of a rank on fake tensors; full_mean: that after each of the first `local.after` steps."""
    mesh = shared_mesh(tuple(sizes.items()), rank)
    with torch.no_grad(), FakeDevice(target, lower=fake_inductor.lowering()) as mode:
        job = build.build(config, mesh, model=shared_model(config.model))
        assert job.members is not None  # local.method is given
        state, agree = fake_state(job, mode), job.members.average if full_mean else job.members.restart
        tracer, device = Tracer(target.kind == "cuda"), None if target.kind == "cpu" else mode.device
        record = MemoryTrace(state, {}, device=device, note=tracer.note, make_transfer=tracer.make_transfer)
        with recorded(record, mesh.ledger):
            agree(state, job.plan)
            record.close(state)
    return AgreementEvents(tuple(event for stay in record.stays for event in stay.events))


def with_agreements(
    timing: Timing, config: RunConfig, sizes: Mapping[str, int], device: Device, rank: int
) -> list[tuple[Timing, float]]:
    """[(the Timing of a member's step with its share of the agreements, its part of the run)]."""
    local, trace = config.local, trace_agreement(config, sizes, rank, device.target)
    agreement = simulate_events(config, sizes, device, trace.events)
    sent = sent_elements("psum", 8 * METRICS, sizes["rp"])
    row = [Transfer(event, 0, "psum", "rp", sent, "metrics", None) for event in ("start", "wait")]
    metrics = simulate_events(config, sizes, device, row)
    first = local.after / config.train.steps
    local_timing = weighted_sum([(timing, 1.0), (agreement, 1.0 / local.every), (metrics, 1.0)])
    if not first:
        return [(local_timing, 1.0)]
    trace = trace_agreement(config, sizes, rank, device.target, full_mean=True)
    mean = simulate_events(config, sizes, device, trace.events)
    return [(local_timing, 1.0 - first), (weighted_sum([(timing, 1.0), (mean, 1.0), (metrics, 1.0)]), first)]


def agreement_bytes(config: RunConfig, sizes: Mapping[str, int], rank: int, target: Target) -> float:
    """The bytes that a rank sends over rp to agree in a step, the mean over the run."""
    local, first = config.local, config.local.after / config.train.steps
    fragment_bytes = trace_agreement(config, sizes, rank, target).bytes / local.every
    mean = trace_agreement(config, sizes, rank, target, full_mean=True).bytes if first else 0
    return fragment_bytes * (1.0 - first) + mean * first


def simulate_events(
    config: RunConfig, sizes: Mapping[str, int], device: Device, events: Sequence[ExecutedOp | Transfer]
) -> Timing:
    """The Timing of events."""
    play = play_of(config, sizes, device)
    play.sums.clear()  # what a step takes besides
    begin = play.clock["device"]
    play.run(events, 0, len(events), ())
    return play.timing()._replace(step_s=play.clock["device"] - begin)
