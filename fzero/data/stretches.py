"""Cut a long text into stretches whose pieces, ids or words of a tokenizer, are those of the whole text.

A place is cut where the tokenizer splits anyway. It is looked for where spaces, words and signs meet, and is taken if
what stands around it has the same pieces with and without the cut, seen from two beginnings: a tokenizer whose pieces
follow from where the text began (a run of one character, say) differs in one of them. A stretch is encoded behind some
of the text before it, whose pieces are dropped again, as some tokenizers take the beginning of a text for a word's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

STRETCH = 1 << 18  # characters, of which the tokenizers library takes some 200 bytes of memory each
LONGEST = 1 << 20  # characters of a stretch in which no place to cut is seen
AROUND = 1024  # characters to each side of a place that are looked at
BEFORE = 64  # characters that are encoded with a stretch, from before it
TAIL, TRIES = 1 << 14, 40  # characters at the end of a stretch in which places are tried, and how many of each kind
PLACES = (re.compile(r"(?<=\S)(?=\s)"), re.compile(r"(?<=\w)(?=\W)|(?<=\W)(?=\w)|(?<=\d)(?=\D)|(?<=\D)(?=\d)"))

Pieces = Callable[[str], Sequence[Any]]


class Stretch(NamedTuple):
    """A part of a text, and what is encoded before it."""

    before: str
    text: str
    last: bool  # of its text


def stretches_of(
    blocks: Iterable[str], pieces: Pieces | None, origin: Callable[[], str], before: int = BEFORE, size: int = 0
) -> Iterator[Stretch]:
    """The stretches of the text that consists of these blocks; of a short one it is one.

    pieces: what a tokenizer makes of a text; None: it may be cut anywhere. origin: of the text, for messages. before:
    the characters that go with a stretch. size: of a stretch in characters; 0: STRETCH. Raises ValueError for LONGEST
    characters without a place to cut.

    >>> [stretch.text for stretch in stretches_of(["one ", "two"], str.split, lambda: "a.txt")]
    ['one two']
    """
    size = size or STRETCH
    left, context, wanted = "", "", size
    for block in blocks:
        left += block
        while len(left) > wanted + AROUND:
            begin = len(context)
            at = wanted if pieces is None else place_of(context + left, begin, begin + wanted, pieces, before)
            if at:
                yield Stretch(context, left[:at], last=False)
                context = (context + left[:at])[-before:] if before else ""
                left, wanted = left[at:], size
            elif wanted < LONGEST:
                wanted = min(2 * wanted, LONGEST)
            else:
                raise ValueError(
                    f"{origin()}: {wanted:,} characters, from {left[:20]!r} on, without a place where the tokenizer "
                    "surely splits, so that they would have to be in its memory together; break them by spaces or "
                    "lines, or leave them out"
                )
    yield Stretch(context, left, last=True)


def place_of(text: str, begin: int, end: int, pieces: Pieces, before: int) -> int:
    """The last place up to `end` where `pieces` cuts the text, counted from `begin`; 0 if none is seen."""
    low = max(begin + 1, end - TAIL)
    for kind in PLACES:
        places = [match.start() for match in kind.finditer(text, low, end)]
        for at in places[: -TRIES - 1 : -1]:
            if all(is_cut(text[max(0, at - n) : at], text[at : at + n], pieces, before) for n in (AROUND, AROUND - 1)):
                return at - begin
    return 0


def is_cut(left: str, right: str, pieces: Pieces, before: int) -> bool:
    """Whether the pieces of left + right are those of both, where the right one stands behind the end of the left."""
    context = left[-before:] if before else ""
    try:
        whole, first, known, both = (list(pieces(text)) for text in (left + right, left, context, context + right))
    except ValueError:  # an end of a document in it, of which encoding tells with its place
        return False
    return both[: len(known)] == known and whole == first + both[len(known) :]
