"""Offload on a mesh with pp has the bits of the same run without: what each stage keeps rests elsewhere, the leaves
that stages share with it, and the activations of several micro-batches at a time. A store is one of its pipeline."""

import itertools
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from close import assert_same
from test_offload import Case, check, each, folder  # noqa: F401  (a fixture)
from zero_cases import FP64, OPTIMIZERS, model_of

import fzero
from fzero.core import pytree
from fzero.offload import DiskActivations
from fzero.run import Options, build, coordinator, from_table, loop, pretrain, run_folder, run_lock, weights
from fzero.run.measure import memory_check, peak_memory
from fzero.sharding import Pipeline, zero_plan

PP2, PP2_DP2 = (("pp", 2),), (("pp", 2), ("dp", 2))
ALL = "params=nvme,grads=nvme,opt=nvme,acts=nvme"
FEW = Case(ALL, 3, PP2, micro=3, steps=5, model="tied and deep", remat="full", pipeline=Pipeline())
INTERLEAVED = Pipeline("interleaved", chunks=2)


@pytest.mark.slow
@each(
    [
        FEW._replace(stage=0, steps=2, micro=2, model="tied"),
        FEW._replace(micro=4, pipeline=INTERLEAVED),
    ]
)
def test_a_pipeline_with_everything_on_a_disk_has_the_same_bits(case, folder):  # noqa: F811
    check(case, folder)


TIERS = ("opt=nvme", "params=nvme,opt=nvme", "acts=nvme", "grads=nvme", "params=host,grads=host,opt=host,acts=host")


@pytest.mark.exhaustive
@each(
    [
        FEW._replace(offload=offload, stage=stage, mesh=mesh, policy=policy, micro=4, pipeline=pipeline)
        for offload, stage, (mesh, policy, pipeline) in itertools.product(
            TIERS,
            range(4),
            (
                (PP2, "fp32", INTERLEAVED),
                (PP2, "bf16", Pipeline(layout="3,1")),
                (PP2_DP2, "fp32", Pipeline()),
                (PP2_DP2, "bf16", Pipeline("gpipe", layout="1,3")),
            ),
        )
    ]
)
def test_every_tier_has_the_same_bits(case, folder):  # noqa: F811
    check(case, folder)


# ---- stores: opened again by their own pipeline, made a checkpoint for another one


def told(mesh, home, changes, stop_at):
    """The lines of a run of these ranks that begins, or is resumed with changes, and stops."""
    lines, key = [], f"run/{home.name}/{stop_at}/{mesh.size}"
    ours = coordinator.Coordinator(mesh.rank, mesh.size, mesh.size, mesh.store and dist.PrefixStore(key, mesh.store))

    def mesh_of_run(sizes, timeout_s, device):
        ours.current_mesh = mesh
        return mesh

    ours.mesh = mesh_of_run
    options = Options(stop_at=stop_at, peak_flops=1e12, sample="", say=lines.append)
    if not (home / "config.json").exists():
        run = pretrain.start(from_table(table_of(home, changes)), home, ours, options)
    else:
        run = pretrain.resume(home, ours, options, changes=changes)
    loop.train(*run)
    run_lock.release_all()
    return lines


def table_of(home, changes):
    sizes = {"max_len": 16, "d_model": 16, "n_layers": 4, "n_heads": 2, "n_kv_heads": 2, "d_ff": 32}
    train = {"steps": 9, "batch": 4, "micro_batch": 1, "compiled": False, "kernels": "reference", "digest_every": 1}
    return {
        "preset": "llama-tiny",
        "model": sizes,
        "data": {"path": str(home.parent / "text.txt"), "seq_len": 16},
        "train": train | {"eval_every": 0, "checkpoint_every": 0, "measure_every": 0, "remat": "full"},
        "precision": {"policy": "fp32", "fp32_matmul": "default"},
        "device": "cpu",
        "reduce": "canonical",
    } | changes


def pipelined(schedule, chunks, layout):
    return {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule, "chunks": chunks, "layout": layout}}


