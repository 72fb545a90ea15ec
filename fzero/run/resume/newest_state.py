"""Where the state of a run is kept: the room on its disk, the newest state to go on with, and what it tells of its disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fzero import checkpoint
from fzero.checkpoint.directory import newest_sound
from fzero.checkpoint.offload_snapshot import StoreSnapshot
from fzero.core import pytree
from fzero.core.storage import Damaged, is_url
from fzero.offload import DiskTensor, DiskTraffic
from fzero.offload.store import release_store
from fzero.offload.store_manifest import read_description
from fzero.run import run_folder, weights
from fzero.run.build import Job, all_on_disk, first_state, latest, like_of, restore, save_store, specs_of
from fzero.run.config import RunConfig
from fzero.run.corpus import Say
from fzero.run.memory_check import check_disk
from fzero.run.ranks.coordinator import Coordinator
from fzero.train.state import TrainState
from fzero.train.state_on_disk import kept_leaves, on_disk, owner_table


def expect_disk(program: Job, team: Coordinator) -> None:
    """Raise ValueError where a new run has no room on its disk."""
    place = program.space.folder if program.space is not None else None
    if place is None or is_url(place) or not program.config.train.memory_check:
        return
    there = next(path for path in (Path(place).absolute(), *Path(place).absolute().parents) if path.exists())
    held = sum(path.stat().st_blocks * 512 for path in Path(place).rglob("*") if path.is_file())  # of a run that is over, taken over
    team.share(lambda: check_disk(program, shutil.disk_usage(there).free + held))


def expect_new(program: Job, folder: Path, team: Coordinator) -> None:
    """Raise ValueError where the place that a new run names for its checkpoints has some, OSError where its store cannot be reached."""
    if program.config.train.checkpoints and not all_on_disk(program):
        home = run_folder.checkpoints_of(folder, program.config)
        if found := team.share(lambda: checkpoint.steps(home)):
            raise ValueError(f"train.checkpoints is {home}, which has the step {found[-1]} of a run already; name another place")


def newest_state(program: Job, folder: Path, team: Coordinator, say: Say, init: Path | None) -> TrainState:
    """The state to go on with, of whatever mesh, stage, offload and policy: of the last complete step on the run's disk, else of the
    newest sound checkpoint, else the first.

    A damaged store or checkpoint is passed over where there is another checkpoint. The store of another plan becomes a checkpoint first.
    """
    home = run_folder.checkpoints_of(folder, program.config)
    saved = team.share(lambda: checkpoint.steps(home))
    before = run_folder.read_config(folder)
    moved = [before.offload, before.nvme.folder] != [program.config.offload, program.config.nvme.folder]
    if all_on_disk(program) and not moved and is_own_store(program):
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
        team.share(lambda: release_store(program.space.folder))
    else:
        saved = moved_out(program, folder, before, saved, team, say)
    if not saved:
        return first_state(program, weights.load(init, wide=True).params if init else None)
    return restored(program, home, saved, team, say)


def is_own_store(program: Job) -> bool:
    """Whether the store in the run's folder was made by the same plan; also where there is none, or it says nothing sensible."""
    try:
        said = read_description(program.space.folder)
    except Damaged:
        return True
    if said is None or said["ranks"] != program.mesh.size or said["owner"] != owner_table(program.plan):
        return said is None
    leaves = kept_leaves(like_of(program), specs_of(program), program.plan)
    ours = {name: [list(kept.shape), str(kept.dtype).removeprefix("torch.")] for name, kept in leaves.items()}
    return ours == {name: [leaf["shape"], leaf["dtype"]] for name, leaf in said["leaves"].items()}


def moved_out(program: Job, folder: Path, before: RunConfig, saved: list[int], team: Coordinator, say: Say) -> list[int]:
    """The steps of the checkpoints, among them one of the store that the run had under another plan, whose folder is free then."""
    shelf, home = weights.snapshot_of(folder, before), run_folder.checkpoints_of(folder, program.config)
    failure, place = "", None
    if shelf is not None and not shelf.record.done and not is_part(program, shelf):
        try:
            place = save_store(program, before, shelf, home, saved[-1] if saved else -1)
        except (Damaged, checkpoint.SaveFailed) as error:
            failure = str(error)
    failures = [text for text in team.gather(failure) if text]
    if failures and not saved:
        raise ValueError(failures[0])
    if failures:
        say(f"passed over: {failures[0]}")
    elif place is not None:
        say(f"step {shelf.record.step} on the disk was another plan's: it is {place} now")
    for where in {str(shelf.folder)} if shelf is not None else {str(program.space.folder)} if program.space is not None else ():
        team.share(lambda where=where: release_store(where))
    return team.share(lambda: checkpoint.steps(home))


def is_part(program: Job, shelf: StoreSnapshot) -> bool:
    """Whether a store is of a run whose state was in memory for the rest, so that it is of no use without a checkpoint."""
    names = [name for name in pytree.names(like_of(program)) if name.startswith("opt_state/")]
    return any(name not in shelf.leaves and name not in shelf.record.values for name in names)


def restored(program: Job, home: checkpoint.Folder, saved: list[int], team: Coordinator, say: Say) -> TrainState:
    """The state of the newest of the checkpoints of these steps that is sound; lines tell of those that are passed over."""
    if on_disk(program.plan):  # all ranks make a store together: what it is made of is looked at first

        def look() -> tuple[str, list[str]]:
            found = newest_sound(home, checkpoint.expect_sound)
            return str(found.path), found.lines()

        path, lines = team.share(look)
        for line in lines:
            say(line)
        return restore(program, path)
    found = newest_sound(home, lambda path: restore_on_all(program, path, team), saved)
    for line in found.lines():
        say(line)
    return found.value


def restore_on_all(
    program: Job, path: checkpoint.Folder, team: Coordinator, check: Callable[[TrainState], str] = lambda state: ""
) -> TrainState:
    """This rank's state from the checkpoint at `path`; raises Damaged, on all ranks, where it is damaged for one of them.

    check: says what is wrong with this rank's state besides; "" where nothing is.
    """
    try:
        state = restore(program, path)
        failure = check(state)
    except Damaged as error:
        failure = str(error)
    failures = [text for text in team.gather(failure) if text]
    if failures:
        raise Damaged(failures[0])
    return state


def told_of_offload(program: Job) -> list[str]:
    """What a run says of its disk before it begins."""
    if program.space is None:
        return []
    size = program.space.pool_bytes
    lines = [f"offload {program.config.offload}: {program.space.folder}, {size / 1e6:,.0f} MB of buffers a process"]
    if all_on_disk(program):
        kept = program.space.slots - 2
        more = f", and the last {kept} checkpoints are kept" if kept > 0 else ""
        lines.append(f"every step is complete on the disk when it ends: --resume goes on from the last one{more}")
    return lines


def disk_row(program: Job, before: DiskTraffic) -> dict[str, Any]:
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
    return pytree.map(lambda leaf: leaf.tensor() if isinstance(leaf, DiskTensor) else leaf, tree)
