"""Random numbers by a key: the n-th draw has a key of its own, and element e of it the word e of that key."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fzero.core import prng


class KeyedNumbers:
    """The draws of one part of a batch, in turn.

    key: makes the key, at the first draw; None: dropouts pass their input, and all else is drawn by a fixed key, as an
    evaluation wants it. rows: the samples of this part of a batch. first: the number of its first one in the global
    batch. expect: is called with the input of each dropout, and raises for what may not be dropped there.
    """

    def __init__(
        self,
        key: Callable[[], Tensor] | None,
        rows: int,
        first: int | Tensor = 0,
        expect: Callable[[Tensor], None] = lambda x: None,
    ):
        super().__init__()
        self.make_key, self.rows, self.first, self.expect = key, rows, first, expect
        self.number = 0  # draws so far
        self.base_key: Tensor | None = None

    @property
    def off(self) -> bool:
        """Whether dropouts pass their input."""
        return self.make_key is None

    def next_site(self, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, int | Tensor]:
        """(the key of the next draw, the index of the first element of a tensor of this shape in it)."""
        if self.base_key is None:
            self.base_key = prng.key(0, device) if self.make_key is None else self.make_key()
        key, first = self.base_key.to(device), self.first
        first = first.to(device) if isinstance(first, Tensor) else first
        key = prng.fold_in(key, f"draw {self.number}")
        self.number += 1
        if self.rows and shape and shape[0] and shape[0] % self.rows == 0:
            return key, first * (math.prod(shape) // self.rows)
        return prng.fold_in(key, first), 0

    def uniform(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Numbers in (0, 1)."""
        key, first = self.next_site(shape, device)
        return prng.uniform(key, shape, dtype=dtype, first=first)

    def normal(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Normal numbers."""
        key, first = self.next_site(shape, device)
        return prng.normal(key, shape, dtype=dtype, first=first)

    def keep_mask(self, shape: tuple[int, ...], rate: float, device: torch.device) -> Tensor:
        """Which elements a dropout keeps."""
        key, first = self.next_site(shape, device)
        return prng.bernoulli(key, 1.0 - rate, shape, first=first)
