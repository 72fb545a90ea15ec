"""A function of tensors and its vector-Jacobian product as two functions that share residuals, eager or compiled.

A compiled pair is traced as one graph, which the min-cut partitioner splits (Zhao et al. 2023, "Recompute with
min-cut", functorch.compile). A backward pass may be cut in two: gradients by inputs, which somebody waits for, and
gradients by weights; no product is in both, and a minimal cut decides what rests between them.

Ref: Qi et al. 2024, "Zero bubble pipeline parallelism", arXiv:2401.10241, section 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.fx import Graph, GraphModule, Node

from fzero import core
from fzero.core import compile_cache, form_observer
from fzero.core.autodiff import dense, unfollowed
from fzero.core.compile import Run, compile_graph, fake_mode, fakes_of, notify_compiling, signature_of, trace
from fzero.core.compile_cache import have_compiler
from fzero.core.device import FakeDevice, fake_device_of
from fzero.core.torch_private import disable_current_modes, run_autograd


def cut_backward(backward: GraphModule, weights: int) -> tuple[GraphModule, GraphModule]:
    """Cut a backward graph, whose first `weights` results are gradients by weights, into (by inputs, by weights)."""
    from torch.utils.checkpoint import CheckpointPolicy

    from fzero.core.torch_private import default_op_list, functorch_config, min_cut_partition

    graph, inputs = _reordered(backward, weights)
    first = _ancestors(graph, inputs)
    is_cheap = default_op_list().is_recomputable
    for node in graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key not in ("partitioner_tag", "recompute")}
        if node.op != "call_function":
            continue
        ordered = node.target in core.ORDERED
        if ordered:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if node in first:
            if ordered:
                node.meta["partitioner_tag"] = "must_be_in_forward"
        elif ordered or not is_cheap(node):
            # Else its result would be kept, which is often smaller than its operands. A cheap sum may be made early.
            node.meta["partitioner_tag"] = "must_be_in_backward"
    with functorch_config.patch(activation_memory_budget=1.0, cse=False, ban_recompute_materialized_backward=False):
        return min_cut_partition(GraphModule(backward, graph), (), num_fwd_outputs=inputs)


def _reordered(backward: GraphModule, weights: int) -> tuple[Graph, int]:
    """(a copy of a backward graph that gives the gradients by inputs first, their number)."""
    # The partitioner takes every input whose name has no "tangents" for one of a forward pass.
    graph, copies = Graph(), dict[Node, Node]()
    for node in backward.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(f"primals_{len(copies) + 1}")
            copies[node].meta = dict(node.meta)
        elif node.op != "output":
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    (grads,) = backward.graph.output_node().args
    assert isinstance(grads, (list, tuple))
    outputs = [copies[grad] if isinstance(grad, Node) else grad for grad in grads]
    graph.output((*outputs[weights:], *outputs[:weights]))
    return graph, len(outputs) - weights


def _ancestors(graph: Graph, inputs: int) -> set[Node]:
    """The nodes that the first `inputs` results of a graph depend on."""
    (grads,) = graph.output_node().args
    assert isinstance(grads, (list, tuple))
    ancestors, pending = set[Node](), [grad for grad in grads[:inputs] if isinstance(grad, Node)]
    while pending:
        node = pending.pop()
        if node not in ancestors:
            ancestors.add(node)
            pending.extend(node.all_input_nodes)
    return ancestors


LEAST_BUDGET = 1e-9  # with 0 the partitioner recomputes what must be saved too
Flat = Callable[..., Sequence[Tensor]]  # positional tensors in, a sequence of tensors out


class Dropped(NamedTuple):
    """Placeholder for a residual that is a view of an input, which the backward pass receives again."""

    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt

    def restore(self, inputs: Sequence[Tensor]) -> Tensor:
        """Restore the view from the input at `index`, which must have the strides of the dropped one."""
        base = inputs[self.index]
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


class Residuals(list):
    """The tensors that a forward pass keeps for its backward pass; `needs`: indices of dropped inputs."""

    def __init__(self, values: Sequence[Any], needs: set[int]):
        super().__init__(values)
        self.needs = needs


def _dropper(inputs: Sequence[Tensor], needs: set[int]) -> Callable[[Tensor], Any]:
    """A function that replaces a view of one of `inputs` by Dropped, and notes it in `needs`."""
    storages = {t.untyped_storage()._cdata: (i, t.storage_offset(), t.dtype) for i, t in enumerate(inputs)}

    def drop(t: Tensor) -> Any:
        index, base, dtype = storages.get(t.untyped_storage()._cdata, (None, 0, None))
        if index is None or t.dtype != dtype:
            return t.detach()  # detached, because an operator that saves its own result would keep itself alive
        needs.add(index)
        return Dropped(index, t.size(), t.stride(), t.storage_offset() - base)

    return drop


class WeightResiduals(list):
    """What the gradients by weights need, once those by inputs are known: the program, and its tensors."""


class VjpPair(NamedTuple):
    """A function of tensors and its vector-Jacobian product, as two functions that share residuals."""

    # inputs, or tensors that look like them -> None: makes the programs for such inputs, if the pair has any.
    prepare: Callable[[Sequence[Tensor]], None]
    primal: Callable[[Sequence[Tensor]], list[Tensor]]  # inputs -> outputs
    forward: Callable[..., tuple[list[Tensor], Residuals]]  # (inputs, drop=0) -> (outputs, residuals)
    # (residuals, cotangents, dropped inputs=()) -> gradients of inputs[skip:n]; None for integers
    backward: Callable[..., list[Any]]
    # (residuals, cotangents, dropped inputs=()) -> (gradients of inputs[k:n], what is owed)
    backward_inputs: Callable[..., tuple[list[Any], WeightResiduals]] | None = None
    # what is owed, which is emptied -> of inputs[skip:k]
    backward_weights: Callable[[WeightResiduals], list[Any]] | None = None


def vjp_pair(
    f: Flat, n: int, *, compiled: bool, budget: float = 1.0, skip: int = 0, split: int = 0, identity: Any = None
) -> VjpPair:
    """The VjpPair of `f`, whose backward pass gives the gradients of inputs skip to n - 1."""
    if compiled or budget < 1.0 or split:
        return _traced_pair(f, n, compiled, budget, skip, split, identity)
    return _eager_pair(f, n, skip)


class _Substitute(torch.autograd.Function):
    """`value`, but with its gradient sent to `like`, a leaf without memory, as autograd keeps leaves alive."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _end(out: Tensor) -> Any:
    """What autograd goes back from, which does not hold the memory of a result."""
    return out if out.is_leaf and out.requires_grad else get_gradient_edge(out) if out.requires_grad else None


