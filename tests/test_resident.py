"""Parameters that stay whole between micro-batches: gathers as the schedule says, the same bits, memory as said."""

import math
import weakref
from unittest import mock

import pytest
import ranks
from close import assert_same
from launched import SHORT, TINY
from test_offload import Case, check, each, folder  # noqa: F401  (a fixture)
from zero_cases import FP64, OPTIMIZERS, batch_for, model_of

import fzero
from fzero import local_batch
from fzero.comm import Ledger
from fzero.core import pytree
from fzero.sharding import Pipeline, pipeline

LAYERS, M = 4, 4
PIPELINES = {
    "1f1b": Pipeline(),
    "interleaved": Pipeline("interleaved", chunks=2),
    "zb-v": Pipeline("zb-v", chunks=2),
}


def trained(mesh, name, resident, remat):
    """(state, losses, gathers of layers in a step, those that the schedule has, most bytes of fetched leaves, bytes of
    a rank's stages) of two steps."""
    model, tx = model_of("gemma"), OPTIMIZERS["clipped adam"]
    options = {"pipeline": PIPELINES[name]} if name in PIPELINES else {}
    plan = fzero.zero_plan(3, model, mesh, policy=FP64, **options)
    how = fzero.Execution(remat=remat, resident=resident, prefetch=0)
    step = fzero.make_train_step(model, tx, plan, micro_batches=M, execution=how)
    state, losses = fzero.init_state(model, tx, plan, seed=3), []
    alive, most = [], [0]

    def holds(self, component, tensors):
        if component == "gathered":
            alive[:] = [one for one in alive if one() is not None] + [weakref.ref(x) for x in tensors]
        most[0] = max(most[0], sum(x.nbytes for one in alive if (x := one()) is not None))

    with mock.patch.object(Ledger, "holds", holds):
        for i in range(2):
            mesh.ledger.clear()
            state, metrics = step(state, local_batch(batch_for(i, M * mesh.data_size), mesh, M))
            losses.append(float(metrics.loss))
    assert not any(one() is not None for one in alive)  # nothing stays behind a step
    rows = [row for row in mesh.ledger.rows() if row.collective == "all_gather" and row.leaf.startswith("blocks/")]
    layers, expected = LAYERS, 1 if resident else 2 * M
    if plan.stages is not None:
        layers //= len(plan.stages.ranks)
        expected = pipeline.count_gathers(pipeline.with_gathers(plan.schedule(M)[0], resident))[mesh["pp"].rank]
    sizes = {name: 8 * math.prod(leaf.shape) for name, leaf in plan.leaves.items()}
    stages = sum(size for name, size in sizes.items() if name.startswith("blocks/")) // mesh["pp"].size
    of = plan.stages.ranks if plan.stages is not None else (0,)
    first, last = mesh["pp"].rank == of[0], mesh["pp"].rank == of[-1]
    stages += sizes["embed/tokens"] * (first + last) + sizes["head/norm/scale"] * last
    return pytree.named_leaves(state), losses, sum(row.calls for row in rows), layers * expected, most[0], stages


def every(mesh, cases):
    return [[trained(mesh, name, room, remat) for room in rooms] for name, rooms, remat in cases]


@pytest.mark.parametrize(
    "sizes, cases",
    (
        ({"dp": 2}, [("one stage", (0, 1), "none"), ("one stage", (0, 1), "full")]),
        pytest.param(
            {"pp": 2, "dp": 2},
            [
                ("1f1b", (0, 1), "full"),
                ("interleaved", (0, 1, 2), "none"),
                ("interleaved", (0, 1), "full"),
                ("zb-v", (0, 1, 2), "none"),
            ],
            marks=pytest.mark.exhaustive,
        ),
    ),
    ids=("dp2", "pp2 x dp2"),
)
def test_gathers_are_those_of_the_schedule_and_bits_are_the_same(sizes, cases):
    """All stages whole: each is gathered once a step, and a rank has the bytes of its stages and no more."""
    for rank in ranks.run(math.prod(sizes.values()), every, cases, mesh=sizes, timeout_s=600):
        for case, found in zip(cases, rank):
            for room, (state, losses, counted, expected, most, stages) in zip(case[1], found):
                assert counted == expected, (case, room, counted, expected)
                assert_same(state, found[0][0])
                assert losses == found[0][1]
                chunks = 2 if case[0] in ("interleaved", "zb-v") else 1
                assert most == stages if room == chunks else most <= stages, (case, room, most, stages)


