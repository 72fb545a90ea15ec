"""Run a command as one of several processes: its output, how it joins the others, and how it ends.

Heavy modules are imported only when needed, so that `fzero --help` is quick.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TextIO

from fzero import __version__
from fzero.core import packages
from fzero.core.torch_private import without_collection
from fzero.run.setup import signals

EVERY = 5.0  # seconds between plain lines, where stderr is no terminal
REDRAWN = 0.25  # seconds between two drawings of a terminal's line


class Progress:
    """A context that shows a stage and its seconds on stderr while a command works; call it with the next stage.

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


FAULT, MISTAKE, INTERRUPTED = 1, 2, 130  # exit codes
LOST = ("DistNetworkError", "DistStoreError", "DistBackendError", "DistError")  # of torch.distributed
KNOWN = (ValueError, FloatingPointError, OSError, MemoryError)  # errors whose message suffices; RankError, too


def say(line: str) -> None:
    """Print a line and flush."""
    print(line, flush=True)


def without_reader(show: Callable[[str], None]) -> Callable[[str], None]:
    """The function that prints a line, for a run, which goes on where the reader of its output has ended."""

    def show_line(line: str) -> None:
        try:
            show(line)
        except BrokenPipeError:
            drop(sys.stdout)
            try:
                print("fzero: nobody reads the standard output any more; the run goes on", file=sys.stderr, flush=True)
            except OSError:  # the same pipe
                drop(sys.stderr)

    return show_line


def progress(line: str) -> None:
    """Print a line on stderr, if that is a terminal."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def quiet(line: str) -> None:
    """Print nothing: `say` for ranks other than the first."""


def escape_output() -> None:
    """Let the standard streams write a character that their encoding lacks as an escape."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a stream of another kind, or a closed one
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]


def expect_text(args: Sequence[str]) -> None:
    """Raise ValueError for an argument that is not text: files that record it could not be read again."""
    for number, word in enumerate(args, 1):
        try:
            word.encode()
        except UnicodeEncodeError:
            utf8 = sys.getfilesystemencoding() == "utf-8"
            fix = (
                "give it, or rename the file, in UTF-8"
                if utf8
                else f"this locale has {sys.getfilesystemencoding()}: set PYTHONUTF8=1 or LC_ALL=C.UTF-8"
            )
            raise ValueError(f"argument {number}, {ascii(word)[:200]}, is not UTF-8 text; {fix}") from None


def versions() -> dict[str, str]:
    """The versions that must be equal on all ranks."""
    import platform

    import torch

    return {"fzero": __version__, "torch": torch.__version__, "python": platform.python_version()}


@contextlib.contextmanager
def coordinated(hang_s: float | None = None) -> Iterator[Any]:
    """A context of this process's Coordinator, in which SIGTERM raises Stopped."""
    with signals.raise_on_sigterm():
        with without_collection():
            # Before this process joins, as it gives no sign of life while it imports.
            from fzero.run.setup import run_lock
            from fzero.run.setup.coordinator import TIMEOUT_S, join
            from fzero.run.setup.process_settings import settings_restored

        coordinator = join(hang_s=TIMEOUT_S if hang_s is None else hang_s)
        try:
            with settings_restored():
                yield coordinator
        except BaseException as error:
            error.coordinator = coordinator  # type: ignore[attr-defined]
            raise
        finally:
            run_lock.release_all()


def end_run(coordinator: Any, stopped: int) -> int:
    """End a run together with the other ranks; return the exit code."""
    if coordinator.spare:
        from fzero.run.setup import stand_by

        stopped = stand_by(coordinator)
    else:
        coordinator.close(stopped)
    code = coordinator.code(stopped)
    if code == 2 and os.environ.get("LOCAL_RANK") == "0":
        print(
            "fzero: stopped with another node; exit code 2, so that torchrun resumes with this one",
            file=sys.stderr,
            flush=True,
        )
    return code


