"""The current work of a long command and its duration, on stderr."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

EVERY = 5.0  # seconds between plain lines, where stderr is no terminal
REDRAWN = 0.25  # seconds between two drawings of a terminal's line


class Progress:
    """A context that shows a stage and its seconds on stderr while a command works: on a terminal a line that is
    rewritten and removed at the end, else a plain line every EVERY seconds.

    Call it with the text of the next stage. A command that ends sooner prints nothing to a file.

    >>> with Progress("counting") as show:
    ...     show("adding")
    """

    def __init__(self, stage: str, *, stream: Any = None, clock: Callable[[], float] = time.monotonic):
        self.stage, self.clock = stage, clock
        self.stream = sys.stderr if stream is None else stream
        self.terminal = self.stream.isatty()
        self.begin = clock()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._draw_until_end, daemon=True)

    def __call__(self, stage: str) -> None:
        self.stage = stage

    def __enter__(self) -> Progress:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.ended.set()
        self.thread.join()
        if self.terminal:
            self._write("\r\x1b[K")

    def draw(self) -> None:
        """Show the stage once."""
        line = f"fzero: {self.stage} ({self.clock() - self.begin:.0f} s)"
        self._write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}" if self.terminal else f"{line}\n")

    def _draw_until_end(self) -> None:
        while not self.ended.wait(REDRAWN if self.terminal else EVERY):
            self.draw()

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):  # the reader has gone: the command's own output says so
            self.ended.set()
