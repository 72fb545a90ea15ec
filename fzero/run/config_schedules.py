"""The schedules of a config: the keys that each uses, and whether its lengths are of steps or of tokens."""

from __future__ import annotations

from typing import Any

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
