"""Specs, rules, meshes and plans."""

import math
import re
from typing import NamedTuple

import pytest
import torch

from fzero import bf16
from fzero.core import pytree
from fzero.models import ModelTraits
from fzero.sharding import (
    AXES,
    ZERO,
    Axis,
    Mesh,
    Spec,
    check_dims,
    fake_mesh,
    global_shape,
    largest_shard,
    local_numel,
    local_shape,
    local_windows,
    make_mesh,
    match_rules,
    narrow_box,
    narrow_to,
    one_process,
    parts_as_chunks,
    shard_of_rank,
    zero_plan,
)

# ---- Spec -----------------------------------------------------------------------------------------------------------


def test_spec_of_a_text():
    spec = Spec.parse("[L/pp, D/tp+dp, F] +cp +ep @host")
    assert spec == Spec((("pp",), ("tp", "dp"), ()), frozenset({"cp", "ep"}), "host")
    assert spec.axes == ("pp", "tp", "dp")
    assert str(spec) == "[·/pp, ·/tp+dp, ·] +cp +ep @host"
    assert Spec.parse(str(spec)) == spec and Spec.parse("[·, ·/dp]") == Spec(((), "dp"))
    for text in ("[]", "[ ]", " [] "):
        assert Spec.parse(text) == Spec() and str(Spec()) == "[]"
    assert Spec.parse("[V, D]") == Spec(((), ()))
    assert Spec.parse("[V/tp,D]+dp@nvme") == Spec((("tp",), ()), {"dp"}, "nvme")


def test_spec_has_one_form_and_is_a_leaf():
    assert Spec(("dp", None, ("tp", "cp"))) == Spec((("dp",), (), ("tp", "cp")))
    assert len({Spec(("dp",), ["tp"]), Spec((("dp",),), frozenset({"tp"}))}) == 1
    assert pytree.leaves({"w": Spec(("dp",))}) == [Spec(("dp",))]


@pytest.mark.parametrize("text", ("", "V, D", "[V, D", "[V, D] cp", "[V] @host +dp", "[V] @", "[V] +", "[V]]"))
def test_spec_refuses_what_is_not_of_the_form(text):
    with pytest.raises(ValueError, match=re.escape(f"spec {text!r} is not of the form")):
        Spec.parse(text)


@pytest.mark.parametrize("dim", ("V/", "/tp", "V/tp+", "V tp", "V/tp/dp", "", "··", "V/·"))
def test_spec_names_the_dim_that_is_wrong(dim):
    with pytest.raises(ValueError, match=re.escape(f"dim {dim!r} is not of the form")):
        Spec.parse(f"[D, {dim}]")


def test_spec_refuses_an_axis_twice_and_an_unknown_memory():
    for text in ("[V/dp, D/dp]", "[V/dp+dp]", "[V/dp] +dp"):
        with pytest.raises(ValueError, match="axis 'dp' appears twice"):
            Spec.parse(text)
    with pytest.raises(ValueError, match="memory is 'disk'; it must be one of device, host, nvme"):
        Spec.parse("[V] @disk")


# ---- rules ----------------------------------------------------------------------------------------------------------

NAMES = ["embed/tokens", "blocks/attn/w_q", "blocks/attn/b_q"]


def test_the_first_rule_that_is_found_in_the_name_wins():
    rules = (("w_q$", 1), ("^blocks", 2), (".*", 3))
    assert match_rules(rules, NAMES) == {"embed/tokens": 3, "blocks/attn/w_q": 1, "blocks/attn/b_q": 2}


def test_a_leaf_that_no_rule_matches_is_named():
    with pytest.raises(
        ValueError, match=r"^my rules: no rule matches leaf 'blocks/attn/b_q' \(did you mean blocks/attn/w_q\?\)"
    ):
        match_rules((("embed/tokens", 1), ("blocks/attn/w_q", 2)), NAMES, subject="my rules")


def test_a_rule_that_is_first_for_no_leaf_is_named():
    with pytest.raises(ValueError, match=r"rule 'embed/token_s' matches no leaf first \(did you mean embed/tokens\?\)"):
        match_rules((("embed/token_s", 1), (".*", 2)), NAMES)
    with pytest.raises(ValueError, match="rule 'w_q' matches no leaf first"):
        match_rules((("blocks", 1), ("w_q", 2), (".*", 3)), NAMES)


