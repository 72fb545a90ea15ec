"""AdamW and Lion in C++ on the host: against the reference, bit by bit where it can be, however leaves lie and are
cut."""

import itertools
import math
import re

import kernel_laws as laws
import pytest
import torch
from close import assert_close, assert_same

from fzero.core import have_compiler
from fzero.kernels import OptimLeaf, StepRates, optim_leaf, optim_lowbit, registry
from fzero.kernels import optim_multi_tensor as kernels

pytestmark = pytest.mark.skipif(not have_compiler(), reason="there is no C++ compiler")
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
OPS = {"adamw": (kernels.adamw, 2), "lion": (kernels.lion, 1)}
SHAPES = [(5, 900), (3,), (2, 4, 37), (), (1, 1), (0, 4), (255,), (257,), (8, 4096), (32771,)]
MATRICES = [(5, 300), (2, 3, 37), (1, 1), (0, 4), (3, 512), (40, 1000), (70,)]
# how a state is kept -> arguments of `draw`
STATES = {
    "float32": {},
    "float32 for bfloat16": {"grad": BF16, "copy": BF16},
    "bfloat16": {"state": BF16, "copy": F16},
    "stochastic": {"state": BF16, "stochastic": True, "grad": BF16, "copy": F32},
    "8 bits": {"coded": True, "copy": BF16},
}
every_op = pytest.mark.parametrize("name", OPS)
every_state = pytest.mark.parametrize("state", STATES)


def draw(name, shapes, state=F32, grad=F32, stochastic=False, coded=False, copy=None, block=256):
    """Leaves with a past; of two moments the second is positive, and below the reach of a code at some elements."""
    leaves = []
    for i, shape in enumerate(shapes):
        p, g, m, v = laws.draw(shape, shape, shape, shape, dtype=F32, seed=i, device="cpu")
        kept = [m, v.square() * torch.logspace(0, -16, v.numel()).view(shape)][: OPS[name][1]]
        if coded:
            pairs = [optim_lowbit.encode(x, block, signed) for x, signed in zip(kept, (True, False))]
            kept = [*(c for c, _ in pairs), *(s for _, s in pairs)]
        else:
            kept = [x.to(state) for x in kept]
        where = optim_lowbit.make_position((5, i), shape, (0,) * len(shape), shape) if stochastic else None
        leaves.append(
            OptimLeaf(
                p,
                g.to(grad),
                tuple(kept),
                0.1 * (i % 2),
                where,
                None if copy is None else torch.zeros_like(p, dtype=copy),
            )
        )
    return leaves


def rates(name, lr=0.01, **more):
    scalars = [torch.tensor(x, dtype=F64) for x in (lr, 0.3, 0.2)][: 3 if name == "adamw" else 1]
    return StepRates(tuple(scalars), torch.tensor(7), 0.9, 0.95, 1e-8 if name == "adamw" else 0.0, **more)


def each(f, leaf):
    """The leaf with its tensors mapped, scales in 8 bits too."""
    return leaf._replace(
        p=f(leaf.p), g=f(leaf.g), state=tuple(map(f, leaf.state)), copy=None if leaf.copy is None else f(leaf.copy)
    )


def values(leaves):
    rows = [{"p": leaf.p, "copy": leaf.copy} | {str(j): x for j, x in enumerate(leaf.state)} for leaf in leaves]
    return {f"{i} {j}": x for i, row in enumerate(rows) for j, x in row.items() if x is not None}


def after(name, leaves, given, impl="cpp"):
    leaves = [each(torch.clone, leaf) for leaf in leaves]
    OPS[name][0](leaves, given, impl=impl)
    return leaves


def compare(name, leaves, given):
    """States and Lion's p have the reference's bits; AdamW's u may miss the last place, with torch's sqrt. The copy is
    p, rounded."""
    got, expected = after(name, leaves, given), after(name, leaves, given, "reference")
    for old, mine, theirs in zip(leaves, got, expected):
        assert_same(mine.state, theirs.state)
        assert_same(mine.g, old.g)
        if name == "lion":
            assert_same(mine.p, theirs.p)
        step = (theirs.p.double() - old.p.double()).abs()
        assert bool(((mine.p.double() - theirs.p.double()).abs() <= 1.2e-7 * (mine.p.abs() + 3.0 * step)).all())
        if mine.copy is not None:
            assert_same(mine.copy, mine.p.to(mine.copy.dtype))
        assert not mine.p.numel() or bool((mine.p != old.p).any())
    return got


# ---- it is the reference
# ----------------------------------------------------------------------------------------------


