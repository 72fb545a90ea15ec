"""Plans for a device that is not here: which forms a step takes there, in which memory its tensors are, and that none
is launched."""

import math
import mmap
from collections import Counter
from pathlib import Path

import pytest
import torch
from law_cases import step_options
from pretend_gpu import pretend

import fzero
from fzero import models, optim
from fzero.comm import Communicator
from fzero.core import CPU, HOST, FakeDevice, Target, fake_device_of, kind_of, observe, precision, pytree, target_of
from fzero.kernels import linear_cross_entropy as lce
from fzero.kernels import registry
from fzero.planner.operations import ExecutedOp
from fzero.planner.step_trace import Transfer, trace_step
from fzero.run import build_optim, from_table
from fzero.run.measure.live_bytes import LiveBytes
from fzero.sharding import fake_mesh

H100, A100 = Target("cuda", 132, (9, 0), "H100"), Target("cuda", 108, (8, 0), "A100")
SIZES = {"vocab_size": 128, "max_len": 64, "d_model": 64, "d_ff": 128, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2}
CONFIGS = {
    "llama": models.LlamaConfig(**SIZES),
    "gpt2": models.GPT2Config(vocab_size=128, max_len=64, d_model=64, n_heads=4, n_layers=2),
    "mixtral": models.MoEConfig(**SIZES, n_experts=4, top_k=2),
}
COMMON = {"attention": "triton", "linear_cross_entropy": "triton", "adamw": "triton", "grad_norm": "triton"}
LLAMA = COMMON | dict.fromkeys(("rms_norm", "add_rms_norm", "rope_qk", "swiglu"), "triton")
ON_H100 = {
    "llama": LLAMA,
    "gpt2": COMMON | {"layer_norm": "triton", "add_layer_norm": "triton", "gelu": "reference"},
    "mixtral": LLAMA | dict.fromkeys(("route", "group", "permute", "unpermute"), "triton") | {"grouped_mm": "torch"},
}


def muon():
    parts = {"muon": optim.muon(0.02, 0.95), "adamw": optim.adamw(1e-3)}
    return optim.by_label(parts, ((build_optim.BLOCK_MATRICES, "muon"), (".*", "adamw")))


OPTIMIZERS = {
    "adamw": lambda: optim.adamw(1e-3),
    "muon": muon,
    "8bit": lambda: optim.adamw(1e-3, state_bits=8),
    "bf16": lambda: optim.adamw(1e-3, state_dtype=torch.bfloat16, rounding="stochastic", seed=0),
    "lion": lambda: optim.lion(1e-3),
}


def step_on(target, name="llama", sizes=None, stage=0, tx="adamw", policy="bf16", parts=1, plan=None, **options):
    """({operation: forms}, the state after a step, its ledger's rows), planned for `target`."""
    mesh, policy = fake_mesh(sizes or {}), getattr(precision, policy)()
    with FakeDevice(target) as mode:
        model = models.build(CONFIGS[name])
        plan = fzero.zero_plan(stage, model, mesh, **(plan or {}), policy=policy)
        tx = OPTIMIZERS[tx]()
        state = fzero.init_state(model, tx, plan, seed=0, device=mode.device)
        step = fzero.make_train_step(
            model, tx, plan, micro_batches=parts, skip=fzero.Skip(nonfinite=False), **step_options(options)
        )
        tokens = torch.zeros(2 * parts, 32, dtype=torch.int64, device=mode.device)
        with observe() as used:
            state, _ = step(state, {"tokens": tokens, "targets": tokens.clone()})
    return used, state, mesh.ledger.rows()


def test_a_tensor_says_what_it_stands_for():
    assert (
        kind_of(torch.zeros(2)) == "cpu" and target_of(torch.zeros(2)) == CPU and fake_device_of(torch.zeros(2)) is None
    )
    assert torch.zeros(2, device="cpu:0").device == HOST  # so that no real tensor is taken for one of a plan
    with FakeDevice(H100) as mode:
        x = torch.zeros(3, 4, device=mode.device)
        assert (kind_of(x), target_of(x), fake_device_of(x)) == ("cuda", H100, mode)
        assert kind_of(x.to(HOST)) == "cpu" and kind_of(x.to(HOST).to(mode.device)) == "cuda"
        seen = []
        torch.func.vmap(torch.func.grad(lambda row: (seen.append(target_of(row)), row.sum())[1]))(x)
        assert seen == [H100]
        with pytest.raises(RuntimeError, match=r"same device|two different devices"):
            _ = x + torch.zeros(3, 4)
        x.requires_grad_()
        ((x @ x.T).sum()).backward()
        assert x.grad.device == mode.device
    with FakeDevice(CPU) as mode:
        assert mode.device == HOST and kind_of(torch.zeros(2)) == "cpu"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "gpt2")) for n in CONFIGS])
