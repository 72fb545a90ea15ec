"""RMSNorm and LayerNorm in Triton, forward and backward: the definitions are in norm.

With n the normed row, d = grad * scale and N columns, the gradients are

    dx = r (d - n mean(d n) [- mean(d)]) [+ grad of s],   dscale = sum of grad n over the rows,   dbias = sum of grad

in brackets LayerNorm's and the sum's. dscale and dbias are summed in an order that depends on the shape and the device
alone: each program of a fixed number adds up its rows, and the programs' sums are added in their order.
Ref, variance over chunks: Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample
variances".
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fzero.core import gpu
from fzero.kernels import tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.custom_operator import (
    Fused,
    bits_of,
    largest_like,
    operator_with_largest,
    store_largest,
    tl,
    triton,
)

# The longest rows that a program holds in registers; it reads longer ones twice, CHUNK columns at a time.
WHOLE = {"_norm_forward": 16384, "_norm_backward": 8192}
CHUNK = 4096


@triton.jit
def _read(X, R, x_at, r_at, mask, ADD: tl.constexpr):
    """x in float32, or x + r as rounded to their dtype."""
    x = tl.load(X + x_at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(R + r_at, mask=mask, other=0.0).to(tl.float32)
        # The sum is stored in its dtype, and normed as it is stored: the backward pass reads that one.
        x = x.to(X.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _param(W, X, columns, N):
    """Load a row of parameters rounded to x's dtype, as float32."""
    return tl.load(W + columns, mask=columns < N, other=0.0).to(X.dtype.element_ty).to(tl.float32)


@triton.jit
def _moments(x, mask, n, LAYER: tl.constexpr):
    """(mean, sum of squared deviations) over the n unmasked columns of a tile; of RMSNorm from 0."""
    mean = tl.sum(x, 1) / n
    if LAYER:
        # Masked columns were loaded as 0, and would deviate by the mean.
        x = tl.where(mask, x - mean[:, None], 0.0)
    return mean, tl.sum(x * x, 1)


