"""The policy of recomputation in the backward pass, and helpers for autograd Functions that run under torch.func
transforms.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fzero.core import pytree, varying_axes
from fzero.core.arguments import expect_fields
from fzero.core.torch_private import (
    get_interpreter_stack,
    is_functorch_wrapped_tensor,
    transforms_active,
    unwrap_dead_wrappers,
)

R = TypeVar("R")


@dataclass(frozen=True)
class Remat:
    """The recomputation policy of a stack of layers: the activations that the backward pass recomputes.

    every: 0 keeps the residuals of each layer, within `budget`; k >= 1 keeps only the input of each k-th layer, and the
    backward pass runs k layers again at a time (1 is full recomputation). budget: the fraction, in [0, 1], of a layer's
    residuals that may be kept. Below 1 torch's partitioner chooses what to recompute by a knapsack over the layer's
    graph.

    >>> str(Remat.parse("every:2")), Remat.parse("selective:0.5").budget
    ('every:2', 0.5)
    """

    every: int = 0
    budget: float = 1.0

    def __post_init__(self) -> None:
        expect_fields(self)
        if self.every < 0 or not 0.0 <= self.budget <= 1.0:
            raise ValueError(
                f"remat: every is {self.every} and budget {self.budget}; every must be at least 0, and budget in [0, 1]"
            )

    @classmethod
    def parse(cls, text: str) -> Remat:
        """Return the policy that a text names: "none", "full", "every:K" (K layers) or "selective:F" (keep at most the
        fraction F).

        Raises ValueError for any other text.
        """
        form = re.fullmatch(r"(none|full)|every:(\d+)|selective:(\d*\.?\d+(?:e-\d+)?)", text)
        if form is None:
            raise ValueError(
                f"remat is {text!r}; it must be none, full, every:K or selective:F, e.g. every:2 or selective:0.5"
            )
        if form[1]:
            return cls(every=int(form[1] == "full"))
        every, budget = (int(form[2]), 1.0) if form[2] else (0, float(form[3]))
        if (form[2] and every < 1) or not 0.0 <= budget <= 1.0:
            raise ValueError(f"remat is {text!r}; K must be at least 1 and F in [0, 1]")
        return cls(every, budget)

    def __str__(self) -> str:
        if self.every:
            return "full" if self.every == 1 else f"every:{self.every}"
        return "none" if self.budget == 1.0 else f"selective:{self.budget}"


def transforms() -> list[str]:
    """The names of the torch.func transforms active around the caller, outermost first: "Grad", "Vmap", "Jvp" or
    "Functionalize".
    """
    stack = get_interpreter_stack()
    return [level.key().name for level in stack or []]


def first_order() -> bool:
    """Whether a Function that can be differentiated only once may be used: at most one torch.func.grad or vjp is
    active, and nothing else.
    """
    return transforms() in ([], ["Grad"])


def dense(grad: Tensor) -> Tensor:
    """A gradient with its zeros, as sums over ranks need it: that of a sparse=True embedding has its rows alone."""
    return grad.to_dense() if grad.is_sparse else grad


def needs_grad(*tensors: Tensor) -> bool:
    """Whether the result of a computation on `tensors` will be differentiated in reverse mode."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def expect_closed(f: Callable[..., Any], label: str) -> None:
    """Raise ValueError if `f` itself closes over a tensor that is differentiated or batched: a Function would ignore
    its gradient.
    """
    for name, cell in zip(
        getattr(getattr(f, "__code__", None), "co_freevars", ()), getattr(f, "__closure__", None) or ()
    ):
        if cell == types.CellType():
            continue  # not assigned yet
        for leaf in pytree.leaves(cell.cell_contents):
            if isinstance(leaf, Tensor) and (needs_grad(leaf) or is_functorch_wrapped_tensor(leaf)):
                raise ValueError(
                    f"{label}: the function closes over {name!r}, a tensor that is differentiated; pass it as "
                    "an argument"
                )


class Function(torch.autograd.Function):
    """A torch.autograd.Function whose `apply` binds no arguments where no transform is active: torch reads the
    signature of `forward` out of the code at each call, which takes longer than most kernels of a small step.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if followed := varying_axes.active():
            return followed.follow_call(super().apply, args, *args)
        if transforms_active():
            return super().apply(*args)
        native: Any = super(torch.autograd.Function, cls)  # torch's own `apply` in C++
        return native.apply(*unwrap_dead_wrappers(args))


def run_backward(operation: str, run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """`Backward.apply(what, run, *tensors)`; called as it is where nothing can ask for its derivative."""
    if transforms_active() or torch.is_grad_enabled() or varying_axes.active():
        return Backward.apply(operation, run, *tensors)
    return run(*tensors)


class Backward(Function):
    """`Backward.apply(what, run, *tensors)` returns the tuple `run(*tensors)`, computed on plain tensors below all
    transforms.

    For use inside the backward pass of another Function. Under vmap (jacrev batches cotangents) it loops over the
    batch. It cannot be differentiated: that raises NotImplementedError naming `what`, so operations with such a
    backward pass fall back to their reference when a second derivative is taken by torch.func.
    """

    @staticmethod
    def forward(operation: str, run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.what = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.what}: .backward() differentiates it once; for second derivatives use torch.func.grad of grad"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], operation: str, run: Callable, *tensors: Tensor) -> tuple[Any, ...]:
        outs = []
        for i in range(info.batch_size):
            row = (t if dim is None else t.select(dim, i) for t, dim in zip(tensors, in_dims[2:]))
            outs.append(Backward.apply(operation, run, *row))
        return tuple(torch.stack(parts) for parts in zip(*outs)), (0,) * len(outs[0])
