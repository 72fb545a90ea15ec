"""`stack`: a block applied layer by layer, as one streaming loop that knows what it keeps for the backward pass.

`stack(block, layers, x, ctx)` means `for i in range(L): x = block(layers[i], x, ctx at layer i)`. That is its reference, used under vmap,
jvp and higher-order gradients. Its fast path is a pair of Functions whose insides run below functorch, on plain tensors: there the block
is compiled once, whatever the depth, residuals are dropped as soon as they are used, and a layer's gradient is written where it belongs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fzero import pytree
from fzero.autodiff import Backward, Remat, expect_closed, first_order, needs_grad
from fzero.compile import VjpPair, vjp_pair
from fzero.pytree import Tree

Block = Callable[[Tree, Any, Any], Any]
NO_REMAT = Remat()


def depth(layers: Tree) -> int:
    """The number of layers L of a stacked tree; raises ValueError where its leaves disagree."""
    sizes = {name: leaf.shape[0] if leaf.dim() else None for name, leaf in pytree.named_leaves(layers).items()}
    if len(set(sizes.values())) != 1 or None in sizes.values():
        raise ValueError(f"the leaves of a stack must agree in their first dim (layers); they have {sizes}")
    return next(iter(sizes.values()))


def reference(block: Block, layers: Tree, x: Any, ctx: Any) -> Any:
    """The definition: the loop. `ctx` is a NamedTuple with a field `layer`, set to the layer's number (int64 scalar)."""
    device = pytree.leaves(layers)[0].device
    for i in range(depth(layers)):
        params = pytree.map(lambda leaf, i=i: leaf[i], layers)
        x = block(params, x, ctx._replace(layer=torch.tensor(i, device=device)))
    return x


def stack(block: Block, layers: Tree, x: Any, ctx: Any, *, remat: Remat = NO_REMAT, compiled: bool = False) -> Any:
    """`reference(block, layers, x, ctx)`; any `remat` gives the same bits.

    block(one layer's params, x, ctx) -> x of the same structure; pure. layers: leaves [L, ...]. x: a tree of floating tensors.
    ctx: a NamedTuple with a field `layer`; its tensors are not differentiated, its other leaves are hashable.
    remat: what is kept for the backward pass. compiled: whether the block is traced and compiled, once for each shape.
    """
    if not first_order():
        return reference(block, layers, x, ctx)
    expect_closed(block, "stack")
    layer_leaves, layer_def = pytree.flatten(layers)
    x_leaves, x_def = pytree.flatten(x)
    ctx_leaves, ctx_def = pytree.flatten(ctx._replace(layer=()))
    # () for a tensor; the type beside a value, as 1, 1.0 and True are equal.
    static = tuple(() if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in ctx_leaves)
    ctx_tensors = [leaf for leaf in ctx_leaves if isinstance(leaf, Tensor)]
    if needs_grad(*ctx_tensors):
        raise ValueError("a tensor in the ctx of a stack is to be differentiated; pass it in x")
    pair = _pair(block, layer_def, x_def, ctx_def, static, compiled, remat.budget)
    run = _Run(pair, len(layer_leaves), len(x_leaves), depth(layers), remat.every)
    tensors = [*layer_leaves, *x_leaves, *ctx_tensors]
    if needs_grad(*tensors):
        return pytree.unflatten(_Stack.apply(run, *tensors), x_def)
    return pytree.unflatten(run.primal(tensors), x_def)


@functools.lru_cache(maxsize=256)
def _pair(block: Block, layer_def: Any, x_def: Any, ctx_def: Any, static: tuple, compiled: bool, budget: float) -> VjpPair:
    """The pair of the block as a function of tensors: (layer's leaves, x's leaves, layer number, ctx's tensors) -> x's leaves."""
    n, m = layer_def.num_leaves, x_def.num_leaves

    def flat_block(*tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors[n + m + 1 :])
        ctx = pytree.unflatten([leaf[1] if leaf else next(rest) for leaf in static], ctx_def)
        params, x = pytree.unflatten(tensors[:n], layer_def), pytree.unflatten(tensors[n : n + m], x_def)
        return pytree.leaves(block(params, x, ctx._replace(layer=tensors[n + m])))

    return vjp_pair(flat_block, n + m, compiled=compiled, budget=budget)


@dataclass(frozen=True)
class _Run:
    """One application of the stack. Tensors are flat: n stacked leaves, m leaves of x, then those of ctx."""

    pair: VjpPair
    n: int
    m: int
    depth: int
    every: int  # 0: residuals are kept; k: the input of each k-th layer
    # From the forward pass to the backward pass, outside autograd's own saving: what is taken out is freed at once.
    kept: list[Any] = field(default_factory=list)

    def inputs(self, i: int, tensors: Sequence[Tensor], x: Sequence[Tensor]) -> list[Tensor]:
        params = [leaf[i] for leaf in tensors[: self.n]]
        return [*params, *x, torch.tensor(i, device=params[0].device), *tensors[self.n + self.m :]]

    def primal(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        x = list(tensors[self.n : self.n + self.m])
        for i in range(self.depth):
            x = self.pair.primal(self.inputs(i, tensors, x))
        return x

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        x = list(tensors[self.n : self.n + self.m])
        for i in range(self.depth):
            if self.every and i % self.every == 0:
                self.kept.append(x)
            x, residuals = self.pair.forward(self.inputs(i, tensors, x))
            if not self.every:
                self.kept.append(residuals)
        return x

    def backward(self, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        if not self.kept:  # a second backward pass through the same graph
            self.forward(tensors)
        layer_grads = [torch.empty_like(leaf) for leaf in tensors[: self.n]]
        grads = list(grads)
        segment: list[Any] = []
        for i in reversed(range(self.depth)):
            if not self.every:
                residuals = self.kept.pop()
            else:
                if not segment:
                    x = self.kept.pop()
                    for j in range(i - i % self.every, i + 1):
                        x, kept = self.pair.forward(self.inputs(j, tensors, x))
                        segment.append(kept)
                    del x
                residuals = segment.pop()
            out = self.pair.backward(residuals, grads)
            for whole, grad in zip(layer_grads, out):
                whole[i].copy_(grad)
            grads = out[self.n :]
        return [*layer_grads, *grads]


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(run: _Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Autograd cannot save an input that is also an output: what passes through all layers becomes a view.
        return tuple(x.view_as(x) if any(x is t for t in tensors) else x for x in run.forward(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.run = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        run, m = ctx.run, len(grads)
        out = Backward.apply("stack", lambda *tensors: tuple(run.backward(tensors[m:], tensors[:m])), *grads, *ctx.saved_tensors)
        return None, *out, *(None for _ in ctx.saved_tensors[len(out) :])
