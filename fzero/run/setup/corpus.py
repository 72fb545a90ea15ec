"""The corpus of a run: found or prepared, identified by a digest, and opened as batches for this rank."""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fzero
from fzero import data
from fzero.core.config_tables import Table
from fzero.core.gpu import HOST, pinned
from fzero.core.gpu_copies import Copied, copy_in
from fzero.core.storage import is_url, user_folder
from fzero.data.linked_corpus import expect_unchanged, write_mixture
from fzero.data.mixture import Mixture, open_sources, sources_of
from fzero.data.packing import Batch
from fzero.data.prepare import Busy, remove_finished
from fzero.data.remote_tokens import Reading
from fzero.data.token_stream import RowStream
from fzero.data.tokens import VERSION, digest, read_meta, token_dtype
from fzero.run import setup
from fzero.run.config.curriculum import BUCKETS, curriculum_of, lengths_of, make_pieces, with_scale
from fzero.run.config.run_config import RunConfig
from fzero.run.config.stages import stages_of
from fzero.run.config.transforms import make_transforms
from fzero.run.setup import run_folder
from fzero.run.setup.coordinator import Coordinator, Say
from fzero.sharding import Mesh

AHEAD = 8  # batches whose tokens are fetched from object stores before they are asked for


def find_corpus(value: RunConfig, folder: Path, say: Say, init: Path | None = None) -> Path:
    """The prepared corpus of a run: `data.path` itself, or made from it in the user's cache or `folder`/data."""
    config, path = value.data, Path(value.data.path)
    if config.mixture:
        meta = write_mixture(Mixture.parse(config.mixture), folder / run_folder.DATA)
        expect_tokenizer(config.tokenizer, meta["tokenizer"], "the corpora of data.mixture were")
        return folder / run_folder.DATA
    if is_url(config.path):
        out = folder / run_folder.DATA
        expect_tokenizer(config.tokenizer, data.link_url(config.path, out)["tokenizer"], f"{config.path} was")
        return out
    if config.path != "stdlib" and os.path.lexists(path / "meta.json"):
        expect_tokenizer(config.tokenizer, read_meta(path)["tokenizer"], f"{path} was")
        return path
    if value.task.examples:
        return setup.vocabulary.prepare_for(value, folder / run_folder.DATA, say, init)
    if config.path != "stdlib":
        say(f"preparing {path} ({config.tokenizer}) in {folder / run_folder.DATA}")
        say(data.describe(data.prepare(path, folder / run_folder.DATA, tokenizer=config.tokenizer)))
        return folder / run_folder.DATA
    # The library's path too: builds of one version may come with and without its tests.
    key = (
        VERSION,
        "sums",
        platform.python_version(),
        sysconfig.get_path("stdlib"),
        config.tokenizer,
        fzero.__version__,
    )
    name = "stdlib-" + hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    target = user_folder("XDG_CACHE_HOME") / name
    if not target.is_dir():
        say(f"preparing Python's standard library as text ({config.tokenizer}), once, in {target}")
    while not target.is_dir():
        try:
            say(data.describe(data.prepare("stdlib", target, tokenizer=config.tokenizer)))
        except Busy:  # another run makes it
            time.sleep(0.2)
        except (OSError, ValueError):
            if not target.is_dir():  # else another run has made it
                raise
    remove_finished(target)
    return target


def expect_tokenizer(name: str, used: str, subject: str) -> None:
    """Raise ValueError if a run asks for another tokenizer than what is prepared already has."""
    if name not in ("bytes", used):
        raise ValueError(f"data.tokenizer is {name!r} and {subject} prepared with {used!r}; leave it out")


def corpus_of_run(value: RunConfig, folder: Path, environment: Table, coordinator: Coordinator, say: Say) -> Path:
    """The corpus that the run in `folder` began with, by its environment.json; raises ValueError if it has changed."""
    run_folder.expect_trained(environment, folder)
    path = folder / environment["corpus"]  # an absolute path stays as it is
    if value.data.path == "stdlib":
        path = Path(coordinator.share(lambda: str(path if path.exists() else find_corpus(value, folder, say))))
    if corpus_digest(path) != environment["corpus_sha256"]:
        raise ValueError(f"{path}: is not the corpus this run began with; put that one back")
    return path


def corpus_digest(corpus: Path) -> str:
    """A SHA-256 that identifies a corpus; raises ValueError if a corpus of a mixture or at a URL has changed."""
    for path in [corpus, *(source.path for source in sources_of(corpus))]:
        expect_unchanged(path)
    return digest(corpus)


MicroBatchReader = Callable[[int, int], Batch]
Skips = Sequence[tuple[int, int]]


