"""Checkpoints of a state tree: written by all ranks while training goes on, whole or not there, restored on any mesh."""

from pathlib import Path
from typing import Any

from fzero.checkpoint.directory import Sound, first_sound, latest, remove, step_folder, steps
from fzero.checkpoint.leaf_source import Lazy
from fzero.checkpoint.manifest import Folder, Leaf, read_manifest
from fzero.checkpoint.reader import CheckpointReader, open_checkpoint
from fzero.checkpoint.restore_tree import restore, restore_leaves
from fzero.checkpoint.verify import expect_sound, newest_sound, verify
from fzero.checkpoint.writer import Saved, SaveFailed, Writer
from fzero.core.pytree import Tree
from fzero.core.storage import Damaged
from fzero.sharding import Mesh

__all__ = [
    "CheckpointReader",
    "Damaged",
    "Folder",
    "Lazy",
    "Leaf",
    "SaveFailed",
    "Saved",
    "Sound",
    "Writer",
    "expect_sound",
    "first_sound",
    "latest",
    "newest_sound",
    "open_checkpoint",
    "read_manifest",
    "remove",
    "restore",
    "restore_leaves",
    "save",
    "step_folder",
    "steps",
    "verify",
]


def save(
    folder: str | Path,
    state: Tree,
    *,
    step: int,
    config: Any = None,
    specs: Tree | None = None,
    mesh: Mesh | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    compress: str = "",
    buffer_bytes: int | None = 256 << 20,
) -> Folder:
    """The path of the checkpoint `folder`/step-XXXXXXXX, written from `state` and complete on return; see `Writer` and `Writer.save`.

    All ranks of `mesh` call it. Raises ValueError naming the leaf that cannot be stored, and SaveFailed (an OSError) where the disk fails;
    what was there before is then as it was.
    """
    writer = Writer(folder, mesh, keep_last=keep_last, keep_every=keep_every, compress=compress, buffer_bytes=buffer_bytes)
    try:
        writer.save(state, step=step, config=config, specs=specs)
        return writer.wait().path
    finally:
        writer.close()
