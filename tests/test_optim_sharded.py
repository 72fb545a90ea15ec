"""Optimizers on shards: a step on every rank's own part is the step on whole leaves."""

import functools
import math
import re
from dataclasses import replace

import pytest
import ranks
import torch
from law_cases import FP64
from optim_cases import F64, OPTIMIZERS, assert_same, clone, tree, with_rows

import fzero
from fzero import optim
from fzero.core import pytree
from fzero.optim import norm as norm_module
from fzero.optim import sharded_leaves as layouts
from fzero.sharding import Spec

LAYERS = 6  # of which 4 ranks share the first four, and gather the last two
# leaf -> (shape, spec as a plan's `opt` has it)
LEAVES = {
    "embed/tokens": ((8, 4), "[V/tp+dp, D]"),
    "blocks/ln/scale": ((LAYERS, 8), "[L/pp, D/dp]"),
    "blocks/mlp/w_in": ((LAYERS, 8, 12), "[L/pp, D/dp, F/tp]"),
    "blocks/mlp/w_out": ((LAYERS, 12, 8), "[L/pp, F/tp+dp, D]"),
    "blocks/mlp/b_in": ((LAYERS, 12), "[L/pp, F/tp+dp]"),
    "blocks/moe/w_up": ((LAYERS, 4, 6, 8), "[L/pp, E/dp, D, F/tp]"),
    "blocks/moe/router": ((LAYERS, 5, 3), "[L/pp, D, E]"),
    "blocks/gate": ((LAYERS,), "[L/pp]"),
    "head/norm/scale": ((8,), "[D/dp]"),
    "head/bias": ((3,), "[V]"),
    "head/temperature": ((), "[]"),
}
MESHES = {"dp2": {"dp": 2}, "dp4": {"dp": 4}, "dp2 tp2": {"dp": 2, "tp": 2}}
RATES = ((r"^blocks/", [0.5, 0.9, 0.8, 1.0, 1.1, 0.7]), (r"^embed/", 0.1), (".*", 1.0))

SHAPES = pytree.nest({name: shape for name, (shape, _) in LEAVES.items()})
SPECS = pytree.nest({name: Spec.parse(text) for name, (_, text) in LEAVES.items()})


def muon_for_matrices(lr):
    parts = {"muon": optim.muon(lr, ns_dtype=F64), "adamw": optim.adamw(lr)}
    return optim.by_label(parts, ((r"^blocks/.*/w_", "muon"), (".*", "adamw")))


def recipe(lr):
    adam = optim.adamw(lr, mask=optim.decay_matrices, weight_decay=0.2)
    return optim.chain(optim.clip_by_global_norm(1.0), adam, optim.scale_by_rules(RATES))


# learning rate -> transformation; the others are elementwise and as in OPTIMIZERS
NEEDY = {
    "lamb": lambda lr: optim.lamb(lr, weight_decay=0.1),
    "adafactor": lambda lr: optim.adafactor(lr, eps1=1e-8, weight_decay=0.1),
    "muon by label": muon_for_matrices,
    "muon adjusted": lambda lr: optim.by_label(
        {"muon": optim.muon(lr, adjust="match_rms_adamw", nesterov=False, ns_dtype=F64), "sgd": optim.sgd(lr)},
        ((r"^embed/|^blocks/.*/w_", "muon"), (".*", "sgd")),
    ),
    "recipe": recipe,
    "clip and sgd": lambda lr: optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(lr, 0.9)),
    "accumulate": lambda lr: optim.accumulate(optim.lamb(lr), 2),
}
NAMES = [*OPTIMIZERS, *(name for name in NEEDY if name not in OPTIMIZERS)]
every_mesh = pytest.mark.parametrize("mesh", MESHES)


def make(name, lr, shards=optim.WHOLE):
    return optim.bind(NEEDY[name](lr), shards) if name in NEEDY else OPTIMIZERS[name](lr)


def whole_params():
    params = tree(0, SHAPES)
    params["blocks"]["ln"]["scale"].fill_(1.0)  # as it begins: every rank's part is the same
    return params


