"""A corpus whose tokens stay in the files of another system or in an object store, described by a folder.

    meta.json              as of a prepared corpus (fzero/data/tokens.py), and `linked`: the file, where its tokens
                           begin, their dtype, the size of the file, a checksum of samples of it, and the first token of
                           each split
    train.docs val.docs    where each document of a split begins
    tokenizer.json         when the tokenizer is not bytes

Both splits are ranges of the file: the last documents are for validation. Its size and 64 chunks are compared when it
is opened.

Token files of other systems: Megatron's .bin with its .idx, and .npy.

An .idx (Megatron-LM, megatron/core/datasets/indexed_dataset.py) is: "MMIDIDX" and two bytes of 0, uint64 1, uint8 the
code of a dtype, uint64 S sequences, uint64 D + 1; int32 [S] their lengths, int64 [S] where they begin in the .bin in
bytes, int64 [D + 1] the first sequence of each document, and at the end S; all little-endian. An .idx with int8 [S]
more, the modes of its sequences, is of other kinds of data and refused.

At a URL, meta.json has `remote`: the URL, and the SHA-256 of its meta.json; documents, checksums and tokenizer are
copies, and the tokens of SPLIT.bin are read when they are asked for (fzero/data/remote_tokens.py).
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fzero.core.arguments import checked
from fzero.core.digest import crc32c
from fzero.core.files import writing
from fzero.core.storage import Objects, absolute, is_url, read_text, write_text
from fzero.core.text_parsing import expect_regular
from fzero.data.checksums import CHUNK, FIX, split_sums
from fzero.data.mixture import Mixture
from fzero.data.prepare import check_new, tokenizer_of_file
from fzero.data.tokens import (
    FORMAT,
    PREPARE_AGAIN,
    SPLITS,
    VERSION,
    digest,
    new_corpus,
    read_meta,
    sampled_sum,
    token_dtype,
    write_meta,
)

COPY_BYTES = 1024 * CHUNK  # bytes of a file that are copied at a time


@checked()
def link_url(url: str, out: str | Path) -> dict[str, Any]:
    """Describe the prepared corpus at `url` in the new folder `out`, a corpus that reads its tokens there; return its
    meta.json.

    url: s3://, gs://, file:// or http://, of a folder that `prepare` made and any tool has copied.

    Raises ValueError if `out` exists, and if there is no corpus of text with checksums at the URL, whole; OSError if
    the store does not answer or refuses. Nothing is written then.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "text.txt").write_text("some text " * 20)
    >>> _ = fzero.data.prepare(folder / "text.txt", folder / "corpus", val_fraction=0.5)
    >>> meta = link_url(f"file://{folder}/corpus", folder / "linked")
    >>> fzero.data.open_tokens(folder / "linked").tokens[0:4].tobytes()
    b'some'
    """
    url, out = url.rstrip("/"), Path(out)
    if not is_url(url):
        raise ValueError(f"{url}: is no URL; link_url is for s3://bucket/path, gs://, file:// and http://")
    if os.path.lexists(out):
        raise ValueError(f"{out}: already exists; name another folder or remove this one first")
    meta, sha256, objects = read_remote_meta(url), remote_digest(url), Objects(url)
    with new_corpus(out) as folder:
        for split in SPLITS:
            copy_split(objects, meta, split, folder)
        if meta["tokenizer"] != "bytes":
            write_text(folder, "tokenizer.json", read_object(objects, "tokenizer.json").decode())
        linked_meta = meta | {"remote": {"url": url, "sha256": sha256}}
        write_meta(folder, linked_meta, out)
        expect_unchanged(folder)
    return linked_meta


def read_remote_meta(url: str) -> dict[str, Any]:
    """The meta.json of the corpus at a URL; raises ValueError for none."""
    meta = read_meta(url)
    for key, reason in {
        "mixture": "is a mixture itself; name its corpora",
        "linked": f"reads its tokens in a file of another machine, {meta.get('linked', {}).get('path')}",
        "remote": f"reads its tokens at {meta.get('remote', {}).get('url')}; give that URL",
    }.items():
        if key in meta:
            raise ValueError(f"{url}: {reason}")
    if meta.get("kind", "text") != "text":
        raise ValueError(f"{url}: is a corpus of {meta['kind']}, which is read from a folder: copy it to this machine")
    if "sums" not in meta:
        raise ValueError(f"{url}: has no checksums, as an earlier version prepared it; {PREPARE_AGAIN}")
    return meta


def copy_split(objects: Objects, meta: dict[str, Any], split: str, folder: Path) -> None:
    """Copy what a split has beside its tokens into `folder`, compared with its checksums."""
    counts, name = meta["splits"][split], f"{split}.docs"
    sizes = [counts["tokens"] * token_dtype(meta["vocab_size"]).itemsize, 8 * (counts["documents"] + 1)]
    raw = read_object(objects, f"{split}.sums")
    sums = split_sums(raw, f"{objects.url}/{split}.sums", meta["sums"][split], sizes)[1]
    with writing(folder / f"{split}.sums", "new") as file:
        file.write(raw)
    with writing(folder / name, "new") as file:
        for begin in range(0, sizes[1], COPY_BYTES):
            chunk = read_object(objects, name, begin, min(begin + COPY_BYTES, sizes[1]))
            for i in range(0, len(chunk), CHUNK):
                if crc32c(chunk[i : i + CHUNK]) != sums[(begin + i) // CHUNK]:
                    raise ValueError(
                        f"{objects.url}/{name}: damaged: its bytes from {begin + i:,} on do not match their "
                        f"checksum; {FIX}"
                    )
            file.write(chunk)
    read_object(objects, f"{split}.bin", sizes[0] - 1, sizes[0])


def read_object(objects: Objects, name: str, start: int = 0, end: int | None = None) -> bytes:
    """The bytes of an object that a corpus must have; raises ValueError if it is missing or shorter."""
    try:
        content = objects.read(name, start, end)
    except EOFError:
        raise ValueError(f"{objects.url}/{name}: truncated: meta.json promises {end:,} bytes or more; {FIX}") from None
    if content is None:
        raise ValueError(f"{objects.url}/{name}: no such object, but meta.json promises it; {FIX}")
    return content


def remote_digest(url: str) -> str:
    """The SHA-256 of the meta.json at a URL."""
    return hashlib.sha256(read_object(Objects(url), "meta.json")).hexdigest()


def expect_unchanged(folder: str | Path) -> None:
    """Raise ValueError if a corpus' URL has another corpus by now."""
    remote = read_meta(folder).get("remote")
    if remote is not None and remote_digest(remote["url"]) != remote["sha256"]:
        raise ValueError(f"{remote['url']}: has changed since the run began; put that corpus back, or start a new run")


