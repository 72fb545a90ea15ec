"""The folder of a preparation that is not finished, beside the corpus that it makes: OUT.partial.

    lock             locked (flock) by the process that prepares
    settings.json    what the corpus is made of, and the digest of the sources: written after their first reading
    documents/       what the first reading said of each piece (fzero/data/document_scan.py)
    tokenizer.json   one that was trained
    encoded/         the pieces that are encoded (fzero/data/encoding.py)
    corpus/          the corpus, while the pieces are joined

The same preparation goes on from there after a kill. After an error of the user's in the first attempt it is removed,
as it is once the corpus is whole; what a kill leaves then, the next one that meets it removes (`clear`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fzero.core.files import make_folder, writing
from fzero.core.storage import naming, write_text
from fzero.core.text_parsing import parse_json, read_text_file
from fzero.data.tokenizers import sha256_of

SETTINGS, TOKENIZER = "settings.json", "tokenizer.json"
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
    """A context of the work folder of a preparation, which is new or is resumed.

    It is there after an interrupt, a kill and an OSError, such as that of a full disk; it is removed at the end, and
    after another error, unless it was resumed. Raises Busy if another process has it, and ValueError if it is of other
    settings.
    """
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
    """Remove what a kill left of the work folder of a corpus that was whole by then; returns whether there was that.

    A folder stays in which a process works, that has anything of another origin, or that is of another preparation.
    """
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
