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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint.convert.huggingface import meta_leaves, read_hf_config
from fzero.checkpoint.convert.huggingface_config import write_config
from fzero.checkpoint.convert.huggingface_families import full_name
from fzero.checkpoint.convert.huggingface_names import TensorRow, row_tensors
from fzero.checkpoint.convert.tensor_files import TensorEntry, read_safetensors, write_safetensors
from fzero.core import digest, pytree
from fzero.core.files import expect_absent, new_folder
from fzero.core.pytree import Tree
from fzero.core.storage import write_text
from fzero.core.text_parsing import expect_entries, nearest, read_json, short
from fzero.models import LORA, LoRAConfig
from fzero.models.configs import without_adapters
from fzero.sharding.slices import is_stacked

CONFIG, TENSORS, BASE = "adapter_config.json", "adapter_model.safetensors", "fzero_base.json"
PREFIX = "base_model.model."
# The entries of adapter_config.json that are read; those that change nothing of what the factors of a file compute; and
# what those may be that would change it. Others are refused by name.
KINDS: dict[str, Any] = {
    "peft_type": str,
    "r": int,
    "lora_alpha": float,
    "lora_dropout?": float,
    "use_dora?": bool,
    "use_rslora?": bool,
    "base_model_name_or_path?": str | None,
}
SELECTED = {"target_modules": list | str, "exclude_modules?": list | str | None}
UNUSED = {
    *("auto_mapping", "eva_config", "fan_in_fan_out", "inference_mode", "megatron_core", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "task_type"),
}
INITS = ("gaussian", "eva", "orthogonal")  # which the factors in a file replace
# Which, when PEFT loads the adapter, also take a product of their first factors out of the base's weights. Those that
# draw random numbers for it (pissa_niter_N) compute another model at each load.
SUBTRACTED = ("pissa", "olora", "OLoRA")
LOOSE = 1e-3  # of a weight: what is taken out of it may differ by so much between machines, and not by more
PLAIN: dict[str, tuple[Any, ...]] = {
    "init_lora_weights": (True, False, None, *INITS, *SUBTRACTED),
    "bias": ("none",),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "layers_to_transform": (None, []),
    "layers_pattern": (None, [], ""),
    "megatron_config": (None,),
    "loftq_config": ({}, None),
    "corda_config": (None,),
    "lora_ga_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "kasa_config": (None,),
    "arrow_config": (None,),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "ensure_weight_tying": (False,),
}
# What PEFT has in the weights once it merged the adapter.
MERGED = {
    *("alpha_pattern", "bias", "layers_pattern", "layers_to_transform", "lora_bias", "modules_to_save"),
    *("rank_pattern", "target_parameters", "trainable_token_indices"),
}
MERGE = "let PEFT merge it (merge_and_unload), and start from that folder"


class Adapter(NamedTuple):
    """An adapter in a folder of PEFT."""

    config: LoRAConfig
    leaves: dict[str, TensorEntry]  # ours, each made on request
    notes: list[str]  # lines about what is not taken over
    stored: dict[str, bool]  # the weights of ours, and whether transformers has them as [out, in]
    subtracted: str  # of SUBTRACTED in small letters, or ""
    folder: Path  # where it is


class _ModuleLayer(NamedTuple):
    """A layer of a weight of ours in transformers."""

    module: str  # that has it, alone or with others
    row: TensorRow
    index: tuple[int, ...]  # into our leaf


def is_adapter(folder: Path) -> bool:
    """Whether a folder is an adapter of PEFT."""
    return (folder / CONFIG).is_file()


def base_of(folder: Path) -> Path:
    """The folder of an adapter's base; raises ValueError if it is not here."""
    base_name = read_json(folder / CONFIG, wide=True).get("base_model_name_or_path")
    for candidate in (folder / base_name, Path(base_name)) if isinstance(base_name, str) and base_name else ():
        if candidate.is_dir() and candidate.resolve() != folder.resolve():
            return candidate
    raise ValueError(
        f"{folder / CONFIG}: base_model_name_or_path is {short(base_name)}, which is no folder here; write there the "
        "folder of the model that the adapter was trained on"
    )


