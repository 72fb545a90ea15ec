"""A checkpoint being written: its state, its outcome, and the errors of its threads.

The end of a save: what the ranks report to rank 0, and the manifest with which a checkpoint is complete.

The plan of a state's snapshot: which slabs of which parts this rank writes, and the memory that they take. States of
the same shapes have the same one.
"""

from __future__ import annotations

import json
import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fzero.checkpoint import manifest
from fzero.checkpoint.directory import step_folder
from fzero.checkpoint.layout import RankTiles, Slab, plan_tiles, slabs
from fzero.checkpoint.manifest import Folder, Leaf, join, write_descriptions
from fzero.checkpoint.tile_file import TileFile
from fzero.core.storage import is_url, sync_folder
from fzero.offload.buffer_pool import round_to_pages
from fzero.sharding import Mesh, Spec

SLAB = 16 << 20  # bytes to copy, checksum and write at a time
SLAB_OF_GPU = 64 << 20  # the same from a GPU, where each copy takes the host as long as it takes to start it
OBJECT = 64 << 20  # bytes of an object in an object store
Named = Mapping[str, tuple[Any, Spec]]  # a leaf and its Spec by name


class SnapshotLeaf(NamedTuple):
    """The part of a leaf that this rank writes."""

    rank_tiles: RankTiles
    slabs: list[list[Slab]]  # of each of its parts
    sizes: list[list[int]]  # bytes of memory for each of those


class SnapshotPlan(NamedTuple):
    """The parts of a state that this rank writes, in the order of its leaves."""

    leaves: dict[str, SnapshotLeaf]
    total: int  # bytes of memory for all slabs
    largest: int  # bytes of memory for one
    nbytes: int  # bytes of elements


def is_on_gpu(leaf: Any) -> bool:
    """Whether a leaf of a state is a tensor on a GPU."""
    return isinstance(leaf, Tensor) and leaf.is_cuda


def traits_of(named: Named) -> list[tuple[Any, ...]]:
    """All that the plan of a snapshot depends on: two states with equal traits have the same."""
    return [(name, tuple(leaf.shape), leaf.dtype, spec, is_on_gpu(leaf)) for name, (leaf, spec) in named.items()]


def plan_snapshot(named: Named, mesh: Mesh, *, objects: bool, compress: str) -> SnapshotPlan:
    """The SnapshotPlan of a state. objects: it goes to an object store."""
    leaves, sizes, nbytes = {}, [], 0
    for number, (name, (leaf, spec)) in enumerate(named.items()):
        rank_tiles = plan_tiles(
            leaf.shape, leaf.dtype, spec, mesh, number, max_bytes=OBJECT if objects else None, compress=compress
        )
        max_bytes = 2 * OBJECT if objects else SLAB_OF_GPU if is_on_gpu(leaf) else SLAB
        pieces = [list(slabs(rank_tiles.layout, max_bytes)) for _ in rank_tiles.tiles]
        slab_bytes = [
            [round_to_pages(math.prod(slab.counts) * rank_tiles.layout.stride) for slab in tile] for tile in pieces
        ]
        leaves[name] = SnapshotLeaf(rank_tiles, pieces, slab_bytes)
        sizes += [size for tile in slab_bytes for size in tile]
        nbytes += sum(math.prod(slab.counts) * rank_tiles.layout.chunk_bytes for tile in pieces for slab in tile)
    return SnapshotPlan(leaves, sum(sizes), max(sizes, default=0), nbytes)


class Saved(NamedTuple):
    """A checkpoint that has been completed, as `Writer.wait` and `Writer.poll` return it.

    >>> import tempfile
    >>> writer = fzero.checkpoint.Writer(tempfile.mkdtemp())
    >>> writer.save({"w": torch.ones(2)}, step=10)
    >>> saved = writer.wait()
    >>> saved.step, saved.path.name, saved.nbytes
    (10, 'step-00000010', 8)
    >>> writer.close()
    """

    step: int
    path: Folder
    blocked_s: float  # seconds that `save` took
    total_s: float  # seconds until the manifest was written
    nbytes: int  # bytes that this rank wrote


