"""The second reading: the documents encoded piece by piece into files of a work folder, which are joined in order.

What is in the file of a piece (piece_file.py): its tokens; int64 [n] how many each part has; uint8 [n] the number of
the split of each; and at the end COUNTS, the numbers of tokens and of parts. A part is a document, or half of the only
one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fzero.data.checksums import SummedFile, write_sums
from fzero.data.first_reading import Corpus, parts_of
from fzero.data.piece_file import sound_bytes, write_piece
from fzero.data.preparing import Preparing
from fzero.data.sources import Document
from fzero.data.stretches import Stretch, stretches_of
from fzero.data.tokenizers import Tokenizer
from fzero.data.tokens import SPLITS, token_dtype
from fzero.data.workers import results_of

COUNTS = struct.Struct("<QQ")
TOGETHER = 1 << 18  # characters that are encoded by one call
COPIED = 1 << 22  # tokens that are copied together


class Part(NamedTuple):
    """A stretch of a part, and what that is of."""

    split: str
    stretch: Stretch
    document: Document


class Piece(NamedTuple):
    """A piece that was encoded; its tokens, each part with its end-of-document token, begin its file."""

    path: Path
    count: int  # of tokens
    lengths: np.ndarray  # int64 [parts]
    splits: np.ndarray  # uint8 [parts]: which of SPLITS


def encode(corpus: Corpus, tokenizer: Tokenizer, folder: Path, preparing: Preparing) -> None:
    """Write the files of all pieces in `folder`; those that are there and sound are left as they are.

    Raises ValueError if the sources have changed since the first reading, and for a text that holds the tokenizer's
    end-of-document token.
    """
    sizes, dtype = corpus.sources.sizes(), token_dtype(tokenizer.vocab_size)
    missing = [n for n in range(len(sizes)) if read_encoded(folder, n, dtype) is None]
    done = sum(sizes) - sum(sizes[n] for n in missing)
    preparing.tell("encoding", done, sum(sizes))
    work = lambda n: encode_piece(corpus, tokenizer, n, folder)  # noqa: E731
    with closing(results_of(work, missing, preparing.processes())) as results:
        for number, _ in results:
            done += sizes[number]
            preparing.tell("encoding", done, sum(sizes))


def encode_piece(corpus: Corpus, tokenizer: Tokenizer, number: int, folder: Path) -> None:
    """Write the file of a piece."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.eos], dtype).tobytes()
    lengths, splits, total, length = [], bytearray(), 0, 0
    with write_piece(folder / f"{number}.tokens", number) as write:
        for parts in together(stretches_of_parts(corpus, tokenizer, number)):
            tokens = []
            for part, ids in zip(parts, ids_of(parts, tokenizer)):
                tokens.append(ids.astype(dtype, copy=False).tobytes())
                length += len(ids)
                if part.stretch.last:
                    tokens.append(end)
                    lengths.append(length + 1)
                    splits.append(SPLITS.index(part.split))
                    total, length = total + length + 1, 0
            write(b"".join(tokens))
        write(np.array(lengths, "<i8").tobytes() + splits + COUNTS.pack(total, len(splits)))


def stretches_of_parts(corpus: Corpus, tokenizer: Tokenizer, number: int) -> Iterator[Part]:
    """All parts of a piece, long ones in stretches."""
    pieces = None if tokenizer.json == "" else lambda text: tokenizer.encode(text).tolist()
    for split, blocks, document in parts_of(corpus, number):
        for stretch in stretches_of(blocks, pieces, lambda document=document: document.origin):
            yield Part(split, stretch, document)


def together(parts: Iterator[Part]) -> Iterator[list[Part]]:
    """The parts, as many together as have TOGETHER characters."""
    some, room = [], TOGETHER
    for part in parts:
        some.append(part)
        room -= len(part.stretch.text)
        if room <= 0:
            yield some
            some, room = [], TOGETHER
    if some:
        yield some


def ids_of(parts: Sequence[Part], tokenizer: Tokenizer) -> list[np.ndarray]:
    """The ids of each stretch; raises ValueError naming the document of one that cannot be encoded."""
    try:
        found = tokenizer.encode_all([part.stretch.before + part.stretch.text for part in parts])
        before = [part.stretch.before and tokenizer.encode(part.stretch.before) for part in parts]
        return [ids[len(known) :] for ids, known in zip(found, before)]
    except ValueError:
        for part in parts:
            try:
                tokenizer.encode(part.stretch.text)
            except ValueError as error:
                raise ValueError(f"{part.document.origin}: {error}") from None
        raise


def read_encoded(folder: Path, number: int, dtype: np.dtype) -> Piece | None:
    """The piece of this number; None if it is not there, or damaged."""
    path = folder / f"{number}.tokens"
    size = sound_bytes(path, number)
    if size is None:
        return None
    with path.open("rb") as file:
        file.seek(size - COUNTS.size)
        tokens, parts = COUNTS.unpack(file.read(COUNTS.size))
        file.seek(tokens * dtype.itemsize)
        return Piece(path, tokens, np.frombuffer(file.read(8 * parts), "<i8"), np.frombuffer(file.read(parts), "u1"))


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
                own = piece.splits == code
                lengths, count = piece.lengths[own], counts[split]
                docs[split].write((count["tokens"] + np.cumsum(lengths) - lengths).astype("<u8").tobytes())
                count["tokens"] += int(lengths.sum())
                count["documents"] += len(lengths)
            # Runs of parts of one split are copied at once.
            firsts = np.flatnonzero(np.diff(piece.splits, prepend=255 if len(piece.splits) else []))
            ends = np.append(begins[firsts][1:], piece.count)
            with piece.path.open("rb") as file:
                for first, begin, end in zip(firsts.tolist(), begins[firsts].tolist(), ends.tolist()):
                    split = SPLITS[piece.splits[first]]
                    for at in range(begin, end, COPIED):
                        bins[split].write(file.read(min(COPIED, end - at) * dtype.itemsize))
        for split in SPLITS:
            docs[split].write(struct.pack("<Q", counts[split]["tokens"]))
    return counts, {split: write_sums(folder / f"{split}.sums", [bins[split], docs[split]]) for split in SPLITS}
