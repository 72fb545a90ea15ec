"""Compilation: trace below functorch to plain operators, compile the graph with Inductor, cache by shapes and dtypes.

Tracing executes torch.func transforms and our own Functions, so the graph holds forward, backward and collectives as
operators; nothing is dropped, as Dynamo drops the backward of a Function under torch.func.grad. `jit` compiles a
function; `vjp_pair` compiles a function and its vector-Jacobian product as two graphs that share residuals, split by
the min-cut partitioner.

Ref: torch.fx.experimental.proxy_tensor.make_fx; Zhao et al. 2023, "Recompute with min-cut", functorch.compile.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fzero.core import pytree
from fzero.core.autodiff import needs_grad, transforms
from fzero.core.device import FakeDevice, fake_device_of
from fzero.core.fake_inductor import lowered
from fzero.core.graph import chain_in_order, hold

Flat = Callable[..., Sequence[Tensor]]  # positional tensors in, a sequence of tensors out


@functools.cache
def have_compiler() -> bool:
    """Whether Inductor can compile here: a C++ compiler for the CPU, or Triton for CUDA. Warns once where it cannot."""
    found = any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    if not found:
        warnings.warn(
            "no C++ compiler (g++ or clang++) is on PATH: blocks run uncompiled, slower and with the same numbers",
            stacklevel=2,
        )
    return found


def _signature(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    plan = fake_device_of(tensors[0]) if tensors else None
    return *((t.shape, t.stride(), t.dtype, t.device) for t in tensors), None if plan is None else plan.target


def _fakes(tensors: Sequence[Tensor], mode: Any) -> list[Tensor]:
    # A new fake for each input: two that share one fake would be taken for one and the same input while tracing.
    with mode:
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]


def _trace(f: Callable[..., Any], primals: list[Tensor], tangents: list[Tensor], mode: Any) -> torch.fx.GraphModule:
    """The graph of plain functional operators of `f(primals, tangents)`."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode:
        try:
            graph = make_fx(f)(primals, tangents)
        except AssertionError as error:
            if "convert all Tensors to FakeTensors" not in str(error):
                raise
            raise ValueError("the function to be compiled closes over a tensor; pass it as an argument") from error
        # In a second pass, as functionalize cannot pass through a Function, and the first has executed them all.
        functional = torch.func.functionalize(graph, remove="mutations")

        # The partitioner knows inputs from cotangents by these two names.
        def named(primals: list[Tensor], tangents: list[Tensor]) -> Any:
            return functional(primals, tangents)

        return make_fx(named, decomposition_table=select_decomp_table())(primals, tangents)


