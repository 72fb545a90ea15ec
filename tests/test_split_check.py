"""A first step compares the layers of a module that tp splits, and a loss of one's own that cp or tp splits, with whole
ones, and refuses those that differ."""

import pytest
import ranks
import torch
from own_modules import points_of, square_loss
from torch import nn

import fzero
from fzero import models, optim, psum, pvary
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
    assert rounding * 10 < split_check.MAX_DIFFERENCE[torch.float32] < mistake / 10


BASE = models.mlp(models.MLPConfig(vocab_size=16, max_len=8192))


def mean_of_a_sequence(params, x, batch, ctx):
    pooled = x.mean(1)
    return models.Loss(pooled.square().mean(-1).sum(), torch.tensor(len(pooled)))


def mean_over_cp(params, x, batch, ctx, spread=pvary):
    cp = ctx.mesh["cp"]
    pooled = spread(psum(x.sum(1), cp), cp) / (cp.size * x.shape[1])
    return models.Loss(pooled.square().mean(-1).sum() * (cp.rank == 0), torch.tensor(len(pooled) * (cp.rank == 0)))


def mean_without_gradients_of_others(params, x, batch, ctx):
    return mean_over_cp(params, x, batch, ctx, lambda pooled, cp: pooled)


def weighted_tokens(params, x, batch, ctx):
    losses = (x[..., :3] * batch["points"]).square().sum(-1) * batch["weights"]
    return models.Loss(losses.sum(), batch["weights"].sum())


def rows_counted(params, x, batch, ctx):
    return models.Loss(x.square().mean(-1).sum(), torch.tensor(len(x)))


def contrast_of_positions(params, x, batch, ctx):
    scores = x @ x.transpose(1, 2)
    return models.Loss(-scores.log_softmax(-1).diagonal(dim1=1, dim2=2).sum(), torch.tensor(x[..., 0].numel()))


def of_a_table(params, x, batch, ctx):
    return models.Loss((x.square().mean(-1) * batch["table"].sum(1)[:, None]).sum(), torch.tensor(x[..., 0].numel()))


def last_dim_by_token(params, x, batch, ctx):
    return models.Loss((x.square().mean(-1) * batch["heads"].sum(1)).sum(), torch.tensor(x[..., 0].numel()))


def metric_of_a_rank(params, x, batch, ctx):
    losses = x.square().mean(-1)
    return models.Loss(losses.sum(), torch.tensor(losses.numel()), {"largest": losses.max()})


def cumulated(p, x, ctx):
    return x + torch.tanh(x.cumsum(1) * p["scale"])


# What a first step under cp says of it; "" where it has the numbers of one process.
OVER_CP = {
    "mean_of_a_sequence": "own head does not add up over the ranks: num_tokens is 4, and 2 of whole sequences",
    "mean_over_cp": "",
    "mean_without_gradients_of_others": "own head gives embeddings gradients that differ",
    "weighted_tokens": "",
    "rows_counted": "num_tokens is 4, and 2",
    "contrast_of_positions": "the loss's sum is",
    "of_a_table": "the loss's sum is",
    "of_a_table, declared": "",
    "last_dim_by_token": "own head fails on a rank's tokens, and not on whole sequences: The size of tensor",
    "metric_of_a_rank": "extra['largest'] is",
    "cumulated": "own block does not add up over the ranks: the loss's sum is",
}


def own_model(name):
    if name == "cumulated":
        return BASE._replace(block=cumulated)
    head, _, declared = name.partition(", ")
    return BASE._replace(head=globals()[head]).with_traits(whole_entries=("table",) if declared else ())


def own_batch(tokens):
    draw = torch.Generator().manual_seed(1)

    def some(*shape):
        return torch.rand(2, *shape, generator=draw)

    ids = torch.randint(0, 16, (2, tokens), generator=draw)
    out = {"tokens": ids, "targets": ids, "points": some(tokens, 3), "weights": some(tokens)}
    return out | {"table": some(tokens), "heads": some(2, tokens)}


def own_first_steps(mesh, names, tokens=16, stage=0, sequence=False, evaluate=False):
    """By name the loss, count and norm of a first step, or its error."""
    out = {}
    for name in names:
        model = own_model(name)
        plan, tx = fzero.zero_plan(stage, model, mesh, sequence=sequence), optim.sgd(0.1)
        batch = fzero.local_batch(own_batch(tokens), mesh)
        state = fzero.init_state(model, tx, plan, seed=0)
        try:
            if evaluate:
                loss = fzero.make_eval_step(model, plan)(state.params, batch)
                out[name] = [float(loss.total / loss.num_tokens), float(loss.num_tokens)]
            else:
                _, metrics = fzero.make_train_step(model, tx, plan)(state, batch)
                out[name] = [float(metrics.loss), float(metrics.num_tokens), float(metrics.grad_norm)]
        except ValueError as error:
            out[name] = str(error)
    return out


def expect_said(found, whole, said, over):
    assert all(one == found[0] for one in found)
    for name, words in said.items():
        if words:
            line = found[0][name]
            assert isinstance(line, str), (name, line)
            assert line.startswith(f"{over}: the model's own ") and words in line and "\n" not in line, (name, line)
            assert "return sums over a rank's tokens" in line or "under tp all ranks return" in line
        else:
            assert found[0][name] == pytest.approx(whole[name], rel=1e-5), name


def test_a_loss_that_does_not_add_up_over_cp_is_refused_and_entries_by_token_are_cut():
    whole = own_first_steps(fzero.one_process(), OVER_CP)
    expect_said(ranks.run(2, own_first_steps, list(OVER_CP), mesh={"cp": 2}), whole, OVER_CP, "cp=2")


# A head that all ranks of tp compute alike; with sequence parallelism x is of a rank's tokens.
OVER_TP = {"mean_of_a_sequence": "", "weighted_tokens": "", "rows_counted": ""}
OVER_SEQUENCE = {
    "mean_of_a_sequence": "the loss's sum is",
    "weighted_tokens": "own head fails on a rank's tokens",
    "rows_counted": "the loss's sum is",
}


@pytest.mark.slow
def test_own_heads_over_other_meshes_stages_lengths_and_in_evaluations():
    one, names = fzero.one_process(), list(OVER_CP)
    whole = own_first_steps(one, names)
    expect_said(ranks.run(2, own_first_steps, list(OVER_TP), mesh={"tp": 2}), whole, OVER_TP, "tp=2")
    found = ranks.run(2, own_first_steps, list(OVER_SEQUENCE), 16, 0, True, mesh={"tp": 2})
    expect_said(found, whole, OVER_SEQUENCE, "tp=2")
    evaluated = own_first_steps(one, names, evaluate=True)
    expect_said(ranks.run(2, own_first_steps, names, 16, 0, False, True, mesh={"cp": 2}), evaluated, OVER_CP, "cp=2")
    some = [name for name in names if name not in ("mean_of_a_sequence", "rows_counted")]
    for sizes in ({"dp": 2, "cp": 2}, {"cp": 2, "pp": 2}):
        said = {name: OVER_CP[name] for name in some}
        expect_said(ranks.run(4, own_first_steps, some, 16, 3 if "dp" in sizes else 1, mesh=sizes), whole, said, "cp=2")
    said = {name: OVER_CP[name] for name in ("mean_over_cp", "mean_of_a_sequence", "of_a_table, declared")}
    found = ranks.run(2, own_first_steps, list(said), 4096, mesh={"cp": 2})
    expect_said(found, own_first_steps(one, list(said), 4096), said, "cp=2")
