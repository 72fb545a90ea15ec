"""Steps on a mesh with cp: equal to one process whatever the form, the pieces, the stage and the mesh."""

import functools
import itertools
import math

import pytest
import ranks
import torch
from close import assert_close, assert_same
from zero_cases import (
    FP64,
    OPTIMIZERS,
    batch_for,
    expect_one_process,
    model_of,
    packed_batch_for,
    train,
    trained_whole,
)

import fzero
from fzero import local_batch
from fzero.sharding import Context

STEPS = 5
MESHES = {
    "cp2": {"cp": 2},
    "dp2 x cp2": {"dp": 2, "cp": 2},
    "cp4": {"cp": 4},
    "cp2 x tp2": {"cp": 2, "tp": 2},
    "pp2 x cp2": {"pp": 2, "cp": 2},
    "cp2 x rp2": {"cp": 2, "rp": 2},
    "dp2 x cp2 x pp2": {"dp": 2, "cp": 2, "pp": 2},
}


def options_of(form="gather", pieces="auto", over_tp=False, **more):
    return {"plan_options": {"sequence": Context(form, pieces, over_tp), **more}}


def masked_batch_for(step, rows, length=8):
    """`packed_batch_for` whose first half of every row does not count: on two ranks of contiguous pieces all of one."""
    batch = packed_batch_for(step, rows, length)
    return {**batch, "mask": batch["mask"] & (torch.arange(length) >= length // 2)}


CASES = {
    "causal": {},
    "documents": {"batches": packed_batch_for},
    "window": {"sizes": {"pattern": "window:3"}},
    "local": {"sizes": {"pattern": "local:3"}, "batches": packed_batch_for},
    "strided": {"sizes": {"pattern": "strided:2"}},
    "fixed": {"sizes": {"pattern": "fixed:3:1"}},
    "bigbird": {"sizes": {"pattern": "bigbird:1:2:1:1:3"}},
    "bigbird and documents": {"sizes": {"pattern": "bigbird:2:1:0:1:3"}, "batches": packed_batch_for},
    "no token of a rank": {"batches": masked_batch_for},
}


@functools.cache
def serial(name, optimizer, micro_batches, steps, what, dropout):
    more = {**CASES[what], "dropout": dropout}
    state, _, log = train(fzero.one_process(), name, optimizer, 0, micro_batches, steps=steps, **more)
    return state, log


def equals_one_process(mesh, cases, steps=STEPS):
    """Each case: (name of the model, optimizer, stage, micro-batches of a data rank, name of CASES, options of
    `train`). mesh: a name of MESHES, or the sizes of its axes."""
    sizes = MESHES[mesh] if isinstance(mesh, str) else mesh
    data = sizes.get("dp", 1) * sizes.get("rp", 1)
    given = [((name, tx, stage, data * m), what, options) for name, tx, stage, m, what, options in cases]
    runs = [(case, {"steps": steps, **CASES[what], **options}) for case, what, options in given]
    results = ranks.run(math.prod(sizes.values()), trained_whole, runs, mesh=sizes, timeout_s=600)
    expected = [
        serial(name, tx, m, steps, what, options.get("dropout", 0.0)) for (name, tx, _, m), what, options in given
    ]
    expect_one_process(results, expected, [(mesh, *case) for case in given])


# T = 8: on cp4 a block of the zigzag is one token. gpt2 is tied, with learned positions and dropout; gemma has windows,
# capped scores and layers that take turns, llama fewer key/value heads.
FEW = {
    "cp2": [("gpt2", "clipped adam", 3, 1, "documents", {**options_of(), "dropout": 0.1})],
    "cp2, more models": [
        ("llama", "sgd", 0, 1, "documents", options_of()),
        ("gemma", "adam", 1, 1, "causal", {**options_of(pieces="contiguous"), "remat": "full"}),
        ("moe dropless", "adam", 2, 1, "causal", options_of("ulysses", "zigzag")),
        ("deepseek", "adam", 3, 1, "documents", options_of("ulysses")),
    ],
    "cp2, sinks": [
        ("gpt-oss", "adam", 3, 1, "documents", options_of()),
        ("gpt-oss", "sgd", 0, 2, "causal", options_of("ulysses", "zigzag")),
    ],
    "dp2 x cp2": [
        ("gpt2", "adam", 3, 2, "fixed", {**options_of(), "dropout": 0.1}),
        ("llama", "sgd", 2, 1, "local", options_of(reduce="once")),
    ],
    "cp4": [("llama", "sgd", 0, 1, "window", options_of()), ("llama", "adam", 3, 2, "strided", options_of("ulysses"))],
    "cp2 x tp2": [
        ("gpt2", "sgd", 3, 2, "documents", {**options_of(over_tp=True), "dropout": 0.1, "remat": "every:2"}),
        ("llama", "adam", 1, 1, "window", options_of("ulysses", "zigzag")),
        ("moe dropless", "sgd", 0, 2, "causal", options_of(over_tp=True)),
    ],
    "pp2 x cp2": [("gpt2", "adam", 3, 2, "local", {**options_of(), "dropout": 0.1})],
    "cp2 x rp2": [("llama", "clipped adam", 3, 2, "documents", options_of())],
}


TIERS = {
    "cp2": [],
    "cp2, sinks": [],
    "dp2 x cp2": pytest.mark.exhaustive,
    "cp4": pytest.mark.exhaustive,
    "cp2 x rp2": pytest.mark.exhaustive,
}


@pytest.mark.parametrize("cases", [pytest.param(one, marks=TIERS.get(one, pytest.mark.slow)) for one in FEW])
def test_context_parallelism_equals_one_process(cases):
    equals_one_process(cases.partition(",")[0], FEW[cases])


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", ["gather", "ulysses"])
def test_every_product_equals_one_process(mesh, form, what):
    product = itertools.product(("sgd", "clipped adam"), (0, 3), ("contiguous", "zigzag"))
    cases = [("llama", tx, stage, 2, what, options_of(form, pieces)) for tx, stage, pieces in product]
    equals_one_process(mesh, cases)


@pytest.mark.exhaustive
def test_a_rank_without_a_token_that_counts():
    pieces = [options_of("gather", "contiguous"), options_of("ulysses")]
    equals_one_process("cp2", [("llama", "clipped adam", 3, 2, "no token of a rank", one) for one in pieces])


@pytest.mark.exhaustive
def test_canonical_sums_are_alike_on_any_dp_beside_one_cp():
    options = {**options_of(reduce="canonical"), "dropout": 0.1}
    options |= {"steps": STEPS, **CASES["documents"]}
    cases = [(("gpt2", "clipped adam", stage, 4), options) for stage in (0, 3)]
    one, two = (
        ranks.run(math.prod(sizes.values()), trained_whole, cases, mesh=sizes)[0]
        for sizes in (MESHES["cp2"], MESHES["dp2 x cp2"])
    )
    for a, b in ((one[0], one[1]), (one[0], two[0]), (one[0], two[1])):
        assert a[1] == b[1]
        assert_same(a[0].params, b[0].params)
    expected, log = serial("gpt2", "clipped adam", 4, STEPS, "documents", 0.1)
    assert_close(one[0][1], log, rtol=1e-10, atol=1e-12)
    assert_close(one[0][0].params, expected.params, rtol=1e-10, atol=1e-10)


# ---- what is sent ----------------------------------------------------------------------------------------------------


def sent(mesh, form, name, rows):
    model = model_of(name)
    plan = fzero.zero_plan(0, model, mesh, policy=FP64, sequence=Context(form))
    state = fzero.init_state(model, OPTIMIZERS["sgd"], plan, seed=3)
    step = fzero.make_train_step(model, OPTIMIZERS["sgd"], plan)
    state, _ = step(state, local_batch(batch_for(0, rows), mesh))
    mesh.ledger.clear()
    step(state, local_batch(batch_for(1, rows), mesh))
    return [
        (row.phase, row.collective, row.calls, row.bytes)
        for row in mesh.ledger.rows()
        if row.leaf.startswith("blocks/attn") and row.phase in ("forward", "backward")
    ]


@pytest.mark.parametrize("form", ["gather", "ulysses"])  # the others: test_ring_steps.py
def test_a_form_sends_what_its_formula_says(form):
    cp, rows, tokens, layers, heads, groups, size = 2, 2, 8, 3, 4, 2, 2  # of zero_cases' llama
    if form == "gather":
        one = (cp - 1) * 2 * rows * tokens * groups * size * 8 // cp
        expected = {("forward", "all_gather", layers, layers * one), ("backward", "psum_scatter", layers, layers * one)}
    else:
        one = (cp - 1) * rows * (tokens // cp) * 2 * (heads + groups) * size * 8 // cp
        expected = {(phase, "all_to_all", 2 * layers, layers * one) for phase in ("forward", "backward")}
    for found in ranks.run(cp, sent, form, "llama", rows, mesh={"cp": cp}):
        total = {}
        for phase, collective, calls, sent_bytes in found:
            before = total.get((phase, collective), (0, 0))
            total[phase, collective] = before[0] + calls, before[1] + sent_bytes
        assert {(*key, *value) for key, value in total.items()} == expected


# ---- what is chosen, and refused -------------------------------------------------------------------------------------


def test_the_form_that_sends_less_is_chosen_of_those_that_do_not_hold_twice_as_much():
    llama, gpt2 = model_of("llama"), model_of("gpt2")  # 4 heads of 2 key/value heads, and of 4
    chosen = {
        (model, cp): fzero.zero_plan(0, m, fzero.fake_mesh({"cp": cp})).context.form
        for model, m in (("llama", llama), ("gpt2", gpt2))
        for cp in (2, 3, 4)
    }
    assert chosen == {
        ("llama", 2): "gather",
        ("llama", 3): "gather",
        ("llama", 4): "ulysses",
        ("gpt2", 2): "ulysses",
        ("gpt2", 3): "gather",
        ("gpt2", 4): "ulysses",
    }
    wide, one = (
        model_of("llama", n_heads=32, n_kv_heads=8, d_model=64),
        model_of("llama", n_heads=6, n_kv_heads=1, d_model=12),
    )
    chosen = {
        (heads, cp, str(given)): str(fzero.zero_plan(0, m, fzero.fake_mesh({"cp": cp}), sequence=given).context)
        for heads, m, cp, given in (
            (32, wide, 8, Context()),
            (32, wide, 64, Context()),  # more ranks than heads: gathered keys would be all that a rank holds
            (32, wide, 16, Context(pieces="balanced")),  # which ulysses has not
            (6, one, 16, Context()),  # one key head: no groups exchange heads
        )
    }
    assert chosen == {
        (32, 8, "auto"): "ulysses:contiguous",
        (32, 64, "auto"): "hierarchical/8:balanced",
        (32, 16, "auto:balanced"): "hierarchical/8:balanced",
        (6, 16, "auto"): "ring:balanced",
    }


def test_a_plan_prints_what_each_form_sends_and_holds():
    said = str(fzero.zero_plan(0, model_of("llama"), fzero.fake_mesh({"cp": 4}), policy=FP64))
    assert (
        "context: ulysses of contiguous pieces over cp=4; bytes of a rank in attention of a layer, forward and "
        "backward, for each token of a sequence: gather sends 96 and holds 96; ulysses sends 96 and holds 64; "
        "ring sends 160 and holds 64; hierarchical/2 sends 112 and holds 64\n"
    ) in said


def test_what_cannot_be_split_is_refused_in_one_line():
    llama, cp3, cp2 = model_of("llama"), fzero.fake_mesh({"cp": 3}), fzero.fake_mesh({"cp": 2})
    for call, said in (
        (
            lambda: fzero.zero_plan(0, llama, cp3, sequence=Context("ulysses")),
            r"context ulysses: cp=3 does not divide the 4 heads; use cp in \{1, 2, 4\}, or the form gather",
        ),
        (lambda: Context("gater"), r"context: form is 'gater'"),
        (lambda: Context("gather", "zig"), r"context: pieces is 'zig'"),
        (lambda: Context.parse("gather:contigous"), r"context: pieces is 'contigous'"),
        (lambda: Context.parse("hierarchical/two"), r"'hierarchical/two' has /two; write .* such as hierarchical/2"),
        (lambda: Context.parse("ring/2"), r"the form is ring; only hierarchical has groups: write hierarchical/2, or"),
        (
            lambda: fzero.zero_plan(0, llama, fzero.fake_mesh({"cp": 4}), sequence=Context.parse("hierarchical/4")),
            r"hierarchical/4: groups of 4 must divide cp=4 and the 2 key/value heads of a rank; use hierarchical/2",
        ),
        (lambda: fzero.zero_plan(0, {"w": torch.zeros(2)}, cp2), r"cp=2: cp splits the sequences of gpt2, llama"),
        (
            lambda: fzero.zero_plan(0, model_of("moe dropless", capacity_factor=1.0), cp2),
            r"cp=2: cp splits the sequences of gpt2, llama",
        ),
        (
            lambda: Context("gather", "zigzag").pieces_for(2).expect_divisible(10),
            r"the sequences have 10 tokens, which cannot be cut into 4 blocks for cp=2; use 8 or 12",
        ),
        (
            lambda: Context("gather", "contiguous").pieces_for(2).expect_divisible(3, parts=2),
            r"the sequences have 3 tokens, which cannot be cut into 2 blocks for cp=2 and tp=2; use 4",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_pieces_are_each_tokens_once():
    for ranks_of_cp, name in itertools.product((1, 2, 3, 4), ("contiguous", "zigzag")):
        pieces = Context("gather", name).pieces_for(ranks_of_cp)
        assert len({len(own) for own in pieces.blocks}) == 1
        gathered = torch.cat([pieces.positions(rank, 24) for rank in range(ranks_of_cp)])
        assert torch.equal(gathered[pieces.order(24)], torch.arange(24))
