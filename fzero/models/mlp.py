"""A small residual MLP over tokens: each position is on its own, so it is fast, and laws are tested on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fzero.models.base import Batch, Ctx, Loss, MakeLeaf, Model, token_loss
from fzero.models.layers import embed_tokens, linear, rms_norm
from fzero.pytree import Tree


@dataclass(frozen=True)
class MLPConfig:
    """Sizes of an MLP: it predicts a token's target from the token alone."""

    vocab_size: int = 256
    max_len: int = 1024
    d_model: int = 32
    n_layers: int = 2
    d_ff: int = 64
    init_std: float = 0.2


RULES = (
    (r"^embed/tokens$|^head/w$", "[V/tp, D]"),
    (r"/w_in$", "[L/pp, D, F/tp]"),
    (r"/w_out$", "[L/pp, F/tp, D]"),
    (r"/scale$", "[L/pp, D]"),
)


def mlp(config: MLPConfig) -> Model:
    """The MLP of these sizes, as a Model."""
    c = config

    def init(make: MakeLeaf) -> Tree:
        return {
            "embed": {"tokens": make("embed/tokens", (c.vocab_size, c.d_model), 1.0)},
            "blocks": {
                "scale": make("blocks/scale", (c.n_layers, c.d_model), 0.0, 1.0),
                "w_in": make("blocks/w_in", (c.n_layers, c.d_model, c.d_ff), c.init_std),
                "w_out": make("blocks/w_out", (c.n_layers, c.d_ff, c.d_model), c.init_std),
            },
            "head": {"w": make("head/w", (c.vocab_size, c.d_model), c.init_std)},
        }

    def embed(params: Tree, batch: Batch, ctx: Ctx) -> Tensor:
        return embed_tokens(params["embed"]["tokens"], batch, ctx)

    def block(p: Tree, x: Tensor, ctx: Ctx) -> Tensor:
        return x + linear(torch.tanh(linear(rms_norm(x, p["scale"], 1e-5), p["w_in"])), p["w_out"])

    def head(params: Tree, x: Tensor, batch: Batch, ctx: Ctx) -> Loss:
        return Loss(*token_loss(x, params["head"]["w"], batch, ctx))

    def logits(params: Tree, x: Tensor, ctx: Ctx) -> Tensor:
        return x @ params["head"]["w"].to(x.dtype).T

    return Model(config, init, embed, block, head, logits, RULES)
