"""Bind a run's values to the functions of figures.py: each function here returns a function that draws a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fzero.report import figures, figures_bars, figures_compare, figures_curves
from fzero.report.attempts import starts
from fzero.report.compare import value_of
from fzero.report.run_reader import steady
from fzero.report.values import Report, RunReport, format_quantity, loss_unit

Draw = Callable[[], Any]
COMPONENTS = tuple(figures.COMPONENTS)


def loss(run: RunReport) -> Draw:
    """Training and validation loss over tokens seen."""
    s, marks = run.series, starts(run.series, run.attempts)
    val = s.get("val_loss", [None] * len(s["loss"]))
    return lambda: figures_curves.loss(places(run), s["loss"], val, marks, loss_unit([run]))


SHOWN = 4  # evaluations in the picture of losses by position


def losses_by_position(run: RunReport) -> list[tuple[int, list[int], list[float]]]:
    """(step, the ends of the ranges, the mean losses in them) of each evaluation that has them."""
    name = "val_loss_by_position."
    ends = sorted(int(column.removeprefix(name)) for column in run.series if column.startswith(name))
    evaluations = []
    for i, step in enumerate(run.series["step"]):
        measured = {end: value for end in ends if (value := run.series[f"{name}{end}"][i]) is not None}
        if measured:
            evaluations.append((step, list(measured), list(measured.values())))
    return evaluations


def loss_by_position(run: RunReport) -> Draw:
    """The losses by position of the first and the last evaluation, and of some evenly between them."""
    evaluations = losses_by_position(run)
    count = min(SHOWN, len(evaluations))
    shown_ones = [evaluations[(len(evaluations) - 1) * i // max(1, count - 1)] for i in range(count)]
    curves = [(f"after step {step:,}", ends, values) for step, ends, values in shown_ones]
    return lambda: figures_curves.loss_by_position(curves, loss_unit([run]))


def places(run: RunReport) -> list[int]:
    """The tokens seen at each step, or the steps if tokens were not recorded."""
    return run.series.get("tokens", run.series["step"])


def throughput(run: RunReport) -> Draw:
    """Tokens per second over tokens, of the steady steps."""
    s, indices = run.series, steady(run.series, run.attempts)
    mfu = s.get("mfu", [None] * len(s["step"]))
    rate = s["tokens_per_s"]
    return lambda: figures_curves.throughput(
        [s["tokens"][i] for i in indices],
        [rate[i] for i in indices],
        [mfu[i] for i in indices],
        value_of(run, "tokens_per_s", predicted=True),
        starts(s, run.attempts),
    )


def memory(run: RunReport) -> Draw:
    """The measured stack and the predicted line."""
    measured, plan = run.memory or {}, run.plan or {}
    names = [*(measured.get("components") or COMPONENTS)]
    names += [name for m in measured.get("timeline", ()) for name in m["parts"] if name not in names]
    return lambda: figures_bars.memory(
        measured.get("timeline") or (), plan.get("timeline") or (), list(dict.fromkeys(names))
    )


def time_bars(run: RunReport) -> Draw:
    """Seconds of a step by part, predicted and measured."""
    phases = [(q.name.removeprefix("time/"), q) for q in run.quantities if q.name.startswith("time/")]
    measured, predicted = (
        {name: getattr(q, kind) for name, q in phases if getattr(q, kind) is not None}
        for kind in ("measured", "predicted")
    )
    return lambda: figures_bars.time_bars(measured, predicted)


def time_steps(run: RunReport) -> Draw:
    """Seconds of each step by phase, on an axis that a few slow steps do not stretch. On a GPU few steps have
    phases."""
    s = run.series
    split = [i for i, value in enumerate(s["phases.forward"]) if value is not None]
    steps = [s["step"][i] for i in split]
    phases = {
        name.removeprefix("phases."): [values[i] for i in split]
        for name, values in s.items()
        if name.startswith("phases.")
    }
    walls = [sum(v[i] or 0.0 for v in phases.values()) for i in range(len(split))]
    ceiling = highest_shown(walls)
    slow_steps = [(wall, step) for wall, step in zip(walls, steps) if wall > ceiling]
    note = ""
    if slow_steps:
        longest, step = max(slow_steps)
        duration = format_quantity(longest, "s")
        note = f"{len(slow_steps)} of {len(walls):,} steps are longer; the longest, step {step:,}, {duration}"
    return lambda: figures_bars.time_steps(steps, phases, ceiling, note)


def highest_shown(values: Sequence[float]) -> float:
    """The end of an axis for `values`: a little above their 95th percentile and at most three times their median; above
    them all if none is far from the others.

    >>> highest_shown([1.0] * 30 + [9.0]), highest_shown([2.0, 4.0, 4.0])
    (1.1, 4.2)
    """
    ordered = sorted(values)
    near = ordered[max(0, len(ordered) - 1 - max(1, len(ordered) // 20))]
    ceiling = min(1.1 * near, 3 * ordered[len(ordered) // 2])
    return ceiling if ordered[-1] > ceiling > 0 else 1.05 * ordered[-1]


Sent = dict[tuple[str, str, str], tuple[int | None, int | None, int | None, int | None]]


def sent_bytes(run: RunReport) -> Sent:
    """{(axis, collective, phase): (bytes predicted, measured, calls predicted, measured)}; None if a record is
    missing."""
    planned = (run.plan or {}).get("comm")
    records = [rows if isinstance(rows, list) else None for rows in (planned, run.ledger)]
    sums: list[dict[tuple[str, str, str], list[int]]] = [{}, {}]
    for record, table in zip(records, sums):
        for row in record or ():
            entry = table.setdefault((row["axis"], row["collective"], row["phase"]), [0, 0])
            entry[0] += row["bytes"]
            entry[1] += row["calls"]
    keys = sorted({*sums[0], *sums[1]})

    def lookup(i: int, key: tuple[str, str, str], column: int) -> int | None:
        return None if records[i] is None else sums[i].get(key, [0, 0])[column]

    return {key: (lookup(0, key, 0), lookup(1, key, 0), lookup(0, key, 1), lookup(1, key, 1)) for key in keys}


SMALL = 0.005  # fraction of the largest row; smaller ones are only in the table


def communication(run: RunReport) -> Draw:
    """Bars of the larger rows of `sent`, the largest first."""
    sent = sent_bytes(run)
    max_bytes = max(max(p or 0, m or 0) for p, m, *_ in sent.values())
    rows = [(f"{c} over {axis}, {phase or 'outside phases'}", p, m) for (axis, c, phase), (p, m, *_) in sent.items()]
    rows = sorted(
        (row for row in rows if max(row[1] or 0, row[2] or 0) >= SMALL * max_bytes),
        key=lambda row: -max(row[1] or 0, row[2] or 0),
    )
    return lambda: figures_bars.communication(rows)


def norms_of(run: RunReport, kind: str) -> tuple[list[int], dict[str, list[float | None]]] | None:
    """Return (steps that recorded norms, {part or layer: norm at each}) of "grad" or "param"; None if no step did."""
    s = run.series
    columns = {
        name.removeprefix(f"{kind}_norms."): values for name, values in s.items() if name.startswith(f"{kind}_norms.")
    }
    indices = [i for i in range(len(s["step"])) if any(values[i] is not None for values in columns.values())]
    if not indices:
        return None
    rows: dict[str, list[float | None]] = {}
    for name in ("embed", "blocks", *(n for n in columns if n not in ("embed", "blocks", "head")), "head"):
        values = columns.get(name, [None] * len(s["step"]))
        layers = max((len(v) for v in values if isinstance(v, list)), default=0)
        for layer in range(layers):
            rows[f"layer {layer}"] = [values[i][layer] if values[i] is not None else None for i in indices]
        if not layers and any(values[i] is not None for i in indices):
            rows[name] = [values[i] for i in indices]
    return [s["step"][i] for i in indices], rows


def norms(run: RunReport, kind: str) -> Draw:
    """Norms over steps by part of the model, of "grad" or "param"."""
    steps, rows = norms_of(run, kind) or ([], {})
    return lambda: figures_curves.norms(steps, rows, "gradient" if kind == "grad" else "parameter")


KINDS = ("busy_s", "comm_s", "data_s", "io_s")


def times_of_ranks(run: RunReport) -> list[tuple[tuple[float, ...], tuple[float, float]]] | None:
    """For each rank (mean seconds of KINDS in a step, range of its busy seconds); None if ranks were not recorded.

    The first record of an attempt includes its warm-up and is left out if there are others.
    """
    s = run.series
    counts = s.get("ranks.steps", [])
    indices = [i for i, n in enumerate(counts) if n]
    begins = {a.get("first_step", 0) for a in run.attempts} | {s["step"][0] - 1}
    later = [i for i in indices if s["step"][i] - counts[i] not in begins]
    indices = later or indices
    if not indices:
        return None
    times = []
    for rank in range(len(s["ranks.busy_s"][indices[0]])):
        usable = [i for i in indices if len(s["ranks.busy_s"][i]) > rank]
        steps = sum(counts[i] for i in usable)
        means = tuple(sum(s[f"ranks.{kind}"][i][rank] for i in usable) / steps for kind in KINDS)
        busy = sorted(s["ranks.busy_s"][i][rank] / counts[i] for i in usable)
        times.append((means, (busy[0], busy[-1])))
    return times


def stragglers(run: RunReport) -> Draw:
    """Seconds that each rank was busy in a step."""
    times = times_of_ranks(run) or []
    return lambda: figures_bars.stragglers(
        range(len(times)), [parts[0] for parts, _ in times], [spread for _, spread in times], "busy in a step, mean"
    )


def losses(report: Report) -> Draw:
    """Losses of several runs over tokens seen, with a line at the tokens that all have seen."""
    rows = [
        (run.name, places(run), run.series["loss"], run.series.get("val_loss", [None] * len(run.series["loss"])))
        for run in report.runs
    ]
    common = ((report.compared or {}).get("losses") or {}).get("tokens")
    ends = {max(tokens) for _, tokens, _, _ in rows}
    marks = [[x for x, _ in starts(run.series, run.attempts)] for run in report.runs]
    unit = loss_unit(report.runs)
    return lambda: figures_compare.losses(rows, marks, common if len(ends) > 1 else None, unit)


def speeds(runs: Sequence[RunReport]) -> Draw:
    """Tokens per second of several runs, predicted and measured."""
    rows = [(run.name, value_of(run, "tokens_per_s", predicted=True), value_of(run, "tokens_per_s")) for run in runs]
    return lambda: figures_compare.speeds(rows)


def scaling(report: Report) -> Draw:
    """Speed over ranks for each series, of the fastest run for each number of ranks."""
    series = []
    for entry in (report.compared or {})["scaling"]:
        best = {p["ranks"]: p for p in sorted(entry["points"], key=lambda p: p["tokens_per_s"])}
        points = [best[n] for n in sorted(best)]
        series.append(
            (
                f"{entry['name']} ({entry['kind']})",
                *([p[key] for p in points] for key in ("ranks", "tokens_per_s", "efficiency")),
            )
        )
    return lambda: figures_compare.scaling(series)
