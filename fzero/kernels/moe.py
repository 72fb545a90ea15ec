"""Mixture of experts: the experts' gated MLPs, dropless (every token is computed) or with a capacity per expert.

    out[n] = sum_k weight[n, k] expert_{id[n, k]}(x[n])
    weight = the top-k of softmax(x w_router), divided by their sum

Dropless: the tokens' rows are grouped by expert (see moe_routing and moe_permute), and `grouped_mm` multiplies each
group by its expert's weights.
Ref: Jiang et al. 2024, "Mixtral of experts", section 2.1; Gale et al. 2022, "MegaBlocks",
arXiv:2211.15841, section 4 (no token is dropped); Lepikhin et al. 2020, "GShard", algorithm 1 (capacity).

Shapes: x [B, T, D], ids int64 and weights [B, T, k], w_gate and w_up [E, D, F], w_down [E, F, D]; where the products
have biases b_gate and b_up [E, F], b_down [E, D].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.core import graph_passes, torch_private
from fzero.core.device import kind_of, target_of
from fzero.core.pytree import Tree
from fzero.kernels import rowwise, tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.custom_operator import INTERPRETED, Fused, on_cuda, operator, rows_run, tl, triton, triton_runs
from fzero.kernels.glu import swiglu
from fzero.kernels.linear import linear_product
from fzero.kernels.moe_float8 import float8_grouped_mm, group_of_tile
from fzero.kernels.moe_permute import permute, unpermute
from fzero.kernels.moe_routing import group, route
from fzero.kernels.registry import AUTO, Form, Kernels, Op, asked_for

__all__ = ["capacity", "dropless", "feed_forward", "group", "grouped_mm", "permute", "route", "unpermute"]


HALF_CONFIGS, FLOAT_CONFIGS = tuning.ConfigTable("_grouped_mm half"), tuning.ConfigTable("_grouped_mm float32")


# ---- grouped_mm ------------------------------------------------------------------------------------------------------


def grouped_mm_reference(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows of x [M, D] by their group's w [E, D, F]: the definition, E times the work."""
    of_row = (torch.arange(x.shape[0], device=x.device)[:, None] >= ends[None, :]).sum(-1)
    total: Any = sum(torch.where((of_row == e)[:, None], x @ w[e], 0.0) for e in range(w.shape[0]))
    return total  # a tensor: there is an expert


def _sizes(ends: Tensor) -> list[int]:
    """The number of rows of each group, on the CPU, as reading `ends` waits."""
    behind = ends.tolist()
    return [end - start for start, end in zip([0, *behind], behind)]


@operator(
    "grouped_mm(Tensor x, Tensor w, Tensor ends) -> Tensor",
    lambda x, w, ends: x.new_empty(len(x), w.shape[2]),
    flop=graph_passes.product,
)
def grouped_product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Return [M, F] by torch's own products. A custom operator, because torch's fake `_grouped_mm` rejects inputs that
    the CPU form takes.
    """
    if x.is_cuda:
        w = w if 1 in w.stride()[1:] else w.contiguous()
        return torch_private.grouped_mm(x.contiguous(), w, offs=ends)
    out, sizes = x.new_empty(len(x), w.shape[2]), _sizes(ends)
    behind = len(x) - sum(sizes)
    *products, tail = out.split([*sizes, behind])
    for rows, weights, product in zip(x.split([*sizes, behind]), w.unbind(), products):
        torch.mm(rows, weights, out=product)
    tail.zero_()
    return out


@operator(
    "grouped_mm_dw(Tensor x, Tensor g, Tensor ends) -> Tensor",
    lambda x, g, ends: x.new_empty(len(ends), x.shape[1], g.shape[1]),
    flop=graph_passes.product,
)
def grouped_product_dw(x: Tensor, g: Tensor, ends: Tensor) -> Tensor:
    """[E, D, F]: each group's x^T g, zero for a group without rows."""
    if x.is_cuda:
        return torch_private.grouped_mm(x.contiguous().t(), g.contiguous(), offs=ends)
    out, sizes = x.new_empty(len(ends), x.shape[1], g.shape[1]), _sizes(ends)
    used = sum(sizes)
    for rows, grads, product in zip(x[:used].t().split(sizes, 1), g[:used].split(sizes), out.unbind()):
        torch.mm(rows, grads, out=product)
    return out


