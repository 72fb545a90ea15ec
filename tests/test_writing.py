"""Files and folders to write (fzero/core/files.py): nothing is written through a link, and nothing waits for a
FIFO."""

import ast
import os
import re
import stat
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

import fzero
from fzero import checkpoint, open_loggers
from fzero.core import NotWritable, make_folder, open_to_write, replacing, write_text, writing
from fzero.run import run_folder, run_lock

ROOT = Path(fzero.__file__).parent
OTHERS = ("link", "dangling", "hard link", "fifo", "folder", "device")


@pytest.fixture
def outside(tmp_path):
    """A file that nothing may change."""
    path = tmp_path / "outside" / "file"
    path.parent.mkdir()
    path.write_text("untouched\n")
    yield path
    assert path.read_text() == "untouched\n"
    assert os.listdir(path.parent) == ["file"]


def put(what, path, outside):
    """Put something else in the place of a file or folder."""
    if what == "link":
        path.symlink_to(outside)
    elif what == "dangling":
        path.symlink_to(outside.parent / "missing")
    elif what == "hard link":
        os.link(outside, path)
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/null")
    else:
        path.mkdir()


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("how", ["new", "replace", "append", "update"])
def test_a_file_is_written_only_where_a_file_is(what, how, tmp_path, outside):
    path = tmp_path / "x"
    put(what, path, outside)
    if (what != "folder" and how == "replace") or (what, how) == ("hard link", "append"):
        with writing(path, how) as file:
            file.write(b"new")
        assert stat.S_ISREG(os.lstat(path).st_mode) and path.read_bytes().endswith(b"new")
        return
    with pytest.raises(FileExistsError if how == "new" else NotWritable) as error:
        os.close(open_to_write(path, how))
    assert error.value.filename == str(path)
    if how != "new":
        kinds = {"fifo": "is a FIFO", "folder": "is a folder", "hard link": "has 2 names"}
        assert str(error.value).startswith(f"{path}: {kinds.get(what, 'is a symbolic link')}")


