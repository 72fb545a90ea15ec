"""The token-file format and its reader. A prepared corpus is a folder, of which nothing is loaded, all is mapped:

    meta.json               format, version, tokenizer, eos, vocab_size, dtype, counts per split, source of the text
    train.bin  val.bin      the tokens of all documents one after the other, little-endian uint8, uint16 or uint32
    train.docs val.docs     little-endian uint64: where each document starts in the .bin, then the number of tokens
    train.sums val.sums     checksums of both, by chunks: see fzero/data/checksums.py
    train.said val.said     of examples only (fzero/data/examples.py): uint8, 1 for each token to be learnt
    tokenizer.json          when the tokenizer is not bytes
    chat_template.jinja     of examples only, with tokenizer_config.json: what rendered them
    reference-DIGEST/       of pairs of answers: what a frozen reference says of them (fzero/run/runner/evaluate.py)

Every document of text ends with the end-of-document token `eos`, which occurs nowhere else.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fzero.core.arguments import checked
from fzero.core.digest import crc32c
from fzero.core.files import make_folder, naming
from fzero.core.storage import is_url, read_text, write_text
from fzero.core.text_parsing import expect_regular, json_text, open_regular, parse_json
from fzero.data.checksums import CHUNK, ChunkSums, line, read_sums, split_sums
from fzero.data.remote_tokens import READING, Reading, RemoteTokens, TokenFile

SAMPLES = 64  # chunks of a file of another system that are compared when it is opened
FORMAT, VERSION, SPLITS = "fzero-tokens", 1, ("train", "val")
PREPARE_AGAIN = "prepare the corpus again (fzero data prepare)"


class Tokens(NamedTuple):
    """One split of a corpus."""

    name: str  # for messages: the .bin file, or anything for arrays made by hand
    # [N] uint8, uint16 or uint32; or, of a file of another system, as that has them
    tokens: np.ndarray | RemoteTokens
    docs: np.ndarray  # [documents + 1] int64: the start of each document, then N
    vocab_size: int
    eos: int
    # of the .bin file; None for arrays made by hand, corpora of earlier versions, and tokens that compare themselves
    sums: ChunkSums | None = None
    # or of examples: chat; labels (texts with a class); pairs, ranked (of answers, each a document, for two objectives)
    kind: str = "text"
    loss_mask: np.ndarray | None = None  # [N] uint8 of examples: the tokens to be learnt


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest little-endian unsigned dtype that holds the ids 0 .. vocab_size - 1."""
    return np.dtype("<u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4")


@contextlib.contextmanager
def new_corpus(target: Path) -> Iterator[Path]:
    """A context of a folder that is at `target` when it is complete."""
    with naming(target):
        make_folder(target.parent)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
            folder = make_folder(temporary, "corpus")
            yield folder
            os.rename(folder, target)


def write_meta(folder: Path, meta: dict[str, Any], target: Path) -> None:
    """Write the meta.json of a corpus that will be at `target`."""
    write_text(folder, "meta.json", json_text(meta, f"{target}/meta.json", 2) + "\n")


@checked()
def read_meta(folder: str | Path) -> dict[str, Any]:
    """Read and check `folder`/meta.json. folder: or the URL of one.

    Raises ValueError naming the file if it is missing, is not JSON, is of another format or version, or lacks an entry.
    """
    path = f"{folder}/meta.json" if is_url(folder) else Path(folder) / "meta.json"
    text = read_text(folder, "meta.json") if is_url(folder) or os.path.lexists(path) else None
    if text is None:
        raise ValueError(f"{path}: no such file; {folder} is not a prepared corpus: make one with fzero data prepare")
    try:
        meta = parse_json(text, str(path))
    except ValueError as error:
        raise ValueError(f"{error}; {PREPARE_AGAIN}") from None
    if meta.get("format") != FORMAT:
        raise ValueError(f'{path}: its "format" is not "{FORMAT}"; {folder} is not a corpus prepared by fzero')
    if meta.get("version") != VERSION:
        raise ValueError(f"{path}: version {meta.get('version')}, this fzero reads version {VERSION}; {PREPARE_AGAIN}")
    try:
        vocab_size, eos, dtype = meta["vocab_size"], meta["eos"], meta["dtype"]
        counts = [meta["splits"][split][key] for split in SPLITS for key in ("tokens", "documents")]
        sound = all(type(n) is int and n > 0 for n in [vocab_size, *counts]) and isinstance(meta["tokenizer"], str)
        sound = sound and ("sums" not in meta or all(isinstance(meta["sums"][split], str) for split in SPLITS))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: the entry {error} is missing; {PREPARE_AGAIN}") from None
    if not sound or type(eos) is not int or not 0 <= eos < vocab_size or dtype != token_dtype(vocab_size).name:
        raise ValueError(
            f"{path}: damaged: vocab_size={vocab_size}, eos={eos}, dtype={dtype}, tokens and documents {counts}; "
            f"wanted positive counts, 0 <= eos < vocab_size and the smallest dtype that holds them; {PREPARE_AGAIN}"
        )
    return meta


