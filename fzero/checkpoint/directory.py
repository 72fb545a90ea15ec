"""The manifest of a checkpoint, which makes it one; and the folder that checkpoints are in: which there are, which go, what is debris.

    HOME/step-00000020/
        manifest.json       step, config, versions, mesh, and of every leaf shape, dtype, spec, layout, digest and the sums of its parts
        arrays/             the leaves as zarr3 arrays, under their names: see layout.py

A checkpoint is there when its manifest is, and the manifest is put in place by one rename (an object store: one write), after all it
speaks of is durable. So a save that is killed leaves what was there before and some files that no manifest names, which the next save
removes. A step that is saved again goes to arrays-1 beside arrays, until its manifest takes the place of the other. A folder has one
writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fzero
from fzero.checkpoint.layout import Layout
from fzero.core.object_store import Objects
from fzero.core.storage import is_url, read_text, sync_folder, write_text
from fzero.offload.chunk_files import Damaged

FORMAT, VERSION = "fzero-checkpoint", 2
MANIFEST, ARRAYS = "manifest.json", "arrays"
SPARE = "spare"  # the files of a checkpoint that has gone, for the next one to be written over
Place = str | Path  # a local folder, or the URL of one that tensorstore knows


class Leaf(NamedTuple):
    """A leaf of a checkpoint, as its manifest has it."""

    layout: Layout
    spec: str  # how the run that saved it had it sharded
    digest: str  # of its elements, whatever the mesh: see fzero/core/digest.py
    sums: list[int]  # of each part: the crc32c of its header, or of its chunk

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole leaf."""
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.layout.dtype

    def table(self) -> dict[str, Any]:
        """What the manifest says of it."""
        where = self.layout
        return {
            "shape": list(where.shape),
            "dtype": str(where.dtype).removeprefix("torch."),
            "spec": self.spec,
            "grid": list(where.grid),
            "chunk": list(where.chunk),
            "compress": where.compress,
            "digest": self.digest,
            "sums": self.sums,
        }


def leaf_of(table: dict[str, Any]) -> Leaf:
    """The Leaf of a manifest's table."""
    dtype = getattr(torch, table["dtype"])
    where = Layout(tuple(table["shape"]), dtype, tuple(table["grid"]), tuple(table["chunk"]), table["compress"])
    return Leaf(where, table["spec"], table["digest"], table["sums"])


def write(path: Place, arrays: str, leaves: dict[str, Leaf], *, step: int, config: Any, mesh: dict[str, int]) -> None:
    """Put the manifest of the checkpoint at `path` in place, durably: from then on it is complete."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "config": config,
        "versions": {"fzero": fzero.__version__, "torch": torch.__version__},
        "mesh": mesh,
        "arrays": arrays,
        "leaves": {name: leaf.table() for name, leaf in leaves.items()},
    }
    write_text(path, MANIFEST, as_text({**body, "sha256": _digest(body)}))


def as_text(body: dict[str, Any]) -> str:
    """The text of a manifest."""
    return json.dumps(body, indent=1)


def manifest(path: Place) -> dict[str, Any]:
    """The checked manifest of the checkpoint at `path`: step, config, versions, mesh, and leaves by name.

    Raises ValueError naming the file when it is missing, damaged, or of another format or version.
    """
    file = join(path, MANIFEST)
    try:
        text = read_text(path, MANIFEST)
    except UnicodeDecodeError as error:
        raise Damaged(f"{file}: damaged: not a text ({error})") from None
    if text is None:
        raise ValueError(f"{file}: no such file; {path} is not a complete checkpoint")
    try:
        body = json.loads(text)
        digest = body.pop("sha256", None)
    except (ValueError, AttributeError, TypeError) as error:
        raise Damaged(f"{file}: damaged: not a JSON object ({error})") from None
    if body.get("format") != FORMAT or digest != _digest(body):
        raise Damaged(f"{file}: damaged, or not a manifest of fzero: its checksum does not agree with its content")
    if body["version"] != VERSION:
        raise ValueError(f"{file}: version {body['version']}; this fzero ({fzero.__version__}) reads version {VERSION}")
    return body


def _digest(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# ---- the folder ----


def join(place: Place, *names: str) -> Place:
    """A place below another one."""
    return "/".join((str(place).rstrip("/"), *names)) if is_url(place) else Path(place, *names)


def folder_of(home: Place, step: int) -> Place:
    """Where the checkpoint of a step is."""
    return join(home, f"step-{step:08d}")


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's folder; None where it is not one."""
    return int(name[5:]) if re.fullmatch(r"step-(\d{8}|[1-9]\d{8,})", name) else None


