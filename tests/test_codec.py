"""Parameters and gradients in codes: what a step with a codec computes, and what it sends."""

import dataclasses
import functools
import math
from functools import partial
from unittest import mock

import pytest
import ranks
import torch
from close import assert_close, assert_same
from zero_cases import SIZES, model_of, train, trained_whole

import fzero
from fzero import local_batch, optim
from fzero.core import pytree
from fzero.kernels import Kernels
from fzero.planner import devices
from fzero.sharding import ParamFetcher, codec, gradient_sums, zero_stages
from fzero.train import coder_of

slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
MESHES = {
    "dp2 x rp2": {"dp": 2, "rp": 2},
    "dp2 x rp2 x tp2": {"dp": 2, "rp": 2, "tp": 2},
    "dp2 x rp2 x pp2": {"dp": 2, "rp": 2, "pp": 2},
    "dp2 x rp2 x cp2": {"dp": 2, "rp": 2, "cp": 2},
    "rp2 x cp2": {"rp": 2, "cp": 2},
    "rp2 x ep2": {"rp": 2, "ep": 2},
    "dp4 x rp2": {"dp": 4, "rp": 2},
}
EVEN = {"n_experts": 4, "n_kv_heads": 4}  # what ep=2 and cp=2 divide


# ---- hpZ: the layout alone, nothing is rounded -----------------------------------------------------------------------


@functools.cache
def serial(name, optimizer, micro_batches, changes):
    state, _, log = train(fzero.one_process(), name, optimizer, 0, micro_batches, steps=3, sizes=dict(changes), **ROWS)
    return state, log


ROWS = {"rows": 48}


@pytest.mark.parametrize(
    "mesh, name, optimizer, m, options",
    [
        ("dp2 x rp2", "llama", "clipped adam", 2, {}),
        pytest.param("dp2 x rp2", "gpt2", "sgd", 1, {"reduce": "once"}, marks=exhaustive),
        pytest.param("dp2 x rp2", "moe dropless", "adam", 3, {}, marks=exhaustive),
        pytest.param("dp2 x rp2", "deepseek", "adam", 1, {"offload": "opt=host"}, marks=exhaustive),
        pytest.param("dp2 x rp2 x tp2", "llama", "clipped adam", 2, {"sequence": True}, marks=exhaustive),
        pytest.param("dp2 x rp2 x pp2", "gpt2", "clipped adam", 3, {}, marks=exhaustive),
        pytest.param("dp2 x rp2 x cp2", "llama", "adam", 1, {}, marks=exhaustive),
        pytest.param("rp2 x cp2", "llama", "clipped adam", 2, {}, marks=exhaustive),
        pytest.param("rp2 x ep2", "moe dropless", "clipped adam", 2, {}, marks=exhaustive),
        pytest.param("dp4 x rp2", "llama", "adam", 1, {}, marks=exhaustive),
    ],
)
def test_shards_over_nodes_are_those_of_one_process(mesh, name, optimizer, m, options):
    sizes = MESHES[mesh]
    changes = EVEN if {"ep", "cp"} & set(sizes) and name.startswith("moe") else {}
    data = math.prod(sizes.get(axis, 1) for axis in ("dp", "rp", "ep"))
    case = (name, optimizer, 3, data * m), {
        "plan_options": {"codec": "hpz", **options}, "steps": 3, "sizes": changes, **ROWS,
    }  # fmt: skip
    ((state, log),) = ranks.run(math.prod(sizes.values()), trained_whole, [case], mesh=sizes, timeout_s=300)[0]
    expected, expected_log = serial(name, optimizer, data * m, tuple(changes.items()))
    assert_close(log, expected_log, rtol=1e-10, atol=1e-12)
    assert_close(state.params, expected.params, rtol=1e-10, atol=1e-10)
    assert_close(state.opt_state, expected.opt_state, rtol=1e-8, atol=1e-10)


def dims_swapped(leaf):
    """A leaf over rp whose first gather is not of neighbours: rp before dp."""
    made = over_nodes(leaf)
    dim = 1 if leaf.name.startswith("blocks") else 0
    cut = {group: swapped(getattr(made, group), dim) for group in ("params", "opt", "use")}
    return zero_stages.replace(made, **cut)


over_nodes = zero_stages.shard_over_nodes


