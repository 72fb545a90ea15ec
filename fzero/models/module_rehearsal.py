"""A copy of a module whose layers are called with given tensors, and real calls of it beside its trace.

The first call, with random numbers for weights, lets the module make what it makes once. Two more tell whether its
results are a function of what it is given, and are compared with those of the traced parts.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero.core import graph_tracing, pytree
from fzero.core.closure_state import ClosureState
from fzero.core.graph_tracing import Watch
from fzero.core.purity_checks import expect_data, expect_pure, is_near
from fzero.core.random_interception import is_drawing, seeded
from fzero.core.torch_private import get_unwrapped, is_functorch_wrapped_tensor, maybe_get_bdim
from fzero.core.variable_snapshot import Snapshot
from fzero.models.base import Ctx
from fzero.models.module_layers import (
    CannotSplit,
    Constants,
    Stacks,
    any_numbers,
    layer_buffer,
    layer_of,
    stacked_buffers,
    templates_of,
    without_memory,
)
from fzero.models.module_split import ForwardSplit, LossOf, ModuleCall, StackKind, call_pure, inputs_of, layers_of
from fzero.models.module_tp import (
    Cuts,
    Factors,
    Regions,
    calling,
    divided,
    draws_of,
    expect_called,
    key_linears,
    replaced,
    specs_of,
    split_factors,
)
from fzero.models.user_functions import wide_sums

RUNS = 2  # layers of a kind that are run; the others pass on what they get


def trained_of(module: nn.Module) -> Callable[[], dict[str, Tensor]]:
    """What finds the trained parameters of a module by name, as long as it lives."""
    refs = {name: weakref.ref(leaf) for name, leaf in module.named_parameters() if leaf.requires_grad}
    return lambda: {name: leaf for name, ref in refs.items() if (leaf := ref()) is not None}


class CopiedModule:
    """A copy of a module without memory, and a layer of each kind, called with other tensors."""

    def __init__(self, module: nn.Module, loss: LossOf, stacks: Stacks):
        self.stacks, self.loss, self.originals, self.name = stacks, loss, trained_of(module), type(module).__name__
        self.skeleton = without_memory(module)
        self.templates = {stack: templates_of(module, layers) for stack, layers in stacks.items()}
        self.linears = {stack: key_linears(layer) for stack, layers in self.templates.items() for layer in layers}
        self.drawing: set[StackKind] = set()  # the layers that may draw random numbers
        # Shapes alone: the Model's `start` has the values, and nothing else holds them.
        self.parameters = {n: p for n, p in self.skeleton.named_parameters() if not layer_of(stacks, n)}
        self.within = {stack: dict(layers[0].named_parameters()) for stack, layers in self.templates.items()}
        saved = set(module.state_dict(keep_vars=True))
        outside = {n: b.detach().clone() for n, b in module.named_buffers() if not layer_of(stacks, n)}
        self.buffers = Constants(outside, saved)
        self.stacked = {stack: stacked_buffers(module, layers.names, saved) for stack, layers in stacks.items()}
        self.layers = layers_of(stacks)
        self.firsts = {kind: i for i, (_, kind) in reversed(list(enumerate(self.layers)))}  # the first layer of each

    def widest(self) -> torch.dtype:
        """The dtype of the module's parameters, at least float32."""
        leaves = [*self.parameters.values(), *(leaf for params in self.within.values() for leaf in params.values())]
        return functools.reduce(torch.promote_types, (leaf.dtype for leaf in leaves), torch.float32)

    def layer_buffers(self, kind: StackKind, stacked: Mapping[str, dict[str, Tensor]], layer: Any) -> dict[str, Tensor]:
        """The buffers of a layer, by its number, from those of the stacks."""
        first = self.firsts[StackKind(kind.stack, 0)]
        return {name: layer_buffer(leaf, layer, first) for name, leaf in stacked[kind.stack].items()}

    def call_layer(
        self,
        kind: StackKind,
        tensors: dict[str, Tensor],
        inputs: tuple[Any, Any],
        ctx: Ctx,
        rows: int,
        cuts: Cuts = Cuts(),  # noqa: B008
        detect_draws: bool = False,
    ) -> Any:
        """What the layer of a kind returns for (args, kwargs), with these tensors in place of its own."""
        template, size = self.templates[kind.stack][kind.number], ctx.mesh.tp.size
        tensors, factors = self.take_factors(kind, tensors)
        draws = {"draws": draws_of} if detect_draws or kind in self.drawing else {}
        graph_tracing.allow_constants(tensors.values())  # the tables that it has made
        with calling(ctx, rows, factors, cuts, **draws) as call:
            if size == 1:
                with wide_sums(tensors.values()):
                    out = call_pure(template, tensors, *inputs)
                self.drawing |= {kind} if is_drawing() else set()
                expect_called(call)
                return out
            specs = specs_of(template, cuts)
            call.parts.add([tensors[name] for name, text in specs.items() if "/tp" in text])
            call.parts.add([factor for n, pair in factors.items() for factor in split_factors(cuts, n, pair)])
            with divided(template, cuts, size), Regions(call):
                out = call_pure(template, tensors, *inputs)
            expect_called(call)
            if any(leaf in call.parts for leaf in pytree.leaves(out)):
                raise ValueError(
                    "tp: what a layer returns is a rank's part; after linear layers of kind 'columns' one of kind "
                    "'rows' must follow"
                )
            return out

    def take_factors(self, kind: StackKind, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Factors]]:
        """A layer's tensors, and LoRA's factors of its linear layers; those of other weights are added to these."""
        tensors, factors = dict(tensors), {}
        for name in [name.removesuffix("_lora_a") for name in tensors if name.endswith("_lora_a")]:
            pair = Factors(tensors.pop(f"{name}_lora_a"), tensors.pop(f"{name}_lora_b"))
            owner, _, leaf = name.rpartition(".")
            if leaf == "weight" and type(self.linears[kind.stack].get(owner)) is nn.Linear:
                factors[owner] = pair
            else:
                tensors[name] = tensors[name] + pair.b @ pair.a
        return tensors, factors

    def snapshot(self) -> Snapshot:
        """What variables have that the module and the loss function reach."""
        return Snapshot(self.skeleton, *(layer for layers in self.templates.values() for layer in layers), self.loss)

    @contextlib.contextmanager
    def preserve_variables(self) -> Iterator[None]:
        """What variables have that the module and the loss function reach, they have again after what runs within."""
        snapshot = self.snapshot()
        try:
            yield
        finally:
            snapshot.restore()


