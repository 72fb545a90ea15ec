"""Saves that cannot be made: full disks, folders that may not be written, one failing rank; training goes on, or stops
with one line."""

import os
import shlex
import shutil
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from checkpoint_cases import assert_same_bits, contents
from launched import TINY, ended, start, write_text

from fzero import checkpoint
from fzero.checkpoint import save_state
from fzero.cli import main
from fzero.run import run_folder

MB = 1 << 20


@pytest.fixture(params=["ext4", "tmpfs"])
def disk(request, tmp_path):
    """A folder on a file system of about 40 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "tmpfs":
        line = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", folder]
    else:
        image = tmp_path / "image"
        with image.open("wb") as f:
            f.truncate(48 * MB)
        made = (
            shutil.which("mkfs.ext4")
            and subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-F", image], capture_output=True).returncode == 0
        )
        line = ["mount", "-o", "loop", image, folder] if made else ["false"]
    if os.geteuid() != 0 or subprocess.run(line, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def ballast(folder, left):
    """Fill a file system up but for so many bytes."""
    free = shutil.disk_usage(folder).free - left
    with (folder / "ballast").open("wb") as f:
        os.posix_fallocate(f.fileno(), 0, free)


def state_of(value):
    return {"w": torch.full((300, 1000), float(value)), "v": torch.arange(500_000) + value, "step": torch.tensor(value)}


@pytest.mark.each_value
@pytest.mark.parametrize("compress", ["", "zstd"])
@pytest.mark.parametrize("left", [2 * MB, 64 << 10, 8 << 10])
def test_a_full_disk(disk, left, compress):
    """A save of 10 MB for which there is no room fails with one line; what was there is sound; with room again the next
    one is made."""
    home = disk / "checkpoints"
    g = torch.Generator().manual_seed(0)
    noise = {"n": torch.randint(0, 255, (5 * MB,), generator=g, dtype=torch.uint8)}  # what zstd cannot make smaller
    with closing(checkpoint.Writer(home, keep_last=2, compress=compress)) as saving:
        saving.save({**state_of(1), **noise}, step=1)
        before = contents(saving.wait().path)
        ballast(disk, left)
        for step in (2, 3):
            saving.save({**state_of(step), **noise}, step=step)
            with pytest.raises(checkpoint.SaveFailed) as error:
                saving.wait()
            assert str(error.value).startswith(
                f"{home}/step-0000000{step}: the checkpoint could not be written: No space left on device"
            )
            assert "\n" not in str(error.value) and os.listdir(home) == ["step-00000001"]
            assert contents(home / "step-00000001") == before
        path = checkpoint.newest_sound(home)[0]
        assert_same_bits(checkpoint.restore(path, {**state_of(0), **noise}), {**state_of(1), **noise})
        (disk / "ballast").unlink()
        saving.save(state_of(4), step=4)
        assert saving.wait().step == 4 and checkpoint.steps(home) == [1, 4]
        assert checkpoint.verify(home / "step-00000004") == []


def test_a_disk_that_is_full_at_any_byte(disk):
    """With less and less room a save either fails, or is sound; no checkpoint is there that is not."""
    home, state, seen = (
        disk / "checkpoints",
        {"a": torch.arange(40_000), **{str(i): torch.ones(7) for i in range(20)}},
        set(),
    )
    checkpoint.save(home, state, step=1)
    size = 320_000 + 4096 * 2 * 45
    for i, left in enumerate(range(size, 0, -size // 24)):
        ballast(disk, left)
        try:
            seen.add(checkpoint.save(home, state, step=i + 2, keep_last=1) is not None)
        except checkpoint.SaveFailed as error:
            assert "No space left on device" in str(error)
            seen.add(False)
        assert len(checkpoint.steps(home)) == 1 and checkpoint.verify(checkpoint.latest(home)) == []
        (disk / "ballast").unlink()
    assert seen == {True, False}


def test_a_file_system_that_becomes_read_only(disk):
    home = disk / "checkpoints"
    with closing(checkpoint.Writer(home, keep_last=1)) as saving:
        saving.save(state_of(1), step=1)
        saving.wait()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for step in (2, 3):
            saving.save(state_of(step), step=step)
            with pytest.raises(checkpoint.SaveFailed, match="could not be written: Read-only file system"):
                saving.wait()
            assert checkpoint.verify(checkpoint.latest(home)) == [] and checkpoint.steps(home) == [1]
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        saving.save(state_of(4), step=4)
        assert saving.wait().step == 4 and checkpoint.steps(home) == [4]


def test_old_checkpoints_that_cannot_be_removed(disk):
    """The new one is complete; what is wrong is told."""
    home = disk / "checkpoints"
    with closing(checkpoint.Writer(home, keep_last=1)) as saving, pytest.MonkeyPatch.context() as patch:
        saving.save(state_of(1), step=1)
        saving.wait()

        def refused(*_, **__):
            raise PermissionError(1, "Operation not permitted", str(home / "step-00000001" / "manifest.json"))

        patch.setattr(checkpoint.directory, "remove", refused)
        saving.save(state_of(2), step=2)
        with pytest.raises(checkpoint.SaveFailed, match=r"Operation not permitted \(.*step-00000001/manifest.json\)"):
            saving.wait()
        assert checkpoint.verify(home / "step-00000002") == [] and checkpoint.steps(home) == [1, 2]
        patch.undo()
        saving.save(state_of(3), step=3)
        assert saving.wait().step == 3 and checkpoint.steps(home) == [3]


def test_a_folder_that_is_replaced_by_a_file(tmp_path):
    home = tmp_path / "checkpoints"
    with closing(checkpoint.Writer(home)) as saving:
        saving.save(state_of(1), step=1)
        saving.wait()
        home.rename(tmp_path / "away")
        home.write_text("")
        with pytest.raises(ValueError, match="checkpoints: is not a folder"):
            saving.save(state_of(2), step=2)
        home.unlink()
        (tmp_path / "away").rename(home)
        (home / "step-00000003").write_text("")
        saving.save(state_of(3), step=3)
        with pytest.raises(
            checkpoint.SaveFailed, match=r"step-00000003: the checkpoint could not be written: is a file"
        ):
            saving.wait()
        saving.save(state_of(4), step=4)
        assert saving.wait().step == 4 and checkpoint.steps(home) == [1, 4]


# ---- runs ----

RUN = shlex.split(
    "pretrain --model mlp-tiny --steps 12 --batch 4 --micro-batch 2 --seq-len 8 --precision fp32 --data text.txt "
    "--peak-tflops 1 "
    "--prompt '' --out run --set train.compiled=false --set precision.fp32_matmul=default --set train.eval_batches=1 "
    "--set train.log_every=1 --set train.checkpoint_every=2 --set model.d_model=16"
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    return tmp_path


def fz(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main.main([str(arg) for arg in args])
    said = capsys.readouterr()
    return end.value.code, said.out, said.err


def full_from(monkeypatch, first, last):
    """Writing of parts fails in the saves with these numbers, the first one being 1."""
    number, begin, write = [0], checkpoint.directory.begin, save_state.TileFile.write

    def begins(home, step):
        number[0] += 1
        return begin(home, step)

    def full(self, raw, slab):
        if first <= number[0] <= last:
            raise OSError(28, "No space left on device")
        return write(self, raw, slab)

    monkeypatch.setattr(checkpoint.directory, "begin", begins)
    monkeypatch.setattr(save_state.TileFile, "write", full)


def test_training_goes_on_where_a_checkpoint_cannot_be_written(here, monkeypatch, capsys):
    assert fz(capsys, *RUN, "--set", "train.keep_last=0")[0] == 0
    whole = [row["loss"] for row in run_folder.read_metrics(Path("run"))]
    Path("run").rename("whole")
    full_from(monkeypatch, 2, 3)
    code, out, err = fz(capsys, *RUN, "--set", "train.keep_last=0")
    lines = [line for line in (out + err).splitlines() if "could not be written" in line]
    assert code == 0 and len(lines) == 2
    for line, step in zip(lines, (4, 6)):
        assert (
            f"step-0000000{step}: the checkpoint could not be written: No space left on device; training goes on"
            in line
        )
    assert checkpoint.steps(Path("run/checkpoints")) == [2, 8, 10, 12]
    rows = list(run_folder.read_metrics(Path("run")))
    assert [row["loss"] for row in rows] == whole and [row["step"] for row in rows] == list(range(1, 13))
    told = [row["saved_step"] for row in rows if "saved_step" in row]
    assert told == sorted(set(told)) and set(told) <= {2, 8, 10}
    assert all(checkpoint.verify(checkpoint.step_folder("run/checkpoints", step)) == [] for step in (2, 8, 10, 12))


def test_training_stops_where_the_policy_says_so(here, monkeypatch, capsys):
    full_from(monkeypatch, 2, 9)
    code, _, err = fz(capsys, *RUN, "--set", "train.on_save_error=stop")
    assert code == 2 and err.count("\n") == 1
    assert err.startswith(
        "fzero: error: run/checkpoints/step-00000004: the checkpoint could not be written: No space left on device"
    )
    assert checkpoint.steps(Path("run/checkpoints")) == [2]
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert fz(capsys, "pretrain", "--out", "run", "--resume", "--peak-tflops", "1", "--prompt", "")[0] == 0
    assert len(list(run_folder.read_metrics(Path("run")))) == 12


def test_the_last_checkpoint_of_a_run_must_be_written(here, monkeypatch, capsys):
    full_from(monkeypatch, 6, 9)
    code, _, err = fz(capsys, *RUN)
    assert (
        code == 2
        and err.count("\n") == 1
        and "step-00000012: the checkpoint could not be written: No space left" in err
    )
    assert checkpoint.steps(Path("run/checkpoints")) == [8, 10]


WORKER = """
import os, signal, sys
from fzero.checkpoint import save_state
from fzero.cli.main import main
write, said = save_state.TileFile.write, []
def full(self, raw, slab):
    if os.environ["RANK"] == "1" and len(said) < int(os.environ["FAILS"]):
        said.append(1)
        if "KILL" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(28, "No space left on device")
    return write(self, raw, slab)
