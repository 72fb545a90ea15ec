"""Where a run's numbers go: loggers by name, and what the terminal shows of them."""

import csv
import io
import sys
import types

import pytest
import torch

import fzero
from fzero import Metrics, models
from fzero.core import check_type
from fzero.core.compile import notify_compiling
from fzero.run import Options, build, config_table, loop, run_folder
from fzero.run.measure import flops, loggers
from fzero.run.measure.metrics_rows import show_progress
from fzero.sharding import fake_mesh, one_process


def row(step, **values):
    return {
        "step": step,
        "loss": 2.0 / step,
        "step_s": 1.0,
        "tokens_per_s": 10.0,
        "mfu": 0.5,
        "skipped": False,
    } | values


def rows_of(folder):
    return list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))


def test_a_resumed_run_makes_its_last_rows_again(tmp_path):
    with loggers.open_loggers(["csv"], tmp_path) as log:
        for step in (1, 2, 3):
            log(step, row(step))
    with loggers.open_loggers(["csv"], tmp_path, first=2) as log:
        log(3, row(3, loss=7.0))
        log(4, row(4))
    found = rows_of(tmp_path)
    assert [int(each["step"]) for each in found] == [1, 2, 3, 4]
    assert [each["loss"] for each in found] == ["2.0", "1.0", "7.0", "0.5"]


def test_a_column_that_comes_later_is_kept(tmp_path):
    """As val_loss, which only rows of evaluations have; also in the next attempt."""
    with loggers.open_loggers(["csv"], tmp_path) as log:
        log(1, row(1))
        log(2, row(2, val_loss=3.5))
        log(3, row(3))
    with loggers.open_loggers(["csv"], tmp_path, first=3) as log:
        log(4, row(4, val_loss=2.5, val_loss_ema=2.25))
    found = rows_of(tmp_path)
    assert [each["val_loss"] for each in found] == ["", "3.5", "", "2.5"]
    assert [each["val_loss_ema"] for each in found] == ["", "", "", "2.25"] and found[0]["loss"] == "2.0"


def test_an_error_of_the_run_does_not_name_the_file_of_a_logger(tmp_path):
    with pytest.raises(OSError, match=r"^\[Errno 28\] full$"), loggers.open_loggers(["csv"], tmp_path):
        raise OSError(28, "full")


def test_wandb_gets_the_numbers_and_the_config(tmp_path, monkeypatch):
    got = []
    run = types.SimpleNamespace(log=lambda values, step: got.append((step, values)), finish=lambda: got.append("end"))
    fake = types.SimpleNamespace(init=lambda **options: got.append(options) or run, __spec__=object())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with loggers.open_loggers(["wandb"], tmp_path, config={"zero": 3}) as log:
        log(1, {"step": 1, "loss": 2.0, "phases": {"forward": 1.0}})
    assert got[0]["config"] == {"zero": 3} and got[1:] == [(1, {"loss": 2.0}), "end"]


def test_one_function_takes_the_metrics_of_a_step_to_all_loggers_on_the_first_rank(tmp_path, monkeypatch):
    got = []

    class Board:
        def __init__(self, folder, purge_step):
            got.append((folder, purge_step))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            got.append("end")

        def add_scalar(self, name, value, step):
            got.append((name, value, step))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Board))
    monkeypatch.setattr(loggers.packages, "installed", lambda name: True)
    metrics = Metrics(
        torch.tensor(2.0), torch.tensor(8), torch.tensor(0.5), torch.tensor(False), torch.ones(()), {"z": 1.5}
    )
    for rank in (0, 1):
        mesh = fake_mesh({"dp": 2}, rank=rank)
        with fzero.open_loggers(["csv", "tensorboard"], str(tmp_path / f"{rank}"), first=6, mesh=mesh) as log:
            log(torch.tensor(7), metrics)
            log(8, {"loss": torch.ones(1), "names": ["a"], "many": torch.ones(2)})
    assert got[0] == (str(tmp_path / "0" / "tensorboard"), 7) and got[-1] == "end" and len(got) == 9
    assert ("extra/z", 1.5, 7) in got and ("skipped", False, 7) in got and ("loss", 1.0, 8) in got
    found = rows_of(tmp_path / "0")
    assert [(each["step"], each["loss"], each["num_tokens"]) for each in found] == [("7", "2.0", "8"), ("8", "1.0", "")]
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (["tensorbord"], "did you mean tensorboard"),
        ("csv", 'a list of texts, such as \\["csv"\\]'),
        ([1], "a list of texts"),
        (["wandb"], r"pip install fzero\[wandb\]"),
    ],
)
def test_names_that_are_no_loggers(value, said, monkeypatch):
    monkeypatch.setattr(loggers.packages, "installed", lambda name: False)
    with pytest.raises(ValueError, match=said):
        config_table.from_table({"train": {"loggers": value}})


