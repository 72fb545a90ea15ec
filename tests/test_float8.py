"""Float8 linears: the formats against a table of all their numbers, the products by hand, all forms alike, and training
by the policies."""

import functools
import re

import kernel_laws as laws
import pytest
import ranks
import torch
import zero_cases
from close import assert_close, assert_same
from torch.fx.experimental.proxy_tensor import make_fx
from zero_cases import train, whole

import fzero
from fzero import models, optim
from fzero.core import graph_passes, observe, precision, pytree, torch_private, vjp_pair
from fzero.kernels import float8, float8_gather, narrow_weight, registry, widen_weight
from fzero.kernels.float8 import E4M3, E5M2, RECIPES, float8_linear

F64 = torch.float64
every_scaling = pytest.mark.parametrize("scaling", RECIPES)
FORMS = ("emulated", "scaled_mm")


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


# ---- the formats -----------------------------------------------------------------------------------------------------


def table(dtype):
    """All finite numbers of the format, from the definition of its bits, and whether the last bit of each is 0."""
    mantissa, bias, top = (3, 7, 0x7E) if dtype == E4M3 else (2, 15, 0x7B)
    numbers = []
    for code in range(top + 1):
        exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
        scale = 2.0 ** (max(exponent, 1) - bias - mantissa)
        numbers.append((scale * (fraction + ((exponent > 0) << mantissa)), code % 2 == 0))
    return torch.tensor([n for n, _ in numbers], dtype=F64), torch.tensor([even for _, even in numbers])


def nearest_in(dtype, x):
    """Each x rounded to the nearest number of the format, ties to even, too large ones to the largest: float64."""
    numbers, even = table(dtype)
    high = torch.searchsorted(numbers, x.abs().contiguous()).clamp(1, len(numbers) - 1)
    below, above = x.abs() - numbers[high - 1], numbers[high] - x.abs()
    up = (above < below) | ((above == below) & even[high])
    return torch.where(up, numbers[high], numbers[high - 1]).copysign(x)


def by_hand(x, dtype, dim, powers_of_2):
    """(numbers of the format, float64, and the scale) of x."""
    limit = float(table(dtype)[0][-1])
    amax = x.double().abs().amax() if dim is None else x.double().abs().amax(dim, keepdim=True)
    scale = (limit / amax).float().double()
    scale = 2.0 ** torch.floor(torch.log2(scale)) if powers_of_2 else scale
    return nearest_in(dtype, (x.double() * scale).float().double()), scale


@pytest.mark.parametrize("dtype, largest", [(E4M3, 448.0), (E5M2, 57344.0)], ids=str)
@pytest.mark.parametrize("dim, powers_of_2", [(None, False), (0, True), (1, True), (1, False)], ids=str)
def test_quantise_rounds_to_the_nearest_of_the_format(dtype, largest, dim, powers_of_2):
    x = laws.draw((60, 50), dtype=torch.float32, device="cpu")[0] * torch.logspace(-4, 2, 50)
    numbers, inverse = float8.quantise(x, dtype, dim, powers_of_2)
    expected, scale = by_hand(x, dtype, dim, powers_of_2)
    assert numbers.dtype == dtype and float(table(dtype)[0][-1]) == largest == float(torch.finfo(dtype).max)
    assert_same(numbers.double(), expected)
    assert_close(inverse.double(), (1.0 / scale).reshape(inverse.shape), rtol=2e-7)
    top = numbers.double().abs().amax() if dim is None else numbers.double().abs().amax(dim)
    assert bool((top >= largest / 2).all()) and (powers_of_2 or bool((top == largest).all()))
    if powers_of_2:
        assert_same(torch.frexp(inverse).mantissa, torch.full_like(inverse, 0.5))


def test_ties_go_to_even_and_small_numbers_to_subnormals():
    x = torch.tensor([[448.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, 2.0**-9, 2.0**-7, -1e-9]])
    numbers, _ = float8.quantise(x, E4M3, None, False)
    assert numbers.float().tolist() == [[448.0, 16.0, 20.0, 0.0, 2.0**-8, 2.0**-9, 2.0**-7, -0.0]]