def steps(home: Place) -> list[int]:
    """The steps of the complete checkpoints in `home`, rising; their content is not read. A folder that is not there has none."""
    if is_url(home):
        found = (name.split("/") for name in Objects(str(home)).names())
        return sorted(step for name in found if len(name) == 2 and name[1] == MANIFEST and (step := step_of(name[0])) is not None)
    return sorted(step for path, step in _places(Path(home)) if (path / MANIFEST).is_file())


def latest(home: Place) -> Place:
    """The complete checkpoint of the highest step in `home`; raises ValueError where there is none."""
    found = steps(home)
    if not found:
        raise ValueError(f"{home}: no checkpoint in it; one is a folder step-XXXXXXXX with a {MANIFEST}")
    return folder_of(home, found[-1])


def _places(home: Path) -> list[tuple[Path, int]]:
    there = home.iterdir() if home.is_dir() else ()
    return [(path, step) for path in there if (step := step_of(path.name)) is not None and path.is_dir()]


# ---- what a writer does to it ----


def begin(home: Place, step: int) -> str:
    """Make the folder of a step ready to be written, with the files of the spare one in it; returns the name of its arrays' folder."""
    if is_url(home):
        path = folder_of(home, step)
        used = _arrays_used(path)
        return next(name for i in count() if (name := _arrays(i)) != used)
    home = Path(home)
    path = home / f"step-{step:08d}"
    path.mkdir(exist_ok=True)
    arrays = next(name for i in count() if not (path / (name := _arrays(i))).exists())
    if (home / SPARE).is_dir():
        (home / SPARE).rename(path / arrays)
    return arrays


def _arrays(i: int) -> str:
    return f"{ARRAYS}-{i}" if i else ARRAYS


def _arrays_used(path: Place) -> str | None:
    """The folder of arrays that the manifest at `path` names; None where there is no manifest, or a damaged one."""
    try:
        return manifest(path)["arrays"]
    except ValueError:
        return None


def clean(home: Place, *, but: int | None = None) -> None:
    """Remove what saves that did not end have left in `home`: files of ours that no manifest names. `but`: a step that is being written."""
    if is_url(home):
        _clean_url(home, but)
        return
    drop_spare(home)
    for path, step in _places(Path(home)):
        if step != but:
            clean_step(path)


def drop_spare(home: Place) -> None:
    """Remove the spare files."""
    if not is_url(home):
        shutil.rmtree(Path(home, SPARE), ignore_errors=True)


def clean_step(path: Place) -> None:
    """Remove the files of ours in the folder of a step that its manifest does not name; without a manifest, all and then the folder."""
    if is_url(path):
        _clean_url_step(path)
        return
    path = Path(path)
    complete = (path / MANIFEST).is_file()
    used = _arrays_used(path)
    if complete and used is None:
        return  # a damaged manifest: evidence, until the step is saved again
    (path / f"{MANIFEST}.partial").unlink(missing_ok=True)
    for inner in path.glob(f"{ARRAYS}*"):
        if inner.name != used and re.fullmatch(rf"{ARRAYS}(-\d+)?", inner.name):
            shutil.rmtree(inner)
    if not complete:
        with contextlib.suppress(OSError):  # it holds files of somebody else
            path.rmdir()


def _clean_url(home: str, but: int | None) -> None:
    there = {name.split("/")[0] for name in Objects(home).names()}
    for name in there:
        step = step_of(name)
        if step is not None and step != but:
            _clean_url_step(join(home, name))


def _clean_url_step(path: str) -> None:
    objects, used = Objects(path), _arrays_used(path)
    names = objects.names()
    if used is None and MANIFEST in names:
        return
    tops = {name: name.split("/")[0] for name in names}
    objects.remove([name for name, top in tops.items() if top != used and re.fullmatch(rf"{ARRAYS}(-\d+)?", top)])


def remove(home: Place, step: int, *, spare: bool = False) -> None:
    """Remove the checkpoint of a step: its manifest first, so that it is whole or gone. spare: keep its files to be written over."""
    path = folder_of(home, step)
    if is_url(home):
        Objects(str(path)).remove([MANIFEST])
        _clean_url_step(path)
        return
    arrays = _arrays_used(path)
    Path(path, MANIFEST).unlink()
    sync_folder(Path(path))
    if spare and arrays is not None and not Path(home, SPARE).exists():
        os.rename(Path(path, arrays), Path(home, SPARE))
    clean_step(path)


def retire(home: Place, step: int, *, keep_last: int | None, keep_every: int | None, spare: bool) -> None:
    """After a save of `step`: remove the checkpoints before it beyond the last `keep_last`, but for those that `keep_every` divides."""
    if keep_last is None:
        return
    for old in [n for n in steps(home) if n <= step][:-keep_last]:
        if not keep_every or old % keep_every:
            remove(home, old, spare=spare)
