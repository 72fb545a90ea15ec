"""Any model of `transformers` as a Model, from a folder or a config, and back into a folder.

Names and layouts of files differ from those of the modules: the table of renamings and conversions is transformers'
own, run first on tensors without memory, and again when a weight is read.

A model in a folder of another system: what kind it is, and its leaves.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero.checkpoint.convert.dcp import FP32, ZERO, find_universal, is_plain_deepspeed, open_universal
from fzero.checkpoint.convert.huggingface import FLOATS, Leaves, leaves_of, read_hf_config, tensors_of, write_tokenizer
from fzero.checkpoint.convert.huggingface_entries import read_labels, write_labels
from fzero.checkpoint.convert.huggingface_families import FAMILIES
from fzero.checkpoint.convert.quantization_config import note_of, quantization_of
from fzero.checkpoint.convert.quantized_tensors import is_zero_bias
from fzero.checkpoint.convert.tensor_files import TensorEntry
from fzero.comm.rank_tables import barrier
from fzero.core.arguments import checked
from fzero.core.files import expect_absent, make_folder, new_folder
from fzero.core.pytree import Tree
from fzero.core.storage import write_text, write_texts
from fzero.core.text_parsing import parse_json, read_json
from fzero.models import build
from fzero.models.base import Model
from fzero.models.batch import Batch
from fzero.models.configs import SCORE, DecoderConfig, ScoreConfig, head_rows
from fzero.models.from_module import expect_trainable, model_of, weight_reader
from fzero.models.transformers_module import loss_of_task, make_module, read_decoder, tp_rules
from fzero.sharding import Plan
from fzero.train.state import TrainState
from fzero.train.to_module import full_values, stacks_of


class Conversion(NamedTuple):
    """How some tensors of a folder become parameters."""

    first: str  # the name of the first parameter
    transform: Any  # of transformers
    tensors: list[tuple[str, str, TensorEntry]]  # (name in the folder, pattern that it has matched, the tensor)

    def run(self, module: nn.Module, read: Callable[[TensorEntry], Tensor]) -> dict[str, Tensor]:
        """The parameters by name."""
        transform = copy.deepcopy(self.transform)
        for name, pattern, entry in self.tensors:
            transform.add_tensor(self.first, name, pattern, partial(read, entry))
        converted = transform.convert(self.first, model=module, config=module.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def weights_of(
    module: Any, folder: Path, config: Path | None = None, *, dtype: torch.dtype | None = None
) -> dict[str, TensorEntry]:
    """The parameters and buffers, by name, of the module that `folder` is of; config, dtype: see `tensors_of`.

    Raises ValueError naming a bad tensor."""
    state = module.state_dict(keep_vars=True)
    firsts: dict[int, str] = {}  # of tied parameters, the first name is the one that a module lists
    first_names = {name: firsts.setdefault(id(leaf), name) for name, leaf in state.items()}
    passed_over = [*(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())]
    passed_over += [f"{re.escape(name)}$" for name, _ in module.named_buffers() if name not in state]
    hf_config = config or folder / "config.json"
    if quantization_of(read_json(hf_config, wide=True), str(hf_config)) and "Conv1D" in map(
        _class_name, module.modules()
    ):
        raise ValueError(f"{hf_config}: it has a quantization_config; fzero reads {_class_name(module)} without")
    entries: dict[str, TensorEntry] = {}
    for conversion in conversions_of(module, tensors_of(folder, hf_config, dtype=dtype), state):
        blank = conversion.run(module, lambda entry: torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
        for name, leaf in blank.items():
            if name not in state:
                unused = any(re.search(pattern, name) for pattern in passed_over)
                if not unused and not all(is_zero_bias(stored, entry) for stored, _, entry in conversion.tensors):
                    raise ValueError(f"{folder}: {name} is there, and {type(module).__name__} has no such leaf")
                continue
            if leaf.shape != state[name].shape:
                shapes = list(leaf.shape), list(state[name].shape)
                raise ValueError(f"{folder}: {name} has shape {shapes[0]}, and by the config {shapes[1]}")
            if first_names[name] not in entries or first_names[name] == name:
                entries[first_names[name]] = TensorEntry(
                    leaf.dtype, tuple(leaf.shape), partial(read_parameter, conversion, module, name)
                )
    missing = next((name for name in first_names.values() if name not in entries), None)
    if missing is not None:
        raise ValueError(
            f"{folder}: {missing} of {type(module).__name__} is missing from the weights; give the task that the "
            "folder was saved for"
        )
    return entries


def _class_name(module: nn.Module) -> str:
    return type(module).__name__


def read_parameter(conversion: Conversion, module: nn.Module, name: str) -> Tensor:
    """A parameter's values."""
    return conversion.run(module, lambda entry: entry.give())[name]


