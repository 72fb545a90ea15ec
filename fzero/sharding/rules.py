"""Ordered rules over leaf names: the first match wins; an unmatched leaf and an unused rule are errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from fzero.core.arguments import checked
from fzero.core.pytree import nearest

Value = TypeVar("Value")
Rules = Sequence[tuple[str, Value]]  # (regex searched in the leaf name, value)


@checked()
def match_rules(
    rules: Rules[Value], names: Sequence[str], *, subject: str = "rules", partial: bool = False
) -> dict[str, Value]:
    """{leaf name: value of the first rule whose regular expression is found in it}.

    rules: (regular expression, value) pairs, in order. names: the names of a tree's leaves. subject: the rules' name in
    errors.
    partial: whether `names` are only some of the tree's, so that a rule may match none of them.
    Raises ValueError for a leaf that no rule matches, a rule that is the first match of no leaf, or an invalid regular
    expression.

    >>> match_rules([("bias$", 0.0), (".*", 0.1)], ["mlp/w", "mlp/bias"])
    {'mlp/w': 0.1, 'mlp/bias': 0.0}
    """
    try:
        compiled = [(re.compile(pattern), value) for pattern, value in rules]
    except re.error as error:
        raise ValueError(f"{subject}: {error.pattern!r} is not a regular expression: {error}") from None
    matched: dict[str, Value] = {}
    used: set[int] = set()
    for name in names:
        for i, (pattern, value) in enumerate(compiled):
            if pattern.search(name):
                matched[name] = value
                used.add(i)
                break
        else:
            raise ValueError(
                f"{subject}: no rule matches leaf {name!r}{nearest(name, [p for p, _ in rules])}; add a rule, or "
                "a last one ('.*', ...)"
            )
    for i, (pattern, _) in enumerate(rules):
        if i not in used and not partial:
            raise ValueError(
                f"{subject}: rule {pattern!r} matches no leaf first{nearest(pattern, names)}; remove or reorder it"
            )
    return matched
