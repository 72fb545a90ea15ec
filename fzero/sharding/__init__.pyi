from fzero.comm.axes import AXES as AXES
from fzero.comm.communicator import Axis as Axis
from fzero.sharding.codec import Codec as Codec
from fzero.sharding.context import ActivationSplit as ActivationSplit
from fzero.sharding.context import Context as Context
from fzero.sharding.experts import Experts as Experts
from fzero.sharding.layouts import from_dtensor as from_dtensor
from fzero.sharding.layouts import redistribute as redistribute
from fzero.sharding.layouts import to_dtensor as to_dtensor
from fzero.sharding.leaf_plan import LeafPlan as LeafPlan
from fzero.sharding.mesh import Mesh as Mesh
from fzero.sharding.mesh import fake_mesh as fake_mesh
from fzero.sharding.mesh import make_mesh as make_mesh
from fzero.sharding.mesh import one_process as one_process
from fzero.sharding.pipeline_plan import Pipeline as Pipeline
from fzero.sharding.plan import Plan as Plan
from fzero.sharding.slices import local_shape as local_shape
from fzero.sharding.slices import narrow_to as narrow_to
from fzero.sharding.spec import Rules as Rules
from fzero.sharding.spec import Spec as Spec
from fzero.sharding.spec import match_rules as match_rules
from fzero.sharding.zero_stages import ZERO as ZERO
from fzero.sharding.zero_stages import zero_plan as zero_plan

"""For contributors: what the other packages of fzero use."""

# Modules
from fzero.sharding import layouts as layouts
from fzero.sharding import pipeline as pipeline
from fzero.sharding import slices as slices

# In how few bytes parameters and gradients travel between the ranks over which ZeRO shards, and what that changes
from fzero.sharding.codec import ERROR_KINDS as ERROR_KINDS
from fzero.sharding.codec import Coder as Coder
from fzero.sharding.codec import Local as Local
from fzero.sharding.codec import sum_coded as sum_coded

# Which blocks of a sequence each rank of cp has, so that all ranks have as much attention to compute
from fzero.sharding.context import Pieces as Pieces
from fzero.sharding.context import balanced as balanced
from fzero.sharding.context import blocks_of as blocks_of
from fzero.sharding.context import in_blocks as in_blocks
from fzero.sharding.context import largest_inner as largest_inner

# Error feedback for gradients that travel as codes
from fzero.sharding.error_feedback import ERROR as ERROR
from fzero.sharding.error_feedback import ERRORS as ERRORS
from fzero.sharding.error_feedback import SCALE as SCALE

# Sums over the ranks that have other data, in one bit for each element
from fzero.sharding.error_feedback import SCALES as SCALES
from fzero.sharding.error_feedback import ErrorFeedback as ErrorFeedback
from fzero.sharding.error_feedback import SignSums as SignSums
from fzero.sharding.error_feedback import error_specs as error_specs
from fzero.sharding.error_feedback import errors_of as errors_of
from fzero.sharding.error_feedback import first_errors as first_errors

# How the tokens of a block come to the experts of other ranks of ep, and what that sends
from fzero.sharding.experts import shares as shares

# Gradients from the backward pass to the optimizer
from fzero.sharding.gradient_sums import GradientReducer as GradientReducer

# The sums of a step's gradients where they rest
from fzero.sharding.gradient_sums import LayerSums as LayerSums
from fzero.sharding.gradient_sums import SumsAtRest as SumsAtRest

# From one layout on the mesh to another, as a chain of collectives; whole leaves from shards; DTensors in and out
from fzero.sharding.layouts import digest_text as digest_text
from fzero.sharding.layouts import digests as digests
from fzero.sharding.layouts import gather_full as gather_full
from fzero.sharding.layouts import gather_layers as gather_layers
from fzero.sharding.layouts import gather_on_first as gather_on_first
from fzero.sharding.layouts import gather_parts as gather_parts

# What a rank sends of parameters and gradients
from fzero.sharding.leaf_plan import MICRO_BATCH as MICRO_BATCH
from fzero.sharding.leaf_plan import PASS as PASS
from fzero.sharding.leaf_plan import STEP as STEP
from fzero.sharding.leaf_plan import sent_by_link as sent_by_link
from fzero.sharding.leaf_plan import transfers as transfers
from fzero.sharding.leaf_plan import updates as updates

