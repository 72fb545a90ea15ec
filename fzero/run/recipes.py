"""Presets: the optimizer and the length of a run for a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fzero import models
from fzero.models import ModelConfig
from fzero.run.config import (
    Data,
    Optim,
    RunConfig,
    ScheduleConfig,
    Train,
)
from fzero.run.config_checks import (
    check_leaf,
)
from fzero.run.objectives import fine_tuning_presets


def optimizer_defaults(name: str) -> Optim:
    """The optimizer of that name with numbers that serve small models; raises ValueError for an unknown name."""
    check_leaf(RunConfig, "optim.name", name)
    numbers: dict[str, dict[str, Any]] = {
        "adamw": {},
        "adam": {"weight_decay": 0.0},
        "lamb": {"lr": 1e-2, "eps": 1e-6},
        "lion": {"lr": 3e-4, "weight_decay": 1.0, "beta2": 0.99},
        "sgd": {"lr": 0.3, "weight_decay": 0.0, "momentum": 0.9},
        "adafactor": {"lr": 1e-2, "weight_decay": 0.0},
        "onebit_adam": {},
        "onebit_lamb": {"lr": 1e-2, "eps": 1e-6},
        "zero_one_adam": {},
        "muon": {"lr": 0.02, "lr_rest": 3e-3, "weight_decay": 0.01, "momentum": 0.95, "nesterov": True},
    }
    return Optim(name=name, **numbers[name])


#                           steps, batch, micro-batch, seq_len
SMALL_RUNS: dict[str, tuple[int, int, int, int]] = {
    "mlp-tiny": (200, 16, 4, 64),
    "gpt2-tiny": (400, 16, 4, 256),
    "llama-tiny": (400, 16, 4, 256),
    "mixtral-tiny": (400, 16, 4, 256),
    "llama-small": (2000, 32, 4, 512),
}


LARGE_RUN = (50_000, 256, 1, 4096)


def fine_tuning(name: str, model: ModelConfig, *, steps: int | None = None, optimizer: str | None = None) -> RunConfig:
    """The whole run of a preset of a fine-tuning for `model`: AdamW without decay, rows of up to 1,024 positions."""
    steps = 200 if steps is None else steps
    check_leaf(RunConfig, "train.steps", steps)
    objective, lr = fine_tuning_presets()[name]
    optim = replace(optimizer_defaults(optimizer or "adamw"), lr=lr, weight_decay=0.0, beta2=0.999)
    optim = replace(optim, schedule=ScheduleConfig(warmup_steps=min(steps // 20, 100), end=0.1))
    return RunConfig(
        preset=name,
        model=model,
        objective=objective.name,
        data=Data(path="", seq_len=min(1024, model.max_len)),
        optim=optim,
        train=Train(steps=steps, batch=16, micro_batch=2, eval_every=50, checkpoint_every=100),
    )


def recipe(
    name: str, model: ModelConfig | None = None, *, steps: int | None = None, optimizer: str | None = None
) -> RunConfig:
    """The whole run of a model preset (or of `model`, under the name ""), for `steps` steps; warmup follows from them.

    Small models are trained with Muon, to a rate of 0; large ones by the usual recipe, AdamW to a tenth of its rate.
    Raises ValueError naming the nearest preset.
    """
    if name in fine_tuning_presets() and model is not None:
        return fine_tuning(name, model, steps=steps, optimizer=optimizer)
    model = models.preset(name) if model is None else model
    usual, batch, micro_batch, seq_len = SMALL_RUNS.get(name, LARGE_RUN)
    steps = usual if steps is None else steps
    small = name in SMALL_RUNS
    check_leaf(RunConfig, "train.steps", steps)
    optim = optimizer_defaults(optimizer or ("muon" if small else "adamw"))
    if not small:
        optim = replace(optim, lr=optim.lr / 10, lr_rest=optim.lr_rest / 10)
    optim = replace(optim, schedule=ScheduleConfig(warmup_steps=min(steps // 20, 2000), end=0.0 if small else 0.1))
    return RunConfig(
        preset=name,
        model=model,
        data=Data(seq_len=min(seq_len, model.max_len)),
        optim=optim,
        train=Train(steps=steps, batch=batch, micro_batch=micro_batch),
    )
