"""Damaged checkpoints: every changed byte is found and named, what is hit is not restored, and the one before is
offered."""

import json
import random
import shutil

import pytest
import torch
from checkpoint_cases import assert_same_bits, flip, refused, small, tree

from fzero import checkpoint
from fzero.checkpoint import layout
from fzero.core import pytree


@pytest.fixture
def fine(monkeypatch):
    """Chunks of some bytes, so that small leaves have many."""
    for name, value in {"TARGET": 256, "MIN_CHUNK_BYTES": 128, "RUN": 32}.items():
        monkeypatch.setattr(layout, name, value)


def state_of(seed):
    g = torch.Generator().manual_seed(seed)
    return {
        "params": {"w": torch.randn(8, 16, 4, generator=g), "b": torch.randn(5, generator=g).bfloat16()},
        "opt": [torch.randn(32, 8, generator=g), torch.randint(0, 99, (3,), generator=g)],
        "step": torch.tensor(seed + 1),
        "none": torch.empty(0, 3),
    }


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def leaf_in(path, file):
    """The leaf that one of the files holds elements of; None for a description."""
    return (
        None
        if file.name.endswith(".json")
        else str(file.parent.relative_to(path / checkpoint.read_manifest(path)["arrays"]))
    )


@pytest.mark.parametrize("compress", ["", pytest.param("zstd", marks=pytest.mark.slow)])
def test_a_hundred_flipped_bytes_are_found_by_name(tmp_path, fine, compress):
    older = checkpoint.save(tmp_path, state_of(0), step=10, compress=compress)
    path = checkpoint.save(tmp_path, state_of(1), step=20, compress=compress)
    draw, state, like = random.Random(0), state_of(1), state_of(2)
    files, refusals, hit = files_of(path), 0, set()
    for i in range(100):
        file = files[i % len(files)]
        at, mask, leaf = draw.randrange(file.stat().st_size), 1 << draw.randrange(8), leaf_in(path, file)
        flip(file, at, mask)
        found = checkpoint.verify(path)
        assert found and str(file) in found[0] and (leaf is None or f"leaf {leaf} is damaged" in found[0]), (
            file,
            at,
            found,
        )
        sound, passed = checkpoint.newest_sound(tmp_path)
        assert sound == older and passed[0][0] == path and found[0] in passed[0][1]
        try:
            assert_same_bits(checkpoint.restore(path, like), state)
        except checkpoint.Damaged as error:
            assert str(file) in str(error) and "\n" not in str(error)
            refusals += 1
        if leaf is not None:
            hit.add(leaf)
            others = checkpoint.restore_leaves(path, lambda name, leaf=leaf: name != leaf)
            assert_same_bits(others, {name: x for name, x in pytree.named_leaves(state).items() if name != leaf})
        flip(file, at, mask)
    assert checkpoint.verify(path) == [] and hit == set(pytree.names(state)) - {"none"}
    # Restoring does not look at what plain zarr reads, nor at what lies between chunks.
    assert refusals >= 15


