"""How a corpus is prepared: by how many processes, and which documents are left out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

Show = Callable[[str, int, int], None]


class Preparing(NamedTuple):
    """How `prepare` works. The corpus does not depend on `workers` and `show`."""

    workers: int = 0  # processes; 0: one for each core
    show: Show | None = None  # called with what is done now, the bytes of the sources for which it is, and all of them

    def tell(self, stage: str, done: int, of: int) -> None:
        """Show what is done."""
        if self.show is not None:
            self.show(stage, done, of)

    def processes(self) -> int:
        """The number of processes; raises ValueError for a negative one."""
        if self.workers < 0:
            raise ValueError(f"workers={self.workers}: wanted a number of processes, or 0 for one for each core")
        return self.workers or len(os.sched_getaffinity(0))


PREPARING = Preparing()
