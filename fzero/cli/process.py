"""A command as one of the processes that run it: how it speaks, how it joins the others, and how it ends.

Nothing heavy is imported here before it is needed, so that `fzero --help` is quick.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fzero import __version__
from fzero.run.ranks import signals

MISTAKE, INTERRUPTED = 2, 130  # exit codes
KNOWN = (ValueError, FloatingPointError, OSError, MemoryError)  # whose message says enough; RankError, too


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def quiet(line: str) -> None:
    """Print nothing: `say` of a rank that is not the first."""


def versions() -> dict[str, str]:
    """The versions that all ranks must have."""
    import platform

    import torch

    return {"fzero": __version__, "torch": torch.__version__, "python": platform.python_version()}


@contextlib.contextmanager
def coordinated() -> Iterator[Any]:
    """A context of this process's Coordinator (fzero/run/ranks/coordinator.py), in which SIGTERM raises Stopped.

    An exception that ends the context has the coordinator as its attribute, so that `exit_code` tells the other ranks.
    """
    with signals.raise_on_sigterm():
        from fzero.run.ranks.coordinator import join

        coordinator = join()
        try:
            yield coordinator
        except BaseException as error:
            error.coordinator = coordinator  # type: ignore[attr-defined]
            raise


def leave(coordinator: Any, stopped: int) -> int:
    """End a run together with the other ranks; returns the exit code of this process. stopped: the signal that ended the run, or 0."""
    if coordinator.spare:
        from fzero.run.ranks.elastic import stand_by

        stopped = stand_by(coordinator)
    else:
        coordinator.close(stopped)
    code = coordinator.code(stopped)
    if code == 2 and os.environ.get("LOCAL_RANK") == "0":
        print("fzero: stopped with another node; exit code 2, so that torchrun resumes with this one", file=sys.stderr, flush=True)
    return code


def run(command: Callable[[], Any], *, traceback: bool) -> int:
    """Call `command`, and return the exit code of this process: its own, or 2 with one line on stderr for a mistake, or 130 for Ctrl-C.

    traceback: raise the error instead of printing one line. An error that no user can cause is always raised.
    """
    import click

    try:
        code = command()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        return print_error(error.format_message(), error)
    except (KeyboardInterrupt, click.Abort):
        if os.environ.get("RANK", "0") == "0":
            print("fzero: interrupted", file=sys.stderr)
        return INTERRUPTED
    except signals.Stopped as error:
        return end_stopped(error)
    except Exception as error:
        kind = type(error).__name__
        if kind == "Ended":  # another rank has said why
            return MISTAKE
        # torch raises RuntimeError where memory ends.
        out_of_memory = isinstance(error, RuntimeError) and ("allocate" in str(error) or "bad_alloc" in str(error))
        if traceback or not (isinstance(error, KNOWN) or kind == "RankError" or out_of_memory):
            last_words(f"{kind}: {error}", error)  # the traceback is this rank's
            raise
        message = str(error) or kind
        if out_of_memory:
            message = f"out of memory ({error}); a smaller --micro-batch, --seq-len or model needs less"
        return print_error(message, error)


def print_error(message: str, error: Exception) -> int:
    """Print the one line of an error, unless another rank has; returns the exit code."""
    text, code = last_words(" ".join(message.split()), error)
    if text:
        print(f"fzero: error: {text}", file=sys.stderr, flush=True)
    return code


def last_words(text: str, error: Exception) -> tuple[str, int]:
    """See fzero.run.ranks.coordinator.last_words, which is not loaded where torchrun is not used."""
    if not signals.under_torchrun():
        return text, MISTAKE
    from fzero.run.ranks import coordinator

    return coordinator.last_words(text, getattr(error, "coordinator", None), lost=type(error).__name__ == "RankError")


def end_stopped(error: signals.Stopped) -> int:
    """The exit code of a process that a signal ended before there was anything to save; the other ranks end too."""
    coordinator = getattr(error, "coordinator", None)
    if coordinator is None and signals.under_torchrun():
        return 128 + error.number  # torchrun ends the others
    if coordinator is not None:
        coordinator.stop(error.number)
    if coordinator is None or coordinator.first:
        print(f"fzero: {error}; there was nothing to save", file=sys.stderr, flush=True)
    return signals.exit_code(error.number)
