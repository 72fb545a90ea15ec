"""A run whose process, node or operator ends it, or a rank of which hangs, says so, and goes on with the same loss
curve."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from datetime import timedelta

import forked
import pytest
import ranks
import torch
import torch.distributed as dist
from launched import (
    LONG,
    STANDALONE,
    TINY,
    ended,
    folder_with_run,
    ranks_of,
    rows,
    said_in,
    start,
    started,
    steps_of,
    until,
    write_text,
)

from fzero import checkpoint
from fzero.cli import main
from fzero.comm import communicator
from fzero.run import Options, auto_resume, config_table, coordinator, loop, pretrain
from fzero.run.setup import watchdog
from fzero.run.setup.elastic import fit_mesh
from fzero.run.setup.watchdog import Beat, verdict

# Saves often, for ranks that may be killed.
KEEP = [*TINY, "--reduce", "canonical", "--set", "train.checkpoint_every=2"]
STEPS = ("--steps", 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text and `whole`, the run of one process that nothing happens to."""
    return folder_with_run(tmp_path_factory, "fault", "whole", *KEEP, *STEPS)


# ---- finding each other, where others were before -------------------------------------------------------------------


@pytest.fixture
def store():
    """Makes connections to one store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))


def meet_all(store, size, ranks=None, timeout_s=20.0):
    """{rank: what meet gave, or its error} of some ranks, each in a thread."""
    found = {}

    def one(rank):
        try:
            found[rank] = coordinator.await_ranks(store(), rank, size, timeout_s)
        except (TimeoutError, ValueError) as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (range(size) if ranks is None else ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_team_is_a_new_one_whatever_was_left_before(store):
    seen = set()
    for number, size in enumerate((3, 3, 2, 4, 1), 1):
        found = meet_all(store, size)
        assert len({(n, tuple(names)) for n, names in found.values()}) == 1, found
        given, names = found[0]
        assert given >= number and len(set(names)) == size and not seen & set(names)
        seen |= set(names)


def test_a_list_with_names_of_the_attempt_before_is_not_taken(store):
    """Ranks 0 and 1 are here long before rank 2, whose old name is still there: rank 0 publishes a list that nobody
    acknowledges whole."""
    old = meet_all(store, 3)[0]
    late = {}
    first = threading.Thread(target=lambda: late.update(meet_all(store, 3, ranks=(0, 1))))
    first.start()
    time.sleep(0.5)
    assert not late  # they wait, although every key of a complete team is there
    late |= meet_all(store, 3, ranks=(2,))
    first.join()
    assert late[0] == late[1] == late[2] and late[0][0] > old[0] and late[0][1][2] != old[1][2]


def test_a_process_that_ends_while_all_meet_is_replaced(store):
    """Rank 1 says hello, is listed, and is gone before it answers; the next one at its place is in the team."""
    first = {}
    thread = threading.Thread(target=lambda: first.update(meet_all(store, 2, ranks=(0,))))
    thread.start()
    gone = store()
    gone.set("hello/1", "gone")
    until(lambda: gone.check(["list"]))
    first |= meet_all(store, 2, ranks=(1,))
    thread.join()
    assert first[0] == first[1] and "gone" not in first[0][1]


def test_who_does_not_come_is_named(store, monkeypatch, capsys):
    monkeypatch.setattr(coordinator, "SAY_S", 0.1)
    found = meet_all(store, 4, ranks=(0, 2), timeout_s=0.5)
    assert "rank 1, 3 did not come within 0.5 s (train.hang_s)" in str(found[0])
    assert "rank 1, 3 did not come" in str(found[2])
    assert capsys.readouterr().err == "rank 0 waits for rank 1, 3 to start, at most 0.5 s (train.hang_s)\n"


def test_who_came_and_is_gone_is_named(store, monkeypatch):
    """Rank 1 gives signs of life while rank 0 waits, then none more; rank 2 has none yet and is waited for."""
    monkeypatch.setattr(coordinator, "BEAT_S", 0.02)
    monkeypatch.setattr(coordinator, "SILENT_S", 0.3)
    other, found = store(), {}
    other.set("hello/1", "a name")
    thread = threading.Thread(target=lambda: found.update(meet_all(store, 3, ranks=(0,), timeout_s=60.0)))
    thread.start()
    for number in range(20):
        other.set("meets/1", str(number))
        time.sleep(0.02)
    thread.join(20)
    assert str(found[0]) == "rank 1 is gone: no sign of life for 0.3 s while the ranks start"


def test_a_process_whose_place_is_taken_ends(store):
    found = {}
    thread = threading.Thread(target=lambda: found.update(meet_all(store, 2, ranks=(1,))))
    thread.start()
    other = store()
    until(lambda: other.check(["hello/1"]))
    other.set("hello/1", "another")
    thread.join()
    assert "rank 1 was started again while this process" in str(found[1])


# ---- another mesh ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, processes, micro_batches, expected",
    [
        ({"dp": 4}, 3, 4, {"dp": 2}),
        ({"dp": 4}, 3, 12, {"dp": 3}),
        ({"dp": 4}, 1, 4, {}),
        ({"dp": 2}, 4, 8, {"dp": 4}),
        ({"dp": 2}, 5, 7, {}),
        ({"dp": 2, "tp": 2}, 3, 4, {"tp": 2}),
        ({"dp": 2, "tp": 2}, 6, 4, {"dp": 2, "tp": 2}),
        ({"dp": 2, "tp": 2}, 6, 6, {"dp": 3, "tp": 2}),
        ({"tp": 4}, 3, 4, {"tp": 2}),
        ({"tp": 4}, 1, 4, {}),
        ({"dp": 2, "rp": 2}, 3, 4, {"rp": 2}),
        ({"dp": 2, "rp": 3}, 5, 12, {"rp": 3}),
        ({"dp": 4, "rp": 2}, 9, 4, {"dp": 2, "rp": 2}),
        ({"rp": 2, "tp": 4}, 4, 4, {"tp": 4}),
        ({"dp": 2, "rp": 2, "tp": 2}, 7, 8, {"rp": 2, "tp": 2}),
        ({}, 3, 6, {"dp": 3}),
    ],
)
def test_the_mesh_on_other_processes(sizes, processes, micro_batches, expected):
    assert fit_mesh(sizes, processes, micro_batches) == expected
    canonical = fit_mesh(sizes, processes, micro_batches, canonical=True)
    assert canonical == (
        expected if expected.get("dp") != 3 else {axis: n for axis, n in expected.items() if axis != "dp"} | {"dp": 2}
    )


# ---- going on by the command of the start ---------------------------------------------------------------------------


@pytest.fixture
def fz(folder, monkeypatch, capfd):
    """Runs the command line here: (exit code, stdout, stderr)."""
    monkeypatch.chdir(folder)

    def run(*args):
        with pytest.raises(SystemExit) as error:
            main.main([str(arg) for arg in args])
        out, err = capfd.readouterr()
        return error.value.code, out, err

    return run


@pytest.mark.slow
def test_auto_resume_starts_goes_on_and_ends(fz, folder):
    command = ["pretrain", *KEEP, *STEPS, "--out", "auto", "--prompt", "", "--auto-resume"]
    code, out, _ = fz(*command, "--stop-at", 5)
    assert code == 0 and "stopped after step 5 of 12" in out and not (folder / "auto" / auto_resume.MARKER).exists()
    code, out, _ = fz(*command, "--stop-at", 5)
    assert code == 0 and "auto: has made its 5 steps" in out
    code, out, _ = fz(*command)
    assert code == 0 and "resuming auto at step 5 of 12" in out
    assert rows(folder / "auto") == rows(folder / "whole")
    code, out, err = fz(*command)
    assert code == 0 and "auto: is complete: it has made its 12 steps" in out and not err
    assert rows(folder / "auto") == rows(folder / "whole")


DISAGREEING = {
    "a flag": (["--batch", "16"], "train.batch is 16 here and 8 in whole"),
    "the optimizer": (["--set", "optim.name=sgd"], "optim.name is sgd here and muon in whole"),
    "the length": (["--seq-len", "8"], "data.seq_len is 8 here and "),
    "the seed": (["--seed", 5], "seed is 5 here and "),
    "a setting": (["--set", "model.n_layers=3"], "model.n_layers is 3 here and 2 in whole"),
    "the preset": (["--model", "gpt2-tiny"], "preset is gpt2-tiny here and llama-tiny in whole"),
    "the corpus": (["--data", "other.txt"], "/other.txt here and "),
    "a number of a complete run": (["--lr", "0.5"], "whole: is complete: it has made its 12 steps; --steps N"),
    "a wrong number": (["--lr", "-1"], "lr is -1"),
    "the family": (["--set", "model.family=gpt2"], "model.family is gpt2 here and llama in whole"),
    "weights": (["--init", "whole"], "--init is whole here and no other run in whole"),
    "no such key": (["--set", "train.stepps=3"], "unknown key 'train.stepps' (did you mean steps?)"),
    "both": (["--resume"], "--resume and --auto-resume exclude each other"),
}


@pytest.mark.parametrize("what", DISAGREEING)
def test_what_a_resumed_run_may_not_change_is_named(fz, what):
    flags, text = DISAGREEING[what]
    code, _, err = fz("pretrain", "--out", "whole", "--auto-resume", *flags)
    assert code == 2 and err.count("\n") == 1 and text in err, err


def test_what_agrees_or_may_change_is_no_mistake(fz):
    flags = [
        *TINY,
        *STEPS,
        "--zero",
        3,
        "--reduce",
        "fast",
        "--set",
        "reshard=false",
        "--prefetch",
        2,
        "--set",
        "train.remat=none",
    ]
    code, out, err = fz("pretrain", *flags, "--out", "whole", "--auto-resume")
    assert code == 0 and "is complete" in out, err


def test_auto_resume_needs_a_folder_and_takes_no_other(fz, folder):
    code, _, err = fz("pretrain", *KEEP, "--auto-resume")
    assert code == 2 and "--auto-resume needs the run folder: --out RUN" in err
    (folder / "full").mkdir()
    (folder / "full" / "note").write_text("mine")
    code, _, err = fz("pretrain", *KEEP, "--auto-resume", "--out", "full")
    assert (
        code == 2
        and "full: exists and is not empty; name another folder" in err
        and (folder / "full" / "note").exists()
    )


@pytest.mark.exhaustive
def test_a_run_that_did_not_come_to_train_is_begun_again(fz, folder):
    """Killed while it prepared its corpus, and killed after that, before the first checkpoint."""
    run = folder / "early"
    (run / "data").mkdir(parents=True)
    (run / "data" / "train.bin").write_bytes(b"half")
    (run / auto_resume.MARKER).touch()
    command = ["pretrain", *KEEP, *STEPS, "--out", "early", "--prompt", "", "--auto-resume"]
    code, out, _ = fz(*command, "--stop-at", 3)
    assert code == 0 and "preparing" in out and "stopped after step 3" in out
    for path in sorted((run / "checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    code, out, _ = fz(*command)
    assert code == 0 and "resuming early at step 0 of 12" in out
    assert rows(run) == rows(folder / "whole")


# ---- restarts by torchrun -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_the_run_goes_on_bit_for_bit(folder):
    """torchrun starts all ranks again by the same command; --out was not given, so the folder is found in torchrun's
    store."""
    run = folder / "runs" / "llama-tiny-1"
    process = start(
        folder, 2, *KEEP, *STEPS, "--zero", 3, "--prompt", "", how=(*STANDALONE, "--max-restarts", 2), log="-kill"
    )
    until(lambda: steps_of(run) >= 3, process)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    code, out, said, _ = ended(folder, process, log="-kill")
    assert code == 0 and len(said) == 1 and "rank 1 is gone" in said[0], said
    assert "resuming runs/llama-tiny-1 at step" in out.replace(f"{folder}/", "")
    assert rows(run) == rows(folder / "whole") and not (folder / "runs" / "llama-tiny-2").exists()


@pytest.mark.exhaustive
def test_a_restart_does_not_go_on_with_a_run_that_it_did_not_make(folder):
    """The folder was refused at first; the restarted command refuses it too."""
    before = rows(folder / "whole")
    process = start(
        folder, 2, *KEEP, "--steps", 13, "--out", "whole", how=(*STANDALONE, "--max-restarts", 1), log="-refused"
    )
    code, _, said, _ = ended(folder, process, log="-refused")
    assert (
        code == 1
        and len(said) == 2
        and all("whole: exists and is not empty; resume it with --resume" in line for line in said)
    ), said
    assert rows(folder / "whole") == before


# ---- a rank that hangs ----------------------------------------------------------------------------------------------


def at(idle_s=9.0, waits="", step=4, calls=70, last="psum over dp (2 ranks) of w"):
    return Beat(1, idle_s, step, calls, last, waits, "a.py:1 f")


GATHER = "all_gather over dp (4 ranks) of v in forward (#71)"
VERDICTS = {
    "one computes": (
        {0: at(waits=GATHER), 1: at(), 2: at(waits=GATHER)},
        {},
        ["rank 1 hangs: no progress for 9 s, in step 5 at a.py:1 f, "],
    ),
    "who waits is told": (
        {0: at(waits=GATHER), 1: at(), 2: at(waits=GATHER)},
        {},
        [f"; rank 0, 2 wait in {GATHER}, step 5; "],
    ),
    "two compute": (
        {0: at(), 1: at(waits=GATHER), 2: at()},
        {},
        ["rank 0 hangs: ", "; rank 2 hangs: ", "; rank 1 waits in all_gather"],
    ),
    "one is stopped": (
        {0: at(waits=GATHER), 1: at(0.2)},
        {1: 4.0},
        ["rank 1 hangs: its process gives no sign of life for 4 s "],
    ),
    "one is stopped in a wait": (
        {0: at(waits=GATHER), 1: at(0.2, "psum")},
        {1: 4.0},
        ["rank 1 hangs: ", "waiting in psum at a.py:1 f;"],
    ),
    "all wait": (
        {0: at(waits="psum (#9)", calls=9), 1: at(waits=GATHER)},
        {},
        ["rank 0 hangs: no progress", "rank 1 waits in all_gather"],
    ),
    "one goes on": ({0: at(waits=GATHER), 1: at(0.5)}, {}, []),
    "one waits for one that goes on": ({0: at(waits=GATHER), 1: at(0.5, "psum"), 2: at(0.1)}, {}, []),
    "nothing before": ({0: at(waits=GATHER), 1: at(last="", calls=0)}, {}, ["f, before any collective; rank 0 waits"]),
}


@pytest.mark.parametrize("what", VERDICTS)
def test_the_verdict_names_who_keeps_the_others_waiting(what):
    states, stale, parts = VERDICTS[what]
    text = verdict(states, stale, 5.0)
    assert all(part in text for part in parts) and bool(text) == bool(parts) and "\n" not in text, text


def test_who_is_waited_for_before_the_first_step_is_told(capsys):
    """By the first of the ranks that wait; one that computes, or that has given no sign, is named."""
    state = {
        0: at(0.5, step=-1),
        1: at(9.0, "a message of rank 0", step=-1),
        2: at(8.5, "a message of rank 0", step=-1),
    }
    shared = dist.HashStore()
    for rank, s in state.items():
        shared.set(f"beat/{rank}", json.dumps(s))
    for rank in (2, 1):
        watchdog.report_waits(coordinator.Coordinator(rank, 4, 1, shared), 60.0)
    said = capsys.readouterr().err
    assert said == (
        "rank 1, 2 wait in a message of rank 0, for rank 0, at a.py:1 f; rank 3, of which there is no sign of "
        "life; train.hang_s ends all after 60 s without progress\n"
    )
    text = verdict({0: at(70.0, step=-1), **{n: s._replace(idle_s=69.0) for n, s in state.items() if n}}, {}, 60.0)
    assert "rank 0 hangs: no progress for 70 s, in work before or after the steps at a.py:1 f" in text


def look_at_work(mesh):
    ours, work, main = coordinator.Coordinator(), watchdog.Work(), threading.main_thread()
    sleeper, over = threading.Event(), threading.Event()

    def wait():
        sleeper.set()
        over.wait(60)

    waits = threading.Thread(target=wait)
    waits.start()
    sleeper.wait()
    time.sleep(0.05)
    try:
        looks = [work.look(ours, waits) for _ in range(3)]
        assert looks == [1, 1, 1]  # it is new at the first look, and then stands
        child = subprocess.Popen(["python3", "-c", "while True: pass"])
        until(lambda: work.look(ours, waits) > 1)
        child.kill()
        child.wait()
        before = work.look(ours, main)
        assert work.look(ours, main) > before  # the stack of a thread that goes on
        ours.waiting = "rank 1"
        assert work.look(ours, main) == work.look(ours, main)
    finally:
        over.set()
        waits.join()


def test_work_outside_of_steps_is_progress():
    ranks.run(1, look_at_work, fresh=True)  # what else a process of tests does, and its children, is work too


def sleep_before_the_steps(mesh, folder):
    with open(folder / f"err{mesh.rank}", "w") as err:
        os.dup2(err.fileno(), 2)
    watchdog.BEAT_S, watchdog.SAY_S = 0.1, 0.5
    ours = coordinator.Coordinator(mesh.rank, 2, 1, dist.PrefixStore("run", mesh.store), hang_s=2.0)
    with watchdog.watch(ours):
        if mesh.rank == 1:
            end = time.monotonic() + 4.0
            while time.monotonic() < end:  # it works, longer than hang_s
                sum(range(1000))
            threading.Event().wait()
        ours.gather(0)


@pytest.mark.slow
def test_a_rank_that_hangs_before_the_steps_is_named(tmp_path):
    begin = time.monotonic()
    ours, theirs = ranks.run(2, sleep_before_the_steps, tmp_path, fresh=True, timeout_s=60.0)
    assert (ours.code, theirs.code) == (2, 2) and time.monotonic() - begin > 4.0
    text = "".join((tmp_path / f"err{rank}").read_text() for rank in range(2))
    assert re.search(
        r"rank 0 waits in a message of rank 1, for rank 1, at \S+:\d+ .*; train.hang_s ends all after 2 s", text
    )
    assert re.search(
        r"error: rank 1 hangs: no progress for \d s, in work before or after the steps at threading", text
    ), text
    assert "rank 0 waits in a message of rank 1" in text and text.count("fzero: error") == 1


NAP = """
import os, sys, time
from fzero.cli.main import main
from fzero.comm.communicator import Communicator

