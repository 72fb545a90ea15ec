"""A run folder: written by `fzero pretrain`, read for sampling, exporting and resuming.

config.json       the resolved config: every value, read back equal
environment.json  versions, machine, command, corpus and tokenizer; both end with a checksum of their content
metrics.jsonl     one JSON object per line and step
attempts.jsonl    a line for each start: see fzero/run/measure/flops.py
samples.jsonl     the text generated at the end: {"step", "prompt", "text"}
checkpoints/      see fzero/checkpoint/; train.checkpoints names another folder
tokenizer.json    unless the tokenizer is bytes
chat_template.jinja, tokenizer_config.json   where the model has a chat template: see fzero/data/chat.py
special_tokens_map.json, generation_config.json   of the folder that it comes from: see fzero/run/setup/vocabulary.py
data/             the corpus, if the run prepared its own
lock.json         the process that trains it now: see fzero/run/setup/run_lock.py
nvme/             offloaded leaves, unless nvme.folder names another folder: see fzero/offload/store.py
skips.json        the batches left out by rollbacks: see fzero/run/runner/rollback.py
loss.png  throughput.png  tensorboard/
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch

import fzero
from fzero import checkpoint
from fzero.core.config_tables import Table
from fzero.core.files import append_line, make_folder, open_to_write, remove_entry
from fzero.core.storage import is_url, write_text, write_texts
from fzero.core.text_parsing import (
    LARGEST,
    Unparsable,
    expect_entries,
    json_text,
    open_regular,
    parse_json,
    read_json,
    read_text_file,
)
from fzero.data.chat import Chat, write_chat
from fzero.data.tokenizers import Tokenizer, byte_tokenizer, json_tokenizer
from fzero.run.config import config_table
from fzero.run.config.config_versions import current_keys
from fzero.run.config.placement import Copy, copies, expect_corpus, expect_recorded
from fzero.run.config.run_config import RunConfig
from fzero.run.setup import run_lock

CONFIG, ENVIRONMENT, METRICS, ATTEMPTS, SAMPLES, CHECKPOINTS, TOKENIZER, DATA, NVME = (
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "attempts.jsonl",
    "samples.jsonl",
    "checkpoints",
    "tokenizer.json",
    "data",
    "nvme",
)
SEAL = "sha256"
TEXTS = (TOKENIZER, "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
# What later commands take from environment.json: of every run, and of one that trains on a corpus.
TRAINED = {"corpus": str, "corpus_sha256": str, "init": str, "num_params": int}
ENTRIES = {"tokenizer": str, "eos": int | None, "threads?": int, "processes?": int, "token_ids?": dict}
ENTRIES["files?"] = dict
ENTRIES |= {f"{name}?": kind for name, kind in TRAINED.items()}


def free_folder(name: str, among: Path = Path("runs")) -> Path:
    """The first of runs/NAME-1, runs/NAME-2, ... that does not exist, locked by this process."""
    for path in (among / f"{name}-{i}" for i in count(1)):
        if not path.exists():
            with contextlib.suppress(run_lock.Owned):  # taken by another start since
                run_lock.acquire(path)
                return path
    raise AssertionError


def expect_free(folder: Path) -> None:
    """Raise ValueError if `folder` holds anything: a run never writes over one."""
    if folder.is_dir() and any(path.name != run_lock.LOCK for path in folder.iterdir()):
        resume = "resume it with --resume, or " * os.path.lexists(folder / CONFIG)
        raise ValueError(f"{folder}: exists and is not empty; {resume}name another folder (--out)")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: exists and is a file; name another folder (--out)")


def clear_folder(folder: Path, *, preserve: bool) -> None:
    """Remove the content of `folder`, and the folder itself unless `preserve`; a lock stays until it is released."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name == run_lock.LOCK:
            preserve = True
        else:
            remove_entry(path)
    if folder.is_dir() and not preserve:
        folder.rmdir()