def _eager_pair(f: Flat, n: int, skip: int) -> VjpPair:
    def primal(inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(f(*inputs))

    def forward(inputs: Sequence[Tensor], drop: int = 0) -> tuple[list[Tensor], Residuals]:
        needs: set[int] = set()
        dropped_inputs: list[Sequence[Tensor]] = []
        pack = _dropper(inputs[:drop], needs)

        def unpack(residual: Any) -> Tensor:
            return residual.restore(dropped_inputs[0]) if isinstance(residual, Dropped) else residual

        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, unpack) if drop else contextlib.nullcontext(),
        ):
            leaves, args = [], []
            for i, t in enumerate(inputs):
                if skip <= i < n and not t.is_floating_point():
                    leaves.append(None)
                    args.append(t)
                elif skip <= i < n:
                    leaves.append((t.new_zeros(()).expand(t.shape) if i < drop else t.detach()).requires_grad_())
                    args.append(_Substitute.apply(leaves[-1], t) if i < drop else leaves[-1])
                else:
                    args.append(t.detach())
            out = f(*args)
        del args, t
        return [o.detach() for o in out], Residuals([[_end(o) for o in out], leaves, dropped_inputs], needs)

    def backward(residuals: Residuals, cotangents: Sequence[Tensor], dropped: Sequence[Tensor] = ()) -> list[Any]:
        out, leaves, dropped_inputs = residuals
        residuals.clear()
        dropped_inputs.append(dropped)
        live = [i for i, end in enumerate(out) if end is not None]
        if not live:
            return [leaf if leaf is None else torch.zeros_like(leaf) for leaf in leaves]
        outs, cots = ([values[i] for i in live] for values in (out, cotangents))
        grad_leaves = [leaf for leaf in leaves if leaf is not None]
        # As torch.autograd.grad, without its check of symbolic shapes, for which it imports sympy.
        grads = run_autograd(tuple(outs), tuple(cots), False, False, tuple(grad_leaves), True, accumulate_grad=False)
        full_grads = iter(
            [torch.zeros_like(leaf) if grad is None else dense(grad) for grad, leaf in zip(grads, grad_leaves)]
        )
        return [leaf if leaf is None else next(full_grads) for leaf in leaves]

    return VjpPair(lambda inputs: None, primal, forward, backward)


