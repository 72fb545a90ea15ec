"""A step with a state that rests in host memory or on a disk, on the pretend GPU (pretend_gpu.py): the thread that
launches waits only where the host computes with the values, the bits are the CPU's, and planted faults are found."""

import functools
import gc

import pytest
import torch
from close import assert_same
from pretend_gpu import Stream, pretend
from test_pretend_gpu import by_file

import fzero
from fzero import Skip, init_state, models, optim
from fzero.core import copy_buckets, gpu_copies, precision, pytree
from fzero.offload import DiskActivations, buffer_pool
from fzero.sharding import gradient_sums, prefetch
from fzero.train.update import in_backward, offloaded

MLP = models.MLPConfig(vocab_size=32, max_len=8, d_model=8, n_layers=2, d_ff=16)
GPT2 = models.GPT2Config(vocab_size=32, max_len=8, d_model=8, n_layers=2, n_heads=1, d_ff=16)

# Where the launching thread waits, and for what.
# Once, for the sums of gradients that rest in host memory: whoever has them may read them
REDUCE = "sharding/gradient_sums.py"
# Once, for whether to skip the step and the clip factor, and once for the one that is guessed; once for parameters that
# the GPU updates and the host keeps: whoever has the state may read them
UPDATE = "train/update/offloaded.py"
# Once a unit (2 layers and what is outside) that the host updates and the GPU holds; where layers are updated in the
# backward pass, once for the gradients of each, and once a unit for what else it holds
UNITS = "offload/update_units.py"
COMMIT = "train/state_on_disk.py"  # once, for the small values in step.json
SCALE = "train/step.py"  # once, for whether the loss scale is at its floor
EARLY = "train/update/in_backward.py"  # once, for whether to abandon what was written
EVERYWHERE = "params=nvme,grads=nvme,opt=nvme"
BACKWARD = {"update": "backward", "clip": False}
GUESSED = {"update": "speculate", "clip": 1e3}
DELAYED = {"update": "delayed", "micro_batches": 4}  # of two updates

CASES = {
    "params=host": ({}, {UPDATE: 2}),
    "params=host bf16": ({"policy": "bf16"}, {UPDATE: 2}),
    "params=host average": ({"ema": True}, {UPDATE: 2}),
    "grads=host": ({}, {REDUCE: 1, UPDATE: 1}),
    "grads=host fp16": ({"policy": "fp16", "micro_batches": 1}, {REDUCE: 1, UPDATE: 1, SCALE: 1}),
    "opt=host": ({}, {UPDATE: 1, UNITS: 3}),
    "opt=host bf16": ({"policy": "bf16", "micro_batches": 1}, {UPDATE: 1, UNITS: 3}),
    "params=host,grads=host,opt=host": ({}, {REDUCE: 1, UPDATE: 1}),
    "params=host,grads=host,opt=host canonical": ({"reduce": "canonical"}, {REDUCE: 1, UPDATE: 1}),
    "params=host,grads=host,opt=host fp16": (
        {"policy": "fp16", "model": GPT2, "remat": "full", "micro_batches": 1},
        {REDUCE: 1, UPDATE: 1, SCALE: 1},
    ),
    "opt=host backward bf16": ({"policy": "bf16", **BACKWARD}, {UPDATE: 1, UNITS: 3}),
    "grads=host,opt=host backward": (BACKWARD, {REDUCE: 1, UPDATE: 1, UNITS: 2 + 3}),
    "opt=host speculate bf16": ({"policy": "bf16", "update": "speculate"}, {UPDATE: 2, UNITS: 3}),
    "params=host,grads=host,opt=host speculate": ({"update": "speculate"}, {REDUCE: 1, UPDATE: 2, UNITS: 2}),
    "opt=nvme speculate": ({"update": "speculate"}, {UPDATE: 2, UNITS: 2 + 3, COMMIT: 1}),
    "opt=host speculate, not guessed": ({"policy": "bf16", **GUESSED, "clip": 1e-3}, {UPDATE: 2, UNITS: 3}),
    "params=nvme,opt=nvme speculate": (GUESSED, {UPDATE: 2, UNITS: 3, COMMIT: 1}),
    "opt=host delayed": (DELAYED, {UPDATE: 2, UNITS: 2 * 3}),
    "opt=host delayed bf16": ({"policy": "bf16", **DELAYED, "clip": 1e-3}, {UPDATE: 2, UNITS: 2 * 3}),
    "grads=host,opt=host delayed": ({**DELAYED, "micro_batches": 2, "ema": True}, {REDUCE: 2, UPDATE: 2, UNITS: 6}),
    "params=nvme": ({}, {UPDATE: 1, COMMIT: 1}),
    "grads=nvme": ({}, {UPDATE: 1}),
    "opt=nvme": ({"micro_batches": 1}, {UPDATE: 1, UNITS: 3, COMMIT: 1}),
    f"{EVERYWHERE},acts=nvme bf16": ({"policy": "bf16", "remat": "full"}, {UPDATE: 1, COMMIT: 1}),
    f"{EVERYWHERE} backward": (BACKWARD, {UPDATE: 1, EARLY: 1, UNITS: 2, COMMIT: 1}),
    "acts=nvme": ({"remat": "full"}, {}),
}


