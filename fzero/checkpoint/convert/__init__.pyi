from fzero.checkpoint.convert.source import ImportSource as ImportSource
from fzero.checkpoint.convert.source import load as load
from fzero.checkpoint.convert.source import open_source as open_source
