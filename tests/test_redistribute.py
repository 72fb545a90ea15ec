"""redistribute: every pair of layouts on a 2 x 2 mesh equals slices of the whole tensor, its transpose is its backward
pass; DTensor."""

import itertools
import logging

import pytest
import ranks
import torch
from close import assert_close, assert_same

import fzero
from fzero import models, optim
from fzero.core import pytree
from fzero.sharding import (
    Spec,
    fake_mesh,
    from_dtensor,
    global_shape,
    local_shape,
    narrow_to,
    one_process,
    redistribute,
    to_dtensor,
)

SIZES = {"dp": 2, "tp": 2}
SHAPE = (8, 12)
F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def layouts():
    """Every Spec of two dims over two axes, without sums owed."""
    dims = ((), ("dp",), ("tp",), ("dp", "tp"), ("tp", "dp"))
    pairs = itertools.product(dims, repeat=2)
    return [Spec(pair) for pair in pairs if len(set(sum(pair, ()))) == len(sum(pair, ()))]


def owing(spec):
    """The spec, and with sums owed over each set of axes that it does not shard."""
    free = [axis for axis in SIZES if axis not in spec.axes]
    return [Spec(spec.dims, owed) for n in range(len(free) + 1) for owed in itertools.combinations(free, n)]


def part(whole, spec, mesh, weights):
    """This rank's part of `whole`; of a sum that is owed, this rank's share by `weights`, which add up to 1."""
    x = narrow_to(whole, Spec(spec.dims), mesh)
    for axis in sorted(spec.partial):
        x = x * weights[mesh[axis].rank]
    return x


def every_pair(mesh):
    """For each pair the value against slices, and this rank's two sides of the adjoint law; returns those, and what was
    sent."""
    whole, cotangent = draw(*SHAPE), draw(*SHAPE, seed=1)
    weights = (0.3, 0.7)
    sides, sent = [], {}
    for src in (s for layout in layouts() for s in owing(layout)):
        x = part(whole, src, mesh, weights)
        for dst in layouts():
            for goal in (Spec(dst.dims, src.partial - set(dst.axes)), dst):
                mesh.ledger.clear()
                y, vjp = torch.func.vjp(lambda x, src=src, goal=goal: redistribute(x, src, goal, mesh, leaf="w"), x)
                sent[src, goal] = [(r.collective, r.calls, r.elements) for r in mesh.ledger.rows()]
                assert_close(y, part(whole, goal, mesh, weights), rtol=1e-13, atol=1e-14)
                # The dual of a layout that owes a sum is the whole, and the other way round.
                c = narrow_to(cotangent, Spec(goal.dims), mesh)
                (x_c,) = vjp(c)
                assert_close(x_c, narrow_to(cotangent, Spec(src.dims), mesh), rtol=1e-13)
                sides.append((inner(y, c, goal, mesh), inner(x, x_c, src, mesh)))
    return sides, sent


def inner(a, b, spec, mesh):
    """This rank's part of <a, b>: what is the same on all ranks of an axis counts once, on the first of them."""
    same = [axis for axis in SIZES if axis not in spec.axes and axis not in spec.partial]
    return 0.0 if any(mesh[axis].rank for axis in same) else float((a * b).sum())