def sample_of_cursor(cursor: int, skips: Skips) -> int:
    """The first sample of the batch of a run that has consumed `cursor` samples, without the `skips`.

    >>> [sample_of_cursor(cursor, [(8, 4), (16, 4)]) for cursor in (0, 4, 8, 12, 16)]
    [0, 4, 12, 20, 24]
    """
    # cursor counts samples trained on, so it is step x train.batch whatever is left out. skips: (first sample, count)
    # of each batch left out, by sample numbers of the whole order, each beginning where a batch of the run without it
    # would: a state from before a batch was left out is one of the run without it too.
    for first, count in sorted(skips):
        if first > cursor:
            break
        cursor += count
    return cursor


def first_samples(config: RunConfig, skips: Skips) -> list[int]:
    """The first sample of each stage that has rows of its own, by the numbers of the whole order."""
    starts, cursor = [], 0
    for stage in stages_of(config):
        first = cursor
        for begin, count in sorted(skips):
            first += count if begin < first else 0
        starts += [] if stage.reads_on else [first]
        cursor += stage.samples
    return starts


def open_last(config: RunConfig, corpus: Path, skips: Skips = ()) -> tuple[Any, int]:
    """(the training rows of the last stage of a config, the sample of the whole order that is their first)."""
    firsts, streams, rows = first_samples(config, skips), list[Any](), 0
    for stage in stages_of(config):
        if not stage.reads_on:
            # What the stages before it have left of an epoch, it reads first.
            i, rows = len(streams), 0
            remainder = streams[-1].remainder_after(firsts[i] - firsts[i - 1]) if streams else None
            streams.append(open_stream(stage.config, corpus, "train", config.train.batch, remainder))
            if (order := curriculum_of(config, corpus)) is not None:  # of all sizes of a batch that grows
                streams[-1] = replace(streams[-1], curriculum=order)
        rows += stage.samples
        if config.data.mixture:
            expect_enough_rows(streams[-1], rows)
    return streams[-1], firsts[-1]


def open_micro_batches(config: RunConfig, corpus: Path, skips: Skips = ()) -> MicroBatchReader:
    """The function (sample, m) -> micro-batch m of the batch that begins with that sample, on every mesh."""
    return micro_batches(config, corpus, *open_last(config, corpus, skips))


def micro_batches(config: RunConfig, corpus: Path, stream: Any, base_sample: int) -> MicroBatchReader:
    """The function (sample, m) -> micro-batch m, of a stream whose first row is sample `base_sample`."""
    rows_per_sample = stream.seq_len // stream.lengths[0] if config.data.packing == BUCKETS else 1  # rows of a sample
    size, in_pieces, transformed = config.train.micro_batch, make_pieces(config), make_transforms(config, corpus)

    def read(sample: int, m: int) -> Batch:
        first = sample + m * size
        batch = in_pieces(stream.samples_at(first - base_sample, size), sample)
        return drop_documents(config, transformed(batch, first * rows_per_sample))

    return read


def make_prefetcher(
    config: RunConfig, stream: Any, base_sample: int, local_indices: Sequence[int]
) -> Callable[[int], None]:
    """The function that begins to fetch the micro-batches of the batch of a sample, and of AHEAD after it."""
    t, stages = config.train, stages_of(config)
    last = max(i for i, stage in enumerate(stages) if not stage.reads_on)
    end, cursor = base_sample + sum(stage.samples for stage in stages[last:]), 0

    def begin(sample: int) -> None:
        nonlocal cursor
        limit = min(sample + (AHEAD + 1) * t.batch, end)
        if not sample <= cursor <= limit:  # the first batch, and after a rollback
            cursor = sample
        while cursor < limit:
            if not all([stream.begin(cursor - base_sample + m * t.micro_batch, t.micro_batch) for m in local_indices]):
                break
            cursor += t.batch

    return begin


def open_counts(config: RunConfig, corpus: Path, skips: Skips = ()) -> Callable[[int], dict[str, Any]]:
    """A function from the first sample of a batch to {"rows_by_source": {name: rows}}; to {} without a mixture."""
    if not config.data.mixture:
        return lambda sample: {}
    stream, base_sample = open_last(config, corpus, skips)
    assert isinstance(stream, data.MixedStream)

    def counted(sample: int) -> dict[str, Any]:
        first = sample - base_sample
        count_pairs = zip(stream.counts(first), stream.counts(first + config.train.batch))
        return {"rows_by_source": {name: b - a for name, (a, b) in zip(stream.mixture.names, count_pairs)}}

    return counted


def expect_enough_rows(stream: data.MixedStream, rows: int) -> None:
    """Raise ValueError if a mixture ends before a stage has its rows."""
    if stream.rows is not None and stream.rows < rows:
        raise ValueError(
            f"data.mixture: its sources have {stream.rows:,} rows of {stream.seq_len} tokens within their epochs and "
            f"tokens, and the run takes {rows:,}; raise their limits, leave one without, or take fewer steps"
        )