def test_a_step_takes_the_forms_of_a_gpu(name):
    used, state, _ = step_on(H100, name, {"dp": 2}, 3)
    assert used == {op: {form} for op, form in ON_H100[name].items()}
    assert {leaf.device for leaf in pytree.leaves(state)} == {torch.device("cpu", 0)}


def test_a_step_on_the_cpu_takes_its_own():
    used, _, _ = step_on(CPU, sizes={"dp": 2}, stage=3)
    assert "triton" not in set().union(*used.values()) and used["adamw"] == {"fused"}


@pytest.mark.parametrize(("target", "form"), [(H100, "torch"), (A100, "triton"), (CPU, "torch")])
def test_a_form_may_ask_for_a_capability(target, form):
    with FakeDevice(target) as mode:
        x, w = (torch.zeros(*s, dtype=torch.bfloat16, device=mode.device) for s in ((8, 16), (2, 16, 16)))
        assert (
            registry.explain("grouped_mm", x, w, torch.zeros(2, dtype=torch.int32, device=mode.device)).chosen == form
        )


@pytest.mark.parametrize(
    "options",
    [
        {"sizes": {"dp": 2, "tp": 2}, "stage": 3, "remat": "full", "parts": 2},
        pytest.param({"tx": "8bit", "sizes": {"dp": 2}, "stage": 1, "policy": "fp32"}, marks=pytest.mark.slow),
        pytest.param({"tx": "bf16", "stage": 0}, marks=pytest.mark.slow),
        pytest.param({"tx": "muon", "sizes": {"dp": 2}, "stage": 2}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"tx": "lion", "name": "gpt2", "sizes": {"tp": 2}, "remat": "selective:0.5"}, marks=pytest.mark.exhaustive
        ),
        pytest.param(
            {"name": "mixtral", "sizes": {"dp": 2, "tp": 2}, "stage": 1, "parts": 2}, marks=pytest.mark.exhaustive
        ),
        pytest.param({"sizes": {"dp": 2}, "plan": {"reduce": "canonical"}, "parts": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_step_of_any_kind_runs(options):
    used, _, rows = step_on(H100, **options)
    assert used["attention"] == {"triton"}
    assert rows == step_on(CPU, **options)[2]  # the device moves no other bytes


def test_offloaded_states_rest_and_are_summed_in_the_hosts_memory():
    options = {"sizes": {"dp": 2}, "stage": 3, "parts": 2, "remat": "full"}
    _, state, _ = step_on(H100, plan={"offload": "params=host,grads=host,opt=host,acts=host"}, **options)
    assert {kind_of(leaf) for leaf in pytree.leaves((state.params, state.master))} == {"cpu"}
    assert kind_of(state.step) == "cuda"


@pytest.mark.parametrize(("target", "pieces"), [(CPU, 3), (H100, 1)])
def test_a_sum_over_ranks_takes_the_memory_of_its_transport(target, pieces):
    """gloo's pieces come from each rank; NCCL's sum is made on the way."""
    with FakeDevice(target) as mode:
        link, x = fake_mesh({"dp": 4})["dp"].communicator, torch.zeros(4 * 256, device=mode.device)
        assert isinstance(link, Communicator)
        with LiveBytes(x) as live:
            start = live.live
            out = link.start_psum_scatter(x).wait()
    assert out.shape == (256,) and live.peak - start == pieces * 4 * 256


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["grads=host", pytest.param("grads=nvme", marks=pytest.mark.exhaustive)])
def test_sums_that_rest_elsewhere_are_added_on_the_device(offload):
    parts, table = 3, {"preset": "llama-tiny", "model": SIZES, "data": {"seq_len": 32}, "offload": offload}
    table |= {"precision": {"policy": "fp32"}, "optim": {"name": "adamw"}}
    table["train"] = {"batch": 2 * parts, "micro_batch": 2, "compiled": False}
    trace = trace_step(from_table(table), {}, target=H100)
    moved = Counter()
    for event in trace.events:
        if isinstance(event, Transfer) and event.event == "start" and event.axis == "host":
            moved[event.kind] += event.bytes
    # Each sum leaves after each micro-batch, and comes back to be added to, and at the end to the update.
    expected = {"write": parts * 4 * trace.num_params, "read": (parts - 1 + 1) * 4 * trace.num_params}
    assert moved == {what: pytest.approx(size, abs=2000) for what, size in expected.items()}
    added = [op for op in trace.events if isinstance(op, ExecutedOp) and op.name == "aten.add_"]
    assert sum(math.prod(op.shape) for op in added) >= (parts - 1) * trace.num_params


PRODUCTS = {
    "mm": ((4, 8), (8, 6)),
    "addmm": ((4, 6), (4, 8), (8, 6)),
    "bmm": ((2, 4, 8), (2, 8, 6)),
    "baddbmm": ((2, 4, 6), (2, 4, 8), (2, 8, 6)),
}


@pytest.mark.parametrize("target", [CPU, H100], ids=["cpu", "cuda"])
@pytest.mark.parametrize("into", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_a_dtype_of_their_own(name, into, target):
    """Each PyTorch multiplies them wrongly on fake tensors, or not at all: 2.11 addmm, for one."""
    with FakeDevice(target) as mode:
        *sums, a, b = (torch.empty(shape, dtype=torch.bfloat16, device=mode.device) for shape in PRODUCTS[name])
        sums = [one.float() for one in sums]
        out = torch.empty((*PRODUCTS[name][0][:-1], 6), device=mode.device)
        for _ in range(2):  # made, and remembered
            found = getattr(torch, name)(*sums, a, b, out_dtype=torch.float32, **({"out": out} if into else {}))
            assert (found is out) == into
            assert (found.shape, found.dtype, found.device) == (out.shape, torch.float32, mode.device)
        with pytest.raises(RuntimeError):
            getattr(torch, name)(*sums, b, b, out_dtype=torch.float32)
        if sums and target is H100:
            with pytest.raises(RuntimeError, match="cpu"):
                getattr(torch, name)(sums[0].to(HOST), a, b, out_dtype=torch.float32)


def test_a_sum_over_chunks_of_tokens_has_no_product_beside_it():
    """The float32 sum of a weight's gradient: [V, D] once, in every version, as CUDA adds products of 16 bits to it."""
    with FakeDevice(H100) as mode:
        sums = torch.zeros(64, 32, device=mode.device)
        g, x = (torch.empty(shape, dtype=torch.bfloat16, device=mode.device) for shape in ((64, 16), (16, 32)))
        with LiveBytes(sums, g, x) as live:
            start = live.live
            assert lce._add_product(sums, g, x) is sums
    assert live.peak == start


@pytest.mark.parametrize("wide", [True, False])
def test_products_are_added_to_a_wide_sum_also_by_rows(wide, monkeypatch):
    monkeypatch.setattr(lce, "adds_wide", lambda dtype, device: wide)
    monkeypatch.setattr(lce, "PRODUCT_BYTES", 5 * 32 * 4)  # five rows
    with pretend() as gpu:
        g, x = (torch.randn(shape, device="cuda").bfloat16() for shape in ((64, 16), (16, 32)))
        sums = torch.randn(64, 32, device="cuda")
        wanted = sums.under + g.under.float() @ x.under.float()
        gpu.forget()
        before = gpu.peak
        assert lce._add_product(sums, g, x) is sums
        torch.testing.assert_close(sums.under, wanted)
    # The pretend GPU's own product stands for one that is added in place.
    assert wide or gpu.peak - before <= 2 * lce.PRODUCT_BYTES


def test_the_cuda_library_takes_a_wide_sum_of_products():
    """What `_add_product` rests on; no GPU is needed to see whether a build refuses it."""
    library = Path(torch.__file__).parent / "lib/libtorch_cuda.so"
    if not library.is_file():
        pytest.skip("this PyTorch is built without CUDA")
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(b"self dtype must match either out_dtype or mat1 dtype") > 0
        assert content.find(b"self and mat2 must have the same dtype, but got ") < 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_adds_products_to_a_wide_sum_in_its_memory():
    g, x = (torch.randn(shape, device="cuda").bfloat16() for shape in ((512, 128), (128, 256)))
    sums = torch.randn(512, 256, device="cuda")
    wanted = sums.double() + g.double() @ x.double()
    lce._add_product(sums.clone(), g, x)  # cuBLAS takes its workspace
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert lce._add_product(sums, g, x) is sums
    assert torch.cuda.max_memory_allocated() == before
    torch.testing.assert_close(sums.double(), wanted, rtol=1e-5, atol=1e-4)
