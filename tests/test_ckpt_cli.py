"""`fzero ckpt` on folders: what it lists, shows, finds, compares and removes, and one clear line for every mistake."""

import functools
import json
import math
import resource
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch
from close import assert_same

from fzero import checkpoint
from fzero.checkpoint import directory as homes
from fzero.checkpoint import manifest
from fzero.cli import main
from fzero.offload import StepManifest
from fzero.offload.store_manifest import step_manifest_text
from fzero.run import checkpoint_diff, checkpoint_list


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FZERO_TRACEBACK", raising=False)


@pytest.fixture
def fz(fz):
    """A function that runs `fzero ckpt`: (exit code, stdout, stderr)."""
    return functools.partial(fz, "ckpt")


def refused(answer, *said):
    code, out, err = answer
    assert code == 2 and not out and len(err.splitlines()) == 1 and all(text in err for text in said), (out, err)


def state(seed=0):
    g = torch.Generator().manual_seed(seed)
    params = {"w": torch.randn(4, 512, 700, generator=g), "b": torch.randn(5, generator=g).bfloat16()}
    return {
        "params": params,
        "master": {"b": torch.randn(5, generator=g)},
        "opt_state": {"m": torch.zeros(5)},
        "step": torch.tensor(3),
    }


def column(out, name):
    """The cells of a column of the table in some text, which begins at the line of heads that has it."""
    lines = out.splitlines()
    head = next(i for i, line in enumerate(lines) if f" {name}" in f" {line}")
    end = next((i for i in range(head, len(lines)) if not lines[i]), len(lines))
    at = lines[head].index(name)
    return [line[at:].split("  ")[0].strip() for line in lines[head + 1 : end]]


# ---- ls ----


def test_the_list_tells_whole_ones_from_others(fz):
    for step in (1, 2, 3, 4, 5):
        checkpoint.save("home", state(), step=step)
    Path("home/step-00000002/manifest.json").write_text("{}")
    Path("home/step-00000003/manifest.json").unlink()
    file = next(Path("home/step-00000004/arrays/params/w").glob("c*"))
    file.write_bytes(file.read_bytes()[:-1])
    (Path("home/step-00000005") / "arrays-1").mkdir()
    Path("home/step-00000005/arrays-1/rest").write_bytes(b"123")
    Path("home/spare").mkdir()
    Path("home/spare/old").write_bytes(bytes(2000))
    Path("home/step-00000007").mkdir()
    Path("home/notes").mkdir()
    found = checkpoint_list.listing("home")
    assert [(entry.step, entry.state) for entry in found.entries] == [
        *((1, "complete"), (2, "damaged"), (3, "incomplete"), (4, "damaged"), (5, "complete"), (7, "incomplete"))
    ]
    one, *_, five, _ = found.entries
    assert one.note == "" and one.leaves == 5 and one.nbytes == 4 * 512 * 700 * 4 + 10 + 20 + 20 + 8 and one.mesh == {}
    assert one.size == sum(path.stat().st_size for path in Path("home/step-00000001").rglob("*") if path.is_file())
    assert abs(one.written - Path("home/step-00000001/manifest.json").stat().st_mtime) < 1
    assert (
        five.note == "arrays-1/rest is left by a save that did not end" and found.spare == 2000 and found.store is None
    )
    notes = {entry.step: entry.note for entry in found.entries}
    assert "checksum does not agree" in notes[2] and "no manifest names" in notes[3] and "too short" in notes[4]
    code, out, err = fz("ls", "home")
    assert code == 0 and not err
    assert [line.split()[0] for line in out.splitlines()[2:8]] == ["1", "2", "3", "4", "5", "7"]
    assert "5.7 MB" in out and "2.0 kB of files in spare/" in out and f"step 2: {notes[2]}" in out
    said = json.loads(fz("ls", "home", "--json")[1])
    assert said["home"] == "home" and [entry["state"] for entry in said["entries"]] == [
        entry.state for entry in found.entries
    ]


