"""The entries of a config.json of `transformers` that fzero knows: used, without effect (UNUSED), off (OFF), or
refused.

And the kinds of layers, by `Family.layers`: "" none; "window" one sliding_window for all; "qwen", "gemma2" and "gemma3"
layer_types and sliding_window, with different defaults; "smollm3" those, and layers without positions. Layers with a
window of "gemma3" have a RoPE of their own.

And the models `...ForSequenceClassification`: a head of scores without a bias in place of the vocabulary's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fzero.checkpoint.convert.huggingface_families import FAMILIES, ROPE, HuggingFaceFamily
from fzero.core.text_parsing import expect_entries, nearest, short
from fzero.kernels.attention_pattern import FULL, Pattern
from fzero.models import ScoreConfig
from fzero.models.config_values import LayerKind, layers_text, parse_layers

MOST_LABELS = 100_000  # that a number alone can ask for
# Architectures that are not called as the one that says words.
NAMES = {"GPT2LMHeadModel": "GPT2ForSequenceClassification", "Gemma3ForCausalLM": "Gemma3TextForSequenceClassification"}


def scored_family(family: HuggingFaceFamily) -> HuggingFaceFamily:
    """The family with its head of scores."""
    name = family.architecture
    return family._replace(architecture=NAMES.get(name, name.replace("ForCausalLM", "ForSequenceClassification")))


def read_labels(hf: dict[str, Any], base: Any, path: Path) -> ScoreConfig:
    """The config with the classes that a config.json names; raises ValueError unless they are numbered from 0."""
    expect_entries(hf, {"id2label?": dict | None, "num_labels?": int | None}, str(path))
    named = hf.get("id2label")
    if named is None:  # transformers does not write its default
        count = hf.get("num_labels")
        named = {str(i): f"LABEL_{i}" for i in range(2 if count is None else min(count, MOST_LABELS))}
    names: list[Any] = [named.get(str(i)) for i in range(len(named))]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: id2label is {short(named)}; it must name the classes 0, 1, ... by texts")
    kind = hf.get("problem_type") or "single_label_classification"
    if len(names) > 1 and kind != "single_label_classification":
        raise ValueError(f"{path}: problem_type is {short(kind)}; fzero learns one class of each text")
    pad = hf.get("pad_token_id")
    expect_entries({"pad_token_id": pad}, {"pad_token_id": int | None}, str(path))
    try:
        return ScoreConfig(base, tuple(names) if len(names) > 1 else (), -1 if pad is None else pad)
    except ValueError as error:
        raise ValueError(f"{path}: id2label: {error}") from None


def write_labels(config: ScoreConfig) -> dict[str, Any]:
    """The entries of config.json for the classes."""
    names = config.labels or ("LABEL_0",)
    numbered = {"id2label": {str(i): name for i, name in enumerate(names)}, "num_labels": len(names)}
    return numbered | {"label2id": {name: i for i, name in enumerate(names)}}


SLIDING, WHOLE = "sliding_attention", "full_attention"
SWITCHED = ("qwen", "smollm3")  # their windows are off unless use_sliding_window is true


def read_layers(
    hf: dict[str, Any], family: HuggingFaceFamily, n_layers: int, local_theta: float | None, path: Path
) -> str:
    """The text of the layers' kinds, as `parse_layers` takes it; raises ValueError naming a layer that fzero lacks."""
    if not family.layers:
        return "full"
    expect_entries(hf, {"sliding_window?": int | None, "use_sliding_window?": bool | None}, str(path))
    window = hf.get("sliding_window", family.window)
    if family.layers in SWITCHED and not hf.get("use_sliding_window"):
        window = None
    if window is not None and window < 1:
        raise ValueError(f"{path}: sliding_window is {window}; it must be at least 1, or null")
    near = FULL if window is None else Pattern("window", window)
    if family.layers == "window":
        return layers_text([LayerKind(near)])
    turned = _listed(hf, "no_rope_layers", n_layers, (0, 1), path) if family.layers == "smollm3" else None
    if turned is None and family.layers == "smollm3":
        turned = [int((i + 1) % _every(hf, "no_rope_layer_interval", 4, path) != 0) for i in range(n_layers)]
    types = _listed(hf, "layer_types", n_layers, (SLIDING, WHOLE), path)
    if family.layers == "smollm3" and SLIDING in (types or ()) and window is None and hf.get("sliding_window"):
        raise ValueError(
            f"{path}: layer_types has {SLIDING} and use_sliding_window is {hf.get('use_sliding_window')}, which "
            "kernels of transformers take in other ways; set use_sliding_window to true, or sliding_window to null"
        )
    slides = [kind == SLIDING for kind in types] if types else _usual(hf, family.layers, turned, n_layers, path)
    kinds = [LayerKind(near, local_theta) if slide else LayerKind(FULL) for slide in slides]
    if turned is not None:
        kinds = [kind if yes else kind._replace(theta=0.0) for kind, yes in zip(kinds, turned)]
    return layers_text(kinds)


