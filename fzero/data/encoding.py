"""The second reading: the documents encoded piece by piece into files of a work folder, which are joined in order.

The file of a piece: its tokens; int64 [n] how many each part has; uint8 [n] the split of each; COUNTS; and TAIL, the
number of the piece and the crc32c of content and number, so that it is whole when it has its name.

A long text is cut where spaces, words and signs meet, and only where what stands around has the same pieces with and
without the cut, seen from two beginnings. A stretch is encoded behind some of the text before it, whose pieces are
dropped again.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fzero.core.digest import crc32c
from fzero.core.files import writing
from fzero.data.checksums import SummedFile, write_sums
from fzero.data.document_scan import Corpus, Preparing, results_of, split_texts
from fzero.data.sources import Document
from fzero.data.tokenizers import Tokenizer
from fzero.data.tokens import SPLITS, token_dtype

TAIL = struct.Struct("<QI")
READ = 1 << 22  # bytes that are compared together


@contextlib.contextmanager
def write_piece(path: Path, number: int) -> Iterator[Callable[[bytes], None]]:
    """A context of a function that appends bytes to the file of a piece."""
    partial, crc = path.with_suffix(".partial"), 0
    with writing(partial, "replace") as file:

        def write(data: bytes) -> None:
            nonlocal crc
            file.write(data)
            crc = crc32c(data, crc)

        yield write
        file.write(TAIL.pack(number, crc32c(struct.pack("<Q", number), crc)))
    os.replace(partial, path)


def sound_bytes(path: Path, number: int) -> int | None:
    """The bytes of the content of the file of a piece; None if it is missing, damaged, or of another piece.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "3")
    >>> with write_piece(path, 3) as write:
    ...     write(b"some")
    ...     write(b"thing")
    >>> sound_bytes(path, 3), sound_bytes(path, 4)
    (9, None)
    """
    if not path.is_file() or path.stat().st_size < TAIL.size:
        return None
    size, crc = path.stat().st_size - TAIL.size, 0
    with path.open("rb") as file:
        for begin in range(0, size, READ):
            crc = crc32c(file.read(min(READ, size - begin)), crc)
        actual_number, expected_crc = TAIL.unpack(file.read(TAIL.size))
    return size if actual_number == number and crc32c(struct.pack("<Q", number), crc) == expected_crc else None


SPAN = 1 << 18  # characters, of which the tokenizers library takes some 200 bytes of memory each
LONGEST = 1 << 20  # characters of a stretch in which no place to cut is seen
AROUND = 1024  # characters to each side of a place that are looked at
CONTEXT = 64  # characters that are encoded with a stretch, from before it
CUT_TAIL, TRIES = 1 << 14, 40  # characters at the end of a stretch in which places are tried, and how many of each kind
CUT_PATTERNS = (re.compile(r"(?<=\S)(?=\s)"), re.compile(r"(?<=\w)(?=\W)|(?<=\W)(?=\w)|(?<=\d)(?=\D)|(?<=\D)(?=\d)"))

Pieces = Callable[[str], Sequence[Any]]


class TextSpan(NamedTuple):
    """A part of a text, and what is encoded before it."""

    context: str
    text: str
    last: bool  # of its text


def text_spans(
    blocks: Iterable[str], pieces: Pieces | None, origin: Callable[[], str], context_size: int = CONTEXT, size: int = 0
) -> Iterator[TextSpan]:
    """The stretches of the text of these blocks, whose `pieces` are those of the whole text.

    >>> [stretch.text for stretch in text_spans(["one ", "two"], str.split, lambda: "a.txt")]
    ['one two']
    """
    size = size or SPAN
    remaining, context, target = "", "", size
    for block in blocks:
        remaining += block
        while len(remaining) > target + AROUND:
            begin = len(context)
            position = (
                target if pieces is None else find_cut(context + remaining, begin, begin + target, pieces, context_size)
            )
            if position:
                yield TextSpan(context, remaining[:position], last=False)
                context = (context + remaining[:position])[-context_size:] if context_size else ""
                remaining, target = remaining[position:], size
            elif target < LONGEST:
                target = min(2 * target, LONGEST)
            else:
                raise ValueError(
                    f"{origin()}: {target:,} characters, from {remaining[:20]!r} on, without a place where the "
                    "tokenizer surely splits, so that they would have to be in its memory together; break them by "
                    "spaces or lines, or leave them out"
                )
    yield TextSpan(context, remaining, last=True)


def find_cut(text: str, begin: int, end: int, pieces: Pieces, context_size: int) -> int:
    """The last index up to `end` where `pieces` cuts the text, from `begin`; 0 for none."""
    low = max(begin + 1, end - CUT_TAIL)
    for kind in CUT_PATTERNS:
        positions = [match.start() for match in kind.finditer(text, low, end)]
        for position in positions[: -TRIES - 1 : -1]:
            if all(
                is_cut(text[max(0, position - n) : position], text[position : position + n], pieces, context_size)
                for n in (AROUND, AROUND - 1)
            ):
                return position - begin
    return 0


def is_cut(head: str, tail: str, pieces: Pieces, context_size: int) -> bool:
    """Whether the pieces of left + right are those of both."""
    context = head[-context_size:] if context_size else ""
    try:
        full, first, context_pieces, tail_pieces = (
            list(pieces(text)) for text in (head + tail, head, context, context + tail)
        )
    except ValueError:  # an end of a document in it, of which encoding tells with its place
        return False
    return tail_pieces[: len(context_pieces)] == context_pieces and full == first + tail_pieces[len(context_pieces) :]


COUNTS = struct.Struct("<QQ")
BATCH_CHARACTERS = 1 << 18  # characters that are encoded by one call
COPIED = 1 << 22  # tokens that are copied together


class PartSpan(NamedTuple):
    """A stretch of a part, and what that is of."""

    split: str
    span: TextSpan
    document: Document


class EncodedPiece(NamedTuple):
    """A piece that was encoded; its tokens, each part with its end-of-document token, begin its file."""

    path: Path
    count: int  # of tokens
    lengths: np.ndarray  # int64 [parts]
    splits: np.ndarray  # uint8 [parts]: which of SPLITS


def encode(corpus: Corpus, tokenizer: Tokenizer, folder: Path, preparing: Preparing) -> None:
    """Write the files of all pieces in `folder`; those that are there and sound stay."""
    sizes, dtype = corpus.sources.sizes(), token_dtype(tokenizer.vocab_size)
    missing = [n for n in range(len(sizes)) if read_encoded(folder, n, dtype) is None]
    done = sum(sizes) - sum(sizes[n] for n in missing)
    preparing.report_progress("encoding", done, sum(sizes))
    work = lambda n: encode_piece(corpus, tokenizer, n, folder)  # noqa: E731
    with closing(results_of(work, missing, preparing.processes())) as results:
        for number, _ in results:
            done += sizes[number]
            preparing.report_progress("encoding", done, sum(sizes))


def encode_piece(corpus: Corpus, tokenizer: Tokenizer, number: int, folder: Path) -> None:
    """Write the file of a piece."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.eos], dtype).tobytes()
    lengths, splits, total, length = [], bytearray(), 0, 0
    with write_piece(folder / f"{number}.tokens", number) as write:
        for parts in batch_spans(spans_of_piece(corpus, tokenizer, number)):
            tokens = []
            for part_span, ids in zip(parts, ids_of(parts, tokenizer)):
                tokens.append(ids.astype(dtype, copy=False).tobytes())
                length += len(ids)
                if part_span.span.last:
                    tokens.append(end)
                    lengths.append(length + 1)
                    splits.append(SPLITS.index(part_span.split))
                    total, length = total + length + 1, 0
            write(b"".join(tokens))
        write(np.array(lengths, "<i8").tobytes() + splits + COUNTS.pack(total, len(splits)))