@triton.jit
def _grouped_mm(
    X,
    W,
    ENDS,
    OUT,
    E,
    D,
    F,
    stride_e,
    stride_d,
    stride_f,
    EXPERTS: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # program_id(1) is the tile of columns. program_id(0) numbers tiles of BLOCK_M rows through all groups: group e
    # has ceil(rows_e / BLOCK_M),
    # and behind[e] is their running sum. So this program's group e is the number of groups whose tiles end at or before
    # it. The grid has M / BLOCK_M + E programs, enough for one partial tile a group; those left over have e >= E.
    tile = tl.program_id(0)
    e, first, end = group_of_tile(ENDS, tile, E, EXPERTS, BLOCK_M)
    if e >= E:
        return
    # first = start of the group - tiles before it * BLOCK_M, so that first + tile * BLOCK_M is the first row of this
    # tile. Masks: rows from the group's end on belong to the next expert; at >= D and col >= F are beyond the matrices.
    row = (first + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    col = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    k = tl.arange(0, BLOCK_K)
    # Any strides, as the backward pass multiplies by W turned. In int64: e * stride_e passes 2^31 with many large
    # experts.
    W += e.to(tl.int64) * stride_e
    # In float32, also for operands in bfloat16.
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, D, BLOCK_K):
        offsets = start + k
        x = tl.load(X + row * D + offsets[None, :], mask=(row < end) & (offsets[None, :] < D), other=0.0)
        w = tl.load(
            W + offsets.to(tl.int64)[:, None] * stride_d + col * stride_f,
            mask=(offsets[:, None] < D) & (col < F),
            other=0.0,
        )
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
    tl.store(OUT + row * F + col, total.to(OUT.dtype.element_ty), mask=(row < end) & (col < F))


@triton.jit
def _grouped_mm_dw(
    X,
    G,
    ENDS,
    OUT,
    D,
    F,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # OUT[e, d, f] = sum over the group's rows of X[row, d] G[row, f]: program ids are the tiles of d and f and the
    # expert e. The sum runs over the rows [first, end) of group e, BLOCK_K at a time; its last block is masked.
    e = tl.program_id(2).to(tl.int64)
    end = tl.load(ENDS + e)
    first = tl.load(ENDS + e - 1, mask=e > 0, other=0)
    d = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    f = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    # An expert without rows stores zeros: OUT is not filled beforehand.
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, end, BLOCK_K):
        row = (start + tl.arange(0, BLOCK_K)).to(tl.int64)
        x = tl.load(X + row[None, :] * D + d, mask=(row[None, :] < end) & (d < D), other=0.0)
        g = tl.load(G + row[:, None] * F + f, mask=(row[:, None] < end) & (f < F), other=0.0)
        if UPCAST:
            x, g = x.to(tl.float32), g.to(tl.float32)
        total = tl.dot(x, g, total, input_precision="ieee")
    tl.store(OUT + (e * D + d) * F + f, total.to(OUT.dtype.element_ty), mask=(d < D) & (f < F))


def _configs(x: Tensor) -> tuning.ConfigTable:
    return FLOAT_CONFIGS if x.dtype == torch.float32 else HALF_CONFIGS


@operator(
    "grouped_mm_triton(Tensor x, Tensor w, Tensor ends) -> Tensor",
    lambda x, w, ends: x.new_empty(len(x), w.shape[2]),
    flop=graph_passes.product,
)
def grouped_product_triton(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """[M, F] in Triton; w may have any strides."""
    return _multiply_groups(x, w, ends)


def _multiply_groups(x: Tensor, w: Tensor, ends: Tensor, blocks: tuning.Config | None = None) -> Tensor:
    """[M, F] by tiles of these sizes; None: by the fastest that were measured."""
    (m, d), (experts, _, f) = x.shape, w.shape
    out = x.new_empty(m, f)

    def grid(config: tuning.Config) -> tuple[int, int]:
        return triton.cdiv(m, config["BLOCK_M"]) + experts, triton.cdiv(f, config["BLOCK_N"])

    if m and f:
        arguments = (x.contiguous(), w, ends, out, experts, d, f, *w.stride())
        constants = {"EXPERTS": triton.next_power_of_2(experts), "UPCAST": INTERPRETED}
        if blocks is not None:
            _grouped_mm[grid(blocks)](*arguments, **constants, **blocks)
            return out
        tuning.launch(
            _grouped_mm, grid, arguments, _configs(x), shape=(m, d, f, experts, w.stride(2) == 1, x.dtype), **constants
        )
    return out


@operator(
    "grouped_mm_dw_triton(Tensor x, Tensor g, Tensor ends) -> Tensor",
    lambda x, g, ends: x.new_empty(len(ends), x.shape[1], g.shape[1]),
    flop=graph_passes.product,
)
def grouped_product_dw_triton(x: Tensor, g: Tensor, ends: Tensor) -> Tensor:
    """[E, D, F] in Triton."""
    (m, d), f, experts = x.shape, g.shape[1], len(ends)
    out = x.new_empty(experts, d, f)

    def grid(config: tuning.Config) -> tuple[int, int, int]:
        return triton.cdiv(d, config["BLOCK_M"]), triton.cdiv(f, config["BLOCK_N"]), experts

    if out.numel():
        arguments = (x.contiguous(), g.contiguous(), ends, out, d, f)
        tuning.launch(
            _grouped_mm_dw, grid, arguments, _configs(x), shape=(m, d, f, experts, x.dtype), UPCAST=INTERPRETED
        )
    return out


def _fused(product: Callable[..., Tensor], product_dw: Callable[..., Tensor]) -> Fused:
    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        (x, w, ends), (g,) = saved, grads
        return product(g, w.transpose(1, 2), ends), product_dw(x, g, ends)

    return Fused("grouped_mm", forward=lambda x, w, ends: (product(x, w, ends),), backward=backward)


def _torch_supports(x: Tensor, w: Tensor, ends: Tensor) -> str:
    if x.dtype != w.dtype or not x.is_floating_point():
        return f"the dtypes are {x.dtype} and {w.dtype}; they must be one floating dtype"
    kind = kind_of(x)
    if kind == "cpu":
        return ""
    if kind != "cuda" or x.dtype != torch.bfloat16 or any(size % 8 for size in w.shape[1:]):
        return (
            f"{x.dtype} of {list(w.shape[1:])} on {kind}: elsewhere than on the CPU it takes bfloat16 in "
            "multiples of 8, on cuda"
        )
    if not hasattr(torch, "_grouped_mm") or target_of(x).capability[0] not in (9, 10):
        return "torch._grouped_mm waits for the device, but on compute capability 9 and 10"
    return ""


def _triton_supports(x: Tensor, w: Tensor, ends: Tensor) -> str:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or w.dtype != x.dtype:
        return f"the dtypes are {x.dtype} and {w.dtype}; it takes two of float32, bfloat16 or float16"
    return triton_runs(x, w, ends)


@operator(
    "grouped_mm_canonical(Tensor x, Tensor w, Tensor ends) -> Tensor",
    lambda x, w, ends: x.new_empty(len(x), w.shape[2]),
    flop=graph_passes.product,
)
def grouped_product_canonical(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """[M, F] by the products of `linear`'s canonical form; on a GPU by tiles that no measurement chooses."""
    if x.is_cuda:
        return _multiply_groups(x, w, ends, tuning.rows(_configs(x), x.device)[0])
    sizes = _sizes(ends)
    products = [linear_product(rows, weights) for rows, weights in zip(x.split([*sizes, len(x) - sum(sizes)]), w)]
    return torch.cat((*products, x.new_zeros(len(x) - sum(sizes), w.shape[2])))


def _canonical_supports(x: Tensor, w: Tensor, ends: Tensor) -> str:
    if x.dtype not in rowwise.TYPES or w.dtype != x.dtype:
        return f"the dtypes are {x.dtype} and {w.dtype}; it takes two of float32 or bfloat16"
    return rows_run(x, w, ends)


def _grouped_backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    (x, w, ends), (g,) = saved, grads
    return grouped_product(g, w.transpose(1, 2), ends), grouped_product_dw(x, g, ends)


_grouped_canonical = Fused(
    "grouped_mm", forward=lambda x, w, ends: (grouped_product_canonical(x, w, ends),), backward=_grouped_backward
)


grouped_mm = Op(
    "grouped_mm",
    grouped_mm_reference,
    Form("torch", _fused(grouped_product, grouped_product_dw), supports=_torch_supports),
    Form(
        "triton", _fused(grouped_product_triton, grouped_product_dw_triton), supports=_triton_supports, prefers=on_cuda
    ),
    Form("canonical", _grouped_canonical, _canonical_supports, asked_for),
    flops=lambda x, w, ends: 2 * x.shape[0] * w.shape[1] * w.shape[2],
    bytes=lambda x, w, ends: (x.numel() + w.numel() + x.shape[0] * w.shape[2]) * x.element_size(),
)


# ---- the experts -----------------------------------------------------------------------------------------------------


def rows_of_bias(b: Tensor, rows: Tensor, ends: Tensor, impl: str = "auto") -> Tensor:
    """The row b[e] of b [E, F] for each row of group e, [M, F], by `grouped_mm` of a column of ones."""
    # As a product, so that its gradient is a sum in a fixed order. torch's form takes multiples of 8 columns.
    ones = F.pad(rows.new_ones(rows.shape[0], 1), (0, 7))
    return grouped_mm(ones, F.pad(b.to(rows.dtype)[:, None], (0, 0, 0, 7)), ends, impl=impl)


def feed_forward(
    p: Tree, rows: Tensor, ends: Tensor, kernels: Kernels = AUTO, float8: bool = False, gate: Op = swiglu
) -> Tensor:
    """The experts' gated MLPs of rows [M, D] that are grouped as `grouped_mm` says: [M, D]."""
    op = float8_grouped_mm if float8 else grouped_mm

    def product(rows: Tensor, name: str) -> Tensor:
        y = op(rows, p[f"w_{name}"].to(rows.dtype), ends, impl=kernels[op.name])
        bias = p.get(f"b_{name}")
        return y if bias is None else y + rows_of_bias(bias, rows, ends, kernels["grouped_mm"])

    hidden = gate(product(rows, "gate"), product(rows, "up"), impl=kernels[gate.name])
    return product(hidden, "down")


def dropless(
    p: Tree,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    kernels: Kernels = AUTO,
    float8: bool = False,
    gate: Op = swiglu,
) -> Tensor:
    """Compute every token by its k experts: group rows, three grouped products, sum with weights."""
    k, tokens = ids.shape[-1], x.reshape(-1, x.shape[-1])
    order, inverse, ends = group(ids, p["w_gate"].shape[0], impl=kernels["group"])
    rows = permute(tokens, order, inverse, impl=kernels["permute"])
    y = feed_forward(p, rows, ends, kernels, float8, gate)
    return unpermute(y, weights.reshape(-1, k), order, inverse, impl=kernels["unpermute"]).reshape(x.shape)


def capacity_of(factor: float, tokens: int, k: int, experts: int) -> int:
    """The tokens of a sequence that an expert takes at this capacity factor."""
    return math.ceil(factor * tokens * k / experts)


def capacity(
    p: Tree,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    factor: float,
    kernels: Kernels = AUTO,
    expert_shard: tuple[int, int] | None = None,
    gate: Op = swiglu,
) -> Tensor:
    """Compute at most C = ceil(factor T k / E) tokens of a sequence by each expert, first choices first."""
    # A token beyond the capacity gets 0 from that expert (the residual stream still carries it). Capacity is counted
    # per sequence, so the result does not depend on how a batch is split.
    b, t, d = x.shape
    k, experts = ids.shape[-1], p["w_gate"].shape[0]
    first, count = expert_shard or (0, experts)
    limit = capacity_of(factor, t, k, count)
    choice = ids.transpose(1, 2).reshape(b, k * t)  # all first choices, then all second ones
    choice = choice - first
    one_hot = (choice[..., None] == torch.arange(experts, device=x.device)).to(torch.int64)
    position = ((one_hot.cumsum(1) - 1) * one_hot).sum(-1)
    fits = (position < limit) & (choice >= 0) & (choice < experts)
    slot = torch.where(fits, choice * limit + position, experts * limit)  # dropped tokens go to an additional last slot
    sent = x.repeat(1, k, 1)
    inbox = torch.zeros(b, experts * limit + 1, d, dtype=x.dtype, device=x.device)
    inbox = inbox.scatter(1, slot[..., None].expand(b, k * t, d), sent)[:, :-1].reshape(b, experts, limit, d)

    def product(x: Tensor, name: str) -> Tensor:
        y, bias = torch.einsum("becd,edf->becf", x, p[f"w_{name}"].to(x.dtype)), p.get(f"b_{name}")
        return y if bias is None else y + bias.to(x.dtype)[:, None]

    hidden = gate(product(inbox, "gate"), product(inbox, "up"), impl=kernels[gate.name])
    y = product(hidden, "down").reshape(b, experts * limit, d)
    outputs = torch.gather(y, 1, slot.clamp(max=experts * limit - 1)[..., None].expand(b, k * t, d))
    share = (weights.transpose(1, 2).reshape(b, k * t) * fits)[..., None].to(y.dtype)
    return (outputs * share).reshape(b, k, t, d).sum(1)


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    sizes, constants = "ENDS:*i32 E:i32 D:i32 F:i32", {"UPCAST": False}
    strides = ("stride_e", "stride_d", "stride_f")
    for kind, configs in (("bf16", HALF_CONFIGS), ("fp32", FLOAT_CONFIGS)):
        for config in configs.for_gpu(gpu):
            label, checks = f"{kind} {config['BLOCK_M']}x{config['BLOCK_N']}", {"matrix": kind == "bf16"}
            # Triton compiles a stride of 1 as a constant: that of the last dim forward, that of the middle dim for w
            # transposed.
            for name, unit_stride in (("", "stride_f"), ("transposed ", "stride_d")):
                aligned = ("D", "F", *(stride for stride in strides if stride != unit_stride))
                unit_constants = constants | {unit_stride: 1, "EXPERTS": 64}
                types = f"{sizes} {unit_stride}:constexpr"
                yield build(
                    _grouped_mm, name + label, config, unit_constants, types, f"*{kind}", aligned=aligned, **checks
                )
            yield build(_grouped_mm_dw, label, config, constants, sizes, f"*{kind}", aligned=("D", "F"), **checks)
