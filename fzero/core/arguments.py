"""One line for an argument of another kind, or of another library's name: what it is, and what to write instead.

The type hints of public functions are what callers are held to. As Python itself does, an int serves as a float;
numpy's scalars serve as Python's; a bool serves as no number.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import numbers
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch

from fzero.core.text_parsing import nearest, short

NO = object()  # the result for a value of another kind


class WrongKind(TypeError, ValueError):
    """An argument is of another kind than its hint, which ends a command with one line."""


WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "None",
    Path: "a path",
    torch.Tensor: "a tensor",
    torch.dtype: "a dtype, such as torch.float32",
    torch.device: "a device",
    collections.abc.Callable: "a function",
    collections.abc.Mapping: "a dict",
    dict: "a dict",
    collections.abc.Sequence: "a list",
    collections.abc.Iterable: "a list",
    list: "a list",
    tuple: "a tuple",
    type: "a class",
}


@functools.cache
def hints_of(target: Callable[..., Any] | type) -> dict[str, Any]:
    """The type hints of a function's arguments, or of a class' fields, by name; Any for a type checker's."""
    if isinstance(target, type):
        scopes = [(inspect.get_annotations(base), vars(sys.modules[base.__module__])) for base in target.__mro__[::-1]]
    else:
        scopes = [(target.__annotations__, target.__globals__)]
    hints = {name: _evaluated(text, scope) for texts, scope in scopes for name, text in texts.items()}
    hints.pop("return", None)
    return hints


def _evaluated(text: Any, scope: dict[str, Any]) -> Any:
    if isinstance(text, typing.ForwardRef):  # as NamedTuple has its texts
        text = text.__forward_arg__
    try:
        return eval(text, scope) if isinstance(text, str) else text
    except (NameError, AttributeError, TypeError):
        return Any


def expect_hint(label: str, value: Any, hint: Any, write: str | None = None) -> Any:
    """Return `value`, with numpy's scalars as Python's; raises WrongKind unless it is of the kind that `hint` says, and
    ValueError if a rule of its `Annotated` (see config_tables.Allowed) refuses it. write: that error, with {} for the
    value.

    >>> expect_hint("adam: eps", "1e-8", float)
    Traceback (most recent call last):
    fzero.core.arguments.WrongKind: adam: eps is '1e-8'; it must be a number
    """
    if write is not None:
        try:
            return expect_hint(label, value, hint)
        except ValueError:
            raise WrongKind(write.format(format_value(value))) from None
    converted = as_hinted(value, hint)
    if converted is not NO:
        for rule in getattr(hint, "__metadata__", ()):
            if hasattr(rule, "check"):
                rule.check(label, converted)
        return converted
    hint = without_rules(hint)
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for kind in map(without_rules, typing.get_args(hint) if union else (hint,)):  # an item is named, if it is the fault
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if isinstance(value, Mapping) and isinstance(origin, type) and issubclass(origin, Mapping):
            for key, item in value.items():
                expect_hint(f"{label}[{key!r}]", item, inner[1])
        if isinstance(value, (list, tuple)) and origin in (collections.abc.Sequence, list):
            for i, item in enumerate(value):
                expect_hint(f"{label}[{i}]", item, inner[0])
    raise WrongKind(f"{label} is {format_value(value)}; it must be {describe_hint(hint)}")


def expect_fields(instance: Any, owner: str = "", /, **write: str) -> None:
    """Raise ValueError if a field of a frozen dataclass is not as its hint says (see `expect_hint`).

    owner: its name in errors; "": that of the class. write: by field, the error, with {} for the value.
    """
    hints = hints_of(type(instance))
    for name in (field.name for field in dataclasses.fields(instance)):
        value, hint = getattr(instance, name), hints[name]
        converted = expect_hint(f"{owner or type(instance).__name__}: {name}", value, hint, write.get(name))
        if converted is not value:
            object.__setattr__(instance, name, converted)


