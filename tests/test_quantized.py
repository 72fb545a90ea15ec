"""Frozen weights in codes: products are those of the dequantised weights, at every stage and on every mesh; codes are
never kept as dense weights."""

import math

import pytest
import ranks
import torch
from close import assert_close
from law_cases import F64, FP64, batch_of, config_of
from zero_cases import batch_for, model_of, train, trained_whole

import fzero
from fzero import models
from fzero.core import prng, pytree
from fzero.kernels import dequantize, quantize
from fzero.kernels.quantize_codes import NF4
from fzero.models import base
from fzero.models.weights import LowRankSum, QuantizedWeight
from fzero.offload import DiskTensor, Nvme

slow = pytest.mark.slow
CTX = base.Ctx(dtype=F64)
every_kind = pytest.mark.parametrize("kind", ["nf4", "int4", "int8"])


def dense_of(model, params):
    """The parameters of the model without codes that `params` stand for."""
    config = model.config

    def node(value):
        if not isinstance(value, dict):
            return value
        if value.keys() == {"codes", "scales"}:
            return QuantizedWeight(value["codes"], value["scales"], config.kind, config.block, F64).dense()
        return {key: node(one) for key, one in value.items()}

    return node(params)


def pair(kind, family="llama"):
    """(the model with LoRA over codes, the one with LoRA over the same weights dense, parameters of both)"""
    plain = models.build(config_of(family))
    coded, dense = models.lora(models.quantized(plain, kind, 16), 2), models.lora(plain, 2)
    params = models.init_params(coded, prng.key(1), F64)
    moved = lambda name, p: 0.3 * prng.normal(prng.fold_in(prng.key(9), name), p.shape, dtype=F64)  # noqa: E731
    params = pytree.map_named(lambda name, p: moved(name, p) if name.endswith("_lora_b") else p, params)
    return coded, dense, params, dense_of(coded, params)


def test_levels_of_nf4_are_the_quantiles_of_the_paper():
    """Appendix E: 9 quantiles from 0.5 to 0.9677083 above zero, 8 below, without one of the two zeros, over the
    largest."""
    offset = 0.9677083
    above, below = (torch.special.ndtri(torch.linspace(offset, 0.5, n, dtype=F64))[:-1] for n in (9, 8))
    levels = torch.cat([-below, torch.zeros(1, dtype=F64), above.flip(0)]) / above.max()
    assert_close(levels, torch.tensor(NF4, dtype=F64), rtol=1e-5, atol=1e-6)


def test_nf4_rounds_to_the_nearest_level():
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(0))
    q = quantize.quantize(x, "nf4", 32)
    assert (tuple(q.data.shape), tuple(q.scale.shape)) == ((5, 35), (5, 3))
    got = dequantize(q, "nf4", 32, size=70)
    scales = q.scale.repeat_interleave(32, 1)[:, :70]
    nearest = (torch.tensor(NF4) * scales[..., None] - x[..., None]).abs().amin(-1)
    assert_close((got - x).abs(), nearest, rtol=0, atol=1e-6)
    broken = x.clone()
    broken[0, 0] = math.inf
    back = dequantize(quantize.quantize(broken, "nf4", 32), "nf4", 32, size=70)
    assert back[0, :32].isnan().all() and torch.equal(back[1:], got[1:])
    with pytest.raises(ValueError, match="nf4 goes to the nearest level; give no key"):
        quantize.quantize(x, "nf4", 32, key=prng.key(0))


@every_kind
def test_loss_and_gradients_are_those_of_the_dequantised_weights(kind):
    coded, dense, params, whole = pair(kind)
    factors, rest = pytree.split(params, lambda name, p: name.endswith(("_lora_a", "_lora_b")))

    def loss(factors):
        return models.loss(coded, pytree.merge(factors, rest, params), batch_of(0), CTX).total

    got, value = torch.func.grad_and_value(loss)(factors)
    expected = torch.func.grad(lambda p: models.loss(dense, p, batch_of(0), CTX).total)(whole)
    assert_close(value, models.loss(dense, whole, batch_of(0), CTX).total, rtol=1e-12, atol=0)
    named = pytree.named_leaves(expected)
    assert_close(got, {name: named[name] for name in got}, rtol=1e-10, atol=1e-11)
    assert all(g.abs().max() > 1e-4 for g in got.values())


def test_merged_weights_compute_what_the_parts_do():
    coded, _, params, _ = pair("nf4")
    merged = models.merge(coded, params)
    plain = models.build(config_of("llama"))
    assert pytree.names(merged) == pytree.names(models.init_params(plain, prng.key(0)))
    got, expected = (models.loss(m, p, batch_of(0), CTX).total for m, p in ((plain, merged), (coded, params)))
    assert_close(got, expected, rtol=1e-6, atol=0)  # merged in float32


