"""Triton's forms on the pretend GPU (pretend_triton.py): what the host does around their kernels, in every case of
benchmarks/gpu.py at tiny sizes. Their numbers are the matter of the kernels' own tests."""

import functools
import gc
import importlib
import sys
from pathlib import Path

import pytest
import torch
from pretend_gpu import GpuTensor, pretend
from pretend_triton import interpreted

import fzero
from fzero.core import gpu, gpu_copies
from fzero.kernels.registry import observe, op

ROOT = Path(fzero.__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def made(monkeypatch):
    """The functions that make the cases of benchmarks/gpu.py, tiny, on the GPU of the context."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("kernel_cases").cases("cuda", tiny=True)


def results_of(run, *tensors):
    found = run(*tensors)
    return [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, torch.Tensor)]


@pytest.mark.slow
def test_every_form_takes_tensors_of_the_gpu_and_waits_for_nothing(made):
    labels = set()
    with pretend() as seen, interpreted():
        for make in made:
            case = make()
            if case.label in labels:
                continue
            labels.add(case.label)
            seen.forget()
            with observe() as used, torch.no_grad():
                found = results_of(functools.partial(case.run, "auto"), *case.tensors)
            assert used[case.op.name] == {"torch" if case.op.name == "grouped_mm" else "triton"}
            assert not seen.waits and not seen.unpinned and sum(seen.kernels.values()), case.label
            assert all(isinstance(x, GpuTensor) for x in found)
            if case.op.name in ("rms_norm", "swiglu"):
                leaves = [x.detach().requires_grad_(i < case.wanted) for i, x in enumerate(case.tensors)]
                (out,) = results_of(functools.partial(case.run, "auto"), *leaves)
                torch.autograd.grad(out, leaves[: case.wanted], torch.ones_like(out))
                assert not seen.waits and not seen.unpinned
            if found:
                expected = results_of(functools.partial(case.run, "reference"), *case.tensors)
                for x, y in zip(found, expected):
                    x, y = x.detach().to("cpu").double(), y.detach().to("cpu").double()
                    assert (x - y).abs().max() <= 0.02 * y.abs().max() + 1e-6, case.label
            del case, found
        gc.collect()
        assert len(labels) > 15 and not seen.races and not seen.freed


@pytest.mark.slow
def test_a_kernel_that_does_not_wait_for_its_input_is_found():
    b = torch.ones(4, 64)
    with pretend() as seen, interpreted():
        device = torch.device("cuda", 0)
        x, y = (gpu_copies.copy_in(gpu.pinned(b, device), device) for _ in range(2))
        run = functools.partial(op("swiglu"), impl="triton")
        assert run(x.use(), y.use()).is_cuda and not seen.races
        x = gpu_copies.copy_in(gpu.pinned(b, device), device)
        run(x.tensor, y.tensor)
        assert any("read by 0 at kernels/" in text for text in seen.races)
        with pytest.raises(ValueError, match=r"memory of the host in _glu_forward|tensors? .*cpu"):
            run(x.use(), b)


@pytest.mark.slow
def test_the_benchmark_goes_on_where_it_was(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "gpu", raising=False)
    benchmark, path, calls = importlib.import_module("gpu"), tmp_path / "gpu.json", []

    def one(value, error=None):
        calls.append(value)
        if error is not None:
            raise error
        return value

    record = benchmark.Record(path, "cpu")
    record.add("kernels", "a", lambda: one(1))
    record.add("kernels", "b", lambda: one(2, RuntimeError("of one\nkernel")))
    with pytest.raises(KeyboardInterrupt):
        record.add("kernels", "c", lambda: one(3, KeyboardInterrupt()))
    record = benchmark.Record(path, "cpu")
    for key in "abcd":
        record.add("kernels", key, lambda: one(4))
    assert calls == [1, 2, 3, 4] and record.found["kernels"] == {"a": 1, "d": 4}
    failed = {
        "kernels: b": "RuntimeError: of one",
        "kernels: c": "it ended the process, or ran past the limit of its part",
    }
    assert benchmark.Record(path, "cpu").found["failed"] == record.found["failed"] == failed
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "H100"'))
    with pytest.raises(SystemExit, match="is of H100, and this is cpu; give another --out"):
        benchmark.Record(path, "cpu")
    files = [ROOT / f"tests/test_{name}.py" for name in benchmark.TESTS.split()]
    assert len(files) > 10 and all(file.is_file() for file in files)
