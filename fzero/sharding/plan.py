"""Plan: a parallel program as a value, the layout of every leaf; `zero_plan` makes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from fzero.comm.collectives import own_slice
from fzero.comm.communicator import Axis
from fzero.core import pytree
from fzero.core.arguments import expect_count, expect_kind
from fzero.core.precision import Policy
from fzero.core.pytree import Tree
from fzero.sharding.codec import Codec
from fzero.sharding.context import ActivationSplit, Context, Heads
from fzero.sharding.error_feedback import Hops, StoredError, stored_errors
from fzero.sharding.experts import Experts, Routed, experts_for
from fzero.sharding.leaf_plan import LeafPlan, Stored, sent_by_link, shard_axes
from fzero.sharding.mesh import Mesh
from fzero.sharding.pipeline import Schedule, Stages
from fzero.sharding.pipeline_plan import Pipeline, build_schedule
from fzero.sharding.plan_table import describe
from fzero.sharding.slices import local_shape, narrow_part, shard_dim
from fzero.sharding.spec import DEVICE, StateMemory


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
    acts: StateMemory = DEVICE  # the memory of activations kept by a remat policy
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
        return self.mesh.sizes

    @cached_property
    def trained_leaves(self) -> dict[str, LeafPlan]:
        """The leaves that are trained, by name."""
        return {name: leaf for name, leaf in self.leaves.items() if leaf.trained}

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The names of the leaves that are not trained."""
        return frozenset(self.leaves) - frozenset(self.trained_leaves)

    @cached_property
    def layers(self) -> int:
        """The layers of all stacks, on all ranks."""
        return sum({name.split("/")[0]: leaf.shape[0] for name, leaf in self.leaves.items() if leaf.stacked}.values())

    @cached_property
    def split_leaves(self) -> frozenset[str]:
        """The names of the trained leaves that are whole at rest and updated in shards."""
        return frozenset(name for name, leaf in self.leaves.items() if leaf.updated_in_shards)

    @property
    def signs(self) -> bool:
        """Whether the optimizer makes the sums of gradients by signs."""
        return self.codec is not None and self.codec.signs

    @property
    def local(self) -> bool:
        """Whether it makes few of them, between which the ranks move apart."""
        return self.codec is not None and self.codec.local

    @cached_property
    def sign_leaves(self) -> frozenset[str]:
        """The names of the leaves whose sums an optimizer makes by signs."""
        return self.coded_grads if self.signs else frozenset()

    @cached_property
    def optimizer_sums(self) -> frozenset[str]:
        """The names of the leaves whose sums an optimizer makes: with local steps all that it trains, as most steps
        make no sum."""
        return frozenset(self.trained_leaves) if self.local else self.sign_leaves

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of such sums, of their scales and errors: that in which parameters are updated, at least
        float32."""
        policy = self.policy
        return torch.promote_types(policy.state if policy.has_master else policy.param, torch.float32)

    def sign_bytes(self, name: str) -> float:
        """The bytes of a leaf's signs and scales, of which a rank sends what is not its own, twice a sum."""
        leaf = self.leaves[name]
        return leaf.numel(leaf.summed) / 8 + leaf.layers * leaf.ranks(leaf.sum_link) * self.sum_dtype.itemsize

    @cached_property
    def terms(self) -> dict[str, Stored]:
        """Of what the optimizer is given of the gradient of each trained leaf, the whole shape and the layout: the
        terms of a sum that is owed over a link are the parts of a leaf of so many times the size, as far as norms go.
        """
        stored = {name: Stored(leaf.shape, leaf.opt) for name, leaf in self.trained_leaves.items()}
        return stored | {name: self.leaves[name].terms for name in self.optimizer_sums}

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of gradients on their way."""
        # On one process there is no rank to sum over: one dtype for both is what makes canonical sums agree between
        # meshes.
        return self.policy.accumulate if self.reduce == "canonical" else self.policy.reduce

    @property
    def error_dtype(self) -> torch.dtype:
        """The dtype of the errors of codes, that of sums of gradients, float32 at least; they may rest in codes."""
        return torch.promote_types(self.policy.accumulate, torch.float32)

    @cached_property
    def stored_errors(self) -> Hops[StoredError]:
        """What a state has of the errors of codes, by hop and leaf; {} without, see error_feedback.py."""
        return stored_errors(self)

    @cached_property
    def users(self) -> dict[str, list[tuple[str, int]]]:
        """Which ranks of pp use each leaf outside the layers: by leaf the (stream of gradients, rank), in the order of
        the sum; {} without pp. In canonical order each part of the model has a stream of its own."""
        if self.stages is None:
            return {}
        streams = {
            segment: segment * (self.reduce == "canonical") for uses in self.outside.values() for _, segment in uses
        }
        return {
            name: sorted({(streams[segment], self.stages.ranks[stage]) for stage, segment in uses})
            for name, uses in sorted(self.outside.items())
        }

    @cached_property
    def memories(self) -> dict[str, set[StateMemory]]:
        """The memories in which each group rests: {"params": {"device"}, "grads": ..., "opt": ...}."""
        groups = ("params", "grads", "opt")
        return {group: {getattr(leaf, group).memory for leaf in self.leaves.values()} for group in groups}

    @property
    def on_disk(self) -> bool:
        """Whether parameters or optimizer states rest on a disk."""
        return any(memory.on_disk for memory in self.memories["params"] | self.memories["opt"])

    @cached_property
    def offloads(self) -> str:
        """The text of the memories that leaves rest in beside the device, such as "opt=host"; "" for none."""
        memories = [(group, memory) for group, memories in self.memories.items() for memory in sorted(memories)]
        return ", ".join(f"{group}={memory}" for group, memory in memories if not memory.on_device)

    @property
    def offloaded(self) -> bool:
        """Whether any parameter, gradient or optimizer state rests elsewhere than on the device."""
        return bool(self.offloads)

    @cached_property
    def local_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """The shapes of this rank's shards, by name: {"params": at rest, "opt": of those that are updated}."""
        return {
            group: {name: local_shape(leaf.shape, getattr(leaf, group), self.mesh) for name, leaf in leaves.items()}
            for group, leaves in (("params", self.leaves), ("opt", self.trained_leaves))
        }

    def schedule(self, parts: int, updates: int | None = None) -> tuple[Schedule, int]:
        """The schedule of a step of so many micro-batches, and the messages that a channel has room for.

        updates: those that are made within it; None: as the plan says. Raises ValueError if they do not suit it.
        """
        assert self.stages is not None and self.pipeline is not None
        return build_schedule(self.pipeline, self.stages, parts, self.delayed if updates is None else updates)

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

    def local_shards(self, params: Tree, *, linear: bool = False) -> Tree:
        """The part of the trained parameters (at rest) that this rank updates: views.

        linear: as a map to differentiate: the gradient of a whole leaf, the same on all ranks, is put together from
        that of each rank's part.
        """

        def narrow_leaf(name: str, leaf: torch.Tensor) -> torch.Tensor:
            if name not in self.split_leaves:
                return leaf
            axis = self.link(name)
            if linear:
                return own_slice(leaf, axis, shard_dim(name), leaf=name)
            return narrow_part(leaf, axis.rank, axis.size, shard_dim(name))

        return pytree.map_named(narrow_leaf, self.trained(params))

    def merge_trained(self, trained: Tree, base: Tree) -> Tree:
        """The tree whose trained leaves are those of `trained` and whose frozen ones are those of `base`."""
        if not self.frozen:
            return trained
        return pytree.from_named({**pytree.named_leaves(base), **trained}, base)

    def link(self, name: str) -> Axis:
        """The ranks among which ZeRO shards a leaf, as one axis: those of dp, ep and cp, of an expert those of dp and
        cp. With a codec with hpz those of a node, which share what rests over rp as well."""
        return self.mesh.link(shard_axes(self.leaves[name].compute))

    def sent_by_link(self) -> dict[str, tuple[int, int]]:
        """{link: bytes of parameters and gradients that a rank sends over it for a micro-batch, and once a step}, by
        axis or several, such as "dp+cp"; without activations. A layer is gathered for each of its passes.

        >>> params, mesh = {"w": torch.zeros(64, 512)}, fzero.fake_mesh({"dp": 2, "rp": 2})
        >>> fzero.zero_plan(3, params, mesh, codec="params=int8,grads=int8,hpz").sent_by_link()
        {'rp': (0, 16896), 'dp': (33792, 0)}
        """
        return sent_by_link(self)

    def with_updates(self, updates: int, delay_after: int = 0) -> Plan:
        """This plan with so many delayed updates a step, for update="delayed" (see Execution): the state has two
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
            offloaded = {group for group in ("grads", "opt") if getattr(leaf, group).memory.on_disk}
            for group in offloaded | ({"params"} if not leaf.params.memory.on_device else set()):
                raise ValueError(
                    f"delayed updates: {name} has its {group} in memory {getattr(leaf, group).memory!r}; both versions "
                    "of the parameters must be on the device, gradients and the optimizer's states there or on the "
                    "host; use opt=host, grads=host or acts alone"
                )
        return replace(self, delayed=updates, delay_after=delay_after)

    @cached_property
    def split(self) -> ActivationSplit:
        """How activations, attention and experts are split over ranks."""
        return ActivationSplit(self.sequence, self.context or (), self.experts or ())

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

    def with_slack(self, slack: float = math.inf) -> Plan:
        """This plan with this slack of its exchanges of rows of experts, if it has any; inf: with memory for all rows
        that can be sent, as for what cannot be computed again."""
        if self.experts is None or self.experts.form != "exchange":
            return self
        return replace(self, experts=replace(self.experts, slack=slack))

    def for_update(self, update: str) -> Plan:
        """This plan with the slack of a step that updates at this time (see Execution): one that begins before the
        gradient is whole cannot compute it again."""
        return self if update == "end" else self.with_slack()

    def _tree(self, group: str) -> Tree:
        return pytree.from_named({name: getattr(leaf, group) for name, leaf in self.leaves.items()}, self.like)
