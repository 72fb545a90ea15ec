"""Largest magnitudes found by the kernel that writes a tensor: those of a pass over it, bit for bit, and a traced block
that takes them from there."""

import kernel_laws as laws
import pytest
import torch
from close import assert_same
from torch.fx.experimental.proxy_tensor import make_fx

from fzero.core import graph_passes, vjp_pair
from fzero.kernels import glu, norm, norm_triton
from fzero.kernels.custom_operator import segment_length
from fzero.kernels.float8 import float8_linear


def calls(shape, dtype, layer=False):
    """(operator, its arguments) of each that has a twin; the numbers have zeros, both signs, and NaN in one row."""
    x, r, g, h = (t.to(dtype) for t in laws.draw(*[shape] * 4))
    w, b = (t.to(dtype) for t in laws.draw(*[shape[-1:]] * 2, seed=1))
    bias = b if layer else None
    if x.shape[:-1].numel() > 2:
        for t in (x, g):
            flat = t.view(-1, shape[-1])
            flat[1, -1] = torch.nan
            flat[2] = 0.0
            flat[0, 0] = -flat.abs().nan_to_num().amax() * 2
    stats = norm_triton.norm_forward(x, w, bias, 1e-5)[1]
    yield norm_triton.norm_forward, (x, w, bias, 1e-5)
    yield norm_triton.add_norm_forward, (x, r, w, bias, 1e-5)
    for total in (None, h):
        yield norm_triton.norm_backward, (g, total, x, w, stats)
    for kind in range(len(glu.KINDS)):
        yield glu.glu_forward, (x, r, kind)
        yield glu.glu_backward, (x, r, g, kind)


def known(tensors):
    """NaN as a number, which no magnitude and nothing drawn is."""
    return [torch.nan_to_num(t, nan=-7777.0, posinf=torch.inf) for t in tensors]


def check(plain, args):
    """A twin gives the same results, and of those at its places the largest magnitudes of each row and of all."""
    twin, places = graph_passes.TWINS[plain]
    results = plain(*args)
    results = results if isinstance(results, (tuple, list)) else (results,)
    found = twin(*args)
    assert len(found) == len(results) + len(places)
    assert_same(known(found[: len(results)]), known(results))
    for result, at in places.items():
        written = results[result]
        written = written.reshape(-1, written.shape[-1])
        assert found[at].dtype == written.dtype and len(found[at]) == len(written)
        wanted = torch.linalg.vector_norm(written, torch.inf, dim=1)
        assert_same(known([torch.amax(found[at], 1)]), known([wanted]))


