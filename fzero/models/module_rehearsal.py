"""Real calls of a module beside its trace, with random numbers in place of its weights.

The first call lets the module make what it makes once, such as tables, of real tensors. Two more tell whether its
results are a function of what it is given, and are compared with those of the layers and of the traced parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fzero.core import graph_tracing, pytree
from fzero.core.closure_state import ClosureState
from fzero.core.graph_tracing import Watch
from fzero.core.purity_checks import expect_data, expect_pure, is_near
from fzero.core.random_interception import seeded
from fzero.core.torch_private import get_unwrapped, is_functorch_wrapped_tensor, maybe_get_bdim
from fzero.core.variable_snapshot import Snapshot
from fzero.models.base import Ctx
from fzero.models.module_layers import CannotSplit, Constants, Stacks, any_numbers, layer_buffer
from fzero.models.module_split import ForwardSplit, ModuleCall, StackKind, inputs_of
from fzero.models.module_tp import calling, draws_of, replaced
from fzero.models.wide_sums import wide_sums

RUNS = 2  # layers of a kind that are run; the others pass on what they get


class LayeredModule(Protocol):
    """What a rehearsal needs of a module with layers, see models.module_functions.Layered."""

    skeleton: nn.Module
    stacks: Stacks
    loss: Callable[..., Any]
    parameters: dict[str, nn.Parameter]  # outside of the layers
    within: dict[str, dict[str, nn.Parameter]]  # of a stack's layer
    buffers: Constants
    stacked: dict[str, Constants]

    def snapshot(self) -> Snapshot: ...
    def originals(self) -> dict[str, Tensor]: ...
    def leaves_of(self, kind: StackKind, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> Any: ...
    def call_layer(
        self, kind: StackKind, leaves: Any, args: Any, kwargs: Any, ctx: Ctx, rows: int, detect_draws: bool = False
    ) -> Any: ...


class LayerRuns(NamedTuple):
    """The layers that ran in a call of a module."""

    runs: Counter[StackKind]
    last: dict[StackKind, Any]  # what the last one of a kind returned
    entered: dict[str, Tensor]  # the first argument of each stack's first layer


class Rehearsal:
    """Calls of a module with layers on a batch, in one process, without gradients. All layers of a kind have the same
    numbers in place of their parameters."""

    def __init__(self, layered: LayeredModule, batch: Any, ctx: Ctx, rows: int, seed: int) -> None:
        device = pytree.leaves(batch)[0].device
        key = () if isinstance(ctx.key, tuple) else torch.zeros(2, dtype=torch.int64, device=device)
        self.layered, self.batch, self.rows = layered, batch, rows
        self.ctx = Ctx(dtype=ctx.dtype, key=key)
        with seeded(seed):
            sample: Callable[[Any], Any] = lambda leaf: any_numbers(leaf.shape).to(device, ctx.dtype)  # noqa: E731
            self.outside = {name: sample(leaf) for name, leaf in layered.parameters.items()}
            self.within = {
                s: {name: sample(leaf) for name, leaf in entries.items()} for s, entries in layered.within.items()
            }
        self.buffers = layered.buffers.to_device(device, ctx.dtype)
        self.unlike = ""  # a variable that the first call makes of parameters
        self.stacked = {stack: entries.to_device(device, ctx.dtype) for stack, entries in layered.stacked.items()}

    def layers(self) -> list[tuple[str, StackKind, Tensor]]:
        """(name, kind, number) of each layer."""
        stacks, device = self.layered.stacks.items(), pytree.leaves(self.batch)[0].device
        kinds = [
            (name, StackKind(s, kind))
            for s, stack_layers in stacks
            for name, kind in zip(stack_layers.names, stack_layers.kinds)
        ]
        return [(*pair, torch.tensor(i, device=device)) for i, pair in enumerate(kinds)]

    def buffers_of(self, kind: StackKind, number: Tensor) -> dict[str, Tensor]:
        """The buffers of a layer."""
        previous = list(self.stacked)[: list(self.stacked).index(kind.stack)]
        first = sum(len(self.layered.stacks[stack].names) for stack in previous)
        return {name: layer_buffer(leaf, number, first) for name, leaf in self.stacked[kind.stack].items()}

    def run_module(self, first: bool = False) -> list[Any]:
        """What goes into the stacks, and what the loss function returns, of the copied module.

        first: the layers that stand for all of a kind are called too, each with what its first one is given."""
        state, layers, runs = {**self.outside, **self.buffers}, [], LayerRuns(Counter(), {}, {})
        for name, kind, number in self.layers():
            leaves = {**self.within[kind.stack], **self.buffers_of(kind, number)}
            state |= {f"{name}.{leaf}": x for leaf, x in leaves.items()}
            module = self.layered.skeleton.get_submodule(name)
            forward = [partial(self.template, kind, number)] if first else []
            layers.append((module, "forward", partial(self.layer, [*forward, module.forward], kind, number, runs)))
        tensors, watch = [*state.values(), *pytree.leaves(self.batch)], self.watch()
        with watch, torch.no_grad(), calling(self.ctx, self.rows, draws=draws_of), wide_sums(tensors), replaced(layers):
            call = ModuleCall(self.layered.skeleton, state, self.ctx.dtype)
            with expect_data({f"the module's {name}": x for name, x in state.items()}):
                out = self.layered.loss(call, pytree.map(torch.clone, self.batch))
        return [*runs.entered.values(), *pytree.leaves(out)]

    def watch(self) -> Watch:
        """What refuses that a call writes into parameters and buffers, or reads those of the module itself."""
        return Watch(self.leaves(), originals=self.layered.originals())

    def leaves(self) -> dict[str, Tensor]:
        """The parameters and buffers, by the names that errors have."""
        leaves = {f"the parameter {name}": x for name, x in self.outside.items()}
        leaves |= {f"the buffer {name}": x for name, x in self.buffers.items()}
        for label, stacks in (("parameter", self.within), ("buffer", self.stacked)):
            leaves |= {f"the {label} {n} of a layer": x for entries in stacks.values() for n, x in entries.items()}
        return leaves

    def template(self, kind: StackKind, number: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the layer that stands for all of a kind returns."""
        leaves = self.layered.leaves_of(kind, dict(self.within[kind.stack]), self.buffers_of(kind, number))
        return self.layered.call_layer(
            kind, leaves, args, kwargs, self.ctx._replace(layer=number), self.rows, detect_draws=True
        )

    def layer(
        self,
        forwards: Sequence[Callable[..., Any]],
        kind: StackKind,
        number: Tensor,
        state: LayerRuns,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """What a layer returns, with draws of its own; after some layers of its kind, what it is given."""
        state.runs[kind] += 1
        state.entered.setdefault(kind.stack, pytree.leaves((args, kwargs))[0])
        if state.runs[kind] > RUNS:
            x, out = pytree.leaves((args, kwargs))[0], state.last[kind]
            return type(out)((x, *out[1:])) if isinstance(out, (tuple, list)) else x
        for forward in forwards if state.runs[kind] == 1 else forwards[-1:]:
            with calling(self.ctx._replace(layer=number), self.rows, draws=draws_of):
                state.last[kind] = forward(*args, **kwargs)
        return state.last[kind]

    def run_split(self, split: ForwardSplit) -> list[Any]:
        """The same, by the parts of a Split, and the layers between them."""
        inputs, runs = inputs_of(self.outside, self.buffers, self.batch, self.ctx), Counter[StackKind]()
        x: tuple[Tensor, ...] = ()
        with torch.no_grad():
            side_args = split.side_program(inputs_of({}, self.buffers, self.batch, self.ctx._replace(key=())))
            entered: dict[str, Tensor] = {}
            for _, kind, layer in self.layers():
                if kind.stack not in entered:
                    x = split.prologues[kind.stack](inputs, x)
                entered.setdefault(kind.stack, next(iter(x)))
                runs[kind] += 1
                if runs[kind] > RUNS:
                    continue
                args, kwargs = split.arguments_of(kind, x, side_args)
                out = self.template(kind, layer, *args, **kwargs)
                x = (out[0] if isinstance(out, (tuple, list)) else out, *x[1:])
            return [*entered.values(), *pytree.leaves(split.result_of(split.epilogue(inputs, x)))]

    def first(self, variables: dict[str, Any] | None = None) -> None:
        """The first call, in which the module, and the layers that stand for a kind, make what they make once.

        variables: the variables after the first call with other numbers in place of the parameters.
        """
        self.run_module(first=True)
        current = {} if variables is None else self.layered.snapshot().values()
        self.unlike = next(
            (
                name
                for name in current
                if variables and name in variables and not is_near(current[name], variables[name])
            ),
            "",
        )

    def expect_pure(self) -> list[Any]:
        """What the loss function returns; raises Impure if that, called again, gives another thing, and CannotSplit if
        a layer may read what the module leaves somewhere."""
        skeleton, belongings = self.layered.skeleton, ClosureState.from_module("the module", self.layered.skeleton)
        reached = belongings.marks().keys()
        belongings.note_function(self.layered.loss)
        out, changed = expect_pure(self.run_module, belongings, Snapshot(skeleton, self.layered.loss))
        if shared := next((name for name in changed if name in reached), ""):
            raise CannotSplit(f"each call of the module leaves another tensor in {shared}, which a layer may read")
        if self.unlike:
            raise CannotSplit(f"its first call makes {self.unlike} of parameters, or of what they give")
        return out

    def expect_parts(self, expected: list[Any], split: ForwardSplit) -> None:
        """Raise CannotSplit if the parts of a Split do not give what the whole does."""
        if not is_near(self.run_split(split), expected, rounds=1e3):
            raise CannotSplit(
                "its layers and what is before and after them, apart, compute something else than the module does: a "
                "part reads what another one writes beside its arguments"
            )


def values_of(batch: Any) -> Any:
    """A batch as real tensors: an example of a batch of them under vmap; None where they have no values."""

    def real(x: Tensor) -> Tensor:
        while is_functorch_wrapped_tensor(x):
            dim, x = maybe_get_bdim(x), get_unwrapped(x)
            x = x.select(dim, 0) if dim >= 0 else x
        return x.detach()

    with graph_tracing.outside_transforms():
        values = pytree.map(real, batch)
        plain = all(type(x) is Tensor and not x.is_meta for x in pytree.leaves(values))
        return values if plain else None
