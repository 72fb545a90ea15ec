"""Attention under a block mask by the blocks that are seen: in PyTorch, on a CPU, and by Triton's kernels.

Shapes as in attention.py; documents int [B, T], for as many queries as keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero.kernels.attention_arguments import Scoring, attend_by, widened
from fzero.kernels.attention_masked_triton import masked_backward, masked_forward
from fzero.kernels.block_mask import BlockMask

MAX_SCORES = 1 << 20  # of a step of the blocked form, or those of one block of queries


# ---- by the blocks that are seen, in PyTorch ------------------------------------------------------------------------


class BlockRows(NamedTuple):
    """Rows, blocks of queries of a head each, and the blocks of keys that each sees."""

    rows: Tensor  # int64 [R], head * N + block
    keys: Tensor  # int64 [R c], group * M + block; 0 beyond those that a row has
    query: Tensor  # int64 [R, block], positions
    key: Tensor  # int64 [R, c block], positions, -1 beyond

    def mask(self, t: int, s: int, causal: bool, documents: Tensor | None) -> Tensor:
        """bool [1 or B, R, block, c block]."""
        pair_mask = ((self.key >= 0) & (self.key < s))[:, None, :]
        if causal:
            pair_mask = pair_mask & (self.key[:, None, :] <= self.query[:, :, None])
        if documents is None:
            return pair_mask.expand(-1, self.query.shape[1], -1)[None]
        query_documents = documents[:, self.query.clamp(max=t - 1)]
        key_documents = documents[:, self.key.clamp(0, s - 1)]
        return pair_mask & (query_documents[..., :, None] == key_documents[..., None, :])


def _steps(mask: BlockMask, b: int, heads: int, groups: int, device: torch.device) -> Iterator[BlockRows]:
    """The rows that see anything, those with like numbers of keys together."""
    _, n, m = mask.blocks.shape
    blocks = np.broadcast_to(mask.blocks, (heads, n, m)).reshape(heads * n, m)
    counts, inside = blocks.sum(-1), np.arange(mask.block)
    order = np.argsort(counts, kind="stable")[(counts == 0).sum() :]
    max_blocks = max(1, MAX_SCORES // (b * mask.block**2))  # blocks of a step
    while len(order):
        widths = counts[order[:max_blocks]]
        fits = max(1, int((widths * np.arange(1, len(widths) + 1) <= max_blocks).sum()))
        rows, order = order[:fits], order[fits:]
        width = int(counts[rows[-1]])
        first = np.argsort(~blocks[rows], -1, kind="stable")[:, :width]  # those seen, in order
        real = np.arange(width) < counts[rows, None]
        keys = np.where(real, rows[:, None] // n // (heads // groups) * m + first, 0)
        query = (rows % n)[:, None] * mask.block + inside
        key = np.where(real[..., None], first[..., None] * mask.block + inside, -1)
        arrays = rows, keys.reshape(-1), query, key.reshape(fits, -1)
        yield BlockRows(*(torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in arrays))


def _by_block(x: Tensor, block: int) -> Tensor:
    """x [B, T, H, K] as [B, H N, block, K], zeros after the end."""
    b, t, h, _ = x.shape
    x = torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, -t % block))
    return x.reshape(b, h * (x.shape[2] // block), block, -1)


def _by_position(x: Tensor, t: int, heads: int) -> Tensor:
    """The inverse of `_by_block`."""
    x = x.reshape(x.shape[0], heads, -1, x.shape[-1])[:, :, :t]
    return x.transpose(1, 2)


def _chosen(x: Tensor, step: BlockRows) -> Tensor:
    """The blocks of keys that the rows of a step see: [B, R, c block, K]."""
    return x.index_select(1, step.keys).reshape(x.shape[0], len(step.rows), -1, x.shape[-1])


def _in_order(parts: list[Tensor], steps: list[BlockRows], rows: int, like: Tensor, fill: float) -> Tensor:
    """The parts [B, R, ...] of all steps in the order of the rows, else `fill`."""
    out = like.new_full((like.shape[0], rows, *like.shape[2:]), fill, dtype=parts[0].dtype if parts else like.dtype)
    return out.index_copy(1, torch.cat([x.rows for x in steps]), torch.cat(parts, 1)) if parts else out


def _scores(q: Tensor, k: Tensor, step: BlockRows, pair_mask: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(scores [B, R, block, c block] in float32 or wider, the rows of q, the chosen keys)."""
    rows, keys = q.index_select(1, step.rows), _chosen(k, step)
    scores = torch.matmul(widened(rows), widened(keys).transpose(2, 3)) * scale
    return scores.masked_fill(~pair_mask, float("-inf")), rows, keys


