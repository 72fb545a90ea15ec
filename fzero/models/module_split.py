"""A module's forward pass and loss, cut at its layers: what comes before them, and what after.

The module is run once on tensors without values. Each layer is replaced by one that notes what it is called with and
returns its first argument; the recorded graph is then cut where the first layer is called and where the last one
returns. What the layers are called with beside that argument is the same for all of them: it is computed before the
first one, from the batch alone where no parameter goes into it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fzero.core import graph_cut, pytree
from fzero.core.graph_cut import Watch
from fzero.models.base import Ctx
from fzero.models.module_calls import calling
from fzero.models.module_layers import CannotSplit, Layers

Inputs = Mapping[str, Tensor]  # by name: parameter NAME, buffer NAME, batch NAME, "key" and "first" of the Ctx
LossOf = Callable[[Callable[..., Any], Any], Any]


@dataclass(frozen=True)
class Program:
    """A function of some of the Inputs, and of given activations, as a graph."""

    graph: GraphModule
    names: tuple[str, ...]  # of its inputs; "x 0", "x 1" and so on for activations

    def __call__(self, inputs: Inputs, x: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        given = {**inputs, **{f"x {i}": leaf for i, leaf in enumerate(x)}}
        return self.graph(*(given[name] for name in self.names))

    def uses(self, kind: str) -> list[str]:
        """The names of its inputs of a kind, such as "parameter"."""
        return [name.removeprefix(f"{kind} ") for name in self.names if name.startswith(f"{kind} ")]


@dataclass(frozen=True)
class Split:
    """A forward pass cut at the layers, for batches of certain shapes."""

    before: Program  # -> the first layer's first argument, and the arguments that parameters went into
    beside: Program  # -> the other tensors that the layers are called with
    after: Program  # (what `before` returned, the first of it as the last layer returns it) -> tensors of the loss
    arguments: tuple[Any, Any]  # structure of a layer's (args, kwargs), with Place for tensors
    result: tuple[Any, list[Any]]  # structure of what the loss function returned, with Place for tensors

    def arguments_of(self, x: tuple[Tensor, ...], beside: tuple[Tensor, ...]) -> tuple[Any, Any]:
        """(args, kwargs) of a layer."""
        return fill(self.arguments, {"x": x, "beside": beside})

    def result_of(self, tensors: tuple[Tensor, ...]) -> Any:
        """What the loss function returned."""
        return fill(self.result, {"out": tensors})


@dataclass(frozen=True)
class Place:
    """In a structure: the tensor `number` of a group."""

    group: str
    number: int


def fill(structure: tuple[Any, Any], groups: dict[str, tuple[Tensor, ...]]) -> Any:
    """The tree of a (treedef, leaves) whose Places are filled with tensors."""
    treedef, leaves = structure
    return pytree.unflatten(
        [groups[leaf.group][leaf.number] if isinstance(leaf, Place) else leaf for leaf in leaves], treedef
    )


@dataclass
class Recorder:
    """What the layers of a copied module do while it is traced."""

    layers: Layers
    check: Callable[[Watch, Any, Any], Any]  # runs a layer, once, on the first one's arguments
    watch: Watch
    calls: int = 0
    treedef: Any = None
    leaves: list[list[Any]] = field(default_factory=list)  # of (args, kwargs) of each layer
    x: Any = None  # what the last call returned

    def call(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Stand in for layer `number`."""
        name = self.layers.names[number]
        if number != self.calls:
            raise CannotSplit(
                f"{name} is called where {self.layers.names[self.calls]} comes next"
                if self.calls < len(self.layers.names)
                else f"{name} is called again after all layers"
            )
        self.calls += 1
        leaves, treedef = pytree.flatten((args, kwargs))
        self.leaves.append(leaves)
        if number == 0:
            self.begin(name, treedef, leaves)
            out = self.check(self.watch, args, kwargs)
            self.shape = self.shape_of(name, out)
        else:
            self.compare(name, treedef, leaves)
        # A tensor of its own, by which the graph knows it, and into which the program must not write.
        self.x = leaves[0].clone()
        if self.calls < len(self.layers.names):
            self.watch.keep(f"what {name} returned", self.x)
        return self.shape(self.x)

    def begin(self, name: str, treedef: Any, leaves: list[Any]) -> None:
        """Note the arguments of the first layer."""
        if not leaves or not isinstance(leaves[0], Tensor) or not leaves[0].is_floating_point():
            raise CannotSplit(f"{name} is not called with a floating tensor as its first argument")
        self.treedef = treedef
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self.watch.keep(f"argument {i} of {name}" if i else f"the input of {name}", leaf)

    def shape_of(self, name: str, out: Any) -> Callable[[Tensor], Any]:
        """How a layer returns its first argument: alone, or at the head of a tuple of nothing else."""
        first, *rest = out if isinstance(out, (tuple, list)) else (out,)
        x = self.leaves[0][0]
        if any(leaf is not None for leaf in rest):
            raise CannotSplit(f"{name} returns more than one tensor")
        if not isinstance(first, Tensor) or first.shape != x.shape or first.dtype != x.dtype:
            shown = f"{list(first.shape)} {first.dtype}" if isinstance(first, Tensor) else type(first).__name__
            raise CannotSplit(f"{name} returns {shown} for its first argument, {list(x.shape)} {x.dtype}")
        return (lambda x: type(out)((x, *rest))) if isinstance(out, (tuple, list)) else lambda x: x

    def compare(self, name: str, treedef: Any, leaves: list[Any]) -> None:
        """Raise CannotSplit unless a layer is called with what the one before returned, and else as the first was."""
        if treedef != self.treedef:
            raise CannotSplit(f"{name} is called with other arguments than {self.layers.names[0]}")
        if leaves[0] is not self.x:
            raise CannotSplit(f"the first argument of {name} is not what the layer before returned")
        for i, (leaf, first) in enumerate(zip(leaves, self.leaves[0])):
            tensors = isinstance(leaf, Tensor), isinstance(first, Tensor)  # compared as nodes of the graph
            if tensors != (True, True) and (any(tensors) or type(leaf) is not type(first) or leaf != first):
                raise CannotSplit(self.unlike(i, name))

    def unlike(self, i: int, name: str) -> str:
        """The reason that argument `i` of a layer is not that of the first one."""
        return f"argument {i} of {name} is another one than that of {self.layers.names[0]}"

    @property
    def sides(self) -> list[list[Tensor]]:
        """The tensors that each layer is called with beside the first one."""
        return [[leaf for leaf in leaves[1:] if isinstance(leaf, Tensor)] for leaves in self.leaves]


