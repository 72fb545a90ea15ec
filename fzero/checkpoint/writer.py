"""Save a state during training: a snapshot, threads that write it, and a commit once every rank has written its parts.

`Writer.save` copies this rank's shards into buffers and returns; threads checksum and write them. A GPU's leaves are
copied as they are at that moment, after `save` has returned, slab by slab. When all ranks have reported their parts,
rank 0 writes the zarr metadata, and finally the manifest.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fzero.checkpoint import directory
from fzero.checkpoint.directory import step_folder
from fzero.checkpoint.layout import Slab
from fzero.checkpoint.manifest import box_reader, check_state, pack_extras
from fzero.checkpoint.save_state import (
    Reports,
    Save,
    Saved,
    SaveFailed,
    SnapshotPlan,
    TileFile,
    complete,
    error_line,
    is_on_gpu,
    plan_snapshot,
    traits_of,
    wait_for_all,
)
from fzero.core import gpu, packages
from fzero.core.arguments import checked
from fzero.core.digest import crc32c, prepare
from fzero.core.files import make_folder
from fzero.core.gpu_copies import Copied, SnapshotReader
from fzero.core.host_memory import cores
from fzero.core.pytree import Tree
from fzero.core.storage import Folder, is_url, join, sync_file_system
from fzero.core.text_parsing import parse_json
from fzero.offload.buffer_pool import BufferPool
from fzero.sharding import Mesh, Spec, one_process

THREADS = 4  # that checksum and write
MANY = 1 << 27  # bytes of a state, above which compiling the digest function (about 1 s) saves time
_WRITERS = itertools.count()


class Writer:
    """Writes checkpoints of the states of a run into a folder, one at a time, while training continues.

    Every rank of `mesh` makes one, and all make the same calls.

    checkpoint_dir: a local folder that all ranks see, or the URL of one that tensorstore knows (s3://bucket/run/,
    gs://..., memory://...).
    keep_last: the number of newest checkpoints to keep, besides those whose step `keep_every` divides; None keeps
    all. The files of a removed checkpoint are overwritten by the next one, which is faster than making new files.
    compress: "zstd" or "". buffer_bytes: memory for the snapshot; None: the size of the state. With less, `save`
    returns later: once the rest fits.
    For leaves on a GPU the memory is pinned, and the copies into it are made beside the next step, whose update waits
    for them: who writes into the leaves in another way calls fzero.core.gpu_copies.await_readers(device) first.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> checkpoint_dir = tempfile.mkdtemp()
    >>> writer = checkpoint.Writer(checkpoint_dir, keep_last=1)
    >>> for step in (10, 20):
    ...     writer.save({"w": torch.ones(2)}, step=step)  # the state may change from here on
    >>> writer.wait().step
    20
    >>> writer.close()
    >>> checkpoint.steps(checkpoint_dir)
    [20]
    """

    @checked()
    def __init__(
        self,
        checkpoint_dir: Folder,
        mesh: Mesh | None = None,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        compress: str = "",
        buffer_bytes: int | None = None,
    ) -> None:
        counts = {"keep_last": keep_last, "keep_every": keep_every, "buffer_bytes": buffer_bytes}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ValueError(f"checkpoint: {name} is {value}; it must be at least 1, or None")
        if compress not in ("", "zstd"):
            raise ValueError(f"checkpoint: compress is {compress!r}; it must be 'zstd', or '' for none")
        # What the first save needs and is not here is said now, and our own loop is compiled before it.
        crc32c(b"")
        if compress:
            packages.load("zstandard", "train.compress = zstd")
        self.checkpoint_dir: Folder = checkpoint_dir if is_url(checkpoint_dir) else Path(checkpoint_dir)
        self.mesh = one_process() if mesh is None else mesh
        self.keep_last, self.keep_every = keep_last, keep_every
        self.compress, self.buffer_bytes = compress, buffer_bytes
        self.first = self.mesh.rank == 0
        self.reports = Reports(self.mesh)
        self.number, self.saves = next(_WRITERS), itertools.count()
        self.planned: tuple[list[tuple[Any, ...]], SnapshotPlan] | None = None  # of states of these traits
        self.buffers: BufferPool | None = None
        self.pool = ThreadPoolExecutor(THREADS, "fzero-save")
        self.current: Save | None = None
        self.cleaned = self.closed = False

    # ---- the caller's functions ----

    @checked("step")
    def save(
        self,
        state: Tree,
        *,
        step: int,
        config: Any = None,
        specs: Tree | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin the checkpoint of `step`; the state may change once this returns.

        A checkpoint of the same step is replaced.
        It first waits for the save before, if that is under way, and raises its error.
        state: a tree of tensors (this rank's shards), leaves on a disk, or `Lazy` leaves. specs: the tree of Specs;
        None on one process.
        config: any JSON value, kept in the manifest. extras: values of this rank beside the state, see `save` of
        fzero.checkpoint.
        Communicates: with extras, their bytes, over all ranks.
        Raises ValueError naming the leaf that cannot be stored (its name, kind or dtype), and SaveFailed.
        """
        if self.closed:
            raise ValueError(f"{self.checkpoint_dir}: this writer is closed; make a new one to save step {step}")
        named = check_state(state, specs, step, self.mesh)
        named |= {name: (leaf, Spec()) for name, leaf in pack_extras(extras or {}, self.mesh).items()}
        try:
            text = json.dumps({"config": config}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"checkpoint: config is not JSON: {error}") from None
        config = parse_json(text, "checkpoint")["config"]  # within the bounds of what is read again
        local_folder = None if is_url(self.checkpoint_dir) else Path(self.checkpoint_dir)
        if local_folder is not None and local_folder.exists() and not local_folder.is_dir():
            raise ValueError(f"{self.checkpoint_dir}: is not a folder; give a folder to save checkpoints in")
        self.wait()
        save = self.current = Save(step, config)
        # A daemon: a process that must end does not wait for a checkpoint; without its manifest there is none.
        threading.Thread(target=self._serve, args=(save, next(self.saves)), name="fzero-commit", daemon=True).start()
        goes_on = False
        try:
            goes_on = self._snapshot(save, named)
        except BaseException as error:
            save.error = error
            raise
        finally:
            save.blocked_s = time.perf_counter() - save.began
            save.go.set()
            if not goes_on:
                save.staged.set()

    def poll(self) -> Saved | None:
        """The checkpoint completed since the last call, or None.

        Raises SaveFailed if it could not be written.
        """
        if self.current is None or not self.current.finished.is_set():
            return None
        return self.wait()

    def wait(self) -> Saved | None:
        """Wait for the checkpoint being written and return it (None: there is none).

        Raises SaveFailed if it could not be written.
        """
        save = self.current
        if save is None:
            return None
        while not save.finished.wait(0.2):  # repeatedly: signals are handled in between
            pass
        self.current = None
        if isinstance(save.outcome, SaveFailed):
            raise save.outcome
        return save.outcome

    def reserve(self, size: int) -> None:
        """Allocate the memory of the snapshot now, `size` bytes or `buffer_bytes` at most, instead of in the first
        `save`."""
        if size >= MANY:
            threading.Thread(target=prepare, name="fzero-compile", daemon=True).start()
        self._allocate(min(size, self.buffer_bytes or size))

    def close(self) -> None:
        """Wait for the save under way, and free memory, threads and spare files; raises SaveFailed."""
        self.closed = True
        try:
            self.wait()
        finally:
            self.pool.shutdown()
            self.buffers = None
            if self.first:
                directory.drop_spare(self.checkpoint_dir)

    def abandon(self) -> None:
        """Stop without waiting, when another process of the run is gone.

        The next writer removes the unfinished files.
        """
        save = self.current
        if save is not None:
            save.error = save.error or SaveFailed("the run has ended")
            for event in (save.target, save.go, save.staged):
                event.set()
        self.pool.shutdown(wait=False, cancel_futures=True)

    # ---- the snapshot ----

    def _snapshot(self, save: Save, named: dict[str, tuple[Any, Spec]]) -> bool:
        """Copy the leaves of the host; returns whether a thread goes on with a GPU's."""
        plan = self._plan(named)
        limit = plan.total if self.buffer_bytes is None else max(self.buffer_bytes, THREADS * plan.largest)
        self._allocate(min(plan.total, limit))
        save.nbytes = plan.nbytes
        save.layouts.update({name: (plan.leaves[name].rank_tiles, spec) for name, (_, spec) in named.items()})
        on_gpu = {name: leaf for name, (leaf, _) in named.items() if is_on_gpu(leaf)}
        self._copy(save, plan, {name: leaf for name, (leaf, _) in named.items() if name not in on_gpu})
        if on_gpu:
            device = next(iter(on_gpu.values())).device
            # The reader is made on this thread: it records an event behind the work that the current stream has so far,
            # so that the copies see this state, and the next update waits for them.
            args = (save, plan, on_gpu, device, SnapshotReader(device))
            threading.Thread(target=self._copy_from_gpu, args=args, name="fzero-snapshot", daemon=True).start()
        return bool(on_gpu)

    def _plan(self, named: dict[str, tuple[Any, Spec]]) -> SnapshotPlan:
        traits = traits_of(named)
        if self.planned is None or self.planned[0] != traits:
            objects = is_url(self.checkpoint_dir)
            self.planned = traits, plan_snapshot(named, self.mesh, objects=objects, compress=self.compress)
        return self.planned[1]

    def _copy(
        self, save: Save, plan: SnapshotPlan, leaves: dict[str, Any], reading: SnapshotReader | None = None
    ) -> None:
        buffers = self.buffers
        short = buffers is not None and buffers.size < plan.total

        def busy() -> bool:
            # The buffers are smaller than the state: the copies wait for writes, which begin now.
            if short:
                save.go.set()  # otherwise threads would take memory bandwidth from the copies
            return save.go.is_set() and save.error is None and any(not task.done() for task in reversed(save.tasks))

        for name, leaf in leaves.items():
            rank_tiles, slabs, sizes = plan.leaves[name]
            give = box_reader(leaf) if rank_tiles.tiles else None
            for index, pieces, slab_bytes in zip(rank_tiles.tiles, slabs, sizes):
                tile = TileFile(name, rank_tiles.layout, index, self._path)
                tile.pending_slabs = len(pieces)
                save.tiles.setdefault(name, []).append(tile)
                for slab, size in zip(pieces, slab_bytes):
                    try:
                        assert buffers is not None and give is not None  # there is something to write
                        raw = buffers.allocate((size,), torch.uint8, busy).raw
                    except ValueError:
                        if save.error is None:
                            raise
                        return  # a thread has failed; `poll` raises its error
                    copies = [tile.fill(raw, slab, give, rank_tiles.shard_start(index), reading)]
                    del raw  # the memory is the writing thread's to give back
                    save.tasks.append(self.pool.submit(self._write, save, tile, slab, copies))
            del give  # frees the leaf before the next one is made

    def _copy_from_gpu(
        self, save: Save, plan: SnapshotPlan, leaves: dict[str, Any], device: torch.device, reading: SnapshotReader
    ) -> None:
        try:
            gpu.select_device(device)  # of this thread
            self._copy(save, plan, leaves, reading)
        except BaseException as error:
            save.error = save.error or error
        finally:
            leaves.clear()  # the state may be freed
            reading.end()
            save.staged.set()

    def _allocate(self, size: int) -> None:
        if size and (self.buffers is None or self.buffers.size < size):
            self.buffers = None
            try:
                self.buffers = BufferPool(size)
            except ValueError:
                raise ValueError(
                    f"checkpoint: CUDA cannot pin the {size:,} bytes of the snapshot; give it less memory "
                    "(train.snapshot_mb, buffer_bytes=), or allow more locked memory (ulimit -l)"
                ) from None

    # ---- the threads ----

    def _path(self, name: str) -> Folder:
        assert self.current is not None  # asked for while a part is written
        return join(step_folder(self.checkpoint_dir, self.current.step), self.current.arrays, name)

    def _write(self, save: Save, tile: TileFile, slab: Slab, copies: list[Copied]) -> None:
        copied = copies.pop()  # so that the memory is returned before the task counts as done
        with contextlib.ExitStack() as stack:
            # While the snapshot is copied one thread writes, if the copies leave a core unused.
            if not save.go.is_set() and has_spare_core() and save.early.acquire(blocking=False):
                stack.callback(save.early.release)
            else:
                # Until the snapshot is made, so that writes take no memory bandwidth from it.
                save.go.wait()
            self._write_now(save, tile, slab, copied)

    def _write_now(self, save: Save, tile: TileFile, slab: Slab, copied: Copied) -> None:
        raw = copied.finish()  # also if nothing is written: the memory is the next snapshot's
        # The folder of the step, which rank 0 makes.
        save.target.wait()
        if save.error is None:
            try:
                tile.write(raw, slab)
            except BaseException as error:
                save.error = save.error or error
                raise

    def _serve(self, save: Save, number: int) -> None:
        key = f"save/{self.number}/{number}"
        try:
            report = self._write_tiles(save, key)
        except BaseException as error:
            save.error = save.error or error
            save.target.set()
            save.staged.wait()
            report = {"error": error_line(save.error or error)}
        wait_for_all(save.tasks)  # none may write once the folder may be reused
        for tile in itertools.chain(*save.tiles.values()):
            tile.close()
        try:
            outcome = self._commit(save, key, report)
        except BaseException as error:
            outcome = {"error": error_line(error)}
        path = step_folder(self.checkpoint_dir, save.step)
        if "error" in outcome:
            save.outcome = SaveFailed(f"{path}: the checkpoint could not be written: {outcome['error']}")
            save.outcome.__cause__ = save.error
            if save.error is not None:
                traceback.clear_frames(save.error.__traceback__)  # as in `wait_for_all`
        else:
            save.outcome = Saved(save.step, path, save.blocked_s, time.perf_counter() - save.began, save.nbytes)
        save.tasks.clear()
        save.tiles.clear()
        save.finished.set()

    def _write_tiles(self, save: Save, key: str) -> dict[str, Any]:
        """Write this rank's parts; returns {leaf: {part: [checksum, digest]}} when they are durable."""
        reply = self.reports.broadcast(f"{key}/begin", lambda: {"arrays": self._begin(save.step)})
        if "error" in reply:
            raise SaveFailed(reply["error"])
        save.arrays = reply["arrays"]
        save.target.set()
        save.staged.wait()
        if save.error is not None:
            raise save.error
        for task in save.tasks:
            task.result()
        if not is_url(self.checkpoint_dir):
            # One sync for all files of this rank, before it reports: the manifest may name only what is durable.
            sync_file_system(Path(self.checkpoint_dir))
        return {
            name: {str(tile.number): [tile.sum, tile.digest] for tile in parts} for name, parts in save.tiles.items()
        }

    def _begin(self, step: int) -> str:
        if not is_url(self.checkpoint_dir):
            make_folder(self.checkpoint_dir)
        if not self.cleaned:
            directory.clean(self.checkpoint_dir)
            self.cleaned = True
        return directory.begin(self.checkpoint_dir, step)

    def _commit(self, save: Save, key: str, report: dict[str, Any]) -> dict[str, Any]:
        """Complete the checkpoint on rank 0, once all ranks have reported; {} or {"error": ...} on every rank."""
        # Through the store and not by a collective: the training thread runs collectives meanwhile, and two orders of
        # them would hang.
        self.reports.send(f"{key}/{self.mesh.rank}", report)
        path = step_folder(self.checkpoint_dir, save.step)

        def commit() -> dict[str, Any]:
            reports = [report, *(self.reports.receive(f"{key}/{rank}") for rank in range(1, self.mesh.size))]
            failed = [(rank, report["error"]) for rank, report in enumerate(reports) if "error" in report]
            if failed:
                with contextlib.suppress(OSError):
                    directory.clean_step(path)
                rank, reason = failed[0]
                return {"error": reason if self.mesh.size == 1 else f"rank {rank}: {reason}"}
            try:
                # The manifest is the last file that it writes: from then on the checkpoint exists.
                complete(self.checkpoint_dir, save, reports, self.mesh, self.pool)
            except BaseException:
                with contextlib.suppress(OSError):
                    directory.clean_step(path)  # keeps the files of the manifest, which may be the new one
                raise
            directory.clean_step(path)
            # Only now, when the new checkpoint exists: at every instant there are as many as before.
            directory.retire(
                self.checkpoint_dir, save.step, keep_last=self.keep_last, keep_every=self.keep_every, spare=True
            )
            return {}

        return self.reports.broadcast(f"{key}/end", commit)


def has_spare_core() -> bool:
    """Whether copying a tensor leaves a core of this process idle."""
    return cores() > torch.get_num_threads()


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
