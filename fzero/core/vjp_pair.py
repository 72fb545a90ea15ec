"""A function of tensors and its vector-Jacobian product as two functions that share residuals, eager or compiled.

A compiled pair is traced as one graph, which the min-cut partitioner splits.

Ref: Zhao et al. 2023, "Recompute with min-cut", functorch.compile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fzero.core import kept, kept_programs, observe, varying
from fzero.core.autodiff import dense
from fzero.core.backward_cut import cut_backward
from fzero.core.both_orders import make_both_orders
from fzero.core.compile import (
    Run,
    compile_graph,
    fake_mode,
    fakes_of,
    have_compiler,
    signature_of,
    tell_of_compiling,
    trace,
)
from fzero.core.device import FakeDevice, fake_device_of
from fzero.core.graph import hold, is_random, merge_shared
from fzero.core.largest import take_largest
from fzero.core.loops import compiled_together
from fzero.core.product_flops import partition_by_cost
from fzero.core.torch_private import disable_current_modes, run_autograd

LEAST_BUDGET = 1e-9  # with 0 the partitioner recomputes what must be saved too
Flat = Callable[..., Sequence[Tensor]]  # positional tensors in, a sequence of tensors out


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


class Owed(list):
    """What the gradients by weights need, once those by inputs are known: the program, and its tensors."""


class VjpPair(NamedTuple):
    """A function of tensors and its vector-Jacobian product, as two functions that share residuals.

    `backward` uses residuals once: it empties the list and frees each tensor after its last use. With `drop=n` the
    residuals do not hold the first n inputs (each must be alone in its storage); if `residuals.needs` is not empty,
    pass those inputs to `backward` again.

    Of a pair that is split at k, `backward_inputs` gives the gradients of inputs[k:n] and what `backward_weights` needs
    to give those of inputs[skip:k], later: no product is computed in both, and neither holds any of the dropped inputs
    afterwards.
    """

    # inputs, or tensors that look like them -> None: makes the programs for such inputs, if the pair has any.
    prepare: Callable[[Sequence[Tensor]], None]
    primal: Callable[[Sequence[Tensor]], list[Tensor]]  # inputs -> outputs
    forward: Callable[..., tuple[list[Tensor], Residuals]]  # (inputs, drop=0) -> (outputs, residuals)
    # (residuals, cotangents, dropped inputs=()) -> gradients of inputs[skip:n]; None for integers
    backward: Callable[..., list[Any]]
    # (residuals, cotangents, dropped inputs=()) -> (gradients of inputs[k:n], what is owed)
    backward_inputs: Callable[..., tuple[list[Any], Owed]] | None = None
    backward_weights: Callable[[Owed], list[Any]] | None = None  # what is owed, which is emptied -> of inputs[skip:k]


def vjp_pair(
    f: Flat, n: int, *, compiled: bool, budget: float = 1.0, skip: int = 0, split: int = 0, what: Any = None
) -> VjpPair:
    """Return the VjpPair of `f`, whose backward pass gives the gradients of inputs skip to n - 1.

    compiled: trace forward and backward pass together, split the graph, and compile both halves, once for each
    signature of the inputs. budget: the fraction of residuals that may be kept (see Remat); it also applies when
    nothing is compiled. split: cut the backward pass before this input, in a graph too where nothing is compiled; 0: do
    not. what: a value that determines `f` and nothing of which is a side effect of `f`, so that a compiled program may
    be taken from an earlier process (see kept_programs); None: it may not.
    """
    if compiled or budget < 1.0 or split:
        return _traced_pair(f, n, compiled, budget, skip, split, what)
    return _eager_pair(f, n, skip)


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


def _end(out: Tensor) -> Any:
    """What autograd goes back from: the place of a result in the graph, which does not hold its memory."""
    return out if out.is_leaf and out.requires_grad else get_gradient_edge(out) if out.requires_grad else None


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
        return [o.detach() for o in out], Residuals([[_end(o) for o in out], leaves, given], needs)

    def backward(residuals: Residuals, cotangents: Sequence[Tensor], dropped: Sequence[Tensor] = ()) -> list[Any]:
        out, leaves, given = residuals
        residuals.clear()
        given.append(dropped)
        live = [i for i, end in enumerate(out) if end is not None]
        if not live:
            return [leaf if leaf is None else torch.zeros_like(leaf) for leaf in leaves]
        outs, cots = ([values[i] for i in live] for values in (out, cotangents))
        wanted = [leaf for leaf in leaves if leaf is not None]
        # As torch.autograd.grad, without its check of symbolic shapes, for which it imports sympy.
        grads = run_autograd(tuple(outs), tuple(cots), False, False, tuple(wanted), True, accumulate_grad=False)
        whole = iter([torch.zeros_like(leaf) if grad is None else dense(grad) for grad, leaf in zip(grads, wanted)])
        return [leaf if leaf is None else next(whole) for leaf in leaves]

    return VjpPair(lambda inputs: None, primal, forward, backward)


def _traced_pair(f: Flat, n: int, compiled: bool, budget: float, skip: int, split: int, what: Any) -> VjpPair:
    programs: dict[Any, tuple[Run, Sequence[Callable[..., Any]], int]] = {}

    def primal(inputs: Sequence[Tensor]) -> list[Tensor]:
        if compiled or not split:
            return forward(inputs)[0]
        with torch.no_grad():
            return list(f(*inputs))

    def made(inputs: Sequence[Tensor]) -> tuple[Run, Sequence[Callable[..., Any]], int]:
        """The programs for such inputs."""
        signature = signature_of(inputs)
        if signature not in programs:
            # A plan records the operators of the step; those that run only because the block is traced must not be
            # recorded.
            with disable_current_modes() if fake_device_of(inputs[0]) is not None else contextlib.nullcontext():
                wanted = [i for i in range(skip, n) if inputs[i].is_floating_point()]
                runs, num_outs = _programs(f, wanted, inputs, compiled and have_compiler(), split, budget, what)
                runs = [varying.unfollowed(run) for run in runs] if compiled else runs
                starts = (split, skip) if split else (skip,)  # of what each backward program gives
                ends = (n, split) if split else (n,)
                gaps = [sorted({*range(start, end)} - {*wanted}) for start, end in zip(starts, ends)]
                run_bw = [_with_none(run, [i - at for i in none]) for run, none, at in zip(runs[1:], gaps, starts)]
                programs[signature] = runs[0], run_bw, num_outs
        return programs[signature]

    def prepare(inputs: Sequence[Tensor]) -> None:
        made(inputs)

    def forward(inputs: Sequence[Tensor], drop: int = 0) -> tuple[list[Tensor], Residuals]:
        run_fw, run_bw, num_outs = made(inputs)
        out, needs = run_fw(list(inputs)), set()
        keep = _dropper(inputs[:drop], needs)
        saved = [keep(t) if isinstance(t, Tensor) else t for t in out[num_outs:]]
        return list(out[:num_outs]), Residuals([run_bw, *saved], needs)

    def take(residuals: Residuals, cotangents: Sequence[Tensor], dropped: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """The backward programs, and the tensors that the first one takes; empties the residuals."""
        runs, *saved = residuals
        residuals.clear()
        return runs, [
            *(t.of(dropped) if isinstance(t, Dropped) else t for t in saved),
            *(c.contiguous() for c in cotangents),
        ]

    def backward(residuals: Residuals, cotangents: Sequence[Tensor], dropped: Sequence[Tensor] = ()) -> list[Tensor]:
        runs, saved = take(residuals, cotangents, dropped)
        return list(runs[0](saved))

    def backward_inputs(
        residuals: Residuals, cotangents: Sequence[Tensor], dropped: Sequence[Tensor] = ()
    ) -> tuple[list[Any], Owed]:
        runs, saved = take(residuals, cotangents, dropped)
        out = runs[0](saved)
        theirs = {t.untyped_storage()._cdata for t in dropped}
        kept = [t.clone() if t.untyped_storage()._cdata in theirs else t for t in out[n - split :]]
        return list(out[: n - split]), Owed([runs[1], *kept])

    def backward_weights(owed: Owed) -> list[Any]:
        run, *kept = owed
        owed.clear()
        return list(run(kept))

    def both(residuals: Residuals, cotangents: Sequence[Tensor], dropped: Sequence[Tensor] = ()) -> list[Any]:
        grads, owed = backward_inputs(residuals, cotangents, dropped)
        return [*backward_weights(owed), *grads]

    return (
        VjpPair(prepare, primal, forward, both, backward_inputs, backward_weights)
        if split
        else VjpPair(prepare, primal, forward, backward)
    )


def _programs(
    f: Flat, wanted: list[int], inputs: Sequence[Tensor], compiled: bool, split: int, budget: float, what: Any
) -> tuple[Sequence[Run], int]:
    """`_split_programs`, or what it gave in an earlier process."""
    asked = None
    if compiled and fake_device_of(inputs[0]) is None:
        if what is not None:
            asked = kept_programs.question((what, wanted, split, budget), inputs)
        found = kept_programs.find(asked)
        if found is not None and found.programs is not None:
            observe.note_all(found.facts["forms"])
            return found.programs, found.facts["outputs"]
        if found is None:
            tell_of_compiling()
    with observe.observe() as forms:
        runs, outputs = _split_programs(f, wanted, inputs, compiled, split, budget)
    if asked is not None:
        facts = {"outputs": outputs, "forms": {name: sorted(used) for name, used in forms.items()}}
        kept_programs.keep(asked, runs, facts)
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
    f: Flat, wanted: list[int], inputs: Sequence[Tensor], compiled: bool, split: int, budget: float
) -> tuple[Sequence[Run], int]:
    """Trace `f` and its vjp, and split the graph into ((forward, backward), number of outputs), the backward pass into
    two with `split`.

    forward returns outputs followed by residuals; backward takes residuals followed by cotangents. The first of two
    gives gradients followed by what the second one takes.
    """
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
            eager = _eager_pair(f, wanted[-1] + 1, wanted[0])
            out, residuals = eager.forward(primals)
            return [*out, *(grad for grad in eager.backward(residuals, begin()) if grad is not None)]

        def of_wanted(*some: Tensor) -> tuple[Tensor, ...]:
            full = list(primals)
            for i, tensor in zip(wanted, some):
                full[i] = tensor
            return tuple(f(*full))

        out, vjp, *_ = torch.func.vjp(of_wanted, *(primals[i] for i in wanted))
        return [*out, *vjp(tuple(begin()))]

    graph = trace(joint, primals, cotangents, mode, compiled)
    hold(graph)
    merge_shared(graph)
    take_largest(graph)
    if budget == 0.0 and any(map(is_random, graph.graph.nodes)):
        budget = LEAST_BUDGET
    # No common subexpressions (cse): merging a deliberate recomputation (scores, activations) with the forward pass
    # would keep its result. What may be merged is named: see merge_shared.
    with (
        functorch_config.patch(activation_memory_budget=budget, cse=False, ban_recompute_materialized_backward=False),
        partition_by_cost(),
    ):
        graphs = min_cut_partition(graph, (primals, cotangents), num_fwd_outputs=len(outs))
    for part in graphs:
        make_both_orders(part)
    if split:
        graphs = (graphs[0], *cut_backward(graphs[1], sum(i < split for i in wanted)))
    for node in (node for part in graphs for node in part.graph.nodes):
        node.meta = dict(node.meta)  # the partitioner gives an input of two graphs one, and compiling writes to it
    if compiled:
        from fzero.core.torch_private import compile_fx_inner  # noqa: F401  (seconds, in which nobody waits)

        # Ranks of one machine make the same graphs at the same time: one compiles, and Inductor's cache has it then.
        asked = "\n".join([*(g.code for g in graphs), repr(signature_of(primals))])
        with kept.first_alone(asked) if plan is None else contextlib.nullcontext(), compiled_together():
            return [compile_graph(g, mode, backward=i > 0) for i, g in enumerate(graphs)], len(outs)
    return [lambda args, g=g: g(*args) for g in graphs], len(outs)
