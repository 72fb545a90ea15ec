"""Llama 2 and 3 (RMSNorm, RoPE, grouped-query attention, SwiGLU) and, with experts in place of the SwiGLU, Mixtral.

Ref: Touvron et al. 2023, "Llama 2", section 2.2; Grattafiori et al. 2024, "The Llama 3 herd of models", section 3.2; Jiang et al. 2024,
"Mixtral of experts".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fzero.kernels import moe as experts
from fzero.kernels.attention import Pattern
from fzero.models.base import Batch, Ctx, Loss, MakeLeaf, Model, token_loss
from fzero.models.layers import RopeScaling, dropout, embed_tokens, linear, rms_norm, self_attention, swiglu
from fzero.pytree import Tree


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama. Residual branches and embeddings are dropped out at rate `dropout`."""

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

    def __post_init__(self) -> None:
        if not self.head_dim and self.d_model % self.n_heads:
            raise ValueError(f"d_model is {self.d_model}, not divisible by n_heads={self.n_heads}; give head_dim")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads is {self.n_heads}, not divisible by n_kv_heads={self.n_kv_heads}")
        if self.key_dim % 2:
            raise ValueError(f"the heads have {self.key_dim} dims; RoPE turns pairs, so it must be even")
        Pattern.parse(self.pattern)

    @property
    def key_dim(self) -> int:
        """The dims K of a head."""
        return self.head_dim or self.d_model // self.n_heads


@dataclass(frozen=True)
class MoEConfig(LlamaConfig):
    """Sizes of a Mixtral: `n_experts` SwiGLUs of d_ff each, of which a token uses `top_k`.

    The balance loss of a sequence is E sum_e load_e prob_e, where load_e counts e's tokens per position and prob_e is e's mean router
    probability, both averaged over its positions and the layers (Fedus et al. 2021, "Switch transformers", equation 4, taken per
    sequence, so that a batch may be split anyhow); the z-loss is the mean square of the router's log-sum-exp (Zoph et al. 2022,
    "ST-MoE", equation 5). Both are weighted by the sequence's tokens.
    """

    n_experts: int = 8
    top_k: int = 2
    capacity_factor: float = 0.0  # 0: dropless
    balance_coef: float = 0.02
    z_coef: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"top_k is {self.top_k}; it must be in [1, n_experts = {self.n_experts}]")


ATTENTION_RULES = (
    (r"^embed/tokens$", "[V/tp, D]"),
    (r"/attn/w_[qkv]$", "[L/pp, D, H/tp]"),
    (r"/attn/w_o$", "[L/pp, H/tp, D]"),
)
MLP_RULES = ((r"/mlp/w_(gate|up)$", "[L/pp, D, F/tp]"), (r"/mlp/w_down$", "[L/pp, F/tp, D]"))
MOE_RULES = (
    (r"/moe/router$", "[L/pp, D, E]"),
    (r"/moe/w_(gate|up)$", "[L/pp, E/ep, D, F/tp]"),
    (r"/moe/w_down$", "[L/pp, E/ep, F/tp, D]"),
)
NORM_RULES = ((r"^blocks/norm_", "[L/pp, D]"), (r"^head/norm/", "[D]"))


