"""Fused kernels: seconds by bytes of Inductor's code for pointwise operators and for a reduction, as in compiled
blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.core import torch_private
from fzero.planner.calibrate.case_timer import Case, Figure, time_cases

WIDTH = 256
ROWS = (4, 128, 1024, 8192, 65536)  # of tensors [rows, 256]


def gated(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) b in float32, as in an MLP: reads two tensors, writes one."""
    return (torch.nn.functional.silu(a.float()) * b.float()).to(a.dtype)


def normed(a: Tensor, b: Tensor) -> Tensor:
    """(a + b) over its root mean square: reads two tensors (twice: the second time from the cache), writes one."""
    x = a.float() + b.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)).to(a.dtype)


def measure_fused(seconds: float, *, threads: int = 1, device: str = "cpu") -> dict[str, dict[float, Figure]]:
    """The Figures by "fused/dtype" and bytes read and written: the mean of two loops, without the host's time for a
    call.

    The call's time is that of a nearly empty call minus that of a nearly empty operator, which the other curves
    include.
    """
    curves: dict[str, dict[float, Figure]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        cases, name = [], str(dtype).removeprefix("torch.")
        for f in (gated, normed):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Inductor's own
                torch_private.dynamo_reset()
                run = torch.compile(f, dynamic=True)
                for rows in ROWS:
                    case = Case((f.__name__, 3.0 * rows * WIDTH * dtype.itemsize), _call(run, rows, dtype, device))
                    case.make()()  # compiles; the second size makes it serve all
                    cases.append(case)
        figures = time_cases(cases, seconds / 2, threads=threads, device=device, rounds=25)
        tiny = torch.ones(ROWS[0], WIDTH, device=device)
        add = Case(("add",), lambda tiny=tiny: lambda: tiny + tiny)
        base_s = time_cases([add], seconds / 20, threads=threads, device=device)[add.key].s
        sizes = sorted({size for _, size in figures})
        for size in sizes:
            pairs = [(figures[f.__name__, size], figures[f.__name__, sizes[0]]) for f in (gated, normed)]
            mean = sum(max(figure.min_s - floor.min_s, 0.0) for figure, floor in pairs) / 2 + base_s
            curves.setdefault(f"fused/{name}", {})[size] = Figure(mean, max(figure.spread for figure, _ in pairs))
    return curves


def _call(run: Callable[..., Any], rows: int, dtype: torch.dtype, device: str) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        a, b = (torch.ones(rows, WIDTH, dtype=dtype, device=device) for _ in range(2))
        return lambda: run(a, b)

    return make
