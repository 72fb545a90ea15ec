"""A module's forward pass and loss, cut at its layers: what comes before each stack, and after the last.

The module is run once on tensors without values, with layers that note what they are called with and return the first
argument; the graph is cut there. What else the layers are called with is the same for all of a kind, and computed
before the first one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fzero.core import graph_tracing, pytree
from fzero.core.closure_state import ClosureState
from fzero.core.graph_tracing import Watch
from fzero.core.random_interception import is_drawing
from fzero.models.base import Ctx, TokenLayout
from fzero.models.module_layers import HOOKS, CannotSplit, Stacks, holds_tensors
from fzero.models.module_tp import calling, draws_of, replaced
from fzero.models.user_functions import wide_sums

Inputs = Mapping[str, Tensor]  # by name: parameter NAME, buffer NAME, batch NAME, "key" and "first" of the Ctx
LossOf = Callable[[Callable[..., Any], Any], Any]


@dataclass(frozen=True)
class GraphProgram:
    """A function of some of the Inputs, and of given activations, as a graph."""

    graph: GraphModule
    names: tuple[str, ...]  # of its inputs; "x 0", "x 1" and so on for activations

    def __call__(self, inputs: Inputs, x: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        tensors = {**inputs, **{f"x {i}": leaf for i, leaf in enumerate(x)}}
        # The graph has the views of the example's strides; a slice of a batch has others.
        ordered = [tensors[name].contiguous() for name in self.names]
        with wide_sums(ordered):
            return self.graph(*ordered)

    def equals(self, rhs: GraphProgram) -> bool:
        """Whether another program computes the same, with the same constants."""
        nodes = [[node for node in program.graph.graph.nodes if node.op == "get_attr"] for program in (self, rhs)]
        pairs = [(getattr(self.graph, a.target), getattr(rhs.graph, b.target)) for a, b in zip(*nodes)]
        matches = self.names == rhs.names and self.graph.code == rhs.graph.code
        return matches and all(a is b or (a.shape == b.shape and torch.equal(a, b)) for a, b in pairs)

    def uses(self, kind: str) -> list[str]:
        """The names of its inputs of a kind, such as "parameter"."""
        return [name.removeprefix(f"{kind} ") for name in self.names if name.startswith(f"{kind} ")]


class StackKind(NamedTuple):
    """A kind of layers: those of one stack that are one program."""

    stack: str
    number: int


def layers_of(stacks: Stacks) -> list[tuple[str, StackKind]]:
    """The layers by name, each with its kind, in the order of a forward pass."""
    return [
        (n, StackKind(stack, kind)) for stack, layers in stacks.items() for n, kind in zip(layers.names, layers.kinds)
    ]


@dataclass(frozen=True)
class ForwardSplit:
    """A forward pass cut at the layers, for batches of certain shapes."""

    # Of each stack: -> its first layer's first argument, the other arguments that parameters went into, and what comes
    # after this stack needs of the stacks before it. All but the first take what the stack before them left.
    prologues: dict[str, GraphProgram]
    side_program: GraphProgram  # -> the other tensors that the layers are called with
    epilogue: GraphProgram  # (x as the last layer leaves it) -> tensors of the loss
    arguments: dict[StackKind, tuple[Any, Any]]  # structure of a layer's (args, kwargs), with Place for tensors
    result: tuple[Any, list[Any]]  # structure of what the loss function returned, with Place for tensors
    draws: bool = False  # whether something outside of the layers may draw random numbers

    def equals(self, rhs: ForwardSplit) -> bool:
        """Whether another trace gave the same programs, with the same constants."""
        programs, theirs = ([*side.prologues.values(), side.side_program, side.epilogue] for side in (self, rhs))
        return (
            all(map(GraphProgram.equals, programs, theirs))
            and equal_structures(self.result, rhs.result)
            and all(map(equal_structures, self.arguments.values(), rhs.arguments.values()))
        )

    def arguments_of(self, kind: StackKind, x: tuple[Tensor, ...], side_args: tuple[Tensor, ...]) -> tuple[Any, Any]:
        """(args, kwargs) of a layer."""
        return fill(self.arguments[kind], {"x": x, "beside": side_args})

    def result_of(self, tensors: tuple[Tensor, ...]) -> Any:
        """The result of the loss function, with these tensors in it."""
        return fill(self.result, {"out": tensors})


@dataclass(frozen=True)
class TensorSlot:
    """In a structure: the tensor `number` of a group."""

    group: str
    number: int


def equal_structures(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    """Whether two structures have the same Places, and the same numbers and texts beside them."""
    plain = (TensorSlot, int, float, str, bool, type(None))
    pairs = [(x, y) for x, y in zip(a[1], b[1]) if isinstance(x, plain) or isinstance(y, plain)]
    return a[0] == b[0] and len(a[1]) == len(b[1]) and all(type(x) is type(y) and x == y for x, y in pairs)


def fill(structure: tuple[Any, Any], groups: dict[str, tuple[Tensor, ...]]) -> Any:
    """The tree of a (treedef, leaves) whose Places are filled with tensors."""
    treedef, leaves = structure
    return pytree.unflatten(
        [groups[leaf.group][leaf.number] if isinstance(leaf, TensorSlot) else leaf for leaf in leaves], treedef
    )


class Called(NamedTuple):
    """How the first layer of a kind was called."""

    name: str
    treedef: Any
    leaves: list[Any]  # of (args, kwargs)
    result: Callable[[Tensor, list[Any]], Any]  # (x, the leaves of a call) -> what a layer returns


@dataclass
class Recorder:
    """A record of the calls of a copied module's layers while it is traced."""

    stacks: Stacks
    check: Callable[[StackKind, Watch, Any, Any], Any]  # runs a layer, once, on the first one's arguments
    watch: Watch
    calls: int = 0
    first: dict[StackKind, Called] = field(default_factory=dict)
    entered: dict[str, Tensor] = field(default_factory=dict)  # the first argument of each stack's first layer
    exits: dict[str, Tensor] = field(default_factory=dict)  # what its last layer returned
    sides: list[tuple[str, StackKind, list[Tensor]]] = field(default_factory=list)  # what each layer has beside
    unused: list[tuple[str, Tensor]] = field(default_factory=list)  # what layers return and no layer may be asked for
    x: Any = None  # what the last call returned

    def __post_init__(self) -> None:
        self.layers = layers_of(self.stacks)

    def call(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Stand in for layer `number`."""
        name, kind = self.layers[number]
        if number != self.calls:
            raise CannotSplit(
                f"{name} is called where {self.layers[self.calls][0]} comes next"
                if self.calls < len(self.layers)
                else f"{name} is called again after all layers"
            )
        self.calls += 1
        leaves, treedef = pytree.flatten((args, kwargs))
        if kind.stack not in self.entered:
            self.enter(name, kind, leaves)
        elif not leaves or leaves[0] is not self.x:
            raise CannotSplit(f"the first argument of {name} is not what the layer before returned")
        if kind not in self.first:
            for i, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    self.watch.protect(f"argument {i} of {name}" if i else f"the input of {name}", leaf)
            result = self.result_of(name, leaves, self.check(kind, self.watch, args, kwargs))
            self.first[kind] = Called(name, treedef, leaves, result)
            for i, leaf in enumerate(leaves):
                if not isinstance(leaf, Tensor) and holds_tensors(leaf):
                    raise CannotSplit(
                        f"argument {i} of {name} is an object with tensors of its own, {type(leaf).__name__}; a model "
                        "of transformers passes none with use_cache=False"
                    )
        else:
            compare(name, treedef, leaves, self.first[kind])
        self.sides.append((name, kind, [leaf for leaf in leaves[1:] if isinstance(leaf, Tensor)]))
        # A tensor of its own, by which the graph knows it, and into which the program must not write.
        self.x = self.exits[kind.stack] = leaves[0].clone()
        if name != self.stacks[kind.stack].names[-1]:
            self.watch.protect(f"what {name} returned", self.x)
        return self.first[kind].result(self.x, leaves)

    def enter(self, name: str, kind: StackKind, leaves: list[Any]) -> None:
        """Note the first argument of a stack's first layer."""
        if not leaves or not isinstance(leaves[0], Tensor) or not leaves[0].is_floating_point():
            raise CannotSplit(f"{name} is not called with a floating tensor as its first argument")
        self.entered[kind.stack] = leaves[0]

    def result_of(self, name: str, leaves: list[Any], out: Any) -> Callable[[Tensor, list[Any]], Any]:
        """How a layer returns x: alone, or first in a tuple."""
        first, *tail = out if isinstance(out, (tuple, list)) else (out,)
        x = leaves[0]
        if not isinstance(first, Tensor) or first.shape != x.shape or first.dtype != x.dtype:
            description = f"{list(first.shape)} {first.dtype}" if isinstance(first, Tensor) else type(first).__name__
            raise CannotSplit(f"{name} returns {description} for its first argument, {list(x.shape)} {x.dtype}")
        if not isinstance(out, (tuple, list)):
            return lambda x, leaves: x
        extras, treedef = pytree.flatten(tail)
        if any(leaf is not None and not isinstance(leaf, Tensor) for leaf in extras):
            raise CannotSplit(f"{name} returns more than tensors")
        argument_index = {id(leaf): i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i}

        def result(x: Tensor, leaves: list[Any]) -> Any:
            values = [
                leaves[argument_index[id(leaf)]] if id(leaf) in argument_index else self.stand_in(name, leaf)
                for leaf in extras
            ]
            return type(out)((x, *pytree.unflatten(values, treedef)))

        return result

    def stand_in(self, name: str, leaf: Tensor | None) -> Tensor | None:
        """A tensor in place of one that a layer returns beside x, which nobody may use."""
        if leaf is None:
            return None
        self.unused.append((name, torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)))
        return self.unused[-1][1]


