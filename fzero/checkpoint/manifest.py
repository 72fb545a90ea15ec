"""The manifest of a checkpoint: its rename is the commit. And a zarr.json for each leaf and group of leaves."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fzero
from fzero.checkpoint.layout import ZARR, ChunkLayout, array_json, group_json
from fzero.comm.ledger import expect_mesh
from fzero.core.arguments import checked
from fzero.core.files import leaf_fault, make_folder, writing
from fzero.core.storage import Damaged, Folder, is_url, join, read_text, sync_file_system, write_text
from fzero.core.text_parsing import expect_entries, parse_json, short

FORMAT, VERSION = "fzero-checkpoint", 2


MANIFEST, ARRAYS = "manifest.json", "arrays"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ZARR}

MOST_DIMS = 32  # a bound for damaged manifests
MANIFEST_ENTRIES = {"step": int, "versions": dict, "mesh": dict, "arrays": str, "leaves": dict}
LEAF = {"shape": list, "dtype": str, "spec": str, "grid": list, "chunk": list, "compress": str, "digest": str}
LEAF |= {"sums": list}


class Leaf(NamedTuple):
    """A leaf of a checkpoint, as the manifest describes it: shape, dtype, chunk layout, spec, digest and checksums.

    >>> import tempfile
    >>> path = fzero.checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(4, 2)}, step=10)
    >>> reader = fzero.checkpoint.open_checkpoint(path)
    >>> leaf = reader.leaves["w"]
    >>> leaf.shape, leaf.dtype, leaf.spec
    ((4, 2), torch.float32, '[]')
    >>> reader.close()
    """

    layout: ChunkLayout
    spec: str  # the Spec by which the saving run sharded it
    digest: str  # of its elements, the same on every mesh: see fzero/core/digest.py
    sums: list[int]  # of each part: the crc32c of its header, or of its chunk

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole leaf."""
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return self.layout.dtype

    def table(self) -> dict[str, Any]:
        """The leaf's entry in the manifest, as a JSON value."""
        layout = self.layout
        return {
            "shape": list(layout.shape),
            "dtype": str(layout.dtype).removeprefix("torch."),
            "spec": self.spec,
            "grid": list(layout.grid),
            "chunk": list(layout.chunk),
            "compress": layout.compress,
            "digest": self.digest,
            "sums": self.sums,
        }


def parse_leaf(table: dict[str, Any]) -> Leaf:
    """The Leaf of an entry of a manifest; raises ValueError for one that describes no leaf."""
    expect_entries(table, LEAF, "the leaf")
    shape, grid, chunk = (table[key] for key in ("shape", "grid", "chunk"))
    dtype = DTYPES.get(table["dtype"])
    if dtype is None:
        raise ValueError(f"dtype is {short(table['dtype'])}")
    if not all(type(n) is int and 0 <= n < 1 << 60 for n in (*shape, *grid, *chunk)):
        raise ValueError(f"its sizes are {short([shape, grid, chunk])}")
    if not all(type(n) is int and 0 <= n < 1 << 32 for n in table["sums"]):
        raise ValueError("its sums are not checksums")
    divided = len(shape) == len(grid) == len(chunk) <= MOST_DIMS and all(map(are_cuts, shape, grid, chunk))
    if not divided or math.prod(shape) * dtype.itemsize >= 1 << 60:
        raise ValueError(f"grid {short(grid)} and chunk {short(chunk)} do not divide the shape {short(shape)}")
    parts = math.prod(grid) if math.prod(shape) else 0
    if parts != len(table["sums"]) or table["compress"] not in ("", "zstd"):
        raise ValueError(f"it has {len(table['sums'])} sums of {parts} parts, and compress={short(table['compress'])}")
    layout = ChunkLayout(tuple(table["shape"]), dtype, tuple(table["grid"]), tuple(table["chunk"]), table["compress"])
    return Leaf(layout, table["spec"], table["digest"], table["sums"])


