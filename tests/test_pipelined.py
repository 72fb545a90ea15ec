"""Steps on a mesh with pp: equal to one process whatever the schedule, the layout of layers, the stage and the mesh."""

import itertools
import math
import os
import time
from unittest import mock

import pytest
import ranks
import torch
from close import assert_close, assert_same
from pipeline_steps import equals_one_process, options_of
from zero_cases import FP64, OPTIMIZERS, batch_for, model_of, train, whole

import fzero
from fzero import checkpoint, local_batch, make_eval_step, state_specs
from fzero.comm import Receiver
from fzero.core import pytree, vjp_pair
from fzero.run.measure import norms
from fzero.sharding import FAMILIES, Pipeline, digests, zero_plan

# A table of one's own: down the ranks and up again, so that embedding and head are on rank 0.
V = """name vee
layers 0 1 2 3
rank 0: 0F0 0F1 0F2 3F0 3B0 3F1 3I1 3W1 3F2 3B2 0B0 0B1 0B2
rank 1: 1F0 2F0 1F1 2F1 1F2 2F2 2B0 1B0 2B1 1B1 2B2 1B2
"""
PIPELINES = {
    "gpipe": Pipeline("gpipe"),
    "1f1b": Pipeline(),
    "1f1b uneven": Pipeline(layout="3,1"),
    "interleaved": Pipeline("interleaved", chunks=2),
}
MESHES = {
    "pp2": {"pp": 2},
    "pp2 x dp2": {"pp": 2, "dp": 2},
    "pp2 x rp2": {"pp": 2, "rp": 2},
    "pp2 x tp2": {"pp": 2, "tp": 2},
    "pp4": {"pp": 4},
}


# gpt2 is tied, has dropout and three layers; gemma is tied, with layers that take turns, and has four.
FEW = {
    "pp2": [
        ("gpt2", "sgd", 0, 3, {**options_of(Pipeline(layout="2,1")), "dropout": 0.1}),
        ("gemma", "clipped adam", 3, 4, {**options_of(PIPELINES["interleaved"]), "remat": "full"}),
        ("encoder and decoder", "adam", 2, 2, options_of(PIPELINES["gpipe"])),
        ("deepseek", "adam", 1, 1, options_of(PIPELINES["1f1b"])),
        ("gemma", "adam", 3, 3, options_of(Pipeline(V))),
    ],
    "pp2 x dp2": [
        ("gpt2", "clipped adam", 1, 3, {**options_of(Pipeline(layout="1,2")), "dropout": 0.1}),
        ("gemma", "sgd", 2, 2, options_of(PIPELINES["interleaved"])),
        ("llama", "adam", 3, 2, {**options_of(PIPELINES["1f1b"]), "reshard": False}),
        ("llama", "adam", 0, 2, options_of(PIPELINES["gpipe"], reduce="once")),
    ],
    "pp2 x rp2": [("gpt2", "adam", 3, 2, options_of(PIPELINES["1f1b"]))],
    "pp2 x tp2": [
        ("llama", "sgd", 3, 2, options_of(PIPELINES["1f1b"])),
        ("gpt2", "adam", 1, 2, {**options_of(PIPELINES["gpipe"], sequence=True), "remat": "every:2"}),
    ],
    "pp4": [
        ("gemma", "sgd", 2, 8, options_of(PIPELINES["1f1b"])),
        ("gemma", "adam", 0, 2, options_of(PIPELINES["gpipe"])),
    ],
}
TIERS = {"pp2 x tp2": pytest.mark.slow, "pp4": pytest.mark.exhaustive, "pp2 x rp2": pytest.mark.exhaustive}


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=TIERS.get(m, ())) for m in MESHES])
def test_a_pipeline_equals_one_process(mesh):
    equals_one_process(MESHES[mesh], FEW[mesh])


# ---- canonical sums --------------------------------------------------------------------------------------------------


def canonical_digests(mesh, cases):
    out = []
    for stage, micro_batches, pipeline in cases:
        options = {"pipeline": pipeline, "reduce": "canonical"} if pipeline else {"reduce": "canonical"}
        state, specs, log = train(
            mesh, "gemma", "clipped adam", stage, micro_batches, plan_options=options, policy=fzero.fp32(), steps=3
        )
        found = digests(state.params, specs.params, mesh)
        found |= digests(state.opt_state, specs.opt_state, mesh)
        out.append((log, found))
    return out


