"""1-bit Adam: steps are the method written out, what was sent and is left is what was owed, bytes are the plan's."""

import contextlib
import dataclasses
import math
from unittest import mock

import pytest
import ranks
import torch
from close import assert_close
from law_cases import FP64

import fzero
from fzero import optim
from fzero.core import pytree
from fzero.core.precision import LossScale
from fzero.train.batch import local_batch

exhaustive = pytest.mark.exhaustive
STEPS, FREEZE, RATE, B1, B2, EPS, DECAY = 20, 6, 0.05, 0.8, 0.9, 1e-6, 0.1
SHAPES = {"blocks/w": (2, 8, 16), "b": (8,), "u": (8, 32), "v": (8, 32)}  # b travels as it is
SCALED = dataclasses.replace(FP64, loss_scale=LossScale(init=2.0**10, window=4, hysteresis=1))
SKIPPED = (3, 9, 13)  # steps whose gradient is not finite on one rank
BETAS = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": DECAY, "mask": "w|u"}
MAKE = {"onebit_adam": lambda clip: optim.onebit_adam(RATE, freeze=FREEZE, clip=clip, **BETAS)}


# ---- by hand: a loss whose gradient is the batch itself --------------------------------------------------------------


def linear(params, batch):
    named = pytree.named_leaves(params)
    return sum((batch[name] * leaf).sum() for name, leaf in named.items()), batch["b"].shape[0]


def data(step, rows, skipped):
    g = torch.Generator().manual_seed(step)
    found = {name: torch.randn(rows, *shape, generator=g, dtype=torch.float64) for name, shape in SHAPES.items()}
    found["v"][:, 3] = 0.0  # rows that never have a gradient
    if step in skipped:
        found["u"][1, 2, 3] = math.inf
    return found


