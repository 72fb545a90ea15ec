"""Where rows of metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, a CSV file."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from fzero.core import packages, pytree
from fzero.core.arguments import checked
from fzero.core.files import make_folder, replacing, writing
from fzero.core.text_parsing import open_regular, short
from fzero.run.config.config_checks import expect_loggers
from fzero.sharding import Mesh

Log = Callable[[int, Any], None]  # takes the number of a step, and its values


def numbers(values: Any) -> dict[str, float]:
    """The numbers among the values of a step, and those by source or by position, as loggers draw them.

    >>> numbers({"step": 3, "loss": 1.5, "skipped": False, "phases": {"forward": 0.1}})
    {'loss': 1.5, 'skipped': False}
    >>> numbers({"loss_by_source": {"web": 1.5}})
    {'loss_by_source/web': 1.5}
    """
    row = values if isinstance(values, Mapping) else pytree.named_leaves(values)
    row = {name: x.item() if isinstance(x, Tensor) and x.numel() == 1 else x for name, x in row.items()}
    parts = [(name, group) for name, group in row.items() if "_by_" in name and isinstance(group, Mapping)]
    inner = [(f"{name}/{key}", x) for name, group in parts for key, x in group.items()]
    return {name: x for name, x in [*row.items(), *inner] if name != "step" and isinstance(x, int | float)}


@contextlib.contextmanager
@checked("names")
def open_loggers(
    names: Sequence[str],
    folder: str | Path,
    *,
    first: int = 0,
    config: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
) -> Iterator[Log]:
    """A context of a function `log(step, values)` that gives the numbers of a step to all loggers of these names.

    names: "tensorboard", "wandb", "csv"; "auto" is TensorBoard if it is installed. folder: of the run; TensorBoard
    writes `tensorboard/`, wandb `wandb/` and csv `metrics.csv` there. first: the step before the first one that is
    logged, such as `int(state.step)` of a resumed state; later rows of an earlier attempt are dropped. config: shown by
    wandb beside the run. mesh: its first rank logs, and what the others log is dropped; None: this process logs.

    step: a whole number. values: a dict of numbers and tensors of one element, or the Metrics of a step. The function
    may also be the `log` of Options: see docs/recipes.md.
    Raises ValueError for an unknown name, and for one whose package is not installed.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with open_loggers(["csv"], folder) as log:
    ...     for step in (1, 2):
    ...         log(step, {"loss": 1.0 / step})
    >>> print((folder / "metrics.csv").read_text().strip())
    step,loss
    1,1.0
    2,0.5
    """
    expect_loggers(names)
    has_tensorboard = packages.installed("tensorboard")
    loggers = dict.fromkeys(
        logger for name in names for logger in (("tensorboard",) * has_tensorboard if name == "auto" else (name,))
    )
    if mesh is not None and mesh.rank != 0:
        loggers = {}
    with ExitStack() as stack:
        if loggers:
            make_folder(folder)
        logs = [stack.enter_context(OPENERS[name](Path(folder), first, config or {})) for name in loggers]

        def log(step: int, values: Any) -> None:
            row = numbers(values) if logs else {}
            for logger in logs:
                logger(int(step), row)

        yield log


@contextlib.contextmanager
def _tensorboard(folder: Path, first: int, config: Mapping[str, Any]) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(make_folder(folder, "tensorboard")), purge_step=first + 1) as board:

        def log(step: int, row: Mapping[str, float]) -> None:
            for name, value in row.items():
                board.add_scalar(name, value, step)

        yield log


@contextlib.contextmanager
def _wandb(folder: Path, first: int, config: Mapping[str, Any]) -> Iterator[Log]:
    import wandb  # pyright: ignore[reportMissingImports]  (it need not be installed)

    make_folder(folder, "wandb")  # where it writes

    # A resumed attempt continues the run of its folder; steps that wandb has already are passed over by it.
    run = wandb.init(dir=str(folder), name=folder.name, id=folder.name, resume="allow", config=dict(config))
    try:
        yield lambda step, row: run.log(row, step=step)
    finally:
        run.finish()


@contextlib.contextmanager
def _csv(folder: Path, first: int, config: Mapping[str, Any]) -> Iterator[Log]:
    """A row a step; the file is written anew when a row brings a new column, such as the first val_loss."""
    path = folder / "metrics.csv"
    columns = _columns(path)
    if columns:
        _rewrite(path, columns, first)

    def log(step: int, row: Mapping[str, float]) -> None:
        values = {"step": step, **row}
        if new := [name for name in values if name not in columns]:
            columns.extend(new)
            _rewrite(path, columns)
        with writing(path, "append") as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
            csv.DictWriter(text, columns, lineterminator="\n").writerow(values)

    yield log


def _columns(path: Path) -> list[str]:
    """The columns of metrics.csv; [] if there is none, or it is empty."""
    if not os.path.lexists(path):
        return []
    with _csv_of(path), _text_of(path) as file:
        columns = next(csv.reader(file), [])
    if columns and columns[0] != "step":
        raise ValueError(f"{path}: begins with {short(columns[0])} and not with a column step; move the file away")
    return columns


def _text_of(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace", newline="")


@contextlib.contextmanager
def _csv_of(path: Path) -> Iterator[None]:
    try:
        yield
    except csv.Error as error:
        raise ValueError(f"{path}: is no CSV file ({error}); move it away") from None


def _rewrite(path: Path, columns: Sequence[str], last: int | None = None) -> None:
    """Write metrics.csv anew, atomically, with these columns and its rows up to the step `last`."""
    with replacing(path) as file:
        text = io.TextIOWrapper(file, "utf-8", newline="")
        writer = csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        if os.path.lexists(path):
            with _csv_of(path), _text_of(path) as old:
                for row in csv.DictReader(old):
                    step = row["step"] or ""
                    if step.isdecimal() and None not in row.values() and (last is None or int(step) <= last):
                        writer.writerow(row)
        text.detach()  # which flushes it, and leaves the file open


OPENERS: dict[str, Callable[[Path, int, Mapping[str, Any]], contextlib.AbstractContextManager[Log]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "csv": _csv,
}
