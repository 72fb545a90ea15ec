"""Steps of two ranks on pretend GPUs with NCCL between them (pretend_nccl.py): they wait for nothing, in an order that
streams make, and have the bits of two ranks on the CPU. And a wait that is left out is found."""

import contextlib
import gc
import math
import os

import pretend_nccl
import pytest
import ranks
import torch
import torch.distributed as dist
from pretend_gpu import pretend
from test_pretend_gpu import by_file
from test_pretend_offload import COMMIT, REDUCE, SCALE, UNITS, UPDATE

import fzero
from fzero import init_state, models, optim
from fzero.comm import rank_tables
from fzero.core import gpu_copies, precision
from fzero.run import Options, coordinator, from_table, loop, pretrain, run_folder, run_lock
from fzero.sharding import Pipeline

SIZES = {"vocab_size": 64, "max_len": 16, "d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "d_ff": 32}


def train(mesh, device, case, folder=None, seen=None, steps=2):
    """The losses and norms of some steps, and the waits that `seen` counted in the last one."""
    sizes = SIZES | {"n_layers": case.get("layers", SIZES["n_layers"])}
    model, settings = models.build(models.LlamaConfig(**sizes)), case.get("plan", {})
    policy = precision.POLICIES[case.get("policy", "fp32")]()
    plan = fzero.zero_plan(case["stage"], model, mesh, policy=policy, **settings)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, impl="reference"))
    tx = optim.with_average(tx, 0.9) if case.get("ema") else tx
    with contextlib.ExitStack() as stack:
        nvme = None
        if "nvme" in settings.get("offload", ""):
            nvme = stack.enter_context(contextlib.closing(fzero.Nvme(folder / device, buffer_bytes=2 << 20)))
        state = init_state(model, tx, plan, seed=0, device=device, nvme=nvme)
        how = {"remat": case.get("remat", "none"), "update": case.get("update", "end")}
        execution, options = fzero.Execution(kernels="reference", **how), {"micro_batches": 2, "nvme": nvme}
        step = fzero.make_train_step(model, tx, plan, execution=execution, **options)
        return steps_of(mesh, device, state, step, seen, steps)


def steps_of(mesh, device, state, step, seen, steps):
    """What `train` returns."""
    tokens = torch.randint(0, 64, (8, 8), generator=torch.Generator().manual_seed(1)).chunk(mesh.data_size)
    tokens = tokens[mesh.data_rank].to(device)
    batch, out = {"tokens": tokens, "targets": tokens.roll(-1, 1)}, []
    for _ in range(steps):
        if seen is not None:  # of the last step; races of all
            seen.waits.clear()
            seen.unpinned.clear()
        state, metrics = step(state, batch)
        out += [metrics.loss, metrics.grad_norm]
    waits = None if seen is None else dict(seen.waits)
    return [float(x) for x in out], waits


def both(mesh, case, folder):
    """Of this rank: the numbers on the CPU and on the pretend GPU, and what was found there."""
    expected, _ = train(mesh, "cpu", case, folder)
    with pretend() as seen, pretend_nccl.nccl():
        found, waits = train(pretend_nccl.on_gpus(mesh), "cuda", case, folder, seen)
        gc.collect()
        return expected, found, waits, dict(seen.unpinned), dict(seen.races), dict(seen.freed)


def by_the_host(mesh, case):
    """The same as `both` with gloo between the ranks, for the GPU's tensors too."""
    expected, _ = train(mesh, "cpu", case)
    with pretend() as seen:
        found, waits = train(mesh, "cuda", case, None, seen)
        gc.collect()
        return expected, found, {line.partition(":")[0] for _, line in waits}, dict(seen.races), dict(seen.freed)


def unread(mesh, case):
    """The races of a step whose messages are sent before the host has them, on this rank."""
    with pytest.MonkeyPatch.context() as patch, pretend() as seen:
        patch.setattr(gpu_copies.Copied, "finish", lambda copied: copied.tensor)
        train(mesh, "cuda", case, steps=1)
        return dict(seen.races)


def unwaited(mesh, case):
    """The races of a step whose collectives are not waited for, on this rank."""
    with pytest.MonkeyPatch.context() as patch, pretend() as seen, pretend_nccl.nccl():
        patch.setattr(pretend_nccl.Work, "wait", lambda work: None)
        train(pretend_nccl.on_gpus(mesh), "cuda", case, steps=1)
        return dict(seen.races)


