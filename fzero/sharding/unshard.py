"""Parameters from rest to use, as a differentiable function: the definition.

Train/streamed.py computes the same faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fzero.comm.collectives import all_gather, pvary
from fzero.comm.tables import links_of
from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.sharding.mesh import Mesh
from fzero.sharding.plan import Plan
from fzero.sharding.spec import Spec


def unshard(x: Tensor, rest: Spec, compute: Spec, mesh: Mesh, *, leaf: str = "", layer: bool = False) -> Tensor:
    """A leaf as the model's code sees it, from this rank's shard `x` of the leaf at rest. layer: x is of one of its
    layers.

    Its gradient has the layout at rest and is summed over all ranks: the transpose of a gather scatters it, and a
    tensor that every rank holds passes `pvary` over the axes on which the ranks use it differently. A leaf of integers
    has none.
    Communicates: an all_gather over dp and cp if they shard the leaf at rest, and over pp if that shards a leaf outside
    the layers; in the backward pass psum_scatters, or psums.
    """
    sizes = {axis.name: axis.size for axis in mesh.axes}
    owed = [axis for axis in compute.owed if axis not in rest.axes]
    for link in links_of(owed, sizes) if x.is_floating_point() else ():
        x = pvary(x, mesh[link], leaf=leaf)
    for dim, axes in enumerate(rest.dims[1:] if layer else rest.dims):
        for link in reversed(links_of([axis for axis in axes if axis not in compute.axes], sizes)):
            x = all_gather(x, mesh[link], dim, leaf=leaf)
    return x


def unshard_tree(params: Tree, plan: Plan) -> Tree:
    """`unshard` of every leaf of a tree of parameters, or of a part of one with the same names."""
    leaves = plan.leaves
    return pytree.map_named(
        lambda name, x: unshard(x, leaves[name].params, leaves[name].compute, plan.mesh, leaf=name), params
    )


def unshard_block(block: Callable[..., Any], plan: Plan, stack: str = "blocks") -> Callable[..., Any]:
    """`block` as a function of the parameters at rest of a layer of `stack`."""
    leaves = {name: leaf for name, leaf in plan.leaves.items() if name.startswith(f"{stack}/")}
    specs = tuple((name, leaf.params, leaf.compute) for name, leaf in leaves.items())
    return _unshard_block(block, specs, stack, plan.mesh)


@functools.lru_cache(maxsize=64)
def _unshard_block(block: Callable[..., Any], specs: tuple, stack: str, mesh: Mesh) -> Callable[..., Any]:
    at = {name: (rest, compute) for name, rest, compute in specs}

    def fetched_block(params: Tree, x: Any, ctx: Any) -> Any:
        def whole(short: str, leaf: Tensor) -> Tensor:
            name = f"{stack}/{short}"
            return unshard(leaf, *at[name], mesh, leaf=name, layer=True)

        return block(pytree.map_named(whole, params), x, ctx)

    return fetched_block
