"""GPT-2: learned positions, LayerNorm before each half, tanh GELU, tied head (Radford et al. 2019, section 2.3)."""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from fzero.core.pytree import Tree
from fzero.kernels.attention_pattern import Pattern
from fzero.kernels.embedding import look_up
from fzero.kernels.rowwise import gelu
from fzero.models.base import Ctx, Leaves, Loss, Model, ModelTraits, make_tree, ones
from fzero.models.batch import Batch
from fzero.models.chunked_layer import AttentionLayer
from fzero.models.configs import GPT2Config
from fzero.models.cp_attention import Attention, project_attention, queries_keys_values
from fzero.models.forward import token_loss
from fzero.models.layers import (
    DimSplit,
    add,
    add_and_norm,
    document_positions,
    dropout,
    embed_tokens,
    enter_region,
    exit_region,
    expect_divisible,
    linear,
    local_tokens,
    norm,
    row_parallel_linear,
    sequence_axis,
    split_words,
)
from fzero.models.llama import ends, head_inputs
from fzero.models.tiled_linear import expect_plain, tiled_gelu_mlp
from fzero.sharding import Mesh, Rules
from fzero.sharding.slices import narrow_part

RULES = (
    (r"^embed/tokens$|^head/w$", "[V/tp, D]"),
    (r"^embed/positions$", "[T, D]"),
    (r"/attn/w_[qkv]$", "[L/pp, D, H/tp]"),
    (r"/attn/b_[qkv]$", "[L/pp, H/tp]"),
    (r"/attn/w_o$", "[L/pp, H/tp, D]"),
    (r"/mlp/w_in$", "[L/pp, D, F/tp]"),
    (r"/mlp/b_in$", "[L/pp, F/tp]"),
    (r"/mlp/w_out$", "[L/pp, F/tp, D]"),
    (r"^blocks/", "[L/pp, D]"),
    (r"^head/norm/", "[D]"),
)


def _leaves(c: GPT2Config) -> Leaves:
    d, layers = c.d_model, c.n_layers
    std, out_std = c.init_std, c.init_std / math.sqrt(2 * layers)  # residual branches: section 2.3

    def layer_norm(name: str, *shape: int) -> Leaves:
        return {**ones(name, *shape), f"{name}/bias": (shape, 0.0)}

    def dense(part: str, name: str, size_in: int, size_out: int, std: float) -> Leaves:
        w, b = (layers, size_in, size_out), (layers, size_out)
        return {f"blocks/{part}/w_{name}": (w, std), f"blocks/{part}/b_{name}": (b, 0.0)}

    leaves: Leaves = {
        "embed/tokens": ((c.vocab_size, d), std),
        "embed/positions": ((c.max_len, d), std / 2),
        **layer_norm("blocks/ln_1", layers, d),
    }
    for name in "qkvo":
        leaves |= dense("attn", name, d, d, out_std if name == "o" else std)
    leaves |= layer_norm("blocks/ln_2", layers, d)
    leaves |= {**dense("mlp", "in", d, c.d_ff, std), **dense("mlp", "out", c.d_ff, d, out_std)}
    leaves |= layer_norm("head/norm", d)
    return leaves if c.tied else {**leaves, "head/w": ((c.vocab_size, d), std)}


def _feed_forward(c: GPT2Config, p: Tree, h: Tensor, ctx: Ctx) -> Tensor:
    h = enter_region(h, ctx, "blocks/mlp")
    if c.mlp_tiles > 1 or c.mlp_tokens:
        expect_plain(p, ctx, c.mlp_tiles, c.mlp_tokens)
        h = tiled_gelu_mlp(h, p["w_in"], p["w_out"], c.mlp_tiles, p["b_in"], tokens=c.mlp_tokens)
        return exit_region(h, ctx, "blocks/mlp") + p["b_out"].to(h.dtype)
    h = gelu(linear(h, p["w_in"], p["b_in"], ctx), impl=ctx.kernels["gelu"])
    return row_parallel_linear(h, p["w_out"], ctx, "blocks/mlp", p["b_out"])


def gpt2(config: GPT2Config) -> Model:
    """Return the GPT-2 of these sizes, as a Model.

        x = tokens + positions;   logits = ln(x) tokens^T
        each block: x = x + attn(ln_1(x)),  x = x + gelu(ln_2(x) w_in + b_in) w_out + b_out

    Attention and MLP are split over tp, layers over pp.

    >>> model = gpt2(GPT2Config(d_model=16, n_layers=1, n_heads=2, d_ff=32))
    >>> model.shared  # tied: the head multiplies by the embedding
    ('embed/tokens',)

    Ref: Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3.
    """
    c, attention = config, Attention(config.n_heads, config.n_heads, Pattern.parse(config.pattern))

    def embed(params: Tree, batch: Batch, ctx: Ctx) -> Tensor:
        x = embed_tokens(params["embed"]["tokens"], batch, ctx, c.vocab_size)
        table, axis = params["embed"]["positions"].to(ctx.dtype), sequence_axis(ctx)
        if not isinstance(ctx.tokens.documents, tuple):
            x = x + look_up(table, local_tokens(document_positions(ctx.tokens.documents), ctx))
        elif isinstance(ctx.tokens.positions, Tensor):
            x = x + look_up(table, narrow_part(ctx.tokens.positions, axis.rank, axis.size, 0))
        else:
            first = axis.rank * x.shape[1]
            x = x + table[first : first + x.shape[1]]
        return dropout(x, c.dropout, "embed", ctx)

    def pre_attention(p: Tree, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor, Tensor]:
        return queries_keys_values(p["attn"], norm(p["ln_1"], x, c.norm_eps, ctx), ctx, attention)

    def post_attention(p: Tree, x: Tensor, out: Tensor, ctx: Ctx) -> Tensor:
        h = project_attention(p["attn"], out, ctx)
        x, h = add_and_norm(p["ln_2"], x, h, c.norm_eps, c.dropout, "attn", ctx)
        return add(x, _feed_forward(c, p["mlp"], h, ctx), c.dropout, "mlp", ctx)

    layer = AttentionLayer(pre_attention, post_attention, attention)

    def head(params: Tree, x: Tensor, batch: Batch, ctx: Ctx) -> Loss:
        return Loss(*token_loss(*head_inputs(c, params, x, ctx), batch, ctx, words=c.vocab_size))

    def rules(mesh: Mesh) -> Rules[str]:
        expect_divisible(
            mesh,
            DimSplit("blocks/attn/w_q", 2, c.n_heads, "n_heads", "heads"),
            DimSplit("blocks/mlp/w_in", 2, c.d_ff, "d_ff"),
            DimSplit("embed/tokens", 0, c.vocab_size, "vocab_size", "words"),
        )
        return split_words(RULES, mesh, c.vocab_size)

    return Model(
        config=c,
        init=partial(make_tree, _leaves(c)),
        embed=embed,
        block=lambda p, x, ctx: layer(p, x, ctx, c.layer_tokens),
        head=head,
        rules=rules,
        traits=ModelTraits(linear=r"blocks/(attn|mlp)/w_\w+", splits=True),
        **ends(c),
    )