def _traced_pair(f: Flat, n: int, compiled: bool, budget: float, skip: int, split: int, identity: Any) -> VjpPair:
    programs: dict[Any, tuple[Run, Sequence[Callable[..., Any]], int]] = {}

    def primal(inputs: Sequence[Tensor]) -> list[Tensor]:
        if compiled or not split:
            return forward(inputs)[0]
        with torch.no_grad():
            return list(f(*inputs))

    def programs_for(inputs: Sequence[Tensor]) -> tuple[Run, Sequence[Callable[..., Any]], int]:
        """The programs for such inputs."""
        signature = signature_of(inputs)
        if signature not in programs:
            # A plan records the operators of the step; those that run only because the block is traced must not be
            # recorded.
            with disable_current_modes() if fake_device_of(inputs[0]) is not None else contextlib.nullcontext():
                grad_indices = [i for i in range(skip, n) if inputs[i].is_floating_point()]
                runs, num_outs = _programs(
                    f, grad_indices, inputs, compiled and have_compiler(), split, budget, identity
                )
                runs = [unfollowed(run) for run in runs] if compiled else runs
                starts = (split, skip) if split else (skip,)  # of what each backward program gives
                ends = (n, split) if split else (n,)
                gaps = [sorted({*range(start, end)} - {*grad_indices}) for start, end in zip(starts, ends)]
                run_bw = [
                    _with_none(run, [i - start for i in none]) for run, none, start in zip(runs[1:], gaps, starts)
                ]
                programs[signature] = runs[0], run_bw, num_outs
        return programs[signature]

    def prepare(inputs: Sequence[Tensor]) -> None:
        programs_for(inputs)

    def forward(inputs: Sequence[Tensor], drop: int = 0) -> tuple[list[Tensor], Residuals]:
        run_fw, run_bw, num_outs = programs_for(inputs)
        out, needs = run_fw(list(inputs)), set()
        pack = _dropper(inputs[:drop], needs)
        saved = [pack(t) if isinstance(t, Tensor) else t for t in out[num_outs:]]
        return list(out[:num_outs]), Residuals([run_bw, *saved], needs)

    def unpack_residuals(
        residuals: Residuals, cotangents: Sequence[Tensor], dropped: Sequence[Tensor]
    ) -> tuple[Any, list[Tensor]]:
        """The backward programs, and the tensors that the first one takes; empties the residuals."""
        runs, *saved = residuals
        residuals.clear()
        return runs, [
            *(t.restore(dropped) if isinstance(t, Dropped) else t for t in saved),
            *(c.contiguous() for c in cotangents),
        ]

    def backward(residuals: Residuals, cotangents: Sequence[Tensor], dropped: Sequence[Tensor] = ()) -> list[Tensor]:
        runs, saved = unpack_residuals(residuals, cotangents, dropped)
        return list(runs[0](saved))

    def backward_inputs(
        residuals: Residuals, cotangents: Sequence[Tensor], dropped: Sequence[Tensor] = ()
    ) -> tuple[list[Any], WeightResiduals]:
        runs, saved = unpack_residuals(residuals, cotangents, dropped)
        out = runs[0](saved)
        theirs = {t.untyped_storage()._cdata for t in dropped}
        weight_inputs = [t.clone() if t.untyped_storage()._cdata in theirs else t for t in out[n - split :]]
        return list(out[: n - split]), WeightResiduals([runs[1], *weight_inputs])

    def backward_weights(weight_residuals: WeightResiduals) -> list[Any]:
        run, *weight_inputs = weight_residuals
        weight_residuals.clear()
        return list(run(weight_inputs))

    def full_backward(residuals: Residuals, cotangents: Sequence[Tensor], dropped: Sequence[Tensor] = ()) -> list[Any]:
        grads, weight_residuals = backward_inputs(residuals, cotangents, dropped)
        return [*backward_weights(weight_residuals), *grads]

    return (
        VjpPair(prepare, primal, forward, full_backward, backward_inputs, backward_weights)
        if split
        else VjpPair(prepare, primal, forward, backward)
    )


