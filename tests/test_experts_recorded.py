"""What a run records of its experts, and the section of its report: by hand, from the counts of a step."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from moe_balance_cases import RATE, SIZES
from zero_cases import FP64, OPTIMIZERS, batch_for, model_of

import fzero
from fzero.report import ReportTable, figures
from fzero.report.sections import experts as section
from fzero.report.values import Picture
from fzero.run.measure.metrics_rows import pack_numbers
from fzero.run.measure.norms import imbalance, spread_of

ROOT = Path(__file__).resolve().parent.parent


def made(name, changes):
    model, tx = model_of(name, **changes), OPTIMIZERS["sgd"]
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=FP64)
    state = fzero.init_state(model, tx, plan, seed=3)
    state, metrics = fzero.make_train_step(model, tx, plan, micro_batches=2)(state, batch_for(0, 8))
    return model, plan, state, metrics


CASES = {
    "bias": ("moe dropless", SIZES["moe dropless"]),
    "capacity": ("moe dropless", {"capacity_factor": 0.75}),
    "deepseek": ("deepseek", SIZES["deepseek"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_s_counts_are_shares_by_layer(case):
    model, plan, state, metrics = made(*CASES[case])
    (found,) = spread_of(metrics.tables, state.params, plan, model.config.top_k)["experts"].values()
    stack = "blocks_experts" if case == "deepseek" else "blocks"
    load = metrics.tables[f"{stack}/moe/load"]
    every = 8 * 8 * model.config.top_k  # rows, positions, choices
    assert load.sum(-1).tolist() == [float(every)] * len(load)
    assert found["load"] == [[pytest.approx(n / every, rel=1e-5) for n in row] for row in load.tolist()]
    most = max(max(row) / (sum(row) / len(row)) for row in load.tolist())
    assert float(imbalance(metrics.tables)["imbalance"]) == pytest.approx(most)
    names, numbers = pack_numbers(metrics)
    assert float(numbers[names.index("imbalance")]) == pytest.approx(most)
    # Between that of a router that is sure and that of one that knows nothing.
    assert all(0.0 < one < float(torch.tensor(load.shape[1]).log()) + 1e-6 for one in found["entropy"])
    assert ("bias" in found) == (case != "capacity") and ("dropped" in found) == (case == "capacity")
    if case == "capacity":
        dropped = metrics.tables["blocks/moe/dropped"]
        assert 0 < float(dropped.sum()) < float(load.sum())
        assert found["dropped"] == [[pytest.approx(n / every, rel=1e-5) for n in row] for row in dropped.tolist()]
    else:
        assert {abs(x) for row in found["bias"] for x in row} <= {0.0, RATE}


def test_a_model_without_experts_records_nothing():
    _, plan, state, metrics = made("llama", {})
    assert imbalance(metrics.tables) == {} and spread_of(metrics.tables, state.params, plan, 1) == {}
    assert section(SimpleNamespace(series={"step": [1], "loss": [2.0]})) == []


def test_the_section_of_a_report():
    load = [[[0.5, 0.25, 0.25], [0.4, 0.3, 0.3]], None, [[0.3, 0.3, 0.4], [0.35, 0.35, 0.3]]]
    series = {
        "step": [1, 2, 3],
        "imbalance": [1.5, 1.3, 1.2],
        "experts.blocks.load": load,
        "experts.blocks.entropy": [[1.0, 1.05], None, [0.9, 0.95]],
        "experts.blocks.bias": [[[0.0] * 3] * 2, None, [[-0.01, 0.0, 0.02], [0.0, 0.0, 0.01]]],
    }
    parts = section(SimpleNamespace(series=series))
    (picture,) = (part for part in parts if isinstance(part, Picture))
    assert "1.50 at the first of them and 1.20 at the last" in picture.alt and "3 experts of 2 layers" in picture.alt
    svg = figures.svg(picture.draw)
    assert "layer 1" in svg and "experts of each layer" in svg and svg == figures.svg(picture.draw)
    (table,) = (part for part in parts if isinstance(part, ReportTable))
    assert table.head == ("layer", "most ÷ mean", "least ÷ mean", "router's entropy (nats)", "bias, least to most")
    assert table.rows[0] == ("0", "1.200", "0.9000", "0.9000", "-0.0100 to 0.0200")
    assert "1.500 in the first step, and 1.333 on the average of the last 3" in parts[-1]


# ---- the commands of the committed figures ---------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("balance", ["bias", "loss"])
def test_the_command_of_the_learning_figure_runs_and_is_reported(balance, tmp_path, fz):
    """At a tiny length, and of a text of our own."""
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 400)
    out = tmp_path / balance
    flags = ["--set", f"model.balance={balance}", "--steps", "3", "--batch", "4", "--seq-len", "64", "--prompt", ""]
    flags += ["--set", "train.compiled=false", "--set", "train.measure_every=1", "--set", "train.eval_every=0"]
    code, _, err = fz(
        "pretrain", "--model", "mixtral-tiny", "--data", str(tmp_path / "text.txt"), *flags, "--out", str(out)
    )
    assert code == 0, err
    code, _, err = fz("report", str(out))
    assert code == 0, err
    page = next(out.glob("**/*.html")).read_text()
    assert "most ÷ mean" in page and "Load of the experts of blocks" in page


@pytest.mark.exhaustive
def test_the_benchmark_runs():
    pytest.importorskip("transformers")
    command = [sys.executable, "benchmarks/moe.py", "--config", "tiny", "--smoke", "--batch", "1", "--seq-len", "32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert all(f"{name} " in done.stdout for name in ("fzero", "fzero eager", "loop", "transformers"))
