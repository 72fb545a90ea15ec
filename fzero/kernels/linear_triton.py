"""The canonical products of linear.py on GPUs: tiles of one size whatever the number of rows, and no split of K.

An element of x w is the sum over tiles of K in their order, each by the matrix units, whose order inside a tile is that
of their instruction. A library chooses its tiles, and how many programs share a sum, by the number of rows; here only
the dtype chooses. So a row has the same bits alone, in a batch and in a chunk.

Shapes: x [M, K], w [K, N] with any strides, out [M, N] in x's dtype or float32; the sums are in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fzero.kernels import tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.attention_tiles import dot
from fzero.kernels.custom_operator import INTERPRETED, tl, triton

# One row each, which no search replaces: other tiles are other bits.
CONFIGS = {wide: tuning.ConfigTable(f"_row_product {'float32' if wide else 'half'}") for wide in (False, True)}


# M is no constant of the code and none of its properties, so that one row and many run the same code.
@triton.jit(do_not_specialize=["m"])
def _row_product(
    X, W, OUT, m, k, n, x_row, w_row, w_column, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    # Programs (tile of rows, tile of columns); those of one tile of columns follow each other and share it.
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(0, k, BLOCK_K):
        inner = i + tl.arange(0, BLOCK_K)
        x = tl.load(X + row * x_row + inner[None, :], mask=(row < m) & (inner < k)[None, :], other=0.0)
        pointers = W + inner.to(tl.int64)[:, None] * w_row + column * w_column
        w = tl.load(pointers, mask=(inner < k)[:, None] & (column < n), other=0.0)
        total += dot(x, w, UPCAST)
    tl.store(OUT + row * n + column, total.to(OUT.dtype.element_ty), mask=(row < m) & (column < n))


def row_product(x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """x [M, K] @ w [K, N], rounded once to `dtype`."""
    (m, k), n, x = x.shape, w.shape[1], x.contiguous()
    out = x.new_empty((m, n), dtype=dtype)
    if out.numel():
        blocks = tuning.rows(CONFIGS[x.dtype == torch.float32], x.device)[0]
        grid = triton.cdiv(m, blocks["BLOCK_M"]), triton.cdiv(n, blocks["BLOCK_N"])
        _row_product[grid](x, w, out, m, k, n, k, *w.stride(), UPCAST=INTERPRETED, **blocks)
    return out


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`: of w [K, N], and of the transpose of [V, K], whose result is float32."""
    for wide, blocks in ((wide, table.for_gpu(gpu)[0]) for wide, table in CONFIGS.items()):
        dtype = "*fp32" if wide else "*bf16"
        for label, types, strides in (
            ("by rows", "w_column:constexpr", ("w_row", "n")),
            ("by columns", "w_row:constexpr OUT:*fp32", ("w_column", "n")),
        ):
            constants = {"UPCAST": False, types.partition(":")[0]: 1}
            aligned = ("k", "x_row", *strides)
            label = f"{dtype[1:]} {label}"
            yield build(_row_product, label, blocks, constants, types, dtype, matrix=not wide, aligned=aligned)
