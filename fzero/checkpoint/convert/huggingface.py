"""The weights of GPT-2, Mixtral, gpt-oss, DeepSeek-V3, Llama and its variations to and from folders of `transformers`.

The names are data, in huggingface_names.py; import and export read the same rows. A source of weights is a table {name:
Entry} with shapes and dtypes, and so is the result: all problems are found before a tensor is read, and one leaf is in
memory at a time.

Differs from transformers: no dropout of attention probabilities, one rate for embeddings and residual branches;
Mixtral's auxiliary loss is taken per sequence (see MoEConfig).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint.convert.huggingface_config import find_family, read_config, write_config
from fzero.checkpoint.convert.huggingface_families import HuggingFaceFamily, full_name
from fzero.checkpoint.convert.huggingface_names import OUTER, TensorRow, column_slice, row_tensors, tensor_shape
from fzero.checkpoint.convert.quantization_config import quantization_of
from fzero.checkpoint.convert.quantized_tensors import dequantized_tensors, is_zero_bias
from fzero.checkpoint.convert.tensor_files import (
    TensorEntry,
    memory_of,
    read_safetensors,
    write_safetensors,
)
from fzero.core import pytree
from fzero.core.files import expect_absent, new_folder, path_fault
from fzero.core.pytree import Tree
from fzero.core.storage import write_text, write_texts
from fzero.core.text_parsing import read_json
from fzero.models import build

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEAD = "lm_head.weight"
MODELOPT, MODELOPT_SCALE = "hf_quant_config.json", re.compile(r".*\.weight_scale(_2)?")
MOST_MODELS = 16  # in one source, looked into before it is refused
# Parts that wrappers of PyTorch insert into parameter names.
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def meta_leaves(config: Any) -> dict[str, Tensor]:
    """`{name: leaf}` of the parameters of a model of these sizes, as tensors on the meta device."""
    tree = build(config).init(lambda name, shape, std, mean=0.0, dtype=None: torch.empty(shape, device="meta"))
    return pytree.named_leaves(tree)


def read_hf_config(path: Path, *, bare: bool = False) -> tuple[Any, HuggingFaceFamily]:
    """(our config, the family) of a config.json's model; raises ValueError naming what is not supported."""
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file; a model folder of transformers has a config.json, which says the model's sizes"
        )
    hf = read_json(path, wide=True)
    family = find_family(hf, path, bare=bare)
    return read_config(hf, family, path), family


def tensors_of(folder: Path, config: Path | None = None, *, dtype: torch.dtype | None = None) -> dict[str, TensorEntry]:
    """{name: Entry} of the safetensors files in a folder, of weights in codes what they stand for.

    config: the config.json that says whether there are codes; None takes the one in the folder. dtype: of weights in
    codes, see `dequantized_tensors`. Raises ValueError if there are no files, or one is damaged."""
    entries, path = _stored_tensors(folder), config or folder / "config.json"
    hf = read_json(path, wide=True) if path.is_file() else {}
    quantization = quantization_of(hf, str(path))
    if quantization is None and (folder / MODELOPT).is_file() and any(map(MODELOPT_SCALE.fullmatch, entries)):
        raise ValueError(f"{folder / MODELOPT}: the weights are in codes of ModelOpt, which fzero does not read")
    return entries if quantization is None else dequantized_tensors(folder, entries, quantization, dtype)


def _stored_tensors(folder: Path) -> dict[str, TensorEntry]:
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
    """{name: Entry} of the leaves of a model, each made from `tensors` on request; raises ValueError naming one."""
    leaves = meta_leaves(config)
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
    source: Path,
    family: HuggingFaceFamily,
    leaves: dict[str, Tensor],
    tensors: Mapping[str, TensorEntry],
    *,
    alone: bool,
) -> Names:
    """The names of the tensors of a model of `family`, under any prefix, which the embedding's name gives."""
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
        and not is_zero_bias(actual, tensors[actual])
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


# ---- import ----


def load_hf(folder: str | Path, *, dtype: torch.dtype | None = None) -> tuple[Any, Tree]:
    """(config, params) of the model that `transformers` saved to `folder`, of an architecture in docs/huggingface.md.

    Reads config.json with model.safetensors or the files of model.safetensors.index.json. dtype: of the parameters;
    None keeps the stored one. Weights in codes (GPTQ, AWQ, compressed-tensors, FP8, MXFP4) are dequantised to it, or
    with None to that of config.json. The parameters own their memory; Mixtral's config has z_coef=0.
    Raises ValueError naming the architecture, the config entry or the tensor that is unknown, missing, unexpected or of
    another shape."""
    folder = Path(folder)
    config, family = read_hf_config(folder / "config.json")
    leaves = leaves_of(folder, config, family, tensors_of(folder, dtype=dtype), dtype=dtype)
    return config, build(config).init(lambda name, shape, std, mean=0.0, dtype=None: leaves[name].give())


# ---- export ----


class Leaves(NamedTuple):
    """The parameters of a model in any memory, read a piece at a time."""

    like: dict[str, Tensor]  # their names, shapes and dtypes
    # reads the part of a leaf at an index into its first dims; () for the whole leaf
    read: Callable[[str, tuple[int, ...]], Tensor]


