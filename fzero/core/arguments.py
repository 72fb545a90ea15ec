"""One line for an argument of another kind, or of another library's name: what it is, and what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from fzero.core.pytree import nearest

P = ParamSpec("P")
R = TypeVar("R")


def expect_kind(what: str, value: Any, kind: type | tuple[type, ...], write: str) -> None:
    """Raise TypeError unless `value` is an instance of `kind`. what: names the argument; write: what to give."""
    if not isinstance(value, kind):
        shown = f"{value!r}" if isinstance(value, (bool, int, float, str, type(None))) else f"a {type(value).__name__}"
        raise TypeError(f"{what} is {shown}; {write}")


def expect_count(what: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless `value` is a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{what} is {value!r}; it must be a whole number of at least {least}")


def explain_keywords(**write: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: a keyword that the function does not have raises TypeError with what to write instead, by `write`,
    or the nearest name.

    >>> @explain_keywords(betas="write b1=0.9, b2=0.95")
    ... def adam(lr, b1=0.9, b2=0.999): ...
    >>> adam(1e-3, betas=(0.9, 0.95))
    Traceback (most recent call last):
    TypeError: adam has no argument 'betas'; write b1=0.9, b2=0.95
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in names:
                    instead = write.get(name) or f"its arguments are {', '.join(names)}{nearest(name, names)}"
                    raise TypeError(f"{function.__name__} has no argument {name!r}; {instead}")
            return function(*args, **kwargs)

        return call

    return decorate


EXECUTION = ("remat", "compiled", "kernels", "prefetch", "reshard", "norms", "capture")
# What other libraries, and earlier versions, call things.
STEP = {name: f"write execution=fzero.Execution({name}=...)" for name in EXECUTION} | {
    "accumulation_steps": "write micro_batches=",
    "gradient_accumulation_steps": "write micro_batches=",
    "grad_accum": "write micro_batches=",
    "policy": "give it to zero_plan(..., policy=...)",
    "mesh": "give it to zero_plan(stage, model, mesh)",
    "zero": "give it to zero_plan(stage, model, mesh)",
    "max_grad_norm": "write tx = optim.chain(optim.clip_by_global_norm(1.0), tx)",
    "clip": "write tx = optim.chain(optim.clip_by_global_norm(1.0), tx)",
    "optimizer": "write tx=",
    "skip_nonfinite": "write skip=fzero.Skip(nonfinite=...)",
    "spike": "write skip=fzero.Skip(spike=...)",
}
OPTIMIZER = {
    "betas": "write b1=0.9, b2=0.95",
    "beta1": "write b1=",
    "beta2": "write b2=",
    "learning_rate": "write lr=",
    "wd": "write weight_decay=",
    "decay": "write weight_decay=",
    "params": "init_state gives it the parameters",
    "no_decay": "write mask=optim.decay_matrices, a regular expression or a predicate (name, leaf)",
    "max_grad_norm": "write optim.chain(optim.clip_by_global_norm(1.0), ...)",
    "fused": "write impl=",
    "foreach": "write impl=",
    "amsgrad": "there is no AMSGrad here; leave it out",
    "maximize": "negate the loss",
    "warmup_steps": "write lr=optim.warmup_cosine(1e-3, warmup_steps=100, steps=1000)",
    "schedule": "write lr=optim.warmup_cosine(1e-3, warmup_steps=100, steps=1000)",
}
PLAN = {
    "dtype": "write policy=fzero.bf16()",
    "precision": "write policy=fzero.bf16()",
    "params": "write model=",
    "remat": "give it to make_train_step(..., execution=fzero.Execution(remat=...))",
    "reshard": "give it to make_train_step(..., execution=fzero.Execution(reshard=...))",
    "accumulate": 'write reduce="once"',
    "micro_batches": "give it to make_train_step",
}
STATE = {
    "policy": "give it to zero_plan(..., policy=...)",
    "dtype": "give zero_plan(..., policy=fzero.bf16())",
    "mesh": "give it to zero_plan(stage, model, mesh)",
    "key": "write seed=",
    "rng": "write seed=",
    "params": "write model=",
    "optimizer": "write tx=",
}
