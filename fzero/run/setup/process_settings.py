"""What a run sets for its whole process, and sets back at its end; how threads without work wait.

OpenMP's idle threads spin for milliseconds before they sleep. Alone that is right (a step takes up to a third longer if
they sleep at once); beside other busy processes they burn the others' time. GCC's OpenMP reads its environment once,
but spins only 100 tries while the process has more OpenMP threads than cores. So `sleep_while_shared` watches how long
threads wait for a core, and meanwhile keeps a second team of threads, which never works.

Ref: libgomp manual, GOMP_SPINCOUNT.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fzero.core import gpu, host_memory
from fzero.run.setup.machine import onednn_switch

# The user's own choice, of GCC's, Intel's and LLVM's OpenMP: then nothing is done.
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
INTERVAL = 0.25  # seconds between two looks
SHARED, OWN = 0.05, 0.02  # cores' worth of waiting: above the first threads sleep, below the second they may spin again
QUIET = 8  # looks in a row below OWN until they spin
NEIGHBOUR = 0.25  # cores that others have: with less, threads wait only for threads of their own process


def core_wait_s() -> float:
    """Seconds that this process' live threads were ready to run and had no core; raises OSError if unknown."""
    total = 0
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            total += int(Path("/proc/self/task", name, "schedstat").read_text().split()[1])
    return total / 1e9


def peer_cpu_s() -> float:
    """CPU seconds of all other processes here; raises OSError if unknown."""
    user, nice, system = (int(ticks) for ticks in Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - time.process_time()


def loaded_openmp() -> str:
    """The path of GCC's OpenMP library in this process, or ""."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith("libgomp"):
            return "/" + path
    return ""


def idle_team(openmp: str, cores: int) -> tuple[threading.Thread, threading.Event]:
    """A thread with a team of more OpenMP threads than cores, all asleep."""
    end, library, libc = threading.Event(), ctypes.CDLL(openmp), ctypes.CDLL(None)

    def hold() -> None:
        nothing = ctypes.cast(libc.free, ctypes.c_void_p)  # free(NULL): a function of the right type that does nothing
        library.GOMP_parallel(nothing, None, ctypes.c_uint(cores + 1), ctypes.c_uint(0))
        end.wait()

    thread = threading.Thread(target=hold, name="fzero-idle-team", daemon=True)
    thread.start()
    return thread, end


def watch(
    stop: threading.Event,
    waited: Callable[[], float],
    peer_cpu: Callable[[], float],
    hold: Callable[[], Callable[[], None]],
) -> None:
    """Call `hold` when threads begin to wait for cores, and what it returned when they cease, until `stop`."""
    release, quiet, previous_wait, previous_peer = None, 0, waited(), peer_cpu()
    while not stop.wait(INTERVAL):
        wait_s, peer_s = waited(), peer_cpu()
        share = (wait_s - previous_wait) / INTERVAL if peer_s - previous_peer > NEIGHBOUR * INTERVAL else 0.0
        previous_wait, previous_peer = wait_s, peer_s
        quiet = quiet + 1 if share < OWN else 0
        if release is None and share > SHARED:
            release = hold()
        elif release is not None and quiet >= QUIET:
            release = release()
    if release is not None:
        release()


@contextlib.contextmanager
def sleep_while_shared() -> Iterator[None]:
    """A context in which OpenMP's idle threads sleep while this process waits for cores."""
    openmp = ""
    if not any(name in os.environ for name in WAIT_VARIABLES):
        with contextlib.suppress(OSError):
            core_wait_s()
            peer_cpu_s()
            openmp = loaded_openmp()
    if not openmp:
        yield
        return

    def hold() -> Callable[[], None]:
        thread, end = idle_team(openmp, os.cpu_count() or 1)

        def release() -> None:
            end.set()
            thread.join()

        return release

    stop = threading.Event()
    watcher = threading.Thread(
        target=watch, args=(stop, core_wait_s, peer_cpu_s, hold), name="fzero-waiting", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


# Each is read once, by gloo, NCCL, CUDA or the profiler, when they begin.
VARIABLES = (
    *gpu.ALLOCATOR_SETTINGS,
    gpu.QUEUES,
    "GLOO_SOCKET_IFNAME",
    "KINETO_LOG_LEVEL",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


@contextlib.contextmanager
def settings_restored() -> Iterator[None]:
    """A context, or a decorator, that restores at its end the settings that a run makes for its process.

    >>> before = torch.get_num_threads()
    >>> with settings_restored():
    ...     torch.set_num_threads(before + 1)
    >>> torch.get_num_threads() == before
    True
    """
    threads, switch = torch.get_num_threads(), onednn_switch()
    products = switch.fp32_precision if switch is not None else ""
    variables = {name: os.environ.get(name) for name in VARIABLES}
    cores = host_memory.cores_allowed()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    device = gpu.current_device()
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if switch is not None and switch.fp32_precision != products:
            switch.fp32_precision = products
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if host_memory.cores_allowed() != cores:
            host_memory.bind_threads(cores)
        if resource.getrlimit(resource.RLIMIT_NOFILE) != files:
            resource.setrlimit(resource.RLIMIT_NOFILE, files)
        gpu.select_device(device)
