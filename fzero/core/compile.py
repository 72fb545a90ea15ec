"""Compilation: trace a function to plain operators, compile the graph with Inductor, cache it by shapes and dtypes.

make_fx traces below torch.func, so the graph has forward pass, backward pass and collectives as operators. (Dynamo
loses the backward pass of a Function under torch.func.grad.)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fzero import core
from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.autodiff import needs_grad, transforms, unfollowed
from fzero.core.compile_cache import have_compiler, package_digest, vector_instructions
from fzero.core.device import FakeDevice, fake_device_of
from fzero.core.graph_passes import chain_in_order, has_equal_sums, keeps_order
from fzero.core.program_cache import batch_compilation

R = TypeVar("R")
Run = Callable[[list[Tensor]], Sequence[Tensor]]  # a compiled graph; it empties its list


def signature_of(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The properties of inputs that a program is compiled for: shapes, strides, dtypes, devices."""
    plan = fake_device_of(tensors[0]) if tensors else None
    return *((t.shape, t.stride(), t.dtype, t.device) for t in tensors), None if plan is None else (
        plan.target,
        plan.lower,
    )


def fakes_of(tensors: Sequence[Tensor], mode: Any) -> list[Tensor]:
    """Tensors of `mode`, without memory, that look like these."""
    # A new fake tensor for each input: the tracer would take two inputs that share one fake for the same input.
    with mode:
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]


def fake_mode() -> Any:
    """A mode for tracing static shapes; without a ShapeEnv, Inductor would not look into its cache of graphs."""
    from fzero.core.torch_private import FakeTensorMode, ShapeEnv

    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(shape_env=shapes, static_shapes=True)


def trace(
    f: Callable[..., Any], primals: list[Tensor], tangents: list[Tensor], mode: Any, compiled: bool = True
) -> torch.fx.GraphModule:
    """The graph of plain functional operators of `f(primals, tangents)`; compiled: of those that Inductor knows."""
    from torch.fx.experimental.proxy_tensor import make_fx

    table: dict[Any, Any] = {}
    if compiled:
        from fzero.core.torch_private import select_decomp_table

        table = select_decomp_table()
    with mode, core.random_interception.no_draws():
        try:
            graph = make_fx(f)(primals, tangents)
        except AssertionError as error:
            if "convert all Tensors to FakeTensors" not in str(error):
                raise
            raise ValueError("the function to be compiled closes over a tensor; pass it as an argument") from error
        # A second pass, because functionalize cannot trace through a Function; the first pass has executed all of them.
        functional = torch.func.functionalize(graph, remove="mutations")

        # The partitioner knows inputs from cotangents by these two names.
        def named(primals: list[Tensor], tangents: list[Tensor]) -> Any:
            return functional(primals, tangents)

        return make_fx(named, decomposition_table=table)(primals, tangents)


@contextlib.contextmanager
def detached_modes(mode: Any) -> Iterator[None]:
    """A context outside of the modes around the caller, for a compiler's own programs; mode: the trace's."""
    from fzero.core.torch_private import DisableTorchFunction, disable_current_modes

    modes = contextlib.nullcontext() if isinstance(mode, FakeDevice) else disable_current_modes()
    with modes, DisableTorchFunction():
        yield


def compile_graph(graph: torch.fx.GraphModule, mode: Any, *, backward: bool = False) -> Run:
    """Compile a graph; the result takes a list of inputs and empties it, so that each is freed after use."""
    from torch.compiler import config as compiler_config

    from fzero.core.torch_private import (
        TracingContext,
        compile_fx_inner,
        inductor_config,
        joint_graph_passes,
        tracing,
    )

    graph.graph.set_codegen(torch.fx.CodeGen())  # flat tensors in and out
    graph.recompile()
    ordered = chain_in_order(graph)
    with detached_modes(mode):
        joint_graph_passes(graph)
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    # Inductor's own random generator is never used: random keys are inputs of the graph.
    options: dict[str, bool | int] = {"fallback_random": True}
    if keeps_order(graph):
        options["reorder_for_peak_memory"] = False
    if has_equal_sums(graph):  # which Inductor, if it makes one loop of them, declares twice in 16 bits
        options["cpp.max_horizontal_fusion_size"] = 1
    with detached_modes(mode), tracing(TracingContext(mode)), inductor_config.patch(options):
        if not isinstance(mode, FakeDevice):
            # torch makes `patch` when it imports the module, which a type checker does not see.
            with compiler_config.patch(cache_key_tag=_cache_tag()):  # pyright: ignore[reportAttributeAccessIssue]
                run = compile_fx_inner(graph, examples, is_backward=backward)
        elif mode.lower is not None:
            run = mode.lower(graph, examples, backward)
        else:
            run = lambda args: graph(*args)  # noqa: E731
    return (lambda args: run(args)[:-1]) if ordered else run  # without the last token