def conversions_of(module: Any, tensors: dict[str, TensorEntry], state: dict[str, Any]) -> list[Conversion]:
    """The conversions of all tensors of a folder, as transformers' own reader makes them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(module)
    renamings = [conversion for conversion in table if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in table if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: conversion for conversion in converters for pattern in conversion.source_patterns}
    conversions: dict[str, Conversion] = {}
    for name in sorted(tensors, key=dot_natural_key):
        prefix = module.base_model_prefix
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        transform = WeightRenaming(name, target) if pattern is None else by_pattern[pattern]
        conversion = conversions.setdefault(target, Conversion(target, transform, []))
        conversion.tensors.append((name, pattern or name, tensors[name]))
    return list(conversions.values())


def copy_to_disk(value: Tensor, folder: Path) -> Tensor:
    """A copy of a tensor in a nameless file, which the host's memory need not hold."""
    if not value.numel():
        return value.cpu()
    make_folder(folder)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        mapped = torch.from_file(file.name, shared=True, size=value.numel(), dtype=value.dtype).view(value.shape)
    return mapped.copy_(value)


def is_foreign(path: Path) -> bool:
    """Whether a config.json is of an architecture that fzero has no functions of."""
    if not path.is_file():
        return False
    kind = read_json(path, wide=True).get("model_type")
    return all(kind != family.model_type for family in FAMILIES)


def open_decoder(
    folder: Path, path: Path, *, dtype: torch.dtype | None = None
) -> tuple[DecoderConfig | ScoreConfig, dict[str, TensorEntry]]:
    """(config, leaves that are read on request) of the decoder in `folder`; raises ValueError where it does not fit."""
    content = read_json(path, wide=True)
    content.pop("quantization_config", None)  # of the weights in the folder, which are dequantised
    config: Any = read_decoder(content, str(path))
    if content.get("architectures") not in (None, [], [config.architecture]):  # else read_decoder has refused it
        config = read_labels(content, config, path)
    decoder = decoder_of(config)
    read = weights_of(decoder.module, folder, path, dtype=dtype)
    expect_buffers(decoder.module, read, folder)
    leaves = {}
    for leaf, names in decoder.sources.items():
        entries = [read[name] for name in names]
        shape, stacked = entries[0].shape, leaf.startswith("blocks")
        kind = dtype or max((entry.dtype for entry in entries), key=lambda candidate: candidate.itemsize)
        if kind not in FLOATS:
            raise ValueError(f"{folder}: {names[0]} is {kind}; fzero reads {', '.join(map(str, FLOATS))}")
        full_shape = (len(names), *shape) if stacked else shape
        leaves[leaf] = TensorEntry(kind, full_shape, partial(read_leaf, entries, kind, stacked))
    return config, leaves


def decoder_of(config: DecoderConfig | ScoreConfig) -> Any:
    """The decoder of a config, with the sources of all its leaves."""
    from fzero.models import decoder

    if not isinstance(config, ScoreConfig):
        return decoder.decoder_of(config)
    base = decoder.decoder_of(config.base, head_rows(config))
    return base._replace(sources={**base.sources, SCORE: ("score.weight",)})


