"""Check that plan, optimizer, options and state of a step go together, and what its first batch leads to.

That parameters are their masters' rounding is looked at where somebody else may have written a leaf.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fzero.comm.axes import AXES
from fzero.comm.rank_tables import Refusal, any_rank, device_of, failing_together, gather_rows, raise_together
from fzero.core import gpu, pytree
from fzero.core.arguments import expect_kind
from fzero.core.autodiff import Remat, Varying, transforms
from fzero.core.pytree import Tree
from fzero.core.torch_private import FakeTensor
from fzero.kernels.cross_entropy import is_tracing
from fzero.models import base, forward
from fzero.models.batch import check_tokens
from fzero.offload import DiskTensor, Nvme
from fzero.optim import GradientTransformation
from fzero.sharding import Mesh, Plan, Spec
from fzero.sharding.error_feedback import ERRORS, error_specs
from fzero.sharding.slices import is_stacked, local_shape, local_windows, narrow_box, row_blocks
from fzero.sharding.zero_stages import shapes_of
from fzero.train.execution import Execution
from fzero.train.loss import LossFn
from fzero.train.split_check import check_split, check_user_split
from fzero.train.state import TrainState, expect_alive, expect_shapes, hand_over, read


def expect_program(loss_fn: Any) -> None:
    """Raise TypeError for what is neither a Model nor a function of (params, batch)."""
    if isinstance(loss_fn, base.Model):
        return
    if isinstance(loss_fn, torch.nn.Module):
        raise TypeError(
            f"the model is an nn.Module ({type(loss_fn).__name__}); give fzero.from_module(module, loss), or a "
            "function loss(params, batch) that calls torch.func.functional_call(module, params, ...), and "
            "dict(module.named_parameters()) to zero_plan and init_state"
        )
    if isinstance(loss_fn, type):
        raise TypeError(f"the model is the class {loss_fn.__name__}; {PROGRAM}")
    if not callable(loss_fn):
        expect_kind("the model", loss_fn, base.Model, PROGRAM)


PROGRAM = (
    "give a Model, such as models.build(models.preset('llama-tiny')), or a function loss(params, batch) that returns "
    "(sum, number of samples)"
)


def expect_options(plan: Plan, execution: Execution, donate: bool, layered: bool) -> None:
    """Raise ValueError for options of a step that do not fit."""
    remat, update = execution.remat, execution.update
    assert isinstance(remat, Remat)  # Execution parses a text
    if plan.stages is not None and not layered:
        raise ValueError(
            f"pp={plan.mesh.pp.size} cuts a layered Model into stages, and this is a plain function; use dp"
        )
    if plan.offloaded and not donate:
        raise ValueError(
            f"offload: the plan's offloaded leaves ({plan.offloads}) are overwritten by a step; make it "
            "with donate=True"
        )
    if not plan.acts.on_device and not remat.every:
        raise ValueError(
            f"offload: acts={plan.acts} moves what a remat policy keeps, and remat is {remat}; use remat=full "
            "or every:2"
        )
    if execution.partition_activations and (plan.mesh.tp.size == 1 or plan.sequence or not layered):
        layout = "sequence parallelism, which cuts them" if plan.sequence else f"tp={plan.mesh.tp.size}"
        raise ValueError(
            "partition_activations is for layer inputs of a Model that all ranks of tp have, and this is "
            + (f"a plan with {layout}" if layered else "a plain function")
            + "; leave it out"
        )
    fetched = any(leaf.use.over_data or not leaf.params.memory.on_device for leaf in plan.leaves.values())
    if execution.resident and not (fetched and layered):
        raise ValueError(
            f"resident is {execution.resident}, and no parameters are fetched layer by layer here; use stage 3 with a "
            "Model, or leave it out"
        )
    if execution.resident and update != "end":
        raise ValueError(
            f'resident is {execution.resident} and update="{update}" writes to parameters while they are used; use '
            'update="end"'
        )
    if plan.codec is not None and plan.codec.hpz and (execution.resident or not execution.reshard) and layered:
        raise ValueError(
            f"codec {plan.codec}: hpz keeps what a node holds of parameters that are gathered again, and with "
            f"reshard={execution.reshard} and resident={execution.resident} they stay whole; use reshard=True and "
            "resident=0"
        )
    if (update == "delayed") != bool(plan.delayed):
        raise ValueError(
            f'update="{update}" and the plan has {plan.delayed} delayed updates, whose gradients are those at the '
            'parameters before the last one, which the state must have; write update="delayed" and '
            "zero_plan(...).with_updates(1), or neither"
        )


def expect_plan(loss_fn: base.Model | LossFn, tx: GradientTransformation, plan: Plan) -> None:
    """Raise ValueError if the plan is of another model, or its sums have no or two makers."""
    if isinstance(loss_fn, base.Model):
        expect_shapes(plan, shapes_of(loss_fn))
    if plan.signs and not tx.sums.makes:
        raise ValueError(
            f"codec {plan.codec}: the plan leaves sums of gradients to the optimizer, and this one makes none; use "
            "optim.onebit_adam, onebit_lamb or zero_one_adam, alone (their clip= clips), or leave the codec out"
        )
    if plan.local and tx.sums.local is None:
        raise ValueError(
            f"codec {plan.codec}: local leaves all sums to an optimizer that makes few of them, and this one sums in "
            "each step; use optim.zero_one_adam(freeze=STEPS, sum_every=STEPS), or leave local out"
        )
    several = max(plan.mesh.link().size, plan.mesh.rp.size) > 1
    if tx.sums.local is not None and several and not plan.local:
        raise ValueError(
            "the optimizer makes local steps, between which ranks send nothing, and the plan sums gradients in each; "
            'write zero_plan(..., codec="grads=1bit,local"), or leave sum_every out'
        )
    if tx.sums.makes and not plan.signs and several:
        raise ValueError(
            "the optimizer sends signs of its momentum, and the plan sums gradients in full; write zero_plan(..., "
            'codec="grads=1bit"), or use another optimizer, such as adamw'
        )


def expect_state(plan: Plan, opt_names: list[str], state: TrainState, donate: bool) -> None:
    """Raise ValueError if the state was made for another plan, policy or optimizer, or may not be overwritten."""
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], TrainState):
        raise TypeError("the state is the pair that a step returned; write state, metrics = step(state, batch)")
    expect_kind("the state", state, TrainState, "give the one that init_state, restore or the last step returned")
    expect_alive(state.step)
    if donate and transforms():
        raise ValueError("a train step under a torch.func transform overwrites its input; make it with donate=False")
    expect_shapes(plan, state.params, shards=True)
    policy = plan.policy
    for name, leaf in pytree.named_leaves(state.params).items():
        if leaf.dtype != plan.leaves[name].dtype:
            raise ValueError(
                f"{name} is {leaf.dtype} and the plan, of policy {policy.name}, has {plan.leaves[name].dtype}; give "
                "init_state this plan"
            )
        if isinstance(leaf, Tensor) and plan.leaves[name].params.memory.on_disk:
            raise ValueError(
                f"{name} rests on a disk by the plan and is in memory here, where no update would write it; write "
                "state = fzero.with_params(state, params, plan, nvme=nvme)"
            )
    if bool(pytree.leaves(state.master)) != policy.has_master or bool(state.scaler) != bool(policy.loss_scale):
        raise ValueError(f"the state was not made for the plan's policy {policy.name}; give init_state this plan")
    if pytree.names(state.extra.get(ERRORS, {})) != pytree.names(error_specs(plan.stored_errors).get(ERRORS, {})):
        raise ValueError(
            f"the state was not made for the plan's codec {plan.codec}, whose errors are a part of it; give init_state "
            "this plan"
        )
    state_names = pytree.names(state.opt_state)
    if state_names != opt_names:
        odd = next(name for name in [*opt_names, *state_names] if (name in opt_names) != (name in state_names))
        raise ValueError(
            f"opt_state/{odd} is {'missing from the state' if odd in opt_names else 'unknown to the optimizer'}: the "
            "state was made with another optimizer; give init_state this tx"
        )


def check_values(model: base.Model | LossFn, batch: Any, ctx: base.Ctx) -> bool:
    """Raise ValueError for tokens or targets outside the vocabulary; False if they cannot be looked at."""
    if not have_values(batch):
        return False
    if isinstance(model, base.Model) and hasattr(model.config, "vocab_size"):
        forward.check(model, batch, ctx)
        check_tokens(batch, model.config.vocab_size)
    return True


def have_values(tree: Any) -> bool:
    """Whether the values of a tree's tensors can be looked at now."""
    leaves = pytree.leaves(tree)
    return not (transforms() or is_tracing() or any(isinstance(leaf, FakeTensor) or leaf.is_meta for leaf in leaves))


