"""Progressive layer dropping: a step is that of the layers that stay, on every mesh, and the others compute nothing."""

import math
from collections import Counter
from dataclasses import replace
from unittest import mock

import launched
import pytest
import ranks
import torch
from close import assert_close
from law_cases import config_of
from zero_cases import OPTIMIZERS, batch_for, model_of, packed_batch_for, train, trained_whole

import fzero
from fzero import config_from_deepspeed, models
from fzero.core import prng, pytree
from fzero.models.dropping import keep_probability
from fzero.run import from_table
from fzero.train.loss import draws_of

F64 = torch.float64
SIZES = {"n_layers": 4, "vocab_size": 20, "dropout": 0.0}
ADDED = ("w_o", "b_o", "w_out", "b_out", "w_down", "b_down")  # what a block adds to x is linear in these


def kept_alone(params, scales):
    """The parameters of a model of the layers that stay, whose branches are as much larger."""
    stay = [i for i, scale in enumerate(scales.tolist()) if scale]

    def leaf(name, x):
        factors = scales[stay].reshape(-1, *[1] * (x.dim() - 1)) if name.split("/")[-1] in ADDED else 1.0
        return x[stay] * factors

    return {**params, "blocks": pytree.map_named(leaf, params["blocks"])}, len(stay)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_step_is_that_of_the_layers_that_stay(kind):
    config, batch = config_of(kind, **SIZES), packed_batch_for(0, 3)
    model = models.layer_drop(models.build(config), 0.25, 100.0)
    params = models.init_params(model, prng.key(1), F64)
    assert {name.split("/")[-1] for name in pytree.names(params["blocks"])} & {*ADDED}
    seen = set()
    for step in range(1, 5):
        scales = model.traits.drop(prng.fold_in(prng.key(5), step), torch.tensor(step))
        keep = keep_probability(0.25, 100.0, torch.tensor(step), 4)
        assert all(scale in (0, pytest.approx(1 / p)) for scale, p in zip(scales.tolist(), keep.tolist()))
        seen.add(tuple((scales == 0).tolist()))
        alone, layers = kept_alone(params, scales)
        plain = models.build(replace(config, n_layers=layers))
        expected = models.loss(plain, alone, batch, models.Ctx(dtype=F64)).total
        found = models.loss(model, params, batch, models.Ctx(dtype=F64, draws=models.LayerDraws(scales=scales))).total
        assert_close(found, expected, rtol=1e-12, atol=1e-12)
        # A train step, whose gradient is by parts, without the layers that are dropped.
        plan = fzero.zero_plan(0, model, fzero.one_process(), policy=fzero.fp64())
        tx = fzero.optim.sgd(1.0)
        state = fzero.init_state(params, tx, plan, seed=3)._replace(step=torch.tensor(step))
        own = draws_of(model, state)["scales"]

        def mean(p, own=own):
            out = models.loss(model, p, batch, models.Ctx(dtype=F64, draws=models.LayerDraws(scales=own)))
            return out.total / out.num_tokens

        wanted = pytree.map(lambda p, g: p - g, params, torch.func.grad(mean)(params))
        new, metrics = fzero.make_train_step(model, tx, plan)(state, batch)
        assert_close(new.params, wanted, rtol=1e-12, atol=1e-12)
        assert_close(metrics.loss, mean(params), rtol=1e-12, atol=1e-12)
    assert len(seen) > 1


def test_layers_that_are_dropped_compute_nothing_forward_and_backward():
    made, model = Counter(), model_of("layer-drop")
    (block,) = (model.block,) if not isinstance(model.block, tuple) else model.block[:1]

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, number):
            ctx.number = number
            made["forward", number] += 1
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            made["backward", ctx.number] += 1
            return grad, None

    watched = model._replace(block=lambda p, x, ctx: Watched.apply(block(p, x, ctx), int(ctx.layer)))
    plan, tx = fzero.zero_plan(0, watched, fzero.one_process(), policy=fzero.fp64()), OPTIMIZERS["clipped adam"]
    state, dropped = fzero.init_state(watched, tx, plan, seed=3), 0
    step = fzero.make_train_step(watched, tx, plan, micro_batches=2)
    for i in range(6):
        gone = {n for n, scale in enumerate(draws_of(watched, state)["scales"].tolist()) if scale == 0}
        made.clear()
        before = pytree.map(torch.clone, state.params["blocks"])
        state, _ = step(state, batch_for(i, 8))
        runs = {*range(4)} - gone
        assert {n for way, n in made if way == "forward"} == runs  # two times each, and again where calls are compared
        assert {n: made["backward", n] for n in range(4) if made["backward", n]} == dict.fromkeys(runs, 2)
        if i == 0:  # later Adam moves them by what it remembers
            moved = {
                n
                for n in range(4)
                if not torch.equal(before["attn"]["w_o"][n], state.params["blocks"]["attn"]["w_o"][n])
            }
            assert moved == {*range(4)} - gone
        dropped += len(gone)
    assert dropped > 4


