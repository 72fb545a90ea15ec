"""safetensors files, written as tensors are made and read on request, with one tensor in memory at a time.

8 bytes     the length of the header, little-endian
header      JSON: {name: {dtype, shape, data_offsets: [begin, end] after the header}}, and texts under __metadata__
data        the tensors, without gaps
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from fzero.core.files import writing
from fzero.core.text_parsing import LARGEST, expect_entries, expect_regular, parse_json, short

CHUNK_BYTES = 1 << 22
LONGEST_HEADER = LARGEST  # bytes
MOST_DIMS = 32

# The names that the safetensors format has for dtypes.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
NAMED = {text: dtype for dtype, text in DTYPES.items()}


class TensorEntry(NamedTuple):
    """A tensor that is made on request."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    give: Callable[[], Tensor]


# ---- writing ----


def write_safetensors(path: Path, entries: dict[str, TensorEntry]) -> int:
    """Write a safetensors file to `path`, which must not exist; return its size in bytes once it is durable.

    One tensor is made at a time, and dropped before the next.
    """
    # Wide dtypes first, so that every tensor is aligned, as readers that map the file require.
    order = sorted(entries, key=lambda name: -entries[name].dtype.itemsize)
    table, position = {}, 0
    for name in order:
        dtype, shape, _ = entries[name]
        end = position + dtype.itemsize * torch.Size(shape).numel()
        table[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    with writing(path, "new") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            _write(f, name, entries[name])
        f.flush()
        os.fsync(f.fileno())
    return 8 + len(text) + position


def _write(f: BinaryIO, name: str, entry: TensorEntry) -> None:
    tensor = entry.give()
    assert tensor.dtype == entry.dtype and tuple(tensor.shape) == tuple(entry.shape), name
    view = memory_of(tensor.detach().cpu().contiguous())
    for start in range(0, len(view), CHUNK_BYTES):
        f.write(view[start : start + CHUNK_BYTES])


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


# ---- reading ----


def read_safetensors(path: Path) -> dict[str, TensorEntry]:
    """{name: Entry} of a safetensors file. Only its header is read now; a tensor is read on request.

    Raises ValueError naming a damaged file (truncated, with an invalid header, or with offsets that do not fit the
    data), and naming a tensor whose dtype torch lacks.
    """
    file_bytes = expect_regular(path)
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if file_bytes < 8 or length > min(file_bytes - 8, LONGEST_HEADER):
            raise ValueError(f"{path}: damaged: a header of {length} bytes in a file of {file_bytes}")
        try:
            table = parse_json(f.read(length), str(path))
        except ValueError as error:
            raise ValueError(f"{error}; its header is not that of a safetensors file") from None
    table.pop("__metadata__", None)
    spans = {name: _parse_span(path, name, entry) for name, entry in table.items()}
    entries = {name: _entry(path, 8 + length, name, *position) for name, position in spans.items()}
    position = 0
    for name, (_, _, begin, end) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if begin != position:
            raise ValueError(f"{path}: damaged: tensor {name} begins at byte {begin} of the data; {position} is free")
        position = end
    if 8 + length + position != file_bytes:
        raise ValueError(f"{path}: damaged: it has {file_bytes} bytes, its header speaks of {8 + length + position}")
    return entries


def _parse_span(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of an entry of a header, whose types are checked."""
    subject = f"{path}: damaged: tensor {short(name)} of its header"
    if not isinstance(entry, dict):
        raise ValueError(f"{subject} is {short(entry)}; it must be a table")
    expect_entries(entry, {"dtype": str, "shape": list, "data_offsets": list}, subject)
    shape, span = entry["shape"], entry["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, *span)) or len(span) != 2 or len(shape) > MOST_DIMS:
        raise ValueError(
            f"{subject} has shape {short(shape)} and data_offsets {short(span)}; a shape is of whole numbers"
        )
    return entry["dtype"], tuple(shape), span[0], span[1]


def _entry(path: Path, base: int, name: str, text: str, shape: tuple[int, ...], begin: int, end: int) -> TensorEntry:
    if text not in NAMED:
        raise ValueError(f"{path}: tensor {name[:200]} is of dtype {text[:80]}; these are known: {', '.join(NAMED)}")
    dtype = NAMED[text]
    if end - begin != dtype.itemsize * math.prod(shape):
        raise ValueError(f"{path}: damaged: tensor {name} {list(shape)} of {text} has {end - begin} bytes")

    def give() -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        view, done = memory_of(tensor), 0
        with open(path, "rb", buffering=0) as f:
            f.seek(base + begin)
            while done < len(view):
                got = f.readinto(view[done:])
                if not got:
                    raise ValueError(f"{path}: damaged: it ends within tensor {name}")
                done += got
        return tensor

    return TensorEntry(dtype, shape, give)
