"""Attention by PyTorch's libraries for GPUs. Without a GPU their kernels are stood in for by PyTorch's own for CPUs,
which take the same arguments: what is shown is all around them, and PyTorch's schemas by tensors without data."""

import functools
import json
from types import SimpleNamespace

import pytest
import torch
from close import assert_close, assert_same
from kernel_laws import adjoint, both_passes, draw, numbers, repeats, strides, traced

from fzero.core import FakeDevice, Target, flop_of
from fzero.kernels import FULL, Pattern, Speed, attention, attention_library, pairs, registry, tuning
from fzero.kernels.attention_library import LIBRARIES, library_attention
from fzero.planner.calibrate.memory import Shape, measure_attention
from fzero.planner.calibrate.memory import _repeats as repeats_of

H100, A100 = Target("cuda", 132, (9, 0), "NVIDIA H100 80GB HBM3"), Target("cuda", 108, (8, 0), "NVIDIA A100-SXM4-80GB")
B200, MI300X = Target("cuda", 148, (10, 0), "NVIDIA B200"), Target("cuda", 304, (9, 4), "AMD Instinct MI300X")
aten = torch.ops.aten


def cpu_forward(q, k, v, scale):
    assert all(x.stride(3) == 1 for x in (q, k, v))
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)


def cpu_backward(g, q, k, v, out, lse, scale):
    assert g.stride() == out.stride() and lse.shape == out.shape[:3] and lse.dtype == torch.float32
    share = q.shape[1] // k.shape[1]
    wide = [x.repeat_interleave(share, 1) for x in (k, v)]
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(g, q, *wide, out, lse, 0.0, True, scale=scale)
    return dq, *(x.unflatten(1, (-1, share)).sum(2) for x in (dk, dv))


@pytest.fixture
def cudnn(monkeypatch):
    """`f(impl, q, k, v)`, whose form "cudnn" is PyTorch's for CPUs."""
    stand_in = LIBRARIES["cudnn"]._replace(forward=cpu_forward, backward=cpu_backward)
    monkeypatch.setitem(LIBRARIES, "cudnn", stand_in)

    def call(impl, q, k, v, **options):
        if impl == "cudnn":
            return library_attention(q, k, v, library="cudnn", **options)
        return attention.attention(q, k, v, impl=impl, **options)

    return call


def with_lse(q, k, v, scale):
    """(out, lse) by the definition."""
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = scale * torch.einsum("bthk,bshk->bhts", q, keys)
    scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), float("-inf"))
    return attention.attention(q, k, v, impl="reference", scale=scale), torch.logsumexp(scores, -1)


class Cutlass:
    """PyTorch's operators of CUTLASS's attention, by the definition."""

    def _efficient_attention_forward(self, q, k, v, *nones, compute_log_sumexp, scale):
        assert nones == (None,) * 5 + (0.0, 1) and compute_log_sumexp and q.shape == k.shape == v.shape
        out, lse = with_lse(q, k, v, scale)
        return out, torch.nn.functional.pad(lse, (0, -q.shape[1] % 32), value=torch.inf), *(None,) * 4

    def _efficient_attention_backward(self, g, q, k, v, bias, out, *rest, scale, num_splits_key):
        t, lse = q.shape[1], rest[4]
        assert bias is None and rest[:4] == (None, None, t, t) and rest[5] == 0.0 and rest[8:] == (1, False)
        assert num_splits_key == 1, "with more parts of the keys a second run gives other bits"
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            again, logs = with_lse(*leaves, scale)
            assert_close(again.detach(), out)
            assert_close(logs.detach(), lse[:, :, :t])
            assert lse.shape[2] % 32 == 0 and bool((lse[:, :, t:] == torch.inf).all())
            return *torch.autograd.grad(again, leaves, g), None


@pytest.mark.parametrize("t", [45, 64])
def test_float32_goes_through_cutlass(t, monkeypatch):
    """Layouts, grouped heads and the padded log-sum-exps, with the definition in the place of its kernels."""
    monkeypatch.setattr(attention_library, "aten", Cutlass())
    given = [x.float() for x in inputs(t=t)]
    out, grads = both_passes(lambda *x: library_attention(*x, library="efficient", scale=0.3), given)
    expected, wanted = both_passes(lambda *x: attention.attention(*x, impl="reference", scale=0.3), given)
    assert_close(out, expected, rtol=1e-6, atol=1e-6)  # the same products in another layout
    for got, want in zip(grads, wanted):
        assert_close(got, want, rtol=1e-4, atol=1e-5)


def inputs(b=2, t=45, h=4, g=2, k=16):
    return draw((b, t, h, k), (b, t, g, k), (b, t, g, k), device="cpu")


@pytest.mark.slow
def test_every_law(cudnn):
    f = functools.partial(cudnn, scale=0.3)
    numbers(f, inputs(), torch.bfloat16, impl="cudnn")
    for law in (repeats, strides, adjoint, traced):
        law(f, inputs(), impl="cudnn")