def losses(device, seen=None, offload="", folder=None, steps=2, **options):
    """The losses and norms of some steps; `seen` counts the waits of the last one alone."""
    policy, remat, reduce, micro_batches, update, clip, ema, config = (
        options.get(name, usual)
        for name, usual in {
            "policy": "fp32",
            "remat": "none",
            "reduce": "fast",
            "micro_batches": 2,
            "update": "end",
            "clip": 1.0,
            "ema": False,
            "model": MLP,
        }.items()
    )
    model = models.build(config)
    plan = fzero.zero_plan(
        0, model, fzero.one_process(), policy=precision.POLICIES[policy](), reduce=reduce, offload=offload
    )
    plan = plan.with_updates(2) if update == "delayed" else plan
    adamw = optim.adamw(optim.warmup_cosine(3e-3, 10, 100), weight_decay=0.1, impl="reference")
    tx = optim.chain(optim.clip_by_global_norm(clip), adamw) if clip else adamw
    tx = optim.with_average(tx, 0.9) if ema else tx
    nvme = fzero.Nvme(folder, buffer_bytes=2 << 20) if "nvme" in offload else None
    state = init_state(model, tx, plan, seed=0, device=device, nvme=nvme)
    step = fzero.make_train_step(
        model,
        tx,
        plan,
        micro_batches=micro_batches,
        nvme=nvme,
        skip=Skip(nonfinite=update != "backward" or "nvme" in offload),
        execution=fzero.Execution(remat=remat, kernels="reference", update=update),
    )
    tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))
    batch, out = {"tokens": tokens.to(device), "targets": tokens.roll(-1, 1).to(device)}, []
    for i in range(steps):
        if seen is not None and i == steps - 1:
            waits, unpinned = seen.waits, seen.unpinned
            seen.waits, seen.unpinned = type(waits)(), type(unpinned)()
        state, metrics = step(state, batch)
        out += [metrics.loss, metrics.grad_norm]
    counts = None if seen is None else (dict(seen.waits), dict(seen.unpinned))
    out = [float(x) for x in out]
    if nvme is not None:
        nvme.close()
    return out, counts


@functools.cache
def in_memory(**options):
    """The losses in memory on the CPU, updated at the end of each step; of 16 bits on the pretend GPU, as sums over
    tokens have a form of their own on the CPU."""
    if options.get("policy", "fp32") == "fp32":
        return losses("cpu", **options)[0]
    with pretend() as seen:
        return losses("cuda", seen, **options)[0]


