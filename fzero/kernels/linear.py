"""Products of a linear layer, and of a head: in a canonical form each row of the result depends on its row of x alone.

    linear(x, w) = x w                   a chain of fused multiply-adds over k = 0, 1, ... for each element
    logits(x, w) = cap(x w^T)            sixteen chains, of k modulo 16, then a fixed tree; cap(y) = c tanh(y / c)

Products of torch add in an order that depends on the number of rows: of one token or of a batch they differ in their
last bits. In the canonical form (`linear.cpp`) the order is fixed by K: the same bits alone, in a batch, in a chunk, by
one thread or more, whatever the strides; on a GPU it is that of linear_triton.py. The sums are in float32 and rounded
once. Gradients are torch's own products.

Ref: He & Thinking Machines Lab 2025, "Defeating nondeterminism in LLM inference", section "Batch-invariant kernels".

Shapes: x [..., K], w [K, N] of `linear`, [V, K] of `logits`; float32 or bfloat16.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from fzero.core import compile_cache, graph_passes
from fzero.core.autodiff import INFERENCE, needs_grad
from fzero.kernels.custom_operator import Fused, call_cpp, cap_logits, operator, rows_run
from fzero.kernels.linear_triton import row_product
from fzero.kernels.registry import Form, Op, asked_for
from fzero.kernels.rowwise import KINDS, rowwise_numbers

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
SMALL = 1 << 16  # multiplications that one thread makes
LARGE = 1 << 20  # numbers of a head
FEW = 32  # rows for which a weight is read as it lies


class _ProductShape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("m", "k", "n", "w_stride", "threads", "wide")]


def _call_cpp(kind: str, x: Tensor, w: Tensor, out: Tensor) -> None:
    """Fill out [M, N] by a loop of the library, for w with rows side by side or apart."""
    w = w if w.stride(-1) == 1 or w.shape[-1] == 1 else w.contiguous()
    (m, k), n = x.shape, out.shape[1]
    threads = torch.get_num_threads() if m * k * n > SMALL else 1
    shape = _ProductShape(m, k, n, w.stride(0), threads, out.dtype != w.dtype)
    if out.numel():
        run = getattr(compile_cache.library(__file__, compile_cache.EXACT), f"{kind}_{TYPES[w.dtype]}")
        call_cpp(run, (x.contiguous(), w, out), ctypes.byref(shape))


@operator(
    "linear_canonical(Tensor x, Tensor w) -> Tensor",
    lambda x, w: x.new_empty((x.shape[0], w.shape[1])),
    flop=graph_passes.product,
    by_shape=True,
)
def linear_product(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] @ w [K, N], rounded to their dtype."""
    if x.is_cuda:
        return row_product(x, w, x.dtype)
    out = x.new_empty((x.shape[0], w.shape[1]))
    _call_cpp("columns", x, w, out)
    return out


@operator(
    "logits_canonical(Tensor x, Tensor w) -> Tensor",
    lambda x, w: x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32),
    flop=graph_passes.product,
    by_shape=True,
)
def logits_product(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] @ w [V, K] transposed, in float32."""
    if x.is_cuda:
        return row_product(x, w.T, torch.float32)
    out = x.new_empty((x.shape[0], w.shape[0]), dtype=torch.float32)
    _call_cpp("rows", x, w, out)
    return out


def linear_canonical(x: Tensor, w: Tensor) -> Tensor:
    """The canonical form of `linear`."""
    frozen = not needs_grad(w)

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x, w), (g,) = saved, grads
        dx = g @ w.mT
        return (dx,) if frozen else (dx, x.mT @ g)

    fused = Fused("linear", lambda x, w: (linear_product(x, w),), backward)
    return fused(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[1])


def logits_reference(x: Tensor, w: Tensor, cap: float = 0.0) -> Tensor:
    """The logits [..., V] in float32 or wider, capped unless cap is 0: the definition."""
    y = x @ w.T
    return cap_logits(y.to(torch.promote_types(y.dtype, torch.float32)), cap)


def logits_canonical(x: Tensor, w: Tensor, cap: float = 0.0) -> Tensor:
    """The canonical form of `logits`, whose sums are not rounded to x's dtype."""

    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = logits_product(x, w)
        if cap and not x.is_cuda:
            return (rowwise_numbers(y, y, KINDS.index("capped"), cap),)
        return (cap_logits(y, cap),)

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x, w, y), (g,) = saved, grads
        g = (g * (1.0 - (y / cap).square()) if cap else g).to(x.dtype)
        return g @ w, g.T @ x

    fused = Fused("logits", forward, backward, select_saved=lambda tensors, outs: (*tensors, *outs))
    return fused(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[0])


def supports(x: Tensor, w: Tensor, *options: float) -> str:
    """The reason why the canonical forms do not serve a call; "" if they do."""
    if x.dtype not in TYPES or w.dtype != x.dtype:
        return f"the dtypes are {x.dtype} and {w.dtype}; it takes two of float32 or bfloat16"
    if w.dim() != 2:
        return f"w is {list(w.shape)}; it takes a matrix"
    return rows_run(x, w)


@functools.cache
def _wide_vectors() -> tuple[bool, bool]:
    """Whether this CPU has vectors of 16 floats, and whether it has a matrix unit for bfloat16."""
    flags = compile_cache.processor().split()
    return "avx512f" in flags, "amx_bf16" in flags


def _streams(x: Tensor, w: Tensor) -> str:
    """Why "auto" should not take the canonical form of `linear`, measured beside torch's product: in bfloat16 it takes
    0.4 to 0.9 of its time, of 1 to 512 rows, but of more than one beside a matrix unit; in float32, of few rows in
    inference, 0.6 to 1.0, with vectors of 16 floats."""
    if x.is_cuda or needs_grad(x, w):
        return asked_for(x, w)
    rows, (vectors, matrices) = x.numel() // max(1, x.shape[-1]), _wide_vectors()
    if x.dtype == torch.bfloat16:
        serves = rows == 1 or (vectors and not matrices)
    else:
        serves = vectors and rows <= FEW and INFERENCE.get()
    return "" if serves else asked_for(x, w)


def _prefers_head(x: Tensor, w: Tensor, cap: float = 0.0) -> str:
    """Why "auto" should not take the canonical form of `logits`: of a large head and these rows it takes 0.4 to 0.9 of
    torch's time on a CPU."""
    low, high = (3, 12) if x.dtype == torch.float32 else (1, 4)
    narrow = low <= x.numel() // max(1, x.shape[-1]) <= high
    return "" if narrow and w.numel() >= LARGE and INFERENCE.get() and not x.is_cuda else asked_for(x, w)


linear = Op(
    "linear",
    torch.matmul,
    Form("canonical", linear_canonical, supports, _streams),
    flops=lambda x, w: 2 * x.numel() * w.shape[-1],
    bytes=lambda x, w: (x.numel() + w.numel() + x.numel() // max(1, x.shape[-1]) * w.shape[-1]) * x.element_size(),
)
logits = Op(
    "logits",
    logits_reference,
    Form("canonical", logits_canonical, supports, _prefers_head),
    flops=lambda x, w, cap=0.0: 2 * x.numel() * w.shape[0],
    bytes=lambda x, w, cap=0.0: (x.numel() + w.numel()) * x.element_size() + x.numel() // w.shape[1] * w.shape[0] * 4,
)