class SaveFailed(OSError):
    """Raised if a checkpoint could not be written; the earlier ones are unchanged.

    >>> import tempfile
    >>> checkpoint_dir = tempfile.mkdtemp()
    >>> fzero.checkpoint.step_folder(checkpoint_dir, 10).touch()  # a file in the place of the folder
    >>> fzero.checkpoint.save(checkpoint_dir, {"w": torch.ones(2)}, step=10)
    Traceback (most recent call last):
    fzero.checkpoint.save_state.SaveFailed: ...step-00000010: the checkpoint could not be written: ...
    """


class Save:
    """A checkpoint being written."""

    def __init__(self, step: int, config: Any) -> None:
        self.step, self.config, self.began = step, config, time.perf_counter()
        self.target, self.go, self.staged, self.finished = (threading.Event() for _ in range(4))
        self.arrays, self.blocked_s, self.nbytes = "", 0.0, 0
        self.error: BaseException | None = None
        self.early = threading.Lock()
        self.layouts: dict[str, tuple[RankTiles, Spec]] = {}
        self.tiles: dict[str, list[TileFile]] = {}
        self.tasks: list[Future] = []
        self.outcome: Saved | SaveFailed | None = None


def wait_for_all(tasks: list[Future]) -> None:
    """Wait for all tasks, and free the memory held by tracebacks of failed ones."""
    for task in tasks:
        error = task.exception()
        if error is not None:
            traceback.clear_frames(error.__traceback__)


def error_line(error: BaseException) -> str:
    """Format an error as one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return " ".join(str(error).split()) or type(error).__name__


class Reports:
    """What the ranks of a mesh tell one another about a save, as JSON in the mesh's store."""

    def __init__(self, mesh: Mesh) -> None:
        self.rank = mesh.rank
        store: Any = mesh.store  # torch tells a type checker of no `clone`
        # The mesh's own connection may be blocked by a wait.
        self.store: Any = None if store is None else store.clone()

    def send(self, key: str, report: dict[str, Any]) -> None:
        """Tell rank 0 this rank's report; nothing on rank 0 itself."""
        if self.store is not None and self.rank:
            self.store.set(key, json.dumps(report))

    def receive(self, key: str) -> dict[str, Any]:
        """Wait for the report of that key."""
        pause = 0.001
        while not self.store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return json.loads(self.store.get(key))

    def broadcast(self, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of `make()` on rank 0, or {"error": ...} if it raised an error, on every rank."""
        if self.rank:
            return self.receive(key)
        try:
            result = make()
        except Exception as error:
            result = {"error": error_line(error)}
        if self.store is not None:
            self.store.set(key, json.dumps(result))
        return result


def complete(
    checkpoint_dir: Folder, save: Save, reports: Sequence[dict[str, Any]], mesh: Mesh, pool: ThreadPoolExecutor
) -> None:
    """Write the zarr metadata and the manifest of a save whose parts are all written.

    reports: of each rank, {leaf: {part: [checksum, digest]}}.
    """
    path, leaves = step_folder(checkpoint_dir, save.step), {}
    for name, (rank_tiles, spec) in save.layouts.items():
        layout = rank_tiles.layout
        checksums = {int(number): value for report in reports for number, value in report.get(name, {}).items()}
        assert len(checksums) == len(layout.tiles()), (
            f"{name}: {len(checksums)} parts of {len(layout.tiles())} were written"
        )
        digest = sum(value for _, value in checksums.values()) % (1 << 64)
        leaves[name] = Leaf(layout, str(spec), f"{digest:016x}", [checksums[i][0] for i in range(len(checksums))])
    write_descriptions(join(path, save.arrays), leaves, pool)
    sizes = {axis.name: axis.size for axis in mesh.axes if axis.size > 1}
    manifest.write_manifest(path, save.arrays, leaves, step=save.step, config=save.config, mesh=sizes)
    if not is_url(checkpoint_dir):
        sync_folder(Path(checkpoint_dir))
