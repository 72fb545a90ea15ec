"""The first step of a module that tp splits: its layers, split and whole, compute one thing.

fzero does not know the code of such layers. A norm over features that tp splits, for instance, takes the mean of a
rank's part; nothing fails, and the loss is nearly right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fzero.comm.rank_tables import any_rank
from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.core.stack import in_turn
from fzero.models import base, forward
from fzero.sharding import Plan, Spec, one_process
from fzero.sharding.redistribute import gather_full
from fzero.sharding.slices import narrow_to
from fzero.train.expert_slack import with_slack_for_all
from fzero.train.to_module import read

# The largest difference of a result or gradient, over its largest element. Sums in another order differ by 1e-6; a norm
# of half of the features by 1e-2 or more.
MAX_DIFFERENCE = {torch.float32: 1e-4, torch.float64: 1e-9}
# Of the largest gradient: the least size of another one. That of a key's bias is 0 but for rounding.
MIN_SIZE = 1e-2


def check_split(model: Any, plan: Plan, params: Tree, batch: Any, ctx: base.Ctx) -> None:
    """Raise ValueError, on every rank, if a foreign Model's layer under tp, or its gradient, differs from that of one
    process on what the embedding, or a join, makes of the batch. One layer of each kind is compared, in float32 or
    float64; other models are passed over.

    params: at rest. Communicates: gathers of the parameters outside of the layers and of a layer of each kind, the
    layer's own messages, and a flag.
    """
    if not isinstance(model, base.Model) or not model.foreign or plan.mesh.tp.size == 1:
        return
    wide = torch.promote_types(ctx.dtype, torch.float32)
    ctx = ctx._replace(dtype=wide, key=(), compiled=False, experts=with_slack_for_all(plan).experts or ())
    with torch.no_grad(), plan.mesh.ledger.phase("check"):
        ctx = forward.prepare(model, batch, ctx)
        leaves = pytree.named_leaves(params)
        x = model.embed(full_segment(plan, leaves, "embed", (), wide), batch, ctx)
        reasons, first = [], 0
        for stack in base.stacks_of(model):
            if stack.join is not None:
                x = stack.join(full_segment(plan, leaves, stack.join_name, model.shared, wide), x, batch, ctx)
            names = [name for name in leaves if name.startswith(f"{stack.name}/")]
            kinds = in_turn(stack.block)
            for i in range(min(len(kinds), plan.leaves[names[0]].shape[0])):
                if kinds[i] in kinds[:i]:
                    continue
                layer = {name: full_leaf(plan, leaves, name, wide, i) for name in names}
                device = next(iter(layer.values())).device
                local = ctx._replace(layer=torch.full((), first + i, device=device))
                worst, subject = compare(plan, kinds[i], layer, x, local)
                if not worst <= MAX_DIFFERENCE[wide]:
                    reasons.append(f"{subject} of layer {first + i} by {worst:.1e} of its size")
            first += plan.leaves[names[0]].shape[0]
        if any_rank(bool(reasons), plan.mesh):
            local = reasons[0] if reasons else "a gradient on another rank"
            raise ValueError(
                f"tp={plan.mesh.tp.size}: a layer that tp splits differs from a whole one: {local}; something in "
                "it, such as a norm, works over all of the features that tp splits: leave the linear layers beside it "
                "out of tp"
            )


def compare(
    plan: Plan, block: Callable[..., Any], layer: dict[str, Tensor], x: Any, ctx: base.Ctx
) -> tuple[float, str]:
    """(the largest difference of a block under tp from the one of one process, over the size of its value; of what)."""

    def narrow_leaf(name: str, leaf: Tensor) -> Tensor:
        return narrow_to(leaf, plan.leaves[name].compute.layer, plan.mesh, leaf=name).contiguous()

    parts = {name: narrow_leaf(name, leaf) for name, leaf in layer.items()}
    full_values = values_of(block, layer, x, ctx._replace(mesh=one_process()))
    split = values_of(block, parts, x, ctx)
    sizes = {name: float(value.abs().max()) if value.numel() else 0.0 for name, value in full_values.items()}
    min_size = MIN_SIZE * max((size for name, size in sizes.items() if not name.startswith("the result")), default=0.0)
    worst, subject = 0.0, ""
    for name, expected in full_values.items():
        expected = narrow_leaf(name, expected) if name in layer else expected
        size = sizes[name] if name.startswith("the result") else max(sizes[name], min_size)
        difference = float((split[name] - expected).abs().max()) / (size or 1.0) if expected.numel() else 0.0
        if not difference <= worst:
            worst, subject = difference, name if name.startswith("the ") else f"the gradient of {name}"
    return worst, subject


def values_of(block: Callable[..., Any], layer: dict[str, Tensor], x: Any, ctx: base.Ctx) -> dict[str, Tensor]:
    """The results of a block, and the gradients of their sum with fixed weights, by name."""

    # Not torch.func: a module may have an autograd.Function in the old style, as Bloom's GELU.
    layer_leaves = {name: leaf.detach().requires_grad_(leaf.is_floating_point()) for name, leaf in layer.items()}
    inputs = [leaf.detach().requires_grad_() for leaf in x]
    with torch.enable_grad():
        params = pytree.nest({name.split("/", 1)[1]: leaf for name, leaf in layer_leaves.items()})
        out = block(params, type(x)(inputs), ctx)
        weights = [torch.cos(torch.arange(y.numel(), device=y.device)).to(y.dtype).reshape(y.shape) for y in out]
        total = torch.stack([(y * w).sum() for y, w in zip(out, weights)]).sum()
        leaves = [*inputs, *layer_leaves.values()]
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    grads = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads)]
    values = {f"the result {i}": y.detach() for i, y in enumerate(out)}
    values |= {f"the gradient of input {i}": g for i, g in enumerate(grads[: len(inputs)])}
    return values | dict(zip(layer_leaves, grads[len(inputs) :]))


def full_segment(plan: Plan, leaves: dict[str, Any], segment: str, shared: tuple[str, ...], dtype: torch.dtype) -> Tree:
    """The whole parameters of a part of the model."""
    names = [name for name in leaves if name.startswith(f"{segment}/") or name in shared]
    return pytree.nest({name: full_leaf(plan, leaves, name, dtype) for name in names})


def full_leaf(plan: Plan, leaves: dict[str, Any], name: str, dtype: torch.dtype, layer: int | None = None) -> Tensor:
    """A whole parameter, or a layer of it."""
    spec = plan.leaves[name].params
    spec = Spec(spec.dims, parts=spec.parts) if layer is None else spec.layer
    value = read(leaves[name], layer).to(dtype)
    return gather_full(value, spec, plan.mesh, leaf=name) if any(plan.mesh[a].size > 1 for a in spec.axes) else value
