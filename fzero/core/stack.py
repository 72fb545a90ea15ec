"""`stack` applies a block layer by layer; its loop controls what is kept for the backward pass.

`stack(block, layers, x, ctx)` means `for i in range(L): x = block(layers[i], x, ctx at layer i)`, which is `reference`,
used under vmap, jvp and higher-order gradients. The fast path is an autograd Function below torch.func: it compiles the
block once, frees residuals as soon as they are used, and writes each layer's gradient into the stacked gradient.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fzero import core
from fzero.core import pytree
from fzero.core.autodiff import Function, Remat, expect_closed, first_order, needs_grad, run_backward
from fzero.core.graph_tracing import is_foreign
from fzero.core.pytree import Tree
from fzero.core.vjp_pair import VjpPair, WeightResiduals, vjp_pair

Block = Callable[[Tree, Any, Any], Any]
Blocks = Block | tuple[Block, ...]  # of several, layer i of a stack has number i modulo their count
NO_REMAT = Remat()


def depth(layers: Tree) -> int:
    """The number of layers L of a stacked tree; raises ValueError if its leaves disagree."""
    sizes = {name: leaf.shape[0] if leaf.dim() else None for name, leaf in pytree.named_leaves(layers).items()}
    first = next(iter(sizes.values()), None)
    if first is None or len(set(sizes.values())) != 1:
        raise ValueError(f"the leaves of a stack must agree in their first dim (layers); they have {sizes}")
    return first


def in_turn(block: Blocks) -> tuple[Block, ...]:
    """The functions of a stack's layers, which take turns."""
    return block if isinstance(block, tuple) else (block,)


def reference(block: Blocks, layers: Tree, x: Any, ctx: Any, first: int = 0) -> Any:
    """The definition of `stack`: a loop; `ctx.layer` is the layer's number (int64 scalar), from `first` on."""
    device, blocks = pytree.leaves(layers)[0].device, in_turn(block)
    for i in range(depth(layers)):
        params = pytree.map(lambda leaf, i=i: leaf[i], layers)
        x = blocks[i % len(blocks)](params, x, ctx._replace(layer=torch.full((), first + i, device=device)))
    return x


def stack(
    block: Blocks, layers: Tree, x: Any, ctx: Any, *, remat: Remat = NO_REMAT, compiled: bool = False, first: int = 0
) -> Any:
    """Return x after all layers: `for i in range(L): x = block(layers[i], x, ctx)`, with ctx.layer = first + i.

    block: a pure function (one layer's parameters, x, ctx) -> x of the same structure, shapes and dtypes, or a tuple of
    such functions that the layers take in turn. layers: a tree of leaves [L, ...]. x: a tree of floating tensors. ctx:
    a NamedTuple with a field `layer`; its tensors are not differentiated, its other leaves are hashable. remat: what is
    kept for the backward pass; it does not change a bit of the result or the gradients, and random numbers that
    `block` draws are the same where it runs again. compiled: trace and compile each function, once for each set of
    shapes. first: the layers of other stacks before this one.

    Raises ValueError if the leaves of `layers` disagree in L, if `block` closes over a tensor that is differentiated,
    if it changes a variable that its result depends on and is recomputed, or if a tensor in `ctx` requires a gradient.

    >>> from typing import NamedTuple
    >>> class Ctx(NamedTuple):
    ...     layer: object = ()
    >>> stack(lambda p, x, ctx: x * p["w"], {"w": torch.tensor([2.0, 3.0])}, torch.ones(2), Ctx())
    tensor([6., 6.])
    """
    if not first_order():
        return reference(block, layers, x, ctx, first)
    for layer_block in in_turn(block):
        expect_closed(layer_block, "stack")
    layer_leaves, layer_def = pytree.flatten(layers)
    x_leaves, x_def = pytree.flatten(x)
    ctx_leaves, ctx_def = pytree.flatten(ctx._replace(layer=()))
    static = static_signature(ctx_leaves)
    ctx_tensors = [leaf for leaf in ctx_leaves if isinstance(leaf, Tensor)]
    if needs_grad(*ctx_tensors):
        raise ValueError("a tensor in the ctx of a stack is to be differentiated; pass it in x")
    structure = layer_def, x_def, ctx_def, static
    pairs = tuple(
        segment_pair("block", layer_block, structure, compiled, remat.budget)[0] for layer_block in in_turn(block)
    )
    states, generators = None, []
    if any(map(is_foreign, in_turn(block))):
        states, generators = (
            [],
            [layer_block for f in in_turn(block) for layer_block in core.captured_state.generators_in(f)],
        )
        for i, f in enumerate(in_turn(block)[: depth(layers)] if remat.every else ()):
            layer = pytree.map(lambda leaf, i=i: leaf[i : i + 1], layers)
            core.captured_state.check_repeatable(f, lambda f=f, layer=layer: reference(f, layer, x, ctx), generators)
    run = LayerLoop(pairs, depth(layers), remat.every, first=first, states=states, generators=tuple(generators))
    tensors = [*layer_leaves, *x_leaves, *ctx_tensors]
    counts = len(layer_leaves), len(x_leaves)
    if needs_grad(*tensors):
        return pytree.unflatten(_Stack.apply(run, counts, *tensors), x_def)
    return pytree.unflatten(run.primal(*_views(counts, tensors)), x_def)


