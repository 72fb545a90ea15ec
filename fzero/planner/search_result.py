"""The result of a search: the candidates found, why the others are slower or do not fit, and its text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fzero import models
from fzero.comm.axes import mesh_text
from fzero.core.text_parsing import text_table
from fzero.planner.closed_forms import Sketch
from fzero.planner.devices import Device
from fzero.planner.estimate import Candidate
from fzero.planner.plan_report import PlanReport
from fzero.planner.plan_text import duration, percent, quantity, size
from fzero.run.config.config_table import to_table
from fzero.run.config.run_config import RunConfig
from fzero.run.setup import build_optim
from fzero.sharding import Context, fake_mesh, zero_plan

SPARE = 0.9  # the fraction of the capacity that a sketch, being rough, may fill
ALIKE = 5e-4  # relative differences of step times below this count as equal


class RankMemory(NamedTuple):
    """The memory available to the tensors of a rank, in bytes."""

    device: int
    host: int | None  # None: unknown

    def fits(self, sketch: Sketch, fraction: float = SPARE) -> bool:
        """Whether a sketch fits into the fraction `fraction` of the device, and into the host's memory."""
        return sketch.bytes <= fraction * self.device and (self.host is None or sketch.host_bytes <= self.host)


class TracedCandidate(NamedTuple):
    """A traced candidate."""

    candidate: Candidate
    report: PlanReport
    reason: str  # why it is slower than the best; "" for the best


def step_seconds(report: PlanReport) -> float:
    """The seconds of a step; a search refuses a device without the rates."""
    assert report.step_s is not None, report.device.name
    return report.step_s


class Alternative(NamedTuple):
    """For one alternative choice (such as tp=4): the best plan that uses it, and why it is slower."""

    choice: str  # "tp=4", "stage 0", "remat none", ...
    count: int
    candidate: Candidate
    reason: str
    exact: bool  # whether the numbers come from a trace; False: from closed forms


class SearchResult(NamedTuple):
    """The result of `search`. `print(result)` shows it."""

    best: tuple[TracedCandidate, ...]  # fastest first
    losers: tuple[Alternative, ...]
    config: RunConfig  # the best candidate's, ready for `fzero pretrain`
    considered: int
    fitting: int  # number of candidates that fit by closed forms
    traced: int
    seconds: float

    def for_tokens(self, tokens: float) -> SearchResult:
        """This result with a budget of tokens in the report of each of the best."""
        return self._replace(best=tuple(f._replace(report=f.report.for_tokens(tokens)) for f in self.best))

    def to_json(self) -> str:
        """Format as one JSON object."""
        rows = [
            {
                **f.candidate._asdict(),
                "mesh": f.candidate.mesh,
                "reason": f.reason,
                "plan": json.loads(f.report.to_json()),
            }
            for f in self.best
        ]
        for row in rows:
            del row["plan"]["timeline"]
        losers = [{**loser._asdict(), "candidate": loser.candidate._asdict()} for loser in self.losers]
        counts = {
            "considered": self.considered,
            "fitting": self.fitting,
            "traced": self.traced,
            "seconds": self.seconds,
        }
        return json.dumps({"best": rows, "losers": losers, "config": to_table(self.config), **counts}, indent=1)

    def __str__(self) -> str:
        return describe(self)


class AnsweredSearch(NamedTuple):
    """A search, and the answer to a question about its best plan."""

    search: SearchResult
    answer: Any

    def for_tokens(self, tokens: float) -> AnsweredSearch:
        """The same with a budget of tokens in the reports of the search."""
        return self._replace(search=self.search.for_tokens(tokens))

    def to_json(self) -> str:
        """Format as one JSON object."""
        return json.dumps({"search": json.loads(self.search.to_json()), "asked": json.loads(self.answer.to_json())})

    def __str__(self) -> str:
        return f"{self.search}\n\n{self.answer}"


# ---- reasons -----------------------------------------------------------------------------------------------------


def seconds_of(report: PlanReport) -> dict[str, float]:
    """Split a predicted step time: computation, update, exposed communication by axis, and waiting by memory."""
    t = report.time
    named = {"update": t["phases"].get("update", 0.0)}
    bubble = t["phases"].get("bubble", 0.0)
    named |= {"waiting for other stages": bubble} if bubble else {}
    named["computation"] = sum(t["phases"].values()) - sum(named.values())
    named |= {f"exposed communication on {axis}": s for axis, s in t["exposed"].items()}
    return named | {f"waiting for {name}": s for name, s in t["waiting"].items()}


