"""The laws of laws.py, applied to every model and optimizer they speak of."""

import laws
import pytest
import torch
from law_cases import CASES, FP64, MESH, MODELS, OPTIMIZERS, batch_of, case_of, make

import fzero
from fzero import models, optim
from fzero.core import precision, pytree

every_case = pytest.mark.parametrize("case", CASES)
every_model = pytest.mark.parametrize("model", MODELS)
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
both_forms = pytest.mark.parametrize("donate", [True, False], ids=["donated", "pure"])


def tx_of(name, rate=0.05):
    return OPTIMIZERS[name][0](rate)


@pytest.mark.each_value
@every_case
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])  # SGD first: Adam hides a gradient that is too large
def test_micro_batches(case, optimizer):
    laws.micro_batches(case_of(case), tx_of(optimizer))


@every_case
def test_one_normalisation(case):
    laws.one_normalisation(case_of(case))


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_weights_are_counts(scale):
    laws.weights_are_counts(scale)


@every_case
def test_evaluation(case):
    laws.evaluation(case_of(case))


@both_forms
def test_a_batch_without_a_token_has_no_loss_and_no_update(donate):
    step, state = make(case_of("gpt2"), tx_of("sgd"), donate=donate, micro_batches=2)
    batch, before = batch_of(0), pytree.map(torch.clone, state.params)
    state, metrics = step(state, {**batch, "mask": torch.zeros_like(batch["mask"])})
    assert (float(metrics.loss), float(metrics.grad_norm), int(metrics.num_tokens), bool(metrics.skipped)) == (
        0.0,
        0.0,
        0,
        True,  # no update is made of it
    )
    assert all(torch.equal(a, b) for a, b in zip(pytree.leaves(state.params), pytree.leaves(before)))


@every_model
def test_remat(model):
    laws.remat(case_of(model))


@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.slow), "mlp"])
def test_remat_selective(model):
    laws.remat_selective(case_of(model, n_layers=2))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "tolerance"), [("mlp", 1e-10), ("llama", 1e-5)])
def test_compiled(model, tolerance):
    laws.compiled(case_of(model, n_layers=2), tolerance)


@every_case
def test_purity(case):
    laws.purity(case_of(case), tx_of("adamw"))


@every_optimizer
def test_purity_of_optimizers(optimizer):
    laws.purity(case_of("mlp"), tx_of(optimizer))


@pytest.mark.each_value
@every_optimizer
@pytest.mark.parametrize("case", ["mlp", "plain function"])
def test_donation(case, optimizer):
    laws.donation(case_of(case), tx_of(optimizer))


@every_case
def test_donation_of_every_model(case):
    laws.donation(case_of(case), tx_of("clip and adamw"))


@pytest.mark.each_value
@every_optimizer
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_donation_in_lower_precision(optimizer, policy):
    laws.donation(case_of("mlp"), tx_of(optimizer), precision.POLICIES[policy](), tolerance=1e-4)


@every_optimizer
def test_resume(optimizer):
    laws.resume(case_of("mlp"), tx_of(optimizer))


@every_case
def test_resume_of_every_model(case):
    laws.resume(case_of(case), tx_of("adamw"))


@pytest.mark.each_value
@every_optimizer
@both_forms
def test_transaction(optimizer, donate):
    laws.transaction(case_of("plain function"), tx_of(optimizer), donate=donate)


@pytest.mark.each_value
@pytest.mark.parametrize("model", ["llama", "moe capacity", "mlp"])
@both_forms
def test_transaction_of_models(model, donate):
    laws.transaction(case_of(model), tx_of("clip and adamw"), donate=donate)


@pytest.mark.each_value
@pytest.mark.parametrize("model", ["llama", "gpt2", "mlp"])
@both_forms
def test_overflow(model, donate):
    laws.overflow(case_of(model), donate=donate)


def test_floor():
    laws.floor(case_of("mlp"))


@pytest.mark.parametrize(
    "policy", [precision.bf16(), precision.fp16(precision.LossScale(init=256.0))], ids=["bf16", "fp16"]
)
def test_master_weights(policy):
    laws.master_weights(policy)


@pytest.mark.each_value
@every_optimizer
@pytest.mark.parametrize("case", ["llama", "plain function"])
def test_state_layout(case, optimizer):
    laws.state_layout(case_of(case), tx_of(optimizer))


@every_case
def test_state_layout_of_every_model(case):
    laws.state_layout(case_of(case), tx_of("adamw"))


@pytest.mark.parametrize("optimizer", [name for name, (_, trees) in OPTIMIZERS.items() if trees is not None])
@pytest.mark.parametrize("policy", precision.POLICIES)
def test_cost(optimizer, policy):
    laws.cost(case_of("mlp"), optimizer, precision.POLICIES[policy]())


@every_model
def test_init_depends_on_names(model):
    laws.init_depends_on_names(model)


@every_model
def test_as_written(model):
    laws.as_written(model)


@pytest.mark.parametrize("model", ["gpt2", "llama", "moe dropless", "mlp"])
def test_causal(model):
    laws.causal(model)