@contextlib.contextmanager
def noting_sums(mesh: Mesh) -> Iterator[None]:
    """A context in which psums of equal values are noted, and not refused."""
    if mesh.agreement is None:
        yield
        return
    previous, mesh.agreement.noted = mesh.agreement.noted, []
    try:
        yield
    finally:
        mesh.agreement.noted = previous


def refusing_jointly(mesh: Mesh, first: bool) -> contextlib.AbstractContextManager[Any]:
    """A context in which a first step refuses on all ranks if on one."""
    if not first or mesh.store is None or transforms():
        return contextlib.nullcontext()

    def agree(failure: Refusal | None) -> None:
        with mesh.checked():  # the first meeting of ranks that may run different programs
            raise_together(failure, mesh, "check")

    return failing_together(agree)


REMEDY = "make the master weights anew: state = fzero.with_params(state, params, plan)"


class StateCheck:
    """The check of the states that a step is given: kinds in each call, masters where a leaf is new."""

    def __init__(self, plan: Plan, opt_names: list[str], donate: bool, nvme: Nvme | None) -> None:
        self.plan, self.opt_names, self.donate, self.nvme, self.first = plan, opt_names, donate, nvme, True
        self.checked_leaves: list[tuple[Any, int]] = []  # by leaf: a weak reference, and the version of its values

    def expect(self, state: TrainState) -> None:
        """Raise ValueError if the state is not one for this step, or a parameter is not its rounded master."""
        expect_state(self.plan, self.opt_names, state, self.donate)
        if self.nvme is not None:
            expect_store(state, self.nvme)
        if not self.plan.policy.has_master or not have_values(state.step) or gpu.is_capturing(state.step.device):
            return
        leaves = leaves_of(state)
        if len(leaves) == len(self.checked_leaves) and all(
            ref() is leaf and version == version_of(leaf) for (ref, version), leaf in zip(self.checked_leaves, leaves)
        ):
            return
        leaf_plans = self.plan.leaves.items()
        specs, shapes = (
            {n: (leaf.params, leaf.opt) for n, leaf in leaf_plans},
            {n: leaf.shape for n, leaf in leaf_plans},
        )
        fault = compare(state, specs, shapes, self.plan.mesh)
        mesh, first, self.first = self.plan.mesh, self.first, False
        if first and mesh.store is not None:
            with mesh.ledger.phase("check"):
                elsewhere = any_rank(bool(fault), mesh)
            if elsewhere and not fault:
                fault = f"a parameter on another rank is not the rounding of its master weights; {REMEDY}"
        if fault:
            raise ValueError(fault)

    def handed_over(self, old: TrainState, new: TrainState) -> TrainState:
        """The state that the step returns, whose parameters are known to be right."""
        if self.plan.policy.has_master and have_values(new.step):
            self.checked_leaves = [(weakref.ref(leaf), version_of(leaf)) for leaf in leaves_of(new)]
        return hand_over(old, new) if self.donate else new


