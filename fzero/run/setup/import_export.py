"""Run folders from the weights of other systems, and to folders of `transformers`, one leaf in memory at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fzero import checkpoint, models
from fzero.checkpoint import convert, offload_snapshot
from fzero.checkpoint.convert import huggingface, peft
from fzero.checkpoint.convert.transformers_models import save_decoder
from fzero.checkpoint.convert.upcycle import Upcycle, upcycled_config, upcycled_leaves
from fzero.core import pytree
from fzero.core.storage import write_texts
from fzero.data.auto_tokenizer import changed_on_load
from fzero.data.chat import read_chat
from fzero.models.configs import DecoderConfig, body_of, head_of, without_adapters
from fzero.run.config.config_table import recipe, to_table
from fzero.run.config.run_config import RunConfig
from fzero.run.setup import run_folder, run_lock, vocabulary, weights
from fzero.run.setup.vocabulary import tokenizer_of
from fzero.sharding.zero_stages import shapes_of

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
        trained = weights.load(run, wide=True, ema=ema)
        write(huggingface.in_memory(models.merge(trained.model, trained.params)))
        text = f"{out}: the model of {run} after step {trained.step}, with its adapters merged"
        return text, [*trained.warnings, *tokenizer_warnings(out)]
    snapshot = weights.snapshot_of(run, value)
    if snapshot is not None:
        write(on_disk(run, value, snapshot, ema=ema))
        step, passed = snapshot.record.step, [] if ema else weights.without_masters(value, snapshot)
    else:
        step, passed = weights.read_newest(run, value, read)
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
    trained, base = weights.load(run, wide=True, ema=ema), base_folder(run)
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


def on_disk(run: Path, value: RunConfig, snapshot: offload_snapshot.StoreSnapshot, *, ema: bool) -> huggingface.Leaves:
    """The weights in the store of a run whose state is on a disk."""
    prefix = prefix_of(run, snapshot.holds, ema)
    model = models.build(value.model)
    plan = weights.plan_of(model, value, snapshot)
    specs = pytree.named_leaves(plan.params if prefix == weights.PARAMS else plan.opt)
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
    if ema and not holds(weights.EMA):
        raise ValueError(f"{run}: keeps no average of the weights (train.ema_decay is 0)")
    return weights.EMA if ema else weights.MASTER if holds(weights.MASTER) else weights.PARAMS
