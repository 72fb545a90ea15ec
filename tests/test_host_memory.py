"""Memory of the host that lasts: exactly as large as asked for, pinned, given back in order; and the check and the plan
of a run count what is taken."""

import gc
import mmap
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from pretend_gpu import pretend

import fzero
from fzero.core import LARGE_BYTES, PAGE, bytes_cached, bytes_taken, gpu, gpu_copies, host_memory, pytree, to_host
from fzero.core.host_memory import ALIGNED, empty_packed
from fzero.run import build, first_state, from_table
from fzero.run.measure.memory_check import host_bytes, sizes_on_host
from fzero.sharding import spec

CUDA = torch.device("cuda", 0)


def test_tensors_take_whole_pages_and_have_storages_of_their_own():
    like = [((300, 1000), torch.float32), ((), torch.int64), ((7, 3), torch.bfloat16), ((0, 5), torch.float32)]
    like += [((LARGE_BYTES + 1,), torch.uint8)]
    with pretend() as seen:
        found = empty_packed(like, "a test")
        sizes = [x.nbytes for x in found]
        assert [(tuple(x.shape), x.dtype) for x in found] == like and all(map(seen.pinned, found[:3]))
        assert seen.registered == bytes_taken(sizes) == 293 * PAGE + PAGE + 257 * PAGE and not seen.cached
        assert len({x.untyped_storage()._cdata for x in found}) == len(found)
        assert all(x.data_ptr() % ALIGNED == 0 for x in found)
        kept, found = found[2], None
        gc.collect()
        assert seen.registered == PAGE and kept.fill_(3).sum() == 63
        del kept
        gc.collect()
        assert not seen.registered