def swapped(spec, dim):
    if "rp" not in spec.axes:
        return spec
    dims = list(spec.dims)
    dims[dim] = ("rp", *(axis for axis in dims[dim] if axis != "rp"))
    return zero_stages.replace(spec, dims=tuple(dims))


def with_swapped_dims(mesh, case, options):
    with mock.patch.object(zero_stages, "shard_over_nodes", dims_swapped):
        return train(mesh, *case, **options)[2]


def test_a_first_gather_of_ranks_that_are_no_neighbours_is_noticed():
    options = {"plan_options": {"codec": "hpz"}, "steps": 2, **ROWS}
    log = ranks.run(4, with_swapped_dims, ("llama", "clipped adam", 3, 4), options, mesh=MESHES["dp2 x rp2"])[0]
    assert abs(log[0][0] - serial("llama", "clipped adam", 4, ())[1][0][0]) > 1e-3


# ---- qwZ: a step on rounded parameters -------------------------------------------------------------------------------


def rounded(mesh, cases, kind):
    """`trained_whole` of plans without a codec, whose shards are rounded in place of being sent in codes."""
    coder = coder_of(kind, 16, Kernels())

    def pieces(self, name, layer, shard):
        matrix = shard.dim() >= 2  # of a layer
        return (coder.decode(coder.encode(shard), shard.dtype, shard.shape[-1]) if matrix else shard,)

    with mock.patch.object(ParamFetcher, "pieces", pieces):
        return trained_whole(mesh, cases)


CODES = [
    ("dp2", "int8", "llama", 1, ""),
    *[
        pytest.param(mesh, kind, name, m, more, marks=exhaustive)
        for mesh, kind, name, m, more in (
            ("dp2", "int4", "gpt2", 3, ""),
            ("dp4", "fp8_e4m3", "llama", 2, ""),
            ("dp2 x rp2", "int8", "llama", 2, ",hpz"),
            ("dp2 x tp2", "int8", "llama", 1, ""),
            ("dp2 x pp2", "int8", "gpt2", 2, ""),
            ("dp2 x cp2", "int4", "llama", 1, ""),
            ("dp2 x ep2", "int8", "moe dropless", 1, ""),
        )
    ],
]
PLAIN = {
    "dp2": {"dp": 2}, "dp4": {"dp": 4}, "dp2 x rp2": {"dp": 2, "rp": 2}, "dp2 x tp2": {"dp": 2, "tp": 2},
    "dp2 x pp2": {"dp": 2, "pp": 2}, "dp2 x cp2": {"dp": 2, "cp": 2}, "dp2 x ep2": {"dp": 2, "ep": 2},
}  # fmt: skip


@pytest.mark.parametrize("mesh, kind, name, m, more", CODES)
def test_a_step_in_codes_is_one_on_rounded_parameters_bit_for_bit(mesh, kind, name, m, more):
    sizes = PLAIN[mesh]
    data = math.prod(sizes.get(axis, 1) for axis in ("dp", "rp", "ep"))
    options = {"steps": 3, "policy": "fp32", "sizes": EVEN if "ep" in sizes else {}, "rows": 24}
    case, n = (name, "clipped adam", 3, data * m), math.prod(sizes.values())
    coded = options | {"plan_options": {"codec": f"params={kind},block=16{more}"}}
    plain = options | {"plan_options": {"codec": "hpz"} if more else {}}
    found = ranks.run(n, trained_whole, [(case, coded)], mesh=sizes)
    expected = ranks.run(n, rounded, [(case, plain)], kind, mesh=sizes)
    exact = ranks.run(n, trained_whole, [(case, plain)], mesh=sizes)
    for ((state, log),), ((same, same_log),) in zip(found, expected):
        assert log == same_log
        assert_same(state, same)
    assert found[0][0][1] != exact[0][0][1]


def by_function(mesh, donate):
    model, tx = model_of("llama"), optim.adam(1e-2)
    plan = fzero.zero_plan(3, model, mesh, codec="params=int8,block=16")
    state = fzero.init_state(model, tx, plan, seed=3)
    step = fzero.make_train_step(model, tx, plan, donate=donate)
    losses = []
    for i in range(2):
        state, metrics = step(state, local_batch(batch(i), mesh, 1))
        losses.append(float(metrics.loss))
    return losses, state.params


