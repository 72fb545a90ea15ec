"""Nested tables of plain values: TOML and JSON files, settings `a.b=c`, the types of values, and their bounds.

A value out of its bounds is refused by name, value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from fzero.core.text_parsing import Unparsable, nearest, parse_json, parse_toml, read_text_file, short

INF = math.inf
# The lower bound, whether it is allowed, the upper bound, and, where it is allowed as well, True.
Bounds = tuple[float, bool, float] | tuple[float, bool, float, bool]
POSITIVE: Bounds = (0.0, False, INF)
COUNT: Bounds = (0, True, INF)
RATE: Bounds = (0.0, True, INF)
FRACTION: Bounds = (0.0, True, 1.0)
SIZE: Bounds = (1, True, INF)
SEED: Bounds = (0, True, 2**64)
STAGE: Bounds = (0, True, 4)  # of ZeRO
CORRECTIONS = ("moments", "rate", "none")  # of Adam's bias
LENGTH: Bounds = (1, True, 1e9)  # of a sequence, in tokens
MEMORY_GB: Bounds = (0.0, False, 1e6)
FLOAT32_LARGEST = 3.4e38  # numbers without another upper bound are below it: float32 has no more
WHOLE = 2**63  # whole numbers without another upper bound are below it: more does not fit into a tensor or a file
POWERS: dict[float, str] = {2**63: "2^63", 2**64: "2^64"}


def check_bounds(name: str, value: float, bounds: Bounds) -> None:
    """Raise ValueError if `value` is outside of `bounds`, or not a number.

    >>> check_bounds("lr", -1.0, RATE)
    Traceback (most recent call last):
    ValueError: lr is -1.0; it must be at least 0
    """
    low, with_low, high = bounds[:3]
    with_high, endless = len(bounds) == 4 and bounds[3], high == INF
    if endless:
        high = WHOLE if isinstance(value, int) else FLOAT32_LARGEST
    if (low <= value if with_low else low < value) and (value <= high if with_high else value < high):
        return
    upper_text = f" and {'at most' if with_high else 'below'} {_shown(high)}"
    if endless:  # an end that no number reaches is named to those alone which are beyond it
        upper_text = ", and a finite number" if not math.isfinite(value) else upper_text if value >= high else ""
    raise ValueError(
        f"{name} is {short(value)}; it must be {'at least' if with_low else 'above'} {_shown(low)}{upper_text}"
    )


def _shown(bound: float) -> str:
    """The text of a bound, short where that is the same number."""
    text = POWERS.get(bound) or format(bound, "g")
    return text if bound in POWERS or float(text) == bound else repr(bound)


class Within(NamedTuple):
    """Of a number: its bounds."""

    bounds: Bounds


class Allowed(NamedTuple):
    """The values that an argument or a field may have, in words too; None passes.

    >>> Allowed(lambda n: n >= 1, "at least 1").check("sgd: steps", 0)
    Traceback (most recent call last):
    ValueError: sgd: steps is 0; it must be at least 1
    """

    holds: Callable[[Any], bool]
    words: str

    def check(self, label: str, value: Any) -> None:
        """Raise ValueError, naming the argument by `label`, unless it may have this value."""
        if value is not None and not self.holds(value):
            raise ValueError(f"{label} is {value!r}; it must be {self.words}")


def one_of(names: Iterable[Any], words: str = "") -> Allowed:
    """The rule that a value is one of these."""
    choices = tuple(names)
    return Allowed(lambda value: value in choices, words or f"one of {', '.join(map(_choice_text, choices))}")


def _choice_text(choice: Any) -> str:
    """A choice as a config has it, and the empty text so that it is seen."""
    return str(choice).lower() if isinstance(choice, bool) else str(choice) or '""'


def at_least(low: int) -> Allowed:
    """The rule of a whole number."""
    return Allowed(lambda number: number >= low, f"a whole number of at least {low}")


def power_of_two(low: int, high: int) -> Allowed:
    """The rule of a power of two from `low` to `high`."""
    return Allowed(lambda n: low <= n <= high and not n & (n - 1), f"a power of two from {low} to {high}")


AtLeastOne = Annotated[int, at_least(1)]


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise ValueError naming the nearest choice if `value` is not among `choices`."""
    if value not in choices:
        texts = [*map(_choice_text, choices)]
        raise ValueError(f"{name} is {value!r}{nearest(str(value), texts)}; it must be one of {', '.join(texts)}")


def optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The function that refuses what `parse` refuses, except an empty text."""
    return lambda text: parse(text) if text else None


# Types of numbers with their bounds.
Amount = Annotated[int, Within((1, True, 1e12))]
Count = Annotated[int, Within(COUNT)]
Size = Annotated[int, Within(SIZE)]
Rate = Annotated[float, Within(RATE)]
Positive = Annotated[float, Within(POSITIVE)]
Fraction = Annotated[float, Within(FRACTION)]
Share = Annotated[float, Within((0.0, False, 1.0))]


Table = dict[str, Any]


KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def check_type(name: str, value: Any, hint: Any) -> Any:
    """`value` if it has the type `hint` (an int as a float); raises ValueError naming key, value and types."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in kinds and type(value) is int:
        return float(value)
    if typing.get_origin(hint) is dict:
        if isinstance(value, dict) and all(type(size) is int for size in value.values()):
            return dict(value)
        raise ValueError(f"{name} is {short(value)}; it must be a table of whole numbers, such as {{dp = 1}}")
    if typing.get_origin(hint) is tuple:  # of texts
        if isinstance(value, list | tuple) and all(type(item) is str for item in value):
            return tuple(value)
        raise ValueError(f'{name} is {short(value)}; it must be a list of texts, such as ["csv"]')
    if type(value) not in kinds:
        raise ValueError(
            f"{name} is {short(value)}; it must be {' or '.join(KINDS[kind] for kind in kinds if kind in KINDS)}"
        )
    if isinstance(value, str) and "\0" in value:
        raise ValueError(f"{name} is {short(value)}; a text has no NUL")
    return value


@functools.cache
def metadata_of(kind: type, prefix: str = "", outer: tuple[Any, ...] = ()) -> dict[str, tuple[Any, ...]]:
    """{`a.b`: what `Annotated` says of that field of a dataclass and its tables}, with `outer`.

    >>> from fzero.run.config.run_config import RunConfig
    >>> metadata_of(RunConfig)["optim.lr"]
    (Within(bounds=(0.0, True, inf)), 'changing')
    """
    metadata: dict[str, tuple[Any, ...]] = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        metadata[f"{prefix}{name}"] = marks = (*outer, *getattr(hint, "__metadata__", ()))
        inner = getattr(hint, "__origin__", hint)
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            metadata |= metadata_of(inner, f"{prefix}{name}.", marks)
    return metadata


def read_table(path: str | Path) -> Table:
    """The table of a .toml or .json file; raises ValueError naming the file."""
    path = Path(path)
    if path.suffix not in (".toml", ".json"):
        raise ValueError(f"{path}: a config is a .toml file, or the config.json of a run")
    text = read_text_file(path)
    return parse_toml(text, str(path)) if path.suffix == ".toml" else parse_json(text, str(path))


def parse_setting(text: str) -> tuple[str, Any]:
    """(`a.b`, value) of a text `a.b=value`: the value in TOML syntax, or a bare word as a text."""
    key, equals, value = (field.strip() for field in text.partition("="))
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise ValueError(f"--set {text!r} is not of the form a.b=value, such as train.steps=100")
    try:
        return key, parse_toml(f"value = {value}", f"--set {key}")["value"]
    except Unparsable:
        if re.fullmatch(r"[\w./:+,=@-]+", value):
            return key, value
        raise ValueError(f"--set {text!r}: {value!r} is not a TOML value; a text with spaces goes in quotes") from None


def set_nested(table: Table, key: str, value: Any) -> None:
    """Set `a.b` in nested tables, in place; raises ValueError if `a` is not a table."""
    *parents, last = key.split(".")
    for i, name in enumerate(parents):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ValueError(f"{key}: {'.'.join(parents[: i + 1])} is {table!r}, not a table")
    table[last] = value


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """The pairs (`a.b`, value) of nested tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def to_toml(table: Table, notes: Mapping[str, str] | None = None) -> str:
    """The TOML text of nested tables of numbers, texts, truth values and lists; notes: comments by dotted name."""

    def word(key: str, value: Any) -> str:
        if isinstance(value, bool | str):
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, int | float):
            return repr(value)
        if isinstance(value, list | tuple):
            return "[" + ", ".join(word(key, item) for item in value) + "]"
        raise ValueError(f"{key} is {value!r}, which a TOML file cannot say")

    def lines(table: Mapping[str, Any], prefix: str) -> Iterable[str]:
        for key, value in table.items():
            if not isinstance(value, Mapping):
                note = (notes or {}).get(prefix + key, "")
                yield f"{key} = {word(prefix + key, value)}" + (f"  # {note}" if note else "")
        for key, value in table.items():
            if isinstance(value, Mapping):
                yield f"\n[{prefix}{key}]"
                yield from lines(value, f"{prefix}{key}.")

    return "\n".join(lines(table, "")) + "\n"


def format_list(values: list[int]) -> str:
    """The text of a list; of more than 8 values the first seven and the last."""
    return ", ".join(map(str, values)) if len(values) <= 8 else f"{', '.join(map(str, values[:7]))}, ..., {values[-1]}"
