"""A run folder: what `fzero pretrain` leaves behind, and what sampling, exporting and resuming read.

config.json       the resolved config: every value, read back equal
environment.json  versions, machine, command, corpus and tokenizer
metrics.jsonl     one JSON object a line and step
checkpoints/      see fzero/checkpoint/, or elsewhere: train.checkpoints
tokenizer.json    where the tokenizer is not bytes
data/             the corpus, where the run prepared its own
nvme/             what rests on a disk, where the run names no other folder: see fzero/offload/store.py
skips.json        the batches left out, where the run has gone back to a checkpoint: see fzero/run/resume/rollback.py
loss.png  throughput.png  tensorboard/
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fzero
from fzero import checkpoint, models
from fzero.checkpoint import offload_snapshot
from fzero.core import pytree
from fzero.core.precision import POLICIES
from fzero.core.pytree import Tree
from fzero.core.storage import is_url, write_text
from fzero.data.tokenizers import Tokenizer, byte_tokenizer, json_tokenizer
from fzero.models import Model
from fzero.offload import Space
from fzero.run import config
from fzero.run.config import RunConfig
from fzero.sharding import Plan, fake_mesh, one_process, zero_plan
from fzero.sharding.memory import Offload
from fzero.sharding.plan import shapes_of

CONFIG, ENVIRONMENT, METRICS, CHECKPOINTS, TOKENIZER, DATA, NVME = (
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "checkpoints",
    "tokenizer.json",
    "data",
    "nvme",
)


def free_folder(name: str, among: Path = Path("runs")) -> Path:
    """The first of runs/NAME-1, runs/NAME-2, ... that does not exist."""
    return next(path for i in count(1) if not (path := among / f"{name}-{i}").exists())


def expect_free(folder: Path) -> None:
    """Raise ValueError where `folder` holds anything: a run never writes over one."""
    if folder.is_dir() and any(folder.iterdir()):
        fix = "go on with it by --resume, or name another folder" if (folder / CONFIG).is_file() else "name another folder"
        raise ValueError(f"{folder}: exists and is not empty; {fix} (--out)")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: exists and is a file; name another folder (--out)")


def clear(folder: Path, *, keep: bool) -> None:
    """Remove what is in `folder`, which was free before, and the folder itself unless `keep`."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if folder.is_dir() and not keep:
        folder.rmdir()


def create(folder: Path, value: RunConfig, tokenizer: Tokenizer | None, **environment: Any) -> None:
    """Write config.json, environment.json and tokenizer.json into `folder`; config.json last: with it the folder is a run."""
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer and tokenizer.json:
        (folder / TOKENIZER).write_text(tokenizer.json, encoding="utf-8")
    here = {
        "fzero": fzero.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "command": sys.argv,
        "tokenizer": tokenizer.name if tokenizer else "",
        "eos": tokenizer.eos if tokenizer else -1,
        **environment,
    }
    (folder / ENVIRONMENT).write_text(json.dumps(here, indent=2) + "\n", encoding="utf-8")
    (folder / CONFIG).write_text(config.to_json(value), encoding="utf-8")


def command(processes: int) -> str:
    """How `fzero pretrain` is started with so many processes."""
    return "fzero pretrain" if processes == 1 else f"torchrun --nproc-per-node {processes} -m fzero pretrain"


def read_config(folder: Path) -> RunConfig:
    """The config of the run in `folder`; raises ValueError where it is no run."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder}: {'is not a run' if folder.is_dir() else 'no such folder'}; a run folder has a {CONFIG}")
    return config.from_json(path.read_text(encoding="utf-8"), str(path))


def read_environment(folder: Path) -> dict[str, Any]:
    """What was recorded about the machine, the corpus and the tokenizer."""
    path = folder / ENVIRONMENT
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {folder} is not a whole run folder")
    return config.parse_json(path.read_text(encoding="utf-8"), str(path))


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the run; raises ValueError where it has none (an import without tokenizer.json)."""
    said = read_environment(folder)
    if said["tokenizer"] == "bytes":
        return byte_tokenizer()
    path = folder / TOKENIZER
    if not path.is_file():
        raise ValueError(f"{path}: no such file; this run has no tokenizer, so there is no text to read or write")
    return json_tokenizer(path.read_text(encoding="utf-8"), str(path), said["eos"])._replace(name=said["tokenizer"])


