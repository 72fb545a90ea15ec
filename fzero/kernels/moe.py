"""Mixture of experts: top-k routing, and the experts' SwiGLU with every token kept (dropless) or with room for a fixed number (capacity).

    out[n] = sum_k weight[n, k] expert_{id[n, k]}(x[n]),   weight = the top-k of softmax(x w_router), divided by their sum

Ref: Jiang et al. 2024, "Mixtral of experts", section 2.1; Lepikhin et al. 2020, "GShard", algorithm 1 (capacity).
Shapes: x [B, T, D], ids int64 and weights [B, T, k], w_gate and w_up [E, D, F], w_down [E, F, D].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.autodiff import first_order
from fzero.pytree import Tree


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int64 [..., k], weights [..., k] that sum to 1, probabilities [..., E]) of router logits [..., E], in float32 or wider."""
    probabilities = torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    weights, ids = torch.topk(probabilities, top_k, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True), probabilities


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Rows of x [N, D] times their group's w [E, D, F]: group e is rows ends[e - 1] to ends[e] (int32 [E], rising to N).

    torch._grouped_mm where it serves (float32 and bfloat16, D and F multiples of 16 bytes, differentiated at most once); elsewhere
    every group times every row, masked: exact, and E times the work.
    """
    aligned = all(size * x.element_size() % 16 == 0 for size in w.shape[1:])
    if first_order() and aligned and x.dtype in (torch.float32, torch.bfloat16):
        return torch._grouped_mm(x, w, offs=ends)
    group = (torch.arange(x.shape[0], device=x.device)[:, None] >= ends[None, :]).sum(-1)
    return sum(torch.where((group == e)[:, None], x @ w[e], 0.0) for e in range(w.shape[0]))


def _swiglu(p: Tree, x: Tensor, ends: Tensor) -> Tensor:
    w_gate, w_up, w_down = (p[n].to(x.dtype) for n in ("w_gate", "w_up", "w_down"))
    return grouped_mm(F.silu(grouped_mm(x, w_gate, ends)) * grouped_mm(x, w_up, ends), w_down, ends)


def dropless(p: Tree, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Every token goes to its k experts: rows sorted by expert, three grouped products, rows put back and summed."""
    k, experts = ids.shape[-1], p["w_gate"].shape[0]
    rows = x.reshape(-1, x.shape[-1])
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = (flat[:, None] <= torch.arange(experts, device=x.device)).sum(0).to(torch.int32)
    y = _swiglu(p, rows[order // k], ends)[torch.argsort(order)]
    return (y.reshape(*ids.shape, -1) * weights[..., None].to(y.dtype)).sum(-2)


def capacity(p: Tree, x: Tensor, ids: Tensor, weights: Tensor, factor: float) -> Tensor:
    """An expert takes at most C = ceil(factor T k / E) tokens of a sequence, first choices first, then in order of position.

    What finds no room contributes nothing (the residual carries it on). Groups are sequences, so that a batch may be split anyhow.
    """
    b, t, d = x.shape
    k, experts = ids.shape[-1], p["w_gate"].shape[0]
    room = math.ceil(factor * t * k / experts)
    choice = ids.transpose(1, 2).reshape(b, k * t)  # all first choices, then all second ones
    taken = (choice[..., None] == torch.arange(experts, device=x.device)).to(torch.int64)
    place = ((taken.cumsum(1) - 1) * taken).sum(-1)
    kept = place < room
    slot = torch.where(kept, choice * room + place, experts * room)  # the last slot takes what is dropped
    sent = x.repeat(1, k, 1)
    inbox = torch.zeros(b, experts * room + 1, d, dtype=x.dtype, device=x.device)
    inbox = inbox.scatter(1, slot[..., None].expand(b, k * t, d), sent)[:, :-1].reshape(b, experts, room, d)
    w_gate, w_up, w_down = (p[n].to(x.dtype) for n in ("w_gate", "w_up", "w_down"))
    hidden = F.silu(torch.einsum("becd,edf->becf", inbox, w_gate)) * torch.einsum("becd,edf->becf", inbox, w_up)
    y = torch.einsum("becf,efd->becd", hidden, w_down).reshape(b, experts * room, d)
    back = torch.gather(y, 1, slot.clamp(max=experts * room - 1)[..., None].expand(b, k * t, d))
    share = (weights.transpose(1, 2).reshape(b, k * t) * kept)[..., None].to(y.dtype)
    return (back * share).reshape(b, k, t, d).sum(1)