def _blocked_forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, K], log-sum-exp [B, H, T] in float32 or wider)."""
    (b, t, heads, _), (s, groups) = q.shape, k.shape[1:3]
    wide, steps, outs, lses = torch.promote_types(q.dtype, torch.float32), [], [], []
    q, k, v = (_by_block(x, mask.block) for x in (q, k, v))
    for step in _steps(mask, b, heads, groups, q.device):
        scores, _, _ = _scores(q, k, step, step.mask(t, s, mask.causal, documents), scale)
        top = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - torch.where(top == float("-inf"), 0.0, top))
        total = p.sum(-1, keepdim=True)
        out = torch.matmul(p.to(v.dtype), _chosen(v, step)) / torch.where(total > 0.0, total, 1.0)
        outs.append(out.to(q.dtype))
        lses.append(top + torch.log(total))  # of nothing -inf
        steps.append(step)
    out = _in_order(outs, steps, q.shape[1], q, 0.0)
    lse = _in_order(lses, steps, q.shape[1], q.new_empty((b, 0, mask.block, 1), dtype=wide), float("-inf"))
    return _by_position(out, t, heads).contiguous(), _by_position(lse, t, heads)[..., 0].transpose(1, 2).contiguous()


def _blocked_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    lse: Tensor,
    g: Tensor,
    mask: BlockMask,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    (b, t, heads, _), (s, groups), dtype = q.shape, k.shape[1:3], q.dtype
    lse = _by_block(torch.where(lse == float("-inf"), 0.0, lse).transpose(1, 2)[..., None], mask.block)
    q, k, v, g = (_by_block(x, mask.block) for x in (q, k, v, g))
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    steps, dqs = [], []
    for step in _steps(mask, b, heads, groups, q.device):
        scores, rows, keys = _scores(q, k, step, step.mask(t, s, mask.causal, documents), scale)
        p, grad = torch.exp(scores - lse.index_select(1, step.rows)), g.index_select(1, step.rows)
        weighed = p * torch.matmul(widened(grad), widened(_chosen(v, step)).transpose(2, 3))
        # From the products themselves, as rows are whole: the gradient of a query with one key is then exactly 0.
        ds = torch.addcmul(weighed, p, weighed.sum(-1, keepdim=True), value=-1.0) * scale
        for total, weights, x in ((dv, p.to(dtype), grad), (dk, ds, widened(rows))):
            block_sums = torch.matmul(weights.transpose(2, 3), x).reshape(b, -1, *total.shape[2:])
            total.index_add_(1, step.keys, block_sums.to(total.dtype))
        dqs.append(torch.matmul(ds, widened(keys)).to(dtype))
        steps.append(step)
    dq = _by_position(_in_order(dqs, steps, q.shape[1], q, 0.0), t, heads)
    return dq, _by_position(dk, s, groups).to(dtype), _by_position(dv, s, groups).to(dtype)


def attend_by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    *,
    documents: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`attention.reference` by the blocks that are seen, each block of queries by those of its keys alone."""
    scale = Scoring.of_call(q, scale=scale).scale

    def forward(q: Tensor, k: Tensor, v: Tensor, *documents: Tensor) -> tuple[Tensor, Tensor]:
        return _blocked_forward(q, k, v, _first(documents), mask, scale)

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v, *documents, _out, lse = saved
        return _blocked_backward(q, k, v, _first(documents), lse, grads[0], mask, scale)

    return attend_by("masked attention", forward, backward, (q, k, v, *_optional(documents)))


def _optional(documents: Tensor | None) -> tuple[Tensor, ...]:
    return () if documents is None else (documents,)


def _first(documents: Sequence[Tensor]) -> Tensor | None:
    return documents[0] if documents else None


# ---- by Triton's kernels --------------------------------------------------------------------------------------------


def attend_by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    *,
    documents: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`attention.reference` by the kernels of attention_masked_triton.py."""
    arguments = (mask.unit, mask.causal, Scoring.of_call(q, scale=scale).scale)
    # Rows of the lists of a head, 0 where all heads have the same.
    head_rows, key_head_rows = (n * mask.block // mask.unit * (len(mask.blocks) > 1) for n in mask.blocks.shape[1:])

    def forward(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        *documents, starts, units, _, _ = tensors
        return masked_forward(q, k, v, _first(documents), starts, units, head_rows, *arguments)

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v, *documents, starts, units, key_starts, key_units, out, lse = saved
        lists = starts, units, head_rows, key_starts, key_units, key_head_rows
        return masked_backward(*grads, q, k, v, out, lse, _first(documents), *lists, *arguments)

    return attend_by("masked attention", forward, backward, (q, k, v, *_optional(documents), *mask.lists(q)))
