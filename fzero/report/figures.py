"""The parts that all pictures share: colours, axes, and a figure as SVG.

The colours are Okabe and Ito's, distinct for colour-blind readers; neighbours also differ in hatch, line style or
marker. `draw_svg` is deterministic. A picture has its own dark colours, which a viewer that prefers dark takes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
MARKS = 60  # most marks of a line
BINS = 80  # bars in the picture of many steps
WHITE, DIM = "#FFFFFF", "#555555"
# What a viewer that prefers dark sees in place of a colour; the others are legible on both backgrounds. A blue area is,
# and has to differ from SKY.
DARK = {
    "fill": {BLACK: "#E4E7EB", WHITE: "#14171B"},
    "stroke": {BLACK: "#E4E7EB", WHITE: "#14171B", BLUE: "#45A0DB", DIM: "#A8AEB6"},
}
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


def blank(rows: int = 1, columns: int = 1, height: float = 3.7, width: float = 7.8) -> tuple[Any, Any]:
    """Return (a figure without pyplot, so without a display and with nothing to close; its axes)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    axes = figure.subplots(rows, columns)
    for axis in figure.axes:
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return figure, axes


class Drawing(NamedTuple):
    """A picture as SVG, with what a page says of the points under the pointer (see `extract_points`)."""

    svg: str
    points: list[dict[str, Any]]


def svg(draw: Callable[[], Any]) -> str:
    """Render the figure of `draw()` as SVG with selectable text; equal values give equal bytes."""
    return draw_svg(draw).svg


def draw_svg(draw: Callable[[], Any], log: bool = False) -> Drawing:
    """Render the figure of `draw()`, with logarithmic axes if `log`; the SVG and the values of its lines."""
    import matplotlib

    stream = io.StringIO()
    style: Any = STYLE  # matplotlib wants literals for the names
    with matplotlib.rc_context(style):
        figure = draw()
        if log:
            set_log(figure)
        figure.savefig(stream, format="svg")
    text = stream.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    style_rules = "text{font-family: 'DejaVu Sans', Verdana, sans-serif} " + dark_style() + " *{"
    text = text.replace("*{", style_rules, 1).replace(" font-family: 'DejaVu Sans';", "")
    text = TAG.sub(lambda match: tag(match[0]), text)
    return Drawing("".join(line.strip() + "\n" for line in text.splitlines() if line.strip()), extract_points(figure))


def dark_style() -> str:
    """The style rules of an SVG that replace its colours where dark ones are preferred."""
    ink = DARK["fill"][BLACK]
    rules = [f'text,g>path[style]:not([style*="fill"]){{fill:{ink}!important}}']  # matplotlib writes no black
    for attribute, colours in DARK.items():
        for light, dark in colours.items():
            rules.append(f'[style*="{attribute}: {light.lower()}"]{{{attribute}:{dark}!important}}')
    for light, dark in DARK["fill"].items():
        rules.append(f'pattern rect[fill="{light.lower()}"]{{fill:{dark}!important}}')
    return f"@media screen and (prefers-color-scheme: dark){{{''.join(rules)}}}"


def set_log(figure: Any) -> None:
    """Make the axes of a figure logarithmic, with plain numbers at their ticks."""
    from matplotlib.ticker import LogLocator, NullLocator

    for axes in figure.axes:
        axes.set(xscale="log", yscale="log")
        for axis, among in ((axes.xaxis, (1, 2, 5)), (axes.yaxis, (1, 1.5, 2, 3, 4, 5, 7))):
            axis.set_major_locator(LogLocator(subs=among))
            axis.set_minor_locator(NullLocator())
        format_counts(axes.xaxis)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def extract_points(figure: Any) -> list[dict[str, Any]]:
    """The lines of each axes of a drawn figure: {"box", "x", "log", "name", "xs", "lines"}."""
    records = []
    for axes in figure.axes:
        xs: list[list[float | None]] = []
        lines = []
        for line in axes.lines:
            name = str(line.get_label()).split(" (")[0]
            x, y = ([exact(value) for value in data] for data in line.get_data())
            if name.startswith("_"):  # matplotlib's for a line without a name
                continue
            if line.get_transform() is not axes.transData:
                lines.append([name, -1, y[:1]])
                continue
            if x not in xs:
                xs.append(x)
            lines.append([name, xs.index(x), y])
        if xs:
            box = axes.get_position()
            edges = [round(float(edge), 4) for edge in (box.x0, 1 - box.y1, box.x1, 1 - box.y0)]
            records.append(
                {
                    "box": edges,
                    "x": [float(limit) for limit in axes.get_xlim()],
                    "log": axes.get_xscale() == "log",
                    "name": axes.get_xlabel().split(" (")[0],
                    "xs": xs,
                    "lines": lines,
                }
            )
    return records


