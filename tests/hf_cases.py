"""Randomly initialised models of `transformers`, and what their outputs are compared by."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import shutil

import pytest
import torch

from fzero.models import DeepSeekConfig, GPT2Config, LlamaConfig, MoEConfig

hf = pytest.importorskip(
    "transformers", reason="transformers is not installed; it is the reference these tests compare with"
)

V, T = 61, 24
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SMALL = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # logits far from uniform
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT2 = {
    "vocab_size": V,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXTRAL = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
DEEPSEEK = {
    **{name: value for name, value in SMALL.items() if name != "num_key_value_heads"},
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_mtp_layers": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 10, "sliding_window": 6}
CASES = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied-wide": (
        "GPT2",
        {**GPT2, "tie_word_embeddings": False, "n_inner": 72, "activation_function": "gelu_pytorch_tanh"},
    ),
    "llama": ("Llama", SMALL),
    "llama-tied-scaled": (
        "Llama",
        {**SMALL, "tie_word_embeddings": True, "rope_scaling": LLAMA3, "rope_theta": 1000.0},
    ),
    "llama-head-dim": ("Llama", {**SMALL, "head_dim": 12, "num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "qwen2": ("Qwen2", SMALL),
    "qwen2-tied": ("Qwen2", {**SMALL, "tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 12}),
    "qwen3-window": (
        "Qwen3",
        {**SMALL, "head_dim": 12, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "mistral": ("Mistral", {**SMALL, "sliding_window": 7}),
    "smollm3": ("SmolLM3", {**SMALL, "no_rope_layer_interval": 2}),
    "smollm3-window": (
        "SmolLM3",
        {
            **SMALL,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "no_rope_layers": [1, 1, 0, 0],
        },
    ),
    "phi3": ("Phi3", {**SMALL, "sliding_window": 9}),
    "olmo2": ("Olmo2", {**SMALL, "vocab_size": V + 1}),
    "gemma2": ("Gemma2", {**SMALL, **GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "Gemma3",
        {
            **SMALL,
            **GEMMA,
            "vocab_size": V + 1,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 3,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3-linear": (
        "Gemma3",
        {
            **SMALL,
            **GEMMA,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "deepseek": ("DeepseekV3", DEEPSEEK),
    "deepseek-plain-queries": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "v_head_dim": 12,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 100.0},
        },
    ),
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral-window": ("Mixtral", {**MIXTRAL, "sliding_window": 7, "num_experts_per_tok": 1}),
}
QWEN3_MOE = {**SMALL, "head_dim": 12, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
CASES |= {
    "qwen3-moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True, "router_aux_loss_coef": 0.5}),
    "qwen3-moe-shares": ("Qwen3Moe", {**QWEN3_MOE, "tie_word_embeddings": True, "rope_theta": 1e6}),
}
GPT_OSS = {
    **SMALL,
    "num_hidden_layers": 3,
    "head_dim": 12,
    "sliding_window": 5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.5,
    "rope_parameters": {**YARN, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False, "rope_theta": 150.0},
}
CASES |= {
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-full": ("GptOss", {**GPT_OSS, "layer_types": ["full_attention"] * 3, "num_experts_per_tok": 3}),
    "llama-yarn": ("Llama", {**SMALL, "rope_scaling": YARN, "rope_theta": 1000.0}),
}
LLAMAS = ("Llama", "Qwen2", "Qwen3", "Mistral", "SmolLM3", "Phi3", "Olmo2", "Gemma2", "Gemma3")
# Variations of cases that are not marked so.
SLOW = {
    "qwen3-moe-shares",
    "qwen3-window",
    "mistral",
    "smollm3",
    "smollm3-window",
    "phi3",
    "olmo2",
    "gemma3",
    "gemma3-linear",
}
EXHAUSTIVE = {"gpt-oss-full", "llama-yarn"}  # of the same
CLASS = {
    "GPT2": "GPT2LMHeadModel",
    **{kind: f"{kind}ForCausalLM" for kind in (*LLAMAS, "Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3")},
}
OURS = {
    "GPT2": GPT2Config,
    "Mixtral": MoEConfig,
    "Qwen3Moe": MoEConfig,
    "GptOss": MoEConfig,
    "DeepseekV3": DeepSeekConfig,
    **dict.fromkeys(LLAMAS, LlamaConfig),
}


def theirs(case):
    """A randomly initialised model of transformers; norms and biases too are drawn, so that none of them goes
    unseen."""
    kind, sizes = CASES[case]
    torch.manual_seed(0)
    config = getattr(hf, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")
    model = getattr(hf, CLASS[kind])(config(**sizes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model


def save(model, folder, **options):
    model.save_pretrained(folder, **options)
    return folder


def copy_of(folder, to, **entries):
    """A copy of a saved model with some entries of its config.json replaced."""
    shutil.copytree(folder, to)
    file = to / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
    return to


def tokens(rows):
    return torch.randint(0, V, (rows, T), generator=torch.Generator().manual_seed(1))


def relative(actual, expected):
    """The largest error relative to the largest element."""
    assert actual.shape == expected.shape
    largest = expected.abs().max()
    assert largest > 0
    return float((actual - expected).abs().max() / largest)
