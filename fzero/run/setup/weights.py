"""The newest sound weights of a run, in memory or on a disk.

Run folders from the weights of other systems, and to folders of `transformers`, one leaf in memory at a time.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero import checkpoint, models
from fzero.checkpoint import convert, stored_state
from fzero.checkpoint.convert import huggingface, peft
from fzero.checkpoint.convert.transformers_models import save_decoder
from fzero.checkpoint.convert.upcycle import Upcycle, upcycled_config, upcycled_leaves
from fzero.checkpoint.directory import incomplete_lines, newest_sound
from fzero.core import pytree
from fzero.core.copy_buckets import bring
from fzero.core.precision import POLICIES
from fzero.core.pytree import Tree
from fzero.core.storage import is_url, write_texts
from fzero.data.auto_tokenizer import changed_on_load
from fzero.data.chat import read_chat
from fzero.models import LoRAConfig, Model, ModelConfig
from fzero.models.configs import DecoderConfig, body_of, head_of, without_adapters
from fzero.offload import Nvme
from fzero.optim.base import AVERAGE
from fzero.run.config.config_table import recipe, to_table
from fzero.run.config.objectives import objective_of
from fzero.run.config.run_config import RunConfig
from fzero.run.setup import run_folder, run_lock, vocabulary
from fzero.run.setup.run_folder import (
    NVME,
    checkpoints_of,
    is_run,
    read_config,
)
from fzero.run.setup.vocabulary import tokenizer_of
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


def snapshot_of(folder: Path, value: RunConfig) -> checkpoint.stored_state.StoreSnapshot | None:
    """The offload store of the run in `folder`, if it holds the newest weights; else None."""
    if is_url(value.nvme.folder):
        return None
    snapshot = (
        checkpoint.stored_state.find_snapshot(Path(value.nvme.folder or folder / NVME))
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


def without_masters(value: RunConfig, snapshot: checkpoint.stored_state.StoreSnapshot) -> list[str]:
    """A line where a store lacks master weights, so that params are read."""
    policy = POLICIES[value.precision.policy]()
    if snapshot.holds(MASTER) or not policy.has_master:
        return []
    return [
        f"{snapshot.folder}: holds not all master weights, as a part was in memory: these are the parameters, in "
        f"{str(policy.param).removeprefix('torch.')}"
    ]


def plan_of(model: Model, value: RunConfig, snapshot: checkpoint.stored_state.StoreSnapshot) -> Plan:
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
    disk.need(3 * checkpoint.stored_state.largest_group_bytes(plan, 4))
    params = checkpoint.stored_state.write_params(read, plan, disk)
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
            checkpoint.stored_state.read_weights(snapshot, plan_of(model, value, snapshot), prefix, dtype),
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


BUFFER_BYTES = 64 << 20  # of memory for writing


def import_weights(folder: Path, out: Path, config: Path | None = None, upcycle: str | None = None) -> str:
    """Make the run folder `out` of the weights and the tokenizer in `folder`; returns a line about it."""
    options = Upcycle.parse(upcycle) if upcycle is not None else None
    if not (out / run_lock.LOCK).exists():
        run_folder.expect_free(out)
    source = convert.open_source(folder, config)
    if options is not None:
        routed = upcycled_config(source.config, options)
        source = source._replace(config=routed, leaves=upcycled_leaves(source.leaves, routed))
    value = recipe("", source.config)
    tokenizer = tokenizer_of(folder, source.hf_config)
    leaves = {name: checkpoint.Lazy(*leaf) for name, leaf in source.leaves.items()}
    params = models.build(source.config).init(lambda name, shape, std, mean=0.0, dtype=None: leaves[name])
    with run_lock.owning(out) as preexisting:
        run_folder.expect_free(out)
        try:
            chat = read_chat(source.hf_config.parent)
            vocabulary.ids_of(source.hf_config.parent / vocabulary.GENERATION)  # which the run gets as it is
            files, ids = (
                vocabulary.start_files(source.hf_config.parent, folder),
                vocabulary.ids_of(source.hf_config),
            )
            provenance = {"imported": str(folder.resolve()), "imported_from": source.kind, "token_ids": ids}
            run_folder.create_run(out, value, tokenizer, chat, files, **provenance)
            checkpoint_dir, config_table = run_folder.checkpoints_of(out, value), to_table(value)
            checkpoint.save(checkpoint_dir, {"params": params}, step=0, config=config_table, buffer_bytes=BUFFER_BYTES)
        except checkpoint.SaveFailed as error:
            run_folder.clear_folder(out, preserve=preexisting)
            raise (error.__cause__ if isinstance(error.__cause__, ValueError) else error) from None  # a damaged source
        except BaseException:
            run_folder.clear_folder(out, preserve=preexisting)
            raise
    count = sum(math.prod(leaf.shape) for leaf in leaves.values())
    text = f"tokenizer of {tokenizer.vocab_size:,} tokens" if tokenizer else "no tokenizer"
    upcycle_note = (
        f", made {options.experts} experts of each layer, of which a token uses {options.top}"
        if options is not None
        else ""
    )
    hint = f"train on with: fzero pretrain --init {out} --data ..."
    if tokenizer and (extra_tokens := tokenizer.vocab_size - source.config.vocab_size) > 0:
        text += f", {extra_tokens:,} more than the model"
        hint += f" --set model.vocab_size={tokenizer.vocab_size}"
    return "\n".join([f"{out}: {count:,} parameters of a {source.kind}{upcycle_note}, {text}; {hint}", *source.notes])


def export_hf(run: Path, out: Path, *, ema: bool = False) -> tuple[str, list[str]]:
    """Write the model of `run` to the new folder `out`; returns (a line, a line per damaged checkpoint)."""
    value = run_folder.read_config(run)
    has_text = run_folder.read_environment(run)["tokenizer"] != ""
    ids, files = vocabulary.export_entries(run, run_folder.read_tokenizer(run) if has_text else None)
    tokenizer_path = run / run_folder.TOKENIZER if os.path.lexists(run / run_folder.TOKENIZER) else None

    def write(leaves: huggingface.Leaves) -> None:
        config = without_adapters(value.model)
        save: Any = save_decoder if isinstance(body_of(config), DecoderConfig) else huggingface.save_hf
        save(out, config, leaves, tokenizer=tokenizer_path, eos=ids, files=files)

    def read(opened: checkpoint.CheckpointReader) -> int:
        write(in_checkpoint(run, value, opened, ema=ema))
        return opened.step

    if isinstance(value.model, models.LoRAConfig):
        trained = load(run, wide=True, ema=ema)
        write(huggingface.in_memory(models.merge(trained.model, trained.params)))
        text = f"{out}: the model of {run} after step {trained.step}, with its adapters merged"
        return text, [*trained.warnings, *tokenizer_warnings(out)]
    snapshot = snapshot_of(run, value)
    if snapshot is not None:
        write(on_disk(run, value, snapshot, ema=ema))
        step, passed = snapshot.record.step, [] if ema else without_masters(value, snapshot)
    else:
        step, passed = read_newest(run, value, read)
    return f"{out}: the model of {run} after step {step}", [*passed, *tokenizer_warnings(out)]


def tokenizer_warnings(folder: Path) -> list[str]:
    """A line about a folder whose tokenizer AutoTokenizer does not take as it is."""
    name = changed_on_load(folder)
    line = (
        f"{folder}: AutoTokenizer builds a {name} in place of its tokenizer.json, with other ids; load that by "
        "PreTrainedTokenizerFast.from_pretrained"
    )
    return [line] if name else []


def export_adapter(run: Path, out: Path, *, ema: bool = False) -> tuple[str, list[str]]:
    """Write the adapters of `run` to the new folder `out`, as PEFT reads them; returns what `export_hf` does."""
    value = run_folder.read_config(run)
    if not isinstance(value.model, models.LoRAConfig):
        raise ValueError(f"--adapter: {run} has no adapters, as it trains all weights; leave it out")
    if isinstance(body_of(value.model), DecoderConfig):
        raise ValueError(f"--adapter: {run} has factors of transformers' own layers, which merge: leave it out")
    if head_of(value.model) is not None:
        raise ValueError(f"--adapter: {run} trains a head of scores too, which is no adapter; merge: leave it out")
    trained, base = load(run, wide=True, ema=ema), base_folder(run)
    has_text = run_folder.read_environment(run)["tokenizer"] != ""
    _, files = vocabulary.export_entries(run, run_folder.read_tokenizer(run) if has_text else None)
    peft.save_adapter(out, value.model, trained.params, base=str(base))
    write_texts(out, files)
    return f"{out}: the adapters of {run} after step {trained.step}, on {base}", trained.warnings


def base_folder(run: Path) -> Path:
    """The folder of the model below a run's adapters."""
    origin = run
    while run_folder.is_run(origin):
        environment = run_folder.read_environment(origin)
        if not isinstance(run_folder.read_config(origin).model, models.LoRAConfig):
            return Path(environment["imported"]) if "imported" in environment else origin
        origin = Path(environment["init"])
    return peft.base_of(origin) if peft.is_adapter(origin) else origin


