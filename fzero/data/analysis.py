"""A number for each row of a corpus, by which a curriculum orders them: its length, its rarity, a model's loss.

CORPUS/analysis-NAME-T-PACKING/values.npy    float32, one of each row of T tokens
CORPUS/analysis-NAME-T-PACKING/meta.json     metric, by (what made it), corpus: its digest; sha256: of the values

Ref: Li et al. 2022, "DeepSpeed data efficiency", arXiv:2212.03597, section 3.1.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fzero.core.arguments import checked
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
