"""A ZeRO stage is a row of a table; a plan is what follows from it for every leaf of a parameter tree.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch

from fzero.comm.axes import CP, EP, PP, RP, TP
from fzero.core import pytree
from fzero.core.arguments import PLAN, checked, expect_regex
from fzero.core.config_tables import check_choice, one_of
from fzero.core.precision import POLICIES, Policy
from fzero.core.pytree import Tree
from fzero.sharding.codec import Codec
from fzero.sharding.context import Context, context_for, heads_of
from fzero.sharding.experts import experts_for, experts_of, with_parts
from fzero.sharding.leaf_plan import LeafPlan, shard_over_data
from fzero.sharding.mesh import Mesh
from fzero.sharding.pipeline import Stages
from fzero.sharding.pipeline_plan import Pipeline, outside_users, stages_for, with_layers
from fzero.sharding.plan import Plan
from fzero.sharding.slices import check_dims, is_stacked, largest_block, shard_dim
from fzero.sharding.spec import ALL_ON_DEVICE, Offload, Spec, Tier, match_rules, select_largest


def shapes_of(model: Any) -> Tree:
    """The parameter tree of a Model, or of a tree of tensors, as meta tensors; raises for other leaves."""
    if hasattr(model, "init") and hasattr(model, "rules"):
        return model.init(
            lambda name, shape, std=0.0, mean=0.0, dtype=None: torch.empty(shape, dtype=dtype, device="meta")
        )
    check_tree(model)
    return pytree.map(lambda x: torch.empty_like(x, device="meta"), model)


def check_tree(params: Tree) -> None:
    """Raise TypeError or ValueError, with what to write instead, if a tree is none of parameters."""
    if isinstance(params, Iterator):
        raise TypeError(
            f"the parameters are a {type(params).__name__}, which can be read once; give a tree of tensors, such as "
            "dict(module.named_parameters())"
        )
    if isinstance(params, str) or callable(params) or dataclasses.is_dataclass(params):
        if not isinstance(params, torch.nn.Module):
            description = repr(params) if isinstance(params, str) else f"a {type(params).__name__}"
            raise TypeError(
                f"the model is {description}; give a Model, such as models.build(models.preset('llama-tiny')), or a "
                "tree of parameters"
            )
        raise TypeError(
            f"the parameters are an nn.Module ({type(params).__name__}); give fzero.from_module(module, loss), or a "
            "tree of tensors, such as dict(module.named_parameters()), and a loss that calls "
            "torch.func.functional_call(module, params, ...)"
        )
    named = pytree.named_leaves(params)
    if not named:
        raise ValueError("the parameter tree has no leaves; give a tree of tensors")
    for name, leaf in named.items():
        location = f"leaf {name!r} of the parameters"
        if not isinstance(leaf, torch.Tensor):
            instead = "leave it out, or use ()" if leaf is None else "use torch.as_tensor"
            raise TypeError(f"{location} is a {type(leaf).__name__}, not a tensor; {instead}")
        if leaf.is_nested or leaf.is_quantized:
            kind = "nested" if leaf.is_nested else str(leaf.dtype)
            raise ValueError(
                f"{location} is {kind}; give a plain tensor, such as .to_padded_tensor(0.0) or .dequantize() of it"
            )
        if leaf.is_complex():
            raise ValueError(
                f"{location} is {leaf.dtype}; give torch.view_as_real of it, and use torch.view_as_complex in the loss"
            )
        if leaf.layout != torch.strided:
            raise ValueError(f"{location} is {leaf.layout}; give leaf.to_dense()")


REDUCE = ("fast", "once", "canonical")
#        params  grads  optimizer        True = sharded over dp, ep and cp when at rest
ZERO = {
    0: (False, False, False),
    1: (False, False, True),
    2: (False, True, True),
    3: (True, True, True),
}


@checked(
    "model",
    **PLAN,
    stage="zero stage is {}; it must be 0, 1, 2 or 3",
    mesh='mesh is {}; write fzero.make_mesh({{"dp": 2}}), or fzero.one_process()',
    policy=f"policy is {{}}; write fzero.bf16(), or a name: {', '.join(POLICIES)}",
    sequence='sequence is {}; write sequence=True, or sequence=fzero.Context("gather")',
    frozen="frozen is {}; write a regular expression over the leaves' names, or None",
    offload='offload is {}; write offload="" or, for example, offload="opt=host"',
    codec='codec is {}; write codec="params=int8,grads=int4", or None',
)
def zero_plan(
    stage: Annotated[int, one_of(ZERO)],
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
    expect_regex("frozen", frozen)
    policy = policy_of(policy)
    expect_reduce(reduce, mesh)
    named, sizes = pytree.named_leaves(like := shapes_of(model)), mesh.sizes
    context = context_for(sequence, model, sizes, policy.compute.itemsize)
    split = context.over_tp and sizes[TP] > 1
    pipeline = (pipeline or Pipeline()) if sizes[PP] > 1 else None
    stages = stages_for(pipeline, model, named, sizes[PP]) if pipeline else None
    compute = specs_in_use(model, named, mesh, {TP} if split else set(), stages)
    routed = experts_of(model, named, compute)
    dispatch = experts_for("auto", routed, sizes)
    for name, spec in compute.items():
        check_dims(name, named[name].shape, spec, sizes)
    offload = Offload.parse(offload) if isinstance(offload, str) else offload
    rules, never = rule_and_frozen_leaves(model)
    never |= {name for name, leaf in named.items() if not leaf.is_floating_point()}
    never |= frozen_names(frozen, [name for name in named if name not in never])
    leaves: dict[str, LeafPlan] = {}
    for name, x in named.items():
        specs = stage_specs(name, tuple(x.shape), compute[name], sizes, (*ZERO[stage], reduce), name in rules)
        dtype = policy.param if x.is_floating_point() else x.dtype
        if name in rules and x.is_floating_point():  # steps which a narrow dtype would round away
            dtype = torch.promote_types(policy.state, torch.float32)
        flags = name not in never, name in rules
        leaves[name] = LeafPlan(name, tuple(x.shape), dtype, compute[name], *specs, sizes, *flags)
    leaves = with_offload(leaves, offload, policy.state)
    float8 = gathered_as_float8(getattr(getattr(model, "traits", None), "linear", ""), leaves, policy)
    options = pipeline, stages, context if sizes[CP] > 1 else None, heads_of(model, sizes[TP]), 0, dispatch, routed
    users = outside_users(model, named, stages)
    plan = Plan(stage, mesh, policy, like, leaves, reduce, split, offload.acts.memory, float8, *options, outside=users)
    return plan if codec is None else coded_plan(plan, codec)


def specs_in_use(
    model: Any, named: Mapping[str, Any], mesh: Mesh, partial_axes: set[str], stages: Stages | None
) -> dict[str, Spec]:
    """The specs of the leaves as the model's code sees them: over `partial_axes` they are used differently."""
    compute = {name: with_partial(spec, partial_axes) for name, spec in compute_specs(model, dict(named), mesh).items()}
    return with_layers(with_parts(compute, named, mesh.ep.size), dict(named), model, stages)


