"""Restore a TrainState at another mesh, stage, memory or policy; each rank reads its slices of a checkpoint or store.

The errors of a codec are as they are for the same senders; else each of N' senders takes the N'-th part of their sum,
as what the senders of a leaf owe together must not be lost. Errors in codes are rounded once more where they change. Of
the momentum of ranks that move apart, and of how far they moved, the mean is kept: it is what others begin with.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fzero import checkpoint
from fzero.checkpoint.manifest import EXTRAS, Leaf
from fzero.checkpoint.reader import CheckpointReader, open_checkpoint, reading_threads
from fzero.checkpoint.restore_tree import SCALES, coded_leaves, list_some, read_coded
from fzero.checkpoint.stored_state import StoreSnapshot
from fzero.core import pytree
from fzero.core.device import HOST
from fzero.core.precision import Policy, init_scaler
from fzero.core.storage import Folder
from fzero.kernels.registry import Kernels
from fzero.offload import Nvme
from fzero.optim.base import AVERAGE, same_leaves
from fzero.sharding import Mesh, Plan, Spec
from fzero.sharding.codec import ERROR_KINDS
from fzero.sharding.error_feedback import ERROR, SCALE, error_specs, errors_of
from fzero.sharding.slices import Window, global_shape, is_stacked, local_shape, local_windows
from fzero.train.codes import coder_for, coder_of
from fzero.train.state import LOSS, PREVIOUS, TrainState, first_stats, move_leaf, move_to_memory
from fzero.train.state_on_disk import DiskLayout, from_text, write_to_disk

# How the name of an optimizer's errors, or of what a rank has of its own, begins.
SIGN_PATTERN = re.compile(r"opt_state/(?:inner/)?(worker|server|extra/own|extra/moved)/")
ERRORS = ("worker", "server")


def is_error(name: str) -> bool:
    """Whether a leaf of a state is one of errors, which a checkpoint may lack."""
    return name.startswith(ERROR) or ((kind := SIGN_PATTERN.match(name)) is not None and kind[1] in ERRORS)


def shared_errors(reader: CheckpointReader, plan: Plan, names: Collection[str]) -> dict[str, Callable[[], Tensor]]:
    """{leaf of errors: what reads this rank's part}, of those that are not as in the checkpoint."""
    shapes = full_shapes(plan, names)
    specs = pytree.named_leaves({"extra": error_specs(plan.stored_errors)}) | specs_of_signs(plan, names)
    coder = coder_for(plan.codec, "errors", Kernels())
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
    """{leaf of errors of a run: those of a checkpoint whose sum it shares}: of its own hop, or of others.

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
    """This rank's share of the sum over the senders of some errors, zeros for none; or the mean of what ranks have."""
    shared = shape if not sources or is_error(sources[0]) else tuple(reader.leaves[sources[0]].shape)
    stacked = bool(sources) and is_stacked(leaf_of(sources[0]))
    out = torch.zeros(local_shape(shape, spec, plan.mesh), dtype=plan.error_dtype)
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
    """What a run by `plan` that begins at the checkpoint at `path` does to its errors, in words; [] for nothing."""
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


PARAMS, MASTER, SCALER, PREVIOUS_PARAMS = "params/", "master/", "scaler/", f"extra/{PREVIOUS}/"
OPT = "opt_state/"
FRESH = (SCALER, f"extra/{LOSS}/")  # leaves that may be initialised afresh


def restore_state(
    path: checkpoint.Folder,
    like: TrainState,
    specs: TrainState,
    plan: Plan,
    nvme: Nvme | None,
    device: torch.device = HOST,
) -> TrainState:
    """This rank's state from the checkpoint at `path`, saved with any mesh, stage, memory and policy of dtypes."""
    reader = checkpoint.open_checkpoint(path)
    try:
        return _restore_from(reader, like, specs, plan, nvme, device)
    finally:
        reader.close()


def _restore_from(
    reader: checkpoint.CheckpointReader,
    like: TrainState,
    specs: TrainState,
    plan: Plan,
    nvme: Nvme | None,
    device: torch.device,
) -> TrainState:
    policy, mesh = plan.policy, plan.mesh
    spec_of, shared = pytree.named_leaves(specs), shared_errors(reader, plan, pytree.names(like))
    source = {name: origin for name, origin in match_leaves(reader, like, policy).items() if name not in shared}
    fresh = first_stats()
    fresh |= pytree.named_leaves({"scaler": init_scaler(policy.loss_scale)}) if policy.loss_scale else {}

    def slice_of(name: str, leaf: Tensor) -> tuple[list[Window], Any]:
        saved_shape = reader.leaves[source[name]].shape
        full_shape = global_shape(leaf.shape, spec_of[name], mesh)
        if full_shape != saved_shape:
            raise ValueError(
                f"{reader.path}: {name} has shape {list(saved_shape)} there and {list(full_shape)} in this run; it is "
                "of another model"
            )
        return local_windows(saved_shape, spec_of[name], mesh), tuple(leaf.shape)

    coded = coded_leaves(reader.leaves)
    slices = {name: slice_of(name, leaf) for name, leaf in pytree.named_leaves(like).items() if name in source}

    def read(name: str, leaf: Tensor, layer: int | None = None) -> Tensor:
        if name not in source:
            return shared[name]().to(leaf.dtype) if name in shared else fresh[name]
        windows, size = slices[name]
        if source[name] in coded:
            decoded = read_coded(reader, source[name], windows, size).to(leaf.dtype)
            return decoded if layer is None else decoded[layer]
        if layer is not None:
            window = next(w for w in windows if w.offset <= layer < w.offset + w.size[0])
            start, size = (window.start[0] + layer - window.offset, *window.start[1:]), (1, *size[1:])
            return reader.read(source[name], start, size).to(leaf.dtype)[0]
        out, boxes = reader.shard(source[name], windows, size)
        reader.read_boxes(boxes)
        return out.to(leaf.dtype)

    if plan.on_disk:
        return write_to_disk(read, DiskLayout(like, specs, plan), nvme, device)
    named = pytree.named_leaves(like)
    plain = [name for name in named if name in source and source[name] not in coded]
    direct = [name for name in plain if reader.leaves[source[name]].dtype == named[name].dtype]
    out: dict[str, Tensor] = {}
    with reading_threads() as pool:
        for names in [direct] if device == HOST else [[name] for name in direct]:
            shards = {name: reader.shard(source[name], *slices[name]) for name in names}
            reader.read_boxes([box for _, boxes in shards.values() for box in boxes], pool)
            out |= {name: move_leaf(device, value, spec_of[name]) for name, (value, _) in shards.items()}
    out |= {name: move_leaf(device, read(name, leaf), spec_of[name]) for name, leaf in named.items() if name not in out}
    return move_to_memory(pytree.from_named(out, like), specs)


def match_leaves(reader: checkpoint.CheckpointReader, like: TrainState, policy: Policy) -> dict[str, str]:
    """{leaf of the state: leaf of the checkpoint that it is made of}; raises ValueError naming missing ones."""
    expected, out, missing = pytree.names(like), {}, []
    consumed, renamed = set(), renamed_leaves(reader.leaves, like)
    for name in expected:
        wide = f"{MASTER}{name.removeprefix(PARAMS)}" if name.startswith(PARAMS) else name
        narrow = f"{PARAMS}{name.removeprefix(MASTER)}" if name.startswith(MASTER) else name
        # Parameters whose dtype differs from the checkpoint's are rounded from its widest copy.
        dtype = policy.param if name.startswith(PARAMS) else None
        differs = name in reader.leaves and dtype is not None and reader.leaves[name].dtype != dtype
        choices = [wide, name] if differs else [name, wide, narrow, earlier_name(name), renamed.get(name, name)]
        choices += [f"{PARAMS}{name.removeprefix(PREVIOUS_PARAMS)}"] if name.startswith(PREVIOUS_PARAMS) else []
        match = next((choice for choice in choices if choice in reader.leaves), None)
        if match is not None:
            out[name] = match
            consumed |= {name, match}
        elif not (name.startswith(FRESH) or is_error(name)):
            missing.append(name)
    optional = (MASTER, SCALER, EXTRAS, PREVIOUS_PARAMS, SCALES)
    extra = [
        name for name in reader.leaves if name not in consumed and not (name.startswith(optional) or is_error(name))
    ]
    problems = [f"{label}: {list_some(names)}" for label, names in (("missing", missing), ("extra", extra)) if names]
    if problems:
        raise ValueError(f"{reader.path}: the checkpoint's leaves are not those of the run; {'; '.join(problems)}")
    return out


def renamed_leaves(names: Collection[str], like: TrainState) -> dict[str, str]:
    """{leaf of an optimizer's state: the stored leaf} of one with other transformations around it."""
    saved = [name.removeprefix(OPT) for name in names if name.startswith(OPT)]
    current = pytree.names(like.opt_state)
    if set(saved) == set(current):
        return {}
    return {f"{OPT}{new}": f"{OPT}{old}" for new, old in same_leaves(saved, current, pytree.names(like.params)).items()}


def earlier_name(name: str) -> str:
    """The name of a leaf in checkpoints that kept the average of the weights in `extra`."""
    if name.startswith(AVERAGE):
        return f"extra/ema/{name.removeprefix(AVERAGE)}"
    return name.replace("opt_state/inner/", "opt_state/", 1)


def save_snapshot(
    checkpoint_dir: checkpoint.Folder,
    snapshot: StoreSnapshot,
    old: TrainState,
    like: TrainState,
    specs: TrainState,
    mesh: Mesh,
    config: Any,
) -> checkpoint.Folder:
    """Save the last complete step of another mesh's store in `checkpoint_dir`; all ranks call it; return its path."""
    old_of, spec_of = pytree.named_leaves(old), pytree.named_leaves(specs)
    statistics = first_stats()  # which stores of earlier versions may lack

    stored = renamed_leaves({*snapshot.leaves, *snapshot.record.values}, like)

    def lazy(name: str, leaf: Tensor) -> Any:
        stored_name = stored.get(name, name)
        if stored_name in snapshot.record.values:
            return from_text(snapshot.record.values[stored_name])
        if name in statistics:
            return statistics[name]
        if name.startswith(ERROR):  # no store has errors
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        if not snapshot.holds(stored_name):
            stored_name = f"{MASTER}{name.removeprefix(PARAMS)}"
            if not name.startswith(PARAMS) or not snapshot.holds(stored_name):
                raise ValueError(f"{snapshot.folder}: its store has no {name}; resume from a checkpoint")
        full_shape = global_shape(leaf.shape, spec_of[name], mesh)
        windows = local_windows(full_shape, spec_of[name], mesh)

        def give() -> Tensor:
            read = [
                snapshot.leaf(stored_name, full_shape, old_of.get(stored_name, old_of[name]), window.start, window.size)
                for window in windows
            ]
            return (read[0] if len(read) == 1 else torch.cat(read) if read else leaf.new_empty(leaf.shape)).to(
                leaf.dtype
            )

        return checkpoint.Lazy(leaf.dtype, tuple(leaf.shape), give)

    state = pytree.map_named(lazy, like)
    return checkpoint.save(checkpoint_dir, state, step=snapshot.record.step, config=config, specs=specs, mesh=mesh)
