"""A config.json of Hugging Face `transformers` to a config of ours and back, by the fields of huggingface_names.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fzero.checkpoint.convert.huggingface_families import FAMILIES, MOE_PLAIN, NOT_ZERO, REQUIRED, ROPE, Family
from fzero.checkpoint.convert.huggingface_layers import read_layers, write_layers
from fzero.checkpoint.convert.huggingface_score import read_labels, scored_family, write_labels
from fzero.core.bounds import check_bounds
from fzero.core.foreign import expect_entries, nearest, short
from fzero.models import DeepSeekConfig, GPT2Config, MoEConfig, RopeScaling, ScoreConfig
from fzero.models.layer_kinds import parse_layers
from fzero.models.sizes import BOUNDS


def find_family(hf: dict[str, Any], where: Path, *, bare: bool = False) -> Family:
    """The family of the model that a config.json describes; raises ValueError for an unsupported one.

    bare: accept a model_type without architectures, as in a config that was saved without a model.
    """
    names = hf.get("architectures") or []
    for family in FAMILIES:
        if hf.get("model_type") != family.model_type:
            continue
        if names == [family.architecture] or (bare and not names):
            return family
        if names == [scored_family(family).architecture]:
            return scored_family(family)
    known = f"{', '.join(family.architecture for family in FAMILIES)}, and those with ForSequenceClassification"
    raise ValueError(f"{where}: architectures is {names} of model_type {hf.get('model_type')!r}; fzero reads {known}")


def read_config(hf: dict[str, Any], family: Family, where: Path) -> Any:
    """Convert the content of a config.json to our config; raises ValueError naming an entry that is missing or
    unsupported."""
    name = str(where)
    _expect_unquantized(hf, family, where)
    if family.rope and not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf = {**hf, "rope_parameters": family.rope}
    for entry, choices in family.fixed.items():
        value = hf.get(entry, choices[0])
        if value not in choices:
            raise ValueError(
                f"{where}: {entry} is {short(value)}; fzero supports {' or '.join(map(repr, choices))} only"
            )
    sizes: dict[str, Any] = dict(family.flags)
    kinds = {field.name: field.type for field in dataclasses.fields(family.config)}
    for field in family.fields:
        value = hf.get(field.theirs, hf.get(field.also, field.default))
        if field.also in hf and hf[field.also] != value:
            raise ValueError(
                f"{where}: {field.theirs} is {short(value)} and {field.also} {short(hf[field.also])}; they must agree"
            )
        if value is REQUIRED:
            raise ValueError(f"{where}: {field.theirs} is missing")
        allowed = {"int": int, "bool": bool}.get(str(kinds[field.ours]), float)
        nullable = field.default is None or field.null is not REQUIRED
        expect_entries({field.theirs: value}, {field.theirs: allowed | None if nullable else allowed}, name)
        if field.theirs in NOT_ZERO and value == 0:
            raise ValueError(f"{where}: {field.theirs} is {value}; it must be above 0")
        value = field.null if value is None and field.null is not REQUIRED else value
        if sizes.setdefault(field.ours, value) != value:
            other = next(f.theirs for f in family.fields if f.ours == field.ours)
            raise ValueError(
                f"{where}: {field.theirs} is {value} and {other} is {sizes[field.ours]}; fzero has one {field.ours} "
                "for both"
            )
    if family.config is GPT2Config:
        sizes["d_ff"] = 4 * sizes["d_model"] if sizes["d_ff"] is None else sizes["d_ff"]
    elif family.config is DeepSeekConfig:
        sizes |= {"balance_coef": 0.0, "bias_rate": 0.0}  # transformers has no loss for it, and moves no bias
        sizes |= _read_rope(hf, family.theta, where)
        if sizes.pop("rope_scaling") is not None:
            raise ValueError(f"{where}: RoPE is scaled; fzero computes {family.architecture} without scaling")
    else:
        if sizes["n_kv_heads"] is None:
            sizes["n_kv_heads"] = sizes["n_heads"]
        if sizes["head_dim"] is None or sizes["head_dim"] * sizes["n_heads"] == sizes["d_model"]:
            sizes["head_dim"] = 0
        elif sizes["head_dim"] < 1:
            raise ValueError(f"{where}: head_dim is {sizes['head_dim']}; it must be at least 1")
        _expect_bounds(family, {"n_layers": sizes["n_layers"]}, where)  # a list of them is made next
        local = family.layers == "gemma3"
        sizes |= _read_rope(rope_of(hf, "full_attention", where) if local else hf, family.theta, where)
        sizes["pattern"] = read_layers(hf, family, sizes["n_layers"], _local_theta(hf, where) if local else None, where)
    if family.config is MoEConfig:
        sizes["z_coef"] = 0.0
    found = _build(family, sizes, where)
    return found if family in FAMILIES else read_labels(hf, found, where)


def _expect_unquantized(hf: dict[str, Any], family: Family, where: Path) -> None:
    how = hf.get("quantization_config")
    if how is not None and not (
        family.quantized and isinstance(how, dict) and how.get("quant_method") == family.quantized
    ):
        only = f"None or a quant_method of {family.quantized!r}" if family.quantized else "None"
        raise ValueError(f"{where}: quantization_config is {short(how)}; fzero supports {only} only")


def _build(family: Family, sizes: dict[str, Any], where: Path) -> Any:
    """The config of these sizes; raises ValueError with the names of config.json for one that is out of bounds."""
    _expect_bounds(family, sizes, where)
    try:
        return family.config(**sizes)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _expect_bounds(family: Family, sizes: dict[str, Any], where: Path) -> None:
    theirs = {field.ours: field.theirs for field in family.fields}
    try:
        for ours, value in sizes.items():
            if ours in BOUNDS:
                check_bounds(theirs.get(ours, ours), value, BOUNDS[ours])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def rope_of(hf: dict[str, Any], kind: str, where: Path) -> dict[str, Any]:
    """The content of a config.json with RoPE's entries for layers of a kind alone, where rope_parameters, of
    transformers 5, has a table for each.
    """
    tables = hf.get("rope_parameters")
    if not isinstance(tables, dict) or not any(isinstance(table, dict) for table in tables.values()):
        return hf
    expect_entries(tables, {kind: dict}, f"{where}: rope_parameters")
    theirs = {**hf, "rope_parameters": tables[kind]}
    if kind == "full_attention":
        return theirs
    rest = {name: value for name, value in theirs.items() if name != "rope_theta"}
    local = {"rope_theta": hf["rope_local_base_freq"]} if hf.get("rope_local_base_freq") is not None else {}
    return {**rest, **local, "rope_scaling": None}


def _local_theta(hf: dict[str, Any], where: Path) -> float:
    """The base of RoPE in layers with a window, in the spelling of transformers 5 or 4."""
    table = rope_of(hf, "sliding_attention", where)
    if table is hf:
        table = {"rope_theta": hf.get("rope_local_base_freq", 1e4)}
        expect_entries(table, {"rope_theta": float}, f"{where}: rope_local_base_freq")
    found = _read_rope(table, 1e4, where)
    if found["rope_scaling"] is not None:
        raise ValueError(f"{where}: RoPE of layers with a window is scaled; fzero scales that of the others only")
    return found["rope_theta"]


def _read_rope(hf: dict[str, Any], theta: float, where: Path) -> dict[str, Any]:
    """Read RoPE's base and scaling, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4)."""
    expect_entries(hf, {"rope_scaling?": dict | None, "rope_parameters?": dict | None}, str(where))
    rope: dict[str, Any] = {}
    top = {name: hf[name] for name in ("rope_theta",) if name in hf}
    for table in (hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}, top):
        expect_entries(table, {f"{name}?": float | None for name in ("rope_theta", *ROPE)}, str(where))
        for name, value in table.items():
            if name == "rope_theta" and value is None:
                raise ValueError(f"{where}: rope_theta is null; give RoPE's base, such as {theta:g}, or no such entry")
            if value is not None and rope.setdefault(name, value) != value:
                raise ValueError(
                    f"{where}: {name} of RoPE is both {short(value)} and {short(rope[name])}; make them equal"
                )
    rope.setdefault("rope_theta", theta)
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{where}: rope_parameters differ between layers; fzero reads that of Gemma 3 only")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(
            f"{where}: rope_type is {kind!r}; fzero supports 'default', 'linear', 'llama3' and 'yarn' only"
        )
    turned = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if turned != 1.0:
        raise ValueError(f"{where}: partial_rotary_factor is {turned}; fzero turns whole heads only")
    expect_entries(rope, {"rope_theta": float}, str(where))
    if kind == "default":
        return {"rope_theta": float(rope["rope_theta"]), "rope_scaling": None}
    what = f"{where}: the {kind} rope scaling"
    wanted: dict[str, Any] = {
        "linear": {"factor": float},
        "llama3": {**dict.fromkeys(ROPE[:3], float), ROPE[3]: int},
        "yarn": {"factor": float, ROPE[3]: int, **{f"{name}?": float | None for name in YARN_ENDS}, "truncate?": bool},
    }
    expect_entries(rope, wanted[kind], what)
    try:
        scaling = _scaling(kind, rope)
    except ValueError as error:
        text = str(error)
        for ours, theirs in (("original_max_len", ROPE[3]), *(zip(ROPE[1:3], YARN_ENDS) if kind == "yarn" else ())):
            text = text.replace(ours, theirs)
        raise ValueError(f"{what}: {text}") from None
    return {"rope_theta": float(rope["rope_theta"]), "rope_scaling": scaling}


