"""A store of leaves in slots: what was committed is there, what was not is invisible, and damage of any kind is one
clear line."""

import contextlib
import errno
import fcntl
import gc
import json
import math
import multiprocessing
import os
import re
import shutil
import threading
import time
import warnings
from pathlib import Path
from unittest import mock

import pytest
import ranks
import torch
from remedies import tried

import fzero
from fzero import local_batch, models, optim, reopen_state
from fzero.checkpoint import Damaged
from fzero.core import HUGE, PAGE, precision, pytree
from fzero.offload import (
    STEP,
    STORE,
    BufferPool,
    DiskIO,
    DiskSettings,
    DiskTensor,
    LeafFiles,
    Nvme,
    RowBlock,
    ScratchFile,
    begin_ahead,
    buffer_need,
    cut_units,
    mount_point,
    read_description,
    read_step_manifest,
    read_store,
    release_store,
    save_settings,
    serves_direct,
    store_manifest,
)
from fzero.offload import chunk_files as chunks_module
from fzero.offload import update_units as scratch_module
from fzero.offload.nvme import StoreRanks, open_store
from fzero.offload.store_manifest import step_manifest_text
from fzero.sharding import MOST_ELEMENTS, row_blocks

LEAVES = {
    "params/blocks/w": LeafFiles((3, 70, 64), torch.float32, stacked=True),
    "params/embed": LeafFiles((200, 37), torch.bfloat16),
    "params/gain": LeafFiles((), torch.float32),
    "params/blocks/fixed": LeafFiles((2, 33), torch.float32, stacked=True, slots=1),
    "opt/codes": LeafFiles((3, 5000), torch.uint8, stacked=True),
    "opt/none": LeafFiles((0,), torch.float32),
}
SIZES = {"vocab_size": 97, "max_len": 8, "d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 24}
VALUES = {"count": 1.25}


@pytest.fixture
def direct(tmp_path):
    """A folder that takes direct transfers."""
    if not serves_direct(tmp_path):
        pytest.skip(f"{tmp_path}: its file system refuses O_DIRECT")
    return tmp_path / "state"


@pytest.fixture
def opened():
    """Opens stores of LEAVES, and closes them."""
    with contextlib.ExitStack() as stack:

        def open_one(place, leaves=LEAVES, **options):
            buffers, disk = BufferPool(1 << 20), DiskIO(DiskSettings(block_bytes=2 * PAGE))
            stack.callback(disk.close)
            store = open_store(place, leaves, streams=(buffers, disk), **options)
            stack.callback(store.close)
            return store

        yield open_one


def drawn(kept, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (math.prod(kept.shape) * kept.dtype.itemsize,), dtype=torch.uint8, generator=g)
    return x.view(kept.dtype).reshape(kept.shape) if x.numel() else torch.empty(kept.shape, dtype=kept.dtype)


def version(seed, leaves=LEAVES):
    """All leaves, with any bits; those that are written once are those of seed 0."""
    return {name: drawn(kept, [0, seed][kept.slots > 1] + 100 * i) for i, (name, kept) in enumerate(leaves.items())}


def write(store, seed, *, rows_of=None, leaves=None):
    """Begin and write a version, in pieces."""
    store.begin()
    for name, value in version(seed, store.leaves).items():
        kept = store.leaves[name]
        if (leaves is not None and name not in leaves) or (kept.slots == 1 < store.slots and store.record is not None):
            continue
        for i in range(kept.layers):
            layer = value[i] if kept.stacked else value
            for rows in store.chunks.row_blocks(name, rows_of or 1 << 30):
                part = layer[rows[0] : rows[1]] if layer.dim() else layer
                buffer = store.buffers.allocate(tuple(part.shape), part.dtype, store.disk.busy)
                buffer.view.copy_(part)
                store.write(name, i, rows, buffer)


def make(store, seed, step=None, **options):
    write(store, seed, **options)
    store.commit(seed if step is None else step, {**VALUES, "seed": seed})


def found(store, slot=None):
    return {name: DiskTensor(store, name).tensor(slot) for name in store.leaves}


def bits(x):
    return x.reshape(-1).view(torch.uint8)


def assert_version(store, seed, slot=None):
    assert store.record.values["seed"] == seed or slot is not None
    wanted = version(seed, store.leaves)
    for name, value in found(store, slot).items():
        assert value.dtype == wanted[name].dtype and value.shape == wanted[name].shape, name
        assert torch.equal(bits(value), bits(wanted[name])), name


def said(call, *words):
    """The message of the ValueError that a call raises: one line with these words."""
    with pytest.raises(ValueError) as raised:
        call()
    text = str(raised.value)
    assert "\n" not in text and len(text) < 500, text
    for word in words:
        assert re.search(str(word), text), f"{word!r} is not in: {text}"
    assert re.search(r"; |: resume|\(fzero\.Nvme\(folder\); --nvme", text), f"no fix is named: {text}"
    return text


# -- versions


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("verify", [True, False])
def test_what_was_committed_is_there_and_in_a_later_process(direct, opened, slots, verify):
    store = opened(direct, slots=slots, verify=verify)
    for step in range(4):
        make(store, step, rows_of=PAGE)
        assert_version(store, step)
    store.close()
    again = opened(direct, slots=slots, verify=verify, resume=True)
    assert again.record._replace(slot=0) == (3, 0, {**VALUES, "seed": 3}, {}, False, False)
    assert_version(again, 3)
    make(again, 4)
    assert_version(again, 4)


def test_a_write_without_commit_is_invisible(direct, opened):
    store = opened(direct)
    make(store, 1)
    write(store, 2)
    store.flush()
    assert_version(store, 1)
    store.close()
    assert_version(opened(direct, resume=True), 1)


def test_a_version_that_is_abandoned_is_forgotten(direct, opened):
    store = opened(direct)
    make(store, 1)
    write(store, 2)
    store.abandon()
    assert_version(store, 1)
    make(store, 3)
    store.close()
    assert_version(opened(direct, resume=True), 3)


def test_a_commit_of_nothing_written_keeps_leaves_and_takes_values(direct, opened):
    store = opened(direct)
    make(store, 1)
    store.commit(2, {"seed": 1, "count": math.pi})
    assert_version(store, 1)
    store.close()
    again = opened(direct, resume=True)
    assert (again.record.step, again.record.values["count"]) == (2, math.pi)
    assert_version(again, 1)


def test_rows_that_are_written_again_after_a_failure_are_summed_once(direct, opened):
    store = opened(direct)
    make(store, 1)
    write(store, 7, leaves=["opt/codes", "params/embed"])
    store.flush()
    make(store, 2)
    store.close()
    assert_version(opened(direct, resume=True), 2)


def test_the_slots_that_count_are_never_written(direct, opened):
    store, written = opened(direct, slots=4), []
    real = store.chunks.write
    store.chunks.write = lambda name, slot, *rest, **options: (
        written.append(slot),
        real(name, slot, *rest, **options),
    )[1]
    for step in range(9):
        written.clear()
        held = {store.record.slot, *store.record.pinned} if store.record else set()
        make(store, step)
        assert len({slot for slot in written if store.slots > 1}) == 1 or step == 0
        assert not held & set(written)
        if step % 3 == 2:
            kept = store.pin(2)
            assert kept == [step] if step == 2 else [step - 3, step]
        for slot, pinned in store.record.pinned.items():
            assert_version(store, pinned, slot)
    store.close()
    again = opened(direct, slots=4, resume=True)
    assert sorted(again.record.pinned.values()) == [5, 8]
    for slot, pinned in again.record.pinned.items():
        assert_version(again, pinned, slot)
    make(again, 9)
    for slot, pinned in again.record.pinned.items():
        assert_version(again, pinned, slot)


def test_more_checkpoints_than_slots_are_refused(direct, opened):
    store = opened(direct, slots=3)
    make(store, 1)
    said(lambda: store.pin(2), direct, "3 slots keep 1 checkpoints and 2 are asked for", "nvme.slots=4")
    assert store.pin(1) == [1]


def test_one_slot_is_dirty_while_it_is_written(direct, opened):
    store = opened(direct, slots=1)
    make(store, 1)
    assert not read_step_manifest(direct).dirty
    write(store, 2)
    assert read_step_manifest(direct).dirty
    store.flush()
    store.close()
    said(lambda: opened(direct, slots=1, resume=True), direct, "step 2 was being written over step 1", "nvme.slots=2")


def test_a_trimmed_store_goes_on(direct, opened):
    store = opened(direct, slots=4)
    for step in range(4):
        make(store, step)
    store.pin(1)
    make(store, 4)
    before = used(direct)
    store.trim()
    store.close()
    assert used(direct) == before - 2 * sum(kept.layers * kept.file_bytes for kept in LEAVES.values() if kept.slots > 1)
    again = opened(direct, slots=4, resume=True)
    assert_version(again, 4)
    make(again, 5)
    assert_version(again, 5)
    assert_version(again, 3, next(iter(again.record.pinned)))
    assert before <= used(direct) <= before + 2 * PAGE  # checksums of one more slot


def test_ranks_have_chunks_of_their_own(direct, opened):
    first, second = (opened(direct, ranks=StoreRanks(rank, 2)) for rank in (0, 1))
    write(first, 1)
    write(second, 2)
    second.commit(1, {"seed": 1})
    assert read_step_manifest(direct) is None, "rank 0 says what is complete"
    first.commit(1, {"seed": 1})
    first.close()
    second.close()
    for rank, seed in ((0, 1), (1, 2)):
        again = opened(direct, ranks=StoreRanks(rank, 2), resume=True)
        assert_version(again, seed, again.record.slot)


# -- whose folder it is


def finished(place, opened, leaves=LEAVES, **options):
    store = opened(place, leaves, **options)
    make(store, 1)
    store.finish()
    store.close()


def other(name="params/embed", **changes):
    return {**LEAVES, name: LEAVES[name]._replace(**changes)}


@pytest.mark.parametrize(
    "leaves, options, words",
    [
        (
            {**LEAVES, "params/extra": LeafFiles((3,), torch.float32)},
            {},
            ["another model or optimizer", "it has no params/extra"],
        ),
        ({k: v for k, v in LEAVES.items() if k != "opt/codes"}, {}, ["another model or optimizer", "opt/codes too"]),
        (
            other(shape=(200, 38)),
            {},
            ["another model, optimizer or mesh", "params/embed is bfloat16", "37.*there and bfloat16.*38.*here"],
        ),
        (other(dtype=torch.float16), {}, ["params/embed is bfloat16.*there and float16"]),
        (other("params/blocks/w", stacked=False), {}, ["params/blocks/w"]),
        (other("params/blocks/fixed", slots=2), {}, ["params/blocks/fixed is frozen float32.*there and float32"]),
        (LEAVES, {"ranks": StoreRanks(0, 2)}, ["ranks is 1 and the run's is 2", "use the same number of processes"]),
        (LEAVES, {"slots": 3}, ["slots"]),
        (LEAVES, {"owner": {"stage": 3, "mesh": {}}}, ["owner is .*'stage': 0.* and the run's is .*'stage': 3"]),
    ],
)
def test_the_store_of_another_run_is_named(direct, opened, leaves, options, words):
    finished(direct, opened, owner={"stage": 0, "mesh": {}})
    said(
        lambda: opened(direct, leaves, **{"owner": {"stage": 0, "mesh": {}}, "resume": True, **options}), direct, *words
    )


def test_settings_that_an_error_of_the_store_names(direct, opened):
    finished(direct, opened, verify=False)

    def again(slots=2, verify=False):
        opened(direct, slots=slots, verify=verify, resume=True).close()

    assert tried(again, slots=3) == [{"slots": 2}] and tried(again, verify=True) == [{"verify": False}]
    extra = {**LEAVES, "params/extras": LeafFiles((3,), torch.float32)}
    assert "did you mean" not in said(lambda: opened(direct, extra, resume=True, verify=False), direct)


def test_a_run_that_is_not_over_is_not_overwritten(direct, opened):
    store = opened(direct)
    make(store, 5)
    store.close()
    said(lambda: opened(direct), direct, "holds step 5 of a run that is not over", "--resume", "--nvme")
    assert_version(opened(direct, resume=True), 5)
    release_store(direct)
    opened(direct)


@pytest.mark.parametrize(
    "leaves",
    [LEAVES, other(shape=(300, 5)), other("params/blocks/fixed", slots=2), {"one": LeafFiles((3,), torch.float32)}],
)
@pytest.mark.parametrize("slots", [2, 3])
def test_a_finished_one_is_taken_over(direct, opened, leaves, slots):
    finished(direct, opened)
    store = opened(direct, leaves, slots=slots)
    said(lambda: opened(direct, leaves, slots=slots, resume=True), direct, "no complete step yet")
    make(store, 3)
    make(store, 4)
    store.close()
    again = opened(direct, leaves, slots=slots, resume=True)
    assert_version(again, 4)
    assert {path.name for path in direct.iterdir()} == {STORE, STEP, "sums", "arrays"}
    listed = {str(path.relative_to(direct / "arrays").parent) for path in direct.glob("arrays/**/zarr.json")}
    assert listed == set(leaves)


@pytest.mark.parametrize(
    "left", ["arrays/x/zarr.json", "sums/slot-0.rank-0.json", f"{STORE}.partial", "scratch/.scratch-1"]
)
def test_what_a_start_that_was_killed_left_is_no_obstacle(direct, opened, left):
    path = direct / left
    path.parent.mkdir(parents=True)
    path.write_text("x")
    make(opened(direct), 1)


def test_a_folder_with_other_files_is_refused(direct, opened):
    direct.mkdir()
    (direct / "thesis.txt").write_text("all of it")
    said(lambda: opened(direct), direct, "not empty", "thesis.txt", "empty folder")
    assert (direct / "thesis.txt").read_text() == "all of it"


@pytest.mark.parametrize("where", ["", "/deeper"])
def test_a_file_in_place_of_the_folder_is_named(tmp_path, opened, where):
    (tmp_path / "file").write_text("x")
    said(lambda: opened(f"{tmp_path}/file{where}"), tmp_path / "file", "file|folder")


def test_no_store_and_no_step_are_told_apart(direct, opened):
    said(lambda: opened(direct, resume=True), direct, f"no {STORE}", "without --resume")
    make(opened(direct), 1)
    (direct / STEP).unlink()
    said(lambda: opened(direct, resume=True), direct, "no complete step", "without --resume")


@pytest.mark.parametrize("file", ["zarr.json", "c/0/1/0/0"])
def test_a_fifo_in_the_place_of_an_arrays_file_is_named(direct, opened, file):
    """By those that read a store without opening it, such as sample: tensorstore would wait for a writer."""
    finished(direct, opened)
    path, kept = direct / "arrays/params/blocks/w" / file, LEAVES["params/blocks/w"]
    chunks_module.read_chunk(direct, "params/blocks/w", kept, 0, 1, 0)
    path.unlink()
    os.mkfifo(path)
    end = threading.Timer(20, lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)))  # of a reader that waits
    end.start()
    try:
        said(lambda: chunks_module.read_chunk(direct, "params/blocks/w", kept, 0, 1, 0), path, "is a FIFO; it must be")
    finally:
        end.cancel()


