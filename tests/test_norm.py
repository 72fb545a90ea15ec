"""RMSNorm and LayerNorm, alone and behind a sum: every law of a kernel, rows whole and in chunks, far rows and none."""

import functools

import kernel_laws as laws
import pytest
import torch
import torch.nn.functional as F
from close import assert_close, assert_same

from fzero.kernels import norm, norm_triton

EPS = 1e-5
OPS = {
    "rms_norm": norm.rms_norm,
    "layer_norm": norm.layer_norm,
    "add_rms_norm": norm.add_rms_norm,
    "add_layer_norm": norm.add_layer_norm,
}
every_op = pytest.mark.parametrize("name", OPS)


def form(name, eps=EPS):
    return lambda impl, *tensors: OPS[name](*tensors, eps, impl=impl)


def inputs(name, *shape, **options):
    """x, residual where there is one, and parameters."""
    return laws.draw(*[shape] * (1 + ("add" in name)), *[shape[-1:]] * (1 + ("layer" in name)), **options)


@pytest.fixture
def in_chunks(monkeypatch):
    """Rows of more than 8 columns are read 8 at a time, and the two programs of a backward pass have several tiles
    each."""
    monkeypatch.setattr(norm_triton, "WHOLE", dict.fromkeys(norm_triton.WHOLE, 8))
    monkeypatch.setattr(norm_triton, "CHUNK", 8)
    monkeypatch.setattr(norm_triton, "_programs", lambda device, warps: 2)


@pytest.mark.parametrize("name", ("rms_norm", "add_rms_norm"))
def test_long_inputs_are_taken_some_rows_at_a_time(name, monkeypatch):
    """Chunks of 3 rows of 7: the results are the reference's bit for bit, gradients by the law; float64 as well."""
    monkeypatch.setattr(norm, "CHUNK", 30)
    tensors = inputs(name, 7, 9)
    for dtype in (torch.float32, torch.bfloat16):
        laws.numbers(form(name), tensors, dtype, impl="chunks")
        given = [t.to(dtype) for t in tensors]
        assert_same(form(name)("chunks", *given), form(name)("reference", *given))
    wide = [t.double() for t in tensors]
    ours, plain = (laws.both_passes(functools.partial(form(name), impl), wide) for impl in ("chunks", "reference"))
    assert_close(ours, plain, rtol=1e-12, atol=1e-13)
    for law in (laws.repeats, laws.strides, laws.adjoint, laws.traced):
        law(form(name), tensors, impl="chunks")


@pytest.mark.skipif(laws.DEVICE != "cpu", reason="the form serves the CPU")
@pytest.mark.parametrize("name", ("layer_norm", "add_layer_norm"))
def test_rows_on_a_cpu_obey_every_law(name, monkeypatch):
    """Three of seven rows at a time; torch's own form is refused where it would sum in the narrow dtype."""
    monkeypatch.setattr(norm, "SUMMED_ROWS", 3)
    tensors = inputs(name, 7, 9)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        laws.numbers(form(name), tensors, dtype, impl="rows")
    for law in (laws.repeats, laws.strides, laws.adjoint, laws.transforms, laws.traced):
        law(form(name), tensors, impl="rows")
    with pytest.raises(ValueError, match=r"on a CPU it sums the gradients .* in torch.bfloat16; use auto"):
        form(name)("aten", *(t.bfloat16() for t in tensors))


@every_op
def test_every_law(name):
    laws.every_law(form(name), inputs(name, 3, 37))


@every_op
@pytest.mark.parametrize("shape", [(2, 1, 64), (4, 1), (1025,)], ids=str)
def test_numbers(name, shape):
    for dtype in (torch.float32, torch.bfloat16):
        laws.numbers(form(name), inputs(name, *shape), dtype)


@every_op
@pytest.mark.parametrize("shape", [(5, 19), (1, 2, 16)], ids=str)
def test_rows_in_chunks(name, shape, in_chunks):
    tensors = inputs(name, *shape)
    for dtype in (torch.float32, torch.bfloat16):
        laws.numbers(form(name), tensors, dtype)