@pytest.mark.slow
def test_every_pair_of_layouts():
    results = ranks.run(4, every_pair, mesh=SIZES)
    sides = torch.tensor([result[0] for result in results], dtype=F64).sum(0)
    assert len(sides) == (4 + 4 * 2 + 6) * 11 * 2
    assert_close(sides[:, 0], sides[:, 1], rtol=1e-12)
    whole = (draw(*SHAPE) * draw(*SHAPE, seed=1)).sum()
    assert_close(sides[:, 0], whole.expand(len(sides)), rtol=1e-12)

    sent, n = results[0][1], 96
    a, b, full = Spec(("dp", None)), Spec((None, "dp")), Spec(((), ()))
    assert sent[a, a] == [] and sent[full, a] == [] and sent[a, Spec((("dp", "tp"), None))] == []
    assert sent[a, b] == [("all_to_all", 1, n // 2 // 2)]
    assert sent[a, full] == [("all_gather", 1, n // 2)]
    assert sent[Spec(((), ()), {"dp"}), full] == [("psum", 1, n)]
    assert sent[Spec(((), ()), {"dp"}), a] == [("psum_scatter", 1, n // 2)]
    # The smallest is sent: the sum over tp is that of the slice, before and after.
    assert sent[Spec(((), ()), {"tp"}), a] == [("psum", 1, n // 2)]
    assert sent[Spec(("dp", None), {"tp"}), full] == [("psum", 1, n // 2), ("all_gather", 1, n // 2)]
    # The inner axis comes off first; the other nesting of the two is reached through the whole.
    both, other = Spec((("dp", "tp"), None)), Spec((("tp", "dp"), None))
    assert sent[both, full] == sent[both, other] == [("all_gather", 1, n // 4), ("all_gather", 1, n // 2)]
    assert sent[Spec((("dp", "tp"), None)), Spec((("dp",), ("tp",)))] == [("all_to_all", 1, n // 4 // 2)]


def unused_axes_and_trailing_dims(mesh):
    x = draw(4, 6)
    spec = Spec.parse("[A/cp+dp]")
    assert_same(narrow_to(x, spec, mesh), x[2 * mesh["dp"].rank :][:2])
    assert_same(
        redistribute(narrow_to(x, spec, mesh), spec, Spec.parse("[A, B/ep+dp] +rp"), mesh),
        x[:, 3 * mesh["dp"].rank :][:, :3],
    )


def test_axes_of_size_1_and_trailing_dims_do_not_matter():
    ranks.run(2, unused_axes_and_trailing_dims)
    x, mesh = draw(3, 5), one_process()
    assert redistribute(x, Spec.parse("[A/dp, B] +tp"), Spec.parse("[A, B/dp+cp]"), mesh) is x
    assert_same(narrow_to(x, Spec.parse("[A/dp, B/tp]"), mesh), x)


def test_shapes_on_a_rank():
    mesh = fake_mesh({"dp": 4, "tp": 2}, rank=5)  # dp 2, tp 1
    for text, shape in (
        ("[A/dp, B]", (2, 6)),
        ("[A/tp+dp, B]", (1, 6)),
        ("[A, B/tp] +dp", (8, 3)),
        ("[]", (8, 6)),
        ("[A/pp]", (8, 6)),
    ):
        assert local_shape((8, 6), Spec.parse(text), mesh) == shape
        assert global_shape(shape, Spec.parse(text), mesh) == (8, 6)
    x = torch.arange(48).view(8, 6)
    assert_same(narrow_to(x, Spec.parse("[A/dp+tp]"), mesh), x[5:6])
    assert_same(narrow_to(x, Spec.parse("[A/tp+dp]"), mesh), x[6:7])
    assert narrow_to(x, Spec.parse("[A/dp]"), mesh).data_ptr() == x[4:].data_ptr()  # a view


def test_errors_name_the_leaf_the_numbers_and_the_fix():
    mesh, x = fake_mesh({"dp": 4, "tp": 2}), torch.zeros(6, 8)
    parse = Spec.parse
    cases = [
        (
            lambda: local_shape((6, 8), parse("[A/dp]"), mesh, leaf="w"),
            r"w: dim 0 has size 6, not divisible by 4 \(dp=4\); pad it to 8, or",
        ),
        (lambda: narrow_to(x, parse("[A, B/tp+dp]"), mesh), None),
        (
            lambda: narrow_to(x, parse("[A/tp+dp]"), mesh),
            r"tensor: dim 0 has size 6, not divisible by 8 \(tp=2, dp=4\); pad it to 8",
        ),
        (lambda: narrow_to(x, parse("[A] +dp"), mesh), r"\[·\] \+dp owes a sum; a whole tensor has no parts of one"),
        (lambda: narrow_to(x, parse("[A, B, C/dp]"), mesh), r"its spec \[·, ·, ·/dp\] has 3 dims and the tensor has 2"),
        (lambda: narrow_to(x, parse("[A/data]"), mesh), r"the mesh has no axis 'data'"),
        (
            lambda: redistribute(x, parse("[A]"), parse("[A] +dp"), mesh, leaf="w"),
            r"redistribute w: \[·\] \+dp owes a sum over dp that \[·\]",
        ),
        (
            lambda: redistribute(x, parse("[A]"), parse("[A] @host"), mesh, leaf="w"),
            r"redistribute w: from memory device to host",
        ),
        (
            lambda: redistribute(x, parse("[A]"), parse("[A/dp]"), mesh, leaf="w"),
            r"w: dim 0 has size 6, not divisible by 4",
        ),
    ]
    for call, message in cases:
        if message is None:
            call()
            continue
        with pytest.raises(ValueError, match=message):
            call()


# ---- DTensor --------------------------------------------------------------------------------------------------------


def round_trips(mesh):
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it advises on the speed of full_tensor
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    whole = draw(*SHAPE)
    for spec in (s for layout in layouts() for s in owing(layout)):
        x = part(whole, spec, mesh, (0.25, 0.75))
        t = to_dtensor(x, spec, mesh)
        assert isinstance(t, DTensor) and t.shape == SHAPE and t.to_local().data_ptr() == x.data_ptr()
        assert_close(t.full_tensor(), whole, rtol=1e-14)
        back, same = from_dtensor(t, mesh)
        assert back.data_ptr() == x.data_ptr() and same == spec
    assert Spec.parse("[A/tp, B] +dp").placements(mesh) == (Partial(), Shard(0))
    assert Spec.parse("[A, B/dp+cp]").placements(mesh) == (Shard(1), Replicate())
    most = DTensor.from_local(whole, mesh.device_mesh, [Partial("max"), Replicate()])
    with pytest.raises(ValueError, match="only sums are owed here"):
        from_dtensor(most, mesh)
    other = torch.distributed.device_mesh.DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="is not on this mesh"):
        from_dtensor(DTensor.from_local(whole, other, [Replicate(), Replicate()]), mesh)


def test_dtensor_round_trips():
    ranks.run(4, round_trips, mesh=SIZES)


# -- all of a state


MODEL = models.llama(
    models.LlamaConfig(vocab_size=48, max_len=8, d_model=16, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=24)
)


def whole_of(mesh, stage, offload, folder):
    """(whether what full_params gives is what one process has, leaf by leaf; the errors of other trees)."""
    tx, nvme = optim.adamw(1e-2), fzero.Nvme(folder, buffer_bytes=1 << 20) if "nvme" in offload else None
    plan = fzero.zero_plan(stage, MODEL, mesh, policy="bf16", offload=offload)
    state = fzero.init_state(MODEL, tx, plan, seed=0, nvme=nvme)
    alone = fzero.init_state(MODEL, tx, fzero.zero_plan(0, MODEL, one_process(), policy="bf16"), seed=0)
    specs = fzero.state_specs(plan, tx)
    pairs = [
        (fzero.full_params(state, plan), alone.params),
        (fzero.full_params(state.params, plan), alone.params),
        (fzero.full_params(state.master, plan, specs=specs.master), alone.master),
        (fzero.full_params(state._asdict(), plan, specs=specs._asdict()), alone._asdict()),
    ]
    same = [
        all(torch.equal(x, pytree.named_leaves(wanted)[name]) for name, x in pytree.named_leaves(found).items())
        for found, wanted in pairs
    ]
    with pytest.raises(ValueError, match=r"the leaves do not match the tree: missing .*; extra data_cursor"):
        fzero.full_params(state._asdict(), plan)
    nvme.close() if nvme is not None else None
    return same


@pytest.mark.parametrize(
    ("sizes", "stage", "offload"),
    (
        ({"dp": 2, "tp": 2}, 3, ""),
        pytest.param({"dp": 2, "pp": 2}, 3, "", marks=pytest.mark.slow),
        pytest.param({"dp": 4}, 1, "params=nvme,opt=nvme", marks=pytest.mark.slow),
    ),
    ids=str,
)
def test_full_params_are_those_of_one_process(sizes, stage, offload, tmp_path):
    for same in ranks.run(4, whole_of, stage, offload, str(tmp_path), mesh=sizes):
        assert same == [True] * 4
