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
from fzero.checkpoint.convert.safetensors import Entry
from fzero.core.files import make_folder


class Conversion(NamedTuple):
    """How some tensors of a folder become parameters."""

    first: str  # the name of the first parameter
    transform: Any  # of transformers
    tensors: list[tuple[str, str, Entry]]  # (name in the folder, pattern that it has matched, the tensor)

    def run(self, module: nn.Module, read: Callable[[Entry], Tensor]) -> dict[str, Tensor]:
        """The parameters by name."""
        transform = copy.deepcopy(self.transform)
        for name, pattern, entry in self.tensors:
            transform.add_tensor(self.first, name, pattern, partial(read, entry))
        made = transform.convert(self.first, model=module, config=module.config)
        return {name: some[0] if isinstance(some, list) else some for name, some in made.items()}


def weights_of(module: Any, folder: Path) -> dict[str, Entry]:
    """The parameters, and the buffers that a state_dict has, by name, of the module that `folder` is of.

    Raises ValueError naming the tensor that is missing, unexpected, or of another shape.
    """
    held = module.state_dict(keep_vars=True)
    firsts: dict[int, str] = {}  # of tied parameters, the first name is the one that a module lists
    own = {name: firsts.setdefault(id(leaf), name) for name, leaf in held.items()}
    passed_over = [*(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())]
    passed_over += [f"{re.escape(name)}$" for name, _ in module.named_buffers() if name not in held]
    found: dict[str, Entry] = {}
    for conversion in conversions_of(module, tensors_of(folder), held):
        blank = conversion.run(module, lambda entry: torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
        for name, leaf in blank.items():
            if name not in held:
                if not any(re.search(pattern, name) for pattern in passed_over):
                    raise ValueError(f"{folder}: {name} is there, and {type(module).__name__} has no such leaf")
                continue
            if leaf.shape != held[name].shape:
                shapes = list(leaf.shape), list(held[name].shape)
                raise ValueError(f"{folder}: {name} has shape {shapes[0]}, and by the config {shapes[1]}")
            if own[name] not in found or own[name] == name:
                found[own[name]] = Entry(leaf.dtype, tuple(leaf.shape), partial(read_one, conversion, module, name))
    missing = next((name for name in own.values() if name not in found), None)
    if missing is not None:
        raise ValueError(
            f"{folder}: {missing} of {type(module).__name__} is missing from the weights; give the task that the "
            "folder was saved for"
        )
    return found


def read_one(conversion: Conversion, module: nn.Module, name: str) -> Tensor:
    """A parameter's values."""
    return conversion.run(module, lambda entry: entry.give())[name]


def conversions_of(module: Any, tensors: dict[str, Entry], held: dict[str, Any]) -> list[Conversion]:
    """The conversions of all tensors of a folder, as transformers' own reader makes them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(module)
    renamings = [one for one in table if isinstance(one, WeightRenaming)]
    converters = [one for one in table if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    made: dict[str, Conversion] = {}
    for name in sorted(tensors, key=dot_natural_key):
        prefix = module.base_model_prefix
        target, pattern = rename_source_key(name, renamings, converters, prefix, held)
        if target not in held and name in held:
            target, pattern = rename_source_key(name, [], [], prefix, held)
        transform = WeightRenaming(name, target) if pattern is None else by_pattern[pattern]
        one = made.setdefault(target, Conversion(target, transform, []))
        one.tensors.append((name, pattern or name, tensors[name]))
    return list(made.values())


def keep_on_disk(value: Tensor, folder: Path) -> Tensor:
    """A copy of a tensor in a file without a name: the host's memory need not hold it, and nobody removes it."""
    if not value.numel():
        return value.cpu()
    make_folder(folder)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        held = torch.from_file(file.name, shared=True, size=value.numel(), dtype=value.dtype).view(value.shape)
    return held.copy_(value)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """transformers draws no progress bars within."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
