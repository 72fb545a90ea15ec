"""Llama 2 and 3: RMSNorm, RoPE, grouped-query attention, SwiGLU. With a few options the families that are variations of
it: Qwen 2.5 and 3 (dense), Mistral, OLMo 2, Phi-3, SmolLM3, Gemma 2 and 3.

Ref: Touvron et al. 2023, "Llama 2", section 2.2; Grattafiori et al. 2024, "The Llama 3 herd of models", section 3.2;
Qwen team 2024, "Qwen2.5 technical report", section 2; Qwen team 2025, "Qwen3 technical report", section 2; Jiang et al.
2023, "Mistral 7B", section 2; OLMo team 2025, "2 OLMo 2 furious", section 3.1; Gemma team 2024, "Gemma 2", section 2;
Gemma team 2025, "Gemma 3 technical report", section 2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.core.stack import Block, Blocks
from fzero.models.base import Ctx, Leaves, Loss, Model, ModelTraits, make_tree
from fzero.models.batch import Batch
from fzero.models.chunked_layer import AttentionLayer
from fzero.models.config_values import LayerKind, parse_layers
from fzero.models.configs import LlamaConfig
from fzero.models.cp_attention import Attention, attend_with_cache, project_attention, queries_keys_values
from fzero.models.forward import token_loss
from fzero.models.layers import (
    DimSplit,
    add,
    add_and_norm,
    dropout,
    embed_tokens,
    enter_region,
    expect_divisible,
    norm,
    split_words,
    vocabulary_logits,
)
from fzero.models.tiled_linear import gated_mlp
from fzero.sharding import Mesh, Rules


class EndSizes(Protocol):
    """The part of a config that the embedding and the head use, whatever its family."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def dropout(self) -> float: ...
    @property
    def norm_eps(self) -> float: ...


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
OUT_BIAS_RULE = (r"/attn/b_o$", "[L/pp, D]")
SINKS_RULE = (r"/attn/sinks$", "[L/pp, H/tp]")
HEAD_NORM_RULE = (r"/attn/norm_[qk]/scale$", "[L/pp, K] +tp")  # whole on all ranks; each uses it for its own heads
WIDE_NORM_RULE = (r"/attn/norm_[qk]/scale$", "[L/pp, H/tp]")
SHARED_NORM_RULE = (r"/attn/norm_k/scale$", "[L/pp, G] +tp")
MLP_RULES = ((r"/mlp/w_(gate|up)$", "[L/pp, D, F/tp]"), (r"/mlp/w_down$", "[L/pp, F/tp, D]"))


def leaves_of(c: LlamaConfig, feed_forward: Callable[..., Leaves]) -> Leaves:
    """The leaves of a Llama; feed_forward(w, out_std) gives those of the feed-forward part."""
    layers, d, q, kv = c.n_layers, c.d_model, c.n_heads * c.key_dim, c.n_kv_heads * c.key_dim
    out_std = c.init_std / math.sqrt(2 * layers)

    def w(name: str, *shape: int, std: float = c.init_std) -> Leaves:
        return {f"blocks/{name}": ((layers, *shape), std)}

    def factors(name: str, *shape: int) -> Leaves:
        return {f"{name}/scale": (shape, 0.0, 0.0 if c.norm_offset else 1.0)}

    def norms(half: int) -> Leaves:
        names = {"in": (f"norm_{half}",), "out": (f"norm_{half}_out",), "both": (f"norm_{half}", f"norm_{half}_out")}
        return {k: leaf for name in names[c.norms] for k, leaf in factors(f"blocks/{name}", layers, d).items()}

    leaves: Leaves = {"embed/tokens": ((c.vocab_size, d), c.init_std), **norms(1)}
    leaves |= {**w("attn/w_q", d, q), **w("attn/w_k", d, kv), **w("attn/w_v", d, kv)}
    leaves |= w("attn/w_o", q, d, std=out_std)
    for name, size in (("q", q), ("k", kv), ("v", kv)) if c.qkv_bias else ():
        leaves |= w(f"attn/b_{name}", size, std=0.0)
    leaves |= w("attn/b_o", d, std=0.0) if c.out_bias else {}
    leaves |= w("attn/sinks", c.n_heads) if c.sinks else {}
    for name, size in (("q", q), ("k", kv)) if c.qk_norm else ():
        leaves |= factors(f"blocks/attn/norm_{name}", layers, size if c.wide_qk_norm else c.key_dim)
    leaves |= {**norms(2), **feed_forward(w, out_std), **factors("head/norm", d)}
    return leaves if c.tied else {**leaves, "head/w": ((c.vocab_size, d), c.init_std)}


