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

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import torch_private
from fzero.core.device import kind_of, target_of
from fzero.core.pytree import nearest
from fzero.kernels import chips, tuning
from fzero.kernels.aot import Build
from fzero.kernels.op_function import Fused, on_cuda, operator, triton_runs
from fzero.kernels.optional_triton import tl, triton
from fzero.kernels.registry import Form, Op

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 1e-12  # the lower bound of max |A|
CONFIGS = {True: chips.Table("_quantise rows"), False: chips.Table("_quantise columns")}  # by the order of x


class Recipe(NamedTuple):
    """How operands are scaled."""

    rowwise: bool  # a scale for each row of the first operand and each column of the second; else one for an operand
    powers_of_2: bool
    value: torch.dtype
    gradient: torch.dtype


RECIPES = {"tensorwise": Recipe(False, False, E4M3, E5M2), "rowwise": Recipe(True, True, E4M3, E4M3)}


def recipe_of(scaling: str) -> Recipe:
    """The recipe of this name; raises ValueError naming those there are."""
    if scaling not in RECIPES:
        raise ValueError(
            f"float8: scaling is {scaling!r}{nearest(scaling, RECIPES)}; it must be one of {', '.join(RECIPES)}"
        )
    return RECIPES[scaling]


def max_magnitude(x: Tensor, dim: int | None) -> Tensor:
    """max |x| over a dim, or over all dims, with dims of size 1 kept; 0 for an empty tensor."""
    over = dim if dim is not None else tuple(range(x.dim()))
    kept = [1 if dim is None or i == dim % x.dim() else size for i, size in enumerate(x.shape)]
    return x.abs().amax(over, keepdim=True) if x.numel() else x.new_zeros(kept)


def scale_of(amax: Tensor, dtype: torch.dtype, powers_of_2: bool) -> Tensor:
    """The float32 scale that maps `amax` to the largest number of the format."""
    amax = amax.to(torch.float32)
    scale = torch.finfo(dtype).max / torch.where(amax < SMALLEST, SMALLEST, amax)
    # The exponent alone. From NaN that makes another number, but the product with the NaN in x is NaN whatever the
    # scale.
    return (scale.view(torch.int32) & -0x800000).view(torch.float32) if powers_of_2 else scale


