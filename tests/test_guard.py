"""Runs whose steps go wrong: by the fault of the hardware they end as if it had not been; bad data is left out; and
nothing is lost."""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from close import assert_same
from launched import TIMED

from fzero import checkpoint
from fzero.cli import main
from fzero.core import pytree
from fzero.run import config_table, pretrain, rollback, run_folder
from fzero.run.config import run_config as config
from fzero.run.setup import corpus
from fzero.train import LOSS, sdc_check

TINY = [
    *("--model", "mlp-tiny", "--steps", "12", "--batch", "4", "--micro-batch", "2", "--seq-len", "16"),
    *("--precision", "fp32", "--peak-tflops", "1"),
]
SETTINGS = ("train.compiled=false", "precision.fp32_matmul=default", "train.eval_every=0", "train.checkpoint_every=3")
BATCH = 4


def sets(*settings):
    return [part for setting in settings for part in ("--set", setting)]


QUIET = [
    *TINY,
    "--data",
    "text.txt",
    "--prompt",
    "",
    *sets(*SETTINGS, "model.n_layers=1", "model.d_model=16", "model.d_ff=24"),
]
BACK = sets("guard.nonfinite=rollback")
TEXT = "\n".join(f"line {i}: {i * i} is the square of {i}" for i in range(300))


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FZERO_TRACEBACK", raising=False)
    Path("text.txt").write_text(TEXT)


@pytest.fixture
def fz(fz):
    """A function that runs `fzero pretrain`: (exit code, stdout, stderr)."""
    return functools.partial(fz, "pretrain")


def ok(result):
    code, out, err = result
    assert code == 0 and err == "", err
    return out


def leaves(run):
    """The leaves of a run's last checkpoint."""
    return checkpoint.restore_leaves(checkpoint.latest(Path(run, "checkpoints")), lambda name: True)


def rows(run):
    drop = lambda name: name in TIMED or name.startswith("checkpoint") or name.startswith("save")  # noqa: E731
    return [
        {name: value for name, value in row.items() if not drop(name)} for row in run_folder.read_metrics(Path(run))
    ]


def record(run):
    return json.loads(Path(run, rollback.SKIPS).read_text())


def block(state):
    """A matrix of the parameters, in which a number that is not one spoils every gradient."""
    return next(leaf for name, leaf in pytree.named_leaves(state.params).items() if name.startswith("blocks/w_"))


def plant(monkeypatch, before):
    """`before(state, batch) -> (state, batch, after)` is called before every train step; `after(state)` behind it."""
    build = pretrain.build

    def planted(*args, **kwargs):
        program = build(*args, **kwargs)

        def step(state, batch):
            state, batch, after = before(state, batch)
            state, metrics = program.train_step(state, batch)
            after(state)
            return state, metrics

        return program._replace(train_step=step)

    monkeypatch.setattr(pretrain, "build", planted)


def flipped(times):
    """Bad hardware: in the steps of these numbers, each once, a parameter becomes NaN by itself."""
    left = list(times)

    def before(state, batch):
        if int(state.step) in left:
            left.remove(int(state.step))
            block(state).view(-1)[3] = float("nan")
        return state, batch, lambda state: None

    return before


def poisoned(sample, text="text.txt"):
    """Bad data: the batch that begins with this sample gives a gradient that is not finite, whenever it comes."""
    wanted = []

    def before(state, batch):
        if not wanted:
            wanted.append(batch_of(sample))
        if not torch.equal(batch["tokens"], wanted[0]):
            return state, batch, lambda state: None
        weight = block(state).view(-1)
        kept = weight[3].clone()
        weight[3] = float("nan")
        return state, batch, lambda state: block(state).view(-1)[3].copy_(kept)

    return before


