"""Mixed precision: a policy of dtypes, dynamic loss scaling as a pure function of its state, and sums in an order of
their own.

Sums are made in the order of a balanced binary tree, of a list, of terms that come one by one, of the rows of a tensor.
Consecutive pairs are added first: ((0 + 1) + (2 + 3)) + ... as a binary counter takes them; complete trees that remain
are added from the last to the first. The three forms have the same bits, and so does a sum over micro-batches of sums
over ranks, for every power of two of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fzero.core.arguments import expect_fields, expect_floating
from fzero.core.config_tables import INF, Positive, Size, Within


class TreeSum:
    """The sum of terms that come one by one; at most log2 of them are held."""

    # Equal neighbours are added as soon as both exist. plus: (a, b) -> a new term, for terms that are not tensors, or
    # may not be overwritten; None: tensors are added, in place where one is owned.
    def __init__(self, plus: Callable[[Any, Any], Any] | None = None) -> None:
        self.plus = plus
        self.trees: list[tuple[int, Any, bool]] = []  # (height, sum, whether it may be overwritten)

    def add(self, term: Any, *, owned: bool = True) -> None:
        """Add the next term. owned: its memory may be overwritten."""
        self.trees.append((0, term, owned))
        del term
        while len(self.trees) > 1 and self.trees[-1][0] == self.trees[-2][0]:
            self._merge()

    def sum(self) -> Any:
        """The sum of all terms; a single term is returned itself."""
        while len(self.trees) > 1:
            self._merge()
        return self.trees.pop()[1]

    def _merge(self) -> None:
        (_, b, owns_b), (height, a, owns_a) = self.trees.pop(), self.trees.pop()
        if self.plus is not None:
            total = self.plus(a, b)
        else:
            total = a.add_(b) if owns_a else torch.add(a, b, out=b) if owns_b else a + b
        self.trees.append((height + 1, total, True))


def tree_sum(terms: Sequence[Tensor], owned: Sequence[bool] | None = None) -> Tensor:
    """The sum of `terms`, tensors of one shape and dtype; owned: those whose memory may be overwritten.

    >>> tree_sum([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)])
    tensor(6.)
    """
    total = TreeSum()
    for i, term in enumerate(terms):
        total.add(term, owned=owned is not None and owned[i])
    return total.sum()


def tree_sum_rows(x: Tensor) -> Tensor:
    """The sum of `x` [N, ...] over its first dim, in about log2 N operations; differentiable.

    >>> tree_sum_rows(torch.tensor([[1.0], [2.0], [3.0]]))
    tensor([6.])
    """
    while x.shape[0] > 1:
        even = x.shape[0] // 2 * 2
        x = torch.cat([x[0:even:2] + x[1:even:2], x[even:]])
    return x[0]


@dataclass(frozen=True)
class LossScale:
    """The settings of dynamic loss scaling, by DeepSpeed's algorithm.

    An overflow decrements the remaining hysteresis while it is above 1; after that each overflow divides the scale by
    `factor`, but not below `floor`. `window` consecutive steps without an overflow multiply the scale by `factor` and
    restore the hysteresis.
    at_floor: the effect of an overflow at the floor: "raise" FloatingPointError, or "hold" the floor.
    Raises ValueError unless init >= floor > 0, factor > 1, window >= 1 and hysteresis >= 1, and for another at_floor.

    >>> from fzero.core.precision import init_scaler, update_scaler
    >>> config = LossScale(init=1024.0, hysteresis=2)
    >>> state = init_scaler(config)
    >>> for _ in range(2):
    ...     state = update_scaler(config, state, overflow=torch.tensor(True))
    ...     print(state.scale)
    tensor(1024.)
    tensor(512.)

    Ref: Micikevicius et al. 2018, "Mixed precision training", arXiv:1710.03740, section 3.2.
    """

    init: Positive = 2.0**16
    window: Size = 1000
    hysteresis: Size = 2
    floor: Positive = 1.0
    factor: Annotated[float, Within((1.0, False, INF))] = 2.0
    at_floor: str = "raise"

    def __post_init__(self) -> None:
        expect_fields(self)
        if self.at_floor not in ("raise", "hold"):
            raise ValueError(f"loss scale: at_floor is {self.at_floor!r}; it must be raise or hold")
        finite = math.isfinite(self.init) and math.isfinite(self.factor)
        if not (
            finite and self.init >= self.floor > 0 and self.factor > 1 and self.window >= 1 and self.hysteresis >= 1
        ):
            raise ValueError(f"loss scale: {self} needs init >= floor > 0, factor > 1, window >= 1 and hysteresis >= 1")


class ScalerState(NamedTuple):
    """The state of the loss scaler between steps."""

    scale: Tensor  # float32 scalar
    good_steps: Tensor  # int64 scalar: steps since the last overflow
    hysteresis: Tensor  # int64 scalar: overflows until the scale falls, at least 1


def init_scaler(config: LossScale, device: torch.device | str = "cpu") -> ScalerState:
    """The state of the scaler before the first step."""
    return ScalerState(*(torch.tensor(value).to(device) for value in (config.init, 0, config.hysteresis)))


def update_scaler(config: LossScale, state: ScalerState, overflow: Tensor) -> ScalerState:
    """The state after a step that did or did not overflow (bool scalar), without branches."""
    falls = overflow & (state.hysteresis == 1)
    good = torch.where(overflow, 0, state.good_steps + 1)
    rises = ~overflow & (good % config.window == 0)
    fallen = (state.scale / config.factor).clamp(min=config.floor)
    risen = (state.scale * config.factor).clamp(max=2.0**127)  # an infinite scale could never be reduced again
    scale = torch.where(falls, fallen, torch.where(rises, risen, state.scale))
    spent = torch.where(overflow & ~falls, state.hysteresis - 1, state.hysteresis)
    return ScalerState(scale, good, torch.where(rises, config.hysteresis, spent))


def overflow_at_floor(config: LossScale, state: ScalerState, overflow: Tensor) -> Tensor:
    """Whether this step overflowed while the scale was at its floor and no hysteresis was left (bool scalar)."""
    return overflow & (state.hysteresis == 1) & (state.scale <= config.floor)


MATMULS = ("", "float8_tensorwise", "float8_rowwise")


@dataclass(frozen=True)
class Policy:
    """Which dtype is used for what; frozen and hashable.

    param: stored parameters, and so their gradients. compute: activations and matrix products. reduce: gradients while
    they are summed over ranks. accumulate: gradients summed over micro-batches, which the optimizer receives. state:
    master weights and the optimizer's moments; the optimizer keeps master weights if `state` differs from `param`.
    loss_scale: dynamic loss scaling, or None. matmul: how the linear layers of the blocks multiply: "" in `compute`;
    "float8_tensorwise" or "float8_rowwise" in float8, with one scale for each operand or for each row (see
    kernels.float8). gather: how stage 3 gathers the weights of tensorwise products: "" as they rest, or "float8", as
    the numbers that products make of them: half the bytes and the same bits, for two more passes over each (see
    kernels.float8_gather).

    Raises ValueError for another `matmul` or `gather`, and a `gather` without such products of bfloat16.

    >>> Policy("mine", param=torch.bfloat16).has_master
    True

    Ref: Micikevicius et al. 2018, "Mixed precision training", arXiv:1710.03740, section 3.1 (master weights).
    """

    name: str
    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32
    state: torch.dtype = torch.float32
    loss_scale: LossScale | None = None
    matmul: str = ""
    gather: str = ""

    def __post_init__(self) -> None:
        expect_fields(self)
        for use in ("param", "compute", "reduce", "accumulate", "state"):
            expect_floating(f"policy {self.name}: {use}", getattr(self, use))
        if self.matmul not in MATMULS:
            raise ValueError(
                f"policy {self.name}: matmul is {self.matmul!r}; it must be one of {', '.join(map(repr, MATMULS))}"
            )
        if self.gather not in ("", "float8"):
            raise ValueError(f"policy {self.name}: gather is {self.gather!r}; it must be '' or 'float8'")
        if self.gather and (self.matmul != "float8_tensorwise" or {self.param, self.compute} != {torch.bfloat16}):
            raise ValueError(
                f"policy {self.name}: gather is 'float8', which serves float8_tensorwise products of bfloat16; matmul "
                f"is {self.matmul!r}, param {self.param} and compute {self.compute}: leave gather out"
            )

    @property
    def has_master(self) -> bool:
        """Whether the optimizer keeps a copy of the parameters in dtype `state` (master weights)."""
        return self.state != self.param


def fp32() -> Policy:
    """Return the policy with float32 everywhere: 16 bytes a parameter with AdamW.

    >>> fp32().compute
    torch.float32
    """
    return Policy("fp32")


def fp64() -> Policy:
    """Return the policy with float64 everywhere, for checking mathematics.

    >>> fp64().compute
    torch.float64
    """
    f64 = torch.float64
    return Policy("fp64", param=f64, compute=f64, reduce=f64, accumulate=f64, state=f64)


def bf16() -> Policy:
    """Return the policy with bfloat16 parameters, gradients and computation; float32 master weights, moments, sums.

    With AdamW 16 bytes a parameter: 2 + 2 + 4 + 4 + 4 (parameter, gradient, master weight, two moments).

    >>> bf16().param, bf16().state
    (torch.bfloat16, torch.float32)

    Ref: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 3.1 (the 16 bytes).
    """
    return Policy("bf16", param=torch.bfloat16, compute=torch.bfloat16)


def bf16_float8() -> Policy:
    """Return bf16 with the linear layers of the blocks in float8, one scale for each operand: the fastest and least
    exact policy.
    """
    return Policy("bf16_float8", param=torch.bfloat16, compute=torch.bfloat16, matmul="float8_tensorwise")


def bf16_float8_gather() -> Policy:
    """Return bf16_float8 whose weights are gathered as float8 at stage 3: the same numbers with half the bytes, for two
    more passes over each weight, which pays where links are slow; `fzero plan` says where.
    """
    return replace(bf16_float8(), name="bf16_float8_gather", gather="float8")


def bf16_float8_rowwise() -> Policy:
    """Return bf16 with the linear layers of the blocks in float8, one scale for each row of the left operand and column
    of the right.
    """
    return Policy("bf16_float8_rowwise", param=torch.bfloat16, compute=torch.bfloat16, matmul="float8_rowwise")


def fp16(loss_scale: LossScale = LossScale()) -> Policy:
    """Return the policy with float16 parameters, gradients and computation, and dynamic loss scaling; the rest as bf16.

    loss_scale: its settings; gradients of the scaled loss that overflow make the step skip its update.

    >>> fp16().loss_scale.init
    65536.0

    Ref: Micikevicius et al. 2018, "Mixed precision training", arXiv:1710.03740, section 3.2.
    """
    return Policy("fp16", param=torch.float16, compute=torch.float16, loss_scale=loss_scale)


POLICIES = {
    make().name: make for make in (fp32, fp64, bf16, fp16, bf16_float8, bf16_float8_gather, bf16_float8_rowwise)
}
