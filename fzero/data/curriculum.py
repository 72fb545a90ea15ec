"""An order of a corpus' rows in which easy ones come first, and the number of each row that says how easy it is.

The number is a row's length, its rarity, or a model's loss on it:

CORPUS/analysis-NAME-T-PACKING/values.npy    float32, one of each row of T tokens
CORPUS/analysis-NAME-T-PACKING/meta.json     metric, by (what made it), corpus: its digest; sha256: of the values

A curriculum allows, at a step, the rows whose number is among the lowest part. The next row is any of those that are
allowed and not yet read; where all are read, the easiest one left is allowed too. So an order is a function of (the
numbers, the schedule, the seed, the epoch), with each row once in an epoch.

Ref: Li et al. 2022, "DeepSpeed data efficiency", arXiv:2212.03597, section 3.1, whose schedules these are; there rows
are drawn again when the allowed ones are used up.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fzero.core import prng
from fzero.core.arguments import checked, expect_fields
from fzero.core.files import writing
from fzero.core.pytree import nearest
from fzero.core.storage import write_text
from fzero.core.text_parsing import expect_entries, read_json
from fzero.data.packing import FILL, PACKINGS, Batch, Packing, assemble, full_range
from fzero.data.token_stream import expect_rows
from fzero.data.tokens import Tokens, digest, new_corpus, open_tokens, read_meta

BATCH_TOKENS = 1 << 20  # tokens in memory, but for the batches of a model
ENTRIES = {"metric": str, "by": str, "corpus": str, "sha256": str}
BARS, WIDEST = 10, 40  # of the histogram


class Analysis(NamedTuple):
    """What an analysis found."""

    values: np.ndarray  # float32 [S], of each row
    digest: str  # 16 hexadecimal digits of the values


class RowBatch(NamedTuple):
    """Some of the rows of a corpus."""

    first: int  # the number of the first one
    batch: Batch
    real: np.ndarray  # bool [n, T]: the tokens that are not filled up


Measure = Callable[[RowBatch], np.ndarray]  # the number of each row of a part, [n]


def row_batches(tokens: Tokens, rows: Packing, count: int) -> Iterator[RowBatch]:
    """All rows of a corpus in their order, `count` at a time."""
    for first in range(0, len(rows), count):
        positions = rows.positions(np.arange(first, min(len(rows), first + count)))
        yield RowBatch(first, assemble(tokens, positions), positions != FILL)


def mean_lengths(tokens: Tokens, rows: Packing) -> Measure:
    """The mean number of tokens of the documents that a row has tokens of."""

    def measure(row_batch: RowBatch) -> np.ndarray:
        positions = rows.positions(np.arange(row_batch.first, row_batch.first + len(row_batch.real)))
        document = np.searchsorted(tokens.docs, np.maximum(positions, 0), side="right") - 1
        begins = np.ones(positions.shape, bool)
        begins[:, 1:] = document[:, 1:] != document[:, :-1]
        begins &= row_batch.real
        return (np.diff(tokens.docs)[document] * begins).sum(1) / begins.sum(1)

    return measure


def rarities(tokens: Tokens, rows: Packing) -> Measure:
    """The sum of -ln p over a row's tokens, p being the share of a token in all rows."""
    counts = np.zeros(tokens.vocab_size, np.int64)
    for row_batch in row_batches(tokens, rows, max(1, BATCH_TOKENS // rows.positions(np.zeros(1, np.int64)).shape[1])):
        counts += np.bincount(row_batch.batch["tokens"].numpy()[row_batch.real], minlength=len(counts))
    rare = np.log(counts.sum()) - np.log(np.maximum(counts, 1))
    return lambda row_batch: (rare[row_batch.batch["tokens"].numpy()] * row_batch.real).sum(1)


METRICS: dict[str, Callable[[Tokens, Packing], Measure]] = {"length": mean_lengths, "rarity": rarities}


@checked("measure")
def analyze(
    corpus: str | Path,
    metric: str = "rarity",
    *,
    seq_len: int,
    packing: str = "stream",
    name: str = "",
    measure: Callable[[Batch], np.ndarray] | None = None,
    origin: str = "",
    rows_at_once: int = 0,
) -> np.ndarray:
    """The number of each row of the training split of a corpus, float32 [S], and write it beside the corpus.

    metric: "length", the mean number of tokens of the documents that a row has tokens of; "rarity", the sum of -ln p
    over its tokens, p being how often a token is one of all; or another name with `measure`, a function from a batch of
    rows, as of TokenStream, to the number of each. seq_len, packing: of the rows, as of TokenStream. name: by which a
    curriculum finds it; "": the metric. origin: what made it, for `measure`. rows_at_once: of a batch; 0: some million
    tokens. In memory are a batch, 8 bytes of each token of the vocabulary, and 4 of each row.

    Raises ValueError for an unknown metric, a corpus that is none of text, and an analysis of this name, length and
    packing that is there already.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "text.txt").write_text("abababababababababab xyz")
    >>> _ = fzero.data.prepare(folder / "text.txt", folder / "corpus", val_fraction=0.1)
    >>> fzero.data.analyze(folder / "corpus", "rarity", seq_len=4).round(2)
    array([2.77, 2.77, 2.77, 2.77, 2.77], dtype=float32)

    Ref: Li et al. 2022, arXiv:2212.03597, section 3.1.
    """
    if measure is None and metric not in METRICS:
        raise ValueError(f"metric={metric!r}{nearest(metric, METRICS)}: it must be one of {', '.join(METRICS)}")
    kind = read_meta(corpus).get("kind", "text")
    if kind != "text" or "mixture" in read_meta(corpus):
        subject = f"a corpus of {kind}" if kind != "text" else "a mixture; analyze each of its corpora"
        raise ValueError(f"{corpus}: is {subject}: rows of text are analyzed")
    folder = analysis_folder(corpus, name or metric, seq_len, packing)
    if folder.exists():
        raise ValueError(f"{folder}: is there already; remove it, or give another name")
    tokens = open_tokens(corpus, "train")
    expect_rows(tokens, seq_len, packing)
    rows = PACKINGS[packing](full_range(tokens), seq_len, tokens)
    row_measure = METRICS[metric](tokens, rows) if measure is None else lambda row_batch: measure(row_batch.batch)
    values = np.empty(len(rows), np.float32)
    for row_batch in row_batches(tokens, rows, rows_at_once or max(1, BATCH_TOKENS // seq_len)):
        values[row_batch.first : row_batch.first + len(row_batch.real)] = row_measure(row_batch)
    if not np.isfinite(values).all():
        raise ValueError(f"row {int((~np.isfinite(values)).argmax())} of {corpus} has no finite {metric}")
    write_analysis(folder, values, metric, origin, digest(corpus))
    return values


def analysis_folder(corpus: str | Path, name: str, seq_len: int, packing: str) -> Path:
    """The folder of an analysis."""
    if not name or "/" in name or "@" in name:
        raise ValueError(f"name={name!r}: the name of an analysis is part of a folder's: without / and @")
    return Path(corpus) / f"analysis-{name}-{seq_len}-{packing}"


def write_analysis(target: Path, values: np.ndarray, metric: str, origin: str, corpus: str) -> None:
    """Write an analysis; the folder appears when it is complete."""
    content = io.BytesIO()
    np.save(content, values)
    meta = {"metric": metric, "by": origin, "corpus": corpus, "sha256": hashlib.sha256(content.getbuffer()).hexdigest()}
    with new_corpus(target) as folder:
        with writing(folder / "values.npy", "new") as file:
            file.write(content.getbuffer())
        write_text(folder, "meta.json", json.dumps(meta, indent=2) + "\n")


def open_analysis(corpus: str | Path, name: str, seq_len: int, packing: str) -> Analysis:
    """The analysis of that name of a corpus' rows; raises ValueError if it is missing, damaged or of another corpus."""
    folder = analysis_folder(corpus, name, seq_len, packing)
    make = f"fzero data analyze {corpus} --metric {name} --seq-len {seq_len} --packing {packing}"
    if not (folder / "meta.json").is_file():
        names = sorted(path.name.removeprefix("analysis-") for path in Path(corpus).glob("analysis-*"))
        raise ValueError(
            f"{folder}: no such analysis; there is {', '.join(names) or 'none'} beside the corpus; make it: {make}"
        )
    meta, path = read_json(folder / "meta.json"), folder / "values.npy"
    expect_entries(meta, ENTRIES, str(folder / "meta.json"))
    if meta["corpus"] != digest(corpus):
        raise ValueError(f"{folder}: is of another corpus than {corpus} has now; remove it and make it again: {make}")
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != meta["sha256"]:
        raise ValueError(f"{path}: missing or damaged; remove {folder} and make it again: {make}")
    return Analysis(np.load(io.BytesIO(content), allow_pickle=False), meta["sha256"][:16])


def describe_values(values: np.ndarray, metric: str) -> Iterator[str]:
    """The lines that show how the numbers of an analysis are spread: quantiles, and a histogram.

    >>> print(*describe_values(np.arange(5.0), "length"), sep="\\n")
    length of 5 rows: mean 2, least 0, 10% 0.4, 50% 2, 90% 3.6, most 4
    """
    levels = (0, 0.1, 0.5, 0.9, 1)
    names = ("least", "10%", "50%", "90%", "most")
    quantiles = ", ".join(f"{n} {q:,.6g}" for n, q in zip(names, np.quantile(values.astype(np.float64), levels)))
    yield f"{metric} of {len(values):,} rows: mean {values.mean(dtype=np.float64):,.6g}, {quantiles}"
    if len(values) < 2 * BARS:
        return
    counts, edges = np.histogram(values.astype(np.float64), BARS)
    for count, low, high in zip(counts.tolist(), edges[:-1], edges[1:]):
        bar = "#" * -(-count * WIDEST // counts.max())
        yield f"{low:>12,.6g} to {high:<12,.6g} {count:>10,} {bar}".rstrip()


FORM = (
    "a schedule is linear, root:DEGREE, or discrete:PART@WHEN,... with parts of the rows from parts of the curriculum "
    "on, such as discrete:0.3@0.25,0.6@0.5"
)
MOST_DEGREE = 64  # of a root: beyond it a schedule is a step
DRAWN = 1 << 16  # samples whose random words are drawn together


class Piece(NamedTuple):
    """Samples that steps of one size consume."""

    first: int  # sample
    begin: int  # progress (steps or tokens of the run) before the step of that sample
    batch: int  # samples of a step
    step_progress: int  # progress of a step


@dataclass(frozen=True)
class Growth:
    """The part of the rows that is allowed, from `start` at first to all after `length` (steps or tokens).

    root:r has start + (1 - start) (progress / length)^(1 / r), linear is root:1, discrete has the parts that are given,
    each from a part of the length on. Numbers of rows are exact, so that they are the same on every machine.

    Raises ValueError for a text that is no schedule, and a start or length out of range.

    >>> [Growth("linear", Fraction("0.1"), 10).allowed(1000, progress) for progress in (0, 5, 10)]
    [100, 550, 1000]
    >>> [Growth("root:2", Fraction("0.1"), 100).allowed(1000, progress) for progress in (0, 25, 100)]
    [100, 550, 1000]
    """

    schedule: str
    start: Fraction
    length: int

    def __post_init__(self) -> None:
        expect_fields(self)
        if not 0 < self.start <= 1:
            raise ValueError(f"curriculum_start is {float(self.start):g}; it must be above 0 and at most 1")
        if self.length < 1:
            raise ValueError(f"the curriculum's length is {self.length}; it must be 1 or more")
        if self.degree == 0:
            parts = [self.start, *(fraction for fraction, _ in self.steps), Fraction(1)]
            whens = [Fraction(0), *(start for _, start in self.steps), Fraction(1)]
            if any(a >= b for a, b in pairwise(whens)) or any(a > b for a, b in pairwise(parts)):
                raise ValueError(
                    f"curriculum_schedule is {self.schedule!r}; its parts rise from curriculum_start={self.start} to "
                    "1, each from a later part of the curriculum on, above 0 and below 1"
                )

    @functools.cached_property
    def degree(self) -> int:
        """The degree of the root; 0 for given parts."""
        name, _, argument = self.schedule.partition(":")
        if self.schedule == "linear":
            return 1
        if name == "root" and argument.isdecimal() and 1 <= int(argument) <= MOST_DEGREE:
            return int(argument)
        if name == "discrete" and argument:
            return 0
        raise ValueError(f"curriculum_schedule is {self.schedule!r}; {FORM}")

    @functools.cached_property
    def steps(self) -> tuple[tuple[Fraction, Fraction], ...]:
        """(part of the rows, part of the length from which it is allowed) of each step of a discrete schedule."""
        pairs = []
        for text in self.schedule.partition(":")[2].split(","):
            fraction, _, start = text.partition("@")
            try:
                pairs.append((Fraction(fraction), Fraction(start)))
            except (ValueError, ZeroDivisionError):
                raise ValueError(f"curriculum_schedule is {self.schedule!r}: {text!r} is no part; {FORM}") from None
        return tuple(pairs)

    def allowed(self, rows: int, progress: int) -> int:
        """How many of the rows are allowed after so much progress, at least one."""
        if progress >= self.length:
            return rows
        min_rows = max(1, math.ceil(self.start * rows))
        if self.degree == 0:
            fractions = [fractions for fractions, start in self.steps if start * self.length <= progress]
            return max(min_rows, math.ceil(fractions[-1] * rows)) if fractions else min_rows
        growable, r = rows - min_rows, self.degree
        target = progress * growable**r  # the smallest x with x^r * length >= wanted
        x = min(growable, int(growable * (progress / self.length) ** (1 / r)))
        while x**r * self.length < target:
            x += 1
        while x and (x - 1) ** r * self.length >= target:
            x -= 1
        return min_rows + x


@dataclass(frozen=True, eq=False)
class Curriculum:
    """The order of a stream's rows by a growth over their numbers.

    ranked: the rows from the easiest on, int32 [S]; those of one number in their own order. pieces: which
    progress a sample is read at, in rising order, the first at sample 0. An epoch that begins before all rows are
    allowed is drawn once on every rank, in a second for a million rows; an order takes 4 bytes a row, of which two are
    kept.

    >>> values = np.array([3.0, 1.0, 2.0, 0.0], np.float32)
    >>> own = Curriculum(rank(values), Growth("linear", Fraction("0.5"), 4), (Piece(0, 0, 1, 1),))
    >>> sorted(own.numbers(0, 0, 0, 2).tolist()), sorted(own.numbers(0, 0, 0, 4).tolist())
    ([1, 3], [0, 1, 2, 3])
    """

    ranked: np.ndarray
    growth: Growth
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        expect_fields(self)

    @classmethod
    def by_values(cls, values: np.ndarray, growth: Growth, pieces: tuple[Piece, ...]) -> Curriculum:
        """The order of rows that have these numbers."""
        return cls(rank(values), growth, pieces)

    def sample_progress(self, samples: np.ndarray) -> np.ndarray:
        """The progress before the step that each of these samples is of, int64."""
        firsts, begins, batches, step_progress = np.array(self.pieces, np.int64).T
        index = np.searchsorted(firsts, samples, side="right") - 1
        return begins[index] + (samples - firsts[index]) // batches[index] * step_progress[index]

    def allowed_rows(self, samples: np.ndarray) -> np.ndarray:
        """How many rows are allowed at each of these samples of the stream, in rising order; int64."""
        progress, counts = np.unique(self.sample_progress(samples), return_counts=True)
        return np.repeat([self.growth.allowed(len(self.ranked), step) for step in progress.tolist()], counts)

    def complete(self, epoch: int) -> bool:
        """Whether all rows are allowed from the beginning of this epoch on."""
        first = np.array([epoch * len(self.ranked)])
        return int(self.allowed_rows(first)[0]) == len(self.ranked)

    def numbers(self, seed: int, epoch: int, begin: int, end: int) -> np.ndarray:
        """The rows of the samples [begin, end) of an epoch, int64."""
        return _order(self, seed, epoch)[begin:end].astype(np.int64)


def rank(values: np.ndarray) -> np.ndarray:
    """The rows from the lowest number on, int32 [S]. Raises ValueError for 2^31 rows and more.

    >>> rank(np.array([3.0, 1.0, 1.0], np.float32)).tolist()
    [1, 2, 0]
    """
    if len(values) >= 1 << 31:
        raise ValueError(f"a curriculum orders fewer than 2^31 rows, and there are {len(values):,}")
    return np.argsort(values, kind="stable").astype(np.int32)


@functools.lru_cache(maxsize=2)
def _order(curriculum: Curriculum, seed: int, epoch: int) -> np.ndarray:
    """The rows of an epoch in the order that they are read: Durstenfeld's shuffle (1964) of a growing pile."""
    size, key = len(curriculum.ranked), prng.fold_in(prng.fold_in(prng.key(seed), "curriculum"), epoch)
    places = np.arange(size, dtype=np.int32)  # those from n on and below what is allowed are the pile
    view = memoryview(places)
    for begin in range(0, size, DRAWN):
        n = np.arange(begin, min(size, begin + DRAWN))
        pile = np.maximum(curriculum.allowed_rows(epoch * size + n), n + 1) - n
        words = prng.bits(key, (len(n),), first=begin).numpy()
        for i, j in zip(n.tolist(), (n + (words * pile >> 32)).tolist()):
            view[i], view[j] = view[j], view[i]
    return curriculum.ranked[places]
