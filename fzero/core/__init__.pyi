"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.core import captured_state as captured_state
from fzero.core import compile_cache as compile_cache
from fzero.core import config_tables as config_tables
from fzero.core import digest as digest
from fzero.core import gpu as gpu
from fzero.core import gpu_copies as gpu_copies
from fzero.core import graph_passes as graph_passes
from fzero.core import graph_tracing as graph_tracing
from fzero.core import host_memory as host_memory
from fzero.core import packages as packages
from fzero.core import precision as precision
from fzero.core import prng as prng
from fzero.core import program_cache as program_cache
from fzero.core import pytree as pytree
from fzero.core import random_interception as random_interception
from fzero.core import stack as stack
from fzero.core import torch_private as torch_private
from fzero.core import vjp_pair as vjp_pair

# One line for an argument of another kind, or of another library's name
from fzero.core.arguments import OPTIMIZER as OPTIMIZER
from fzero.core.arguments import PLAN as PLAN
from fzero.core.arguments import STATE as STATE
from fzero.core.arguments import STEP as STEP
from fzero.core.arguments import WrongKind as WrongKind
from fzero.core.arguments import checked as checked
from fzero.core.arguments import expect_count as expect_count
from fzero.core.arguments import expect_device as expect_device
from fzero.core.arguments import expect_fields as expect_fields
from fzero.core.arguments import expect_floating as expect_floating
from fzero.core.arguments import expect_hint as expect_hint
from fzero.core.arguments import expect_kind as expect_kind
from fzero.core.arguments import expect_regex as expect_regex
from fzero.core.arguments import hints_of as hints_of

# The policy of recomputation, and helpers for autograd Functions under torch.func transforms
from fzero.core.autodiff import INFERENCE as INFERENCE
from fzero.core.autodiff import NOWHERE as NOWHERE
from fzero.core.autodiff import VARYING_RULES as VARYING_RULES
from fzero.core.autodiff import Function as Function
from fzero.core.autodiff import Remat as Remat
from fzero.core.autodiff import Varying as Varying
from fzero.core.autodiff import active_varying as active_varying
from fzero.core.autodiff import dense as dense
from fzero.core.autodiff import first_order as first_order
from fzero.core.autodiff import inference as inference
from fzero.core.autodiff import needs_grad as needs_grad
from fzero.core.autodiff import reinterpret as reinterpret
from fzero.core.autodiff import run_backward as run_backward
from fzero.core.autodiff import transforms as transforms
from fzero.core.autodiff import vary as vary

# The calls of a function, repeated in the same memory
from fzero.core.call_record import CallRecord as CallRecord
from fzero.core.call_record import RecordedLoop as RecordedLoop
from fzero.core.call_record import note_call as note_call
from fzero.core.call_record import record_calls as record_calls
from fzero.core.call_record import record_operator as record_operator

# Recomputation in the backward pass (remat)
from fzero.core.captured_state import preserve_random_states as preserve_random_states

# What somebody's function has beside its arguments, and what shows that a call changed it
from fzero.core.closure_state import Changed as Changed
from fzero.core.closure_state import ClosureState as ClosureState
from fzero.core.closure_state import expect_unchanged as expect_unchanged
from fzero.core.closure_state import methods as methods

# Compilation
from fzero.core.compile import jit as jit
from fzero.core.compile import on_first_compile as on_first_compile

# Answers kept in files
from fzero.core.compile_cache import CONTRACTED as CONTRACTED
from fzero.core.compile_cache import EXACT as EXACT
from fzero.core.compile_cache import PACKAGE as PACKAGE
from fzero.core.compile_cache import cache_folder as cache_folder
from fzero.core.compile_cache import compiled_by_gcc as compiled_by_gcc
from fzero.core.compile_cache import entry_path as entry_path
from fzero.core.compile_cache import environment_variables as environment_variables
from fzero.core.compile_cache import have_compiler as have_compiler
from fzero.core.compile_cache import library as library
from fzero.core.compile_cache import load_answer as load_answer
from fzero.core.compile_cache import package_digest as package_digest
from fzero.core.compile_cache import processor as processor
from fzero.core.compile_cache import write_answer as write_answer

