"""Layers in tiles are the whole layers: values, derivatives and what is alive."""

import dataclasses
import functools

import kernel_laws as laws
import pytest
import torch
import torch.nn.functional as F
from close import assert_close, assert_same
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fzero import Execution, fp64, init_state, make_train_step, models, one_process, optim, zero_plan
from fzero.core import have_compiler, observe, pytree, vjp_pair
from fzero.models import tiled_linear

F64 = torch.float64
N, D, FF = 5, 6, 7  # FF is prime: every count of tiles but 1 and 7 is uneven


def swiglu_whole(x, w_gate, w_up, w_down):
    return (F.silu(x @ w_gate) * (x @ w_up)) @ w_down


def gelu_whole(x, w_in, w_out, b_in, b_out):
    return F.gelu(x @ w_in + b_in, approximate="tanh") @ w_out + b_out


# name -> (whole, tiled, shapes of x and the parameters for (n, d, f), size of the dim in tiles)
LAYERS = {
    "swiglu": (swiglu_whole, tiled_linear.tiled_mlp, lambda n, d, f: ((n, d), (d, f), (d, f), (f, d)), lambda d, f: f),
    "gelu": (
        lambda x, w_in, w_out: F.gelu(x @ w_in, approximate="tanh") @ w_out,
        tiled_linear.tiled_gelu_mlp,
        lambda n, d, f: ((n, d), (d, f), (f, d + 1)),
        lambda d, f: f,
    ),
    "gelu and biases": (
        gelu_whole,
        lambda x, w_in, w_out, b_in, b_out, tiles: (
            tiled_linear.tiled_gelu_mlp(x, w_in, w_out, tiles, b_in) + b_out.to(x.dtype)
        ),
        lambda n, d, f: ((n, d), (d, f), (f, d), (f,), (d,)),
        lambda d, f: f,
    ),
}
every_layer = pytest.mark.parametrize("layer", LAYERS)


def drawn(layer, n=N, d=D, f=FF, dtype=F64, seed=0):
    """x and the parameters, these as small as trained ones are."""
    x, *params = laws.draw(*LAYERS[layer][2](n, d, f), seed=seed)
    return [t.to(dtype) for t in (x, *(p / d**0.5 for p in params))]


def form(layer, tiles):
    """f(impl, *tensors) for the laws: the whole layer as the reference, else in tiles."""
    whole, tiled, *_ = LAYERS[layer]
    return lambda impl, *t: whole(*t) if impl == "reference" else tiled(*t, tiles=tiles)


def both(f, tensors):
    """[results, gradients] in tiles and of the whole layer."""
    return [list(laws.both_passes(lambda *t, k=k: f(k, *t), tensors)) for k in ("tiled", "reference")]


def counts(layer, d=D, f=FF):
    return range(1, LAYERS[layer][3](d, f) + 1)


@every_layer
def test_every_count_of_tiles_is_the_whole_layer(layer):
    for tiles in counts(layer):
        assert_close(*both(form(layer, tiles), drawn(layer)), rtol=1e-12, atol=1e-13)


@every_layer
@pytest.mark.parametrize("n, d, f", ((1, 1, 1), (1, 13, 3), (3, 1, 17), (67, 33, 129)), ids=str)
def test_odd_sizes(layer, n, d, f):
    for tiles in {1, 2, 3, LAYERS[layer][3](d, f)} & set(counts(layer, d, f)):
        assert_close(*both(form(layer, tiles), drawn(layer, n, d, f)), rtol=1e-12, atol=1e-12)


@every_layer
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_error_is_at_most_twice_that_of_plain_torch(layer, dtype):
    for n, d, f in ((33, 24, 64), (7, 129, 65)):
        for tiles in (1, 3, 16):
            laws.numbers(form(layer, tiles), drawn(layer, n, d, f), dtype, impl="tiled")


@every_layer
def test_laws(layer):
    f, tensors = form(layer, 3), drawn(layer, 9, 8, 10)
    for law in (laws.repeats, laws.adjoint):
        law(f, tensors, impl="tiled")


