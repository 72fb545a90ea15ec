"""Restore trees from a checkpoint: each rank reads its slices; errors name the leaves that do not fit.

Moments may be in 8-bit codes: a quarter of their bytes, at a relative error of up to a 16th. An optimizer's m, momentum
and v, in float32 of two dims or more and SMALL elements, are written as codes with a scale for each block of a row;
codes of v have no sign, so that none falls to 0. A run that resumes there does not have the bits of the run that went
on.

Source: Dettmers et al. 2022, "8-bit optimizers via block-wise quantization", arXiv:2110.02861, section 2.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint.layout import Index
from fzero.checkpoint.manifest import EXTRAS, Lazy, Leaf
from fzero.checkpoint.reader import Box, CheckpointReader, open_checkpoint
from fzero.core import pytree
from fzero.core.arguments import checked, expect_regex
from fzero.core.pytree import Tree
from fzero.core.storage import Folder
from fzero.kernels.optim_lowbit import blocks_of, decode, encode
from fzero.optim.leafwise import SMALL
from fzero.sharding import Mesh, Spec, one_process
from fzero.sharding.slices import Window, global_shape, local_shape, local_windows, part_dim, ranks_per_dim
from fzero.train.checks import compare
from fzero.train.state import TrainState, expect_alive

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


@checked()
def restore(
    path: Folder,
    like: Tree,
    *,
    prefix: str = "",
    specs: Tree | None = None,
    mesh: Mesh | None = None,
    retain: str = "",
    drop: str = "",
    out: Tree | None = None,
) -> Tree:
    """The tree saved in the checkpoint at `path`, in the containers of `like`: this rank's shards by `specs` on `mesh`.

    A rank reads the chunks that contain its slices, and compares each with its checksum. `like` and the checkpoint must
    have the same leaves, apart from those that `prefix`, `retain` and `drop` select, and `extras` (see `read_extra`).

    like: a tree of tensors with the names, shapes (of this rank's shards) and dtypes to expect; leaves are returned on
    its devices, and on the CPU for the meta device.
    prefix: restore only the part of the state below this name: `restore(path, params, prefix="params")` restores the
    weights.
    specs, mesh: the layout of the shards; None: whole leaves.
    retain: a regular expression; leaves whose whole name matches are returned from `like`, whether or not the
    checkpoint has them.
    drop: a regular expression; leaves of the checkpoint whose whole name matches are ignored.
    out: a tree of CPU tensors to read into; None: new memory.

    Communicates: nothing.
    Raises ValueError naming the leaves that are missing, extra or of another shape or dtype, or a parameter whose
    master weights are others, of which `retain` keeps one, and Damaged naming leaf, chunk and file of a wrong checksum.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> state = {"params": {"w": torch.ones(2)}, "step": torch.tensor(5)}
    >>> path = checkpoint.save(tempfile.mkdtemp(), state, step=5)
    >>> checkpoint.restore(path, {"w": torch.empty(2, device="meta")}, prefix="params")
    {'w': tensor([1., 1.])}
    """
    for option, pattern in (("retain", retain), ("drop", drop)):
        expect_regex(option, pattern)
    expect_alive(like)
    reader = open_checkpoint(path)
    mesh = one_process() if mesh is None else mesh
    leaves, spec_of = pytree.named_leaves(like), pytree.named_leaves(specs) if specs is not None else {}
    outs = pytree.named_leaves(out) if out is not None else {}
    retained = {name for name in leaves if retain and re.fullmatch(retain, name)}

    def full(name: str) -> str:
        return "/".join(segment for segment in (prefix, name) if segment)

    def short(name: str) -> str:
        return name.removeprefix(prefix).removeprefix("/") if prefix else name

    wanted_leaves = {full(name): leaf for name, leaf in leaves.items() if name not in retained}
    saved = {name: leaf for name, leaf in reader.leaves.items() if not prefix or f"{name}/".startswith(f"{prefix}/")}
    passed = {name for name in saved if short(name) in retained or (drop and re.fullmatch(drop, short(name)))}
    passed |= {name for name in saved if name.startswith(EXTRAS)}
    passed |= scales_in(path, reader.leaves, wanted_leaves)
    shards: dict[str, tuple[Tensor, list[Box]]] = {}
    windows: dict[str, tuple[list[Window], Index]] = {}  # and the shape of this rank's part
    for name in wanted_leaves.keys() & saved.keys():
        spec = spec_of.get(short(name), Spec())
        shape = saved[name].shape
        windows[name] = [Window((0,) * len(shape), shape)], shape
        if fits_in(shape, spec, mesh, name):
            windows[name] = local_windows(shape, spec, mesh), local_shape(shape, spec, mesh)
    check_leaves(path, wanted_leaves, {name: leaf for name, leaf in saved.items() if name not in passed}, windows)
    try:
        for name in wanted_leaves:
            shards[name] = reader.shard(name, *windows[name], outs.get(short(name)))
        reader.read_boxes([box for _, boxes in shards.values() for box in boxes])
    finally:
        reader.close()
    done = {short(name): out for name, (out, _) in shards.items()}
    for name, leaf in leaves.items():
        if name in retained:
            done[name] = leaf
        elif leaf.device.type not in ("meta", "cpu"):
            done[name] = done[name].to(leaf.device)
    return expect_masters(path, pytree.from_named(done, like), specs, mesh)


def expect_masters(path: Folder, state: Tree, specs: Tree | None, mesh: Mesh) -> Tree:
    """What was restored; raises ValueError naming a parameter that is not the rounding of its master weights."""
    if not isinstance(state, TrainState):
        return state
    spec_of = pytree.named_leaves(specs) if specs is not None else {}
    masters = pytree.named_leaves(state.master)
    pairs = {name: tuple(spec_of.get(f"{tree}/{name}", Spec()) for tree in ("params", "master")) for name in masters}
    shapes = {name: global_shape(leaf.shape, pairs[name][1], mesh) for name, leaf in masters.items()}
    if fault := compare(state, pairs, shapes, mesh):
        raise ValueError(f'{path}: {fault}, of what restore(path, state.params, prefix="params") returns')
    return state


def scales_in(path: Folder, saved: dict[str, Leaf], expected: Collection[str]) -> set[str]:
    """The leaves of a checkpoint that are scales of moments; raises ValueError for wanted ones."""
    coded = coded_leaves(saved)
    if conflicts := sorted(coded.keys() & set(expected)):
        raise ValueError(
            f"{path}: {list_some(conflicts)} are in 8-bit codes (train.compress); a run of fzero pretrain reads them, "
            "and restore reads the other leaves: give prefix=, retain= or drop="
        )
    return {f"{SCALES}{kind}/{name}" for name, kind in coded.items()}


def fits_in(shape: tuple[int, ...], spec: Spec, mesh: Mesh, name: str) -> bool:
    """Whether a leaf of this shape can be cut as a spec says."""
    if spec.rows or spec.parts:
        layers = not spec.rows or sum(map(len, spec.rows)) == shape[0]
        return layers and (not spec.parts or sum(spec.parts) == shape[part_dim(spec)])
    return all(n % ranks == 0 for n, ranks in zip(shape, ranks_per_dim(spec, mesh, len(shape), name)))


@checked()
def restore_leaves(path: Folder, select: Callable[[str], bool]) -> dict[str, Tensor]:
    """{name: leaf} of the whole leaves of the checkpoint at `path` whose names satisfy `select`, verified.

    Raises ValueError if no leaf is selected, and Damaged naming leaf, chunk and file if a checksum does not match.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> path = checkpoint.save(tempfile.mkdtemp(), {"a": torch.ones(2), "b": torch.zeros(2)}, step=0)
    >>> checkpoint.restore_leaves(path, lambda name: name == "b")
    {'b': tensor([0., 0.])}
    """
    reader = open_checkpoint(path)
    chosen = [name for name in reader.leaves if select(name)]
    if not chosen:
        raise ValueError(f"{path}: none of its leaves is selected; they are {list_some(list(reader.leaves))}")
    boxes = [reader.box(name) for name in chosen]
    reader.read_boxes(boxes)
    reader.close()
    return {box.name: box.out for box in boxes}


def check_leaves(
    path: Folder, expected: dict[str, Any], saved: dict[str, Leaf], windows: dict[str, tuple[list[Window], Index]]
) -> None:
    """Raise ValueError naming the leaves that are missing, extra, or of another shape or dtype."""
    missing = [name for name in expected if name not in saved]
    extra = [name for name in saved if name not in expected]
    shapes, dtypes = [], []
    for name, leaf in expected.items():
        if name not in saved:
            continue
        if tuple(windows[name][1]) != tuple(leaf.shape):
            local_text = (
                f", this rank's part {list(windows[name][1])}" if tuple(windows[name][1]) != saved[name].shape else ""
            )
            shapes.append(f"{name} {list(saved[name].shape)}{local_text} (wanted {list(leaf.shape)})")
        if saved[name].dtype != leaf.dtype:
            dtypes.append(f"{name} {dtype_name(saved[name].dtype)} (wanted {dtype_name(leaf.dtype)})")
    groups = {"missing": missing, "extra": extra, "of another shape": shapes, "of another dtype": dtypes}
    problems = [f"{label}: {list_some(group)}" for label, group in groups.items() if group]
    if problems:
        raise ValueError(f"{path}: the checkpoint's leaves are not those of the tree; {'; '.join(problems)}")


def list_some(names: list[str]) -> str:
    """The first five names, and the number of others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")