def refusing(name, code, module=os):
    """The function of a module fails with this error."""
    return mock.patch.object(module, name, mock.Mock(side_effect=OSError(code, os.strerror(code), "/state/file")))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_a_folder_that_cannot_be_written_is_named(direct, opened, code):
    direct.mkdir()
    with mock.patch.object(Path, "mkdir", mock.Mock(side_effect=OSError(code, os.strerror(code), str(direct)))):
        said(lambda: opened(direct), direct, os.strerror(code), "--nvme")


def errors_of_rank(mesh, folder):
    """What init_state and reopen_state say on a rank of two, in a folder that rank 0 alone sees to be no store."""
    model = models.mlp(models.MLPConfig())
    plan = fzero.zero_plan(1, model, mesh, offload="opt=nvme")
    found = []
    for make in (
        lambda nvme: fzero.init_state(model, optim.adamw(), plan, seed=0, nvme=nvme),
        lambda nvme: reopen_state(optim.adamw(), plan, nvme),
    ):
        nvme = Nvme(folder, buffer_bytes=1 << 20)
        with pytest.raises(ValueError) as raised:
            make(nvme)
        nvme.close()
        found.append(str(raised.value))
    return found


def test_a_store_that_is_refused_is_refused_on_all_ranks(tmp_path):
    (tmp_path / "notes.txt").write_text("not a store")
    (first, again), (told, told_again) = ranks.run(2, errors_of_rank, str(tmp_path), mesh={"dp": 2})
    assert told == f"rank 0: {first}" and "holds no store" in first and "holds no store" in again
    assert told_again == again or told_again == f"rank 0: {again}"