def _compile(
    graph: torch.fx.GraphModule, mode: Any, *, backward: bool = False
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """The compiled graph, called with a list of inputs which it empties, so that they are freed when last used."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    graph.graph.set_codegen(torch.fx.graph.CodeGen())  # flat tensors in and out
    graph.recompile()
    ordered = chain_in_order(graph)
    joint_graph_passes(graph)
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    # No generator of Inductor's is ever used: keys are inputs.
    with tracing(TracingContext(mode)), config.patch(fallback_random=True):
        planned = isinstance(mode, FakeDevice)
        run = lowered(graph, examples, backward) if planned else compile_fx_inner(graph, examples, is_backward=backward)
    return (lambda args: run(args)[:-1]) if ordered else run  # without the last token


class Dropped(NamedTuple):
    """In place of a residual: a view of an input that the backward pass is given again."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, inputs: Sequence[Tensor]) -> Tensor:
        """The view of the input given now, which has the strides of the one dropped."""
        given = inputs[self.index]
        return given.as_strided(self.size, self.stride, given.storage_offset() + self.offset)


class Residuals(list):
    """What a forward pass keeps for the backward pass, and the numbers of the dropped inputs that the latter needs
    again.
    """

    def __init__(self, values: Sequence[Any], needs: set[int]):
        super().__init__(values)
        self.needs = needs


def _dropper(inputs: Sequence[Tensor], needs: set[int]) -> Callable[[Tensor], Any]:
    """A function that replaces a tensor in the storage of one of `inputs` by Dropped, and notes its number in
    `needs`.
    """
    at = {t.untyped_storage()._cdata: (i, t.storage_offset(), t.dtype) for i, t in enumerate(inputs)}

    def drop(t: Tensor) -> Any:
        index, base, dtype = at.get(t.untyped_storage()._cdata, (None, 0, None))
        if index is None or t.dtype != dtype:
            return t.detach()  # an operator that saved its own result would hold itself for ever
        needs.add(index)
        return Dropped(index, t.size(), t.stride(), t.storage_offset() - base)

    return drop


class VjpPair(NamedTuple):
    """A function of tensors and its vector-Jacobian product, sharing residuals.

    Residuals are for `backward` alone, once: it empties the list and frees each when last used. With `drop` they do not
    hold the first `drop` inputs, each alone in its storage: where `residuals.needs` is not empty, `backward` must be
    given those inputs again.
    """

    primal: Callable[[Sequence[Tensor]], list[Tensor]]  # inputs -> outputs
    forward: Callable[..., tuple[list[Tensor], Residuals]]  # (inputs, drop=0) -> (outputs, residuals)
    backward: Callable[..., list[Tensor]]  # (residuals, cotangents, dropped inputs=()) -> gradients of inputs[skip:n]


def vjp_pair(f: Flat, n: int, *, compiled: bool, budget: float = 1.0, skip: int = 0) -> VjpPair:
    """The pair of `f` for the gradients of its first `n` inputs, without the first `skip` of those.

    compiled: trace forward and backward jointly, split and compile them, once for each signature of the inputs.
    budget: fraction of the residuals that may be kept (see Remat), also where nothing is compiled.
    """
    return _traced_pair(f, n, compiled, budget, skip) if compiled or budget < 1.0 else _eager_pair(f, n, skip)


class _Substitute(torch.autograd.Function):
    """A tensor that takes part in a graph in place of `like`, which has no memory: a leaf of a graph is held as long as
    the graph.
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
            # What a plan counts is the program, and not that it is traced.
            with _disable_current_modes() if fake_device_of(inputs[0]) is not None else contextlib.nullcontext():
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
    """(forward, backward, number of outputs): forward gives outputs and residuals, backward takes residuals and
    cotangents.
    """
    from torch._functorch import config as functorch_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._subclasses.fake_tensor import FakeTensorMode

    plan = fake_device_of(inputs[0])
    mode = FakeTensorMode() if plan is None else FakeDevice(plan.target, tracing=True)
    with mode:
        outs = f(*_fakes(inputs, mode))
        cotangents = [torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in outs]
    primals = _fakes(inputs, mode)

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
        before, behind = primals[: wanted.start], primals[wanted.stop :]
        out, vjp = torch.func.vjp(lambda *some: tuple(f(*before, *some, *behind)), *primals[wanted.start : wanted.stop])
        # Through a view, so that the graph shows where the backward pass begins.
        return [*out, *vjp(tuple(t.view_as(t) for t in tangents))]

    graph = _trace(joint, primals, cotangents, mode)
    hold(graph)
    # Merged with the forward pass, what a backward pass recomputes on purpose (scores, activations) would be kept
    # instead.
    with functorch_config.patch(activation_memory_budget=budget, cse=False, ban_recompute_materialized_backward=False):
        graphs = min_cut_rematerialization_partition(graph, (primals, cotangents), num_fwd_outputs=len(outs))
    if compiled:
        forward, backward = (_compile(g, mode, backward=i == 1) for i, g in enumerate(graphs))
    else:
        forward, backward = (lambda args, g=g: g(*args) for g in graphs)
    return forward, backward, len(outs)


def jit(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` (trees in, trees out; pure) compiled for the shapes, strides and dtypes of its tensors, once for each.

    Leaves that are not tensors are static: they must be hashable, and another value compiles again. Outermost, as in
    JAX: under a torch.func transform, or where its result is to be differentiated, it is `f` itself. Raises whatever
    tracing raises where `f` branches on a tensor's value.
    """
    cache: dict[Any, tuple[Callable, Any]] = {}

    @functools.wraps(f)
    def jit_f(*args: Any) -> Any:
        flat, treedef = pytree.flatten(args)
        at = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        tensors = [flat[i] for i in at]
        if transforms() or needs_grad(*tensors) or not have_compiler():
            return f(*args)
        # With its type, as 1, 1.0 and True are equal.
        static = tuple((i, type(leaf), leaf) for i, leaf in enumerate(flat) if not isinstance(leaf, Tensor))
        signature = (treedef, static, _signature(tensors))
        if signature not in cache:
            cache[signature] = _compile_whole(f, flat, at, treedef)
        run, out_def = cache[signature]
        return pytree.unflatten(list(run(tensors)), out_def)

    return jit_f


def _compile_whole(f: Callable[..., Any], flat: list[Any], at: list[int], treedef: Any) -> tuple[Callable, Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode

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