@checked()
def open_tokens(folder: str | Path, split: str = "train", reading: Reading = READING) -> Tokens:
    """Memory-map the `split` ("train" or "val") of the prepared corpus in `folder`.

    reading: how tokens are read that are in an object store (see fzero/data/linked_corpus.py).

    Raises ValueError naming a file that is missing or whose size differs from meta.json, and if the document offsets do
    not increase from 0 to the number of tokens, or do not match their checksums. The token values are not scanned: who
    reads them asks `sums` first, as TokenStream does.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: a corpus has the splits {', '.join(SPLITS)}")
    meta = read_meta(folder)
    counts = meta["splits"][split]
    bin_path, docs_path = Path(folder) / f"{split}.bin", Path(folder) / f"{split}.docs"
    linked = meta.get("linked")
    if "remote" in meta:
        tokens = open_remote(folder, split, meta, reading)
    elif linked is not None:
        tokens = open_linked(linked, split, counts["tokens"])
    else:
        tokens = _map(bin_path, token_dtype(meta["vocab_size"]), counts["tokens"])
    # Offsets stay below 2^63: read as int64, since numpy turns uint64 mixed with int64 into a float64 copy of the file.
    docs = _map(docs_path, np.dtype("<i8"), counts["documents"] + 1)
    rising = bool((docs[1:] > docs[:-1]).all())
    if docs[0] != 0 or docs[-1] != len(tokens) or not rising:
        raise ValueError(
            f"{docs_path}: document offsets must rise from 0 to the {len(tokens)} tokens of {bin_path.name}; "
            f"they run from {docs[0]} to {docs[-1]}, each above the one before: {rising}; {PREPARE_AGAIN}"
        )
    kind = meta.get("kind", "text")
    loss_mask = None if kind == "text" else _map(Path(folder) / f"{split}.said", np.dtype("u1"), counts["tokens"])
    if isinstance(tokens, RemoteTokens):  # the offsets were compared when they were copied
        return Tokens(f"{tokens.file.url}/{split}.bin", tokens, docs, meta["vocab_size"], meta["eos"])
    files = [tokens, docs] if loss_mask is None else [tokens, docs, loss_mask]
    checksums = sums_of(folder, split, meta, files)
    for sums, content in zip(checksums[1:], files[1:]):
        sums.expect(np.zeros(1, np.int64), content.nbytes)
    name = str(bin_path) if linked is None else linked["path"]
    return Tokens(
        name, tokens, docs, meta["vocab_size"], meta["eos"], checksums[0] if checksums else None, kind, loss_mask
    )


def sums_of(folder: str | Path, split: str, meta: dict[str, Any], files: list[np.ndarray]) -> list[ChunkSums]:
    """The checksums of a split's files (.bin, .docs and, of examples, .said); [] if the corpus has none."""
    if "sums" not in meta:
        return []
    return read_sums(Path(folder), split, meta["sums"][split], [file.view(np.uint8) for file in files])


