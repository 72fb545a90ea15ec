"""remat is the function itself under every transform; the texts of Remat."""

import ast
from pathlib import Path

import pytest
import torch
from close import assert_close, assert_same

import fzero
from fzero import Remat, remat
from fzero.core import Function, first_order, needs_grad, pytree, run_backward, transforms
from fzero.core.captured_state import MAX_LOOKS

F64 = torch.float64


def f(p, x):
    """A function of trees to a tree, with an output that is also an intermediate value."""
    h = torch.tanh(x @ p["w"] + p["b"])
    return {"h": h, "out": (torch.sin(h) * x).sum(-1)}


def arguments():
    generator = torch.Generator().manual_seed(3)
    w, b, x = (torch.randn(*shape, generator=generator, dtype=F64) for shape in ((4, 4), (4,), (3, 4)))
    return {"w": w, "b": b}, x


def scalar(fn):
    def loss(p, x):
        out = fn(p, x)
        return (out["h"] ** 3).sum() + (out["out"] * torch.arange(1.0, 4.0, dtype=F64)).sum()

    return loss


def first_and_vjp(fn, p, x):
    out, vjp = torch.func.vjp(fn, p, x)
    cotangents = pytree.map(torch.ones_like, out)
    return out, vjp(cotangents), vjp(pytree.map(lambda t: 2 * t, cotangents))


def plain(fn, p, x):
    leaves = [t.clone().requires_grad_() for t in (p["w"], p["b"], x)]
    loss = scalar(fn)({"w": leaves[0], "b": leaves[1]}, leaves[2])
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    return first, torch.autograd.grad(loss, leaves)


def plain_double(fn, p, x):
    leaves = [t.clone().requires_grad_() for t in (p["w"], p["b"], x)]
    loss = scalar(fn)({"w": leaves[0], "b": leaves[1]}, leaves[2])
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    return torch.autograd.grad(sum((g**2).sum() for g in first), leaves)


def grad_of_grad(fn, p, x):
    inner = torch.func.grad(scalar(fn))
    return torch.func.grad(lambda q: sum((g**2).sum() for g in pytree.leaves(inner(q, x))))(p)


grad = torch.func.grad
BITWISE = {
    "value": lambda fn, p, x: fn(p, x),
    "grad": lambda fn, p, x: grad(scalar(fn), argnums=(0, 1))(p, x),
    "grad of one": lambda fn, p, x: grad(lambda b: scalar(fn)({**p, "b": b}, x))(p["b"]),
    "vjp twice": first_and_vjp,
    "plain autograd, twice": plain,
    "vmap of grad": lambda fn, p, x: torch.vmap(grad(scalar(lambda q, row: fn(q, row.expand(3, 4)))), (None, 0))(p, x),
}
CLOSE = {
    "jvp": lambda fn, p, x: torch.func.jvp(fn, (p, x), (pytree.map(torch.cos, p), torch.sin(x))),
    "jvp of one": lambda fn, p, x: torch.func.jvp(lambda y: fn(p, y), (x,), (torch.sin(x),)),
    "grad of grad": grad_of_grad,
    "plain autograd, second order": plain_double,
    "hessian": lambda fn, p, x: torch.func.hessian(lambda b: scalar(fn)({**p, "b": b}, x))(p["b"]),
    "hessian-vector": lambda fn, p, x: torch.func.jvp(
        grad(scalar(fn)), (p, x), (pytree.map(torch.cos, p), torch.sin(x))
    )[1],
    "jacrev": lambda fn, p, x: torch.func.jacrev(fn)(p, x),
    "grad of vmap": lambda fn, p, x: grad(
        lambda q: torch.vmap(scalar(lambda r, row: fn(r, row.expand(3, 4))), (None, 0))(q, x).sum()
    )(p),
}


@pytest.mark.parametrize("use", BITWISE.values(), ids=BITWISE)
def test_remat_gives_the_same_bits(use):
    p, x = arguments()
    assert_same(use(remat(f), p, x), use(f, p, x))


