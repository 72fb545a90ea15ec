"""What does not go together in a step: the plan, the optimizer, the options, the state."""

from __future__ import annotations

from fzero.core import pytree
from fzero.core.autodiff import Remat
from fzero.models import base
from fzero.optim import GradientTransformation
from fzero.sharding import Plan
from fzero.sharding.plan import shapes_of
from fzero.train.loss import LossFn
from fzero.train.state import TrainState, expect_shapes


def expect_options(plan: Plan, remat: Remat, donate: bool, update: str, offloaded: bool, layered: bool) -> None:
    """Raise ValueError for options of a step that are out of range, or do not go together or with the plan."""
    if offloaded and not donate:
        raise ValueError(
            f"offload: the plan's offloaded leaves ({plan_memories(plan)}) are overwritten by a step; make it with donate=True"
        )
    if plan.acts != "device" and not remat.every:
        raise ValueError(f"offload: acts={plan.acts} moves what a remat policy keeps, and remat is {remat}; use remat=full or every:K")
    if update not in ("end", "backward", "delayed"):
        raise ValueError(f"update is {update!r}; it must be end, backward or delayed")
    if update != "end" and not (offloaded and layered):
        raise ValueError(f'update="{update}" is for a layered Model with offloaded states; give the plan offload="opt=..."')


def plan_memories(plan: Plan) -> str:
    """Which memories a plan uses beside the device, in words."""
    memories = [(group, getattr(leaf, group).memory) for group in ("params", "grads", "opt") for leaf in plan.leaves.values()]
    return ", ".join(dict.fromkeys(f"{group}={memory}" for group, memory in memories if memory != "device"))


def expect_plan(loss_fn: base.Model | LossFn, tx: GradientTransformation, plan: Plan) -> None:
    """Raise ValueError where the plan was made for another model, or the optimizer needs whole leaves that the plan cuts."""
    if isinstance(loss_fn, base.Model):
        expect_shapes(plan, shapes_of(loss_fn))
    cut = [name for name, leaf in plan.leaves.items() if leaf.trained and any(plan.sizes[axis] > 1 for axis in leaf.opt.axes)]
    if tx.needs != "elementwise" and cut:
        raise ValueError(
            f"the optimizer needs whole leaves (needs={tx.needs!r}) and the plan cuts {cut[0]} and {len(cut) - 1} more; "
            "give it an `on`, which makes it one for shards (see fzero.optim.GradientTransformation), or use stage 0"
        )


def expect_state(plan: Plan, state: TrainState, ema_decay: float) -> None:
    """Raise ValueError where the state was made for another plan or policy, or lacks what the step is to keep beside the parameters."""
    expect_shapes(plan, state.params, shards=True)
    policy = plan.policy
    for name, leaf in pytree.named_leaves(state.params).items():
        if leaf.dtype != policy.param:
            raise ValueError(f"{name} is {leaf.dtype} and the plan's policy {policy.name} has {policy.param}; give init_state this plan")
    if bool(pytree.leaves(state.master)) != policy.has_master or bool(state.scaler) != bool(policy.loss_scale):
        raise ValueError(f"the state was not made for the plan's policy {policy.name}; give init_state this plan")
    if ema_decay and "ema" not in state.extra:
        raise ValueError(f"ema_decay is {ema_decay} and the state keeps no average; give init_state ema=True")
