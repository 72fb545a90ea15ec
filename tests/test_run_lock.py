"""A folder that a run writes has one owner at a time: a second start is one line and changes nothing, and a dead
owner's lock is taken over."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launched import TINY, ended, started, steps_of, torchrun, write_text

from fzero.run import config_table, run_folder, run_lock

# A process that takes the lock of argv[1], says so, and does what argv[2] says.
OWNER = """
import sys, time
from pathlib import Path
from fzero.run.setup import run_lock
run_lock.BEAT_S = float(sys.argv[3])
try:
    print("taken", run_lock.acquire(Path(sys.argv[1]), lambda line: None), flush=True)
except run_lock.Owned as error:
    print("refused", error, flush=True)
    sys.exit(3)
if sys.argv[2] == "wait":
    time.sleep(60)
elif sys.argv[2] == "release":
    run_lock.release_all()
"""


@contextlib.contextmanager
def owner(folder, then="wait", beat=5.0):
    """A process that owns `folder`."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), then, str(beat)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout.readline().startswith("taken")
            yield process
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def released():
    yield
    run_lock.release_all()


@pytest.fixture
def soon(monkeypatch):
    """An owner on another host is silent after a fifth of a second."""
    monkeypatch.setattr(run_lock, "SILENT_S", 0.2)
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)


def write_lock(folder, **changes):
    """The lock of this process's parent with changes of what it says."""
    folder.mkdir(exist_ok=True)
    path, pid = folder / run_lock.LOCK, os.getppid()
    path.write_text(json.dumps({**run_lock.identity(), "pid": pid, "started": run_lock.started(pid), **changes}))
    return path


def ended_pid():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


# ---- who owns it ----

DEAD = {
    "of a process that has ended": lambda: {"pid": ended_pid()},
    "of a pid that is another process now": lambda: {"started": "1"},
    "of a pid that cannot be": lambda: {"pid": 2**40},
}
GARBAGE = ("", "{", '{"pid": 1}', "[]", "null", "\x00" * 300, "[" * 100_000, '{"host": 1, "pid": "a"}')


@pytest.mark.parametrize("what", DEAD)
def test_the_lock_of_a_dead_owner_of_this_host_is_taken_at_once(what, tmp_path):
    write_lock(tmp_path, **DEAD[what]())
    assert run_lock.acquire(tmp_path) is True
    assert run_lock.parse((tmp_path / run_lock.LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
def test_a_lock_that_a_kill_cut_short_owns_nothing(text, tmp_path):
    (tmp_path / run_lock.LOCK).write_text(text)
    run_lock.acquire(tmp_path)
    assert run_lock.parse((tmp_path / run_lock.LOCK).read_text())["pid"] == os.getpid()


def test_a_living_owner_of_this_host_is_named_however_long_it_was_silent(tmp_path):
    with owner(tmp_path, beat=60) as process:
        os.utime(tmp_path / run_lock.LOCK, (0, 0))
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(run_lock.Owned) as error:
            run_lock.acquire(tmp_path)
        text = str(error.value)
        assert f"process {process.pid} on" in text and f"kill {process.pid}" in text and "\n" not in text
        process.kill()
        process.wait()
        run_lock.acquire(tmp_path)


def test_a_zombie_is_dead(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), "end", "5"], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "taken True\n"
        end = time.monotonic() + 20
        while run_lock.started(process.pid) and time.monotonic() < end:
            time.sleep(0.01)  # it has ended, and nobody has waited for it
        run_lock.acquire(tmp_path)


@pytest.mark.parametrize("other", ["host", "boot", "pids"])
def test_an_owner_elsewhere_counts_as_dead_once_it_is_silent(other, tmp_path, soon):
    path = write_lock(tmp_path, **{other: "another"})  # its pid says nothing here
    said, begin = [], time.monotonic()
    run_lock.acquire(tmp_path, said.append)
    assert time.monotonic() - begin > 0.2 and "looking for its heartbeat" in said[0]
    run_lock.release_all()
    os.utime(write_lock(tmp_path, **{other: "another"}), (0, 0))
    begin = time.monotonic()
    run_lock.acquire(tmp_path, said.append)
    assert time.monotonic() - begin < 0.2 and len(said) == 1 and path.exists()


@pytest.mark.parametrize("clock", [0, -3600, 3600])
def test_an_owner_elsewhere_that_beats_is_named_whatever_its_clock_says(clock, tmp_path, soon, monkeypatch):
    path = write_lock(tmp_path, host="node7")
    monkeypatch.setattr(run_lock, "_is_silent", lambda *given: False)  # which looks at the time of the file
    beats = iter(range(100))
    monkeypatch.setattr(time, "sleep", lambda s: os.utime(path, (time.time() + clock + next(beats),) * 2))
    with pytest.raises(run_lock.Owned, match=r"on node7 .*stop it there"):
        run_lock.acquire(tmp_path, lambda line: None)


def test_a_process_that_owns_a_folder_goes_on_owning_it(tmp_path):
    assert [run_lock.acquire(tmp_path / "a" / "b") for _ in range(3)] == [False] * 3
    run_lock.release_all()
    assert list(tmp_path.iterdir()) == []  # what was made for the lock goes with it
    assert run_lock.acquire(tmp_path) is True
    (tmp_path / "kept").touch()
    run_lock.release_all()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_the_heartbeat_goes_on_and_stops(tmp_path, soon):
    run_lock.acquire(tmp_path)
    os.utime(tmp_path / run_lock.LOCK, (0, 0))
    end = time.monotonic() + 10
    while (tmp_path / run_lock.LOCK).stat().st_mtime == 0 and time.monotonic() < end:
        time.sleep(0.01)
    assert (tmp_path / run_lock.LOCK).stat().st_mtime > 0


def test_an_owner_that_was_taken_over_ends_without_writing(tmp_path):
    with owner(tmp_path, beat=0.05) as process:
        write_lock(tmp_path, host="node7", pid=12)
        assert process.wait(20) == 2
        said = process.stderr.read()
    assert said.count("\n") == 1 and "process 12 on node7" in said and "has taken this run over" in said


@pytest.mark.parametrize("loss", ["moved", "removed", "the lock alone"])
def test_an_owner_whose_folder_is_moved_or_removed_ends(loss, tmp_path):
    folder = tmp_path / "run"
    with owner(folder, beat=0.05) as process:
        if loss == "moved":
            folder.rename(tmp_path / "moved")
        else:
            (folder / run_lock.LOCK).unlink()
        if loss == "removed":
            folder.rmdir()
        assert process.wait(20) == 2
        said = process.stderr.read()
    assert said.count("\n") == 1 and f"{folder}: lock.json is gone" in said
    assert folder.exists() == (loss == "the lock alone")


@pytest.mark.slow
def test_a_run_whose_folder_is_moved_makes_no_other(tmp_path):
    write_text(tmp_path)
    ranks = 2
    process = started(tmp_path, "run", ranks, "--set", "train.checkpoint_every=2", steps=5)
    (tmp_path / "run").rename(tmp_path / "moved")
    code, _, said, _ = ended(tmp_path, process)
    assert code and "lock.json is gone" in str(said) and not (tmp_path / "run").exists()
    step = steps_of(tmp_path / "moved") + 3
    out = torchrun(tmp_path, ranks, "--resume", "--out", "moved", "--stop-at", step, "--prompt", "")
    assert f"stopped after step {step}" in out


@pytest.mark.slow
@pytest.mark.parametrize("before", ["nothing", "a dead owner's lock"])
def test_of_many_that_start_at_once_one_owns_the_folder(before, tmp_path):
    if before != "nothing":
        write_lock(tmp_path / "run", pid=ended_pid())
    line = [sys.executable, "-c", OWNER, str(tmp_path / "run"), "wait", "5"]
    processes = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.stdout.readline().split()[0] for process in processes]
    for process in processes:
        process.kill()
        process.communicate()
    assert sorted(said) == ["refused"] * 3 + ["taken"]


