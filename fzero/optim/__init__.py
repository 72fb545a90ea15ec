"""Optimizers as values: pure transformations of gradients, and schedules as pure functions of the step."""

from fzero.optim.accumulate import AccumulateState, accumulate
from fzero.optim.adafactor import AdafactorState, adafactor
from fzero.optim.adamw import Adam8State, AdamState, adam, adamw
from fzero.optim.average import AverageState, with_average
from fzero.optim.base import GradientTransformation, Pass, Schedule, apply_in_place, apply_updates
from fzero.optim.clip import clip_by_global_norm, clip_by_value
from fzero.optim.combine import by_label, chain
from fzero.optim.deepspeed_schedules import (
    cycle_lr,
    cycle_momentum,
    warmup_cosine_lr,
    warmup_decay_lr,
    warmup_lr,
)
from fzero.optim.from_torch import TorchState, from_torch
from fzero.optim.lamb import LambState, lamb
from fzero.optim.lion import Lion8State, LionState, lion
from fzero.optim.lr_scale import LrScaleState, with_lr_scale
from fzero.optim.masks import add_decayed_weights, decay_matrices, scale_by_rules
from fzero.optim.muon import MuonState, muon, newton_schulz
from fzero.optim.norm import global_norm
from fzero.optim.onebit import OneBitState, onebit_adam
from fzero.optim.onebit_lamb import onebit_lamb
from fzero.optim.schedules import (
    by_tokens,
    constant,
    cosine,
    exponential,
    inverse_sqrt,
    join,
    linear,
    one_cycle,
    polynomial,
    warmup,
    warmup_cosine,
    wsd,
)
from fzero.optim.sgd import SGDState, sgd
from fzero.optim.sharded_leaves import WHOLE, ShardedLeaves, bind, sharded
from fzero.optim.zero_one_adam import zero_one_adam

__all__ = [
    "WHOLE",
    "AccumulateState",
    "AdafactorState",
    "Adam8State",
    "AdamState",
    "AverageState",
    "GradientTransformation",
    "LambState",
    "Lion8State",
    "LionState",
    "LrScaleState",
    "MuonState",
    "OneBitState",
    "Pass",
    "SGDState",
    "Schedule",
    "ShardedLeaves",
    "TorchState",
    "accumulate",
    "adafactor",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_in_place",
    "apply_updates",
    "bind",
    "by_label",
    "by_tokens",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "constant",
    "cosine",
    "cycle_lr",
    "cycle_momentum",
    "decay_matrices",
    "exponential",
    "from_torch",
    "global_norm",
    "inverse_sqrt",
    "join",
    "lamb",
    "linear",
    "lion",
    "muon",
    "newton_schulz",
    "one_cycle",
    "onebit_adam",
    "onebit_lamb",
    "polynomial",
    "scale_by_rules",
    "sgd",
    "sharded",
    "warmup",
    "warmup_cosine",
    "warmup_cosine_lr",
    "warmup_decay_lr",
    "warmup_lr",
    "with_average",
    "with_lr_scale",
    "wsd",
    "zero_one_adam",
]