@checked()
def verify(folder: str | Path) -> list[str]:
    """Compare every byte of the prepared corpus in `folder` with its checksum; return a line for each damaged chunk.

    Raises ValueError if it is no corpus, has no checksums, or a file is missing, of another size, or with document
    offsets that do not rise.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "text.txt").write_text("a text")
    >>> _ = fzero.data.prepare(folder / "text.txt", folder / "corpus", val_fraction=0.5)
    >>> fzero.data.verify(folder / "corpus")
    []
    """
    meta = read_meta(folder)
    if "mixture" in meta:
        return [damage for source in meta["mixture"] for damage in verify(Path(folder) / source["path"])]
    if "remote" in meta:
        raise ValueError(f"{folder}: its tokens are at {meta['remote']['url']}; a run compares what it fetches of them")
    if "linked" in meta:
        raise ValueError(f"{folder}: its tokens are in {meta['linked']['path']}, of which there are no checksums")
    if "sums" not in meta:
        raise ValueError(f"{folder}: has no checksums, as an earlier version prepared it; {PREPARE_AGAIN}")
    damages = []
    for split in SPLITS:
        counts = meta["splits"][split]
        tokens = _map(Path(folder) / f"{split}.bin", token_dtype(meta["vocab_size"]), counts["tokens"])
        docs = _map(Path(folder) / f"{split}.docs", np.dtype("<i8"), counts["documents"] + 1)
        files = [tokens, docs]
        if meta.get("kind", "text") != "text":
            files.append(_map(Path(folder) / f"{split}.said", np.dtype("u1"), counts["tokens"]))
        for sums in sums_of(folder, split, meta, files):
            damages += [line(sums, chunk) for chunk in sums.damaged()]
    return damages


def open_remote(folder: str | Path, split: str, meta: dict[str, Any], reading: Reading) -> RemoteTokens:
    """The tokens of a split in an object store; raises ValueError if the checksums are missing or damaged."""
    counts, dtype, path = meta["splits"], token_dtype(meta["vocab_size"]), Path(folder) / f"{split}.sums"
    sizes = [counts[split]["tokens"] * dtype.itemsize, 8 * (counts[split]["documents"] + 1)]
    raw = None
    if os.path.lexists(path):
        with open_regular(path) as file:
            raw = file.read()
    sums = split_sums(raw, str(path), meta["sums"][split], sizes)[0]
    remote = meta["remote"]
    file = TokenFile(remote["url"], f"{split}.bin", dtype, counts[split]["tokens"], sums, remote["sha256"])
    return RemoteTokens(file, reading, sum(split_counts["tokens"] for split_counts in counts.values()) * dtype.itemsize)


def open_linked(linked: dict[str, Any], split: str, count: int) -> np.ndarray:
    """The tokens of a split, memory-mapped; raises ValueError if the file is gone or of another size."""
    path = Path(linked["path"])
    if not os.path.lexists(path):
        raise ValueError(f"{path}: no such file, but a corpus reads its tokens there; put it back, or link it again")
    if (actual_bytes := expect_regular(path)) != linked["bytes"]:
        raise ValueError(
            f"{path}: has {actual_bytes} bytes, and {linked['bytes']} when it was linked; put that file back, or link "
            "it again"
        )
    if sampled_sum(path) != linked["sampled"]:
        raise ValueError(f"{path}: has other content than when it was linked; put that file back, or link it again")
    dtype = np.dtype(linked["dtype"])
    offset = linked["offset"] + linked["first"][split] * dtype.itemsize
    return np.asarray(np.memmap(path, dtype, "r", offset, (count,)))


def sampled_sum(path: Path) -> int:
    """The crc32c of SAMPLES chunks of a file, evenly spaced: of all of a small one."""
    content, crc = np.memmap(path, np.uint8, "r"), 0
    for i in range(SAMPLES):
        begin = i * max(0, len(content) - CHUNK) // (SAMPLES - 1)
        crc = crc32c(memoryview(content[begin : begin + CHUNK]), crc)
    return crc


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if not os.path.lexists(path):
        raise ValueError(f"{path}: no such file, but meta.json promises it; {PREPARE_AGAIN}")
    actual_bytes, expected_bytes = expect_regular(path), count * dtype.itemsize
    if actual_bytes != expected_bytes:
        fault = "empty" if actual_bytes == 0 else "truncated" if actual_bytes < expected_bytes else "too long"
        raise ValueError(
            f"{path}: {fault}: {actual_bytes} bytes, meta.json says {count} x {dtype.name} = {expected_bytes}; "
            f"{PREPARE_AGAIN}"
        )
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))


def digest(folder: str | Path) -> str:
    """The SHA-256 of the meta.json of a corpus, which identifies its content."""
    read_meta(folder)
    return hashlib.sha256((Path(folder) / "meta.json").read_bytes()).hexdigest()