@every_op
@every_state
@pytest.mark.parametrize("factor", [None, 0.37])
def test_all_leaves_at_once_are_the_reference(name, state, factor):
    leaves = draw(name, MATRICES if state == "8 bits" else SHAPES, **STATES[state])
    given = rates(name)
    if factor is not None:
        given = given._replace(factor=torch.tensor(factor), skip=torch.tensor(False))
    compare(name, leaves, given)


@every_state
def test_a_coupled_decay(state):
    leaves = draw("adamw", MATRICES, **STATES[state])
    got = compare("adamw", leaves, rates("adamw", coupled=True))
    assert any((x.p != y.p).any() for x, y in zip(got, after("adamw", leaves, rates("adamw"))))


@every_op
def test_blocks_of_any_size(name):
    for block in (1, 16, 100, 4096):
        compare(name, draw(name, [(3, 50), (2, 5000)], coded=True, block=block), rates(name, block=block))


@every_op
def test_leaves_of_many_dtypes_at_once(name):
    leaves = [leaf for state in STATES.values() for leaf in draw(name, [(3, 40), (7, 300)], **state)]
    compare(name, leaves, rates(name))


@every_op
@pytest.mark.parametrize("state", ["float32", "float32 for bfloat16"])
def test_the_error_is_at_most_twice_that_of_plain_torch(name, state):
    leaves = [leaf._replace(copy=None) for leaf in draw(name, SHAPES, **STATES[state])]
    given = rates(name, factor=torch.tensor(0.25))
    exact = values(after(name, [each(torch.Tensor.double, leaf) for leaf in leaves], given, "reference"))
    plain, ours = values(after(name, leaves, given, "reference")), values(after(name, leaves, given))
    for key, want in exact.items():
        if want.numel():
            laws.at_most_twice(key, ours[key], plain[key], want)


