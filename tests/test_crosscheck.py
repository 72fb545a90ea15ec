"""Silent corruption: what is compared between ranks, what of sound ranks is equal, and who is named where something is
not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch
from close import assert_same

import fzero
from fzero import checkpoint, local_batch, models, optim
from fzero.core import precision, pytree
from fzero.run import run_folder
from fzero.sharding import Spec, fake_mesh
from fzero.train import sdc_check

SIZES = {"vocab_size": 64, "max_len": 8, "d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "d_ff": 32}
MODEL = models.gpt2(models.GPT2Config(**{k: v for k, v in SIZES.items() if k != "n_kv_heads"}, dropout=0.2, tied=True))
ROWS = 8


def batch_at(i):
    tokens = torch.randint(0, 64, (ROWS, 9), generator=torch.Generator().manual_seed(i))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def part_of(batch, parts):
    return lambda m: pytree.map(lambda leaf: leaf[m * (ROWS // parts) : (m + 1) * (ROWS // parts)], batch)


def made(mesh, *, stage=0, policy="bf16", sequence=False, reduce="fast", plant=None):
    """(state after two steps, the check); `plant` does something to the state behind the first step."""
    policy = precision.POLICIES[policy]()
    plan = fzero.zero_plan(stage, MODEL, mesh, sequence=sequence, reduce=reduce, policy=policy)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    state = fzero.init_state(MODEL, tx, plan, seed=0)
    step = fzero.make_train_step(MODEL, tx, plan, skip=fzero.Skip(spike=fzero.train.spike.Spike()))
    check = sdc_check.make_check(MODEL, tx, plan)
    for i in range(2):
        state, _ = step(state, local_batch(batch_at(i), mesh))
        if plant is not None and i == 0:
            plant(state, mesh)
    return state, check


def flip(leaf, bit=0):
    """Flip the lowest bit of the first number of a leaf."""
    words = leaf.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[leaf.element_size()])
    words[0] ^= 1 << bit


def sound(mesh, cases):
    out = []
    for case in cases:
        state, check = made(mesh, **case)
        before = pytree.map(lambda leaf: leaf.clone(), state)
        out.append(check(state, part_of(batch_at(1), mesh.data_size)))
        assert_same(state, before)
    return out


CASES = [
    *({"stage": stage, "policy": policy} for stage, policy in ((0, "bf16"), (1, "fp16"), (2, "fp32"), (3, "bf16"))),
    {"stage": 3, "policy": "fp32", "reduce": "canonical"},
]


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"dp": 4}, marks=pytest.mark.slow),
        {"dp": 2, "rp": 2},
        pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "pp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sound_ranks_agree_and_their_state_stays_as_it_is(mesh):
    cases = CASES + ([{"stage": 3, "sequence": True}] if "tp" in mesh else [])
    for found in ranks.run(4, sound, cases, mesh=mesh):
        assert found == [[]] * len(cases)


def test_one_process_agrees_with_itself():
    assert sound(fzero.one_process(), CASES) == [[]] * len(CASES)


def faulty_memory(mesh, rank, leaf, stage):
    def plant(state, mesh):
        if mesh.rank == rank:
            flip(
                next(
                    x
                    for name, x in pytree.named_leaves(state).items()
                    if name.startswith(leaf[0]) and name.endswith(leaf[1])
                ),
                bit=8,  # the lowest one of a moment can be lost when the next step rounds
            )

    state, check = made(mesh, stage=stage, plant=plant)
    return check(state, part_of(batch_at(1), mesh.data_size))


def test_a_bit_that_flips_in_what_is_replicated_names_its_rank():
    # At stage 0 the optimizer's state is on all ranks.
    for lines in ranks.run(4, faulty_memory, 2, ("opt_state", "embed/tokens"), 0):
        assert (
            lines[0].startswith("ranks 0, 1, 2 and 3 should hold the same ")
            and " and rank 2 has another one" in lines[0]
        ), lines
    for lines in ranks.run(4, faulty_memory, 1, ("key", ""), 3):
        assert lines[0] == "ranks 0, 1, 2 and 3 should hold the same key and rank 1 has another one"


def faulty_processor(mesh, rank, stage, layer=1):
    """A rank whose products of one of its layers are off by a bit now and then."""
    state, _ = made(mesh, stage=stage)
    plan = fzero.zero_plan(stage, MODEL, mesh, policy=precision.bf16())
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    put = sdc_check.Digests.reduce_group

    def wrong(self, part, names, grads, **options):
        if mesh.rank == rank and part.layer == layer:
            grads = [grad.clone() for grad in grads]
            flip(grads[names.index("blocks/mlp/w_in")])
        put(self, part, names, grads, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdc_check.Digests, "reduce_group", wrong)
        check = sdc_check.make_check(MODEL, tx, plan)
        return check(state, part_of(batch_at(1), mesh.data_size))


def test_a_processor_that_computes_wrongly_is_named():
    for lines in ranks.run(4, faulty_processor, 2, 3):
        assert lines == [
            (
                "rank 1 and rank 2 compute one micro-batch and differ, first in blocks/mlp/w_in; rank 2 differs "
                "from another one too"
            ),
            (
                "rank 2 and rank 3 compute one micro-batch and differ, first in blocks/mlp/w_in; rank 2 differs "
                "from another one too"
            ),
        ]
    for lines in ranks.run(2, faulty_processor, 1, 2):
        assert (
            lines[0] == "rank 0 and rank 1 compute one micro-batch and differ, first in blocks/mlp/w_in"
            and len(lines) == 2
        )


def test_ranks_of_a_stage_are_compared_with_each_other():
    """With pp: ranks 0 and 1 have the first layer and the tied embedding, 2 and 3 the other layer and the head."""
    mesh = {"dp": 2, "pp": 2}
    for lines in ranks.run(4, faulty_processor, 3, 2, 0, mesh=mesh):
        assert lines == [
            "rank 2 and rank 3 compute one micro-batch and differ, first in blocks/mlp/w_in",
            "rank 3 and rank 2 compute one micro-batch and differ, first in blocks/mlp/w_in",
        ]
    for lines in ranks.run(4, faulty_memory, 1, ("opt_state", "embed/positions"), 0, mesh=mesh):
        assert len(lines) == 1 and lines[0].startswith("ranks 0 and 1 should hold the same "), lines


def test_a_process_that_computes_otherwise_the_second_time():
    mesh, calls = fzero.one_process(), []
    state, check = made(mesh)
    put = sdc_check.Digests.reduce_group

    def wrong(self, part, names, grads, **options):
        calls.append(part)
        if len(calls) == 2:
            flip(grads[0])
        put(self, part, names, grads, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdc_check.Digests, "reduce_group", wrong)
        lines = check(state, part_of(batch_at(1), 1))
    assert len(lines) == 1 and lines[0].startswith(
        "rank 0 computes one micro-batch twice and differs from itself, first in blocks/"
    ), lines


def test_two_layers_that_change_places_are_seen():
    grads = [torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    found = []
    for order in ((0, 1), (1, 0)):
        digests = sdc_check.Digests()
        for layer, i in enumerate(order):
            digests.reduce_group(
                sdc_check.LeafGroup("blocks", ("blocks/w",), layer), ("blocks/w",), [grads[i].clone()], last=True
            )
        found.append(digests.digests["blocks/w"])
    assert found[0] != found[1]


# -- who is to blame, in words


def test_the_fewer_are_to_blame():
    mesh = fake_mesh({"dp": 2, "tp": 2})  # ranks 0 and 2 have one part of a leaf that tp shards, 1 and 3 the other
    specs = {"w": Spec(("tp",)), "b": Spec()}
    assert sdc_check.replicas(specs["w"], mesh) == [[0, 2], [1, 3]] and sdc_check.replicas(specs["b"], mesh) == [
        [0, 1, 2, 3]
    ]
    assert [sdc_check.copies(specs[name], mesh) for name in "wb"] == [2, 4]
    same = [[5, 7], [6, 7], [5, 7], [6, 7]]
    assert sdc_check.unlike(["w", "b"], specs, same, mesh) == []
    one = [row[:] for row in same]
    one[3][1] = 8
    assert sdc_check.unlike(["w", "b"], specs, one, mesh) == [
        "ranks 0, 1, 2 and 3 should hold the same b and rank 3 has another one"
    ]
    one = [row[:] for row in same]
    one[3][0] = 8
    assert sdc_check.unlike(["w", "b"], specs, one, mesh) == ["ranks 1 and 3 should hold the same w and do not"]
    half = [[5, 1], [6, 1], [5, 2], [6, 2]]
    assert sdc_check.unlike(["w", "b"], specs, half, mesh) == ["ranks 0, 1, 2 and 3 should hold the same b and do not"]


def test_a_rank_that_differs_from_both_neighbours_is_to_blame():
    mesh = fake_mesh({"dp": 3, "rp": 2})
    own = [[rank] for rank in range(6)]
    again = [[(rank - 1) % 6] for rank in range(6)]
    assert sdc_check.disagreeing(["x"], own, again, mesh) == []
    again[4] = [99]
    assert sdc_check.disagreeing(["x"], own, again, mesh) == [
        "rank 3 and rank 4 compute one micro-batch and differ, first in x"
    ]
    own[4] = [98]
    assert [line.rpartition("; ")[2] for line in sdc_check.disagreeing(["x"], own, again, mesh)] == [
        "rank 4 differs from another one too"
    ] * 2


def test_ranks_in_words():
    assert (
        sdc_check.show([3]) == "rank 3"
        and sdc_check.show([0, 1]) == "ranks 0 and 1"
        and sdc_check.show((0, 1, 5)) == "ranks 0, 1 and 5"
    )


# -- in a run


SCRIPT = """
import sys, torch
from fzero.cli.main import main
from fzero.core import pytree
from fzero.run.runner import pretrain
build, (rank, at, what) = pretrain.build, sys.argv[1].split(",")
left = [int(at)]

