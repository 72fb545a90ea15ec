"""The architectures of Hugging Face `transformers` that fzero reads and writes, as data."""

from __future__ import annotations

from typing import Any, NamedTuple

from fzero.checkpoint.convert.huggingface_names import (
    BIASES,
    DEEPSEEK_FUSED_ROWS,
    DEEPSEEK_ROWS,
    GEMMA_ROWS,
    GPT2_ROWS,
    GPT_OSS_ROWS,
    HEAD_NORMS,
    LLAMA_ROWS,
    MIXTRAL_FUSED_ROWS,
    MIXTRAL_ROWS,
    OLMO2_ROWS,
    OUTER,
    PHI3_ROWS,
    QWEN3_MOE_FUSED_ROWS,
    QWEN3_MOE_ROWS,
    TensorRow,
)
from fzero.models import DeepSeekConfig, GPT2Config, LlamaConfig, MoEConfig

REQUIRED = object()


class Field(NamedTuple):
    """A size of ours and its entry in config.json, with its default, our value for null, and other names."""

    size: str
    entry: str
    default: Any = REQUIRED
    null: Any = REQUIRED
    aliases: tuple[str, ...] = ()


class HuggingFaceFamily(NamedTuple):
    """One architecture of transformers."""

    architecture: str
    model_type: str
    config: type
    prefix: str  # of all names except the head's; files may omit it
    layouts: tuple[tuple[TensorRow, ...], ...]  # the first is written, all are read
    fields: tuple[Field, ...]
    # entries with the only values that fzero supports; the first is the default, and is written
    fixed: dict[str, tuple[Any, ...]]
    passed_over: str  # tensors that are not weights
    flags: dict[str, Any] = {}  # noqa: RUF012  (fields of ours by which architectures with one type of config differ)
    layers: str = ""  # what its layers may differ in, see huggingface_entries
    window: int | None = None  # the default of sliding_window
    theta: float = 1e4  # the default of RoPE's base
    rope: dict[str, Any] = {}  # noqa: RUF012  (rope_parameters, where config.json has no scaling of RoPE)
    quantized: str = ""  # the quant_method in which its weights are read, see mxfp4
    original_len: int | None = None  # the default of original_max_position_embeddings beside RoPE's tables


GPT2_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("max_len", "n_positions", 1024, aliases=("max_position_embeddings",)),
    Field("d_model", "n_embd", aliases=("hidden_size",)),
    Field("n_layers", "n_layer", aliases=("num_hidden_layers",)),
    Field("n_heads", "n_head", aliases=("num_attention_heads",)),
    Field("d_ff", "n_inner", None),
    Field("dropout", "resid_pdrop", 0.1),
    Field("dropout", "embd_pdrop", 0.1),
    Field("norm_eps", "layer_norm_epsilon", 1e-5),
    Field("tied", "tie_word_embeddings", True),
    Field("init_std", "initializer_range", 0.02),
)


def _llama_fields(
    max_len: int, norm_eps: float, n_kv_heads: int | None = None, head_dim: int | None = None, *, tied: bool = False
) -> tuple[Field, ...]:
    return (
        Field("vocab_size", "vocab_size"),
        Field("max_len", "max_position_embeddings", max_len),
        Field("d_model", "hidden_size"),
        Field("n_layers", "num_hidden_layers"),
        Field("n_heads", "num_attention_heads"),
        Field("n_kv_heads", "num_key_value_heads", n_kv_heads),
        Field("d_ff", "intermediate_size"),
        Field("head_dim", "head_dim", head_dim),
        Field("norm_eps", "rms_norm_eps", norm_eps),
        Field("tied", "tie_word_embeddings", tied),
        Field("init_std", "initializer_range", 0.02),
    )