def static_signature(leaves: Sequence[Any]) -> tuple:
    """The part of a cache key of leaves: () for a tensor, (type, value) else, because 1, 1.0 and True are equal."""
    return tuple(() if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)


def _detached(loss: Any) -> Any:
    """The loss with gradients only through its total; `extra` and `tables` are detached."""
    fields = {field: getattr(loss, field) for field in ("extra", "tables")}
    return loss._replace(**{field: {n: x.detach() for n, x in sums.items()} for field, sums in fields.items()})


# How each function of a model is called: (f, parameters, x, arguments that are not differentiated, number of the layer)
# -> result.
CALLS: dict[str, Callable[..., Any]] = {
    "embed": lambda f, params, x, extra, layer: f(params, extra[1], extra[0]),
    "block": lambda f, params, x, ctx, layer: f(params, x, ctx._replace(layer=layer)),
    "join": lambda f, params, x, extra, layer: f(params, x, extra[1], extra[0]),
    "head": lambda f, params, x, extra, layer: _detached(f(params, x, extra[1], extra[0])),
}


@functools.lru_cache(maxsize=256)
def segment_pair(
    kind: str,
    f: Callable[..., Any],
    structure: tuple[Any, Any, Any, tuple],
    compiled: bool,
    budget: float = 1.0,
    skip: int = 0,
    split: bool = False,
) -> tuple[VjpPair, list[Any]]:
    """(the VjpPair of a model's function `f` over flat tensors, a list for the tree structure of its result)."""
    params_def, x_def, extra_def, static = structure
    n, m = len(params_def) if isinstance(params_def, tuple) else params_def.num_leaves, x_def.num_leaves
    out_def: list[Any] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        extra_tensors = iter(tensors[n + m + 1 :])
        extra = pytree.unflatten([leaf[1] if leaf else next(extra_tensors) for leaf in static], extra_def)
        named = isinstance(params_def, tuple)
        params = pytree.nest(dict(zip(params_def, tensors))) if named else pytree.unflatten(tensors[:n], params_def)
        x = pytree.unflatten(tensors[n : n + m], x_def)
        out, treedef = pytree.flatten(CALLS[kind](f, params, x, extra, tensors[n + m]))
        out_def[:] = [treedef]
        return out

    identity = None
    if kind == "block":  # whose result has the structure of x: nobody reads the list
        trees = [
            value if isinstance(value, tuple) else pytree.unflatten(range(value.num_leaves), value)
            for value in structure[:3]
        ]
        identity = (f, trees, static)
    cut = n if split else 0
    return vjp_pair(flat, n + m, compiled=compiled, budget=budget, skip=skip, split=cut, identity=identity), out_def