def in_checkpoint(run: Path, value: RunConfig, reader: checkpoint.CheckpointReader, *, ema: bool) -> huggingface.Leaves:
    """The weights in a checkpoint."""
    prefix = prefix_of(run, lambda prefix: any(name.startswith(prefix) for name in reader.leaves), ema)
    shapes = pytree.named_leaves(shapes_of(models.build(value.model)))
    missing = [name for name in shapes if prefix + name not in reader.leaves]
    if missing:
        raise ValueError(f"{reader.path}: the model of the run has leaves that are not in it: {', '.join(missing[:5])}")
    like = {
        name: torch.empty(reader.leaves[prefix + name].shape, dtype=reader.leaves[prefix + name].dtype, device="meta")
        for name in shapes
    }

    def read(name: str, index: tuple[int, ...]) -> torch.Tensor:
        shape = tuple(like[name].shape)
        return reader.read(prefix + name, *box_of(shape, index)).reshape(shape[len(index) :])

    return huggingface.Leaves(like, read)


def on_disk(run: Path, value: RunConfig, snapshot: stored_state.StoreSnapshot, *, ema: bool) -> huggingface.Leaves:
    """The weights in the store of a run whose state is on a disk."""
    prefix = prefix_of(run, snapshot.holds, ema)
    model = models.build(value.model)
    plan = plan_of(model, value, snapshot)
    specs = pytree.named_leaves(plan.params if prefix == PARAMS else plan.opt)
    like = {
        name: torch.empty(leaf.shape, dtype=getattr(torch, snapshot.leaves[prefix + name]["dtype"]), device="meta")
        for name, leaf in pytree.named_leaves(plan.like).items()
    }

    def read(name: str, index: tuple[int, ...]) -> torch.Tensor:
        shape = tuple(like[name].shape)
        return snapshot.leaf(prefix + name, shape, specs[name], *box_of(shape, index)).reshape(shape[len(index) :])

    return huggingface.Leaves(like, read)


def box_of(shape: tuple[int, ...], index: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, size) of the part of a leaf at an index into its first dims."""
    inner = shape[len(index) :]
    return (*index, *(0 for _ in inner)), (*(1 for _ in index), *inner)


def prefix_of(run: Path, holds: Callable[[str], bool], ema: bool) -> str:
    """The prefix of the weights to export, among those with leaves in a state."""
    if ema and not holds(EMA):
        raise ValueError(f"{run}: keeps no average of the weights (train.ema_decay is 0)")
    return EMA if ema else MASTER if holds(MASTER) else PARAMS
