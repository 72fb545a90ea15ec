"""The manifest of a checkpoint: its rename is the commit. And a zarr.json for each leaf and group of leaves.

The sources of a leaf to save: a tensor in memory, a leaf on a disk, or a function that makes it.

Also values beside a state, of which every rank has its own, such as where its data loader is: a leaf uint8 [R, N] with
a row for each data rank, or one row where all are equal.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fzero
from fzero.checkpoint.layout import ZARR, ChunkLayout, array_json, group_json
from fzero.comm.axes import expect_mesh
from fzero.comm.rank_tables import device_of, gather_rows
from fzero.core import pytree, torch_private
from fzero.core.arguments import checked
from fzero.core.files import leaf_fault, make_folder, writing
from fzero.core.gpu import HOST
from fzero.core.pytree import Tree
from fzero.core.storage import Damaged, Folder, is_url, join, read_text, sync_file_system, write_text
from fzero.core.text_parsing import expect_entries, in_form, parse_json, short
from fzero.offload import DiskTensor
from fzero.sharding import Mesh, Spec
from fzero.sharding.slices import narrow_box
from fzero.train.state import expect_alive

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


EXTRAS = "extras/"
COUNT = 8  # bytes of a row that say how many follow them and count
ROUND = 1024  # a row's bytes are a multiple of it, so that one save is planned as the one before was


def pack_extras(extras: Mapping[str, Any], mesh: Mesh) -> dict[str, Tensor]:
    """{name of a leaf: uint8 [R, N]} of the values of all ranks; raises ValueError for values of other kinds."""
    packed = {name: to_bytes(name, value) for name, value in extras.items()}
    leaves = {}
    with mesh.ledger.phase("commit"):
        for name, row in packed.items():
            size = torch.tensor([row.numel()], device=device_of(mesh))
            sizes = gather_rows(size, mesh, leaf=EXTRAS + name)
            width = -(-int(sizes.max()) // ROUND) * ROUND
            row = torch.nn.functional.pad(row, (0, width - row.numel())).to(size.device)
            # Of the first stage, where the ranks of one data rank are neighbours: the first one speaks for them.
            rows, stage = gather_rows(row, mesh, leaf=EXTRAS + name), mesh.stage_size
            rows = rows[: stage : stage // mesh.data_size].cpu()
            leaves[EXTRAS + name] = (rows[:1] if bool((rows == rows[:1]).all()) else rows).contiguous()
    return leaves


def to_bytes(name: str, value: Any) -> Tensor:
    """A value as uint8 [COUNT + its bytes]: JSON, the same for equal values."""
    content = json.dumps(encode(value, name)).encode()
    return torch.frombuffer(bytearray(len(content).to_bytes(COUNT, "little") + content), dtype=torch.uint8)


def from_bytes(row: Tensor) -> Any:
    """The value of a row."""
    content = row.numpy().tobytes()
    with in_form("the extra of a checkpoint"):
        return decode(json.loads(content[COUNT : COUNT + int.from_bytes(content[:COUNT], "little")]))


def encode(value: Any, name: str) -> Any:
    """A value as JSON, with objects of one entry for other kinds; raises ValueError."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [encode(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": encode(list(value), name)}
    if isinstance(value, Mapping):
        return {
            "dict": [[encode(key, f"{name}, a key"), encode(item, f"{name}[{key!r}]")] for key, item in value.items()]
        }
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor) and str(value.dtype).removeprefix("torch.") in DTYPES:
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = str(value.dtype).removeprefix("torch.")
        return {"tensor": [kind, list(value.shape), base64.b64encode(raw).decode()]}
    raise ValueError(
        f"checkpoint: extra {name} is a {type(value).__name__}; an extra is made of numbers, texts, bytes, tensors, "
        "lists, tuples and dicts"
    )


