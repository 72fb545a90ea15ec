"""Attention's forms beside each other at ten shapes, for gpu.py: TFLOP/s forward, and forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_kernels import both_passes, forward_pass, seconds
from gpu_place import Cases, Where
from kernel_cases import Case
from torch import Tensor

from fzero.kernels.attention import attention
from fzero.kernels.attention_pattern import FULL
from fzero.kernels.flops import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, pairs


class Shape(NamedTuple):
    """Of a causal call in bfloat16: q [B, T, H, K], k and v [B, T, G, K]."""

    batch: int
    queries: int
    heads: int
    groups: int
    dim: int


SHAPES = (
    Shape(8, 1024, 12, 12, 64),  # GPT-2 124M
    Shape(32, 1024, 12, 12, 64),
    Shape(8, 1024, 25, 25, 64),  # GPT-2 1.5B
    Shape(8, 2048, 32, 8, 64),  # Llama 1B
    Shape(4, 4096, 32, 8, 64),
    Shape(4, 2048, 32, 8, 128),  # Llama 8B
    Shape(2, 8192, 32, 8, 128),
    Shape(1, 32768, 32, 8, 128),
    Shape(1, 8192, 64, 8, 128),  # Llama 70B
    Shape(2, 4096, 16, 16, 256),
)
SMALL = (Shape(1, 32, 2, 1, 16), Shape(2, 64, 2, 2, 16))


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own choice among its forms."""
    found = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    return found.transpose(1, 2)


def attention_cases(where: Where) -> Cases:
    """Each shape with every form that serves it."""
    for shape in SMALL if where.tiny else SHAPES:
        yield str(tuple(shape)), functools.partial(shoot_out, shape, where)


def shoot_out(shape: Shape, where: Where) -> dict[str, Any]:
    """{form: its TFLOP/s, or why it does not serve}; all forms' FLOPs are those of causal pairs."""
    b, t, h, g, k = shape
    q, key, v = (torch.randn(b, t, heads, k, device=where.device, dtype=torch.bfloat16) for heads in (h, g, g))
    products = 2.0 * b * h * k * pairs(FULL, t, t)
    runs: dict[str, Callable[..., Any]] = {"SDPA": sdpa}
    row: dict[str, Any] = {"tflop_s": {}, "not here": {}}
    for form in attention.forms:
        why = form.reason_against((q, key, v), {})
        if why:
            row["not here"][form.name] = why
        else:
            runs[form.name] = functools.partial(attention, impl=form.name)
    for name, run in runs.items():
        case = Case(name, attention, run, (q, key, v), 3, "flops", 0.0, 0.0)
        try:
            forward = seconds(forward_pass(run, q, key, v), where.device)
            both = seconds(both_passes(run, case), where.device)
        except RuntimeError as error:  # a library's form that refuses a shape late is a result too
            row["not here"][name] = str(error).splitlines()[0][:200]
            continue
        row["tflop_s"][name] = {
            "forward": FORWARD_PRODUCTS * products / forward / 1e12,
            "both": (FORWARD_PRODUCTS + BACKWARD_PRODUCTS) * products / both / 1e12,
        }
    said = ", ".join(f"{name} {r['forward']:.3g} / {r['both']:.3g}" for name, r in row["tflop_s"].items())
    print(f"  B={b} T={t} H={h} G={g} K={k}: {said} TFLOP/s forward / both", flush=True)
    return row
