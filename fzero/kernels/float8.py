"""Linear in float8: both operands of each product scaled into a float8 format, multiplied there, and the product scaled
back.

    A B  is  (q(A) q(B)) / (s_A s_B),   q(A) = round(s_A A),   s_A = L / max |A|,   L the format's largest number

Scales are computed from the operands of each call. "tensorwise": one scale for an operand; E4M3 (L = 448) for values,
E5M2 (L = 57344) for gradients. "rowwise": one for each row of A and each column of B; E4M3 throughout, and scales
rounded down to powers of 2. All three products of a linear go this way, y = x w, dx = dy w^T and dw = x^T dy, each from
operands that have not been rounded before: rowwise, the scales of x in x w and in x^T dy are along different dims. Ref:
Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv:2209.05433, sections 2 (scales) and 3 (the formats, and
which is for what); the two recipes are those of torchao.float8 under these names.

Shapes: x [..., in], w [in, out], one dtype. A tensor of zeros has the product zero. Infinity and NaN give NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import graph_passes, torch_private
from fzero.core.autodiff import Function, reinterpret
from fzero.core.config_tables import check_choice
from fzero.core.device import kind_of, target_of
from fzero.core.graph_passes import PAIRED_OPERATORS, SHARED
from fzero.kernels import tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.custom_operator import Fused, on_cuda, operator, tl, triton, triton_runs
from fzero.kernels.registry import Form, Op

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 1e-12  # the lower bound of max |A|
# By the order of x; None: for both orders of the numbers.
CONFIGS = {
    True: tuning.ConfigTable("_quantise rows"),
    False: tuning.ConfigTable("_quantise columns"),
    None: tuning.ConfigTable("_quantise both"),
}


class Recipe(NamedTuple):
    """How operands are scaled."""

    rowwise: bool  # a scale for each row of the first operand and each column of the second; else one for an operand
    powers_of_2: bool
    value: torch.dtype
    gradient: torch.dtype


RECIPES = {"tensorwise": Recipe(False, False, E4M3, E5M2), "rowwise": Recipe(True, True, E4M3, E4M3)}


def recipe_of(scaling: str) -> Recipe:
    """The recipe of this name; raises ValueError naming those there are."""
    check_choice("float8: scaling", scaling, RECIPES)
    return RECIPES[scaling]


def max_magnitude(x: Tensor, dim: int | None) -> Tensor:
    """max |x| over a dim, or over all, with dims of size 1 kept."""
    dims = dim if dim is not None else tuple(range(x.dim()))
    reduced_shape = [1 if dim is None or i == dim % x.dim() else size for i, size in enumerate(x.shape)]
    return x.abs().amax(dims, keepdim=True) if x.numel() else x.new_zeros(reduced_shape)


def scale_of(amax: Tensor, dtype: torch.dtype, powers_of_2: bool) -> Tensor:
    """The float32 scale that maps `amax` to the largest number of the format."""
    amax = amax.to(torch.float32)
    scale = torch.finfo(dtype).max / torch.where(amax < SMALLEST, SMALLEST, amax)
    # The exponent alone. From NaN that makes another number, but the product with the NaN in x is NaN whatever the
    # scale.
    return reinterpret(reinterpret(scale, torch.int32) & -0x800000, torch.float32) if powers_of_2 else scale


def quantise(x: Tensor, dtype: torch.dtype, dim: int | None, powers_of_2: bool) -> tuple[Tensor, Tensor]:
    """(float8 numbers of x, the float32 inverse of their scale): one scale along `dim`, or for all."""
    # Multiplied in float32 or wider, rounded to nearest even. No clamping is needed: only the rounding of the scale can
    # exceed the largest number, and the cast rounds back to it.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = scale_of(max_magnitude(wide, dim), dtype, powers_of_2)
    return (wide * scale).to(dtype), 1.0 / scale


def product_reference(a: Tensor, b: Tensor, scaling: str, a_gradient: bool, b_gradient: bool) -> Tensor:
    """a [M, K] b [K, N] through float8: exact products in float32 or wider, torch's sums."""
    recipe = recipe_of(scaling)
    formats = [recipe.gradient if gradient else recipe.value for gradient in (a_gradient, b_gradient)]
    qa, ia = quantise(a, formats[0], 1 if recipe.rowwise else None, recipe.powers_of_2)
    qb, ib = quantise(b, formats[1], 0 if recipe.rowwise else None, recipe.powers_of_2)
    wide = torch.promote_types(a.dtype, torch.float32)
    return ((qa.to(wide) @ qb.to(wide)) * (ia * ib)).to(a.dtype)


