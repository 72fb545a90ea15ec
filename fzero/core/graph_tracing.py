"""Somebody's program as a graph of plain operators, and that graph cut into functions.

`trace` runs a function on fake tensors, and `Watch` refuses what a graph would lose or a pure function may not do:
random numbers that are no function of a key, writes into what is not its own, gradients that count the batch, regions
without gradients. Each error names the line of the program that did it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

from fzero.core import pytree
from fzero.core.torch_private import (
    FakeTensor,
    TorchDispatchMode,
    clear_interpreter_stack,
    disable_current_modes,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)

OURS = tuple(str(Path(file).parent) + "/" for file in (torch.__file__, Path(__file__).parent))


class Impure(ValueError):
    """Raised for an operation that no pure function can have; names its line."""


NO_KEY = (
    "which fzero cannot draw by the state's key, so that the loss is no function of (state, batch); draw by F.dropout, "
    "torch.rand, randn, randint, randperm, normal, bernoulli or multinomial, or hand the numbers in by the batch"
)


class Untraceable(ValueError):
    """Raised for what a graph of a program would lose; names its line."""


BY_AUTOGRAD = (
    "torch.autograd in a loss, whose gradients torch.func takes, so that there is no graph to go back through; use "
    "torch.func.grad, vjp or jacrev, as in vmap(grad(f))(x)"
)


class AutogradWatch(TorchFunctionMode):
    """While it is entered, raises Impure where a program asks autograd for gradients and torch.func takes them."""

    recorded = called = False

    def __init__(self, originals: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.originals = {storage_of(tensor): name for name, tensor in originals.items()}

    def expect_no_original(self, args: Any, kwargs: Any) -> None:
        """Raise Impure for a read of a tensor in whose place the program is given another one."""
        leaves = pytree.leaves((args, kwargs)) if self.originals else []
        for leaf in leaves:
            name = self.originals.get(storage_of(leaf)) if isinstance(leaf, Tensor) else None
            if name is not None:
                raise Impure(
                    f"{current_line()}: reads {name} of the module itself, which keeps the values that it began with "
                    "and has no gradient here; have its forward pass return what the loss needs of it, and call it by "
                    "`call`"
                )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward and not is_called_by_torch():
            raise Impure(
                f"{current_line()}: backward() in a loss, which adds to the gradients of parameters; use "
                "torch.func.grad, or torch.autograd.grad of what it is to be of"
            )
        if func is torch.autograd.grad and not is_called_by_torch():
            self.called = True
            if any(isinstance(x, Tensor) and is_functorch_wrapped_tensor(x) for x in pytree.leaves((args, kwargs))):
                raise Impure(f"{current_line()}: {BY_AUTOGRAD}")
            if self.recorded:
                raise Untraceable(
                    f"{current_line()}: asks torch.autograd for gradients, which a traced graph would lose"
                )
        if func in (Tensor.register_hook, Tensor.retain_grad):
            self.called = True
            if self.recorded:
                raise Untraceable(f"{current_line()}: a hook on a tensor, which a traced graph would lose")
        if func is Tensor.tolist:  # which calls no operator
            self.expect_no_original(args, kwargs)
        return func(*args, **(kwargs or {}))


def is_called_by_torch() -> bool:
    """Whether the function of torch that runs now was called by torch itself."""
    for frame, _ in traceback.walk_stack(None):
        code = frame.f_code
        if not code.co_filename.startswith(OURS):
            return False
        if code.co_name not in ENTRY_POINTS:
            return True
    return False


# Of the function itself, and of modes around it.
ENTRY_POINTS = ("is_called_by_torch", "__torch_function__", "handle_torch_function", "grad", "backward")


class Watch(TorchDispatchMode):
    """While it is entered, raises Impure for operators that a pure function or a graph may not have."""

    communicates = False

    def __init__(
        self,
        protected: dict[str, Tensor],
        *,
        recorded: bool = False,
        reason: str = NO_KEY,
        originals: Mapping[str, Tensor] = MappingProxyType({}),
    ):
        super().__init__()
        self.autograd = AutogradWatch(originals)
        self.recorded, self.reason = recorded, reason
        self.protected: dict[int, str] = {}
        for name, tensor in protected.items():
            self.protect(name, tensor)

    def protect(self, name: str, tensor: Tensor) -> None:
        """Refuse writes into this tensor too."""
        storage = storage_of(tensor)
        if storage is not None:
            self.protected.setdefault(storage, name)

    @property
    def recorded(self) -> bool:
        """Whether the operators become a graph."""
        return self.autograd.recorded

    @recorded.setter
    def recorded(self, value: bool) -> None:
        self.autograd.recorded = value

    def __enter__(self) -> Watch:
        self.autograd.__enter__()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.autograd.expect_no_original(args, kwargs)
        arguments = func._schema.arguments
        self.communicates |= is_collective(func)
        named = {arg.name: value for arg, value in zip(arguments, args)} | kwargs
        rate = named.get("dropout_p", 0.0 if any(arg.name == "dropout_p" for arg in arguments) else 1.0)
        trains = next((named.get("training", arg.default_value) for arg in arguments if arg.name == "training"), True)
        rate = rate if trains else 0.0  # of rrelu in an evaluation, say
        if torch.Tag.nondeterministic_seeded in func.tags and rate:
            raise Impure(f"{current_line()}: draws random numbers ({func}), {self.reason}")
        if named.get("scale_grad_by_freq"):
            raise Impure(
                f"{current_line()}: scale_grad_by_freq divides gradients by how often a row is in the part of a batch "
                "that it sees, so that they depend on how the batch is cut; leave it out"
            )
        statistics = named.get("running_mean")
        if statistics is not None and named.get("training", named.get("use_input_stats", False)):
            self.expect_unprotected(statistics, func)  # which some of these operators write into and do not say
        for arg in arguments:
            if arg.alias_info is not None and arg.alias_info.is_write:
                for leaf in pytree.leaves(named.get(arg.name)):
                    self.expect_unprotected(leaf, func)
        lost = self.recorded and not torch.is_grad_enabled() and func is not torch.ops.prim.device.default
        leaves = pytree.leaves((args, kwargs)) if lost else []
        if any(isinstance(leaf, Tensor) and leaf.requires_grad and self.is_argument(leaf) for leaf in leaves):
            raise Untraceable(
                f"{current_line()}: {func} has a parameter's value and records no gradient (torch.no_grad, a hook, an "
                "autograd.Function), which a traced graph would lose; use .detach(), or move it into a layer"
            )
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        super().__exit__(kind, error, traceback)
        self.autograd.__exit__(kind, error, traceback)
        if kind is RuntimeError and "setup_context staticmethod" in str(error):
            raise Impure(
                "the loss calls a torch.autograd.Function without setup_context, and torch.func cannot go through it; "
                "give your own one setup_context (docs.pytorch.org, extending.func), and hand in by the batch what one "
                "of PyTorch draws, such as torch.distributions.Dirichlet"
            ) from None

    def is_argument(self, leaf: Tensor) -> bool:
        """Whether a tensor with a gradient is of what the program is given."""
        return not leaf.is_leaf or storage_of(leaf) in self.protected

    def expect_unprotected(self, leaf: Any, func: Any) -> None:
        """Raise Impure if an operator writes into a kept tensor."""
        name = self.protected.get(storage_of(leaf) or 0) if isinstance(leaf, Tensor) else None
        if name is not None:
            raise Impure(f"{current_line()}: {func} writes into {name} in place; make a new tensor, as in x = x + y")


class Collectives(TorchDispatchMode):
    """While it is entered, notes whether an operator is called that other ranks must call too."""

    called = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called |= is_collective(func)
        return func(*args, **(kwargs or {}))


def is_collective(func: Any) -> bool:
    """Whether other ranks must call an operator too."""
    return func.namespace in COLLECTIVE_NAMESPACES or any(arg.name == "communicator" for arg in func._schema.arguments)


# Of torch.distributed's operators.
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")


def is_foreign(f: Any, depth: int = 0) -> bool:
    """Whether a function is somebody's code, or one of ours that calls such a one."""
    if isinstance(f, functools.partial):
        return is_foreign(f.func, depth) or any(is_foreign(x, depth + 1) for x in (*f.args, *f.keywords.values()))
    f = getattr(f, "__func__", f)
    code = getattr(f, "__code__", None)
    if code is None or depth > DEEPEST:
        return callable(f) and not depth and not inspect.isbuiltin(f)
    if not code.co_filename.startswith(OURS):
        return True
    return any(is_foreign(x, depth + 1) for x in inspect.getclosurevars(f).nonlocals.values())