def test_a_rule_that_is_no_regex_is_named():
    with pytest.raises(ValueError, match=r"my rules: '\(blocks' is not a regular expression: missing \)"):
        match_rules((("(blocks", 1), (".*", 2)), NAMES, subject="my rules")


# ---- mesh -----------------------------------------------------------------------------------------------------------


def test_every_axis_of_a_mesh_of_one_process_is_an_identity():
    mesh = one_process()
    assert mesh == make_mesh() == make_mesh({"dp": 1, "tp": 1}) and hash(mesh) == hash(make_mesh())
    assert [mesh[name] for name in AXES] == [Axis(name, 1, 0, None) for name in AXES]
    assert mesh.size == 1 and str(mesh) == "Mesh(one process)"
    assert (
        str(Mesh((Axis("dp", 4), Axis("tp", 2)))) == "Mesh(dp=4, tp=2)"
        and Mesh((Axis("dp", 4), Axis("tp", 2))).size == 8
    )


def test_mesh_errors_name_the_axis():
    with pytest.raises(ValueError, match=r"no axis 'ddp'; its axes are dp, rp, tp, pp, cp, ep \(did you mean dp\?\)"):
        one_process()["ddp"]
    with pytest.raises(ValueError, match=r"unknown axis 'tpp'.*\(did you mean tp\?\)"):
        make_mesh({"tpp": 1})
    for size in (0, -1, 1.0, "2"):
        with pytest.raises(ValueError, match=f"axis dp has size {size!r}"):
            make_mesh({"dp": size})
    with pytest.raises(ValueError, match=r"asks for 8 processes"):
        make_mesh({"dp": 4, "tp": 2})


# ---- plan -----------------------------------------------------------------------------------------------------------

PARAMS = {
    "embed": {"tokens": torch.zeros(8, 6)},
    "blocks": {"w": torch.zeros(3, 4, 5), "odd": torch.zeros(3, 7)},
    "t": torch.zeros(()),
}
AT_4 = Mesh(tuple(Axis(name, 4 if name == "dp" else 1) for name in AXES))
WHOLE = {"embed/tokens": "[·, ·]", "blocks/w": "[·, ·, ·]", "blocks/odd": "[·, ·]", "t": "[]"}
# Dim 0, or dim 1 behind the layers; 7 is not divisible by 4 and a scalar has nothing to divide.
SHARDED = {**WHOLE, "embed/tokens": "[·/dp, ·]", "blocks/w": "[·, ·/dp, ·]"}


def texts(tree):
    return {name: str(spec) for name, spec in pytree.named_leaves(tree).items()}


@pytest.mark.parametrize("stage, params, grads, opt", [(0, 0, 0, 0), (1, 0, 0, 1), (2, 0, 1, 1), (3, 1, 1, 1)])
def test_a_stage_is_what_the_paper_shards(stage, params, grads, opt):
    plan = zero_plan(stage, PARAMS, AT_4)
    assert plan.stage == stage and texts(plan.compute) == WHOLE
    rows = [texts(tree) for tree in (plan.params, plan.grads, plan.opt)]
    owed = {name: f"{text} +dp" if "dp" not in text else text for name, text in (SHARDED if grads else WHOLE).items()}
    assert rows == [SHARDED if params else WHOLE, owed, SHARDED if opt else WHOLE]
    assert ZERO[stage] == (bool(params), bool(grads), bool(opt))
    assert all(leaf.device.type == "meta" for leaf in pytree.leaves(plan.like))
    assert {n: tuple(x.shape) for n, x in pytree.named_leaves(plan.like).items()} == {
        n: tuple(x.shape) for n, x in pytree.named_leaves(PARAMS).items()
    }


def test_a_plan_on_one_process():
    plan = zero_plan(3, PARAMS, one_process())
    assert texts(plan.params) == texts(plan.grads) == {**SHARDED, "blocks/odd": "[·, ·/dp]"}