def planted(*args, **kwargs):
    program = build(*args, **kwargs)

    def step(state, batch):
        state, metrics = program.train_step(state, batch)
        if int(state.step) in left and program.mesh.rank == int(rank):
            left.clear()
            leaves = pytree.named_leaves(state.params).items()
            leaf = next(x for name, x in leaves if name.startswith("blocks/") and "w_" in name).view(-1)
            leaf[3] = float("nan") if what == "nan" else leaf[3] * (1 + 2.0**-20)
        return state, metrics

    return program._replace(train_step=step)

pretrain.build = planted
main(sys.argv[2:])
"""
ARGS = [
    *(
        "pretrain",
        "--model",
        "mlp-tiny",
        "--steps",
        "8",
        "--batch",
        "4",
        "--micro-batch",
        "1",
        "--seq-len",
        "16",
        "--precision",
        "fp32",
    ),
    *(
        "--peak-tflops",
        "1",
        "--data",
        "text.txt",
        "--prompt",
        "",
        "--set",
        "train.compiled=false",
        "--set",
        "train.eval_every=0",
    ),
    *("--set", "train.checkpoint_every=3", "--set", "precision.fp32_matmul=default"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("guard")
    path.joinpath("text.txt").write_text("\n".join(f"line {i}: {i * i} is the square of {i}" for i in range(300)))
    path.joinpath("run.py").write_text(SCRIPT)
    return path


def torchrun(folder, n, plant, *args):
    """(exit code, stdout, the lines of fzero on stderr) of a run on n processes."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(n),
        "run.py",
        plant,
    ]
    paths = os.pathsep.join([str(Path(fzero.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*launcher, *ARGS, *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )
    return done.returncode, done.stdout, [line for line in done.stderr.splitlines() if line.startswith("fzero: ")]


def leaves(run):
    return checkpoint.restore_leaves(checkpoint.latest(run / "checkpoints"), lambda name: True)


NOTHING = "0,-1,nan"


@pytest.mark.exhaustive
def test_a_rank_that_produces_nan_leaves_no_trace(folder):
    """Rank 1's shard of a matrix has a NaN from the end of step 6 on: the checkpoint of that step too."""
    args = ("--zero", "3", "--set", "guard.nonfinite=rollback")
    code, out, said = torchrun(folder, 2, NOTHING, *args, "--out", "plain", "--set", "guard.check_every=2")
    assert code == 0 and not said, said
    code, out, said = torchrun(folder, 2, "1,6,nan", *args, "--out", "nan")
    assert code == 0 and not said, said
    assert out.count("passed over nan/checkpoints/step-00000006: a value in it is not finite") == 1
    assert out.count("step 7: the gradient is not finite; back to step 3, to try the batch of sample 24 again") == 1
    assert out.count("step 7: went well when it was tried again") == 1
    assert_same(leaves(folder / "nan"), leaves(folder / "plain"))
    losses = [[row["loss"] for row in run_folder.read_metrics(folder / run)] for run in ("nan", "plain")]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    assert json.loads((folder / "nan" / "skips.json").read_text())["skips"] == []


@pytest.mark.exhaustive
def test_a_memory_that_changes_ends_the_run_before_it_is_saved(folder):
    args = ("--zero", "0", "--set", "guard.check_every=100", "--out", "flip")
    code, _, said = torchrun(folder, 2, "1,4,bit", *args)
    assert code != 0 and len(said) == 1, said
    assert (
        "step 6: ranks 0 and 1 should hold the same " in said[0]
        and "start it again without that host: --resume goes on from" in said[0]
    )
    assert checkpoint.steps(folder / "flip" / "checkpoints") == [3]
