"""Matrix products: seconds by dtype, layout and shape, in the shapes of training; and forms of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.kernels.attention import attention
from fzero.kernels.attention_pattern import FULL
from fzero.kernels.flops import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, pairs
from fzero.kernels.tuning import Speed
from fzero.planner.calibrate.case_timer import Case, Figure, time_cases
from fzero.run.setup.machine import fp32_error, fp32_matmul, onednn_switch, set_fp32_matmul


class Shape(NamedTuple):
    """The shape of a call: q [B, T, H, K], and k and v with as many heads."""

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
    """The Speed of each form of attention that serves, and whether a second run gave the same bits."""
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


GemmShape = tuple[int, int, int, int]  # batch, m, n, k
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64, "float16": torch.float16}
LAYOUTS = ("", "/nt", "/tn")  # operands as read by x @ w, g @ w.T and x.T @ g
MOST_FLOP = {
    "bfloat16": 6e9,
    "float32": 2.2e9,
    "float64": 3e8,
    "float16": 2e7,
}  # of one product: larger ones take too long
MOST_S = 0.1  # of one product on a CPU: a dtype without units there, as bfloat16 on many, is a hundred times slower
SIDE = 128  # of the product whose speed says which ones take longer
MAX_ERROR = 1e-6  # allowed error of float32 products by oneDNN, as in fzero.run.setup.machine


def shapes(quick: bool) -> list[GemmShape]:
    """The grid: squares, tokens by widths as in a layer, heads of attention, batched layers."""
    squares = (64, 128, 256, 512, 1024) if quick else (32, 64, 128, 256, 512, 1024, 2048)
    tokens, widths = ((512, 2048), (256, 704)) if quick else ((256, 1024, 2048, 4096), (64, 128, 256, 512, 704, 1408))
    grid = [(1, side, side, side) for side in squares]
    for t in tokens:
        for i, a in enumerate(widths):
            for b in widths[i : i + 3]:
                grid += [(1, t, b, a), (1, t, a, b), (1, a, b, t)]
    grid += [(1, 512, v, d) for v, d in ((256, 256), (8192, 256), (32000, 128))] + [(1, 8192, 256, 512)]
    batches = ((16, 256, 256, 64), (4, 256, 704, 704)) if quick else ()
    batches = batches or [(b, t, t, k) for b in (8, 32) for t in (64, 128, 256, 512) for k in (32, 64)]
    batches = [*batches, *((b, t, k, t) for b, t, k in ((8, 256, 64), (32, 128, 64), (32, 256, 32)))]
    batches += [(n, m, k, k) for n in (4, 8) for m, k in ((128, 128), (256, 256), (256, 704), (512, 512), (512, 1408))]
    return list(dict.fromkeys(grid + batches))


def ways() -> list[tuple[str, str]]:
    """(dtype, way of float32) of the products to measure."""
    choices = [("bfloat16", "default"), ("float32", "default"), ("float64", "default"), ("float16", "default")]
    if onednn_switch() is None:
        return choices
    previous = fp32_matmul()
    set_fp32_matmul("onednn")
    error = fp32_error()
    set_fp32_matmul(previous)
    return choices + ([("float32", "onednn")] if error < MAX_ERROR else [])


def measure_products(
    seconds: float,
    *,
    threads: int = 1,
    device: str = "cpu",
    quick: bool = False,
    grid: Sequence[GemmShape] | None = None,
) -> dict[str, dict[GemmShape, Figure]]:
    """Measure products for about `seconds`; Figures by dtype, way and layout ("bfloat16/tn") and shape."""
    grid = shapes(quick) if grid is None else grid
    figures: dict[str, dict[GemmShape, Figure]] = {}
    previous, all_ways = (
        fp32_matmul(),
        ways() if device == "cpu" else [(dtype, "default") for dtype in ("bfloat16", "float32", "float16")],
    )
    shares = {way: 0.1 if way[0] in ("float16", "float64") else 1.0 for way in all_ways}
    for (dtype, way), share in shares.items():
        set_fp32_matmul(way) if device == "cpu" else None
        max_flop = _most_flop(dtype, threads, device)
        fits = [shape for shape in grid if 2.0 * shape[0] * shape[1] * shape[2] * shape[3] <= max_flop]
        fits = fits[:: 8 if share < 1 else 1]
        layouts = LAYOUTS if (share == 1.0 and dtype == "bfloat16") or way == "onednn" else LAYOUTS[:1]
        cases = [_case(dtype, way, layout, shape, device) for shape in fits for layout in layouts]
        for (key, shape), figure in time_cases(
            cases, seconds * share / sum(shares.values()), threads=threads, device=device
        ).items():
            figures.setdefault(key, {})[shape] = figure
    set_fp32_matmul(previous) if device == "cpu" else None
    return figures


def _most_flop(dtype: str, threads: int, device: str) -> float:
    """The FLOPs of the largest product to measure."""
    if device != "cpu":
        return MOST_FLOP[dtype] * threads * 1000
    a = torch.randn(SIDE, SIDE).to(DTYPES[dtype])
    (took,) = time_cases([Case((dtype,), lambda: lambda: a @ a)], 0.0, threads=threads).values()
    return min(MOST_FLOP[dtype] * threads, 2.0 * SIDE**3 / took.s * MOST_S)


def _case(dtype: str, way: str, layout: str, shape: GemmShape, device: str) -> Case:
    key = dtype + ("/onednn" if way == "onednn" else "") + layout

    def make() -> Callable[[], Any]:
        batch, m, n, k = shape
        a = _operand((m, k), batch, layout == "/tn", dtype, device)
        b = _operand((k, n), batch, layout == "/nt", dtype, device)
        return lambda: a @ b

    return Case((key, shape), make)


def _operand(size: tuple[int, int], batch: int, transposed: bool, dtype: str, device: str) -> Tensor:
    """A matrix, or a batch of them; `transposed`: stored column by column."""
    size = (size[1], size[0]) if transposed else size
    x = torch.randn(*((batch,) if batch > 1 else ()), *size, device=device).to(DTYPES[dtype])
    return x.mT if transposed else x
