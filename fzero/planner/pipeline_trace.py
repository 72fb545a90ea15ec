"""The steps of all ranks of a pipeline, from short traces: one for each kind of rank.

A rank's row has many acts, and few that differ. So a rank of each kind (with stages of the same parts) is traced with
so few micro-batches that every circumstance occurs, and each row is put together of what was recorded: memory is the
sum of births and deaths, time is what the schedule makes of the acts' seconds. The tested law: such a step has the
bytes and messages of one that was traced whole.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fzero.comm.communicator import ONE_SIDED
from fzero.comm.ledger import sent_elements
from fzero.core.device import CPU, Target
from fzero.planner.extrapolate import scaled, set_micro_batches
from fzero.planner.step_trace import FakeStep, Trace, fake_nvme, make_trace, run_step, shared_mesh, shared_model
from fzero.run.config.run_config import RunConfig
from fzero.run.measure.memory_timeline import Change, Life, Stay
from fzero.run.setup import build as run_build
from fzero.run.setup.machine import resolve_auto
from fzero.sharding import Plan
from fzero.sharding.pipeline import Act, Schedule
from fzero.sharding.pipeline.check import gather_row, peak
from fzero.sharding.pipeline.table import BACKWARD
from fzero.sharding.pipeline_plan import expect_parts
from fzero.train.stage_exchange import segments_of, stages_of

Channel = tuple[int, bool]  # the rank of pp at its other end, and whether activations or gradients travel
Circumstance = tuple[object, ...]  # two acts with the same one have the same record
Kind = tuple[object, ...]  # two ranks of the same kind have stages of the same parts


class Record(NamedTuple):
    """A step of one rank with few micro-batches, cut at its acts."""

    step: FakeStep
    parts: int
    prologue: list[Stay]  # until the first act
    acts: list[list[Stay]]
    epilogue: list[Stay]
    circumstances: list[Circumstance]  # of the acts


class RankRow(NamedTuple):
    """What is known of the step of a rank of pp, without its Trace."""

    record: Record  # of its kind
    records: list[Record]  # all of its kind, from which its acts are
    acts: list[list[Stay]]  # of each act of its row, from a record of its kind
    layers: tuple[int, ...]  # of each of its stages
    state_bytes: int  # at rest on its device
    peak_bytes: int
    in_flight: int  # the most micro-batches of a stage between forward and backward


class PipelineTrace(NamedTuple):
    """The step of a pipeline: the fullest rank's Trace, and facts of all."""

    trace: Trace
    schedule: Schedule
    ranks: tuple[RankRow, ...]


