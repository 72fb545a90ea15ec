"""Memory and messages on a mesh: bytes at rest by the papers' formulas, the peak of a step as predicted, the ledger to
the byte."""

import contextlib
import functools

import pytest
import ranks
import torch
from law_cases import step_options

import fzero
from fzero import models, optim
from fzero.core import precision, pytree
from fzero.run.measure.live_bytes import LiveBytes, predict_peak
from fzero.sharding import fake_mesh

# Every first dim of a layer's leaf, and the vocabulary, divide by 4: nothing is whole on all ranks.
SIZES = {"vocab_size": 256, "max_len": 64, "d_model": 64, "d_ff": 128, "n_heads": 4, "n_kv_heads": 2}
ROWS, T = 2, 32  # of a micro-batch
LAYERS, DEPTHS = 2, (3, 7)  # of most cases; of those that grow
PARTS = 2  # micro-batches, where they are summed
POLICIES = {"fp32": precision.fp32, "bf16": precision.bf16}


@functools.cache
def model_of(layers):
    return models.build(models.LlamaConfig(**SIZES, n_layers=layers))


def make(mesh, stage, layers=LAYERS, parts=2, policy="fp32", **options):
    """(step, state, local batch)"""
    model, plan_options = model_of(layers), options.pop("plan_options", {})
    plan = fzero.zero_plan(stage, model, mesh, **plan_options, policy=POLICIES[policy]())
    tx = optim.adam(1e-3)
    state = fzero.init_state(model, tx, plan, seed=0)
    step = fzero.make_train_step(
        model, tx, plan, micro_batches=parts, skip=fzero.Skip(nonfinite=False), **step_options(options)
    )
    tokens = torch.zeros(parts * ROWS, T, dtype=torch.int64)
    return step, (state, {"tokens": tokens, "targets": tokens.clone()})


def tree_bytes(tree):
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.leaves(tree))


def measured(mesh, cases):
    """By case, of rank 0: (peak bytes of a second step, bytes of the state, the ledger's rows of that step). The others
    do not count, which takes longer than the steps."""
    out = []
    for args, options in cases:
        step, (state, batch) = make(mesh, *args, **options)
        state, _ = step(state, batch)
        mesh.ledger.clear()
        live = LiveBytes(state, batch) if mesh.rank == 0 else None
        with live or contextlib.nullcontext():
            state, _ = step(state, batch)
        out.append((live and live.peak, tree_bytes((state.params, state.master, state.opt_state)), mesh.ledger.rows()))
    return out


def predicted(sizes, args, options):
    mesh = fake_mesh(sizes)
    peak = predict_peak(lambda: make(mesh, *args, **options))
    return peak, mesh.ledger.rows()


CASES = [
    ((stage, LAYERS, parts, policy), {}) for stage in range(4) for parts in (1, PARTS) for policy in ("fp32", "bf16")
]
CASES += [((3, layers), {"remat": "full"}) for layers in DEPTHS]
CASES += [
    ((3, 8), {"prefetch": 3}),
    ((3, LAYERS), {"reshard": False}),
    ((2, LAYERS, PARTS), {"plan_options": {"reduce": "once"}}),
]
CASES += [((0, LAYERS, 3), {"plan_options": {"reduce": "canonical"}})]

# With some micro-batches, every stage in float32; recomputation, and sums in one order.
OFTEN = (2, 6, 10, 14, *(i for i in range(16, len(CASES)) if "remat" in CASES[i][1]), len(CASES) - 1)
# With some micro-batches, every stage in bfloat16; with one, each dtype; and the other options.
LATER = (3, 7, 11, 15, 0, 13, *(i for i in range(16, len(CASES)) if i not in OFTEN))
TIERS = {"often": [], "later": pytest.mark.slow, "rarely": pytest.mark.exhaustive}


def tier_of(number):
    return "often" if number in OFTEN else "later" if number in LATER else "rarely"


