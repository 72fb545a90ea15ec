"""DeepSeek-V3: latent attention, and experts chosen by sigmoid scores after a few dense layers.

Ref: DeepSeek-AI 2024, "DeepSeek-V3 technical report", arXiv:2412.19437, section 2.1.

A second head that predicts the token after the next one, from the last activations and the next token's embedding.

    x' = M [norm(x_i); norm(E(t_{i+1}))],   then one layer,   then the model's own head, behind a norm of its own
    loss = sum_i CE(t_{i+1}) + lambda sum_i CE'(t_{i+2})

Both sums are divided by the number of tokens of the first, as all losses are. A position counts in the second sum if
the next one counts in the first, as much as that one does, and lies in the same document. The layer is a stack of its
own, `blocks_mtp`, and what comes before it a join (see models.base.Model), so that it is sharded, recomputed and cut
into stages like any other.

Ref: DeepSeek-AI 2024, "DeepSeek-V3 technical report", arXiv:2412.19437, section 2.2, of depth 1.
Shapes: x [B, T, D], targets [B, T].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from fzero.core.pytree import Tree
from fzero.kernels.attention_pattern import Pattern
from fzero.kernels.cross_entropy import counted_tokens
from fzero.kernels.rope import rope_frequencies, rope_qk
from fzero.kernels.rowwise import sigmoid, sum_in_order
from fzero.models.base import Ctx, Leaves, Loss, Model, ModelTraits, make_tree, ones
from fzero.models.batch import Batch
from fzero.models.configs import DeepSeekConfig
from fzero.models.cp_attention import attend, attend_pages, full_attention
from fzero.models.experts import (
    ENTROPY,
    LOAD,
    MOE_BIAS_RULE,
    MOE_RULES,
    Counts,
    ExpertMixture,
    balance_by_bias,
    count,
    enter_routing,
    mixture,
    no_counts,
    tables,
)
from fzero.models.forward import token_loss
from fzero.models.layers import (
    DimSplit,
    add,
    add_and_norm,
    enter_region,
    exit_region,
    expect_divisible,
    linear,
    norm,
    positions_of,
    row_parallel_linear,
    split_words,
)
from fzero.models.llama import MLP_RULES, embed, ends, gated_leaves, head_inputs
from fzero.models.tiled_linear import gated_mlp, gated_product
from fzero.models.weights import WeightInParts
from fzero.sharding import Mesh, Rules

MTP_STACK, MTP_JOIN = "blocks_mtp", "join_mtp"
MTP_RULES = ((rf"^({MTP_JOIN}/norm_|head/norm_mtp/)", "[D]"), (rf"^{MTP_JOIN}/w$", "[D, D]"))


def mtp_leaves(c: Any) -> Leaves:
    """The leaves of the join: two norms, and M [2 D, D]."""
    d = c.d_model
    return {**ones(f"{MTP_JOIN}/norm_x", d), **ones(f"{MTP_JOIN}/norm_e", d), f"{MTP_JOIN}/w": ((2 * d, d), c.init_std)}


def join_mtp(c: Any, params: Tree, state: Tree, batch: Batch, ctx: Ctx) -> Tree:
    """The activations with "main", those of the model itself, and x of the layer that follows."""
    p, following = params[MTP_JOIN], batch.get("targets", batch["tokens"]).clamp_min(0)
    e = embed(c, params, {**batch, "tokens": following}, ctx)
    normed = norm(p["norm_x"], state["x"], c.norm_eps, ctx), norm(p["norm_e"], e, c.norm_eps, ctx)
    return {**state, "main": state["x"], "x": linear(torch.cat(normed, -1), p["w"], ctx=ctx._replace(matmul=""))}


def mtp_loss(c: Any, params: Tree, x: Tensor, batch: Batch, ctx: Ctx) -> Tensor:
    """The cross entropy of the tokens after the next ones, summed over the positions that count."""
    mtp_params = {**params, "head": {**params["head"], "norm": params["head"]["norm_mtp"]}}
    return token_loss(*head_inputs(c, mtp_params, x, ctx), shifted_batch(batch), ctx, words=c.vocab_size)[0]


def mtp_model(model: Model) -> Model:
    """The second head as a model of one layer: batch["tokens"] are those that follow each position, whose last
    activations [B, T, D] are batch["hidden"]; logits are of the tokens after them."""

    def logits(params: Tree, state: Tree, ctx: Ctx) -> Tensor:
        head = {**params["head"], "norm": params["head"]["norm_mtp"]}
        return model.logits({**params, "head": head}, {"x": state["x"]}, ctx)

    def embed(params: Tree, batch: Batch, ctx: Ctx) -> Tree:
        return {**model.embed(params, batch, ctx), "x": batch["hidden"]}

    return model._replace(embed=embed, logits=logits)


def shifted_batch(batch: Batch) -> Batch:
    """The batch whose targets are the next position's, where those count and are of the same document."""
    targets = batch["targets"]
    counts = counted_tokens(targets, batch.get("mask"))[:, 1:]
    if "documents" in batch:
        counts = counts * (batch["documents"][:, 1:] == batch["documents"][:, :-1])
    last = targets.new_zeros(len(targets), 1)
    return {
        **batch,
        "targets": torch.cat((targets[:, 1:], last), 1),
        "mask": torch.cat((counts, last.to(counts.dtype)), 1),
    }


