"""For contributors: what the other packages of fzero use."""

# The end of a step
from fzero.train.update.in_memory import Gradients as Gradients
from fzero.train.update.in_memory import local_shards as local_shards
from fzero.train.update.in_memory import spread as spread
from fzero.train.update.in_memory import sum_divergence as sum_divergence
from fzero.train.update.in_memory import update_donated as update_donated
from fzero.train.update.in_memory import update_pure as update_pure
from fzero.train.update.in_memory import updated_params as updated_params
from fzero.train.update.in_memory import with_local_params as with_local_params

# The end of a step with offloaded state
from fzero.train.update.offloaded import StreamedUpdate as StreamedUpdate
