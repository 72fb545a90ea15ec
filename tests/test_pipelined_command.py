"""`torchrun -m fzero pretrain --mesh pp=4 --schedule ...`: the run of one process, whose checkpoint goes on on any
other mesh, is sampled from, and whose report draws the schedule; and one line where a rank ends in the middle of a row.
"""

import dataclasses
import json
import os
import signal
import time

import pytest
from launched import LONG, SHORT, TINY, ended, folder_with_run, ranks_of, rows, start, steps_of, torchrun, until
from test_bench_machine import HERE

import fzero
from fzero.planner import machine, with_layout
from fzero.run import auto_resume, device_file, run_folder
from fzero.sharding import pipeline

LAYERS = 8  # one for each stage of 4 ranks with 2 chunks
MODEL = [part.replace("model.n_layers=2", f"model.n_layers={LAYERS}") for part in TINY]
MODEL += ["--set", "train.measure_every=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text and `alone`, a run of one process on it."""
    return folder_with_run(tmp_path_factory, "pipelined", "alone", *MODEL, *SHORT)


RUNS = {  # ranks, its mesh and schedule, and what it goes on with
    "zb-v": (4, ["--mesh", "pp=4", "--schedule", "zb-v", "--chunks", 2], (1, [])),
    "zb-h1": (4, ["--mesh", "pp=4", "--schedule", "zb-h1", "--zero", 3], (2, ["--mesh", "dp=2"])),
    "dualpipe-v": (
        4, ["--mesh", "pp=4", "--schedule", "dualpipe-v", "--chunks", 2, "--zero", 1],
        (2, ["--mesh", "pp=2", "--schedule", "interleaved", "--chunks", 2]),
    ),
    "eight": (
        8, ["--mesh", "dp=2,pp=4", "--schedule", "zb-h1", "--zero", 3, "--layout", "3,2,2,1"],
        (4, ["--mesh", "pp=2,tp=2", "--schedule", "1f1b"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "zb-v" else pytest.mark.exhaustive) for n in RUNS]
)
def test_a_run_equals_one_process_and_goes_on_elsewhere(folder, name, fz, monkeypatch):
    n, how, (others, mesh) = RUNS[name]
    out = torchrun(folder, n, *MODEL, *SHORT, *how, "--stop-at", 4, "--out", name, "--prompt", "", timeout_s=300)
    assert f"{how[3]} of " in out
    monkeypatch.chdir(folder)
    acts = json.loads((folder / name / "pipeline.json").read_text())
    s = pipeline.read_schedule(acts["schedule"])
    assert [len(row) for row in acts["start"]] == [len(row) for row in s.rows]
    assert s.name == how[3] and acts["step"] <= 4
    assert fz("report", name)[0] == 0
    report = folder / name / "report"
    assert f"{s.name}, {s.parts} micro-batches" in (report / "report.html").read_text()
    assert {"pipeline_measured.svg", "pipeline_played.svg"} <= {path.name for path in report.iterdir()}
    on = ["--out", name, "--resume", "--peak-tflops", 1, "--prompt", "", *mesh]
    if others == 1:
        code, out, err = fz("pretrain", *on, "--mesh", "")
        assert code == 0, err
    else:
        out = torchrun(folder, others, *on, timeout_s=300)
    assert f"resuming {name} at step 4 of 6" in out
    assert ("layout 3,2,2,1 is of 4 stages and there are 2 now" in out) == (name == "eight")
    expected, found = rows(folder / "alone"), rows(folder / name)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(found, expected):
        assert a == pytest.approx(b, rel=1e-4)
    sampled = [
        fz("sample", run, "--prompt", "line ", "--max-new-tokens", 8, "--temperature", 0) for run in (name, "alone")
    ]
    assert sampled[0] == sampled[1] and sampled[0][0] == 0


@pytest.mark.exhaustive
def test_delayed_updates_over_stages_cut_by_cost_equal_one_process(folder, fz, monkeypatch):
    """The layers are cut as a plan of this machine cuts them, and the run resumes with their numbers."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    machine.save(HERE, device_file())
    delayed = [*MODEL, *SHORT, "--update", "delayed", "--set", "train.updates=2", "--prompt", ""]
    how = ["--mesh", "pp=2", "--layout", "cost", "--stop-at", 3, "--out", "delayed"]
    torchrun(folder, 2, *delayed, *how, timeout_s=300)
    monkeypatch.chdir(folder)
    recorded = run_folder.read_config(folder / "delayed")
    asked = dataclasses.replace(recorded, pipeline=fzero.Pipeline(layout="cost"))
    assert recorded.pipeline == with_layout(asked, {"pp": 2}, HERE).pipeline != asked.pipeline
    assert auto_resume.allowed_changes({"pipeline": {"layout": "cost"}}, folder / "delayed", None) == {}
    again = ["pretrain", "--out", "delayed", "--resume", "--peak-tflops", 1, "--prompt", ""]
    refused = fz(*again, "--layout", "cost")
    assert refused[0] == 2 and "the layers of each stage that the run began with" in refused[2]
    assert fz(*again, "--mesh", "")[0] == 0
    assert fz("pretrain", *delayed, "--peak-tflops", 1, "--out", "late")[0] == 0
    expected, found = rows(folder / "late"), rows(folder / "delayed")
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(found, expected):
        assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.exhaustive
def test_a_rank_killed_in_a_row_ends_all(folder):
    process = start(
        folder, 4, *MODEL, *LONG, "--mesh", "pp=4", "--schedule", "zb-h1", "--out", "killed", "--prompt", ""
    )
    until(lambda: steps_of(folder / "killed") >= 3, process)
    os.kill(ranks_of(process)[2], signal.SIGKILL)
    begin = time.monotonic()
    code, _, said, codes = ended(folder, process)
    assert code != 0 and len(said) == 1 and said[0].startswith("fzero: error: rank "), said
    assert "rank 2 is gone" in said[0] and "--resume" in said[0]
    assert codes == [-9, 2, 2, 2] and time.monotonic() - begin < 30


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "how, words",
    (
        (["--mesh", "pp=4", "--schedule", "dualpipe-v", "--chunks", 2, "--batch", 6], "at least 8 micro-batches"),
        (["--mesh", "pp=4", "--schedule", "zb-v", "--chunks", 2, "--layout", "2,2,2,2"], "8 stages"),
    ),
)
def test_what_does_not_fit_is_one_line_of_the_first_rank(folder, how, words):
    begin = time.monotonic()
    code, _, said, codes = ended(folder, start(folder, 4, *MODEL, *SHORT, *how, "--out", "new"))
    assert code != 0 and len(said) == 1 and words in said[0], said
    assert set(codes) == {2} and time.monotonic() - begin < 90 and not (folder / "new").exists()
