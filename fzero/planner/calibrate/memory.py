"""Memory: seconds by bytes of plain operations, of first touching new memory, and of Inductor's fused kernels."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fzero.core import torch_private
from fzero.core.compile_cache import have_compiler
from fzero.kernels.quantize import dequantize, quantize
from fzero.kernels.quantize_codes import empty_codes
from fzero.planner.calibrate.case_timer import Case, Figure, time_cases

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
    cases = [Case(("add", 3.0 * size), _binary(size, device)) for size in (FEW if quick else SIZES)]
    for size in FEW:
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            for op, (f, traffic) in ({"aten.mul": UNARY["aten.mul"]} if quick else UNARY).items():
                cases.append(Case((f"{op}/{name}", traffic * size), _unary(f, size, dtype, device)))
            target = torch.bfloat16 if dtype == torch.float32 else torch.float32
            total = size * (1 + target.itemsize / dtype.itemsize)
            # Curves of casts are looked up by the dtype of the result.
            key = f"aten._to_copy/{str(target).removeprefix('torch.')}"
            cases.append(Case((key, total), _unary(lambda x, target=target: x.to(target), size, dtype, device)))
    if device == "cpu" and have_compiler() and not quick:
        cases += [case for kind in ("int8", "int4") for size in FEW for case in _codes(kind, size)]
    if device == "cpu":
        cases += [Case(("fresh", float(size)), _fresh(size)) for size in FEW[2:] + SIZES[-1:]]
    cases.sort(key=lambda case: case.key[1])
    curves: dict[str, dict[float, Figure]] = {}
    for (key, size), figure in time_cases(cases, seconds, threads=threads, device=device, rounds=7).items():
        curves.setdefault(key, {})[size] = figure
    return curves


def _binary(size: int, device: str) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        a, b = (torch.ones(size // 4, device=device) for _ in range(2))
        return lambda: a + b

    return make


def _unary(f: Unary, size: int, dtype: torch.dtype, device: str) -> Callable[[], Callable[[], Any]]:
    def make() -> Callable[[], Any]:
        x = torch.full((size // dtype.itemsize // 256, 256), 0.5, dtype=dtype, device=device)
        return lambda: f(x)

    return make


def _codes(kind: str, size: int) -> Iterator[Case]:
    """The cases of making codes of so many bytes of float32, and of reading them."""
    data, scale = empty_codes((size // 4 // 512, 512), kind, BLOCK, "cpu")
    total, dtype = float(size + data.nbytes + scale.nbytes), str(data.dtype).removeprefix("torch.")

    def make() -> Callable[[], Any]:
        x = torch.full((size // 4 // 512, 512), 0.5)
        return lambda: quantize(x, kind, BLOCK, impl="cpp")

    def read() -> Callable[[], Any]:
        codes = quantize(torch.full((size // 4 // 512, 512), 0.5), kind, BLOCK, impl="cpp")
        return lambda: dequantize(codes, kind, BLOCK, impl="cpp")

    yield Case((f"fzero.quantize_cpu/{dtype}", total), make)
    if kind == "int8":  # by the dtype of the result, and nearly as many bytes
        yield Case(("fzero.dequantize_cpu/float32", total), read)


def _fresh(size: int) -> Callable[[], Callable[[], Any]]:
    def touch() -> None:
        with mmap.mmap(-1, size) as memory:
            torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE].fill_(1)

    return lambda: touch
