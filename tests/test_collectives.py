"""Collectives: each equals its one-process meaning, its backward pass is its transpose, and it composes under every
transform.

The one-process meaning is computed from the tensors of all ranks, stacked in front: [N, ...]. `Whole` has the
collectives of that picture and `Local` those of a rank; a program written once runs on both.
"""

import pytest
import ranks
import torch
from close import assert_close, assert_same

from fzero import all_gather, all_to_all, jit, ppermute, psum, psum_scatter, pvary
from fzero.comm import collectives, own_slice
from fzero.core import vjp_pair
from fzero.sharding import Axis, fake_mesh, one_process

F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


class Local:
    """The collectives over one axis of a rank's mesh."""

    def __init__(self, axis):
        self.axis = axis

    def __getattr__(self, name):
        return lambda x, *args: getattr(collectives, name)(x, self.axis, *args)


class Whole:
    """What they mean for the tensors of all ranks together, [N, ...]; dims are those of one rank's tensor, from the
    end."""

    def psum(self, x):
        return x.sum(0, keepdim=True).expand_as(x)

    def pvary(self, x):
        return x

    def all_gather(self, x, dim):
        return torch.cat(list(x), dim).expand(x.shape[0], *torch.cat(list(x), dim).shape)

    all_gather_same = all_gather

    def own_slice(self, x, dim):
        return torch.stack([whole.chunk(x.shape[0], dim)[r] for r, whole in enumerate(x)])

    def psum_scatter(self, x, dim):
        return self.own_slice(self.psum(x), dim)

    def all_to_all(self, x, split, concat):
        pieces = [whole.chunk(x.shape[0], split) for whole in x]
        return torch.stack([torch.cat([p[r] for p in pieces], concat) for r in range(x.shape[0])])

    def ppermute(self, x, perm):
        source = {d: s for s, d in perm}
        return torch.stack([x[source[r]] if r in source else torch.zeros_like(x[r]) for r in range(x.shape[0])])


def ring(n):
    return [(i, (i + 1) % n) for i in range(n)]


# (collective, its arguments, shape of a rank's x with N for the number of ranks; sizes are odd wherever they may be)
CASES = [
    ("psum", (), (3, 5)),
    ("psum", (), ()),
    ("pvary", (), (3, 5)),
    ("all_gather", (-1,), (3, 5)),
    ("all_gather", (-3,), (1, 3, 5)),
    ("all_gather", (-2,), (3, 5, 1)),
    ("all_gather_same", (-2,), (3, 5)),
    ("own_slice", (-1,), (3, "N")),
    ("psum_scatter", (-1,), (5, "N")),
    ("psum_scatter", (-3,), ("3N", 5, 1)),
    ("psum_scatter", (-2,), (3, "5N", 1)),
    ("all_to_all", (-2, -1), ("3N", 5)),
    ("all_to_all", (-1, -2), (3, "5N")),
    ("all_to_all", (-1, -1), (3, "5N")),
    ("all_to_all", (-1, -3), (3, 1, "5N")),
    ("ppermute", ("ring",), (3, 5)),
    ("ppermute", ([(0, 1)],), (3, 5)),
    ("ppermute", ([(0, 1), (1, 0)],), (3,)),
    ("ppermute", ([(1, 1)],), (3,)),
    ("ppermute", ([],), (3,)),
]
SAME_IN, SAME_OUT = ("pvary", "own_slice"), ("psum", "all_gather_same")  # the same on all ranks


def arguments(args, n):
    return [ring(n) if a == "ring" else a for a in args]


def inputs(case, n, seed=0):
    """The x of all ranks, [N, ...]: the same for all where the collective takes such."""
    shape = [int(s.rstrip("N") or 1) * n if isinstance(s, str) else s for s in case[2]]
    x = draw(n, *shape, seed=seed)
    return x[:1].expand_as(x).contiguous() if case[0] in SAME_IN else x


