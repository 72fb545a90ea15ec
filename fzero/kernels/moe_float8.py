"""Grouped products in float8: each row of a group, and each column of its expert's weight, scaled by itself.

    y[r] = (q(x[r]) q(w[e])) / (s_r s_e),   s_r = L / max |x[r]|,   s_ef = L / max_d |w[e, d, f]|

e is the group of row r. L is the largest number of E4M3, and scales are rounded down to powers of 2: the recipe
"rowwise" of float8.py, by which a row is rounded alike whichever rows lie beside it, on any number of ranks. The
backward products, dx = g w^T and dw[e] = x_e^T g_e over the rows of a group, are float8 products too, each from
operands that have not been rounded before; for dw a column of x has a scale for each group.
Ref: Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433; the recipe is that of torchao's
float8 training of mixtures of experts.

Shapes: x [M, D], w [E, D, F], g [M, F], ends int32 [E]: one past each group's last row, as `moe.grouped_mm` has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fzero.core import graph_passes
from fzero.core.autodiff import Function
from fzero.core.device import kind_of, target_of
from fzero.kernels import tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.custom_operator import INTERPRETED, Fused, on_cuda, operator, tl, triton, triton_runs
from fzero.kernels.float8 import E4M3, quantise
from fzero.kernels.registry import Form, Op

CONFIGS, DW_CONFIGS = tuning.ConfigTable("_grouped_float8"), tuning.ConfigTable("_grouped_float8_dw")
LEAST = (8, 9)  # the compute capability from which on a GPU multiplies float8
# Numbers that Hopper's matrix units may add up before the sum goes to a float32 register: they keep 14 bits or so.
# The more there are, the larger the error, so without a bound it grows with K.
PROMOTED = tl.constexpr(128)


def group_of(rows: int, ends: Tensor) -> Tensor:
    """The group of each of so many rows, int64 [M]; E for those behind the last one."""
    return torch.searchsorted(ends.to(torch.int64), torch.arange(rows, device=ends.device), right=True)


# ---- the definition --------------------------------------------------------------------------------------------------


def rows_reference(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """[M, F] in x's dtype: the definition; every row by every expert, and masked."""
    (qx, ix), (qw, iw) = quantise(x, E4M3, 1, True), quantise(w, E4M3, 1, True)
    wide, of_row, total = torch.promote_types(x.dtype, torch.float32), group_of(x.shape[0], ends), None
    for e in range(w.shape[0]):
        y = (qx.to(wide) @ qw[e].to(wide)) * (ix * iw[e])
        y = torch.where((of_row == e)[:, None], y, 0.0)
        total = y if total is None else total + y
    assert total is not None, "there is an expert"
    return total.to(x.dtype)


def weights_reference(x: Tensor, g: Tensor, ends: Tensor) -> Tensor:
    """[E, D, F] in x's dtype: of each group the product of its columns' numbers."""
    wide, of_row = torch.promote_types(x.dtype, torch.float32), group_of(x.shape[0], ends)
    out = []
    for e in range(ends.shape[0]):
        in_group = (of_row == e)[:, None]
        (qx, ix), (qg, ig) = (quantise(torch.where(in_group, t, 0.0), E4M3, 0, True) for t in (x, g))
        out.append((qx.to(wide).mT @ qg.to(wide)) * (ix.mT * ig))
    return torch.stack(out).to(x.dtype)


class _GroupedProduct(Function):
    """`rows_reference` of x and w, or `weights_reference` of x and g, with float8 derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, ends: Tensor, of_weights: bool) -> Tensor:
        return (weights_reference if of_weights else rows_reference)(a, b, ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.of_weights = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (a, b, ends), apply = ctx.saved_tensors, _GroupedProduct.apply
        pair = (b, g.mT) if ctx.of_weights else (g, b.mT)
        da = apply(*pair, ends, False) if ctx.needs_input_grad[0] else None
        return da, apply(a, g, ends, not ctx.of_weights) if ctx.needs_input_grad[1] else None, None, None

    @staticmethod
    def jvp(ctx: Any, ta: Tensor | None, tb: Tensor | None, *_: None) -> Tensor:
        (a, b, ends), apply = ctx.saved_tensors, _GroupedProduct.apply
        parts: list[Tensor] = [] if ta is None else [apply(ta, b, ends, ctx.of_weights)]
        parts += [] if tb is None else [apply(a, tb, ends, ctx.of_weights)]
        return sum(parts[1:], parts[0])


def float8_grouped_mm_reference(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows of x [M, D] by their group's w [E, D, F] through float8: the definition."""
    return _GroupedProduct.apply(x, w, ends, False)


