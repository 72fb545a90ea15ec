"""Token files of other systems, described so that they can be read in place: Megatron's .bin with its .idx, and .npy.

An .idx (Megatron-LM, megatron/core/datasets/indexed_dataset.py) is: b"MMIDIDX\\0\\0", uint64 1, uint8 the code of a
dtype, uint64 S sequences, uint64 D + 1; int32 [S] their lengths, int64 [S] where they begin in the .bin in bytes,
int64 [D + 1] the first sequence of each document, and at the end S; all little-endian. An .idx with int8 [S] more, the
modes of its sequences, is of other kinds of data and refused.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fzero.core.foreign import expect_regular

MAGIC = b"MMIDIDX\x00\x00"
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
AT_A_TIME = 1 << 24  # tokens that are searched for ends of documents together


class ForeignTokens(NamedTuple):
    """Tokens in a file of another system."""

    path: Path
    offset: int  # bytes before them
    dtype: np.dtype
    count: int
    docs: np.ndarray  # int64 [documents + 1]: where each begins, then the count

    def map(self) -> np.ndarray:
        """The tokens, memory-mapped."""
        return np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, (self.count,)))


def find_tokens(source: Path, eos: int) -> ForeignTokens:
    """The tokens of a .npy file, of a .bin or .idx file, or of what both begin with; eos: ends the documents of a .npy.

    Raises ValueError naming the file and what is wrong with it.
    """
    if source.suffix == ".npy":
        return read_npy(source, eos)
    prefix = source.with_suffix("") if source.suffix in (".bin", ".idx") else source
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, tokens):
        if not path.is_file():
            raise ValueError(f"{path}: no such file; give a .npy file, or the .bin of Megatron beside its .idx")
    return read_index(index, tokens)


def read_index(index: Path, tokens: Path) -> ForeignTokens:
    """The tokens of a .bin of Megatron by its .idx."""
    raw = np.memmap(index, np.uint8, "r") if index.stat().st_size else np.zeros(0, np.uint8)
    head = struct.calcsize("<9sQBQQ")
    if bytes(raw[:9]) != MAGIC:
        raise ValueError(f"{index}: not an .idx of Megatron: it does not begin with MMIDIDX")
    if len(raw) < head:
        raise ValueError(f"{index}: truncated: it has {len(raw)} bytes, and its head alone {head}")
    _, version, code, sequences, documents = struct.unpack("<9sQBQQ", raw[:head].tobytes())
    if version != 1 or code not in CODES or "float" in CODES[code] or not (sequences and documents):
        kind = CODES.get(code, code)
        raise ValueError(
            f"{index}: version {version}, tokens of {kind}, {sequences} sequences; wanted version 1 and sequences of "
            "whole numbers"
        )
    want = head + 12 * sequences + 8 * documents
    if len(raw) != want:
        what = "truncated" if len(raw) < want else "too long (sequences with modes are not of text)"
        raise ValueError(f"{index}: {what}: it has {len(raw)} bytes, {want} for {sequences} sequences")
    lengths = np.frombuffer(raw, "<i4", sequences, head).astype(np.int64)
    begins = np.frombuffer(raw, "<i8", sequences, head + 4 * sequences)
    firsts = np.frombuffer(raw, "<i8", documents, head + 12 * sequences)
    dtype = np.dtype(CODES[code]).newbyteorder("<")
    ends = np.append(0, np.cumsum(lengths))
    total = int(ends[-1])
    if not (lengths >= 0).all() or not np.array_equal(begins, ends[:-1] * dtype.itemsize):
        raise ValueError(f"{index}: its sequences do not lie one after the other; write the data set again")
    if firsts[0] != 0 or firsts[-1] != sequences or not (np.diff(firsts) >= 0).all():
        raise ValueError(
            f"{index}: the first sequences of its documents must rise from 0 to {sequences}; they run from {firsts[0]} "
            f"to {firsts[-1]}"
        )
    if tokens.stat().st_size != total * dtype.itemsize:
        raise ValueError(
            f"{tokens}: has {tokens.stat().st_size} bytes, and {index.name} says {total} x {dtype.name} = "
            f"{total * dtype.itemsize}; put the right one beside it"
        )
    return ForeignTokens(tokens, 0, dtype, total, np.unique(ends[firsts]))


def read_npy(path: Path, eos: int) -> ForeignTokens:
    """The tokens of a .npy file of one dimension, whose documents end with `eos`."""
    expect_regular(path)
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read as a .npy file of numbers ({said})") from None
    if not isinstance(found, np.memmap) or found.ndim != 1 or found.dtype.kind not in "ui":
        raise ValueError(f"{path}: is {found.dtype} {list(found.shape)}; wanted whole numbers of one dimension")
    ends = [np.flatnonzero(found[i : i + AT_A_TIME] == eos) + i + 1 for i in range(0, len(found), AT_A_TIME)]
    docs = np.unique(np.concatenate([[0], *ends, [len(found)]])).astype(np.int64)
    return ForeignTokens(path, int(found.offset), found.dtype, len(found), docs)