def quantise(x: Tensor, dtype: torch.dtype, dim: int | None, powers_of_2: bool) -> tuple[Tensor, Tensor]:
    """(float8 numbers of x, the float32 inverse of their scale): one scale along `dim`, or one for all.

    Multiplied in float32 or wider, rounded to nearest even. No clamping is needed: only the rounding of the scale can
    exceed the largest number, and the cast rounds back to it.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = scale_of(max_magnitude(wide, dim), dtype, powers_of_2)
    return (wide * scale).to(dtype), 1.0 / scale


def product_reference(a: Tensor, b: Tensor, scaling: str, a_gradient: bool, b_gradient: bool) -> Tensor:
    """a [M, K] b [K, N] through float8: products of the numbers in float32 or wider, each exact; sums as
    torch's are.
    """
    recipe = recipe_of(scaling)
    formats = [recipe.gradient if gradient else recipe.value for gradient in (a_gradient, b_gradient)]
    qa, ia = quantise(a, formats[0], 1 if recipe.rowwise else None, recipe.powers_of_2)
    qb, ib = quantise(b, formats[1], 0 if recipe.rowwise else None, recipe.powers_of_2)
    wide = torch.promote_types(a.dtype, torch.float32)
    return ((qa.to(wide) @ qb.to(wide)) * (ia * ib)).to(a.dtype)


class _Product(torch.autograd.Function):
    """The float8 product with derivatives that are float8 products too, each cotangent being rounded as a
    gradient.

    Rounding itself has no part in them (straight through). Under vmap each row has its own scales.
    """

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
        parts = [] if ta is None else [_Product.apply(ta, b, scaling, True, b_gradient)]
        parts += [] if tb is None else [_Product.apply(a, tb, scaling, a_gradient, True)]
        return sum(parts[1:], parts[0])


def float8_linear_reference(x: Tensor, w: Tensor, scaling: str = "tensorwise") -> Tensor:
    """x [..., in] w [in, out] through float8, in x's dtype, on any device: the same numbers as on the matrix units but
    for the order of the sums (see `product_reference`).
    """
    recipe_of(scaling)
    return _Product.apply(x.reshape(-1, x.shape[-1]), w, scaling, False, False).reshape(*x.shape[:-1], w.shape[1])


@triton.jit
def _quantise(
    X,
    AMAX,
    OUT,
    INVERSE,
    R,
    C,
    stride_r,
    stride_c,
    stride_amax,
    SMALLEST: tl.constexpr,
    LIMIT: tl.constexpr,
    POWERS_OF_2: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # A program quantises a tile [BLOCK_R, BLOCK_C]; program_id(0) is the tile of rows, program_id(1) that of columns.
    # stride_amax is 1 for one scale per row and 0 for one of all; the programs of the first column tile store the
    # inverse scales. OUT is contiguous [R, C].
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    amax = tl.load(AMAX + row * stride_amax, mask=row < R, other=1.0).to(tl.float32)
    scale = tl.div_rn(tl.full((BLOCK_R,), LIMIT, tl.float32), tl.where(amax < SMALLEST, SMALLEST, amax))
    if POWERS_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(tl.full((BLOCK_R,), 1.0, tl.float32), scale)
    tl.store(INVERSE + row * stride_amax, inverse, mask=row < tl.where(tl.program_id(1) == 0, R, 0))
    live = (row[:, None] < R) & (col[None, :] < C)
    x = tl.load(X + row[:, None] * stride_r + col[None, :] * stride_c, mask=live, other=0.0).to(tl.float32)
    tl.store(OUT + row[:, None] * C + col[None, :], (x * scale[:, None]).to(OUT.dtype.element_ty), mask=live)


def _quantise_by_triton(x: Tensor, dtype: torch.dtype, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """`quantise` along dim 1 or of all, in Triton: (numbers in order of rows, inverse scales [R, 1] or []). x may have
    any strides.
    """
    rows, columns = x.shape
    amax = torch.linalg.vector_norm(x, torch.inf, dim=1 if recipe.rowwise else None)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    inverse = torch.empty(amax.shape, dtype=torch.float32, device=x.device)
    constants = {"SMALLEST": SMALLEST, "LIMIT": torch.finfo(dtype).max, "POWERS_OF_2": recipe.powers_of_2}
    in_rows = x.stride(1) == 1

    def grid(config: tuning.Config) -> tuple[int, int]:
        return triton.cdiv(rows, config["BLOCK_R"]), triton.cdiv(columns, config["BLOCK_C"])

    given = (x, amax, out, inverse, rows, columns, *x.stride(), int(recipe.rowwise))
    tuning.launch(_quantise, grid, given, CONFIGS[in_rows], shape=(rows, columns, in_rows, x.dtype), **constants)
    return out, inverse[:, None] if recipe.rowwise else inverse


@operator(
    "float8_product(Tensor a, Tensor b, str scaling, bool a_gradient, bool b_gradient) -> Tensor",
    lambda a, b, *_: a.new_empty(a.shape[0], b.shape[1]),
)
def float8_product(a: Tensor, b: Tensor, scaling: str, a_gradient: bool, b_gradient: bool) -> Tensor:
    """a [M, K] b [K, N] through float8 by torch._scaled_mm, of any strides, M, N and K multiples of 16.

    The matrix units add with fewer bits if both operands are values, or the scaling is rowwise (use_fast_accum, as
    torchao does).
    """
    recipe = recipe_of(scaling)
    qa, ia = _quantise_by_triton(a, recipe.gradient if a_gradient else recipe.value, recipe)
    qb, ib = _quantise_by_triton(b.t(), recipe.gradient if b_gradient else recipe.value, recipe)
    fast = recipe.rowwise or not (a_gradient or b_gradient)
    return torch_private.scaled_mm(qa, qb.t(), scale_a=ia, scale_b=ib.t(), out_dtype=a.dtype, use_fast_accum=fast)


@operator(
    "float8_emulated(Tensor a, Tensor b, str scaling, bool a_gradient, bool b_gradient) -> Tensor",
    lambda a, b, *_: a.new_empty(a.shape[0], b.shape[1]),
)
def float8_emulated(a: Tensor, b: Tensor, scaling: str, a_gradient: bool, b_gradient: bool) -> Tensor:
    """`product_reference` as one node of a graph: the same bits whether compiled or not."""
    return product_reference(a, b, scaling, a_gradient, b_gradient)


def _linear_form(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def linear(x: Tensor, w: Tensor, scaling: str = "tensorwise") -> Tensor:
        def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
            (x, w), (g,) = saved, grads
            return product(g, w.t(), scaling, True, False), product(x.t(), g, scaling, False, True)

        fused = Fused("float8_linear", forward=lambda x, w: (product(x, w, scaling, False, False),), backward=backward)
        return fused(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[1])

    return linear


def least_capability(scaling: str) -> tuple[int, int]:
    """The compute capability from which on a GPU has float8 products with such scales.

    >>> least_capability("rowwise")
    (9, 0)
    """
    return (9, 0) if recipe_of(scaling).rowwise else (8, 9)


def _supports(x: Tensor, w: Tensor, scaling: str = "tensorwise") -> str:
    least = least_capability(scaling)
    sizes = (x.shape[:-1].numel(), *w.shape)
    if x.dtype != torch.bfloat16 or w.dtype != torch.bfloat16:
        return f"the dtypes are {x.dtype} and {w.dtype}; it takes two of bfloat16"
    if not all(size and size % 16 == 0 for size in sizes):
        return f"{sizes[0]} rows times {list(w.shape)}: the matrix units take multiples of 16"
    if kind_of(x) == "cuda" and target_of(x).capability < least:
        return f"the device has compute capability {target_of(x).capability}; {scaling} needs {least}"
    return triton_runs(x, w)


float8_linear = Op(
    "float8_linear",
    float8_linear_reference,
    Form("scaled_mm", _linear_form(float8_product), supports=_supports, prefers=on_cuda),
    Form(
        "emulated", _linear_form(float8_emulated), supports=lambda x, w, scaling="tensorwise": recipe_of(scaling) and ""
    ),
    flops=lambda x, w, scaling="tensorwise": 2 * x.numel() * w.shape[1],
    bytes=lambda x, w, scaling="tensorwise": (
        (x.numel() + w.numel() + x.numel() // w.shape[0] * w.shape[1]) * x.element_size()
    ),
)


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    pointers = {"X": "*bf16", "AMAX": "*bf16", "OUT": "*fp8e4nv", "INVERSE": "*fp32"}
    sizes = dict.fromkeys(("R", "C", "stride_r", "stride_c", "stride_amax"), "i32")
    constants = dict.fromkeys(("SMALLEST", "LIMIT", "POWERS_OF_2", "BLOCK_R", "BLOCK_C"), "constexpr")
    for config in CONFIGS[True].on(gpu):
        for name, one in (("rows", "stride_c"), ("transposed", "stride_r")):
            for out, limit, rowwise in (("*fp8e4nv", 448.0, True), ("*fp8e5", 57344.0, False)):
                signature = pointers | {"OUT": out} | sizes | {one: "constexpr", "stride_amax": "constexpr"} | constants
                given = {
                    one: 1,
                    "stride_amax": int(rowwise),
                    "SMALLEST": SMALLEST,
                    "LIMIT": limit,
                    "POWERS_OF_2": rowwise,
                }
                aligned = ("R", "C", "stride_r" if one == "stride_c" else "stride_c")
                label = f"_quantise {name} {out[1:]} {config['BLOCK_R']}x{config['BLOCK_C']}"
                yield Build(label, "_quantise", signature, given, config, aligned=aligned)