def spans_of_piece(corpus: Corpus, tokenizer: Tokenizer, number: int) -> Iterator[PartSpan]:
    """All parts of a piece, long ones in stretches."""
    pieces = None if tokenizer.json == "" else lambda text: tokenizer.encode(text).tolist()
    for split, blocks, document in split_texts(corpus, number):
        for stretch in text_spans(blocks, pieces, lambda document=document: document.origin):
            yield PartSpan(split, stretch, document)


def batch_spans(parts: Iterator[PartSpan]) -> Iterator[list[PartSpan]]:
    """The parts, as many together as have TOGETHER characters."""
    batch, budget = [], BATCH_CHARACTERS
    for part_span in parts:
        batch.append(part_span)
        budget -= len(part_span.span.text)
        if budget <= 0:
            yield batch
            batch, budget = [], BATCH_CHARACTERS
    if batch:
        yield batch


def ids_of(parts: Sequence[PartSpan], tokenizer: Tokenizer) -> list[np.ndarray]:
    """The ids of each stretch; raises ValueError naming the document of one that cannot be encoded."""
    try:
        encoded = tokenizer.encode_all([part_span.span.context + part_span.span.text for part_span in parts])
        contexts = [part_span.span.context and tokenizer.encode(part_span.span.context) for part_span in parts]
        return [ids[len(context_ids) :] for ids, context_ids in zip(encoded, contexts)]
    except ValueError:
        for part_span in parts:
            try:
                tokenizer.encode(part_span.span.text)
            except ValueError as error:
                raise ValueError(f"{part_span.document.origin}: {error}") from None
        raise