def slower(report: PlanReport, best: PlanReport) -> str:
    """Say how much slower a plan is than the best one, and what causes most of the difference."""
    times, best_times = seconds_of(report), seconds_of(best)
    extra = {name: seconds - best_times.get(name, 0.0) for name, seconds in times.items()}
    worst = max(extra, key=extra.__getitem__)
    cause = worst
    if worst == "computation":
        flop = report.flop_per_step / best.flop_per_step - 1
        cause = (
            f"recomputation ({percent(flop)} more FLOPs)"
            if flop > 0.01
            else "computation in smaller pieces, or bound by memory"
        )
    longer = step_seconds(report) / step_seconds(best) - 1
    return (
        f"{percent(longer)} slower: {duration(extra[worst])} more {cause}"
        if longer >= ALIKE and extra[worst] > 0
        else "as fast"
    )


def slower_sketch(sketch: Sketch, best: Sketch) -> str:
    """As `slower`, from closed forms."""
    extra = {name: seconds - best.time.get(name, 0.0) for name, seconds in sketch.time.items()}
    worst = max(extra, key=extra.__getitem__)
    if not math.isfinite(sketch.step_s):
        return f"{worst}: the device's rate is not known"
    if sketch.step_s <= best.step_s:
        return "about as fast"
    return f"about {percent(sketch.step_s / best.step_s - 1)} slower: {duration(extra[worst])} more {worst}"


def explain_overflow(report: PlanReport) -> str:
    """Say why a plan does not fit."""
    parts = report.peak["components"]
    largest = max(parts, key=parts.__getitem__)
    usage = f"{size(report.peak_bytes_per_rank)} of {size(report.capacity_bytes)}"
    return f"does not fit: {usage}, {report.too_much()}; {largest} {size(parts[largest])}"


def explain_sketch_overflow(sketch: Sketch, limits: RankMemory) -> str:
    """Say why a sketch does not fit, or is too close to be traced."""
    largest = max(sketch.memory, key=sketch.memory.__getitem__)
    usage, large = f"{size(sketch.bytes)} of {size(limits.device)}", f"{largest} {size(sketch.memory[largest])}"
    if sketch.bytes > limits.device:
        return f"does not fit: {usage}, {size(sketch.bytes - limits.device)} too much; {large}"
    if limits.host is not None and sketch.host_bytes > limits.host:
        return (
            f"does not fit: {size(sketch.host_bytes)} in the host's memory, where a rank can have {size(limits.host)}"
        )
    return f"too close: {usage}, and closed forms may fill {percent(SPARE)}; {large}"


def closest_sketch(sketches: Sequence[Sketch], limits: RankMemory) -> Sketch:
    """The sketch that comes closest to fitting."""
    return min(sketches, key=lambda s: max(s.bytes / limits.device, s.host_bytes / limits.host if limits.host else 0.0))


def choices(c: Candidate) -> dict[str, str]:
    """The choices of a candidate, as texts by kind."""
    return {
        "tp": f"tp={c.tp}",
        "rp": f"rp={c.rp}",
        "zero": f"stage {c.zero}",
        "remat": f"remat {c.remat}",
        "offload": f"offload {c.offload}" if c.offload else "no offload",
        "micro_batch": f"micro-batch {c.micro_batch}",
        "pp": f"pp={c.pp}",
        "cp": f"cp={c.cp}",
        "ep": f"ep={c.ep}",
        "schedule": schedule_text(c) or "no pipeline",
    }


def best_alternatives(
    sketches: Sequence[Sketch], reports: Mapping[Candidate, PlanReport], best: TracedCandidate, limits: RankMemory
) -> list[Alternative]:
    """For each choice that the best lacks: the best candidate with it, and why slower."""
    classes: dict[tuple[str, str], list[Sketch]] = {}
    best_choices = choices(best.candidate)
    for sketch in sketches:
        for kind, text in choices(sketch.candidate).items():
            if text != best_choices[kind]:
                classes.setdefault((kind, text), []).append(sketch)
    top = next(s for s in sketches if s.candidate == best.candidate)
    out = []
    for (_, text), members in sorted(classes.items()):
        fitting = [s for s in members if s.candidate in reports and reports[s.candidate].fits]
        fit = [s for s in members if limits.fits(s)]
        if fitting:
            s = min(fitting, key=lambda s: step_seconds(reports[s.candidate]))
            reason = slower(reports[s.candidate], best.report)
        elif fit:
            s = fit[0]  # sketches are sorted by time
            report = reports.get(s.candidate)
            reason = explain_overflow(report) if report else slower_sketch(s, top)
        else:
            s = closest_sketch(members, limits)
            reason = explain_sketch_overflow(s, limits)
        out.append(Alternative(text, len(members), s.candidate, reason, s.candidate in reports))
    return out