def test_the_mesh_of_a_checkpoint_is_shown_without_axes_of_one_rank(fz):
    for step, mesh in enumerate(({"dp": 2, "tp": 4}, {"dp": 8, "tp": 1}, {})):
        path = checkpoint.save("home", state(), step=step)
        opened = checkpoint.read_manifest(path)
        body = {name: value for name, value in opened.items() if name in ("step", "config")}
        leaves = checkpoint.open_checkpoint(path).leaves
        manifest.write_manifest(path, opened["arrays"], leaves, **body, mesh=mesh)
    assert column(fz("ls", "home")[1], "mesh") == ["dp=2 tp=4", "dp=8", "one process"]
    assert ", on dp=2 tp=4\n" in fz("show", "home/step-00000000")[1]
    assert json.loads(fz("ls", "home", "--json")[1])["entries"][0]["mesh"] == {"dp": 2, "tp": 4}


def test_an_empty_folder_and_no_folder(fz):
    Path("empty").mkdir()
    assert fz("ls", "empty") == (0, "empty: no checkpoints\n", "")
    refused(fz("ls", "nothing"), "nothing: no such folder")
    path = checkpoint.save("home", state(), step=1)
    refused(fz("ls", path), "is a checkpoint", "fzero ckpt show")
    for command in ("show", "verify"):
        refused(fz(command, "empty"), "empty: no checkpoint in it")


# ---- runs ----

TINY = "--model mlp-tiny --steps 4 --batch 4 --micro-batch 2 --seq-len 16 --precision fp32 --peak-tflops 1 --lr 0.01"


def pretrain(*args):
    Path("text.txt").write_text("\n".join(f"line {i}: {i * i}" for i in range(300)))
    settings = (
        "device=cpu",
        "train.compiled=false",
        "precision.fp32_matmul=default",
        "train.eval_every=0",
        "train.checkpoint_every=2",
    )
    with pytest.raises(SystemExit) as ended:
        main.main(
            [
                "pretrain",
                *TINY.split(),
                "--data",
                "text.txt",
                "--prompt",
                "",
                *(f"--set={one}" for one in settings),
                *args,
            ]
        )
    assert ended.value.code == 0


def test_a_run(fz, capsys):
    pretrain("--out", "run")
    capsys.readouterr()
    found = checkpoint_list.listing("run")
    assert (
        str(found.checkpoint_dir) == "run/checkpoints"
        and [entry.step for entry in found.entries] == [2, 4]
        and found.store is None
    )
    shown = checkpoint_list.describe_checkpoint("run")
    assert shown.step == 4 and shown.versions["torch"] == torch.__version__
    changed = {name: value for name, value in shown.config.items() if name not in ("data.path", "preset")}
    assert changed == {
        **{
            "device": "cpu",
            "data.seq_len": 16,
            "optim.lr": 0.01,
            "precision.policy": "fp32",
            "precision.fp32_matmul": "default",
            "train.steps": 4,
        },
        **{
            "train.batch": 4,
            "train.micro_batch": 2,
            "train.compiled": False,
            "train.eval_every": 0,
            "train.checkpoint_every": 2,
        },
    }
    assert shown.totals["params"]["elements"] == sum(
        math.prod(row["shape"]) for n, row in shown.leaves.items() if n.startswith("params/")
    )
    assert fz("verify", "run") == (0, "run/checkpoints/step-00000004: sound\n", "")
    code, out, _ = fz("diff", "run/checkpoints/step-00000002", "run")
    assert code == 1 and out.startswith(
        "leaf step: 1 of 1 elements differ, by 2 at most, relatively 0.5; the first at [], 2 and 4\n"
    )
    refused(fz("rm", "run", "--step", 2, "--step", 4), "is the last complete checkpoint", "--force")
    assert fz("rm", "run", "--step", 4) == (0, "removed run/checkpoints/step-00000004\n", "")
    assert checkpoint.steps("run/checkpoints") == [2]


def test_a_run_on_a_disk(fz, capsys):
    pretrain("--out", "run", "--offload", "params=nvme,opt=nvme", "--stop-at", "3")
    capsys.readouterr()
    found = checkpoint_list.listing("run")
    assert found.entries == [] and found.store == checkpoint_list.OnDisk("run/nvme", 3, [], "")
    assert fz("ls", "run") == (0, "run/checkpoints: no checkpoints\non the disk, run/nvme: step 3 is complete\n", "")
    Path("run/nvme/step.json").write_text(step_manifest_text(StepManifest(7, 0, {}, {1: 4}, done=True)))
    assert "step 7 is complete, and steps 4 kept as checkpoints (the run has ended)" in fz("ls", "run")[1]
    Path("run/nvme/step.json").write_text("?")
    assert "no complete step (run/nvme/step.json: is not a record" in fz("ls", "run")[1]


