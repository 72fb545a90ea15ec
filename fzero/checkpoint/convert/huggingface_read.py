"""Build the leaves of our parameters from tensors with the names of `transformers`, in any source.

A source of weights is a table {name: Entry} with shapes and dtypes; a tensor is read on request. The result is such a
table of our leaves. So all problems of names, shapes and dtypes are found before a tensor is read, and one leaf is in
memory at a time.
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
from fzero.checkpoint.convert.huggingface_families import Family, full_name
from fzero.checkpoint.convert.huggingface_names import OUTER, Row, part, places, their_shape
from fzero.checkpoint.convert.mxfp4 import unpacked
from fzero.checkpoint.convert.safetensors import Entry, memory_of, read_safetensors
from fzero.core import pytree
from fzero.core.foreign import read_json
from fzero.core.paths import path_fault
from fzero.models import build

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEAD = "lm_head.weight"
MOST_MODELS = 16  # in one source, looked into before it is refused
# Parts that wrappers of PyTorch insert into parameter names.
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def like(config: Any) -> dict[str, Tensor]:
    """`{name: leaf}` of the parameters of a model of these sizes, as tensors on the meta device."""
    tree = build(config).init(lambda name, shape, std, mean=0.0, dtype=None: torch.empty(shape, device="meta"))
    return pytree.named_leaves(tree)


def read_hf_config(where: Path, *, bare: bool = False) -> tuple[Any, Family]:
    """(our config, the family) of the model that a config.json describes. bare: see find_family.

    Raises ValueError naming an unsupported architecture or entry.
    """
    if not where.is_file():
        raise ValueError(
            f"{where}: no such file; a model folder of transformers has a config.json, which says the model's sizes"
        )
    hf = read_json(where, wide=True)
    family = find_family(hf, where, bare=bare)
    return read_config(hf, family, where), family


def tensors_of(folder: Path) -> dict[str, Entry]:
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
    found: dict[str, Entry] = {}
    for shard in shards:
        if not (folder / shard).is_file():
            raise ValueError(f"{folder / shard}: no such file, but {index.name} names it")
        for name, entry in read_safetensors(folder / shard).items():
            if name in found:
                raise ValueError(f"{folder}: tensor {name} is there twice")
            found[name] = entry
    return found


class Names(NamedTuple):
    """The names of a model's tensors in a source."""

    rows: tuple[Row, ...]  # of the source's layout
    where: dict[str, str]  # the name in the rows -> the name in the source


def leaves_of(
    source: Path,
    config: Any,
    family: Family,
    tensors: dict[str, Entry],
    *,
    dtype: torch.dtype | None = None,
    alone: bool = True,
) -> dict[str, Entry]:
    """{name: Entry} of the leaves of a model of this config, each made from `tensors` on request.

    dtype: of the leaves; None keeps the stored one. alone: the source holds only the model; else other tensors are
    allowed. Raises ValueError naming `source` and the tensor that is missing, unexpected, or of another shape or dtype.
    """
    leaves = like(config)
    tensors = unpacked(source, tensors) if family.quantized else tensors
    names = find_names(source, family, leaves, tensors, alone=alone)
    found = {name: tensors[there] for name, there in names.where.items()}
    for row in names.rows:
        _check(source, row, leaves, found, names.where, dtype)
    if config.tied and HEAD in found:
        tokens = next(row.theirs for row in names.rows if row.ours == "embed/tokens")
        if found[HEAD][:2] != found[tokens][:2] or _digest(found[HEAD]) != _digest(found[tokens]):
            raise ValueError(
                f"{source}: the config says tie_word_embeddings, but {names.where[HEAD]} is not {names.where[tokens]}; "
                "make it false"
            )
    made = {row.ours: _leaf(row, leaves, found, dtype) for row in names.rows}
    return {name: made[name] for name in leaves}