def notes_of(config: DecoderConfig | ScoreConfig) -> tuple[str, ...]:
    """The lines that say what computes a decoder, and what that costs."""
    import transformers

    line = (
        f"{config.architecture} has no functions of fzero's own: the code of transformers {transformers.__version__} "
        "computes it, layer by layer, with PyTorch's attention, without fused kernels, and with all logits of a "
        "micro-batch in memory; embedding and head are whole on every rank of tp"
    )
    has_code = "auto_map" in parse_json(config.text, config.architecture, wide=True)
    code = ("auto_map in its config.json names code of the folder's own, which is not run",) if has_code else ()
    return (line, *code, *decoder_of(config).notes)


def read_leaf(entries: list[TensorEntry], dtype: torch.dtype, stacked: bool) -> Tensor:
    """The values of a leaf: stacked, those of its layers."""
    if not stacked:
        return entries[0].give().to(dtype, copy=True)
    out = torch.empty((len(entries), *entries[0].shape), dtype=dtype)
    for i, entry in enumerate(entries):
        out[i] = entry.give()
    return out


def expect_buffers(module: nn.Module, read: Mapping[str, TensorEntry], folder: Path) -> None:
    """Raise ValueError for a buffer in a folder with other values than the module makes."""
    for name, leaf in module.named_buffers():
        if name in read and not torch.equal(read[name].give().to(leaf.dtype), leaf):
            raise ValueError(
                f"{folder}: the buffer {name} has other values than the code of {type(module).__name__} makes of the "
                "config.json"
            )


def save_decoder(
    folder: str | Path,
    config: DecoderConfig | ScoreConfig,
    leaves: Leaves,
    *,
    tokenizer: str | Path | None = None,
    eos: Mapping[str, Any] | None = None,
    files: Mapping[str, str] = {},
) -> Path:
    """Write `folder` for transformers to load, with the decoder's own config.json; return its path."""
    folder = expect_absent(folder)
    decoder = decoder_of(config)
    values = {name: leaf for name, leaf in decoder.module.state_dict().items() if not leaf.is_meta}
    dtypes = {leaf.dtype for leaf in leaves.like.values()}
    for leaf, names in decoder.sources.items():
        for i, name in enumerate(names):
            index = (i,) if leaf.startswith("blocks") else ()
            values[name] = copy_to_disk(leaves.read(leaf, index), folder.parent)
    dtype = str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else "float32"
    content = {"architectures": [config.architecture], **parse_json(config.text, config.architecture, wide=True)}
    content |= eos or {}
    if isinstance(config, ScoreConfig):
        content |= {"architectures": [type(decoder.module).__name__], **write_labels(config)}
        content["pad_token_id"] = config.pad if config.pad >= 0 else None
    content = {name: value for name, value in content.items() if name not in ("torch_dtype", "dtype", "auto_map")}
    with new_folder(folder) as partial_folder:
        save_module(decoder.module, values, partial_folder)
        for json_file in partial_folder.glob("*.json"):
            if not json_file.name.startswith("model.safetensors"):
                json_file.unlink()
        write_text(partial_folder, "config.json", json.dumps({**content, "torch_dtype": dtype}, indent=2) + "\n")
        write_tokenizer(partial_folder, tokenizer, config.max_len)
        write_texts(partial_folder, files)
    return folder


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
    target = expect_absent(folder)
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
        config: Any = module.config
        if hasattr(config, "use_cache"):
            config.use_cache = True
        with new_folder(target) as partial_folder:
            save_module(module, values, partial_folder)
    if plan is not None and plan.mesh.size > 1:
        barrier(plan.mesh)
    return target


