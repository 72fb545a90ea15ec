"""fzero's own step: `make_train_step` with a mesh of one process, ZeRO stage 0, fused AdamW.

fp32, or bf16 with fp32 master weights. The switch `onednn` is set for the whole process by the worker.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

import fzero
from fzero import models, optim
from fzero.core import precision, pytree
from fzero.sharding import Mesh
from peers import problem

SWITCHES = frozenset({"onednn"})


def make(
    weights: dict[str, np.ndarray], config: problem.Config, dtype: str, switches: frozenset[str]
) -> Callable[[dict[str, np.ndarray]], float]:
    """A training step from these weights: batch -> loss before the update."""
    problem.reject_unknown_switches("fzero", switches, SWITCHES)
    return on_mesh(weights, config, dtype, 0, fzero.one_process())


def model_of(config: problem.Config) -> models.Model:
    """The problem's model."""
    return models.llama(
        models.LlamaConfig(
            vocab_size=config.vocab_size,
            d_model=config.d_model,
            n_layers=config.n_layers,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            d_ff=config.d_ff,
            max_len=config.max_len,
            norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
            tied=False,
        )
    )


def on_mesh(
    weights: dict[str, np.ndarray], config: problem.Config, dtype: str, stage: int, mesh: Mesh
) -> Callable[[dict[str, np.ndarray]], float]:
    """The step on a mesh at a ZeRO stage: this rank's rows -> the loss of all ranks' rows before the update."""
    model = model_of(config)
    policy = {"fp32": precision.fp32, "bf16": precision.bf16}[dtype]()
    tx = optim.adamw(
        problem.LR, b1=problem.BETA_1, b2=problem.BETA_2, eps=problem.EPS, weight_decay=problem.WEIGHT_DECAY
    )
    plan = fzero.zero_plan(stage, model, mesh, policy=policy)
    train_step = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(compiled=True))
    params = pytree.from_named({name: torch.tensor(w) for name, w in weights.items()}, plan.like)
    state = fzero.init_state(params, tx, plan, seed=0)
    del params  # the state keeps its own, or its shards

    def step(batch: dict[str, np.ndarray]) -> float:
        nonlocal state
        state, metrics = train_step(state, {name: torch.from_numpy(x) for name, x in batch.items()})
        return float(metrics.loss)

    return step
