"""Convert text to token files, reading the sources twice: first to check, then to write.

The first reading finds every error, the number of documents and the digest of the content before anything is written;
the second encodes and writes into a temporary folder beside `out`, which is renamed once it is complete.
"""

import hashlib
import json
import os
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fzero.core.arguments import checked
from fzero.core.foreign import expect_regular, read_text_file
from fzero.core.storage import write_text
from fzero.data.checksums import SummedFile, write_sums
from fzero.data.sources import ALLOWED, SourceFile, find_files, read_documents
from fzero.data.tokenizers import Tokenizer, byte_tokenizer, json_tokenizer, train_bpe
from fzero.data.tokens import FORMAT, SPLITS, VERSION, token_dtype


class Corpus(NamedTuple):
    """The documents to prepare, as found by the first reading. The draw of a document depends only on seed and
    content."""

    files: Sequence[SourceFile]
    text_key: str
    seed: int
    val_fraction: float
    documents: int
    text_bytes: int
    sha256: str  # of the SHA-256 of every document, in reading order
    skipped: dict[str, int]  # problem -> documents left out
    lowest: int  # the lowest draw: always validation, so that validation is not empty
    highest: int  # the highest draw: always training; equal to the lowest if all documents are identical


@checked()
def prepare(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path = "bytes",
    val_fraction: float = 0.02,
    seed: int = 0,
    text_key: str = "text",
    eos: str | None = None,
) -> dict[str, Any]:
    """Prepare a corpus in the new folder `out` (format: fzero/data/tokens.py); return the content of its meta.json.

    sources: .txt and .py files (one document each) and .jsonl files (one document a line, its text at `text_key`),
        each plain, .gz or .zst; .parquet and .arrow files (one document a row); folders of those, such as of Hugging
        Face's datasets; "-" (standard input, plain or .gz, one text) and "-.jsonl" (the same, one
        document a line); "stdlib" (the .py files of Python's standard library without site-packages, identical ones
        once).
    tokenizer: "bytes"; "bpe:N", N tokens trained on the training split; or the path of a Hugging Face tokenizer.json
        or of its folder.
    eos: the end-of-document token of such a file (default: the usual one it has), or the name to give it in bpe:N.

    A document is for validation when its draw, SHA-256(seed, content) as a number in [0, 1), is below val_fraction:
    reading order and other documents do not matter, and copies of a document are on one side. The document with the
    lowest draw is always for validation and the one with the highest for training. When all documents are the same
    one, its first 1 - val_fraction of characters are for training and the rest for validation. Holds one document in
    memory at a time (a .txt file is one document).

    Files found in folders that are empty, binary (contain NUL) or not UTF-8 are left out and counted in
    meta["source"]["skipped"]. Raises ValueError when `out` exists, for any problem of a file named by the user, a
    damaged .gz, .zst, .parquet or .arrow or a bad .jsonl line anywhere, an unknown tokenizer or source; then there is
    no `out` and no temporary file is left.
    """
    sources = [sources] if isinstance(sources, str | Path) else list(sources)
    if not sources:
        raise ValueError(f"no source given; {ALLOWED}")
    out = check_new(out, val_fraction)
    _check_tokenizer(str(tokenizer), eos)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{out}: its parent folder cannot be made ({error})") from None
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        files = find_files(sources, Path(temporary))
        corpus = _look(files, text_key, seed, val_fraction)
        made = _make_tokenizer(str(tokenizer), eos, corpus)
        folder = Path(temporary) / "corpus"
        folder.mkdir()
        splits, sums = _write(folder, corpus, made)
        meta = {
            "format": FORMAT,
            "version": VERSION,
            **made.meta(),
            "splits": splits,
            "sums": sums,
            "source": {
                "names": [str(source) for source in sources],
                "files": len(files),
                "documents": corpus.documents,
                "text_bytes": corpus.text_bytes,
                "sha256": corpus.sha256,
                "skipped": corpus.skipped,
            },
            "val_fraction": val_fraction,
            "seed": seed,
        }
        if made.json:
            write_text(folder, "tokenizer.json", made.json)
        write_text(folder, "meta.json", json.dumps(meta, indent=2) + "\n")
        os.rename(folder, out)
    return meta


def check_new(out: str | Path, val_fraction: float) -> Path:
    """The folder of a new corpus; raises ValueError if it exists, and for a fraction that leaves a split empty."""
    if not 0.0 < val_fraction < 1.0:
        raise ValueError(
            f"val_fraction={val_fraction}: wanted a number between 0 and 1, without them; the usual is 0.02"
        )
    if os.path.lexists(out):
        raise ValueError(f"{out}: already exists; name another folder or remove this one first")
    return Path(out)


def describe(meta: dict[str, Any]) -> str:
    """The lines that tell a user what `prepare` made and left out."""
    source, splits = meta["source"], meta["splits"]
    lines = [
        f"{source['documents']:,} documents, {source['text_bytes'] / 1e6:.1f} MB from {', '.join(source['names'])}",
        f"tokenizer {meta['tokenizer']}: {meta['vocab_size']:,} tokens, stored as {meta['dtype']}",
        *(f"{name}: {splits[name]['tokens']:,} tokens in {splits[name]['documents']:,} documents" for name in SPLITS),
    ]
    if source["skipped"]:
        lines.append("left out: " + ", ".join(f"{n} {problem}" for problem, n in source["skipped"].items()))
    return "\n".join(lines)