@pytest.mark.parametrize("dtype", (E4M3, E5M2), ids=str)
def test_no_scale_carries_a_number_beyond_the_format(dtype):
    x = torch.logspace(-12, 12, 4001, dtype=F64)[:, None] * torch.tensor([1.0, -1.0, 0.5])
    for wide in (x, x.float()):  # as float32 some of the float64 maxima are smaller
        numbers, _ = float8.quantise(wide, dtype, 1, False)
        limit = torch.finfo(dtype).max
        assert_same(
            numbers.double(), torch.tensor([[limit, -limit, limit / 2]], dtype=F64).expand(4001, 3).contiguous()
        )


# ---- the product -----------------------------------------------------------------------------------------------------


def operands(n=32, size_in=48, size_out=64, dtype=torch.bfloat16):
    return [t.to(dtype) for t in laws.draw((n, size_in), (size_in, size_out), (n, size_out))]


@every_scaling
def test_all_three_products_by_hand(scaling):
    recipe = RECIPES[scaling]
    x, w, g = (t.cpu() for t in operands())

    def product(a, b, kind_a, kind_b):
        qa, sa = by_hand(a, kind_a, 1 if recipe.rowwise else None, recipe.powers_of_2)
        qb, sb = by_hand(b, kind_b, 0 if recipe.rowwise else None, recipe.powers_of_2)
        return (qa @ qb) / (sa * sb)

    value, gradient = recipe.value, recipe.gradient
    assert (value, gradient) == ((E4M3, E5M2) if scaling == "tensorwise" else (E4M3, E4M3))
    expected = [product(x, w, value, value), product(g, w.T, gradient, value), product(x.T, g, value, gradient)]
    exact = [x.double() @ w.double(), g.double() @ w.double().T, x.double().T @ g.double()]
    for dtype, tolerance in ((torch.bfloat16, 4e-3), (torch.float32, 2e-6), (F64, 1e-7)):
        leaves = [t.to(dtype).requires_grad_() for t in (x, w)]
        y = float8_linear(*leaves, scaling, impl="reference")
        results = [y.detach(), *torch.autograd.grad(y, leaves, g.to(dtype))]
        for got, want, plain in zip(results, expected, exact):
            assert got.dtype == dtype
            assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
            # The error of float8 itself: two operands with 3 bits (2 in the coarse format) and a half behind the first.
            assert 0.02 < relative(got, plain) < 0.08


@every_scaling
@pytest.mark.parametrize("impl", FORMS)
def test_every_form_gives_the_same(impl, scaling):
    laws.skip_without_float8(scaling, impl)
    x, w, _ = operands()
    results = {}
    for name in ("reference", impl):
        results[name] = laws.both_passes(lambda *t, name=name: float8_linear(*t, scaling, impl=name), [x, w])
    if impl == "emulated":
        assert_same(results[impl], results["reference"])
    else:  # sums in another order, and on a GPU of values with fewer bits
        for got, want in zip(results[impl][0] + results[impl][1], results["reference"][0] + results["reference"][1]):
            assert relative(got, want) < 5e-3


@pytest.mark.each_value
@every_scaling
@pytest.mark.parametrize("impl", FORMS)
def test_strides_dims_and_repeats(impl, scaling):
    laws.skip_without_float8(scaling, impl)
    x, w, _ = operands()
    expected = laws.both_passes(lambda *t: float8_linear(*t, scaling, impl=impl), [x, w])
    assert_same(laws.both_passes(lambda *t: float8_linear(*t, scaling, impl=impl), [x, w]), expected)
    apart = [torch.stack((x, x), -1)[..., 0], w.t().contiguous().t()]
    assert not any(t.is_contiguous() for t in apart)
    for got, want in zip(laws.both_passes(lambda *t: float8_linear(*t, scaling, impl=impl), apart), expected):
        assert_close(got, want, rtol=8e-3, atol=1e-3)  # products by torch may add in another order
    batched = float8_linear(x.reshape(2, 16, 48), w, scaling, impl=impl)
    assert_same(batched.reshape(32, 64), expected[0][0])