def circumstances_of(
    s: Schedule, capacity: int, rank: int, outside: frozenset[int], resident: int = 0
) -> list[Circumstance]:
    """Of each act of a rank's row all that its record may depend on."""
    # That is its kind and chunk; of a backward pass whether it is the first, the second or the last; whether another
    # message will come in the channel from which it takes, whose memory is then made; how many messages are on their
    # way in the one to which it gives (up to room); and whether the backward pass of a forward follows at once. A
    # stage's result may be kept for its backward pass and be on its way at the same time, and is freed by what ends
    # last. Sums over ranks that a backward pass starts end with the next one that gives gradients. outside: the stages
    # with parts outside of stacks, whose gradients come with I. With updates within the row every act is its own.
    chunks, row = s.stages.chunks(rank), s.rows[rank]
    residency = residence(row, chunks, resident)
    pending = Counter(ends_of(s, rank, act)[0] for act in row)
    sent: dict[Channel, list[Act]] = {}  # what each channel was given
    done: dict[tuple[int, int], str] = {}  # by (micro-batch, stage): the kinds of its ended backward passes
    if any(act.kind == "U" for act in row):
        return [(rank, i) for i in range(len(row))]
    previous: Circumstance = ()  # of the last act that gave gradients
    out: list[Circumstance] = []
    for i, act in enumerate(row):
        source, target = ends_of(s, rank, act)
        outgoing = sent.setdefault(target, []) if target is not None else []
        pending[source] -= 1
        facts: list[object] = [
            act.kind,
            chunks.index(act.stage),
            source is not None and pending[source] > 0,
            residency[i],
        ]
        if act.kind == "F":
            facts.append(any(row[i + 1 : i + 2] == (act._replace(kind=kind),) for kind in BACKWARD))
        else:
            forward = act._replace(kind="F")
            flying = sent.get(ends_of(s, rank, forward)[1] or (-1, False), [])[-capacity:]
            last = act.micro_batch == s.parts - 1
            facts += [min(act.micro_batch, 2), last, row[max(0, i - 1)] == forward, forward in flying, previous]
            if act.kind != "I" or act.stage in outside:
                previous = act.kind, chunks.index(act.stage), min(act.micro_batch, 1), last
        if target is not None:
            oldest = outgoing[-capacity] if len(outgoing) >= capacity else None
            facts += [
                min(len(outgoing), capacity),
                capacity,
                oldest and done.get((oldest.micro_batch, oldest.stage), ""),
            ]
        out.append(tuple(facts))
        outgoing.append(act)
        if act.kind != "F":
            done[act.micro_batch, act.stage] = done.get((act.micro_batch, act.stage), "") + act.kind
    return out


def residence(row: Sequence[Act], chunks: Sequence[int], resident: int) -> list[Circumstance]:
    """Of each act of a row what parameters that stay whole have to do with its record."""
    if not resident:
        return [()] * len(row)
    out: list[Circumstance] = []
    history: dict[int, frozenset[str]] = {}
    for act in gather_row(row, resident):
        if act.kind in "GD":
            out[-1:] = [(*circumstance, act.kind, chunks.index(act.stage)) for circumstance in out[-1:]]
        if act.kind == "G":
            history[act.stage] = frozenset()
        elif act.kind == "D":
            del history[act.stage]
        else:
            out.append((history.get(act.stage),))
            if act.stage in history:
                history[act.stage] |= {act.kind}
    return out


def ends_of(s: Schedule, rank: int, act: Act) -> tuple[Channel | None, Channel | None]:
    """The channels from which an act takes and to which it gives, or None."""
    step = 1 if act.kind == "F" else -1

    def channel(stage: int) -> Channel | None:
        remote = 0 <= stage < len(s.stages.ranks) and s.stages.ranks[stage] != rank and act.kind not in "WU"
        return (s.stages.ranks[stage], step > 0) if remote else None

    return channel(act.stage - step), channel(act.stage + step)


def kind_of(plan: Plan, job: run_build.Job, rank: int) -> Kind:
    """The kind of a rank of pp."""
    stages = stages_of(segments_of(job.model, plan), plan, rank)
    return tuple(
        tuple((segment.name, segment.depth, segment.functions) for segment in parts) for parts in stages.values()
    )


def outside_stacks(plan: Plan, job: run_build.Job, rank: int) -> frozenset[int]:
    """The stages of a rank of pp with parts outside of stacks: embedding, joins and head."""
    stages = stages_of(segments_of(job.model, plan), plan, rank)
    return frozenset(stage for stage, parts in stages.items() if any(segment.kind != "block" for segment in parts))


def min_micro_batches(plan: Plan, rank: int, parts: int, outside: frozenset[int], resident: int = 0) -> int:
    """The fewest micro-batches with every circumstance of a row of `parts`."""
    assert plan.pipeline is not None and plan.stages is not None  # a plan with pp
    required = set(circumstances_of(*plan.schedule(parts), rank, outside, resident))
    for count in range(1, parts) if plan.reduce != "canonical" and not plan.delayed else ():
        try:
            expect_parts(plan.pipeline, plan.stages, count)
        except ValueError:
            continue  # a number that the schedule does not take
        if required <= set(circumstances_of(*plan.schedule(count), rank, outside, resident)):
            return count
    return parts