def llama(config: LlamaConfig) -> Model:
    """The Llama of these sizes, or the Mixtral where `config` is a MoEConfig, as a Model."""
    c, pattern = config, Pattern.parse(config.pattern)
    is_moe = isinstance(c, MoEConfig)
    frequencies = (c.key_dim, c.rope_theta, c.rope_scaling)

    def init(make: MakeLeaf) -> Tree:
        layers, d, f, std = c.n_layers, c.d_model, c.d_ff, c.init_std
        out_std = std / math.sqrt(2 * layers)
        q, kv = c.n_heads * c.key_dim, c.n_kv_heads * c.key_dim

        def w(name: str, *shape: int, std: float = std) -> Any:
            return make(f"blocks/{name}", (layers, *shape), std)

        blocks = {
            "norm_1": {"scale": make("blocks/norm_1/scale", (layers, d), 0.0, 1.0)},
            "attn": {
                "w_q": w("attn/w_q", d, q),
                "w_k": w("attn/w_k", d, kv),
                "w_v": w("attn/w_v", d, kv),
                "w_o": w("attn/w_o", q, d, std=out_std),
            },
            "norm_2": {"scale": make("blocks/norm_2/scale", (layers, d), 0.0, 1.0)},
        }
        if is_moe:
            e = c.n_experts
            blocks["moe"] = {
                "router": w("moe/router", d, e),
                "w_gate": w("moe/w_gate", e, d, f),
                "w_up": w("moe/w_up", e, d, f),
                "w_down": w("moe/w_down", e, f, d, std=out_std),
            }
        else:
            blocks["mlp"] = {
                "w_gate": w("mlp/w_gate", d, f),
                "w_up": w("mlp/w_up", d, f),
                "w_down": w("mlp/w_down", f, d, std=out_std),
            }
        tree = {
            "embed": {"tokens": make("embed/tokens", (c.vocab_size, d), std)},
            "blocks": blocks,
            "head": {"norm": {"scale": make("head/norm/scale", (d,), 0.0, 1.0)}},
        }
        if not c.tied:
            tree["head"]["w"] = make("head/w", (c.vocab_size, d), std)
        return tree

    def embed(params: Tree, batch: Batch, ctx: Ctx) -> Any:
        x = dropout(embed_tokens(params["embed"]["tokens"], batch, ctx), c.dropout, "embed", ctx)
        if not is_moe:
            return x
        # Beside the activations travel each sequence's routing statistics, summed over the layers.
        wide = torch.promote_types(ctx.dtype, torch.float32)
        zeros = torch.zeros(x.shape[0], c.n_experts, dtype=wide, device=x.device)
        return {"x": x, "load": zeros, "prob": zeros, "z": zeros[:, 0]}

    def attend(p: Tree, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
        h = rms_norm(x, p["norm_1"]["scale"], c.norm_eps)
        h = self_attention(p["attn"], h, ctx, heads=c.n_heads, kv_heads=c.n_kv_heads, pattern=pattern, frequencies=frequencies)
        x = x + dropout(h, c.dropout, "attn", ctx)
        return x, rms_norm(x, p["norm_2"]["scale"], c.norm_eps)

    def block(p: Tree, x: Tensor, ctx: Ctx) -> Tensor:
        x, h = attend(p, x, ctx)
        return x + dropout(swiglu(p["mlp"], h), c.dropout, "mlp", ctx)

    def moe_block(p: Tree, state: Tree, ctx: Ctx) -> Tree:
        x, h = attend(p, state["x"], ctx)
        router = linear(h, p["moe"]["router"]).to(state["z"].dtype)
        ids, weights, probabilities = experts.route(router, c.top_k)
        if c.capacity_factor:
            out = experts.capacity(p["moe"], h, ids, weights, c.capacity_factor)
        else:
            out = experts.dropless(p["moe"], h, ids, weights)
        chosen = (ids[..., None] == torch.arange(c.n_experts, device=x.device)).sum(-2).to(router.dtype)
        return {
            "x": x + dropout(out, c.dropout, "mlp", ctx),
            "load": state["load"] + chosen.mean(1),
            "prob": state["prob"] + probabilities.mean(1),
            "z": state["z"] + (torch.logsumexp(router, -1) ** 2).mean(1),
        }

    def normed(params: Tree, x: Any) -> tuple[Tensor, Tensor]:
        w = params["embed"]["tokens"] if c.tied else params["head"]["w"]
        return rms_norm(x["x"] if is_moe else x, params["head"]["norm"]["scale"], c.norm_eps), w

    def head(params: Tree, x: Any, batch: Batch, ctx: Ctx) -> Loss:
        total, num_tokens = token_loss(*normed(params, x), batch, ctx)
        if not is_moe:
            return Loss(total, num_tokens)
        targets = batch["targets"]
        weight = batch["mask"].sum(1).to(x["z"].dtype) if "mask" in batch else torch.full_like(x["z"], targets.shape[1])
        balance = (c.n_experts * (x["load"] * x["prob"]).sum(-1) / c.n_layers**2 * weight).sum()
        z = (x["z"] / c.n_layers * weight).sum()
        extra = {"cross_entropy": total, "balance": balance, "router_z": z}
        return Loss(total + c.balance_coef * balance + c.z_coef * z, num_tokens, extra)

    def logits(params: Tree, x: Any, ctx: Ctx) -> Tensor:
        x, w = normed(params, x)
        return x @ w.to(x.dtype).T

    tail = () if c.tied else ((r"^head/w$", "[V/tp, D]"),)
    rules = (*ATTENTION_RULES, *(MOE_RULES if is_moe else MLP_RULES), *NORM_RULES, *tail)
    return Model(config, init, embed, moe_block if is_moe else block, head, logits, rules)
