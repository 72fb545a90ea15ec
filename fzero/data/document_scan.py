"""The first reading of the sources: it finds every error, and the split, size and digest of every document.

A document is a row of a table, DOCUMENT, in the file of its piece, so that memory does not grow with the corpus. The
readings that follow compare each document with its row.

Work on many cores: the results of a function of the numbers 0, 1, ..., each computed by one of several processes.

The processes are forked: they have what the function refers to, and end with the process that started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import itertools
import os
import pickle
import signal
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fzero.core.files import writing
from fzero.core.host_memory import cores
from fzero.core.process_pool import Pool
from fzero.core.torch_private import without_collection
from fzero.data.sources import Document, SourceFile, blocks_of, expect_text, read_documents

R = TypeVar("R")
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
SERIAL = "TOKENIZERS_PARALLELISM"  # the threads of the tokenizers library, which a forked process does not have
WORK: list[Callable[[int], Any]] = []  # of a forked process


def results_of(work: Callable[[int], R], numbers: Sequence[int], workers: int) -> Generator[tuple[int, R], None, None]:
    """Yield (number, work(number)) of all numbers, as they are done; raises the first number's error.

    >>> sorted(results_of(lambda n: n * n, range(4), workers=2))
    [(0, 0), (1, 1), (2, 4), (3, 9)]
    """
    workers = min(workers, len(numbers))
    with _serial_tokenizers():
        if workers <= 1:
            for number in numbers:
                yield number, work(number)
        else:
            yield from _forked_results(work, numbers, workers)


def run_in_process(work: Callable[[], R]) -> R:
    """work(), computed in a process of its own, whose memory and threads are gone when it is done."""
    return next(_forked_results(lambda _: work(), [0], 1))[1]


def _forked_results(work: Callable[[int], R], numbers: Sequence[int], workers: int) -> Iterator[tuple[int, R]]:
    """The results of all numbers, each given to the next process that is free."""
    sys.stdout.flush()  # what waits there is written once
    sys.stderr.flush()
    with Pool(workers, "fork", _begin, work, os.getpid()) as pool:
        with without_collection(), warnings.catch_warnings():
            # Python 3.12 and JAX warn of locks that other threads may hold; what reads and encodes text takes none
            # of theirs, nor of torch's and of loggers.
            warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
            warnings.filterwarnings("ignore", r".*os\.fork\(\) is incompatible with multithreaded", RuntimeWarning)
            try:
                futures = {pool.submit(_serve, number): number for number in numbers}
            except BrokenProcessPool:  # one ended while numbers were still being given
                raise OSError(_ended(pool)) from None
        order: list[Future[R]] = list(futures)
        for future in as_completed(order):
            if future.cancelled():
                continue
            if isinstance(future.exception(), BrokenProcessPool):
                raise OSError(_ended(pool)) from None
            if future.exception() is None:
                yield futures[future], future.result()
            else:  # those before it may raise too
                for later in order[order.index(future) + 1 :]:
                    later.cancel()
        for future in order:
            if not future.cancelled() and (error := future.exception()) is not None:
                raise error


def _ended(pool: Pool) -> str:
    """How a process ended; those beside it are then terminated."""
    pool.shutdown()  # until all have ended: before, another thread may be about to learn the exit code
    codes = [process.exitcode for process in pool.started]
    code = next((code for code in codes if code not in (None, 0, -signal.SIGTERM)), -signal.SIGTERM)
    return (
        f"a process that prepares ended {f'by signal {-code}' if code < 0 else f'with exit code {code}'}; if memory "
        "was short, use fewer (workers= of Preparing, --workers); the same command goes on from what is done"
    )


def _begin(work: Callable[[int], Any], parent: int) -> None:
    """Make a forked process ready for numbers."""
    gc.freeze()  # garbage of the parent is not ended here: that may take threads, which a forked process does not have
    gc.enable()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    WORK[:] = [work]


def _serve(number: int) -> Any:
    """The result of a number; an error that cannot be sent becomes one of its words."""
    try:
        return WORK[0](number)
    except BaseException as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        raise


@contextlib.contextmanager
def _serial_tokenizers() -> Iterator[None]:
    """A context in which the tokenizers library uses no threads of its own, in forked processes too."""
    previous = os.environ.get(SERIAL)
    os.environ[SERIAL] = "false"
    try:
        yield
    finally:
        if previous is None:
            os.environ.pop(SERIAL, None)
        else:
            os.environ[SERIAL] = previous


Show = Callable[[str, int, int], None]
Filter = Callable[[str], bool | str | None]
DUPLICATES = ("keep", "exact")


class Preparing(NamedTuple):
    """How `prepare` works, and which documents it leaves out. The corpus does not depend on `workers` and `show`."""

    workers: int = 0  # processes; 0: one for each core
    show: Show | None = None  # called with what is done now, the bytes of the sources for which it is, and all of them
    # Functions of a text, in their order: False or None leaves a document out, a text takes its place.
    filters: Sequence[Filter] = ()
    duplicates: str = "keep"  # "exact": of documents with the same text the first in reading order alone is kept

    def report_progress(self, stage: str, done: int, total: int) -> None:
        """Show what is done."""
        if self.show is not None:
            self.show(stage, done, total)

    def processes(self) -> int:
        """The number of processes: one where forks of a process with threads are not sound (macOS)."""
        return self.workers or (cores() if sys.platform == "linux" else 1)

    def expect_sound(self) -> None:
        """Raise ValueError for what `prepare` cannot do."""
        if self.workers < 0:
            raise ValueError(f"workers={self.workers}: wanted a number of processes, or 0 for one for each core")
        if self.duplicates not in DUPLICATES:
            raise ValueError(f"duplicates={self.duplicates!r}: it must be one of {', '.join(DUPLICATES)}")
        names = list(map(name_of, self.filters))
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"filters: two are called {twice[0]!r}; give each its own name, by which it counts")

    def settings(self) -> dict[str, Any]:
        """What the corpus depends on, for its meta.json: nothing if all documents are kept."""
        entries: dict[str, Any] = {"filters": list(map(name_of, self.filters))} if self.filters else {}
        if self.duplicates != "keep":
            entries["duplicates"] = self.duplicates
        return entries


def name_of(function: Filter) -> str:
    """The name of a filter, by which the documents are counted that it leaves out."""
    return f"filter {getattr(function, '__name__', type(function).__name__)}"


def apply_filters(text: str, filters: Sequence[Filter], origin: Callable[[], str]) -> tuple[str, str]:
    """(what filters make of a text, the name of the one that leaves it out or ""); raises ValueError.

    >>> apply_filters("a text", [str.upper, lambda text: len(text) > 3], lambda: "a.txt")
    ('A TEXT', '')
    """
    for function in filters:
        try:
            answer = function(text)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{origin()}: {name_of(function)} raised {reason}") from error
        if answer is None or answer is False or answer == "":
            return text, name_of(function)
        if isinstance(answer, str):
            try:
                expect_text(answer, "", name_of(function))
            except ValueError:  # once more, with its place, for which lines are counted
                expect_text(answer, origin(), name_of(function))
            text = answer
        elif answer is not True:
            raise ValueError(f"{origin()}: {name_of(function)} returned {answer!r}; wanted a bool, a text or None")
    return text, ""


PREPARING = Preparing()


ROW = struct.Struct("<32sQQQB")
NAMED = 3  # files with a problem that are named
# Of a row: is left out if it comes again; filters changed it; filters left it out.
UNIQUE, CHANGED_TEXT, DROPPED = 1, 2, 4
DOCUMENT = np.dtype([("sha256", "V32"), ("draw", "<u8"), ("bytes", "<u8"), ("characters", "<u8"), ("notes", "u1")])
BATCH_ROWS = 4096  # rows that are written together
CHANGED = "the sources changed while they were read; prepare again once they are stable"


class Sources(NamedTuple):
    """What is read, and the folder of what the first reading says of it."""

    pieces: Sequence[Sequence[SourceFile]]
    text_key: str
    seed: int
    folder: Path
    filters: Sequence[Filter] = ()

    def sizes(self) -> list[int]:
        """The bytes of each piece, about, as they are stored."""
        return [sum(file.length for file in piece) for piece in self.pieces]

    def rows(self, number: int) -> np.ndarray:
        """The documents of a piece, DOCUMENT [documents]."""
        path = self.folder / f"{number}.documents"
        return np.memmap(path, DOCUMENT, "r") if path.stat().st_size else np.zeros(0, DOCUMENT)


class Corpus(NamedTuple):
    """The documents to prepare, as found by the first reading."""

    # The draw of a document depends only on seed and content.
    sources: Sources
    masks: Sequence[np.ndarray]  # of each piece, bool [documents]: those that are not left out
    val_fraction: float
    documents: int
    text_bytes: int
    sha256: str  # of the SHA-256 of every document, in reading order
    skipped: dict[str, int]  # problem -> documents left out
    lowest: int  # the lowest draw: always validation, so that validation is not empty
    highest: int  # the highest draw: always training; equal to the lowest if all documents are identical
    files: Mapping[str, list[str]] = {}

    def split_of(self, draw: int) -> str:
        """The split of a document."""
        return "val" if draw == self.lowest or (draw < self.val_fraction * 2**64 and draw != self.highest) else "train"


def scan_sources(sources: Sources, val_fraction: float, preparing: Preparing) -> Corpus:
    """Read all documents; raises ValueError as `read_documents` does, and if there is no text, or one character."""
    sizes, done = sources.sizes(), 0
    piece_results: dict[int, tuple[int, Counter[str], dict[str, list[str]]]] = {}
    with closing(results_of(lambda n: read_piece(sources, n), range(len(sizes)), preparing.processes())) as results:
        for number, result in results:
            piece_results[number] = result
            done += sizes[number]
            preparing.report_progress("reading", done, sum(sizes))
    masks = [sources.rows(number)["notes"] & DROPPED == 0 for number in range(len(sizes))]
    skipped = sum((piece_results[number][1] for number in range(len(sizes))), Counter())
    files: dict[str, list[str]] = {}
    for number in range(len(sizes)):
        for problem, names in piece_results[number][2].items():
            files[problem] = [*files.get(problem, []), *names][:NAMED]
    drop_duplicates(sources, masks, UNIQUE if preparing.duplicates == "keep" else 0, skipped)
    return build_corpus(sources, masks, val_fraction, skipped)._replace(files=files)


def read_piece(sources: Sources, number: int) -> tuple[int, Counter[str], dict[str, list[str]]]:
    """Write the rows of the documents of a piece; (their number, the problems of others, names of files)."""
    skipped: Counter[str] = Counter()
    files: dict[str, list[str]] = {}
    path, count, rows = sources.folder / f"{number}.documents", 0, bytearray()
    with writing(path, "replace") as file:
        for document in read_documents(sources.pieces[number], sources.text_key):
            if document.problem:
                skipped[document.problem] += 1
                names = files.setdefault(document.problem, [])
                if len(names) < NAMED and document.file.name not in names:
                    names.append(document.file.name)
                continue
            blocks, notes, reason = document.read(), UNIQUE * document.file.unique, ""
            if sources.filters:
                original = document.text
                text, reason = apply_filters(original, sources.filters, lambda document=document: document.origin)
                blocks, notes = blocks_of(text), notes + CHANGED_TEXT * (text != original) + DROPPED * bool(reason)
            if reason:
                skipped[reason] += 1
            rows += ROW.pack(*measure_text(blocks, sources.seed), notes)
            count += 1
            if len(rows) > BATCH_ROWS * ROW.size:
                file.write(rows)
                rows.clear()
        file.write(rows)
    return count, skipped, files


def measure_text(blocks: Iterable[str], seed: int) -> tuple[bytes, int, int, int]:
    """(SHA-256, draw, bytes, characters) of a text; the draw is SHA-256(seed, text) as a number in [0, 2^64)."""
    digest, draw, size, characters = hashlib.sha256(), hashlib.sha256(f"{seed}:".encode()), 0, 0
    for block in blocks:
        data = block.encode("utf-8")
        digest.update(data)
        draw.update(data)
        size, characters = size + len(data), characters + len(block)
    return digest.digest(), int.from_bytes(draw.digest()[:8], "big"), size, characters


def build_corpus(sources: Sources, masks: list[np.ndarray], val_fraction: float, skipped: Mapping[str, int]) -> Corpus:
    """The corpus of the documents that are kept; raises ValueError if they cannot be split in two."""
    documents, text_bytes, longest, corpus_digest, lowest, highest = 0, 0, 0, hashlib.sha256(), 2**64, -1
    for number, mask in enumerate(masks):
        if not mask.any():
            continue
        rows = sources.rows(number)[mask]
        corpus_digest.update(rows["sha256"].tobytes())
        documents, text_bytes = documents + len(rows), text_bytes + int(rows["bytes"].sum())
        longest = max(longest, int(rows["characters"].max()))
        lowest, highest = min(lowest, int(rows["draw"].min())), max(highest, int(rows["draw"].max()))
    named = list(dict.fromkeys(file.name for piece in sources.pieces for file in piece))
    first = named[0] if len(named) == 1 else f"{named[0]} and {len(named) - 1} more files"
    problems = {problem: n for problem, n in skipped.items() if n}
    if documents == 0:
        left_out = ", ".join(f"{n} {problem}" for problem, n in problems.items())
        raise ValueError(f"{first}: no text to prepare ({left_out}); give files with text")
    if lowest == highest and longest < 2:
        raise ValueError(f"{first}: one character cannot be split into training and validation; give more text")
    return Corpus(
        sources, masks, val_fraction, documents, text_bytes, corpus_digest.hexdigest(), problems, lowest, highest
    )


def drop_duplicates(sources: Sources, masks: list[np.ndarray], notes: int, skipped: Counter[str]) -> None:
    """Keep the first of identical documents, at 40 bytes of memory for each."""
    digests, places = [], []
    for number, mask in enumerate(masks):
        rows = sources.rows(number)
        indices = np.flatnonzero(mask & (rows["notes"] & notes == notes))
        if len(indices):
            digests.append(np.frombuffer(rows["sha256"][indices].tobytes(), "<u8").reshape(-1, 4)[:, :2])
            places.append((number, indices))
    if not digests:
        return
    copies = later_copies(np.concatenate(digests))
    begin = 0
    for number, indices in places:
        masks[number][indices[copies[begin : begin + len(indices)]]] = False
        begin += len(indices)
    skipped["duplicate"] += int(copies.sum())


def later_copies(digests: np.ndarray) -> np.ndarray:
    """Which rows are equal to an earlier one, bool [N], of uint64 [N, 2]."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # equal ones stay in their order
    equal = (digests[order[1:]] == digests[order[:-1]]).all(1)
    copies = np.zeros(len(digests), bool)
    copies[order[1:][equal]] = True
    return copies


