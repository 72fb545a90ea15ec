"""Names that become paths of files: by one rule, wherever one is written or read, none leaves its folder."""

import datetime
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import assert_same_bits, contents, refused

from fzero import checkpoint
from fzero.checkpoint import huggingface, manifest
from fzero.checkpoint.convert import dcp as dcp_reader
from fzero.checkpoint.convert.dcp import find_universal
from fzero.checkpoint.convert.tensor_files import TensorEntry, write_safetensors
from fzero.core import leaf_fault, path_fault, pytree
from fzero.offload import LeafFiles, read_description
from fzero.offload.store_manifest import describe_store, signed_text
from fzero.sharding import Spec

W = torch.arange(3.0)
OUTSIDE = ("../x", "../../x", "/abs", "a/../../x", "..", ".", "a/.", "a/..", "a//b", "a/", "/", "//x")
ODD = ("a\\..\\x", "a\nb", "a\0b", "\ud800", "a" * 256, "/".join("a" * 200 for _ in range(20)))
BAD = (*OUTSIDE, *ODD)
NO_LEAF = ("zarr.json", "a/zarr.json", "zarr.json/a")  # paths, but not of leaves
GOOD = ("a b", "é", "a?b", "a#b", "a%20b", "a%2fb", "a:b", "c.0", "c", "...", "-x", "~", "a" * 200, "blocks/0/w")


def state_of(name):
    return pytree.nest({name: W.clone()}) if not name.startswith("/") else {name: W.clone()}


def read_back(path, state):
    return checkpoint.restore(path, pytree.map(torch.empty_like, state))


OPENED, WATCHED = [], []


@pytest.fixture
def opened():
    """The files that this process opens during a test; the hook of the interpreter stays and does nothing after."""
    if not WATCHED:
        sys.addaudithook(lambda event, given: event == "open" and WATCHED[0] and OPENED.append(given[0]))
    WATCHED[:] = [True]
    yield OPENED
    WATCHED[:] = [False]


# ---- what is written ----


@pytest.mark.each_value
@pytest.mark.parametrize("url", [False, True], ids=["folder", "url"])
@pytest.mark.parametrize("name", [*BAD, *NO_LEAF])
def test_a_leaf_whose_name_is_no_path_is_refused_before_anything_is_written(name, url, tmp_path):
    folder = f"file://{tmp_path}/c" if url else tmp_path / "c"
    for state in ({name: W}, {"sound": W, "inner": {name: W}}):
        refused(["checkpoint: leaf ", "rename it"], checkpoint.save, folder, state, step=1)
    assert contents(tmp_path) == []


@pytest.mark.parametrize("names", [("a", "a/b"), ("a", "a/c.0"), ("a/b/c/d", "a/b"), ("", "a")], ids=str)
def test_leaves_whose_files_would_be_in_each_others_places_are_refused(names, tmp_path):
    refused(["checkpoint: leaf "], checkpoint.save, tmp_path / "c", dict.fromkeys(names, W), step=1)
    assert contents(tmp_path) == []


@pytest.mark.parametrize("state", [{"": W}, {"a": {"": W}}, [{"": W}]], ids=str)
def test_an_empty_key_is_refused(state, tmp_path):
    refused(["checkpoint: ", "empty"], checkpoint.save, tmp_path / "c", state, step=1)
    assert contents(tmp_path) == []


@pytest.mark.parametrize("place", ["folder", "file", "memory"])
def test_every_other_name_comes_back(place, tmp_path):
    state = {**dict.fromkeys(GOOD, W), "s": torch.tensor(2), "large": torch.arange(2.0**19)}
    folder = {"folder": tmp_path, "file": f"file://{tmp_path}", "memory": "memory://names"}[place]
    path = checkpoint.save(folder, state, step=1)
    assert_same_bits(read_back(path, state), state)
    assert checkpoint.verify(path) == []


@pytest.mark.each_value
@pytest.mark.parametrize("place", ["folder", "file", "memory"])
@pytest.mark.parametrize("leaf", [W, torch.tensor(2.0), torch.arange(2.0**19).reshape(2, -1), torch.empty(0, 2)])
def test_a_tree_that_is_one_tensor_comes_back(place, leaf, tmp_path):
    folder = {"folder": tmp_path, "file": f"file://{tmp_path}", "memory": f"memory://bare{leaf.numel()}"}[place]
    path = checkpoint.save(folder, leaf, step=1, specs=Spec())
    assert_same_bits(read_back(path, leaf), leaf)
    assert checkpoint.verify(path) == []
    assert_same_bits(checkpoint.restore_leaves(path, lambda name: True), {"": leaf})


def test_a_leaf_is_read_under_its_own_name(tmp_path):
    path = checkpoint.save(tmp_path, {"params": {"w": W, "wide": W + 1}}, step=1)
    for under in ("params/w", "params/wide"):
        found = checkpoint.restore(path, torch.empty(3), prefix=under)
        assert_same_bits(found, W + (under == "params/wide"))