# ---- show ----


def test_what_one_holds(fz):
    path = checkpoint.save("home", state(), step=3, config={"lr": 0.1, "sizes": {"d": 4}})
    code, out, err = fz("show", "home")
    assert code == 0 and not err and out.startswith(f"{path}: step 3, by fzero ") and "on one process" in out
    assert "  lr = 0.1\n" in out and "  sizes.d = 4\n" in out
    assert column(out, "shape") == ["4x512x700", "5", "5", "5", "-"] and column(out, "dtype")[1] == "bfloat16"
    assert column(out, "digest") == [leaf.digest for leaf in checkpoint.open_checkpoint(path).leaves.values()]
    totals = [line.split() for line in out.splitlines()[-5:]]
    assert totals[0] == ["params", "2", "1,433,605", "5.7", "MB"] and totals[-1][:3] == ["all", "5", "1,433,616"]
    code, out, _ = fz("show", path, "--leaf", "^params/.$", "--json")
    said = json.loads(out)
    assert list(said["leaves"]) == ["params/w", "params/b"] and said["config"] == {"lr": 0.1, "sizes.d": 4}
    assert said["leaves"]["params/b"] | {"digest": ""} == {
        **{"shape": [5], "dtype": "bfloat16", "spec": "[]", "parts": 1, "chunk": [5], "bytes": 10, "digest": ""}
    }
    refused(fz("show", path, "--leaf", "("), "is no regular expression")
    refused(fz("show", path, "--leaf", "embed"), "none of the 5 leaves, such as ")
    (path / "manifest.json").unlink()
    refused(fz("show", path), "is not a complete checkpoint")


@pytest.mark.parametrize(
    "config", [None, {}, [1], {"preset": "llama-tiny", "train": {}}, {"preset": "of another version"}]
)
def test_any_config_is_shown(fz, config):
    checkpoint.save("home", state(), step=3, config=config)
    assert fz("show", "home")[0] == 0


# ---- verify ----


def test_all_damage_is_told(fz):
    path = checkpoint.save("home", state(), step=1)
    file = next((path / "arrays/params/w").glob("c*"))
    content = bytearray(file.read_bytes())
    for at in (5000, len(content) - 6000):  # in the first and in the last chunk
        content[at] ^= 1
    file.write_bytes(content)
    next((path / "arrays/master/b").glob("c*")).unlink()
    code, out, err = fz("verify", "home")
    *lines, last = out.splitlines()
    assert code == 1 and not err and last == f"{path}: damaged: {len(lines)} found"
    assert len(lines) == 3 and len([line for line in lines if "leaf params/w" in line and "chunk" in line]) == 2
    assert "leaf master/b is damaged" in out and "is missing" in out
    (path / "manifest.json").write_text("")
    code, out, _ = fz("verify", path)
    assert code == 1 and "damaged: not a JSON object" in out


def test_more_files_than_may_be_open():
    """A checkpoint of many ranks has more files than a process may open."""
    tree = {f"leaf{i:03}": torch.full((3,), float(i)) for i in range(200)}
    path = checkpoint.save("home", tree, step=1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 100, before[1]))
    try:
        assert checkpoint.verify(path) == []
        assert_same(checkpoint.restore(path, tree), tree)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# ---- diff ----


def both(a, b, **options):
    checkpoint.save("a", a, step=1)
    checkpoint.save("b", b, step=1)
    return checkpoint_diff.compare("a", "b", **options)


def test_equal_ones_are_not_read(fz, monkeypatch):
    checkpoint.save("a", state(), step=1)
    checkpoint.save("b", state(), step=2, compress="zstd")
    monkeypatch.setattr(checkpoint.CheckpointReader, "read", None)
    assert fz("diff", "a", "b") == (0, "the same bit for bit: 5 leaves of a/step-00000001 and b/step-00000002\n", "")


