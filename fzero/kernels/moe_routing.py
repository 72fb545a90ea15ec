"""Where the tokens of a mixture of experts go: top-k routing, and the rows of tokens grouped by expert.

`route` chooses each token's experts and weights. `group` numbers the rows of the chosen pairs (token, choice) so that
those of an expert are together; `moe_permute` copies tokens to these rows and back. Neither waits for the device, and
every sum has a fixed order.
Ref: Jiang et al. 2024,
"Mixtral of experts", section 2.1 (route); Gale et al. 2022, "MegaBlocks", arXiv:2211.15841, section 5.2 (group).

Shapes: N tokens, E experts, k choices of each token, M = N k rows; pair number n k + j is token n's choice j.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.kernels import tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.custom_operator import Fused, on_cuda, operator, tl, triton, triton_runs
from fzero.kernels.registry import Form, Op, asked_for, by_device
from fzero.kernels.rowwise import softmax_canonical, sum_in_order, supports

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_EXPERTS = 1024  # whose logits a program holds in registers
PAIRS = 64  # numbered by one program of `group`


def route_configs(width: int) -> list[tuning.Config]:
    """Block configurations for rows of `width` probabilities, a power of 2."""
    return [{"ROWS": max(1, elements // width), "num_warps": 4} for elements in (1024, 2048)]


def refuse_dtype(x: Tensor) -> str:
    """Why the kernels do not take the dtype of `x`, or "" if they do."""
    return "" if x.dtype in FLOATS else f"the dtype is {x.dtype}; it takes float32, bfloat16 or float16"


# ---- route -----------------------------------------------------------------------------------------------------------


def route_reference(logits: Tensor, top_k: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int64 [..., k], weights [..., k], probabilities [..., E]) of router logits [..., E]."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    probabilities = torch.softmax(wide, -1)
    ranked = wide.detach() if bias is None else probabilities.detach() + bias.to(wide.dtype)
    ids = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., :top_k]
    weights = torch.gather(probabilities, -1, ids)
    return ids, weights / weights.sum(-1, keepdim=True), probabilities


@triton.jit
def _route_forward(
    LOGITS, BIAS, WEIGHTS, PROBS, IDS, n, E, K,
    WIDTH: tl.constexpr, CHOICES: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # A program routes ROWS tokens, with all WIDTH columns of each in registers: E rounded up to a power of two.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col, choice = tl.arange(0, WIDTH)[None, :], tl.arange(0, CHOICES)[None, :]
    live = (row < n) & (col < E)
    x = tl.load(LOGITS + row * E + col, mask=live, other=float("-inf")).to(tl.float32)
    # Columns from E on are -inf, and have probability 0.
    p = tl.exp(x - tl.max(x, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    tl.store(PROBS + row * E + col, p, mask=live)
    # A bias moves the choice alone; the weights are those of p.
    if BIASED:
        x = p + tl.load(BIAS + col, mask=col < E, other=0.0)
    x = tl.where(x == x, x, float("inf"))  # NaN counts as infinity, so that each choice is a valid expert
    free = tl.broadcast_to(col < E, (ROWS, WIDTH))
    weights = tl.zeros((ROWS, CHOICES), tl.float32)
    ids = tl.zeros((ROWS, CHOICES), tl.int32)
    for k in range(K):
        best = tl.max(tl.where(free, x, float("-inf")), 1)[:, None]
        # Of equal ones the lowest number: the choice does not depend on the order in which a device compares.
        pick = tl.min(tl.where(free & (x == best), col, WIDTH), 1)[:, None]
        weights += tl.where(choice == k, tl.sum(tl.where(col == pick, p, 0.0), 1)[:, None], 0.0)
        ids += tl.where(choice == k, pick, 0)
        free = free & (col != pick)
    used = (row < n) & (choice < K)
    tl.store(WEIGHTS + row * K + choice, weights / tl.sum(weights, 1)[:, None], mask=used)
    tl.store(IDS + row * K + choice, ids.to(tl.int64), mask=used)


@triton.jit
def _route_backward(
    WEIGHTS,
    PROBS,
    IDS,
    DWEIGHTS,
    DPROBS,
    DLOGITS,
    n,
    E,
    K,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
):
    # The weights are the softmax of the chosen logits: both gradients are p (dp - sum p dp).
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col, choice = tl.arange(0, WIDTH)[None, :], tl.arange(0, CHOICES)[None, :]
    live, used = (row < n) & (col < E), (row < n) & (choice < K)
    p = tl.load(PROBS + row * E + col, mask=live, other=0.0)
    dp = tl.load(DPROBS + row * E + col, mask=live, other=0.0)
    dx = p * (dp - tl.sum(p * dp, 1)[:, None])
    w = tl.load(WEIGHTS + row * K + choice, mask=used, other=0.0)
    dw = tl.load(DWEIGHTS + row * K + choice, mask=used, other=0.0)
    # dw belongs to the chosen columns: added there choice by choice, since a token's choices differ.
    ids = tl.load(IDS + row * K + choice, mask=used, other=0).to(tl.int32)
    dw = w * (dw - tl.sum(w * dw, 1)[:, None])
    for k in range(K):
        pick = tl.sum(tl.where(choice == k, ids, 0), 1)[:, None]
        dx += tl.where(col == pick, tl.sum(tl.where(choice == k, dw, 0.0), 1)[:, None], 0.0)
    tl.store(DLOGITS + row * E + col, dx, mask=live)


def _launch_route(
    kernel: triton.JITFunction, tensors: tuple[Tensor, ...], n: int, experts: int, top_k: int, **constants: bool
) -> None:
    if n:
        width = triton.next_power_of_2(experts)
        sizes = {"WIDTH": width, "CHOICES": triton.next_power_of_2(top_k), **constants}
        grid = lambda config: (triton.cdiv(n, config["ROWS"]),)  # noqa: E731
        tuning.launch(
            kernel, grid, (*tensors, n, experts, top_k), route_configs(width), shape=(n, experts, top_k), **sizes
        )


def _empty_route(logits: Tensor, top_k: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    n, experts = logits.shape
    wide = functools.partial(logits.new_empty, dtype=torch.float32)
    return wide((n, top_k)), wide((n, experts)), logits.new_empty((n, top_k), dtype=torch.int64)


@operator("route_forward(Tensor logits, int top_k, Tensor? bias) -> (Tensor, Tensor, Tensor)", _empty_route)
def route_forward(logits: Tensor, top_k: int, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, probabilities, ids) of logits [N, E], with a float32 bias [E] or without, in one pass."""
    out = _empty_route(logits, top_k)
    n, experts = logits.shape
    logits = logits.contiguous()
    arguments = (logits, logits if bias is None else bias, *out)
    _launch_route(_route_forward, arguments, n, experts, top_k, BIASED=bias is not None)
    return out


