"""Direct reads and writes of files, in blocks, by a few threads, and the file of disk settings.

They bypass the page cache and release the interpreter's lock. Requests are served by priority, then in order of
arrival; a large one is cut into blocks that several threads transfer.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import gpu
from fzero.core.files import make_folder, open_to_write, replacing
from fzero.core.storage import PAGE, is_url, user_folder
from fzero.core.text_parsing import parse_toml, read_text_file

# Priorities: the data that the computation needs next comes first.
NEXT, LATER = 0, 1
# What an open or a write with O_DIRECT fails with where a file system lacks it.
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class DiskSettings(NamedTuple):
    """Block size and threads of the transfers to a disk; `fzero bench disk` finds the best for a disk."""

    block_bytes: int = 16 << 20  # bytes of one operation: with 2 threads, enough to keep a disk busy at little CPU time
    readers: int = 2  # threads
    writers: int = 2

    def share(self, ranks: int) -> DiskSettings:
        """The settings of each of `ranks` processes that share the disk: its threads are divided among them."""
        return self._replace(readers=max(1, self.readers // ranks), writers=max(1, self.writers // ranks))


class DiskTraffic(NamedTuple):
    """The bytes that a DiskIO has moved so far, and the time spent waiting for them."""

    read_bytes: int = 0
    written_bytes: int = 0
    waited_s: float = 0.0  # seconds, of the thread that made the DiskIO


class DiskRequest:
    """A transfer under way; `wait()` returns when it is done, or raises its error."""

    def __init__(self, disk: DiskIO | None, blocks: int) -> None:
        self.disk, self.remaining = disk, blocks
        self.error: Any = None  # the Exception of a transfer that failed
        self.next: Callable[[], None] | None = None
        # `remaining`, `error` and `next` change together, under the lock: the last block and `call_at_end` may meet.
        self.lock = threading.Lock()
        self.done = threading.Event()
        if not blocks:
            self.done.set()

    def call_at_end(self, work: Callable[[], None]) -> None:
        """Call `work` in the thread that ends the transfer, unless it failed; `wait` raises its error."""
        with self.lock:
            if self.remaining:
                self.next = work
                return
        if self.error is None:
            work()

    def end_block(self, error: Exception | None) -> bool:
        """Note the end of one block; returns whether it was the last one."""
        with self.lock:
            self.error = self.error or error
            self.remaining -= 1
            if self.remaining:
                return False
            # Outside the lock, as it may take long; `done` is set after it.
            work, self.next = self.next, None
        if work is not None and self.error is None:
            try:
                work()
            except Exception as failure:
                self.error = failure.with_traceback(None)
        return True

    def wait(self) -> None:
        """Wait until the transfer is done; raises its error, usually an OSError."""
        if not self.done.is_set():
            begin = time.perf_counter()
            self.done.wait()
            if self.disk is not None and threading.get_ident() == self.disk.owner:
                # Of the thread that made the DiskIO alone: only its waiting makes a step longer.
                self.disk.waited_s += time.perf_counter() - begin
        if self.error is not None:
            raise self.error


class DiskIO:
    """Threads that move bytes between tensors and files.

    Reads and writes have threads of their own, so that both run at the same time.
    """

    def __init__(self, settings: DiskSettings = DiskSettings()) -> None:  # noqa: B008
        self.settings = settings
        self.lock = threading.Lock()
        self.queues: dict[bool, list] = {False: [], True: []}  # by whether it is a write
        # A token for each queued block, and one for each thread when it must end: a block wakes one thread.
        self.tokens: dict[bool, SimpleQueue] = {False: SimpleQueue(), True: SimpleQueue()}
        # Breaks ties of equal priority, in order of arrival; the heap never compares functions.
        self.order = itertools.count()
        self.in_flight = 0  # requests
        self.owner = threading.get_ident()
        self.read_bytes, self.written_bytes, self.waited_s, self.closed = 0, 0, 0.0, False
        self.device = gpu.current_device()  # for the threads, which copy to it
        self.kinds = [False] * settings.readers + [True] * settings.writers
        self.threads = [
            threading.Thread(target=self._serve, args=(write,), daemon=True, name="fzero-disk") for write in self.kinds
        ]
        for thread in self.threads:
            thread.start()

    def traffic(self) -> DiskTraffic:
        """The traffic so far."""
        return DiskTraffic(self.read_bytes, self.written_bytes, self.waited_s)

    def busy(self) -> bool:
        """Whether a request is under way, so that memory may be returned soon."""
        return self.in_flight > 0

    def read(self, fd: int, raw: Tensor, offset: int, *, priority: int = NEXT) -> DiskRequest:
        """Start to read `raw` (uint8, contiguous; whole pages for direct files) from a file at `offset`."""
        return self._submit(False, fd, raw, offset, priority)

    def write(
        self,
        fd: int,
        raw: Tensor,
        offset: int,
        *,
        priority: int = NEXT,
        note: Callable[[memoryview], None] | None = None,
    ) -> DiskRequest:
        """Start to write `raw` to a file at `offset`; `raw` may not change until the request is done.

        note: called with each block before it is written, by the thread that writes it.
        """
        return self._submit(True, fd, raw, offset, priority, note)

    def run(self, work: Callable[[], int], *, write: bool, priority: int = NEXT) -> DiskRequest:
        """Have a thread call `work`, which returns the number of bytes that it moved."""
        pending = DiskRequest(self, 1)
        self._queue(write, [work], pending, priority)
        return pending

    def _submit(
        self,
        write: bool,
        fd: int,
        raw: Tensor,
        offset: int,
        priority: int,
        note: Callable[[memoryview], None] | None = None,
    ) -> DiskRequest:
        view, block = memoryview(raw.numpy()), self.settings.block_bytes
        starts = range(0, len(view), block)
        pending = DiskRequest(self, len(starts))
        self._queue(
            write,
            [_transfer(write, fd, view[start : start + block], offset + start, note) for start in starts],
            pending,
            priority,
        )
        return pending

    def _queue(self, write: bool, works: list[Callable[[], int]], pending: DiskRequest, priority: int) -> None:
        assert not self.closed, "the disk's threads have been ended"
        with self.lock:
            self.in_flight += bool(works)
            for work in works:
                heapq.heappush(self.queues[write], (priority, next(self.order), work, pending))
        for _ in works:
            self.tokens[write].put(None)

    def _serve(self, write: bool) -> None:
        # A new thread is on device 0, whichever its rank uses.
        gpu.select_device(self.device)
        queue, tokens = self.queues[write], self.tokens[write]
        while True:
            # Outside the lock, so that a thread without work blocks nobody.
            tokens.get()
            with self.lock:
                if not queue:
                    return
                _, _, work, pending = heapq.heappop(queue)
            byte_count, error = 0, None
            try:
                # The other blocks of a request that failed are not transferred.
                if pending.error is None:
                    byte_count = work()
            except Exception as failure:
                error = failure.with_traceback(None)  # the traceback's frames would hold the buffer
            del work  # and with it the buffer
            last = pending.end_block(error)
            with self.lock:
                self.in_flight -= last
                if write:
                    self.written_bytes += byte_count
                else:
                    self.read_bytes += byte_count
            # After the counters, so that who waited sees this request's bytes.
            if last:
                pending.done.set()

    def close(self) -> None:
        """End the threads, after all queued requests."""
        if not self.closed:
            self.closed = True
            for write in self.kinds:
                self.tokens[write].put(None)
        for thread in self.threads:
            thread.join()


def _transfer(
    write: bool, fd: int, view: memoryview, offset: int, note: Callable[[memoryview], None] | None = None
) -> Callable[[], int]:
    def run() -> int:
        if note is not None:
            note(view)
        if write:
            write_range(fd, view, offset)
        elif (done := read_range(fd, view, offset)) < len(view):
            raise _end_error(offset + done, len(view) - done)
        return len(view)

    return run


def read_range(fd: int, view: memoryview, offset: int, *, direct: bool = True) -> int:
    """Read the bytes at `offset` of a file into `view`; returns their number, smaller only at the file's end."""
    done = 0
    while done < len(view) and not (direct and done % PAGE):  # a direct read ends inside of a page where the file does
        # A call may transfer less than asked for, at a signal or at 2 GB.
        count = os.preadv(fd, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def write_range(fd: int, view: memoryview, offset: int) -> None:
    """Write `view` to a file at `offset`; raises OSError."""
    done = 0
    while done < len(view):
        count = os.pwritev(fd, [view[done:]], offset + done)
        if not count:
            raise _end_error(offset + done, len(view) - done)
        done += count


def _end_error(end: int, lacking: int) -> OSError:
    return OSError(errno.EIO, f"the file ends at byte {end:,}, {lacking:,} bytes too early")


def allocate_space(fd: int, offset: int, size: int) -> None:
    """Have the disk keep space for `size` bytes of a file from `offset` on."""
    if size:
        os.posix_fallocate(fd, offset, size)


def open_direct(path: Path, *, write: bool = True, make: bool = False) -> int | None:
    """A file descriptor for direct transfers, or None if they are refused."""
    try:
        if write:
            return open_to_write(path, "update", direct=True, make=make)
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno in REFUSED:
            return None
        raise


def mount_point(path: str | Path) -> str:
    """The folder at which the file system of `path`, or of its first parent that exists, is mounted."""
    folder = Path(os.path.realpath(path))
    while not folder.exists():
        folder = folder.parent
    device = folder.stat().st_dev
    while folder != folder.parent and folder.parent.stat().st_dev == device:
        folder = folder.parent
    return str(folder)


def file_system(mount: str) -> str:
    """The kind of the file system mounted at `mount`, such as "ext4", or ""."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    kinds = [
        kind
        for _, folder, kind, *_ in map(str.split, lines)
        if re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), folder) == mount
    ]
    return kinds[-1] if kinds else ""


def serves_direct(folder: Path) -> bool:
    """Whether files in the existing folder `folder` take direct transfers; it tries one."""
    path = folder / f".direct-{os.getpid()}"
    try:
        fd = open_direct(path, make=True)
        if fd is None:
            return False
        try:
            # Some file systems take the open and refuse the write, so one page is written, at an aligned address.
            memory = torch.zeros(2 * PAGE, dtype=torch.uint8)
            skip = -memory.data_ptr() % PAGE
            return os.pwritev(fd, [memoryview(memory.numpy())[skip : skip + PAGE]], 0) == PAGE
        except OSError as error:
            if error.errno in REFUSED:
                return False
            raise
        finally:
            os.close(fd)
    finally:
        path.unlink(missing_ok=True)


# What sets a disk, for errors: in a program, and of a run.
FOLDER = "fzero.Nvme(folder); --nvme of a run"
BUFFERS = "buffer_bytes of fzero.Nvme; nvme.buffer_mb or --buffer-mb of a run"


def config_file() -> Path:
    """The user's file of settings: $XDG_CONFIG_HOME/fzero/config.toml, by default in ~/.config."""
    return user_folder("XDG_CONFIG_HOME") / "config.toml"


def _read_config() -> tuple[str, dict[str, Any]]:
    path = config_file()
    try:
        if not os.path.lexists(path):
            return "", {}
        text = read_text_file(path)
        config = parse_toml(text, str(path))
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; correct it, or delete it and run `fzero bench disk` again") from None
    disks = config.get("disk", {})
    if not isinstance(disks, dict) or not all(isinstance(entry, dict) for entry in disks.values()):
        raise ValueError(
            f'{path}: disk must be tables such as [disk."/mnt/nvme"]; correct it, or delete it and run `fzero '
            "bench disk` again"
        )
    return text, config


def load_settings(folder: str | Path) -> DiskSettings:
    """The DiskSettings that `fzero bench disk` measured for the disk of `folder`, or the default."""
    if is_url(folder):
        return DiskSettings()
    mount = mount_point(folder)
    entry = _read_config()[1].get("disk", {}).get(mount, {})
    values = {name: entry[name] for name in DiskSettings._fields if name in entry}
    for name, value in values.items():
        step = PAGE if name == "block_bytes" else 1
        if type(value) is not int or value < 1 or value % step:
            allowed = f"a multiple of {PAGE}" if step > 1 else "a whole number from 1"
            raise ValueError(
                f'{config_file()}: {name} of [disk."{mount}"] is {value!r}; it must be {allowed}; run `fzero '
                "bench disk` again"
            )
    return DiskSettings(**values)


def save_settings(mount: str, settings: DiskSettings, gbs: dict[str, float]) -> Path:
    """Write the settings of a disk, with its GB/s by kind of transfer, into the user's file; returns its path."""
    path = config_file()
    text, config = _read_config()
    values: dict[str, Any] = settings._asdict() | {f"{kind}_gbs": round(rate, 3) for kind, rate in gbs.items()}
    values["measured"] = date.today()
    header = f"[disk.{json.dumps(mount, ensure_ascii=False)}]"
    remainder = re.sub(rf"^{re.escape(header)}[^\n]*\n(?:(?!\[)[^\n]*\n)*", "", f"{text}\n", flags=re.MULTILINE).strip()
    new_text = "\n".join(
        [*([remainder, ""] if remainder else []), header, *(f"{name} = {value}" for name, value in values.items()), ""]
    )
    expected = {**config, "disk": {**config.get("disk", {}), mount: values}}
    try:
        matches = parse_toml(new_text, str(path)) == expected
    except ValueError:
        matches = False
    if not matches:
        raise ValueError(
            f"{path}: has {header} in a form that cannot be replaced; delete it there and run `fzero bench disk` again"
        )
    make_folder(path.parent)
    with replacing(path) as file:
        file.write(new_text.encode())
    return path