RULES = (
    (r"^embed/tokens$", "[V/tp, D]"),
    (r"/attn/w_(q|q_b|kv_b)$", "[L/pp, R, H/tp]"),
    (r"/attn/w_o$", "[L/pp, H/tp, D]"),
    (r"/attn/w_(q|kv)_a$", "[L/pp, D, R]"),
    (r"/attn/norm_(q|kv)/scale$", "[L/pp, R]"),
    MOE_BIAS_RULE,
    (r"^blocks_\w+/norm_", "[L/pp, D]"),
    (r"^head/norm/", "[D]"),
)
SHARED_RULES = ((r"/shared/w_(gate|up)$", "[L/pp, D, F/tp]"), (r"/shared/w_down$", "[L/pp, F/tp, D]"))


def _leaves(c: DeepSeekConfig) -> Leaves:
    def stack(name: str, layers: int, feed_forward: Callable[..., Leaves]) -> Leaves:
        def w(leaf: str, *shape: int, std: float = c.init_std) -> Leaves:
            return {f"{name}/{leaf}": ((layers, *shape), std)}

        d, queries = c.d_model, c.n_heads * c.key_dim
        leaves = ones(f"{name}/norm_1", layers, d)
        if c.q_rank:
            leaves |= {**w("attn/w_q_a", d, c.q_rank), **ones(f"{name}/attn/norm_q", layers, c.q_rank)}
        leaves |= w("attn/w_q_b", c.q_rank, queries) if c.q_rank else w("attn/w_q", d, queries)
        leaves |= {**w("attn/w_kv_a", d, c.kv_rank + c.rope_dim), **ones(f"{name}/attn/norm_kv", layers, c.kv_rank)}
        leaves |= w("attn/w_kv_b", c.kv_rank, c.n_heads * (c.nope_dim + c.value_dim))
        leaves |= w("attn/w_o", c.n_heads * c.value_dim, d)
        return {**leaves, **ones(f"{name}/norm_2", layers, d), **feed_forward(w)}

    def dense(w: Callable[..., Leaves]) -> Leaves:
        return gated_leaves(w, "mlp", c.d_model, c.d_ff)

    def routed(w: Callable[..., Leaves]) -> Leaves:
        e, d, f = c.n_experts, c.d_model, c.d_expert
        leaves = {**w("moe/router", d, e), **w("moe/bias", e, std=0.0), **gated_leaves(w, "moe", e, d, f)}
        return leaves | (gated_leaves(w, "shared", d, c.n_shared * f) if c.n_shared else {})

    leaves: Leaves = {"embed/tokens": ((c.vocab_size, c.d_model), c.init_std)}
    leaves |= stack("blocks_dense", c.n_dense, dense) if c.n_dense else {}
    leaves |= {**stack("blocks_experts", c.n_layers - c.n_dense, routed), **ones("head/norm", c.d_model)}
    if c.n_mtp:
        leaves |= {**mtp_leaves(c), **stack(MTP_STACK, 1, routed), **ones("head/norm_mtp", c.d_model)}
    return leaves if c.tied else {**leaves, "head/w": ((c.vocab_size, c.d_model), c.init_std)}


def latent_attention(c: DeepSeekConfig, p: Tree, x: Tensor, ctx: Ctx) -> Tensor:
    """Self-attention of x [B, T, D] whose queries, keys and values are projected from latents."""
    tp = ctx.mesh.tp
    low = norm(p["norm_q"], linear(x, p["w_q_a"], ctx=ctx), c.norm_eps, ctx) if c.q_rank else x
    latent, turned = linear(x, p["w_kv_a"], ctx=ctx).split([c.kv_rank, c.rope_dim], -1)
    latent = norm(p["norm_kv"], latent, c.norm_eps, ctx)
    if tp.size > 1:  # one collective for the three
        sizes = [low.shape[-1], c.kv_rank, c.rope_dim]
        low, latent, turned = enter_region(torch.cat((low, latent, turned), -1), ctx, "blocks/attn").split(sizes, -1)
    heads = c.n_heads // tp.size
    q = rearrange(linear(low, p["w_q_b" if c.q_rank else "w_q"], ctx=ctx), "b t (h k) -> b t h k", h=heads)
    positions = positions_of(q, ctx)
    angles = rope_frequencies(c.rope_dim, c.rope_theta, c.rope_scaling, x.device, x.dtype)
    q_turned, turned = rope_qk(
        q[..., c.nope_dim :].contiguous(),
        turned[:, :, None].contiguous(),
        positions,
        angles,
        layout="interleaved",
        impl=ctx.kernels["rope_qk"],
    )
    q = torch.cat((q[..., : c.nope_dim], q_turned), -1)
    if not ctx.cache:
        k, v = keys_values(c, p, latent, turned, ctx)
        out = attend(q, k, v, Pattern.parse(c.pattern), ctx, **score_options(c))[..., : c.value_dim]
    else:
        ctx.cache.write(torch.cat((latent[:, :, None], turned), -1))
        out = attend_latents(c, p, q, ctx)
    return row_parallel_linear(rearrange(out, "b t h k -> b t (h k)"), p["w_o"], ctx, "blocks/attn")


def score_options(c: DeepSeekConfig) -> dict[str, float]:
    """The scale of attention's scores where it is not the usual one."""
    factor = c.rope_scaling.score_factor if c.rope_scaling is not None else 1.0
    return {} if factor == 1.0 else {"scale": factor * c.key_dim**-0.5}


def keys_values(c: DeepSeekConfig, p: Tree, latent: Tensor, turned: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """k and v [B, S, H, nope + rope] of latents [B, S, R] and turned keys [B, S, 1, rope]; v is padded."""
    kv = linear(latent, p["w_kv_b"], ctx=ctx).unflatten(-1, (c.n_heads // ctx.mesh.tp.size, -1))
    k = torch.cat((kv[..., : c.nope_dim], turned.expand(*kv.shape[:3], c.rope_dim)), -1)
    # Forms of attention take values of the keys' size.
    return k, torch.nn.functional.pad(kv[..., c.nope_dim :], (0, c.key_dim - c.value_dim))


def attend_latents(c: DeepSeekConfig, p: Tree, q: Tensor, ctx: Ctx) -> Tensor:
    """Attention of q [1, N, H, nope + rope] on the pages of latents of ctx.cache, as [1, N, H, value]."""
    assert ctx.cache and isinstance(ctx.tokens.positions, Tensor)  # which a step gives
    pattern = Pattern.parse(c.pattern)
    if ctx.kernels.default == "canonical":  # the sums of training, over keys and values
        out = q.new_zeros((*q.shape[:3], c.value_dim))
        for span, (entries,) in ctx.cache.rows(ctx.tokens.positions):
            latent, turned = entries.to(q.dtype).split([c.kv_rank, c.rope_dim], -1)
            k, v = keys_values(c, p, latent[:, :, 0], turned, ctx)
            out[:, span] = full_attention(q[:, span], k, v, pattern, ctx, **score_options(c))[..., : c.value_dim]
        return out
    # q . (W_k latent) = (W_k^T q) . latent, and likewise for values, so that the latents serve as keys and as values of
    # one head that all queries share: section 2.1.2 of DeepSeek-V2, arXiv:2405.04434.
    w = p["w_kv_b"].to(q.dtype)
    w = (w.dense() if isinstance(w, WeightInParts) else w).unflatten(-1, (q.shape[2], -1))
    by_latent = torch.einsum("bthn,rhn->bthr", q[..., : c.nope_dim], w[..., : c.nope_dim])
    pages, scores = ctx.cache.pages[0], {"scale": c.key_dim**-0.5, **score_options(c)}
    queries = torch.cat((by_latent, q[..., c.nope_dim :]), -1)
    out = attend_pages(queries, pages, pages[..., : c.kv_rank], pattern, ctx, **scores)
    return torch.einsum("bthr,rhv->bthv", out, w[..., c.nope_dim :])


def choose_experts(c: DeepSeekConfig, p: Tree, h: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int64 [..., k], weights [..., k] that sum to routed_scale, scores [..., E]) of h [..., D]."""
    wide = torch.promote_types(h.dtype, torch.float32)
    router = linear(h.to(wide), p["router"], ctx=ctx._replace(matmul=""))
    scores = sigmoid(router, impl=ctx.kernels["sigmoid"])
    biased = (scores + p["bias"].to(wide)).detach().unflatten(-1, (c.n_groups, -1))
    best = _largest(biased.sort(-1, descending=True).values[..., :2].sum(-1), c.top_groups)
    selected = (best[..., None] == torch.arange(c.n_groups, device=h.device)).any(-2)
    ids = _largest(torch.where(selected[..., None], biased, -torch.inf).flatten(-2), c.top_k)
    weights = torch.gather(scores, -1, ids)
    total = sum_in_order(weights) if ctx.kernels.canonical else weights.sum(-1, keepdim=True)
    return ids, c.routed_scale * weights / (total + 1e-20), scores


def _largest(x: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest along the last dim; of equal ones the lower comes first."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :count]


def deepseek(config: DeepSeekConfig) -> Model:
    """Return the DeepSeek-V3 of these sizes, as a Model of two stacks: "blocks_dense" and "blocks_experts".

    The activations are a tree: x, and the balance loss and the routing counts of each sequence. The loss reports
    cross_entropy and balance in `extra`. The bias of the router is a leaf that no gradient moves, but the counts of a
    step (see `routing.balance_by_bias`). With n_mtp a third stack, "blocks_mtp", and "mtp" in `extra`: see `join_mtp`.
    Heads, units and vocabulary are split over tp, experts over ep, layers over pp.

    >>> sizes = {"d_model": 16, "n_layers": 2, "n_dense": 1, "n_heads": 2, "q_rank": 8, "kv_rank": 4, "d_ff": 32}
    >>> more = {"n_experts": 4, "n_groups": 2, "top_groups": 1, "top_k": 2, "d_expert": 8}
    >>> model = deepseek(DeepSeekConfig(vocab_size=32, **sizes, **more))
    >>> model.init(lambda name, shape, std, mean=0.0: shape)["blocks_experts"]["moe"]["w_gate"]
    (1, 4, 16, 8)

    Ref: DeepSeek-AI 2024, "DeepSeek-V3 technical report", arXiv:2412.19437, section 2.1.
    """
    c, layers = config, config.n_layers - config.n_dense

    def embed_with_balance(params: Tree, batch: Batch, ctx: Ctx) -> Tree:
        x = embed(c, params, batch, ctx)
        counts = no_counts(x, layers + c.n_mtp, c.n_experts, ctx)
        return {"x": x, "balance": counts["entropy"][:, 0].clone(), **counts}

    def attend(p: Tree, x: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
        h = latent_attention(c, p["attn"], norm(p["norm_1"], x, c.norm_eps, ctx), ctx)
        return add_and_norm(p["norm_2"], x, h, c.norm_eps, c.dropout, "attn", ctx)

    def dense(p: Tree, state: Tree, ctx: Ctx) -> Tree:
        x, h = attend(p, state["x"], ctx)
        return {**state, "x": add(x, gated_mlp(p["mlp"], h, ctx), c.dropout, "mlp", ctx)}

    def routed(p: Tree, state: Tree, ctx: Ctx) -> Tree:
        x, h = attend(p, state["x"], ctx)
        ids, weights, scores = choose_experts(c, p["moe"], h, ctx)
        counts, (load, share) = count(state, ids, scores / scores.sum(-1, keepdim=True), c.n_dense, ctx)
        balance = (c.n_experts / c.top_k) * (load * share).sum(-1)
        h, ids, weights = enter_region(h, ctx, "blocks/moe"), *enter_routing(ids, weights, ctx)
        shared = functools.partial(gated_product, p["shared"], h, ctx) if c.n_shared else None
        out = mixture(p["moe"], h, ids, weights, ctx, ExpertMixture(c.n_experts), shared)
        x = add(x, exit_region(out, ctx, "blocks/moe"), c.dropout, "mlp", ctx)
        return {**state, "x": x, "balance": state["balance"] + balance, **counts}

    def head(params: Tree, state: Tree, batch: Batch, ctx: Ctx) -> Loss:
        total, num_tokens, by_source = token_loss(
            *head_inputs(c, params, main(state), ctx), batch, ctx, words=c.vocab_size
        )
        weight = counted_tokens(batch["targets"], batch.get("mask")).sum(1).to(state["balance"].dtype)
        balance = (state["balance"] * weight).sum()
        extra = {"cross_entropy": total, "balance": balance, **by_source}
        counts = {n: state[n] for n in (LOAD, ENTROPY)}
        total, sums = total + c.balance_coef * balance, tables("blocks_experts", rows(counts, 0, layers))
        if c.n_mtp:
            extra["mtp"] = mtp_loss(c, params, state["x"], batch, ctx)
            total, sums = total + c.mtp_coef * extra["mtp"], sums | tables(MTP_STACK, rows(counts, layers, layers + 1))
        return Loss(total, num_tokens, extra, sums)

    head_fields: dict[str, Any] = ends(c, main) | ({"shared": ("embed/tokens",)} if c.n_mtp else {})
    return Model(
        config=c,
        init=functools.partial(make_tree, _leaves(c)),
        embed=embed_with_balance,
        block={
            **({"blocks_dense": dense} if c.n_dense else {}),
            "blocks_experts": routed,
            **({MTP_STACK: routed} if c.n_mtp else {}),
        },
        join={MTP_STACK: functools.partial(join_mtp, c)} if c.n_mtp else {},
        head=head,
        rules=lambda mesh: _rules(c, mesh),
        traits=ModelTraits(
            linear=r"blocks_\w+/(attn|mlp|shared)/w_\w+",
            leaf_rules=balance_by_bias("blocks_experts", c.bias_rate)
            | (balance_by_bias(MTP_STACK, c.bias_rate) if c.n_mtp else {}),
            splits=not c.n_mtp,  # which looks at the next position
        ),
        **head_fields,
    )


def main(state: Tree) -> Tensor:
    """The last activations of the model itself, before those of a layer that predicts a second token."""
    return state.get("main", state["x"])


def rows(counts: Counts, first: int, end: int) -> Counts:
    """The counts of the layers [first, end)."""
    return {name: x[:, first:end] for name, x in counts.items()}


def _rules(c: DeepSeekConfig, mesh: Mesh) -> Rules[str]:
    expect_divisible(
        mesh,
        DimSplit("blocks_experts/attn/w_kv_b", 2, c.n_heads, "n_heads", "heads"),
        DimSplit("blocks_dense/mlp/w_gate", 2, c.d_ff, "d_ff"),
        DimSplit("blocks_experts/moe/w_gate", 3, c.d_expert, "d_expert"),
        DimSplit("embed/tokens", 0, c.vocab_size, "vocab_size", "words"),
    )
    flagged = (*(MLP_RULES if c.n_dense else ()), *(SHARED_RULES if c.n_shared else ()))
    of_head = () if c.tied else ((r"^head/w$", "[V/tp, D]"),)
    rules = (*flagged, *(MTP_RULES if c.n_mtp else ()), *MOE_RULES, *RULES, *of_head)
    return split_words(rules, mesh, c.vocab_size)
