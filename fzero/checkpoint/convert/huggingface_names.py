"""The names of Hugging Face `transformers` for GPT-2, Llama and Mixtral: of tensors, and of the entries of config.json.

A family is data: rows that map a leaf of ours to parts of their tensors, and fields that map a size of ours to an entry
of their config.json.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fzero.core.bounds import check_bounds
from fzero.core.foreign import expect_entries, short
from fzero.kernels.attention import Pattern
from fzero.models import GPT2Config, LlamaConfig, MoEConfig, RopeScaling
from fzero.models.sizes import BOUNDS

REQUIRED = object()


class Row(NamedTuple):
    """A leaf of ours in tensors of theirs: `ours[l, e]` is part `part` of `parts`, along the last dim, of `theirs`."""

    ours: str
    theirs: str  # with {l} if each layer has its tensor, {e} if each expert has
    transposed: bool = False  # whether theirs is [out, in]
    part: int = 0
    parts: int = 1


class Field(NamedTuple):
    """A size of ours and its entry in config.json; `default`: the value that transformers assumes if there is none."""

    ours: str
    theirs: str
    default: Any = REQUIRED


class Family(NamedTuple):
    """One architecture of transformers."""

    architecture: str
    model_type: str
    config: type
    prefix: str  # of all names except the head's; files may omit it
    layouts: tuple[tuple[Row, ...], ...]  # the first is written, all are read
    fields: tuple[Field, ...]
    # entries with the only values that fzero supports; the first is the default, and is written
    fixed: dict[str, tuple[Any, ...]]
    passed_over: str  # tensors that are not weights


def _dense(w: str, b: str, theirs: str, part: int = 0, parts: int = 1) -> tuple[Row, Row]:
    return (Row(w, f"{theirs}.weight", False, part, parts), Row(b, f"{theirs}.bias", False, part, parts))


GPT2_ROWS = (
    Row("embed/tokens", "wte.weight"),
    Row("embed/positions", "wpe.weight"),
    *_dense("blocks/ln_1/scale", "blocks/ln_1/bias", "h.{l}.ln_1"),
    *_dense("blocks/attn/w_q", "blocks/attn/b_q", "h.{l}.attn.c_attn", 0, 3),
    *_dense("blocks/attn/w_k", "blocks/attn/b_k", "h.{l}.attn.c_attn", 1, 3),
    *_dense("blocks/attn/w_v", "blocks/attn/b_v", "h.{l}.attn.c_attn", 2, 3),
    *_dense("blocks/attn/w_o", "blocks/attn/b_o", "h.{l}.attn.c_proj"),
    *_dense("blocks/ln_2/scale", "blocks/ln_2/bias", "h.{l}.ln_2"),
    *_dense("blocks/mlp/w_in", "blocks/mlp/b_in", "h.{l}.mlp.c_fc"),
    *_dense("blocks/mlp/w_out", "blocks/mlp/b_out", "h.{l}.mlp.c_proj"),
    *_dense("head/norm/scale", "head/norm/bias", "ln_f"),
    Row("head/w", "lm_head.weight"),
)
ATTENTION_ROWS = (
    Row("embed/tokens", "embed_tokens.weight"),
    Row("blocks/norm_1/scale", "layers.{l}.input_layernorm.weight"),
    *(Row(f"blocks/attn/w_{n}", f"layers.{{l}}.self_attn.{n}_proj.weight", True) for n in "qkvo"),
    Row("blocks/norm_2/scale", "layers.{l}.post_attention_layernorm.weight"),
)
HEAD_ROWS = (Row("head/norm/scale", "norm.weight"), Row("head/w", "lm_head.weight"))
LLAMA_ROWS = (
    *ATTENTION_ROWS,
    *(Row(f"blocks/mlp/w_{n}", f"layers.{{l}}.mlp.{n}_proj.weight", True) for n in ("gate", "up", "down")),
    *HEAD_ROWS,
)
# The published layout, which save_pretrained writes.
MIXTRAL_ROWS = (
    *ATTENTION_ROWS,
    Row("blocks/moe/router", "layers.{l}.block_sparse_moe.gate.weight", True),
    Row("blocks/moe/w_gate", "layers.{l}.block_sparse_moe.experts.{e}.w1.weight", True),
    Row("blocks/moe/w_down", "layers.{l}.block_sparse_moe.experts.{e}.w2.weight", True),
    Row("blocks/moe/w_up", "layers.{l}.block_sparse_moe.experts.{e}.w3.weight", True),
    *HEAD_ROWS,
)
# The layout of transformers 5 in memory, which save_pretrained(save_original_format=False) writes.
MIXTRAL_FUSED_ROWS = (
    *ATTENTION_ROWS,
    Row("blocks/moe/router", "layers.{l}.mlp.gate.weight", True),
    Row("blocks/moe/w_gate", "layers.{l}.mlp.experts.gate_up_proj", True, 0, 2),
    Row("blocks/moe/w_up", "layers.{l}.mlp.experts.gate_up_proj", True, 1, 2),
    Row("blocks/moe/w_down", "layers.{l}.mlp.experts.down_proj", True),
    *HEAD_ROWS,
)
GPT2_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("max_len", "n_positions", 1024),
    Field("d_model", "n_embd"),
    Field("n_layers", "n_layer"),
    Field("n_heads", "n_head"),
    Field("d_ff", "n_inner", None),
    Field("dropout", "resid_pdrop", 0.1),
    Field("dropout", "embd_pdrop", 0.1),
    Field("norm_eps", "layer_norm_epsilon", 1e-5),
    Field("tied", "tie_word_embeddings", True),
    Field("init_std", "initializer_range", 0.02),
)


def _llama_fields(max_len: int, norm_eps: float) -> tuple[Field, ...]:
    return (
        Field("vocab_size", "vocab_size"),
        Field("max_len", "max_position_embeddings", max_len),
        Field("d_model", "hidden_size"),
        Field("n_layers", "num_hidden_layers"),
        Field("n_heads", "num_attention_heads"),
        Field("n_kv_heads", "num_key_value_heads", None),
        Field("d_ff", "intermediate_size"),
        Field("head_dim", "head_dim", None),
        Field("norm_eps", "rms_norm_eps", norm_eps),
        Field("tied", "tie_word_embeddings", False),
        Field("init_std", "initializer_range", 0.02),
    )


MIXTRAL_FIELDS = (
    Field("n_experts", "num_local_experts", 8),
    Field("top_k", "num_experts_per_tok", 2),
    Field("balance_coef", "router_aux_loss_coef", 0.001),
)
LLAMA_FIXED = {"hidden_act": ("silu",), "attention_bias": (False,), "attention_dropout": (0.0,), "mlp_bias": (False,)}
GPT2_FIXED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
MIXTRAL_FIXED = {"hidden_act": ("silu",), "attention_dropout": (0.0,), "router_jitter_noise": (0.0,)}
ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
INV_FREQ = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
FAMILIES = (
    Family(
        "GPT2LMHeadModel",
        "gpt2",
        GPT2Config,
        "transformer.",
        (GPT2_ROWS,),
        GPT2_FIELDS,
        GPT2_FIXED,
        r"h\.\d+\.attn\.(bias|masked_bias)",
    ),
    Family(
        "LlamaForCausalLM",
        "llama",
        LlamaConfig,
        "model.",
        (LLAMA_ROWS,),
        _llama_fields(2048, 1e-6),
        LLAMA_FIXED,
        INV_FREQ,
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        MoEConfig,
        "model.",
        (MIXTRAL_ROWS, MIXTRAL_FUSED_ROWS),
        _llama_fields(131072, 1e-5) + MIXTRAL_FIELDS,
        MIXTRAL_FIXED,
        INV_FREQ,
    ),
)


# ---- tensors ----


def places(row: Row, shape: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name of theirs without prefix, index into our leaf of this shape) of every tensor of a row."""
    letters = [letter for letter in "le" if f"{{{letter}}}" in row.theirs]
    for index in itertools.product(*(range(n) for n in shape[: len(letters)])):
        yield row.theirs.format(**dict(zip(letters, index))), index