# ---- what is read ----


def manifest_of(tmp_path):
    path = checkpoint.save(tmp_path / "c", {"a": W}, step=1)
    body = manifest.read_manifest(path)
    return path, body, body["leaves"].pop("a")


def write_body(path, body):
    (path / "manifest.json").write_text(manifest.manifest_text({**body, "sha256": manifest._digest(body)}))
    return path


def leaf_of_a_manifest(tmp_path, name):
    path, body, table = manifest_of(tmp_path)
    body["leaves"][name] = table
    return checkpoint.restore_leaves, write_body(path, body), lambda name: True


def arrays_of_a_manifest(tmp_path, name):
    path, body, table = manifest_of(tmp_path)
    body["leaves"]["a"], body["arrays"] = table, name
    return checkpoint.restore_leaves, write_body(path, body), lambda name: True


def leaf_of_a_store(tmp_path, name):
    kept = {"sound": LeafFiles((3,), torch.float32)}
    found = describe_store(kept, 1, 2, {})
    found["leaves"][name] = found["leaves"]["sound"]
    (tmp_path / "store.json").write_text(signed_text(found))
    return read_description, tmp_path


def leaf_of_a_new_store(tmp_path, name):
    return describe_store, {name: LeafFiles((3,), torch.float32)}, 1, 2, {}


def file_of_an_index(tmp_path, name):
    (tmp_path / "in").mkdir()
    write_safetensors(tmp_path / "outside.safetensors", {"w": TensorEntry(W.dtype, W.shape, lambda: W)})
    index = {"weight_map": {"w": name}}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    return huggingface.tensors_of, tmp_path / "in"


def file_of_a_dcp(tmp_path, name):
    dcp.save({"w": W.clone()}, checkpoint_id=tmp_path / "dcp")
    metadata = dcp_reader.read_metadata(tmp_path / "dcp")
    for place in metadata.storage_data.values():
        place.relative_path = name
    reader = dcp_reader.FileSystemReader(tmp_path / "dcp")
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    return dcp_reader._read, tmp_path / "dcp", reader, "w", metadata.state_dict_metadata["w"]


def folder_of_deepspeed(tmp_path, name):
    (tmp_path / "latest_universal").write_text(name, encoding="utf-8", errors="replace")
    return find_universal, tmp_path


READERS = (
    leaf_of_a_manifest,
    arrays_of_a_manifest,
    leaf_of_a_store,
    leaf_of_a_new_store,
    file_of_an_index,
    file_of_a_dcp,
    folder_of_deepspeed,
)


@pytest.mark.each_value
@pytest.mark.parametrize("name", [*OUTSIDE, "../outside.safetensors", *ODD[:3]])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_name_in_a_foreign_file_opens_nothing_outside_of_its_folder(reader, name, tmp_path, opened):
    call, *given = reader(tmp_path, name)
    opened.clear()
    refused(["has a" if reader is not arrays_of_a_manifest else "its folder of arrays"], call, *given)
    ours = ("manifest.json", "store.json", "model.safetensors.index.json", "latest_universal", "zarr.json")
    assert all(Path(str(file)).name in ours for file in opened)


@pytest.mark.parametrize("value", [None, 3, ["a"], {"a": 1}, datetime.date.min], ids=str)
def test_what_is_no_text_is_no_path(value):
    assert "not a text" in path_fault(value) and "not a text" in leaf_fault([value])


WRONG = {
    "dtype": ("complex64", "Tensor", "nn", 3, None, ["a"]),
    "shape": ("a", [-3], [3.0], [2**70], [3, 1], None, 3, [True]),
    "grid": ([0], [2], [-1], [10**9], []),
    "chunk": ([0], [2], [-1], [3, 1]),
    "compress": ("gzip", None, 3, ["zstd"]),
    "sums": ([], [1, 2], ["a"], None, 3, [-1]),
    "spec": (None, 3),
    "digest": (None, 3),
}


@pytest.mark.parametrize("key, value", [(key, value) for key, values in WRONG.items() for value in values])
def test_an_entry_of_a_manifest_that_cannot_be_is_damage(key, value, tmp_path):
    path, body, table = manifest_of(tmp_path)
    body["leaves"]["a"] = {**table, key: value}
    refused([f"{path}/manifest.json: damaged"], checkpoint.read_manifest, write_body(path, body))
    assert len(checkpoint.verify(path)) == 1
    assert manifest.parse_leaf(table).shape == (3,)


@pytest.mark.parametrize(
    "key, value", [("step", "a"), ("step", -1), ("mesh", []), ("leaves", []), ("leaves", {"a": 1})]
)
def test_a_manifest_of_other_types_is_damage(key, value, tmp_path):
    path, body, _ = manifest_of(tmp_path)
    refused([f"{path}/manifest.json: damaged"], checkpoint.read_manifest, write_body(path, {**body, key: value}))