def batch(i, rows=8):
    g = torch.Generator().manual_seed(i)
    tokens, targets = (torch.randint(0, SIZES["vocab_size"], (rows, 8), generator=g) for _ in range(2))
    return {"tokens": tokens, "targets": targets}


def as_functions(mesh):
    return by_function(mesh, True), by_function(mesh, False)


def test_the_function_that_transforms_take_is_of_rounded_parameters():
    for streamed, pure in ranks.run(2, as_functions):
        assert_close(streamed[0], pure[0], rtol=1e-6, atol=1e-6)
        assert_close(streamed[1], pure[1], rtol=1e-4, atol=1e-5)


def differentiated(mesh):
    plan = fzero.zero_plan(3, model_of("llama"), mesh, codec="grads=int8,block=16")
    tx = optim.sgd(0.1)
    step = fzero.make_train_step(model_of("llama"), tx, plan, donate=False)
    state = fzero.init_state(model_of("llama"), tx, plan, seed=3)
    with pytest.raises(ValueError, match=r"codec grads=int8,block=16: grads are rounded behind the backward pass"):
        torch.func.vmap(step, in_dims=(None, 0))(state, pytree.map(lambda x: x[None], local_batch(batch(0), mesh, 1)))
    return True


def test_sums_in_codes_are_not_transformed():
    assert ranks.run(2, differentiated) == [True, True]


# ---- qgZ: terms are rounded once -------------------------------------------------------------------------------------