def test_a_start_on_a_full_disk_gives_its_space_back(direct, opened):
    real = os.posix_fallocate

    def fill(fd, offset, size):
        if len(list(direct.rglob("c/*/*/*/0"))) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, offset, size)

    before = len(os.listdir("/proc/self/fd"))
    with mock.patch.object(os, "posix_fallocate", fill):
        said(lambda: opened(direct), "No space left", "make room")
    assert not list(direct.rglob("c/*/*/*/0")) and len(os.listdir("/proc/self/fd")) <= before + 1
    make(opened(direct), 1)  # the folder serves again


def test_a_store_that_may_not_be_written_can_be_read(direct, opened):
    finished(direct, opened)
    real = os.access
    with mock.patch.object(os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode)):
        store = opened(direct, resume=True)
    assert store.chunks.direct and len(store.chunks.files) and store.record is not None
    for name in LEAVES:
        store.read(name).wait()
    flags = {fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE for fd in store.chunks.files.values()}
    assert flags == {os.O_RDONLY}
    said(store.begin, direct, "may be read and not written", "copy the store")


@pytest.mark.parametrize("verify", (True, False))
def test_a_store_that_went_away_says_so(direct, opened, verify):
    store = opened(direct, verify=verify)
    make(store, 1)
    store.begin()
    shutil.rmtree(direct)
    text = said(lambda: store.commit(2, {"seed": 2}), f"{direct}: is gone")
    assert "holds its last" not in text


def test_a_read_only_folder_is_named(direct, opened):
    direct.mkdir()
    direct.chmod(0o555)
    try:
        if os.access(direct, os.W_OK):
            pytest.skip("this user writes what it may not")
        said(lambda: opened(direct), direct, "Permission denied", "--nvme")
    finally:
        direct.chmod(0o755)


# -- damage


