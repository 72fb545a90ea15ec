"""A mixture of corpora as a value: which ones, by which weights, how much of each; and its text.

    web=corpora/web:0.7,code=corpora/code:0.2:0.4@1e9:epochs=2,corpora/math:0.1:tokens=5e8

is, source by source, a name (default: the last part of its path), the folder of a prepared corpus, its weight, other
weights from a token of the run on, and the most that is read of it. Weights are parts of their sum.

The corpus of a run on a mixture is a folder whose meta.json names the corpora:

    meta.json       as of a prepared corpus (fzero/data/tokens.py), with the sums of its sources' counts, and `mixture`:
                    the name, the path and the SHA-256 of the meta.json of each source, and `url` if it is at one
    tokenizer.json  when the tokenizer is not bytes
    source-0 ...    what describes a source at a URL (fzero/data/linked_corpus.py), by its number: the source's path
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from fzero.core.arguments import expect_fields
from fzero.core.storage import absolute
from fzero.data.remote_tokens import READING, Reading
from fzero.data.tokens import Tokens, digest, open_tokens, read_meta

FORM = "a source is NAME=PATH:WEIGHT[:WEIGHT@TOKENS]...[:epochs=N][:tokens=N], such as code=corpora/code:0.3:epochs=2"


@dataclass(frozen=True)
class MixtureSource:
    """A corpus of a mixture."""

    name: str
    path: str
    weights: tuple[tuple[int, Fraction], ...]  # (tokens of the run before it, weight from there on), the first at 0
    epochs: Fraction | None = None  # the most that is read of it, None for no end
    tokens: int | None = None

    def __post_init__(self) -> None:
        expect_fields(self)

    def __str__(self) -> str:
        prefix = "" if self.name == Path(self.path).name else f"{self.name}="
        (_, first), *later = self.weights
        parts = [
            f"{prefix}{self.path}",
            format_fraction(first),
            *(f"{format_fraction(weight)}@{token}" for token, weight in later),
        ]
        parts += [] if self.epochs is None else [f"epochs={format_fraction(self.epochs)}"]
        return ":".join([*parts, *([] if self.tokens is None else [f"tokens={self.tokens}"])])

    def token_weight(self, token: int) -> Fraction:
        """The weight after so many tokens of the run."""
        return next(weight for begin, weight in reversed(self.weights) if begin <= token)


@dataclass(frozen=True)
class Mixture:
    """The sources of a mixture; `str` gives the text that `parse` reads back equal.

    >>> mixture = Mixture.parse("corpora/web:0.7,corpora/code:0.3:1@1e6")
    >>> mixture.names, str(mixture)
    (('web', 'code'), 'corpora/web:0.7,corpora/code:0.3:1@1000000')
    >>> [(token, [str(weight) for weight in weights]) for token, weights in mixture.periods()]
    [(0, ['7/10', '3/10']), (1000000, ['7/10', '1'])]
    """

    sources: tuple[MixtureSource, ...]

    def __post_init__(self) -> None:
        expect_fields(self)

    @classmethod
    @functools.lru_cache(maxsize=64)
    def parse(cls, text: str) -> Mixture:
        """The Mixture of a text; raises ValueError for a text that is none, weights below 0, weights whose sum is 0
        from some token on, and two sources of one name or one path."""
        sources = tuple(read_source(source_text) for source_text in text.split(","))
        for i, source in enumerate(sources):
            for earlier in sources[:i]:
                if absolute(source.path) == absolute(earlier.path):
                    raise ValueError(
                        f"mixture: {source.path} is named twice; give it once, with the sum of its weights"
                    )
                if source.name == earlier.name:
                    raise ValueError(
                        f"mixture: {earlier.path} and {source.path} are both named {source.name!r}; give them names: "
                        f"one={earlier.path}:..., two={source.path}:..."
                    )
        mixture = cls(sources)
        for token, weights in mixture.periods():
            if not sum(weights):
                raise ValueError(
                    f"mixture: the weights of {', '.join(mixture.names)} sum to 0 from token {token:,} on; give one of "
                    "them a weight above 0"
                )
        return mixture

    def __str__(self) -> str:
        return ",".join(map(str, self.sources))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sources."""
        return tuple(source.name for source in self.sources)

    def periods(self) -> list[tuple[int, list[Fraction]]]:
        """(tokens of the run before it, the weights of all sources) of each period with weights of its own."""
        begins = sorted({begin for source in self.sources for begin, _ in source.weights})
        return [(begin, [source.token_weight(begin) for source in self.sources]) for begin in begins]

    def absolute(self) -> Mixture:
        """The mixture with absolute paths."""
        return Mixture(tuple(replace(source, path=absolute(source.path)) for source in self.sources))


