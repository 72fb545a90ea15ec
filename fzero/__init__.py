"""fzero: ZeRO-style large-model training as pure functions over parameter pytrees.

Names load when first used, so that `fzero --help` does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what a type checker and an editor know; a test compares it with the names below
    from fzero import checkpoint as checkpoint
    from fzero import comm as comm
    from fzero import core as core
    from fzero import data as data
    from fzero import kernels as kernels
    from fzero import models as models
    from fzero import offload as offload
    from fzero import optim as optim
    from fzero import run as run
    from fzero import sharding as sharding
    from fzero import train as train
    from fzero.checkpoint.convert.from_huggingface import from_huggingface as from_huggingface
    from fzero.checkpoint.convert.from_huggingface import to_huggingface as to_huggingface
    from fzero.comm.collectives import RankError as RankError
    from fzero.comm.collectives import all_gather as all_gather
    from fzero.comm.collectives import all_to_all as all_to_all
    from fzero.comm.collectives import ppermute as ppermute
    from fzero.comm.collectives import psum as psum
    from fzero.comm.collectives import psum_scatter as psum_scatter
    from fzero.comm.collectives import pvary as pvary
    from fzero.core import prng as random  # noqa: F401
    from fzero.core import pytree as pytree
    from fzero.core.autodiff import Remat as Remat
    from fzero.core.autodiff import remat as remat
    from fzero.core.compile import jit as jit
    from fzero.core.precision import LossScale as LossScale
    from fzero.core.precision import Policy as Policy
    from fzero.core.precision import bf16 as bf16
    from fzero.core.precision import fp16 as fp16
    from fzero.core.precision import fp32 as fp32
    from fzero.core.precision import fp64 as fp64
    from fzero.core.stack import stack as stack
    from fzero.models import Model as Model
    from fzero.models.from_module import from_module as from_module
    from fzero.offload import Nvme as Nvme
    from fzero.planner.plan import plan as plan
    from fzero.planner.plan_report import PlanReport as PlanReport
    from fzero.planner.search import search as search
    from fzero.run.deepspeed import config_from_deepspeed as config_from_deepspeed
    from fzero.run.measure.loggers import open_loggers as open_loggers
    from fzero.sharding import Context as Context
    from fzero.sharding import Mesh as Mesh
    from fzero.sharding import Pipeline as Pipeline
    from fzero.sharding import Plan as Plan
    from fzero.sharding import Spec as Spec
    from fzero.sharding import fake_mesh as fake_mesh
    from fzero.sharding import make_mesh as make_mesh
    from fzero.sharding import one_process as one_process
    from fzero.sharding import redistribute as redistribute
    from fzero.sharding import zero_plan as zero_plan
    from fzero.train.batch import local_batch as local_batch
    from fzero.train.eval import make_eval_step as make_eval_step
    from fzero.train.execution import Execution as Execution
    from fzero.train.full_params import full_params as full_params
    from fzero.train.init import init_state as init_state
    from fzero.train.masters import with_params as with_params
    from fzero.train.optimizer_change import with_optimizer as with_optimizer
    from fzero.train.sdc_check import make_check as make_check
    from fzero.train.spike import Skip as Skip
    from fzero.train.spike import Spike as Spike
    from fzero.train.state import TrainState as TrainState
    from fzero.train.state import state_specs as state_specs
    from fzero.train.state_on_disk import reopen_state as reopen_state
    from fzero.train.step import Metrics as Metrics
    from fzero.train.step import make_train_step as make_train_step
    from fzero.train.to_module import to_module as to_module
else:  # which for a type checker would make every misspelt name Any

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(importlib.import_module(f"fzero.{_HOME[name]}"), name)
        if name in _MODULES:
            return importlib.import_module(f"fzero.{_MODULES[name]}")
        raise AttributeError(f"module 'fzero' has no attribute {name!r}")


_HOME = {
    **dict.fromkeys(
        ("psum", "pvary", "all_gather", "psum_scatter", "all_to_all", "ppermute", "RankError"), "comm.collectives"
    ),
    **dict.fromkeys(("LossScale", "bf16", "fp16", "fp32", "fp64"), "core.precision"),
    "config_from_deepspeed": "run.deepspeed",
    "fake_mesh": "sharding",
    "redistribute": "sharding",
    "local_batch": "train.batch",
    "Execution": "train.execution",
    "Context": "sharding",
    "Mesh": "sharding",
    "Metrics": "train.step",
    "Model": "models",
    "Pipeline": "sharding",
    "Plan": "sharding",
    "Policy": "core.precision",
    "Remat": "core.autodiff",
    "Nvme": "offload",
    "Spec": "sharding",
    "Skip": "train.spike",
    "Spike": "train.spike",
    "TrainState": "train.state",
    **dict.fromkeys(("from_huggingface", "to_huggingface"), "checkpoint.convert.from_huggingface"),
    "from_module": "models.from_module",
    "full_params": "train.full_params",
    "init_state": "train.init",
    "jit": "core.compile",
    "make_check": "train.sdc_check",
    "make_eval_step": "train.eval",
    "make_mesh": "sharding",
    "make_train_step": "train.step",
    "one_process": "sharding",
    "open_loggers": "run.measure.loggers",
    "plan": "planner.plan",
    "PlanReport": "planner.plan_report",
    "search": "planner.search",
    "remat": "core.autodiff",
    "reopen_state": "train.state_on_disk",
    "stack": "core.stack",
    "state_specs": "train.state",
    "to_module": "train.to_module",
    "with_optimizer": "train.optimizer_change",
    "with_params": "train.masters",
    "zero_plan": "sharding",
}
_MODULES = {
    **{
        name: name
        for name in (
            "checkpoint",
            "comm",
            "core",
            "data",
            "kernels",
            "models",
            "offload",
            "optim",
            "run",
            "sharding",
            "train",
        )
    },
    "pytree": "core.pytree",
    "random": "core.prng",
}

# A test compares them with the imports above.
__all__ = [*_HOME, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