def record_of(config: RunConfig, sizes: Mapping[str, int], rank: int, parts: int, count: int, target: Target) -> Record:
    """The Record of a global rank, with `count` of `parts` micro-batches."""
    step = run_step(set_micro_batches(config, count, parts), sizes, rank, target)
    plan = step.job.plan
    (s, capacity), pp = plan.schedule(count), plan.mesh.pp.rank
    names = {str(act): i for i, act in enumerate(s.rows[pp])}
    marks = [i for i, stay in enumerate(step.stays) if stay.visit.phase == "" and stay.visit.segment in names]
    end = next(i for i, stay in enumerate(step.stays) if (stay.visit.phase, stay.visit.segment) == ("", "row"))
    assert len(marks) == len(s.rows[pp]), f"{len(marks)} of {len(s.rows[pp])} acts"
    acts = [list(step.stays[i:j]) for i, j in zip(marks, [*marks[1:], end])]
    circumstances = circumstances_of(s, capacity, pp, outside_stacks(plan, step.job, pp), config.resident)
    return Record(step, count, list(step.stays[: marks[0]]), acts, list(step.stays[end:]), circumstances)


def trace(
    config: RunConfig,
    sizes: Mapping[str, int],
    rank: int = 0,
    target: Target = CPU,
    say: Callable[[str], None] | None = None,
) -> PipelineTrace:
    """The step of all ranks of pp, of those at the other coordinates of global rank `rank`."""
    config = resolve_auto(config, target)
    mesh = shared_mesh(tuple(sizes.items()), 0)
    job = run_build.build(config, mesh, nvme=fake_nvme(config), model=shared_model(config.model))
    plan, parts = job.plan, run_build.local_micro_batches(config, mesh)
    s, capacity = plan.schedule(parts)
    stride = mesh.size // s.stages.size
    kinds: dict[Kind, list[int]] = {}
    for pp in range(s.stages.size):
        kinds.setdefault(kind_of(plan, job, pp), []).append(pp)
    rows: dict[int, RankRow] = {}
    for ranks in kinds.values():
        recordings: dict[Circumstance, list[Stay]] = {}  # what ranks of this kind have been seen to do
        records: list[Record] = []
        for pp in ranks:
            outside = outside_stacks(plan, job, pp)
            required = circumstances_of(s, capacity, pp, outside, config.resident)
            if not records or not recordings.keys() >= set(required):
                count = min_micro_batches(plan, pp, parts, outside, config.resident)
                if say is not None:
                    say(f"tracing {count} of {parts} micro-batches on rank {pp} of pp")
                record = record_of(config, sizes, pp * stride + rank % stride, parts, count, target)
                records.append(record)
                recordings |= {
                    circumstance: act
                    for circumstance, act in zip(record.circumstances, record.acts)
                    if circumstance not in recordings
                }
            rows[pp] = row_of_rank(records, s, pp, [recordings[circumstance] for circumstance in required])
    ordered = tuple(rows[pp] for pp in range(s.stages.size))
    fullest = max(range(len(ordered)), key=lambda pp: ordered[pp].peak_bytes)
    note = (
        f"{parts} micro-batches from {ordered[fullest].record.parts}" if ordered[fullest].record.parts < parts else ""
    )
    return PipelineTrace(
        assemble_trace(ordered[fullest], s, fullest, config, rank % stride + fullest * stride, note), s, ordered
    )


def row_of_rank(records: list[Record], s: Schedule, rank: int, acts: list[list[Stay]]) -> RankRow:
    """The RankRow of a rank that is of the records' kind."""
    record = records[-1]
    begin, epilogue = edges(record, s, acts)
    profiles = {id(act): profile(act) for act in acts}
    max_bytes, alive_bytes = profile(begin)
    for act in acts:
        max_bytes = max(max_bytes, alive_bytes + profiles[id(act)][0])
        alive_bytes += profiles[id(act)][1]
    max_bytes = max(max_bytes, alive_bytes + profile(epilogue)[0])
    layers = tuple(len(s.stages.layers[stage]) for stage in s.stages.chunks(rank))
    return RankRow(record, records, acts, layers, sum(record.step.at_rest[0].values()), max_bytes, peak(s.rows[rank]))


