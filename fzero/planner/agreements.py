"""What members that train apart (see train/local.py) take to agree: traced as a step is, and played on a device.

An agreement is the members' differences, in codes if there are any, their sum over rp, and the outer optimizer's
update. A step has its share of it, and of the means that members take after each of the first `after` steps: the mean
over the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.comm.ledger import sent_elements
from fzero.core.device import FakeDevice, Target
from fzero.kernels.registry import Kernels
from fzero.planner import fake_inductor
from fzero.planner.devices import Device
from fzero.planner.operations import Op
from fzero.planner.step_trace import Tracer, Transfer, fake_state, shared_mesh, shared_model
from fzero.planner.timing import Timing, play_of, weighed
from fzero.run import build
from fzero.run.config import RunConfig
from fzero.run.measure.live_bytes import MemoryTrace, recorded
from fzero.train.codes import coder_of
from fzero.train.local import begin_again, meet

METRICS = 6  # numbers of a step that members add up, see `join` in run/members.py


class Agreement(NamedTuple):
    """The events of an agreement."""

    events: tuple[Op | Transfer, ...]

    @property
    def bytes(self) -> int:
        """What a rank sends over rp."""
        moves = [event for event in self.events if isinstance(event, Transfer) and event.axis == "rp"]
        return sum(move.bytes for move in moves if move.event == "start")


def trace_agreement(
    config: RunConfig, sizes: Mapping[str, int], rank: int, target: Target, together: bool = False
) -> Agreement:
    """The agreement of a rank in a run with local steps, on fake tensors. together: the mean that members take after
    each of the first `local.after` steps."""
    mesh = shared_mesh(tuple(sizes.items()), rank)
    with torch.no_grad(), FakeDevice(target, lower=fake_inductor.lowering()) as mode:
        job = build.build(config, mesh, model=shared_model(config.model))
        assert job.members is not None  # local.method is given
        local, state = job.members.local, fake_state(job, mode)
        coder = coder_of(local.codec, 128, Kernels()) if local.codec else None
        tracer, device = Tracer(target.kind == "cuda"), None if target.kind == "cpu" else mode.device
        record = MemoryTrace(state, {}, device=device, note=tracer.note, told=tracer.told)
        with recorded(record, mesh.ledger):
            if together:
                meet(job.plan, state, mesh["rp"])
            else:
                begin_again(job.plan, job.members.outer, mesh["rp"], state, coder)
            record.close(state)
    return Agreement(tuple(event for stay in record.stays for event in stay.events))


def with_agreements(
    timing: Timing, config: RunConfig, sizes: Mapping[str, int], device: Device, rank: int
) -> list[tuple[Timing, float]]:
    """[(the Timing of a member's step with its share of the agreements, and with the sum of its metrics; its part of
    the run)]: of the steps that end apart, and of the first `local.after` if there are any."""
    local, found = config.local, trace_agreement(config, sizes, rank, device.target)
    agreement = played(config, sizes, device, found.events)
    sent = sent_elements("psum", 8 * METRICS, sizes["rp"])
    row = [Transfer(event, 0, "psum", "rp", sent, "metrics", None) for event in ("start", "wait")]
    metrics = played(config, sizes, device, row)
    first = local.after / config.train.steps
    apart = weighed([(timing, 1.0), (agreement, 1.0 / local.every), (metrics, 1.0)])
    if not first:
        return [(apart, 1.0)]
    found = trace_agreement(config, sizes, rank, device.target, together=True)
    mean = played(config, sizes, device, found.events)
    return [(apart, 1.0 - first), (weighed([(timing, 1.0), (mean, 1.0), (metrics, 1.0)]), first)]


def sent_in_agreements(config: RunConfig, sizes: Mapping[str, int], rank: int, target: Target) -> float:
    """The bytes that a rank sends over rp to agree in a step, the mean over the run."""
    local, first = config.local, config.local.after / config.train.steps
    apart = trace_agreement(config, sizes, rank, target).bytes / local.every
    mean = trace_agreement(config, sizes, rank, target, together=True).bytes if first else 0
    return apart * (1.0 - first) + mean * first


def played(config: RunConfig, sizes: Mapping[str, int], device: Device, events: Sequence[Op | Transfer]) -> Timing:
    """The Timing of events."""
    play = play_of(config, sizes, device)
    play.sums.clear()  # what a step takes besides
    begin = play.clock["device"]
    play.run(events, 0, len(events), ())
    return play.timing()._replace(step_s=play.clock["device"] - begin)
