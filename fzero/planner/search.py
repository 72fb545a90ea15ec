"""The fastest ways to train a model on a number of devices: meshes x stage x recomputation x offload x micro-batch.

Closed forms order all candidates (see candidates.py). Those that should fit are traced exactly, the most promising first, until there are
enough that do and none is left that looks faster; what the traces show of a kind of candidates corrects what is expected of the others of
that kind. Every number of the result comes from an exact trace, and from its play on the device.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fzero import models
from fzero.core import tables
from fzero.models import ModelConfig
from fzero.planner import extrapolate
from fzero.planner.candidates import OFFLOADS, REMATS, Candidate, Sketch, Sketcher, candidates, layer_of
from fzero.planner.devices import Device
from fzero.planner.format import duration, mesh_words, percent, quantity, size, table
from fzero.planner.plan import PlanReport, config_for, device_for, has_rates, report_of, resolve_for
from fzero.run.config import RunConfig
from fzero.run.config_table import to_json, to_table
from fzero.run.recipes import recipe

SPARE = 0.9  # the part of the capacity that a sketch may fill: sketches are rough
MOST = 16  # exact traces of a search, beside those in place of what turned out not to fit
ROUND = 4  # candidates that are traced before what is expected of the others is corrected; however many processes there are
ALIKE = 5e-4  # the part of a step by which two are told apart
SMALL = 10**9  # parameters of a model, below which a search is over before other processes have started


class Room(NamedTuple):
    """The bytes that tensors of a rank can have."""

    device: int
    host: int | None  # in the host's memory; None: not known

    def has(self, sketch: Sketch, part: float = SPARE) -> bool:
        """Whether a sketch fits into `part` of the device."""
        return sketch.bytes <= part * self.device and (self.host is None or sketch.host_bytes <= self.host)


class Found(NamedTuple):
    """A candidate that was traced."""

    candidate: Candidate
    report: PlanReport
    reason: str  # why it is not the best; "" for that


class Alternative(NamedTuple):
    """For one alternative choice (such as tp=4): the best plan that uses it, and why it is slower."""

    choice: str  # "tp=4", "stage 0", "remat none", ...
    count: int
    candidate: Candidate
    reason: str
    exact: bool  # whether the numbers come from a trace, or from closed forms


class SearchResult(NamedTuple):
    """What `search` found. `print(result)` shows it."""

    best: tuple[Found, ...]  # fastest first
    losers: tuple[Alternative, ...]
    config: RunConfig  # of the best, ready for `fzero pretrain`
    considered: int
    fitting: int  # by closed forms
    traced: int
    seconds: float

    def to_json(self) -> str:
        """One JSON object."""
        found = [
            {**f.candidate._asdict(), "mesh": f.candidate.mesh, "reason": f.reason, "plan": json.loads(f.report.to_json())}
            for f in self.best
        ]
        for each in found:
            del each["plan"]["timeline"]
        losers = [{**loser._asdict(), "candidate": loser.candidate._asdict()} for loser in self.losers]
        rest = {"considered": self.considered, "fitting": self.fitting, "traced": self.traced, "seconds": self.seconds}
        return json.dumps({"best": found, "losers": losers, "config": to_table(self.config), **rest}, indent=1)

    def __str__(self) -> str:
        return describe(self)


def search(
    model: str | ModelConfig | RunConfig | Mapping[str, Any],
    gpus: int,
    *,
    gpu: str | Device = "h100",
    settings: Mapping[str, Any] | None = None,
    tokens: float | None = None,
    price: float | None = None,
    ranks_on_node: int | None = None,
    top: int = 10,
    remats: Sequence[str] = REMATS,
    offloads: Sequence[str] = OFFLOADS,
    say: Callable[[str], None] = lambda line: None,
    workers: int = 1,
) -> SearchResult:
    """Find the `top` fastest ways to train a model on `gpus` devices that fit, and say why the others lose.

    The global batch is the config's. remats, offloads: the values to try. say: called with lines of progress. workers: processes that
    trace, with the same result; with more than 1 a script that calls this must keep what it runs under `if __name__ == "__main__"`.
    The other arguments are those of `plan`.
    Raises ValueError where nothing fits, saying by how much, and where no mesh can share the batch.

    >>> small = {"train.batch": 8, "precision.policy": "bf16"}
    >>> found = search("llama-tiny", 2, settings=small, remats=("none",), offloads=("",), top=2)
    >>> len(found.best)
    2
    """
    begin = time.perf_counter()
    given, device = config_for(model, settings), device_for(gpu)
    if not has_rates(device):
        raise ValueError("a search needs the rates of a device; run `fzero bench` on this machine first, or name another (--gpu h100)")
    if gpus < 1:
        raise ValueError(f"gpus is {gpus}; it must be at least 1")
    config = resolve_for(given, device)
    node = ranks_on_node or min(gpus, device.links[0].ranks or gpus)
    room = Room(device.capacity_bytes // (node if device.kind == "cpu" else 1), device.host_capacity_bytes(node))
    offloads = [offload for offload in offloads if "host" not in offload or device.host]
    every = list(candidates(config, gpus, node, remats=remats, offloads=offloads))
    options = {"tokens": tokens, "price": price, "ranks_on_node": ranks_on_node}
    with tracers(workers if models.num_params(models.build(config.model)) >= SMALL else 1) as pool:
        # The smallest size of tp has the largest tensors, and takes longest.
        layers = {tp: pool.submit(layer_of, config, device, tp) for tp in sorted({c.tp for c in every})}
        sketcher = Sketcher(config, device, node, {tp: layer.result() for tp, layer in layers.items()})
        # Of equals the one that moves less is tried first.
        sketches = sorted(map(sketcher.sketch, every), key=lambda s: (s.step_s, s.candidate.offload, s.bytes))
        fitting = [s for s in sketches if room.has(s)] or [s for s in sketches if room.has(s, 1.2)]
        say(f"{len(sketches):,} candidates, {len(fitting):,} should fit ({time.perf_counter() - begin:.1f} s)")
        fits, over = trace_best(config, fitting, device, options, top, say, pool)
    if not fits:
        raise ValueError(nothing_fits(sketches, over, room, gpus, device))
    fits.sort(key=lambda found: found.report.step_s)
    first = fits[0]
    named = [Found(f.candidate, f.report, "" if f is first else slower(f.report, first.report)) for f in fits]
    lost = losers(sketches, {f.candidate: f.report for f in (*fits, *over)}, first, room)
    chosen = first.candidate.of(replace(given, precision=config.precision))
    seconds = time.perf_counter() - begin
    return SearchResult(tuple(named[:top]), tuple(lost), chosen, len(sketches), len(fitting), len(fits) + len(over), seconds)


class InProcess(Executor):
    """An Executor that runs each call immediately in this process."""

    def submit(self, f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """The Future of f(*args, **kwargs), with its result."""
        future: Future = Future()
        future.set_result(f(*args, **kwargs))
        return future


def tracers(workers: int) -> Executor:
    """The Executor of traces: `workers` processes, or this one."""
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) if workers > 1 else InProcess()


def trace_candidate(config: RunConfig, c: Candidate, device: Device, options: Mapping[str, Any]) -> PlanReport:
    """The PlanReport of a candidate."""
    return report_of(extrapolate.trace(c.of(config), c.mesh, target=device.target), device, **options)


def trace_best(
    config: RunConfig,
    sketches: Sequence[Sketch],
    device: Device,
    options: Mapping[str, Any],
    top: int,
    say: Callable[[str], None],
    pool: Executor,
) -> tuple[list[Found], list[Found]]:
    """(those of the sketched candidates that fit, those that do not), by exact traces of the most promising ones."""
    fits: list[Found] = []
    over: list[Found] = []
    rest, off = list(sketches), {}  # off: by kind of candidate, how many times slower it is than its sketch

    def kind(c: Candidate) -> tuple[int, int, int]:
        return c.tp, c.micro_batch, c.zero

    def expected(sketch: Sketch) -> float:
        return sketch.step_s * off.get(kind(sketch.candidate), 1.0)

    while rest and len(fits) < MOST and len(over) < MOST:
        rest.sort(key=expected)  # stable
        fastest = min((found.report.step_s for found in fits), default=math.inf)
        missing, more = top - len(fits), sum(expected(sketch) < fastest for sketch in rest[:ROUND])
        if missing <= 0 and not more:
            break
        now = rest[: min(ROUND, max(missing, more))]
        del rest[: len(now)]
        reports = [pool.submit(trace_candidate, config, sketch.candidate, device, options) for sketch in now]
        for sketch, report in zip(now, (future.result() for future in reports)):
            c = sketch.candidate
            off[kind(c)] = report.step_s / sketch.step_s
            (fits if report.fits else over).append(Found(c, report, ""))
            short = "" if report.fits else ", does not fit"
            say(f"{words(c)}: {duration(report.step_s)} a step, {size(report.peak_bytes_per_rank)}{short}")
    return fits, over


# ---- why ---------------------------------------------------------------------------------------------------------------


def seconds_of(report: PlanReport) -> dict[str, float]:
    """What a predicted step goes into: computation, update, exposed communication by axis, and waiting by memory."""
    t = report.time
    named = {"update": t["phases"].get("update", 0.0)}
    named["computation"] = sum(t["phases"].values()) - named["update"]
    named |= {f"exposed communication on {axis}": s for axis, s in t["exposed"].items()}
    return named | {f"waiting for {name}": s for name, s in t["waiting"].items()}


def slower(report: PlanReport, best: PlanReport) -> str:
    """Why a plan is slower than the best one: how much, and what most of the difference is."""
    mine, other = seconds_of(report), seconds_of(best)
    more = {name: seconds - other.get(name, 0.0) for name, seconds in mine.items()}
    worst = max(more, key=more.__getitem__)
    what = worst
    if worst == "computation":
        flop = report.flop_per_step / best.flop_per_step - 1
        what = f"recomputation ({percent(flop)} more FLOPs)" if flop > 0.01 else "computation in smaller pieces, or bound by memory"
    longer = report.step_s / best.step_s - 1
    return f"{percent(longer)} slower: {duration(more[worst])} more {what}" if longer >= ALIKE and more[worst] > 0 else "as fast"


def slower_sketch(sketch: Sketch, best: Sketch) -> str:
    """The same by closed forms."""
    more = {name: seconds - best.time.get(name, 0.0) for name, seconds in sketch.time.items()}
    worst = max(more, key=more.__getitem__)
    if not math.isfinite(sketch.step_s):
        return f"{worst}: the device's rate is not known"
    if sketch.step_s <= best.step_s:
        return "about as fast"
    return f"about {percent(sketch.step_s / best.step_s - 1)} slower: {duration(more[worst])} more {worst}"


def does_not_fit(report: PlanReport) -> str:
    """Why a plan does not fit."""
    parts = report.peak["components"]
    most = max(parts, key=parts.__getitem__)
    of = f"{size(report.peak_bytes_per_rank)} of {size(report.capacity_bytes)}"
    return f"does not fit: {of}, {report.too_much()}; {most} {size(parts[most])}"


def too_much(sketch: Sketch, room: Room) -> str:
    """Why a sketch does not fit, or is not tried."""
    most = max(sketch.memory, key=sketch.memory.__getitem__)
    of, large = f"{size(sketch.bytes)} of {size(room.device)}", f"{most} {size(sketch.memory[most])}"
    if sketch.bytes > room.device:
        return f"does not fit: {of}, {size(sketch.bytes - room.device)} too much; {large}"
    if room.host is not None and sketch.host_bytes > room.host:
        return f"does not fit: {size(sketch.host_bytes)} in the host's memory, where a rank can have {size(room.host)}"
    return f"too close: {of}, and closed forms may fill {percent(SPARE)}; {large}"


def least(sketches: Sequence[Sketch], room: Room) -> Sketch:
    """The sketch that is nearest to fit."""
    return min(sketches, key=lambda s: max(s.bytes / room.device, s.host_bytes / room.host if room.host else 0.0))


def choices(c: Candidate) -> dict[str, str]:
    """The choices of a candidate, in words."""
    return {
        "tp": f"tp={c.tp}",
        "rp": f"rp={c.rp}",
        "zero": f"stage {c.zero}",
        "remat": f"remat {c.remat}",
        "offload": f"offload {c.offload}" if c.offload else "no offload",
        "micro_batch": f"micro-batch {c.micro_batch}",
    }


def losers(sketches: Sequence[Sketch], reports: Mapping[Candidate, PlanReport], best: Found, room: Room) -> list[Alternative]:
    """For each choice that the best candidate has not made: the best candidate with it, and why that loses."""
    classes: dict[tuple[str, str], list[Sketch]] = {}
    mine = choices(best.candidate)
    for sketch in sketches:
        for kind, text in choices(sketch.candidate).items():
            if text != mine[kind]:
                classes.setdefault((kind, text), []).append(sketch)
    top = next(s for s in sketches if s.candidate == best.candidate)
    out = []
    for (_, text), members in sorted(classes.items()):
        known = [s for s in members if s.candidate in reports and reports[s.candidate].fits]
        fit = [s for s in members if room.has(s)]
        if known:
            s = min(known, key=lambda s: reports[s.candidate].step_s)
            reason = slower(reports[s.candidate], best.report)
        elif fit:
            s = fit[0]  # sketches are in order of time
            over = reports.get(s.candidate)
            reason = does_not_fit(over) if over else slower_sketch(s, top)
        else:
            s = least(members, room)
            reason = too_much(s, room)
        out.append(Alternative(text, len(members), s.candidate, reason, s.candidate in reports))
    return out


def nothing_fits(sketches: Sequence[Sketch], over: Sequence[Found], room: Room, gpus: int, device: Device) -> str:
    """One line for a search that finds nothing."""
    if over:
        found = min(over, key=lambda f: f.report.peak_bytes_per_rank)
        nearest, why = words(found.candidate), does_not_fit(found.report)
    else:
        sketch = least(sketches, room)
        nearest, why = f"about {words(sketch.candidate)}", too_much(sketch, room)
    return f"nothing fits on {gpus} {device.name}; the least is {nearest}: it {why}; use more devices, or larger ones"


# ---- words -------------------------------------------------------------------------------------------------------------


def words(c: Candidate) -> str:
    """A candidate in words."""
    offload = f", offload {c.offload}" if c.offload else ""
    return f"{mesh_words(c.mesh)}, stage {c.zero}, remat {c.remat}{offload}, micro-batch {c.micro_batch}"


def describe(result: SearchResult) -> str:
    """The text that `print(result)` shows."""
    first = result.best[0].report
    t = result.config.train
    head = ["", "mesh", "zero", "remat", "offload", "micro", "step", "tokens/s", "MFU", "memory", "of it", "reason"]
    rows = []
    for i, found in enumerate(result.best, 1):
        c, r = found.candidate, found.report
        use = percent(r.mfu) if r.mfu is not None else "-"
        cells = [str(i), mesh_words(c.mesh), str(c.zero), c.remat, c.offload or "-", str(c.micro_batch), duration(r.step_s)]
        cells += [quantity(r.tokens_per_s), use, size(r.peak_bytes_per_rank), percent(r.peak_bytes_per_rank / r.capacity_bytes)]
        rows.append([*cells, found.reason or f"the fastest; {r.time['binds']} binds"])
    lines = [
        f"{result.config.preset or 'the model'} on {first.ranks} {first.device.name}: {quantity(first.num_params)} parameters, batches of "
        f"{t.batch:,} sequences of {result.config.data.seq_len:,}",
        f"{result.considered:,} candidates, {result.fitting:,} should fit, {result.traced} traced exactly; {result.seconds:.1f} s",
        "",
        *table(head, rows, text=(0, 1, 3, 4, -1)),
        "",
        "why the others lose (the best of each; ~ by closed forms)",
        *table(["choice", "of them", "the best of them", ""], loser_rows(result.losers), text=(0, 2, 3)),
    ]
    if first.days is not None:
        cost = f", {first.cost:,.0f} at {first.price_per_hour:g} an hour" if first.cost is not None else ""
        lines += ["", f"{quantity(first.tokens)} tokens: {duration(first.days * 86400)}, {first.device_hours:,.0f} device hours{cost}"]
    return "\n".join(lines)


def loser_rows(lost: Sequence[Alternative]) -> list[list[str]]:
    """The rows of the table of losers."""
    return [[loser.choice, f"{loser.count:,}", words(loser.candidate), ("" if loser.exact else "~ ") + loser.reason] for loser in lost]


def expect_config_path(path: Path) -> None:
    """Raise ValueError where a config cannot be written at `path`."""
    if path.suffix not in (".toml", ".json"):
        raise ValueError(f"{path}: a config is written as .toml or .json")


def write_config(config: RunConfig, path: Path) -> None:
    """Write a config for `fzero pretrain --config`: a .toml of what differs from its preset, or a .json of everything."""
    expect_config_path(path)
    path.write_text(to_json(config) if path.suffix == ".json" else tables.to_toml(differences(config)), encoding="utf-8")


def differences(config: RunConfig) -> tables.Table:
    """The table of what differs from the config's preset; `config.from_table` gives the config back."""
    mine = to_table(config)
    base = to_table(recipe(config.preset, steps=config.train.steps, optimizer=config.optim.name)) if config.preset else {}
    usual = dict(tables.flat(base))
    out: tables.Table = {"preset": config.preset}
    for name, value in tables.flat(mine):
        if (name not in usual or usual[name] != value) and value is not None:
            tables.put(out, name, value)
    out.setdefault("train", {})["steps"] = config.train.steps
    out.setdefault("optim", {})["name"] = config.optim.name
    return out