@every_scaling
def test_far_rows(scaling):
    laws.skip_without_float8(scaling)
    x, w, _ = operands()
    far = laws.far_apart(16, 48, torch.bfloat16, apart=(1 << 31) // 15 + 8)
    far.copy_(x[:16])
    assert_same(float8_linear(far, w, scaling, impl="scaled_mm"), float8_linear(x[:16], w, scaling, impl="scaled_mm"))


@every_scaling
@pytest.mark.parametrize("impl", ("reference", *FORMS))
def test_zeros_and_what_is_no_number(impl, scaling):
    laws.skip_without_float8(scaling, impl)
    x, w, _ = operands()
    for leaves in ([0 * x, w], [x, 0 * w]):
        (y,), grads = laws.both_passes(lambda *t: float8_linear(*t, scaling, impl=impl), leaves)
        assert not y.any() and all(grad.isfinite().all() for grad in grads)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for odd in (x.clone(), w.clone()):
            odd[3, 5] = bad
            y = float8_linear(*((odd, w) if odd.shape == x.shape else (x, odd)), scaling, impl=impl)
            hit = y.isnan()
            if not RECIPES[scaling].rowwise:
                assert hit.all()
            else:
                row = odd.shape == x.shape
                assert hit[3].all() if row else hit[:, 5].all()
                assert int(hit.sum()) == (64 if row else 32)


def test_no_rows_and_tiny_numbers():
    for scaling in RECIPES:
        x, w, _ = operands(dtype=torch.float32)
        empty = x[:0].requires_grad_()
        y = float8_linear(empty, w.requires_grad_(), scaling)
        y.sum().backward()
        assert y.shape == (0, 64) and not w.grad.any()
        tiny = float8_linear(x * 1e-20, w.detach(), scaling)
        assert bool((tiny == 0.0).all())  # far below SMALLEST: no scale overflows
        assert relative(float8_linear(x * 1e-9, w.detach(), scaling), x @ w.detach() * 1e-9) < 0.08


# ---- derivatives and transforms --------------------------------------------------------------------------------------


@every_scaling
def test_derivatives_are_float8_products(scaling):
    x, w, g = operands(dtype=torch.float32)
    product = float8.product_reference
    dx, dw = product(g, w.T, scaling, True, False), product(x.T, g, scaling, False, True)
    for impl in ("reference", "emulated"):
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        assert_same(list(torch.autograd.grad(float8_linear(*leaves, scaling, impl=impl), leaves, g)), [dx, dw])

    def loss(x, w):
        return (float8_linear(x, w, scaling) * g).sum()

    assert_same(list(torch.func.grad(loss, argnums=(0, 1))(x, w)), [dx, dw])
    # The derivative of dw by x, in the direction t: again a float8 product, t rounded as a gradient, and so is g.
    t = laws.draw(x.shape, seed=8)[0].float()
    _, slope = torch.func.jvp(lambda x: torch.func.grad(loss, argnums=1)(x, w), (x,), (t,))
    assert_same(slope, product(t.T, g, scaling, True, True))
    _, along = torch.func.jvp(lambda x: float8_linear(x, w, scaling), (x,), (t,))
    assert_same(along, product(t, w, scaling, True, False))
    t = laws.draw(w.shape, seed=9)[0].float()
    _, along = torch.func.jvp(lambda w: float8_linear(x, w, scaling), (w,), (t,))
    assert_same(along, product(x, t, scaling, False, True))


@every_scaling
def test_vmap_is_a_loop(scaling):
    x, w, g = operands(dtype=torch.float32)
    x, g = x.reshape(4, 8, 48), g.reshape(4, 8, 64)

    def gradient(w, x, g):
        return torch.func.grad(lambda w: (float8_linear(x, w, scaling) * g).sum())(w)

    assert_close(
        torch.vmap(gradient, (None, 0, 0))(w, x, g),
        torch.stack([gradient(w, *row) for row in zip(x, g)]),
        rtol=1e-5,
        atol=1e-4,
    )
    with pytest.raises(ValueError, match="impl='emulated' does not serve"):
        torch.vmap(lambda x: float8_linear(x, w, scaling, impl="emulated"))(x)


@pytest.mark.each_value
@every_scaling
@pytest.mark.parametrize("impl", FORMS)
def test_a_trace_gives_the_same_bits(impl, scaling):
    laws.skip_without_float8(scaling, impl)
    x, w, _ = operands()
    out, grads = laws.both_passes(lambda *t: float8_linear(*t, scaling, impl=impl), [x, w])
    pair = vjp_pair.vjp_pair(lambda *t: (float8_linear(*t, scaling, impl=impl),), 2, compiled=False, budget=0.99)
    outs, residuals = pair.forward([x, w])
    cotangent = laws.draw(outs[0].shape, seed=1)[0].to(x.dtype)
    assert_same([list(outs), list(pair.backward(residuals, [cotangent]))], [out, grads])


@pytest.mark.parametrize(
    ("scaling", "compiled"),
    [
        ("tensorwise", False),
        ("rowwise", False),
        pytest.param("tensorwise", True, marks=pytest.mark.exhaustive),
        pytest.param("rowwise", True, marks=pytest.mark.exhaustive),
    ],
)
def test_linears_of_one_input_round_it_once_in_a_traced_block(scaling, compiled, monkeypatch):
    """The bits are those of linears by themselves; no number of a weight is kept for the backward pass."""
    laws.skip_without_float8(scaling)
    x, w, _ = operands()
    inputs, launched, launch = [x, w, w.flip(0)], [], float8._launch

    def block(x, *ws):
        return (sum(float8_linear(x, w, scaling, impl="scaled_mm") for w in ws),)

    out, grads = laws.both_passes(lambda *tensors: block(*tensors)[0], inputs)
    monkeypatch.setattr(float8, "_launch", lambda x, *rest: launched.append(tuple(x.shape)) or launch(x, *rest))
    pair = vjp_pair.vjp_pair(block, 3, compiled=compiled, budget=0.99)
    outs, residuals = pair.forward(inputs)
    kept = [tuple(t.shape) for t in residuals if isinstance(t, torch.Tensor) and t.dtype.itemsize == 1]
    cotangent = laws.draw(outs[0].shape, seed=1)[0].to(x.dtype)
    assert_same([list(outs), list(pair.backward(residuals, [cotangent]))], [out, grads])
    # x once for both orders, each of two weights twice, and the gradient: the sum gives both linears the same one, and
    # each reads it.
    assert sorted(launched) == sorted([(32, 48), *[(64, 48), (48, 64)] * 2, *[(32, 64)] * 2])
    assert kept == [(48, 32)]


@pytest.mark.skipif(laws.DEVICE != "cpu", reason="a GPU is asked for its compute capability")
@every_scaling
@pytest.mark.parametrize("lacking", (E4M3, E5M2), ids=str)
def test_a_cpu_without_such_products_is_asked_before(scaling, lacking, monkeypatch):
    def product(a, b, **_):
        if lacking in (a.dtype, b.dtype):
            raise RuntimeError("could not create a primitive descriptor for the matmul primitive\nmore")

    monkeypatch.setattr(torch_private, "scaled_mm", product, raising=False)
    monkeypatch.setattr(float8, "cpu_lacks", float8.cpu_lacks.__wrapped__)
    x, w, _ = operands()
    if lacking == E5M2 and scaling == "rowwise":
        assert not float8.cpu_lacks(scaling)  # which is not among its formats
        return
    with pytest.raises(ValueError, match=rf"no {scaling} float8 product: could not create .*primitive; use auto"):
        float8_linear(x, w, scaling, impl="scaled_mm")
    assert registry.explain("float8_linear", x, w, scaling).chosen == "emulated"


@every_scaling
def test_sums_of_gradients_keep_their_bits(scaling, monkeypatch):
    """The forward product alone is added up with the fewer bits of the matrix units."""
    fast = []

    def product(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
        fast.append(use_fast_accum)
        return ((a.float() @ b.float()) * (scale_a * scale_b)).to(out_dtype)

    monkeypatch.setattr(torch_private, "scaled_mm", product, raising=False)
    monkeypatch.setattr(float8, "cpu_lacks", lambda scaling: "")
    x, w, _ = operands()
    laws.both_passes(lambda *t: float8_linear(*t, scaling, impl="scaled_mm"), [x, w])
    assert fast == [True, False, False]


def both_numbers(x, given, turned, same=False):
    """Numbers of x, and of x turned by what `turned` makes of those; the second as a gradient's or `same`."""
    first = float8.float8_numbers(x, given, "tensorwise", False)
    return *first, *float8.float8_numbers(x.t(), turned(first, x), "tensorwise", not same)


@pytest.mark.parametrize(
    ("f", "joined"),
    [
        (lambda x, most: both_numbers(x, most, lambda first, x: most, True), True),
        (lambda x, most: both_numbers(x, most, lambda first, x: x.abs().amax(), True), True),  # found before it
        (lambda x, most: both_numbers(x, most, lambda first, x: first[1], True), False),  # needs the other's result
        (lambda x, most: both_numbers(x, most, lambda first, x: most), False),  # another format
        (lambda x, most: (*both_numbers(x + 1, most, lambda *_: most, True), x.t()), True),
        (
            lambda x, most: (
                *float8.float8_numbers(x + 1, most, "tensorwise", False),
                *float8.float8_numbers(x.t(), most, "tensorwise", False),
            ),
            False,
        ),
    ],
    ids=["one-scale", "own-scale", "depends", "formats", "sum", "another"],
)
def test_numbers_in_both_orders_are_made_by_one_read_where_they_can(f, joined):
    x = laws.draw((32, 48))[0].to(torch.bfloat16)
    most = x.abs().amax() + 1
    graph = make_fx(f)(x, most)
    for node in graph.graph.nodes:
        node.meta.setdefault("val", None)
    graph_passes.merge_transposed_calls(graph)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(float8.float8_both) == joined
    assert targets.count(float8.float8_numbers) == (0 if joined else 2)
    # By their bits: numbers too large for the format are NaN in the interpreter of Triton 3.6, and the largest later.
    bits = lambda t: t.view(torch.uint8) if t.dtype.itemsize == 1 else t  # noqa: E731
    assert_same([bits(t) for t in graph(x, most)], [bits(t) for t in f(x, most)])


def test_what_it_refuses():
    x, w, _ = operands()
    for impl in ("auto", "reference", *FORMS):
        with pytest.raises(ValueError, match=r"float8: scaling is 'rowise'.*it must be one of tensorwise, rowwise"):
            float8_linear(x, w, "rowise", impl=impl)
    with pytest.raises(ValueError, match=r"the dtypes are torch.float32 and torch.bfloat16"):
        float8_linear(x.float(), w, impl="scaled_mm")
    with pytest.raises(ValueError, match=r"31 rows times \[48, 64\]: the matrix units take multiples of 16"):
        float8_linear(x[:31], w, impl="scaled_mm")
    assert float8_linear.flops(x, w) == 2 * 32 * 48 * 64


# ---- as a policy -----------------------------------------------------------------------------------------------------


@functools.cache
def losses(policy, steps=30):
    """Of a small Llama on sequences that can be learnt, with a tenth of noise."""
    config = models.LlamaConfig(vocab_size=64, max_len=32, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=128)
    model, mesh, tx = models.build(config), fzero.one_process(), optim.adamw(3e-3)
    plan = fzero.zero_plan(0, model, mesh, policy=precision.POLICIES[policy]())
    step = fzero.make_train_step(model, tx, plan)
    state = fzero.init_state(model, tx, plan, seed=0)
    generator, log = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        tokens = (torch.randint(0, 64, (8, 1), generator=generator) + 3 * torch.arange(33)) % 64
        noise = torch.randint(0, 64, tokens.shape, generator=generator)
        tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.1, noise, tokens)
        state, metrics = step(state, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
        log.append(float(metrics.loss))
    return torch.tensor(log, dtype=F64)


@pytest.mark.parametrize("policy", ("bf16_float8", "bf16_float8_rowwise"))
def test_a_run_stays_with_that_in_bfloat16(policy):
    plain, ours = losses("bf16"), losses(policy)
    assert plain[-1] < 0.5 * plain[0]
    assert_close(ours, plain, rtol=0.01)
    assert not torch.equal(ours, plain)


def test_the_linears_of_the_blocks_alone_are_float8():
    seen = {}

    def products(name, **changes):
        model = models.build(changes.pop("config"))
        ctx = models.Ctx(dtype=torch.float32, matmul="float8_rowwise")
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        params = models.init_params(model, fzero.core.prng.key(0))
        called = []
        real = float8.product_reference
        with pytest.MonkeyPatch.context() as patch, observe() as used:
            patch.setattr(
                float8, "product_reference", lambda a, b, *rest: called.append(tuple(b.shape)) or real(a, b, *rest)
            )
            models.loss(model, params, {"tokens": tokens, "targets": tokens}, ctx)
        seen[name] = sorted(called)
        assert used["float8_linear"] == {"emulated"}

    sizes = {"vocab_size": 20, "max_len": 8, "d_model": 8, "n_layers": 1, "d_ff": 24}
    products("llama", config=models.LlamaConfig(**sizes, n_heads=4, n_kv_heads=2))
    products("gpt2", config=models.GPT2Config(**sizes, n_heads=4))
    products("moe", config=models.MoEConfig(**sizes, n_heads=4, n_kv_heads=4, n_experts=3))
    products("mlp", config=models.MLPConfig(**sizes))
    assert seen == {
        "llama": [(8, 4), (8, 4), (8, 8), (8, 8), (8, 24), (8, 24), (24, 8)],
        "gpt2": [(8, 8)] * 4 + [(8, 24), (24, 8)],
        "moe": [(8, 8)] * 4,  # not the router, and not the experts
        "mlp": [(8, 24), (24, 8)],
    }


def on_a_mesh(mesh, policy, stage, micro_batches):
    state, specs, log = train(mesh, "llama", "adam", stage, micro_batches, policy=precision.POLICIES[policy](), rows=8)
    return whole(state, specs, mesh).params, [row[0] for row in log]


@pytest.mark.parametrize("policy", ("bf16_float8", "bf16_float8_rowwise"))
def test_on_a_mesh(policy):
    """A scale is of a micro-batch: ZeRO gives the bits of one process that takes the same ones. The scales of a
    tensor-parallel rank are of its own shards, which changes the rounding."""
    alone = on_a_mesh(fzero.one_process(), policy, 0, 2)
    for by_rank in ranks.run(2, on_a_mesh, policy, 3, 2, mesh={"dp": 2}):
        assert_same(by_rank[0], alone[0])
        assert by_rank[1] == alone[1]
    for _, log in ranks.run(2, on_a_mesh, policy, 0, 2, mesh={"tp": 2}):
        assert_close(torch.tensor(log), torch.tensor(alone[1]), rtol=0.05)


# ---- on their way ----------------------------------------------------------------------------------------------------


def of_kinds():
    """Weights [64, 48] in bfloat16: of usual sizes, with a wide range, tiny, of zeros and one, and with an infinity."""
    x = laws.draw((64, 48))[0]
    wide = x * 10.0 ** (4 * laws.draw((64, 48), seed=1)[0])
    odd = [torch.zeros_like(x), x, x]
    odd[1] = torch.where(torch.arange(48, device=x.device) == 5, -3.0, 0.0).expand(64, 48)
    odd[2] = x.masked_fill(torch.arange(48, device=x.device) == 7, float("inf"))
    return [t.bfloat16() for t in (x, 0.02 * x, wide, 1e-20 * x, *odd)]


def round_trip(w, impl):
    most = torch.linalg.vector_norm(w, torch.inf).float()
    return widen_weight(narrow_weight(w, most, impl=impl), most, impl=impl)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_product_of_weights_that_were_float8_on_their_way_has_the_same_bits(impl):
    x, g = (t.bfloat16() for t in laws.draw((32, 64), (32, 48), seed=2))
    for w in of_kinds():
        back = round_trip(w, impl)
        assert back.dtype == torch.bfloat16 and back.shape == w.shape
        for a, b in ((x, lambda w: w), (g, lambda w: w.t())):
            products = [float8.product_reference(a, b(t), "tensorwise", False, False) for t in (w, back)]
            assert_same(*(torch.nan_to_num(p, nan=7.0) for p in products))
    assert not torch.equal(round_trip(of_kinds()[0], impl), of_kinds()[0])


@pytest.mark.slow
def test_both_forms_have_the_same_bits_also_with_a_chunk_that_is_not_whole(monkeypatch):
    monkeypatch.setattr(float8_gather, "CHUNK", 100)
    for w in of_kinds():
        most = torch.linalg.vector_norm(w, torch.inf).float()
        forms, layouts = ("reference", "triton"), (w, w.t().contiguous().t())
        numbers = [narrow_weight(t, most, impl=impl) for impl in forms for t in layouts]
        for other in numbers[1:]:  # NaN has two codes
            assert_same(*(torch.nan_to_num(x.view(E4M3).float(), nan=500.0) for x in (other, numbers[0])))
        if most.isfinite():  # the interpreter reads NaN as a number
            assert_same(*(widen_weight(numbers[0], most, impl=impl) for impl in forms))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "deepseek", "mlp"])
