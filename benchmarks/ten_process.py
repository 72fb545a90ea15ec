"""What each process of ten.py's parts does, rows or tests: it ends with the one that started it, and knows an error
behind which CUDA is of no use any more."""

from __future__ import annotations

import contextlib
import ctypes
import signal

STICKY = ("illegal memory access", "device-side assert", "launch failure", "misaligned address", "illegal instruction",
          "unspecified launch", "CUDA error", "cudaError")  # fmt: skip


def is_sticky(text: str) -> bool:
    """Whether CUDA is of no use in this process behind an error that says this."""
    return any(words in text for words in STICKY)


def die_with_parent() -> None:
    """Have Linux end this process when the one that started it ends, however that was."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