UNEVEN, TURNS = pipelined("1f1b", 1, "3,1"), pipelined("interleaved", 2, "auto")
ATTEMPTS = [  # (ranks, changes, last step), and whether the store was another plan's
    (1, {"offload": ALL, "zero": 3}, 1, False), (2, UNEVEN, 2, True), (2, TURNS, 3, True), (2, {}, 4, False),
    (2, UNEVEN, 5, True), (1, {"mesh": {}}, 6, True),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*its file system refuses direct transfers:UserWarning")
def test_a_store_is_resumed_by_its_own_pipeline_and_by_any_other_mesh(tmp_path):
    """With the rows of one process, whatever stages a step had."""
    (tmp_path / "text.txt").write_text("\n".join(f"line {i}: {i * i}" for i in range(600)))
    ranks.run(1, told, tmp_path / "memory", {}, 6, mesh={}, fresh=True)
    for size, changes, stop_at, other in ATTEMPTS:
        mesh = {"pp": 2} if size == 2 else {}
        lines, *_ = ranks.run(size, told, tmp_path / "disk", changes, stop_at, mesh=mesh, fresh=True)
        assert any("on the disk was another plan's" in line for line in lines) == other, stop_at
    rows = [[*run_folder.read_metrics(tmp_path / name)] for name in ("memory", "disk")]
    expected, found = ([[row[key] for key in ("step", "loss", "grad_norm", "digest")] for row in run] for run in rows)
    assert len(found) == 6 and found == expected
    weights_of = [pytree.named_leaves(weights.load(tmp_path / name).params) for name in ("memory", "disk")]
    assert_same(*weights_of)


def test_memory_and_disk_have_room_for_the_micro_batches_under_way():
    """Of 4 layers on 2 ranks, 1f1b keeps 2 for each of 2 micro-batches on the first, gpipe for each of 4."""

    def job(schedule, pp=2):
        run = {"offload": "acts=nvme", "mesh": {"pp": pp}, "pipeline": {"schedule": schedule}}
        return build.build(from_table(table_of(Path("run"), run)), fzero.fake_mesh({"pp": pp}))

    assert [peak_memory.layers_alive(job(name)) for name in ("1f1b", "gpipe")] == [4, 8]
    assert peak_memory.layers_alive(job("1f1b", 1)) == 4
    few, many = (memory_check.disk_needed(job(name)) for name in ("1f1b", "gpipe"))
    assert many == 2 * few > 0


@pytest.mark.parametrize("update", ("backward", "speculate"))
def test_an_update_in_the_backward_pass_is_refused(update):
    model, mesh = model_of("gemma"), fzero.fake_mesh({"pp": 2})
    plan = zero_plan(0, model, mesh, policy=FP64, offload="opt=host")
    with pytest.raises(ValueError, match=f'update="{update}" .* pp=2 cuts it into stages; use update="end"'):
        fzero.make_train_step(model, OPTIMIZERS["sgd"], plan, execution=fzero.Execution(update=update))


def test_a_captured_step_is_none_with_stages():
    """`auto` leaves capture off and says why."""
    model, mesh = model_of("gemma"), fzero.fake_mesh({"pp": 2})
    plan = zero_plan(0, model, mesh, policy=FP64)
    step = fzero.make_train_step(model, OPTIMIZERS["sgd"], plan, execution=fzero.Execution(capture="auto"))
    assert step.refused == "pp=2: messages between stages are started by the host"


def test_stacks_of_activations_share_a_file(tmp_path):
    """Several at a time, whichever is emptied first; the file grows only to what was there at once."""
    nvme = fzero.Nvme(tmp_path)

    def kept(number):
        stack = DiskActivations(nvme.scratch)
        for layer in range(2):
            stack.append([torch.full((64,), float(10 * number + layer))])
        return stack

    ends = []
    for _ in range(2):
        alive = [kept(number) for number in range(3)]
        for number in (1, 0):
            assert [float(alive[number].pop()[0][0]) for _ in range(2)] == [10 * number + 1, 10 * number]
        alive.append(kept(3))
        for number in (2, 3):
            assert [float(alive[number].pop()[0][0]) for _ in range(2)] == [10 * number + 1, 10 * number]
        ends.append(nvme.scratch.end)
    assert ends[0] == ends[1] and not nvme.scratch.stacks.in_use
    nvme.close()