# ---- with offload, float8 and compiled blocks ------------------------------------------------------------------------

PARAMS = Case("params=nvme,opt=nvme", 0, (), "fp32", micro=3, steps=3, model="tied and deep", resident=1)
PP2, DP2, TURNS = (("pp", 2),), (("dp", 2),), Pipeline("interleaved", chunks=2)


@each(
    [
        PARAMS,
        *(
            pytest.param(case, marks=pytest.mark.exhaustive)
            for case in (
                PARAMS._replace(stage=3, mesh=DP2, policy="bf16"),
                PARAMS._replace(offload="params=host,opt=host", stage=3, mesh=DP2),
                PARAMS._replace(mesh=PP2, micro=4, pipeline=TURNS),
                PARAMS._replace(mesh=PP2, micro=4, pipeline=TURNS, resident=2, stage=3, remat="full"),
                PARAMS._replace(mesh=PP2, micro=4, pipeline=Pipeline("zb-v", chunks=2), policy="bf16"),
            )
        ),
    ]
)
def test_parameters_from_elsewhere_stay_with_the_same_bits(case, folder):  # noqa: F811
    check(case, folder)


def in_float8(mesh, name, resident, compiled):
    """(state, losses) of two steps whose layers are gathered as float8 numbers, compiled or not."""
    model, tx = model_of("llama", n_layers=LAYERS), OPTIMIZERS["clipped adam"]
    options = {"pipeline": PIPELINES[name]} if name in PIPELINES else {}
    plan = fzero.zero_plan(3, model, mesh, policy="bf16_float8_gather", **options)
    how = fzero.Execution(compiled=compiled, resident=resident)
    step = fzero.make_train_step(model, tx, plan, micro_batches=M, execution=how)
    state, losses = fzero.init_state(model, tx, plan, seed=3), []
    for i in range(2):
        state, metrics = step(state, local_batch(batch_for(i, M * mesh.data_size), mesh, M))
        losses.append(float(metrics.loss))
    return pytree.named_leaves(state), losses


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("sizes, name", (({"dp": 2}, "one stage"), ({"pp": 2, "dp": 2}, "interleaved")))
def test_float8_and_compiled_blocks_have_the_same_bits(sizes, name, compiled):
    runs = [
        ranks.run(math.prod(sizes.values()), in_float8, name, room, compiled, mesh=sizes, timeout_s=900)
        for room in (0, 1)
    ]
    for (expected, losses), (found, other) in zip(*runs):
        assert losses == other
        assert_same(found, expected)


def test_the_command_takes_it_and_refuses_where_nothing_is_fetched(fz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = fz("pretrain", *TINY, *SHORT, "--resident", 1, "--out", "new")
    assert code == 2 and "resident is 1, and stage 0 gathers no parameters" in err and err.count("\n") == 1
    assert not (tmp_path / "new").exists()
    code, _, err = fz("plan", "--model", "llama-tiny", "--mesh", "dp=2", "--resident", 1)
    assert code == 2 and "resident is 1, and stage 0 gathers no parameters" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "stage, how, update, words",
    (
        (0, {"resident": 1}, "end", "resident is 1, and no parameters are fetched layer by layer here; use stage 3"),
        (3, {"resident": 1}, "speculate", 'resident is 1 and update="speculate" writes to parameters while'),
        (3, {"resident": 1, "reshard": False}, "end", "resident is 1 and reshard is False.*leave one out"),
        (3, {"resident": -1}, "end", "resident is -1"),
    ),
)
def test_what_does_not_go_together_is_refused(stage, how, update, words):
    model = model_of("gemma")
    plan = fzero.zero_plan(stage, model, fzero.one_process())
    with pytest.raises(ValueError, match=words):
        fzero.make_train_step(model, OPTIMIZERS["sgd"], plan, execution=fzero.Execution(update=update, **how))
