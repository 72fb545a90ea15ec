"""Any model of `transformers` as a Model, from a folder or a config, and back into a folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fzero.checkpoint.convert.transformers_weights import copy_to_disk, hide_progress_bars, weights_of
from fzero.comm.rank_tables import barrier
from fzero.core.arguments import checked
from fzero.core.files import remove_entry
from fzero.models.base import Model
from fzero.models.batch import Batch
from fzero.models.from_module import expect_trainable, model_of, weight_reader
from fzero.models.transformers_module import loss_of_task, make_module, tp_rules
from fzero.sharding import Plan
from fzero.train.state import TrainState
from fzero.train.to_module import full_values, stacks_of


@checked()
def from_huggingface(
    source: Any,
    *,
    task: str = "",
    layers: str | Sequence[str] | None = None,
    batch: Batch | None = None,
    tp: Mapping[str, str] | str | None = None,
    attention: str | None = None,
    dropout: bool = False,
    seed: int = 0,
) -> Model:
    """Return the Model of a model of transformers: its own code, with its layers as stacks (see from_module).

    source: a folder that transformers saved (config.json and safetensors, one file or several with an index), whose
        weights are read leaf by leaf in init_state, each rank its own part; or a config.json, a config of transformers
        or its class, whose weights transformers draws from `seed`: these are held whole. Nothing is downloaded.
    task: "causal", "masked", "seq2seq" or "classes", which chooses the class of transformers and the loss; "": that of
        the architecture in the config, or of a decoder and an encoder-decoder.
    layers, batch: see from_module.
    tp: see from_module; None: what transformers' own plan splits by columns and rows, and "auto" for a model that has
        no such plan. `print(plan)` shows it.
    attention: transformers' `attn_implementation`, such as "eager"; None: its choice, "sdpa" where the model has it.
    dropout: whether the module is in train mode and drops with the rates of the config, by fzero's keys.

    A batch has the arguments of the model's forward pass, and `labels` int64: of the tokens themselves for "causal",
    which are shifted here, as transformers does. The loss is the cross-entropy of labels other than -100, in at least
    float32; losses that transformers adds to it, such as that of a router, are not in it.

    Raises TypeError for another source; ValueError for a task that the config has no class for, a tensor that is
    missing from the folder, unexpected, or of another shape, and see from_module.

    >>> import transformers  # doctest: +SKIP
    >>> model = fzero.from_huggingface(transformers.Qwen3Config(num_hidden_layers=2))  # doctest: +SKIP
    >>> model.config.name  # doctest: +SKIP
    'Qwen3ForCausalLM'
    """
    folder = folder_of(source)
    module, task = make_module(source, task, attention, None if folder else seed)
    if folder is None:
        weights = weight_reader(module)
    else:
        read = weights_of(module, folder)
        fill_buffers(module, read)
        weights = lambda name: read[name].give  # noqa: E731
    module.train(dropout)
    rules = tp_rules(module) if tp is None else tp
    expect_trainable(module)
    return model_of(
        module, partial(loss_of_task, task), weights, layers=layers, batch=batch, tp=rules, inferred=tp is None
    )


@checked()
def to_huggingface(
    state: TrainState,
    source: Any,
    folder: str | Path,
    plan: Plan | None = None,
    *,
    task: str = "",
    layers: str | Sequence[str] | None = None,
    model: Model | None = None,
) -> Path:
    """Write the parameters of a state into a new folder that transformers loads bit by bit, and return its path.

    source, task, layers: those that from_huggingface was given. plan: the plan of the state, where ranks hold shards of
    it; every rank must call this, and the first one writes. Names and layouts are those of save_pretrained; master
    weights are taken where the state has them. model: the one that `models.lora` returned, of a state with its factors,
    whose products are added to the weights. The first rank keeps the weights in a nameless file beside the folder
    meanwhile, and holds one of its files of 5 GB at most in memory. The folder appears when it is complete.

    Communicates: see to_module, and a barrier. Raises ValueError if the folder exists, and for a state of another
    model.

    >>> path = to_huggingface(state, "their-model", "trained", plan)  # doctest: +SKIP
    """
    target = Path(folder)
    if target.exists():
        raise ValueError(f"{target}: already exists; name another folder or remove this one first")
    module, _ = make_module(source, task, None, None)
    source_folder = folder_of(source)
    if source_folder is not None:
        fill_buffers(module, weights_of(module, source_folder))
    first = plan is None or plan.mesh.rank == 0
    parameters = dict(module.named_parameters())
    values = {name: leaf for name, leaf in module.state_dict().items() if not leaf.is_meta}
    for name, value in full_values(state, plan, stacks_of(state, module, layers, plan), model):
        if name not in parameters or value.shape != parameters[name].shape:
            raise ValueError(f"{name} {list(value.shape)} is no parameter of {type(module).__name__} by the source")
        if first:
            values[name] = copy_to_disk(value.detach(), target.parent)
    if first:
        dtypes = {values[name].dtype for name in parameters}
        module.to(dtypes.pop() if len(dtypes) == 1 else torch.float32)
        write_folder(module, values, target)
    if plan is not None and plan.mesh.size > 1:
        barrier(plan.mesh)
    return target


def write_folder(module: Any, values: dict[str, Any], target: Path) -> None:
    """Write a folder by transformers' own save_pretrained; it appears when it is complete."""
    if hasattr(module.config, "use_cache"):
        module.config.use_cache = True
    partly = target.with_name(f"{target.name}.partial")
    remove_entry(partly)
    try:
        with hide_progress_bars():
            module.save_pretrained(partly, state_dict=values, max_shard_size="5GB")
        partly.rename(target)
    except BaseException:
        shutil.rmtree(partly, ignore_errors=True)
        raise


def folder_of(source: Any) -> Path | None:
    """The folder of weights that a source names, None for a config."""
    return Path(source) if isinstance(source, (str, Path)) and Path(source).is_dir() else None


def fill_buffers(module: Any, read: Mapping[str, Any]) -> None:
    """Read the buffers that a folder has."""
    with torch.no_grad():
        for name, leaf in module.named_buffers():
            if name in read:
                leaf.copy_(read[name].give())
