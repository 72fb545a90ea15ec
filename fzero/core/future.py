"""A value on its way: a collective, a read of a disk, a copy, or several of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Future(Generic[T]):
    """A value that was asked for; `wait()` returns it once it is there, and may be called once.

    >>> Future(lambda: 3).wait()
    3
    """

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish

    def wait(self) -> T:
        """Wait for the value and return it; raises what `finish` does, such as RankError."""
        assert self._finish is not None, "a value was waited for twice"
        finish, self._finish = self._finish, None
        return finish()


def ready(value: T) -> Future[T]:
    """A Future whose value is there.

    >>> ready(3).wait()
    3
    """
    return Future(lambda: value)
