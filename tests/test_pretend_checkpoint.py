"""What leaves the pretend GPU (pretend_gpu.py) beside the training of a model: checkpoints, digests, numbers."""

import gc
import shlex
import threading

import pytest
import torch
from pretend_gpu import GpuTensor, join, pretend
from test_pretend_gpu import SIZES, batch_of, losses, make

import fzero
from fzero import checkpoint, make_check, models, one_process, optim
from fzero.checkpoint import Writer, save_state, writer
from fzero.checkpoint.save_state import TileFile
from fzero.cli import main
from fzero.core import digest, gpu_copies, prng, pytree
from fzero.run import checkpoint_diff, rollback
from fzero.sharding import Spec, digests


@pytest.fixture
def seen(monkeypatch):
    """The pretend GPU. The threads of a Writer wait for its copies while its `gate` is set, so that the launching
    thread knows nothing of them by chance, and it is told that they read memory: they do so without an operator."""
    write, write_now = TileFile.write, Writer._write_now

    def told(part, raw, slab):
        join(found.host, found.hosts[found.thread])  # a thread is behind who gave it the work
        found.on_host(reads=[raw])
        write(part, raw, slab)

    def late(*args):
        assert found.gate.wait(30)
        write_now(*args)

    monkeypatch.setattr(TileFile, "write", told)
    monkeypatch.setattr(Writer, "_write_now", late)
    with pretend() as found:
        found.gate = threading.Event()
        yield found
        found.gate.set()


# ---- checkpoints ----

ONE_LAYER = {"config": models.LlamaConfig(**SIZES | {"n_layers": 1}), "micro_batches": 1}


def trained(device, folder, steps, seen=None, **options):
    """The states of some steps, with a save after each; `seen` counts from the first save on."""
    state, step, _ = make(device, **options)
    batch = batch_of(device)
    state, _ = step(state, batch)  # the first one looks at values
    saving, states = Writer(folder), []
    for number in range(steps):
        if seen is not None:
            seen.forget()
            seen.gate.clear()
            saving.save(state, step=number)
        else:
            states.append(pytree.map(torch.clone, state))
        state, _ = step(state, batch)
        if seen is not None:
            assert not seen.waits or "offload" in options
            seen.gate.set()
            saving.wait()
    saving.close()
    return states


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(ONE_LAYER, id="plain"),
        pytest.param({"ema": True, "policy": "bf16"}, id="average", marks=pytest.mark.exhaustive),
        pytest.param({**ONE_LAYER, "offload": "params=host,opt=host"}, id="offloaded", marks=pytest.mark.exhaustive),
    ],
)
def test_a_save_waits_for_nothing_and_the_next_update_comes_behind_its_copies(seen, tmp_path, options):
    trained("cuda", tmp_path, 2, seen, **options)
    gc.collect()
    assert not seen.races and not seen.freed
    assert all("checkpoint/" not in line for _, line in seen.unpinned)
    assert {why for why, _ in seen.waits_beside} == {"event.synchronize"}  # of the threads that write
    for number, state in enumerate(trained("cpu", tmp_path, 2, **options)):
        saved = checkpoint.restore(checkpoint.step_folder(tmp_path, number), state)
        assert all(map(torch.equal, pytree.leaves(saved), pytree.leaves(state)))


@pytest.mark.slow
def test_an_update_that_does_not_wait_for_the_copies_is_found(seen, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_copies, "await_readers", lambda device: None)
    trained("cuda", tmp_path, 1, seen, **ONE_LAYER)
    assert any("checkpoint/save_state.py" in text and "kernels/optim_leaf.py" in text for text in seen.races)


def some():
    return {
        "a": torch.arange(40_000.0, device="cuda"),
        "b": torch.ones(7, 300, device="cuda").mT,
        "c": 2 * torch.ones((), device="cuda"),
    }


def saved(seen, folder, **options):
    """The leaves of a save, which are then written over, or freed."""
    state, saving = some(), Writer(folder, **options)
    saving.save(state, step=3)
    del state["b"]
    gc.collect()
    gpu_copies.await_readers(state["a"].device)
    state["a"].zero_()
    seen.gate.set()
    path = saving.wait().path
    saving.close()
    assert not seen.waits
    return checkpoint.restore_leaves(path, lambda name: True)


@pytest.mark.parametrize("compress", ["", "zstd"])
def test_leaves_of_any_strides_leave_by_pinned_memory_that_may_be_less_than_them(seen, tmp_path, monkeypatch, compress):
    if compress:
        pytest.importorskip("zstandard")
    monkeypatch.setattr(save_state, "SLAB_OF_GPU", 16384)
    seen.gate.set()
    found, wanted = saved(seen, tmp_path, compress=compress, buffer_bytes=1), some()
    assert all(torch.equal(found[name], wanted[name].to("cpu")) for name in wanted)
    assert not seen.races and not seen.freed


