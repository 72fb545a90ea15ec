"""jit and vjp_pair: the same numbers compiled, one program for each signature, and the function itself where it must
be."""

import shutil
import warnings

import pytest
import torch
from close import assert_close, assert_same
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fzero import jit
from fzero.core import compile as fzero_compile
from fzero.core import compile_cache, vjp_pair
from fzero.kernels.norm import layer_norm_rows

F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def counting(f):
    """`f`, and the list of its runs: a traced program does not run it."""
    runs = []

    def counted(*args):
        runs.append(1)
        return f(*args)

    return counted, runs


# ---- jit ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def traced_only(monkeypatch):
    """Graphs run as they were traced: g++ takes seconds for each of them."""
    monkeypatch.setattr(fzero_compile, "compile_graph", lambda graph, mode, **options: lambda args: graph(args, []))


def test_jit_is_the_function_and_traces_once_for_a_signature(traced_only):
    def f(tree, power, flag):
        y = torch.tanh(tree["a"] @ tree["b"][0]) ** power
        return {"y": y, "parts": (y.sum(), tree["a"] if flag == "keep" else -tree["a"])}

    counted, runs = counting(f)
    fast = jit(counted)
    small = {"a": draw(3, 4), "b": [draw(4, 2)]}
    for seed, flag in ((0, "keep"), (1, "keep"), (2, "other"), (3, "keep")):
        tree = {"a": draw(3, 4, seed=seed), "b": [draw(4, 2, seed=seed + 9)]}
        assert_close(fast(tree, 2, flag), f(tree, 2, flag), rtol=1e-13, atol=1e-15)
    per_program = len(runs) // 2
    assert len(runs) == 2 * per_program and per_program >= 1  # "keep" and "other"
    # Another shape and other strides: a program each, and none is taken for another.
    before = len(runs)
    for a in (draw(5, 4), draw(4, 3).T):
        tree = {**small, "a": a}
        assert_close(fast(tree, 2, "keep"), f(tree, 2, "keep"), rtol=1e-13, atol=1e-15)
    assert len(runs) == before + 2 * per_program


@pytest.mark.slow
def test_jit_tells_apart_dtypes_and_static_values_that_are_equal():
    fast = jit(lambda x, scale: x * scale)
    for x in (torch.tensor([2, 3]), torch.tensor([2.5, 3.0])):
        for scale in (2, 2.0) if x.dtype == torch.int64 else (2,):
            assert_same(fast(x, scale), x * scale)


def test_jit_under_transforms_is_the_function():
    def f(x):
        return (torch.sin(x) ** 2).sum()

    counted, runs = counting(f)
    fast, x = jit(counted), draw(3, 4)
    assert_same(torch.func.grad(fast)(x), torch.func.grad(f)(x))
    assert_same(torch.vmap(fast)(x), torch.vmap(f)(x))
    assert_same(torch.func.jvp(fast, (x,), (x,)), torch.func.jvp(f, (x,), (x,)))
    leaf = x.clone().requires_grad_()
    fast(leaf).backward()
    assert_same(leaf.grad, torch.func.grad(f)(x))
    assert len(runs) == 4


def test_jit_of_a_gradient_holds_the_backward_pass():
    """Here the transform is inside: what is compiled is forward, backward and all."""

    def f(w, x):
        return torch.func.grad_and_value(lambda w: (torch.tanh(x @ w) ** 2).sum())(w)

    w, x = draw(4, 2), draw(3, 4, seed=1)
    counted, runs = counting(f)
    fast = jit(counted)
    assert_close(fast(w, x), f(w, x), rtol=1e-12, atol=1e-15)
    traced = len(runs)
    assert_close(fast(2 * w, x), f(2 * w, x), rtol=1e-12, atol=1e-15)
    assert len(runs) == traced