@pytest.mark.parametrize("sizes", ({"pp": 2}, pytest.param({"pp": 2, "dp": 2}, marks=pytest.mark.slow)), ids=str)
def test_canonical_sums_have_the_bits_of_one_process(sizes):
    """One hash over pp x dp x schedules x layouts x stages, norms and clipping with it."""
    (((log, found),),) = ranks.run(1, canonical_digests, [(0, 4, None)])  # with the threads of a rank
    cases = [(0, 4, PIPELINES["gpipe"]), (3, 4, PIPELINES["interleaved"]), (2, 4, PIPELINES["1f1b uneven"])]
    for rank in ranks.run(math.prod(sizes.values()), canonical_digests, cases, mesh=sizes):
        for (ours, theirs), case in zip(rank, cases):
            assert ours == log, case
            assert theirs == found, case


# ---- norms of layers -------------------------------------------------------------------------------------------------


def layer_norms(mesh, cases):
    """[(norms of gradients, norms of parameters) of two steps, by case]."""
    out = []
    for name, stage, micro_batches, options in cases:
        model, tx = model_of(name, dropout=0.0), OPTIMIZERS["clipped adam"]
        plan = zero_plan(stage, model, mesh, policy=FP64, **options)
        state = fzero.init_state(model, tx, plan, seed=3)
        local = micro_batches // mesh.data_size
        step = fzero.make_train_step(model, tx, plan, micro_batches=local, execution=fzero.Execution(norms=True))
        for i in range(2):
            state, metrics = step(state, local_batch(batch_for(i, 24), mesh, local))
            squares, factor = norms.sums(metrics.squares), float(metrics.factor)
            grads = norms.segment_norms(squares, plan.opt, mesh, plan.trained(plan.like), factor)
            out.append((grads, norms.segment_norms(norms.of_params(state.params), plan.params, mesh, plan.like)))
    return out


def test_norms_of_layers_are_those_of_one_process():
    """In the order of the layers, whichever ranks have them: none of a stack, or every second one."""
    cases = [
        ("gemma", 3, 4, {"pipeline": PIPELINES["interleaved"]}),
        ("encoder and decoder", 1, 2, {"pipeline": PIPELINES["gpipe"]}),
        ("gemma", 2, 4, {"pipeline": PIPELINES["1f1b uneven"], "reduce": "canonical"}),
    ]
    plain = [(*case[:3], {k: v for k, v in case[3].items() if k == "reduce"}) for case in cases]
    (expected,) = ranks.run(1, layer_norms, plain)  # with the threads of a rank
    for found in ranks.run(2, layer_norms, cases, mesh={"pp": 2}):
        assert_close(found, expected, rtol=1e-10, atol=1e-12)
        for ours, theirs in zip(found[-2:], expected[-2:]):  # canonical: bit by bit
            assert [norm["blocks"] for norm in ours] == [norm["blocks"] for norm in theirs]


# ---- evaluation, batches of other shapes, messages -------------------------------------------------------------------


def evaluated(mesh, stage, pipeline):
    model = model_of("gpt2")
    plan = zero_plan(stage, model, mesh, policy=FP64, pipeline=pipeline)
    state = fzero.init_state(model, OPTIMIZERS["sgd"], plan, seed=3)
    step = make_eval_step(model, plan)
    out = [
        step(state.params, local_batch(batch_for(0, rows, length), mesh)) for rows, length in ((4, 8), (8, 5), (4, 8))
    ]
    assert all(loss.total.dtype == torch.float64 and loss.num_tokens.dtype == torch.int64 for loss in out)
    return [(float(loss.total), int(loss.num_tokens)) for loss in out]


@pytest.mark.parametrize("stage", (0, 3))
def test_evaluation_is_that_of_one_process(stage):
    """Of batches of several shapes: what passes between stages has the shapes of the batch at hand."""
    for found in ranks.run(2, evaluated, stage, Pipeline(layout="1,2"), mesh={"pp": 2}):
        assert_close(found, evaluated(fzero.one_process(), 0, None), rtol=1e-10, atol=1e-12)


def sent(mesh, pipeline, micro_batches):
    train(mesh, "gemma", "sgd", 3, micro_batches, plan_options={"pipeline": pipeline}, steps=1)  # tells the shapes
    mesh.ledger.clear()
    train(mesh, "gemma", "sgd", 3, micro_batches, plan_options={"pipeline": pipeline}, steps=2)
    rows = [row for row in mesh.ledger.rows() if row.collective == "message" and row.dtype == "float64"]
    return {(row.phase, row.leaf): row.elements for row in rows}


def test_messages_are_as_many_as_the_stages_have_borders():
    """B T D elements for each micro-batch, border and direction."""
    m, size = 4, 24 // 4 * 8 * 8
    found = ranks.run(2, sent, PIPELINES["interleaved"], m, mesh={"pp": 2})
    assert found[0] == {("forward", "x:0-1"): 2 * 2 * m * size, ("backward", "grad:0-1"): 2 * m * size}
    assert found[1] == {("forward", "x:1-0"): 2 * m * size, ("backward", "grad:1-0"): 2 * 2 * m * size}


