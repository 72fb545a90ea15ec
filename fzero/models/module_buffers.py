"""The buffers of a module: tensors that no training changes, and those of its layers in stacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fzero.core import graph_cut


class Constants:
    """Tensors that no training changes, kept on the devices where they are used.

    saved: the names of those that a state_dict has: the floating ones of them are weights, and have the dtype of the
    computation. The others, such as the frequencies of rotary embeddings, keep the dtype that the module gave them.
    """

    def __init__(self, leaves: dict[str, Tensor], saved: Collection[str]):
        self.leaves = leaves
        self.weights = {name for name, leaf in leaves.items() if name in saved and leaf.is_floating_point()}
        self.there: dict[Any, dict[str, Tensor]] = {}

    def on(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors on a device, for a computation in this dtype."""
        if (device, dtype) not in self.there:
            with graph_cut.apart(), torch.no_grad():
                self.there[device, dtype] = {
                    name: leaf.to(device, self.dtype_of(name, dtype)) for name, leaf in self.leaves.items()
                }
        return self.there[device, dtype]

    def blank(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The same without memory and values."""
        return {n: blank({n: x}, device, self.dtype_of(n, dtype))[n] for n, x in self.leaves.items()}

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a tensor for a computation in `dtype`."""
        return dtype if name in self.weights else self.leaves[name].dtype


def stacked_buffers(module: nn.Module, layers: Sequence[str], saved: Collection[str]) -> Constants:
    """The buffers of the layers of a stack, [L, ...], or [1, ...] where all layers have the same."""
    names = [name for name, _ in module.get_submodule(layers[0]).named_buffers()]
    stacked = {name: torch.stack([module.get_buffer(f"{one}.{name}").detach() for one in layers]) for name in names}
    same = {name: x[:1] if (x == x[:1]).all() else x for name, x in stacked.items()}
    return Constants(same, {name for name in names if f"{layers[0]}.{name}" in saved})


def blank(some: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Tensors of these shapes without memory, floating ones in `dtype`."""

    def one(x: Tensor) -> Tensor:
        kind = dtype if dtype is not None and x.is_floating_point() else x.dtype
        return torch.zeros((), dtype=kind, device=device).expand(x.shape)

    return {name: one(x) for name, x in some.items()}


def layer_buffer(stacked: Tensor, layer: Any, first: int) -> Tensor:
    """The buffer of a layer, by its number, from those of the layers from `first` on or the one that they share."""
    return stacked[0] if stacked.shape[0] == 1 else stacked.index_select(0, (layer - first).reshape(1))[0]


def any_numbers(shape: Sequence[int], rows: int | None = None) -> Tensor:
    """Random numbers of the size of weights; a matrix has so many rows of its own, which repeat, None for all."""
    if len(shape) < 2:
        return 0.5 + 0.5 * torch.randn(shape)
    few = (shape[0] if rows is None else min(rows, shape[0]), *shape[1:])
    return (torch.randn(few) / shape[-1] ** 0.5).expand(shape)
