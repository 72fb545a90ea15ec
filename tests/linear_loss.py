"""A loss that is linear in its parameters, whose gradient is the batch: what a method sends of it is known by hand."""

import dataclasses
import math

import torch
from law_cases import FP64

from fzero import LossScale
from fzero.core import pytree

SHAPES = {"blocks/w": (2, 8, 16), "b": (8,), "u": (8, 32), "v": (8, 32)}  # b travels as it is
SCALED = dataclasses.replace(FP64, loss_scale=LossScale(init=2.0**10, window=4, hysteresis=1))


def linear(params, batch):
    named = pytree.named_leaves(params)
    return sum((batch[name] * leaf).sum() for name, leaf in named.items()), batch["b"].shape[0]


def data(step, rows, skipped):
    """The batch of a step; in those that are `skipped` one number is not finite."""
    g = torch.Generator().manual_seed(step)
    found = {name: torch.randn(rows, *shape, generator=g, dtype=torch.float64) for name, shape in SHAPES.items()}
    if step in skipped:
        found["u"][1, 2, 3] = math.inf
    return found


def first_params():
    g = torch.Generator().manual_seed(99)
    named = {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {"blocks": {"w": named.pop("blocks/w")}, **named}
