"""Whole runs on the pretend GPU (pretend_gpu.py): rows are read one step late and are those of the CPU, nothing between
two plain steps leaves the device idle, and a run that ends badly has the rows of all its steps and one line."""

import functools
import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from pretend_gpu import pretend

from fzero.core import pytree, torch_private
from fzero.kernels import tuning
from fzero.planner import devices, machine
from fzero.planner.calibrate import case_timer, memory
from fzero.report import bars, sections_cost
from fzero.report.compare import value_of
from fzero.report.first_screen import final_table, outcomes
from fzero.report.run_reader import read_run
from fzero.report.values import Report
from fzero.run import pretrain, run_folder
from fzero.run.measure import step_records
from fzero.run.measure.metrics_rows import Meter
from fzero.train import capture

SIZES = {"d_model": 16, "n_layers": 1, "d_ff": 24}
LOOP = (
    "eval_every=0",
    "checkpoint_every=0",
    "measure_every=0",
    "eval_batches=1",
    "compiled=false",
    "kernels=reference",
)
NAMES = ("step", "loss", "grad_norm", "lr", "num_tokens", "skipped", "reason", "tokens", "val_loss", "digest")


@pytest.fixture
def train(fz, tmp_path, monkeypatch):
    """A function (name of the run, settings) -> (exit code, stdout, stderr) of a tiny run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("text.txt").write_text("\n".join(f"line {i}: {i * i}" for i in range(600)))
    words = ["--model", "mlp-tiny", "--data", "text.txt", "--batch", "4", "--micro-batch", "4", "--seq-len", "16"]
    words += ["--precision", "fp32", "--peak-tflops", "1", "--prompt", "", "--set", "precision.fp32_matmul=default"]
    usual = [*(f"model.{name}={size}" for name, size in SIZES.items()), *(f"train.{text}" for text in LOOP)]

    def run(out, *settings, steps=6, more=()):
        values = dict(text.split("=", 1) for text in (*usual, "optim.name=adamw", *settings))
        pairs = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
        return fz("pretrain", "--out", out, "--steps", str(steps), *words, *pairs, *more)

    return run


def rows(run):
    return [{name: row[name] for name in NAMES if name in row} for row in run_folder.read_metrics(Path(run))]


def before_each_step(monkeypatch, act):
    """`act(state, number)` is called before every step, with the number of steps made."""
    build, count = pretrain.build, []

    def planted(*args, **kwargs):
        job = build(*args, **kwargs)

        def step(state, batch):
            act(state, len(count))
            count.append(1)
            return job.train_step(state, batch)

        step.news = getattr(job.train_step, "news", [])
        return job._replace(train_step=step)

    monkeypatch.setattr(pretrain, "build", planted)


@pytest.mark.slow
def test_nothing_between_plain_steps_leaves_the_device_idle(train, monkeypatch):
    seen_at, fetch = [], Meter.fetch
    with pretend() as seen:

        def noted(meter, batches):
            written = len(Path("gpu/metrics.jsonl").read_text().splitlines())
            seen_at.append((written, Counter(seen.waits), Counter(seen.idle), len(meter.clock.events)))
            seen.unpinned.clear()
            return fetch(meter, batches)

        with monkeypatch.context() as patch:
            patch.setattr(Meter, "fetch", noted)
            code, _, err = train("gpu", steps=9, more=["--stop-at", 6])  # after a step that is not due for anything
        assert code == 0 and not seen.races and not seen.freed and not seen.unpinned, err
    # Each row is written when the next step is under way, the last one behind the loop.
    assert [written for written, *_ in seen_at] == [0, 0, 1, 2, 3, 4]
    for (_, waits, idle, _), (_, later_waits, later_idle, _) in itertools.pairwise(seen_at[2:]):
        assert not later_idle - idle
        assert {line.partition(":")[0] for _, line in later_waits - waits} == {
            "run/measure/metrics_rows.py",
            "run/measure/timer.py",
        }
    spare = [events for *_, events in seen_at]
    assert spare[3] == spare[4] == spare[5]  # used again: none is made
    assert train("cpu", "device=cpu", steps=9, more=["--stop-at", 6])[0] == 0
    assert rows("gpu") == rows("cpu") and len(rows("gpu")) == 6
    ours, theirs = ([*run_folder.read_metrics(Path(run))] for run in ("gpu", "cpu"))
    assert all("phases" not in row and row["wall_s"] > 0 for row in ours) and all("phases" in row for row in theirs)


@pytest.mark.slow
def test_steps_that_are_measured_have_phases_and_the_memory_of_gpu_and_host_apart(train, monkeypatch):
    reset = []
    with pretend(), monkeypatch.context() as patch:
        patch.setattr(step_records, "MEMORY_AT", 2)
        patch.setattr(torch.cuda, "memory_reserved", lambda device: 33 << 20)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: 30 << 20)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: reset.append(1))
        code, _, err = train("gpu", "train.measure_every=2", 'offload="opt=host"', steps=4)
        assert code == 0, err
    found = [*run_folder.read_metrics(Path("gpu"))]
    assert [row["step"] for row in found if "phases" in row] == [2, 4] and len(reset) == 3  # and of memory.json
    row = found[3]
    assert (row["gpu_peak_bytes"], row["gpu_reserved_bytes"], row["gpu_reserved_ratio"]) == (30 << 20, 33 << 20, 1.1)
    assert row["rss_peak_bytes"] > 50 << 20 and row["ranks"]["steps"] == 1 and "forward" in row["phases"]
    assert "gpu_peak_bytes" not in found[2]
    memory = json.loads(Path("gpu/memory.json").read_text())
    moments = 2 * 4 * run_folder.read_environment(Path("gpu"))["num_params"]
    assert memory["state"]["opt"] < 100 and memory["host_peak_bytes"] >= moments  # adam's, in the host's memory
    assert memory["timeline"][0]["parts"]["optimizer"] < 100
    run = read_run(Path("gpu"))
    assert value_of(run, "gpu_peak_bytes") == 30 << 20 and value_of(run, "host_peak_bytes") >= moments
    assert "keeps 34.60 MB, 1.100 times the 31.46 MB" in sections_cost.memory(run)[-1]
    assert "31.46 MB" in final_table(Report("", {}, "", [run], None), outcomes(Report("", {}, "", [run], None))).rows[0]
    steps, phases = bars.step_phases(run)
    assert steps == [2, 4] and all(value > 0 for value in phases["forward"])


@pytest.mark.slow
def test_a_rollback_on_the_gpu_leads_to_the_state_of_the_cpu(train, monkeypatch):
    def bad(state, number):
        if number == 4:  # once: bad hardware
            pytree.leaves(state.params)[-1].view(-1)[3] = float("nan")

    settings = ("train.checkpoint_every=3", "train.digest_every=6", "guard.nonfinite=rollback")
    with monkeypatch.context() as patch:
        before_each_step(patch, bad)
        code, _, err = train("cpu", "device=cpu", *settings)
        assert code == 0, err
    with pretend() as seen, monkeypatch.context() as patch:
        before_each_step(patch, bad)
        code, out, err = train("gpu", *settings)
        assert code == 0 and not seen.races and not seen.freed, err
    assert "step 5: the gradient is not finite; back to step 3" in out
    assert "step 5: went well when it was tried again" in out
    assert rows("gpu") == rows("cpu") and len(rows("gpu")) == 6 and rows("gpu")[-1]["digest"]


@pytest.mark.slow
def test_a_run_of_captured_steps_evaluates_saves_rolls_back_and_resumes(train, fz, monkeypatch):
    def bad(state, number):
        if number == 9:  # once: bad hardware
            pytree.leaves(state.params)[-1].view(-1)[3] = float("nan")

    settings = ("train.checkpoint_every=4", "train.digest_every=4", "guard.nonfinite=rollback", "train.eval_every=6")
    replays = Counter()
    with monkeypatch.context() as patch:
        before_each_step(patch, bad)
        assert train("cpu", "device=cpu", *settings, steps=12)[0] == 0
    with pretend() as seen, monkeypatch.context() as patch:
        before_each_step(patch, bad)
        patch.setattr(capture, "WARM_UP", 1)
        replay = capture.CapturedStep.replay
        patch.setattr(capture.CapturedStep, "replay", lambda *args: (replays.update([seen]), replay(*args))[1])
        code, out, err = train("gpu", "train.capture=auto", *settings, steps=12, more=["--stop-at", 11])
        assert code == 0 and not seen.races and not seen.freed, err
        assert out.count("capture: steps are captured: the host issues one in ") == 1
        made = replays.total()
        code, _, err = fz("pretrain", "--out", "gpu", "--resume", "--prompt", "", "--peak-tflops", "1")
        assert code == 0 and made >= 5, (err, made)
    assert rows("gpu") == rows("cpu") and len(rows("gpu")) == 12 and rows("gpu")[-1]["digest"]


@pytest.mark.slow
def test_a_bad_step_that_is_due_is_not_saved(train, monkeypatch):
    def bad(state, number):
        if number == 2:
            pytree.leaves(state.params)[-1].view(-1)[3] = float("nan")

    with pretend(), monkeypatch.context() as patch:
        before_each_step(patch, bad)
        code, _, err = train("gpu", "train.checkpoint_every=3", "guard.nonfinite=stop")
    assert code == 2 and "step 3: the gradient is not finite" in err
    assert not list(Path("gpu/checkpoints").glob("step-*")) and len(rows("gpu")) == 3


@pytest.mark.slow
def test_bench_measures_the_gpu_and_writes_a_whole_file(fz, tmp_path, monkeypatch):
    """Its seconds mean nothing here."""
    monkeypatch.setattr(machine, "SECONDS", dict.fromkeys(machine.SECONDS, 1e-3))
    monkeypatch.setattr(case_timer, "LEAST_S", 1e-6)
    monkeypatch.setattr(case_timer, "_KEPT", [None])  # the heap is not grown
    monkeypatch.setattr(memory, "SIZES", (4 << 10, 16 << 10))
    monkeypatch.setattr(memory, "FEW", (4 << 10,))
    monkeypatch.setattr(memory, "UNARY", {name: memory.UNARY[name] for name in ("aten.mul", "aten.cat")})
    monkeypatch.setattr(memory, "shapes", lambda quick: [(1, 8, 8, 8), (2, 8, 4, 8)])
    monkeypatch.setattr(memory, "ROWS", (1, 2))
    monkeypatch.setattr(memory, "measure_attention", lambda seconds: [])  # the libraries' forms are real GPUs' alone
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)  # Inductor has no pretend GPU
    monkeypatch.setattr(torch_private, "dynamo_reset", lambda: None, raising=False)
    monkeypatch.setattr(machine, "have_compiler", lambda: True)
    rates = machine.host_rates
    monkeypatch.setattr(machine, "host_rates", lambda: rates(1 << 12))
    monkeypatch.setattr(machine, "host_memory_rate", functools.partial(machine.host_memory_rate, 1 << 12))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    speeds = {}
    monkeypatch.setattr(tuning, "write_measured", lambda gpu, found: speeds.update({gpu: found}))
    path = tmp_path / "fzero/device.json"
    with pretend() as seen:
        code, out, err = fz("bench")
    assert len(speeds) == 1, err
    assert code == 0 and "Pretend H200" in out and not seen.races and not seen.freed and not seen.unpinned, err
    found = devices.device(path)
    assert (found.kind, found.processors, found.capability) == ("cuda", 132, (9, 0)) and found.measured
    (rates,) = found.rates
    kinds = ("bfloat16", "bfloat16/nt", "bfloat16/tn", "float32", "float16")
    assert {*rates.gemm} == {*kinds} and all(len(rows) for rows in rates.gemm.values())
    casts = {"aten._to_copy/float32", "aten._to_copy/bfloat16", "fused/bfloat16", "fused/float32"}
    assert casts < {*rates.kernels} and len(rates.bandwidth) == 2
    assert {*found.host} == {"read", "write"} and min(found.host.values()) > 0
    assert {*found.flops} == {"bfloat16", "float32", "float16"} and min(found.flops.values()) > 0
    assert found.host_memory_bytes and found.host_memory_bytes_s
    # All that the file has, a plan reads; each of these needs another part of it.
    tiny = ("--model", "llama-tiny", "--gpu", "here", "--set", "train.compiled=false", "--json")
    for more in ((), ("--offload", "params=host,grads=host,opt=host"), ("--offload", "acts=host", "--remat", "full")):
        code, out, err = fz("plan", *tiny, *more)
        report = json.loads(out)
        assert code == 0 and report["device"]["name"] == "Pretend H200" and report["step_s"] > 0, err
        assert ("host" in report["time"]["moving"]) == bool(more)


@pytest.mark.slow
def test_a_gpu_that_runs_out_of_memory_is_one_line_and_every_row_is_there(train, monkeypatch):
    def full(state, number):
        if number == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40.00 KiB. GPU 0 has ...")

    with pretend(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (10 << 10, 3 << 30))
        patch.setattr(torch.cuda, "memory_reserved", lambda device: 380 << 10)
        patch.setattr(torch.cuda, "memory_allocated", lambda device: 360 << 10)
        before_each_step(patch, full)
        code, _, err = train("gpu", "train.checkpoint_every=3", "train.memory_check=false")
    assert code == 2 and len(err.splitlines()) == 1, err
    for part in (
        "step 6: GPU 0, Pretend H200 is out of memory when 41.0 kB more were asked for",
        "(3.2 GB of GPU 0, Pretend H200 are held by other processes)",
        "about parameters",
        "optimizer state",
        "the newest checkpoint is gpu/checkpoints/step-00000003; ",
        "; go on with: fzero pretrain --out gpu --resume --offload opt=host",
    ):
        assert part in err, (part, err)
    assert [row["step"] for row in rows("gpu")] == [1, 2, 3, 4, 5]