def events_of(mesh, pipeline, length):
    """(what happened before the first activations were there, how many programs were made) in a step."""
    model, tx = model_of("llama", n_layers=4), OPTIMIZERS["sgd"]
    plan = zero_plan(3, model, mesh, policy=FP64, pipeline=pipeline)
    step = fzero.make_train_step(model, tx, plan, micro_batches=4)
    make, take, events = vjp_pair._programs, Receiver.receive, []
    with (
        mock.patch.object(vjp_pair, "_programs", lambda *args: events.append("made") or make(*args)),
        mock.patch.object(Receiver, "receive", lambda self: events.append("taken") or take(self)),
    ):
        step(fzero.init_state(model, tx, plan, seed=0), local_batch(batch_for(0, 8, length), mesh, 4))
    return events[: events.index("taken")], events.count("made")


def test_ranks_make_their_programs_before_they_wait_for_activations():
    """All at the same time, and one for each kind of layer, whatever the stages."""
    for found in ranks.run(2, events_of, Pipeline("zb-v", chunks=2), 11, mesh={"pp": 2}):  # a length of no other test
        assert found == (["made"], 1)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def saved(mesh, folder, stage, pipeline):
    options = {"pipeline": pipeline} if pipeline else {}
    state, specs, _ = train(mesh, "gemma", "adam", stage, 4, plan_options=options, steps=2)
    checkpoint.save(folder, state, step=2, specs=specs, mesh=mesh)


def restored(mesh, folder, stage, pipeline):
    model, tx = model_of("gemma"), OPTIMIZERS["adam"]
    plan = zero_plan(stage, model, mesh, policy=FP64, pipeline=pipeline)
    like = fzero.init_state(model, tx, plan, seed=0)
    specs = state_specs(plan, tx)
    state = checkpoint.restore(checkpoint.step_folder(folder, 2), like, specs=specs, mesh=mesh)
    return whole(state, specs, mesh)


def test_a_checkpoint_goes_to_every_other_mesh(tmp_path):
    """From interleaved stages to other stages, to dp, to one process, and back."""
    one = fzero.one_process()
    first, second = tmp_path / "first", tmp_path / "second"
    ranks.run(2, saved, first, 3, PIPELINES["interleaved"], mesh={"pp": 2})
    saved(one, second, 0, None)
    expected = restored(one, second, 0, None)
    assert_close(restored(one, first, 0, None).params, expected.params, rtol=1e-10, atol=1e-10)
    for folder in (first, second):
        there = restored(one, folder, 0, None)
        for sizes, stage, pipeline in (
            ({"pp": 2}, 1, PIPELINES["1f1b uneven"]),
            ({"pp": 2}, 3, PIPELINES["interleaved"]),
            ({"dp": 2}, 3, None),
        ):
            for state in ranks.run(2, restored, folder, stage, pipeline, mesh=sizes):
                assert_same(pytree.named_leaves(state), pytree.named_leaves(there))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    (
        ({"pipeline": Pipeline(layout="2,2")}, "layout 2,2 has 4 layers in 2 stages; the model has 3"),
        ({"pipeline": Pipeline("interleaved", chunks=2)}, "has 4 stages, and the model has 3 layers"),
    ),
)
def test_a_plan_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        zero_plan(0, model_of("gpt2"), fzero.fake_mesh({"pp": 2}), **options)


def test_a_pipeline_refuses():
    with pytest.raises(ValueError, match=r"schedule is '1f1'.*it must be one of gpipe, 1f1b, .*, or the path"):
        Pipeline("1f1")
    with pytest.raises(
        ValueError, match="schedule 1f1b has one chunk a rank and chunks is 2; use chunks=1, or schedule interleaved or"
    ):
        Pipeline(chunks=2)
    with pytest.raises(ValueError, match="cuts a layered Model into stages, and this is a plain parameter tree"):
        zero_plan(0, {"w": torch.zeros(8, 2)}, fzero.fake_mesh({"pp": 2}))
    plan = zero_plan(0, model_of("gemma"), fzero.fake_mesh({"pp": 2}), pipeline=PIPELINES["interleaved"])
    with pytest.raises(ValueError, match="micro-batches"):
        fzero.make_train_step(model_of("gemma"), OPTIMIZERS["sgd"], plan, micro_batches=5)


def unlike_schedules(mesh, first, other):
    pipeline = Pipeline(other if mesh["pp"].rank else first)
    train(mesh, "gemma", "sgd", 0, 3, plan_options={"pipeline": pipeline}, steps=1)


@pytest.mark.parametrize("first, other", (("1f1b", "gpipe"), ("1f1b", V)))
def test_ranks_with_unlike_schedules_are_told(first, other):
    """Of other orders, or of other lengths: a table of two stages a rank has more acts."""
    with pytest.raises(ValueError, match="ranks 0 and 1 of pp have unlike schedules"):
        ranks.run(2, unlike_schedules, first, other, mesh={"pp": 2})