def reopen(opened, place, **options):
    return lambda: opened(place, resume=True, **options)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"step": 1}', "\xff", '{"leaves": {"params/embed": 3}}']
)
@pytest.mark.parametrize("name", [STORE, STEP])
def test_a_broken_text_is_named(direct, opened, name, text):
    make(opened(direct), 1)
    (direct / name).write_bytes(text.encode("latin-1"))
    said(reopen(opened, direct), direct / name, "is not", "resume from a checkpoint")


def test_any_flipped_bit_of_a_description_is_seen_by_every_reader(direct, opened):
    make(opened(direct), 1)
    path = direct / STORE
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        said(lambda: read_store(direct), direct)
    path.unlink()
    said(lambda: read_store(direct), direct, f"{STORE}: is missing beside {STEP}")


@pytest.mark.parametrize("name", [STEP, pytest.param("sums/slot-0.rank-0.json", marks=pytest.mark.slow)])
def test_any_flipped_bit_of_a_text_is_seen(direct, opened, name):
    make(opened(direct), 1)
    path = direct / name
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        said(reopen(opened, direct), direct)
    path.write_bytes(whole)
    assert_version(reopen(opened, direct)(), 1)


def test_a_store_of_another_format_is_named(direct, opened):
    make(opened(direct), 1)
    text = json.loads((direct / STORE).read_text())
    (direct / STORE).write_text(json.dumps({**text, "format": 99}))
    said(reopen(opened, direct), direct, "format 99", "reads 2")


CHUNKS = [(name, layer) for name, kept in LEAVES.items() for layer in range(kept.layers)]


@pytest.mark.parametrize("name, layer", [chunk for chunk in CHUNKS if math.prod(LEAVES[chunk[0]].shape)])
def test_a_flipped_bit_of_a_chunk_is_named(direct, opened, name, layer):
    store = opened(direct)
    make(store, 1)
    make(store, 2)
    kept, path = LEAVES[name], store.chunks.path(name, store.slot_of(name, store.record.slot), layer)
    store.close()
    g = torch.Generator().manual_seed(layer)
    for at in {0, kept.chunk_bytes - 1, *torch.randint(0, kept.chunk_bytes, (3,), generator=g).tolist()}:
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        said(
            reopen(opened, direct),
            path,
            "damaged",
            name,
            "step 2",
            "resume from a checkpoint",
            f"layer {layer}" if kept.stacked else "",
        )
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
    assert_version(reopen(opened, direct)(), 2)


def test_damage_of_the_slot_that_does_not_count_is_none(direct, opened):
    store = opened(direct)
    make(store, 1)
    make(store, 2)
    path = store.chunks.path("params/embed", 1 - store.record.slot, 0)
    store.close()
    path.write_bytes(bytes(len(path.read_bytes())))
    assert_version(reopen(opened, direct)(), 2)


@pytest.mark.parametrize("size", [0, 1, PAGE, -1, 1 << 20])
def test_a_chunk_of_another_length_is_named(direct, opened, size):
    store = opened(direct)
    make(store, 1)
    path = store.chunks.path("params/embed", store.record.slot, 0)
    store.close()
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    said(reopen(opened, direct), path, "params/embed", "bytes and not 16,384", "resume from a checkpoint")


@pytest.mark.parametrize("name, layer", CHUNKS)
def test_a_missing_chunk_is_named(direct, opened, name, layer):
    store = opened(direct)
    make(store, 1)
    path = store.chunks.path(name, store.slot_of(name, store.record.slot), layer)
    store.close()
    path.unlink()
    said(reopen(opened, direct), path, "missing", name, "resume from a checkpoint")


def test_a_missing_folder_of_checksums_is_named(direct, opened):
    make(opened(direct), 1)
    shutil.rmtree(direct / "sums")
    said(reopen(opened, direct), direct, "checksums", "resume from a checkpoint")
    assert_version(opened(direct, verify=False, resume=True), 1)


@pytest.mark.parametrize("text", [None, "{", "\xff"])
def test_a_damaged_store_makes_room_for_what_a_checkpoint_brings(direct, opened, text):
    store = opened(direct, slots=1)
    make(store, 1)
    write(store, 2)
    store.close()
    if text is not None:
        (direct / STEP).write_bytes(text.encode("latin-1"))
    said(reopen(opened, direct, slots=1), direct, "resume from a checkpoint")
    release_store(direct)
    make(opened(direct, slots=1), 7)
    release_store(direct / "nothing")


def test_chunks_of_two_steps_are_not_taken_for_one(direct, opened):
    store = opened(direct)
    make(store, 1)
    make(store, 2)
    old, new = (store.chunks.path("params/blocks/w", slot, 1) for slot in (1 - store.record.slot, store.record.slot))
    store.close()
    shutil.copyfile(old, new)
    said(reopen(opened, direct), new, "damaged")


# -- a disk that fails