def test_a_fifo_with_a_reader_is_refused_too(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(NotWritable, match="is a FIFO"):
        open_to_write(path, "append")
    os.close(reader)


@pytest.mark.parametrize("what", OTHERS)
def test_a_replaced_file_replaces_what_is_there_and_its_partial(what, tmp_path, outside):
    put(what, tmp_path / "a.json", outside)
    if what != "folder":
        write_text(tmp_path, "a.json", "new")
        assert (tmp_path / "a.json").read_text() == "new" and not (tmp_path / "a.json").is_symlink()
    else:
        with pytest.raises(NotWritable, match=r"a.json: is a folder"):
            write_text(tmp_path, "a.json", "new")
    put(what, tmp_path / "b.json.partial", outside)
    if what != "folder":
        write_text(tmp_path, "b.json", "new")
        assert (tmp_path / "b.json").read_text() == "new" and not (tmp_path / "b.json").is_symlink()
    else:
        with pytest.raises(NotWritable, match=r"b.json.partial: is a folder"):
            write_text(tmp_path, "b.json", "new")


def test_a_content_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    write_text(tmp_path, "a", "old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a") as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "old"


def test_a_named_folder_may_be_a_link_and_those_below_it_not(tmp_path, outside):
    (tmp_path / "named").symlink_to(outside.parent)
    with pytest.raises(NotWritable, match="below: is a symbolic link"):
        (tmp_path / "inside").mkdir()
        (tmp_path / "inside" / "below").symlink_to(outside.parent)
        make_folder(tmp_path / "inside", "below", "deeper")
    made = make_folder(tmp_path / "named", "below")
    assert made.is_dir()
    made.rmdir()


@pytest.mark.parametrize("what", OTHERS)
def test_a_lock_that_is_no_regular_file_is_refused(what, tmp_path, outside):
    run = make_folder(tmp_path, "run")
    put(what, run / run_lock.LOCK, outside)
    with pytest.raises(NotWritable, match=r"lock\.json: "):
        run_lock.acquire(run)
    assert os.path.lexists(run / run_lock.LOCK)


def test_a_lock_of_a_checkpoint_folder_too(tmp_path, outside):
    from fzero.run import config_table, pretrain

    place = make_folder(tmp_path, "elsewhere")
    (place / run_lock.LOCK).symlink_to(outside)
    config = config_table.from_table({"preset": "llama-tiny", "train": {"checkpoints": str(place)}})
    with pytest.raises(NotWritable, match=r"lock\.json: is a symbolic link"):
        pretrain.lock_outside_folders(config, print)


def tree():
    return {"a": {"w": torch.arange(100_000.0)}, "b": torch.ones(3)}


@pytest.mark.parametrize("name", ["spare", "spare/a", "spare/a/w", "spare/a/w/zarr.json", "spare/a/w/c.0"])
def test_a_checkpoint_is_not_written_through_what_is_in_the_spare_files(name, tmp_path, outside):
    with closing(checkpoint.Writer(tmp_path / "run", keep_last=1)) as writer:
        for step in (1, 2):
            writer.save(tree(), step=step)
            writer.wait()
        spare = tmp_path / "run" / name
        assert spare.exists(), sorted((tmp_path / "run").rglob("*"))
        moved = tmp_path / "moved"
        spare.rename(moved)
        spare.symlink_to(moved)
        before = {path: path.read_bytes() for path in tmp_path.glob("moved/**/*") if path.is_file()}
        before |= {moved: moved.read_bytes()} if moved.is_file() else {}
        saved = None
        try:
            writer.save(tree(), step=3)
            saved = writer.wait()
        except checkpoint.SaveFailed as error:
            assert "is a symbolic link" in str(error)
        assert before == {path: path.read_bytes() for path in before}
    if saved is not None:
        checkpoint.expect_sound(checkpoint.latest(tmp_path / "run"))


def test_a_copy_by_hard_links_keeps_its_content(tmp_path):
    """`cp -al RUN COPY`: the files of a removed checkpoint are written again, and those of the copy stay."""
    with closing(checkpoint.Writer(tmp_path / "run", keep_last=1)) as writer:
        for step in (1, 2):
            writer.save(tree(), step=step)
            writer.wait()
        for path in [path for path in (tmp_path / "run").rglob("*") if path.is_file()]:
            copy = tmp_path / "copy" / path.relative_to(tmp_path / "run")
            make_folder(copy.parent)
            os.link(path, copy)
        before = {path: path.read_bytes() for path in (tmp_path / "copy").rglob("*") if path.is_file()}
        writer.save({"a": {"w": torch.zeros(100_000)}, "b": torch.zeros(3)}, step=3)
        writer.wait()
    assert before == {path: path.read_bytes() for path in before}
    checkpoint.expect_sound(checkpoint.latest(tmp_path / "run"))


def test_a_step_that_is_a_link_is_read_and_neither_written_nor_cleaned(tmp_path):
    real = checkpoint.save(tmp_path / "archive", tree(), step=1)
    run = make_folder(tmp_path, "run")
    (run / real.name).symlink_to(real)
    before = {path: path.read_bytes() for path in real.rglob("*") if path.is_file()}
    assert checkpoint.steps(run) == [1]
    with pytest.raises(checkpoint.SaveFailed, match=r"is a symbolic link, .*step-00000001"):
        checkpoint.save(run, tree(), step=1)
    checkpoint.save(run, tree(), step=2)
    checkpoint.remove(run, 1)
    assert checkpoint.steps(run) == [2]
    assert before == {path: path.read_bytes() for path in real.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["metrics.jsonl", "attempts.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("what", ["link", "fifo", "folder"])
def test_a_run_that_appends_to_something_else_is_refused_before_it_trains(name, what, tmp_path, outside):
    put(what, tmp_path / name, outside)
    with pytest.raises(NotWritable, match=f"{name}: is a"):
        run_folder.expect_writable(tmp_path)


@pytest.mark.parametrize("name", ["checkpoints", "nvme", "tensorboard"])
def test_a_run_whose_folders_are_links_is_refused_before_it_trains(name, tmp_path, outside):
    (tmp_path / name).symlink_to(outside.parent)
    with pytest.raises(NotWritable, match=f"{name}: is a symbolic link"):
        run_folder.expect_writable(tmp_path)


@pytest.mark.parametrize(("logger", "name"), [("csv", "metrics.csv"), ("tensorboard", "tensorboard")])
def test_a_logger_writes_through_no_link(logger, name, tmp_path, outside):
    if logger == "tensorboard":
        pytest.importorskip("tensorboard")
    (tmp_path / name).symlink_to(outside.parent if logger == "tensorboard" else outside)
    try:
        with open_loggers([logger], tmp_path) as log:
            log(1, {"loss": 1.0})
            log(2, {"loss": 1.0})
    except (NotWritable, ValueError) as error:
        assert name in str(error)


# ---- the package's source ----

MADE = {"open_to_write", "mkstemp"}  # a file that these open is written by its descriptor
ALONE = {"mkdir", "makedirs", "touch", "write_text", "write_bytes", "savez", "tofile", "symlink_to", "hardlink_to"}
OPENS = {"open", "fdopen"}
COPIES = {"copyfile", "copy", "copy2", "copytree", "move"}
WORDS = re.compile(r"open\(|shutil|(np|torch)\.save|savefig|\b(" + "|".join(sorted(ALONE)) + r")\(")  # a quick look
# {file: the calls that write in another way, and why}
ALLOWED = {
    "core/files.py": "the one that all go through",
    "cli/start.py": "/dev/null in the place of a standard stream that a process began without",
    "cli/process.py": "/dev/null in the place of a closed stdout; the file of mkstemp",
    "data/tokenizers.py": "/dev/null in the place of stderr",
}


def openings(tree):
    """The lines of calls that open a file to write, or make a folder, in another way than fzero.core.files."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        attribute = isinstance(node.func, ast.Attribute)
        name = node.func.attr if attribute else getattr(node.func, "id", "")
        of = ast.unparse(node.func.value) if attribute else ""
        words = [ast.unparse(argument) for argument in (*node.args, *(keyword.value for keyword in node.keywords))]
        if of == "os" and name == "open":
            bad = not any("O_RDONLY" in word for word in words) or any("O_CREAT" in word for word in words)
        elif name in OPENS:
            modes = [word[1:-1] for word in words if word[:1] == "'"]
            through = any(f"{made}(" in word for word in words[:1] for made in MADE) or words[:1] in (["raw"], ["fd"])
            bad = not through and any(set(m) <= set("rwaxbt+") and set(m) & set("wax+") for m in modes)
        else:
            bad = (attribute and name in ALONE) or (of in ("shutil", "os") and name in COPIES)
            bad |= (of, name) in (("np", "save"), ("torch", "save")) and words[0] != "content"
            bad |= name == "savefig" and words[0] not in ("file", "stream")
        if bad:
            yield node.lineno


def test_every_file_is_opened_to_write_by_one_function():
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in ROOT.rglob("*.py")
        if str(path.relative_to(ROOT)) not in ALLOWED
        if WORDS.search(text := path.read_text())
        for line in openings(ast.parse(text))
    }
    assert not found, f"{sorted(found)}: open files to write, and make folders, by fzero/core/files.py"


def test_the_walk_sees_what_writes():
    bad = """
open(path, "wb")
path.open("a")
os.open(path, os.O_RDWR | os.O_CREAT)
os.open(path, flags)
path.write_text("x")
path.mkdir()
os.makedirs(path)
path.touch()
gzip.open(path, "wt")
shutil.copyfile(a, b)
np.save(path, x)
figure.savefig(path)
open(path, mode="r+b")
"""
    assert [*openings(ast.parse(bad))] == list(range(2, 15))
    good = (
        'open(path)\nos.open(path, os.O_RDONLY)\nwrite_text(folder, "a", "b")\nopen(open_to_write(path, "new"), "wb")\n'
    )
    assert not [*openings(ast.parse(good))]


def test_threads_make_the_same_folder(tmp_path):
    threads = [threading.Thread(target=make_folder, args=(tmp_path, "a", "b", "c")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "a" / "b" / "c").is_dir()
