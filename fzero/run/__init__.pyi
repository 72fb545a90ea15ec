from fzero.run.config.config_table import from_table as from_table
from fzero.run.config.deepspeed_optim import block_mask_of as block_mask_of
from fzero.run.measure.memory_check import memory_needed as memory_needed
from fzero.run.runner.loop import train_run as train_run
from fzero.run.setup.build import Options as Options
from fzero.run.setup.vocabulary import tuned_config as tuned_config

"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.run.config import config_table as config_table
from fzero.run.config import unused_keys as unused_keys

# A config as a nested table, and as JSON text
from fzero.run.config.config_table import apply_table as apply_table
from fzero.run.config.config_table import recipe as recipe
from fzero.run.config.config_table import to_json as to_json
from fzero.run.config.config_table import to_table as to_table

# A config as a nested table, and as JSON text
from fzero.run.config.config_versions import current_keys as current_keys

# A DeepSpeed config as a config of a run
from fzero.run.config.deepspeed import merge_tables as merge_tables
from fzero.run.config.deepspeed import read_deepspeed as read_deepspeed

# The objectives of a run as values
from fzero.run.config.objectives import fine_tuning_presets as fine_tuning_presets
from fzero.run.config.objectives import objective_of as objective_of
from fzero.run.config.objectives import unit_of as unit_of

# The placement of a run
from fzero.run.config.placement import FLAGS as FLAGS
from fzero.run.config.placement import KEYS as KEYS
from fzero.run.config.placement import may_change as may_change

# The configuration of a run as a value
from fzero.run.config.run_config import LocalSteps as LocalSteps
from fzero.run.config.run_config import RunConfig as RunConfig

# Stages of a run
from fzero.run.config.stages import STAGED as STAGED

# What a field of a config says of its key, besides its bounds
from fzero.run.config.unused_keys import SEND_SIGNS as SEND_SIGNS
from fzero.run.config.unused_keys import SIGNS as SIGNS
from fzero.run.config.unused_keys import codec_of as codec_of
from fzero.run.config.unused_keys import count_sums as count_sums
from fzero.run.config.unused_keys import drop_absent_axes as drop_absent_axes

# Modules
from fzero.run.measure import flops as flops

# What `fzero doctor` prints
from fzero.run.measure.doctor import diagnose as diagnose
from fzero.run.measure.doctor import usable_device as usable_device

# FLOPs of a model by the papers' formulas, and what part of a processor's peak they are
from fzero.run.measure.flops import hfu as hfu
from fzero.run.measure.flops import mfu as mfu
from fzero.run.measure.flops import token_flop as token_flop

# The bytes that are alive while a step runs
from fzero.run.measure.live_bytes import LiveBytes as LiveBytes
from fzero.run.measure.live_bytes import MemoryTrace as MemoryTrace
from fzero.run.measure.live_bytes import device_of as device_of
from fzero.run.measure.live_bytes import recorded as recorded

# Check a run before it begins
from fzero.run.measure.memory_check import gigabytes as gigabytes
from fzero.run.measure.memory_check import grad_bytes as grad_bytes
from fzero.run.measure.memory_check import memory_on_device as memory_on_device
from fzero.run.measure.memory_check import rounded_on_host as rounded_on_host
from fzero.run.measure.memory_check import state_bytes as state_bytes

# The bytes that were alive at any moment of a step, by component
from fzero.run.measure.memory_timeline import START as START
from fzero.run.measure.memory_timeline import Change as Change
from fzero.run.measure.memory_timeline import Life as Life
from fzero.run.measure.memory_timeline import Moment as Moment
from fzero.run.measure.memory_timeline import Stay as Stay
from fzero.run.measure.memory_timeline import Visit as Visit
from fzero.run.measure.memory_timeline import alive as alive
from fzero.run.measure.memory_timeline import moments as moments

# The row of a step in metrics.jsonl
from fzero.run.measure.metrics_rows import sized_bar as sized_bar

# The closed form of the memory that the passes of a step take on a rank
from fzero.run.measure.peak_memory import LayerBytes as LayerBytes
from fzero.run.measure.peak_memory import PassSizes as PassSizes
from fzero.run.measure.peak_memory import codes_to_decode as codes_to_decode
from fzero.run.measure.peak_memory import layer_bytes as layer_bytes
from fzero.run.measure.peak_memory import passes_peak as passes_peak
from fzero.run.measure.peak_memory import residual_elements as residual_elements
from fzero.run.measure.peak_memory import segment_numels as segment_numels
from fzero.run.measure.peak_memory import stacked as stacked

# Record selected steps of a run
from fzero.run.measure.step_records import steps_of as steps_of

# The clock of a step
from fzero.run.measure.timer import PIPELINE as PIPELINE

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

# Modules
from fzero.run.setup import build as build
from fzero.run.setup import build_optim as build_optim
from fzero.run.setup import coordinator as coordinator
from fzero.run.setup import machine as machine
from fzero.run.setup import run_folder as run_folder
from fzero.run.setup import run_lock as run_lock
from fzero.run.setup import signals as signals
from fzero.run.setup import vocabulary as vocabulary
from fzero.run.setup import warm_up as warm_up
from fzero.run.setup import weights as weights

# From a RunConfig to the functions of a run
from fzero.run.setup.build import Job as Job
from fzero.run.setup.build import first_state as first_state

# The policy of dtypes of a config
from fzero.run.setup.build_optim import make_policy as make_policy

# Coordinate the processes of one command
from fzero.run.setup.coordinator import TIMEOUT_S as TIMEOUT_S
from fzero.run.setup.coordinator import join as join

# Resume on another number of processes
from fzero.run.setup.elastic import stand_by as stand_by

# This machine
from fzero.run.setup.machine import device_file as device_file
from fzero.run.setup.machine import fp32_error as fp32_error
from fzero.run.setup.machine import fp32_matmul as fp32_matmul
from fzero.run.setup.machine import onednn_switch as onednn_switch
from fzero.run.setup.machine import processor as processor
from fzero.run.setup.machine import resolve_auto as resolve_auto
from fzero.run.setup.machine import set_fp32_matmul as set_fp32_matmul

# What a run sets for its whole process, and sets back at its end
from fzero.run.setup.process_settings import settings_restored as settings_restored
from fzero.run.setup.process_settings import watch as watch

# A run folder
from fzero.run.setup.run_folder import CONFIG as CONFIG
from fzero.run.setup.run_folder import read_metrics as read_metrics

# A model that writes text
from fzero.run.setup.text_model import guess_options as guess_options
from fzero.run.setup.text_model import load_text_model as load_text_model

# The vocabulary of a run that starts from a model
from fzero.run.setup.vocabulary import start_model as start_model