def batch_of(sample, run="data"):
    """The tokens of the batch that begins with a sample."""
    value = run_folder.read_config(Path("plain"))
    part = corpus.open_micro_batches(value, Path("plain/data"))
    return torch.cat([part(sample, m)["tokens"] for m in range(2)])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run that nothing disturbs, made once."""
    path = tmp_path_factory.mktemp("guard")
    (path / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.chdir(path)
        main.main(["pretrain", *map(str, QUIET), "--out", "plain"])
    assert ended.value.code == 0
    return path / "plain"


@pytest.fixture
def plain(undisturbed):
    """A copy of that run, in the folder `plain`."""
    shutil.copytree(undisturbed, "plain")
    return "plain"


# -- the hardware is to blame


def test_a_fault_of_the_hardware_leaves_no_trace_in_the_numbers(fz, plain, monkeypatch):
    plant(monkeypatch, flipped([7]))
    out = ok(fz(*QUIET, *BACK, "--out", "run"))
    assert "step 8: the gradient is not finite; back to step 6, to try the batch of sample 28 again" in out
    assert "step 8: went well when it was tried again: the batch is sound, and a fault of the hardware likely" in out
    assert_same(leaves("run"), leaves(plain))
    assert rows("run") == rows(plain)
    said = record("run")
    assert said["skips"] == said["tried"] == [] and said["back_to"] is None
    assert [(one["step"], one["to"], one["left_out"]) for one in said["rollbacks"]] == [(8, 6, False)]


@pytest.mark.slow
def test_a_fault_before_the_first_checkpoint_begins_anew(fz, plain, monkeypatch):
    plant(monkeypatch, flipped([1]))
    assert "step 2: the gradient is not finite; back to step 0" in ok(fz(*QUIET, *BACK, "--out", "run"))
    assert_same(leaves("run"), leaves(plain))
    assert rows("run") == rows(plain)


def test_a_checkpoint_with_a_value_that_is_not_finite_is_passed_over(fz, plain, monkeypatch):
    # The number goes wrong behind step 6, and is saved.
    done = []

    def before(state, batch):
        def after(state):
            if int(state.step) == 6 and not done:
                done.append(block(state).view(-1)[3].copy_(torch.tensor(float("nan"))))

        return state, batch, after

    plant(monkeypatch, before)
    out = ok(fz(*QUIET, *BACK, "--out", "run"))
    assert "passed over run/checkpoints/step-00000006: a value in it is not finite" in out
    assert "step 7: the gradient is not finite; back to step 3" in out
    assert_same(leaves("run"), leaves(plain))
    assert rows("run") == rows(plain)


def test_a_damaged_checkpoint_is_passed_over(fz, plain, monkeypatch):
    broken = []

    def before(state, batch):
        if int(state.step) == 7 and not broken:
            broken.append(damage(Path("run/checkpoints/step-00000006")))
        return flip(state, batch)

    flip = flipped([7])
    plant(monkeypatch, before)
    out = ok(fz(*QUIET, *BACK, "--out", "run"))
    assert "passed over run/checkpoints/step-00000006: " in out and "back to step 3" in out
    assert_same(leaves("run"), leaves(plain))


def damage(path):
    """Flip a bit in the middle of every file of a checkpoint's leaves."""
    for file in path.rglob("*"):
        if file.is_file() and "/c" in str(file.relative_to(path)):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
    return path


@pytest.mark.slow
def test_it_goes_back_as_far_as_it_is_told(fz, plain, monkeypatch):
    plant(monkeypatch, flipped([8]))
    out = ok(fz(*QUIET, *BACK, *sets("guard.rollback_steps=3"), "--out", "run"))
    assert "step 9: the gradient is not finite; back to step 3" in out  # 6 is 2 steps back only
    assert_same(leaves("run"), leaves(plain))
    assert rows("run") == rows(plain)


@pytest.mark.parametrize(("back", "order"), [(0, [9, 6, 3]), (2, [6, 3]), (6, [3]), (8, [])])
def test_the_newest_far_enough_back_comes_first_and_then_the_oldest(back, order, fz, plain, monkeypatch):
    monkeypatch.setattr(checkpoint, "steps", lambda home: [3, 6, 9, 12])
    fault = rollback.Fault(10, 40, "why")
    rest = [step for step in (3, 6, 9) if step not in order]  # 12 is behind the fault
    found, init = rollback.candidates(config.Guard(rollback_steps=back), Path(plain), Path(plain, "checkpoints"), fault)
    assert found == order + rest and init == ""


# -- the data is to blame


def without(fz, name, skips, monkeypatch):
    """The run of nothing but sound data that leaves these samples out from its beginning."""
    with monkeypatch.context() as patch:
        patch.setattr(rollback, "read_log", lambda folder: rollback.RollbackLog(skips, [], None, 0, 0, []))
        ok(fz(*QUIET, "--out", name))
    return name


