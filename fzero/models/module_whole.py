"""The Model of an nn.Module that is trained whole, as one part."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from fzero.core import pytree
from fzero.core.belongings import Belongings
from fzero.core.pure_calls import PureCalls
from fzero.core.pytree import Tree
from fzero.models.base import Ctx, Loss, Model, Start
from fzero.models.batch import Batch
from fzero.models.loss_of import loss_of
from fzero.models.module_buffers import Constants
from fzero.models.module_calls import calling, draws_of
from fzero.models.module_functions import (
    ModuleConfig,
    Weights,
    dotted,
    expect_batch,
    init,
    no_logits,
    slashed,
    trained_of,
)
from fzero.models.module_layers import without_memory
from fzero.models.module_split import LossOf, ModuleCall
from fzero.models.module_sums import wide_sums
from fzero.sharding import Mesh, Rules


def whole_model(module: nn.Module, loss: LossOf, weights: Weights) -> Model:
    """The Model of a module that is not split: all of it is the head."""
    body = without_memory(module)
    values = {name: leaf.detach().clone() for name, leaf in module.named_buffers()}
    buffers = Constants(values, module.state_dict(keep_vars=True))
    parameters = dict(body.named_parameters())
    start = {f"head/{slashed(n)}": Start((weights(n),), tuple(leaf.shape), False) for n, leaf in parameters.items()}
    shapes, calls = {name: one.shape for name, one in start.items()}, PureCalls(body, trained_of(module))

    def prepare(batch: Batch, ctx: Ctx) -> int:
        return expect_batch(batch)

    def head(params: Tree, x: Any, batch: Batch, ctx: Ctx) -> Loss:
        now = buffers.on(pytree.leaves(batch)[0].device, ctx.dtype)
        own = dotted(params["head"], ctx.dtype)
        groups = {"the buffer": now, "the parameter": own, "the batch's": pytree.named_leaves(batch)}
        given = {f"{what} {name}": leaf for what, some in groups.items() for name, leaf in some.items()}

        def run() -> Any:
            return loss(ModuleCall(body, {**own, **now}, ctx.dtype), batch)

        with calling(ctx, ctx.prepared) as call, wide_sums(given.values()):
            return loss_of(calls(run, given, draws_of(call), partial(Belongings.by, loss)))

    return Model(
        config=ModuleConfig(type(module).__name__, 0),
        init=partial(init, shapes),
        embed=lambda params, batch, ctx: (),
        block={},
        head=head,
        logits=no_logits,
        rules=partial(whole_rules, shapes),
        prepare=prepare,
        start=start,
        draws=any(one.training for one in module.modules()),
        frozen=frozenset(f"head/{slashed(n)}" for n, leaf in parameters.items() if not leaf.requires_grad),
    )


def whole_rules(shapes: Mapping[str, tuple[int, ...]], mesh: Mesh) -> Rules[str]:
    """The sharding rules of a module that is not split: nothing is over tp."""
    if mesh["tp"].size > 1:
        raise ValueError(f"tp={mesh['tp'].size}: this module is trained whole, and tp splits layers; use dp")
    return [(f"^{re.escape(n)}$", f"[{', '.join('·' * len(shape))}]") for n, shape in shapes.items()]
