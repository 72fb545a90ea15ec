"""A ZeRO stage is a row of a table; a plan is what follows from it for every leaf.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from fzero.comm.collectives import Axis
from fzero.core import pytree
from fzero.core.arguments import PLAN, checked, expect_count, expect_kind, expect_regex
from fzero.core.precision import POLICIES, Policy
from fzero.core.pytree import Tree
from fzero.sharding.codec import Codec, coded_plan
from fzero.sharding.context import Context
from fzero.sharding.context_cost import Heads, context_for, heads_of
from fzero.sharding.experts import Experts, Routed, experts_for, experts_of, with_parts
from fzero.sharding.memory import ALL_ON_DEVICE, Offload
from fzero.sharding.mesh import Mesh
from fzero.sharding.pipeline import Stages
from fzero.sharding.pipeline_plan import Pipeline, outside_users, stages_for, with_layers
from fzero.sharding.plan_table import describe, sent_by_link
from fzero.sharding.shapes import shapes_of
from fzero.sharding.slices import check_dims
from fzero.sharding.spec import Spec
from fzero.sharding.zero_specs import (
    ZERO,
    compute_specs,
    shard_axes,
    shard_over_data,
    shard_specs_over_pp,
    stage_specs,
    with_memory,
    with_partial,
)

REDUCE = ("fast", "once", "canonical")


@dataclass(frozen=True)
class LeafPlan:
    """The layout of one leaf of the parameters in each part of a step, and the dtype in which it rests.

    An axis in `compute.partial` is one over which the leaf, whole on every rank, is used differently, so that the sum
    of its gradient is owed. In `grads.partial` it is one over which the sum is still owed after a micro-batch; it is
    made once, at the end.

    >>> plan = fzero.zero_plan(1, {"w": torch.zeros(8, 2)}, fzero.fake_mesh({"dp": 4}))
    >>> leaf = plan.leaves["w"]
    >>> print(leaf.shape, leaf.params, leaf.grads, leaf.opt)
    (8, 2) [·, ·] [·, ·] +dp [·/dp, ·]
    """

    shape: tuple[int, ...]  # of the whole leaf
    dtype: torch.dtype
    compute: Spec  # as the model's code sees it (a layer of it, once gathered)
    params: Spec  # at rest
    grads: Spec  # after the backward pass of a micro-batch
    opt: Spec  # of the optimizer's per-parameter state, and of the update
    use: Spec  # between the micro-batches of a step: at rest, but for a leaf that pp shards until it is used
    trained: bool = True  # False: no gradient, no optimizer state, no update; leaves that are not floating never are
    moved: bool = False  # by a rule of the model once a step, see models.base.Model.after


@dataclass(frozen=True, eq=False)
class Plan:
    """A parallel program: the mesh, the dtypes, and the layout of every leaf; `zero_plan` makes it.

    `compute`, `params`, `grads` and `opt` are the specs as trees like the parameters. `print(plan)` shows all of it,
    with bytes.

    >>> plan = fzero.zero_plan(3, {"w": torch.zeros(8, 2)}, fzero.fake_mesh({"dp": 4}))
    >>> print(plan.params["w"], plan.sizes["dp"], plan.policy.param)
    [·/dp, ·] 4 torch.float32
    """

    stage: int
    mesh: Mesh
    policy: Policy
    like: Tree  # the parameters' shapes, as tensors on the meta device
    leaves: Mapping[str, LeafPlan]  # by name
    reduce: str = "fast"  # or "once" or "canonical", see `zero_plan`
    sequence: bool = False  # sequence parallelism over tp
    acts: str = "device"  # the memory of activations kept by a remat policy
    float8: frozenset[str] = frozenset()  # leaves that are gathered as the float8 numbers which products make of them
    pipeline: Pipeline | None = None  # on a mesh with pp
    stages: Stages | None = None  # of the pipeline: the layers of each, and its rank of pp
    context: Context | None = None  # on a mesh with cp
    heads: Heads | None = None  # of attention on a rank of tp
    delayed: int = 0  # the delayed updates of a step; 0: one that is not, after its gradient
    experts: Experts | None = None  # on a mesh with ep, see with_experts
    routed: Routed | None = None  # the experts of the model's blocks
    codec: Codec | None = None  # in how few bytes parameters and gradients travel
    coded: frozenset[str] = frozenset()  # leaves that are gathered in codes
    coded_grads: frozenset[str] = frozenset()  # leaves whose gradients are sent in codes
    # By leaf outside the layers the (stage, part of the model) that use it, on a mesh with pp.
    outside: Mapping[str, tuple[tuple[int, str], ...]] = field(default_factory=dict)
    delay_after: int = 0  # the first steps whose updates are not delayed

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

    @cached_property
    def rule_leaves(self) -> frozenset[str]:
        """The names of the leaves that a rule of the model moves."""
        return frozenset(name for name, leaf in self.leaves.items() if leaf.moved)

    def trained(self, tree: Tree) -> Tree:
        """The part of a tree like the parameters that is trained: the tree itself, or {name: leaf} if some leaves
        are frozen."""
        if not self.frozen:
            return tree
        return {name: leaf for name, leaf in pytree.named_leaves(tree).items() if name not in self.frozen}

    def merge_trained(self, trained: Tree, base: Tree) -> Tree:
        """The tree whose trained leaves are those of `trained` and whose frozen ones are those of `base`."""
        if not self.frozen:
            return trained
        return pytree.from_named({**pytree.named_leaves(base), **trained}, base)

    def link(self, name: str) -> Axis:
        """The ranks among which ZeRO shards a leaf, as one axis: those of dp, ep and cp, of an expert those of dp and
        cp. With a codec with hpz those of a node, which share what rests over rp as well."""
        return self.mesh.link(shard_axes(self.leaves[name].compute))

    def sent_by_link(self) -> dict[str, tuple[float, float]]:
        """{link: bytes of parameters and gradients that a rank sends over it for a micro-batch, and once a step}, by
        axis or several, such as "dp+cp"; without activations. A layer is gathered for each of its passes.

        >>> params, mesh = {"w": torch.zeros(64, 512)}, fzero.fake_mesh({"dp": 2, "rp": 2})
        >>> fzero.zero_plan(3, params, mesh, codec="params=int8,grads=int8,hpz").sent_by_link()
        {'rp': (0.0, 8448.0), 'dp': (25344.0, 0.0)}
        """
        return sent_by_link(self)

    def with_updates(self, updates: int, delay_after: int = 0) -> Plan:
        """This plan with so many delayed updates a step, for update="delayed" (see make_train_step): the state has two
        versions of the trained parameters; with pp no rank waits for the pipeline to empty between the updates, and
        with opt=host an update is made while the gradient of the next one is computed.

        delay_after: the first steps, whose updates are not delayed yet, as a young model may not bear it.

        Raises ValueError for a number of updates below 1 or of steps below 0, for parameters that do not rest on the
        device and anything but activations on a disk, and for a codec that keeps errors.

        >>> fzero.zero_plan(0, {"w": torch.zeros(8, 2)}, fzero.one_process()).with_updates(2).delayed
        2
        """
        expect_count("the number of updates", updates)
        expect_count("delay_after", delay_after, 0)
        if self.codec is not None and self.codec.feedback:
            raise ValueError(
                f"delayed updates: codec {self.codec} keeps the errors of one gradient at a time, and two are under "
                "way; leave loco or 1bit out"
            )
        for name, leaf in self.leaves.items():
            offloaded = {group for group in ("grads", "opt") if getattr(leaf, group).memory == "nvme"}
            for group in offloaded | ({"params"} if leaf.params.memory != "device" else set()):
                raise ValueError(
                    f"delayed updates: {name} has its {group} in memory {getattr(leaf, group).memory!r}; both versions "
                    "of the parameters must be on the device, gradients and the optimizer's states there or on the "
                    "host; use opt=host, grads=host or acts alone"
                )
        return replace(self, delayed=updates, delay_after=delay_after)

    def with_experts(self, experts: Experts | str) -> Plan:
        """This plan with tokens that come to the experts of other ranks of ep so: "gather", "exchange", "exchange:3"
        (see Experts), or "auto", as `zero_plan` has it: the form that sends less. Without ep nothing changes.

        Raises ValueError for an exchange of a model whose experts have a capacity.

        >>> model = fzero.models.build(fzero.models.MoEConfig(n_layers=2, n_experts=4))
        >>> plan = fzero.zero_plan(0, model, fzero.fake_mesh({"ep": 2}))
        >>> plan.experts.form, plan.with_experts("exchange:3").experts
        ('gather', Experts(form='exchange', slack=3.0, parts=1))
        """
        expect_kind("experts", experts, (Experts, str), 'write "auto" or, for example, "exchange:3"')
        return replace(self, experts=experts_for(experts, self.routed, self.sizes))

    def _tree(self, group: str) -> Tree:
        return pytree.from_named({name: getattr(leaf, group) for name, leaf in self.leaves.items()}, self.like)


@checked("stage model mesh policy sequence frozen offload codec", **PLAN)
def zero_plan(
    stage: int,
    model: Any,
    mesh: Mesh,
    *,
    policy: Policy | str = "fp32",
    reduce: str = "fast",
    sequence: bool | Context = False,
    frozen: str | None = None,
    offload: Offload | str = ALL_ON_DEVICE,
    pipeline: Pipeline | None = None,
    codec: Codec | str | None = None,
) -> Plan:
    """Return the plan of a ZeRO stage for `model` on `mesh`: where every parameter, gradient and optimizer state lives.

    At rest a sharded leaf is split over dp, ep and cp (experts, which ep shards anyhow, over dp and cp) on its first
    dim, or the second where the first counts layers (`blocks/...`), after the axes that the model's own rules put
    there; a leaf whose dim does not divide stays whole on every rank, and the printed plan says so.

    stage: 0 shards nothing, 1 the optimizer state, 2 also the gradients, 3 also the parameters.
    model: a Model, or the parameter tree of a plain loss function.
        Leaves of integers or bools keep their dtype under every policy: they have no gradient and no optimizer state.
    policy: the dtypes (see fzero.Policy), or their name, such as "bf16": of parameters at rest, of products, of
    gradients on their way and in sums, of master weights.
    reduce: how gradients are summed over the ranks. "fast": as is cheapest, at stages 2 and 3 each micro-batch into
    shards. "once": whole gradients are summed over the micro-batches, and over the ranks once a step, which takes more
    memory and fewer messages (as with no_sync of PyTorch's DDP). "canonical": each micro-batch over the ranks first, in
    the order of a binary tree, which gives bitwise the same sums for any power of two of data ranks, any stage and any
    number of micro-batches on a rank.
    sequence: True: activations are split along it over tp, outside the tensor-parallel products; Context: and over cp.
    frozen: a regex of leaves that are not trained, beside those that the model itself freezes.
    offload: the memory that each group of leaves rests in, e.g. "params=nvme,opt=nvme"; the specs say it leaf by leaf.
    pipeline: how a layered Model is cut into stages over pp, and the order of their work; None: Pipeline().
    codec: in how few bytes parameters and gradients travel, e.g. "params=int8,grads=int4,hpz"; None: as they are.
    Raises ValueError for an unknown stage or choice, a dim that its axes do not divide, rules that do not fit the
    leaves, complex leaves, and a tree of which nothing is trained.

    >>> for stage in range(4):
    ...     leaf = zero_plan(stage, {"w": torch.zeros(8, 2)}, fzero.fake_mesh({"dp": 4})).leaves["w"]
    ...     print(stage, leaf.params, leaf.grads, leaf.opt)
    0 [·, ·] [·, ·] +dp [·, ·]
    1 [·, ·] [·, ·] +dp [·/dp, ·]
    2 [·, ·] [·/dp, ·] [·/dp, ·]
    3 [·/dp, ·] [·/dp, ·] [·/dp, ·]

    Ref: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models",
    arXiv:1910.02054, section 5.
    """
    expect_kinds(mesh, sequence, frozen, offload, pipeline, codec)
    policy = policy_of(policy)
    check_choices(stage, mesh, reduce)
    named, sizes = pytree.named_leaves(like := shapes_of(model)), {axis.name: axis.size for axis in mesh.axes}
    context = context_for(sequence, model, sizes, policy.compute.itemsize)
    split = context.over_tp and sizes["tp"] > 1
    pipeline = (pipeline or Pipeline()) if sizes["pp"] > 1 else None
    stages = stages_for(pipeline, model, named, sizes["pp"]) if pipeline else None
    compute = specs_in_use(model, named, mesh, {"tp"} if split else set(), stages)
    routed = experts_of(model, named, compute)
    dispatch = experts_for("auto", routed, sizes)
    check_all_dims(named, compute, sizes)
    fixed = frozenset(name for name, leaf in named.items() if not leaf.is_floating_point())
    shards = {name: shard_over_data(name, tuple(named[name].shape), spec, sizes) for name, spec in compute.items()}
    params, grads, opt = stage_specs(compute, shards, stage, sizes, reduce)
    use, (params, opt) = params, shard_specs_over_pp(named, params, opt, sizes)
    offload = Offload.parse(offload) if isinstance(offload, str) else offload
    rule_leaves, never = rule_and_frozen_leaves(model)
    params, use = ({**specs, **unsharded_over_data(rule_leaves, compute)} for specs in (params, use))
    out = fixed | never | frozen_names(frozen, [name for name in named if name not in fixed | never])
    dtypes = stored_dtypes(named, fixed, rule_leaves, policy)
    fetched = {name: dtype.itemsize for name, dtype in dtypes.items() if name not in rule_leaves}
    trained = {name: policy.state.itemsize for name in named if name not in out}
    params = with_memory(params, named, fetched, sizes, offload.params)
    grads = with_memory(grads, named, trained, sizes, offload.grads)
    opt = with_memory(opt, named, trained, sizes, offload.opt)
    leaves = leaves_of(named, (compute, params, grads, opt, use), dtypes, out, rule_leaves)
    float8 = gathered_as_float8(getattr(model, "linear", ""), leaves, policy)
    options = pipeline, stages, context if sizes["cp"] > 1 else None, heads_of(model, sizes["tp"]), 0, dispatch, routed
    users = outside_users(model, named, stages)
    plan = Plan(stage, mesh, policy, like, leaves, reduce, split, offload.acts.memory, float8, *options, outside=users)
    return plan if codec is None else coded_plan(plan, codec)


def specs_in_use(
    model: Any, named: Mapping[str, Any], mesh: Mesh, partial_axes: set[str], stages: Stages | None
) -> dict[str, Spec]:
    """The specs of the leaves as the model's code sees them: over `partial_axes` they are used differently."""
    compute = {name: with_partial(spec, partial_axes) for name, spec in compute_specs(model, dict(named), mesh).items()}
    return with_layers(with_parts(compute, named, mesh["ep"].size), dict(named), model, stages)


def check_all_dims(named: Mapping[str, Any], specs: Mapping[str, Spec], sizes: Mapping[str, int]) -> None:
    """`check_dims` of every leaf."""
    for name, spec in specs.items():
        check_dims(name, named[name].shape, spec, sizes)


def stored_dtypes(
    named: Mapping[str, Any], fixed: frozenset[str], rule_leaves: frozenset[str], policy: Policy
) -> dict[str, torch.dtype]:
    """The dtypes of parameters at rest. fixed: those that keep theirs. rule_leaves: those that a rule moves."""
    return {
        name: leaf.dtype if name in fixed else wide_dtype(policy) if name in rule_leaves else policy.param
        for name, leaf in named.items()
    }


def leaves_of(
    named: Mapping[str, Any],
    specs: tuple[dict[str, Spec], ...],
    dtypes: Mapping[str, torch.dtype],
    frozen: frozenset[str],
    rule_leaves: frozenset[str],
) -> dict[str, LeafPlan]:
    """The LeafPlans of leaves. specs: as they are used, of parameters, gradients and optimizer states at rest, and
    between micro-batches. frozen: those that no gradient trains; rule_leaves: those of them that a rule moves."""
    leaf_plans = {}
    for name, leaf in named.items():
        compute, params, grads, opt, use = (group_specs[name] for group_specs in specs)
        flags = {"trained": name not in frozen, "moved": name in rule_leaves}
        leaf_plans[name] = LeafPlan(tuple(leaf.shape), dtypes[name], compute, params, grads, opt, use, **flags)
    return leaf_plans


def rule_and_frozen_leaves(model: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The leaves that a rule of a Model moves, and those and the others that no gradient does."""
    if not hasattr(model, "rules"):
        return frozenset(), frozenset()
    rule_leaves = frozenset(model.leaf_rules)
    return rule_leaves, rule_leaves | model.frozen


def unsharded_over_data(names: frozenset[str], compute: Mapping[str, Spec]) -> dict[str, Spec]:
    """The specs of leaves that are whole on the ranks of dp and cp, which all move them alike."""
    return {name: replace(compute[name], partial=frozenset()) for name in names}


def wide_dtype(policy: Policy) -> torch.dtype:
    """That of leaves that a rule moves, by steps which a narrow one would round away."""
    return torch.promote_types(policy.state, torch.float32)


def expect_kinds(mesh: Any, sequence: Any, frozen: Any, offload: Any, pipeline: Any, codec: Any) -> None:
    """Raise TypeError for options of a plan that are of other kinds, ValueError for what is no regex."""
    expect_kind("mesh", mesh, Mesh, 'write fzero.make_mesh({"dp": 2}), or fzero.one_process()')
    expect_kind("frozen", frozen, (str, type(None)), "write a regular expression over the leaves' names, or None")
    expect_regex("frozen", frozen)
    expect_kind("offload", offload, (Offload, str), 'write offload="" or, for example, offload="opt=host"')
    expect_kind("sequence", sequence, (bool, Context), 'write sequence=True, or sequence=fzero.Context("gather")')
    expect_kind("pipeline", pipeline, (Pipeline, type(None)), 'write fzero.Pipeline("1f1b"), or None')
    expect_kind("codec", codec, (Codec, str, type(None)), 'write codec="params=int8,grads=int4", or None')


def gathered_as_float8(linear: str, leaves: Mapping[str, LeafPlan], policy: Policy) -> frozenset[str]:
    """The names of the leaves that are gathered over dp as float8 numbers (see Policy.gather): those that tensorwise
    products alone use (`linear`, a regex, see models.base.Model).

    Their scales are found from all layers before a pass, so they must rest on the device. Raises ValueError for a model
    without such leaves, and for leaves elsewhere.
    """
    gathered = {name: leaf for name, leaf in leaves.items() if "dp" in leaf.params.axes}
    if policy.gather != "float8" or not gathered:
        return frozenset()
    instead = f"policy {policy.name} gathers weights as float8, and"
    if not linear:
        raise ValueError(f"{instead} the model says of no leaf that linear products alone use it; use bf16_float8")
    names = frozenset(name for name in gathered if re.fullmatch(linear, name) and gathered[name].dtype == policy.param)
    for name in sorted(names):
        if gathered[name].params.memory != "device":
            raise ValueError(
                f"{instead} {name} rests in memory {gathered[name].params.memory!r}; use bf16_float8, or leave the "
                "parameters on the device"
            )
    return names


def policy_of(policy: Policy | str) -> Policy:
    """The policy, or the one of that name; raises TypeError or ValueError for anything else."""
    names = ", ".join(POLICIES)
    if isinstance(policy, str) and policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}{pytree.nearest(policy, POLICIES)}; it must be one of {names}")
    expect_kind("policy", policy, (Policy, str), f"write fzero.bf16(), or a name: {names}")
    return POLICIES[policy]() if isinstance(policy, str) else policy


def check_choices(stage: int, mesh: Mesh, reduce: str) -> None:
    """Raise ValueError for a stage or choice that does not exist."""
    if type(stage) is not int or stage not in ZERO:
        raise ValueError(f"zero stage is {stage!r}; it must be 0, 1, 2 or 3")
    if reduce not in REDUCE:
        raise ValueError(f"reduce is {reduce!r}; it must be one of {', '.join(REDUCE)}")
    if reduce == "canonical" and mesh.data_size & (mesh.data_size - 1):
        raise ValueError(
            f'reduce="canonical" needs dp x rp x ep to be a power of two and it is {mesh.data_size}; use reduce="fast"'
        )


def frozen_names(frozen: str | None, names: list[str]) -> frozenset[str]:
    """The names that the regex matches; raises ValueError if that is none, or all, of them, or there are none."""
    if not names:
        raise ValueError("no leaf of the parameters is floating-point, so there is nothing to train; convert some")
    if frozen is None:
        return frozenset()
    matches = frozenset(name for name in names if re.search(frozen, name))
    if len(matches) in (0, len(names)):
        raise ValueError(
            f"frozen={frozen!r} matches {'every' if matches else 'no'} leaf of {', '.join(names[:6])}, ...; "
            "some must be trained"
        )
    return matches
