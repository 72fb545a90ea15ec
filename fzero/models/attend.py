"""Attention of a layer's queries on its keys and values, where a rank has whole sequences and where cp splits them.

Over cp a rank has the queries, keys and values of its own tokens, and a form brings together what must meet:

gather: the keys and values of all ranks are gathered, in the order of the sequence, and each block of queries works on
the keys up to its end. It is the definition: static, and it composes with every transform.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.comm.collectives import all_gather
from fzero.kernels.attention import Pattern, attention
from fzero.models.base import Ctx


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, ctx: Ctx, **scores: float) -> Tensor:
    """Attention of q [B, T, H, K] on k and v [B, S, G, K] as [B, T, H, K]; over cp of this rank's T / cp tokens each.

    scores: `scale` and `cap` of `kernels.attention`, where they are not its own.
    Communicates over cp: the keys and values as its form says.
    """
    if ctx.pieces:
        return gathered_attention(q, k, v, pattern, ctx, **scores)
    documents = None if isinstance(ctx.documents, tuple) else ctx.documents
    return attention(q, k, v, pattern=pattern, documents=documents, impl=ctx.kernels["attention"], **scores)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, ctx: Ctx, **scores: float) -> Tensor:
    """`attend` over cp by the keys and values of all ranks.

    Communicates over cp: an all_gather of keys and values, (cp - 1) / cp 2 B T G K elements from each rank; in the
    backward pass as much.
    """
    assert ctx.pieces  # attend looks
    cp, size = ctx.mesh["cp"], k.shape[-1]
    whole = all_gather(torch.cat((k, v), -1), cp, 1, leaf="blocks/attn/kv")
    if not ctx.pieces.contiguous:
        whole = whole.index_select(1, ctx.pieces.order(whole.shape[1], q.device))
    k, v = whole.split([size, whole.shape[-1] - size], -1)
    out, at = [], 0
    for first, number in ctx.pieces.ranges(cp.rank, whole.shape[1]):
        end = first + number  # the queries are the last of the keys that they may see
        documents = None if isinstance(ctx.documents, tuple) else ctx.documents[:, :end]
        own = q[:, at : at + number]
        options = {"pattern": pattern, "documents": documents, "impl": ctx.kernels["attention"], **scores}
        out.append(attention(own, k[:, :end], v[:, :end], **options))
        at += number
    return torch.cat(out, 1) if len(out) > 1 else out[0]
