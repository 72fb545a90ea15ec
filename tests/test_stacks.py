"""Models whose layers are not all alike: every product is the plain loss' gradient. DeepSeek-V3, whose dense layers
come before its expert layers; an encoder and a decoder; Gemma, whose layers take windows in turn."""

import math

import continued
import laws
import pytest
import ranks
import torch
from close import assert_close
from law_cases import FP64, OPTIMIZERS, V, batch_of, case_of, config_of
from law_cases import run as train_case
from zero_cases import train, trained_whole

import fzero
from fzero import checkpoint, models
from fzero.core import prng, pytree
from fzero.models import forward, layers_text, parse_layers
from fzero.models.deepseek import choose_experts
from fzero.offload import Nvme
from fzero.train import segments_of

KINDS = ("deepseek", "encoder and decoder", "gemma")
slow = pytest.mark.slow
every_kind = pytest.mark.parametrize("kind", KINDS)
ADAM = OPTIMIZERS["adam"][0](0.05)


def deepseek(**changes):
    return models.build(config_of("deepseek", **changes))


@every_kind
def test_the_streamed_gradient_is_that_of_the_definition(kind):
    laws.one_normalisation(case_of(kind))


LAWS = {
    "micro-batches": lambda case: laws.micro_batches(case, ADAM),
    "remat": laws.remat,
    "evaluation": laws.evaluation,
    "purity": lambda case: laws.purity(case, ADAM),
    "resume": lambda case: laws.resume(case, ADAM),
    "layout": lambda case: laws.state_layout(case, ADAM),
}


@slow
@pytest.mark.parametrize(
    "kind, law", [(kind, law) for kind in KINDS for law in LAWS if kind != "gemma" or law in ("micro-batches", "remat")]
)
def test_the_laws_of_a_step(kind, law):
    LAWS[law](case_of(kind))


BOTH = "dp2 x tp2 sequence"
MESHES = {
    "dp2": ({"dp": 2}, {}),
    "tp2": ({"tp": 2}, {}),
    BOTH: ({"dp": 2, "tp": 2}, {"sequence": True}),
}


@slow
@pytest.mark.parametrize(
    "kind, mesh",
    [
        pytest.param(kind, mesh, marks=pytest.mark.exhaustive if kind == "deepseek" and mesh != BOTH else ())
        for kind in KINDS
        for mesh in MESHES
        if kind != "gemma" or mesh == BOTH
    ],
)
def test_parallel_is_serial(kind, mesh):
    sizes, plan_options = MESHES[mesh]
    data = sizes.get("dp", 1)
    cases = [
        ((kind, "adam", stage, 2 * data), {"plan_options": plan_options, "remat": remat, "steps": 2})
        for stage, remat in ((0, "none"), (2, "every:2"), (3, "none"), (3, "full"))
        if kind != "gemma" or remat == "every:2" or stage == 3
    ]
    expected, _, expected_log = train(fzero.one_process(), kind, "adam", 0, 2 * data, steps=2)
    for state, log in ranks.run(math.prod(sizes.values()), trained_whole, cases, mesh=sizes, timeout_s=300)[0]:
        assert_close(log, expected_log, rtol=1e-10, atol=1e-12)
        assert_close(state.params, expected.params, rtol=1e-10, atol=1e-10)


@slow
@every_kind
def test_offloaded_to_a_disk_and_resumed_on_another_mesh(kind, tmp_path):
    """Two steps at stage 0 with everything on a disk, a checkpoint, and a third step from it: three plain steps."""
    case = case_of(kind)
    expected, _ = train_case(case, ADAM)
    offload = "params=nvme,opt=nvme,grads=nvme,acts=nvme"
    plan = fzero.zero_plan(0, case.source, fzero.one_process(), policy=FP64, offload=offload)
    nvme = Nvme(tmp_path / "nvme")
    state = fzero.init_state(case.source, ADAM, plan, seed=3, nvme=nvme)
    how = fzero.Execution(remat="every:2")
    step = fzero.make_train_step(case.loss_fn, ADAM, plan, execution=how, micro_batches=2, nvme=nvme)
    for i in range(2):
        state, _ = step(state, batch_of(i))
    path = checkpoint.save(tmp_path / "kept", state, step=2)
    plain = fzero.zero_plan(0, case.source, fzero.one_process(), policy=FP64)
    state = checkpoint.restore(path, like=fzero.init_state(case.source, ADAM, plain, seed=4))
    state, _ = fzero.make_train_step(case.loss_fn, ADAM, plain)(state, batch_of(2))
    assert_close(state.params, expected.params, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        pytest.param("encoder and decoder", 1e-10, marks=slow),
        pytest.param("deepseek", 1e-5, marks=pytest.mark.exhaustive),  # many kernels: minutes of g++
        pytest.param("gemma", 1e-5, marks=pytest.mark.exhaustive),
    ],
)
def test_compiled_blocks(kind, tolerance):
    laws.compiled(case_of(kind), tolerance)


