"""The kernels that Inductor would generate for the compiled blocks of a step on a GPU, compiled without that GPU.

A step is planned with compiled blocks (fake_inductor.py); the kernels are taken from the code that Inductor generates,
and its own heuristics choose the block sizes, as in a run.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from fzero import models, optim
from fzero.core import precision
from fzero.core.device import PLANNED_GPU, FakeDevice, Target
from fzero.core.files import writing
from fzero.kernels import aot
from fzero.planner import devices, fake_inductor
from fzero.sharding import one_process, zero_plan
from fzero.train.execution import Execution, Skip
from fzero.train.init import init_state
from fzero.train.step import make_train_step

MODELS = {"llama": "llama-8b", "gpt2": "gpt2-124m", "mixtral": "mixtral-8x7b"}  # a preset for each kind of block
DEVICES = {"sm_90": "h200", "sm_80": "a100"}  # for each of aot.ARCHS that Inductor is planned for
SEQ_LEN = 1024  # tokens of the planned step


class Generated(NamedTuple):
    """A kernel that Inductor generates: which model and architecture it is for, its name, and its source."""

    arch: str
    model: str
    number: int  # among those of the step, as forward and backward passes use the same names
    name: str
    source: str

    @property
    def label(self) -> str:
        """The kernel in the list of all."""
        return f"inductor {self.arch} {self.model} {self.number} {self.name}"


def generate_kernels(model: str, arch: str) -> list[Generated]:
    """The kernels of a step of one of MODELS, with one layer, compiled blocks and bf16, on a GPU of `arch`."""
    if fake_inductor.note():
        raise ValueError(fake_inductor.note())
    device = devices.device(DEVICES[arch])
    target = Target("cuda", device.processors, device.capability, device.name)
    sources: dict[tuple[str, str], None] = {}  # in their order, each once
    with torch.no_grad(), FakeDevice(target, lower=functools.partial(_lower, sources)) as mode:
        built = models.build(replace(models.preset(MODELS[model]), n_layers=1))
        plan = zero_plan(0, built, one_process(), policy=precision.bf16())
        tx = optim.sgd(1e-3)
        step = make_train_step(
            built, tx, plan, skip=Skip(nonfinite=False), execution=Execution(compiled=True)
        )  # a plan has no values to look at
        state = init_state(built, tx, plan, seed=0, device=mode.device)
        tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64, device=mode.device)
        step(state, {"tokens": tokens, "targets": tokens.clone()})
    return [Generated(arch, model, number, *kernel) for number, kernel in enumerate(sources)]


def _lower(
    sources: dict[tuple[str, str], None], graph: torch.fx.GraphModule, examples: Sequence[Tensor], backward: bool
) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    code, constants = fake_inductor.generate_code(graph, examples, backward)
    sources |= dict.fromkeys(kernels_in(code))
    return fake_inductor.load(code, constants, PLANNED_GPU)


def kernels_in(code: str) -> Iterator[tuple[str, str]]:
    """(name, source) of each Triton kernel in a Python module that Inductor has generated.

    >>> list(kernels_in("add = async_compile.triton('add', 'def add(): ...', device_str='cuda')"))
    [('add', 'def add(): ...')]
    """
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton":
            name, source = map(ast.literal_eval, node.args[:2])
            yield name, source


def compile_generated(kernel: Generated) -> aot.CompiledBuild:
    """Compile a kernel with each block size that Inductor would try; the most of each number in the code."""
    arch = aot.ARCHS[kernel.arch]
    try:
        results = [aot.read_code(arch, compiled) for compiled in _compile(kernel)]
    except Exception as error:  # of Inductor, Triton or the assembler: what it says is the result
        return aot.failed(f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
    max_counts = aot.CompiledBuild(*(max(column) for column in zip(*(result[:6] for result in results))))
    return max_counts._replace(wrong=aot.too_much_shared(arch, max_counts.shared))


def _compile(kernel: Generated) -> list[Any]:
    from fzero.core.torch_private import inductor_config, triton_helpers

    with (
        tempfile.TemporaryDirectory() as folder,
        # It looks for a GPU; the kernel's own metadata say which one it is for.
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        inductor_config.patch(use_static_cuda_launcher=False),  # which keeps the cubin alone
    ):
        path = Path(folder) / "generated.py"
        with writing(path, "new") as file:
            file.write(kernel.source.encode())
        spec = importlib.util.spec_from_file_location("generated", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tuner = getattr(module, kernel.name)
        tuner.precompile(warm_cache_only=True)
        return [result.kernel for result in tuner.compile_results]
