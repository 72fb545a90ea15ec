"""Checkpoints on several ranks: what one mesh saves another resumes from; each rank reads its slices; what a change of
policy makes."""

import itertools
import json
import shutil
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
import ranks
import torch
from checkpoint_cases import assert_same_bits
from close import assert_close
from launched import SHORT, TINY, hashes, rows, torchrun, write_text
from zero_cases import whole

import fzero
from fzero import checkpoint, local_batch
from fzero.checkpoint import code_lines, encode_moments, restore_tree
from fzero.checkpoint.restore_tree import coded_leaves
from fzero.cli import main
from fzero.core import digest, pytree
from fzero.offload import DiskTensor
from fzero.run import build, config_table
from fzero.sharding import Spec, digests, fake_mesh, slices

SIZES = {"vocab_size": 64, "max_len": 16, "d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 32}
EVERYTHING = "params=nvme,opt=nvme"
KINDS = {
    "1": ({}, 0, ""),
    "dp2 stage 1": ({"dp": 2}, 1, ""),
    "dp4 stage 3": ({"dp": 4}, 3, ""),
    "dp2 tp2": ({"dp": 2, "tp": 2}, 3, ""),
    "dp2 nvme": ({"dp": 2}, 3, EVERYTHING),
}
STEPS = 3


def config_of(mesh, stage, offload, policy="fp32", **changes):
    return config_table.from_table(
        {
            "preset": "llama-tiny",
            "model": SIZES,
            "data": {"seq_len": 8},
            "mesh": mesh,
            "zero": stage,
            "reduce": "canonical",
            "offload": offload,
            "train": {"batch": 8, "micro_batch": 2, "compiled": False, "ema_decay": 0.5, "steps": 20},
            "precision": {"policy": policy, "fp32_matmul": "default"},
            "optim": {"name": "adamw"},
            **changes,
        }
    )


def batch_at(step):
    tokens = torch.randint(0, SIZES["vocab_size"], (8, 9), generator=torch.Generator().manual_seed(step))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def in_memory(tree):
    return pytree.map(lambda leaf: leaf.tensor() if isinstance(leaf, DiskTensor) else leaf, tree)


def trained(made, state, steps=STEPS):
    """(the state after so many steps more, their losses)."""
    losses = []
    for _ in range(steps):
        state, metrics = made.train_step(
            state, local_batch(batch_at(int(state.step)), made.mesh, build.local_micro_batches(made.config, made.mesh))
        )
        losses.append(float(metrics.loss))
    return state, losses


def run_source(mesh, kind, home):
    """Train, save, train on: what was saved, and what comes of it without a resume."""
    with tempfile.TemporaryDirectory(dir=home) as folder:
        where = Path(home, "nvme", kind) if mesh.size > 1 else Path(folder)
        made = build.build(config_of(*KINDS[kind]), mesh, where)
        specs = build.specs_of(made)
        state, first = trained(made, build.first_state(made))
        checkpoint.save(Path(home, kind), state, step=STEPS, specs=specs, mesh=mesh, config={"kind": kind})
        saved = digests(state, specs, mesh)
        state, second = trained(made, state)
        out = (saved, [first, second], digests(state, specs, mesh), whole(in_memory(state.params), specs.params, mesh))
        if made.nvme is not None:
            made.nvme.close()
        return out if mesh.rank == 0 else out[:3]


def run_resumed(mesh, kind, home, sources):
    """{source: (digests of what was restored, losses, digests after them, parameters)} of this mesh's run from each
    source's checkpoint."""
    out = {}
    for source in sources:
        made = build.build(config_of(*KINDS[kind]), mesh, Path(home, "nvme", f"{source} on {kind}"))
        specs = build.specs_of(made)
        state = build.restore(made, checkpoint.step_folder(Path(home, source), STEPS))
        restored = digests(state, specs, mesh)
        state, losses = trained(made, state)
        after, params = digests(state, specs, mesh), whole(in_memory(state.params), specs.params, mesh)
        out[source] = (restored, losses, after, params if mesh.rank == 0 else None)
        if made.nvme is not None:
            made.nvme.close()
    return out


def on(kind, fn, *args):
    """What each rank of a kind of run returned."""
    sizes = KINDS[kind][0]
    n = 1
    for size in sizes.values():
        n *= size
    return [fn(fzero.one_process(), kind, *args)] if n == 1 else ranks.run(n, fn, kind, *args, mesh=sizes)


class Matrix:
    """Runs of each kind, and runs that resume from their checkpoints, each made when it is first asked for."""

    def __init__(self, home):
        self.home, self.sources, self.targets = home, {}, {}

    def source(self, kind):
        """What run_source returned."""
        if kind not in self.sources:
            by_rank = on(kind, run_source, self.home)
            assert all(other[:3] == by_rank[0][:3] for other in by_rank)
            self.sources[kind] = by_rank[0]
        return self.sources[kind]

    def resumed(self, source, kind):
        """What run_resumed returned of this source."""
        self.source(source)
        if (source, kind) not in self.targets:
            by_rank = on(kind, run_resumed, self.home, [source])
            assert all(other[source][:3] == by_rank[0][source][:3] for other in by_rank)
            self.targets[source, kind] = by_rank[0][source]
        return self.targets[source, kind]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    return Matrix(str(tmp_path_factory.mktemp("matrix")))


# Each kind is saved or resumed every time.
OFTEN = list(zip(KINDS, [*list(KINDS)[1:], next(iter(KINDS))]))
SOME = [*OFTEN, *((b, a) for a, b in OFTEN), *((kind, kind) for kind in KINDS)]
PAIRS = [
    pytest.param(
        *pair, marks=[pytest.mark.exhaustive] if pair not in SOME else [pytest.mark.slow] * (pair not in OFTEN[::2])
    )
    for pair in itertools.product(KINDS, KINDS)
]
EXACT = [kind for kind in KINDS if "tp" not in kind]


@pytest.mark.parametrize("source, target", PAIRS)
def test_what_is_restored_is_what_was_saved(matrix, source, target):
    saved = matrix.source(source)[0]
    said = checkpoint.read_manifest(checkpoint.step_folder(Path(matrix.home, source), STEPS))
    assert {name: int(leaf["digest"], 16) for name, leaf in said["leaves"].items()} == saved
    assert said["mesh"] == KINDS[source][0] and said["config"] == {"kind": source}
    assert matrix.resumed(source, target)[0] == saved


@pytest.mark.parametrize("source, target", PAIRS)
def test_a_resumed_run_goes_on_as_if_nothing_had_been(matrix, source, target):
    _, losses, after, params = matrix.resumed(source, target)
    if source == target or (source in EXACT and target in EXACT):
        reference = matrix.source(source if source == target else "1")
        assert losses == reference[1][1] and after == reference[2]
    else:
        # Tensor parallelism adds up in another order: after ten steps in float32 the losses are 1.2e-7 apart, the
        # parameters 6e-8.
        assert losses == pytest.approx(matrix.source("1")[1][1], rel=LOSS)
        assert_close(params, matrix.source("1")[3], rtol=0.0, atol=PARAMS)
    # Whatever saved it: all meshes without tensor parallelism go on with the same bits.
    if target in EXACT:
        assert (losses, after) == matrix.resumed(source, "1")[1:3]


LOSS, PARAMS = 1e-6, 5e-7


# ---- moments in codes ----

LARGER = {"model": {**SIZES, "d_model": 64, "d_ff": 128}}


def save_in_codes(mesh, sizes, stage, folder):
    """Train, and save the moments in codes: (the whole state, its bytes there)."""
    made = build.build(config_of(sizes, stage, "", **LARGER), mesh)
    specs = build.specs_of(made)
    state, _ = trained(made, build.first_state(made), 2)
    held, laid = encode_moments(state, specs, mesh)
    path = checkpoint.save(folder, held, step=2, specs=laid, mesh=mesh)
    return whole(state, specs, mesh), path, code_lines(path)


def read_in_codes(mesh, sizes, stage, path):
    """(the whole state that is read on another mesh, the loss of a step from it)."""
    made = build.build(config_of(sizes, stage, "", **LARGER), mesh)
    state = build.restore(made, path)
    found = pytree.map(torch.clone, whole(state, build.specs_of(made), mesh))
    return found, trained(made, state, 1)[1]


@pytest.mark.parametrize(
    "before, after",
    [
        (({"dp": 2, "tp": 2}, 3), ({"dp": 2}, 1)),
        pytest.param(({"dp": 2}, 1), ({"dp": 2, "tp": 2}, 3), marks=pytest.mark.exhaustive),
    ],
)
def test_moments_in_codes_are_read_on_every_mesh(tmp_path, before, after):
    """What is read is within a 16th of what was written, or 16 octaves below the largest of its block; a second moment
    stays above 0; and everything else is what was written."""
    saved, path, lines = ranks.run(4 if "tp" in before[0] else 2, save_in_codes, *before, tmp_path, mesh=before[0])[0]
    results = ranks.run(4 if "tp" in after[0] else 2, read_in_codes, *after, path, mesh=after[0])
    found, losses = results[0]
    alone, _ = read_in_codes(fzero.one_process(), {}, 0, path)
    assert_same_bits(found, alone)
    assert_close(torch.tensor(losses), torch.tensor(trained_one(saved)), rtol=1e-2)
    there = checkpoint.open_checkpoint(path).leaves
    coded = coded_leaves(there)
    assert len(coded) == 18 and f"{len(coded)} leaves of moments are in 8-bit codes" in lines[0]
    assert set(coded.values()) == {"m", "v"} and all(f"/{kind}/" in name for name, kind in coded.items())
    assert all("average" not in name for name in coded)
    for name, was in pytree.named_leaves(saved).items():
        now = pytree.named_leaves(found)[name]
        if name not in coded:
            assert torch.equal(now, was), name
            continue
        few = was.abs().amax(-1, keepdim=True) * (2.0**-15.8 if coded[name] == "m" else 0.0)
        assert bool(((now - was).abs() <= torch.maximum(was.abs() / 15.9, few)).all()), name
        assert not torch.equal(now, was) and there[name].dtype == torch.uint8
        assert coded[name] == "m" or bool(((now > 0) == (was > 0)).all())
    with pytest.raises(ValueError, match=r"are in 8-bit codes .train.compress."):
        checkpoint.restore(path, found)


def trained_one(state):
    """The loss of a step of one process from a whole state."""
    made = build.build(config_of({}, 0, "", **LARGER), fzero.one_process())
    return trained(made, pytree.map(torch.clone, state), 1)[1]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"optim": {"name": "adamw", "states": "8bit"}}, "optim.states 8bit: they are small already; use none or zstd"),
        ({"optim": {"name": "adafactor"}}, "optim.name adafactor, whose state is small already; use none or zstd"),
        ({"optim": {"name": "onebit_adam"}}, "for which a momentum of 0 is one without a scale; use none or zstd"),
        ({"offload": "opt=nvme"}, "offload opt=nvme: what rests on a disk is written as it is; use none or zstd"),
    ],
)
def test_moments_that_are_not_written_in_codes_are_one_line(changes, words):
    table = {"preset": "llama-tiny", "train": {"compress": "8bit"}, **changes}
    with pytest.raises(ValueError, match=words) as found:
        config_table.from_table(table)
    assert "\n" not in str(found.value)


