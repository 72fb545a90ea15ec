"""Pools of processes under Ctrl-C: one line at most, and an end at once, whatever their processes are doing."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, threading, time

def tell(what):
    deaf = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    os.write(1, b"%b\\n" % (what if deaf else b"hears Ctrl-C"))

if __name__ == "__mp_main__":
    tell(b"imports")
    time.sleep({imports})
from fzero.core.process_pool import Pool

def work(number):
    tell(b"works")
    time.sleep(60)

if __name__ == "__main__":
    try:
        if sys.argv[1] == "fork":
            from fzero.data.document_scan import results_of
            list(results_of(work, range(4), 2))
        with Pool(2) as pool:
            [each.result() for each in [pool.submit(work, n) for n in range(4)]]
    except KeyboardInterrupt:
        print("interrupted", *[thread.name for thread in threading.enumerate()[1:]], flush=True)
"""


@contextlib.contextmanager
def started(*command, **more):
    """A context of Python in a session of its own, which is killed at its end."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, *command], **how, **more) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def end_of(process, to):
    """(stdout, stderr, exit code, seconds) of what is interrupted: to the end of all that write there."""
    begin = time.monotonic()
    (os.killpg if to == "all" else os.kill)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=40)
    return out, err, process.returncode, time.monotonic() - begin


@pytest.mark.parametrize("to", ["all", pytest.param("one", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "when"),
    [("spawn", "imports"), pytest.param("spawn", "works", marks=pytest.mark.exhaustive), ("fork", "works")],
)
def test_an_interrupt_ends_a_pool_at_once_and_in_silence(tmp_path, kind, when, to):
    (tmp_path / "script.py").write_text(SCRIPT.format(imports=60 if when == "imports" else 0))
    with started(tmp_path / "script.py", kind) as process:
        lines = iter(process.stdout.readline, "")
        told = list(itertools.islice(lines, 4 if (kind, when) == ("spawn", "works") else 2))
        assert told.count(f"{when}\n") == 2, told
        *found, seconds = end_of(process, to)
    assert found == ["interrupted\n", "", 0] and seconds < 15


@pytest.mark.slow
@pytest.mark.parametrize("to", ["all", pytest.param("one", marks=pytest.mark.exhaustive)])
def test_an_interrupt_ends_a_search_at_once(tmp_path, to):
    command = ["-m", "fzero", "plan", "--model", "llama-8b", "--search", "--world-size", "8", "--gpu", "h100"]
    with started(*command, cwd=tmp_path) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(children.read_text().split()) < 3:  # two workers, and one that counts their semaphores
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(1.0)
        _, err, code, seconds = end_of(process, to)
    assert (err.strip(), code) == ("fzero: interrupted", 130) and seconds < 15
