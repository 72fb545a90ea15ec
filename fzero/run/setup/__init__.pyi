"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.run.setup import build as build
from fzero.run.setup import build_optim as build_optim
from fzero.run.setup import coordinator as coordinator
from fzero.run.setup import corpus as corpus
from fzero.run.setup import machine as machine
from fzero.run.setup import run_folder as run_folder
from fzero.run.setup import run_lock as run_lock
from fzero.run.setup import signals as signals
from fzero.run.setup import vocabulary as vocabulary
from fzero.run.setup import warm_up as warm_up
from fzero.run.setup import weights as weights

# From a RunConfig to the functions of a run
from fzero.run.setup.build import Attempt as Attempt
from fzero.run.setup.build import Job as Job
from fzero.run.setup.build import Options as Options
from fzero.run.setup.build import agreed as agreed
from fzero.run.setup.build import all_on_disk as all_on_disk
from fzero.run.setup.build import first_state as first_state
from fzero.run.setup.build import has_factors as has_factors
from fzero.run.setup.build import latest as latest
from fzero.run.setup.build import like_of as like_of
from fzero.run.setup.build import local_micro_batches as local_micro_batches
from fzero.run.setup.build import num_params as num_params
from fzero.run.setup.build import restore as restore
from fzero.run.setup.build import save_store as save_store
from fzero.run.setup.build import specs_of as specs_of

# The dtypes, the schedule and the optimizer of a config
from fzero.run.setup.build_optim import make_policy as make_policy

# Coordinate the processes of one command
from fzero.run.setup.coordinator import TIMEOUT_S as TIMEOUT_S
from fzero.run.setup.coordinator import Coordinator as Coordinator
from fzero.run.setup.coordinator import Say as Say
from fzero.run.setup.coordinator import join as join

# The corpus of a run
from fzero.run.setup.corpus import first_samples as first_samples
from fzero.run.setup.corpus import on_device as on_device
from fzero.run.setup.corpus import prefetch_to_device as prefetch_to_device

# Resume on another number of processes
from fzero.run.setup.elastic import refit_mesh as refit_mesh
from fzero.run.setup.elastic import stand_by as stand_by

# This machine
from fzero.run.setup.machine import available_bytes as available_bytes
from fzero.run.setup.machine import choose_fp32_matmul as choose_fp32_matmul
from fzero.run.setup.machine import compiler as compiler
from fzero.run.setup.machine import device_file as device_file
from fzero.run.setup.machine import fp32_error as fp32_error
from fzero.run.setup.machine import fp32_matmul as fp32_matmul
from fzero.run.setup.machine import onednn_switch as onednn_switch
from fzero.run.setup.machine import peak_rate as peak_rate
from fzero.run.setup.machine import processor as processor
from fzero.run.setup.machine import resolve_auto as resolve_auto
from fzero.run.setup.machine import resolve_here as resolve_here
from fzero.run.setup.machine import set_fp32_matmul as set_fp32_matmul

# Local steps of a run
from fzero.run.setup.members import Members as Members
from fzero.run.setup.members import members_of as members_of

# What a run sets for its whole process, and sets back at its end
from fzero.run.setup.process_settings import settings_restored as settings_restored
from fzero.run.setup.process_settings import sleep_while_shared as sleep_while_shared
from fzero.run.setup.process_settings import watch as watch

# A run folder
from fzero.run.setup.run_folder import CONFIG as CONFIG
from fzero.run.setup.run_folder import read_metrics as read_metrics

# Signals that end a run
from fzero.run.setup.signals import Stopped as Stopped
from fzero.run.setup.signals import handlers_restored as handlers_restored
from fzero.run.setup.signals import stop_signals as stop_signals

# A model that writes text
from fzero.run.setup.text_model import TextModel as TextModel
from fzero.run.setup.text_model import guess_options as guess_options
from fzero.run.setup.text_model import load_text_model as load_text_model

# The vocabulary of a run that starts from a model
from fzero.run.setup.vocabulary import expect_added as expect_added
from fzero.run.setup.vocabulary import growth_lines as growth_lines
from fzero.run.setup.vocabulary import start_model as start_model
from fzero.run.setup.vocabulary import start_texts as start_texts
from fzero.run.setup.vocabulary import tuned_config as tuned_config

# The watch thread of a rank
from fzero.run.setup.watchdog import watch_steps as watch_steps