def own(mesh, specs, whole):
    """This rank's part of a tree of whole leaves."""
    layout = optim.sharded(specs, mesh, like=whole)
    return pytree.map_named(lambda name, x: layout.local(name, x).clone(), whole)


def train(tx, params, gradient, form, steps=5):
    params = clone(params)
    state = tx.init(params)
    for i in range(steps):
        grads = gradient(i)
        if form == "apply":
            params, state = optim.apply_in_place(tx, grads, state, params)
        else:
            updates, state = tx.update(grads, state, params)
            params = optim.apply_updates(params, updates)
    return params, state


def gradients(steps):
    return [tree(100 + i, SHAPES) for i in range(steps)]


@functools.cache
def steps_on_whole(name, steps=3):
    """(parameters, state) after steps on whole leaves: the same for all ranks and meshes."""
    grads = gradients(steps)
    return train(make(name, 0.1), whole_params(), lambda i: grads[i], "update", steps)


def compare_steps(mesh, name, whole, plant=lambda layout: layout, steps=3, rows=(), specs=SPECS):
    """On one rank: steps on shards are the own part of those on `whole` leaves, in each form; so is the state."""
    specs = with_rows(specs, rows) if rows else specs
    layout = plant(optim.sharded(specs, mesh, like=whole_params()))
    on_shards = make(name, 0.1, layout)
    assert on_shards.needs == "elementwise"
    params, (expected, expected_state) = whole_params(), whole
    grads = [own(mesh, specs, g) for g in gradients(steps)]
    mine = own(mesh, specs, params)
    # All runs before any comparison: a rank that stops early would leave the others waiting.
    runs = [train(on_shards, mine, lambda i: clone(grads[i]), form, steps) for form in ("update", "apply")]
    for got, state in runs:
        assert_same(got, own(mesh, specs, expected), 1e-12)
        assert_same(state, own(mesh, on_shards.spec(specs), expected_state), 1e-12)
    moved = pytree.map(lambda a, b: float((a - b).abs().max()), expected, params)
    assert min(pytree.leaves(moved)) > 1e-4, moved


def compare_rows(mesh, name, whole, rows):
    compare_steps(mesh, name, whole, rows=rows)


# Every second layer but the last on a rank, and all of them on one of the ranks.
STAGES = {"interleaved": ((0, 2, 5), (1, 3, 4)), "none": ((), tuple(range(LAYERS)))}


@pytest.mark.parametrize("rows", STAGES)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n not in ("recipe", "muon by label"))) for n in NAMES]
)
def test_steps_on_layers_that_do_not_follow_one_another(name, rows):
    ranks.run(2, compare_rows, name, steps_on_whole(name), STAGES[rows], mesh={"pp": 2})


def checked_steps(mesh, name, whole):
    with mesh.checked():
        compare_steps(mesh, name, whole, steps=2)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[pytest.mark.slow] * (mesh != "dp2 tp2" and name != "recipe"))
        for name in NAMES
        for mesh in MESHES
        if name in NEEDY or mesh == "dp2 tp2"
    ],
)
def test_steps_on_shards_are_those_on_whole_leaves(name, mesh):
    sizes = MESHES[mesh]
    ranks.run(math.prod(sizes.values()), compare_steps, name, steps_on_whole(name), mesh=sizes)


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("lamb", "muon by label")), "adafactor", "recipe"]
)
def test_no_sum_over_ranks_is_of_what_they_share(name):
    ranks.run(4, checked_steps, name, steps_on_whole(name, 2), mesh={"dp": 2, "tp": 2})


# Dims that tp=3 does not divide: rows and columns of matrices, layer by layer, and of a vector.
UNEVEN = {
    "embed/tokens": "[V/tp, D] %3,3,2",
    "blocks/ln/scale": "[L/pp, D/tp] %3,3,2",
    "blocks/mlp/w_in": "[L/pp, D/tp, F] %3,3,2",
    "blocks/moe/w_up": "[L/pp, E, D, F/tp] %3,3,2",
    "blocks/moe/router": "[L/pp, D/tp, E] %2,2,1",
    "head/norm/scale": "[D/tp] %3,3,2",
}
UNEVEN_SPECS = pytree.map_named(lambda name, spec: Spec.parse(UNEVEN[name]) if name in UNEVEN else spec, SPECS)