def test_canonical_runs_of_all_data_meshes_are_one_run(matrix):
    sources = {kind: matrix.source(kind) for kind in KINDS}
    assert len({str(sources[kind][1:3]) for kind in EXACT}) == 1 and sources["dp2 tp2"][2] != sources["1"][2]
    assert sources["1"][1][0] != sources["1"][1][1]


# ---- what is read ----

WIDE = {"w": ((4, 1024, 2048), "[L, D/dp, F/tp]"), "v": ((8192, 1024), "[V/tp+dp, D]"), "h": ((16, 256), "[A, B]")}


def wide(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, (shape, _) in WIDE.items()}


def save_wide(mesh, home, specs):
    state = {name: leaf[slice_of(leaf.shape, specs[name], mesh)].clone() for name, leaf in wide().items()}
    checkpoint.save(home, state, step=mesh.size, specs=specs, mesh=mesh)


def slice_of(shape, spec, mesh):
    return tuple(slice(at, at + n) for at, n in zip(*slices.local_slice(tuple(shape), spec, mesh)))


@pytest.fixture(scope="module")
def wide_home(tmp_path_factory):
    home, specs = str(tmp_path_factory.mktemp("wide")), {name: Spec.parse(text) for name, (_, text) in WIDE.items()}
    ranks.run(4, save_wide, home, specs, mesh={"dp": 4})
    ranks.run(2, save_wide, home, specs, mesh={"tp": 2})
    checkpoint.save(home, wide(), step=1, specs=specs)
    return Path(home), specs