DEEPSEEK_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("max_len", "max_position_embeddings", 4096),
    Field("d_model", "hidden_size"),
    Field("n_layers", "num_hidden_layers"),
    Field("n_dense", "first_k_dense_replace", 3),
    Field("n_heads", "num_attention_heads"),
    Field("q_rank", "q_lora_rank", None, 0),
    Field("kv_rank", "kv_lora_rank", 512),
    Field("nope_dim", "qk_nope_head_dim", 128),
    Field("rope_dim", "qk_rope_head_dim", 64, aliases=("head_dim",)),
    Field("value_dim", "v_head_dim", 128),
    Field("d_ff", "intermediate_size"),
    Field("n_experts", "n_routed_experts", 256, aliases=("num_local_experts",)),
    Field("n_shared", "n_shared_experts", 1),
    Field("top_k", "num_experts_per_tok", 8),
    Field("n_groups", "n_group", 8),
    Field("top_groups", "topk_group", 4),
    Field("d_expert", "moe_intermediate_size", 2048),
    Field("routed_scale", "routed_scaling_factor", 2.5),
    Field("norm_eps", "rms_norm_eps", 1e-6),
    Field("tied", "tie_word_embeddings", False),
    Field("init_std", "initializer_range", 0.02),
)
MIXTRAL_FIELDS = (
    Field("n_experts", "num_local_experts", 8, aliases=("num_experts",)),
    Field("top_k", "num_experts_per_tok", 2),
    Field("balance_coef", "router_aux_loss_coef", 0.001),
)
# The experts' units in place of those of dense layers, of which there are none.
QWEN3_MOE_FIELDS = (
    *(field for field in _llama_fields(32768, 1e-6, 4) if field.size != "d_ff"),
    Field("d_ff", "moe_intermediate_size", 768),
    Field("n_experts", "num_experts", 128, aliases=("num_local_experts",)),
    Field("top_k", "num_experts_per_tok", 8),
    Field("norm_top_k", "norm_topk_prob", False),
    Field("balance_coef", "router_aux_loss_coef", 0.001),
)
GPT_OSS_FIELDS = (
    Field("n_experts", "num_local_experts", 128, aliases=("num_experts",)),
    Field("top_k", "num_experts_per_tok", 4, aliases=("experts_per_token",)),
    Field("balance_coef", "router_aux_loss_coef", 0.001),
)
LLAMA_FIXED = {"hidden_act": ("silu",), "attention_bias": (False,), "attention_dropout": (0.0,), "mlp_bias": (False,)}
GPT2_FIXED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
QWEN2_FIXED = {"hidden_act": ("silu",), "attention_dropout": (0.0,)}
QWEN3_FIXED = {**QWEN2_FIXED, "attention_bias": (False,)}
GEMMA_FIXED = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),  # as published, and not used
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "use_bidirectional_attention": (False, None),
}
PHI3_FIELDS = (Field("dropout", "resid_pdrop", 0.0), Field("dropout", "embd_pdrop", 0.0))
GEMMA_FIELDS = (Field("score_dim", "query_pre_attn_scalar", 256),)
GEMMA2_FIELDS = (
    Field("logit_cap", "final_logit_softcapping", 30.0, 0.0),
    Field("score_cap", "attn_logit_softcapping", 50.0, 0.0),
)
NOT_ZERO = {"query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping"}  # null leaves a cap out
QWEN3_MOE_FIXED = {
    **QWEN3_FIXED,
    "use_sliding_window": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}
