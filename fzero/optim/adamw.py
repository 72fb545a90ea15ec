"""Adam with L2 weight decay, and AdamW, which decays apart from the gradient; both with a kernel for many leaves."""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fzero.core.arguments import OPTIMIZER, checked
from fzero.core.config_tables import CORRECTIONS, one_of
from fzero.core.pytree import Tree
from fzero.kernels.optim_multi_tensor import adamw as kernel
from fzero.kernels.optim_multi_tensor import adamw_step
from fzero.optim.base import Beta, GradientTransformation, LearningRate, NotNegative, NumberIn, Schedule, lr_at
from fzero.optim.combine import Mask
from fzero.optim.leafwise import Bits, Block, Rounding, storage, with_kernel

Correction = Annotated[str, one_of(CORRECTIONS)]


class AdamState(NamedTuple):
    """The state of `adam` and `adamw`.

    >>> adamw().init({"w": torch.zeros(2)})
    AdamState(count=tensor(0), m={'w': tensor([0., 0.])}, v={'w': tensor([0., 0.])})
    """

    count: Tensor  # int64 0-dim: steps made
    m: Tree  # mean of gradients, like the params
    v: Tree  # mean of squared gradients, like the params


class Adam8State(NamedTuple):
    """The state of `adam` and `adamw` with state_bits=8: see fzero.kernels.optim_lowbit.

    Leaves that stay in float32 have no scales.

    >>> state = adamw(state_bits=8, block=256).init({"w": torch.zeros(16, 512)})
    >>> state.m["w"].dtype, state.m_scale["w"].shape
    (torch.uint8, torch.Size([16, 2]))
    """

    count: Tensor  # int64 0-dim: steps made
    m: Tree  # codes (uint8) of the mean of gradients, like the params
    v: Tree  # codes of the mean of squared gradients
    m_scale: Tree  # float32, one for each block of a row: [..., blocks]
    v_scale: Tree


@checked(**OPTIMIZER)
def adamw(
    lr: LearningRate = 1e-3,
    b1: Annotated[float | Schedule, NumberIn(high=1.0)] = 0.9,
    b2: Beta = 0.999,
    eps: NotNegative = 1e-8,
    *,
    weight_decay: NotNegative = 0.01,
    mask: Mask = None,
    state_dtype: torch.dtype | None = None,
    rounding: Rounding = "nearest",
    state_bits: Bits = None,
    block: Block = 256,
    seed: int = 0,
    correction: Correction = "moments",
    impl: str = "auto",
) -> GradientTransformation:
    """Return AdamW: Adam's step and, apart from it, a shrinking of p by lr λ p.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g²;  m̂ = m / (1 - b1^t);  v̂ = v / (1 - b2^t);
    u = -lr m̂ / (√v̂ + eps) - lr λ p,  with t = count + 1.

    lr: a number, a 0-dim tensor, or a schedule. b1: a number, or a schedule: t is then of that step's b1.
    weight_decay: λ. mask: which leaves decay (a regex over names, a predicate such as `decay_matrices`, None for all).
    state_dtype: of m and v, None for the param's. The arithmetic is in the widest of the dtypes, at least float32.
    rounding: "stochastic" rounds bfloat16 states up or down at random (keyed by seed, name of the leaf, step and index
    of the element), so that changes below their 8 bits of mantissa are not lost: v moves by (1 - b2) of itself.
    state_bits: 8 keeps m and v as codes with a scale for each `block` elements of a row: 2 bytes a param for 8. Vectors
    and leaves below 4096 elements stay in float32.
    Low-precision states have the same bits on every mesh.
    correction: "moments", as above; "none": m and v stand for m̂ and v̂; "rate": they do, and lr is multiplied by
    √(1 - b2^t) / (1 - b1^t).
    impl: of `apply`: "triton" (on CUDA: all leaves of the same dtypes in one launch), "fused" (PyTorch's, if all
    four tensors are of one dtype), "reference", or "auto". They equal `update` + add to the rounding of a few
    operations. In each an element's bits depend neither on its place in the leaf nor on how the
    leaf is cut.
    Raises ValueError for numbers out of range, another correction, and state options that do not go together.

    >>> tx, params = adamw(0.1, weight_decay=0.5), {"w": torch.tensor([1.0, 4.0])}
    >>> updates, state = tx.update({"w": torch.tensor([3.0, -3.0])}, tx.init(params), params)
    >>> updates["w"]  # at the first step m̂ / √v̂ is the sign of g: -0.1 (1 + 0.5), -0.1 (-1 + 2)
    tensor([-0.1500, -0.1000])

    Ref: Loshchilov and Hutter 2019, "Decoupled weight decay regularization", arXiv:1711.05101, algorithm 2.
    """
    encoding = storage("adamw", state_dtype, state_bits, block, rounding, seed)
    options: dict[str, Any] = {"weight_decay": weight_decay, "mask": mask, "impl": impl, "correction": correction}
    return _adam("adamw", lr, b1, b2, eps, encoding=encoding, **options)