def test_a_config_keeps_its_loggers():
    config = config_table.from_table({"train": {"loggers": ["csv"]}})
    assert config.train.loggers == ("csv",) and config_table.from_json(config_table.to_json(config)) == config
    assert check_type("x", [], tuple[str, ...]) == ()


@pytest.mark.parametrize("compiles", [True, False])
def test_lines_predict_nothing_from_the_first_step(compiles):
    lines = []
    with show_progress(4, 9, every=1, bar=False, say=lines.append) as show:
        for step in (5, 6, 9):
            if compiles:
                notify_compiling()  # said once
            show(row(step, step_s=60.0 if step == 5 else 1.0))
    assert lines[0].startswith("compiling (about 25 s") == compiles
    first, second, last = lines[compiles:]
    assert "ETA" not in first and second.endswith("ETA 0:03") and last.endswith("ETA 0:00")


def test_a_bar_counts_seconds_while_it_compiles(monkeypatch):
    text = io.StringIO()
    monkeypatch.setattr(sys, "stderr", text)
    with show_progress(0, 3, every=1, bar=True, say=print) as show:
        notify_compiling()
        for step in (1, 2, 3):
            show(row(step))
    assert "compiling (about 25 s" in text.getvalue() and "3/3" in text.getvalue()


@pytest.mark.parametrize(
    ("bf16", "fp32", "steps"),
    [(1e15, 1e15, 400), (1.4e12, 2e11, 400), (1e15, 7e10, 200), (1.5e11, 1.5e11, 200), (1e11, 1e11, 100)],
)
def test_the_default_run_has_the_longest_length_that_ends_in_time(bf16, fp32, steps, monkeypatch):
    """At 35 TFLOP of 400 steps, at the rate of products, and a third as much at that of float32 for all else."""
    rates = {torch.bfloat16: bf16, torch.float32: fp32}
    monkeypatch.setattr(flops, "peak_rate", lambda dtype, processes, device: rates[dtype])
    table = {"precision": {"policy": "bf16"}, "train": {"compiled": False}}
    job = build.build(config_table.from_table(table), one_process(), None)
    assert flops.fitting_steps(job) == steps
    short = flops.shortened(job.config, steps)
    assert short == config_table.from_table({**table, "train": {"compiled": False, "steps": steps}})
    large = config_table.from_table({"preset": "gpt2-124m", **table, "data": {"seq_len": 64}})
    assert models.preset("gpt2-124m") == large.model
    assert flops.fitting_steps(job._replace(config=large)) == large.train.steps


@pytest.mark.slow
def test_a_function_hears_of_each_step_and_what_it_raises_ends_the_run(tmp_path):
    """With the rows of metrics.jsonl; the run is then resumed from Python."""
    (tmp_path / "text.txt").write_text("a line of text\n" * 40)
    train = {"steps": 4, "batch": 2, "micro_batch": 2, "compiled": False, "loggers": [], "checkpoint_every": 1}
    table = {"preset": "mlp-tiny", "data": {"path": str(tmp_path / "text.txt"), "seq_len": 4}, "train": train}
    heard, run = [], tmp_path / "run"

    def log(step, row):
        heard.append((step, row))
        if len(heard) == 3:
            raise RuntimeError("enough")

    quiet = Options(say=lambda line: None, sample="", peak_flops=1e12)
    with pytest.raises(RuntimeError, match="enough"):
        loop.train_run(run, config_table.from_table(table), options=quiet._replace(log=log))
    assert [step for step, _ in heard] == [1, 2, 3]
    assert [row for _, row in heard] == list(run_folder.read_metrics(run))
    assert loop.train_run(run, options=quiet._replace(log=log)) == 0
    assert heard[-1] == (4, list(run_folder.read_metrics(run))[-1])
    with pytest.raises(ValueError, match="is complete"):
        loop.train_run(run)
