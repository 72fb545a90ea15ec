"""Steps on a mesh with ep: equal to one process whatever the form, the stage, the mesh and the loads of experts."""

import functools
import itertools
import math
from unittest import mock

import pytest
import ranks
import torch
from close import assert_close, assert_same
from zero_cases import FP64, OPTIMIZERS, batch_for, expect_one_process, model_of, train, whole

import fzero
from fzero import checkpoint, local_batch, state_specs
from fzero.comm import AXES

STEPS = 2  # the second has moments of the first
FORMS = ("gather", "exchange:1")
MESHES = {
    "ep2": {"ep": 2},
    "ep4": {"ep": 4},
    "dp2 x ep2": {"dp": 2, "ep": 2},
    "ep2 x tp2": {"ep": 2, "tp": 2},
    "pp2 x ep2": {"pp": 2, "ep": 2},
    "cp2 x ep2": {"cp": 2, "ep": 2},
    "rp2 x ep2": {"rp": 2, "ep": 2},
    "dp2 x ep2 x cp2": {"dp": 2, "ep": 2, "cp": 2},
}
SIZES = {
    "moe dropless": {"n_experts": 4},
    "moe capacity": {"n_experts": 4},
    "deepseek": {"n_experts": 4, "n_groups": 2},
    "gpt-oss": {},
}


def options_of(form, **more):
    return {"experts": form, "plan_options": more}


def sizes_of(name, options):
    return {**SIZES[name], **({"n_experts": options["of"]} if "of" in options else {})}


@functools.cache
def serial(name, optimizer, micro_batches, steps, **options):
    sizes, rest = sizes_of(name, options), {key: value for key, value in options.items() if key != "of"}
    state, _, log = train(fzero.one_process(), name, optimizer, 0, micro_batches, steps=steps, sizes=sizes, **rest)
    return state, log


def trained(mesh, cases, steps):
    out = []
    for case, options in cases:
        sizes, rest = sizes_of(case[0], options), {key: value for key, value in options.items() if key != "of"}
        state, specs, log = train(mesh, *case, steps=steps, sizes=sizes, **rest)
        out.append((whole(state, specs, mesh), log))
    return out


def equals_one_process(mesh, cases, steps=STEPS):
    """Each case: (name of the model, optimizer, stage, micro-batches of a data rank, options of `train`)."""
    sizes = MESHES[mesh]
    data = math.prod(sizes.get(axis, 1) for axis in ("dp", "rp", "ep"))
    given = [((name, tx, stage, data * m), options) for name, tx, stage, m, options in cases]
    results = ranks.run(math.prod(sizes.values()), trained, given, steps, mesh=sizes, timeout_s=600)
    expected = []
    for (name, tx, _, m), options in given:
        same = {key: options[key] for key in ("dropout", "compiled", "of") if key in options}
        expected.append(serial(name, tx, m, steps, **same))
    expect_one_process(results, expected, [(mesh, *case) for case in given])


FEW = {
    "ep2": [
        ("moe dropless", "clipped adam", 3, 2, options_of("exchange:1")),
        ("deepseek", "sgd", 0, 1, {**options_of("gather"), "dropout": 0.1}),
    ],
    "ep4": [("moe dropless", "adam", 2, 1, options_of("exchange:1")), ("deepseek", "sgd", 3, 1, options_of("gather"))],
    "dp2 x ep2": [
        ("moe dropless", "clipped adam", 3, 2, {**options_of("exchange:1"), "remat": "full"}),
        ("moe dropless", "sgd", 2, 1, options_of("gather", reduce="once")),
        ("deepseek", "adam", 1, 2, options_of("exchange:1")),
        ("moe capacity", "adam", 3, 1, options_of("auto")),
    ],
    "ep2 x tp2": [
        ("moe dropless", "adam", 3, 1, options_of("exchange:1", sequence=True)),
        ("deepseek", "sgd", 1, 2, options_of("gather", sequence=True)),
    ],
    "pp2 x ep2": [
        ("moe dropless", "adam", 3, 2, options_of("exchange:1")),
        ("deepseek", "sgd", 1, 2, options_of("gather")),  # the last rank has no dense layer
    ],
    "cp2 x ep2": [("moe dropless", "adam", 3, 2, options_of("exchange:1"))],
    "rp2 x ep2": [("deepseek", "adam", 3, 2, options_of("gather"))],
    # Biases of experts, of a product whose parts ranks of tp add too, and a sink for each head.
    "ep2, gpt-oss": [("gpt-oss", "clipped adam", 3, 2, options_of("exchange:1"))],
    "ep4, gpt-oss": [("gpt-oss", "adam", 2, 1, {**options_of("gather"), "of": 6})],
    "dp2 x ep2, gpt-oss": [("gpt-oss", "clipped adam", 3, 2, {**options_of("exchange:1"), "remat": "full"})],
    "ep2 x tp2, gpt-oss": [("gpt-oss", "adam", 3, 1, options_of("exchange:1", sequence=True))],
    "pp2 x ep2, gpt-oss": [("gpt-oss", "adam", 1, 2, options_of("gather"))],
    "cp2 x ep2, gpt-oss": [("gpt-oss", "adam", 3, 2, options_of("exchange:1"))],
}


