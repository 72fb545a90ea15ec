"""Balance of experts by a bias: moved once a step, by the counts of the whole batch, on every mesh; saved."""

import math

import pytest
import ranks
import torch
from close import assert_close, assert_same
from moe_balance_cases import RATE, SIZES, STEPS, biases, equals_written_out, written_out
from zero_cases import FP64, OPTIMIZERS, batch_for, model_of, trained_whole

import fzero
from fzero import checkpoint, models, reopen_state
from fzero.core import precision, pytree
from fzero.offload import Nvme
from fzero.sharding import Pipeline

exhaustive = pytest.mark.exhaustive
NAMES = tuple(SIZES)
ADAM = OPTIMIZERS["adam"]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_is_written_out_whatever_the_micro_batches(name):
    written, loads = written_out(name)
    assert len({tuple(load.flatten().tolist()) for load in loads}) > 1
    (bias,) = biases(written).values()
    assert (bias.abs() > 1.5 * RATE).any() and torch.isfinite(bias).all()
    equals_written_out(name, 1)
    equals_written_out(name, 4, remat="full")


MESHES = {
    "dp2": ({"dp": 2}, 3, {}),
    "pp2": ({"pp": 2}, 0, {}),
    "cp2": ({"cp": 2}, 2, {"sequence": fzero.Context("gather")}),
    "dp2 x tp2 sequence": ({"dp": 2, "tp": 2}, 3, {"sequence": True}),
    "pp2 x dp2": ({"pp": 2, "dp": 2}, 1, {"pipeline": Pipeline("1f1b")}),
}


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=() if m in ("dp2", "pp2") else exhaustive) for m in MESHES])
def test_it_is_what_is_written_out_on_a_mesh(mesh):
    sizes, stage, plan_options = MESHES[mesh]
    data = sizes.get("dp", 1)
    cases = [
        (
            (name, "sgd", stage, 4 * data),
            {"plan_options": plan_options, "steps": STEPS, "sizes": SIZES[name], "remat": "full"},
        )
        for name in NAMES
    ]
    for name, (state, _) in zip(NAMES, ranks.run(math.prod(sizes.values()), trained_whole, cases, mesh=sizes)[0]):
        assert_close(state.params, written_out(name)[0], rtol=1e-10, atol=1e-10)


def steps_of(name, policy, *, offload="", nvme=None, **options):
    """(the step, a state before it) of a plan on one process."""
    model = model_of(name, **SIZES[name])
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=policy, offload=offload)
    state = fzero.init_state(model, ADAM, plan, seed=3, nvme=nvme)
    return fzero.make_train_step(model, ADAM, plan, nvme=nvme, **options), state


@pytest.mark.parametrize("name", NAMES)
def test_it_is_saved_in_float32_and_no_optimizer_has_it(name, tmp_path):
    step, state = steps_of(name, precision.bf16())
    for i in range(2):
        state, metrics = step(state, batch_for(i, 8))
    ((leaf, bias),) = biases(state.params).items()
    assert bias.dtype == torch.float32 and {x.dtype for x in pytree.leaves(state.params)} == {
        bias.dtype,
        torch.bfloat16,
    }
    assert not [n for part in (state.opt_state, state.master) for n in pytree.names(part) if n.endswith("moe/bias")]
    assert set((bias / RATE).round().flatten().tolist()) <= {-2.0, -1.0, 0.0, 1.0, 2.0} and bias.abs().max() > 0
    assert float(metrics.tables[leaf.replace("bias", "load")].sum(-1)[0]) == 8 * 8 * 2  # rows, positions, choices
    path = checkpoint.save(tmp_path, state, step=2)
    restored = checkpoint.restore(path, like=steps_of(name, precision.bf16())[1])
    assert_same(restored.params, state.params)


def test_a_skipped_step_does_not_move_it():
    step, state = steps_of("moe dropless", FP64)
    before = {name: leaf.clone() for name, leaf in biases(state.params).items()}
    state.params["head"]["norm"]["scale"][0] = torch.nan
    state, metrics = step(state, batch_for(0, 8))
    assert metrics.skipped
    assert_same(biases(state.params), before)
    state.params["head"]["norm"]["scale"][0] = 1.0
    state, _ = step(state, batch_for(0, 8))
    assert any((leaf != before[name]).any() for name, leaf in biases(state.params).items())


def test_a_pure_step_moves_it_in_the_new_state_alone():
    (pure, first), (donated, second) = (steps_of("deepseek", FP64, donate=flag) for flag in (False, True))
    for i in range(2):
        before = first
        first, second = pure(first, batch_for(i, 8))[0], donated(second, batch_for(i, 8))[0]
        assert any((leaf != biases(before.params)[name]).any() for name, leaf in biases(first.params).items())
    assert_close(first.params, second.params, rtol=1e-10, atol=1e-10)


@exhaustive
@pytest.mark.parametrize("update", ("end", "speculate"))
def test_a_state_on_a_disk_is_reopened_with_it(update, tmp_path):
    step, state = steps_of("deepseek", precision.bf16())
    nvme = Nvme(tmp_path / "store")
    everything = "params=nvme,opt=nvme"
    on_disk, other = steps_of(
        "deepseek", precision.bf16(), offload=everything, nvme=nvme, execution=fzero.Execution(update=update)
    )
    for i in range(2):
        state, other = step(state, batch_for(i, 8))[0], on_disk(other, batch_for(i, 8))[0]
    nvme.close()
    model = model_of("deepseek", **SIZES["deepseek"])
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=precision.bf16(), offload=everything)
    again = Nvme(tmp_path / "store")
    assert_same(biases(reopen_state(ADAM, plan, again).params), biases(state.params))
    again.close()


def test_another_loss_leaves_it_as_it_is():
    model = models.dpo(model_of("moe dropless", **SIZES["moe dropless"]))
    plan = fzero.zero_plan(0, model, fzero.one_process())
    (name,) = biases(plan.like)
    assert model.traits.leaf_rules == {name: None}
    assert not plan.leaves[name].trained and plan.leaves[name].dtype == torch.float32


def test_bad_choices_are_refused():
    for changes, said in (({"balance": "biass"}, "must be loss or bias"), ({"bias_rate": -1.0}, "bias_rate is -1")):
        with pytest.raises(ValueError, match=said):
            models.MoEConfig(**changes)


def test_delayed_updates_are_refused_where_a_bias_moves():
    """Micro-batches under way would see it move; a bias that stays is taken."""
    model = model_of("moe dropless", **SIZES["moe dropless"])
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=FP64).with_updates(1)
    said = r'update="delayed": a rule of the model moves blocks/moe/bias after each step.*use update="end"$'
    with pytest.raises(ValueError, match=said):
        fzero.make_train_step(model, ADAM, plan, execution=fzero.Execution(update="delayed"))
    stays = model_of("moe dropless", **{**SIZES["moe dropless"], "bias_rate": 0.0})
    plan = fzero.zero_plan(0, stays, fzero.one_process(), policy=FP64).with_updates(1)
    assert callable(fzero.make_train_step(stays, ADAM, plan, execution=fzero.Execution(update="delayed")))