@pytest.mark.parametrize("use", CLOSE.values(), ids=CLOSE)
def test_remat_composes(use):
    p, x = arguments()
    assert_close(use(remat(f), p, x), use(f, p, x), rtol=1e-12, atol=1e-13)


def test_remat_of_remat():
    p, x = arguments()
    assert_same(grad(scalar(remat(remat(f))))(p, x), grad(scalar(f))(p, x))


def test_remat_keeps_its_inputs_and_nothing_else():
    p, x = arguments()
    for fn, kept in ((remat(f), {(4, 4), (4,), (3, 4)}), (f, None)):
        saved, runs = [], []

        def counted(p, x, fn=fn, runs=runs):
            runs.append(1)
            return fn(p, x)

        leaves = pytree.map(lambda t: t.clone().requires_grad_(), p)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            counted(leaves, x)["out"].sum()
        pointers = {t.data_ptr() for t in (leaves["w"], leaves["b"], x)}
        extra = [t for t in saved if t.data_ptr() not in pointers]
        assert (not extra) if kept else len(extra) >= 2


def test_remat_runs_the_function_again_in_the_backward_pass():
    p, x = arguments()
    runs = []

    def counted(p, x):
        runs.append(1)
        return f(p, x)

    for _ in range(MAX_LOOKS):  # of calls that are made twice
        remat(counted)(p, x)
    assert len(runs) == 2 * MAX_LOOKS
    runs.clear()
    w = p["w"].clone().requires_grad_()
    loss = scalar(remat(counted))({**p, "w": w}, x)
    assert len(runs) == 1
    loss.backward()
    assert len(runs) == 2
    with torch.no_grad():
        remat(counted)(p, x)
    assert len(runs) == 3


def test_remat_takes_arguments_that_are_no_tensors():
    x = torch.randn(3, dtype=F64, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([2, 0])

    def g(x, power, index, name):
        return (x[index] ** power, x.sum()) if name == "pick" else (x, x)

    expected = grad(lambda x: sum(t.sum() for t in g(x, 3, index, "pick")))(x)
    assert_same(grad(lambda x: sum(t.sum() for t in remat(g)(x, 3, index, "pick")))(x), expected)


def test_remat_refuses_a_closure_over_what_is_differentiated():
    """Its gradient would silently be zero."""
    t = torch.tensor(2.0, dtype=F64)
    for use in (grad, torch.func.jacfwd, lambda fn: torch.vmap(fn)):
        with pytest.raises(
            ValueError,
            match="remat: the function closes over 'w', a tensor that is differentiated; pass it as an argument",
        ):
            use(lambda w: remat(lambda x: x * w)(t))(torch.stack((t, t)) if use is not grad else t)
    leaf = {"w": t.clone().requires_grad_()}
    with pytest.raises(ValueError, match="closes over 'leaf'"):
        remat(lambda x: x * leaf["w"])(t)
    with torch.no_grad():
        remat(lambda x: x * leaf["w"])(t)
    # A constant may be closed over, and a function that is still to be made.
    closing = remat(lambda x: later(x * t))

    def later(x):
        return x

    assert_same(grad(closing)(t), t)


# ---- what is around the caller --------------------------------------------------------------------------------------


def test_transforms_and_first_order():
    seen = []

    def note(x):
        seen.append((transforms(), first_order()))
        return (x * x).sum()

    x = torch.ones(2)
    for call in (note, grad(note), torch.vmap(note), grad(lambda x: grad(note)(x).sum()), torch.vmap(grad(note))):
        call(torch.ones(2, 2) if call is not note else x)
    torch.func.jvp(note, (x,), (x,))
    assert seen == [
        ([], True),
        (["Grad"], True),
        (["Vmap"], False),
        (["Grad", "Grad"], False),
        (["Vmap", "Grad"], False),
        (["Jvp"], False),
    ]


def test_functions_bind_no_arguments():
    """torch does at each call of each Function that has `setup_context`; `Function` does not."""
    texts = [path.read_text() for path in Path(fzero.__file__).parent.rglob("*.py")]
    kinds = [node for text in texts if "def setup_context" in text for node in ast.parse(text).body]
    kinds = [node for node in kinds if "setup_context" in [getattr(x, "name", "") for x in getattr(node, "body", ())]]
    assert kinds and all([ast.unparse(base) for base in node.bases] == ["Function"] for node in kinds)


class Cube(Function):
    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return run_backward("a cube", lambda x, g: (3 * x**2 * g,), x, g)


def test_a_function_is_differentiated_once_everywhere():
    x = torch.tensor([2.0, 3.0], dtype=F64, requires_grad=True)
    expected = 3 * x.detach() ** 2
    Cube.apply(x).sum().backward()
    assert_same(x.grad, expected)
    assert_same(grad(lambda x: Cube.apply(x).sum())(x.detach()), expected)
    escaped = []
    grad(lambda x: escaped.append(x) or x.sum())(x.detach())
    assert_same(Cube.apply(escaped[0]).detach(), x.detach() ** 3)  # of a transform that is over
    (first,) = torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"a cube: .backward\(\) differentiates it once"):
        first.sum().backward()


