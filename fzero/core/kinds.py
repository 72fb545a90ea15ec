"""Values against type hints: the hints of public functions are what callers are held to, so that a value of another
kind is one line where it is given, and not an error of torch later on, or a wrong number.

As Python itself does, an int serves as a float; numpy's scalars serve as Python's; a bool serves as no number.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import numbers
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

NO = object()  # the result for a value of another kind


class WrongKind(TypeError, ValueError):
    """An argument is of another kind than its hint: the caller's mistake, which a command ends with in one line."""


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
def hints_of(of: Callable[..., Any] | type) -> dict[str, Any]:
    """The type hints of a function's arguments, or of a class' fields with those of its bases, by name.

    A hint that names what only a type checker imports is Any.
    """
    if isinstance(of, type):
        scopes = [(inspect.get_annotations(one), vars(sys.modules[one.__module__])) for one in of.__mro__[::-1]]
    else:
        scopes = [(of.__annotations__, of.__globals__)]
    found = {name: _evaluated(text, scope) for texts, scope in scopes for name, text in texts.items()}
    found.pop("return", None)
    return found


def _evaluated(text: Any, scope: dict[str, Any]) -> Any:
    try:
        return eval(text, scope) if isinstance(text, str) else text
    except (NameError, AttributeError, TypeError):
        return Any


def expect_hint(what: str, value: Any, hint: Any) -> Any:
    """Return `value`, with numpy's scalars as Python's; raises WrongKind unless it is of the kind that `hint` says.

    >>> expect_hint("adam: eps", "1e-8", float)
    Traceback (most recent call last):
    fzero.core.kinds.WrongKind: adam: eps is '1e-8'; it must be a number
    """
    found = as_hinted(value, hint)
    if found is not NO:
        return found
    inner = typing.get_args(hint)
    if isinstance(value, Mapping) and issubclass(typing.get_origin(hint) or object, Mapping):
        for key, one in value.items():
            expect_hint(f"{what}[{key!r}]", one, inner[1])
    if isinstance(value, (list, tuple)) and typing.get_origin(hint) in (collections.abc.Sequence, list):
        for i, one in enumerate(value):
            expect_hint(f"{what}[{i}]", one, inner[0])
    raise WrongKind(f"{what} is {shown(value)}; it must be {words_of(hint)}")


def expect_fields(instance: Any, owner: str = "") -> None:
    """Raise WrongKind if a field of a frozen dataclass is of another kind than its hint; numpy's scalars become
    Python's.

    owner: its name in the message; "": that of the class.
    """
    hints = hints_of(type(instance))
    for name in (field.name for field in dataclasses.fields(instance)):
        value, hint = getattr(instance, name), hints[name]
        found = expect_hint(f"{owner or type(instance).__name__}: {name}", value, hint)
        if found is not value:
            object.__setattr__(instance, name, found)


def as_hinted(value: Any, hint: Any) -> Any:
    """`value` as one of a hint, or NO. Hints that it does not know hold for every value."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        found = (as_hinted(value, one) for one in typing.get_args(hint))
        return next((one for one in found if one is not NO), NO)
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
        each = list(args[:1]) * len(value) if origin is not tuple or args[1:] == (...,) else list(args)
        found = [as_hinted(one, hint) for one, hint in zip(value, each)]
        if len(each) != len(value) or any(one is NO for one in found):
            return NO
        same = all(one is before for one, before in zip(found, value)) and (
            origin is not tuple or isinstance(value, tuple)
        )
        return value if same else tuple(found) if origin is tuple else found
    if not _is_instance(value, origin):
        return NO
    if isinstance(value, Mapping) and len(args) == 2:
        return NO if any(as_hinted(one, args[1]) is NO for one in value.values()) else value
    return value


def _is_instance(value: Any, kind: type) -> bool:
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol that is not to be asked for
        return True


def words_of(hint: Any) -> str:
    """A hint in words."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        *some, last = dict.fromkeys(words_of(one) for one in typing.get_args(hint))
        return f"{', '.join(some)} or {last}" if some else last
    if typing.get_origin(hint) is typing.Literal:
        *some, last = map(repr, typing.get_args(hint))
        return f"{', '.join(some)} or {last}" if some else last
    kind = typing.get_origin(hint) or (type(None) if hint is None else hint)
    inner = [one for one in typing.get_args(hint) if one is not ... and one is not Any]
    if kind is tuple and inner and len(inner) == len(typing.get_args(hint)):
        return f"({', '.join(map(words_of, inner))})"
    if kind in (collections.abc.Sequence, collections.abc.Iterable, list, tuple) and inner:
        return f"{WORDS[kind]}, each of it {words_of(inner[0])}"
    if kind in (collections.abc.Mapping, dict) and len(inner) == 2:
        return f"a dict, each value of it {words_of(inner[1])}"
    name = getattr(kind, "__name__", str(kind))
    return WORDS.get(kind) or f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"


def shown(value: Any) -> str:
    """A value in a message: itself if it is a number, a text, or a short list of such, else its type."""
    plain = (bool, int, float, str, type(None), torch.dtype, np.generic)
    inner = list(value)[:20] if isinstance(value, (list, tuple)) else []
    if isinstance(value, plain) or (
        type(value) in (list, tuple) and all(isinstance(one, (*plain, torch.Tensor)) for one in inner)
    ):
        text = "a number of thousands of digits" if isinstance(value, int) and abs(value) >> 10_000 else repr(value)
        if len(text) <= 80 and text.isprintable():
            return text
    if isinstance(value, str):
        return f"{value[:60]!r}..."
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
