"""The GPU of a process, as far as a machine without one can tell: which is chosen, what is refused, and that one file
asks PyTorch about it. Copies, streams and events are in test_pretend_gpu.py."""

import ast
import os
from pathlib import Path

import pytest
import torch
from pretend_gpu import pretend

import fzero
from fzero.comm.agreement import Agreement
from fzero.comm.communicator import Communicator
from fzero.comm.ledger import Ledger
from fzero.core import gpu, pytree
from fzero.core.device import Target
from fzero.run import machine as run_machine
from fzero.run.build import build
from fzero.run.config_table import from_json, from_table, to_json
from fzero.run.memory_check import check_memory, host_bytes, memory_needed
from fzero.run.pretrain import place
from fzero.run.ranks.coordinator import Coordinator

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
        for name in gpu.ALLOCATOR_SETTINGS:
            monkeypatch.setenv(name, "")
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


def test_segments_expand_unless_the_user_says_how_memory_is_allocated(machine, monkeypatch):
    at_start = []
    machine(1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: at_start.append(dict(os.environ)))
    old, new = gpu.ALLOCATOR_SETTINGS
    gpu.use_device("cuda")
    assert at_start[-1][old] == "expandable_segments:True"
    monkeypatch.setenv(old, "")
    monkeypatch.setenv(new, "max_split_size_mb:64")
    gpu.use_device("cuda")
    assert at_start[-1][old] == "" and at_start[-1][new] == "max_split_size_mb:64"


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


def test_a_run_decides_its_device_and_says_it(machine):
    machine(0)
    table = {"preset": "mlp-tiny", "precision": {"policy": "fp32", "fp32_matmul": "default"}}
    config, _, device, lines = place(from_table(table), Coordinator())
    assert config.device == "cpu" and device == gpu.HOST and lines[0] == "device: the CPU"
    assert from_json(to_json(config)).device == "cpu"
    with pytest.raises(ValueError, match=r"device is 'gpu'.*auto, cpu, cuda"):
        from_table({**table, "device": "gpu"})


def test_a_run_on_a_gpu_that_is_not_there_ends_with_one_line(machine, fz, tmp_path, monkeypatch):
    machine(0)
    monkeypatch.chdir(tmp_path)
    code, _, err = fz("pretrain", "--device", "cuda", "--model", "mlp-tiny", "--out", "run")
    assert code == 2 and len(err.splitlines()) == 1 and "PyTorch finds no GPU here; use --device cpu" in err
    assert not list(tmp_path.glob("run/config.json"))


@pytest.mark.parametrize("capability, policy", [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp32")])
def test_what_is_auto_on_a_gpu_follows_from_its_capability(monkeypatch, capability, policy):
    monkeypatch.setattr(run_machine, "target_on", lambda device: Target("cuda", 132, capability, "card"))
    monkeypatch.setattr(run_machine, "compiler", lambda: "")
    config, lines = run_machine.resolve_here(from_table({"preset": "mlp-tiny", "device": "cuda"}))
    assert (config.precision.policy, config.precision.fp32_matmul, config.device) == (policy, "default", "cuda")
    assert (
        config.train.compiled is False and f"{policy} (compute capability {capability[0]}.{capability[1]}" in lines[0]
    )
    with pytest.raises(ValueError, match="is of CPUs, and the run is on a GPU; use default"):
        run_machine.resolve_here(from_table({"device": "cuda", "precision": {"fp32_matmul": "onednn"}}))
    with pytest.raises(
        ValueError, match=r"train.compiled is true, and blocks for a GPU need Triton and a C\+\+ compiler"
    ):
        run_machine.resolve_here(from_table({"device": "cuda", "train": {"compiled": True}}))


def test_memory_is_compared_where_it_is_needed():
    table = {
        "preset": "llama-tiny",
        "precision": {"policy": "fp32"},
        "train": {"compiled": False},
        "optim": {"name": "adamw"},
    }
    job = build(from_table({**table, "offload": "opt=host"}), device=torch.device("cuda", 0))
    there, all_of_it = host_bytes(job), sum(memory_needed(job))
    moments = 2 * 4 * sum(leaf.numel() for leaf in pytree.leaves(job.plan.like))
    assert there == pytest.approx(moments, rel=1e-3)
    check_memory(job, all_of_it - there, there)
    with pytest.raises(ValueError, match="available"):
        check_memory(job, all_of_it - there - 1, there)
    with pytest.raises(ValueError, match="into the host's memory and"):
        check_memory(job, all_of_it, there - 1)


def test_small_tables_stay_in_the_memory_of_the_host_beside_nccl():
    communicator = Communicator(
        "dp", (0, 1), 0, transport="nccl", ledger=Ledger(), agreement=Agreement(None, 0, 0.0), ordered=False
    )
    assert communicator.transport_of(torch.ones(1)) == "gloo"
    with pretend():
        assert communicator.transport_of(torch.ones(1, device="cuda")) == "nccl"