@pytest.mark.slow
def test_a_bad_batch_is_left_out_for_good(fz, plain, monkeypatch):
    expected = without(fz, "expected", [[28, BATCH], [36, BATCH]], monkeypatch)
    bad, worse = poisoned(28), poisoned(36)

    def before(state, batch):
        state, batch, after = bad(state, batch)
        state, batch, also = worse(state, batch)
        return state, batch, lambda state: (after(state), also(state))

    plant(monkeypatch, before)
    out = ok(fz(*QUIET, *BACK, "--out", "run"))
    assert "step 8: the gradient is not finite; back to step 6, to try the batch of sample 28 again" in out
    assert (
        "step 8: the gradient is not finite again with the same batch, so the data is to blame; back to step "
        "6, and samples 28 to 31"
    ) in out
    assert "samples 36 to 39 are left out" in out and "went well" not in out
    assert record("run")["skips"] == [[28, BATCH], [36, BATCH]] and rollback.skips_of(Path("run")) == [
        (28, BATCH),
        (36, BATCH),
    ]
    assert_same(leaves("run"), leaves(expected))
    assert rows("run") == rows(expected) != rows(plain)
    assert [row["step"] for row in rows("run")] == list(range(1, 13))


@pytest.mark.slow
def test_a_run_with_a_batch_left_out_is_resumed_to_the_bit(fz, plain, monkeypatch):
    plant(monkeypatch, poisoned(16))
    ok(fz(*QUIET, *BACK, "--out", "whole"))
    ok(fz(*QUIET, *BACK, "--out", "parts", "--stop-at", 8))
    ok(fz("--out", "parts", "--resume", "--prompt", "", "--peak-tflops", 1))
    assert record("whole")["skips"] == [[16, BATCH]]
    assert_same(leaves("parts"), leaves("whole"))
    assert rows("parts") == rows("whole")


@pytest.mark.slow
def test_a_spike_in_the_data_is_left_out(fz, plain, monkeypatch):
    settings = sets("guard.spike=rollback", "guard.sigmas=2.0", "guard.window=3", "guard.warmup=4")
    with monkeypatch.context() as patch:
        patch.setattr(rollback, "read_log", lambda folder: rollback.RollbackLog([[28, BATCH]], [], None, 0, 0, []))
        ok(fz(*QUIET, *settings, "--out", "expected"))
    bad = batch_of(28)

    def before(state, batch):
        if torch.equal(batch["tokens"], bad):
            batch = {**batch, "targets": 255 - batch["targets"]}  # nothing of the kind is in the text
        return state, batch, lambda state: None

    plant(monkeypatch, before)
    out = ok(fz(*QUIET, *settings, "--out", "run"))
    assert "step 8: the loss is a spike (" in out and "samples 28 to 31 are left out" in out
    assert_same(leaves("run"), leaves("expected"))
    assert rows("run") == rows("expected")
    assert int(leaves("run")[f"extra/{LOSS}/count"]) == 12
    # Skipped only, the row says why.
    skips = [part.replace("rollback", "skip") for part in settings]
    ok(fz(*QUIET, *skips, "--out", "skips"))
    (row,) = [row for row in rows("skips") if row["skipped"]]
    assert row["step"] == 8 and row["reason"] == "spike" and row["loss"] > rows(plain)[7]["loss"]


def test_a_step_that_is_only_skipped_says_why(fz, plain, monkeypatch):
    plant(monkeypatch, poisoned(28))
    ok(fz(*QUIET, "--out", "run"))
    (row,) = [row for row in rows("run") if row["skipped"]]
    assert row["step"] == 8 and row["reason"] == "nonfinite" and row["grad_norm"] is None
    assert not Path("run", rollback.SKIPS).exists() and all("reason" not in row for row in rows(plain))


# -- the end


def test_a_run_that_comes_no_further_ends(fz, plain, monkeypatch):
    def before(state, batch):
        weight = block(state).view(-1)
        kept = weight[3].clone()
        if int(state.step) >= 7:
            weight[3] = float("nan")
        return state, batch, lambda state: block(state).view(-1)[3].copy_(kept)

    plant(monkeypatch, before)
    code, out, err = fz(*QUIET, *BACK, *sets("guard.max_rollbacks=3"), "--out", "run")
    assert code == 2 and err == (
        "fzero: error: step 8: the gradient is not finite, and the run has gone back 3 times without coming to a "
        "checkpoint at or after "
        "step 8; lower --lr, or look at the hardware (guard.max_rollbacks is 3)\n"
    )
    assert out.count("back to step 6") == 3 and record("run")["skips"] == [[28, BATCH]]
    # A checkpoint behind the fault is progress: the count begins anew.
    assert [one["sample"] for one in record("run")["rollbacks"]] == [28, 28, 32]


