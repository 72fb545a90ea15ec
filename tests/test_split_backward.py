"""Backward passes in two parts, by inputs and by weights: the same gradients as in one, and steps that equal one
process under every schedule that splits them.

The steps' cases are those of test_pipelined.py.
"""

import contextlib
import itertools
from unittest import mock

import pytest
import ranks
import torch
from close import assert_same
from pipeline_steps import equals_one_process, options_of
from test_pipelined import MESHES
from torch.utils._python_dispatch import TorchDispatchMode
from zero_cases import OPTIMIZERS, model_of, train

import fzero
from fzero.core import vjp_pair
from fzero.core import vjp_pair as pairs
from fzero.sharding import Pipeline, digests
from fzero.train import streamed_model

SPLIT = {
    "zb-h1": Pipeline("zb-h1"),
    "zb-h2": Pipeline("zb-h2"),
    "interleaved-zb": Pipeline("interleaved-zb", chunks=2),
    "zb-v": Pipeline("zb-v", chunks=2),
    "dualpipe-v": Pipeline("dualpipe-v", chunks=2),
}

# ---- one pair --------------------------------------------------------------------------------------------------------


def mlp(w_in, w_out, scale, x, table):
    """Products, a norm, a scale that serves elementwise, an integer input."""
    h = x / x.square().mean(-1, keepdim=True).sqrt() * scale
    return (x + torch.tanh(h @ w_in) @ w_out)[table], (h * x).sum()


def kept_for_both(w, v, x):
    """Both halves take tanh(x w)."""
    return (x + torch.tanh(x @ w) @ v,)


def passing(w, x):
    """The gradients of both inputs are one tensor."""
    return (w + x,)


def bare(w, x):
    """The gradient by weights needs no product."""
    return (torch.sin(x) * w,)


FUNCTIONS = {
    "mlp": (mlp, 3, 4, [(4, 6), (6, 4), (4,), (5, 4)], [torch.tensor([4, 0, 1])]),
    "kept for both": (kept_for_both, 2, 3, [(4, 4), (4, 4), (5, 4)], []),
    "passing": (passing, 1, 2, [(3, 4), (3, 4)], []),
    "bare": (bare, 1, 2, [(4,), (3, 4)], []),
}


