"""The checks of a first step that what tp or cp splits computes one thing, split and whole.

Nothing fails where a norm takes the mean of a rank's part of the features, or a loss that of a rank's tokens; the loss
is nearly right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.messages import RankError
from fzero.comm.rank_tables import any_rank, gather_rows
from fzero.core import pytree
from fzero.core.graph_tracing import is_foreign
from fzero.core.pytree import Tree
from fzero.core.stack import in_turn
from fzero.kernels.cross_entropy import counted_tokens
from fzero.models import base, forward
from fzero.models.batch import SOURCES, has_tokens, select_tokens
from fzero.models.layers import local_tokens
from fzero.models.user_functions import keyed_model
from fzero.sharding import ActivationSplit, Plan, Spec, one_process
from fzero.sharding.slices import narrow_to
from fzero.train.loss import sum_losses
from fzero.train.state import gathered, read

# The largest difference of a result or gradient, over its largest element. Sums in another order differ by 1e-6; a norm
# of half of the features by 1e-2 or more.
MAX_DIFFERENCE = {torch.float32: 1e-4, torch.float64: 1e-9}
# Of the largest gradient: the least size of another one. That of a key's bias is 0 but for rounding.
MIN_SIZE = 1e-2


class FullParams(NamedTuple):
    """The whole parameters of a model, from this rank's shards at rest."""

    plan: Plan
    leaves: dict[str, Any]  # the shards, by name
    dtype: torch.dtype

    def leaf(self, name: str, layer: int | None = None) -> Tensor:
        """A whole parameter, or a layer of it."""
        spec = self.plan.leaves[name].params
        spec = Spec(spec.dims, parts=spec.parts) if layer is None else spec.layer
        return gathered(read(self.leaves[name], layer).to(self.dtype), spec, self.plan.mesh, name)

    def below(self, folder: str, layer: int | None = None, shared: Sequence[str] = ()) -> dict[str, Tensor]:
        """The leaves of a part of the model, or of a layer of a stack, by name."""
        return {n: self.leaf(n, layer) for n in self.leaves if n.startswith(f"{folder}/") or n in shared}

    def narrow(self, name: str, leaf: Tensor, layer: bool = True) -> Tensor:
        """This rank's part of a whole layer, or parameter, under tp."""
        spec = self.plan.leaves[name].compute
        spec = Spec(spec.dims, parts=spec.parts)  # the sums that its gradient owes aside
        return narrow_to(leaf, spec.layer if layer else spec, self.plan.mesh, leaf=name).contiguous()


def check_split(model: Any, plan: Plan, params: Tree, batch: Any, ctx: base.Ctx) -> None:
    """Raise ValueError on every rank if a foreign Model's layer under tp differs from that of one process."""
    if not isinstance(model, base.Model) or not model.traits.foreign or plan.mesh.tp.size == 1:
        return
    wide = torch.promote_types(ctx.dtype, torch.float32)
    ctx = ctx._replace(dtype=wide, key=(), compiled=False, split=plan.with_slack().split)
    with torch.no_grad(), plan.mesh.ledger.phase("check"):
        ctx = forward.prepare(model, batch, ctx)
        whole = FullParams(plan, pytree.named_leaves(params), wide)
        x = model.embed(pytree.nest(whole.below("embed")), batch, ctx)
        reasons, first = [], 0
        for stack in base.stacks_of(model):
            if stack.join is not None:
                x = stack.join(pytree.nest(whole.below(stack.join_name, shared=model.shared)), x, batch, ctx)
            kinds, depth = (
                in_turn(stack.block),
                next(leaf.shape[0] for name, leaf in plan.leaves.items() if name.startswith(f"{stack.name}/")),
            )
            for i in range(min(len(kinds), depth)):
                if kinds[i] in kinds[:i]:
                    continue
                layer = whole.below(stack.name, i)
                device = next(iter(layer.values())).device
                local = ctx._replace(layer=torch.full((), first + i, device=device))
                worst, subject = compare_layer(whole, kinds[i], layer, x, local)
                if not worst <= MAX_DIFFERENCE[wide]:
                    reasons.append(f"{subject} of layer {first + i} by {worst:.1e} of its size")
            first += depth
        if any_rank(bool(reasons), plan.mesh):
            local = reasons[0] if reasons else "a gradient on another rank"
            raise ValueError(
                f"tp={plan.mesh.tp.size}: a layer that tp splits differs from a whole one: {local}; something in "
                "it, such as a norm, works over all of the features that tp splits: leave the linear layers beside it "
                "out of tp"
            )


