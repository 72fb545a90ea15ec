"""The training step: `state, metrics = train_step(state, batch)`. Read this file first.

A step is gradients of a sum, one division by the global number of tokens, and an optimizer's update of values. What is sharded, kept in
which dtype, recomputed or compiled is data that the step is made with; nothing in it branches on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import pytree, random
from fzero.autodiff import Remat, transforms
from fzero.models import base
from fzero.optim import GradientTransformation, apply_in_place, apply_updates, ema_init, ema_update, global_norm
from fzero.optim.base import name_tree, overwrite
from fzero.precision import Policy, ScalerState, fp32, init_scaler, overflow_at_floor, update_scaler
from fzero.pytree import Tree
from fzero.sharding import Mesh, Plan
from fzero.sharding.zero import shapes_of

LossFn = Callable[[Tree, Any], Any]


class TrainState(NamedTuple):
    """All of a training run, and nothing elsewhere. Every leaf is a tensor; `()` stands for what a run does without."""

    step: Tensor  # int64 scalar: steps made, skipped ones among them
    params: Tree  # in policy.param
    master: Tree  # the same in policy.state, or ()
    opt_state: Tree
    scaler: ScalerState | tuple
    key: Tensor  # int64 [2]
    data_cursor: Tensor  # int64 scalar: samples consumed
    extra: dict[str, Tree]  # "ema": the averaged weights, where asked for


class Metrics(NamedTuple):
    """What a step reports, as scalars."""

    loss: Tensor  # nats per token (float32 or wider)
    num_tokens: Tensor
    grad_norm: Tensor  # of the gradient of that loss, before clipping
    skipped: Tensor  # bool: the gradient was not finite, and parameters and optimizer state are as they were
    loss_scale: Tensor
    extra: dict[str, Tensor]  # the loss function's own sums, per token


def init_state(
    model: base.Model | Tree,
    tx: GradientTransformation,
    plan: Plan,
    mesh: Mesh,
    *,
    seed: int | Tensor,
    policy: Policy = fp32(),  # noqa: B008
    ema: bool = False,
    device: torch.device | str = "cpu",
) -> TrainState:
    """The state before the first step. The parameters are drawn from the seed (or key) for a Model, and are taken for a tree.

    `policy` must be the step's; `ema` keeps averaged weights, for a step made with `ema_decay`. Mesh and plan say where leaves rest: on
    a mesh of one process, whole.
    """
    key = seed if isinstance(seed, Tensor) else random.key(seed)
    if isinstance(model, base.Model):
        whole = base.init_params(model, random.fold_in(key, "init"), policy.state, device)
    else:
        whole = pytree.map(lambda leaf: leaf.to(policy.state, copy=True), model)
    expect_like(plan.like, whole)
    return TrainState(
        step=torch.tensor(0),
        params=pytree.map(lambda leaf: leaf.to(policy.param), whole),
        master=whole if policy.has_master else (),
        opt_state=tx.init(whole),
        scaler=init_scaler(policy.loss_scale) if policy.loss_scale else (),
        key=key,
        data_cursor=torch.tensor(0),
        extra={"ema": ema_init(whole)} if ema else {},
    )


def expect_like(like: Tree, params: Tree) -> None:
    """Raise ValueError naming the first leaf of `params` that is missing, extra or of another shape than in `like`."""
    wanted, given = pytree.named_leaves(like), pytree.named_leaves(params)
    pytree.from_named(given, like)
    for name, leaf in wanted.items():
        if leaf.shape != given[name].shape:
            raise ValueError(f"{name}: the plan was made for shape {list(leaf.shape)} and the leaf has {list(given[name].shape)}")


def make_loss(loss_fn: base.Model | LossFn, policy: Policy, mesh: Mesh, remat: Remat, compiled: bool) -> Callable[..., base.Loss]:
    """`loss(params, batch, key, first) -> Loss` of a Model, or of a plain function of (params, batch).

    A plain function returns a `Loss`, a pair (sum, number of tokens), or a scalar, which counts as one token: then the loss of a step is
    the mean over its micro-batches. It is given the parameters in policy.compute. `key` is () for no dropout.
    """
    if isinstance(loss_fn, base.Model):
        ctx = base.Ctx(mesh=mesh, dtype=policy.compute, compiled=compiled, remat=remat)
        return lambda params, batch, key, first: base.loss(loss_fn, params, {**batch, "first": first}, ctx._replace(key=key))

    def plain(params: Tree, batch: Any, key: Any, first: Any) -> base.Loss:
        out = loss_fn(pytree.map(lambda leaf: leaf.to(policy.compute), params), batch)
        out = out if isinstance(out, tuple) else (out, torch.ones_like(out.detach()))
        total, num_tokens, *extra = out
        return base.Loss(total, torch.as_tensor(num_tokens), *extra)

    return plain


def make_train_step(
    loss_fn: base.Model | LossFn,
    tx: GradientTransformation,
    plan: Plan,
    mesh: Mesh,
    *,
    policy: Policy = fp32(),  # noqa: B008
    micro_batches: int = 1,
    remat: Remat | str = "none",
    compiled: bool = False,
    donate: bool = True,
    ema_decay: float = 0.0,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """The function `(state, batch) -> (state, Metrics)` of one training step.

    micro_batches: equal parts of the batch (along the first dim of its leaves) whose gradients are summed one after the other.
    donate: the buffers of the state are overwritten by the new state's; False leaves them valid, and only then does the step compose
    with torch.func (vmap over states, grad through steps).
    ema_decay: the average's memory; the state must have been made with `ema=True`.
    The step is transactional: with a gradient that is not finite, parameters, master weights, optimizer state and average stay as they
    were, `metrics.skipped` is true, and only step, data_cursor and the loss scale move on.
    Raises ValueError where the batch does not divide, the state was made for another plan or policy, or the plan for another model;
    FloatingPointError at the floor of the loss scale (see LossScale).
    """
    if isinstance(loss_fn, base.Model):
        expect_like(plan.like, shapes_of(loss_fn))
    remat = Remat.parse(remat) if isinstance(remat, str) else remat
    loss = make_loss(loss_fn, policy, mesh, remat, compiled)
    dropout = isinstance(loss_fn, base.Model) and getattr(loss_fn.config, "dropout", 0.0) > 0.0

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        if donate and transforms():
            raise ValueError("a train step under a torch.func transform overwrites its input; make it with donate=False")
        expect_state(plan, policy, state, ema_decay)
        key = random.fold_in(random.fold_in(state.key, "dropout"), state.step) if dropout else ()
        size, parts = split_batch(batch, micro_batches)
        scale = state.scaler.scale if policy.loss_scale else torch.ones(())

        # A constant brings the sum to the size of a mean before it is scaled: float16 gradients need that room.
        seed_divisor = positions(parts[0]) if policy.loss_scale else 1

        def objective(params: Tree, part: Any, first: int) -> tuple[Tensor, base.Loss]:
            out = loss(params, part, key, first)
            return out.total * (scale / seed_divisor), out

        # A pure step may itself be differentiated: through the gradient, the update, and several steps.
        with torch.no_grad() if donate else contextlib.nullcontext():
            grads, total = sum_over_parts(objective, state.params, parts, size, policy.accumulate, donate)
            tokens = torch.where(total.num_tokens == 0, 1, total.num_tokens)  # a count may be a sum of weights, below 1
            wide = torch.promote_types(total.total.dtype, torch.float32)
            inverse = seed_divisor / (tokens.to(wide) * scale)
            grads = scale_by(grads, inverse, donate)
            grad_norm = global_norm(grads)
            skipped = ~torch.isfinite(grad_norm)
            metrics = Metrics(
                total.total.to(wide) / tokens,
                total.num_tokens,
                grad_norm,
                skipped,
                scale,
                {name: value / tokens for name, value in total.extra.items()},
            )
            moved = state._replace(
                step=state.step + 1,
                data_cursor=state.data_cursor + size * micro_batches,
                scaler=move_scaler(policy, state.scaler, skipped),
            )
            update = update_donated if donate else update_pure
            return update(tx, policy, grads, moved, skipped, ema_decay), metrics

    return train_step


def sum_over_parts(
    objective: Callable[..., tuple[Tensor, base.Loss]], params: Tree, parts: list[Any], size: int, dtype: torch.dtype, donate: bool
) -> tuple[Tree, base.Loss]:
    """(gradients in `dtype`, losses), each summed over the micro-batches, which are numbered by their first row."""
    gradient = torch.func.grad(objective, has_aux=True)
    grads, total = gradient(params, parts[0], 0)
    leaves, treedef = pytree.flatten(grads)
    del grads
    for i in range(len(leaves)):
        leaves[i] = leaves[i].to(dtype)  # one by one, so that each is freed as it is converted
    grads = pytree.unflatten(leaves, treedef)
    del leaves
    for i, part in enumerate(parts[1:], 1):
        part_grads, out = gradient(params, part, i * size)
        grads, total = add(grads, part_grads, donate), pytree.map(torch.add, total, out)
        del part_grads
    return grads, total


def add(total: Tree, grads: Tree, donate: bool) -> Tree:
    """total + grads; in the buffers of `total` where it is donated, but never twice in one that two of its leaves share."""
    if donate:
        return overwrite(lambda name, a, b: a.add_(b), name_tree(total), total, grads)
    return pytree.map(torch.add, total, grads)


def scale_by(grads: Tree, factor: Tensor, donate: bool) -> Tree:
    """grads * factor; in the buffers of `grads` where they are donated, as in `add`."""
    if donate:
        return overwrite(lambda name, g: g.mul_(factor), name_tree(grads), grads)
    return pytree.map(lambda g: g * factor, grads)


def update_donated(
    tx: GradientTransformation, policy: Policy, grads: Tree, state: TrainState, skipped: Tensor, ema_decay: float
) -> TrainState:
    """The state after the optimizer's update, in the buffers of `state`; `state` itself where the step is skipped."""
    if bool(skipped):
        return state
    target, opt_state = apply_in_place(tx, grads, state.opt_state, state.master if policy.has_master else state.params)
    params, master, extra = target, (), state.extra
    if policy.has_master:
        params, master = pytree.map(lambda p, m: p.copy_(m), state.params, target), target
    if ema_decay:
        extra = {**extra, "ema": ema_update(extra["ema"], target, ema_decay)}
    return state._replace(params=params, master=master, opt_state=opt_state, extra=extra)


