"""GPT-2, Llama and Mixtral weights to and from folders that Hugging Face `transformers` reads and writes.

The names are data, in huggingface_names.py; import and export read the same rows. One tensor is held at a time beside the parameters.

Differs from transformers: no dropout of attention probabilities (attn_pdrop, which no weight depends on, is passed over), and one rate
for embeddings and residual branches; Mixtral's auxiliary loss is taken per sequence (see MoEConfig).
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fzero import pytree
from fzero.checkpoint import Entry, write_safetensors
from fzero.huggingface_names import Family, Row, find_family, read_config, write_config
from fzero.models import build
from fzero.pytree import Tree
from fzero.tables import parse_json

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# ---- both directions ----


def like(config: Any) -> dict[str, Tensor]:
    """`{name: leaf}` of the parameters of a model of these sizes, as tensors on the meta device."""
    tree = build(config).init(lambda name, shape, std, mean=0.0: torch.empty(shape, device="meta"))
    return pytree.named_leaves(tree)


def places(row: Row, shape: torch.Size) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name of theirs without prefix, index into our leaf of this shape) of every tensor that a row speaks of."""
    letters = [letter for letter in "le" if f"{{{letter}}}" in row.theirs]
    for index in itertools.product(*(range(n) for n in shape[: len(letters)])):
        yield row.theirs.format(**dict(zip(letters, index))), index


def their_shape(row: Row, shape: torch.Size) -> list[int]:
    """The shape of theirs, from that of our part of it."""
    *outer, last = shape
    whole = [*outer, last * row.parts]
    return [*whole[:-2], whole[-1], whole[-2]] if row.transposed else whole


# ---- import ----


def load_hf(folder: str | Path, *, dtype: torch.dtype | None = None) -> tuple[Any, Tree]:
    """(config, params) of the GPT-2, Llama or Mixtral model that `transformers` saved to `folder`.

    Reads config.json with model.safetensors or the files of model.safetensors.index.json. dtype: of the parameters; None keeps what is
    stored. The parameters own their memory; Mixtral's config has z_coef=0.
    Raises ValueError naming the architecture, the config entry or the tensor that is unknown, missing, unexpected or of another shape.
    """
    folder = Path(folder)
    where = folder / "config.json"
    hf = _read_json(where)
    family = find_family(hf, where)
    config = read_config(hf, family, where)
    leaves = like(config)
    with ExitStack() as stack:
        files = _open_tensors(folder, family, stack)
        rows = min(
            (tuple(row for row in layout if row.ours in leaves) for layout in family.layouts),
            key=lambda rows: sum(name not in files for row in rows for name, _ in places(row, leaves[row.ours].shape)),
        )
        _expect(folder, family, rows, leaves, files)
        named = {row.ours: _load_leaf(folder, row, leaves[row.ours].shape, files, dtype) for row in rows}
        if config.tied and "lm_head.weight" in files:
            tokens = next(row.theirs for row in rows if row.ours == "embed/tokens")
            if not torch.equal(_get(files["lm_head.weight"]), _get(files[tokens])):
                raise ValueError(f"{where}: tie_word_embeddings is true, but lm_head.weight is not {files[tokens][1]}; make it false")
    tree = build(config).init(lambda name, shape, std, mean=0.0: named[name])
    return config, tree


def _get(place: tuple[Any, str]) -> Tensor:
    file, name = place
    return file.get_tensor(name)


def _load_leaf(folder: Path, row: Row, shape: torch.Size, files: dict[str, tuple[Any, str]], dtype: torch.dtype | None) -> Tensor:
    leaf = torch.empty(0)
    for name, index in places(row, shape):
        theirs = _get(files[name])
        wanted = their_shape(row, shape[len(index) :])
        if list(theirs.shape) != wanted:
            raise ValueError(f"{folder}: tensor {files[name][1]} has shape {list(theirs.shape)}, config.json asks for {wanted}")
        if theirs.dtype not in FLOATS:
            raise ValueError(f"{folder}: tensor {files[name][1]} is {theirs.dtype}; fzero reads float32, bfloat16, float16 and float64")
        if leaf.shape != shape:
            leaf = torch.empty(shape, dtype=dtype or theirs.dtype)
        elif dtype is None and theirs.dtype != leaf.dtype:
            raise ValueError(f"{folder}: tensor {files[name][1]} is {theirs.dtype} and other layers {leaf.dtype}; give load_hf a dtype")
        ours = theirs.transpose(-1, -2) if row.transposed else theirs
        leaf[index].copy_(ours.chunk(row.parts, -1)[row.part])
    return leaf


