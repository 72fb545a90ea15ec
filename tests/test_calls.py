"""How many calls lie between `fzero pretrain` and torch's gradient: the chain that CONTRIBUTING.md lists, as it is in
a run.

Counted are the functions of fzero on the stack from the command's own (fzero/cli/pretrain.py, which is the first) to
the place, both with it. A lambda, a comprehension and a generator's frame are not counted, nor what click, contextlib
and torch put between."""

import re
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import fzero
from fzero.cli import main
from fzero.core import vjp_pair
from fzero.sharding import Prefetcher

ROOT = Path(fzero.__file__).parent
CONTRIBUTING = ROOT.parent / "CONTRIBUTING.md"
FLAGS = [
    "--model",
    "mlp-tiny",
    "--steps",
    "1",
    "--batch",
    "2",
    "--micro-batch",
    "2",
    "--seq-len",
    "8",
    "--precision",
    "fp32",
    "--seed",
    "0",
]
SETTINGS = ("train.compiled=false", "train.eval_batches=1", "train.measure_every=0", "train.memory_check=false")


def calls():
    """The functions of fzero from the command to the caller of this function, as "file.py: function", the command
    first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and not code.co_name.startswith("<"):
            found.append(f"{path.relative_to(ROOT)}: {code.co_name}")
            if found[-1] == "cli/pretrain.py: pretrain":
                return found[::-1]
        frame = frame.f_back
    raise AssertionError("not called by the command")


def listed(title):
    """The steps of a numbered list of CONTRIBUTING.md: "file.py: function" each."""
    section = CONTRIBUTING.read_text().split(f"### {title}\n")[1].split("\n### ")[0].split("\n## ")[0]
    return [
        f"{path}: {name}" for path, name in re.findall(r"^\d+\. `fzero/([\w/]+\.py)`: `(?:\w+\.)?(\w+)`", section, re.M)
    ]


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """A function: the calls from the command to the first call of `name` of a class or a module, in a run of one step;
    by: to the first one that comes by this function. A function of torch is not counted."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("To be, or not to be, that is the question. " * 50)

    def run(owner, name, by=""):
        found, method = [], getattr(owner, name)
        path = Path(method.__code__.co_filename)
        own = [f"{path.relative_to(ROOT)}: {name}"] if path.is_relative_to(ROOT) else []

        def seen(*args, **kwargs):
            stack = [] if found else calls()
            found.extend([*stack, *own] if stack and (not by or by in stack) else ())
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, seen)
        settings = [part for setting in SETTINGS for part in ("--set", setting)]
        args = [
            "pretrain",
            *FLAGS,
            *settings,
            "--data",
            "text.txt",
            "--out",
            "run",
            "--prompt",
            "",
            "--peak-tflops",
            "1",
        ]
        result = CliRunner().invoke(main.cli, args, catch_exceptions=False)
        assert result.exit_code == 0 and found, result.output
        return found

    return run


def test_to_the_gradient(chain):
    """Of a layer: that of the head comes before it, by a shorter chain. Its end is the engine of torch's autograd."""
    assert vjp_pair.run_autograd is torch.autograd.graph._engine_run_backward
    found = chain(vjp_pair, "run_autograd", "core/stack.py: backward")
    assert found == listed("From `fzero pretrain` to the gradient")
    assert len(found) <= 8


def test_to_the_message_of_a_stage_3_gather(chain):
    """The fetch of the first part; behind it the functions of one process and of several are the same files."""
    found = chain(Prefetcher, "fetch")
    wanted = listed("From `fzero pretrain` to the message of a stage-3 gather")
    assert found == wanted[: len(found)]
    assert len(found) < len(wanted) <= 11
    for line in wanted:
        path, name = line.split(": ")
        assert re.search(rf"^\s*def {name}\(", (ROOT / path).read_text(), re.M), line
