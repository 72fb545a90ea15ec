"""The block sizes of kernels: those of the chip's file or a default chosen from shapes, or the fastest measured on this
device, kept in the user's cache folder.

A configuration is a dict of a kernel's constants and launch options, {"BLOCK": 1024, "num_warps": 8, "num_stages": 2}:
JSON, and keyword arguments of a launch. Timing happens in `tune` alone, and launches call it only inside `searching()`:
run a step of your own there once, and every kernel that it launches has found its configuration for those shapes. Other
runs never depend on a clock.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fzero.core import gpu
from fzero.core.files import make_folder, replacing
from fzero.core.text_parsing import read_json
from fzero.kernels import chips
from fzero.kernels.optional_triton import triton

Config = chips.Config
_LOADED: dict[Path, dict[str, Config]] = {}
_SEARCHING: list[bool] = []


@functools.cache
def cache_file(device: torch.device) -> Path:
    """Where the configurations of a CUDA device are kept: $XDG_CACHE_HOME (or
    ~/.cache)/fzero/kernels/DEVICE-triton-VERSION.json.
    """
    name = chips.file_name(gpu.properties(device).name)
    return chips.kernel_folder() / f"{name}-triton-{triton.__version__}.json"


def _read(path: Path) -> dict[str, Config]:
    if path not in _LOADED:
        try:
            _LOADED[path] = read_json(path) if path.exists() else {}
        except ValueError as error:
            raise ValueError(f"{error}; remove it, and tune again") from error
    return _LOADED[path]


def _key(kernel: str, shape: Sequence[Any]) -> str:
    return " ".join([kernel, *map(str, shape)])


def rows(configs: Sequence[Config], device: torch.device) -> Sequence[Config]:
    """The configurations of a kernel on a device: those of its chip, where `configs` is a table (see kernels.chips)."""
    if device.type != "cuda" or not isinstance(configs, chips.ConfigTable):
        return configs
    return configs.for_gpu(gpu.properties(device).name)


def config(kernel: str, shape: Sequence[Any], default: Config, device: torch.device) -> Config:
    """The configuration measured for `kernel` and a shape (sizes, dtypes) on this device, or `default`."""
    if device.type != "cuda":
        return default
    return _read(cache_file(device)).get(_key(kernel, shape), default)


def tune(
    kernel: str,
    shape: Sequence[Any],
    candidates: Sequence[Config],
    seconds: Callable[[Config], float],
    device: torch.device,
) -> Config:
    """The fastest of `candidates` by `seconds(config)` (infinite if one does not run), written into the device's
    file.
    """
    if not candidates:
        raise ValueError(f"{kernel}: there is no configuration to try")
    best = min(candidates, key=seconds)
    path = cache_file(device)
    entries = dict(_read(path)) | {_key(kernel, shape): best}
    make_folder(path.parent)
    with replacing(path, cache=True) as file:
        file.write((json.dumps(entries, indent=1, sort_keys=True) + "\n").encode())
    _LOADED[path] = entries
    return best


def _copy(x: torch.Tensor) -> torch.Tensor:
    """A copy of x with the same strides, which clone() does not always keep."""
    return x.new_empty_strided(x.shape, x.stride()).copy_(x)


@contextlib.contextmanager
def searching() -> Iterator[None]:
    """A context in which each launch for a shape without a measured configuration times all configurations and keeps
    the fastest.
    """
    _SEARCHING.append(True)
    try:
        yield
    finally:
        _SEARCHING.pop()


def launch(
    kernel: Any,
    grid: Callable[[Config], tuple[int, ...]],
    arguments: Sequence[Any],
    configs: Sequence[Config],
    *,
    shape: Sequence[Any],
    default: Config | None = None,
    **constants: Any,
) -> None:
    """Run `kernel[grid(config)](*arguments, **constants, **config)` on the device of the first argument, a tensor.

    configs: those there are; `default` (the first of them if None) serves if none was measured for `shape` on this
    device.
    """
    device, name = arguments[0].device, kernel.__name__
    configs = rows(configs, device)
    chosen = config(name, shape, default or configs[0], device)
    if _SEARCHING and device.type == "cuda" and _key(name, shape) not in _read(cache_file(device)):
        copies = [
            _copy(a) if isinstance(a, torch.Tensor) else a for a in arguments
        ]  # a kernel may write where it reads

        def seconds(config: Config) -> float:
            try:
                return triton.testing.do_bench(
                    lambda: kernel[grid(config)](*copies, **constants, **config), return_mode="median"
                )
            except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError):
                return float("inf")

        chosen = tune(name, shape, configs, seconds, device)
    kernel[grid(chosen)](*arguments, **constants, **chosen)
