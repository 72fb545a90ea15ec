"""What each operation of the registry is called with at a training shape, and what of that is differentiated.

`cases(device, tiny)` serves ten.py; tiny sizes are for finding mistakes, and mean nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import prng
from fzero.kernels.attention_arguments import Positions
from fzero.kernels.attention_pattern import Pattern
from fzero.kernels.block_mask import bigbird_blocks
from fzero.kernels.optim_leaf import OptimLeaf, StepRates
from fzero.kernels.registry import Op, op
from fzero.kernels.rope import rope_frequencies

BF16, F32 = torch.bfloat16, torch.float32
CORRECTIONS = 1 - 0.9**10, (1 - 0.95**10) ** 0.5  # of AdamW's tenth step


class Case(NamedTuple):
    """One operation at one size. `run(impl, *tensors)` computes it: a tensor, or several.

    The first `wanted` tensors are differentiated. precise: whether the definition in float64 is what the numbers are
    compared with; else they are codes or places, and compared with the definition in the same dtype. exact: computes
    what `run("reference", ...)` of float64 tensors cannot.
    """

    label: str
    op: Op
    run: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    wanted: int = 0
    precise: bool = True
    exact: Callable[..., Any] | None = None

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(the arguments, the options) of the operation in this call, for what its forms say of it."""
        seen: list[Any] = []
        with_recorder = functools.partial(_record, seen)
        self.run(with_recorder, *self.tensors)
        return seen[0]


def _record(seen: list[Any], *args: Any, **options: Any) -> Any:
    seen.append((args, options))


def _case(name: str, tensors: tuple[Tensor, ...], wanted: int, *more: Any, label: str = "", **options: Any) -> Case:
    def run(impl: Any, *t: Tensor) -> Any:
        return call(name, impl, *t, *more, **options)

    return Case(label or name, op(name), run, tensors, wanted)


def call(name: str, impl: Any, *args: Any, **options: Any) -> Any:
    """The operation by the form `impl`; a function takes its arguments and options instead."""
    return impl(*args, **options) if callable(impl) else op(name)(*args, impl=impl, **options)


def cases(device: str, tiny: bool) -> Iterator[Callable[[], Case]]:
    """A function for each case that makes its tensors, so that one case's memory is free before the next."""
    yield from norms(device, tiny)
    yield from pointwise(device, tiny)
    yield from losses(device, tiny)
    yield from products(device, tiny)
    yield from attentions(device, tiny)
    yield from paged(device, tiny)
    yield from optimizers(device, tiny)
    yield from codes(device, tiny)
    yield from experts(device, tiny)


def norms(device: str, tiny: bool) -> Iterator[Callable[[], Case]]:
    """The four norms, at the widths of the 1B and the 124M."""

    def norm(name: str) -> Case:
        layer, add = "layer" in name, "add" in name
        m, n = (4, 64) if tiny else (16384, 768 if layer else 2048)
        x = tuple(torch.randn(m, n, device=device, dtype=BF16) for _ in range(1 + add))
        params = tuple(torch.rand(n, device=device) + 0.5 for _ in range(1 + layer))
        return _case(name, (*x, *params), 2 + layer + add, 1e-5)

    for name in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"):
        yield functools.partial(norm, name)


def pointwise(device: str, tiny: bool) -> Iterator[Callable[[], Case]]:
    """Gated units, rotations, dropout."""
    draw = functools.partial(torch.randn, device=device, dtype=BF16)

    def glu(name: str) -> Case:
        shape = (16, 64) if tiny else (16384, 8192)
        return _case(name, (draw(shape), draw(shape)), 2)

    for name in ("swiglu", "geglu", "clamped_swiglu"):
        yield functools.partial(glu, name)

    def rope(name: str) -> Case:
        b, t, h, g, k = (1, 16, 2, 1, 16) if tiny else (4, 4096, 32, 8, 64)
        angles, positions = rope_frequencies(k, 5e5, None, torch.device(device)), torch.arange(t, device=device)
        x = (draw(b, t, h, k), draw(b, t, g, k))[: 2 if name == "rope_qk" else 1]
        return Case(name, op(name), lambda impl, *t: call(name, impl, *t, positions, angles), x, len(x))

    for name in ("rope", "rope_qk"):
        yield functools.partial(rope, name)

    def dropout() -> Case:
        shape = (4, 4, 64) if tiny else (4, 4096, 2048)
        key, first = prng.key(0, device), torch.tensor(0, device=device)
        return _case("dropout_add", (draw(shape), draw(shape)), 2, 0.1, key, first)

    yield dropout


