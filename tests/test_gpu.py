"""The GPU of a process, as far as a machine without one can tell: which is chosen, what is refused, and that one file
asks PyTorch about it. Copies, streams and events are in test_pretend_gpu.py."""

import ast
import contextlib
import os
import re
import types
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pretend_gpu import pretend

import fzero
from fzero.comm import Communicator, Ledger, ProgramAgreement
from fzero.core import CPU, Target, gpu, gpu_copies, pytree
from fzero.planner import devices, plan
from fzero.run import build, config_table, coordinator, from_table, memory_needed, memory_on_device, pretrain, to_json
from fzero.run import machine as run_machine
from fzero.run.measure import doctor
from fzero.run.measure.memory_check import (
    SURE,
    expect_fitting_memory,
    host_bytes,
    memory_on_host,
    needs_on_device,
    other_usage_text,
)
from fzero.run.runner.out_of_memory import explain

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


def test_two_files_ask_pytorch_about_the_gpu():
    found = {path.relative_to(ROOT).as_posix(): list(uses(path.read_text())) for path in ROOT.rglob("*.py")}
    assert len(found.pop("core/gpu.py")) > 10 and len(found.pop("core/gpu_copies.py")) > 10
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
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: [])
        monkeypatch.setattr(gpu, "compute_once", lambda device: None)
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
    assert gpu.use_device("cuda", 4) == torch.device("cuda", 3) == gpu.local_device("cuda") == chosen[0]
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
        (0, 0, 1, r"device is cuda and PyTorch finds no GPU here; use device=cpu \(--device cpu\)"),
        (2, 0, 4, r"4 processes of this host share 2 GPUs; .*--nproc-per-node 2"),
        (1, 1, 1, r"2 processes of this host share 1 GPU;"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(machine, gpus, local_rank, processes, message):
    chosen = machine(gpus, local_rank)
    with pytest.raises(ValueError, match=message):
        gpu.use_device("cuda", processes)
    assert not chosen


OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading one from the URL: http://www.nvidia.com/Download/index.aspx (Triggered internally at x:1.)"
)
FABRIC = (
    "CUDA initialization: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
    "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized (Triggered "
    "internally at y:2.)"
)


@pytest.mark.parametrize(
    "said, line",
    [
        (OLD, "The NVIDIA driver on your system is too old (found version 11040); install a newer driver, or PyTorch "),
        (FABRIC, "system not yet initialized; start the service that connects the GPUs (systemctl start nvidia-fabric"),
    ],
)
def test_a_gpu_that_cuda_does_not_count_is_told_with_the_reason(machine, monkeypatch, said, line):
    machine(0)
    monkeypatch.setattr(gpu, "_COMPLAINTS", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(warnings.warn(said, stacklevel=1)))
    with pytest.raises(ValueError) as refused:
        gpu.use_device("cuda")
    assert str(refused.value).startswith(f"device is cuda and PyTorch can use no GPU here: {line}")
    assert str(refused.value).endswith("; device=cpu (--device cpu) trains without it")
    table = {"preset": "mlp-tiny", "precision": {"policy": "fp32", "fp32_matmul": "default"}}
    lines = pretrain.resolve_placement(from_table(table), coordinator.Coordinator())[3]  # auto
    assert lines[0] == f"device: the CPU; no GPU can be used: {line.partition(';')[0]}"


@pytest.mark.parametrize(
    "where, said, line",
    [
        ("init", "CUDA call failed lazily at initialization with error: no\n\nCUDA call was", "no; nvidia-smi shows "),
        ("compute", "CUDA error: no kernel image is available for execution on the device\nSearch for `cudaError", ""
         "no kernel image is available for execution on the device; install a PyTorch that was compiled for it ("),
        ("compute", "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might", "CUDA-"
         "capable device(s) is/are busy or unavailable; another process has it alone: nvidia-smi shows which"),
        ("compute", "CUDA out of memory. Tried to allocate 2.00 MiB. GPU", "CUDA out of memory; other processes hold"),
    ],
)  # fmt: skip
def test_whatever_cuda_says_at_its_first_use_is_one_line(machine, monkeypatch, where, said, line):
    def fail(*_):
        raise (torch.OutOfMemoryError if "of memory" in said else torch.AcceleratorError)(said)

    machine(2, local_rank=1)
    monkeypatch.setattr(*{"init": (torch.cuda, "init", fail), "compute": (gpu, "compute_once", fail)}[where])
    with pytest.raises(ValueError) as refused:
        gpu.use_device("cuda", 2)
    assert re.match(rf"GPU 1 of host \S+ cannot be used: {re.escape(line)}", str(refused.value))
    assert "\n" not in str(refused.value) and str(refused.value).endswith(
        "; device=cpu (--device cpu) trains without it"
    )