@pytest.mark.parametrize("name", ["add_rms_norm", pytest.param("add_layer_norm", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("n", [32768, pytest.param(20001, marks=pytest.mark.exhaustive)])
def test_rows_too_long_for_registers(name, n, monkeypatch):
    """In the chunks that a GPU would take them in: both passes read a row twice, and a program's second tile adds to
    what its first one has written."""
    monkeypatch.setattr(norm_triton, "_programs", lambda device, warps: 1)
    config = norm_triton._config("_norm_backward", n)
    assert config == {"ROWS": 1, "BLOCK": norm_triton.CHUNK, "num_warps": 8} and n > max(norm_triton.WHOLE.values())
    laws.numbers(form(name), inputs(name, 2, n), torch.bfloat16)


@every_op
def test_several_tiles_to_a_program(name, monkeypatch):
    monkeypatch.setattr(norm_triton, "_programs", lambda device, warps: 2)
    tensors = inputs(name, 1100, 6)
    assert norm_triton._config("_norm_backward", 6)["ROWS"] == 256
    laws.numbers(form(name), tensors, torch.float32)
    laws.repeats(form(name), tensors)


@every_op
def test_derivatives(name):
    laws.derivatives(form(name), inputs(name, 3, 5))


@every_op
def test_half_precision(name):
    laws.numbers(form(name), inputs(name, 5, 7), torch.float16)


@every_op
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0,)], ids=str)
def test_none(name, shape):
    tensors = inputs(name, *shape, dtype=torch.float32)
    outs, grads = laws.both_passes(lambda *t: form(name)("triton", *t), tensors)
    assert [o.shape for o in outs] == [torch.Size(shape)] * len(outs)
    assert_same(grads, [torch.zeros_like(t) for t in tensors])