MAGIC = b"MMIDIDX\x00\x00"
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
BATCH_TOKENS = 1 << 24  # tokens that are searched for ends of documents together


class ForeignTokens(NamedTuple):
    """Tokens in a file of another system."""

    path: Path
    offset: int  # bytes before them
    dtype: np.dtype
    count: int
    docs: np.ndarray  # int64 [documents + 1]: where each begins, then the count

    def map(self) -> np.ndarray:
        """The tokens, memory-mapped."""
        return np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, (self.count,)))


def find_tokens(source: Path, eos: int) -> ForeignTokens:
    """The tokens of a .npy, .bin or .idx file, or of what both begin with; raises ValueError."""
    if source.suffix == ".npy":
        return read_npy(source, eos)
    prefix = source.with_suffix("") if source.suffix in (".bin", ".idx") else source
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, tokens):
        if not path.is_file():
            raise ValueError(f"{path}: no such file; give a .npy file, or the .bin of Megatron beside its .idx")
    return read_index(index, tokens)


def read_index(index: Path, tokens: Path) -> ForeignTokens:
    """The tokens of a .bin of Megatron by its .idx."""
    raw = np.memmap(index, np.uint8, "r") if index.stat().st_size else np.zeros(0, np.uint8)
    head = struct.calcsize("<9sQBQQ")
    if bytes(raw[:9]) != MAGIC:
        raise ValueError(f"{index}: not an .idx of Megatron: it does not begin with MMIDIDX")
    if len(raw) < head:
        raise ValueError(f"{index}: truncated: it has {len(raw)} bytes, and its head alone {head}")
    _, version, code, sequences, documents = struct.unpack("<9sQBQQ", raw[:head].tobytes())
    if version != 1 or code not in CODES or "float" in CODES[code] or not (sequences and documents):
        kind = CODES.get(code, code)
        raise ValueError(
            f"{index}: version {version}, tokens of {kind}, {sequences} sequences; wanted version 1 and sequences of "
            "whole numbers"
        )
    want = head + 12 * sequences + 8 * documents
    if len(raw) != want:
        fault = "truncated" if len(raw) < want else "too long (sequences with modes are not of text)"
        raise ValueError(f"{index}: {fault}: it has {len(raw)} bytes, {want} for {sequences} sequences")
    lengths = np.frombuffer(raw, "<i4", sequences, head).astype(np.int64)
    begins = np.frombuffer(raw, "<i8", sequences, head + 4 * sequences)
    firsts = np.frombuffer(raw, "<i8", documents, head + 12 * sequences)
    dtype = np.dtype(CODES[code]).newbyteorder("<")
    ends = np.append(0, np.cumsum(lengths))
    total = int(ends[-1])
    if not (lengths >= 0).all() or not np.array_equal(begins, ends[:-1] * dtype.itemsize):
        raise ValueError(f"{index}: its sequences do not lie one after the other; write the data set again")
    if firsts[0] != 0 or firsts[-1] != sequences or not (np.diff(firsts) >= 0).all():
        raise ValueError(
            f"{index}: the first sequences of its documents must rise from 0 to {sequences}; they run from {firsts[0]} "
            f"to {firsts[-1]}"
        )
    if tokens.stat().st_size != total * dtype.itemsize:
        raise ValueError(
            f"{tokens}: has {tokens.stat().st_size} bytes, and {index.name} says {total} x {dtype.name} = "
            f"{total * dtype.itemsize}; put the right one beside it"
        )
    return ForeignTokens(tokens, 0, dtype, total, np.unique(ends[firsts]))


