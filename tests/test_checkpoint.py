"""Checkpoints (fzero/checkpoint.py): round trips, kills at every instant of a save, damage, and resuming bit for bit."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from close import assert_same
from safetensors.torch import load_file

import fzero
from fzero import checkpoint, optim, precision, pytree
from fzero.models import GPT2Config, gpt2


class Pair(NamedTuple):
    first: object
    second: object


def tree(seed=0):
    """A tree with every container and kind of leaf that a state may have."""
    g = torch.Generator().manual_seed(seed)
    floats = {str(d)[6:]: torch.randn(3, 5, generator=g).to(d) for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
    floats |= {str(d)[6:]: torch.randn(6, generator=g).to(d) for d in (torch.float8_e4m3fn, torch.float8_e5m2)}
    ints = [torch.randint(0, 100, (7,), generator=g).to(d) for d in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)]
    return {
        "floats": floats,
        "ints": ints,
        "odd": Pair(torch.tensor([True, False, True]), (torch.tensor(-0.0), torch.tensor(2**62), torch.empty(0, 4))),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "nothing": (),
        "view": torch.randn(6, 4, generator=g).T,
        "expanded": torch.randn(1, generator=g).expand(9),
    }


def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(actual, expected):
    assert_same(pytree.map(bits, actual), pytree.map(bits, expected))
    got, want = pytree.named_leaves(actual), pytree.named_leaves(expected)
    assert [(x.dtype, x.shape) for x in got.values()] == [(x.dtype, x.shape) for x in want.values()]


def refused(said, call, *args, **kwargs):
    """`call` raises ValueError with one line that holds each of the texts `said`."""
    with pytest.raises(ValueError, match=re.escape(said[0])) as error:
        call(*args, **kwargs)
    text = str(error.value)
    assert "\n" not in text and all(part in text for part in said), text


def contents(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


# ---- round trips ----


def test_every_kind_of_leaf_comes_back_bit_for_bit_in_the_containers_of_like(tmp_path):
    path = checkpoint.save(tmp_path / "run" / "checkpoints", tree(), step=20, config={"lr": 0.1, "name": "é"})
    assert path == tmp_path / "run" / "checkpoints" / "step-00000020"
    back = checkpoint.restore(path, tree(1))
    assert_same_bits(back, tree())
    assert isinstance(back["odd"], Pair) and back["nothing"] == () and isinstance(back["ints"], list)
    on_meta = checkpoint.restore(path, pytree.map(lambda x: x.to("meta"), tree(1)))
    assert_same_bits(on_meta, tree())
    said = checkpoint.manifest(path)
    assert (said["step"], said["config"]) == (20, {"lr": 0.1, "name": "é"})
    assert said["versions"] == {"fzero": fzero.__version__, "torch": torch.__version__}
    assert list(said["leaves"]) == pytree.names(tree())
    assert checkpoint.verify(path) == []


def test_any_safetensors_reader_opens_the_file(tmp_path):
    path = checkpoint.save(tmp_path, tree(), step=0)
    named = load_file(path / "state-0.safetensors")
    assert_same_bits({name: named[name] for name in pytree.names(tree())}, pytree.named_leaves(tree()))


def test_restored_leaves_own_their_memory(tmp_path):
    path = checkpoint.save(tmp_path, tree(), step=0)
    back = checkpoint.restore(path, tree())
    for file in path.iterdir():
        file.write_bytes(b"\xff" * file.stat().st_size)
    assert_same_bits(back, tree())
    pytree.map(lambda x: x.zero_(), back)


def test_a_part_of_a_state(tmp_path):
    state = {"params": {"w": torch.ones(2), "b": torch.zeros(3)}, "params_old": torch.ones(1), "step": torch.tensor(7)}
    path = checkpoint.save(tmp_path, state, step=7)
    assert_same(checkpoint.restore(path, state["params"], under="params"), state["params"])
    assert_same(
        checkpoint.restore_leaves(path, lambda name: name.startswith("params/")), {"params/w": torch.ones(2), "params/b": torch.zeros(3)}
    )
    refused(["none of its leaves is selected", "params/w"], checkpoint.restore_leaves, path, lambda name: name == "weights")
    refused(["missing: master/w, master/b"], checkpoint.restore, path, state["params"], under="master")


def test_another_tree_is_refused_with_the_leaves_named(tmp_path):
    path = checkpoint.save(tmp_path, {"a": torch.ones(2, 3), "b": torch.ones(4), "old": torch.ones(1)}, step=1)
    like = {"a": torch.ones(3, 2), "b": torch.ones(4, dtype=torch.bfloat16), "new": torch.ones(1)}
    refused(
        [str(path), "missing: new", "extra: old", "of another shape: a [2, 3] (wanted [3, 2])", "b float32 (wanted bfloat16)"],
        checkpoint.restore,
        path,
        like,
    )
    refused(["leaf 'a' is a int"], checkpoint.restore, path, {"a": 1})


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path):
    good = {"a": torch.ones(2)}
    refused(["leaf 'b/0' is a NoneType"], checkpoint.save, tmp_path, {"a": torch.ones(1), "b": [None]}, step=1)
    refused(["leaf 'a' is torch.complex64"], checkpoint.save, tmp_path, {"a": torch.ones(1, dtype=torch.complex64)}, step=1)
    for step in (-1, 1.0, True, torch.tensor(3)):
        refused(["step is"], checkpoint.save, tmp_path, good, step=step)
    refused(["keep_last is 0"], checkpoint.save, tmp_path, good, step=1, keep_last=0)
    refused(["config is not JSON"], checkpoint.save, tmp_path, good, step=1, config={"a": {1, 2}})
    refused(["config is not JSON"], checkpoint.save, tmp_path, good, step=1, config={"a": float("nan")})
    assert contents(tmp_path) == []
    (tmp_path / "file").write_text("")
    refused(["file: is not a folder"], checkpoint.save, tmp_path / "file", good, step=1)


# ---- finding, keeping, cleaning ----


def test_steps_latest_and_keep_last(tmp_path):
    assert checkpoint.steps(tmp_path / "nowhere") == []
    refused(["no checkpoint in it"], checkpoint.latest, tmp_path)
    refused(["no checkpoint in it"], checkpoint.newest_sound, tmp_path / "nowhere")
    for step in (3, 100, 20, 123456789):
        checkpoint.save(tmp_path, tree(step), step=step)
    assert checkpoint.steps(tmp_path) == [3, 20, 100, 123456789]
    assert checkpoint.latest(tmp_path).name == "step-123456789"
    # Only older ones go; a later one (the run was taken back to an earlier step) is not this run's to remove.
    checkpoint.save(tmp_path, tree(21), step=21, keep_last=2)
    assert checkpoint.steps(tmp_path) == [20, 21, 100, 123456789]
    assert_same_bits(checkpoint.restore(tmp_path / "step-00000020", tree()), tree(20))
    checkpoint.save(tmp_path, tree(5), step=200_000_000, keep_last=1)
    assert contents(tmp_path) == ["step-200000000", "step-200000000/manifest.json", "step-200000000/state-0.safetensors"]


def test_saving_a_step_again_replaces_it(tmp_path):
    for seed in range(3):
        path = checkpoint.save(tmp_path, tree(seed), step=5)
        assert_same_bits(checkpoint.restore(path, tree()), tree(seed))
        assert len(list(path.iterdir())) == 2 and checkpoint.verify(path) == []


def test_what_others_put_into_the_folder_stays(tmp_path):
    mine = tmp_path / "step-00000001"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    (tmp_path / "step-1").mkdir()
    checkpoint.save(tmp_path, tree(), step=2, keep_last=1)
    checkpoint.save(tmp_path, tree(), step=3, keep_last=1)
    assert (mine / "notes.txt").read_text() == "mine" and (tmp_path / "step-1").is_dir()
    assert checkpoint.steps(tmp_path) == [3]


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, tree(0), step=1)
    before = contents(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    for step in (1, 2):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(os, "fsync", full)
            checkpoint.save(tmp_path, tree(1), step=step, keep_last=1)
        assert contents(tmp_path) == before
        assert_same_bits(checkpoint.restore(tmp_path / "step-00000001", tree()), tree(0))


# ---- damage ----


def flip(file, at):
    content = bytearray(file.read_bytes())
    content[at] ^= 0x10
    file.write_bytes(content)


def test_a_flipped_byte_in_a_leaf_is_refused_by_name_and_the_older_one_offered(tmp_path):
    checkpoint.save(tmp_path, tree(0), step=10)
    path = checkpoint.save(tmp_path, tree(1), step=20)
    for name, leaf in checkpoint.manifest(path)["leaves"].items():
        for at in {leaf["offset"], leaf["offset"] + leaf["bytes"] - 1} if leaf["bytes"] else ():
            file = path / "state-0.safetensors"
            flip(file, at)
            refused([f"leaf {name} is damaged", str(file)], checkpoint.restore, path, tree())
            assert checkpoint.newest_sound(tmp_path) == (
                tmp_path / "step-00000010",
                [(path, f"leaf {name} is damaged: its bytes in {file} do not agree with the checksum in manifest.json")],
            )
            # A part that is sound can still be had.
            others = checkpoint.restore_leaves(path, lambda other, name=name: other != name)
            assert len(others) == len(pytree.leaves(tree())) - 1
            flip(file, at)
    assert checkpoint.newest_sound(tmp_path) == (path, [])


def test_no_flipped_byte_anywhere_goes_unseen(tmp_path):
    path = checkpoint.save(tmp_path, {"a": torch.arange(5), "b": {"c": torch.ones(3)}}, step=1, config={"lr": 0.5})
    for file in sorted(path.iterdir()):
        for at in range(0, file.stat().st_size, 5 if file.name == "manifest.json" else 1):
            flip(file, at)
            try:
                # The manifest's layout may change (a space to a line's beginning); nothing that it says may.
                assert checkpoint.verify(path) or (file.name == "manifest.json" and checkpoint.manifest(path)["step"] == 1)
            finally:
                flip(file, at)
    assert checkpoint.verify(path) == []


def test_cut_lost_and_foreign_files(tmp_path):
    path = checkpoint.save(tmp_path, {"a": torch.ones(1000), "b": torch.ones(1000)}, step=1)
    data, whole = path / "state-0.safetensors", (path / "state-0.safetensors").read_bytes()
    like = {"a": torch.ones(1000), "b": torch.ones(1000)}
    for size, said in ((len(whole) - 1, "leaf b is damaged"), (5000, "leaf b is damaged"), (4000, "leaf a is damaged"), (9, "header")):
        data.write_bytes(whole[:size])
        refused([said, str(data)], checkpoint.restore, path, like)
    data.write_bytes(whole + b"x")
    refused(["damaged: it has", str(data)], checkpoint.restore, path, like)
    refused(["every checkpoint is damaged", str(data)], checkpoint.newest_sound, tmp_path)
    data.unlink()
    refused([f"{data}: no such file"], checkpoint.restore, path, like)
    assert len(checkpoint.verify(path)) == 3
    data.write_bytes(whole)
    manifest = path / "manifest.json"
    text = manifest.read_text()
    for bad in ("", "{", "[]", "{}", text.replace('"step": 1', '"step": 2')):
        manifest.write_text(bad)
        refused([f"{manifest}: damaged"], checkpoint.restore, path, like)
    # A damaged checkpoint is kept as it is until its step is saved again.
    checkpoint.save(tmp_path, like, step=2)
    assert data.exists() and checkpoint.newest_sound(tmp_path)[0].name == "step-00000002"
    checkpoint.save(tmp_path, like, step=1)
    assert checkpoint.verify(path) == [] and len(list(path.iterdir())) == 2
    manifest.unlink()
    refused(["manifest.json: no such file"], checkpoint.restore, path, like)
    assert checkpoint.steps(tmp_path) == [2]


def test_a_manifest_of_a_later_version_is_refused_by_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    path = checkpoint.save(tmp_path, tree(), step=1)
    monkeypatch.undo()
    refused(["version 2", "reads version 1"], checkpoint.restore, path, tree())


# ---- resuming ----

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
# What follows runs in a process of its own (`python test_checkpoint.py FOLDER`), which forks the processes to be killed.


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
