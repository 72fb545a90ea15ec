"""C++ loops on a CPU: none reads or writes outside of its tensors. Of those in place of several of torch's operators,
RMSNorm and SwiGLU, every law of a kernel, and when "auto" takes them."""

import ctypes
import functools
import platform
import shutil
from pathlib import Path
from typing import Any

import kernel_laws as laws
import pytest
import test_host_steps as host_steps
import torch
from close import assert_same
from guard_words import stays_inside
from test_cross_entropy_kernels import TERMS, of_logits
from test_quantize import bits

import fzero
from fzero.core import compile_cache, digest, have_compiler, observe, prng, vjp_pair
from fzero.kernels import KINDS, RECORDED_LOOPS, Pattern, attention, glu, linear, norm, quantize, rowwise
from fzero.kernels.attention_canonical import canonical_forward, paged_forward
from fzero.kernels.custom_operator import MANY
from fzero.kernels.quantized_linear import CODES, quantized_product

pytestmark = [
    pytest.mark.skipif(laws.DEVICE != "cpu", reason="they serve the CPU, and the laws draw for the GPU here"),
    pytest.mark.skipif(not have_compiler(), reason="there is no C++ compiler"),
]
FORMS = {
    "rms_norm": lambda impl, x, scale: norm.rms_norm(x, scale, 1e-5, impl=impl),
    "add_rms_norm": lambda impl, x, r, scale: norm.add_rms_norm(x, r, scale, 1e-5, impl=impl),
    "swiglu": lambda impl, a, b: glu.swiglu(a, b, impl=impl),
}
every_op = pytest.mark.parametrize("name", FORMS)


def inputs(name, *shape):
    return laws.draw(*[shape] * (1 if name == "rms_norm" else 2), *[shape[-1:]] * (name != "swiglu"))


