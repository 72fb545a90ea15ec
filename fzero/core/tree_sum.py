"""Sums in the order of a balanced binary tree: of a list, of terms that come one by one, of the rows of a tensor.

Consecutive pairs are added first: ((0 + 1) + (2 + 3)) + ... as a binary counter takes them; complete trees that remain
are added from the last to the first. The three forms have the same bits, and so does a sum over micro-batches of sums
over ranks, for every power of two of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


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
