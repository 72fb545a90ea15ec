"""DeepSpeed's engine over gloo on its CPU accelerator, ZeRO stage 1, 2 or 3, with torch's fused AdamW.

fp32, or its bf16 mode: bf16 parameters and gradients, fp32 master weights and states in its own optimizer, gradients
reduced in bf16. Switches: `small-buckets`, since the default buckets of 5e8 elements are made for large models;
`fp32-reduce` reduces and accumulates bf16 gradients in fp32; `compile` is `engine.compile()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import numpy as np
import torch

from peers import problem, torch_module

SWITCHES = frozenset({"onednn", "compile", "small-buckets", "fp32-reduce"})


def settings(stage: int, dtype: str, switches: frozenset[str]) -> dict[str, Any]:
    """DeepSpeed's config, less the batch size."""
    zero: dict[str, Any] = {"stage": stage}
    if "small-buckets" in switches:
        zero |= {"reduce_bucket_size": 2_000_000, "allgather_bucket_size": 2_000_000, "sub_group_size": 4_000_000}
        if stage == 3:
            zero |= {"stage3_prefetch_bucket_size": 2_000_000, "stage3_max_live_parameters": 6_000_000}
    config: dict[str, Any] = {"zero_optimization": zero}
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if "fp32-reduce" in switches:
        if dtype != "bf16":
            raise ValueError(
                f"deepspeed: the switch fp32-reduce needs --dtype bf16, not {dtype}: fp32 gradients are reduced in fp32"
            )
        config |= {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    return config


def make(
    weights: dict[str, np.ndarray], config: problem.Config, dtype: str, switches: frozenset[str], *, stage: int
) -> Callable[[dict[str, np.ndarray]], float]:
    """A training step of this rank: batch -> loss of its rows before the update."""
    problem.reject_unknown_switches("deepspeed", switches, SWITCHES)
    deepspeed.init_distributed("gloo", verbose=False)
    model = torch_module.build(weights, config)
    given = settings(stage, dtype, switches) | {"train_micro_batch_size_per_gpu": 1}  # used for its own reports only
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch_module.adamw(model), config=given)
    if "compile" in switches:
        engine.compile()

    def step(batch: dict[str, np.ndarray]) -> float:
        loss = engine(torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["targets"]))
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step