def split(
    skeleton: nn.Module,
    layers: Layers,
    loss: LossOf,
    check: Callable[[Watch, Any, Any], Any],
    batch: Any,
    inputs: Inputs,
    ctx: Ctx,
    rows: int,
) -> Split:
    """The Split of `loss(call, batch)` for a batch of these shapes.

    skeleton: a copy of the module. check: runs a layer on fake tensors. inputs: tensors of the right shapes and dtypes.
    ctx: of one process. Raises CannotSplit with the reason if the layers are not called as a stack is, or the program
    needs values; ValueError for what it may not do.
    """
    names = list(inputs)
    batch_def, found = pytree.flatten(batch)[1], {}

    def run(*tensors: Tensor) -> list[Tensor]:
        now = dict(zip(names, tensors))
        leaves = [leaf for name, leaf in now.items() if name.startswith("batch ")]
        state = {
            name.split(" ", 1)[1]: leaf for name, leaf in now.items() if name.startswith(("parameter ", "buffer "))
        }
        watch = Watch({name: leaf for name, leaf in now.items() if name.startswith("buffer ")}, recorded=True)
        recorder = Recorder(layers, check, watch)
        for i, name in enumerate(layers.names):
            vars(skeleton.get_submodule(name))["forward"] = lambda *a, i=i, **k: recorder.call(i, *a, **k)
        here = ctx._replace(key=now.get("key", ()), first=now.get("first", 0))
        with watch, calling(here, rows):
            out = loss(function_of(skeleton, state, ctx.dtype), pytree.unflatten(leaves, batch_def))
        if recorder.calls < len(layers.names):
            missing = layers.names[recorder.calls]
            raise CannotSplit(f"{missing} is never called" if recorder.calls else "the layers are never called")
        found.update(recorder=recorder, result=pytree.flatten(out))
        sides = [leaf for some in recorder.sides for leaf in some]
        out_tensors = [leaf for leaf in found["result"][0] if isinstance(leaf, Tensor)]
        return [recorder.leaves[0][0], recorder.x, *sides, *out_tensors]

    trained = [name.startswith("parameter ") and inputs[name].is_floating_point() for name in names]
    graph = traced(run, list(inputs.values()), trained)
    return cut(graph, names, found["recorder"], found["result"])