def are_cuts(size: int, parts: int, chunk: int) -> bool:
    """Whether a dim is cut into these parts, the last maybe smaller, and these into chunks."""
    tile = -(-size // parts) if parts else 0
    is_covered = parts > 0 and (size % parts == 0 or (parts - 1) * tile < size)
    return is_covered and (tile % chunk == 0 if chunk else size == 0)


def write_manifest(
    path: Folder, arrays: str, leaves: dict[str, Leaf], *, step: int, config: Any, mesh: dict[str, int]
) -> None:
    """Write the manifest of the checkpoint at `path`, durably, which completes it; raises ValueError for a bad one."""
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
    text = manifest_text({**body, "sha256": _digest(body)})
    _expect_body(parse_json(text, "the manifest"))
    write_text(path, MANIFEST, text)


def manifest_text(body: dict[str, Any]) -> str:
    """Format a manifest, with its checksum."""
    return json.dumps(body, indent=1)


@checked()
def read_manifest(path: Folder) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`, verified: a dict of step, config, versions, mesh, and leaves by name.

    Raises ValueError naming the file if it is missing or of another format or version, and Damaged if its checksum does
    not agree.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> path = checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)}, step=7)
    >>> manifest = checkpoint.read_manifest(path)
    >>> manifest["step"], list(manifest["leaves"])
    (7, ['w'])
    """
    file = join(path, MANIFEST)
    try:
        text = read_text(path, MANIFEST)
    except ValueError as error:
        if is_url(path) and not str(error).startswith(str(file)):
            raise  # of the object store
        raise Damaged(f"{file}: damaged: {str(error).removeprefix(f'{file}: ')}") from None
    if text is None:
        raise ValueError(f"{file}: no such file; {path} is not a complete checkpoint")
    try:
        body = parse_json(text, "its text")
    except ValueError as error:
        raise Damaged(f"{file}: damaged: not a JSON object ({error})") from None
    digest = body.pop("sha256", None)
    if body.get("format") != FORMAT or digest != _digest(body):
        raise Damaged(f"{file}: damaged, or not a manifest of fzero: its checksum does not agree with its content")
    if body.get("version") != VERSION:
        raise ValueError(
            f"{file}: version {short(body.get('version'))}; this fzero ({fzero.__version__}) reads version {VERSION}"
        )
    try:
        _expect_body(body)
    except ValueError as error:
        raise Damaged(f"{file}: damaged, or not written by fzero: {error}") from None
    return body


def _expect_body(body: dict[str, Any]) -> None:
    """Raise ValueError for what no manifest may say."""
    expect_entries(body, MANIFEST_ENTRIES, "it")
    if not re.fullmatch(rf"{ARRAYS}(-\d+)?", body["arrays"]) or body["step"] < 0:
        raise ValueError(f"its folder of arrays is {short(body['arrays'])} and its step {body['step']}")
    if fault := leaf_fault(body["leaves"]):
        raise ValueError(fault)
    if "config" not in body:
        raise ValueError("its config is missing")
    expect_mesh(body["mesh"])
    for name, table in body["leaves"].items():
        expect_entries(body["leaves"], {name: dict}, "its leaves")
        try:
            parse_leaf(table)
        except ValueError as error:
            raise ValueError(f"leaf {short(name)}: {error}") from None


def _digest(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def zarr_texts(leaves: dict[str, Leaf]) -> dict[str, str]:
    """{name: text of its zarr.json} of each leaf and of each group of leaves; the outermost is ""."""
    texts = {name: array_json(leaf.layout, {"spec": leaf.spec, "digest": leaf.digest}) for name, leaf in leaves.items()}
    groups = {"/".join(parts[:n]) for name in leaves for parts in [name.split("/")] for n in range(len(parts))} | {""}
    return texts | dict.fromkeys(groups - texts.keys(), group_json())


def write_descriptions(arrays: Folder, leaves: dict[str, Leaf], pool: ThreadPoolExecutor) -> None:
    """Write the zarr.json of every leaf and group, durably, and remove files that belong to none of them."""
    texts = zarr_texts(leaves)
    if is_url(arrays):
        places = {name: join(arrays, name) for name in texts}
        for task in [pool.submit(write_text, places[name], "zarr.json", text) for name, text in texts.items()]:
            task.result()
        return

    parent, folder_name = Path(arrays).parent, Path(arrays).name

    def write_json(name: str) -> None:
        folder = make_folder(parent, folder_name, *filter(None, name.split("/")))
        with writing(folder / "zarr.json", "replace") as f:
            f.write(texts[name].encode())

    run_all(pool, write_json, texts)
    expected = {
        Path(arrays, leaf.layout.file(name, tile)) for name, leaf in leaves.items() for tile in leaf.layout.tiles()
    }
    expected |= {Path(arrays, name, "zarr.json") for name in texts}
    for folder, _, files in os.walk(arrays, topdown=False):
        for file in files:
            if Path(folder, file) not in expected:
                Path(folder, file).unlink()  # left over from the removed checkpoint that had these files
        if not os.listdir(folder):
            os.rmdir(folder)
    sync_file_system(Path(arrays))


def run_all(pool: ThreadPoolExecutor, fn: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Call `fn` with each by the threads of `pool`; after all calls have ended, raise the first error."""
    tasks = [pool.submit(fn, item) for item in items]
    wait(tasks)
    for task in tasks:
        task.result()
