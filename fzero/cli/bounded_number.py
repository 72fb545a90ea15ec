"""The numbers of flags: outside of their bounds they are refused while a command line is parsed, before any file is
opened.

Flags that do nothing without something else: each says what it needs, and is refused where that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from fzero.core.bounds import Bounds, check_bounds


class Flag(click.Option):
    """An option that does nothing without another one, or without something of what the command works on.

    needs: the other one, "--search"; with `of`, words for what is needed. of: a function of what the command gives
    `refuse_idle`, whether that is there.
    """

    def __init__(self, *args: Any, needs: str, of: Callable[..., bool] | None = None, **options: Any):
        super().__init__(*args, **options)
        self.needs, self.of = needs, of

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """As that of every option; then raises ValueError if this one is given and the one that it needs is not."""
        result = super().handle_parse_result(ctx, opts, args)
        if self.of is None and self.name in opts:
            (needed,) = (param.name for param in ctx.command.params if self.needs in param.opts)
            if needed not in opts:
                raise ValueError(self.idle())
        return result

    def idle(self) -> str:
        """The error of the flag without what it needs."""
        return f"{self.opts[0]} is for {self.needs}; add that, or leave it out"


def refuse_idle(*facts: Any) -> None:
    """Raise ValueError for a flag of the command line that does nothing with these facts, such as a config."""
    context = click.get_current_context()
    for option in context.command.params:
        explicit = context.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE
        if isinstance(option, Flag) and option.of is not None and explicit and not option.of(*facts):
            raise ValueError(option.idle())


class Number(click.ParamType):
    """The type of an option: a number of this kind, within these bounds (fzero/core/arguments.py).

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
        number = self.parse.convert(value, param, ctx)
        check_bounds(param.opts[0] if param else "the number", number, self.bounds)
        return number
