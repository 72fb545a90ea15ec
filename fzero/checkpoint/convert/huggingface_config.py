"""A config.json of Hugging Face `transformers` to a config of ours and back, by the fields of huggingface_names.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fzero.checkpoint.convert.huggingface_entries import (
    expect_known,
    read_labels,
    read_layers,
    scored_family,
    write_labels,
    write_layers,
)
from fzero.checkpoint.convert.huggingface_families import (
    FAMILIES,
    MOE_PLAIN,
    NOT_ZERO,
    REQUIRED,
    ROPE,
    Field,
    HuggingFaceFamily,
)
from fzero.checkpoint.convert.quantization_config import MXFP4, quantization_of
from fzero.core.config_tables import check_bounds
from fzero.core.text_parsing import expect_entries, nearest, short
from fzero.models import DeepSeekConfig, GPT2Config, MoEConfig, RopeScaling, ScoreConfig
from fzero.models.config_values import BOUNDS, parse_layers

LATENT_EPS = 1e-6  # of DeepSeek-V3's norms of latents in transformers, whatever config.json says
OTHER_EPS = f"DeepSeek-V3 of transformers has {LATENT_EPS} in its norms of latents, and fzero one number for all norms"


def find_family(hf: dict[str, Any], path: Path, *, bare: bool = False) -> HuggingFaceFamily:
    """The family of the model that a config.json describes; bare: a model_type alone suffices."""
    names = hf.get("architectures") or []
    for family in FAMILIES:
        if hf.get("model_type") != family.model_type:
            continue
        if names == [family.architecture] or (bare and not names):
            return family
        if names == [scored_family(family).architecture]:
            return scored_family(family)
    supported = f"{', '.join(family.architecture for family in FAMILIES)}, and those with ForSequenceClassification"
    raise ValueError(
        f"{path}: architectures is {names} of model_type {hf.get('model_type')!r}; fzero reads {supported}"
    )


def read_config(hf: dict[str, Any], family: HuggingFaceFamily, path: Path) -> Any:
    """Our config of a config.json; raises ValueError naming an entry that is missing or unsupported."""
    name = str(path)
    _expect_readable(hf, family, path)
    expect_known(hf, family, path)
    if family.rope and hf.get("rope_parameters") is None and not hf.get("rope_scaling"):
        hf = {**hf, "rope_parameters": family.rope}
    if family.original_len is not None:
        hf = {ROPE[3]: family.original_len, **hf}
    for entry, choices in family.fixed.items():
        value = hf.get(entry, choices[0])
        if value not in choices:
            raise ValueError(
                f"{path}: {entry} is {short(value)}; fzero supports {' or '.join(map(repr, choices))} only"
            )
    sizes: dict[str, Any] = dict(family.flags)
    kinds = {field.name: field.type for field in dataclasses.fields(family.config)}
    for field in family.fields:
        value = _value_of(hf, field, path)
        if value is REQUIRED:
            raise ValueError(f"{path}: {field.entry} is missing")
        allowed = {"int": int, "bool": bool}.get(str(kinds[field.size]), float)
        nullable = field.default is None or field.null is not REQUIRED
        expect_entries({field.entry: value}, {field.entry: allowed | None if nullable else allowed}, name)
        if field.entry in NOT_ZERO and value == 0:
            raise ValueError(f"{path}: {field.entry} is {value}; it must be above 0")
        value = field.null if value is None and field.null is not REQUIRED else value
        if sizes.setdefault(field.size, value) != value:
            first_entry = next(f.entry for f in family.fields if f.size == field.size)
            raise ValueError(
                f"{path}: {field.entry} is {value} and {first_entry} is {sizes[field.size]}; fzero has one "
                f"{field.size} for both"
            )
    if family.config is GPT2Config:
        sizes["d_ff"] = 4 * sizes["d_model"] if sizes["d_ff"] is None else sizes["d_ff"]
    elif family.config is DeepSeekConfig:
        sizes |= {"balance_coef": 0.0, "bias_rate": 0.0}  # transformers has no loss for it, and moves no bias
        sizes |= _read_rope(_latent_rope(hf, path), family.theta, path)
        if sizes["norm_eps"] != LATENT_EPS:
            raise ValueError(f"{path}: rms_norm_eps is {sizes['norm_eps']}; {OTHER_EPS}")
        width = sizes["nope_dim"] + sizes["rope_dim"]
        if hf.get("qk_head_dim", width) != width:
            raise ValueError(f"{path}: qk_head_dim is {short(hf['qk_head_dim'])}; by the other two it is {width}")
    else:
        if sizes["n_kv_heads"] is None:
            sizes["n_kv_heads"] = sizes["n_heads"]
        if sizes["head_dim"] is None or sizes["head_dim"] * sizes["n_heads"] == sizes["d_model"]:
            sizes["head_dim"] = 0
        elif sizes["head_dim"] < 1:
            raise ValueError(f"{path}: head_dim is {sizes['head_dim']}; it must be at least 1")
        _expect_bounds(family, {"n_layers": sizes["n_layers"]}, path)  # a list of them is made next
        local = family.layers == "gemma3"
        sizes |= _read_rope(_full_rope(hf, path) if local else hf, family.theta, path)
        sizes["pattern"] = read_layers(hf, family, sizes["n_layers"], _local_theta(hf, path) if local else None, path)
    if family.config is MoEConfig:
        sizes["z_coef"] = 0.0
    model_config = _build(family, sizes, path)
    return model_config if family in FAMILIES else read_labels(hf, model_config, path)


def _value_of(hf: dict[str, Any], field: Field, path: Path) -> Any:
    """The value of an entry by any of its names, or its default."""
    values = {name: hf[name] for name in (field.entry, *field.aliases) if name in hf}
    value = next(iter(values.values()), field.default)
    for name, alias_value in values.items():
        if alias_value != value:
            first = next(iter(values))
            raise ValueError(f"{path}: {first} is {short(value)} and {name} {short(alias_value)}; they must agree")
    return value


def _expect_readable(hf: dict[str, Any], family: HuggingFaceFamily, path: Path) -> None:
    """Raise ValueError for weights in codes that fzero does not read of this family."""
    quantization = quantization_of(hf, str(path))
    if quantization and (
        family.config is GPT2Config or (quantization.layout == MXFP4 and family.quantized != MXFP4)
    ):  # GPT-2 has its weights the other way round
        raise ValueError(
            f"{path}: quantization_config is {short(hf['quantization_config'])}; fzero reads no weights in "
            f"{quantization.text} of a {family.architecture}"
        )


def _build(family: HuggingFaceFamily, sizes: dict[str, Any], path: Path) -> Any:
    """The config of these sizes; raises ValueError with the names of config.json."""
    _expect_bounds(family, sizes, path)
    try:
        return family.config(**sizes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _expect_bounds(family: HuggingFaceFamily, sizes: dict[str, Any], path: Path) -> None:
    entries = {field.size: field.entry for field in family.fields}
    try:
        for size, value in sizes.items():
            if size in BOUNDS:
                check_bounds(entries.get(size, size), value, BOUNDS[size])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def rope_of(hf: dict[str, Any], kind: str, path: Path) -> dict[str, Any]:
    """The config.json with RoPE's entries for layers of one kind, where rope_parameters has a table for each."""
    tables = hf.get("rope_parameters")
    if not isinstance(tables, dict) or not any(isinstance(table, dict) for table in tables.values()):
        return hf
    expect_entries(tables, {kind: dict}, f"{path}: rope_parameters")
    if extra := set(tables) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{path}: rope_parameters has {min(extra)} beside tables for layers; fzero does not know it")
    if kind == "full_attention":
        return {**hf, "rope_parameters": tables[kind]}
    local = {"rope_theta": hf["rope_local_base_freq"]} if hf.get("rope_local_base_freq") is not None else {}
    return local | {"rope_parameters": tables[kind]}


