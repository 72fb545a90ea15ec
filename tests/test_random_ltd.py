"""Random layerwise token dropping: the layers written out, meshes and resumes equal to one process, what is refused."""

import functools
import math
import sys
from dataclasses import replace
from unittest import mock

import pytest
import ranks
import torch
from close import assert_close
from launched import rows
from law_cases import config_of
from zero_cases import packed_batch_for, train, trained_whole

import fzero
from fzero import models
from fzero.core import prng, pytree
from fzero.models import forward
from fzero.models.dropping import sample_positions
from fzero.run import from_table
from fzero.run.config.stages import count_tokens, stages_of

F64 = torch.float64
SIZES = {"n_layers": 4, "vocab_size": 20, "dropout": 0.0}
KEY = prng.key(7)


def gradients(model, params, batch, ctx):
    def total(p):
        return models.loss(model, p, batch, ctx).total

    return torch.func.grad_and_value(total)(params)


def packed(rows=3):
    batch = packed_batch_for(0, rows)
    return {**batch, "documents": batch["documents"].to(torch.int32), "mask": torch.ones_like(batch["mask"])}


def written_out(model, params, batch, keep, first):
    """The loss with layers row by row, each on the tokens that its row keeps."""
    ctx = forward.prepare(model, batch, models.Ctx(dtype=F64, key=KEY, tokens=models.TokenLayout(first=first)))
    x = model.embed(params, batch, ctx)
    for layer in range(SIZES["n_layers"]):
        p = pytree.map(lambda leaf, i=layer: leaf[i], params["blocks"])
        at_layer = ctx._replace(layer=torch.tensor(layer))
        if layer in (0, SIZES["n_layers"] - 1):
            x = model.block(p, x, at_layer)
            continue
        out = x.clone()
        for row in range(x.shape[0]):
            # The tokens with the least words of the whole batch's, in the order of the sequence.
            key = prng.fold_in(prng.fold_in(KEY, "kept"), layer)
            words = prng.bits(key, ((first + row + 1) * 8,))[-8:].tolist()
            at = torch.tensor(sorted(sorted(range(8), key=lambda n: (words[n], n))[:keep]))
            layout = models.TokenLayout(positions=at, documents=batch["documents"][row : row + 1, at])
            out[row, at] = model.block(p, x[row : row + 1, at], at_layer._replace(tokens=layout))[0]
        x = out
    return model.head(params, x, batch, ctx)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_layers_in_the_middle_are_those_written_out(kind):
    model, batch = models.build(config_of(kind, **SIZES)), packed()
    params = models.init_params(model, prng.key(1), F64)
    for keep, first in ((3, 0), (7, 2)):
        ctx = models.Ctx(dtype=F64, key=KEY, tokens=models.TokenLayout(first=first))
        found = gradients(models.random_ltd(model, keep), params, batch, ctx)

        def total(p, keep=keep, first=first):
            return written_out(model, p, batch, keep, first).total

        assert_close(found, torch.func.grad_and_value(total)(params), rtol=1e-12, atol=1e-12)
        assert abs(found[1] - gradients(model, params, batch, ctx)[1]) > 1e-6


def test_all_tokens_and_no_key_are_the_plain_model_bit_for_bit():
    model, batch = models.build(config_of("llama", **SIZES)), packed()
    params = models.init_params(model, prng.key(1))
    plain = gradients(model, params, batch, models.Ctx())
    for keep, key in ((8, KEY), (9, KEY), (3, ())):
        found = gradients(models.random_ltd(model, keep), params, batch, models.Ctx(key=key))
        assert all(torch.equal(a, b) for a, b in zip(pytree.leaves(found), pytree.leaves(plain), strict=True))


