"""Checkpoints (fzero/checkpoint.py): round trips, what is kept and removed, damage."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from close import assert_same
from safetensors.torch import load_file

import fzero
from fzero import checkpoint, pytree


class Pair(NamedTuple):
    first: object
    second: object


def tree(seed=0):
    """A tree with every container and kind of leaf that a state may have."""
    g = torch.Generator().manual_seed(seed)
    floats = {str(d)[6:]: torch.randn(3, 5, generator=g).to(d) for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
    floats |= {str(d)[6:]: torch.randn(6, generator=g).to(d) for d in (torch.float8_e4m3fn, torch.float8_e5m2)}
    ints = [torch.randint(0, 100, (7,), generator=g).to(d) for d in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)]
    return {
        "floats": floats,
        "ints": ints,
        "odd": Pair(torch.tensor([True, False, True]), (torch.tensor(-0.0), torch.tensor(2**62), torch.empty(0, 4))),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "nothing": (),
        "view": torch.randn(6, 4, generator=g).T,
        "expanded": torch.randn(1, generator=g).expand(9),
    }


def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(actual, expected):
    assert_same(pytree.map(bits, actual), pytree.map(bits, expected))
    got, want = pytree.named_leaves(actual), pytree.named_leaves(expected)
    assert [(x.dtype, x.shape) for x in got.values()] == [(x.dtype, x.shape) for x in want.values()]


def refused(said, call, *args, **kwargs):
    """`call` raises ValueError with one line that holds each of the texts `said`."""
    with pytest.raises(ValueError, match=re.escape(said[0])) as error:
        call(*args, **kwargs)
    text = str(error.value)
    assert "\n" not in text and all(part in text for part in said), text


def contents(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


# ---- round trips ----


def test_every_kind_of_leaf_comes_back_bit_for_bit_in_the_containers_of_like(tmp_path):
    path = checkpoint.save(tmp_path / "run" / "checkpoints", tree(), step=20, config={"lr": 0.1, "name": "é"})
    assert path == tmp_path / "run" / "checkpoints" / "step-00000020"
    back = checkpoint.restore(path, tree(1))
    assert_same_bits(back, tree())
    assert isinstance(back["odd"], Pair) and back["nothing"] == () and isinstance(back["ints"], list)
    on_meta = checkpoint.restore(path, pytree.map(lambda x: x.to("meta"), tree(1)))
    assert_same_bits(on_meta, tree())
    said = checkpoint.manifest(path)
    assert (said["step"], said["config"]) == (20, {"lr": 0.1, "name": "é"})
    assert said["versions"] == {"fzero": fzero.__version__, "torch": torch.__version__}
    assert list(said["leaves"]) == pytree.names(tree())
    assert checkpoint.verify(path) == []


def test_any_safetensors_reader_opens_the_file(tmp_path):
    path = checkpoint.save(tmp_path, tree(), step=0)
    named = load_file(path / "state-0.safetensors")
    assert_same_bits({name: named[name] for name in pytree.names(tree())}, pytree.named_leaves(tree()))


def test_restored_leaves_own_their_memory(tmp_path):
    path = checkpoint.save(tmp_path, tree(), step=0)
    back = checkpoint.restore(path, tree())
    for file in path.iterdir():
        file.write_bytes(b"\xff" * file.stat().st_size)
    assert_same_bits(back, tree())
    pytree.map(lambda x: x.zero_(), back)


def test_a_part_of_a_state(tmp_path):
    state = {"params": {"w": torch.ones(2), "b": torch.zeros(3)}, "params_old": torch.ones(1), "step": torch.tensor(7)}
    path = checkpoint.save(tmp_path, state, step=7)
    assert_same(checkpoint.restore(path, state["params"], under="params"), state["params"])
    assert_same(
        checkpoint.restore_leaves(path, lambda name: name.startswith("params/")), {"params/w": torch.ones(2), "params/b": torch.zeros(3)}
    )
    refused(["none of its leaves is selected", "params/w"], checkpoint.restore_leaves, path, lambda name: name == "weights")
    refused(["missing: master/w, master/b"], checkpoint.restore, path, state["params"], under="master")


def test_another_tree_is_refused_with_the_leaves_named(tmp_path):
    path = checkpoint.save(tmp_path, {"a": torch.ones(2, 3), "b": torch.ones(4), "old": torch.ones(1)}, step=1)
    like = {"a": torch.ones(3, 2), "b": torch.ones(4, dtype=torch.bfloat16), "new": torch.ones(1)}
    refused(
        [str(path), "missing: new", "extra: old", "of another shape: a [2, 3] (wanted [3, 2])", "b float32 (wanted bfloat16)"],
        checkpoint.restore,
        path,
        like,
    )
    refused(["leaf 'a' is a int"], checkpoint.restore, path, {"a": 1})


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path):
    good = {"a": torch.ones(2)}
    refused(["leaf 'b/0' is a NoneType"], checkpoint.save, tmp_path, {"a": torch.ones(1), "b": [None]}, step=1)
    refused(["leaf 'a' is torch.complex64"], checkpoint.save, tmp_path, {"a": torch.ones(1, dtype=torch.complex64)}, step=1)
    for step in (-1, 1.0, True, torch.tensor(3)):
        refused(["step is"], checkpoint.save, tmp_path, good, step=step)
    refused(["keep_last is 0"], checkpoint.save, tmp_path, good, step=1, keep_last=0)
    refused(["config is not JSON"], checkpoint.save, tmp_path, good, step=1, config={"a": {1, 2}})
    refused(["config is not JSON"], checkpoint.save, tmp_path, good, step=1, config={"a": float("nan")})
    assert contents(tmp_path) == []
    (tmp_path / "file").write_text("")
    refused(["file: is not a folder"], checkpoint.save, tmp_path / "file", good, step=1)


# ---- finding, keeping, cleaning ----


def test_steps_latest_and_keep_last(tmp_path):
    assert checkpoint.steps(tmp_path / "nowhere") == []
    refused(["no checkpoint in it"], checkpoint.latest, tmp_path)
    refused(["no checkpoint in it"], checkpoint.newest_sound, tmp_path / "nowhere")
    for step in (3, 100, 20, 123456789):
        checkpoint.save(tmp_path, tree(step), step=step)
    assert checkpoint.steps(tmp_path) == [3, 20, 100, 123456789]
    assert checkpoint.latest(tmp_path).name == "step-123456789"
    # Only older ones go; a later one (the run was taken back to an earlier step) is not this run's to remove.
    checkpoint.save(tmp_path, tree(21), step=21, keep_last=2)
    assert checkpoint.steps(tmp_path) == [20, 21, 100, 123456789]
    assert_same_bits(checkpoint.restore(tmp_path / "step-00000020", tree()), tree(20))
    checkpoint.save(tmp_path, tree(5), step=200_000_000, keep_last=1)
    assert contents(tmp_path) == ["step-200000000", "step-200000000/manifest.json", "step-200000000/state-0.safetensors"]


def test_saving_a_step_again_replaces_it(tmp_path):
    for seed in range(3):
        path = checkpoint.save(tmp_path, tree(seed), step=5)
        assert_same_bits(checkpoint.restore(path, tree()), tree(seed))
        assert len(list(path.iterdir())) == 2 and checkpoint.verify(path) == []


def test_what_others_put_into_the_folder_stays(tmp_path):
    mine = tmp_path / "step-00000001"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    (tmp_path / "step-1").mkdir()
    checkpoint.save(tmp_path, tree(), step=2, keep_last=1)
    checkpoint.save(tmp_path, tree(), step=3, keep_last=1)
    assert (mine / "notes.txt").read_text() == "mine" and (tmp_path / "step-1").is_dir()
    assert checkpoint.steps(tmp_path) == [3]


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, tree(0), step=1)
    before = contents(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    for step in (1, 2):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(os, "fsync", full)
            checkpoint.save(tmp_path, tree(1), step=step, keep_last=1)
        assert contents(tmp_path) == before
        assert_same_bits(checkpoint.restore(tmp_path / "step-00000001", tree()), tree(0))


# ---- damage ----


def flip(file, at):
    content = bytearray(file.read_bytes())
    content[at] ^= 0x10
    file.write_bytes(content)


def test_a_flipped_byte_in_a_leaf_is_refused_by_name_and_the_older_one_offered(tmp_path):
    checkpoint.save(tmp_path, tree(0), step=10)
    path = checkpoint.save(tmp_path, tree(1), step=20)
    for name, leaf in checkpoint.manifest(path)["leaves"].items():
        for at in {leaf["offset"], leaf["offset"] + leaf["bytes"] - 1} if leaf["bytes"] else ():
            file = path / "state-0.safetensors"
            flip(file, at)
            refused([f"leaf {name} is damaged", str(file)], checkpoint.restore, path, tree())
            assert checkpoint.newest_sound(tmp_path) == (
                tmp_path / "step-00000010",
                [(path, f"leaf {name} is damaged: its bytes in {file} do not agree with the checksum in manifest.json")],
            )
            # A part that is sound can still be had.
            others = checkpoint.restore_leaves(path, lambda other, name=name: other != name)
            assert len(others) == len(pytree.leaves(tree())) - 1
            flip(file, at)
    assert checkpoint.newest_sound(tmp_path) == (path, [])


def test_no_flipped_byte_anywhere_goes_unseen(tmp_path):
    path = checkpoint.save(tmp_path, {"a": torch.arange(5), "b": {"c": torch.ones(3)}}, step=1, config={"lr": 0.5})
    for file in sorted(path.iterdir()):
        for at in range(0, file.stat().st_size, 5 if file.name == "manifest.json" else 1):
            flip(file, at)
            try:
                # The manifest's layout may change (a space to a line's beginning); nothing that it says may.
                assert checkpoint.verify(path) or (file.name == "manifest.json" and checkpoint.manifest(path)["step"] == 1)
            finally:
                flip(file, at)
    assert checkpoint.verify(path) == []


def test_cut_lost_and_foreign_files(tmp_path):
    path = checkpoint.save(tmp_path, {"a": torch.ones(1000), "b": torch.ones(1000)}, step=1)
    data, whole = path / "state-0.safetensors", (path / "state-0.safetensors").read_bytes()
    like = {"a": torch.ones(1000), "b": torch.ones(1000)}
    for size, said in ((len(whole) - 1, "leaf b is damaged"), (5000, "leaf b is damaged"), (4000, "leaf a is damaged"), (9, "header")):
        data.write_bytes(whole[:size])
        refused([said, str(data)], checkpoint.restore, path, like)
    data.write_bytes(whole + b"x")
    refused(["damaged: it has", str(data)], checkpoint.restore, path, like)
    refused(["every checkpoint is damaged", str(data)], checkpoint.newest_sound, tmp_path)
    data.unlink()
    refused([f"{data}: no such file"], checkpoint.restore, path, like)
    assert len(checkpoint.verify(path)) == 3
    data.write_bytes(whole)
    manifest = path / "manifest.json"
    text = manifest.read_text()
    for bad in ("", "{", "[]", "{}", text.replace('"step": 1', '"step": 2')):
        manifest.write_text(bad)
        refused([f"{manifest}: damaged"], checkpoint.restore, path, like)
    # A damaged checkpoint is kept as it is until its step is saved again.
    checkpoint.save(tmp_path, like, step=2)
    assert data.exists() and checkpoint.newest_sound(tmp_path)[0].name == "step-00000002"
    checkpoint.save(tmp_path, like, step=1)
    assert checkpoint.verify(path) == [] and len(list(path.iterdir())) == 2
    manifest.unlink()
    refused(["manifest.json: no such file"], checkpoint.restore, path, like)
    assert checkpoint.steps(tmp_path) == [2]


def test_a_manifest_of_a_later_version_is_refused_by_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    path = checkpoint.save(tmp_path, tree(), step=1)
    monkeypatch.undo()
    refused(["version 2", "reads version 1"], checkpoint.restore, path, tree())
