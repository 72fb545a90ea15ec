"""The tensors of checkpoints of `torch.distributed` and of DeepSpeed, read one at a time in one process.

A folder of `torch.distributed.checkpoint`, whatever number of processes wrote it:

    .metadata       a pickle: the shape, dtype and chunks of every tensor, and the place of each chunk
    __0_0.distcp    chunks one after another, each as torch.save writes it

torch's reader unpickles any class that .metadata names. This one allows only the classes of that format.

The weights of a DeepSpeed universal checkpoint, which deepspeed.checkpoint.ds_to_universal makes for any ZeRO stage:

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

import enum
import io
import math
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

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
            entries[name] = TensorEntry(dtype, shape, lambda path=path, shape=shape: _read_parameter(path, shape))
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


def _read_parameter(path: Path, shape: tuple[int, ...]) -> Tensor:
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


METADATA = ".metadata"
PACKAGE = "torch.distributed.checkpoint."
ALLOWED = {
    *(
        (f"{PACKAGE}metadata", name)
        for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")
    ),
    *((f"{PACKAGE}metadata", f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    (f"{PACKAGE}filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath")),
}


def _written_path(*parts: str) -> str:
    """A path of the machine that wrote the checkpoint; it is not used."""
    return "/".join(parts)


def _member(kind: Any, name: str) -> Any:
    """The member of an enum, which Python 3.11.0 to 3.11.3 pickle as getattr(enum, name)."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it asks for {name!r} of what is no enum that has it")
    return kind[name]


class _Unpickler(pickle._Unpickler):  # in Python: with a damaged memo index the one in C allocates all memory
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and (module, name) in ALLOWED:
            return _written_path
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no such checkpoint needs")


def read_metadata(folder: Path) -> Metadata:
    """Read the .metadata of a folder; raises ValueError naming it if it is damaged or has other content."""
    path = folder / METADATA
    expect_regular(path)
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(metadata, Metadata) or not _has_form(metadata):
            raise TypeError("it is not the metadata of a checkpoint")
    except Exception as error:  # a damaged pickle can raise any error
        raise ValueError(f"{path}: damaged: {' '.join(str(error).split()) or type(error).__name__}") from None
    return metadata


def _has_form(metadata: Metadata) -> bool:
    """Whether all values are of the required types; raises AttributeError if one is missing."""
    tensors = [entry for entry in metadata.state_dict_metadata.values() if isinstance(entry, TensorStorageMetadata)]
    boxes = [tuple(numbers) for entry in tensors for chunk in entry.chunks for numbers in (chunk.offsets, chunk.sizes)]
    spans = [(storage.offset, storage.length) for storage in metadata.storage_data.values()]
    texts = [*metadata.state_dict_metadata, *(storage.relative_path for storage in metadata.storage_data.values())]
    return (
        all(
            type(n) is int and n >= 0
            for numbers in [*boxes, *spans, *(tuple(entry.size) for entry in tensors)]
            for n in numbers
        )
        and all(type(text) is str for text in texts)
        and all(isinstance(entry.properties.dtype, torch.dtype) for entry in tensors)
        and all(
            len(chunk.offsets) == len(chunk.sizes) == len(entry.size) for entry in tensors for chunk in entry.chunks
        )
    )


def open_dcp(folder: Path) -> dict[str, TensorEntry]:
    """{name: Entry of a tensor} of the checkpoint in `folder`; raises ValueError naming what is damaged or missing."""
    metadata = read_metadata(folder)
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    tensors = {
        n: entry for n, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }
    return {
        name: TensorEntry(
            entry.properties.dtype, tuple(entry.size), lambda name=name, entry=entry: _read(folder, reader, name, entry)
        )
        for name, entry in tensors.items()
    }


def _read(folder: Path, reader: FileSystemReader, name: str, entry: TensorStorageMetadata) -> Tensor:
    """Assemble a tensor from its chunks, one of which is in memory beside it."""
    items = []
    for chunk in entry.chunks:
        index = MetadataIndex(name, chunk.offsets)
        if index not in reader.storage_data:
            raise ValueError(
                f"{folder / METADATA}: damaged: no place is given for {name} from {list(chunk.offsets)} on"
            )
        zeros = torch.Size([0] * len(chunk.sizes))
        items.append(ReadItem(LoadItemType.TENSOR, MetadataIndex(name), chunk.offsets, index, zeros, chunk.sizes))
    chunk_elements, elements = sum(math.prod(chunk.sizes) for chunk in entry.chunks), math.prod(entry.size)
    if chunk_elements != elements:
        raise ValueError(
            f"{folder}: tensor {name} has {elements} elements, and chunks of {chunk_elements}; the checkpoint is not "
            "whole"
        )
    planner: Any = _TensorPlanner(torch.empty(entry.size, dtype=entry.properties.dtype))
    for item in items:
        storage = reader.storage_data[item.storage_index]
        if fault := path_fault(storage.relative_path):
            raise ValueError(f"{folder / METADATA}: damaged: the file of {name}, {storage.relative_path!r}, {fault}")
        path = folder / storage.relative_path
        if not path.is_file():
            raise ValueError(f"{path}: no such file, but tensor {name} is in it")
        if not getattr(storage, "transform_descriptors", None):  # otherwise the bytes are not a plain zip
            try:
                expect_sound(path, storage.offset, storage.length)
            except ValueError as error:
                raise ValueError(f"{error} (tensor {name})") from None
        try:
            reader.read_data(LoadPlan([item]), planner)
        except Exception as error:  # the errors of torch for damaged files
            raise ValueError(f"{path}: tensor {name} cannot be read: {' '.join(str(error).split())[:200]}") from None
    return planner.tensor


class _TensorPlanner:
    """The planner that FileSystemReader asks where a chunk goes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.filled = tensor, torch.zeros(tensor.shape, dtype=torch.bool)

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        chunk, filled = self.tensor, self.filled
        for dim, (start, size) in enumerate(zip(item.dest_offsets, item.lengths)):
            chunk, filled = chunk.narrow(dim, start, size), filled.narrow(dim, start, size)
        if filled.any():
            raise ValueError(f"two of its chunks overlap, one from {list(item.dest_offsets)} on")
        filled.fill_(True)
        return chunk

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        pass
