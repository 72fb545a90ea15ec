"""Runs that are ended by SIGKILL at any instant, many times over, and go on from what they saved: the run that was
not."""

import contextlib
import itertools
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fzero
from fzero import checkpoint, models, optim, state_specs
from fzero.checkpoint import directory as homes
from fzero.checkpoint import manifest
from fzero.checkpoint.save_state import TileFile
from fzero.core import precision, pytree
from fzero.train import meta_state

STEPS, EVERY, KEPT = (
    12,
    2,
    [6, 10, 12],
)  # a checkpoint after every second step; of those keep_last=2 and keep_every=6 leave these
CONFIG = models.LlamaConfig(vocab_size=97, max_len=16, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24)
# Where a run ends itself: what is called, and whether it then ends before or after the call.
POINTS = {
    "a save begins": (homes, "begin", "before"),
    "a save has begun": (homes, "begin", "after"),
    "a part is written": (TileFile, "_end", "before"),
    "a part is there": (TileFile, "_end", "after"),
    "all is written": (manifest, "write_manifest", "before"),
    "the manifest is written": (os, "replace", "before"),
    "the manifest is there": (os, "replace", "after"),
    "old files go": (homes, "retire", "before"),
    "an old one goes": (homes, "remove", "before"),
    "an old one has gone": (homes, "remove", "after"),
    "a folder is renamed": (os, "rename", "before"),
    "a folder has been renamed": (os, "rename", "after"),
    "a folder is removed": (shutil, "rmtree", "before"),
    "a folder is synced": (homes, "sync_folder", "before"),
}


# ---- what follows runs in a process of its own (`python test_checkpoint_kill.py FOLDER`), which forks those that are
# killed ----


class Run:
    """A run on one rank, in a process that ends with it."""

    def __init__(self, store, rank, ranks):
        if ranks > 1:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
        self.mesh = fzero.make_mesh({"dp": ranks}, device="cpu") if ranks > 1 else fzero.one_process()
        self.model = models.llama(CONFIG)
        self.plan = fzero.zero_plan(3 if ranks > 1 else 0, self.model, self.mesh, policy=precision.bf16())
        self.tx = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, weight_decay=0.1))
        self.step = fzero.make_train_step(self.model, self.tx, self.plan)
        self.specs = state_specs(self.plan, self.tx)

    def begin(self, home):
        if not checkpoint.steps(home):
            return fzero.init_state(self.model, self.tx, self.plan, seed=0)
        path, damaged = checkpoint.newest_sound(home)
        assert not damaged, damaged
        like = meta_state(self.plan, self.tx)
        return checkpoint.restore(path, like, specs=self.specs, mesh=self.mesh)

    def go_on(self, home, tell):
        state = self.begin(home)
        tell(["begun", int(state.step)])
        writer = checkpoint.Writer(home, self.mesh, keep_last=2, keep_every=6)
        saved = -1
        for i in range(int(state.step), STEPS):
            rows = torch.randint(0, CONFIG.vocab_size, (4, 9), generator=torch.Generator().manual_seed(i))
            batch = fzero.train.batch.local_batch({"tokens": rows[:, :-1], "targets": rows[:, 1:]}, self.mesh)
            state, _ = self.step(state, batch)
            tell(["step", i + 1])
            done = writer.poll()
            if done:
                tell(["saved", done.step])
            if (i + 1) % EVERY == 0:
                if done := writer.wait():
                    tell(["saved", done.step])
                writer.save(state, step=i + 1, specs=self.specs)
                saved = i + 1
        if saved < STEPS:  # killed behind the last manifest
            writer.save(state, step=STEPS, specs=self.specs)
        tell(["saved", writer.wait().step])
        writer.close()
        tell(["done", STEPS])


def kill_me_at(point):
    """Arm one of POINTS: this process ends when it gets there for the given time."""
    name, count = point
    owner, attribute, when = POINTS[name]
    whole, calls = getattr(owner, attribute), itertools.count(1)  # parts are written by several threads

    def call(*args, **kwargs):
        mine = next(calls)
        if mine == count and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        out = whole(*args, **kwargs)
        if mine == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    setattr(owner, attribute, call)