def profile(stays: Sequence[Stay]) -> tuple[int, int]:
    """(the most bytes alive in some stays beyond those at their begin, the bytes that they leave)."""
    alive = max_alive = 0
    for stay in stays:
        for change in stay.changes:
            alive += change.sign * change.life.bytes
            max_alive = max(max_alive, alive)
    return max_alive, alive


def edges(record: Record, s: Schedule, acts: Sequence[list[Stay]]) -> tuple[list[Stay], list[Stay]]:
    """The stays before and behind the acts of a row, for all of its micro-batches."""
    begin = [
        record.prologue[0]._replace(
            changes=[scaled(change, record.parts, s.parts) for change in record.prologue[0].changes]
        )
    ]
    net = {id(act): profile(act)[1] for act in (*acts, *record.acts)}
    surplus = sum(net[id(act)] for act in acts) - sum(net[id(act)] for act in record.acts)
    epilogue = [scale_losses(stay, record, s.parts) for stay in record.epilogue]
    if surplus:
        i = next((i for i, stay in enumerate(epilogue) if stay.visit.phase == "metrics"), 0)
        life = Life(abs(surplus), "losses", epilogue[i].visit, "workspace")
        epilogue[i] = epilogue[i]._replace(changes=[*epilogue[i].changes, Change(life, -1 if surplus > 0 else 1, -1)])
    return [*begin, *record.prologue[1:]], epilogue


def scale_losses(stay: Stay, record: Record, parts: int) -> Stay:
    """A stay whose messages have the losses of so many micro-batches."""

    def elements(collective: str, axis: str, sent: int) -> int:
        if collective in ONE_SIDED:
            return sent // record.parts * parts
        ranks, per_batch = record.step.job.mesh[axis].size, 0  # elements of a micro-batch's losses, on all ranks
        while sent_elements(collective, (per_batch + 1) * record.parts, ranks) <= sent:
            per_batch += 1
        return sent_elements(collective, per_batch * parts, ranks)

    return stay._replace(sent=[(key, elements(key[1], key[2], n) if key[3] == "loss" else n) for key, n in stay.sent])


def rename_channels(s: Schedule, rank: int, act: Act, stays: Sequence[Stay]) -> list[Stay]:
    """The stays of an act recorded on any rank, with this rank's channel."""
    target = ends_of(s, rank, act)[1]
    name = "" if target is None else f"{'x' if target[1] else 'grad'}:{rank}-{target[0]}"
    return [
        stay._replace(sent=[((*key[:3], name, key[4]) if key[1] == "message" else key, n) for key, n in stay.sent])
        for stay in stays
    ]


def assemble_trace(row: RankRow, s: Schedule, pp: int, config: RunConfig, rank: int, note: str) -> Trace:
    """The Trace of a rank of pp with its whole row."""
    record = row.record
    begin, epilogue = edges(record, s, row.acts)
    acts = [rename_channels(s, pp, act, stays) for act, stays in zip(s.rows[pp], row.acts)]
    stays = [*begin, *itertools.chain.from_iterable(acts), *epilogue]
    step = record.step._replace(job=record.step.job._replace(config=config), rank=rank)
    row_trace = make_trace(step, stays, exact=note)
    counts, unique_events = Counter(id(stay.events) for stay in stays), {id(stay.events): stay.events for stay in stays}
    turns = tuple(itertools.chain.from_iterable([counts[key]] * len(events) for key, events in unique_events.items()))
    return row_trace._replace(turns=turns)