def save_module(module: Any, values: dict[str, Any], folder: Path) -> None:
    """Write the values of a module by transformers' own save_pretrained, without its progress bars."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        module.save_pretrained(folder, state_dict=values, max_shard_size="5GB")
    finally:
        if enabled:
            logging.enable_progress_bar()


def folder_of(source: Any) -> Path | None:
    """The folder of weights that a source names, None for a config."""
    return Path(source) if isinstance(source, (str, Path)) and Path(source).is_dir() else None


def fill_buffers(module: Any, read: Mapping[str, Any]) -> None:
    """Read the buffers that a folder has."""
    with torch.no_grad():
        for name, leaf in module.named_buffers():
            if name in read:
                leaf.copy_(read[name].give())


SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")


class ImportSource(NamedTuple):
    """A model in a folder of another system."""

    kind: str  # the kind, for messages
    config: Any  # the sizes, as one of fzero.models
    leaves: dict[str, TensorEntry]  # our leaves, each read on request
    hf_config: Path  # the config.json with the sizes
    notes: tuple[str, ...] = ()  # lines about it


def open_source(
    folder: str | Path, config: str | Path | None = None, *, dtype: torch.dtype | None = None
) -> ImportSource:
    """Open the model in `folder`; its weights are read later. A decoder of an architecture that docs/huggingface.md
    does not list is one that transformers' own code computes.

    config: the config.json of transformers with its sizes; None takes the one in the folder. dtype: of the leaves; None
    keeps the stored one. Raises ValueError of one line for an unknown folder, for a missing config, and naming a tensor
    that is missing, unexpected, or of another shape or dtype. A damaged tensor is found only when it is read."""
    # Not above: torch's reader imports sympy and DTensor, most of a second of any run, which imports this file.
    from fzero.checkpoint.convert.dcp import METADATA, open_dcp

    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: {'is not a folder' if folder.exists() else 'no such folder'}")
    universal = find_universal(folder)
    if any((folder / name).is_file() for name in SAFETENSORS):
        kind, tensors, alone = "Hugging Face model", tensors_of, True
    elif (folder / METADATA).is_file():
        kind, tensors, alone = "torch.distributed.checkpoint", open_dcp, False
    elif universal is not None:
        kind, tensors, alone = "DeepSpeed universal checkpoint", open_universal, True
    elif is_plain_deepspeed(folder):
        raise ValueError(
            f"{folder}: a DeepSpeed checkpoint that is not universal; convert it first: python -m "
            f"deepspeed.checkpoint.ds_to_universal --input_folder {folder} --output_folder ... --inject_missing_state"
        )
    else:
        candidates = (
            f"{SAFETENSORS[0]} (or its index), {METADATA} (torch.distributed.checkpoint), {ZERO}/*/{FP32} "
            "(DeepSpeed universal)"
        )
        raise ValueError(f"{folder}: holds nothing that fzero imports; looked for {candidates}")
    config_path = Path(config) if config is not None else folder / "config.json"
    if config is None and not config_path.is_file():
        raise ValueError(
            f"{folder}: a {kind} without a config.json with the model's sizes; name it by config= "
            f"(--hf-config HF_CONFIG.json)"
        )
    weights_folder = universal if tensors is open_universal and universal is not None else folder
    quantization = (
        quantization_of(read_json(config_path, wide=True), str(config_path)) if tensors is tensors_of else None
    )
    notes = (note_of(quantization),) if quantization else ()
    if tensors is tensors_of and is_foreign(config_path):
        decoder_config, leaves = open_decoder(folder, config_path, dtype=dtype)
        return ImportSource(kind, decoder_config, leaves, config_path, (*notes_of(decoder_config), *notes))
    model_config, family = read_hf_config(config_path, bare=not alone or tensors is open_universal)
    opened = tensors_of(folder, config_path, dtype=dtype) if tensors is tensors_of else tensors(weights_folder)
    leaves = leaves_of(weights_folder, model_config, family, opened, dtype=dtype, alone=alone)
    return ImportSource(kind, model_config, leaves, config_path, notes)


def load(source: ImportSource) -> Tree:
    """Load all parameters of a source into memory. Raises ValueError naming a damaged tensor."""
    return build(source.config).init(lambda name, shape, std, mean=0.0, dtype=None: source.leaves[name].give())