def test_a_full_disk_is_found_before_the_run_begins(direct, opened):
    with refusing("posix_fallocate", errno.ENOSPC):
        said(lambda: opened(direct), direct, "No space left", "bytes", "make room")
    make(opened(direct), 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_ends_the_step_and_not_the_store(direct, opened, code):
    store = opened(direct)
    make(store, 1)
    with refusing("pwritev", code):
        write(store, 2)
        said(lambda: store.commit(2, {"seed": 2}), direct, os.strerror(code))
    assert_version(store, 1)
    store.close()
    again = reopen(opened, direct)()
    assert_version(again, 1)
    make(again, 2)
    assert_version(again, 2)


@pytest.mark.parametrize("name", ["fdatasync", "fsync", "replace"])
def test_a_commit_that_fails_leaves_the_step_before(direct, opened, name):
    store = opened(direct)
    make(store, 1)
    write(store, 2)
    with refusing(name, errno.EIO):
        said(lambda: store.commit(2, {"seed": 2}), direct, os.strerror(errno.EIO))
    store.close()
    assert_version(reopen(opened, direct)(), 1)


def test_a_step_whose_record_cannot_be_written_can_be_made_again(direct, opened):
    store = opened(direct, verify=False)  # so that step.json is the only file that is replaced
    make(store, 1)
    write(store, 2)
    with refusing("replace", errno.ENOSPC):
        said(lambda: store.commit(2, {"seed": 2}), direct, os.strerror(errno.ENOSPC))
    assert_version(store, 1)
    make(store, 3)
    store.close()
    assert_version(reopen(opened, direct, verify=False)(), 3)


def test_a_step_that_failed_can_be_made_again(direct, opened):
    store = opened(direct)
    make(store, 1)
    with refusing("pwritev", errno.EIO):
        write(store, 5)
        said(store.flush, direct)
    make(store, 2)
    store.close()
    assert_version(reopen(opened, direct)(), 2)


def test_a_failure_is_told_when_no_write_is_under_way(direct, opened):
    store, real = opened(direct), os.pwritev
    make(store, 1)

    def slow(fd, *rest):
        if fd == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(0.05)
        return real(fd, *rest)

    bad = store.chunks.files["params/blocks/w", 1 - store.record.slot, 0]
    with mock.patch.object(os, "pwritev", slow):
        write(store, 2)
        pending = [*store.writing]
        said(store.flush, direct)
        assert all(one.done.is_set() for one in pending)


def test_a_read_that_fails_is_named(direct, opened):
    store = opened(direct)
    make(store, 1)
    with refusing("preadv", errno.EIO):
        said(lambda: DiskTensor(store, "params/embed").tensor(), direct, os.strerror(errno.EIO))
        said(reopen(opened, direct), direct, os.strerror(errno.EIO))


def test_more_files_than_a_process_may_open_are_refused(direct, opened):
    with mock.patch.object(chunks_module.resource, "getrlimit", lambda _: (64, 64)):
        said(lambda: opened(direct), "chunk files and a process may open 64", "ulimit")


# -- through tensorstore


@pytest.fixture
def refused(monkeypatch):
    """No file system takes direct transfers."""
    monkeypatch.setattr(chunks_module, "serves_direct", lambda folder: False)
    monkeypatch.setattr(scratch_module, "serves_direct", lambda folder: False)


def test_where_direct_transfers_are_refused_the_bits_are_the_same(tmp_path, opened, refused):
    place = tmp_path / "state"
    with pytest.warns(UserWarning, match=f"^{re.escape(str(place))}: .*O_DIRECT.*tensorstore, slower$") as told:
        store = opened(place)
    assert len(told) == 1
    for step in range(3):
        make(store, step, rows_of=PAGE)
        assert_version(store, step)
    store.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = opened(place, resume=True)
        assert_version(again, 2)
        path = again.chunks.path("params/embed", again.record.slot, 0)
        again.close()
        data = bytearray(path.read_bytes())
        data[100] ^= 4
        path.write_bytes(data)
        said(lambda: opened(place, resume=True), path, "damaged", "params/embed")


def test_a_store_written_one_way_is_read_the_other(direct, opened, monkeypatch):
    make(opened(direct), 1)
    monkeypatch.setattr(chunks_module, "serves_direct", lambda folder: False)
    with pytest.warns(UserWarning, match="O_DIRECT"):
        store = opened(direct, resume=True)
    assert_version(store, 1)
    make(store, 2)
    store.close()
    monkeypatch.undo()
    assert_version(reopen(opened, direct)(), 2)


def test_a_store_may_be_a_url(tmp_path, opened):
    place = f"file://{tmp_path}/state"
    store = opened(place)
    for step in range(3):
        make(store, step)
    assert_version(store, 2)
    store.close()
    again = opened(place, resume=True)
    assert_version(again, 2)
    said(lambda: opened(place), place, "not over")
    (tmp_path / "state/arrays/params/embed/zarr.json").unlink()
    said(lambda: opened(place, resume=True), "params/embed")


def test_a_store_may_be_in_memory(opened):
    store = opened("memory://state/")
    for step in range(3):
        make(store, step)
        assert_version(store, step)


def test_the_arrays_are_plain_zarr(direct, opened):
    """tensorstore opens them without us, and so does any reader of zarr3."""
    import tensorstore

    store = opened(direct)
    make(store, 1)
    make(store, 2)
    slot = store.record.slot
    store.close()
    for name, value in version(2).items():
        kept = LEAVES[name]
        path = {"driver": "file", "path": f"{direct}/arrays/{name}/"}
        array = tensorstore.open({"driver": "zarr3", "kvstore": path}).result()
        told = json.loads((direct / "arrays" / name / "zarr.json").read_text())["attributes"]
        assert told == {"shape": list(kept.shape), "stacked": kept.stacked, "elements": math.prod(kept.chunk)}
        at = store.slot_of(name, slot)
        for layer in range(kept.layers):
            data = array[at, layer, 0, : math.prod(kept.chunk)].read().result()
            assert data.tobytes() == bits(value[layer] if kept.stacked else value).numpy().tobytes(), name


# -- what a step keeps for itself


def test_scratch_gives_back_what_was_written(direct):
    direct.mkdir()
    buffers, disk = BufferPool(1 << 20), DiskIO(DiskSettings(block_bytes=PAGE))
    scratch = ScratchFile(direct, buffers, disk)
    values = {("x", i): torch.randn(i * 97 + 1, 11) for i in range(6)}
    for key, value in values.items():
        scratch.write(key, value.clone())
    for key, value in values.items():
        assert torch.equal(scratch.read(key).wait(), value)
    rows = torch.arange(4096 * 3, dtype=torch.float32).reshape(-1, 4)
    scratch.write("rows", rows)
    assert torch.equal(scratch.read("rows", (256, 700)).wait(), rows[256:700])
    assert [path for path in direct.iterdir()] == []
    scratch.close()
    disk.close()
    assert [path for path in direct.iterdir()] == []


def test_scratch_stops_growing_whatever_the_sizes(direct):
    direct.mkdir()
    buffers, disk = BufferPool(1 << 20), DiskIO()
    scratch = ScratchFile(direct, buffers, disk)
    for i in range(20):
        scratch.write("a", torch.full((5000 + 9000 * (i % 3),), float(i)))
        assert scratch.read("a").wait()[0] == i
        if i == 2:
            end = scratch.end
    assert scratch.end == end == os.fstat(scratch.fd).st_size
    scratch.close()
    disk.close()


@pytest.mark.parametrize(
    "name, code", [("posix_fallocate", errno.ENOSPC), ("pwritev", errno.EIO), ("preadv", errno.EIO)]
)
def test_scratch_says_what_failed(direct, name, code):
    direct.mkdir()
    buffers, disk = BufferPool(1 << 20), DiskIO()
    scratch = ScratchFile(direct, buffers, disk)

    def use():
        scratch.write("a", torch.ones(5000))
        scratch.read("a").wait()

    with refusing(name, code):
        said(use, direct, os.strerror(code), "--nvme")
    scratch.close()
    disk.close()


def test_scratch_needs_a_local_folder():
    for folder in (None, "memory://x"):
        said(lambda f=folder: Nvme(f).scratch, folder, "local folder")


def test_scratch_through_the_page_cache_is_the_same(tmp_path, refused):
    buffers, disk = BufferPool(1 << 20), DiskIO()
    with pytest.warns(UserWarning, match="O_DIRECT"):
        scratch = ScratchFile(tmp_path, buffers, disk)
    x = torch.randn(333, 7)
    scratch.write("a", x)
    assert torch.equal(scratch.read("a").wait(), x)
    scratch.close()
    disk.close()


# -- a run


def used(folder):
    """Bytes that a folder takes on its disk."""
    return sum(path.lstat().st_blocks * 512 for path in Path(folder).rglob("*"))


def run(folder, offload, steps=6, then=lambda space, step: None, space=None, stage=0):
    mesh, model = fzero.one_process(), models.llama(models.LlamaConfig(**SIZES))
    plan = fzero.zero_plan(stage, model, mesh, offload=offload, policy=precision.bf16())
    tx = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))
    space = space or Nvme(folder, buffer_bytes=1 << 20)
    state = fzero.init_state(model, tx, plan, seed=0, nvme=space)
    step = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(remat="full"), nvme=space)
    for i in range(steps):
        rows = torch.randint(0, 97, (4, 9), generator=torch.Generator().manual_seed(i))
        state, _ = step(state, local_batch({"tokens": rows[:, :-1], "targets": rows[:, 1:]}, mesh))
        then(space, i)
    return state, lambda space: reopen_state(tx, plan, space)


