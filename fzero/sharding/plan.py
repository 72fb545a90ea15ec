"""A ZeRO stage is a row of a table; a plan is what follows from it for every leaf.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.sharding.memory import ALL_ON_DEVICE, Offload, Tier, select_largest
from fzero.sharding.mesh import Mesh
from fzero.sharding.rules import match_rules
from fzero.sharding.slices import STACKED, check_dims, local_numel, shard_dim
from fzero.sharding.spec import Spec

#        params  grads  optimizer        True = sharded over dp when at rest
ZERO = {
    0: (False, False, False),
    1: (False, False, True),
    2: (False, True, True),
    3: (True, True, True),
}
DATA = ("dp", "rp")  # axes whose ranks have different rows of the batch
REDUCE = ("fast", "canonical")
ACCUMULATE = ("shards", "full")


class Plan(NamedTuple):
    """Trees of Spec over the leaves of the parameters, and what else is decided; `print(plan)` shows the whole parallel program.

    An axis in the `partial` of a compute spec is one over which the leaf, whole on every rank, is used differently, so that the sum of
    its gradient is owed. In a grads spec it is one over which the sum is still owed behind a micro-batch; it is made once, at the end.
    """

    stage: int
    like: Tree  # the parameters' shapes, as tensors on the meta device
    compute: Tree  # as the model's code sees a leaf (a layer of it, once gathered)
    params: Tree  # at rest
    grads: Tree  # behind the backward pass of a micro-batch
    opt: Tree  # of the optimizer's per-parameter state, and of the update
    sizes: Mapping[str, int]  # of the mesh's axes
    frozen: frozenset[str] = frozenset()  # leaves without gradient, optimizer state and update
    reduce: str = "fast"  # or "canonical": one order of sums on every mesh
    sequence: bool = False  # sequence parallelism over tp
    reshard: bool = True  # gathered parameters are dropped behind a layer's forward pass, and gathered again
    acts: str = "device"  # the memory of what a remat policy keeps

    def __str__(self) -> str:
        return describe(self)

    def trained(self, tree: Tree) -> Tree:
        """The part of a tree like the parameters that is trained: the tree itself, or {name: leaf} where some leaves are frozen."""
        if not self.frozen:
            return tree
        return {name: leaf for name, leaf in pytree.named_leaves(tree).items() if name not in self.frozen}

    def whole(self, trained: Tree, rest: Tree) -> Tree:
        """The tree whose trained leaves are those of `trained` and whose frozen ones are those of `rest`."""
        if not self.frozen:
            return trained
        return pytree.from_named({**pytree.named_leaves(rest), **trained}, rest)


def shapes_of(model: Any) -> Tree:
    """The parameter tree of a Model, or of a tree of tensors, as meta tensors: shapes and dtypes without memory."""
    if hasattr(model, "init"):
        return model.init(lambda name, shape, std=0.0, mean=0.0: torch.empty(shape, device="meta"))
    return pytree.map(lambda x: torch.empty_like(x, device="meta"), model)


def zero_plan(
    stage: int,
    model: Any,
    mesh: Mesh,
    *,
    reduce: str = "fast",
    accumulate: str = "shards",
    sequence: bool = False,
    frozen: str | None = None,
    reshard: bool = True,
    offload: Offload | str = ALL_ON_DEVICE,
) -> Plan:
    """The plan of a ZeRO stage for `model` (a Model, or the parameter tree of a plain loss function) on `mesh`.

    At rest a sharded leaf is split over dp on its first dim, or the second where the first counts layers (`blocks/...`), behind whatever
    axes the model's own rules put there; a leaf whose dim does not divide stays whole on every rank, and the printed plan says so.
    reduce: "canonical" gives bitwise the same sums for any power of two of data ranks, any stage and any accumulation: the gradient of
    each micro-batch is summed over the ranks first, in the order of a binary tree; "fast" sums what is cheapest first.
    accumulate: over the micro-batches of stages 2 and 3, gradient "shards" (a reduce-scatter each), or "full" gradients (one at the end).
    sequence: activations outside the tensor-parallel products are split over tp along the sequence.
    frozen: a regex of leaves that are not trained. reshard: see Plan; at stage 3.
    offload: the memory that each group of leaves rests in, e.g. "params=nvme,opt=nvme"; the specs of the plan say it leaf by leaf.
    Raises ValueError for an unknown stage or choice, a dim that its axes do not divide, and rules that do not fit the leaves.
    """
    check_choices(stage, mesh, reduce, accumulate, sequence)
    like = shapes_of(model)
    named = pytree.named_leaves(like)
    sizes = {axis.name: axis.size for axis in mesh.axes}
    owed_by_use = {"tp"} if sequence and sizes["tp"] > 1 else set()
    compute = {name: with_owed(spec, owed_by_use) for name, spec in compute_specs(model, named, mesh).items()}
    for name, spec in compute.items():
        check_dims(name, named[name].shape, spec, sizes)

    def at_rest(name: str, spec: Spec) -> Spec:
        dim, shape = shard_dim(name), named[name].shape
        dims = list(spec.dims)
        if dim >= len(shape) or shape[dim] % (sizes["dp"] * math.prod(sizes[a] for a in dims[dim])):
            return Spec(tuple(dims), memory=spec.memory)
        dims[dim] = (*dims[dim], "dp")
        return Spec(tuple(dims), memory=spec.memory)

    def gradient(name: str, spec: Spec) -> Spec:
        sharded = reduce == "canonical" or (ZERO[stage][1] and accumulate == "shards")
        kept = at_rest(name, spec) if sharded else Spec(spec.dims, memory=spec.memory)
        owed = {axis for axis in (*DATA, *spec.partial) if axis not in kept.axes and sizes[axis] > 1}
        return kept if reduce == "canonical" else Spec(kept.dims, frozenset(owed), kept.memory)

    def row(sharded: bool) -> dict[str, Spec]:
        return {n: at_rest(n, s) if sharded else Spec(s.dims, memory=s.memory) for n, s in compute.items()}

    (params, _, opt), grads = map(row, ZERO[stage]), {n: gradient(n, s) for n, s in compute.items()}
    offload = Offload.parse(offload) if isinstance(offload, str) else offload
    params, grads, opt = (
        in_memory(specs, named, sizes, tier) for specs, tier in ((params, offload.params), (grads, offload.grads), (opt, offload.opt))
    )
    trees = (pytree.from_named(specs, like) for specs in (compute, params, grads, opt))
    out = frozen_names(frozen, list(named))
    return Plan(stage, like, *trees, sizes, out, reduce, sequence and sizes["tp"] > 1, reshard, offload.acts.memory)


def in_memory(specs: dict[str, Spec], named: dict[str, Any], sizes: Mapping[str, int], tier: Tier) -> dict[str, Spec]:
    """The specs with the memory of a tier, for the largest leaves that hold its fraction of the elements."""
    if tier.memory == "device":
        return specs  # as the model's own rules have them
    names = select_largest({name: local_numel(named[name].shape, spec, sizes) for name, spec in specs.items()}, tier.fraction)
    return {name: replace(spec, memory=tier.memory) if name in names else spec for name, spec in specs.items()}


def check_choices(stage: int, mesh: Mesh, reduce: str, accumulate: str, sequence: bool) -> None:
    """Raise ValueError for a stage or choice that does not exist, and for axes that this version does not shard over."""
    if stage not in ZERO:
        raise ValueError(f"zero stage is {stage!r}; it must be 0, 1, 2 or 3")
    if reduce not in REDUCE:
        raise ValueError(f"reduce is {reduce!r}; it must be {' or '.join(REDUCE)}")
    if accumulate not in ACCUMULATE:
        raise ValueError(f"accumulate is {accumulate!r}; it must be {' or '.join(ACCUMULATE)}")
    if reduce == "canonical" and accumulate == "full":
        raise ValueError('accumulate="full" sums over micro-batches first and reduce="canonical" over ranks first; leave one of them out')
    if reduce == "canonical" and mesh.data_size & (mesh.data_size - 1):
        raise ValueError(f'reduce="canonical" needs dp x rp to be a power of two and it is {mesh.data_size}; use reduce="fast"')
    for name in ("pp", "cp", "ep"):
        if mesh[name].size > 1:
            raise ValueError(f"mesh: axis {name} has size {mesh[name].size}; this version shards over dp, rp and tp; make {name}=1")


def compute_specs(model: Any, named: dict[str, Any], mesh: Mesh) -> dict[str, Spec]:
    """The model's own specs by leaf name: from its rules, or whole leaves for a plain parameter tree."""
    if not hasattr(model, "rules"):
        return {name: Spec(((),) * leaf.dim()) for name, leaf in named.items()}
    texts = match_rules(model.rules(mesh), list(named), what="the model's sharding rules")
    return {name: Spec.parse(text) for name, text in texts.items()}