def test_layers_are_numbered_through_all_stacks():
    seen = []

    def block(p, x, ctx):
        seen.append(int(ctx.layer))
        return x

    model = case_of("encoder and decoder").loss_fn
    model = model._replace(block={"blocks_encoder": block, "blocks_decoder": lambda p, x, ctx: block(p, x, ctx)})
    params = models.init_params(model, prng.key(0), torch.float64)
    forward.transform(model, params, batch_of(0), models.Ctx(dtype=torch.float64, key=prng.key(1)))
    assert sorted(set(seen)) == list(range(6))
    parts = segments_of(model, fzero.zero_plan(0, model, fzero.one_process()))
    assert [(part.kind, part.name, part.depth, part.first) for part in parts] == [
        ("embed", "embed", 0, 0),
        ("block", "blocks_encoder", 3, 0),
        ("join", "join_decoder", 0, 0),
        ("block", "blocks_decoder", 3, 3),
        ("head", "head", 0, 0),
    ]


def test_the_functions_of_a_stack_take_turns():
    model = models.build(config_of("gemma", n_layers=5))
    (part,) = [part for part in segments_of(model, fzero.zero_plan(0, model, fzero.one_process())) if part.depth]
    assert part.functions[0] is part.functions[1] is not part.functions[2]  # of two kinds: two to compile
    adapted = models.lora(model, rank=2).block
    assert adapted[0] is adapted[1] is not adapted[2]
    params = models.init_params(model, prng.key(0), torch.float64)
    ctx = models.Ctx(dtype=torch.float64)
    tokens = torch.arange(16)[None] % V
    other = torch.cat((tokens[:, :1] + 1, tokens[:, 1:]), 1)

    def last(pattern):
        alike = models.build(config_of("gemma", n_layers=5, pattern=pattern))
        a, b = (models.logits(alike, params, {"tokens": x}, ctx)[0, -1] for x in (tokens, other))
        return torch.equal(a, b)

    assert models.period(model.config) == 3
    # Five layers of windows of 3 reach 10 positions back, and a full one all: layers 2 and, in the next period, none.
    assert last("window:3@100") and not last("2*window:3@100,full") and last("5*window:3@100,full")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda m: m._replace(block={"decoder": m.block["blocks_decoder"]}), "called 'decoder'; call it \"blocks\""),
        (lambda m: m._replace(join={"blocks_decode": None}), "no stack of it .did you mean blocks_decoder"),
        (
            lambda m: m._replace(join={}),
            "join_decoder/w: this layered model's leaves are under embed/, blocks_encoder/",
        ),
        (lambda m: m._replace(block={**m.block, "blocks_more": None}), "no leaf under blocks_more/"),
    ],
    ids=["name", "join of no stack", "leaf of no part", "stack without leaves"],
)
def test_a_model_whose_parts_do_not_fit_is_refused(change, message):
    model = case_of("encoder and decoder").loss_fn
    plan = fzero.zero_plan(0, model, fzero.one_process())
    with pytest.raises(ValueError, match=message):
        segments_of(change(model), plan)


