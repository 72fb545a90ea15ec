"""The first screen of the page: what ran and what became of it in words, the final figures, four small pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from fzero.core.text_parsing import in_form
from fzero.report import curves
from fzero.report.bars import along, cell_edges
from fzero.report.compare import ranks_of, starts, value_of
from fzero.report.figures import smooth, stairs
from fzero.report.values import (
    Picture,
    Report,
    ReportTable,
    RunReport,
    Section,
    digits,
    format_quantity,
    loss_unit,
    perplexity,
    scale_of,
    table,
)


class Outcome(NamedTuple):
    """The results of a run at its end, or at common tokens; None: unknown."""

    tokens: int | None
    train: float | None
    val: float | None
    val_tokens: int | None  # seen when `val` was measured
    seconds: float  # of all its steps, with evaluations and checkpoints


def opening(report: Report) -> Section:
    """The section that a page begins with."""
    runs = report.runs
    with in_form("the files of the runs", "; its traceback (--traceback) shows which value"):
        results = outcomes(report)
        words = [f"{describe_outcome(runs[0], results[0])} {describe_failures(runs[0])}"]
        if len(runs) > 1:
            words = [describe_comparison(report, results)]
            words += [f"**{run.name}**: {describe_failures(run)}" for run in runs if failures(run)]
        return Section("opening", "", [*words, final_table(report, results), *pictures(runs)])


def outcomes(report: Report) -> list[Outcome]:
    """The outcome of each run."""
    common = (report.compared or {}).get("losses")
    results = []
    for i, run in enumerate(report.runs):
        s = run.series
        seconds = sum(v for v in s.get("wall_s", s.get("step_s", ())) if v is not None)
        if common:
            figures = (common["tokens"], common["train"][i], common["val"][i], common["val_tokens"][i])
            results.append(Outcome(*figures, seconds))
            continue
        losses, tokens = [v for v in s["loss"] if v is not None], run.column("tokens")
        train = smooth(losses)[-1 - min(25, len(losses) // 20)] if losses else None  # the last mean of a whole window
        vals = [(value, seen) for value, seen in zip(run.column("val_loss"), tokens) if value is not None]
        results.append(Outcome(tokens[-1], train, *(vals[-1] if vals else (None, None)), seconds))
    return results


# ---- in words ----


def describe_outcome(run: RunReport, outcome: Outcome) -> str:
    """Say what ran, how long, and what it reached."""
    model = run.config.get("preset") or run.config.get("model", {}).get("family", "model")
    size, ranks = run.environment.get("num_params"), ranks_of(run)
    max_steps, done_steps = run.config.get("train", {}).get("steps"), run.series["step"][-1]
    processes = "one process" if ranks == 1 else f"{ranks} processes"
    steps = f"{done_steps:,} of {max_steps:,} steps" if max_steps else f"{done_steps:,} steps"
    tokens = f" ({outcome.tokens:,} tokens)" if outcome.tokens else ""
    reached = "it has no validation loss"
    if outcome.val is not None:
        reached = f"it reached a validation loss of {loss_in_words(outcome.val, loss_unit([run]))}"
    parameters = f" ({size:,} parameters)" if size else ""
    return f"**{model}**{parameters} made {steps}{tokens} on {processes} in {duration(outcome.seconds)}: {reached}."


def duration(seconds: float) -> str:
    """Format the time of a run in its two largest units.

    >>> duration(7.25), duration(125), duration(7_260), duration(200_000)
    ('7.2 s', '2 min 5 s', '2 h 1 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    units = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))
    size, name, small, small_unit = next(unit for unit in units if seconds >= unit[0])
    return f"{int(seconds // size)} {name} {int(seconds % size // small)} {small_unit}"


def of_tokens(run: RunReport) -> bool:
    """Whether the loss is one of tokens, which has a perplexity."""
    return loss_unit([run]) == "token"


def loss_in_words(loss: float, unit: str) -> str:
    """Format a loss with its perplexity, or with its unit if that is not the token."""
    return f"{digits(loss)} " + (f"(perplexity {digits(perplexity(loss))})" if unit == "token" else f"nats per {unit}")


def describe_comparison(report: Report, results: Sequence[Outcome]) -> str:
    """Say which of several runs has the least validation loss, at how many tokens."""
    names = ", ".join(run.name for run in report.runs)
    losses = [(outcome.val, run.name) for outcome, run in zip(results, report.runs) if outcome.val is not None]
    tokenizers = {run.environment.get("tokenizer") for run in report.runs}
    if len(tokenizers) > 1:
        verdict = "their tokenizers differ, so losses and perplexities per token are of different units"
    elif " or " in (unit := loss_unit(report.runs)):
        verdict = f"their objectives differ, so their losses are of different units, nats per {unit}"
    elif not (report.compared or {}).get("losses"):
        verdict = "the tokens seen were not recorded in all, so their losses are not set beside each other"
    elif len(losses) < len(results):
        verdict = "not all have a validation loss by the tokens that all have seen"
    else:
        min_val = min(val for val, _ in losses)
        best = " and ".join(name for val, name in losses if val == min_val)
        verdict = (
            f"after {results[0].tokens:,} tokens, which all have seen, the least validation loss is that of {best}, "
        )
        verdict += loss_in_words(min_val, unit)
    return f"**{len(results)} runs**, {names}: {verdict}."


def failures(run: RunReport) -> list[str]:
    """A clause for each thing that went wrong in a run, as far as its files tell."""
    s, clauses = run.series, []
    max_steps, done_steps = run.config.get("train", {}).get("steps"), s["step"][-1]
    if max_steps and done_steps < max_steps:
        clauses.append(f"it ended {max_steps - done_steps:,} steps before its end")
    lost = sum(value is None for value in s["loss"])
    if lost:
        clauses.append(f"the loss of {steps_in_words(lost)} was not finite")
    skipped = sum(map(bool, s.get("skipped", ())))
    if skipped:
        clauses.append(f"the update of {steps_in_words(skipped)} was skipped")
    for entry in run.rollbacks:
        clauses.append(f"it rolled back from step {entry['step']:,} to {entry['to']:,} ({entry['why']})")
    if len(run.attempts) > 1:
        clauses.append(f"it was started {len(run.attempts)} times")
    return clauses


def steps_in_words(count: int) -> str:
    """Format a number of steps."""
    return f"{count:,} step{'s' * (count != 1)}"


def describe_failures(run: RunReport) -> str:
    """Say what went wrong in a run, or that nothing did."""
    clauses = "; ".join(failures(run))
    return f"{clauses[:1].upper()}{clauses[1:]}." if clauses else "Nothing failed: no step was skipped, in one start."


# ---- the table ----


def final_table(report: Report, results: Sequence[Outcome]) -> ReportTable:
    """The final figures: of one run measured and predicted, of several each measured, losses at equal tokens."""
    several = len(report.runs) > 1
    spread_out = any(of_tokens(run) for run in report.runs)  # whether a perplexity is known
    head = ["" if not several else "run", "validation loss", *["perplexity"] * spread_out, "training loss", "time"]
    quantities = {"throughput": ("tokens_per_s", "tokens/s"), "MFU": ("mfu", "fraction")}
    quantities |= {"peak memory": ("peak_bytes", "bytes")}
    rows = []
    for run, outcome in zip(report.runs, results):
        spread = perplexity(outcome.val) if outcome.val is not None and of_tokens(run) else None
        losses = [digits(v) for v in (outcome.val, *[spread] * spread_out, outcome.train)]
        if several and outcome.val is not None and outcome.val_tokens != outcome.tokens:
            losses[0] += f" (at {outcome.val_tokens:,})"
        cells = [format_quantity(value_of(run, best_counter(run, name)), unit) for name, unit in quantities.values()]
        rows.append([run.name if several else "measured", *losses, duration(outcome.seconds), *cells])
    if not several:
        run = report.runs[0]
        planned = [format_quantity(value_of(run, name, predicted=True), unit) for name, unit in quantities.values()]
        rows += [["predicted", *["-"] * (len(head) - 1), *planned]] if {*planned} != {"-"} else []
    common = (report.compared or {}).get("losses")
    caption = "The final figures, each at the run's own end" if several else "The final figures"
    if common:
        caption = f"Losses after {common['tokens']:,} tokens, which all runs have seen; time and rates of whole runs"
    return table("final", caption, [*head, *quantities], rows)


def best_counter(run: RunReport, name: str) -> str:
    """The quantity that tells `name` best: a GPU's allocator counts what no operator shows."""
    on_gpu = name == "peak_bytes" and value_of(run, "gpu_peak_bytes") is not None
    return "gpu_peak_bytes" if on_gpu else name


# ---- the pictures ----


def pictures(runs: Sequence[RunReport]) -> list[Picture]:
    """The small pictures of loss, learning rate, throughput and memory, without those that no run has recorded."""
    single = len(runs) == 1
    marks = starts(runs[0].series, runs[0].attempts) if single else ()
    train, vals = [curve(run, "loss", mean=True) for run in runs], [curve(run, "val_loss") for run in runs]
    if single:
        train = [("training", *c[1:]) for c in train]
    vals = [("validation" if single else f"{c[0]}, validation", *c[1:]) for c in vals]
    drawn = [small("loss", "Loss", train, f"loss (nats per {loss_unit(runs)})", marks, vals)]
    rates = [curve(run, "lr") for run in runs], [curve(run, "tokens_per_s", mean=True) for run in runs]
    drawn.append(small("lr", "Learning rate", rates[0], "learning rate (1)", marks))
    drawn.append(small("throughput", "Throughput", rates[1], "throughput (tokens/s)", marks))
    drawn.append(small_memory(runs))
    return [picture for picture in drawn if picture is not None]


def curve(run: RunReport, column: str, *, mean: bool = False) -> curves.Curve:
    """(name of the run, tokens seen, values) of a column; `mean`: running means."""
    points = curves.points_of(run, column)
    values = [y for _, y in points]
    return run.name, [x for x, _ in points], smooth(values) if mean else values


def small(
    name: str,
    title: str,
    lines: Sequence[curves.Curve],
    unit: str,
    marks: curves.Marks = (),
    points: Sequence[curves.Curve] = (),
) -> Picture | None:
    """A small picture over the tokens seen; None if there is nothing to draw."""
    lasts = [f"{name} ends at {digits(values[-1])}" for name, _, values in [*lines, *points] if values]
    if not lasts:
        return None
    draw = partial(curves.small, lines, "tokens seen (tokens)", unit, marks, points)
    return Picture(f"small_{name}", title, f"{title} over the tokens seen: {'; '.join(lasts)}.", draw)


def small_memory(runs: Sequence[RunReport]) -> Picture | None:
    """The small picture of live bytes over a step, of each run that recorded them."""
    moments = [(run.name, run.memory["timeline"]) for run in runs if run.memory and run.memory.get("timeline")]
    if not moments:
        return None
    factor, unit = scale_of("bytes", max(m["bytes"] for _, record in moments for m in record))
    lines = [
        (name, *stairs(cell_edges(along(record)), [m["bytes"] / factor for m in record])) for name, record in moments
    ]
    ends = "; ".join(f"{name} has at most {digits(max(values))} {unit}" for name, _, values in lines)
    draw = partial(curves.small, lines, "progress of a step (%)", f"memory ({unit})")
    return Picture("small_memory", "Memory of a rank", f"Live tensors of a rank over one step: {ends}.", draw)