# Each pair of a place and an option, and each count of waits, is in another case.
REPEATED = ("params=host", "grads=host", "opt=host", "params=host,grads=host,opt=host", "opt=host speculate bf16")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name in REPEATED else pytest.mark.slow) for name in CASES],
)
def test_an_offloaded_step_waits_only_where_the_host_computes(name, tmp_path):
    options, expected = CASES[name]
    with pretend() as seen:
        found, (waits, unpinned) = losses("cuda", seen, name.partition(" ")[0], tmp_path / "disk", **options)
        gc.collect()
    assert not seen.races and not seen.freed and not unpinned
    assert by_file(waits) == expected, waits
    # The disk's threads wait for what they write.
    assert {line.partition(":")[0] for _, line in seen.waits_beside} <= {"offload/update_units.py", "offload/store.py"}
    assert found == in_memory(**options if "delayed" in name else {**options, "update": "end"})


def copies_of_a_step(monkeypatch, small):
    """(the sizes of the copies of parameters to the GPU in a step whose layers of fewer than `small` bytes go together,
    the leaves of the model by name)."""
    sizes = []
    monkeypatch.setattr(prefetch, "SMALL_COPY", small)
    monkeypatch.setattr(prefetch, "copy_in", lambda x, *rest: sizes.append(x.nbytes) or gpu_copies.copy_in(x, *rest))
    options = {"model": GPT2, "micro_batches": 1, "steps": 1}
    with pretend() as seen:
        found, _ = losses("cuda", None, "params=host", **options)
        gc.collect()
    assert not seen.races and not seen.freed and found == in_memory(**options)
    return sizes, pytree.named_leaves(models.build(GPT2).init(lambda name, shape, *_: torch.empty(shape)))


@pytest.mark.slow
def test_small_leaves_come_to_the_gpu_by_one_copy_for_all_layers(monkeypatch):
    apart, leaves = copies_of_a_step(monkeypatch, 0)
    together, _ = copies_of_a_step(monkeypatch, 200)
    stacked = [leaf.nbytes // 2 for name, leaf in leaves.items() if name.startswith("blocks/")]  # of one layer
    small = [size for size in stacked if size < 200]
    assert len(small) > 5 and len(stacked) > len(small)
    # Two passes over two layers: four copies of each, or one.
    assert len(apart) == len(together) + 3 * len(small) and sum(together) < sum(apart)


@pytest.mark.slow
def test_layers_in_memory_are_updated_during_the_backward_pass():
    options = {"policy": "bf16", "clip": False}
    assert losses("cpu", offload="opt=host", update="backward", **options)[0] == in_memory(**options, update="end")


def copies_of(monkeypatch, small, offload, **options):
    """The sizes of the copies (from the GPU, to it) in two steps, whose tensors of fewer than `small` bytes go
    together; the bits and the order are checked."""
    out, back, copy_out, copy_in, copy_in_parts = (
        [],
        [],
        gpu_copies.copy_out,
        gpu_copies.copy_in,
        gpu_copies.copy_in_split,
    )
    with pretend() as seen, monkeypatch.context() as patch:
        for owner in (copy_buckets, gradient_sums, in_backward, offloaded):
            patch.setattr(owner, "SMALL_COPY", small)
        for owner in (copy_buckets, in_backward):
            patch.setattr(owner, "copy_out", lambda x, **room: out.append(x.nbytes) or copy_out(x, **room))
        patch.setattr(copy_buckets, "copy_in", lambda x, *to, **way: back.append(x.nbytes) or copy_in(x, *to, **way))
        patch.setattr(
            copy_buckets, "copy_in_split", lambda x, *to, **way: back.append(x.nbytes) or copy_in_parts(x, *to, **way)
        )
        found, (_, unpinned) = losses("cuda", seen, offload, model=GPT2, **options)
        gc.collect()
    assert not seen.races and not seen.freed and not unpinned
    assert found == in_memory(**{"model": GPT2, **options, "update": "end"})
    return out, back


# Whether sums of gradients or what the host updated goes to the GPU.
BUCKETS = {
    "grads=host": ({"micro_batches": 1}, False),
    "opt=host": ({"micro_batches": 1}, True),
    "opt=host bf16": ({"micro_batches": 1, "policy": "bf16"}, True),
    "params=host,grads=host,opt=host": ({"micro_batches": 2, "reduce": "canonical"}, False),
    "grads=host two": ({"micro_batches": 2}, True),
    "params=host,grads=host,opt=host speculate": ({"micro_batches": 1, "update": "speculate"}, False),
    "opt=host speculate": ({"policy": "bf16", "update": "speculate"}, True),
    "grads=host,opt=host backward": ({"micro_batches": 2, "policy": "bf16", **BACKWARD}, True),
}
TIERS = {
    "grads=host two": (),
    "opt=host bf16": (),
    "opt=host": pytest.mark.slow,
    "grads=host,opt=host backward": pytest.mark.slow,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=TIERS.get(name, pytest.mark.exhaustive)) for name in BUCKETS]
)
def test_small_tensors_of_a_layer_leave_the_gpu_and_come_back_by_one_copy(name, monkeypatch):
    offload, (options, returns) = name.partition(" ")[0], BUCKETS[name]
    apart = copies_of(monkeypatch, 0, offload, **options)
    together = copies_of(monkeypatch, 64 << 10, offload, **options)
    for fewer, each, many in zip(together, apart, (True, returns)):
        assert sum(fewer) == sum(each)
        # Twelve leaves of each of two layers, and those outside: all are small here. The tied embedding gets a second
        # gradient, for which its sum comes back in each step.
        assert len(fewer) * 4 < len(each) if many else len(fewer) <= 2