WIDTH = 400
CODE = """
import gc, mmap, sys
from pathlib import Path
import torch
from fzero.core.host_memory import empty_packed
now = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
like = [((n,), torch.uint8) for n in (37_000_001, 5_000_000, 1_048_577, 100)]
del [empty_packed(like, "a test")][:]  # what the first call takes besides
gc.collect()
before, found = now(), empty_packed(like, "a test")
between = now() - before
del found
gc.collect()
print(between - sum(n for (n,), _ in like), now() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_takes_no_more_than_the_pages():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120)
    more, after = map(int, done.stdout.split())
    assert 0 <= more <= 4 * PAGE + 16 * PAGE, "a page a tensor, and some of the interpreter's"
    assert after <= 16 * PAGE, "it is given back"


def test_a_kernel_without_huge_pages_has_small_ones(monkeypatch):
    class Memory(mmap.mmap):
        def madvise(self, advice):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Memory)
    (x,) = empty_packed([((5,), torch.float32)], "a test")
    assert x.fill_(2).sum() == 10


# ---- a state on the host


def job_of(width, **train):
    model = {"vocab_size": 300, "max_len": 8, "d_model": width, "n_layers": 2, "d_ff": 2 * width + 100}
    table = {"preset": "mlp-tiny", "model": model, "data": {"seq_len": 8}, "offload": "params=host,grads=host,opt=host"}
    table |= {"precision": {"policy": "bf16"}, "optim": {"name": "adamw"}}
    table["train"] = {"batch": 4, "micro_batch": 2, "compiled": False, "kernels": "reference", **train}
    return build.build(from_table(table), device=CUDA)


def steps(job, number=2):
    tokens = torch.randint(0, 300, (4, 8), generator=torch.Generator().manual_seed(1))
    state, batch = first_state(job), {"tokens": tokens.to(CUDA), "targets": tokens.roll(-1, 1).to(CUDA)}
    for _ in range(number):
        state, metrics = job.train_step(state, batch)
    return state, float(metrics.loss)


def test_a_run_takes_of_the_host_what_its_check_says():
    with pretend() as seen:
        job = job_of(WIDTH)
        state, _ = steps(job)
        gc.collect()
        sizes, leaves = sizes_on_host(job), pytree.named_leaves(state)
        large = [n for n in sizes.state + sizes.grads if n >= LARGE_BYTES]
        assert len(large) > 5 and sum(x.nbytes for x in leaves.values() if not x.is_cuda) == sum(sizes.state)
        assert abs(seen.registered - host_bytes(job)) <= PAGE * len(leaves)
        assert all(x.is_cuda or seen.pinned(x) for x in leaves.values())
        rounded = sum(map(bytes_cached, sizes.state + sizes.grads))
        assert rounded > 1.1 * host_bytes(job), "the case does not tell the two allocators apart"
        assert seen.cached < 0.2 * host_bytes(job)  # what is on its way
        del state, leaves
        job = None
        gc.collect()
        assert not seen.registered and not seen.freed and not seen.races


@pytest.mark.slow
def test_leaves_from_pytorch_s_allocator_are_found(monkeypatch):
    monkeypatch.setattr(spec, "to_host", lambda every, *_: [x.to("cpu").pin_memory() for x in every])
    with pretend() as seen:
        job = job_of(WIDTH)
        state, _ = steps(job)
        assert abs(seen.registered - host_bytes(job)) > PAGE * len(pytree.leaves(state))
        assert seen.registered + seen.cached > 1.1 * host_bytes(job)


@pytest.mark.slow
def test_a_plan_counts_what_is_taken():
    settings = {"precision.policy": "bf16", "train.compiled": False, "optim.name": "adamw"}
    plain = {"train.batch": 1, "train.micro_batch": 1, "train.remat": "full", "data.seq_len": 1024}
    offload = {"offload": "params=host,grads=host,opt=host,acts=host"}
    report = fzero.plan("gpt2-124m", gpu="h100", settings=settings | plain | offload)
    job = build.build(report.config, device=CUDA)
    there, sizes = report.state_elsewhere["host"], sizes_on_host(job)
    assert there == sum(sizes.state) and bytes_taken(sizes.state) - there < PAGE * len(sizes.state)
    inputs = 1024 * 768 * 2
    assert sizes.activations == [inputs] * 12
    more = host_bytes(job) - sum(sizes.state) - sum(sizes.grads) - sum(sizes.activations)
    assert 12 * (bytes_cached(inputs) - inputs) <= more <= 12 * (bytes_cached(inputs) - inputs) + 99 * PAGE
    # The last of the gradients come when most inputs are used up.
    assert there + sum(sizes.grads) < report.host_peak_bytes <= host_bytes(job)
    assert report.host_peak_bytes > 0.99 * host_bytes(job)


# ---- the end of memory


@pytest.mark.parametrize("fault", ["", "nobody waits"])
def test_memory_that_a_copy_reads_is_unpinned_behind_it(fault, monkeypatch):
    if fault:
        monkeypatch.setattr(gpu, "synchronize", lambda device: None)
    with pretend() as seen:
        (x,) = to_host([torch.ones(1 << 19)], CUDA, "a test")
        assert to_host([x], CUDA, "a test")[0] is x and x.is_pinned()
        copied = gpu_copies.copy_in(x, CUDA)
        del x
        gc.collect()
        assert not seen.registered and bool(seen.freed) == bool(fault)
        assert copied.use().sum().item() == 1 << 19


def test_memory_that_dies_while_a_graph_is_recorded_is_given_back_later(monkeypatch):
    with pretend() as seen:
        (x,) = to_host([torch.ones(1 << 19)], CUDA, "a test")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        del x
        gc.collect()
        assert seen.registered == 1 << 21 and not seen.waits
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        (x,) = to_host([torch.ones(1)], CUDA, "a test")
        assert seen.registered == PAGE and not host_memory._PENDING_RELEASES
        del x


@pytest.mark.parametrize("code", [2, 712])
def test_memory_that_cannot_be_pinned_is_one_line_that_names_the_limit(code, monkeypatch):
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: code, cudaHostUnregister=lambda *_: pytest.fail("pinned"))
    with pretend():
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        what = rf"CUDA cannot pin the 4,194,304 bytes of the state in the host's memory \(error {code}\)"
        with pytest.raises(ValueError, match=rf"^{what}; offload less .*\(ulimit -l, which is [^\n]* here\)$"):
            to_host([torch.ones(1 << 20)], CUDA, "the state in the host's memory")
        gc.collect()


def test_memory_of_a_run_on_the_cpu_is_left_as_it_is():
    x = torch.ones(2)
    assert to_host([x], gpu.HOST, "a test") == [x] and not gpu.in_use()
