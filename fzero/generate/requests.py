"""What arrives at the scheduler, what it may use, and the batch of a step: values, without torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from fzero.core.arguments import checked, expect_fields
from fzero.core.config_tables import AtLeastOne, at_least
from fzero.core.text_parsing import short

if TYPE_CHECKING:  # so that `expect_fields` leaves ids to `expect_ids`: prompts have thousands
    from fzero.generate.page_pool import Ids


def expect_ids(label: str, ids: Collection[int]) -> None:
    """Raise ValueError for what is no token id."""
    if {*map(type, ids)} - {int} or min(ids, default=0) < 0:
        wrong = next(token for token in ids if type(token) is not int or token < 0)
        raise ValueError(f"{label} has {short(wrong)}; they must be whole numbers of at least 0, as of .tolist()")


@dataclass(frozen=True)
class Request:
    """A sequence to be made.

    number: rises with the arrival. ids: of its prompt. new_tokens: at most so many are drawn; 0: the prompt is computed
    alone, for its log-probs. root: the digest of all that changes a key or a value beside the tokens (model, adapter,
    dtype, kind of cache, RoPE); None: it takes no page from the cache and leaves none. scores: whether the log-probs of
    its prompt are wanted. n samples of a prompt are n requests with its ids.

    >>> Request(0, (), 5, b"")
    Traceback (most recent call last):
    ValueError: request 0: the prompt is empty; give at least 1 token
    """

    number: Annotated[int, at_least(0)]
    ids: Ids
    new_tokens: Annotated[int, at_least(0)]
    root: bytes | None
    scores: bool = False

    def __post_init__(self) -> None:
        expect_fields(self)
        object.__setattr__(self, "ids", tuple(self.ids))
        expect_ids(f"request {self.number}: ids", self.ids)
        if not self.ids:
            raise ValueError(f"request {self.number}: the prompt is empty; give at least 1 token")

    @property
    def max_positions(self) -> int:
        """The positions that it computes at most: the last token that is drawn is none."""
        return len(self.ids) + max(self.new_tokens - 1, 0)


@dataclass(frozen=True)
class StepLimits:
    """What a step, and all sequences, may use. tokens: those of a step, its budget, at least one a row; rows: the
    sequences that run; pages: of the pool; page_tokens: of a page.

    >>> StepLimits(tokens=8, rows=16, pages=100, page_tokens=16)
    Traceback (most recent call last):
    ValueError: StepLimits: tokens is 8; it must be at least rows, 16, as each sequence that draws computes one
    """

    tokens: AtLeastOne
    rows: AtLeastOne
    pages: AtLeastOne
    page_tokens: AtLeastOne

    def __post_init__(self) -> None:
        expect_fields(self)
        if self.tokens < self.rows:
            text = f"at least rows, {self.rows}, as each sequence that draws computes one"
            raise ValueError(f"StepLimits: tokens is {self.tokens}; it must be {text}")


class Arrivals(NamedTuple):
    """What happened since the last step.

    draws: by number, the new tokens of each row with `draws` of the last batch: one; of a row with guesses, those that
    were accepted and one more. ended: the sequences that are over, or cancelled; one with all its new tokens ends by
    itself (`Batch.finished`). guesses: by number, tokens that the next step may verify; as many are taken as the
    budget, the pages and the sequence's length allow.
    """

    requests: tuple[Request, ...] = ()
    draws: Mapping[int, Ids] = {}
    ended: Collection[int] = ()
    guesses: Mapping[int, Ids] = {}


class Row(NamedTuple):
    """The tokens of a sequence that a step computes."""

    number: int
    start: int  # the position of the first
    ids: Ids
    pages: Ids  # its page table, of start + len(ids) positions or more; the same object until it grows
    logit_count: int  # of the last tokens, whose logits are computed
    draws: bool  # a token is drawn by the last logits, or guesses are verified by all
    prefill: bool


class Admission(NamedTuple):
    """A sequence that starts, or starts again, in this step."""

    number: int
    cached: int  # the tokens whose keys and values are in the pages that it shares
    scored_pages: Ids  # if it wants log-probs: beside these pages are those of its first tokens; read before the step


class Batch(NamedTuple):
    """A step: rows that draw, then chunks of prompts. Without rows, nothing is left to do."""

    rows: tuple[Row, ...]
    admitted: tuple[Admission, ...]
    preempted: tuple[int, ...]
    finished: tuple[int, ...]  # the sequences that ended by themselves before it, with all their new tokens


@checked()
def expect_fits(request: Request, limits: StepLimits) -> None:
    """Raise ValueError for a request whose tokens do not fit into all pages.

    >>> expect_fits(Request(3, (1, 2, 3), 30, b""), StepLimits(tokens=8, rows=2, pages=4, page_tokens=8))
    """
    tokens = request.max_positions
    if tokens > limits.pages * limits.page_tokens:
        raise ValueError(
            f"request {request.number}: its {len(request.ids)} tokens and up to {request.new_tokens} new ones need "
            f"{-(-tokens // limits.page_tokens)} pages of {limits.page_tokens}; there are {limits.pages}: give a "
            f"shorter prompt, fewer new_tokens, or more pages"
        )
