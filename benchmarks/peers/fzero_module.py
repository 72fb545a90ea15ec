"""The module of `torch_module.py` through `fzero.from_module`: its own code, its blocks compiled once, ZeRO stage 0 on
one process or a stage from 0 to 3 on data-parallel ranks, with fused AdamW.

fp32, or bf16 with fp32 master weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch

import fzero
from fzero import optim
from fzero.core import precision
from peers import problem, torch_module

SWITCHES = frozenset({"onednn"})


def loss(call: Callable, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The mean that the module returns, as a sum over its targets."""
    number = batch["targets"].numel()
    return call(batch["tokens"], batch["targets"]) * number, number


def make(
    weights: dict[str, np.ndarray], config: problem.Config, dtype: str, switches: frozenset[str], *, stage: int = 0
) -> Callable[[dict[str, np.ndarray]], float]:
    """A training step of this rank: batch of its rows -> loss of all rows before the update."""
    problem.reject_unknown_switches("module", switches, SWITCHES)
    mesh = fzero.make_mesh({"dp": int(os.environ.get("WORLD_SIZE", "1"))})
    example = {name: torch.zeros(1, config.max_len, dtype=torch.int64) for name in ("tokens", "targets")}
    model = fzero.from_module(torch_module.build(weights, config), loss, layers="blocks", batch=example)
    policy = {"fp32": precision.fp32, "bf16": precision.bf16}[dtype]()
    tx = optim.adamw(
        problem.LR, b1=problem.BETA_1, b2=problem.BETA_2, eps=problem.EPS, weight_decay=problem.WEIGHT_DECAY
    )
    plan = fzero.zero_plan(stage, model, mesh, policy=policy)
    state = fzero.init_state(model, tx, plan, seed=0)
    model = model.with_traits(start={})  # the weights that the state began with are let go
    train_step = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(compiled=True))

    def step(batch: dict[str, np.ndarray]) -> float:
        nonlocal state
        state, metrics = train_step(state, {name: torch.from_numpy(x) for name, x in batch.items()})
        return float(metrics.loss)

    return step