@pytest.mark.each_value
@pytest.mark.parametrize("saved", [1, 2, 4])
@pytest.mark.parametrize("sizes", [{}, {"dp": 4}, {"tp": 2}, {"dp": 2, "tp": 2}, {"dp": 2}], ids=str)
def test_a_rank_reads_its_slices_and_nothing_else(wide_home, monkeypatch, saved, sizes):
    home, specs = wide_home
    path, state, held = checkpoint.step_folder(home, saved), wide(), []
    assert checkpoint.verify(path) == []
    monkeypatch.setattr(
        restore_tree, "open_checkpoint", lambda path: held.append(checkpoint.open_checkpoint(path)) or held[-1]
    )
    world = 1
    for size in sizes.values():
        world *= size
    for rank in range(world):
        mesh = fake_mesh(sizes, rank)
        expected = {name: leaf[slice_of(leaf.shape, specs[name], mesh)] for name, leaf in state.items()}
        found = checkpoint.restore(path, expected, specs=specs, mesh=mesh)
        assert_same_bits(found, expected)
        needed = sum(leaf.nbytes for leaf in expected.values())
        # Chunks of half a megabyte with a page each for what is behind them, and the indices of the parts.
        assert 1 <= held[-1].read_bytes / needed < 1.012, (saved, sizes, rank)


