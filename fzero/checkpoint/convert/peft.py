"""Adapters of Hugging Face's PEFT: LoRA's factors, and DoRA's magnitudes, to and from folders that it reads and writes.

adapter_config.json         what the factors are, and the folder of their base
adapter_model.safetensors   base_model.model.MODULE.lora_A.weight [R, in], lora_B.weight [out, R] and, of DoRA,
                            lora_magnitude_vector [out]
fzero_base.json             ours alone: a digest of the base
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint.convert.huggingface_config import write_config
from fzero.checkpoint.convert.huggingface_families import full_name
from fzero.checkpoint.convert.huggingface_names import Row, places
from fzero.checkpoint.convert.huggingface_read import like, read_hf_config
from fzero.checkpoint.convert.safetensors import Entry, read_safetensors, write_safetensors
from fzero.core import digest, pytree
from fzero.core.files import make_folder, remove_entry
from fzero.core.foreign import expect_entries, read_json, short
from fzero.core.pytree import Tree
from fzero.core.storage import write_text
from fzero.models import LORA, LoRAConfig
from fzero.models.presets import without_adapters
from fzero.sharding.slices import is_stacked

CONFIG, TENSORS, BASE = "adapter_config.json", "adapter_model.safetensors", "fzero_base.json"
PREFIX = "base_model.model."
# What an entry of adapter_config.json may be; anything else changes what the adapter computes.
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
}


class Adapter(NamedTuple):
    """An adapter in a folder of PEFT."""

    config: LoRAConfig
    leaves: dict[str, Entry]  # ours, each made on request


class _Place(NamedTuple):
    """A layer of a weight of ours in transformers."""

    module: str  # that has it, alone or with others
    row: Row
    index: tuple[int, ...]  # into our leaf


def is_adapter(folder: Path) -> bool:
    """Whether a folder is an adapter of PEFT."""
    return (folder / CONFIG).is_file()


def base_of(folder: Path) -> Path:
    """The folder of an adapter's base; raises ValueError if it is not here."""
    said = read_json(folder / CONFIG).get("base_model_name_or_path")
    for place in (folder / said, Path(said)) if isinstance(said, str) and said else ():
        if place.is_dir() and place.resolve() != folder.resolve():
            return place
    raise ValueError(
        f"{folder / CONFIG}: base_model_name_or_path is {short(said)}, which is no folder here; write there the folder "
        "of the model that the adapter was trained on"
    )


