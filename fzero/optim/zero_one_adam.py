"""0/1 Adam: 1-bit Adam without a warm-up, whose second moment moves ever more rarely, and then sums too."""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.core.arguments import OPTIMIZER, checked, expect_count
from fzero.optim.base import GradientTransformation, Schedule
from fzero.optim.masks import Mask
from fzero.optim.onebit import Method, Numbers, adam_direction, one_bit
from fzero.optim.zero_one_local import Intervals, with_local_steps

FAR = 1 << 48  # steps that no run makes


@checked(**OPTIMIZER)
def zero_one_adam(
    lr: float | Tensor | Schedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    kappa: int = 16,
    freeze: int | None = None,
    sum_every: int = 1,
    sum_double: int = 0,
    weight_decay: float = 0.01,
    mask: Mask = None,
    clip: float = 0.0,
    scale: str = "mean",
    correction: str = "moments",
) -> GradientTransformation:
    """Return 0/1 Adam: v moves in steps k_0 = 0, k_{j+1} = k_j + 2^⌊j/κ⌋, by sums in full.

    In those steps m and v are as in `adamw`; in the others v stays, and m is summed by signs, as in `onebit_adam`,
    whose state, plan ("grads=1bit") and arguments it has. The steps between such sums double after each κ of them.
    kappa: κ. freeze: v does not move from this step on; None: it goes on. Errors are those of m, where the paper's are
    those of the rate times m: the same for a constant rate.

    sum_every: from step `freeze` on ranks sum once in so many steps, and move apart in between, each by its own
    momentum (see fzero/optim/zero_one_local.py), with a plan of codec "grads=1bit,local". sum_double: so many steps sum
    each time, as many each second time, then each fourth, up to `sum_every`; 0: each `sum_every`-th from the first one
    on (the paper doubles where its rate has halved, up to 16). Errors are then those of the rate times m, and `clip` is
    of each rank's own momentum. `params` of a state are those after the last sum.
    Communicates: a psum of gradients in the steps k_j; in the others an all_to_all and an all_gather of bits, and in
    local steps nothing.
    Raises ValueError for numbers out of range, and for `sum_every` without `freeze`.

    >>> full_sums(16, None)[:20].tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22]

    Ref: Lu et al. 2022, "Maximizing communication efficiency for large-scale training via 0/1 Adam", arXiv:2202.06009,
    algorithm 1, and its policy of when v moves; there m is summed in full, and no step is local while v moves, as by
    DeepSpeed.
    """
    expect_count("zero_one_adam: kappa", kappa)
    if freeze is not None:
        expect_count("zero_one_adam: freeze", freeze)
    if sum_every != 1 and freeze is None:
        raise ValueError(
            f"zero_one_adam: sum_every is {sum_every}, which is of the steps after v has moved last, and freeze is "
            "None; give freeze, the first of them"
        )
    steps = full_sums(kappa, freeze)
    method = Method(
        lambda count: torch.isin(count, steps.to(count.device)),
        lambda count: (steps.to(count.device) <= count).sum(),
        adam_direction(eps),
    )
    numbers = Numbers(lr, b1, b2, eps, weight_decay, clip, scale, correction)
    intervals = Intervals(freeze or FAR, sum_every, sum_double).check("zero_one_adam")
    if sum_every == 1:
        return one_bit("zero_one_adam", numbers, method, mask)
    return with_local_steps("zero_one_adam", numbers, method, mask, intervals)


def full_sums(kappa: int, freeze: int | None) -> Tensor:
    """The steps of 0/1 Adam whose sums are made in full, int64, from 0 on."""
    found, step = [], 0
    while step < (FAR if freeze is None else freeze):
        found.append(step)
        step += 1 << ((len(found) - 1) // kappa)
    return torch.tensor(found, dtype=torch.int64)