Fetch = Callable[[int], Sequence[Tensor]]  # takes the number of a layer, returns its parameters
StoreGrads = Callable[[int, list[Tensor]], None]  # takes the gradients of a layer's parameters


@dataclass(frozen=True)
class LayerLoop:
    """One pass over a stack of layers, forward and backward, with the caller's `fetch` and `put`."""

    pairs: tuple[VjpPair, ...]  # of its layers, in turn
    depth: int
    every: int  # 0: residuals are kept; k: the input of each k-th layer
    drop: bool = False  # do not keep parameters with the residuals; fetch them again in the backward pass
    # What the forward pass keeps for the backward pass. Not saved through autograd, so that an entry is freed when it
    # is popped. A list, or any object with append and pop.
    saved: Any = field(default_factory=list)
    on_layer: Callable[[int], None] = lambda i: None  # called with the number of each layer before its backward pass
    first: int = 0  # the number of its first layer among those of all stacks
    # What somebody's layers read beside their inputs, where each segment begins; None: they are ours, and read nothing.
    states: list[core.captured_state.AmbientState] | None = None
    generators: tuple[Any, ...] = ()  # of random numbers, that these layers hold
    # What each layer's gradients by weights need, last layer first.
    pending: deque[WeightResiduals] = field(default_factory=deque)

    def pair(self, i: int) -> VjpPair:
        """The function of layer i."""
        return self.pairs[i % len(self.pairs)]

    def inputs(self, i: int, params: Sequence[Tensor], x: Sequence[Tensor], extra: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of the pair at layer i."""
        return [*params, *x, torch.full((), self.first + i, device=params[0].device), *extra]

    def primal(self, fetch: Fetch, x: Sequence[Tensor], extra: Sequence[Tensor]) -> list[Tensor]:
        """Return the leaves of x after the last layer; keep nothing."""
        for i in range(self.depth):
            x = self.pair(i).primal(self.inputs(i, fetch(i), x, extra))
        return list(x)

    def forward(self, fetch: Fetch, x: Sequence[Tensor], extra: Sequence[Tensor]) -> list[Tensor]:
        """Return the leaves of x after the last layer, and keep in `kept` what `backward` needs."""
        with self.track_states() as note:
            for i in range(self.depth):
                if self.every and i % self.every == 0:
                    self.saved.append(x)
                note(i)
                params = fetch(i)
                x, residuals = self.pair(i).forward(self.inputs(i, params, x, extra), self.drop * len(params))
                if not self.every:
                    self.saved.append(residuals)
                del params, residuals
        return list(x)

    def capture_state(self) -> core.captured_state.AmbientState:
        """What a layer that begins here reads beside its inputs."""
        return core.captured_state.AmbientState.capture(self.generators)

    @contextlib.contextmanager
    def track_states(self) -> Iterator[Callable[[int], None]]:
        """A context of a forward pass, which gives what notes the surroundings of a layer that begins a segment."""
        states = self.states
        if states:
            with states[0].restored():
                yield lambda i: None
        elif states is None:
            yield lambda i: None
        else:
            with core.captured_state.first_run():
                yield (
                    lambda i: None if i and (not self.every or i % self.every) else states.append(self.capture_state())
                )
            first = states[0].drop_unmoved(self.generators) if states else None
            if first is not None and first.random is None:
                states[:] = [state._replace(random=None) for state in states]

    def order(self) -> list[int]:
        """The numbers of the layers in the order in which `backward` fetches them."""
        if not self.every:
            return [*reversed(range(self.depth))] if self.drop else []
        starts = reversed(range(0, self.depth, self.every))
        segments = [range(start, min(start + self.every, self.depth)) for start in starts]
        return [i for s in segments for i in (*s, *(reversed(s[:-1]) if self.drop else ()))]

    def residuals(
        self, i: int, segment: list[Any], fetch: Fetch, extra: Sequence[Tensor], split: bool
    ) -> tuple[Any, Sequence[Tensor]]:
        """(what the forward pass of layer i kept, its parameters if these were dropped)."""
        if self.every and not segment:
            x = self.saved.pop()
            with self.states[i // self.every].restored() if self.states else contextlib.nullcontext():
                for j in range(i - i % self.every, i + 1):
                    params = fetch(j)
                    # The last layer of a segment is differentiated next, so it is not fetched again.
                    x, layer_residuals = self.pair(j).forward(
                        self.inputs(j, params, x, extra), self.drop * (j < i or split) * len(params)
                    )
                    segment.append(layer_residuals)
            return segment.pop(), params if self.drop and split else ()
        residuals = segment.pop() if self.every else self.saved.pop()
        return residuals, fetch(i) if self.drop else ()

    def backward(
        self, fetch: Fetch, store_grads: StoreGrads, grads: Sequence[Tensor], extra: Sequence[Tensor]
    ) -> list[Tensor]:
        """The gradients of the leaves of x; `store_grads` gets each layer's parameter gradients, last layer first."""
        segment: list[Any] = []
        m = len(grads)
        for i in reversed(range(self.depth)):
            residuals, params = self.residuals(i, segment, fetch, extra, False)
            self.on_layer(i)
            out = self.pair(i).backward(residuals, grads, params)
            del params, residuals
            grads = out[len(out) - m :]
            del out[len(out) - m :]
            store_grads(i, out)
        return list(grads)

    def backward_inputs(self, fetch: Fetch, grads: Sequence[Tensor], extra: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the leaves of x, and keep in `owed` what `backward_weights` needs."""
        segment: list[Any] = []
        for i in reversed(range(self.depth)):
            by_inputs = self.pair(i).backward_inputs
            assert by_inputs is not None  # of pairs that are split
            residuals, params = self.residuals(i, segment, fetch, extra, True)
            self.on_layer(i)
            grads, layer_pending = by_inputs(residuals, grads, params)
            self.pending.append(layer_pending)
            del params, residuals
        return list(grads)

    def backward_weights(self, store_grads: StoreGrads) -> None:
        """Call `store_grads` with each layer's parameter gradients, last layer first."""
        for i in reversed(range(self.depth)):
            by_weights = self.pair(i).backward_weights
            assert by_weights is not None  # of pairs that are split
            self.on_layer(i)
            store_grads(i, by_weights(self.pending.popleft()))


def _views(counts: tuple[int, int], tensors: Sequence[Tensor]) -> tuple[Fetch, Sequence[Tensor], Sequence[Tensor]]:
    """Split tensors into (a fetch function over the stacked leaves, the leaves of x, the tensors of ctx)."""
    n, m = counts
    return lambda i: [leaf[i] for leaf in tensors[:n]], tensors[n : n + m], tensors[n + m :]


class _Stack(Function):
    @staticmethod
    def forward(run: LayerLoop, counts: tuple[int, int], *tensors: Tensor) -> tuple[Tensor, ...]:
        # Autograd cannot save an input that is also an output, so an input that passes through all layers unchanged is
        # returned as a view.
        return tuple(x.view_as(x) if any(x is t for t in tensors) else x for x in run.forward(*_views(counts, tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.run, ctx.counts = inputs[:2]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        run, counts, m = ctx.run, ctx.counts, len(grads)

        def backward(*tensors: Tensor) -> tuple[Tensor, ...]:
            fetch, x, extra = _views(counts, tensors[m:])
            if not run.saved:  # a second backward pass through the same graph
                run.forward(fetch, x, extra)
            # Of integers, which have no gradient, nothing is looked at.
            stacked = [torch.empty_like(leaf) for leaf in tensors[m : m + counts[0]]]

            def store_grads(i: int, layer_grads: list[Tensor | None]) -> None:
                for stacked_grad, grad in zip(stacked, layer_grads):
                    if grad is not None:
                        stacked_grad[i].copy_(grad)

            x_grads = run.backward(fetch, store_grads, tensors[:m], extra)
            return *stacked, *x_grads

        saved = ctx.saved_tensors
        out = run_backward("stack", backward, *grads, *saved)
        return (
            None,
            None,
            *(g if t.is_floating_point() else None for g, t in zip(out, saved)),
            *(None for _ in saved[len(out) :]),
        )