def compare(name: str, treedef: Any, leaves: list[Any], first: Called) -> None:
    """Raise CannotSplit unless a layer is called as the first one of its kind was."""
    if treedef != first.treedef:
        raise CannotSplit(f"{name} is called with other arguments than {first.name}")
    for i, (leaf, expected) in enumerate(zip(leaves, first.leaves)):
        tensors = isinstance(leaf, Tensor), isinstance(expected, Tensor)  # compared as nodes of the graph
        if tensors != (True, True) and (any(tensors) or type(leaf) is not type(expected) or leaf != expected):
            raise CannotSplit(f"argument {i} of {name} is another one than that of {first.name}")


def split(
    skeleton: nn.Module,
    stacks: Stacks,
    loss: LossOf,
    check: Callable[[StackKind, Watch, Any, Any], Any],
    batch: Any,
    inputs: Inputs,
    ctx: Ctx,
    originals: Mapping[str, Tensor],
) -> ForwardSplit:
    """The Split of `loss(call, batch)` for a batch of these shapes; raises CannotSplit with the reason."""
    names, constants = list(inputs), ClosureState.from_module("the module", skeleton).constants()
    batch_def, trace_results, rows = pytree.flatten(batch)[1], {}, pytree.leaves(batch)[0].shape[0]

    def run(*tensors: Tensor) -> list[Tensor]:
        named = dict(zip(names, tensors))
        leaves = [leaf for name, leaf in named.items() if name.startswith("batch ")]
        state = {
            name.split(" ", 1)[1]: leaf for name, leaf in named.items() if name.startswith(("parameter ", "buffer "))
        }
        guarded = {f"the {name}": leaf for name, leaf in named.items()}
        watch = Watch(guarded, recorded=True, originals=originals)
        recorder = Recorder(stacks, check, watch)
        trace_ctx = ctx._replace(key=named.get("key", ()), tokens=TokenLayout(named.get("first", 0)))
        for name, tensor in constants.items():
            watch.protect(name, tensor)
        with watch, calling(trace_ctx, rows, draws=draws_of), replaced(stand_ins(recorder, skeleton)):
            out = loss(ModuleCall(skeleton, state, ctx.dtype), pytree.unflatten(leaves, batch_def))
            trace_results["draws"] = is_drawing()
        if recorder.calls < len(recorder.layers):
            missing = recorder.layers[recorder.calls][0]
            raise CannotSplit(f"{missing} is never called" if recorder.calls else "the layers are never called")
        trace_results.update(recorder=recorder, result=pytree.flatten(out))
        out_tensors = [leaf for leaf in trace_results["result"][0] if isinstance(leaf, Tensor)]
        return [leaf for group in results_of(recorder) for leaf in group] + out_tensors

    trained = {f"parameter {name}": leaf.requires_grad for name, leaf in skeleton.named_parameters()}
    requires_grad = [trained.get(name, False) for name in names]
    graph = traced(run, list(inputs.values()), requires_grad)
    return replace(
        Cutter(graph, names, trace_results["recorder"]).split(trace_results["result"]), draws=trace_results["draws"]
    )


