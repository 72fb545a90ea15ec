"""Bars over time as text: a line for each row, a column for each tick."""

from __future__ import annotations

from collections.abc import Sequence

Bar = tuple[float, float, str]  # start, end, label
WIDTH = 120  # most characters of a line


def draw_bars(names: Sequence[str], rows: Sequence[Sequence[Bar]], tick: float = 1.0, width: int = WIDTH) -> str:
    """The rows of bars under a ruler of ticks; what does not fit into `width` follows below.

    A bar shows its label at its start and a line to its end. Times are rounded to ticks; a bar that ends in the tick
    that it starts in is not drawn.

    >>> print(draw_bars(["a", "b"], [[(0, 2, "x"), (3, 4, "y")], [(1, 2, "z")]]))
      0 1 2 3
    a x──   y
    b   z
    """
    placed = [[(round(start / tick), round(end / tick), label) for start, end, label in row] for row in rows]
    ticks = max((end for row in placed for _, end, _ in row), default=0)
    cell = max((len(label) for row in placed for _, _, label in row), default=1) + 1
    margin = max((len(name) for name in names), default=0) + 1
    count = -(-ticks // max(1, (width - margin) // cell)) or 1
    fit = max(1, -(-ticks // count))  # ticks of a band: all are about equally long
    lines = [_line(row, ticks, cell) for row in placed]
    step = -(-(len(str(ticks)) + 1) // cell)  # a number of the ruler at least so many ticks after the one before
    ruler = "".join(f"{'' if i % step else i:<{cell}}" for i in range(ticks))
    bands = []
    for first in range(0, max(ticks, 1), fit):
        cut = slice(first * cell, (first + fit) * cell)
        band = [("", ruler), *zip(names, lines)]
        bands.append("\n".join(f"{name:<{margin}}{line[cut]}".rstrip() for name, line in band))
    return "\n\n".join(bands)


def _line(row: Sequence[tuple[int, int, str]], ticks: int, cell: int) -> str:
    line = [" "] * (ticks * cell)
    for start, end, label in row:
        if end > start:
            bar = label if end == start + 1 else f"{label:─<{(end - start) * cell - 1}}"
            line[start * cell : end * cell] = f"{bar:<{(end - start) * cell}}"
    return "".join(line)
