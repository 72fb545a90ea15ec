"""The numbers of flags: outside of their bounds they are refused while a command line is parsed, before any file is
opened."""

from __future__ import annotations

from typing import Any

import click

from fzero.core.bounds import Bounds, check_bounds


class Number(click.ParamType):
    """The type of an option: a number of this kind, within these bounds (fzero/core/bounds.py).

    >>> Number(int, (1, True, 8)).convert("3", None, None)
    3
    >>> Number(float, (0.0, False, 1.0)).convert("nan", None, None)
    Traceback (most recent call last):
    ValueError: the number is nan; it must be above 0 and below 1
    """

    def __init__(self, kind: type[int] | type[float], bounds: Bounds):
        self.parse = click.INT if kind is int else click.FLOAT
        self.name, self.bounds = self.parse.name, bounds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number of a text; raises ValueError naming the flag for one that is out of bounds."""
        found = self.parse.convert(value, param, ctx)
        check_bounds(param.opts[0] if param else "the number", found, self.bounds)
        return found