def compare_layer(
    whole: FullParams, block: Callable[..., Any], layer: dict[str, Tensor], x: Any, ctx: base.Ctx
) -> tuple[float, str]:
    """(the largest relative difference of a block under tp from one process; of what)."""
    parts = {name: whole.narrow(name, leaf) for name, leaf in layer.items()}
    full_values = values_of(block, layer, x, ctx._replace(mesh=one_process()))
    split = values_of(block, parts, x, ctx)
    sizes = {name: float(value.abs().max()) if value.numel() else 0.0 for name, value in full_values.items()}
    min_size = MIN_SIZE * max((size for name, size in sizes.items() if not name.startswith("the result")), default=0.0)
    worst, subject = 0.0, ""
    for name, expected in full_values.items():
        expected = whole.narrow(name, expected) if name in layer else expected
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


TOKENS = 4096  # of a longer micro-batch not all are compared
PACKAGE_ENTRIES = {"tokens", "targets", "mask", "documents", SOURCES}


def check_user_split(model: Any, plan: Plan, params: Tree, batch: Any, ctx: base.Ctx) -> None:
    """Raise ValueError on all ranks if cp or tp change the loss of a Model with functions of one's own."""
    sizes = {axis: plan.mesh[axis].size for axis in ("cp", "tp")}
    if not isinstance(model, base.Model) or model.traits.foreign or max(sizes.values()) == 1:
        return
    functions = user_function_names(model)
    if not functions:
        return
    wide = torch.promote_types(ctx.dtype, torch.float32)
    ctx = ctx._replace(dtype=wide, key=(), compiled=False, split=plan.with_slack().split)
    alone = ctx._replace(mesh=one_process(), split=ActivationSplit())
    model = keyed_model(model)
    with torch.no_grad(), plan.mesh.ledger.phase("check"):
        whole, stacks = FullParams(plan, pytree.named_leaves(params), wide), base.stacks_of(model)
        blocks = tuple(f"{stack.name}/" for stack in stacks)
        leaves = {name: whole.leaf(name) for name in whole.leaves if not name.startswith(blocks)}
        layers = [whole.below(stack.name, i) for stack in stacks for i, _ in user_kinds(stack)]
        batch, (whole_loss, whole_grads, _) = run_full(model, leaves, layers, batch, ctx, alone)
        split = {name: whole.narrow(name, leaf, layer=False) for name, leaf in leaves.items()}
        split_layers = [{name: whole.narrow(name, leaf) for name, leaf in layer.items()} for layer in layers]
        axes_text = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
        remedy = "; ".join(REMEDIES[axis] for axis, size in sizes.items() if size > 1)
        failed, split_run = None, None
        try:
            split_run = run(model, split, split_layers, batch, ctx)
        except (IndexError, RuntimeError) as error:
            if isinstance(error, RankError):
                raise
            failed = error
        if any_rank(failed is not None, plan.mesh) or split_run is None:
            reason = str(failed).splitlines()[0] if failed else "on another rank"
            raise ValueError(
                f"{axes_text}: the model's own {functions} fails on a rank's tokens, and not on whole sequences: "
                f"{reason}; {remedy}"
            ) from failed
        loss, grads, ctx = split_run
        full_loss = sum_losses([whole_loss._replace(tables={})], one_process())
        summed = sum_losses([loss._replace(tables={})], plan.mesh, ("cp",))
        # What is of a sequence, as the counts of experts, is on every rank: only tokens' gradients are complete.
        tokens = batch["tokens"].shape[1]
        pairs = [
            (local_tokens(grad, ctx), local_grad)
            for grad, local_grad in zip(whole_grads, grads)
            if grad.dim() > 2 and grad.shape[1] == tokens
        ]
        differences = compare(full_loss, summed, pairs, MAX_DIFFERENCE[wide])
        names = list(differences)
        wrong = next((i for i, name in enumerate(names) if differences[name] is not None), -1)
        values = (differences[names[wrong]] if wrong >= 0 else None) or (0.0, 0.0)
        row = torch.tensor([float(wrong), *values], dtype=torch.float64, device=loss.total.device)
        table = gather_rows(row, plan.mesh, leaf="user split").tolist()
    for number, *values in table:
        if number >= 0:
            raise ValueError(
                f"{axes_text}: the model's own {functions} {describe_difference(names[int(number)], *values)}; {remedy}"
            )