begin, seen = Communicator._begin, 0

def nap(self, collective, x, leaf, elements):
    global seen
    seen += (collective, leaf) == ("all_gather", "head/norm/scale head/w")
    if seen == 10 and os.environ["RANK"] == "1":
        time.sleep(600)
    return begin(self, collective, x, leaf, elements)

Communicator._begin = nap
main()
"""
HANG = ["--zero", 3, "--prefetch", 0, "--set", "train.hang_s=3"]


@pytest.mark.exhaustive
def test_a_rank_that_sleeps_in_a_step_is_named_with_what_the_others_wait_for(folder):
    (folder / "nap.py").write_text(NAP)
    process = start(folder, 2, *TINY, *LONG, *HANG, "--out", "nap", command=("nap.py",), log="-nap")
    until(lambda: steps_of(folder / "nap") >= 1, process)
    begin = time.monotonic()
    code, _, said, codes = ended(folder, process, log="-nap")
    assert time.monotonic() - begin < 60
    assert code == 1 and len(said) == 1 and codes == [2, 2], said
    hung = r"rank 1 hangs: no progress for \d s, in step 3 at nap.py:1\d nap, after all_gather over dp .*"
    hung += r" of blocks/\S+ and 8 more in forward \(#\d+\)"
    waits = r"rank 0 waits in all_gather over dp \(2 ranks\) of head/norm/scale and 1 more in forward \(#\d+\), step 3"
    assert re.search(f"error: {hung}; {waits};", said[0]), said
    assert "resume from the last checkpoint with --resume, or let torchrun --max-restarts do it" in said[0]


@pytest.mark.parametrize(
    "rank", (pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive))
)
def test_a_stopped_rank_is_named(folder, rank):
    log = f"-stop{rank}"
    process = started(folder, f"stop{rank}", 2, *HANG, log=log)
    time.sleep(2 * watchdog.BEAT_S)  # until a sign of life says that it is in the steps
    stopped, begin = ranks_of(process)[rank], time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    code, _, said, codes = ended(folder, process, log=log)
    assert time.monotonic() - begin < 60
    assert code == 1 and len(said) == 1 and codes == [-9, 2], (said, codes)
    assert (
        f"error: rank {rank} hangs: its process gives no sign of life for " in said[0]
        and "was last in step " in said[0]
    )
    assert f"; rank {1 - rank} waits in " in said[0] and " over dp (2 ranks) of " in said[0], said


# ---- told to stop ---------------------------------------------------------------------------------------------------


def stopped_well(folder, process, run, log, codes=None):
    """The step after which a run was stopped by SIGTERM, saved, and without a word on stderr."""
    code, out, said, found = ended(folder, process, log=log)
    step = len(rows(folder / run))
    assert not said and found == (codes or []), (folder / f"err{log}").read_text()
    assert checkpoint.steps(folder / run / "checkpoints")[-1] == step
    return code, step, out


@pytest.mark.slow
def test_ranks_whose_torchrun_is_killed_end(folder):
    process = started(folder, "orphans", 2, fresh=True)
    ranks = ranks_of(process)
    process.kill()
    process.wait()
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in ranks.values()), timeout_s=15)
    assert said_in((folder / "err").read_text()) == [
        "fzero: error: torchrun is gone; resume from the last checkpoint with --resume"
    ]


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_on_all_ranks(folder):
    """torchrun hands it on to every rank, waits for them, and ends by a report of its own."""
    process = started(folder, "term", 2, "--zero", 3, log="-term")
    ranks = ranks_of(process)
    process.terminate()
    code, step, out = stopped_well(folder, process, "term", "-term")
    assert code == 1 and f"stopped after step {step} of 1000000; resume with: " in out
    assert not any(os.path.exists(f"/proc/{rank}") for rank in ranks.values())
    assert "got signal: 15" in (folder / "err-term").read_text()


SLOW_SAVE = """
import os, time
from pathlib import Path
from fzero.cli.main import main

