"""Where the tokens of a mixture of experts go: top-k routing, and rows of tokens grouped by expert.

`route` chooses each token's experts and weights. `group` numbers the rows of the chosen pairs (token, choice) so that
those of an expert are together; `permute` copies tokens to their rows, and `unpermute` sums the rows of a token with
its weights. None of them waits for the device, and every sum has a fixed order.
Ref: Jiang et al. 2024,
"Mixtral of experts", section 2.1 (route); Gale et al. 2022, "MegaBlocks", arXiv:2211.15841, section 5.2 (group).

Shapes: N tokens of D, E experts, k choices of each token, M = N k rows; pair number n k + j is token n's choice j.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.kernels import tuning
from fzero.kernels.aot import Build
from fzero.kernels.op_function import Fused, on_cuda, operator, triton_runs
from fzero.kernels.optional_triton import tl, triton
from fzero.kernels.registry import Form, Op

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_EXPERTS = 1024
PAIRS = 64  # numbered by one program of `group`
ROW_CONFIGS = [{"BLOCK": block, "num_warps": warps} for block, warps in ((1024, 4), (512, 2), (2048, 8))]


def route_configs(width: int) -> list[tuning.Config]:
    """Block configurations for rows of `width` probabilities, a power of 2."""
    return [{"ROWS": max(1, elements // width), "num_warps": 4} for elements in (1024, 2048)]


def _refuse_dtype(x: Tensor) -> str:
    return "" if x.dtype in FLOATS else f"the dtype is {x.dtype}; it takes float32, bfloat16 or float16"


# ---- route -----------------------------------------------------------------------------------------------------------


def route_reference(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids int64 [..., k], weights [..., k] that sum to 1, probabilities [..., E]) of router logits [..., E], in
    float32 or wider.

    The largest logit first; of equal ones that with the lower number.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ids = torch.sort(wide.detach(), dim=-1, descending=True, stable=True).indices[..., :top_k]
    probabilities = torch.softmax(wide, -1)
    weights = torch.gather(probabilities, -1, ids)
    return ids, weights / weights.sum(-1, keepdim=True), probabilities


@triton.jit
def _route_forward(
    LOGITS, WEIGHTS, PROBS, IDS, n, E, K, WIDTH: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col, choice = tl.arange(0, WIDTH)[None, :], tl.arange(0, CHOICES)[None, :]
    live = (row < n) & (col < E)
    x = tl.load(LOGITS + row * E + col, mask=live, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None]
    tl.store(PROBS + row * E + col, p, mask=live)
    x = tl.where(x == x, x, float("inf"))  # NaN counts as infinity, so that each choice is a valid expert
    free = tl.broadcast_to(col < E, (ROWS, WIDTH))
    weights = tl.zeros((ROWS, CHOICES), tl.float32)
    ids = tl.zeros((ROWS, CHOICES), tl.int32)
    for k in range(K):
        best = tl.max(tl.where(free, x, float("-inf")), 1)[:, None]
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
    ids = tl.load(IDS + row * K + choice, mask=used, other=0).to(tl.int32)
    dw = w * (dw - tl.sum(w * dw, 1)[:, None])
    for k in range(K):
        pick = tl.sum(tl.where(choice == k, ids, 0), 1)[:, None]
        dx += tl.where(col == pick, tl.sum(tl.where(choice == k, dw, 0.0), 1)[:, None], 0.0)
    tl.store(DLOGITS + row * E + col, dx, mask=live)


def _launch_route(kernel: triton.JITFunction, tensors: tuple[Tensor, ...], n: int, experts: int, top_k: int) -> None:
    if n:
        width = triton.next_power_of_2(experts)
        sizes = {"WIDTH": width, "CHOICES": triton.next_power_of_2(top_k)}
        grid = lambda config: (triton.cdiv(n, config["ROWS"]),)  # noqa: E731
        tuning.launch(
            kernel, grid, (*tensors, n, experts, top_k), route_configs(width), shape=(n, experts, top_k), **sizes
        )


def _empty_route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    n, experts = logits.shape
    wide = functools.partial(logits.new_empty, dtype=torch.float32)
    return wide((n, top_k)), wide((n, experts)), logits.new_empty((n, top_k), dtype=torch.int64)


@operator("route_forward(Tensor logits, int top_k) -> (Tensor, Tensor, Tensor)", _empty_route)
def route_forward(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, probabilities, ids) of logits [N, E], in one pass over them."""
    out = _empty_route(logits, top_k)
    n, experts = logits.shape
    _launch_route(_route_forward, (logits.contiguous(), *out), n, experts, top_k)
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
    given = (weights, probabilities, ids, dweights, dprobabilities)
    n, experts = probabilities.shape
    _launch_route(_route_backward, (*(t.contiguous() for t in given), out), n, experts, weights.shape[1])
    return out