# ---- on the CPU ------------------------------------------------------------------------------------------------------


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    """(first row, one past the last) of each group; used on the CPU only."""
    behind = ends.tolist()
    return list(zip([0, *behind], behind))


@operator(
    "float8_grouped_mm_emulated(Tensor x, Tensor w, Tensor ends) -> Tensor",
    lambda x, w, ends: x.new_empty(len(x), w.shape[2]),
    flop=graph_passes.product,
)
def grouped_emulated(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """`rows_reference` by one product for each group that has rows."""
    wide, out = torch.promote_types(x.dtype, torch.float32), x.new_zeros(len(x), w.shape[2])
    qx, ix = quantise(x, E4M3, 1, True)
    for e, (first, end) in enumerate(_spans(ends)):
        if end > first:
            qw, iw = quantise(w[e], E4M3, 0, True)
            out[first:end] = (qx[first:end].to(wide) @ qw.to(wide)) * (ix[first:end] * iw)
    return out


@operator(
    "float8_grouped_mm_dw_emulated(Tensor x, Tensor g, Tensor ends) -> Tensor",
    lambda x, g, ends: x.new_empty(len(ends), x.shape[1], g.shape[1]),
    flop=graph_passes.product,
)
def grouped_dw_emulated(x: Tensor, g: Tensor, ends: Tensor) -> Tensor:
    """`weights_reference` likewise; zero for a group without rows."""
    wide, out = torch.promote_types(x.dtype, torch.float32), x.new_zeros(len(ends), x.shape[1], g.shape[1])
    for e, (first, end) in enumerate(_spans(ends)):
        if end > first:
            (qx, ix), (qg, ig) = (quantise(t[first:end], E4M3, 0, True) for t in (x, g))
            out[e] = (qx.to(wide).mT @ qg.to(wide)) * (ix.mT * ig)
    return out


def _emulated_backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    (x, w, ends), (g,) = saved, grads
    return grouped_emulated(g, w.mT, ends), grouped_dw_emulated(x, g, ends)


_emulated = Fused(
    "float8_grouped_mm", forward=lambda x, w, ends: (grouped_emulated(x, w, ends),), backward=_emulated_backward
)


# ---- in Triton -------------------------------------------------------------------------------------------------------


@triton.jit
def group_of_tile(ENDS, tile, E, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(group e of a tile, its start - tiles before it * BLOCK_M, its end)."""
    expert = tl.arange(0, EXPERTS)
    ends = tl.load(ENDS + expert, mask=expert < E, other=0)
    starts = tl.load(ENDS + expert - 1, mask=(expert > 0) & (expert < E), other=0)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    # All groups at once, EXPERTS being their number rounded up to a power of two: no search, no table in memory.
    behind = tl.cumsum(tiles, 0)
    e = tl.sum((behind <= tile).to(tl.int32), 0)
    in_group = expert == e
    end = tl.sum(tl.where(in_group, ends, 0), 0)
    first = tl.sum(tl.where(in_group, starts - (behind - tiles) * BLOCK_M, 0), 0)
    return e, first, end


@triton.jit
def _grouped_float8(
    X, W, X_INVERSE, W_INVERSE, ENDS, OUT, E, D, F, stride_e, stride_f,
    EXPERTS: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # As moe._grouped_mm: program_id(0) numbers tiles of BLOCK_M rows through all groups, program_id(1) is the tile of
    # columns. The numbers of X are [M, D]; those of W lie turned, [E, F, D], so that both operands are contiguous along
    # the sum, as the matrix units of Hopper take float8. X_INVERSE [M] and W_INVERSE [E, F] scale the sums.
    tile = tl.program_id(0)
    e, first, end = group_of_tile(ENDS, tile, E, EXPERTS, BLOCK_M)
    if e >= E:
        return
    row = (first + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    col = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    W += e.to(tl.int64) * stride_e
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, D, BLOCK_K):
        offsets = start + k
        x = tl.load(
            X + row[:, None] * D + offsets[None, :], mask=(row[:, None] < end) & (offsets[None, :] < D), other=0.0
        )
        w = tl.load(
            W + col[:, None] * stride_f + offsets[None, :], mask=(col[:, None] < F) & (offsets[None, :] < D), other=0.0
        )
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, tl.trans(w), total, max_num_imprecise_acc=min(BLOCK_K, PROMOTED))
    ix = tl.load(X_INVERSE + row, mask=row < end, other=0.0)
    iw = tl.load(W_INVERSE + e.to(tl.int64) * F + col, mask=col < F, other=0.0)
    # Scales are powers of 2, so their product is exact, and it does not matter that it is applied after the sum.
    y = total * (ix[:, None] * iw[None, :])
    tl.store(OUT + row[:, None] * F + col[None, :], y.to(OUT.dtype.element_ty), mask=(row[:, None] < end) & (col < F))


@triton.jit
def _grouped_float8_dw(
    X, G, X_INVERSE, G_INVERSE, ENDS, OUT, M, D, F,
    UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # OUT[e] = x_e^T g_e: program ids are the tiles of d and f and the expert e. The numbers lie turned, X [D, M] and
    # G [F, M], contiguous along the sum over rows; X_INVERSE is [E, D], G_INVERSE [E, F].
    e = tl.program_id(2).to(tl.int64)
    end = tl.load(ENDS + e)
    first = tl.load(ENDS + e - 1, mask=e > 0, other=0)
    d = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    f = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Wide loads begin at multiples of 16 rows, and their masks end there: the rows of other groups are cleared behind
    # them.
    for start in range(first // 16 * 16, end, BLOCK_K):
        row = (tl.multiple_of(start, 16) + tl.arange(0, BLOCK_K)).to(tl.int64)[None, :]
        in_group = (row >= first) & (row < end)
        x = tl.load(X + d[:, None] * M + row, mask=(row < M) & (d[:, None] < D), other=0.0)
        g = tl.load(G + f[:, None] * M + row, mask=(row < M) & (f[:, None] < F), other=0.0)
        x, g = tl.where(in_group, x, tl.zeros_like(x)), tl.where(in_group, g, tl.zeros_like(g))
        if UPCAST:
            x, g = x.to(tl.float32), g.to(tl.float32)
        total = tl.dot(x, tl.trans(g), total, max_num_imprecise_acc=min(BLOCK_K, PROMOTED))
    ix = tl.load(X_INVERSE + e * D + d, mask=d < D, other=0.0)
    ig = tl.load(G_INVERSE + e * F + f, mask=f < F, other=0.0)
    dw = total * (ix[:, None] * ig[None, :])
    tl.store(OUT + (e * D + d[:, None]) * F + f[None, :], dw.to(OUT.dtype.element_ty), mask=(d[:, None] < D) & (f < F))


@operator(
    "float8_grouped_mm(Tensor x, Tensor w, Tensor x_inverse, Tensor w_inverse, Tensor ends, ScalarType dtype) -> "
    "Tensor",
    lambda x, w, x_inverse, w_inverse, ends, dtype: x_inverse.new_empty(len(x), w.shape[2], dtype=dtype),
    flop=graph_passes.product,
)
def grouped_float8(
    x: Tensor, w: Tensor, x_inverse: Tensor, w_inverse: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """[M, F] of numbers x [M, D], contiguous, and w [E, D, F], contiguous along D, with the inverses of their scales,
    [M] and [E, F]."""
    (m, d), (experts, _, f) = x.shape, w.shape
    out = x_inverse.new_zeros(m, f, dtype=dtype)

    def grid(config: tuning.Config) -> tuple[int, int]:
        return triton.cdiv(m, config["BLOCK_M"]) + experts, triton.cdiv(f, config["BLOCK_N"])

    if m and f:
        arguments = (x, w, x_inverse, w_inverse, ends, out, experts, d, f, w.stride(0), w.stride(2))
        constants = {"EXPERTS": triton.next_power_of_2(experts), "UPCAST": INTERPRETED}
        tuning.launch(_grouped_float8, grid, arguments, CONFIGS, shape=(m, d, f, experts), **constants)
    return out


@operator(
    "float8_grouped_mm_dw(Tensor x, Tensor g, Tensor x_inverse, Tensor g_inverse, Tensor ends, ScalarType dtype) -> "
    "Tensor",
    lambda x, g, x_inverse, g_inverse, ends, dtype: x_inverse.new_empty(len(ends), len(x), len(g), dtype=dtype),
    flop=graph_passes.product,
)
def grouped_float8_dw(
    x: Tensor, g: Tensor, x_inverse: Tensor, g_inverse: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """[E, D, F] of numbers that lie turned, x [D, M] and g [F, M], with the inverses of their scales, [E, D] and
    [E, F]."""
    (d, m), f, experts = x.shape, len(g), len(ends)
    out = x_inverse.new_empty(experts, d, f, dtype=dtype)

    def grid(config: tuning.Config) -> tuple[int, int, int]:
        return triton.cdiv(d, config["BLOCK_M"]), triton.cdiv(f, config["BLOCK_N"]), experts

    if out.numel():
        arguments = (x, g, x_inverse, g_inverse, ends, out, m, d, f)
        tuning.launch(_grouped_float8_dw, grid, arguments, DW_CONFIGS, shape=(m, d, f, experts), UPCAST=INTERPRETED)
    return out


def columns_by_group(x: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """(float8 numbers of x [M, D], turned: [D, M], inverse scales [E, D]): one for each column of a group."""
    wide, of_row = x.to(torch.float32), group_of(len(x), ends)
    largest = torch.zeros(len(ends) + 1, x.shape[1], device=x.device)
    # Of a maximum any order gives the same.
    largest = largest.scatter_reduce(0, of_row[:, None].expand(x.shape), wide.abs(), "amax")
    _, inverse = quantise(largest[:, None], E4M3, 1, True)
    numbers = wide / inverse[:, 0].index_select(0, of_row)  # by a power of 2: exact
    return numbers.to(E4M3).t().contiguous(), inverse[:-1, 0].contiguous()


@operator(
    "float8_columns_by_group(Tensor x, Tensor ends) -> (Tensor, Tensor)",
    lambda x, ends: (
        torch.empty(x.shape[::-1], dtype=E4M3, device=x.device),
        torch.empty(len(ends), x.shape[1], device=x.device),
    ),
)
def float8_columns(x: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """`columns_by_group` as one node of a graph."""
    return columns_by_group(x, ends)


@operator(
    "float8_of_experts(Tensor w) -> (Tensor, Tensor)",
    lambda w: (
        torch.empty(w.shape[0], w.shape[2], w.shape[1], dtype=E4M3, device=w.device),
        torch.empty(w.shape[0], w.shape[2], device=w.device),
    ),
)
def float8_of_experts(w: Tensor) -> tuple[Tensor, Tensor]:
    """(float8 numbers of w [E, D, F], turned: [E, F, D], inverse scales [E, F])."""
    numbers, inverse = quantise(w.mT, E4M3, 2, True)
    return numbers.contiguous(), inverse[..., 0].contiguous()


@operator(
    "float8_rows(Tensor x) -> (Tensor, Tensor)",
    lambda x: (torch.empty(x.shape, dtype=E4M3, device=x.device), torch.empty(len(x), device=x.device)),
)
def float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(float8 numbers of x [M, D], contiguous, the inverses of their scales [M])."""
    numbers, inverse = quantise(x, E4M3, 1, True)
    return numbers.contiguous(), inverse[:, 0].contiguous()


def _product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    (qx, ix), (qw, iw) = float8_rows(x), float8_of_experts(w)
    return grouped_float8(qx, qw.mT, ix, iw, ends, x.dtype)


def _triton_backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    (x, w, ends), (g,) = saved, grads
    (qx, ix), (qg, ig) = float8_columns(x, ends), float8_columns(g, ends)
    return _product(g, w.mT, ends), grouped_float8_dw(qx, qg, ix, ig, ends, x.dtype)


_triton = Fused("float8_grouped_mm", forward=lambda x, w, ends: (_product(x, w, ends),), backward=_triton_backward)


def _triton_supports(x: Tensor, w: Tensor, ends: Tensor) -> str:
    if x.dtype not in (torch.float32, torch.bfloat16) or w.dtype != x.dtype:
        return f"the dtypes are {x.dtype} and {w.dtype}; it takes two of bfloat16 or float32"
    if kind_of(x) == "cuda" and target_of(x).capability < LEAST:
        return f"the device has compute capability {target_of(x).capability}; float8 needs {LEAST}"
    return triton_runs(x, w, ends)


float8_grouped_mm = Op(
    "float8_grouped_mm",
    float8_grouped_mm_reference,
    Form("triton", _triton, supports=_triton_supports, prefers=on_cuda),
    Form(
        "emulated",
        _emulated,
        supports=lambda x, w, ends: "" if kind_of(x) == "cpu" else "it reads the groups' sizes, on the CPU",
    ),
    flops=lambda x, w, ends: 2 * x.shape[0] * w.shape[1] * w.shape[2],
    bytes=lambda x, w, ends: (x.numel() + w.numel() + x.shape[0] * w.shape[2]) * x.element_size(),
)


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    types = "ENDS:*i32 OUT:*bf16 E:i32 M:i32 D:i32 F:i32 X_INVERSE:*fp32 W_INVERSE:*fp32 G_INVERSE:*fp32"
    for kernel, configs, constants, aligned in (
        (_grouped_float8, CONFIGS, {"EXPERTS": 64}, ("D", "F", "stride_e", "stride_f")),
        (_grouped_float8_dw, DW_CONFIGS, {}, ("M", "D", "F")),
    ):
        for config in configs.for_gpu(gpu):
            label, constants = f"{config['BLOCK_M']}x{config['BLOCK_N']}", constants | {"UPCAST": False}
            yield build(kernel, label, config, constants, types, "*fp8e4nv", matrix=True, aligned=aligned)
