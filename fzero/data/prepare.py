"""Convert text to token files, reading the sources twice: first to check (document_scan.py), then to write.

The second reading encodes (encoding.py), into a work folder beside `out` from which a preparation that was killed goes
on: OUT.partial. Both are the work of several processes; pieces and their order follow from the sources alone.

    lock             locked (flock) by the process that prepares
    settings.json    what the corpus is made of, and the digest of the sources: written after their first reading
    documents/       what the first reading said of each piece (fzero/data/document_scan.py)
    tokenizer.json   one that was trained
    encoded/         the pieces that are encoded (fzero/data/encoding.py)
    corpus/          the corpus, while the pieces are joined

After an error of the user's in the first attempt the folder is removed, as it is once the corpus is whole
(`remove_finished`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fzero import data
from fzero.core.arguments import checked
from fzero.core.config_tables import check_bounds
from fzero.core.files import make_folder, naming, remove_entry, writing
from fzero.core.storage import write_text
from fzero.core.text_parsing import expect_regular, parse_json, read_text_file, short
from fzero.data.document_scan import PREPARING, Corpus, Preparing, Sources, run_in_process, scan_sources, split_texts
from fzero.data.encoding import encode, join, text_spans
from fzero.data.sources import ALLOWED, SMALLEST, cut, find_files
from fzero.data.tokenizers import (
    TOKENIZER,
    USUAL_EOS,
    Tokenizer,
    byte_tokenizer,
    json_tokenizer,
    sha256_of,
    train_bpe,
    words_of_bpe,
)
from fzero.data.tokens import FORMAT, SPLITS, VERSION, write_meta

SETTINGS = "settings.json"
FOLDERS = ("documents", "signatures", "encoded")
INITIAL_NAMES = {"lock", "stdin", *FOLDERS, f"{SETTINGS}.partial"}  # what there may be before the settings
ENDING_S = 5.0  # how long the processes of one that was killed may take to end


class Busy(ValueError):
    """Raised where another process prepares the same corpus."""


def path_of(out: Path) -> Path:
    """The work folder of a corpus."""
    return out.with_name(f"{out.name}.partial")


@contextlib.contextmanager
def open_work(out: Path, settings: dict[str, Any]) -> Iterator[Path]:
    """A context of the work folder of a preparation, new or resumed; raises Busy, or ValueError for another's."""
    folder = path_of(out)
    new = not folder.exists()
    with naming(folder):
        make_folder(folder.parent, folder.name)
    with writing(folder / "lock", "update") as lock:
        end = time.monotonic() + ENDING_S
        while not try_lock(lock):
            if time.monotonic() > end:
                raise Busy(f"{folder}: another process prepares {out} there; wait for it, or stop it")
            time.sleep(0.02)
        resumed = (folder / SETTINGS).exists()
        if not new and not resumed:
            _expect_work_folder(folder)
        if resumed:
            expect_settings(folder, settings)
        try:
            for name in FOLDERS:
                make_folder(folder, name)
            yield folder
        except BaseException as error:
            # A panic of a library is no Exception; an interrupt and a signal are none either, and go on later.
            panic = type(error).__name__ == "PanicException"
            if not resumed and (panic or (isinstance(error, Exception) and not isinstance(error, OSError))):
                shutil.rmtree(folder, ignore_errors=True)
            raise
    shutil.rmtree(folder)


def remove_finished(out: Path) -> bool:
    """Remove what a kill left of the work folder of a corpus that was whole; returns whether there was any."""
    folder, meta = path_of(out), out / "meta.json"
    if not (folder.is_dir() and meta.is_file()):
        return False
    if {path.name for path in folder.iterdir()} - INITIAL_NAMES - {SETTINGS, TOKENIZER}:
        return False
    with contextlib.ExitStack() as stack:
        if (folder / "lock").exists() and not try_lock(
            stack.enter_context(writing(folder / "lock", "update", make=False))
        ):
            return False
        if (folder / SETTINGS).exists():  # else it was removed already, or the sources were being read
            settings, corpus_meta = (parse_json(read_text_file(path), str(path)) for path in (folder / SETTINGS, meta))
            if settings.get("sources") != corpus_meta.get("source", {}).get("sha256"):
                return False
        shutil.rmtree(folder)
    return True


