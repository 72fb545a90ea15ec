"""`stack` is its loop: under every remat policy, compiled or not, under every transform."""

import gc
import weakref
from typing import NamedTuple

import pytest
import torch
from close import assert_close, assert_same

from fzero import Remat, stack
from fzero.core import pytree, vjp_pair
from fzero.core import stack as streaming

F64 = torch.float64
B, D, F = 3, 4, 6
POLICIES = {
    text: Remat.parse(text)
    for text in ("none", "full", "every:2", "every:3", "every:100", "selective:0.5", "selective:0.0")
}


class Ctx(NamedTuple):
    layer: object = ()
    shift: object = ()  # a tensor of ctx
    gain: float = 0.5
    nothing: object = None


def block(p, x, ctx):
    """A residual block whose value depends on the layer's number and on all of ctx."""
    assert ctx.nothing is None
    h = torch.tanh(x @ p["w_in"] + p["b"] + ctx.shift)
    return x + ctx.gain * (torch.sin(h) * (1.0 + ctx.layer)) @ p["w_out"]


def arguments(depth=5, dtype=F64):
    generator = torch.Generator().manual_seed(11)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=F64).to(dtype) / 2

    layers = {"w_in": draw(depth, D, F), "b": draw(depth, F), "w_out": draw(depth, F, D)}
    return layers, draw(B, D), Ctx(shift=draw(F))


def loss_of(run):
    return lambda layers, x, ctx: (run(block, layers, x, ctx) ** 3).sum()


def with_options(**options):
    return lambda *args: stack(*args, **options)


def value_and_grads(run, layers, x, ctx):
    """By torch.func and by .backward(): both must give the same."""
    grads, out = torch.func.grad_and_value(loss_of(run), argnums=(0, 1))(layers, x, ctx)
    leaves = pytree.map(lambda t: t.clone().requires_grad_(), (layers, x))
    loss = loss_of(run)(*leaves, ctx)
    loss.backward()
    assert_same((loss.detach(), pytree.map(lambda t: t.grad, leaves)), (out, grads))
    return out, grads


# ---- values and gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", (1, 2, 5))
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_every_policy_is_the_loop(policy, depth):
    args = arguments(depth)
    expected = value_and_grads(streaming.reference, *args)
    got = value_and_grads(with_options(remat=policy), *args)
    assert_close(got, expected, rtol=1e-12, atol=1e-14)
    assert_close(stack(block, *args, remat=policy), streaming.reference(block, *args), rtol=1e-13)
    if policy.budget == 1.0:
        assert_same(got, value_and_grads(stack, *args))


def test_float32_is_bitwise_under_every_policy_too():
    args = arguments(5, torch.float32)
    expected = value_and_grads(stack, *args)
    assert all(t.dtype == torch.float32 for t in pytree.leaves(expected))
    for policy in POLICIES.values():
        got = value_and_grads(with_options(remat=policy), *args)
        if policy.budget == 1.0:
            assert_same(got, expected)
        else:
            assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_is_the_loop_and_every_policy_gives_the_same_bits():
    args = arguments(3)
    base = value_and_grads(with_options(compiled=True), *args)
    assert_close(base, value_and_grads(streaming.reference, *args), rtol=1e-11, atol=1e-13)
    for text in ("full", "every:2"):
        assert_same(value_and_grads(with_options(compiled=True, remat=POLICIES[text]), *args), base)
    assert_close(stack(block, *args, compiled=True), streaming.reference(block, *args), rtol=1e-12)
    # A budget gives another program for the backward pass, and the same numbers.
    assert_close(
        value_and_grads(with_options(compiled=True, remat=POLICIES["selective:0.0"]), *args),
        base,
        rtol=1e-11,
        atol=1e-13,
    )


def test_gradients_of_x_alone_and_of_some_leaves():
    layers, x, ctx = arguments()
    for form in (stack, with_options(remat=Remat(every=2))):
        for argnums in (0, 1):
            got, want = (
                torch.func.grad(loss_of(run), argnums=argnums)(layers, x, ctx) for run in (form, streaming.reference)
            )
            assert_close(got, want, rtol=1e-12, atol=1e-14)
        got, want = (
            torch.func.grad(lambda b, run=run: loss_of(run)({**layers, "b": b}, x, ctx))(layers["b"])
            for run in (form, streaming.reference)
        )
        assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_no_gradient_is_wanted():
    layers, x, ctx = arguments()
    with torch.no_grad():
        out = stack(block, pytree.map(lambda t: t.clone().requires_grad_(), layers), x, ctx)
    assert not out.requires_grad
    assert_same(out, stack(block, layers, x, ctx))


