"""A ZeRO stage is a row of a table; a plan is what follows from it for every leaf.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fzero import pytree
from fzero.pytree import Tree
from fzero.sharding.mesh import Mesh
from fzero.sharding.rules import match_rules
from fzero.sharding.spec import Spec

#        params  grads  optimizer        True = sharded over dp when at rest
ZERO = {
    0: (False, False, False),
    1: (False, False, True),
    2: (False, True, True),
    3: (True, True, True),
}
STACKED = "blocks/"  # leaves whose first dim counts the layers


class Plan(NamedTuple):
    """Four trees of Spec over the leaves of the parameters; `print(plan)` shows the whole parallel program."""

    stage: int
    like: Tree  # the parameters' shapes, as tensors on the meta device
    compute: Tree  # as the model's code sees a leaf (a layer of it, once gathered)
    params: Tree  # at rest
    grads: Tree  # after the backward pass of a micro-batch
    opt: Tree  # of the optimizer's per-parameter state, and of the update

    def __str__(self) -> str:
        named = [pytree.named_leaves(t) for t in (self.like, self.compute, self.params, self.grads, self.opt)]
        like = named[0]
        head = ("leaf", "shape", "elements", "compute", "params", "grads", "optimizer")
        rows = [head] + [
            (
                n,
                "×".join(str(s) for s in x.shape) or "scalar",
                f"{x.numel():,}",
                *(str(specs[n]) for specs in named[1:]),
            )
            for n, x in like.items()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
        total = sum(x.numel() for x in like.values())
        return "\n".join([f"ZeRO stage {self.stage}, {total:,} parameters", *lines])


def shapes_of(model: Any) -> Tree:
    """The parameter tree of a Model, or of a tree of tensors, as meta tensors: shapes and dtypes without memory."""
    if hasattr(model, "init"):
        return model.init(lambda name, shape, std=0.0, mean=0.0: torch.empty(shape, device="meta"))
    return pytree.map(lambda x: torch.empty_like(x, device="meta"), model)


def zero_plan(stage: int, model: Any, mesh: Mesh, *, over: str = "dp") -> Plan:
    """The plan of a ZeRO stage for `model` (a Model, or the parameter tree of a plain loss function) on `mesh`.

    At rest a sharded leaf is split over the axis `over` on its first dim, or the second where the first counts layers
    (`blocks/...`), behind whatever axes the model's own rules put there.
    Raises ValueError for an unknown stage, an axis the mesh lacks, and rules that do not fit the leaves.
    """
    if stage not in ZERO:
        raise ValueError(f"zero stage is {stage!r}; it must be 0, 1, 2 or 3")
    size = mesh[over].size
    like = shapes_of(model)
    named = pytree.named_leaves(like)
    if hasattr(model, "rules"):
        texts = match_rules(model.rules, list(named), what="the model's sharding rules")
        compute = {name: Spec.parse(text) for name, text in texts.items()}
    else:
        compute = {name: Spec(((),) * leaf.dim()) for name, leaf in named.items()}
    for name, spec in compute.items():
        if len(spec.dims) != named[name].dim():
            raise ValueError(f"{name}: its spec {spec} has {len(spec.dims)} dims and the leaf has {named[name].dim()}")

    def at_rest(name: str, spec: Spec) -> Spec:
        dim = 1 if name.startswith(STACKED) else 0
        shape = named[name].shape
        if dim >= len(shape) or shape[dim] % size:
            return spec
        dims = list(spec.dims)
        dims[dim] = (*dims[dim], over)
        return Spec(tuple(dims), spec.partial, spec.memory)

    rows = [{n: at_rest(n, s) if sharded else s for n, s in compute.items()} for sharded in ZERO[stage]]
    return Plan(stage, like, *(pytree.from_named(specs, like) for specs in (compute, *rows)))
