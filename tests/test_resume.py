"""Runs go on from checkpoints bit for bit, also after `kill -9` at every instant of a save."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from close import assert_same

import fzero
from fzero import checkpoint, optim, precision, pytree
from fzero.models import GPT2Config, gpt2

MESH = fzero.one_process()
MODEL = gpt2(GPT2Config(vocab_size=17, max_len=8, d_model=8, n_layers=2, n_heads=2, d_ff=16, dropout=0.2, init_std=0.3))
OPTIMIZERS = {"sgd": lambda: optim.sgd(0.1, 0.9, nesterov=True), "adamw": lambda: optim.adamw(optim.cosine(1e-2, 20), weight_decay=0.1)}
# A loss scale that rises every third step, and that overflows on the way.
POLICIES = {
    "fp32": precision.fp32(),
    "bf16": precision.bf16(),
    "fp16": precision.fp16(precision.LossScale(init=2.0**15, window=3, hysteresis=1)),
}


def start(optimizer, policy, seed=0):
    tx = OPTIMIZERS[optimizer]()
    plan = fzero.zero_plan(0, MODEL, MESH)
    step = fzero.make_train_step(MODEL, tx, plan, MESH, policy=POLICIES[policy], ema_decay=0.9)
    return step, fzero.init_state(MODEL, tx, plan, MESH, seed=seed, policy=POLICIES[policy], ema=True)


def train(step, state, steps):
    """The state after so many steps more; the batch is a function of the state's own position."""
    losses = []
    for _ in range(steps):
        g = torch.Generator().manual_seed(int(state.data_cursor))
        tokens = torch.randint(0, 17, (4, 9), generator=g)
        state, metrics = step(state, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
        losses.append((float(metrics.loss), bool(metrics.skipped), float(metrics.loss_scale)))
    return state, losses


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ten_and_ten_steps_are_twenty_bit_for_bit(optimizer, policy, tmp_path):
    step, state = start(optimizer, policy)
    whole, losses = train(step, state, 20)
    _, state = start(optimizer, policy)
    half, first = train(step, state, 10)
    path = checkpoint.save(tmp_path, half, step=10)
    again, like = start(optimizer, policy, seed=99)
    resumed, second = train(again, checkpoint.restore(path, like), 10)
    assert first + second == losses
    assert_same(resumed, whole)
    assert int(whole.step) == 20 and losses[0] != losses[10]
    if policy == "fp16":
        assert any(skipped for _, skipped, _ in second) and len({scale for *_, scale in second}) > 1


# ---- kill -9 ----
# What follows runs in a process of its own (`python test_resume.py FOLDER`), which forks the processes to be killed.


def contents(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def kill_me_at(event_number, home):
    """From here on, SIGKILL this process right before its event_number-th opening, making, renaming or removing of something in `home`."""
    seen = 0

    def hook(event, args):
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(args[0]).startswith(str(home)):
            seen += 1
            if seen == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def in_a_fork(fn, kill_after_s=None):
    """True where the forked process that runs `fn` was killed, by itself or after so many seconds; False where it ended in peace."""
    child = os.fork()
    if child == 0:
        try:
            fn()
            os._exit(0)
        except BaseException as error:
            print(f"in the fork: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def numbered(i, size=700_000):
    return {"a": torch.full((size,), float(i)), "b": {"c": torch.full((9,), i)}}


def number_of(path):
    """The number that a checkpoint's state was made of, in every element."""
    state = checkpoint.restore(path, numbered(0))
    values = {int(v) for leaf in pytree.leaves(state) for v in leaf.unique()}
    assert len(values) == 1
    return values.pop()


def run_kill_at_every_event(home):
    """Kill a save of a new step, then of the same step again, before each thing it does to the file system; both with keep_last."""
    outcomes = []
    for what, (step, number) in {"new": (3, 31), "again": (2, 22)}.items():
        event_number, killed = 0, True
        while killed:
            event_number += 1
            place = home / f"{what}-{event_number}"
            checkpoint.save(place, numbered(10, 50), step=1)
            checkpoint.save(place, numbered(20, 50), step=2)

            def save(place=place, step=step, number=number, event_number=event_number):
                kill_me_at(event_number, place)
                checkpoint.save(place, numbered(number, 50), step=step, keep_last=2)

            killed = in_a_fork(save)
            path, damaged = checkpoint.newest_sound(place)
            state = checkpoint.restore(path, numbered(0, 50))
            found = int(state["b"]["c"][0])
            assert not damaged and found in (20, number) and bool((state["a"] == found).all()), (what, event_number, damaged, found)
            assert found == number or killed
            assert all(checkpoint.verify(place / f"step-{n:08d}") == [] for n in checkpoint.steps(place))
            outcomes.append([what, killed, found == number])
            checkpoint.save(place, numbered(40, 50), step=4, keep_last=2)
            assert contents(place) == sorted(
                f"step-{n:08d}{inner}"
                for n in checkpoint.steps(place)
                for inner in ("", "/manifest.json", *(f"/{f}" for f in checkpoint.manifest(place / f"step-{n:08d}")["files"]))
            ), contents(place)
            assert checkpoint.steps(place) == ([3, 4] if (place / "step-00000003").exists() else [2, 4])
    return outcomes


def run_kill_at_random(home):
    """Kill a process that does nothing but save, each step twice, at random instants; the next one carries on from what is there."""
    instants, inside, reported = random.Random(0), 0, 0
    checkpoint.save(home, numbered(0), step=0)
    read_end, write_end = os.pipe()
    for _ in range(25):
        first = number_of(checkpoint.newest_sound(home)[0]) + 1

        def save_on(first=first):
            for i in range(first, first + 10_000):
                checkpoint.save(home, numbered(i), step=i // 2, keep_last=2)
                os.write(write_end, i.to_bytes(4, "little"))

        in_a_fork(save_on, kill_after_s=instants.uniform(0.0, 0.06))
        os.write(write_end, (0).to_bytes(4, "little"))  # so that there is something to read
        done = os.read(read_end, 1 << 16)
        reported = max(reported, *(int.from_bytes(done[i : i + 4], "little") for i in range(0, len(done), 4)))
        path, damaged = checkpoint.newest_sound(home)
        found = number_of(path)
        assert not damaged and found in (reported, reported + 1) and path.name == f"step-{found // 2:08d}", (found, reported, damaged)
        reported = found
        files = {name for n in checkpoint.steps(home) for name in checkpoint.manifest(home / f"step-{n:08d}")["files"]}
        inside += len(list(home.rglob("*.safetensors"))) > len(checkpoint.steps(home)) or len(list(home.rglob("*.partial"))) > 0
        assert files
    last = checkpoint.save(home, numbered(reported + 1), step=reported // 2 + 1, keep_last=2)
    assert number_of(last) == reported + 1
    assert len(contents(home)) == 3 * len(checkpoint.steps(home)) == 6, contents(home)
    return inside, reported


EVENTS = (2, 4, 6, 7)


def run_resume_after_a_kill(home):
    """10 steps, saved; 3 more, killed at some point of their save; then from the newest sound one to 20. Once per event."""
    step, state = start("adamw", "bf16")
    state, _ = train(step, state, 10)
    for event_number in EVENTS:
        place = home / str(event_number)
        checkpoint.save(place, state, step=10)

        def go_on(place=place, event_number=event_number):
            further, _ = train(step, state, 3)
            kill_me_at(event_number, place)
            checkpoint.save(place, further, step=13)

        assert in_a_fork(go_on)
        path, damaged = checkpoint.newest_sound(place)
        again, like = start("adamw", "bf16", seed=99)
        resumed = checkpoint.restore(path, like)
        begun = int(resumed.step)
        assert not damaged and begun in (10, 13)
        resumed, _ = train(again, resumed, 20 - begun)
        checkpoint.save(place, resumed, step=20)
    return sorted(path.name for path in home.iterdir())


RUNS = {"events": run_kill_at_every_event, "random": run_kill_at_random, "resume": run_resume_after_a_kill}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """({name of the run: what it returned}, the folder with what each left behind)."""
    home = tmp_path_factory.mktemp("killed")
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(fzero.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, __file__, str(home)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), home


def test_kill_at_every_event_of_a_save_leaves_the_old_or_the_new(killed):
    outcomes = killed[0]["events"]
    for what in ("new", "again"):
        kills = [(dead, new) for which, dead, new in outcomes if which == what]
        assert len(kills) > 8 and kills[-1] == (False, True) and all(dead for dead, _ in kills[:-1])
        # Old up to one instant, new from then on.
        seen = [new for _, new in kills]
        assert seen == sorted(seen) and not seen[0] and kills[-2] == (True, True)


def test_kill_at_random_instants(killed):
    inside, saves = killed[0]["random"]
    assert inside >= 1, "none of the kills fell into a save"
    assert saves >= 1


def test_a_run_killed_while_it_saves_ends_as_one_that_was_not(killed):
    assert killed[0]["resume"] == [str(n) for n in EVENTS]
    step, state = start("adamw", "bf16")
    whole, _ = train(step, state, 20)
    for place in (killed[1] / "resume").iterdir():
        assert checkpoint.steps(place)[-1] == 20
        assert_same(checkpoint.restore(checkpoint.latest(place), start("adamw", "bf16", seed=3)[1]), whole)


if __name__ == "__main__":
    torch.set_num_threads(1)
    returned = {}
    for name, run in RUNS.items():
        (Path(sys.argv[1]) / name).mkdir()
        returned[name] = run(Path(sys.argv[1]) / name)
    print(json.dumps(returned))
