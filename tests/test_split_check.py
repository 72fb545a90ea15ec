"""A first step compares the layers of a module that tp splits with whole ones, and refuses those that differ."""

import pytest
import ranks
import torch
from own_modules import points_of, square_loss
from torch import nn

import fzero
from fzero import optim
from fzero.train import split_check

D = 8


class Layer(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(D, D), nn.Linear(D, D), between

    def forward(self, x):
        return x + self.down(self.between(self.up(x)))


def normed(y):
    return y / y.square().mean(-1, keepdim=True).sqrt()


BETWEEN = {"each feature": torch.tanh, "a norm": normed, "its gradient alone": lambda y: y + scaled(y)}


class Scaled(torch.autograd.Function):
    """0, whose gradient goes through a mean over all features."""

    @staticmethod
    def forward(y):
        return torch.zeros_like(y)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g.mean(-1, keepdim=True).expand(g.shape)


scaled = Scaled.apply


def first_step(mesh, kind, stage):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, D), Layer(BETWEEN[kind]), Layer(BETWEEN[kind]), nn.Linear(D, 1))
    model = fzero.from_module(module, square_loss, tp={"^up$": "columns", "^down$": "rows"})
    plan, tx = fzero.zero_plan(stage, model, mesh), optim.sgd(0.1)
    batch = fzero.local_batch({name: leaf.float() for name, leaf in points_of(0).items()}, mesh)
    try:
        state = fzero.init_state(model, tx, plan, seed=0)
        return str(float(fzero.make_train_step(model, tx, plan)(state, batch)[1].loss))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("kind", BETWEEN)
def test_a_layer_that_works_over_split_features_is_refused(kind):
    one = first_step(fzero.one_process(), kind, 0)
    for said in ranks.run(2, first_step, kind, 0, mesh={"tp": 2}):
        if kind == "each feature":
            assert abs(float(said) - float(one)) < 1e-5 * float(one)
        else:
            what = "the result 0" if kind == "a norm" else "the gradient of"
            assert said.startswith(f"tp=2: a layer that tp splits differs from a whole one: {what}") or (
                kind == "a norm" and "differs from a whole one: the gradient of" in said
            ), said
            assert "leave the linear layers beside it out of tp" in said and "\n" not in said


@pytest.mark.slow
def test_parameters_in_shards_of_two_axes_are_gathered_for_it():
    losses = ranks.run(4, first_step, "each feature", 3, mesh={"dp": 2, "tp": 2})
    assert len({float(said) for said in losses}) == 1
    assert "differs from a whole one" in ranks.run(4, first_step, "a norm", 3, mesh={"dp": 2, "tp": 2})[3]


def test_the_check_allows_less_than_the_mistake_of_half_a_norm_and_more_than_rounding():
    y = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    halves = torch.cat([normed(half) for half in y.chunk(2, -1)], -1)
    mistake = float((halves - normed(y)).abs().max() / normed(y).abs().max())
    rounding = float((y @ y.T - (y.flip(1) @ y.flip(1).T)).abs().max() / (y @ y.T).abs().max())
    assert rounding * 10 < split_check.MOST[torch.float32] < mistake / 10