def embed(c: EndSizes, params: Tree, batch: Batch, ctx: Ctx) -> Tensor:
    """Return the embeddings [B, T, D] of the tokens, with dropout."""
    return dropout(embed_tokens(params["embed"]["tokens"], batch, ctx, c.vocab_size), c.dropout, "embed", ctx)


def attention_of(c: LlamaConfig, kind: LayerKind) -> Attention:
    """How a layer of this kind attends."""
    theta, scaling = (c.rope_theta, c.rope_scaling) if kind.theta is None else (kind.theta, None)
    factor = scaling.score_factor if scaling is not None else 1.0
    return Attention(
        c.n_heads,
        c.n_kv_heads,
        kind.pattern,
        (c.key_dim, theta, scaling) if theta else None,
        c.norm_eps,
        c.wide_qk_norm,
        factor * (c.score_dim or c.key_dim) ** -0.5 if c.score_dim or factor != 1.0 else 0.0,
        c.score_cap,
    )


def in_layers(c: LlamaConfig, make: Callable[[Attention], Block]) -> Blocks:
    """The functions of the layers: one, or those of a period by kind."""
    kinds = parse_layers(c.pattern)
    blocks = {kind: make(attention_of(c, kind)) for kind in dict.fromkeys(kinds)}
    return blocks[kinds[0]] if len(blocks) == 1 else tuple(blocks[kind] for kind in kinds)


def norm_factors(c: LlamaConfig, p: Tree) -> Tree:
    """The parameters `p` with the factors of the norms as they are multiplied with."""

    def factor(name: str, leaf: Tensor) -> Tensor:
        return 1.0 + leaf.to(torch.promote_types(leaf.dtype, torch.float32)) if name.endswith("/scale") else leaf

    return pytree.map_named(factor, p) if c.norm_offset else p