def create_run(
    folder: Path,
    value: RunConfig,
    tokenizer: Tokenizer | None,
    chat: Chat | None = None,
    files: Mapping[str, str] = {},
    **environment: Any,
) -> None:
    """Write config.json, environment.json, tokenizer.json, the chat template and `files`; config.json last."""
    make_folder(folder)
    write_texts(folder, files)
    if chat is not None:
        write_chat(folder, chat)
    if tokenizer and tokenizer.json:
        write_text(folder, TOKENIZER, tokenizer.json)
    entries = {
        "fzero": fzero.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "command": [word.encode(errors="backslashreplace").decode() for word in sys.argv],  # only to be shown
        "tokenizer": tokenizer.name if tokenizer else "",
        "eos": tokenizer.eos if tokenizer else -1,
        **environment,
    }
    entries["files"] = {name: _digest_of(folder / name) for name in TEXTS if os.path.lexists(folder / name)}
    _write_sealed(folder / ENVIRONMENT, entries)
    replace_config(folder, value)


def _write_sealed(path: Path, table: dict[str, Any]) -> None:
    """Write a JSON object with a checksum of its content as its last entry."""
    full_table = {**table, SEAL: _digest(table)}
    write_text(path.parent, path.name, json_text(full_table, str(path), 2) + "\n")


def expect_seal(table: dict[str, Any], path: Path) -> None:
    """Raise ValueError if the content of a file has changed since fzero wrote it with a checksum."""
    if isinstance(table, dict) and SEAL in table:
        content = {name: value for name, value in table.items() if name != SEAL}
        if table[SEAL] != _digest(content):
            raise ValueError(f"{path}: has changed since fzero wrote it, or is damaged: its checksum does not agree")


