"""Cross entropy of given logits and of a linear layer's: every form against the reference, and the reference against
torch and by hand."""

import math

import kernel_laws as laws
import pytest
import torch
import torch.nn.functional as F
from close import assert_close, assert_same

from fzero.core import vjp_pair
from fzero.kernels import cross_entropy_triton as kernel
from fzero.kernels import linear_cross_entropy, registry
from fzero.kernels import linear_cross_entropy as linear
from fzero.kernels.cross_entropy import cross_entropy, reference

F64 = torch.float64
TERMS = {
    "plain": {},
    "z-loss": {"z_loss": 0.01},
    "smoothing": {"smoothing": 0.1},
    "cap": {"cap": 2.0},
    "all": {"z_loss": 0.01, "smoothing": 0.2, "cap": 3.0},
}
every_terms = pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
FORMS = {  # of an operation, with the options that take each
    "triton": {"impl": "triton"},
    "torch": {"impl": "chunked", "compiled": False},
    "native": {"impl": "chunked", "compiled": True},
}
every_form = pytest.mark.parametrize("form", FORMS)


def tokens(n, columns, seed=3):
    """(targets, mask): a third of the tokens is masked and has targets that are no columns."""
    g = torch.Generator().manual_seed(seed)
    targets, mask = torch.randint(0, columns, (n,), generator=g), torch.rand(n, generator=g) < 0.7
    return torch.where(mask, targets, 10**12).to(laws.DEVICE), mask.to(laws.DEVICE)


def of_logits(form, n, columns, **options):
    """`f(impl, logits)` for the laws, which ask for FORMS[form]["impl"] or the reference."""
    targets, mask = tokens(n, columns)
    options |= FORMS[form]
    return lambda impl, logits: cross_entropy(logits, targets, mask, **options | {"impl": impl})


def of_linear(form, n, columns, **options):
    targets, mask = tokens(n, columns)
    options |= FORMS[form]
    return lambda impl, x, w: linear_cross_entropy.linear_cross_entropy(x, w, targets, mask, **options | {"impl": impl})


def impl(form):
    return FORMS[form]["impl"]


def loop(monkeypatch, block):
    """Rows of more than `block` columns are read by blocks, as very long ones are."""
    monkeypatch.setattr(kernel, "HELD", block)
    monkeypatch.setattr(kernel, "LOOPS", [{"BLOCK": block, "STAGES": 1, "num_warps": 4}])


# ---- the definition
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", (0.0, 0.3))
def test_the_reference_is_torch_s(smoothing):
    (logits,) = laws.draw((9, 7))
    targets, _ = tokens(9, 7)
    targets[targets > 7] = -100
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = F.cross_entropy(theirs, targets, reduction="sum", label_smoothing=smoothing)
    got = reference(ours, targets, smoothing=smoothing)
    assert_close(
        [got, *torch.autograd.grad(got, ours)],
        [expected, *torch.autograd.grad(expected, theirs)],
        rtol=1e-12,
        atol=1e-14,
    )
    other = reference(
        logits, torch.where(targets == -100, 3, targets), targets != -100, ignore_index=-1, smoothing=smoothing
    )
    assert_same(other, got.detach())


def test_the_reference_is_the_formula():
    (logits,) = laws.draw((5, 4))
    targets, mask = torch.tensor([2, 0, 3, 1, 1]), torch.tensor([True, True, False, True, True])
    expected = 0.0
    for row, t, counts in zip(logits.tolist(), targets.tolist(), mask.tolist()):
        y = [1.5 * math.tanh(v / 1.5) for v in row]
        lse = math.log(sum(map(math.exp, y)))
        expected += counts * (0.9 * (lse - y[t]) + 0.1 * (lse - sum(y) / 4) + 0.03 * lse**2)
    assert_close(
        reference(logits.cpu(), targets, mask, z_loss=0.03, smoothing=0.1, cap=1.5),
        torch.tensor(expected, dtype=F64),
        rtol=1e-13,
    )


# ---- the forms
# --------------------------------------------------------------------------------------------------------


@pytest.mark.each_value
@every_form
@every_terms
def test_numbers(form, terms):
    for shape in ((3, 37), (4, 1), (2, 128), (2, 131)):
        for dtype in (torch.float32, torch.bfloat16):
            laws.numbers(of_logits(form, *shape, **terms), laws.draw(shape), dtype, impl=impl(form))


@every_form
def test_laws(form):
    f, given = of_logits(form, 3, 37, **TERMS["all"]), laws.draw((3, 37))
    laws.numbers(f, given, torch.float16, impl=impl(form))
    for law in (laws.repeats, laws.strides, laws.adjoint, laws.transforms):
        law(f, given, impl=impl(form))