TIER = {"ep2": (), "ep2, gpt-oss": (), "ep2 x tp2": pytest.mark.slow, "pp2 x ep2": pytest.mark.slow}


@pytest.mark.parametrize("cases", [pytest.param(one, marks=TIER.get(one, pytest.mark.exhaustive)) for one in FEW])
def test_expert_parallelism_equals_one_process(cases):
    equals_one_process(cases.partition(",")[0], FEW[cases])


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", FORMS)
def test_every_product_equals_one_process(mesh, form):
    more = {"sequence": True} if "tp" in MESHES[mesh] else {}
    cases = itertools.product(("moe dropless", "deepseek"), (0, 1, 2, 3))
    equals_one_process(mesh, [(name, "clipped adam", stage, 2, options_of(form, **more)) for name, stage in cases])


UNEVEN = {
    "ep2, muon": [("moe dropless", "muon", 3, 2, {**options_of("exchange:1"), "of": 3})],
    "ep4, muon": [
        ("moe dropless", "muon", 2, 1, {**options_of("gather"), "of": 6}),
        ("gpt-oss", "muon", 1, 1, {**options_of("exchange:1"), "of": 5}),
    ],
    "dp2 x ep2, muon": [("moe dropless", "muon", 3, 1, {**options_of("exchange:1"), "of": 3})],
    "ep2 x tp2, muon": [("moe dropless", "muon", 3, 1, {**options_of("gather"), "of": 3})],
    "ep2": [
        ("moe dropless", "clipped adam", 3, 2, {**options_of("exchange:1"), "of": 5}),
        ("moe capacity", "adam", 1, 1, {**options_of("auto"), "of": 3}),
    ],
    "ep4": [
        ("moe dropless", "adam", 3, 1, {**options_of("exchange:1"), "of": 6}),
        ("moe dropless", "adam", 2, 1, {**options_of("gather"), "of": 5}),
        ("deepseek", "sgd", 0, 1, {**options_of("gather"), "of": 6}),
    ],
    "dp2 x ep2": [
        ("moe dropless", "adam", 3, 2, {**options_of("exchange:1"), "remat": "full", "of": 3}),
        ("moe dropless", "adam", 1, 1, {**options_of("exchange:1"), "of": 3}),
    ],
    "ep2 x tp2": [("moe dropless", "adam", 3, 1, {**options_of("exchange:1", sequence=True), "of": 3})],
    "pp2 x ep2": [("moe dropless", "adam", 2, 2, {**options_of("gather"), "of": 3})],
    "cp2 x ep2": [("moe dropless", "adam", 3, 2, {**options_of("exchange:1"), "of": 5})],
}


@pytest.mark.parametrize("cases", [pytest.param(c, marks=[pytest.mark.exhaustive] * (c != "ep2")) for c in UNEVEN])
def test_experts_that_ep_does_not_divide(cases):
    """The first ranks have one more; at rest they are whole over dp."""
    equals_one_process(cases.partition(",")[0], UNEVEN[cases])


@pytest.mark.slow
def test_canonical_sums():
    """They are those of one process within rounding: an expert adds the rows of all ranks of ep in one product, whose
    order is not that of micro-batches."""
    equals_one_process("ep2", [("moe dropless", "adam", 3, 2, options_of("gather", reduce="canonical"))], steps=2)


@pytest.mark.exhaustive
def test_compiled_blocks():
    """Beside compiled blocks of one process."""
    cases = [("moe dropless", "adam", 3, 2, {**options_of("exchange:1"), "compiled": True})]
    equals_one_process("ep2", cases, steps=2)


@pytest.mark.exhaustive
def test_compiled_blocks_with_sinks_and_biases():
    """Of gpt-oss, whose layers of two kinds are two programs."""
    equals_one_process("ep2", [("gpt-oss", "adam", 1, 2, {**options_of("exchange:1"), "compiled": True})], steps=2)


@pytest.mark.exhaustive
def test_compiled_blocks_over_tp():
    """Whose loops are other ones than those of a process that has all heads."""
    how = {**options_of("exchange:1", sequence=True), "compiled": True}
    equals_one_process("ep2 x tp2", [("gpt-oss", "adam", 3, 1, how)], steps=2)


# ---- slack -----------------------------------------------------------------------------------------------------------


