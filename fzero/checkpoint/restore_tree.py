"""Trees out of a checkpoint: all leaves that are asked for, each rank its slices, and an error that names those that do not agree."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint.layout import Index
from fzero.checkpoint.manifest import Folder, Leaf
from fzero.checkpoint.reader import THREADS, Box, open_checkpoint, read_boxes
from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.sharding import Mesh, Spec, one_process
from fzero.sharding.slices import local_slice, ranks_per_dim


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
    """The tree of the checkpoint at `path`, in the containers of `like`: this rank's shards by `specs` on `mesh` (None: whole leaves).

    like: a tree of tensors of which names, shapes and dtypes are compared; they may be on the meta device (then leaves go to the CPU).
    A rank reads the chunks that its slices are in, and compares each with its checksum. All of `like` must be in the checkpoint and all
    of the checkpoint in `like`, except
    under: take the part of the state below this name only: `restore(path, params, under="params")` gives the weights;
    keep: leaves whose name this regular expression matches whole are taken from `like` as they are, whether or not the checkpoint has them;
    drop: leaves of the checkpoint whose name this matches are passed over.
    out: a tree of tensors of the CPU to fill, and to return. Else the leaves own their memory.
    Raises ValueError naming the leaves that are missing, extra or of another shape or dtype, and Damaged for the leaf, chunk and file that
    are not what was written.
    """
    held = open_checkpoint(path)
    mesh, prefix = one_process() if mesh is None else mesh, f"{under}/" if under else ""
    leaves, spec_of = pytree.named_leaves(like), pytree.named_leaves(specs) if specs is not None else {}
    outs = pytree.named_leaves(out) if out is not None else {}
    kept = {name for name in leaves if keep and re.fullmatch(keep, name)}
    wanted_leaves = {prefix + name: leaf for name, leaf in leaves.items() if name not in kept}
    there = {name: leaf for name, leaf in held.leaves.items() if name.startswith(prefix)}
    passed = {name for name in there if name.removeprefix(prefix) in kept or (drop and re.fullmatch(drop, name.removeprefix(prefix)))}
    boxes: dict[str, Box] = {}
    windows: dict[str, tuple[Index, Index]] = {}
    for name in wanted_leaves.keys() & there.keys():
        spec = spec_of.get(name.removeprefix(prefix), Spec())
        shape = there[name].shape
        fits = all(n % ranks == 0 for n, ranks in zip(shape, ranks_per_dim(spec, mesh, len(shape), name)))
        windows[name] = local_slice(shape, spec, mesh) if fits else ((), shape)
    check_leaves(path, wanted_leaves, {name: leaf for name, leaf in there.items() if name not in passed}, windows)
    try:
        for name in wanted_leaves:
            boxes[name] = held.box(name, *windows[name], outs.get(name.removeprefix(prefix)))
        with ThreadPoolExecutor(THREADS, "fzero-load") as pool:
            read_boxes(held, list(boxes.values()), pool)
    finally:
        held.close()
    done = {name.removeprefix(prefix): box.out for name, box in boxes.items()}
    for name, leaf in leaves.items():
        if name in kept:
            done[name] = leaf
        elif leaf.device.type not in ("meta", "cpu"):
            done[name] = done[name].to(leaf.device)
    return pytree.from_named(done, like)


def restore_leaves(path: Folder, select: Callable[[str], bool]) -> dict[str, Tensor]:
    """`{name: leaf}` of the leaves of the checkpoint at `path` whose name `select` is true of, checked; ValueError where it is of none."""
    held = open_checkpoint(path)
    chosen = [name for name in held.leaves if select(name)]
    if not chosen:
        raise ValueError(f"{path}: none of its leaves is selected; they are {list_some(list(held.leaves))}")
    boxes = [held.box(name) for name in chosen]
    with ThreadPoolExecutor(THREADS, "fzero-load") as pool:
        read_boxes(held, boxes, pool)
    held.close()
    return {box.name: box.out for box in boxes}


def check_leaves(path: Folder, wanted: dict[str, Any], held: dict[str, Leaf], windows: dict[str, tuple[Index, Index]]) -> None:
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
    said = [f"{what}: {list_some(group)}" for what, group in groups.items() if group]
    if said:
        raise ValueError(f"{path}: the checkpoint's leaves are not those of the tree; {'; '.join(said)}")


def list_some(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def dtype_name(dtype: torch.dtype) -> str:
    """float32 and not torch.float32."""
    return str(dtype).removeprefix("torch.")