@pytest.mark.parametrize(
    ("coupled", "other"), [(False, torch.optim.AdamW), (True, torch.optim.Adam)], ids=["adamw", "adam"]
)
def test_steps_of_torch(coupled, other):
    first, *grads = laws.draw(*[(3, 70)] * 5, dtype=F32, device="cpu")
    theirs = first.clone().requires_grad_()
    optimizer = other([theirs], lr=0.03, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    leaf = OptimLeaf(first.clone(), grads[0], (torch.zeros_like(first), torch.zeros_like(first)), 0.1)
    for t, g in enumerate(grads):
        theirs.grad = g
        optimizer.step()
        scalars = tuple(torch.tensor(x, dtype=F64) for x in (0.03, 1 - 0.8 ** (t + 1), (1 - 0.95 ** (t + 1)) ** 0.5))
        given = StepRates(scalars, torch.tensor(t), 0.8, 0.95, 1e-6, coupled, factor=torch.tensor(0.5))
        kernels.adamw([leaf._replace(g=2.0 * g)], given, impl="cpp")
    assert_close(leaf.p, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_lion_by_hand():
    p, g, m = (torch.tensor(x) for x in ([1.0, 1.0, 1.0, 1.0], [1.0, -1.0, 0.0, 8.0], [0.0, 1.0, 0.0, -1.0]))
    kernels.lion(
        [OptimLeaf(p, g, (m,), 0.5)], StepRates((torch.tensor(0.1, dtype=F64),), torch.tensor(0), 0.75, 0.5), impl="cpp"
    )
    assert_close(p, torch.tensor([0.85, 0.85, 0.95, 0.85]), rtol=1e-6)  # 0.75 m + 0.25 g = 0.25, 0.5, 0, 1.25
    assert_close(m, torch.tensor([0.5, 0.0, 0.0, 3.5]), rtol=1e-6)


@every_op
@every_state
def test_what_is_not_finite(name, state):
    """Infinities, NaN, zeros and the least numbers are what they are in the reference, and stay where they are."""
    for i, bad in enumerate((math.nan, math.inf, -math.inf, 1e-40, 3e38, 0.0, -0.0)):
        leaves = draw(name, [(2, 300)], **STATES[state])
        leaves[0].g[0, 3 * i], leaves[0].g[1, 290] = bad, bad
        if state == "float32":
            leaves[0].state[-1][1, 7] = -1.0  # as a second moment that is none
        got, expected = (after(name, leaves, rates(name), impl)[0] for impl in ("cpp", "reference"))
        for mine, theirs in zip((got.p, *got.state), (expected.p, *expected.state)):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)
        if got.copy is not None:
            torch.testing.assert_close(got.copy, got.p.to(got.copy.dtype), rtol=0, atol=0, equal_nan=True)


# ---- skipped steps, copies
# --------------------------------------------------------------------------------------------


@every_op
@every_state
def test_where_a_step_is_skipped_nothing_changes(name, state):
    leaves = draw(name, MATRICES[:2], **STATES[state])
    leaves[0].g[0, 0] = float("nan")
    assert_same(values(after(name, leaves, rates(name, skip=torch.tensor(True)))), values(leaves))


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_the_copy_is_rounded_to_nearest_even(dtype):
    """Every exponent with ties, their neighbours and a carry, and what is not finite; the step is 0."""
    ends = torch.tensor(
        [
            0x0,
            0x1,
            0xFFF,
            0x1000,
            0x1001,
            0x2FFF,
            0x3000,
            0x3001,
            0x7FFF,
            0x8000,
            0x8001,
            0x17FFF,
            0x18000,
            0x18001,
            0x7FFFFF,
        ]
    )
    exponents = torch.arange(255)[:, None] << 23
    raw = torch.cat(((exponents | ends).reshape(-1), torch.tensor([0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF])))
    p = torch.cat((raw, raw | (1 << 31))).to(torch.uint32).view(F32)
    exact = torch.cat([p, laws.draw((100_000,), dtype=F32, device="cpu")[0] * torch.logspace(-12, 6, 100_000)])
    leaf = OptimLeaf(
        exact.clone(),
        torch.zeros_like(exact),
        (torch.zeros_like(exact),),
        0.0,
        None,
        torch.zeros_like(exact, dtype=dtype),
    )
    kernels.lion([leaf], rates("lion", lr=0.0), impl="cpp")
    torch.testing.assert_close(leaf.p, exact, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(leaf.copy, exact.to(dtype), rtol=0, atol=0, equal_nan=True)
    number = ~exact.isnan()
    assert torch.equal(
        leaf.copy[number].view(torch.uint8), exact[number].to(dtype).view(torch.uint8)
    )  # with the signs of zeros


# ---- bits are an element's own
# ----------------------------------------------------------------------------------------


def cut(leaf, start, end, shift=0):
    """The elements [start, end) of a flat leaf as a leaf, `shift` elements behind the beginning of its memory."""
    part = lambda x: torch.cat((x.new_zeros(shift), x[start:end]))[shift:]  # noqa: E731
    return each(part, leaf)._replace(
        position=leaf.position and leaf.position._replace(first=leaf.position.first + start)
    )


@every_op
@pytest.mark.parametrize("state", [state for state in STATES if state != "8 bits"])
def test_the_bits_do_not_depend_on_where_an_element_lies(name, state):
    n = 70_001
    leaf = draw(name, [(3,), (n,)], **STATES[state])[1]
    expected = values(after(name, [leaf], rates(name)))
    ends = [0, 1, 2, 5, 12, 29, 63, 128, 255, 511, 900, 1924, 4999, 37_768, 69_990, n]
    for shift in (0, 1, 3):
        parts = [cut(leaf, start, end, shift) for start, end in itertools.pairwise(ends)]
        rows = [values([part]) for part in after(name, parts, rates(name))]
        assert_same({key: torch.cat([row[key] for row in rows]) for key in expected}, expected)


@every_op
def test_the_bits_do_not_depend_on_where_a_row_of_blocks_lies(name):
    leaf = draw(name, [(3, 7), (90, 700)], coded=True, copy=BF16)[1]
    expected = values(after(name, [leaf], rates(name)))
    parts = [each(lambda x, s=s: x[s], leaf) for s in (slice(0, 1), slice(1, 4), slice(4, 47), slice(47, 90))]
    rows = [values([part]) for part in after(name, parts, rates(name))]
    assert_same({key: torch.cat([row[key] for row in rows]) for key in expected}, expected)


@every_op
@every_state
def test_the_bits_do_not_depend_on_the_number_of_threads(name, state):
    leaves = draw(name, [(90, 1100), (3, 5), (70, 2000)], **STATES[state])
    one = values(after(name, leaves, rates(name)))
    for threads in (2, 3):
        torch.set_num_threads(threads)
        try:
            assert_same(values(after(name, leaves, rates(name))), one)
        finally:
            torch.set_num_threads(1)


SHARDS = {
    "rows": ((8, 6, 20), ((0, 4), (0, 6), (0, 20))),
    "second dim": ((8, 6, 20), ((0, 8), (3, 3), (0, 20))),
    "two dims": ((8, 6, 20), ((4, 2), (0, 6), (8, 12))),
    "three dims": ((4, 6, 5, 8), ((1, 2), (2, 3), (0, 5), (4, 4))),
    "odd": ((3, 7, 5), ((1, 2), (2, 3), (1, 3))),
    "long runs": ((40, 5, 400), ((3, 20), (1, 3), (7, 390))),
    "vector": ((11,), ((3, 5),)),
}


@pytest.mark.parametrize("shard", SHARDS)
def test_a_shard_is_rounded_as_in_the_whole(shard):
    shape, windows = SHARDS[shard]
    whole = draw("adamw", [shape], state=BF16, stochastic=True)[0]
    slices = tuple(slice(start, start + size) for start, size in windows)
    where = optim_lowbit.make_position(
        (5, 0), tuple(size for _, size in windows), tuple(start for start, _ in windows), shape
    )
    part = each(lambda x: x[slices].contiguous(), whole)._replace(position=where)
    whole, part = (after("adamw", [leaf], rates("adamw"))[0] for leaf in (whole, part))
    assert_same((part.p, *part.state), (whole.p[slices], *(x[slices] for x in whole.state)))


def test_the_words_of_large_indices_and_counts():
    """Both words of the counters, and any word of a key."""
    for first, count in (((1 << 34) - 700, 5), ((1 << 40) + 3, (1 << 32) + 1), ((1 << 61) - 5000, (1 << 62) - 1)):
        leaf = draw("adamw", [(1500,)], state=BF16)[0]._replace(
            position=optim_lowbit.LeafPosition((0xFFFFFFFF, 0x9E3779B9), first)
        )
        compare("adamw", [leaf], rates("adamw")._replace(count=torch.tensor(count)))


# ---- what serves, and what is refused
# ---------------------------------------------------------------------------------


def test_autograd_sees_that_it_wrote():
    leaf = draw("adamw", [(3, 40)], copy=BF16)[0]
    w = torch.ones(3, 40, requires_grad=True)
    out = (w * leaf.p).sum()
    kernels.adamw([leaf], rates("adamw"), impl="cpp")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
    with torch.inference_mode():
        compare("adamw", draw("adamw", [(3, 40)]), rates("adamw"))


def test_what_auto_takes():
    leaves = draw("adamw", [(3, 40)], **STATES["8 bits"])
    said = registry.explain("adamw", leaves, rates("adamw"))
    assert said.chosen == "reference" and "ask for it by name" in said.reasons["cpp"]
    assert registry.explain("adamw", leaves, rates("adamw"), impl="cpp").chosen == "cpp"
    lion = draw("lion", [(3, 40)])
    assert "it must be compiled, for 120 elements" in registry.explain("lion", lion, rates("lion")).reasons["cpp"]
    many = torch.zeros(optim_leaf.MANY)
    assert registry.explain("lion", [OptimLeaf(many, many, (many,))], rates("lion")).chosen == "cpp"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda leaf: each(lambda x: x.to("meta"), leaf), "a tensor is not on the CPU"),
        (lambda leaf: leaf._replace(p=leaf.p.double()), "the dtypes are torch.float64 and torch.float32"),
        (lambda leaf: leaf._replace(g=leaf.g.half()), "the dtypes are torch.float32 and torch.float16"),
        (lambda leaf: leaf._replace(state=tuple(x.half() for x in leaf.state)), "the state is in torch.float16"),
        (
            lambda leaf: leaf._replace(position=optim_lowbit.LeafPosition()),
            "a state in float32 is to be rounded stochastically",
        ),
        (lambda leaf: leaf._replace(copy=leaf.p.double()), "the copy is in torch.float64"),
        (lambda leaf: leaf._replace(g=leaf.g.mT.contiguous().mT), "is not contiguous"),
        (lambda leaf: leaf._replace(copy=leaf.p.mT.contiguous().mT), "is not contiguous"),
    ],
)
def test_what_it_refuses(change, message):
    for name, (op, _) in OPS.items():
        with pytest.raises(ValueError, match=rf"{name}: impl='cpp' does not serve this call: .*{re.escape(message)}"):
            op([change(draw(name, [(3, 40)])[0])], rates(name), impl="cpp")


def test_moments_of_two_dtypes_and_blocks_that_are_too_large():
    leaf = draw("adamw", [(3, 40)])[0]
    with pytest.raises(ValueError, match=r"the state is in torch.bfloat16 and torch.float32"):
        kernels.adamw([leaf._replace(state=(leaf.state[0].bfloat16(), leaf.state[1]))], rates("adamw"), impl="cpp")
    with pytest.raises(ValueError, match="the block is 8192; it takes 1 to 4096"):
        kernels.adamw(draw("adamw", [(3, 40)], coded=True, block=8192), rates("adamw", block=8192), impl="cpp")


def test_no_leaves():
    kernels.adamw([], rates("adamw"), impl="cpp")
    kernels.lion(draw("lion", [(0, 3)]), rates("lion"), impl="cpp")
