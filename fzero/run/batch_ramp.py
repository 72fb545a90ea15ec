"""A batch that grows: its size as a function of the tokens of the run before it."""

from __future__ import annotations

import math
from typing import NamedTuple

FORM = "a ramp is START:INCREMENT:TOKENS, such as 16:16:1e8: 16 at first, and 16 more each 1e8 tokens"
MAX_SIZES = 1000  # sizes on the way, each with steps of its own


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
        parts, numbers = text.split(":"), list[int]()
        for field in parts:
            try:
                value = float(field)
            except ValueError:
                raise ValueError(f"{key} is {text!r}: {field!r} is no number; {FORM}") from None
            if not (math.isfinite(value) and value >= 1 and value == int(value)):
                raise ValueError(f"{key} is {text!r}: {field} is no whole number of at least 1; {FORM}")
            numbers.append(int(value))
        if len(numbers) != 3:
            raise ValueError(f"{key} is {text!r}; {FORM}")
        return cls(*numbers)

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
        for role, size in (("begins with", self.start), ("grows by", self.increment)):
            if size % micro_batch and (role != "grows by" or self.start < batch):
                raise ValueError(
                    f"train.batch_ramp is {text}, which {role} {size} sequences, and train.micro_batch={micro_batch} "
                    "does not divide that; make one fit the other"
                )
        if (sizes := (batch - self.start) // self.increment) > MAX_SIZES:
            raise ValueError(
                f"train.batch_ramp is {text}, which has {sizes:,} sizes on its way to train.batch={batch}; use an "
                f"increment of at least {-(-(batch - self.start) // MAX_SIZES)}"
            )

    def pieces(
        self, batch: int, seq_len: int, past_tokens: int, steps: int, sequences: int = 0
    ) -> list[tuple[int, int]]:
        """[(a batch, steps of it)] of so many steps up to `batch`, after `past_tokens` tokens of the run.

        sequences: of each step, where it is not a batch that grows.

        >>> Ramp(2, 1, 40).pieces(4, 10, 0, 6)
        [(2, 2), (3, 2), (4, 2)]
        """
        segments, last = list[tuple[int, int]](), (batch - self.start) // self.increment
        while steps:
            level = min(past_tokens // self.tokens, last)
            size = self.start + level * self.increment
            count, of_step = steps, (sequences or size) * seq_len
            if level < last:
                count = min(steps, -(-((level + 1) * self.tokens - past_tokens) // of_step))
            segments.append((size, count))
            past_tokens, steps = past_tokens + count * of_step, steps - count
        return segments


def shared_batch(batch: int, ramp: str) -> int:
    """The largest number that divides every batch of a run: all of them, if there is no ramp, are `batch`."""
    if not ramp:
        return batch
    parsed = Ramp.parse(ramp)
    return batch if parsed.start == batch else math.gcd(parsed.start, parsed.increment)
