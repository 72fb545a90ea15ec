"""torch's FSDP2 over gloo: `fully_shard` on every block and on the whole; parameters, gradients and states are sharded.

bf16 by `MixedPrecisionPolicy(param_dtype=bfloat16)`: the shards and AdamW's states are fp32, what is gathered and
computed with is bf16, and gradients are reduced in bf16, or in fp32 with the switch `fp32-reduce`. Blocks are freed
after the forward pass (the default); the switch `reshard-root` frees the root's leaves (embedding, last norm, head)
too. `compile` compiles the block, as torchtitan does.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from peers import problem, torch_module

SWITCHES = frozenset({"onednn", "compile", "fp32-reduce", "reshard-root"})


def make(
    weights: dict[str, np.ndarray], config: problem.Config, dtype: str, switches: frozenset[str]
) -> Callable[[dict[str, np.ndarray]], float]:
    """A training step of this rank: batch -> loss of its rows before the update."""
    problem.reject_unknown_switches("fsdp2", switches, SWITCHES)
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32 if "fp32-reduce" in switches else None)
    elif "fp32-reduce" in switches:
        raise ValueError(
            f"fsdp2: the switch fp32-reduce needs --dtype bf16, not {dtype}: fp32 gradients are reduced in fp32"
        )
    model = torch_module.build(weights, config)
    for block in model.blocks:
        if "compile" in switches:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True if "reshard-root" in switches else None)
    return torch_module.training_step(model, torch_module.adamw(model), autocast=False)
