"""Operators that multiply matrices say what they cost, and a partitioner with a budget of memory (remat selective:F)
recomputes of them what the budget forces, whatever form they have."""

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fzero
from fzero.core import flop_of, torch_private, vjp_pair
from fzero.core.graph_passes import FORMULAS, partition_by_cost
from fzero.kernels import OPENED, attention, rms_norm, swiglu
from fzero.kernels.float8 import float8_linear
from fzero.models import tiled_linear

ROOT = Path(fzero.__file__).parent
# What multiplies matrices, in Python, in Triton and in C++.
PRODUCT = re.compile(
    r"\.dot\(|\b(b?mm|matmul|einsum|(add|badd)bmm|addmm|scaled_mm|grouped_mm|brgemm|linear)\(|scaled_dot_product"
    r'|#include "tiles.h"'
)

# ---- every product has a formula -------------------------------------------------------------------------------------


@functools.cache
def names_of(path):
    """What a file defines or imports by name: a node of its syntax tree, or the (file, name) that it is elsewhere."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        for part in ast.walk(node) if isinstance(node, ast.If) else [node]:
            if isinstance(part, (ast.FunctionDef, ast.ClassDef)):
                found[part.name] = part
            elif isinstance(part, (ast.Assign, ast.AnnAssign)):
                targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                found |= {t.id: part for t in targets if isinstance(t, ast.Name)}
            elif isinstance(part, ast.ImportFrom) and (part.module or "").startswith("fzero."):
                for alias in part.names:
                    place = ROOT.parent / part.module.replace(".", "/")
                    found[alias.asname or alias.name] = place.with_suffix(".py"), alias.name
    return found


def multiplies(path, name, seen):
    """Whether what a file has under a name multiplies matrices, or something that it reaches does."""
    while isinstance(found := names_of(path).get(name), tuple):
        path, name = found
        if not path.exists():
            return False
    if found is None or (path, name) in seen:
        return False
    seen.add((path, name))
    for node in ast.walk(found):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            return True
        if isinstance(node, ast.Call) and PRODUCT.search(ast.unparse(node.func) + "("):
            return True
        compiled = isinstance(node, ast.Call) and ast.unparse(node.func) in ("library", "compile_cache.library")
        if compiled and PRODUCT.search(path.with_suffix(".cpp").read_text()):
            return True
    used = {node.id for node in ast.walk(found) if isinstance(node, ast.Name)} - {name}
    return any(multiplies(path, other, seen) for other in used)


def operators():
    """(name of an operator, file, name of its launcher) of all that the package defines with `operator`."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for made in getattr(node, "decorator_list", ()):
                if isinstance(made, ast.Call) and ast.unparse(made.func) == "operator":
                    importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
                    yield re.search(r"\w+(?=\()", ast.unparse(made.args[0]))[0], path, node.name


def test_each_operator_that_multiplies_has_a_formula_and_no_other():
    found = {name: multiplies(path, launcher, set()) for name, path, launcher in operators()}
    assert len(found) > 40 and sum(found.values()) > 15
    known = {name for name in found if getattr(torch.ops.fzero, name) in FORMULAS}
    # The gradient of a norm reaches the function that splits graphs, in which there are products of somebody else.
    assert {name for name, product in found.items() if product} - known <= {"rms_norm_rows_backward"}
    assert known <= {name for name, product in found.items() if product}


def test_a_product_without_a_formula_is_found(tmp_path):
    text = """
@triton.jit
def _kernel(X):
    return tl.dot(X, X)

def _launch(x):
    _kernel[(1,)](x)

def _other(x):
    return x.sum()

def with_it(x):
    return _launch(x)

def without(x):
    return _other(x)
"""
    (tmp_path / "made.py").write_text(text)
    assert multiplies(tmp_path / "made.py", "with_it", set())
    assert not multiplies(tmp_path / "made.py", "without", set())


