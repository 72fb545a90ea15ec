"""torch's DistributedDataParallel over gloo: the module of `torch_module.py`, whole parameters and states on every
rank.

fp32, or bf16 by autocast over fp32 parameters, so gradients are reduced in fp32. Switches: `compile` is
`torch.compile(DistributedDataParallel(model))`; `bucket-view` keeps gradients in the reduction's buckets, one copy
less."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from peers import problem, torch_module

SWITCHES = frozenset({"onednn", "compile", "bucket-view"})


def make(
    weights: dict[str, np.ndarray], config: problem.Config, dtype: str, switches: frozenset[str]
) -> Callable[[dict[str, np.ndarray]], float]:
    """A training step of this rank: batch -> loss of its rows before the update."""
    problem.reject_unknown_switches("ddp", switches, SWITCHES)
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(
        torch_module.build(weights, config), gradient_as_bucket_view="bucket-view" in switches
    )
    optimizer = torch_module.adamw(model)
    forward = torch.compile(model) if "compile" in switches else model
    return torch_module.training_step(forward, optimizer, dtype == "bf16")