def read_npy(path: Path, eos: int) -> ForeignTokens:
    """The tokens of a .npy file of one dimension, whose documents end with `eos`."""
    expect_regular(path)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read as a .npy file of numbers ({reason})") from None
    if not isinstance(array, np.memmap) or array.ndim != 1 or array.dtype.kind not in "ui":
        raise ValueError(f"{path}: is {array.dtype} {list(array.shape)}; wanted whole numbers of one dimension")
    ends = [np.flatnonzero(array[i : i + BATCH_TOKENS] == eos) + i + 1 for i in range(0, len(array), BATCH_TOKENS)]
    docs = np.unique(np.concatenate([[0], *ends, [len(array)]])).astype(np.int64)
    return ForeignTokens(path, int(array.offset), array.dtype, len(array), docs)


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
    built_tokenizer = tokenizer_of_file(str(tokenizer), eos)
    token_file = find_tokens(Path(source), built_tokenizer.eos)
    documents = len(token_file.docs) - 1
    if documents < 2:
        raise ValueError(f"{token_file.path}: has {documents} document; training and validation need one each")
    expect_tokens(token_file.map(), token_file.path, built_tokenizer.vocab_size, built_tokenizer.name)
    first = documents - min(documents - 1, max(1, round(documents * val_fraction)))
    cut = int(token_file.docs[first])
    docs = {"train": token_file.docs[: first + 1], "val": token_file.docs[first:] - cut}
    meta = {
        "format": FORMAT,
        "version": VERSION,
        **built_tokenizer.meta(),
        "splits": {
            split: {"tokens": int(split_docs[-1]), "documents": len(split_docs) - 1}
            for split, split_docs in docs.items()
        },
        "linked": {
            "path": str(token_file.path.absolute()),
            "offset": token_file.offset,
            "dtype": token_file.dtype.str,
            "bytes": token_file.path.stat().st_size,
            "sampled": sampled_sum(token_file.path),
            "first": {"train": 0, "val": cut},
        },
        "val_fraction": val_fraction,
    }
    with new_corpus(out) as folder:
        for split, split_docs in docs.items():
            with writing(folder / f"{split}.docs", "new") as file:
                file.write(split_docs.astype("<i8").tobytes())
        if built_tokenizer.json:
            write_text(folder, "tokenizer.json", built_tokenizer.json)
        write_meta(folder, meta, out)
    return meta


