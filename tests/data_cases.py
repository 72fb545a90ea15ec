"""Texts, corpora and token files that tests of data read."""

import json
import struct
from pathlib import Path

import numpy as np

from fzero import data
from fzero.data import token_dtype

TEXTS = [f"def f_{i}(x):\n    return x * {i}  # né 漢字 🙂\n" * (1 + i % 5) for i in range(40)]


def write_jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def hand_made(lengths, vocab_size=1000):
    """Documents of the given lengths (eos included): tokens 1, 2, 3, ... over the whole corpus, 0 at each end."""
    docs = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.arange(1, docs[-1] + 1).astype(token_dtype(vocab_size))
    tokens[docs[1:] - 1] = 0
    return data.Tokens("hand-made", tokens, docs, vocab_size, 0)


def write_megatron(prefix, documents, **change):
    """A .bin and an .idx of Megatron: documents are lists of sequences of tokens. change: of the parts of the .idx."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    begins = (np.append(0, np.cumsum(lengths)[:-1]) * 2).astype("<i8")
    firsts = np.append(0, np.cumsum([len(document) for document in documents])).astype("<i8")
    parts = {"magic": b"MMIDIDX\0\0", "version": 1, "code": 8, "begins": begins, "firsts": firsts} | change
    head = struct.pack("<9sQBQQ", parts["magic"], parts["version"], parts["code"], len(lengths), len(parts["firsts"]))
    Path(f"{prefix}.bin").write_bytes(np.concatenate(sequences).astype("<u2").tobytes())
    Path(f"{prefix}.idx").write_bytes(head + lengths.tobytes() + parts["begins"].tobytes() + parts["firsts"].tobytes())
