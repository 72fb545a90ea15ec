"""The models: pure functions over parameter trees."""

from fzero.kernels.rope import RopeScaling
from fzero.models.base import Cache, Ctx, Loss, Model, init_params, num_params
from fzero.models.batch import Batch, check_tokens
from fzero.models.deepseek import DeepSeekConfig, deepseek
from fzero.models.dropping import layer_drop, random_ltd
from fzero.models.forward import logits, loss
from fzero.models.from_module import from_module
from fzero.models.gpt2 import GPT2Config, gpt2
from fzero.models.llama import LlamaConfig, llama
from fzero.models.lora import LORA, LoRAConfig, frozen_leaves, lora, merge, set_magnitudes
from fzero.models.mixtral import MoEConfig, mixtral
from fzero.models.mlp import MLPConfig, mlp
from fzero.models.preference import answer_log_probs, by_position, dpo
from fzero.models.presets import PRESETS, ModelConfig, build, grow_vocabulary, period, preset, shorten
from fzero.models.quantized import QuantizedConfig, quantize_weights, quantized
from fzero.models.score import ScoreConfig, classify, reward

__all__ = [
    "LORA",
    "PRESETS",
    "Batch",
    "Cache",
    "Ctx",
    "DeepSeekConfig",
    "GPT2Config",
    "LlamaConfig",
    "LoRAConfig",
    "Loss",
    "MLPConfig",
    "MoEConfig",
    "Model",
    "ModelConfig",
    "QuantizedConfig",
    "RopeScaling",
    "ScoreConfig",
    "answer_log_probs",
    "build",
    "by_position",
    "check_tokens",
    "classify",
    "deepseek",
    "dpo",
    "from_module",
    "frozen_leaves",
    "gpt2",
    "grow_vocabulary",
    "init_params",
    "layer_drop",
    "llama",
    "logits",
    "lora",
    "loss",
    "merge",
    "mixtral",
    "mlp",
    "num_params",
    "period",
    "preset",
    "quantize_weights",
    "quantized",
    "random_ltd",
    "reward",
    "set_magnitudes",
    "shorten",
]
