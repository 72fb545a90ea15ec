"""The sizes of the models, as values that say nothing of how a model computes.

A config over another model's reads from that one what it lacks: LoRA, weights in codes, a head of scores.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from fzero.core.arguments import checked
from fzero.core.config_tables import one_of
from fzero.core.pytree import nearest
from fzero.kernels.attention_pattern import Pattern
from fzero.kernels.rope_scaling import RopeScaling
from fzero.models.config_values import check_sizes, parse_layers


@dataclass(frozen=True)
class MLPConfig:
    """The sizes of an MLP that predicts a token's target from the token alone.

    >>> MLPConfig(n_layers=3).d_ff
    64"""

    vocab_size: int = 256
    max_len: int = 1024
    d_model: int = 32
    n_layers: int = 2
    d_ff: int = 64
    init_std: float = 0.2

    def __post_init__(self) -> None:
        check_sizes(self)


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of a GPT-2. Dropout at rate `dropout` applies to embeddings and residual branches, not to attention
    probabilities.

    Raises ValueError if n_heads does not divide d_model, or for an unknown pattern.

    >>> GPT2Config(d_model=256, n_heads=4, d_ff=1024).vocab_size
    50257
    """

    vocab_size: int = 50257
    max_len: int = 1024
    d_model: int = 768
    n_layers: int = 12
    n_heads: int = 12
    d_ff: int = 3072
    dropout: float = 0.0
    norm_eps: float = 1e-5
    tied: bool = True
    init_std: float = 0.02
    pattern: str = "full"  # attention pattern, see Pattern.parse
    mlp_tiles: int = 1  # parts that the MLP's hidden units are computed in, see fzero.models.tiled_linear
    mlp_tokens: int = 0  # tokens that the MLP is computed for at a time, for long sequences; 0: all
    layer_tokens: int = 0  # and a whole layer, see fzero.models.chunked_layer; 0: all

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model is {self.d_model}, not divisible by n_heads={self.n_heads}")
        Pattern.parse(self.pattern)


ACTIVATIONS = ("silu", "gelu", "clamped")  # of the gate of a feed-forward part


NORMS = ("in", "out", "both")


