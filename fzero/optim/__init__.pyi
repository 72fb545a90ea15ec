from fzero.optim.adafactor import AdafactorState as AdafactorState
from fzero.optim.adafactor import adafactor as adafactor
from fzero.optim.adamw import Adam8State as Adam8State
from fzero.optim.adamw import AdamState as AdamState
from fzero.optim.adamw import adam as adam
from fzero.optim.adamw import adamw as adamw
from fzero.optim.base import RATIOS as RATIOS
from fzero.optim.base import AverageState as AverageState
from fzero.optim.base import GradientTransformation as GradientTransformation
from fzero.optim.base import Pass as Pass
from fzero.optim.base import Schedule as Schedule
from fzero.optim.base import apply_in_place as apply_in_place
from fzero.optim.base import apply_updates as apply_updates
from fzero.optim.combine import add_decayed_weights as add_decayed_weights
from fzero.optim.combine import by_label as by_label
from fzero.optim.combine import chain as chain
from fzero.optim.combine import decay_matrices as decay_matrices
from fzero.optim.combine import scale_by_rules as scale_by_rules
from fzero.optim.deepspeed_schedules import cycle_lr as cycle_lr
from fzero.optim.deepspeed_schedules import cycle_momentum as cycle_momentum
from fzero.optim.deepspeed_schedules import warmup_cosine_lr as warmup_cosine_lr
from fzero.optim.deepspeed_schedules import warmup_decay_lr as warmup_decay_lr
from fzero.optim.deepspeed_schedules import warmup_lr as warmup_lr
from fzero.optim.from_torch import TorchState as TorchState
from fzero.optim.from_torch import from_torch as from_torch
from fzero.optim.lamb import LambState as LambState
from fzero.optim.lamb import lamb as lamb
from fzero.optim.muon import MuonState as MuonState
from fzero.optim.muon import muon as muon
from fzero.optim.muon import newton_schulz as newton_schulz
from fzero.optim.norm import global_norm as global_norm
from fzero.optim.onebit import OneBitState as OneBitState
from fzero.optim.onebit import onebit_adam as onebit_adam
from fzero.optim.onebit import onebit_lamb as onebit_lamb
from fzero.optim.schedules import by_tokens as by_tokens
from fzero.optim.schedules import constant as constant
from fzero.optim.schedules import cosine as cosine
from fzero.optim.schedules import exponential as exponential
from fzero.optim.schedules import inverse_sqrt as inverse_sqrt
from fzero.optim.schedules import join as join
from fzero.optim.schedules import linear as linear
from fzero.optim.schedules import one_cycle as one_cycle
from fzero.optim.schedules import polynomial as polynomial
from fzero.optim.schedules import warmup as warmup
from fzero.optim.schedules import warmup_cosine as warmup_cosine
from fzero.optim.schedules import wsd as wsd
from fzero.optim.sgd import Lion8State as Lion8State
from fzero.optim.sgd import LionState as LionState
from fzero.optim.sgd import SGDState as SGDState
from fzero.optim.sgd import lion as lion
from fzero.optim.sgd import sgd as sgd
from fzero.optim.sharded_leaves import WHOLE as WHOLE
from fzero.optim.sharded_leaves import ShardedLeaves as ShardedLeaves
from fzero.optim.sharded_leaves import bind as bind
from fzero.optim.sharded_leaves import sharded as sharded
from fzero.optim.wrappers import AccumulateState as AccumulateState
from fzero.optim.wrappers import LrScaleState as LrScaleState
from fzero.optim.wrappers import accumulate as accumulate
from fzero.optim.wrappers import clip_by_global_norm as clip_by_global_norm
from fzero.optim.wrappers import clip_by_value as clip_by_value
from fzero.optim.wrappers import with_average as with_average
from fzero.optim.wrappers import with_lr_scale as with_lr_scale
from fzero.optim.zero_one_adam import zero_one_adam as zero_one_adam

"""For contributors: what the other packages of fzero use."""

# Transformations around an optimizer
from fzero.optim.base import AVERAGE as AVERAGE

# An optimizer is a value
from fzero.optim.base import ShardSlice as ShardSlice
from fzero.optim.base import columns_of as columns_of
from fzero.optim.base import distinct as distinct
from fzero.optim.base import expect_optimizer as expect_optimizer
from fzero.optim.base import is_layered as is_layered
from fzero.optim.base import name_tree as name_tree
from fzero.optim.base import overwrite as overwrite
from fzero.optim.base import same_leaves as same_leaves
from fzero.optim.base import select_state as select_state
from fzero.optim.base import smallest_unit as smallest_unit

# Transformations put together
from fzero.optim.combine import split_chain as split_chain

# The storage of an optimizer's moments, and the transformation that updates many leaves with one kernel
from fzero.optim.leafwise import SMALL as SMALL

# Norms of gradients and parameters, summed in a fixed order
from fzero.optim.norm import Squared as Squared
from fzero.optim.norm import summed_by_kernel as summed_by_kernel
from fzero.optim.norm import widen as widen
from fzero.optim.schedules import LR_SCALE as LR_SCALE

# DeepSpeed's schedules, step for step
from fzero.optim.schedules import RISES as RISES

# Schedules
from fzero.optim.schedules import Intervals as Intervals

# Functions for optimizers that must see more than their own shard of a leaf
from fzero.optim.sharded_leaves import bind_to_plan as bind_to_plan
from fzero.optim.sharded_leaves import shards_of as shards_of
from fzero.optim.sharded_leaves import shards_of_sums as shards_of_sums
from fzero.optim.sharded_leaves import squares as squares
