"""Keys of a config that do nothing without another value: each says what it needs, and is refused where that is
missing.

The schedules of a config: the keys that each uses, and whether its lengths are of steps or of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fzero.core.config_tables import Table, flat, metadata_of
from fzero.core.storage import is_url
from fzero.run.batch_ramp import Ramp

# The keys that each schedule uses, by steps.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": ("warmup_steps",),
    "linear": ("warmup_steps", "end"),
    "cosine": ("warmup_steps", "end"),
    "polynomial": ("warmup_steps", "end", "power"),
    "exponential": ("warmup_steps", "end"),
    "inverse_sqrt": ("warmup_steps",),
    "one_cycle": ("rise",),
    "wsd": ("warmup_steps", "end", "decay_steps", "decay"),
    "warmup_lr": ("warmup_steps", "warmup", "start"),
    "warmup_decay_lr": ("warmup_steps", "warmup", "start"),
    "warmup_cosine_lr": ("warmup_steps", "warmup", "start", "end"),
    "cycle_lr": ("warmup_steps", "decay_steps", "start", "decay_rate", "decay_every", "low_beta1", "high_beta1"),
}
BY_TOKENS = {"warmup_steps": "warmup_tokens", "decay_steps": "decay_tokens"}


def validate_tokens(schedule: Any) -> None:
    """Raise ValueError for a schedule by tokens with lengths in steps, one by steps with lengths in tokens, and lengths
    that leave nothing between them."""
    s = schedule
    for steps, tokens in BY_TOKENS.items():
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


def validate_cycle(optim: Any) -> None:
    """Raise ValueError for a cycle without a length, for one of the momentum of an optimizer that has no such, and for
    a correction or ratios that the optimizer has not."""
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


def keys_of(name: str) -> set[str]:
    """The keys that a schedule uses.

    >>> sorted(keys_of("linear"))
    ['end', 'tokens', 'warmup_steps', 'warmup_tokens']
    """
    keys = set(SCHEDULES[name])
    return {*keys, "tokens", *(tokens for steps, tokens in BY_TOKENS.items() if steps in keys)}


RunConfig = Any  # fzero.run.config.RunConfig, whose module imports this one

# The keys that each optimizer uses.
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
ANY_OPTIM = ("name", "clip", "schedule", "lr_scaling", "lr_scaling_by")  # the keys of every optimizer


class Need(NamedTuple):
    """What the keys of a config need to do anything: whether a config has it, and what to write."""

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
    """Raise ValueError if `table`, as the user wrote it, sets a key that does nothing: that the chosen optimizer or
    schedule does not use, or without what it needs."""
    optim = table.get("optim", {})
    name, schedule = config.optim.name, config.optim.schedule.name
    for prefix, section, kind, uses in (
        ("optim", optim, name, {*OPTIMIZERS[name], *ANY_OPTIM}),
        ("optim.schedule", optim.get("schedule", {}), schedule, {*keys_of(schedule), "name"}),
    ):
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