@functools.cache
def results(tier):
    """{number: (args, options, what was measured)} of the cases of a tier."""
    numbers = [number for number in range(len(CASES)) if tier_of(number) == tier]
    found = ranks.run(4, measured, [CASES[number] for number in numbers], mesh={"dp": 4}, timeout_s=300)[0]
    return {number: (*CASES[number], result) for number, result in zip(numbers, found)}


every_case = pytest.mark.parametrize("tier", [pytest.param(tier, marks=marks) for tier, marks in TIERS.items()])


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, marks=pytest.mark.exhaustive if case[0] == (3, DEPTHS[-1]) else TIERS[tier_of(i)], id=str(case))
        for i, case in enumerate(CASES)
    ],
)
def test_the_peak_is_the_predicted_one(number):
    args, options, (peak, _, rows) = results(tier_of(number))[number]
    said, said_rows = predicted({"dp": 4}, args, options)
    assert abs(peak - said) <= 0.02 * said, f"{peak:,} bytes measured, {said:,} predicted"
    assert rows == said_rows


PSI = {layers: models.num_params(model_of(layers)) for layers in (LAYERS, *DEPTHS)}


def test_the_tracker_counts_each_storage_once_and_forgets_it():
    with LiveBytes() as live:
        a = torch.ones(100)
        b = a.view(10, 10)[2:]
        assert live.live == 400
        c = b + 1
        assert live.live == 720
        del a, b
        assert live.live == 320 and live.peak == 720
        del c
    assert live.live == 0


