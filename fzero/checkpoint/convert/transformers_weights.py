"""The weights in a folder of `transformers` by the names of a module's parameters, each read on request.

Names and layouts of files differ from those of the modules (experts that are saved one by one are one parameter): the
table of renamings and conversions is transformers' own, run first on tensors without memory, which gives the shapes,
and again when a weight is read.
"""

from __future__ import annotations

import contextlib
import copy
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fzero.checkpoint.convert.huggingface_read import tensors_of
from fzero.checkpoint.convert.safetensors import TensorEntry
from fzero.core.files import make_folder


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


def weights_of(module: Any, folder: Path) -> dict[str, TensorEntry]:
    """The parameters, and the buffers that a state_dict has, by name, of the module that `folder` is of.

    Raises ValueError naming the tensor that is missing, unexpected, or of another shape.
    """
    state = module.state_dict(keep_vars=True)
    firsts: dict[int, str] = {}  # of tied parameters, the first name is the one that a module lists
    first_names = {name: firsts.setdefault(id(leaf), name) for name, leaf in state.items()}
    passed_over = [*(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())]
    passed_over += [f"{re.escape(name)}$" for name, _ in module.named_buffers() if name not in state]
    entries: dict[str, TensorEntry] = {}
    for conversion in conversions_of(module, tensors_of(folder), state):
        blank = conversion.run(module, lambda entry: torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
        for name, leaf in blank.items():
            if name not in state:
                if not any(re.search(pattern, name) for pattern in passed_over):
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
    """A copy of a tensor in a file without a name: the host's memory need not hold it, and nobody removes it."""
    if not value.numel():
        return value.cpu()
    make_folder(folder)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        mapped = torch.from_file(file.name, shared=True, size=value.numel(), dtype=value.dtype).view(value.shape)
    return mapped.copy_(value)


@contextlib.contextmanager
def hide_progress_bars() -> Iterator[None]:
    """transformers draws no progress bars within."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
