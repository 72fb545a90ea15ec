"""Triton's kernels on the pretend GPU (pretend_gpu.py): its interpreter computes them, and each is a launch on the
current stream that reads what it is given, and writes what it changed.

    with pretend() as seen, interpreted():
        op("swiglu")(a, b, impl="triton")      # a and b were made on "cuda" in here

As Triton does on a GPU, it refuses memory of the host that is not pinned.
"""

import contextlib

import kernel_laws  # noqa: F401  (which mends the interpreter)
import pretend_gpu
import torch
from pretend_gpu import GpuTensor, PretendGpu, under
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten
from triton.runtime.interpreter import GridExecutor


def bytes_of(x):
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).clone()


@contextlib.contextmanager
def interpreted():
    """A context in which kernels of Triton take tensors of the pretend GPU."""
    plain, compute = GridExecutor.__call__, PretendGpu.run

    def launch(executor, *args, **kwargs):
        whole = pretend_gpu.WHOLE
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        for x in tensors:
            if not isinstance(x, GpuTensor) and not whole.pinned(x):
                raise ValueError(f"memory of the host in {executor.fn.__name__}: a kernel cannot reach it")
        with _disable_current_modes():
            before = [bytes_of(under(x)) for x in tensors]
            plain(executor, *map(under, args), **{name: under(value) for name, value in kwargs.items()})
            changed = [not torch.equal(old, bytes_of(under(x))) for old, x in zip(before, tensors)]
        writes = [under(x) for x, differs in zip(tensors, changed) if differs]
        whole.launch([under(x) for x, differs in zip(tensors, changed) if not differs], writes)

    def run(whole, func, args, kwargs):
        if func.namespace != "fzero" or not any(isinstance(x, GpuTensor) for x in tree_flatten((args, kwargs))[0]):
            return compute(whole, func, args, kwargs)
        # A launcher: with the tensors as they are.
        return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)

    GridExecutor.__call__, PretendGpu.run = launch, run
    try:
        yield
    finally:
        GridExecutor.__call__, PretendGpu.run = plain, compute