class _Product(Function):
    """The float8 product with derivatives that are float8 products too; rounding has no derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, scaling: str, a_gradient: bool, b_gradient: bool) -> Tensor:
        return product_reference(a, b, scaling, a_gradient, b_gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, *ctx.kinds = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), (scaling, a_gradient, b_gradient) = ctx.saved_tensors, ctx.kinds
        da = _Product.apply(g, b.mT, scaling, True, b_gradient) if ctx.needs_input_grad[0] else None
        db = _Product.apply(a.mT, g, scaling, a_gradient, True) if ctx.needs_input_grad[1] else None
        return da, db, None, None, None

    @staticmethod
    def jvp(ctx: Any, ta: Tensor | None, tb: Tensor | None, *_: None) -> Tensor:
        (a, b), (scaling, a_gradient, b_gradient) = ctx.saved_tensors, ctx.kinds
        parts: list[Tensor] = [] if ta is None else [_Product.apply(ta, b, scaling, True, b_gradient)]
        parts += [] if tb is None else [_Product.apply(a, tb, scaling, a_gradient, True)]
        return sum(parts[1:], parts[0])


def float8_linear_reference(x: Tensor, w: Tensor, scaling: str = "tensorwise") -> Tensor:
    """x [..., in] w [in, out] through float8, in x's dtype, on any device: the definition."""
    recipe_of(scaling)
    return _Product.apply(x.reshape(-1, x.shape[-1]), w, scaling, False, False).reshape(*x.shape[:-1], w.shape[1])