def test_each_layer_stays_as_often_as_the_schedule_says():
    theta, gamma, layers = 0.4, 0.01, 5
    model = models.layer_drop(models.build(config_of("gpt2", **{**SIZES, "n_layers": layers})), theta, gamma)
    for step in (0, 50, 10_000):
        now = (1 - theta) * math.exp(-gamma * step) + theta
        wanted = torch.tensor([1 - n / layers * (1 - now) for n in range(layers)], dtype=F64)
        assert_close(keep_probability(theta, gamma, torch.tensor(step), layers), wanted, rtol=1e-12, atol=1e-12)
        draw = lambda n, step=step: model.traits.drop(prng.fold_in(prng.key(0), n), torch.tensor(step))  # noqa: E731
        scales = torch.func.vmap(draw)(torch.arange(2000))
        assert ((scales > 0).double().mean(0) - wanted).abs().max() < 5 * 0.5 / 2000**0.5
        assert (scales.mean(0) - 1).abs().max() < 0.12, "in the mean a layer adds what it adds"
        assert (scales[:, 0] == 1).all()


def test_evaluations_and_a_theta_of_one_have_all_layers():
    model, batch = model_of("layer-drop"), batch_for(0, 4)
    params = models.init_params(model, prng.key(1))
    plain = models.loss(model.with_traits(drop=None), params, batch, models.Ctx())
    assert torch.equal(models.loss(model, params, batch, models.Ctx()).total, plain.total)
    plan = fzero.zero_plan(0, model, fzero.one_process())
    assert torch.equal(fzero.make_eval_step(model, plan)(params, batch).total, plain.total)
    assert (models.layer_drop(model, 1.0).traits.drop(prng.key(0), torch.tensor(99)) == 1).all()


MESHES = {
    "dp2": ({"dp": 2}, {}),
    "tp2": ({"tp": 2}, {}),
    "pp2": ({"pp": 2}, {}),
    "cp2": ({"cp": 2}, {}),
    "rp2": ({"rp": 2}, {}),
    "dp2 x pp2": ({"dp": 2, "pp": 2}, {}),
    "pp2, split": ({"pp": 2}, {"plan_options": {"pipeline": fzero.Pipeline("zb-h1")}}),
}


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=[] if m == "dp2" else pytest.mark.slow) for m in MESHES])
def test_steps_equal_one_process(mesh):
    sizes, more = MESHES[mesh]
    count, each = math.prod(sizes.values()), 4 // sizes.get("dp", 1)
    options = {"steps": 7, "rows": 8}  # in the sixth layer 1 is dropped, and layer 3, also a rank's second, is not
    expected, _, log = train(fzero.one_process(), "layer-drop", "clipped adam", 0, 4, **options)
    stages = (0, 3) if mesh in ("dp2", "rp2") else (0,)
    cases = [(("layer-drop", "clipped adam", stage, each), options | more) for stage in stages]
    for state, found in ranks.run(count, trained_whole, cases, mesh=sizes, timeout_s=300)[0]:
        assert_close(found, log, rtol=1e-10, atol=1e-12)
        assert_close(state.params, expected.params, rtol=1e-10, atol=1e-10)


def dropped_by_rank(mesh, options):
    """Steps in which each rank draws layers of its own."""

    def drawn(model, state):
        return draws_of(model, state._replace(key=prng.fold_in(state.key, mesh.data_rank)))

    with mock.patch("fzero.train.step.draws_of", drawn):
        return train(mesh, "layer-drop", "clipped adam", 0, 2, **options)[2]


def test_layers_that_each_rank_draws_for_itself_are_noticed():
    options = {"steps": 3, "rows": 8}
    expected = train(fzero.one_process(), "layer-drop", "clipped adam", 0, 4, **options)[2]
    found = ranks.run(2, dropped_by_rank, options, mesh={"dp": 2})[0]
    with pytest.raises(AssertionError):
        assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "execution",
    [{"remat": "full"}, {"remat": "every:2"}, pytest.param({"compiled": True}, marks=pytest.mark.slow)],
    ids=str,
)
def test_recomputation_and_compilation_change_nothing(execution):
    expected = train(fzero.one_process(), "layer-drop", "clipped adam", 0, 2, steps=4, rows=8)[0].params
    made = train(
        fzero.one_process(), "layer-drop", "clipped adam", 0, 4, steps=4, rows=8, execution=fzero.Execution(**execution)
    )
    assert_close(made[0].params, expected, rtol=1e-10, atol=1e-10)