def rule_and_frozen_leaves(model: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The leaves that a rule of a Model moves, and those and the others that no gradient does."""
    if not hasattr(model, "rules"):
        return frozenset(), frozenset()
    rule_leaves = frozenset(model.traits.leaf_rules)
    return rule_leaves, rule_leaves | model.traits.frozen


def gathered_as_float8(linear: str, leaves: Mapping[str, LeafPlan], policy: Policy) -> frozenset[str]:
    """The names of the leaves that are gathered over dp as float8 numbers: those of tensorwise products."""
    gathered = {name: leaf for name, leaf in leaves.items() if leaf.params.over_data}
    if policy.gather != "float8" or not gathered:
        return frozenset()
    instead = f"policy {policy.name} gathers weights as float8, and"
    if not linear:
        raise ValueError(f"{instead} the model says of no leaf that linear products alone use it; use bf16_float8")
    names = frozenset(name for name in gathered if re.fullmatch(linear, name) and gathered[name].dtype == policy.param)
    for name in sorted(names):
        if not gathered[name].params.memory.on_device:
            raise ValueError(
                f"{instead} {name} rests in memory {gathered[name].params.memory!r}; use bf16_float8, or leave the "
                "parameters on the device"
            )
    return names


def policy_of(policy: Policy | str) -> Policy:
    """The policy, or the one of that name; raises ValueError for another name."""
    if not isinstance(policy, str):
        return policy
    check_choice("policy", policy, POLICIES)
    return POLICIES[policy]()


def expect_reduce(reduce: str, mesh: Mesh) -> None:
    """Raise ValueError for a way of sums that does not exist, or not on this mesh."""
    one_of(REDUCE).check("reduce", reduce)
    if reduce == "canonical" and mesh.data_size & (mesh.data_size - 1):
        raise ValueError(
            f'reduce="canonical" needs dp x rp x ep to be a power of two and it is {mesh.data_size}; use reduce="fast"'
        )


def frozen_names(frozen: str | None, names: list[str]) -> frozenset[str]:
    """The names that the regex matches; raises ValueError for none or all."""
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


def compute_specs(model: Any, named: dict[str, Any], mesh: Mesh) -> dict[str, Spec]:
    """The model's own specs by leaf name: from its rules, or whole leaves for a plain parameter tree."""
    if not hasattr(model, "rules"):
        return {name: Spec(((),) * leaf.dim()) for name, leaf in named.items()}
    texts = match_rules(model.rules(mesh), list(named), subject="the model's sharding rules")
    return {name: Spec.parse(text) for name, text in texts.items()}


def with_partial(spec: Spec, axes: set[str]) -> Spec:
    """The spec with a sum owed over those of `axes` that do not shard it."""
    return replace(spec, partial=spec.partial | {a for a in axes if a not in spec.axes})


def stage_specs(
    name: str,
    shape: tuple[int, ...],
    compute: Spec,
    sizes: Mapping[str, int],
    row: tuple[bool, bool, bool, str],
    moved: bool,
) -> tuple[Spec, Spec, Spec, Spec]:
    """The specs of a leaf at rest: of its parameter, gradient, optimizer state, and between micro-batches."""
    whole, shards = replace(compute, partial=frozenset()), shard_over_data(name, shape, compute, sizes)
    params_cut, grads_cut, opt_cut, reduce = row
    grads = shards if reduce == "canonical" or (grads_cut and reduce == "fast") else whole
    if reduce != "canonical":
        owed = (axis for axis in compute.partial_axes if axis not in grads.axes and sizes[axis] > 1)
        grads = replace(grads, partial=frozenset(owed))
    use, opt = shards if params_cut and not moved else whole, shards if opt_cut else whole
    over_pp = shard_over_pp(name, shape, opt, sizes)
    # Such a parameter rests as its optimizer state does: it is gathered before its use in any case.
    return over_pp if over_pp != opt and not moved else use, grads, over_pp, use


def shard_over_pp(name: str, shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> Spec:
    """The spec of a leaf outside the layers with pp behind the axes of its first dim, if that divides."""
    ranks = sizes[PP] * math.prod(sizes[a] for a in spec.dims[0]) if spec.dims else 0
    if sizes[PP] == 1 or is_stacked(name) or not ranks or shape[0] % ranks:
        return spec
    return replace(spec, dims=((*spec.dims[0], PP), *spec.dims[1:]))


def with_offload(leaves: dict[str, LeafPlan], offload: Offload, state: torch.dtype) -> dict[str, LeafPlan]:
    """The leaves with the memories of an offload. state: the dtype of what an update reads and writes."""
    fetched = {name: leaf.dtype for name, leaf in leaves.items() if not leaf.moved}
    trained = {name: state for name, leaf in leaves.items() if leaf.trained}
    for group, dtypes in (("params", fetched), ("grads", trained), ("opt", trained)):
        leaves = with_memory(leaves, group, getattr(offload, group), dtypes)
    return leaves


def with_memory(
    leaves: dict[str, LeafPlan], group: str, tier: Tier, dtypes: Mapping[str, torch.dtype]
) -> dict[str, LeafPlan]:
    """The leaves with a tier's memory for the largest ones that hold its fraction of the group's bytes."""
    if tier.memory.on_device:
        return leaves  # as the model's own rules have them
    sizes = {name: leaves[name].numel(getattr(leaves[name], group)) * dtype.itemsize for name, dtype in dtypes.items()}
    out = dict(leaves)
    for name in select_largest(sizes, tier.fraction):
        out[name] = replace(out[name], **{group: replace(getattr(out[name], group), memory=tier.memory)})
    return out


def coded_plan(plan: Plan, codec: Codec | str) -> Plan:
    """The plan with a codec; raises ValueError for one that does not go with the plan."""
    codec = Codec.parse(codec) if isinstance(codec, str) else codec
    expect_codec(codec, plan, plan.on_disk)
    fit = [leaf for leaf in plan.leaves.values() if leaf.is_matrix]
    if codec.signs:
        # What pp shards beside the layers is summed over the stages that use it, behind the sums over data ranks.
        fit = [leaf for leaf in fit if leaf.trained and (plan.mesh.pp.size == 1 or leaf.stacked)]
        return replace(plan, codec=codec, coded_grads=frozenset(leaf.name for leaf in fit if leaf.served_by_all))
    leaves = dict(plan.leaves)
    if codec.hpz:
        leaves = {name: shard_over_nodes(leaf) for name, leaf in leaves.items()}
        fit = [leaves[leaf.name] for leaf in fit]
    gathered = frozenset(leaf.name for leaf in fit if codec.params and leaf.use.over_data)
    summed = [leaf for leaf in fit if codec.grads and leaf.trained]
    if codec.loco is not None:  # what a sum loses on its way back to all ranks is the error of no sender
        summed = [leaf for leaf in summed if leaf.rounds_once]
        expect_blocks(codec, summed)
    names = frozenset(leaf.name for leaf in summed)
    return replace(plan, leaves=leaves, codec=codec, coded=gathered, coded_grads=names)


def expect_blocks(codec: Codec, leaves: Sequence[LeafPlan]) -> None:
    """Raise ValueError for rows of errors in codes that are cut inside a block."""
    parts = {leaf.name: (leaf.shape[-1], leaf.ranks("+".join(leaf.compute.dims[-1]))) for leaf in leaves}
    cut = {name: size // n for name, (size, n) in parts.items() if n > 1}
    wrong = [name for name, size in cut.items() if size % codec.block]
    if codec.errors and wrong:
        fits = largest_block(cut.values(), 8192)
        raise ValueError(
            f"codec {codec}: rows of {wrong[0]} are cut into parts of {cut[wrong[0]]} elements, which blocks of "
            f"{codec.block} do not divide; {f'use block={fits}, or ' if fits else ''}leave errors out"
        )


def shard_over_nodes(leaf: LeafPlan) -> LeafPlan:
    """The spec with rp added behind the other axes of a leaf's sharded dim, where that divides it."""
    dim = shard_dim(leaf.name)
    specs = {group: getattr(leaf, group) for group in ("params", "opt", "use")}
    ranks = max(leaf.ranks("+".join(spec.dims[dim])) for spec in specs.values()) if leaf.shape[dim:] else 0
    if not ranks or not leaf.params.over_data or leaf.shape[dim] % (ranks * leaf.sizes[RP]):
        return leaf
    cut = {}
    for group, spec in specs.items():
        axes = [axis for axis in spec.dims[dim] if axis != PP]  # a leaf outside the layers rests over pp behind all
        dims = list(spec.dims)
        dims[dim] = (*axes, RP, *spec.dims[dim][len(axes) :])
        cut[group] = replace(spec, dims=tuple(dims), partial=spec.partial - {RP})
    return replace(leaf, **cut)


def expect_codec(codec: Codec, plan: Plan, on_disk: bool) -> None:
    """Raise ValueError for a plan's stage, mesh, order of sums or gathers that the codec does not go with."""
    stage, sizes = plan.stage, plan.sizes
    if plan.reduce == "canonical":
        raise ValueError(
            f'codec {codec}: reduce="canonical" promises the same bits on every mesh, and rounded sums depend on it; '
            'use reduce="fast"'
        )
    if codec.signs:
        expect_signs(codec, plan)
        return
    if (codec.params or codec.hpz) and stage != 3:
        option = "params" if codec.params else "hpz"
        raise ValueError(f"codec {codec}: {option} is of stage 3, which gathers parameters, and the stage is {stage}")
    if codec.grads and stage < 2:
        raise ValueError(f"codec {codec}: grads is of stages 2 and 3, which scatter sums, and the stage is {stage}")
    if codec.loco is not None and sizes[RP] > 1 and not codec.hpz:
        raise ValueError(
            f"codec {codec}: loco keeps the error of a term that is rounded once, and sums over rp={sizes[RP]} are "
            "rounded on their way back too; write hpz (stage 3), or these ranks as dp"
        )
    if codec.loco is not None and on_disk:
        raise ValueError(
            f"codec {codec}: loco keeps errors in memory, and parameters or optimizer states rest on a disk, which has "
            "each step complete without them; offload to host, or leave loco out"
        )
    if codec.hpz and sizes[RP] == 1:
        raise ValueError(
            f"codec {codec}: hpz keeps what the ranks of a node hold together, and needs the nodes as rp, which is 1; "
            "for two nodes of 8 write the mesh dp=8,rp=2"
        )
    if codec.params and plan.policy.gather:
        raise ValueError(
            f"codec {codec}: policy {plan.policy.name} gathers weights as {plan.policy.gather} already; use another "
            "policy, or no params"
        )


def expect_signs(codec: Codec, plan: Plan) -> None:
    """Raise ValueError for what sums by signs do not go with: a plan's stage, mesh and offload."""
    sizes = plan.sizes
    if plan.stage >= 2 and plan.reduce != "once" and sizes[RP] == 1:
        raise ValueError(
            f"codec {codec}: the optimizer needs whole gradients of a step, and stage {plan.stage} sums each "
            'micro-batch into shards; use reduce="once", or stage 0 or 1 (or write these ranks as rp)'
        )
    if codec.local and plan.stage and sizes[RP] == 1:
        raise ValueError(
            f"codec {codec}: in local steps each rank moves parameters and momentum of its own, and stage {plan.stage} "
            "shares them between the ranks of dp; use stage 0, or write these ranks as rp"
        )
    if codec.local and sizes[PP] > 1:
        raise ValueError(
            f"codec {codec}: local steps leave all sums to the optimizer, and with pp={sizes[PP]} leaves outside of "
            "the layers are summed over its ranks behind them; use tp or dp"
        )
    for name, leaf in plan.leaves.items():
        if EP in leaf.compute.axes and sizes[EP] > 1:
            raise ValueError(
                f"codec {codec}: ep={sizes[EP]} shards the experts {name}, whose sums are over fewer ranks than the "
                "others'; use dp"
            )
        memory = next((m for m in (leaf.params.memory, leaf.grads.memory, leaf.opt.memory) if not m.on_device), "")
        if memory:
            raise ValueError(
                f"codec {codec}: {name} rests in memory {memory!r}, which is updated layer by layer, and signs are "
                "sent of all layers at once; offload activations alone"
            )
