"""Memory of the pretend GPU stays bounded however far the host runs ahead: what copies bring and take away is reused in
the order of the computing stream. The peak if the GPU is infinitely late (`PretendGpu.peak_ahead`) is at most that of
copies whose memory is free at once, and two layers."""

import functools
import gc
import tempfile
from pathlib import Path

import pretend_nccl
import pytest
import ranks
import test_pretend_ranks
import torch
from pretend_gpu import pretend

import fzero
from fzero import Skip, init_state, models, optim
from fzero.core import copy_buckets, gpu_copies, precision, pytree
from fzero.offload import chunk_files, update_units
from fzero.sharding import Pipeline, gradient_sums, prefetch, slices

D, F, TOKENS, LAYERS = 32, 64, 8 * 32, 6
CONFIG = models.LlamaConfig(vocab_size=32, max_len=32, d_model=D, n_layers=LAYERS, n_heads=2, n_kv_heads=2, d_ff=F)
ON_HOST = "params=host,grads=host,opt=host"
ON_DISK = "params=nvme,grads=nvme,opt=nvme"


def layer_bytes(params, offload, tokens=TOKENS, width=D, layers=LAYERS):
    """What moves of a layer, in float32 at most: parameters, gradients, rows of states; the activations that enter."""
    numel = sum(leaf.numel() for name, leaf in pytree.named_leaves(params).items() if name.startswith("blocks"))
    groups = sum(f"{group}=" in offload for group in ("params", "grads", "opt"))
    return 4 * (groups * numel // layers + ("acts=" in offload) * tokens * width)


def free_at_once(patch):
    """Have the sources of copies freed when the copy is started, in which nothing keeps order."""
    patch.setattr(gpu_copies.CopySources, "add", lambda sources, source: None)


def record_streams(patch):
    """Have memory wait for copies by `record_stream`, for the host to see."""
    copy_in, copy_out, streams = gpu_copies.copy_in, gpu_copies.copy_out, gpu_copies._copy_streams

    def bring(x, device, **options):
        copied = copy_in(x, device, **options)
        if copied.tensor.is_cuda:
            copied.tensor.record_stream(streams(device)[0])
        return copied

    def take(x, **options):
        copied = copy_out(x, **options)
        if x.is_cuda:
            x.record_stream(streams(x.device)[1])
        return copied

    for owner in (prefetch, update_units, chunk_files, copy_buckets, gradient_sums):
        for name, plant in (("copy_in", bring), ("copy_out", take)):
            patch.setattr(owner, name, plant, raising=False)


def peaks(folder, offload="", plant=None, update="end", micro_batches=1, policy="bf16", remat="full"):
    """(peak in order, peak with the host ahead, bytes of a layer, the most bytes of each stream) of a second step."""
    folder.mkdir(exist_ok=True)
    model = models.build(CONFIG)
    with pretend() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "is_small", lambda leaf: False)  # each layer comes by itself, as large ones do
        if plant is not None:
            plant(patch)
        policy = precision.POLICIES[policy]()
        plan = fzero.zero_plan(0, model, fzero.one_process(), policy=policy, offload=offload)
        tx = optim.adamw(1e-3, impl="reference")
        tx = tx if update == "backward" else optim.chain(optim.clip_by_global_norm(1.0), tx)
        nvme = fzero.Nvme(folder, buffer_bytes=4 << 20) if "nvme" in offload else None
        state = init_state(model, tx, plan, seed=0, device="cuda", nvme=nvme)
        skip = Skip(nonfinite=update != "backward" or "nvme" in offload)
        execution = fzero.Execution(remat=remat, kernels="reference", update=update)
        options = {"micro_batches": micro_batches, "nvme": nvme, "skip": skip}
        step = fzero.make_train_step(model, tx, plan, execution=execution, **options)
        tokens = torch.randint(0, 32, (8 * micro_batches, 32)).to("cuda")
        batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
        state, _ = step(state, batch)
        gc.collect()
        gpu.forget()
        state, _ = step(state, batch)
        found = gpu.peak, gpu.peak_ahead, layer_bytes(plan.like, offload), gpu.stream_peaks
        if nvme is not None:
            nvme.close()
        return found


@functools.cache
def peak_in_order(name):
    """Of a case whose copies' memory is free at once: two tests compare with it."""
    with tempfile.TemporaryDirectory() as folder:
        return peaks(Path(folder), name.partition(" ")[0], free_at_once, **CASES[name])[0]


CASES = {
    "acts=host": {},
    "params=host": {},
    "grads=host": {"micro_batches": 2},
    "opt=host": {},
    "opt=host speculate": {"update": "speculate"},
    ON_HOST: {},
    f"{ON_HOST},acts=host": {},
    f"{ON_HOST} fp32 kept": {"policy": "fp32", "remat": "none"},
    f"{ON_HOST} backward": {"update": "backward"},
    f"{ON_HOST} speculate": {"update": "speculate"},
    "params=nvme": {},
    f"{ON_DISK},acts=nvme": {},
    f"{ON_DISK},acts=nvme backward": {"update": "backward"},
}
OFTEN = (f"{ON_HOST},acts=host",)
LATER = ("grads=host", f"{ON_HOST} speculate", f"{ON_DISK},acts=nvme")


