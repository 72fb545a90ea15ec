"""Plans of a run that differ in one thing, beside each other: a table whose rows are plans, and a line that says what follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fzero.planner.devices import Device
from fzero.planner.format import duration, percent, quantity, size, table
from fzero.planner.plan import PlanReport, config_for, plan
from fzero.run.config import RunConfig

COLUMNS = ["peak", "of capacity", "at rest", "sent a step", "step", "tokens/s", "MFU"]
TRIES = 8  # plans on the way to a largest value


class Answer(NamedTuple):
    """The answer to a question."""

    question: str
    says: str  # one line
    header: list[str]
    rows: list[list[str]]
    values: list[dict[str, Any]]  # the rows' numbers
    text: tuple[int, ...] = (0, -1)  # columns that are words

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps({"question": self.question, "answer": self.says, "rows": self.values}, indent=1)

    def __str__(self) -> str:
        return "\n".join([self.question, "", *table(self.header, self.rows, text=self.text), "", self.says])


class Asked(NamedTuple):
    """What a question is about."""

    config: RunConfig
    sizes: dict[str, int]
    device: Device
    options: dict[str, Any]  # tokens, price, ranks_on_node, rank
    gpus: int | None = None

    @property
    def ranks(self) -> int:
        """Of the mesh, or as asked."""
        found = 1
        for n in self.sizes.values():
            found *= n
        return self.gpus or found

    @property
    def data(self) -> int:
        """The data ranks of the mesh."""
        return self.sizes.get("dp", 1) * self.sizes.get("rp", 1)

    def plan(
        self, settings: Mapping[str, Any] | None = None, mesh: Mapping[str, int] | None = None, device: Device | None = None
    ) -> PlanReport:
        """The plan with some values of the config, the mesh or the device changed."""
        config = config_for(self.config, settings) if settings else self.config
        return plan(config, self.sizes if mesh is None else mesh, gpu=device or self.device, **self.options)


class Variant(NamedTuple):
    """A plan under a name, or why there is none."""

    name: str
    report: PlanReport | None
    why: str = ""


def vary(asked: Asked, choices: Iterable[tuple[str, Mapping[str, Any], Mapping[str, int] | None]]) -> list[Variant]:
    """A Variant for each (name, settings, mesh)."""
    out = []
    for name, settings, mesh in choices:
        try:
            out.append(Variant(name, asked.plan(settings, mesh)))
        except ValueError as error:
            out.append(Variant(name, None, str(error)))
    return out


def beside(question: str, says: str, kind: str, variants: Sequence[Variant]) -> Answer:
    """The Answer whose rows are these plans."""
    rows = [[v.name, *(cells(v.report) if v.report else ["-"] * len(COLUMNS)), reason(v)] for v in variants]
    values = [{kind: v.name, **(numbers(v.report) if v.report else {}), "reason": reason(v)} for v in variants]
    return Answer(question, says, [kind, *COLUMNS, ""], rows, values)


def cells(r: PlanReport) -> list[str]:
    """The columns of a plan."""
    use = percent(r.mfu) if r.mfu is not None else "-"
    step = [duration(r.step_s), quantity(r.tokens_per_s), use] if r.step_s is not None else ["-", "-", "-"]
    sent = size(sum(r.comm_bytes_per_axis.values()))
    return [size(r.peak_bytes_per_rank), percent(r.peak_bytes_per_rank / r.capacity_bytes), size(r.state_bytes_per_rank), sent, *step]


def numbers(r: PlanReport) -> dict[str, Any]:
    """The numbers of a row."""
    names = (
        "fits",
        "peak_bytes_per_rank",
        "capacity_bytes",
        "state_bytes_per_rank",
        "comm_bytes_per_axis",
        "step_s",
        "tokens_per_s",
        "mfu",
    )
    return {name: getattr(r, name) for name in (*names, "binds", "num_params", "mesh")}


def reason(v: Variant) -> str:
    """Whether a variant fits, or why there is none."""
    if v.report is None:
        return v.why.split(";")[0][:90]
    return "" if v.report.fits else f"does not fit: {v.report.too_much()}"


def fastest(variants: Sequence[Variant]) -> str:
    """The line that names the fastest plan that fits."""
    fit = [v for v in variants if v.report and v.report.fits]
    if not fit:
        return "none of them fits"
    timed = [v for v in fit if v.report.step_s is not None]
    if timed:
        best = max(timed, key=lambda v: v.report.tokens_per_s)
        return f"{best.name} is the fastest that fits: {quantity(best.report.tokens_per_s)} tokens/s, {best.report.binds} binds"
    best = min(fit, key=lambda v: v.report.peak_bytes_per_rank)
    return f"{best.name} needs the least: {size(best.report.peak_bytes_per_rank)}"


def largest(plan_of: Callable[[int], PlanReport], low: int, high: int) -> tuple[int, list[Variant]]:
    """(the largest number in [low, high] whose plan fits, 0 for none; the plans made on the way).

    The peak is taken to be affine between two plans, which brings the bounds together in a few of them; after TRIES the bound is as good.
    """
    tried: dict[int, PlanReport] = {}

    def fits(n: int) -> bool:
        if n not in tried:
            tried[n] = plan_of(n)
        return tried[n].fits

    below, above, guess = 0, high + 1, low
    while len(tried) < TRIES and above - below > 1:
        guess = max(low, min(guess, above - 1))
        if fits(guess):
            below = guess
        else:
            above = guess
            if guess == low:
                break
        known = sorted(tried)[-2:] if len(tried) > 1 else []
        if len(known) == 2:
            (a, b), capacity = known, tried[guess].capacity_bytes
            slope = (tried[b].peak_bytes_per_rank - tried[a].peak_bytes_per_rank) / (b - a)
            guess = a + int((capacity - tried[a].peak_bytes_per_rank) / slope) if slope > 0 else above - 1
            if guess <= below:
                guess = below + 1
        else:
            guess = 2 * low
    return below, [Variant(f"{n:,}", tried[n]) for n in sorted(tried)]
