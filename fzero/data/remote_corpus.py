"""A corpus whose tokens stay in an object store: a folder that describes it.

    meta.json              as of the prepared corpus at the URL, and `remote`: the URL, and the SHA-256 of its meta.json
    train.docs val.docs    copies, as are the checksums and the tokenizer
    train.sums val.sums
    tokenizer.json

The tokens of SPLIT.bin are read when they are asked for: fzero/data/remote_tokens.py.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from fzero.core.arguments import checked
from fzero.core.crc32c import crc32c
from fzero.core.files import make_folder, writing
from fzero.core.object_store import Objects
from fzero.core.storage import is_url, naming, write_text
from fzero.core.text_parsing import json_text
from fzero.data.checksums import CHUNK, FIX, split_sums
from fzero.data.tokens import PREPARE_AGAIN, SPLITS, read_meta, token_dtype

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
    with naming(out):
        make_folder(out.parent)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
            folder = make_folder(temporary, "corpus")
            for split in SPLITS:
                copy_split(objects, meta, split, folder)
            if meta["tokenizer"] != "bytes":
                write_text(folder, "tokenizer.json", read_object(objects, "tokenizer.json").decode())
            linked_meta = meta | {"remote": {"url": url, "sha256": sha256}}
            write_text(folder, "meta.json", json_text(linked_meta, f"{out}/meta.json", 2) + "\n")
            expect_unchanged(folder)
            os.rename(folder, out)
    return linked_meta


def read_remote_meta(url: str) -> dict[str, Any]:
    """The meta.json of the corpus at a URL; raises ValueError if it is none that can be read there."""
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
    """Copy what a split has beside its tokens into `folder`, compared with its checksums, and see that the tokens are
    there."""
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
    """Raise ValueError if the corpus in `folder` reads its tokens at a URL that has another corpus by now."""
    remote = read_meta(folder).get("remote")
    if remote is not None and remote_digest(remote["url"]) != remote["sha256"]:
        raise ValueError(f"{remote['url']}: has changed since the run began; put that corpus back, or start a new run")
