"""fzero's own step on a mesh of data-parallel ranks, at a ZeRO stage from 0 to 3, compiled, with fused AdamW.

fp32, or bf16 parameters with fp32 master weights and states, gradients reduced in fp32 (`precision.bf16`).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

import fzero
from peers import fzero_step, problem


def make(
    weights: dict[str, np.ndarray], config: problem.Config, dtype: str, switches: frozenset[str], *, stage: int
) -> Callable[[dict[str, np.ndarray]], float]:
    """A training step of this rank: batch of its rows -> loss of all rows before the update."""
    problem.reject_unknown_switches("fzero", switches, fzero_step.SWITCHES)
    mesh = fzero.make_mesh({"dp": int(os.environ["WORLD_SIZE"])})
    return fzero_step.on_mesh(weights, config, dtype, stage, mesh)
