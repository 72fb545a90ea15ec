"""Llama 2 and 3: RMSNorm, RoPE, grouped-query attention, SwiGLU. With two flags Qwen2 and Qwen3, dense.

Ref: Touvron et al. 2023, "Llama 2", section 2.2; Grattafiori et al. 2024, "The Llama 3 herd of models", section 3.2;
Qwen team 2024, "Qwen2.5 technical report", section 2; Qwen team 2025, "Qwen3 technical report", section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fzero.core.pytree import Tree
from fzero.kernels.attention import Pattern
from fzero.kernels.rope import RopeScaling
from fzero.models.base import Batch, Ctx, Loss, MakeLeaf, Model, token_loss
from fzero.models.layers import (
    Split,
    add,
    add_and_norm,
    dropout,
    embed_tokens,
    enter,
    expect_divisible,
    norm,
    self_attention,
    swiglu,
    vocabulary_logits,
)
from fzero.models.sizes import check_sizes
from fzero.sharding import Mesh, Rules


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama; the defaults are those of Llama 2 7B. Dropout at rate `dropout` applies to embeddings and
    residual branches.

    Raises ValueError if heads do not divide d_model or each other, if a head's size is odd, or for an unknown pattern.

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
    pattern: str = "full"  # attention pattern, see Pattern.parse
    mlp_tiles: int = 1  # parts that the MLP's hidden units are computed in, see fzero.models.tiled_linear
    qkv_bias: bool = False  # whether queries, keys and values have biases, as in Qwen2
    qk_norm: bool = False  # whether each head's query and key are normalised before RoPE, as in Qwen3

    def __post_init__(self) -> None:
        check_sizes(self)
        if not self.head_dim and self.d_model % self.n_heads:
            raise ValueError(f"d_model is {self.d_model}, not divisible by n_heads={self.n_heads}; give head_dim")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads is {self.n_heads}, not divisible by n_kv_heads={self.n_kv_heads}")
        if self.key_dim % 2:
            raise ValueError(f"the heads have {self.key_dim} dims; RoPE turns pairs, so it must be even")
        Pattern.parse(self.pattern)

    @property
    def key_dim(self) -> int:
        """The size K of a head."""
        return self.head_dim or self.d_model // self.n_heads


RULES = (
    (r"^embed/tokens$", "[V/tp, D]"),
    (r"/attn/w_[qkv]$", "[L/pp, D, H/tp]"),
    (r"/attn/w_o$", "[L/pp, H/tp, D]"),
    (r"^blocks/norm_", "[L/pp, D]"),
    (r"^head/norm/", "[D]"),
)
SHARED_KV_RULES = (
    (r"/attn/w_[kv]$", "[L/pp, D, G] +tp"),
)  # fewer heads than ranks: each rank holds all of them and uses one
BIAS_RULE = (r"/attn/b_[qkv]$", "[L/pp, H/tp]")
SHARED_BIAS_RULE = (r"/attn/b_[kv]$", "[L/pp, G] +tp")
HEAD_NORM_RULE = (r"/attn/norm_[qk]/scale$", "[L/pp, K] +tp")  # whole on all ranks; each uses it for its own heads
MLP_RULES = ((r"/mlp/w_(gate|up)$", "[L/pp, D, F/tp]"), (r"/mlp/w_down$", "[L/pp, F/tp, D]"))


def init(c: LlamaConfig, make: MakeLeaf, feed_forward: Callable[..., Tree]) -> Tree:
    """Make the parameters of a Llama. feed_forward(w, out_std) makes those of the feed-forward part by `w(name, *shape,
    std=...)`.
    """
    layers, d, q, kv = c.n_layers, c.d_model, c.n_heads * c.key_dim, c.n_kv_heads * c.key_dim
    out_std = c.init_std / math.sqrt(2 * layers)

    def w(name: str, *shape: int, std: float = c.init_std) -> Any:
        return make(f"blocks/{name}", (layers, *shape), std)

    def ones(name: str, *shape: int) -> Any:
        return {"scale": make(f"{name}/scale", shape, 0.0, 1.0)}

    flagged: Tree = {}
    if c.qkv_bias:
        flagged |= {f"b_{n}": w(f"attn/b_{n}", size, std=0.0) for n, size in (("q", q), ("k", kv), ("v", kv))}
    if c.qk_norm:
        flagged |= {f"norm_{n}": ones(f"blocks/attn/norm_{n}", layers, c.key_dim) for n in "qk"}

    tree = {
        "embed": {"tokens": make("embed/tokens", (c.vocab_size, d), c.init_std)},
        "blocks": {
            "norm_1": ones("blocks/norm_1", layers, d),
            "attn": {
                "w_q": w("attn/w_q", d, q),
                "w_k": w("attn/w_k", d, kv),
                "w_v": w("attn/w_v", d, kv),
                "w_o": w("attn/w_o", q, d, std=out_std),
                **flagged,
            },
            "norm_2": ones("blocks/norm_2", layers, d),
            **feed_forward(w, out_std),
        },
        "head": {"norm": ones("head/norm", d)},
    }
    if not c.tied:
        tree["head"]["w"] = make("head/w", (c.vocab_size, d), c.init_std)
    return tree


def embed(c: LlamaConfig, params: Tree, batch: Batch, ctx: Ctx) -> Tensor:
    """Return the embeddings [B, T, D] of the tokens, with dropout."""
    return dropout(embed_tokens(params["embed"]["tokens"], batch, ctx), c.dropout, "embed", ctx)


def attend(c: LlamaConfig, p: Tree, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """Return (x after the attention half of a block, the same normalised for the feed-forward half)."""
    h = norm(p["norm_1"], x, c.norm_eps, ctx)
    frequencies, pattern = (c.key_dim, c.rope_theta, c.rope_scaling), Pattern.parse(c.pattern)
    h = self_attention(
        p["attn"],
        h,
        ctx,
        heads=c.n_heads,
        kv_heads=c.n_kv_heads,
        pattern=pattern,
        frequencies=frequencies,
        eps=c.norm_eps,
    )
    return add_and_norm(p["norm_2"], x, h, c.norm_eps, c.dropout, "attn", ctx)


def head_inputs(c: LlamaConfig, params: Tree, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """Return (normalised x [B, T, D] inside the head's tensor-parallel region, the head's w [V, D] or this rank's rows
    of it).
    """
    w = params["embed"]["tokens"] if c.tied else params["head"]["w"]
    return enter(norm(params["head"]["norm"], x, c.norm_eps, ctx), ctx, "head"), w


def logits(c: LlamaConfig, params: Tree, x: Tensor, ctx: Ctx) -> Tensor:
    """Return all logits [B, T, V] of the activations x [B, T, D] after the last block."""
    return vocabulary_logits(*head_inputs(c, params, x, ctx), ctx)


def rules(c: LlamaConfig, mesh: Mesh, feed_forward: Rules[str], hidden: Split) -> Rules[str]:
    """Return the sharding rules on a mesh, with those of the feed-forward part.

    Raises ValueError if tp does not divide heads, vocabulary or hidden units.
    """
    expect_divisible(
        mesh,
        Split("blocks/attn/w_q", 2, c.n_heads, "n_heads", "heads"),
        Split("blocks/attn/w_k", 2, c.n_kv_heads, "n_kv_heads", "kv heads"),
        hidden,
        Split("embed/tokens", 0, c.vocab_size, "vocab_size"),
    )
    few = c.n_kv_heads < mesh["tp"].size
    shared = (*(SHARED_KV_RULES if few else ()), *((SHARED_BIAS_RULE,) if few and c.qkv_bias else ()))
    flagged = (*((BIAS_RULE,) if c.qkv_bias else ()), *((HEAD_NORM_RULE,) if c.qk_norm else ()))
    return (*feed_forward, *shared, *flagged, *RULES, *(() if c.tied else ((r"^head/w$", "[V/tp, D]"),)))


def llama(config: LlamaConfig) -> Model:
    """Return the Llama of these sizes, as a Model.

        each block: x = x + attn(rms_norm(x)),  x = x + (silu(h w_gate) * (h w_up)) w_down with h = rms_norm(x)

    Attention with RoPE and grouped query heads. Heads, feed-forward units and vocabulary are split over tp, layers over
    pp.

    >>> from fzero import models
    >>> models.num_params(llama(LlamaConfig(vocab_size=32, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=32)))
    3376

    Ref: Touvron et al. 2023, "Llama 2", arXiv:2307.09288, section 2.2; Grattafiori et al. 2024, "The Llama 3 herd of
    models", arXiv:2407.21783, section 3.2.
    """
    c = config

    def mlp(w: Callable[..., Any], out_std: float) -> Tree:
        d, f = c.d_model, c.d_ff
        return {
            "mlp": {
                "w_gate": w("mlp/w_gate", d, f),
                "w_up": w("mlp/w_up", d, f),
                "w_down": w("mlp/w_down", f, d, std=out_std),
            }
        }

    def block(p: Tree, x: Tensor, ctx: Ctx) -> Tensor:
        x, h = attend(c, p, x, ctx)
        return add(x, swiglu(p["mlp"], h, ctx, c.mlp_tiles), c.dropout, "mlp", ctx)

    return Model(
        config=c,
        init=lambda make: init(c, make, mlp),
        embed=lambda params, batch, ctx: embed(c, params, batch, ctx),
        block=block,
        head=lambda params, x, batch, ctx: Loss(*token_loss(*head_inputs(c, params, x, ctx), batch, ctx)),
        logits=lambda params, x, ctx: logits(c, params, x, ctx),
        rules=lambda mesh: rules(c, mesh, MLP_RULES, Split("blocks/mlp/w_gate", 2, c.d_ff, "d_ff")),
        shared=("embed/tokens",) if c.tied else (),
    )
