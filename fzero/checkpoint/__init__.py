"""Checkpoints of a state tree: written by all ranks during training, complete or absent, restored on any mesh."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fzero.checkpoint.directory import Sound, first_sound, latest, remove, step_folder, steps
from fzero.checkpoint.leaf_source import Lazy
from fzero.checkpoint.manifest import Leaf, read_manifest
from fzero.checkpoint.reader import CheckpointReader, open_checkpoint, read_extra
from fzero.checkpoint.restore_tree import restore, restore_leaves
from fzero.checkpoint.save_state import Saved, SaveFailed
from fzero.checkpoint.verify import expect_sound, newest_sound, verify
from fzero.checkpoint.writer import Writer
from fzero.core.arguments import checked
from fzero.core.pytree import Tree
from fzero.core.storage import Damaged, Folder
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
    "read_extra",
    "read_manifest",
    "remove",
    "restore",
    "restore_leaves",
    "save",
    "step_folder",
    "steps",
    "verify",
]


@checked()
def save(
    folder: str | Path,
    state: Tree,
    *,
    step: int,
    config: Any = None,
    specs: Tree | None = None,
    mesh: Mesh | None = None,
    extras: Mapping[str, Any] | None = None,
    **options: Any,
) -> Folder:
    """Write the checkpoint `folder`/step-XXXXXXXX of a state; return its path when it is complete.

    All ranks of `mesh` call it.
    state: any tree of tensors, of which this rank holds the shards by `specs`; see `Writer.save`.
    step: the number in the checkpoint's name. config: any JSON value, kept in the manifest.
    specs: the tree of Specs; None on one process. mesh: None is one process.
    extras: {name: value of this rank}, beside the state: where its data loader is, its random numbers. A value is made
    of numbers, texts, bytes, tensors, lists, tuples and dicts; `read_extra` returns it.
    options: keep_last, keep_every, compress, buffer_bytes of `Writer`.

    Communicates: reports of a few KB to rank 0, through the store of the mesh and not by collectives; with extras,
    their bytes, over all ranks.
    Raises ValueError naming a leaf that cannot be stored, and SaveFailed (an OSError) if the disk fails; earlier
    checkpoints then stay.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> path = checkpoint.save(tempfile.mkdtemp(), {"w": torch.arange(3.0)}, step=20)
    >>> path.name
    'step-00000020'
    >>> checkpoint.restore(path, {"w": torch.empty(3)})["w"]
    tensor([0., 1., 2.])
    """
    writer = Writer(folder, mesh, **options)
    try:
        writer.save(state, step=step, config=config, specs=specs, extras=extras)
        saved = writer.wait()
        assert saved is not None  # the one begun above
        return saved.path
    finally:
        writer.close()