def before_attention(
    c: LlamaConfig, attention: Attention, p: Tree, x: Tensor, ctx: Ctx
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of a block."""
    h = norm(p["norm_1"], x, c.norm_eps, ctx) if "norm_1" in p else x
    return queries_keys_values(p["attn"], h, ctx, attention)


def after_attention(c: LlamaConfig, p: Tree, x: Tensor, out: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """Return (x after the attention half of a block, the input of the feed-forward half)."""
    h = project_attention(p["attn"], out, ctx)
    if "norm_1_out" in p:
        h = norm(p["norm_1_out"], h, c.norm_eps, ctx)
    if "norm_2" in p:
        return add_and_norm(p["norm_2"], x, h, c.norm_eps, c.dropout, "attn", ctx)
    x = add(x, h, c.dropout, "attn", ctx)
    return x, x


def attend(c: LlamaConfig, attention: Attention, p: Tree, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """The two around attention."""
    q, k, v = before_attention(c, attention, p, x, ctx)
    return after_attention(c, p, x, attend_with_cache(q, k, v, ctx, attention, p["attn"].get("sinks")), ctx)


def features(c: EndSizes, params: Tree, x: Tensor, ctx: Ctx) -> Tensor:
    """Return the activations x [B, T, D] after the last block, normalised."""
    return norm(params["head"]["norm"], x, c.norm_eps, ctx)


def head_inputs(c: EndSizes, params: Tree, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """(normalised x [B, T, D] inside the head's tensor-parallel region, the head's w [V, D] or a part)."""
    w = params["embed"]["tokens"] if c.tied else params["head"]["w"]
    return enter_region(features(c, params, x, ctx), ctx, "head"), w


def logits(c: EndSizes, params: Tree, x: Tensor, ctx: Ctx, cap: float = 0.0) -> Tensor:
    """Return all logits [B, T, V] of the activations x [B, T, D] after the last block."""
    return vocabulary_logits(*head_inputs(c, params, x, ctx), ctx, c.vocab_size, cap)


def ends(c: EndSizes, main: Callable[[Any], Tensor] = lambda x: x) -> dict[str, Any]:
    """The fields of a Model that follow from its head."""
    return {
        "logits": lambda params, x, ctx: logits(c, params, main(x), ctx),
        "features": lambda params, x, ctx: features(c, params, main(x), ctx),
        "shared": ("embed/tokens",) if c.tied else (),
    }


def gated_leaves(w: Callable[..., Leaves], name: str, *shape: int, **out: float) -> Leaves:
    """The weights of a gated feed-forward part (..., D, F) by w(name, *shape)."""
    inner = {**w(f"{name}/w_gate", *shape), **w(f"{name}/w_up", *shape)}
    return {**inner, **w(f"{name}/w_down", *shape[:-2], shape[-1], shape[-2], **out)}


def rules(c: LlamaConfig, mesh: Mesh, feed_forward: Rules[str], hidden: DimSplit) -> Rules[str]:
    """The sharding rules on a mesh; raises ValueError if tp does not divide heads or hidden units."""
    expect_divisible(
        mesh,
        DimSplit("blocks/attn/w_q", 2, c.n_heads, "n_heads", "heads"),
        DimSplit("blocks/attn/w_k", 2, c.n_kv_heads, "n_kv_heads", "kv heads"),
        hidden,
        DimSplit("embed/tokens", 0, c.vocab_size, "vocab_size", "words"),
    )
    is_shared = c.n_kv_heads < mesh.tp.size
    shared = (
        *(SHARED_KV_RULES if is_shared else ()),
        *((SHARED_BIAS_RULE,) if is_shared and c.qkv_bias else ()),
        *((SHARED_NORM_RULE,) if is_shared and c.wide_qk_norm else ()),
    )
    of_norm = WIDE_NORM_RULE if c.wide_qk_norm else HEAD_NORM_RULE
    options = ((c.qkv_bias, BIAS_RULE), (c.out_bias, OUT_BIAS_RULE), (c.sinks, SINKS_RULE), (c.qk_norm, of_norm))
    flagged = tuple(rule for enabled, rule in options if enabled)
    of_head = () if c.tied else ((r"^head/w$", "[V/tp, D]"),)
    return split_words((*feed_forward, *shared, *flagged, *RULES, *of_head), mesh, c.vocab_size)


def llama(config: LlamaConfig) -> Model:
    """Return the Llama of these sizes, as a Model.

        each block: x = x + attn(rms_norm(x)),  x = x + (silu(h w_gate) * (h w_up)) w_down with h = rms_norm(x)

    Attention with RoPE and grouped query heads. The config's options change norms, activation, scores and logits, and
    let layers differ in pattern and RoPE. Heads, feed-forward units and vocabulary are split over tp, layers over
    pp.

    >>> from fzero import models
    >>> models.num_params(llama(LlamaConfig(vocab_size=32, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=32)))
    3376

    Ref: Touvron et al. 2023, "Llama 2", arXiv:2307.09288, section 2.2; Grattafiori et al. 2024, "The Llama 3 herd of
    models", arXiv:2407.21783, section 3.2.
    """
    c = config

    def mlp(w: Callable[..., Leaves], out_std: float) -> Leaves:
        return gated_leaves(w, "mlp", c.d_model, c.d_ff, std=out_std)

    def post_attention(p: Tree, x: Tensor, out: Tensor, ctx: Ctx) -> Tensor:
        x, h = after_attention(c, p, x, out, ctx)
        h = gated_mlp(p["mlp"], h, ctx, c.activation, c.mlp_tiles, c.mlp_tokens)
        if "norm_2_out" in p:
            h = norm(p["norm_2_out"], h, c.norm_eps, ctx)
        return add(x, h, c.dropout, "mlp", ctx)

    def block_of(attention: Attention) -> Block:
        layer = AttentionLayer(functools.partial(before_attention, c, attention), post_attention, attention)
        return lambda p, x, ctx: layer(norm_factors(c, p), x, ctx, c.layer_tokens)

    def embed_tokens_scaled(params: Tree, batch: Batch, ctx: Ctx) -> Tensor:
        x = embed(c, params, batch, ctx)
        # The factor is rounded to the dtype first, as in the published implementations.
        return x * torch.full((), c.d_model**0.5, dtype=x.dtype, device=x.device) if c.embed_scaled else x

    def last(params: Tree) -> Tree:
        return {**params, "head": norm_factors(c, params["head"])}

    def head(params: Tree, x: Tensor, batch: Batch, ctx: Ctx) -> Loss:
        return Loss(*token_loss(*head_inputs(c, last(params), x, ctx), batch, ctx, cap=c.logit_cap, words=c.vocab_size))

    return Model(
        config=c,
        init=functools.partial(make_tree, leaves_of(c, mlp)),
        embed=embed_tokens_scaled,
        block=in_layers(c, block_of),
        head=head,
        logits=lambda params, x, ctx: logits(c, last(params), x, ctx, c.logit_cap),
        rules=lambda mesh: rules(c, mesh, MLP_RULES, DimSplit("blocks/mlp/w_gate", 2, c.d_ff, "d_ff")),
        shared=("embed/tokens",) if c.tied else (),
        features=lambda params, x, ctx: features(c, last(params), x, ctx),
        traits=ModelTraits(linear=r"blocks/(attn|mlp)/w_\w+", splits=True),
    )
