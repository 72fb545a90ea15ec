"""Where each leaf rests under a ZeRO stage: the specs of parameters, gradients and optimizer states.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fzero.comm.rank_tables import SHARDS
from fzero.sharding.memory import Tier, select_largest
from fzero.sharding.mesh import Mesh
from fzero.sharding.rules import match_rules
from fzero.sharding.slices import is_stacked, local_numel, shard_dim
from fzero.sharding.spec import Spec

#        params  grads  optimizer        True = sharded over dp, ep and cp when at rest
ZERO = {
    0: (False, False, False),
    1: (False, False, True),
    2: (False, True, True),
    3: (True, True, True),
}


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
    compute: dict[str, Spec], shards: dict[str, Spec], stage: int, sizes: dict[str, int], reduce: str
) -> tuple[dict[str, Spec], dict[str, Spec], dict[str, Spec]]:
    """The specs by leaf of parameters, gradients and optimizer states at rest under a stage.

    compute, shards: the specs of each leaf as products use it, and sharded over dp, ep and cp as well. reduce: see
    `zero_plan`.
    """

    def row(sharded: bool) -> dict[str, Spec]:
        return {name: shards[name] if sharded else replace(s, partial=frozenset()) for name, s in compute.items()}

    canonical = reduce == "canonical"
    params, grads, opt = map(row, (ZERO[stage][0], canonical or (ZERO[stage][1] and reduce == "fast"), ZERO[stage][2]))
    if not canonical:
        for name, grad_spec in grads.items():
            partial = {axis for axis in compute[name].partial_axes if axis not in grad_spec.axes and sizes[axis] > 1}
            grads[name] = replace(grad_spec, partial=frozenset(partial))
    return params, grads, opt


def shard_axes(spec: Spec) -> list[str]:
    """The axes over which ZeRO shards a leaf that is used in the layout of `spec`: those that do not shard it there."""
    return [axis for axis in SHARDS if axis not in spec.axes]


def shard_over_data(name: str, shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> Spec:
    """The spec with dp, and behind it ep and cp if they are in use and do not shard the leaf anyhow, on the leaf's
    first dim, or the second if the first counts layers; as it is if that dim does not divide."""
    dim, dims = shard_dim(name), list(spec.dims)
    axes = [axis for axis in shard_axes(spec) if axis == SHARDS[0] or sizes[axis] > 1]
    if dim < len(shape) and shape[dim] % math.prod(sizes[a] for a in (*axes, *dims[dim])) == 0:
        dims[dim] = (*dims[dim], *axes)
    return replace(spec, dims=tuple(dims), partial=frozenset())


def shard_specs_over_pp(
    named: Mapping[str, Any], params: dict[str, Spec], opt: dict[str, Spec], sizes: Mapping[str, int]
) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """The specs of parameters and optimizer states at rest with pp on the leaves outside the layers, where it divides
    them. Such a parameter rests as its optimizer state does: it is gathered before its use in any case."""
    if sizes["pp"] == 1:
        return params, opt
    cut = {name: shard_over_pp(name, named[name], spec, sizes) for name, spec in opt.items()}
    return {name: cut[name] if cut[name] != opt[name] else spec for name, spec in params.items()}, cut


def shard_over_pp(name: str, leaf: Any, spec: Spec, sizes: Mapping[str, int]) -> Spec:
    """The spec of a leaf outside the stacks of layers with pp behind the axes of its first dim; as it is if that dim
    does not divide."""
    ranks = sizes["pp"] * math.prod(sizes[a] for a in spec.dims[0]) if spec.dims else 0
    if is_stacked(name) or not ranks or leaf.shape[0] % ranks:
        return spec
    return replace(spec, dims=((*spec.dims[0], "pp"), *spec.dims[1:]))


def with_memory(
    specs: dict[str, Spec], named: Mapping[str, Any], itemsizes: Mapping[str, int], sizes: Mapping[str, int], tier: Tier
) -> dict[str, Spec]:
    """The specs with the memory of a tier, for the largest leaves that hold its fraction of the bytes.

    itemsizes: the bytes of an element of each leaf that the group has, which alone count and move.
    """
    if tier.memory == "device":
        return specs  # as the model's own rules have them
    leaf_bytes = {name: local_numel(named[name].shape, specs[name], sizes) * size for name, size in itemsizes.items()}
    names = select_largest(leaf_bytes, tier.fraction)
    return {name: replace(spec, memory=tier.memory) if name in names else spec for name, spec in specs.items()}
