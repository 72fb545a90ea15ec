"""MLPs whose hidden activations are too large for the device, computed in tiles of their units.

    y = sum over s of act(x w_in[:, s] + b_in[s], ...) w_out[s]

where s is the tile's range. One tile of the hidden activations exists at a time; the backward pass recomputes it from
x, the only tensor that is kept. Sums over tiles run in order, in float32 or wider. `tokens` computes a layer for so
many tokens at a time. Results differ from the untiled ones by rounding.

Ref: Rajbhandari et al. 2021, "ZeRO-Infinity", arXiv:2104.07857, section 5.1.3; for chunks of tokens, Bekman et al.
2025, "Arctic long sequence training", arXiv:2506.13996, section 3.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.core.arguments import expect_count, expect_kind
from fzero.core.autodiff import first_order, needs_grad
from fzero.core.pytree import Tree
from fzero.core.vjp_pair import vjp_pair
from fzero.kernels.custom_operator import Fused, operator
from fzero.kernels.glu import clamped_swiglu, geglu, swiglu
from fzero.kernels.registry import Op
from fzero.models.base import Ctx
from fzero.models.layers import enter_region, exit_region, linear
from fzero.models.weights import WeightInParts


def tile_spans(size: int, tiles: int, label: str = "the dim") -> list[slice]:
    """A dim in `tiles` ranges of nearly equal size; raises ValueError if a tile would be empty."""
    expect_kind("tiles", tiles, int, "give a whole number, such as 4")
    if not 1 <= tiles <= size:
        raise ValueError(f"tiles is {tiles}; {label} has size {size}, so tiles must be in 1..{size}")
    base, remainder = divmod(size, tiles)
    starts = [i * base + min(i, remainder) for i in range(tiles + 1)]
    return [slice(start, stop) for start, stop in pairwise(starts)]


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to `total` in place, in float32 or wider; None counts as 0."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if total is None:
        return (a @ b).to(wide)
    return total.addmm_(a, b) if a.dtype == wide else total.add_(a @ b)


GATES = {op.name: op for op in (swiglu, geglu, clamped_swiglu)}


def tiled_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    tiles: int,
    *,
    tokens: int = 0,
    gate: str = "swiglu",
    impl: str = "auto",
) -> Tensor:
    """gate(x w_gate, x w_up) w_down in tiles of the F units, and of `tokens` tokens at a time (0: all)."""
    d, f = x.shape[-1], w_gate.shape[-1]
    _expect(x, {"w_gate": (w_gate, (d, f)), "w_up": (w_up, (d, f)), "w_down": (w_down, (f, w_down.shape[-1]))})
    return _apply(gate, x, [w_gate, w_up, w_down], tiles, tokens, impl)


def tiled_gelu_mlp(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    tiles: int,
    b_in: Tensor | None = None,
    *,
    tokens: int = 0,
) -> Tensor:
    """gelu(x w_in + b_in) w_out in tiles as `tiled_mlp`, with the tanh form of GELU."""
    f = w_in.shape[-1]
    _expect(x, {"w_in": (w_in, (x.shape[-1], f)), "w_out": (w_out, (f, w_out.shape[-1])), "b_in": (b_in, (f,))})
    return _apply("gelu", x, [w_in, w_out] if b_in is None else [w_in, b_in, w_out], tiles, tokens)


def _expect(x: Tensor, shapes: dict[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} is {list(tensor.shape)}; with x {list(x.shape)} and the others it must be {list(shape)}"
            )


def _linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x @ w.to(x.dtype)
    return y if bias is None else y + bias.to(x.dtype)


class TiledLayer(NamedTuple):
    """sum over tiles of activation(x w_1 + b_1, ..., x w_k + b_k) w_out, for x [N, D]."""

    activation: Callable[..., Tensor]  # of k tensors [N, f]; elementwise
    inner: int  # k
    spans: list[slice]

    def tile(self, wholes: Sequence[Tensor], i: int) -> list[Tensor]:
        """Views of tile i of all parameters, or of their gradients."""
        start, stop = self.spans[i].start, self.spans[i].stop
        return [full.narrow(int(n < self.inner), start, stop - start) for n, full in enumerate(wholes)]

    def inputs(self, x: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
        """The k inputs of the activation."""
        biases = params[self.inner : -1] or [None] * self.inner
        return [_linear(x, w, b) for w, b in zip(params[: self.inner], biases)]

    def plain(self, x: Tensor, *params: Tensor) -> Tensor:
        """The layer without tiles."""
        return self.activation(*self.inputs(x, params)) @ params[-1].to(x.dtype)

    @torch.no_grad()
    def forward(self, x: Tensor, params: Sequence[Tensor]) -> Tensor:
        """y [N, D]."""
        y = None
        for i in range(len(self.spans)):
            tile = self.tile(params, i)
            y = _add_product(y, self.activation(*self.inputs(x, tile)), tile[-1].to(x.dtype))
        assert y is not None  # there is a tile
        return y.to(x.dtype)

    @torch.no_grad()
    def backward(self, x: Tensor, params: Sequence[Tensor], dy: Tensor, sums: Sequence[Tensor]) -> Tensor:
        """dx [N, D]. The parameters' gradients are added to `sums`; with none they are not computed."""
        dx = None
        for i in range(len(self.spans)):
            dx = self.tile_backward(x, self.tile(params, i), dy, self.tile(sums, i), dx)
        assert dx is not None  # there is a tile
        return dx.to(x.dtype)

    def tile_backward(
        self, x: Tensor, params: Sequence[Tensor], dy: Tensor, sums: Sequence[Tensor], dx: Tensor | None
    ) -> Tensor | None:
        """dx of a tile added to `dx`."""
        pair = vjp_pair(lambda *pre: [self.activation(*pre)], self.inner, compiled=False)
        weights = [p.to(x.dtype) for p in params]
        (h,), residuals = pair.forward(self.inputs(x, weights))
        dw_out = [h.t() @ dy] if sums else []
        del h
        grads = pair.backward(residuals, [dy @ weights[-1].t()])
        for w, g in zip(weights, grads):
            dx = _add_product(dx, g, w.t())
        if sums:
            biases = [g.sum(0) for g in grads] if len(params) > self.inner + 1 else []
            for total, p, grad in zip(sums, params, (*(x.t() @ g for g in grads), *biases, *dw_out)):
                total.add_(grad.to(p.dtype))
        return dx