MIXTRAL_FIXED = {"hidden_act": ("silu",), "attention_dropout": (0.0,), "router_jitter_noise": (0.0,)}
DEEPSEEK_FIXED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "rope_interleave": (True,),
    "norm_topk_prob": (True,),
    "topk_method": ("noaux_tc",),
    "scoring_func": ("sigmoid",),
    "moe_layer_freq": (1,),
}
GPT_OSS_FIXED = {
    "hidden_act": ("silu",),
    "attention_bias": (True,),
    "attention_dropout": (0.0,),
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (7.0,),
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# The options of a Llama, by which its variations differ.
PLAIN: dict[str, Any] = {
    "qkv_bias": False,
    "out_bias": False,
    "sinks": False,
    "qk_norm": False,
    "wide_qk_norm": False,
    "norms": "in",
    "norm_offset": False,
    "activation": "silu",
    "embed_scaled": False,
    "score_dim": 0,
    "score_cap": 0.0,
    "logit_cap": 0.0,
}
MOE_PLAIN = {**PLAIN, "balance": "loss", "norm_top_k": True, "expert_bias": False}
GPT_OSS_FLAGS = {**MOE_PLAIN, "qkv_bias": True, "out_bias": True, "sinks": True, "expert_bias": True}
_GEMMA2 = {**PLAIN, "norms": "both", "norm_offset": True, "activation": "gelu", "embed_scaled": True}
GEMMA2_FLAGS = {name: _GEMMA2[name] for name in PLAIN if name not in ("score_dim", "score_cap", "logit_cap")}
GEMMA3_FLAGS = {**GEMMA2_FLAGS, "qk_norm": True, "score_cap": 0.0}
INV_FREQ = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
FAMILIES = (
    HuggingFaceFamily(
        "GPT2LMHeadModel",
        "gpt2",
        GPT2Config,
        "transformer.",
        (GPT2_ROWS,),
        GPT2_FIELDS,
        GPT2_FIXED,
        r"h\.\d+\.attn\.(bias|masked_bias)",
    ),
    HuggingFaceFamily(
        "LlamaForCausalLM",
        "llama",
        LlamaConfig,
        "model.",
        (LLAMA_ROWS,),
        _llama_fields(2048, 1e-6),
        LLAMA_FIXED,
        INV_FREQ,
        PLAIN,
    ),
    HuggingFaceFamily(
        "MistralForCausalLM",
        "mistral",
        LlamaConfig,
        "model.",
        (LLAMA_ROWS,),
        _llama_fields(131072, 1e-6, 8),
        QWEN2_FIXED,
        INV_FREQ,
        PLAIN,
        layers="window",
        window=4096,
    ),
    HuggingFaceFamily(
        "SmolLM3ForCausalLM",
        "smollm3",
        LlamaConfig,
        "model.",
        (LLAMA_ROWS,),
        _llama_fields(32768, 1e-6, 4, tied=True),
        LLAMA_FIXED,
        INV_FREQ,
        PLAIN,
        layers="smollm3",
        theta=2e6,
    ),
    HuggingFaceFamily(
        "Phi3ForCausalLM",
        "phi3",
        LlamaConfig,
        "model.",
        (PHI3_ROWS,),
        _llama_fields(4096, 1e-5) + PHI3_FIELDS,
        QWEN2_FIXED,
        INV_FREQ,
        PLAIN,
        layers="window",
        original_len=4096,
    ),
    HuggingFaceFamily(
        "Qwen2ForCausalLM",
        "qwen2",
        LlamaConfig,
        "model.",
        ((*LLAMA_ROWS, *BIASES),),
        _llama_fields(32768, 1e-6, 32),
        QWEN2_FIXED,
        INV_FREQ,
        {**PLAIN, "qkv_bias": True},
        layers="qwen",
        window=4096,
    ),
    HuggingFaceFamily(
        "Qwen3ForCausalLM",
        "qwen3",
        LlamaConfig,
        "model.",
        ((*LLAMA_ROWS, *HEAD_NORMS),),
        _llama_fields(32768, 1e-6, 32, 128),
        QWEN3_FIXED,
        INV_FREQ,
        {**PLAIN, "qk_norm": True},
        layers="qwen",
        window=4096,
    ),
    HuggingFaceFamily(
        "Olmo2ForCausalLM",
        "olmo2",
        LlamaConfig,
        "model.",
        (OLMO2_ROWS,),
        _llama_fields(2048, 1e-5),
        QWEN3_FIXED,
        INV_FREQ,
        {**PLAIN, "norms": "out", "qk_norm": True, "wide_qk_norm": True},
    ),
    HuggingFaceFamily(
        "Gemma2ForCausalLM",
        "gemma2",
        LlamaConfig,
        "model.",
        (GEMMA_ROWS,),
        (*_llama_fields(8192, 1e-6, 4, 256, tied=True), *GEMMA_FIELDS, *GEMMA2_FIELDS),
        GEMMA_FIXED,
        INV_FREQ,
        {**GEMMA2_FLAGS, "qk_norm": False},
        layers="gemma2",
        window=4096,
    ),
    HuggingFaceFamily(
        "Gemma3ForCausalLM",
        "gemma3_text",
        LlamaConfig,
        "model.",
        ((*GEMMA_ROWS, *HEAD_NORMS),),
        (
            *_llama_fields(131072, 1e-6, 4, 256, tied=True),
            *GEMMA_FIELDS,
            Field("logit_cap", "final_logit_softcapping", None, 0.0),
        ),
        {**GEMMA_FIXED, "attn_logit_softcapping": (None,)},
        INV_FREQ,
        GEMMA3_FLAGS,
        layers="gemma3",
        window=4096,
        theta=1e6,
    ),
    HuggingFaceFamily(
        "MixtralForCausalLM",
        "mixtral",
        MoEConfig,
        "model.",
        (MIXTRAL_ROWS, MIXTRAL_FUSED_ROWS),
        _llama_fields(131072, 1e-5) + MIXTRAL_FIELDS,
        MIXTRAL_FIXED,
        INV_FREQ,
        MOE_PLAIN,
        layers="window",
        theta=1e6,
    ),
    HuggingFaceFamily(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        MoEConfig,
        "model.",
        (QWEN3_MOE_ROWS, QWEN3_MOE_FUSED_ROWS),
        QWEN3_MOE_FIELDS,
        QWEN3_MOE_FIXED,
        INV_FREQ,
        {**PLAIN, "qk_norm": True, "balance": "loss", "expert_bias": False},
    ),
    HuggingFaceFamily(
        "GptOssForCausalLM",
        "gpt_oss",
        MoEConfig,
        "model.",
        (GPT_OSS_ROWS,),
        _llama_fields(131072, 1e-5, 8, 64) + GPT_OSS_FIELDS,
        GPT_OSS_FIXED,
        INV_FREQ,
        {**GPT_OSS_FLAGS, "activation": "clamped"},
        layers="gemma2",
        window=128,
        theta=150000.0,
        rope=GPT_OSS_ROPE,
        quantized="mxfp4",
    ),
    HuggingFaceFamily(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        DeepSeekConfig,
        "model.",
        (DEEPSEEK_ROWS, DEEPSEEK_FUSED_ROWS),
        DEEPSEEK_FIELDS,
        DEEPSEEK_FIXED,
        rf"{INV_FREQ}|layers\.61\..*",  # the published model's second head
    ),
)


def full_name(family: HuggingFaceFamily, name: str) -> str:
    """The name in a file of transformers, from the one in a row."""
    return name if name.startswith(OUTER) else family.prefix + name
