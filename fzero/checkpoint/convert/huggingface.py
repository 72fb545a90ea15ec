"""The weights of GPT-2, Mixtral, gpt-oss, DeepSeek-V3, Llama and its variations to and from folders that Hugging Face
`transformers` reads and writes.

The names are data, in huggingface_names.py; import and export read the same rows. One tensor is held at a time beside
the parameters.

Differs from transformers: no dropout of attention probabilities (attn_pdrop, which no weight depends on, is passed
over), and one rate for embeddings and residual branches; Mixtral's auxiliary loss is taken per sequence (see
MoEConfig)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint.convert.huggingface_config import write_config
from fzero.checkpoint.convert.huggingface_families import HuggingFaceFamily, full_name
from fzero.checkpoint.convert.huggingface_names import TensorRow, row_tensors, tensor_shape
from fzero.checkpoint.convert.huggingface_read import FLOATS, leaves_of, meta_leaves, read_hf_config, tensors_of
from fzero.checkpoint.convert.safetensors import TensorEntry, write_safetensors
from fzero.core import pytree
from fzero.core.files import make_folder, remove_entry
from fzero.core.pytree import Tree
from fzero.core.storage import write_text, write_texts
from fzero.models import build

# ---- import ----


def load_hf(folder: str | Path, *, dtype: torch.dtype | None = None) -> tuple[Any, Tree]:
    """(config, params) of the model that `transformers` saved to `folder`, of an architecture in docs/huggingface.md.

    Reads config.json with model.safetensors or the files of model.safetensors.index.json. dtype: of the parameters;
    None keeps the stored one. The parameters own their memory; Mixtral's config has z_coef=0.
    Raises ValueError naming the architecture, the config entry or the tensor that is unknown, missing, unexpected or of
    another shape."""
    folder = Path(folder)
    config, family = read_hf_config(folder / "config.json")
    leaves = leaves_of(folder, config, family, tensors_of(folder), dtype=dtype)
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
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder}: already exists; name another folder or remove this one first")
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
    partial = folder.with_name(f"{folder.name}.partial")
    remove_entry(partial)
    make_folder(partial.parent, partial.name)
    try:
        write_text(partial, "config.json", json.dumps(hf, indent=2) + "\n")
        write_tokenizer(partial, source, config.max_len)
        write_texts(partial, files)
        _write_tensors(partial, _tensors(family, rows, leaves), max_shard_bytes)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
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
