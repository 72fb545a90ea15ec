"""Traces of earlier plans, kept in the user's cache folder: the same question is answered without tracing again.

A trace is a file of JSON under a digest of all that it depends on: the files of this package, versions, environment
variables, config, mesh, rank and target. The rates of a device come after it. An entry that cannot be read is replaced;
the oldest ones are removed where all together exceed MOST_BYTES.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from fzero.core.compile_cache import have_compiler, package_digest
from fzero.core.device import Target
from fzero.core.files import make_folder, replacing
from fzero.core.storage import user_folder
from fzero.core.text_parsing import in_form, read_json
from fzero.kernels import tuning
from fzero.planner.operations import ExecutedOp
from fzero.planner.step_trace import RepeatedEvents, Trace, Transfer
from fzero.run.config.config_table import to_table
from fzero.run.config.run_config import RunConfig
from fzero.run.measure.live_bytes import Moment

FOLDER = "FZERO_PLAN_CACHE"  # the environment variable that names the folder; 0: none
MOST_BYTES = 200_000_000  # of all entries
READ_BY_LIBRARIES = ("FZERO_", "TORCH", "PYTORCH", "TRITON")  # environment variables on which a trace may depend
PLAIN = ("state", "state_elsewhere", "tokens", "num_params", "host_peak", "exact")  # fields that JSON keeps as they are


def cache_folder() -> Path | None:
    """The folder of traces: $FZERO_PLAN_CACHE, else in the user's cache; None if FZERO_PLAN_CACHE is 0."""
    named = os.environ.get(FOLDER, "")
    if named == "0":
        return None
    return Path(named) if named else user_folder("XDG_CACHE_HOME") / "plans"


def question(config: RunConfig, sizes: Mapping[str, int], rank: int, target: Target) -> dict[str, Any]:
    """All that a trace depends on. config: with every "auto" decided."""
    triton = importlib.util.find_spec("triton")
    environment = {
        name: value for name, value in os.environ.items() if name.startswith(READ_BY_LIBRARIES) and name != FOLDER
    }
    return {
        "package": package_digest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if triton else None,
        "environment": environment,
        "compiler": have_compiler(),
        "threads": torch.get_num_threads(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "config": to_table(config),
        "sizes": {name: size for name, size in sizes.items() if size > 1},
        "rank": rank,
        "target": target._asdict(),
        "attention": [list(speed) for speed in tuning.measured(target.name)],
    }


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def entry_name(key: Mapping[str, Any]) -> str:
    """The name of the file for a question."""
    return hashlib.sha256(_text(key).encode()).hexdigest()[:32] + ".json"


def cached_trace(
    make: Callable[[], Trace], config: RunConfig, sizes: Mapping[str, int], rank: int, target: Target, folder: Path
) -> Trace:
    """The Trace in `folder` for this question, else that of `make()`, which is written there if it can be."""
    key = question(config, sizes, rank, target)
    path = folder / entry_name(key)
    cached = read_entry(path, config, key)
    if cached is not None:
        return cached
    trace = make()
    plain = to_plain(trace)
    text = json.dumps({"question": key, "digest": _digest(plain), "trace": plain})
    if len(text) <= MOST_BYTES // 10:
        try:
            write_entry(path, text)
            remove_oldest(folder)
        except OSError as error:
            warnings.warn(
                f"the trace of this plan is not kept ({error}); cache=None (--no-cache) keeps none", stacklevel=2
            )
    return trace


def is_cached(config: RunConfig, sizes: Mapping[str, int], rank: int, target: Target, folder: Path) -> bool:
    """Whether `cached_trace` would answer from `folder`."""
    key = question(config, sizes, rank, target)
    return read_entry(folder / entry_name(key), config, key) is not None


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


def read_entry(path: Path, config: RunConfig, key: Mapping[str, Any]) -> Trace | None:
    """The Trace in a file of the cache; None if it is missing, damaged or another's."""
    try:
        table = read_json(path)
        with in_form(str(path)):
            if _text(table["question"]) != _text(key) or table["digest"] != _digest(table["trace"]):
                return None
            target = key["target"]
            trace = from_plain(
                table["trace"],
                config,
                key["rank"],
                Target(**{**target, "capability": tuple(target["capability"])}),
            )
        os.utime(path)  # it is in use: others are removed first
    except (OSError, ValueError):
        return None
    return trace


def _digest(trace: Any) -> str:
    return hashlib.sha256(json.dumps(trace).encode()).hexdigest()


def write_entry(path: Path, text: str) -> None:
    """Replace a file of the cache atomically; two processes may do so at the same time."""
    make_folder(path.parent)
    with replacing(path, cache=True) as file:
        file.write(text.encode())


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
