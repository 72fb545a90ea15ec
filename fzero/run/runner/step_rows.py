"""The rows of a run's steps: each is written, and judged, when its numbers are in the host's memory.

On a GPU the host gives the device the next step first and reads the row of the one before while it runs, so that the
device never waits. What follows from a row (a rollback, a stop) follows one step later, and the update of that step is
dropped with its state. A step whose state is kept, measured or evaluated is read at once, and so is every step of a run
with a disk, as a commit to it cannot be dropped.

The documents of a step are a function of the config and the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fzero import data
from fzero.core.gpu import HOST
from fzero.data.packing import FILL
from fzero.data.token_stream import RowStream, TokenStream
from fzero.data.tokens import Tokens
from fzero.run.config.run_config import RunConfig
from fzero.run.config.stages import count_samples, stage_of_step
from fzero.run.measure.metrics_rows import Meter, StepMeasurement
from fzero.run.measure.timer import ClockSpan
from fzero.run.runner import rollback
from fzero.run.setup import corpus, run_folder
from fzero.run.setup.build import Attempt

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
    """The parts of documents in the rows of step `step` of the run in `folder`, row by row."""
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
    """(source, corpus, ranges of tokens) of each row of the batch at `first`."""
    count = config.train.batch
    if isinstance(stream, data.MixedStream):
        for source, number in stream.source_rows(first, count):
            source_stream = stream.streams[source]
            yield stream.mixture.names[source], source_stream.tokens, ranges_of(source_stream, number)
    elif isinstance(stream, RowStream):
        docs = stream.tokens.docs
        for row in stream.sample_documents(first, count):
            yield "", stream.tokens, [(int(docs[i]), int(docs[i + 1])) for i in row]
    elif isinstance(stream, data.BucketStream):
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


class Due(NamedTuple):
    """The work that follows a step beside its row."""

    evaluate: bool
    digest: bool
    measure: bool
    check: bool
    save: bool


def due_after(config: RunConfig, step: int) -> Due:
    """The work that is due after step `step`.

    >>> due_after(RunConfig(), 20)
    Due(evaluate=False, digest=False, measure=True, check=False, save=False)
    """
    t, check_every = config.train, config.guard.check_every

    def every(interval: int) -> bool:
        return interval > 0 and step % interval == 0

    save = every(t.checkpoint_every)
    return Due(
        evaluate=step == t.steps or every(t.eval_every),
        digest=every(t.digest_every),
        measure=every(t.measure_every),
        check=check_every > 0 and (save or every(check_every)),
        save=save,
    )


class PendingRow(NamedTuple):
    """A step whose row is not written yet."""

    measurement: StepMeasurement
    sample: int  # first of its batch
    fields: dict[str, Any]  # that are known already
    stretch: ClockSpan
    recorder: str  # its recorder, or ""


class StepRows:
    """The rows of an attempt, in order; a context, which at an error writes the row that is left."""

    def __init__(
        self, attempt: Attempt, meter: Meter, record: Callable[[Mapping[str, Any]], None] | None, tried: list[int]
    ) -> None:
        self.attempt, self.meter, self.record, self.tried = attempt, meter, record, tried
        self.defers = attempt.job.device != HOST and attempt.job.nvme is None
        self.skipped = 0  # steps in a row
        self.unread: PendingRow | None = None

    def add(self, measurement: StepMeasurement, sample: int, fields: dict[str, Any], recorder: str) -> None:
        """Enter a step, whose row ends here; it waits for nothing."""
        assert self.unread is None  # settled
        self.unread = PendingRow(measurement, sample, fields, self.meter.cut(measurement.step), recorder)

    def settle(self) -> rollback.Fault | None:
        """Write the row that was added last; returns the Fault of a step that asks for a rollback, or None."""
        job, folder, _, coordinator, options, _ = self.attempt
        unread = self.unread
        if unread is None:
            return None
        row = self._write()
        self.skipped = self.skipped + 1 if row["skipped"] else 0
        fault = rollback.roll_back_decision(job.config.guard, row, unread.sample, self.skipped)
        if fault is None and unread.sample in self.tried and not row["skipped"]:
            step = unread.measurement.step
            rollback.record_recovery(folder, step, unread.sample, self.tried, coordinator, options.say)
        return fault

    def _write(self) -> dict[str, Any]:
        unread, self.unread = self.unread, None
        assert unread is not None  # the caller has looked
        measurement, meter = unread.measurement, self.meter
        row = meter.row(measurement) | unread.fields | meter.times(unread.stretch, measurement.step, unread.recorder)
        if self.record is not None:
            self.record(row)
        return row

    def __enter__(self) -> StepRows:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.unread is not None:
            # The error under way is the one to be told: a device that is lost has no numbers to give either.
            with contextlib.suppress(Exception):
                self._write()
