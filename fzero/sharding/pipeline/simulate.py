"""Rows of acts that wait for one another: when each starts and ends, or which ones never do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

A = TypeVar("A", bound=Hashable)


class Simulated(NamedTuple, Generic[A]):
    """The times of the acts that ran, and by row the first act that cannot start with what it waits for."""

    start: dict[A, float]
    end: dict[A, float]
    stuck: dict[int, tuple[A, A]]  # empty if every act ran


def simulate(
    rows: Sequence[Sequence[tuple[A, ...]]],
    needs: Mapping[A, Sequence[A]],
    time: Callable[[tuple[A, ...]], float],
    delay: Callable[[A, A], float],
) -> Simulated[A]:
    """Run each row in its order, an act as soon as its row is free and the acts that it needs have ended.

    rows: what each row runs, in groups of acts that start and end together (most of one act).
    needs: by act, the acts that must have ended before; those of its own group are not waited for.
    time: the seconds of a group. delay: the seconds from the end of an act until another one has its result.
    """
    start: dict[A, float] = {}
    end: dict[A, float] = {}
    waiting: dict[A, list[int]] = {}
    stuck: dict[int, tuple[A, A]] = {}
    free, at, ready = [0.0] * len(rows), [0] * len(rows), list(range(len(rows)))
    while ready:
        row = ready.pop()
        stuck.pop(row, None)
        while at[row] < len(rows[row]):
            group = rows[row][at[row]]
            wanted = [(act, need) for act in group for need in needs[act] if need not in group]
            missing = next((pair for pair in wanted if pair[1] not in end), None)
            if missing is not None:
                waiting.setdefault(missing[1], []).append(row)
                stuck[row] = missing
                break
            begin = max((free[row], *(end[need] + delay(need, act) for act, need in wanted)))
            free[row] = begin + time(group)
            at[row] += 1
            for act in group:
                start[act], end[act] = begin, free[row]
                ready += waiting.pop(act, ())
    return Simulated(start, end, stuck)