@pytest.mark.slow
def test_it_serves_transforms_once(cudnn):
    given = [t.float() for t in inputs(t=9)]

    def total(*tensors):
        out = cudnn("cudnn", *tensors)
        return (out * draw(out.shape, seed=1, device="cpu")[0].float()).sum()

    grads = torch.func.grad(total, argnums=(0, 1, 2))(*given)
    assert_same(list(grads), both_passes(lambda *t: cudnn("cudnn", *t), given)[1])
    with pytest.raises(RuntimeError, match="attention by cudnn"):
        torch.func.grad(lambda q: torch.func.grad(total)(q, *given[1:]).sum())(given[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_the_calls_are_those_of_pytorch_s_schemas(name, monkeypatch):
    """PyTorch's own shape functions take them, so names, kinds and numbers of arguments are right."""
    monkeypatch.setattr(attention_library, "activate", lambda name: None)
    library = LIBRARIES[name]
    q, k, v = (torch.empty(x.shape, dtype=library.dtypes[0], device="meta").transpose(1, 2) for x in inputs())
    out, lse = library.forward(q, k, v, 0.25)
    assert out.shape == q.shape and lse.numel() == q[..., 0].numel() and lse.dtype == torch.float32
    if name == "efficient":  # its shape function lacks an argument of the schema
        given, options = [], {}

        def backward(*placed, **named):
            given.extend(placed)
            options.update(named)
            return *(torch.empty_like(placed[1]),) * 3, None

        monkeypatch.setattr(attention_library, "aten", SimpleNamespace(_efficient_attention_backward=backward))
        library.backward(out, q, k, v, out, lse.reshape(q.shape[:3]), 0.25)
        taken = aten._efficient_attention_backward.default._schema.arguments
        assert len(given) == sum(not a.kwarg_only for a in taken) and {*options} <= {
            a.name for a in taken if a.kwarg_only
        }
        return
    grads = library.backward(out, q, k, v, out, lse.reshape(q.shape[:3]), 0.25)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def test_flash_attention_is_called_under_the_deterministic_switch():
    before = torch.are_deterministic_algorithms_enabled()
    with attention_library.repeating():
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_float32_takes_the_matrix_units_where_a_rule_says_so():
    """Whole causal sequences of enough rows and heads; what else there is is Triton's."""
    f32 = {"dtype": torch.float32, "h": 32}
    assert planned(H100, **f32).chosen == planned(A100, **f32).chosen == planned(B200, **f32).chosen == "efficient"
    assert "a block for each row and head, 16 here" in planned(H100, dtype=torch.float32).reasons["efficient"]
    for options in ({"h": 8}, {"pattern": Pattern("window", 8)}):
        assert planned(H100, **f32 | options).chosen == "triton"
    assert "documents packed" in planned(H100, **f32, documents=torch.zeros(2, 64)).reasons["efficient"]
    assert planned(MI300X, **f32).chosen == "triton" and planned(H100, h=32).chosen == "triton"


def test_a_form_is_asked_for_the_same_bits_again():
    x, calls = torch.ones(3), iter(range(99))
    assert repeats_of(lambda: lambda: [x]) and not repeats_of(lambda: lambda: [x + (next(calls) > 2)])


def planned(target, t=64, h=8, g=2, k=128, dtype=torch.bfloat16, impl="auto", **options):
    """The Explanation of a call in a plan for `target`."""
    with FakeDevice(target) as mode:
        shapes = (2, t, h, k), (2, t, g, k), (2, t, g, k)
        return registry.explain(
            "attention", *(torch.empty(s, dtype=dtype, device=mode.device) for s in shapes), impl=impl, **options
        )


@pytest.mark.slow
def test_a_plan_takes_what_it_is_asked_for_and_counts_its_pairs():
    with torch.no_grad(), FakeDevice(H100) as mode:
        q, k, v = (torch.empty(x.shape, dtype=torch.bfloat16, device=mode.device) for x in inputs())
        given = (q, k, v, "cudnn", 0.25)
        out = torch.ops.fzero.library_forward(*given)
        grads = torch.ops.fzero.library_backward(q, q, k, v, *out, "cudnn", 0.25)
        product = 2 * 2 * 4 * 16 * pairs(FULL, 45, 45)
        assert flop_of(torch.ops.fzero.library_forward.default, given, {}, out) == 2 * product
        assert flop_of(torch.ops.fzero.library_backward.default, (q, *given), {}, grads) == 5 * product
    for name in LIBRARIES:
        assert planned(H100, impl=name, dtype=LIBRARIES[name].dtypes[0]).chosen == name
    said = planned(H100)
    assert said.chosen == "triton"
    assert "does not know whether flash_attn_interface is installed" in said.reasons["fa3"]
    assert "other bits" in said.reasons["cudnn"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target", "options", "said"),
    [
        ("cudnn", H100, {"dtype": torch.float32}, r"torch.float32 .* it takes three of bfloat16 or float16"),
        ("cudnn", H100, {"k": 192}, "the head dim is 192; it takes multiples of 8 up to 128"),
        ("flash", H100, {"k": 36}, "the head dim is 36; it takes multiples of 8 up to 256"),
        ("cudnn", H100, {"pattern": Pattern("window", 8)}, "no patterns, such as window; triton has them"),
        ("cudnn", H100, {"documents": torch.zeros(2, 64)}, "no documents packed in a row; triton has them"),
        ("cudnn", H100, {"t": 1}, "at least two positions"),
        ("fa3", A100, {}, r"compute capability \(8, 0\); it takes \(9, 0\) to \(9, 9\)"),
        ("fa3", B200, {}, r"compute capability \(10, 0\)"),
        ("flash", MI300X, {}, "the device is AMD Instinct MI300X; it runs on NVIDIA's"),
        ("fa4", Target("cpu"), {}, "a tensor is on cpu, and it runs on cuda"),
    ],
)
def test_what_a_library_refuses(name, target, options, said):
    with pytest.raises(ValueError, match=f"attention: impl='{name}' does not serve this call: .*{said}.*; use auto"):
        planned(target, impl=name, **options)


@pytest.mark.slow
def test_what_must_be_installed():
    assert "flash_attn_interface is not installed" in attention_library.missing_package(
        LIBRARIES["fa3"]._replace(widest=1)
    )
    assert "flash_attn.cute.interface is not installed" in attention_library.missing_package(LIBRARIES["fa4"])
    assert attention_library.missing_package(LIBRARIES["flash"]) == ""


def test_the_fastest_comes_first_and_what_was_measured_here_before_what_was_published(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    order = functools.partial(tuning.order_of_attention, H100.name)
    for cached in (tuning.measured, tuning.order_of_attention):
        cached.cache_clear()
    try:
        assert order("bfloat16", 128, 512) == ("cudnn", "fa3", "triton", "flash")  # by figures of FlashAttention-3
        assert order("bfloat16", 128, 30_000) == ("fa3", "cudnn", "triton", "flash")
        assert order("bfloat16", 64, 512) == ("triton", "fa3", "flash", "cudnn")  # not measured: as the file states
        assert tuning.order_of_attention(B200.name, "bfloat16", 128, 512) == ()
        here = [Speed("flash", "bfloat16", 64, 1024, 500.0), Speed("triton", "bfloat16", 64, 1024, 400.0)]
        path = tuning.write_measured(H100.name, here)
        assert order("bfloat16", 64, 512)[:2] == ("flash", "triton")
        assert planned(H100, k=64).chosen == "flash"
        tuning.write_measured(H100.name, [here[0]._replace(repeats=False), here[1]])
        said = planned(H100, k=64)
        assert said.chosen == "triton" and "gave other bits when `fzero bench` measured it" in said.reasons["flash"]
        path.write_text(json.dumps({"speeds": [{"form": "flash"}]}))
        tuning.measured.cache_clear()
        tuning.order_of_attention.cache_clear()
        with pytest.raises(
            ValueError, match=r"attention.json is not what .* \(there is no 'dtype'\); remove it, or run"
        ):
            order("bfloat16", 64, 512)
    finally:
        monkeypatch.undo()
        for cached in (tuning.measured, tuning.order_of_attention):
            cached.cache_clear()


@pytest.mark.slow
def test_each_form_that_serves_is_measured():
    shapes = [Shape(1, t, 2, 16) for t in (8, 16)]
    found = measure_attention(0.01, device="cpu", shapes=shapes)
    serving = {
        f.name for f in attention.attention.forms if not f.reason_against([torch.ones(1, 8, 2, 16).bfloat16()] * 3, {})
    }
    assert {(s.form, s.queries) for s in found} == {(name, t) for name in serving for t in (8, 16)}
    assert serving >= {"fused", "blocked"} and all(s.tflop_s >= 0 and s.dim == 16 for s in found)


@pytest.mark.slow
def test_a_cpu_has_no_part_attention(fz):
    assert fz("bench", "--device", "cpu", "--only", "attention")[2] == (
        "fzero: error: --only is attention, which is measured on a GPU, and the device is cpu; leave it out\n"
    )


def test_each_chip_s_file_names_forms_and_its_source():
    forms = {form.name for form in attention.attention.forms}
    for name, chip in tuning.listed().items():
        table = chip["attention"]
        assert {*table["order"], *(s.form for s in tuning.speeds_of(table["speeds"]))} <= forms, name
        assert table["source"] and table["order_source"]
        assert table["speeds"] or table["source"].startswith("not measured yet")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", LIBRARIES)
def test_the_laws_on_a_gpu(name):
    given = [x.to("cuda") for x in inputs(t=130, k=64)]
    f = functools.partial(lambda impl, *t: attention.attention(*t, impl=impl))
    dtype = LIBRARIES[name].dtypes[0]
    if why := attention_library.refusal_reason(*(x.to(dtype) for x in given), library=name):
        pytest.skip(why)
    numbers(f, given, dtype, impl=name)
    strides(f, given, dtype, impl=name) if LIBRARIES[name].repeats else None
    repeats(f, given, dtype, impl=name) if LIBRARIES[name].repeats else None
    atol = 0.05 if dtype == torch.bfloat16 else 1e-5
    assert_close(
        *(attention.attention(*(x.to(dtype) for x in given), impl=i).float() for i in (name, "reference")), atol=atol
    )