def test_a_second_backward_pass_through_the_same_graph():
    layers, x, ctx = arguments()
    for policy in (Remat(), Remat(every=2), Remat(budget=0.5)):
        leaves = pytree.map(lambda t: t.clone().requires_grad_(), layers)
        loss = loss_of(with_options(remat=policy))(leaves, x, ctx)
        expected = torch.func.grad(loss_of(streaming.reference))(layers, x, ctx)
        for scale in (1.0, 2.0, -3.0):
            got = torch.autograd.grad(loss, pytree.leaves(leaves), torch.tensor(scale, dtype=F64), retain_graph=True)
            assert_close(list(got), [scale * g for g in pytree.leaves(expected)], rtol=1e-12, atol=1e-13)
        _, vjp = torch.func.vjp(lambda p, policy=policy: loss_of(with_options(remat=policy))(p, x, ctx), layers)
        for scale in (1.0, 2.0):
            assert_close(
                vjp(torch.tensor(scale, dtype=F64))[0],
                pytree.map(lambda g, s=scale: s * g, expected),
                rtol=1e-12,
                atol=1e-13,
            )


def test_x_may_be_a_tree_with_parts_that_pass_through():
    layers, x, ctx = arguments()

    def tree_block(p, x, ctx):
        return {"a": block(p, x["a"], ctx) + x["pair"][0].mean(), "pair": (x["pair"][0] * 0.9, x["pair"][1])}

    start = {"a": x, "pair": (torch.sin(x), torch.tensor(2.0, dtype=F64))}

    def loss(run):
        def of(layers, start):
            out = run(tree_block, layers, start, ctx)
            return (out["a"] ** 2).sum() + (out["pair"][0] ** 3).sum() * out["pair"][1]

        return torch.func.grad(of, argnums=(0, 1))(layers, start)

    for policy in (Remat(), Remat(every=2)):
        assert_close(loss(with_options(remat=policy)), loss(streaming.reference), rtol=1e-12, atol=1e-14)
    assert_close(loss(with_options(remat=Remat(budget=0.0))), loss(streaming.reference), rtol=1e-12, atol=1e-14)


def test_ctx_may_hold_other_values_from_call_to_call():
    layers, x, ctx = arguments()
    for gain in (0.5, 2.0, 1, True, 1.0):
        for shift in (ctx.shift, 3.0 * ctx.shift):
            now = ctx._replace(gain=gain, shift=shift)
            assert_close(
                value_and_grads(stack, layers, x, now),
                value_and_grads(streaming.reference, layers, x, now),
                rtol=1e-12,
                atol=1e-14,
            )
    # 1, 1.0 and True are equal and hash alike; a block may tell them apart.
    seen = []

    def telling(p, x, ctx):
        seen.append(type(ctx.gain))
        return block(p, x, ctx)

    for gain in (1, 1.0, True):
        stack(telling, layers, x, ctx._replace(gain=gain))
    assert seen == [int] * 5 + [float] * 5 + [bool] * 5


def test_a_block_that_ignores_its_arguments():
    layers, x, ctx = arguments(3)
    for still in (lambda p, x, ctx: x, lambda p, x, ctx: x.detach() * 2.0, lambda p, x, ctx: torch.ones_like(x)):
        for policy in (Remat(), Remat(every=2)):
            got, want = (
                torch.func.grad(lambda p, x, run=run, still=still: (run(still, p, x, ctx) ** 2).sum(), argnums=(0, 1))(
                    layers, x
                )
                for run in (with_options(remat=policy), streaming.reference)
            )
            assert_same(got, want)


def test_no_layers():
    layers, x, ctx = arguments(0)
    for policy in (Remat(), Remat(every=2)):
        run = with_options(remat=policy)
        assert_same(run(block, layers, x, ctx), x)
        assert_same(torch.func.grad(loss_of(run), argnums=(0, 1))(layers, x, ctx), (layers, 3 * x**2))
        leaf = x.clone().requires_grad_()
        loss_of(run)(layers, leaf, ctx).backward()
        assert_same(leaf.grad, 3 * x**2)


def test_leaves_that_disagree_on_the_number_of_layers_are_named():
    layers, x, ctx = arguments()
    for wrong in (torch.zeros(4, F, dtype=F64), torch.zeros((), dtype=F64)):
        for run in (stack, streaming.reference):
            with pytest.raises(
                ValueError,
                match=r"the leaves of a stack must agree in their first dim \(layers\); they have .*'b': (4|None)",
            ):
                run(block, {**layers, "b": wrong}, x, ctx)


# ---- transforms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", ({}, {"remat": Remat(every=2)}, {"compiled": True}), ids=("plain", "every:2", "compiled")
)
def test_every_transform(options):
    layers, x, ctx = arguments(2)

    def uses(run):
        loss = loss_of(run)
        grad = torch.func.grad(loss)
        tangent = pytree.map(torch.cos, layers)
        many = torch.stack((x, torch.sin(x), x + 1.0))
        seeds = pytree.map(lambda t: torch.stack((t, 0.5 * t)), layers)
        return {
            "vmap": torch.vmap(lambda x: run(block, layers, x, ctx))(many),
            "vmap over params of grad": torch.vmap(grad, (0, None, None))(seeds, x, ctx),
            "vmap over examples of grad": torch.vmap(grad, (None, 0, None))(layers, many, ctx),
            "jvp": torch.func.jvp(lambda p: loss(p, x, ctx), (layers,), (tangent,)),
            "hessian-vector": torch.func.jvp(lambda p: grad(p, x, ctx), (layers,), (tangent,))[1],
            "grad of grad": torch.func.grad(lambda p: sum((g**2).sum() for g in pytree.leaves(grad(p, x, ctx))))(
                layers
            ),
            "hessian": torch.func.hessian(lambda b: loss({**layers, "b": b}, x, ctx))(layers["b"]),
        }

    assert_close(uses(with_options(**options)), uses(streaming.reference), rtol=1e-11, atol=1e-13)