def _route_triton(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    fused = Fused(
        "route",
        forward=lambda x: route_forward(x, top_k),
        backward=lambda saved, grads: (route_backward(*saved, *grads[:2]).to(logits.dtype),),
        results=3,
        keep=lambda tensors, outputs: outputs,
    )
    weights, probabilities, ids = (
        t.reshape(*logits.shape[:-1], t.shape[-1]) for t in fused(logits.reshape(-1, logits.shape[-1]))
    )
    return ids, weights, probabilities


def _route_supports(logits: Tensor, top_k: int) -> str:
    if logits.shape[-1] > MAX_EXPERTS:
        return f"there are {logits.shape[-1]} experts; it takes {MAX_EXPERTS} at most"
    return _refuse_dtype(logits) or triton_runs(logits)


route = Op(
    "route",
    route_reference,
    Form("triton", _route_triton, supports=_route_supports, prefers=on_cuda),
    flops=lambda logits, top_k: (4 + 2 * top_k) * logits.numel(),
    bytes=lambda logits, top_k: (
        logits.numel() * (logits.element_size() + 4) + logits.numel() // logits.shape[-1] * top_k * 12
    ),
)


# ---- group -----------------------------------------------------------------------------------------------------------


class Groups(NamedTuple):
    """Where the rows of M = N k pairs (token, choice) are, pair number n k + j being token n's choice j."""

    order: Tensor  # int64 [M]: the pair of each row; an expert's rows are together, in order of their pairs
    place: Tensor  # int64 [M]: the row of each pair
    ends: Tensor  # int32 [E]: one past each expert's last row


def group_reference(ids: Tensor, experts: int) -> Groups:
    """The rows of ids int64 [..., k], numbers in [0, experts)."""
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    place = torch.zeros_like(order).scatter(0, order, torch.arange(len(flat), device=ids.device))
    ends = (flat[:, None] <= torch.arange(experts, device=ids.device)).sum(0).to(torch.int32)
    return Groups(order, place, ends)


@triton.jit
def _rank(IDS, RANK, COUNTS, m, E, PAIRS: tl.constexpr):
    # A program handles PAIRS pairs. rank: how many earlier pairs of this program chose the same expert. The last pair
    # of an expert (none after it) stores their number, rank + 1, in COUNTS[block, expert].
    block = tl.program_id(0).to(tl.int64)
    here = tl.arange(0, PAIRS)
    at = block * PAIRS + here
    ids = tl.load(IDS + at, mask=at < m, other=-1)
    same = ids[:, None] == ids[None, :]
    rank = tl.sum((same & (here[None, :] < here[:, None])).to(tl.int32), 1)
    behind = tl.sum((same & (here[None, :] > here[:, None])).to(tl.int32), 1)
    tl.store(RANK + at, rank, mask=at < m)
    tl.store(COUNTS + block * E + ids, rank + 1, mask=(at < m) & (behind == 0))


@triton.jit
def _place(IDS, RANK, FIRST, ORDER, PLACE, m, blocks, PAIRS: tl.constexpr):
    # FIRST[expert, block] is the first row of this block's pairs that chose the expert; a pair's row is that plus its
    # rank.
    block = tl.program_id(0).to(tl.int64)
    at = block * PAIRS + tl.arange(0, PAIRS)
    ids = tl.load(IDS + at, mask=at < m, other=0)
    place = tl.load(FIRST + ids * blocks + block, mask=at < m, other=0) + tl.load(RANK + at, mask=at < m, other=0)
    tl.store(PLACE + at, place, mask=at < m)
    tl.store(ORDER + place, at, mask=at < m)


def _empty_groups(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return ids.new_empty(ids.shape), ids.new_empty(ids.shape), ids.new_empty(experts, dtype=torch.int32)


@operator("group_rows(Tensor ids, int experts) -> (Tensor, Tensor, Tensor)", _empty_groups)
def group_rows(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (order, place, ends) of ids int64 [M] by a counting sort: count per expert and block of pairs, running
    sum, places.
    """
    m, blocks = len(ids), triton.cdiv(len(ids), PAIRS)
    order, place, ends = _empty_groups(ids, experts)
    if m == 0:
        return order, place, ends.zero_()
    ids, rank = ids.contiguous(), torch.empty(m, dtype=torch.int32, device=ids.device)
    counts = torch.zeros(blocks, experts, dtype=torch.int32, device=ids.device)
    _rank[(blocks,)](ids, rank, counts, m, experts, PAIRS=PAIRS, num_warps=4)
    counts = counts.t().reshape(-1)  # expert by expert
    sums = counts.cumsum(0)
    _place[(blocks,)](ids, rank, sums - counts, order, place, m, blocks, PAIRS=PAIRS, num_warps=4)
    return order, place, sums[blocks - 1 :: blocks].to(torch.int32)


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


# ---- permute, unpermute ----------------------------------------------------------------------------------------------


def permute_reference(x: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """Rows [M, D]: row r is the token of x [N, D] that pair order[r] belongs to."""
    return x[order // (len(order) // max(1, len(x)))]


def unpermute_reference(y: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """sum_j weights[n, j] y[place[n k + j]]: [N, D] of rows y [M, D], in y's dtype."""
    rows = y[place].reshape(*weights.shape, y.shape[-1])
    return (rows * weights[..., None].to(y.dtype)).sum(-2)


@triton.jit
def _spread(X, PLACE, OUT, D, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + token * D + col, mask=col < D)
    for k in tl.static_range(K):
        row = tl.load(PLACE + token * K + k)
        tl.store(OUT + row * D + col, x, mask=col < D)


@triton.jit
def _collect(Y, WEIGHTS, PLACE, OUT, D, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(PLACE + token * K + k)
        y = tl.load(Y + row * D + col, mask=col < D, other=0.0).to(tl.float32)
        if WEIGHTED:
            y = y * tl.load(WEIGHTS + token * K + k).to(tl.float32)
        total += y
    tl.store(OUT + token * D + col, total.to(OUT.dtype.element_ty), mask=col < D)


@triton.jit
def _collect_backward(Y, WEIGHTS, PLACE, G, DY, DWEIGHTS, D, K: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(PLACE + pair)
    w = tl.load(WEIGHTS + pair).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        g = tl.load(G + pair // K * D + col, mask=col < D, other=0.0).to(tl.float32)
        y = tl.load(Y + row * D + col, mask=col < D, other=0.0).to(tl.float32)
        tl.store(DY + row * D + col, (g * w).to(DY.dtype.element_ty), mask=col < D)
        dw += y * g
    tl.store(DWEIGHTS + pair, tl.sum(dw, 0).to(DWEIGHTS.dtype.element_ty))


def _launch_rows(
    kernel: triton.JITFunction,
    tensors: tuple[Tensor, ...],
    programs: int,
    d: int,
    k: int,
    loops: bool,
    **constants: Any,
):
    """Launch `programs` programs; unless each loops over the d columns itself, one for each block of columns."""

    def grid(config: tuning.Config) -> tuple[int, ...]:
        return (programs,) if loops else (programs, triton.cdiv(d, config["BLOCK"]))

    if programs and d:
        shape = (programs, k, d, tensors[0].dtype)
        tuning.launch(kernel, grid, (*tensors, d), ROW_CONFIGS, shape=shape, K=k, **constants)


@operator("permute_rows(Tensor x, Tensor place) -> Tensor", lambda x, place: x.new_empty(len(place), x.shape[1]))
def permute_rows(x: Tensor, place: Tensor) -> Tensor:
    """The rows [M, D] of tokens x [N, D], each token read once."""
    out = x.new_empty(len(place), x.shape[1])
    n, d = x.shape
    _launch_rows(_spread, (x.contiguous(), place.contiguous(), out), n, d, len(place) // max(1, n), loops=False)
    return out


@operator(
    "unpermute_rows(Tensor y, Tensor? weights, Tensor place, int k) -> Tensor",
    lambda y, weights, place, k: y.new_empty(len(place) // k, y.shape[1]),
)
def unpermute_rows(y: Tensor, weights: Tensor | None, place: Tensor, k: int) -> Tensor:
    """The sum [N, D] of each token's k rows of y [M, D], weighted if weights [N, k] are given."""
    out = y.new_empty(len(place) // k, y.shape[1])
    weighted = weights is not None
    given = (y.contiguous(), weights.contiguous() if weighted else y, place.contiguous(), out)
    n, d = out.shape
    _launch_rows(_collect, given, n, d, k, loops=False, WEIGHTED=weighted)
    return out


@operator(
    "unpermute_rows_backward(Tensor y, Tensor weights, Tensor place, Tensor g) -> (Tensor, Tensor)",
    lambda y, weights, place, g: (y.new_empty(y.shape), weights.new_empty(weights.shape)),
)
def unpermute_rows_backward(y: Tensor, weights: Tensor, place: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients by y and weights for the gradient g [N, D] of the weighted sum."""
    dy, dw = y.new_empty(y.shape), weights.new_zeros(weights.shape)
    given = (y.contiguous(), weights.contiguous(), place.contiguous(), g.contiguous(), dy, dw)
    m, d = y.shape
    _launch_rows(_collect_backward, given, m, d, weights.shape[1], loops=True)
    return dy, dw


def _choices(x: Tensor, order: Tensor) -> int:
    """k, of tokens x [N, D] and the M rows' pairs."""
    return len(order) // len(x) if len(x) else 1


def _sum_rows(y: Tensor, place: Tensor, k: int, weights: Tensor | None = None) -> Tensor:
    """Sum each token's k rows of y, [N, D], by k gathers, which needs no atomic addition."""
    parts = [y.index_select(0, rows) for rows in place.reshape(-1, k).unbind(1)]
    if weights is not None:
        parts = [part * w[:, None].to(y.dtype) for part, w in zip(parts, weights.unbind(1))]
    return functools.reduce(torch.add, parts)


def _sum_rows_backward(y: Tensor, weights: Tensor, order: Tensor, place: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    k = weights.shape[1]
    dy = g.index_select(0, order // k) * weights.reshape(-1)[order][:, None].to(y.dtype)
    dw = [(y.index_select(0, rows) * g).sum(-1, dtype=weights.dtype) for rows in place.reshape(-1, k).unbind(1)]
    return dy, torch.stack(dw, 1)


def _permute_gather(x: Tensor, order: Tensor, place: Tensor) -> Tensor:
    k = _choices(x, order)
    fused = Fused(
        "permute",
        forward=lambda x, order, place: (x.index_select(0, order // k),),
        backward=lambda saved, grads: (_sum_rows(grads[0], saved[2], k),),
    )
    return fused(x, order, place)


def _permute_triton(x: Tensor, order: Tensor, place: Tensor) -> Tensor:
    k = _choices(x, order)
    fused = Fused(
        "permute",
        forward=lambda x, place: (permute_rows(x, place),),
        backward=lambda saved, grads: (unpermute_rows(grads[0], None, saved[1], k),),
    )
    return fused(x, place)


_unpermute_gather = Fused(
    "unpermute",
    forward=lambda y, weights, order, place: (_sum_rows(y, place, weights.shape[1], weights),),
    backward=lambda saved, grads: _sum_rows_backward(*saved, *grads),
)


def _unpermute_triton(y: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
    fused = Fused(
        "unpermute",
        forward=lambda y, weights, place: (unpermute_rows(y, weights, place, weights.shape[1]),),
        backward=lambda saved, grads: unpermute_rows_backward(*saved, *grads),
    )
    return fused(y, weights, place)


permute = Op(
    "permute",
    permute_reference,
    Form("triton", _permute_triton, supports=lambda x, *at: _refuse_dtype(x) or triton_runs(x, *at), prefers=on_cuda),
    Form("gather", _permute_gather),
    flops=lambda x, order, place: 0,
    bytes=lambda x, order, place: (x.numel() + len(order) * x.shape[1]) * x.element_size() + 8 * len(order),
)
unpermute = Op(
    "unpermute",
    unpermute_reference,
    Form(
        "triton",
        _unpermute_triton,
        supports=lambda y, w, *at: _refuse_dtype(y) or _refuse_dtype(w) or triton_runs(y, w, *at),
        prefers=on_cuda,
    ),
    Form("gather", _unpermute_gather),
    flops=lambda y, weights, order, place: 2 * y.numel(),
    bytes=lambda y, weights, order, place: (y.numel() + len(weights) * y.shape[1]) * y.element_size() + 12 * len(order),
)


def builds() -> Iterator[Build]:
    """The builds for `aot`."""

    def signature(pointers: str, sizes: str, constants: str) -> dict[str, str]:
        typed = dict(part.split(":") for part in pointers.split())
        named = {name: f"*{kind}" for name, kind in typed.items()}
        return named | dict.fromkeys(sizes.split(), "i32") | dict.fromkeys(constants.split(), "constexpr")

    for experts, top_k in ((8, 2), (64, 8), (1024, 8)):
        constants = {"WIDTH": experts, "CHOICES": top_k}
        for config in route_configs(experts):
            forward = signature("LOGITS:fp32 WEIGHTS:fp32 PROBS:fp32 IDS:i64", "n E K", "WIDTH CHOICES ROWS")
            backward = signature(
                "WEIGHTS:fp32 PROBS:fp32 IDS:i64 DWEIGHTS:fp32 DPROBS:fp32 DLOGITS:fp32", "n E K", "WIDTH CHOICES ROWS"
            )
            label = f"{top_k} of {experts} {config['ROWS']}"
            # The k numbers of a row beside the E are few and narrow.
            yield Build(
                f"_route_forward {label}",
                "_route_forward",
                forward,
                constants,
                config,
                aligned=("E",),
                wide=experts > 8,
            )
            yield Build(
                f"_route_backward {label}", "_route_backward", backward, constants, config, aligned=("E",), wide=False
            )
    # Single numbers everywhere here, and in `_collect` two of them beside each wide access.
    pairs = (
        signature("IDS:i64 RANK:i32 COUNTS:i32", "m E", "PAIRS"),
        signature("IDS:i64 RANK:i32 FIRST:i64 ORDER:i64 PLACE:i64", "m blocks", "PAIRS"),
    )
    yield Build("_rank", "_rank", pairs[0], {"PAIRS": PAIRS}, {"num_warps": 4}, wide=False)
    yield Build("_place", "_place", pairs[1], {"PAIRS": PAIRS}, {"num_warps": 4}, wide=False)
    for config, top_k in (*((config, 2) for config in ROW_CONFIGS), (ROW_CONFIGS[0], 8)):
        label, constants = f"{top_k} {config['BLOCK']}", {"K": top_k}
        spread = signature("X:bf16 PLACE:i64 OUT:bf16", "D", "K BLOCK")
        collect = signature("Y:bf16 WEIGHTS:fp32 PLACE:i64 OUT:bf16", "D", "K WEIGHTED BLOCK")
        backward = signature("Y:bf16 WEIGHTS:fp32 PLACE:i64 G:bf16 DY:bf16 DWEIGHTS:fp32", "D", "K BLOCK")
        yield Build(f"_spread {label}", "_spread", spread, constants, config, aligned=("D",))
        yield Build(
            f"_collect {label}", "_collect", collect, constants | {"WEIGHTED": True}, config, aligned=("D",), wide=False
        )
        yield Build(f"_collect_backward {label}", "_collect_backward", backward, constants, config, aligned=("D",))