def test_progress_begins_the_count_anew(fz, plain, monkeypatch):
    plant(monkeypatch, flipped([4, 7, 10]))
    ok(fz(*QUIET, *BACK, *sets("guard.max_rollbacks=1"), "--out", "run"))
    assert len(record("run")["rollbacks"]) == 3 and record("run")["in_a_row"] == 1
    assert_same(leaves("run"), leaves(plain))


@pytest.mark.slow
def test_a_run_may_stop_at_the_first(fz, plain, monkeypatch):
    plant(monkeypatch, flipped([7]))
    code, _, err = fz(*QUIET, *sets("guard.nonfinite=stop"), "--out", "run")
    assert code == 2 and err == (
        "fzero: error: step 8: the gradient is not finite, with the batch of sample 28; guard.nonfinite=stop "
        "ends the run here\n"
    )
    # As nothing of the step was kept, the run goes on from its checkpoint as if it had not been.
    ok(fz("--out", "run", "--resume", "--prompt", "", "--peak-tflops", 1))
    assert_same(leaves("run"), leaves(plain))
    assert rows("run") == rows(plain)


def test_the_last_step_is_compared_before_it_is_saved(fz, monkeypatch):
    put, calls = sdc_check.Digests.reduce_group, []

    def wrong(self, part, names, grads, **options):
        calls.append(part)
        if len(calls) == 2:
            grads = [grad + 1.0 for grad in grads]
        put(self, part, names, grads, **options)

    monkeypatch.setattr(sdc_check.Digests, "reduce_group", wrong)
    args = [arg.replace("checkpoint_every=3", "checkpoint_every=100") for arg in QUIET]
    code, _, err = fz(*args, *sets("guard.check_every=100"), "--out", "run")
    assert code == 2 and "step 12: rank 0 computes one micro-batch twice and differs from itself, first in " in err
    assert err.count("\n") == 1 and checkpoint.steps(Path("run/checkpoints")) == []


def test_the_memory_of_a_state_is_given_back_whoever_holds_it():
    state = {"a": torch.ones(1000), "b": (torch.ones(3), ())}
    rollback.free_state(state)
    assert [leaf.untyped_storage().size() for leaf in pytree.leaves(state)] == [0, 0]


# -- kills


class Killed(BaseException):
    """In the place of SIGKILL: nothing of ours catches it, under FZERO_TRACEBACK=1."""


@pytest.mark.exhaustive
def test_a_rollback_that_is_killed_at_any_instant_goes_on(fz, plain, monkeypatch):
    """Before each thing that a rollback does to the run folder; two of them, until the batch is left out."""
    bad = poisoned(28)
    plant(monkeypatch, bad)
    ok(fz(*QUIET, *BACK, *sets("guard.rollback_steps=3"), "--out", "expected"))
    number, killed = 0, True
    while killed:
        number += 1
        run, seen = f"killed-{number}", [0]
        with monkeypatch.context() as patch:
            patch.setenv("FZERO_TRACEBACK", "1")  # else the command line makes one line and exit code 1 of any error

            def instant(seen=seen, number=number):
                seen[0] += 1
                if seen[0] == number:
                    raise Killed

            for where, name in ((rollback, "write_text"), (checkpoint, "remove"), (run_folder, "cut_metrics")):
                fn = getattr(where, name)

                def after(*args, fn=fn, instant=instant, **kwargs):
                    instant()
                    return fn(*args, **kwargs)

                patch.setattr(where, name, after)
            try:
                with pytest.raises(SystemExit) as ended:
                    main.main(["pretrain", *QUIET, *BACK, *sets("guard.rollback_steps=3"), "--out", run])
                assert ended.value.code == 0
                killed = False
            except Killed:
                killed = True
        if killed:
            # Once it is decided, no checkpoint behind the step to go back to is taken.
            begun = 6 if number in (1, 5) else 3
            assert f"resuming {run} at step {begun} of 12" in ok(
                fz("--out", run, "--resume", "--prompt", "", "--peak-tflops", 1)
            )
        assert_same(leaves(run), leaves("expected"))
        assert rows(run) == rows("expected"), run
        assert record(run)["skips"] == [[28, BATCH]]
    assert number == 1 + 8  # two times: the record, a checkpoint, the rows, the record


