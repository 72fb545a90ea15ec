"""Another run's offload store, read only: whole leaves from the chunks of its ranks; and parameters for use on a
disk.

Verify a checkpoint: compare every byte of its files with its required value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero.checkpoint import directory
from fzero.checkpoint.layout import CRC, Index, Slab, flat_index, grid_positions, slab_digest, slabs
from fzero.checkpoint.manifest import MANIFEST, manifest_text, zarr_texts
from fzero.checkpoint.reader import RUN, THREADS, CheckpointReader, StoredTile, open_checkpoint
from fzero.checkpoint.save_state import as_tensor
from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.host_memory import round_to_pages
from fzero.core.pytree import Tree
from fzero.core.storage import PAGE, Damaged, Folder, Objects, is_url, join, read_text
from fzero.core.text_parsing import parse_json
from fzero.offload import DiskTensor, LeafFiles, Nvme
from fzero.offload.chunk_files import read_chunk
from fzero.offload.store import sum_words
from fzero.offload.store_manifest import StepManifest, read_store, read_sums
from fzero.sharding import Plan, Spec, fake_mesh, one_process
from fzero.sharding.pipeline_plan import Pipeline
from fzero.sharding.slices import local_windows, narrow_box, shard_dim, shard_of_rank


@checked()
def newest_sound(checkpoint_dir: Folder) -> tuple[Folder, list[tuple[Folder, str]]]:
    """(path of the newest undamaged checkpoint, [(path, damage) of each later one]).

    It reads those checkpoints whole.
    Raises ValueError if there is no checkpoint, or if all are damaged.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> checkpoint_dir = tempfile.mkdtemp()
    >>> _ = checkpoint.save(checkpoint_dir, {"w": torch.ones(2)}, step=10)
    >>> path, damaged = checkpoint.newest_sound(checkpoint_dir)
    >>> path.name, damaged
    ('step-00000010', [])
    """
    sound = directory.newest_sound(checkpoint_dir, expect_sound)
    assert sound.path is not None  # else it has raised
    return sound.path, sound.damaged


@checked()
def expect_sound(path: Folder) -> None:
    """Raise Damaged, naming the first damage that `verify` finds, unless the checkpoint at `path` is sound.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> checkpoint.expect_sound(checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)}, step=10))
    """
    damages = verify(path)
    if damages:
        raise Damaged(damages[0] + (f" (and {len(damages) - 1} more)" if len(damages) > 1 else ""))


@checked()
def verify(path: Folder) -> list[str]:
    """The damage in a checkpoint, a line for each damaged chunk or file, by name; [] if there is none.

    It reads the checkpoint whole, a few chunks in memory at a time. Chunks are compared with their checksums, the bytes
    between them with zeros, zarr.json files with what the manifest implies, and each leaf with its digest.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> path = checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)}, step=10)
    >>> checkpoint.verify(path)
    []
    """
    try:
        reader = open_checkpoint(path)
    except ValueError as error:
        return [str(error)]
    damages: list[str] = []
    with ThreadPoolExecutor(THREADS, "fzero-verify") as pool:
        tasks = [
            (name, [pool.submit(verify_tile, StoredTile(reader, name, tile)) for tile in leaf.layout.tiles()])
            for name, leaf in reader.leaves.items()
        ]
        for name, parts in tasks:
            results = [task.result() for task in parts]
            lines = [line for part_lines, _ in results for line in part_lines]
            total = sum(value for _, value in results) % (1 << 64)
            if not lines and f"{total:016x}" != reader.leaves[name].digest:
                lines = [
                    f"leaf {name} is damaged: its digest is {total:016x} and the manifest has "
                    f"{reader.leaves[name].digest}"
                ]
            damages += lines
    reader.close()
    return damages + verify_descriptions(reader)


def verify_tile(tile: StoredTile) -> tuple[list[str], int]:
    """(lines of damage in a part, the digest of its elements)."""
    layout, damages, total = tile.layout, [], 0
    try:
        table, _ = tile.header()
        size = tile.size()
        work = list(slabs(layout, 0 if layout.compress else RUN))
        while work:
            slab = work.pop(0)
            try:
                raw = tile.read(slab)
            except Damaged as error:
                if slab.size == 1:
                    damages.append(str(error))
                else:
                    work = [*split_slab(slab, layout.counts), *work]
                continue
            total += slab_digest(as_tensor(raw), layout, tile.index, slab)
            for number in find_nonzero_padding(tile, slab, raw, int(table[slab.first].sum()), size):
                damages.append(str(tile.damaged(f"the bytes after chunk {tile.chunk_text(number)}")))
        written = int(table.sum(1).max()) if layout.compress else layout.file_bytes
        if size != written:
            damages.append(str(tile.damaged(f"{tile.path} has {size:,} bytes, and {written:,} were written")))
    except Damaged as error:
        damages.append(str(error))
    return damages, total % (1 << 64)


def split_slab(slab: Slab, counts: Index) -> list[Slab]:
    """Split a slab into slabs of one chunk each."""
    positions = (tuple(a + b for a, b in zip(slab.position, position)) for position in grid_positions(slab.counts))
    return [Slab(flat_index(position, counts), position, (1,) * len(counts)) for position in positions]


def find_nonzero_padding(tile: StoredTile, slab: Slab, raw: np.ndarray, end: int, size: int) -> list[int]:
    """The numbers of a slab's chunks that are not followed by zeros up to the end of the page."""
    layout = tile.layout
    if layout.chunks == 1:
        return []
    if layout.compress:
        gap = min(size, round_to_pages(end)) - end
        page = tile.read_range(end // PAGE * PAGE, end % PAGE + gap) if gap else np.zeros(0)
        return [slab.first] if page[end % PAGE :].any() else []
    rows = raw.reshape(slab.size, layout.stride)
    return [slab.first + int(i) for i in np.flatnonzero(rows[:, layout.chunk_bytes + CRC :].any(1))]


def verify_descriptions(reader: CheckpointReader) -> list[str]:
    """Lines for zarr.json files that differ from the manifest, and for files of nobody."""
    texts = zarr_texts(reader.leaves)
    damages, manifest = [], read_text(reader.path, MANIFEST)
    assert manifest is not None  # `held` was opened with it
    if manifest != manifest_text(parse_json(manifest, str(join(reader.path, MANIFEST)))):
        damages.append(f"{join(reader.path, MANIFEST)}: damaged: its text is not formatted as it was written")
    for name, text in texts.items():
        folder = join(reader.arrays, name)
        try:
            matches = read_text(folder, "zarr.json") == text
        except ValueError:
            matches = False
        except OSError:
            if is_url(folder):
                raise
            matches = False
        if not matches:
            damages.append(f"{join(folder, 'zarr.json')}: damaged or missing; its leaves can still be restored")
    expected = {f"{name}/zarr.json".lstrip("/") for name in texts}
    expected |= {leaf.layout.file(name, tile) for name, leaf in reader.leaves.items() for tile in leaf.layout.tiles()}
    actual = Objects(str(reader.arrays)).names() if is_url(reader.arrays) else files_below(Path(reader.arrays))
    return damages + [
        f"{join(reader.arrays, name)}: does not belong to the checkpoint"
        for name in sorted(actual)
        if name not in expected
    ]


def files_below(folder: Path) -> list[str]:
    """The names of all files below a folder."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


class StoreSnapshot(NamedTuple):
    """The last complete step of a store, read only; the reading process does not need the run's mesh."""

    folder: Path
    record: StepManifest
    ranks: int
    sizes: dict[str, int]  # sizes of its mesh axes
    stage: int | None  # its plan's ZeRO stage
    pipeline: Pipeline | None  # its plan's, None without pp
    leaves: dict[str, Any]  # name -> shape of the largest shard, dtype, stacked, and how it is cut if unevenly
    slots: int
    verify: bool  # whether its chunks have checksums

    def holds(self, prefix: str) -> bool:
        """Whether there are leaves under `prefix`."""
        return any(name.startswith(prefix) for name in self.leaves)

    def leaf(
        self,
        name: str,
        shape: tuple[int, ...],
        spec: Any,
        start: tuple[int, ...] | None = None,
        size: tuple[int, ...] | None = None,
    ) -> Tensor:
        """The elements [start, start + size) of a leaf, from the ranks' shards; raises Damaged naming a chunk."""
        leaf_files = self.files(name, 0)
        start, size = start if start is not None else (0,) * len(shape), size if size is not None else shape
        out, done = torch.empty(size, dtype=leaf_files.dtype), set()
        windows = ((n, w) for n in range(self.ranks) for w in local_windows(shape, spec, fake_mesh(self.sizes, n)))
        for rank, (origin, extent, first) in windows:
            spans = [(max(a, s), min(a + e, s + n)) for a, e, s, n in zip(origin, extent, start, size)]
            if origin in done or any(low >= high for low, high in spans):
                continue  # a copy of another rank's shard, or outside of the box
            done.add(origin)
            leaf_files, sums = self.files(name, rank), self.sums(rank)
            lows, sizes = [low for low, _ in spans], [high - low for low, high in spans]
            target = narrow_box(out, [low - s for low, s in zip(lows, start)], sizes)
            inner, lead = [low - a for low, a in zip(lows, origin)], int(leaf_files.stacked)
            for i in range(sizes[0] if leaf_files.stacked else 1):
                value = self.chunk(
                    name, leaf_files, first + inner[0] + i if leaf_files.stacked else 0, rank, sums.get(name)
                )
                (target[i] if leaf_files.stacked else target).copy_(narrow_box(value, inner[lead:], sizes[lead:]))
        return out

    def sums(self, rank: int, slot: int | None = None) -> dict[str, list[int]]:
        """The checksums of a rank's chunks in a slot; {} if the run kept none."""
        if not self.verify:
            return {}
        layers = {name: self.files(name, rank).layers for name in self.leaves}
        return read_sums(self.folder, self.record.slot if slot is None else slot, rank, layers)

    def files(self, name: str, rank: int) -> LeafFiles:
        """The files of a rank's shard of a leaf."""
        entry = self.leaves[name]
        shape, cut = tuple(entry["shape"]), Spec.parse(entry["cut"]) if "cut" in entry else None
        if cut is not None:
            shape = shard_of_rank(shape, cut, fake_mesh(self.sizes, rank))
        return LeafFiles(shape, getattr(torch, entry["dtype"]), entry["stacked"], cut=cut)

    def chunk(
        self, name: str, leaf_files: LeafFiles, layer: int, rank: int, sums: list[int] | None, slot: int | None = None
    ) -> Tensor:
        """A layer of a rank's shard; raises Damaged if its checksum does not match."""
        slot = self.record.slot if slot is None else slot
        data = read_chunk(self.folder, name, leaf_files, 0 if self.fixed(name) else slot, layer, rank)
        if len(data) < leaf_files.chunk_bytes:
            raise Damaged(
                f"{self.folder}: {name}, layer {layer} of rank {rank}, has {len(data):,} of {leaf_files.chunk_bytes:,} "
                "bytes; the store is damaged"
            )
        if sums is not None:
            words = np.zeros(round_to_pages(leaf_files.chunk_bytes), np.uint8)
            words[: leaf_files.chunk_bytes] = data[: leaf_files.chunk_bytes]
            if sum_words(memoryview(words)) != sums[layer] % (1 << 64):
                raise Damaged(
                    f"{self.folder}: {name}, layer {layer} of rank {rank}, does not match its checksum; the store "
                    "is damaged"
                )
        return torch.from_numpy(data[: leaf_files.chunk_bytes].copy()).view(leaf_files.dtype).reshape(leaf_files.chunk)

    def fixed(self, name: str) -> bool:
        """Whether a leaf never changes and so has one slot."""
        return self.leaves[name]["fixed"]


def find_snapshot(folder: Path) -> StoreSnapshot | None:
    """The StoreSnapshot of the store in `folder`, or None if there is none with a complete step."""
    opened = read_store(folder) if folder.is_dir() else None
    if opened is None:
        return None
    description, record = opened
    if record.dirty:
        raise ValueError(
            f"{folder}: a step was being written over another one when its run ended; there are no weights in it"
        )
    owner, leaves = description["owner"], description["leaves"]
    return StoreSnapshot(
        folder,
        record,
        description["ranks"],
        owner.get("mesh", {}),
        owner.get("stage"),
        Pipeline(**owner["pipeline"]) if "pipeline" in owner else None,
        leaves,
        description["slots"],
        description["verify"],
    )


def verify_store(folder: Path) -> list[str]:
    """Read all chunks of the steps that the store in `folder` keeps; return a line for each that is damaged."""
    try:
        snapshot = find_snapshot(folder)
    except ValueError as error:
        return [str(error)]
    if snapshot is None:
        return [f"{folder}: holds no complete step"]
    damage = [] if snapshot.verify else [f"{folder}: was written without checksums (nvme.verify=false)"]
    for slot in (snapshot.record.slot, *snapshot.record.pinned):
        for rank in range(snapshot.ranks):
            try:
                sums = snapshot.sums(rank, slot)
            except Damaged as error:
                damage.append(str(error))
                continue
            for name in snapshot.leaves:
                leaf_files = snapshot.files(name, rank)
                for layer in range(leaf_files.layers):
                    try:
                        snapshot.chunk(name, leaf_files, layer, rank, sums.get(name), slot)
                    except (ValueError, OSError) as error:
                        damage.append(str(error).splitlines()[0])
    return damage


def read_weights(snapshot: StoreSnapshot, plan: Plan, prefix: str, dtype: torch.dtype | None = None) -> Tree:
    """The whole parameters under `prefix` (params/, master/ or opt_state/average/), in `dtype` (None: their own)."""
    specs = pytree.named_leaves(plan.params if prefix == "params/" else plan.opt)
    named = {n: snapshot.leaf(prefix + n, tuple(x.shape), specs[n]) for n, x in pytree.named_leaves(plan.like).items()}
    return pytree.from_named({n: x if dtype is None else x.to(dtype) for n, x in named.items()}, plan.like)


def write_params(read: Callable[[str], Tensor], plan: Plan, nvme: Nvme) -> Tree:
    """Write the parameters `read(name)` to a new store in `nvme`, one leaf at a time; returns their tree."""
    store = None
    for name, like in pytree.named_leaves(plan.like).items():
        value = read(name)
        if store is None:
            leaf_files = {
                n: LeafFiles(tuple(x.shape), value.dtype, shard_dim(n) == 1)
                for n, x in pytree.named_leaves(plan.like).items()
            }
            store = nvme.open(leaf_files, one_process())
            store.begin()
        store.write_leaf(name, value)
        store.flush()
        del value, like
    assert store is not None  # a model has leaves
    store.commit(0, {})
    store.finish()
    return pytree.map_named(lambda name, _: DiskTensor(store, name), plan.like)


def largest_group_bytes(plan: Plan, itemsize: int) -> int:
    """The bytes of the largest group of a model's leaves: the embedding, a layer or the head."""
    sizes: dict[str, int] = {}
    for name, leaf in pytree.named_leaves(plan.like).items():
        numel = math.prod(leaf.shape[1:]) if shard_dim(name) else leaf.numel()
        sizes[name.split("/")[0]] = sizes.get(name.split("/")[0], 0) + round_to_pages(numel * itemsize)
    return max(sizes.values())