def compare_uneven(mesh, wholes):
    """Steps as in `compare_steps`, and both norms, on parts of unlike sizes."""
    for name, whole in wholes.items():
        compare_steps(mesh, name, whole, steps=3, specs=UNEVEN_SPECS)
    grads = tree(3, SHAPES)
    layouts_ = [optim.sharded(UNEVEN_SPECS, mesh, like=grads, ordered=ordered) for ordered in (False, True)]
    return [float(layout.norm(own(mesh, UNEVEN_SPECS, grads))) for layout in layouts_], float(optim.global_norm(grads))


@pytest.mark.slow
def test_steps_and_norms_on_parts_of_unlike_sizes():
    wholes = {name: steps_on_whole(name) for name in NEEDY}
    for norms, expected in ranks.run(3, compare_uneven, wholes, mesh={"tp": 3}):
        assert norms == pytest.approx([expected] * 2, rel=1e-14)


# ---- planted mistakes -----------------------------------------------------------------------------------------------

# mistake -> (the optimizer that shows it, layout -> the layout with the mistake)
PLANTS = {
    # Adam would hide a wrong scale.
    "local norm": ("clip and sgd", lambda layout: layout._replace(norm=optim.global_norm)),
    "norm counts copies": (
        "clip and sgd",
        lambda layout: layout._replace(
            norm=lambda tree: layout.psum("blocks/mlp/w_in", optim.global_norm(tree) ** 2, None).sqrt()
        ),
    ),
    "no sum over ranks": ("lamb", lambda layout: layout._replace(psum=lambda name, x, dims: x)),
    "sums over axes that do not shard": (
        "adafactor",
        lambda layout: layout._replace(psum=lambda name, x, dims: layout.psum("blocks/mlp/w_in", x, (1, 2))),
    ),
    "local sizes": ("adafactor", lambda layout: layout._replace(shape=lambda name, shape: shape)),
    "local matrices": ("muon by label", lambda layout: layout._replace(on_matrices=lambda name, x, f: f(x))),
}


def planted(mesh, plant, whole):
    name, mistake = PLANTS[plant]
    compare_steps(mesh, name, whole, steps=2)
    try:
        compare_steps(mesh, name, whole, mistake, steps=2)
    except AssertionError:
        return True
    return False


@pytest.mark.each_value
@every_mesh
@pytest.mark.parametrize("plant", PLANTS)
def test_planted_mistake_is_seen(plant, mesh):
    sizes = MESHES[mesh]
    whole = steps_on_whole(PLANTS[plant][0], 2)
    assert all(ranks.run(math.prod(sizes.values()), planted, plant, whole, mesh=sizes))


# ---- the norm -------------------------------------------------------------------------------------------------------


def norms(mesh):
    grads = tree(3, SHAPES)
    layout = optim.sharded(SPECS, mesh, like=grads)
    mesh.ledger.clear()
    norm = layout.norm(own(mesh, SPECS, grads))
    calls = [(row.collective, row.axis, row.calls, row.elements) for row in mesh.ledger.rows()]
    # A flat dict of some leaves, as of a chosen part of the parameters.
    some = {"blocks/mlp/w_out": grads["blocks"]["mlp"]["w_out"], "head/bias": grads["head"]["bias"]}
    return (
        norm,
        optim.global_norm(grads),
        layout.norm({n: layout.local(n, x) for n, x in some.items()}),
        optim.global_norm(some),
        calls,
    )


@every_mesh
def test_norm_counts_every_element_once_in_one_sum_per_axis(mesh):
    sizes = MESHES[mesh]
    results = ranks.run(math.prod(sizes.values()), norms, mesh=sizes)
    for norm, expected, some, expected_some, calls in results:
        torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
        torch.testing.assert_close(some, expected_some, rtol=1e-14, atol=0)
        assert [call[:3] for call in calls] == [("psum", axis, 1) for axis in sizes]
        assert all(elements <= 6 for *_, elements in calls)
    assert len({float(norm) for norm, *_ in results}) == 1