def expect_scalable(theta: float, scaling: RopeScaling | None) -> None:
    """Raise ValueError for a base of RoPE that YaRN has no logarithm of."""
    if scaling is not None and scaling.kind != "llama3" and theta <= 1.0:
        raise ValueError(f"rope_theta is {theta:g}; with {scaling} it must be above 1")


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama; the defaults are those of Llama 2 7B. Dropout at rate `dropout` applies to embeddings and
    residual branches.

    Raises ValueError if heads do not divide d_model or each other, if a head's size is odd, or for an unknown pattern,
    place of norms or activation.

    >>> LlamaConfig(d_model=64, n_heads=4, n_kv_heads=2).key_dim
    16
    """

    vocab_size: int = 32000
    max_len: int = 4096
    d_model: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: int = 32
    d_ff: int = 11008
    head_dim: int = 0  # 0: d_model / n_heads
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    dropout: float = 0.0
    init_std: float = 0.02
    pattern: str = "full"  # attention pattern, or those of a period of layers, see fzero.models.config_values
    mlp_tiles: int = 1  # parts that the MLP's hidden units are computed in, see fzero.models.tiled_linear
    mlp_tokens: int = 0  # tokens that the MLP is computed for at a time, for long sequences; 0: all
    layer_tokens: int = 0  # and a whole layer, see fzero.models.chunked_layer; 0: all
    qkv_bias: bool = False  # whether queries, keys and values have biases, as in Qwen2
    out_bias: bool = False  # whether attention's output product has a bias, as in gpt-oss
    sinks: bool = False  # whether a learned logit of each head takes part in attention's softmax, as in gpt-oss
    qk_norm: bool = False  # whether queries and keys are normalised before RoPE, each head by itself, as in Qwen3
    wide_qk_norm: bool = False  # whether that norm runs over all heads together, as in OLMo 2
    norms: str = "in"  # the norms of a block's halves: of what comes "in", of what comes "out", or "both", as in Gemma
    norm_offset: bool = False  # whether norms multiply by 1 + their leaf, as in Gemma
    activation: str = "silu"  # of the feed-forward part's gate: "silu", "gelu" in its tanh form, or gpt-oss's "clamped"
    embed_scaled: bool = False  # whether embeddings are multiplied by the root of d_model, as in Gemma
    score_dim: int = 0  # attention's scores are divided by its root; 0: by that of a head's size
    score_cap: float = 0.0  # attention's scores are capped at it by tanh, as in Gemma 2; 0: not
    logit_cap: float = 0.0  # and the logits

    def __post_init__(self) -> None:
        check_sizes(self)
        if not self.head_dim and self.d_model % self.n_heads:
            raise ValueError(f"d_model is {self.d_model}, not divisible by n_heads={self.n_heads}; give head_dim")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads is {self.n_heads}, not divisible by n_kv_heads={self.n_kv_heads}")
        if self.key_dim % 2:
            raise ValueError(f"the heads have {self.key_dim} dims; RoPE turns pairs, so it must be even")
        for name, value, allowed in (("norms", self.norms, NORMS), ("activation", self.activation, ACTIVATIONS)):
            one_of(allowed).check(name, value)
        if self.wide_qk_norm and not self.qk_norm:
            raise ValueError("wide_qk_norm is true and qk_norm is not; set both, or neither")
        expect_scalable(self.rope_theta, self.rope_scaling)
        parse_layers(self.pattern)

    @property
    def key_dim(self) -> int:
        """The size K of a head."""
        return self.head_dim or self.d_model // self.n_heads


BALANCE = ("loss", "bias")


@dataclass(frozen=True)
class MoEConfig(LlamaConfig):
    """The sizes of a Mixtral: a Llama with `n_experts` gated feed-forward parts of d_ff units each, of which a token
    uses `top_k`.

    norm_top_k: whether the weights of a token's experts are divided by their sum; else they are their probabilities.
    balance: "loss" adds the balance loss, weighted by balance_coef, to the objective; "bias" does not, and a bias moves
    the choice of experts and not their weights, by `bias_rate` once a step towards equal loads (Wang et al. 2024,
    "Auxiliary-loss-free load balancing strategy for mixture-of-experts"). The balance loss is reported with both.

    The balance loss of a sequence is E sum_e load_e prob_e, where load_e counts e's tokens per position and prob_e is
    e's mean router probability, both averaged over its positions and the layers (Fedus et al. 2021, "Switch
    transformers", equation 4, taken per sequence, so that the loss does not depend on how a batch is split); the z-loss
    is the mean square of the router's log-sum-exp (Zoph et al. 2022, "ST-MoE", equation 5). Both are weighted by the
    number of tokens of the sequence that count.

    Raises ValueError if top_k is not in [1, n_experts], and what LlamaConfig raises.

    >>> MoEConfig(n_experts=4, top_k=2).capacity_factor  # dropless
    0.0
    """

    n_experts: int = 8
    top_k: int = 2
    capacity_factor: float = 0.0  # 0: dropless
    balance_coef: float = 0.02
    z_coef: float = 0.001
    balance: str = "loss"  # or "bias"
    bias_rate: float = 0.001
    norm_top_k: bool = True
    expert_bias: bool = False  # whether the router and the experts' products have biases, as in gpt-oss

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"top_k is {self.top_k}; it must be in [1, n_experts = {self.n_experts}]")
        if self.mlp_tiles != 1:
            raise ValueError(f"mlp_tiles is {self.mlp_tiles}; experts are not computed in tiles, so it must be 1")
        for name in ("mlp_tokens", "layer_tokens"):
            if value := getattr(self, name):
                raise ValueError(f"{name} is {value}; experts take all their tokens at once, so it must be 0")
        for name, required in (("norms", "in"), ("norm_offset", False), ("embed_scaled", False)):
            if getattr(self, name) != required:
                raise ValueError(f"{name} is {getattr(self, name)!r}; a model with experts has {required!r} only")
        if self.balance not in BALANCE:
            raise ValueError(f"balance is {self.balance!r}{nearest(self.balance, BALANCE)}; it must be loss or bias")
        if self.logit_cap:
            raise ValueError(f"logit_cap is {self.logit_cap}; a model with experts has none, so it must be 0")


@dataclass(frozen=True)
class DeepSeekConfig:
    """The sizes of a DeepSeek-V3; the defaults are the published ones, of pretraining at 4,096 tokens.

    Queries, keys and values are projected from latents of `q_rank` (0: queries from the activations) and `kv_rank`
    elements. A head's query and key have `nope_dim` elements, and `rope_dim` more with its position, whose key all
    heads share. The first `n_dense` layers have a SwiGLU of d_ff units; the others `n_shared` experts of `d_expert`
    units for every token, and `n_experts` of which a token uses the `top_k` with the highest scores in its `top_groups`
    of `n_groups` groups.

    A bias moves the choice of experts and not their weights, by `bias_rate` once a step towards equal loads of the
    experts of a layer (0: it stays). The balance loss of a sequence is E / top_k sum_e load_e score_e, summed over the
    layers with experts: load_e counts e's tokens per position and score_e is e's mean share of the scores. With n_mtp
    see `join_mtp`; the published model has one.

    Raises ValueError for experts that cannot be chosen so, and sizes out of bounds.

    >>> DeepSeekConfig().key_dim
    192
    """

    vocab_size: int = 129280
    max_len: int = 4096
    d_model: int = 7168
    n_layers: int = 61
    n_dense: int = 3
    n_heads: int = 128
    q_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    d_ff: int = 18432
    n_experts: int = 256
    n_shared: int = 1
    top_k: int = 8
    n_groups: int = 8
    top_groups: int = 4
    d_expert: int = 2048
    routed_scale: float = 2.5  # of the weights of a token's experts, which sum to it
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None  # of YaRN, as of the published model at 163,840 tokens
    norm_eps: float = 1e-6
    tied: bool = False
    dropout: float = 0.0
    init_std: float = 0.006
    balance_coef: float = 1e-4
    n_mtp: int = 0  # 1: a layer with experts more, behind which the head predicts the token after the next one
    mtp_coef: float = 0.3  # of that loss
    bias_rate: float = 0.001
    pattern: str = "full"  # attention pattern, see Pattern.parse

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.n_dense >= self.n_layers:
            raise ValueError(f"n_dense is {self.n_dense}; it must be below n_layers={self.n_layers}")
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim is {self.rope_dim}; RoPE turns pairs, so it must be even")
        if self.value_dim > self.key_dim:
            raise ValueError(f"value_dim is {self.value_dim}; it must be at most nope_dim + rope_dim = {self.key_dim}")
        expect_scalable(self.rope_theta, self.rope_scaling)
        group = self.n_experts // self.n_groups
        if self.n_experts % self.n_groups or group < 2:
            raise ValueError(
                f"n_experts is {self.n_experts} in n_groups={self.n_groups}; groups are equal and have two or more"
            )
        if not 1 <= self.top_groups <= self.n_groups:
            raise ValueError(f"top_groups is {self.top_groups}; it must be in [1, n_groups = {self.n_groups}]")
        if not 1 <= self.top_k <= self.top_groups * group:
            raise ValueError(
                f"top_k is {self.top_k}; it must be in [1, {self.top_groups * group}], the experts of "
                f"{self.top_groups} groups"
            )
        Pattern.parse(self.pattern)

    @property
    def key_dim(self) -> int:
        """The size K of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def n_kv_heads(self) -> int:
        """The number of heads of keys and values: that of queries."""
        return self.n_heads


