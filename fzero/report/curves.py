"""Pictures over the tokens and steps of a run, and of several runs: loss, throughput, norms, load of experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fzero.core.files import replacing
from fzero.core.text_parsing import in_form
from fzero.report.compare import starts, value_of
from fzero.report.figures import (
    BLUE,
    DIM,
    GREY,
    LINES,
    PREDICTED,
    VERMILION,
    blank,
    every_mark,
    format_counts,
    smooth,
    thin_out,
)
from fzero.report.run_reader import read_run, steady
from fzero.report.values import Report, RunReport, digits, loss_unit, perplexity
from fzero.run.setup import run_folder

Marks = Sequence[tuple[float, int]]  # (place on the x axis, number) of the attempts after the first
NAMED_MARKS = 8  # most attempts with their numbers beside their lines
Curve = tuple[str, Sequence[float], Sequence[float | None]]  # name, x, y
MOST_ROWS = 256  # of a map: layers of more experts are shown by as many as fit


def write_pictures(folder: Path) -> list[Path]:
    """Write loss.png and throughput.png into a run folder; their paths."""
    if not any(True for _ in run_folder.read_metrics(folder)):
        return []
    paths = [folder / "loss.png", folder / "throughput.png"]
    with in_form(str(folder / run_folder.METRICS), "; remove the rows that lack it"):
        run = read_run(folder)
        size, policy = run.environment["num_params"], run.config["precision"]["policy"]
        title = f"{run.config.get('preset') or 'model'}, {size:,} parameters, {policy}"
        for path, draw in zip(paths, (loss, throughput)):
            figure = draw(run)
            figure.axes[0].set_title(title, fontsize=10)
            with replacing(path) as file:
                figure.savefig(file, format="png", dpi=120)
    return paths


def places(run: RunReport) -> list[int]:
    """The tokens seen at each step, or the steps if tokens were not recorded."""
    return run.series.get("tokens", run.series["step"])


def points_of(run: RunReport, column: str) -> list[tuple[int, Any]]:
    """(place, value) of the steps that have a value in a column."""
    return [(x, y) for x, y in zip(places(run), run.column(column)) if y is not None]


def loss(run: RunReport) -> Any:
    """Draw losses over tokens seen, in nats per unit: each step, a running mean, and validation."""
    figure, axes = blank()
    unit, train, val = loss_unit([run]), points_of(run, "loss"), points_of(run, "val_loss")
    if train:
        draw_steps(axes, [x for x, _ in train], [y for _, y in train], "training")
    if val:
        last = val[-1][1]
        spread = f", perplexity {digits(perplexity(last), 3)}" if unit == "token" else ""
        look = {"linestyle": "--", "marker": "o", "markersize": 4.5, "color": VERMILION}
        axes.plot(*zip(*val), **look, markevery=every_mark(val), label=f"validation (last {last:.3f}{spread})")
    axes.set(xlabel="tokens seen (tokens)", ylabel=f"loss (nats per {unit})")
    format_counts(axes.xaxis)
    mark_attempts(axes, starts(run.series, run.attempts))
    if train or val:
        axes.legend(frameon=False)
    return figure


def throughput(run: RunReport) -> Any:
    """Draw tokens per second of the steady steps, with prediction and MFU."""
    figure, axes = blank()
    indices, predicted = steady(run.series, run.attempts), value_of(run, "tokens_per_s", predicted=True)
    tokens, rate, mfu = ([run.column(name)[i] for i in indices] for name in ("tokens", "tokens_per_s", "mfu"))
    draw_steps(axes, tokens, rate, "measured")
    if predicted is not None:
        axes.axhline(predicted, **PREDICTED, label="predicted")
    axes.set(xlabel="tokens seen (tokens)", ylabel="throughput (tokens/s)")
    axes.set_ylim(bottom=0, top=1.08 * max([*rate, predicted or 0.0]) or 1.0)
    format_counts(axes.xaxis)
    format_counts(axes.yaxis)
    mark_attempts(axes, starts(run.series, run.attempts))
    mfu_pairs = [(a, b) for a, b in zip(rate, mfu) if a and b is not None]
    if mfu_pairs and mfu_pairs[-1][1]:
        # MFU is proportional to the rate, so one curve serves two scales.
        percent = 100 * mfu_pairs[-1][1] / mfu_pairs[-1][0]
        mfu_axis = axes.secondary_yaxis("right", functions=(lambda y: y * percent, lambda y: y / percent))
        mfu_axis.set_ylabel("model FLOPs utilisation (%)")
    axes.legend(frameon=False, loc="lower right")
    return figure


def draw_steps(axes: Any, x: Sequence[float], y: Sequence[float], name: str) -> None:
    """Draw the values of the steps and their running mean."""
    every, thinning = thin_out(len(x))
    axes.plot(x[::every], y[::every], color=GREY, linewidth=0.7, label=f"{name}, {thinning}")
    axes.plot(x[::every], smooth(y)[::every], color=BLUE, linewidth=1.8, label=f"{name}, running mean")


def mark_attempts(axes: Any, marks: Marks) -> None:
    """Draw a line where each attempt begins, with its number if there are few."""
    for x, number in marks:
        axes.axvline(x, color=DIM, linewidth=0.8, linestyle=(0, (2, 2)))
        if len(marks) <= NAMED_MARKS:
            write_upright(axes, x, f"attempt {number}")


def write_upright(axes: Any, x: float, text: str) -> None:
    """Write a text left of a vertical line, from the foot of the axes."""
    look = {"rotation": 90, "ha": "right", "va": "bottom", "fontsize": 7.5, "color": DIM}
    axes.text(x, 0.02, text, transform=axes.get_xaxis_transform(), **look)


def small(curves: Sequence[Curve], x: str, y: str, marks: Marks = (), points: Sequence[Curve] = ()) -> Any:
    """Draw a picture of the first screen: lines for `curves`, marks for `points`, over axes `x` and `y`."""
    figure, axes = blank(width=2.9, height=2.1)
    for i, (name, xs, values) in enumerate(curves):
        colour, style, _ = LINES[i % len(LINES)]
        every, _ = thin_out(len(xs))
        axes.plot(xs[::every], values[::every], color=colour, linestyle=style, linewidth=1.5, label=name)
    for i, (name, xs, values) in enumerate(points):
        colour, _, marker = LINES[(i + (len(points) == 1)) % len(LINES)]
        look = {"color": colour, "linestyle": "none", "marker": marker, "markersize": 4}
        axes.plot(xs, values, **look, markevery=every_mark(values), label=name)
    axes.set(xlabel=x, ylabel=y)
    format_counts(axes.xaxis)
    if "(tokens/s)" in y:
        axes.set_ylim(bottom=0)
        format_counts(axes.yaxis)
    if len(points) > 1:
        axes.legend(handles=axes.lines[: len(curves)], frameon=False, fontsize=6.5, loc="upper right")
    axes.locator_params(axis="x", nbins=3)
    axes.locator_params(axis="y", nbins=5)
    mark_attempts(axes, marks)
    return figure


def loss_by_position(evaluations: Sequence[tuple[int, Sequence[int], Sequence[float]]], unit: str) -> Any:
    """Draw the mean losses in ranges of positions, a line for each evaluation; each range is at its end."""
    figure, axes = blank()
    for i, (step, ends, values) in enumerate(evaluations):
        colour, style, marker = LINES[i % len(LINES)]
        look = {"color": colour, "linestyle": style, "marker": marker, "markersize": 4.5}
        axes.plot(ends, values, linewidth=1.5, label=f"after step {step:,}", **look)
    axes.set_xscale("log", base=2)
    every = sorted({end for _, ends, _ in evaluations for end in ends})
    axes.set_xticks(every[:: -(-len(every) // 12)])
    axes.set(xlabel="position in its document, up to (tokens)", ylabel=f"validation loss (nats per {unit})")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False)
    return figure


# -- maps: a row of colours over the steps


def norms(steps: Sequence[int], table: Mapping[str, Sequence[float | None]], kind: str) -> Any:
    """Draw the norms of each layer over the steps as a map of their logarithm."""
    from matplotlib.colors import LogNorm

    values = [[float("nan") if v is None or v <= 0 else v for v in row] for row in table.values()]
    finite = sorted(v for row in values for v in row if v == v) or [1.0]
    low, high = finite[0], finite[-1]
    ticks = list(enumerate(table))[:: -(-len(table) // 16)]
    height, scale = 1.5 + min(3.5, 0.28 * len(table)), {"norm": LogNorm(low, high if high > low else low * 10)}
    return draw_map(steps, values, ticks, ("part of the model", f"{kind} norm (L2)"), height, scale)


def load_map(steps: Sequence[int], load: Sequence[Sequence[Sequence[float]]]) -> Any:
    """Draw the share of each expert over its layer's mean as a map; load: [steps][layers][experts]."""
    layers, experts = len(load[0]), len(load[0][0])
    visible = range(0, layers, max(1, -(-layers * experts // MOST_ROWS)))
    rows = [
        [step_load[i][e] * experts / (sum(step_load[i]) or 1.0) for step_load in load]
        for i in visible
        for e in range(experts)
    ]
    ticks = [(n * experts, f"layer {i}") for n, i in enumerate(visible)][:: -(-len(visible) // 16)]
    scale = {"vmin": 0.0, "vmax": max(2.0, *(value for row in rows for value in row))}
    names = ("experts of each layer", "tokens over the layer's mean")
    return draw_map(steps, rows, ticks, names, 1.5 + min(4.0, 0.16 * len(rows)), scale)


def draw_map(
    steps: Sequence[int],
    rows: Sequence[Sequence[float]],
    ticks: Iterable[tuple[int, str]],
    names: tuple[str, str],
    height: float,
    scale: Mapping[str, Any],
) -> Any:
    """Draw a row of colours for each of `rows`, its values over the steps."""
    figure, axes = blank(height=height)
    edges = [*steps, steps[-1] + max(1, steps[-1] - steps[-2] if len(steps) > 1 else 1)]
    borders = [i - 0.5 for i in range(len(rows) + 1)]
    mesh = axes.pcolormesh(edges, borders, rows, cmap="cividis", rasterized=True, **scale)
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set_yticks(*zip(*ticks))
    axes.set(xlabel="step (number)", ylabel=names[0])
    format_counts(axes.xaxis)
    figure.colorbar(mesh, ax=axes, label=names[1], pad=0.02)
    return figure


# -- several runs


def losses(report: Report) -> Any:
    """Draw running means of training loss, and marks of validation loss, of several runs."""
    figure, axes = blank(height=4.0)
    handles, marks = [], [starts(run.series, run.attempts) for run in report.runs]
    for i, run in enumerate(report.runs):
        colour, style, marker = LINES[i % len(LINES)]
        train, val = points_of(run, "loss"), points_of(run, "val_loss")
        artists = []
        if train:
            x, y = zip(*train)
            every, _ = thin_out(len(x))
            look = {"color": colour, "linestyle": style, "linewidth": 1.6}
            artists += axes.plot(x[::every], smooth(y)[::every], **look, label=run.name)
        if val:
            look = {"linestyle": "none", "marker": marker, "markersize": 6, "markerfacecolor": "none", "color": colour}
            artists += axes.plot(*zip(*val), **look, markevery=every_mark(val), label=f"{run.name}, validation")
        handles += artists[:1]
        for x, _ in marks[i]:
            axes.axvline(x, color=colour, linewidth=0.8, linestyle=(0, (2, 2)))
    common = ((report.compared or {}).get("losses") or {}).get("tokens")
    if common is not None and len({max(places(run)) for run in report.runs}) > 1:
        axes.axvline(common, color=DIM, linewidth=1.0)
        write_upright(axes, common, "seen by all")
    axes.set(xlabel="tokens seen (tokens)", ylabel=f"loss (nats per {loss_unit(report.runs)})")
    format_counts(axes.xaxis)
    title = "lines: training, running mean; marks: validation" + "; dashed: an attempt begins" * any(map(len, marks))
    axes.legend(handles=handles, frameon=False, title=title, title_fontsize=8, alignment="left")
    return figure


def scaling(series: Sequence[Mapping[str, Any]]) -> Any:
    """Draw tokens per second and efficiency over ranks: a line for each series of `compare.scaling`."""
    figure, (rate_axes, right) = blank(1, 2, height=3.6)
    ideal, ticks, top = {"color": GREY, "linewidth": 1.0, "linestyle": (0, (1, 2))}, set[int](), 110.0
    for i, entry in enumerate(series):
        best = {p["ranks"]: p for p in sorted(entry["points"], key=lambda p: p["tokens_per_s"])}
        ranks = sorted(best)
        rate, percent = [best[n]["tokens_per_s"] for n in ranks], [100 * best[n]["efficiency"] for n in ranks]
        colour, style, marker = LINES[i % len(LINES)]
        look = {"color": colour, "linestyle": style, "marker": marker, "markersize": 6, "linewidth": 1.6}
        rate_axes.plot(ranks, rate, **look, label=f"{entry['name']} ({entry['kind']})")
        first = rate[0] / ranks[0]
        rate_axes.plot(ranks, [first * n for n in ranks], **ideal, label=None if i else "as many times as ranks")
        right.plot(ranks, percent, **look)
        ticks |= {*ranks}
        top = max(top, *(1.05 * value for value in percent))
    right.axhline(100, **ideal)
    rate_axes.set(xlabel="ranks (number)", ylabel="throughput (tokens/s)", ylim=(0, None))
    right.set(xlabel="ranks (number)", ylabel="scaling efficiency (%)", ylim=(0, top))
    for axes in (rate_axes, right):
        axes.set_xticks(sorted(ticks))
    format_counts(rate_axes.yaxis)
    rate_axes.legend(frameon=False, fontsize=8)
    return figure
