"""AdamW and Lion over many leaves in one launch, and the gradient's norm: the kernels against their references and
other people's."""

import re

import kernel_laws as laws
import pytest
import torch
from close import assert_close, assert_same

import fzero
from fzero import models, optim
from fzero.core import precision, prng, pytree
from fzero.kernels import OptimLeaf, StepRates, grad_norm, optim_lowbit, registry
from fzero.kernels import optim_multi_tensor as kernels
from fzero.optim import leafwise
from fzero.optim import norm as norm_module
from fzero.sharding import Spec
from fzero.train.update import in_memory

F64, BF16 = torch.float64, torch.bfloat16
OPS = {"adamw": (kernels.adamw, 2), "lion": (kernels.lion, 1)}
SHAPES = [(5, 900), (3,), (2, 4, 37), (), (1, 1), (0, 4), (2, 2048)]
MATRICES = [(5, 300), (2, 3, 37), (1, 1), (0, 4), (3, 512)]
# how a state is kept -> arguments of `draw`
STATES = {
    "float32": {},
    "bfloat16": {"state": torch.bfloat16, "grad": torch.bfloat16, "copy": True},
    "stochastic": {"state": torch.bfloat16, "stochastic": True},
    "8 bits": {"coded": True, "copy": True},
}
every_op = pytest.mark.parametrize("name", OPS)
every_state = pytest.mark.parametrize("state", STATES)


def draw(
    name,
    shapes,
    state=torch.float32,
    grad=torch.float32,
    param=torch.float32,
    stochastic=False,
    coded=False,
    copy=False,
    block=256,
):
    """Leaves with a past; of two moments the second is positive, and below the reach of a code at some elements."""
    leaves, moments = [], OPS[name][1]
    for i, shape in enumerate(shapes):
        p, g, m, v = laws.draw(shape, shape, shape, shape, dtype=torch.float32, seed=i)
        kept = [m, v.square() * torch.logspace(0, -16, v.numel(), device=v.device).view(shape)][:moments]
        if coded:
            pairs = [optim_lowbit.encode(x, block, signed) for x, signed in zip(kept, (True, False))]
            kept = [*(c for c, _ in pairs), *(s for _, s in pairs)]
        else:
            kept = [x.to(state) for x in kept]
        where = optim_lowbit.make_position((5, i), shape, (0,) * len(shape), shape) if stochastic else None
        leaves.append(
            OptimLeaf(
                p.to(param), g.to(grad), tuple(kept), 0.1 * (i % 2), where, p.to(torch.bfloat16) if copy else None
            )
        )
    return leaves


def rates(name, **more):
    scalars = [torch.tensor(x, dtype=F64, device=laws.DEVICE) for x in (0.01, 0.3, 0.2)][: 3 if name == "adamw" else 1]
    return StepRates(
        tuple(scalars), torch.tensor(7, device=laws.DEVICE), 0.9, 0.95, 1e-8 if name == "adamw" else 0.0, **more
    )


def clone(leaves):
    copy = lambda x: None if x is None else x.clone()  # noqa: E731
    return [
        leaf._replace(p=copy(leaf.p), g=copy(leaf.g), state=tuple(map(copy, leaf.state)), copy=copy(leaf.copy))
        for leaf in leaves
    ]


def values(leaves):
    rows = [{"p": leaf.p, "copy": leaf.copy} | {str(j): x for j, x in enumerate(leaf.state)} for leaf in leaves]
    return {f"{i} {j}": x for i, row in enumerate(rows) for j, x in row.items() if x is not None}


def after(name, leaves, given, impl):
    leaves = clone(leaves)
    OPS[name][0](leaves, given, impl=impl)
    return values(leaves)


def flag(value):
    return torch.tensor(value, device=laws.DEVICE)


def compare(got, expected):
    """In the interpreter states have the same bits, and params all but (torch's sqrt on a CPU may miss the last bit).

    On a device products and sums are fused, and a code or a rounding may fall on the other side.
    """
    assert list(got) == list(expected)
    for key, want in expected.items():
        assert got[key].dtype == want.dtype
        if laws.INTERPRETED and key[-1].isdigit():
            assert torch.equal(got[key], want), key
        elif want.dtype == torch.uint8:
            assert ((got[key].int() - want.int()).abs() <= 1).all(), key
        elif want.dtype == torch.bfloat16:
            assert ((got[key].view(torch.int16).int() - want.view(torch.int16).int()).abs() <= 1).all(), key
        else:
            torch.testing.assert_close(got[key], want, rtol=1e-6 if laws.INTERPRETED else 1e-5, atol=1e-6)


