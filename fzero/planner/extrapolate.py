"""The trace of a deep model from a shallow run of it: a layer is run once and stands for those like it.

The step is made for the whole model: its state, the sums of its gradients and its update have all layers. In the forward and the backward
pass only a few layers are run: the first ones, one (a group of K with remat "every:K") in the middle, and the last ones, enough of them
that what is fetched ahead at either end is there. The trace then says of the one in the middle that it happens as often as there are
layers. Whether that is so is tried: the same from one layer (group) more must be the same trace, and where it is not, every layer is run.

Of many micro-batches four are run: the third stands for all between the second (in which the sums of the last gradients of the first get
their memory) and the last. Sums in canonical order hold more terms the more there are; there all of them are run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fzero.core.autodiff import Remat
from fzero.core.device import CPU, Target
from fzero.planner.step_trace import Segment, Trace, Transfer, make_trace, run_step
from fzero.run import build as programs
from fzero.run.config import RunConfig
from fzero.run.machine import resolve_auto
from fzero.run.measure.live_bytes import START, Change, Life, Stay
from fzero.sharding import fake_mesh
from fzero.sharding.memory import Offload
from fzero.train.streamed import PREFIX

MANY = 40  # layers whose norms, measured one by one, are left out of a trace
PARTS = 4  # micro-batches that are run of many


def trace(config: RunConfig, sizes: Mapping[str, int], *, rank: int = 0, target: Target | None = None) -> Trace:
    """The trace that `trace_step` gives, with segments that repeat; `exact` says from what it was made.

    The timeline has all layers of the micro-batches that were run.
    """
    target = CPU if target is None else target
    config = resolve_auto(config, target)
    mesh = fake_mesh(sizes, rank)
    parts = programs.local_micro_batches(config, mesh)
    run_parts = parts if config.reduce == "canonical" else min(parts, PARTS)
    few = replace(config, train=replace(config.train, batch=config.train.batch * run_parts // parts))
    depth, (before, group, run) = config.model.n_layers, shape(config)
    if depth > MANY and config.train.measure_every:
        few = replace(few, train=replace(few.train, measure_every=0))
    said = [] if run_parts == parts else [f"micro-batches 4 to {parts - 1} as the third"]
    said += ["without the norms of layers"] * (few.train.measure_every != config.train.measure_every)
    whole = depth <= run + group
    step = run_step(few, sizes, rank, target, 0 if whole else run)
    middles: list[list[Stay]] = []
    stays = step.stays
    if not whole:
        found = deeper(stays, before, group, run, depth)
        # What is made in a backward pass that updates is known to be of the state when the step is over.
        more = run_step(few, sizes, rank, target, run + group, short=config.train.update != "backward")
        if found is None or not same(deeper(stays, before, group, run, run + group), more.stays):
            step, said = run_step(few, sizes, rank, target), [*said, "no two layers are alike: all were run"]
            stays = step.stays
        else:
            stays, middles = found
            said.append(f"{depth} layers from {run}")
    segments = [segment(step.stays, middle, (depth - run) // group + 1) for middle in middles]
    if run_parts != parts:
        stays, inner = longer(stays, parts)
        segments.append(segment(distinct(stays), distinct(inner), parts - PARTS + 1))
    step = step._replace(program=step.program._replace(config=config))
    return make_trace(step, stays, tuple(sorted(segments, key=lambda s: (s.first, -s.last))), "; ".join(said))


def shape(config: RunConfig) -> tuple[int, int, int]:
    """(layers before those in the middle, layers of a group, layers to be run)."""
    group = Remat.parse(config.train.remat).every or 1
    offload = Offload.parse(config.offload)
    ahead = config.prefetch + 2 * (offload.params.memory != "device") if config.zero == 3 or offload.params.memory != "device" else 0
    away = offload.acts.memory != "device"  # what the second group kept is fetched by the one after it
    # The last layer's gradients are summed while the one before it computes; there its sums get their memory.
    before, behind = (-(-max(edge, ahead) // group) * group for edge in (1 + group * away, 2))
    return before, group, before + group + behind + config.model.n_layers % group


def deeper(stays: Sequence[Stay], before: int, group: int, run: int, depth: int) -> tuple[list[Stay], list[list[Stay]]] | None:
    """(what happens with `depth` layers where `stays` are of `run` of them, the stays that stand for several).

    None where it cannot be told. The layers before, ..., before + group - 1 are repeated.
    """
    copies, shift = (depth - run) // group, depth - run
    out: list[Stay] = []
    middles: list[list[Stay]] = []
    i = 0
    while i < len(stays):
        stay = stays[i]
        if not _middle(stay, before, group):
            out.append(_shifted(stay, shift if stay.visit.layer is not None and stay.visit.layer >= before + group else 0))
            i += 1
            continue
        end = i
        while end < len(stays) and _middle(stays[end], before, group) and stays[end].visit.span == stay.visit.span:
            end += 1
        middle = list(stays[i:end])
        middles.append(middle)
        forward = stay.visit.phase == "forward"
        for copy in range(copies + 1):
            moved = (copy if forward else copies - copy) * group
            out += [Stay(one.visit._replace(layer=one.visit.layer + moved), *one[1:]) for one in middle]
        i = end
    passes = {stay.visit.span for stay in stays if stay.visit.phase in ("forward", "backward")}
    return (out, middles) if len(middles) == len(passes) else None


def _middle(stay: Stay, before: int, group: int) -> bool:
    visit = stay.visit
    return visit.part == PREFIX and visit.layer is not None and before <= visit.layer < before + group


def _shifted(stay: Stay, layers: int) -> Stay:
    """The same stay, shifted by a number of layers."""
    if not layers:
        return stay
    layer = stay.visit.layer + layers
    return Stay(stay.visit._replace(layer=layer), [event._replace(layer=layer) for event in stay.events], *stay[2:])


def longer(stays: Sequence[Stay], parts: int) -> tuple[list[Stay], list[Stay]]:
    """(what happens with `parts` micro-batches where `stays` are of PARTS, the stays of the last but one)."""
    begins = [i for i, stay in enumerate(stays) if stay.visit.phase == "forward" and (i == 0 or stays[i - 1].visit.span != stay.visit.span)]
    assert len(begins) == PARTS, f"{len(begins)} forward passes for {PARTS} micro-batches"
    steady = list(stays[begins[-2] : begins[-1]])
    left: dict[str, int] = {}
    for stay in steady:
        for life, sign, _ in stay.changes:
            left[life.component()] = left.get(life.component(), 0) + sign * life.bytes
    # What one leaves behind (its losses), each of them does.
    where = steady[-1].visit
    found = [(Life(abs(size) * (parts - PARTS), "losses", where, name), size) for name, size in left.items() if size]
    more = [Change(life, 1 if size > 0 else -1, -1) for life, size in sorted(found, key=lambda pair: pair[1])]
    rest = Stay(steady[-1].visit, [], more, [entry for stay in steady for entry in stay.sent] * (parts - PARTS))
    start = stays[0]
    assert start.visit is START
    scaled = [_scaled(change, parts) if change.life.group == "batch" else change for change in start.changes]
    ends = [_of_all(stay, parts) for stay in stays[begins[-1] :]]
    return [start._replace(changes=scaled), *stays[1 : begins[-1]], rest, *ends], steady


def _scaled(change: Change, parts: int) -> Change:
    return change._replace(life=replace(change.life, bytes=change.life.bytes // PARTS * parts))


def _of_all(stay: Stay, parts: int) -> Stay:
    """The losses of all micro-batches are gathered at once."""
    sent = [(key, elements // PARTS * parts if key[3] == "loss" else elements) for key, elements in stay.sent]
    return stay._replace(sent=sent)


def distinct(stays: Sequence[Stay]) -> list[Stay]:
    """The stays without those that repeat others."""
    return list({id(stay.events): stay for stay in stays}.values())


def segment(stays: Sequence[Stay], middle: Sequence[Stay], times: int) -> Segment:
    """The events of neighbours `middle` among `stays`, which happen so many times."""
    first, at = 0, 0
    while stays[at].events is not middle[0].events:
        first += len(stays[at].events)
        at += 1
    return Segment(first, first + sum(len(stay.events) for stay in middle), times)


def same(found: tuple[list[Stay], list[list[Stay]]] | None, stays: Sequence[Stay]) -> bool:
    """Whether what was made of fewer layers is what happened, up to the end of the last backward pass."""
    passes = [i for i, stay in enumerate(stays) if stay.visit.phase in ("forward", "backward")]
    if found is None or len(found[0]) <= passes[-1]:
        return False
    return all(_facts(a) == _facts(b) for a, b in zip(found[0], stays[: passes[-1] + 1]))


def _facts(stay: Stay) -> tuple:
    visit = stay.visit
    events = [(e.event, e.what, e.axis, e.bytes) if isinstance(e, Transfer) else e._replace(layer=None) for e in stay.events]
    changes = [(c.sign, c.at, c.life.bytes, c.life.name, c.life.component()) for c in stay.changes]
    return visit.phase, visit.part, visit.layer, events, changes, stay.sent
