"""The approximate orthogonal (polar) factor of a matrix by Newton-Schulz iterations, for Muon.

    X = x / max(||x||, eps);  then `steps` times:  A = X X^T;  P = b A + c A A;  X = a X + P X

on the wide form of each matrix. A and P are symmetric: the kernel computes the lower triangle of tiles and writes each
on both sides, which saves half of the products of these two steps (of three equal ones where the matrix is square); b A
is added before P is rounded.
Ref: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks",
section "Design considerations".

Shapes: x [..., M, N] in any floating dtype; the result has `dtype`, in which it is computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fzero.kernels import tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.custom_operator import INTERPRETED, Fused, on_cuda, operator, tl, triton, triton_runs
from fzero.kernels.registry import Form, Op

# The steepest slope at 0 for which five steps keep singular values near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
CONFIGS = tuning.ConfigTable("_symmetric")  # the first for many programs, the second for few


def _plain(x: Tensor, add: Tensor | None, alpha: float, beta: float) -> Tensor:
    # A power of a symmetric matrix, so x and not its transpose: the same bits as before on a CPU.
    return torch.bmm(x, x.mT) if add is None else torch.baddbmm(add, x, x, beta=beta, alpha=alpha)


def newton_schulz_reference(
    x: Tensor,
    steps: int = 5,
    *,
    dtype: torch.dtype | None = None,
    coefficients: tuple[float, ...] = COEFFICIENTS,
    eps: float = 1e-7,
    product: Callable[..., Tensor] = _plain,
) -> Tensor:
    """The iterations by batched products: the definition."""
    a, b, c = coefficients
    x = x.to(dtype or x.dtype).contiguous()  # products of other strides round differently
    shape, tall = x.shape, x.shape[-2] > x.shape[-1]
    # One batch dim, for baddbmm: it rounds once where a product and a sum would round twice.
    x = x.reshape(math.prod(shape[:-2]), *shape[-2:])
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = product(x, None, 1.0, 0.0)
        x = torch.baddbmm(x, product(gram, gram, c, b), x, beta=a)
    return (x.mT if tall else x).reshape(shape)


@triton.jit
def _symmetric(
    X, ADD, OUT, m, k, alpha, beta, ADDS: tl.constexpr, UPCAST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Compute one tile (i, j), j <= i, of alpha X X^T + beta ADD, and store it and its transpose."""
    # Programs are numbered batch * triangle + t, where t = i (i + 1) / 2 + j numbers the tiles of the lower triangle
    # row by row, so i is the integer part of (sqrt(8 t + 1) - 1) / 2, corrected for rounding. Masks: rows and columns
    # beyond m; the mirror image not on the diagonal.
    tiles = tl.cdiv(m, BLOCK)
    triangle = tiles * (tiles + 1) // 2
    batch, t = (tl.program_id(0) // triangle).to(tl.int64), tl.program_id(0) % triangle
    i = ((tl.sqrt(t.to(tl.float32) * 8.0 + 1.0) - 1.0) * 0.5).to(
        tl.int32
    )  # the row of the triangle, but for a rounding
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    j = t - i * (i + 1) // 2
    rows, cols = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    # Matrices are contiguous [batch, m, k]. The second operand is X again, by the rows of tile j.
    rows_from, cols_from = X + (batch * m + rows)[:, None] * k, X + (batch * m + cols)[:, None] * k
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, k, BLOCK_K):
        offsets = start + tl.arange(0, BLOCK_K)[None, :]
        a = tl.load(rows_from + offsets, mask=(rows[:, None] < m) & (offsets < k), other=0.0)
        b = tl.load(cols_from + offsets, mask=(cols[:, None] < m) & (offsets < k), other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        # Both loads are zeros beyond m and k, and add nothing.
        acc = tl.dot(a, tl.trans(b), acc)
    acc = acc * alpha
    lower_mask = (rows[:, None] < m) & (cols[None, :] < m)
    if ADDS:
        acc += (
            tl.load(ADD + (batch * m + rows)[:, None] * m + cols[None, :], mask=lower_mask, other=0.0).to(tl.float32)
            * beta
        )
    # Rounded once, then stored twice: the result is symmetric bit for bit.
    out = acc.to(OUT.dtype.element_ty)
    tl.store(OUT + (batch * m + rows)[:, None] * m + cols[None, :], out, mask=lower_mask)
    # On the diagonal the mask is empty, as the tile has written all of itself.
    mirror_mask = (cols[:, None] < tl.where(i != j, m, 0)) & (rows[None, :] < m)
    tl.store(OUT + (batch * m + cols)[:, None] * m + rows[None, :], tl.trans(out), mask=mirror_mask)


def _shape(x: Tensor, add: Tensor | None, alpha: float, beta: float) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-2]))


