"""The checkpoint directory: listing, retention and cleanup of checkpoints.

    CHECKPOINT_DIR/step-00000020/
        manifest.json   step, config, versions, mesh; for each leaf shape, dtype, spec, layout, digest, checksums
        arrays/         the leaves as zarr3 arrays, under their names: see layout.py

A checkpoint exists once its manifest does, which is written by one rename (in an object store: one write) after all
files that it names are durable. So a killed save leaves earlier checkpoints unchanged, and files that the next save
removes. A step that is saved again is written to arrays-1 beside arrays. Only one process writes into a directory.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from fzero.checkpoint.manifest import ARRAYS, MANIFEST, read_manifest
from fzero.core.arguments import checked
from fzero.core.files import is_real_folder, make_folder, remove_entry, sync_folder
from fzero.core.storage import Damaged, Folder, Objects, is_url, join

SPARE = "spare"  # the files of a removed checkpoint, which the next one overwrites


# ---- the folder ----


@checked()
def step_folder(checkpoint_dir: Folder, step: int) -> Folder:
    """The folder of the checkpoint of a step; raises ValueError for a step below 0.

    >>> print(step_folder("run/checkpoints", 20))
    run/checkpoints/step-00000020
    """
    if step < 0:
        raise ValueError(f"step is {step}; it must be at least 0")
    return join(checkpoint_dir, f"step-{step:08d}")


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's folder; None for other names."""
    return int(name[5:]) if re.fullmatch(r"step-(\d{8}|[1-9]\d{8,})", name) else None


@checked()
def steps(checkpoint_dir: Folder) -> list[int]:
    """The steps of the complete checkpoints in a folder or at a URL, ascending; [] if there is no such folder.

    It reads no content.
    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> checkpoint_dir = tempfile.mkdtemp()
    >>> _ = [checkpoint.save(checkpoint_dir, {"w": torch.ones(2)}, step=step) for step in (10, 20)]
    >>> checkpoint.steps(checkpoint_dir), checkpoint.latest(checkpoint_dir).name
    ([10, 20], 'step-00000020')
    """
    if is_url(checkpoint_dir):
        split_names = (name.split("/") for name in Objects(str(checkpoint_dir)).names())
        return sorted(
            step
            for name in split_names
            if len(name) == 2 and name[1] == MANIFEST and (step := step_of(name[0])) is not None
        )
    return sorted(step for path, step in _step_folders(Path(checkpoint_dir)) if os.path.lexists(path / MANIFEST))


@checked()
def latest(checkpoint_dir: Folder) -> Folder:
    """Return the path of the complete checkpoint of the highest step.

    It reads no content, so that checkpoint may be damaged: see `newest_sound`.
    Raises ValueError if there is no checkpoint.

    >>> import tempfile
    >>> checkpoint_dir = tempfile.mkdtemp()
    >>> for step in (10, 20):
    ...     _ = fzero.checkpoint.save(checkpoint_dir, {"w": torch.ones(2)}, step=step)
    >>> latest(checkpoint_dir).name
    'step-00000020'
    """
    step_list = steps(checkpoint_dir)
    if not step_list:
        raise ValueError(f"{checkpoint_dir}: no checkpoint in it; one is a folder step-XXXXXXXX with a {MANIFEST}")
    return step_folder(checkpoint_dir, step_list[-1])


def _step_folders(checkpoint_dir: Path) -> list[tuple[Path, int]]:
    entries = checkpoint_dir.iterdir() if checkpoint_dir.is_dir() else ()
    return [(path, step) for path in entries if (step := step_of(path.name)) is not None and path.is_dir()]


def incomplete_lines(used: Folder) -> list[str]:
    """A line for each incomplete checkpoint of a later step than the used one; none of a URL."""
    if is_url(used):
        return []
    step = step_of(Path(used).name) or 0
    later = (path for path, folder_step in sorted(_step_folders(Path(used).parent)) if folder_step > step)
    reason = f"it has no {MANIFEST}: its save is under way, or did not end"
    return [f"passed over {path}: {reason}" for path in later if not os.path.lexists(path / MANIFEST)]


# ---- the newest sound one ----


class Sound(NamedTuple):
    """The first undamaged checkpoint of several, as `first_sound` returns it.

    >>> import tempfile
    >>> checkpoint_dir = tempfile.mkdtemp()
    >>> new, old = (fzero.checkpoint.save(checkpoint_dir, {"w": torch.ones(2)}, step=step) for step in (20, 10))
    >>> _ = (new / "manifest.json").write_text("{}")
    >>> found = first_sound([new, old], fzero.checkpoint.read_manifest)
    >>> found.path.name, found.value["step"], len(found.damaged)
    ('step-00000010', 10, 1)
    """

    value: Any  # the result of `read(path)`
    path: Folder | None  # None: all are damaged
    damaged: list[tuple[Folder, str]]  # those before it, each with its damage

    def lines(self) -> list[str]:
        """A line for each damaged checkpoint."""
        return [f"passed over {path}: {reason}" for path, reason in self.damaged]


@checked()
def first_sound(paths: Iterable[Folder], read: Callable[[Folder], Any]) -> Sound:
    """Call `read(path)` for each of `paths` until it does not raise Damaged; return that checkpoint and its result.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> path = checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)}, step=10)
    >>> checkpoint.first_sound([path], lambda path: checkpoint.read_manifest(path)["step"]).value
    10
    """
    damaged: list[tuple[Folder, str]] = []
    for path in paths:
        try:
            return Sound(read(path), path, damaged)
        except Damaged as error:
            damaged.append((path, str(error)))
    return Sound(None, None, damaged)