def test_the_launching_thread_starts_no_copy_of_a_save_however_much_there_is(seen, tmp_path, monkeypatch):
    monkeypatch.setattr(save_state, "SLAB_OF_GPU", 16384)
    copies, copy, planned, plan = threading.Event(), gpu_copies.SnapshotReader.copy, [], writer.plan_snapshot
    monkeypatch.setattr(gpu_copies.SnapshotReader, "copy", lambda *args: copies.wait(30) and copy(*args))
    monkeypatch.setattr(writer, "plan_snapshot", lambda *args, **options: planned.append(1) or plan(*args, **options))
    saving, counts = Writer(tmp_path), []
    seen.gate.set()
    for step, n in enumerate((20_000, 20_000, 60_000)):
        state = {"a": torch.arange(float(n), device="cuda"), "b": torch.ones(3)}
        seen.forget()
        saving.save(state, step=step)
        state["b"].zero_()
        counts.append((sum(seen.kernels.values()), len(planned)))
        copies.set()
        gpu_copies.await_readers(state["a"].device)  # for the thread that starts the copies too
        state["a"].zero_()
        found = checkpoint.restore_leaves(saving.wait().path, lambda name: True)
        assert torch.equal(found["a"], torch.arange(float(n))) and torch.equal(found["b"], torch.ones(3))
        copies.clear()
    saving.close()
    assert counts == [(0, 1), (0, 1), (0, 2)]  # what a state of the same shapes needs is known
    assert not seen.waits and not seen.races and not seen.freed and not seen.unpinned


def test_a_copy_that_cannot_be_started_is_the_error_of_the_save(seen, tmp_path, monkeypatch):
    monkeypatch.setattr(
        gpu_copies.SnapshotReader, "copy", lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error: unknown"))
    )
    saving, state = Writer(tmp_path), some()
    seen.gate.set()
    saving.save(state, step=1)
    gpu_copies.await_readers(state["a"].device)
    with pytest.raises(checkpoint.SaveFailed, match=r"step-00000001: .*CUDA error: unknown"):
        saving.wait()
    saving.close()


@pytest.mark.parametrize(
    "owner, name, kind",
    [
        (gpu_copies, "await_readers", "races"),
        (gpu_copies.Copied, "finish", "races"),
        (GpuTensor, "record_stream", "freed"),
    ],
)
def test_a_missing_order_of_a_snapshot_is_found(seen, tmp_path, monkeypatch, owner, name, kind):
    monkeypatch.setattr(owner, name, lambda x, *_: getattr(x, "tensor", None))
    saved(seen, tmp_path)
    assert any("checkpoint/" in text for text in getattr(seen, kind))


# ---- numbers ----


@pytest.mark.slow
def test_a_layer_with_dropout_launches_few_kernels_more(monkeypatch):
    def one_kernel(key, p, shape, **_):  # as the form of a GPU draws a mask
        return torch.full(shape, True, device=key.device)

    monkeypatch.setattr(prng, "bernoulli", one_kernel)

    def kernels(layers, rate):
        config = models.GPT2Config(
            vocab_size=64, max_len=16, d_model=32, n_heads=2, d_ff=64, n_layers=layers, dropout=rate
        )
        with pretend() as seen:
            state, step, _ = make("cuda", config=config, micro_batches=1)
            seen.forget()
            step(state, batch_of("cuda"))
        return sum(seen.kernels.values())

    without, with_dropout = (kernels(2, rate) - kernels(1, rate) for rate in (0.0, 0.1))
    # Of two places: a key of the table, the place of the first element, the mask, its product and sum. A key of
    # each place and layer by itself would be 684 kernels more. Two of the 22 are the zeros of the masks' `where`.
    assert without < with_dropout <= without + 24


@pytest.mark.slow
def test_dropout_has_the_bits_of_the_cpu():
    config = models.GPT2Config(vocab_size=64, max_len=16, d_model=16, n_heads=2, d_ff=32, n_layers=2, dropout=0.3)
    with pretend() as seen:
        found, (waits, unpinned, _) = losses("cuda", seen, config=config, micro_batches=1)
    assert found == losses("cpu", config=config, micro_batches=1)[0] and not waits and not unpinned and not seen.races


def test_digests_and_scalars_are_read_by_one_wait(seen, monkeypatch):
    monkeypatch.setattr(digest, "_CHUNK_ELSEWHERE", 1000)  # in many pieces
    state = some()
    on_host = pytree.map(lambda leaf: leaf.to("cpu"), state)
    seen.forget()
    assert digest.digest_tree(state) == digest.digest_tree(on_host)
    assert rollback.is_finite(state) and list(seen.waits.values()) == [1, 1]
    specs = pytree.map(lambda leaf: Spec(), state)
    assert digests(state, specs, one_process()) == digests(on_host, specs, one_process())
    assert sum(seen.waits.values()) == 3 and not seen.unpinned and not seen.races
    state["b"][0, 3] = float("nan")
    assert not rollback.is_finite(state)