WIDE = {
    "embed": {"tokens": (8, 10)},
    "blocks": {"w": (3, 8, 70), "b": (3, 5), "s": (3,)},
    "head": {"w": (12, 7), "t": (), "e": (0, 2)},
}


def ordered_norms(mesh, dtype, piece):
    """The norm for the stages' specs; how large the pieces are must not matter."""
    before = norm_module._PIECE, norm_module._COLUMNS
    norm_module._PIECE, norm_module._COLUMNS = {"cpu": piece}, 16
    try:
        out = []
        for stage in range(4):
            grads = tree(5, WIDE, dtype)
            plan = fzero.zero_plan(stage, grads, mesh)
            assert mesh.size == 1 or stage == 0 or "dp" in plan.opt["blocks"]["w"].axes
            layout = optim.sharded(plan.opt, mesh, like=plan.like, ordered=True)
            out.append(layout.norm(own(mesh, plan.opt, grads)))
        return out
    finally:
        norm_module._PIECE, norm_module._COLUMNS = before


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_ordered_norm_has_the_same_bits_on_every_mesh_and_stage(dtype):
    one = ordered_norms(fzero.one_process(), dtype, 1 << 18)
    exact = math.sqrt(
        math.fsum(float(x) ** 2 for leaf in pytree.leaves(tree(5, WIDE, dtype)) for x in leaf.reshape(-1))
    )
    assert abs(float(one[0]) / exact - 1) < (1e-15 if dtype == F64 else 1e-7)
    assert one[0].dtype == (F64 if dtype == F64 else torch.float32)
    everywhere = [one, *ranks.run(2, ordered_norms, dtype, 40), *ranks.run(4, ordered_norms, dtype, 7)]
    assert {float(norm) for stages in everywhere for norm in stages} == {float(one[0])}
    # Sums in another order have other bits, or this would show nothing.
    assert dtype != F64 or float(optim.global_norm(tree(5, WIDE, dtype))) != float(one[0])


def ordered_with_tp(mesh):
    grads = tree(3, SHAPES)
    norm = optim.sharded(SPECS, mesh, like=grads, ordered=True).norm
    return norm(own(mesh, SPECS, grads)), optim.global_norm(grads)


def test_ordered_norm_under_tensor_parallelism_is_right():
    specs = pytree.map(lambda spec: Spec(tuple(() for _ in spec.dims)), SPECS)
    one = optim.sharded(specs, fzero.one_process(), like=tree(3, SHAPES), ordered=True).norm(tree(3, SHAPES))
    results = ranks.run(4, ordered_with_tp, mesh={"dp": 2, "tp": 2})
    for norm, expected in results:
        torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
        torch.testing.assert_close(norm, one, rtol=1e-14, atol=0)
    assert len({float(norm) for norm, _ in results}) == 1


CANONICAL = {
    "muon by label": lambda lr: optim.by_label(
        {"muon": optim.muon(lr), "adamw": optim.adamw(lr)}, ((r"^blocks/.*/w_", "muon"), (".*", "adamw"))
    ),
    "recipe": recipe,
    "adamw of bfloat16": lambda lr: optim.adamw(lr, weight_decay=0.1, state_dtype=torch.float32),
}


def canonical(mesh, name):
    """Whole parameters and state after five steps, in each form."""
    dtype = torch.bfloat16 if name.endswith("bfloat16") else torch.float32
    params = tree(1, SHAPES, dtype)
    layout = optim.sharded(SPECS, mesh, like=params, ordered=True)
    tx = CANONICAL[name](0.1) if name in CANONICAL else OPTIMIZERS[name](0.1)
    tx = optim.bind(optim.chain(optim.clip_by_global_norm(0.5), tx), layout)
    grads = [own(mesh, SPECS, tree(10 + i, SHAPES, dtype)) for i in range(5)]
    whole = optim.sharded((SPECS, tx.spec(SPECS)), mesh, like=(params, tx.init(params)))
    ends = [train(tx, own(mesh, SPECS, params), lambda i: clone(grads[i]), form) for form in ("update", "apply")]
    return [{leaf: whole.gather(leaf, x) for leaf, x in pytree.named_leaves(end).items()} for end in ends]


