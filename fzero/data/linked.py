"""A corpus whose tokens stay in the files of another system, read in place: a folder that describes them.

    meta.json              as of a prepared corpus (fzero/data/tokens.py), and `linked`: the file, where its tokens
                           begin, their dtype, the size of the file, a checksum of samples of it, and the first token of
                           each split
    train.docs val.docs    where each document of a split begins
    tokenizer.json         when the tokenizer is not bytes

Both splits are ranges of the file: the last documents are for validation. There are no checksums of all chunks, which
would read the whole file; its size and 64 chunks are compared when it is opened.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fzero.core.arguments import checked
from fzero.core.files import make_folder, writing
from fzero.core.foreign import json_text
from fzero.core.storage import naming, write_text
from fzero.data.foreign_tokens import find_tokens
from fzero.data.prepare import check_new, tokenizer_of_file
from fzero.data.tokens import FORMAT, VERSION, sampled_sum


@checked()
def link(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str | Path,
    val_fraction: float = 0.02,
    eos: str | None = None,
) -> dict[str, Any]:
    """Describe the token file `source` in the new folder `out`, a corpus that reads it in place; return its meta.json.

    source: a .npy file of one dimension, or Megatron's .bin beside its .idx. tokenizer: "bytes", or the path of the
    Hugging Face tokenizer.json that made the tokens, or of its folder. eos: its end-of-document token (default: the
    usual one it has), which ends the documents of a .npy file. val_fraction: of the documents, the last ones, at least
    one.

    Raises ValueError if `out` exists, the file is damaged or truncated, has one document, or a token that the tokenizer
    has not; nothing is written then.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> np.save(folder / "tokens.npy", np.frombuffer(b"one\\0two\\0three\\0", np.uint8))
    >>> link(folder / "tokens.npy", folder / "corpus", tokenizer="bytes")["splits"]["train"]
    {'tokens': 8, 'documents': 2}
    """
    out = check_new(out, val_fraction)
    made = tokenizer_of_file(str(tokenizer), eos)
    found = find_tokens(Path(source), made.eos)
    documents = len(found.docs) - 1
    if documents < 2:
        raise ValueError(f"{found.path}: has {documents} document; training and validation need one each")
    expect_tokens(found.map(), found.path, made.vocab_size, made.name)
    first = documents - min(documents - 1, max(1, round(documents * val_fraction)))
    cut = int(found.docs[first])
    docs = {"train": found.docs[: first + 1], "val": found.docs[first:] - cut}
    meta = {
        "format": FORMAT,
        "version": VERSION,
        **made.meta(),
        "splits": {split: {"tokens": int(its[-1]), "documents": len(its) - 1} for split, its in docs.items()},
        "linked": {
            "path": str(found.path.absolute()),
            "offset": found.offset,
            "dtype": found.dtype.str,
            "bytes": found.path.stat().st_size,
            "sampled": sampled_sum(found.path),
            "first": {"train": 0, "val": cut},
        },
        "val_fraction": val_fraction,
    }
    with naming(out):
        make_folder(out.parent)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
            folder = make_folder(temporary, "corpus")
            for split, its in docs.items():
                with writing(folder / f"{split}.docs", "new") as file:
                    file.write(its.astype("<i8").tobytes())
            if made.json:
                write_text(folder, "tokenizer.json", made.json)
            write_text(folder, "meta.json", json_text(meta, f"{out}/meta.json", 2) + "\n")
            os.rename(folder, out)
    return meta


def expect_tokens(tokens: np.ndarray, path: Path, vocab_size: int, name: str) -> None:
    """Raise ValueError if one of some thousand tokens, evenly spaced, is none of the tokenizer's."""
    some = tokens[:: max(1, len(tokens) // 100_000)]
    low, high = int(some.min()), int(some.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{path}: has the token {low if low < 0 else high}, and the tokenizer {name} the tokens 0 to "
            f"{vocab_size - 1}; give the one that made them"
        )