def read_metrics(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics.jsonl, in order of steps."""
    return read_lines(folder / METRICS)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file's lines, none where there is no file; a last line that a kill cut short is left out."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}:{number}: not JSON ({error})") from None
            return
        if not isinstance(found, dict):
            raise ValueError(f"{path}:{number}: is no object; it was not written by fzero")
        yield found


def cut_metrics(folder: Path, step: int) -> None:
    """Leave the rows up to `step` in metrics.jsonl, so that a resumed run writes each step once."""
    rows = [row for row in read_metrics(folder) if row["step"] <= step]
    partial = folder / f"{METRICS}.partial"
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(partial, folder / METRICS)


def checkpoints_of(folder: Path, value: RunConfig) -> checkpoint.Place:
    """Where a run's checkpoints are: a folder, or the URL of one."""
    return value.train.checkpoints or folder / CHECKPOINTS


def newest_read(folder: Path, value: RunConfig, read: Callable[[checkpoint.Opened], Any]) -> tuple[Any, int, list[str]]:
    """(what `read` returned of the newest checkpoint in which that is sound, its step, a line for each that was passed over)."""
    home, passed, reasons = checkpoints_of(folder, value), [], []
    checkpoint.latest(home)
    for step in reversed(checkpoint.steps(home)):
        path = checkpoint.folder_of(home, step)
        try:
            with contextlib.closing(checkpoint.opened(path)) as held:
                return read(held), step, passed
        except checkpoint.Damaged as error:
            passed.append(f"passed over {path}: {error}")
            reasons.append(str(error))
    raise ValueError(f"{home}: every checkpoint is damaged: {'; '.join(reasons)}")


PARAMS, MASTER, EMA = "params/", "master/", "extra/ema/"


def shelf_of(folder: Path, value: RunConfig) -> offload_snapshot.Shelf | None:
    """The store of the run in `folder`, where its newest state is on a disk and weights can be read from there."""
    if is_url(value.nvme.folder):
        return None
    shelf = offload_snapshot.find(Path(value.nvme.folder or folder / NVME)) if "nvme" in Offload.parse(value.offload).memories else None
    if shelf is None:
        return None
    names = pytree.names(shapes_of(models.build(value.model)))  # a fraction of them may be on the disk: then none of these counts
    whole = tuple(prefix for prefix in (PARAMS, MASTER, EMA) if all(prefix + name in shelf.leaves for name in names))
    parts = tuple(prefix for prefix in (PARAMS, MASTER, EMA) if prefix not in whole)
    shelf = shelf._replace(leaves={name: leaf for name, leaf in shelf.leaves.items() if not name.startswith(parts)})
    if not (shelf.holds(PARAMS) or shelf.holds(MASTER)):
        return None
    return shelf if max(checkpoint.steps(checkpoints_of(folder, value)), default=-1) <= shelf.record.step else None


def replace_config(folder: Path, value: RunConfig) -> None:
    """Make `value` the config of the run in `folder`, at once."""
    write_text(folder, CONFIG, config.to_json(value))


def plan_of(model: Model, value: RunConfig, shelf: offload_snapshot.Shelf) -> Plan:
    """The plan by which the ranks of a run hold their parts, as rank 0 has it."""
    options = {"reduce": value.reduce, "accumulate": value.accumulate, "sequence": value.sequence}
    return zero_plan(value.zero, model, fake_mesh(shelf.sizes), **options)


class Trained(NamedTuple):
    """The weights of a run."""

    config: RunConfig
    model: Model
    params: Tree
    step: int
    warnings: list[str]  # checkpoints passed over because they are damaged


def load_on_disk(folder: Path, nvme: str | None, *, ema: bool = False) -> Trained:
    """`load` whose parameters stay on a disk: in `nvme`, or in the run folder; one whole leaf is in memory at a time."""
    value = read_config(folder)
    model = models.build(value.model)
    plan, shelf = zero_plan(0, model, one_process()), shelf_of(folder, value)
    damaged: list[tuple[checkpoint.Place, str]] = []
    if shelf is not None:
        prefix = EMA if ema else PARAMS if shelf.holds(PARAMS) else MASTER
        there, step, dtype = plan_of(model, value, shelf), shelf.record.step, POLICIES[value.precision.policy]().param
        specs = pytree.named_leaves(there.params if prefix == PARAMS else there.opt)
        shapes = pytree.named_leaves(plan.like)
        read = lambda name: shelf.leaf(prefix + name, tuple(shapes[name].shape), specs[name]).to(dtype)  # noqa: E731
        held = shelf.holds(prefix)
    else:
        path, damaged = checkpoint.newest_sound(checkpoints_of(folder, value))
        there, prefix = checkpoint.opened(path), EMA if ema else PARAMS
        step = there.step
        read = lambda name: there.read(prefix + name)  # noqa: E731
        held = any(name.startswith(prefix) for name in there.leaves)
    if not held:
        raise ValueError(f"{folder}: keeps no average of the weights (train.ema_decay is 0)")
    space = Space(nvme or folder / "nvme-sample", slots=1)
    space.need(3 * offload_snapshot.part_bytes(plan, 4))
    params = offload_snapshot.put_params(read, plan, space)
    return Trained(value, model, params, step, [f"passed over {bad}: {why}" for bad, why in damaged])


def load(folder: Path, *, wide: bool = False, ema: bool = False) -> Trained:
    """The newest sound weights of the run in `folder`, checked.

    wide: the master weights where the run has them. ema: the average of the weights.
    Raises ValueError where there is no run, no sound checkpoint, or no average.
    """
    value = read_config(folder)
    model = models.build(value.model)
    shelf = shelf_of(folder, value)
    if shelf is not None:
        if ema and not shelf.holds(EMA):
            raise ValueError(f"{folder}: keeps no average of the weights (train.ema_decay is 0)")
        prefix = EMA if ema else MASTER if shelf.holds(MASTER) and (wide or not shelf.holds(PARAMS)) else PARAMS
        dtype = None if wide or prefix == PARAMS else POLICIES[value.precision.policy]().param
        return Trained(value, model, offload_snapshot.weights(shelf, plan_of(model, value, shelf), prefix, dtype), shelf.record.step, [])
    like = shapes_of(model)

    def read(held: checkpoint.Opened) -> Tree:
        if ema and not any(name.startswith(EMA) for name in held.leaves):
            raise ValueError(f"{folder}: keeps no average of the weights (train.ema_decay is 0)")
        prefix = EMA if ema else MASTER if wide and any(name.startswith(MASTER) for name in held.leaves) else PARAMS
        return checkpoint.restore(held.path, as_held(held, like, prefix), under=prefix.rstrip("/"))

    params, step, warnings = newest_read(folder, value, read)
    return Trained(value, model, params, step, warnings)


def as_held(held: checkpoint.Opened, like: Tree, prefix: str) -> Tree:
    """`like` in the dtypes of the leaves of a checkpoint below `prefix`."""
    dtypes = {name: leaf.dtype for name, leaf in held.leaves.items()}
    return pytree.map_named(lambda name, leaf: leaf.to(dtypes.get(prefix + name, leaf.dtype)), like)