def update_pure(
    tx: GradientTransformation, policy: Policy, grads: Tree, state: TrainState, skipped: Tensor, ema_decay: float
) -> TrainState:
    """The same as a pure function, which chooses by torch.where: it composes with vmap and grad."""
    before = state.master if policy.has_master else state.params
    updates, opt_state = tx.update(grads, state.opt_state, before)
    target = apply_updates(before, updates)
    params, master, extra = target, (), state.extra
    if policy.has_master:
        params, master = pytree.map(lambda m: m.to(policy.param), target), target
    if ema_decay:
        extra = {**extra, "ema": ema_update(extra["ema"], target, ema_decay)}
    new = state._replace(params=params, master=master, opt_state=opt_state, extra=extra)
    return pytree.map(lambda a, b: torch.where(skipped, a, b), state, new)


def move_scaler(policy: Policy, scaler: ScalerState | tuple, skipped: Tensor) -> ScalerState | tuple:
    """The scaler after a step; raises FloatingPointError for an overflow at the floor where the policy says so."""
    config = policy.loss_scale
    if config is None:
        return ()
    if config.at_floor == "raise":
        if transforms():
            raise ValueError('under a torch.func transform a step cannot raise; use LossScale(at_floor="hold")')
        if bool(overflow_at_floor(config, scaler, skipped)):
            raise FloatingPointError(f"the gradient is not finite and the loss scale is at its floor {config.floor:g}")
    return update_scaler(config, scaler, skipped)


