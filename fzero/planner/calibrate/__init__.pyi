"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.planner.calibrate import disk as disk
from fzero.planner.calibrate import machine as machine