def test_what_is_owed_behind_a_micro_batch():
    """Gradients in the layout at rest owe the replicas' sum; full ones, and those at stages 0 and 1, that of all data
    ranks; canonical ones nothing."""
    mesh = fake_mesh({"dp": 4, "rp": 2})
    grads = {o: texts(zero_plan(2, PARAMS, mesh, reduce=o).grads)["blocks/w"] for o in OPTIONS}
    assert list(grads.values()) == ["[·, ·/dp, ·] +rp", "[·, ·, ·] +dp +rp", "[·, ·/dp, ·]"]
    assert texts(zero_plan(1, PARAMS, mesh).grads)["blocks/w"] == "[·, ·, ·] +dp +rp"
    tp = fake_mesh({"tp": 2})
    plan = zero_plan(2, small(("embed", "[V/tp, D]"), ("blocks/w", "[L, D, F]")), tp, sequence=True)
    assert texts(plan.compute) == {"embed": "[·/tp, ·]", "blocks/w": "[·, ·, ·] +tp"}
    assert texts(plan.grads)["blocks/w"] == "[·, ·/dp, ·] +tp"


OPTIONS = ("fast", "once", "canonical")


class Small(NamedTuple):
    """The fields of a Model that a plan needs."""

    init: object
    rules: object
    traits: ModelTraits = ModelTraits()


def small(*rules):
    def init(leaf):
        return {"embed": leaf("embed", (8, 6), 1.0), "blocks": {"w": leaf("w", (3, 4, 5), 1.0)}}

    return Small(init, lambda mesh: rules)


def test_a_model_brings_its_own_rules_and_zero_comes_behind_them():
    plan = zero_plan(3, small(("embed", "[V/tp, D]"), ("blocks/w", "[L/pp, D, F/tp] @host")), AT_4)
    assert texts(plan.compute) == {"embed": "[·/tp, ·]", "blocks/w": "[·/pp, ·, ·/tp] @host"}
    assert texts(plan.params) == {"embed": "[·/tp+dp, ·]", "blocks/w": "[·/pp, ·/dp, ·/tp] @host"}


def test_plan_errors():
    for stage in (4, -1, "3"):
        with pytest.raises(ValueError, match=re.escape(f"zero stage is {stage!r}; it must be 0, 1, 2 or 3")):
            zero_plan(stage, PARAMS, one_process())
    with pytest.raises(
        ValueError, match=r"embed: dim 1 has size 6, not divisible by tp=4; use one of 1, 2, 3, 6, or pad it to 8"
    ):
        zero_plan(1, small(("embed", "[V, D/tp]"), ("blocks/w", "[L, D, F]")), fake_mesh({"tp": 4}))
    with pytest.raises(ValueError, match=r"embed: its spec \[·\] has 1 dims and the leaf has 2"):
        zero_plan(1, small(("embed", "[V]"), (".*", "[L, D, F]")), AT_4)
    with pytest.raises(ValueError, match="the model's sharding rules: no rule matches leaf 'blocks/w'"):
        zero_plan(1, small(("embed", "[V, D]")), AT_4)


def test_a_printed_plan_shows_every_leaf():
    lines = str(zero_plan(2, PARAMS, AT_4)).splitlines()
    # 8 6 + 3 4 5 + 3 7 + 1
    assert lines[0] == "ZeRO stage 2 on dp=4: 130 parameters, 130 at rest on a rank"
    rows = {line.split()[0]: re.split(r" {2,}", line) for line in lines[1:-3]}
    assert rows["leaf"] == [
        "leaf",
        "shape",
        "compute",
        "params",
        "grads",
        "optimizer",
        "params bytes",
        "grads bytes",
        "communicated",
    ]
    said = "psum_scatter dp a micro-batch, all_gather dp after the update"
    assert rows["embed/tokens"] == [
        "embed/tokens",
        "8×6",
        "[·, ·]",
        "[·, ·]",
        "[·/dp, ·]",
        "[·/dp, ·]",
        "192",
        "48",
        said,
    ]
    assert rows["t"][1] == "scalar" and rows["t"][-1] == "psum dp a step" and set(rows) == {"leaf", *WHOLE}
    assert lines[-3] == "not divisible by dp=4, so whole on every rank: blocks/odd, t"
    sharded, whole = 48 + 60, 21 + 1
    layers, scalar = 3 * math.ceil(2 * 7 * 3 / 4), math.ceil(2 * 3 / 4)  # as the ledger counts: whole elements
    a_part, a_step = 4 * sharded * 3 // 4, 4 * (sharded * 3 // 4 + layers + scalar)
    sent = f"a rank sends {a_part:,} bytes a micro-batch and {a_step:,} a step"
    assert lines[-1] == f"{sent}; sums of gradients travel in float32"
    held = (
        f"520 bytes of parameters in float32, {4 * (sharded // 4 + whole)} bytes of gradients between "
        "micro-batches in float32"
    )
    assert lines[-2] == f"policy fp32: a rank holds {held}"


