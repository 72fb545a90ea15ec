"""Triton's forms on the pretend GPU (pretend_triton.py): what the host does around their kernels, in every case of
benchmarks/kernel_cases.py at tiny sizes. Their numbers are the matter of the kernels' own tests."""

import functools
import gc
import importlib
from pathlib import Path

import kernel_laws  # noqa: F401  (what the interpreter needs)
import pytest
import torch
from pretend_gpu import GpuTensor, pretend
from pretend_triton import interpreted

import fzero
from fzero.core import gpu, gpu_copies, observe
from fzero.kernels import registry
from fzero.kernels.float8 import cpu_lacks

ROOT = Path(fzero.__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
FORMS = {"grouped_mm": "torch", "float8_linear": "scaled_mm"}  # of a GPU, where it is not Triton's
FORMS |= dict.fromkeys(("linear", "logits", "gelu", "sigmoid", "tanh", "log_sum_exp", "quantized_linear"), "reference")


@pytest.fixture
def made(monkeypatch):
    """The functions that make the cases of benchmarks/kernel_cases.py, tiny, on the GPU of the context."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("kernel_cases").cases("cuda", tiny=True)


def results_of(run, *tensors):
    found = run(*tensors)
    return [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, torch.Tensor)]


def lacks_float8(label):
    """Whether this machine's CPU, in the GPU's place, has no float8 products of a case, by its label."""
    return bool(cpu_lacks("rowwise" if "rowwise" in label else "tensorwise"))


@pytest.mark.slow
def test_every_form_takes_tensors_of_the_gpu_and_waits_for_nothing(made):
    labels = set()
    with pretend() as seen, interpreted():
        for make in made:
            case = make()
            if case.label in labels or (case.op.name == "float8_linear" and lacks_float8(case.label)):
                continue
            labels.add(case.label)
            seen.forget()
            with observe() as used, torch.no_grad():
                found = results_of(functools.partial(case.run, "auto"), *case.tensors)
            assert used[case.op.name] == {FORMS.get(case.op.name, "triton")}
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
        run = functools.partial(registry.op("swiglu"), impl="triton")
        assert run(x.use(), y.use()).is_cuda and not seen.races
        x = gpu_copies.copy_in(gpu.pinned(b, device), device)
        run(x.tensor, y.tensor)
        assert any("read by 0 at kernels/" in text for text in seen.races)
        with pytest.raises(ValueError, match=r"memory of the host in _glu_forward|tensors? .*cpu"):
            run(x.use(), b)
