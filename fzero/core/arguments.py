"""One line for an argument of another kind, or of another library's name: what it is, and what to write instead."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from fzero.core.kinds import NO, as_hinted, expect_hint, hints_of, shown
from fzero.core.pytree import nearest

P = ParamSpec("P")
R = TypeVar("R")


def expect_kind(what: str, value: Any, kind: type | tuple[type, ...], write: str) -> None:
    """Raise TypeError unless `value` is an instance of `kind`. what: names the argument; write: what to give."""
    if not isinstance(value, kind):
        raise TypeError(f"{what} is {shown(value)}; {write}")


def expect_count(what: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless `value` is a whole number of at least `least`."""
    if as_hinted(value, int) is NO or value < least:
        raise ValueError(f"{what} is {shown(value)}; it must be a whole number of at least {least}")


def expect_regex(what: str, text: str | None) -> None:
    """Raise ValueError if a text is no regular expression; None passes."""
    try:
        re.compile(text or "")
    except re.error as error:
        raise ValueError(f"{what} {text!r} is not a regular expression: {error}") from None


def expect_device(device: torch.device | str) -> torch.device:
    """The device of that name; raises ValueError for a text that names none."""
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {device!r}; it must be cpu, cuda, or one GPU, such as cuda:0") from None


def expect_floating(what: str, dtype: torch.dtype | None) -> None:
    """Raise ValueError for a dtype of whole or complex numbers; None passes."""
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"{what} is {dtype}; it must be floating-point, such as torch.float32")


def checked(own: str = "", /, **write: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of a public function: an argument of another kind than its type hint raises WrongKind (a TypeError
    and a ValueError), in one line before anything is done. numpy's scalars become Python's.

    A keyword that the function does not have raises TypeError.
    own: the names of arguments that the function checks itself, as it has more to say. write: what to write instead of
    keywords of other libraries; others get the nearest name.

    >>> @checked(betas="write b1=0.9, b2=0.95")
    ... def adam(lr: float, b1: float = 0.9, b2: float = 0.999): ...
    >>> adam(1e-3, betas=(0.9, 0.95))
    Traceback (most recent call last):
    TypeError: adam has no argument 'betas'; write b1=0.9, b2=0.95
    >>> adam("1e-3")
    Traceback (most recent call last):
    fzero.core.kinds.WrongKind: adam: lr is '1e-3'; it must be a number
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        names, passes = list(parameters), [p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD]
        places = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        left = {*own.split(), *passes, *(p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL)}
        owner = function.__qualname__.removesuffix(".__init__")

        def expected(name: str, value: Any) -> Any:
            hint = Any if name in left else hints_of(function).get(name, Any)
            return value if hint is Any else expect_hint(f"{owner}: {name}", value, hint)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in names and not passes:
                    instead = write.get(name) or f"its arguments are {', '.join(names)}{nearest(name, names)}"
                    raise TypeError(f"{owner} has no argument {name!r}; {instead}")
            given: Any = [expected(name, value) for name, value in zip(places, args)]
            named: Any = {name: expected(name, value) for name, value in kwargs.items()}
            return cast(Any, function)(*given, *args[len(given) :], **named)

        setattr(call, OWN, left)
        return call

    return decorate


OWN = "fzero_own"  # the attribute of a checked function: the arguments that it checks itself
EXECUTION = (
    "remat",
    "compiled",
    "kernels",
    "prefetch",
    "reshard",
    "norms",
    "capture",
    "resident",
    "partition_activations",
)
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
