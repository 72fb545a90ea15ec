"""Check that plan, optimizer, options and state of a step go together."""

from __future__ import annotations

from typing import Any

import torch

from fzero.core import pytree
from fzero.core.arguments import expect_kind
from fzero.core.autodiff import Remat, transforms
from fzero.core.torch_private import FakeTensor
from fzero.kernels.cross_entropy_rows import is_tracing
from fzero.models import base, forward
from fzero.models.batch import check_tokens
from fzero.optim import GradientTransformation
from fzero.sharding import Plan
from fzero.sharding.error_feedback import ERRORS, error_specs
from fzero.sharding.zero_stages import shapes_of
from fzero.train.execution import Execution
from fzero.train.loss import LossFn
from fzero.train.state import TrainState, expect_alive, expect_shapes


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
        if isinstance(leaf, torch.Tensor) and plan.leaves[name].params.memory.on_disk:
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
