"""Flags that do nothing without something else: each says what it needs, and is refused where that is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click


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
        found = super().handle_parse_result(ctx, opts, args)
        if self.of is None and self.name in opts:
            (needed,) = (param.name for param in ctx.command.params if self.needs in param.opts)
            if needed not in opts:
                raise ValueError(self.idle())
        return found

    def idle(self) -> str:
        """The error of the flag without what it needs."""
        return f"{self.opts[0]} is for {self.needs}; add that, or leave it out"


def refuse_idle(*facts: Any) -> None:
    """Raise ValueError for a flag of the command line that does nothing with these facts, such as a config."""
    context = click.get_current_context()
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is click.core.ParameterSource.COMMANDLINE
        if isinstance(option, Flag) and option.of is not None and given and not option.of(*facts):
            raise ValueError(option.idle())
