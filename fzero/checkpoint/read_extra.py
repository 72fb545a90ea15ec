"""Read a value that a rank saved beside its state."""

from __future__ import annotations

from typing import Any

from fzero.checkpoint.extras import EXTRAS, from_bytes
from fzero.checkpoint.manifest import Folder
from fzero.checkpoint.reader import open_checkpoint
from fzero.core.pytree import nearest
from fzero.sharding import Mesh, one_process


def read_extra(path: Folder, name: str, mesh: Mesh | None = None) -> Any:
    """The value of this rank that the checkpoint at `path` was saved with as `extras={name: value}`, verified.

    mesh: None is one process. It has as many data ranks as the mesh that saved the checkpoint, unless all of those had
    the same value.
    Raises ValueError if the checkpoint has no such extra or those of other ranks, and Damaged if a checksum does not
    match.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> path = checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)}, step=5, extras={"loader": {"batch": 7}})
    >>> checkpoint.read_extra(path, "loader")
    {'batch': 7}
    """
    mesh = one_process() if mesh is None else mesh
    held = open_checkpoint(path)
    try:
        there = [leaf.removeprefix(EXTRAS) for leaf in held.leaves if leaf.startswith(EXTRAS)]
        if name not in there:
            raise ValueError(
                f"{path}: has no extra {name!r}{nearest(name, there)}; it has {', '.join(there) or 'none'}"
            )
        rows, width = held.leaves[EXTRAS + name].shape
        if rows not in (1, mesh.data_size):
            raise ValueError(
                f"{path}: extra {name!r} is of {rows} data ranks, each with its own, and this mesh has "
                f"{mesh.data_size}; resume on {rows}"
            )
        return from_bytes(held.read(EXTRAS + name, (mesh.data_rank if rows > 1 else 0, 0), (1, width))[0])
    finally:
        held.close()