def local_value_and_vjp(mesh, cases, xs, ys):
    """(c(x), cT(y) by autograd, by torch.func) of each case for this rank's x and y."""
    out = []
    for (name, args, _), x, y in zip(cases, xs, ys):
        axis = mesh["dp"]
        x, y = x[axis.rank], y[axis.rank]

        def run(x, name=name, args=args, axis=axis):
            return getattr(collectives, name)(x, axis, *arguments(args, axis.size))

        leaf = x.clone().requires_grad_()
        result = run(leaf)
        result.backward(y)
        out.append((result.detach(), leaf.grad, torch.func.vjp(run, x)[1](y)[0]))
    return out


@pytest.mark.parametrize("n", (pytest.param(2, marks=pytest.mark.slow), 3, 4))
def test_value_and_adjoint_law(n):
    """<c(x), y> = <x, cT(y)>, where what is the same on all ranks counts once."""
    xs = [inputs(case, n) for case in CASES]
    expected = [getattr(Whole(), name)(x, *arguments(args, n)) for (name, args, _), x in zip(CASES, xs)]
    ys = [torch.cos(7 * e + torch.arange(n).view(n, *[1] * (e.dim() - 1))) for e in expected]
    ys = [y[:1].expand_as(y).contiguous() if name in SAME_OUT else y for (name, _, _), y in zip(CASES, ys)]
    by_rank = ranks.run(n, local_value_and_vjp, CASES, xs, ys)
    for i, (name, _, _) in enumerate(CASES):
        value, grad, vjp = (torch.stack([result[i][k] for result in by_rank]) for k in range(3))
        assert_close(value, expected[i], rtol=1e-14, atol=1e-14 if expected[i].any() else 0.0)
        assert_same(grad, vjp)

        def inner(a, b, same):
            return (a[0] * b[0]).sum() if same else (a * b).sum()

        left, right = inner(value, ys[i], name in SAME_OUT), inner(xs[i], grad, name in SAME_IN)
        assert torch.allclose(left, right, rtol=1e-13, atol=1e-13), f"{CASES[i]}: {left} is not {right}"
        if name in SAME_IN:
            assert all(torch.equal(grad[0], g) for g in grad)


# ---- transforms -----------------------------------------------------------------------------------------------------

SHAPE = (4, 12)  # of a rank's x; both dims divide by 2, 3 (the second) and 4


def everything(c, n, x):
    """All collectives in one loss, the same on all ranks."""
    a = torch.sin(c.all_gather(x, -1)) * c.psum_scatter(torch.cos(x), -1).sum(-1, keepdim=True)
    total = c.pvary(c.psum(x * x))
    b = c.all_to_all(x * total, -1, -2) * 0.3
    d = c.ppermute(torch.tanh(x), ring(n)) * c.ppermute(x, [(0, 1)]).exp()
    e = c.own_slice(c.psum(x**3), -1)
    f = c.pvary(c.all_gather_same(e * e, -1)) * x
    return c.psum(sum((t * t).sum((-1, -2)) * (i + 1) for i, t in enumerate((a, b, d, f))) * 0.1)


def quantities(c, n, x, v, stacked):
    """Values and derivatives of `everything`, on a rank or, for the stacked tensors of all of them, on one process."""

    def loss(x):
        return everything(c, n, x)

    def once(value):  # a loss that is the same on all ranks counts once
        return value[0] if stacked else value

    def grad(f):
        return torch.func.grad(lambda x: once(f(x)))

    def norm(x):
        return c.psum((grad(loss)(x) ** 2).sum((-1, -2)))

    batch = torch.stack([x, 0.5 * v, x - v])
    return {
        "value": loss(x),
        "grad": grad(loss)(x),
        "grad of grad": grad(norm)(x),
        "jvp": torch.func.jvp(loss, (x,), (v,))[1],
        "jvp of grad": torch.func.jvp(grad(loss), (x,), (v,))[1],
        "grad of jvp": grad(lambda x: torch.func.jvp(loss, (x,), (v,))[1])(x),
        "vmap": torch.stack([loss(b) for b in batch], -1) if stacked else torch.vmap(loss, out_dims=-1)(batch),
        "vmap of grad": torch.stack([grad(loss)(b) for b in batch], -1)
        if stacked
        else torch.vmap(grad(loss), out_dims=-1)(batch),
        "grad of vmap": torch.stack([grad(loss)(b) for b in batch], -1)
        if stacked
        else torch.func.grad(lambda b: torch.vmap(loss, in_dims=1)(b).sum())(batch.movedim(0, 1)).movedim(1, -1),
    }


