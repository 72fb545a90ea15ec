"""A state that does not fit: leaves in host memory or on disk, streamed through bounded buffers."""

from fzero.offload.buffer_pool import Buffer, BufferPool
from fzero.offload.chunk_files import LeafFiles
from fzero.offload.disk_io import DiskIO, DiskSettings, DiskTraffic
from fzero.offload.nvme import Nvme
from fzero.offload.scratch import ScratchFile, ScratchTensor
from fzero.offload.store import DiskTensor, VersionedStore
from fzero.offload.store_folder import open_store

__all__ = [
    "Buffer",
    "BufferPool",
    "DiskIO",
    "DiskSettings",
    "DiskTensor",
    "DiskTraffic",
    "LeafFiles",
    "Nvme",
    "ScratchFile",
    "ScratchTensor",
    "VersionedStore",
    "open_store",
]
