"""DeepSpeed's PipelineModule over gloo on its CPU accelerator: the stages of `torch_pipelining.py`, with fused AdamW.

fp32 and 1f1b alone, as its engine has one schedule, and ZeRO stage 0: with a pipeline it refuses 2 and 3. The loss that
a step returns is the mean over the micro-batches, which the engine sends to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import deepspeed
import numpy as np
import torch
from deepspeed.pipe import PipelineModule

from peers import problem, torch_module
from peers.torch_pipelining import Stage, cross_entropy

SWITCHES = frozenset({"onednn"})


def make(
    weights: dict[str, np.ndarray],
    config: problem.Config,
    dtype: str,
    switches: frozenset[str],
    *,
    schedule: str,
    parts: int,
) -> Callable[[dict[str, np.ndarray]], float]:
    """A training step of this rank: the whole batch -> its loss before the update."""
    problem.reject_unknown_switches("deepspeed-pp", switches, SWITCHES)
    if schedule != "1f1b" or dtype != "fp32":
        raise ValueError(f"deepspeed-pp has 1f1b in fp32, not {schedule} in {dtype}")
    deepspeed.init_distributed("gloo", verbose=False)
    ranks, model = torch.distributed.get_world_size(), torch_module.build(weights, config)
    stages = [Stage(model, number, ranks) for number in range(ranks)]
    net = PipelineModule(layers=stages, num_stages=ranks, loss_fn=cross_entropy, partition_method="uniform")
    del model, stages  # what no stage of this rank has
    given = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": parts}  # 1: for its own reports only
    engine, *_ = deepspeed.initialize(model=net, optimizer=torch_module.adamw(net), config=given)

    def step(batch: dict[str, np.ndarray]) -> float:
        tokens, targets = (torch.from_numpy(batch[name]).chunk(parts) for name in ("tokens", "targets"))
        return float(engine.train_batch(data_iter=iter(zip(tokens, targets))))

    return step