@dataclass(frozen=True)
class DecoderConfig:
    """The config of a decoder that transformers' own code computes: its config.json and sizes.

    >>> DecoderConfig("PhiForCausalLM", "{}", 100, 64, 32, 2, 64, 4, 8).n_layers
    2
    """

    architecture: str  # its class
    text: str
    vocab_size: int
    max_len: int
    d_model: int
    n_layers: int
    d_ff: int
    n_heads: int
    key_dim: int  # of a head

    def __post_init__(self) -> None:
        check_sizes(self)


@dataclass(frozen=True)
class ConfigOver:
    """A config beside that of a model, `base`, from which it reads the attributes that it lacks itself."""

    base: Any

    def __getattr__(self, name: str) -> Any:
        if name == "base" or name.startswith("__"):  # while unpickling, `base` does not exist yet
            raise AttributeError(name)
        return getattr(self.base, name)


LORA = r"_lora_[abm]$"  # the leaves that are trained


FROZEN = r"^(?!.*_lora_[abm]$|head/score$)"  # and those that are not, for zero_plan; a head of scores always is


TABLES = ("embed/tokens", "head/w")  # the leaves with a row for each token of the vocabulary


FROZEN_BLOCKS = r"^(?!.*_lora_[abm]$|head/score$|embed/tokens$|head/w$)"  # where those are trained too


@dataclass(frozen=True)
class LoRAConfig(ConfigOver):
    """The config of a model with LoRA; attributes that it lacks are read from its base, the config of the model without
    LoRA.

    >>> from fzero import models
    >>> LoRAConfig(models.MLPConfig(), rank=4, alpha=16.0, targets="/w_").d_model
    32
    """

    rank: int
    alpha: float
    targets: str
    dora: bool = False
    vocabulary: bool = False  # the TABLES are trained too, whole


@checked()
def frozen_leaves(config: Any) -> str | None:
    """The regex of the leaves that a model of this config does not train, for `zero_plan(frozen=...)`; None if it
    trains all.

    >>> from fzero import models
    >>> frozen_leaves(models.MLPConfig()) is None
    True
    """
    if not isinstance(config, LoRAConfig):
        return None
    return FROZEN_BLOCKS if config.vocabulary else FROZEN


@dataclass(frozen=True)
class QuantizedConfig(ConfigOver):
    """The config of a model with frozen weights in codes; attributes that it lacks are read from its base, the config
    of the model without.

    >>> from fzero import models
    >>> QuantizedConfig(models.MLPConfig(), kind="nf4", block=64, targets="/w_").d_model
    32
    """

    kind: str
    block: int
    targets: str