def test_each_token_is_kept_as_often_as_another_and_layers_differ():
    ctx = models.Ctx(key=KEY, layer=torch.tensor(1))
    at = sample_positions(4000, 8, 3, ctx)
    counts = torch.bincount(at.flatten(), minlength=8)
    assert at.shape == (4000, 3) and (at[:, 1:] > at[:, :-1]).all()
    assert ((counts - 1500).abs() < 5 * math.sqrt(4000 * 3 / 8 * 5 / 8)).all()
    assert not torch.equal(at, sample_positions(4000, 8, 3, ctx._replace(layer=torch.tensor(2))))
    assert torch.equal(at[100:], sample_positions(3900, 8, 3, ctx._replace(tokens=models.TokenLayout(first=100))))


MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2 x pp2": {"dp": 2, "pp": 2}, "dp1 x rp2": {"rp": 2}}


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=[pytest.mark.exhaustive] * (" x " in m)) for m in MESHES])
def test_steps_equal_one_process(mesh):
    sizes = MESHES[mesh]
    count, each = math.prod(sizes.values()), 4 // sizes.get("dp", 1)
    options = {"steps": 5, "rows": 8}
    expected, _, log = train(fzero.one_process(), "random-ltd", "clipped adam", 0, 4, **options)
    plain, _, _ = train(fzero.one_process(), "llama", "clipped adam", 0, 4, **options, sizes={"n_layers": 4})
    assert max((a - b).abs().max() for a, b in zip(*map(pytree.leaves, (expected.params, plain.params)))) > 1e-4
    stages = (0, 3) if "dp" in sizes or "rp" in sizes else (0,)
    cases = [(("random-ltd", "clipped adam", stage, each), options) for stage in stages]
    for state, found in ranks.run(count, trained_whole, cases, mesh=sizes, timeout_s=300)[0]:
        assert_close(found, log, rtol=1e-10, atol=1e-12)
        assert_close(state.params, expected.params, rtol=1e-10, atol=1e-10)


def kept_by_local_row(mesh, options):
    """Steps in which a row's tokens are drawn by its number on its rank."""
    module = sys.modules["fzero.models.dropping"]  # which the function of its name hides
    first_rows = lambda b, t, k, ctx: sample_positions(b, t, k, ctx._replace(tokens=models.TokenLayout()))  # noqa: E731
    with mock.patch.object(module, "sample_positions", first_rows):
        return train(mesh, "random-ltd", "clipped adam", 0, 2, **options)[2]


def test_tokens_that_are_drawn_by_the_row_of_a_rank_are_noticed():
    options = {"steps": 1, "rows": 8}
    expected = train(fzero.one_process(), "random-ltd", "clipped adam", 0, 4, **options)[2]
    found = ranks.run(2, kept_by_local_row, options, mesh={"dp": 2})[0]
    with pytest.raises(AssertionError):
        assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_remat_and_micro_batches_change_nothing():
    made = functools.partial(train, fzero.one_process(), "random-ltd", "clipped adam", 0, steps=2, rows=8)
    expected = made(2)[0].params
    assert_close(made(2, execution=fzero.Execution(remat="full"))[0].params, expected, rtol=0.0, atol=0.0)
    assert_close(made(8)[0].params, expected, rtol=1e-10, atol=1e-10)