ON_HOST = {"offload": "params=host,grads=host,opt=host"}
ALL_ON_HOST = {"offload": f"{ON_HOST['offload']},acts=host"}
INTERLEAVED = {"pipeline": Pipeline("interleaved", chunks=2)}
CASES = {
    "dp2": ({"dp": 2}, {"stage": 0}),
    "dp2 stage 3": ({"dp": 2}, {"stage": 3}),
    "tp2": ({"tp": 2}, {"stage": 0, "plan": {"sequence": True}}),
    "dp2 stage 2 fp16 average": ({"dp": 2}, {"stage": 2, "policy": "fp16", "ema": True}),
    "dp2 stage 3 acts=host": ({"dp": 2}, {"stage": 3, "plan": {"offload": "acts=host"}, "remat": "full"}),
    "dp2 stage 1 opt=host": ({"dp": 2}, {"stage": 1, "plan": {"offload": "opt=host"}}),
    "dp2 stage 3 all host": ({"dp": 2}, {"stage": 3, "plan": ON_HOST, "policy": "bf16"}),
    "dp2 stage 3 speculate": ({"dp": 2}, {"stage": 3, "plan": {"offload": "opt=host"}, "update": "speculate"}),
    "dp2 stage 3 nvme": ({"dp": 2}, {"stage": 3, "plan": {"offload": "params=nvme,opt=nvme"}}),
    "tp2 all host": ({"tp": 2}, {"stage": 0, "plan": ON_HOST}),
    "pp2": ({"pp": 2}, {"stage": 0}),
    "pp2 interleaved": ({"pp": 2}, {"stage": 3, "layers": 4, "plan": INTERLEAVED, "ema": True}),
    "pp2 all host": ({"pp": 2}, {"stage": 3, "plan": ALL_ON_HOST, "policy": "bf16", "remat": "full"}),
    "pp2 acts=nvme": ({"pp": 2}, {"stage": 0, "plan": {"offload": "acts=nvme"}, "remat": "full"}),
    "pp2 nvme": ({"pp": 2}, {"stage": 1, "plan": {"offload": "params=nvme,grads=nvme,opt=nvme"}}),
    "dp2 rp2 all host": ({"dp": 2, "rp": 2}, {"stage": 3, "plan": ALL_ON_HOST, "policy": "bf16", "remat": "full"}),
    "dp2 tp2 speculate": ({"dp": 2, "tp": 2}, {"stage": 3, "plan": {"offload": "opt=host"}, "update": "speculate"}),
    "dp2 pp2": ({"dp": 2, "pp": 2}, {"stage": 3, "ema": True}),
}
# As on one rank: a wait is for the GPU, never for another rank.
WAITS = {
    "dp2 stage 2 fp16 average": {SCALE: 1},
    "dp2 stage 1 opt=host": {UPDATE: 1, UNITS: 3},
    "dp2 stage 3 all host": {REDUCE: 1, UPDATE: 1},
    "dp2 stage 3 speculate": {UPDATE: 2, UNITS: 2 + 3},  # 2: as a layer is updated in the backward pass
    "dp2 stage 3 nvme": {UPDATE: 1, UNITS: 3, COMMIT: 1},
    "tp2 all host": {REDUCE: 1, UPDATE: 1},
    "pp2 all host": {REDUCE: 1, UPDATE: 1},
    "pp2 nvme": {UPDATE: 1, COMMIT: 1},
    "dp2 rp2 all host": {REDUCE: 1, UPDATE: 1},
    "dp2 tp2 speculate": {UPDATE: 2, UNITS: 2 + 3},
}


OFTEN = ("dp2", "dp2 stage 3", "tp2", "dp2 stage 3 all host", "pp2 interleaved", "pp2 all host")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in OFTEN else pytest.mark.exhaustive) for name in CASES],
)
def test_ranks_wait_for_no_other_reason_than_one_and_have_the_bits_of_the_cpu(name, tmp_path):
    sizes, case = CASES[name]
    number = math.prod(sizes.values())
    done = ranks.run(number, both, case, tmp_path, mesh=sizes, timeout_s=600.0)
    for expected, found, waits, unpinned, races, freed in done:
        assert by_file(waits) == WAITS.get(name, {}), waits
        assert not unpinned and not races and not freed
        assert found == expected and len(found) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["dp2 stage 3", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("dp2", "tp2", "pp2 interleaved"))],
)
def test_ranks_that_share_a_gpu_send_by_the_host_and_have_the_bits_of_the_cpu(name):
    sizes, case = CASES[name]
    for expected, found, waits, races, freed in ranks.run(2, by_the_host, case, mesh=sizes):
        assert waits == {"comm/messages.py"} and not races and not freed
        assert found == expected and len(found) == 4


@pytest.mark.slow
def test_what_is_sent_before_the_host_has_it_is_found():
    sizes, case = CASES["dp2"]
    for races in ranks.run(2, unread, case, mesh=sizes):
        assert any("comm/messages.py" in race or "comm/communicator.py" in race for race in races), races


@pytest.mark.slow
def test_a_wait_that_is_left_out_is_found():
    sizes, case = CASES["dp2 stage 3"]
    for races in ranks.run(2, unwaited, case, mesh=sizes):
        assert any("comm/messages.py" in race or "comm/communicator.py" in race for race in races), races


