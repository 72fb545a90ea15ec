"""Checkpoints on one process (fzero/checkpoint/): round trips, what zarr reads, parts of a state, what is kept and
removed."""

import json
import os
import sys

import pytest
import tensorstore
import torch
import zarr
from checkpoint_cases import SMALL, Pair, assert_same_bits, bits, contents, refused, small, tree
from close import assert_same

import fzero
from fzero import checkpoint
from fzero.checkpoint import manifest as manifest_module
from fzero.checkpoint import writer
from fzero.core import digest, pytree, torch_private
from fzero.run.runner.saver import retire_excess
from fzero.sharding import Spec, fake_mesh

# ---- round trips ----


@pytest.mark.parametrize("compress", ["", "zstd"])
def test_every_kind_of_leaf_comes_back_bit_for_bit_in_the_containers_of_like(tmp_path, compress):
    config = {"lr": 0.1, "name": "é"}
    path = checkpoint.save(tmp_path / "run" / "checkpoints", tree(), step=20, config=config, compress=compress)
    assert path == tmp_path / "run" / "checkpoints" / "step-00000020"
    back = checkpoint.restore(path, tree(1))
    assert_same_bits(back, tree())
    assert isinstance(back["odd"], Pair) and back["nothing"] == () and isinstance(back["ints"], list)
    on_meta = checkpoint.restore(path, pytree.map(lambda x: x.to("meta"), tree(1)))
    assert_same_bits(on_meta, tree())
    assert_same_bits(checkpoint.restore_leaves(path, lambda name: True), pytree.named_leaves(tree()))
    said = checkpoint.read_manifest(path)
    assert (said["step"], said["config"], said["mesh"]) == (20, config, {})
    assert said["versions"] == {"fzero": fzero.__version__, "torch": torch.__version__}
    assert list(said["leaves"]) == pytree.names(tree())
    for name, leaf in pytree.named_leaves(tree()).items():
        assert said["leaves"][name]["digest"] == f"{digest.digest(leaf):016x}", name
    assert max(checkpoint.open_checkpoint(path).leaves[name].layout.chunks for name in ("large", "layers")) > 4
    assert checkpoint.verify(path) == []


def test_zstd_makes_what_repeats_smaller(tmp_path):
    state = {"a": torch.zeros(1 << 20), "b": torch.arange(1 << 20)}
    sizes = {}
    for compress in ("", "zstd"):
        path = checkpoint.save(tmp_path / (compress or "none"), state, step=1, compress=compress)
        sizes[compress] = sum(file.stat().st_size for file in path.rglob("c*") if file.is_file())
        assert_same_bits(checkpoint.restore(path, state), state)
        held = checkpoint.open_checkpoint(path)
        assert torch.equal(held.read("b", (777_777,), (5,)), torch.arange(777_777, 777_782))
        held.close()
    assert sizes["zstd"] < 0.3 * sizes[""]