@triton.jit
def _scales(
    AMAX, INVERSE, indices, n, first, SMALLEST: tl.constexpr, LIMIT: tl.constexpr, POWERS_OF_2: tl.constexpr,
    ROWWISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The scales [BLOCK] by the n largest magnitudes at `indices`, or by the only one."""
    if ROWWISE:
        amax, count = tl.load(AMAX + indices, mask=indices < n, other=1.0).to(tl.float32), n
    else:
        amax, count = tl.full((BLOCK,), 0.0, tl.float32) + tl.load(AMAX).to(tl.float32), 1
    # Exact division, as torch divides; Triton's / may be off by a bit, and scales must be those of every form.
    scale = tl.div_rn(tl.full((BLOCK,), LIMIT, tl.float32), tl.where(amax < SMALLEST, SMALLEST, amax))
    if POWERS_OF_2:
        # Clears the mantissa of a positive float32: the power of 2 at or below it.
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    # What the product is multiplied by.
    inverse = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), scale)
    # All programs along these rows (or columns) compute the same scales; the first of them stores them.
    tl.store(INVERSE + indices, inverse, mask=indices < tl.where(first, count, 0))
    return scale


@triton.jit
def _quantise(
    X, AMAX, OUT, INVERSE, AMAX_T, OUT_T, INVERSE_T, R, C, stride_r, stride_c,
    SMALLEST: tl.constexpr, LIMIT: tl.constexpr, POWERS_OF_2: tl.constexpr, ROWWISE: tl.constexpr, BOTH: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # A program quantises a tile [BLOCK_R, BLOCK_C]; program_id(0) is the tile of rows, program_id(1) that of columns.
    # OUT is contiguous [R, C], by a scale per row, or by one. With BOTH, OUT_T is contiguous [C, R]: the same of X
    # turned, by a scale per column of X.
    # In int64: the offset row * stride may pass 2^31.
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    scale = _scales(AMAX, INVERSE, row, R, tl.program_id(1) == 0, SMALLEST, LIMIT, POWERS_OF_2, ROWWISE, BLOCK_R)
    live = (row[:, None] < R) & (col[None, :] < C)
    x = tl.load(X + row[:, None] * stride_r + col[None, :] * stride_c, mask=live, other=0.0).to(tl.float32)
    # No clamp: |x| <= amax puts x * scale at or below the largest number, up to a rounding that the format's own takes
    # back.
    tl.store(OUT + row[:, None] * C + col[None, :], (x * scale[:, None]).to(OUT.dtype.element_ty), mask=live)
    if BOTH:
        # X is read once for both layouts: the matrix units of Hopper take operands that are contiguous along the sum.
        first = tl.program_id(0) == 0
        scale = _scales(AMAX_T, INVERSE_T, col, C, first, SMALLEST, LIMIT, POWERS_OF_2, ROWWISE, BLOCK_C)
        tl.store(OUT_T + col[None, :] * R + row[:, None], (x * scale[None, :]).to(OUT_T.dtype.element_ty), mask=live)


def _largest(x: Tensor, dim: int, recipe: Recipe) -> Tensor:
    """max |x| of each row (dim 1) or column (dim 0) of a matrix, or of all."""
    return torch.linalg.vector_norm(x, torch.inf, dim=dim if recipe.rowwise else None)


def _launch(x: Tensor, largest: Sequence[Tensor], outs: Sequence[Tensor], dtype: torch.dtype, recipe: Recipe) -> None:
    """Launch `_quantise`; outs: numbers and inverse scales, one pair or two. x may have any strides."""
    (rows, columns), transposed = x.shape, len(outs) == 4
    constants = {
        "SMALLEST": SMALLEST,
        "LIMIT": torch.finfo(dtype).max,
        "POWERS_OF_2": recipe.powers_of_2,
        "ROWWISE": recipe.rowwise,
        "BOTH": transposed,
    }
    in_rows = x.stride(1) == 1

    def grid(config: tuning.Config) -> tuple[int, int]:
        return triton.cdiv(rows, config["BLOCK_R"]), triton.cdiv(columns, config["BLOCK_C"])

    pointers = (x, largest[0], *outs[:2], largest[-1], *outs[-2:])
    table = CONFIGS[None if transposed else in_rows]
    arguments = (*pointers, rows, columns, *x.stride())
    tuning.launch(_quantise, grid, arguments, table, shape=(rows, columns, in_rows, x.dtype), **constants)


def _numbers_like(x: Tensor, largest: Tensor, scaling: str, gradient: bool) -> tuple[Tensor, Tensor]:
    recipe = recipe_of(scaling)
    numbers = torch.empty(x.shape, dtype=recipe.gradient if gradient else recipe.value, device=x.device)
    return numbers, torch.empty((len(x), 1) if recipe.rowwise else (), dtype=torch.float32, device=x.device)


@operator("float8_numbers(Tensor x, Tensor largest, str scaling, bool gradient) -> (Tensor, Tensor)", _numbers_like)
def float8_numbers(x: Tensor, largest: Tensor, scaling: str, gradient: bool) -> tuple[Tensor, Tensor]:
    """(numbers of a matrix in the order of rows, inverse scales) by the largest magnitudes [R] or []."""
    outs = _numbers_like(x, largest, scaling, gradient)
    _launch(x, [largest], outs, outs[0].dtype, recipe_of(scaling))
    return outs


SHARED.append(float8_numbers)


def _both_like(x: Tensor, by_row: Tensor, by_column: Tensor, scaling: str, gradient: bool) -> tuple[Tensor, ...]:
    return *_numbers_like(x, by_row, scaling, gradient), *_numbers_like(x.t(), by_column, scaling, gradient)


@operator(
    "float8_both(Tensor x, Tensor by_row, Tensor by_column, str scaling, bool gradient) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _both_like,
)
def float8_both(x: Tensor, by_row: Tensor, by_column: Tensor, scaling: str, gradient: bool) -> tuple[Tensor, ...]:
    """`float8_numbers` of x and of x turned, by one read of x."""
    outs = _both_like(x, by_row, by_column, scaling, gradient)
    _launch(x, [by_row, by_column], outs, outs[0].dtype, recipe_of(scaling))
    return outs


PAIRED_OPERATORS[float8_numbers] = float8_both


@operator(
    "float8_product(Tensor a, Tensor a_inverse, Tensor b, Tensor b_inverse, bool fast) -> Tensor",
    lambda a, a_inverse, b, *_: torch.empty((len(a), len(b)), dtype=torch.bfloat16, device=a.device),
    flop=graph_passes.product,
)
def float8_product(a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, fast: bool) -> Tensor:
    """The product [M, N] in bfloat16 of float8 numbers a [M, K] and b turned, [N, K]."""
    scales = {"scale_a": a_inverse, "scale_b": b_inverse.t()}
    return torch_private.scaled_mm(a, b.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast)


@operator(
    "float8_product_of(Tensor a, Tensor a_inverse, Tensor b, Tensor largest, str scaling, bool fast) -> Tensor",
    lambda a, a_inverse, b, *_: torch.empty((len(a), len(b)), dtype=torch.bfloat16, device=a.device),
    flop=graph_passes.product,
)
def float8_product_of(a: Tensor, a_inverse: Tensor, b: Tensor, largest: Tensor, scaling: str, fast: bool) -> Tensor:
    """`float8_product` by the numbers of b, values in bfloat16, [N, K], made in the pass that needs them."""
    # So that nobody keeps the numbers of a weight from a forward to a backward pass.
    return float8_product(a, a_inverse, *float8_numbers(b, largest, scaling, False), fast)


def _by_scaled_mm(x: Tensor, w: Tensor, scaling: str = "tensorwise") -> Tensor:
    """The linear by torch._scaled_mm, with fewer bits in its sums if both operands are values."""
    # Sums of a gradient go to float32 registers again and again, as a sum for dw is as long as there are tokens;
    # torchao's rowwise recipe adds all three with fewer bits. A tensor with one scale is read for it once. In a
    # compiled block, linears that share an input share its scale and numbers (`joint_graph.merge_shared`), and the
    # backward pass may keep these in place of the input (`core.graph_passes`).
    recipe = recipe_of(scaling)

    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        largest = _largest(x, 1, recipe), _largest(w, 0, recipe)
        numbers = float8_numbers(x, largest[0], scaling, False)
        y = float8_product_of(*numbers, w.t(), largest[1], scaling, True)
        return y, *(() if recipe.rowwise else largest)

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        (x, w, *largest), (g,) = saved, grads
        x_most, w_most = largest or (_largest(x, 0, recipe), _largest(w, 1, recipe))
        by_row = _largest(g, 1, recipe)
        by_column = _largest(g, 0, recipe) if recipe.rowwise else by_row
        *numbers, turned, turned_inverse = float8_both(g, by_row, by_column, scaling, True)
        dx = float8_product_of(*numbers, w, w_most, scaling, False)
        x_numbers = float8_numbers(x.t(), x_most, scaling, False)
        return dx, float8_product(*x_numbers, turned, turned_inverse, False)

    fused = Fused("float8_linear", forward=forward, backward=backward)
    return fused(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[1])


@operator(
    "float8_emulated(Tensor a, Tensor b, str scaling, bool a_gradient, bool b_gradient) -> Tensor",
    lambda a, b, *_: a.new_empty(a.shape[0], b.shape[1]),
    flop=graph_passes.product,
)
def float8_emulated(a: Tensor, b: Tensor, scaling: str, a_gradient: bool, b_gradient: bool) -> Tensor:
    """`product_reference` as one node of a graph: the same bits whether compiled or not."""
    return product_reference(a, b, scaling, a_gradient, b_gradient)


def _emulated(x: Tensor, w: Tensor, scaling: str = "tensorwise") -> Tensor:
    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        (x, w), (g,) = saved, grads
        return float8_emulated(g, w.t(), scaling, True, False), float8_emulated(x.t(), g, scaling, False, True)

    def forward(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (float8_emulated(x, w, scaling, False, False),)

    fused = Fused("float8_linear", forward=forward, backward=backward)
    return fused(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[1])


def least_capability(scaling: str) -> tuple[int, int]:
    """The compute capability from which on a GPU has float8 products with such scales.

    >>> least_capability("rowwise")
    (9, 0)
    """
    return (9, 0) if recipe_of(scaling).rowwise else (8, 9)


@functools.cache
def cpu_lacks(scaling: str) -> str:
    """Why this CPU has no float8 products with such scales; "" if it has them."""
    recipe = recipe_of(scaling)
    torch_private.avx2_supported()  # lets torch look at the CPU, which else it may do between two products
    with torch_private.disable_current_modes():  # on real tensors, also if all others are fake
        scale = torch.ones((16, 1) if recipe.rowwise else ())
        for first, second in ((recipe.value,) * 2, (recipe.gradient, recipe.value), (recipe.value, recipe.gradient)):
            a, b = (torch.zeros(16, 16).to(dtype) for dtype in (first, second))
            scales = {"scale_a": scale, "scale_b": scale.t()}
            try:
                torch_private.scaled_mm(a, b.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=False)
            except RuntimeError as error:
                return f"this CPU has no {scaling} float8 product: {str(error).partition(chr(10))[0][:80]}"
    return ""


def _supports(x: Tensor, w: Tensor, scaling: str = "tensorwise") -> str:
    min_capability = least_capability(scaling)
    sizes = (x.shape[:-1].numel(), *w.shape)
    if x.dtype != torch.bfloat16 or w.dtype != torch.bfloat16:
        return f"the dtypes are {x.dtype} and {w.dtype}; it takes two of bfloat16"
    if not all(size and size % 16 == 0 for size in sizes):
        return f"{sizes[0]} rows times {list(w.shape)}: the matrix units take multiples of 16"
    if kind_of(x) == "cuda" and target_of(x).capability < min_capability:
        return f"the device has compute capability {target_of(x).capability}; {scaling} needs {min_capability}"
    return triton_runs(x, w) or (cpu_lacks(scaling) if kind_of(x) == "cpu" else "")


float8_linear = Op(
    "float8_linear",
    float8_linear_reference,
    Form("scaled_mm", _by_scaled_mm, supports=_supports, prefers=on_cuda),
    Form("emulated", _emulated, supports=lambda x, w, scaling="tensorwise": recipe_of(scaling) and ""),
    flops=lambda x, w, scaling="tensorwise": 2 * x.numel() * w.shape[1],
    bytes=lambda x, w, scaling="tensorwise": (
        (x.numel() + w.numel() + x.numel() // w.shape[0] * w.shape[1]) * x.element_size()
    ),
)


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    for name, unit_stride, transposed in (
        ("rows", "stride_c", False),
        ("transposed", "stride_r", False),
        ("both", "stride_c", True),
    ):
        for config in CONFIGS[None if transposed else True].for_gpu(gpu):
            for out, limit, rowwise in (("fp8e4nv", 448.0, True), ("fp8e5", 57344.0, False)):
                types = f"OUT:*{out} OUT_T:*{out} INVERSE:*fp32 INVERSE_T:*fp32 R:i32 C:i32 {unit_stride}:constexpr"
                constants = {unit_stride: 1, "SMALLEST": SMALLEST, "LIMIT": limit, "POWERS_OF_2": rowwise}
                constants |= {"ROWWISE": rowwise, "BOTH": transposed}
                aligned = ("R", "C", "stride_r" if unit_stride == "stride_c" else "stride_c")
                label = f"{name} {out} {config['BLOCK_R']}x{config['BLOCK_C']}"
                yield build(_quantise, label, config, constants, types, aligned=aligned)