def expect_store(state: TrainState, nvme: Nvme) -> None:
    """Raise ValueError if a leaf rests in another store than `nvme`'s."""
    for name, leaf in pytree.named_leaves(state).items():
        if not isinstance(leaf, DiskTensor) or leaf.store is nvme.store:
            continue
        if nvme.store is None or leaf.store.folder == nvme.store.folder:
            leaf.store.expect_open()  # says that it was closed, or opened again since
        else:
            raise ValueError(
                f"{name} rests in {leaf.store.folder}, and the step writes to {nvme.folder}; give make_train_step the "
                "Nvme of the state (nvme=)"
            )


def leaves_of(state: TrainState) -> list[Any]:
    """The parameters and master weights of a state."""
    return [*pytree.leaves(state.params), *pytree.leaves(state.master)]


def version_of(leaf: Any) -> int:
    """How often the values of a leaf were written to, as far as PyTorch counts it."""
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0


@torch.no_grad()
def compare(
    state: TrainState, specs: Mapping[str, tuple[Spec, Spec]], shapes: Mapping[str, tuple[int, ...]], mesh: Mesh
) -> str:
    """The names of the leaves whose parameter differs from its master weight, in words, or ""."""
    params, differing = pytree.named_leaves(state.params), {}
    for name, master in pytree.named_leaves(state.master).items():
        counts, layers = [], range(master.shape[0]) if is_stacked(name) else (None,)
        narrow = narrowing(shapes[name], specs[name], mesh)
        for i in layers:
            low, high = narrow(read(params[name], i), i), read(master, i)
            if low.numel():
                counts.extend(count_unequal(a, b.to(a.device)) for a, b in blocks_of(low, high))
        if counts:
            differing[name] = torch.stack([count.to(counts[0].device) for count in counts]).sum()
    totals = {name: int(count) for name, count in differing.items()}
    wrong = [name for name, count in totals.items() if count]
    if not wrong:
        return ""
    others_text = f" (nor are {len(wrong) - 1} more leaves)" if wrong[1:] else ""
    name, size = wrong[0], math.prod(pytree.named_leaves(state.master)[wrong[0]].shape)
    return (
        f"params/{name} is not the rounding of its master weights, master/{name}: {totals[name]:,} of {size:,} "
        f"elements differ{others_text}, and the next update would bring the masters' values back; {REMEDY}"
    )