def their_shape(row: Row, shape: Sequence[int]) -> list[int]:
    """The shape of their tensor, from that of our part of it."""
    *outer, last = shape
    whole = [*outer, last * row.parts]
    return [*whole[:-2], whole[-1], whole[-2]] if row.transposed else whole


def full_name(family: Family, name: str) -> str:
    """The name in a file of transformers, from the one in a row."""
    return name if name.startswith("lm_head.") else family.prefix + name


# ---- config.json ----


def find_family(hf: dict[str, Any], where: Path, *, bare: bool = False) -> Family:
    """The family of the model that a config.json describes; raises ValueError for an unsupported one.

    bare: accept a model_type without architectures, as in a config that was saved without a model.
    """
    names = hf.get("architectures") or []
    for family in FAMILIES:
        if (names == [family.architecture] or (bare and not names)) and hf.get("model_type") == family.model_type:
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ValueError(f"{where}: architectures is {names} of model_type {hf.get('model_type')!r}; fzero reads {known}")


def read_config(hf: dict[str, Any], family: Family, where: Path) -> Any:
    """Convert the content of a config.json to our config; raises ValueError naming an entry that is missing or
    unsupported."""
    name = str(where)
    for entry, choices in {**family.fixed, "quantization_config": (None,)}.items():
        value = hf.get(entry, choices[0])
        if value not in choices:
            raise ValueError(
                f"{where}: {entry} is {short(value)}; fzero supports {' or '.join(map(repr, choices))} only"
            )
    sizes: dict[str, Any] = {}
    kinds = {field.name: field.type for field in dataclasses.fields(family.config)}
    for field in family.fields:
        value = hf.get(field.theirs, field.default)
        if value is REQUIRED:
            raise ValueError(f"{where}: {field.theirs} is missing")
        allowed = {"int": int, "bool": bool}.get(str(kinds[field.ours]), float)
        expect_entries(
            {field.theirs: value}, {field.theirs: allowed | None if field.default is None else allowed}, name
        )
        if sizes.setdefault(field.ours, value) != value:
            other = next(f.theirs for f in family.fields if f.ours == field.ours)
            raise ValueError(
                f"{where}: {field.theirs} is {value} and {other} is {sizes[field.ours]}; fzero has one {field.ours} "
                "for both"
            )
    if family.config is GPT2Config:
        sizes["d_ff"] = 4 * sizes["d_model"] if sizes["d_ff"] is None else sizes["d_ff"]
    else:
        if sizes["n_kv_heads"] is None:
            sizes["n_kv_heads"] = sizes["n_heads"]
        if sizes["head_dim"] is None or sizes["head_dim"] * sizes["n_heads"] == sizes["d_model"]:
            sizes["head_dim"] = 0
        elif sizes["head_dim"] < 1:
            raise ValueError(f"{where}: head_dim is {sizes['head_dim']}; it must be at least 1")
        sizes |= _read_rope(hf, 1e6 if family.config is MoEConfig else 1e4, where)
    if family.config is MoEConfig:
        expect_entries(hf, {"sliding_window?": int | None}, name)
        sizes["z_coef"] = 0.0
        window = hf.get("sliding_window")
        sizes["pattern"] = "full" if window is None else f"window:{max(0, window)}"
    return _build(family, sizes, where)