def test_a_model_says_which_leaves_linear_alone_uses(name):
    """To gather one of them as float8 changes no bit of loss and gradients; the other matrices would."""
    sizes = {"vocab_size": 20, "max_len": 8, "d_model": 16, "n_layers": 2, "d_ff": 24}
    model = models.build(
        {
            "llama": lambda: models.LlamaConfig(**sizes, n_heads=4, n_kv_heads=2),
            "gpt2": lambda: models.GPT2Config(**sizes, n_heads=4),
            "mixtral": lambda: models.MoEConfig(**sizes, n_heads=4, n_kv_heads=4, n_experts=3),
            "deepseek": lambda: models.DeepSeekConfig(
                **sizes,
                n_dense=1,
                n_heads=2,
                q_rank=8,
                kv_rank=8,
                nope_dim=8,
                rope_dim=8,
                value_dim=8,
                d_expert=8,
                n_experts=4,
                top_k=2,
                n_groups=2,
                top_groups=1,
            ),
            "mlp": lambda: models.MLPConfig(**sizes),
        }[name]()
    )
    ctx = models.Ctx(dtype=torch.bfloat16, matmul="float8_tensorwise")
    tokens = torch.arange(8)[None] % 20
    params = pytree.map(lambda x: x.bfloat16(), models.init_params(model, fzero.core.prng.key(0)))

    def both(params):
        def total(params):
            return models.loss(model, params, {"tokens": tokens, "targets": tokens}, ctx).total

        grads, loss = torch.func.grad_and_value(total)(params)
        return [loss, *pytree.leaves(grads)]

    def by_layer(x):
        return torch.stack([round_trip(layer, "reference") for layer in x])

    named = pytree.named_leaves(params)
    linear = {leaf for leaf in named if re.fullmatch(model.traits.linear, leaf)}
    assert linear and all(named[leaf].dim() == 3 for leaf in linear)
    coded = pytree.map_named(lambda leaf, x: by_layer(x) if leaf in linear else x, params)
    expected = both(params)
    assert_same(both(coded), expected)
    for leaf in named.keys() - linear:
        if named[leaf].dim() >= 3 or leaf == "embed/tokens":
            other = pytree.map_named(lambda n, x, leaf=leaf: by_layer(x) if n == leaf else x, params)
            assert any(not torch.equal(a, b) for a, b in zip(both(other), expected)), leaf


