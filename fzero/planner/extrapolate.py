"""The trace of a deep model from a step that runs only a few of its layers: one layer stands for all like it.

State, gradient sums and update have all layers. The passes run only the first layers, two in the middle (groups of K
with remat "every:K" or periods), and the last ones, enough that all prefetching occurs. The trace repeats the first of
the two, if all that the two do, one event after the other, is the same; if not, every layer is run. Of many
micro-batches four are run: the third stands for all between the second and the last, except with canonical sums, which
grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fzero import models
from fzero.core import pytree
from fzero.core.autodiff import Remat
from fzero.core.device import CPU, Target
from fzero.models import ModelConfig
from fzero.planner.step_trace import RepeatedEvents, Trace, Transfer, make_trace, run_step
from fzero.run.config.run_config import RunConfig
from fzero.run.measure.memory_timeline import START, Change, Life, Stay, Visit
from fzero.run.setup import build as run_build
from fzero.run.setup.build import Job
from fzero.run.setup.machine import resolve_auto
from fzero.sharding import fake_mesh
from fzero.sharding.slices import is_stacked
from fzero.sharding.spec import Offload
from fzero.sharding.zero_stages import shapes_of

MANY = 40  # models with more layers are traced without the norms of layers
PARTS = 4  # micro-batches to run, if there are more


def trace(
    config: RunConfig,
    sizes: Mapping[str, int],
    *,
    rank: int = 0,
    target: Target | None = None,
    say: Callable[[str], None] = lambda stage: None,
) -> Trace:
    """The trace of `trace_step`, with repeated segments; `exact` says how it was extrapolated."""
    target = CPU if target is None else target
    config = resolve_auto(config, target)
    mesh = fake_mesh(sizes, rank)
    parts = run_build.local_micro_batches(config, mesh)
    whole_row = config.reduce == "canonical" or config.train.update == "delayed"
    run_parts = parts if whole_row else min(parts, PARTS)
    shallow = set_micro_batches(config, run_parts, parts)
    stack, depth = deepest_stack(config.model)
    prefix, group, run = shape(config, depth)
    run += group  # with a second one in the middle, to compare
    if depth > MANY and config.train.measure_every:
        shallow = replace(shallow, train=replace(shallow.train, measure_every=0))
    notes = [] if run_parts == parts else [f"micro-batches 4 to {parts - 1} as the third"]
    notes += ["without the norms of layers"] * (shallow.train.measure_every != config.train.measure_every)
    # Layers that stay whole between micro-batches are dropped together behind the last one: none stands for others.
    full = depth <= run or config.resident > 0
    say(f"tracing {depth if full else run} of {depth} layers")
    step = run_step(shallow, sizes, rank, target, 0 if full else run)
    middles: list[list[Stay]] = []
    stays = step.stays
    if not full:
        extended = extend_layers(stays, stack, prefix, group, run, depth)
        if extended is None or not groups_match(stays, stack, prefix, group):
            say(f"tracing all {depth} layers, as no two are alike")
            step, notes = run_step(shallow, sizes, rank, target), [*notes, "no two layers are alike: all were run"]
            stays = step.stays
        else:
            stays, middles = extended
            step = step._replace(host_peak=step.host_peak + inputs_on_host(step.job, config, depth - run))
            notes.append(f"{depth} layers from {run}")
    segments = [segment(step.stays, middle, (depth - run) // group + 1) for middle in middles]
    if run_parts != parts:
        stays, inner = extend_micro_batches(stays, parts)
        segments.append(segment(distinct(stays), distinct(inner), parts - PARTS + 1))
    step = step._replace(job=step.job._replace(config=config))
    return make_trace(step, stays, tuple(sorted(segments, key=lambda s: (s.first, -s.last))), "; ".join(notes))


def inputs_on_host(job: Job, config: RunConfig, layers: int) -> int:
    """The most bytes of so many layers' inputs that a forward pass keeps in the host's memory."""
    if not Offload.parse(config.offload).acts.memory.on_host:
        return 0
    tokens = config.train.batch // job.mesh.data_size // run_build.local_micro_batches(config, job.mesh)
    width = job.model.config.d_model * job.policy.compute.itemsize
    saved_layers = layers // (Remat.parse(config.train.remat).every or 1)
    return saved_layers * tokens * config.data.seq_len // job.mesh.cp.size * width


def deepest_stack(model: ModelConfig) -> tuple[str, int]:
    """(the name, the layers) of a model's stack with the most layers."""
    leaves = pytree.named_leaves(shapes_of(models.build(model)))
    depths = {name.split("/")[0]: leaf.shape[0] for name, leaf in leaves.items() if is_stacked(name)}
    return max(depths.items(), key=lambda stack: stack[1])


