"""Jinja's sandbox for chat templates, in which nothing is made that is beyond all memory.

Operators, methods, filters, `~`, blocks and the text itself have bounds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fzero.core.text_parsing import LARGEST

MAX_RESULT = 1_000_000  # characters, items or digits that an operator or a call makes by a number


class Joined(CodeGenerator):
    """Writes `a ~ b` as a call of the environment, which sees how long the result is."""

    def visit_Concat(self, node: Any, frame: Any) -> None:
        self.write("environment.joined((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class Bounded(ImmutableSandboxedEnvironment):
    """A sandbox in which nothing makes a value beyond all memory."""

    intercepted_binops = frozenset(("*", "**", "%", "+"))
    code_generator_class = Joined

    def call_binop(self, context: Any, operator: str, lhs: Any, rhs: Any) -> Any:
        limit = LARGEST if operator == "+" and isinstance(lhs, str) else MAX_RESULT
        expect_small(operator_size(operator, lhs, rhs), f"a result of {operator}", limit)
        return super().call_binop(context, operator, lhs, rhs)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        expect_call(__obj, args, kwargs, "a call")
        return super().call(__context, __obj, *args, **kwargs)

    def joined(self, parts: Sequence[Any]) -> str:
        texts = list(map(str, parts))
        return self.concat(texts)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The text of some parts, of a whole template, of a block and of `~`."""
        texts, size = [], 0
        for text in parts:
            texts.append(text)
            size += len(text)
            expect_small(size, "a text", LARGEST)
        return "".join(texts)


def expect_small(size: float, subject: str, limit: int = MAX_RESULT) -> None:
    """Raise TemplateError for a size above `limit`."""
    if size > limit:
        raise jinja2.TemplateError(f"{subject} has more than {limit:,} characters or items")


def expect_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], subject: str) -> None:
    """Raise TemplateError for a call whose arguments, or result, would be too large."""
    width, size = call_sizes(function, args, kwargs)
    expect_small(width, f"an argument of {subject}, or its result,")
    expect_small(size, f"a result of {subject}", LARGEST)


def bounded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A filter that refuses large numbers, which say how long its result is."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        expect_call(function, args, kwargs, name)
        return function(*args, **kwargs)

    return call


def operator_size(operator: str, lhs: Any, rhs: Any) -> float:
    """The characters, items or digits of the result of a template's operator, about.

    >>> operator_size("*", "ab", 100), operator_size("**", 10, 6.0), operator_size("%", "%99d", 1)
    (200, 20.4, 99)
    """
    if operator == "*":
        for value, times in ((lhs, rhs), (rhs, lhs)):
            if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                return len(value) * times
    if operator == "+":
        return sum(len(value) for value in (lhs, rhs) if isinstance(value, (str, list, tuple)))
    if operator == "%" and isinstance(lhs, str):
        arguments = rhs if isinstance(rhs, tuple) and "*" in lhs else ()
        return max([*map(int, re.findall(r"\d{1,12}", lhs)), *(n for n in arguments if isinstance(n, int))], default=0)
    numbers = isinstance(lhs, int) and isinstance(rhs, (int, float))
    return abs(lhs).bit_length() * abs(rhs) * 0.85 if operator == "**" and numbers else 0


def call_sizes(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """About what a call of a text's method or a filter may make: (characters by numbers, characters by lengths).

    >>> call_sizes("x".ljust, (99,), {}), call_sizes("{:>77}".format, (1,), {})
    ((99, 0), (77, 0))
    >>> call_sizes("aa".replace, ("", "bb"), {})
    (0, 6)
    """
    arguments = [*args, *kwargs.values()]
    text = getattr(getattr(function, "__wrapped__", function), "__self__", None)  # a sandbox wraps str.format
    sized = [item for item in (text, *arguments) if isinstance(item, (str, list, tuple))]
    texts = [item for item in sized if isinstance(item, str)]
    widths = [abs(item) for item in arguments if isinstance(item, int)]
    name = getattr(function, "__name__", "")
    if "format" in name:
        widths += [int(digits) for item in texts for digits in re.findall(r"\d{1,12}", item)]
    size = 0
    if "replace" in name:
        size = (1 + max(map(len, sized), default=0)) * max(map(len, texts[-1:]), default=0)
    elif "join" in name:
        listed = [len(str(item)) for sequence in sized if not isinstance(sequence, str) for item in sequence]
        size = sum(listed) + len(listed) * max(map(len, texts), default=0)
    return max(widths, default=0), size
