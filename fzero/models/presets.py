"""The named models, with the published sizes; and a larger vocabulary for a model.

`tiny` and `small` are for training on bytes on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fzero import models
from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.pytree import Tree, nearest
from fzero.kernels.rope_scaling import RopeScaling
from fzero.models.base import Model
from fzero.models.config_values import parse_layers
from fzero.models.configs import (
    TABLES,
    ConfigOver,
    DecoderConfig,
    DeepSeekConfig,
    GPT2Config,
    LlamaConfig,
    LoRAConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    QuantizedConfig,
    ScoreConfig,
    family_of,
)

# Below, `sizes` are d_model, n_layers, n_heads, n_kv_heads and d_ff.


def _gpt2(d_model: int, n_layers: int, n_heads: int, vocab_size: int = 50257, max_len: int = 1024) -> GPT2Config:
    return GPT2Config(vocab_size, max_len, d_model, n_layers, n_heads, 4 * d_model)


def _megatron(d_model: int, n_layers: int, n_heads: int) -> GPT2Config:
    # Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", table 1.
    return _gpt2(d_model, n_layers, n_heads, vocab_size=51200, max_len=2048)


def _llama3(*sizes: Any, factor: float = 8.0, tied: bool = False) -> LlamaConfig:
    # Grattafiori et al. 2024, "The Llama 3 herd of models", table 3; 1B and 3B as released in Llama 3.2.
    return LlamaConfig(128256, 131072, *sizes, rope_theta=500000.0, rope_scaling=RopeScaling(factor=factor), tied=tied)


def _qwen25(*sizes: Any) -> LlamaConfig:
    # Qwen team 2024, "Qwen2.5 technical report", table 1; sizes and padded vocabulary as released.
    return LlamaConfig(152064, 131072, *sizes, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True)


def _qwen3(*sizes: Any) -> LlamaConfig:
    # Qwen team 2025, "Qwen3 technical report", table 1; as released.
    return LlamaConfig(151936, 40960, *sizes, head_dim=128, rope_theta=1e6, norm_eps=1e-6, qk_norm=True)


def _gemma(vocab_size: int, max_len: int, *sizes: Any, **options: Any) -> LlamaConfig:
    options |= {"norms": "both", "norm_offset": True, "activation": "gelu", "embed_scaled": True, "tied": True}
    return LlamaConfig(vocab_size, max_len, *sizes, norm_eps=1e-6, **options)


def _gemma2(*sizes: Any, score_dim: int = 256, head_dim: int = 256) -> LlamaConfig:
    # Gemma team 2024, "Gemma 2", arXiv:2408.00118, table 1; the rest as released.
    caps: dict[str, Any] = {"score_cap": 50.0, "logit_cap": 30.0, "pattern": "window:4096,full"}
    return _gemma(256000, 8192, *sizes, head_dim=head_dim, score_dim=score_dim, **caps)


def _gemma3(
    *sizes: Any, window: int = 1024, factor: float = 8.0, vocab_size: int = 262208, **heads: int
) -> LlamaConfig:
    # Gemma team 2025, "Gemma 3 technical report", arXiv:2503.19786, section 2; the text model as released.
    layers = {"pattern": f"5*window:{window}@10000,full", "rope_theta": 1e6, "qk_norm": True}
    scaling = RopeScaling.linear(factor) if factor > 1.0 else None
    heads = {"head_dim": 256, "score_dim": 256, **heads}
    return _gemma(vocab_size, 131072 if scaling else 32768, *sizes, rope_scaling=scaling, **heads, **layers)


def _mistral(pattern: str, max_len: int, **overrides: Any) -> LlamaConfig:
    # Jiang et al. 2023, "Mistral 7B", arXiv:2310.06825, table 1.
    return LlamaConfig(max_len=max_len, n_kv_heads=8, d_ff=14336, pattern=pattern, **overrides)


def _olmo2(*sizes: Any) -> LlamaConfig:
    # OLMo team 2025, "2 OLMo 2 furious", arXiv:2501.00656, table 3; as released.
    options: dict[str, Any] = {"norms": "out", "qk_norm": True, "wide_qk_norm": True, "norm_eps": 1e-6}
    return LlamaConfig(100352, 4096, *sizes, rope_theta=500000.0, **options)


def _smollm3() -> LlamaConfig:
    # Bakouch et al. 2025, "SmolLM3: smol, multilingual, long-context reasoner"; as released.
    options: dict[str, Any] = {"pattern": "3*full,full@0", "rope_theta": 5e6, "norm_eps": 1e-6, "tied": True}
    return LlamaConfig(128256, 65536, 2048, 36, 16, 4, 11008, **options)


def _phi3_mini() -> LlamaConfig:
    # Abdin et al. 2024, "Phi-3 technical report", arXiv:2404.14219, section 2; the 4K model as released.
    return LlamaConfig(vocab_size=32064, d_model=3072, d_ff=8192, pattern="window:2047")


def _gpt_oss(*sizes: Any, n_experts: int = 32, top_k: int = 4, **options: Any) -> MoEConfig:
    # OpenAI 2025, "gpt-oss-120b & gpt-oss-20b model card", arXiv:2508.10925, section 2; the rest as released.
    options = {"rope_scaling": RopeScaling(32.0, 1.0, 32.0, 4096, "yarn"), **options}
    options |= dict.fromkeys(("qkv_bias", "out_bias", "sinks", "expert_bias"), True)
    options |= {"rope_theta": 150000.0, "pattern": "window:128,full", "activation": "clamped"}
    return MoEConfig(*sizes, n_experts=n_experts, top_k=top_k, **options)


def _deepseek_tiny() -> DeepSeekConfig:
    heads: dict[str, Any] = {"q_rank": 96, "kv_rank": 64, "nope_dim": 32, "rope_dim": 16, "value_dim": 32}
    experts: dict[str, Any] = {"n_experts": 8, "top_k": 2, "n_groups": 4, "top_groups": 2, "d_expert": 128}
    return DeepSeekConfig(256, 1024, 192, 4, 1, 4, **heads, d_ff=512, **experts, init_std=0.02)


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "gpt2-tiny": lambda: _gpt2(256, 4, 4, vocab_size=256, max_len=1024),
    "gpt2-124m": lambda: _gpt2(768, 12, 12),
    "gpt2-355m": lambda: _gpt2(1024, 24, 16),
    "gpt2-774m": lambda: _gpt2(1280, 36, 20),
    "gpt2-1.5b": lambda: _gpt2(1600, 48, 25),
    "gpt-7.5b": lambda: _megatron(4096, 36, 32),
    "gpt-18b": lambda: _megatron(6144, 40, 48),
    "gpt-39b": lambda: _megatron(8192, 48, 64),
    "gpt-76b": lambda: _megatron(10240, 60, 80),
    "gpt-145b": lambda: _megatron(12288, 80, 96),
    "gpt-310b": lambda: _megatron(16384, 96, 128),
    "gpt-530b": lambda: _megatron(20480, 105, 128),
    "gpt-1t": lambda: _megatron(25600, 128, 160),
    "llama-tiny": lambda: LlamaConfig(256, 1024, 256, 4, 4, 2, 704),
    "llama-small": lambda: LlamaConfig(256, 1024, 512, 8, 8, 4, 1408),
    "llama-1b": lambda: _llama3(2048, 16, 32, 8, 8192, factor=32.0, tied=True),
    "llama-3b": lambda: _llama3(3072, 28, 24, 8, 8192, factor=32.0, tied=True),
    "llama-8b": lambda: _llama3(4096, 32, 32, 8, 14336),
    "llama-70b": lambda: _llama3(8192, 80, 64, 8, 28672),
    "llama-405b": lambda: _llama3(16384, 126, 128, 8, 53248),
    "llama2-7b": lambda: LlamaConfig(),
    "llama2-13b": lambda: LlamaConfig(32000, 4096, 5120, 40, 40, 40, 13824),
    "llama2-70b": lambda: LlamaConfig(32000, 4096, 8192, 80, 64, 8, 28672),
    "qwen2.5-7b": lambda: _qwen25(3584, 28, 28, 4, 18944),
    "qwen2.5-72b": lambda: _qwen25(8192, 80, 64, 8, 29568),
    "qwen3-8b": lambda: _qwen3(4096, 36, 32, 8, 12288),
    "qwen3-32b": lambda: _qwen3(5120, 64, 64, 8, 25600),
    "mistral-7b": lambda: _mistral("window:4096", 32768),
    "mistral-7b-v0.3": lambda: _mistral("full", 32768, vocab_size=32768, rope_theta=1e6),
    "olmo2-7b": lambda: _olmo2(4096, 32, 32, 32, 11008),
    "olmo2-13b": lambda: _olmo2(5120, 40, 40, 40, 13824),
    "phi3-mini": _phi3_mini,
    "smollm3-3b": _smollm3,
    "gemma2-2b": lambda: _gemma2(2304, 26, 8, 4, 9216),
    "gemma2-9b": lambda: _gemma2(3584, 42, 16, 8, 14336),
    "gemma2-27b": lambda: _gemma2(4608, 46, 32, 16, 36864, score_dim=144, head_dim=128),
    "gemma3-1b": lambda: _gemma3(1152, 26, 4, 1, 6912, window=512, factor=1.0, vocab_size=262144),
    "gemma3-4b": lambda: _gemma3(2560, 34, 8, 4, 10240),
    "gemma3-12b": lambda: _gemma3(3840, 48, 16, 8, 15360),
    "gemma3-27b": lambda: _gemma3(5376, 62, 32, 16, 21504, head_dim=128, score_dim=168),
    "mixtral-tiny": lambda: MoEConfig(256, 1024, 192, 4, 4, 2, 384, n_experts=4, top_k=2),
    "mixtral-8x7b": lambda: MoEConfig(32000, 32768, 4096, 32, 32, 8, 14336, rope_theta=1e6),
    "gpt-oss-tiny": lambda: _gpt_oss(256, 1024, 192, 4, 4, 2, 192, 48, n_experts=4, top_k=2, rope_scaling=None),
    "gpt-oss-20b": lambda: _gpt_oss(201088, 131072, 2880, 24, 64, 8, 2880, 64),
    "gpt-oss-120b": lambda: _gpt_oss(201088, 131072, 2880, 36, 64, 8, 2880, 64, n_experts=128),
    "deepseek-tiny": _deepseek_tiny,
    "deepseek-v3": lambda: DeepSeekConfig(),
    "mlp-tiny": lambda: MLPConfig(),
}


@checked()
def preset(name: str) -> ModelConfig:
    """Return the sizes of a named model, a config; `PRESETS` has the names.

    Raises ValueError naming the nearest preset for an unknown name.

    >>> preset("gpt2-124m").n_layers
    12
    """
    if name not in PRESETS:
        raise ValueError(
            f"model {name!r} is not a preset{nearest(name, PRESETS)}; the presets are {', '.join(PRESETS)}"
        )
    return PRESETS[name]()


@checked()
def build(config: ModelConfig) -> Model:
    """Return the Model of a config, by the config's type; the file of its family is imported here.

    >>> build(preset("llama-tiny")).config.d_ff
    704
    """
    match config:
        case LoRAConfig():
            return models.lora(build(config.base), config.rank, config.alpha, config.targets, dora=config.dora)
        case QuantizedConfig():
            return models.quantized(build(config.base), config.kind, config.block, config.targets)
        case ScoreConfig():
            return models.preference.scored(build(config.base), config)
        case DecoderConfig():
            return models.decoder.decoder(config)
    return getattr(models, family_of(config))(config)


@checked()
def shorten(config: ModelConfig, n_layers: int) -> ModelConfig:
    """Return the sizes of the same model with `n_layers` layers, all of them like those of its deepest stack.

    >>> shorten(preset("deepseek-v3"), 2).n_dense
    0
    """
    if isinstance(config, (LoRAConfig, QuantizedConfig, ScoreConfig)):
        return replace(config, base=shorten(config.base, n_layers))
    if isinstance(config, DeepSeekConfig):
        return replace(config, n_layers=n_layers, n_dense=0, n_mtp=0)
    return replace(config, n_layers=n_layers)


@checked()
def period(config: ModelConfig) -> int:
    """The number of layers after which a model's layers repeat what they differ in.

    >>> period(preset("gemma3-1b"))
    6
    """
    return len(parse_layers(getattr(config, "pattern", "full")))


@checked()
def grow_vocabulary(config: ModelConfig, params: Tree, vocab_size: int) -> tuple[ModelConfig, Tree]:
    """Return (the config of the model with `vocab_size` tokens, its parameters): `params` whose tables of the
    vocabulary, embed/tokens [V, D] and of an untied head head/w [V, D], have that many rows.

    A new row is the mean of the old ones, so that a new token begins as an average one: it gets a probability near
    1/V, and those of the others hardly change (Hewitt 2021, "Initializing new word embeddings for pretrained language
    models"). `resize_token_embeddings(mean_resizing=True)` of transformers draws rows around that mean, with 1e-9 of
    the old rows' covariance. Sums are in float32 or wider. params: whole (not sharded). Of LoRA the tables are trained
    from then on, whole, beside the factors. Raises ValueError for fewer rows than there are.

    >>> from fzero import models, random
    >>> config = models.MLPConfig(vocab_size=8)
    >>> params = models.init_params(models.build(config), random.key(0))
    >>> larger, grown = grow_vocabulary(config, params, 10)
    >>> larger.vocab_size, grown["embed"]["tokens"].shape
    (10, torch.Size([10, 32]))
    >>> grown["head"]["w"][9].allclose(params["head"]["w"].mean(0))
    True
    """
    larger = with_vocab_size(config, vocab_size)
    return larger, pytree.from_named(grow_tables(pytree.named_leaves(params), vocab_size), params)


def with_vocab_size(config: Any, vocab_size: int) -> Any:
    """The config of a model with so many tokens; raises ValueError for fewer than it has."""
    if vocab_size < config.vocab_size:
        raise ValueError(
            f"model.vocab_size is {vocab_size} and the model has {config.vocab_size} tokens; rows are added only, so "
            f"give {config.vocab_size} or more"
        )
    if vocab_size == config.vocab_size:
        return config
    if isinstance(config, DecoderConfig):
        raise ValueError(
            f"transformers' code computes {config.architecture}, whose tables of {config.vocab_size} tokens fzero does "
            f"not make larger, and {vocab_size} are needed; call model.resize_token_embeddings({vocab_size}) in "
            "transformers, save the folder, and start from that"
        )
    if not isinstance(config, ConfigOver):
        return replace(config, vocab_size=vocab_size)
    config = replace(config, base=with_vocab_size(config.base, vocab_size))
    return replace(config, vocabulary=True) if isinstance(config, LoRAConfig) else config


def grow_tables(named: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """The leaves by name, the vocabulary's with so many rows, new ones at the mean."""

    def grow(name: str, leaf: Tensor) -> Tensor:
        rows = vocab_size - leaf.shape[0] if name in TABLES else 0
        if rows <= 0:
            return leaf
        mean = leaf.mean(0, dtype=torch.promote_types(leaf.dtype, torch.float32)).to(leaf.dtype)
        return torch.cat([leaf, mean.expand(rows, -1)])

    return {name: grow(name, leaf) for name, leaf in named.items()}