class Products(TorchDispatchMode):
    """Counts the matrix products while it is entered."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def halves(name, dtype, compiled, skip=0):
    """(gradients of a whole backward pass, those of the two halves, products of each, what is owed, the inputs)."""
    f, split, n, shapes, rest = FUNCTIONS[name]
    g = torch.Generator().manual_seed(1)
    inputs = [*(torch.randn(shape, generator=g, dtype=dtype) for shape in shapes), *rest]
    whole, cut = (vjp_pair.vjp_pair(f, n, compiled=compiled, skip=skip, split=k) for k in (0, split))
    out, kept = whole.forward(inputs, split)
    cotangents, counted = [torch.cos(t) for t in out], [Products() for _ in range(3)]
    with counted[0]:
        expected = whole.backward(kept, [c.clone() for c in cotangents], inputs[:split])
    again, kept = cut.forward(inputs, split)
    assert_same(list(again), list(out))
    with counted[1]:
        by_inputs, owed = cut.backward_inputs(kept, [c.clone() for c in cotangents], inputs[:split])
    assert kept == []
    held = [t for t in owed if isinstance(t, torch.Tensor)]
    with counted[2]:
        by_weights = cut.backward_weights(owed)
    assert owed == []
    return expected, [*by_weights, *by_inputs], [c.count for c in counted], held, inputs


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16), ids=str)
def test_the_halves_give_the_bits_of_the_whole(name, dtype):
    expected, found, _, held, inputs = halves(name, dtype, False)
    assert_same(found, expected)
    storages = {t.untyped_storage()._cdata for t in inputs[: FUNCTIONS[name][1]]}
    assert not any(t.untyped_storage()._cdata in storages for t in held)  # gathered parameters are free to go


def test_no_product_is_made_twice_and_none_for_frozen_weights():
    _, _, (both, by_inputs, by_weights), _, _ = halves("mlp", torch.float64, False)
    assert (both, by_inputs, by_weights) == (4, 2, 2)
    expected, found, counts, _, _ = halves("mlp", torch.float64, False, skip=2)
    assert_same(found, expected)
    assert counts == [2, 2, 0]
    expected, found, _, held, _ = halves("mlp", torch.float64, False, skip=3)
    assert_same(found, expected)
    assert held == []


def test_no_two_graphs_share_what_is_noted_of_a_node():
    """Compiling a graph writes to its nodes' notes: an input of both halves had one, and the second half another's."""
    graphs = []

    def keep(graph, mode, *, backward=False):
        graphs.append(graph)
        return lambda args: graph(*args)

    with mock.patch.object(pairs, "compile_graph", keep):
        halves("kept for both", torch.float64, True)
    assert len(graphs) == 5  # forward and backward; forward and two halves
    notes = [id(node.meta) for graph in graphs for node in graph.graph.nodes]
    assert len(set(notes)) == len(notes)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_compiled_halves_give_the_bits_of_the_whole(dtype):
    expected, found, *_ = halves("mlp", dtype, True)
    assert_same(found, expected)


# ---- steps -----------------------------------------------------------------------------------------------------------

FEW = {
    "pp2": [("gpt2", "sgd", 0, 3, {**options_of(SPLIT["zb-h1"]), "dropout": 0.1})],
    "pp2 more": [
        ("gemma", "clipped adam", 3, 3, {**options_of(SPLIT["zb-v"]), "remat": "full"}),
        ("gemma", "adam", 3, 4, {**options_of(SPLIT["dualpipe-v"]), "reshard": False}),
        ("gemma", "sgd", 1, 4, {**options_of(SPLIT["interleaved-zb"]), "remat": "every:2"}),
        ("encoder and decoder", "adam", 2, 4, options_of(SPLIT["zb-h2"])),
        ("qlora", "adam", 3, 2, options_of(SPLIT["zb-h1"])),
        ("moe dropless", "sgd", 3, 3, options_of(SPLIT["zb-h2"])),
    ],
    "pp2 x dp2": [
        ("gpt2", "clipped adam", 3, 3, {**options_of(SPLIT["zb-h2"]), "dropout": 0.1}),
        ("gemma", "sgd", 2, 4, options_of(SPLIT["dualpipe-v"])),
        ("gemma", "adam", 3, 2, {**options_of(SPLIT["interleaved-zb"]), "remat": "full"}),
        ("gemma", "adam", 0, 4, options_of(SPLIT["zb-v"], reduce="once")),
    ],
    "pp2 x tp2": [("gpt2", "adam", 3, 2, options_of(SPLIT["zb-h1"], sequence=True))],
    "pp4": [("gemma", "sgd", 0, 8, options_of(SPLIT["zb-h2"])), ("gemma", "adam", 3, 4, options_of(SPLIT["zb-h1"]))],
}

# The products of test_pipelined_products.py have the larger meshes too.
TIERS = {"pp2": (), "pp2 more": pytest.mark.slow, "pp2 x dp2": pytest.mark.slow}
TIERS |= dict.fromkeys(("pp2 x tp2", "pp4"), pytest.mark.exhaustive)


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=TIERS[m]) for m in FEW])
def test_a_split_schedule_equals_one_process(mesh):
    equals_one_process(MESHES[mesh.removesuffix(" more")], FEW[mesh])


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ("pp2", "pp2 x dp2"))
@pytest.mark.parametrize("schedule", SPLIT)
def test_every_product_equals_one_process(mesh, schedule):
    product = itertools.product(("sgd", "clipped adam"), (0, 3), (4,), ("none", "full"))
    name = "gemma" if mesh == "pp2" else "encoder and decoder"
    cases = [(name, tx, stage, m, {**options_of(SPLIT[schedule]), "remat": r}) for tx, stage, m, r in product]
    equals_one_process(MESHES[mesh], cases)


# ---- canonical sums --------------------------------------------------------------------------------------------------


def canonical_digests(mesh, cases, compiled):
    """Heads of four elements: autograd adds gradients in place and a graph does not, so the strides of a dim of size 1
    differ, and with halves of heads of one element the order in which norms of heads are summed."""
    out = []
    for stage, pipeline in cases:
        options = {"pipeline": pipeline, "reduce": "canonical"} if pipeline else {"reduce": "canonical"}
        sizes = {"d_model": 16}
        state, specs, log = train(
            mesh, "gemma", "clipped adam", stage, 4, plan_options=options, policy=fzero.fp32(), steps=3, sizes=sizes,
            compiled=compiled,
        )  # fmt: skip
        found = digests(state.params, specs.params, mesh)
        found |= digests(state.opt_state, specs.opt_state, mesh)
        out.append((log, found))
    return out


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiled", (False, True))
def test_canonical_sums_have_the_bits_of_one_process(compiled):
    (((log, found),),) = ranks.run(1, canonical_digests, [(0, None)], compiled)
    stages = (0, 1, 2, 3, 3)
    cases = list(zip(stages, SPLIT.values()))
    for rank in ranks.run(2, canonical_digests, cases, compiled, mesh={"pp": 2}, timeout_s=300):
        for (ours, theirs), case in zip(rank, cases):
            assert ours == log, case
            assert theirs == found, case


# ---- sums over ranks -------------------------------------------------------------------------------------------------


def last_too_early():
    real = streamed_model.StreamedModel.backward_weights
    return mock.patch.object(
        streamed_model.StreamedModel,
        "backward_weights",
        lambda self, owed, reducer, last: real(self, owed, reducer, True),
    )


def reduced(mesh, pipeline, planted=contextlib.nullcontext):
    """Elements by leaf that the sums over dp of a step send, at a stage that sums over micro-batches first."""
    train(mesh, "gpt2", "sgd", 1, 6, plan_options={"pipeline": pipeline}, steps=1)
    mesh.ledger.clear()
    with planted():
        train(mesh, "gpt2", "sgd", 1, 6, plan_options={"pipeline": pipeline}, steps=1)
    rows = [row for row in mesh.ledger.rows() if row.phase == "reduce" and row.leaf.startswith("blocks")]
    return sorted((row.collective, row.leaf, row.elements) for row in rows)


@pytest.mark.exhaustive
def test_sums_travel_once_behind_the_last_weights():
    """As often as where backward passes are whole; a `last` that comes early sends each micro-batch's."""
    expected, found, early = (
        ranks.run(4, reduced, *given, mesh=MESHES["pp2 x dp2"])
        for given in ((Pipeline("1f1b"),), (SPLIT["zb-h1"],), (SPLIT["zb-h1"], last_too_early))
    )
    assert found == expected and all(expected)
    assert early != expected


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_pipeline_refuses_chunks_that_a_schedule_does_not_have():
    with pytest.raises(ValueError, match=r"schedule zb-v has 2 chunks a rank and chunks is 1; use chunks=2, or"):
        Pipeline("zb-v", chunks=1)
    assert Pipeline("zb-v").chunks == 2
    with pytest.raises(ValueError, match="schedule zb-h1 has one chunk a rank and chunks is 2; use chunks=1, or"):
        Pipeline("zb-h1", chunks=2)
    plan = fzero.zero_plan(0, model_of("gemma"), fzero.fake_mesh({"pp": 2}), pipeline=SPLIT["dualpipe-v"])
    with pytest.raises(ValueError, match="needs at least 4 micro-batches, and there are 3"):
        fzero.make_train_step(model_of("gemma"), OPTIMIZERS["sgd"], plan, micro_batches=3)
