"""The section on experts: how evenly the tokens are spread over them, by layer, over the steps of a run."""

from __future__ import annotations

from typing import Any, NamedTuple

from fzero.report.figures_experts import load_map
from fzero.report.parts import Picture, Section, table
from fzero.report.values import RunReport, digits

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
    s, found = run.series, dict[str, Spread]()
    for stack in sorted({name.split(".")[1] for name in s if name.startswith("experts.")}):
        kept = [i for i, value in enumerate(s[f"experts.{stack}.load"]) if value is not None]
        parts = [s.get(f"experts.{stack}.{name}", []) for name in ("load", "entropy", "dropped", "bias")]
        found[stack] = Spread(
            [s["step"][i] for i in kept], *([part[i] for i in kept] if part else [] for part in parts)
        )
    return found


def of_layer(load: list[float]) -> float:
    """The most of an expert's share over the mean."""
    return max(load) * len(load) / (sum(load) or 1.0)


def experts(run: RunReport) -> Section:
    """The section on the spread of tokens over experts; without parts for a run that recorded none."""
    parts: list[Any] = []
    for stack, found in spreads(run).items():
        worst = [max(map(of_layer, layers)) for layers in found.load]
        layers, count = len(found.load[-1]), len(found.load[-1][0])
        alt = (
            f"Share of the tokens' choices that each of {count} experts of {layers} layers gets, over {len(worst)} "
            f"recorded steps: the most over the mean of a layer is {digits(worst[0], 3)} at the first of them and "
            f"{digits(worst[-1], 3)} at the last."
        )
        draw = lambda found=found: load_map(found.steps, found.load)  # noqa: E731
        parts.append(Picture(f"experts_{stack}", f"Load of the experts of {stack} (measured)", alt, draw))
        head = ["layer", "most ÷ mean", "least ÷ mean", "router's entropy (nats)"]
        head += ["dropped"] if found.dropped else []
        head += ["bias, least to most"] if found.bias else []
        rows = []
        for i, load in enumerate(found.load[-1]):
            least = min(load) * count / (sum(load) or 1.0)
            row = [str(i), digits(of_layer(load), 4), digits(least, 4), digits(found.entropy[-1][i], 4)]
            row += [f"{digits(100 * sum(found.dropped[-1][i]), 3)}%"] if found.dropped else []
            bias = found.bias[-1][i] if found.bias else []
            row += [f"{digits(min(bias), 3)} to {digits(max(bias), 3)}"] if bias else []
            rows.append(row)
        caption = f"Experts of {stack} in step {found.steps[-1]:,} (measured)"
        parts.append(table(f"experts_{stack}", caption, head, rows))
    known = [v for v in run.series.get("imbalance", []) if v is not None]
    if parts and known:
        last = known[-LAST:]
        parts.append(
            f"Imbalance, the most tokens of an expert over the mean of its layer, in the worst layer of a step: "
            f"{digits(known[0], 4)} in the first step, and {digits(sum(last) / len(last), 4)} on the average of the "
            f"last {len(last)}."
        )
    return Section("experts", "Experts", parts)
