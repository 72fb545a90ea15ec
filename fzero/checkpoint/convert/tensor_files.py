"""safetensors files, written as tensors are made and read on request, with one tensor in memory at a time.

8 bytes     the length of the header, little-endian
header      JSON: {name: {dtype, shape, data_offsets: [begin, end] after the header}}, and texts under __metadata__
data        the tensors, without gaps

The package safetensors writes tensors that are all in memory, and reads through a mapping, in which a file that is cut
short meanwhile is zeros or ends the process; here it is an error.

Weights in MXFP4, the format of gpt-oss's experts: numbers of four bits (e2m1) in blocks of 32, each block with a scale
that is a power of two (e8m0).

    w[e, 32 g + 2 i + h, f] = MXFP4_VALUES[half h of byte i of blocks[e, f, g]] 2^(scales[e, f, g] - 127)

with h = 0 the lower half of a byte; blocks uint8 [E, F, G, 16], scales uint8 [E, F, G], w bfloat16 [E, D, F] with D =
32 G. Ref: Open Compute Project 2023, "OCP microscaling formats (MX) specification", version 1.0, sections 5.3.3 and
6.3.

The zip files of torch.save, and their checksums, which torch.load ignores.
"""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from fzero.core.files import writing
from fzero.core.text_parsing import LARGEST, expect_entries, expect_regular, parse_json, short


class FileSpan(io.RawIOBase):
    """The bytes [begin, begin + length) of a file, as a file object."""

    def __init__(self, path: Path, begin: int, length: int) -> None:
        super().__init__()
        expect_regular(path)
        self.file = open(path, "rb")  # noqa: SIM115  (closed with this one)
        self.begin, self.length, self.position = begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: memoryview) -> int:
        view = memoryview(buffer)[: max(0, self.length - self.position)]
        self.file.seek(self.begin + self.position)
        got = self.file.readinto(view)
        self.position += got
        return got

    def close(self) -> None:
        self.file.close()
        super().close()


def expect_sound(path: Path, begin: int = 0, length: int | None = None) -> None:
    """Raise ValueError naming the file if the zip in these bytes does not match its checksums. Reads it whole, in
    pieces.

    A zip written without checksums (torch.serialization.set_crc32_options) passes.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with zipfile.ZipFile(
            io.BufferedReader(FileSpan(path, begin, path.stat().st_size if length is None else length), 1 << 20)
        ) as file:
            summed = [info for info in file.infolist() if info.CRC]
            for info in summed:
                with file.open(info) as inside:
                    while inside.read(1 << 20):
                        pass
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{path}: damaged: {error}") from None


CHUNK_BYTES = 1 << 22  # bytes written by one call
LONGEST_HEADER = LARGEST  # bytes
MOST_DIMS = 32  # a bound for damaged headers

# The names that the safetensors format has for dtypes.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
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
    """Write a safetensors file to a new `path`, one tensor at a time; return its bytes once it is durable."""
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
    """{name: Entry} of a safetensors file, of which only the header is read now; raises ValueError if it is damaged."""
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


# ---- MXFP4 ----


# Of e2m1, by the three bits below the sign.
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK_BYTES = 16  # of a block
BLOCKS, SCALES = "_blocks", "_scales"
SCALE_NAN, SCALE_BIAS = 255, 127  # of a scale


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weights w [E, D, F] of blocks and scales.

    >>> block = torch.full((1, 1, 1, 16), 0x92, dtype=torch.uint8)  # its lower half is 1.0, its upper -0.5
    >>> dequantize(block, torch.full((1, 1, 1), 128, dtype=torch.uint8))[0, :2, 0]
    tensor([ 2., -1.], dtype=torch.bfloat16)
    """
    values = torch.tensor([*MXFP4_VALUES, *(-x for x in MXFP4_VALUES)])
    e, f, g, _ = blocks.shape
    w = torch.empty(e, 2 * BLOCK_BYTES * g, f, dtype=torch.bfloat16)
    for target, halves, scale in zip(w, blocks, scales):  # an expert at a time: the codes as indices take much memory
        codes = torch.stack((halves & 15, halves >> 4), -1).flatten(-2)
        factor = torch.ldexp(torch.ones(scale.shape), scale.to(torch.int32) - SCALE_BIAS).masked_fill(
            scale == SCALE_NAN, torch.nan
        )
        target.copy_((values[codes.to(torch.int32)] * factor[..., None]).flatten(1).t())
    return w


def unpack_tensors(source: Path, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors with NAME, dequantised on request, in place of each pair NAME_blocks and NAME_scales."""
    out: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        if name.endswith(BLOCKS):
            weight_name = name.removesuffix(BLOCKS)
            scales = _half(source, tensors, weight_name + SCALES, entry.shape[:-1])
            if len(entry.shape) != 4 or entry.shape[-1] != BLOCK_BYTES:
                raise ValueError(
                    f"{source}: tensor {name} has shape {list(entry.shape)}; "
                    f"in MXFP4 it must be [E, F, G, {BLOCK_BYTES}]"
                )
            _half(source, tensors, name, entry.shape)
            if weight_name in tensors:
                raise ValueError(f"{source}: tensor {weight_name} is there twice, once in MXFP4")
            e, f, g, _ = entry.shape
            shape = e, 2 * BLOCK_BYTES * g, f
            give = lambda blocks=entry, scales=scales: dequantize(blocks.give(), scales.give())  # noqa: E731
            out[weight_name] = TensorEntry(torch.bfloat16, shape, give)
        elif name.endswith(SCALES):
            _half(source, tensors, name.removesuffix(SCALES) + BLOCKS, None)
        else:
            out[name] = entry
    return out


def _half(source: Path, tensors: Mapping[str, TensorEntry], name: str, shape: tuple[int, ...] | None) -> TensorEntry:
    if name not in tensors:
        raise ValueError(f"{source}: tensor {name} is missing: in MXFP4 a weight has {BLOCKS} and {SCALES}")
    entry = tensors[name]
    if entry.dtype != torch.uint8 or shape not in (None, entry.shape):
        shape_text = "" if shape is None else f" {list(shape)}"
        raise ValueError(
            f"{source}: tensor {name} is {entry.dtype} {list(entry.shape)}; in MXFP4 it must be torch.uint8{shape_text}"
        )
    return entry
