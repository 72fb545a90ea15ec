"""Layers of a step as graphs of plain operators, without Python between them, for shapes that come again."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.device import is_fake
from fzero.core.operator_program import operators_of
from fzero.core.pytree import Tree
from fzero.kernels.registry import Kernels
from fzero.models import Ctx
from fzero.models.base import Cache, TokenLayout
from fzero.sharding import Mesh

USES = 48  # uses of a shape, by layer, before its graph is made, which takes as long as some hundred save
GRAPHS = 256  # graphs, of the shapes used last
Layer = Callable[[Tree, Any, Ctx], Any]


@functools.lru_cache(maxsize=16)
def programs_of(mesh: Mesh, dtype: torch.dtype, kernels: Kernels) -> LayerPrograms:
    """The programs of layers under a ctx of these, which all calls of a process share."""
    return LayerPrograms(Ctx(mesh=mesh, dtype=dtype, kernels=kernels))


class LayerPrograms:
    """The functions of layers for shapes that come again; `run` computes function(params, x, ctx)."""

    def __init__(self, ctx: Ctx) -> None:
        self.ctx = ctx
        self.lock = threading.Lock()  # all calls of a process share the programs, those of other threads too
        self.uses: dict[Any, int] = {}
        self.direct_calls = 0  # of layers, by no program
        self.graphs: OrderedDict[Any, tuple[Callable[..., Any], Any] | None] = OrderedDict()

    def run(self, layer: Layer, params: Tree, x: Any, tensors: Sequence[Tensor], key: Any) -> Any:
        """x after a layer; tensors: (positions, slots, table, starts, number, *pages); key: of all their shapes."""
        key = layer, key
        if is_fake(tensors[0]):  # in a plan, which sees every operator
            return layer(params, x, context_of(self.ctx, *tensors))
        with self.lock:
            graph = self.graph_of(key, layer, params, x, tensors)
        if graph is None:
            return layer(params, x, context_of(self.ctx, *tensors))
        run, out_def = graph
        return pytree.unflatten(run(*pytree.leaves(params), *pytree.leaves(x), *tensors), out_def)

    def graph_of(
        self, key: Any, layer: Layer, params: Tree, x: Any, tensors: Sequence[Tensor]
    ) -> tuple[Callable[..., Any], Any] | None:
        """What `trace` makes of a shape that comes often; None for a direct call, which is counted."""
        if key in self.graphs:
            self.graphs.move_to_end(key)
        elif self.uses.get(key, 0) < USES:
            self.uses[key] = self.uses.get(key, 0) + 1
        else:
            self.graphs[key] = self.trace(layer, params, x, tensors)
            while len(self.graphs) > GRAPHS:
                self.uses.pop(self.graphs.popitem(last=False)[0])
        graph = self.graphs.get(key)
        self.direct_calls += graph is None
        return graph

    def trace(
        self, layer: Layer, params: Tree, x: Any, tensors: Sequence[Tensor]
    ) -> tuple[Callable[..., Any], Any] | None:
        """The graph of a layer and the structure of its result; None if its operators need values of tensors."""
        (flat, treedef), out_def = pytree.flatten((params, x)), []
        inputs = [*flat, *tensors]

        def call(inputs: list[Tensor]) -> list[Tensor]:
            p, x = pytree.unflatten(inputs[: len(flat)], treedef)
            out, structure = pytree.flatten(layer(p, x, context_of(self.ctx, *inputs[len(flat) :])))
            out_def[:] = [structure]
            return out

        run = operators_of(call, inputs)
        return None if run is None else (run, out_def[0])


def context_of(
    ctx: Ctx, positions: Tensor, slots: Tensor, table: Tensor, starts: Tensor, number: Tensor, *pages: Tensor
) -> Ctx:
    """The ctx of a layer whose pages these are."""
    cache = Cache(pages, slots, table, starts) if pages else ()
    return ctx._replace(tokens=TokenLayout(positions=positions), layer=number, cache=cache)