REMEDIES = {
    "cp": (
        "cp cuts entries of the batch [B, T, ...] to a rank's tokens, at ctx.tokens.positions, unless whole_entries of "
        "the model names them; return sums over a rank's tokens, or add up what is of a sequence by "
        'pvary(psum(x, ctx.mesh["cp"]), ctx.mesh["cp"]) of fzero.comm.collectives and count it on rank 0 of cp alone; '
        "or use dp"
    ),
    "tp": (
        "under tp all ranks return the same sums: what uses a rank's rows of a leaf takes models.layers.enter(x, ctx), "
        "and what all ranks compute alike x itself, or with sequence parallelism "
        'all_gather_same(x, ctx.mesh["tp"], 1) of fzero.comm.collectives'
    ),
}
GRADIENT = "the gradient"


def describe_difference(name: str, full: float, parts: float) -> str:
    """What differs, of a row of `compare`."""
    if name == GRADIENT:
        return f"gives embeddings gradients that differ from those of whole sequences by {parts:.1e} of their size"
    return f"does not add up over the ranks: {name} is {parts:.6g}, and {full:.6g} of whole sequences"


def user_function_names(model: base.Model) -> str:
    """The names of a model's functions that are one's own, such as "embed and head"; "" without."""
    blocks = [kind for stack in base.stacks_of(model) for kind in in_turn(stack.block)]
    functions = {"prepare": [model.prepare], "embed": [model.embed], "block": blocks}
    functions |= {"join": list(model.join.values()), "head": [model.head]}
    return " and ".join(name for name, fs in functions.items() if any(f is not None and is_foreign(f) for f in fs))


def user_kinds(stack: base.Stack) -> list[tuple[int, Any]]:
    """(number in its stack, function) of the first layer of each kind that is one's own."""
    kinds = in_turn(stack.block)
    return [(i, kind) for i, kind in enumerate(kinds) if kind not in kinds[:i] and is_foreign(kind)]


Sums = tuple[base.Loss, list[Tensor], base.Ctx]


def run(
    model: base.Model, leaves: dict[str, Tensor], layers: list[dict[str, Tensor]], batch: base.Batch, ctx: base.Ctx
) -> Sums:
    """(the loss, its gradients by the embedding's results, the ctx of the batch)."""

    def segment_params(name: str) -> Tree:
        shared = model.shared if name != "embed" else ()
        return pytree.nest({n: leaf for n, leaf in leaves.items() if n.startswith(f"{name}/") or n in shared})

    ctx = forward.prepare(model, batch, ctx)
    batch, following, first = forward.localize_batch(model, batch, ctx), iter(layers), 0
    embedded, treedef = pytree.flatten(model.embed(segment_params("embed"), batch, ctx))
    inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in embedded]
    with torch.enable_grad():
        x = pytree.unflatten(inputs, treedef)
        for stack in base.stacks_of(model):
            if stack.join is not None:
                x = stack.join(segment_params(stack.join_name), x, batch, ctx)
            for i, kind in user_kinds(stack):
                layer = {name.split("/", 1)[1]: leaf for name, leaf in next(following).items()}
                x = kind(pytree.nest(layer), x, ctx._replace(layer=torch.full((), first + i, device=inputs[0].device)))
            first += len(in_turn(stack.block))
        loss = model.head(segment_params("head"), x, batch, ctx)
        grad_inputs = [x for x in inputs if x.requires_grad]
        grads = [None] * len(grad_inputs)
        if loss.total.requires_grad:
            grads = torch.autograd.grad(loss.total, grad_inputs, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(grad_inputs, grads)]
    return pytree.map(torch.Tensor.detach, loss), grads, ctx