def newest_sound(
    checkpoint_dir: Folder, read: Callable[[Folder], Any], candidates: Iterable[int] | None = None
) -> Sound:
    """The checkpoint of the highest step in `checkpoint_dir` for which `read(path)` does not raise Damaged.

    candidates: the steps to try, ascending, so that all ranks try the same ones; None: those of `steps`.
    Raises ValueError if there is no checkpoint, or if all are damaged.
    """
    if candidates is None:
        latest(checkpoint_dir)
        candidates = steps(checkpoint_dir)
    sound = first_sound([step_folder(checkpoint_dir, step) for step in reversed([*candidates])], read)
    if sound.path is None:
        raise ValueError(
            f"{checkpoint_dir}: every checkpoint is damaged: {'; '.join(reason for _, reason in sound.damaged)}"
        )
    return sound


# ---- changes by a writer ----


def begin(checkpoint_dir: Folder, step: int) -> str:
    """Make the folder of a step, with spare files in it if there are any; returns its folder of arrays."""
    if is_url(checkpoint_dir):
        path = step_folder(checkpoint_dir, step)
        used = _arrays_used(path)
        return next(name for i in count() if (name := _arrays(i)) != used)
    checkpoint_dir = Path(checkpoint_dir)
    path = make_folder(checkpoint_dir, f"step-{step:08d}")
    arrays = next(name for i in count() if not os.path.lexists(path / (name := _arrays(i))))
    if is_real_folder(checkpoint_dir / SPARE):
        (checkpoint_dir / SPARE).rename(path / arrays)
    return arrays


def _arrays(i: int) -> str:
    return f"{ARRAYS}-{i}" if i else ARRAYS


def _arrays_used(path: Folder) -> str | None:
    """The folder of arrays that the manifest at `path` names; None without a sound one."""
    try:
        return read_manifest(path)["arrays"]
    except ValueError:
        return None


def clean(checkpoint_dir: Folder, *, active_step: int | None = None) -> None:
    """Remove the files that interrupted saves left in `checkpoint_dir`, but not of `active_step`."""
    if is_url(checkpoint_dir):
        _clean_url(checkpoint_dir, active_step)
        return
    drop_spare(checkpoint_dir)
    for path, step in _step_folders(Path(checkpoint_dir)):
        if step != active_step and is_real_folder(path):  # what a link names is another's
            clean_step(path)


def drop_spare(checkpoint_dir: Folder) -> None:
    """Remove the spare files."""
    if not is_url(checkpoint_dir):
        with contextlib.suppress(OSError):
            remove_entry(Path(checkpoint_dir, SPARE))


def clean_step(path: Folder) -> None:
    """Remove our files in a step's folder that its manifest does not name; without a manifest all, and the folder."""
    if is_url(path):
        _clean_url_step(path)
        return
    path = Path(path)
    complete = os.path.lexists(path / MANIFEST)
    used = _arrays_used(path)
    if complete and used is None:
        return  # a damaged manifest is kept as evidence until the step is saved again
    (path / f"{MANIFEST}.partial").unlink(missing_ok=True)
    for inner in path.glob(f"{ARRAYS}*"):
        if inner.name != used and re.fullmatch(rf"{ARRAYS}(-\d+)?", inner.name):
            remove_entry(inner)
    if not complete:
        with contextlib.suppress(OSError):  # it holds files of another program
            path.rmdir()


def _clean_url(checkpoint_dir: Folder, active_step: int | None) -> None:
    names = {name.split("/")[0] for name in Objects(str(checkpoint_dir)).names()}
    for name in names:
        step = step_of(name)
        if step is not None and step != active_step:
            _clean_url_step(join(checkpoint_dir, name))


def _clean_url_step(path: Folder) -> None:
    objects, used = Objects(str(path)), _arrays_used(path)
    names = objects.names()
    if used is None and MANIFEST in names:
        return
    tops = {name: name.split("/")[0] for name in names}
    objects.remove([name for name, top in tops.items() if top != used and re.fullmatch(rf"{ARRAYS}(-\d+)?", top)])


@checked()
def remove(checkpoint_dir: Folder, step: int, *, spare: bool = False) -> None:
    """Remove the checkpoint of a step, its manifest first, so that it is complete or absent at every instant.

    spare: keep its files for the next checkpoint to overwrite, which is faster than making new ones.
    Raises ValueError if there is no such checkpoint.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> checkpoint_dir = tempfile.mkdtemp()
    >>> _ = checkpoint.save(checkpoint_dir, {"w": torch.ones(2)}, step=10)
    >>> checkpoint.remove(checkpoint_dir, 10)
    >>> checkpoint.steps(checkpoint_dir)
    []
    """
    path = step_folder(checkpoint_dir, step)
    if is_url(checkpoint_dir):
        if Objects(str(path)).read(MANIFEST) is None:
            raise ValueError(f"{path}: no such checkpoint")
        Objects(str(path)).remove([MANIFEST])
        _clean_url_step(path)
        return
    if not os.path.lexists(Path(path, MANIFEST)):
        raise ValueError(f"{path}: no such checkpoint")
    if not is_real_folder(path):
        remove_entry(path)
        return
    arrays = _arrays_used(path)
    Path(path, MANIFEST).unlink()
    sync_folder(Path(path))
    if spare and arrays is not None and not Path(checkpoint_dir, SPARE).exists():
        os.rename(Path(path, arrays), Path(checkpoint_dir, SPARE))
    clean_step(path)


def retire(checkpoint_dir: Folder, step: int, *, keep_last: int | None, keep_every: int | None, spare: bool) -> None:
    """Remove the checkpoints up to `step` except the last `keep_last` and those whose step `keep_every` divides."""
    if keep_last is None:
        return
    for old in [n for n in steps(checkpoint_dir) if n <= step][:-keep_last]:
        if not keep_every or old % keep_every:
            remove(checkpoint_dir, old, spare=spare)
