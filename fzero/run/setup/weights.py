"""The newest sound weights of a run, in memory or on a disk."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero import checkpoint, models
from fzero.checkpoint import convert
from fzero.checkpoint.directory import incomplete_lines, newest_sound
from fzero.core import pytree
from fzero.core.copy_buckets import bring
from fzero.core.precision import POLICIES
from fzero.core.pytree import Tree
from fzero.core.storage import is_url
from fzero.models import LoRAConfig, Model, ModelConfig
from fzero.offload import Nvme
from fzero.optim.base import AVERAGE
from fzero.run.config.config_table import recipe
from fzero.run.config.objectives import objective_of
from fzero.run.config.run_config import RunConfig
from fzero.run.setup.run_folder import (
    NVME,
    checkpoints_of,
    is_run,
    read_config,
)
from fzero.sharding import Plan, fake_mesh, one_process, zero_plan
from fzero.sharding.spec import Offload
from fzero.sharding.zero_stages import shapes_of


def read_newest(
    folder: Path, value: RunConfig, read: Callable[[checkpoint.CheckpointReader], Any]
) -> tuple[Any, list[str]]:
    """(`read` of the run's newest sound checkpoint, a line for each that was passed over)."""

    def read_checkpoint(path: checkpoint.Folder) -> Any:
        with contextlib.closing(checkpoint.open_checkpoint(path)) as opened:
            return read(opened)

    newest = newest_sound(checkpoints_of(folder, value), read_checkpoint)
    assert newest.path is not None
    return newest.value, [*incomplete_lines(newest.path), *newest.lines()]


PARAMS, MASTER, EMA = "params/", "master/", AVERAGE


def snapshot_of(folder: Path, value: RunConfig) -> checkpoint.offload_snapshot.StoreSnapshot | None:
    """The offload store of the run in `folder`, if it holds the newest weights; else None."""
    if is_url(value.nvme.folder):
        return None
    snapshot = (
        checkpoint.offload_snapshot.find_snapshot(Path(value.nvme.folder or folder / NVME))
        if Offload.parse(value.offload).on_disk
        else None
    )
    if snapshot is None:
        return None
    names = pytree.names(shapes_of(models.build(value.model)))  # use a group only if all of its leaves are on the disk
    for name in snapshot.leaves:
        group = next((prefix for prefix in (PARAMS, MASTER, EMA) if name.startswith(prefix)), None)
        if group and name.removeprefix(group) not in names:
            raise ValueError(f"{snapshot.folder}: is the store of another model: it has {name}, and {folder} has not")
    full_prefixes = tuple(
        prefix for prefix in (PARAMS, MASTER, EMA) if all(prefix + name in snapshot.leaves for name in names)
    )
    parts = tuple(prefix for prefix in (PARAMS, MASTER, EMA) if prefix not in full_prefixes)
    snapshot = snapshot._replace(
        leaves={name: leaf for name, leaf in snapshot.leaves.items() if not name.startswith(parts)}
    )
    if not (snapshot.holds(PARAMS) or snapshot.holds(MASTER)):
        return None
    return (
        snapshot if max(checkpoint.steps(checkpoints_of(folder, value)), default=-1) <= snapshot.record.step else None
    )


def without_masters(value: RunConfig, snapshot: checkpoint.offload_snapshot.StoreSnapshot) -> list[str]:
    """A line where a store lacks master weights, so that params are read."""
    policy = POLICIES[value.precision.policy]()
    if snapshot.holds(MASTER) or not policy.has_master:
        return []
    return [
        f"{snapshot.folder}: holds not all master weights, as a part was in memory: these are the parameters, in "
        f"{str(policy.param).removeprefix('torch.')}"
    ]


def plan_of(model: Model, value: RunConfig, snapshot: checkpoint.offload_snapshot.StoreSnapshot) -> Plan:
    """The plan of a run, as on its rank 0."""
    options = {"reduce": value.reduce, "sequence": value.sequence, "pipeline": snapshot.pipeline}
    return zero_plan(value.zero, model, fake_mesh(snapshot.sizes), **options)


class TrainedWeights(NamedTuple):
    """The weights of a run."""

    config: RunConfig
    model: Model
    params: Tree
    step: int
    warnings: list[str]  # lines about later checkpoints that were passed over


def load_on_disk(folder: Path, nvme: str | None, *, ema: bool = False) -> TrainedWeights:
    """`load`, with the parameters on a disk, one leaf in memory at a time."""
    value = read_config(folder)
    model = models.build(value.model)
    plan, snapshot = zero_plan(0, model, one_process()), snapshot_of(folder, value)
    warnings: list[str] = []
    if snapshot is not None:
        prefix = EMA if ema else PARAMS if snapshot.holds(PARAMS) else MASTER
        source, step, dtype = (
            plan_of(model, value, snapshot),
            snapshot.record.step,
            POLICIES[value.precision.policy]().param,
        )
        specs = pytree.named_leaves(source.params if prefix == PARAMS else source.opt)
        shapes = pytree.named_leaves(plan.like)
        read = lambda name: snapshot.leaf(prefix + name, tuple(shapes[name].shape), specs[name]).to(dtype)  # noqa: E731
        present = snapshot.holds(prefix)
    else:
        path, damaged = checkpoint.newest_sound(checkpoints_of(folder, value))
        warnings = [*incomplete_lines(path), *(f"passed over {bad}: {reason}" for bad, reason in damaged)]
        source, prefix = checkpoint.open_checkpoint(path), EMA if ema else PARAMS
        step = source.step
        read = lambda name: source.read((prefix if prefix + name in source.leaves else PARAMS) + name)  # noqa: E731
        present = any(name.startswith(prefix) for name in source.leaves)
    if not present:
        raise ValueError(f"{folder}: keeps no average of the weights (train.ema_decay is 0)")
    disk = Nvme(nvme or folder / "nvme-sample", slots=1)
    disk.need(3 * checkpoint.offload_snapshot.largest_group_bytes(plan, 4))
    params = checkpoint.offload_snapshot.write_params(read, plan, disk)
    return TrainedWeights(value, model, params, step, warnings)


def load(folder: Path, *, wide: bool = False, ema: bool = False) -> TrainedWeights:
    """The newest sound weights of the run in `folder`, checked.

    wide: the master weights if the run has them. ema: the average of the weights.
    Raises ValueError if there is no run, no sound checkpoint, or no average.
    """
    value = read_config(folder)
    model = models.build(value.model)
    snapshot = snapshot_of(folder, value)
    if snapshot is not None:
        if ema and not snapshot.holds(EMA):
            raise ValueError(f"{folder}: keeps no average of the weights (train.ema_decay is 0)")
        prefix = EMA if ema else MASTER if snapshot.holds(MASTER) and (wide or not snapshot.holds(PARAMS)) else PARAMS
        dtype = None if wide or prefix == PARAMS else POLICIES[value.precision.policy]().param
        return TrainedWeights(
            value,
            model,
            checkpoint.offload_snapshot.read_weights(snapshot, plan_of(model, value, snapshot), prefix, dtype),
            snapshot.record.step,
            without_masters(value, snapshot) if wide and not ema else [],
        )
    like = shapes_of(model)

    def read(reader: checkpoint.CheckpointReader) -> tuple[Tree, int]:
        if ema and not any(name.startswith(EMA) for name in reader.leaves):
            raise ValueError(f"{folder}: keeps no average of the weights (train.ema_decay is 0)")
        prefix = EMA if ema else MASTER if wide and any(name.startswith(MASTER) for name in reader.leaves) else PARAMS
        return restore_weights(reader, like, prefix), reader.step

    (params, step), warnings = read_newest(folder, value, read)
    return TrainedWeights(value, model, params, step, warnings)


def restore_weights(reader: checkpoint.CheckpointReader, like: Tree, prefix: str) -> Tree:
    """The parameters in a checkpoint: their leaves below `prefix`, and of frozen ones those of training."""
    first = {n: leaf for n, leaf in pytree.named_leaves(like).items() if prefix + n in reader.leaves}
    saved = meta_like_saved(reader, pytree.nest(first), prefix)
    restored = checkpoint.restore(reader.path, saved, prefix=prefix.rstrip("/"))
    if len(first) == len(pytree.names(like)):
        return pytree.from_named(pytree.named_leaves(restored), like)
    pattern = "|".join(map(re.escape, first))
    remainder = checkpoint.restore(
        reader.path, meta_like_saved(reader, like, PARAMS), prefix=PARAMS.rstrip("/"), retain=pattern
    )
    return pytree.from_named(pytree.named_leaves(remainder) | pytree.named_leaves(restored), like)


def start_sizes(init: Path) -> tuple[str, ModelConfig]:
    """(the preset or "", the model's config) of what a new run starts from: see `load_start`."""
    if is_run(init):
        old = read_config(init)
        return old.preset, old.model
    if convert.peft.is_adapter(init):
        base = convert.peft.base_of(init)
        return "", convert.peft.open_adapter(init, base, _base_sizes(init, base)).config
    return "", convert.open_source(init).config


def _base_sizes(init: Path, base: Path) -> ModelConfig:
    """The config of an adapter's base; raises ValueError for one that is none of fzero's own models."""
    try:
        return start_sizes(base)[1]
    except ValueError as error:
        raise ValueError(f"{error}; {init} is an adapter of that model: {convert.peft.MERGE}") from None


def load_start(init: Path) -> TrainedWeights:
    """The weights that a new run starts from: of the run in `init`, or those that another system saved there."""
    if is_run(init):
        return load(init, wide=True)
    if convert.peft.is_adapter(init):
        base = convert.peft.base_of(init)
        _base_sizes(init, base)
        base_weights = load_start(base)
        named = pytree.named_leaves(base_weights.params)
        adapter = convert.peft.open_adapter(init, base, base_weights.model.config)
        convert.peft.expect_base(init, base, named)
        named |= convert.peft.adapter_leaves(adapter, named)
        model = models.build(adapter.config)
        params = model.init(lambda name, shape, std, mean=0.0, dtype=None: named[name])
        return TrainedWeights(config_of(adapter.config), model, params, 0, [*base_weights.warnings, *adapter.notes])
    source = convert.open_source(init)
    model = models.build(source.config)
    return TrainedWeights(config_of(source.config), model, convert.load(source), 0, list(source.notes))


def config_of(model: ModelConfig) -> RunConfig:
    """The config of a run of a model that another system trained."""
    objective = objective_of(model)
    lora = "-lora" if isinstance(model, LoRAConfig) else ""
    return recipe(objective.preset + lora if objective.head else "", model)


def move_params(device: torch.device, params: Tree) -> Tree:
    """The parameters on `device`; those on a disk stay there."""
    return pytree.map(lambda leaf: bring(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, params)


def meta_like_saved(reader: checkpoint.CheckpointReader, like: Tree, prefix: str) -> Tree:
    """`like` in the dtypes of the leaves of a checkpoint below `prefix`."""
    dtypes = {name: leaf.dtype for name, leaf in reader.leaves.items()}
    return pytree.map_named(lambda name, leaf: leaf.to(dtypes.get(prefix + name, leaf.dtype)), like)
