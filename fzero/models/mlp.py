"""A small residual MLP over tokens, for tests: positions do not interact, so it is fast."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fzero.core.pytree import Tree
from fzero.kernels.rowwise import tanh
from fzero.models.base import Ctx, Leaves, Loss, Model, ModelTraits, make_tree
from fzero.models.batch import Batch
from fzero.models.configs import MLPConfig
from fzero.models.forward import token_loss
from fzero.models.layers import (
    DimSplit,
    embed_tokens,
    enter_region,
    expect_divisible,
    linear,
    norm,
    row_parallel_linear,
    split_words,
    vocabulary_logits,
)
from fzero.sharding import Mesh, Rules

RULES = (
    (r"^embed/tokens$|^head/w$", "[V/tp, D]"),
    (r"/w_in$", "[L/pp, D, F/tp]"),
    (r"/w_out$", "[L/pp, F/tp, D]"),
    (r"/scale$", "[L/pp, D]"),
)


def mlp(config: MLPConfig) -> Model:
    """Return the MLP of these sizes, as a Model.

        each block: x = x + tanh(rms_norm(x) w_in) w_out

    >>> mlp(MLPConfig()).config.n_layers
    2"""
    c = config

    leaves: Leaves = {
        "embed/tokens": ((c.vocab_size, c.d_model), 1.0),
        "blocks/scale": ((c.n_layers, c.d_model), 0.0, 1.0),
        "blocks/w_in": ((c.n_layers, c.d_model, c.d_ff), c.init_std),
        "blocks/w_out": ((c.n_layers, c.d_ff, c.d_model), c.init_std),
        "head/w": ((c.vocab_size, c.d_model), c.init_std),
    }

    def embed(params: Tree, batch: Batch, ctx: Ctx) -> Tensor:
        return embed_tokens(params["embed"]["tokens"], batch, ctx, c.vocab_size)

    def block(p: Tree, x: Tensor, ctx: Ctx) -> Tensor:
        h = enter_region(norm(p, x, 1e-5, ctx), ctx, "blocks")
        return x + row_parallel_linear(
            tanh(linear(h, p["w_in"], ctx=ctx), impl=ctx.kernels["tanh"]), p["w_out"], ctx, "blocks"
        )

    def head(params: Tree, x: Tensor, batch: Batch, ctx: Ctx) -> Loss:
        return Loss(*token_loss(enter_region(x, ctx, "head"), params["head"]["w"], batch, ctx, words=c.vocab_size))

    def logits(params: Tree, x: Tensor, ctx: Ctx) -> Tensor:
        return vocabulary_logits(enter_region(x, ctx, "head"), params["head"]["w"], ctx, c.vocab_size)

    def rules(mesh: Mesh) -> Rules[str]:
        words = DimSplit("embed/tokens", 0, c.vocab_size, "vocab_size", "words")
        expect_divisible(mesh, DimSplit("blocks/w_in", 2, c.d_ff, "d_ff"), words)
        return split_words(RULES, mesh, c.vocab_size)

    return Model(
        config,
        partial(make_tree, leaves),
        embed,
        block,
        head,
        logits,
        rules,
        features=lambda params, x, ctx: x,
        traits=ModelTraits(linear=r"blocks/w_\w+", splits=True),
    )