def _open_tensors(folder: Path, family: Family, stack: ExitStack) -> dict[str, tuple[Any, str]]:
    """{name without prefix: (open file, name in it)} of the weights in the folder."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        shards = ["model.safetensors"]
    elif index.is_file():
        shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
    else:
        raise ValueError(f"{folder}: neither model.safetensors nor {index.name} in it; fzero reads no other weights (no .bin files)")
    found: dict[str, tuple[Any, str]] = {}
    for shard in shards:
        if not (folder / shard).is_file():
            raise ValueError(f"{folder / shard}: no such file, but {index.name} names it")
        try:
            file = stack.enter_context(safe_open(folder / shard, framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"{folder / shard}: damaged: {error}") from None
        for name in file.keys():  # noqa: SIM118  (not a dict)
            bare = name.removeprefix(family.prefix)
            if bare in found:
                raise ValueError(f"{folder}: tensor {name} is there twice")
            if not re.fullmatch(family.passed_over, bare):
                found[bare] = (file, name)
    return found


def _expect(folder: Path, family: Family, rows: tuple[Row, ...], leaves: dict[str, Tensor], files: dict[str, tuple[Any, str]]) -> None:
    wanted = {name for row in rows for name, _ in places(row, leaves[row.ours].shape)}
    missing = [full_name(family, name) for name in sorted(wanted - set(files))]
    extra = [files[name][1] for name in sorted(set(files) - wanted - {"lm_head.weight"})]
    for what, names in (("are missing", missing), ("are unexpected", extra)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{folder}: tensors {what} for a {family.architecture} of these sizes: {', '.join(names[:5])}{more}")


def full_name(family: Family, name: str) -> str:
    """The name in a file of transformers, from the one in the rows."""
    return name if name.startswith("lm_head.") else family.prefix + name


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a model folder has a config.json and model.safetensors")
    return parse_json(path.read_bytes(), str(path))


# ---- export ----


def save_hf(
    folder: str | Path,
    config: Any,
    params: Tree,
    *,
    tokenizer: str | Path | None = None,
    eos: int | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """The path of `folder`, written so that `transformers` loads the model from it: config.json and model.safetensors, in several files
    with an index where the weights exceed `max_shard_bytes`.

    tokenizer: a tokenizer.json (or its folder) to lay beside it. eos: the id of the end-of-document token. The folder appears when it is
    complete.
    Raises ValueError where it exists, where `params` are not those of `config`, and for what transformers does not compute: an attention
    pattern of another kind than the architecture has, and expert capacity.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder}: already exists; name another folder or remove this one first")
    source = _tokenizer_file(tokenizer)
    hf, family = write_config(config)
    named, leaves = pytree.named_leaves(params), like(config)
    _expect_params(named, leaves)
    rows = [row for row in family.layouts[0] if row.ours in leaves]
    dtypes = {leaf.dtype for leaf in named.values()}
    hf |= {"torch_dtype": str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else None, "bos_token_id": None, "eos_token_id": eos}
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        (partial / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
        if source:
            shutil.copyfile(source, partial / "tokenizer.json")
            about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_len}
            (partial / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        _write_tensors(partial, _tensors(family, rows, named), max_shard_bytes)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _tensors(family: Family, rows: list[Row], named: dict[str, Tensor]) -> dict[str, Entry]:
    """Their tensors in the order of the layers, each made from ours when it is asked for."""
    sources: dict[str, list[Tensor]] = {}
    by_name: dict[str, Row] = {}
    for row in rows:
        for name, index in places(row, named[row.ours].shape):
            sources.setdefault(name, []).append(named[row.ours][index])
            by_name[name] = row
    entries = {}
    for name, parts in sources.items():
        row = by_name[name]

        def give(parts: list[Tensor] = parts, transposed: bool = row.transposed) -> Tensor:
            whole = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
            return whole.transpose(-1, -2) if transposed else whole

        entries[full_name(family, name)] = (parts[0].dtype, tuple(their_shape(row, parts[0].shape)), give)
    return entries


def _write_tensors(folder: Path, entries: dict[str, Entry], max_shard_bytes: int) -> None:
    shards: list[dict[str, Entry]] = []
    room, total = -1, 0
    for name, entry in entries.items():
        size_bytes = entry[0].itemsize * torch.Size(entry[1]).numel()
        if size_bytes > room:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = entry
        room, total = room - size_bytes, total + size_bytes
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", shards[0])
        return
    weight_map = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


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