def with_owed(spec: Spec, axes: set[str]) -> Spec:
    """The spec with a sum owed over those of `axes` that do not shard it."""
    return Spec(spec.dims, spec.partial | {a for a in axes if a not in spec.axes}, spec.memory)


def frozen_names(frozen: str | None, names: list[str]) -> frozenset[str]:
    """The names that the regex matches; raises ValueError where that is none, or all, of them."""
    if frozen is None:
        return frozenset()
    found = frozenset(name for name in names if re.search(frozen, name))
    if len(found) in (0, len(names)):
        raise ValueError(
            f"frozen={frozen!r} matches {'every' if found else 'no'} leaf of {', '.join(names[:6])}, ...; some must be trained"
        )
    return found


def describe(plan: Plan, itemsize: int = 4) -> str:
    """The table that `print(plan)` shows: per leaf its specs, the bytes of one copy at rest on a rank, and what is communicated."""
    named = [pytree.named_leaves(t) for t in (plan.like, plan.compute, plan.params, plan.grads, plan.opt)]
    head = ("leaf", "shape", "compute", "params", "grads", "optimizer", "bytes a rank", "communicated")
    rows, totals = [head], [0.0, 0.0]
    for name, leaf in named[0].items():
        compute, params, grads, opt = (specs[name] for specs in named[1:])
        local = local_numel(leaf.shape, params, plan.sizes)
        if name in plan.frozen:
            grads = opt = "frozen"
        shape = "×".join(str(s) for s in leaf.shape) or "scalar"
        words, *sent = communicated(plan, name)
        totals = [total + more * itemsize for total, more in zip(totals, sent)]
        rows.append((name, shape, *map(str, (compute, params, grads, opt)), f"{local * itemsize:,}", words))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
    total = sum(x.numel() for x in named[0].values())
    at_rest = sum(local_numel(x.shape, named[2][n], plan.sizes) for n, x in named[0].items())
    used = ", ".join(f"{a}={n}" for a, n in plan.sizes.items() if n > 1) or "one process"
    extra = "".join(
        f", {text}" for text in (plan.reduce == "canonical" and "canonical sums", plan.sequence and "sequence parallel") if text
    )
    whole = [n for n in named[0] if plan.stage and "dp" not in named[4][n].axes and plan.sizes["dp"] > 1]
    notes = [f"not divisible by dp={plan.sizes['dp']}, so whole on every rank: {', '.join(whole)}"] if whole else []
    top = f"ZeRO stage {plan.stage} on {used}{extra}: {total:,} parameters, {at_rest:,} at rest on a rank"
    if any(totals):
        held = sum(itemsize * local_numel(x.shape, named[3][n], plan.sizes) for n, x in named[0].items() if n not in plan.frozen)
        notes.append(
            f"a rank sends {totals[0]:,.0f} bytes a micro-batch and {totals[1]:,.0f} a step, and holds {held:,} bytes of gradients "
            f"between micro-batches, at {itemsize} bytes an element"
        )
    return "\n".join([top, *lines, *notes])


