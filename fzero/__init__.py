"""fzero: ZeRO-style large-model training as pure functions over parameter pytrees.

Names load when first used, so that `fzero --help` does not wait for torch.
"""

import importlib
from typing import Any

_HOME = {
    **dict.fromkeys(("psum", "pvary", "all_gather", "psum_scatter", "all_to_all", "ppermute", "RankError"), "collectives"),
    "fake_mesh": "sharding",
    "redistribute": "sharding",
    "local_batch": "train",
    "Mesh": "sharding",
    "Metrics": "train",
    "Model": "models",
    "Plan": "sharding",
    "Policy": "precision",
    "Remat": "autodiff",
    "Space": "offload",
    "Spec": "sharding",
    "Spike": "spikes",
    "TrainState": "state",
    "init_state": "init",
    "jit": "compile",
    "make_check": "crosscheck",
    "make_eval_step": "train",
    "make_mesh": "sharding",
    "make_train_step": "train",
    "one_process": "sharding",
    "plan": "planner.report",
    "PlanReport": "planner.report",
    "search": "planner.search",
    "remat": "autodiff",
    "reopened": "stored",
    "stack": "streaming",
    "state_specs": "state",
    "zero_plan": "sharding",
}
_MODULES = (
    "autodiff",
    "checkpoint",
    "collectives",
    "config",
    "data",
    "kernels",
    "models",
    "offload",
    "optim",
    "precision",
    "pytree",
    "random",
    "sharding",
    "train",
)

__all__ = [*_HOME, *(name for name in _MODULES if name not in _HOME)]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"fzero.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"fzero.{name}")
    raise AttributeError(f"module 'fzero' has no attribute {name!r}")