def test_the_number_of_tokens_follows_the_ramp():
    own = {"random_ltd_ramp": "16:16:3000", "batch": 8, "micro_batch": 2, "steps": 30, "batch_ramp": "4:4:2000"}
    config = from_table({"preset": "llama-tiny", "data": {"seq_len": 64}, "train": own})
    found = stages_of(config)
    assert [stage.ltd_tokens for stage in found] == [16, 16, 32, 48, 0] and found[-1].end == 30
    assert [stage.reads_on for stage in found] == [False, True, True, True, True]
    for stage in found:
        assert stage.ltd_tokens == (0 if (n := count_tokens(config, stage.begin) // 3000) >= 3 else 16 + 16 * n)
        assert stages_of(stage.config)[: found.index(stage) + 1][-1].ltd_tokens in (stage.ltd_tokens, 0)
        assert stage.config.train.random_ltd == stage.ltd_tokens


ERRORS = [
    ({"random_ltd": 65}, {}, "train.random_ltd is 65 and data.seq_len 64; keep at most all tokens"),
    ({"random_ltd_ramp": "16:9:10"}, {}, "whose steps of 9 do not lead from 16 to 64 tokens"),
    ({"random_ltd_ramp": "16"}, {}, "train.random_ltd_ramp is '16'; a ramp is"),
    ({"random_ltd": 8}, {"model": {"dropout": 0.1}}, "dropout is 0.1, which draws for tokens in a row"),
    ({"random_ltd": 8}, {"model": {"pattern": "window:4"}}, "pattern is window:4, and of some tokens only full"),
    ({"random_ltd": 8}, {"model": {"n_layers": 2}}, "the model has 2 layers, of which the first and the last"),
    ({"random_ltd": 8}, {"preset": "mixtral-tiny"}, "the model is of MoEConfig; it takes a gpt2 or a llama"),
    ({"random_ltd": 8}, {"mesh": {"cp": 2}}, "mesh.cp=2: ranks have not the tokens of one another"),
    ({"random_ltd": 8}, {"sequence": True}, "sequence: ranks have not the tokens of one another"),
]


@pytest.mark.parametrize(("own", "more", "message"), ERRORS, ids=lambda value: str(value)[:30])
def test_what_does_not_go_together_is_refused(own, more, message):
    with pytest.raises(ValueError) as error:
        from_table({"preset": "llama-tiny", "data": {"seq_len": 64}, "train": own, **more})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_split_sequences_are_refused_in_a_step():
    model = models.random_ltd(models.build(config_of("llama", **SIZES)), 3)
    ctx = models.Ctx(key=KEY, layer=torch.tensor(1), tokens=models.TokenLayout(positions=torch.arange(8)))
    with pytest.raises(ValueError, match="sequences are split over ranks"):
        model.block[1]({}, torch.zeros(1, 8, 2), ctx)
    with pytest.raises(ValueError, match=r"dropout is 0\.5"):
        models.random_ltd(models.build(replace(config_of("llama", **SIZES), dropout=0.5)), 3)


def test_a_run_that_is_stopped_between_two_numbers_goes_on_bit_for_bit(fz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("".join(f"{n} {n * n}\n" for n in range(900)))
    sizes = [f"--set=model.{n}" for n in ("n_layers=3", "d_model=16", "n_heads=2", "n_kv_heads=1", "d_ff=24")]
    run = [
        *("pretrain", "--data", "t.txt", "--model", "llama-tiny", *sizes, "--seq-len", 16, "--steps", 7, "--batch", 4),
        *(
            "--micro-batch",
            2,
            "--set",
            "train.compiled=false",
            "--precision",
            "fp32",
            "--peak-tflops",
            1,
            "--prompt",
            "",
        ),
        *("--set", "train.random_ltd_ramp=8:4:128", "--set", "train.digest_every=1"),
    ]
    code, out, _ = fz(*run, "--out", "alone")
    assert code == 0 and "after step 2: 4 x 16 a step, of which layers in the middle compute 12" in out
    assert "after step 4: 4 x 16 a step\n" in out
    assert fz(*run, "--out", "stopped", "--stop-at", 3)[0] == 0
    assert fz("pretrain", "--out", "stopped", "--resume", "--prompt", "")[0] == 0
    alone, stopped = ([(r["loss"], r["digest"]) for r in rows(tmp_path / name)] for name in ("alone", "stopped"))
    assert alone == stopped and len(alone) == 7
    assert fz(*run[:-4], "--out", "plain", "--set", "train.random_ltd=16")[0] == 0
    plain = [r["loss"] for r in rows(tmp_path / "plain")]
    assert plain[0] != alone[0][0]