def test_every_mesh_writes_the_same_elements_under_the_same_digest(wide_home):
    home, _ = wide_home
    said = [checkpoint.read_manifest(checkpoint.step_folder(home, saved))["leaves"] for saved in (1, 2, 4)]
    for name, leaf in wide().items():
        assert {one[name]["digest"] for one in said} == {f"{digest.digest(leaf):016x}"}
    assert said[2]["w"]["grid"] == [1, 4, 1] and said[1]["w"]["grid"] == [1, 1, 2]


def write_alike(mesh, home):
    """A replicated state: who writes what; and an error where no specs are given."""
    state = {"large": torch.arange(1 << 20).float(), "one": torch.ones(3), "two": torch.ones(5)}
    with pytest.raises(ValueError, match=r"a state on several processes needs specs="):
        checkpoint.save(home, state, step=1, mesh=mesh)
    saving = checkpoint.Writer(home, mesh, keep_last=1)
    with closing(saving):
        for step in range(3):
            saving.save(state, step=step, specs=pytree.map(lambda _: Spec(), state))
            done = saving.wait()
            assert checkpoint.steps(home) == [step] and done.path == checkpoint.step_folder(home, step)
    return done.nbytes


def test_replicas_divide_the_work(tmp_path):
    sizes = ranks.run(2, write_alike, str(tmp_path))
    assert sum(sizes) == (1 << 22) + 4 * 8 and max(sizes) < (1 << 21) + 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002"]
    assert checkpoint.verify(checkpoint.latest(tmp_path)) == []


def fail_on_one(mesh, home):
    """Rank 1 cannot write; then it can."""
    state, specs = {"a": torch.full((4,), float(mesh.rank))}, {"a": Spec(("dp",))}
    said = []
    with closing(checkpoint.Writer(home, mesh)) as saving, pytest.MonkeyPatch.context() as patch:
        saving.save(state, step=1, specs=specs)
        saving.wait()
        if mesh.rank == 1:
            patch.setattr(checkpoint.save_state.TileFile, "write", full)
        for ask in ("poll", "wait"):
            saving.save(state, step=2, specs=specs)
            try:
                while ask == "poll" and saving.poll() is None:
                    pass
                saving.wait()
            except checkpoint.SaveFailed as error:
                said.append(str(error))
        patch.undo()
        saving.save(state, step=3, specs=specs)
        return said, saving.wait().step


