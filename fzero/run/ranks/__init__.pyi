"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.run.ranks import coordinator as coordinator
from fzero.run.ranks import signals as signals

# Coordinate the processes of one command
from fzero.run.ranks.coordinator import TIMEOUT_S as TIMEOUT_S
from fzero.run.ranks.coordinator import Coordinator as Coordinator
from fzero.run.ranks.coordinator import Say as Say
from fzero.run.ranks.coordinator import join as join

# Resume on another number of processes
from fzero.run.ranks.elastic import refit_mesh as refit_mesh
from fzero.run.ranks.elastic import stand_by as stand_by

# Signals that end a run
from fzero.run.ranks.signals import handlers_restored as handlers_restored
from fzero.run.ranks.signals import stop_signals as stop_signals

# The watch thread of a rank
from fzero.run.ranks.watchdog import watch as watch
from fzero.run.ranks.watchdog import watch_steps as watch_steps