def test_states_that_a_step_is_mapped_over_drop_layers_each_of_its_own():
    """There a layer that is dropped counts 0 times."""
    model, tx = model_of("layer-drop"), OPTIMIZERS["clipped adam"]
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=fzero.fp64())
    pure, donated = (fzero.make_train_step(model, tx, plan, donate=donate) for donate in (False, True))

    def init(key):
        return fzero.init_state(model, tx, plan, seed=key)

    keys = torch.stack([prng.key(seed) for seed in range(3)])
    together, alone, gone = torch.func.vmap(init)(keys), [init(key) for key in keys], set()
    for i in range(3):
        gone |= {tuple((draws_of(model, state)["scales"] == 0).tolist()) for state in alone}
        together, _ = torch.func.vmap(pure, in_dims=(0, None))(together, batch_for(i, 4))
        alone = [donated(state, batch_for(i, 4))[0] for state in alone]
    for i, state in enumerate(alone):
        assert_close(pytree.map(lambda x, i=i: x[i], together.params), state.params, rtol=1e-9, atol=1e-10)
    assert len(gone) > 2


# ---- runs ----


def test_deepspeed_s_table_is_taken():
    own = {"enabled": True, "theta": 0.5, "gamma": 0.01}
    train = config_from_deepspeed({"progressive_layer_drop": own}, {"preset": "gpt2-tiny"}).train
    assert (train.layer_drop_theta, train.layer_drop_gamma) == (0.5, 0.01)
    for other in (own | {"enabled": False}, {"enabled": True}, {"enabled": True, "gamma": 0.01}):
        train = config_from_deepspeed({"progressive_layer_drop": other}, {"preset": "gpt2-tiny"}).train
        assert (train.layer_drop_theta, train.layer_drop_gamma) == (1.0, 0.001)
    with pytest.warns(UserWarning, match=r"ignored.*progressive_layer_drop\.theta0 \(did you mean theta\?\)"):
        config_from_deepspeed({"progressive_layer_drop": {"theta0": 1}}, {"preset": "gpt2-tiny"})


@pytest.mark.slow
def test_a_resumed_run_drops_what_the_whole_one_does(fz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launched.write_text(tmp_path)
    own = ("--set", "train.layer_drop_theta=0.3", "--set", "train.layer_drop_gamma=1.0")
    start = ("pretrain", *launched.TINY, *launched.SHORT, *own, "--prompt", "")
    code, out, err = fz(*start, "--out", "whole")
    assert (code, err) == (0, "") and "layers are dropped: of the last steps the last layer is in 65%" in out
    assert fz(*start, "--out", "parts", "--stop-at", 3)[0] == 0 and fz("pretrain", "--resume", "--out", "parts")[0] == 0
    assert fz("pretrain", *launched.TINY, *launched.SHORT, "--prompt", "", "--out", "plain")[0] == 0
    whole, parts, plain = (launched.rows(tmp_path / run) for run in ("whole", "parts", "plain"))
    assert whole == parts and whole[0]["loss"] == plain[0]["loss"] and whole[-1]["loss"] != plain[-1]["loss"]


ERRORS = [
    ({"train": {"layer_drop_theta": 0.0}}, "train.layer_drop_theta is 0.0; it must be above 0 and at most 1"),
    ({"train": {"layer_drop_theta": 1.5}}, "train.layer_drop_theta is 1.5; it must be above 0 and at most 1"),
    ({"train": {"layer_drop_theta": 0.5, "layer_drop_gamma": -1.0}}, "train.layer_drop_gamma is -1.0; it must be at"),
    ({"train": {"layer_drop_gamma": 0.1}}, "train.layer_drop_gamma is 0.1 and train.layer_drop_theta is 1: no layer"),
    ({"train": {"layer_drop_theta": 0.5, "random_ltd": 8}}, "train.random_ltd is 8, which drops in layers too"),
    ({"train": {"layer_drop_theta": 0.5, "capture": "auto"}}, "train.capture is auto: a graph has all layers"),
    ({"preset": "mixtral-tiny", "train": {"layer_drop_theta": 0.5}}, "MoEConfig; it takes a gpt2 or a llama"),
]


@pytest.mark.parametrize(("values", "message"), ERRORS, ids=lambda value: str(value)[:40])
def test_what_does_not_go_together_is_refused(values, message):
    with pytest.raises(ValueError) as error:
        from_table({"preset": "llama-tiny", **values})
    assert message in str(error.value) and "\n" not in str(error.value)