def full(*_):
    raise OSError(28, "No space left on device")


def test_a_rank_that_cannot_write_fails_the_save_of_all(tmp_path):
    line = f"{tmp_path}/step-00000002: the checkpoint could not be written: rank 1: No space left on device"
    assert ranks.run(2, fail_on_one, str(tmp_path)) == [([line, line], 3)] * 2
    assert checkpoint.steps(tmp_path) == [1, 3] and sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000003",
    ]
    assert torch.equal(
        checkpoint.restore_leaves(checkpoint.latest(tmp_path), lambda name: True)["a"],
        torch.arange(2.0).repeat_interleave(4),
    )


# ---- other policies, other memory ----


def saved_as(tmp_path, policy):
    """(the state after some steps of a policy on one process, the path of its checkpoint)."""
    made = build.build(config_of({}, 0, "", policy), fzero.one_process(), tmp_path)
    state, _ = trained(made, build.first_state(made), 2)
    return state, checkpoint.save(tmp_path / policy, state, step=2)


def restored_as(tmp_path, policy, path, offload=""):
    made = build.build(config_of({}, 0, offload, policy), fzero.one_process(), tmp_path / f"{policy} {offload}")
    return made, build.restore(made, path)


@pytest.mark.parametrize(
    "before, after, offload",
    [
        ("fp32", "bf16", ""),
        pytest.param("fp32", "bf16", EVERYTHING, marks=pytest.mark.slow),
        pytest.param("bf16", "fp32", "", marks=pytest.mark.slow),
        ("bf16", "fp32", "opt=nvme:0.5,params=host"),
        ("bf16", "bf16", "opt=host"),
        pytest.param("bf16", "bf16", EVERYTHING, marks=pytest.mark.slow),
        pytest.param("fp32", "fp16", "", marks=pytest.mark.slow),
        ("fp16", "fp16", EVERYTHING),
        ("fp16", "bf16", ""),
    ],
)
def test_another_policy_and_other_memory(tmp_path, before, after, offload):
    old, path = saved_as(tmp_path, before)
    made, new = restored_as(tmp_path, after, path, offload)
    found, wide = in_memory(new), old.master if old.master != () else old.params
    assert_same_bits(found.params, pytree.map(lambda x: x.to(made.policy.param), wide))
    assert (found.master != ()) == made.policy.has_master
    if made.policy.has_master:
        assert_same_bits(found.master, wide)
    assert_same_bits(found.extra, old.extra)
    assert_same_bits(found.opt_state, old.opt_state)
    assert [int(x) for x in (found.step, found.data_cursor)] == [2, 16] and torch.equal(found.key, old.key)
    fresh = build.first_state(build.build(config_of({}, 0, "", after), fzero.one_process(), tmp_path)).scaler
    assert (found.scaler != ()) == (after == "fp16")
    if after == "fp16":
        assert_same_bits(found.scaler, old.scaler if after == before else fresh)
    state, losses = trained(made, new, 1)
    assert int(state.step) == 3 and all(torch.isfinite(torch.tensor(losses)))
    if made.nvme is not None:
        made.nvme.close()


def test_another_model_is_refused_with_the_leaf_named(tmp_path):
    _, path = saved_as(tmp_path, "fp32")
    other = config_of({}, 0, "", "fp32", model={**SIZES, "d_ff": 48})
    made = build.build(other, fzero.one_process(), tmp_path)
    with pytest.raises(
        ValueError, match=r"params/blocks/mlp/\S+ has shape \[2, \d+, \d+\] there and \[2, \d+, \d+\] in this run"
    ):
        build.restore(made, path)
    made = build.build(config_of({}, 0, "", "fp32", optim={"name": "lion"}), fzero.one_process(), tmp_path)
    with pytest.raises(ValueError, match=r"the checkpoint's leaves are not those of the run; .*extra: opt_state"):
        build.restore(made, path)