def _cache_tag() -> str:
    """The settings and versions that a compiled graph depends on."""
    # Inductor's cache of graphs asks for more than its own list: the vector instructions, as another machine may share
    # the folder; the threads, which share out sums; fzero's own source, as a graph names its operators only.
    return f"{package_digest()} {vector_instructions()} {torch.get_num_threads()}"


# Who is to be told before this process compiles what no earlier one has.
_COMPILE_CALLBACKS: list[Callable[[], None]] = []


@contextlib.contextmanager
def on_first_compile(callback: Callable[[], None]) -> Iterator[None]:
    """A context in which `callback` is called once, before the first blocks that are new on this machine compile."""
    _COMPILE_CALLBACKS.append(callback)
    try:
        yield
    finally:
        _COMPILE_CALLBACKS[:] = [listener for listener in _COMPILE_CALLBACKS if listener is not callback]


def notify_compiling() -> None:
    """Tell those that wait in `on_first_compile`."""
    while _COMPILE_CALLBACKS:
        _COMPILE_CALLBACKS.pop()()


@checked()
def jit(f: Callable[..., R]) -> Callable[..., R]:
    """Return a compiled version of `f`, a pure function of trees of tensors that returns a tree.

    The first call with tensors of new shapes, strides or dtypes compiles; later ones reuse the result. Leaves that are
    not tensors are static: they must be hashable, and another value compiles again. Use it outermost, as in JAX: under
    a torch.func transform, or if an argument requires a gradient, the call runs `f` itself, uncompiled. Without a C++
    compiler it always does, after one warning.

    Raises ValueError if `f` closes over a tensor, and whatever tracing raises if `f` branches on a tensor's value.

    >>> f = jit(lambda x: {"y": 2.0 * x + 1.0})
    >>> f(torch.arange(3.0))
    {'y': tensor([1., 3., 5.])}
    """
    cache: dict[Any, tuple[Callable, Any]] = {}

    @functools.wraps(f)
    def jit_f(*args: Any) -> Any:
        flat, treedef = pytree.flatten(args)
        positions = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        tensors = [flat[i] for i in positions]
        if transforms() or needs_grad(*tensors) or not have_compiler():
            return f(*args)
        # The type too, because 1, 1.0 and True are equal.
        static = tuple((i, type(leaf), leaf) for i, leaf in enumerate(flat) if not isinstance(leaf, Tensor))
        signature = (treedef, static, signature_of(tensors))
        if signature not in cache:
            cache[signature] = _compile_function(f, flat, positions, treedef)
        run, out_def = cache[signature]
        return pytree.unflatten(list(run(tensors)), out_def)

    return jit_f


def _compile_function(
    f: Callable[..., Any], flat: list[Any], positions: list[int], treedef: Any
) -> tuple[Callable, Any]:
    out_def: list[Any] = []

    def run(tensors: list[Tensor], _: list[Tensor]) -> list[Tensor]:
        full = list(flat)
        for i, tensor in zip(positions, tensors):
            full[i] = tensor
        out, out_treedef = pytree.flatten(f(*pytree.unflatten(full, treedef)))
        out_def[:] = [out_treedef]
        return out

    mode = fake_mode()
    graph = trace(run, fakes_of([flat[i] for i in positions], mode), [], mode)
    with batch_compilation():
        return unfollowed(compile_graph(graph, mode)), out_def[0]
