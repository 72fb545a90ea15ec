"""The lock of a folder that a run writes: one process owns it at a time, and a second start is refused in one line.

FOLDER/lock.json names the owner: host, pid, when it began; its modification time is the heartbeat. A dead owner's lock
is taken over: at once if it was of this host, else once the heartbeat is SILENT_S seconds old, by as long a watch, so
the clocks of hosts need not agree. Only rank 0 owns the folder.

Why not filelock: its SoftFileLease watches each claim of another host for a whole lease, however old it is, and its
file names no owner.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fzero.core.files import make_folder, naming, open_to_write
from fzero.core.text_parsing import parse_json, read_text_file

LOCK = "lock.json"
BEAT_S = 5.0  # between two heartbeats
SILENT_S = 60.0  # without a heartbeat, an owner on another host is gone


class Owned(ValueError):
    """Another process owns the folder."""


class FolderLock:
    """A lock of this process, and the thread that renews its heartbeat."""

    def __init__(self, folder: Path, text: str, new_folders: list[Path]) -> None:
        self.folder, self.text = folder, text
        self.new_folders = new_folders  # the folders that taking the lock made
        self.release_event = threading.Event()
        threading.Thread(target=self.beat, name="fzero-lock", daemon=True).start()

    def beat(self) -> None:
        """Renew the heartbeat until `over`; end the process if the lock is lost."""
        while not self.release_event.wait(BEAT_S):
            self.check()
            with contextlib.suppress(OSError):  # a full or slow disk: tried again after the next pause
                os.utime(self.folder / LOCK, follow_symlinks=False)

    def check(self) -> None:
        """End the process if another has taken the lock over, or its folder was moved or removed."""
        if (lost := self.lost()) and not self.release_event.is_set():
            print(
                f"fzero: error: {self.folder}: {lost}; this process ends, and saves nothing",
                file=sys.stderr,
                flush=True,
            )
            _remove_empty([self.folder / "checkpoints", self.folder])  # of a save that began before
            os._exit(2)

    def lost(self) -> str:
        """Why the lock is not this process's any more; "" if it is, or cannot be read."""
        for pause in (min(1.0, BEAT_S), 0.0):  # a file system of a network may not show a file for a moment
            try:
                os.lstat(self.folder / LOCK)
                text = read_text_file(self.folder / LOCK)
            except FileNotFoundError:
                time.sleep(pause)
                continue
            except (OSError, ValueError):
                return ""
            new_owner = describe(parse(text))
            silent = f"as it heard nothing of this process for {SILENT_S:g} s"
            return "" if text == self.text else f"{new_owner} has taken this run over, {silent}"
        return f"{LOCK} is gone, as of a folder that was moved or removed; --resume --out FOLDER goes on where it is"


_LOCKS: dict[str, FolderLock] = {}


def acquire(folder: Path, say: Callable[[str], None] = print) -> bool:
    """Own `folder`, which is made if missing; whether it was there; raises Owned naming a live owner."""
    key = os.path.realpath(folder)
    if key not in _LOCKS:
        new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            _LOCKS[key] = FolderLock(folder, _acquire(folder, say), new_folders)
        except BaseException:
            _remove_empty(new_folders)
            raise
    return not _LOCKS[key].new_folders


def release(folder: Path) -> None:
    """Give up the lock of `folder`, and remove the folders that were made for it and are empty."""
    lock = _LOCKS.pop(os.path.realpath(folder))
    lock.release_event.set()
    with contextlib.suppress(OSError), _guarded(lock.folder, make=False) as fd:
        if _read(fd) == lock.text:
            os.unlink(lock.folder / LOCK)
    _remove_empty(lock.new_folders)


def release_all() -> None:
    """Give up every lock of this process."""
    for key in list(_LOCKS):
        release(_LOCKS[key].folder)


def expect_owned(folder: Path) -> None:
    """End this process if it has lost `folder`, before it writes there."""
    if (lock := _LOCKS.get(os.path.realpath(folder))) is not None:
        lock.check()


@contextlib.contextmanager
def owning(folder: Path) -> Iterator[bool]:
    """A context in which this process owns `folder`; its value says whether that was there before."""
    preexisting = acquire(folder)
    try:
        yield preexisting
    finally:
        release(folder)