def forget(copied):
    """A copy for which nothing waits, neither who uses it nor who drops it."""
    copied._ordered = True
    return gpu_copies.Copied(copied.tensor)


@pytest.mark.slow
def test_a_bucket_that_is_not_waited_for_is_found(monkeypatch):
    def unwaited(together):
        return lambda *args, **ways: [forget(one) for one in together(*args, **ways)]

    for owner, name, offload, options in (
        (in_backward, "copy_out_buckets", "params=host,grads=host,opt=host", BACKWARD),
        (copy_buckets, "copy_out_buckets", "opt=host", {"micro_batches": 1}),
        (gradient_sums, "copy_in_buckets", "grads=host", {"micro_batches": 2}),
        (offloaded, "copy_in_buckets", "opt=host", {"micro_batches": 1}),
    ):
        with pretend() as seen, monkeypatch.context() as patch:
            patch.setattr(owner, name, unwaited(getattr(copy_buckets, name)))
            losses("cuda", None, offload, **options)
        assert seen.races, (name, offload)


@pytest.mark.parametrize("most, copies", ((64 << 20, 2), (300, 3)))
def test_small_tensors_of_mixed_dtypes_and_shapes_leave_together(most, copies, monkeypatch):
    monkeypatch.setattr(copy_buckets, "LARGE_COPY", most)
    sizes, copy_out = [], gpu_copies.copy_out
    monkeypatch.setattr(copy_buckets, "copy_out", lambda x, **room: sizes.append(x.nbytes) or copy_out(x, **room))
    shapes = {(2, 3): torch.float32, (5,): torch.bfloat16, (): torch.float32, (0, 2): torch.float32,
              (40,): torch.float32, (5, 8): torch.float32, (3,): torch.bfloat16}  # fmt: skip
    with pretend() as seen:
        given, wanted = (
            [torch.full(shape, i + 1.0, dtype=dtype, device=device) for i, (shape, dtype) in enumerate(shapes.items())]
            for device in ("cuda", "cpu")
        )
        here = torch.ones(3)
        *found, same = copy_buckets.start_fetch([*given, here]).wait()
        assert same is here and sum(seen.waits.values()) == 1
        assert_same(found, wanted)
    assert not seen.races and not seen.unpinned
    assert len(sizes) == copies and sum(sizes) == sum(x.nbytes for x in wanted)


def through_a_disk(folder):
    """Lists of activations to a disk and back, in the order of a backward pass."""
    nvme = fzero.Nvme(folder, buffer_bytes=2 << 20)
    kept = DiskActivations(nvme.scratch)
    for i in range(4):
        x = torch.full((64,), float(i), device="cuda")
        kept.append([x * 2])
    found = [kept.pop()[0].sum() for _ in range(4)]
    nvme.close()
    return found