def tiers(names, often, later):
    """The names as parameters, with the mark of their tier."""
    marks = {name: pytest.mark.slow if name in later else pytest.mark.exhaustive for name in names if name not in often}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


@pytest.mark.parametrize("name", tiers(CASES, OFTEN, LATER))
def test_a_host_that_runs_ahead_takes_two_layers_more_at_most(name, tmp_path):
    offload, options = name.partition(" ")[0], CASES[name]
    _, ahead, layer, stream_peaks = peaks(tmp_path, offload, **options)
    assert ahead <= peak_in_order(name) + 2 * layer
    # No stream has memory that another one could use: of those of copies, one small bucket.
    assert sum(size for stream, size in stream_peaks.items() if stream) <= layer


@pytest.mark.parametrize("name", tiers(("acts=host", "params=host", "grads=host"), ("acts=host",), ("grads=host",)))
def test_memory_that_waits_for_the_host_is_found(name, tmp_path):
    _, ahead, layer, _ = peaks(tmp_path, name, record_streams, **CASES[name])
    assert ahead > peak_in_order(name) + 2 * layer


def rank_peaks(mesh, case, folder, plant=None):
    """`peaks` of a rank of several, of a case of test_pretend_ranks."""
    with pretend() as gpu, pretend_nccl.nccl(), pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch)
        test_pretend_ranks.train(pretend_nccl.on_gpus(mesh), "cuda", case, folder, gpu, steps=2)
        return gpu.peak, gpu.peak_ahead


ALL_ON_HOST = {"offload": f"{ON_HOST},acts=host"}
RANKS = {
    "dp2 stage 1 grads=host": ({"dp": 2}, {"stage": 1, "plan": {"offload": "grads=host"}}),
    "dp2 stage 2 all host": ({"dp": 2}, {"stage": 2, "plan": ALL_ON_HOST, "remat": "full"}),
    "dp2 stage 3 all host": ({"dp": 2}, {"stage": 3, "plan": ALL_ON_HOST, "remat": "full", "policy": "bf16"}),
    "pp2 all host": ({"pp": 2}, {"stage": 3, "plan": ALL_ON_HOST, "remat": "full"}),
    "pp2 interleaved grads=host": (
        {"pp": 2},
        {"stage": 0, "plan": {"offload": "grads=host", "pipeline": Pipeline("interleaved", chunks=2)}},
    ),
    "pp2 gpipe acts=host": (
        {"pp": 2},
        {"stage": 0, "plan": {"offload": "acts=host", "pipeline": Pipeline("gpipe")}, "remat": "full"},
    ),
}


@pytest.mark.parametrize("name", tiers(RANKS, (), ("dp2 stage 3 all host", "pp2 all host")))
def test_so_does_one_of_several_ranks(name, tmp_path):
    sizes, case = RANKS[name]
    case = case | {"layers": 10}
    model = models.build(models.LlamaConfig(**test_pretend_ranks.SIZES))
    params = model.init(lambda name, shape, *_: torch.empty(shape))
    sizes_of_layer = 8 * 8, test_pretend_ranks.SIZES["d_model"], test_pretend_ranks.SIZES["n_layers"]
    layer = layer_bytes(params, case["plan"]["offload"], *sizes_of_layer)
    done = ranks.run(2, rank_peaks, case, tmp_path, mesh=sizes)
    at_once = ranks.run(2, rank_peaks, case, tmp_path, free_at_once, mesh=sizes)
    for (_, ahead), (in_order, _) in zip(done, at_once):
        assert ahead <= in_order + 2 * layer


@pytest.mark.parametrize("policy", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_a_first_state_that_rests_on_the_host_takes_the_memory_of_a_leaf(policy, monkeypatch):
    # A draw takes 440 MB beside, whatever the leaf.
    zeros = lambda key, shape, start, size, mean, std, dtype, device: torch.zeros(size, dtype=dtype, device=device)  # noqa: E731
    monkeypatch.setattr(slices, "draw_normal_box", zeros)
    config = models.LlamaConfig(vocab_size=64, max_len=8, d_model=256, n_layers=8, n_heads=2, n_kv_heads=2, d_ff=512)
    model = models.build(config)
    with pretend() as gpu:
        plan = fzero.zero_plan(0, model, fzero.one_process(), policy=precision.POLICIES[policy](), offload=ON_HOST)
        state = init_state(model, optim.adamw(1e-3), plan, seed=0, device="cuda")
        leaves = pytree.named_leaves(state)
        on_gpu = {name for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor) and leaf.is_cuda}
        largest = max(leaf.numel() for leaf in pytree.leaves(plan.like))
    assert not any(name.startswith(("params", "master")) for name in on_gpu) and "step" in on_gpu
    assert not gpu.waits_beside and not gpu.races and not gpu.freed
    assert gpu.peak < 10 * largest < 2 * sum(leaf.numel() for leaf in pytree.leaves(plan.like))  # of the state
