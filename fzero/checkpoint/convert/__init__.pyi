from fzero.checkpoint.convert.transformers_models import ImportSource as ImportSource
from fzero.checkpoint.convert.transformers_models import load as load
from fzero.checkpoint.convert.transformers_models import open_source as open_source

"""For contributors: what the other packages of fzero use."""

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