def test_without_zstandard_what_is_compressed_names_it(tmp_path, monkeypatch):
    state = {"a": torch.zeros(1 << 10)}
    path = checkpoint.save(tmp_path / "before", state, step=1, compress="zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ValueError, match=r"step-0+1/arrays/a/c.*: this needs the package zstandard; pip install"):
        checkpoint.restore(path, state)
    with pytest.raises(ValueError, match=r"train.compress = zstd: this needs the package zstandard; pip install"):
        checkpoint.Writer(tmp_path / "after", compress="zstd")  # before a step is made
    assert not (tmp_path / "after").exists()


def as_zarr(leaf):
    """What plain zarr has of a leaf: integers for the dtypes that it does not know."""
    widths = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
    return (leaf.contiguous().view(widths[leaf.dtype]) if leaf.dtype in widths else leaf).numpy()


@pytest.mark.parametrize("compress", ["", "zstd"])
def test_zarr_and_tensorstore_read_the_same_elements(tmp_path, compress):
    path = checkpoint.save(tmp_path, tree(), step=0, compress=compress)
    group = zarr.open_group(str(path / "arrays"), mode="r")
    for name, leaf in pytree.named_leaves(tree()).items():
        expected = as_zarr(leaf)
        store = {"driver": "file", "path": f"{path}/arrays/{name}/"}
        other = tensorstore.open({"driver": "zarr3", "kvstore": store}).result()
        assert group[name].shape == other.shape == expected.shape and group[name].dtype == expected.dtype
        assert group[name].attrs["dtype"] == str(leaf.dtype)[6:]
        inner = tuple(slice(n // 3, min(n // 2 + 1, n)) for n in leaf.shape)
        for part in ((...,), inner[:1], inner):
            wanted = expected[part].tobytes()
            assert group[name][part].tobytes() == wanted, (name, part)
            assert other[part].read().result().tobytes() == wanted, (name, part)
    names = {name for name, _ in group.members(max_depth=None)}
    assert names >= set(pytree.names(tree())) and "floats" in names


def test_restored_leaves_own_their_memory(tmp_path):
    path = checkpoint.save(tmp_path, tree(), step=0)
    back = checkpoint.restore(path, tree())
    for file in path.rglob("c*"):
        if file.is_file():
            file.write_bytes(b"\xff" * file.stat().st_size)
    assert_same_bits(back, tree())
    pytree.map(lambda x: x.zero_(), back)


def test_slices(tmp_path):
    state = tree()
    held = checkpoint.open_checkpoint(checkpoint.save(tmp_path, state, step=0))
    for name, start, size in (
        ("large", (0, 0), (1024, 2048)),
        ("large", (511, 3), (2, 2045)),
        ("large", (1023, 2047), (1, 1)),
        ("large", (5, 5), (0, 3)),
        ("layers", (2, 100, 7), (3, 333, 290)),
        ("view", (1, 2), (2, 3)),
        ("odd/second/0", (), ()),
        ("odd/second/2", (0, 1), (0, 2)),
    ):
        expected = pytree.named_leaves(state)[name][tuple(slice(at, at + n) for at, n in zip(start, size))]
        got = held.read(name, start, size)
        assert got.shape == size and torch.equal(bits(got), bits(expected)), name
    for start, size in (((0,), (4,)), ((-1, 0), (2, 2)), ((0, 0), (5, 4)), ((5, 0), (1, 1)), ((0, 0), (-1, 4))):
        refused(["view has shape [4, 6]", "no slice of"], held.read, "view", start, size)
    refused(["has no leaf views", "view"], held.read, "views")
    out = torch.zeros(2, 3)
    assert held.read("view", (1, 2), (2, 3), out=out) is out and torch.equal(out, state["view"][1:3, 2:5])
    held.close()


# ---- parts of a state ----


def test_a_part_of_a_state(tmp_path):
    state = {"params": {"w": torch.ones(2), "b": torch.zeros(3)}, "params_old": torch.ones(1), "step": torch.tensor(7)}
    path = checkpoint.save(tmp_path, state, step=7)
    assert_same(checkpoint.restore(path, state["params"], prefix="params"), state["params"])
    expected = {"params/w": torch.ones(2), "params/b": torch.zeros(3)}
    assert_same(checkpoint.restore_leaves(path, lambda name: name.startswith("params/")), expected)
    refused(
        ["none of its leaves is selected", "params/w"], checkpoint.restore_leaves, path, lambda name: name == "weights"
    )
    refused(["missing: master/w, master/b"], checkpoint.restore, path, state["params"], prefix="master")


def test_keep_drop_and_out(tmp_path):
    path = checkpoint.save(tmp_path, {"p": {"w": torch.ones(2), "b": torch.ones(3)}, "old": torch.ones(1)}, step=1)
    like = {"p": {"w": torch.full((2,), 5.0), "b": torch.full((9,), 6.0)}, "new": torch.full((4,), 7.0)}
    back = checkpoint.restore(path, like, retain="p/b|new", drop="old")
    assert (
        back["p"]["b"] is like["p"]["b"] and back["new"] is like["new"] and torch.equal(back["p"]["w"], torch.ones(2))
    )
    # A name is matched whole.
    refused(["missing: new", "extra: old"], checkpoint.restore, path, like, retain="p/b", drop="ol")
    inner = checkpoint.restore(path, like["p"], prefix="p", retain="b")
    assert inner["b"] is like["p"]["b"] and torch.equal(inner["w"], torch.ones(2))
    inner = checkpoint.restore(path, {"w": torch.zeros(2)}, prefix="p", drop="b")
    out = {"w": torch.zeros(2)}
    assert checkpoint.restore(path, {"w": torch.zeros(2)}, prefix="p", drop="b", out=out)["w"] is out["w"]
    assert torch.equal(out["w"], inner["w"]) and torch.equal(out["w"], torch.ones(2))


def test_another_tree_is_refused_with_the_leaves_named(tmp_path):
    path = checkpoint.save(tmp_path, {"a": torch.ones(2, 3), "b": torch.ones(4), "old": torch.ones(1)}, step=1)
    like = {"a": torch.ones(3, 2), "b": torch.ones(4, dtype=torch.bfloat16), "new": torch.ones(1)}
    shape, dtype = "of another shape: a [2, 3] (wanted [3, 2])", "b float32 (wanted bfloat16)"
    refused([str(path), "missing: new", "extra: old", shape, dtype], checkpoint.restore, path, like)


def test_a_slice_is_of_a_leaf_that_divides(tmp_path):
    """The slices of a longer leaf are not those of this one, though they would have the shape."""
    path = checkpoint.save(tmp_path, {"a": torch.arange(5.0)}, step=1)
    for rank in range(2):
        mesh = fake_mesh({"dp": 2}, rank)
        refused(
            ["of another shape: a [5]"],
            checkpoint.restore,
            path,
            {"a": torch.ones(2)},
            specs={"a": Spec(("dp",))},
            mesh=mesh,
        )


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path):
    good = {"a": torch.ones(2)}
    refused(["leaf 'b/0' is a NoneType"], checkpoint.save, tmp_path, {"a": torch.ones(1), "b": [None]}, step=1)
    refused(
        ["leaf 'a' is torch.complex64"], checkpoint.save, tmp_path, {"a": torch.ones(1, dtype=torch.complex64)}, step=1
    )
    for step in (-1, 1.0, True, torch.tensor(3)):
        refused(["step is"], checkpoint.save, tmp_path, good, step=step)
    for name in ("keep_last", "keep_every"):
        refused([f"{name} is 0"], checkpoint.save, tmp_path, good, step=1, **{name: 0})
    refused(["compress is 'gzip'"], checkpoint.save, tmp_path, good, step=1, compress="gzip")
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
        checkpoint.save(tmp_path, small(step), step=step)
    assert checkpoint.steps(tmp_path) == [3, 20, 100, 123456789]
    assert checkpoint.latest(tmp_path).name == "step-123456789"
    # Only older ones go; a later one (the run was taken back to an earlier step) is not this run's to remove.
    checkpoint.save(tmp_path, small(21), step=21, keep_last=2)
    assert checkpoint.steps(tmp_path) == [20, 21, 100, 123456789]
    assert_same_bits(checkpoint.restore(tmp_path / "step-00000020", small(0)), small(20))
    checkpoint.save(tmp_path, small(5), step=200_000_000, keep_last=1)
    assert contents(tmp_path) == ["step-200000000", *(f"step-200000000/{name}" for name in SMALL)]


@pytest.mark.parametrize(
    "step, keep_last, keep_every, left",
    [(4, 2, 0, [3, 4, 5]), (5, 1, 2, [2, 4, 5]), (5, 0, 0, [1, 2, 3, 4, 5]), (9, 1, 0, [1, 2, 3, 4, 5])],
)
def test_what_a_kill_left_beyond_keep_last_is_gone_at_the_next_start(tmp_path, step, keep_last, keep_every, left):
    """A later one than the state that a run resumes from was passed over as damaged: it stays, and so does that state's
    own."""
    for at in (1, 2, 3, 4, 5):
        checkpoint.save(tmp_path, small(at), step=at)
    retire_excess(tmp_path, step, keep_last, keep_every, print)
    assert checkpoint.steps(tmp_path) == left


KINDS = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "complex128": lambda: torch.ones(3, dtype=torch.complex128),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "uint16": lambda: torch.ones(3, dtype=torch.uint16),
    "meta": lambda: torch.ones(3, device="meta"),
    "fake": lambda: torch_private.FakeTensorMode().from_tensor(torch.ones(3)),
    "subclass": lambda: torch.ones(3).as_subclass(type("Mine", (torch.Tensor,), {"__torch_dispatch__": print})),
    "number": lambda: 3.0,
    "array": lambda: torch.ones(3).numpy(),
    "text": lambda: "a",
    "module": lambda: torch.nn.Linear(2, 2),
    "lazy complex": lambda: checkpoint.Lazy(torch.complex64, (3,), lambda: None),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:.*quantize")
def test_a_leaf_that_cannot_be_stored_is_refused_before_anything_is_written(kind, tmp_path):
    refused(
        ["checkpoint: leaf 'b/0' is "],
        checkpoint.save,
        tmp_path / "c",
        {"a": torch.ones(2), "b": [KINDS[kind]()]},
        step=1,
    )
    if isinstance(KINDS[kind](), torch.Tensor):
        refused(["checkpoint: the state is "], checkpoint.save, tmp_path / "c", KINDS[kind](), step=1)
    assert contents(tmp_path) == []


def test_a_leaf_inside_of_a_transformation_is_refused(tmp_path):
    def loss(x):
        refused(["checkpoint: leaf 'a' is a tensor inside"], checkpoint.save, tmp_path / "c", {"a": x}, step=1)
        return x.sum()

    torch.func.grad(loss)(torch.ones(3))
    torch.vmap(loss)(torch.ones(2, 3))
    assert contents(tmp_path) == []


@pytest.mark.parametrize(
    "leaf",
    [
        torch.nn.Parameter(torch.ones(3)),
        torch.imag(torch.tensor([1 + 2j, 3 - 4j]).conj()),
        torch.ones(3).expand(2, 3),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(2, 0),
        torch.zeros(()),
    ],
    ids=["parameter", "negative bit", "expanded", "channels last", "empty", "scalar"],
)
def test_other_kinds_of_leaves_come_back(leaf, tmp_path):
    path = checkpoint.save(tmp_path, {"a": leaf}, step=1)
    assert_same_bits(
        checkpoint.restore(path, {"a": torch.empty_like(leaf)}), {"a": leaf.detach().resolve_neg().clone()}
    )


@pytest.mark.parametrize("state", [{}, (), [], {"a": {}}, {"a": ((), [])}], ids=str)
@pytest.mark.parametrize("place", ["folder", "url"])
def test_a_state_without_leaves_comes_back(state, place, tmp_path):
    folder = tmp_path if place == "folder" else f"file://{tmp_path}"
    for step in (1, 2):  # the second in the place of the first
        path = checkpoint.save(folder, state, step=step, config={"a": 1}, keep_last=1)
        assert checkpoint.restore(path, state) == state and checkpoint.verify(path) == []
    assert checkpoint.steps(folder) == [2] and checkpoint.read_manifest(path)["config"] == {"a": 1}
    refused(["missing: w"], checkpoint.restore, path, {"w": torch.ones(1)})


def test_keep_every(tmp_path):
    for step in range(10, 100, 10):
        checkpoint.save(tmp_path, small(step), step=step, keep_last=2, keep_every=30)
    assert checkpoint.steps(tmp_path) == [30, 60, 80, 90]
    assert all(checkpoint.verify(checkpoint.step_folder(tmp_path, step)) == [] for step in (30, 60, 80, 90))


def test_saving_a_step_again_replaces_it(tmp_path):
    for i in range(3):
        path = checkpoint.save(tmp_path, small(i, n=5 + i), step=5)
        assert_same_bits(checkpoint.restore(path, small(0, n=5 + i)), small(i, n=5 + i))
        assert [name.replace("arrays-1", "arrays") for name in contents(path)] == SMALL and checkpoint.verify(
            path
        ) == []


def test_what_others_put_into_the_folder_stays(tmp_path):
    mine = tmp_path / "step-00000001"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "arrays.txt").write_text("also mine")
    checkpoint.save(tmp_path, small(2), step=2, keep_last=1)
    checkpoint.save(tmp_path, small(3), step=3, keep_last=1)
    assert (mine / "notes.txt").read_text() == "mine" and (tmp_path / "step-1").is_dir()
    assert contents(tmp_path / "step-00000002") == ["arrays.txt"]
    assert checkpoint.steps(tmp_path) == [3]


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, small(0), step=1)
    before = contents(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    for step in (1, 2):
        for name in ("mkdir", "pwritev", "fsync", "replace", "posix_fallocate", "sync_file_system"):
            state = small(1, n=300_000 if name == "posix_fallocate" else 5)
            with (
                monkeypatch.context() as patch,
                pytest.raises(checkpoint.SaveFailed, match=f"step-0000000{step}: .*No space left"),
            ):
                patch.setattr(writer if name == "sync_file_system" else os, name, full)
                checkpoint.save(tmp_path, state, step=step, keep_last=1)
            assert contents(tmp_path) == before, name
            assert_same_bits(checkpoint.restore(tmp_path / "step-00000001", small(0)), small(0))


def test_a_text_is_written_to_its_end(tmp_path, monkeypatch):
    """A write may do less than it was asked to, as the last one does on a disk that is nearly full."""
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, bytes(data)[:100]))
    assert checkpoint.verify(checkpoint.save(tmp_path, small(1), step=1)) == []