def run(command: Callable[[], Any], *, traceback: bool) -> int:
    """Call `command` and return the exit code: its own; 2 with one line on stderr for a mistake; 1 with one line that
    names a file with the traceback for any other error; 130 for Ctrl-C.

    traceback: raise the error instead of printing one line.
    """
    import click

    try:
        code = command()
        sys.stdout.flush()  # a full disk or a closed pipe is noticed here, not when Python ends
        return code if isinstance(code, int) else 0
    except SystemExit:
        raise
    except click.exceptions.NoArgsIsHelpError as error:  # a group without a command
        print(error.format_message(), file=sys.stderr)
        return MISTAKE
    except click.ClickException as error:
        return print_error(error.format_message(), error)
    except (KeyboardInterrupt, click.Abort) as error:
        if os.environ.get("RANK", "0") == "0":
            print(": ".join(filter(None, ("fzero: interrupted", str(error)))), file=sys.stderr)
        return INTERRUPTED
    except signals.Stopped as error:
        return end_stopped(error)
    except BaseException as error:  # also those of extensions, which are no Exception
        if traceback and type(error).__name__ != "Ended":
            last_words(f"{type(error).__name__}: {error}", error)  # this rank prints the traceback
            raise
        return end_failed(error)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings for users are lines of their text within."""
    whole = warnings.formatwarning

    def line_of(message: Any, category: Any, *location: Any, **source: Any) -> str:
        return f"{message}\n" if category is UserWarning else whole(message, category, *location, **source)

    warnings.formatwarning = line_of
    try:
        yield
    finally:
        warnings.formatwarning = whole


def end_failed(error: BaseException) -> int:
    """Print the line of an error that ended a command, and return the exit code."""
    kind = type(error).__name__
    if kind == "Ended":  # another rank has printed the reason
        return MISTAKE
    if isinstance(error, OSError) and not _stdout_works():
        if isinstance(error, BrokenPipeError):  # the reader, such as head, has enough
            return FAULT
        return print_error(f"cannot write to the standard output: {error.strerror or error}", error)
    if kind in LOST:
        reason = str(error).partition("\n")[0]
        return print_error(f"torchrun, or the rank that keeps its store, has ended ({reason}); start again", error)
    # torch raises RuntimeError if it runs out of memory.
    if isinstance(error, RuntimeError) and ("allocate" in str(error) or "bad_alloc" in str(error)):
        return print_error(f"out of memory ({error}); use a smaller --micro-batch, --seq-len or model", error)
    if isinstance(error, ModuleNotFoundError) and (package := packages.missing_package(error)):
        return print_error(packages.explain(package, "this command"), error)
    if isinstance(error, KNOWN) or kind == "RankError":
        return print_error(str(error) or kind, error)
    path = write_traceback(error)
    trace_hint = f"the traceback is in {path}" if path else "FZERO_TRACEBACK=1 shows the traceback"
    code = print_error(f"{escape_line(f'{kind}: {error}', 500)}; this is a fault of fzero: {trace_hint}", error)
    return FAULT if code == MISTAKE else code


def _stdout_works() -> bool:
    """Whether the standard output can be written; if not, its buffer is dropped, as Python would complain."""
    try:
        sys.stdout.flush()
        if _has_reader(sys.stdout):
            return True
        raise BrokenPipeError
    except (OSError, ValueError):
        drop(sys.stdout)
        return False


def _has_reader(stream: TextIO) -> bool:
    """False for a pipe whose reader has ended, of which a flush knows nothing after a write that failed."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
    except io.UnsupportedOperation:  # a stream of Python's own
        return True
    return not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def drop(stream: TextIO) -> None:
    """Let what is printed to a standard stream from now on go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write_traceback(error: BaseException) -> str:
    """The path of a new file with the traceback of an error, "" if it cannot be written."""
    import tempfile
    import traceback

    from fzero.core.files import naming

    try:
        fd, path = tempfile.mkstemp(prefix="fzero-traceback-", suffix=".txt")
        with naming(path), open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"fzero {__version__}, Python {sys.version}\n{sys.argv}\n\n")
            file.writelines(traceback.format_exception(error))
        return path
    except OSError:
        return ""


def escape_line(text: str, max_chars: int = 4000) -> str:
    """A text as one line that any terminal shows, with escapes."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))
    return line if len(line) <= max_chars else f"{line[: max_chars - 3]}..."


def print_error(message: str, error: BaseException) -> int:
    """Print an error as one line, unless another rank has; return the exit code."""
    text, code = last_words(escape_line(message), error)
    if text:
        print(f"fzero: error: {text}", file=sys.stderr, flush=True)
    return code


def last_words(text: str, error: BaseException) -> tuple[str, int]:
    """Call fzero.run.setup.coordinator.last_words, which is imported only under torchrun."""
    if not signals.under_torchrun():
        return text, MISTAKE
    from fzero.run.setup import coordinator

    return coordinator.last_words(text, getattr(error, "coordinator", None), lost=type(error).__name__ == "RankError")


def end_stopped(error: signals.Stopped) -> int:
    """The exit code of a process stopped before there was anything to save; stops the other ranks."""
    coordinator = getattr(error, "coordinator", None)
    if coordinator is None and signals.under_torchrun():
        return 128 + error.number  # torchrun ends the others
    if coordinator is not None:
        coordinator.stop(error.number)
    if coordinator is None or coordinator.first:
        text = f": {error.unfinished}" if error.unfinished else "; there was nothing to save"
        print(f"fzero: {error}{text}", file=sys.stderr, flush=True)
    return 128 + error.number if error.unfinished else signals.exit_code(error.number)