def test_a_second_derivative_that_the_fast_path_cannot_give_is_an_error():
    layers, x, ctx = arguments(2)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(loss_of(stack)(layers, x, ctx), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"use torch\.func\.grad of grad"):
        dx.sum().backward()


def test_a_block_that_closes_over_what_is_differentiated_is_refused():
    layers, x, ctx = arguments(2)
    with pytest.raises(ValueError, match="stack: the function closes over 'w'"):
        torch.func.grad(lambda w: stack(lambda p, x, ctx: x * w, layers, x, ctx).sum())(torch.ones(D, dtype=F64))


def test_a_tensor_of_ctx_that_is_to_be_differentiated_is_refused():
    layers, x, ctx = arguments(2)
    with pytest.raises(ValueError, match="pass it in x"):
        torch.func.grad(lambda shift: loss_of(stack)(layers, x, ctx._replace(shift=shift)))(ctx.shift)


# ---- what is compiled and what is kept ------------------------------------------------------------------------------


def test_traced_once_whatever_the_depth(monkeypatch):
    calls = []
    split = vjp_pair._split_programs

    def counted(*args):
        calls.append(args[-1])
        return split(*args)

    monkeypatch.setattr(vjp_pair, "_split_programs", counted)

    def own_block(p, x, ctx):
        return block(p, x, ctx)

    for depth, policy in ((2, Remat(budget=0.5)), (6, Remat(budget=0.5)), (6, Remat(budget=0.5, every=2))):
        layers, x, ctx = arguments(depth)
        torch.func.grad(lambda p, x=x, ctx=ctx, policy=policy: (stack(own_block, p, x, ctx, remat=policy) ** 2).sum())(
            layers
        )
    assert calls == [0.5]
    layers, x, ctx = arguments(2)
    stack(own_block, layers, torch.cat((x, x)), ctx, remat=Remat(budget=0.5))
    assert calls == [0.5, 0.5]


class Saved:
    """A tensor that autograd keeps, whose life can be seen."""

    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize(
    "text, after_forward, most", (("none", 12, 12), ("full", 0, 2), ("every:2", 0, 4), ("every:3", 0, 6))
)
def test_residuals_are_kept_and_freed_as_the_policy_says(text, after_forward, most):
    """The block keeps two tensors with F columns a layer: tanh's output, and sin's input."""
    layers, x, ctx = arguments(6)

    def narrow(p, x, ctx):
        h = torch.tanh(x @ p["w_in"])
        return x + torch.sin(h) @ p["w_out"].detach()

    alive, seen = weakref.WeakSet(), []

    def pack(tensor):
        saved = Saved(tensor.detach())  # an operator's own output holds the operator: a cycle
        if tensor.shape == (B, F):
            alive.add(saved)
        return saved

    def unpack(saved):
        if saved.tensor.shape == (B, F):
            seen.append(len(alive))
        return saved.tensor

    leaves = pytree.map(lambda t: t.clone().requires_grad_(), layers)
    gc.disable()  # freed by what the code drops, not by the collector of cycles
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = stack(narrow, leaves, x, ctx, remat=Remat.parse(text)).sum()
            assert len(alive) == after_forward
            loss.backward(retain_graph=True)
        assert len(alive) == 0
    finally:
        gc.enable()
    assert len(seen) == 12 and max(seen) == most
    # A layer's residuals are gone before the next layer's are used.
    every = Remat.parse(text).every or 6
    assert seen[::2] == [2 * (i % every + 1) for i in reversed(range(6))]


def test_the_graph_that_is_never_used_keeps_nothing():
    layers, x, ctx = arguments(3)
    leaves = pytree.map(lambda t: t.clone().requires_grad_(), layers)
    boxes = []

    def pack(tensor):
        saved = Saved(tensor.detach())  # an operator's own output holds the operator: a cycle
        boxes.append(weakref.ref(saved))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        out = stack(block, leaves, x, ctx)
    assert any(ref() is not None for ref in boxes)
    del out
    assert all(ref() is None for ref in boxes)


def test_the_pair_of_a_block_is_made_once():
    def own_block(p, x, ctx):
        return block(p, x, ctx)

    before = streaming.segment_pair.cache_info().misses
    for depth in (2, 3, 3):
        stack(own_block, *arguments(depth))
    assert streaming.segment_pair.cache_info().misses == before + 1
