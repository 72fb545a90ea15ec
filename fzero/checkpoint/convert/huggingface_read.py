"""Build the leaves of our parameters from tensors with the names of `transformers`, in any source.

A source of weights is a table {name: Entry} with shapes and dtypes; a tensor is read on request. The result is such a
table of our leaves. So all problems of names, shapes and dtypes are found before a tensor is read, and one leaf is in
memory at a time.

Weights in MXFP4, the format of gpt-oss's published experts: numbers of four bits (e2m1) in blocks of 32 along the
rows of a product, each block with a scale that is a power of two (e8m0).

    w[e, 32 g + 2 i + h, f] = VALUES[half h of byte i of blocks[e, f, g]] 2^(scales[e, f, g] - 127)

with h = 0 the lower half of a byte. Every such number within bfloat16's range is exact in it.
Ref: Open Compute Project 2023, "OCP microscaling formats (MX) specification", version 1.0, sections 5.3.3 and 6.3.

Shapes: blocks uint8 [E, F, G, 16], scales uint8 [E, F, G], w bfloat16 [E, D, F] with D = 32 G.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint.convert.huggingface_config import find_family, read_config
from fzero.checkpoint.convert.huggingface_families import HuggingFaceFamily, full_name
from fzero.checkpoint.convert.huggingface_names import OUTER, TensorRow, column_slice, row_tensors, tensor_shape
from fzero.checkpoint.convert.safetensors import TensorEntry, memory_of, read_safetensors
from fzero.core import pytree
from fzero.core.files import path_fault
from fzero.core.text_parsing import read_json
from fzero.models import build

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BYTES = 16  # of a block
BLOCKS, SCALES = "_blocks", "_scales"
NAN, BIAS = 255, 127  # of a scale


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weights w [E, D, F] of blocks and scales.

    >>> block = torch.full((1, 1, 1, 16), 0x92, dtype=torch.uint8)  # its lower half is 1.0, its upper -0.5
    >>> dequantize(block, torch.full((1, 1, 1), 128, dtype=torch.uint8))[0, :2, 0]
    tensor([ 2., -1.], dtype=torch.bfloat16)
    """
    values = torch.tensor([*VALUES, *(-x for x in VALUES)])
    e, f, g, _ = blocks.shape
    w = torch.empty(e, 2 * BYTES * g, f, dtype=torch.bfloat16)
    for target, halves, scale in zip(w, blocks, scales):  # an expert at a time: the codes as indices take much memory
        codes = torch.stack((halves & 15, halves >> 4), -1).flatten(-2)
        factor = torch.ldexp(torch.ones(scale.shape), scale.to(torch.int32) - BIAS).masked_fill(scale == NAN, torch.nan)
        target.copy_((values[codes.to(torch.int32)] * factor[..., None]).flatten(1).t())
    return w