def test_a_printed_plan_has_the_bytes_of_its_policy():
    lines = str(zero_plan(1, PARAMS, AT_4, policy=bf16())).splitlines()
    rows = {line.split()[0]: re.split(r" {2,}", line) for line in lines[1:-3]}
    assert rows["leaf"][6:9] == ["params bytes", "grads bytes", "master bytes"]
    assert rows["embed/tokens"][6:9] == [
        "96",
        "192",
        "48",
    ]  # 48 elements: all in bfloat16, all in float32, a quarter in float32
    sharded, whole = 48 + 60, 21 + 1
    assert lines[-2] == (
        f"policy bf16: a rank holds {2 * 130} bytes of parameters in bfloat16, {4 * 130} bytes of gradients between "
        "micro-batches in "
        f"float32, {4 * (sharded // 4 + whole)} bytes of master weights in float32"
    )


def test_a_printed_plan_says_what_stage_3_and_canonical_sums_communicate():
    rows = {line.split()[0]: re.split(r" {2,}", line)[-1] for line in str(zero_plan(3, PARAMS, AT_4)).splitlines()}
    assert rows["embed/tokens"] == "all_gather dp for use, psum_scatter dp a micro-batch"
    plan = zero_plan(0, PARAMS, fake_mesh({"dp": 2, "rp": 2}), reduce="canonical")
    rows = {line.split()[0]: re.split(r" {2,}", line)[-1] for line in str(plan).splitlines()}
    assert rows["blocks/w"] == "psum_scatter dp a micro-batch, psum rp a micro-batch, all_gather dp of the gradient"
    assert "canonical sums" in str(plan)
    frozen = zero_plan(3, PARAMS, AT_4, frozen="^embed/")
    assert "frozen" in next(line for line in str(frozen).splitlines() if line.startswith("embed/tokens"))


ROWS = (((0, 1, 2), (3,)), ((0, 3), (1, 2)), ((), (0, 1, 2, 3)))


@pytest.mark.parametrize("rows", ROWS)
def test_the_windows_of_all_ranks_make_up_a_leaf_of_layers(rows):
    """Also of ranks with unlike numbers of layers, and of layers that are no neighbours."""
    spec, whole = Spec(("pp", ("tp", "dp")), rows=rows), torch.arange(4 * 8 * 3).reshape(4, 8, 3)
    assert Spec.parse(str(spec)) == spec
    found = torch.full_like(whole, -1)
    for rank in range(8):
        mesh = fake_mesh({"pp": 2, "dp": 2, "tp": 2}, rank)
        shard = narrow_to(whole, spec, mesh)
        assert shard.shape == local_shape(whole.shape, spec, mesh) and global_shape(shard.shape, spec, mesh) == (
            4,
            8,
            3,
        )
        for window in local_windows(whole.shape, spec, mesh):
            place = narrow_box(found, window.start, window.size)
            assert (place == -1).all()
            place.copy_(window.view(shard))
    assert torch.equal(found, whole)


def test_a_spec_whose_rows_are_no_partition_is_refused():
    mesh = fake_mesh({"pp": 2})
    for rows in (((0, 1), (1, 2, 3)), ((0, 1), (2,)), ((0, 1, 2, 3),)):
        with pytest.raises(ValueError, match="does not give each of 4 layers to one of pp=2 ranks"):
            local_shape((4, 8), Spec(("pp",), rows=rows), mesh)
    with pytest.raises(ValueError, match="rows are those of pp"):
        Spec(("dp",), rows=((0,), (1,)))