# The mesh
from fzero.sharding.mesh import start_processes as start_processes

# A schedule in time
from fzero.sharding.pipeline.check import Played as Played

# Whether a schedule is one
from fzero.sharding.pipeline.check import gather_row as gather_row
from fzero.sharding.pipeline.check import peak as peak
from fzero.sharding.pipeline.check import play as play

# The order in which one rank works, by family of schedules
from fzero.sharding.pipeline.orders import FAMILIES as FAMILIES
from fzero.sharding.pipeline.orders import group_size as group_size
from fzero.sharding.pipeline.orders import schedule as schedule

# How the layers of a model are cut into stages, and which rank has which
from fzero.sharding.pipeline.stages import split_layers as split_layers
from fzero.sharding.pipeline.stages import stage_ranks as stage_ranks

# What a schedule is
from fzero.sharding.pipeline.table import BACKWARD as BACKWARD
from fzero.sharding.pipeline.table import KINDS as KINDS
from fzero.sharding.pipeline.table import Act as Act
from fzero.sharding.pipeline.table import Schedule as Schedule
from fzero.sharding.pipeline.table import Stages as Stages
from fzero.sharding.pipeline.table import feeds as feeds

# A pipeline as an option of a plan
from fzero.sharding.pipeline_plan import expect_parts as expect_parts

# The text of `print(plan)`
from fzero.sharding.plan_table import option_lines as option_lines

# Parameters from rest to use
from fzero.sharding.prefetch import Coding as Coding
from fzero.sharding.prefetch import LeafGroup as LeafGroup
from fzero.sharding.prefetch import NodeShards as NodeShards
from fzero.sharding.prefetch import ParamFetcher as ParamFetcher
from fzero.sharding.prefetch import PartitionedActivations as PartitionedActivations
from fzero.sharding.prefetch import Prefetcher as Prefetcher
from fzero.sharding.prefetch import Resident as Resident
from fzero.sharding.prefetch import unshard_block as unshard_block
from fzero.sharding.prefetch import unshard_tree as unshard_tree

# All arithmetic of a rank's slice of a leaf
from fzero.sharding.slices import MOST_ELEMENTS as MOST_ELEMENTS
from fzero.sharding.slices import STACKED as STACKED
from fzero.sharding.slices import Box as Box
from fzero.sharding.slices import Window as Window
from fzero.sharding.slices import check_dims as check_dims
from fzero.sharding.slices import draw_leaf as draw_leaf
from fzero.sharding.slices import global_shape as global_shape
from fzero.sharding.slices import is_stacked as is_stacked
from fzero.sharding.slices import iterate_blocks as iterate_blocks
from fzero.sharding.slices import largest_block as largest_block
from fzero.sharding.slices import largest_shard as largest_shard
from fzero.sharding.slices import local_numel as local_numel
from fzero.sharding.slices import local_windows as local_windows
from fzero.sharding.slices import narrow_box as narrow_box
from fzero.sharding.slices import narrow_part as narrow_part
from fzero.sharding.slices import part_dim as part_dim
from fzero.sharding.slices import parts_as_chunks as parts_as_chunks
from fzero.sharding.slices import ranks_per_dim as ranks_per_dim
from fzero.sharding.slices import row_blocks as row_blocks
from fzero.sharding.slices import shard_dim as shard_dim
from fzero.sharding.slices import shard_of_rank as shard_of_rank

# Spec
from fzero.sharding.spec import DEVICE as DEVICE
from fzero.sharding.spec import DISK as DISK
from fzero.sharding.spec import HOST_MEMORY as HOST_MEMORY
from fzero.sharding.spec import MEMORIES as MEMORIES
from fzero.sharding.spec import Offload as Offload
from fzero.sharding.spec import StateMemory as StateMemory
from fzero.sharding.spec import Tier as Tier

# A ZeRO stage is a row of a table; a plan is what follows from it for every leaf of a parameter tree
from fzero.sharding.zero_stages import REDUCE as REDUCE
from fzero.sharding.zero_stages import check_tree as check_tree
from fzero.sharding.zero_stages import expect_codec as expect_codec
from fzero.sharding.zero_stages import shapes_of as shapes_of
