"""Operations for ten.py: every form at a training shape beside float64, twice for equal bits; and attention's forms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from kernel_cases import Case, cases
from ten_rows import Rows, Where, median_seconds
from torch import Tensor

from fzero.kernels import attention_pattern, linear_cross_entropy
from fzero.kernels.attention import attention
from fzero.kernels.attention_pattern import FULL
from fzero.kernels.registry import op

ALLOWED_CODES = 1e-3  # of codes that may differ from the definition's, where a value is half-way between two
SIZES_K = 64, 4096, 16384
LIBRARIES = "cudnn", "fused"  # forms of PyTorch that need not give the same bits again
OF_CPU = "tiled", "blocked"


def rows(where: Where) -> Rows:
    """A row for each operation and form that serves it here; float8 products over K; sums in float32."""
    if where.cuda:  # others share the card
        torch.cuda.set_per_process_memory_fraction(0.3)
    for make in cases(where.device, where.tiny):
        torch.manual_seed(0)
        try:
            case = make()
            args, options = case.arguments
            forms = ["reference"] * (not case.op.forms)
            forms += [form.name for form in case.op.forms if not form.reason_against(args, options)]
        except Exception as error:  # a row of its own: those behind it follow
            yield f"making {getattr(make, 'func', make).__name__} {getattr(make, 'args', ())}", failing(error)
            continue
        compared = Compared(case)
        del case, args, options
        for name in forms or ["reference"]:
            yield f"{compared.case.label}: {name}", functools.partial(compared.row, name)
    for k in SIZES_K:
        yield f"float8 K={k}", functools.partial(float8_error, k, where)
    yield "adds wide", functools.partial(adds_wide, where)


def failing(error: Exception) -> Callable[[], dict[str, Any]]:
    """What measures nothing, and raises this error."""

    def fail() -> dict[str, Any]:
        raise error

    return fail


class Compared:
    """A case, and what its definition says of it, which all forms are compared with."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.wants: list[Tensor] = []
        self.plain: list[Tensor] = []

    def row(self, form: str) -> dict[str, Any]:
        """The worst of a form's results and gradients, by the root of the mean square, and by the largest element."""
        case = self.case
        if not self.wants:
            self.plain = passes(case, "reference", case.tensors)
            self.wants = self.plain
            if case.precise:
                wide = tuple(t.double() if t.is_floating_point() else t for t in case.tensors)
                run = case.run if case.exact is None else lambda _, *t: case.exact(*t)
                self.wants = passes(case._replace(run=run), "reference", wide)
        ours, again = (passes(case, form, case.tensors) for _ in range(2))
        repeats = all(torch.equal(a, b) for a, b in zip(ours, again))
        row: dict[str, Any] = {"repeats": repeats}
        if not case.precise:
            row["differing"] = max(float((a != b).double().mean()) for a, b in zip(ours, self.wants))
            return row | ({"failed": "codes differ"} if not row["differing"] <= ALLOWED_CODES else {})
        found = [distances(*three) for three in zip(ours, self.plain, self.wants)]
        error, plain, unit = max(found, key=lambda one: one[0] / (2 * one[1] + one[2]))
        row |= {"error": error, "plain torch": plain, "times plain": error / max(plain, 1e-30)}
        if not error <= 2 * plain + unit:
            row["failed"] = f"error {error:.2e} is above twice that of plain torch, {plain:.2e}"
        return row if repeats or form in LIBRARIES else row | {"failed": "a second run gives other bits"}