Moves = tuple[tuple[str, str], ...]  # (operation, axis)


def moves(compute: Spec, grads: Spec, opt: Spec, sizes: Mapping[str, int]) -> tuple[Moves, Moves]:
    """What is communicated of a leaf's gradient: (behind each micro-batch, once behind the last)."""
    owed = [axis for axis in (*DATA, *sorted(compute.partial)) if sizes[axis] > 1]
    now = [("scatter" if axis in grads.axes else "psum", axis) for axis in owed if axis not in grads.partial]
    end = [("scatter" if axis in opt.axes and axis not in grads.axes else "psum", axis) for axis in owed if axis in grads.partial]
    if sizes["dp"] > 1 and "dp" in grads.axes and "dp" not in opt.axes:
        end.append(("gather", "dp"))
    return tuple(now), tuple(end)


WORDS = {"scatter": "psum_scatter {}", "psum": "psum {}", "gather": "all_gather {} of the gradient"}


def communicated(plan: Plan, name: str) -> tuple[str, float, float]:
    """(what is communicated of one leaf, in words; elements that a rank sends of it for a micro-batch; and once a step).

    What tensor parallelism sends of activations is not among it; a leaf that the head shares counts once.
    """
    compute, params, grads, opt = (pytree.named_leaves(t)[name] for t in (plan.compute, plan.params, plan.grads, plan.opt))
    n, sizes = local_numel(pytree.named_leaves(plan.like)[name].shape, compute, plan.sizes), plan.sizes
    said, sent = [], [0.0, 0.0]
    share = n * (sizes["dp"] - 1) / sizes["dp"]
    if sizes["dp"] > 1 and "dp" in params.axes:
        said.append("all_gather dp for use")
        sent[0] += share * (2 if plan.reshard and name.startswith(STACKED) else 1)
    now, end = ((), ()) if name in plan.frozen else moves(compute, grads, opt, sizes)
    cut = 1
    for when, path in enumerate((now, end)):
        for op, axis in path:
            said.append(WORDS[op].format(axis) + (" a step" if when else " a micro-batch") * (op != "gather"))
            sent[when] += n / (cut if op != "gather" else 1) * (sizes[axis] - 1) / sizes[axis] * (2 if op == "psum" else 1)
            cut *= sizes[axis] if op == "scatter" else 1
    if sizes["dp"] > 1 and name not in plan.frozen and "dp" in opt.axes and "dp" not in params.axes:
        said.append("all_gather dp behind the update")
        sent[1] += share
    return ", ".join(said) or "nothing", *sent