def test_activations_go_to_a_disk_and_come_back_in_order(tmp_path):
    with pretend() as seen:
        found = through_a_disk(tmp_path)
        assert list(seen.waits.values()) == [1] and seen.waits_beside  # when the buffers are given back, at the end
        assert [float(x) for x in found] == [384.0, 256.0, 128.0, 0.0]
        gc.collect()
    assert not seen.races and not seen.freed and not seen.unpinned


def nothing(self, *_, **__):
    return getattr(self, "tensor", None)


@pytest.mark.parametrize(
    "owner, name, kind",
    [
        (buffer_pool.BufferPool, "retain", "races"),
        (gpu_copies.Copied, "finish", "races"),
        pytest.param(Stream, "wait_stream", "races", marks=pytest.mark.slow),
        pytest.param(Stream, "wait_event", "races", marks=pytest.mark.slow),
        pytest.param(gpu_copies.CopySources, "add", "freed", marks=pytest.mark.slow),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_missing_order_on_the_way_to_a_disk_is_found(owner, name, kind, monkeypatch, tmp_path):
    monkeypatch.setattr(owner, name, nothing)
    with pretend() as seen:
        through_a_disk(tmp_path)
        gc.collect()
    assert getattr(seen, kind)


def test_the_buffers_of_a_new_state_are_pinned_and_its_threads_know_the_gpu(monkeypatch, tmp_path):
    plan = fzero.zero_plan(0, {"w": torch.ones(2)}, fzero.one_process(), offload="params=nvme,opt=nvme")
    begun, chosen = [], []
    with pretend() as seen, monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: bool(begun))
        patch.setattr(torch.cuda, "init", lambda: begun.append(1))
        patch.setattr(torch.cuda, "current_device", lambda: 3)
        patch.setattr(torch.cuda, "set_device", chosen.append)
        nvme = fzero.Nvme(tmp_path, buffer_bytes=1 << 20)
        init_state({"w": torch.ones(2)}, optim.sgd(0.1), plan, seed=0, device="cuda", nvme=nvme)
        assert seen.pages
        threads = len(nvme.disk.threads)
        nvme.close()
    assert chosen == [torch.device("cuda", 3)] * threads


def test_buffers_that_are_copied_to_the_gpu_are_lent_until_then():
    with pretend() as seen:
        pool, device = buffer_pool.BufferPool(2 << 20), torch.device("cuda", 0)
        for i in range(3):
            buffer = pool.allocate((pool.size,), torch.uint8)
            buffer.view.fill_(i)
            pool.retain(buffer.raw, gpu_copies.copy_in(buffer.view, device))
            assert sum(seen.waits.values()) == i  # for the copy before
            del buffer
        pool.drain()
        assert sum(seen.waits.values()) == 3 and not seen.races
    assert pool.allocate((pool.size,), torch.uint8).view.numel() == pool.size


def early(tensors, device, *, events):
    return copy_buckets.copy_in_buckets(tensors, device)


def unused(copied):
    copied._ordered = True
    return copied.tensor


@pytest.mark.slow
@pytest.mark.parametrize(
    "offload, owner, name, plant",
    [
        # The sum so far comes back to the GPU before it has left.
        ("grads=host,opt=host", gradient_sums, "copy_in_buckets", early),
        # The host reads sums, or rows, that are still on their way.
        ("grads=host,opt=host", gpu_copies.Copied, "finish", nothing),
        ("opt=host", gpu_copies.Copied, "finish", nothing),
        # Parameters are written while the backward pass reads them.
        ("opt=host", Stream, "wait_stream", nothing),
        # The next step reads parameters that are still on their way.
        ("opt=host", gpu_copies.Copied, "use", unused),
    ],
)
def test_a_missing_order_of_a_step_is_found(offload, owner, name, plant, monkeypatch):
    monkeypatch.setattr(owner, name, plant)
    if plant is early:  # so that no order follows from memory that was freed meanwhile
        monkeypatch.setattr(gpu_copies.CopySources, "advance", nothing)
    options = {"policy": "bf16", "update": "backward", "clip": False} if name == "wait_stream" else {"policy": "bf16"}
    with pretend() as seen:
        losses("cuda", None, offload, **options)
        gc.collect()
    assert seen.races