@pytest.mark.slow
def test_a_step_computed_twice_is_compared_by_one_wait():
    with pretend() as seen:
        state, _, plan = make("cuda")
        model, tx = (
            models.build(models.LlamaConfig(**SIZES)),
            optim.chain(optim.clip_by_global_norm(1.0), optim.adamw()),
        )
        check = make_check(model, tx, plan, execution=fzero.Execution(kernels="reference"))
        batch = batch_of("cuda")
        seen.forget()
        assert check(state, lambda m: batch) == []
    assert sum(seen.waits.values()) == 1 and not seen.unpinned and not seen.races


def test_accumulation_of_gradients_waits_for_nothing(seen):
    found = []
    for device in ("cpu", "cuda"):
        tx, params = optim.accumulate(optim.adamw(0.1, impl="reference"), 3), {"w": torch.ones(4, device=device)}
        state = tx.init(params)
        for i in range(7):
            if i == 1:
                seen.forget()
            grads = {"w": torch.full((4,), float(i), device=device)}
            params, state = optim.apply_in_place(tx, grads, state, params)
        assert not seen.waits
        found.append([x.to("cpu") for x in pytree.leaves((params, state))])
    assert all(map(torch.equal, *found)) and not seen.races


# ---- the command line ----


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of two steps on the CPU: run, and other, of another rate."""
    home = tmp_path_factory.mktemp("runs")
    (home / "text.txt").write_text("\n".join(f"line {i}: {i * i}" for i in range(300)))
    settings = [f"model.{name}={size}" for name, size in SIZES.items() if name != "vocab_size"]
    settings += [f"train.{text}" for text in ("compiled=false", "checkpoint_every=1", "keep_last=0", "digest_every=1")]
    settings += ["train.eval_batches=1", "precision.fp32_matmul=default", "train.kernels=reference"]
    flags = shlex.split("--model llama-tiny --device cpu --steps 2 --batch 2 --micro-batch 1 --seq-len 16")
    flags += ["--precision", "fp32"]
    flags += [part for setting in settings for part in ("--set", setting)] + ["--prompt", "", "--peak-tflops", "1"]
    for name, lr in (("run", "1e-3"), ("other", "2e-3")):
        with pytest.raises(SystemExit) as ended:
            place = ["--data", str(home / "text.txt"), "--out", str(home / name)]
            main.main(["pretrain", *flags, *place, "--lr", lr])
        assert ended.value.code == 0
    return home


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["", "params=nvme"])
def test_a_sample_by_the_command_line_is_that_of_the_cpu(fz, runs, tmp_path, offload):
    words = ["sample", str(runs / "run"), "--prompt", "line 7", "--max-new-tokens", "4"]
    words += ["--offload", offload, "--nvme", str(tmp_path)] if offload else []
    code, expected, err = fz(*words, "--device", "cpu")
    assert code == 0, err
    with pretend() as seen:
        code, found, err = fz(*words)  # auto: there is a GPU
        assert code == 0 and sum(seen.kernels.values()) > 500 and not seen.races, (err, seen.races)
    assert found == expected


@pytest.mark.slow
def test_a_step_is_made_again_on_the_gpu_and_two_runs_are_compared_there(fz, runs):
    with pretend() as seen:
        code, out, err = fz("replay", str(runs / "run"), "--step", "2", "--device", "cuda")
        assert code == 0 and "\nreproduces bit for bit (step 2" in out and sum(seen.kernels.values()) > 200, (out, err)
        code, out, err = fz("bisect", str(runs / "run"), str(runs / "other"), "--device", "cuda")
        assert code == 1 and "\npart at step 1: lr, digest, leaf params/" in out, out[-200:]
        assert not seen.races and not seen.freed
    code, _, err = fz("replay", str(runs / "run"), "--step", "1", "--device", "cuda")
    assert code == 2 and "PyTorch finds no GPU here; use device=cpu (--device cpu)" in err, err


def test_leaves_of_a_state_and_of_a_checkpoint_are_compared(seen):
    a, b = torch.zeros(2, 3), torch.zeros(2, 3, device="cuda")
    assert (
        checkpoint_diff.describe_difference(a, b, "{} {}") == "" == checkpoint_diff.describe_difference(b, b, "{} {}")
    )
    b[1, 2] = 2.0
    assert (
        checkpoint_diff.describe_difference(a, b, "{} {}")
        == ": 1 of 6 elements, by 2 at most; the first at [1, 2], 0.0 2.0"
    )


def test_a_device_that_is_not_there_is_refused(fz, tmp_path):
    for device, line in (("tpu", "device is 'tpu'; it must be one of auto, cpu, cuda"), ("cuda", "no GPU here; use ")):
        code, _, err = fz("sample", str(tmp_path), "--prompt", "a", "--device", device)
        assert code == 2 and line in err, err