def _full_rope(hf: dict[str, Any], path: Path) -> dict[str, Any]:
    """The content of a Gemma 3's config.json with RoPE's entries for layers without a window."""
    full_rope, scaling = rope_of(hf, "full_attention", path), hf.get("rope_scaling")
    if hf.get("rope_parameters") and full_rope is hf:
        raise ValueError(f"{path}: rope_parameters has no full_attention and sliding_attention, which it has here")
    for table in (scaling, full_rope.get("rope_parameters")):
        if isinstance(table, dict) and "rope_type" not in table and "type" in table:
            raise ValueError(f"{path}: RoPE has type {short(table['type'])}; Gemma 3 has it by the name rope_type")
        if isinstance(table, dict) and table.get("truncate", True) is not True:
            raise ValueError(
                f"{path}: truncate of RoPE is {short(table['truncate'])}; transformers has True in Gemma 3"
            )
    return full_rope


def _local_theta(hf: dict[str, Any], path: Path) -> float:
    """The base of RoPE in layers with a window, in the spelling of transformers 5 or 4."""
    table = rope_of(hf, "sliding_attention", path)
    if table is hf:
        table = {"rope_theta": hf.get("rope_local_base_freq", 1e4)}
        expect_entries(table, {"rope_theta": float}, f"{path}: rope_local_base_freq")
    rope = _read_rope(table, 1e4, path)
    if rope["rope_scaling"] is not None:
        raise ValueError(f"{path}: RoPE of layers with a window is scaled; fzero scales that of the others only")
    return rope["rope_theta"]