@triton.jit
def _norm_forward(
    X, R, W, B, Y, S, STATS, MOST, M, N, x_row, r_row, eps,
    LAYER: tl.constexpr, ADD: tl.constexpr, LARGEST: tl.constexpr, IS_WHOLE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # A program normalises ROWS rows of M; rows of x and r are x_row and r_row elements apart, those of the results N.
    # Masks: row < M for the last program, column < N because BLOCK is a power of two. Row numbers are int64: row *
    # stride may pass 2^31. With LARGEST, MOST is the largest magnitude of each row of Y.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    inside = (row < M)[:, None]
    x_at, r_at, y_at = (row * x_row)[:, None], (row * r_row)[:, None], (row * N)[:, None]
    if IS_WHOLE:
        mask = inside & (cols < N)
        x = _read(X, R, x_at + cols, r_at + cols, mask, ADD)
        mean, squares = _moments(x, mask, N, LAYER)
    else:
        mean, squares = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        for start in range(0, N, BLOCK):
            columns = start + cols
            mask = inside & (columns < N)
            # The last chunk may be shorter; BLOCK masked columns are no columns of the mean.
            n = tl.minimum(N - start, BLOCK)
            m, s = _moments(_read(X, R, x_at + columns, r_at + columns, mask, ADD), mask, n, LAYER)
            squares += s
            if LAYER:  # Chan et al.: join the moments of `start` columns so far with those of n more
                step = (m - mean) * (n / (start + n))
                squares += step * (m - mean) * start
                mean += step
    rstd = tl.rsqrt(squares / N + eps)
    magnitudes = tl.zeros([ROWS], tl.int32)
    tl.store(STATS + row, rstd, mask=row < M)
    if LAYER:
        tl.store(STATS + M + row, mean, mask=row < M)
    for start in range(0, BLOCK if IS_WHOLE else N, BLOCK):
        columns = start + cols
        mask = inside & (columns < N)
        if not IS_WHOLE:
            x = _read(X, R, x_at + columns, r_at + columns, mask, ADD)
        if ADD:
            tl.store(S + y_at + columns, x.to(S.dtype.element_ty), mask=mask)
        # Rounded after each step, as plain torch in that dtype rounds: normed, times the scale, plus the bias.
        y = ((x - mean[:, None]) if LAYER else x) * rstd[:, None]
        y = y.to(Y.dtype.element_ty).to(tl.float32) * _param(W, X, columns, N)
        if LAYER:
            y = y.to(Y.dtype.element_ty).to(tl.float32) + _param(B, X, columns, N)
        y = y.to(Y.dtype.element_ty)
        tl.store(Y + y_at + columns, y, mask=mask)
        if LARGEST:
            magnitudes = tl.maximum(magnitudes, tl.max(tl.where(mask, bits_of(y), 0), 1))
    if LARGEST:
        store_largest(MOST, row, magnitudes, row < M)


@triton.jit
def _load_normed(G, X, g_at, x_at, mask, w, mean, rstd, LAYER: tl.constexpr):
    """Load a tile; return (gradient g, d = g * scale, normalised x), in float32."""
    g = tl.load(G + g_at, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(X + x_at, mask=mask, other=0.0).to(tl.float32)
    return g, g * w, ((x - mean[:, None]) if LAYER else x) * rstd[:, None]


@triton.jit
def _norm_backward(
    G, GS, X, W, STATS, DX, PARTS, MOST, M, N, g_row, gs_row, x_row,
    LAYER: tl.constexpr, ADD: tl.constexpr, LARGEST: tl.constexpr, IS_WHOLE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # Program p handles the tiles of ROWS rows p, p + programs, ... in this order, and writes its own row of PARTS:
    # dscale [programs, N], then dbias [programs, N] if LAYER. The caller sums these over programs, so the order of
    # every sum is fixed. With LARGEST, MOST is the largest magnitude of each row of DX.
    pid, programs = tl.program_id(0), tl.num_programs(0)
    cols, lanes = tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK)
    DW, DB = PARTS + pid.to(tl.int64) * N, PARTS + (programs + pid).to(tl.int64) * N  # this program's rows
    if IS_WHOLE:
        w = _param(W, X, cols, N)
        # By row of the tile and column: added up over the rows once, at the end.
        dw = tl.zeros([ROWS, BLOCK], tl.float32)
        if LAYER:
            db = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(pid, tl.cdiv(M, ROWS), programs):
        row = tl.arange(0, ROWS).to(tl.int64) + tile * ROWS
        inside = (row < M)[:, None]
        g_at, gs_at, x_at, dx_at = (
            (row * g_row)[:, None],
            (row * gs_row)[:, None],
            (row * x_row)[:, None],
            (row * N)[:, None],
        )
        rstd = tl.load(STATS + row, mask=row < M, other=0.0)
        mean = tl.load(STATS + M + row, mask=row < M, other=0.0) if LAYER else rstd
        if IS_WHOLE:
            g, d, n = _load_normed(G, X, g_at + cols, x_at + cols, inside & (cols < N), w, mean, rstd, LAYER)
            # The two sums of a row that dx needs; each is along the whole row, so a long one is read twice.
            along, total = tl.sum(d * n, 1), tl.sum(d, 1)
            dw += g * n
            if LAYER:
                db += g
        else:
            along, total = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
            for start in range(0, N, BLOCK):
                columns = start + cols
                w = _param(W, X, columns, N)
                g, d, n = _load_normed(
                    G, X, g_at + columns, x_at + columns, inside & (columns < N), w, mean, rstd, LAYER
                )
                along += tl.sum(d * n, 1)
                total += tl.sum(d, 1)
        magnitudes = tl.zeros([ROWS], tl.int32)
        for start in range(0, BLOCK if IS_WHOLE else N, BLOCK):
            columns = start + cols
            mask = inside & (columns < N)
            if not IS_WHOLE:
                w = _param(W, X, columns, N)
                g, d, n = _load_normed(G, X, g_at + columns, x_at + columns, mask, w, mean, rstd, LAYER)
                i = start + lanes
                has_sum = i < tl.where(tile == pid, 0, N)  # the program's first tile overwrites uninitialised memory
                tl.store(DW + i, tl.load(DW + i, mask=has_sum, other=0.0) + tl.sum(g * n, 0), mask=i < N)
                if LAYER:
                    tl.store(DB + i, tl.load(DB + i, mask=has_sum, other=0.0) + tl.sum(g, 0), mask=i < N)
            # Masked rows have rstd 0 and masked columns g and x 0; neither is stored.
            dx = d - n * (along / N)[:, None]
            if LAYER:
                dx -= (total / N)[:, None]
            dx *= rstd[:, None]
            if ADD:
                dx += tl.load(GS + gs_at + columns, mask=mask, other=0.0).to(tl.float32)
            dx = dx.to(DX.dtype.element_ty)
            tl.store(DX + dx_at + columns, dx, mask=mask)
            if LARGEST:
                magnitudes = tl.maximum(magnitudes, tl.max(tl.where(mask, bits_of(dx), 0), 1))
        if LARGEST:
            store_largest(MOST, row, magnitudes, row < M)
        if not IS_WHOLE:
            tl.debug_barrier()  # the next tile reads values of DW that other threads wrote
    if IS_WHOLE:
        tl.store(DW + lanes, tl.sum(dw, 0), mask=lanes < N)
        if LAYER:
            tl.store(DB + lanes, tl.sum(db, 0), mask=lanes < N)


def _config(kernel: str, n: int) -> tuning.Config:
    """The default configuration, 16 elements a thread: several short rows to a program, long rows in chunks."""
    if n <= WHOLE[kernel]:
        block = triton.next_power_of_2(n)
        rows = max(1, 2048 // block)
    else:
        # The backward pass takes several long rows at a time if they should stay in the cache between its two reads.
        block, rows = CHUNK, max(1, 8 * CHUNK // triton.next_power_of_2(n)) if kernel == "_norm_backward" else 1
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(32, max(4, rows * block // 512))}


def _tuned_config(kernel: triton.JITFunction, x: Tensor, layer: bool) -> tuning.Config:
    name, n = kernel.__name__, x.shape[-1]
    return tuning.config(name, (n, x.dtype, layer), _config(name, n), x.device)


def _programs(device: torch.device, warps: int) -> int:
    """The number of programs of the backward pass, 16 warps per multiprocessor; it orders the sums."""
    # The order of the sums depends on this number, and on nothing else of the machine.
    if device.type != "cuda":
        return 4
    return gpu.properties(device).multi_processor_count * max(1, 16 // warps)


def _rows(t: Tensor) -> Tensor:
    """t as [M, N] with its columns side by side; a copy only if the strides need one."""
    t = t.reshape(-1, t.shape[-1])
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def _forward(
    x: Tensor, residual: Tensor | None, scale: Tensor, bias: Tensor | None, eps: float, largest: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(normed, the sum, statistics, largest magnitudes of normed rows): see the operators."""
    layer, add, m, n = bias is not None, residual is not None, math.prod(x.shape[:-1]), x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y) if add else y
    stats = torch.empty((1 + layer, m), dtype=torch.float32, device=x.device)
    magnitudes = largest_like(x) if largest else y
    if y.numel():
        config = _tuned_config(_norm_forward, x, layer)
        x, scale = _rows(x), scale.contiguous()
        r = x if residual is None else _rows(residual)
        b = scale if bias is None else bias.contiguous()
        flags = {"LAYER": layer, "ADD": add, "LARGEST": largest, "IS_WHOLE": n <= config["BLOCK"]}
        grid, strides = (triton.cdiv(m, config["ROWS"]),), (x.stride(0), r.stride(0))
        _norm_forward[grid](x, r, scale, b, y, total, stats, magnitudes, m, n, *strides, eps, **flags, **config)
    return y, total, stats, magnitudes


def _stats_like(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((1 + (bias is not None), math.prod(x.shape[:-1])), dtype=torch.float32)


@operator_with_largest(
    "norm_forward(Tensor x, Tensor scale, Tensor? bias, float eps) -> (Tensor, Tensor)",
    lambda x, scale, bias, eps: (x.new_empty(x.shape), _stats_like(x, bias)),
)
def norm_forward(x: Tensor, scale: Tensor, bias: Tensor | None, eps: float, *, largest: bool) -> tuple[Tensor, ...]:
    """(x normed, statistics float32 [1 or 2, M]) of the M rows; with a bias LayerNorm's."""
    y, _, *more = _forward(x, None, scale, bias, eps, largest)
    return y, *more[: 1 + largest]


@operator_with_largest(
    "add_norm_forward(Tensor x, Tensor residual, Tensor scale, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    lambda x, residual, scale, bias, eps: (x.new_empty(x.shape), x.new_empty(x.shape), _stats_like(x, bias)),
)
def add_norm_forward(
    x: Tensor, residual: Tensor, scale: Tensor, bias: Tensor | None, eps: float, *, largest: bool
) -> tuple[Tensor, ...]:
    """(the sum normed, the sum x + residual, statistics of the sum as of norm_forward)."""
    return _forward(x, residual, scale, bias, eps, largest)[: 3 + largest]


@operator_with_largest(
    "norm_backward(Tensor g, Tensor? total_g, Tensor x, Tensor scale, Tensor stats) -> (Tensor, Tensor)",
    lambda g, total_g, x, scale, stats: (x.new_empty(x.shape), stats.new_empty((stats.shape[0], x.shape[-1]))),
)
def norm_backward(
    g: Tensor, total_g: Tensor | None, x: Tensor, scale: Tensor, stats: Tensor, *, largest: bool
) -> tuple[Tensor, ...]:
    """(gradient by x, float32 [1 or 2, N] by scale and by bias) from the gradient g of x normed."""
    add, (kinds, m), n = total_g is not None, stats.shape, x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    magnitudes = largest_like(x) if largest else dx
    if not dx.numel():
        return dx, stats.new_zeros((kinds, n)), *[magnitudes] * largest
    config = _tuned_config(_norm_backward, x, kinds == 2)
    programs = min(triton.cdiv(m, config["ROWS"]), _programs(x.device, config["num_warps"]))
    parts = stats.new_empty((kinds, programs, n))
    g, x = _rows(g), _rows(x)
    gs = g if total_g is None else _rows(total_g)
    flags = {"LAYER": kinds == 2, "ADD": add, "LARGEST": largest, "IS_WHOLE": n <= config["BLOCK"]}
    strides = g.stride(0), gs.stride(0), x.stride(0)
    arguments = g, gs, x, scale.contiguous(), stats, dx, parts, magnitudes, m, n, *strides
    _norm_backward[(programs,)](*arguments, **flags, **config)
    return dx, parts.sum(1), *[magnitudes] * largest


def fused_norm(label: str, add: bool, layer: bool, eps: float) -> Fused:
    """The differentiable function of (x, residual if `add`, scale, bias if `layer`)."""

    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return (add_norm_forward if add else norm_forward)(*tensors, *([] if layer else [None]), eps)

    def select_saved(tensors: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (outputs[1] if add else tensors[0], outputs[-1], *tensors[1 + add :])

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, stats, *params = saved
        dx, dparams = norm_backward(grads[0], grads[1] if add else None, x, params[0], stats)
        # Both terms of a sum have one gradient, and get one tensor, as from torch's own sum.
        return *([dx] * (1 + add)), *(d.to(p.dtype) for d, p in zip(dparams, params))

    return Fused(label, forward, backward, results=1 + add, select_saved=select_saved)


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`: the forms with a sum, for the sizes at which the configuration changes."""
    types = "W:*fp32 B:*fp32 STATS:*fp32 PARTS:*fp32 eps:fp32 M:i32 N:i32"
    for kernel in (_norm_forward, _norm_backward):
        aligned = tuple(name for name in kernel.arg_names if name == "N" or name.endswith("_row"))
        for layer, largest in ((False, False), (True, False), (False, True)):
            for n in (128, 1024, 4096, 8192, 16384, 65536):
                config = _config(kernel.__name__, n)
                flags = {"LAYER": layer, "ADD": True, "LARGEST": largest, "IS_WHOLE": n <= config["BLOCK"]}
                label = f"{'layer' if layer else 'rms'}{', largest,' * largest} {n}"
                # Triton 3.7's ptxas spills two registers of the widest LayerNorm held whole; that of 3.9 none.
                spills = 8 if kernel is _norm_forward and layer and n == 8192 else 0
                yield build(kernel, label, config, flags, types, aligned=aligned, spills=spills)
