"""The picture of a pipeline's schedule over time: a row of bars for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fzero.report.figures import BLUE, GREEN, ORANGE, SKY, WHITE, blank, look_of
from fzero.report.values import scale_of
from fzero.sharding.pipeline import Schedule
from fzero.sharding.pipeline.table import KINDS

ACTS = {"F": (BLUE, ""), "B": (SKY, "//"), "I": (ORANGE, "\\\\"), "W": (GREEN, "---")}  # (colour, hatch)
PALEST = 0.45  # opacity of a rank's last chunk
LABELLED = 0.014  # least part of the step that an act with its label takes
LABEL = {
    "ha": "center",
    "va": "center",
    "fontsize": 7,
    "bbox": {"boxstyle": "round,pad=0.12", "facecolor": WHITE, "edgecolor": "none"},
}


def schedule_bars(s: Schedule, start: Sequence[Sequence[float]], end: Sequence[Sequence[float]]) -> Any:
    """Draw the acts of each rank from start to end, rank 0 at the top: those of `pipeline.play`, or measured ones.

    start, end: by rank, the seconds of the acts of its row. Acts that are long enough show their micro-batch; the later
    chunks of a rank are paler; G and D are left out.
    """
    figure, axes = blank(height=1.1 + 0.4 * len(s.rows))
    step = max(t for row in end for t in row)
    factor, unit = scale_of("s", step)
    names = [kind for kind in ACTS if any(act.kind == kind for row in s.rows for act in row)]
    named = set[str]()
    for rank, row in enumerate(s.rows):
        chunks = s.stages.chunks(rank)
        for kind, stage in ((kind, stage) for kind in names for stage in chunks):
            times = [(a, b) for act, a, b in zip(row, start[rank], end[rank]) if (act.kind, act.stage) == (kind, stage)]
            spans = [(a / factor, (b - a) / factor) for a, b in times]
            label, opacity = KINDS[kind] if kind not in named else None, 1.0
            if len(chunks) > 1:
                opacity -= (1 - PALEST) * chunks.index(stage) / (len(chunks) - 1)
            axes.broken_barh(spans, (rank - 0.4, 0.8), label=label, alpha=opacity, **look_of(kind, ACTS, names))
            named.add(kind)
        for act, a, b in zip(row, start[rank], end[rank]):
            if act.kind in ACTS and b - a >= LABELLED * step:
                axes.text((a + b) / 2 / factor, rank, str(act.part), **LABEL)
    axes.set(xlabel=f"time in the step ({unit})", ylabel="rank of pp", xlim=(0, step / factor))
    axes.set(yticks=range(len(s.rows)), ylim=(len(s.rows) - 0.5, -0.5))
    axes.grid(axis="y", visible=False)
    figure.legend(loc="outside upper center", ncols=len(names), frameon=False, handlelength=1.8)
    return figure
