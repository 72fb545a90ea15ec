"""The sources of a leaf to save: a tensor in memory, a leaf on a disk, or a function that makes it.

Also values beside a state, of which every rank has its own, such as where its data loader is: a leaf uint8 [R, N] with
a row for each data rank, or one row where all are equal.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint.layout import ZARR
from fzero.checkpoint.manifest import MOST_DIMS
from fzero.comm.rank_tables import device_of, gather_rows
from fzero.core import pytree, torch_private
from fzero.core.files import leaf_fault
from fzero.core.gpu import HOST
from fzero.core.pytree import Tree
from fzero.core.text_parsing import in_form
from fzero.offload import DiskTensor
from fzero.sharding import Mesh, Spec
from fzero.sharding.slices import narrow_box
from fzero.train.state import expect_alive

EXTRAS = "extras/"
COUNT = 8  # bytes of a row that say how many follow them and count
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ZARR}
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
