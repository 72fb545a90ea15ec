"""Checkpoints whose moments are in 8-bit codes: a quarter of their bytes, at a relative error of up to a 16th.

An optimizer's m, momentum and v, in float32 of two dims or more and SMALL elements, are written as codes with a scale
for each block of a row; codes of v have no sign, so that none falls to 0. A run that resumes there does not have the
bits of the run that went on.

Source: Dettmers et al. 2022, "8-bit optimizers via block-wise quantization", arXiv:2110.02861, section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint.leaf_source import Lazy
from fzero.checkpoint.manifest import Leaf
from fzero.checkpoint.reader import CheckpointReader, open_checkpoint
from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.core.storage import Folder
from fzero.kernels.optim_lowbit import blocks_of, decode, encode
from fzero.optim.moment_storage import SMALL
from fzero.sharding import Mesh, Spec
from fzero.sharding.slices import Window, global_shape
from fzero.train.state import TrainState

SCALES = "moment_scales/"  # how the name of the scales of a leaf begins: one of OF, and the leaf, follow
SIGNED = {
    "m": True,
    "momentum": True,
    "v": False,
}  # a moment's name in the state of an optimizer: whether it may be below 0
MIN_BLOCK, MAX_BLOCK = 16, 256  # elements of a block, powers of two


def encode_moments(state: TrainState, specs: Tree, mesh: Mesh) -> tuple[dict[str, Any], dict[str, Spec]]:
    """({name: leaf}, {name: its Spec}) of a state to save, whose moments become codes when they are written."""
    leaves, spec_of = dict[str, Any](), pytree.named_leaves(specs)
    laid, params = dict[str, Spec](), frozenset(pytree.names(state.params))
    for name, leaf in pytree.named_leaves(state).items():
        spec = laid[name] = spec_of[name]
        kind = moment_of(name, params)
        block = block_of(leaf, spec, mesh) if kind else 0
        if not block:
            leaves[name] = leaf
            continue
        blocks = (*leaf.shape[:-1], blocks_of(leaf.shape[-1], block))
        pair, scales = Pair(leaf, block, SIGNED[kind]), f"{SCALES}{kind}/{name}"
        leaves[name] = Lazy(torch.uint8, tuple(leaf.shape), pair.codes)
        leaves[scales], laid[scales] = Lazy(torch.float32, blocks, pair.scales), spec
    return leaves, laid


def moment_of(name: str, params: frozenset[str]) -> str:
    """Which moment of a parameter a leaf of a state is, a key of OF, or "".

    >>> moment_of("opt_state/1/m/layers/v/w", frozenset({"layers/v/w"})), moment_of("params/m/w", frozenset({"w"}))
    ('m', '')
    """
    parts = name.split("/")
    kind = next((parts[i - 1] for i in range(1, len(parts)) if "/".join(parts[i:]) in params), "")
    return kind if parts[0] == "opt_state" and kind in SIGNED else ""


class Pair:
    """The codes and the scales of a leaf, made once for both."""

    def __init__(self, leaf: Tensor, block: int, signed: bool) -> None:
        self.leaf, self.block, self.signed, self.cached = leaf, block, signed, list[Tensor]()

    def codes(self) -> Tensor:
        """The codes; the scales are kept."""
        codes, scales = encode(self.leaf.detach(), self.block, self.signed)
        self.cached = [scales]
        return codes

    def scales(self) -> Tensor:
        """The scales."""
        return self.cached.pop() if self.cached else encode(self.leaf.detach(), self.block, self.signed)[1]


def block_of(leaf: Any, spec: Spec, mesh: Mesh) -> int:
    """The elements of a block of a moment written in codes; 0 for one that is not."""
    if not (isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and leaf.dim() > 1):
        return 0
    full_shape = global_shape(leaf.shape, spec, mesh)
    if math.prod(full_shape) < SMALL:
        return 0
    if full_shape[-1] == leaf.shape[-1]:
        return MAX_BLOCK
    block = next(b for b in (1 << i for i in range(8, -1, -1)) if leaf.shape[-1] % b == 0)
    return block if block >= MIN_BLOCK else 0  # else blocks would straddle the shards of a row


def coded_leaves(saved: Mapping[str, Leaf]) -> dict[str, str]:
    """{leaf of a checkpoint that is in codes: its key of OF}."""
    pairs = [name.removeprefix(SCALES).partition("/") for name in saved if name.startswith(SCALES)]
    # Another tree may have such names.
    return {name: kind for kind, _, name in pairs if kind in SIGNED and name in saved}


def read_coded(reader: CheckpointReader, name: str, windows: Sequence[Window], size: Sequence[int]) -> Tensor:
    """What the codes of the windows of a leaf stand for, float32 of shape `size`."""
    out = torch.empty(tuple(size), dtype=torch.float32)
    kind = coded_leaves(reader.leaves)[name]
    named = f"{SCALES}{kind}/{name}"
    n, blocks = reader.leaves[name].shape[-1], reader.leaves[named].shape[-1]
    block = next(b for b in (1 << i for i in range(8, -1, -1)) if blocks_of(n, b) == blocks)
    for window in windows:
        shard = window.view(out)
        start, count = (*window.start[:-1], 0), (*window.size[:-1], n)  # whole rows, at which blocks begin
        codes = reader.read(name, start, count)
        scales = reader.read(named, start, (*window.size[:-1], blocks))
        shard.copy_(decode(codes, scales, SIGNED[kind], block).narrow(-1, window.start[-1], window.size[-1]))
    return out


def code_lines(path: Folder) -> list[str]:
    """What a run that begins at the checkpoint at `path` is told of its codes; [] for none."""
    reader = open_checkpoint(path)
    reader.close()
    coded = coded_leaves(reader.leaves)
    return [
        f"{path}: {len(coded)} leaves of moments are in 8-bit codes (train.compress); the run goes on from what they "
        "stand for, and not with the bits of the run that wrote it"
    ] * bool(coded)
