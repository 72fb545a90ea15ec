"""safetensors files, a tensor at a time: written as tensors are made, read as they are asked for. No memory beside that one tensor.

8 bytes     the length of the header, little-endian
header      JSON: {name: {dtype, shape, data_offsets: [begin, end] behind the header}}, and texts under __metadata__
data        the tensors, without gaps
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 22
LONGEST_HEADER = 100_000_000  # bytes, as other readers have it

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


class Entry(NamedTuple):
    """A tensor that is made when it is asked for."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    give: Callable[[], Tensor]


# ---- writing ----


def write_safetensors(path: Path, entries: dict[str, Entry]) -> int:
    """The bytes of the safetensors file written to `path`, which must not exist; it is on the disk on return.

    One tensor is asked for at a time, and dropped before the next.
    """
    # Wide dtypes first: then every tensor is aligned, which readers that map the file rely on.
    order = sorted(entries, key=lambda name: -entries[name].dtype.itemsize)
    table, place = {}, 0
    for name in order:
        dtype, shape, _ = entries[name]
        end = place + dtype.itemsize * torch.Size(shape).numel()
        table[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            _write(f, name, entries[name])
        f.flush()
        os.fsync(f.fileno())
    return 8 + len(text) + place


def _write(f: BinaryIO, name: str, entry: Entry) -> None:
    tensor = entry.give()
    assert tensor.dtype == entry.dtype and tuple(tensor.shape) == tuple(entry.shape), name
    view = memory_of(tensor.detach().cpu().contiguous())
    for start in range(0, len(view), CHUNK_BYTES):
        f.write(view[start : start + CHUNK_BYTES])


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


# ---- reading ----


def read_safetensors(path: Path) -> dict[str, Entry]:
    """{name: tensor to be read} of a safetensors file. Only its header is read here; a tensor is read from the file when it is asked for.

    Raises ValueError naming the file where it is damaged: cut, with a header that is none, or with places that do not fit the data; and
    the tensor that has a dtype torch has none for.
    """
    have = path.stat().st_size
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if have < 8 or length > min(have - 8, LONGEST_HEADER):
            raise ValueError(f"{path}: damaged: a header of {length} bytes in a file of {have}")
        try:
            table = json.loads(f.read(length))
            table.pop("__metadata__", None)
            said = {name: (x["dtype"], tuple(x["shape"]), *x["data_offsets"]) for name, x in table.items()}
            entries = {name: _entry(path, 8 + length, name, *x) for name, x in said.items()}
        except (AttributeError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: damaged: its header is not that of a safetensors file ({type(error).__name__}: {error})") from None
    place = 0
    for name, (_, _, begin, end) in sorted(said.items(), key=lambda item: item[1][2:]):
        if begin != place:
            raise ValueError(f"{path}: damaged: tensor {name} begins at byte {begin} of the data; {place} is free")
        place = end
    if 8 + length + place != have:
        raise ValueError(f"{path}: damaged: it has {have} bytes, its header speaks of {8 + length + place}")
    return entries


def _entry(path: Path, base: int, name: str, text: str, shape: tuple[int, ...], begin: int, end: int) -> Entry:
    if text not in NAMED:
        raise ValueError(f"{path}: tensor {name} is of dtype {text}; these are known: {', '.join(NAMED)}")
    dtype = NAMED[text]
    if end - begin != dtype.itemsize * torch.Size(shape).numel():
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

    return Entry(dtype, shape, give)