@operator(
    "route_backward(Tensor weights, Tensor probabilities, Tensor ids, Tensor dweights, Tensor "
    "dprobabilities) -> Tensor",
    lambda weights, probabilities, *_: probabilities.new_empty(probabilities.shape),
)
def route_backward(
    weights: Tensor, probabilities: Tensor, ids: Tensor, dweights: Tensor, dprobabilities: Tensor
) -> Tensor:
    """The gradient by the logits, float32 [N, E]."""
    out = torch.empty_like(probabilities)
    arguments = (weights, probabilities, ids, dweights, dprobabilities)
    n, experts = probabilities.shape
    _launch_route(_route_backward, (*(t.contiguous() for t in arguments), out), n, experts, weights.shape[1])
    return out


def _route_triton(logits: Tensor, top_k: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    moves = None if bias is None else bias.detach().to(torch.float32).contiguous()
    fused = Fused(
        "route",
        forward=lambda x: route_forward(x, top_k, moves),
        backward=lambda saved, grads: (route_backward(*saved, *grads[:2]).to(logits.dtype),),
        results=3,
        select_saved=lambda tensors, outputs: outputs,
    )
    weights, probabilities, ids = (
        t.reshape(*logits.shape[:-1], t.shape[-1]) for t in fused(logits.reshape(-1, logits.shape[-1]))
    )
    return ids, weights, probabilities


def _route_canonical(logits: Tensor, top_k: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The reference with sums in one order, and an exp that does not depend on a number's place."""
    wide = logits.to(torch.float32)
    probabilities = softmax_canonical(wide)
    ranked = wide.detach() if bias is None else probabilities.detach() + bias.to(wide.dtype)
    ids = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[..., :top_k]
    weights = torch.gather(probabilities, -1, ids)
    return ids, weights / sum_in_order(weights), probabilities


def _route_supports(logits: Tensor, top_k: int, bias: Tensor | None = None) -> str:
    if logits.shape[-1] > MAX_EXPERTS:
        return f"there are {logits.shape[-1]} experts; it takes {MAX_EXPERTS} at most"
    return refuse_dtype(logits) or triton_runs(logits, *(() if bias is None else (bias,)))


_BY_TRITON = Form("triton", _route_triton, supports=_route_supports, prefers=lambda logits, *_: on_cuda(logits))
route = Op(
    "route",
    route_reference,
    _BY_TRITON,
    by_device(Form("canonical", _route_canonical, lambda logits, *_: supports(logits), asked_for), _BY_TRITON),
    flops=lambda logits, top_k, bias=None: (4 + 2 * top_k) * logits.numel(),
    bytes=lambda logits, top_k, bias=None: (
        logits.numel() * (logits.element_size() + 4) + logits.numel() // logits.shape[-1] * top_k * 12
    ),
)


# ---- group -----------------------------------------------------------------------------------------------------------


class Groups(NamedTuple):
    """Where the rows of M = N k pairs (token, choice) are."""

    order: Tensor  # int64 [M]: the pair of each row; an expert's rows are together, in order of their pairs
    inverse: Tensor  # int64 [M]: the row of each pair
    ends: Tensor  # int32 [E]: one past each expert's last row


def group_reference(ids: Tensor, experts: int) -> Groups:
    """The rows of ids int64 [..., k], numbers in [0, experts)."""
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    inverse = torch.zeros_like(order).scatter(0, order, torch.arange(len(flat), device=ids.device))
    ends = (flat[:, None] <= torch.arange(experts, device=ids.device)).sum(0).to(torch.int32)
    return Groups(order, inverse, ends)


@triton.jit
def _rank(IDS, RANK, COUNTS, m, E, PAIRS: tl.constexpr):
    # A program handles PAIRS pairs. rank: how many earlier pairs of this program chose the same expert. The last pair
    # of an expert (none after it) stores their number, rank + 1, in COUNTS[block, expert].
    block = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, PAIRS)
    pairs = block * PAIRS + lanes
    ids = tl.load(IDS + pairs, mask=pairs < m, other=-1)
    equal = ids[:, None] == ids[None, :]
    rank = tl.sum((equal & (lanes[None, :] < lanes[:, None])).to(tl.int32), 1)
    behind = tl.sum((equal & (lanes[None, :] > lanes[:, None])).to(tl.int32), 1)
    tl.store(RANK + pairs, rank, mask=pairs < m)
    tl.store(COUNTS + block * E + ids, rank + 1, mask=(pairs < m) & (behind == 0))


@triton.jit
def _scatter_rows(IDS, RANK, FIRST, ORDER, PLACE, m, blocks, PAIRS: tl.constexpr):
    # FIRST[expert, block] is the first row of this block's pairs that chose the expert; a pair's row is that plus its
    # rank.
    block = tl.program_id(0).to(tl.int64)
    pairs = block * PAIRS + tl.arange(0, PAIRS)
    ids = tl.load(IDS + pairs, mask=pairs < m, other=0)
    rows = tl.load(FIRST + ids * blocks + block, mask=pairs < m, other=0)
    rows += tl.load(RANK + pairs, mask=pairs < m, other=0)
    tl.store(PLACE + pairs, rows, mask=pairs < m)
    tl.store(ORDER + rows, pairs, mask=pairs < m)


def _empty_groups(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return ids.new_empty(ids.shape), ids.new_empty(ids.shape), ids.new_empty(experts, dtype=torch.int32)


@operator("group_rows(Tensor ids, int experts) -> (Tensor, Tensor, Tensor)", _empty_groups)
def group_rows(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order, inverse, ends) of ids int64 [M] by a counting sort."""
    m, blocks = len(ids), triton.cdiv(len(ids), PAIRS)
    order, inverse, ends = _empty_groups(ids, experts)
    if m == 0:
        return order, inverse, ends.zero_()
    ids, rank = ids.contiguous(), torch.empty(m, dtype=torch.int32, device=ids.device)
    counts = torch.zeros(blocks, experts, dtype=torch.int32, device=ids.device)
    _rank[(blocks,)](ids, rank, counts, m, experts, PAIRS=PAIRS, num_warps=4)
    counts = counts.t().reshape(-1)  # expert by expert
    sums = counts.cumsum(0)
    _scatter_rows[(blocks,)](ids, rank, sums - counts, order, inverse, m, blocks, PAIRS=PAIRS, num_warps=4)
    return order, inverse, sums[blocks - 1 :: blocks].to(torch.int32)


group = Op(
    "group",
    group_reference,
    Form(
        "triton",
        lambda ids, experts: Groups(*group_rows(ids.reshape(-1), experts)),
        supports=lambda ids, experts: triton_runs(ids),
        prefers=on_cuda,
    ),
    flops=lambda ids, experts: 0,
    bytes=lambda ids, experts: 24 * ids.numel() + 4 * experts,
)


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    types = "IDS:*i64 E:i32 K:i32"
    for experts, top_k, biased in ((8, 2, False), (64, 8, False), (256, 8, True), (1024, 8, False)):
        constants = {"WIDTH": experts, "CHOICES": top_k}
        for config in route_configs(experts):
            label, checks = f"{top_k} of {experts} {config['ROWS']}", {"aligned": ("E",)}
            # The k numbers of a row beside the E are few and narrow.
            forward = constants | {"BIASED": biased}
            yield build(_route_forward, label, config, forward, types, "*fp32", wide=experts > 8, **checks)
            yield build(_route_backward, label, config, constants, types, "*fp32", wide=False, **checks)
    types = "RANK:*i32 COUNTS:*i32 E:i32"
    for kernel in (_rank, _scatter_rows):  # single numbers everywhere
        yield build(kernel, "", {"num_warps": 4}, {"PAIRS": PAIRS}, types, "*i64", wide=False)
