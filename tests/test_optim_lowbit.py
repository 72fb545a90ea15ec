"""Optimizers whose state is in 16 or 8 bits: every form gives the same bits, on every mesh, and they train."""

import math

import pytest
import ranks
import torch
from close import assert_same
from optim_cases import clone, step, tree, with_rows

import fzero
from fzero import checkpoint, optim
from fzero.core import pytree
from fzero.kernels import optim_leaf, optim_lowbit
from fzero.optim import leafwise
from fzero.sharding import Spec

# leaf -> (shape, spec as a plan's `opt` has it)
LEAVES = {
    "embed/tokens": ((8, 40), "[V/tp+dp, D]"),
    "blocks/mlp/w_in": ((3, 8, 64), "[L, D/dp, F/tp]"),
    "blocks/mlp/w_out": ((3, 64, 20), "[L, F/tp+dp, D]"),
    "blocks/mlp/b_in": ((3, 64), "[L, F/tp+dp]"),
    "blocks/moe/w_up": ((3, 4, 6, 32), "[L, E/dp, D, F/tp]"),
    "head/scale": ((7,), "[D]"),
    "head/temperature": ((), "[]"),
}
SHAPES = pytree.nest({name: shape for name, (shape, _) in LEAVES.items()})
SPECS = pytree.nest({name: Spec.parse(text) for name, (_, text) in LEAVES.items()})
BF16 = torch.bfloat16
# learning rate -> transformation
LOW = {
    "adamw stochastic": lambda lr: optim.adamw(lr, weight_decay=0.1, state_dtype=BF16, rounding="stochastic"),
    "adamw 8": lambda lr: optim.adamw(lr, weight_decay=0.1, mask="w_", state_bits=8, block=16),
    "adam 8": lambda lr: optim.adam(lr, weight_decay=0.1, state_bits=8, block=16),
    "lion stochastic": lambda lr: optim.lion(lr, weight_decay=0.1, state_dtype=BF16, rounding="stochastic"),
    "lion 8": lambda lr: optim.lion(lr, weight_decay=0.1, state_bits=8, block=16),
}
every_optimizer = pytest.mark.parametrize("name", LOW)


@pytest.fixture(autouse=True)
def small_leaves_in_8_bits(monkeypatch):
    monkeypatch.setattr(leafwise, "SMALL", 100)


def train(tx, params, grads, form="update"):
    params = clone(params)
    state = tx.init(params)
    for g in grads:
        if form == "apply":
            params, state = optim.apply_in_place(tx, clone(g), state, params)
        else:
            updates, state = step(tx, form)(clone(g), state, params)
            params = optim.apply_updates(params, updates)
    return params, state


def gradients(steps, dtype=torch.float32):
    return [tree(100 + i, SHAPES, dtype) for i in range(steps)]


@every_optimizer
@pytest.mark.parametrize(
    ("dtype", "piece"), [(torch.float32, 1 << 18), (torch.float32, 200), (BF16, 200), (torch.float64, 1 << 18)], ids=str
)
def test_all_forms_have_the_same_bits(name, dtype, piece, monkeypatch):
    monkeypatch.setitem(optim_leaf.PIECE, "cpu", piece)
    tx, params = LOW[name](0.1), tree(0, SHAPES, dtype)
    expected = train(tx, params, gradients(2))
    assert_same(train(tx, params, gradients(2), "apply"), expected)
    assert all(float((a - b).abs().max()) > 1e-3 for a, b in zip(pytree.leaves(expected[0]), pytree.leaves(params)))


@every_optimizer
def test_state_and_its_specs(name):
    tx, params = LOW[name](0.1), tree(0, SHAPES, torch.float32)
    state, specs = tx.init(params), tx.spec(SPECS)
    assert pytree.names(state) == pytree.names(specs)
    for before, after in zip(pytree.leaves(state), pytree.leaves(train(tx, params, gradients(1))[1])):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
    for leaf, (shape, text) in LEAVES.items():
        m, spec = pytree.named_leaves(state.m)[leaf], pytree.named_leaves(specs.m)[leaf]
        assert tuple(m.shape) == shape and spec == Spec.parse(text)
        if name.endswith("stochastic"):
            assert m.dtype == BF16
            continue
        coded = leaf not in ("blocks/mlp/b_in", "head/scale", "head/temperature")
        assert m.dtype == (torch.uint8 if coded else torch.float32), leaf
        scale = pytree.named_leaves(state.m_scale)[leaf]
        assert tuple(scale.shape) == (*shape[:-1], math.ceil(shape[-1] / 16) if coded else 0)
        assert pytree.named_leaves(specs.m_scale)[leaf] == Spec.parse(text)


def test_bytes_of_a_parameter():
    params = {"blocks": {"w": torch.zeros(2, 64, 512)}}
    for make, moments in ((optim.adamw, 2), (optim.lion, 1)):
        state = make(0.1, state_bits=8).init(params)
        assert sum(x.numel() * x.element_size() for x in pytree.leaves(state)) == 8 + moments * 2 * 64 * (512 + 4 * 2)


