"""A second head that predicts the token after the next one, from the last activations and the next token's embedding.

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

from typing import Any

import torch
from torch import Tensor

from fzero.core.pytree import Tree
from fzero.kernels.cross_entropy import counted_tokens
from fzero.models.base import Ctx, MakeLeaf
from fzero.models.batch import Batch
from fzero.models.forward import token_loss
from fzero.models.layers import linear, norm
from fzero.models.llama import embed, head_inputs

STACK, JOIN = "blocks_mtp", "join_mtp"
MTP_RULES = ((rf"^({JOIN}/norm_|head/norm_mtp/)", "[D]"), (rf"^{JOIN}/w$", "[D, D]"))


def leaves(c: Any, make: MakeLeaf) -> Tree:
    """The leaves of the join: two norms, and M [2 D, D]."""
    d = c.d_model
    norms = {name: {"scale": make(f"{JOIN}/{name}/scale", (d,), 0.0, 1.0)} for name in ("norm_x", "norm_e")}
    return {**norms, "w": make(f"{JOIN}/w", (2 * d, d), c.init_std)}


def join(c: Any, params: Tree, state: Tree, batch: Batch, ctx: Ctx) -> Tree:
    """The activations with "main", those of the model itself, and x of the layer that follows.

    When sampling there are no next tokens, and nobody uses what this layer makes of others.
    """
    p, following = params[JOIN], batch.get("targets", batch["tokens"]).clamp_min(0)
    e = embed(c, params, {**batch, "tokens": following}, ctx)
    normed = norm(p["norm_x"], state["x"], c.norm_eps, ctx), norm(p["norm_e"], e, c.norm_eps, ctx)
    return {**state, "main": state["x"], "x": linear(torch.cat(normed, -1), p["w"])}


def loss(c: Any, params: Tree, x: Tensor, batch: Batch, ctx: Ctx) -> Tensor:
    """The cross entropy of the tokens after the next ones, summed over the positions that count."""
    mtp_params = {**params, "head": {**params["head"], "norm": params["head"]["norm_mtp"]}}
    return token_loss(*head_inputs(c, mtp_params, x, ctx), second(batch), ctx, words=c.vocab_size)[0]


def second(batch: Batch) -> Batch:
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