@every_op
@pytest.mark.parametrize("shape", [(3, 37), (2, 2, 64), (1025,), (70, 33)], ids=str)
def test_every_law(name, shape):
    for dtype in (torch.float32, torch.bfloat16):
        laws.numbers(FORMS[name], inputs(name, *shape), dtype, impl="cpp")
    for law in (laws.repeats, laws.strides, laws.adjoint, laws.transforms, laws.traced):
        law(FORMS[name], inputs(name, 3, 37), impl="cpp")


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_do_not_depend_on_the_number_of_threads(name, dtype):
    assert norm._chunk_rows(1500) < 1500 and MANY > 1 << 15  # several parts, and several threads
    given, found, before = [t.to(dtype) for t in inputs(name, 1500, 64)], [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(laws.both_passes(lambda *t: FORMS[name]("cpp", *t), given))
    finally:
        torch.set_num_threads(before)
    assert_same(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_have_the_bits_of_torch_and_stay_finite(dtype):
    a, b = (t.to(dtype) for t in inputs("swiglu", 8, 512))
    far = torch.tensor([0.0, -0.0, 1e4, -1e4, 88.0, -88.0, 3e38, -3e38] * 8, dtype=dtype)
    for given in ((a * 6, b), (far, torch.ones_like(far))):
        ours, plain = (laws.both_passes(lambda *t, i=i: glu.swiglu(*t, impl=i), given) for i in ("cpp", "reference"))
        assert_same(ours, plain)


def test_none():
    for name in FORMS:
        for shape in ((0, 4), (3, 0)):
            given = [t.float() for t in inputs(name, *shape)]
            outs, grads = laws.both_passes(lambda *t, name=name: FORMS[name]("cpp", *t), given)
            assert {o.shape for o in outs} == {torch.Size(shape)}
            assert_same(grads, [torch.zeros_like(t) for t in given])


@every_op
def test_they_serve_operators_that_run_alone(name):
    """Of a size that pays; what is traced stays the definition, which compilers fuse and partitioners compute again."""

    def forms(rows, run):
        with observe() as used:
            run([t.float() for t in inputs(name, rows, 64)])
        return used[name]

    def eager(given):
        laws.both_passes(lambda *t: FORMS[name]("auto", *t), given)

    def pair(**how):
        f = lambda *t: list(laws.tuple_of(FORMS[name]("auto", *t)))  # noqa: E731
        return lambda given: vjp_pair.vjp_pair(f, len(given), compiled=False, **how).forward(given)

    assert forms(MANY // 64, eager) == forms(MANY // 64, pair()) == {"cpp"}
    assert forms(MANY // 64 - 1, eager) == {"reference"}
    for how in ({"split": 1}, {"budget": 0.5}):
        assert forms(MANY // 64, pair(**how)) == {"reference"}
    assert forms(MANY // 64, lambda given: torch.func.vjp(lambda *t: FORMS[name]("auto", *t), *given)) == {"reference"}


def test_what_they_refuse():
    a, b = laws.draw((2, 3), (2, 3))
    for call in (lambda: glu.swiglu(a, b, impl="cpp"), lambda: norm.rms_norm(a, b[0], 1e-5, impl="cpp")):
        with pytest.raises(ValueError, match=r"impl='cpp' does not serve this call: the dtypes are torch.float64"):
            call()
    with pytest.raises(ValueError, match="they must agree"):
        glu.swiglu(a.float(), b.float()[:1], impl="cpp")
    with pytest.raises(ValueError, match=r"a parameter is \[2\] for x \[2, 3\]"):
        norm.rms_norm(a.float(), b.float()[0, :2], 1e-5, impl="cpp")


@pytest.mark.skipif(platform.system() != "Linux" or not shutil.which("g++"), reason="Inductor compiles here, not g++")
def test_an_edit_of_a_header_is_compiled(tmp_path):
    (tmp_path / "answer.cpp").write_text('#include "number.h"\nextern "C" int answer() { return N; }\n')
    for number in (41, 42):
        (tmp_path / "number.h").write_text(f"constexpr int N = {number};\n")
        assert f"N = {number}" in compile_cache.source_of(tmp_path / "answer.cpp")
        made = compile_cache.compiled_by_gcc(str(tmp_path / "answer.py"), compile_cache.EXACT)
        assert ctypes.CDLL(made).answer() == number


# ---- every loop stays inside of its tensors --------------------------------------------------------------------------

BF16 = torch.bfloat16


def both_passes_inside(f, tensors):
    """Forward and backward pass of `f(*tensors)`."""

    def run(*given):
        leaves = [x.requires_grad_() for x in given]
        outs = laws.tuple_of(f(*leaves))
        drawn = laws.draw(*(out.shape for out in outs), seed=1)
        cotangents = [torch.empty_like(out).copy_(c) for out, c in zip(outs, drawn)]  # guarded too
        return [*outs, *torch.autograd.grad(outs, leaves, cotangents)]

    stays_inside(run, tensors)


def gates(dtype):
    both_passes_inside(functools.partial(FORMS["swiglu"], "cpp"), [x.to(dtype) for x in inputs("swiglu", 3, 37)])


def norms(dtype):
    for name, rows in (("rms_norm", 70), ("add_rms_norm", 3)):
        both_passes_inside(functools.partial(FORMS[name], "cpp"), [x.to(dtype) for x in inputs(name, rows, 33)])


def tiled_attention(dtype):
    tensors = laws.draw((1, 130, 2, 6), (1, 130, 1, 6), (1, 130, 1, 6), dtype=dtype)
    for documents in (None, torch.arange(130)[None] // 47):
        f = functools.partial(attention.attend, "tiled", pattern=Pattern("window", 70), documents=documents)
        both_passes_inside(f, tensors)


def cross_entropy(dtype):
    for columns in (37, 1500):
        f = of_logits("native", 5, columns, **TERMS["all"])
        both_passes_inside(functools.partial(f, "chunked"), laws.draw((5, columns), dtype=dtype))


def codes(dtype):
    (x,) = laws.draw((3, 37), dtype=dtype)
    for kind in KINDS:

        def both_ways(x, kind=kind):
            q = quantize.quantize(x, kind, 16, impl="cpp")
            return [*bits(q), quantize.dequantize(q, kind, 16, dtype, 37, impl="cpp")]

        def add(*q, kind=kind):
            return bits(quantize.dequantize_sum_requantize(*q, kind, 16, 37, impl="cpp"))

        stays_inside(both_ways, [x])
        stays_inside(add, [torch.stack((t, t)) for t in quantize.quantize(x, kind, 16)])


def steps(dtype):
    states: Any = ({"state": dtype}, {"coded": True}, {"state": BF16, "stochastic": True, "grad": BF16})
    for name in host_steps.OPS:
        for state in states:
            drawn = host_steps.draw(name, [(5, 90), (3,)], copy=BF16, **state)
            tensors = [x for leaf in drawn for x in (leaf.p, leaf.g, *leaf.state, leaf.copy)]

            def step(*given, name=name, drawn=drawn):
                rows = zip(drawn, zip(*[iter(given)] * (len(given) // len(drawn))))
                found = [leaf._replace(p=p, g=g, state=tuple(s), copy=copy) for leaf, (p, g, *s, copy) in rows]
                host_steps.OPS[name][0](found, host_steps.rates(name), impl="cpp")
                return []

            stays_inside(step, tensors, in_place=True)


def draws(dtype):
    key = prng.key(5)
    for draw in (prng.normal, prng.uniform, prng.truncated_normal):
        stays_inside(
            lambda index, draw=draw: [draw(key, index.shape, dtype=dtype, index=index)], [torch.arange(1300) * 7]
        )
        stays_inside(lambda _, draw=draw: [draw(key, (1300,), dtype=dtype)], [torch.arange(3)])
    stays_inside(lambda _: [prng.bits(key, (1300,)), prng.bernoulli(key, 0.3, (1300,))], [torch.arange(3)])


def digests(dtype):
    (x,) = laws.draw((7, 11, 5), dtype=dtype)
    stays_inside(lambda x: [torch.tensor([digest.digest(part) >> 1 for part in (x, x[:, 2:9])])], [x])


def checksums(dtype):
    (x,) = laws.draw((1237,), dtype=dtype)
    for part in ("", "TABLES"):
        of = digest.by_cpp(part)
        stays_inside(lambda x, of=of: [torch.tensor([of(x.view(torch.uint8)[i:].numpy(), 0) for i in range(9)])], [x])


def products(dtype):
    for m, k, n in ((1, 37, 21), (3, 64, 300), (30, 300, 77)):
        x, w, head = laws.draw((m, k), (k, n), (n, k), dtype=dtype)
        stays_inside(lambda x, w: [linear.linear_product(x, w)], [x, w])
        stays_inside(lambda x, w: [linear.logits_product(x, w)], [x, head])


def canonical_attention(dtype):
    tensors = laws.draw((2, 21, 4, 19), (2, 21, 2, 19), (2, 21, 2, 19), dtype=dtype)
    documents = torch.tensor([[0] * 8 + [1] * 13])
    for pattern in (Pattern(), Pattern("window", 5)):
        how = None, pattern.numbers, 0.3, 2.0
        stays_inside(lambda q, k, v, how=how: canonical_forward(q, k, v, documents.expand(2, -1), *how), tensors)
        rows = torch.tensor([[1], [0]], dtype=torch.int32), torch.tensor([0, 3, 4], dtype=torch.int32)
        where = *rows, torch.tensor([16, 17, 18, 20])
        stays_inside(lambda q, k, v, how=how, where=where: [paged_forward(q[0, :4], k, v, *where, *how)], tensors)


def functions(dtype):
    x, y, scale, bias = laws.draw((5, 37), (5, 37), (37,), (37,), dtype=dtype)
    for kind in range(len(rowwise.KINDS)):
        stays_inside(lambda x, y, kind=kind: [rowwise.rowwise_numbers(x, y, kind, 2.0)], [x, y])
    stays_inside(lambda *t: [rowwise.layer_norm_forward(*t, 1e-5)], [x, scale, bias])
    stays_inside(lambda x: [rowwise.softmax_forward(x)], [x.float()])
    targets = torch.tensor([0, 36, 5, -1, 36])
    stays_inside(lambda x: [rowwise.loss_statistics(x, targets, 2.0)], [x.float()])
    heads = laws.draw((2, 3, 4, 10), (2, 3, 1, 10), dtype=dtype)
    for interleaved in (False, True):
        stays_inside(
            lambda q, k, f, layout=interleaved: rowwise.rope_in_cpp((q, k), torch.arange(3), f, layout, True),
            [*heads, scale.float()[:5]],
        )


def coded_products(dtype):
    for kind, (k, n, block), m in ((kind, *case) for kind in CODES for case in (((9, 96, 32), 3), ((20, 70, 14), 14))):
        w, x = laws.draw((k, n), (m, k), dtype=torch.float32)
        codes = quantize.quantize(w, kind, block)
        tensors = x.to(dtype), *codes
        stays_inside(lambda x, d, s, how=(kind, block): [quantized_product(x, d, s, *how)], tensors)


def recorded(dtype):
    def add(a, b):
        out = torch.empty(7, 5, dtype=dtype)
        RECORDED_LOOPS[torch.ops.aten.add.Tensor]((a, b), out)()
        return [out]

    def write(table, rows):
        RECORDED_LOOPS[torch.ops.aten.index_copy_.default]((table, 0, torch.tensor([3, 0]), rows), table)()
        return [table]

    stays_inside(add, laws.draw((7, 5), (7, 5), dtype=dtype))
    stays_inside(write, laws.draw((4, 3), (2, 3), dtype=dtype), in_place=True)


LOOPS = {
    "kernels/attention_canonical": canonical_attention,
    "kernels/attention_tiled": tiled_attention,
    "kernels/cross_entropy": cross_entropy,
    "kernels/glu": gates,
    "kernels/linear": products,
    "kernels/norm": norms,
    "kernels/optim_leaf": steps,
    "kernels/quantized_linear": coded_products,
    "kernels/recorded_loops": recorded,
    "kernels/rowwise": functions,
    "kernels/quantize_codes": codes,
    "core/digest": lambda dtype: (checksums(dtype), digests(dtype)),
    "core/prng": draws,
}


def test_no_loop_is_left_out():
    package = Path(fzero.__file__).parent
    assert {str(path.relative_to(package).with_suffix("")) for path in package.rglob("*.cpp")} == set(LOOPS)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_stays_inside_of_its_tensors(name, dtype, monkeypatch):
    for module in (digest, prng):  # their loops serve from here on
        assert module._library() is not None
        monkeypatch.setattr(module, "_MANY", 0)
    LOOPS[name](dtype)


LEAVES = """
extern "C" void copy(const float* x, float* out, long n, long first, long more) {
  for (long i = first; i < n + more; ++i) out[i] = 2 * x[i < n ? i : n - 1];
}
extern "C" void sum(const float* x, float* out, long n, long more) {
  for (long i = 0; i < n + more; ++i) out[0] += x[i];
}
extern "C" void clear(float* x, long n) { for (long i = 0; i < n; ++i) x[i] = 0; }
"""


@pytest.mark.skipif(platform.system() != "Linux" or not shutil.which("g++"), reason="Inductor compiles here, not g++")
def test_a_loop_that_leaves_its_tensors_is_found(tmp_path):
    (tmp_path / "leaves.cpp").write_text(LEAVES)
    library = ctypes.CDLL(compile_cache.compiled_by_gcc(str(tmp_path / "leaves.py"), compile_cache.EXACT))
    (x,) = laws.draw((9,), dtype=torch.float32)

    def run(name, *numbers, make="empty"):
        def loop(x):
            out = getattr(torch, make)(9)
            to = () if name == "clear" else (ctypes.c_void_p(out.data_ptr()),)
            getattr(library, name)(ctypes.c_void_p(x.data_ptr()), *to, *map(ctypes.c_int64, (9, *numbers)))
            return [out]

        return lambda: stays_inside(loop, [x])

    run("copy", 0, 0)()
    run("sum", 0, make="zeros")()
    for wrong, said in (
        (run("copy", 0, 1), r"byte 36 of a tensor of 36 bytes, float32 \[9\], is written"),
        (run("copy", -1, 0), r"byte -\d of a tensor of 36 bytes"),
        (run("copy", 0, -1), "leaf 0: "),  # an element that is not written
        (run("sum", 1, make="zeros"), "leaf 0: "),  # one that is read
        (run("clear", make="zeros"), "elements differ"),  # what is given
    ):
        with pytest.raises(AssertionError, match=said):
            wrong()
