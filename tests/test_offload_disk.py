"""The memory and the threads of offload: a buffer pool that never exceeds its size, a disk that serves by priority and
says what failed."""

import errno
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fzero.core import HUGE, PAGE, round_to_pages
from fzero.offload import BufferPool, DiskIO, DiskSettings, open_direct, serves_direct
from fzero.offload import disk_io as disk_module
from fzero.offload.disk_io import LATER, NEXT
from fzero.planner.calibrate import disk as bench

ALL = (HUGE,)  # the shape that takes all of a small pool
WAIT_S = 20


@pytest.fixture
def buffers():
    return BufferPool(HUGE)


@pytest.fixture
def disk():
    """One thread of each kind, so that order is certain."""
    disk = DiskIO(DiskSettings(block_bytes=2 * PAGE, readers=1, writers=1))
    yield disk
    disk.close()


@pytest.fixture
def file(tmp_path):
    """A descriptor of a file of 8 pages, and its bytes."""
    data = torch.randint(0, 256, (8 * PAGE,), dtype=torch.uint8)
    path = tmp_path / "data"
    path.write_bytes(data.numpy().tobytes())
    fd = os.open(path, os.O_RDWR)
    yield fd, data
    os.close(fd)


def full(buffers):
    """Whether nothing can be taken from it."""
    try:
        buffers.allocate((1,), torch.uint8)
    except ValueError:
        return True
    return False


def test_a_buffer_has_the_shape_and_dtype_asked_for_and_whole_pages_below(buffers):
    raw, view = buffers.allocate((3, 1001), torch.bfloat16)
    assert view.shape == (3, 1001) and view.dtype == torch.bfloat16 and view.is_contiguous()
    assert (
        len(raw) == round_to_pages(3 * 1001 * 2) == 2 * PAGE
        and raw.data_ptr() == view.data_ptr()
        and raw.data_ptr() % PAGE == 0
    )
    view.fill_(1)
    assert raw[:2].tolist() == [0x80, 0x3F]


@pytest.mark.parametrize("shape", [(), (0,), (5, 0), (1,), (4096,), (4097,)])
def test_any_shape_takes_at_least_a_page(buffers, shape):
    buffer = buffers.allocate(shape, torch.uint8)
    assert buffer.view.shape == shape and len(buffer.raw) >= PAGE and buffers.lent == len(buffer.raw)


def test_the_arena_is_in_huge_pages_where_the_system_has_them():
    kernel = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not kernel.is_file() or "[never]" in kernel.read_text():
        pytest.skip(f"{kernel} says never, or is not there")
    buffers = BufferPool(4 * HUGE)
    address = buffers.allocate((1,), torch.uint8).raw.data_ptr()
    mapped = {}
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split()[0]
            if not first.endswith(":"):
                start, end = (int(x, 16) for x in first.split("-"))
                inside = start <= address < end
            elif inside:
                mapped[first] = line.split()[1:]
    if "hg" not in mapped["VmFlags:"]:
        pytest.fail(f"the memory does not ask for huge pages: {mapped['VmFlags:']}")
    assert "sh" not in mapped["VmFlags:"], "shared memory has small pages on most systems"
    assert int(mapped["Rss:"][0]) * 1024 >= buffers.size, "the memory was not touched"


def cuda(monkeypatch, code):
    """A stand-in for CUDA that notes what is pinned, and answers with `code`."""
    pinned = {}
    register = lambda address, size, flags: pinned.update({address: size}) or code  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    )
    return pinned