def exact(value: Any) -> float | None:
    """A number as JSON, to five digits; None if it is not finite."""
    value = float(value)
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.5g}")


def tag(text: str) -> str:
    """Shorten an SVG tag: without group names, zero rotations, and digits below a tenth of a point."""
    text = LONG.sub(lambda match: f"{float(match[0]):.1f}".rstrip("0").rstrip("."), text)
    text = re.sub(r' transform="rotate\(-?0 [^"]*"', "", re.sub(r'<g id="[^"]*"', "<g", text))
    return PATH.sub(lambda match: f'd="{short(match[1])}"', text)


def short(path: str) -> str:
    """Shorten an SVG path with H and V for lines along an axis: stairs take half the bytes."""
    points, out, previous = re.findall(r"([A-Za-z])([^A-Za-z]*)", path), [], ["", ""]
    for command, numbers in points:
        coordinates = numbers.split()
        if command == "L" and coordinates[1] == previous[1]:
            out.append(f"H{coordinates[0]}")
        elif command == "L" and coordinates[0] == previous[0]:
            out.append(f"V{coordinates[1]}")
        else:
            out.append(command + " ".join(coordinates))
        previous = coordinates[-2:] if len(coordinates) > 1 else ["", ""]
    return "".join(out)


def format_counts(axis: Any) -> None:
    """Format the ticks of an axis of whole numbers with commas, or in millions."""
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if abs(value) < 1e6 else f"{value / 1e6:,.4g}M")


def add_side_legend(axes: Any, **options: Any) -> None:
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
    unknown = [label for label in names if label not in table]
    colour, hatch = table[name] if name in table else REST[unknown.index(name) % len(REST)]
    edge = WHITE if colour == BLACK else "#333333"
    return {"facecolor": colour, "hatch": hatch, "edgecolor": edge, "linewidth": 0.4}


def every_mark(points: Sequence[Any]) -> int:
    """How many points of a line have one mark: the `markevery` of matplotlib."""
    return max(1, len(points) // MARKS)


def thin_out(count: int) -> tuple[int, str]:
    """Return (n, if every n-th of `count` points is drawn; a label that says so)."""
    every = -(-count // POINTS)
    return every, "each step" if every == 1 else f"every {every}th step"


def stairs(edges: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The corners (x, y) of a line with `values` between `edges`, without redundant points."""
    points = [(x, v) for a, b, v in zip(edges, edges[1:], values) for x in (a, b)]
    corners = [
        p for i, p in enumerate(points) if i in (0, len(points) - 1) or not points[i - 1][1] == p[1] == points[i + 1][1]
    ]
    return [x for x, _ in corners], [y for _, y in corners]


def band(axes: Any, edges: Sequence[float], bottom: Sequence[float], top: Sequence[float], **look: Any) -> None:
    """Fill the area between two stairs."""
    (x, y), (base_x, low) = stairs(edges, top), stairs(edges, bottom)
    axes.fill([*x, *base_x[::-1]], [*y, *low[::-1]], **look)


def smooth(values: Sequence[float]) -> list[float]:
    """Centred running means, of each value with as many before as after it; a trend has no lag.

    >>> smooth([1.0, 2.0, 3.0]), smooth([0.0] * 10 + [3.0] + [0.0] * 19)[9:12]
    ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])
    """
    half, last = min(25, len(values) // 20), len(values) - 1
    means = []
    for i in range(len(values)):
        side = min(half, i)
        first, window = i - side, values[i - side : i + side + 1]
        mean, centre = sum(window) / len(window), first + (len(window) - 1) / 2
        if i + side > last and len(window) > 1:
            spread = sum((first + j - centre) ** 2 for j in range(len(window)))
            slope = sum((first + j - centre) * v for j, v in enumerate(window)) / spread
            mean += slope * (i - centre)
        means.append(mean)
    return means