@pytest.mark.parametrize("columns", (33, 128, *(pytest.param(n, marks=pytest.mark.slow) for n in (64, 67))))
def test_rows_longer_than_a_program_holds(columns, monkeypatch):
    loop(monkeypatch, 32)
    for terms in (TERMS["plain"], TERMS["all"]):
        f, given = of_logits("triton", 5, columns, **terms), laws.draw((5, columns))
        for dtype in (torch.float32, torch.bfloat16):
            laws.numbers(f, given, dtype)
        laws.repeats(f, given)


@pytest.mark.parametrize(
    ("form", "columns"),
    [
        ("triton", 128256),
        ("native", 128256),
        *(pytest.param(form, 131075, marks=pytest.mark.exhaustive) for form in ("triton", "native")),
    ],
)
def test_a_vocabulary_of_128k(form, columns):
    """By the blocks that a GPU would take, also where a row begins off their alignment."""
    laws.numbers(of_logits(form, 2, columns, **TERMS["all"]), laws.draw((2, columns)), torch.bfloat16, impl=impl(form))


@pytest.mark.parametrize("columns", (2048, 4099))
def test_rows_longer_than_the_first_level_cache(columns):
    for terms in (TERMS["plain"], TERMS["all"]):
        for dtype in (torch.float32, torch.bfloat16):
            laws.numbers(of_logits("native", 3, columns, **terms), laws.draw((3, columns)), dtype, impl="chunked")


@pytest.mark.each_value
@every_form
@every_terms
def test_numbers_of_a_linear_layer(form, terms, monkeypatch):
    monkeypatch.setitem(linear.CHUNK_BYTES, laws.DEVICE, 4 * 11 * 3)  # 3 tokens at a time in float32
    for dtype in (torch.float32, torch.bfloat16):
        laws.numbers(of_linear(form, 7, 11, **terms), laws.draw((7, 5), (11, 5)), dtype, impl=impl(form))


@every_form
def test_laws_of_a_linear_layer(form, monkeypatch):
    monkeypatch.setitem(linear.CHUNK_BYTES, laws.DEVICE, 4 * 11 * 3)
    f, given = of_linear(form, 7, 11, **TERMS["all"]), laws.draw((7, 5), (11, 5))
    for law in (laws.repeats, laws.adjoint, laws.transforms):  # other strides are another order of sums to a product
        law(f, given, impl=impl(form))


@pytest.mark.parametrize("form", ("torch", "native"))
@every_terms
def test_float64(form, terms):
    f, given = of_logits(form, 5, 2 * 2048 + 3, **terms), laws.draw((5, 2 * 2048 + 3))
    assert_close(
        laws.both_passes(lambda x: f("chunked", x), given),
        laws.both_passes(lambda x: f("reference", x), given),
        1e-11,
        1e-14,
    )


@every_form
@pytest.mark.parametrize("run", (cross_entropy, linear_cross_entropy.linear_cross_entropy), ids=("logits", "linear"))
def test_a_trace_holds_operators_that_write_into_none_of_their_inputs(form, run, monkeypatch):
    monkeypatch.setitem(linear.CHUNK_BYTES, laws.DEVICE, 4 * 11 * 3)
    targets, mask = tokens(7, 11)
    given = laws.draw(*(((7, 11),) if run is cross_entropy else ((7, 5), (11, 5))), dtype=torch.float32)

    def f(*t):
        return [run(*t, **FORMS[form], **TERMS["all"])]

    pair = vjp_pair.vjp_pair(f, len(given), compiled=False, budget=0.99)
    (loss,), residuals = pair.forward([*given, targets, mask])
    got = [loss, *pair.backward(residuals, [torch.ones_like(loss)])]
    grads = torch.func.grad(lambda *t: f(*t, targets, mask)[0], argnums=tuple(range(len(given))))(*given)
    assert_same(got, [f(*given, targets, mask)[0], *grads])


def test_derivatives():
    for terms in TERMS.values():
        laws.derivatives(of_logits("torch", 3, 5, **terms), laws.draw((3, 5)))
    laws.derivatives(of_linear("torch", 3, 5, **TERMS["all"]), laws.draw((3, 2), (5, 2)))
    assert "cross_entropy: reference" in str(
        registry.explain("cross_entropy", *laws.draw((3, 5)), torch.zeros(3, dtype=torch.int64))
    )


