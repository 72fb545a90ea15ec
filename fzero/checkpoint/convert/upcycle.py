"""A mixture of experts from a dense model: every expert a copy of its feed-forward part, and a router that is drawn.

Ref: Komatsuzaki et al. 2022, "Sparse upcycling: training mixture-of-experts from dense checkpoints", arXiv:2212.05055.
Differs: every layer gets experts, and a token's weights sum to 1, so that the model computes at first what the dense
one does.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.checkpoint.convert.huggingface import meta_leaves
from fzero.checkpoint.convert.tensor_files import TensorEntry
from fzero.core import prng
from fzero.models import LlamaConfig, MoEConfig
from fzero.sharding import slices

DENSE, ROUTED, ROUTER = "blocks/mlp/", "blocks/moe/", "blocks/moe/router"


class Upcycle(NamedTuple):
    """How many experts a layer gets, and how many of them a token uses.

    >>> Upcycle.parse("experts=8,top=2")
    Upcycle(experts=8, top=2)
    """

    experts: int
    top: int

    @classmethod
    def parse(cls, text: str) -> Upcycle:
        """The numbers of a text such as "experts=8,top=2"; raises ValueError saying what is wrong with it."""
        numbers: dict[str, int] = {}
        for item in text.split(","):
            name, _, number = item.strip().partition("=")
            if name not in cls._fields or name in numbers or not number.isdecimal():
                raise ValueError(f"--upcycle {text!r}: {item.strip()!r} is wrong; write experts=8,top=2")
            numbers[name] = int(number)
        if set(numbers) != set(cls._fields):
            raise ValueError(f"--upcycle {text!r}: it has to say both; write experts=8,top=2")
        upcycle = cls(**numbers)
        if upcycle.experts < 2:
            raise ValueError(f"--upcycle {text!r}: experts is {upcycle.experts}; a mixture has 2 at least")
        if not 1 <= upcycle.top <= upcycle.experts:
            raise ValueError(
                f"--upcycle {text!r}: top is {upcycle.top}; it must be in [1, experts = {upcycle.experts}]"
            )
        return upcycle


def upcycled_config(config: object, upcycle: Upcycle) -> MoEConfig:
    """The sizes of the mixture of a dense model's; raises ValueError for an unsuitable one."""
    if type(config) is not LlamaConfig:
        raise ValueError(
            f"--upcycle: the model is a {type(config).__name__}; experts are made of a Llama or a variation of it"
        )
    sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    try:
        return MoEConfig(**sizes, n_experts=upcycle.experts, top_k=upcycle.top)
    except ValueError as error:
        raise ValueError(f"--upcycle: {error}") from None


def upcycled_leaves(leaves: dict[str, TensorEntry], config: MoEConfig, seed: int = 0) -> dict[str, TensorEntry]:
    """The leaves of the mixture, each made on request from those of the dense model."""
    shapes, key = meta_leaves(config), prng.fold_in(prng.key(seed), "upcycle")

    def copies(dense: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
        return TensorEntry(dense.dtype, shape, lambda: dense.give().unsqueeze(1).expand(shape).contiguous())

    def router(shape: tuple[int, ...], dtype: torch.dtype) -> TensorEntry:
        def give() -> Tensor:
            box = shape, (0,) * len(shape), shape
            return slices.draw_leaf(prng.fold_in(key, ROUTER), box, 0.0, config.init_std, dtype, "cpu")

        return TensorEntry(dtype, shape, give)

    out = {}
    for name, leaf in shapes.items():
        shape = tuple(leaf.shape)
        if name == ROUTER:
            out[name] = router(shape, leaves[f"{DENSE}w_gate"].dtype)
        elif name.startswith(ROUTED):
            out[name] = copies(leaves[DENSE + name.removeprefix(ROUTED)], shape)
        else:
            out[name] = leaves[name]
    return out