def _latent_rope(hf: dict[str, Any], path: Path) -> dict[str, Any]:
    """A DeepSeek-V3's config.json without YaRN's factors, by which whole scores are scaled, and not turned parts."""
    for name in ("rope_scaling", "rope_parameters"):
        table = hf.get(name)
        if isinstance(table, dict) and _kind(table) == "yarn":
            factors = {factor: table.get(factor) for factor in YARN_FACTORS}
            if factors != LATENT_FACTORS:
                raise ValueError(f"{path}: {name} has {short(factors)}; fzero reads {LATENT_FACTORS} only")
            hf = {**hf, name: {entry: value for entry, value in table.items() if entry not in factors}}
    return hf


def _read_rope(hf: dict[str, Any], theta: float, path: Path) -> dict[str, Any]:
    """Read RoPE's base and scaling, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4)."""
    expect_entries(hf, {"rope_scaling?": dict | None, "rope_parameters?": dict | None, "rope_theta?": float}, str(path))
    tables = {name: hf[name] for name in ("rope_scaling", "rope_parameters") if hf.get(name)} or {"": {}}
    ropes = {name: _read_table(table, hf, theta, path) for name, table in tables.items()}
    first = next(iter(ropes.values()))
    if any(rope != first for rope in ropes.values()):
        first_table, second_table = (
            {**table, "rope_theta": ropes[name]["rope_theta"], "rope_type": _kind(table), "type": None}
            for name, table in tables.items()
        )
        name = next(
            name
            for name in ("rope_type", *ROPE, *first_table, *second_table)
            if first_table.get(name) != second_table.get(name)
        )
        first_text, second_text = (short(table.get(name)) for table in (first_table, second_table))
        difference = f"{name} is {first_text} in rope_scaling and {second_text} in rope_parameters"
        raise ValueError(f"{path}: {difference}; RoPE must be the same in both, or leave one out")
    return first


def _kind(table: dict[str, Any]) -> Any:
    """The type of RoPE's scaling by a table."""
    return table.get("rope_type", table.get("type", "default"))


