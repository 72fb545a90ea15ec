"""A ZeRO stage is a row of a table; a plan is what follows from it for every leaf.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from fzero.core import pytree
from fzero.core.precision import Policy, fp32
from fzero.core.pytree import Tree
from fzero.sharding.describe import describe
from fzero.sharding.memory import ALL_ON_DEVICE, Offload, Tier, select_largest
from fzero.sharding.mesh import DATA, Mesh
from fzero.sharding.rules import match_rules
from fzero.sharding.slices import check_dims, local_numel, shard_dim
from fzero.sharding.spec import Spec

#        params  grads  optimizer        True = sharded over dp when at rest
ZERO = {
    0: (False, False, False),
    1: (False, False, True),
    2: (False, True, True),
    3: (True, True, True),
}
REDUCE = ("fast", "canonical")
ACCUMULATE = ("shards", "full")


@dataclass(frozen=True)
class LeafPlan:
    """Where one leaf of the parameters lives, and in which dtype it rests.

    An axis in `compute.partial` is one over which the leaf, whole on every rank, is used differently, so that the sum of its gradient is
    owed. In `grads.partial` it is one over which the sum is still owed after a micro-batch; it is made once, at the end.
    """

    shape: tuple[int, ...]  # of the whole leaf
    dtype: torch.dtype
    compute: Spec  # as the model's code sees it (a layer of it, once gathered)
    params: Spec  # at rest
    grads: Spec  # after the backward pass of a micro-batch
    opt: Spec  # of the optimizer's per-parameter state, and of the update
    trained: bool = True  # False: no gradient, no optimizer state, no update


@dataclass(frozen=True, eq=False)
class Plan:
    """A parallel program: the mesh, the dtypes, and for every leaf where it lives; `print(plan)` shows all of it with bytes.

    `compute`, `params`, `grads` and `opt` are the specs as trees like the parameters.
    """

    stage: int
    mesh: Mesh
    policy: Policy
    like: Tree  # the parameters' shapes, as tensors on the meta device
    leaves: Mapping[str, LeafPlan]  # by name
    reduce: str = "fast"  # or "canonical": one order of sums on every mesh
    sequence: bool = False  # sequence parallelism over tp
    reshard: bool = True  # gathered parameters are dropped after a layer's forward pass, and gathered again
    acts: str = "device"  # the memory of what a remat policy keeps

    def __str__(self) -> str:
        return describe(self)

    @cached_property
    def compute(self) -> Tree:
        """The specs of the leaves as the model's code sees them."""
        return self._tree("compute")

    @cached_property
    def params(self) -> Tree:
        """The specs of the parameters at rest."""
        return self._tree("params")

    @cached_property
    def grads(self) -> Tree:
        """The specs of the gradients after the backward pass of a micro-batch."""
        return self._tree("grads")

    @cached_property
    def opt(self) -> Tree:
        """The specs of the optimizer's per-parameter state."""
        return self._tree("opt")

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of the mesh's axes, by name."""
        return {axis.name: axis.size for axis in self.mesh.axes}

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The names of the leaves that are not trained."""
        return frozenset(name for name, leaf in self.leaves.items() if not leaf.trained)

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

    def _tree(self, group: str) -> Tree:
        return pytree.from_named({name: getattr(leaf, group) for name, leaf in self.leaves.items()}, self.like)


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
    policy: Policy = fp32(),  # noqa: B008
    reduce: str = "fast",
    accumulate: str = "shards",
    sequence: bool = False,
    frozen: str | None = None,
    reshard: bool = True,
    offload: Offload | str = ALL_ON_DEVICE,
) -> Plan:
    """The plan of a ZeRO stage for `model` (a Model, or the parameter tree of a plain loss function) on `mesh`.

    policy: the dtypes (see fzero.Policy): of parameters at rest, of products, of gradients on their way and in sums, of master weights.
    At rest a sharded leaf is split over dp on its first dim, or the second where the first counts layers (`blocks/...`), after whatever
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
    out = frozen_names(frozen, list(named))
    leaves = {
        name: LeafPlan(tuple(leaf.shape), policy.param, compute[name], params[name], grads[name], opt[name], name not in out)
        for name, leaf in named.items()
    }
    return Plan(stage, mesh, policy, like, leaves, reduce, sequence and sizes["tp"] > 1, reshard, offload.acts.memory)


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
