"""Checkpoints in object stores: memory, files by URL, and S3 as moto serves it on this machine."""

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import ranks
import torch
from close import assert_same

from fzero import checkpoint
from fzero.checkpoint import manifest
from fzero.core import Objects, storage
from fzero.run import run_folder
from fzero.sharding import Spec, fake_mesh

MOTO = all(importlib.util.find_spec(name) for name in ("moto", "flask", "flask_cors"))
WITHOUT = pytest.mark.skipif(not MOTO, reason="moto[server], a stand-in for S3, is not installed")
KINDS = ("memory", "file", pytest.param("s3", marks=WITHOUT))
BUCKET = "checkpoints"
ACCESS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "secret"}


def ask(address, method, body=None):
    request = urllib.request.Request(address, method=method, data=body, headers={"Content-Type": "text/plain"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="session")
def server():
    """The address of an S3 server with one bucket."""
    if not MOTO:
        pytest.skip("moto[server] is not installed")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                ask(f"{address}/{BUCKET}", "PUT")
                break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None, "moto's server has ended"
                time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def s3(server, monkeypatch):
    """The environment of a user of that server."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**ACCESS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=[pytest.param(k, marks=pytest.mark.slow) if k == "file" else k for k in KINDS])
def home(request, tmp_path):
    """The URL of an empty place."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    return {
        "memory": f"memory://{tmp_path.name}/run",
        "file": f"file://{tmp_path}/a place",
        "s3": f"s3://{BUCKET}/{tmp_path.name}/run",
    }[request.param]


def state(seed=0):
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(4, 512, 700, generator=g)  # of some chunks
    return {
        "params": {"w": wide, "b": torch.randn(5, generator=g).bfloat16()},
        "step": torch.tensor(seed),
        "none": torch.empty(0, 3),
    }


def names(home):
    return sorted(Objects(home).names())


def object_of(path, leaf):
    """The name of the first object of a leaf's elements."""
    return next(name for name in names(path) if f"/{leaf}/" in name and "/c" in name)


# ---- a life ----


def test_saved_kept_and_restored(home):
    for step in (1, 2, 3, 4):
        path = checkpoint.save(home, state(step), step=step, config={"n": step}, keep_last=2, keep_every=2)
    assert path == f"{home}/step-00000004"
    assert checkpoint.steps(home) == [2, 3, 4] and checkpoint.latest(home) == path
    assert {name.split("/")[0] for name in names(home)} == {"step-00000002", "step-00000003", "step-00000004"}
    assert_same(checkpoint.restore(path, state()), state(4))
    assert checkpoint.open_checkpoint(path).config == {"n": 4}
    assert [checkpoint.verify(checkpoint.step_folder(home, step)) for step in (2, 3, 4)] == [[], [], []]
    assert checkpoint.newest_sound(home) == (path, [])
    checkpoint.remove(home, 3)
    assert checkpoint.steps(home) == [2, 4] and not any("step-00000003" in name for name in names(home))


@pytest.mark.each_value
@pytest.mark.parametrize("compress", ["", "zstd"])
def test_a_step_is_saved_over_itself(home, compress):
    for seed in (1, 2, 3):
        path = checkpoint.save(home, state(seed), step=7, compress=compress)
        assert_same(checkpoint.restore(path, state()), state(seed))
        assert checkpoint.verify(path) == []
        assert len({name.split("/")[0] for name in names(path)}) == 2  # the manifest and one folder of arrays


def test_slices_read_little(home):
    path = checkpoint.save(home, state(), step=1)
    held = checkpoint.open_checkpoint(path)
    whole = held.leaves["params/w"].layout.nbytes
    assert torch.equal(held.read("params/w", (1, 3, 10), (2, 1, 600)), state()["params"]["w"][1:3, 3:4, 10:610])
    assert 0 < held.read_bytes < 0.6 * whole
    specs = {"params": {"w": Spec(((), ("dp",))), "b": Spec()}, "step": Spec(), "none": Spec()}
    halves = []
    for rank in (0, 1):
        like = {**state(), "params": {"w": torch.empty(4, 256, 700), "b": torch.empty(5, dtype=torch.bfloat16)}}
        halves.append(checkpoint.restore(path, like, specs=specs, mesh=fake_mesh({"dp": 2}, rank=rank))["params"]["w"])
    assert torch.equal(torch.cat(halves, 1), state()["params"]["w"])