def same_tokens(mesh, experts, update="end", offload="", **options):
    """(the state after four steps of batches whose tokens are alike, how often a gradient was computed again, by step):
    all rows go to the experts of one token."""
    model, tx = model_of("deepseek", **SIZES["deepseek"]), OPTIMIZERS["adam"]
    plan = fzero.zero_plan(2, model, mesh, policy=FP64, offload=offload).with_experts(experts)
    state, again = fzero.init_state(model, tx, plan, seed=3), []
    step = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(update=update, **options))
    for i in range(4):
        batch = batch_for(i, 4)
        if i != 1:
            batch = {**batch, "tokens": torch.full_like(batch["tokens"], 3)}
        state, metrics = step(state, local_batch(batch, mesh))
        again.append(int(metrics.recomputed) if isinstance(metrics.recomputed, torch.Tensor) else None)
    return whole(state, state_specs(plan, tx), mesh), again


def expect_slack_without_effect(mesh, **options):
    size = math.prod(mesh.values())
    some = ranks.run(size, functools.partial(same_tokens, experts="exchange:1", **options), mesh=mesh)
    for (state, again), (wanted, never) in zip(
        some, ranks.run(size, functools.partial(same_tokens, experts="exchange:all", **options), mesh=mesh)
    ):
        assert_same(state, wanted)
        assert never == [None] * 4
        assert again == ([1, 0, 0, 0] if options.get("update", "end") == "end" else never)


def test_more_rows_than_the_slack_are_computed_again_with_the_bits_of_slack_for_all():
    """On every rank once, whichever was sent too many; an update in the backward pass has slack for all."""
    expect_slack_without_effect({"ep": 2})
    expect_slack_without_effect({"ep": 2}, update="speculate", offload="opt=host")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp2 x ep2", "pp2 x ep2", "ep2 x tp2", "cp2 x ep2"])
def test_every_rank_of_a_mesh_computes_it_again(mesh):
    expect_slack_without_effect(MESHES[mesh])


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def planned(mesh, experts=4):
    model = model_of("moe dropless", n_experts=experts)
    return fzero.zero_plan(3, model, mesh, policy=FP64), model


def saved(mesh, home, experts=4):
    plan, model = planned(mesh, experts)
    tx = OPTIMIZERS["adam"]
    state = fzero.init_state(model, tx, plan, seed=3)
    step = fzero.make_train_step(model, tx, plan)
    state, _ = step(state, local_batch(batch_for(0, 8), mesh))
    specs = state_specs(plan, tx)
    checkpoint.save(home, state, step=1, specs=specs, mesh=mesh)
    return whole(state, specs, mesh)


def restored(mesh, home, experts=4):
    plan, model = planned(mesh, experts)
    tx = OPTIMIZERS["adam"]
    state, specs = fzero.init_state(model, tx, plan, seed=4), state_specs(plan, tx)
    found = checkpoint.restore(checkpoint.step_folder(home, 1), state, specs=specs, mesh=mesh)
    return whole(found, specs, mesh)


@pytest.mark.slow
def test_a_checkpoint_is_read_at_another_ep(tmp_path):
    state = ranks.run(2, saved, tmp_path, mesh={"ep": 2})[0]
    for sizes in ({"ep": 4}, {"dp": 2}, {"dp": 2, "ep": 2}):
        for found in ranks.run(math.prod(sizes.values()), restored, tmp_path, mesh=sizes):
            assert_same(found, state)
    assert_same(restored(fzero.one_process(), tmp_path), state)


@pytest.mark.exhaustive
def test_a_checkpoint_of_uneven_experts_is_read_elsewhere(tmp_path):
    state = ranks.run(4, saved, tmp_path, 6, mesh={"ep": 4})[0]
    for sizes in ({"ep": 2}, {"dp": 2}, {"ep": 4}):
        for found in ranks.run(math.prod(sizes.values()), restored, tmp_path, 6, mesh=sizes):
            assert_same(found, state)
    assert_same(restored(fzero.one_process(), tmp_path, 6), state)


# ---- a planted mistake -----------------------------------------------------------------------------------------------


def owes_ep(spec):
    return (*(axis for axis in AXES.varying if axis not in spec.axes or axis == "ep"), *sorted(spec.partial))


def mistaken(mesh, case, options):
    with mock.patch.object(fzero.Spec, "partial_axes", property(owes_ep)):
        return trained(mesh, [(case, options)], 1)


def test_a_gradient_of_experts_that_is_summed_over_ep_as_well_is_noticed():
    case = ("moe dropless", "sgd", 0, 2)
    ((state, _),) = ranks.run(2, mistaken, case, options_of("gather"), mesh={"ep": 2})[0]
    expected, _ = serial("moe dropless", "sgd", 2, 1)
    with pytest.raises(AssertionError, match="blocks/moe"):
        assert_close(state.params, expected.params, rtol=1e-10, atol=1e-10)