def passes(case: Case, impl: str, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The results of a call, and the gradients of those tensors that have one, for cotangents that any dtype holds."""
    leaves = [t.detach().requires_grad_(i < case.wanted) for i, t in enumerate(tensors)]
    found = case.run(impl, *leaves)
    outs = [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, Tensor)]
    if not case.wanted:
        return outs
    outs = [x for x in outs if x.requires_grad]
    generator = torch.Generator(device=outs[0].device).manual_seed(3)
    cotangents = [torch.randn(x.shape, device=x.device, generator=generator).bfloat16().to(x.dtype) for x in outs]
    return [*(x.detach() for x in outs), *torch.autograd.grad(outs, leaves[: case.wanted], cotangents)]


def distances(got: Tensor, plain: Tensor, want: Tensor) -> tuple[float, float, float]:
    """(relative error of `got`, that of plain torch in its dtype, half a unit), of the measure in which `got` is worse:
    the root of the mean square, or the largest element."""
    unit = torch.finfo(got.dtype).eps * (4.0 if got.dtype == torch.float32 else 0.5)
    found = []
    for size in (lambda x: float(x.double().square().mean().sqrt()), lambda x: float(x.double().abs().max())):
        whole = size(want) or 1.0
        found.append((size(got.double() - want) / whole, size(plain.double() - want) / whole, unit))
    return max(found, key=lambda one: one[0] / (2 * one[1] + one[2]))


def float8_error(k: int, where: Where) -> dict[str, Any]:
    """Relative error of products over K of float8 numbers beside the same in float64: what matrix units lose that add
    with few bits. The experts' product of float32 tensors is not rounded behind that."""
    m, f = (16, 16) if where.tiny else (256, 256)
    k = min(k, 128) if where.tiny else k
    x, w = (torch.randn(s, device=where.device) for s in ((m, k), (k, f)))
    ends = torch.tensor([m], dtype=torch.int32, device=where.device)
    row: dict[str, Any] = {"K": k}
    calls: dict[str, tuple[str, torch.dtype, Callable[[Tensor, Tensor, str], Tensor]]] = {
        "tensorwise": ("float8_linear", torch.bfloat16, lambda x, w, impl: op("float8_linear")(x, w, impl=impl)),
        "rowwise": (
            "float8_linear",
            torch.bfloat16,
            lambda x, w, impl: op("float8_linear")(x, w, scaling="rowwise", impl=impl),
        ),
        "experts": (
            "float8_grouped_mm",
            torch.float32,
            lambda x, w, impl: op("float8_grouped_mm")(x, w[None], ends, impl=impl),
        ),
    }
    for name, (_, dtype, run) in calls.items():
        given = x.to(dtype), w.to(dtype)
        want = run(given[0].double(), given[1].double(), "reference")
        got = run(*given, "auto").double()
        row[name] = float((got - want).square().mean().sqrt() / want.square().mean().sqrt())
    return row


def adds_wide(where: Where) -> dict[str, Any]:
    """Whether a bf16 product is added to a float32 sum in one call; else it is made and added by blocks of rows."""
    return {"adds wide": linear_cross_entropy.adds_wide(torch.bfloat16, torch.device(where.device))}


# ---- attention ----


class Shape(NamedTuple):
    """Of a causal call: q [B, T, H, K], k and v [B, T, G, K]."""

    batch: int
    length: int
    heads: int
    groups: int
    dim: int
    dtype: torch.dtype = torch.bfloat16


SHAPES = {
    "124m": Shape(32, 1024, 12, 12, 64),
    "1b": Shape(4, 4096, 32, 8, 64),
    "8b": Shape(2, 8192, 32, 8, 128),
    "8b 32k": Shape(1, 32768, 32, 8, 128),
    "124m float32": Shape(8, 1024, 12, 12, 64, torch.float32),
}


def attention_rows(where: Where) -> Rows:
    """Each form that serves a shape; the first row of a shape says which one "auto" takes, and why not the others."""
    for name, shape in SHAPES.items():
        shape = Shape(1, 32, 2, 1, 16, shape.dtype) if where.tiny else shape
        yield f"{name}: auto", functools.partial(chosen, shape, where)
        try:
            q, k, v = tensors_of(shape._replace(batch=1, length=2), where)
            forms = [form.name for form in attention.forms if not form.reason_against((q, k, v), {})]
        except Exception as error:
            yield f"{name}: forms", failing(error)
            continue
        for form in forms:
            if not (where.cuda and form in OF_CPU):
                yield f"{name}: {form}", functools.partial(rate, shape, form, where)


def tensors_of(shape: Shape, where: Where) -> list[Tensor]:
    """q, k and v."""
    b, t, h, g, k, dtype = shape
    generator = torch.Generator(device=where.device).manual_seed(1)
    return [torch.randn(b, t, heads, k, device=where.device, dtype=dtype, generator=generator) for heads in (h, g, g)]


def chosen(shape: Shape, where: Where) -> dict[str, Any]:
    """The form that "auto" takes, and the reasons against the others."""
    reasons: dict[str, str] = {}
    name, _ = attention.choose("auto", tuple(tensors_of(shape, where)), {}, reasons)
    return {"form": name, "not": reasons}


def rate(shape: Shape, form: str, where: Where) -> dict[str, Any]:
    """TFLOP/s of a form, forward, and forward and backward, of the causal pairs; whether a second run has its bits."""
    leaves = [x.requires_grad_() for x in tensors_of(shape, where)]
    run = functools.partial(attention, impl=form)

    def both() -> tuple[Tensor, ...]:
        out = run(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out)))

    def forward() -> Tensor:
        with torch.no_grad():
            return run(*leaves)

    repeats = all(torch.equal(a, b) for a, b in zip(both(), both()))
    products = 2.0 * shape.batch * shape.heads * shape.dim * attention_pattern.pairs(FULL, shape.length, shape.length)
    counts = (
        attention_pattern.FORWARD_PRODUCTS,
        attention_pattern.FORWARD_PRODUCTS + attention_pattern.BACKWARD_PRODUCTS,
    )
    found = [n * products / median_seconds(call, where.device) / 1e12 for n, call in zip(counts, (forward, both))]
    return {"forward_tflops": found[0], "both_tflops": found[1], "repeats": repeats}
