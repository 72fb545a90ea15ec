"""The GPU of a process, as far as a machine without one can tell: which is chosen, what is refused, and that one file
asks PyTorch about it. Copies, streams and events are in test_pretend_gpu.py."""

import ast
from pathlib import Path

import pytest
import torch

import fzero
from fzero.core import gpu

ROOT = Path(fzero.__file__).parent
# fake_inductor puts answers for a planned GPU in the place of torch.cuda's; it asks nothing.
REPLACED = {"planner/fake_inductor.py": 3}


def uses(source):
    """The lines that name torch.cuda, or import it."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)] if ast.unparse(node) == "torch.cuda" else []
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        if any(name.startswith("torch.cuda") for name in names):
            yield node.lineno


def test_uses_are_seen():
    source = (
        "import torch.cuda\nfrom torch import cuda\nfrom torch.cuda import Stream\nx = torch.cuda.Event()\ntorch.cpu"
    )
    assert sorted(uses(source)) == [1, 2, 3, 4]


def test_one_file_asks_pytorch_about_the_gpu():
    found = {path.relative_to(ROOT).as_posix(): list(uses(path.read_text())) for path in ROOT.rglob("*.py")}
    assert len(found.pop("core/gpu.py")) > 10
    wrong = {name: lines for name, lines in found.items() if len(lines) != REPLACED.get(name, 0)}
    assert not wrong, f"{wrong}: ask fzero/core/gpu.py instead"


@pytest.fixture
def machine(monkeypatch):
    """A function that makes a machine of some GPUs; the devices that were made the current one."""
    chosen = []

    def make(gpus, local_rank=0):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        return chosen

    return make


@pytest.mark.parametrize("wanted, gpus, kind", [("auto", 0, "cpu"), ("auto", 2, "cuda"), ("cpu", 2, "cpu")])
def test_auto_takes_the_gpu_where_there_is_one(machine, wanted, gpus, kind):
    machine(gpus)
    assert gpu.resolve_device(wanted) == kind


def test_a_process_takes_the_gpu_of_its_local_rank(machine):
    chosen = machine(4, local_rank=3)
    assert gpu.use_device("cuda", 4) == torch.device("cuda", 3) == gpu.device_here("cuda") == chosen[0]
    assert gpu.use_device("cpu", 9) == torch.device("cpu") and len(chosen) == 1


@pytest.mark.parametrize(
    "gpus, local_rank, processes, message",
    [
        (0, 0, 1, r"device is cuda and PyTorch finds no GPU here; use --device cpu"),
        (2, 0, 4, r"4 processes of this host share 2 GPUs; .*--nproc-per-node 2"),
        (1, 1, 1, r"2 processes of this host share 1 GPU;"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(machine, gpus, local_rank, processes, message):
    chosen = machine(gpus, local_rank)
    with pytest.raises(ValueError, match=message):
        gpu.use_device("cuda", processes)
    assert not chosen


def test_a_copy_on_the_cpu_is_made_at_once():
    x = torch.arange(4.0)
    out = gpu.copy_out(x)
    x += 1
    assert out.event is None and out.use() is out.finish() and out.tensor.tolist() == [0, 1, 2, 3]
    assert gpu.copy_in(x, gpu.HOST).use() is x


def test_memory_is_pinned_only_for_a_process_that_uses_a_gpu(machine):
    machine(1)
    assert not gpu.in_use()  # though the machine has one
    x = torch.ones(2)
    assert gpu.to_host(x, gpu.HOST) is x is gpu.pinned(x, gpu.HOST)