def blocks_of(low: Tensor, high: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Two layers of one shape, cut alike into blocks of rows."""
    if not low.dim():
        return [(low, high)]
    return [(low[begin:end], high[begin:end]) for begin, end in row_blocks(tuple(low.shape))]


def count_unequal(param: Tensor, master: Tensor) -> Tensor:
    """The number of parameters that are not the rounding of their master; NaN is NaN, subnormals are 0."""
    rounded, min_normal = master.to(param.dtype), torch.finfo(param.dtype).smallest_normal
    equal = (param == rounded) | ((param != param) & (rounded != rounded))
    return (~(equal | ((param.abs() < min_normal) & (rounded.abs() < min_normal)))).sum()


def narrowing(shape: tuple[int, ...], specs: tuple[Spec, Spec], mesh: Mesh) -> Callable[[Tensor, int | None], Tensor]:
    """The function (leaf at rest, layer) -> the part that is updated here."""
    if local_shape(shape, specs[0], mesh) == local_shape(shape, specs[1], mesh):
        return lambda value, layer: value
    start, size = inner_box(shape, specs, mesh)
    return lambda value, layer: (
        narrow_box(value, start, size) if layer is None else narrow_box(value, start[1:], size[1:])
    )


def narrow_to_update(value: Tensor, shape: tuple[int, ...], specs: tuple[Spec, Spec], mesh: Mesh) -> Tensor:
    """The part that this rank updates of its shard at rest."""
    return narrowing(shape, specs, mesh)(value, None)


def inner_box(shape: tuple[int, ...], specs: tuple[Spec, Spec], mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, size) of a shard by the second spec in that by the first."""
    outer, inner = (local_windows(shape, spec, mesh) for spec in specs)
    size = local_shape(shape, specs[1], mesh)
    if not inner:  # no layer is this rank's
        return (0,) * len(shape), size
    return tuple(a - b for a, b in zip(inner[0].start, outer[0].start)), size


PAIR = "return (losses.sum(), losses.numel()), or the sum of weighted losses and that of their weights"


class FirstStep:
    """A step's checks of its first batch and of the result; later steps pass over both, as they wait for the device."""

    def __init__(self, loss_fn: base.Model | LossFn, gradient: Any) -> None:
        self.loss_fn, self.gradient, self.plan = loss_fn, gradient, gradient.plan
        self.is_checked = self.looks = False

    def look(self, batch: Any) -> None:
        """Raise ValueError for values of the batch that are outside of a vocabulary."""
        self.looks = not self.is_checked and check_values(self.loss_fn, batch, self.gradient.ctx)

    def check(self, params: Tree, micro_batch: Any) -> None:
        """Raise ValueError, on all ranks, for a split that changes a layer or a loss.

        params: at rest. micro_batch: the first micro-batch.
        """
        if self.looks:
            arguments = self.loss_fn, self.plan, params, micro_batch, self.gradient.ctx
            check_split(*arguments)
            check_user_split(*arguments)

    def judge(self, state: TrainState, inputs: tuple[Any, ...], metrics: Any) -> None:
        """Raise ValueError for a sum over ranks that is N times too large, or a loss that cannot be this one."""
        self.judge_sums(state, inputs)
        if self.looks:
            self.expect_loss(state.params, inputs[0][0], inputs[2], metrics)
            self.is_checked = True  # a refused step is no first one

    def judge_sums(self, state: TrainState, inputs: tuple[Any, ...]) -> None:
        """Raise ValueError, on the ranks of its axis, for a noted psum of what is the same on all of them."""
        # Such a psum is N times what was meant. Equal bits are no proof (equal rows, zeros, overflows), so the gradient
        # is computed again, following over which axes each tensor may differ (core/autodiff). The second one is thrown
        # away: the operators that follow tensors may change the order of torch's formulas, and so bits.
        mesh = self.plan.mesh
        agreement = mesh.agreement
        if agreement is None or agreement.noted is None:
            return
        flag = torch.tensor([len(agreement.noted)], device=device_of(mesh))
        with mesh.ledger.phase("check"):
            if not bool(gather_rows(flag, mesh, leaf="sums").any()):
                return
        previous, agreement.noted = agreement.noted, None
        try:
            with Varying() as followed:
                for name, leaf in pytree.named_leaves(state.params).items():
                    if isinstance(leaf, Tensor):
                        followed.mark(leaf, frozenset(self.plan.leaves[name].params.axes))
                for leaf in pytree.leaves(inputs[0]):
                    followed.mark(leaf, frozenset(AXES.by_tokens))
                self.gradient(state, *inputs)
        finally:
            agreement.noted = previous

    def expect_loss(self, params: Tree, micro_batch: Any, draws: dict[str, Tensor], metrics: Any) -> None:
        """Raise ValueError on all ranks for an impossible number of tokens, or a loss that no parameter reaches."""
        mesh = self.plan.mesh
        row = torch.stack([x.detach().to(torch.float64) for x in (metrics.loss, metrics.num_tokens, metrics.grad_norm)])
        with mesh.ledger.phase("check"):  # rank 0's, so that all go one way even if they found unlike ones
            mean, count, norm = gather_rows(row, mesh, leaf="first step")[0].tolist()
        if not 0 <= count < float("inf"):
            raise ValueError(
                f"the loss of a micro-batch counts {count:g} samples; their number, or the sum of their weights, is 0 "
                f"or more, and finite: {PAIR}"
            )
        if count == 0 and mean != 0:
            raise ValueError(
                f"the loss counts no samples in the batch of the first step, and its sum is not 0: {PAIR}, of the same "
                "samples"
            )
        named = pytree.named_leaves(params)
        if norm == 0 and count and all(isinstance(leaf, Tensor) for leaf in named.values()):
            with mesh.ledger.phase("check"):
                reached = any_rank(self.is_reached(params, micro_batch, draws), mesh)
            if not reached:
                raise ValueError(
                    f"no parameter reaches the loss: it does not depend on the {len(self.plan.trained(named))} trained "
                    "leaves that the loss function is given; compute it from `params`, as "
                    "torch.func.functional_call(module, params, ...) does, without .detach(), .item() or "
                    "torch.no_grad()"
                )

    def is_reached(self, params: Tree, micro_batch: Any, draws: dict[str, Tensor]) -> bool:
        """Whether the loss of a micro-batch depends on a trained leaf of this rank, whatever its derivative is."""
        leaves = {name: leaf.detach() for name, leaf in pytree.named_leaves(params).items()}
        trained_leaves = [leaf.requires_grad_() for name, leaf in leaves.items() if self.plan.leaves[name].trained]
        with torch.enable_grad():
            total = self.gradient.loss(pytree.from_named(leaves, params), micro_batch, draws, 0).total
            if not total.requires_grad:
                return False
            return any(grad is not None for grad in torch.autograd.grad(total, trained_leaves, allow_unused=True))