@pytest.mark.slow
def test_a_graph_compiled_before_is_taken_from_inductors_cache(tmp_path, monkeypatch):
    """By its operators, the number of threads and fzero's source; with the same numbers."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, found = draw(3, 4), []

    def compiled(**changes):
        counters["inductor"].clear()
        for name, value in changes.items():
            monkeypatch.setattr(fzero_compile, name, value)
        found.append(jit(lambda x: torch.tanh(x).cumsum(1) * 3.0)(x))
        return {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}

    assert compiled() == {"hit": 0, "miss": 1, "bypass": 0}
    assert compiled() == {"hit": 1, "miss": 0, "bypass": 0}
    assert compiled(package_digest=lambda: "other")["miss"] == 1
    assert compiled(vector_instructions=lambda: "other")["miss"] == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert compiled()["miss"] == 1
    for each in found:
        assert_same(each, found[0])


@pytest.mark.parametrize("f", [lambda x: x * x.sum().item(), lambda x: x[x > 0]])
def test_jit_refuses_values_as_numbers_and_shapes(f):
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        jit(f)(draw(2))


def test_jit_refuses_a_branch_on_a_value():
    with pytest.raises(DataDependentOutputException):
        jit(lambda x: x if x.sum() > 0 else -x)(draw(2))


# ---- vjp_pair -------------------------------------------------------------------------------------------------------


def pair_function(w, x, table):
    """Two outputs of two differentiated inputs and an integer one."""
    h = torch.tanh(x @ w)
    return h[table], (h * x.sum(-1, keepdim=True)).sum()


@pytest.mark.parametrize(
    "options", ({"compiled": False}, {"compiled": False, "budget": 0.3}, {"compiled": True}), ids=str
)
def test_vjp_pair(options):
    w, x, table = draw(4, 5), draw(3, 4, seed=1), torch.tensor([2, 0])
    pair = vjp_pair.vjp_pair(pair_function, 2, **options)
    expected, vjp = torch.func.vjp(lambda w, x: pair_function(w, x, table), w, x)
    cotangents = (torch.cos(expected[0]), torch.tensor(0.3, dtype=F64))
    assert_close(list(pair.primal([w, x, table])), list(expected), rtol=1e-12)
    for _ in range(2):
        out, residuals = pair.forward([w, x, table])
        assert_close(list(out), list(expected), rtol=1e-12)
        assert not any(t.requires_grad for t in out) and residuals
        grads = pair.backward(residuals, [c.clone() for c in cotangents])
        assert_close(list(grads), list(vjp(cotangents)), rtol=1e-12, atol=1e-15)
        assert residuals == []  # taken out, so that each is freed when last used
    # A cotangent with other strides than those traced.
    out, residuals = pair.forward([w, x, table])
    turned = cotangents[0].T.contiguous().T
    assert_close(list(pair.backward(residuals, [turned, cotangents[1]])), list(vjp(cotangents)), rtol=1e-12, atol=1e-15)


def test_vjp_pair_traces_once_for_a_signature():
    counted, runs = counting(lambda w, x: (torch.sin(x @ w),))
    pair = vjp_pair.vjp_pair(counted, 1, compiled=False, budget=0.5)
    pair.forward([draw(4, 5), draw(3, 4)])
    traced = len(runs)
    pair.forward([draw(4, 5, seed=1), draw(3, 4)])
    pair.primal([draw(4, 5, seed=2), draw(3, 4)])
    assert len(runs) == traced
    pair.forward([draw(4, 5), draw(2, 4)])
    assert len(runs) == 2 * traced


def test_a_budget_keeps_fewer_residuals():
    def deep(w, x):
        for _ in range(4):
            x = torch.sin(torch.tanh(x @ w) * x)
        return (x,)

    def kept(budget):
        _, residuals = vjp_pair.vjp_pair(deep, 2, compiled=False, budget=budget).forward([draw(16, 16), draw(8, 16)])
        return sum(r.numel() for r in residuals if isinstance(r, torch.Tensor))

    assert kept(0.0) < kept(0.2) < kept(0.999)
    assert kept(0.0) <= 16 * 16 + 8 * 16  # nothing but the inputs


# ---- no compiler ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compile_cache.have_compiler.cache_clear()
    yield
    compile_cache.have_compiler.cache_clear()


def test_without_a_compiler_one_warning_and_the_same_numbers(no_compiler):
    def f(x):
        return torch.sin(x).sum(0)

    x = draw(3, 4)
    counted, runs = counting(f)
    fast = jit(counted)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler .* is on PATH") as caught:
        assert_same(fast(x), f(x))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(fast(x), f(x))
        assert len(runs) == 2
        pair = vjp_pair.vjp_pair(lambda w, x: (torch.tanh(x @ w),), 2, compiled=True)
        w = draw(4, 2)
        out, residuals = pair.forward([w, x])
        expected, vjp = torch.func.vjp(lambda w, x: torch.tanh(x @ w), w, x)
        assert_close(out[0], expected, rtol=1e-13)
        assert_close(list(pair.backward(residuals, [expected])), list(vjp(expected)), rtol=1e-12, atol=1e-15)


def test_any_one_compiler_serves(monkeypatch):
    for name in ("g++", "clang++", "c++"):
        monkeypatch.setattr(shutil, "which", lambda wanted, name=name: f"/bin/{name}" if wanted == name else None)
        compile_cache.have_compiler.cache_clear()
        assert compile_cache.have_compiler()
    monkeypatch.undo()
    compile_cache.have_compiler.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_sums_that_are_made_twice_compile(dtype):
    """As the gradients of two biases of one sum are; Inductor's loop of both declares a variable of 16 bits twice."""
    x = torch.arange(32.0 * 32).reshape(32, 32).remainder(7).to(dtype)
    once, again, double = jit(lambda x: (x.sum(0), x.sum(0), x.mul(2).sum(0)))(x)
    assert torch.equal(once, x.sum(0)) and torch.equal(again, once) and torch.equal(double, (2 * x).sum(0))
    assert once.data_ptr() != again.data_ptr()


def test_a_compiled_layer_norm_of_16_bits_has_statistics_of_32():
    """Inductor's own rounds them, on a CPU, to the dtype of x, and the operator of the backward pass takes float32."""
    g = torch.Generator().manual_seed(0)
    x, g_out = (torch.randn(64, 32, generator=g).bfloat16() for _ in range(2))
    scale, bias = torch.rand(32, generator=g).add(0.5).bfloat16(), torch.zeros(32).bfloat16()

    def gradients(x, scale, bias, g_out):
        norm = lambda *given: layer_norm_rows(*given, 1e-5)  # noqa: E731
        return torch.func.vjp(norm, x, scale, bias)[1](g_out)

    found = jit(gradients)(x + 8, scale, bias, g_out)
    wide = [t.double() for t in (x + 8, scale, bias)]
    norm = lambda x, scale, bias: torch.nn.functional.layer_norm(x, (32,), scale, bias, 1e-5)  # noqa: E731
    for a, b in zip(found, torch.func.vjp(norm, *wide)[1](g_out.double()), strict=True):
        assert (a.double() - b).abs().max() <= 2.0**-8 * b.abs().max()
