"""`torchrun -m fzero pretrain`: the run of one process on any mesh, and one line where a rank fails."""

import json
import os
import signal
import time

import forked
import pytest
from launched import SHORT, TINY, ended, hashes, ranks_of, rows, start, started, torchrun, write_text

from fzero import checkpoint
from fzero.cli import main
from fzero.report import curves


@pytest.fixture(scope="module")
def folder(tmp_path_factory, pictures):
    """A folder with a text and two runs of one process on it: `fast` and `canonical`."""
    path = tmp_path_factory.mktemp("torchrun")
    write_text(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for reduce in ("canonical", "fast"):
            if reduce == "fast":
                patch.setattr(curves, "write_pictures", pictures)  # as the launched runs that are compared have it
            with pytest.raises(SystemExit) as ended:
                main.main(
                    ["pretrain", *TINY, *map(str, SHORT), "--reduce", reduce, "--out", reduce, "--prompt", "line "]
                )
            assert ended.value.code == 0
    return path


MESHES = {
    "dp4 stage 3": ("--mesh", "dp=4", "--zero", 3),
    "dp2 tp2 stage 3 sequence": ("--mesh", "dp=2,tp=2", "--zero", 3, "--sequence", "--prefetch", 0),
    "dp2 rp2 stage 2 once": ("--mesh", "dp=2,rp=2", "--zero", 2, "--reduce", "once"),
    "dp2 pp2 stage 3": ("--mesh", "dp=2,pp=2", "--zero", 3, "--schedule", "gpipe"),
}


RARE = ("dp2 tp2 stage 3 sequence", "dp2 rp2 stage 2 once")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name in RARE else pytest.mark.slow) for name in MESHES],
)
def test_the_loss_curve_is_that_of_one_process(folder, name, monkeypatch):
    monkeypatch.setenv("PICTURES", "1")
    run = folder / name.replace(" ", "-")
    out = torchrun(folder, 4, *TINY, *SHORT, *MESHES[name], "--out", run.name, "--prompt", "line ")
    expected, found = rows(folder / "fast"), rows(run)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(found, expected):
        assert a == pytest.approx(b, rel=1e-4)
    assert [sorted(row) for row in found] == [sorted(row) for row in expected] and "val_loss_ema" in found[-1]
    # Rank 0 alone speaks, writes and samples.
    assert out.count("step 6/6") == out.count("a sample") == out.count("written:") == 1 and "\nline " in out
    assert "4 processes on " in out and f"ZeRO stage {MESHES[name][3]} on" in out
    assert {p.name for p in run.iterdir()} == {p.name for p in (folder / "fast").iterdir()}
    assert hashes(run).keys() == hashes(folder / "fast").keys()


@pytest.mark.slow
def test_canonical_sums_are_equal_to_the_bit_and_a_run_goes_on_on_other_meshes(folder):
    torchrun(
        folder, 4, *TINY, *SHORT, "--zero", 3, "--reduce", "canonical", "--out", "parts", "--stop-at", 2, "--prompt", ""
    )
    out = torchrun(folder, 2, "--out", "parts", "--resume", "--zero", 1, "--peak-tflops", 1, "--prompt", "")
    assert (
        "resuming parts at step 2 of 6" in out
        and "mesh: dp=2 for 2 processes in place of dp=4; 8 micro-batches a step, canonical sums" in out
    )
    assert rows(folder / "parts") == rows(folder / "canonical") != rows(folder / "fast")
    assert hashes(folder / "parts") == hashes(folder / "canonical")


def one_line(result, words, codes):
    code, out, said, found = result
    assert code != 0 and len(said) == 1 and said[0].startswith("fzero: error: rank "), said
    for word in words:
        assert word in said[0]
    assert found == codes, found
    return out


@pytest.mark.exhaustive
def test_a_mesh_that_does_not_fit(folder):
    args = [*TINY, *SHORT, "--mesh", "dp=3", "--out", "new"]
    one_line(
        ended(folder, start(folder, 2, *args)),
        ["mesh dp=3 asks for 3 processes and this run has 2", "--nproc-per-node 3"],
        [2, 2],
    )
    assert not (folder / "new").exists()


@pytest.mark.slow
def test_ranks_with_different_flags(folder):
    script = f'exec {forked.programs()}/fzero "$@" --seed $((RANK * 7))'
    process = start(folder, 2, *TINY, *SHORT, "--out", "new", command=("--no-python", "bash", "-c", script, "fzero"))
    one_line(
        ended(folder, process),
        ["train.seed is 7 on rank 1 and 0 on rank 0; start all ranks with the same command"],
        [2, 2],
    )
    assert not (folder / "new").exists()


@pytest.mark.slow
def test_a_killed_rank_ends_all(folder):
    process, begin = started(folder, "killed", 2, "--zero", 3), time.monotonic()
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    one_line(ended(folder, process), ["rank 0: ", "rank 1 is gone", "--resume"], [-9, 2])
    assert time.monotonic() - begin < 90


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_same_step(folder):
    process = started(folder, "stopped", 2, "--zero", 2)
    os.kill(ranks_of(process)[1], signal.SIGTERM)
    code, out, said, _ = ended(folder, process)
    step = len(rows(folder / "stopped"))
    assert code == 0 and not said
    assert f"stopped after step {step} of 1000000; resume with: torchrun --nproc-per-node 2 -m fzero pretrain" in out
    assert checkpoint.steps(folder / "stopped" / "checkpoints") == [step]
    environment = json.loads((folder / "stopped" / "environment.json").read_text())
    assert environment["processes"] == 2
