"""Folders of decoders that transformers' own code computes: their weights as leaves of ours, and back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fzero.checkpoint.convert.huggingface import Leaves, write_tokenizer
from fzero.checkpoint.convert.huggingface_families import FAMILIES
from fzero.checkpoint.convert.huggingface_layers import read_labels, write_labels
from fzero.checkpoint.convert.huggingface_read import FLOATS
from fzero.checkpoint.convert.safetensors import TensorEntry
from fzero.checkpoint.convert.transformers_weights import copy_to_disk, hide_progress_bars, weights_of
from fzero.core.files import remove_entry
from fzero.core.storage import write_text, write_texts
from fzero.core.text_parsing import parse_json, read_json
from fzero.models.decoder_config import DecoderConfig, read_decoder
from fzero.models.score import SCORE, ScoreConfig, head_rows


def is_foreign(path: Path) -> bool:
    """Whether a config.json is of an architecture that fzero has no functions of."""
    if not path.is_file():
        return False
    kind = read_json(path, wide=True).get("model_type")
    return all(kind != family.model_type for family in FAMILIES)


def open_decoder(
    folder: Path, path: Path, *, dtype: torch.dtype | None = None
) -> tuple[DecoderConfig | ScoreConfig, dict[str, TensorEntry]]:
    """(the config of the decoder in `folder`, its leaves, each read on request), by its config.json.

    Raises ValueError as `read_decoder` does, for a module that cannot be cut into layers, and naming a tensor that is
    missing, unexpected or of another shape, and a buffer whose values are not those that its code makes."""
    content = read_json(path, wide=True)
    config: Any = read_decoder(content, str(path))
    if content.get("architectures") not in (None, [], [config.architecture]):  # else read_decoder has refused it
        config = read_labels(content, config, path)
    decoder = decoder_of(config)
    read = weights_of(decoder.module, folder)
    expect_buffers(decoder.module, read, folder)
    leaves = {}
    for leaf, names in decoder.sources.items():
        entries = [read[name] for name in names]
        shape, stacked = entries[0].shape, leaf.startswith("blocks")
        kind = dtype or max((entry.dtype for entry in entries), key=lambda candidate: candidate.itemsize)
        if kind not in FLOATS:
            raise ValueError(f"{folder}: {names[0]} is {kind}; fzero reads {', '.join(map(str, FLOATS))}")
        full_shape = (len(names), *shape) if stacked else shape
        leaves[leaf] = TensorEntry(kind, full_shape, partial(read_leaf, entries, kind, stacked))
    return config, leaves


def decoder_of(config: DecoderConfig | ScoreConfig) -> Any:
    """The decoder of a config, with the sources of all its leaves."""
    from fzero.models import decoder

    if not isinstance(config, ScoreConfig):
        return decoder.decoder_of(config)
    base = decoder.decoder_of(config.base, head_rows(config))
    return base._replace(sources={**base.sources, SCORE: ("score.weight",)})


def notes_of(config: DecoderConfig | ScoreConfig) -> tuple[str, ...]:
    """The lines that say what computes a decoder, and what that costs."""
    import transformers

    line = (
        f"{config.architecture} has no functions of fzero's own: the code of transformers {transformers.__version__} "
        "computes it, layer by layer, with PyTorch's attention, without fused kernels, and with all logits of a "
        "micro-batch in memory; embedding and head are whole on every rank of tp"
    )
    has_code = "auto_map" in parse_json(config.text, config.architecture, wide=True)
    code = ("auto_map in its config.json names code of the folder's own, which is not run",) if has_code else ()
    return (line, *code, *decoder_of(config).notes)


def read_leaf(entries: list[TensorEntry], dtype: torch.dtype, stacked: bool) -> Tensor:
    """The values of a leaf: stacked, those of its layers."""
    if not stacked:
        return entries[0].give().to(dtype, copy=True)
    out = torch.empty((len(entries), *entries[0].shape), dtype=dtype)
    for i, entry in enumerate(entries):
        out[i] = entry.give()
    return out


def expect_buffers(module: nn.Module, read: Mapping[str, TensorEntry], folder: Path) -> None:
    """Raise ValueError for a buffer in a folder with other values than the module makes: a run has none of its own."""
    for name, leaf in module.named_buffers():
        if name in read and not torch.equal(read[name].give().to(leaf.dtype), leaf):
            raise ValueError(
                f"{folder}: the buffer {name} has other values than the code of {type(module).__name__} makes of the "
                "config.json"
            )


def save_decoder(
    folder: str | Path,
    config: DecoderConfig | ScoreConfig,
    leaves: Leaves,
    *,
    tokenizer: str | Path | None = None,
    eos: Mapping[str, Any] | None = None,
    files: Mapping[str, str] = {},
) -> Path:
    """Write `folder` for transformers to load, with the config.json that the decoder came with; return its path.

    leaves, tokenizer, files: see `save_hf`. eos: entries of config.json that replace its own. The weights are in a
    nameless file beside the folder meanwhile. The folder appears when it is complete. Raises ValueError if it exists.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder}: already exists; name another folder or remove this one first")
    decoder = decoder_of(config)
    values = {name: leaf for name, leaf in decoder.module.state_dict().items() if not leaf.is_meta}
    dtypes = {leaf.dtype for leaf in leaves.like.values()}
    for leaf, names in decoder.sources.items():
        for i, name in enumerate(names):
            index = (i,) if leaf.startswith("blocks") else ()
            values[name] = copy_to_disk(leaves.read(leaf, index), folder.parent)
    dtype = str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else "float32"
    content = {"architectures": [config.architecture], **parse_json(config.text, config.architecture, wide=True)}
    content |= eos or {}
    if isinstance(config, ScoreConfig):
        content |= {"architectures": [type(decoder.module).__name__], **write_labels(config)}
        content["pad_token_id"] = config.pad if config.pad >= 0 else None
    content = {name: value for name, value in content.items() if name not in ("torch_dtype", "dtype", "auto_map")}
    partly = folder.with_name(f"{folder.name}.partial")
    remove_entry(partly)
    try:
        with hide_progress_bars():
            decoder.module.save_pretrained(partly, state_dict=values, max_shard_size="5GB")
        for json_file in partly.glob("*.json"):
            if not json_file.name.startswith("model.safetensors"):
                json_file.unlink()
        write_text(partly, "config.json", json.dumps({**content, "torch_dtype": dtype}, indent=2) + "\n")
        write_tokenizer(partly, tokenizer, config.max_len)
        write_texts(partly, files)
        partly.rename(folder)
    except BaseException:
        shutil.rmtree(partly, ignore_errors=True)
        raise
    return folder