def forked(home, rank, ranks, point, port, tag):
    """(pid, a descriptor of what it tells) of a process that is one rank of a run."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    try:
        torch.set_num_threads(1)  # PyTorch makes its pool of threads anew after a fork, and two threads at once cannot
        store = dist.PrefixStore(tag, dist.TCPStore("127.0.0.1", port, is_master=False)) if ranks > 1 else None
        run = Run(store, rank, ranks)
        if point:
            kill_me_at(point)
        run.go_on(home, lambda said: os.write(theirs, f"{json.dumps(said)}\n".encode()))
        os._exit(0)
    except BaseException:
        with contextlib.suppress(BaseException):
            os.write(theirs, f"{json.dumps(['error', traceback.format_exc()])}\n".encode())
        os._exit(1)


def attempt(home, ranks, port, tag, *, instant=None, victim=0, alone=True, point=None):
    """(exit code of the victim, what rank 0 told) of a run in which a rank is killed at an instant, or at a point.

    instant: after so many steps, and for how much longer, in times of a step. alone: the others live for a moment
    longer, in which they may do harm; else all are killed at once.
    """
    started = [forked(str(home), rank, ranks, point if rank == victim else None, port, tag) for rank in range(ranks)]
    pids, told, end, times = [pid for pid, _ in started], b"", time.monotonic() + 60, []
    pid, gone, kill_at, ready = pids[victim], 0, end, select.poll()  # select() takes no file above 1023
    ready.register(started[0][1], select.POLLIN)
    while not gone:
        if ready.poll(1):
            told += os.read(started[0][1], 1 << 16)
            times += [time.monotonic()] * (told.count(b"begun") + told.count(b"step") - len(times))
            if instant and len(times) > instant[0] and kill_at == end:
                step_s = times[-1] - times[-2] if len(times) > 1 else 0.05
                kill_at = time.monotonic() + instant[1] * step_s
        gone, status = os.waitpid(pid, os.WNOHANG)
        if not gone and time.monotonic() > kill_at:
            for other in [pid] if alone else pids:
                os.kill(other, signal.SIGKILL)
            gone, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    for other in pids:
        if other != pid:
            if code:
                time.sleep(0.02)
                os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)
    while data := os.read(started[0][1], 1 << 16):
        told += data
    for _, fd in started:
        os.close(fd)
    return code, [json.loads(line) for line in told.decode().splitlines()]


class Killer:
    """Runs that are killed, and what must hold of them."""

    def __init__(self, folder):
        self.folder, self.count, self.whole = Path(folder), 0, {}
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def once(self, home, ranks, **options):
        self.count += 1
        return attempt(home, ranks, self.store.port, f"attempt {self.count}", **options)

    def uninterrupted(self, ranks):
        """{step: digests of its leaves} of the checkpoints that are left at the end."""
        if ranks not in self.whole:
            home = self.folder / f"whole-{ranks}"
            code, told = self.once(home, ranks)
            assert code == 0 and told[-1] == ["done", STEPS], told
            self.whole[ranks] = {step: digests_of(home, step) for step in KEPT}
            self.end(home, self.whole[ranks])
        return self.whole[ranks]

    def end(self, home, expected):
        """What is left at the end: the checkpoints that are kept, sound, and nothing else."""
        assert checkpoint.steps(home) == KEPT
        assert sorted(path.name for path in home.iterdir()) == [f"step-{step:08d}" for step in KEPT]
        for step in KEPT:
            path = checkpoint.step_folder(home, step)
            assert checkpoint.verify(path) == [] and len(list(path.iterdir())) == 2
            assert digests_of(home, step) == expected[step], f"step {step} is not that of the uninterrupted run"

    def check(self, home, told, reported, expected):
        """The highest step told of so far, after it was seen that nothing of it is lost."""
        assert not [said for said in told if said[0] == "error" and "is gone" not in said[1]], told
        for what, step in (said for said in told if said[0] != "error"):
            if what == "begun":
                assert step >= reported, f"step {reported} had been told of and the run began at {step}"
            elif what == "saved":
                reported = max(reported, step)
        there = checkpoint.steps(home)
        assert max(there, default=0) >= reported
        for step in there:
            assert checkpoint.verify(checkpoint.step_folder(home, step)) == []
            assert step not in expected or digests_of(home, step) == expected[step], f"step {step} is another one"
        return reported

    def killed(self, ranks, kills, seed):
        """How a run went that was killed so many times: [[begun, steps told of, whether a save had begun]]."""
        expected = self.uninterrupted(ranks)
        draw, home, out, reported = random.Random(seed), self.folder / f"killed-{ranks}-{seed}", [], 0
        while True:
            last = len(out) == kills
            options = {
                "instant": (draw.randint(0, 5), draw.uniform(0, 1.5)),
                "victim": draw.randrange(ranks),
                "alone": draw.random() < 0.7,
            }
            code, told = self.once(home, ranks, **({} if last else options))
            assert code in (0, -signal.SIGKILL), told
            reported = self.check(home, told, reported, expected)
            inside = any(
                (path / "manifest.json").is_file() is False or len(list(path.iterdir())) > 2
                for path in home.glob("step-*")
            )
            if code == 0:
                break
            out.append([told[0][1] if told else None, reported, inside])
        assert told[-1] == ["done", STEPS]
        self.end(home, expected)
        shutil.rmtree(home)
        return out

    def points(self, ranks, points):
        """The step that each attempt began with; each but the last is killed at the next of [point, count, victim]."""
        expected = self.uninterrupted(ranks)
        home, begun, reported = self.folder / f"points-{ranks}-{time.monotonic_ns()}", [], 0
        for name, count, victim in points:
            code, told = self.once(home, ranks, point=(name, count), victim=victim)
            assert code == -signal.SIGKILL, f"{name} {count} was not passed: {told}"
            reported = self.check(home, told, reported, expected)
            begun.append(told[0][1])
        code, told = self.once(home, ranks)
        assert code == 0, told
        self.check(home, told, reported, expected)
        self.end(home, expected)
        shutil.rmtree(home)
        return [*begun, told[0][1]]

    def events(self, again):
        """[killed, whether the new one is there] for a save that is killed before each thing that it does to the file
        system.

        The save is of a new step, or again of the last one.
        """
        out, state = [], {"a": torch.ones(50), "b": {"c": torch.ones(9)}}
        while not out or out[-1][0]:
            home = self.folder / f"events-{again}-{len(out)}"
            for step in (1, 2):
                checkpoint.save(home, pytree.map(lambda x, step=step: x * step, state), step=step)
            pid = os.fork()
            if not pid:
                torch.set_num_threads(1)
                kill_me_at_event(len(out) + 1, home)
                checkpoint.save(home, pytree.map(lambda x: x * 7, state), step=2 if again else 3, keep_last=2)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert code in (0, -signal.SIGKILL)
            path, damaged = checkpoint.newest_sound(home)
            found = checkpoint.restore(path, state)
            value = int(found["a"][0])
            assert not damaged and value in (2, 7) and all(bool((leaf == value).all()) for leaf in pytree.leaves(found))
            assert all(checkpoint.verify(checkpoint.step_folder(home, step)) == [] for step in checkpoint.steps(home))
            checkpoint.save(home, state, step=4, keep_last=2)
            kept = checkpoint.steps(home)
            assert kept == ([3, 4] if value == 7 and not again else [2, 4])
            assert sorted(place.name for place in home.iterdir()) == [f"step-{step:08d}" for step in kept]
            assert all(len(list(place.iterdir())) == 2 for place in home.iterdir())
            out.append([code != 0, value == 7])
            shutil.rmtree(home)
        return out


def kill_me_at_event(count, home):
    """From here on, end this process right before its count-th opening, making, renaming or removing of something in
    `home`."""
    seen = 0

    def hook(event, args):
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(args[0]).startswith(str(home)):
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def digests_of(home, step):
    """{leaf: digest} of a checkpoint."""
    return {
        name: leaf["digest"]
        for name, leaf in checkpoint.read_manifest(checkpoint.step_folder(home, step))["leaves"].items()
    }


# ---- the tests ----


class Worker:
    """The process of this file; `worker(name, **options)` is what a method of Killer returned there."""

    def __init__(self, folder):
        paths = os.pathsep.join([str(Path(__file__).parent), str(Path(fzero.__file__).parents[1]), *sys.path])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        line = [sys.executable, __file__, folder]
        self.process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def __call__(self, request, **options):
        self.process.stdin.write(f"{json.dumps([request, options])}\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["returned"]

    def close(self):
        self.process.communicate(timeout=30)


@pytest.fixture(scope="module")
def worker():
    # A kill is the same on a disk and on a file system in memory, which is quicker and less noisy.
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=where) as folder, contextlib.closing(Worker(folder)) as worker:
        yield worker


@pytest.mark.slow
@pytest.mark.parametrize("ranks, kills", [(1, 6), (2, 4)])
def test_a_run_killed_at_random_instants_ends_as_one_that_was_not(worker, ranks, kills):
    found = worker("killed", ranks=ranks, kills=kills, seed=0)
    print(f"\n{ranks} ranks, [begun at step, saved up to, inside a save]: {found}")
    assert found and all(one[1] <= STEPS for one in found)


@pytest.mark.parametrize("ranks, runs", [(1, 27), (2, 19)])
@pytest.mark.exhaustive
def test_two_hundred_kills(worker, ranks, runs):
    found = [worker("killed", ranks=ranks, kills=5, seed=seed + 1) for seed in range(runs)]
    kills = [one for run in found for one in run]
    inside = sum(one[2] for one in kills)
    print(
        f"\n{ranks} ranks: {len(kills)} kills in {runs} runs, {inside} inside a save; runs began at "
        f"{sorted({str(k[0]) for k in kills})}"
    )
    assert len(kills) >= 4 * runs and inside > 0.02 * len(kills)


# [point, which time it is passed, by which rank]; and the step that the attempt after it begins with. A save passes "a
# part is written" 50 times on one rank. The folder of a step is removed with its arrays' folder where there is a spare
# one already.
PLACES = {
    "begin": ([["a save begins", 2, 0], ["a save has begun", 1, 0], ["a save has begun", 2, 0]], [0, 2, 2, 4]),
    "parts": ([["a part is written", 70, 0], ["a part is there", 80, 0]], [0, 2, 4]),
    "manifest": (
        [["all is written", 2, 0], ["the manifest is written", 1, 0], ["the manifest is there", 2, 0]],
        [0, 2, 2, 6],
    ),
    "retire": ([["old files go", 3, 0], ["an old one goes", 1, 0], ["an old one has gone", 1, 0]], [0, 6, 8, 10]),
    "rename": (
        [["a folder is renamed", 1, 0], ["a folder has been renamed", 2, 0], ["a folder has been renamed", 1, 0]],
        [0, 6, 8, 12],
    ),
    "sync": ([["a folder is synced", 1, 0], ["a folder is synced", 1, 0]], [0, 6, 8]),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_at_a_point_of_a_save(worker, place):
    points, begun = PLACES[place]
    found = worker("points", ranks=1, points=points)
    assert found == begun


@pytest.mark.slow
def test_a_kill_of_one_of_two_ranks_inside_a_save(worker):
    points = [
        ["a part is there", 30, 1],
        ["a part is written", 3, 0],
        ["all is written", 2, 0],
        ["the manifest is there", 1, 0],
    ]
    found = worker("points", ranks=2, points=points)
    assert found[0] == 0 and found == sorted(found)


@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_kill_at_every_event_of_a_save_leaves_the_old_or_the_new(worker, again):
    found = worker("events", again=again)
    assert len(found) > 15 and found[-1] == [False, True] and all(killed for killed, _ in found[:-1])
    # Old up to some instant, new from then on, which is before the last one.
    assert found[0] == [True, False] and found[-2] == [True, True]


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    killer = Killer(sys.argv[1])
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as place:
        Run(None, 0, 1).go_on(place, lambda said: None)  # so that no fork imports or makes what all need
    for request in sys.stdin:
        name, options = json.loads(request)
        try:
            answer = {"returned": getattr(killer, name)(**options)}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