def test_zarr_reads_what_was_saved(home):
    zarr = pytest.importorskip("zarr")
    if not home.startswith("file"):
        pytest.skip("zarr reads these with packages of its own")
    path = checkpoint.save(home, state(), step=1)
    assert (zarr.open_array(f"{path}/arrays/params/w", mode="r")[1:3] == state()["params"]["w"][1:3].numpy()).all()


# ---- damage ----


def cut(data):
    return data[: len(data) // 2]


def emptied(data):
    return b""


def changed(data):
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


def longer(data):
    return data + b"\0"


@pytest.mark.each_value
@pytest.mark.parametrize("damage", [cut, emptied, changed, longer, None])
def test_damage_is_found_and_named(home, damage):
    checkpoint.save(home, state(1), step=1)
    path = checkpoint.save(home, state(2), step=2)
    store, name = Objects(path), object_of(path, "params/w")
    if damage is None:
        store.remove([name])
    else:
        store.write(name, damage(store.read(name)))
    lines = checkpoint.verify(path)
    assert lines and all("leaf params/w is damaged" in line for line in lines)
    assert any(name.split("/", 1)[1] in line for line in lines) and (damage is cut or len(lines) == 1)
    if damage is not longer:  # which no slice touches
        with pytest.raises(checkpoint.Damaged, match="leaf params/w is damaged"):
            checkpoint.restore(path, state())
    sound, passed = checkpoint.newest_sound(home)
    assert sound == f"{home}/step-00000001" and [place for place, _ in passed] == [path]


def test_small_damage(home):
    path = checkpoint.save(home, state(1), step=1)
    store = Objects(path)
    store.write("arrays/more", b"?")
    store.write("arrays/params/b/zarr.json", b"{}")
    assert [line.split(":")[-1].strip() for line in checkpoint.verify(path)] == [
        "damaged or missing; its leaves can still be restored",
        "does not belong to the checkpoint",
    ]
    text = store.read("manifest.json")
    store.write("manifest.json", text.replace(b'"step": 1', b'"step": 2'))
    assert "damaged, or not a manifest" in checkpoint.verify(path)[0]
    store.write("manifest.json", cut(text))
    with pytest.raises(checkpoint.Damaged, match=r"manifest\.json"):
        checkpoint.open_checkpoint(path)


def test_a_damaged_manifest_stays_as_evidence(home):
    path = checkpoint.save(home, state(1), step=1)
    store = Objects(path)
    store.write("manifest.json", cut(store.read("manifest.json")))
    before = names(path)
    checkpoint.save(home, state(2), step=2)
    assert names(path) == before


# ---- saves that do not end ----

KILLED = """
import os, sys, torch
from fzero import checkpoint
from fzero.checkpoint import save_state
if sys.argv[3] == "parts":  # before the second object
    from fzero.core.storage import Objects
    write, calls = Objects.write, []
    Objects.write = lambda *a: (calls.append(1), os._exit(9) if len(calls) > 1 else write(*a))
else:
    save_state.manifest.write_manifest = lambda *a, **k: os._exit(9)
checkpoint.save(sys.argv[1], {"w": torch.zeros(4, 512, 700), "v": torch.ones(3)}, step=int(sys.argv[2]))
"""


@pytest.mark.each_value
@pytest.mark.parametrize("when", ["parts", "manifest"])
@pytest.mark.parametrize("step", [1, 2])  # one that is there already; a new one
def test_a_killed_save_leaves_what_was_there_and_the_next_removes_the_rest(home, step, when):
    if home.startswith("memory"):
        pytest.skip("memory ends with its process")
    checkpoint.save(home, state(1), step=1)
    before = names(home)
    done = subprocess.run([sys.executable, "-c", KILLED, home, str(step), when], capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    assert set(names(home)) > set(before) and checkpoint.steps(home) == [1]
    assert_same(checkpoint.restore(checkpoint.latest(home), state()), state(1))
    checkpoint.save(home, state(3), step=3)
    assert checkpoint.steps(home) == [1, 3]
    assert [name for name in names(home) if "step-00000003" not in name] == before


def test_a_save_that_fails_is_told_and_leaves_what_was_there(home, monkeypatch):
    checkpoint.save(home, state(1), step=1)
    before, write = names(home), Objects.write

    def full(self, name, data):
        if name == "zarr.json":
            raise OSError(f"{self.url}: the store is full")
        return write(self, name, data)

    for step in (1, 2):
        with (
            monkeypatch.context() as patch,
            pytest.raises(checkpoint.SaveFailed, match=r"step-0000000.: .*the store is full"),
        ):
            patch.setattr(Objects, "write", full)
            checkpoint.save(home, state(2), step=step)
        assert names(home) == before
        assert_same(checkpoint.restore(checkpoint.latest(home), state()), state(1))


# ---- several ranks ----

SPECS = {"w": Spec((("dp",),)), "v": Spec()}


def save_shards(mesh, home, environment):
    os.environ.update(environment)
    rank = mesh.rank
    whole = torch.arange(4 * 512 * 700, dtype=torch.float32).reshape(4, 512, 700)
    tree = {"w": whole[2 * rank : 2 * rank + 2], "v": torch.arange(3)}
    path = checkpoint.save(home, tree, step=5, specs=SPECS, mesh=mesh)
    back = checkpoint.restore(path, tree, specs=SPECS, mesh=mesh)
    return path, torch.equal(back["w"], tree["w"])


@WITHOUT
def test_ranks_save_to_one_bucket_together(s3, server, tmp_path):
    home = f"s3://{BUCKET}/{tmp_path.name}"
    answers = ranks.run(2, save_shards, home, {**ACCESS, "AWS_ENDPOINT_URL": server})
    assert answers == [(f"{home}/step-00000005", True)] * 2
    assert checkpoint.verify(answers[0][0]) == []
    assert checkpoint.open_checkpoint(answers[0][0]).leaves["w"].layout.grid[0] == 2
    assert checkpoint.open_checkpoint(answers[0][0]).read("w").reshape(-1)[-1] == 4 * 512 * 700 - 1


# ---- runs ----

TINY = "--model mlp-tiny --batch 4 --micro-batch 1 --seq-len 16 --precision fp32 --peak-tflops 1 --prompt"
SETTINGS = (
    "train.compiled=false",
    "precision.fp32_matmul=default",
    "train.eval_every=0",
    "train.checkpoint_every=2",
    "train.keep_last=3",
)


def rows(run):
    return [(row["step"], row["loss"]) for row in run_folder.read_metrics(Path(run))]


@pytest.mark.slow
def test_a_run_keeps_its_checkpoints_there(home, fz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n".join(f"line {i}: {i * i}" for i in range(400)))
    args = [
        "pretrain",
        *TINY.split(),
        "",
        "--steps",
        8,
        "--data",
        "text.txt",
        *(part for one in SETTINGS for part in ("--set", one)),
    ]
    code, out, err = fz(*args, "--out", "whole")
    assert code == 0, err
    code, out, err = fz(*args, "--out", "run", "--set", f'train.checkpoints="{home}"', "--stop-at", 5)
    assert code == 0 and not err, err
    assert checkpoint.steps(home) == [2, 4, 5] and not Path("run/checkpoints").exists()
    code, out, err = fz("pretrain", "--out", "run", "--resume", "--peak-tflops", 1, "--prompt", "")
    assert code == 0 and "resuming run at step 5 of 8" in out and f"{home}/step-00000008" in out, err
    assert checkpoint.steps(home) == [5, 6, 8] and rows("run") == rows("whole")
    ours, theirs = (
        checkpoint.read_manifest(path)["leaves"]
        for path in (f"{home}/step-00000008", checkpoint.latest("whole/checkpoints"))
    )
    assert {name: leaf["digest"] for name, leaf in ours.items()} == {
        name: leaf["digest"] for name, leaf in theirs.items()
    }
    assert fz("sample", "run", "--prompt", "line", "--max-new-tokens", 3)[0] == 0
    # Another run does not begin there.
    code, out, err = fz(*args, "--out", "other", "--set", f'train.checkpoints="{home}"')
    assert code == 2 and "has the step 8 of a run already; name another place" in err and not Path("other").exists()
    # What is damaged is passed over.
    store, name = Objects(f"{home}/step-00000008"), object_of(f"{home}/step-00000008", "params/embed")
    store.write(name, cut(store.read(name)))
    code, out, err = fz("sample", "run", "--prompt", "line", "--max-new-tokens", 3)
    assert code == 0 and "step-00000008" in err and "is damaged" in err


def test_the_commands_on_a_store(home, fz):
    for step in (1, 2):
        checkpoint.save(home, state(step), step=step)
    code, out, err = fz("ckpt", "ls", home + "/")
    assert code == 0 and [line.split()[-1] for line in out.splitlines()[2:]] == ["complete"] * 2, out + err
    code, out, _ = fz("ckpt", "show", home)
    assert code == 0 and f"{home}/step-00000002: step 2" in out and "4x512x700" in out
    assert fz("ckpt", "show", f"{home}/step-00000001")[1].startswith(f"{home}/step-00000001: step 1")
    assert fz("ckpt", "verify", home) == (0, f"{home}/step-00000002: sound\n", "")
    code, out, _ = fz("ckpt", "diff", f"{home}/step-00000001", f"{home}/step-00000002", "--all")
    assert code == 1 and "leaf params/w: 1,433,600 of 1,433,600 elements differ" in out
    store, name = Objects(f"{home}/step-00000002"), object_of(f"{home}/step-00000002", "params/w")
    store.write(name, changed(store.read(name)))
    code, out, _ = fz("ckpt", "verify", home)
    assert code == 1 and "leaf params/w is damaged" in out and out.endswith(f"{home}/step-00000002: damaged: 1 found\n")
    store.remove(["manifest.json"])
    assert fz("ckpt", "ls", home)[1].splitlines()[3].split()[-1] == "incomplete"
    assert fz("ckpt", "rm", f"{home}/step-00000002") == (0, f"removed {home}/step-00000002\n", "")
    code, _, err = fz("ckpt", "rm", home, "--step", 1)
    assert code == 2 and "is the last complete checkpoint" in err
    assert fz("ckpt", "rm", home, "--step", 1, "--force")[0] == 0
    assert names(home) == []


# ---- stores that do not do what is asked ----


@pytest.fixture
def impatient(monkeypatch):
    """Two retries, and the shortest wait."""
    monkeypatch.setattr(storage, "RETRIES", {"max_retries": 2, "initial_delay": "50ms", "max_delay": "50ms"})
    monkeypatch.setattr(storage, "WAIT_S", 0.2)
    storage.context.cache_clear()
    yield
    storage.context.cache_clear()


def refused(home, fz, *said):
    """Everything that asks the store says so in one line."""
    for call in (
        lambda: checkpoint.steps(home),
        lambda: checkpoint.save(home, {"w": torch.ones(3)}, step=1),
        lambda: Objects(home).names(),
    ):
        with pytest.raises((OSError, ValueError)) as error:
            call()
        assert all(text in str(error.value) for text in said), error.value
        assert "\n" not in str(error.value) and "x-amzn" not in str(error.value)
    for command in ("ls", "show", "verify"):
        code, _, err = fz("ckpt", command, home)
        assert code == 2 and len(err.splitlines()) == 1 and all(text in err for text in said), err


@WITHOUT
def test_no_bucket(s3, fz):
    refused(
        "s3://no-such-bucket/run",
        fz,
        "s3://no-such-bucket/run",
        "bucket does not exist",
        "create the bucket, or name another one",
    )


@WITHOUT
def test_wrong_credentials(s3, server, fz):
    path = checkpoint.save(f"s3://{BUCKET}/wrong-credentials", {"w": torch.ones(3)}, step=1)
    ask(f"{server}/moto-api/reset-auth", "POST", b"0")  # from now on each request is looked at
    try:
        refused(
            f"s3://{BUCKET}/wrong-credentials", fz, "InvalidAccessKeyId", "check the credentials, and what they allow"
        )
        for call in (checkpoint.open_checkpoint, checkpoint.verify):  # that is no damage
            with pytest.raises(OSError, match="check the credentials"):
                call(path)
    finally:
        ask(f"{server}/moto-api/reset-auth", "POST", b"inf")


def test_no_server(fz, monkeypatch, impatient):
    for name, value in {**ACCESS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}.items():
        monkeypatch.setenv(name, value)
    refused("s3://some-bucket/run", fz, "Could not connect", "check the network, and for s3:// $AWS_ENDPOINT_URL")


@pytest.mark.slow
def test_a_server_that_says_nothing(fz, monkeypatch, impatient):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        for name, value in {**ACCESS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}.items():
            monkeypatch.setenv(name, value)
        refused("s3://some-bucket/run", fz, "no answer in ", "$AWS_ENDPOINT_URL")


@WITHOUT
def test_a_network_that_fails_is_no_damage(s3, monkeypatch, impatient):
    """A run that cannot reach its newest checkpoint does not go on from an older one."""
    home = f"s3://{BUCKET}/network"
    for step in (1, 2):
        path = checkpoint.save(home, state(step), step=step)
    held, read = checkpoint.open_checkpoint(path), Objects.read

    def broken(self, name, *args):
        if name.split("/")[-1].startswith("c"):
            raise OSError(f"{self.url}: the network is down")
        return read(self, name, *args)

    monkeypatch.setattr(Objects, "read", broken)
    for call in (lambda: held.read("params/w"), lambda: checkpoint.verify(path), lambda: checkpoint.newest_sound(home)):
        with pytest.raises(OSError, match="the network is down"):
            call()


def test_a_begin_that_cannot_read_the_manifest_writes_nothing(home, monkeypatch):
    """It would take the arrays in use for free ones."""
    checkpoint.save(home, state(1), step=1)
    read = Objects.read

    def broken(self, name, *args):
        if name == "manifest.json":
            raise OSError(f"{self.url}: the network is down")
        return read(self, name, *args)

    with monkeypatch.context() as patch, pytest.raises(checkpoint.SaveFailed, match="the network is down"):
        patch.setattr(Objects, "read", broken)
        checkpoint.save(home, state(2), step=1)
    assert_same(checkpoint.restore(checkpoint.latest(home), state()), state(1))


@pytest.mark.parametrize("url", ["foo://bucket/run", "s3://", "s3://B!/run", "gs://x/y"])
def test_a_url_of_no_store(url, fz):
    refused(url, fz, url, "names no store", "use s3://bucket/path")


def test_what_the_environment_says_of_s3(monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", *ACCESS):
        monkeypatch.delenv(name, raising=False)
    assert storage.url_spec("s3://b/a%20c/d/") == {"driver": "s3", "bucket": "b", "path": "a c/d/"}
    assert storage.url_spec("s3://b") == {"driver": "s3", "bucket": "b", "path": ""}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one/")
    assert (
        storage.url_spec("s3://b/d")["endpoint"] == "http://one"
        and storage.url_spec("s3://b/d")["aws_region"] == "us-east-1"
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://two")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert (
        storage.url_spec("s3://b/d")["endpoint"] == "http://two"
        and storage.url_spec("s3://b/d")["aws_region"] == "eu-west-1"
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    assert "aws_credentials" not in storage.url_spec("s3://b/d")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    assert storage.url_spec("s3://b/d")["aws_credentials"] == {"type": "environment"}


def test_files_by_url_are_durable():
    assert storage.url_spec("file:///a/b%20c") == {"driver": "file", "path": "/a/b c/", "file_io_sync": True}


def test_places_are_joined():
    assert manifest.join("s3://b/run/", "step-00000001", "arrays") == "s3://b/run/step-00000001/arrays"