def test_a_gpu_that_pytorch_was_not_compiled_for_is_refused(machine, monkeypatch):
    def init():
        warnings.warn("\nFound GPU0 Card which is of cuda capability 6.1.\nMinimum and ...", stacklevel=1)

    machine(1)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90a", "compute_90"])
    for capability, runs in (((6, 1), False), ((7, 5), True), ((8, 0), False), ((9, 0), True), ((10, 0), True)):
        major, minor = capability
        found = types.SimpleNamespace(major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=found: found)
        with contextlib.nullcontext() if runs else pytest.raises(ValueError, match=(
            rf"its compute capability is {major}\.{minor}, and PyTorch \S+ was compiled for sm_75, sm_90a, compute_90; "
            "install a PyTorch that was compiled for it"
        )):  # fmt: skip
            gpu.use_device("cuda")


def test_a_gpu_of_amd_is_not_refused(machine, monkeypatch):
    """PyTorch calls it cuda, names what it was compiled for otherwise, and counts its capability in another way."""
    machine(1)
    card = types.SimpleNamespace(name="AMD Instinct MI210", multi_processor_count=104, major=9, minor=0)
    monkeypatch.setattr(torch.version, "hip", "6.4.43484")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx942", "gfx1100"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert gpu.use_device("cuda") == torch.device("cuda", 0)
    for capability in ((9, 0), (6, 0)):
        monkeypatch.setattr(
            run_machine, "target_on", lambda device, found=capability: Target("cuda", 104, found, card.name)
        )
        config, _ = run_machine.resolve_here(from_table({"preset": "mlp-tiny", "device": "cuda"}))
        assert config.precision.policy == "bf16"


