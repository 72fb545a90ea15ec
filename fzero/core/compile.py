"""Compilation: trace a function to plain operators, compile the graph with Inductor, cache it by shapes and dtypes.

make_fx traces below torch.func: it executes the transforms and our own Functions, so the graph contains forward pass,
backward pass and collectives as operators. (Dynamo, in contrast, loses the backward pass of a Function under
torch.func.grad.) `jit` compiles a function; `vjp_pair` compiles a function and its vector-Jacobian product as two
graphs that share residuals, split by the min-cut partitioner.

Ref: torch.fx.experimental.proxy_tensor.make_fx; Zhao et al. 2023, "Recompute with min-cut", functorch.compile.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.autodiff import needs_grad, transforms
from fzero.core.cpp import trust_vector_flags
from fzero.core.device import FakeDevice, fake_device_of
from fzero.core.graph import chain_in_order, hold
from fzero.core.torch_private import disable_current_modes

R = TypeVar("R")
Flat = Callable[..., Sequence[Tensor]]  # positional tensors in, a sequence of tensors out


@functools.cache
def have_compiler() -> bool:
    """Whether Inductor can compile here: a C++ compiler for the CPU, or Triton for CUDA. Warns once if it cannot."""
    found = any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    if not found:
        warnings.warn(
            "no C++ compiler (g++ or clang++) is on PATH: blocks run uncompiled, slower and with the same numbers",
            stacklevel=2,
        )
    return found


def _signature(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    plan = fake_device_of(tensors[0]) if tensors else None
    return *((t.shape, t.stride(), t.dtype, t.device) for t in tensors), None if plan is None else (
        plan.target,
        plan.lower,
    )


def _fakes(tensors: Sequence[Tensor], mode: Any) -> list[Tensor]:
    # A new fake tensor for each input: the tracer would take two inputs that share one fake for the same input.
    with mode:
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]


def _trace(f: Callable[..., Any], primals: list[Tensor], tangents: list[Tensor], mode: Any) -> torch.fx.GraphModule:
    """The graph of plain functional operators of `f(primals, tangents)`."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from fzero.core.torch_private import select_decomp_table

    with mode:
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

        return make_fx(named, decomposition_table=select_decomp_table())(primals, tangents)