def test_a_gradient_is_owed_over_the_axes_that_do_not_shard_its_leaf():
    assert Spec(("pp", "ep")).partial_axes == ("dp", "rp", "cp")
    assert Spec((), frozenset({"tp"})).partial_axes == ("dp", "rp", "ep", "cp", "pp", "tp")


def test_parts_of_experts_that_ep_does_not_divide():
    spec, mesh = Spec.parse("[L, E/ep, D] %2,2,1"), [fake_mesh({"ep": 3}, rank=rank) for rank in range(3)]
    assert spec == Spec.parse(str(spec)) and spec.parts == (2, 2, 1) and str(spec).endswith(" %2,2,1")
    assert [local_shape((4, 5, 7), spec, one) for one in mesh] == [(4, 2, 7), (4, 2, 7), (4, 1, 7)]
    windows = [local_windows((4, 5, 7), spec, one) for one in mesh]
    assert [(w.start, w.size) for (w,) in windows] == [
        ((0, 0, 0), (4, 2, 7)),
        ((0, 2, 0), (4, 2, 7)),
        ((0, 4, 0), (4, 1, 7)),
    ]
    assert {global_shape(w.size, spec, one) for (w,), one in zip(windows, mesh)} == {(4, 5, 7)}
    assert local_numel((4, 5, 7), spec, {"ep": 3}) == 4 * 2 * 7  # of the ranks with the most
    assert spec.layer == Spec.parse("[E/ep, D] %2,2,1")
    x = torch.arange(20).reshape(4, 5, 1)
    assert torch.equal(torch.cat([narrow_to(x, spec, one) for one in mesh], 1), x)
    with pytest.raises(ValueError, match=r"%2,2,1 do not share 6 among ep=3 ranks"):
        check_dims("w", (4, 6, 7), spec, {"ep": 3})
    with pytest.raises(ValueError, match="parts are those of ep or tp, which must shard a dim, before other axes"):
        Spec(("dp",), parts=(1, 2))
    with pytest.raises(ValueError, match="a DTensor has no placement for parts of these sizes"):
        spec.placements(mesh[0])


def test_parts_of_a_dim_that_tp_does_not_divide():
    spec, meshes = Spec.parse("[V/tp, D] %2,2,1"), [fake_mesh({"tp": 3}, rank=rank) for rank in range(3)]
    assert spec == Spec.parse(str(spec)) and parts_as_chunks(5, 3) == spec.parts and spec.part_axis == "tp"
    x = torch.arange(10).reshape(5, 2)
    for rank, mesh in enumerate(meshes):
        shard = narrow_to(x, spec, mesh)
        assert torch.equal(shard, x.chunk(3)[rank]) and global_shape(shard.shape, spec, mesh) == (5, 2)
        assert largest_shard(tuple(shard.shape), spec) == (2, 2) and shard_of_rank((2, 2), spec, mesh) == shard.shape
    assert local_numel((5, 2), spec, {"tp": 3}) == 4
    assert [spec.with_dims(dims).parts for dims in ((("tp",),), ((),))] == [(2, 2, 1), ()]
    # Behind tp another axis may divide each part, as where terms of a sum count as parts of a leaf.
    twice, mesh = Spec.parse("[V/tp+dp, D] %4,4,2"), fake_mesh({"dp": 2, "tp": 3}, rank=5)
    assert (
        local_windows((10, 2), twice, mesh) == [((9, 0), (1, 2), 0)]
        and local_numel((10, 2), twice, {"dp": 2, "tp": 3}) == 4
    )
    for text, said in (
        ("[V/tp, D] %1,2,2", "%1,2,2 are not those of torch.chunk, of 1 or more; they must be %2,2,1"),
        ("[V/tp, D] %2,2", "%2,2 do not share 5 among tp=3 ranks"),
        ("[V/tp+dp, D] %2,2,1", "do not share 5 among tp=3 ranks"),
    ):
        with pytest.raises(ValueError, match=said):
            check_dims("w", (5, 2), Spec.parse(text), {"tp": 3, "dp": 2})
    with pytest.raises(ValueError, match=r"%2,2,1,0 are not those of torch\.chunk, of 1 or more; use a smaller tp"):
        check_dims("w", (5, 2), Spec.parse("[V/tp, D] %2,2,1,0"), {"tp": 4})