def test_needs_grad():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    assert needs_grad(y, x) and not needs_grad(y) and not needs_grad()
    with torch.no_grad():
        assert not needs_grad(x)
    seen = []
    grad(lambda t: seen.append((needs_grad(t), needs_grad(y))) or t.sum())(y)
    assert seen == [(True, False)]


# ---- Remat ----------------------------------------------------------------------------------------------------------

TEXTS = {
    "none": Remat(),
    "full": Remat(every=1),
    "every:2": Remat(every=2),
    "every:12": Remat(every=12),
    "selective:0.5": Remat(budget=0.5),
    "selective:0.123456789": Remat(budget=0.123456789),
    "selective:0.0": Remat(budget=0.0),
    "selective:1e-05": Remat(budget=1e-5),
}


@pytest.mark.parametrize("text", TEXTS)
def test_remat_texts_round_trip(text):
    assert Remat.parse(text) == TEXTS[text] and str(TEXTS[text]) == text


def test_remat_texts_that_mean_the_same():
    assert (
        Remat.parse("every:1") == Remat.parse("full")
        and Remat.parse("selective:1") == Remat()
        and Remat.parse("selective:.5").budget == 0.5
    )


@pytest.mark.parametrize(
    "text",
    ("", "None", "half", "every", "every:", "every:-1", "every:1.5", "full:2", "selective", "selective:-0.5", "none "),
)
def test_remat_refuses_other_texts(text):
    with pytest.raises(ValueError, match=f"remat is {text!r}; it must be none, full, every:K or selective:F"):
        Remat.parse(text)


@pytest.mark.parametrize("text", ("every:0", "selective:1.5", "selective:2"))
def test_remat_refuses_numbers_out_of_range(text):
    with pytest.raises(ValueError, match=f"remat is {text!r}; K must be at least 1 and F in"):
        Remat.parse(text)


def test_nested_recomputations_with_an_input_that_the_inner_one_does_not_use():
    inner = remat(lambda p, x: x @ p["w"])
    outer = remat(lambda p, x: (inner(p, x) * 2.0).sin())
    params, x = {"w": torch.full((2, 2), 0.3), "b": torch.ones(2)}, torch.ones(1, 2)

    def squares(f):
        return lambda p: f(p, x).square().sum()

    plain = squares(lambda p, x: (x @ p["w"] * 2.0).sin())
    for take in (
        lambda f: torch.func.grad(f)(params),
        lambda f: torch.func.jvp(torch.func.grad(f), (params,), (params,))[1],
    ):
        torch.testing.assert_close(take(squares(outer)), take(plain))
        torch.testing.assert_close(take(squares(remat(outer))), take(plain))