def split_batch(batch: Any, micro_batches: int) -> tuple[int, list[Any]]:
    """(rows of a part, the batch's equal parts along the first dim of its leaves)."""
    named = pytree.named_leaves(batch)
    for name, leaf in named.items():
        if leaf.shape[0] % micro_batches:
            raise ValueError(f"batch[{name!r}] has {leaf.shape[0]} rows, not divisible by micro_batches={micro_batches}")
    rows = {leaf.shape[0] // micro_batches for leaf in named.values()}
    if len(rows) != 1:
        raise ValueError(f"the batch's leaves have {sorted(r * micro_batches for r in rows)} rows; they must agree")
    size = rows.pop()
    return size, [pytree.map(lambda leaf, i=i: leaf[i * size : (i + 1) * size], batch) for i in range(micro_batches)]


def positions(part: Any) -> int:
    """The number of elements of the first leaf of a batch: known before its tokens are counted."""
    return max(1, pytree.leaves(part)[0].numel())


def expect_state(plan: Plan, policy: Policy, state: TrainState, ema_decay: float) -> None:
    """Raise ValueError where the state was made for another plan or policy, or lacks the average that the step is to keep."""
    expect_like(plan.like, state.params)
    for name, leaf in pytree.named_leaves(state.params).items():
        if leaf.dtype != policy.param:
            raise ValueError(f"{name} is {leaf.dtype} and the step's policy {policy.name} has {policy.param}; give init_state that policy")
    if bool(pytree.leaves(state.master)) != policy.has_master or bool(state.scaler) != bool(policy.loss_scale):
        raise ValueError(f"the state was not made for the step's policy {policy.name}; give init_state that policy")
    if ema_decay and "ema" not in state.extra:
        raise ValueError(f"ema_decay is {ema_decay} and the state keeps no average; give init_state ema=True")


def make_eval_step(
    loss_fn: base.Model | LossFn,
    mesh: Mesh,
    *,
    policy: Policy = fp32(),  # noqa: B008
    compiled: bool = False,
) -> Callable[[Tree, Any], base.Loss]:
    """The function `(params, batch) -> Loss` without dropout: sums, to be added up over batches and divided once."""
    loss = make_loss(loss_fn, policy, mesh, Remat(), compiled)

    @torch.no_grad()
    def eval_step(params: Tree, batch: Any) -> base.Loss:
        return loss(params, batch, (), 0)

    return eval_step
