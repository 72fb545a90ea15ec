"""What bounds each part of a planned step: the parts are the step's time, and none is faster than its limits."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import fzero
from fzero.cli import main
from fzero.planner import device_for, plan_report


@pytest.fixture(scope="module")
def report():
    return fzero.plan("llama-tiny", {"dp": 4}, gpu="h200", settings={"zero": 3, "train.compiled": False})


SETTINGS = {
    "stage 3": {"mesh": {"dp": 4}, "zero": 3},
    "two axes": {"mesh": {"dp": 2, "tp": 2}, "zero": 1},
    "states on the host": {"mesh": {"dp": 1}, "offload": "opt=host,grads=host"},
    "states on a disk, recomputed": {"mesh": {"dp": 2}, "zero": 2, "offload": "opt=nvme", "train.remat": "full"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_parts_are_the_step(name):
    """What overlaps is not counted twice: operators, waits, the host and what is not simulated."""
    settings = dict(SETTINGS[name])
    device = dataclasses.replace(device_for("h200"), nvme={"read": 5e9, "write": 3e9})
    report = fzero.plan("llama-tiny", settings.pop("mesh"), gpu=device, settings={**settings, "train.compiled": False})
    parts = plan_report.roofline(report)
    assert sum(part.seconds for part in parts) == pytest.approx(report.step_s, rel=1e-3)
    assert [part.seconds for part in parts] == sorted((part.seconds for part in parts), reverse=True)


def test_no_part_of_a_data_sheet_is_faster_than_its_limit(report):
    parts = plan_report.roofline(report)
    assert all(part.peak <= 1.0 and part.bandwidth <= 1.0 for part in parts)
    assert 0.0 < plan_report.least_step(report) < report.step_s
    operators = [part for part in parts if part.peak or part.bandwidth]
    assert all((part.bound == "compute") == (part.peak > part.bandwidth) for part in operators)


def test_twice_the_bandwidth_halves_the_time_at_the_limit_of_what_memory_bounds(report):
    device = device_for("h200")
    faster = dataclasses.replace(device, bandwidth_bytes_s=2.0 * device.bandwidth_bytes_s)
    other = fzero.plan("llama-tiny", {"dp": 4}, gpu=faster, settings={"zero": 3, "train.compiled": False})
    for name, (_, flop_s, bytes_s) in report.time["parts"].items():
        assert other.time["parts"][name][1:] == pytest.approx((flop_s, 0.5 * bytes_s))


def test_a_plan_without_times_is_refused(report):
    with pytest.raises(ValueError, match="run fzero bench"):
        plan_report.roofline(report._replace(step_s=None))


def test_the_command_prints_it_and_refuses_what_has_many_plans():
    given = ["plan", "--model", "llama-tiny", "--set", "train.compiled=false", "--roofline"]
    shown = CliRunner().invoke(main.cli, given)
    assert shown.exit_code == 0 and "of peak FLOPs" in shown.output and "at the limits of a" in shown.output
    refused = CliRunner().invoke(main.cli, [*given, "--json"])
    assert isinstance(refused.exception, ValueError) and "time.parts" in str(refused.exception)


@pytest.mark.parametrize("name", ["roofline", "roofline-float8"])
def test_the_table_is_that_of_the_results(name, monkeypatch):
    root = Path(fzero.__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(str(root))
    found = json.loads((root / f"results/{name}.json").read_text())["cases"]
    table = importlib.import_module("roofline").markdown(found)
    assert (root / f"results/{name}.md").read_text() == table + "\n"