def _acquire(folder: Path, say: Callable[[str], None]) -> str:
    entry, previous, begin = json.dumps(identity()) + "\n", None, 0.0
    while True:
        with _guarded(folder) as fd:
            text, beat = _read(fd), os.fstat(fd).st_mtime_ns
            owner = parse(text)
            if (
                owner is None
                or (is_local(owner) and not is_alive(owner))
                or _is_silent(folder, owner, beat, previous, begin)
            ):
                with naming(folder / LOCK):
                    os.ftruncate(fd, 0)
                    with open(fd, "wb", closefd=False) as file:  # writes all of it, or raises
                        file.write(entry.encode())
                    os.fsync(fd)
                return entry
        if is_local(owner) or (previous is not None and previous != (text, beat)):
            stop = f"stop it (kill {owner['pid']})" if is_local(owner) else "stop it there"
            fix = f"wait until it ends, {stop}, or name another folder (--out)"
            raise Owned(f"{folder}: is in use by {describe(owner)}; {fix}")
        if previous is None:
            previous, begin = (text, beat), time.monotonic()
            say(f"{folder}: was in use by {describe(owner)}; looking for its heartbeat, for {SILENT_S:g} s at most")
        time.sleep(min(1.0, SILENT_S / 10))


def _is_silent(folder: Path, owner: dict[str, Any], beat: int, previous: tuple[str, int] | None, begin: float) -> bool:
    """Whether an owner on another host has been silent: by the file system's times, or since we look."""
    if is_local(owner):
        return False
    if previous is not None:
        return previous[1] == beat and time.monotonic() - begin > SILENT_S
    with tempfile.NamedTemporaryFile(prefix=".lock-", dir=folder) as probe:  # its time is of the same clock
        return os.fstat(probe.fileno()).st_mtime_ns - beat > SILENT_S * 1e9


# ---- the owner ----


def identity() -> dict[str, Any]:
    """The content of lock.json for this process; a pid is of one boot of a host, in one namespace."""
    boot = pids = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pids = os.readlink("/proc/self/ns/pid")
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    host_ids = {"host": platform.node(), "boot": boot, "pids": pids}
    return {**host_ids, "pid": os.getpid(), "started": started(os.getpid()), "since": began}


def parse(text: str) -> dict[str, Any] | None:
    """The owner that a lock's text names; None for none."""
    try:
        owner = parse_json(text, LOCK)
        types = {"host": str, "boot": str, "pids": str, "pid": int, "started": str, "since": str}
        return owner if all(type(owner[key]) is kind for key, kind in types.items()) else None
    except (ValueError, KeyError):
        return None


def describe(owner: dict[str, Any] | None) -> str:
    """An owner in words."""
    if owner is None:
        return "another process"
    return f"process {owner['pid']} on {owner['host']} since {owner['since']}"


def is_local(owner: dict[str, Any]) -> bool:
    """Whether the owner's pid is one that this process can look up."""
    local = identity()
    return all(owner[key] == local[key] for key in ("host", "boot", "pids"))


def is_alive(owner: dict[str, Any]) -> bool:
    """Whether the owner, a process of this host, lives."""
    return started(owner["pid"]) == owner["started"] != ""


def started(pid: int) -> str:
    """When a process of this host began, in the kernel's ticks; "" if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in ("Z", "X") else fields[18]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return ""
    except (OSError, ValueError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):
        return ""
    return "unknown"


# ---- the file ----


@contextlib.contextmanager
def _guarded(folder: Path, *, make: bool = True) -> Iterator[int]:
    """The open lock file, while no other process reads or changes it."""
    path = folder / LOCK
    while True:
        if make:
            make_folder(folder)
        try:
            fd = open_to_write(path, "update", make=make)
        except FileNotFoundError:
            if make:
                continue  # an owner that ended removed the folder
            raise
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                    raise  # else a file system without locks of files: then two starts must not be of one instant
            with contextlib.suppress(FileNotFoundError):
                if os.lstat(path).st_ino == os.fstat(fd).st_ino:
                    yield fd
                    return
        finally:
            os.close(fd)


def _read(fd: int) -> str:
    return os.pread(fd, 1 << 16, 0).decode(errors="replace")


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders that are empty, the innermost first."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
