"""The section on experts: how evenly the tokens are spread over them, by layer, over the steps of a run.

The picture of the tokens that each expert gets, over the steps of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fzero.report.elements import Picture, Section, table
from fzero.report.figures import blank, format_counts
from fzero.report.values import RunReport, digits

MOST_ROWS = 256  # of a picture: layers of more experts are shown by as many as fit


def load_map(steps: Sequence[int], load: Sequence[Sequence[Sequence[float]]]) -> Any:
    """Draw the share of each expert over its layer's mean as a map: a row for an expert, the layers below each other.

    load: [steps][layers][experts].
    """
    layers, experts = len(load[0]), len(load[0][0])
    visible = range(0, layers, max(1, -(-layers * experts // MOST_ROWS)))
    rows = [
        [step_load[i][e] * experts / (sum(step_load[i]) or 1.0) for step_load in load]
        for i in visible
        for e in range(experts)
    ]
    figure, axes = blank(height=1.5 + min(4.0, 0.16 * len(rows)))
    edges = [*steps, steps[-1] + max(1, steps[-1] - steps[-2] if len(steps) > 1 else 1)]
    max_share = max(2.0, *(value for row in rows for value in row))
    look: dict[str, Any] = {"cmap": "cividis", "vmin": 0.0, "vmax": max_share, "rasterized": True}
    mesh = axes.pcolormesh(edges, [i - 0.5 for i in range(len(rows) + 1)], rows, **look)
    axes.grid(visible=False)
    axes.invert_yaxis()
    every = -(-len(visible) // 16)
    axes.set_yticks(range(0, len(rows), experts * every), [f"layer {i}" for i in visible][::every])
    axes.set(xlabel="step (number)", ylabel="experts of each layer")
    format_counts(axes.xaxis)
    figure.colorbar(mesh, ax=axes, label="tokens over the layer's mean", pad=0.02)
    return figure


LAST = 20  # steps whose imbalance is averaged at the end of a run


class Spread(NamedTuple):
    """The records of a stack with experts, by step."""

    steps: list[int]
    load: list[list[list[float]]]  # [steps][layers][experts], shares of the layer's choices
    entropy: list[list[float]]  # [steps][layers]
    dropped: list[list[list[float]]]  # [] where an expert takes all tokens
    bias: list[list[list[float]]]  # [] without


def spreads(run: RunReport) -> dict[str, Spread]:
    """{stack: its records} of a run; {} where no step has recorded any."""
    s, records = run.series, dict[str, Spread]()
    for stack in sorted({name.split(".")[1] for name in s if name.startswith("experts.")}):
        indices = [i for i, value in enumerate(s[f"experts.{stack}.load"]) if value is not None]
        parts = [s.get(f"experts.{stack}.{name}", []) for name in ("load", "entropy", "dropped", "bias")]
        records[stack] = Spread(
            [s["step"][i] for i in indices], *([column[i] for i in indices] if column else [] for column in parts)
        )
    return records


def of_layer(load: list[float]) -> float:
    """The most of an expert's share over the mean."""
    return max(load) * len(load) / (sum(load) or 1.0)


def experts(run: RunReport) -> Section:
    """The section on the spread of tokens over experts; without parts for a run that recorded none."""
    parts: list[Any] = []
    for stack, spread in spreads(run).items():
        worst = [max(map(of_layer, layers)) for layers in spread.load]
        layers, count = len(spread.load[-1]), len(spread.load[-1][0])
        alt = (
            f"Share of the tokens' choices that each of {count} experts of {layers} layers gets, over {len(worst)} "
            f"recorded steps: the most over the mean of a layer is {digits(worst[0], 3)} at the first of them and "
            f"{digits(worst[-1], 3)} at the last."
        )
        draw = lambda spread=spread: load_map(spread.steps, spread.load)  # noqa: E731
        parts.append(Picture(f"experts_{stack}", f"Load of the experts of {stack} (measured)", alt, draw))
        head = ["layer", "most ÷ mean", "least ÷ mean", "router's entropy (nats)"]
        head += ["dropped"] if spread.dropped else []
        head += ["bias, least to most"] if spread.bias else []
        rows = []
        for i, load in enumerate(spread.load[-1]):
            min_share = min(load) * count / (sum(load) or 1.0)
            row = [str(i), digits(of_layer(load), 4), digits(min_share, 4), digits(spread.entropy[-1][i], 4)]
            row += [f"{digits(100 * sum(spread.dropped[-1][i]), 3)}%"] if spread.dropped else []
            bias = spread.bias[-1][i] if spread.bias else []
            row += [f"{digits(min(bias), 3)} to {digits(max(bias), 3)}"] if bias else []
            rows.append(row)
        caption = f"Experts of {stack} in step {spread.steps[-1]:,} (measured)"
        parts.append(table(f"experts_{stack}", caption, head, rows))
    imbalances = [v for v in run.series.get("imbalance", []) if v is not None]
    if parts and imbalances:
        last = imbalances[-LAST:]
        parts.append(
            f"Imbalance, the most tokens of an expert over the mean of its layer, in the worst layer of a step: "
            f"{digits(imbalances[0], 4)} in the first step, and {digits(sum(last) / len(last), 4)} on the average of "
            f"the last {len(last)}."
        )
    return Section("experts", "Experts", parts)