def test_what_differs_is_counted_and_named(fz):
    other = state()
    other["params"]["w"][2, 100, 3] += 0.5
    other["params"]["w"][0, 300, 699] = 100.0
    other["params"]["b"][4] = 0.0
    found = both(state(), other)
    assert found.differing == ["params/w", "params/b"] and not found.equal
    (leaf,) = found.compared
    before = state()["params"]["w"][0, 300, 699].item()
    assert (leaf.name, leaf.differing, leaf.elements) == ("params/w", 2, 4 * 512 * 700)
    assert leaf.first == [0, 300, 699] and leaf.values == (before, 100.0)
    assert leaf.largest == pytest.approx(100.0 - before) and leaf.largest_relative == pytest.approx(
        (100 - before) / 100
    )
    code, out, _ = fz("diff", "a", "b")
    assert (
        code == 1
        and "1 more leaves have other digests (--all" in out
        and out.endswith("differ: a/step-00000001 and b/step-00000001\n")
    )
    assert [one.name for one in checkpoint_diff.compare("a", "b", every=True).compared] == ["params/w", "params/b"]
    said = json.loads(fz("diff", "a", "b", "--all", "--json")[1])
    assert said["same"] is False and [one["differing"] for one in said["compared"]] == [2, 1]


def test_other_leaves_shapes_and_dtypes(fz):
    a = {"x": torch.ones(2), "y": torch.ones(3), "z": torch.ones(2), "old": torch.ones(1), "same": torch.ones(4)}
    b = {
        "x": torch.ones(2).double(),
        "y": torch.ones(1, 3),
        "z": torch.ones(2),
        "new": torch.ones(1),
        "same": torch.ones(4),
    }
    found = both(a, b)
    assert (found.only_a, found.only_b) == (["old"], ["new"])
    assert found.other == ["x: float32 [2] and float64 [2]", "y: float32 [3] and float32 [1, 3]"]
    assert not found.equal and found.compared == []
    code, out, _ = fz("diff", "a", "b")
    assert code == 1 and "leaf old: only in a/step-00000001\n" in out and "leaf new: only in b/step-00000001\n" in out


def test_tolerance():
    x = torch.tensor([1.0, 2.0, math.nan, math.inf, -0.0])
    y = torch.tensor([1.0, 2.25, math.nan, math.inf, 0.0])
    assert both({"x": x}, {"x": y}).compared[0][1:5] == (2, 5, 0.25, 0.25 / 2.25)
    assert both({"x": x}, {"x": y}, tolerance=0.1).compared[0].first == [1]
    found = both({"x": x}, {"x": y}, tolerance=0.25)
    assert found.equal and found.compared[0].differing == 0 and found.differing == ["x"]
    for change in (math.nan, -math.inf):
        found = both({"x": torch.ones(2)}, {"x": torch.tensor([1.0, change])}, tolerance=1e9)
        assert not found.equal and found.compared[0].largest == math.inf
    large = torch.tensor([2**62]), torch.tensor([2**62 + 1])  # the same in float64
    assert both({"x": large[0]}, {"x": large[1]}).compared[0].largest == 1.0
    assert not both({"x": large[0]}, {"x": large[1]}, tolerance=0.5).equal
    for tolerance in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="--atol is"):
            checkpoint_diff.compare("a", "b", tolerance=tolerance)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64]
)
def test_every_dtype_is_compared(dtype):
    x = torch.zeros(7).to(dtype)
    y = torch.tensor([0, 0, 0, 1, 0, 1, 0]).to(dtype)
    (leaf,) = both({"x": x}, {"x": y}).compared
    assert (leaf.differing, leaf.first, leaf.largest, leaf.largest_relative) == (2, [3], 1.0, 1.0)


def test_within_a_tolerance_the_first_leaf_beyond_it_is_found(fz):
    a = {"x": torch.zeros(3), "y": torch.zeros(3), "z": torch.zeros(3)}
    b = {"x": torch.full((3,), 0.1), "y": torch.full((3,), 0.3), "z": torch.full((3,), 0.2)}
    found = both(a, b, tolerance=0.2)
    assert [leaf.name for leaf in found.compared] == ["x", "y"]
    code, out, _ = fz("diff", "a", "b", "--atol", 0.2)
    assert code == 1 and out.startswith("leaf y: 3 of 3 elements differ")
    assert fz("diff", "a", "b", "--atol", 0.4) == (
        0,
        "the same within 0.4: 3 leaves of a/step-00000001 and b/step-00000001\n",
        "",
    )