def local_quantities(mesh, x, v):
    axis = mesh["dp"]
    return quantities(Local(axis), axis.size, x[axis.rank], v[axis.rank], stacked=False)


@pytest.mark.parametrize("n", (pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)))
def test_transforms_equal_one_process(n):
    x, v = draw(n, *SHAPE) * 0.5, draw(n, *SHAPE, seed=1) * 0.5
    if n == 3:
        x, v = (t[:, :3].contiguous() for t in (x, v))
    expected = quantities(Whole(), n, x, v, stacked=True)
    by_rank = ranks.run(n, local_quantities, x, v)
    for name in expected:
        assert_close(torch.stack([result[name] for result in by_rank]), expected[name], rtol=1e-11, atol=1e-12)


def batched_dims(mesh, x):
    """vmap with the batch dim before, between and behind those of the collective, against a loop."""
    axis = mesh["dp"]
    calls = {
        "gather": lambda x: all_gather(x, axis, 1),
        "scatter": lambda x: psum_scatter(x, axis, 1),
        "exchange": lambda x: all_to_all(x, axis, 1, 0),
        "slice": lambda x: own_slice(x, axis, -1),
        "permute": lambda x: ppermute(x, axis, ring(axis.size)),
    }
    x = x[axis.rank]
    for call in calls.values():
        for at in (0, 1, 2):
            assert_same(torch.vmap(call, in_dims=at)(x.movedim(0, at)), torch.stack([call(row) for row in x]))
        twice = torch.vmap(torch.vmap(call))(torch.stack([x, -x]))
        assert_same(twice[1], torch.stack([call(-row) for row in x]))


def test_vmap_at_every_dim_and_twice():
    ranks.run(2, batched_dims, draw(2, 3, 4, 6))


# ---- axes -----------------------------------------------------------------------------------------------------------


def on_two_axes(mesh, x):
    x, dp, tp = x[mesh.rank], mesh["dp"], mesh["tp"]
    return {
        "dp": psum(x, dp),
        "tp": psum(x, tp),
        "both": psum(psum(x, dp), tp),
        "gather": all_gather(all_gather(x, tp, 1), dp, 0),
        "mixed": psum_scatter(all_gather(x, tp, 1), dp, 1),
        "off": psum(x, mesh["rp"]),
        "coordinates": (dp.rank, tp.rank, dp.size, tp.size),
    }


def test_axes_are_independent():
    x = draw(4, 3, 2)
    by_rank = ranks.run(4, on_two_axes, x, mesh={"dp": 2, "tp": 2})
    grid = x.view(2, 2, 3, 2)  # tp is innermost
    for rank, got in enumerate(by_rank):
        dp, tp = divmod(rank, 2)
        assert got["coordinates"] == (dp, tp, 2, 2)
        assert_close(got["dp"], grid[:, tp].sum(0), rtol=1e-15)
        assert_close(got["tp"], grid[dp].sum(0), rtol=1e-15)
        assert_close(got["both"], x.sum(0), rtol=1e-14)
        assert_same(got["gather"], torch.cat([torch.cat(list(row), 1) for row in grid]))
        rows = torch.cat(list(grid.sum(0)), 1)
        assert_close(got["mixed"], rows[:, 2 * dp : 2 * dp + 2], rtol=1e-14)
        assert_same(got["off"], x[rank])


