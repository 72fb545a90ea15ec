from fzero.comm.rank_tables import TreeLayout as TreeLayout

"""For contributors: what the other packages of fzero use."""

# The rows of a batch
from fzero.train.batch import split_batch as split_batch

# A train step as one CUDA graph
from fzero.train.capture import SHARE as SHARE
from fzero.train.capture import pop_news as pop_news
from fzero.train.capture import refusal_of as refusal_of

# Checks of a step, and of parameters and their master weights
from fzero.train.checks import compare as compare

# The codes in which parameters and gradients travel, made by the kernels of an execution
from fzero.train.codes import coder_for as coder_for
from fzero.train.codes import coder_of as coder_of

# Options of a step
from fzero.train.execution import CAPTURE as CAPTURE
from fzero.train.execution import SIGMAS as SIGMAS
from fzero.train.execution import UPDATES as UPDATES
from fzero.train.execution import WARMUP as WARMUP
from fzero.train.execution import WINDOW as WINDOW
from fzero.train.execution import Execution as Execution
from fzero.train.execution import Skip as Skip

# The loss without dropout
from fzero.train.gradient import make_eval_step as make_eval_step

# Local steps
from fzero.train.local_steps import average_members as average_members
from fzero.train.local_steps import init_local as init_local
from fzero.train.local_steps import local_specs as local_specs
from fzero.train.local_steps import make_local_step as make_local_step
from fzero.train.local_steps import restart_member as restart_member
from fzero.train.local_steps import synchronize as synchronize

# The loss of a micro-batch, of a Model or of a plain function, and the sum of losses over micro-batches and ranks
from fzero.train.loss import context_of as context_of

# The state before the first step
from fzero.train.make_state import init_state as init_state

# Detect silent corruption
from fzero.train.sdc_check import make_check as make_check

# Loss spikes
from fzero.train.spike import Spike as Spike

# What passes between the stages of a pipeline
from fzero.train.stage_exchange import Segment as Segment
from fzero.train.stage_exchange import SegmentActivations as SegmentActivations
from fzero.train.stage_exchange import segments_of as segments_of
from fzero.train.stage_exchange import signature_of as signature_of
from fzero.train.stage_exchange import stages_of as stages_of

# The state of a training run as a value
from fzero.train.state import LOSS as LOSS
from fzero.train.state import PREVIOUS as PREVIOUS
from fzero.train.state import Metrics as Metrics
from fzero.train.state import TrainState as TrainState
from fzero.train.state import expect_alive as expect_alive
from fzero.train.state import expect_shapes as expect_shapes
from fzero.train.state import first_stats as first_stats
from fzero.train.state import meta_state as meta_state
from fzero.train.state import move_leaf as move_leaf
from fzero.train.state import move_to_memory as move_to_memory
from fzero.train.state import state_specs as state_specs
from fzero.train.state_on_disk import DiskLayout as DiskLayout

# A state part of which rests on a disk
from fzero.train.state_on_disk import from_text as from_text
from fzero.train.state_on_disk import plan_record as plan_record
from fzero.train.state_on_disk import reopen_state as reopen_state
from fzero.train.state_on_disk import write_to_disk as write_to_disk

# The training step
from fzero.train.step import make_train_step as make_train_step

# The gradients of a step
from fzero.train.streamed_model import StreamedModel as StreamedModel

# A state's whole parameters
from fzero.train.to_module import full_values as full_values
from fzero.train.to_module import stacks_of as stacks_of

# The end of a step
from fzero.train.update.in_memory import spread as spread
from fzero.train.update.in_memory import sum_divergence as sum_divergence
