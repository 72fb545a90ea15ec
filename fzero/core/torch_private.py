"""All private names of torch that fzero uses, each found when it is first used: they may be missing or changed in
another version.

No other file of the package names a private module or function of torch (tests/test_torch_private.py); operators of
torch.ops are not counted, as graphs show them by these names. Use `from fzero.core.torch_private import FakeTensor`,
or, for the modules of Inductor and Dynamo, which take a second to import, `torch_private.inductor_config` inside a
function. A large import is quicker without a search for garbage (`without_collection`)."""

from __future__ import annotations

import contextlib
import gc
import importlib
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for isinstance, after which a type checker knows the attributes
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """A context in which Python does not look for garbage, a tenth of the time of importing torch.

    >>> with without_collection():
    ...     import json
    >>> gc.isenabled()
    True
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Our name: its place in torch. A name after the colon is an attribute of the module before it.
NAMES = {
    "AsyncCompile": "torch._inductor.async_compile:AsyncCompile",
    "CacheBase": "torch._inductor.codecache:CacheBase",
    "CppCodeCache": "torch._inductor.codecache:CppCodeCache",
    "CppPythonBindingsCodeCache": "torch._inductor.codecache:CppPythonBindingsCodeCache",
    "DataDependent": "torch._subclasses.fake_tensor:DataDependentOutputException",
    "DebugContext": "torch._inductor.debug:DebugContext",
    "DisableTorchFunction": "torch._C:DisableTorchFunction",
    "DispatchKey": "torch._C:DispatchKey",
    "DeviceProperties": "torch._inductor.runtime.hints:DeviceProperties",
    "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "OpOverload": "torch._ops:OpOverload",
    "GraphLowering": "torch._inductor.graph:GraphLowering",
    "ShapeEnv": "torch.fx.experimental.symbolic_shapes:ShapeEnv",
    "StridedShard": "torch.distributed.tensor.placement_types:_StridedShard",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "TorchDispatchModeKey": "torch._C:_TorchDispatchModeKey",
    "TracingContext": "torch._guards:TracingContext",
    "V": "torch._inductor.virtualized:V",
    "avx2_supported": "torch.cpu:_is_avx2_supported",
    "checkpoint_without_reentrant": "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
    "clear_interpreter_stack": "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
    "compile_fx": "torch._inductor.compile_fx",
    "compile_fx_inner": "torch._inductor.compile_fx:compile_fx_inner",
    "default_op_list": "torch._functorch.partitioners:get_default_op_list",
    "device_interface": "torch._dynamo.device_interface",
    "disable_current_modes": "torch.utils._python_dispatch:_disable_current_modes",
    "dynamo_guards": "torch._C._dynamo.guards",
    "dynamo_reset": "torch._dynamo:reset",
    "foreach_copy_": "torch:_foreach_copy_",
    "end_allocate_to_pool": "torch._C:_cuda_endAllocateToPool",
    "extern_kernels": "torch._inductor.select_algorithm:extern_kernels",
    "functorch_config": "torch._functorch.config",
    "fused_adam_": "torch:_fused_adam_",
    "fused_adamw_": "torch:_fused_adamw_",
    "get_current_dispatch_mode": "torch.utils._python_dispatch:_get_current_dispatch_mode",
    "get_dispatch_mode": "torch._C:_get_dispatch_mode",
    "get_interpreter_stack": "torch._C._functorch:get_interpreter_stack",
    "get_unwrapped": "torch._C._functorch:get_unwrapped",
    "grouped_mm": "torch:_grouped_mm",
    "in_kernel_invocation": "torch._subclasses.fake_tensor:in_kernel_invocation_manager",
    "inductor_config": "torch._inductor.config",
    "inductor_scheduler": "torch._inductor.scheduler",
    "is_functorch_wrapped_tensor": "torch._C._functorch:is_functorch_wrapped_tensor",
    "is_fx_symbolic_tracing": "torch.fx._symbolic_trace:is_fx_symbolic_tracing",
    "joint_graph_passes": "torch._inductor.fx_passes.joint_graph:joint_graph_passes",
    "maybe_get_bdim": "torch._C._functorch:maybe_get_bdim",
    "min_cut_partition": "torch._functorch.partitioners:min_cut_rematerialization_partition",
    "partitioners": "torch._functorch.partitioners",
    "peek_interpreter_stack": "torch._C._functorch:peek_interpreter_stack",
    "pick_vec_isa": "torch._inductor.cpu_vec_isa:pick_vec_isa",
    "release_pool": "torch._C:_cuda_releasePool",
    "run_autograd": "torch.autograd.graph:_engine_run_backward",
    "scaled_mm": "torch:_scaled_mm",
    "select_decomp_table": "torch._inductor.decomposition:select_decomp_table",
    "supported_vec_isa_list": "torch._inductor.cpu_vec_isa:supported_vec_isa_list",
    "torch_pytree": "torch.utils._pytree",
    "tracing": "torch._guards:tracing",
    "transforms_active": "torch._C:_are_functorch_transforms_active",
    "triton_helpers": "torch._inductor.runtime.triton_helpers",
    "triton_utils": "torch.utils._triton",
    "unwrap_dead_wrappers": "torch._functorch.utils:unwrap_dead_wrappers",
    "view_to_reshape": "torch._inductor.fx_passes.post_grad:view_to_reshape",
}


def resolve(name: str) -> Any:
    """What torch has under one of NAMES; raises ImportError with one line where this version lacks it."""
    import torch

    module, _, attribute = NAMES[name].partition(":")
    try:
        if module.startswith("torch._C"):  # an extension, whose submodules are attributes
            namespace = operator.attrgetter(module.removeprefix("torch."))(torch)
        else:
            with without_collection():
                namespace = importlib.import_module(module)
        return getattr(namespace, attribute) if attribute else namespace
    except (ImportError, AttributeError) as error:
        path = NAMES[name].replace(":", ".")
        raise ImportError(
            f"torch {torch.__version__} has no {path}, which fzero uses ({error}); install another version of torch"
        ) from error


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = resolve(name)
    return globals()[name]
