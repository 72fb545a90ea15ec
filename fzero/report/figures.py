"""Pictures of one run as matplotlib Figures: loss, speed, memory over a step, time, communication, norms, ranks.

The colours are Okabe and Ito's, distinct for colour-blind readers. Adjacent areas and lines also differ in hatch, line
style or marker, so that a black-and-white print shows the same. `svg` is deterministic.
"""

from __future__ import annotations

import bisect
import difflib
import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fzero.report.plots import smooth
from fzero.report.values import scale_of

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY, PALE = "#8C8C8C", "#D9D9D9"
# (colour, hatch) of areas in stacks and bars. Any two that may be adjacent differ in both.
COMPONENTS = {
    "params": (BLUE, ""),
    "master": (SKY, "//"),
    "optimizer": (ORANGE, ""),
    "ema": (YELLOW, "xx"),
    "batch": (BLACK, ""),
    "grads": (VERMILION, "\\\\"),
    "gathered": (SKY, "---"),
    "activations": (GREEN, ""),
    "workspace": (PURPLE, "//"),
    "buffers": (GREY, "++"),
}
PHASES = {
    "data": (YELLOW, "xx"),
    "forward": (BLUE, ""),
    "backward": (SKY, "//"),
    "update": (ORANGE, ""),
    "comm_exposed": (VERMILION, "\\\\"),
    "comm_hidden": (PALE, "\\\\"),
    "io": (PURPLE, "---"),
    "checkpoint": (GREEN, "++"),
    "evaluate": (PALE, "|||"),
    "metrics": (BLACK, ""),
}
REST = ((GREY, "xx"), (PALE, ""), (GREEN, "//"), (PURPLE, ""))
LINES = (
    (BLUE, "-", "o"),
    (VERMILION, "--", "s"),
    (GREEN, "-.", "^"),
    (ORANGE, ":", "D"),
    (PURPLE, (0, (5, 1, 1, 1)), "v"),
    (BLACK, (0, (1, 1)), "x"),
)
POINTS = 1000  # most points of a line
BINS = 80  # bars in the picture of many steps
PREDICTED = {"color": BLACK, "linestyle": (0, (5, 2)), "linewidth": 1.6}
TAG = re.compile(r"<[^>]*>")
PATH = re.compile(r'\bd="([^"]*)"')
LONG = re.compile(r"-?\b\d+\.\d{3,}\b")
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "legend.fontsize": 8.5,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "fzero",
}


