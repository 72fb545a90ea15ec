"""Checksums of a corpus (fzero/data/checksums.py): what is damaged is found."""

import contextlib
import json
import re

import numpy as np
import pytest
from data_cases import TEXTS, write_jsonl

from fzero import data
from fzero.data import checksums, packing


@pytest.fixture
def summed(tmp_path, monkeypatch):
    """A corpus of bytes with checksums of chunks of 64 bytes."""
    monkeypatch.setattr(checksums, "CHUNK", 64)
    folder = tmp_path / "summed"
    data.prepare(write_jsonl(tmp_path / "a.jsonl", TEXTS), folder, val_fraction=0.2)
    assert data.verify(folder) == []
    return folder


@contextlib.contextmanager
def flipped(path, at):
    """A bit of a file is another one."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    yield
    content[at] ^= 1
    path.write_bytes(content)


def read_whole(folder, split):
    tokens = data.open_tokens(folder, split)
    stream = data.TokenStream(tokens, 1, 1)  # windows that cover every token
    return stream.samples_at(0, stream.samples_per_epoch)


@pytest.mark.parametrize("file", ["train.bin", "val.bin", "train.docs", "val.docs", "train.sums", "val.sums"])
def test_a_flipped_byte_of_a_corpus_is_found_by_verify_and_by_whoever_reads_it(summed, file):
    path, split = summed / file, file.partition(".")[0]
    size = path.stat().st_size
    for at in sorted({0, 1, 63, 64, 65, size // 2, size - 2, size - 1, *range(0, size, 97)}):
        with flipped(path, at):
            begin = at // 64 * 64
            said = f"{path}: damaged: the bytes {begin:,} to {min(size, begin + 64) - 1:,} do not match their checksum"
            if file.endswith(".sums"):
                with pytest.raises(ValueError, match=re.escape(f"{path}: damaged: ")):
                    data.verify(summed)
            else:
                assert data.verify(summed) == [said]
            with pytest.raises(
                ValueError, match=re.escape(f"{path}: damaged" if "docs" not in file else str(path))
            ) as e:
                read_whole(summed, split)
            assert "\n" not in str(e.value)
    assert data.verify(summed) == []
    read_whole(summed, split)


def test_a_run_compares_the_chunks_that_it_reads_and_each_of_them_once(summed, monkeypatch):
    compared, real = [], checksums.crc32c
    monkeypatch.setattr(checksums, "crc32c", lambda part, *more: (compared.append(len(part)), real(part, *more))[1])
    stream = data.TokenStream(data.open_tokens(summed), 64, 2)
    compared.clear()  # of the documents
    with flipped(summed / "train.bin", 64 * 9 + 5):
        for window in [n for n in range(len(stream.rows)) if n not in (8, 9)]:  # a window is 65 tokens
            before = len(compared)
            for _ in range(2):
                packing.assemble(stream.tokens, stream.rows.positions(np.array([window])))
            assert len(compared) - before <= 2
        for window in (8, 9):
            with pytest.raises(ValueError, match="the bytes 576 to 639 do not match"):
                packing.assemble(stream.tokens, stream.rows.positions(np.array([window])))
    stream.samples_at(0, 3 * stream.samples_per_epoch)
    assert sum(stream.tokens.sums.left) == stream.tokens.sums.count <= 1  # the tail that no window has
    done = len(compared)
    stream.samples_at(0, 3 * stream.samples_per_epoch)
    assert len(compared) == done


def test_a_corpus_without_checksums_is_read_and_said_to_have_none(summed, fz):
    meta = json.loads((summed / "meta.json").read_text())
    del meta["sums"]
    (summed / "meta.json").write_text(json.dumps(meta))
    with flipped(summed / "train.bin", 5):
        assert data.open_tokens(summed).sums is None
        read_whole(summed, "train")
    code, _, err = fz("data", "verify", summed)
    assert code == 2 and "has no checksums" in err and "prepare the corpus again" in err


def test_the_command_that_verifies(summed, fz):
    assert fz("data", "verify", summed) == (0, f"{summed}: sound\n", "")
    with flipped(summed / "val.bin", 3), flipped(summed / "train.bin", 200):
        code, out, err = fz("data", "verify", summed)
        assert (
            code == 1
            and err == ""
            and [line.split(":")[0] for line in out.splitlines()]
            == [
                str(summed / "train.bin"),
                str(summed / "val.bin"),
            ]
        )
    (summed / "train.sums").unlink()
    code, _, err = fz("data", "verify", summed)
    assert code == 2 and "train.sums: no such file" in err


@pytest.mark.parametrize("size", [0, 1, 64, 65, 1000])
@pytest.mark.parametrize("step", [1, 7, 64, 1000])
def test_a_file_written_in_pieces_has_the_checksums_of_its_chunks(size, step, tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "CHUNK", 64)
    content = bytes(range(256)) * 4
    file = checksums.SummedFile(tmp_path / "a")
    for at in range(0, size, step):
        file.write(content[at : min(size, at + step)])
    file.close()
    assert file.sums == [checksums.crc32c(content[at : min(size, at + 64)]) for at in range(0, size, 64)]
    assert (tmp_path / "a").read_bytes() == content[:size]