def open_stream(
    config: RunConfig, corpus: Path, split: str, batch: int, remainder: Any = None
) -> data.TokenStream | data.MixedStream | RowStream | data.BucketStream:
    """The batches of a split: rows of text, of a mixture, of conversations, or of documents of like length."""
    seed, seq_len, packing = config.train.seed, config.data.seq_len, config.data.packing
    if config.data.mixture:
        remainders = itertools.repeat(None) if remainder is None else remainder.remainders
        pairs = zip(open_sources(corpus, split, reading_of(config, corpus)), remainders)
        streams = tuple(data.TokenStream(tokens, seq_len, batch, seed, packing, tail) for tokens, tail in pairs)
        return data.MixedStream(Mixture.parse(config.data.mixture), streams, batch, remainder)
    tokens = data.open_tokens(corpus, split, reading_of(config, corpus))
    if packing == BUCKETS and split == "train":
        return data.BucketStream(tokens, lengths_of(config), batch, seed)
    if tokens.kind == "text":
        packing = "best-fit" if packing == BUCKETS else packing  # to validate, documents whole in rows of one length
        return data.TokenStream(tokens, seq_len, batch, seed, packing, remainder)
    if remainder is not None:
        raise ValueError(
            f"objective is {config.objective}, whose rows are prepared for one length; leave out --seq-len"
        )
    reference = config.dpo.reference if config.task.reference else ""
    return RowStream(tokens, seq_len, batch, seed, data.read_reference(corpus, split, reference) if reference else None)


def reading_of(config: RunConfig, corpus: Path) -> Reading:
    """How a run reads tokens in object stores: by large pieces if they fit."""
    settings, meta = config.data, read_meta(corpus)
    size = sum(split["tokens"] for split in meta["splits"].values()) * token_dtype(meta["vocab_size"]).itemsize
    reading = Reading(
        Path(settings.cache) if settings.cache else None, int(settings.cache_gb * 1e9), 60 * settings.retry_minutes
    )
    return reading._replace(piece=reading.piece_bytes(size))


def open_data(
    config: RunConfig, corpus: Path, mesh: Mesh, skips: Skips = ()
) -> tuple[Callable[[int], Batch], Callable[[], Iterator[Any]]]:
    """(first sample -> this rank's rows of its batch, the same of validation), the same batches on every mesh."""
    t, (stream, base_sample) = config.train, open_last(config, corpus, skips)
    read_micro_batch, local_indices = (
        micro_batches(config, corpus, stream, base_sample),
        range(mesh.data_rank, t.batch // t.micro_batch, mesh.data_size),
    )
    begin = (
        (lambda sample: None)
        if isinstance(stream, RowStream)
        else make_prefetcher(config, stream, base_sample, local_indices)
    )
    split: Any = open_stream(config, corpus, "val", t.micro_batch)  # no BucketStream, which is to train
    windows = t.eval_batches * t.micro_batch or None
    share = (mesh.data_rank, mesh.data_size)

    def load_batch(sample: int) -> Batch:
        begin(sample)
        parts = [read_micro_batch(sample, m) for m in local_indices]
        rows = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
        return rows | with_scale(config, stream, sample - base_sample)

    # In micro-batches, the shapes of training, so that nothing is compiled again.
    return load_batch, lambda: (drop_documents(config, batch) for batch in split.eval_batches(windows, share))


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`."""
    return {name: copy.use() for name, copy in _copies(batch, device).items()}


def prefetch_to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on `device`, each on its way there while the one before it is used."""
    pending: deque[dict[str, Copied]] = deque()
    for batch in batches:
        pending.append(_copies(batch, device))
        if len(pending) > 1 or device == HOST:
            yield {name: copy.use() for name, copy in pending.popleft().items()}
    for copies in pending:
        yield {name: copy.use() for name, copy in copies.items()}


def _copies(batch: Batch, device: torch.device) -> dict[str, Copied]:
    return {name: copy_in(pinned(leaf, device), device) for name, leaf in batch.items()}


def drop_documents(config: RunConfig, batch: Batch) -> Batch:
    """The batch, without document numbers where tokens attend across documents."""
    return (
        batch if config.data.within_documents else {name: leaf for name, leaf in batch.items() if name != "documents"}
    )


def bytes_per_token(corpus: Path) -> float:
    """The mean number of UTF-8 bytes of a token of the corpus; 1 for the byte tokenizer."""
    meta = read_meta(corpus)
    counted = meta.get("kind", "text") == "text" and "text_bytes" in meta.get("source", {})  # a template's is not
    if meta["tokenizer"] == "bytes" or not counted:
        return 1.0
    counts = [split["tokens"] - split["documents"] for split in meta["splits"].values()]
    return meta["source"]["text_bytes"] / max(1, sum(counts))