def traced(run: Callable[..., list[Tensor]], like: list[Tensor], trained: list[bool]) -> GraphModule:
    """The graph of `run`; raises CannotSplit where it needs the values of its tensors."""
    try:
        return graph_cut.trace(run, like, trained)
    except (CannotSplit, graph_cut.Impure):
        raise
    except Exception as error:  # whatever the module's own code raises without values
        at, text = graph_cut.line(error), str(error).strip().split("\n")[0]
        raise CannotSplit(f"{at or 'the module'}: without values it raises {type(error).__name__}: {text}") from error


def cut(graph: GraphModule, names: list[str], recorder: Recorder, result: tuple[list[Any], Any]) -> Split:
    """The Split of a graph whose results are x before and after the layers, their other tensors, and the loss'."""
    placeholders, outputs = graph_cut.inputs_of(graph), graph_cut.outputs_of(graph)
    parameters = [node for node, name in zip(placeholders, names) if name.startswith(("parameter ", "key", "first"))]
    moving = graph_cut.dependents(graph, parameters)
    first, last, *rest = outputs
    sides = sides_of(graph, recorder, rest)
    losses = rest[len(sides) * len(recorder.leaves) :]
    carried, beside, places, order = [first], [], [Place("x", 0)], iter(sides)
    for i, leaf in enumerate(recorder.leaves[0][1:], 1):
        if not isinstance(leaf, Tensor):
            places.append(leaf)
            continue
        node = next(order)
        group = carried if node in moving else beside
        if group is carried and not leaf.is_floating_point():
            raise CannotSplit(f"argument {i} of a layer is {leaf.dtype} and made from parameters")
        places.append(Place("x" if group is carried else "beside", len(group)))
        group.append(node)
    if not set(losses) & graph_cut.dependents(graph, [last]):
        raise CannotSplit("the loss does not depend on what the layers return")

    def program(outputs: list[Any], given: dict[str, Any]) -> Program:
        numbers, part = graph_cut.cut(graph, [*placeholders, *given.values()], outputs)
        all_names = [*names, *given]
        return Program(part, tuple(all_names[i] for i in numbers))

    values, result_def = result
    numbered = iter(range(len(losses)))
    filled = [Place("out", next(numbered)) if isinstance(leaf, Tensor) else leaf for leaf in values]
    # What the layers got from before them need not be computed again after them.
    given = {f"x {i}": node for i, node in enumerate([last, *carried[1:]]) if node.op != "placeholder"}
    return Split(
        before=program(carried, {}),
        beside=program(beside, {}),
        after=program(losses, given),
        arguments=(recorder.treedef, places),
        result=(result_def, filled),
    )


def sides_of(graph: GraphModule, recorder: Recorder, nodes: list[Any]) -> list[Any]:
    """The nodes of the first layer's tensors beside x, from those of all layers; raises CannotSplit if any computes
    another thing.
    """
    count, numbers = len(recorder.sides[0]), graph_cut.value_numbers(graph)
    at = [i for i, leaf in enumerate(recorder.leaves[0]) if isinstance(leaf, Tensor)][1:]
    for layer in range(1, len(recorder.leaves)):
        for i, first, node in zip(at, nodes[:count], nodes[layer * count :]):
            if numbers[first] != numbers[node]:
                raise CannotSplit(recorder.unlike(i, recorder.layers.names[layer]))
    return nodes[:count]


def function_of(module: nn.Module, state: dict[str, Tensor], dtype: torch.dtype) -> Callable[..., Any]:
    """`call(*args, **kwargs)` of a module with these parameters and buffers and floating arguments in their dtype;
    raises ValueError if it replaces one.
    """

    def to_dtype(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    def call(*args: Any, **kwargs: Any) -> Any:
        now = dict(state)
        args, kwargs = pytree.map(to_dtype, (args, kwargs))
        out = torch.func.functional_call(module, now, args, kwargs)
        for name, leaf in now.items():
            if leaf is not state[name]:
                raise graph_cut.Impure(
                    f"the module sets {name!r} in its forward pass, and a state that is not a parameter would be lost; "
                    "hand it in by the batch, or set it outside of the step"
                )
        return out

    return call
