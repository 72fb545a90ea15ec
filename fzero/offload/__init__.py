"""A state that does not fit: leaves in host memory or on disk, streamed through bounded buffers."""

from fzero.offload.buffer_pool import Arena, Buffer
from fzero.offload.chunk_files import Kept
from fzero.offload.disk_io import Disk, Moved, Settings
from fzero.offload.nvme import Space
from fzero.offload.scratch import Scratch, Scratched
from fzero.offload.store import Store, Stored, open_store

__all__ = ["Arena", "Buffer", "Disk", "Kept", "Moved", "Scratch", "Scratched", "Settings", "Space", "Store", "Stored", "open_store"]
