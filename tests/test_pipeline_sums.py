"""What a step on a mesh with pp sends and holds, rank by rank, as formulas: messages, gathers and sums in integers."""

import math
from collections import Counter

import pytest
import ranks
from plan_cases import made
from zero_cases import FP64, OPTIMIZERS, batch_for, model_of

import fzero
from fzero import local_batch
from fzero.core import pytree
from fzero.planner.step_trace import run_step
from fzero.run import build
from fzero.run.measure.live_bytes import LiveBytes
from fzero.sharding import FAMILIES, leaf_plan

M = 4
PIPELINES = {
    "gpipe": fzero.Pipeline("gpipe"),
    "1f1b": fzero.Pipeline("1f1b"),
    "interleaved": fzero.Pipeline("interleaved", chunks=2),
    "zb-h1": fzero.Pipeline("zb-h1"),
    "zb-v": fzero.Pipeline("zb-v", chunks=2),
}


def prepared(mesh, stage, pipeline, m=M, length=8, model="gemma", layers=0):
    """(plan, a step of m micro-batches, its state and its batch), after a step that tells the shapes.

    layers: 0 for one in each of two chunks of a rank.
    """
    model, tx = model_of(model, tied=True, n_layers=layers or 2 * mesh["pp"].size), OPTIMIZERS["sgd"]
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64, pipeline=pipeline)
    step = fzero.make_train_step(model, tx, plan, micro_batches=m)
    batch = local_batch(batch_for(0, m * mesh.data_size, length), mesh, m)
    state, _ = step(fzero.init_state(model, tx, plan, seed=0), batch)
    return plan, step, state, batch


def sent(mesh, stages, names, model="gemma"):
    """By case {(phase, collective, axis, what, calls or elements): number} of this rank's step, the formulas' values,
    and the elements that `print(plan)` adds up for the layers."""
    out = {}
    for stage in stages:
        for name in names:
            plan, step, state, batch = prepared(mesh, stage, PIPELINES[name], model=model)
            mesh.ledger.clear()
            step(state, batch)
            found = Counter()
            for row in mesh.ledger.rows():
                what = "layers" if row.leaf.startswith("blocks/") else row.leaf.split(":")[0]
                key = row.phase, row.collective, row.axis, what
                found[(*key, "calls")] += row.calls
                found[(*key, "elements")] += row.elements
            layers = [entry.amounts for entry in leaf_plan.sent_of(plan, mesh["pp"].rank) if entry.kind == "layers"]
            planned = sum(M * each + once for each, once in layers)
            out[name, stage] = dict(found), formulas(plan, stage), planned
    return out