def shape(config: RunConfig, depth: int) -> tuple[int, int, int]:
    """(layers before the middle group, of a group, to run with one group)."""
    group = math.lcm(Remat.parse(config.train.remat).every or 1, models.period(config.model))
    offload = Offload.parse(config.offload)
    ahead = (
        config.prefetch + 2 * (not offload.params.memory.on_device)
        if config.zero == 3 or not offload.params.memory.on_device
        else 0
    )
    # A group's backward pass prefetches the activations of the group before.
    offloaded = not offload.acts.memory.on_device
    leaving = 2 * (not offload.grads.memory.on_device)  # groups for which a GPU keeps what is copied to the host
    # The last layer's gradient sums get their memory while the layer before it computes.
    edges = max(1 + group * offloaded, leaving), 2 + leaving
    prefix, behind = (-(-max(edge, ahead) // group) * group for edge in edges)
    return prefix, group, prefix + group + behind + depth % group


def extend_layers(
    stays: Sequence[Stay], stack: str, prefix: int, group: int, run: int, depth: int
) -> tuple[list[Stay], list[list[Stay]]] | None:
    """Extend stays of `run` layers to `depth`: (all stays, the middle ones), or None without a middle."""
    copies, shift = (depth - run) // group, depth - run
    out: list[Stay] = []
    middles: list[list[Stay]] = []
    i = 0
    while i < len(stays):
        stay = stays[i]
        if not _middle(stay, stack, prefix, group):
            number = stay.visit.layer
            suffix = stay.visit.segment == stack and number is not None and number >= prefix + group
            out.append(_shifted(stay, shift if suffix else 0))
            i += 1
            continue
        end = i
        while (
            end < len(stays) and _middle(stays[end], stack, prefix, group) and stays[end].visit.span == stay.visit.span
        ):
            end += 1
        middle = list(stays[i:end])
        middles.append(middle)
        forward = stay.visit.phase == "forward"
        for copy in range(copies + 1):
            offset = (copy if forward else copies - copy) * group
            out += [item._replace(visit=_moved(item.visit, offset)) for item in middle]
        i = end
    passes = {stay.visit.span for stay in stays if stay.visit.phase in ("forward", "backward")}
    return (out, middles) if len(middles) == len(passes) else None


def _middle(stay: Stay, stack: str, prefix: int, group: int) -> bool:
    visit = stay.visit
    return visit.segment == stack and visit.layer is not None and prefix <= visit.layer < prefix + group


def _shifted(stay: Stay, layers: int) -> Stay:
    """Shift a stay by a number of layers."""
    if not layers:
        return stay
    visit = _moved(stay.visit, layers)
    return stay._replace(visit=visit, events=[event._replace(layer=visit.layer) for event in stay.events])


def _moved(visit: Visit, layers: int) -> Visit:
    assert visit.layer is not None  # only visits of layers move
    return visit._replace(layer=visit.layer + layers)


def extend_micro_batches(stays: Sequence[Stay], parts: int) -> tuple[list[Stay], list[Stay]]:
    """Extend stays of PARTS micro-batches to `parts`; return (all stays, the stays of the last but one micro-batch)."""
    begins = [
        i
        for i, stay in enumerate(stays)
        if stay.visit.phase == "forward" and (i == 0 or stays[i - 1].visit.span != stay.visit.span)
    ]
    assert len(begins) == PARTS, f"{len(begins)} forward passes for {PARTS} micro-batches"
    steady = list(stays[begins[-2] : begins[-1]])
    balance: dict[str, int] = {}
    for stay in steady:
        for life, sign, _ in stay.changes:
            balance[life.component()] = balance.get(life.component(), 0) + sign * life.bytes
    # Each repeated micro-batch leaves the same tensors (its losses).
    visit = steady[-1].visit
    lives = [(Life(abs(size) * (parts - PARTS), "losses", visit, name), size) for name, size in balance.items() if size]
    changes = [Change(life, 1 if size > 0 else -1, -1) for life, size in sorted(lives, key=lambda pair: pair[1])]
    remainder = Stay(steady[-1].visit, [], changes, [entry for stay in steady for entry in stay.sent] * (parts - PARTS))
    start = stays[0]
    assert start.visit is START
    begin = start._replace(changes=[scaled(change, PARTS, parts) for change in start.changes])
    ends = [_scale_gather(stay, parts) for stay in stays[begins[-1] :]]
    return [begin, *stays[1 : begins[-1]], remainder, *ends], steady


def set_micro_batches(config: RunConfig, count: int, parts: int) -> RunConfig:
    """A config with `count` of `parts` micro-batches on each rank."""
    return replace(config, train=replace(config.train, batch=config.train.batch * count // parts))


def scaled(change: Change, count: int, parts: int) -> Change:
    """The birth of a batch of `parts` micro-batches in place of `count`; another change as it is."""
    if change.life.group != "batch":
        return change
    return change._replace(life=replace(change.life, bytes=change.life.bytes // count * parts))


def _scale_gather(stay: Stay, parts: int) -> Stay:
    """Scale the one gather of the losses of all micro-batches."""
    sent = [(key, elements // PARTS * parts if key[3] == "loss" else elements) for key, elements in stay.sent]
    return stay._replace(sent=sent)


def distinct(stays: Sequence[Stay]) -> list[Stay]:
    """Return the stays without repetitions."""
    return list({id(stay.events): stay for stay in stays}.values())


def segment(stays: Sequence[Stay], middle: Sequence[Stay], times: int) -> RepeatedEvents:
    """The RepeatedEvents of the events of the adjacent stays `middle`, which happen `times` times."""
    first, index = 0, 0
    while stays[index].events is not middle[0].events:
        first += len(stays[index].events)
        index += 1
    return RepeatedEvents(first, first + sum(len(stay.events) for stay in middle), times)


def groups_match(stays: Sequence[Stay], stack: str, prefix: int, group: int) -> bool:
    """Whether the first two middle groups do the same in every pass."""
    groups: list[dict[object, list[tuple]]] = [{}, {}]  # of each group by pass
    for stay in stays:
        for i, passes in enumerate(groups):
            first = prefix + i * group
            if _middle(stay, stack, first, group):
                passes.setdefault(stay.visit.span, []).append(_facts(_shifted(stay, -first)))
    return groups[0] == groups[1]


def _facts(stay: Stay) -> tuple:
    visit = stay.visit
    events = [
        (e.event, e.kind, e.axis, e.bytes) if isinstance(e, Transfer) else e._replace(layer=None) for e in stay.events
    ]
    changes = [(c.sign, c.event_index, c.life.bytes, c.life.name, c.life.component()) for c in stay.changes]
    return visit.phase, visit.segment, visit.layer, events, changes, stay.sent