def test_on_an_axis_of_one_rank_each_is_the_identity():
    axis, x = one_process()["dp"], draw(4, 3)
    calls = [
        psum(x, axis),
        pvary(x, axis),
        all_gather(x, axis, -1),
        collectives.all_gather_same(x, axis),
        own_slice(x, axis),
        psum_scatter(x, axis, 1),
        all_to_all(x, axis, 0, 1),
        ppermute(x, axis, [(0, 0)]),
        collectives.start_all_gather(x, axis).wait(),
        collectives.start_psum_scatter(x, axis).wait(),
        collectives.start_psum(x, axis).wait(),
    ]
    assert all(y is x for y in calls)
    assert_same(ppermute(x, axis, []), torch.zeros_like(x))
    out = torch.empty_like(x)
    assert collectives.start_all_gather(x, axis, out=out).wait() is out and torch.equal(out, x)


# ---- dtypes and extreme shapes --------------------------------------------------------------------------------------


def other_dtypes(mesh):
    axis, r = mesh["dp"], mesh.rank
    x = torch.arange(8)
    out = {
        str(d): psum(x.to(d) + r, axis) for d in (torch.int64, torch.int32, torch.uint8, torch.bfloat16, torch.float16)
    }
    out["bool"] = all_gather((x % 2 == r), axis)
    z = torch.complex(x.double(), x.double() + r)
    out["complex"], out["conjugate"] = psum(z, axis), all_gather(z.conj(), axis)
    out["strided"] = all_gather(x.view(2, 4).T + r, axis)
    out["empty"] = [
        psum(torch.zeros(0, 3), axis),
        all_gather(torch.zeros(0, 3), axis),
        all_gather(torch.zeros(2, 0), axis),
    ]
    out["empty"] += [
        psum_scatter(torch.zeros(0, 3), axis),
        all_to_all(torch.zeros(0, 4), axis, 0, 1),
        ppermute(torch.zeros(0), axis, ring(2)),
    ]
    return out


def test_dtypes_and_empty_tensors():
    x = torch.arange(8)
    for got in ranks.run(2, other_dtypes):
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.bfloat16, torch.float16):
            assert_same(got[str(dtype)], (2 * x + 1).to(dtype))
        assert_same(got["bool"], torch.cat([x % 2 == 0, x % 2 == 1]))
        z = [torch.complex(x.double(), x.double() + r) for r in (0, 1)]
        assert_same(got["complex"], z[0] + z[1])
        assert_same(got["conjugate"].resolve_conj(), torch.cat(z).conj().resolve_conj())
        assert_same(got["strided"], torch.cat([x.view(2, 4).T, x.view(2, 4).T + 1]))
        assert [list(t.shape) for t in got["empty"]] == [[0, 3], [0, 3], [4, 0], [0, 3], [0, 8], [0]]


# ---- compiled -------------------------------------------------------------------------------------------------------


def compiled(mesh, x):
    axis = mesh["dp"]
    x = x[axis.rank]

    def loss(x):
        return everything(Local(axis), axis.size, x)

    def grads(x):
        return torch.func.grad(loss)(x), loss(x)

    with mesh.ledger.phase("eager"):
        expected = grads(x)
    fast = jit(grads)
    for _ in range(2):
        with mesh.ledger.phase("jit"):
            assert_close(fast(x), expected, rtol=1e-11, atol=1e-13)
    pair = vjp_pair.vjp_pair(lambda x: (loss(x),), 1, compiled=True)
    with mesh.ledger.phase("pair"):
        out, residuals = pair.forward([x])
        (grad,) = pair.backward(residuals, [torch.ones((), dtype=F64)])
    assert_close((grad, out[0]), expected, rtol=1e-11, atol=1e-13)
    return {phase: mesh.ledger.total(phase)[5:] for phase in ("eager", "jit", "pair")}


@pytest.mark.slow
def test_compiled_equals_eager_and_runs_the_same_collectives():
    eager, fast, pair = ranks.run(2, compiled, draw(2, *SHAPE))[0].values()
    assert fast == tuple(2 * n for n in eager)
    # The pair computes the value once, eager twice.
    assert pair[0] < eager[0] and pair[2] < eager[2]