def _usual(hf: dict[str, Any], layers: str, turned: list[Any] | None, n_layers: int, path: Path) -> list[bool]:
    """Whether each layer has a window where layer_types is missing, as transformers assumes it."""
    if turned is not None:
        return [not yes for yes in turned]
    if layers == "qwen":
        expect_entries(hf, {"max_window_layers?": int}, str(path))
        return [i >= hf.get("max_window_layers", 28) for i in range(n_layers)]
    every = _every(hf, "sliding_window_pattern", 6, path) if layers == "gemma3" else 2
    return [(i + 1) % every != 0 for i in range(n_layers)]


def _every(hf: dict[str, Any], entry: str, default: int, path: Path) -> int:
    expect_entries(hf, {f"{entry}?": int}, str(path))
    if hf.get(entry, default) < 1:
        raise ValueError(f"{path}: {entry} is {hf[entry]}; it must be at least 1")
    return hf.get(entry, default)


def _listed(hf: dict[str, Any], entry: str, n_layers: int, allowed: Sequence[Any], path: Path) -> list[Any] | None:
    """The list of a value for each layer; None if it is null or missing."""
    expect_entries(hf, {f"{entry}?": list | None}, str(path))
    values = hf.get(entry)
    if values is None:
        return None
    if len(values) != n_layers:
        raise ValueError(f"{path}: {entry} has {len(values)} values and the model {n_layers} layers")
    for value in values:
        if value not in allowed:
            raise ValueError(f"{path}: {entry} has {short(value)}; fzero supports {' and '.join(map(str, allowed))}")
    return values


def write_layers(config: Any, family: HuggingFaceFamily) -> dict[str, Any] | None:
    """The entries of config.json for the layers of our Llama or Mixtral; None if the architecture lacks such layers."""
    period = parse_layers(config.pattern)
    kinds = [period[i % len(period)] for i in range(config.n_layers)]
    windows = {kind.pattern.size for kind in kinds if kind.pattern != FULL}
    if len(windows) > 1 or any(kind.pattern.kind not in ("full", "window") for kind in kinds):
        return None
    size, slides = next(iter(windows), None), [kind.pattern != FULL for kind in kinds]
    if not _rope_fits(family.layers, kinds, config):
        return None
    if family.layers in ("", "window"):
        one_for_all = len(set(slides)) == 1 and (family.layers or not slides[0])
        return None if not one_for_all else {"sliding_window": size} if family.layers else {}
    entries: dict[str, Any] = {"layer_types": [SLIDING if slide else WHOLE for slide in slides]}
    entries["sliding_window"] = size if size or family.layers in SWITCHED else family.window
    if family.layers in SWITCHED:
        entries["use_sliding_window"] = size is not None
    if family.layers == "qwen":
        entries["max_window_layers"] = slides.index(True) if size else config.n_layers
    if family.layers == "smollm3":
        entries["no_rope_layers"] = [int(kind.theta is None) for kind in kinds]
    return entries


def _rope_fits(layers: str, kinds: Sequence[LayerKind], config: Any) -> bool:
    """Whether an architecture has layers whose RoPE differs as in these."""
    fits: dict[str, Callable[[LayerKind], bool]] = {
        "smollm3": lambda kind: kind.theta in (None, 0.0),
        "gemma3": lambda kind: (kind.pattern == FULL) == (kind.theta is None) and kind.theta != 0.0,
    }
    local = {kind.theta for kind in kinds if kind.pattern != FULL and kind.theta != 0.0}  # 0: no RoPE
    return len(local) < 2 and all(fits.get(layers, lambda kind: kind.theta is None)(kind) for kind in kinds)


# What describes the file, how a program is to run the model, or what its weights were trained with.
UNUSED_TEXT = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation _flash_attn_2_enabled _name_or_path architectures attn_implementation auto_map
    base_model_tp_plan chunk_size_feed_forward classifier_dropout custom_pipelines dtype experts_implementation
    finetuning_task id2label is_decoder is_llama_config label2id max_sequence_length
    model_max_length model_type name_or_path num_labels output_attentions output_hidden_states
    output_router_logits padding_side prefix pretraining_tp problem_type return_dict task_specific_params
    tokenizer_class tokenizer_model_max_length tokenizer_padding_side torch_dtype torchscript transformers.js_config
    transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache use_flash_attn