def test_a_flipped_byte_of_a_large_file_is_found(tmp_path):
    """Large files are read past the page cache where the disk can do that."""
    state = tree()
    path = checkpoint.save(tmp_path, state, step=1)
    for name in ("large", "layers"):
        leaf = checkpoint.open_checkpoint(path).leaves[name].layout
        file = path / "arrays" / name / leaf.key((0,) * len(leaf.shape))
        assert file.stat().st_size == leaf.file_bytes > 1 << 20
        last = leaf.chunks - 1
        for at, chunk in (
            (leaf.header, 0), (leaf.header + leaf.chunk_bytes - 1, 0), (leaf.header + leaf.chunk_bytes + 3, 0),
            (leaf.header + last * leaf.stride + leaf.chunk_bytes // 2, last), (0, None), (16 * leaf.chunks + 5, None),
        ):  # fmt: skip
            flip(file, at)
            where = "the index" if chunk is None else f"chunk {','.join(map(str, place(chunk, leaf.counts)))} "
            for found in (checkpoint.verify(path), [told(checkpoint.restore, path, state)]):
                assert len(found) == 1 and f"leaf {name} is damaged: {where}" in found[0] and str(file) in found[0], (
                    found
                )
            flip(file, at)
        # A slice that does not touch the chunk can be had.
        flip(file, leaf.header + last * leaf.stride)
        held = checkpoint.open_checkpoint(path)
        first = tuple(slice(0, n) for n in leaf.chunk)
        assert torch.equal(held.read(name, (0,) * len(leaf.shape), leaf.chunk), state[name][first])
        assert f"leaf {name} is damaged" in told(held.read, name)
        held.close()
        flip(file, leaf.header + last * leaf.stride)
    assert checkpoint.verify(path) == []


def place(number, counts):
    out = []
    for n in reversed(counts):
        number, at = divmod(number, n)
        out.insert(0, at)
    return out


def told(call, *args):
    with pytest.raises(checkpoint.Damaged) as error:
        call(*args)
    return str(error.value)


def test_cut_lost_and_foreign_files(tmp_path):
    state = {"a": torch.randn(900, 1000), "b": torch.ones(1000)}
    path = checkpoint.save(tmp_path, state, step=1)
    arrays = path / "arrays"
    for name, file in (("a", arrays / "a" / "c.0.0"), ("b", arrays / "b" / "c.0")):
        whole = file.read_bytes()
        for size in (len(whole) - 1, len(whole) // 2, 4096, 9, 0):
            if size >= len(whole):
                continue
            file.write_bytes(whole[:size])
            found = checkpoint.verify(path)[0]
            assert f"leaf {name} is damaged" in found and str(file) in found, (size, found)
            found = told(checkpoint.restore, path, state)
            assert f"leaf {name} is damaged" in found and str(file) in found, (size, found)
        file.write_bytes(whole + b"\0")
        expected = f"leaf {name} is damaged: {file} has {len(whole) + 1:,} bytes, and {len(whole):,} were written"
        assert checkpoint.verify(path) == [expected]
        file.unlink()
        for found in (checkpoint.verify(path)[0], told(checkpoint.restore, path, state)):
            assert f"leaf {name} is damaged: {file} is missing" in found
        refused(["every checkpoint is damaged", str(file)], checkpoint.newest_sound, tmp_path)
        file.write_bytes(whole)
        assert checkpoint.verify(path) == []
    (arrays / "b" / "c.1").write_bytes(b"x")
    assert checkpoint.verify(path) == [f"{arrays / 'b' / 'c.1'}: does not belong to the checkpoint"]
    (arrays / "b" / "c.1").unlink()
    (arrays / "b" / "zarr.json").unlink()
    assert "b/zarr.json: damaged or missing" in checkpoint.verify(path)[0]
    assert_same_bits(checkpoint.restore(path, state), state)


def test_a_folder_in_place_of_a_file(tmp_path):
    path = checkpoint.save(tmp_path, small(1), step=1)
    file = path / "arrays" / "a" / "c.0"
    file.unlink()
    file.mkdir()
    for found in (checkpoint.verify(path)[0], told(checkpoint.restore, path, small(0))):
        assert "leaf a cannot be read" in found and str(file) in found


def test_files_in_each_others_places(tmp_path, monkeypatch):
    """All are sound files, with the checksums that zarr looks at; only the manifest knows better."""
    monkeypatch.setattr(layout, "SHARE", 1)
    state = {
        "one": torch.randn(64, generator=torch.Generator().manual_seed(1)),
        "two": torch.randn(64),
        "three": torch.randn(1200, 800),
    }
    older = checkpoint.save(tmp_path, {name: leaf + 1 for name, leaf in state.items()}, step=1)
    path = checkpoint.save(tmp_path, state, step=2)
    first, second = path / "arrays" / "one" / "c.0", path / "arrays" / "two" / "c.0"
    swap(first, second)
    assert [line.split(":")[0] for line in checkpoint.verify(path)] == ["leaf one is damaged", "leaf two is damaged"]
    assert "leaf one is damaged" in told(checkpoint.restore, path, state)
    swap(first, second)
    for name, key in (("one", "c.0"), ("three", "c.0.0")):
        file, whole = path / "arrays" / name / key, (path / "arrays" / name / key).read_bytes()
        shutil.copy(older / "arrays" / name / key, file)
        for found in (checkpoint.verify(path)[0], told(checkpoint.restore, path, state)):
            assert f"leaf {name} is damaged" in found and str(file) in found
        assert checkpoint.newest_sound(tmp_path)[0] == older
        file.write_bytes(whole)
    assert checkpoint.verify(path) == []


def test_parts_of_one_leaf_in_each_others_places(tmp_path, monkeypatch):
    """As two ranks wrote them: here one rank, by a limit on the bytes of an object."""
    from fzero.checkpoint import save_state

    whole = layout.plan_tiles
    monkeypatch.setattr(
        save_state, "plan_tiles", lambda *args, **options: whole(*args, **{**options, "max_bytes": 2048})
    )
    state = {"a": torch.arange(1024.0)}
    path = checkpoint.save(tmp_path, state, step=1)
    files = [path / "arrays" / "a" / f"c.{i}" for i in range(2)]
    assert_same_bits(checkpoint.restore(path, state), state)
    swap(*files)
    assert (
        len(checkpoint.verify(path)) == 2 and f"leaf a is damaged: chunk 0 in {files[0]}" in checkpoint.verify(path)[0]
    )
    assert "leaf a is damaged" in told(checkpoint.restore, path, state)
    swap(*files)
    assert checkpoint.verify(path) == []


def swap(a, b):
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


def test_no_flipped_byte_of_a_manifest_goes_unseen(tmp_path):
    checkpoint.save(tmp_path, small(1), step=1)
    path = checkpoint.save(tmp_path, small(2), step=2, config={"lr": 0.5, "name": "é"})
    file, draw = path / "manifest.json", random.Random(1)
    for at in draw.sample(range(file.stat().st_size), 300):
        mask = draw.randrange(1, 256)
        flip(file, at, mask)
        found = checkpoint.verify(path)
        assert len(found) == 1 and str(file) in found[0] and "\n" not in found[0], (at, mask)
        assert checkpoint.newest_sound(tmp_path)[0].name == "step-00000001"
        flip(file, at, mask)
    assert checkpoint.verify(path) == []


def test_a_manifest_that_is_something_else(tmp_path):
    path = checkpoint.save(tmp_path, small(1), step=1)
    file = path / "manifest.json"
    text = file.read_text()
    for bad in ("", "{", "[]", "1", "null", '"x"', "{}", text.replace('"step": 1', '"step": 2'), text[:-1]):
        file.write_text(bad)
        refused([f"{file}: damaged"], checkpoint.restore, path, small(0))
        assert checkpoint.steps(tmp_path) == [1] and len(checkpoint.verify(path)) == 1
    # It is kept as it is, until its step is saved again.
    checkpoint.save(tmp_path, small(2), step=2)
    assert (
        file.exists()
        and (path / "arrays" / "a" / "c.0").exists()
        and checkpoint.newest_sound(tmp_path)[0].name == "step-00000002"
    )
    checkpoint.save(tmp_path, small(3), step=1)
    assert checkpoint.verify(path) == [] and len(list(path.iterdir())) == 2
    assert_same_bits(checkpoint.restore(path, small(0)), small(3))
    file.unlink()
    refused(["manifest.json: no such file", "is not a complete checkpoint"], checkpoint.restore, path, small(0))
    assert checkpoint.steps(tmp_path) == [2]


def test_a_manifest_of_another_state_with_its_own_checksum(tmp_path):
    """The manifest of one checkpoint in the folder of another."""
    first, second = (checkpoint.save(tmp_path, small(i), step=i) for i in (1, 2))
    shutil.copy(first / "manifest.json", second / "manifest.json")
    assert "leaf a is damaged" in told(checkpoint.restore, second, small(0))
    assert checkpoint.newest_sound(tmp_path)[0] == first


def test_descriptions_are_compared_with_the_manifest(tmp_path):
    path = checkpoint.save(tmp_path, small(1), step=1)
    leaf = checkpoint.open_checkpoint(path).leaves["a"]
    file = path / "arrays" / "a" / "zarr.json"
    assert file.read_text() == layout.array_json(leaf.layout, {"spec": leaf.spec, "digest": leaf.digest})
    body = json.loads(file.read_text())
    file.write_text(json.dumps({**body, "fill_value": 1.0}))
    assert checkpoint.verify(path) == [f"{file}: damaged or missing; its leaves can still be restored"]