def _read_table(table: dict[str, Any], hf: dict[str, Any], theta: float, path: Path) -> dict[str, Any]:
    """RoPE's base and scaling by one table, and by the entries beside it."""
    rope: dict[str, Any] = {n: value for n, value in table.items() if value is not None or n == "rope_theta"}
    if any(isinstance(value, dict) for name, value in rope.items() if name.endswith("_attention")):
        raise ValueError(f"{path}: rope_parameters differ between layers; fzero reads that of Gemma 3 only")
    kind = _kind(rope)
    if rope.pop("type", kind) != kind:
        raise ValueError(f"{path}: rope_type is {short(kind)} and type {short(table['type'])}; leave one out")
    rope.pop("rope_type", None)
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(
            f"{path}: rope_type is {short(kind)}; fzero supports 'default', 'linear', 'llama3' and 'yarn' only"
        )
    top_entries = {name: hf[name] for name in ("rope_theta", "partial_rotary_factor") if hf.get(name) is not None}
    top_entries |= {ROPE[3]: hf[ROPE[3]]} if ROPE[3] in rope and hf.get(ROPE[3]) is not None else {}
    for name, value in top_entries.items():
        if rope.setdefault(name, value) != value:
            raise ValueError(f"{path}: {name} of RoPE is both {short(value)} and {short(rope[name])}; make them equal")
    rope.setdefault("rope_theta", theta)
    expect_entries(rope, {f"{name}?": float for name in ("rope_theta", "partial_rotary_factor", *ROPE)}, str(path))
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"{path}: partial_rotary_factor is {table.get('partial_rotary_factor', hf.get('partial_rotary_factor'))}; "
            "fzero turns whole heads only"
        )
    subject = f"{path}: the {kind} rope scaling"
    schema: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": float},
        "llama3": {**dict.fromkeys(ROPE[:3], float), ROPE[3]: int},
        "yarn": {"factor": float, ROPE[3]: int, **{f"{name}?": float for name in YARN_ENDS}, "truncate?": bool},
    }
    expect_entries(rope, schema[kind], subject)
    read = {"rope_theta", *(name.removesuffix("?") for name in schema[kind]), *(YARN_FACTORS if kind == "yarn" else ())}
    if extra := set(rope) - read:
        raise ValueError(f"{subject} has {min(extra)}, which fzero does not know there; take it out if it is not used")
    if kind == "default":
        return {"rope_theta": float(rope["rope_theta"]), "rope_scaling": None}
    try:
        scaling = _scaling(kind, rope)
    except ValueError as error:
        text = str(error)
        for option, entry in (("original_max_len", ROPE[3]), *(zip(ROPE[1:3], YARN_ENDS) if kind == "yarn" else ())):
            text = text.replace(option, entry)
        raise ValueError(f"{subject}: {text}") from None
    return {"rope_theta": float(rope["rope_theta"]), "rope_scaling": scaling}


YARN_ENDS = ("beta_slow", "beta_fast")  # our low_freq_factor and high_freq_factor
YARN_FACTORS = ("attention_factor", "mscale", "mscale_all_dim")
LATENT_FACTORS = {"attention_factor": None, "mscale": 1.0, "mscale_all_dim": 1.0}


def _scaling(kind: str, rope: dict[str, Any]) -> RopeScaling:
    """The scaling of a table of its kind; raises ValueError for one that fzero does not compute."""
    if kind == "linear":
        return RopeScaling.linear(rope["factor"])
    if kind == "llama3":
        return RopeScaling(*(rope[name] for name in ROPE))
    ends = rope.get("beta_slow") or 1.0, rope.get("beta_fast") or 32.0
    scaling = RopeScaling(rope["factor"], *ends, rope[ROPE[3]], "yarn_whole" if rope.get("truncate", True) else "yarn")
    usual = scaling.score_factor**0.5
    for name in YARN_FACTORS:
        value = rope.get(name)
        if value is not None and not (name == "attention_factor" and value == usual):
            raise ValueError(f"{name} is {short(value)}; fzero has an attention_factor of 0.1 ln factor + 1 only")
    return scaling


