"""Restore trees from a checkpoint: each rank reads its slices; errors name the leaves that do not fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint.layout import Index
from fzero.checkpoint.leaf_source import EXTRAS
from fzero.checkpoint.manifest import Leaf
from fzero.checkpoint.moment_codes import SCALES, coded_leaves
from fzero.checkpoint.reader import Box, open_checkpoint
from fzero.core import pytree
from fzero.core.arguments import checked, expect_regex
from fzero.core.pytree import Tree
from fzero.core.storage import Folder
from fzero.sharding import Mesh, Spec, one_process
from fzero.sharding.slices import Window, global_shape, local_shape, local_windows, part_dim, ranks_per_dim
from fzero.train.masters import compare
from fzero.train.state import TrainState, expect_alive


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
    return check_masters(path, pytree.from_named(done, like), specs, mesh)


def check_masters(path: Folder, state: Tree, specs: Tree | None, mesh: Mesh) -> Tree:
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