def first_params():
    g = torch.Generator().manual_seed(99)
    named = {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {"blocks": {"w": named.pop("blocks/w")}, **named}


def by_steps(mesh, method, stage, micro_batches, policy, skipped, clip):
    """(whole parameters, this rank's errors, whether all ranks have its m, the m after each step) after STEPS steps."""
    options = {"reduce": "once"} if stage > 1 else {}
    plan = fzero.zero_plan(stage, first_params(), mesh, policy=policy, codec="grads=1bit", **options)
    state = fzero.init_state(first_params(), tx := MAKE[method](clip), plan, seed=0)
    step = fzero.make_train_step(linear, tx, plan, micro_batches=micro_batches)
    rows, momenta = 2 * micro_batches * mesh.data_size, []
    for i in range(STEPS):
        state, metrics = step(state, local_batch(data(i, rows, skipped), mesh, micro_batches))
        assert bool(metrics.skipped) == (i in skipped)
        momenta.append({name: m.clone() for name, m in pytree.named_leaves(state.opt_state.m).items() if name != "b"})
    shards = optim.sharded(plan.params, mesh, like=plan.like)
    whole = {name: shards.gather(name, leaf) for name, leaf in pytree.named_leaves(state.params).items()}
    at = {name: plan.mesh["dp"].rank for name in state.opt_state.server}
    return whole, (state.opt_state.worker, state.opt_state.server, at), momenta


def mean_abs(x, mask):
    """The scale of a block [n]."""
    return x.abs().sum() / mask.sum()


def sign(x):
    return torch.where(x >= 0, torch.ones_like(x), -torch.ones_like(x))


def sign_sum(n, terms, e, f, mask):
    """(sum by signs of terms [n, layers, ...], new errors e of their shape, new f [layers, ...]) as the paper has it."""
    layers, shape = terms.shape[1], terms.shape[2:]
    x, new = (terms + e).view(n, layers, n, -1), torch.zeros(n, layers, n, terms[0, 0].numel() // n).double()
    served, y = torch.zeros_like(new[0]), f.view(layers, n, -1).clone()
    on = mask.view(layers, n, -1)
    for layer in range(layers):
        for part in range(n):
            at = on[layer, part]
            for r in range(n):
                one = x[r, layer, part]
                sent = mean_abs(one[at], at) * sign(one) * at
                new[r, layer, part] = (one - sent) * at
                y[layer, part] += sent
            total = y[layer, part]
            served[layer, part] = mean_abs(total[at], at) * sign(total) * at
    left = (y - served) * on
    return served.view(layers, *shape), new.view(n, layers, *shape), left.view(layers, *shape)


def stack(leaf, name):
    return leaf if name.startswith("blocks/") else leaf[None]


def norm_of(tree):
    return torch.stack([x.square().sum() for x in tree.values()]).sum().sqrt()


def by_hand(n, method, micro_batches, skipped, clip):
    """The same by the method written out: (parameters, errors, errors of servers, what was owed)."""
    p = {name: leaf.clone() for name, leaf in pytree.named_leaves(first_params()).items()}
    m, v = ({name: torch.zeros_like(leaf) for name, leaf in p.items()} for _ in range(2))
    e = {name: torch.zeros(n, *stack(p[name], name).shape).double() for name in p if name != "b"}
    f = {name: torch.zeros_like(x[0]) for name, x in e.items()}
    t = 0
    for i in range(STEPS):
        if i in skipped:
            continue
        batch = data(i, 2 * micro_batches * n, ())
        g = {k: x.view(micro_batches, n, 2, *SHAPES[k]).sum((0, 2)) / (2 * micro_batches * n) for k, x in batch.items()}
        if t < FREEZE:
            total = {k: x.sum(0) for k, x in g.items()}
            by = min(1.0, clip / norm_of(total)) if clip else 1.0
            for k in p:
                m[k] = B1 * m[k] + (1 - B1) * by * total[k]
                v[k] = B2 * v[k] + (1 - B2) * (by * total[k]) ** 2
        else:
            for k in p:
                if k == "b":
                    m[k] = B1 * m[k] + (1 - B1) * g[k].sum(0)
                    continue
                terms = torch.stack([stack(B1 * m[k] / n + (1 - B1) * g[k][r], k) for r in range(n)])
                sent, e[k], f[k] = sign_sum(n, terms, e[k], f[k], stack(m[k] != 0, k))
                m[k] = sent.view(m[k].shape)
            by = min(1.0, clip / norm_of(m)) if clip else 1.0
            m = {k: by * x for k, x in m.items()}
        t += 1
        for k in p:
            r = (m[k] / (1 - B1**t)) / ((v[k] / (1 - B2 ** min(t, FREEZE))).sqrt() + EPS)
            p[k] = p[k] - RATE * (r + DECAY * p[k] * (k in ("blocks/w", "u")))
    return p, e, f


def expect_law(n, method, stage, micro_batches=1, policy=FP64, skipped=(), clip=0.0, mistake=None):
    """The steps on n ranks are those by hand; what was sent and what is left are what was owed."""
    results = ranks.run(n, with_mistake, mistake, method, stage, micro_batches, policy, skipped, clip)
    params, e, f = by_hand(n, method, micro_batches, skipped, clip)
    for rank, (found, (worker, server, _), _) in enumerate(results):
        assert_close({k: found[k] for k in params}, params, rtol=1e-12, atol=1e-12)
        assert_close({k: worker[k][:, 0] for k in e}, {k: x[rank] for k, x in e.items()}, rtol=1e-11, atol=1e-12)
        cut = {k: x.chunk(n, 1)[rank].reshape(server[k].shape) for k, x in f.items()}
        assert_close(server, cut, rtol=1e-11, atol=1e-12)
    assert all(float(x.abs().max()) > 1e-4 for x in [*e.values(), *f.values()])
    if not clip:
        expect_nothing_lost(n, micro_batches, skipped, results)


def expect_nothing_lost(n, micro_batches, skipped, results):
    """b1 m + (1 - b1) g is owed in a step and the new m is sent: the differences add up to the errors."""
    momenta, made = results[0][2], [i for i in range(STEPS) if i not in skipped]
    for name in momenta[0]:
        owed = torch.zeros(SHAPES[name], dtype=torch.float64)
        for before, i in zip(made[FREEZE - 1 :], made[FREEZE:]):
            g = data(i, 2 * micro_batches * n, ())[name].sum(0) / (2 * micro_batches * n)
            owed += B1 * momenta[before][name] + (1 - B1) * g - momenta[i][name]
        left = sum(worker[name][:, 0] for _, (worker, *_), _ in results)
        parts = [stack(server[name], name) for _, (_, server, _), _ in results]
        left = left + torch.cat(parts, 1)
        assert_close(owed.view(left.shape), left, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "n, stage, micro_batches, options",
    [
        (2, 1, 2, {"policy": SCALED, "skipped": SKIPPED}),
        (4, 0, 1, {"clip": 0.25}),
        pytest.param(2, 0, 1, {}, marks=exhaustive),
        pytest.param(4, 1, 1, {}, marks=exhaustive),
        pytest.param(2, 2, 2, {"clip": 0.25}, marks=exhaustive),
        pytest.param(4, 3, 2, {"policy": SCALED, "skipped": SKIPPED}, marks=exhaustive),
        pytest.param(2, 3, 1, {}, marks=exhaustive),
        pytest.param(4, 2, 1, {}, marks=exhaustive),
    ],
)
@pytest.mark.parametrize("method", MAKE)
def test_steps_are_the_method_written_out(method, n, stage, micro_batches, options):
    expect_law(n, method, stage, micro_batches, **options)


def with_mistake(mesh, mistake, *case):
    with mock.patch.object(*MISTAKES[mistake]) if mistake else contextlib.nullcontext():
        return by_steps(mesh, *case)


MISTAKES = {}
