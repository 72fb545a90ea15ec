"""Reading checkpoints: slices of leaves, of the chunks that they are in and no others, each chunk compared with its checksum."""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from crc32c import crc32c
from torch import Tensor

from fzero import pytree
from fzero.checkpoint.files import Reading, tensor_of, words
from fzero.checkpoint.home import MANIFEST, Leaf, Place, as_text, folder_of, join, latest, leaf_of, manifest, steps
from fzero.checkpoint.layout import CRC, Index, Layout, array_json, group_json
from fzero.digest import digest
from fzero.offload.chunks import Damaged
from fzero.offload.folder import is_url, read_text
from fzero.offload.objects import Objects
from fzero.pytree import Tree
from fzero.sharding import Mesh, Spec, one_process
from fzero.sharding.draw import window

RUN = 8 << 20  # bytes of neighbouring chunks that are read at a time
THREADS = 4


class Opened:
    """A checkpoint: its checked manifest (`step`, `config`, `mesh`, `leaves`), and its leaves to `read`. See `opened`."""

    def __init__(self, path: Place) -> None:
        record = manifest(path)
        self.path, self.step, self.config, self.mesh = path, record["step"], record["config"], record["mesh"]
        self.leaves: dict[str, Leaf] = {name: leaf_of(table) for name, table in record["leaves"].items()}
        self.arrays = join(path, record["arrays"])
        self.files = Reading(self.arrays)
        self.headers: dict[tuple[str, Index], tuple[np.ndarray, np.ndarray]] = {}
        self.lock = threading.Lock()

    @property
    def read_bytes(self) -> int:
        """The bytes that were read so far."""
        return self.files.read_bytes

    def read(self, name: str, start: Index | None = None, size: Index | None = None, *, out: Tensor | None = None) -> Tensor:
        """The elements [start, start + size) of a leaf (None: all), verified, in memory of their own or in `out`.

        Raises ValueError where the checkpoint has no such leaf or slice, Damaged naming leaf, chunk and file where it is not what was
        written.
        """
        box = self.box(name, start, size, out)
        with ThreadPoolExecutor(THREADS, "fzero-load") as pool:
            fetch(self, [box], pool)
        return box.out

    def box(self, name: str, start: Index | None = None, size: Index | None = None, out: Tensor | None = None) -> Box:
        """A slice to read, with the memory that it goes to."""
        if name not in self.leaves:
            raise ValueError(f"{self.path}: has no leaf {name}{pytree.nearest(name, self.leaves)}")
        leaf = self.leaves[name]
        start = (0,) * len(leaf.shape) if start is None else tuple(start)
        size = tuple(n - at for n, at in zip(leaf.shape, start)) if size is None else tuple(size)
        fits = len(start) == len(size) == len(leaf.shape)
        if not fits or any(not 0 <= at <= at + n <= whole for at, n, whole in zip(start, size, leaf.shape)):
            raise ValueError(f"{self.path}: {name} has shape {list(leaf.shape)}, and no slice of {list(size)} from {list(start)} on")
        return Box(name, start, size, torch.empty(size, dtype=leaf.dtype) if out is None else out)

    def close(self) -> None:
        """Close its files."""
        self.files.close()


class Box(NamedTuple):
    """A slice of a leaf, and the tensor that it is read into."""

    name: str
    start: Index
    size: Index
    out: Tensor


def opened(path: Place) -> Opened:
    """The checkpoint at `path`, to read leaves and slices of. Raises ValueError where it is not complete, or its manifest is damaged."""
    return Opened(path)


def fetch(held: Opened, boxes: list[Box], pool: ThreadPoolExecutor) -> None:
    """Fill the boxes, each with what it needs and no more than the chunks that this is in."""
    needs = [(box, part, numbers) for box in boxes for part, numbers in wanted(held.leaves[box.name].layout, box.start, box.size)]
    # The small reads of headers go before the large ones, which would wait for them.
    tasks = [pool.submit(head_of, held, box.name, part) for box, part, _ in needs]
    for box, part, numbers in needs:
        for run in runs(held.leaves[box.name].layout, numbers):
            tasks.append(pool.submit(read_run, held, box, part, run))
    failures = [error for task in tasks if (error := task.exception()) is not None]
    if failures:
        raise failures[0]