def test_small_leaves_and_vectors_stay_in_float32(monkeypatch):
    monkeypatch.undo()
    params = {
        "w": torch.zeros(63, 65),
        "b": torch.zeros(5000),
        "blocks": {"b": torch.zeros(2, 5000), "w": torch.zeros(2, 64, 32)},
    }
    dtypes = {name: m.dtype for name, m in pytree.named_leaves(optim.adamw(0.1, state_bits=8).init(params).m).items()}
    assert dtypes == {"w": torch.float32, "b": torch.float32, "blocks/b": torch.float32, "blocks/w": torch.uint8}


@every_optimizer
def test_vmap_over_states_equals_the_loop(name):
    tx = LOW[name](0.1)
    shapes = {"blocks": SHAPES["blocks"]}
    many, grads = (tree(seed, shapes, torch.float32, lead=(3,)) for seed in (0, 1))
    pick = lambda t, i: pytree.map(lambda x: x[i], t)  # noqa: E731
    state = torch.func.vmap(tx.init)(many)
    for _ in range(2):
        updates, state = torch.func.vmap(tx.update)(grads, state, many)
    for i in range(3):
        one = tx.init(pick(many, i))
        for _ in range(2):
            alone, one = tx.update(pick(grads, i), one, pick(many, i))
        for got, expected in zip(pytree.leaves(pick((updates, state), i)), pytree.leaves((alone, one))):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)


# ---- on a mesh ------------------------------------------------------------------------------------------------------


def own(mesh, specs, whole):
    layout = optim.sharded(specs, mesh, like=whole)
    return pytree.map_named(lambda name, x: layout.local(name, x).clone(), whole)


def compare_steps(mesh, name, plant=lambda layout: layout, rows=()):
    leafwise.SMALL = 100  # in a process of its own
    given = with_rows(SPECS, rows) if rows else SPECS
    params, grads = tree(0, SHAPES, torch.float32), gradients(2)
    layout = plant(optim.sharded(given, mesh, like=params))
    tx, whole = optim.bind(LOW[name](0.1), layout), LOW[name](0.1)
    assert tx.needs == "elementwise" and whole.needs == "matrix"
    expected, state = train(whole, params, grads)
    specs = tx.spec(given)
    for form in ("update", "apply"):
        got = train(tx, own(mesh, given, params), [own(mesh, given, g) for g in grads], form)
        assert_same(got, (own(mesh, given, expected), own(mesh, specs, state)))


def compare_rows(mesh, name, rows):
    compare_steps(mesh, name, rows=rows)


@every_optimizer
@pytest.mark.each_value
@pytest.mark.parametrize("rows", [((0, 2), (1,)), ((), (0, 1, 2))], ids=("interleaved", "none"))
def test_layers_that_do_not_follow_one_another_have_the_bits_of_the_whole(name, rows):
    ranks.run(2, compare_rows, name, rows, mesh={"pp": 2})


@every_optimizer
@pytest.mark.each_value
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_shards_have_the_bits_of_the_whole(name, sizes):
    ranks.run(math.prod(sizes.values()), compare_steps, name, mesh=sizes)


def planted(mesh, name):
    """Local indices, and local sizes, in place of global ones."""
    compare_steps(mesh, name)
    try:
        compare_steps(mesh, name, lambda layout: layout._replace(windows=optim.WHOLE.windows))
    except AssertionError:
        return True
    return False


def test_indices_within_a_shard_would_be_seen():
    # The first rank's own indices are right on dim 0, and wrong where dp cuts the second.
    assert all(ranks.run(2, planted, "adamw stochastic", mesh={"dp": 2}))


def losses_of_a_run(mesh, stage):
    leafwise.SMALL = 100
    model = fzero.models.build(fzero.models.MLPConfig(vocab_size=32, d_model=16, n_layers=2, d_ff=32))
    plan = fzero.zero_plan(stage, model, mesh, reduce="canonical")
    out = []
    for name in ("adamw stochastic", "adamw 8"):
        tx = LOW[name](0.02)
        state = fzero.init_state(model, tx, plan, seed=0)
        step = fzero.make_train_step(model, tx, plan)
        text = (torch.arange(8 * 9).reshape(8, 9) * 7) % 32
        each = 8 // mesh.data_size
        rows = text[mesh.data_rank * each : (mesh.data_rank + 1) * each]
        for _ in range(6):
            state, metrics = step(state, {"tokens": rows[:, :-1], "targets": rows[:, 1:]})
            out.append(float(metrics.loss))
    return out


def test_the_loss_curve_is_that_of_one_process():
    alone = losses_of_a_run(fzero.one_process(), 0)
    assert alone[5] < alone[0] - 0.5 and alone[11] < alone[6] - 0.5 and alone[:6] != alone[6:]
    first, second = (ranks.run(2, losses_of_a_run, stage, mesh={"dp": 2}) for stage in (1, 3))
    assert first == second
    # The sums of two ranks round otherwise than those of one, and then a rounding may fall on the other side.
    torch.testing.assert_close(torch.tensor(first), torch.tensor([alone, alone]), rtol=1e-4, atol=0)


