"""Compilation: trace below functorch to plain operators, compile the graph with Inductor, cache by shapes and dtypes.

Tracing executes torch.func transforms and our own Functions, so the graph holds forward, backward and collectives as operators; nothing
is dropped, as Dynamo drops the backward of a Function under torch.func.grad. `jit` compiles a function; `vjp_pair` compiles a function
and its vector-Jacobian product as two graphs that share residuals, split by the min-cut partitioner.

Ref: torch.fx.experimental.proxy_tensor.make_fx; Zhao et al. 2023, "Recompute with min-cut", functorch.compile.
"""

from __future__ import annotations

import functools
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import pytree
from fzero.autodiff import needs_grad, transforms

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
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)


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


def _compile(graph: torch.fx.GraphModule, mode: Any, *, backward: bool = False) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """The compiled graph, called with a list of inputs which it empties, so that they are freed when last used."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    graph.graph.set_codegen(torch.fx.graph.CodeGen())  # flat tensors in and out
    graph.recompile()
    joint_graph_passes(graph)
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    # No generator of Inductor's is ever used: keys are inputs.
    with tracing(TracingContext(mode)), config.patch(fallback_random=True):
        return compile_fx_inner(graph, examples, is_backward=backward)


class VjpPair(NamedTuple):
    """A function of tensors and its vector-Jacobian product, sharing residuals.

    Residuals are for `backward` alone, once: it empties the list and frees each when last used.
    """

    primal: Callable[[Sequence[Tensor]], list[Tensor]]  # inputs -> outputs
    forward: Callable[[Sequence[Tensor]], tuple[list[Tensor], list[Any]]]  # inputs -> (outputs, residuals)
    backward: Callable[[list[Any], Sequence[Tensor]], list[Tensor]]  # (residuals, cotangents) -> gradients of the first n inputs


def vjp_pair(f: Flat, n: int, *, compiled: bool, budget: float = 1.0) -> VjpPair:
    """The pair of `f` for the gradients of its first `n` inputs.

    compiled: trace forward and backward jointly, split and compile them, once for each signature of the inputs.
    budget: fraction of the residuals that may be kept (see Remat), also where nothing is compiled.
    """
    return _traced_pair(f, n, compiled, budget) if compiled or budget < 1.0 else _eager_pair(f, n)


def _eager_pair(f: Flat, n: int) -> VjpPair:
    def primal(inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(f(*inputs))

    def forward(inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(i < n) for i, t in enumerate(inputs)]
            out = f(*leaves)
        return [o.detach() for o in out], [out, leaves[:n]]

    def backward(residuals: list[Any], cotangents: Sequence[Tensor]) -> list[Tensor]:
        out, leaves = residuals
        residuals.clear()
        live = [i for i, o in enumerate(out) if o.requires_grad]
        if not live:
            return [torch.zeros_like(leaf) for leaf in leaves]
        outs, cots = ([values[i] for i in live] for values in (out, cotangents))
        return list(torch.autograd.grad(outs, leaves, cots, allow_unused=True, materialize_grads=True))

    return VjpPair(primal, forward, backward)


def _traced_pair(f: Flat, n: int, compiled: bool, budget: float) -> VjpPair:
    programs: dict[Any, tuple[Callable, Callable, int]] = {}

    def forward(inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
        signature = _signature(inputs)
        if signature not in programs:
            programs[signature] = _split_programs(f, n, inputs, compiled and have_compiler(), budget)
        run_fw, run_bw, num_outs = programs[signature]
        out = run_fw(list(inputs))
        return list(out[:num_outs]), [run_bw, *out[num_outs:]]

    def backward(residuals: list[Any], cotangents: Sequence[Tensor]) -> list[Tensor]:
        run_bw, *saved = residuals
        residuals.clear()
        saved.extend(c.contiguous() for c in cotangents)
        return list(run_bw(saved))

    return VjpPair(lambda inputs: forward(inputs)[0], forward, backward)


def _split_programs(
    f: Flat, n: int, inputs: Sequence[Tensor], compiled: bool, budget: float
) -> tuple[Callable[[list[Tensor]], Sequence[Tensor]], Callable[[list[Tensor]], Sequence[Tensor]], int]:
    """(forward, backward, number of outputs): forward gives outputs and residuals, backward takes residuals and cotangents."""
    from torch._functorch import config as functorch_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    with mode:
        outs = f(*_fakes(inputs, mode))
        cotangents = [torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in outs]
    primals = _fakes(inputs, mode)

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
        out, vjp = torch.func.vjp(lambda *first: tuple(f(*first, *primals[n:])), *primals[:n])
        return [*out, *vjp(tuple(tangents))]

    graph = _trace(joint, primals, cotangents, mode)
    # Merged with the forward pass, what a backward pass recomputes on purpose (scores, activations) would be kept instead.
    with functorch_config.patch(activation_memory_budget=budget, cse=False, ban_recompute_materialized_backward=False):
        graphs = min_cut_rematerialization_partition(graph, (primals, cotangents), num_fwd_outputs=len(outs))
    if compiled:
        forward, backward = (_compile(g, mode, backward=i == 1) for i, g in enumerate(graphs))
    else:
        forward, backward = (lambda args, g=g: g(*args) for g in graphs)
    return forward, backward, len(outs)


def jit(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` (trees in, trees out; pure) compiled for the shapes, strides and dtypes of its tensors, once for each.

    Leaves that are not tensors are static: they must be hashable, and another value compiles again. Outermost, as in JAX: under a
    torch.func transform, or where its result is to be differentiated, it is `f` itself.
    Raises whatever tracing raises where `f` branches on a tensor's value.
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