def expect_tokens(tokens: np.ndarray, path: Path, vocab_size: int, name: str) -> None:
    """Raise ValueError if one of some thousand tokens, evenly spaced, is none of the tokenizer's."""
    sample = tokens[:: max(1, len(tokens) // 100_000)]
    low, high = int(sample.min()), int(sample.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{path}: has the token {low if low < 0 else high}, and the tokenizer {name} the tokens 0 to "
            f"{vocab_size - 1}; give the one that made them"
        )


def write_mixture(mixture: Mixture, out: Path) -> dict[str, Any]:
    """Write the corpus of a mixture in the new folder `out`; returns its meta.json; raises ValueError."""
    metas = [(read_remote_meta if is_url(s.path) else read_meta)(s.path) for s in mixture.sources]
    first = mixture.sources[0]
    for source, meta in zip(mixture.sources, metas):
        if "mixture" in meta or meta.get("kind", "text") != "text":
            kind = "a mixture itself" if "mixture" in meta else f"a corpus of {meta['kind']}"
            raise ValueError(f"mixture: {source.path} is {kind}; a mixture is of corpora of text")
        first_tokenizer, source_tokenizer = (
            tokenizer_of(path, m) for path, m in ((first.path, metas[0]), (source.path, meta))
        )
        if first_tokenizer != source_tokenizer:
            raise ValueError(
                f"mixture: {source.path} has tokens of another tokenizer ({meta['tokenizer']}) than {first.path} "
                f"({metas[0]['tokenizer']}); prepare both with one tokenizer.json"
            )
    splits = {
        split: {n: sum(meta["splits"][split][n] for meta in metas) for n in ("tokens", "documents")} for split in SPLITS
    }
    tokenizer_meta = {key: metas[0][key] for key in ("tokenizer", "eos", "vocab_size", "dtype")}
    meta = {"format": FORMAT, "version": VERSION, **tokenizer_meta, "splits": splits, "mixture": []}
    if all("text_bytes" in entry.get("source", {}) for entry in metas):
        meta["source"] = {"text_bytes": sum(entry["source"]["text_bytes"] for entry in metas)}
    with new_corpus(out) as folder:
        for i, source in enumerate(mixture.sources):
            if is_url(source.path):
                link_url(source.path, folder / f"source-{i}")
                location = {"path": f"source-{i}", "url": source.path}
            else:
                location = {"path": absolute(source.path)}
            sha256 = digest(folder / location["path"])
            meta["mixture"].append({"name": source.name, **location, "sha256": sha256})
        if tokenizer_meta["tokenizer"] != "bytes":
            write_text(folder, "tokenizer.json", read_text(first.path, "tokenizer.json") or "")
        write_meta(folder, meta, out)
    return meta


def tokenizer_of(folder: str | Path, meta: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one tokenizer from another: its ids and, unless tokens are bytes, its file."""
    text = "" if meta["tokenizer"] == "bytes" else read_text(folder, "tokenizer.json")
    if text is None:
        raise ValueError(
            f"{folder}/tokenizer.json: no such file, but meta.json names the tokenizer {meta['tokenizer']}; put it back"
        )
    return meta["vocab_size"], meta["eos"], hashlib.sha256(text.encode()).hexdigest()
