"""The corpus of a run on a mixture: a folder whose meta.json names the corpora, and a copy of their tokenizer.

    meta.json       as of a prepared corpus (fzero/data/tokens.py), with the sums of its sources' counts, and `mixture`:
                    the name, the path and the SHA-256 of the meta.json of each source, and `url` if it is at one
    tokenizer.json  when the tokenizer is not bytes
    source-0 ...    what describes a source at a URL (fzero/data/remote_corpus.py), by its number: the source's path

The meta.json of a source has checksums of its content, so the SHA-256 of this one stands for all of it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from fzero.core.files import make_folder
from fzero.core.storage import absolute, is_url, naming, read_text, write_text
from fzero.core.text_parsing import json_text
from fzero.data.mixture import Mixture
from fzero.data.remote_corpus import link_url, read_remote_meta
from fzero.data.remote_tokens import READING, Reading
from fzero.data.tokens import FORMAT, SPLITS, VERSION, Tokens, open_tokens, read_meta


class SourceCorpus(NamedTuple):
    """A source as the mixture's meta.json names it."""

    name: str
    path: Path
    sha256: str  # of its meta.json


def digest(folder: str | Path) -> str:
    """The SHA-256 of the meta.json of a corpus, which identifies its content."""
    read_meta(folder)
    return hashlib.sha256((Path(folder) / "meta.json").read_bytes()).hexdigest()


def write_mixture(mixture: Mixture, out: Path) -> dict[str, Any]:
    """Write the corpus of a mixture in the new folder `out`; returns its meta.json.

    Raises ValueError naming a source that is no corpus of text, or has tokens of another tokenizer than the first one;
    nothing is written then.
    """
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
    with naming(out):
        make_folder(out.parent)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
            folder = make_folder(temporary, "corpus")
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
            write_text(folder, "meta.json", json_text(meta, f"{out}/meta.json", 2) + "\n")
            os.rename(folder, out)
    return meta


def tokenizer_of(folder: str | Path, meta: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one tokenizer from another: its ids and, unless tokens are bytes, its file."""
    text = "" if meta["tokenizer"] == "bytes" else read_text(folder, "tokenizer.json")
    if text is None:
        raise ValueError(
            f"{folder}/tokenizer.json: no such file, but meta.json names the tokenizer {meta['tokenizer']}; put it back"
        )
    return meta["vocab_size"], meta["eos"], hashlib.sha256(text.encode()).hexdigest()


def sources_of(folder: str | Path) -> list[SourceCorpus]:
    """The sources of a mixture's corpus; [] for a corpus that is none.

    Raises ValueError naming a source that is not what it was when the mixture was written.
    """
    sources = [
        SourceCorpus(entry["name"], Path(folder) / entry["path"], entry["sha256"])
        for entry in read_meta(folder).get("mixture", [])
    ]
    for source in sources:
        if digest(source.path) != source.sha256:
            raise ValueError(
                f"{source.path}: has changed since the run began, whose mixture has it as {source.name}; put that "
                "corpus back, or start a new run"
            )
    return sources


def open_sources(folder: str | Path, split: str, reading: Reading = READING) -> list[Tokens]:
    """The split of each source of a mixture's corpus; raises ValueError as `sources_of` and `open_tokens` do."""
    return [open_tokens(source.path, split, reading) for source in sources_of(folder)]
