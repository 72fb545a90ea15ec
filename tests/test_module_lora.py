"""LoRA on a model made from a module: its gradients are those of the chain rule, its steps those of torch, its products
go back into the module."""

import functools
import gc
import weakref

import own_modules
import pytest
import ranks
import torch
from close import assert_close, assert_same
from law_cases import FP64
from own_modules import points_of, square_loss
from torch import nn

import fzero
from fzero import models, optim
from fzero.core import pytree

slow = pytest.mark.slow
RANK, ALPHA, STEPS, RATE = 2, 6.0, 3, 0.3
TARGETS = {"sequential": "0/weight$", "transformer": r"/([qv]|o|down)/weight$"}
TP = {"^[qkv]$|^up$": "columns", "^o$|^down$": "rows"}


def made(kind, tp=None):
    """(the module, its loss, its batches, its Model, the Model with LoRA)"""
    module, loss, batch_of = own_modules.made(kind)
    model = fzero.from_module(module, loss, batch=batch_of(0), tp=tp)
    return module, loss, batch_of, model, models.lora(model, RANK, ALPHA, TARGETS[kind])


def begun(model, mesh, stage, **options):
    """(plan, state) whose factors b are not zero, so that all gradients are there."""
    tx, frozen = optim.sgd(RATE), models.frozen_leaves(model.config)
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64, frozen=frozen, **options)
    whole = fzero.zero_plan(0, model, fzero.one_process(), policy=FP64, frozen=frozen)
    params = fzero.init_state(model, tx, whole, seed=0).params
    draw = torch.Generator().manual_seed(4)
    params = pytree.map_named(
        lambda name, p: 0.3 * torch.randn(p.shape, generator=draw).double() if name.endswith("_lora_b") else p, params
    )
    return plan, fzero.init_state(params, tx, plan, seed=0)


@functools.cache
def by_torch(kind):
    """(the module's parameters with the products added, losses) after steps of SGD on the factors alone."""
    module, loss, batch_of, _, model = made(kind)
    _, state = begun(model, fzero.one_process(), 0)
    named = pytree.named_leaves(state.params)
    factors = {name: leaf.clone().requires_grad_() for name, leaf in named.items() if "_lora_" in name}
    layers = [f"layers.{i}" for i in range(own_modules.L)] if kind == "transformer" else ["1", "2", "3"]
    start, log = {name: p.detach().clone() for name, p in module.named_parameters()}, []

    def weights():
        out = dict(start)
        for name in factors:
            if name.endswith("_lora_a"):
                a, b = factors[name], factors[name.removesuffix("a") + "b"]
                leaf = name.removesuffix("_lora_a").removeprefix("blocks/").replace("/", ".")
                for i, layer in enumerate(layers):
                    out[f"{layer}.{leaf}"] = start[f"{layer}.{leaf}"] + ALPHA / RANK * (b[i] @ a[i])
        return out

    def call(*args):
        return torch.func.functional_call(module, weights(), args)

    for i in range(STEPS):
        total, number = loss(call, batch_of(i))
        grads = torch.autograd.grad(total / number, list(factors.values()))
        with torch.no_grad():
            for leaf, g in zip(factors.values(), grads):
                leaf -= RATE * g
        log.append(float(total.detach() / number))
    return pytree.map(torch.Tensor.detach, weights()), log


def by_fzero(mesh, kind, stage, tp=None, execution=None):
    module, _, batch_of, _, model = made(kind, tp)
    plan, state = begun(model, mesh, stage)
    step = fzero.make_train_step(model, optim.sgd(RATE), plan, execution=execution or fzero.Execution())
    log = []
    for i in range(STEPS):
        state, metrics = step(state, fzero.local_batch(batch_of(i), mesh))
        log.append(float(metrics.loss))
    fzero.to_module(state, module, plan, model=model)
    return {name: p.detach() for name, p in module.named_parameters()}, log


@pytest.mark.parametrize("kind", ["sequential", pytest.param("transformer", marks=slow)])
def test_steps_are_torchs(kind):
    assert_close(by_fzero(fzero.one_process(), kind, 0), by_torch(kind), rtol=1e-10, atol=1e-12)


@slow
@pytest.mark.parametrize("mesh, stage", [({"dp": 2}, 3), ({"tp": 2}, 0)], ids=["stage 3", "tp"])
def test_steps_on_two_ranks_are_torchs(mesh, stage):
    for result in ranks.run(2, by_fzero, "transformer", stage, TP if "tp" in mesh else None, mesh=mesh):
        assert_close(result, by_torch("transformer"), rtol=1e-10, atol=1e-12)


@pytest.mark.exhaustive
def test_compiled_and_recomputed_steps_are_torchs():
    how = fzero.Execution(compiled=True, remat="full")
    assert_close(
        by_fzero(fzero.one_process(), "transformer", 0, execution=how), by_torch("transformer"), rtol=1e-10, atol=1e-12
    )