@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        (lambda x, g, u, d: tiled_linear.tiled_mlp(x, g, u, d, 3, impl="reference"), [(8, 12), (8, 12), (12, 8)]),
        (
            lambda x, g, u, d: tiled_linear.tiled_mlp(x, g, u, d, 3, tokens=5, impl="reference"),
            [(8, 12), (8, 12), (12, 8)],
        ),
        (lambda x, i, o: tiled_linear.tiled_gelu_mlp(x, i, o, 3), [(8, 12), (12, 8)]),
    ],
    ids=["gated", "gated-tokens", "gelu"],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_the_formulas_of_tiled_layers_are_what_their_operators_multiply(layer, sizes, frozen):
    calls = []

    class Seen(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in OPENED:
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    x = torch.randn(10, 8, requires_grad=True)
    weights = [torch.randn(size, requires_grad=not frozen) for size in sizes]
    with Seen():
        layer(x, *weights).sum().backward()
    assert [func.name() for func, _ in calls] == ["fzero::tiled_layer", "fzero::tiled_layer_backward"]
    for func, args in calls:
        with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter, torch.no_grad():
            out = OPENED[func](*args)
        assert flop_of(func, args, {}, out) == counter.get_total_flops() > 0


# ---- what a partitioner makes of it ----------------------------------------------------------------------------------


def block(linear, impl):
    """A layer of a transformer with these forms of its products."""

    def f(wq, wk, wv, wo, w_gate, w_up, w_down, first, second, x):
        h = rms_norm(x, first, 1e-5)
        q, k, v = (linear(h, w).reshape(*x.shape[:2], 4, -1) for w in (wq, wk, wv))
        x = x + linear(attention.attention(q, k, v, impl=impl).reshape(x.shape), wo)
        h = rms_norm(x, second, 1e-5)
        return [x + linear(swiglu(linear(h, w_gate), linear(h, w_up)), w_down)]

    return f


def emulated(x, w):
    return float8_linear(x, w, impl="emulated")


def products(graph):
    """FLOPs and bytes of the result of each product of a graph, by name."""
    found = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            if flop := flop_of(node.target, args, kwargs, node.meta["val"]):
                out = node.meta["val"]
                kept = out if isinstance(out, torch.Tensor) else out[0]
                found[node.name] = flop, kept.numel() * kept.element_size()
    return found


@pytest.fixture
def split(monkeypatch):
    """split(f, inputs, budget) -> (kept bytes, gradients, products forward, products backward)."""
    plain, graphs = torch_private.min_cut_partition, []

    def partition(*args, **kwargs):
        graphs[:] = plain(*args, **kwargs)
        return tuple(graphs)

    monkeypatch.setattr(torch_private, "min_cut_partition", partition)

    def run(f, inputs, budget):
        pair = vjp_pair.vjp_pair(f, len(inputs), compiled=False, budget=budget)
        outs, residuals = pair.forward(inputs)
        # By storage: torch 2.14 keeps a result beside a view of it.
        storages = [t.untyped_storage() for t in residuals if isinstance(t, torch.Tensor)]
        kept = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        return kept, pair.backward(residuals, [torch.ones_like(outs[0])]), *map(products, graphs)

    return run


def weights_and_rows(d=64, f=192):
    torch.manual_seed(0)
    shapes = (*[(d, d)] * 4, (d, f), (d, f), (f, d))
    return [*(torch.randn(shape) / 8 for shape in shapes), torch.ones(d), torch.ones(d), torch.randn(2, 128, d)]


ALL, NOTHING = 1 - 1e-9, 0.0


@pytest.mark.parametrize(
    ("linear", "impl"),
    [
        (emulated, "tiled"),
        pytest.param(torch.matmul, "tiled", marks=pytest.mark.exhaustive),
        pytest.param(torch.matmul, "fused", marks=pytest.mark.exhaustive),
        pytest.param(emulated, "fused", marks=pytest.mark.exhaustive),
    ],
    ids=["float8", "tiled", "fused", "float8-fused"],
)
def test_a_budget_recomputes_the_products_that_it_forces_and_no_others(split, linear, impl):
    inputs = weights_and_rows()
    f = block(linear, impl)
    (most, grads, forward, backward), (least, _, _, again) = split(f, inputs, ALL), split(f, inputs, NOTHING)
    assert not backward.keys() & forward.keys() and least < 0.3 * most
    assert len(again.keys() & forward.keys()) == 7  # the last product's result is the layer's
    before = set()
    for budget in (0.9, 0.7, 0.5, 0.3, 0.1):
        kept, these, forward, backward = split(f, inputs, budget)
        repeated = {name: of for name, of in backward.items() if name in forward}
        limit = least + budget * (most - least)
        assert kept <= limit * 1.03  # the partitioner estimates: it leaves out small results of attention
        # Had it kept the smallest of those that it recomputes, it would have kept too much.
        assert kept + min(size for _, size in repeated.values()) > limit * 0.97
        # The dearest are kept as long as any: what is recomputed is a part of what a smaller budget recomputes.
        share = sum(flop for flop, _ in repeated.values()) / sum(flop for flop, _ in forward.values())
        assert share <= 1 - budget + 0.06 and len(repeated) >= len(before)
        before = repeated.keys()
        assert all(torch.equal(a, b) for a, b in zip(these, grads, strict=True))


def test_float8_keeps_what_other_products_keep(split):
    inputs = weights_and_rows()
    for budget in (0.7, 0.3):
        found = [split(block(linear, "tiled"), inputs, budget) for linear in (emulated, torch.matmul)]
        assert found[0][0] == found[1][0] and len(found[0][3]) == len(found[1][3])


def test_torch_has_its_own_list_behind_a_partition():
    plain, known = torch_private.partitioners.get_default_op_list, dict(flop_registry)
    packet = torch.ops.fzero.float8_product
    with pytest.raises(ZeroDivisionError), partition_by_cost():
        assert packet in torch_private.partitioners.get_default_op_list().compute_intensive_ops
        raise ZeroDivisionError
    assert torch_private.partitioners.get_default_op_list is plain
    assert flop_registry == known and packet not in flop_registry and packet not in plain().compute_intensive_ops
