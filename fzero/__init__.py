"""fzero: ZeRO-style large-model training as pure functions over parameter pytrees.

Names load when first used, so that `fzero --help` does not wait for torch.
"""

import importlib
from typing import Any

_HOME = {
    **dict.fromkeys(("psum", "pvary", "all_gather", "psum_scatter", "all_to_all", "ppermute", "RankError"), "comm.collectives"),
    **dict.fromkeys(("LossScale", "bf16", "fp16", "fp32", "fp64"), "core.precision"),
    "fake_mesh": "sharding",
    "redistribute": "sharding",
    "local_batch": "train.batch",
    "Execution": "train.execution",
    "Mesh": "sharding",
    "Metrics": "train.step",
    "Model": "models",
    "Plan": "sharding",
    "Policy": "core.precision",
    "Remat": "core.autodiff",
    "Nvme": "offload",
    "Spec": "sharding",
    "Skip": "train.spike",
    "Spike": "train.spike",
    "TrainState": "train.state",
    "init_state": "train.init",
    "jit": "core.compile",
    "make_check": "train.sdc_check",
    "make_eval_step": "train.eval",
    "make_mesh": "sharding",
    "make_train_step": "train.step",
    "one_process": "sharding",
    "plan": "planner.plan",
    "PlanReport": "planner.plan",
    "search": "planner.search",
    "remat": "core.autodiff",
    "reopened": "train.state_on_disk",
    "stack": "core.stack",
    "state_specs": "train.state",
    "zero_plan": "sharding",
}
_MODULES = {
    **{name: name for name in ("checkpoint", "comm", "core", "data", "kernels", "models", "offload", "optim", "run", "sharding", "train")},
    "pytree": "core.pytree",
    "random": "core.prng",
}

__all__ = [*_HOME, *_MODULES]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"fzero.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"fzero.{_MODULES[name]}")
    raise AttributeError(f"module 'fzero' has no attribute {name!r}")
