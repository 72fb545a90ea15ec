"""A checkpoint being written: its state, its outcome, and the errors of its threads."""

from __future__ import annotations

import threading
import time
import traceback
from concurrent.futures import Future
from typing import Any, NamedTuple

from fzero.checkpoint.layout import RankParts
from fzero.checkpoint.manifest import Folder
from fzero.checkpoint.part_file import PartFile
from fzero.sharding import Spec


class Saved(NamedTuple):
    """A checkpoint that has been completed, as `Writer.wait` and `Writer.poll` return it.

    >>> import tempfile
    >>> writer = fzero.checkpoint.Writer(tempfile.mkdtemp())
    >>> writer.save({"w": torch.ones(2)}, step=10)
    >>> saved = writer.wait()
    >>> saved.step, saved.path.name, saved.nbytes
    (10, 'step-00000010', 8)
    >>> writer.close()
    """

    step: int
    path: Folder
    blocked_s: float  # seconds that `save` took
    total_s: float  # seconds until the manifest was written
    nbytes: int  # bytes that this rank wrote


class SaveFailed(OSError):
    """Raised if a checkpoint could not be written; the earlier ones are unchanged.

    >>> import tempfile
    >>> checkpoint_dir = tempfile.mkdtemp()
    >>> fzero.checkpoint.step_folder(checkpoint_dir, 10).touch()  # a file in the place of the folder
    >>> fzero.checkpoint.save(checkpoint_dir, {"w": torch.ones(2)}, step=10)
    Traceback (most recent call last):
    fzero.checkpoint.save_state.SaveFailed: ...step-00000010: the checkpoint could not be written: ...
    """


class Save:
    """A checkpoint being written."""

    def __init__(self, step: int, config: Any) -> None:
        self.step, self.config, self.began = step, config, time.perf_counter()
        self.target, self.go, self.staged, self.over = (threading.Event() for _ in range(4))
        self.arrays, self.blocked_s, self.nbytes = "", 0.0, 0
        self.error: BaseException | None = None
        self.early = threading.Lock()
        self.layouts: dict[str, tuple[RankParts, Spec]] = {}
        self.parts: dict[str, list[PartFile]] = {}
        self.tasks: list[Future] = []
        self.outcome: Saved | SaveFailed | None = None


def wait_for_all(tasks: list[Future]) -> None:
    """Wait for all tasks, and free the memory held by tracebacks of failed ones."""
    for task in tasks:
        error = task.exception()
        if error is not None:
            traceback.clear_frames(error.__traceback__)


def error_line(error: BaseException) -> str:
    """Format an error as one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return " ".join(str(error).split()) or type(error).__name__
