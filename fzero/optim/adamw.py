"""Adam with L2 weight decay, and AdamW, which decays apart from the gradient; both with PyTorch's fused kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.optim.base import GradientTransformation, Schedule, check_number, lr_at
from fzero.optim.leafwise import Row, Step, apply_rows, flat_pieces, leafwise, moment, rows_of, safe_sqrt
from fzero.optim.rules import Mask, check_mask, masked
from fzero.pytree import Tree


class AdamState(NamedTuple):
    """State of `adam` and `adamw`."""

    count: Tensor  # int64 0-dim: steps made
    m: Tree  # mean of gradients, like the params
    v: Tree  # mean of squared gradients, like the params


def adamw(
    lr: float | Tensor | Schedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    weight_decay: float = 0.01,
    mask: Mask = None,
    state_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """AdamW: Adam's step and, apart from it, p shrinks by lr λ p.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g²;  m̂ = m / (1 - b1^t);  v̂ = v / (1 - b2^t);  u = -lr m̂ / (√v̂ +
    eps) - lr λ p, with t = count + 1.

    mask: which leaves decay (a regex over names, a predicate (name, leaf) such as `decay_matrices`, None for all).
    state_dtype: of m and v, None for the param's. The arithmetic is in the widest of the dtypes, at least float32.
    `apply` uses PyTorch's fused kernel for the leaves whose four tensors are of one dtype, and equals `update` + add to
    the rounding of a few operations. In each form an element's bits are its own: they depend neither on where in a leaf
    it lies nor on how the leaf is cut into shards.
    Raises ValueError for numbers out of range.

    Ref: Loshchilov and Hutter 2019, "Decoupled weight decay regularization", arXiv:1711.05101, algorithm 2.
    """

    def step(g: Tensor, slots: tuple, p: Tensor, scalars: tuple, decay: float) -> tuple[Tensor, tuple]:
        u, slots = _adam_step(g, slots, scalars, b1, b2, eps)
        return u - (scalars[0] * decay) * p if decay else u, slots

    return _adam("adamw", torch._fused_adamw_, step, lr, b1, b2, eps, weight_decay, mask, state_dtype)


def adam(
    lr: float | Tensor | Schedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    weight_decay: float = 0.0,
    mask: Mask = None,
    state_dtype: torch.dtype | None = None,
) -> GradientTransformation:
    """Adam; a weight_decay λ is L2: it adds λ p to the gradient, as torch.optim.Adam.

    The equations and arguments are those of `adamw` with g + λ p in place of g, and without the last term.

    Ref: Kingma and Ba 2015, "Adam: a method for stochastic optimization", arXiv:1412.6980, algorithm 1.
    """

    def step(g: Tensor, slots: tuple, p: Tensor, scalars: tuple, decay: float) -> tuple[Tensor, tuple]:
        return _adam_step(g + decay * p if decay else g, slots, scalars, b1, b2, eps)

    return _adam("adam", torch._fused_adam_, step, lr, b1, b2, eps, weight_decay, mask, state_dtype)


def adam_scalars(lr: float | Tensor | Schedule, b1: float, b2: float, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`(lr, 1 - b1^t, √(1 - b2^t))`, float64 0-dim, at t = count + 1."""
    t = (count + 1).to(torch.float64)
    return lr_at(lr, count), 1 - b1**t, (1 - b2**t).sqrt()


def _adam_step(g: Tensor, slots: tuple, scalars: tuple, b1: float, b2: float, eps: float) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    (rate, correct1, root_correct2), (m, v) = scalars, slots
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (g * g)
    return -(rate / correct1) * (m / (safe_sqrt(v) / root_correct2 + eps)), (m, v)


