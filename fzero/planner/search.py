"""The fastest ways to train a model on a number of devices.

Over meshes x stage x recomputation x offload x micro-batch, with pp x schedule x layout. Closed forms order all
candidates; those that should fit are traced exactly, the most promising first, until enough fit and no other looks
faster; each trace corrects the estimates of its kind. Few pipelines are traced, as each takes several times as long.
Every number of the result comes from an exact trace and its simulation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from fzero import models
from fzero.core import config_tables
from fzero.core.arguments import checked
from fzero.core.config_tables import AtLeastOne
from fzero.core.process_pool import Pool
from fzero.core.storage import write_text
from fzero.models import ModelConfig
from fzero.planner import devices, extrapolate, pipeline_trace
from fzero.planner.closed_forms import Sketch, sketch_candidate
from fzero.planner.closed_layer import Basis, admits_codec, layer_of
from fzero.planner.devices import Device
from fzero.planner.estimate import Candidate, candidates, layers_to_trace
from fzero.planner.launch import refuse_decided
from fzero.planner.pipeline_report import pipeline_report
from fzero.planner.plan import config_for, device_for, resolve_for, with_host_memory
from fzero.planner.plan_report import PlanReport, has_rates, report_of
from fzero.planner.plan_text import duration, size
from fzero.planner.search_result import (
    RankMemory,
    SearchResult,
    TracedCandidate,
    best_alternatives,
    nothing_fits,
    slower,
    step_seconds,
    words,
)
from fzero.run.config.config_table import recipe, to_json, to_table
from fzero.run.config.run_config import RunConfig
from fzero.run.config.unused_keys import codec_of
from fzero.sharding.spec import HOST_MEMORY

MOST = 16  # most candidates that fit to trace, and most that do not
PIPELINES = 2  # most candidates with pp to trace, each of a kind
LAYERS = 500  # most layers to trace for one of them, see layers_to_trace: some twenty seconds
ROUND = 4  # candidates to trace between two corrections of the others' estimates, for any number of processes
SMALL = 10**9  # parameters; a search for a smaller model ends before worker processes have started


@checked()
def search(
    model: str | ModelConfig | RunConfig | Mapping[str, Any],
    gpus: AtLeastOne,
    *,
    gpu: str | Device = "h100",
    settings: Mapping[str, Any] | None = None,
    choices: Mapping[str, Sequence[Any]] | None = None,
    top: AtLeastOne = 10,
    say: Callable[[str], None] = lambda line: None,
    workers: AtLeastOne = 1,
) -> SearchResult:
    """Find the `top` fastest ways to train a model on `gpus` devices that fit, and say why alternatives are slower.

    The global batch is the config's. choices: the values to try of zero, train.remat, offload, train.micro_batch,
    mesh.pp, mesh.cp, mesh.ep and pipeline, in place of CHOICES in planner/estimate.py. say: called with lines of
    progress. workers: number of tracing processes, which does not change the result; with more than 1, a calling script
    must guard its main program with `if __name__ == "__main__"`. The other arguments are those of `plan`.
    Raises ValueError if nothing fits, saying by how much, if no mesh can share the batch, for another name in choices,
    and for settings that a search decides itself (see fzero.planner.launch.DECIDED).

    >>> tried = {"train.remat": ["none"], "offload": [""], "train.micro_batch": [8]}
    >>> found = search("mlp-tiny", 1, settings={"train.batch": 8, "train.compiled": False}, choices=tried, top=1)
    >>> found.best[0].candidate.zero
    0
    """
    begin = time.perf_counter()
    refuse_decided(settings or {}, "settings")
    if isinstance(model, Mapping):
        refuse_decided(model, "the config")
    base_config = config_for(model, settings)
    device = with_host_memory(device_for(gpu), base_config)
    if not has_rates(device):
        raise ValueError(
            "a search needs the rates of a device; run `fzero bench` on this machine first, or name another, "
            "such as gpu=h100 (--gpu h100)"
        )
    if base_config.local.method:
        raise ValueError(
            f"local.method is {base_config.local.method}, and a search compares meshes whose ranks agree in each step; "
            "leave it out; fzero plan --ask fewer-bytes tries local steps with the best"
        )
    config = resolve_for(base_config, device)
    node = device.on_node(gpus)
    rank_bytes = device.capacity_bytes // (node if device.kind == "cpu" else 1)
    limits = RankMemory(rank_bytes, device.host_capacity_bytes(node))
    every = [c for c in candidates(config, gpus, node, choices) if HOST_MEMORY not in c.offload or device.host]
    with tracers(workers if models.num_params(models.build(config.model)) >= SMALL else 1) as pool:
        # Smallest tp first: it has the largest tensors and takes longest.
        layers = {tp: pool.submit(layer_of, config, device, tp) for tp in sorted({c.tp for c in every})}
        basis = Basis(config, device, node, {tp: layer.result() for tp, layer in layers.items()})
        every = [c for c in every if admits_codec(basis, c)]
        if not every:
            raise ValueError(
                f"no candidate goes with codec {codec_of(config)}: see docs/codec.md for its stages and meshes"
            )
        every = [c for c in every if devices.has_capacity(basis.plan_of(c)[0], device.loads)]
        if not every:
            raise ValueError(
                "no candidate has room for this imbalance of experts; use experts of gather or "
                "exchange:SLACK (--experts)"
            )
        sketches = [sketch_candidate(basis, c) for c in every]
        # Of equal times, try the one that moves fewer bytes first.
        sketches.sort(key=lambda s: (s.step_s, s.candidate.offload, s.bytes))
        fitting = [s for s in sketches if limits.fits(s)] or [s for s in sketches if limits.fits(s, 1.2)]
        say(f"{len(sketches):,} candidates, {len(fitting):,} should fit ({time.perf_counter() - begin:.1f} s)")
        fits, oversized = trace_best(config, fitting, device, top, say, pool)
    if not fits:
        raise ValueError(nothing_fits(sketches, oversized, limits, gpus, device))
    fits.sort(key=lambda entry: step_seconds(entry.report))
    first = fits[0]
    named = [TracedCandidate(f.candidate, f.report, "" if f is first else slower(f.report, first.report)) for f in fits]
    alternatives = best_alternatives(sketches, {f.candidate: f.report for f in (*fits, *oversized)}, first, limits)
    chosen = first.candidate.apply_to(replace(base_config, precision=config.precision))
    seconds = time.perf_counter() - begin
    counts = len(sketches), len(fitting), len(fits) + len(oversized)
    return SearchResult(tuple(named[:top]), tuple(alternatives), chosen, *counts, seconds)


class InProcess(Executor):
    """An Executor that runs each call immediately in this process."""

    def submit(self, f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Run f(*args, **kwargs) and return its completed Future."""
        future: Future = Future()
        future.set_result(f(*args, **kwargs))
        return future