# ---- the store of another mesh ----

CANONICAL = ("--reduce", "canonical", "--set", "optim.name=adamw", "--prompt", "")


def fz(*args):
    with pytest.raises(SystemExit) as end:
        main.main([str(arg) for arg in args])
    return end.value.code


@pytest.mark.exhaustive
def test_a_run_on_the_disk_of_two_ranks_goes_on_on_one(tmp_path, monkeypatch, capsys):
    """Its store becomes a checkpoint first; from that the run goes on in memory, or on the disk in another layout."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    torchrun(
        tmp_path, 2, *TINY, *SHORT, *CANONICAL, "--zero", 3, "--offload", EVERYTHING, "--out", "disk", "--stop-at", 3
    )
    assert not Path("disk/checkpoints").exists() and Path("disk/nvme").is_dir()
    shutil.copytree("disk", "memory")
    assert fz("pretrain", *TINY, *SHORT, *CANONICAL, "--out", "whole") == 0
    for run, offload in (("memory", ""), ("disk", EVERYTHING)):
        capsys.readouterr()
        code = fz(
            "pretrain", "--out", run, "--resume", "--zero", 0, "--offload", offload, "--peak-tflops", 1, "--prompt", ""
        )
        said = capsys.readouterr()
        assert code == 0, said.err
        assert f"step 3 on the disk was another plan's: it is {run}/checkpoints/step-00000003 now" in said.out
        assert f"resuming {run} at step 3 of 6" in said.out
        expected = [{n: value for n, value in row.items() if not n.startswith("disk_")} for row in rows(Path("whole"))]
        assert [
            {n: value for n, value in row.items() if not n.startswith("disk_")} for row in rows(Path(run))
        ] == expected
        assert checkpoint.verify(f"{run}/checkpoints/step-00000003") == []
    assert json.loads(Path("memory/nvme/step.json").read_text())["done"]  # nobody goes on with it
    assert hashes(Path("memory")) == hashes(Path("whole"))


@pytest.mark.slow
def test_a_store_that_holds_a_part_of_the_state_is_no_checkpoint(tmp_path, monkeypatch, capsys):
    """A run that ended before its first checkpoint begins anew; and one that is complete on the disk keeps its master
    weights."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    again = ("--resume", "--peak-tflops", 1, "--prompt", "", "--stop-at", 4)
    assert (
        fz(
            "pretrain",
            *TINY,
            *SHORT,
            *CANONICAL,
            "--offload",
            "params=nvme,opt=nvme:0.5",
            "--out",
            "part",
            "--stop-at",
            3,
        )
        == 0
    )
    shutil.rmtree("part/checkpoints")
    capsys.readouterr()
    assert fz("pretrain", "--out", "part", *again) == 0
    said = capsys.readouterr().out
    assert "resuming part at step 0" in said and "passed over" not in said
    narrow = ("--precision", "bf16", "--offload", EVERYTHING, "--out", "narrow", "--stop-at", 3)
    assert fz("pretrain", *TINY, *SHORT, *CANONICAL, *narrow) == 0
    assert fz("pretrain", "--out", "narrow", *again, "--precision", "fp32", "--offload", "") == 0
    before, after = (checkpoint.open_checkpoint(f"narrow/checkpoints/step-0000000{step}") for step in (3, 4))
    name = "blocks/attn/w_q"
    assert before.leaves[f"master/{name}"].dtype == after.leaves[f"params/{name}"].dtype == torch.float32
    assert not any(leaf.startswith("master/") for leaf in after.leaves)
    # One step of AdamW away from the master weights, and not rounded to bfloat16 on the way.
    distance = (before.read(f"master/{name}") - after.read(f"params/{name}")).abs().max()
    rounded = (before.read(f"params/{name}").float() - before.read(f"master/{name}")).abs().max()
    assert (
        rounded > 0
        and distance < 0.01
        and not torch.equal(after.read(f"params/{name}").bfloat16().float(), after.read(f"params/{name}"))
    )
    for held in (before, after):
        held.close()