@every_layer
def test_traced(layer):
    """In a graph of a block, too, no hidden activations are kept for the backward pass."""
    f, tensors = form(layer, 4), drawn(layer, 16, 6, 32)
    pair = vjp_pair.vjp_pair(
        lambda *t: [f("tiled", *t)], len(tensors), compiled=layer == "swiglu" and have_compiler(), budget=0.99
    )
    outs, residuals = pair.forward(tensors)
    kept = {t.untyped_storage().data_ptr() for t in residuals if isinstance(t, torch.Tensor)}
    assert kept <= {t.untyped_storage().data_ptr() for t in tensors}
    dy = laws.draw(outs[0].shape, seed=1)[0]
    grads = pair.backward(residuals, [dy])
    expected = of_leaves(lambda *t: f("reference", *t), tensors, dy)
    assert_close([outs[0], *grads], [expected[0], *expected[1]], rtol=1e-12, atol=1e-12)


@every_layer
def test_any_strides(layer):
    for pad in (
        lambda t: t.t().contiguous().t(),
        lambda t: torch.stack((t, t + 1), -1)[..., 0],
        lambda t: torch.cat((t, t), -1)[..., : len(t.T)],
    ):
        tensors = [pad(t) if t.dim() > 1 else t for t in drawn(layer)]
        assert_close(*both(form(layer, 3), tensors), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("chunk", (1, 3, 5, 9))
def test_chunks_of_tokens_are_the_layer(chunk):
    """In float64, with and without tiles, at chunks that divide the tokens and that do not; parameters frozen too."""
    x, *params = drawn("swiglu", 5, 6, 7)
    (b_in,) = laws.draw((7,), seed=2)
    forms = (
        (functools.partial(tiled_linear.tiled_mlp, tiles=2), (x, *params)),
        (
            lambda x, w, v, a, **more: tiled_linear.tiled_gelu_mlp(x, w, v, 3, a, **more),
            (x, params[0], params[2], b_in),
        ),
    )
    for f, tensors in forms:
        expected = laws.both_passes(f, tensors)
        assert_close(laws.both_passes(functools.partial(f, tokens=chunk), tensors), expected, rtol=1e-12, atol=1e-13)
        leaf = tensors[0].clone().requires_grad_()
        (dx,) = torch.autograd.grad(f(leaf, *tensors[1:], tokens=chunk).sum(), leaf)
        (whole,) = torch.autograd.grad(f(leaf, *tensors[1:]).sum(), leaf)
        assert_close(dx, whole, rtol=1e-12, atol=1e-13)


def test_a_trace_holds_a_layer_as_one_node():
    x, *params = drawn("swiglu")
    graph = make_fx(torch.func.grad(lambda x: tiled_linear.tiled_mlp(x, *params, 3).sum()))(x).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert [name for name in called if "tiled" in name] == [
        "fzero.tiled_layer.default",
        "fzero.tiled_layer_backward.default",
    ]
    assert not [name for name in called if "mm" in name]


@every_layer
def test_gradcheck(layer):
    laws.derivatives(form(layer, 3), drawn(layer, 3, 4, 5))


@every_layer
def test_second_derivatives(layer):
    """The derivative of the gradient along a direction against differences of the gradient, which tiles compute."""
    f, tensors = form(layer, 3), drawn(layer, 3, 4, 5)
    directions = tuple(drawn(layer, 3, 4, 5, seed=1))
    weight = laws.draw(f("reference", *tensors).shape, seed=2)[0]
    gradient = torch.func.grad(lambda *t: (f("tiled", *t).square() * weight).sum(), argnums=tuple(range(len(tensors))))
    _, ours = torch.func.jvp(gradient, tuple(tensors), directions)
    step = 1e-5
    ahead, behind = (gradient(*(t + sign * step * v for t, v in zip(tensors, directions))) for sign in (1, -1))
    differences = [(a - b) / (2 * step) for a, b in zip(ahead, behind)]
    assert_close(list(ours), differences, rtol=1e-6, atol=1e-6 * max(float(d.abs().max()) for d in differences))


@every_layer
def test_transforms(layer):
    f, tensors = form(layer, 3), drawn(layer)
    which = tuple(range(len(tensors)))

    def loss(impl, *t):
        return f(impl, *t).square().sum()

    grads, expected = (
        torch.func.grad(lambda *t, k=k: loss(k, *t), argnums=which)(*tensors) for k in ("tiled", "reference")
    )
    assert_close(list(grads), list(expected), rtol=1e-12, atol=1e-12)
    leaves = [t.clone().requires_grad_() for t in tensors]
    assert_same(list(torch.autograd.grad(loss("tiled", *leaves), leaves)), list(grads))
    xs = torch.stack([tensors[0], 2 * tensors[0], -tensors[0]])
    for g in (f, lambda k, *t: torch.func.grad(loss, 1)(k, *t)):
        rows = torch.stack([g("reference", row, *tensors[1:]) for row in xs])
        assert_close(torch.vmap(lambda row, g=g: g("tiled", row, *tensors[1:]))(xs), rows, rtol=1e-12, atol=1e-13)
    out, tangent = torch.func.jvp(lambda *t: f("tiled", *t), tuple(tensors), tuple(drawn(layer, seed=3)))
    want, want_tangent = torch.func.jvp(lambda *t: f("reference", *t), tuple(tensors), tuple(drawn(layer, seed=3)))
    assert_same([out, tangent], [want, want_tangent])
    jacobian, expected = (
        torch.func.jacrev(lambda x, k=k: f(k, x, *tensors[1:]))(tensors[0]) for k in ("tiled", "reference")
    )
    assert_close(jacobian, expected, rtol=1e-12, atol=1e-12)


def test_a_second_backward_says_what_to_do():
    x, *params = [t.requires_grad_() for t in drawn("swiglu")]
    (dx,) = torch.autograd.grad(tiled_linear.tiled_mlp(x, *params, 2).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"a layer in tiles \(swiglu\): .* use torch.func.grad of grad"):
        dx.sum().backward()


@every_layer
def test_leading_dims_and_none(layer):
    _, *params = drawn(layer)
    for shape in ((D,), (2, 3, D), (0, D), (2, 0, D)):
        actual, expected = both(form(layer, 2), [laws.draw(shape)[0], *params])
        if 0 in shape:
            assert_same(actual, expected)
        else:
            assert_close(actual, expected, rtol=1e-12, atol=1e-13)


@every_layer
def test_parameters_of_another_dtype(layer):
    x, *params = drawn(layer)
    f, params = form(layer, 3), [p.float() for p in params]
    actual, expected = both(lambda k, x, *p: f(k, x, *(t.double() if k == "reference" else t for t in p)), [x, *params])
    assert [t.dtype for t in actual[1]] == [F64] + [torch.float32] * len(params)
    assert_close([actual[0], actual[1][0]], [expected[0], expected[1][0]], rtol=1e-12, atol=1e-13)
    assert_close(actual[1][1:], expected[1][1:], rtol=1e-6)


class Largest(TorchDispatchMode):
    """The most numbers in a result of any operation."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, (tuple, list)) else (out,):
            self.numel = max(self.numel, leaf.numel() if isinstance(leaf, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize("layer", ("swiglu", "gelu and biases"))
def test_hidden_activations_are_never_whole(layer):
    n, d, f, tiles = 32, 4, 64, 8
    leaves, kept = [t.requires_grad_() for t in drawn(layer, n, d, f)], []
    with Largest() as seen:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = form(layer, tiles)("tiled", *leaves)
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert seen.numel == n * f // tiles == d * f
    assert {t.data_ptr() for t in kept} <= {t.data_ptr() for t in leaves}


def test_frozen_parameters_have_no_gradients_computed(monkeypatch):
    x, *params = drawn("swiglu")
    puts, backward = [], tiled_linear.TiledLayer.backward
    monkeypatch.setattr(tiled_linear.TiledLayer, "backward", lambda *a: puts.append(list(a[-1])) or backward(*a))
    whole, tiled, *_ = LAYERS["swiglu"]
    dx = [
        torch.autograd.grad(g(x.requires_grad_(), *params).sum(), x)[0] for g in (whole, lambda *t: tiled(*t, tiles=2))
    ]
    assert puts == [[]]
    assert_close(dx[1], dx[0], rtol=1e-12, atol=1e-13)
    assert_same(torch.func.grad(lambda x: tiled(x, *params, tiles=2).sum())(x.detach()), dx[1])
    assert puts == [[], []]


def test_the_form_of_swiglu_is_passed_on():
    tensors = drawn("swiglu", dtype=torch.float32)
    with observe() as used:
        for impl in ("triton", "reference"):
            laws.numbers(
                lambda k, *t, i=impl: swiglu_whole(*t) if k == "reference" else tiled_linear.tiled_mlp(*t, 3, impl=i),
                tensors,
                torch.float32,
            )
    assert used == {"swiglu": {"triton", "reference"}}
    with pytest.raises(ValueError, match="swiglu: impl is 'tritn'"):
        tiled_linear.tiled_mlp(*tensors, 3, impl="tritn")


def of_leaves(f, tensors, dy):
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = f(*leaves)
    return y.detach(), list(torch.autograd.grad(y, leaves, dy))


# ---- what is refused
# -----------------------------------------------------------------------------------------------------


def test_spans():
    assert tiled_linear.tile_spans(7, 3) == [slice(0, 3), slice(3, 5), slice(5, 7)]
    for size in (1, 2, 7, 12):
        for tiles in range(1, size + 1):
            spans = tiled_linear.tile_spans(size, tiles)
            assert len(spans) == tiles and [i for s in spans for i in range(s.start, s.stop)] == list(range(size))
            sizes = [s.stop - s.start for s in spans]
            assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@every_layer
def test_counts_that_are_refused(layer):
    tensors = drawn(layer)
    most = LAYERS[layer][3](D, FF)
    for tiles in (0, -1, most + 1):
        for t in (tensors, [x.requires_grad_() for x in tensors]):
            with pytest.raises(
                ValueError, match=rf"tiles is {tiles}; .* has size {most}, so tiles must be in 1..{most}"
            ):
                form(layer, tiles)("tiled", *t)
        with pytest.raises(ValueError, match=f"tiles is {tiles}"):
            torch.vmap(lambda x, k=tiles: form(layer, k)("tiled", x, *tensors[1:]))(tensors[0].detach())
    for tiles in (2.5, "2", None):
        with pytest.raises(TypeError, match=r"tiles is .*; give a whole number, such as 4"):
            form(layer, tiles)("tiled", *tensors)


def test_arguments_that_are_refused():
    x, w_gate, w_up, w_down = drawn("swiglu")
    with pytest.raises(ValueError, match=r"w_up is .*must be \[6, 7\]"):
        tiled_linear.tiled_mlp(x, w_gate, w_up.t(), w_down, 2)
    with pytest.raises(ValueError, match=r"w_down is .*must be \[7, 5\]"):
        tiled_linear.tiled_mlp(x, w_gate, w_up, w_down[1:, :5], 2)
    with pytest.raises(ValueError, match=r"b_in is \[6\]; .*must be \[7\]"):
        tiled_linear.tiled_gelu_mlp(x, w_gate, w_down, 2, torch.zeros(6))


@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_a_model_in_tiles_is_the_model(family):
    """Losses and updated parameters of a whole step, in float64, by every remat policy."""
    sizes = {"vocab_size": 31, "max_len": 8, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 24}
    config = models.GPT2Config(**sizes) if family == "gpt2" else models.LlamaConfig(**sizes, n_kv_heads=2)
    mesh, tx, tokens = one_process(), optim.sgd(0.1), torch.arange(18).reshape(2, 9) % 31
    results = []
    for tiles, chunk, remat in ((1, 0, "none"), (5, 0, "none"), (5, 0, "full"), (1, 3, "none"), (5, 7, "full")):
        model = models.build(dataclasses.replace(config, mlp_tiles=tiles, mlp_tokens=chunk))
        plan = zero_plan(0, model, mesh, policy=fp64())
        state = init_state(model, tx, plan, seed=0)
        step = make_train_step(model, tx, plan, execution=Execution(remat=remat))
        state, metrics = step(state, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
        results.append((metrics.loss, torch.cat([leaf.reshape(-1) for leaf in pytree.leaves(state.params)])))
    for loss, params in results[1:]:
        assert_close(loss, results[0][0], rtol=1e-12, atol=0)
        assert_close(params, results[0][1], rtol=1e-10, atol=1e-13)
