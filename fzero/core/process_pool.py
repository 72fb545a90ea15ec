"""Processes that share the work of this one, of which Ctrl-C reaches this one alone; it ends the others at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any


@contextlib.contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """A context in which processes are started that never get SIGINT; this one gets it at the end."""
    # Before a context in which processes are spawned, call `begin_spawning`.
    # A process inherits the mask of its parent, and blocked signals stay pending: Ctrl-C reaches this process at the
    # end.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def begin_spawning() -> None:
    """Start the process that spawned ones need, which takes the block of SIGINT away as it starts."""
    resource_tracker.ensure_running()


class Pool(ProcessPoolExecutor):
    """An executor of new processes for a with statement, which an error or Ctrl-C in it ends at once.

    >>> with Pool(1) as pool:
    ...     pool.submit(abs, -3).result()
    3
    """

    def __init__(
        self, workers: int | None = None, start: str = "spawn", begin: Callable[..., None] | None = None, *args: Any
    ) -> None:
        super().__init__(workers, multiprocessing.get_context(start), begin, args)
        if start == "spawn":
            begin_spawning()
        self.started: set[BaseProcess] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """As of any executor; the first call starts the processes."""
        # The executor keeps its processes to itself, so that those that `submit` starts are found by comparison.
        children = set(multiprocessing.active_children())
        with deaf_to_interrupts():
            future = super().submit(fn, *args, **kwargs)
            self.started |= set(multiprocessing.active_children()) - children
        return future

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool | None:
        if kind is not None:
            for process in self.started:
                # SIGKILL, as a forked worker has inherited the handlers of this process.
                process.kill()
        # Also the executor's thread is waited for: at the interpreter's end it may close a pipe that is written to.
        self.shutdown(wait=True, cancel_futures=kind is not None)
        return None