def losses(device: str, tiny: bool) -> Iterator[Callable[[], Case]]:
    """Cross entropy on logits, and with the head's product; the head of the 124M, and that of the 1B on few tokens."""
    draw = functools.partial(torch.randn, device=device, dtype=BF16)

    def loss() -> Case:
        n, v = (8, 100) if tiny else (4096, 50257)
        targets = torch.randint(v, (n,), device=device)
        run = functools.partial(_call_loss, "cross_entropy", {"compiled": device == "cuda"}, targets)
        return Case("cross_entropy", op("cross_entropy"), run, (draw(n, v),), 1)

    def head(n: int, d: int, v: int) -> Case:
        targets = torch.randint(v, (n,), device=device)
        name, options = "linear_cross_entropy", {"compiled": device == "cuda"}
        run = functools.partial(_call_loss, name, options, targets)
        return Case(f"{name} V={v}", op(name), run, (draw(n, d), draw(v, d) * d**-0.5), 2)

    yield loss
    for sizes in ((8, 32, 100),) if tiny else ((4096, 768, 50257), (1024, 2048, 128256)):
        yield functools.partial(head, *sizes)


def _call_loss(name: str, options: dict[str, Any], targets: Tensor, impl: Any, *tensors: Tensor) -> Any:
    return call(name, impl, *tensors, targets, **options)


def products(device: str, tiny: bool) -> Iterator[Callable[[], Case]]:
    """A linear layer and a head, of many tokens and of one; functions of numbers, and of rows of logits."""

    def linear(m: int) -> Case:
        k, n = (48, 40) if tiny else (2048, 8192)
        x, w = (torch.randn(shape, device=device, dtype=BF16) for shape in ((m, k), (k, n)))
        return _case("linear", (x, w * k**-0.5), 2, label=f"linear M={m}")

    def logits(m: int) -> Case:
        d, v = (48, 40) if tiny else (2048, 32000)
        x, w = (torch.randn(shape, device=device, dtype=BF16) for shape in ((m, d), (v, d)))
        return _case("logits", (x, w * d**-0.5), 2, label=f"logits M={m}")

    for m in (1, 16 if tiny else 1024):
        yield functools.partial(linear, m)
        yield functools.partial(logits, m)

    def numbers(name: str, dtype: torch.dtype) -> Case:
        x = torch.randn(*((8, 40) if tiny else (1024, 8192)), device=device, dtype=dtype)
        return _case(name, (x,), 1)

    for name in ("gelu", "sigmoid", "tanh"):
        yield functools.partial(numbers, name, BF16)
    yield functools.partial(numbers, "log_sum_exp", F32)


