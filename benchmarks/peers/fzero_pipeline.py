"""fzero's own step on ranks of pp, ZeRO stage 0, with fused AdamW, eager or with the switch `compile`.

fp32, or bf16 parameters with fp32 master weights and states.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch

import fzero
from fzero import optim
from fzero.core import precision, pytree
from fzero.sharding.pipeline import FAMILIES
from peers import fzero_step, problem

SWITCHES = frozenset({"onednn", "compile"})


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
    problem.reject_unknown_switches("fzero-pp", switches, SWITCHES)
    model = fzero_step.model_of(config)
    policy = {"fp32": precision.fp32, "bf16": precision.bf16}[dtype]()
    tx = optim.adamw(
        problem.LR, b1=problem.BETA_1, b2=problem.BETA_2, eps=problem.EPS, weight_decay=problem.WEIGHT_DECAY
    )
    mesh = fzero.make_mesh({"pp": int(os.environ["WORLD_SIZE"])})
    pipeline = fzero.Pipeline(schedule, chunks=FAMILIES[schedule].chunks or problem.CHUNKS)
    plan = fzero.zero_plan(0, model, mesh, policy=policy, pipeline=pipeline)
    how = fzero.Execution(compiled="compile" in switches)
    train_step = fzero.make_train_step(model, tx, plan, micro_batches=parts, execution=how)
    params = pytree.from_named({name: torch.tensor(w) for name, w in weights.items()}, plan.like)
    state = fzero.init_state(params, tx, plan, seed=0)
    del params  # the state keeps its shards

    def step(batch: dict[str, np.ndarray]) -> float:
        nonlocal state
        here = {name: torch.from_numpy(x) for name, x in batch.items()}
        state, metrics = train_step(state, fzero.local_batch(here, mesh, parts))
        return float(metrics.loss)

    return step
