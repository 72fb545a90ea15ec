"""Calls of somebody's function in a step: it must be a pure function of what it is given.

The first call with arguments of new shapes is watched: what is random must come from a key (core.draws), nothing that
was there before may be written into, and attributes of modules may not carry anything on to the next call. Later calls
run as they are; only those of a function that draws run within its Draws.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.belongings import Belongings, Changed, unlike
from fzero.core.draws import Draws
from fzero.core.graph_cut import Impure, Watch, line
from fzero.core.recomputation import passed_over
from fzero.core.torch_private import get_current_dispatch_mode

R = TypeVar("R")


class PureCalls:
    """Calls of one function."""

    def __init__(self) -> None:
        self.known: dict[Any, bool] = {}  # by the shapes of a call that was watched: whether it may draw
        self.watches = False  # whether a call is watched now

    def __call__(
        self, f: Callable[[], R], given: Mapping[str, Tensor], draws: Draws, find_belongings: Callable[[], Belongings]
    ) -> R:
        """What f returns, of tensors that it is `given`, by name. find_belongings: finds what it has beside them.

        Raises Impure, at the first call with tensors of these shapes, for what no pure function does.
        """
        with passed_over():
            return self.call(f, given, draws, find_belongings)

    def call(
        self, f: Callable[[], R], given: Mapping[str, Tensor], draws: Draws, find_belongings: Callable[[], Belongings]
    ) -> R:
        """The call itself."""
        shapes = tuple((name, x.shape, x.dtype, x.device) for name, x in given.items()), draws.off
        traced = get_current_dispatch_mode() is not None
        if shapes in self.known and not traced:
            with draws if self.known[shapes] else contextlib.nullcontext():
                return f()
        belongings = find_belongings()
        with draws, Watch({**belongings.tensors, **given}):
            before = belongings.marks()
            self.watches = True
            try:
                try:
                    out = named_writes(f)
                except Changed:  # by what a module makes once, in its first call, if not by the second one too
                    out = f_again(f, draws)
            finally:
                self.watches = False
            changed = unlike(before, belongings.marks())
            # Another thread may have drawn: what counts is whether the result depends on it.
            if changed and not same_values(out, f_again(f, draws)):
                raise Impure(
                    f"the loss changes {changed} and depends on it, so that it is no function of (state, batch); draw "
                    "random numbers by torch, and hand in what changes by the batch"
                )
        if not traced:
            self.known[shapes] = draws.used
        return out


def named_writes(f: Callable[[], R]) -> R:
    """What f returns; raises Impure for a write that a transform of torch.func refuses, before any mode sees it."""
    try:
        return f()
    except RuntimeError as error:
        if not any(text in str(error) for text in WRITES):
            raise
        raise Impure(
            f"{line(error)}: writes in place into a parameter, or a tensor that is no argument, such as a buffer; make "
            "a new tensor, as in x = x + y"
        ) from error


# What torch says of writes before it calls an operator.
WRITES = ("mutate a captured Tensor", "a leaf Variable that requires grad is being used in an in-place operation")


def f_again(f: Callable[[], R], draws: Draws) -> R:
    """What f returns a second time, with the same draws."""
    draws.number = 0
    return f()


def same_values(a: Any, b: Any) -> bool:
    """Whether two results are the same, but for sums in another order."""
    pairs = zip(pytree.leaves(a), pytree.leaves(b))
    return all(
        torch.allclose(x.detach(), y.detach(), rtol=1e-5, atol=0.0, equal_nan=True) if isinstance(x, Tensor) else x == y
        for x, y in pairs
    )
