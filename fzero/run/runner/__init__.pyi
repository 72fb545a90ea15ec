"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.run.runner import auto_resume as auto_resume
from fzero.run.runner import loop as loop
from fzero.run.runner import pretrain as pretrain
from fzero.run.runner import rollback as rollback

# The validation loss of a state, of its parameters and of their average
from fzero.run.runner.evaluate import Sampling as Sampling
from fzero.run.runner.evaluate import analyze_by_model as analyze_by_model
from fzero.run.runner.evaluate import generate as generate

# Prepare a run of `fzero pretrain`
from fzero.run.runner.pretrain import expect_memory as expect_memory
from fzero.run.runner.pretrain import resolve_placement as resolve_placement

# The checkpoints that a run writes while it trains, and the policy if one cannot be written
from fzero.run.runner.saver import expect_disk as expect_disk
from fzero.run.runner.saver import to_memory as to_memory

# The rows of a run's steps
from fzero.run.runner.step_rows import documents_of as documents_of
from fzero.run.runner.step_rows import lines_of as lines_of