def write_config(config: Any, architecture: str = "") -> tuple[dict[str, Any], HuggingFaceFamily]:
    """(content of config.json, family) of our config; raises ValueError for features that transformers lacks."""
    if isinstance(config, ScoreConfig):
        hf, family = write_config(config.base, architecture)
        family = scored_family(family)
        return hf | {"architectures": [family.architecture]} | write_labels(config), family
    family, layers = _family_of(config, architecture)
    hf = {"architectures": [family.architecture], "model_type": family.model_type}
    for field in family.fields:
        value = getattr(config, field.size)
        value = config.key_dim if field.size == "score_dim" and not value else value
        hf[field.entry] = None if field.null is not REQUIRED and value == field.null else value
    hf |= {name: allowed[0] for name, allowed in family.fixed.items()}
    if family.config is GPT2Config:
        return hf | {"attn_pdrop": 0.0}, family
    if family.config is DeepSeekConfig:
        if config.n_mtp:
            raise ValueError(f"n_mtp is {config.n_mtp}; transformers' DeepSeek-V3 has no second head: export with 0")
        if config.norm_eps != LATENT_EPS:
            raise ValueError(f"norm_eps is {config.norm_eps}; {OTHER_EPS}")
        hf |= {"num_key_value_heads": config.n_heads, "num_nextn_predict_layers": 0}
        return hf | _write_rope(config, family), family
    if family.config is MoEConfig and config.capacity_factor:
        raise ValueError(f"capacity_factor is {config.capacity_factor}; in transformers it is dropless: export with 0")
    return hf | {"head_dim": config.key_dim} | layers | _write_rope(config, family), family


def _family_of(config: Any, architecture: str) -> tuple[HuggingFaceFamily, dict[str, Any]]:
    """(the family that computes a model of this config, the entries for its layers)."""
    kin = [family for family in FAMILIES if type(config) is family.config]
    if not kin:
        supported = ", ".join(dict.fromkeys(family.config.__name__ for family in FAMILIES))
        raise ValueError(
            f"a model of {type(config).__name__} has no architecture in transformers; these have: {supported}"
        )
    named = [family for family in kin if architecture in ("", family.architecture)]
    if not named:
        names = [family.architecture for family in kin]
        raise ValueError(
            f"architecture is {architecture!r}{nearest(architecture, names)}; a {type(config).__name__} has "
            f"{', '.join(names)}"
        )
    flagged = [f for f in named if all(getattr(config, name) == flag for name, flag in f.flags.items())]
    if not flagged:
        flags = {name: getattr(config, name) for name in named[0].flags}
        flags_text = " and ".join(f"{name}={value}" for name, value in flags.items() if value != MOE_PLAIN[name])
        raise ValueError(
            f"a {type(config).__name__} with {flags_text or 'these options'} has no architecture in transformers"
        )
    for family in flagged:
        if family.config in (GPT2Config, DeepSeekConfig):
            layers = {} if config.pattern == "full" else None
        else:
            layers = write_layers(config, family)
        if layers is not None:
            return family, layers
    raise ValueError(f"pattern is {config.pattern!r}, which {flagged[0].architecture} does not compute")


def _write_rope(config: Any, family: HuggingFaceFamily) -> dict[str, Any]:
    """The entries of config.json for RoPE, in the spellings of transformers 4 and of transformers 5."""
    scaling, rope = config.rope_scaling, {"rope_type": "default"}
    if scaling is not None and scaling.is_linear:
        rope = {"rope_type": "linear", "factor": scaling.factor}
    elif scaling is not None and scaling.kind != "llama3":
        rope = {"rope_type": "yarn", "factor": scaling.factor, ROPE[3]: scaling.original_max_len}
        rope |= dict(zip(YARN_ENDS, (scaling.low_freq_factor, scaling.high_freq_factor)))
        rope["truncate"] = scaling.kind == "yarn_whole"
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0} if family.config is DeepSeekConfig else {}
    elif scaling is not None:
        values = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_len)
        rope = {"rope_type": "llama3", **dict(zip(ROPE, values))}
    theta = config.rope_theta
    entries: dict[str, Any] = {"rope_theta": theta, "rope_scaling": rope if scaling is not None else None}
    full = {**rope, "rope_theta": theta}
    if family.layers != "gemma3":
        return entries | {"rope_parameters": full}
    if not rope.get("truncate", True):
        raise ValueError(f"rope_scaling is {scaling}; transformers rounds the ends of yarn in Gemma 3 (yarn_whole)")
    local = next((kind.theta for kind in parse_layers(config.pattern) if kind.theta is not None), 1e4)
    near = {"rope_type": "default", "rope_theta": local}
    tables = {"full_attention": full, "sliding_attention": near}
    return entries | {"rope_local_base_freq": local, "rope_parameters": tables}