def _look(files: Sequence[SourceFile], text_key: str, seed: int, val_fraction: float) -> Corpus:
    documents, text_bytes, longest, whole = 0, 0, 0, hashlib.sha256()
    skipped: Counter[str] = Counter()
    lowest, highest = 2**64, -1
    for document in read_documents(files, text_key):
        if document.problem:
            skipped[document.problem] += 1
            continue
        data = document.text.encode("utf-8")
        whole.update(hashlib.sha256(data).digest())
        documents, text_bytes, longest = documents + 1, text_bytes + len(data), max(longest, len(document.text))
        draw = _draw(data, seed)
        lowest, highest = min(lowest, draw), max(highest, draw)
    first = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more files"
    if documents == 0:
        left_out = ", ".join(f"{n} {problem}" for problem, n in skipped.items())
        raise ValueError(f"{first}: no text to prepare ({left_out}); give files with text")
    if lowest == highest and longest < 2:
        raise ValueError(f"{first}: one character cannot be split into training and validation; give more text")
    return Corpus(
        files, text_key, seed, val_fraction, documents, text_bytes, whole.hexdigest(), dict(skipped), lowest, highest
    )


def _draw(data: bytes, seed: int) -> int:
    """Hash a document to a number in [0, 2^64)."""
    return int.from_bytes(hashlib.sha256(f"{seed}:".encode() + data).digest()[:8], "big")


def _parts(corpus: Corpus) -> Iterator[tuple[str, str, str]]:
    """Yield (split, text, origin) of every part of the corpus; raises ValueError if the content has changed since the
    first reading."""
    whole = hashlib.sha256()
    for document in read_documents(corpus.files, corpus.text_key):
        if document.problem:
            continue
        text, data = document.text, document.text.encode("utf-8")
        whole.update(hashlib.sha256(data).digest())
        draw = _draw(data, corpus.seed)
        if corpus.lowest == corpus.highest:
            cut = min(max(1, round(len(text) * (1 - corpus.val_fraction))), len(text) - 1)
            yield "train", text[:cut], document.origin
            yield "val", text[cut:], document.origin
        elif draw == corpus.lowest or (draw < corpus.val_fraction * 2**64 and draw != corpus.highest):
            yield "val", text, document.origin
        else:
            yield "train", text, document.origin
    if whole.hexdigest() != corpus.sha256:
        raise ValueError(
            f"{corpus.files[0].name}: the sources changed while they were read; prepare again once they are stable"
        )


def _check_tokenizer(spec: str, eos: str | None) -> None:
    """Raise ValueError for an invalid tokenizer, before any text is read."""
    kind, _, size = spec.partition(":")
    if spec == "bytes":
        if eos is not None:
            raise ValueError(f"eos={eos!r}: the byte tokenizer always ends a document with id 0 (NUL); leave --eos out")
    elif kind == "bpe":
        if not size.isdecimal() or int(size) < 257:
            raise ValueError(
                f"tokenizer={spec!r}: wanted bpe:N with a number of tokens N of at least 257, such as bpe:4096"
            )
    elif not _tokenizer_json(spec).exists():
        raise ValueError(
            f"tokenizer={spec!r}: no such file; wanted bytes, bpe:N or the path of a Hugging Face tokenizer.json"
        )
    else:
        expect_regular(_tokenizer_json(spec))


def _tokenizer_json(spec: str) -> Path:
    return Path(spec) / "tokenizer.json" if Path(spec).is_dir() else Path(spec)


def _make_tokenizer(spec: str, eos: str | None, corpus: Corpus) -> Tokenizer:
    if spec.startswith("bpe:"):
        training = (text for split, text, _ in _parts(corpus) if split == "train")
        return train_bpe(training, int(spec.removeprefix("bpe:")), eos)
    return tokenizer_of_file(spec, eos)


def tokenizer_of_file(spec: str, eos: str | None) -> Tokenizer:
    """The tokenizer "bytes", or that of a tokenizer.json; raises ValueError for one that is to be trained."""
    _check_tokenizer(spec, eos)
    if spec == "bytes":
        return byte_tokenizer()
    if spec.partition(":")[0] == "bpe":
        raise ValueError(f"tokenizer={spec!r}: wanted the one that made the tokens: bytes, or a tokenizer.json")
    try:
        content = read_text_file(_tokenizer_json(spec))
    except (OSError, ValueError) as error:
        raise ValueError(f"{spec}: cannot be read as a tokenizer.json ({error})") from None
    return json_tokenizer(content, spec, eos)


def _write(folder: Path, corpus: Corpus, tokenizer: Tokenizer) -> tuple[dict[str, dict[str, int]], dict[str, str]]:
    """Write the .bin, .docs and .sums files of all splits; return their numbers of tokens and documents, and the
    SHA-256 of the sums."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.eos], dtype).tobytes()
    counts = {split: {"tokens": 0, "documents": 0} for split in SPLITS}
    with ExitStack() as stack:
        bins, docs = (
            {s: stack.enter_context(closing(SummedFile(folder / f"{s}.{x}"))) for s in SPLITS} for x in ("bin", "docs")
        )
        for split, text, origin in _parts(corpus):
            try:
                ids = tokenizer.encode(text)
            except ValueError as error:
                raise ValueError(f"{origin}: {error}") from None
            docs[split].write(struct.pack("<Q", counts[split]["tokens"]))
            bins[split].write(ids.astype(dtype, copy=False).tobytes() + end)
            counts[split]["tokens"] += len(ids) + 1
            counts[split]["documents"] += 1
        for split in SPLITS:
            docs[split].write(struct.pack("<Q", counts[split]["tokens"]))
    return counts, {split: write_sums(folder / f"{split}.sums", [bins[split], docs[split]]) for split in SPLITS}
