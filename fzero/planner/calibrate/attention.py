"""Attention: how fast each form that serves is on this machine, forward and backward, by which "auto" chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fzero.kernels.attention import attention
from fzero.kernels.attention_pattern import FULL
from fzero.kernels.flops import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, pairs
from fzero.kernels.tuning import Speed
from fzero.planner.calibrate.case_timer import Case, time_cases


class Shape(NamedTuple):
    """The shape of a call: q [B, T, H, K], and k and v with the same number of heads."""

    batch: int
    queries: int
    heads: int
    dim: int


# As in published tables: 16K tokens, a width of 2048.
SHAPES = [Shape(16384 // t, t, 2048 // dim, dim) for dim in (64, 128) for t in (512, 1024, 2048, 4096, 8192, 16384)]


def measure_attention(
    seconds: float,
    *,
    threads: int = 1,
    device: str = "cuda",
    shapes: Sequence[Shape] = SHAPES,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
) -> list[Speed]:
    """The Speed of each form that serves, forward and backward together, of the FLOPs of causal pairs, and whether a
    second run gave the same bits.

    All forms' FLOPs are counted alike, so a Speed is a pure matter of seconds.
    """
    cases, repeat = [], {}
    for shape in shapes:
        for dtype in dtypes:
            q = torch.empty(shape.batch, shape.queries, shape.heads, shape.dim, dtype=dtype, device=device)
            for form in attention.forms:
                if not form.reason_against((q, q, q), {}):
                    call = _call(form.run, shape, dtype, device)
                    repeat[form.name, shape, dtype] = _repeats(call)
                    cases.append(Case((form.name, shape, dtype), call))
    speeds = []
    for (name, shape, dtype), figure in time_cases(cases, seconds, threads=threads, device=device).items():
        products = 2 * shape.batch * shape.heads * shape.dim * pairs(FULL, shape.queries, shape.queries)
        rate = (FORWARD_PRODUCTS + BACKWARD_PRODUCTS) * products / figure.s
        speed = Speed(name, str(dtype).removeprefix("torch."), shape.dim, shape.queries, round(rate / 1e12, 4))
        speeds.append(speed._replace(repeats=repeat[name, shape, dtype]))
    return speeds


def _repeats(make: Callable[[], Callable[[], Any]], runs: int = 4) -> bool:
    """Whether all of some runs of a call give the same bits."""
    call = make()
    first = call()
    return all(torch.equal(x, y) for _ in range(runs - 1) for x, y in zip(first, call()))


def _call(run: Callable[..., Any], shape: Shape, dtype: torch.dtype, device: str) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        sizes = shape.batch, shape.queries, shape.heads, shape.dim
        q, k, v, g = (torch.randn(sizes, dtype=dtype, device=device) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        return lambda: torch.autograd.grad(run(*leaves), leaves, g)

    return make