def sum_of_rounded(op, names, tensors, axis, coder, dtype, ledger):
    """`sum_coded` as rounding on each rank, and then a plain sum."""
    shapes, ranks_ = [t.shape for t in tensors], axis.size
    rows = gradient_sums.pack(tensors, ranks_, torch.float32)
    tensors.clear()
    near = coder.decode(coder.encode(rows), torch.float32, rows.shape[1])
    pending = gradient_sums.start_psum_scatter(near, axis)
    yield pending
    return gradient_sums.unpack(pending.wait(), [(s[0] // ranks_, *s[1:]) for s in shapes])


def defined(mesh, cases):
    with mock.patch.object(gradient_sums, "sum_coded", sum_of_rounded):
        return trained_whole(mesh, cases)


@pytest.mark.parametrize(
    "mesh, kind, name, m, more",
    [
        ("dp2", "int8", "llama", 3, ""),
        pytest.param("dp2 x rp2", "int4", "llama", 2, ",hpz", marks=exhaustive),
        pytest.param("dp2 x tp2", "int8", "gpt2", 1, "", marks=exhaustive),
        pytest.param("dp2 x pp2", "fp8_e4m3", "gpt2", 2, "", marks=exhaustive),
        pytest.param("dp2 x cp2", "int8", "llama", 1, "", marks=exhaustive),
    ],
)
def test_terms_of_a_sum_are_rounded_once(mesh, kind, name, m, more):
    sizes = PLAIN[mesh]
    data, n = math.prod(sizes.get(axis, 1) for axis in ("dp", "rp")), math.prod(sizes.values())
    options = {"steps": 2, "policy": "fp32", "plan_options": {"codec": f"grads={kind},block=16{more}"}}
    case = ((name, "clipped adam", 3, data * m), options)
    found = ranks.run(n, trained_whole, [case], mesh=sizes)
    expected = ranks.run(n, defined, [case], mesh=sizes)
    for ((state, log),), ((same, same_log),) in zip(found, expected):
        assert log == same_log
        assert_same(state, same)


def one_sum(mesh, op, kind, size):
    """(the sum in codes, that of the terms) of tensors of which each rank has its own."""
    axis = mesh["dp"]
    coder = coder_of(kind, 16, Kernels())
    terms = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(axis.size)]
    job = codec.sum_coded(op, ["w"], [terms[axis.rank].clone()], axis, coder, torch.float32, mesh.ledger)
    while True:
        try:
            next(job)
        except StopIteration as done:
            return done.value[0], sum(terms)


@pytest.mark.parametrize("kind, bound", [("int8", 1 / 127), ("int4", 1 / 7), ("fp8_e4m3", 1 / 16)])
def test_a_sum_over_ranks_in_codes_is_near_the_sum_and_one_on_all_ranks(kind, bound):
    results = ranks.run(3, one_sum, "psum", kind, (7, 5))  # 35 elements: neither ranks nor blocks divide them
    for found, expected in results:
        assert found.shape == expected.shape
        assert torch.equal(found, results[0][0])
        # a term of at most 4 is rounded once by half a step, and the sum of at most 12 once
        assert 0 < float((found - expected).abs().max()) <= (3 * 4 + 12) * bound / 2


# ---- what is sent ----------------------------------------------------------------------------------------------------


def sent(mesh, codec_text, micro_batches):
    """{link: bytes of parameters and gradients} of one step, as the ledger counts them, and as the plan says."""
    sizes = {"d_model": 32, "d_ff": 64, "vocab_size": 32}
    model, tx = model_of("llama", **sizes), optim.sgd(0.1)
    plan = fzero.zero_plan(3, model, mesh, codec=codec_text)
    state = fzero.init_state(model, tx, plan, seed=3)
    step = fzero.make_train_step(model, tx, plan, micro_batches=micro_batches)
    for i in range(2):
        mesh.ledger.clear()
        step_batch = local_batch(batch(i, 16), mesh, micro_batches)
        state, _ = step(state, step_batch)
    found = {}
    for row in mesh.ledger.rows():
        if row.phase in ("forward", "backward", "reduce") and row.axis in ("dp", "rp"):
            found[row.axis] = found.get(row.axis, 0) + row.bytes
    said = {link: micro_batches * part + once for link, (part, once) in plan.sent_by_link().items()}
    return found, said


@pytest.mark.parametrize(
    "codec_text",
    [
        None,
        "params=int8,grads=int8,hpz,block=16",
        pytest.param("params=int4,grads=int4,hpz,block=16", marks=exhaustive),
    ],
)
def test_bytes_over_each_link_are_those_of_the_ledger(codec_text):
    for found, said in ranks.run(4, sent, codec_text, 2, mesh=MESHES["dp2 x rp2"]):
        assert found == said


# ---- bad input, and plans --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, words",
    [
        ("params=int5", "codec: params is 'int5' .did you mean int8..; it must be one of int8, int4, fp8_e4m3"),
        ("params", "codec 'params': 'params' has another form"),
        ("hpz=1", "codec 'hpz=1': 'hpz=1' has another form"),
        ("block=x", "codec 'block=x': 'block=x' has another form"),
        ("params=int8,block=24", "codec: block is 24; it must be a power of two from 16 to 8192"),
        ("weights=int8", "codec 'weights=int8': 'weights=int8' is not one of params=KIND"),
        ("grads=int8,grads=int4", "codec 'grads=int8,grads=int4': 'grads=int4' is not one of .* each once"),
        ("block=64", "codec: nothing is coded"),
    ],
)
def test_texts_that_are_no_codec_are_one_line(text, words):
    with pytest.raises(ValueError, match=words) as found:
        codec.Codec.parse(text)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "stage, sizes, text, options, words",
    [
        (2, {"dp": 2}, "params=int8", {}, "params is of stage 3, which gathers parameters, and the stage is 2"),
        (1, {"dp": 2}, "grads=int8", {}, "grads is of stages 2 and 3, which scatter sums, and the stage is 1"),
        (3, {"dp": 2}, "hpz", {}, "needs the nodes as rp, which is 1"),
        (3, {"dp": 2}, "grads=int8", {"reduce": "canonical"}, 'use reduce="fast"'),
        (3, {"dp": 2}, "params=int8", {"policy": "bf16_float8_gather"}, "gathers weights as float8 already"),
    ],
)
def test_plans_that_a_codec_does_not_go_with_are_one_line(stage, sizes, text, options, words):
    with pytest.raises(ValueError, match=words) as found:
        fzero.zero_plan(stage, model_of("llama"), fzero.fake_mesh(sizes), codec=text, **options)
    assert str(found.value).startswith(f"codec {text}: ") and "\n" not in str(found.value)


def test_hpz_needs_parameters_that_are_gathered_again():
    model, tx = model_of("llama"), optim.sgd(0.1)
    plan = fzero.zero_plan(3, model, fzero.fake_mesh({"dp": 2, "rp": 2}), codec="hpz")
    with pytest.raises(ValueError, match="codec hpz: hpz keeps what a node holds"):
        fzero.make_train_step(model, tx, plan, execution=fzero.Execution(reshard=False))


