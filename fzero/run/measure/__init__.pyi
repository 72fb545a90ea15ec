"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.run.measure import flops as flops
from fzero.run.measure import live_bytes as live_bytes
from fzero.run.measure import memory_timeline as memory_timeline

# What `fzero doctor` prints
from fzero.run.measure.doctor import diagnose as diagnose
from fzero.run.measure.doctor import usable_device as usable_device

# FLOPs of a model by the papers' formulas, and what part of a processor's peak they are
from fzero.run.measure.flops import fitting_steps as fitting_steps
from fzero.run.measure.flops import hfu as hfu
from fzero.run.measure.flops import mfu as mfu
from fzero.run.measure.flops import shortened as shortened
from fzero.run.measure.flops import token_flop as token_flop

# The bytes that are alive while a step runs
from fzero.run.measure.live_bytes import LiveBytes as LiveBytes
from fzero.run.measure.live_bytes import MemoryTrace as MemoryTrace
from fzero.run.measure.live_bytes import device_of as device_of
from fzero.run.measure.live_bytes import recorded as recorded

# Check a run before it begins
from fzero.run.measure.memory_check import expect_disk_space as expect_disk_space
from fzero.run.measure.memory_check import expect_fitting_memory as expect_fitting_memory
from fzero.run.measure.memory_check import gigabytes as gigabytes
from fzero.run.measure.memory_check import grad_bytes as grad_bytes
from fzero.run.measure.memory_check import host_bytes as host_bytes
from fzero.run.measure.memory_check import memory_on_device as memory_on_device
from fzero.run.measure.memory_check import needs_on_device as needs_on_device
from fzero.run.measure.memory_check import other_usage_text as other_usage_text
from fzero.run.measure.memory_check import rounded_on_host as rounded_on_host
from fzero.run.measure.memory_check import snapshot_limit as snapshot_limit
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
from fzero.run.measure.metrics_rows import Meter as Meter
from fzero.run.measure.metrics_rows import StepMeasurement as StepMeasurement
from fzero.run.measure.metrics_rows import format_duration as format_duration
from fzero.run.measure.metrics_rows import losses_by_source as losses_by_source
from fzero.run.measure.metrics_rows import metrics_row as metrics_row
from fzero.run.measure.metrics_rows import metrics_writer as metrics_writer
from fzero.run.measure.metrics_rows import show_progress as show_progress
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
from fzero.run.measure.step_records import StepRecorder as StepRecorder
from fzero.run.measure.step_records import StepSelection as StepSelection
from fzero.run.measure.step_records import select_steps as select_steps
from fzero.run.measure.step_records import steps_of as steps_of

# The clock of a step
from fzero.run.measure.timer import PIPELINE as PIPELINE
from fzero.run.measure.timer import ClockSpan as ClockSpan
