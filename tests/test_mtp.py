"""DeepSeek-V3's second head: its loss written out, and steps on meshes equal to one process."""

import math
from dataclasses import replace

import pytest
import ranks
import torch
from close import assert_close
from law_cases import config_of
from zero_cases import FP64, train, trained_whole

import fzero
from fzero import models
from fzero.checkpoint.convert.huggingface_config import write_config
from fzero.core import prng, pytree
from fzero.models import forward

F64 = torch.float64
CONFIG = config_of("deepseek", dropout=0.0, n_mtp=1, mtp_coef=0.3)
CTX = models.Ctx(dtype=F64)


def rms(x, scale):
    return x / (x.pow(2).mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * scale


def drawn(seed=3):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, CONFIG.vocab_size, (3, 8), generator=g)
    targets = torch.randint(0, CONFIG.vocab_size, (3, 8), generator=g)
    mask = torch.rand(3, 8, generator=g) > 0.3
    documents = torch.tensor([[0] * 8, [0] * 3 + [1] * 5, list(range(8))], dtype=torch.int32)
    return {"tokens": tokens, "targets": targets, "mask": mask, "documents": documents}


def written_out(params, batch):
    """(the first cross entropy, the second): position by position."""
    plain = models.build(replace(CONFIG, n_mtp=0))
    kept = {name: leaf for name, leaf in params.items() if name not in ("blocks_mtp", "join_mtp")}
    first = models.loss(plain, kept, batch, CTX)
    # The layer by itself, of a model that has no other one: on x' in place of an embedding.
    x = last_activations(plain, kept, batch)
    p = params["join_mtp"]
    e = params["embed"]["tokens"][batch["targets"]]
    both = torch.cat((rms(x, p["norm_x"]["scale"]), rms(e, p["norm_e"]["scale"])), -1) @ p["w"]
    one = models.build(replace(CONFIG, n_mtp=0, n_layers=1, n_dense=0))
    layer = {"blocks_experts": params["blocks_mtp"], "embed": params["embed"]}
    y = last_activations(one._replace(embed=starting_at(one, both)), layer, batch)
    logits = rms(y, params["head"]["norm_mtp"]["scale"]) @ params["head"]["w"].T
    second, (rows, positions) = torch.zeros((), dtype=F64), batch["targets"].shape
    for b in range(rows):
        for i in range(positions - 1):
            same = batch["documents"][b, i] == batch["documents"][b, i + 1]
            if batch["mask"][b, i + 1] and same:
                second = second - torch.log_softmax(logits[b, i], -1)[batch["targets"][b, i + 1]]
    return first, second


def starting_at(model, x):
    """The embedding of a model that begins with x, and counts as its own does."""

    def embed(params, batch, ctx):
        return {**model.embed(params, batch, ctx), "x": x}

    return embed


def last_state(model, params, batch):
    return forward.transform(model, params, batch, forward.prepare(model, batch, CTX))


def last_activations(model, params, batch):
    return last_state(model, params, batch)["x"]


def test_the_loss_is_what_is_written_out():
    model = models.build(CONFIG)
    params = pytree.map(lambda x: x, models.init_params(model, prng.key(0), F64))
    batch = drawn()
    found, (first, second) = models.loss(model, params, batch, CTX), written_out(params, batch)
    assert_close(found.extra["cross_entropy"], first.extra["cross_entropy"], rtol=1e-12)
    assert_close(found.extra["mtp"], second, rtol=1e-12)
    objective = first.extra["cross_entropy"] + 0.3 * second + CONFIG.balance_coef * found.extra["balance"]
    assert_close(found.total, objective, rtol=1e-12)
    assert found.num_tokens == first.num_tokens and float(second) > 0.0
    assert found.tables["blocks_mtp/moe/load"].shape == (1, CONFIG.n_experts)
    assert_close(found.tables["blocks_experts/moe/load"], first.tables["blocks_experts/moe/load"])


def test_logits_are_those_of_the_model_without_it():
    """So that it is sampled as if it were not there."""
    model, plain = models.build(CONFIG), models.build(replace(CONFIG, n_mtp=0))
    params = models.init_params(model, prng.key(0), F64)
    kept = {name: leaf for name, leaf in params.items() if name not in ("blocks_mtp", "join_mtp")}
    only = {"tokens": drawn()["tokens"]}
    found, expected = (m.logits(p, last_state(m, p, only), CTX) for m, p in ((model, params), (plain, kept)))
    assert_close(found, expected, rtol=1e-12)


MESHES = {
    "pp2": {"pp": 2},
    "ep2": {"ep": 2},
    "dp2 x ep2": {"dp": 2, "ep": 2},
    "ep2 x tp2": {"ep": 2, "tp": 2},
    "pp2 x ep2": {"pp": 2, "ep": 2},
}
SIZES = {"n_mtp": 1, "n_experts": 4, "n_groups": 2, "bias_rate": 0.01}


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=[pytest.mark.exhaustive] * (m != "pp2")) for m in MESHES])
def test_steps_equal_one_process(mesh):
    sizes = MESHES[mesh]
    data = math.prod(sizes.get(axis, 1) for axis in ("dp", "ep"))
    options = {"sizes": SIZES, "steps": 3}
    more = {"plan_options": {"sequence": True}} if "tp" in sizes else {}
    cases = [
        (
            ("deepseek", "clipped adam", stage, 2 * data),
            {**options, **more, **({"experts": "exchange:4"} if "ep" in sizes else {})},
        )
        for stage in (1, 3)
    ]
    expected, _, log = train(fzero.one_process(), "deepseek", "clipped adam", 0, 2 * data, **options)
    for state, found in ranks.run(math.prod(sizes.values()), trained_whole, cases, mesh=sizes, timeout_s=300)[0]:
        assert_close(found, log, rtol=1e-10, atol=1e-12)
        assert_close(state.params, expected.params, rtol=1e-10, atol=1e-10)
    assert expected.params["blocks_mtp"]["moe"]["bias"].abs().max() > 0.0


def test_what_cannot_be_is_refused_in_one_line():
    with pytest.raises(ValueError, match="n_mtp is 2; it must be at least 0 and below 2"):
        replace(CONFIG, n_mtp=2)
    model = models.build(CONFIG)
    with pytest.raises(ValueError, match="cp=2"):
        fzero.zero_plan(0, model, fzero.fake_mesh({"cp": 2}), policy=FP64)
    with pytest.raises(ValueError, match="n_mtp is 1; transformers' DeepSeek-V3 has no second head"):
        write_config(CONFIG)