DEEPEST = 8  # functions of ours around somebody's


def storage_of(tensor: Tensor) -> int | None:
    """What tells a tensor's memory from others', below the transforms that wrap it; None for one without memory."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a sparse tensor, for instance
        return None


def current_line() -> str:
    """The line that is running now, for an error."""
    return line() or "the program"


def line(error: BaseException | None = None) -> str:
    """The "file:line (its text)" in a program that is neither torch's nor ours; "" if there is none."""
    frames = traceback.walk_stack(None) if error is None else reversed(list(traceback.walk_tb(error.__traceback__)))
    for frame, number in frames:
        file = frame.f_code.co_filename
        if not file.startswith(OURS) and not file.startswith("<"):
            return f"{Path(file).name}:{number} ({linecache.getline(file, number).strip()})"
    return ""


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """Outside of all transforms and modes that are active around the caller, with gradients recorded."""
    with clear_interpreter_stack(), disable_current_modes(), torch.enable_grad():
        yield


def trace(f: Callable[..., Sequence[Tensor]], like: Sequence[Tensor], trained: Sequence[bool]) -> GraphModule:
    """The graph of functional operators of `f` of tensors such as `like`; those `trained` have gradients."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from fzero.core.torch_private import FakeTensorMode, ShapeEnv

    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    with outside_transforms(), unlogged("torch._subclasses.fake_tensor"):  # which logs what it raises
        mode = FakeTensorMode(shape_env=shapes, static_shapes=True, allow_non_fake_inputs=True)
        with mode:
            fakes = [
                torch.empty(x.shape, dtype=x.dtype, device=x.device, requires_grad=grad)
                for x, grad in zip(like, trained)
            ]
            graph = make_fx(f)(*fakes)
            graph.graph.eliminate_dead_code()
            with torch.no_grad():
                pure = torch.func.functionalize(graph, remove="mutations")
                return make_fx(pure, {torch.ops.aten.copy.default: copied})(*[x.detach() for x in fakes])


def allow_constants(tensors: Iterable[Tensor]) -> None:
    """Let tensors beside a program's arguments be constants of its graph."""
    for x in tensors:
        while is_functorch_wrapped_tensor(x):
            x = get_unwrapped(x)
        if isinstance(x, FakeTensor):
            x.fake_mode.allow_non_fake_inputs = True