# Nested tables of plain values
from fzero.core.config_tables import CORRECTIONS as CORRECTIONS
from fzero.core.config_tables import COUNT as COUNT
from fzero.core.config_tables import FLOAT32_LARGEST as FLOAT32_LARGEST
from fzero.core.config_tables import FRACTION as FRACTION
from fzero.core.config_tables import INF as INF
from fzero.core.config_tables import KINDS as KINDS
from fzero.core.config_tables import LENGTH as LENGTH
from fzero.core.config_tables import MEMORY_GB as MEMORY_GB
from fzero.core.config_tables import POSITIVE as POSITIVE
from fzero.core.config_tables import RATE as RATE
from fzero.core.config_tables import SEED as SEED
from fzero.core.config_tables import SIZE as SIZE
from fzero.core.config_tables import STAGE as STAGE
from fzero.core.config_tables import Allowed as Allowed
from fzero.core.config_tables import Amount as Amount
from fzero.core.config_tables import AtLeastOne as AtLeastOne
from fzero.core.config_tables import Bounds as Bounds
from fzero.core.config_tables import Count as Count
from fzero.core.config_tables import Fraction as Fraction
from fzero.core.config_tables import Positive as Positive
from fzero.core.config_tables import Rate as Rate
from fzero.core.config_tables import Share as Share
from fzero.core.config_tables import Size as Size
from fzero.core.config_tables import Table as Table
from fzero.core.config_tables import Within as Within
from fzero.core.config_tables import at_least as at_least
from fzero.core.config_tables import check_bounds as check_bounds
from fzero.core.config_tables import check_choice as check_choice
from fzero.core.config_tables import check_type as check_type
from fzero.core.config_tables import flat as flat
from fzero.core.config_tables import format_list as format_list
from fzero.core.config_tables import metadata_of as metadata_of
from fzero.core.config_tables import one_of as one_of
from fzero.core.config_tables import optional as optional
from fzero.core.config_tables import parse_setting as parse_setting
from fzero.core.config_tables import power_of_two as power_of_two
from fzero.core.config_tables import set_nested as set_nested
from fzero.core.config_tables import to_toml as to_toml

# Copies of many tensors between the host and a GPU: small ones side by side, in buckets; a large one in pieces
from fzero.core.copy_buckets import LARGE_COPY as LARGE_COPY
from fzero.core.copy_buckets import SMALL_COPY as SMALL_COPY
from fzero.core.copy_buckets import allocate_adjacent as allocate_adjacent
from fzero.core.copy_buckets import bring as bring
from fzero.core.copy_buckets import bring_together as bring_together
from fzero.core.copy_buckets import copy_in_buckets as copy_in_buckets
from fzero.core.copy_buckets import copy_out_buckets as copy_out_buckets
from fzero.core.copy_buckets import read_scalars as read_scalars
from fzero.core.copy_buckets import start_fetch as start_fetch

# The device that a tensor is on, or that a plan's fake tensor represents
from fzero.core.device import CPU as CPU
from fzero.core.device import KERNELS as KERNELS
from fzero.core.device import LAUNCHERS as LAUNCHERS
from fzero.core.device import PLANNED_GPU as PLANNED_GPU
from fzero.core.device import FakeDevice as FakeDevice
from fzero.core.device import Target as Target
from fzero.core.device import fake_device_of as fake_device_of
from fzero.core.device import is_fake as is_fake
from fzero.core.device import is_traced as is_traced
from fzero.core.device import kind_of as kind_of
from fzero.core.device import record_launch as record_launch
from fzero.core.device import target_of as target_of
from fzero.core.device import target_on as target_on

# Checksums of bytes and digests of tensors
from fzero.core.digest import Started as Started
from fzero.core.digest import combine as combine
from fzero.core.digest import crc32c as crc32c
from fzero.core.digest import digest_strided as digest_strided
from fzero.core.digest import digest_tree as digest_tree
from fzero.core.digest import prepare as prepare
from fzero.core.digest import read_digests as read_digests
from fzero.core.digest import start_digest as start_digest

