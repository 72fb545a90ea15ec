"""The documents of a step, of one that is made or of one to come: its data is a function of the config and the step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fzero import data
from fzero.data.buckets import BucketStream
from fzero.data.mixed_stream import MixedStream
from fzero.data.packing import FILL
from fzero.data.token_stream import RowStream, TokenStream
from fzero.data.tokens import Tokens
from fzero.run import corpus, run_folder
from fzero.run.config import RunConfig
from fzero.run.resume import rollback
from fzero.run.stages import count_samples, stage_of_step

SHOWN = 16  # tokens of a piece whose text is shown


class DocumentPiece(NamedTuple):
    """A part of a document in a row of a step, or all of it."""

    row: int  # of the batch
    source: str  # of a mixture; "" for one corpus
    document: int  # its number in the training split of its corpus
    begin: int  # the first of its tokens
    count: int
    text: str  # of its first tokens


def documents_of(folder: Path, step: int) -> list[DocumentPiece]:
    """The parts of documents in the rows of step `step`, from 1 on, of the run in `folder`, row by row.

    Raises ValueError if it is no training run, has no such step, or its corpus is gone or has changed.
    """
    config, environment = run_folder.read_config(folder), run_folder.read_environment(folder)
    run_folder.expect_trained(environment, folder)
    if not 1 <= step <= config.train.steps:
        raise ValueError(f"--step is {step}; the run has the steps 1 to {config.train.steps:,}")
    path = folder / environment["corpus"]  # an absolute path stays as it is
    if corpus.corpus_digest(path) != environment["corpus_sha256"]:
        raise ValueError(f"{path}: is not the corpus this run began with; put that one back")
    tokenizer, skips = data.load_tokenizer(path), rollback.skips_of(folder)
    stage = stage_of_step(config, step - 1)
    sample = corpus.sample_of_cursor(count_samples(config, step - 1), skips)
    stream, base_sample = corpus.open_last(stage.config, path, skips)
    pieces = []
    for row, (source, tokens, ranges) in enumerate(rows_of(stage.config, stream, sample - base_sample)):
        for first, end in ranges:
            document = int(np.searchsorted(tokens.docs, first, side="right")) - 1
            text = tokenizer.decode(tokens.tokens[first : min(end, first + SHOWN)].tolist())
            pieces.append(DocumentPiece(row, source, document, int(first - tokens.docs[document]), end - first, text))
    return pieces


def rows_of(config: RunConfig, stream: Any, first: int) -> Iterator[tuple[str, Tokens, list[tuple[int, int]]]]:
    """(source, corpus, ranges of tokens) of each row of the batch that begins with sample `first` of a stream."""
    count = config.train.batch
    if isinstance(stream, MixedStream):
        for source, number in stream.source_rows(first, count):
            source_stream = stream.streams[source]
            yield stream.mixture.names[source], source_stream.tokens, ranges_of(source_stream, number)
    elif isinstance(stream, RowStream):
        docs = stream.tokens.docs
        for row in stream.sample_documents(first, count):
            yield "", stream.tokens, [(int(docs[i]), int(docs[i + 1])) for i in row]
    elif isinstance(stream, BucketStream):
        for begin, end in stream.sample_ranges(first, count)[1].tolist():
            yield "", stream.tokens, [(begin, end)] if end else []
    else:
        for number in range(first, first + count):
            yield "", stream.tokens, ranges_of(stream, number)


def ranges_of(stream: TokenStream, sample: int) -> list[tuple[int, int]]:
    """The ranges of input tokens of a sample, each of one document."""
    positions = stream.positions_at(sample, 1)[0]
    positions = positions[positions != FILL]
    document = np.searchsorted(stream.tokens.docs, positions, side="right")
    begins = np.flatnonzero(np.append(True, (np.diff(positions) != 1) | (np.diff(document) != 0)))
    return [(int(positions[i]), int(positions[j - 1]) + 1) for i, j in zip(begins, [*begins[1:], len(positions)])]


def lines_of(pieces: list[DocumentPiece]) -> Iterator[str]:
    """The lines that show the parts of documents of a step."""
    for piece in pieces:
        source = f"{piece.source}  " if piece.source else ""
        tokens = f"tokens {piece.begin:,} to {piece.begin + piece.count - 1:,}"
        yield f"row {piece.row}  {source}document {piece.document:,}, {tokens}  {piece.text!r}"
