"""What a frozen reference says of a corpus of pairs: the log-probability of each answer, beside the corpus.

reference-DIGEST/train.log_probs, val.log_probs    little-endian float64, one of each document
reference-DIGEST/meta.json                         digest: of the reference; sha256 of both files
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

import numpy as np

from fzero.core.files import make_folder, writing
from fzero.core.foreign import expect_entries, read_json
from fzero.core.storage import write_text
from fzero.data.tokens import SPLITS, read_meta

NUMBERS = np.dtype("<f8")


def reference_folder(corpus: Path, digest: str) -> Path:
    """The folder of what the reference of this digest says."""
    return corpus / f"reference-{digest}"


def write_reference(corpus: Path, digest: str, log_probs: dict[str, np.ndarray]) -> None:
    """Write the log-probabilities [documents] of each split; the folder appears when it is complete."""
    with tempfile.TemporaryDirectory(prefix=".reference-", dir=corpus) as temporary:
        folder = make_folder(temporary, "reference")
        sums = {}
        for split in SPLITS:
            content = log_probs[split].astype(NUMBERS).tobytes()
            path = folder / f"{split}.log_probs"
            with writing(path, "new") as file:
                file.write(content)
            sums[split] = hashlib.sha256(content).hexdigest()
        write_text(folder, "meta.json", json.dumps({"digest": digest, "sha256": sums}, indent=2) + "\n")
        os.rename(folder, reference_folder(corpus, digest))


def read_reference(corpus: str | Path, split: str, digest: str) -> np.ndarray:
    """The log-probabilities of a split's documents, float64 [documents].

    Raises ValueError naming a file that is missing or damaged, with the references that are there.
    """
    folder = reference_folder(Path(corpus), digest)
    if not (folder / "meta.json").is_file():
        there = sorted(path.name.removeprefix("reference-") for path in Path(corpus).glob("reference-*"))
        raise ValueError(
            f"{folder}: no such folder, so what the reference says of the pairs is not known (dpo.reference); there is "
            f"{', '.join(there) or 'none'}; a new run computes it"
        )
    meta, path = read_json(folder / "meta.json"), folder / f"{split}.log_probs"
    expect_entries(meta, {"digest": str, "sha256": dict}, str(folder / "meta.json"))
    content = path.read_bytes() if path.is_file() else b""
    count = read_meta(corpus)["splits"][split]["documents"]
    if hashlib.sha256(content).hexdigest() != meta["sha256"].get(split) or len(content) != count * NUMBERS.itemsize:
        raise ValueError(f"{path}: missing, damaged, or of another corpus; remove {folder}, and a new run computes it")
    return np.frombuffer(content, NUMBERS)
