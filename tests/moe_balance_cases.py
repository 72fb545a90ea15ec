"""Balance by a bias, written out: the choices of a whole batch counted one by one, and the bias moved once a step."""

import functools
import importlib
from unittest import mock

import torch
from close import assert_close
from zero_cases import FP64, OPTIMIZERS, batch_for, model_of, train

import fzero
from fzero import models
from fzero.core import pytree
from fzero.kernels import moe
from fzero.models import base

deepseek = importlib.import_module("fzero.models.deepseek")  # the module; the package's name is the model
RATE, STEPS, ROWS = 0.03, 5, 24
SIZES = {"moe dropless": {"balance": "bias", "bias_rate": RATE}, "deepseek": {"bias_rate": RATE}}


def biases(params):
    return {name: leaf for name, leaf in pytree.named_leaves(params).items() if name.endswith("moe/bias")}


def choices(model, params, batch):
    """The experts [B, T, k] of each layer that has any, from a forward pass layer by layer."""
    seen = []

    def noting(f):
        def noted(*args, **options):
            out = f(*args, **options)
            seen.append(out[0])
            return out

        return noted

    ctx = models.Ctx(dtype=torch.float64)
    x, number = model.embed(params, batch, ctx), 0
    with (
        mock.patch.object(moe, "route", noting(moe.route)),
        mock.patch.object(deepseek, "choose_experts", noting(deepseek.choose_experts)),
    ):
        for stack in base.stacks_of(model):
            leaves = pytree.named_leaves(params[stack.name])
            for i in range(next(iter(leaves.values())).shape[0]):
                layer = pytree.from_named({name: leaf[i] for name, leaf in leaves.items()}, params[stack.name])
                x = stack.block(layer, x, ctx._replace(layer=torch.tensor(number)))
                number += 1
    return seen


@functools.cache
def written_out(name):
    """The parameters after some steps of SGD, and the loads [L, E] of each step."""
    model = model_of(name, dropout=0.0, **SIZES[name])
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=FP64)
    params, loads = fzero.init_state(model, OPTIMIZERS["sgd"], plan, seed=3).params, []

    def mean_loss(params, batch):
        out = models.loss(model, params, batch, models.Ctx(dtype=torch.float64))
        return out.total / out.num_tokens

    for step in range(STEPS):
        batch = batch_for(step, ROWS)
        (bias,) = biases(params).values()
        counted = torch.zeros_like(bias)
        for layer, ids in enumerate(choices(model, params, batch)):
            for expert in ids.flatten().tolist():
                counted[layer, expert] += 1
        moved = bias.clone()
        for layer, row in enumerate(counted.tolist()):
            for expert, load in enumerate(row):
                mean = sum(row) / len(row)
                moved[layer, expert] += RATE * ((load < mean) - (load > mean))
        grads = torch.func.grad(mean_loss)(params, batch)
        params = pytree.map(lambda p, g: p - 2e-3 * g, params, grads)
        params = pytree.map_named(lambda n, leaf, moved=moved: moved if n.endswith("moe/bias") else leaf, params)
        loads.append(counted)
    return params, loads


def equals_written_out(name, micro_batches, **options):
    """A run on one process is what is written out."""
    state, _, _ = train(fzero.one_process(), name, "sgd", 0, micro_batches, steps=STEPS, sizes=SIZES[name], **options)
    assert_close(state.params, written_out(name)[0], rtol=1e-10, atol=1e-10)