def _triangle_flops(x: Tensor, *arguments: Any, out_val: Any = None) -> int:
    """Of a triangle of x x^T."""
    batch, m, k = x.shape
    return batch * m * (m + 1) * k  # its diagonal included, and mirrored


@operator(
    "symmetric_product(Tensor x, Tensor? add, float alpha, float beta) -> Tensor",
    _shape,
    flop=_triangle_flops,
)
def symmetric_product(x: Tensor, add: Tensor | None, alpha: float, beta: float) -> Tensor:
    """alpha x x^T + beta add of x [B, M, K], add symmetric or None, rounded once; half of the tiles."""
    x = x.contiguous()
    batch, m, k = x.shape
    out = torch.empty(batch, m, m, dtype=x.dtype, device=x.device)
    if out.numel():

        def grid(config: tuning.Config) -> tuple[int, ...]:
            tiles = triton.cdiv(m, config["BLOCK"])
            return (batch * tiles * (tiles + 1) // 2,)

        arguments = (x, out if add is None else add.contiguous(), out, m, k, alpha, beta)
        # Large tiles reuse more of what they load; small ones give every processor something to do.
        configs = tuning.rows(CONFIGS, x.device)
        default = configs[0] if batch * triton.cdiv(m, 128) * (triton.cdiv(m, 128) + 1) // 2 >= 128 else configs[1]
        constants = {"ADDS": add is not None, "UPCAST": INTERPRETED}
        tuning.launch(_symmetric, grid, arguments, CONFIGS, shape=(batch, m, k, x.dtype), default=default, **constants)
    return out


def _backward(x: Tensor, g: Tensor, alpha: float) -> Tensor:
    return alpha * torch.bmm(g + g.mT, x)


def _product(x: Tensor, add: Tensor | None, alpha: float, beta: float) -> Tensor:
    label = "newton_schulz"
    if add is None:
        product = Fused(
            label,
            lambda x: (symmetric_product(x, None, alpha, beta),),
            lambda saved, grads: (_backward(saved[0], grads[0], alpha),),
        )
        return product(x)
    two = Fused(
        label,
        lambda x, add: (symmetric_product(x, add, alpha, beta),),
        lambda saved, grads: (_backward(saved[0], grads[0], alpha), beta * grads[0]),
    )
    return two(x, add)


def _supports(x: Tensor, steps: int = 5, *, dtype: torch.dtype | None = None, **options: Any) -> str:
    if (dtype or x.dtype) not in (torch.bfloat16, torch.float16):
        return (
            f"it iterates in {dtype or x.dtype}; the kernel is for bfloat16 and float16, whose products the "
            "matrix units take"
        )
    return triton_runs(x)


def _flops(x: Tensor, steps: int = 5, **options: Any) -> int:
    m, n = sorted(x.shape[-2:])
    return (
        math.prod(x.shape[:-2]) * steps * (2 * m * m * n + m * (m + 1) * (m + n))
    )  # a triangle of A and of P, and P X


def _bytes(x: Tensor, steps: int = 5, *, dtype: torch.dtype | None = None, **options: Any) -> int:
    m, n = sorted(x.shape[-2:])
    matrix_bytes = steps * (4 * m * n + 4 * m * m) * (dtype or x.dtype).itemsize
    return math.prod(x.shape[:-2]) * (matrix_bytes + m * n * (x.element_size() + (dtype or x.dtype).itemsize))


newton_schulz = Op(
    "newton_schulz",
    newton_schulz_reference,
    Form("triton", functools.partial(newton_schulz_reference, product=_product), supports=_supports, prefers=on_cuda),
    flops=_flops,
    bytes=_bytes,
)


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    for config in CONFIGS.for_gpu(gpu):
        for adds in (False, True):
            label, constants = f"{'add ' * adds}{config['BLOCK']}x{config['BLOCK_K']}", {"ADDS": adds, "UPCAST": False}
            types = "alpha:fp32 beta:fp32"
            yield build(_symmetric, label, config, constants, types, matrix=True, aligned=("m", "k"))
