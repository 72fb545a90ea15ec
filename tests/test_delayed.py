"""Delayed updates: the definition written out, what a step of several updates equals, and what is refused.

theta[j+1] = theta[j] - u(gradient of the loss of batch j at theta[j-1])
"""

import functools
import math

import pytest
import ranks
import torch
from close import assert_close, assert_same
from zero_cases import FP64, OPTIMIZERS, batch_for, model_of, whole

import fzero
from fzero import checkpoint, optim
from fzero.models import base
from fzero.sharding import pipeline
from fzero.sharding.pipelines import Pipeline
from fzero.train.batch import local_batch
from fzero.train.row import schedule_of
from fzero.train.state import PREVIOUS, meta_state, state_specs

UPDATES, ROWS = 6, 24
BAD = 2  # the update whose gradient is made not finite, where a case wants one


def batch_of(j, bad=False):
    """The batch of update j; of a `bad` one the loss overflows."""
    batch = batch_for(j, ROWS)
    weight = torch.full((ROWS, 8), math.inf if bad and j == BAD else 1.0, dtype=torch.float64)
    return {**batch, "weight": weight}


def weighed(model):
    """The model whose head's loss is that of its last layer times the rows' weights."""

    def head(params, x, batch, ctx):
        out = model.head(params, x, {name: leaf for name, leaf in batch.items() if name != "weight"}, ctx)
        return out._replace(total=out.total * batch["weight"].mean().to(out.total.dtype))

    return model._replace(head=head) if hasattr(model, "_replace") else functools.partial(model)


@functools.cache
def written_out(name, optimizer, bad=False):
    """(parameters, the version before, optimizer's state, losses) of one process after the updates, by the
    definition."""
    model, tx = model_of(name, dropout=0.0), OPTIMIZERS[optimizer]
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=FP64)
    ctx = base.Ctx(dtype=torch.float64)
    state = fzero.init_state(model, tx, plan, seed=3)
    now = before = state.params
    opt_state, losses = state.opt_state, []
    for j in range(UPDATES):

        def mean(params, j=j):
            out = base.loss(model, params, batch_for(j, ROWS), ctx)
            return out.total / out.num_tokens

        grads, loss = torch.func.grad_and_value(mean)(before)
        losses.append(float(loss))
        before = now
        updates, opt_state = tx.update(grads, opt_state, now)
        now = optim.apply_updates(now, updates)
    return now, before, opt_state, losses


def trained(mesh, cases):
    """[(the whole state, losses) of each case]"""
    out = []
    for name, optimizer, stage, updates, micro, options in cases:
        model, tx = model_of(name, dropout=0.0), OPTIMIZERS[optimizer]
        plan = fzero.zero_plan(stage, model, mesh, policy=FP64, delayed=updates, **options)
        state, local = fzero.init_state(model, tx, plan, seed=3), updates * micro
        step = fzero.make_train_step(model, tx, plan, micro_batches=local, update="delayed")
        losses = []
        for i in range(UPDATES // updates):
            parts = [batch_for(i * updates + j, ROWS) for j in range(updates)]
            batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
            state, metrics = step(state, local_batch(batch, mesh, local))
            losses.append(float(metrics.loss))
        out.append((whole(state, state_specs(plan, tx), mesh), losses))
    return out
