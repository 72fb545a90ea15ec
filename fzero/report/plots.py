"""Pictures of a run, as PNG: loss and throughput over the tokens seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fzero.core.files import replacing
from fzero.core.text_parsing import in_form
from fzero.run import run_folder
from fzero.run.objectives import unit_of

# Okabe and Ito's colours: distinct for colour-blind readers and in grey.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#9A9A9A"
Rows = Sequence[dict[str, Any]]


def write_pictures(folder: Path) -> list[Path]:
    """Write loss.png and throughput.png into a run folder and return their paths; [] for a run without a step."""
    rows = list(run_folder.read_metrics(folder))
    if not rows:
        return []
    config, environment = run_folder.read_config(folder), run_folder.read_environment(folder)
    title = f"{config.preset or 'model'}, {environment['num_params']:,} parameters, {config.precision.policy}"
    paths = [folder / "loss.png", folder / "throughput.png"]
    with in_form(str(folder / run_folder.METRICS), "; remove the rows that lack it"):
        loss(rows, paths[0], title, unit_of(config.objective))
        throughput(rows, paths[1], title)
    return paths


def loss(rows: Rows, path: str | Path, title: str = "", unit: str = "token") -> None:
    """Write a picture of training and validation loss, from the rows of metrics.jsonl, to `path`; in nats per unit."""
    train_rows = [row for row in rows if row["loss"] is not None]
    figure, axes = _figure(title)
    tokens, values = [row["tokens"] for row in train_rows], [row["loss"] for row in train_rows]
    axes.plot(tokens, values, color=GREY, linewidth=0.7, label="training, each step")
    axes.plot(tokens, smooth(values), color=BLUE, linewidth=1.8, label="training, centred running mean")
    val_rows = [row for row in rows if row.get("val_loss") is not None]
    if val_rows:
        last = f"validation (last: {val_rows[-1]['val_loss']:.3f})"
        axes.plot(
            [row["tokens"] for row in val_rows],
            [row["val_loss"] for row in val_rows],
            "o--",
            color=ORANGE,
            markersize=4,
            label=last,
        )
    axes.set_ylabel(f"loss (nats per {unit})")
    axes.legend(frameon=False)
    with replacing(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:] or "png")


def throughput(rows: Rows, path: str | Path, title: str = "") -> None:
    """Write a picture of tokens per second and model FLOPs utilisation, from the rows of metrics.jsonl, to `path`."""
    figure, axes = _figure(title)
    tokens, rate = [row["tokens"] for row in rows], [row["tokens_per_s"] for row in rows]
    axes.plot(tokens, rate, color=GREY, linewidth=0.7, label="each step")
    axes.plot(tokens, smooth(rate), color=BLUE, linewidth=1.8, label="centred running mean")
    axes.set_ylabel("throughput (tokens/s)")
    axes.set_ylim(bottom=0)
    # MFU is proportional to the throughput, so one curve serves two scales.
    percent = 100 * rows[-1]["mfu"] / rows[-1]["tokens_per_s"]
    mfu_axis = axes.secondary_yaxis("right", functions=(lambda y: y * percent, lambda y: y / percent))
    mfu_axis.set_ylabel("model FLOPs utilisation (%)")
    axes.legend(frameon=False, loc="lower right")
    with replacing(path) as file:
        figure.savefig(file, format=Path(path).suffix[1:] or "png")


def smooth(values: Sequence[float]) -> list[float]:
    """Centred running means: of each value with as many before as after it, a tenth of all at most, and 51.

    A trend has no lag in it: the mean of a straight line is the line, to its ends. At the beginning, where a loss falls
    fast, the windows are short; at the end, where noise would decide, the line through the last window goes on.

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


def _figure(title: str) -> tuple[Any, Any]:
    # A Figure without pyplot needs no display, has no global state, and need not be closed.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("tokens seen")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:,.4g}M")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes
