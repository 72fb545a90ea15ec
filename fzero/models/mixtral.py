"""Mixtral: a Llama whose feed-forward part is a mixture of experts (Jiang et al. 2024, "Mixtral of experts", section
2). With a few options the families that are variations of it: Qwen3-MoE, and gpt-oss (OpenAI 2025, "gpt-oss-120b &
gpt-oss-20b model card", section 2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fzero.core.pytree import Tree
from fzero.kernels import moe as moe_kernels
from fzero.kernels.cross_entropy import counted_tokens
from fzero.models.base import Ctx, Leaves, Loss, Model, ModelTraits, make_tree
from fzero.models.batch import Batch
from fzero.models.configs import MoEConfig
from fzero.models.cp_attention import Attention
from fzero.models.experts import (
    EXPERT_BIAS_RULES,
    MOE_BIAS_RULE,
    MOE_RULES,
    ExpertMixture,
    balance_by_bias,
    count,
    enter_routing,
    mixture,
    no_counts,
    positions_of_batch,
    tables,
)
from fzero.models.forward import token_loss
from fzero.models.layers import DimSplit, add, enter_region, exit_region, linear
from fzero.models.llama import attend, embed, ends, gated_leaves, head_inputs, in_layers, leaves_of, rules


def mixtral(config: MoEConfig) -> Model:
    """Return the Mixtral of these sizes, as a Model.

    A block routes each token to top_k experts: out = sum over them of weight_e expert_e(h). The activations are a tree:
    x, and the routing statistics of each sequence, summed over layers. The loss reports cross_entropy, balance and
    router_z in `extra`. Experts are split over ep, their units over tp, layers over pp.

    >>> model = mixtral(MoEConfig(vocab_size=32, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=32, n_experts=2))
    >>> model.init(lambda name, shape, std, mean=0.0: shape)["blocks"]["moe"]["w_gate"]
    (1, 2, 16, 32)

    Ref: Jiang et al. 2024, "Mixtral of experts", arXiv:2401.04088, section 2.
    """
    c = config
    by_bias, mixture_options = c.balance == "bias", ExpertMixture(c.n_experts, c.capacity_factor, c.activation)

    def moe(w: Callable[..., Leaves], out_std: float) -> Leaves:
        e, d, f = c.n_experts, c.d_model, c.d_ff
        leaves = {**w("moe/router", d, e), **(w("moe/bias", e, std=0.0) if by_bias else {})}
        sizes = {"router": (e,), "gate": (e, f), "up": (e, f), "down": (e, d)} if c.expert_bias else {}
        for name, shape in sizes.items():
            leaves |= w(f"moe/b_{name}", *shape, std=0.0)
        return {**leaves, **gated_leaves(w, "moe", e, d, f, std=out_std)}

    def embed_with_statistics(params: Tree, batch: Batch, ctx: Ctx) -> Tree:
        x = embed(c, params, batch, ctx)
        counts = no_counts(x, c.n_layers, c.n_experts, ctx)
        return {"x": x, **counts, "prob": counts["load"][:, 0].clone(), "z": counts["entropy"][:, 0].clone()}

    def block(attention: Attention, p: Tree, state: Tree, ctx: Ctx) -> Tree:
        x, h = attend(c, attention, p, state["x"], ctx)
        router = linear(h, p["moe"]["router"], p["moe"].get("b_router"), ctx._replace(matmul="")).to(state["z"].dtype)
        bias = (p["moe"]["bias"],) if by_bias else ()
        ids, weights, probabilities = moe_kernels.route(router, c.top_k, *bias, impl=ctx.kernels["route"])
        weights = weights if c.norm_top_k else torch.gather(probabilities, -1, ids)
        z = torch.logsumexp(router, -1, keepdim=True) ** 2
        counts, (_, prob, z) = count(state, ids, probabilities, 0, ctx, z)
        h, ids, weights = enter_region(h, ctx, "blocks/moe"), *enter_routing(ids, weights, ctx)
        out = mixture(p["moe"], h, ids, weights, ctx, mixture_options)
        return {
            "x": add(x, exit_region(out, ctx, "blocks/moe"), c.dropout, "mlp", ctx),
            **counts,
            "prob": state["prob"] + prob,
            "z": state["z"] + z[:, 0],
        }

    def head(params: Tree, state: Tree, batch: Batch, ctx: Ctx) -> Loss:
        inputs = head_inputs(c, params, state["x"], ctx)
        total, num_tokens, by_source = token_loss(*inputs, batch, ctx, words=c.vocab_size)
        z: Tensor = state["z"]
        weight = counted_tokens(batch["targets"], batch.get("mask")).sum(1).to(z.dtype)
        positions = positions_of_batch(batch, ctx)
        load = state["load"].sum(1) / positions
        balance = (c.n_experts * (load * state["prob"]).sum(-1) / c.n_layers**2 * weight).sum()
        z = (z / c.n_layers * weight).sum()
        extra = {"cross_entropy": total, "balance": balance, "router_z": z, **by_source}
        total = total + (0.0 if by_bias else c.balance_coef) * balance + c.z_coef * z
        capacity = (
            moe_kernels.capacity_of(c.capacity_factor, positions, c.top_k, c.n_experts) if c.capacity_factor else 0
        )
        return Loss(total, num_tokens, extra, tables("blocks", state, capacity))

    own_rules = (*MOE_RULES, *((MOE_BIAS_RULE,) if by_bias else ()), *(EXPERT_BIAS_RULES if c.expert_bias else ()))
    return Model(
        config=c,
        init=functools.partial(make_tree, leaves_of(c, moe)),
        embed=embed_with_statistics,
        block=in_layers(c, lambda attention: functools.partial(block, attention)),
        head=head,
        rules=lambda mesh: rules(c, mesh, own_rules, DimSplit("blocks/moe/w_gate", 3, c.d_ff, "d_ff")),
        traits=ModelTraits(
            linear=r"blocks/attn/w_\w+",
            leaf_rules=balance_by_bias("blocks", c.bias_rate) if by_bias else {},
            splits=not c.capacity_factor,  # whose places are those of one rank's tokens
        ),
        **ends(c, lambda state: state["x"]),
    )