@contextlib.contextmanager
def unlogged(name: str) -> Iterator[None]:
    """Within it a logger is silent."""
    logger = logging.getLogger(name)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def copied(x: Tensor, y: Tensor, non_blocking: bool = False) -> Tensor:
    """x after y is copied into it, with a derivative."""
    return y.to(x.dtype).expand(x.shape)


def inputs_of(graph: GraphModule) -> list[Node]:
    """The inputs of a graph, in their order."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def outputs_of(graph: GraphModule) -> list[Node]:
    """The nodes of a graph's results, in their order."""
    return list(next(node for node in graph.graph.nodes if node.op == "output").args[0])


def dependents(graph: GraphModule, sources: Sequence[Node]) -> set[Node]:
    """The nodes of a graph that any of `sources` goes into, themselves among them."""
    reached = set(sources)
    for node in graph.graph.nodes:  # in the order of computation
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def value_numbers(graph: GraphModule) -> dict[Node, int]:
    """A number for each node of a graph; those of equal number are one computation of one thing."""
    numbers: dict[Node, int] = {}
    numbering: dict[str, int] = {}
    for node in graph.graph.nodes:
        arguments = map_arg((node.args, node.kwargs), lambda n: f"value {numbers[n]}")
        expression = node.name if node.op == "placeholder" else f"{node.op} {node.target} {arguments!r}"
        numbers[node] = numbering.setdefault(expression, len(numbering))
    return numbers


def extract_subgraph(
    graph: GraphModule, inputs: Sequence[Node], outputs: Sequence[Node]
) -> tuple[list[int], GraphModule]:
    """(the numbers of the `inputs` that are needed, the function of them that computes `outputs`, a tuple)."""
    boundary, needed, todo = dict.fromkeys(inputs), set(), list(outputs)
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo.extend(() if node in boundary else node.all_input_nodes)
    subgraph, copies = Graph(), {}
    numbers = [i for i, node in enumerate(inputs) if node in needed]
    for i in numbers:
        copies[inputs[i]] = subgraph.placeholder(f"input_{i}")
    for node in graph.graph.nodes:
        if node in needed and node not in boundary:
            assert node.op != "placeholder", f"{node} is needed and not given"
            copies[node] = subgraph.node_copy(node, lambda n: copies[n])
    subgraph.output(tuple(copies[node] for node in outputs))
    return numbers, GraphModule(graph, subgraph)