def save_hf(
    folder: str | Path,
    config: Any,
    params: Tree | Leaves,
    *,
    tokenizer: str | Path | None = None,
    eos: int | Mapping[str, Any] | None = None,
    architecture: str = "",
    max_shard_bytes: int = 5_000_000_000,
    files: Mapping[str, str] = {},
) -> Path:
    """Write `folder` for `transformers` to load: config.json and model.safetensors; return its path.

    The weights are split into several files with an index if they exceed `max_shard_bytes`. params: their tree, or
    Leaves: then one tensor of theirs is in memory at a time, with the leaves read for it. tokenizer: a tokenizer.json
    (or its folder) to copy. eos: the id of the end-of-document token, or what config.json is to have of bos_token_id,
    eos_token_id and pad_token_id. files: {name: content} of others to write, such as generation_config.json and
    tokenizer_config.json. architecture: the name in transformers where
    several compute the model, such as "MistralForCausalLM" for a Llama; "" takes the first of docs/huggingface.md. The
    folder appears only when it is complete.
    Raises ValueError if it exists, if `params` are not those of `config`, and for features that transformers does not
    compute: an attention pattern of another kind than the architecture has, and expert capacity.
    """
    folder = expect_absent(folder)
    source = _tokenizer_file(tokenizer)
    hf, family = write_config(config, architecture)
    leaves = params if isinstance(params, Leaves) else in_memory(params)
    shapes = meta_leaves(config)
    _expect_params(leaves.like, shapes)
    rows = [row for row in family.layouts[0] if row.leaf in shapes]
    dtypes = {leaf.dtype for leaf in leaves.like.values()}
    pad = getattr(config, "pad", -1)
    hf |= {
        "torch_dtype": str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": eos if isinstance(eos, int) else None,
    } | ({} if eos is None or isinstance(eos, int) else dict(eos))
    if pad >= 0:  # some have one by default
        hf["pad_token_id"] = pad
    with new_folder(folder) as partial:
        write_text(partial, "config.json", json.dumps(hf, indent=2) + "\n")
        write_tokenizer(partial, source, config.max_len)
        write_texts(partial, files)
        _write_tensors(partial, _tensors(family, rows, leaves), max_shard_bytes)
    return folder


def write_tokenizer(folder: Path, tokenizer: str | Path | None, max_len: int) -> None:
    """Write a tokenizer.json, and what tells transformers of it, into a folder; nothing where there is none."""
    source = _tokenizer_file(tokenizer)
    if source:
        write_text(folder, "tokenizer.json", source.read_text(encoding="utf-8"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_len}
        write_text(folder, "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def in_memory(params: Tree) -> Leaves:
    """The leaves of a tree of tensors."""
    named = pytree.named_leaves(params)
    return Leaves(named, lambda name, index: named[name][index])


def _tensors(family: HuggingFaceFamily, rows: list[TensorRow], leaves: Leaves) -> dict[str, TensorEntry]:
    """The tensors of transformers, in the order of leaves and layers, each made from ours on request."""
    sources: dict[str, list[tuple[TensorRow, tuple[int, ...]]]] = {}
    for row in rows:
        for name, index in row_tensors(row, leaves.like):
            sources.setdefault(name, []).append((row, index))
    entries = {}
    for name, parts in sources.items():
        row, _ = parts[0]
        entries[full_name(family, name)] = TensorEntry(
            leaves.like[row.leaf].dtype,
            tuple(tensor_shape(row, leaves.like)),
            lambda parts=parts: _tensor(leaves, parts),
        )
    return entries


def _tensor(leaves: Leaves, parts: list[tuple[TensorRow, tuple[int, ...]]]) -> Tensor:
    """One tensor of transformers."""
    pieces = [leaves.read(row.leaf, index) for row, index in parts]
    row, tensor = parts[0][0], pieces[0]
    if len(pieces) > 1:
        tensor = torch.stack(pieces, -1).flatten(-2) if row.in_turn else torch.cat(pieces, -1)
    return tensor.transpose(-1, -2) if row.transposed else tensor


def _write_tensors(folder: Path, entries: dict[str, TensorEntry], max_shard_bytes: int) -> None:
    shards: list[dict[str, TensorEntry]] = []
    budget, total = -1, 0
    for name, entry in entries.items():
        size_bytes = entry.dtype.itemsize * torch.Size(entry.shape).numel()
        if size_bytes > budget:
            shards.append({})
            budget = max_shard_bytes
        shards[-1][name] = entry
        budget, total = budget - size_bytes, total + size_bytes
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", shards[0])
        return
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_text(folder, "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def _expect_params(named: dict[str, Tensor], leaves: dict[str, Tensor]) -> None:
    pytree.from_named(named, leaves)
    for name, leaf in named.items():
        if leaf.shape != leaves[name].shape:
            raise ValueError(f"{name} has shape {list(leaf.shape)}; the config says {list(leaves[name].shape)}")
        if leaf.dtype not in FLOATS:
            raise ValueError(f"{name} is {leaf.dtype}; transformers takes float32, bfloat16, float16 and float64")


def _tokenizer_file(tokenizer: str | Path | None) -> Path | None:
    if tokenizer is None:
        return None
    file = Path(tokenizer) / "tokenizer.json" if Path(tokenizer).is_dir() else Path(tokenizer)
    if not file.is_file():
        raise ValueError(f"{file}: no such file; tokenizer is a tokenizer.json or a folder with one (bytes have none)")
    return file
