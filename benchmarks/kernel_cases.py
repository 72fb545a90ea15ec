"""What the benchmarks call each operation with: tensors of some sizes, what is differentiated, and the bytes or FLOPs
at least.

`cases(device, tiny)` serves gpu.py; tiny sizes are for finding mistakes, and mean nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.core import prng
from fzero.kernels.optim_leaf import Leaf, Rates
from fzero.kernels.registry import Op, op
from fzero.kernels.rope import rope_frequencies

BF16 = torch.bfloat16


class Case(NamedTuple):
    """One operation at one size. `run(impl, *tensors)` computes it; the first `wanted` tensors are differentiated."""

    label: str
    op: Op
    run: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    wanted: int
    bound: str  # "bytes" or "flops": what limits it
    forward: float  # bytes or FLOPs at least
    both: float  # of forward and backward together
    peers: dict[str, Callable[..., Any]] = {}  # noqa: RUF012  (never mutated)


def _case(
    label: str,
    name: str,
    tensors: tuple[Any, ...],
    wanted: int,
    bound: str,
    forward: float,
    both: float,
    **options: Any,
) -> Case:
    peers = options.pop("peers", {})
    return Case(
        label,
        op(name),
        lambda impl, *t: op(name)(*t, impl=impl, **options),
        tensors,
        wanted,
        bound,
        forward,
        both,
        peers,
    )


def cases(device: str, tiny: bool) -> Iterator[Callable[[], Case]]:
    """A function for each case that makes its tensors, so that one case's memory is free before the next."""
    draw = functools.partial(torch.randn, device=device, dtype=BF16)
    rows = 16 if tiny else 16384

    def norm(name: str, n: int) -> Case:
        m = max(1, rows * 4096 // n) if not tiny else 4
        n = 64 if tiny else n
        layer, add = "layer" in name, "add" in name
        x = tuple(draw(m, n) for _ in range(1 + add))
        params = tuple(torch.rand(n, device=device) + 0.5 for _ in range(1 + layer))
        elements, weights = m * n, tuple(params)

        def peer(*tensors: Tensor) -> Any:
            s = tensors[0] + tensors[1] if add else tensors[0]
            w = [p.to(s.dtype) for p in tensors[1 + add :]]
            out = F.layer_norm(s, (n,), *w, 1e-5) if layer else F.rms_norm(s, (n,), *w, 1e-5)
            return (out, s) if add else out

        def run(impl: str, *tensors: Tensor) -> Any:
            return op(name)(*tensors, 1e-5, impl=impl)

        both = elements * (14 if add else 10)
        peers = {"torch's own": peer}
        return Case(
            f"{name} {m}x{n}",
            op(name),
            run,
            (*x, *weights),
            len(x) + len(params),
            "bytes",
            elements * (8 if add else 4),
            both,
            peers,
        )

    for name in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"):
        for n in (1024, 4096, 32768) if name == "rms_norm" else (4096,):
            yield functools.partial(norm, name, n)

    def glu(name: str) -> Case:
        shape = (rows, 64 if tiny else 14336)
        n = shape[0] * shape[1]
        return _case(f"{name} {shape[0]}x{shape[1]}", name, (draw(shape), draw(shape)), 2, "bytes", 6 * n, 16 * n)

    yield functools.partial(glu, "swiglu")
    yield functools.partial(glu, "geglu")

    def rope() -> Case:
        b, t, h, g, k = (1, 16, 2, 1, 16) if tiny else (4, 4096, 32, 8, 128)
        q, key = draw(b, t, h, k), draw(b, t, g, k)
        angles = rope_frequencies(k, 5e5, None, torch.device(device))
        n = q.numel() + key.numel()
        return _case("rope_qk", "rope_qk", (q, key, torch.arange(t, device=device), angles), 2, "bytes", 4 * n, 8 * n)

    yield rope

    def dropout() -> Case:
        shape = (4, rows // 4, 64 if tiny else 4096)
        x, n = draw(shape), rows * shape[2]
        key, first = prng.key(0, device), torch.tensor(0, device=device)
        name = "dropout_add"

        def run(impl: str, x: Tensor, residual: Tensor) -> Tensor:
            return op(name)(x, residual, 0.1, key, first, impl=impl)

        return Case(name, op(name), run, (x, draw(shape)), 2, "bytes", 6 * n, 10 * n)

    yield dropout

    def loss(v: int) -> Case:
        n, v = (8, 100) if tiny else (8192, v)
        logits, targets = draw(n, v), torch.randint(v, (n,), device=device)
        peers = {"F.cross_entropy": lambda x, t: F.cross_entropy(x.float(), t, reduction="sum")}
        return _case(
            f"cross_entropy {n}x{v}", "cross_entropy", (logits, targets), 1, "bytes", 2 * n * v, 4 * n * v, peers=peers
        )

    yield functools.partial(loss, 32000)
    yield functools.partial(loss, 128256)

    def head(n: int) -> Case:
        n, h, v = (8, 32, 100) if tiny else (n, 4096, 128256)
        x, w, targets = draw(n, h), draw(v, h) * h**-0.5, torch.randint(v, (n,), device=device)
        flop = 2.0 * n * h * v
        peers = {"F.cross_entropy(x @ w.T)": lambda x, w, t: F.cross_entropy((x @ w.T).float(), t, reduction="sum")}
        return _case(
            f"linear_cross_entropy {n}",
            "linear_cross_entropy",
            (x, w, targets),
            2,
            "flops",
            flop,
            3 * flop,
            peers=peers,
        )

    for n in (2048,) if tiny else (2048, 8192, 16384):
        yield functools.partial(head, n)

    def attention(t: int, k: int) -> Case:
        b, h, g = max(1, 16384 // t), 4096 // k, 4096 // k // 4
        b, t, h, g, k = (1, 32, 2, 1, 16) if tiny else (b, t, h, g, k)
        q, key, v = draw(b, t, h, k), draw(b, t, g, k), draw(b, t, g, k)
        flop = 2.0 * b * h * t * t * k  # two products, half of them visible

        def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
            ).transpose(1, 2)

        return _case(
            f"attention T={t} K={k}", "attention", (q, key, v), 3, "flops", flop, 3.5 * flop, peers={"SDPA": sdpa}
        )

    for k in (64, 128):
        for t in (32,) if tiny else (1024, 4096, 16384):
            yield functools.partial(attention, t, k)

    def adamw(states: torch.dtype, copy: bool) -> Case:
        sizes = [(8, 64)] * 3 if tiny else [(4096, 4096)] * 30
        f32 = functools.partial(torch.randn, device=device)
        leaves = [
            Leaf(
                f32(s),
                f32(s),
                (torch.zeros(s, device=device, dtype=states),) * 1 + (torch.zeros(s, device=device, dtype=states),),
                0.1,
                copy=torch.zeros(s, device=device, dtype=BF16) if copy else None,
            )
            for s in sizes
        ]
        scalars = tuple(torch.tensor(x, dtype=torch.float64, device=device) for x in (1e-3, 0.1, 0.3))
        rates = Rates(scalars, torch.tensor(9, device=device), 0.9, 0.95, 1e-8)
        cost = float(op("adamw").bytes(leaves, rates))
        label = f"adamw, {str(states)[6:]} states{', bf16 copy' if copy else ''}"
        return Case(label, op("adamw"), lambda impl: op("adamw")(leaves, rates, impl=impl), (), 0, "bytes", cost, 0.0)

    yield functools.partial(adamw, torch.float32, False)
    yield functools.partial(adamw, torch.float32, True)
    yield functools.partial(adamw, BF16, False)

    def quantize(kind: str) -> Case:
        x = draw(rows, 64 if tiny else 4096)
        name = "quantize"
        cost = float(op(name).bytes(x, kind, 64))
        return Case(
            f"quantize {kind}", op(name), lambda impl, x: op(name)(x, kind, 64, impl=impl), (x,), 0, "bytes", cost, 0.0
        )

    for kind in ("int8", "int4", "fp8_e4m3"):
        yield functools.partial(quantize, kind)

    def experts() -> Case:
        n, e, d, f = (32, 2, 16, 32) if tiny else (16384, 8, 4096, 14336)
        x, w = draw(n, d), draw(e, d, f) * d**-0.5
        ends = (torch.arange(1, e + 1, device=device) * (n // e)).to(torch.int32)
        flop = 2.0 * n * d * f
        return _case("grouped_mm", "grouped_mm", (x, w, ends), 2, "flops", flop, 3 * flop)

    yield experts