save_state.TileFile.write = full
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "policy", [pytest.param("continue", marks=pytest.mark.exhaustive), pytest.param("stop", marks=pytest.mark.slow)]
)
def test_one_rank_of_two_cannot_write(tmp_path, monkeypatch, policy):
    write_text(tmp_path)
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("FAILS", "1")
    args = (
        "--steps",
        6,
        "--zero",
        3,
        "--out",
        "run",
        "--prompt",
        "",
        "--set",
        "train.checkpoint_every=2",
        "--set",
        "train.keep_last=0",
    )
    args = (*args, "--set", f"train.on_save_error={policy}")
    code, out, said, codes = ended(tmp_path, start(tmp_path, 2, *TINY, *args, command=("worker.py",), fresh=True), 120)
    line = "run/checkpoints/step-00000002: the checkpoint could not be written: rank 1: No space left on device"
    home = tmp_path / "run" / "checkpoints"
    if policy == "continue":
        assert code == 0 and not said and out.count(line) == 1 and f"{line}; training goes on" in out
        assert checkpoint.steps(home) == [4, 6] and all(
            checkpoint.verify(checkpoint.step_folder(home, step)) == [] for step in (4, 6)
        )
    else:
        assert code != 0 and len(said) == 1 and line in said[0] and codes == [2, 2], (said, codes)
        assert checkpoint.steps(home) == []


@pytest.mark.exhaustive
def test_a_rank_that_is_killed_while_it_writes_ends_all(tmp_path, monkeypatch):
    """The other one waits for it in a thread, which must not keep its process."""
    write_text(tmp_path)
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("FAILS", "1")
    monkeypatch.setenv("KILL", "1")
    args = ("--steps", 1000, "--zero", 3, "--out", "run", "--prompt", "", "--set", "train.checkpoint_every=2")
    process, begin = start(tmp_path, 2, *TINY, *args, command=("worker.py",)), time.monotonic()
    code, _, said, codes = ended(tmp_path, process, 120)
    assert code != 0 and len(said) == 1 and "rank 1 is gone" in said[0] and codes == [-9, 2], (said, codes)
    assert time.monotonic() - begin < 60 and checkpoint.steps(tmp_path / "run" / "checkpoints") == []
