"""The errors of a codec from a checkpoint: as they are for the same senders, else their sum, shared by those of a run.

What a leaf's senders owe together is what must not be lost: each of N' senders takes the N'-th part of the sum over
those before, whichever they were. Errors in codes are read as what they stand for, and rounded once more where they
change. So it is with those of an optimizer that sends signs; the errors of what a rank
serves have the shape of their leaf, and are read like it. Of the momentum of ranks that move apart, and of how far they
moved, what must not be lost is the mean: it is what others begin with.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import Tensor

from fzero.checkpoint.manifest import Folder, Leaf
from fzero.checkpoint.reader import CheckpointReader, open_checkpoint
from fzero.core import pytree
from fzero.kernels.registry import Kernels
from fzero.sharding import Plan, Spec
from fzero.sharding.codec import ERROR_KINDS
from fzero.sharding.error_feedback import ERROR, SCALE, error_dtype, error_specs, errors_of
from fzero.sharding.slices import is_stacked, local_shape, local_windows
from fzero.train.codes import coder_of, errors_coder

# How the name of an optimizer's errors, or of what a rank has of its own, begins.
SIGN_PATTERN = re.compile(r"opt_state/(?:inner/)?(worker|server|extra/own|extra/moved)/")
ERRORS = ("worker", "server")


def is_error(name: str) -> bool:
    """Whether a leaf of a state is one of errors, which a checkpoint may lack, or have more of."""
    return name.startswith(ERROR) or ((kind := SIGN_PATTERN.match(name)) is not None and kind[1] in ERRORS)


def shared_errors(reader: CheckpointReader, plan: Plan, names: Collection[str]) -> dict[str, Callable[[], Tensor]]:
    """{leaf of errors in the state of a plan: what reads this rank's part}, of those that are not as in the checkpoint.

    names: the leaves of the state. Raises ValueError naming a leaf of another shape.
    """
    shapes = full_shapes(plan, names)
    specs = pytree.named_leaves({"extra": error_specs(plan)}) | specs_of_signs(plan, names)
    coder = errors_coder(plan, Kernels())
    loaders: dict[str, Callable[[], Tensor]] = {}
    for name, sources in sources_of(codes_of(reader.leaves), shapes).items():
        if is_unchanged(name, sources, reader.leaves, shapes, plan):
            continue
        share = partial(read_share, reader, sources, shapes[name], specs[name], plan)
        if coder is None or not name.startswith(ERROR):
            loaders[name] = share
        else:
            pieces = functools.cache(lambda share=share: coder.encode(share()))
            loaders[name], loaders[scale_of(name)] = (lambda i=i, pieces=pieces: pieces()[i] for i in (0, 1))
    return loaders


def codes_of(saved: Collection[str]) -> list[str]:
    """The leaves of a checkpoint without the scales of errors."""
    return [name for name in saved if not name.startswith(ERROR) or not hop_in(name).endswith(SCALE)]


def hop_in(name: str) -> str:
    """The hop of a leaf of errors, by its name."""
    return name.removeprefix(ERROR).partition("/")[0]


def scale_of(name: str) -> str:
    """The leaf of the scales of errors in codes."""
    return f"{ERROR}{hop_in(name)}{SCALE}/{leaf_of(name)}"


def full_shapes(plan: Plan, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """{leaf of errors among `names`, those of the state of a plan: the shape of all of it}."""
    errors = errors_of(plan)
    shapes = {f"{ERROR}{hop}/{name}": error.shape for hop, leaves in errors.items() for name, error in leaves.items()}
    for name, kind in match_signs(names):
        leaf = plan.leaves[leaf_of(name)]
        shapes[name] = leaf.shape if kind == "server" else leaf.of_each_rank.shape
    return shapes


def specs_of_signs(plan: Plan, names: Collection[str]) -> dict[str, Spec]:
    """{leaf of an optimizer's errors, or of what a rank has of its own, among `names`: its layout}."""
    leaves = {name: plan.leaves[leaf_of(name)] for name, _ in match_signs(names)}
    kinds = dict(match_signs(names))
    return {name: leaf.served if kinds[name] == "server" else leaf.of_each_rank.spec for name, leaf in leaves.items()}


def match_signs(names: Collection[str]) -> list[tuple[str, str]]:
    """(such a leaf among `names`, its kind: "worker" or "server" of errors, "extra/own" or "extra/moved")."""
    return [(name, match[1]) for name in names if (match := SIGN_PATTERN.match(name))]


def sources_of(saved: Collection[str], current: Collection[str]) -> dict[str, list[str]]:
    """{leaf of errors of a run: those of a checkpoint whose sum it shares}: those of its own hop, and in the first hop
    of a leaf those of hops that the run has not.

    >>> sources_of([f"{ERROR}data/w", f"{ERROR}rp/w"], [f"{ERROR}data/w", f"{ERROR}data/v"])
    {'extra/codec_error/data/w': ['extra/codec_error/data/w', 'extra/codec_error/rp/w'], 'extra/codec_error/data/v': []}
    """
    sources: dict[str, list[str]] = {}
    first: set[str] = set()
    for name in current:
        leaf, kind = leaf_of(name), SIGN_PATTERN.match(name)
        if kind is not None:
            sources[name] = [
                candidate
                for candidate, saved_kind in match_signs(saved)
                if (saved_kind, leaf_of(candidate)) == (kind[1], leaf)
            ]
            continue
        lost = [
            candidate
            for candidate in saved
            if candidate.startswith(ERROR) and leaf_of(candidate) == leaf and candidate not in current
        ]
        sources[name] = [name] * (name in saved) + (lost if leaf not in first else [])
        first.add(leaf)
    return sources


def leaf_of(name: str) -> str:
    """The leaf of the parameters that errors are of."""
    return SIGN_PATTERN.sub("", name, 1) if SIGN_PATTERN.match(name) else name.removeprefix(ERROR).partition("/")[2]


def is_unchanged(
    name: str, sources: list[str], saved: Mapping[str, Leaf], shapes: Mapping[str, tuple[int, ...]], plan: Plan
) -> bool:
    """Whether a leaf of errors is that of the checkpoint, sender by sender and code by code."""
    kind = SIGN_PATTERN.match(name)
    if kind is not None and kind[1] == "server":
        return bool(sources)
    if name.startswith(ERROR):
        scales = saved[scale_of(name)].shape[-1] if scale_of(name) in saved else 0
        codec = plan.codec
        assert codec is not None  # whose errors they are
        if scales != (-(-shapes[name][-1] // codec.block) if codec.errors else 0):
            return False
    return sources == [name] and tuple(saved[name].shape) == shapes[name]


def read_share(reader: CheckpointReader, sources: list[str], shape: tuple[int, ...], spec: Spec, plan: Plan) -> Tensor:
    """This rank's share of the sum over the senders of some errors, zeros for none; the mean of what ranks have of
    their own."""
    shared = shape if not sources or is_error(sources[0]) else tuple(reader.leaves[sources[0]].shape)
    stacked = bool(sources) and is_stacked(leaf_of(sources[0]))
    out = torch.zeros(local_shape(shape, spec, plan.mesh), dtype=error_dtype(plan))
    for source in sources:
        saved_shape = tuple(reader.leaves[source].shape)
        if saved_shape[2:] != shape[2:] or (stacked and saved_shape[0] != shape[0]):
            raise ValueError(
                f"{reader.path}: {source} has shape {list(saved_shape)} there and {list(shape)} in this run; it is of "
                "another model"
            )
        for window in local_windows(shape, spec, plan.mesh):
            shard = window.view(out)
            rows = (window.start[0], window.size[0]) if stacked else (0, saved_shape[0])
            for sender in range(saved_shape[1]):
                start, size = (rows[0], sender, *window.start[2:]), (rows[1], 1, *window.size[2:])
                term = read_error(reader, source, start, size).to(out.dtype)
                shard += term if stacked else term.sum(0, keepdim=True)
    return out / math.prod(shared[1:2] if stacked else shared[:2])


def read_error(reader: CheckpointReader, source: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """A box of errors of a checkpoint, of codes what they stand for."""
    scales = reader.leaves.get(scale_of(source)) if source.startswith(ERROR) else None
    if scales is None:
        return reader.read(source, start, size)
    n = reader.leaves[source].shape[-1]
    block = next(b for b in (1 << i for i in range(4, 14)) if -(-n // b) == scales.shape[-1])
    rows = (*start[:-1], 0), (*size[:-1], n)  # whole ones, as blocks begin at their first element
    codes, scale = reader.read(source, *rows), reader.read(scale_of(source), rows[0], (*size[:-1], scales.shape[-1]))
    decoded = coder_of(ERROR_KINDS[0], block, Kernels()).decode((codes, scale), torch.float32, n)
    return decoded.narrow(-1, start[-1], size[-1])


def error_lines(path: Folder, plan: Plan, names: Collection[str] = ()) -> list[str]:
    """What a run by `plan`, whose state has leaves of these names, that begins at the checkpoint at `path` does to its
    errors, in words; [] for nothing."""
    reader = open_checkpoint(path)
    reader.close()
    shapes = full_shapes(plan, names)
    saved = [name for name in codes_of(reader.leaves) if is_error(name) or SIGN_PATTERN.match(name)]
    sources = sources_of(saved, shapes)
    lost = [name for name in saved if name not in [origin for origins in sources.values() for origin in origins]]
    lines = []
    if shapes and not saved:
        lines.append(f"codec {plan.codec}: {path} has no errors of rounded gradients; they begin at 0")
    elif changed := [
        name for name, origins in sources.items() if not is_unchanged(name, origins, reader.leaves, shapes, plan)
    ]:
        averaged = any(not is_error(name) for name in changed)
        lines.append(
            f"codec {plan.codec}: {len(changed)} leaves of errors were other ranks', or in other codes; each rank "
            f"begins with its share of their sums{', and with the mean of what each had of its own' * averaged}"
        )
    if lost:
        reason = "the run keeps none" if not shapes else "the run keeps none of theirs"
        lines.append(f"{path} has errors of rounded gradients of {len(lost)} leaves, which are dropped: {reason}")
    return lines
