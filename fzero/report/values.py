"""The values of a report: runs with each predicted number beside the measured one, and the elements of its page."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fzero.run.config.objectives import unit_of

FORMAT = 1  # version of report.json
Number = int | float


class Quantity(NamedTuple):
    """One quantity of a run, predicted and measured; None: unknown."""

    name: str  # such as "peak_bytes"
    title: str  # such as "peak memory of a rank"
    unit: str  # such as "bytes", "s", "tokens/s", "FLOP", "1"
    predicted: Number | None
    measured: Number | None
    predicted_from: str  # the file and its key, such as "plan.json: peak_bytes_per_rank"
    measured_from: str

    @property
    def ratio(self) -> float | None:
        """Predicted over measured, see `ratio`."""
        return ratio(self.predicted, self.measured)


class RunReport(NamedTuple):
    """A run: the content of its files, and the quantities derived from it."""

    name: str  # the name of its folder
    config: dict[str, Any]
    environment: dict[str, Any]
    attempts: list[dict[str, Any]]
    series: dict[str, list[Any]]  # metrics.jsonl by columns: the value at each step, or None
    plan: dict[str, Any] | None  # predicted: plan.json, or computed for the report
    plan_from: str  # "plan.json", "computed by ...", or why there is none
    memory: dict[str, Any] | None  # measured: memory.json
    ledger: list[dict[str, Any]] | None  # measured: the rows of ledger.json
    quantities: list[Quantity]
    missing: list[str]  # a sentence for each thing that the run did not record
    samples: Sequence[Mapping[str, Any]] = ()  # samples.jsonl: {"step", "prompt", "text"}
    rollbacks: Sequence[Mapping[str, Any]] = ()  # of skips.json: {"step", "to", "why", ...}
    pipeline: dict[str, Any] | None = None  # measured: pipeline.json, the acts of one step

    def column(self, name: str) -> list[Any]:
        """The value of a column of metrics.jsonl at each step, None where it was not recorded."""
        return self.series.get(name) or [None] * len(self.series["step"])


class Report(NamedTuple):
    """One run or several, and their comparison."""

    title: str
    by: dict[str, Any]  # who wrote it: fzero's version and commit
    command: str  # the command that writes it again
    runs: list[RunReport]
    compared: dict[str, Any] | None  # see compare.py; None for one run


def ratio(predicted: Number | None, measured: Number | None) -> float | None:
    """`predicted / measured`; 1 if both are 0, None if it cannot be.

    >>> ratio(3, 2), ratio(0, 0), ratio(1, 0), ratio(None, 2)
    (1.5, 1.0, None, None)
    """
    if predicted is None or measured is None:
        return None
    if measured == 0:
        return 1.0 if predicted == 0 else None
    return predicted / measured


def loss_unit(runs: Sequence[RunReport]) -> str:
    """The unit that the loss of runs is a mean over, such as "token"."""
    return " or ".join(sorted({unit_of(run.config.get("objective")) for run in runs}))


def perplexity(loss: float) -> float:
    """exp of a loss in nats per token; infinite for one above 700.

    >>> perplexity(0.0), perplexity(1e6)
    (1.0, inf)
    """
    return math.exp(loss) if loss <= 700 else math.inf


def to_json(report: Report) -> dict[str, Any]:
    """Convert a report to a JSON value, from which `from_json` makes the report again."""
    runs = []
    for run in report.runs:
        quantities = [{**q._asdict(), "ratio": q.ratio} for q in run.quantities]
        records = {
            name: record and {**record, "timeline": in_columns(record.get("timeline") or [])}
            for name, record in records_of(run)
        }
        runs.append({**run._asdict(), "quantities": quantities, **records})
    return {"fzero_report": FORMAT, **report._asdict(), "runs": runs}


def records_of(run: RunReport) -> tuple[tuple[str, dict[str, Any] | None], ...]:
    """The parts of a run that have a timeline."""
    return (("memory", run.memory), ("plan", run.plan))


def in_columns(moments: list[dict[str, Any]]) -> dict[str, Any]:
    """Moments as columns, those of "parts" by component; None: the moment has no such value."""
    names = dict.fromkeys(name for m in moments for name in m if name != "parts")
    parts = dict.fromkeys(name for m in moments for name in m["parts"])
    columns = {name: [m.get(name) for m in moments] for name in names}
    return {**columns, "parts": {name: [m["parts"].get(name) for m in moments] for name in parts}}


def in_rows(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """The inverse of `in_columns`."""
    names = [name for name in columns if name != "parts"]
    moments = [dict(zip(names, values)) for values in zip(*(columns[name] for name in names))]
    for i, moment in enumerate(moments):
        moment["parts"] = {name: values[i] for name, values in columns["parts"].items() if values[i] is not None}
    return moments


def from_json(value: Any, source: str) -> Report:
    """The inverse of `to_json`. Raises ValueError naming `source` if the value is not a report."""
    if not isinstance(value, dict) or value.get("fzero_report") != FORMAT:
        version = value.get("fzero_report") if isinstance(value, dict) else None
        problem = f"has fzero_report = {version!r}" if version is not None else "is no report"
        raise ValueError(
            f"{source}: {problem}; a report.json of this version has fzero_report = {FORMAT}: write it again by "
            "fzero report RUN"
        )
    try:
        runs = []
        for run in value["runs"]:
            quantities = [Quantity(**{name: q[name] for name in Quantity._fields}) for q in run["quantities"]]
            run = RunReport(**{**run, "quantities": quantities})
            records = {
                name: record and {**record, "timeline": in_rows(record["timeline"])} for name, record in records_of(run)
            }
            runs.append(run._replace(**records))
        return Report(value["title"], value["by"], value["command"], runs, value["compared"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{source}: is not a whole report ({error!r}); write it again by fzero report RUN") from None


# -- formatting of numbers

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# {unit: [(the least number, what it is divided by, the unit it then has)]}
SCALES: dict[str, list[tuple[float, float, str]]] = {
    "s": [(120.0, 60.0, "min"), (1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (0.0, 1e-6, "µs")],
    **{
        unit: [(factor, factor, prefix + short) for factor, prefix in PREFIXES]
        for unit, short in {"bytes": "B", "FLOP": "FLOP", "FLOP/s": "FLOP/s"}.items()
    },
}


def scale_of(unit: str, largest: float) -> tuple[float, str]:
    """Return (factor, unit with its prefix) to format numbers up to `largest` of `unit`.

    >>> scale_of("bytes", 2_500_000), scale_of("s", 0.02)
    ((1000000.0, 'MB'), (0.001, 'ms'))
    """
    scales = SCALES.get(unit, []) if largest else []
    plain = {"bytes": "B", "1": ""}.get(unit, unit)
    return next(((factor, name) for least, factor, name in scales if largest >= least), (1.0, plain))


def digits(value: float | None, significant: int = 4) -> str:
    """Format a number with `significant` digits and commas, without an exponent unless it is tiny; "-" for None.

    >>> digits(1234567.8), digits(0.012345), digits(3), digits(2.0), digits(None)
    ('1,234,568', '0.01235', '3', '2.000', '-')
    """
    if value is None:
        return "-"
    if isinstance(value, int) or (abs(value) >= 10 ** (significant - 1) and math.isfinite(value)):
        return f"{value:,.0f}"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return f"{value:.{significant - 1}e}"
    return f"{value:,.{max(0, significant - 1 - math.floor(math.log10(abs(value))))}f}"


def format_quantity(value: Number | None, unit: str, largest: float | None = None) -> str:
    """A quantity with its unit, a fraction in percent; "-" for None; `largest`: sets the prefix."""
    if value is None:
        return "-"
    if unit == "fraction":
        return f"{digits(100 * value)}%"
    factor, name = scale_of(unit, abs(value) if largest is None else largest)
    return f"{digits(value if factor == 1.0 else value / factor)} {name}".strip()


def format_ratio(value: float | None) -> str:
    """Format a ratio; "1 exactly" for 1, "-" for None."""
    return "1 exactly" if value == 1.0 else digits(value)


# -- the elements of a page

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
    largest = max((abs(v) for v in (q.predicted, q.measured) if v is not None), default=0)
    predicted, measured = (format_quantity(v, q.unit, largest) for v in (q.predicted, q.measured))
    return predicted, measured, format_ratio(q.ratio)


def command_of(argv: Sequence[str], processes: int = 1) -> str:
    """Format a command line as typed: without the folder of the program, and with torchrun for several processes."""
    program = f"torchrun --nproc-per-node {processes} -m fzero" if processes > 1 else "fzero"
    return f"{program} {shlex.join(argv[1:])}" if argv else ""
