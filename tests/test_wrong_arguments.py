"""What users of other libraries write at first: accepted, or one line that says what to write instead."""

import collections

import numpy as np
import pytest
import torch
from law_cases import batch_of, case_of

import fzero
from fzero import models, optim
from fzero.core.config_tables import one_of
from fzero.models.batch import check_batch
from fzero.planner import estimate

ONE = fzero.one_process()
PARAMS = {"w": torch.ones(2, 3), "b": torch.zeros(3)}
BATCH = {"x": torch.ones(4, 2)}
MODEL = case_of("mlp").loss_fn
TOKENS = torch.zeros(4, 8, dtype=torch.int64)


def loss(params, batch):
    y = batch["x"] @ params["w"] + params["b"]
    return y.square().sum(), len(y)


def returning(result):
    """A loss function that returns `result(y)`."""
    return lambda params, batch: result(batch["x"] @ params["w"] + params["b"])


def train(
    loss=loss, params=PARAMS, tx=None, batch=BATCH, plan=None, seed=0, policy="fp32", mesh=ONE, stage=0, **options
):
    plan = fzero.zero_plan(stage, params, mesh, policy=policy) if plan is None else plan
    tx = optim.adamw(0.1) if tx is None else tx
    state = fzero.init_state(params, tx, plan, seed=seed)
    return fzero.make_train_step(loss, tx, plan, **options)(state, batch)


def train_model(batch, **options):
    return train(MODEL, MODEL, batch=batch, **options)


def evaluate(state_of=lambda state: state.params, loss=loss):
    plan = fzero.zero_plan(0, PARAMS, ONE)
    state = fzero.init_state(PARAMS, optim.adamw(0.1), plan, seed=0)
    return fzero.make_eval_step(loss, plan)(state_of(state), BATCH)