def unpack_tensors(source: Path, tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors with NAME in place of each pair NAME_blocks and NAME_scales, dequantised on request.

    Raises ValueError naming a tensor of such a pair whose other half is missing, or that has another dtype or shape.
    """
    out: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        if name.endswith(BLOCKS):
            weight_name = name.removesuffix(BLOCKS)
            scales = _half(source, tensors, weight_name + SCALES, entry.shape[:-1])
            if len(entry.shape) != 4 or entry.shape[-1] != BYTES:
                raise ValueError(
                    f"{source}: tensor {name} has shape {list(entry.shape)}; in MXFP4 it must be [E, F, G, {BYTES}]"
                )
            _half(source, tensors, name, entry.shape)
            if weight_name in tensors:
                raise ValueError(f"{source}: tensor {weight_name} is there twice, once in MXFP4")
            e, f, g, _ = entry.shape
            shape = e, 2 * BYTES * g, f
            give = lambda blocks=entry, scales=scales: dequantize(blocks.give(), scales.give())  # noqa: E731
            out[weight_name] = TensorEntry(torch.bfloat16, shape, give)
        elif name.endswith(SCALES):
            _half(source, tensors, name.removesuffix(SCALES) + BLOCKS, None)
        else:
            out[name] = entry
    return out


def _half(source: Path, tensors: dict[str, TensorEntry], name: str, shape: tuple[int, ...] | None) -> TensorEntry:
    if name not in tensors:
        raise ValueError(f"{source}: tensor {name} is missing: in MXFP4 a weight has {BLOCKS} and {SCALES}")
    entry = tensors[name]
    if entry.dtype != torch.uint8 or shape not in (None, entry.shape):
        shape_text = "" if shape is None else f" {list(shape)}"
        raise ValueError(
            f"{source}: tensor {name} is {entry.dtype} {list(entry.shape)}; in MXFP4 it must be torch.uint8{shape_text}"
        )
    return entry


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEAD = "lm_head.weight"
MOST_MODELS = 16  # in one source, looked into before it is refused
# Parts that wrappers of PyTorch insert into parameter names.
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def meta_leaves(config: Any) -> dict[str, Tensor]:
    """`{name: leaf}` of the parameters of a model of these sizes, as tensors on the meta device."""
    tree = build(config).init(lambda name, shape, std, mean=0.0, dtype=None: torch.empty(shape, device="meta"))
    return pytree.named_leaves(tree)


def read_hf_config(path: Path, *, bare: bool = False) -> tuple[Any, HuggingFaceFamily]:
    """(our config, the family) of the model that a config.json describes. bare: see find_family.

    Raises ValueError naming an unsupported architecture or entry.
    """
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; a model folder of transformers has a config.json, which says the model's sizes"
        )
    hf = read_json(path, wide=True)
    family = find_family(hf, path, bare=bare)
    return read_config(hf, family, path), family


def tensors_of(folder: Path) -> dict[str, TensorEntry]:
    """{name: Entry} of the safetensors files in a folder; raises ValueError if there are none, and naming a damaged
    one."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        shards = ["model.safetensors"]
    elif index.is_file():
        table = read_json(index, wide=True).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
            raise ValueError(f"{index}: damaged: it has no weight_map from tensors to files")
        for name, shard in table.items():
            if fault := path_fault(shard):
                raise ValueError(f"{index}: damaged: the file of {name}, {shard!r}, {fault}")
        shards = sorted(set(table.values()))
    else:
        raise ValueError(
            f"{folder}: neither model.safetensors nor {index.name} in it; fzero reads no other weights (no .bin files)"
        )
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        if not (folder / shard).is_file():
            raise ValueError(f"{folder / shard}: no such file, but {index.name} names it")
        for name, entry in read_safetensors(folder / shard).items():
            if name in entries:
                raise ValueError(f"{folder}: tensor {name} is there twice")
            entries[name] = entry
    return entries


class Names(NamedTuple):
    """The names of a model's tensors in a source."""

    rows: tuple[TensorRow, ...]  # of the source's layout
    source_names: dict[str, str]  # the name in the rows -> the name in the source


def leaves_of(
    source: Path,
    config: Any,
    family: HuggingFaceFamily,
    tensors: dict[str, TensorEntry],
    *,
    dtype: torch.dtype | None = None,
    alone: bool = True,
) -> dict[str, TensorEntry]:
    """{name: Entry} of the leaves of a model of this config, each made from `tensors` on request.

    dtype: of the leaves; None keeps the stored one. alone: the source holds only the model; else other tensors are
    allowed. Raises ValueError naming `source` and the tensor that is missing, unexpected, or of another shape or dtype.
    """
    leaves = meta_leaves(config)
    tensors = unpack_tensors(source, tensors) if family.quantized else tensors
    names = find_names(source, family, leaves, tensors, alone=alone)
    entries = {name: tensors[source_name] for name, source_name in names.source_names.items()}
    for row in names.rows:
        _expect_tensors(source, row, leaves, entries, names.source_names, dtype)
    if config.tied and HEAD in entries:
        tokens = next(row.pattern for row in names.rows if row.leaf == "embed/tokens")
        if entries[HEAD][:2] != entries[tokens][:2] or _digest(entries[HEAD]) != _digest(entries[tokens]):
            raise ValueError(
                f"{source}: the config says tie_word_embeddings, but {names.source_names[HEAD]} is not "
                f"{names.source_names[tokens]}; make it false"
            )
    row_leaves = {row.leaf: _leaf(row, leaves, entries, dtype) for row in names.rows}
    return {name: row_leaves[name] for name in leaves}


def find_names(
    source: Path, family: HuggingFaceFamily, leaves: dict[str, Tensor], tensors: Iterable[str], *, alone: bool
) -> Names:
    """Find the tensors of a model of `family`, under any prefix.

    A name that ends in the embedding's gives the prefix of all others, except the head, whose name lacks the family's
    own part of it.
    """
    plain: dict[str, str] = {}
    for actual in tensors:
        name = ".".join(segment for segment in actual.split(".") if segment not in WRAPPERS)
        if name in plain:
            raise ValueError(f"{source}: tensor {name} is there twice, as {plain[name]} and as {actual}")
        plain[name] = actual
    layouts = [tuple(row for row in layout if row.leaf in leaves) for layout in family.layouts]
    anchor = next(row.pattern for row in layouts[0] if row.leaf == "embed/tokens")
    stems = {name.removesuffix(anchor) for name in plain if name == anchor or name.endswith(f".{anchor}")}
    # Before any name is made: a config of 10^5 layers with 10^5 experts has more names than memory holds.
    counts = [sum(math.prod(leaves[row.leaf].shape[: row.pattern.count("{")]) for row in rows) for rows in layouts]
    layouts = [rows for rows, count in zip(layouts, counts) if count <= 10 * len(plain) + 10_000]
    if not layouts:
        raise ValueError(
            f"{source}: the config asks for {min(counts):,} tensors and {len(plain):,} are there; its layers or "
            "experts are those of another model"
        )
    if len(stems) > MOST_MODELS:
        raise ValueError(
            f"{source}: the weights of {len(stems)} models are in it; save the one to be imported by itself"
        )
    best: list[tuple[int, str, tuple[TensorRow, ...], set[str]]] = []
    for stem in sorted(stems or {family.prefix}):
        for rows in layouts:
            expected = {name for row in rows for name, _ in row_tensors(row, leaves)}
            best.append((sum(_source_name(stem, family, name) in plain for name in expected), stem, rows, expected))
    max_matches = max(count for count, *_ in best)
    full = sorted({stem for count, stem, *_ in best if count == max_matches})
    if len(full) > 1:
        embeddings = " and ".join(f"{stem}{anchor}" for stem in full)
        raise ValueError(
            f"{source}: the weights of more than one model are in it, as {embeddings} say; save the one to be "
            "imported by itself"
        )
    _, stem, rows, expected = next(candidate for candidate in best if candidate[0] == max_matches)
    source_names = {
        name: plain[actual] for name in (*expected, HEAD) if (actual := _source_name(stem, family, name)) in plain
    }
    if not set(source_names) - {HEAD}:
        present = list(plain.values())
        actual = (
            ", ".join(present[:5]) + (f" and {len(present) - 5} more" if len(present) > 5 else "")
            if present
            else "nothing"
        )
        raise ValueError(
            f"{source}: no tensor of a {family.architecture} is in it, under any prefix; there is {actual}"
        )
    missing = sorted(full_name(family, name) for name in expected - set(source_names))
    outer = stem.removesuffix(family.prefix)
    extra = [
        actual
        for name, actual in sorted(plain.items())
        if actual not in source_names.values()
        and (alone or name.startswith((stem, *(f"{outer}{segment}" for segment in OUTER))))
        and not re.fullmatch(family.passed_over, name.removeprefix(stem))
    ]
    for fault, names in (("are missing", missing), ("are unexpected", extra)):
        if names:
            suffix = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(
                f"{source}: tensors {fault} for a {family.architecture} of these sizes: {', '.join(names[:5])}{suffix}"
            )
    return Names(rows, source_names)


def _source_name(stem: str, family: HuggingFaceFamily, name: str) -> str:
    """The name in the source of a tensor of the rows, with prefix `stem`."""
    return (stem.removesuffix(family.prefix) if name.startswith(OUTER) else stem) + name


def _expect_tensors(
    source: Path,
    row: TensorRow,
    leaves: dict[str, Tensor],
    entries: dict[str, TensorEntry],
    source_names: dict[str, str],
    dtype: torch.dtype | None,
) -> None:
    first = None
    for name, _ in row_tensors(row, leaves):
        entry, shape = entries[name], tensor_shape(row, leaves)
        if list(entry.shape) != shape:
            raise ValueError(
                f"{source}: tensor {source_names[name]} has shape {list(entry.shape)}, config.json asks for {shape}"
            )
        if entry.dtype not in FLOATS:
            raise ValueError(
                f"{source}: tensor {source_names[name]} is {entry.dtype}; fzero reads float32, bfloat16, float16 and "
                "float64"
            )
        first = first or entry.dtype
        if dtype is None and entry.dtype != first:
            raise ValueError(
                f"{source}: tensor {source_names[name]} is {entry.dtype} and other layers {first}; give load_hf a "
                "dtype, or save it in one"
            )


def _leaf(
    row: TensorRow, leaves: dict[str, Tensor], entries: dict[str, TensorEntry], dtype: torch.dtype | None
) -> TensorEntry:
    shape, spots = tuple(leaves[row.leaf].shape), list(row_tensors(row, leaves))
    entry = entries[spots[0][0]]
    if spots[0][1] == () and not row.transposed and len(row.fused_leaves) < 2 and dtype in (None, entry.dtype):
        return TensorEntry(entry.dtype, shape, entry.give)  # shares the memory

    column_range = column_slice(row, leaves)

    def give() -> Tensor:
        leaf = torch.empty(shape, dtype=dtype or entry.dtype)
        for name, index in spots:
            tensor = entries[name].give()
            values = tensor.transpose(-1, -2) if row.transposed else tensor
            leaf[index].copy_(values[..., column_range])
            del tensor, values
        return leaf

    return TensorEntry(dtype or entry.dtype, shape, give)


def _digest(entry: TensorEntry) -> str:
    return hashlib.sha256(memory_of(entry.give().contiguous())).hexdigest()