def try_lock(lock: Any) -> bool:
    """Lock a file, which its processes hold together; False if others have it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _expect_work_folder(folder: Path) -> None:
    """Raise ValueError if a folder without settings holds what a preparation does not make."""
    unknown = sorted({path.name for path in folder.iterdir()} - INITIAL_NAMES)
    if unknown:
        raise ValueError(f"{folder}: is no folder of an unfinished preparation (it holds {unknown[0]}); move it away")


def expect_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Raise ValueError unless the preparation that began in the folder has these settings too."""
    saved_settings = parse_json(read_text_file(folder / SETTINGS), str(folder / SETTINGS))
    differing = [name for name, value in settings.items() if saved_settings.get(name) != value]
    if differing:
        saved_text, current_text = (
            ", ".join(f"{name} {table.get(name)!r}" for name in differing) for table in (saved_settings, settings)
        )
        raise ValueError(
            f"{folder}: an unfinished preparation with {saved_text}, and this one has {current_text}; give the same "
            "sources and options to go on, or remove that folder to begin anew"
        )


def record_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Note what the corpus is made of, unless the folder has that already; raises ValueError if that differs."""
    if (folder / SETTINGS).exists():
        expect_settings(folder, settings)
    else:
        write_text(folder, SETTINGS, json.dumps(settings, indent=2) + "\n")


def save_tokenizer(folder: Path, content: str) -> None:
    """Keep a tokenizer that was trained."""
    write_text(folder, TOKENIZER, f"{sha256_of(content)}\n{content}")


def load_saved_tokenizer(folder: Path) -> str | None:
    """The content of the tokenizer that was trained; None if there is none, or it is damaged."""
    if not (folder / TOKENIZER).exists():
        return None
    digest, _, content = read_text_file(folder / TOKENIZER).partition("\n")
    return content if sha256_of(content) == digest else None


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
    preparing: Preparing = PREPARING,
) -> dict[str, Any]:
    """Prepare a corpus in the new folder `out` (format: fzero/data/tokens.py); return the content of its meta.json.

    sources: .txt and .py files (one document each) and .jsonl files (one document a line, its text at `text_key`),
        each plain, .gz or .zst; .parquet and .arrow files (one document a row); folders of those, such as of Hugging
        Face's datasets; "-" (standard input, plain or .gz, one text) and "-.jsonl" (the same, one
        document a line); "stdlib" (the .py files of Python's standard library without site-packages, identical ones
        once).
    tokenizer: "bytes"; "bpe:N", N tokens trained on the training split, or on meta["source"]["learned"] of it, spread
        evenly, where it has more than 64 MB or more different words than can be counted in some 180 MB; or the path of
        a Hugging Face tokenizer.json or of its folder.
    eos: the end-of-document token of such a file (default: the usual one it has), or the name to give it in bpe:N.
    preparing: by how many processes, what shows how far they are, filters of documents, and whether duplicates stay.

    A document is for validation when its draw, SHA-256(seed, content) as a number in [0, 1), is below val_fraction:
    reading order and other documents do not matter, and copies of a document are on one side. The document with the
    lowest draw is always for validation and the one with the highest for training. When all documents are the same
    one, its first 1 - val_fraction of characters are for training and the rest for validation. A long
    document (a .txt file is one) is in memory in stretches, which have the ids of the whole (encoding.py).

    The work is in the folder OUT.partial, and stays there after an interrupt, a kill or an OSError: the same call then
    encodes what is missing. The corpus is the same, byte for byte, whatever happened on the way. Where a kill came when
    the corpus was whole already, the same call removes OUT.partial, and raises as `out` exists.

    Files found in folders that are empty, binary (contain NUL) or not UTF-8 are left out and counted in
    meta["source"]["skipped"]. Raises ValueError when `out` exists, for any problem of a file named by the user, a
    damaged .gz, .zst, .parquet or .arrow or a bad .jsonl line anywhere, an unknown tokenizer or source; then there is
    no `out`, and no OUT.partial if it was not there before. Raises it too if an OUT.partial is of other sources or
    options, or another process works there.
    """
    sources = [sources] if isinstance(sources, str | Path) else list(sources)
    if not sources:
        raise ValueError(f"no source given; {ALLOWED}")
    preparing.expect_sound()
    check_bounds("seed", seed, (0, True, 2**64))
    remove_finished(Path(out))
    out = check_new(out, val_fraction)
    _check_tokenizer(str(tokenizer), eos)
    try:
        make_folder(out.parent)
    except OSError as error:
        raise ValueError(f"{out}: its parent folder cannot be made ({error})") from None
    settings = {
        "tokenizer": str(tokenizer),
        "eos": eos,
        "val_fraction": val_fraction,
        "seed": seed,
        "text_key": text_key,
    } | preparing.settings()
    with open_work(out, settings) as work:
        files = find_files(sources, work)
        source_set = Sources(cut(files), text_key, seed, work / "documents", preparing.filters)
        corpus = scan_sources(source_set, val_fraction, preparing)
        learned = 1.0
        built_tokenizer = None if str(tokenizer).startswith("bpe:") else tokenizer_of_file(str(tokenizer), eos)
        origin = {"pieces": len(source_set.pieces), "sources": corpus.sha256}
        if built_tokenizer is not None:
            origin["tokenizer.json"] = hashlib.sha256(built_tokenizer.json.encode()).hexdigest()
        record_settings(work, settings | origin)
        if built_tokenizer is None:
            built_tokenizer, learned = _train(str(tokenizer), eos, corpus, work)
        encode(corpus, built_tokenizer, work / "encoded", preparing)
        source = {"names": [str(source) for source in sources], "files": len(files)} | preparing.settings()
        source |= {"learned": learned} if learned < 1.0 else {}
        meta = _write(work, corpus, built_tokenizer, source) | {"val_fraction": val_fraction, "seed": seed}
        write_meta(work / "corpus", meta, out)
        os.rename(work / "corpus", out)
    return meta


LEARNED = 1 << 15  # characters of a stretch: the library takes 256 of them together
MOST_LEARNED = 1 << 26  # bytes of text
# Bytes of memory in which the library counts pairs of bytes: some 100 for each byte of each different word, and 150.
COUNT_BYTES, BYTES_A_BYTE, BYTES_A_WORD = 180_000_000, 100, 150
WORDS = re.compile(r" ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+")  # nearly `words_of_bpe`, in a fifth of its time
MOST_TOKENS = 10_000_000  # of a tokenizer that is trained here: its library takes memory for as many at once


def check_new(out: str | Path, val_fraction: float) -> Path:
    """The folder of a new corpus; raises ValueError if it exists or a split is empty."""
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
    share_text = f", learned from {100 * source['learned']:.2g}% of the text" if "learned" in source else ""
    lines = [
        f"{source['documents']:,} documents, {source['text_bytes'] / 1e6:.1f} MB from {', '.join(source['names'])}",
        f"tokenizer {meta['tokenizer']}: {meta['vocab_size']:,} tokens, stored as {meta['dtype']}{share_text}",
        *(f"{name}: {splits[name]['tokens']:,} tokens in {splits[name]['documents']:,} documents" for name in SPLITS),
    ]
    if source["skipped"]:
        files = source.get("skipped_files", {})
        words = [_skipped(n, problem, files.get(problem)) for problem, n in source["skipped"].items()]
        lines.append(f"left out: {', '.join(words)}")
    return "\n".join(lines)


def _skipped(count: int, problem: str, files: list[str] | None) -> str:
    """The words `2 binary (a.bin, b.bin)`."""
    named = f" ({', '.join(files)}{', ...' * (count > len(files))})" if files else ""
    return f"{count} {problem}{named}"


def _check_tokenizer(spec: str, eos: str | None) -> None:
    """Raise ValueError for an invalid tokenizer, before any text is read."""
    kind, _, size = spec.partition(":")
    if spec == "bytes":
        if eos is not None:
            raise ValueError(
                f"eos={eos!r}: the byte tokenizer always ends a document with id 0 (NUL); leave eos= out (--eos)"
            )
    elif kind == "bpe":
        if not (size.isascii() and size.isdecimal() and len(size) < 20 and 257 <= int(size) <= MOST_TOKENS):
            raise ValueError(
                f"tokenizer={short(spec)}: wanted bpe:N with a number of tokens N of at least 257 and at most "
                f"{MOST_TOKENS:,}, such as bpe:4096"
            )
    elif not _tokenizer_json(spec).exists():
        raise ValueError(
            f"tokenizer={spec!r}: no such file; wanted bytes, bpe:N or the path of a Hugging Face tokenizer.json"
        )
    else:
        expect_regular(_tokenizer_json(spec))


def _tokenizer_json(spec: str) -> Path:
    return Path(spec) / "tokenizer.json" if Path(spec).is_dir() else Path(spec)


def _train(spec: str, eos: str | None, corpus: Corpus, work: Path) -> tuple[Tokenizer, float]:
    """The tokenizer that is trained on the training split or kept, and the share of it."""
    content = load_saved_tokenizer(work)
    if content is None:
        # Apart where there is much text, as the counts of its words stay in the memory of the process.
        numbers = range(len(corpus.sources.pieces))

        def texts() -> Iterator[str]:
            for n in numbers:
                for split, blocks, document in split_texts(corpus, n):
                    if split == "train":
                        origin = lambda document=document: document.origin  # noqa: E731
                        yield from (span.text for span in text_spans(blocks, words_of_bpe, origin, 0, LEARNED))

        share = min(1.0, MOST_LEARNED / max(1, corpus.text_bytes))
        train = lambda: "{1!r}\n{0}".format(*learn_bpe(texts, int(spec.removeprefix("bpe:")), eos, share))  # noqa: E731
        content = train() if len(numbers) == 1 and sum(corpus.sources.sizes()) < SMALLEST else run_in_process(train)
        save_tokenizer(work, content)
    learned, _, text = content.partition("\n")
    return json_tokenizer(text, spec, USUAL_EOS[0] if eos is None else eos), float(learned)


class TooManyWords(Exception):
    """Raised where the counts of different words would take more than COUNT_BYTES."""


def learn_bpe(
    texts: Callable[[], Iterable[str]], vocab_size: int, eos: str | None, share: float = 1.0
) -> tuple[str, float]:
    """The tokenizer.json of a BPE, and the share of the texts that it is learned from, by COUNT_BYTES."""
    while True:
        with contextlib.suppress(TooManyWords):
            return train_bpe(_bounded(sample_evenly(share, texts())), vocab_size, eos).json, share
        share /= 2


def _bounded(texts: Iterable[str]) -> Iterator[str]:
    """The texts; raises TooManyWords."""
    words: set[str] = set()
    size = 0
    for text in texts:
        new = set(WORDS.findall(text)) - words
        words |= new
        size += sum(len(word.encode()) for word in new) * BYTES_A_BYTE + len(new) * BYTES_A_WORD
        if size > COUNT_BYTES:
            raise TooManyWords
        yield text


def sample_evenly(share: float, texts: Iterable[str]) -> Iterator[str]:
    """The texts that hold this share of all characters, spread evenly.

    >>> list(sample_evenly(0.5, ["ab", "cd", "ef", "gh"]))
    ['cd', 'gh']
    """
    total = selected = 0
    for text in texts:
        total += len(text)
        if share >= 1.0 or selected + len(text) <= share * total:
            selected += len(text)
            yield text


def tokenizer_of_file(spec: str, eos: str | None) -> Tokenizer:
    """The tokenizer "bytes", or that of a tokenizer.json; raises ValueError for one that is to be trained."""
    _check_tokenizer(spec, eos)
    if spec == "bytes":
        return byte_tokenizer()
    if spec.partition(":")[0] == "bpe":
        raise ValueError(f"tokenizer={spec!r}: wanted the one that made the tokens: bytes, or a tokenizer.json")
    try:
        path = _tokenizer_json(spec)
        loaded = path.name == TOKENIZER and (path.parent / "config.json").is_file()
        content = data.auto_tokenizer.read_tokenizer_json(path.parent, path.parent) if loaded else read_text_file(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{spec}: cannot be read as a tokenizer.json ({error})") from None
    assert content is not None  # the file is there
    return json_tokenizer(content, spec, eos)


def _write(work: Path, corpus: Corpus, built_tokenizer: Tokenizer, source: dict[str, Any]) -> dict[str, Any]:
    """Write all files of the corpus but meta.json, and return its entries."""
    remove_entry(work / "corpus")  # of a preparation that was killed
    folder = make_folder(work, "corpus")
    splits, sums = join(work / "encoded", len(corpus.sources.pieces), folder, built_tokenizer)
    if built_tokenizer.json:
        write_text(folder, "tokenizer.json", built_tokenizer.json)
    return {
        "format": FORMAT,
        "version": VERSION,
        **built_tokenizer.meta(),
        "splits": splits,
        "sums": sums,
        "source": source
        | {
            "documents": corpus.documents,
            "text_bytes": corpus.text_bytes,
            "sha256": corpus.sha256,
            "skipped": corpus.skipped,
            **({"skipped_files": dict(corpus.files)} if corpus.files else {}),
        },
    }