def nothing_fits(
    sketches: Sequence[Sketch], oversized: Sequence[TracedCandidate], limits: RankMemory, gpus: int, device: Device
) -> str:
    """The error message of a search that finds nothing."""
    if oversized:
        smallest = min(oversized, key=lambda f: f.report.peak_bytes_per_rank)
        nearest, reason = words(smallest.candidate), explain_overflow(smallest.report)
    else:
        sketch = closest_sketch(sketches, limits)
        nearest, reason = f"about {words(sketch.candidate)}", explain_sketch_overflow(sketch, limits)
    return (
        f"nothing fits on {gpus} {device.name}; the least is {nearest}: it {reason}; use more devices, or larger ones"
    )


# ---- formatting --------------------------------------------------------------------------------------------------


def schedule_text(c: Candidate) -> str:
    """A candidate's schedule, chunks of a rank and layout: "zb-v/2"; "" without pp."""
    if c.pp == 1:
        return ""
    return c.schedule + f"/{c.chunks}" * (c.chunks > 1) + f" {c.layout}" * (c.layout != "auto")


def words(c: Candidate) -> str:
    """Format a candidate."""
    offload = f", offload {c.offload}" if c.offload else ""
    split = f", {schedule_text(c)}" if c.pp > 1 else ""
    return f"{mesh_text(c.mesh)}{split}, stage {c.zero}, remat {c.remat}{offload}, micro-batch {c.micro_batch}"


def describe(result: SearchResult) -> str:
    """The text that `print(result)` shows."""
    first = result.best[0].report
    t = result.config.train
    head = ["", "mesh", "zero", "remat", "offload", "micro", "step", "tokens/s", "MFU", "memory", "of it", "reason"]
    rows = []
    for i, entry in enumerate(result.best, 1):
        c, r = entry.candidate, entry.report
        use = percent(r.mfu) if r.mfu is not None else "-"
        cells = [
            str(i),
            " ".join(filter(None, (mesh_text(c.mesh), schedule_text(c)))),
            str(c.zero),
            c.remat,
            c.offload or "-",
            str(c.micro_batch),
            duration(step_seconds(r)),
        ]
        cells += [
            quantity(r.tokens_per_s or 0.0),
            use,
            size(r.peak_bytes_per_rank),
            percent(r.peak_bytes_per_rank / r.capacity_bytes),
        ]
        rows.append([*cells, entry.reason or f"the fastest; {r.time['binds']} binds"])
    lines = [
        f"{result.config.preset or 'the model'} on {first.ranks} {first.device.name}: {quantity(first.num_params)} "
        f"parameters, batches of {t.batch:,} sequences of {result.config.data.seq_len:,}",
        (
            f"{result.considered:,} candidates, {result.fitting:,} should fit, {result.traced} traced exactly; "
            f"{result.seconds:.1f} s"
        ),
        "",
        *text_table(head, rows, text=(0, 1, 3, 4, -1)),
        "",
        "why the others lose (the best of each; ~ by closed forms)",
        *text_table(["choice", "of them", "the best of them", ""], alternative_rows(result.losers), text=(0, 2, 3)),
    ]
    if any(entry.candidate.cp > 1 for entry in result.best):
        lines += ["", context_of(result)]
    if first.days is not None and first.tokens is not None:
        cost = f", {first.cost:,.0f} at {first.price_per_hour:g} an hour" if first.cost is not None else ""
        lines += [
            "",
            (
                f"{quantity(first.tokens)} tokens: {duration(first.days * 86400)}, {first.device_hours:,.0f} "
                f"device hours{cost}"
            ),
        ]
    return "\n".join(lines)


def context_of(result: SearchResult) -> str:
    """The line on attention over cp of the best candidate that has it."""
    c, config = next(f.candidate for f in result.best if f.candidate.cp > 1), result.config
    model, policy = models.build(config.model), build_optim.make_policy(config)
    plan = zero_plan(c.zero, model, fake_mesh(c.mesh), policy=policy, sequence=Context.parse(config.context))
    assert plan.context is not None  # on a mesh with cp
    return plan.context.describe(plan)


def alternative_rows(alternatives: Sequence[Alternative]) -> list[list[str]]:
    """The table rows of the alternatives."""
    return [
        [loser.choice, f"{loser.count:,}", words(loser.candidate), ("" if loser.exact else "~ ") + loser.reason]
        for loser in alternatives
    ]
