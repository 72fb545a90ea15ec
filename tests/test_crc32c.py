"""Checksums have the bits of CRC-32C, whatever computes them here, and .zst files need their package by name."""

import mmap
import sys
import threading
import types

import numpy as np
import pytest

from fzero.core import compile_cache, digest, packages
from fzero.data.arrow_tables import ZstdFile

NOISE = np.random.default_rng(0).integers(0, 256, 10_000_007, np.uint8)


def by_definition(data, value=0):
    """The remainder by the polynomial 0x1EDC6F41, bit by bit, reflected (RFC 3720, 12.1)."""
    crc = value ^ 0xFFFFFFFF
    for byte in bytes(data):
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.fixture(params=["package", "google", "", "TABLES"], ids=["crc32c", "google_crc32c", "C++", "C++ by tables"])
def checksum(request):
    """A function (bytes, value) -> checksum of each kind."""
    if request.param == "package":
        return pytest.importorskip("crc32c").crc32c
    if request.param == "google":
        pytest.importorskip("google_crc32c")
        return digest.by_google
    if not compile_cache.compiler():
        pytest.skip("no C++ compiler")
    return digest.by_cpp(request.param)


def test_short_ones_at_every_offset_are_those_of_the_definition(checksum):
    for begin in (0, 1, 3, 7):
        for size in range(101):
            part = memoryview(NOISE)[begin : begin + size]
            assert checksum(part, 0) == by_definition(part), (begin, size)
            assert checksum(part, 0x9E3779B9) == by_definition(part, 0x9E3779B9), (begin, size)


def test_a_package_that_does_not_load_is_passed_over(monkeypatch, tmp_path):
    (tmp_path / "crc32c.py").write_text("raise ImportError('built for another system')")
    (tmp_path / "zstandard.py").write_text("raise ImportError('built for another system')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("crc32c", "zstandard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert digest.provider.__wrapped__() != "crc32c"
    with pytest.raises(ValueError, match=r"^a.zst: the package zstandard is here and does not load \(built for"):
        packages.load("zstandard", "a.zst")


def test_known_values(checksum):
    """RFC 3720, B.4."""
    for data, wanted in ((bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)):
        assert checksum(data, 0) == wanted
    assert checksum(b"123456789", 0) == 0xE3069283


def test_ten_megabytes_are_those_of_their_parts(checksum):
    whole, tables = checksum(NOISE, 0), digest.by_cpp("TABLES")
    assert whole == tables(NOISE, 0)
    for cut in (1, 4_999_999, len(NOISE) - 3):
        assert checksum(NOISE[cut:], checksum(NOISE[:cut], 0)) == whole


def test_every_kind_of_memory_is_read_where_it_is(checksum, tmp_path):
    wanted = by_definition(NOISE[:96])
    (tmp_path / "file").write_bytes(NOISE[:96].tobytes())
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        kinds = [NOISE[:96].tobytes(), bytearray(NOISE[:96]), mapped, NOISE[:96].view("<u4").reshape(4, 6)]
        for data in (*kinds, memoryview(bytearray(NOISE[:96])), memoryview(kinds[3])):
            assert checksum(data, 0) == wanted, type(data)
    assert checksum(b"", 7) == checksum(np.empty(0, np.uint8), 7) == 7
    with pytest.raises((ValueError, BufferError)):
        checksum(NOISE[:96:2], 0)


def test_our_own_loop_lets_other_threads_run(monkeypatch):
    """A thread takes Python's lock while the loop is at work."""
    loop, ticks, done = digest.by_cpp(), [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(1)
            done.wait(0.0005)

    thread = threading.Thread(target=tick)
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody takes the lock from a thread that has it
    thread.start()
    try:
        counts = []
        for _ in range(20):
            loop(NOISE, 0)
            counts.append(len(ticks))
    finally:
        done.set()
        sys.setswitchinterval(before)
        thread.join()
    assert counts[-1] > counts[0]


@pytest.mark.parametrize(
    ("packages", "compiler", "wanted"),
    [
        (("crc32c", "google_crc32c"), "g++", "crc32c"),
        (("google_crc32c",), "g++", "C++"),
        (("google_crc32c",), "", "google_crc32c"),
        ((), "", ""),
    ],
)
def test_what_computes_them(monkeypatch, packages, compiler, wanted):
    monkeypatch.setattr(digest.importlib.util, "find_spec", lambda name: name in packages or None)
    monkeypatch.setattr(compile_cache, "compiler", lambda: compiler)
    if "crc32c" in packages:  # which need not be here
        monkeypatch.setitem(sys.modules, "crc32c", types.ModuleType("crc32c"))
    digest.provider.cache_clear()
    digest._checksum.cache_clear()
    try:
        assert digest.provider() == wanted
        if not wanted:
            with pytest.raises(ValueError, match=r"neither .* crc32c .* nor a C.. compiler.*pip install crc32c"):
                digest.crc32c(b"")
    finally:
        digest.provider.cache_clear()
        digest._checksum.cache_clear()


def test_without_zstandard_its_name_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / "text.zst"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"text\.zst: this needs the package zstandard; pip install zstandard"):
        ZstdFile(path)