ORDERED = [*(name for name in OPTIMIZERS if name not in ("lamb", "adafactor")), "adamw of bfloat16"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (i % 2)) for i, name in enumerate(ORDERED)]
)
def test_canonical_steps_have_the_same_bits_on_every_mesh(name):
    one = canonical(fzero.one_process(), name)
    for n in (2, 4):
        for rank in ranks.run(n, canonical, name):
            for expected, got in zip(one, rank):
                assert_same(got, expected)


# ---- muon's layers --------------------------------------------------------------------------------------------------


def spread(mesh, layers):
    """How many matrices this rank iterates on, and what is sent: [L, 8, 12] over dp."""
    name, seen = "blocks/w", []
    specs, whole = (
        {"blocks": {"w": Spec.parse("[L, D/dp, F]")}},
        {"blocks": {"w": tree(2, {"w": (layers, 8, 12)})["w"]}},
    )
    layout = optim.sharded(specs, mesh, like=whole)

    def f(x):
        seen.append(tuple(x.shape))
        return torch.cat([optim.newton_schulz(layer) for layer in x.split(1)])

    mesh.ledger.clear()
    out = layout.on_matrices(name, layout.local(name, whole["blocks"]["w"]), f)
    expected = layout.local(name, torch.cat([optim.newton_schulz(layer) for layer in whole["blocks"]["w"].split(1)]))
    assert torch.equal(out, expected)
    return seen, {row.collective: row.elements for row in mesh.ledger.rows()}


def test_layers_are_shared_out_where_they_divide_and_gathered_where_not():
    for seen, sent in ranks.run(4, spread, 8):
        assert seen == [(2, 8, 12)] and sent == {"all_to_all": 2 * 8 * 8 * 12 // 4 * 3 // 4}
    for seen, sent in ranks.run(4, spread, 6):
        assert seen == [(6, 8, 12)] and sent == {"all_gather": 6 * 8 * 12 * 3 // 4}


# ---- transforms -----------------------------------------------------------------------------------------------------


def after_two_steps(tx, params, total):
    state = tx.init(params)
    for i in range(2):
        grads = pytree.map(lambda p, i=i: torch.sin(3.0 * p) + 0.1 * (i + 1) + p, params)
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    return total(params)


def gradient_through_steps(mesh, name):
    """On one rank: the own part of d(loss after two steps) / d(first parameters), as autograd has it on shards."""
    whole = pytree.map(lambda p: 0.5 * p, tree(0, SHAPES))
    layout = optim.sharded(SPECS, mesh, like=whole)
    expected = torch.func.grad(lambda p: after_two_steps(make(name, 0.1), p, lambda p: optim.global_norm(p) ** 2))(
        whole
    )
    on_shards = lambda p: after_two_steps(make(name, 0.1, layout), p, lambda p: layout.norm(p) ** 2)  # noqa: E731
    assert_same(torch.func.grad(on_shards)(own(mesh, SPECS, whole)), own(mesh, SPECS, expected), 1e-11)


@pytest.mark.each_value
@every_mesh
@pytest.mark.parametrize("name", ["lamb", "muon by label", "recipe", "clip and sgd"])
def test_gradient_through_steps_on_shards(name, mesh):
    sizes = MESHES[mesh]
    ranks.run(math.prod(sizes.values()), gradient_through_steps, name, mesh=sizes)


def steps_of_three(mesh, name):
    layout = optim.sharded(SPECS, mesh, like=whole_params())
    tx, states = make(name, 0.1, layout), [own(mesh, SPECS, tree(i, SHAPES)) for i in range(3)]
    grads = [own(mesh, SPECS, tree(10 + i, SHAPES)) for i in range(3)]
    together = lambda trees: pytree.map(lambda *x: torch.stack(x), *trees)  # noqa: E731
    batched, _ = torch.func.vmap(tx.update)(
        together(grads), torch.func.vmap(tx.init)(together(states)), together(states)
    )
    for i in range(3):
        alone, _ = tx.update(grads[i], tx.init(states[i]), states[i])
        assert_same(pytree.map(lambda x, i=i: x[i], batched), alone, 1e-12)


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("lamb", "muon by label")), "adafactor", "recipe"]
)
def test_vmap_over_steps_on_shards(name):
    ranks.run(4, steps_of_three, name, mesh={"dp": 2, "tp": 2})


