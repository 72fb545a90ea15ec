"""Work on many cores: the results of a function of the numbers 0, 1, ..., each computed by one of several processes.

The processes are forked: they have what the function refers to, and end with the process that started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from fzero import core
from fzero.core.torch_private import without_collection

R = TypeVar("R")
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
SERIAL = "TOKENIZERS_PARALLELISM"  # the threads of the tokenizers library, which a forked process does not have
WORK: list[Callable[[int], Any]] = []  # of a forked process


def results_of(work: Callable[[int], R], numbers: Sequence[int], workers: int) -> Generator[tuple[int, R], None, None]:
    """Yield (number, work(number)) of all numbers, as they are done; raises the first number's error.

    >>> sorted(results_of(lambda n: n * n, range(4), workers=2))
    [(0, 0), (1, 1), (2, 4), (3, 9)]
    """
    workers = min(workers, len(numbers))
    with _serial_tokenizers():
        if workers <= 1:
            for number in numbers:
                yield number, work(number)
        else:
            yield from _forked_results(work, numbers, workers)


def run_in_process(work: Callable[[], R]) -> R:
    """work(), computed in a process of its own, whose memory and threads are gone when it is done."""
    return next(_forked_results(lambda _: work(), [0], 1))[1]


def _forked_results(work: Callable[[int], R], numbers: Sequence[int], workers: int) -> Iterator[tuple[int, R]]:
    """The results of all numbers, each given to the next process that is free."""
    sys.stdout.flush()  # what waits there is written once
    sys.stderr.flush()
    with core.host_memory.Pool(workers, "fork", _begin, work, os.getpid()) as pool:
        with without_collection(), warnings.catch_warnings():
            # Python 3.12 and JAX warn of locks that other threads may hold; what reads and encodes text takes none
            # of theirs, nor of torch's and of loggers.
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
            warnings.filterwarnings("ignore", r".*os\.fork\(\) is incompatible with multithreaded", RuntimeWarning)
            try:
                futures = {pool.submit(_serve, number): number for number in numbers}
            except BrokenProcessPool:  # one ended while numbers were still being given
                raise OSError(_ended(pool)) from None
        order: list[Future[R]] = list(futures)
        for future in as_completed(order):
            if future.cancelled():
                continue
            if isinstance(future.exception(), BrokenProcessPool):
                raise OSError(_ended(pool)) from None
            if future.exception() is None:
                yield futures[future], future.result()
            else:  # those before it may raise too
                for later in order[order.index(future) + 1 :]:
                    later.cancel()
        for future in order:
            if not future.cancelled() and (error := future.exception()) is not None:
                raise error


def _ended(pool: core.host_memory.Pool) -> str:
    """How a process ended; those beside it are then terminated."""
    pool.shutdown()  # until all have ended: before, another thread may be about to learn the exit code
    codes = [process.exitcode for process in pool.started]
    code = next((code for code in codes if code not in (None, 0, -signal.SIGTERM)), -signal.SIGTERM)
    return (
        f"a process that prepares ended {f'by signal {-code}' if code < 0 else f'with exit code {code}'}; if memory "
        "was short, use fewer (workers= of Preparing, --workers); the same command goes on from what is done"
    )


def _begin(work: Callable[[int], Any], parent: int) -> None:
    """Make a forked process ready for numbers."""
    gc.freeze()  # garbage of the parent is not ended here: that may take threads, which a forked process does not have
    gc.enable()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    WORK[:] = [work]


def _serve(number: int) -> Any:
    """The result of a number; an error that cannot be sent becomes one of its words."""
    try:
        return WORK[0](number)
    except BaseException as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        raise


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