def formulas(plan, stage):
    p, r, N = plan.mesh["pp"].size, plan.mesh["pp"].rank, plan.mesh["dp"].size
    of, S = plan.stages.ranks, len(plan.stages.ranks)
    sizes = {name: math.prod(leaf.shape) for name, leaf in plan.leaves.items()}
    layer = sum(size for name, size in sizes.items() if name.startswith("blocks/")) // (2 * p)
    mine = sum(len(plan.stages.layers[s]) for s in range(S) if of[s] == r)
    users = {"embed/tokens": {of[0], of[-1]}, "head/norm/scale": {of[-1]}}
    x = 1 * 8 * 8  # B_ T D of a micro-batch of one sequence
    out = Counter()

    def add(phase, collective, axis, what, calls, elements):
        if calls and elements:
            out[phase, collective, axis, what, "calls"] += calls
            out[phase, collective, axis, what, "elements"] += calls * elements

    for s in range(S):
        if of[s] == r:
            add("forward", "message", "pp", "x", M * (of[s + 1 : s + 2] not in ((), (r,))), x)
            add("backward", "message", "pp", "grad", M * (s > 0 and of[s - 1] != r), x)
    for name, ranks_of in users.items():
        rest = sizes[name] // p // (N if stage == 3 else 1)
        add("gather", "gather_to", "pp", name, 1 if ranks_of - {r} else 0, rest * len(ranks_of - {r}))
        add("reduce", "scatter_from", "pp", name, int(r in ranks_of), (p - 1) * rest)
    add("metrics", "scatter_from", "pp", "loss", int(r == of[-1]), (p - 1) * 2 * M)
    add("metrics", "psum", "pp", "norm", 1, -(-2 * (p - 1) // p))
    if N > 1:
        first, last = sizes["embed/tokens"], sizes["embed/tokens"] + sizes["head/norm/scale"]
        outside = [("embed/tokens", first)] if r == of[0] else []
        outside += [("head/norm/scale embed/tokens", last)] if r == of[-1] else []
        sums = outside
        if (
            r == of[0] == of[-1]
        ):  # with both: the head's gradient of the embedding goes alone, and below stage 3 nowhere
            sums = [("embed/tokens", first), ("head/norm/scale", last - first)]
            sums += [("embed/tokens", first)] if stage == 3 else []
        for what, count, size in (("layers", mine, layer), *((name, 1, size) for name, size in outside)):
            if stage == 3:  # gathered in each micro-batch for both passes, the embedding and the head for one
                add("forward", "all_gather", "dp", what, M * count, (N - 1) * size // N)
                add("backward", "all_gather", "dp", what, M * count * (what == "layers"), (N - 1) * size // N)
        for what, count, size in (("layers", mine, layer), *((name, 1, size) for name, size in sums)):
            if stage == 3:
                add("reduce", "psum_scatter", "dp", what, M * count, (N - 1) * size // N)
            else:
                add("reduce", "psum", "dp", what, count, 2 * (N - 1) * size // N)
        add("metrics", "all_gather", "dp", "loss", 1, (N - 1) * 2 * M)
        add("metrics", "psum", "dp", "norm", int(stage == 3), -(-2 * (N - 1) // N))
    return dict(out)


WHOLE, SPLIT = ("gpipe", "1f1b", "interleaved"), ("zb-h1", "zb-v")


@pytest.mark.parametrize(
    "sizes, names, model",
    (
        ({"pp": 2}, WHOLE, "gemma"),
        pytest.param({"pp": 2, "dp": 2}, (*WHOLE, "zb-v"), "gemma", marks=pytest.mark.slow),
        pytest.param({"pp": 4}, (*WHOLE, *SPLIT), "llama", marks=pytest.mark.slow),
    ),
    ids=str,
)
def test_a_rank_sends_what_the_formulas_say(sizes, names, model):
    """B_ T D a border, micro-batch and direction; the leaves outside the layers once before the row, their sums once
    behind it; at stage 3 each layer 2 m times; losses and norm a few numbers."""
    for rank, cases in enumerate(ranks.run(math.prod(sizes.values()), sent, (0, 3), names, model, mesh=sizes)):
        for case, (found, expected, planned) in cases.items():
            assert found == expected, (rank, case)
            layers = sum(n for key, n in found.items() if key[3:] == ("layers", "elements"))
            assert layers == planned, (rank, case)


def said(config, rank):
    """(the elements of a step by (what, collective, link) as `sent_of` has them, those of a rank's step on fake
    tensors, the printed plan); of messages over borders their number."""
    step = run_step(config, config.mesh, rank)
    plan, found, expected = step.job.plan, Counter(), Counter()
    for row in step.job.mesh.ledger.rows():
        names = row.leaf.split(":")[0].split()
        if row.collective == "message":
            found[{"x": "activations", "grad": "gradients"}[names[0]], "message", row.axis] += row.calls
        elif set(names) <= set(plan.leaves) and (row.axis != "tp" or row.phase == "reduce"):  # else activations
            what = "layers" if names[0].startswith("blocks/") else "outside"
            found[what, row.collective, row.axis] += row.elements
    for one in leaf_plan.sent_of(plan, plan.mesh["pp"].rank):
        parts = build.local_micro_batches(config, step.job.mesh)
        expected[one.kind, one.collective, one.link] += parts * one.per_micro_batch + one.per_step
    return dict(expected), {key: n for key, n in found.items() if n}, str(plan)


def every(dp):
    """Every case of so many ranks of dp: by a model with a tied embedding and one without."""
    ways = ("fast", "once") if dp & (dp - 1) else ("fast", "once", "canonical")  # which takes a power of two
    return [
        (family, name, stage, how)
        for family in ("gpt2", "llama")
        for name in FAMILIES
        for stage in range(4)
        for how in ways
    ]


MESHES = ({"pp": 2, "dp": 2}, {"pp": 2, "rp": 2}, {"pp": 2, "tp": 2}, {"pp": 4}, {"pp": 2, "cp": 2}, {"pp": 2, "dp": 6})
EVERY = [
    pytest.param(
        sizes,
        every(sizes.get("dp", 1)),
        marks=pytest.mark.exhaustive,
        id=" x ".join(f"{axis}{size}" for axis, size in sizes.items()),
    )
    for sizes in MESHES
]


@pytest.mark.parametrize(
    "sizes, cases", [pytest.param({"pp": 2, "dp": 2}, [("gpt2", "zb-v", 3, "fast")], id="both ends"), *EVERY]
)
def test_a_printed_plan_says_what_a_rank_sends(sizes, cases):
    """Messages over borders, gathers and sums of the layers and of what is outside them, by schedule and stage."""
    for family, name, stage, how in cases:
        pipeline = {"schedule": name, "chunks": FAMILIES[name].chunks or 2}
        options = {"zero": stage, "reduce": how, "pipeline": pipeline, "sequence": "tp" in sizes}
        parts, stride = 2 * sizes["pp"], math.prod(sizes.values()) // sizes["pp"]
        config = made(family, mesh=sizes, parts=parts, model={"n_layers": 4 * sizes["pp"] // 2}, **options)
        for rank in range(sizes["pp"]):
            expected, found, text = said(config, rank * stride)
            assert found == expected, (family, name, stage, how, rank)
            line = next(line for line in text.splitlines() if line.split()[:1] == [str(rank)])
            messages = [expected.get((what, "message", "pp"), 0) // parts for what in leaf_plan.KINDS[:2]]
            assert line.split()[1:3] == list(map(str, messages))


@pytest.mark.slow
def test_a_printed_plan_says_what_a_rank_sends_in_codes():
    codec = "params=int8,grads=int8,block=16"
    config = made("llama", mesh={"pp": 2, "dp": 2}, parts=4, model={"n_layers": 4}, zero=3, codec=codec)
    for rank in range(2):
        expected, found, _ = said(config, 2 * rank)
        assert found == expected and found["layers", "all_to_all", "dp"] > 0


def peaks(mesh, cases):
    """(the most bytes alive in a step of this rank by case, the bytes of its gradients)."""
    out = []
    for name, m in cases:
        plan, step, state, batch = prepared(mesh, 0, PIPELINES[name], m, length=16, layers=8)
        with LiveBytes(state, batch) as live:
            step(state, batch)
        out.append(live.peak - sum(leaf.nbytes for leaf in pytree.leaves(batch)))
    mine = {"embed/tokens"} | ({"head/norm/scale"} if mesh["pp"].rank else set())
    shapes = {name: math.prod(leaf.shape) for name, leaf in plan.leaves.items()}
    layers = sum(size for name, size in shapes.items() if name.startswith("blocks/")) // 2
    return *out, 8 * (layers + sum(shapes[name] for name in mine))


def test_a_rank_holds_the_micro_batches_in_flight():
    """m with gpipe, p - r with 1f1b; each as many bytes. Where gpipe is fullest no gradient has been summed yet."""
    expect_in_flight(ranks.run(2, peaks, CASES, mesh={"pp": 2}))


CASES = [("gpipe", 8), ("gpipe", 4), ("1f1b", 8)]


def expect_in_flight(results):
    for r, (eight, four, one_by_one, grads) in enumerate(results):
        each = (eight - four) / 4
        assert each > 1000
        expected = eight - (8 - (2 - r)) * each + grads
        assert abs(one_by_one - expected) < 0.01 * expected, (r, eight, four, one_by_one, grads)
