"""Precision as values: a policy of dtypes, and dynamic loss scaling as a pure function of its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling, by DeepSpeed's algorithm (Micikevicius et al. 2018, "Mixed precision training", section
    3.2).

    An overflow takes one from `hysteresis` while that is above 1, and then divides the scale by `factor`, not below
    `floor`; `window` steps in a row without one multiply the scale by `factor` and restore the hysteresis. at_floor:
    what an overflow at the floor does: "raise" FloatingPointError, or "hold" the floor.
    """

    init: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    floor: float = 1.0
    factor: float = 2.0
    at_floor: str = "raise"

    def __post_init__(self) -> None:
        if self.at_floor not in ("raise", "hold"):
            raise ValueError(f"loss scale: at_floor is {self.at_floor!r}; it must be raise or hold")
        if not (self.init >= self.floor > 0 and self.factor > 1 and self.window >= 1 and self.hysteresis >= 1):
            raise ValueError(f"loss scale: {self} needs init >= floor > 0, factor > 1, window >= 1 and hysteresis >= 1")


class ScalerState(NamedTuple):
    """The loss scale between steps."""

    scale: Tensor  # float32 scalar
    good_steps: Tensor  # int64 scalar: steps since the last overflow
    hysteresis: Tensor  # int64 scalar: overflows until the scale falls, at least 1


def init_scaler(config: LossScale, device: torch.device | str = "cpu") -> ScalerState:
    """The state before the first step."""
    return ScalerState(*(torch.tensor(value).to(device) for value in (config.init, 0, config.hysteresis)))


def update_scaler(config: LossScale, state: ScalerState, overflow: Tensor) -> ScalerState:
    """The state after a step that did or did not overflow (bool scalar). Pure, without branches: it vmaps."""
    falls = overflow & (state.hysteresis == 1)
    good = torch.where(overflow, 0, state.good_steps + 1)
    rises = ~overflow & (good % config.window == 0)
    fallen = (state.scale / config.factor).clamp(min=config.floor)
    risen = (state.scale * config.factor).clamp(max=2.0**127)  # from infinity a scale could not fall again
    scale = torch.where(falls, fallen, torch.where(rises, risen, state.scale))
    spent = torch.where(overflow & ~falls, state.hysteresis - 1, state.hysteresis)
    return ScalerState(scale, good, torch.where(rises, config.hysteresis, spent))


def overflow_at_floor(config: LossScale, state: ScalerState, overflow: Tensor) -> Tensor:
    """Whether this overflow finds the scale at its floor with no hysteresis left (bool scalar)."""
    return overflow & (state.hysteresis == 1) & (state.scale <= config.floor)


MATMULS = ("", "float8_tensorwise", "float8_rowwise")


@dataclass(frozen=True)
class Policy:
    """Which dtype is used where.

    param: parameters at rest, and so their gradients. compute: activations and products. reduce: gradients while they
    are summed over ranks. accumulate: the sum over micro-batches, and what the optimizer is given. state: the master
    weights, and the optimizer's moments. Master weights are kept where `state` differs from `param`. matmul: how the
    linears of the blocks multiply: "" in `compute`, or through float8 with one scale for an operand or one for each row
    (see kernels.float8).
    """

    name: str
    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32
    state: torch.dtype = torch.float32
    loss_scale: LossScale | None = None
    matmul: str = ""

    def __post_init__(self) -> None:
        if self.matmul not in MATMULS:
            raise ValueError(
                f"policy {self.name}: matmul is {self.matmul!r}; it must be one of {', '.join(map(repr, MATMULS))}"
            )

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a copy of the parameters in `state`."""
        return self.state != self.param


def fp32() -> Policy:
    """float32 everywhere."""
    return Policy("fp32")


def fp64() -> Policy:
    """float64 everywhere: for checking mathematics."""
    return Policy("fp64", *(torch.float64,) * 5)


def bf16() -> Policy:
    """bfloat16 parameters, gradients and computation; float32 master weights, moments and sums: 16 bytes a
    parameter.
    """
    return Policy("bf16", param=torch.bfloat16, compute=torch.bfloat16)


def bf16_float8() -> Policy:
    """As bf16, with the linears of the blocks through float8, one scale for an operand: the fastest, and the
    coarsest.
    """
    return Policy("bf16_float8", param=torch.bfloat16, compute=torch.bfloat16, matmul="float8_tensorwise")


def bf16_float8_rowwise() -> Policy:
    """As bf16, with the linears of the blocks through float8, a scale for each row of one operand and each column of
    the other.
    """
    return Policy("bf16_float8_rowwise", param=torch.bfloat16, compute=torch.bfloat16, matmul="float8_rowwise")


def fp16(loss_scale: LossScale = LossScale()) -> Policy:
    """As bf16 with float16 in its place, and a dynamic loss scale."""
    return Policy("fp16", param=torch.float16, compute=torch.float16, loss_scale=loss_scale)


POLICIES = {make().name: make for make in (fp32, fp64, bf16, fp16, bf16_float8, bf16_float8_rowwise)}