@dataclass(frozen=True)
class ScoreConfig(ConfigOver):
    """The config of a model with a head of scores; attributes that it lacks are read from its base, the config of the
    model without.

    Raises ValueError for a single class, and for two of one name.

    >>> from fzero import models
    >>> ScoreConfig(models.MLPConfig(), labels=("bad", "good")).d_model
    32
    """

    labels: tuple[str, ...] = ()  # the names of the classes; (): there is one score, a reward
    pad: int = -1  # a text ends before its last tokens of this id, with which transformers fills rows; -1: none

    def __post_init__(self) -> None:
        if len(self.labels) == 1:
            raise ValueError(f"labels has the class {self.labels[0]!r} alone; there must be two or more")
        counts = Counter(self.labels)
        if twice := sorted(name for name in counts if counts[name] > 1):
            raise ValueError(f"labels has {twice[0]!r} twice; each class has a name of its own")


def head_of(config: Any) -> ScoreConfig | None:
    """The config of a model's head of scores, below adapters too; None if it has none.

    >>> from fzero import models
    >>> head_of(models.MLPConfig()) is None
    True
    """
    while isinstance(config, ConfigOver) and not isinstance(config, ScoreConfig):
        config = config.base
    return config if isinstance(config, ScoreConfig) else None


def head_rows(config: Any) -> int:
    """The rows of a model's head: its classes, one for a reward, else those of the vocabulary."""
    head = head_of(config)
    return config.vocab_size if head is None else len(head.labels) or 1


ModelConfig = (
    GPT2Config
    | LlamaConfig
    | MoEConfig
    | DeepSeekConfig
    | MLPConfig
    | DecoderConfig
    | LoRAConfig
    | QuantizedConfig
    | ScoreConfig
)


def without_adapters(config: ModelConfig) -> ModelConfig:
    """Return the config of a model below its LoRA and its weights in codes, if it has them.

    >>> from fzero import models
    >>> without_adapters(models.lora(models.build(models.MLPConfig()), 2, targets="/w_").config)
    MLPConfig(vocab_size=256, max_len=1024, d_model=32, n_layers=2, d_ff=64, init_std=0.2)
    """
    while isinstance(config, (LoRAConfig, QuantizedConfig)):
        config = config.base
    return config


def body_of(config: ModelConfig) -> Any:
    """Return the config of a model's layers: below adapters, weights in codes and a head of scores."""
    while isinstance(config, ConfigOver):
        config = config.base
    return config


FAMILIES: dict[str, type] = {
    "gpt2": GPT2Config,
    "llama": LlamaConfig,
    "mixtral": MoEConfig,
    "deepseek": DeepSeekConfig,
    "mlp": MLPConfig,
    "transformers": DecoderConfig,
}


# What stands on the config of another model, its `base`.
WRAPPERS: dict[str, type] = {"lora": LoRAConfig, "quantized": QuantizedConfig, "score": ScoreConfig}


def family_of(model: ModelConfig) -> str:
    """The name of the model family that a config belongs to."""
    return next(name for name, kind in {**FAMILIES, **WRAPPERS}.items() if type(model) is kind)


SCORE = "head/score"  # the leaf, [C, D]


ON = {"attn": r"/attn/w_[a-z_]+$", "all": r"/(attn|mlp)/w_[a-z_]+$"}  # weights of fzero's own models


def expect_layers_apart(config: Any) -> None:
    """Raise ValueError for the config of a model whose layers cannot be passed over."""
    if type(config) not in (LlamaConfig, GPT2Config):  # in others layers give more than their sum: tables of experts
        raise ValueError(f"layer drop: the model is of {type(config).__name__}; it takes a gpt2 or a llama")


def expect_droppable(config: Any) -> None:
    """Raise ValueError for the config of a model whose layers cannot drop tokens."""
    if type(config) not in (LlamaConfig, GPT2Config):  # no mixture of experts, whose tokens share its capacity
        raise ValueError(f"random-LTD: the model is of {type(config).__name__}; it takes a gpt2 or a llama")
    if config.dropout:
        raise ValueError(f"random-LTD: dropout is {config.dropout:g}, which draws for tokens in a row; use dropout=0")
    if any(str(kind.pattern) != "full" for kind in parse_layers(config.pattern)):
        raise ValueError(f"random-LTD: pattern is {config.pattern}, and of some tokens only full attention is defined")
    if config.n_layers < 3:
        raise ValueError(
            f"random-LTD: the model has {config.n_layers} layers, of which the first and the last drop nothing; it "
            "takes 3 or more"
        )
