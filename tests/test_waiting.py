"""OpenMP's threads sleep while the process shares its cores, and spin else: fzero/run/setup/process_settings.py."""

import itertools
import os
import threading
import time

import pytest
import torch

from fzero.run.setup import process_settings


@pytest.fixture
def openmp():
    try:
        process_settings.core_wait_s()
        process_settings.peer_cpu_s()
        path = process_settings.loaded_openmp()
    except OSError:
        path = ""
    return path or pytest.skip("the system does not tell how long threads wait, or torch brings another OpenMP")


def watched(waits: list[float], others: float) -> list[str]:
    """What `watch` does when its looks find these cores' worth of waiting, one after the other, and as many cores with
    other processes."""
    stop, total, done = threading.Event(), iter([0.0, *waits]), []
    seconds, looks = 0.0, itertools.count()

    def waited() -> float:
        nonlocal seconds
        share = next(total, None)
        if share is None:
            stop.set()
            share = 0.0
        seconds += share * process_settings.INTERVAL
        return seconds

    def hold():
        done.append("sleep")
        return lambda: done.append("spin")

    process_settings.watch(stop, waited, lambda: next(looks) * others * process_settings.INTERVAL, hold)
    return done


@pytest.mark.parametrize(
    ("waits", "done"),
    [
        ([0.0] * 4, []),
        ([0.03] * 4, []),  # some waiting is no neighbour
        ([0.5, 0.5], ["sleep", "spin"]),  # at the end of the run, too
        ([0.5, *[0.0] * process_settings.QUIET, 0.0], ["sleep", "spin"]),
        ([0.5, *[0.0] * process_settings.QUIET, 0.0, 0.5], ["sleep", "spin", "sleep", "spin"]),
        ([0.5, *[0.0, 0.0, 0.03] * process_settings.QUIET], ["sleep", "spin"]),  # not before the end
    ],
)
def test_threads_sleep_from_the_first_wait_until_some_time_after_the_last(monkeypatch, waits, done):
    monkeypatch.setattr(process_settings, "INTERVAL", 0.001)
    assert watched(waits, others=0.5) == done
    assert watched(waits, others=0.1) == []  # threads of one process wait for each other


def spinning_s(x: torch.Tensor) -> float:
    """CPU seconds of this process for 20 short parallel operations with pauses between them."""
    begin = time.process_time()
    for _ in range(20):
        x.add_(1)
        time.sleep(0.005)
    return time.process_time() - begin


def test_an_idle_team_puts_openmps_idle_threads_to_sleep(openmp):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.ones(1 << 17)
        spinning = min(spinning_s(x) for _ in range(2))
        thread, end = process_settings.idle_team(openmp, os.cpu_count())
        time.sleep(0.05)
        asleep = min(spinning_s(x) for _ in range(3))
        end.set()
        thread.join()
        again = max(spinning_s(x) for _ in range(2))
    finally:
        torch.set_num_threads(threads)
    if os.environ.get("OMP_WAIT_POLICY") or os.environ.get("GOMP_SPINCOUNT"):
        assert asleep < 0.05
    else:
        assert asleep < spinning / 3 and asleep < again / 3, (spinning, asleep, again)


@pytest.mark.parametrize("name", process_settings.WAIT_VARIABLES)
def test_nothing_is_done_if_the_user_has_chosen(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with process_settings.sleep_while_shared():
        assert "fzero-waiting" not in {thread.name for thread in threading.enumerate()}


def test_a_run_is_watched_and_the_threads_end_with_it(openmp, monkeypatch):
    for name in process_settings.WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process_settings, "INTERVAL", 0.001)
    monkeypatch.setattr(process_settings, "SHARED", -1.0)  # every process seems to wait
    monkeypatch.setattr(process_settings, "NEIGHBOUR", -1e9)  # and to have neighbours
    before = threading.active_count()
    with process_settings.sleep_while_shared():
        names = set()
        for _ in range(2000):
            names |= {thread.name for thread in threading.enumerate()}
            if "fzero-idle-team" in names:
                break
            time.sleep(0.005)
    assert {"fzero-waiting", "fzero-idle-team"} <= names
    assert threading.active_count() == before