def stand_ins(recorder: Recorder, skeleton: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """What stands for the forward passes and hooks of a module's layers."""
    layers = [skeleton.get_submodule(name) for name, _ in recorder.layers]
    calls = [(layer, "forward", partial(recorder.call, i)) for i, layer in enumerate(layers)]
    return [*calls, *((layer, hooks, OrderedDict()) for layer in layers for hooks in HOOKS)]


def results_of(recorder: Recorder) -> list[list[Tensor]]:
    """The tensors that are known of the layers, as groups of results of the graph."""
    return [
        list(recorder.entered.values()),
        list(recorder.exits.values()),
        *(tensors for _, _, tensors in recorder.sides),
        [leaf for _, leaf in recorder.unused],
    ]


def traced(run: Callable[..., list[Tensor]], like: list[Tensor], trained: list[bool]) -> GraphModule:
    """The graph of `run`; raises CannotSplit where it needs the values of its tensors."""
    try:
        return graph_tracing.trace(run, like, trained)
    except (CannotSplit, graph_tracing.Impure):
        raise
    except graph_tracing.Untraceable as error:
        raise CannotSplit(str(error)) from None
    except Exception as error:  # whatever the module's own code raises without values
        location, text = graph_tracing.line(error), str(error).strip().split("\n")[0]
        raise CannotSplit(
            f"{location or 'the module'}: without values it raises {type(error).__name__}: {text}"
        ) from error


class Cutter:
    """A graph whose results are those of `results_of` and the loss', and its parts."""

    def __init__(self, graph: GraphModule, names: list[str], recorder: Recorder):
        self.graph, self.names, self.recorder = graph, names, recorder
        self.placeholders, outputs = graph_tracing.inputs_of(graph), iter(graph_tracing.outputs_of(graph))
        groups = [[next(outputs) for _ in group] for group in results_of(recorder)]
        stacks = list(recorder.stacks)
        self.entered, self.exits = (dict(zip(stacks, group)) for group in groups[:2])
        self.sides, unused, self.losses = groups[2:-1], groups[-1], list(outputs)
        self.numbers = graph_tracing.value_numbers(graph)
        used = {*self.losses, *self.entered.values(), *(node for nodes in self.sides for node in nodes)}
        for (name, _), node in zip(recorder.unused, unused):
            if used & graph_tracing.dependents(graph, [node]):
                raise CannotSplit(f"{name} returns more than one tensor, and the others are used")

    def split(self, result: tuple[list[Any], Any]) -> ForwardSplit:
        """The Split; raises CannotSplit where the layers' arguments differ, or cannot go through a stack."""
        sources = [
            node for node, name in zip(self.placeholders, self.names) if name.startswith(("parameter ", "key", "first"))
        ]
        moving = graph_tracing.dependents(self.graph, sources)
        carried: dict[str, list[Node]] = {stack: [node] for stack, node in self.entered.items()}
        side_nodes: list[Node] = []
        arguments = {}
        for kind, called in self.recorder.first.items():
            order, places = iter(self.sides_of(kind)), [TensorSlot("x", 0)]
            for i, leaf in enumerate(called.leaves[1:], 1):
                if not isinstance(leaf, Tensor):
                    places.append(leaf)
                    continue
                node = next(order)
                group = carried[kind.stack] if node in moving else side_nodes
                if group is not side_nodes and not leaf.is_floating_point():
                    raise CannotSplit(f"argument {i} of {called.name} is {leaf.dtype} and made from parameters")
                places.append(
                    TensorSlot(
                        "beside" if group is side_nodes else "x", self.add_node(node, group, group is not side_nodes)
                    )
                )
            arguments[kind] = called.treedef, places
        prologues, epilogue = self.programs(carried)
        values, result_def = result
        numbered = iter(range(len(self.losses)))
        filled = [TensorSlot("out", next(numbered)) if isinstance(leaf, Tensor) else leaf for leaf in values]
        return ForwardSplit(prologues, self.program(side_nodes, {}), epilogue, arguments, (result_def, filled))

    def sides_of(self, kind: StackKind) -> list[Node]:
        """The nodes of a kind's tensors beside x; raises CannotSplit if a layer of it gets another thing."""
        called, reference = self.recorder.first[kind], None
        indices = [i for i, leaf in enumerate(called.leaves) if isinstance(leaf, Tensor)][1:]
        for (name, layer_kind, _), nodes in zip(self.recorder.sides, self.sides):
            reference = nodes if layer_kind == kind and reference is None else reference
            for i, node, first in zip(
                indices, nodes, reference if layer_kind == kind and reference is not None else ()
            ):
                if self.numbers[node] != self.numbers[first]:
                    raise CannotSplit(f"argument {i} of {name} is another one than that of {called.name}")
        assert reference is not None
        return reference

    def add_node(self, node: Node, group: list[Node], first: int) -> int:
        """The number of a node in a group, which is added unless one is the same."""
        numbers = [self.numbers[member] for member in group[first:]]
        if self.numbers[node] not in numbers:
            numbers.append(self.numbers[node])
            group.append(node)
        return first + numbers.index(self.numbers[node])

    def programs(self, carried: dict[str, list[Node]]) -> tuple[dict[str, GraphProgram], GraphProgram]:
        """(the program before each stack, the one after the last)."""
        stacks, lefts = list(carried), set(self.exits.values())
        outputs, programs = self.losses, []
        for i in reversed(range(len(stacks))):
            x = [self.exits[stacks[i]], *carried[stacks[i]][1:]]
            # A parameter itself need not be kept: it is fetched again.
            inputs = {f"x {n}": node for n, node in enumerate(x) if node.op != "placeholder"}
            passing = self.reached(outputs, set(inputs.values()), lefts)
            inputs |= {f"x {len(x) + n}": node for n, node in enumerate(passing)}
            if self.exits[stacks[i]] not in self.reached(outputs, set(), lefts):
                raise CannotSplit("the loss does not depend on what the layers return")
            programs.append(self.program(outputs, inputs))
            outputs = [*carried[stacks[i]], *passing]
        programs.append(self.program(outputs, {}))
        epilogue, *prologues = programs
        return dict(zip(stacks, reversed(prologues))), epilogue

    def reached(self, outputs: Sequence[Node], boundary: set[Node], lefts: set[Node]) -> list[Node]:
        """Which of `lefts`, but those given, some outputs are computed from."""
        exits, visited, todo = {}, set(), list(outputs)
        while todo:
            node = todo.pop()
            if node in visited or node in boundary:
                continue
            visited.add(node)
            if node in lefts:
                exits[node] = None
            else:
                todo.extend(node.all_input_nodes)
        return list(exits)

    def program(self, outputs: list[Node], inputs: dict[str, Node]) -> GraphProgram:
        """The part of the graph that computes some of its nodes."""
        numbers, subgraph = graph_tracing.extract_subgraph(self.graph, [*self.placeholders, *inputs.values()], outputs)
        all_names = [*self.names, *inputs]
        return GraphProgram(subgraph, tuple(all_names[i] for i in numbers))


class ModuleCall:
    """`call(*args, **kwargs)` of a module with these parameters and buffers, in their dtype."""

    def __init__(self, module: nn.Module, state: dict[str, Tensor], dtype: torch.dtype):
        self.target = module, state, dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, state, dtype = self.target

        def to_dtype(leaf: Any) -> Any:
            return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        return call_pure(module, state, *pytree.map(to_dtype, (args, kwargs)))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`call` of a loss has no {name!r}: it calls the module with the parameters of a state, and is not the "
            "module; have its forward pass return what the loss needs"
        )


