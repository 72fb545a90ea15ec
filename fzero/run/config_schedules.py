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


def keys_of(name: str) -> set[str]:
    """The keys that a schedule uses.

    >>> sorted(keys_of("linear"))
    ['end', 'tokens', 'warmup_steps', 'warmup_tokens']
    """
    keys = set(SCHEDULES[name])
    return {*keys, "tokens", *(tokens for steps, tokens in BY_TOKENS.items() if steps in keys)}
