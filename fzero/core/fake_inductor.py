"""Compiled graphs in a plan: Inductor lowers and schedules a graph as it does for a run, and what it generates is executed on fake tensors.

Inductor's output is a Python function which allocates and frees buffers, calls products and our operators, and launches the kernels that it
fused. On fake tensors all of that but a launch runs as it is, so that a buffer is born, reused and freed where it is in a run. Of a fused
kernel no code is compiled: its launch is `launched("fused", what it reads, what it writes)`.

Ref: torch._inductor.compile_fx, whose steps `generated` takes up to the code.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fzero.core.device import ELSEWHERE, HOST, FakeDevice, Target, fake_device_of, record_launch

_GPU = torch.device("cuda", 0)
# Of every NVIDIA GPU from compute capability 8.0 on: CUDA programming guide, table of technical specifications.
_LIMITS = {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "warp_size": 32}
# In what is generated: what needs a GPU, or a compiler.
_RUNTIME = (
    (r"async_compile = AsyncCompile\(\)", ""),
    (r"from torch._C import \w+ as get_raw_stream", ""),
    (r"torch\.cuda\.(_DeviceGuard|set_device)", "nothing"),
    (r"device\(type='cuda', index=0\)", "device('cpu', 0)"),
)


def _nothing(*_: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class _Kernel:
    """A fused kernel of this source, whose arguments are named after what it does with them, as Inductor names them."""

    def __init__(self, signature: str) -> None:
        names = [argument.split()[-1] for argument in signature.split(",")]
        self.reads = [name.startswith("in_") for name in names]
        self.writes = ["out_ptr" in name for name in names]

    def __call__(self, *args: Any, **options: Any) -> None:
        """Note the launch. Arguments may be parts of one buffer, of which the largest counts."""
        columns = []
        for flags in (self.reads, self.writes):
            chosen: dict[int, Tensor] = {}
            for x, flag in sorted(zip(args, flags), key=lambda pair: -pair[0].numel() if isinstance(pair[0], Tensor) else 0):
                if flag and isinstance(x, Tensor):
                    chosen.setdefault(x.untyped_storage()._cdata, x)
            columns.append([*chosen.values()])
        record_launch("fused", *columns)

    run = __call__  # as Triton's are launched


class _Kernels:
    """What a module of Inductor's has for `async_compile`: nothing is compiled."""

    def cpp_pybinding(self, argument_types: Sequence[str], source: str, **_: Any) -> _Kernel:
        return _Kernel(re.search(r"kernel\((.*?)\)", source, re.DOTALL)[1])

    def triton(self, name: str, source: str, **_: Any) -> _Kernel:
        return _Kernel(re.search(rf"def {name}\((.*?)\)", source, re.DOTALL)[1])

    def wait(self, _: Any) -> None:
        """For the compilers, of which there are none."""


@contextlib.contextmanager
def _as_on(target: Target) -> Iterator[None]:
    """Inductor's questions about the GPU are answered for `target` while this is entered: it asks torch.cuda, and nobody else."""
    import torch._dynamo.device_interface as interface
    import torch._inductor.scheduler
    import torch.utils._triton
    from torch._inductor.codecache import CacheBase
    from torch._inductor.runtime.hints import DeviceProperties

    found = types.SimpleNamespace(
        name=target.name,
        gcnArchName=target.name,
        multi_processor_count=target.processors,
        major=target.capability[0],
        minor=target.capability[1],
        **_LIMITS,
    )
    answers = (
        (torch.cuda, "get_device_properties", lambda device=None: found),
        (torch.cuda, "get_device_capability", lambda device=None: target.capability),
        (torch.cuda, "current_device", lambda: 0),
        (interface.CudaInterface, "get_device_properties", staticmethod(lambda device=None: found)),
        (interface.CudaInterface, "current_device", staticmethod(lambda: 0)),
        (torch._inductor.scheduler, "has_triton", lambda: True),
        (torch.utils._triton, "triton_hash_with_backend", lambda: "none"),
    )
    kept = (DeviceProperties.create, CacheBase.get_system)
    with contextlib.ExitStack() as stack:
        # Alone: where processes that compile are waiting already, kernels are handed to them while code is generated.
        stack.enter_context(torch._inductor.config.patch(compile_threads=1))
        for owner, name, answer in answers:
            stack.enter_context(mock.patch.object(owner, name, answer))
        for cache in kept:
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        yield


def _moved(graph: torch.fx.GraphModule, examples: Sequence[Tensor], target: Target) -> list[Tensor]:
    """The examples of a plan for a GPU as fake CUDA tensors; the graph then makes its own on that device. No autograd sees them.

    They are of a plan in which a graph is traced, so that its collectives give results and are not entered in a ledger.
    """

    def there(x: Any) -> Any:
        return _GPU if isinstance(x, torch.device) and x == ELSEWHERE else x

    for node in graph.graph.nodes:
        node.args, node.kwargs = (torch.fx.node.map_aggregate(given, there) for given in (node.args, node.kwargs))
    with FakeDevice(target, tracing=True):
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=there(x.device)) for x in examples]


def generated(graph: torch.fx.GraphModule, examples: Sequence[Tensor], backward: bool) -> tuple[str, dict[str, Any]]:
    """(the Python module that Inductor makes of a graph, the constants that it wants among its globals)."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    with contextlib.ExitStack() as stack:
        plan = next((fake_device_of(x) for x in examples if x.device == ELSEWHERE), None)
        if plan is not None:
            stack.enter_context(_as_on(plan.target))
            examples = _moved(graph, examples, plan.target)
            stack.enter_context(tracing(TracingContext(examples[0].fake_mode)))
        view_to_reshape(graph)
        with torch.no_grad():
            mode = compile_fx.fake_tensor_prop(graph, examples)
        compile_fx._recursive_record_original_output_strides(graph)
        for context in (V.set_fake_mode(mode), V.set_debug_handler(DebugContext())):
            stack.enter_context(context)
        compile_fx._recursive_post_grad_passes(graph, is_inference=False)
        stack.enter_context(compile_fx.maybe_disable_comprehensive_padding(examples))
        lowering = GraphLowering(graph, example_inputs=examples, is_backward=backward, is_inference=False)
        lowering.freeze_runtime_asserts()
        for context in (V.set_graph_handler(lowering), V.set_extern_kernel_nodes([])):
            stack.enter_context(context)
        lowering.run(*examples)
        return lowering.codegen()[0].value, dict(lowering.constants)


def lowered(graph: torch.fx.GraphModule, examples: Sequence[Tensor], backward: bool) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """The compiled graph, to be called with a list of fake tensors which it empties.

    examples: fake inputs of a plan. backward: whether it is a backward pass.
    """
    device = next((x.device for x in examples if x.device == ELSEWHERE), HOST)
    source, constants = generated(graph, examples, backward)
    for text, instead in _RUNTIME:
        source = re.sub(text, instead, source)
    module: dict[str, Any] = {"async_compile": _Kernels(), "nothing": _nothing, **constants}
    exec(compile(source, "<generated>", "exec"), module)

    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device = HOST) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def part(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        return x.as_strided(size, stride, x.storage_offset() + offset)

    module |= {"empty_strided_cpu": empty, "empty_strided_cuda": functools.partial(empty, device=device), "reinterpret_tensor": part}
    module |= {"assert_size_stride": _nothing, "assert_alignment": _nothing, "get_raw_stream": _nothing}  # shapes are as traced
    return module["call"]