@every_op
@pytest.mark.parametrize("param", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_of_another_dtype_get_gradients_of_it(name, param):
    n = 2 if "add" in name else 1
    tensors = [t.to(torch.bfloat16 if i < n else param) for i, t in enumerate(inputs(name, 6, 40))]
    outs, grads = laws.both_passes(lambda *t: form(name)("triton", *t), tensors)
    exact = laws.both_passes(lambda *t: form(name)("reference", *t), [t.double() for t in tensors])
    plain = laws.both_passes(lambda *t: form(name)("reference", *t), tensors)
    assert [g.dtype for g in grads] == [t.dtype for t in tensors] and {o.dtype for o in outs} == {torch.bfloat16}
    for got, base, want in zip((*outs, *grads), (*plain[0], *plain[1]), (*exact[0], *exact[1])):
        laws.at_most_twice(name, got, base, want)
    if param == torch.float32:  # and not by way of bfloat16
        assert all((g != g.bfloat16()).any() for g in grads[n:])
    # Rounded where the reference rounds: the same bits but for the order of one sum.
    same = [(a == b).float().mean() for a, b in zip(outs, plain[0])]
    assert min(same) > 0.99 and max(same) == (1.0 if "add" in name else max(same))


@every_op
@pytest.mark.parametrize("chunks", [False, True])
def test_far_rows(name, chunks, request):
    """About 2^30 elements apart, which fits in 32 bits, but not twice it; each tensor's others."""
    if chunks:
        request.getfixturevalue("in_chunks")
    near = inputs(name, 3, 19, dtype=torch.bfloat16)
    expected = laws.both_passes(lambda *t: form(name)("triton", *t), near)
    far = [laws.far_apart(3, 19, torch.bfloat16, (1 << 30) + 8 * i) for i in range(1, 5)]
    leaves = [(far.pop().copy_(t) if t.dim() > 1 else t).requires_grad_() for t in near]
    outs = laws.tuple_of(form(name)("triton", *leaves))
    cotangents = [far.pop().copy_(c) for c in laws.draw(*(o.shape for o in outs), seed=1)]
    assert_same([list(outs), list(torch.autograd.grad(outs, leaves, cotangents))], list(expected))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_against_torch_s_own(impl):
    x, residual, scale, bias = laws.draw((7, 33), (7, 33), 33, 33, dtype=torch.float32)
    close = functools.partial(assert_close, rtol=1e-5, atol=1e-6)
    close(norm.rms_norm(x, scale, EPS, impl=impl), F.rms_norm(x, (33,), scale, EPS))
    close(norm.layer_norm(x, scale, bias, EPS, impl=impl), F.layer_norm(x, (33,), scale, bias, EPS))
    total = F.layer_norm(x + residual, (33,), scale, bias, EPS), x + residual
    close(norm.add_layer_norm(x, residual, scale=scale, bias=bias, eps=EPS, impl=impl), total)
    total = F.rms_norm(x + residual, (33,), scale, EPS), x + residual
    close(norm.add_rms_norm(x, residual, scale=scale, eps=EPS, impl=impl), total)


def test_the_sum_is_that_of_torch():
    x, residual, scale = laws.draw((5, 33), (5, 33), 33, dtype=torch.bfloat16)
    assert_same(norm.add_rms_norm(x, residual, scale, EPS, impl="triton")[1], x + residual)


@pytest.mark.parametrize("chunks", [False, True])
def test_a_large_mean_does_not_drown_the_variance(chunks, request):
    if chunks:
        request.getfixturevalue("in_chunks")
    x, scale, bias = laws.draw((4, 50), 50, 50)
    laws.numbers(form("layer_norm"), [x + 1000.0, scale, bias], torch.float32)


def test_eps_counts_where_rows_are_small():
    for name, rows in (("rms_norm", torch.zeros(2, 5)), ("layer_norm", torch.full((2, 5), 3.0))):
        tensors = [rows.to(laws.DEVICE, torch.float64), *inputs(name, 1, 5)[1:]]
        laws.numbers(form(name, eps=0.01), tensors, torch.float32)


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_a_sum_s_two_gradients_add_up_wherever_they_meet(name):
    """One tensor is the gradient of both terms: what autograd adds to the one must not reach the other."""
    x, residual, *params = inputs(name, 3, 16, dtype=torch.float32)

    def loss(impl, x, residual):
        y, total = form(name)(impl, x, residual, *params)
        return (y * y).sum() + total.sin().sum() + 3.0 * x.square().sum() + (x * residual).sum()

    for of in (
        lambda f: lambda x, residual: f(x, residual),
        lambda f: lambda x, _: f(x, x),
        lambda f: lambda x, r: f(x * r, r),
    ):
        given, expected = ([t.clone().requires_grad_() for t in (x, residual)] for _ in range(2))
        of(lambda x, r: loss("triton", x, r))(*given).backward()
        of(lambda x, r: loss("reference", x, r))(*expected).backward()
        got, want = ([t.grad for t in tensors if t.grad is not None] for tensors in (given, expected))
        assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert len({g.data_ptr() for g in got}) == len(got)


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
@pytest.mark.parametrize("which", [0, 1])
def test_one_result_alone_is_differentiated(name, which):
    tensors = inputs(name, 3, 16, dtype=torch.float32)

    def one(impl):
        return laws.both_passes(lambda *t: (form(name)(impl, *t)[which], *(3.0 * p for p in t[2:])), tensors)

    got, want = one("triton"), one("reference")
    assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_what_it_refuses():
    x, scale, bias = laws.draw((2, 3), 3, 3, dtype=torch.float32)
    with pytest.raises(
        ValueError,
        match=r"rms_norm: impl='triton' does not serve this call: the dtypes are torch.float64, torch.float32",
    ):
        norm.rms_norm(x.double(), scale, EPS, impl="triton")
    with pytest.raises(ValueError, match=r"a parameter is \[1\] for x \[2, 3\]; it must be \[3\]"):
        norm.layer_norm(x, scale, bias[:1], EPS, impl="triton")
    with pytest.raises(
        ValueError, match=r"x is torch.float32 \[2, 3\], the residual torch.bfloat16 \[2, 3\]; they must agree"
    ):
        norm.add_rms_norm(x, x.bfloat16(), scale, EPS, impl="triton")