# ---- a table of one's own


@pytest.mark.parametrize(
    "given, words",
    (
        (
            "0G0 0F0 0B0 0D0 \n 1F0 1I0 1W0",
            "schedule table has the act 0G0; a run has the acts F, B, I, W alone, and gathers by itself",
        ),
        ("0F0 0B0 \n 1F0", "line 2: rank 1 has no 1B0, the backward of micro-batch 0 in stage 1"),
        ("no/such/table", "no/such/table: no such file"),
    ),
)
def test_a_table_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        Pipeline(given)


def test_a_table_is_of_one_mesh_model_and_step(tmp_path):
    model, mesh = model_of("gemma"), fzero.fake_mesh({"pp": 2})
    (tmp_path / "mine.txt").write_text(V)
    how = Pipeline(str(tmp_path / "mine.txt"))
    assert how == Pipeline(V) and how.name == "vee"  # the text itself, so that a run's config has it
    schedule = how.table()
    assert Pipeline(schedule).table() == schedule
    plan = zero_plan(0, model, mesh, pipeline=how)
    assert plan.schedule(3)[0] == schedule
    assert [str(act) for act in plan.schedule(1)[0].rows[0]] == [
        "0F0",
        "3F0",
        "3B0",
        "0B0",
    ]  # of a comparison of ranks
    step = fzero.make_train_step
    with pytest.raises(ValueError, match="vee is a table of 3 micro-batches and a step has 4 on each rank"):
        step(model, OPTIMIZERS["sgd"], plan, micro_batches=4)
    with pytest.raises(ValueError, match="vee is a table of 3 micro-batches and a step has 2 on each rank"):
        step(model, OPTIMIZERS["sgd"], plan, micro_batches=2)
    with pytest.raises(ValueError, match="vee is a table of 2 ranks and the mesh has pp=4"):
        zero_plan(0, model, fzero.fake_mesh({"pp": 4}), pipeline=how)
    with pytest.raises(ValueError, match="vee is a table of 4 layers and the model has 3"):
        zero_plan(0, model_of("gpt2"), mesh, pipeline=how)
    with pytest.raises(ValueError, match="chunks is 2, and schedule vee is a table with its own stages"):
        Pipeline(V, chunks=2)
    with pytest.raises(ValueError, match="layout is 1,1,1,1, and schedule vee is a table with a line of layers"):
        Pipeline(V, layout="1,1,1,1")


# ---- a rank that ends, or does not come


def broken(mesh, what):
    """The error of each rank, and its seconds, if rank 1 ends, or sleeps, at its second micro-batch."""
    slow = fzero.make_mesh({"pp": 4}, timeout_s=4.0, device="cpu")
    model, place = model_of("gemma"), slow["pp"].rank
    if place == 1:
        embed, calls = model.block, []

        def block(*args):
            calls.append(1)
            if len(calls) == 2:
                os._exit(3) if what == "ends" else time.sleep(8.0)
            return embed[0](*args)

        model = model._replace(block=(block,))
    plan, tx = zero_plan(0, model, slow, policy=FP64), OPTIMIZERS["sgd"]
    step = fzero.make_train_step(model, tx, plan, micro_batches=4)
    state, began = fzero.init_state(model, tx, plan, seed=0), time.monotonic()
    try:
        step(state, local_batch(batch_for(0, 8), slow, 4))
    except fzero.RankError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


@pytest.mark.slow
@pytest.mark.parametrize("what, words", (("ends", "rank 1 is gone"), ("sleeps", "did not answer within 4 s")))
def test_a_rank_that_breaks_a_row_ends_the_others(what, words):
    """Within seconds of the end, or of the timeout: its neighbours name it, and the others what these said."""
    results = ranks.run(4, broken, what, mesh={"pp": 4}, fresh=True)
    for rank in (0, 2, 3):
        text, seconds = results[rank]
        assert words in text and seconds < 30, (rank, text)
    assert any("rank 1" in results[rank][0] for rank in (0, 2))


# ---- schedules in an executor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_few_messages_on_their_way_are_enough(name):
    """A schedule needs few buffers of a channel, so that a rank's memory does not grow with the micro-batches."""
    for p, m in itertools.product((2, 3, 4, 8), (8, 24)):
        chunks = 1 if FAMILIES[name].chunks == 1 else 2
        model = model_of("gpt2", n_layers=16)
        plan = zero_plan(0, model, fzero.fake_mesh({"pp": p}), pipeline=Pipeline(name, chunks=chunks))
        assert plan.schedule(m)[1] <= 2 * chunks, (p, m)