def test_blocks_make_up_a_leaf_and_are_small():
    for shape, ours, theirs in [
        ((4, 512, 700), (1, 512, 700), (1, 256, 700)),
        ((6, 1000, 3000), (1, 100, 3000), (2, 125, 1500)),
        ((7,), (7,), (7,)),
        ((), (), ()),
        ((0, 3), (0, 3), (0, 3)),
        ((5_000_000,), (250_000,), (500_000,)),
    ]:
        seen = torch.zeros(shape)
        for start, size in checkpoint_diff.blocks(shape, ours, theirs, 4):
            assert 4 * math.prod(size) <= checkpoint_diff.BLOCK
            block = seen
            for dim, (at, n) in enumerate(zip(start, size)):
                assert n > 0
                block = block.narrow(dim, at, n)
            block += 1
        assert bool((seen == 1).all()), shape


def test_large_leaves_are_compared_in_little_memory():
    a = torch.zeros(24 << 20)  # 100 MB
    b = a.clone()
    b[17_000_000] = 1.0
    checkpoint.save("a", {"x": a}, step=1)
    checkpoint.save("b", {"x": b}, step=1)
    del a, b
    read, largest = checkpoint.CheckpointReader.read, []

    def noted(self, name, start=None, size=None, **more):
        out = read(self, name, start, size, **more)
        largest.append(out.nbytes)
        return out

    tracemalloc.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.CheckpointReader, "read", noted)
        found = checkpoint_diff.compare("a", "b")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.compared[0].first == [17_000_000] and max(largest) <= checkpoint_diff.BLOCK and peak < 10 << 20


def test_a_damaged_one_is_told(fz):
    other = state()
    other["params"]["w"] += 1
    checkpoint.save("a", state(), step=1)
    path = checkpoint.save("b", other, step=1)
    file = next((path / "arrays/params/w").glob("c*"))
    file.write_bytes(file.read_bytes()[:9000])
    refused(fz("diff", "a", "b"), "leaf params/w is damaged")


# ---- rm ----


def test_removed_whole_and_never_the_last_complete_one(fz):
    for step in (1, 2, 3, 4):
        checkpoint.save("home", state(), step=step)
    Path("home/step-00000004/manifest.json").unlink()
    Path("home/step-00000003/manifest.json").write_text("{}")
    one, two, three, four = (homes.step_folder("home", step) for step in (1, 2, 3, 4))
    refused(fz("rm", one, two), "step-00000002: is the last complete checkpoint", "nothing was removed")
    assert one.exists() and two.exists()
    assert fz("rm", two, four, three) == (0, f"removed {two}\nremoved {four}\nremoved {three}\n", "")
    assert [path.name for path in Path("home").iterdir()] == ["step-00000001"]
    refused(fz("rm", "home", "--step", 1), "is the last complete checkpoint")
    assert fz("rm", "home", "--step", 1, "--force")[0] == 0 and not list(Path("home").iterdir())


def test_one_whose_files_are_missing_does_not_count_as_complete(fz):
    for step in (1, 2):
        checkpoint.save("home", state(), step=step)
    next(Path("home/step-00000002/arrays/params/w").glob("c*")).unlink()
    refused(fz("rm", "home", "--step", 1), "step-00000001: is the last complete checkpoint")
    assert fz("rm", "home", "--step", 2)[0] == 0


def test_what_cannot_be_removed(fz):
    path = checkpoint.save("home", state(), step=1)
    checkpoint.save("home", state(), step=2)
    shutil.copytree(path, "best")
    refused(fz("rm", "best"), "best: is not a checkpoint, which is a folder step-XXXXXXXX")
    refused(fz("rm", path, "home/step-00000009"), "no such checkpoint; ", " has 1, 2")
    refused(fz("rm", "home", "other", "--step", 1), "give one")
    refused(fz("rm", "nothing", "--step", 1), "nothing: no such folder")
    refused(fz("rm"), "Missing argument")
    assert checkpoint.steps("home") == [1, 2]
    assert checkpoint.verify("best") == []  # a copy is a checkpoint
    assert fz("show", "best")[1].startswith("best: step 1")
