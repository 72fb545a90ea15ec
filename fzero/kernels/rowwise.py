"""Functions of single numbers and of rows, whose bits depend on that number or row alone, for canonical forms on CPUs.

Torch's loops compute exp, tanh, cos of the numbers behind the last vector by other functions than of those in one, and
sum a row in an order that depends on its neighbours: the same number has other bits in another place. Here each has one
function (lanes.h), and each sum over a row sixteen lanes and a fixed tree. The C++ is rowwise.cpp.

    gelu(x) = x (1 + tanh(c (x + 0.044715 x^3))) / 2, c = sqrt(2 / pi)      sigmoid(x) = 1 / (1 + exp(-x))

Ref: Moshier, Cephes mathematical library; Hendrycks & Gimpel 2016, "Gaussian error linear units", arXiv:1606.08415.

Shapes: x of any, in float32 or bfloat16, the arithmetic in float32; rows [N, E], logits [N, V] in float32.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.core import compile_cache
from fzero.core.device import kind_of
from fzero.kernels import cross_entropy_triton
from fzero.kernels.cross_entropy import WRONG
from fzero.kernels.custom_operator import Fused, call_cpp, cpp_runs, operator, rows_run
from fzero.kernels.registry import Form, Op, asked_for, by_device

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
KINDS = ("gelu", "sigmoid", "tanh", "geglu", "clamped_swiglu", "capped")  # by their numbers in the C++
MANY = 1 << 15  # numbers from which threads share the work


class _RowwiseShape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "n", "stride", "threads")),
        *((name, ctypes.c_double) for name in ("eps", "cap")),
    ]


class _HeadsShape(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64) for name in ("rows", "n", "interleaved", "inverse", "threads", "q_heads", "k_heads")
    ]


def _call_cpp(
    name: str,
    tensors: tuple[Tensor | None, ...],
    rows: int,
    n: int,
    *numbers: int,
    stride: int = 0,
    eps: float = 0.0,
    cap: float = 0.0,
) -> None:
    threads = torch.get_num_threads() if rows * n > MANY else 1
    shape = _RowwiseShape(rows, n, stride, threads, eps, cap)
    run = getattr(compile_cache.library(__file__, compile_cache.EXACT), name)
    call_cpp(run, tensors, *map(ctypes.c_int64, numbers), ctypes.byref(shape))


@operator(
    "rowwise_numbers(Tensor a, Tensor b, int kind, float cap=0.) -> Tensor",
    lambda a, b, kind, cap=0.0: a.new_empty(a.shape),
    by_shape=True,
)
def rowwise_numbers(a: Tensor, b: Tensor, kind: int, cap: float = 0.0) -> Tensor:
    """A function of KINDS of each number of a, or of each pair; capped: cap tanh(a / cap)."""
    out, a, b = a.new_empty(a.shape), a.contiguous(), b.contiguous()
    _call_cpp(f"numbers_{TYPES[a.dtype]}", (a, b, out), 1, a.numel(), kind, cap=cap)
    return out


@operator(
    "layer_norm_canonical(Tensor x, Tensor scale, Tensor bias, float eps) -> Tensor",
    lambda x, scale, bias, eps: x.new_empty(x.shape),
    by_shape=True,
)
def layer_norm_forward(x: Tensor, scale: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., N] normed; scale and bias are rounded to x's dtype."""
    out, x = x.new_empty(x.shape), x.contiguous()
    scale, bias = (p.to(x.dtype).contiguous() for p in (scale, bias))
    rows, n = math.prod(x.shape[:-1]), x.shape[-1]
    _call_cpp(f"layer_norm_{TYPES[x.dtype]}", (x, scale, bias, out), rows, n, eps=eps)
    return out


@operator("softmax_canonical(Tensor x) -> Tensor", lambda x: x.new_empty(x.shape))
def softmax_forward(x: Tensor) -> Tensor:
    """The softmax of float32 x [..., N] over the last dim."""
    out, x = x.new_empty(x.shape), x.contiguous()
    _call_cpp("softmax_rows", (x, out), math.prod(x.shape[:-1]), x.shape[-1])
    return out


def softmax_canonical(x: Tensor) -> Tensor:
    """The softmax of float32 x [..., N] over the last dim, differentiable once."""

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor]:
        (p,), (g,) = saved, grads
        return (p * (g - (p * g).sum(-1, keepdim=True)),)

    return Fused("softmax", lambda x: (softmax_forward(x),), backward, select_saved=lambda _, outs: outs)(x)


