"""The manifest of a checkpoint: its rename is the commit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fzero
from fzero.checkpoint.layout import ChunkLayout
from fzero.core.storage import Damaged, is_url, read_text, write_text

FORMAT, VERSION = "fzero-checkpoint", 2


MANIFEST, ARRAYS = "manifest.json", "arrays"


Folder = str | Path  # a local folder, or the URL of one that tensorstore knows


class Leaf(NamedTuple):
    """A leaf of a checkpoint, as the manifest describes it: shape, dtype, chunk layout, spec, digest and checksums."""

    layout: ChunkLayout
    spec: str  # the Spec by which the run that saved it sharded it
    digest: str  # of its elements, the same on every mesh: see fzero/core/digest.py
    sums: list[int]  # of each part: the crc32c of its header, or of its chunk

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole leaf."""
        return self.layout.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return self.layout.dtype

    def table(self) -> dict[str, Any]:
        """The leaf's entry in the manifest, as JSON can hold it."""
        where = self.layout
        return {
            "shape": list(where.shape),
            "dtype": str(where.dtype).removeprefix("torch."),
            "spec": self.spec,
            "grid": list(where.grid),
            "chunk": list(where.chunk),
            "compress": where.compress,
            "digest": self.digest,
            "sums": self.sums,
        }


def parse_leaf(table: dict[str, Any]) -> Leaf:
    """The Leaf of an entry of a manifest."""
    dtype = getattr(torch, table["dtype"])
    where = ChunkLayout(tuple(table["shape"]), dtype, tuple(table["grid"]), tuple(table["chunk"]), table["compress"])
    return Leaf(where, table["spec"], table["digest"], table["sums"])


def write_manifest(path: Folder, arrays: str, leaves: dict[str, Leaf], *, step: int, config: Any, mesh: dict[str, int]) -> None:
    """Write the manifest of the checkpoint at `path`, durably, which makes the checkpoint complete."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "config": config,
        "versions": {"fzero": fzero.__version__, "torch": torch.__version__},
        "mesh": mesh,
        "arrays": arrays,
        "leaves": {name: leaf.table() for name, leaf in leaves.items()},
    }
    write_text(path, MANIFEST, manifest_text({**body, "sha256": _digest(body)}))


def manifest_text(body: dict[str, Any]) -> str:
    """The text of a manifest."""
    return json.dumps(body, indent=1)


def read_manifest(path: Folder) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`, verified: a dict of step, config, versions, mesh, and leaves by name.

    Raises ValueError naming the file if it is missing or of another format or version, and Damaged if its checksum does
    not agree.

    >>> import tempfile, torch
    >>> from fzero import checkpoint
    >>> path = checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)}, step=7)
    >>> manifest = checkpoint.read_manifest(path)
    >>> manifest["step"], list(manifest["leaves"])
    (7, ['w'])
    """
    file = join(path, MANIFEST)
    try:
        text = read_text(path, MANIFEST)
    except UnicodeDecodeError as error:
        raise Damaged(f"{file}: damaged: not a text ({error})") from None
    if text is None:
        raise ValueError(f"{file}: no such file; {path} is not a complete checkpoint")
    try:
        body = json.loads(text)
        digest = body.pop("sha256", None)
    except (ValueError, AttributeError, TypeError) as error:
        raise Damaged(f"{file}: damaged: not a JSON object ({error})") from None
    if body.get("format") != FORMAT or digest != _digest(body):
        raise Damaged(f"{file}: damaged, or not a manifest of fzero: its checksum does not agree with its content")
    if body["version"] != VERSION:
        raise ValueError(f"{file}: version {body['version']}; this fzero ({fzero.__version__}) reads version {VERSION}")
    return body


def _digest(body: dict) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def join(folder: Folder, *names: str) -> Folder:
    """The path or URL of something below a folder."""
    return "/".join((str(folder).rstrip("/"), *names)) if is_url(folder) else Path(folder, *names)