def tracers(workers: int) -> Executor:
    """The Executor that traces: `workers` processes, or this one."""
    return Pool(workers) if workers > 1 else InProcess()


def trace_candidate(config: RunConfig, c: Candidate, device: Device) -> PlanReport:
    """Trace a candidate and return its PlanReport."""
    if c.pp > 1:
        return pipeline_report(pipeline_trace.trace(c.apply_to(config), c.mesh, target=device.target), device)
    return report_of(extrapolate.trace(c.apply_to(config), c.mesh, target=device.target), device)


def trace_best(
    config: RunConfig,
    sketches: Sequence[Sketch],
    device: Device,
    top: int,
    say: Callable[[str], None],
    pool: Executor,
) -> tuple[list[TracedCandidate], list[TracedCandidate]]:
    """Trace the most promising of the sketched candidates; return (those that fit, those that do not)."""
    fits: list[TracedCandidate] = []
    oversized: list[TracedCandidate] = []
    corrections: dict[Any, float] = {}  # traced / sketched step time by kind of candidate

    def kind(c: Candidate) -> tuple[Any, ...]:
        return c.tp, c.ep, c.micro_batch, c.zero, c.pp, c.schedule, c.chunks, c.layout

    def expected(sketch: Sketch) -> float:
        return sketch.step_s * corrections.get(kind(sketch.candidate), 1.0)

    first = {kind(sketch.candidate): sketch for sketch in reversed(sketches)}  # of each kind, by their order

    def serves(sketch: Sketch) -> bool:
        c = sketch.candidate
        return c.pp == 1 or (first[kind(c)] is sketch and layers_to_trace(c, config.model.n_layers) <= LAYERS)

    queue = [sketch for sketch in sketches if serves(sketch)] or list(sketches)
    while queue and len(fits) < MOST and len(oversized) < MOST:
        queue.sort(key=expected)  # stable
        pipeline_budget = PIPELINES - sum(entry.candidate.pp > 1 for entry in (*fits, *oversized))
        with_pp = [sketch for sketch in queue if sketch.candidate.pp > 1]
        for sketch in with_pp[max(0, pipeline_budget) :]:  # the slowest of them, which are not traced
            queue.remove(sketch)
        if not queue:
            break
        fastest = min((step_seconds(entry.report) for entry in fits), default=math.inf)
        missing, faster = top - len(fits), sum(expected(sketch) < fastest for sketch in queue[:ROUND])
        if missing <= 0 and not faster:
            break
        batch = queue[: min(ROUND, max(missing, faster))]
        del queue[: len(batch)]
        reports = [pool.submit(trace_candidate, config, sketch.candidate, device) for sketch in batch]
        for sketch, report in zip(batch, (future.result() for future in reports)):
            c = sketch.candidate
            corrections[kind(c)] = step_seconds(report) / sketch.step_s
            (fits if report.fits else oversized).append(TracedCandidate(c, report, ""))
            if c.pp > 1 and (variant := recut_layers(sketch, report)) is not None:
                queue.append(variant)
            short = "" if report.fits else ", does not fit"
            say(f"{words(c)}: {duration(step_seconds(report))} a step, {size(report.peak_bytes_per_rank)}{short}")
    return fits, oversized


