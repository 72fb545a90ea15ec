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

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

import fzero
from fzero import checkpoint
from fzero.core.storage import write_text
from fzero.core.tables import parse_json
from fzero.data.tokenizers import Tokenizer, byte_tokenizer, json_tokenizer
from fzero.run import config_table
from fzero.run.config import RunConfig

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
        fix = "resume it with --resume, or name another folder" if (folder / CONFIG).is_file() else "name another folder"
        raise ValueError(f"{folder}: exists and is not empty; {fix} (--out)")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: exists and is a file; name another folder (--out)")


def clear_folder(folder: Path, *, keep: bool) -> None:
    """Remove what is in `folder`, which was free before, and the folder itself unless `keep`."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if folder.is_dir() and not keep:
        folder.rmdir()


def create_run(folder: Path, value: RunConfig, tokenizer: Tokenizer | None, **environment: Any) -> None:
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
    (folder / CONFIG).write_text(config_table.to_json(value), encoding="utf-8")


def pretrain_command(processes: int) -> str:
    """The command that starts `fzero pretrain` with this number of processes."""
    return "fzero pretrain" if processes == 1 else f"torchrun --nproc-per-node {processes} -m fzero pretrain"


def read_config(folder: Path) -> RunConfig:
    """The config of the run in `folder`; raises ValueError where it is no run."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder}: {'is not a run' if folder.is_dir() else 'no such folder'}; a run folder has a {CONFIG}")
    return config_table.from_json(path.read_text(encoding="utf-8"), str(path))


def read_environment(folder: Path) -> dict[str, Any]:
    """The content of environment.json: machine, corpus and tokenizer."""
    path = folder / ENVIRONMENT
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {folder} is not a whole run folder")
    return parse_json(path.read_text(encoding="utf-8"), str(path))


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
    """Remove the rows after `step` from metrics.jsonl, so that a resumed run writes each step once."""
    rows = [row for row in read_metrics(folder) if row["step"] <= step]
    partial = folder / f"{METRICS}.partial"
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(partial, folder / METRICS)


def checkpoints_of(folder: Path, value: RunConfig) -> checkpoint.Folder:
    """Where a run's checkpoints are: a folder, or the URL of one."""
    return value.train.checkpoints or folder / CHECKPOINTS


def replace_config(folder: Path, value: RunConfig) -> None:
    """Make `value` the config of the run in `folder`, at once."""
    write_text(folder, CONFIG, config_table.to_json(value))
