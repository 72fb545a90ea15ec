"""A batch that grows: its size as a function of the tokens of the run before it."""

from __future__ import annotations

import math
from typing import NamedTuple

FORM = "a ramp is START:INCREMENT:TOKENS, such as 16:16:1e8: 16 at first, and 16 more each 1e8 tokens"
MOST = 1000  # sizes on the way, each with steps of its own


class Ramp(NamedTuple):
    """Batches of `start` sequences at first, and of `increment` more after each `tokens` tokens of the run, up to that
    of the config.

    Ref: Smith et al. 2022, "Using DeepSpeed and Megatron to train Megatron-Turing NLG 530B", arXiv:2201.11990, section
    3.2, whose ramp is by samples.
    """

    start: int
    increment: int
    tokens: int

    @classmethod
    def parse(cls, text: str, key: str = "train.batch_ramp") -> Ramp:
        """The Ramp of a text, the value of `key`; raises ValueError.

        >>> Ramp.parse("16:8:1e6")
        Ramp(start=16, increment=8, tokens=1000000)
        """
        parts, found = text.split(":"), list[int]()
        for part in parts:
            try:
                value = float(part)
            except ValueError:
                raise ValueError(f"{key} is {text!r}: {part!r} is no number; {FORM}") from None
            if not (math.isfinite(value) and value >= 1 and value == int(value)):
                raise ValueError(f"{key} is {text!r}: {part} is no whole number of at least 1; {FORM}")
            found.append(int(value))
        if len(found) != 3:
            raise ValueError(f"{key} is {text!r}; {FORM}")
        return cls(*found)

    def expect_fits(self, batch: int, micro_batch: int) -> None:
        """Raise ValueError if the ramp does not lead to `batch`, or has a batch that micro-batches do not make up."""
        text = ":".join(map(str, self))
        if self.start > batch:
            raise ValueError(
                f"train.batch_ramp is {text}, which begins above train.batch={batch}; batches grow: begin with less"
            )
        if (batch - self.start) % self.increment:
            near = self.start + (batch - self.start) // self.increment * self.increment
            raise ValueError(
                f"train.batch_ramp is {text}, whose steps of {self.increment} do not lead from {self.start} to "
                f"train.batch={batch}; use --batch {near} or {near + self.increment}, or another increment"
            )
        for what, size in (("begins with", self.start), ("grows by", self.increment)):
            if size % micro_batch and (what != "grows by" or self.start < batch):
                raise ValueError(
                    f"train.batch_ramp is {text}, which {what} {size} sequences, and train.micro_batch={micro_batch} "
                    "does not divide that; make one fit the other"
                )
        if (sizes := (batch - self.start) // self.increment) > MOST:
            raise ValueError(
                f"train.batch_ramp is {text}, which has {sizes:,} sizes on its way to train.batch={batch}; use an "
                f"increment of at least {-(-(batch - self.start) // MOST)}"
            )

    def pieces(self, batch: int, seq_len: int, before: int, steps: int, sequences: int = 0) -> list[tuple[int, int]]:
        """[(a batch, steps of it)] of so many steps up to `batch`, after `before` tokens of the run.

        sequences: of each step, where it is not a batch that grows.

        >>> Ramp(2, 1, 40).pieces(4, 10, 0, 6)
        [(2, 2), (3, 2), (4, 2)]
        """
        found, last = list[tuple[int, int]](), (batch - self.start) // self.increment
        while steps:
            level = min(before // self.tokens, last)
            size = self.start + level * self.increment
            count, of_step = steps, (sequences or size) * seq_len
            if level < last:
                count = min(steps, -(-((level + 1) * self.tokens - before) // of_step))
            found.append((size, count))
            before, steps = before + count * of_step, steps - count
        return found


def shared_batch(batch: int, ramp: str) -> int:
    """The largest number that divides every batch of a run: all of them, if there is no ramp, are `batch`."""
    if not ramp:
        return batch
    parsed = Ramp.parse(ramp)
    return batch if parsed.start == batch else math.gcd(parsed.start, parsed.increment)