Slots = dict[str, list[tuple[dict[str, Any], str]]]
SLOTS: WeakKeyDictionary[nn.Module, Slots] = WeakKeyDictionary()


def slots_of(module: nn.Module) -> Slots:
    """The tables of modules and the keys in them that have a parameter or buffer, by its first name."""
    slots, names = Slots(), dict[int, str]()
    for prefix, child in module.named_modules():
        for table in (child._parameters, child._buffers):
            for key, leaf in table.items():
                if leaf is not None:
                    name = names.setdefault(id(leaf), f"{prefix}.{key}" if prefix else key)
                    slots.setdefault(name, []).append((table, key))
    return slots


def call_pure(module: nn.Module, state: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
    """What a module with these parameters and buffers returns; raises Impure if it replaces a buffer.

    Differs from torch.func.functional_call: the modules are walked once, and not in each call.
    """
    slots = SLOTS.get(module)
    if slots is None or not state.keys() <= slots.keys():
        slots = SLOTS[module] = slots_of(module)
    filled = [(table, key, name) for name in state for table, key in slots[name]]
    previous = [table[key] for table, key, _ in filled]
    try:
        for table, key, name in filled:
            table[key] = state[name]
        out = module(*args, **kwargs)
        changed = next((name for table, key, name in filled if table.get(key) is not state[name]), "")
    finally:
        for (table, key, _), leaf in zip(filled, previous):
            table[key] = leaf
    if changed:
        raise graph_tracing.Impure(
            f"the module sets {changed!r} in its forward pass, and a state that is not a parameter would be lost; "
            "hand it in by the batch, or set it outside of the step"
        )
    return out


def inputs_of(parameters: Inputs, buffers: Inputs, batch: Any, ctx: Ctx) -> Inputs:
    """The inputs of a Split's programs, by name."""
    out = {f"parameter {name}": leaf for name, leaf in parameters.items()}
    out |= {f"buffer {name}": leaf for name, leaf in buffers.items()}
    out |= {f"batch {name}": leaf for name, leaf in pytree.named_leaves(batch).items()}
    if isinstance(ctx.key, Tensor):
        out |= {"key": ctx.key, "first": torch.as_tensor(ctx.tokens.first, device=ctx.key.device)}
    return out
