"""When each act of a rank's row of a schedule began and ended, in the clock of its ledger's owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ActTimes:
    """The moments of the acts of one row, while it is `Ledger.acts`.

    An act begins when the message that it takes is there, and ends when the next one is looked at: waiting for a
    message is in no act.

    >>> times = ActTimes(iter([1.0, 2.0, 3.0, 4.0]).__next__)
    >>> times.next(), times.taken(), times.next()  # an act that waits for a message, and its end
    (None, None, None)
    >>> times.begins, times.ends
    ([2.0], [3.0])
    """

    def __init__(self, now: Callable[[], Any]) -> None:
        self.now = now
        self.moments: list[Any] = []  # at each act, and behind the last one
        self.arrivals: dict[int, Any] = {}  # by act, when its message was there

    def next(self) -> None:
        """The act before has ended; another one begins, if there is one."""
        self.moments.append(self.now())

    def taken(self) -> None:
        """The message that the act under way needs is there."""
        self.arrivals[len(self.moments) - 1] = self.now()

    @property
    def begins(self) -> list[Any]:
        """When each act began."""
        return [self.arrivals.get(i, moment) for i, moment in enumerate(self.moments[:-1])]

    @property
    def ends(self) -> list[Any]:
        """When each act ended."""
        return self.moments[1:]
