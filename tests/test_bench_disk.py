"""`fzero bench disk`: it measures what it says, leaves no file, and writes the settings that a run then uses."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from datetime import date
from pathlib import Path

import pytest

from fzero.offload import BufferPool, DiskSettings, disk_io, serves_direct
from fzero.planner.calibrate import disk
from fzero.planner.calibrate.disk import KINDS, MB, Rate


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("FZERO_TRACEBACK", raising=False)


@pytest.fixture
def folder(disk_path):
    """A folder on a disk."""
    path = disk_path / "disk"
    path.mkdir()
    if disk_io.file_system(disk_io.mount_point(path)) in disk.MEMORY or not serves_direct(path):
        pytest.skip("the folder of this test is not on a disk that takes direct transfers")
    return path


@pytest.fixture
def files(folder):
    with disk.open_files(folder, 4 * MB) as files:
        yield files


@pytest.fixture
def quick(monkeypatch):
    """Little to measure, and no fio."""
    monkeypatch.setattr(disk, "has_fio", lambda: False)
    monkeypatch.setattr(
        disk.sweep,
        "__kwdefaults__",
        disk.sweep.__kwdefaults__ | {"blocks": (MB, 2 * MB), "threads": (1, 2), "rounds": 1},
    )


def refused(fz, *args):
    """The one line of an error."""
    code, out, err = fz("bench", "disk", "--size-gb", "0.005", "--seconds", "0.001", *args)
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("fzero: error: "), (code, out, err)
    return err


def row(gbs, block=MB, threads=1, cpu=0.01, **others):
    """A row whose rates are all `gbs`, but for `others`."""
    rates = {**{kind: Rate(gbs, cpu) for kind in KINDS}, **others}
    return disk.DiskMeasurement("", rates, DiskSettings(block, threads, threads))


def test_files_are_nameless_full_of_bytes_and_random(folder):
    with disk.open_files(folder, 2 * MB) as files:
        assert list(folder.iterdir()) == []
        for fd in files.fds.values():
            assert os.fstat(fd).st_size == 2 * MB and os.fstat(fd).st_nlink == 0
            assert len(set(os.pread(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY), 4096, MB))) > 200
    for fd in files.fds.values():
        with pytest.raises(OSError):
            os.fstat(fd)


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_the_engine_counts_what_moves(files, monkeypatch, kinds):
    moved = {False: 0, True: 0}
    for write, name, real in ((False, "preadv", os.preadv), (True, "pwritev", os.pwritev)):

        def counting(fd, buffers, offset, write=write, real=real):
            assert fd == files.fds[write] and len(buffers[0]) == MB and offset % MB == 0 and offset + MB <= files.size
            moved[write] += MB
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, name, counting)
    begin = time.perf_counter()
    rate = disk.engine(files, BufferPool(16 * MB), DiskSettings(MB, 2, 1), 2, kinds, 0.1)
    took = time.perf_counter() - begin
    assert {write for write in moved if moved[write]} == set(kinds)
    assert took >= 0.1 and sum(moved.values()) / 1e9 / took <= rate.gbs <= sum(moved.values()) / 1e9 / 0.1
    assert rate.cpu_s_per_gb > 0


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_the_anchor_counts_what_moves(files, monkeypatch, kinds):
    moved, threads, together = [], set(), threading.Barrier(8 * len(kinds), timeout=20)
    for name, real in (("preadv", os.preadv), ("pwritev", os.pwritev)):

        def counting(fd, buffers, offset, real=real):
            if threading.get_ident() not in threads:
                threads.add(threading.get_ident())
                together.wait()
            done = real(fd, buffers, offset)
            moved.append(done)
            return done

        monkeypatch.setattr(os, name, counting)
    begin = time.perf_counter()
    rate = disk.anchor(files, BufferPool(64 * MB), kinds, 0.1)
    took = time.perf_counter() - begin
    assert len(threads) == 8 * len(kinds) and sum(moved) / 1e9 / took <= rate.gbs <= sum(moved) / 1e9 / 0.1


@pytest.mark.skipif(not disk.has_fio(), reason="fio is not installed")
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_fio_measures_the_same_files(files, kinds):
    rate = disk.fio(files, kinds, 0.2)
    assert 0.01 < rate.gbs < 1000 and 0 < rate.cpu_s_per_gb < 10
    assert disk.cached_fraction(files) == 0


@pytest.mark.parametrize("script", ["echo no such engine >&2; exit 3", "echo '{}'", "exit 0"])
def test_a_fio_that_fails_is_an_error(files, tmp_path, monkeypatch, script):
    (tmp_path / "fio").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ValueError, match="fio failed with exit code"):
        disk.fio(files, (False,), 0.1)


def test_the_page_cache_is_seen_where_it_is_used(files):
    assert disk.cached_fraction(files) == 0
    plain = os.open(f"/proc/self/fd/{files.fds[False]}", os.O_RDONLY)
    os.preadv(plain, [bytearray(files.size)], 0)
    os.close(plain)
    assert disk.cached_fraction(files) == 0.5


def test_the_best_is_fast_and_takes_little_cpu_time():
    rows = [row(1.0, cpu=0), row(2.0, 4 * MB, 2), row(1.96, 8 * MB, 1, cpu=0.005), row(1.98, 2 * MB, 4)]
    assert disk.choose(rows).settings == DiskSettings(8 * MB, 1, 1)
    assert disk.choose([row(1.8, 2 * MB, cpu=0.005), row(2.0, 4 * MB, 4)]).settings == DiskSettings(4 * MB, 4, 4)
    default = DiskSettings()
    assert disk.choose([row(2.0, cpu=0.005), row(1.95, default.block_bytes, default.readers)]).settings == default
    # All kinds of transfer count.
    assert disk.choose([row(2.0, write=Rate(0.5, 0)), row(1.9, 4 * MB, 2)]).settings == DiskSettings(4 * MB, 2, 2)


def test_the_smallest_depth_that_is_fast_is_enough():
    rows = [row(rate)._replace(depth=depth) for depth, rate in ((1, 1.5), (2, 1.98), (4, 2.0))]
    assert disk.choose_depth(rows) == 2 and disk.choose_depth(rows[:1]) == 1


def test_medians_are_of_each_figure():
    assert disk.median([Rate(1, 9), Rate(5, 7), Rate(3, 8)]) == Rate(3, 8)


def test_the_table_has_ratios_to_the_faster_anchor():
    slow, fast = (
        disk.DiskMeasurement(name, {kind: Rate(rate, 0.02) for kind in KINDS})
        for name, rate in (("raw", 1.0), ("fio", 2.0))
    )
    best = row(1.5)._replace(name="1 MiB, 1 + 1 threads")
    lines = disk.table(disk.SweepResult([slow, fast], [best], best, 1.0)).splitlines()
    assert lines[1].split() == ["raw", *["1.00", "(0.50)"] * 3, "0.0200"] and lines[2].split() == [
        "fio",
        *["2.00", "(1.00)"] * 3,
        "0.0200",
    ]
    assert lines[3].split()[6:] == [*["1.50", "(0.75)"] * 3, "0.0100", "<-", "best"]
    assert len({line.index("(") for line in lines[1:]}) == 1


def test_a_sweep_measures_every_way(files, quick):
    said = []
    found = disk.sweep(files, 0.01, say=said.append)
    ways = {(each.settings, each.depth) for each in found.rows}
    assert {settings for settings, depth in ways if depth == 2} >= {
        DiskSettings(block, n, n) for block in (MB, 2 * MB) for n in (1, 2)
    }
    assert len({(settings.readers, settings.writers) for settings, _ in ways}) == 4
    assert {depth for settings, depth in ways if settings == found.best.settings} == {1, 2, 4}
    assert all(
        set(each.rates) == set(KINDS) and min(rate.gbs for rate in each.rates.values()) > 0
        for each in (*found.rows, *found.anchors)
    )
    assert len(said) == len(found.rows) and [anchor.name for anchor in found.anchors] == [
        "raw O_DIRECT, 8 threads a kind"
    ]
    assert found.spread >= 1


def test_blocks_larger_than_the_files_are_left_out(folder, quick):
    with disk.open_files(folder, MB) as files:
        assert {each.settings.block_bytes for each in disk.sweep(files, 0.01).rows} == {MB}


def test_the_command_keeps_no_settings_of_a_busy_disk(fz, folder, quick, monkeypatch):
    monkeypatch.setattr(disk, "NOISY", 0.0)
    code, out, _ = fz("bench", "disk", folder, "--size-gb", "0.005", "--seconds", "0.01")
    assert code == 0 and "measure again" in out and "no settings were written" in out
    assert not disk_io.config_file().exists()


def test_the_command_measures_and_writes_the_settings(fz, folder, quick, monkeypatch):
    monkeypatch.setattr(disk, "NOISY", float("inf"))
    code, out, err = fz("bench", "disk", folder, "--size-gb", "0.009", "--seconds", "0.01")
    assert (code, err) == (0, "") and list(folder.iterdir()) == []
    mount = disk_io.mount_point(folder)
    assert (
        out.startswith(f"{folder}, on {mount} (") and "two files of 0.00 GB" in out and "0.01 s for each figure" in out
    )
    assert (
        "page cache: bypassed (O_DIRECT); afterwards it held 0% of the files" in out and "fio is not installed" in out
    )
    assert out.count("<- best") == 1 and f'written to {disk_io.config_file()}, [disk."{mount}"]' in out
    entry = tomllib.loads(disk_io.config_file().read_text())["disk"][mount]
    assert list(entry) == ["block_bytes", "readers", "writers", "read_gbs", "write_gbs", "mixed_gbs", "measured"]
    assert entry["measured"] == date.today() and all(entry[f"{kind}_gbs"] > 0 for kind in KINDS)
    settings = disk_io.load_settings(folder)
    assert (
        settings == DiskSettings(*(entry[name] for name in DiskSettings._fields))
        and f"best: {disk.named(settings)};" in out
    )
    assert list(disk_io.config_file().parent.iterdir()) == [disk_io.config_file()]


def test_the_command_writes_nothing_where_it_is_told_so(fz, folder, quick):
    code, out, _ = fz("bench", "disk", folder, "--size-gb", "0.005", "--seconds", "0.01", "--no-write-config")
    assert code == 0 and "no settings were written" in out and not disk_io.config_file().exists()


def test_help_names_the_command(fz):
    code, out, _ = fz("bench", "disk", "--help")
    assert code == 0 and all(option in out for option in ("--size-gb", "--seconds", "--no-write-config"))


def test_no_folder(fz, tmp_path):
    assert "no such folder; give a folder on the disk" in refused(fz, tmp_path / "none")
    (tmp_path / "file").touch()
    assert "is not a folder; give a folder" in refused(fz, tmp_path / "file")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "options", [["--size-gb", "0"], ["--size-gb", "-1"], ["--size-gb", "nan"], ["--seconds", "0"], ["--seconds", "nan"]]
)
def test_numbers_out_of_range(fz, folder, options):
    assert f"{options[0]} is" in refused(fz, folder, *options)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written(fz, folder, monkeypatch, code):
    real = os.open

    def failing(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", failing)
    assert f"{folder}: {os.strerror(code)}; give a folder that this user may write" in refused(fz, folder)


def test_a_folder_in_memory(fz, folder, monkeypatch):
    monkeypatch.setattr(disk, "file_system", lambda mount: "tmpfs")
    assert f"{folder}: is in memory (tmpfs); give a folder on a disk" in refused(fz, folder)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_shared_memory_is_in_memory():
    assert disk_io.file_system(disk_io.mount_point("/dev/shm/not/there")) in disk.MEMORY


def test_a_file_system_that_refuses_direct_transfers(fz, folder, monkeypatch):
    real = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    assert "its file system refuses direct transfers (O_DIRECT)" in refused(fz, folder)
    assert list(folder.iterdir()) == []


def test_too_little_space(fz, folder, monkeypatch):
    assert "GB free and 900,000.00 GB are needed; use a smaller size (--size-gb)" in refused(
        fz, folder, "--size-gb", "900000"
    )

    def full(fd, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "No space left on device for 0.01 GB; use a smaller size (--size-gb)" in refused(
        fz, folder, "--size-gb", "0.01"
    )
    assert list(folder.iterdir()) == []


def nameless(pid):
    """The open files of a process that have no name (any more)."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += [fd] * ("disk/" in os.readlink(fd) and "(deleted)" in os.readlink(fd))
    return found


