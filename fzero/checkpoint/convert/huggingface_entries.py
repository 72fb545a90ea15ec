"""The entries of a config.json of `transformers` that fzero knows: an entry is used, changes nothing that the model
computes (UNUSED), is that of a feature which is off (OFF), or is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fzero.checkpoint.convert.huggingface_families import FAMILIES, ROPE, HuggingFaceFamily
from fzero.core.text_parsing import nearest, short

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
    """Raise ValueError naming the first entry of a config.json that is not known, or is that of a feature which fzero
    lacks. Entries that are used are checked where they are read."""
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