def first_of(out: Any) -> Any:
    """The activations in what a layer returns: alone, or at the head of a tuple."""
    return out[0] if isinstance(out, (tuple, list)) else out


class LayerRuns(NamedTuple):
    """The layers that ran in a call of a module."""

    runs: Counter[StackKind]
    last: dict[StackKind, Any]  # what the last one of a kind returned
    entered: dict[str, Tensor]  # the first argument of each stack's first layer


class Rehearsal:
    """Calls of a module with layers on a batch, in one process, without gradients."""

    def __init__(self, layered: CopiedModule, batch: Any, ctx: Ctx, rows: int, seed: int) -> None:
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
        device = pytree.leaves(self.batch)[0].device
        return [(*pair, torch.tensor(i, device=device)) for i, pair in enumerate(self.layered.layers)]

    def leaves_of(self, kind: StackKind, number: Tensor) -> dict[str, Tensor]:
        """The parameters and buffers of a layer."""
        return {**self.within[kind.stack], **self.layered.layer_buffers(kind, self.stacked, number)}

    def run_module(self, first: bool = False) -> list[Any]:
        """What goes into the stacks, and what the loss function returns, of the copied module."""
        state, layers, runs = {**self.outside, **self.buffers}, [], LayerRuns(Counter(), {}, {})
        for name, kind, number in self.layers():
            state |= {f"{name}.{leaf}": x for leaf, x in self.leaves_of(kind, number).items()}
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
        leaves, ctx = self.leaves_of(kind, number), self.ctx._replace(layer=number)
        return self.layered.call_layer(kind, leaves, (args, kwargs), ctx, self.rows, detect_draws=True)

    def layer(
        self,
        forwards: Sequence[Callable[..., Any]],
        kind: StackKind,
        number: Tensor,
        state: LayerRuns,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """What a layer returns; after some layers of its kind, what it is given."""
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
                x = (first_of(self.template(kind, layer, *args, **kwargs)), *x[1:])
            return [*entered.values(), *pytree.leaves(split.result_of(split.epilogue(inputs, x)))]

    def first(self, variables: dict[str, Any] | None = None) -> None:
        """The first call, in which the module and its layers make what they make once."""
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
        """What the loss function returns; raises Impure if a second call differs, or CannotSplit."""
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
    """A batch as real tensors, one example under vmap; None without values."""

    def real(x: Tensor) -> Tensor:
        while is_functorch_wrapped_tensor(x):
            dim, x = maybe_get_bdim(x), get_unwrapped(x)
            x = x.select(dim, 0) if dim >= 0 else x
        return x.detach()

    with graph_tracing.outside_transforms():
        values = pytree.map(real, batch)
        plain = all(type(x) is Tensor and not x.is_meta for x in pytree.leaves(values))
        return values if plain else None
