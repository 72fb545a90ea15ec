"""Signals that end a run: they end the process at once while there is nothing to save, and are noted while it trains.

Imports nothing heavy, so that a signal is heeded from the start of a command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Stopped(Exception):
    """A signal, to this rank or to another one, has ended the run where there was nothing to save."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def under_torchrun() -> bool:
    """Whether torchrun (or something like it) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1


def exit_code(number: int) -> int:
    """The exit code of a run that a signal stopped (0: none did): as asked, unless it was Ctrl-C."""
    return 130 if number == signal.SIGINT else 0


@contextlib.contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """A context in which SIGTERM raises Stopped."""

    def handle(number: int, frame: Any) -> None:
        raise Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except BaseException:
        # torchrun sends SIGTERM when another rank has ended; this one is about to say, or to find out, why.
        before = signal.SIG_IGN if under_torchrun() else before
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list in which Ctrl-C and SIGTERM put their numbers; the second Ctrl-C is a KeyboardInterrupt again."""
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    except BaseException:
        before[signal.SIGTERM] = signal.SIG_IGN if under_torchrun() else before[signal.SIGTERM]  # as in `ending`
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
