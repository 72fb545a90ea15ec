"""Traces of earlier plans, kept in the user's cache folder: the same question is answered without tracing again.

A trace is a file of JSON under a digest of all that it depends on: the files of this package, versions, environment
variables, config, mesh, rank and target. The rates of a device come after it. An entry that cannot be read is replaced;
the oldest ones are removed where all together exceed MOST_BYTES.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fzero.comm.ledger import LedgerRow
from fzero.core.compile_cache import (
    entry_path,
    environment_variables,
    have_compiler,
    load_answer,
    package_digest,
    write_answer,
)
from fzero.core.device import Target
from fzero.core.storage import user_folder
from fzero.core.text_parsing import in_form
from fzero.kernels import tuning
from fzero.planner.operations import ExecutedOp
from fzero.planner.step_trace import RepeatedEvents, Trace, Transfer
from fzero.run.config.config_table import to_table
from fzero.run.config.run_config import RunConfig
from fzero.run.measure.live_bytes import Moment

FOLDER = "FZERO_PLAN_CACHE"  # the environment variable that names the folder; 0: none


MOST_BYTES = 200_000_000  # of all entries


PLAIN = ("state", "state_elsewhere", "tokens", "num_params", "host_peak", "exact")  # fields that JSON keeps as they are


def cache_folder() -> Path | None:
    """The folder of traces: $FZERO_PLAN_CACHE, else in the user's cache; None if FZERO_PLAN_CACHE is 0."""
    named = os.environ.get(FOLDER, "")
    if named == "0":
        return None
    return Path(named) if named else user_folder("XDG_CACHE_HOME") / "plans"


def question(config: RunConfig, sizes: Mapping[str, int], rank: int, target: Target) -> str:
    """All that a trace depends on. config: with every "auto" decided."""
    triton = importlib.util.find_spec("triton")
    facts = {
        "package": package_digest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if triton else None,
        "environment": environment_variables(),
        "compiler": have_compiler(),
        "threads": torch.get_num_threads(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "config": to_table(config),
        "sizes": {name: size for name, size in sizes.items() if size > 1},
        "rank": rank,
        "target": target._asdict(),
        "attention": [list(speed) for speed in tuning.measured(target.name)],
    }
    return json.dumps(facts, sort_keys=True)


def cached_trace(
    make: Callable[[], Trace], config: RunConfig, sizes: Mapping[str, int], rank: int, target: Target, folder: Path
) -> Trace:
    """The Trace in `folder` for this question, else that of `make()`, which is written there if it can be."""
    cached = read_entry(config, sizes, rank, target, folder)
    if cached is not None:
        return cached
    trace = make()
    try:
        asked = question(config, sizes, rank, target)
        write_answer(asked, to_plain(trace), where=folder, max_bytes=MOST_BYTES // 10)
        remove_oldest(folder)
    except OSError as error:
        warnings.warn(f"the trace of this plan is not kept ({error}); cache=None (--no-cache) keeps none", stacklevel=2)
    return trace


def is_cached(config: RunConfig, sizes: Mapping[str, int], rank: int, target: Target, folder: Path) -> bool:
    """Whether `cached_trace` would answer from `folder`."""
    return read_entry(config, sizes, rank, target, folder) is not None


def to_plain(trace: Trace) -> dict[str, Any]:
    """A trace as JSON has it, without what the question says."""
    return {
        **{name: getattr(trace, name) for name in PLAIN},
        "sizes": trace.sizes,
        "events": [[None, *event] if isinstance(event, Transfer) else event for event in trace.events],
        "timeline": trace.timeline,
        "peak": trace.timeline.index(trace.peak),
        "alive": trace.alive,
        "ledger": trace.ledger,
        "segments": trace.segments,
    }


def from_plain(table: Mapping[str, Any], config: RunConfig, rank: int, target: Target) -> Trace:
    """The Trace of `to_plain`."""
    timeline = tuple(Moment(*row) for row in table["timeline"])
    return Trace(
        events=tuple(Transfer(*row[1:]) if row[0] is None else _op(row) for row in table["events"]),
        timeline=timeline,
        peak=timeline[table["peak"]],
        alive=tuple((name, component, size) for name, component, size in table["alive"]),
        ledger=tuple(LedgerRow(*row) for row in table["ledger"]),
        sizes=dict(table["sizes"]),
        rank=rank,
        target=target,
        config=config,
        segments=tuple(RepeatedEvents(*row) for row in table["segments"]),
        **{name: table[name] for name in PLAIN},
    )


def _op(row: list[Any]) -> ExecutedOp:
    op = ExecutedOp(*row)
    return op._replace(shape=tuple(op.shape))


def read_entry(config: RunConfig, sizes: Mapping[str, int], rank: int, target: Target, folder: Path) -> Trace | None:
    """The Trace in `folder` for a question; None if it is missing, damaged or another's."""
    asked = question(config, sizes, rank, target)
    table, path = load_answer(asked, folder), entry_path(asked, folder)
    if table is None:
        return None
    try:
        with in_form(str(path)):
            trace = from_plain(table, config, rank, target)
        os.utime(path)  # it is in use: others are removed first
    except (OSError, ValueError):
        return None
    return trace


def remove_oldest(folder: Path, max_bytes: int = MOST_BYTES) -> None:
    """Remove the entries unused for the longest time until all together have at most `max_bytes` bytes."""
    entries = []
    for path in [*folder.glob("*.json"), *folder.glob("*.part")]:
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            stat = path.stat()
            entries.append((stat.st_mtime_ns, path, stat.st_size))
    total = sum(size for _, _, size in entries)
    for _, path, size in sorted(entries):
        if total <= max_bytes:
            break
        path.unlink(missing_ok=True)
        total -= size
