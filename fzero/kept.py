"""Where the state of a run is kept: the room on its disk, the newest state to go on with, and what it tells of its disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from fzero import checkpoint, pytree, runs
from fzero.capacity import check_disk
from fzero.corpus import Say
from fzero.offload import Moved, Stored
from fzero.offload.chunks import Damaged
from fzero.offload.folder import is_url
from fzero.offload.store import release
from fzero.program import Program, all_on_disk, first_state, latest, restore
from fzero.state import TrainState
from fzero.team import Team


def expect_disk(program: Program, team: Team) -> None:
    """Raise ValueError where a new run has no room on its disk."""
    place = program.space.folder if program.space is not None else None
    if place is None or is_url(place) or not program.config.train.memory_check:
        return
    there = next(path for path in (Path(place).absolute(), *Path(place).absolute().parents) if path.exists())
    held = sum(path.stat().st_blocks * 512 for path in Path(place).rglob("*") if path.is_file())  # of a run that is over, taken over
    team.share(lambda: check_disk(program, shutil.disk_usage(there).free + held))


def newest_state(program: Program, folder: Path, team: Team, say: Say, init: Path | None) -> TrainState:
    """The state to go on with: the last complete step on the disk where all of it is there, else that of the newest sound checkpoint.

    A damaged store is passed over where there is a checkpoint.
    """
    home = folder / runs.CHECKPOINTS
    saved = team.share(lambda: bool(checkpoint.steps(home)))
    if all_on_disk(program):
        failure = ""
        try:
            state = latest(program)
        except Damaged as error:
            failure = str(error)
        failures = [text for text in team.gather(failure) if text]
        if not failures:
            return state
        if not saved:
            raise ValueError(failures[0])
        say(f"passed over: {failures[0]}")
        team.share(lambda: release(program.space.folder))
    elif program.space is not None and program.space.folder is not None:
        team.share(lambda: release(program.space.folder))
    if saved:
        newest, damaged = team.share(lambda: newest_sound(home))
        for line in damaged:
            say(line)
        return restore(program, Path(newest))
    return first_state(program, runs.load(init, wide=True).params if init else None)


def newest_sound(home: Path) -> tuple[str, list[str]]:
    """(the newest sound checkpoint, a line for each that was passed over)."""
    path, damaged = checkpoint.newest_sound(home)
    return str(path), [f"passed over {bad}: {why}" for bad, why in damaged]


def told_of_offload(program: Program) -> list[str]:
    """What a run says of its disk before it begins."""
    if program.space is None:
        return []
    size = program.space.arena_bytes
    lines = [f"offload {program.config.offload}: {program.space.folder}, {size / 1e6:,.0f} MB of buffers a process"]
    if all_on_disk(program):
        kept = program.space.slots - 2
        more = f", and the last {kept} checkpoints are kept" if kept > 0 else ""
        lines.append(f"every step is complete on the disk when it ends: --resume goes on from the last one{more}")
    return lines


def disk_row(program: Program, before: Moved) -> dict[str, Any]:
    """What a step moved to and from the disk, and how long the computation waited for it."""
    if program.space is None:
        return {}
    now = program.space.moved()
    return {
        "disk_read_bytes": now.read_bytes - before.read_bytes,
        "disk_written_bytes": now.written_bytes - before.written_bytes,
        "disk_wait_s": now.waited_s - before.waited_s,
    }


def in_memory(tree: Any) -> Any:
    """The tree with what rests on a disk in memory."""
    return pytree.map(lambda leaf: leaf.tensor() if isinstance(leaf, Stored) else leaf, tree)