def texts_of(corpus: Corpus, number: int) -> Iterator[tuple[Iterator[str], np.void, Document]]:
    """Yield (text in blocks, row, document) of every document of a piece that is kept; raises ValueError."""
    sources, mask = corpus.sources, corpus.masks[number]
    rows, index = sources.rows(number), -1
    changed = ValueError(f"{sources.pieces[number][0].name}: {CHANGED}")
    for document in read_documents(sources.pieces[number], sources.text_key):
        if document.problem:
            continue
        index += 1
        if index >= len(rows):
            raise changed
        blocks = document.read()
        if rows[index]["notes"] & CHANGED_TEXT:
            blocks = blocks_of(
                apply_filters(document.text, sources.filters, lambda document=document: document.origin)[0]
            )
        checked = verify_blocks(blocks, rows[index]["sha256"].tobytes(), changed)
        if mask[index]:
            yield checked, rows[index], document
        for _ in checked:  # what was not asked for
            pass
    if index + 1 != len(rows):
        raise changed


def verify_blocks(blocks: Iterable[str], sha256: bytes, changed: ValueError) -> Iterator[str]:
    """The blocks of a text; raises the error at their end unless they have this digest."""
    digest = hashlib.sha256()
    try:
        for block in blocks:
            digest.update(block.encode())
            yield block
    except UnicodeDecodeError:  # there was none in the first reading
        raise changed from None
    if digest.digest() != sha256:
        raise changed


def split_texts(corpus: Corpus, number: int) -> Iterator[tuple[str, Iterator[str], Document]]:
    """Yield (split, text in blocks, document it is of) of every part of a piece of the corpus."""
    for blocks, row, document in texts_of(corpus, number):
        if corpus.lowest == corpus.highest:
            characters, excess = int(row["characters"]), []
            cut = min(max(1, round(characters * (1 - corpus.val_fraction))), characters - 1)
            yield "train", head_blocks(cut, blocks, excess), document
            yield "val", itertools.chain(excess, blocks), document
        else:
            yield corpus.split_of(int(row["draw"])), blocks, document


def head_blocks(count: int, blocks: Iterator[str], excess: list[str]) -> Iterator[str]:
    """The first characters of a text in blocks; the rest of the last one goes to `excess`."""
    for block in blocks:
        yield block[:count]
        count -= len(block)
        if count <= 0:
            excess.append(block[len(block) + count :])
            return
