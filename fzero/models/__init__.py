"""The models: pure functions over parameter trees."""

from fzero.kernels.rope import RopeScaling
from fzero.models.base import Batch, Cache, Ctx, Loss, Model, check_tokens, init_params, logits, loss, num_params
from fzero.models.gpt2 import GPT2Config, gpt2
from fzero.models.llama import LlamaConfig, llama
from fzero.models.lora import LORA, LoRAConfig, lora, merge
from fzero.models.mixtral import MoEConfig, mixtral
from fzero.models.mlp import MLPConfig, mlp
from fzero.models.presets import PRESETS, ModelConfig, build, preset

__all__ = [
    "LORA",
    "PRESETS",
    "Batch",
    "Cache",
    "Ctx",
    "GPT2Config",
    "LlamaConfig",
    "LoRAConfig",
    "Loss",
    "MLPConfig",
    "MoEConfig",
    "Model",
    "ModelConfig",
    "RopeScaling",
    "build",
    "check_tokens",
    "gpt2",
    "init_params",
    "llama",
    "logits",
    "lora",
    "loss",
    "merge",
    "mixtral",
    "mlp",
    "num_params",
    "preset",
]
