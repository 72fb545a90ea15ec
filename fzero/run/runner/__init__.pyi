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

# One text
from fzero.run.runner.continue_text import continue_text as continue_text

# The validation loss of a state, of its parameters and of their average
from fzero.run.runner.evaluate import analyze_by_model as analyze_by_model

# Completions of a file of prompts
from fzero.run.runner.generate_file import generate_file as generate_file

# A model under lm-evaluation-harness
from fzero.run.runner.harness import evaluate_tasks as evaluate_tasks

# Completions of a file, made again
from fzero.run.runner.replay_completions import replay_file as replay_file

# The rows of a run's steps
from fzero.run.runner.step_rows import documents_of as documents_of
from fzero.run.runner.step_rows import lines_of as lines_of
