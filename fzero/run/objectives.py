"""The objectives of a run as values: what each learns from, and what its loss is a mean over."""

from __future__ import annotations

from typing import NamedTuple


class Objective(NamedTuple):
    """What is learnt."""

    corpus: str  # the kind of corpus that it learns from
    line: str  # what a line of its .jsonl file is
    unit: str  # the loss is in nats per unit
    reports: bool = False  # whether its loss has further means to report of a validation, such as accuracy


OBJECTIVES = {
    "text": Objective("text", "text", "token"),
    "chat": Objective("chat", "conversation", "token"),
    "dpo": Objective("pairs", "pair of answers", "pair", reports=True),
    "classify": Objective("labels", "text with its label", "text", reports=True),
    "reward": Objective("ranked", "pair of answers", "pair", reports=True),
}
SCORED = ("classify", "reward")  # those of a model with a head of scores


def unit_of(objective: str | None) -> str:
    """The unit of an objective's loss, as recorded in a config (None: one of an earlier version, of text).

    >>> unit_of("dpo"), unit_of(None)
    ('pair', 'token')
    """
    return OBJECTIVES.get(objective or "text", OBJECTIVES["text"]).unit
