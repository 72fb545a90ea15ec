"""Documents that nearly repeat an earlier one, found by MinHash and bands of it. It needs datasketch.

A document is the set of its runs of five words. Of its signature, SIZE numbers, each is equal to that of another
document with the probability s, the share of runs that both have of all that either has. Two documents are near if all
r numbers of one of b bands are equal: with the probability 1 - (1 - s^r)^b, which is a half close to the similarity for
which b and r are chosen. Documents that are near, over others too, are a group, of which the first in reading order
stays.

Ref: Broder 1997, "On the resemblance and containment of documents", section 3; bands: Leskovec, Rajaraman and Ullman,
"Mining of massive datasets", section 3.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from fzero.core import packages
from fzero.core.crc32c import crc32c
from fzero.data.first_reading import Corpus, put_together, texts_of
from fzero.data.piece_file import read_piece, write_piece
from fzero.data.preparing import Preparing
from fzero.data.workers import results_of

SIZE = 128  # numbers of a signature
WORDS = 5
TOGETHER = 4096  # runs of words that are hashed together: 2 MB


def leave_out_near(corpus: Corpus, folder: Path, preparing: Preparing) -> Corpus:
    """The corpus without documents that nearly repeat an earlier one.

    The signatures of each piece are in the files of `folder`; those that are there and sound are left as they are. It
    takes 512 bytes of disk and some 60 bytes of memory for each document. Raises ValueError without datasketch.
    """
    datasketch = library()
    sizes = corpus.sources.sizes()
    missing = [n for n in range(len(sizes)) if signatures_of(folder, n) is None]
    done = sum(sizes) - sum(sizes[n] for n in missing)
    with closing(results_of(lambda n: sign(corpus, n, folder), missing, preparing.processes())) as results:
        for number, _ in results:
            done += sizes[number]
            preparing.tell("comparing", done, sum(sizes))
    bands = datasketch.MinHashLSH(threshold=preparing.similarity, num_perm=SIZE)
    keys = (keys_of(folder, len(sizes), band * bands.r, bands.r) for band in range(bands.b))
    first = firsts(keys, sum(int(keep.sum()) for keep in corpus.kept))
    kept, begin = [], 0
    for keep in corpus.kept:
        at = np.flatnonzero(keep)
        kept.append(keep.copy())
        kept[-1][at[~first[begin : begin + len(at)]]] = False
        begin += len(at)
    skipped = corpus.skipped | {"near duplicate": int((~first).sum())}
    return put_together(corpus.sources, kept, corpus.val_fraction, skipped)


def library() -> Any:
    """The module datasketch; raises ValueError where it is missing."""
    return packages.load("datasketch", 'duplicates="near"')


def sign(corpus: Corpus, number: int, folder: Path) -> None:
    """Write the signatures of the documents of a piece that are kept, uint32 [documents, SIZE]."""
    empty = library().MinHash(num_perm=SIZE, seed=1, scheme="affine32", hashfunc=int)
    with write_piece(folder / f"{number}.signatures", number) as write:
        for blocks, _, _ in texts_of(corpus, number):
            made = empty.copy()
            for runs in runs_of(blocks):
                for begin in range(0, len(runs), TOGETHER):
                    made.update_batch(runs[begin : begin + TOGETHER].tolist())
            write(made.hashvalues.astype("<u4").tobytes())


def runs_of(blocks: Iterable[str]) -> Iterator[np.ndarray]:
    """A number for each run of WORDS words of a text in blocks, uint32 arrays, in each of which it is once; of a text
    with fewer words one for all of it.

    >>> sum(map(len, runs_of(["one two thr", "ee four five six"]))), sum(map(len, runs_of(["one two"])))
    (2, 1)
    """
    whole, count, last = 0, 0, np.zeros(0, np.uint32)
    for hashes in words_of(blocks):
        whole, count = hashes[0], count + len(hashes[1])
        words = np.concatenate([last, hashes[1]])
        last = words[-(WORDS - 1) :]
        if len(words) >= WORDS:
            runs = np.zeros(len(words) - WORDS + 1, np.uint32)
            for i in range(WORDS):
                runs = runs * np.uint32(0x9E3779B1) + words[i : len(runs) + i]  # modulo 2^32
            yield np.unique(runs)
    if count < WORDS:
        yield np.array([whole], np.uint32)


def words_of(blocks: Iterable[str]) -> Iterator[tuple[int, np.ndarray]]:
    """(the checksum of the text so far, those of the words that end in a block, uint32), of each block and the end."""
    whole, word, begun = 0, 0, False
    for block in blocks:
        whole, words = crc32c(block.encode(), whole), block.split()
        found = []
        if begun and (block[0].isspace() or not words):
            found, word, begun = [word], 0, False
        for i, text in enumerate(words):
            word, begun = crc32c(text.encode(), word), True
            if i + 1 < len(words) or block[-1].isspace():
                found.append(word)
                word, begun = 0, False
        yield whole, np.array(found, np.uint32)
    yield whole, np.array([word] * begun, np.uint32)


def signatures_of(folder: Path, number: int) -> np.ndarray | None:
    """The signatures of a piece; None if they are not there, or damaged."""
    raw = read_piece(folder / f"{number}.signatures", number)
    return None if raw is None else raw.view("<u4").reshape(-1, SIZE)


def keys_of(folder: Path, pieces: int, begin: int, count: int) -> np.ndarray:
    """A number for some columns of all signatures, uint64 [documents]."""
    found = []
    for number in range(pieces):
        signatures = signatures_of(folder, number)
        if signatures is None:
            raise OSError(
                f"{folder}/{number}.signatures: damaged since it was written; the same command makes it again"
            )
        keys = np.zeros(len(signatures), np.uint64)
        for column in range(begin, begin + count):
            keys = (keys ^ signatures[:, column]) * np.uint64(0x9E3779B97F4A7C15)  # modulo 2^64
            keys ^= keys >> np.uint64(29)
        found.append(keys)
    return np.concatenate(found)


def firsts(keys: Iterator[np.ndarray], count: int) -> np.ndarray:
    """Which documents are the first of their group, bool [count]. keys: one array for each band."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    group = np.arange(count)  # the first document of the group, as far as it is known
    for band in keys:
        order = np.argsort(band, kind="stable")
        same = band[order[1:]] == band[order[:-1]]
        one, other = group[order[:-1][same]], group[order[1:][same]]
        edges = coo_array((np.ones(len(one), np.uint8), (one, other)), shape=(count, count))
        _, label = connected_components(edges, directed=False)
        lowest = np.full(label.max() + 1, count)
        np.minimum.at(lowest, label, np.arange(count))
        group = lowest[label[group]]
    return group == np.arange(count)