def read_source(text: str) -> MixtureSource:
    """The Source of its text; raises ValueError."""
    path, options = split_options(text)
    name, equals, remainder = path.partition("=")
    named = bool(equals) and "/" not in name
    path = remainder if named else path
    name = name if named else Path(path).name
    if not path or not name:
        raise ValueError(f"mixture has {text!r} without a path; {FORM}")
    weights, limits = list[tuple[int, Fraction]](), dict[str, Any]()
    for option in options:
        key, equals, value = option.partition("=")
        if equals:
            if key in limits:
                raise ValueError(f"mixture: {path} has {key} twice; give it once")
            limits[key] = number(value, option, text)
            if not limits[key] > 0 or (key == "tokens" and limits[key].denominator != 1):
                kind = "a whole number" if key == "tokens" else "a number"
                raise ValueError(f"mixture: {path} has {option}; it must be {kind} above 0")
            continue
        value, marker, token = option.partition("@")
        begin = number(token, option, text) if marker else Fraction(0)
        weight = number(value, option, text)
        if not 0 <= weight < 10**12:
            raise ValueError(f"mixture: the weight of {path} is {value}; it must be at least 0 and below 1e12")
        if begin.denominator != 1 or begin < 0:
            raise ValueError(f"mixture: {path} has {option}; a weight begins at a whole number of tokens")
        if bool(weights) != bool(marker) or (weights and int(begin) <= weights[-1][0]):
            raise ValueError(
                f"mixture: {path} has {option}; its weight comes first, and others after it with rising tokens, as in "
                "0.3:0.5@1e9"
            )
        weights.append((int(begin), weight))
    if not weights:
        raise ValueError(f"mixture has {text!r} without a weight; {FORM}")
    tokens = limits.get("tokens")
    return MixtureSource(name, path, tuple(weights), limits.get("epochs"), None if tokens is None else int(tokens))


def split_options(text: str) -> tuple[str, list[str]]:
    """(the path of a source, the options at its end).

    >>> split_options("s3://bucket/web:0.7:epochs=2")
    ('s3://bucket/web', ['0.7', 'epochs=2'])
    """
    parts = text.strip().split(":")
    end = len(parts)
    while end > 1 and is_option(parts[end - 1]):
        end -= 1
    return ":".join(parts[:end]), parts[end:]


def is_option(text: str) -> bool:
    """Whether a part of a source's text is a weight or a limit, though perhaps a wrong one."""
    if text.partition("=")[0] in ("epochs", "tokens"):
        return True
    return re.fullmatch(r"[-+.\d][^/]*(/\d+)?", text) is not None


def number(text: str, option: str, source: str) -> Fraction:
    """The number of a text; raises ValueError naming the option and the source it is of."""
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"mixture has {source!r}: {option!r} has no number; {FORM}") from None


def format_fraction(value: Fraction) -> str:
    """The text of a number, exactly: decimal if it ends, else a fraction.

    >>> format_fraction(Fraction("0.125")), format_fraction(Fraction(1, 3))
    ('0.125', '1/3')
    """
    places = next((n for n in range(40) if (value * 10**n).denominator == 1), None)
    if places is None:
        return str(value)
    digits = str(int(value * 10**places)).rjust(places + 1, "0")
    return f"{digits[:-places]}.{digits[-places:]}" if places else digits


def describe_mixture(mixture: Mixture) -> Iterator[str]:
    """The lines that say what a mixture is of, for the start of a run."""
    periods = mixture.periods()
    for begin, weights in periods:
        total = sum(weights)
        shares = ", ".join(f"{name} {float(w / total):.4g}" for name, w in zip(mixture.names, weights))
        yield f"mixture{f' from token {begin:,} on' if len(periods) > 1 else ''}: {shares}"


class SourceCorpus(NamedTuple):
    """A source as the mixture's meta.json names it."""

    name: str
    path: Path
    sha256: str  # of its meta.json


def sources_of(folder: str | Path) -> list[SourceCorpus]:
    """The sources of a mixture's corpus, [] for another; raises ValueError naming one that has changed."""
    sources = [
        SourceCorpus(entry["name"], Path(folder) / entry["path"], entry["sha256"])
        for entry in read_meta(folder).get("mixture", [])
    ]
    for source in sources:
        if digest(source.path) != source.sha256:
            raise ValueError(
                f"{source.path}: has changed since the run began, whose mixture has it as {source.name}; put that "
                "corpus back, or start a new run"
            )
    return sources


def open_sources(folder: str | Path, split: str, reading: Reading = READING) -> list[Tokens]:
    """The split of each source of a mixture's corpus; raises ValueError as `sources_of` and `open_tokens` do."""
    return [open_tokens(source.path, split, reading) for source in sources_of(folder)]
