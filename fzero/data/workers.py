"""Work on many cores: the results of a function of the numbers 0, 1, ..., each computed by one of several processes.

The processes are forked: they have what the function refers to, whatever it is, and share its memory. They end with
the process that started them, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

from fzero.core.packages import without_collection
from fzero.core.process_pool import deaf_to_interrupts

R = TypeVar("R")
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
SERIAL = "TOKENIZERS_PARALLELISM"  # the threads of the tokenizers library, which a forked process does not have


def results_of(work: Callable[[int], R], numbers: Sequence[int], workers: int) -> Generator[tuple[int, R], None, None]:
    """Yield (number, work(number)) of all numbers, as they are done, computed by so many processes; in this process if
    one is enough.

    The numbers are begun in their order. If some raise an error, that of the first one is raised, as with one process.
    Raises OSError if a process is killed.

    >>> sorted(results_of(lambda n: n * n, range(4), workers=2))
    [(0, 0), (1, 1), (2, 4), (3, 9)]
    """
    workers = min(workers, len(numbers))
    with _serial_tokenizers():
        if workers <= 1:
            for number in numbers:
                yield number, work(number)
            return
        with _processes(work, workers) as started:
            yield from _dealt(started, numbers)


def run_in_process(work: Callable[[], R]) -> R:
    """work(), computed in a process of its own, whose memory and threads are gone when it is done."""
    with _processes(lambda _: work(), 1) as started:
        return next(_dealt(started, [0]))[1]


def _dealt(started: list[tuple[Any, Any]], numbers: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """The results of all numbers, each given to the next process that is free."""
    free, remaining = [connection for _, connection in started], iter(numbers)
    busy: dict[Any, int] = {}
    failed: dict[int, BaseException] = {}
    while True:
        while free and not failed and (number := next(remaining, None)) is not None:
            connection = free.pop()
            connection.send(number)
            busy[connection] = number
        if failed and not any(number < min(failed) for number in busy.values()):
            raise failed[min(failed)]
        if not busy:
            return
        ready: list[Any] = multiprocessing.connection.wait(list(busy))
        for connection in ready:
            number = busy.pop(connection)
            try:
                result, error = connection.recv()
            except (EOFError, ConnectionError):
                raise OSError(_ended(started, connection)) from None
            free.append(connection)
            if error is not None:
                failed[number] = error
            else:
                yield number, result


def _ended(started: list[tuple[Any, Any]], connection: Any) -> str:
    (process,) = (process for process, pipe in started if pipe is connection)
    process.join()
    outcome = f"by signal {-process.exitcode}" if process.exitcode < 0 else f"with exit code {process.exitcode}"
    return (
        f"a process that prepares ended {outcome}; if memory was short, use fewer (workers= of Preparing, "
        f"--workers); the same command goes on "
        "from what is done"
    )


@contextlib.contextmanager
def _processes(work: Callable[[int], Any], workers: int) -> Iterator[list[tuple[Any, Any]]]:
    """A context of processes that wait for numbers, each with its connection; they are killed at its end."""
    context = multiprocessing.get_context("fork")
    started: list[tuple[Any, Any]] = []
    sys.stdout.flush()  # what waits there is written once
    sys.stderr.flush()
    try:
        for _ in range(workers):
            parent_end, child_end = context.Pipe()
            open_pipes = [parent_end, *(connection for _, connection in started)]
            process = context.Process(target=_serve, args=(work, child_end, open_pipes, os.getpid()), daemon=True)
            with without_collection(), deaf_to_interrupts(), warnings.catch_warnings():
                # Python 3.12 and JAX warn of locks that other threads may hold; what reads and encodes text takes none
                # of theirs, nor of torch's and of loggers.
                warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
                warnings.filterwarnings("ignore", r".*os\.fork\(\) is incompatible with multithreaded", RuntimeWarning)
                process.start()
            child_end.close()
            started.append((process, parent_end))
        yield started
    finally:
        for process, connection in started:
            connection.close()
            process.kill()  # what it is in the middle of is not needed, or is done anew
            process.join()
            process.close()


def _serve(work: Callable[[int], Any], connection: Any, open_pipes: list[Any], parent: int) -> None:
    """Answer numbers with (result, error), until there are no more."""
    gc.freeze()  # garbage of the parent is not ended here: that may take threads, which a forked process does not have
    gc.enable()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        return
    for pipe in open_pipes:
        pipe.close()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            number = connection.recv()
            try:
                answer = work(number), None
            except BaseException as error:
                answer = None, _portable(error)
            connection.send(answer)


def _portable(error: BaseException) -> BaseException:
    """The error, or one of its words if it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def _serial_tokenizers() -> Iterator[None]:
    """A context in which the tokenizers library uses no threads of its own, in forked processes too."""
    previous = os.environ.get(SERIAL)
    os.environ[SERIAL] = "false"
    try:
        yield
    finally:
        if previous is None:
            os.environ.pop(SERIAL, None)
        else:
            os.environ[SERIAL] = previous
