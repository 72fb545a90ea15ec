"""How a corpus is prepared: by how many processes, and which documents are left out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fzero.core.numa_binding import cores
from fzero.data.sources import expect_text

Show = Callable[[str, int, int], None]
Filter = Callable[[str], bool | str | None]
DUPLICATES = ("keep", "exact")


class Preparing(NamedTuple):
    """How `prepare` works, and which documents it leaves out. The corpus does not depend on `workers` and `show`."""

    workers: int = 0  # processes; 0: one for each core
    show: Show | None = None  # called with what is done now, the bytes of the sources for which it is, and all of them
    # Functions of a text, in their order: False or None leaves a document out, a text takes its place.
    filters: Sequence[Filter] = ()
    duplicates: str = "keep"  # "exact": of documents with the same text the first in reading order alone is kept

    def report_progress(self, stage: str, done: int, total: int) -> None:
        """Show what is done."""
        if self.show is not None:
            self.show(stage, done, total)

    def processes(self) -> int:
        """The number of processes: one where forks of a process with threads are not sound (macOS)."""
        return self.workers or (cores() if sys.platform == "linux" else 1)

    def expect_sound(self) -> None:
        """Raise ValueError for what `prepare` cannot do."""
        if self.workers < 0:
            raise ValueError(f"workers={self.workers}: wanted a number of processes, or 0 for one for each core")
        if self.duplicates not in DUPLICATES:
            raise ValueError(f"duplicates={self.duplicates!r}: it must be one of {', '.join(DUPLICATES)}")
        names = list(map(name_of, self.filters))
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"filters: two are called {twice[0]!r}; give each its own name, by which it counts")

    def settings(self) -> dict[str, Any]:
        """What the corpus depends on, for its meta.json: nothing if all documents are kept."""
        entries: dict[str, Any] = {"filters": list(map(name_of, self.filters))} if self.filters else {}
        if self.duplicates != "keep":
            entries["duplicates"] = self.duplicates
        return entries


def name_of(function: Filter) -> str:
    """The name of a filter, by which the documents are counted that it leaves out."""
    return f"filter {getattr(function, '__name__', type(function).__name__)}"


def apply_filters(text: str, filters: Sequence[Filter], origin: Callable[[], str]) -> tuple[str, str]:
    """(what filters make of a text, the name of the one that leaves it out or "").

    Raises ValueError naming filter and document if one raises an error, or returns anything else.

    >>> apply_filters("a text", [str.upper, lambda text: len(text) > 3], lambda: "a.txt")
    ('A TEXT', '')
    """
    for function in filters:
        try:
            answer = function(text)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{origin()}: {name_of(function)} raised {reason}") from error
        if answer is None or answer is False or answer == "":
            return text, name_of(function)
        if isinstance(answer, str):
            try:
                expect_text(answer, "", name_of(function))
            except ValueError:  # once more, with its place, for which lines are counted
                expect_text(answer, origin(), name_of(function))
            text = answer
        elif answer is not True:
            raise ValueError(f"{origin()}: {name_of(function)} returned {answer!r}; wanted a bool, a text or None")
    return text, ""


PREPARING = Preparing()
