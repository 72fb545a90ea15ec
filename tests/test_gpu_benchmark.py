"""benchmarks/gpu.py: every part of it at tiny sizes on the CPU, so that on a GPU it has only to be started; and that it
goes on where it was."""

import argparse
import importlib
import json
import os
import re
import sys

import pytest
from test_pretend_triton import BENCHMARKS, ROOT

from fzero.planner import devices

pytestmark = pytest.mark.filterwarnings("ignore:.*its file system refuses direct transfers:UserWarning")
ARGS = argparse.Namespace(device="cpu", tiny=True, no_compile=True, op="")


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(BENCHMARKS)]))
    monkeypatch.delitem(sys.modules, "gpu", raising=False)
    return importlib.import_module("gpu")


def test_the_parts_are_short_and_their_order_is_that_of_the_first_hour(benchmark):
    assert all(0 < part.limit <= 540 for part in benchmark.PARTS.values())
    first = ["machine", "import", "step", "laws", "marked"]
    assert [*benchmark.PARTS][:5] == first and {"attention", "sanitizer", "ranks", "models"} < set(benchmark.PARTS)
    files = [ROOT / f"tests/test_{name}.py" for name in benchmark.TESTS.split()]
    assert len(files) > 10 and all(file.is_file() for file in files)
    assert len(benchmark.gpu_first.STEPS) >= 12 and len(importlib.import_module("gpu_attention").SHAPES) == 10
    assert len(benchmark.gpu_runs.PLANNED) == 10


def test_the_docs_name_the_parts_that_there_are(benchmark):
    table = (ROOT / "docs/gpu.md").read_text().partition("## The first hour on one")[2]
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|$", table, re.MULTILINE)
    assert [(name, int(limit)) for name, limit in rows] == [(n, part.limit) for n, part in benchmark.PARTS.items()]
    asked = [
        part
        for page in sorted(ROOT.glob("docs/*.md"))
        for part in re.findall(r"benchmarks/gpu\.py[^`\n]*--only (\S+)", page.read_text())
    ]
    assert asked and set(asked) <= set(benchmark.PARTS)


def names(part):
    marks = [pytest.mark.slow] if part in ("step", "models") else [pytest.mark.exhaustive]
    return pytest.param(part, marks=marks)


FIRST = "machine import step laws marked bench steps attention sanitizer"
PARTS = f"{FIRST} ranks models plans capture kernels largest long runs"


@pytest.mark.parametrize("part", [names(part) for part in [*PARTS.split(), "memcheck"]])
def test_a_part_runs_at_tiny_sizes(part, benchmark, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert {*PARTS.split(), "memcheck"} == {*benchmark.PARTS}
    record = benchmark.Record(tmp_path / "gpu.json", "cpu")
    where = benchmark.Where("cpu", True, tmp_path)
    benchmark.run_part(part, record, ARGS)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert not found["failed"] and found[part].keys() == {key for key, _ in benchmark.PARTS[part].cases(where)}
    assert found[part] and all(found[part].values())


@pytest.mark.exhaustive
def test_each_part_is_a_process_with_a_log(benchmark, tmp_path, monkeypatch, capsys):
    out = tmp_path / "results/gpu.json"
    monkeypatch.setattr(benchmark, "PARTS", {name: benchmark.PARTS[name] for name in ("machine", "largest")})
    command = [str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--tiny", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert benchmark.main() == 0
    assert "B parameters" in (out.with_suffix("") / "largest.log").read_text()
    found, said = json.loads(out.read_text()), capsys.readouterr().out
    assert found["machine"] and found["largest"] and len(found["goals"]) == len(benchmark.GOALS)
    assert (
        "==== goals" in said and "parameters trained: at least 25,000,000,000; " in said and "failed: nothing" in said
    )


def test_goals_stand_beside_what_was_measured(benchmark, tmp_path):
    found = benchmark.Record(tmp_path / "gpu.json", "cpu").found
    assert all(line.endswith("; not measured") for line in benchmark.judged(found)) and len(benchmark.GOALS) == 11
    contenders = {"fzero": {"tokens_per_s": 520e3}, "fzero, flash": {"faster than nn.Module": 0.9, "peak_bytes": 8}}
    found["steps"]["gpt2-124m"] = {"contenders": contenders | {"nn.Module": {"peak_bytes": 10}}}
    found["models"]["llama-8b, remat"] = {"mfu_causal": {"measured": 0.5, "datasheet of H200": 0.4}, "plan": {}}
    found["largest"] = {"1 of the memory": {"parameters": 26e9}}
    found["sanitizer"], found["failed"] = {"plain": {}}, {"sanitizer: opt=host": "a race"}
    off = {"time off": -0.2, "peak off": 0.01}
    found["plans"] = {str(i): {"plan": off} for i in range(10)}
    said = dict(line.split(": ", 1) for line in benchmark.judged(found))
    assert said["GPT-2 124M, tokens/s"] == "at least 515,000; 520,000, reached"
    assert said["plans of ten configurations, time off by"] == "at most 0.15; 0.2, NOT reached"
    verdicts = {what: text.rpartition(" ")[0].endswith("NOT") for what, text in said.items()}
    wrong = [what for what, missed in verdicts.items() if missed]
    assert len(wrong) == 4 and said["its memory over that of the nn.Module"].endswith(", reached")


def test_a_plan_of_the_measurement_is_for_the_device_that_was_measured(benchmark, tmp_path, monkeypatch):
    where = benchmark.Where("cuda", False, tmp_path)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    assert benchmark.gpu_runs.device_for(where) == devices.device("h200")
    (tmp_path / "device.json").write_text(devices.to_json(devices.device("a100")))
    assert benchmark.gpu_runs.device_for(where) == devices.device("a100")
    assert benchmark.gpu_runs.device_for(where._replace(device="cpu", folder=tmp_path / "no")) is None