def test_a_manifest_of_a_later_version_is_refused_by_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest_module, "VERSION", 3)
    path = checkpoint.save(tmp_path, small(1), step=1)
    monkeypatch.undo()
    refused(["version 3", "reads version 2"], checkpoint.restore, path, small(1))
    text = json.loads((path / "manifest.json").read_text())
    assert text["format"] == "fzero-checkpoint"


BEYOND = {  # what no reader of a manifest takes
    "config: ": {"config": eval("[" * 90 + "]" * 90)},
    "64 bits": {"config": {"a": 2**70}},
    "surrogate": {"config": ["\ud800"]},
    "not JSON": {"config": {"a": float("nan")}},
    "step is": {"step": 2**64},
    "33 dims": {"state": {"w": torch.ones([1] * 33)}},
}


@pytest.mark.parametrize("what", BEYOND)
def test_what_could_not_be_read_again_is_refused_before_anything_is_written(what, tmp_path):
    given = {"state": {"w": torch.ones(2)}, "step": 1, **BEYOND[what]}
    what = "nested" if what == "config: " else what
    refused(["checkpoint: ", what], checkpoint.save, tmp_path / "c", given.pop("state"), **given)
    assert not (tmp_path / "c").exists()
    path = checkpoint.save(tmp_path, {"w": torch.ones([1] * 32)}, step=2**63 - 1, config=[[{"a": 2**64 - 1}]])
    assert checkpoint.open_checkpoint(path).config == [[{"a": 2**64 - 1}]] and checkpoint.verify(path) == []


def test_no_manifest_is_written_that_would_not_be_read(tmp_path, monkeypatch):
    """The last line of defence: a save that gets that far fails, and does not report success."""
    monkeypatch.setattr("fzero.checkpoint.manifest.kind_fault", lambda leaf: "")
    with pytest.raises(checkpoint.SaveFailed, match="do not divide the shape"):
        checkpoint.save(tmp_path, {"w": torch.ones([1] * 33)}, step=1)
    assert checkpoint.steps(tmp_path) == []


@pytest.mark.parametrize("made", [None, torch.ones(3), torch.ones(2).half()], ids=str)
def test_a_lazy_leaf_that_gives_another_thing_is_named(made, tmp_path):
    lazy = checkpoint.Lazy(torch.float32, (2,), lambda: made)
    with pytest.raises(checkpoint.SaveFailed, match=r"a Lazy leaf says torch\.float32 of shape \[2\], and its give"):
        checkpoint.save(tmp_path, {"w": lazy}, step=1)


@pytest.mark.parametrize("url", [False, True])
def test_a_checkpoint_that_is_not_there_is_not_removed(url, tmp_path):
    refused(["step-00000007: no such checkpoint"], checkpoint.remove, f"file://{tmp_path}" if url else tmp_path, 7)
