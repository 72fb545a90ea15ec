"""A training step on the pretend GPU (pretend_gpu.py): it waits for nothing, copies pinned memory alone, in an order
that streams and events make, and has the bits of the CPU. And faults that are planted are found."""

import gc
from pathlib import Path

import continued
import pytest
import torch
from pretend_gpu import Event, Stream, pretend

import fzero
from fzero import checkpoint, init_state, models, optim, state_specs
from fzero.checkpoint import CheckpointReader
from fzero.checkpoint import restore_state as restore
from fzero.core import copy_buckets, gpu, gpu_copies, precision, prng, pytree
from fzero.offload import update_units
from fzero.run import build, first_state, from_table, run_folder
from fzero.run.runner.evaluate import evaluate_all
from fzero.run.setup.corpus import prefetch_to_device
from fzero.train import meta_state

SIZES = {"vocab_size": 64, "max_len": 16, "d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "d_ff": 32}


POLICIES = {name: make() for name, make in precision.POLICIES.items()}
POLICIES["fp16 that holds"] = precision.fp16(precision.LossScale(at_floor="hold"))


def batch_of(device):
    tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    return {"tokens": tokens.to(device), "targets": tokens.roll(-1, 1).to(device)}


def make(device, policy="fp32", remat="none", ema=False, micro_batches=2, config=None, **offload):
    """(the state, the step, the plan) of a tiny Llama, or of the model of `config`."""
    mesh, model = fzero.one_process(), models.build(config or models.LlamaConfig(**SIZES))
    plan = fzero.zero_plan(0, model, mesh, policy=POLICIES[policy], **offload)
    adamw = optim.adamw(optim.warmup_cosine(3e-3, 10, 100), weight_decay=0.1, impl="reference")
    tx = optim.chain(optim.clip_by_global_norm(1.0), adamw)
    tx = optim.with_average(tx, 0.9) if ema else tx
    state = init_state(model, tx, plan, seed=0, device=device)
    execution = fzero.Execution(remat=remat, kernels="reference")
    return state, fzero.make_train_step(model, tx, plan, micro_batches=micro_batches, execution=execution), plan


def losses(device, seen=None, steps=2, **options):
    """The losses and norms of some steps; of `seen` waits, unpinned copies and kernels are those of the last one."""
    state, step, _ = make(device, **options)
    batch, out = batch_of(device), []
    for i in range(steps):
        if seen is not None and i == steps - 1:
            for counts in (seen.waits, seen.unpinned, seen.kernels):
                counts.clear()
        state, metrics = step(state, batch)
        out += [metrics.loss, metrics.grad_norm]
    counts = None if seen is None else (dict(seen.waits), dict(seen.unpinned), sum(seen.kernels.values()))
    return [float(x) for x in out], counts


CASES = {
    "remat": {"remat": "full"},
    "bf16": {"policy": "bf16"},
    "fp16": {"policy": "fp16"},
    "fp16 that holds": {"policy": "fp16 that holds"},
    "average": {"ema": True},
    "activations in host memory": {"remat": "full", "offload": "acts=host"},
}
AT_FLOOR = {"fp16": {"train/step.py": 1}}  # whether the loss scale is at its floor, where that ends the run
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def by_file(counts):
    """{file of fzero: how often} of what `seen` counts by its line."""
    files = {}
    for (_, line), times in counts.items():
        files[line.partition(":")[0]] = files.get(line.partition(":")[0], 0) + times
    return files


@pytest.mark.parametrize("name", ["plain", *SLOW])
def test_a_step_waits_for_nothing_and_has_the_bits_of_the_cpu(name):
    case = CASES.get(name, {"micro_batches": 1})
    with pretend() as seen:
        found, (waits, unpinned, kernels) = losses("cuda", seen, **case)
        gc.collect()
    assert by_file(waits) == AT_FLOOR.get(name, {})
    assert not unpinned and not seen.races and not seen.freed and kernels > 200
    assert found == losses("cpu", **case)[0]


def activations():
    """Lists of activations to host memory and back, in the order of a backward pass."""
    device = torch.device("cuda", 0)
    kept = update_units.HostActivations(device)
    for i in range(3):
        x = torch.full((64,), float(i), device="cuda")
        kept.append([x * 2])
    return [float(kept.pop()[0].sum()) for _ in range(3)]


def test_activations_go_and_come_back_in_order():
    with pretend() as seen:
        found = activations()
        gc.collect()
    assert found == [256.0, 128.0, 0.0]
    assert not seen.races and not seen.freed and not seen.unpinned


def unordered(*_, **__):
    pass


@pytest.mark.parametrize(
    "owner, name, kind",
    [
        (gpu_copies.CopySources, "add", "freed"),
        (Stream, "wait_event", "races"),
        (Stream, "wait_stream", "races"),
        (Event, "record", "races"),
    ],
    ids=["sources", "wait_event", "wait_stream", "event.record"],
)
def test_a_missing_order_is_found(monkeypatch, owner, name, kind):
    monkeypatch.setattr(owner, name, unordered)
    with pretend() as seen:
        activations()
        gc.collect()
    assert getattr(seen, kind)
    assert all("offload/update_units.py" in text or "test_pretend_gpu.py" in text for text in getattr(seen, kind))


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_that_nobody_uses_ends_before_its_memory_is_free(waits, monkeypatch):
    if not waits:
        monkeypatch.setattr(gpu_copies.Copied, "__del__", unordered)
    with pretend() as seen:
        gpu_copies.copy_in(gpu.pinned(torch.ones(8), torch.device("cuda", 0)), torch.device("cuda", 0))
        gc.collect()
    assert bool(seen.freed) is not waits


def test_what_the_host_has_waited_for_is_kept_by_nobody():
    with pretend() as seen:
        device, x = torch.device("cuda", 0), torch.ones(1 << 10, device="cuda")
        fetched = copy_buckets.start_fetch([x])
        before = sum(seen.live.values())
        del x
        assert sum(seen.live.values()) == before  # the copy may still read it
        fetched.wait()
        gc.collect()
        assert sum(seen.live.values()) == before - (4 << 10)
        gpu_copies.copy_out(torch.ones(1 << 10, device="cuda"))
        gpu_copies.free_sources(device)
        gc.collect()
        assert sum(seen.live.values()) == before - (4 << 10)
    assert not seen.freed and not seen.races


def test_a_copy_that_another_stream_uses_keeps_its_memory_for_both():
    with pretend() as seen:
        device = torch.device("cuda", 0)
        copied, other = gpu_copies.copy_in(gpu.pinned(torch.ones(8), device), device), Stream()
        with torch.cuda.stream(other):
            copied.use() * 2
        del copied
        gc.collect()
    assert not seen.freed and not seen.races


def test_a_wait_an_unpinned_copy_and_a_reused_source_are_found():
    with pretend() as seen:
        x = torch.ones(8, device="cuda")
        seen.forget()
        float(x.sum())
        assert [why for why, _ in seen.waits] == ["item"]
        torch.ones(8).to("cuda", non_blocking=True)
        assert [why for why, _ in seen.unpinned] == ["to the device"]
        source = gpu.pinned(torch.ones(8), x.device)
        copied = gpu_copies.copy_in(source, x.device)
        assert not seen.races
        source.zero_()  # while it is being read
        assert len(seen.races) == 1 and "write by host" in next(iter(seen.races))
        copied.use()
        out = gpu_copies.copy_out(x)
        out.tensor + 1
        assert len(seen.races) == 2
        gpu_copies.copy_out(x).finish() + 1
        assert len(seen.races) == 2


def test_tensors_of_both_devices_are_refused():
    with pretend():
        x = torch.ones(3, device="cuda")
        assert float((x + torch.tensor(2.0)).sum()) == 9.0  # as a GPU takes it
        with pytest.raises(RuntimeError, match="tensors of cuda:0 and cpu in add"):
            x + torch.ones(3)
        with pytest.raises(TypeError, match="can't convert cuda:0"):
            x.numpy()


def test_batches_are_pinned_and_on_their_way_before_they_are_used():
    given = [{"tokens": torch.full((2, 3), i)} for i in range(4)]
    with pretend() as seen:
        taken = []
        for i, batch in enumerate(prefetch_to_device(iter(given), torch.device("cuda", 0))):
            assert batch["tokens"].is_cuda and sum(seen.kernels.values()) == min(i + 2, 4)  # the next one's copy too
            taken.append(batch["tokens"])
        assert not seen.waits and not seen.unpinned and not seen.races
        assert [int(x[0, 0]) for x in taken] == [0, 1, 2, 3]
    on_host = list(prefetch_to_device(iter(given), gpu.HOST))
    assert all(a["tokens"] is b["tokens"] for a, b in zip(given, on_host))


@pytest.mark.slow
def test_a_sample_is_the_same_on_the_gpu():
    model = models.build(models.LlamaConfig(**SIZES))
    tokens, found = torch.tensor([[3, 1, 4], [1, 5, 9]]), []
    with pretend() as seen:
        for device in ("cpu", "cuda"):
            params = models.init_params(model, prng.key(1), torch.float32, device)
            seen.forget()
            found.append(continued.rows(model, params, tokens, 4, temperature=0.8, seed=2, eos=[63]))
            waits = by_file(seen.waits)
            assert not seen.unpinned
        # For each token of all rows: what a draw checks and looks for, and what was drawn.
        assert waits == {"generate/draws.py": 4 * 4, "generate/decoding.py": 4} and not seen.races and not seen.freed
    assert found[0] == found[1]


@pytest.mark.slow
def test_an_evaluation_reads_its_sums_at_its_end():
    table = {"preset": "llama-tiny", "model": {n: v for n, v in SIZES.items() if n != "vocab_size"}}
    table |= {"precision": {"policy": "fp32"}, "optim": {"name": "adamw"}, "data": {"seq_len": 8}}
    table["train"] = {"ema_decay": 0.5, "compiled": False, "kernels": "reference", "memory_check": False}
    found = []
    with pretend() as seen:
        for device in (gpu.HOST, torch.device("cuda", 0)):
            job = build.build(from_table(table), device=device)
            state, given = first_state(job), [{n: x.to("cpu") for n, x in batch_of("cpu").items()}] * 3
            for _ in range(2):  # the first one looks at values
                seen.forget()
                values = evaluate_all(job, state, lambda given=given: iter(given), 2.0)
            found.append(values)
        gc.collect()
    assert found[0] == found[1] and {*found[0]} == {
        f"{name}{unit}" for name in ("val_loss", "val_loss_ema") for unit in ("", "_per_byte")
    }
    assert by_file(seen.waits) == {"run/runner/evaluate.py": 2}  # of the parameters, and of their average
    assert not seen.unpinned and not seen.races and not seen.freed


@pytest.mark.parametrize("offload", ["", "opt=host"])
def test_a_checkpoint_is_restored_to_the_gpu_leaf_by_leaf(tmp_path, monkeypatch, offload):
    most = []
    read = CheckpointReader.read_boxes
    monkeypatch.setattr(
        CheckpointReader,
        "read_boxes",
        lambda reader, boxes, pool=None: most.append(len(boxes)) or read(reader, boxes, pool),
    )
    before, _, plan = make("cpu", offload=offload)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    path = checkpoint.save(tmp_path, before, step=0)
    with pretend() as seen:
        specs = state_specs(plan, tx)
        after = restore.restore_state(path, meta_state(plan, tx), specs, plan, None, torch.device("cuda", 0))
        rests = pytree.named_leaves(specs)
        for name, leaf in pytree.named_leaves(after).items():
            assert leaf.is_cuda == (rests[name].memory == "device"), name
            assert leaf.is_cuda or seen.pinned(leaf), name
            assert torch.equal(leaf.to("cpu"), pytree.named_leaves(before)[name]), name
    assert set(most) == {1} and not seen.races and not seen.freed
    assert {*by_file(seen.unpinned)} == {"test_pretend_gpu.py"}  # the line above


def test_memory_that_is_not_pinned_goes_to_the_gpu_by_pieces_that_are(monkeypatch):
    monkeypatch.setattr(copy_buckets, "PIECE_BYTES", 40)
    with pretend() as seen:
        for x in (torch.arange(95.0).view(5, 19).mT, torch.tensor(3), torch.arange(0.0), torch.arange(10.0)):
            found = copy_buckets.bring(x, torch.device("cuda", 0))
            assert found.is_cuda and found.shape == x.shape and torch.equal(found.to("cpu"), x)
        gc.collect()
        assert {way for way, _ in seen.unpinned} == {"to the host"} and not seen.races and not seen.freed
    assert copy_buckets.bring(x, gpu.HOST) is x


# Copies of memory that is not pinned: small tensors of a new state, its leaves on their way to a disk, what a first
# step found, the text of a sample and its key.
AT_THE_ENDS = {
    "train/make_state.py",
    "train/checks.py",
    "train/state_on_disk.py",
    "sharding/slices.py",
    "core/prng.py",
    "run/runner/loop.py",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "placed",
    [
        "",
        "--offload opt=host",
        pytest.param("--offload opt=host --set train.update=speculate", marks=pytest.mark.exhaustive),
        pytest.param("--offload params=nvme,grads=nvme,opt=nvme --nvme {}-disk", marks=pytest.mark.exhaustive),
        pytest.param("--offload acts=host --set train.remat=full", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_trains_evaluates_saves_resumes_and_samples_on_the_gpu(fz, tmp_path, monkeypatch, placed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("text.txt").write_text("\n".join(f"line {i}: {i * i}" for i in range(600)))
    sizes = " ".join(f"--set model.{name}={size}" for name, size in SIZES.items() if name != "vocab_size")
    loop = "eval_every=2 checkpoint_every=2 measure_every=2 digest_every=2 eval_batches=2 ema_decay=0.5 compiled=false"
    loop = " ".join(f"--set train.{setting}" for setting in (*loop.split(), "kernels=reference"))
    flags = f"--model llama-tiny {sizes} {loop} --data text.txt --steps 4 --batch 4 --micro-batch 2 --seq-len 16 "
    flags += "--precision fp32 --set precision.fp32_matmul=default --set optim.name=adamw --set guard.check_every=2 "
    flags += placed
    once = ["--peak-tflops", "1", "--prompt", "ab"]
    with pretend() as seen:
        code, out, err = fz("pretrain", "--out", "gpu", "--stop-at", "2", *flags.format("gpu").split(), *once)
        assert code == 0 and "\ndevice: GPU 0, Pretend H200\n" in out, err
        code, _, err = fz("pretrain", "--out", "gpu", "--resume", *once)
        assert code == 0 and not seen.races and not seen.freed, (err, seen.races, seen.freed)
    assert {*by_file(seen.unpinned)} <= AT_THE_ENDS
    assert fz("pretrain", "--out", "cpu", "--device", "cpu", *flags.format("cpu").split(), *once)[0] == 0
    ours, theirs = ([*run_folder.read_metrics(Path(run))] for run in ("gpu", "cpu"))
    names = ("loss", "grad_norm", "lr", "num_tokens", "skipped", "val_loss", "val_loss_ema", "digest")
    assert [[row.get(name) for name in names] for row in ours] == [[row.get(name) for name in names] for row in theirs]
    assert len(ours) == 4 and ours[-1]["digest"] and ours[-1]["val_loss_ema"]
    assert run_folder.read_config(Path("gpu")).device == "cuda" and run_folder.read_config(Path("cpu")).device == "cpu"