@checked(**OPTIMIZER)
def adam(
    lr: LearningRate = 1e-3,
    b1: Annotated[float | Schedule, NumberIn(high=1.0)] = 0.9,
    b2: Beta = 0.999,
    eps: NotNegative = 1e-8,
    *,
    weight_decay: NotNegative = 0.0,
    mask: Mask = None,
    state_dtype: torch.dtype | None = None,
    rounding: Rounding = "nearest",
    state_bits: Bits = None,
    block: Block = 256,
    seed: int = 0,
    correction: Correction = "moments",
    impl: str = "auto",
) -> GradientTransformation:
    """Return Adam; a weight_decay λ is L2: it adds λ p to the gradient, as in torch.optim.Adam.

    The equations and arguments are those of `adamw` with g + λ p in place of g, and without the last term.
    Raises ValueError as `adamw` does.

    >>> params, grads = {"w": torch.tensor([1.0])}, {"w": torch.tensor([-1.0])}
    >>> for weight_decay in (0.0, 2.0):  # the first step is -lr times the sign of g + λ p
    ...     tx = adam(0.1, weight_decay=weight_decay)
    ...     print(tx.update(grads, tx.init(params), params)[0]["w"])
    tensor([0.1000])
    tensor([-0.1000])

    Ref: Kingma and Ba 2015, "Adam: a method for stochastic optimization", arXiv:1412.6980, algorithm 1.
    """
    encoding = storage("adam", state_dtype, state_bits, block, rounding, seed)
    options: dict[str, Any] = {"weight_decay": weight_decay, "mask": mask, "impl": impl, "correction": correction}
    return _adam("adam", lr, b1, b2, eps, coupled=True, encoding=encoding, **options)


def adam_scalars(
    lr: float | Tensor | Schedule, b1: float | Tensor, b2: float, count: Tensor, correction: str = "moments"
) -> tuple[Tensor, Tensor, Tensor]:
    """`(lr, 1 - b1^t, √(1 - b2^t))`, float64 0-dim, at t = count + 1."""
    t, rate = (count + 1).to(torch.float64), lr_at(lr, count)
    first, second = 1 - b1**t, (1 - b2**t).sqrt()
    if correction == "moments":
        return rate, first, second
    unit = torch.ones_like(t)
    return rate * second / first if correction == "rate" else rate, unit, unit


def _adam(
    owner: str,
    lr: float | Tensor | Schedule,
    b1: float | Schedule,
    b2: float,
    eps: float,
    *,
    weight_decay: float,
    correction: str,
    **options: Any,
) -> GradientTransformation:
    fixed = math.nan if callable(b1) else b1  # of a schedule: no form may use it

    def scalars(count: Tensor) -> tuple[Tensor, ...]:
        if not callable(b1):
            return adam_scalars(lr, b1, b2, count, correction)
        step_b1 = b1(count).to(count.device)
        return (*adam_scalars(lr, step_b1, b2, count, correction), step_b1)

    numbers = {"b1": fixed, "b2": b2, "eps": eps, "weight_decay": weight_decay, "correction": correction}
    return with_kernel(owner, kernel, adamw_step, (AdamState, Adam8State), 2, scalars, **numbers, **options)