def with_little_memory(mesh, x, compiled):
    """Calls by (phase, collective, leaf) in the forward and backward pass, eager and traced with a budget of almost
    nothing."""
    dp = mesh["dp"]
    x = x[dp.rank]

    def f(x):
        a = psum(x, dp, leaf="a")
        b = all_gather(torch.sin(pvary(a, dp, leaf="a")) * x, dp, leaf="b")
        return (psum((torch.tanh(b) * b).sum(), dp, leaf="c"),)

    one = torch.ones((), dtype=F64)
    calls = []
    for pair in (vjp_pair.vjp_pair(f, 1, compiled=False), vjp_pair.vjp_pair(f, 1, compiled=compiled, budget=0.01)):
        mesh.ledger.clear()
        with mesh.ledger.phase("forward"):
            out, residuals = pair.forward([x])
        with mesh.ledger.phase("backward"):
            out += pair.backward(residuals, [one])
        calls.append((out, sorted((*row[:4], row.calls) for row in mesh.ledger.rows())))
    assert_close(calls[1][0], calls[0][0], rtol=1e-12)
    assert calls[1][1] == calls[0][1]
    return calls[0][1]


@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=pytest.mark.slow)))
def test_what_is_recomputed_repeats_no_collective(compiled):
    for calls in ranks.run(2, with_little_memory, draw(2, 8), compiled):
        forward = [("all_gather", "b"), ("psum", "a"), ("psum", "c")]
        backward = [("psum", "a"), ("psum_scatter", "b")]
        assert calls == [("backward", c, "dp", leaf, 1) for c, leaf in backward] + [
            ("forward", c, "dp", leaf, 1) for c, leaf in forward
        ]


# ---- guards ---------------------------------------------------------------------------------------------------------


def test_guards_name_the_collective_the_leaf_and_the_fix():
    dp, x = fake_mesh({"dp": 4})["dp"], torch.zeros(6, 8)
    cases = [
        (
            lambda: psum_scatter(x, dp, leaf="w"),
            r"psum_scatter over dp of w: dim 0 has size 6, not divisible by dp=4; pad it to 8, or choose",
        ),
        (lambda: own_slice(x, dp, -2), r"own_slice over dp: dim 0 has size 6, not divisible by dp=4"),
        (lambda: all_to_all(x, dp, 0, 1), r"all_to_all over dp: dim 0 has size 6, not divisible by dp=4"),
        (
            lambda: collectives.start_psum_scatter(x, dp, leaf="w"),
            r"psum_scatter over dp of w: dim 0 has size 6, not divisible",
        ),
        (lambda: all_gather(x, dp, 2), r"all_gather over dp: x has shape \[6, 8\] and no dim 2"),
        (lambda: all_to_all(x, dp, 1, -3), r"all_to_all over dp: x has shape \[6, 8\] and no dim -3"),
        (lambda: psum(x > 0, dp, leaf="mask"), r"psum over dp of mask: x is bool; convert it to an integer dtype"),
        (
            lambda: ppermute(x, dp, [(0, 4)]),
            r"ppermute over dp: destination 4 in \[\(0, 4\)\]; each is a rank from 0 to 3, and is there once",
        ),
        (lambda: ppermute(x, dp, [(-1, 0)]), r"ppermute over dp: source -1"),
        (lambda: ppermute(x, dp, [(0, 1), (0, 2)]), r"ppermute over dp: source 0"),
        (lambda: ppermute(x, dp, [(0, 1), (2, 1)]), r"ppermute over dp: destination 1"),
        (lambda: psum(x, dp), r"psum over dp: a mesh for planning has fake tensors only; this one is real, \[6, 8\]"),
        (
            lambda: psum(x, Axis("tp", 2)),
            r"psum over tp: the axis has 2 ranks and no communicator; take it from a mesh of make_mesh",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
