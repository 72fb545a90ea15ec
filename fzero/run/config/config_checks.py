"""Checks of a config: values out of range, unknown choices, combinations that do not work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fzero.comm.axes import CP
from fzero.core import packages
from fzero.core.autodiff import Remat
from fzero.core.config_tables import Within, check_bounds, check_choice, flat, format_list, metadata_of
from fzero.core.precision import POLICIES
from fzero.core.pytree import nearest
from fzero.core.storage import is_url
from fzero.data.remote_tokens import MIN_CACHE_BYTES
from fzero.data.tokens import read_meta
from fzero.kernels.registry import Kernels
from fzero.models import config_values
from fzero.models.configs import head_of
from fzero.run.config.curriculum import (
    BUCKETS,
    expect_buckets,
    expect_curriculum,
    expect_layer_drop,
    expect_random_ltd,
)
from fzero.run.config.objectives import objective_of
from fzero.run.config.stages import Ramp, shared_batch
from fzero.run.config.transforms import expect_transforms
from fzero.run.config.unused_keys import (
    expect_codes,
    expect_cycle,
    expect_local_steps,
    expect_sign_codec,
    expect_token_counts,
    reads_url,
)
from fzero.sharding import AXES
from fzero.sharding.spec import Offload

RunConfig = Any  # fzero.run.config.run_config.RunConfig, whose module imports this one

MAX_RANKS = 10_000_000  # of an axis: beyond any machine
LOGGERS = ("tensorboard", "wandb", "csv")
LOGGER_PACKAGES = ("tensorboard", "wandb")


def expect_loggers(names: Sequence[str]) -> None:
    """Raise ValueError for a name that is no logger, and for one whose package is not installed."""
    for name in names:
        if name not in LOGGERS and name != "auto":
            raise ValueError(
                f"train.loggers has {name!r}{nearest(name, LOGGERS)}; it must be a list of auto, {', '.join(LOGGERS)}"
            )
        if name in LOGGER_PACKAGES and not packages.installed(name):
            raise ValueError(f"train.loggers has {name!r} and its package is not installed: pip install fzero[{name}]")


def expect_leaf(kind: type, name: str, value: Any) -> None:
    """Raise ValueError if a value is not as `kind` says of the key `name`."""
    marks = metadata_of(kind).get(name, ())
    if name.startswith("model.") and (bounds := config_values.BOUNDS.get(name[len("model.") :])):
        marks = (Within(bounds),)
    for mark in marks:
        if isinstance(mark, Within) and value is not None:  # None: left out
            check_bounds(name, value, mark.bounds)
        elif type(mark) in (tuple, dict):
            check_choice(name, value, mark)
        elif callable(mark):
            mark(value)
    if isinstance(value, float) and not math.isfinite(value) and not any(isinstance(mark, Within) for mark in marks):
        raise ValueError(f"{name} is {value!r}; it must be a finite number")


def validate(config: RunConfig) -> None:
    """Raise ValueError for the first value in `config` that is wrong whatever the data and the machine."""
    for name, value in flat(dataclasses.asdict(config)):
        expect_leaf(type(config), name, value)
    c, t = config, config.train
    if t.batch % t.micro_batch:
        low = [m for m in range(1, math.isqrt(t.batch) + 1) if t.batch % m == 0]
        divisors = sorted({*low, *(t.batch // m for m in low)})
        raise ValueError(
            f"train.micro_batch is {t.micro_batch} and does not divide train.batch={t.batch}; use one of "
            f"{format_list(divisors)}"
        )
    if t.batch_ramp:
        Ramp.parse(t.batch_ramp).expect_fits(t.batch, t.micro_batch)
    expect_random_ltd(c)
    expect_layer_drop(c)
    expect_token_counts(c.optim.schedule)
    if c.data.seq_len > c.model.max_len:
        raise ValueError(
            f"data.seq_len is {c.data.seq_len} and the model takes {c.model.max_len} (model.max_len); make "
            "one fit the other"
        )
    expect_data_keys(c)
    expect_buckets(c)
    expect_curriculum(c)
    expect_transforms(c)
    if t.loss_by_position and not c.task.of_tokens:
        raise ValueError(
            f"train.loss_by_position is true and the loss of objective={c.objective} is not of tokens; leave it out"
        )
    expect_head(c)
    offload = Offload.parse(c.offload)
    expect_layer_inputs(c, offload)
    expect_chunk_counts(c)
    if t.update == "backward" and (c.optim.clip or not {"params=nvme", "opt=nvme"} <= set(c.offload.split(","))):
        raise ValueError(
            f"train.update is backward, offload {c.offload!r} and optim.clip {c.optim.clip:g}: a layer is updated "
            "before all gradients are "
            "known, so nothing is clipped by their norm, and a bad step must be undone; use optim.clip=0 and --offload "
            "params=nvme,opt=nvme"
        )
    expect_delayed_update(c, offload)
    expect_sign_codec(c)
    expect_codes(c)
    expect_local_steps(c)
    if c.nvme != type(c.nvme)() and not offload.on_disk:
        raise ValueError(
            f"nvme says how a disk is used and offload={c.offload!r} puts nothing on one; use --offload "
            "params=nvme,opt=nvme"
        )
    expect_guard(c)
    chosen = Kernels.parse(t.kernels)
    if t.compiled is True:
        chosen.refuse("train.compiled=true")
    s = c.optim.schedule
    expect_cycle(c.optim)
    if s.warmup_steps >= t.steps and s.name not in ("warmup_lr", "cycle_lr"):
        raise ValueError(f"optim.schedule.warmup_steps is {s.warmup_steps}; it must be below train.steps={t.steps}")
    if s.name == "wsd" and not 1 <= s.decay_steps <= t.steps - s.warmup_steps:
        remaining_steps = t.steps - s.warmup_steps
        raise ValueError(
            f"optim.schedule.decay_steps is {s.decay_steps}; wsd needs 1 to {remaining_steps} "
            "(train.steps - warmup_steps)"
        )
    if s.name == "exponential" and s.end == 0:
        raise ValueError(
            "optim.schedule.end is 0.0; an exponential never ends there: use a fraction above 0, or linear"
        )
    if c.optim.nesterov and c.optim.momentum == 0:
        raise ValueError("optim.nesterov is true and optim.momentum is 0; give a momentum, such as 0.9")
    for axis, size in c.mesh.items():
        if axis not in AXES or not 1 <= size <= MAX_RANKS:
            near = "" if axis in AXES else nearest(axis, AXES)
            raise ValueError(
                f"mesh.{axis[:80]} is {size}{near}; the axes are {', '.join(AXES)}, each of size 1 or more"
                f"{f', at most {MAX_RANKS:,}' if size > MAX_RANKS else ''}"
            )


def expect_data_keys(c: RunConfig) -> None:
    """Raise ValueError for ways of reading that the objective does not have, and for several corpora beside one."""
    if c.task.examples and not c.data.within_documents and c.data.packing != BUCKETS:
        raise ValueError(
            f"data.within_documents is false and objective is {c.objective}: conversations in a row do not see each "
            "other; leave it out"
        )
    if c.data.mixture and (c.task.examples or c.data.path != "stdlib"):
        key, fix = ("objective", c.objective) if c.task.examples else ("data.path", c.data.path)
        raise ValueError(
            f"data.mixture is {c.data.mixture!r} and {key} is {fix}: a mixture names its own corpora, of text; leave "
            "one of them out"
        )
    if c.task.examples and is_url(c.data.path):
        raise ValueError(
            f"data.path is {c.data.path} and objective is {c.objective}: examples are read from a folder; copy them to "
            "this machine"
        )
    streams = reads_url(c)
    if streams and c.data.cache_gb * 1e9 < MIN_CACHE_BYTES:
        raise ValueError(f"data.cache_gb is {c.data.cache_gb:g}; a cache has {MIN_CACHE_BYTES / 1e9:.5f} GB or more")
    if streams and c.train.hang_s and c.data.retry_minutes * 60 >= c.train.hang_s:
        raise ValueError(
            f"data.retry_minutes is {c.data.retry_minutes:g} and train.hang_s {c.train.hang_s:g} s, after which ranks "
            "that wait for data are ended; give data.retry_minutes less, or train.hang_s more"
        )
    if c.task.examples and c.data.packing not in ("stream", BUCKETS):
        raise ValueError(
            f"data.packing is {c.data.packing} and objective is {c.objective}, whose examples are whole in a row as it "
            "is; leave it out"
        )


def expect_head(config: RunConfig) -> None:
    """Raise ValueError if the model has not the head that the objective trains."""
    fitting = objective_of(config.model)
    if config.task.head != fitting.head:
        head_text = f"a head of {fitting.head}" if fitting.head else "no head of scores"
        fix = f"use --objective {fitting.name}, or a model without"
        fix = fix if fitting.head else "fzero finetune --objective makes one"
        raise ValueError(f"objective is {config.objective} and the model has {head_text}; {fix}")


def expect_layer_inputs(c: RunConfig, offload: Offload) -> None:
    """Raise ValueError if what remat keeps is to be moved or cut, and is not there."""
    remat = Remat.parse(c.train.remat)
    if not offload.acts.memory.on_device and not remat.every:
        raise ValueError(
            f"offload is {c.offload!r} and train.remat is {c.train.remat}: acts are what a remat policy keeps; use "
            "--remat full"
        )
    if c.partition_activations and (not remat.every or c.sequence):
        raise ValueError(
            f"partition_activations is true, train.remat is {c.train.remat} and sequence is {str(c.sequence).lower()}: "
            "it cuts the layer inputs that remat keeps, and sequence cuts them already; use --remat full alone"
        )


def expect_chunk_counts(c: RunConfig) -> None:
    """Raise ValueError if a layer in chunks is asked for with what excludes it."""
    remat, cp = Remat.parse(c.train.remat), c.mesh.get(CP, 1)
    for name, holds, value, fix in (
        ("train.compiled", c.train.compiled is True, "true", "leave it out, or use train.compiled=false"),
        ("train.remat", remat.budget < 1.0, c.train.remat, "use --remat full, every:K or none"),
        ("sequence", c.sequence, "true", "leave it out"),
        ("mesh.cp", cp > 1, cp, "which splits sequences itself: use one of them"),
        ("train.random_ltd", c.train.random_ltd > 0, c.train.random_ltd, "whose layers have few tokens: leave one out"),
    ):
        if holds and getattr(c.model, "layer_tokens", 0):
            raise ValueError(
                f"model.layer_tokens is {c.model.layer_tokens}, whose chunks run one after the other, and {name} is "
                f"{value}; {fix}"
            )


def expect_delayed_update(c: RunConfig, offload: Offload) -> None:
    """Raise ValueError for delayed updates with what does not go together with them, and for several without them."""
    t = c.train
    if t.update != "delayed":
        for name, value, usual in (("updates", t.updates, 1), ("delay_after", t.delay_after, 0)):
            if value != usual:
                raise ValueError(f"train.{name} is {value} and train.update is {t.update}; use train.update=delayed")
        return
    pieces = shared_batch(t.batch, t.batch_ramp) // t.micro_batch
    if pieces % t.updates:
        raise ValueError(
            f"train.updates is {t.updates}, and a step has {pieces} micro-batches (train.batch={t.batch} in pieces of "
            f"{t.micro_batch}), which so many updates cannot share evenly; change one of them"
        )
    if not offload.params.memory.on_device or offload.grads.memory.on_disk or offload.opt.memory.on_disk:
        raise ValueError(
            f"train.update is delayed and offload is {c.offload!r}: both versions of the parameters must be on the "
            "device, gradients and the optimizer's states there or on the host; use opt=host, grads=host or acts alone"
        )
    if c.precision.policy != "auto" and POLICIES[c.precision.policy]().loss_scale:
        raise ValueError(
            f"train.update is delayed and precision.policy is {c.precision.policy}, whose loss scale changes while the "
            "gradients of the next update are under way; use bf16"
        )


def expect_guard(config: RunConfig) -> None:
    """Raise ValueError if the policies of `config.guard` cannot work with the rest of the config."""
    g, t, offload = config.guard, config.train, Offload.parse(config.offload)
    if g.nonfinite != "skip" and config.precision.policy == "fp16":
        raise ValueError(
            f"guard.nonfinite is {g.nonfinite} and precision.policy is fp16, which finds its loss scale by "
            "steps that overflow; use skip"
        )
    if "rollback" not in (g.nonfinite, g.spike):
        return
    policy = "guard.nonfinite is rollback" if g.nonfinite == "rollback" else "guard.spike is rollback"
    if offload.params.memory.on_disk or offload.opt.memory.on_disk:
        raise ValueError(
            f"{policy} and offload is {config.offload!r}: a state on a disk cannot be put back while a run "
            "goes on; use skip"
        )
    if not t.checkpoint_every:
        raise ValueError(
            f"{policy} and train.checkpoint_every is 0, so there is nothing to go back to; give an interval"
        )
    reach = (t.keep_last - 1) * t.checkpoint_every
    if t.keep_last and g.rollback_steps > reach:
        fix = f"use train.keep_last={-(-g.rollback_steps // t.checkpoint_every) + 1} or more"
        raise ValueError(
            f"guard.rollback_steps is {g.rollback_steps} and the last {t.keep_last} checkpoints, {t.checkpoint_every} "
            "steps apart, "
            f"reach back {reach}; {fix}"
        )


def expect_fitting_corpus(config: RunConfig, corpus: str | Path) -> None:
    """Raise ValueError if the corpus does not fit the objective, or has tokens that the model lacks."""
    meta = read_meta(corpus)
    kind, required_kind, size = meta.get("kind", "text"), config.task.corpus, meta["vocab_size"]
    if kind != required_kind:
        raise ValueError(
            f"{corpus}: is a corpus of {kind}, and objective={config.objective} learns from {required_kind}"
        )
    head, labels = head_of(config.model), meta.get("labels", [])
    if head is not None and labels != list(head.labels):
        raise ValueError(
            f"{corpus}: has the labels {', '.join(labels)} and the model {', '.join(head.labels)}; "
            "prepare it for this model: --data FILE.jsonl"
        )
    expect_rows(config, size, "the corpus")


def expect_rows(config: RunConfig, size: int, subject: str) -> None:
    """Raise ValueError if the model has fewer tokens than `subject`, which has `size`."""
    if size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size is {config.model.vocab_size} and {subject} has {size} tokens; add --set "
            f"model.vocab_size={size}"
        )