def _layer(kind: str, params: Sequence[Tensor], tiles: int, impl: str) -> TiledLayer:
    gelu = functools.partial(F.gelu, approximate="tanh")
    activation, inner = (functools.partial(GATES[kind], impl=impl), 2) if kind in GATES else (gelu, 1)
    return TiledLayer(activation, inner, tile_spans(params[0].shape[1], tiles, "F, the units,"))


def _rows(x: Tensor, tokens: int) -> int:
    """The rows that are computed at a time."""
    return tokens if 0 < tokens < len(x) else max(len(x), 1)


def _forward_flops(x: Tensor, params: Sequence[Tensor], *arguments: Any, out_val: Any = None) -> int:
    """Of x [N, D] and each matrix of a tiled layer."""
    return 2 * x.shape[0] * sum(p.numel() for p in params if p.dim() == 2)


def _backward_flops(x: Tensor, params: Sequence[Tensor], *arguments: Any, out_val: Any = None) -> int:
    """A gradient by inputs and one by weights, and of an MLP its hidden units again."""
    *inner, last = (p.numel() for p in params if p.dim() == 2)
    frozen = arguments[-1]  # of (dy, kind, tiles, tokens, impl, frozen)
    return 2 * x.shape[0] * ((2 - frozen) * (sum(inner) + last) + sum(inner))


# Custom operators, opaque to the compiler: it would otherwise compute all tiles and then concatenate their gradients,
# at twice their memory.
@operator(
    "tiled_layer(Tensor x, Tensor[] params, str kind, int tiles, int tokens, str impl) -> Tensor",
    lambda x, params, *_: x.new_empty(x.shape[0], params[-1].shape[-1]),
    opened=True,
    flop=_forward_flops,
)
def tiled_layer(x: Tensor, params: Sequence[Tensor], kind: str, tiles: int, tokens: int, impl: str) -> Tensor:
    """y [N, F] of x [N, D] for a layer of this kind, `tokens` rows at a time."""
    layer, rows = _layer(kind, params, tiles, impl), _rows(x, tokens)
    if rows >= len(x):
        return layer.forward(x, params)
    y = x.new_empty(x.shape[0], params[-1].shape[-1])
    for x_chunk, y_chunk in zip(x.split(rows), y.split(rows)):
        y_chunk.copy_(layer.forward(x_chunk, params))
    return y