@operator(
    "loss_statistics(Tensor logits, Tensor? targets, float cap) -> Tensor",
    lambda logits, targets, cap: logits.new_empty((logits.shape[0], 3)),
)
def loss_statistics(logits: Tensor, targets: Tensor | None, cap: float) -> Tensor:
    """(log-sum-exp, logit of the target, sum) of each row of float32 logits [N, V], capped first; [N, 3]."""
    if logits.is_cuda:
        # Each row begins at a multiple of 32 bytes, in step with the tiles in which the kernel adds it.
        rows = F.pad(logits, (0, -logits.shape[1] % 8))[:, : logits.shape[1]]
        at = logits.new_zeros(len(logits), dtype=torch.int64) if targets is None else targets
        return cross_entropy_triton.launch(rows, None, at, None, 0, (0.0, 1.0, 0.0, cap))
    out = logits.new_empty((logits.shape[0], 3))
    targets = None if targets is None else targets.contiguous()
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    _call_cpp("loss_rows", (logits, targets, out), *logits.shape, WRONG, stride=logits.stride(0), cap=cap)
    return out


@operator(
    "rope_cpu(Tensor[] x, Tensor positions, Tensor frequencies, bool interleaved, bool inverse) -> Tensor[]",
    lambda x, positions, frequencies, interleaved, inverse: [t.new_empty(t.shape) for t in x],
    by_shape=True,
)
def rope_in_cpp(
    x: Sequence[Tensor], positions: Tensor, frequencies: Tensor, interleaved: bool, inverse: bool
) -> list[Tensor]:
    """The one or two tensors x [B, T, H, K] turned by the angles, which are right to 1e-7, or by minus these."""
    (b, t, *_), half = x[0].shape, len(frequencies)
    positions = positions.to(torch.int64).expand(b, t).contiguous()
    x, out = [t.contiguous() for t in x], [t.new_empty(t.shape) for t in x]
    threads = torch.get_num_threads() if x[0].numel() > MANY else 1
    heads = x[0].shape[2], x[1].shape[2] if len(x) > 1 else 0
    shape = _HeadsShape(b * t, half, interleaved, inverse, threads, *heads)
    run = getattr(compile_cache.library(__file__, compile_cache.EXACT), f"rope_{TYPES[x[0].dtype]}")
    tensors = x[0], x[-1], positions, frequencies.contiguous(), out[0], out[-1]
    call_cpp(run, tensors, ctypes.byref(shape))
    return out


def sum_in_order(x: Tensor) -> Tensor:
    """The sum over the last, short dim [..., 1], number by number."""
    return functools.reduce(torch.add, x.unbind(-1))[..., None]


def supports(x: Tensor, *tensors: Tensor) -> str:
    """The reason why these functions do not serve tensors of one dtype; "" if they do."""
    if x.dtype not in TYPES or any(t.dtype != x.dtype for t in tensors):
        return f"the dtypes are {', '.join(str(t.dtype) for t in (x, *tensors))}; it takes float32 or bfloat16"
    return cpp_runs(x, *tensors)


def _gelu_backward(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(g, x, approximate="tanh")


def _on_gpu(x: Tensor) -> str:
    """Why not: elsewhere torch's loops have other functions in another place; on a GPU each thread has the same."""
    return "" if kind_of(x) == "cuda" else "a tensor is not on a GPU"


def _op(name: str, reference: Any, slope: Any) -> Op:
    kind = KINDS.index(name)
    fused = Fused(
        name,
        lambda x: (rowwise_numbers(x, x, kind),),
        lambda saved, grads: (slope(*saved, *grads),),
        select_saved=lambda tensors, outs: (*tensors, *outs),
    )
    return Op(
        name,
        reference,
        by_device(Form("canonical", fused, supports, asked_for), Form("torch", reference, _on_gpu)),
        flops=lambda x: 10 * x.numel(),
        bytes=lambda x: 2 * x.numel() * x.element_size(),
    )


gelu = _op("gelu", functools.partial(F.gelu, approximate="tanh"), _gelu_backward)
sigmoid = _op("sigmoid", torch.sigmoid, lambda x, y, g: torch.ops.aten.sigmoid_backward(g, y))
tanh = _op("tanh", torch.tanh, lambda x, y, g: torch.ops.aten.tanh_backward(g, y))
log_sum_exp = Op(
    "log_sum_exp",
    lambda x: torch.logsumexp(x.to(torch.promote_types(x.dtype, torch.float32)), -1),
    Form(
        "canonical",
        Fused(
            "log_sum_exp",
            lambda x: (loss_statistics(x, None, 0.0)[:, 0].contiguous(),),
            lambda saved, grads: (torch.exp(saved[0] - saved[1][:, None]) * grads[0][:, None],),
            select_saved=lambda tensors, outs: (*tensors, *outs),
        ),
        lambda x: rows_run(x) if x.dtype == torch.float32 and x.dim() == 2 else f"x is {x.dtype} {list(x.shape)}",
        asked_for,
    ),
    flops=lambda x: 4 * x.numel(),
    bytes=lambda x: x.numel() * x.element_size(),
)
