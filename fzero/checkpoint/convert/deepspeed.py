"""The weights of a DeepSpeed universal checkpoint, which deepspeed.checkpoint.ds_to_universal makes for any ZeRO stage.

    zero/<parameter>/fp32.pt        the master weight: {"param": tensor, ...} from stages 1 and 2, from stage 3 its
    elements
    zero/<parameter>/exp_avg.pt     and others: Adam's moments, of the same form
    mp_rank_00_model_states.pt      shapes, frozen and shared parameters, and other values that the program saved
                                    (stage 3: zero_pp_rank_R_mp_rank_00_model_states.pt)

Found by experiment with DeepSpeed 0.19.8. param_shapes in the model states has the shapes of stage 3. A frozen
parameter is in zero/ for stages 1 and 2, and in pieces in the model states of all ranks for stage 3. A tied head is in
zero/ for stages 1 and 2, rounded to the compute dtype; shared_params names it as the embedding. Moments are not
imported.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fzero.checkpoint.convert.tensor_files import TensorEntry, expect_sound
from fzero.core.files import path_fault
from fzero.core.text_parsing import expect_regular

ZERO, FP32, STATES = "zero", "fp32.pt", "*_model_states.pt"


class _Inert:
    """Replaces an object of a class unrelated to tensors, whose state is dropped."""

    def __new__(cls, *args: Any, **options: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def find_universal(folder: Path) -> Path | None:
    """Return `folder` if it is a universal checkpoint, else the one that its file latest_universal names, or None."""
    if next(folder.glob(f"{ZERO}/*/{FP32}"), None) is not None:
        return folder
    latest = folder / "latest_universal"
    if not latest.is_file():
        return None
    name = latest.read_text(encoding="utf-8", errors="replace").strip()
    if fault := path_fault(name):
        raise ValueError(f"{latest}: damaged: the folder {name[:80]!r} that it names {fault}")
    inner = folder / name
    return inner if next(inner.glob(f"{ZERO}/*/{FP32}"), None) is not None else None


def is_plain_deepspeed(folder: Path) -> bool:
    """Whether a DeepSpeed checkpoint that was not converted is in `folder`, or one folder below."""
    return any(
        next(folder.glob(f"{prefix}{name}"), None) is not None
        for prefix in ("", "*/")
        for name in (STATES, "*_optim_states.pt")
    )


def open_universal(folder: Path) -> dict[str, TensorEntry]:
    """{name: Entry of a tensor} of the float32 weights in `folder`; raises ValueError naming a damaged file."""
    shapes: dict[str, tuple[int, ...]] = {}
    shared: dict[str, str] = {}
    frozen: dict[str, tuple[int, ...]] = {}
    states = sorted(folder.glob(STATES), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
    for path in states:
        content = _load(path, "meta")
        try:
            for group in content["param_shapes"]:
                shapes |= {name: torch.Size(shape) for name, shape in group.items()}
            shared |= content.get("shared_params") or {}
            frozen |= {name: torch.Size(shape) for name, shape in (content.get("frozen_param_shapes") or {}).items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: damaged, or not the model states of DeepSpeed ({type(error).__name__}: {error})"
            ) from None
    entries = {}
    for path in sorted(folder.glob(f"{ZERO}/*/{FP32}")):
        name = path.parent.name
        if name not in shared:
            shape, dtype = _tensor_header(path, shapes.get(name))
            entries[name] = TensorEntry(dtype, shape, lambda path=path, shape=shape: _read(path, shape))
    for name in frozen.keys() - entries.keys() - shared.keys():
        entries[name] = TensorEntry(
            torch.float32, frozen[name], lambda name=name: _read_frozen(states, name, frozen[name])
        )
    return entries


def _load(path: Path, device: str, *, mapped: bool = False) -> Any:
    """Load a file of torch.save, tensors and plain values alone; on "meta" no data are read."""
    expect_regular(path)
    try:
        unknown: list[Any] = [(_Inert, name) for name in torch.serialization.get_unsafe_globals_in_checkpoint(path)]
        with torch.serialization.safe_globals(unknown):
            return torch.load(path, map_location=device, weights_only=True, mmap=mapped or None)
    except (
        RuntimeError,
        OSError,
        EOFError,
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
        pickle.UnpicklingError,
    ) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"{path}: damaged, or not what torch.save writes: {text[:200]}") from None


def _tensor(path: Path, content: Any) -> Tensor:
    tensor = content.get("param") if isinstance(content, dict) else content
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{path}: no tensor in it; a universal checkpoint has one here, or one under 'param'")
    return tensor


def _tensor_header(path: Path, shape: tuple[int, ...] | None) -> tuple[tuple[int, ...], torch.dtype]:
    """(shape, dtype) of the tensor in a file; `shape` is that of the model states."""
    content = _load(path, "meta")
    tensor = _tensor(path, content)
    if isinstance(content, dict):
        return tuple(tensor.shape), tensor.dtype
    if shape is None:
        raise ValueError(f"{path}: elements without a shape, and no {STATES} in {path.parent.parent.parent} has it")
    if tensor.numel() != math.prod(shape):
        raise ValueError(f"{path}: {tensor.numel()} elements, and the model states have the shape {list(shape)}")
    return shape, tensor.dtype


def _read(path: Path, shape: tuple[int, ...]) -> Tensor:
    expect_sound(path)
    return _tensor(path, _load(path, "cpu")).reshape(shape)


def _read_frozen(states: list[Path], name: str, shape: tuple[int, ...]) -> Tensor:
    """A frozen parameter from the ranks' pieces of stage 3, in order, without padding."""

    def pieces() -> Iterator[Tensor]:
        for path in states:
            fragments = _load(path, "cpu", mapped=True).get("frozen_param_fragments") or {}
            if name in fragments:
                yield fragments[name].reshape(-1).float()

    flat, size = torch.cat([*pieces(), torch.empty(0)]), math.prod(shape)
    if flat.numel() < size:
        raise ValueError(
            f"{states[0].parent}: {name} is frozen, and the model states have {flat.numel()} of its {size} elements"
        )
    return flat[:size].reshape(shape).clone()
