"""The questions of `fzero plan --ask`, and the words of their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from fzero.cli.progress import Progress

QUESTIONS = ("longest", "fewer-bytes")
OF_SEARCH = ("fewer-bytes",)  # which may be asked of the best plan of a search


class AnsweredSearch(NamedTuple):
    """A search, and the answer to a question about its best plan."""

    search: Any
    answer: Any

    def for_tokens(self, tokens: float) -> AnsweredSearch:
        """The same with a budget of tokens in the reports of the search."""
        return self._replace(search=self.search.for_tokens(tokens))

    def to_json(self) -> str:
        """Format as one JSON object."""
        return json.dumps({"search": json.loads(self.search.to_json()), "asked": json.loads(self.answer.to_json())})

    def __str__(self) -> str:
        return f"{self.search}\n\n{self.answer}"


def answer_question(question: str, config: Any, device: Any, cache: Path | None) -> Any:
    """The answer to one of QUESTIONS about a config on a device. cache: of traces, for plans."""
    from fzero.planner.max_sequence import longest
    from fzero.planner.slow_link_options import fewer_bytes

    with Progress("planning") as show:
        return longest(config, device, show) if question == "longest" else fewer_bytes(config, device, show, cache)