def save_adapter(folder: str | Path, config: LoRAConfig, params: Tree, *, base: str = "") -> Path:
    """Write `folder` for PEFT to load on the model in `base`; return its path. It appears only when it is complete."""
    folder = expect_absent(folder)
    if config.vocabulary:
        raise ValueError(
            "the tables of the vocabulary are trained too, which are no factors; merge: fzero export without --adapter"
        )
    named = pytree.named_leaves(params)
    inner = without_adapters(config.base)
    modules = _modules(inner, Path(base) if base else None)
    adapted = {name.removesuffix("_lora_a") for name in named if name.endswith("_lora_a")}
    entries, used = {}, {}
    for module, row, index in modules:
        if row.leaf not in adapted:
            continue
        if row.fused_leaves:
            raise ValueError(
                f"{row.leaf} is a part of {module} in transformers, where all parts have one factor A; merge them: "
                "fzero export without --adapter"
            )
        used[module] = row
        parts = {"lora_A.weight": "a", "lora_B.weight": "b"} | ({"lora_magnitude_vector": "m"} if config.dora else {})
        for suffix, factor in parts.items():
            leaf = named[f"{row.leaf}_lora_{factor}"][index]
            leaf = leaf if factor == "m" else leaf.T
            entries[f"{PREFIX}{module}.{suffix}"] = TensorEntry(leaf.dtype, tuple(leaf.shape), lambda leaf=leaf: leaf)
    targets = sorted({module.rpartition(".")[2] for module in used})
    if any(module.rpartition(".")[2] in targets for module, *_ in modules if module not in used):
        targets = sorted(used)
    peft_config = {
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
    with new_folder(folder) as partial:
        write_text(partial, CONFIG, json.dumps(peft_config, indent=2) + "\n")
        write_safetensors(partial / TENSORS, entries)
        if base_sum := base_digest(named):
            write_text(partial, BASE, json.dumps({"digest": base_sum}) + "\n")
    return folder


def open_adapter(folder: Path, base: Path, inner: Any) -> Adapter:
    """The adapter in `folder` for the model `inner` in `base`, its factors read later; raises ValueError."""
    peft_config = _read_peft_config(folder / CONFIG)
    if not (folder / TENSORS).is_file():
        raise ValueError(
            f"{folder / TENSORS}: no such file; fzero reads no other weights of an adapter (no .bin files)"
        )
    rank, dora = peft_config["r"], peft_config.get("use_dora", False)
    subtracted = (
        str(peft_config.get("init_lora_weights")).lower() if peft_config.get("init_lora_weights") in SUBTRACTED else ""
    )
    tensors = {n.removeprefix(PREFIX).removesuffix(".weight"): e for n, e in read_safetensors(folder / TENSORS).items()}
    leaves, mismatch = meta_leaves(inner), f"{folder}: an adapter for another base than {base}"
    layer_entries: dict[str, dict[tuple[int, ...], TensorEntry]] = {}
    unmatched, modules = set(tensors), _modules(inner, base)
    for module, row, index in modules:
        size_in, size_out = leaves[row.leaf].shape[-2:]
        shapes = {"lora_A": ("a", (rank, size_in)), "lora_B": ("b", (size_out, rank))}
        shapes |= {"lora_magnitude_vector": ("m", (size_out,))} if dora else {}
        for suffix, (factor, shape) in shapes.items():
            name = f"{module}.{suffix}"
            if name not in tensors:
                continue
            if rank > min(size_in, size_out):
                raise ValueError(f"{folder / CONFIG}: r is {rank}, more than {module} has rows or columns; {MERGE}")
            if row.fused_leaves:
                raise ValueError(f"{folder}: has factors of {module}, of which fzero has the parts apart; {MERGE}")
            if tensors[name].shape != shape:
                raise ValueError(
                    f"{mismatch}: {name} is {list(tensors[name].shape)}, and there it would be {list(shape)}"
                )
            unmatched.discard(name)
            layer_entries.setdefault(f"{row.leaf}_lora_{factor}", {})[index] = tensors[name]
    if unmatched:
        tied = getattr(inner, "tied", False) and any(re.search(r"\.\d+\.", name) is None for name in unmatched)
        raise ValueError(
            f"{mismatch}, or of an embedding, a head, a bias or experts, which fzero's adapters lack: "
            f"it has {min(unmatched)}; "
            + ("its embedding is its head too, and PEFT would merge into both what is of one" if tied else MERGE)
        )
    names = sorted({re.sub(LORA, "", name) for name in layer_entries})
    for name in names:
        for factor in "abm" if dora else "ab":
            layer_tensors = layer_entries.get(f"{name}_lora_{factor}", {})
            if len(layer_tensors) < leaves[name].shape[0]:
                raise ValueError(
                    f"{mismatch}, or of some layers alone: it has factors for {len(layer_tensors)} of the "
                    f"{leaves[name].shape[0]} layers of {name}; {MERGE}"
                )
    alpha = peft_config["lora_alpha"] * (math.sqrt(rank) if peft_config.get("use_rslora") else 1.0)
    targets = rf"^({'|'.join(re.escape(name) for name in names)})$"
    config = LoRAConfig(inner, rank, float(alpha), targets, dora)
    if subtracted:
        config = LoRAConfig(inner, 2 * rank, 2 * float(alpha), targets, dora)
    _expect_selected(
        peft_config,
        [module_layer.module for module_layer in modules],
        {name.rpartition(".")[0] for name in tensors},
        folder,
    )
    rate = peft_config.get("lora_dropout", 0.0)
    notes = [f"{folder}: was trained with lora_dropout {rate}; fzero trains factors without dropout"] if rate else []
    if subtracted:
        notes.append(
            f"{folder}: init_lora_weights is {subtracted!r}, which PEFT takes out of the base; fzero has its first "
            f"factors beside the others, which makes the rank {2 * rank}"
        )
    stored = {row.leaf: row.transposed for _, row, _ in modules if row.leaf in names}
    factors = {name: _stacked(name, parts) for name, parts in layer_entries.items()}
    return Adapter(config, factors, notes, stored, subtracted, folder)


# SUBTRACTED: W - s B0 A0 + s B A = W + s [B, -B0] [A; A0], where s B0 A0 is the best product of that rank (PiSSA, Meng
# et al. 2024, arXiv:2404.02948), or that of the first columns of Q and rows of R (OLoRA, Bueyuekakyuez 2024,
# arXiv:2406.01775).
def adapter_leaves(adapter: Adapter, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The leaves of an adapter for the base `named`; SUBTRACTED ones with the factors that PEFT takes out of it."""
    leaves = {name: entry.give() for name, entry in adapter.leaves.items()}
    scale, rank = adapter.config.alpha / adapter.config.rank, adapter.config.rank // 2
    for name, transposed in adapter.stored.items() if adapter.subtracted else ():
        weight, a, b = named[name].float(), leaves[f"{name}_lora_a"].float(), leaves[f"{name}_lora_b"].float()
        # The decomposition of the matrix that PEFT gives to it, whose bits are PEFT's on the same machine.
        if adapter.subtracted == "pissa":
            (left_factor, right_factor), error = _principal_factors(weight.mT, rank)
            first, second = right_factor.mT, left_factor.mT / scale
            reason = f"of the singular values of {name} the {rank}th and the next are all but equal"
        else:
            (left_factor, right_factor), error = _orthogonal_factors(weight.mT if transposed else weight, rank)
            first, second = (right_factor.mT, left_factor.mT) if transposed else (left_factor, right_factor)
            reason = f"of {name} the first {rank} columns are all but dependent"
        if error > LOOSE:
            raise ValueError(
                f"{adapter.folder / CONFIG}: init_lora_weights is {adapter.subtracted!r}, and {reason}: rounding "
                f"decides what PEFT takes out of the base, up to {error:.0e} of it from machine to machine; let PEFT "
                "save it as plain LoRA (path_initial_model_for_weight_conversion), or merge it"
            )
        leaves[f"{name}_lora_a"] = torch.cat([a, first], -1)
        leaves[f"{name}_lora_b"] = torch.cat([b, -second], -2)
    return leaves


def _principal_factors(weight: Tensor, rank: int) -> tuple[tuple[Tensor, Tensor], float]:
    """The factors [L, M, R], [L, R, N] of the best product of weights, and how far rounding of them can turn it."""
    u, sizes, v = torch.linalg.svd(weight, full_matrices=False)
    root = sizes[..., :rank].sqrt()
    factors = u[..., :rank] * root[..., None, :], v[..., :rank, :] * root[..., None]
    last, largest = sizes[..., rank - 1], sizes[..., 0].clamp(min=torch.finfo(torch.float32).tiny)
    next_value = sizes[..., rank] if sizes.shape[-1] > rank else torch.zeros_like(last)
    turn = (torch.finfo(torch.float32).eps * largest / (last - next_value)).nan_to_num(1.0).clamp(max=1.0)
    return factors, float((turn * last / largest).max())


def _orthogonal_factors(weight: Tensor, rank: int) -> tuple[tuple[Tensor, Tensor], float]:
    """The first columns of Q [L, M, R], rows of R [L, R, N] of weights, and how far rounding can turn their product."""
    q, r = torch.linalg.qr(weight)
    residual = r.diagonal(dim1=-2, dim2=-1)[..., :rank].abs() / weight[..., :rank].norm(dim=-2)
    turn = (torch.finfo(torch.float32).eps / residual).nan_to_num(0.0).clamp(max=1.0)  # a column of zeros turns nothing
    return (q[..., :rank], r[..., :rank, :]), float(turn.max())


def _read_peft_config(path: Path) -> dict[str, Any]:
    """The content of an adapter_config.json, in which every entry is known; raises ValueError for another kind."""
    peft_config = read_json(path, wide=True)
    expect_entries(peft_config, {"peft_type": str}, str(path))
    if peft_config["peft_type"] != "LORA":
        raise ValueError(f"{path}: peft_type is {short(peft_config['peft_type'])}; fzero has LORA alone")
    expect_entries(peft_config, {**KINDS, **SELECTED}, str(path))
    if not 0.0 < peft_config["lora_alpha"] < math.inf:
        raise ValueError(f"{path}: lora_alpha is {short(peft_config['lora_alpha'])}; it must be a positive number")
    recognized = UNUSED | {name.removesuffix("?") for name in (*KINDS, *SELECTED)}
    for name, value in peft_config.items():
        if name in PLAIN and value not in PLAIN[name]:
            random = name == "init_lora_weights" and str(value).startswith("pissa")
            fix = "; it changes the base's weights when it is loaded" if name == "init_lora_weights" else ""
            fix += " by random numbers, another model at each load" if random else ""
            fix += ": let PEFT save it as plain LoRA (path_initial_model_for_weight_conversion)" if fix else ""
            fix = fix or f"; {MERGE}" * (name in MERGED)
            allowed = (
                " or ".join(map(repr, dict.fromkeys(map(str, PLAIN[name]))))
                if len(PLAIN[name]) > 3
                else repr(PLAIN[name][0])
            )
            raise ValueError(f"{path}: {name} is {short(value)}; fzero has {allowed} alone{fix}")
        if name not in PLAIN and name not in recognized and value is not None:
            raise ValueError(
                f"{path}: {name} is {short(value)}{nearest(name, (*recognized, *PLAIN))}; fzero does not know what "
                "that changes in LoRA. If it changes nothing, take it out of the file"
            )
    return peft_config


def _expect_selected(peft_config: dict[str, Any], modules: list[str], adapted: set[str], folder: Path) -> None:
    """Raise ValueError where target_modules and exclude_modules, and the factors in the file, name other modules."""

    def matches(pattern: list[str] | str | None, module: str) -> bool:
        if isinstance(pattern, str):
            return re.fullmatch(pattern, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in pattern or ())

    targets, excluded = peft_config["target_modules"], peft_config.get("exclude_modules")
    for name, pattern in (("target_modules", targets), ("exclude_modules", excluded)):
        if isinstance(pattern, list) and not all(isinstance(candidate, str) for candidate in pattern):
            raise ValueError(f"{folder / CONFIG}: {name} is {short(pattern)}; it must name modules")
    try:
        selected = {
            candidate for candidate in modules if matches(targets, candidate) and not matches(excluded, candidate)
        }
    except re.error as error:
        raise ValueError(f"{folder / CONFIG}: target_modules or exclude_modules is no pattern ({error})") from None
    unnamed = next(
        (candidate for candidate in targets if not any(matches([candidate], module) for module in modules)), None
    )
    if isinstance(targets, list) and unnamed is not None:
        raise ValueError(f"{folder / CONFIG}: target_modules has {unnamed!r}, of which there are no factors")
    lacking, extra = selected - adapted, (set(modules) & adapted) - selected
    for disputed, fault in (
        (lacking, "names it, and no factors of it are there"),
        (extra, "does not name it, and factors of it are there"),
    ):
        if disputed:
            raise ValueError(f"{folder / CONFIG}: {min(disputed)}: target_modules {fault}; is it of another file?")


def expect_base(folder: Path, base: Path, named: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the adapter in `folder` tells that it was trained on other weights than `named`."""
    if not (folder / BASE).is_file():
        return
    table = read_json(folder / BASE)
    expect_entries(table, {"digest": str}, str(folder / BASE))
    if table["digest"] != base_digest(named):
        raise ValueError(
            f"{folder}: an adapter for another base than {base}: the sizes agree, and the weights do not; "
            f"base_model_name_or_path in {CONFIG} names the base"
        )


def base_digest(named: Mapping[str, Tensor]) -> str:
    """A digest of the weights below adapters in bfloat16; "" if they are in codes or in float16."""
    base = {name: leaf for name, leaf in named.items() if not re.search(LORA, name)}
    if any(leaf.dtype not in (torch.bfloat16, torch.float32, torch.float64) for leaf in base.values()):
        return ""
    return f"{digest.combine({name: digest.digest(leaf.to(torch.bfloat16)) for name, leaf in base.items()}):016x}"


def _modules(inner: Any, base: Path | None) -> list[_ModuleLayer]:
    """The layers of the weights [in, out] of the blocks, by the architecture in the config.json of `base`."""
    has_config = (
        base is not None
        and (base / "config.json").is_file()
        and "architectures" in read_json(base / "config.json", wide=True)
    )
    family = read_hf_config(base / "config.json")[1] if base is not None and has_config else write_config(inner)[1]
    leaves = meta_leaves(inner)
    return [
        _ModuleLayer(full_name(family, name).removesuffix(".weight"), row, index)
        for row in family.layouts[0]
        if row.leaf in leaves and is_stacked(row.leaf) and leaves[row.leaf].dim() == 3
        for name, index in row_tensors(row, leaves)
    ]


def _stacked(name: str, parts: dict[tuple[int, ...], TensorEntry]) -> TensorEntry:
    """A leaf of ours from the tensors of its layers."""
    layers = [parts[index] for index in sorted(parts)]
    turned = not name.endswith("_lora_m")
    shape = tuple(reversed(layers[0].shape))

    def give() -> Tensor:
        return torch.stack([layer.give().T.contiguous() if turned else layer.give() for layer in layers])

    return TensorEntry(layers[0].dtype, (len(layers), *shape), give)
