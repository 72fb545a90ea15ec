"""MLPs whose hidden activations are too large for the device, computed in tiles of their units.

    y = sum over s of act(x w_in[:, s] + b_in[s], ...) w_out[s]

where s is the tile's range. Only one tile of the hidden activations exists at a time; the backward pass recomputes it
from x, the only tensor that is kept. Sums over tiles run in order, in float32 or wider.

`tiled_mlp` and `tiled_gelu_mlp` are differentiable functions of whole tensors. Below them, `TiledMLP` takes each
tile's parameters from a function `fetch` and hands its gradients to a function `put`. Forward and backward pass each
fetch tile 0, 1, ... in this order, and release one before they fetch the next.

`tokens` computes a layer for so many tokens at a time, all of its tiles for each: what is as long as the sequence is
then x, y and their gradients alone, in x's dtype; the gradients of the parameters are summed over the chunks in float32
or wider, which has the size of the parameters.

Results are sums over tiles, and differ from the untiled ones by rounding. One way of tiling gives the same bits
wherever its tiles lie.
Ref: Rajbhandari et al. 2021, "ZeRO-Infinity", arXiv:2104.07857, section
5.1.3; for chunks of tokens, Bekman et al. 2025, "Arctic long sequence training", arXiv:2506.13996, section 3.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.core.arguments import expect_count, expect_kind
from fzero.core.autodiff import first_order, needs_grad
from fzero.core.stack import Fetch, StoreGrads
from fzero.core.vjp_pair import vjp_pair
from fzero.kernels import flops
from fzero.kernels.custom_operator import Fused, operator
from fzero.kernels.glu import clamped_swiglu, geglu, swiglu


def tile_spans(size: int, tiles: int, label: str = "the dim") -> list[slice]:
    """Split a dim into `tiles` ranges of nearly equal size: the first size % tiles have one element more.

    Raises ValueError if a tile would be empty.
    """
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


@dataclass(frozen=True)
class TiledMLP:
    """sum over tiles of activation(x w_1 + b_1, ..., x w_k + b_k) w_out, for x [N, D]: an MLP in tiles of its hidden
    units.

    fetch(i) returns (w_1, ..., w_k [D, f], then b_1, ..., b_k [f] if `biased`, then w_out [f, D]) of tile i, and
    decides which units these are. Parameters may have any strides and dtype, and are converted to x's dtype. Store w_in
    transposed, [F, D], on a disk: its tiles are then contiguous rows, like those of w_out. The caller adds a bias after
    the last product. Not recorded by autograd.
    """

    activation: Callable[..., Tensor]  # of k tensors [N, f]; elementwise
    tiles: int
    inner: int = 1  # k
    biased: bool = False

    def _inner(self, params: Sequence[Tensor], x: Tensor) -> list[Tensor]:
        """The k inputs of the activation."""
        pre = [x @ w.to(x.dtype) for w in params[: self.inner]]
        if self.biased:
            pre = [p.add_(b.to(x.dtype)) for p, b in zip(pre, params[self.inner :])]
        return pre

    @torch.no_grad()
    def forward(self, fetch: Fetch, x: Tensor) -> Tensor:
        """y [N, D]."""
        y = None
        for i in range(self.tiles):
            params = fetch(i)
            y = _add_product(y, self.activation(*self._inner(params, x)), params[-1].to(x.dtype))
            del params
        assert y is not None  # there is a tile
        return y.to(x.dtype)

    @torch.no_grad()
    def backward(self, fetch: Fetch, store: StoreGrads | None, x: Tensor, dy: Tensor) -> Tensor:
        """dx [N, D]. The parameters' gradients go to `store`; with None they are not computed."""
        pair = vjp_pair(lambda *pre: [self.activation(*pre)], self.inner, compiled=False)
        dx = None
        for i in range(self.tiles):
            params = fetch(i)
            weights = [p.to(x.dtype) for p in params]
            (h,), residuals = pair.forward(self._inner(weights, x))
            dw_out = [h.t() @ dy] if store else []
            del h
            grads = pair.backward(residuals, [dy @ weights[-1].t()])
            for w, g in zip(weights, grads):
                dx = _add_product(dx, g, w.t())
            if store:
                biases = [g.sum(0) for g in grads] if self.biased else []
                grads = [*(x.t() @ g for g in grads), *biases, *dw_out]
                store(i, [grad.to(p.dtype) for grad, p in zip(grads, params)])
            del params, weights, w, g, grads, dw_out, residuals
        assert dx is not None  # there is a tile
        return dx.to(x.dtype)


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
    """gate(x w_gate, x w_up) w_down for x [..., D], w_gate and w_up [D, F], w_down [F, D], in x's dtype, in tiles of
    the F units, and of `tokens` tokens at a time (0: all).

    Only one tile of the hidden activations of these tokens exists at a time, forward and backward; only x is kept
    between. gate: a name in GATES; impl: the form of it. Differentiable once; under vmap, jvp and higher orders of
    torch.func it is the plain formula. Raises ValueError for shapes that do not fit and for tiles that would be empty.
    """
    d, f = x.shape[-1], w_gate.shape[-1]
    _expect(x, {"w_gate": (w_gate, (d, f)), "w_up": (w_up, (d, f)), "w_down": (w_down, (f, w_down.shape[-1]))})
    return _apply(gate, x, [w_gate, w_up, w_down], tiles, tokens, impl)