@pytest.mark.parametrize("meanwhile", ["another owner", "removed"])
def test_the_lock_is_read_and_written_while_no_other_start_does(meanwhile, tmp_path):
    """Who waits for its turn finds what the one before it left: an owner, or a file that is gone."""
    found, path = [], write_lock(tmp_path, pid=ended_pid())

    def start():
        try:
            found.append(run_lock.acquire(tmp_path))
        except run_lock.Owned as error:
            found.append(str(error))

    with path.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=start)
        thread.start()
        thread.join(0.2)
        assert found == []
        if meanwhile == "removed":
            path.unlink()
        else:
            write_lock(tmp_path)
    thread.join()
    if meanwhile == "removed":
        assert found == [True] and run_lock.parse(path.read_text())["pid"] == os.getpid()
    else:
        assert f"in use by process {os.getppid()}" in found[0]


# ---- the commands ----


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a text and `run`, as a run has it that has made no step."""
    folder = tmp_path_factory.mktemp("lock")
    write_text(folder)
    run_folder.create_run(folder / "run", config_table.from_table({"preset": "llama-tiny"}), None, corpus="data")
    return folder


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.name != run_lock.LOCK
    }


STARTS = {
    "new": [*TINY, "--steps", 3],
    "--auto-resume, new": [*TINY, "--steps", 3, "--auto-resume"],
    "--resume": ["--resume"],
    "--auto-resume": ["--auto-resume"],
    "its checkpoints": [*TINY, "--steps", 3, "--set", "train.checkpoints=there"],
    "its disk": [*TINY, "--steps", 3, "--offload", "opt=nvme", "--nvme", "there"],
}


@pytest.mark.parametrize("how", STARTS)
def test_a_second_start_is_one_line_and_changes_nothing(how, made, fz, monkeypatch):
    monkeypatch.chdir(made)
    out = "run" if "resume" in how and "new" not in how else "other"
    with owner(made / ("there" if "its" in how else out)) as process:
        before = content(made)
        code, _, err = fz("pretrain", *STARTS[how], "--out", out, "--prompt", "")
        assert code == 2 and err.count("\n") == 1 and f"in use by process {process.pid}" in err, err
        assert content(made) == before


@pytest.mark.slow
def test_a_run_whose_owner_was_killed_resumes(tmp_path, fz, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    code, _, err = fz("pretrain", *TINY, "--steps", 3, "--stop-at", 1, "--out", "run", "--prompt", "")
    assert code == 0 and not (tmp_path / "run" / run_lock.LOCK).exists(), err
    with owner(tmp_path / "run") as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    code, out, err = fz("pretrain", "--out", "run", "--resume", "--stop-at", 2, "--prompt", "")
    assert code == 0 and "stopped after step 2" in out, err
    assert not (tmp_path / "run" / run_lock.LOCK).exists()


def test_a_free_folder_is_one_that_no_other_start_has_taken(tmp_path, monkeypatch):
    real = Path.exists
    with owner(tmp_path / "a-1"):
        # Another start has made it between the look and the lock.
        monkeypatch.setattr(Path, "exists", lambda path: path.name != "a-1" and real(path))
        assert run_folder.free_folder("a", tmp_path) == tmp_path / "a-2"