def test_doctor_tells_of_a_gpu_that_cannot_be_used(machine, monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might")

    machine(1)
    monkeypatch.setattr(gpu, "compute_once", fail)
    device, said = doctor.usable_device()
    assert device == gpu.HOST and "cannot be used: unspecified launch failure; nvidia-smi shows more" in said


def test_a_copy_on_the_cpu_is_made_at_once():
    x = torch.arange(4.0)
    out = gpu_copies.copy_out(x)
    x += 1
    assert out.event is None and out.use() is out.finish() and out.tensor.tolist() == [0, 1, 2, 3]
    assert gpu_copies.copy_in(x, gpu.HOST).use() is x


def test_memory_is_pinned_only_for_a_process_that_uses_a_gpu(machine):
    machine(1)
    assert not gpu.in_use()  # though the machine has one
    x = torch.ones(2)
    assert gpu.pinned(x, gpu.HOST) is x


def test_a_run_decides_its_device_and_says_it(machine):
    machine(0)
    table = {"preset": "mlp-tiny", "precision": {"policy": "fp32", "fp32_matmul": "default"}}
    config, _, device, lines = pretrain.resolve_placement(from_table(table), coordinator.Coordinator())
    assert config.device == "cpu" and device == gpu.HOST and lines[0] == "device: the CPU"
    assert config_table.from_json(to_json(config)).device == "cpu"
    with pytest.raises(ValueError, match=r"device is 'gpu'.*auto, cpu, cuda"):
        from_table({**table, "device": "gpu"})


def test_a_run_on_a_gpu_that_is_not_there_ends_with_one_line(machine, fz, tmp_path, monkeypatch):
    machine(0)
    monkeypatch.chdir(tmp_path)
    code, _, err = fz("pretrain", "--device", "cuda", "--model", "mlp-tiny", "--out", "run")
    assert (
        code == 2 and len(err.splitlines()) == 1 and "PyTorch finds no GPU here; use device=cpu (--device cpu)" in err
    )
    assert not list(tmp_path.glob("run/config.json"))


@pytest.mark.parametrize(
    "policy, capability, needs",
    [("bf16_float8", (8, 0), "8.9"), ("bf16_float8", (8, 9), ""), ("bf16_float8_rowwise", (8, 9), "9.0")],
)
def test_float8_is_refused_where_a_gpu_would_emulate_it(policy, capability, needs):
    target = Target("cuda", 108, capability, "NVIDIA A100")
    table = {"preset": "mlp-tiny", "precision": {"policy": policy}}
    if not needs:
        assert run_machine.resolve_auto(from_table(table), target).precision.policy == policy
        return
    with pytest.raises(ValueError) as refused:
        run_machine.resolve_auto(from_table(table), target)
    has = ".".join(map(str, capability))
    said = f"precision.policy is '{policy}', whose products need compute capability {needs}, and NVIDIA A100 has {has};"
    assert str(refused.value).startswith(said) and "use bf16" in str(refused.value)
    for kernels in ("auto,float8_linear=emulated", "reference"):
        asked = from_table({**table, "train": {"kernels": kernels}})
        assert run_machine.resolve_auto(asked, target).precision.policy == policy
    assert run_machine.resolve_auto(from_table(table), CPU).precision.policy == policy  # there it is for tests


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
    job = build.build(from_table({**table, "offload": "opt=host"}), device=torch.device("cuda", 0))
    there, all_of_it, away = host_bytes(job), sum(memory_needed(job)), sum(memory_on_host(job))
    moments = 2 * 4 * sum(leaf.numel() for leaf in pytree.leaves(job.plan.like))
    assert away == pytest.approx(moments, rel=1e-3) and away < there < 1.01 * away  # in whole pages
    needed = memory_on_device(job)
    assert sum(needed) == all_of_it - away
    sure = int(needed.state + SURE * (sum(needed) - needed.state)) + 1
    expect_fitting_memory(job, sure, there)
    with pytest.raises(ValueError, match="available"):
        expect_fitting_memory(job, sure - 2, there)
    with pytest.raises(ValueError, match="into the host's memory and"):
        expect_fitting_memory(job, all_of_it, there - 1)


def test_a_config_says_what_memory_the_host_has(monkeypatch):
    monkeypatch.setattr(run_machine, "available_bytes", lambda: 10**9)  # a machine that has not grown yet
    monkeypatch.setattr(gpu, "free_bytes", lambda device: 80 * 10**9)
    offload = {"offload": "params=host,grads=host,opt=host", "train": {"remat": "full", "micro_batch": 1}}
    with pytest.raises(ValueError, match=r"into the host's memory and 1.0 GB are available"):
        pretrain.expect_memory(job_on_gpu(**offload), coordinator.Coordinator())
    pretrain.expect_memory(job := job_on_gpu(**offload, host_memory_gb=30), coordinator.Coordinator())
    assert host_bytes(job) < 30e9 and config_table.from_json(to_json(job.config)).host_memory_gb == 30
    with pytest.raises(ValueError, match=r"into the host's memory and 2.0 GB are available"):
        pretrain.expect_memory(job_on_gpu(**offload, host_memory_gb=2), coordinator.Coordinator())
    for wrong in (-1, 1e9, "much"):
        with pytest.raises(ValueError, match="host_memory_gb is "):
            job_on_gpu(host_memory_gb=wrong)


def test_a_plan_has_of_the_host_what_the_config_says():
    here = devices.device("h100")
    config = from_table({"preset": "mlp-tiny", "host_memory_gb": 50})
    assert plan.with_host_memory(here, config).host_capacity_bytes(2) == pytest.approx(25e9, abs=2)
    assert plan.with_host_memory(replace(here, kind="cpu"), config).memory_bytes == 50 * 10**9
    assert plan.with_host_memory(here, replace(config, host_memory_gb=0.0)) is here


def test_the_flag_of_the_host_s_memory_is_a_positive_number(fz):
    for value in ("0", "-3"):
        assert "it must be above 0" in fz("pretrain", "--host-memory", value)[2]


def job_on_gpu(**settings):
    table = {"preset": "llama-1b", "precision": {"policy": "bf16"}, "optim": {"name": "adamw"}, **settings}
    table["train"] = {"compiled": False, "batch": 32, "micro_batch": 8, **settings.get("train", {})}
    return build.build(from_table(table), device=torch.device("cuda", 0))


def test_what_is_needed_of_the_device_is_told_by_component():
    plain, moved = job_on_gpu(), job_on_gpu(offload="opt=host")
    needs, n = needs_on_device(plain), build.num_params(plain)
    assert needs["parameters"] == 2 * n and needs["master weights"] == 4 * n
    assert needs["optimizer state"] == pytest.approx(8 * n, abs=8)  # and its count
    assert sum(needs.values()) == pytest.approx(sum(memory_needed(plain)), abs=99)  # statistics of the loss
    assert {*needs} - {*needs_on_device(moved)} == {"master weights"}
    kept = job_on_gpu(train={"remat": "full"}), job_on_gpu(train={"remat": "full"}, offload="acts=host")
    less = needs_on_device(kept[0])["activations"] - needs_on_device(kept[1])["activations"]
    length = kept[1].config.data.seq_len
    assert host_bytes(kept[1]) == 8 * length * 2048 * 16 * 2  # rows, width, layers, bytes
    assert less == host_bytes(kept[1]) * 14 // 16  # the inputs of two layers are there at a time
    here = needs_on_device(job_on_gpu(offload="params=host"))
    assert "parameters" not in here and here["gathered parameters"] > 0


@pytest.mark.parametrize(
    "total, free, tables, fit",
    [
        (80, 20.0, {}, "--micro-batch 4 (about 52.8 GB, in a new run) or --offload opt=host (about 65.2 GB)"),
        (24, 0.2, {"train": {"remat": "full", "micro_batch": 1}}, "; --offload opt=host (about 9.3 GB) would fit"),
        pytest.param(24, 0.2, {}, "--micro-batch 2 --offload opt=host (about 20.1 GB", marks=pytest.mark.slow),
        pytest.param(3, 0.2, {}, "no smaller --micro-batch", marks=pytest.mark.slow),
    ],
)
def test_settings_that_would_fit_are_told(monkeypatch, tmp_path, total, free, tables, fit):
    monkeypatch.setattr(gpu, "describe_device", lambda device: "GPU 0, card")
    monkeypatch.setattr(run_machine, "available_bytes", lambda: 10**12)
    now = gpu.DeviceMemory(int(total * 1e9), int(free * 1e9), int((total - 2) * 1e9), int((total - 1) * 1e9), 0)
    text = explain(job_on_gpu(**tables), tmp_path, coordinator.Coordinator(), now, 2 * 10**9)
    assert fit in text and "nothing was trained yet" in text and "\n" not in text, text
    said = dict(re.findall(r"(--[^(]*) \(about ([\d.]+) GB", text))
    assert all(float(size) <= 0.95 * (total - 1 + free) for size in said.values())


@pytest.mark.slow
def test_a_setting_without_room_in_the_memory_of_the_host_is_not_told(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "describe_device", lambda device: "GPU 0, card")
    monkeypatch.setattr(run_machine, "available_bytes", lambda: 10**9)
    now = gpu.DeviceMemory(24 * 10**9, 0, 23 * 10**9, 24 * 10**9, 0)
    assert "--offload opt" not in explain(job_on_gpu(), tmp_path, coordinator.Coordinator(), now, 0)


def test_others_that_hold_a_gpu_are_told_before_a_run(monkeypatch, tmp_path):
    job = job_on_gpu()
    with pretend(), monkeypatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 << 30, 149 << 30))
        said = r"are available \(127\.8 GB of GPU 0, Pretend H200 are held by other processes\)"
        with pytest.raises(ValueError, match=said):
            expect_fitting_memory(job, gpu.free_bytes(job.device), 10**12)
        properties = torch.cuda.get_device_properties(job.device)
        monkeypatch.setattr(properties, "uuid", "1234-5678", raising=False)
        program = tmp_path / "nvidia-smi"
        ours = f'echo "{os.getpid()}, me"; echo "4242, /usr/bin/python3"'
        program.write_text(f"#!/bin/sh\ncase $1 in --id=GPU-1234-5678) {ours};; esac\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        assert gpu.processes_on(job.device) == ["python3 (process 4242)"]
        with pytest.raises(ValueError, match=r"are held by python3 \(process 4242\)\)"):
            expect_fitting_memory(job, gpu.free_bytes(job.device), 10**12)
        program.write_text("#!/bin/sh\nexit 9\n")
        assert gpu.processes_on(job.device) == []
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((149 << 30) - (600 << 20), 149 << 30))
        assert other_usage_text(job.device) == ""  # a driver's own part
    assert other_usage_text(gpu.HOST) == ""


def test_small_tables_stay_in_the_memory_of_the_host_beside_nccl():
    communicator = Communicator(
        "dp", (0, 1), transport="nccl", ledger=Ledger(), agreement=ProgramAgreement(None, 0, 0.0), ordered=False
    )
    assert communicator.transport_of(torch.ones(1)) == "gloo"
    with pretend():
        assert communicator.transport_of(torch.ones(1, device="cuda")) == "nccl"


@pytest.mark.parametrize(
    "environ, processes, kind, threads",
    [
        ({}, 1, "cuda", 14),
        ({}, 4, "cpu", 4),
        ({"LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}, 4, "cuda", 2),
        ({"LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}, 16, "cuda", 1),
        ({"OMP_NUM_THREADS": "1"}, 1, "cuda", None),
        ({"LOCAL_RANK": "0", "OMP_NUM_THREADS": "3"}, 4, "cuda", None),
    ],
)
def test_the_threads_of_a_gpus_process_leave_two_cores(environ, processes, kind, threads, monkeypatch):
    for name in ("LOCAL_RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    chosen = []
    monkeypatch.setattr(run_machine, "cores", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    run_machine.share_cores(processes, torch.device(kind))
    assert chosen == ([] if threads is None else [threads])