PAIR = r"return \(losses\.sum\(\), losses\.numel\(\)\)$"
EXECUTION = r"write execution=fzero\.Execution\({}=\.\.\.\)$"
MODEL_OR_LOSS = r"give a Model, such as models\.build\(.*\), or a function loss\(params, batch\)"
REFUSED = {
    # what a loss function returns
    "a vector": (lambda: train(returning(lambda y: y.square())), r"returned torch\.float32 of shape \[4, 3\]; " + PAIR),
    "one element": (lambda: train(returning(lambda y: y.sum()[None])), r"of shape \[1\]; " + PAIR),
    "a float": (
        lambda: train(returning(lambda y: 1.5)),
        r"the number 1\.5, which has no gradient; .*return a tensor, not its \.item\(\)",
    ),
    "a dict": (
        lambda: train(returning(lambda y: {"loss": y.sum()})),
        r"returned a dict of loss; return \(sum, number of",
    ),
    "None": (lambda: train(returning(lambda y: None)), "what the loss function returned is None; " + PAIR),
    "a list": (lambda: train(returning(lambda y: [y.sum(), 4])), "returned a list of 2; " + PAIR),
    "four": (lambda: train(returning(lambda y: (y.sum(), 1, {}, 2))), "returned a tuple of 4; " + PAIR),
    "integers": (lambda: train(returning(lambda y: y.sum().long())), r"returned torch\.int64 of shape \[\]; " + PAIR),
    "a vector of two": (lambda: train(returning(lambda y: (y.sum(1), 4))), r"of shape \[4\]; " + PAIR),
    "numbers of samples": (
        lambda: train(returning(lambda y: (y.sum(), torch.ones(4)))),
        r"the number of samples has shape \[4\]; return its sum, a scalar",
    ),
    "no number": (
        lambda: train(returning(lambda y: (y.sum(), None))),
        "the number of samples is None; return a scalar",
    ),
    "a vector to report": (
        lambda: train(returning(lambda y: (y.sum(), 4, {"each": y}))),
        r"'each' of the loss function's sums has shape \[4, 3\]; return its sum, a scalar",
    ),
    "a list to report": (
        lambda: train(returning(lambda y: (y.sum(), 4, [y.sum()]))),
        r"the third result of the loss function is a list; return \{name: sum to report\}",
    ),
    "an evaluation's float": (
        lambda: evaluate(loss=returning(lambda y: 1.5)),
        r"the number 1\.5, which has no gradient",
    ),
    # parameters
    "None leaves": (
        lambda: train(params={**PARAMS, "c": None}),
        "leaf 'c' of the parameters is a NoneType, .*leave it",
    ),
    "numpy leaves": (
        lambda: train(params={"a": {"w": np.ones((2, 3))}}),
        r"leaf 'a/w' of the parameters is a ndarray, not a tensor; use torch\.as_tensor",
    ),
    "numbers": (lambda: train(params={**PARAMS, "c": 1.0}), r"leaf 'c' of the parameters is a float, .*as_tensor"),
    "a generator": (
        lambda: train(params=torch.nn.Linear(1, 1).parameters()),
        r"the parameters are a generator, .* such as dict\(module\.named_parameters\(\)\)",
    ),
    "no leaves": (lambda: train(params={}), "the parameter tree has no leaves; give a tree of tensors"),
    "a module's plan": (
        lambda: train(params=torch.nn.Linear(2, 3)),
        r"the parameters are an nn\.Module \(Linear\); .*dict\(module\.named_parameters\(\)\).*functional_call",
    ),
    "a module as model": (
        lambda: train(torch.nn.Linear(2, 3)),
        r"the model is an nn\.Module \(Linear\); give fzero\.from_module\(module, loss\), or a function "
        r"loss\(params, batch\) that calls torch\.func\.func",
    ),
    "a preset's name": (
        lambda: train("llama-tiny", "llama-tiny"),
        r"the model is 'llama-tiny'; give a Model, such as m",
    ),
    "a config": (
        lambda: train(params=models.MLPConfig()),
        "the model is a MLPConfig; give a Model, such as models.build",
    ),
    "a config as model": (lambda: train(models.MLPConfig()), "the model is a MLPConfig; " + MODEL_OR_LOSS),
    "a class": (lambda: train(torch.nn.Linear), "the model is the class Linear; " + MODEL_OR_LOSS),
    "a loss as parameters": (lambda: train(params=loss), "the model is a function; give a Model, .*or a tree of param"),
    # optimizers
    "a torch optimizer": (
        lambda: train(tx=torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])),
        r"the optimizer is a torch optimizer \(AdamW\); write optim\.adamw\(1e-3, b1=0\.9, b2=0\.95, weight_",
    ),
    "a torch optimizer in a chain": (
        lambda: optim.chain(optim.clip_by_global_norm(1.0), torch.optim.SGD([torch.ones(1)], 0.1)),
        r"chain: takes .*; argument 1 is a torch optimizer \(SGD\); write optim\.adamw\(1e-3",
    ),
    "a torch optimizer in an average": (
        lambda: optim.with_average(torch.optim.SGD([torch.ones(1)], 0.1), 0.9),
        r"the optimizer is a torch optimizer \(SGD\)",
    ),
    "a torch optimizer by label": (
        lambda: optim.by_label({"a": torch.optim.SGD([torch.ones(1)], 0.1)}, ((".*", "a"),)),
        r"by_label: transformation 'a' is a torch optimizer \(SGD\)",
    ),
    "a torch optimizer accumulated": (
        lambda: optim.accumulate(torch.optim.SGD([torch.ones(1)], 0.1), 2),
        r"the optimizer is a torch optimizer \(SGD\)",
    ),
    "a function": (
        lambda: train(tx=optim.adamw),
        r"the optimizer is a function; write optim\.adamw\(1e-3\), its result",
    ),
    "a rate": (
        lambda: train(tx=1e-3),
        r"the optimizer is a float; write one of fzero\.optim, such as optim\.adamw\(1e-3",
    ),
    "betas": (lambda: optim.adamw(0.1, betas=(0.9, 0.95)), "adamw has no argument 'betas'; write b1=0.9, b2=0.95$"),
    "betas of lion": (lambda: optim.lion(betas=(0.9, 0.99)), "lion has no argument 'betas'; write b1=0.9, b2=0.95$"),
    "learning_rate": (lambda: optim.sgd(learning_rate=0.1), "sgd has no argument 'learning_rate'; write lr=$"),
    "a misspelt decay": (
        lambda: optim.lamb(0.1, weight_decy=0.1),
        r"lamb has no argument 'weight_decy'; its arguments are lr, .* \(did you mean weight_decay\?\)",
    ),
    "betas by place": (
        lambda: optim.adam(0.1, (0.9, 0.95)),
        r"adam: b1 is \(0\.9, 0\.95\); it must be a number or a function$",
    ),
    "parameters first": (
        lambda: optim.adamw(torch.nn.Linear(1, 1).parameters(), lr=0.1),
        "adamw: lr is a generator; it must be a number, a tensor or a function",
    ),
    "parameters alone": (
        lambda: optim.adamw([torch.ones(1)]),
        r"adamw: lr is \[tensor\(\[1\.\]\)\]; it must be a number",
    ),
    "a schedule's name": (lambda: optim.adamw("cosine"), "adamw: lr is 'cosine'; it must be a number"),
    # plans, states and steps
    "an unknown policy": (
        lambda: train(policy="bf61"),
        r"policy is 'bf61' \(did you mean bf16\?\); it must be one of fp32",
    ),
    "a dtype": (
        lambda: train(policy=torch.bfloat16),
        r"policy is torch\.bfloat16; write fzero\.bf16\(\), or a name: fp32, fp64",
    ),
    "no policy": (lambda: train(policy=None), r"policy is None; write fzero\.bf16\(\), or a name"),
    "a dict of axes": (lambda: train(mesh={"dp": 1}), r'mesh is a dict; write fzero\.make_mesh\(\{"dp": 2\}\)'),
    "a number of ranks": (lambda: fzero.make_mesh(2), r'mesh is 2; write the sizes of its axes, such as \{"dp": 2\}'),
    "an axis alone": (lambda: fzero.make_mesh("dp"), "mesh is 'dp'; write the sizes of its axes"),
    "an axis of True": (lambda: fzero.make_mesh({"dp": True}), "mesh: axis dp has size True; a size is a whole number"),
    "frozen names": (
        lambda: fzero.zero_plan(0, PARAMS, ONE, frozen=["w"]),
        r"frozen is \['w'\]; write a regular expression over the leaves' names",
    ),
    "offload True": (lambda: fzero.zero_plan(0, PARAMS, ONE, offload=True), 'offload is True; write offload="" or'),
    "stage True": (lambda: train(stage=True), "zero stage is True; it must be 0, 1, 2 or 3"),
    "stage '3'": (lambda: train(stage="3"), "zero stage is '3'; it must be 0, 1, 2 or 3"),
    "dtype of a plan": (
        lambda: fzero.zero_plan(0, PARAMS, ONE, dtype=torch.bfloat16),
        r"zero_plan has no argument 'dtype'; write policy=fzero\.bf16\(\)",
    ),
    "a stage as plan": (
        lambda: train(plan=3),
        r"plan is 3; write init_state\(model, tx, zero_plan\(stage, model, mesh\)",
    ),
    "plan and optimizer swapped": (
        lambda: fzero.make_train_step(loss, fzero.zero_plan(0, PARAMS, ONE), optim.adamw()),
        "the optimizer is a Plan; write one of fzero.optim",
    ),
    "seed None": (lambda: train(seed=None), r"seed is None; give an int, or a key: fzero\.random\.key\(0\)"),
    "seed 0.5": (lambda: train(seed=0.5), "seed is 0.5; give an int"),
    "mesh of a state": (
        lambda: fzero.init_state(PARAMS, optim.adamw(), fzero.zero_plan(0, PARAMS, ONE), seed=0, mesh=ONE),
        r"init_state has no argument 'mesh'; give it to zero_plan\(stage, model, mesh\)",
    ),
    "micro_batches 0": (lambda: train(micro_batches=0), "micro_batches is 0; it must be a whole number of at least 1"),
    "micro_batches -1": (
        lambda: train(micro_batches=-1),
        "micro_batches is -1; it must be a whole number of at least 1",
    ),
    "micro_batches 2.0": (lambda: train(micro_batches=2.0), r"micro_batches is 2\.0; it must be a whole number"),
    "micro_batches True": (lambda: train(micro_batches=True), "micro_batches is True; it must be a whole number"),
    "remat True": (
        lambda: fzero.Execution(remat=True),
        'remat is True; write remat="full" or remat="none", "every:2" or',
    ),
    "remat None": (
        lambda: fzero.Execution(remat=None),
        'remat is None; write remat="full", "every:2" or "selective:0.5"',
    ),
    "reshard 1": (lambda: fzero.Execution(reshard=1), "reshard is 1; write reshard=True or reshard=False"),
    "compiled 'inductor'": (
        lambda: fzero.Execution(compiled="inductor"),
        "compiled is 'inductor'; write compiled=True or",
    ),
    "kernels True": (lambda: fzero.Execution(kernels=True), 'kernels is True; write kernels="auto" or'),
    "prefetch 1.5": (
        lambda: fzero.Execution(prefetch=1.5),
        r"prefetch is 1\.5; it must be a whole number of at least 0",
    ),
    "reshard of a plan": (
        lambda: fzero.zero_plan(3, PARAMS, ONE, reshard=False),
        r"no argument 'reshard'; give it to make_train_step\(\.\.\., execution=fzero\.Execution\(reshard=\.\.\.\)\)",
    ),
    "accumulate of a plan": (
        lambda: fzero.zero_plan(2, PARAMS, ONE, accumulate="full"),
        "zero_plan has no argument 'accumulate'; write reduce=\"once\"",
    ),
    "remat of a step": (
        lambda: train(remat="full"),
        "make_train_step has no argument 'remat'; " + EXECUTION.format("remat"),
    ),
    "compiled of an evaluation": (
        lambda: fzero.make_eval_step(loss, fzero.zero_plan(0, PARAMS, ONE), compiled=True),
        "make_eval_step has no argument 'compiled'; " + EXECUTION.format("compiled"),
    ),
    "gradient accumulation": (
        lambda: train(gradient_accumulation_steps=4),
        "make_train_step has no argument 'gradient_accumulation_steps'; write micro_batches=",
    ),
    "clipping": (
        lambda: train(max_grad_norm=1.0),
        r"no argument 'max_grad_norm'; write tx = optim\.chain\(optim\.clip_by_global_norm\(1\.0\), tx\)",
    ),
    "execution 'full'": (lambda: train(execution="full"), r"execution is 'full'; write fzero\.Execution\(remat="),
    "skip True": (lambda: train(skip=True), r"skip is True; write fzero\.Skip\("),
    # batches
    "an array in a batch": (
        lambda: train(batch={"x": np.ones((4, 2))}),
        r"batch\['x'\] is a ndarray; use torch\.as_tensor",
    ),
    "a list in a batch": (lambda: train(batch={"x": [[1.0, 2.0]]}), r"batch\['x/0/0'\] is 1\.0; use torch\.as_tensor"),
    "a text in a batch": (
        lambda: train(batch={**BATCH, "id": "a"}),
        r"batch\['id'\] is 'a'; leave it out: a batch holds",
    ),
    "a tokenizer's encoding": (
        lambda: train_model(collections.UserDict(tokens=TOKENS, targets=TOKENS)),
        r"the batch is a UserDict; write dict\(\.\.\.\) of it",
    ),
    "None in a batch": (lambda: train(batch={**BATCH, "y": None}), r"batch\['y'\] is None; leave it out"),
    "a scalar in a batch": (
        lambda: train(batch={**BATCH, "n": torch.tensor(1)}),
        r"batch\['n'\] is a scalar; the first dim counts the samples: write n\.expand\(rows\)",
    ),
    "an empty batch": (
        lambda: train(batch={}),
        "the batch has no tensors; give a tree of tensors whose first dim counts",
    ),
    "no rows": (lambda: train(batch={"x": torch.ones(0, 2)}), r"batch\['x'\] has no rows: its shape is \[0, 2\]"),
    "a model's tensor batch": (
        lambda: train_model(TOKENS),
        r"the batch of a Model is a Tensor; write \{\"tokens\": rows\[:, ",
    ),
    "a model's tuple batch": (lambda: train_model((TOKENS, TOKENS)), "the batch of a Model is a tuple; write"),
    "one row": (
        lambda: train_model({"tokens": TOKENS[0], "targets": TOKENS[0]}),
        r"batch\['tokens'\] has shape \[8\]; it must be \[B, T\]",
    ),
    "float tokens": (
        lambda: train_model({"tokens": TOKENS.float(), "targets": TOKENS}),
        r"batch\['tokens'\] is torch\.float32; it must be int64",
    ),
    "no targets": (lambda: train_model({"input_ids": TOKENS}), r"batch\['input_ids'\] is not read; call it 'tokens'"),
    "local_batch without a mesh": (
        lambda: fzero.local_batch(BATCH, None),
        r"mesh is None; write local_batch\(batch, mesh, m",
    ),
    "local_batch of arrays": (
        lambda: fzero.local_batch({"x": np.ones(4)}, ONE),
        r"batch\['x'\] is a ndarray; use torch\.as",
    ),
    "local_batch in none": (lambda: fzero.local_batch(BATCH, ONE, 0), "micro_batches is 0; it must be a whole number"),
    "local_batch of unlike rows": (
        lambda: fzero.local_batch({"x": torch.ones(4), "y": torch.ones(6)}, ONE),
        r"unlike numbers of rows: \{'x': 4, 'y': 6\}; they must agree",
    ),
    # states
    "the pair as state": (
        lambda: fzero.make_train_step(loss, optim.adamw(0.1), fzero.zero_plan(0, PARAMS, ONE))(train(), BATCH),
        r"the state is the pair that a step returned; write state, metrics = step\(state, batch\)",
    ),
    "parameters as state": (
        lambda: fzero.make_train_step(loss, optim.adamw(0.1), fzero.zero_plan(0, PARAMS, ONE))(PARAMS, BATCH),
        "the state is a dict; give the one that init_state, restore or the last step returned",
    ),
    # numbers, kinds and texts that only a later step would meet
    **{
        f"a timeout of {value}": (
            lambda value=value: fzero.make_mesh(timeout_s=value),
            r"make_mesh: timeout_s is .*; it must be a number of seconds above 0 and at most 1e9",
        )
        for value in (float("nan"), -1, 0, 1e30)
    },
    "an inner group of fewer than none": (
        lambda: fzero.Context("hierarchical", inner=-2),
        "context: inner is -2; it must be a whole number of at least 0",
    ),
    "an inner group of True": (lambda: fzero.Context("hierarchical", inner=True), "context: inner is True; it must be"),
    "a trait of another kind": (
        lambda: MODEL.with_traits(whole_entries="mytokens"),
        "with_traits: whole_entries is 'mytokens'; it must be a tuple",
    ),
    "rules that are a number": (lambda: MODEL.with_traits(leaf_rules=3), "with_traits: leaf_rules is 3; it must be"),
    "an unknown trait": (lambda: MODEL.with_traits(frosen=frozenset()), r"no trait 'frosen'.*frozen"),
    "no transformation": (lambda: optim.by_label({}, ()), "by_label: there is no transformation"),
    "a number as parameters": (
        lambda: fzero.full_params(3, fzero.zero_plan(0, PARAMS, ONE)),
        "missing w, b; extra a single leaf, no tree",
    ),
    "a size of True": (lambda: fzero.plan("mlp-tiny", {"dp": True}), r"plan: mesh\['dp'\] is True; it must be a whole"),
    "a spike of a number": (lambda: fzero.Skip(spike=3), r"spike is 3; it must be a fzero\.Spike"),
    "coefficients without a value": (
        lambda: optim.muon(ns_coefficients=(float("nan"), 1.0, 2.0)),
        "muon: ns_coefficients is .*; it must be three finite numbers",
    ),
    "iterations of whole numbers": (
        lambda: optim.muon(ns_dtype=torch.int8),
        r"muon: ns_dtype is torch\.int8; it must be floating-point",
    ),
    "sequences of nothing": (
        lambda: check_batch(models.preset("llama-tiny"), {"tokens": TOKENS[:, :0], "targets": TOKENS[:, :0]}),
        r"batch\['tokens'\] has shape \[4, 0\]; a sequence has at least one token",
    ),
    "fewer parameters than one": (
        lambda: estimate.estimate_model_states(-5, {"dp": 2}),
        r"estimate_model_states: model is -5; it must be .* at least 1 parameter",
    ),
    "a stage of True": (
        lambda: estimate.estimate_model_states(10**9, {"dp": 2}, zero=True),
        "estimate_model_states: zero is True; it must be",
    ),
    "an unknown stage": (lambda: estimate.communicated_elements(1, 4, 2), "zero is 4; it must be one of 0, 1, 2, 3"),
    "no ranks": (
        lambda: estimate.communicated_elements(1, 3, 0),
        "ranks is 0; it must be a whole number of at least 1",
    ),
    "parameters of nan": (lambda: estimate.communicated_elements(float("nan"), 3, 2), "psi is nan; it must be"),
    "a search for nothing": (lambda: fzero.search("mlp-tiny", 1, top=0), "search: top is 0; it must be a whole number"),
    "an empty choice": (lambda: one_of(("", "localsgd")).check("local.method", "x"), 'one of "", localsgd'),
    "an evaluation of another width": (
        lambda: evaluate(lambda state: PARAMS | {"b": torch.ones(2)}),
        r"b has shape \[2\]",
    ),
    "an evaluation of a state": (lambda: evaluate(lambda state: state), r"write eval_step\(state\.params, batch\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line_with_what_to_write(name):
    call, match = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


def module_loss(module):
    def loss(params, batch):
        y = torch.func.functional_call(module, params, (batch["x"],))
        return y.square().sum(), len(y)

    return loss


ACCEPTED = {
    "the name of a policy": lambda: train(policy="bf16", batch={"x": torch.ones(4, 2, dtype=torch.bfloat16)}),
    "a scalar loss": lambda: train(returning(lambda y: y.square().mean())),
    "a Loss": lambda: train(returning(lambda y: models.Loss(y.square().sum(), torch.tensor(4)))),
    "numbers to report": lambda: train(returning(lambda y: (y.square().sum(), 4.0, {"rows": 4, "sum": y.sum()}))),
    "a tensor batch": lambda: train(lambda p, x: ((x @ p["w"]).square().sum(), len(x)), batch=torch.ones(4, 2)),
    "a tuple batch": lambda: train(lambda p, b: ((b[0] @ p["w"]).square().sum(), 4), batch=(torch.ones(4, 2),)),
    "a bare tensor of parameters": lambda: train(lambda p, b: ((b["x"] @ p).square().sum(), 4), torch.ones(2, 3)),
    "parameters of a module": lambda: train(
        module_loss(torch.nn.Linear(2, 3)), dict(torch.nn.Linear(2, 3).named_parameters())
    ),
    "a model": lambda: train_model(batch_of(0)),
    "int32 tokens": lambda: train_model({"tokens": TOKENS.int(), "targets": TOKENS.int()}),
    "a seed's key": lambda: train(seed=fzero.random.key(0)),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_it_is_accepted(name):
    state, metrics = ACCEPTED[name]()
    assert bool(metrics.loss.isfinite()) and not bool(metrics.skipped) and int(state.step) == 1
    assert not any(leaf.requires_grad or leaf.grad_fn for leaf in fzero.pytree.leaves(state))
