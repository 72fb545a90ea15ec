"""Rows of tokens to their experts and back, for a mixture of experts.

`permute` copies tokens to the rows that `moe_routing.group` numbered, and `unpermute` sums the rows of a token with its
weights. Neither waits for the device, and every sum has a fixed order.
Ref: Gale et al. 2022, "MegaBlocks", arXiv:2211.15841, section 5.2.

Shapes: tokens x [N, D], k choices of each, rows y [M, D] with M = N k, weights [N, k]; `order` and `inverse` int64 [M]
as in `moe_routing.Groups`: pair number n k + j is token n's choice j.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fzero.kernels import tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.custom_operator import Fused, on_cuda, operator, tl, triton, triton_runs
from fzero.kernels.moe_routing import refuse_dtype
from fzero.kernels.registry import Form, Op, asked_for

ROW_CONFIGS = tuning.ConfigTable("_permute")


def permute_reference(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Rows [M, D]: row r is the token of x [N, D] that pair order[r] belongs to."""
    return x[order // (len(order) // max(1, len(x)))]


def unpermute_reference(y: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """sum_j weights[n, j] y[inverse[n k + j]]: [N, D] of rows y [M, D], in y's dtype."""
    rows = y[inverse].reshape(*weights.shape, y.shape[-1])
    return (rows * weights[..., None].to(y.dtype)).sum(-2)


@triton.jit
def _spread(X, PLACE, OUT, D, K: tl.constexpr, BLOCK: tl.constexpr):
    # A program copies one token, BLOCK columns of it, to its K rows: read once, written K times. int64, as row * D may
    # pass 2^31.
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
    # One program adds up all rows of a token in the order of its choices, in float32: no atomic adds, so a second run
    # gives the same bits.
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(PLACE + token * K + k)
        y = tl.load(Y + row * D + col, mask=col < D, other=0.0).to(tl.float32)
        # Without weights this is the backward pass of `_spread`.
        if WEIGHTED:
            y = y * tl.load(WEIGHTS + token * K + k).to(tl.float32)
        total += y
    tl.store(OUT + token * D + col, total.to(OUT.dtype.element_ty), mask=col < D)


@triton.jit
def _collect_backward(Y, WEIGHTS, PLACE, G, DY, DWEIGHTS, D, K: tl.constexpr, BLOCK: tl.constexpr):
    # A program handles one pair (token, choice), hence one row of y: pair // K is its token.
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(PLACE + pair)
    w = tl.load(WEIGHTS + pair).to(tl.float32)
    # By column of a block, and added up once at the end.
    dw = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        col = start + tl.arange(0, BLOCK)
        g = tl.load(G + pair // K * D + col, mask=col < D, other=0.0).to(tl.float32)
        y = tl.load(Y + row * D + col, mask=col < D, other=0.0).to(tl.float32)
        # Each row belongs to one pair, so no two programs write to it.
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


@operator("permute_rows(Tensor x, Tensor inverse) -> Tensor", lambda x, inverse: x.new_empty(len(inverse), x.shape[1]))
def permute_rows(x: Tensor, inverse: Tensor) -> Tensor:
    """The rows [M, D] of tokens x [N, D], each token read once."""
    out = x.new_empty(len(inverse), x.shape[1])
    n, d = x.shape
    _launch_rows(_spread, (x.contiguous(), inverse.contiguous(), out), n, d, len(inverse) // max(1, n), loops=False)
    return out


@operator(
    "unpermute_rows(Tensor y, Tensor? weights, Tensor inverse, int k) -> Tensor",
    lambda y, weights, inverse, k: y.new_empty(len(inverse) // k, y.shape[1]),
)
def unpermute_rows(y: Tensor, weights: Tensor | None, inverse: Tensor, k: int) -> Tensor:
    """The sum [N, D] of each token's k rows of y [M, D], weighted if given."""
    out = y.new_empty(len(inverse) // k, y.shape[1])
    weighted = weights is not None
    arguments = (y.contiguous(), weights.contiguous() if weighted else y, inverse.contiguous(), out)
    n, d = out.shape
    _launch_rows(_collect, arguments, n, d, k, loops=False, WEIGHTED=weighted)
    return out


@operator(
    "unpermute_rows_backward(Tensor y, Tensor weights, Tensor inverse, Tensor g) -> (Tensor, Tensor)",
    lambda y, weights, inverse, g: (y.new_empty(y.shape), weights.new_empty(weights.shape)),
)
def unpermute_rows_backward(y: Tensor, weights: Tensor, inverse: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients by y and weights for the gradient g [N, D] of the weighted sum."""
    dy, dw = y.new_empty(y.shape), weights.new_zeros(weights.shape)
    arguments = (y.contiguous(), weights.contiguous(), inverse.contiguous(), g.contiguous(), dy, dw)
    m, d = y.shape
    _launch_rows(_collect_backward, arguments, m, d, weights.shape[1], loops=True)
    return dy, dw


def _choices(x: Tensor, order: Tensor) -> int:
    """k, of tokens x [N, D] and the M rows' pairs."""
    return len(order) // len(x) if len(x) else 1


def _sum_rows(y: Tensor, inverse: Tensor, k: int, weights: Tensor | None = None) -> Tensor:
    """Sum each token's k rows of y, [N, D], by k gathers, which needs no atomic addition."""
    parts = [y.index_select(0, rows) for rows in inverse.reshape(-1, k).unbind(1)]
    if weights is not None:
        parts = [term * w[:, None].to(y.dtype) for term, w in zip(parts, weights.unbind(1))]
    return functools.reduce(torch.add, parts)


def _sum_rows_backward(y: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    k = weights.shape[1]
    dy = g.index_select(0, order // k) * weights.reshape(-1)[order][:, None].to(y.dtype)
    dw = [(y.index_select(0, rows) * g).sum(-1, dtype=weights.dtype) for rows in inverse.reshape(-1, k).unbind(1)]
    return dy, torch.stack(dw, 1)


def _permute_gather(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    k = _choices(x, order)
    fused = Fused(
        "permute",
        forward=lambda x, order, inverse: (x.index_select(0, order // k),),
        backward=lambda saved, grads: (_sum_rows(grads[0], saved[2], k),),
    )
    return fused(x, order, inverse)


def _permute_triton(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    k = _choices(x, order)
    fused = Fused(
        "permute",
        forward=lambda x, inverse: (permute_rows(x, inverse),),
        backward=lambda saved, grads: (unpermute_rows(grads[0], None, saved[1], k),),
    )
    return fused(x, inverse)


_unpermute_gather = Fused(
    "unpermute",
    forward=lambda y, weights, order, inverse: (_sum_rows(y, inverse, weights.shape[1], weights),),
    backward=lambda saved, grads: _sum_rows_backward(*saved, *grads),
)


def _unpermute_triton(y: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    fused = Fused(
        "unpermute",
        forward=lambda y, weights, inverse: (unpermute_rows(y, weights, inverse, weights.shape[1]),),
        backward=lambda saved, grads: unpermute_rows_backward(*saved, *grads),
    )
    return fused(y, weights, inverse)


permute = Op(
    "permute",
    permute_reference,
    Form("triton", _permute_triton, supports=lambda x, *at: refuse_dtype(x) or triton_runs(x, *at), prefers=on_cuda),
    Form("gather", _permute_gather),
    flops=lambda x, order, inverse: 0,
    bytes=lambda x, order, inverse: (x.numel() + len(order) * x.shape[1]) * x.element_size() + 8 * len(order),
)
unpermute = Op(
    "unpermute",
    unpermute_reference,
    Form(
        "triton",
        _unpermute_triton,
        supports=lambda y, w, *at: refuse_dtype(y) or refuse_dtype(w) or triton_runs(y, w, *at),
        prefers=on_cuda,
    ),
    Form("gather", _unpermute_gather),
    Form("canonical", _unpermute_gather, prefers=asked_for),  # element by element, in the order of the choices
    flops=lambda y, weights, order, inverse: 2 * y.numel(),
    bytes=lambda y, w, order, inverse: (y.numel() + len(w) * y.shape[1]) * y.element_size() + 12 * len(order),
)


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    types = "WEIGHTS:*fp32 DWEIGHTS:*fp32 PLACE:*i64 D:i32"
    for config, top_k in (*((config, 2) for config in ROW_CONFIGS.for_gpu(gpu)), (ROW_CONFIGS.for_gpu(gpu)[0], 8)):
        label, constants = f"{top_k} {config['BLOCK']}", {"K": top_k}
        yield build(_spread, label, config, constants, types, aligned=("D",))
        # Two single numbers beside each wide access.
        yield build(_collect, label, config, constants | {"WEIGHTED": True}, types, aligned=("D",), wide=False)
        yield build(_collect_backward, label, config, constants, types, aligned=("D",))