def blank(rows: int = 1, columns: int = 1, height: float = 3.7, **options: Any) -> tuple[Any, Any]:
    """Return (a figure without pyplot, so without a display and with nothing to close; its axes)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.8, height), dpi=100, layout="constrained")
    axes = figure.subplots(rows, columns, **options)
    for one in figure.axes:
        one.grid(alpha=0.25, linewidth=0.6)
        one.set_axisbelow(True)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    return figure, axes


def svg(draw: Callable[[], Any]) -> str:
    """Render the figure of `draw()` as SVG with selectable text; equal values give equal bytes."""
    import matplotlib

    stream = io.StringIO()
    style: Any = STYLE  # matplotlib wants literals for the names
    with matplotlib.rc_context(style):
        draw().savefig(stream, format="svg")
    text = stream.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = text.replace("*{", "text{font-family: 'DejaVu Sans', Verdana, sans-serif} *{").replace(
        " font-family: 'DejaVu Sans';", ""
    )
    return "".join(
        line.strip() + "\n" for line in TAG.sub(lambda found: tag(found[0]), text).splitlines() if line.strip()
    )


def tag(text: str) -> str:
    """Shorten an SVG tag: without group names, zero rotations, and digits below a tenth of a point."""
    text = LONG.sub(lambda found: f"{float(found[0]):.1f}".rstrip("0").rstrip("."), text)
    text = re.sub(r' transform="rotate\(-?0 [^"]*"', "", re.sub(r'<g id="[^"]*"', "<g", text))
    return PATH.sub(lambda found: f'd="{short(found[1])}"', text)


def short(path: str) -> str:
    """Shorten an SVG path with H and V for lines along an axis: stairs take half the bytes."""
    points, out, before = re.findall(r"([A-Za-z])([^A-Za-z]*)", path), [], ["", ""]
    for command, numbers in points:
        at = numbers.split()
        if command == "L" and at[1] == before[1]:
            out.append(f"H{at[0]}")
        elif command == "L" and at[0] == before[0]:
            out.append(f"V{at[1]}")
        else:
            out.append(command + " ".join(at))
        before = at[-2:] if len(at) > 1 else ["", ""]
    return "".join(out)


def format_counts(axis: Any) -> None:
    """Format the ticks of an axis of whole numbers with commas, or in millions."""
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if abs(value) < 1e6 else f"{value / 1e6:,.4g}M")


def legend_beside(axes: Any, **options: Any) -> None:
    """Put the legend right of the axes, in the order of the stack."""
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        labels[::-1],
        frameon=False,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        handlelength=1.8,
        **options,
    )


def look_of(name: str, table: Mapping[str, tuple[str, str]], names: Sequence[str]) -> dict[str, Any]:
    """The colour, hatch and edge of a part of a stack."""
    unknown = [other for other in names if other not in table]
    colour, hatch = table[name] if name in table else REST[unknown.index(name) % len(REST)]
    edge = "#FFFFFF" if colour == BLACK else "#333333"
    return {"facecolor": colour, "hatch": hatch, "edgecolor": edge, "linewidth": 0.4}


def thin_out(count: int) -> tuple[int, str]:
    """Return (n, if every n-th of `count` points is drawn; a label that says so)."""
    every = -(-count // POINTS)
    return every, "each step" if every == 1 else f"every {every}th step"


def loss(tokens: Sequence[int], train: Sequence[float | None], val: Sequence[float | None]) -> Any:
    """Draw losses over tokens seen: each step, a running mean, and validation."""
    figure, axes = blank()
    known = [(x, y) for x, y in zip(tokens, train) if y is not None]
    if known:
        x, y = zip(*known)
        every, which = thin_out(len(x))
        axes.plot(x[::every], y[::every], color=GREY, linewidth=0.7, label=f"training, {which}")
        axes.plot(x[::every], smooth(y)[::every], color=BLUE, linewidth=1.8, label="training, running mean")
    seen = [(x, y) for x, y in zip(tokens, val) if y is not None]
    if seen:
        axes.plot(
            *zip(*seen),
            linestyle="--",
            marker="o",
            markersize=4.5,
            color=VERMILION,
            label=f"validation (last {seen[-1][1]:.3f})",
        )
    axes.set(xlabel="tokens seen (tokens)", ylabel="loss (nats per token)")
    format_counts(axes.xaxis)
    if known or seen:
        axes.legend(frameon=False)
    return figure


def throughput(
    tokens: Sequence[int], rate: Sequence[float], mfu: Sequence[float | None], predicted: float | None
) -> Any:
    """Draw tokens per second of each step, their running mean and the prediction, with MFU as a second scale."""
    figure, axes = blank()
    every, which = thin_out(len(tokens))
    axes.plot(tokens[::every], rate[::every], color=GREY, linewidth=0.7, label=f"measured, {which}")
    axes.plot(tokens[::every], smooth(rate)[::every], color=BLUE, linewidth=1.8, label="measured, running mean")
    if predicted is not None:
        axes.axhline(predicted, **PREDICTED, label="predicted")
    axes.set(xlabel="tokens seen (tokens)", ylabel="throughput (tokens/s)")
    axes.set_ylim(bottom=0, top=1.08 * max([*rate, predicted or 0.0]) or 1.0)
    format_counts(axes.xaxis)
    format_counts(axes.yaxis)
    known = [(a, b) for a, b in zip(rate, mfu) if a and b is not None]
    if known and known[-1][1]:
        percent = 100 * known[-1][1] / known[-1][0]  # MFU is proportional to the rate, so one curve serves two scales
        other = axes.secondary_yaxis("right", functions=(lambda y: y * percent, lambda y: y / percent))
        other.set_ylabel("model FLOPs utilisation (%)")
    axes.legend(frameon=False, loc="lower right")
    return figure


def memory(
    moments: Sequence[Mapping[str, Any]], predicted: Sequence[Mapping[str, Any]], components: Sequence[str]
) -> Any:
    """Draw the live bytes over a step: measured, stacked by component, and the predicted sum as a line.

    moments: {"bytes", "parts": {component: bytes}, "phase"} in the order of the step; both records are stretched to its
    length."""
    figure, axes = blank(height=4.0)
    record = moments or predicted
    factor, unit = scale_of("bytes", max([m["bytes"] for m in (*moments, *predicted)], default=1))
    places = along(moments)
    stacked = [name for name in components if any(m["parts"].get(name) for m in record)]
    if moments:
        below = [0.0] * len(moments)
        for name in stacked:
            top = [b + m["parts"].get(name, 0) / factor for b, m in zip(below, moments)]
            band(axes, between(places), below, top, label=name, **look_of(name, COMPONENTS, stacked))
            below = top
    if predicted:
        axes.plot(
            *stairs(between(align(predicted, moments)), [m["bytes"] / factor for m in predicted]),
            **PREDICTED,
            label="predicted, all",
        )
    top = 1.12 * max([m["bytes"] for m in (*moments, *predicted)], default=1) / factor
    axes.set(
        xlabel="progress through the step's operators (%)",
        ylabel=f"live tensors of a rank ({unit})",
        xlim=(0, 100),
        ylim=(0, top),
    )
    name_phases(axes, between(along(record)), [m["phase"] for m in record])
    legend_beside(axes)
    return figure


def between(places: Sequence[float]) -> list[float]:
    """The edges halfway between neighbouring `places`."""
    return [places[0], *((a + b) / 2 for a, b in itertools.pairwise(places)), places[-1]]


def stairs(edges: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The corners (x, y) of a line with `values` between `edges`, without redundant points."""
    points = [(x, v) for a, b, v in zip(edges, edges[1:], values) for x in (a, b)]
    kept = [
        p for i, p in enumerate(points) if i in (0, len(points) - 1) or not points[i - 1][1] == p[1] == points[i + 1][1]
    ]
    return [x for x, _ in kept], [y for _, y in kept]