def find_names(
    source: Path, family: Family, leaves: dict[str, Tensor], tensors: Iterable[str], *, alone: bool
) -> Names:
    """Find the tensors of a model of `family`, under any prefix.

    A name that ends in the embedding's gives the prefix of all others, except the head, whose name lacks the family's
    own part of it.
    """
    plain: dict[str, str] = {}
    for there in tensors:
        name = ".".join(part for part in there.split(".") if part not in WRAPPERS)
        if name in plain:
            raise ValueError(f"{source}: tensor {name} is there twice, as {plain[name]} and as {there}")
        plain[name] = there
    layouts = [tuple(row for row in layout if row.ours in leaves) for layout in family.layouts]
    anchor = next(row.theirs for row in layouts[0] if row.ours == "embed/tokens")
    stems = {name.removesuffix(anchor) for name in plain if name == anchor or name.endswith(f".{anchor}")}
    # Before any name is made: a config of 10^5 layers with 10^5 experts has more names than memory holds.
    counts = [sum(math.prod(leaves[row.ours].shape[: row.theirs.count("{")]) for row in rows) for rows in layouts]
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
    best: list[tuple[int, str, tuple[Row, ...], set[str]]] = []
    for stem in sorted(stems or {family.prefix}):
        for rows in layouts:
            wanted = {name for row in rows for name, _ in places(row, leaves)}
            best.append((sum(_put(stem, family, name) in plain for name in wanted), stem, rows, wanted))
    most = max(count for count, *_ in best)
    full = sorted({stem for count, stem, *_ in best if count == most})
    if len(full) > 1:
        shown = " and ".join(f"{stem}{anchor}" for stem in full)
        raise ValueError(
            f"{source}: the weights of more than one model are in it, as {shown} say; save the one to be "
            "imported by itself"
        )
    _, stem, rows, wanted = next(one for one in best if one[0] == most)
    where = {name: plain[there] for name in (*wanted, HEAD) if (there := _put(stem, family, name)) in plain}
    if not set(where) - {HEAD}:
        known = list(plain.values())
        there = ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "") if known else "nothing"
        raise ValueError(f"{source}: no tensor of a {family.architecture} is in it, under any prefix; there is {there}")
    missing = sorted(full_name(family, name) for name in wanted - set(where))
    outer = stem.removesuffix(family.prefix)
    extra = [
        there
        for name, there in sorted(plain.items())
        if there not in where.values()
        and (alone or name.startswith((stem, *(f"{outer}{part}" for part in OUTER))))
        and not re.fullmatch(family.passed_over, name.removeprefix(stem))
    ]
    for what, names in (("are missing", missing), ("are unexpected", extra)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(
                f"{source}: tensors {what} for a {family.architecture} of these sizes: {', '.join(names[:5])}{more}"
            )
    return Names(rows, where)


def _put(stem: str, family: Family, name: str) -> str:
    """The name in the source of a tensor of the rows, with prefix `stem`."""
    return (stem.removesuffix(family.prefix) if name.startswith(OUTER) else stem) + name


def _check(
    source: Path,
    row: Row,
    leaves: dict[str, Tensor],
    found: dict[str, Entry],
    where: dict[str, str],
    dtype: torch.dtype | None,
) -> None:
    first = None
    for name, _ in places(row, leaves):
        theirs, wanted = found[name], their_shape(row, leaves)
        if list(theirs.shape) != wanted:
            raise ValueError(
                f"{source}: tensor {where[name]} has shape {list(theirs.shape)}, config.json asks for {wanted}"
            )
        if theirs.dtype not in FLOATS:
            raise ValueError(
                f"{source}: tensor {where[name]} is {theirs.dtype}; fzero reads float32, bfloat16, float16 and float64"
            )
        first = first or theirs.dtype
        if dtype is None and theirs.dtype != first:
            raise ValueError(
                f"{source}: tensor {where[name]} is {theirs.dtype} and other layers {first}; give load_hf a "
                "dtype, or save it in one"
            )


def _leaf(row: Row, leaves: dict[str, Tensor], found: dict[str, Entry], dtype: torch.dtype | None) -> Entry:
    shape, spots = tuple(leaves[row.ours].shape), list(places(row, leaves))
    theirs = found[spots[0][0]]
    if spots[0][1] == () and not row.transposed and len(row.beside) < 2 and dtype in (None, theirs.dtype):
        return Entry(theirs.dtype, shape, theirs.give)  # shares the memory

    own = part(row, leaves)

    def give() -> Tensor:
        leaf = torch.empty(shape, dtype=dtype or theirs.dtype)
        for name, index in spots:
            tensor = found[name].give()
            ours = tensor.transpose(-1, -2) if row.transposed else tensor
            leaf[index].copy_(ours[..., own])
            del tensor, ours
        return leaf

    return Entry(dtype or theirs.dtype, shape, give)


def _digest(entry: Entry) -> str:
    return hashlib.sha256(memory_of(entry.give().contiguous())).hexdigest()