# ---- layouts --------------------------------------------------------------------------------------------------------


def round_trip(mesh, large):
    before, layouts._SMALL = layouts._SMALL, 0 if large else layouts._SMALL
    try:
        whole = tree(4, SHAPES)
        layout = optim.sharded(SPECS, mesh, like=whole)
        for name, x in pytree.named_leaves(whole).items():
            mine = layout.local(name, x)
            assert mine.numel() * layout.parts(name, None) == x.numel()
            assert torch.equal(layout.gather(name, mine), x)
            for dims in [(-1,), (0,), tuple(range(1, x.dim()))] if x.dim() else []:
                part = layout.gather(name, mine, dims)
                assert part.numel() == mine.numel() * layout.parts(name, dims)
                assert torch.equal(layout.local(name, part, dims), mine)
            sums = layout.psum(name, mine.sum()[None].expand(2), None)
            torch.testing.assert_close(sums, x.sum()[None].expand(2), rtol=1e-12, atol=1e-12)
            if name.startswith("blocks/"):  # a layer of it
                assert torch.equal(layout.gather(name, mine[2:3]), x[2:3])
        return sorted({row.collective for row in mesh.ledger.rows()})
    finally:
        layouts._SMALL = before


@every_mesh
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_own_parts_gathers_and_sums(mesh, large):
    sizes = MESHES[mesh]
    for collectives in ranks.run(math.prod(sizes.values()), round_trip, large, mesh=sizes):
        assert collectives == (["all_gather", "psum"] if large else ["all_gather"])


def test_a_mesh_of_one_process_is_whole():
    whole = whole_params()
    layout = optim.sharded(SPECS, fzero.one_process(), like=whole)
    for name in NEEDY:
        for form in ("update", "apply"):
            gradient = lambda i: tree(100 + i, SHAPES)  # noqa: E731
            assert_same(
                train(make(name, 0.1, layout), whole, gradient, form),
                train(make(name, 0.1), whole, gradient, form),
                1e-14,
            )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s, m: optim.sharded(s, m, like=whole_params()).gather("blocks/mlp/w_on", torch.ones(2)),
            r"no leaf 'blocks/mlp/w_on' \(did you",
        ),
        (
            lambda s, m: optim.sharded(s, m, like={"embed": {"tokens": torch.ones(8, 4)}}),
            "sharded: blocks/ln/scale has a spec and no shape",
        ),
        (
            lambda s, m: optim.sharded({"w": Spec.parse("[D/dp]")}, m, like={"w": torch.ones(7)}),
            "w: dim 0 has size 7, not divisible by dp=4",
        ),
        (
            lambda s, m: optim.sharded({"w": Spec.parse("[D, F/dp]")}, m, like={"w": torch.ones(4, 4)}, ordered=True),
            "w: dp shards dim 1; ordered sums need it on dim 0",
        ),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(SPECS, fzero.sharding.fake_mesh({"dp": 4}))


def test_factors_of_layers_that_are_shared_out():
    mesh = fzero.sharding.fake_mesh({"pp": 2}, rank=1)
    layout = optim.sharded({"blocks": {"w": Spec.parse("[L/pp, D]")}}, mesh, like={"blocks": {"w": torch.ones(4, 3)}})
    ones = {"blocks": {"w": torch.ones(2, 3, dtype=F64)}}
    scaled, _ = optim.bind(optim.scale_by_rules(((".*", [1.0, 2.0, 3.0, 4.0]),)), layout).update(ones, (), ones)
    assert scaled["blocks"]["w"][:, 0].tolist() == [3.0, 4.0]
    with pytest.raises(ValueError, match=r"blocks/w has shape \(4, 3\) and is given 2 factors"):
        optim.bind(optim.scale_by_rules(((".*", [1.0, 2.0]),)), layout).init(ones)


