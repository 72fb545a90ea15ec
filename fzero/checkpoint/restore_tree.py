"""Restore trees from a checkpoint: each rank reads its slices; errors name the leaves that do not fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint.extras import EXTRAS
from fzero.checkpoint.layout import Index
from fzero.checkpoint.manifest import Folder, Leaf
from fzero.checkpoint.moment_codes import SCALES, coded_leaves
from fzero.checkpoint.reader import THREADS, Box, open_checkpoint, read_boxes
from fzero.core import pytree
from fzero.core.arguments import checked, expect_regex
from fzero.core.pytree import Tree
from fzero.sharding import Mesh, Spec, one_process
from fzero.sharding.slices import Window, local_shape, local_windows, part_dim, ranks_per_dim, whole_shape
from fzero.train.masters import compare
from fzero.train.state import TrainState, expect_alive


@checked()
def restore(
    path: Folder,
    like: Tree,
    *,
    under: str = "",
    specs: Tree | None = None,
    mesh: Mesh | None = None,
    keep: str = "",
    drop: str = "",
    out: Tree | None = None,
) -> Tree:
    """The tree saved in the checkpoint at `path`, in the containers of `like`: this rank's shards by `specs` on `mesh`.

    A rank reads the chunks that contain its slices, and compares each with its checksum. `like` and the checkpoint must
    have the same leaves, apart from those that `under`, `keep` and `drop` select, and `extras` (see `read_extra`).

    like: a tree of tensors with the names, shapes (of this rank's shards) and dtypes to expect; leaves are returned on
    its devices, and on the CPU for the meta device.
    under: restore only the part of the state below this name: `restore(path, params, under="params")` restores the
    weights.
    specs, mesh: the layout of the shards; None: whole leaves.
    keep: a regular expression; leaves whose whole name matches are returned from `like`, whether or not the checkpoint
    has them.
    drop: a regular expression; leaves of the checkpoint whose whole name matches are ignored.
    out: a tree of CPU tensors to read into; None: new memory.

    Communicates: nothing.
    Raises ValueError naming the leaves that are missing, extra or of another shape or dtype, or a parameter whose
    master weights are others, of which `keep` keeps one, and Damaged naming leaf, chunk and file of a wrong checksum.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> state = {"params": {"w": torch.ones(2)}, "step": torch.tensor(5)}
    >>> path = checkpoint.save(tempfile.mkdtemp(), state, step=5)
    >>> checkpoint.restore(path, {"w": torch.empty(2, device="meta")}, under="params")
    {'w': tensor([1., 1.])}
    """
    for what, pattern in (("keep", keep), ("drop", drop)):
        expect_regex(what, pattern)
    expect_alive(like)
    held = open_checkpoint(path)
    mesh = one_process() if mesh is None else mesh
    leaves, spec_of = pytree.named_leaves(like), pytree.named_leaves(specs) if specs is not None else {}
    outs = pytree.named_leaves(out) if out is not None else {}
    kept = {name for name in leaves if keep and re.fullmatch(keep, name)}

    def full(name: str) -> str:
        return "/".join(part for part in (under, name) if part)

    def short(name: str) -> str:
        return name.removeprefix(under).removeprefix("/") if under else name

    wanted_leaves = {full(name): leaf for name, leaf in leaves.items() if name not in kept}
    there = {name: leaf for name, leaf in held.leaves.items() if not under or f"{name}/".startswith(f"{under}/")}
    passed = {name for name in there if short(name) in kept or (drop and re.fullmatch(drop, short(name)))}
    passed |= {name for name in there if name.startswith(EXTRAS)}
    passed |= scales_in(path, held.leaves, wanted_leaves)
    shards: dict[str, tuple[Tensor, list[Box]]] = {}
    windows: dict[str, tuple[list[Window], Index]] = {}  # and the shape of this rank's part
    for name in wanted_leaves.keys() & there.keys():
        spec = spec_of.get(short(name), Spec())
        shape = there[name].shape
        fits = fits_in(shape, spec, mesh, name)
        whole = [Window((0,) * len(shape), shape)]
        windows[name] = (local_windows(shape, spec, mesh), local_shape(shape, spec, mesh)) if fits else (whole, shape)
    check_leaves(path, wanted_leaves, {name: leaf for name, leaf in there.items() if name not in passed}, windows)
    try:
        for name in wanted_leaves:
            shards[name] = held.shard(name, *windows[name], outs.get(short(name)))
        with ThreadPoolExecutor(THREADS, "fzero-load") as pool:
            read_boxes(held, [box for _, boxes in shards.values() for box in boxes], pool)
    finally:
        held.close()
    done = {short(name): out for name, (out, _) in shards.items()}
    for name, leaf in leaves.items():
        if name in kept:
            done[name] = leaf
        elif leaf.device.type not in ("meta", "cpu"):
            done[name] = done[name].to(leaf.device)
    return with_right_masters(path, pytree.from_named(done, like), specs, mesh)


def with_right_masters(path: Folder, state: Tree, specs: Tree | None, mesh: Mesh) -> Tree:
    """What was restored; raises ValueError naming a parameter of a TrainState that is not the rounding of its master
    weights, as where only one of the two is the checkpoint's."""
    if not isinstance(state, TrainState):
        return state
    spec_of = pytree.named_leaves(specs) if specs is not None else {}
    masters = pytree.named_leaves(state.master)
    pairs = {name: tuple(spec_of.get(f"{part}/{name}", Spec()) for part in ("params", "master")) for name in masters}
    shapes = {name: whole_shape(leaf.shape, pairs[name][1], mesh) for name, leaf in masters.items()}
    if fault := compare(state, pairs, shapes, mesh):
        raise ValueError(f'{path}: {fault}, of what restore(path, state.params, under="params") returns')
    return state


def scales_in(path: Folder, there: dict[str, Leaf], wanted: Collection[str]) -> set[str]:
    """The leaves of a checkpoint that are scales of moments in codes; raises ValueError if such a moment is wanted."""
    coded = coded_leaves(there)
    if here := sorted(coded.keys() & set(wanted)):
        raise ValueError(
            f"{path}: {list_some(here)} are in 8-bit codes (train.compress); a run of fzero pretrain reads them, and "
            "restore reads the other leaves: give under=, keep= or drop="
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
    held = open_checkpoint(path)
    chosen = [name for name in held.leaves if select(name)]
    if not chosen:
        raise ValueError(f"{path}: none of its leaves is selected; they are {list_some(list(held.leaves))}")
    boxes = [held.box(name) for name in chosen]
    with ThreadPoolExecutor(THREADS, "fzero-load") as pool:
        read_boxes(held, boxes, pool)
    held.close()
    return {box.name: box.out for box in boxes}


def check_leaves(
    path: Folder, wanted: dict[str, Any], held: dict[str, Leaf], windows: dict[str, tuple[list[Window], Index]]
) -> None:
    """Raise ValueError naming the leaves that are missing, extra, or of another shape or dtype."""
    missing = [name for name in wanted if name not in held]
    extra = [name for name in held if name not in wanted]
    shapes, dtypes = [], []
    for name, leaf in wanted.items():
        if name not in held:
            continue
        if tuple(windows[name][1]) != tuple(leaf.shape):
            mine = f", this rank's part {list(windows[name][1])}" if tuple(windows[name][1]) != held[name].shape else ""
            shapes.append(f"{name} {list(held[name].shape)}{mine} (wanted {list(leaf.shape)})")
        if held[name].dtype != leaf.dtype:
            dtypes.append(f"{name} {dtype_name(held[name].dtype)} (wanted {dtype_name(leaf.dtype)})")
    groups = {"missing": missing, "extra": extra, "of another shape": shapes, "of another dtype": dtypes}
    problems = [f"{what}: {list_some(group)}" for what, group in groups.items() if group]
    if problems:
        raise ValueError(f"{path}: the checkpoint's leaves are not those of the tree; {'; '.join(problems)}")


def list_some(names: list[str]) -> str:
    """The first five names, and the number of others."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")
