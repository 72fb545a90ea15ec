"""A state that does not fit: leaves in host memory or on disk, streamed through bounded buffers."""

from fzero.offload.arena import Arena, Buffer
from fzero.offload.chunks import Kept
from fzero.offload.disk import Disk, Moved, Settings
from fzero.offload.scratch import Scratch, Scratched
from fzero.offload.space import Space
from fzero.offload.store import Store, Stored, open_store

__all__ = ["Arena", "Buffer", "Disk", "Kept", "Moved", "Scratch", "Scratched", "Settings", "Space", "Store", "Stored", "open_store"]