replace = os.replace

def slow(source, target, **options):
    if "checkpoints" in str(target) and not os.path.exists("saving"):
        Path("saving").touch()
        time.sleep(2.0)
    return replace(source, target, **options)

os.replace = slow
main()
"""


@pytest.mark.exhaustive
def test_sigterm_while_a_checkpoint_is_written(folder):
    (folder / "slow.py").write_text(SLOW_SAVE)
    process = start(
        folder,
        2,
        *TINY,
        *LONG,
        "--set",
        "train.checkpoint_every=2",
        "--out",
        "midsave",
        "--prompt",
        "",
        command=("slow.py",),
        log="-midsave",
    )
    until((folder / "saving").exists, process)
    process.terminate()
    code, step, _ = stopped_well(folder, process, "midsave", "-midsave")
    assert code == 1 and step >= 2
    assert checkpoint.newest_sound(folder / "midsave" / "checkpoints")[1] == []


WAIT = """
import time
from pathlib import Path
from fzero.cli.main import main
from fzero.run.setup import corpus

find = corpus.find_corpus

def wait(*args):
    Path("waiting").touch()
    time.sleep(6)
    return find(*args)

corpus.find_corpus = wait
main()
"""


# A signal to rank 1 alone is heard by rank 0 when it is done with the corpus.
@pytest.mark.parametrize(
    "n, to",
    (
        pytest.param(1, "one process", marks=pytest.mark.slow),
        pytest.param(2, "torchrun", marks=pytest.mark.exhaustive),
        pytest.param(2, "rank 0", marks=pytest.mark.exhaustive),
        pytest.param(2, "rank 1", marks=pytest.mark.exhaustive),
    ),
)
def test_sigterm_before_the_first_step_ends_at_once_and_leaves_nothing(folder, n, to):
    log = f"-first{n}{to[-1]}"
    (folder / "wait.py").write_text(WAIT)
    (folder / "waiting").unlink(missing_ok=True)
    if n == 1:
        with (folder / f"out{log}").open("w") as out, (folder / f"err{log}").open("w") as err:
            line = [f"{forked.programs()}/script", "wait.py", "pretrain", *TINY, "--out", "first"]
            process = subprocess.Popen(line, cwd=folder, stdout=out, stderr=err)
    else:
        process = start(folder, n, *TINY, *LONG, "--out", "first", command=("wait.py",), log=log)
    until((folder / "waiting").exists, process)
    begin = time.monotonic()
    os.kill(ranks_of(process)[int(to[-1])] if to.startswith("rank") else process.pid, signal.SIGTERM)
    code, _, said, codes = ended(folder, process, log=log)
    assert time.monotonic() - begin < 45
    assert code == (1 if to == "torchrun" else 0) and codes == [] and not (folder / "first").exists()
    assert said in (["fzero: stopped by SIGTERM; there was nothing to save"], []), said


# ---- nodes ----------------------------------------------------------------------------------------------------------

QUICK = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def on_nodes(folder, name, low, high, n, *args, restarts=3):
    """A run on n nodes of one process each, every one under a torchrun of its own: (those torchruns, a function that
    adds a node).

    The first hosts the store of their rendezvous. All of them are ended with the context.
    """
    how = [
        f"--nnodes={low}:{high}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{free_port()}",
        f"--rdzv-id={name}",
    ]
    agents = []

    def more():
        options = [*how, f"--rdzv-conf={QUICK},is_host={'false' if agents else 'true'}", f"--max-restarts={restarts}"]
        log = f"-{name}{len(agents)}"
        line = [*args, "--out", name, "--prompt", "", "--auto-resume"]
        agents.append(start(folder, 1, *line, how=options, log=log, fresh=True))
        return agents[-1]

    for _ in range(n):
        more()
    try:
        yield agents, more
    finally:
        for agent in agents:
            if agent.poll() is None:
                kill_node(agent)


def kill_node(agent):
    """SIGKILL a torchrun and its worker, as where a node is lost."""
    workers = ranks_of(agent).values()
    agent.kill()
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    agent.wait()


def node_of(agents, rank):
    """The torchrun whose worker has this rank."""
    return until(lambda: next((a for a in agents if a.poll() is None and rank in ranks_of(a)), None))


def texts(folder, name, agents, what="out"):
    """What all nodes printed."""
    return "".join((folder / f"{what}-{name}{i}").read_text() for i in range(len(agents)))


@pytest.mark.slow
def test_a_lost_node_is_done_without_and_a_spare_takes_its_place(folder):
    """Three nodes, of which 8 micro-batches a step need two. One of these is lost, with its torchrun: the third goes on
    in its place."""
    name = "lost"
    with on_nodes(folder, name, 2, 3, 3, *KEEP, *STEPS, "--zero", 3) as (agents, _):
        until(lambda: steps_of(folder / name) >= 3, agents[0])
        lost = node_of(agents, 1)
        kill_node(lost)
        codes = {agent.wait(120) for agent in agents if agent is not lost}
    out, said = texts(folder, name, agents), said_in(texts(folder, name, agents, "err"))
    assert codes == {0} and len(said) == 1 and "rank 1 is gone" in said[0], said
    assert (
        "mesh: dp=2 for 3 processes in place of dp=3; 8 micro-batches a step, canonical sums; rank 2 is spare and waits"
        in out
    )
    assert "resuming lost at step " in out and "dp=2 for 2 processes" not in out
    assert rows(folder / name) == rows(folder / "whole")


@pytest.mark.exhaustive
def test_a_node_that_is_lost_while_ranks_start_is_done_without(folder):
    """Its worker ends before it has joined, of which nobody is told: the other one says for whom it waits, and ends
    after train.hang_s; then torchrun goes on without the node."""
    name = "early"
    with on_nodes(folder, name, 1, 2, 2, *KEEP, *STEPS, "--set", "train.hang_s=15") as (agents, _):
        until(lambda: all(ranks_of(agent) for agent in agents))
        lost = node_of(agents, 1)
        kill_node(lost)
        left = next(agent for agent in agents if agent is not lost)
        assert left.wait(200) == 0
    err = texts(folder, name, agents, "err")
    assert "rank 0 waits for rank 1 to start, at most 15 s (train.hang_s)" in err
    assert "rank 1 did not come within 15 s (train.hang_s)" in err
    assert rows(folder / name)[-1]["step"] == 12


@pytest.mark.exhaustive
def test_a_spare_hears_of_the_end_and_hands_a_signal_on(folder):
    """12 micro-batches canonically on three processes: dp=2 and a spare. SIGTERM to the spare alone stops the run."""
    process = started(folder, "spare", 3, "--reduce", "canonical", "--auto-resume", log="-spare")
    assert "mesh: dp=2 for 3 processes in place of dp=3" in (folder / "out-spare").read_text()
    os.kill(ranks_of(process)[2], signal.SIGTERM)
    code, _, _ = stopped_well(folder, process, "spare", "-spare")
    assert code == 0
    process = start(
        folder,
        3,
        "--out",
        "spare",
        "--resume",
        "--stop-at",
        steps_of(folder / "spare") + 1,
        "--prompt",
        "",
        log="-spare",
    )
    code, out, said, _ = ended(folder, process, log="-spare")
    assert code == 0 and not said and "rank 2 is spare and waits" in out


# torch 2.13 tells a node that comes later where the workers' store is only if each round has a new one.
ROUNDS = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.mark.exhaustive
def test_a_lost_node_makes_the_mesh_smaller_and_a_new_one_larger(folder, monkeypatch):
    """dp=4, then dp=2 and a spare, then dp=4 again; the node that is lost holds rank 0, and the store of the workers
    with it."""
    monkeypatch.setenv(*ROUNDS)
    name, flags = "grown", [*KEEP, "--steps", 400, "--set", "train.log_every=1"]
    with on_nodes(folder, name, 2, 4, 4, *flags, "--zero", 3) as (agents, more):
        until(lambda: steps_of(folder / name) >= 3, agents[0])
        lost = next(agent for agent in agents[1:] if 0 in ranks_of(agent) or 1 in ranks_of(agent))
        kill_node(lost)
        until(lambda: "mesh: dp=2 for 3 processes in place of dp=4" in texts(folder, name, agents), agents[0])
        had = steps_of(folder / name)
        until(lambda: steps_of(folder / name) > had + 2, agents[0])
        more()
        until(lambda: texts(folder, name, agents).count("ZeRO stage 3 on dp=4") == 2, agents[0])
        had = steps_of(folder / name)
        until(lambda: steps_of(folder / name) > had + 5, agents[0])
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait(120)
    step = steps_of(folder / name)
    process = start(folder, 1, *flags, "--stop-at", step, "--out", "plain", "--prompt", "", log="-plain")
    assert ended(folder, process, 240, log="-plain")[0] == 0
    assert rows(folder / "plain") == rows(folder / name)


@pytest.mark.exhaustive
def test_a_node_that_is_told_to_go_leaves_and_the_other_goes_on(folder, monkeypatch):
    """SIGTERM to one torchrun of two: both save, and the other is restarted from there, with no step lost."""
    monkeypatch.setenv(*ROUNDS)
    name = "told"
    with on_nodes(folder, name, 1, 2, 2, *TINY, *LONG, "--set", "train.checkpoint_every=100000") as (agents, _):
        until(lambda: "ZeRO stage 0 on dp=2" in texts(folder, name, agents), agents[0])
        had = steps_of(folder / name)
        until(lambda: steps_of(folder / name) > had + 2, agents[0])
        before = texts(folder, name, agents).count("resuming told at step")
        told = node_of(agents, 1)
        told.terminate()
        until(lambda: texts(folder, name, agents).count("resuming told at step") > before)
        had = steps_of(folder / name)
        until(lambda: steps_of(folder / name) > had + 2)
        left = next(agent for agent in agents if agent is not told)
        left.terminate()
        left.wait(120)
    out = texts(folder, name, agents)
    *_, first, _ = re.findall(r"stopped after step (\d+) of", out)
    assert f"resuming told at step {first} of 1000000" in out
    assert [row["step"] for row in rows(folder / name)] == list(range(1, steps_of(folder / name) + 1))


# ---- ranks on GPUs, whose transport does not notice that one is gone -------------------------------------------------


class Endless:
    """Of a collective for which a rank is missing: the host waits where the result is read, and nothing is raised."""

    def wait(self):
        threading.Event().wait()


def lose_a_rank(mesh, folder):
    with open(folder / f"err{mesh.rank}", "w") as err:
        os.dup2(err.fileno(), 2)
    watchdog.BEAT_S, watchdog.SILENT_S = 0.1, 1.0
    link, ended = mesh["dp"].communicator, communicator.Communicator.abort
    link.transport, communicator._all_gather = "nccl", lambda *_, **__: Endless()
    link.transport_of = lambda x: "nccl"
    link.abort = lambda: ((folder / f"aborted{mesh.rank}").touch(), ended(link))
    ours = coordinator.Coordinator(mesh.rank, 2, 2, dist.PrefixStore("run", mesh.store))
    ours.current_mesh, ours.notices = mesh, False
    with watchdog.watch(ours):
        if mesh.rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        link.start_all_gather(torch.ones(2)).wait()


@pytest.mark.slow
def test_a_lost_rank_ends_all_where_waits_never_fail(tmp_path):
    ours, theirs = ranks.run(2, lose_a_rank, tmp_path, fresh=True, timeout_s=60.0)
    assert (ours.code, theirs.code) == (2, -signal.SIGKILL)
    line, *more = (tmp_path / "err0").read_text().splitlines()
    assert not more and line.startswith("fzero: error: rank 0: rank 1 is gone: no sign of life for 1 s; ")
    assert "resume from the last checkpoint with --resume" in line and (tmp_path / "aborted0").exists()


def lose_a_rank_before_the_first_step(mesh, folder):
    with open(folder / f"err{mesh.rank}", "w") as err:
        os.dup2(err.fileno(), 2)
    watchdog.BEAT_S, watchdog.SILENT_S = 0.1, 1.0
    ours = coordinator.Coordinator(mesh.rank, 2, 1, dist.PrefixStore("run", mesh.store))

    def mesh_of_run(sizes, timeout_s, device):
        ours.current_mesh, ours.notices = mesh, False
        return mesh

    def first_state(*_):
        time.sleep(0.5)
        if mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        Endless().wait()

    ours.mesh, loop.join, pretrain.first_state = mesh_of_run, lambda **_: ours, first_state
    table = {"preset": "mlp-tiny", "data": {"path": str(folder / "text.txt"), "seq_len": 16}, "mesh": {"dp": 2}}
    table |= {"precision": {"policy": "fp32", "fp32_matmul": "default"}, "device": "cpu"}
    table["train"] = {"steps": 2, "batch": 4, "micro_batch": 2, "compiled": False}
    loop.train_run(folder / "run", config_table.from_table(table), options=Options(peak_flops=1e12, sample=""))


@pytest.mark.slow
def test_a_rank_that_is_lost_before_the_first_step_ends_all_where_waits_never_fail(tmp_path):
    write_text(tmp_path)
    ours, theirs = ranks.run(2, lose_a_rank_before_the_first_step, tmp_path, fresh=True, timeout_s=60.0)
    assert (ours.code, theirs.code) == (2, -signal.SIGKILL)
    line, *more = (tmp_path / "err0").read_text().splitlines()
    assert not more and line.startswith("fzero: error: rank 0: rank 1 is gone: no sign of life for 1 s; ")


@pytest.mark.parametrize("said", ["", "1"])
def test_the_watchdog_ends_waits_of_nccl_unless_the_user_asks_pytorch_to(monkeypatch, said):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(name, said)  # and so it is put back
    if not said:
        monkeypatch.delenv(name)
    monkeypatch.setattr(coordinator, "start_processes", lambda *_, **__: None)
    monkeypatch.setattr(coordinator, "make_mesh", lambda *_, **__: None)
    for device, handling, notices in (("cpu", said or None, True), ("cuda", said or "0", False)):
        ours = coordinator.Coordinator(0, 2, 1, dist.HashStore())
        ours.mesh({"dp": 2}, device=torch.device(device))
        assert os.environ.get(name) == handling and ours.notices == notices