def tiled_gelu_mlp(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    tiles: int,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    *,
    tokens: int = 0,
) -> Tensor:
    """gelu(x w_in + b_in) w_out + b_out for x [..., D], w_in [D, F], w_out [F, D], biases [F] and [D], in tiles as
    `tiled_mlp`.

    With the tanh form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415).
    """
    f, out = w_in.shape[-1], w_out.shape[-1]
    shapes = {
        "w_in": (w_in, (x.shape[-1], f)),
        "w_out": (w_out, (f, out)),
        "b_in": (b_in, (f,)),
        "b_out": (b_out, (out,)),
    }
    _expect(x, shapes)
    y = _apply("gelu", x, [w_in, w_out] if b_in is None else [w_in, b_in, w_out], tiles, tokens)
    return y if b_out is None else y + b_out.to(x.dtype)


def _expect(x: Tensor, shapes: dict[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} is {list(tensor.shape)}; with x {list(x.shape)} and the others it must be {list(shape)}"
            )


def _linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x @ w.to(x.dtype)
    return y if bias is None else y + bias.to(x.dtype)


class _Layer(NamedTuple):
    """A tiled layer whose parameters are whole tensors in memory."""

    run: TiledMLP
    dims: tuple[int, ...]  # the tiled dim of each parameter
    spans: list[slice]

    def tile(self, wholes: Sequence[Tensor], i: int) -> list[Tensor]:
        """Views of tile i of all parameters, or of their gradients."""
        start, stop = self.spans[i].start, self.spans[i].stop
        return [full.narrow(dim, start, stop - start) for full, dim in zip(wholes, self.dims)]

    def plain(self, x: Tensor, *params: Tensor) -> Tensor:
        """The layer without tiles."""
        inner = self.run.inner
        biases = params[inner:-1] or [None] * inner
        return self.run.activation(*(_linear(x, w, b) for w, b in zip(params, biases))) @ params[-1].to(x.dtype)


def _layer(kind: str, params: Sequence[Tensor], tiles: int, impl: str) -> _Layer:
    size, inner = params[0].shape[1], 2 if kind in GATES else 1
    gelu = functools.partial(F.gelu, approximate="tanh")
    activation = functools.partial(GATES[kind], impl=impl) if kind in GATES else gelu
    biased = len(params) > inner + 1
    dims = (*[1] * inner, *[0] * (len(params) - inner))
    return _Layer(TiledMLP(activation, tiles, inner, biased), dims, tile_spans(size, tiles, "F, the units,"))


# Custom operators, opaque to the compiler: it would otherwise compute all tiles and then concatenate their gradients,
# at twice their memory.
@operator(
    "tiled_layer(Tensor x, Tensor[] params, str kind, int tiles, int tokens, str impl) -> Tensor",
    lambda x, params, *_: x.new_empty(x.shape[0], params[-1].shape[-1]),
    opened=True,
    flop=flops.tiled_layer,
)
def tiled_layer(x: Tensor, params: Sequence[Tensor], kind: str, tiles: int, tokens: int, impl: str) -> Tensor:
    """Return y [N, F] of x [N, D] for a layer of this kind (see `_layer`), `tokens` rows at a time (0: all)."""
    layer = _layer(kind, params, tiles, impl)
    fetch = functools.partial(layer.tile, params)
    if not 0 < tokens < x.shape[0]:
        return layer.run.forward(fetch, x)
    y = x.new_empty(x.shape[0], params[-1].shape[-1])
    for x_chunk, y_chunk in zip(x.split(tokens), y.split(tokens)):
        y_chunk.copy_(layer.run.forward(fetch, x_chunk))
    return y


@operator(
    "tiled_layer_backward(Tensor x, Tensor[] params, Tensor dy, str kind, int tiles, int tokens, str impl, "
    "bool frozen) -> Tensor[]",
    lambda x, params, dy, kind, tiles, tokens, impl, frozen: [
        x.new_empty(x.shape),
        *(torch.empty_like(p) for p in ([] if frozen else params)),
    ],
    opened=True,
    flop=flops.tiled_layer_backward,
)
def tiled_layer_backward(
    x: Tensor, params: Sequence[Tensor], dy: Tensor, kind: str, tiles: int, tokens: int, impl: str, frozen: bool
) -> list[Tensor]:
    """The gradients of x and, unless they are frozen, of the parameters: sums over chunks of tokens, in float32 or
    wider."""
    layer = _layer(kind, params, tiles, impl)
    fetch = functools.partial(layer.tile, params)
    if not 0 < tokens < x.shape[0]:
        grads = [] if frozen else [torch.empty_like(p) for p in params]

        def copy_grads(i: int, tile_grads: list[Tensor]) -> None:
            for target, grad in zip(layer.tile(grads, i), tile_grads):
                target.copy_(grad)

        return [layer.run.backward(fetch, None if frozen else copy_grads, x, dy), *grads]
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = [] if frozen else [torch.zeros_like(p, dtype=wide) for p in params]

    def add(i: int, tile_grads: list[Tensor]) -> None:
        for target, grad in zip(layer.tile(sums, i), tile_grads):
            target.add_(grad)

    dx = x.new_empty(x.shape)
    for x_chunk, dy_chunk, dx_chunk in zip(x.split(tokens), dy.split(tokens), dx.split(tokens)):
        dx_chunk.copy_(layer.run.backward(fetch, None if frozen else add, x_chunk, dy_chunk))
    grads = []
    for p in params if sums else ():
        grads.append(sums.pop(0).to(p.dtype))
    return [dx, *grads]


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