YARN_ENDS = ("beta_slow", "beta_fast")  # our low_freq_factor and high_freq_factor


def _scaling(kind: str, rope: dict[str, Any]) -> RopeScaling:
    """The scaling of a table of its kind; raises ValueError for one that fzero does not compute."""
    if kind == "linear":
        return RopeScaling.linear(rope["factor"])
    if kind == "llama3":
        return RopeScaling(*(rope[name] for name in ROPE))
    ends = rope.get("beta_slow") or 1.0, rope.get("beta_fast") or 32.0
    found = RopeScaling(rope["factor"], *ends, rope[ROPE[3]], "yarn_whole" if rope.get("truncate", True) else "yarn")
    usual = found.score_factor**0.5
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        value = rope.get(name)
        if value is not None and not (name == "attention_factor" and value == usual):
            raise ValueError(f"{name} is {short(value)}; fzero has an attention_factor of 0.1 ln factor + 1 only")
    return found


def write_config(config: Any, architecture: str = "") -> tuple[dict[str, Any], Family]:
    """(the content of config.json, the family) of one of our configs; ValueError for features that transformers
    lacks. architecture: of the families that compute the model, the one of this name; "" takes the first."""
    if isinstance(config, ScoreConfig):
        hf, family = write_config(config.base, architecture)
        family = scored_family(family)
        return hf | {"architectures": [family.architecture]} | write_labels(config), family
    family, layers = _family_of(config, architecture)
    hf = {"architectures": [family.architecture], "model_type": family.model_type}
    for field in family.fields:
        value = getattr(config, field.ours)
        hf[field.theirs] = None if field.null is not REQUIRED and value == field.null else value
    hf |= {name: allowed[0] for name, allowed in family.fixed.items()}
    if family.config is GPT2Config:
        return hf | {"attn_pdrop": 0.0}, family
    if family.config is DeepSeekConfig:
        if config.n_mtp:
            raise ValueError(f"n_mtp is {config.n_mtp}; transformers' DeepSeek-V3 has no second head: export with 0")
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        hf |= {"num_key_value_heads": config.n_heads}
        hf |= {"rope_theta": config.rope_theta, "rope_scaling": None, "rope_parameters": rope}
        return hf | {"num_nextn_predict_layers": 0}, family
    if family.config is MoEConfig and config.capacity_factor:
        raise ValueError(f"capacity_factor is {config.capacity_factor}; in transformers it is dropless: export with 0")
    return hf | {"head_dim": config.key_dim} | layers | _write_rope(config, family), family