@pytest.mark.parametrize("name", NAMES)
def test_no_sum_of_the_state_is_owed(name):
    owed = pytree.map(lambda spec: replace(spec, partial=frozenset({"cp"})), SPECS)
    assert make(name, 0.1).spec(owed) == make(name, 0.1).spec(SPECS)


def test_every_optimizer_that_needs_more_than_its_shard_is_here():
    for name, make_tx in OPTIMIZERS.items():
        assert make_tx(0.1).needs == "elementwise" or name in NEEDY, name
    assert not [
        name
        for name in NEEDY
        if re.search("clip|lamb|adafactor|muon|recipe", name) and make(name, 0.1).needs == "elementwise"
    ]


def by_rows(needs="row"):
    """Each row of a gradient with norm 1, which is of rows that are whole."""
    return optim.GradientTransformation(
        init=lambda params: (),
        update=lambda grads, state, params: (
            pytree.map(lambda g: -0.1 * g / g.norm(dim=-1, keepdim=True), grads),
            state,
        ),
        spec=lambda specs: (),
        needs=needs,
    )


def rows_of_params():
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=F64)  # noqa: E731
    return {"w": draw(8, 4), "blocks": {"w": draw(3, 4, 6)}}


def rows_after_steps(mesh, stage, batch):
    params = rows_of_params()
    plan = fzero.zero_plan(stage, params, mesh, policy=FP64)
    state = fzero.init_state(params, by_rows(), plan, seed=0)

    def loss(params, batch):
        x = batch["x"] @ params["w"]
        for w in params["blocks"]["w"]:
            x = torch.tanh(x @ w) @ w.T
        return x.square().sum(), batch["x"].shape[0]

    step = fzero.make_train_step(loss, by_rows(), plan)
    for _ in range(3):
        state, _ = step(state, fzero.local_batch(batch, mesh))
    return fzero.full_params(state.params, plan)


@pytest.mark.parametrize("stage", [1, 3])
def test_steps_on_whole_rows_of_leaves_that_are_cut_between_them(stage):
    batch = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(4), dtype=F64)}
    whole = rows_after_steps(fzero.one_process(), 0, batch)
    for cut in ranks.run(2, rows_after_steps, stage, batch):
        assert_same(cut, whole, 1e-14)


@pytest.mark.parametrize(
    ("needs", "spec", "cut"),
    [
        ("row", "[D/dp, F]", False),
        ("row", "[D, F/dp]", True),
        ("row", "[L, D/dp, F]", False),
        ("row", "[L, D/dp]", True),  # a vector of each layer is a row
        ("row", "[L/dp]", False),
        ("row", "[D/dp]", True),
        ("matrix", "[L/dp, D, F]", False),
        ("matrix", "[L, D/dp, F]", True),
        ("matrix", "[D/dp, F]", True),
        ("tree", "[L/dp, D, F]", True),
        ("tree", "[D, F]", False),
    ],
)
def test_what_must_be_whole_is_refused_where_it_is_cut_by_whoever_has_the_plan(needs, spec, cut):
    name, spec = "blocks/w" if "L" in spec else "w", Spec.parse(spec)
    params, tx = pytree.nest({name: torch.ones([4] * len(spec.dims))}), by_rows(needs)
    plan = fzero.zero_plan(0, params, fzero.sharding.fake_mesh({"dp": 2}))
    plan = replace(plan, leaves={name: replace(plan.leaves[name], opt=spec)})
    if not cut:
        while True:  # a Spec may leave out trailing dims that are whole
            assert layouts.bind_to_plan(tx, plan) is tx
            if not spec.dims or spec.dims[-1]:
                return
            spec = replace(spec, dims=spec.dims[:-1])
            plan = replace(plan, leaves={name: replace(plan.leaves[name], opt=spec)})
    for call in (
        lambda: fzero.init_state(params, tx, plan, seed=0),
        lambda: fzero.state_specs(plan, tx),
        lambda: fzero.make_train_step(lambda params, batch: (params, 1), tx, plan),
    ):
        what = "whole rows .* cuts those of" if needs == "row" else "whole leaves .* cuts"
        with pytest.raises(ValueError, match=rf"^the optimizer needs {what} {name} and 0 more; give it an `on`"):
            call()