@every_form
@every_terms
def test_no_tokens_and_none_that_counts(form, terms):
    for n in (0, 3):
        targets = torch.full((n,), -100, device=laws.DEVICE)
        (logits,) = laws.draw((n, 5), dtype=torch.float32)
        logits[n // 2 :] = math.nan
        logits.requires_grad_()
        loss = cross_entropy(logits, targets, **FORMS[form], **terms)
        assert_same(
            [loss.detach(), *torch.autograd.grad(loss, logits)], [torch.zeros_like(loss), torch.zeros_like(logits)]
        )


@every_form
def test_the_gradient_in_the_place_of_the_logits(form):
    terms = TERMS["all"]
    targets, mask = tokens(5, 37)
    for base in (laws.draw((5, 37)), laws.draw((5, 48)), laws.draw((5, 37))):
        logits = base[0].float()[:, :37]
        expected = torch.func.grad(lambda x: cross_entropy(x, targets, mask, **FORMS[form], **terms))(logits)
        given = logits.requires_grad_()
        loss = cross_entropy(given, targets, mask, **FORMS[form], overwrite=True, **terms)
        (got,) = torch.autograd.grad(loss, given, retain_graph=True)
        assert got.data_ptr() == given.data_ptr()
        assert_same(got, expected)
        with pytest.raises(RuntimeError, match="no second backward pass"):
            torch.autograd.grad(loss, given)


@every_form
def test_logits_that_are_given_up_and_needed_elsewhere(form):
    x, targets = laws.draw((2, 5), dtype=torch.float32)[0].requires_grad_(), torch.tensor([1, 4], device=laws.DEVICE)
    loss = cross_entropy(x.exp(), targets, **FORMS[form], overwrite=True)  # exp keeps its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_form
def test_large_logits(form):
    targets, mask = tokens(6, 21)
    (logits,) = laws.draw((6, 21), dtype=torch.float32)
    logits = (1e4 * logits).requires_grad_()
    loss = cross_entropy(logits, targets, mask, **FORMS[form])
    exact = reference(logits.double(), targets, mask)
    assert_close(loss, exact, rtol=1e-6)
    assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(exact, logits), atol=1e-6)


@every_form
def test_columns_that_are_ruled_out(form, monkeypatch):
    loop(monkeypatch, 8)
    targets, mask = tokens(4, 21)
    (logits,) = laws.draw((4, 21), dtype=torch.float32)
    logits[:, 0:17] = -math.inf
    targets = torch.where(mask, targets % 4 + 17, targets)
    logits.requires_grad_()
    loss = cross_entropy(logits, targets, mask, **FORMS[form])
    exact = cross_entropy(logits[:, 17:].double(), torch.where(mask, targets - 17, targets), mask, impl="reference")
    assert_close(loss, exact, rtol=1e-6)
    assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(exact, logits), atol=1e-6)


@every_form
@pytest.mark.parametrize("wrong", (5, 2**40))
def test_a_target_that_is_no_column(form, wrong):
    (logits,) = laws.draw((2, 5), dtype=torch.float32)
    loss = cross_entropy(logits, torch.tensor([1, wrong], device=laws.DEVICE), **FORMS[form])
    assert loss.isnan()


@every_form
@pytest.mark.each_value
@pytest.mark.parametrize("block", (16, 16384))
@pytest.mark.parametrize(("n", "apart"), ((2, (1 << 31) + 8), (3, (1 << 30) + 8)), ids=("stride", "row times stride"))
def test_offsets_beyond_int32(form, block, n, apart, monkeypatch):
    loop(monkeypatch, block)
    targets = torch.arange(n, device=laws.DEVICE) * 17
    logits = laws.far_apart(n, 37, torch.bfloat16, apart)
    logits.copy_(laws.draw((n, 37))[0])
    expected = torch.func.grad(lambda x: cross_entropy(x, targets, **FORMS[form]))(logits.clone())
    cross_entropy(logits.requires_grad_(), targets, **FORMS[form], overwrite=True)
    assert_same(logits.detach().contiguous(), expected)


def test_the_scale_of_a_gradient():
    for n, factor in ((4097, 0.3), (5, 1.0)):
        (x,) = laws.draw((n,), dtype=torch.bfloat16)
        expected = (x.float() * factor).to(x.dtype)
        kernel.scale_by_kernel_(x, torch.tensor(factor, device=laws.DEVICE))
        assert_same(x, expected)


def test_the_bits_do_not_depend_on_the_number_of_threads():
    f, given = of_logits("native", 9, 37, **TERMS["all"]), laws.draw((9, 37), dtype=torch.float32)
    one = laws.both_passes(lambda x: f("chunked", x), given)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert_same(laws.both_passes(lambda x: f("chunked", x), given), one)
    finally:
        torch.set_num_threads(threads)


def test_what_triton_refuses():
    logits, targets = laws.draw((2, 3))[0], torch.zeros(2, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"cross_entropy: impl='triton' does not serve this call: the logits are torch.float64"
    ):
        cross_entropy(logits, targets, impl="triton")
    with pytest.raises(
        ValueError, match=r"linear_cross_entropy: impl='triton' does not serve this call: x is torch.float64"
    ):
        linear_cross_entropy.linear_cross_entropy(logits, logits, targets, impl="triton")


def test_the_chunks_of_tokens():
    size = lambda n, v: linear.chunk_rows(n, v, torch.bfloat16, "cuda")  # noqa: E731
    assert size(8192, 128256) == 4096 and size(4200, 128256) == 2176 and size(512, 128256) == 512
    assert size(1 << 20, 256) == 8192 and size(1 << 20, 1 << 30) == 1
    for n in (1, 1000, 4187, 65536, 100003):
        assert n <= size(n, 128256) * -(-n // 4186) and size(n, 128256) * 128256 * 2 <= 1 << 30