# The opening of every file that fzero writes
from fzero.core.files import NotWritable as NotWritable
from fzero.core.files import append_line as append_line
from fzero.core.files import cut_half_line as cut_half_line
from fzero.core.files import expect_absent as expect_absent
from fzero.core.files import is_lone_file as is_lone_file
from fzero.core.files import is_real_folder as is_real_folder
from fzero.core.files import leaf_fault as leaf_fault
from fzero.core.files import make_folder as make_folder
from fzero.core.files import naming as naming
from fzero.core.files import new_folder as new_folder
from fzero.core.files import open_to_write as open_to_write
from fzero.core.files import path_fault as path_fault
from fzero.core.files import remove_entry as remove_entry
from fzero.core.files import replacing as replacing
from fzero.core.files import sync_folder as sync_folder
from fzero.core.files import writing as writing

# Which form each hot operation takes (kernels/registry.py), for whoever wants to know
from fzero.core.form_observer import note as note
from fzero.core.form_observer import observe as observe

# The GPU of this process
from fzero.core.gpu import HOST as HOST
from fzero.core.gpu import current_device as current_device
from fzero.core.gpu import memory_of as memory_of
from fzero.core.gpu import pinned as pinned
from fzero.core.gpu import reset_peak as reset_peak

# Copies to and from a GPU, on streams of their own beside its computation
from fzero.core.gpu_copies import Copied as Copied
from fzero.core.gpu_copies import Future as Future
from fzero.core.gpu_copies import SnapshotReader as SnapshotReader
from fzero.core.gpu_copies import await_readers as await_readers
from fzero.core.gpu_copies import copy_in as copy_in
from fzero.core.gpu_copies import copy_out as copy_out
from fzero.core.gpu_copies import free_sources as free_sources
from fzero.core.gpu_copies import pass_group as pass_group
from fzero.core.gpu_copies import ready as ready
from fzero.core.gpu_copies import reserve as reserve

# Let an operator that writes a tensor find the tensor's largest magnitude too, where a traced graph asks for it
from fzero.core.graph_passes import ORDERED as ORDERED
from fzero.core.graph_passes import PAIRED_OPERATORS as PAIRED_OPERATORS
from fzero.core.graph_passes import SHARED as SHARED
from fzero.core.graph_passes import STARTED as STARTED
from fzero.core.graph_passes import Formula as Formula
from fzero.core.graph_passes import add_formula as add_formula
from fzero.core.graph_passes import add_twin as add_twin
from fzero.core.graph_passes import flop_of as flop_of

# Somebody's program as a graph of plain operators, and that graph cut into functions
from fzero.core.graph_tracing import Impure as Impure
from fzero.core.graph_tracing import Watch as Watch
from fzero.core.graph_tracing import is_foreign as is_foreign

# Memory of the host that lasts
from fzero.core.host_memory import HUGE as HUGE
from fzero.core.host_memory import LARGE_BYTES as LARGE_BYTES
from fzero.core.host_memory import aligned_memory as aligned_memory
from fzero.core.host_memory import allocate_pages as allocate_pages
from fzero.core.host_memory import bytes_cached as bytes_cached
from fzero.core.host_memory import bytes_taken as bytes_taken
from fzero.core.host_memory import cores as cores
from fzero.core.host_memory import empty_persistent as empty_persistent
from fzero.core.host_memory import round_to_pages as round_to_pages
from fzero.core.host_memory import to_host as to_host

# The calls of operators in a row
from fzero.core.operator_program import operators_of as operators_of

# Keep registered operators (the collectives) in place while a traced graph is split and compiled
from fzero.core.packages import attach as attach

# Mixed precision
from fzero.core.precision import POLICIES as POLICIES
from fzero.core.precision import LossScale as LossScale
from fzero.core.precision import Policy as Policy
from fzero.core.precision import ScalerState as ScalerState