def _build(family: Family, sizes: dict[str, Any], where: Path) -> Any:
    """The config of these sizes; raises ValueError with the names of config.json for one that is out of bounds."""
    theirs = {field.ours: field.theirs for field in family.fields}
    try:
        for ours, value in sizes.items():
            if ours in BOUNDS:
                check_bounds(theirs.get(ours, ours), value, BOUNDS[ours])
        return family.config(**sizes)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _read_rope(hf: dict[str, Any], theta: float, where: Path) -> dict[str, Any]:
    """Read RoPE's base and scaling, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4)."""
    expect_entries(hf, {"rope_scaling?": dict | None, "rope_parameters?": dict | None}, str(where))
    rope: dict[str, Any] = {}
    for table in (hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {}, {"rope_theta": hf.get("rope_theta")}):
        expect_entries(table, {f"{name}?": float | None for name in ("rope_theta", *ROPE)}, str(where))
        for name, value in table.items():
            if value is not None and rope.setdefault(name, value) != value:
                raise ValueError(
                    f"{where}: {name} of RoPE is both {short(value)} and {short(rope[name])}; make them equal"
                )
    rope.setdefault("rope_theta", theta)
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{where}: rope_parameters differ between layers; fzero has one RoPE for all")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"{where}: rope_type is {kind!r}; fzero supports 'default' and 'llama3' only")
    turned = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if turned != 1.0:
        raise ValueError(f"{where}: partial_rotary_factor is {turned}; fzero turns whole heads only")
    expect_entries(rope, {"rope_theta": float}, str(where))
    if kind == "default":
        return {"rope_theta": float(rope["rope_theta"]), "rope_scaling": None}
    expect_entries(rope, {**dict.fromkeys(ROPE[:3], float), ROPE[3]: int}, f"{where}: the llama3 rope scaling")
    try:
        scaling = RopeScaling(*(rope[name] for name in ROPE))
    except ValueError as error:
        text = str(error).replace("original_max_len", ROPE[3])
        raise ValueError(f"{where}: the llama3 rope scaling: {text}") from None
    return {"rope_theta": float(rope["rope_theta"]), "rope_scaling": scaling}


def write_config(config: Any) -> tuple[dict[str, Any], Family]:
    """(the content of config.json, the family) of one of our configs; ValueError for features that transformers
    lacks."""
    family = next((family for family in FAMILIES if type(config) is family.config), None)
    if family is None:
        known = ", ".join(family.config.__name__ for family in FAMILIES)
        raise ValueError(f"a model of {type(config).__name__} has no architecture in transformers; these have: {known}")
    pattern = Pattern.parse(config.pattern)
    if pattern.kind != "full" and not (family.config is MoEConfig and pattern.kind == "window"):
        raise ValueError(f"pattern is {config.pattern!r}, which {family.architecture} does not compute")
    hf = {"architectures": [family.architecture], "model_type": family.model_type}
    hf |= {field.theirs: getattr(config, field.ours) for field in family.fields}
    hf |= {name: allowed[0] for name, allowed in family.fixed.items()}
    if family.config is GPT2Config:
        return hf | {"attn_pdrop": 0.0}, family
    hf["head_dim"] = config.key_dim
    scaling = config.rope_scaling
    rope = {"rope_type": "default"}
    if scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_len,
        }
    # In the spellings of transformers 4 and most other readers, and of transformers 5.
    hf |= {"rope_theta": config.rope_theta, "rope_scaling": rope if scaling is not None else None}
    hf["rope_parameters"] = {**rope, "rope_theta": config.rope_theta}
    if family.config is MoEConfig:
        if config.capacity_factor:
            raise ValueError(
                f"capacity_factor is {config.capacity_factor}; Mixtral in transformers is dropless: export with 0"
            )
        hf["sliding_window"] = pattern.size or None
    return hf, family