def test_a_damaged_record_is_one_line(fz, plain):
    Path("plain", rollback.SKIPS).write_text("{")
    ok(fz(*QUIET, "--out", "run", "--stop-at", 4))
    Path("run", rollback.SKIPS).write_text('{"skips": 1}')
    code, _, err = fz("--out", "run", "--resume")
    assert (
        code == 2
        and err.startswith("fzero: error: run/skips.json: is not the record of a run's rollbacks")
        and err.count("\n") == 1
    )


# -- what goes together


REFUSED = {
    "guard.nonfinite is 'roll'": ["guard.nonfinite=roll"],
    "guard.sigmas is 0.0; it must be above 0": ["guard.spike=skip", "guard.sigmas=0.0"],
    "guard.window is 0; it must be at least 2": ["guard.spike=skip", "guard.window=0"],
    "guard.sigmas does nothing with guard.spike=off": ["guard.sigmas=3.0"],
    "guard.rollback_steps does nothing with no rollback": ["guard.rollback_steps=3"],
    "train.checkpoint_every is 0, so there is nothing to go back to": [
        "guard.spike=rollback",
        "train.checkpoint_every=0",
    ],
    "reach back 3; use train.keep_last=3": ["guard.nonfinite=rollback", "guard.rollback_steps=4"],
    "guard.nonfinite is stop and precision.policy is fp16": ["guard.nonfinite=stop", "precision.policy=fp16"],
    "a state on a disk cannot be put back while a run goes on; use skip": [
        "guard.nonfinite=rollback",
        'offload="opt=nvme"',
    ],
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_work_is_refused(said, fz):
    changed = {setting.partition("=")[0] for setting in REFUSED[said]}
    flags = [flag for flag in zip(QUIET[::2], QUIET[1::2]) if flag[1].partition("=")[0] not in changed]
    flags = [flag for flag in flags if flag[0] != "--precision" or "precision.policy" not in changed]
    code, _, err = fz(*[part for flag in flags for part in flag], *sets(*REFUSED[said]), "--out", "run")
    assert code == 2 and said in err and err.count("\n") == 1, err
    assert not Path("run").exists()


def test_the_defaults_are_those_of_a_run_without_a_guard():
    value = config_table.recipe("mlp-tiny")
    assert value.guard == config.Guard() and (value.guard.nonfinite, value.guard.spike, value.guard.check_every) == (
        "skip",
        "off",
        0,
    )
    assert value.guard.max_skipped == 50


# -- the order of the data


def test_samples_left_out_are_those_and_no_others():
    batch, skips = 4, [(16, 4), (4, 4), (20, 4), (32, 4)]
    kept = [first for first in range(0, 80, batch) if (first, 4) not in skips]
    found = [corpus.sample_of_cursor(step * batch, skips) for step in range(len(kept))]
    assert found == kept
    assert [corpus.sample_of_cursor(cursor, []) for cursor in (0, 4, 400)] == [0, 4, 400]


def test_a_batch_left_out_says_nothing_of_those_before_it():
    for cursor in range(0, 16, 4):
        assert corpus.sample_of_cursor(cursor, [(16, 4)]) == corpus.sample_of_cursor(cursor, []) == cursor


def test_the_parts_of_a_batch_are_those_of_every_mesh(fz, plain):
    from fzero.sharding import fake_mesh

    value, path = run_folder.read_config(Path(plain)), Path("plain/data")
    part = corpus.open_micro_batches(value, path)
    for sizes in ({}, {"dp": 2}, {"rp": 2}):
        size = 2 if sizes else 1
        for rank in range(size):
            mesh = fake_mesh(sizes, rank)
            batch = corpus.open_data(value, path, mesh)[0](20)
            own = [part(20, m) for m in range(mesh.data_rank, 2, mesh.data_size)]
            assert_same(batch, {name: torch.cat([one[name] for one in own]) for name in own[0]})