EVERYTHING = "params=nvme,grads=nvme,opt=nvme,acts=nvme"


@pytest.mark.slow
def test_disk_and_buffers_do_not_grow(direct):
    sizes = []

    def then(space, step):
        sizes.append((used(direct), os.fstat(space.scratch.fd).st_blocks, len(list(direct.rglob("*")))))
        assert space.buffers.peak <= space.buffers.size == 2 << 20

    space = Nvme(direct, buffer_bytes=1 << 20)
    run(direct, EVERYTHING, then=then, space=space)
    # step.json is a block or two, whatever it says.
    assert (
        len({(scratch, files) for _, scratch, files in sizes}) == 1
        and max(s for s, *_ in sizes) - min(s for s, *_ in sizes) <= PAGE
    )
    buffers = space.buffers
    gc.collect()
    buffers._find_range(0)
    assert buffers.lent == 0, "a buffer was not given back"
    space.close()
    assert list((direct / "scratch").iterdir()) == []


@pytest.mark.parametrize("offload", ("params=nvme,opt=nvme", "acts=nvme"))
@pytest.mark.parametrize("step_first", (True, False))
def test_buffers_are_as_large_as_the_plan_needs(direct, monkeypatch, step_first, offload):
    """Whoever makes state and step first; activations, whose size the first step tells, make them grow."""
    monkeypatch.setattr("fzero.offload.nvme.MIN_BYTES", HUGE)
    monkeypatch.setattr("fzero.offload.nvme.MIN_UNIT_BYTES", HUGE)
    rows, width = (8, 600) if offload.startswith("params") else (9000, 64)  # a layer of 2.9 MB, an activation of 2.3
    model, tx = models.mlp(models.MLPConfig(16, 8, width, 2, width)), optim.adamw(1e-2)
    batch = {"tokens": torch.arange(rows)[:, None] % 16, "targets": torch.arange(rows)[:, None] % 16}
    execution = fzero.Execution(remat="full", prefetch=3)

    def losses(offload, nvme):
        plan, state = fzero.zero_plan(0, model, fzero.one_process(), offload=offload), None
        if not step_first:
            state = fzero.init_state(model, tx, plan, seed=0, nvme=nvme)
        step = fzero.make_train_step(model, tx, plan, execution=execution, nvme=nvme)
        state = state or fzero.init_state(model, tx, plan, seed=0, nvme=nvme)
        state, metrics = step(state, batch)
        return float(metrics.loss), int(state.step)

    nvme = Nvme(direct / "whole")
    assert losses(offload, nvme) == losses("", None)
    plan = fzero.zero_plan(0, model, fzero.one_process(), offload=offload)
    assert nvme.buffers.size >= max(HUGE + 1, buffer_need(plan, prefetch=3)) and nvme.buffers.peak <= nvme.buffers.size
    nvme.close()
    with pytest.raises(ValueError, match=r"more are needed at once; .*buffer_bytes of fzero\.Nvme"):
        losses(offload, Nvme(direct / "fixed", buffer_bytes=HUGE))