# ---- the kernels are their references -------------------------------------------------------------------------------


@every_op
@every_state
@pytest.mark.parametrize("factor", [None, 0.37])
def test_one_launch_for_all_leaves_is_the_reference(name, state, factor):
    leaves = draw(name, MATRICES if state == "8 bits" else SHAPES, **STATES[state])
    given = rates(name, factor=None if factor is None else flag(factor), skip=None if factor is None else flag(False))
    compare(after(name, leaves, given, "triton"), after(name, leaves, given, "reference"))


@every_op
@every_state
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_where_a_step_is_skipped_nothing_changes(name, state, impl):
    leaves = draw(name, MATRICES[:2], **STATES[state])
    leaves[0].g[0, 0] = float("nan")
    assert_same(after(name, leaves, rates(name, skip=flag(True)), impl), values(leaves))


@every_state
def test_a_coupled_decay(state):
    leaves = draw("adamw", MATRICES, **STATES[state])
    given = rates("adamw", coupled=True)
    got = after("adamw", leaves, given, "triton")
    compare(got, after("adamw", leaves, given, "reference"))
    assert any((got[k] != x).any() for k, x in after("adamw", leaves, rates("adamw"), "triton").items())


@every_op
@every_state
def test_leaves_that_do_not_begin_at_a_whole_line(name, state):
    leaves = draw(name, [(4, 64)], **STATES[state])
    shift = lambda x: torch.cat((x.reshape(-1)[:1], x.reshape(-1)))[1:].view(x.shape)  # noqa: E731
    moved = [leaf._replace(p=shift(leaf.p), g=shift(leaf.g), state=tuple(map(shift, leaf.state))) for leaf in leaves]
    assert moved[0].p.data_ptr() % 16
    expected = after(name, leaves, rates(name), "triton")
    OPS[name][0](moved, rates(name), impl="triton")
    assert_same(values(moved), expected)


@every_op
def test_bfloat16_params(name):
    leaves = draw(name, [(3, 70)], param=torch.bfloat16, grad=torch.bfloat16, state=torch.bfloat16)
    compare(after(name, leaves, rates(name), "triton"), after(name, leaves, rates(name), "reference"))


def test_the_copy_is_the_rounded_parameter():
    leaves = draw("adamw", [(3, 70)], copy=True)
    kernels.adamw(leaves, rates("adamw"), impl="triton")
    assert torch.equal(leaves[0].copy, leaves[0].p.to(torch.bfloat16))


@every_op
@every_state
def test_a_second_run_gives_the_same_bits(name, state):
    leaves = draw(name, MATRICES, **STATES[state])
    assert_same(after(name, leaves, rates(name), "triton"), after(name, leaves, rates(name), "triton"))


def test_addresses_beyond_32_bits():
    """A stretch 2^31 elements into a leaf, of which no other memory is there."""
    leaf, config = draw("adamw", [(kernels.CONFIG["BLOCK"],)])[0], kernels.CONFIG
    expected = after("adamw", [leaf], rates("adamw"), "triton")
    stretch = (1 << 31) // config["BLOCK"] + 1
    row = list(kernels.leaf_row(leaf, 2))
    row[:4] = [address - 4 * stretch * config["BLOCK"] for address in row[:4]]
    row[kernels.SIZE.value] = (stretch + 1) * config["BLOCK"]
    table, work = (torch.tensor(x, device=laws.DEVICE) for x in ([row], [stretch]))
    numbers = torch.stack(rates("adamw").scalars).float()
    count = torch.tensor(7, device=laws.DEVICE)
    flags = dict.fromkeys(
        ("LION", "COUPLED", "SCALED", "SKIPS", "COPIES", "STOCHASTIC", "PLACED", "QUADS", "WIDE"), False
    )
    types = dict.fromkeys(("PT", "GT", "MT", "CT"), kernels.tl.float32)
    kernels._update_flat[(1,)](
        table, work, numbers, count, numbers, 0.9, 1 - 0.9, 0.95, 1 - 0.95, 1e-8, **flags, **types, **config
    )
    assert_same(values([leaf]), expected)


