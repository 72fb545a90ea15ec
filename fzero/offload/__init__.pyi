from fzero.offload.buffer_pool import Buffer as Buffer
from fzero.offload.buffer_pool import BufferPool as BufferPool
from fzero.offload.chunk_files import LeafFiles as LeafFiles
from fzero.offload.disk_io import DiskIO as DiskIO
from fzero.offload.disk_io import DiskSettings as DiskSettings
from fzero.offload.disk_io import DiskTraffic as DiskTraffic
from fzero.offload.nvme import DiskTensor as DiskTensor
from fzero.offload.nvme import Nvme as Nvme
from fzero.offload.store import VersionedStore as VersionedStore
from fzero.offload.update_units import ScratchFile as ScratchFile
from fzero.offload.update_units import ScratchTensor as ScratchTensor

"""For contributors: what the other packages of fzero use."""

# Leaves as zarr3 arrays, with an uncompressed chunk for each slot, layer and rank
from fzero.offload import buffer_pool as buffer_pool
from fzero.offload import chunk_files as chunk_files

# Files that threads read and write by ranges of bytes, below a local folder or a URL: the parts of a checkpoint
from fzero.offload.buffer_pool import RangeReader as RangeReader
from fzero.offload.chunk_files import RowRead as RowRead
from fzero.offload.chunk_files import Rows as Rows
from fzero.offload.chunk_files import read_chunk as read_chunk

# Direct reads and writes of files, in blocks, by a few threads, and the file of disk settings
from fzero.offload.disk_io import REFUSED as REFUSED
from fzero.offload.disk_io import config_file as config_file
from fzero.offload.disk_io import file_system as file_system
from fzero.offload.disk_io import load_settings as load_settings
from fzero.offload.disk_io import mount_point as mount_point
from fzero.offload.disk_io import open_direct as open_direct
from fzero.offload.disk_io import save_settings as save_settings
from fzero.offload.disk_io import serves_direct as serves_direct

# Nvme
from fzero.offload.nvme import buffer_need as buffer_need
from fzero.offload.nvme import disk_of as disk_of
from fzero.offload.nvme import release_store as release_store
from fzero.offload.nvme import store_bytes as store_bytes

# A state on a disk
from fzero.offload.store import sum_words as sum_words

# The small files of a store
from fzero.offload.store_manifest import STEP as STEP
from fzero.offload.store_manifest import STORE as STORE
from fzero.offload.store_manifest import StepManifest as StepManifest
from fzero.offload.store_manifest import read_description as read_description
from fzero.offload.store_manifest import read_step_manifest as read_step_manifest
from fzero.offload.store_manifest import read_store as read_store
from fzero.offload.store_manifest import read_sums as read_sums

# Cut a state into units that are updated one after another
from fzero.offload.update_units import OFF as OFF
from fzero.offload.update_units import BlockRead as BlockRead

# Activations and gradients of a step in host memory or in a nameless file on a disk, which leaves nothing after a crash
from fzero.offload.update_units import DiskActivations as DiskActivations
from fzero.offload.update_units import Extent as Extent
from fzero.offload.update_units import HostActivations as HostActivations
from fzero.offload.update_units import RowBlock as RowBlock
from fzero.offload.update_units import StackNumbers as StackNumbers
from fzero.offload.update_units import UnitTransfer as UnitTransfer
from fzero.offload.update_units import UpdateUnit as UpdateUnit
from fzero.offload.update_units import begin_ahead as begin_ahead
from fzero.offload.update_units import begin_unit as begin_unit
from fzero.offload.update_units import cut_units as cut_units
from fzero.offload.update_units import is_full_stack as is_full_stack
from fzero.offload.update_units import layer_blocks as layer_blocks
from fzero.offload.update_units import read_block as read_block