@pytest.mark.parametrize(
    ("shape", "dtype", "layer"),
    [
        ((5, 48), torch.bfloat16, False),
        ((2, 3, 37), torch.float32, True),
        ((4, 1), torch.float16, False),
        pytest.param((3, 1030), torch.bfloat16, True, marks=pytest.mark.exhaustive),
        pytest.param((1, 512), torch.float32, False, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_twin_gives_the_magnitudes_of_what_it_writes(shape, dtype, layer):
    for plain, args in calls(shape, dtype, layer):
        check(plain, args)


def test_long_rows_are_taken_in_chunks(monkeypatch):
    """Rows of more than 8 columns, 8 at a time, by two programs with several tiles each."""
    monkeypatch.setattr(norm_triton, "WHOLE", dict.fromkeys(norm_triton.WHOLE, 8))
    monkeypatch.setattr(norm_triton, "CHUNK", 8)
    monkeypatch.setattr(norm_triton, "_programs", lambda device, warps: 2)
    for plain, args in calls((5, 19), torch.bfloat16):
        check(plain, args)


def test_parts_divide_rows():
    assert [segment_length(torch.empty(2, n)) for n in (14336, 11008, 48, 37, 1, 0)] == [256, 256, 16, 1, 1, 1]


# ---- in a traced block -----------------------------------------------------------------------------------------------


def llama_like(scaling, layer=False):
    """A norm, a gate behind a sum and a norm, and the linears between them in float8."""

    def linear(x, w):
        return float8_linear(x, w, scaling, impl="scaled_mm")

    def block(x, first, w_in, second, w_gate, w_up, w_down):
        h = norm.rms_norm(x, first, 1e-5, impl="triton")
        y, total = norm.add_rms_norm(linear(h, w_in), x, second, 1e-5, impl="triton")
        gated = glu.swiglu(linear(y, w_gate), linear(y, w_up), impl="triton")
        return (total + linear(gated, w_down),)

    return block


def block_inputs():
    shapes = (1, 16, 16), (16,), (16, 16), (16,), (16, 32), (16, 32), (32, 16)
    return [t.to(torch.bfloat16) for t in laws.draw(*shapes)]


def run(scaling, inputs):
    pair = vjp_pair.vjp_pair(llama_like(scaling), len(inputs), compiled=False, budget=0.99)
    outs, residuals = pair.forward(inputs)
    cotangent = laws.draw(outs[0].shape, seed=1)[0].to(torch.bfloat16)
    return [list(outs), list(pair.backward(residuals, [cotangent]))]


def magnitudes(graph):
    """How many largest magnitudes a graph finds by a pass of its own, and how many among those that kernels found."""
    targets = [node.target for node in graph.graph.nodes]
    twins = [
        node
        for node in graph.graph.nodes
        if node.target in graph_passes.TWINS and graph_passes.TWINS[node.target].operator is node.target
    ]
    return (
        targets.count(graph_passes.VECTOR_NORM) + targets.count(graph_passes.ABS),
        targets.count(graph_passes.AMAX) - targets.count(graph_passes.ABS),
        len(twins),
    )


# By itself the tensorwise block finds those of four weights and of the gradient that it is given; the rowwise one those
# of eight sides of weights, of five gradients' and three inputs' columns and of the rows of one gradient, less one.
@pytest.mark.parametrize(
    ("scaling", "own"), [("tensorwise", 5), pytest.param("rowwise", 16, marks=pytest.mark.exhaustive)]
)
def test_a_traced_block_takes_them_from_the_kernels(scaling, own, monkeypatch):
    """Of three operands and three gradients, with the bits of operators that find nothing."""
    laws.skip_without_float8(scaling)
    inputs, counts, fuse = block_inputs(), [], graph_passes.fuse_max_magnitudes

    def counting(graph):
        counts.append(magnitudes(graph))
        fuse(graph)
        counts.append(magnitudes(graph))

    monkeypatch.setattr("fzero.core.graph_passes.fuse_max_magnitudes", counting)
    outs, grads = laws.both_passes(lambda *t: llama_like(scaling)(*t)[0], inputs)
    assert_same(run(scaling, inputs), [list(outs), list(grads)])
    # Five calls have twins: two norms, the gate, its backward pass with two gradients, and the sum's backward pass.
    assert counts == [(own + 6, 0, 0), (own, 6, 5)]


NORM = torch.ops.fzero.norm_forward.default


@pytest.mark.parametrize(
    ("ask", "taken"),
    [
        (lambda y: torch.linalg.vector_norm(y, torch.inf), 1),
        (lambda y: y.view(-1, 8).abs().amax(), 1),
        (lambda y: torch.linalg.vector_norm(y.view(-1, 16), torch.inf, dim=1), 1),
        (lambda y: torch.linalg.vector_norm(y.view(-1, 16), torch.inf, dim=0), 0),
        (lambda y: torch.linalg.vector_norm(y.view(-1, 8), torch.inf, dim=1), 0),
        (lambda y: torch.linalg.vector_norm(y, torch.inf, dim=1), 0),
        (lambda y: torch.linalg.vector_norm(y.view(-1, 16), torch.inf, dim=1, keepdim=True), 0),
        (lambda y: torch.linalg.vector_norm(y), 0),
        (lambda y: y.amax(), 0),
        (lambda y: (2 * y).abs().amax(), 0),
    ],
)
def test_only_what_a_kernel_finds_is_taken(ask, taken):
    x, w = laws.draw((2, 3, 16), (16,), dtype=torch.float32)
    graph = make_fx(lambda x, w: [ask(NORM(x, w, None, 1e-5)[0])], tracing_mode="fake")(x, w)
    (wanted,) = graph(x, w)
    own = magnitudes(graph)
    graph_passes.fuse_max_magnitudes(graph)
    assert [node.target for node in graph.graph.nodes].count(graph_passes.TWINS[NORM].operator) == taken
    assert magnitudes(graph) != own if taken else magnitudes(graph) == own
    assert_same(graph(x, w), [wanted])