def gathered(mesh, policy):
    """(the rows of gathers over dp in three steps, losses) of a rank at stage 3."""
    mesh.ledger.clear()
    _, log = on_a_mesh(mesh, policy, 3, 2)
    return [row for row in mesh.ledger.rows() if (row.collective, row.axis) == ("all_gather", "dp")], log


def bytes_of(rows, dtype):
    return sum(row.bytes for row in rows if row.dtype == dtype)


@pytest.mark.slow
def test_weights_are_gathered_as_float8():
    """Half the bytes of the matrices of the blocks, scales of all in one message a pass, and not another bit."""
    for (coded, log), (plain, expected) in zip(
        *(ranks.run(2, gathered, policy, mesh={"dp": 2}) for policy in ("bf16_float8_gather", "bf16_float8"))
    ):
        assert log == expected
        assert bytes_of(coded, "uint8") and not bytes_of(plain, "uint8")
        assert bytes_of(plain, "bfloat16") - bytes_of(coded, "bfloat16") == 2 * bytes_of(coded, "uint8")
        scales = [row for row in coded if row.leaf.startswith("largest of ")]
        depth = zero_cases.model_of("llama").config.n_layers
        assert [(row.calls, row.bytes) for row in scales] == [(len(log), len(log) * 7 * depth * 4)]


def test_what_cannot_be_gathered_as_float8():
    model, mesh = zero_cases.model_of("llama"), fzero.fake_mesh({"dp": 2})
    options = {"policy": "bf16_float8_gather"}
    plan = fzero.zero_plan(3, model, mesh, **options)
    assert len(plan.float8) == 7 and "all_gather dp for use as float8" in str(plan)
    assert not fzero.zero_plan(2, model, mesh, **options).float8
    with pytest.raises(ValueError, match=r"gathers weights as float8, and blocks/attn/w_k rests in memory 'host'; use"):
        fzero.zero_plan(3, model, mesh, **options, offload="params=host")
    with pytest.raises(
        ValueError, match="the model says of no leaf that linear products alone use it; use bf16_float8"
    ):
        fzero.zero_plan(3, models.lora(model, 2), mesh, **options)
