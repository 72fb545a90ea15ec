"""C++ loops in place of several of torch's operators on a CPU, for eager steps: RMSNorm and SwiGLU. Every law of a
kernel, and when "auto" takes them."""

import ctypes
import platform
import shutil

import kernel_laws as laws
import pytest
import torch
from close import assert_same

from fzero.core import cpp
from fzero.core.compile import have_compiler
from fzero.core.vjp_pair import vjp_pair
from fzero.kernels import glu, norm, norm_cpu
from fzero.kernels.op_function import MANY
from fzero.kernels.registry import observe

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
    assert norm_cpu._rows_a_part(1500) < 1500 and MANY > 1 << 15  # several parts, and several threads
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
        return lambda given: vjp_pair(f, len(given), compiled=False, **how).forward(given)

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
        assert f"N = {number}" in cpp.source_of(tmp_path / "answer.cpp")
        made = cpp.compiled_by_gcc(str(tmp_path / "answer.py"), cpp.EXACT)
        assert ctypes.CDLL(made).answer() == number