def band(axes: Any, edges: Sequence[float], below: Sequence[float], top: Sequence[float], **look: Any) -> None:
    """Fill the area between two stairs."""
    (x, y), (back, low) = stairs(edges, top), stairs(edges, below)
    axes.fill([*x, *back[::-1]], [*y, *low[::-1]], **look)


def along(moments: Sequence[Mapping[str, Any]]) -> list[float]:
    """The position of each moment in the step, in percent of its operators if recorded, else of its moments."""
    if not moments:
        return []
    at = [m.get("at", i) for i, m in enumerate(moments)]
    first, last = at[0], at[-1]
    return [100.0 * (x - first) / max(1, last - first) for x in at]


def align(predicted: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> list[float]:
    """The position of each predicted moment in the measured step.

    A moment with a measured counterpart (same place and operator) has its position, others are interpolated between
    such ones. If fewer than two moments have one, positions are the predicted step's own.
    """
    own, places = along(predicted), along(measured)
    keys = [[(m["phase"], m.get("layer"), m.get("op")) for m in record] for record in (predicted, measured)]
    blocks = difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks()
    common = [(b.a + i, b.b + i) for b in blocks for i in range(b.size)]
    if len(common) < 2:
        return own
    at = {own[i]: places[j] for i, j in common}  # of several at one position, the last
    x, y = zip(*sorted({0.0: 0.0, 100.0: 100.0, **at}.items()))

    def moved(place: float) -> float:
        n = min(max(bisect.bisect_right(x, place), 1), len(x) - 1)
        return y[n - 1] + (y[n] - y[n - 1]) * (place - x[n - 1]) / (x[n] - x[n - 1])

    return [moved(place) for place in own]


def name_phases(axes: Any, edges: Sequence[float], phases: Sequence[str]) -> None:
    """Write the names of the phases along the top, with lines between them; phases too short for a name get none."""
    begins = [i for i in range(len(phases)) if i == 0 or phases[i] != phases[i - 1]]
    ends = [*(edges[i] for i in begins[1:]), 100.0]
    named = [right - edges[i] > 1.1 * len(phases[i]) + 1 for i, right in zip(begins, ends)]  # a letter is about 1% wide
    for n, (i, right) in enumerate(zip(begins, ends)):
        if i and (named[n] or named[n - 1]):
            axes.axvline(edges[i], color="#555555", linewidth=0.6, linestyle=":")
        if named[n]:
            axes.text(
                (edges[i] + right) / 2,
                0.97,
                phases[i],
                ha="center",
                va="top",
                fontsize=8,
                transform=axes.get_xaxis_transform(),
            )


def time_bars(measured: Mapping[str, float], predicted: Mapping[str, float]) -> Any:
    """Draw the seconds of a step by phase: one stacked bar measured, one predicted."""
    bars = [(name, parts) for name, parts in (("predicted", predicted), ("measured", measured)) if parts]
    figure, axes = blank(height=1.3 + 0.55 * len(bars))
    total = max(sum(parts.values()) for _, parts in bars)
    factor, unit = scale_of("s", total)
    names = [
        name
        for name in [*PHASES, *sorted({*measured, *predicted} - set(PHASES))]
        if name in measured or name in predicted
    ]
    for y, (_, parts) in enumerate(bars):
        left = 0.0
        for name in names:
            width = parts.get(name, 0.0) / factor
            axes.barh(y, width, 0.62, left=left, label=None if y else name, **look_of(name, PHASES, names))
            left += width
    axes.set(xlabel=f"time of a step ({unit})", ylabel="")
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.grid(axis="y", visible=False)
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=5, frameon=False, handlelength=1.8
    )
    return figure


