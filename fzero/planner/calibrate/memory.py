"""The rates of single operations: matrix products and forms of attention, by dtype, layout and shape, in the shapes of
training; and memory, seconds by bytes of plain operations, of first touching new memory, and of Inductor's fused
kernels.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import torch_private
from fzero.core.compile_cache import have_compiler
from fzero.kernels.attention import attention
from fzero.kernels.attention_pattern import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, FULL, pairs
from fzero.kernels.quantize import dequantize, quantize
from fzero.kernels.quantize_codes import empty_codes
from fzero.kernels.tuning import Speed
from fzero.planner.calibrate.case_timer import Case, Figure, on_operands, time_cases
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
                    call = _product(form.run, shape, dtype, device)
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


def _product(run: Callable[..., Any], shape: Shape, dtype: torch.dtype, device: str) -> Callable[[], Callable[[], Any]]:
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
    key, (batch, m, n, k) = dtype + ("/onednn" if way == "onednn" else "") + layout, shape
    a = partial(_operand, (m, k), batch, layout == "/tn", dtype, device)
    b = partial(_operand, (k, n), batch, layout == "/nt", dtype, device)
    return Case((key, shape), on_operands(torch.matmul, a, b))


def _operand(size: tuple[int, int], batch: int, transposed: bool, dtype: str, device: str) -> Tensor:
    """A matrix, or a batch of them; `transposed`: stored column by column."""
    size = (size[1], size[0]) if transposed else size
    x = torch.randn(*((batch,) if batch > 1 else ()), *size, device=device).to(DTYPES[dtype])
    return x.mT if transposed else x


WIDTH = 256  # elements of a row
ROWS = (4, 128, 1024, 8192, 65536)  # of tensors [rows, 256]


def gated(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) b in float32, as in an MLP: reads two tensors, writes one."""
    return (torch.nn.functional.silu(a.float()) * b.float()).to(a.dtype)


def normed(a: Tensor, b: Tensor) -> Tensor:
    """(a + b) over its root mean square: reads two tensors twice, writes one."""
    x = a.float() + b.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)).to(a.dtype)


def measure_fused(seconds: float, *, threads: int = 1, device: str = "cpu") -> dict[str, dict[float, Figure]]:
    """The Figures of fused loops by "fused/dtype" and bytes, without the host's time for a call."""
    curves: dict[str, dict[float, Figure]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        cases, name = [], str(dtype).removeprefix("torch.")
        for f in (gated, normed):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Inductor's own
                torch_private.dynamo_reset()
                run = torch.compile(f, dynamic=True)
                for rows in ROWS:
                    ones = partial(torch.ones, rows, WIDTH, dtype=dtype, device=device)
                    key = f.__name__, 3.0 * rows * WIDTH * dtype.itemsize
                    case = Case(key, on_operands(run, ones, ones))
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


SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)  # bytes of a tensor
FEW = (4 << 10, 64 << 10, 1 << 20, 12 << 20)  # fewer, for operations with many variants
BLOCK = 128  # numbers that share a scale, as a codec has them
Unary = Callable[[Tensor], Any]
# Bytes that a call reads and writes, for each byte of its input.
UNARY: dict[str, tuple[Unary, float]] = {
    "aten.mul": (lambda x: x * x, 2),
    "aten.exp": (torch.exp, 2),
    "aten.silu": (torch.nn.functional.silu, 2),
    "aten.gelu": (torch.nn.functional.gelu, 2),
    "aten.rsqrt": (torch.rsqrt, 2),
    "aten.sum": (lambda x: x.sum(-1), 1),
    "aten._softmax": (lambda x: torch.softmax(x, -1), 2),
    "aten.clone": (torch.clone, 2),
    "aten.cat": (lambda x: torch.cat([x[: len(x) // 2], x[len(x) // 2 :]]), 2),
}


def measure_memory(
    seconds: float, *, threads: int = 1, device: str = "cpu", quick: bool = False
) -> dict[str, dict[float, Figure]]:
    """The Figures by "name/dtype" and bytes; "add" of float32 gives the bandwidth."""
    cases = []
    for size in FEW if quick else SIZES:
        ones = partial(torch.ones, size // 4, device=device)
        cases.append(Case(("add", 3.0 * size), on_operands(torch.add, ones, ones)))
    for size in FEW:
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            numbers = partial(torch.full, (size // dtype.itemsize // 256, 256), 0.5, dtype=dtype, device=device)
            for op, (f, traffic) in ({"aten.mul": UNARY["aten.mul"]} if quick else UNARY).items():
                cases.append(Case((f"{op}/{name}", traffic * size), on_operands(f, numbers)))
            target = torch.bfloat16 if dtype == torch.float32 else torch.float32
            total = size * (1 + target.itemsize / dtype.itemsize)
            # Curves of casts are looked up by the dtype of the result.
            key = f"aten._to_copy/{str(target).removeprefix('torch.')}"
            cases.append(Case((key, total), on_operands(lambda x, target=target: x.to(target), numbers)))
    if device == "cpu" and have_compiler() and not quick:
        cases += [case for kind in ("int8", "int4") for size in FEW for case in _codes(kind, size)]
    if device == "cpu":
        cases += [Case(("fresh", float(size)), _fresh(size)) for size in FEW[2:] + SIZES[-1:]]
    cases.sort(key=lambda case: case.key[1])
    curves: dict[str, dict[float, Figure]] = {}
    for (key, size), figure in time_cases(cases, seconds, threads=threads, device=device, rounds=7).items():
        curves.setdefault(key, {})[size] = figure
    return curves


def _codes(kind: str, size: int) -> Iterator[Case]:
    """The cases of making codes of so many bytes of float32, and of reading them."""
    data, scale = empty_codes((size // 4 // 512, 512), kind, BLOCK, "cpu")
    total, dtype = float(size + data.nbytes + scale.nbytes), str(data.dtype).removeprefix("torch.")

    numbers = partial(torch.full, (size // 4 // 512, 512), 0.5)
    code = lambda x: quantize(x, kind, BLOCK, impl="cpp")  # noqa: E731
    yield Case((f"fzero.quantize_cpu/{dtype}", total), on_operands(code, numbers))
    if kind == "int8":  # by the dtype of the result, and nearly as many bytes
        read = lambda codes: dequantize(codes, kind, BLOCK, impl="cpp")  # noqa: E731
        yield Case(("fzero.dequantize_cpu/float32", total), on_operands(read, lambda: code(numbers())))


def _fresh(size: int) -> Callable[[], Callable[[], Any]]:
    def touch() -> None:
        with mmap.mmap(-1, size) as memory:
            torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE].fill_(1)

    return lambda: touch