@operator(
    "tiled_layer_backward(Tensor x, Tensor[] params, Tensor dy, str kind, int tiles, int tokens, str impl, "
    "bool frozen) -> Tensor[]",
    lambda x, params, dy, kind, tiles, tokens, impl, frozen: [
        x.new_empty(x.shape),
        *(torch.empty_like(p) for p in ([] if frozen else params)),
    ],
    opened=True,
    flop=_backward_flops,
)
def tiled_layer_backward(
    x: Tensor, params: Sequence[Tensor], dy: Tensor, kind: str, tiles: int, tokens: int, impl: str, frozen: bool
) -> list[Tensor]:
    """The gradients of x and, unless frozen, of the parameters: sums over chunks of tokens."""
    layer, rows = _layer(kind, params, tiles, impl), _rows(x, tokens)
    wide = torch.promote_types(x.dtype, torch.float32)
    trained = [] if frozen else params
    sums = [torch.zeros_like(p, dtype=wide if rows < len(x) else p.dtype) for p in trained]
    if rows >= len(x):
        return [layer.backward(x, params, dy, sums), *sums]
    dx = x.new_empty(x.shape)
    for x_chunk, dy_chunk, dx_chunk in zip(x.split(rows), dy.split(rows), dx.split(rows)):
        dx_chunk.copy_(layer.backward(x_chunk, params, dy_chunk, sums))
    return [dx, *(sums.pop(0).to(p.dtype) for p in trained)]


def _apply(kind: str, x: Tensor, params: Sequence[Tensor], tiles: int, tokens: int = 0, impl: str = "auto") -> Tensor:
    """The layer as a differentiable function of x [..., D] and its parameters."""
    expect_count("tokens", tokens, minimum=0)
    layer = _layer(kind, params, tiles, impl)
    if not first_order():
        return layer.plain(x, *params)
    frozen = not needs_grad(*params)

    def forward(x: Tensor, *params: Tensor) -> tuple[Tensor]:
        return (tiled_layer(x, params, kind, tiles, tokens, impl),)

    def backward(saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor]:
        return tiled_layer_backward(saved[0], saved[1:], grads[0], kind, tiles, tokens, impl, frozen)

    y = Fused(f"a layer in tiles ({kind})", forward, backward)(x.reshape(-1, x.shape[-1]), *params)
    return y.reshape(*x.shape[:-1], y.shape[-1])


GATE_OPS = {"silu": swiglu, "gelu": geglu, "clamped": clamped_swiglu}  # by the activation of the gate


def gated_mlp(p: Tree, x: Tensor, ctx: Ctx, activation: str = "silu", tiles: int = 1, tokens: int = 0) -> Tensor:
    """(activation(x w_gate) * (x w_up)) w_down (Shazeer 2020, equation 6); activation: of GATE_OPS."""
    x, gate = enter_region(x, ctx, "blocks/mlp"), GATE_OPS[activation]
    if tiles > 1 or tokens:
        expect_plain(p, ctx, tiles, tokens)
        options = {"tokens": tokens, "gate": gate.name, "impl": ctx.kernels[gate.name]}
        h = tiled_mlp(x, p["w_gate"], p["w_up"], p["w_down"], tiles, **options)
        return exit_region(h, ctx, "blocks/mlp")
    return exit_region(gated_product(p, x, ctx, gate), ctx, "blocks/mlp")


def gated_product(p: Tree, x: Tensor, ctx: Ctx, gate: Op = swiglu) -> Tensor:
    """gate(x w_gate, x w_up) w_down of x [..., D] inside the tensor-parallel region."""
    h = gate(linear(x, p["w_gate"], ctx=ctx), linear(x, p["w_up"], ctx=ctx), impl=ctx.kernels[gate.name])
    return linear(h, p["w_down"], ctx=ctx)


def expect_plain(p: Tree, ctx: Ctx, tiles: int, tokens: int = 0) -> None:
    """Raise ValueError if the MLP of these weights cannot be computed in parts."""
    ctx.kernels.refuse("an MLP in parts (mlp_tiles, mlp_tokens)")
    name, value, disabled = ("mlp_tiles", tiles, 1) if tiles > 1 else ("mlp_tokens", tokens, 0)
    if ctx.matmul:
        raise ValueError(
            f"{name} is {value} and the policy multiplies through {ctx.matmul}: tiles have no float8 "
            f"form; use {name}={disabled}"
        )
    for weight, w in p.items():
        if isinstance(w, WeightInParts):
            raise ValueError(
                f"{name} is {value}, and blocks/mlp/{weight} has factors or codes (LoRA, quantize), which are not "
                f"tiled; use {name}={disabled}, and layer_tokens for a long sequence"
            )
