"""Rows of whole documents as batches: each a pure function of (seed, number), like the windows of token_stream.py.

Conversations share a row as far as they fit into it; a token attends to its own document only. The two answers of a
pair stand in one row, one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fzero.data.assemble import Batch
from fzero.data.packing import pack
from fzero.data.token_stream import even_batches, shuffled
from fzero.data.tokens import Tokens

PAIRED = ("pairs", "ranked")  # the kinds of corpora in which two documents belong together


@dataclass(frozen=True, eq=False)
class RowStream:
    """Shuffled rows of a corpus of examples; `samples_at` depends on these values and its arguments only.

    A batch is one of TokenStream's: tokens, targets, documents and mask [B, T]. The mask has the targets that the model
    is to say. The rest of a row is filled with the end-of-document token, which counts nowhere. With a `reference`
    the batch has an entry of that name, float64 [B, T]: the number of a document at its first token, and else 0.

    Raises ValueError for a document that is longer than a row.
    """

    tokens: Tokens
    seq_len: int  # T
    batch: int  # B
    seed: int = 0
    reference: np.ndarray | None = None  # float64 [documents]

    def __post_init__(self) -> None:
        assert self.tokens.loss_mask is not None  # a corpus of examples
        _ = self.rows

    @functools.cached_property
    def rows(self) -> list[list[int]]:
        """The documents of each row."""
        lengths, group_size = np.diff(self.tokens.docs) - 1, 2 if self.tokens.kind in PAIRED else 1
        rows = pack(lengths.reshape(-1, group_size).sum(1), self.seq_len)
        return [[i * group_size + j for i in row for j in range(group_size)] for row in rows]

    def batch_at(self, step: int) -> Batch:
        """The batch of `step`: samples step * batch up to (step + 1) * batch."""
        return self.samples_at(step * self.batch, self.batch)

    def samples_at(self, first: int, count: int) -> Batch:
        """The samples `first` .. first + count - 1 of the run as one batch."""
        return self.assemble_rows(shuffled(self.seed, len(self.rows), first, count))

    def sample_documents(self, first: int, count: int) -> list[list[int]]:
        """The numbers of the documents in each of these samples."""
        return [self.rows[row] for row in shuffled(self.seed, len(self.rows), first, count).tolist()]

    def assemble_rows(self, rows: np.ndarray) -> Batch:
        """The rows of these numbers as one batch."""
        shape = (len(rows), self.seq_len)
        tokens, targets = np.full(shape, self.tokens.eos), np.full(shape, self.tokens.eos)
        documents, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
        reference_entry = {} if self.reference is None else {"reference": np.zeros(shape)}
        for r, row in enumerate(rows.tolist()):
            offset = 0
            for number, i in enumerate(self.rows[row]):
                ids, loss_mask = self._document(i)
                end = offset + len(ids) - 1
                tokens[r, offset:end], targets[r, offset:end], mask[r, offset:end] = ids[:-1], ids[1:], loss_mask[1:]
                documents[r, offset:end] = number
                if self.reference is not None:
                    reference_entry["reference"][r, offset] = self.reference[i]
                offset = end
            documents[r, offset:] = len(self.rows[row])
        out = {"tokens": tokens, "targets": targets, "documents": documents, "mask": mask, **reference_entry}
        return {name: torch.from_numpy(leaf) for name, leaf in out.items()}

    def _document(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        start, end = self.tokens.docs[i : i + 2].tolist()
        if self.tokens.sums is not None:
            size = self.tokens.tokens.itemsize
            self.tokens.sums.expect(np.array([start * size]), (end - start) * size)
        assert self.tokens.loss_mask is not None
        return self.tokens.tokens[start:end], self.tokens.loss_mask[start:end]

    def eval_batches(self, max_rows: int | None = None, share: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """The batches of min(most, all) rows, unshuffled, as `fzero.data.eval_batches` gives windows."""

        def assemble(rows: np.ndarray, real: np.ndarray) -> Batch:
            out = self.assemble_rows(rows)
            return out | {"mask": out["mask"] & torch.from_numpy(real)[:, None]}

        return even_batches(len(self.rows), self.batch, max_rows, share, assemble)
