"""A model in a folder of another system: what kind it is, and its leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero.checkpoint.convert.dcp import FP32, ZERO, find_universal, is_plain_deepspeed, open_universal
from fzero.checkpoint.convert.huggingface import leaves_of, read_hf_config, tensors_of
from fzero.checkpoint.convert.tensor_files import TensorEntry
from fzero.checkpoint.convert.transformers_models import is_foreign, notes_of, open_decoder
from fzero.core.pytree import Tree
from fzero.models import build

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")


class ImportSource(NamedTuple):
    """A model in a folder of another system."""

    kind: str  # the kind, for messages
    config: Any  # the sizes, as one of fzero.models
    leaves: dict[str, TensorEntry]  # our leaves, each read on request
    hf_config: Path  # the config.json with the sizes
    notes: tuple[str, ...] = ()  # lines about it


def open_source(
    folder: str | Path, config: str | Path | None = None, *, dtype: torch.dtype | None = None
) -> ImportSource:
    """Open the model in `folder`; its weights are read later. A decoder of an architecture that docs/huggingface.md
    does not list is one that transformers' own code computes.

    config: the config.json of transformers with its sizes; None takes the one in the folder. dtype: of the leaves; None
    keeps the stored one. Raises ValueError of one line for an unknown folder, for a missing config, and naming a tensor
    that is missing, unexpected, or of another shape or dtype. A damaged tensor is found only when it is read."""
    # Not above: torch's reader imports sympy and DTensor, most of a second of any run, which imports this file.
    from fzero.checkpoint.convert.dcp import METADATA, open_dcp

    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: {'is not a folder' if folder.exists() else 'no such folder'}")
    universal = find_universal(folder)
    if any((folder / name).is_file() for name in SAFETENSORS):
        kind, tensors, alone = "Hugging Face model", tensors_of, True
    elif (folder / METADATA).is_file():
        kind, tensors, alone = "torch.distributed.checkpoint", open_dcp, False
    elif universal is not None:
        kind, tensors, alone = "DeepSpeed universal checkpoint", open_universal, True
    elif is_plain_deepspeed(folder):
        raise ValueError(
            f"{folder}: a DeepSpeed checkpoint that is not universal; convert it first: python -m "
            f"deepspeed.checkpoint.ds_to_universal --input_folder {folder} --output_folder ... --inject_missing_state"
        )
    else:
        candidates = (
            f"{SAFETENSORS[0]} (or its index), {METADATA} (torch.distributed.checkpoint), {ZERO}/*/{FP32} "
            "(DeepSpeed universal)"
        )
        raise ValueError(f"{folder}: holds nothing that fzero imports; looked for {candidates}")
    config_path = Path(config) if config is not None else folder / "config.json"
    if config is None and not config_path.is_file():
        raise ValueError(
            f"{folder}: a {kind} without a config.json with the model's sizes; name it by config= "
            f"(--hf-config HF_CONFIG.json)"
        )
    weights_folder = universal if tensors is open_universal and universal is not None else folder
    if tensors is tensors_of and is_foreign(config_path):
        decoder_config, leaves = open_decoder(folder, config_path, dtype=dtype)
        return ImportSource(kind, decoder_config, leaves, config_path, notes_of(decoder_config))
    model_config, family = read_hf_config(config_path, bare=not alone or tensors is open_universal)
    return ImportSource(
        kind,
        model_config,
        leaves_of(weights_folder, model_config, family, tensors(weights_folder), dtype=dtype, alone=alone),
        config_path,
    )


def load(source: ImportSource) -> Tree:
    """Load all parameters of a source into memory. Raises ValueError naming a damaged tensor."""
    return build(source.config).init(lambda name, shape, std, mean=0.0, dtype=None: source.leaves[name].give())