@pytest.mark.parametrize(
    "text",
    ["full", "window:8", "3*full,full@0", "5*window:512@10000,full", "fixed:16:4@0.5", "2*bigbird:64:3:1:2:5,full"],
)
def test_kinds_of_layers_are_read_and_written(text):
    assert layers_text(parse_layers(text)) == text
    assert layers_text([*parse_layers(text), *parse_layers(text)]) == text  # a period is written once


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pattern": "2*window:3,"}, "attention pattern '' is not of the form full, window:SIZE"),
        ({"pattern": "0*full"}, "pattern: COUNT is 0; it must be at least 1"),
        ({"pattern": "x*full"}, r"pattern 'x\*full' is not of the form PATTERN, PATTERN@THETA or COUNT\*PATTERN"),
        ({"pattern": "full@-1"}, "pattern: THETA is '-1'; it must be a number of at least 0"),
        ({"pattern": "full@nan"}, "THETA is 'nan'"),
        ({"pattern": "99999*full,2*full"}, "has a period of more than 100,000 layers"),
        ({"norms": "after"}, "norms is 'after'; it must be one of in, out, both"),
        ({"activation": "relu"}, "activation is 'relu'; it must be one of silu, gelu"),
        ({"qk_norm": False, "wide_qk_norm": True}, "wide_qk_norm is true and qk_norm is not"),
        ({"score_cap": -1.0}, "score_cap is -1.0; it must be at least 0"),
    ],
)
def test_options_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of("gemma", **changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"n_dense": 3}, "n_dense is 3; it must be below n_layers=3"),
        ({"n_groups": 4}, "n_experts is 6 in n_groups=4"),
        ({"n_groups": 6}, "groups are equal and have two or more"),
        ({"top_groups": 4}, "top_groups is 4"),
        ({"top_k": 5}, r"top_k is 5; it must be in \[1, 4\]"),
        ({"rope_dim": 3}, "rope_dim is 3"),
        ({"value_dim": 9}, "value_dim is 9; it must be at most nope_dim"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of("deepseek", **changes)


@slow
def test_experts_are_chosen_in_the_best_groups_and_the_bias_moves_the_choice_alone():
    c = config_of("deepseek", n_experts=8, n_groups=4, top_groups=2, top_k=3)
    generator = torch.Generator().manual_seed(0)
    p = {
        "router": torch.randn(8, 8, generator=generator, dtype=torch.float64),
        "bias": torch.zeros(8, dtype=torch.float64),
    }
    p["bias"][5] = 0.7
    h = torch.randn(40, 8, generator=generator, dtype=torch.float64)
    ids, weights, scores = choose_experts(c, p, h, models.Ctx(dtype=h.dtype))
    for row in range(40):
        s = torch.sigmoid(h[row] @ p["router"])
        biased = s + p["bias"]
        groups = sorted(range(4), key=lambda g: -float(biased[2 * g : 2 * g + 2].sum()))[:2]
        allowed = sorted((e for g in groups for e in (2 * g, 2 * g + 1)), key=lambda e: -float(biased[e]))[:3]
        assert sorted(ids[row].tolist()) == sorted(allowed)
        assert_close(weights[row], 1.5 * s[ids[row]] / s[ids[row]].sum(), rtol=1e-12, atol=0.0)
        assert_close(scores[row], s, rtol=1e-12, atol=0.0)


@slow
def test_generation_with_a_cache_is_that_without():
    model = deepseek(max_len=32)
    params = models.init_params(model, prng.key(5), torch.float64)
    tokens = torch.randint(0, V, (2, 5), generator=torch.Generator().manual_seed(2))
    out = continued.whole(model, params, tokens, 6)
    expected = tokens
    for _ in range(6):
        logits = models.logits(model, params, {"tokens": expected}, models.Ctx(dtype=torch.float64))
        expected = torch.cat((expected, logits[:, -1].argmax(-1)[:, None]), 1)
    assert torch.equal(out, expected)


@slow
def test_lora_and_norms_go_through_every_stack():
    model = models.lora(deepseek(), rank=2, targets="/attn/w_")
    names = pytree.names(fzero.zero_plan(0, model, fzero.one_process()).like)
    assert {name.split("/")[0] for name in names if name.endswith("_lora_a")} == {"blocks_dense", "blocks_experts"}
    plain = models.init_params(deepseek(), prng.key(1), torch.float64)
    adapted = models.init_params(model, prng.key(1), torch.float64)
    assert_close(models.merge(model, adapted), plain, rtol=0.0, atol=0.0)


def test_deepseek_v3_has_the_published_parameters():
    assert round(models.num_params(models.build(models.preset("deepseek-v3"))) / 1e9, 1) == 671.0
