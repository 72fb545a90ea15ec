"""Saves behind the training (fzero/checkpoint/writer.py): snapshots, files that are used again, errors and when they
are told."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zarr
from checkpoint_cases import assert_same_bits, contents, small, tree

from fzero import checkpoint
from fzero.checkpoint import directory, save_state, writer
from fzero.checkpoint import manifest as describe
from fzero.core import pytree

# ---- files that are used again ----


def test_the_files_of_one_that_goes_are_written_over(tmp_path):
    saving = checkpoint.Writer(tmp_path, keep_last=1)
    inodes, state = [], {"a": torch.randn(1000, 1000), "b": torch.ones(3)}
    for step in range(1, 6):
        saving.save({name: leaf + step for name, leaf in state.items()}, step=step)
        path = saving.wait().path
        assert checkpoint.steps(tmp_path) == [step] and checkpoint.verify(path) == []
        assert_same_bits(checkpoint.restore(path, state), {name: leaf + step for name, leaf in state.items()})
        inodes.append(
            {file.name: file.stat().st_ino for file in (path / "arrays" / "a").iterdir() if file.name.startswith("c")}
        )
    assert inodes[2] == inodes[0] and inodes[3] == inodes[1] and inodes[0] != inodes[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spare", "step-00000005"]
    saving.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005"]


@pytest.mark.parametrize("compress", ["", "zstd"])
def test_files_that_are_used_again_by_another_state(tmp_path, compress):
    """Of other shapes, dtypes and names, larger and smaller, leaves where groups were: nothing of the old ones is
    left."""
    g = torch.Generator().manual_seed(0)
    states = [
        {"a": torch.randn(700, 900, generator=g), "b": {"c": torch.randn(9, generator=g)}, "gone": torch.ones(3)},
        {"a": torch.randn(300, 900, generator=g), "b": {"c": torch.randn(1_000_000, generator=g)}},
        {"a": torch.randn(700, 900, generator=g).double(), "b": torch.ones(2), "x": {"gone": torch.ones(3)}},
        {"a": {"b": torch.ones(4)}, "b": {"c": torch.randn(3, generator=g)}},
        {"a": torch.randn(2, 3, generator=g), "b": {"c": torch.randn(2000, 1000, generator=g)}},
    ]
    saving = checkpoint.Writer(tmp_path, keep_last=1, compress=compress)
    for step, state in enumerate(states * 2):
        saving.save(state, step=step)
        path = saving.wait().path
        assert checkpoint.verify(path) == [] and checkpoint.steps(tmp_path) == [step]
        assert_same_bits(checkpoint.restore(path, state), state)
        assert {name for name, _ in zarr.open_group(str(path / "arrays"), mode="r").arrays()} == {
            name for name, leaf in state.items() if isinstance(leaf, torch.Tensor)
        }
    saving.close()


# ---- behind the training ----


def held_back(monkeypatch):
    """An event without which no part is written from now on."""
    gate, write = threading.Event(), save_state.TileFile.write

    def waits(self, *args):
        assert gate.wait(20)
        return write(self, *args)

    monkeypatch.setattr(save_state.TileFile, "write", waits)
    return gate


def test_the_state_may_change_when_save_returns(tmp_path, monkeypatch):
    gate, state = held_back(monkeypatch), tree()
    saving = checkpoint.Writer(tmp_path)
    saving.save(state, step=1)
    assert saving.poll() is None and checkpoint.steps(tmp_path) == []
    for leaf in pytree.leaves(state):
        (leaf[:1] if leaf.dim() else leaf).zero_()
    assert saving.poll() is None
    gate.set()
    done = saving.wait()
    assert (done.step, done.path) == (1, tmp_path / "step-00000001") and 0 < done.blocked_s <= done.total_s
    assert saving.poll() is None and saving.wait() is None
    assert_same_bits(checkpoint.restore(done.path, tree()), tree())
    saving.close()


def test_poll_tells_of_each_checkpoint_once(tmp_path):
    saving, told = checkpoint.Writer(tmp_path), []
    for step in range(3):
        saving.save(small(step), step=step)
        while (done := saving.poll()) is None:
            pass
        told.append(done.step)
        assert saving.poll() is None and checkpoint.verify(done.path) == []
    saving.save(small(3), step=3)
    saving.close()
    assert told == [0, 1, 2] and checkpoint.steps(tmp_path) == [0, 1, 2, 3]


def test_a_failure_is_told_once_and_the_next_save_is_sound(tmp_path, monkeypatch):
    state = {"a": torch.randn(900_000)}
    saving = checkpoint.Writer(tmp_path)
    saving.save(state, step=1)
    assert saving.wait().step == 1
    before = contents(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    for at in ("poll", "wait", "save", "close"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", full)
            saving.save(state, step=2)
            saving.current.finished.wait(20)
        with pytest.raises(
            checkpoint.SaveFailed,
            match=r"step-00000002: the checkpoint could not be written: No space left on device \(.*\)$",
        ):
            getattr(saving, at)(*([state] if at == "save" else []), **({"step": 3} if at == "save" else {}))
        if at != "close":
            assert saving.poll() is None and contents(tmp_path) == before
    saving = checkpoint.Writer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        saving.save(state, step=2)
        with pytest.raises(checkpoint.SaveFailed) as error:
            saving.wait()
    # The error is still at hand here, and the memory of the failed snapshot is free nevertheless.
    saving.save(state, step=3)
    assert saving.wait().step == 3 and error.value is not None
    assert_same_bits(checkpoint.restore(tmp_path / "step-00000003", state), state)
    saving.close()


def test_a_failure_before_the_snapshot_is_made(tmp_path, monkeypatch):
    """The thread that commits may fail at once, while leaves are still being copied."""
    state = {str(i): torch.full((100_000,), float(i)) for i in range(40)}
    fill = save_state.TileFile.fill

    def full(*_):
        raise OSError(28, "No space left on device")

    def slow(self, *args):
        threading.Event().wait(0.002)
        return fill(self, *args)

    saving = checkpoint.Writer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(directory, "begin", full)
        patch.setattr(save_state.TileFile, "fill", slow)
        saving.save(state, step=1)
        assert saving.current.finished.wait(5), "nothing came of the save"
    with pytest.raises(checkpoint.SaveFailed, match="No space left"):
        saving.poll()
    saving.save(state, step=2)
    assert saving.wait().step == 2 and checkpoint.verify(tmp_path / "step-00000002") == []
    saving.close()


def test_a_snapshot_in_less_memory_than_the_state(tmp_path):
    """Of several slabs, with leaves made only when their turn comes."""
    large = torch.randn(48 << 18)  # 48 MB: three slabs
    made = []

    def lazy(i):
        def give():
            made.append(i)
            return large + i

        return checkpoint.Lazy(large.dtype, tuple(large.shape), give)

    state = {"large": large, **{f"lazy{i}": lazy(i) for i in range(2)}, "scalar": torch.tensor(3)}
    saving = checkpoint.Writer(tmp_path, buffer_bytes=1 << 20)
    saving.save(state, step=1)
    bound = writer.THREADS * (save_state.SLAB + 8192)
    assert (
        saving.buffers.peak
        <= saving.buffers.size
        <= bound + (2 << 20)
        < sum(leaf.nbytes for leaf in (large, large, large))
    )
    path = saving.wait().path
    assert made == [0, 1] and saving.buffers.peak <= bound
    like = {name: leaf if isinstance(leaf, torch.Tensor) else large for name, leaf in state.items()}
    expected = {"large": large, "lazy0": large, "lazy1": large + 1, "scalar": torch.tensor(3)}
    assert_same_bits(checkpoint.restore(path, like), expected)
    assert checkpoint.verify(path) == []
    saving.close()


def test_the_memory_of_the_snapshot_can_be_made_before(tmp_path):
    state = {"a": torch.randn(1_000_000)}
    saving = checkpoint.Writer(tmp_path)
    saving.reserve(int(1.02 * 4_000_000) + 8192)
    buffers = saving.buffers
    saving.save(state, step=1)
    assert saving.buffers is buffers
    saving.close()


def test_all_calls_have_ended_when_an_error_is_raised():
    """So that none makes files in a folder that is being removed for the error's sake."""
    ended = []

    def call(i):
        if i == 0:
            raise OSError(28, "No space left on device")
        threading.Event().wait(0.02)
        ended.append(i)

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(OSError, match="No space left"):
            describe.run_all(pool, call, range(4))
        assert sorted(ended) == [1, 2, 3]