def test_the_memory_is_pinned_while_it_is_there(monkeypatch):
    pinned = cuda(monkeypatch, 0)
    buffers = BufferPool(HUGE + 1)
    kept = buffers.allocate((5,), torch.float32).view
    (address,) = pinned
    assert pinned == {address: 2 * HUGE} and address % HUGE == 0 and address <= kept.data_ptr() < address + 2 * HUGE
    del buffers
    gc.collect()
    assert pinned
    del kept
    assert not pinned


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch):
    cuda(monkeypatch, 2)
    with pytest.raises(
        ValueError, match=r"cannot pin the 2,097,152 bytes of the offload buffers \(error 2\); .*buffer_mb"
    ):
        BufferPool(HUGE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_reads_and_writes_the_arena_without_waiting():
    buffer = BufferPool(HUGE).allocate((1000,), torch.float32)
    assert buffer.view.is_pinned()
    buffer.view.fill_(3)
    there = buffer.view.to("cuda", non_blocking=True)
    back = (2 * there).to("cpu")
    assert bool((back == 6).all())


def test_the_pool_never_lends_more_than_its_size(buffers):
    held = []
    with pytest.raises(
        ValueError,
        match=r"2,097,152 bytes, of which 1,966,080 are in use, and 196,608 more are needed at once; .*buffer_mb",
    ):
        while True:
            held.append(buffers.allocate((192 << 10,), torch.uint8))
    assert len(held) == 10 and buffers.lent == buffers.peak == 10 * (192 << 10) <= buffers.size
    places = sorted(buffer.raw.data_ptr() for buffer in held)
    assert all(after - before >= 192 << 10 for before, after in itertools.pairwise(places)), "two buffers share memory"
    with pytest.raises(ValueError, match=r"2,097,152 bytes, .* 2,101,248 more"):
        buffers.allocate((HUGE + 1,), torch.uint8)


def test_a_pool_that_is_not_fixed_grows_by_what_is_lacking():
    buffers = BufferPool(HUGE, fixed=False)
    lent = [buffers.allocate((size,), torch.uint8) for size in (HUGE, 3 * HUGE + 1, 1000)]
    assert buffers.size == 5 * HUGE, "what the last region has left is lent first"
    for i, buffer in enumerate(lent):
        buffer.view.fill_(i)
    assert [int(buffer.view.min()) for buffer in lent] == [int(buffer.view.max()) for buffer in lent] == [0, 1, 2]
    assert all(buffers.holds(buffer.view.untyped_storage()) for buffer in lent)
    assert not buffers.holds(torch.empty(8).untyped_storage())
    del lent, buffer
    assert len(buffers.allocate((4 * HUGE,), torch.uint8).raw) == 4 * HUGE and buffers.size == 5 * HUGE
    first, second = buffers.allocate((HUGE,), torch.uint8), buffers.allocate((HUGE,), torch.uint8)
    assert buffers.holds(first.raw.untyped_storage()) and buffers.holds(second.raw.untyped_storage())
    assert buffers.size == 5 * HUGE


@pytest.mark.parametrize(
    "share",
    [
        lambda b: b.view,
        lambda b: b.raw[100:200],
        lambda b: b.view[3:5].view(torch.bfloat16),
        lambda b: b.view.view(64, -1).T,
        lambda b: b.view.numpy(),
        lambda b: memoryview(b.raw.numpy())[8:16],
        lambda b: b.view.detach(),
    ],
    ids=["view", "slice", "dtype", "transpose", "numpy", "memoryview", "detach"],
)
def test_memory_is_returned_when_the_last_that_shares_it_is_gone(buffers, share):
    kept = share(buffers.allocate((HUGE // 4,), torch.float32))
    assert full(buffers)
    del kept
    assert not full(buffers)


def test_memory_is_returned_from_another_thread(buffers):
    held = [buffers.allocate(ALL, torch.uint8)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert len(buffers.allocate(ALL, torch.uint8).raw) == HUGE


def test_memory_is_returned_by_a_garbage_collection_inside_take(buffers):
    # A cycle holds the buffer, and the collection that finds it runs while the buffer pool looks for room.
    cycle = [buffers.allocate(ALL, torch.uint8)]
    cycle.append(cycle)
    del cycle

    def busy():
        gc.collect()
        return False

    assert len(buffers.allocate(ALL, torch.uint8, busy).raw) == HUGE


def test_pieces_that_are_returned_merge(buffers):
    pieces = [buffers.allocate((HUGE // 4,), torch.uint8) for _ in range(4)]
    for i in (2, 0, 3, 1):
        pieces[i] = None
        if i == 0:  # two quarters are free, and apart
            with pytest.raises(ValueError, match="more are needed"):
                buffers.allocate((HUGE // 2,), torch.uint8)
    assert len(buffers.allocate(ALL, torch.uint8).raw) == HUGE and buffers.lent == HUGE


def test_take_waits_while_the_disk_is_busy(buffers, disk, file):
    fd, _ = file
    gate = threading.Event()
    disk.run(lambda: gate.wait(WAIT_S) and 0, write=True)
    buffer = buffers.allocate(ALL, torch.uint8)
    disk.write(fd, buffer.raw[:PAGE], 0)
    del buffer  # the disk has it alone
    opener = threading.Timer(0.2, gate.set)
    opener.start()
    assert len(buffers.allocate(ALL, torch.uint8, disk.busy).raw) == HUGE
    assert gate.is_set()
    opener.join()


def test_take_says_so_once_the_disk_is_idle(buffers, disk, file):
    fd, _ = file
    held = buffers.allocate(ALL, torch.uint8)
    pending = disk.read(fd, held.raw[: 8 * PAGE], 0)
    with pytest.raises(ValueError, match="more are needed at once"):
        buffers.allocate((1,), torch.uint8, disk.busy)
    pending.wait()


def test_many_threads_share_an_pool(buffers):
    failures = []

    def work(seed):
        sizes = torch.randint(1, HUGE // 8, (200,), generator=torch.Generator().manual_seed(seed)).tolist()
        try:
            for n in sizes:
                view = buffers.allocate((n,), torch.uint8, lambda: True).view
                view.fill_(seed)
                time.sleep(0)
                assert int(view.min()) == int(view.max()) == seed, "another thread wrote into this buffer"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(buffers.allocate(ALL, torch.uint8).raw) == HUGE and buffers.peak <= buffers.size


def test_reads_and_writes_move_the_bytes(disk, file):
    fd, data = file
    out = torch.zeros(5 * PAGE, dtype=torch.uint8)
    disk.read(fd, out, PAGE).wait()
    assert torch.equal(out, data[PAGE : 6 * PAGE])
    disk.write(fd, 255 - out, 3 * PAGE).wait()
    assert os.pread(fd, 8 * PAGE, 0) == torch.cat([data[: 3 * PAGE], 255 - out]).numpy().tobytes()
    assert disk.traffic()[:2] == (5 * PAGE, 5 * PAGE) and not disk.busy()


def test_a_request_is_cut_into_blocks_that_several_threads_serve(monkeypatch, file):
    fd, data = file
    calls, both, real = [], threading.Barrier(2, timeout=WAIT_S), os.preadv

    def preadv(fd, buffers, offset):
        calls.append((offset, len(buffers[0]), threading.get_ident()))
        if len(calls) <= 2:
            both.wait()  # two blocks are under way at once
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    disk = DiskIO(DiskSettings(block_bytes=3 * PAGE, readers=2, writers=1))
    out = torch.zeros(8 * PAGE, dtype=torch.uint8)
    disk.read(fd, out, 0).wait()
    disk.close()
    assert torch.equal(out, data)
    assert sorted(call[:2] for call in calls) == [(0, 3 * PAGE), (3 * PAGE, 3 * PAGE), (6 * PAGE, 2 * PAGE)]
    assert len({call[2] for call in calls}) == 2


def test_a_transfer_that_stops_midway_goes_on(monkeypatch, disk, file):
    fd, data = file
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:PAGE]], offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: write(fd, [buffers[0][:PAGE]], offset))
    out = torch.zeros(8 * PAGE, dtype=torch.uint8)
    disk.read(fd, out, 0).wait()
    assert torch.equal(out, data)
    disk.write(fd, data.flip(0), 0).wait()
    assert os.pread(fd, 8 * PAGE, 0) == data.flip(0).numpy().tobytes()


def test_work_follows_a_transfer_in_its_thread_unless_it_failed(monkeypatch, disk, file):
    fd, _ = file
    gate, read, called = threading.Event(), os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *args: gate.wait(WAIT_S) and read(*args))
    good, bad, short = (disk.read(fd, torch.zeros(PAGE, dtype=torch.uint8), at * PAGE) for at in (0, 1, 8))
    good.call_at_end(lambda: called.append(threading.get_ident()))
    bad.call_at_end(lambda: called[9])
    short.call_at_end(lambda: called.append("after an error"))
    gate.set()
    good.wait()
    assert called in [[thread.ident] for thread in disk.threads]
    good.call_at_end(lambda: called.append("at once"))
    assert called[1:] == ["at once"]
    with pytest.raises(IndexError):
        bad.wait()
    with pytest.raises(OSError, match="ends at byte"):
        short.wait()
    assert len(called) == 2


@pytest.mark.parametrize("size", [8 * PAGE, 7 * PAGE + 10, 0])
def test_a_file_that_ends_too_early_is_an_error(disk, file, size):
    fd, _ = file
    os.ftruncate(fd, size)
    pending = disk.read(fd, torch.zeros(4 * PAGE, dtype=torch.uint8), 6 * PAGE)
    with pytest.raises(OSError, match=r"the file ends at byte [\d,]+, [\d,]+ bytes too early"):
        pending.wait()


def test_what_is_needed_next_overtakes_what_is_needed_later(disk):
    gate, done = threading.Event(), []
    first = disk.run(lambda: gate.wait(WAIT_S) and 0, write=False)
    names = [("a", LATER), ("b", LATER), ("c", NEXT), ("d", LATER), ("e", NEXT)]
    pending = [
        disk.run(lambda name=name: done.append(name) or 0, write=False, priority=priority) for name, priority in names
    ]
    gate.set()
    for one in (first, *pending):
        one.wait()
    assert "".join(done) == "ceabd"


def test_a_block_that_is_needed_next_overtakes_the_blocks_of_a_large_request(monkeypatch, disk, file):
    fd, _ = file
    gate, calls, real = threading.Event(), [], os.preadv

    def preadv(fd, buffers, offset):
        gate.wait(WAIT_S)
        calls.append(offset // PAGE)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    large = disk.read(fd, torch.zeros(6 * PAGE, dtype=torch.uint8), 0, priority=LATER)
    while disk.tokens[False].qsize() > 2:  # its first block is under way
        time.sleep(0.001)
    small = disk.read(fd, torch.zeros(PAGE, dtype=torch.uint8), 7 * PAGE, priority=NEXT)
    gate.set()
    large.wait()
    small.wait()
    assert calls == [0, 7, 2, 4]


def test_reads_go_on_while_writes_wait(disk, file):
    fd, data = file
    gate = threading.Event()
    stuck = disk.run(lambda: gate.wait(WAIT_S) and 0, write=True)
    out = torch.zeros(PAGE, dtype=torch.uint8)
    disk.read(fd, out, 0).wait()
    assert torch.equal(out, data[:PAGE]) and not stuck.done.is_set()
    gate.set()
    stuck.wait()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "it broke"), RuntimeError("it broke"), KeyError("it broke")])
def test_an_error_surfaces_where_it_is_waited_for_and_the_disk_still_serves(buffers, disk, file, error):
    fd, data = file
    buffer = buffers.allocate(ALL, torch.uint8)

    def fail(raw=buffer.raw):
        raise error

    pending = disk.run(fail, write=False)
    assert pending.done.wait(WAIT_S)
    with pytest.raises(type(error), match="it broke"):
        pending.wait()
    with pytest.raises(type(error), match="it broke"):  # and for whoever asks again
        pending.wait()
    assert not disk.busy()
    out = torch.zeros(PAGE, dtype=torch.uint8)
    disk.read(fd, out, 0).wait()
    assert torch.equal(out, data[:PAGE])


def test_an_error_of_one_block_is_the_error_of_the_request_and_holds_no_memory(monkeypatch, buffers, disk, file):
    fd, _ = file
    real = os.pwritev

    def pwritev(fd, buffers, offset):
        if offset == 2 * PAGE:
            raise OSError(errno.ENOSPC, "no space left")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    buffer = buffers.allocate((HUGE // 2,), torch.uint8)
    pending = disk.write(fd, buffer.raw, 0)
    del buffer
    pending.done.wait(WAIT_S)
    gc.disable()
    try:
        assert not full(buffers) and len(buffers.allocate(ALL, torch.uint8).raw) == HUGE
    finally:
        gc.enable()
    with pytest.raises(OSError, match="no space left"):
        pending.wait()
    assert disk.traffic().written_bytes < HUGE // 2 and not disk.busy()


def test_a_request_of_no_bytes_is_done_at_once(disk, file):
    disk.read(file[0], torch.zeros(0, dtype=torch.uint8), 0).wait()
    assert not disk.busy()


def test_waiting_is_counted(disk):
    gate = threading.Event()
    pending = disk.run(lambda: gate.wait(WAIT_S) and 5, write=True)
    done, waits = pending.done.wait, 0.05
    pending.done.wait = lambda: time.sleep(waits) or gate.set() or done()  # the work ends while it is waited for
    pending.wait()
    assert waits <= disk.traffic().waited_s < WAIT_S and disk.traffic().written_bytes == 5


def test_close_serves_what_is_queued_and_ends_the_threads(file):
    fd, data = file
    disk = DiskIO(DiskSettings(block_bytes=PAGE, readers=3, writers=2))
    outs = [torch.zeros(8 * PAGE, dtype=torch.uint8) for _ in range(20)]
    pending = [disk.read(fd, out, 0, priority=i % 2) for i, out in enumerate(outs)]
    disk.close()
    assert all(one.done.is_set() for one in pending) and all(torch.equal(out, data) for out in outs)
    assert not any(thread.is_alive() for thread in disk.threads)
    disk.close()
    with pytest.raises(AssertionError, match="ended"):
        disk.read(fd, outs[0], 0)
    with pytest.raises(AssertionError, match="ended"):
        disk.run(lambda: 0, write=True)


def test_an_idle_disk_uses_no_cpu_time():
    disk = DiskIO(DiskSettings(readers=4, writers=4))

    def used():
        return [time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in disk.threads]

    end, before = time.monotonic() + WAIT_S, used()
    time.sleep(0.1)
    while (after := used()) != before:  # until all have started, which may take long on a busy machine
        assert time.monotonic() < end, (before, after)
        before = after
        time.sleep(0.1)
    disk.close()


def test_ranks_that_share_a_disk_have_a_part_of_its_threads_each():
    settings = DiskSettings(1 << 20, readers=4, writers=2)
    assert settings.share(1) == settings
    assert settings.share(2) == DiskSettings(1 << 20, 2, 1)
    assert settings.share(3) == settings.share(64) == DiskSettings(1 << 20, 1, 1)


@pytest.mark.slow
def test_two_processes_share_a_file(tmp_path):
    path, n = tmp_path / "shared", 256
    path.write_bytes(bytes(2 * n * PAGE))
    program = f"""
import os, sys, torch
from fzero.offload.buffer_pool import PAGE, BufferPool
from fzero.offload.disk_io import DiskIO, DiskSettings
rank, n = int(sys.argv[1]), {n}
fd, pool, disk = os.open({str(path)!r}, os.O_RDWR), BufferPool(8 << 20), DiskIO(DiskSettings(16 * PAGE, 2, 2).share(2))
for turn in range(1, 9):
    buffer = pool.allocate((n * PAGE,), torch.uint8, disk.busy)
    buffer.view.fill_(10 * rank + turn)
    disk.write(fd, buffer.raw, rank * n * PAGE).wait()
    found = pool.allocate((n * PAGE,), torch.uint8, disk.busy)
    disk.read(fd, found.raw, rank * n * PAGE).wait()
    assert bool((found.view == 10 * rank + turn).all()), turn
    del buffer, found
disk.close()
"""
    ranks = [subprocess.Popen([sys.executable, "-c", program, str(rank)]) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    assert path.read_bytes() == bytes([8]) * n * PAGE + bytes([18]) * n * PAGE


def refuse(monkeypatch, code, *, at):
    """Have direct transfers refused, at `open` or at the first one, as tmpfs and network file systems do."""
    real = getattr(os, at)
    if at == "open":

        def refusing(path, flags, *args, **kwargs):
            if flags & os.O_DIRECT:
                raise OSError(code, os.strerror(code), str(path))
            return real(path, flags, *args, **kwargs)
    else:

        def refusing(*args):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, at, refusing)


@pytest.mark.parametrize("at", ["open", "pwritev"])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_direct_transfers_is_known(monkeypatch, tmp_path, at, code):
    refuse(monkeypatch, code, at=at)
    assert serves_direct(tmp_path) is False
    assert list(tmp_path.iterdir()) == []
    if at == "open":
        assert open_direct(tmp_path / "x", make=True) is None


@pytest.mark.parametrize("at", ["open", "pwritev"])
def test_other_errors_are_not_taken_for_a_refusal(monkeypatch, tmp_path, at):
    if at == "pwritev":  # files are opened on every file system
        opened = os.open
        monkeypatch.setattr(os, "open", lambda path, flags, *mode: opened(path, flags & ~os.O_DIRECT, *mode))
    refuse(monkeypatch, errno.EACCES, at=at)
    with pytest.raises(PermissionError):
        serves_direct(tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def cached(path, size):
    """The part of the first `size` bytes of a file that the page cache holds; None where the system does not tell."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return bench.cached_fraction(bench.Files({False: fd}, size))
    finally:
        os.close(fd)


def cached_by_itself(path, raw):
    """Whether the system does not tell, or this file system caches what a direct transfer of its own writes."""
    fd = open_direct(path, make=True)
    try:
        assert os.pwritev(fd, [memoryview(raw.numpy())], 0) == len(raw)
    finally:
        os.close(fd)
    return cached(path, len(raw)) != 0


def test_direct_transfers_pass_the_page_cache_by(disk_path, buffers):
    if not serves_direct(disk_path):
        pytest.skip("the folder of this test refuses direct transfers")
    fd = open_direct(disk_path / "data", make=True)
    disk = DiskIO(DiskSettings(block_bytes=64 << 10))
    buffer = buffers.allocate((HUGE // 2,), torch.uint8)
    buffer.view.copy_(torch.arange(HUGE // 2) % 251)
    disk.write(fd, buffer.raw, 0).wait()
    found = buffers.allocate((HUGE // 2,), torch.uint8)
    found.view.zero_()
    disk.read(fd, found.raw, 0).wait()
    assert torch.equal(found.view, buffer.view)
    os.ftruncate(fd, HUGE // 2 - 100)  # direct transfers cannot go on inside a page
    with pytest.raises(OSError, match=r"the file ends at byte 1,048,476, 100 bytes too early"):
        disk.read(fd, found.raw, 0).wait()
    try:
        os.preadv(fd, [memoryview(found.raw.numpy())[:100]], 7)
    except OSError:  # as of most file systems inside a page; tmpfs serves it
        with pytest.raises(OSError):
            disk.read(fd, found.raw[:100], 7).wait()
    disk.close()
    os.close(fd)
    if cached_by_itself(disk_path / "plain", buffer.raw):
        pytest.skip(
            "the file system of this test keeps what is written directly in memory, as tmpfs does; the rest holds"
        )
    assert cached(disk_path / "data", HUGE // 4) == 0


def test_nothing_warns_and_threads_are_named():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disk = DiskIO()
    assert len(disk.threads) == disk.settings.readers + disk.settings.writers
    assert {thread.name for thread in disk.threads} == {"fzero-disk"} and all(thread.daemon for thread in disk.threads)
    disk.close()
    assert disk_module.DiskSettings() == disk.settings
