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

from fzero.core import graph_cut, pytree
from fzero.core.belongings import Belongings
from fzero.core.draws import seeded
from fzero.core.graph_cut import Watch
from fzero.core.pure_calls import expect_data, expect_pure, is_near
from fzero.core.snapshot import Snapshot
from fzero.core.torch_private import get_unwrapped, is_functorch_wrapped_tensor, maybe_get_bdim
from fzero.models.base import Ctx
from fzero.models.module_buffers import Constants, any_numbers, layer_buffer
from fzero.models.module_calls import calling, draws_of, replaced
from fzero.models.module_layers import CannotSplit, Stacks
from fzero.models.module_split import Kind, ModuleCall, Split, inputs_of
from fzero.models.module_sums import wide_sums

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
    def leaves_of(self, kind: Kind, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> Any: ...
    def call_layer(
        self, kind: Kind, leaves: Any, args: Any, kwargs: Any, ctx: Ctx, rows: int, ask: bool = False
    ) -> Any: ...


class LayerRuns(NamedTuple):
    """The layers that ran in a call of a module."""

    runs: Counter[Kind]
    last: dict[Kind, Any]  # what the last one of a kind returned
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
            drawn: Callable[[Any], Any] = lambda leaf: any_numbers(leaf.shape).to(device, ctx.dtype)  # noqa: E731
            self.outside = {name: drawn(leaf) for name, leaf in layered.parameters.items()}
            self.within = {s: {name: drawn(leaf) for name, leaf in some.items()} for s, some in layered.within.items()}
        self.buffers = layered.buffers.on(device, ctx.dtype)
        self.unlike = ""  # a variable that the first call makes of parameters
        self.stacked = {stack: some.on(device, ctx.dtype) for stack, some in layered.stacked.items()}

    def layers(self) -> list[tuple[str, Kind, Tensor]]:
        """(name, kind, number) of each layer."""
        stacks, device = self.layered.stacks.items(), pytree.leaves(self.batch)[0].device
        kinds = [(name, Kind(s, kind)) for s, some in stacks for name, kind in zip(some.names, some.kinds)]
        return [(*both, torch.tensor(i, device=device)) for i, both in enumerate(kinds)]

    def buffers_of(self, kind: Kind, number: Tensor) -> dict[str, Tensor]:
        """The buffers of a layer."""
        before = list(self.stacked)[: list(self.stacked).index(kind.stack)]
        first = sum(len(self.layered.stacks[stack].names) for stack in before)
        return {name: layer_buffer(leaf, number, first) for name, leaf in self.stacked[kind.stack].items()}

    def whole(self, first: bool = False) -> list[Any]:
        """What goes into the stacks, and what the loss function returns, of the copied module.

        first: the layers that stand for all of a kind are called too, each with what its first one is given."""
        state, layers, runs = {**self.outside, **self.buffers}, [], LayerRuns(Counter(), {}, {})
        for name, kind, number in self.layers():
            leaves = {**self.within[kind.stack], **self.buffers_of(kind, number)}
            state |= {f"{name}.{leaf}": x for leaf, x in leaves.items()}
            module = self.layered.skeleton.get_submodule(name)
            forward = [partial(self.template, kind, number)] if first else []
            layers.append((module, "forward", partial(self.layer, [*forward, module.forward], kind, number, runs)))
        given, watch = [*state.values(), *pytree.leaves(self.batch)], self.watch()
        with watch, torch.no_grad(), calling(self.ctx, self.rows, draws=draws_of), wide_sums(given), replaced(layers):
            call = ModuleCall(self.layered.skeleton, state, self.ctx.dtype)
            with expect_data({f"the module's {name}": x for name, x in state.items()}):
                out = self.layered.loss(call, pytree.map(torch.clone, self.batch))
        return [*runs.entered.values(), *pytree.leaves(out)]

    def watch(self) -> Watch:
        """What refuses that a call writes into parameters and buffers, or reads those of the module itself."""
        return Watch(self.leaves(), originals=self.layered.originals())

    def leaves(self) -> dict[str, Tensor]:
        """The parameters and buffers, by the names that errors have."""
        found = {f"the parameter {name}": x for name, x in self.outside.items()}
        found |= {f"the buffer {name}": x for name, x in self.buffers.items()}
        for what, stacks in (("parameter", self.within), ("buffer", self.stacked)):
            found |= {f"the {what} {n} of a layer": x for some in stacks.values() for n, x in some.items()}
        return found

    def template(self, kind: Kind, number: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the layer that stands for all of a kind returns."""
        leaves = self.layered.leaves_of(kind, dict(self.within[kind.stack]), self.buffers_of(kind, number))
        return self.layered.call_layer(kind, leaves, args, kwargs, self.ctx._replace(layer=number), self.rows, ask=True)

    def layer(
        self,
        forwards: Sequence[Callable[..., Any]],
        kind: Kind,
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

    def parts(self, split: Split) -> list[Any]:
        """The same, by the parts of a Split, and the layers between them."""
        inputs, runs = inputs_of(self.outside, self.buffers, self.batch, self.ctx), Counter[Kind]()
        x: tuple[Tensor, ...] = ()
        with torch.no_grad():
            beside = split.beside(inputs_of({}, self.buffers, self.batch, self.ctx._replace(key=())))
            entered: dict[str, Tensor] = {}
            for _, kind, layer in self.layers():
                if kind.stack not in entered:
                    x = split.before[kind.stack](inputs, x)
                entered.setdefault(kind.stack, next(iter(x)))
                runs[kind] += 1
                if runs[kind] > RUNS:
                    continue
                args, kwargs = split.arguments_of(kind, x, beside)
                out = self.template(kind, layer, *args, **kwargs)
                x = (out[0] if isinstance(out, (tuple, list)) else out, *x[1:])
            return [*entered.values(), *pytree.leaves(split.result_of(split.after(inputs, x)))]

    def first(self, made: dict[str, Any] | None = None) -> None:
        """The first call, in which the module, and the layers that stand for a kind, make what they make once.

        made: the variables after the first call with other numbers in place of the parameters.
        """
        self.whole(first=True)
        now = {} if made is None else self.layered.snapshot().values()
        self.unlike = next((name for name in now if made and name in made and not is_near(now[name], made[name])), "")

    def expect_pure(self) -> list[Any]:
        """What the loss function returns; raises Impure if that, called again, gives another thing, and CannotSplit if
        a layer may read what the module leaves somewhere."""
        skeleton, belongings = self.layered.skeleton, Belongings.of_module("the module", self.layered.skeleton)
        reached = belongings.marks().keys()
        belongings.note_function(self.layered.loss)
        out, left = expect_pure(self.whole, belongings, Snapshot(skeleton, self.layered.loss))
        if shared := next((name for name in left if name in reached), ""):
            raise CannotSplit(f"each call of the module leaves another tensor in {shared}, which a layer may read")
        if self.unlike:
            raise CannotSplit(f"its first call makes {self.unlike} of parameters, or of what they give")
        return out

    def expect_parts(self, whole: list[Any], split: Split) -> None:
        """Raise CannotSplit if the parts of a Split do not give what the whole does."""
        if not is_near(self.parts(split), whole, rounds=1e3):
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

    with graph_cut.apart():
        found = pytree.map(real, batch)
        plain = all(type(x) is Tensor and not x.is_meta for x in pytree.leaves(found))
        return found if plain else None
