"""Signals that end a run: immediately while there is nothing to save, after the current step while it trains.

Imports nothing heavy, so that a signal is heeded from the start of a command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from fzero.core.text_parsing import environment_number

# What torchrun sets for each process: all of it is needed, and these are numbers.
RANK_NUMBERS = (
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
)
TORCHRUN = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
)

IMPORT_S = 0.05  # until a signal in the middle of an import comes again


# No Exception: `except Exception`, of a thread or of somebody else's code, must not take it for a failure.
class Stopped(BaseException):
    """A signal, to this rank or another, has ended the run with nothing to save."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
        self.unfinished = ""  # what is missing of the command's work, if it was not to be stopped before its end


def under_torchrun() -> bool:
    """Whether torchrun (or the like) started this process, by its environment as it is: see `expect_environment`."""
    size = os.environ.get("WORLD_SIZE", "1")
    return "TORCHELASTIC_RUN_ID" in os.environ or (size.isdecimal() and int(size) > 1)


def expect_environment() -> int:
    """WORLD_SIZE, or 1; raises ValueError for variables of torchrun's that are wrong or not all there."""
    size = environment_number("WORLD_SIZE", 1, 1)
    rank = environment_number("RANK", 0)
    for name in RANK_NUMBERS:
        environment_number(name, 0)
    environment_number("MASTER_PORT", 1, 1, 65535)
    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing and under_torchrun():
        variable = next((name for name in ("WORLD_SIZE", "TORCHELASTIC_RUN_ID") if name in os.environ), "WORLD_SIZE")
        raise ValueError(
            f"{variable} is {os.environ.get(variable, '')!r} and {missing[0]} is not set, so torchrun did not start "
            "this process; start it with torchrun --nproc-per-node N -m fzero ..., or unset these variables"
        )
    if rank >= size:
        raise ValueError(
            f"RANK is {rank} and WORLD_SIZE is {os.environ.get('WORLD_SIZE', 'not set')}; torchrun sets both: start "
            "fzero with it, or unset RANK for one process"
        )
    return size


def exit_code(number: int) -> int:
    """The exit code of a run stopped by a signal (0: none): 130 for Ctrl-C, else 0."""
    return 130 if number == signal.SIGINT else 0


def is_importing(frame: FrameType | None) -> bool:
    """Whether a frame is in an import that the command does not run in."""
    while frame is not None and frame.f_globals.get("__name__") != "fzero.cli.start":
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def waits_for_import(number: int, frame: FrameType | None) -> bool:
    """Whether a signal came in the middle of an import; if so it comes again later."""
    if not is_importing(frame):
        return False
    # An exception inside an import is swallowed by some modules (PyTorch's own import of numpy), which then stay half
    # made.
    timer = threading.Timer(IMPORT_S, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()
    return True


def interrupt(number: int, frame: FrameType | None) -> None:
    """The handler of Ctrl-C: Python's own, but for imports."""
    if not waits_for_import(number, frame):
        signal.default_int_handler(number, frame)


@contextlib.contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """A context in which SIGTERM raises Stopped."""

    def handle(number: int, frame: FrameType | None) -> None:
        if not waits_for_import(number, frame):
            raise Stopped(number)

    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except BaseException:
        # torchrun sends SIGTERM when another rank has ended; this one is about to report, or to find, the reason.
        previous = signal.SIG_IGN if under_torchrun() else previous
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def handlers_restored() -> Iterator[None]:
    """A context, or a decorator, that restores the handlers of Ctrl-C, SIGTERM and uncaught errors at its end."""
    main = threading.current_thread() is threading.main_thread()  # signals are the main thread's
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if main}
    report = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = report
        for number, handler in previous.items():
            if handler is not None:  # which is none of Python's
                signal.signal(number, handler)


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list in which Ctrl-C and SIGTERM put their numbers; the second Ctrl-C is a KeyboardInterrupt again."""
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        # The first signal ends the run after its step; a second Ctrl-C must end it at once.
        signal.signal(signal.SIGINT, interrupt)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    except BaseException:
        previous[signal.SIGTERM] = (
            signal.SIG_IGN if under_torchrun() else previous[signal.SIGTERM]
        )  # as in `raise_on_sigterm`
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