"""
# Ids of tokens, and how texts are generated, which older folders have in config.json.
UNUSED_TEXT += """
    bad_words_ids begin_suppress_tokens bos_token_id cache_implementation decoder_start_token_id diversity_penalty
    do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff
    eta_cutoff exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length
    max_new_tokens min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences output_scores pad_token_id remove_invalid_values repetition_penalty
    return_dict_in_generate sep_token_id suppress_tokens temperature top_k top_p typical_p unk_token_id
"""
UNUSED = frozenset(UNUSED_TEXT.split())
# Of one architecture, as published folders have them.
UNUSED_OF = {
    "gpt2": "attn_pdrop n_ctx reorder_and_upcast_attn summary_activation summary_first_dropout summary_proj_to_labels "
    "summary_type summary_use_proj",
    "smollm3": "max_window_layers",
    "gemma3_text": "_sliding_window_pattern",
    "qwen3_moe": "intermediate_size max_window_layers shared_expert_intermediate_size",
    "gpt_oss": "initial_context_length",
    "deepseek_v3": "aux_loss_alpha ep_size num_key_value_heads num_mtp_layers num_nextn_predict_layers qk_head_dim "
    "seq_aux",
}
# Features that a family does not name: the values with which the model is the family's own.
OFF: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "activation": ("swiglu", "silu", None),
    "add_cross_attention": (False, None),
    "attention_bias": (False, None),
    "attention_dropout": (0.0, None),
    "attn_logit_softcapping": (None,),
    "bias": (False, None),
    "embd_pdrop": (0.0, None),
    "embedding_multiplier": (1.0, None),
    "final_logit_softcapping": (None,),
    "hidden_dropout": (0.0, None),
    "is_encoder_decoder": (False, None),
    "logits_scaling": (1.0, None),
    "mlp_bias": (False, None),
    "num_nextn_predict_layers": (0, None),
    "pruned_heads": ({}, None),
    "qkv_bias": (False, None),
    "residual_multiplier": (1.0, None),
    "resid_pdrop": (0.0, None),
    "rope_interleaved": (False, None),
    "sliding_window": (None,),
    "tie_encoder_decoder": (False, None),
    "use_bidirectional_attention": (False, None),
    "use_mrope": (False, None),
    "use_qk_norm": (False, None),
    "use_sliding_window": (False, None),
}
LAYERS = {
    "": (),
    "window": ("sliding_window",),
    "qwen": ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers"),
    "smollm3": ("sliding_window", "use_sliding_window", "layer_types", "no_rope_layers", "no_rope_layer_interval"),
    "gemma2": ("sliding_window", "layer_types"),
    "gemma3": ("sliding_window", "layer_types", "sliding_window_pattern", "rope_local_base_freq"),
}
POSITIONS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", ROPE[3])


def expect_known(hf: dict[str, Any], family: HuggingFaceFamily, path: Path) -> None:
    """Raise ValueError naming the first unknown entry of a config.json, or that of a feature which fzero lacks."""
    used = used_entries(family)
    for name, value in hf.items():
        if name in used:
            continue
        if name in OFF:
            if value not in OFF[name]:
                raise ValueError(
                    f"{path}: {name} is {short(value)}; fzero supports {' or '.join(map(repr, OFF[name]))} only"
                )
        elif name == "layer_types":
            # A Mistral's own class does not read it, and AutoModel makes another class of one that has it.
            slides = family.layers == "window" and hf.get("sliding_window", family.window) is not None
            kind = "sliding_attention" if slides else "full_attention"
            if value is not None and (not isinstance(value, list) or set(map(str, value)) - {kind}):
                raise ValueError(
                    f"{path}: layer_types is {short(value)}; fzero has {kind} in all layers here"
                    + (", by sliding_window; take one of the two out of the file" if slides else "")
                )
        elif value is not None:
            meant = nearest(name, sorted(used - UNUSED))
            raise ValueError(
                f"{path}: {name} is {short(value)}{meant}; fzero does not know what that changes in a "
                f"{family.architecture}. If it changes nothing, take it out of the file"
            )


def used_entries(family: HuggingFaceFamily) -> set[str]:
    """The names of the entries that are read for a family, or are known to change nothing."""
    of_model = next(candidate for candidate in FAMILIES if candidate.model_type == family.model_type)
    names = {name for field in of_model.fields for name in (field.entry, *field.aliases)}
    names |= {*of_model.fixed, *LAYERS[of_model.layers], *UNUSED_OF.get(of_model.model_type, "").split(), *UNUSED}
    names |= {"quantization_config"}  # refused, or read, before
    return names if of_model.model_type == "gpt2" else names | set(POSITIONS)