@pytest.mark.parametrize("end", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_no_file_stays_when_it_is_ended(folder, end):
    # A shell starts what runs in the background with SIGINT ignored, and so may be these tests.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import fzero.__main__"
    run = subprocess.Popen(
        [sys.executable, "-c", program, "bench", "disk", str(folder), "--size-gb", "0.3", "--no-write-config"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while not nameless(run.pid):
        assert run.poll() is None and time.monotonic() < until, run.communicate()
        time.sleep(0.02)
    time.sleep(0.5)
    run.send_signal(end)
    out, err = run.communicate(timeout=60)
    assert out == "" and (end == signal.SIGKILL or (run.returncode == 130 and err.strip() == "fzero: interrupted"))
    assert list(folder.iterdir()) == []


def test_settings_of_a_disk_that_was_not_measured_are_the_default_ones(tmp_path):
    assert (
        disk_io.load_settings(tmp_path)
        == disk_io.load_settings(tmp_path / "not" / "there")
        == disk_io.load_settings("s3://bucket/x")
        == DiskSettings()
    )
    disk_io.save_settings("/some/other/disk", DiskSettings(MB, 7, 7), {})
    assert disk_io.load_settings(tmp_path) == DiskSettings()
    disk_io.save_settings(disk_io.mount_point("."), DiskSettings(MB, 7, 7), {})
    assert (
        disk_io.load_settings(".") == DiskSettings(MB, 7, 7)
        and disk_io.load_settings("s3://bucket/x") == DiskSettings()
    )


def test_settings_replace_those_of_the_same_disk_and_nothing_else(tmp_path):
    path, mount = disk_io.config_file(), disk_io.mount_point(tmp_path)
    path.parent.mkdir(parents=True)
    mine = 'colour = "blue"  # mine\n\n[disk."/a \\"b\\" ü"]\nreaders = 3\n# a note\n\n[other]\nx = [1, 2]\n'
    path.write_text(mine)
    disk_io.save_settings(mount, DiskSettings(MB, 1, 2), {"read": 1.23456, "write": 2.0})
    disk_io.save_settings(mount, DiskSettings(2 * MB, 3, 4), {"read": 5.0})
    disk_io.save_settings('/a "b" ü', DiskSettings(4 * MB, 5, 6), {})
    found = tomllib.loads(path.read_text())
    assert found["colour"] == "blue" and found["other"] == {"x": [1, 2]} and "# mine" in path.read_text()
    assert found["disk"][mount] == {
        "block_bytes": 2 * MB,
        "readers": 3,
        "writers": 4,
        "read_gbs": 5.0,
        "measured": date.today(),
    }
    assert found["disk"]['/a "b" ü']["readers"] == 5 and len(found["disk"]) == 2
    assert disk_io.load_settings(tmp_path / "run") == DiskSettings(2 * MB, 3, 4)
    assert path.read_text().count("[disk.") == 2


def test_a_table_in_another_form_is_not_torn(tmp_path):
    path = disk_io.config_file()
    path.parent.mkdir(parents=True)
    path.write_text("[disk]\n'/x' = {readers = 2}\n")
    with pytest.raises(ValueError, match="in a form that cannot be replaced; delete it"):
        disk_io.save_settings("/x", DiskSettings(), {})
    assert path.read_text() == "[disk]\n'/x' = {readers = 2}\n"


def test_the_file_is_the_old_one_where_writing_fails(tmp_path, monkeypatch):
    disk_io.save_settings("/x", DiskSettings(MB, 1, 1), {})
    before = disk_io.config_file().read_text()

    def failing(source, target):
        raise OSError(errno.EIO, "it broke")

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="it broke"):
        disk_io.save_settings("/x", DiskSettings(MB, 2, 2), {})
    assert disk_io.config_file().read_text() == before and len(list(disk_io.config_file().parent.iterdir())) == 1


@pytest.mark.parametrize(
    "text, message",
    [
        ("[disk", "not TOML"),
        (b"\xff\xfe", "is not UTF-8 text"),
        ("disk = 3", "disk must be tables such as"),
        ("[disk]\nx = 1", "disk must be tables such as"),
        ("[disk.'MOUNT']\nreaders = 0", r'readers of \[disk."MOUNT"\] is 0; it must be a whole number from 1'),
        ("[disk.'MOUNT']\nwriters = 2.5", "writers of .* is 2.5; it must be a whole number"),
        ("[disk.'MOUNT']\nreaders = true", "readers of .* is True; it must be a whole number"),
        ("[disk.'MOUNT']\nblock_bytes = 1000", "block_bytes of .* is 1000; it must be a multiple of 4096"),
    ],
)
def test_a_broken_file_is_one_clear_error(fz, folder, text, message):
    path, mount = disk_io.config_file(), disk_io.mount_point(folder)
    path.parent.mkdir(parents=True)
    path.write_bytes(text if isinstance(text, bytes) else text.replace("MOUNT", mount).encode())
    with pytest.raises(ValueError, match=message.replace("MOUNT", mount)) as error:
        disk_io.load_settings(folder)
    assert str(path) in str(error.value) and "fzero bench disk" in str(error.value)
    assert str(path) in refused(fz, folder)
    assert list(folder.iterdir()) == []


def test_a_mount_point_is_where_the_device_begins(tmp_path, monkeypatch):
    found = disk_io.mount_point(tmp_path / "a" / "b")
    assert os.path.ismount(found) and str(tmp_path).startswith(found)
    assert disk_io.mount_point("/proc/self") == "/proc" and disk_io.file_system("/proc") == "proc"
    (tmp_path / "link").symlink_to("/proc")
    assert disk_io.mount_point(tmp_path / "link") == "/proc"
    assert disk_io.file_system("/no/mount") == ""
    monkeypatch.setattr(
        Path, "read_text", lambda self, **_: "dev / ext4 rw 0 0\ndev /mnt/my\\040disk xfs rw 0 0\ndev / btrfs rw 0 0\n"
    )
    assert [disk_io.file_system(mount) for mount in ("/", "/mnt/my disk")] == ["btrfs", "xfs"]
