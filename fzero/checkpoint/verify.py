"""Verify a checkpoint: compare every byte of its files with its required value."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from fzero.checkpoint import directory
from fzero.checkpoint.layout import CRC, Index, Slab, flat_index, grid_positions, slab_digest, slabs
from fzero.checkpoint.manifest import MANIFEST, Folder, join, manifest_text
from fzero.checkpoint.part_storage import as_tensor
from fzero.checkpoint.reader import (
    RUN,
    THREADS,
    CheckpointReader,
    chunk_name,
    file_size,
    open_checkpoint,
    part_name,
    part_path,
    read_header,
    read_range,
    read_verified,
)
from fzero.checkpoint.zarr import zarr_texts
from fzero.core.arguments import checked
from fzero.core.foreign import parse_json
from fzero.core.object_store import Objects
from fzero.core.storage import PAGE, Damaged, is_url, read_text
from fzero.offload.buffer_pool import round_to_pages


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
    found = directory.newest_sound(checkpoint_dir, expect_sound)
    assert found.path is not None  # else it has raised
    return found.path, found.damaged


@checked()
def expect_sound(path: Folder) -> None:
    """Raise Damaged, naming the first damage that `verify` finds, unless the checkpoint at `path` is sound.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> checkpoint.expect_sound(checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)}, step=10))
    """
    found = verify(path)
    if found:
        raise Damaged(found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""))


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
        held = open_checkpoint(path)
    except ValueError as error:
        return [str(error)]
    found: list[str] = []
    with ThreadPoolExecutor(THREADS, "fzero-verify") as pool:
        tasks = [
            (name, [pool.submit(verify_part, held, name, part) for part in leaf.layout.parts()])
            for name, leaf in held.leaves.items()
        ]
        for name, parts in tasks:
            results = [task.result() for task in parts]
            lines = [line for part_lines, _ in results for line in part_lines]
            total = sum(value for _, value in results) % (1 << 64)
            if not lines and f"{total:016x}" != held.leaves[name].digest:
                lines = [
                    f"leaf {name} is damaged: its digest is {total:016x} and the manifest has "
                    f"{held.leaves[name].digest}"
                ]
            found += lines
    held.close()
    return found + verify_descriptions(held)


def verify_part(held: CheckpointReader, name: str, part: Index) -> tuple[list[str], int]:
    """(lines of damage in a part, the digest of its elements)."""
    layout, found, total = held.leaves[name].layout, [], 0
    try:
        table, _ = read_header(held, name, part)
        size = file_size(held, name, part_name(layout, name, part))
        work = list(slabs(layout, 0 if layout.compress else RUN))
        while work:
            slab = work.pop(0)
            try:
                raw = read_verified(held, name, part, slab)
            except Damaged as error:
                if slab.size == 1:
                    found.append(str(error))
                else:
                    work = [*split_slab(slab, layout.counts), *work]
                continue
            total += slab_digest(as_tensor(raw), layout, part, slab)
            for number in find_nonzero_padding(held, name, part, slab, raw, int(table[slab.first].sum()), size):
                at = f"{chunk_name(layout, part, number)} in {part_path(held, name, part)}"
                found.append(f"leaf {name} is damaged: the bytes after chunk {at}")
        written = int(table.sum(1).max()) if layout.compress else layout.file_bytes
        if size != written:
            found.append(
                f"leaf {name} is damaged: {part_path(held, name, part)} has {size:,} bytes, and {written:,} "
                "were written"
            )
    except Damaged as error:
        found.append(str(error))
    return found, total % (1 << 64)


def split_slab(slab: Slab, counts: Index) -> list[Slab]:
    """Split a slab into slabs of one chunk each."""
    places = (tuple(a + b for a, b in zip(slab.at, place)) for place in grid_positions(slab.counts))
    return [Slab(flat_index(place, counts), place, (1,) * len(counts)) for place in places]


def find_nonzero_padding(
    held: CheckpointReader, name: str, part: Index, slab: Slab, raw: np.ndarray, end: int, size: int
) -> list[int]:
    """The numbers of a slab's chunks that are not followed by zeros up to the end of the page.

    end: where the slab's first chunk ends in the file. size: the bytes of the file.
    """
    layout = held.leaves[name].layout
    if layout.chunks == 1:
        return []
    if layout.compress:
        gap = min(size, round_to_pages(end)) - end
        page = (
            read_range(held, name, part_name(layout, name, part), end // PAGE * PAGE, end % PAGE + gap)
            if gap
            else np.zeros(0)
        )
        return [slab.first] if page[end % PAGE :].any() else []
    rows = raw.reshape(slab.size, layout.stride)
    return [slab.first + int(i) for i in np.flatnonzero(rows[:, layout.chunk_bytes + CRC :].any(1))]


def verify_descriptions(held: CheckpointReader) -> list[str]:
    """Lines for zarr.json files that differ from the manifest, and for files that do not belong to the checkpoint."""
    texts = zarr_texts(held.leaves)
    found, manifest = [], read_text(held.path, MANIFEST)
    assert manifest is not None  # `held` was opened with it
    if manifest != manifest_text(parse_json(manifest, str(join(held.path, MANIFEST)))):
        found.append(f"{join(held.path, MANIFEST)}: damaged: its text is not formatted as it was written")
    for name, text in texts.items():
        folder = join(held.arrays, name)
        try:
            same = read_text(folder, "zarr.json") == text
        except ValueError:
            same = False
        except OSError:
            if is_url(folder):
                raise
            same = False
        if not same:
            found.append(f"{join(folder, 'zarr.json')}: damaged or missing; its leaves can still be restored")
    known = {f"{name}/zarr.json".lstrip("/") for name in texts}
    known |= {part_name(leaf.layout, name, part) for name, leaf in held.leaves.items() for part in leaf.layout.parts()}
    there = Objects(str(held.arrays)).names() if is_url(held.arrays) else files_below(Path(held.arrays))
    return found + [
        f"{join(held.arrays, name)}: does not belong to the checkpoint" for name in sorted(there) if name not in known
    ]


def files_below(folder: Path) -> list[str]:
    """The names of all files below a folder."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