def test_leaves_of_many_dtypes_at_once():
    leaves = (
        draw("adamw", [(3, 40), (7,)])
        + draw("adamw", [(5, 9)], **STATES["bfloat16"])
        + draw("adamw", [(2, 33)], **STATES["8 bits"])
    )
    compare(after("adamw", leaves, rates("adamw"), "triton"), after("adamw", leaves, rates("adamw"), "reference"))


# ---- others' equations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coupled", "other"), [(False, torch.optim.AdamW), (True, torch.optim.Adam)], ids=["adamw", "adam"]
)
def test_steps_of_torch(coupled, other):
    first, grads = laws.draw((3, 70), dtype=torch.float32)[0], laws.draw(*[(3, 70)] * 4, dtype=torch.float32, seed=1)
    theirs = first.clone().requires_grad_()
    optimizer = other([theirs], lr=0.03, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    leaf = OptimLeaf(first.clone(), grads[0], (torch.zeros_like(first), torch.zeros_like(first)), 0.1)
    for t, g in enumerate(grads):
        theirs.grad = g
        optimizer.step()
        scalars = tuple(torch.tensor(x, dtype=F64) for x in (0.03, 1 - 0.8 ** (t + 1), (1 - 0.95 ** (t + 1)) ** 0.5))
        given = StepRates(scalars, torch.tensor(t, device=laws.DEVICE), 0.8, 0.95, 1e-6, coupled)
        kernels.adamw([leaf._replace(g=2.0 * g)], given._replace(factor=flag(0.5)), impl="triton")
    assert_close(leaf.p, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_lion_by_hand():
    p = torch.tensor([1.0, 1.0, 1.0, 1.0], device=laws.DEVICE)
    g, m = (torch.tensor(x, device=laws.DEVICE) for x in ([1.0, -1.0, 0.0, 8.0], [0.0, 1.0, 0.0, -1.0]))
    kernels.lion(
        [OptimLeaf(p, g, (m,), 0.5)],
        StepRates((torch.tensor(0.1, dtype=F64),), torch.tensor(0), 0.75, 0.5),
        impl="triton",
    )
    assert_close(p, torch.tensor([0.85, 0.85, 0.95, 0.85]), rtol=1e-6)  # 0.75 m + 0.25 g = 0.25, 0.5, 0, 1.25
    assert_close(m, torch.tensor([0.5, 0.0, 0.0, 3.5]), rtol=1e-6)


# ---- stochastic rounding --------------------------------------------------------------------------------------------


def test_rounding_bits_are_the_words_of_the_step_and_the_element():
    x = laws.draw((2, 300), dtype=torch.float32, seed=3)[0]
    leaf = OptimLeaf(
        x.clone(),
        torch.zeros_like(x),
        (torch.zeros_like(x, dtype=torch.bfloat16), torch.zeros_like(x, dtype=torch.bfloat16)),
        0.0,
    )
    leaf = leaf._replace(g=x, position=optim_lowbit.make_position((11, 12), (2, 300), (0, 0), (2, 300)))
    given = rates("adamw")._replace(b1=0.0, b2=0.0)
    kernels.adamw([leaf], given, impl="triton")
    words = prng.bits(prng.fold_in(torch.tensor([11, 12]), 7), (2, 300)).to(x.device)
    for kept, exact, word in zip(leaf.state, (x, x * x), (words & 0xFFFF, words >> 16)):
        raw = exact.view(torch.int32).long() & 0xFFFFFFFF
        assert torch.equal(kept.view(torch.int16).long() & 0xFFFF, (raw + word) >> 16)


def test_stochastic_rounding_is_right_on_average():
    x = torch.tensor([1.0 + 2**-10, -3.0 - 2**-9, 1e-20, 0.0, float("inf"), float("nan")])
    words = prng.bits(prng.key(0), (20000, 6)) & 0xFFFF
    rounded = optim_lowbit.round_stochastic(x.expand(20000, 6).contiguous(), words).double()
    assert {len(set(column.tolist())) for column in rounded[:, :2].T} == {2}
    assert_close(rounded[:, :3].mean(0), x[:3].double(), rtol=5e-5)
    assert (rounded[:, 3] == 0).all() and (rounded[:, 4] == float("inf")).all() and rounded[:, 5].isnan().all()


CUTS = {
    "rows": ((8, 6, 20), ((0, 4), (0, 6), (0, 20))),
    "second dim": ((8, 6, 20), ((0, 8), (3, 3), (0, 20))),
    "two dims": ((8, 6, 20), ((4, 2), (0, 6), (8, 12))),
    "three dims": ((4, 6, 5, 8), ((1, 2), (2, 3), (0, 5), (4, 4))),
    "odd": ((3, 7, 5), ((1, 2), (2, 3), (1, 3))),
    "vector": ((11,), ((3, 5),)),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_shard_is_rounded_as_in_the_whole(cut, impl):
    shape, windows = CUTS[cut]
    whole = draw("adamw", [shape], **STATES["stochastic"])[0]
    slices = tuple(slice(start, start + size) for start, size in windows)
    part = lambda x: x[slices].clone()  # noqa: E731
    where = optim_lowbit.make_position(
        (5, 0), tuple(size for _, size in windows), tuple(start for start, _ in windows), shape
    )
    shard = OptimLeaf(part(whole.p), part(whole.g), tuple(map(part, whole.state)), whole.decay, where)
    for leaf in (whole, shard):
        kernels.adamw([leaf], rates("adamw"), impl=impl)
    assert_same((shard.p, *shard.state), (part(whole.p), *map(part, whole.state)))


def test_place_of_every_element():
    for shape, windows in CUTS.values():
        sizes, starts = tuple(s for _, s in windows), tuple(b for b, _ in windows)
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        expected = whole[tuple(slice(b, b + s) for b, s in windows)].reshape(-1)
        assert torch.equal(
            optim_lowbit.make_position((0, 0), sizes, starts, shape).index(torch.arange(len(expected))), expected
        )
    with pytest.raises(ValueError, match="is cut in 4 dims"):
        optim_lowbit.make_position((0, 0), (1, 1, 1, 1), (0, 0, 0, 0), (2, 2, 2, 2))


# ---- 8 bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(3, 300), (2, 3, 16), (1, 1), (0, 5)], ids=str)
def test_codes(signed, shape):
    x = laws.draw(shape, dtype=torch.float32)[0] * torch.logspace(-3, 0, shape[-1], device=laws.DEVICE)
    x = x if signed else x.square()
    codes, scales = optim_lowbit.encode(x, 64, signed)
    assert codes.shape == x.shape and codes.dtype == torch.uint8 and scales.shape == (*shape[:-1], -(-shape[-1] // 64))
    y = optim_lowbit.decode(codes, scales, signed, 64)
    assert ((y - x).abs() <= x.abs() / 15).all()  # half a step of an eighth
    again = optim_lowbit.encode(y, 64, signed)
    assert_same(again, (codes, scales))
    if x.numel():
        assert torch.equal(y.abs().amax(), x.abs().amax())


def test_codes_at_their_ends():
    x = torch.tensor([[4.0, -4.0, 2.0**-40, -0.0, 0.0], [0.0] * 5])
    codes, scales = optim_lowbit.encode(x, 16, True)
    assert optim_lowbit.decode(codes, scales, True, 16).tolist() == [[4.0, -4.0, 0.0, 0.0, 0.0], [0.0] * 5]
    # A second moment that is not zero stays above zero, or a step would be m / eps.
    small = optim_lowbit.decode(*optim_lowbit.encode(torch.tensor([[1.0, 1e-30, 0.0]]), 16, False), False, 16)
    assert small[0, 0] == 1.0 and 0.0 < small[0, 1] < 1e-9 and small[0, 2] == 0.0


def test_the_kernel_keeps_a_small_second_moment_above_zero():
    leaf = draw("adamw", [(1, 40)], coded=True)[0]
    codes, scales = optim_lowbit.encode(torch.tensor([[1.0, 1e-30, 0.0, *[0.5] * 37]], device=laws.DEVICE), 256, False)
    leaf = leaf._replace(g=torch.zeros_like(leaf.g), state=(leaf.state[0], codes, leaf.state[2], scales))
    leaf.g[0, 0] = 10.0  # the largest grows, and leaves the second beyond its reach
    compare(after("adamw", [leaf], rates("adamw"), "triton"), after("adamw", [leaf], rates("adamw"), "reference"))
    kernels.adamw([leaf], rates("adamw"), impl="triton")
    assert leaf.state[1][0, :3].tolist() == [255, 1, 0]


# ---- the norm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(dtype):
    grads = [g.to(dtype) for g in laws.draw((3, 7000), (5,), (), (0, 3), (2, 48))]
    norm, bad = grad_norm.grad_norm(grads, impl="triton")
    exact = torch.cat([g.double().reshape(-1) for g in grads]).norm()
    assert_close(norm, exact, rtol=1e-6)
    assert norm.dtype == torch.float32 and bad.dtype == torch.int64 and int(bad) == 0
    assert torch.equal(norm, grad_norm.grad_norm(grads, impl="triton")[0])
    grads[0][1, 5], grads[1][2], grads[4][0, 0] = float("nan"), float("inf"), -float("inf")
    for impl in ("triton", "reference"):
        norm, bad = grad_norm.grad_norm(grads, impl=impl)
        assert int(bad) == 3 and not norm.isfinite()
    assert grad_norm.grad_norm([grads[3]], impl="triton")[0] == 0.0


@pytest.mark.parametrize("shared", [False, True], ids=["whole", "sharded"])
def test_the_norm_of_a_tree_takes_the_kernel_on_a_device(shared, monkeypatch):
    grads = {"a": laws.draw((3, 70), dtype=torch.float32)[0], "b": {"c": laws.draw((5,), dtype=BF16)[0]}}
    specs = pytree.map(lambda g: Spec(((),) * g.dim()), grads)
    norm = optim.sharded(specs, fzero.one_process(), like=grads).norm if shared else optim.global_norm
    expected, seen = norm(grads), []
    monkeypatch.setattr(norm_module, "_by_kernel", lambda leaves, dtype: seen.append(len(leaves)) or True)
    torch.testing.assert_close(norm(grads), expected, rtol=1e-6, atol=0)
    assert seen == [2]
    monkeypatch.undo()
    leaf = grads["a"].clone().requires_grad_()
    assert not norm_module._by_kernel([leaf], torch.float32) and not norm_module._by_kernel(
        [leaf.detach().double()], F64
    )


# ---- what serves, and what is refused -------------------------------------------------------------------------------


def test_what_auto_takes_and_why():
    leaves = draw("adamw", [(3, 40)])
    said = registry.explain("adamw", leaves, rates("adamw"))
    assert said.bytes == 28 * 120
    if laws.DEVICE == "cpu":
        assert said.chosen == "fused" and "interpreted" in said.reasons["triton"]
        assert (
            "it knows no factor" in registry.explain("adamw", leaves, rates("adamw", factor=flag(1.0))).reasons["fused"]
        )
        assert registry.explain("lion", draw("lion", [(3, 40)]), rates("lion")).chosen == "reference"
    coded = draw("adamw", [(2, 256)], coded=True)
    assert registry.explain("adamw", coded, rates("adamw")).bytes == 16 * 512 + 2 * 2 * 2 * 4
    assert registry.explain("grad_norm", [leaves[0].g]).bytes == 480


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda leaf: leaf._replace(p=leaf.p.double()), "the dtypes are torch.float64"),
        (lambda leaf: leaf._replace(g=leaf.g.mT.contiguous().mT), "is not contiguous"),
    ],
)
def test_what_the_kernels_refuse(change, message):
    for name, (op, _) in OPS.items():
        with pytest.raises(
            ValueError, match=rf"{name}: impl='triton' does not serve this call: .*{re.escape(message)}"
        ):
            op([change(draw(name, [(3, 40)])[0])], rates(name), impl="triton")


def test_a_shard_in_one_run_needs_no_divisions():
    p, g = laws.draw((4, 8), (4, 8), dtype=torch.float32)
    leaf = OptimLeaf(p, g, (torch.zeros_like(p),))
    for where, placed in (
        (optim_lowbit.LeafPosition(), False),
        (optim_lowbit.make_position((0, 0), (4, 8), (4, 0), (16, 8)), False),
        (optim_lowbit.make_position((0, 0), (4, 8), (4, 0), (4, 16)), True),
    ):
        assert kernels._kind(leaf._replace(position=where)).placed == placed


# ---- in a step ------------------------------------------------------------------------------------------------------

MODEL = models.build(models.MLPConfig(vocab_size=32, d_model=16, n_layers=2, d_ff=32))
TRANSFORMATIONS = {
    "adamw": lambda impl: optim.adamw(0.02, impl=impl),
    "clip and adamw": lambda impl: optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(0.02, impl=impl)),
    "lion and adamw": lambda impl: optim.by_label(
        {"lion": optim.lion(0.01, impl=impl), "adamw": optim.adamw(0.02, impl=impl)}, (("w_", "lion"), (".*", "adamw"))
    ),
    "8 bits": lambda impl: optim.adamw(0.02, state_bits=8, block=16, impl=impl),
}


def trained(name, impl, policy, steps=3):
    plan = fzero.zero_plan(0, MODEL, fzero.one_process(), policy=policy)
    tx = TRANSFORMATIONS[name](impl)
    state = fzero.init_state(MODEL, tx, plan, seed=0, device=laws.DEVICE)
    step, seen = fzero.make_train_step(MODEL, tx, plan), []
    text = (torch.arange(4 * 9, device=laws.DEVICE).reshape(4, 9) * 7) % 32
    for i in range(steps):
        if i == 1:  # a step that must be skipped
            trees = [state.params, *[state.master] * policy.has_master]
            kept = [tree["head"]["w"].clone() for tree in trees]
            for tree in trees:
                tree["head"]["w"].fill_(float("nan"))
        state, metrics = step(state, {"tokens": text[:, :-1], "targets": text[:, 1:]})
        seen.append(bool(metrics.skipped))
        if i == 1:
            assert state.params["head"]["w"].isnan().all()
            for tree, values in zip((state.params, state.master), kept):
                tree["head"]["w"].copy_(values)
    assert seen == [False, True, False]
    return state


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("policy", [precision.fp32(), precision.bf16()], ids=["fp32", "bf16"])
def test_a_step_in_one_pass_is_the_step(name, policy, monkeypatch):
    """Update, skip, clipping and the bfloat16 parameters; without the kernel nothing but its rounding is another."""
    monkeypatch.setattr(leafwise, "SMALL", 100)
    monkeypatch.setattr(in_memory, "on_device", lambda grads: False)
    expected = trained(name, "reference", policy)
    monkeypatch.setattr(in_memory, "on_device", lambda grads: True)
    got = trained(name, "triton", policy)
    assert (
        int(pytree.named_leaves(got.opt_state)[next(n for n in pytree.names(got.opt_state) if n.endswith("count"))])
        == 2
    )
    for leaf, want in pytree.named_leaves(expected).items():
        have = pytree.named_leaves(got)[leaf]
        if want.dtype == torch.uint8:
            assert ((have.int() - want.int()).abs() <= 1).all(), leaf
        else:
            torch.testing.assert_close(
                have, want, rtol=1e-2 if policy.has_master else 1e-4, atol=1e-4, msg=lambda m, n=leaf: f"{n}: {m}"
            )
    if policy.has_master:
        for leaf, master in pytree.named_leaves(got.master).items():
            assert torch.equal(pytree.named_leaves(got.params)[leaf], master.to(torch.bfloat16)), leaf


def test_a_factor_before_the_clipping():
    """One pass on gradients that are still to be scaled is the update on scaled ones."""
    params, grads = ({"w": x} for x in laws.draw((3, 40), (3, 40), dtype=torch.float32))
    for tx in (optim.chain(optim.clip_by_global_norm(0.5), optim.adam(0.1, weight_decay=0.3)), optim.lion(0.1, b1=0.5)):
        state, scaled = tx.init(params), {"w": 0.125 * grads["w"]}
        copy = lambda tree: pytree.map(torch.clone, tree)  # noqa: E731
        for _ in range(2):
            expected = optim.apply_in_place(tx, copy(scaled), copy(state), copy(params))
            params, state = tx.in_place(copy(grads), copy(state), copy(params), optim.Pass(factor=flag(0.125)))
            torch.testing.assert_close(pytree.leaves((params, state)), pytree.leaves(expected), rtol=1e-5, atol=1e-6)


def test_what_has_one_pass():
    adam, clip = optim.adamw(0.1), optim.clip_by_global_norm(1.0)
    assert optim.chain(clip, adam).one_pass and optim.chain(adam).one_pass
    for tx in (
        optim.chain(clip, clip, adam),
        optim.chain(optim.clip_by_value(1.0), adam),
        optim.chain(clip, optim.sgd(0.1)),
        optim.sgd(0.1),
    ):
        assert not tx.one_pass