def _family_of(config: Any, architecture: str) -> tuple[Family, dict[str, Any]]:
    """(the family that computes a model of this config, the entries for its layers)."""
    kin = [family for family in FAMILIES if type(config) is family.config]
    if not kin:
        known = ", ".join(dict.fromkeys(family.config.__name__ for family in FAMILIES))
        raise ValueError(f"a model of {type(config).__name__} has no architecture in transformers; these have: {known}")
    named = [family for family in kin if architecture in ("", family.architecture)]
    if not named:
        names = [family.architecture for family in kin]
        raise ValueError(
            f"architecture is {architecture!r}{nearest(architecture, names)}; a {type(config).__name__} has "
            f"{', '.join(names)}"
        )
    flagged = [f for f in named if all(getattr(config, name) == flag for name, flag in f.flags.items())]
    if not flagged:
        given = {name: getattr(config, name) for name in named[0].flags}
        said = " and ".join(f"{name}={value}" for name, value in given.items() if value != MOE_PLAIN[name])
        raise ValueError(
            f"a {type(config).__name__} with {said or 'these options'} has no architecture in transformers"
        )
    for family in flagged:
        if family.config in (GPT2Config, DeepSeekConfig):
            layers = {} if config.pattern == "full" else None
        else:
            layers = write_layers(config, family)
        if layers is not None:
            return family, layers
    raise ValueError(f"pattern is {config.pattern!r}, which {flagged[0].architecture} does not compute")


def _write_rope(config: Any, family: Family) -> dict[str, Any]:
    """The entries of config.json for RoPE, in the spellings of transformers 4 and most other readers, and of
    transformers 5."""
    scaling, rope = config.rope_scaling, {"rope_type": "default"}
    if scaling is not None and scaling.is_linear:
        rope = {"rope_type": "linear", "factor": scaling.factor}
    elif scaling is not None and scaling.kind != "llama3":
        rope = {"rope_type": "yarn", "factor": scaling.factor, ROPE[3]: scaling.original_max_len}
        rope |= dict(zip(YARN_ENDS, (scaling.low_freq_factor, scaling.high_freq_factor)))
        rope["truncate"] = scaling.kind == "yarn_whole"
    elif scaling is not None:
        values = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_len)
        rope = {"rope_type": "llama3", **dict(zip(ROPE, values))}
    theta = config.rope_theta
    entries: dict[str, Any] = {"rope_theta": theta, "rope_scaling": rope if scaling is not None else None}
    whole = {**rope, "rope_theta": theta}
    if family.layers != "gemma3":
        return entries | {"rope_parameters": whole}
    local = next((kind.theta for kind in parse_layers(config.pattern) if kind.theta is not None), 1e4)
    near = {"rope_type": "default", "rope_theta": local}
    tables = {"full_attention": whole, "sliding_attention": near}
    return entries | {"rope_local_base_freq": local, "rope_parameters": tables}
