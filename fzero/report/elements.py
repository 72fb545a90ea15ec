"""The parts of a section, tables and pictures and texts, and the cells that several sections have."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fzero.report.values import Quantity, digits, format_quantity, format_ratio

PAIR = ("predicted", "measured", "predicted ÷ measured")


class ReportTable(NamedTuple):
    """A table of texts; `right`: the columns of numbers."""

    name: str
    caption: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    right: frozenset[int]


class Picture(NamedTuple):
    """A picture: its caption, alternative text, and a function that draws it."""

    name: str
    caption: str
    alt: str
    draw: Callable[[], Any]  # returns a matplotlib Figure
    log: bool = False  # whether the page has it with logarithmic axes too


class Code(NamedTuple):
    """A long text, collapsed until opened unless `open`."""

    name: str
    caption: str
    text: str
    kind: str = "json"  # of the text, as Markdown names it
    open: bool = False


Element = str | ReportTable | Picture | Code  # a str is a paragraph


class Section(NamedTuple):
    """A titled list of paragraphs, tables, pictures and long texts."""

    name: str
    title: str
    parts: list[Element]


def table(
    name: str, caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1
) -> ReportTable:
    """A Table whose first `text_columns` columns are text."""
    return ReportTable(
        name, caption, tuple(head), [tuple(map(str, row)) for row in rows], frozenset(range(text_columns, len(head)))
    )


def pair(q: Quantity) -> tuple[str, str, str]:
    """The cells of a quantity: predicted and measured in the same unit, and their ratio."""
    if q.unit == "fraction":
        cells = ("-" if v is None else f"{digits(100 * v)}%" for v in (q.predicted, q.measured))
    else:
        largest = max((abs(v) for v in (q.predicted, q.measured) if v is not None), default=0)
        cells = (format_quantity(v, q.unit, largest) for v in (q.predicted, q.measured))
    predicted, measured = cells
    return predicted, measured, format_ratio(q.ratio)


def command_of(argv: Sequence[str], processes: int = 1) -> str:
    """Format a command line as typed: without the folder of the program, and with torchrun for several processes."""
    program = f"torchrun --nproc-per-node {processes} -m fzero" if processes > 1 else "fzero"
    return f"{program} {shlex.join(argv[1:])}" if argv else ""
