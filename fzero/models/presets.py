"""The named models, with the published sizes. `tiny` and `small` are for training on bytes on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fzero.core.pytree import nearest
from fzero.kernels.rope import RopeScaling
from fzero.models.base import Model
from fzero.models.gpt2 import GPT2Config, gpt2
from fzero.models.llama import LlamaConfig, llama
from fzero.models.mixtral import MoEConfig, mixtral
from fzero.models.mlp import MLPConfig, mlp

ModelConfig = GPT2Config | LlamaConfig | MoEConfig | MLPConfig


def _gpt2(d_model: int, n_layers: int, n_heads: int, **sizes: Any) -> GPT2Config:
    return GPT2Config(d_model=d_model, n_layers=n_layers, n_heads=n_heads, d_ff=4 * d_model, **sizes)


def _megatron(d_model: int, n_layers: int, n_heads: int) -> GPT2Config:
    # Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", table 1.
    return _gpt2(d_model, n_layers, n_heads, vocab_size=51200, max_len=2048)


def _llama3(d_model: int, n_layers: int, n_heads: int, d_ff: int, factor: float, *, tied: bool = False) -> LlamaConfig:
    # Grattafiori et al. 2024, "The Llama 3 herd of models", table 3; 1B and 3B as released in Llama 3.2.
    return LlamaConfig(
        vocab_size=128256,
        max_len=131072,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        d_ff=d_ff,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(factor=factor),
        tied=tied,
    )


def _bytes_llama(d_model: int, n_layers: int, n_heads: int, n_kv_heads: int, d_ff: int) -> LlamaConfig:
    return LlamaConfig(256, 1024, d_model, n_layers, n_heads, n_kv_heads, d_ff)


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
    "llama-tiny": lambda: _bytes_llama(256, 4, 4, 2, 704),
    "llama-small": lambda: _bytes_llama(512, 8, 8, 4, 1408),
    "llama-1b": lambda: _llama3(2048, 16, 32, 8192, 32.0, tied=True),
    "llama-3b": lambda: _llama3(3072, 28, 24, 8192, 32.0, tied=True),
    "llama-8b": lambda: _llama3(4096, 32, 32, 14336, 8.0),
    "llama-70b": lambda: _llama3(8192, 80, 64, 28672, 8.0),
    "llama-405b": lambda: _llama3(16384, 126, 128, 53248, 8.0),
    "llama2-7b": lambda: LlamaConfig(),
    "llama2-13b": lambda: LlamaConfig(d_model=5120, n_layers=40, n_heads=40, n_kv_heads=40, d_ff=13824),
    "llama2-70b": lambda: LlamaConfig(d_model=8192, n_layers=80, n_heads=64, n_kv_heads=8, d_ff=28672),
    "mixtral-tiny": lambda: MoEConfig(256, 1024, 192, 4, 4, 2, 384, n_experts=4, top_k=2),
    "mixtral-8x7b": lambda: MoEConfig(32000, 32768, 4096, 32, 32, 8, 14336, rope_theta=1e6),
    "mlp-tiny": lambda: MLPConfig(),
}


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


BUILDERS: dict[type, Callable[[Any], Model]] = {
    GPT2Config: gpt2,
    LlamaConfig: llama,
    MoEConfig: mixtral,
    MLPConfig: mlp,
}


def build(config: ModelConfig) -> Model:
    """Return the Model of a config, by the config's type.

    >>> build(preset("llama-tiny")).config.d_ff
    704
    """
    return BUILDERS[type(config)](config)


FAMILIES: dict[str, type] = {"gpt2": GPT2Config, "llama": LlamaConfig, "mixtral": MoEConfig, "mlp": MLPConfig}


def family_of(model: ModelConfig) -> str:
    """The name of the model family that a config belongs to."""
    return next(name for name, kind in FAMILIES.items() if type(model) is kind)
