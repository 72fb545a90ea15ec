"""Restore a TrainState at another mesh, stage, memory or policy; each rank reads its slices of a checkpoint or
store."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fzero import checkpoint
from fzero.checkpoint.extras import EXTRAS
from fzero.checkpoint.moment_codes import SCALES, coded_leaves, read_coded
from fzero.checkpoint.offload_snapshot import StoreSnapshot
from fzero.checkpoint.reader import THREADS, read_boxes
from fzero.checkpoint.restore_errors import is_error, shared_errors
from fzero.checkpoint.restore_tree import list_some
from fzero.core import pytree
from fzero.core.device import HOST
from fzero.core.precision import Policy, init_scaler
from fzero.offload import Nvme
from fzero.optim.unit_updates import same_leaves
from fzero.optim.wrappers import AVERAGE
from fzero.sharding import Mesh, Plan
from fzero.sharding.error_feedback import ERROR
from fzero.sharding.slices import Window, global_shape, local_windows
from fzero.train.spike import LOSS, init_stats
from fzero.train.state import PREVIOUS, TrainState, move_leaf, move_to_memory
from fzero.train.state_on_disk import from_text, write_to_disk

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
    """This rank's state from the checkpoint at `path`, saved with any mesh, stage, memory and policy of dtypes.

    like: the state to restore, with leaves on the meta device. device: where the leaves are that the plan keeps there;
    they go to a GPU one at a time, so that the host never holds all of them. A change of policy is followed: master
    weights are made from parameters, parameters from master weights, other dtypes by rounding, and a missing loss scale
    afresh; and one to delayed updates, whose version before the last update is then the parameters, or from them, which
    leaves it out. All other leaves must be those of the checkpoint.
    Raises ValueError naming leaves that are missing, extra, or of another shape, and Damaged if a checksum does not
    match.
    """
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
    fresh = pytree.named_leaves({"extra": {LOSS: init_stats()}})
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
        with ThreadPoolExecutor(THREADS, "fzero-load") as pool:
            read_boxes(reader, boxes, pool)
        return out.to(leaf.dtype)

    if plan.on_disk:
        return write_to_disk(read, like, specs, plan, nvme, device)
    named = pytree.named_leaves(like)
    plain = [name for name in named if name in source and source[name] not in coded]
    direct = [name for name in plain if reader.leaves[source[name]].dtype == named[name].dtype]
    out: dict[str, Tensor] = {}
    with ThreadPoolExecutor(THREADS, "fzero-load") as pool:
        for names in [direct] if device == HOST else [[name] for name in direct]:
            shards = {name: reader.shard(source[name], *slices[name]) for name in names}
            read_boxes(reader, [box for _, boxes in shards.values() for box in boxes], pool)
            out |= {name: move_leaf(device, value, spec_of[name]) for name, (value, _) in shards.items()}
    out |= {name: move_leaf(device, read(name, leaf), spec_of[name]) for name, leaf in named.items() if name not in out}
    return move_to_memory(pytree.from_named(out, like), specs)


def match_leaves(reader: checkpoint.CheckpointReader, like: TrainState, policy: Policy) -> dict[str, str]:
    """{leaf of the state: leaf of the checkpoint that it is made of}, without leaves that are initialised afresh.

    Those are a new loss scale, and the statistics of the loss, which checkpoints of earlier versions may lack. Raises
    ValueError naming the leaves that are missing or extra.
    """
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
    """{leaf of an optimizer's state: the leaf among `names`, those of a stored state}, of one that has other
    transformations around it."""
    saved = [name.removeprefix(OPT) for name in names if name.startswith(OPT)]
    current = pytree.names(like.opt_state)
    if set(saved) == set(current):
        return {}
    return {f"{OPT}{new}": f"{OPT}{old}" for new, old in same_leaves(saved, current, pytree.names(like.params)).items()}


def earlier_name(name: str) -> str:
    """The name that a leaf has in checkpoints of versions which kept the average of the weights in `extra`."""
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
    """Save the last complete step of a store, written by the ranks of another mesh, in `checkpoint_dir`; return its
    path.

    All ranks of `mesh` call it.
    old: the specs by which those ranks held the leaves. like: this rank's state on the meta device by `specs`, all in
    memory; one leaf at a time is loaded. Parameters that the store lacks are made from its master weights. Raises
    ValueError if the store lacks a leaf, and Damaged if it is damaged.
    """
    old_of, spec_of = pytree.named_leaves(old), pytree.named_leaves(specs)
    statistics = pytree.named_leaves({"extra": {LOSS: init_stats()}})  # which stores of earlier versions may lack

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