# Sums in the order of a balanced binary tree, in three forms
from fzero.core.precision import TreeSum as TreeSum
from fzero.core.precision import fp16 as fp16
from fzero.core.precision import init_scaler as init_scaler
from fzero.core.precision import overflow_at_floor as overflow_at_floor
from fzero.core.precision import tree_sum as tree_sum
from fzero.core.precision import tree_sum_rows as tree_sum_rows
from fzero.core.precision import update_scaler as update_scaler

# Random numbers of rows that have a key each
from fzero.core.prng_rows import fold_rows as fold_rows
from fzero.core.prng_rows import uniform_rows as uniform_rows

# Processes that share the work of this one
from fzero.core.process_pool import Pool as Pool

# Calls of somebody's function in a step
from fzero.core.purity_checks import PureCalls as PureCalls
from fzero.core.purity_checks import bypass_checkpoint as bypass_checkpoint
from fzero.core.purity_checks import expect_data as expect_data
from fzero.core.purity_checks import expect_pure as expect_pure
from fzero.core.purity_checks import is_near as is_near

# Trees of tensors and the names of their leaves
from fzero.core.pytree import Tree as Tree
from fzero.core.pytree import TreeDef as TreeDef
from fzero.core.pytree import leaves as leaves
from fzero.core.pytree import named_leaves as named_leaves

# Torch's random numbers as a function of a key
from fzero.core.random_interception import Draws as Draws
from fzero.core.random_interception import is_drawing as is_drawing
from fzero.core.random_interception import seeded as seeded

# `stack` applies a block layer by layer; its loop controls what is kept for the backward pass
from fzero.core.stack import NO_REMAT as NO_REMAT
from fzero.core.stack import Block as Block
from fzero.core.stack import Blocks as Blocks
from fzero.core.stack import LayerLoop as LayerLoop
from fzero.core.stack import depth as depth
from fzero.core.stack import in_turn as in_turn
from fzero.core.stack import segment_pair as segment_pair
from fzero.core.stack import static_signature as static_signature

# Small text files in a local folder or below a URL, replaced atomically, and the objects below a URL
from fzero.core.storage import PAGE as PAGE
from fzero.core.storage import Damaged as Damaged
from fzero.core.storage import Folder as Folder
from fzero.core.storage import Objects as Objects
from fzero.core.storage import Refused as Refused
from fzero.core.storage import absolute as absolute
from fzero.core.storage import context as context
from fzero.core.storage import is_url as is_url
from fzero.core.storage import join as join
from fzero.core.storage import kvstore as kvstore
from fzero.core.storage import read_text as read_text
from fzero.core.storage import sync_file_system as sync_file_system
from fzero.core.storage import user_folder as user_folder
from fzero.core.storage import write_text as write_text
from fzero.core.storage import write_texts as write_texts

# Text from elsewhere
from fzero.core.text_parsing import LARGEST as LARGEST
from fzero.core.text_parsing import NAMES as NAMES
from fzero.core.text_parsing import Unparsable as Unparsable
from fzero.core.text_parsing import environment_number as environment_number
from fzero.core.text_parsing import expect_entries as expect_entries
from fzero.core.text_parsing import expect_regular as expect_regular
from fzero.core.text_parsing import file_kind as file_kind
from fzero.core.text_parsing import in_form as in_form
from fzero.core.text_parsing import json_text as json_text
from fzero.core.text_parsing import nearest as nearest
from fzero.core.text_parsing import open_regular as open_regular
from fzero.core.text_parsing import parse_json as parse_json
from fzero.core.text_parsing import parse_json_value as parse_json_value
from fzero.core.text_parsing import parse_toml as parse_toml
from fzero.core.text_parsing import read_json as read_json
from fzero.core.text_parsing import read_text_file as read_text_file
from fzero.core.text_parsing import short as short
from fzero.core.text_parsing import text_table as text_table

# The variables that somebody's code can reach and change, with what they had
from fzero.core.variable_snapshot import Readings as Readings
from fzero.core.variable_snapshot import Snapshot as Snapshot
from fzero.core.variable_snapshot import names_in as names_in

# A function of tensors and its vector-Jacobian product as two functions that share residuals, eager or compiled
from fzero.core.vjp_pair import VjpPair as VjpPair