def without_rules(hint: Any) -> Any:
    """The kind that an Annotated has, or the hint itself."""
    return hint.__origin__ if hasattr(hint, "__metadata__") else hint


def as_hinted(value: Any, hint: Any) -> Any:
    """`value` as one of a hint, or NO. Hints that it does not know hold for every value."""
    hint = without_rules(hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        candidates = (as_hinted(value, candidate) for candidate in typing.get_args(hint))
        return next((candidate for candidate in candidates if candidate is not NO), NO)
    if hint is None or hint is type(None):
        return value if value is None else NO
    if hint is bool:
        return bool(value) if isinstance(value, (bool, np.bool_)) else NO
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        if not isinstance(value, kind) or isinstance(value, bool):
            return NO
        return value if isinstance(value, (int, float)) else value.item() if isinstance(value, np.generic) else NO
    if hint is Path:
        return value if isinstance(value, os.PathLike) else NO
    if origin is collections.abc.Callable or hint is collections.abc.Callable:
        return value if callable(value) else NO
    if origin is not None:
        return _as_container(value, origin, typing.get_args(hint))
    return value if not isinstance(hint, type) or _is_instance(value, hint) else NO


def _as_container(value: Any, origin: Any, args: tuple[Any, ...]) -> Any:
    if origin is typing.Literal:
        return value if value in args else NO
    if not isinstance(origin, type) or isinstance(value, (str, bytes)):
        return NO if isinstance(value, (str, bytes)) else value
    if origin is tuple or issubclass(list, origin):  # a list serves as a tuple
        if not isinstance(value, (list, tuple)) and not _is_instance(value, origin):
            return NO
        if not isinstance(value, Sequence):
            return value  # that can be read once
        item_hints = list(args[:1]) * len(value) if origin is not tuple or args[1:] == (...,) else list(args)
        items = [as_hinted(item, hint) for item, hint in zip(value, item_hints)]
        if len(item_hints) != len(value) or any(item is NO for item in items):
            return NO
        fits = origin is not tuple or isinstance(value, tuple)
        unchanged = fits and all(item is original for item, original in zip(items, value))
        return value if unchanged else tuple(items) if origin is tuple else items
    if not _is_instance(value, origin):
        return NO
    if isinstance(value, Mapping) and len(args) == 2:
        return NO if any(as_hinted(item, args[1]) is NO for item in value.values()) else value
    return value


def _is_instance(value: Any, kind: type) -> bool:
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol that is not to be asked for
        return True


def describe_hint(hint: Any) -> str:
    """A hint in words."""
    hint = without_rules(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        *leading, last = dict.fromkeys(describe_hint(item_hint) for item_hint in typing.get_args(hint))
        return f"{', '.join(leading)} or {last}" if leading else last
    if typing.get_origin(hint) is typing.Literal:
        *leading, last = map(repr, typing.get_args(hint))
        return f"{', '.join(leading)} or {last}" if leading else last
    kind = typing.get_origin(hint) or (type(None) if hint is None else hint)
    inner = [item_hint for item_hint in typing.get_args(hint) if item_hint is not ... and item_hint is not Any]
    if kind is tuple and inner and len(inner) == len(typing.get_args(hint)):
        return f"({', '.join(map(describe_hint, inner))})"
    if kind in (collections.abc.Sequence, collections.abc.Iterable, list, tuple) and inner:
        return f"{WORDS[kind]}, each of it {describe_hint(inner[0])}"
    if kind in (collections.abc.Mapping, dict) and len(inner) == 2:
        return f"a dict, each value of it {describe_hint(inner[1])}"
    name = getattr(kind, "__name__", str(kind))
    return WORDS.get(kind) or f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"


def format_value(value: Any) -> str:
    """A value in a message: a number, a text, or a short list of such, else its type."""
    plain = (bool, int, float, str, type(None), torch.dtype, np.generic)
    inner = list(value)[:20] if isinstance(value, (list, tuple)) else []
    if isinstance(value, plain) or (
        type(value) in (list, tuple) and all(isinstance(item, (*plain, torch.Tensor)) for item in inner)
    ):
        text = short(value, 1000)
        if len(text) <= 80 and text.isprintable():
            return text
    if isinstance(value, str):
        return f"{value[:60]!r}..."
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


P = ParamSpec("P")
R = TypeVar("R")


def expect_kind(label: str, value: Any, kind: type | tuple[type, ...], write: str) -> None:
    """Raise TypeError unless `value` is an instance of `kind`. label: names the argument; write: what to give."""
    if not isinstance(value, kind):
        raise TypeError(f"{label} is {format_value(value)}; {write}")


def expect_count(label: str, value: Any, minimum: int = 1) -> None:
    """Raise ValueError unless `value` is a whole number of at least `minimum`."""
    if as_hinted(value, int) is NO or value < minimum:
        raise ValueError(f"{label} is {format_value(value)}; it must be a whole number of at least {minimum}")


def expect_regex(label: str, text: str | None) -> None:
    """Raise ValueError if a text is no regular expression; None passes."""
    try:
        re.compile(text or "")
    except re.error as error:
        raise ValueError(f"{label} {text!r} is not a regular expression: {error}") from None


def expect_device(device: torch.device | str) -> torch.device:
    """The device of that name; raises ValueError for a text that names none."""
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {device!r}; it must be cpu, cuda, or one GPU, such as cuda:0") from None


def expect_floating(label: str, dtype: torch.dtype | None) -> None:
    """Raise ValueError for a dtype of whole or complex numbers; None passes."""
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"{label} is {dtype}; it must be floating-point, such as torch.float32")


def checked(exempt: str = "", /, **write: str | Callable[[Any], None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of a public function: an argument of another kind than its type hint raises WrongKind (a TypeError
    and a ValueError), and one that a rule of its Annotated refuses ValueError, in one line before anything is done.
    numpy's scalars become Python's.

    A keyword that the function does not have raises TypeError.
    exempt: the names of arguments that the function checks itself, as it has more to say. write: of an argument, the
    error for a value that its hint refuses, with {} for the value, or the function that checks it; else what to write
    instead of keywords of other libraries; others get the nearest name.

    >>> @checked(betas="write b1=0.9, b2=0.95")
    ... def adam(lr: float, b1: float = 0.9, b2: float = 0.999): ...
    >>> adam(1e-3, betas=(0.9, 0.95))
    Traceback (most recent call last):
    TypeError: adam has no argument 'betas'; write b1=0.9, b2=0.95
    >>> adam("1e-3")
    Traceback (most recent call last):
    fzero.core.arguments.WrongKind: adam: lr is '1e-3'; it must be a number
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        names, passes = list(parameters), [p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD]
        positional = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        unchecked = {*exempt.split(), *passes, *(p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL)}
        messages = {name: write[name] for name in names if name in write}
        owner = function.__qualname__.removesuffix(".__init__")

        def expected(name: str, value: Any) -> Any:
            hint, message = Any if name in unchecked else hints_of(function).get(name, Any), messages.get(name)
            if callable(message):
                message(value)
                return value
            return value if hint is Any else expect_hint(f"{owner}: {name}", value, hint, message)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in names and not passes:
                    instead = write.get(name) or f"its arguments are {', '.join(names)}{nearest(name, names)}"
                    raise TypeError(f"{owner} has no argument {name!r}; {instead}")
            converted: Any = [expected(name, value) for name, value in zip(positional, args)]
            named: Any = {name: expected(name, value) for name, value in kwargs.items()}
            return cast(Any, function)(*converted, *args[len(converted) :], **named)

        setattr(call, SELF_CHECKED, unchecked | messages.keys())
        return call

    return decorate


SELF_CHECKED = "fzero_own"  # the attribute of a checked function: those that it checks, or refuses, in its own words
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
