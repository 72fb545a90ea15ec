"""The entry of `fzero` and `python -m fzero`: Ctrl-C while modules are imported is one line, too.

It loads nothing before it has the signal in hand.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def exit_immediately(number: int, frame: FrameType | None) -> NoReturn:
    """The handler of Ctrl-C while a command is imported: an exception would be swallowed or be a traceback."""
    if os.environ.get("RANK", "0") == "0":
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"fzero: interrupted\n")
    os._exit(130)


def open_streams() -> None:
    """Open the standard streams that this process was started without, on nothing."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            stream = open(number, mode, closefd=False)  # noqa: SIM115  # as long as the process
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def begin_imports() -> None:
    """Let Ctrl-C end this process at once and in one line, if it ends it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_immediately)


def end_imports() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on, but in the middle of an import."""
    from fzero.run.setup import signals

    if signal.getsignal(signal.SIGINT) is exit_immediately:
        signal.signal(signal.SIGINT, signals.interrupt)


def start() -> NoReturn:
    """Run the command line and exit."""
    open_streams()
    begin_imports()
    from fzero.cli.main import main

    end_imports()
    try:
        main()
    finally:  # the command has ended, and Python ends: a signal has no line to say any more
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