def test_checkpoint(tmp_path):
    tx, params = LOW["adamw 8"](0.1), tree(0, SHAPES, torch.float32)
    _, state = train(tx, params, gradients(2))
    path = checkpoint.save(tmp_path, state, step=2)
    assert_same(checkpoint.restore(path, tx.init(params)), state)


# ---- they train -----------------------------------------------------------------------------------------------------


def distance(tx, steps=300):
    """From the minimum of a noisy quadratic whose curvatures span three decades, relative to the start."""
    generator = torch.Generator().manual_seed(0)
    curvature = 10 ** (3 * torch.rand(16, 256, generator=generator) - 2)
    params, start = {"w": torch.ones(16, 256)}, 1.0
    state = tx.init(params)
    for _ in range(steps):
        noise = 0.1 * torch.randn(16, 256, generator=generator)
        params, state = optim.apply_in_place(tx, {"w": curvature * (params["w"] + noise)}, state, params)
    return float(params["w"].square().mean().sqrt()) / start


def test_low_precision_states_train_as_float32_does():
    plain = distance(optim.adamw(0.01, weight_decay=0.0))
    assert plain < 0.1
    assert distance(optim.adamw(0.01, weight_decay=0.0, state_bits=8)) < 1.15 * plain
    assert distance(optim.adamw(0.01, weight_decay=0.0, state_dtype=BF16, rounding="stochastic")) < 1.05 * plain


def test_a_mean_that_moves_by_less_than_its_mantissa_is_kept_by_stochastic_rounding_alone():
    """v falls from 1 by (1 - b2) of itself a step: bfloat16 to nearest never leaves it."""
    found = {}
    for rounding in ("nearest", "stochastic"):
        tx = optim.adamw(0.0, b2=0.999, state_dtype=BF16, rounding=rounding)
        params, zero = {"w": torch.zeros(40, 50)}, {"w": torch.zeros(40, 50)}
        state = tx.init(params)._replace(v={"w": torch.ones(40, 50, dtype=BF16)})
        for _ in range(200):
            params, state = optim.apply_in_place(tx, zero, state, params)
        found[rounding] = float(state.v["w"].double().mean())
    assert found["nearest"] == 1.0
    assert abs(found["stochastic"] / 0.999**200 - 1) < 0.01


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounding": "up"}, "rounding is 'up'; it must be nearest or stochastic"),
        ({"rounding": "stochastic"}, "state_dtype is None; it is for torch.bfloat16 states"),
        ({"state_bits": 4}, "state_bits is 4; it must be 8"),
        ({"state_bits": 8, "state_dtype": BF16}, "give one of them"),
        ({"state_bits": 8, "block": 100}, "block is 100; it must be a power of two from 16 to 4096"),
        ({"impl": "cuda"}, "impl is 'cuda'"),
    ],
)
def test_what_does_not_go_together(options, message):
    for make in (optim.adamw, optim.adam, optim.lion):
        with pytest.raises(ValueError, match=message):
            make(0.1, **options)


def test_blocks_that_shards_would_cut():
    mesh = fzero.sharding.fake_mesh({"tp": 4})
    like = {"blocks": {"w": torch.empty(2, 8, 160)}}
    layout = optim.sharded({"blocks": {"w": Spec.parse("[L, D, F/tp]")}}, mesh, like=like)
    part = {"blocks": {"w": torch.empty(2, 8, 40)}}
    with pytest.raises(
        ValueError, match=r"rows of blocks/w are cut into parts of 40 elements, .* blocks of 16 do not divide"
    ):
        optim.bind(optim.adamw(0.1, state_bits=8, block=16), layout).init(part)


def test_a_step_refuses_shards_for_what_needs_whole_leaves():
    mesh = fzero.sharding.fake_mesh({"dp": 2})
    model = fzero.models.build(fzero.models.MLPConfig(vocab_size=32, d_model=16, n_layers=2, d_ff=32))
    plan = fzero.zero_plan(2, model, mesh)
    with pytest.raises(ValueError, match="give it an `on`"):
        fzero.make_train_step(model, optim.adamw(0.1)._replace(needs="matrix", with_shards=None), plan)


def test_place_is_that_of_the_layout():
    mesh = fzero.sharding.fake_mesh({"dp": 4}, rank=2)
    layout = optim.sharded(
        {"blocks": {"w": Spec.parse("[L, D/dp, F]")}}, mesh, like={"blocks": {"w": torch.empty(3, 8, 5)}}
    )
    (window,), whole = layout.windows("blocks/w", (3, 2, 5))
    where = optim_lowbit.make_position((0, 0), (3, 2, 5), window.start, whole)
    whole = torch.arange(120).view(3, 8, 5)
    assert torch.equal(where.index(torch.arange(30)), whole[:, 4:6].reshape(-1))
