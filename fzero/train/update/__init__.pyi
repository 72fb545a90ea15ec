"""For contributors: what the other packages of fzero use."""

# The end of a step
from fzero.train.update.in_memory import Gradients as Gradients
from fzero.train.update.in_memory import InMemoryUpdate as InMemoryUpdate
from fzero.train.update.in_memory import spread as spread
from fzero.train.update.in_memory import sum_divergence as sum_divergence
from fzero.train.update.in_memory import updated_params as updated_params

# The end of a step with offloaded state
from fzero.train.update.offloaded import StreamedUpdate as StreamedUpdate
