"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.run.debug import bisect_runs as bisect_runs
from fzero.run.debug import checkpoint_diff as checkpoint_diff
from fzero.run.debug import checkpoint_list as checkpoint_list
from fzero.run.debug import replay as replay
