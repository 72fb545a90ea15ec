"""What a token sees in a decoder of somebody's code: found by computing, as its config need not say it.

The embedding and a layer of each kind, with random numbers for weights, take a short text with and without what no
token of it may see: tokens after it and, where documents share rows, documents before it. Whatever differs was seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.core import graph_cut
from fzero.core.draws import seeded
from fzero.models.base import Ctx
from fzero.models.batch import Batch
from fzero.models.decoders.config import IN_PYTHON
from fzero.models.module_buffers import any_numbers, layer_buffer
from fzero.models.module_functions import Layered, LayerLeaves
from fzero.models.module_split import Kind, inputs_of

BEFORE, TEXT, AFTER = 3, 5, 4  # tokens
NEAR = 1e-3  # of the largest number: what products of other shapes may differ by in float32


def expect_sight(layered: Layered, packed: bool) -> None:
    """Raise ValueError if a token sees what is after it or, packed, another document of its row; and if the layers are
    not called with [B, T, D]."""
    if packed:
        expect_sight(layered, False)
    with graph_cut.apart(), torch.no_grad(), seeded(0):
        before = BEFORE if packed else 0
        tokens = torch.arange(before + TEXT + AFTER)[None] % len(vocabulary(layered))
        beside: Batch = {"input_ids": tokens}
        if packed:
            beside["position_ids"] = torch.cat([torch.arange(n) for n in (before, TEXT, AFTER)])[None]
        text = slice(before, before + TEXT)
        part = first_difference(layered, beside, {"input_ids": tokens[:, text]}, text)
    if not part:
        return
    if packed:
        raise ValueError(
            f"{layered.name}: {part} mixes the documents of a row, which transformers is told apart by position_ids; "
            "for text use data.within_documents=false, and for chat data.packing=buckets with it, where a row has one "
            "document; pairs and classes, which share rows, need a decoder that tells documents apart"
        )
    raise ValueError(f"{layered.name}: in {part} a token sees the ones after it, so that it is no decoder{IN_PYTHON}")


def vocabulary(layered: Layered) -> Tensor:
    """The largest matrix outside of the layers."""
    return max((leaf for leaf in layered.parameters.values() if leaf.dim() == 2), key=len)


def first_difference(layered: Layered, beside: Batch, alone: Batch, text: slice) -> str:
    """The part of a decoder in which the numbers of a text differ beside others and alone; "" if none does."""
    ctx = Ctx()
    outside = {name: any_rows(leaf.shape) for name, leaf in layered.parameters.items()}
    both = [(batch, layered.prepare(batch, ctx)) for batch in (beside, alone)]
    inputs = [inputs_of(outside, prepared.buffers, batch, ctx) for batch, prepared in both]
    x: list[tuple[Tensor, ...]] = [(), ()]
    for stack, layers in layered.stacks.items():
        x = [layered.splits[p.split].before[stack](i, one) for (_, p), i, one in zip(both, inputs, x)]
        rows = tuple(beside["input_ids"].shape)
        if x[0][0].shape[:-1] != rows:
            raise ValueError(
                f"{layered.name}: {layers.names[0]} is called with {list(x[0][0].shape)} for tokens {list(rows)}, and "
                f"the activations of a decoder are [B, T, D]{IN_PYTHON}"
            )
        if differ(x[0][0][:, text], x[1][0]):
            return "the embedding" if stack == next(iter(layered.stacks)) else f"what is before {layers.names[0]}"
        drawn = torch.randn(x[0][0].shape)
        x = [(drawn, *x[0][1:]), (drawn[:, text], *x[1][1:])]
        for number, layer in enumerate(layered.templates[stack]):
            kind, at = Kind(stack, number), torch.tensor(layers.kinds.index(number))
            params = {name: any_numbers(leaf.shape) for name, leaf in layer.named_parameters()}
            results = []
            for (_, prepared), one in zip(both, x):
                args, kwargs = layered.splits[prepared.split].arguments_of(kind, one, prepared.beside)
                buffers = {name: layer_buffer(leaf, at, 0) for name, leaf in prepared.stacked[stack].items()}
                leaves = LayerLeaves(dict(params), buffers, {})
                out = layered.call_layer(kind, leaves, args, kwargs, ctx._replace(layer=at), prepared.rows)
                results.append(out[0] if isinstance(out, (tuple, list)) else out)
            if differ(results[0][:, text], results[1]):
                return layers.first(number)
    return ""


def differ(a: Tensor, b: Tensor) -> bool:
    """Whether numbers differ by more than rounding."""
    return not bool((a - b).abs().max() <= NEAR * b.abs().max())


def any_rows(shape: torch.Size) -> Tensor:
    """Random numbers in place of a leaf outside of the layers: a matrix takes the memory of a row and a column."""
    if len(shape) != 2:
        return any_numbers(shape)
    return torch.randn(shape[0] + shape[1]).as_strided(tuple(shape), (1, 1))