def decode(content: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(content, list):
        return [decode(item) for item in content]
    if not isinstance(content, dict):
        return content
    ((kind, body),) = content.items()
    if kind == "tuple":
        return tuple(decode(body))
    if kind == "dict":
        return {decode(key): decode(item) for key, item in body}
    if kind == "bytes":
        return base64.b64decode(body)
    dtype, shape, raw = body
    flat = torch.frombuffer(bytearray(base64.b64decode(raw)), dtype=DTYPES[dtype]) if raw else torch.empty(0)
    return flat.to(DTYPES[dtype]).reshape(shape)


@dataclass(frozen=True, eq=False)
class Lazy:
    """A leaf that is made when it is written, and then freed: `give()` returns a tensor of this dtype and shape.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> leaf = checkpoint.Lazy(torch.float32, (2,), lambda: torch.ones(2))
    >>> path = checkpoint.save(tempfile.mkdtemp(), {"w": leaf}, step=0)
    >>> checkpoint.restore_leaves(path, lambda name: True)
    {'w': tensor([1., 1.])}
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    give: Callable[[], Tensor]


def check_state(state: Tree, specs: Tree | None, step: int, mesh: Mesh) -> dict[str, tuple[Any, Spec]]:
    """{name: (leaf, its Spec)} of a state to save; raises ValueError naming what cannot be stored."""
    if type(step) is not int or step < 0:
        raise ValueError(f"checkpoint: step is {step!r}; it must be an int of at least 0")
    if step >= 1 << 63:
        raise ValueError(f"checkpoint: step is {step}; it must be below 2^63")
    if specs is None and mesh.size > 1:
        raise ValueError(
            "checkpoint: a state on several processes needs specs=, the Spec of every leaf; see fzero.state_specs"
        )
    expect_alive(state)
    named, spec_leaves = pytree.named_leaves(state), {} if specs is None else pytree.named_leaves(specs)
    fault = leaf_fault(named)
    if not fault and "" in named and isinstance(state, (dict, list, tuple)):
        fault = "the state has an empty key"
    if fault:
        raise ValueError(f"checkpoint: {fault}; rename it, as leaves are files under their names")
    for name, leaf in named.items():
        if name.startswith(EXTRAS):
            raise ValueError(
                f"checkpoint: the state has a part called {EXTRAS[:-1]}, where values beside a state are; rename it"
            )
        fault = kind_fault(leaf)
        if fault:
            raise ValueError(f"checkpoint: {f'leaf {name!r}' if name else 'the state'} {fault}")
    return {name: (leaf, spec_leaves[name] if specs is not None else Spec()) for name, leaf in named.items()}


def kind_fault(leaf: Any) -> str:
    """Why a leaf cannot be stored and what to save instead; "" if it can be."""
    if not isinstance(leaf, (Tensor, DiskTensor, Lazy)):
        return f"is a {type(leaf).__name__}, not a tensor; use torch.tensor, or () for nothing"
    if isinstance(leaf, Tensor):
        # torch tells a type checker that this function takes no arguments.
        if type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # pyright: ignore[reportAttributeAccessIssue]
            return (
                f"is a {type(leaf).__name__}, which is no plain tensor; save what it holds (.to_local() of a DTensor)"
            )
        if leaf.is_nested or leaf.layout != torch.strided:
            kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.").strip("_")
            return f"is a {kind} tensor and a checkpoint holds dense ones; save .to_dense(), or its parts"
        if leaf.device.type == "meta":
            return "is on the meta device and has no elements; give it values first"
        if torch_private.is_functorch_wrapped_tensor(leaf):
            return "is a tensor inside of a transformation of torch.func; save outside of it"
    if len(leaf.shape) > MOST_DIMS:
        return f"has {len(leaf.shape)} dims and a checkpoint holds leaves of at most {MOST_DIMS}; save a .reshape of it"
    if leaf.dtype.is_complex:
        return f"is {leaf.dtype} and a checkpoint holds real numbers; save torch.view_as_real of it"
    if leaf.dtype not in ZARR:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in ZARR)
        return f"is {leaf.dtype}; a checkpoint holds {names}"
    return ""


def box_reader(leaf: Any) -> Callable[[tuple[int, ...], tuple[int, ...]], Tensor]:
    """Return a function (start, size) -> the elements [start, start + size) of a leaf."""
    if isinstance(leaf, Lazy):
        leaf_value = leaf.give()
        expected = f"{leaf.dtype} of shape {list(leaf.shape)}"
        wanted = leaf.dtype, tuple(leaf.shape)
        if not isinstance(leaf_value, Tensor) or (leaf_value.dtype, tuple(leaf_value.shape)) != wanted:
            actual = (
                f"{leaf_value.dtype} of shape {list(leaf_value.shape)}"
                if isinstance(leaf_value, Tensor)
                else leaf_value
            )
            raise ValueError(f"a Lazy leaf says {expected}, and its give() returned {actual}")
        leaf = leaf_value.to(HOST)
    if isinstance(leaf, DiskTensor):
        return disk_box_reader(leaf)
    return lambda start, size: narrow_box(leaf.detach(), start, size)


def disk_box_reader(leaf: DiskTensor) -> Callable[[tuple[int, ...], tuple[int, ...]], Tensor]:
    """As `box_reader`, for a leaf on a disk; the layers that were read last stay in memory."""
    cached: tuple[Any, Tensor] | None = None

    def give(start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        nonlocal cached
        layers = (start[0], size[0]) if leaf.leaf.stacked else (0, 1)
        if cached is None or cached[0] != layers:
            cached = None
            cached = (layers, leaf.tensor(layers=layers))
        return narrow_box(cached[1], (0, *start[1:]), size) if leaf.leaf.stacked else narrow_box(cached[1], start, size)

    return give
