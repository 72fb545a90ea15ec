"""The agreement check: do all ranks run the same program; and errors that name the other ranks.

In checked mode each rank compares every collective, before it runs, with that of its left neighbour on the axis,
through the store. If all neighbours agree, all ranks do.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch.distributed as dist

from fzero.comm.axes import PP


class RankError(RuntimeError):
    """Raised if another rank is gone, is late, or runs another program; the message says which rank and where.

    >>> from fzero.comm.agreement import CollectiveCall, ProgramAgreement
    >>> agreement = ProgramAgreement(torch.distributed.HashStore(), rank=0, timeout_s=0.05)  # no rank 1 writes to it
    >>> agreement.compare(CollectiveCall("psum", "dp", 2, "loss", "", "float32", [1], 1), neighbor=1)
    Traceback (most recent call last):
    fzero.comm.agreement.RankError: rank 0: psum over dp (2 ranks) of loss: rank 1 did not arrive within 0.05 s; ...
    """


class CollectiveCall(NamedTuple):
    """One call of a collective: the properties that all ranks of the axis must agree on, and that errors name."""

    collective: str
    axis: str
    ranks: int
    leaf: str
    phase: str
    dtype: str
    shape: list[int]
    number: int  # among all collectives of the axis, from 1
    order: int = 0  # among all collectives of the process, from 1; the ranks of pp need not agree on it

    def __str__(self) -> str:
        leaf_text = f" of {self.leaf}" if self.leaf else ""
        return f"{self.collective} over {self.axis} ({self.ranks} ranks){leaf_text}" + (
            f" in {self.phase}" if self.phase else ""
        )

    @property
    def signature(self) -> str:
        """All fields as a text."""
        return f"#{self.number} {self}, {self.dtype} {self.shape}"


class ProgramAgreement:
    """The agreement check of a mesh and the ranks' messages about failures, through one store for all axes."""

    def __init__(self, store: dist.Store | None, rank: int, timeout_s: float) -> None:
        self.store, self.rank, self.timeout_s = store, rank, timeout_s
        # Ranks that run different programs hang, or one receives a tensor that was meant for another collective.
        self.number = 0  # collectives so far; the same at the same point of the program on all ranks of one stage
        self.checking = False
        # In checked mode: None: a psum of what is the same on all ranks is refused; a list: it is added to it.
        self.noted: list[CollectiveCall] | None = None
        # Read from another thread by run/ranks/watchdog.py, which looks for ranks that hang.
        self.last: CollectiveCall | None = None  # the last collective that this rank began
        self.waiting: CollectiveCall | None = None  # the collective in which this rank now waits for others

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """A context in which the ranks compare every collective before it runs."""
        previous, self.checking = (
            self.checking,
            self.store is not None,
        )  # a mesh for planning has no other ranks to compare with
        try:
            yield
        finally:
            self.checking = previous

    def compare(self, call: CollectiveCall, neighbor: int) -> None:
        """Wait until rank `neighbor` is at the same call; raises RankError if it is at another one or late."""
        store, text, self.waiting = self.store, json.dumps(call), call
        assert store is not None  # `checked` does not compare without one
        # The key contains the axis, so that it has exactly one reader. A neighbour on another axis learns from the key
        # `last` where this rank is.
        store.set(f"{self.rank}/{call.axis}/{call.number}", text)
        store.set(f"{self.rank}/last", text)
        neighbor_call = self._arrival(store, call, neighbor)
        if neighbor_call._replace(order=call.order) != call:
            positions = "; ".join(
                f"rank {rank} is at {rank_call.signature}"
                for rank, rank_call in sorted([(self.rank, call), (neighbor, neighbor_call)])
            )
            fix = "give all ranks the same code, config, mesh and shapes of data"
            raise self.error(call, f"the ranks run different programs: {positions}; {fix}")
        # This rank is the only reader of that key; delete it, so that the store does not grow.
        store.delete_key(f"{neighbor}/{call.axis}/{call.number}")
        self.waiting = None

    def _arrival(self, store: dist.Store, call: CollectiveCall, neighbor: int) -> CollectiveCall:
        """The collective with the same number on rank `neighbor`; raises RankError if that rank is late."""
        key, end = f"{neighbor}/{call.axis}/{call.number}", time.monotonic() + self.timeout_s
        while True:
            # In slices of a second: a neighbour at another call never writes this key; only its `last` says so.
            left_s = end - time.monotonic()
            with contextlib.suppress(RuntimeError):
                store.wait([key], datetime.timedelta(seconds=max(0.01, min(1.0, left_s))))
                return self._read(store, key)
            try:
                last = self._read(store, f"{neighbor}/last") if store.check([f"{neighbor}/last"]) else None
                if last is not None and call.axis != PP and last.order >= call.order:
                    # Ranks of pp run different programs, so that their orders cannot be compared.
                    # That rank has reached this place: its key exists by now, or its collective was over another axis.
                    return self._read(store, key) if store.check([key]) else last
            except RuntimeError:
                raise self.error(call, "the store, which rank 0 keeps, does not answer") from None
            if left_s <= 0.0:
                status = (
                    f"the last it began is {last.signature}" if last else "it has begun no collective in checked mode"
                )
                raise self.error(call, f"rank {neighbor} did not arrive within {self.timeout_s:g} s; {status}")

    def _read(self, store: dist.Store, key: str) -> CollectiveCall:
        return CollectiveCall(*json.loads(store.get(key)))

    def error(self, call: CollectiveCall, reason: str) -> RankError:
        """Make this rank's error at `call`; it also quotes the rank that failed first, if that differs."""
        text = f"rank {self.rank}: {call}: {reason}"
        first = self.fail(text)
        is_local = first.startswith(f"rank {self.rank}:") or reason in first
        return RankError(text + (f" (before that, {first})" if first and not is_local else ""))

    def fail(self, text: str) -> str:
        """Publish why this rank fails; return the reason of the rank that failed first ("" if the store is gone)."""
        try:
            # compare_set keeps the first text: the rank that failed first is the cause, the others fail because of it.
            return "" if self.store is None else self.store.compare_set("failed", "", text).decode()
        except RuntimeError:
            return ""