def wanted(layout: Layout, start: Index, size: Index) -> Iterator[tuple[Index, list[int]]]:
    """(part, the numbers of its chunks) of every part that holds elements of a box."""
    if not all(size):
        return
    spans = [range(at // n, (at + k - 1) // n + 1) for at, k, n in zip(start, size, layout.part)]
    for part in itertools.product(*spans):
        inner = []
        for p, n, c, at, k in zip(part, layout.part, layout.chunk, start, size):
            low, high = max(at - p * n, 0), min(at + k - p * n, n)
            inner.append(range(low // c, (high - 1) // c + 1))
        places = itertools.product(*inner)
        yield part, [int(np.ravel_multi_index(place, layout.counts)) if place else 0 for place in places]


def runs(layout: Layout, numbers: list[int]) -> Iterator[list[int]]:
    """The numbers in stretches of neighbours that are read at a time."""
    run: list[int] = []
    for number in numbers:
        if run and (number != run[-1] + 1 or (len(run) + 1) * layout.stride > RUN or layout.compress):
            yield run
            run = []
        run.append(number)
    if run:
        yield run


def read_run(held: Opened, box: Box, part: Index, numbers: list[int]) -> None:
    """Read some neighbouring chunks, verify them, and put what a box wants of them in their places."""
    layout = held.leaves[box.name].layout
    table, sums = head_of(held, box.name, part)
    key, begin = file_of(layout, box.name, part), int(table[numbers[0], 0])
    raw = get(held, box.name, key, begin, int(table[numbers[-1]].sum()) - begin)
    for number in numbers:
        at, size = int(table[number, 0]) - begin, int(table[number, 1])
        data = verified(held, box.name, part, number, raw[at : at + size], int(sums[number]))
        place_of = np.unravel_index(number, layout.counts) if layout.counts else ()
        first = tuple(int(p * n + i * c) for p, n, i, c in zip(part, layout.part, place_of, layout.chunk))
        chunk, target = tensor_of(data, layout.dtype, layout.chunk), box.out
        for dim, (f, c, at, k) in enumerate(zip(first, layout.chunk, box.start, box.size)):
            low, high = max(f, at), min(f + c, at + k)
            chunk, target = chunk.narrow(dim, low - f, high - low), target.narrow(dim, low - at, high - low)
        np.copyto(words(target), words(chunk))  # a tensor's copy would start threads of its own in each of ours


def verified(held: Opened, name: str, part: Index, number: int, raw: np.ndarray, crc: int) -> np.ndarray:
    """The elements' bytes of a chunk with its crc32c behind it; raises Damaged where they are not what was written."""
    layout = held.leaves[name].layout
    data, behind = raw[:-CRC], int.from_bytes(raw[-CRC:].tobytes(), "little")
    if crc32c(memoryview(data)) != crc or behind != crc:
        raise Damaged(
            f"leaf {name} is damaged: chunk {chunk_name(layout, part, number)} in {where(held, name, part)} is not what was written"
        )
    if not layout.compress:
        return data
    import zstandard

    return np.frombuffer(zstandard.ZstdDecompressor().decompress(memoryview(data), layout.chunk_bytes), np.uint8)


def head_of(held: Opened, name: str, part: Index) -> tuple[np.ndarray, np.ndarray]:
    """(offset and bytes of every chunk, their crc32c) of a part, from its verified header; it is read once."""
    with held.lock:
        if (name, part) in held.headers:
            return held.headers[name, part]
    leaf = held.leaves[name]
    layout, crc, key = leaf.layout, leaf.sums[leaf.layout.number(part)], file_of(leaf.layout, name, part)
    n = layout.chunks
    if n == 1:
        size = layout.file_bytes if not layout.compress else size_of(held, name, key)
        found = np.array([[0, size]], "<u8"), np.array([crc], "<u4")
    else:
        raw = get(held, name, key, 0, layout.header)
        if crc32c(memoryview(raw)) != crc:
            raise Damaged(f"leaf {name} is damaged: the index of {where(held, name, part)} is not what was written")
        found = raw[: 16 * n].copy().view("<u8").reshape(n, 2), raw[16 * n + CRC : 16 * n + CRC + 4 * n].copy().view("<u4")
    with held.lock:
        held.headers[name, part] = found
    return found


def get(held: Opened, name: str, key: str, offset: int, size: int) -> np.ndarray:
    """Bytes of a file; raises Damaged where it is missing or ends too early."""
    try:
        return held.files.get(key, offset, size)
    except FileNotFoundError:
        raise Damaged(f"leaf {name} is damaged: {join(held.arrays, key)} is missing") from None
    except EOFError as error:
        raise Damaged(f"leaf {name} is damaged: {join(held.arrays, key)} ends after {error.args[0]:,} bytes") from None
    except OSError as error:
        if held.files.url:
            raise  # the network's failure is no damage
        raise Damaged(f"leaf {name} cannot be read: {join(held.arrays, key)}: {error.strerror or error}") from None


def size_of(held: Opened, name: str, key: str) -> int:
    """The bytes of a file; raises Damaged where it is missing."""
    try:
        return held.files.size(key)
    except FileNotFoundError:
        raise Damaged(f"leaf {name} is damaged: {join(held.arrays, key)} is missing") from None


def file_of(layout: Layout, name: str, part: Index) -> str:
    """A part's file, below the folder of arrays."""
    return f"{name}/{layout.key(part)}"


def where(held: Opened, name: str, part: Index) -> Place:
    """A part's file."""
    return join(held.arrays, file_of(held.leaves[name].layout, name, part))


def chunk_name(layout: Layout, part: Index, number: int) -> str:
    """The place of a chunk among all of its leaf, as 0,3,1."""
    place = np.unravel_index(number, layout.counts) if layout.counts else ()
    return ",".join(str(int(p * k + i)) for p, k, i in zip(part, layout.counts, place)) or "0"


# ---- trees ----


def restore(
    path: Place,
    like: Tree,
    *,
    under: str = "",
    specs: Tree | None = None,
    mesh: Mesh | None = None,
    keep: str = "",
    drop: str = "",
    out: Tree | None = None,
) -> Tree:
    """The tree of the checkpoint at `path`, in the containers of `like`: this rank's shards by `specs` on `mesh` (None: whole leaves).

    like: a tree of tensors of which names, shapes and dtypes are compared; they may be on the meta device (then leaves go to the CPU).
    A rank reads the chunks that its slices are in, and compares each with its checksum. All of `like` must be in the checkpoint and all
    of the checkpoint in `like`, except
    under: take the part of the state below this name only: `restore(path, params, under="params")` gives the weights;
    keep: leaves whose name this regular expression matches whole are taken from `like` as they are, whether or not the checkpoint has them;
    drop: leaves of the checkpoint whose name this matches are passed over.
    out: a tree of tensors of the CPU to fill, and to return. Else the leaves own their memory.
    Raises ValueError naming the leaves that are missing, extra or of another shape or dtype, and Damaged for the leaf, chunk and file that
    are not what was written.
    """
    held = opened(path)
    mesh, prefix = one_process() if mesh is None else mesh, f"{under}/" if under else ""
    leaves, spec_of = pytree.named_leaves(like), pytree.named_leaves(specs) if specs is not None else {}
    outs = pytree.named_leaves(out) if out is not None else {}
    kept = {name for name in leaves if keep and re.fullmatch(keep, name)}
    wanted_leaves = {prefix + name: leaf for name, leaf in leaves.items() if name not in kept}
    there = {name: leaf for name, leaf in held.leaves.items() if name.startswith(prefix)}
    passed = {name for name in there if name.removeprefix(prefix) in kept or (drop and re.fullmatch(drop, name.removeprefix(prefix)))}
    boxes: dict[str, Box] = {}
    windows: dict[str, tuple[Index, Index]] = {}
    for name in wanted_leaves.keys() & there.keys():
        spec = spec_of.get(name.removeprefix(prefix), Spec())
        windows[name] = window(there[name].shape, spec, mesh) if divides(there[name].shape, spec, mesh) else ((), there[name].shape)
    expect(path, wanted_leaves, {name: leaf for name, leaf in there.items() if name not in passed}, windows)
    try:
        for name in wanted_leaves:
            boxes[name] = held.box(name, *windows[name], outs.get(name.removeprefix(prefix)))
        with ThreadPoolExecutor(THREADS, "fzero-load") as pool:
            fetch(held, list(boxes.values()), pool)
    finally:
        held.close()
    done = {name.removeprefix(prefix): box.out for name, box in boxes.items()}
    for name, leaf in leaves.items():
        if name in kept:
            done[name] = leaf
        elif leaf.device.type not in ("meta", "cpu"):
            done[name] = done[name].to(leaf.device)
    return pytree.from_named(done, like)


def restore_leaves(path: Place, select: Callable[[str], bool]) -> dict[str, Tensor]:
    """`{name: leaf}` of the leaves of the checkpoint at `path` whose name `select` is true of, checked; ValueError where it is of none."""
    held = opened(path)
    chosen = [name for name in held.leaves if select(name)]
    if not chosen:
        raise ValueError(f"{path}: none of its leaves is selected; they are {some(list(held.leaves))}")
    boxes = [held.box(name) for name in chosen]
    with ThreadPoolExecutor(THREADS, "fzero-load") as pool:
        fetch(held, boxes, pool)
    held.close()
    return {box.name: box.out for box in boxes}


def divides(shape: Index, spec: Spec, mesh: Mesh) -> bool:
    """Whether a leaf of this shape can be sharded so."""
    parts = [math.prod(mesh[axis].size for axis in axes) for axes in spec.dims]
    return len(parts) <= len(shape) and all(n % k == 0 for n, k in zip(shape, parts))


def expect(path: Place, wanted: dict[str, Any], held: dict[str, Leaf], windows: dict[str, tuple[Index, Index]]) -> None:
    """Raise ValueError naming the leaves that are missing, extra, or of another shape or dtype."""
    missing = [name for name in wanted if name not in held]
    extra = [name for name in held if name not in wanted]
    shapes, dtypes = [], []
    for name, leaf in wanted.items():
        if name not in held:
            continue
        if tuple(windows[name][1]) != tuple(leaf.shape):
            mine = f", this rank's part {list(windows[name][1])}" if tuple(windows[name][1]) != held[name].shape else ""
            shapes.append(f"{name} {list(held[name].shape)}{mine} (wanted {list(leaf.shape)})")
        if held[name].dtype != leaf.dtype:
            dtypes.append(f"{name} {dtype_name(held[name].dtype)} (wanted {dtype_name(leaf.dtype)})")
    groups = {"missing": missing, "extra": extra, "of another shape": shapes, "of another dtype": dtypes}
    said = [f"{what}: {some(group)}" for what, group in groups.items() if group]
    if said:
        raise ValueError(f"{path}: the checkpoint's leaves are not those of the tree; {'; '.join(said)}")


def some(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def dtype_name(dtype: torch.dtype) -> str:
    """float32 and not torch.float32."""
    return str(dtype).removeprefix("torch.")


# ---- soundness ----


def newest_sound(home: Place) -> tuple[Place, list[tuple[Place, str]]]:
    """(the checkpoint of the highest step in `home` that is sound, the later ones with what is damaged in each).

    Reads them whole. Raises ValueError where there is none, or all are damaged.
    """
    latest(home)
    damaged: list[tuple[Place, str]] = []
    for step in reversed(steps(home)):
        path = folder_of(home, step)
        found = verify(path)
        if not found:
            return path, damaged
        damaged.append((path, found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")))
    raise ValueError(f"{home}: every checkpoint is damaged: {'; '.join(reason for _, reason in damaged)}")


def verify(path: Place) -> list[str]:
    """What is damaged in a checkpoint, one line per chunk or file, by name: [] for a sound one.

    Reads it whole, a few chunks in memory at a time. Every byte of its files is compared with something: chunks with their checksums, what
    is between them with zeros, descriptions with what the manifest implies, each leaf with its digest.
    """
    try:
        held = opened(path)
    except ValueError as error:
        return [str(error)]
    found: list[str] = []
    with ThreadPoolExecutor(THREADS, "fzero-verify") as pool:
        tasks = [(name, [pool.submit(verify_part, held, name, part) for part in leaf.layout.parts()]) for name, leaf in held.leaves.items()]
        for name, parts in tasks:
            results = [task.result() for task in parts]
            lines = [line for said, _ in results for line in said]
            total = sum(value for _, value in results) % (1 << 64)
            if not lines and f"{total:016x}" != held.leaves[name].digest:
                lines = [f"leaf {name} is damaged: its digest is {total:016x} and the manifest has {held.leaves[name].digest}"]
            found += lines
    held.close()
    return found + verify_descriptions(held)


def verify_part(held: Opened, name: str, part: Index) -> tuple[list[str], int]:
    """(what is damaged in a part, the digest of its elements)."""
    leaf, found, total, end = held.leaves[name], [], 0, 0
    layout = leaf.layout
    key = file_of(layout, name, part)
    try:
        table, sums = head_of(held, name, part)
        size = size_of(held, name, key)
        for number in range(layout.chunks):
            offset, n = (int(x) for x in table[number])
            end = max(end, offset + n)
            page = min(size, -(-(offset + n) // 4096) * 4096) - offset
            raw = get(held, name, key, offset, max(n, page))
            if raw[n:].any():
                found.append(
                    f"leaf {name} is damaged: what lies behind chunk {chunk_name(layout, part, number)} in {where(held, name, part)}"
                )
            try:
                data = verified(held, name, part, number, raw[:n], int(sums[number]))
            except Damaged as error:
                found.append(str(error))
                continue
            place_of = np.unravel_index(number, layout.counts) if layout.counts else ()
            start = tuple(int(p * w + i * c) for p, w, i, c in zip(part, layout.part, place_of, layout.chunk))
            total += digest(tensor_of(data, layout.dtype, layout.chunk), layout.shape, start)
        written = end if layout.chunks == 1 or layout.compress else layout.file_bytes
        if size != written:
            found.append(f"leaf {name} is damaged: {where(held, name, part)} has {size:,} bytes, and {written:,} were written")
    except Damaged as error:
        found.append(str(error))
    return found, total % (1 << 64)


def verify_descriptions(held: Opened) -> list[str]:
    """The zarr.json files that are not what they should be, and files that should not be there."""
    texts = {name: array_json(leaf.layout, {"spec": leaf.spec, "digest": leaf.digest}) for name, leaf in held.leaves.items()}
    groups = {"/".join(parts[:n]) for name in held.leaves for parts in [name.split("/")] for n in range(len(parts))}
    texts |= dict.fromkeys(groups - texts.keys(), group_json())
    found, said = [], read_text(held.path, MANIFEST)
    if said != as_text(json.loads(said)):
        found.append(f"{join(held.path, MANIFEST)}: damaged: it says what it should in another text")
    for name, text in texts.items():
        place = join(held.arrays, *name.split("/")) if name else held.arrays
        try:
            same = read_text(place, "zarr.json") == text
        except UnicodeDecodeError:
            same = False
        except OSError:
            if is_url(place):
                raise
            same = False
        if not same:
            found.append(f"{join(place, 'zarr.json')}: damaged or missing; what it describes can still be restored")
    known = {f"{name}/zarr.json".lstrip("/") for name in texts}
    known |= {file_of(leaf.layout, name, part) for name, leaf in held.leaves.items() for part in leaf.layout.parts()}
    there = Objects(str(held.arrays)).names() if is_url(held.arrays) else files_below(Path(held.arrays))
    return found + [f"{join(held.arrays, name)}: is none of the checkpoint's files" for name in sorted(there) if name not in known]


def files_below(folder: Path) -> list[str]:
    """The names of the files in a folder and those below it."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def size_bytes(held: Opened) -> int:
    """The bytes of all elements of a checkpoint."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in held.leaves.values())