@pytest.mark.parametrize("model", ["gpt2", "llama", "moe dropless", "mlp"])
def test_documents(model):
    laws.documents(model)


# ---- strict: ask for X, get X or one ValueError that names it
# ---------------------------------------------------------


def without(name):
    return lambda batch: {n: leaf for n, leaf in batch.items() if n != name}


def changed(name, change):
    return lambda batch: {**batch, name: change(batch[name])}


BAD_BATCHES = {
    "no targets": (without("targets"), "'targets'"),
    "no tokens": (without("tokens"), "'tokens'"),
    "a short mask": (changed("mask", lambda x: x[:, 1:]), "'mask'"),
    "documents of other sequences": (changed("documents", lambda x: x[:, :3]), "'documents'"),
    "rows that do not divide": (lambda batch: pytree.map(lambda x: x[:7], batch), "7 rows.*micro_batches=2"),
    "rows that disagree": (changed("mask", lambda x: x[:4]), r"\[4, 8\] rows"),
    "too long": (lambda batch: pytree.map(lambda x: x.repeat(1, 3), batch), "18 tokens.*16"),
}


@pytest.mark.parametrize("bad", BAD_BATCHES)
def test_a_bad_batch_is_refused_by_name(bad):
    change, text = BAD_BATCHES[bad]
    step, state = make(case_of("llama"), tx_of("sgd"), micro_batches=2)
    before = state.params["head"]["norm"]["scale"].clone()
    with pytest.raises(ValueError, match=text):
        step(state, change(batch_of(0)))
    assert torch.equal(state.params["head"]["norm"]["scale"], before)


def test_a_state_of_another_policy_model_or_without_the_average_is_refused():
    case = case_of("mlp")
    step, state = make(case, tx_of("sgd"))
    for policy, text in ((precision.bf16(), "bf16"), (precision.fp32(), "fp32"), (precision.fp16(), "fp16")):
        _, other = make(case, tx_of("sgd"), policy=policy)
        with pytest.raises(ValueError, match="policy fp64"):
            step(other, batch_of(0))
        other_step, _ = make(case, tx_of("sgd"), policy=policy)
        with pytest.raises(ValueError, match=text):
            other_step(state, batch_of(0))
    step, averaged = make(case, tx_of("sgd"), average=0.9)
    with pytest.raises(ValueError, match="opt_state/inner/count is missing from the state"):
        step(state, batch_of(0))
    step, _ = make(case, tx_of("sgd"))
    with pytest.raises(ValueError, match="opt_state/count is missing from the state"):
        step(averaged, batch_of(0))
    step, _ = make(case_of("mlp", d_ff=13), tx_of("sgd"))
    with pytest.raises(ValueError, match="blocks/w_in"):
        step(state, batch_of(0))


def test_a_plan_of_another_model_is_refused_by_leaf():
    small, large = (case_of("mlp", d_ff=size).loss_fn for size in (12, 13))
    plan = fzero.zero_plan(0, small, MESH)
    with pytest.raises(ValueError, match="blocks/w_in"):
        fzero.init_state(large, tx_of("sgd"), plan, seed=0)
    with pytest.raises(ValueError, match="blocks/w_in"):
        fzero.make_train_step(large, tx_of("sgd"), plan)
    with pytest.raises(ValueError, match="blocks/scale"):
        fzero.init_state(case_of("gpt2").loss_fn, tx_of("sgd"), plan, seed=0)


@pytest.mark.parametrize("text", ["some", "every:0", "selective:1.5", "selective", "every:-1", ""])
def test_a_remat_text_is_refused_with_the_allowed_ones(text):
    model = case_of("mlp").loss_fn
    with pytest.raises(ValueError, match="remat is"):
        fzero.make_train_step(
            model, tx_of("sgd"), fzero.zero_plan(0, model, MESH, policy=FP64), execution=fzero.Execution(remat=text)
        )


def test_a_donated_step_refuses_transforms():
    step, state = make(case_of("mlp"), tx_of("sgd"))
    with pytest.raises(ValueError, match="donate=False"):
        torch.func.vmap(step, in_dims=(0, None))(pytree.map(lambda x: x[None], state), batch_of(0))


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match="llama-tiny"):
        models.preset("lama-tiny")
    with pytest.raises(ValueError, match="zero stage is 4"):
        fzero.zero_plan(4, case_of("mlp").loss_fn, MESH)
    model = case_of("mlp").loss_fn
    own = model.rules(MESH)
    for rules, text in ((own[1:], "embed/tokens"), ((*own, (r"^nothing$", "[D]")), "nothing")):
        with pytest.raises(ValueError, match=text):
            fzero.zero_plan(0, model._replace(rules=lambda mesh, rules=rules: rules), MESH)
    with pytest.raises(ValueError, match="matches no leaf"):
        optim.adamw(0.1, mask="w_inn").init(pytree.map(torch.zeros_like, fzero.zero_plan(0, model, MESH).like))