def attentions(device: str, tiny: bool) -> Iterator[Callable[[], Case]]:
    """Whole sequences with grouped heads, also in float32; windows in documents; at positions; with its log-sum-exp; by
    blocks."""

    def attention(label: str, k: int, dtype: torch.dtype, **options: Any) -> Case:
        b, t, h, g, k = (1, 32, 2, 1, 16) if tiny else (2, 2048, 16, 4, k)
        q, key, v = (torch.randn(b, t, heads, k, device=device, dtype=dtype) for heads in (h, g, g))
        if options.pop("documents", False):
            options["documents"] = (torch.arange(t, device=device) // (t // 3)).expand(b, t).contiguous()
        if options.pop("by_blocks", False):
            options["mask"] = bigbird_blocks(t, 16 if tiny else 64, random=2, heads=h).to(device)
        if options.pop("in_memory", False):
            line = torch.arange(t, device=device)
            options["positions"] = Positions(line, line)
        return _case("attention", (q, key, v), 3, label=label, **options)

    for k in (64, 128):
        yield functools.partial(attention, f"attention K={k}", k, BF16)
    yield functools.partial(attention, "attention float32", 64, F32)
    window = Pattern("window", size=16 if tiny else 512)
    yield functools.partial(attention, "attention window", 64, BF16, pattern=window, documents=True)
    yield functools.partial(attention, "attention at positions", 64, BF16, in_memory=True)
    yield functools.partial(attention, "attention under a mask", 64, BF16, by_blocks=True)


def pages_of(rows: Sequence[tuple[int, int]], device: str, tokens: int = 16) -> tuple[Tensor, Tensor, Tensor, int]:
    """(table, starts, positions, number of pages) of rows (position of the first query, queries), in any pages."""
    counts = [-(-(first + n) // tokens) for first, n in rows]
    pages = torch.randperm(sum(counts), dtype=torch.int32).to(device).split(counts)
    table = torch.nn.utils.rnn.pad_sequence([*pages], batch_first=True)
    starts = torch.tensor([0, *(n for _, n in rows)], device=device).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(first, first + n, device=device) for first, n in rows])
    return table, starts, positions, sum(counts)


def paged(device: str, tiny: bool) -> Iterator[Callable[[], Case]]:
    """Rows of a step on pages: grouped heads, a window with sinks, and latents that are keys and values."""

    def attention(label: str, key: int, value: int, groups: int, dtype: torch.dtype, **options: Any) -> Case:
        spans = [(20, 1), (0, 9)] if tiny else [(8191, 1)] * 8 + [(1023, 1), (4000, 300), (0, 100), (700, 4)]
        table, starts, positions, count = pages_of(spans, device)
        h = 4 if tiny else 32
        q, k = torch.randn(len(positions), h, key, device=device), torch.randn(count, 16, groups, key, device=device)
        v = torch.randn(count, 16, groups, value, device=device) if key == value else k[..., :value]
        options = {name: torch.randn(h, device=device) if name == "sinks" else x for name, x in options.items()}

        def run(impl: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
            v = v if key == value else k[..., :value]
            return call("paged_attention", impl, q, k, v, table, starts, positions, **options)

        return Case(label, op("paged_attention"), run, tuple(x.to(dtype) for x in (q, k, v)))

    size = 16 if tiny else 128
    yield functools.partial(attention, "paged_attention", size, size, 2, BF16)
    yield functools.partial(attention, "paged_attention float32", size // 2, size // 2, 2, F32)
    window = Pattern("window", size=16 if tiny else 512)
    yield functools.partial(
        attention, "paged_attention window", size, size, 2, BF16, pattern=window, sinks=True, cap=30.0
    )
    sizes = (24, 16) if tiny else (576, 512)
    yield functools.partial(attention, "paged_attention latents", *sizes, 1, BF16)


def optimizers(device: str, tiny: bool) -> Iterator[Callable[[], Case]]:
    """A step of several leaves, with states in float32 and in bfloat16; the norm; the orthogonal factor."""
    f32 = functools.partial(torch.randn, device=device)
    sizes = [(8, 64), (7,), (3, 5)] if tiny else [(2048, 8192), (2048,), (128256, 64)]

    def step(name: str, states: torch.dtype) -> Case:
        count = 2 if name == "adamw" else 1
        scalars = tuple(
            torch.tensor(x, dtype=torch.float64, device=device) for x in (1e-3, *CORRECTIONS)[: 2 * count - 1]
        )
        rates = StepRates(scalars, torch.tensor(9, device=device), 0.9, 0.95, 1e-8)
        tensors = [[f32(s), f32(s), *(f32(s).abs().to(states) for _ in range(count))] for s in sizes]

        def run(impl: Any, *t: Tensor) -> Any:
            given = [x.clone() for x in t]
            each = [given[i : i + 2 + count] for i in range(0, len(given), 2 + count)]
            leaves = [OptimLeaf(p, g, tuple(state), 0.1) for p, g, *state in each]
            done = call(name, impl, leaves, rates)
            return done if callable(impl) else tuple(x for leaf in leaves for x in (leaf.p, *leaf.state))

        return Case(f"{name}, {str(states)[6:]} states", op(name), run, tuple(x for leaf in tensors for x in leaf))

    for name in ("adamw", "lion"):
        yield functools.partial(step, name, F32)
    yield functools.partial(step, "adamw", BF16)

    def norm() -> Case:
        tensors = tuple(f32(s) for s in sizes)
        exact = lambda *t: torch.stack([x.square().sum() for x in t]).sum().sqrt()  # noqa: E731

        def run(impl: Any, *t: Tensor) -> Any:
            found = call("grad_norm", impl, t)
            return found[0] if isinstance(found, tuple) else found

        return Case("grad_norm", op("grad_norm"), run, tensors, exact=exact)

    yield norm
    yield lambda: _case("newton_schulz", (f32((1, 16, 32) if tiny else (4, 768, 3072)).to(BF16),), 0)


def codes(device: str, tiny: bool) -> Iterator[Callable[[], Case]]:
    """Numbers in fewer bits: codes as the definition has them, and products of float8 numbers."""
    n = (16, 64) if tiny else (4096, 4096)

    def coded(name: str, kind: str) -> Case:
        x = torch.randn(n, device=device)
        parts = op("quantize")(x, kind, 64, impl="reference")
        if name == "quantize":
            case = _case(name, (x.to(BF16),), 0, kind, 64)
        elif name == "dequantize":
            case = Case(name, op(name), lambda impl, *q: call(name, impl, q, kind, 64), (*parts,))
        else:
            several = tuple(torch.stack([part] * 3) for part in parts)
            case = _case(name, several, 0, kind, 64)
        return case._replace(label=f"{name} {kind}", precise=False)

    for kind in ("int8", "int4", "fp8_e4m3"):
        yield functools.partial(coded, "quantize", kind)
    yield functools.partial(coded, "dequantize", "int8")
    yield functools.partial(coded, "dequantize_sum_requantize", "int8")

    def product_of_codes() -> Case:
        m, k, f = (2, 64, 128) if tiny else (8, 2048, 8192)
        x, w = (torch.randn(s, device=device, dtype=BF16) for s in ((m, k), (k, f)))
        codes, scales = op("quantize")(w * k**-0.5, "int8", 64, impl="reference")
        return _case("quantized_linear", (x,), 0, codes, scales, "int8", 64)

    yield product_of_codes

    def weight(name: str) -> Case:
        w = torch.randn(n, device=device, dtype=BF16)
        most = w.abs().amax().float()
        w = op("narrow_weight")(w, most, impl="reference") if name == "widen_weight" else w
        return _case(name, (w, most), 0)._replace(precise=False)

    for name in ("narrow_weight", "widen_weight"):
        yield functools.partial(weight, name)

    def linear(scaling: str) -> Case:
        m, k, f = (16, 32, 48) if tiny else (4096, 2048, 8192)
        x, w = (torch.randn(s, device=device, dtype=BF16) for s in ((m, k), (k, f)))
        return _case("float8_linear", (x, w * k**-0.5), 2, label=f"float8_linear {scaling}", scaling=scaling)

    for scaling in ("tensorwise", "rowwise"):
        yield functools.partial(linear, scaling)


def experts(device: str, tiny: bool) -> Iterator[Callable[[], Case]]:
    """What a mixture of experts does: choose, sort, move rows, multiply."""
    n, e, d, f = (32, 2, 16, 32) if tiny else (4096, 8, 1024, 2048)
    ends = (torch.arange(1, e + 1, device=device) * (n // e)).to(torch.int32)

    def product(name: str) -> Case:
        x, w = (torch.randn(s, device=device, dtype=BF16) for s in ((n, d), (e, d, f)))
        return _case(name, (x, w * d**-0.5), 2, ends)

    for name in ("grouped_mm", "float8_grouped_mm"):
        yield functools.partial(product, name)
    logits = functools.partial(torch.randn, n, e, device=device)
    yield lambda: Case("route", op("route"), lambda impl, x: _behind_ids(call("route", impl, x, 2)), (logits(),), 1)

    def places() -> tuple[Tensor, Any]:
        ids = torch.randint(e, (n, 2), device=device)
        return ids, op("group")(ids, e, impl="reference")

    yield lambda: _case("group", (places()[0],), 0, e)._replace(precise=False)

    def moved(name: str) -> Case:
        _, groups = places()
        if name == "permute":
            return _case(name, (torch.randn(n, d, device=device, dtype=BF16),), 1, groups.order, groups.inverse)
        y, weights = torch.randn(2 * n, d, device=device, dtype=BF16), torch.rand(n, 2, device=device)
        return _case(name, (y, weights), 2, groups.order, groups.inverse)

    for name in ("permute", "unpermute"):
        yield functools.partial(moved, name)


def _behind_ids(found: Any) -> Any:
    return found[1:] if isinstance(found, tuple) else found