def test_it_begins_as_the_module_and_only_factors_are_trained():
    module, loss, batch_of, model, with_lora = made("sequential")
    frozen = models.frozen_leaves(with_lora.config)
    plan = fzero.zero_plan(0, with_lora, fzero.one_process(), policy=FP64, frozen=frozen)
    tx = optim.sgd(RATE)
    state = fzero.init_state(with_lora, tx, plan, seed=0)
    named = pytree.named_leaves(state.params)
    assert named["blocks/0/weight_lora_a"].shape == (3, RANK, own_modules.D)
    assert named["blocks/0/weight_lora_b"].shape == (3, own_modules.D, RANK)
    before = pytree.map(torch.clone, named)
    state, metrics = fzero.make_train_step(with_lora, tx, plan)(state, batch_of(0))
    total, number = loss(module, batch_of(0))
    assert abs(float(metrics.loss) - float(total.detach() / number)) < 1e-12
    after = pytree.named_leaves(state.params)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {"blocks/0/weight_lora_b"}  # a moves from the second step on
    merged = models.merge(with_lora, state.params)
    assert set(pytree.names(merged)) == {name for name in named if "_lora_" not in name}
    fzero.to_module(state, module, model=with_lora)
    for i in range(3):
        assert_same({"w": merged["blocks"]["0"]["weight"][i]}, {"w": module[i + 1][0].weight.detach()})
    assert model.traits.start.keys() == {name for name in with_lora.traits.start}


class Indirect(nn.Module):
    """A linear layer that is never called, and a weight that is no linear layer's."""

    def __init__(self):
        super().__init__()
        self.linear, self.own = nn.Linear(4, 4), nn.Parameter(torch.eye(4))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.linear.weight) + x @ self.own.T


def indirect(targets):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(Indirect(), Indirect(), nn.Linear(4, 1)).double()
    return module, models.lora(fzero.from_module(module, square_loss), RANK, ALPHA, targets)


def test_a_weight_that_is_no_linear_layers_gets_the_sum():
    module, model = indirect("/own$")
    plan, state = begun(model, fzero.one_process(), 0)
    _, metrics = fzero.make_train_step(model, optim.sgd(RATE), plan, donate=False)(state, points_of(0))
    total, number = square_loss(fzero.to_module(state, module, model=model), points_of(0))
    assert abs(float(metrics.loss) - float(total.detach() / number)) < 1e-12


def test_mistakes_are_one_line():
    module, model = indirect("linear/weight")
    plan, state = begun(model, fzero.one_process(), 0)
    with pytest.raises(ValueError, match=r"lora: the layer's code uses linear\.weight without a call of linear"):
        fzero.make_train_step(model, optim.sgd(RATE), plan)(state, points_of(0))
    with pytest.raises(ValueError, match=r"a factor of LoRA; give model=, what models\.lora returned"):
        fzero.to_module(state, module)
    with pytest.raises(ValueError, match=r"lora: targets 'q_proj' matches no leaf of the blocks.*blocks/own"):
        indirect("q_proj")
    with pytest.raises(ValueError, match=r"lora: blocks/linear/bias of shape \(2, 4\) is no weight"):
        indirect("linear")
    with pytest.raises(ValueError, match=r"lora: dora=True is for fzero's own models"):
        models.lora(model, rank=1, targets="/linear/weight$", dora=True)


def test_no_function_of_the_model_holds_the_weights():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).double()
    held = [weakref.ref(p) for p in module.parameters()]
    model = models.lora(fzero.from_module(module, square_loss), RANK, targets="/weight$").with_traits(start={})
    del module
    gc.collect()
    assert not any(one() is not None for one in held) and callable(model.init)


@slow
def test_a_folder_of_transformers_is_tuned_and_written_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    import huggingface_models as theirs

    begin = theirs.MODELS["Qwen3"]()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers.Qwen3ForCausalLM(begin).save_pretrained(tmp_path / "theirs")
    batch, tx = theirs.batch_of("Qwen3", 0), optim.adamw(0.02)
    base = fzero.from_huggingface(tmp_path / "theirs", batch=batch)
    model = models.lora(base, RANK, ALPHA, r"_proj/weight$")
    plan = fzero.zero_plan(3, model, fzero.one_process(), frozen=models.frozen_leaves(model.config))
    state = fzero.init_state(model, tx, plan, seed=0)
    step, losses = fzero.make_train_step(model, tx, plan), []
    for _ in range(15):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    assert losses[-1] < losses[0] - 0.2
    fzero.to_huggingface(state, tmp_path / "theirs", tmp_path / "ours", plan, model=model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    _, metrics = step(state, batch)
    assert abs(float(again(**batch).loss.detach()) - float(metrics.loss)) < 1e-5