def run_full(
    model: base.Model,
    leaves: dict[str, Tensor],
    layers: list[dict[str, Tensor]],
    batch: base.Batch,
    ctx: base.Ctx,
    alone: base.Ctx,
) -> tuple[base.Batch, Sums]:
    """(the batch that is compared, its loss on one process): of fewer tokens if it is long."""
    short_batch = fewer_tokens(model, batch, ctx)
    if short_batch is not None:
        try:
            return short_batch, run(model, leaves, layers, short_batch, alone)
        except (RuntimeError, ValueError, IndexError):
            pass  # it is of sequences of one length
    return batch, run(model, leaves, layers, batch, alone)


def fewer_tokens(model: base.Model, batch: base.Batch, ctx: base.Ctx) -> base.Batch | None:
    """The batch of about TOKENS tokens at most, those that count first; None if it may not be cut."""
    if not has_tokens(model.config) or batch["tokens"].numel() <= TOKENS:
        return None
    odd = [entry for name, entry in batch.items() if name not in PACKAGE_ENTRIES]
    if any(not entry.is_floating_point() and entry.dtype != torch.bool for entry in odd):
        return None
    rows, tokens = batch["tokens"].shape
    size = tokens
    while rows * size > TOKENS and size % 2 == 0 and is_divisible(size // 2, ctx):
        size //= 2
    counts = counted_tokens(batch["targets"], batch.get("mask")).double().sum(0)
    positions = counts.sort(descending=True, stable=True).indices[:size].sort().values
    return select_tokens(batch, positions, (SOURCES, *model.traits.whole_entries))


def is_divisible(tokens: int, ctx: base.Ctx) -> bool:
    """Whether the ranks can share sequences of so many tokens."""
    parts, cp = forward.sequence_parts(ctx), ctx.mesh.cp.size
    if cp == 1 or not ctx.split.context:
        return tokens % parts == 0
    try:
        ctx.split.context.expect_divisible(cp, tokens, parts)
    except ValueError:
        return False
    return True


def compare(
    full: base.Loss, summed: base.Loss, grads: list[tuple[Tensor, Tensor]], tolerance: float
) -> dict[str, tuple[float, float] | None]:
    """By what is compared (of whole sequences, of the ranks' parts) where they differ, else None."""
    count = float(full.num_tokens)
    out: dict[str, tuple[float, float] | None] = {
        "num_tokens": pair(count, float(summed.num_tokens), rounded(full.num_tokens, tolerance)),
        "the loss's sum": pair(
            float(full.total), float(summed.total), rounded(full.total, tolerance), MIN_SIZE * abs(count)
        ),
    }
    # A metric may count by a threshold, which rounding moves.
    for name in sorted(full.extra.keys() | summed.extra.keys()):
        full_sum, parts = (
            float(loss.extra[name].double().abs().sum()) if name in loss.extra else 0.0 for loss in (full, summed)
        )
        out[f"extra[{name!r}]"] = pair(full_sum, parts, MIN_SIZE, MIN_SIZE * abs(count))
    pairs = [(e, g) for e, g in grads if e.shape == g.shape and e.numel()]
    differences = [float((e - g).abs().max()) / (float(e.abs().max()) or 1.0) for e, g in pairs if e.isfinite().all()]
    worst = next((x for x in differences if not x <= tolerance), 0.0)
    out[GRADIENT] = (0.0, worst) if worst else None
    return out


def rounded(x: Tensor, tolerance: float) -> float:
    """`tolerance`, or what sums in the dtype of x differ by in another order, if that is more."""
    return max(tolerance, 16 * torch.finfo(x.dtype).eps) if x.is_floating_point() else tolerance


def pair(full: float, parts: float, tolerance: float, min_scale: float = 0.0) -> tuple[float, float] | None:
    """Both numbers, if they differ by more than the fraction `tolerance`, or one alone is finite."""
    if not math.isfinite(full):
        return None  # wrong on one process too
    return None if abs(full - parts) <= tolerance * max(abs(full), abs(parts), min_scale) else (full, parts)
