"""The block sizes of kernels: those of the chip's file or a default, or the fastest measured on this device.

A configuration is a dict of a kernel's constants and launch options, {"BLOCK": 1024, "num_warps": 8, "num_stages": 2}.
Timing happens in `tune` alone, which launches call only inside `searching()`; the result is kept in the user's cache
folder. Other runs never depend on a clock.

A chip's file (chips/*.json) has the names of its GPUs (`names`, a regular expression), the speeds of forms of attention
with their source, and block sizes. What `fzero bench` measured comes before it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero.core import gpu
from fzero.core.files import make_folder, replacing
from fzero.core.storage import user_folder
from fzero.core.text_parsing import read_json
from fzero.kernels.custom_operator import triton

LISTED = Path(__file__).parent / "chips"
DEFAULT = "hopper"  # the file whose block sizes serve on GPUs that have none
Config = dict[str, int]  # of a kernel: its block sizes and launch options


class Speed(NamedTuple):
    """How fast a form of attention is, in calls of one shape."""

    form: str
    dtype: str
    dim: int  # of a head
    queries: int
    tflop_s: float
    repeats: bool = True  # whether more runs gave the same bits


def kernel_folder() -> Path:
    """Where what was measured of kernels on this machine is kept: $XDG_CACHE_HOME (or ~/.cache)/fzero/kernels."""
    return user_folder("XDG_CACHE_HOME") / "kernels"


def file_name(gpu: str) -> str:
    """A GPU's name as part of a file's name.

    >>> file_name("NVIDIA H100 80GB HBM3")
    'NVIDIA-H100-80GB-HBM3'
    """
    return re.sub(r"[^A-Za-z0-9]+", "-", gpu).strip("-")


@functools.cache
def listed() -> dict[str, Mapping[str, Any]]:
    """The files of chips/, by name."""
    return {path.stem: read_json(path) for path in sorted(LISTED.glob("*.json"))}


def chip_of(gpu: str) -> Mapping[str, Any]:
    """The listed file of a GPU by its name; {} if there is none.

    >>> chip_of("NVIDIA GH200 480GB")["name"]
    'Hopper: H100, H200, GH200'
    """
    return next((chip for chip in listed().values() if re.search(chip["names"], gpu)), {})


class ConfigTable(list[Config]):
    """The configurations of a kernel, or of one kind of its calls, by the name in the files of chips/."""

    def __init__(self, name: str) -> None:
        super().__init__(listed()[DEFAULT]["blocks"]["rows"][name])
        self.name = name

    def for_gpu(self, gpu: str) -> Sequence[Config]:
        """The configurations for a GPU by its name.

        >>> ConfigTable("_glu").for_gpu("NVIDIA A100-SXM4-80GB")[0]
        {'BLOCK': 1024, 'num_warps': 4}
        """
        return chip_of(gpu).get("blocks", {"rows": {}})["rows"].get(self.name, self)


def measured_file(gpu: str) -> Path:
    """Where `fzero bench` writes how fast the forms of attention are on a GPU of this machine."""
    return kernel_folder() / f"{file_name(gpu)}-attention.json"


@functools.cache
def measured(gpu: str) -> tuple[Speed, ...]:
    """The figures that `fzero bench` measured on this machine's GPU of this name; () if it did not."""
    path = measured_file(gpu)
    if not path.is_file():
        return ()
    table = read_json(path)
    try:
        return speeds_of(table["speeds"])
    except (LookupError, TypeError) as error:
        raise ValueError(
            f"{path} is not what `fzero bench` writes (there is no {error}); remove it, or run "
            "`fzero bench --only attention` again"
        ) from error


def speeds_of(rows: Iterable[Mapping[str, Any]]) -> tuple[Speed, ...]:
    """The Speeds of a file's rows; what else a row says, such as its source, is for readers."""
    fields = [(field, field in Speed._field_defaults) for field in Speed._fields]
    return tuple(Speed(**{field: row[field] for field, usual in fields if field in row or not usual}) for row in rows)


def without_repeats(gpu: str, dtype: str) -> set[str]:
    """The forms of attention whose second run gave other bits on this machine."""
    return {speed.form for speed in measured(gpu) if speed.dtype == dtype and not speed.repeats}


def write_measured(gpu: str, speeds: Sequence[Speed]) -> Path:
    """Write what was measured on a GPU of this machine, from where `order_of_attention` reads it."""
    path = measured_file(gpu)
    make_folder(path.parent)
    with replacing(path, cache=True) as file:
        file.write((json.dumps({"speeds": [speed._asdict() for speed in speeds]}, indent=1) + "\n").encode())
    measured.cache_clear()
    order_of_attention.cache_clear()
    return path


@functools.lru_cache(maxsize=256)
def order_of_attention(gpu: str, dtype: str, dim: int, queries: int) -> tuple[str, ...]:
    """The forms of attention in the order in which "auto" asks them on a GPU, the fastest first.

    >>> order_of_attention("NVIDIA H100 80GB HBM3", "bfloat16", 128, 8192)
    ('fa3', 'cudnn', 'triton', 'flash')
    """
    table = chip_of(gpu).get("attention", {"order": [], "speeds": []})
    speeds = measured(gpu) or speeds_of(table["speeds"])
    nearest: dict[str, Speed] = {}
    for speed in speeds:
        if (speed.dtype, speed.dim) == (dtype, dim):
            distance, best_distance = (
                abs(math.log(s.queries / queries)) if s else math.inf for s in (speed, nearest.get(speed.form))
            )
            if distance < best_distance:
                nearest[speed.form] = speed
    fastest = sorted(nearest, key=lambda form: -nearest[form].tflop_s)
    return (*fastest, *(form for form in table["order"] if form not in nearest))


# ---- configurations measured on this device --------------------------------------------------------------------------

_LOADED: dict[Path, dict[str, Config]] = {}
_SEARCHING: list[bool] = []


@functools.cache
def cache_file(device: torch.device) -> Path:
    """The file of a CUDA device's configurations, by device and Triton's version, in the user's cache."""
    name = file_name(gpu.properties(device).name)
    return kernel_folder() / f"{name}-triton-{triton.__version__}.json"


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
    """The configurations of a kernel on a device: its chip's or the table's."""
    if device.type != "cuda" or not isinstance(configs, ConfigTable):
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
    """The fastest of `candidates` by `seconds(config)` (infinite if one fails), written into the file."""
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
    """A context in which a launch for a new shape times all configurations and keeps the fastest."""
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
    """Run `kernel[grid(config)](*arguments, **constants, **config)` on the first argument's device."""
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