def early(mesh, case):
    """The races of a step that uses what a stage sends before it has come, on this rank."""
    with pytest.MonkeyPatch.context() as patch, pretend() as seen, pretend_nccl.nccl():
        patch.setattr(pretend_nccl.Message, "wait", lambda message: message.moving.wait())
        train(pretend_nccl.on_gpus(mesh), "cuda", case, steps=2)
        return dict(seen.races)


@pytest.mark.slow
def test_a_message_between_stages_that_is_not_waited_for_is_found():
    sizes, case = CASES["pp2 interleaved"]
    for races in ranks.run(2, early, case, mesh=sizes):
        assert any(
            "comm/rank_tables.py" in race or "train/stage_exchange.py" in race or "comm/messages.py" in race
            for race in races
        )


def channels(mesh, steps):
    """Of this rank: the labels of the channels that steps opened, and the calls that made them."""
    made, there = [], pretend_nccl.on_gpus(mesh)
    with pytest.MonkeyPatch.context() as patch, pretend(), pretend_nccl.nccl():
        before = rank_tables.pair_over_nccl
        patch.setattr(rank_tables, "pair_over_nccl", lambda store, number: made.append(number) or before(store, number))
        train(there, "cuda", CASES["pp2"][1], steps=steps)
        return sorted(there["pp"].communicator.connections), made


@pytest.mark.exhaustive
def test_each_channel_is_opened_once_and_in_one_direction():
    assert ranks.run(2, channels, 3, mesh={"pp": 2}) == [
        (["grad:1-0", "x:0-1"], [1, 0]),
        (["grad:1-0", "x:0-1"], [0, 1]),
    ]


# ---- whole runs ----

NAMES = ("step", "loss", "grad_norm", "lr", "num_tokens", "skipped", "val_loss", "digest", "saved_step")


def stages(mesh, home, device, sizes_of_mesh):
    """A run of two ranks that stops, and is resumed: its lines, on rank 0."""
    sizes = {"max_len": 16, "d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "d_ff": 32}
    table = {"preset": "llama-tiny", "model": sizes, "data": {"path": str(home / "text.txt"), "seq_len": 16}}
    train = {"steps": 2, "batch": 4, "micro_batch": 2, "eval_every": 1, "checkpoint_every": 1, "digest_every": 1}
    table["train"] = train | {"measure_every": 1, "eval_batches": 1, "compiled": False, "kernels": "reference"}
    table["precision"] = {"policy": "fp32", "fp32_matmul": "default"}
    table |= {"optim": {"name": "adamw"}, "zero": 3, "mesh": sizes_of_mesh, "device": device}
    folder, lines, store = home / device, [], dist.PrefixStore(f"run/{device}", mesh.store)

    def one_start(number):
        # As if each rank had a host of its own.
        ours = coordinator.Coordinator(mesh.rank, 2, 1, dist.PrefixStore(str(number), store))

        def mesh_of_run(sizes, timeout_s, device):
            ours.current_mesh = mesh if device.type == "cpu" else pretend_nccl.on_gpus(mesh)
            ours.notices = device.type == "cpu"
            return ours.current_mesh

        ours.mesh = mesh_of_run
        return ours

    options = Options(stop_at=1, peak_flops=1e12, sample="", say=lines.append)
    loop.train(*pretrain.start(from_table(table), folder, one_start(0), options))
    run_lock.release_all()
    loop.train(*pretrain.resume(folder, one_start(1), options._replace(stop_at=None)))
    run_lock.release_all()
    return lines


def whole_run(mesh, home, sizes):
    """A run on the CPU, and one on pretend GPUs: of this rank the lines of the latter, and what was found."""
    os.environ["XDG_CACHE_HOME"] = str(home / "cache")
    stages(mesh, home, "cpu", sizes)
    with pretend() as seen, pretend_nccl.nccl():
        found = stages(mesh, home, "cuda", sizes)
        gc.collect()
        return found, dict(seen.races), dict(seen.freed)


@pytest.mark.parametrize(
    "axis", [pytest.param("dp", marks=pytest.mark.slow), pytest.param("pp", marks=pytest.mark.exhaustive)]
)
def test_a_run_of_two_ranks_trains_evaluates_saves_and_resumes_with_the_numbers_of_the_cpu(axis, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(f"line {i}: {i * i}" for i in range(600)))
    both = ranks.run(2, whole_run, tmp_path, {axis: 2}, mesh={axis: 2}, fresh=True)
    for lines, races, freed in both:
        assert not races and not freed
        assert any("GPU 0, Pretend H200" in line for line in lines) and any("at step 1 of 2" in line for line in lines)
    ours, theirs = ([*run_folder.read_metrics(tmp_path / device)] for device in ("cuda", "cpu"))
    assert [[row.get(name) for name in NAMES] for row in ours] == [[row.get(name) for name in NAMES] for row in theirs]
    assert len(ours) == 2 and all(row["digest"] and row["val_loss"] and "gpu_peak_bytes" in row for row in ours)
    assert run_folder.read_config(tmp_path / "cuda").device == "cuda"
