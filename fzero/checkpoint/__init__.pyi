from fzero.checkpoint.directory import Sound as Sound
from fzero.checkpoint.directory import first_sound as first_sound
from fzero.checkpoint.directory import latest as latest
from fzero.checkpoint.directory import remove as remove
from fzero.checkpoint.directory import step_folder as step_folder
from fzero.checkpoint.directory import steps as steps
from fzero.checkpoint.manifest import Lazy as Lazy
from fzero.checkpoint.manifest import Leaf as Leaf
from fzero.checkpoint.manifest import read_manifest as read_manifest
from fzero.checkpoint.reader import CheckpointReader as CheckpointReader
from fzero.checkpoint.reader import open_checkpoint as open_checkpoint
from fzero.checkpoint.reader import read_extra as read_extra
from fzero.checkpoint.restore_tree import restore as restore
from fzero.checkpoint.restore_tree import restore_leaves as restore_leaves
from fzero.checkpoint.save_state import Saved as Saved
from fzero.checkpoint.save_state import SaveFailed as SaveFailed
from fzero.checkpoint.stored_state import expect_sound as expect_sound
from fzero.checkpoint.stored_state import newest_sound as newest_sound
from fzero.checkpoint.stored_state import verify as verify
from fzero.checkpoint.writer import Writer as Writer
from fzero.checkpoint.writer import save as save
from fzero.core.storage import Damaged as Damaged
from fzero.core.storage import Folder as Folder

"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.checkpoint import convert as convert
from fzero.checkpoint import directory as directory
from fzero.checkpoint import restore_state as restore_state
from fzero.checkpoint import stored_state as stored_state

# Modules
from fzero.checkpoint.convert import huggingface as huggingface
from fzero.checkpoint.convert import peft as peft

# Weights to and from folders that `transformers` reads and writes
from fzero.checkpoint.convert.huggingface import read_hf_config as read_hf_config

# Any model of `transformers` as a Model, from a folder or a config, and back into a folder
from fzero.checkpoint.convert.transformers_models import save_decoder as save_decoder

# A mixture of experts from a dense model
from fzero.checkpoint.convert.upcycle import Upcycle as Upcycle
from fzero.checkpoint.convert.upcycle import upcycled_config as upcycled_config
from fzero.checkpoint.convert.upcycle import upcycled_leaves as upcycled_leaves

# The checkpoint directory
from fzero.checkpoint.directory import SPARE as SPARE
from fzero.checkpoint.directory import clean_step as clean_step
from fzero.checkpoint.directory import incomplete_lines as incomplete_lines
from fzero.checkpoint.directory import step_of as step_of

# The manifest of a checkpoint
from fzero.checkpoint.manifest import MANIFEST as MANIFEST
from fzero.checkpoint.manifest import parse_leaf as parse_leaf

# Restore a TrainState at another mesh, stage, memory or policy; each rank reads its slices of a checkpoint or store
from fzero.checkpoint.restore_state import error_lines as error_lines
from fzero.checkpoint.restore_state import renamed_leaves as renamed_leaves
from fzero.checkpoint.restore_state import save_snapshot as save_snapshot

# Restore trees from a checkpoint
from fzero.checkpoint.restore_tree import code_lines as code_lines
from fzero.checkpoint.restore_tree import dtype_name as dtype_name
from fzero.checkpoint.restore_tree import encode_moments as encode_moments

# Another run's offload store, read only
from fzero.checkpoint.stored_state import StoreSnapshot as StoreSnapshot
from fzero.checkpoint.stored_state import verify_store as verify_store
