"""The tensors of a `torch.distributed.checkpoint` folder, read one at a time in one process, whatever number wrote it.

    .metadata       a pickle: the shape, dtype and chunks of every tensor, and the place of each chunk
    __0_0.distcp    chunks one after another, each as torch.save writes it

torch's reader unpickles any class that .metadata names. This one allows only the classes of that format.
"""

from __future__ import annotations

import enum
import io
import math
import pickle
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
