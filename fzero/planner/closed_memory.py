"""Closed forms of what the passes of a step hold on a rank: at each moment that may be its peak.

A step that recomputes and one that does not, a long micro-batch and a short one, have their peaks at different moments,
and what one holds another does not: logits are of the loss, gradients of hidden units of a layer's backward pass. So
each moment is counted by itself, and the peak is the one with the most bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fzero.kernels.linear_cross_entropy import chunk_rows


class Activations(NamedTuple):
    """The bytes of a rank's activations."""

    kept: float  # of all layers for their backward passes
    again: float  # of the layers that are recomputed at a time
    last: float  # of what is kept, what the last two layers had, which is gone when sums of gradients are made
    spare: float  # on top while a layer's backward pass computes
    stream: float  # between two layers
    loss: float  # on top while the loss and its gradients are made: see `loss_bytes`


class Weights(NamedTuple):
    """Gradients of a rank, and parameters that are gathered."""

    sums: float  # bytes of the sums of gradients during the backward pass
    first: float  # of those, of the micro-batches before the first backward pass that counts
    ends: float  # elements of the largest part outside of layers
    other: float  # and of the next one: the embedding beside a head of its own
    layer: float  # elements of the largest layer
    param: int  # bytes of an element of parameters and their gradients
    reduce: int  # bytes of an element of gradients on their way; 0: none is sent
    trained: bool  # whether these parts have gradients; those of adapters alone do not count
    ahead: int  # layers that are gathered besides the one that computes
    gathers: bool  # whether the parameters of layers are gathered
    ends_gathered: float  # bytes of what is gathered of the largest part outside of them


def moments(acts: Activations, weights: Weights) -> dict[str, dict[str, float]]:
    """Bytes by component of each moment that may be the peak of a rank's passes."""
    w = weights
    ends, layer = w.ends * w.param, w.layer * w.param
    ends_grad, layer_grad = ends * w.trained, layer * w.trained
    ends_sent, layer_sent, other_sent = (part * w.reduce * w.trained for part in (w.ends, w.layer, w.other))
    ahead = w.ahead * layer * w.gathers
    return {
        "the loss": {
            "activations": acts.kept + 3 * acts.stream + acts.loss,
            # The gradients of the embedding of the micro-batch before may still be on their way.
            "grads": w.first + ends_grad + other_sent * (w.first > 0),
            "gathered": ahead + w.ends_gathered,
        },
        "the gradients of the head": {
            "activations": acts.kept + acts.stream + ends_sent,
            "grads": w.first + ends_grad,
            "gathered": ahead,
        },
        "the last layer": {
            "activations": acts.kept + acts.again + acts.spare + ends_sent,
            "grads": w.first + layer_grad,
            "gathered": ahead + layer * w.gathers,
        },
        "a layer": {
            "activations": acts.kept - acts.last + acts.again + acts.spare + layer_sent,
            "grads": w.sums + layer_grad,
            "gathered": ahead + layer * w.gathers,
        },
        "the gradients of the embedding": {
            "activations": acts.stream,
            "grads": w.sums + ends_grad + ends_sent,
            "gathered": 0.0,
        },
    }


def peak(acts: Activations, weights: Weights) -> dict[str, float]:
    """Bytes by component of the moment of a rank's passes that has the most."""
    return max(moments(acts, weights).values(), key=lambda held: sum(held.values()))


def loss_bytes(tokens: int, columns: int, width: int, dtype: torch.dtype, kind: str) -> float:
    """The bytes in which a device of this kind makes the loss and its gradients: a chunk of the logits of `tokens`,
    and the float32 sum of the head's gradient over the chunks if there are several; width: 0 if it has none.

    >>> sizes = [loss_bytes(tokens, 128_256, 4096, torch.bfloat16, "cuda") for tokens in (4096, 8192, 16384)]
    >>> [round(size / 1e9, 2) for size in sizes]
    [1.05, 3.15, 3.15]
    """
    chunk = min(tokens, chunk_rows(tokens, columns, dtype, kind))
    return chunk * columns * dtype.itemsize + (4.0 * columns * width if tokens > chunk else 0.0)