def recut_layers(sketch: Sketch, report: PlanReport) -> Sketch | None:
    """A traced candidate with its layers cut by seconds, if faster; else None."""
    facts = report.pipeline
    if sketch.candidate.layout != "auto" or facts["by_cost_takes"] >= 1.0:
        return None
    recut = sketch.candidate._replace(layout=facts["layout_by_cost"])
    return sketch._replace(candidate=recut, time={"computation": step_seconds(report) * facts["by_cost_takes"]})


def expect_config_path(path: Path) -> None:
    """Raise ValueError if a config cannot be written at `path`."""
    if path.suffix not in (".toml", ".json"):
        raise ValueError(f"{path}: a config is written as .toml or .json")


def write_config(config: RunConfig, path: Path) -> None:
    """Write a config for `fzero pretrain --config`: as .toml its differences from its preset, as .json everything."""
    expect_config_path(path)
    text = to_json(config) if path.suffix == ".json" else config_tables.to_toml(differences(config))
    write_text(path.parent, path.name, text)


def differences(config: RunConfig) -> config_tables.Table:
    """The table of the config's differences from its preset; `config.from_table` gives the config back."""
    table = to_table(config)
    base = (
        to_table(recipe(config.preset, steps=config.train.steps, optimizer=config.optim.name)) if config.preset else {}
    )
    usual = dict(config_tables.flat(base))
    out: config_tables.Table = {"preset": config.preset}
    for name, value in config_tables.flat(table):
        if (name not in usual or usual[name] != value) and value is not None:
            config_tables.set_nested(out, name, value)
    out.setdefault("train", {})["steps"] = config.train.steps
    out.setdefault("optim", {})["name"] = config.optim.name
    return out