def evaluated(mesh):
    model, tx = model_of("llama"), optim.sgd(0.1)
    found = []
    for text in (None, "params=int4,block=16"):
        plan = fzero.zero_plan(3, model, mesh, codec=text)
        state = fzero.init_state(model, tx, plan, seed=3)
        losses = fzero.make_eval_step(model, plan)(state.params, local_batch(batch(0), mesh, 1))
        found.append(float(losses.total))
    return found


def test_an_evaluation_rounds_nothing():
    for plain, coded in ranks.run(2, evaluated):
        assert plain == coded


@slow
def test_a_plan_counts_codes_on_slow_links():
    """On a slow link between nodes a step takes longer, and less so the fewer bytes pass it."""
    settings = {"preset": "llama-tiny", "train": {"compiled": False}, "precision": {"policy": "bf16"}, "zero": 3}
    mesh, times = {"dp": 2, "rp": 2}, {}
    here = devices.device("h100", ranks_on_node=2)
    here = dataclasses.replace(here, links=(here.links[0]._replace(ranks=2), here.links[1]))
    for text in ("", "grads=int4"):
        for links in (here, devices.between_nodes(here, "0.1:1")):
            times[text, links is here] = fzero.plan(settings | {"codec": text}, mesh, gpu=links).step_s
    assert times["", False] > times["grads=int4", False] > times["", True]
    assert times["", False] > 2.5 * times["grads=int4", False]


# ---- gradients as autograd gives them --------------------------------------------------------------------------------

STRIDED = {"w": (16, 33), "v": (4, 6, 8), "narrow": (6, 16), "embedding": (32, 16)}
BATCH = {"x": (8, 16), "ids": (8,)}


def strided_loss(params, batch, plain):
    """A loss with gradients that are transposed, expanded and sparse; plain: with dense ones, in rows."""
    w, v, narrow, table = (params[name] * 1.0 if plain else params[name] for name in STRIDED)
    x = batch["x"] + torch.nn.functional.embedding(batch["ids"], table, sparse=not plain)
    y = (x @ w).pow(2).sum() + torch.einsum("bi,ji->bj", x, narrow).pow(2).sum() + v.transpose(0, 2).exp().sum()
    return y + (narrow.t().unsqueeze(0) * x.unsqueeze(-1)).sum(), len(x)


def strided_steps(mesh, cases):
    out, plain_forms = [], fzero.Execution(kernels="reference")
    draw = torch.Generator().manual_seed(0)
    first = {name: torch.randn(shape, generator=draw) / 8 for name, shape in STRIDED.items()}
    batch = {"x": torch.randn(BATCH["x"], generator=draw), "ids": torch.arange(8) % 3}
    for stage, text in cases:
        ends = []
        for plain in (False, True):
            plan = fzero.zero_plan(stage, first, mesh, policy=fzero.fp32(), codec=text)
            tx = optim.onebit_adam(1e-3, freeze=1) if text == "grads=1bit" else optim.sgd(1e-3)
            state = fzero.init_state(pytree.map(torch.clone, first), tx, plan, seed=0)
            step = fzero.make_train_step(
                partial(strided_loss, plain=plain), tx, plan, micro_batches=2, execution=plain_forms
            )
            for _ in range(2):
                state, _ = step(state, fzero.local_batch(batch, mesh, 2))
            ends.append(pytree.named_leaves(state.params))
        out.append(ends)
    return out


LOCO = "grads=int4,block=16,loco"


STRIDED_CASES = [(2, LOCO), (3, f"params=int8,{LOCO},errors=int8"), (0, "grads=1bit"), (1, None)]
MORE_CASES = [(3, LOCO), (2, "grads=int8,block=16"), (3, "grads=fp8_e4m3"), (0, None), (2, None), (3, None)]


@pytest.mark.parametrize("cases", [STRIDED_CASES[:2], pytest.param([*STRIDED_CASES[2:], *MORE_CASES], marks=slow)])
def test_a_gradient_travels_with_any_strides_and_without_its_zeros(cases):
    """Strides decide how a product adds, and so the last bits alone."""
    for found in ranks.run(2, strided_steps, cases):
        for case, (strided, plain) in zip(cases, found):
            assert strided.keys() == plain.keys(), case
            for name in strided:
                assert_close(strided[name], plain[name], atol=1e-5)
