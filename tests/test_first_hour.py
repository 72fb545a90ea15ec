"""The first hour on a GPU (benchmarks/first_hour.py), as far as it can be made without one: its commands exist, their
parts run at tiny sizes, and its cases on the pretend GPU."""

import contextlib
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import ranks
import torch
from pretend_gpu import pretend

import fzero
from fzero.cli import main

ROOT = Path(fzero.__file__).parents[1]
CUDA = torch.device("cuda", 0)


@pytest.fixture
def script(monkeypatch):
    """A function that imports a file of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.mark.parametrize("tiny", [False, True])
def test_its_commands_are_there_and_take_their_flags(script, tiny, tmp_path):
    parts = script("first_hour").parts_of(tmp_path, "cuda", tiny)
    lines = [shlex.split(line.split("then ")[-1]) for part in parts for line in part.commands]
    fzeros = [words[words.index("fzero") + 1 :] for words in lines if "fzero" in words]
    assert {words[0] for words in fzeros} == {"doctor", "bench", "pretrain", "report", "sample"}
    for command, *args in fzeros:
        args = [arg.rstrip(";") for arg in args if arg != "fi"]
        with contextlib.suppress(SystemExit):
            main.cli.commands[command].make_context(command, args)  # raises for a flag that it has not
    named = {word for words in lines for word in words if word.startswith("benchmarks/")}
    assert len(named) == 3 and all((ROOT / name).is_file() for name in named)
    tests = [path for path in (ROOT / "tests").glob("test_*.py") if "@pytest.mark.gpu" in path.read_text()]
    assert len(tests) >= 5


def test_the_page_has_its_parts(script, tmp_path):
    table = (ROOT / "docs/gpu.md").read_text().partition("| part | command |")[2].partition("\n\n")[0]
    found = re.findall(r"^\| (\w+) \|", table, re.MULTILINE)
    assert found == [part.name for part in script("first_hour").parts_of(tmp_path, "cuda", False)]


def test_a_part_that_hangs_or_fails_costs_only_itself_and_is_made_again(script, tmp_path, monkeypatch):
    module = script("first_hour")
    tries = tmp_path / "tries"
    parts = [
        module.Part("right", 20.0, (f"echo right >> {tries}",)),
        module.Part("hangs", 0.3, ("sleep 60",)),
        module.Part("fails", 20.0, ("echo why", "false", "true")),
    ]
    monkeypatch.setattr(module, "parts_of", lambda *_: parts)
    for _ in range(2):
        assert module.main(["--out", str(tmp_path)]) == 1
    assert tries.read_text().split() == ["right"]  # what went well is not made again
    found = json.loads((tmp_path / "summary.json").read_text())
    assert {name: row["code"] for name, row in found.items()} == {"right": 0, "hangs": 124, "fails": 1}
    assert "why" in (tmp_path / "fails.txt").read_text()
    with pytest.raises(SystemExit):
        module.main(["--out", str(tmp_path), "--only", "no-such-part"])


@pytest.mark.exhaustive
def test_every_part_runs_at_tiny_sizes_without_a_gpu(script, tmp_path):
    module = script("first_hour")
    code = module.main(["--device", "cpu", "--tiny", "--out", str(tmp_path)])
    assert code == 0, (tmp_path / "summary.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp32", "opt=host speculate", "nvme"])
def test_a_case_on_the_pretend_gpu_has_the_losses_of_the_cpu(script, name, monkeypatch):
    module, modes = script("gpu_step_cases"), []
    case = module.CASES[name] | {"kernels": "reference"}
    expected = module.steps(
        torch.device("cpu"), {"policy": case.get("policy", "bf16"), "kernels": "reference"}, True, 2
    )
    with pretend(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
        found = module.steps(CUDA, case, True, 2)
    assert found["losses"] == expected["losses"] and modes == ["warn", "default"]
    assert not module.faults(name, found, expected["losses"])
    assert module.faults(name, found, [x + 1 for x in expected["losses"]])
    if name == "fp32":
        waits = module.Found(found | {"waits": {"train/step.py:1": 1}})
        assert module.faults(name, waits, expected["losses"]) == ["the host waits in a step"]


def on_one_gpu(mesh, folder):
    """The losses of two ranks on the CPU, and of two that share a pretend GPU."""
    import sys

    sys.path.insert(0, folder)
    import gpu_ranks

    expected = gpu_ranks.losses(mesh, torch.device("cpu"), 3, True, 2, "reference")
    with pretend() as seen, gpu_ranks.by_the_host():
        found = gpu_ranks.losses(mesh, CUDA, 3, True, 2, "reference")
    return expected, found, dict(seen.races)


@pytest.mark.slow
def test_ranks_that_share_a_gpu_send_by_the_host():
    for expected, found, races in ranks.run(2, on_one_gpu, str(ROOT / "benchmarks")):
        assert found == expected and not races
