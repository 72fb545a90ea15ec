"""Verify a checkpoint: compare every byte of its files with its required value."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from fzero.checkpoint import directory
from fzero.checkpoint.layout import CRC, Index, Slab, flat_index, grid_positions, slab_digest, slabs
from fzero.checkpoint.manifest import MANIFEST, manifest_text, zarr_texts
from fzero.checkpoint.reader import RUN, THREADS, CheckpointReader, StoredTile, open_checkpoint
from fzero.checkpoint.save_state import as_tensor
from fzero.core.arguments import checked
from fzero.core.host_memory import round_to_pages
from fzero.core.storage import PAGE, Damaged, Folder, Objects, is_url, join, read_text
from fzero.core.text_parsing import parse_json


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
