"""Compiled blocks in a plan: the buffers and kernels that Inductor would have, for the CPU and for a GPU that is not
here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fzero
import fzero.comm.collectives
import fzero.core.device
from fzero.core import CPU, FakeDevice, Target, vjp_pair
from fzero.planner import fake_inductor
from fzero.run.measure.live_bytes import LiveBytes
from fzero.sharding import fake_mesh

H100, A100 = Target("cuda", 132, (9, 0), "H100"), Target("cuda", 108, (8, 0), "A100")
N = 64
NO_KERNELS = ("empty_strided", "as_strided", "detach", "ones_like")  # ones_like: the cotangent
BENCHMARKS = Path(fzero.__file__).parents[1] / "benchmarks"


def block(x, w):
    """An RMS norm, a product and a gate."""
    normed = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
    h = normed @ w
    return [torch.nn.functional.silu(h) * h + x]


class Launches(TorchDispatchMode):
    """(bytes read, bytes written) of each fused kernel, and the names of the other operators."""

    def __init__(self):
        super().__init__()
        self.fused, self.others = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.fzero.record_launch.default:
            self.fused.append(tuple(sum(x.nbytes for x in given) for given in args[1:]))
        else:
            self.others.append(str(func))
        return func(*args, **(kwargs or {}))


def forward_and_backward(pair, x, w):
    (out,), residuals = pair.forward([x, w])
    return pair.backward(residuals, [torch.ones_like(out)])


def planned(target, f=block):
    with FakeDevice(target, lower=fake_inductor.lower) as mode:
        pair = vjp_pair.vjp_pair(f, 2, compiled=True)
        x, w = (torch.zeros(N, N, device=mode.device) for _ in range(2))
        with Launches() as seen, LiveBytes(x, w) as live:
            grads = forward_and_backward(pair, x, w)
    assert all(g.device == mode.device for g in grads)
    return seen, live.peak


@pytest.mark.parametrize("target", [CPU, H100], ids=["cpu", "h100"])
def test_a_block_is_fused_between_its_products(target):
    before = torch.cuda.get_device_properties, torch.cuda.current_device
    seen, _ = planned(target)
    assert before == (torch.cuda.get_device_properties, torch.cuda.current_device)
    products = [name for name in seen.others if ".mm" in name]
    assert len(products) == 3 and len(seen.fused) == 4
    square = 4 * N * N
    # Normed; gated and added; the gate's gradient; that of the norm with that of the sum. Each square is read or
    # written once.
    assert seen.fused[1] == (2 * square, square)
    assert all(square <= read + written <= 6 * square for read, written in seen.fused)


@pytest.mark.parametrize("target", [CPU, H100], ids=["cpu", "h100"])
def test_a_gradient_written_into_a_part_of_zeros_is_fused(target):
    """That of a column taken from a tensor, as a block of Mixtral has it."""
    before = torch.Tensor.copy_
    seen, _ = planned(target, lambda x, w: [(x @ w)[:, 0] * 2.0])
    assert torch.Tensor.copy_ is before
    assert seen.fused == [(4 * N * N, 4 * N), (4 * N, 4 * N * N)]  # the column; its gradient, with the zeros around it
    assert all(".mm" in name for name in seen.others if name.split(".")[1] not in NO_KERNELS)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.0, 1.25], ids=["dropless", "capacity"])
def test_a_mixture_of_experts_is_fused_for_a_gpu(factor):
    small = {
        "preset": "mixtral-tiny",
        "model": {"n_layers": 1, "capacity_factor": factor},
        "data": {"seq_len": 16},
        "train": {"batch": 2, "micro_batch": 2, "compiled": True},
    }
    assert "fused" in fzero.plan(small, gpu="h100").time["kinds"]


MEASURE = f"""
import json, sys
sys.path[:0] = [{str(BENCHMARKS)!r}, {str(Path(__file__).parent)!r}]
import live_bytes, torch
from test_plan_fused import N, block, forward_and_backward, vjp_pair

def setup():
    pair, x, w = vjp_pair.vjp_pair(block, 2, compiled=True), torch.zeros(N, N), torch.zeros(N, N)
    forward_and_backward(pair, x, w)
    return lambda: forward_and_backward(pair, x, w)

print(json.dumps(live_bytes.peak(setup)))
"""


@pytest.mark.slow
def test_the_peak_is_what_the_allocator_counts():
    """Inductor's buffers among it, which never meet the dispatcher in a run."""
    found = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=300, check=True)
    measured = json.loads(found.stdout.splitlines()[-1])["peak_bytes"]
    _, peak = planned(CPU)
    assert peak == measured


def test_of_parts_of_one_buffer_the_largest_counts():
    kernel = fake_inductor._Kernel(
        "const float* in_ptr0, const float* in_ptr1, const float* in_ptr2, float* out_ptr0, const int64_t ks0"
    )
    with FakeDevice(CPU), Launches() as seen:
        x, y = torch.zeros(4, N), torch.zeros(2, N)
        kernel(x[:1], x, x[1:3], y, 7)
    assert seen.fused == [(x.nbytes, y.nbytes)]


@pytest.mark.parametrize("target", [CPU, H100], ids=["cpu", "h100"])
def test_collectives_are_entered_as_often_as_they_run(target):
    mesh = fake_mesh({"tp": 2})

    def f(x, w):
        return [fzero.comm.collectives.psum(x @ w, mesh["tp"], leaf="w")]

    with FakeDevice(target, lower=fake_inductor.lower) as mode:
        pair = vjp_pair.vjp_pair(f, 2, compiled=True)
        x, w = (torch.zeros(N, N, device=mode.device) for _ in range(2))
        pair.forward([x, w])
        assert [(row.collective, row.calls) for row in mesh.ledger.rows()] == [("psum", 1)]
        pair.forward([x, w])
        assert [row.calls for row in mesh.ledger.rows()] == [2]


def test_a_program_serves_the_target_it_was_made_for():
    seen = []

    def f(x, w):
        seen.append(fzero.core.device.target_of(x))
        return [x @ w]

    pair = vjp_pair.vjp_pair(f, 2, compiled=True)
    for target in (CPU, H100, CPU, A100, H100):
        with FakeDevice(target, lower=fake_inductor.lower) as mode:
            (out,), _ = pair.forward([torch.zeros(N, N, device=mode.device) for _ in range(2)])
            assert out.device == mode.device
    assert seen == [target for target in (CPU, H100, A100) for _ in range(seen.count(CPU))]


def test_with_an_unknown_torch_a_plan_runs_the_traced_graph_and_says_so(monkeypatch):
    small = {
        "preset": "llama-tiny",
        "model": {"n_layers": 1},
        "data": {"seq_len": 16},
        "train": {"batch": 1, "micro_batch": 1},
    }
    monkeypatch.setattr(fake_inductor, "VERSIONS", (torch.__version__.rpartition(".")[0],))
    fused = fzero.plan(small, gpu="h100")
    monkeypatch.setattr(fake_inductor, "VERSIONS", ("2.9",))
    plain = fzero.plan(small, gpu="h100")
    assert fake_inductor.lowering() is None and any("known for torch 2.9" in note for note in plain.notes)
    assert not any("torch" in note for note in fused.notes) and plain.flop_per_step == fused.flop_per_step
    assert "fused" in fused.time["kinds"] and "fused" not in plain.time["kinds"]