def save_adapter(folder: str | Path, config: LoRAConfig, params: Tree, *, base: str = "") -> Path:
    """Write `folder` for PEFT to load on the model in the folder `base`; return its path.

    params: of `models.lora`, whole (not sharded). The folder appears only when it is complete. Raises ValueError if it
    exists, for a model that transformers lacks, and for a weight that is only a part of one of transformers.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder}: already exists; name another folder or remove this one first")
    named = pytree.named_leaves(params)
    inner = without_adapters(config.base)
    modules = _modules(inner, Path(base) if base else None)
    adapted = {name.removesuffix("_lora_a") for name in named if name.endswith("_lora_a")}
    entries, used = {}, {}
    for module, row, index in modules:
        if row.ours not in adapted:
            continue
        if row.beside:
            raise ValueError(
                f"{row.ours} is a part of {module} in transformers, where all parts have one factor A; merge them: "
                "fzero export without --adapter"
            )
        used[module] = row
        parts = {"lora_A.weight": "a", "lora_B.weight": "b"} | ({"lora_magnitude_vector": "m"} if config.dora else {})
        for theirs, factor in parts.items():
            leaf = named[f"{row.ours}_lora_{factor}"][index]
            leaf = leaf if factor == "m" else leaf.T
            entries[f"{PREFIX}{module}.{theirs}"] = Entry(leaf.dtype, tuple(leaf.shape), lambda leaf=leaf: leaf)
    targets = sorted({module.rpartition(".")[2] for module in used})
    if any(module.rpartition(".")[2] in targets for module, *_ in modules if module not in used):
        targets = sorted(used)
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "use_dora": config.dora,
        "bias": "none",
        "fan_in_fan_out": not next(iter(used.values())).transposed,
        "inference_mode": True,
    }
    partial = folder.with_name(f"{folder.name}.partial")
    remove_entry(partial)
    make_folder(partial.parent, partial.name)
    try:
        write_text(partial, CONFIG, json.dumps(about, indent=2) + "\n")
        write_safetensors(partial / TENSORS, entries)
        if known := base_digest(named):
            write_text(partial, BASE, json.dumps({"digest": known}) + "\n")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def open_adapter(folder: Path, base: Path, inner: Any) -> Adapter:
    """The adapter in `folder`, for the model of config `inner` in the folder `base`; its factors are read later.

    Raises ValueError of one line for an adapter of another kind than LoRA or DoRA, and for one of another base.
    """
    about = read_json(folder / CONFIG)
    kinds = {"peft_type": str, "r": int, "lora_alpha": float, "use_dora?": bool, "use_rslora?": bool}
    expect_entries(about, kinds, str(folder / CONFIG))
    if about["peft_type"] != "LORA":
        raise ValueError(f"{folder / CONFIG}: peft_type is {short(about['peft_type'])}; fzero has LORA alone")
    for name, allowed in PLAIN.items():
        if name in about and about[name] not in allowed:
            raise ValueError(f"{folder / CONFIG}: {name} is {short(about[name])}; fzero has {allowed[0]!r} alone")
    if not (folder / TENSORS).is_file():
        raise ValueError(
            f"{folder / TENSORS}: no such file; fzero reads no other weights of an adapter (no .bin files)"
        )
    rank, dora = about["r"], about.get("use_dora", False)
    tensors = {n.removeprefix(PREFIX).removesuffix(".weight"): e for n, e in read_safetensors(folder / TENSORS).items()}
    leaves, other = like(inner), f"{folder}: an adapter for another base than {base}"
    found: dict[str, dict[tuple[int, ...], Entry]] = {}
    rest = set(tensors)
    for module, row, index in _modules(inner, base):
        size_in, size_out = leaves[row.ours].shape[-2:]
        shapes = {"lora_A": ("a", (rank, size_in)), "lora_B": ("b", (size_out, rank))}
        shapes |= {"lora_magnitude_vector": ("m", (size_out,))} if dora else {}
        for theirs, (factor, shape) in shapes.items():
            name = f"{module}.{theirs}"
            if name not in tensors:
                continue
            if row.beside:
                raise ValueError(
                    f"{folder}: has factors of {module}, of which fzero has the parts apart; merge it by PEFT"
                )
            if tensors[name].shape != shape:
                raise ValueError(f"{other}: {name} is {list(tensors[name].shape)}, and there it would be {list(shape)}")
            rest.discard(name)
            found.setdefault(f"{row.ours}_lora_{factor}", {})[index] = tensors[name]
    if rest:
        raise ValueError(f"{other}: it has {min(rest)}, which no weight there has")
    names = sorted({re.sub(LORA, "", name) for name in found})
    for name in names:
        for factor in "abm" if dora else "ab":
            have = found.get(f"{name}_lora_{factor}", {})
            if len(have) < leaves[name].shape[0]:
                raise ValueError(
                    f"{other}: it has factors for {len(have)} of the {leaves[name].shape[0]} layers of {name}"
                )
    alpha = about["lora_alpha"] * (math.sqrt(rank) if about.get("use_rslora") else 1.0)
    targets = rf"^({'|'.join(re.escape(name) for name in names)})$"
    config = LoRAConfig(inner, rank, float(alpha), targets, dora)
    return Adapter(config, {name: _stacked(name, parts) for name, parts in found.items()})


def expect_base(folder: Path, base: Path, named: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the adapter in `folder` tells that it was trained on other weights than `named`."""
    if not (folder / BASE).is_file():
        return
    about = read_json(folder / BASE)
    expect_entries(about, {"digest": str}, str(folder / BASE))
    if about["digest"] != base_digest(named):
        raise ValueError(
            f"{folder}: an adapter for another base than {base}: the sizes agree, and the weights do not; "
            f"base_model_name_or_path in {CONFIG} names the base"
        )


def base_digest(named: Mapping[str, Tensor]) -> str:
    """A digest of the weights below adapters in bfloat16, so that it is that of wider ones too; "" if they are in codes
    or in float16."""
    base = {name: leaf for name, leaf in named.items() if not re.search(LORA, name)}
    if any(leaf.dtype not in (torch.bfloat16, torch.float32, torch.float64) for leaf in base.values()):
        return ""
    return f"{digest.combine({name: digest.digest(leaf.to(torch.bfloat16)) for name, leaf in base.items()}):016x}"


def _modules(inner: Any, base: Path | None) -> list[_Place]:
    """The layers of the weights [in, out] of the blocks. base: the folder of the model, whose config.json tells the
    architecture."""
    told = base is not None and (base / "config.json").is_file() and "architectures" in read_json(base / "config.json")
    family = read_hf_config(base / "config.json")[1] if base is not None and told else write_config(inner)[1]
    leaves = like(inner)
    return [
        _Place(full_name(family, name).removesuffix(".weight"), row, index)
        for row in family.layouts[0]
        if row.ours in leaves and is_stacked(row.ours) and leaves[row.ours].dim() == 3
        for name, index in places(row, leaves)
    ]


def _stacked(name: str, parts: dict[tuple[int, ...], Entry]) -> Entry:
    """A leaf of ours from the tensors of its layers."""
    layers = [parts[index] for index in sorted(parts)]
    turned = not name.endswith("_lora_m")
    shape = tuple(reversed(layers[0].shape))

    def give() -> Tensor:
        return torch.stack([layer.give().T.contiguous() if turned else layer.give() for layer in layers])

    return Entry(layers[0].dtype, (len(layers), *shape), give)