def test_a_disk_moves_as_it_was_measured(direct, monkeypatch, tmp_path):
    """From a script as in a run; what is given by hand is left as it is."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    measured = DiskSettings(block_bytes=4 << 20, readers=4, writers=2)
    save_settings(mount_point(direct), measured, {})
    for processes, settings, wanted in (
        (1, None, measured),
        (2, None, DiskSettings(4 << 20, 2, 1)),
        (2, DiskSettings(), DiskSettings()),
    ):
        nvme = Nvme(direct, settings=settings)
        nvme.need(1, processes)
        assert nvme.disk.settings == wanted
        nvme.close()


def test_a_space_too_small_says_what_to_give(direct):
    said(lambda: Nvme(direct, buffer_bytes=1000), "buffer_bytes is 1,000", "at least 1,048,576")


def test_a_disk_that_fills_up_in_a_step_leaves_the_step_before(direct):
    space = Nvme(direct, buffer_bytes=1 << 20)
    seen = []

    def then(space, step):
        seen.append(step)
        if step == 2:
            patch.start()

    patch = refusing("pwritev", errno.ENOSPC)
    try:
        with pytest.raises(ValueError, match=f"{direct}: No space left on device.*make room"):
            run(direct, "params=nvme,opt=nvme", then=then, space=space)
    finally:
        patch.stop()
    space.close()
    assert seen == [0, 1, 2]
    again = Nvme(direct, buffer_bytes=1 << 20)
    expected = run(None, "", steps=3, space=Nvme())[0]
    mesh, model = fzero.one_process(), models.llama(models.LlamaConfig(**SIZES))
    plan = fzero.zero_plan(0, model, mesh, offload="params=nvme,opt=nvme", policy=precision.bf16())
    tx = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))
    state = reopen_state(tx, plan, again)
    for name, leaf in pytree.named_leaves(expected).items():
        got = pytree.named_leaves(state)[name]
        assert torch.equal(got.tensor() if isinstance(got, DiskTensor) else got, leaf), name
    again.close()


def test_a_plan_on_a_disk_needs_a_space(direct):
    mesh, model = fzero.one_process(), models.llama(models.LlamaConfig(**SIZES))
    plan = fzero.zero_plan(0, model, mesh, offload="opt=nvme")
    tx = optim.adamw(1e-2)
    said(lambda: fzero.init_state(model, tx, plan, seed=0), "on a disk", "nvme=")
    for offload in ("opt=nvme", "grads=nvme", "acts=nvme"):
        away = fzero.zero_plan(0, model, mesh, offload=offload)
        execution = fzero.Execution(remat="full")
        said(lambda p=away, e=execution: fzero.make_train_step(model, tx, p, execution=e), "on a disk", "nvme=")
    said(lambda: fzero.init_state(model, tx, plan, seed=0, nvme=Nvme()), "no folder", "--nvme")


def test_a_stored_leaf_says_what_a_tensor_says(direct, opened):
    store = opened(direct)
    make(store, 1)
    leaf, tensor = DiskTensor(store, "params/blocks/w"), version(1)["params/blocks/w"]
    for name in ("shape", "dtype", "device", "requires_grad"):
        assert getattr(leaf, name) == getattr(tensor, name)
    assert (leaf.dim(), leaf.numel(), leaf.element_size()) == (tensor.dim(), tensor.numel(), tensor.element_size())
    assert "params/blocks/w" in repr(leaf) and "[3, 70, 64]" in repr(leaf)
    assert torch.equal(bits(leaf.read(1, (16, 48)).wait()), bits(tensor[1, 16:48].contiguous()))


# -- units and pieces


@pytest.mark.parametrize("shape", [(), (0,), (7,), (1000, 3), (4097, 64), (5000, 1), (3, 5000), (8192, 37)])
@pytest.mark.parametrize("most", [1, 1 << 12, 1 << 16, MOST_ELEMENTS])
def test_pieces_cover_a_layer_once_and_begin_at_pages(shape, most):
    found = row_blocks(shape, most)
    rows = shape[0] if shape else 1
    assert [i for start, end in found for i in range(start, end)] == list(range(rows))
    row = math.prod(shape[1:])
    assert all(start * row % PAGE == 0 for start, _ in found)  # in bytes of the narrowest dtype
    step = PAGE // math.gcd(PAGE, row) if row else 1
    assert all((end - start) * row <= max(most, step * row) for start, end in found)


SHAPES = {"blocks/w": (3, 600, 16), "blocks/b": (3, 5), "embed": (700, 16), "scale": (), "head": (2000, 16)}


@pytest.mark.parametrize("most", [1, 5000, 20000, 1 << 30])
@pytest.mark.parametrize("whole", [set(), {"embed", "blocks/w"}])
def test_units_cover_every_element_once(most, whole):
    units = cut_units(SHAPES, lambda name: name.startswith("blocks/"), whole.__contains__, most)
    seen = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in SHAPES.items()}
    for unit in units:
        assert len({part.name for part in unit}) == len(unit), "a leaf twice in a unit"
        assert len(unit) == 1 or sum(part.narrow(seen[part.name]).numel() for part in unit) <= most
        for part in unit:
            view = part.narrow(seen[part.name])
            assert view.dim() == seen[part.name].dim()
            view += 1
            at = part.start(len(SHAPES[part.name]))
            assert view.data_ptr() == seen[part.name][at].data_ptr()
            assert part.name not in whole or part.rows is None
    assert all((count == 1).all() for count in seen.values())
    layers = [part.layer for unit in units for part in unit if part.layer is not None]
    assert layers == sorted(layers)


def test_a_slice_of_what_belongs_to_a_leaf_row_by_row():
    part = RowBlock("blocks/w", 1, (2, 4))
    assert torch.equal(part.narrow(torch.arange(24).reshape(2, 6, 2)), torch.arange(24).reshape(2, 6, 2)[1:2, 2:4])
    assert torch.equal(part.narrow(torch.arange(12).reshape(2, 6)), torch.arange(12).reshape(2, 6)[1:2, 2:4])
    assert torch.equal(part.narrow(torch.arange(2)), torch.tensor([1]))


def test_owners_are_found_by_the_longest_path():
    names = ["params/a/w", "opt/0/m/a/w", "opt/0/count", "opt/m/w", "opt_state/average/a/w"]
    assert list(pytree.owners(names, ["a/w", "w"]).values()) == ["a/w", "a/w", None, "w", "a/w"]


def test_ahead_begins_some_items_before_their_turn():
    begun = []
    out = []
    for item, value in begin_ahead(range(6), lambda i: begun.append(i) or i * i, 2):
        out.append((item, value))
        assert len(begun) == min(6, item + 3)
    assert out == [(i, i * i) for i in range(6)]


def test_pruned_trees_lose_dicts_that_are_left_empty():
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": (3, {"f": 4}), "g": {}}
    assert pytree.prune(tree, lambda name: name == "a/b") == {"a": {"b": 1}, "e": (3, {}), "g": {}}
    assert pytree.prune(tree, lambda name: name != "a/c/d") == {"a": {"b": 1}, "e": (3, {"f": 4}), "g": {}}


# -- one owner


def state_on(folder, *, resume=False):
    """(what a step is made of and the state, a step) of a model on a disk."""
    model, tx = models.llama(models.LlamaConfig(**SIZES)), optim.adamw(1e-2)
    plan = fzero.zero_plan(0, model, fzero.one_process(), offload="params=nvme,opt=nvme")
    nvme = Nvme(folder, buffer_bytes=1 << 22)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*O_DIRECT")  # whatever transfers the file system takes
        state = reopen_state(tx, plan, nvme) if resume else fzero.init_state(model, tx, plan, seed=0, nvme=nvme)
    return nvme, state, fzero.make_train_step(model, tx, plan, nvme=nvme)


def open_and_wait(folder, pipe):
    nvme, _, _ = state_on(folder, resume=True)
    pipe.send("open")
    pipe.recv()
    nvme.close()
    pipe.send("closed")


def test_a_store_has_one_owner(tmp_path):
    tokens = torch.arange(16).reshape(2, 8) % 97
    batch, folder = {"tokens": tokens, "targets": tokens}, tmp_path / "state"
    first_nvme, first, first_step = state_on(folder)
    first, _ = first_step(first, batch)
    second_nvme, second, second_step = state_on(folder, resume=True)
    second, _ = second_step(second, batch)
    record = read_step_manifest(folder)
    for use in (lambda: first_step(first, batch), lambda: pytree.leaves(first.params)[0].tensor()):
        said(use, folder, "holds another state by now", "reopen_state")
    first_nvme.close()  # which is not the owner any more
    assert read_step_manifest(folder) == record and int(second.step) == 2

    (folder / STEP).write_text((folder / STEP).read_text())  # as it is
    second, _ = second_step(second, batch)
    other = read_step_manifest(folder)._replace(step=7)  # as another machine's process would leave it
    (folder / STEP).write_text(step_manifest_text(other))
    said(lambda: second_step(second, batch), folder, "holds another state by now")
    assert read_step_manifest(folder) == other
    second_nvme.close()


def test_a_step_takes_states_of_its_own_store_while_that_is_open(tmp_path):
    tokens = torch.arange(16).reshape(2, 8) % 97
    batch, folder, other = {"tokens": tokens, "targets": tokens}, tmp_path / "state", tmp_path / "other"
    nvme, state, step = state_on(folder)
    other_nvme, _, other_step = state_on(other)
    record = read_step_manifest(other)
    said(lambda: other_step(state, batch), folder, "and the step writes to", "nvme=")
    assert read_step_manifest(other) == record
    nvme.close()
    for use in (lambda: step(state, batch), lambda: pytree.leaves(state.params)[0].tensor()):
        said(use, folder, "this store was closed", "reopen_state")
    other_nvme.close()


def test_a_refused_call_leaves_the_state_that_is_open(tmp_path):
    model, tx, folder, one = (
        models.llama(models.LlamaConfig(**SIZES)),
        optim.adamw(1e-2),
        tmp_path / "state",
        fzero.one_process(),
    )
    tokens = torch.arange(16).reshape(2, 8) % 97
    batch, plan = {"tokens": tokens, "targets": tokens}, fzero.zero_plan(0, model, one, offload="params=nvme,opt=nvme")
    lacking = fzero.zero_plan(0, model, one, offload="opt=nvme")
    nvme, state, step = state_on(folder)
    _, free, free_step = state_on(tmp_path / "free")

    def damaged():
        slot = nvme.store.record.slot
        name, path = nvme.store.chunks.path("params/head/w", slot, 0), "is damaged: the checksum does not match"
        kept = name.read_bytes()
        name.write_bytes(bytes([kept[0] ^ 1]) + kept[1:])
        try:
            said(lambda: reopen_state(tx, plan, nvme), name, path)
            said(lambda: reopen_state(tx, plan, Nvme(folder, buffer_bytes=1 << 22)), name, path)
        finally:
            name.write_bytes(kept)

    refused = {
        "a new state": lambda: fzero.init_state(model, tx, plan, seed=1, nvme=nvme),
        "of another Nvme": lambda: fzero.init_state(model, tx, plan, seed=1, nvme=Nvme(folder)),
        "another optimizer": lambda: reopen_state(optim.sgd(0.1, 0.9), plan, nvme),
        "another plan": lambda: reopen_state(tx, lacking, nvme),
        "another number of slots": lambda: reopen_state(tx, plan, Nvme(folder, slots=3)),
        "changed to the same folder": lambda: fzero.with_optimizer(state, optim.adam(0.1), plan, nvme=nvme),
        "options": lambda: fzero.make_train_step(
            model, tx, plan, nvme=nvme, execution=fzero.Execution(update="backward"), donate=False
        ),
        "the whole tree": lambda: fzero.make_train_step(
            model, optim.chain(tx, optim.clip_by_global_norm(1.0)), plan, nvme=nvme
        ),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*O_DIRECT")
        for call in refused.values():
            with pytest.raises(ValueError, match=r"; "):
                call()
            state, metrics = step(state, batch)
            free, expected = free_step(free, batch)
            assert torch.equal(metrics.loss, expected.loss)
        if nvme.store.chunks.direct:
            damaged()
            state, metrics = step(state, batch)
    assert os.path.realpath(folder) in store_manifest.LOCKS
    nvme.close()
    again, state, _ = state_on(folder, resume=True)
    assert int(state.step) == len(refused) + again.store.chunks.direct
    again.close()


@pytest.mark.slow
def test_another_process_is_refused_while_the_owner_lives(tmp_path):
    folder = tmp_path / "state"
    state_on(folder)[0].close()
    fork = multiprocessing.get_context("spawn")
    here, there = fork.Pipe()
    process = fork.Process(target=open_and_wait, args=(folder, there))
    process.start()
    assert here.poll(120) and here.recv() == "open"
    said(lambda: state_on(folder, resume=True), folder, "another process has this store open")
    here.send("go on")
    assert here.poll(60) and here.recv() == "closed"
    state_on(folder, resume=True)[0].close()
    process.kill()
    process.join()


@pytest.mark.parametrize("name, read", [(STEP, read_step_manifest), (STORE, read_description)])
def test_a_small_file_of_a_store_that_was_changed_is_damaged(name, read, tmp_path):
    nvme, *_ = state_on(tmp_path)
    nvme.close()
    text = (tmp_path / name).read_text()
    assert read(tmp_path) is not None
    for old, new in (('"sum"', '"sun"'), ("true", "false"), ("blocks", "blocus"), (": 0", ": 1"), (": []", ": [0]")):
        if old in text:
            (tmp_path / name).write_text(text.replace(old, new, 1))
            with pytest.raises(Damaged, match=name):
                read(tmp_path)