def read_encoded(folder: Path, number: int, dtype: np.dtype) -> EncodedPiece | None:
    """The piece of this number; None if it is not there, or damaged."""
    path = folder / f"{number}.tokens"
    size = sound_bytes(path, number)
    if size is None:
        return None
    with path.open("rb") as file:
        file.seek(size - COUNTS.size)
        tokens, parts = COUNTS.unpack(file.read(COUNTS.size))
        file.seek(tokens * dtype.itemsize)
        return EncodedPiece(
            path, tokens, np.frombuffer(file.read(8 * parts), "<i8"), np.frombuffer(file.read(parts), "u1")
        )


def join(pieces: Path, number: int, folder: Path, tokenizer: Tokenizer) -> tuple[dict, dict[str, str]]:
    """Write the .bin, .docs and .sums files of all splits from the first `number` pieces; return their numbers of
    tokens and documents, and the SHA-256 of the sums."""
    dtype = token_dtype(tokenizer.vocab_size)
    counts = {split: {"tokens": 0, "documents": 0} for split in SPLITS}
    with ExitStack() as stack:
        bins, docs = (
            {s: stack.enter_context(closing(SummedFile(folder / f"{s}.{x}"))) for s in SPLITS} for x in ("bin", "docs")
        )
        for n in range(number):
            piece = read_encoded(pieces, n, dtype)
            if piece is None:
                raise OSError(f"{pieces}/{n}.tokens: damaged since it was written; the same command encodes it again")
            begins = np.cumsum(piece.lengths) - piece.lengths
            for code, split in enumerate(SPLITS):
                in_split = piece.splits == code
                lengths, count = piece.lengths[in_split], counts[split]
                docs[split].write((count["tokens"] + np.cumsum(lengths) - lengths).astype("<u8").tobytes())
                count["tokens"] += int(lengths.sum())
                count["documents"] += len(lengths)
            # Runs of parts of one split are copied at once.
            firsts = np.flatnonzero(np.diff(piece.splits, prepend=255 if len(piece.splits) else []))
            ends = np.append(begins[firsts][1:], piece.count)
            with piece.path.open("rb") as file:
                for first, begin, end in zip(firsts.tolist(), begins[firsts].tolist(), ends.tolist()):
                    split = SPLITS[piece.splits[first]]
                    for offset in range(begin, end, COPIED):
                        bins[split].write(file.read(min(COPIED, end - offset) * dtype.itemsize))
        for split in SPLITS:
            docs[split].write(struct.pack("<Q", counts[split]["tokens"]))
    return counts, {split: write_sums(folder / f"{split}.sums", [bins[split], docs[split]]) for split in SPLITS}