def time_steps(steps: Sequence[int], phases: Mapping[str, Sequence[float | None]], ceiling: float) -> Any:
    """Draw the measured seconds of each step by phase, stacked; many steps are averaged in bins. Bars are cut at
    `ceiling`."""
    figure, axes = blank(height=3.5)
    factor, unit = scale_of("s", ceiling)
    names = [name for name in [*PHASES, *sorted(set(phases) - set(PHASES))] if any(phases.get(name, ()))]
    size = -(-len(steps) // BINS)
    groups = [range(i, min(i + size, len(steps))) for i in range(0, len(steps), size)]
    edges, below = [*(steps[group[0]] - 0.5 for group in groups), steps[-1] + 0.5], [0.0] * len(groups)
    for name in names:
        means = [sum(phases[name][i] or 0.0 for i in group) / len(group) for group in groups]
        top = [b + y / factor for b, y in zip(below, means)]
        band(axes, edges, below, top, label=name, **look_of(name, PHASES, names))
        below = top
    axes.set(xlabel="step (number)", ylabel=f"time ({unit})", ylim=(0, ceiling / factor), xlim=(edges[0], edges[-1]))
    format_counts(axes.xaxis)
    legend_beside(axes)
    return figure


def communication(rows: Sequence[tuple[str, int | None, int | None]]) -> Any:
    """Draw the bytes that a rank sends in a step: two bars for each (what, predicted, measured)."""
    factor, unit = scale_of("bytes", max([max(p or 0, m or 0) for _, p, m in rows], default=1))
    return paired_bars(
        [(name, p if p is None else p / factor, m if m is None else m / factor) for name, p, m in rows],
        f"sent by one rank in a step ({unit})",
    )


def paired_bars(rows: Sequence[tuple[str, float | None, float | None]], what: str) -> Any:
    """Draw bars of (name, predicted, measured) from top to bottom; a column without values is left out."""
    figure, axes = blank(height=1.4 + 0.5 * len(rows))
    kinds = [
        (index, label, look)
        for index, label, look in (
            (1, "predicted", {"facecolor": "#FFFFFF", "hatch": "////", "edgecolor": BLACK}),
            (2, "measured", {"facecolor": BLUE, "edgecolor": BLACK}),
        )
        if any(row[index] is not None for row in rows)
    ]
    for index, label, look in kinds:
        offset = 0.0 if len(kinds) == 1 else 0.2 * (2 * index - 3)
        places = [len(rows) - 1 - i - offset for i in range(len(rows))]
        axes.barh(places, [row[index] or 0.0 for row in rows], 0.38, label=label, linewidth=0.6, **look)
    axes.set(xlabel=what, ylabel="")
    axes.set_yticks(range(len(rows)), [row[0] for row in rows][::-1])
    axes.grid(axis="y", visible=False)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


def norms(steps: Sequence[int], table: Mapping[str, Sequence[float | None]], what: str) -> Any:
    """Draw the norms of each layer over the steps as a map of their logarithm; `what` is "gradient" or "parameter"."""
    from matplotlib.colors import LogNorm

    figure, axes = blank(height=1.5 + min(3.5, 0.28 * len(table)))
    values = [[float("nan") if v is None or v <= 0 else v for v in row] for row in table.values()]
    known = sorted(v for row in values for v in row if v == v) or [1.0]
    low, high = known[0], known[-1]
    edges = [*steps, steps[-1] + max(1, steps[-1] - steps[-2] if len(steps) > 1 else 1)]
    shading = {"cmap": "cividis", "norm": LogNorm(low, high if high > low else low * 10), "rasterized": True}
    mesh = axes.pcolormesh(edges, [i - 0.5 for i in range(len(values) + 1)], values, **shading)
    axes.grid(visible=False)
    axes.invert_yaxis()
    every = -(-len(table) // 16)
    axes.set_yticks(range(0, len(table), every), list(table)[::every])
    axes.set(xlabel="step (number)", ylabel="part of the model")
    format_counts(axes.xaxis)
    figure.colorbar(mesh, ax=axes, label=f"{what} norm (L2)", pad=0.02)
    return figure


def stragglers(ranks: Sequence[int], seconds: Sequence[float], spread: Sequence[tuple[float, float]], what: str) -> Any:
    """Draw the seconds of a step on each rank, with their range."""
    figure, axes = blank(height=3.2)
    factor, unit = scale_of("s", max(seconds))
    errors = [
        [(s - low) / factor for s, (low, _) in zip(seconds, spread)],
        [(high - s) / factor for s, (_, high) in zip(seconds, spread)],
    ]
    errors = [[max(0.0, e) for e in side] for side in errors]
    axes.bar(ranks, [s / factor for s in seconds], 0.6, facecolor=SKY, edgecolor=BLACK, linewidth=0.6, hatch="//")
    axes.errorbar(ranks, [s / factor for s in seconds], yerr=errors, fmt="none", ecolor=BLACK, capsize=4, linewidth=1)
    axes.set(xlabel="rank (number)", ylabel=f"{what} ({unit})", ylim=(0, None))
    if len(ranks) <= 32:
        axes.set_xticks(list(ranks))
    axes.grid(axis="x", visible=False)
    return figure