def _programs(
    f: Flat, grad_indices: list[int], inputs: Sequence[Tensor], compiled: bool, split: int, budget: float, identity: Any
) -> tuple[Sequence[Run], int]:
    """`_split_programs`, or what it gave in an earlier process."""
    question = None
    if compiled and fake_device_of(inputs[0]) is None:
        if identity is not None:
            question = core.program_cache.program_question((identity, grad_indices, split, budget), inputs)
        cached = core.program_cache.load_programs(question)
        if cached is not None and cached.programs is not None:
            form_observer.note_all(cached.facts["forms"])
            return cached.programs, cached.facts["outputs"]
        if cached is None:
            notify_compiling()
    with form_observer.observe() as forms:
        runs, outputs = _split_programs(f, grad_indices, inputs, compiled, split, budget)
    if question is not None:
        facts = {"outputs": outputs, "forms": {name: sorted(used) for name, used in forms.items()}}
        core.program_cache.store_programs(question, runs, facts)
    return runs, outputs


def _with_none(run: Run, gaps: list[int]) -> Callable[[list[Tensor]], Any]:
    """`run` with None at these places of its result."""

    def run_with_none(args: list[Tensor]) -> list[Tensor | None]:
        out: list[Tensor | None] = list(run(args))
        for i in gaps:
            out.insert(i, None)
        return out

    return run_with_none if gaps else run


def _split_programs(
    f: Flat, grad_indices: list[int], inputs: Sequence[Tensor], compiled: bool, split: int, budget: float
) -> tuple[Sequence[Run], int]:
    """Trace `f` and its vjp, and split the graph into ((forward, backward), number of outputs)."""
    from fzero.core.torch_private import functorch_config, min_cut_partition

    plan = fake_device_of(inputs[0])
    mode = fake_mode() if plan is None else FakeDevice(plan.target, lower=plan.lower, tracing=True)
    with mode:
        outs = f(*fakes_of(inputs, mode))
        cotangents = [torch.empty(o.shape, dtype=o.dtype, device=o.device) for o in outs]
    primals = fakes_of(inputs, mode)

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
        def begin() -> list[Tensor]:
            """The cotangents; a view marks in the graph where the backward pass begins: call it after the forward."""
            return [t.view_as(t) for t in tangents]

        if not compiled:  # by autograd, which some formulas take another way than a vjp that can be differentiated
            eager = _eager_pair(f, grad_indices[-1] + 1, grad_indices[0])
            out, residuals = eager.forward(primals)
            return [*out, *(grad for grad in eager.backward(residuals, begin()) if grad is not None)]

        def call_f(*grad_inputs: Tensor) -> tuple[Tensor, ...]:
            full = list(primals)
            for i, tensor in zip(grad_indices, grad_inputs):
                full[i] = tensor
            return tuple(f(*full))

        out, vjp, *_ = torch.func.vjp(call_f, *(primals[i] for i in grad_indices))
        return [*out, *vjp(tuple(begin()))]

    graph = trace(joint, primals, cotangents, mode, compiled)
    core.graph_passes.pin_ordered(graph)
    core.graph_passes.merge_shared(graph)
    core.graph_passes.fuse_max_magnitudes(graph)
    if budget == 0.0 and any(map(core.graph_passes.is_random, graph.graph.nodes)):
        budget = LEAST_BUDGET
    # No common subexpressions (cse): merging a deliberate recomputation (scores, activations) with the forward pass
    # would keep its result. What may be merged is named: see merge_shared.
    with (
        functorch_config.patch(activation_memory_budget=budget, cse=False, ban_recompute_materialized_backward=False),
        core.graph_passes.partition_by_cost(),
    ):
        graphs = min_cut_partition(graph, (primals, cotangents), num_fwd_outputs=len(outs))
    for subgraph in graphs:
        core.graph_passes.merge_transposed_calls(subgraph)
    if split:
        graphs = (graphs[0], *cut_backward(graphs[1], sum(i < split for i in grad_indices)))
    for node in (node for subgraph in graphs for node in subgraph.graph.nodes):
        node.meta = dict(node.meta)  # the partitioner gives an input of two graphs one, and compiling writes to it
    if compiled:
        from fzero.core.torch_private import compile_fx_inner  # noqa: F401  (seconds, in which nobody waits)

        # Ranks of one machine make the same graphs at the same time: one compiles, and Inductor's cache has it then.
        question = "\n".join([*(g.code for g in graphs), repr(signature_of(primals))])
        with (
            compile_cache.single_flight(question) if plan is None else contextlib.nullcontext(),
            core.program_cache.batch_compilation(),
        ):
            return [compile_graph(g, mode, backward=i > 0) for i, g in enumerate(graphs)], len(outs)
    return [lambda args, g=g: g(*args) for g in graphs], len(outs)