def _digest(table: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def _digest_of(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.sha256(file.read()).hexdigest()


def expect_writable(folder: Path) -> None:
    """Raise NotWritable if something else is in the way of a file or folder that the run in `folder` writes."""
    for name in (METRICS, ATTEMPTS, SAMPLES):
        with contextlib.suppress(FileNotFoundError):
            os.close(open_to_write(folder / name, "append", make=False))
    for name in (CHECKPOINTS, NVME, "tensorboard", "wandb"):
        if os.path.lexists(folder / name):
            make_folder(folder, name)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run or an import of ours, and not one of another system."""
    return os.path.lexists(folder / ENVIRONMENT)


def read_config(folder: Path) -> RunConfig:
    """The config of the run in `folder`; raises ValueError if it is no run, and as `read_config_table` does."""
    return config_table.from_table(current_keys(read_config_table(folder)))


def read_config_table(folder: Path) -> Table:
    """The table of config.json of the run in `folder`; raises ValueError if it is no run or was changed."""
    path = folder / CONFIG
    if not os.path.lexists(path):
        if copy := next(copies_of(folder, None), None):
            raise ValueError(f"{folder}: has no {CONFIG} any more; write {copy.source} into {path}")
        raise ValueError(
            f"{folder}: {'is not a run' if folder.is_dir() else 'no such folder'}; a run folder has a {CONFIG}"
        )
    try:
        table = parse_json(read_text_file(path), str(path))
        expect_seal(table, path)
        config = config_table.from_table(current_keys(table))
    except ValueError as error:
        copy = next(copies_of(folder, None), None)
        fix = f"write {copy.source} into it" if copy else "start a new run in another folder"
        prefix = "" if str(path) in str(error) else f"{path}: "
        raise ValueError(f"{prefix}{error}; put the old file back, or {fix}") from None
    if SEAL not in table and (copy := next(copies_of(folder, config), None)):
        expect_recorded(config, path, copy)
    return table


def copies_of(folder: Path, config: RunConfig | None) -> Iterator[Copy]:
    """The copies of the config of the run in `folder`."""
    checkpoint_dir = folder / CHECKPOINTS if config is None else checkpoints_of(folder, config)
    try:
        lines = list(read_lines(folder / ATTEMPTS))
    except ValueError:
        lines = []
    return copies(lines, folder / ATTEMPTS, folder / CHECKPOINTS if is_url(checkpoint_dir) else Path(checkpoint_dir))


def read_environment(folder: Path) -> dict[str, Any]:
    """The content of environment.json: machine, corpus and tokenizer."""
    path = folder / ENVIRONMENT
    if not os.path.lexists(path):
        raise ValueError(f"{path}: no such file; {folder} is not a whole run folder")
    environment = read_json(path)
    try:
        expect_seal(environment, path)
    except ValueError as error:
        raise ValueError(f"{error}; put the old file back, or remove its entry {SEAL} if folders have moved") from None
    if SEAL not in environment:
        expect_corpus(environment, path, read_attempts(folder), folder / ATTEMPTS)
    expect_entries(environment, ENTRIES, str(path))
    return environment


def expect_trained(environment: dict[str, Any], folder: Path) -> None:
    """Raise ValueError if the content of environment.json of a run that trains lacks what names its corpus."""
    expect_entries(environment, TRAINED, str(folder / ENVIRONMENT))


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of the run; raises ValueError if it has none (an import without tokenizer.json)."""
    recorded = read_environment(folder)
    for name, digest in recorded.get("files", {}).items():
        if not os.path.lexists(folder / name) or _digest_of(folder / name) != digest:
            raise ValueError(
                f"{folder / name}: is missing, has changed since the run began, or is damaged, by its checksum in "
                f"{ENVIRONMENT}; put the old file back, or remove the entries files and {SEAL} of {ENVIRONMENT}"
            )
    if recorded["tokenizer"] == "bytes":
        return byte_tokenizer()
    path = folder / TOKENIZER
    if not os.path.lexists(path):
        raise ValueError(f"{path}: no such file; this run has no tokenizer, so there is no text to read or write")
    return json_tokenizer(read_text_file(path), str(path), recorded["eos"])._replace(name=recorded["tokenizer"])


def read_metrics(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics.jsonl, in order of steps; raises ValueError naming a line that is no such row."""
    for number, row in enumerate(read_lines(folder / METRICS), 1):
        if type(row.get("step")) is not int:
            raise ValueError(
                f"{folder / METRICS}:{number}: is not a row of metrics (step, loss, ...) as fzero writes them; remove "
                "the line"
            )
        yield row


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    """The lines of attempts.jsonl, in their order."""
    lines = list(read_lines(folder / ATTEMPTS))
    return [{**line, "config": current_keys(line["config"])} if "config" in line else line for line in lines]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file's lines, none if there is no file; a last line cut short is left out."""
    if not os.path.lexists(path):
        return
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        for number, line in enumerate(iter(lambda: file.readline(LARGEST + 1), b""), 1):
            try:
                yield parse_json(line, f"{path}:{number}")
            except Unparsable:
                if file.tell() < size:
                    raise
                return


def add_sample(folder: Path, step: int, prompt: str, text: str) -> None:
    """Write a line of samples.jsonl: the text generated after `step`, which begins with its prompt."""
    line = {"step": step, "prompt": prompt, "text": text}
    append_line(folder / SAMPLES, json_text(line, str(folder / SAMPLES)))


def cut_metrics(folder: Path, step: int) -> None:
    """Remove the rows after `step` from metrics.jsonl, so that a resumed run writes each step once."""
    rows = [row for row in read_metrics(folder) if row["step"] <= step]
    write_text(folder, METRICS, "".join(json.dumps(row) + "\n" for row in rows))


def checkpoints_of(folder: Path, value: RunConfig) -> checkpoint.Folder:
    """The folder of a run's checkpoints, or its URL."""
    return value.train.checkpoints or folder / CHECKPOINTS


def replace_config(folder: Path, value: RunConfig) -> None:
    """Atomically replace the config of the run in `folder`."""
    _write_sealed(folder / CONFIG, config_table.to_table(value))