def _adam(
    owner: str,
    kernel: Callable[..., None],
    step: Step,
    lr: float | Tensor | Schedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    mask: Mask,
    state_dtype: torch.dtype | None,
) -> GradientTransformation:
    check_number(owner, lr=lr, eps=eps, weight_decay=weight_decay)
    check_number(owner, high=1.0, b1=b1, b2=b2)
    decays = masked(mask)

    def info(name: str, p: Tensor) -> float:
        return weight_decay if decays(name, p) else 0.0

    def scalars(count: Tensor) -> tuple[Tensor, ...]:
        return adam_scalars(lr, b1, b2, count)

    def fused(rows: list[Row], count: Tensor) -> None:
        groups: dict[tuple, list[Row]] = {}
        for row in rows:
            groups.setdefault((info(row.name, row.p), row.p.dtype, row.p.device), []).append(row)
        for (decay, _, device), group in groups.items():
            # On a GPU both scalars are float32 tensors there, so the step does not wait for the device.
            rate = lr_at(lr, count).to(device, torch.float64 if device.type == "cpu" else torch.float32)
            t = (count + 1).to(device, torch.float32)
            with _whole_lines(group) as (g, m, v, p):
                kernel(
                    p, g, m, v, [], [t] * len(p), lr=rate, beta1=b1, beta2=b2, weight_decay=decay, eps=eps,
                    amsgrad=False, maximize=False,
                )  # fmt: skip

    @torch.no_grad()
    def apply(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        rows = rows_of(grads, (state.m, state.v), params)
        fits = [_fits_kernel(row) for row in rows]
        fused([row for row, fit in zip(rows, fits) if fit and _is_contiguous(row)], state.count)
        for row in (row for row, fit in zip(rows, fits) if fit and not _is_contiguous(row)):
            # The kernel walks all four in memory order: other strides would pair the wrong elements without an error.
            g, m, v, p = (x.contiguous() for x in (row.g, *row.slots, row.p))
            fused([Row(row.name, g, (m, v), p)], state.count)
            for old, new in zip((*row.slots, row.p), (m, v, p)):
                old.copy_(new)
        rest = [row for row, fit in zip(rows, fits) if not fit]
        if rest:
            apply_rows(rest, step, scalars(state.count), info, flat_pieces)
        return params, AdamState(state.count + 1, state.m, state.v)

    pure = leafwise(AdamState, [moment(state_dtype)] * 2, scalars, step, info=info, check=check_mask(owner, mask))
    return pure._replace(apply=apply)


def _fits_kernel(row: Row) -> bool:
    return all(x.dtype == row.p.dtype and x.device == row.p.device for x in (row.g, *row.slots, row.p))


def _is_contiguous(row: Row) -> bool:
    return all(x.is_contiguous() for x in (row.g, *row.slots, row.p))


@contextlib.contextmanager
def _whole_lines(rows: list[Row]) -> Iterator[list[list[Tensor]]]:
    """Lists of g, m, v and p in pieces of whole cache lines, for the kernel to write into.

    The kernel for the CPU rounds the elements behind the last whole line of a tensor in another way: these elements of
    all leaves are handed to it together, filled up to whole lines, so that the bits of none depend on where it lies.
    """
    columns = [[row.g for row in rows], *([row.slots[i] for row in rows] for i in range(2)), [row.p for row in rows]]
    line = 64 // rows[0].p.element_size() if rows[0].p.device.type == "cpu" else 1
    cut = [row.p.numel() // line * line for row in rows]
    if cut == [row.p.numel() for row in rows]:
        yield columns
        return
    flat = [[x.view(-1) for x in column] for column in columns]
    ends = [[x[n:] for x, n in zip(column, cut)] for column in flat]
    filled = [torch.nn.functional.pad(torch.cat(column), (0, -sum(map(len, column)) % line)) for column in ends]
    yield [[x[:n] for x, n in zip(column, cut)] + [end] for column, end in zip(flat, filled)]
    for column, end in zip(ends[1:], filled[1:]):
        torch._foreach_copy_(column, list(end[: sum(map(len, column))].split([len(x) for x in column])))