@pytest.mark.parametrize(
    ("policy", "whole", "sharded"), [("fp32", (4, 0), 8), pytest.param("bf16", (2, 0), 12, marks=pytest.mark.slow)]
)
def test_bytes_at_rest_are_the_papers(policy, whole, sharded):
    """Parameters, master weights and two moments: Rajbhandari et al. 2020, section 3.1 (K = 12, and 8 without master
    weights)."""
    params, n, psi = whole[0], 4, PSI[LAYERS]
    expected = {0: (params + sharded) * psi, 1: params * psi + sharded * psi // n, 2: params * psi + sharded * psi // n}
    expected[3] = (params + sharded) * psi // n
    measured = results("often" if policy == "fp32" else "later")
    found = {
        args[0]: state_bytes
        for args, _, (_, state_bytes, _) in measured.values()
        if args[1:] == (LAYERS, PARTS, policy)
    }
    assert {stage: size - 8 for stage, size in found.items()} == expected  # the optimizer's count is one int64


@pytest.mark.parametrize("policy", [pytest.param(p, marks=[pytest.mark.slow] * (p != "fp32")) for p in POLICIES])
def test_gradients_are_held_as_the_papers_say(policy):
    """Between stages 1 and 2 with accumulation lie the gradients that a rank sums over micro-batches: all of them, or
    its part."""
    peaks = {
        args: peak
        for args, options, (peak, _, _) in results("often" if policy == "fp32" else "later").values()
        if not options
    }
    saved = peaks[1, LAYERS, PARTS, policy] - peaks[2, LAYERS, PARTS, policy]
    blocks = PSI[LAYERS] - 2 * 256 * 64 - 64
    # All of the blocks' and of the embedding's are there at the end, in float32.
    assert saved > 0.5 * 4 * blocks * 3 // 4


def test_the_peak_of_stage_3_does_not_grow_with_the_layers_but_by_activations_and_shards():
    """With full recomputation a layer adds its input and its shards (parameters, gradient, two moments), and nothing
    else."""
    rows = {args[1]: peak for args, options, (peak, _, _) in results("often").values() if options == {"remat": "full"}}
    least, most = DEPTHS
    more = most - least
    a_layer = (PSI[most] - PSI[least]) // more
    own = 4 * 4 * a_layer // 4 + 4 * ROWS * T * SIZES["d_model"]
    assert abs(rows[most] - rows[least] - more * own) <= 0.005 * rows[most]
    # Kept whole, the parameters of the layers between would be many times what was measured.
    assert more * 4 * a_layer > 3 * (rows[most] - rows[least] - more * own + 4 * a_layer)


def sent(rows, **chosen):
    return sum(row.bytes for row in rows if all(getattr(row, key) == value for key, value in chosen.items()))


@every_case
def test_the_ledger_is_what_the_printed_plan_says(tier):
    for args, _, (_, _, rows) in results(tier).values():
        if len(args) == 4:
            plan = fzero.zero_plan(args[0], model_of(LAYERS), fake_mesh({"dp": 4}), policy=POLICIES[args[3]]())
            said = sum(args[2] * part + step for part, step in plan.sent_by_link().values())
            assert said == sum(row.bytes for row in rows if row.phase != "metrics"), args


@every_case
def test_the_ledger_is_two_and_three_psi(tier):
    """Elements times (N-1)/N and their size: 2 Psi at stages 0 to 2, 3 Psi at stage 3 for the layers, 2 Psi for
    embedding and head, whose backward passes need no parameters; without resharding 2 Psi for all (Rajbhandari et al.
    2020, section 7)."""
    psi, n = PSI[LAYERS], 4
    outside = 2 * 256 * 64 + 64
    blocks = psi - outside
    for args, options, (_, _, rows) in results(tier).values():
        stage, layers, parts, policy = (*args, 2, "fp32")[:4] if len(args) == 2 else (*args, "fp32")[:4]
        if layers != LAYERS or "remat" in options or "prefetch" in options:
            continue
        size = {"fp32": 4, "bf16": 2}[policy]  # of a parameter; sums travel in float32
        unit = (n - 1) / n
        reduce, gather, update = (sent(rows, phase=p) for p in ("reduce", "forward", "update"))
        gather += sent(rows, phase="backward")
        if options.get("plan_options") == {"reduce": "canonical"}:
            assert (reduce, gather, update) == ((parts + 1) * 4 * psi * unit, 0, 0)
        elif options.get("plan_options") == {"reduce": "once"}:
            assert (reduce, gather, update) == (4 * psi * unit, 0, size * psi * unit)
        elif options.get("reshard") is False:
            assert (reduce, gather, update) == (parts * 4 * psi * unit, parts * size * psi * unit, 0)
        elif stage == 0:
            assert (reduce, gather, update) == (2 * 4 * psi * unit, 0, 0)
        elif stage == 1:
            assert (reduce, gather, update) == (4 * psi * unit, 0, size * psi * unit)
        elif stage == 2:
            assert (reduce, gather, update) == (parts * 4 * psi * unit, 0, size * psi * unit)
        else:
            assert (reduce, gather, update) == (parts * 4 * psi * unit, parts * size * (2 * blocks + outside) * unit, 0)


@pytest.mark.parametrize(("stage", "holds"), [(3, False), pytest.param(0, True, marks=pytest.mark.slow)])
def test_a_sharded_initialisation_never_holds_the_model(stage, holds):
    sizes = {
        "vocab_size": 4096,
        "d_model": 256,
        "n_layers": 12,
        "d_ff": 1024,
        "n_heads": 4,
        "n_kv_heads": 4,
        "max_len": 64,
    }
    model, mesh = models.build(models.LlamaConfig(**sizes)), fake_mesh({"dp": 4})
    plan = fzero.zero_plan(stage, model, mesh)
    with LiveBytes() as live:
        state = fzero.init_state(model, optim.sgd(0.1), plan, seed=0)
    model_bytes = 4 * models.num_params(model)
    assert tree_bytes(state.params) == model_bytes // (1 if holds else 4)
    assert (live.peak >= model_bytes) == holds
    # Beside the shards: one leaf's, twice, and the words that random numbers are made of.
    assert holds or live.peak < 0.6 * model_bytes
