"""What a field of a config says of its key, besides its bounds: what it needs, its axis, whether it may change.

The keys that each optimizer and schedule uses, and checks of how the ranks of a run share its work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from fzero.comm.axes import RP, mesh_text
from fzero.core.config_tables import Table, flat, metadata_of
from fzero.core.storage import is_url
from fzero.optim.schedules import Intervals
from fzero.run.config.stages import Ramp
from fzero.sharding.codec import Codec, Local
from fzero.sharding.spec import Offload

RunConfig = Any  # fzero.run.config.run_config.RunConfig, whose module imports this one

# By method of local steps the rate and the momentum of its outer optimizer.
OUTER = {"localsgd": (1.0, 0.0), "slowmo": (1.0, 0.6), "diloco": (0.7, 0.9)}
SEND_SIGNS = ("onebit_adam", "onebit_lamb", "zero_one_adam")  # with the codec that leaves them the sums of gradients
SIGNS = "grads=1bit"


def codec_of(config: RunConfig) -> str:
    """The codec of a run: its own, or that of its optimizer."""
    name = config.optim.name
    local = ",local" if name == "zero_one_adam" and config.optim.sum_every > 1 else ""
    return f"{SIGNS}{local}" if name in SEND_SIGNS else config.codec


def first_local(optim: Any, steps: int) -> int:
    """The first step that zero_one_adam may make without a sum, in a run of so many steps."""
    return optim.freeze_steps or max(1, steps // 5)


def count_sums(optim: Any, steps: int) -> int:
    """The steps of a run of zero_one_adam whose ranks sum."""
    first = first_local(optim, steps)
    return first + Intervals(first, optim.sum_every, optim.sum_double).count_sums(steps)


def expect_sign_codec(c: RunConfig) -> None:
    """Raise ValueError if only one of codec and optimizer sends signs."""
    name, signs = c.optim.name, c.optim.name in SEND_SIGNS
    if signs and c.codec not in ("", codec_of(c)):
        raise ValueError(
            f"optim.name is {name}, which sends signs of its momentum, and codec is {c.codec}; leave --codec out"
        )
    if not signs and c.codec and Codec.parse(c.codec).signs:
        raise ValueError(
            f"codec is {c.codec} and optim.name is {name}, which makes no sums of gradients; use optim.name="
            f"{' or '.join(SEND_SIGNS)}"
        )
    if name == "zero_one_adam":
        Intervals(first_local(c.optim, c.train.steps), c.optim.sum_every, c.optim.sum_double).check("optim")
    if signs and c.optim.freeze_steps >= c.train.steps:
        raise ValueError(
            f"optim.freeze_steps is {c.optim.freeze_steps} and train.steps {c.train.steps}, so that {name} would never "
            "send signs; use fewer, or 0 for its own number"
        )


def expect_codes(c: RunConfig) -> None:
    """Raise ValueError for checkpoints in codes of unsuitable moments."""
    prefix = f"train.compress is {c.train.compress}, which writes moments in 8-bit codes"
    if not c.train.compress.startswith("8bit"):
        return
    if c.optim.name == "adafactor":
        raise ValueError(f"{prefix}, and optim.name adafactor, whose state is small already; use none or zstd")
    if c.optim.states != "full":
        raise ValueError(f"{prefix}, and optim.states {c.optim.states}: they are small already; use none or zstd")
    if c.optim.name in SEND_SIGNS:
        raise ValueError(
            f"{prefix}, and optim.name {c.optim.name}, for which a momentum of 0 is one without a scale; use none or "
            "zstd"
        )
    if Offload.parse(c.offload).opt.memory.on_disk:
        raise ValueError(
            f"{prefix}, and offload {c.offload}: what rests on a disk is written as it is; use none or zstd"
        )


def expect_local_steps(c: RunConfig) -> None:
    """Raise ValueError for local steps that do not fit the rest of a config."""
    local, t = c.local, c.train
    if not local.method:
        if local != type(local)():
            raise ValueError("local says how members agree and local.method is empty; write local.method=diloco")
        return
    Local(local.every, local.codec, local.after)
    prefix = f"local.method is {local.method}"
    if c.mesh.get(RP, 1) < 2:
        raise ValueError(
            f"{prefix}, and its members are the ranks of rp, which is 1; write for example --mesh dp=1,rp=2"
        )
    if t.checkpoint_every % local.every:
        raise ValueError(
            f"{prefix}, local.every {local.every} and train.checkpoint_every {t.checkpoint_every}: checkpoints are of "
            "steps after which members agree; make it a multiple"
        )
    if local.after >= t.steps:
        raise ValueError(
            f"{prefix}, local.after {local.after} and train.steps {t.steps}, so that members would never train apart; "
            "use fewer, a multiple of local.every"
        )
    if local.method == "localsgd" and (local.lr, local.momentum) != (None, None):
        raise ValueError(f"{prefix}, which takes the mean of the members; leave local.lr and local.momentum out")
    for wrong, reason in (
        (t.capture != "off", f"train.capture is {t.capture}: a recorded step has no agreement in it; use off"),
        (t.update == "delayed", "train.update is delayed, and members agree on one version of the parameters; use end"),
        (
            c.guard.check_every > 0,
            f"guard.check_every is {c.guard.check_every}: ranks compute each other's micro-batches, and members have "
            "other parameters; use 0",
        ),
        (c.optim.name in SEND_SIGNS, f"optim.name is {c.optim.name}, whose errors are of one member; use adamw"),
    ):
        if wrong:
            raise ValueError(f"{prefix} and {reason}")


class OverAxis(NamedTuple):
    """Of a key: it says what the ranks of an axis do."""

    axis: str


class Gathering(NamedTuple):
    """Of a key: it says how parameters are gathered."""


class Placement(NamedTuple):
    """Of a key: it is of an attempt's placement; flag: of `fzero pretrain`, that sets it, None: the key's name."""

    flag: str | None = None


CHANGING = "changing"  # of a key: from the step at which a run is resumed on it may have another value
LOCATION = "location"  # of a key: it says where a run lies or computes, and is no number of it: folders may have moved


def refuse_without_axis(config: RunConfig, table: Table, baseline: RunConfig | None = None) -> None:
    """Raise ValueError if `table` says how work is split over an axis that the mesh of `config` lacks."""
    values, usual = (dict(flat(dataclasses.asdict(source))) for source in (config, baseline or type(config)()))
    fetched = config.zero == 3 or not Offload.parse(config.offload).params.memory.on_device
    for key in dict(flat(table)):
        value = values.get(key)
        if value == usual.get(key):
            continue
        marks = metadata_of(type(config)).get(key, ())
        axis = next((mark.axis for mark in marks if isinstance(mark, OverAxis)), "")
        value_text = "a table" if "\n" in str(value) else str(value).lower() if isinstance(value, bool) else value
        if axis and config.mesh.get(axis, 1) == 1:
            mesh_label = mesh_text(config.mesh) if config.mesh else "dp alone"
            raise ValueError(
                f"{key} is {value_text}, which is for ranks of {axis}, and the mesh is {mesh_label}; use "
                f"--mesh {axis}=2, or leave it out"
            )
        if Gathering() in marks and not fetched:
            raise ValueError(
                f"{key} is {value_text}, and stage {config.zero} gathers no parameters; use --zero 3, or leave it out"
            )


def drop_absent_axes(config: RunConfig) -> RunConfig:
    """A config with the usual values of what is said of axes that its mesh does not have."""
    usual = {
        key: getattr(type(config)(), key)
        for key, marks in metadata_of(type(config)).items()
        if "." not in key and any(isinstance(mark, OverAxis) and config.mesh.get(mark.axis, 1) == 1 for mark in marks)
    }
    return dataclasses.replace(config, **usual)


# The keys that each schedule uses; those of no row are of all.
WARMUP, DECAY = ("warmup_steps", "warmup_tokens"), ("decay_steps", "decay_tokens")
SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": WARMUP,
    "linear": (*WARMUP, "end"),
    "cosine": (*WARMUP, "end"),
    "polynomial": (*WARMUP, "end", "power"),
    "exponential": (*WARMUP, "end"),
    "inverse_sqrt": WARMUP,
    "one_cycle": ("rise",),
    "wsd": (*WARMUP, *DECAY, "end", "decay"),
    "warmup_lr": (*WARMUP, "warmup", "start"),
    "warmup_decay_lr": (*WARMUP, "warmup", "start"),
    "warmup_cosine_lr": (*WARMUP, "warmup", "start", "end"),
    "cycle_lr": (*WARMUP, *DECAY, "start", "decay_rate", "decay_every", "low_beta1", "high_beta1"),
}


def expect_token_counts(schedule: Any) -> None:
    """Raise ValueError for a schedule by tokens with lengths in steps or the reverse, or lengths that do not fit."""
    s = schedule
    for steps, tokens in (WARMUP, DECAY):
        wrong, right = (steps, tokens) if s.tokens else (tokens, steps)
        if getattr(s, wrong):
            kind = f"{s.tokens:,}, a length in tokens" if s.tokens else "0: it follows the steps"
            raise ValueError(
                f"optim.schedule.{wrong} is {getattr(s, wrong)} and optim.schedule.tokens is {kind}; use {wrong}=0 "
                f"and {right}"
            )
    if s.tokens and s.warmup_tokens + s.decay_tokens > s.tokens:
        raise ValueError(
            f"optim.schedule.warmup_tokens={s.warmup_tokens} and decay_tokens={s.decay_tokens} are longer than "
            f"tokens={s.tokens}; shorten one of them"
        )


def expect_cycle(optim: Any) -> None:
    """Raise ValueError for a cycle without a length, or numbers that the optimizer or schedule lacks."""
    s = optim.schedule
    if s.name == "cycle_lr" and not (s.warmup_steps and s.decay_steps):
        raise ValueError(
            f"optim.schedule.warmup_steps is {s.warmup_steps} and decay_steps {s.decay_steps}: cycle_lr rises in the "
            "first and falls in the second; give both"
        )
    low, high = s.low_beta1, s.high_beta1
    cycles = optim.name in ("adam", "adamw") and None not in (low, high)
    if (low, high) != (None, None) and not (cycles and low <= high):
        raise ValueError(
            f"optim.schedule.low_beta1 is {low}, high_beta1 {high} and optim.name {optim.name}; the "
            "momentum of adam and adamw can cycle, from low_beta1 to a high_beta1 that is not below it; else leave "
            "both out"
        )
    if optim.correction == "rate" and optim.name.startswith(("onebit", "zero_one")):
        raise ValueError(f"optim.correction is rate and optim.name {optim.name}; use moments or none")
    if optim.max_ratio is not None and optim.max_ratio <= (optim.min_ratio or 0.0):
        raise ValueError(
            f"optim.max_ratio is {optim.max_ratio} and optim.min_ratio {optim.min_ratio or 0.0}; it must be above that"
        )


# The keys that each optimizer uses; those of no row are of all.
ADAM = ("lr", "weight_decay", "decay", "beta1", "beta2", "eps")
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": (*ADAM, "states", "correction"),
    "adam": (*ADAM, "states", "correction"),
    "lamb": (*ADAM, "correction", "min_ratio", "max_ratio"),
    "lion": (*ADAM[:-1], "states"),
    "sgd": ("lr", "weight_decay", "decay", "momentum", "nesterov"),
    "adafactor": ("lr", "weight_decay", "decay"),
    "muon": (*ADAM, "lr_rest", "momentum", "nesterov", "adjust"),
    "onebit_adam": (*ADAM, "correction", "freeze_steps"),
    "onebit_lamb": (*ADAM, "correction", "freeze_steps", "min_ratio", "max_ratio"),
    "zero_one_adam": (*ADAM, "correction", "freeze_steps", "sum_every", "sum_double"),
}


class Need(NamedTuple):
    """What keys of a config need: whether a config has it, and what to write."""

    met: Callable[[RunConfig], bool]
    missing: Callable[[RunConfig], str]  # that a config says instead
    remedy: str


def reads_url(config: RunConfig) -> bool:
    """Whether a run reads its corpus, or one of a mixture, from a store."""
    return is_url(config.data.path) or "://" in config.data.mixture


def grows(config: RunConfig) -> bool:
    """Whether the batch of a run grows."""
    text = config.train.batch_ramp
    return not text or Ramp.parse(text).start < config.train.batch


GROWING = Need(
    grows,
    lambda c: f"train.batch={c.train.batch}, with which {c.train.batch_ramp} begins",
    "begin with less",
)
OF_DPO = Need(lambda c: c.task.reference, lambda c: f"objective={c.objective}", "use objective=dpo")
CHAT_TOKENIZER = Need(
    lambda c: c.task.examples,
    lambda c: "objective=text",
    "prepare the text with a tokenizer.json that has them, and give --set model.vocab_size=N",
)
CONVERSATIONS = Need(
    lambda c: c.task.examples,
    lambda c: "objective=text, which renders no conversations",
    "it is for conversations and pairs",
)
EXAMPLES = Need(
    lambda c: c.task.examples,
    lambda c: "objective=text, whose documents are cut into rows",
    "it is for conversations, pairs and texts with labels",
)
AT_URL = Need(
    reads_url,
    lambda c: "a corpus on this machine",
    "it is for one at a URL",
)
OF_FP16 = Need(
    lambda c: c.precision.policy == "fp16",
    lambda c: f"precision.policy={c.precision.policy}",
    "use precision.policy=fp16",
)
SPIKES = Need(
    lambda c: c.guard.spike != "off",
    lambda c: "guard.spike=off",
    "use guard.spike=skip or rollback",
)
ROLLING_BACK = Need(
    lambda c: "rollback" in (c.guard.nonfinite, c.guard.spike),
    lambda c: "no rollback",
    "use guard.nonfinite=rollback or guard.spike=rollback",
)
SKIPPING = Need(
    lambda c: "skip" in (c.guard.nonfinite, c.guard.spike),
    lambda c: f"guard.nonfinite={c.guard.nonfinite} and guard.spike={c.guard.spike}",
    "use guard.nonfinite=skip or guard.spike=skip",
)


def refuse_unused(config: RunConfig, table: Table) -> None:
    """Raise ValueError if `table`, as the user wrote it, sets a key that does nothing."""
    optim = table.get("optim", {})
    for prefix, section, value, rows in (
        ("optim", optim, config.optim, OPTIMIZERS),
        ("optim.schedule", optim.get("schedule", {}), config.optim.schedule, SCHEDULES),
    ):
        kind = value.name
        uses = {*rows[kind], *value.__dataclass_fields__.keys() - set().union(*rows.values())}
        for key in section:
            if key not in uses:
                raise ValueError(
                    f"{prefix}.{key} does nothing with {kind}, which has {', '.join(sorted(uses - {'name'}))}; "
                    "leave it out"
                )
    for key, _ in flat(table):
        for need in metadata_of(type(config)).get(key, ()):
            if isinstance(need, Need) and not need.met(config):
                raise ValueError(f"{key} does nothing with {need.missing(config)}; {need.remedy}, or leave it out")
