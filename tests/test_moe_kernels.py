"""The operations of a mixture of experts: routing, rows grouped by expert, grouped products; every law of a kernel, and
literal loops."""

import kernel_laws as laws
import pytest
import torch
from close import assert_close, assert_same

from fzero.core import vjp_pair
from fzero.kernels import Kernels, moe, moe_permute, moe_routing

F64 = torch.float64


def rows_of(n, k, experts, seed=3):
    """(order, place, ends) of random choices, some expert without any."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, max(1, experts - 1), (n, k), generator=generator).to(laws.DEVICE)
    return moe_routing.group_reference(ids, experts)


# ---- route -----------------------------------------------------------------------------------------------------------


def route_form(top_k):
    return lambda impl, logits: moe_routing.route(logits, top_k, impl=impl)[1:]


@pytest.mark.parametrize("shape, top_k", [((7, 5), 2), ((1, 1), 1), ((2, 3, 37), 8), ((130, 3), 3)], ids=str)
def test_route_obeys_every_law(shape, top_k):
    logits = laws.draw(shape)
    laws.every_law(route_form(top_k), logits)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = 2 * logits[0].to(dtype)
        assert_same(moe_routing.route(x, top_k, impl="triton")[0], moe_routing.route(x, top_k, impl="reference")[0])


@pytest.mark.parametrize("shape, top_k", [((7, 5), 2), ((2, 3, 37), 8)], ids=str)
def test_a_bias_moves_the_choice_and_not_the_weights(shape, top_k):
    logits, bias = laws.draw(shape, shape[-1:])
    bias = bias / 4
    form = lambda impl, x: moe_routing.route(x, top_k, bias, impl=impl)[1:]  # noqa: E731
    obeys_every_law(form, "triton", [logits])
    x = logits.float()
    ids, weights, probabilities = moe_routing.route(x, top_k, bias, impl="triton")
    assert_same(ids, moe_routing.route(x, top_k, bias, impl="reference")[0])
    assert (ids != moe_routing.route(x, top_k, impl="triton")[0]).any()
    chosen = probabilities.gather(-1, ids)
    assert_close(weights, chosen / chosen.sum(-1, keepdim=True), rtol=1e-6)


def test_route_derivatives():
    laws.derivatives(route_form(2), laws.draw((3, 5)))
    laws.derivatives(lambda impl, x: moe_routing.route(x, 3, impl=impl)[1], laws.draw((2, 3)))


def test_route_takes_the_lower_number_of_equal_logits():
    x = torch.tensor(
        [[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5, [-torch.inf, -torch.inf, 1.0, -torch.inf, 0.0]], device=laws.DEVICE
    )
    expected = torch.tensor([[1, 2, 4, 0], [0, 1, 2, 3], [2, 4, 0, 1]], device=laws.DEVICE)
    for impl in ("triton", "reference"):
        ids, weights, _ = moe_routing.route(x, 4, impl=impl)
        assert_same(ids, expected)
        assert weights[2, 2:].tolist() == [0.0, 0.0]


def test_route_survives_what_is_no_number():
    x = torch.full((2, 6), torch.nan, device=laws.DEVICE)
    x[1, :3] = 0.0
    ids, weights, _ = moe_routing.route(x, 4, impl="triton")
    assert all(len(set(row)) == 4 and set(row) <= set(range(6)) for row in ids.tolist()) and weights.isnan().all()


def test_route_of_many_experts_and_of_none():
    x = laws.draw((3, 1024), dtype=torch.float32)[0]
    assert_close(moe_routing.route(x, 8, impl="triton"), moe_routing.route(x.double(), 8), rtol=1e-5)
    assert [t.shape for t in moe_routing.route(x[:0], 8, impl="triton")] == [(0, 8), (0, 8), (0, 1024)]
    with pytest.raises(ValueError, match="there are 1025 experts; it takes 1024 at most"):
        moe_routing.route(torch.zeros(1, 1025, device=laws.DEVICE), 2, impl="triton")
    with pytest.raises(ValueError, match=r"the dtype is torch.float64"):
        moe_routing.route(x.double(), 8, impl="triton")


def test_route_of_far_rows():
    x = laws.far_apart(2, 5, torch.float32)
    x.copy_(laws.draw((2, 5))[0])
    assert_same(moe_routing.route(x, 2, impl="triton"), moe_routing.route(x.clone(), 2, impl="triton"))


# ---- group, permute, unpermute ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, k, experts", [(1, 1, 1), (5, 2, 3), (33, 2, 8), (67, 3, 40), (64, 1, 2), (0, 2, 4)], ids=str
)
def test_group_is_a_stable_sort(n, k, experts):
    ids = torch.randint(0, experts, (n, k), generator=torch.Generator().manual_seed(n)).to(laws.DEVICE)
    ours = moe_routing.group(ids, experts, impl="triton")
    flat = ids.reshape(-1).tolist()
    order = sorted(range(n * k), key=lambda pair: flat[pair])
    assert ours.order.tolist() == order and ours.order.dtype == torch.int64
    assert [order[row] for row in ours.inverse.tolist()] == list(range(n * k))
    assert (
        ours.ends.tolist() == [sum(e <= expert for e in flat) for expert in range(experts)]
        and ours.ends.dtype == torch.int32
    )
    assert_same(tuple(moe_routing.group(ids, experts)), tuple(ours))


SIZES = [(5, 2, 3, 37), (1, 1, 1, 1), (6, 3, 4, 1025)]
forms = pytest.mark.parametrize("impl", ("triton", "gather"))


def obeys_every_law(form, impl, tensors):
    """All laws but `traced`, which is held to the whole layer: here integers are closed over."""
    for dtype in (torch.float32, torch.bfloat16):
        laws.numbers(form, tensors, dtype, impl)
    # A product by torch adds in another order where its operands lie otherwise in memory.
    for law in (laws.repeats, laws.adjoint, laws.transforms, *([laws.strides] if impl != "torch" else ())):
        law(form, tensors, impl=impl)


@pytest.mark.each_value
@forms
@pytest.mark.parametrize("n, k, experts, d", SIZES, ids=str)
def test_permute_and_unpermute_obey_every_law(impl, n, k, experts, d):
    order, place, _ = rows_of(n, k, experts)
    obeys_every_law(lambda impl, x: moe_permute.permute(x, order, place, impl=impl), impl, laws.draw((n, d)))
    obeys_every_law(
        lambda impl, y, w: moe_permute.unpermute(y, w, order, place, impl=impl), impl, laws.draw((n * k, d), (n, k))
    )


@forms
def test_permute_and_unpermute_derivatives(impl):
    order, place, _ = rows_of(3, 2, 4)
    laws.derivatives(lambda impl, x: moe_permute.permute(x, order, place, impl=impl), laws.draw((3, 5)))
    laws.derivatives(lambda impl, y, w: moe_permute.unpermute(y, w, order, place, impl=impl), laws.draw((6, 5), (3, 2)))


@forms
def test_permute_and_unpermute_by_loops(impl):
    order, place, _ = rows_of(7, 3, 5)
    x, y, w = laws.draw((7, 4), (21, 4), (7, 3), dtype=torch.float32)
    rows = torch.stack([x[int(pair) // 3] for pair in order])
    assert_same(moe_permute.permute(x, order, place, impl=impl), rows)
    sums = torch.stack([sum(w[n, j] * y[order.tolist().index(3 * n + j)] for j in range(3)) for n in range(7)])
    assert_close(moe_permute.unpermute(y, w, order, place, impl=impl), sums, rtol=1e-6, atol=1e-6)


@forms
def test_bfloat16_rows_and_float32_weights(impl):
    order, place, _ = rows_of(6, 4, 5)
    y, w = laws.draw((24, 33), (6, 4))
    y = y.bfloat16()

    def form(impl, y, w):
        return moe_permute.unpermute(y.to(F64 if y.dtype == F64 else torch.bfloat16), w, order, place, impl=impl)

    exact, plain, ours = (
        laws.both_passes(lambda *t, i=i: form(i, *t), [a, b])
        for i, a, b in (
            ("reference", y.double(), w.float().double()),
            ("reference", y, w.float()),
            (impl, y, w.float()),
        )
    )
    assert ours[1][1].dtype == torch.float32
    for got, base, want in zip(ours[0] + ours[1], plain[0] + plain[1], exact[0] + exact[1]):
        laws.at_most_twice("unpermute", got, base, want)


@forms
def test_no_tokens(impl):
    order, place, ends = rows_of(0, 2, 4)
    x = torch.zeros(0, 5, device=laws.DEVICE)
    assert ends.tolist() == [0] * 4
    assert moe_permute.permute(x, order, place, impl=impl).shape == (0, 5)
    assert moe_permute.unpermute(x, torch.zeros(0, 2, device=laws.DEVICE), order, place, impl=impl).shape == (0, 5)


# ---- grouped products ------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("impl", ("triton", "torch") if laws.DEVICE == "cpu" else ("triton",))
@pytest.mark.parametrize(
    "m, d, f, ends", [(7, 5, 3, [2, 2, 7]), (1, 1, 1, [1]), (70, 67, 66, [0, 65, 65, 66, 70])], ids=str
)
def test_grouped_mm_obeys_every_law(impl, m, d, f, ends):
    ends = torch.tensor(ends, dtype=torch.int32, device=laws.DEVICE)
    obeys_every_law(
        lambda impl, x, w: moe.grouped_mm(x, w, ends, impl=impl), impl, laws.draw((m, d), (len(ends), d, f))
    )


@pytest.mark.gpu
@pytest.mark.skipif(laws.DEVICE != "cuda", reason="no CUDA device")
@pytest.mark.parametrize("ends", ([40, 40, 150, 150], [0, 0, 0, 150], [1, 2, 3, 150]), ids=str)
def test_torch_s_grouped_mm_on_cuda(ends):
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("torch._grouped_mm waits for this device")
    ends = torch.tensor(ends, dtype=torch.int32, device=laws.DEVICE)
    x, w = laws.draw((150, 64), (4, 64, 136))
    assert moe.grouped_mm.choose("auto", (x.bfloat16(), w.bfloat16(), ends), {})[0] == "torch"
    laws.numbers(lambda impl, x, w: moe.grouped_mm(x, w, ends, impl=impl), [x, w], torch.bfloat16, "torch")
    laws.repeats(lambda impl, x, w: moe.grouped_mm(x, w, ends, impl=impl), [x, w], torch.bfloat16, "torch")


def test_grouped_mm_derivatives():
    ends = torch.tensor([2, 2, 5], dtype=torch.int32, device=laws.DEVICE)
    laws.derivatives(lambda impl, x, w: moe.grouped_mm(x, w, ends, impl=impl), laws.draw((5, 3), (3, 3, 2)))


def test_grouped_mm_of_no_rows():
    for impl in ("triton", "auto"):
        x, w = (t.requires_grad_() for t in laws.draw((0, 4), (3, 4, 8), dtype=torch.float32))
        y = moe.grouped_mm(x, w, torch.zeros(3, dtype=torch.int32, device=laws.DEVICE), impl=impl)
        y.sum().backward()
        assert y.shape == (0, 8) and not w.grad.any()


def test_grouped_mm_of_far_weights():
    x, near = laws.draw((9, 3), (2, 3, 4), dtype=torch.float32)
    w = laws.far_apart(2, 12, torch.float32)
    w.copy_(near.reshape(2, 12))
    w = w.as_strided((2, 3, 4), (w.stride(0), 4, 1))
    ends = torch.tensor([4, 9], dtype=torch.int32, device=laws.DEVICE)
    assert_same(moe.grouped_mm(x, w, ends, impl="triton"), moe.grouped_mm(x, near, ends, impl="triton"))


def test_which_form_serves_a_grouped_product():
    ends = torch.tensor([3, 8], dtype=torch.int32)
    x, w = laws.draw((8, 16), (2, 16, 8), device="cpu")
    assert moe.grouped_mm.choose("auto", (x, w, ends), {})[0] == "torch"
    assert moe.grouped_mm.choose("auto", tuple(t.to("meta") for t in (x, w, ends)), {})[0] == "reference"
    with pytest.raises(ValueError, match=r"the dtypes are torch.float64 and torch.float32"):
        moe.grouped_mm(x, w.float(), ends, impl="torch")
    assert moe.grouped_mm.flops(x, w, ends) == 2 * 8 * 16 * 8


# ---- together --------------------------------------------------------------------------------------------------------

OURS = Kernels(
    "reference", tuple((name, "triton") for name in ("group", "grouped_mm", "permute", "swiglu", "unpermute"))
)


def experts(dtype, n=21, d=16, f=24, e=5, k=2):
    draws = laws.draw((e, d, f), (e, d, f), (e, f, d), (1, n, d), (1, n, e), dtype=dtype)
    ids, weights, _ = moe_routing.route(draws[4], k)
    return dict(zip(("w_gate", "w_up", "w_down"), draws)), draws[3], ids, weights


def test_all_forms_give_the_same_layer():
    p, x, ids, weights = experts(torch.float32)

    def by(kernels):
        return laws.both_passes(
            lambda *t: moe.dropless(dict(zip(p, t)), t[3], ids, t[4], kernels), [*p.values(), x, weights]
        )

    expected = by(Kernels("reference"))
    for kernels in (Kernels(), OURS):
        assert_close(by(kernels), expected, rtol=1e-4, atol=1e-4)


TRACES = [
    ("auto", torch.float32, 24, True),  # what torch's own operator refuses to trace
    ("auto", torch.float32, 7, False),
    ("auto", torch.bfloat16, 24, True),
    ("auto", torch.bfloat16, 24, False),
    ("auto", F64, 24, False),
    ("triton", torch.float32, 24, False),
]


@pytest.mark.parametrize(
    "kernels, dtype, f, compiled", [pytest.param(*t, marks=[pytest.mark.slow] * t[-1]) for t in TRACES], ids=str
)
def test_a_traced_layer_gives_the_same(kernels, dtype, f, compiled):
    if laws.DEVICE == "cuda" and dtype == F64:
        pytest.skip("the reference serves it")
    p, x, ids, weights = experts(dtype, f=f)
    ids = torch.where(ids == 1, 0, ids)  # one expert has no token
    leaves, names, kernels = [*p.values(), x, weights], [*p], OURS if kernels == "triton" else Kernels()

    def layer(*t):
        return (moe.dropless(dict(zip(names, t)), t[3], t[5], t[4], kernels),)

    (out,), grads = laws.both_passes(lambda *t: layer(*t, ids), leaves)
    pair = vjp_pair.vjp_pair(layer, 5, compiled=compiled, budget=0.99)
    outs, residuals = pair.forward([*leaves, ids])
    cotangent = laws.draw(out.shape, seed=1)[0].to(dtype)
    assert all(float(grad[1].abs().max()) == 0.0 < float(grad[0].abs().max()) for grad in grads[:3])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.03, F64: 1e-13}[dtype]
    for got, want in zip([outs[0], *pair.backward(residuals, [cotangent])], [out, *grads]):
        assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.abs().max()) / 4)