def test_a_model_that_never_heard_of_it():
    """A block of a user's own, x @ w or another function of w: equal to what it computes with the dense weight."""
    g = torch.Generator().manual_seed(0)
    w, a, b = (torch.randn(*shape, generator=g) for shape in ((16, 32), (16, 2), (2, 32)))
    codes, scales = quantize.quantize(w, "int8", 16)
    parts = LowRankSum(QuantizedWeight(codes, scales.view(torch.int32), "int8", 16), a, b, 0.5)
    x, dense = torch.randn(3, 16, generator=g), parts.dense()
    for f in (lambda w: x @ w, lambda w: torch.einsum("bi,io->bo", x, w), lambda w: x @ w.to(torch.float32),
              lambda w: torch.nn.functional.linear(x, w.mT), lambda w: (x @ torch.cat([w, w], 1))[:, :32]):  # fmt: skip
        assert_close(f(parts), f(dense), rtol=1e-5, atol=1e-5)


def test_no_dense_weight_is_kept_for_the_backward_pass():
    coded, _, params, _ = pair("nf4")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        factors = {name: p.requires_grad_() for name, p in pytree.named_leaves(params).items() if "_lora_" in name}
        models.loss(coded, pytree.from_named({**pytree.named_leaves(params), **factors}, params), batch_of(0), CTX)
    shapes = {shape[1:] for name, shape in base.leaf_shapes(coded).items() if "/w_" in name and "_lora_" not in name}
    dense = [t for t in kept if t.is_floating_point() and tuple(t.shape) in shapes | {s[::-1] for s in shapes}]
    assert kept and not dense, [tuple(t.shape) for t in dense]


MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "dp2 x tp2": {"dp": 2, "tp": 2}}


@slow
@pytest.mark.parametrize("mesh", MESHES)
def test_parallel_is_serial(mesh):
    sizes = MESHES[mesh]
    data = sizes.get("dp", 1)
    options = {"plan_options": {"frozen": models.frozen_leaves(model_of("qlora").config)}, "steps": 3}
    cases = [
        (("qlora", "adam", stage, 2 * data), {**options, "remat": remat}) for stage, remat in ((0, "none"), (3, "full"))
    ]
    expected, _, expected_log = train(fzero.one_process(), "qlora", "adam", 0, 2 * data, **options)
    for state, log in ranks.run(math.prod(sizes.values()), trained_whole, cases, mesh=sizes)[0]:
        assert_close(log, expected_log, rtol=1e-10, atol=1e-12)
        assert_close(state.params, expected.params, rtol=1e-10, atol=1e-10)


def test_codes_are_sharded_at_stage_3():
    mesh = fzero.fake_mesh({"dp": 2, "tp": 2})
    plan = fzero.zero_plan(3, model_of("qlora"), mesh, frozen=models.frozen_leaves(model_of("qlora").config))
    leaf = plan.leaves["blocks/attn/w_q/codes"]
    assert (leaf.dtype, leaf.trained, {"dp", "tp"} <= set(leaf.params.axes)) == (torch.uint8, False, True)
    with pytest.raises(
        ValueError, match=r"blocks/attn/w_q has rows of 32 elements, which tp=4 cuts within a block of 16"
    ):
        fzero.zero_plan(3, model_of("qlora"), fzero.fake_mesh({"tp": 4}))


@slow
@pytest.mark.parametrize("offload", ["params=host", "params=nvme,opt=nvme,grads=nvme"])
def test_offloaded_codes_train_to_the_same_bits(offload, tmp_path):
    model, mesh, tx = model_of("qlora"), fzero.one_process(), fzero.optim.adam(1e-2)
    states = []
    for where in ("", offload):
        plan = fzero.zero_plan(0, model, mesh, policy=FP64, frozen=models.frozen_leaves(model.config), offload=where)
        nvme = Nvme(tmp_path / "nvme") if "nvme" in where else None
        state = fzero.init_state(model, tx, plan, seed=3, nvme=nvme)
        step = fzero.make_train_step(model, tx, plan, micro_batches=2, nvme=nvme)
        for i in range(3):
            state, metrics = step(state, batch_for(i, 8))
        leaves = [x.tensor() if isinstance(x, DiskTensor) else x for x in pytree.leaves(state.params)]
        states.append((leaves, float(metrics.loss)))
    (plain, loss), (away, other) = states
    assert loss == other and all(torch.equal(a, b) for a, b in zip(plain, away, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "nf5"}, r"quantized: kind is 'nf5' \(did you mean nf4\?\); use nf4, int4, int8"),
        ({"block": 48}, "quantized: block is 48; it must be a power of two from 16 to 8192"),
        ({"targets": "/atn/"}, "quantized: targets '/atn/' matches no leaf of the blocks"),
        ({"targets": "norm_1"}, "quantized: blocks/norm_1/scale of shape .* is no weight"),
        ({"targets": "("}, "quantized: targets '\\(' is not a regular expression"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        models.quantized(models.build(config_of("llama")), **arguments)
    with pytest.raises(ValueError, match=r"write lora\(quantized\(model\)\)"):
        models.quantized(models.lora(models.build(config_of("llama")), 2))
    with pytest.raises(ValueError, match="the model has no weights in codes"):
        models.quantize_weights(models.build(config_of("llama")), {})


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_weights_that_are_no_numbers_have_no_codes(kind, value):
    plain = models.build(models.MLPConfig())
    params = models.init_params(plain, prng.key(0))
    params["blocks"]["w_in"][1, 2, 3] = value
    with pytest.raises(ValueError, match=r"^quantize_weights: blocks/w_in has 1 elements that are NaN or infinite"):
        models.quantize_weights(models.quantized(plain, kind, 16, targets="/w_"), params)
