"""The tensors of a `torch.distributed.checkpoint` folder, read one at a time in one process, however many wrote it.

    .metadata       a pickle: of every tensor its shape and dtype, the chunks that it was written in, and where each lies
    __0_0.distcp    chunks behind one another, each as torch.save writes it

torch's reader unpickles .metadata with whatever classes it names. Here only the classes of that format are.
"""

from __future__ import annotations

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

from fzero.checkpoint.convert.safetensors import Entry
from fzero.checkpoint.convert.torch_zip import expect_sound

METADATA = ".metadata"
HERE = "torch.distributed.checkpoint."
KNOWN = {
    *((f"{HERE}metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    *((f"{HERE}metadata", f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    (f"{HERE}filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath")),
}


def _written_path(*parts: str) -> str:
    """A path of the machine that wrote the checkpoint: nothing is done with it."""
    return "/".join(parts)


class _Unpickler(pickle._Unpickler):  # not the one in C: a damaged index into its memo makes it take all memory
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and (module, name) in KNOWN:
            return _written_path
        if (module, name) in KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no such checkpoint needs")


def read_metadata(folder: Path) -> Metadata:
    """What the .metadata of a folder says; raises ValueError naming it where it is damaged, or holds anything but that."""
    path = folder / METADATA
    try:
        said = _Unpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(said, Metadata) or not _has_form(said):
            raise TypeError("it is not the metadata of a checkpoint")
    except Exception as error:  # a damaged pickle can raise any
        raise ValueError(f"{path}: damaged: {' '.join(str(error).split()) or type(error).__name__}") from None
    return said


def _has_form(said: Metadata) -> bool:
    """Whether what is said of tensors and places is of the types that it must be; raises AttributeError where it is not there."""
    held = [kept for kept in said.state_dict_metadata.values() if isinstance(kept, TensorStorageMetadata)]
    boxes = [tuple(numbers) for kept in held for chunk in kept.chunks for numbers in (chunk.offsets, chunk.sizes)]
    spans = [(place.offset, place.length) for place in said.storage_data.values()]
    texts = [*said.state_dict_metadata, *(place.relative_path for place in said.storage_data.values())]
    return (
        all(type(n) is int and n >= 0 for numbers in [*boxes, *spans, *(tuple(kept.size) for kept in held)] for n in numbers)
        and all(type(text) is str for text in texts)
        and all(isinstance(kept.properties.dtype, torch.dtype) for kept in held)
        and all(len(chunk.offsets) == len(chunk.sizes) == len(kept.size) for kept in held for chunk in kept.chunks)
    )


def open_dcp(folder: Path) -> dict[str, Entry]:
    """{name: tensor to be read} of the checkpoint in `folder`; what is not a tensor is left out.

    Raises ValueError where the metadata are damaged, and naming the tensor of which a part, or a file, is not there.
    """
    said = read_metadata(folder)
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(said, is_coordinator=True)
    held = {name: kept for name, kept in said.state_dict_metadata.items() if isinstance(kept, TensorStorageMetadata)}
    return {
        name: Entry(kept.properties.dtype, tuple(kept.size), lambda name=name, kept=kept: _read(folder, reader, name, kept))
        for name, kept in held.items()
    }


def _read(folder: Path, reader: FileSystemReader, name: str, kept: TensorStorageMetadata) -> Tensor:
    """A tensor of the chunks that it was written in, one of which is in memory beside it."""
    items = []
    for chunk in kept.chunks:
        index = MetadataIndex(name, chunk.offsets)
        if index not in reader.storage_data:
            raise ValueError(f"{folder / METADATA}: damaged: no place is given for {name} from {list(chunk.offsets)} on")
        zeros = torch.Size([0] * len(chunk.sizes))
        items.append(ReadItem(LoadItemType.TENSOR, MetadataIndex(name), chunk.offsets, index, zeros, chunk.sizes))
    have, wanted = sum(math.prod(chunk.sizes) for chunk in kept.chunks), math.prod(kept.size)
    if have != wanted:
        raise ValueError(f"{folder}: tensor {name} has {wanted} elements, and chunks of {have}; the checkpoint is not whole")
    into = _Into(torch.empty(kept.size, dtype=kept.properties.dtype))
    for item in items:
        place = reader.storage_data[item.storage_index]
        path = folder / place.relative_path
        if not path.is_file():
            raise ValueError(f"{path}: no such file, but tensor {name} is in it")
        if not getattr(place, "transform_descriptors", None):  # else it is not a zip as it lies there
            try:
                expect_sound(path, place.offset, place.length)
            except ValueError as error:
                raise ValueError(f"{error} (tensor {name})") from None
        try:
            reader.read_data(LoadPlan([item]), into)
        except Exception as error:  # what torch makes of damaged files
            raise ValueError(f"{path}: tensor {name} cannot be read: {' '.join(str(error).split())[:200]}") from None
    return into.whole


class _Into:
    """What FileSystemReader asks of a planner: where a chunk goes."""

    def __init__(self, whole: Tensor) -> None:
        self.whole, self.filled = whole, torch.zeros(whole.shape, dtype=torch.bool)

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        part, filled = self.whole, self.filled
        for dim, (start, size) in enumerate(zip(item.dest_offsets, item.lengths)):
            part, filled = part.narrow(dim, start, size), filled.narrow(dim, start, size)
        if filled.any():
            raise ValueError(f"two of its chunks overlap, one from {list(item.dest_offsets)} on")
        filled.fill_(True)
        return part

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        pass
