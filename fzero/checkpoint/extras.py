"""Values beside a state, of which every rank has its own, such as where its data loader is, as leaves of bytes.

An extra is one leaf uint8 [R, N]: a row for each data rank, or one row where all of them have the same.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint.layout import ZARR
from fzero.comm.rank_tables import device_of, gather_rows
from fzero.core.text_parsing import in_form
from fzero.sharding import Mesh

EXTRAS = "extras/"
COUNT = 8  # bytes of a row that say how many follow them and count
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ZARR}
ROUND = 1024  # a row's bytes are a multiple of it, so that one save is planned as the one before was


def pack_extras(extras: Mapping[str, Any], mesh: Mesh) -> dict[str, Tensor]:
    """{name of a leaf: uint8 [R, N]} of the values of all ranks, the same on each of them.

    Communicates: an int64 and the bytes of a rank for each extra, over all ranks.
    Raises ValueError naming a value that is of another kind than those of `encode`.
    """
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
    """A value as JSON, in which what JSON has not is an object of one entry; raises ValueError for another kind."""
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