def _compile(
    graph: torch.fx.GraphModule, mode: Any, *, backward: bool = False
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """Compile a graph. The result takes a list of inputs and empties it, so that each input is freed after its last
    use.
    """
    from fzero.core.torch_private import TracingContext, compile_fx_inner, inductor_config, joint_graph_passes, tracing

    graph.graph.set_codegen(torch.fx.CodeGen())  # flat tensors in and out
    graph.recompile()
    ordered = chain_in_order(graph)
    joint_graph_passes(graph)
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    # Inductor's own random generator is never used: random keys are inputs of the graph.
    with tracing(TracingContext(mode)), inductor_config.patch(fallback_random=True):
        if not isinstance(mode, FakeDevice):
            trust_vector_flags()
            run = compile_fx_inner(graph, examples, is_backward=backward)
        elif mode.lower is not None:
            run = mode.lower(graph, examples, backward)
        else:
            run = lambda args: graph(*args)  # noqa: E731
    return (lambda args: run(args)[:-1]) if ordered else run  # without the last token


class Dropped(NamedTuple):
    """Placeholder for a residual that is a view of an input: the backward pass receives that input again and restores
    the view.
    """

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def of(self, inputs: Sequence[Tensor]) -> Tensor:
        """Restore the view from the input at `index`, which must have the strides of the dropped one."""
        given = inputs[self.index]
        return given.as_strided(self.size, self.stride, given.storage_offset() + self.offset)


class Residuals(list):
    """The tensors that a forward pass keeps for its backward pass; `needs` holds the indices of dropped inputs that it
    will need again.
    """

    def __init__(self, values: Sequence[Any], needs: set[int]):
        super().__init__(values)
        self.needs = needs


def _dropper(inputs: Sequence[Tensor], needs: set[int]) -> Callable[[Tensor], Any]:
    """Make a function that replaces a view of one of `inputs` by Dropped and adds that input's index to `needs`."""
    at = {t.untyped_storage()._cdata: (i, t.storage_offset(), t.dtype) for i, t in enumerate(inputs)}

    def drop(t: Tensor) -> Any:
        index, base, dtype = at.get(t.untyped_storage()._cdata, (None, 0, None))
        if index is None or t.dtype != dtype:
            return t.detach()  # detached, because an operator that saves its own result would keep itself alive
        needs.add(index)
        return Dropped(index, t.size(), t.stride(), t.storage_offset() - base)

    return drop


class VjpPair(NamedTuple):
    """A function of tensors and its vector-Jacobian product, as two functions that share residuals.

    `backward` uses residuals once: it empties the list and frees each tensor after its last use. With `drop=n` the
    residuals do not hold the first n inputs (each must be alone in its storage); if `residuals.needs` is not empty,
    pass those inputs to `backward` again.
    """

    primal: Callable[[Sequence[Tensor]], list[Tensor]]  # inputs -> outputs
    forward: Callable[..., tuple[list[Tensor], Residuals]]  # (inputs, drop=0) -> (outputs, residuals)
    backward: Callable[..., list[Tensor]]  # (residuals, cotangents, dropped inputs=()) -> gradients of inputs[skip:n]


def vjp_pair(f: Flat, n: int, *, compiled: bool, budget: float = 1.0, skip: int = 0) -> VjpPair:
    """Return the VjpPair of `f`, whose backward pass gives the gradients of inputs skip to n - 1.

    compiled: trace forward and backward pass together, split the graph, and compile both halves, once for each
    signature of the inputs. budget: the fraction of residuals that may be kept (see Remat); it also applies when
    nothing is compiled.
    """
    return _traced_pair(f, n, compiled, budget, skip) if compiled or budget < 1.0 else _eager_pair(f, n, skip)


class _Substitute(torch.autograd.Function):
    """Return `value` but send its gradient to `like`, a leaf without memory: autograd keeps the leaves of a graph alive
    as long as the graph.
    """

    @staticmethod
    def forward(ctx: Any, like: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _eager_pair(f: Flat, n: int, skip: int) -> VjpPair:
    def primal(inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(f(*inputs))

    def forward(inputs: Sequence[Tensor], drop: int = 0) -> tuple[list[Tensor], Residuals]:
        needs: set[int] = set()
        given: list[Sequence[Tensor]] = []
        keep = _dropper(inputs[:drop], needs)

        def take(kept: Any) -> Tensor:
            return kept.of(given[0]) if isinstance(kept, Dropped) else kept

        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(keep, take) if drop else contextlib.nullcontext(),
        ):
            leaves, args = [], []
            for i, t in enumerate(inputs):
                if skip <= i < n:
                    leaves.append((t.new_zeros(()).expand(t.shape) if i < drop else t.detach()).requires_grad_())
                    args.append(_Substitute.apply(leaves[-1], t) if i < drop else leaves[-1])
                else:
                    args.append(t.detach())
            out = f(*args)
        del args, t
        return [o.detach() for o in out], Residuals([out, leaves, given], needs)

    def backward(residuals: Residuals, cotangents: Sequence[Tensor], dropped: Sequence[Tensor] = ()) -> list[Tensor]:
        out, leaves, given = residuals
        residuals.clear()
        given.append(dropped)
        live = [i for i, o in enumerate(out) if o.requires_grad]
        if not live:
            return [torch.zeros_like(leaf) for leaf in leaves]
        outs, cots = ([values[i] for i in live] for values in (out, cotangents))
        return list(torch.autograd.grad(outs, leaves, cots, allow_unused=True, materialize_grads=True))

    return VjpPair(primal, forward, backward)


def _traced_pair(f: Flat, n: int, compiled: bool, budget: float, skip: int) -> VjpPair:
    programs: dict[Any, tuple[Callable, Callable, int]] = {}

    def forward(inputs: Sequence[Tensor], drop: int = 0) -> tuple[list[Tensor], Residuals]:
        signature = _signature(inputs)
        if signature not in programs:
            # A plan records the operators of the step; those that run only because the block is traced must not be
            # recorded.
            with disable_current_modes() if fake_device_of(inputs[0]) is not None else contextlib.nullcontext():
                programs[signature] = _split_programs(f, range(skip, n), inputs, compiled and have_compiler(), budget)
        run_fw, run_bw, num_outs = programs[signature]
        out, needs = run_fw(list(inputs)), set()
        keep = _dropper(inputs[:drop], needs)
        saved = [keep(t) if isinstance(t, Tensor) else t for t in out[num_outs:]]
        return list(out[:num_outs]), Residuals([run_bw, *saved], needs)

    def backward(residuals: Residuals, cotangents: Sequence[Tensor], dropped: Sequence[Tensor] = ()) -> list[Tensor]:
        run_bw, *saved = residuals
        residuals.clear()
        saved = [t.of(dropped) if isinstance(t, Dropped) else t for t in saved]
        saved.extend(c.contiguous() for c in cotangents)
        return list(run_bw(saved))

    return VjpPair(lambda inputs: forward(inputs)[0], forward, backward)


def _split_programs(
    f: Flat, wanted: range, inputs: Sequence[Tensor], compiled: bool, budget: float
) -> tuple[Callable[[list[Tensor]], Sequence[Tensor]], Callable[[list[Tensor]], Sequence[Tensor]], int]:
    """Trace `f` and its vjp, and split the graph into (forward, backward, number of outputs).

    forward returns outputs followed by residuals; backward takes residuals followed by cotangents.
    """
    from fzero.core.torch_private import FakeTensorMode, functorch_config, min_cut_partition

    plan = fake_device_of(inputs[0])
    mode = FakeTensorMode() if plan is None else FakeDevice(plan.target, lower=plan.lower, tracing=True)
    with mode:
        outs = f(*_fakes(inputs, mode))
        cotangents = [torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in outs]
    primals = _fakes(inputs, mode)

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
        before, after = primals[: wanted.start], primals[wanted.stop :]
        some = primals[wanted.start : wanted.stop]
        out, vjp, *_ = torch.func.vjp(lambda *some: tuple(f(*before, *some, *after)), *some)
        # A view marks in the graph where the backward pass begins.
        return [*out, *vjp(tuple(t.view_as(t) for t in tangents))]

    graph = _trace(joint, primals, cotangents, mode)
    hold(graph)
    # No common subexpressions (cse): merging a deliberate recomputation (scores, activations) with the forward pass
    # would keep its result.
    with functorch_config.patch(activation_memory_budget=budget, cse=False, ban_recompute_materialized_backward=False):
        graphs = min_cut_partition(graph, (primals, cotangents), num_fwd_outputs=len(outs))
    if compiled:
        forward, backward = (_compile(g, mode, backward=i == 1) for i, g in enumerate(graphs))
    else:
        forward, backward = (lambda args, g=g: g(*args) for g in graphs)
    return forward, backward, len(outs)


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
        at = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        tensors = [flat[i] for i in at]
        if transforms() or needs_grad(*tensors) or not have_compiler():
            return f(*args)
        # The type too, because 1, 1.0 and True are equal.
        static = tuple((i, type(leaf), leaf) for i, leaf in enumerate(flat) if not isinstance(leaf, Tensor))
        signature = (treedef, static, _signature(tensors))
        if signature not in cache:
            cache[signature] = _compile_whole(f, flat, at, treedef)
        run, out_def = cache[signature]
        return pytree.unflatten(list(run(tensors)), out_def)

    return jit_f


def _compile_whole(f: Callable[..., Any], flat: list[Any], at: list[int], treedef: Any) -> tuple[Callable, Any]:
    from fzero.core.torch_private import FakeTensorMode

    out_def: list[Any] = []

    def run(tensors: list[Tensor], _: list[Tensor]) -> list[Tensor]:
        full = list(flat)
        for i, tensor in zip(at, tensors):
            full[i] = tensor
        out, out_treedef = pytree.flatten(f(*pytree.unflatten(full, treedef)))
        out_def[:] = [out_treedef]
        return out

    mode = FakeTensorMode()
    graph = _trace(run, _fakes([flat[i] for i in at], mode), [], mode)
    return _compile(graph, mode), out_def[0]
