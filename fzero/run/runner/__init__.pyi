"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.run.runner import auto_resume as auto_resume
from fzero.run.runner import bisect_runs as bisect_runs
from fzero.run.runner import checkpoint_diff as checkpoint_diff
from fzero.run.runner import checkpoint_list as checkpoint_list
from fzero.run.runner import loop as loop
from fzero.run.runner import pretrain as pretrain
from fzero.run.runner import replay as replay
from fzero.run.runner import rollback as rollback

# The validation loss of a state, of its parameters and of their average
from fzero.run.runner.evaluate import Sampling as Sampling
from fzero.run.runner.evaluate import analyze_by_model as analyze_by_model
from fzero.run.runner.evaluate import generate as generate

# The rows of a run's steps
from fzero.run.runner.step_rows import documents_of as documents_of
from fzero.run.runner.step_rows import lines_of as lines_of
