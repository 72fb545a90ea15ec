"""The roll call: whether all ranks run the same program, and what an error says of the other ranks.

Ranks that run different programs hang, or take one tensor for another. In checked mode each collective first compares
itself with the one that the left neighbour of this rank on the axis is at, through the store; if all neighbours agree,
all ranks do.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch.distributed as dist


class RankError(RuntimeError):
    """Another rank is gone, is late, or runs another program."""


class Call(NamedTuple):
    """One run of a collective: what all ranks of the axis must agree on, and what errors name."""

    collective: str
    axis: str
    ranks: int
    leaf: str
    phase: str
    dtype: str
    shape: list[int]
    number: int  # among all collectives of the mesh, from 1

    def __str__(self) -> str:
        of = f" of {self.leaf}" if self.leaf else ""
        return f"{self.collective} over {self.axis} ({self.ranks} ranks){of}" + (
            f" in {self.phase}" if self.phase else ""
        )

    @property
    def signature(self) -> str:
        """The whole of it, as a text."""
        return f"#{self.number} {self}, {self.dtype} {self.shape}"


class Agreement:
    """What the ranks of a mesh tell each other through `store` besides their tensors; one for all axes of the mesh.

    rank: of this process among all. timeout_s: how long another rank is waited for.
    """

    def __init__(self, store: dist.Store | None, rank: int, timeout_s: float) -> None:
        self.store, self.rank, self.timeout_s = store, rank, timeout_s
        self.number = 0  # of collectives so far: the same on all ranks at the same point of the program
        self.checking = False
        # For whoever looks for a rank that hangs (fzero/run/ranks/watchdog.py), from another thread.
        self.last: Call | None = None  # the collective that this rank began last
        self.waiting: Call | None = None  # the one in which it waits for other ranks now

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """A context in which every collective is compared between the ranks before it runs."""
        before, self.checking = self.checking, self.store is not None  # a mesh for planning has nobody to compare with
        try:
            yield
        finally:
            self.checking = before

    def compare(self, call: Call, left: int) -> None:
        """Return when rank `left` is at the same call.

        Raises RankError where it is at another one, and where it does not arrive in time.
        """
        text, self.waiting = json.dumps(call), call
        # By axis, so that it has one reader: a neighbour over another axis sees by `last` that this rank is elsewhere.
        self.store.set(f"{self.rank}/{call.axis}/{call.number}", text)
        self.store.set(f"{self.rank}/last", text)
        other = self._arrival(call, left)
        if other != call:
            at = "; ".join(
                f"rank {rank} is at {what.signature}" for rank, what in sorted([(self.rank, call), (left, other)])
            )
            fix = "give all ranks the same code, config, mesh and shapes of data"
            raise self.error(call, f"the ranks run different programs: {at}; {fix}")
        # Its one reader has read it: what the store holds does not grow.
        self.store.delete_key(f"{left}/{call.axis}/{call.number}")
        self.waiting = None

    def _arrival(self, call: Call, left: int) -> Call:
        """What rank `left` is at as its collective of the same number; raises RankError where it does not arrive in
        time.
        """
        key, end = f"{left}/{call.axis}/{call.number}", time.monotonic() + self.timeout_s
        while True:
            left_s = end - time.monotonic()
            with contextlib.suppress(RuntimeError):
                self.store.wait([key], datetime.timedelta(seconds=max(0.01, min(1.0, left_s))))
                return self._read(key)
            try:
                last = self._read(f"{left}/last") if self.store.check([f"{left}/last"]) else None
                if last is not None and last.number >= call.number:
                    # It has been there: what it left for this rank is here by now, or it was at a collective over
                    # another axis.
                    return self._read(key) if self.store.check([key]) else last
            except RuntimeError:
                raise self.error(call, "the store, which rank 0 keeps, does not answer") from None
            if left_s <= 0.0:
                did = f"the last it began is {last.signature}" if last else "it has begun no collective in checked mode"
                raise self.error(call, f"rank {left} did not arrive within {self.timeout_s:g} s; {did}")

    def _read(self, key: str) -> Call:
        return Call(*json.loads(self.store.get(key)))

    def error(self, call: Call, what: str) -> RankError:
        """The error of this rank at `call`. It adds the reason that another rank gave before, if one did and it is not
        the same.
        """
        text = f"rank {self.rank}: {call}: {what}"
        first = self.fail(text)
        mine = first.startswith(f"rank {self.rank}:") or what in first
        return RankError(text + (f" (before that, {first})" if first and not mine else ""))

    def fail(self, text: str) -> str:
        """Leave for the other ranks why this one ends; returns what the first rank that did so left (empty: the store
        is gone).
        """
        try:
            return "" if self.store is None else self.store.compare_set("failed", "", text).decode()
        except RuntimeError:
            return ""
