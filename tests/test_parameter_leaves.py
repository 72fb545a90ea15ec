"""Parameter trees of users: leaves of integers and bools rest as they are, strides do not matter, complex ones are
refused."""

import pytest
import ranks
import torch
from close import assert_close, assert_same
from zero_cases import whole

import fzero
from fzero import checkpoint, local_batch, optim, state_specs
from fzero.offload import DiskTensor

FIXED = {  # by dtype; values that a float32 or bfloat16 would not hold
    torch.int64: torch.tensor([2**53 + 1, -3, 5, 2**24 + 1]),
    torch.int32: torch.tensor([2**24 + 1, 1, 2, 3], dtype=torch.int32),
    torch.int16: torch.tensor([1, 2, 3, 32767], dtype=torch.int16),
    torch.int8: torch.tensor([1, -2, 3, 127], dtype=torch.int8),
    torch.uint8: torch.tensor([1, 2, 3, 255], dtype=torch.uint8),
    torch.bool: torch.tensor([True, False, True, True]),
}
OPTIMIZERS = {
    "adamw": optim.adamw(0.1, weight_decay=0.5),
    "average of clipped sgd": optim.with_average(
        optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1, 0.9, weight_decay=0.5)), 0.9
    ),
    "lamb": optim.lamb(0.1, weight_decay=0.5),
    "adafactor": optim.adafactor(0.1),
}
ROWS = 8


def tree_of(dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    params = {
        "w": torch.randn(4, 4, generator=g).to(dtype),
        "blocks": {"w": torch.randn(2, 4, 4, generator=g).to(dtype)},
    }
    fixed = {str(dtype).removeprefix("torch."): leaf for dtype, leaf in FIXED.items()}
    return params | {"fixed": fixed, "blocks": params["blocks"] | {"order": torch.tensor([[1, 0, 3, 2], [3, 2, 1, 0]])}}


def loss(params, batch):
    fixed = params["fixed"]
    assert {name: leaf.dtype for name, leaf in fixed.items()} == {n: getattr(torch, n) for n in fixed}
    x = batch["x"].to(params["w"].dtype) @ params["w"]
    for layer, order in zip(params["blocks"]["w"], params["blocks"]["order"]):
        x = torch.tanh(x[:, order] @ layer)
    x = torch.where(fixed["bool"], x, 0.0) + (fixed["int64"] % 7)
    return x.float().square().sum(), x.shape[0]


def batch_of(step):
    return {"x": torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step))}


def train(mesh, params, stage, name="adamw", policy=None, steps=2, change=lambda state: state, **options):
    """(whole state, specs, plan) after some steps."""
    plan = fzero.zero_plan(stage, params, mesh, policy=policy or fzero.fp32(), **options.pop("plan", {}))
    tx = OPTIMIZERS[name]
    state = change(fzero.init_state(params, tx, plan, seed=0))
    step = fzero.make_train_step(loss, tx, plan, **options)
    for i in range(steps):
        state, _ = step(state, local_batch(batch_of(i), mesh, options.get("micro_batches", 1)))
    return whole(state, state_specs(plan, tx), mesh)


def expect_fixed(params):
    held = {n: x.tensor() if isinstance(x, DiskTensor) else x for n, x in fzero.pytree.named_leaves(params).items()}
    expected = fzero.pytree.named_leaves(
        {"blocks": {"order": tree_of()["blocks"]["order"]}, "fixed": tree_of()["fixed"]}
    )
    assert_same({name: held[name] for name in expected}, expected)


def moved(state, floating):
    return {
        n: leaf for n, leaf in fzero.pytree.named_leaves(state.params).items() if leaf.is_floating_point() == floating
    }


@pytest.mark.parametrize("policy", ("fp32", "bf16"))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_leaves_of_integers_rest_as_they_are(name, policy):
    params, one = tree_of(), fzero.one_process()
    for options in ({}, {"donate": False}, {"plan": {"offload": "opt=host"}}) if name in ("adamw", "lamb") else ({},):
        state = train(one, params, 0, name, getattr(fzero, policy)(), **options)
        expect_fixed(state.params)
        held = fzero.pytree.names((state.opt_state, state.master))
        assert held and not any("fixed" in n or "order" in n for n in held)
        assert not torch.equal(state.params["w"].float(), params["w"])


def test_they_rest_on_a_disk_with_the_others(tmp_path):
    params, tx, nvme = tree_of(), OPTIMIZERS["adamw"], fzero.Nvme(tmp_path, buffer_bytes=1 << 20)
    plan = fzero.zero_plan(0, params, fzero.one_process(), offload="params=nvme,opt=nvme")
    state = fzero.init_state(params, tx, plan, seed=0, nvme=nvme)
    step = fzero.make_train_step(loss, tx, plan, nvme=nvme)
    for i in range(2):
        state, _ = step(state, batch_of(i))
    expect_fixed(state.params)
    assert_same(state.params["w"].tensor(), train(fzero.one_process(), params, 0).params["w"])


def test_they_are_saved_and_restored_with_their_dtype(tmp_path):
    state = train(fzero.one_process(), tree_of(), 0)
    path = checkpoint.save(tmp_path, state, step=2)
    assert_same(checkpoint.restore(path, state), state)


def each_stage(mesh, stages, strided=False):
    out = []
    for stage in stages:
        params = tree_of()
        if strided:
            params["w"] = params["w"].T.contiguous().T
            params["blocks"]["w"] = params["blocks"]["w"].transpose(1, 2).contiguous().transpose(1, 2)
        for options in ({}, {"donate": False, "micro_batches": 2}):
            out.append(train(mesh, params, stage, **options))
        if strided:  # a state put together by hand, whose leaves keep their strides

            def change(state):
                leaves = {n: keep_strides(leaf) for n, leaf in fzero.pytree.named_leaves(state.params).items()}
                return state._replace(params=fzero.pytree.from_named(leaves, state.params))

            out.append(train(mesh, params, stage, change=change))
            out.append(train(mesh, params, stage, "average of clipped sgd", fzero.bf16(), change=change))
    return out


def keep_strides(leaf):
    if leaf.dim() < 2 or not leaf.is_floating_point():
        return leaf
    strided = leaf.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert not strided.is_contiguous()
    return strided


@pytest.mark.parametrize("stages", [(1, 2), pytest.param((0, 3), marks=pytest.mark.slow)])
def test_every_stage_trains_them_and_strides_do_not_matter(stages):
    one = fzero.one_process()
    expected, plain = train(one, tree_of(), 0), ranks.run(2, each_stage, stages)[0]
    slow = train(one, tree_of(), 0, "average of clipped sgd")
    for state in plain:
        expect_fixed(state.params)
        assert_close(moved(state, True), moved(expected, True), rtol=1e-5, atol=1e-6)
    for state in (*ranks.run(2, each_stage, stages, True)[0], *each_stage(one, stages, True)):
        expect_fixed(state.params)
        wide = {n: leaf.float() for n, leaf in moved(state, True).items()}
        coarse = state.params["w"].dtype == torch.bfloat16
        assert_close(wide, moved(slow if coarse else expected, True), rtol=2e-2 if coarse else 1e-5, atol=1e-6)


REFUSED = {
    "complex": (
        {"a": {"w": torch.ones(2, dtype=torch.complex64)}},
        r"'a/w' of the parameters is torch.complex64; give tor",
    ),
    "complex128": ([torch.ones(2, dtype=torch.complex128)], r"'0' .* is torch.complex128; give torch.view_as_real"),
    "integers alone": ({"n": torch.tensor(1)}, "no leaf of the parameters is floating-point, so there is nothing to t"),
    "sparse": ({"w": torch.eye(2).to_sparse()}, r"'w' of the parameters is torch.sparse_coo; give leaf.to_dense"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(name):
    params, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        fzero.zero_plan(0, params, fzero.one_process())


def test_a_state_of_other_kinds_of_leaves_is_refused():
    params = tree_of()
    plan = fzero.zero_plan(0, params, fzero.one_process())
    params["fixed"]["int64"] = params["fixed"]["int64"].float()
    with pytest.raises(ValueError, match=r"fixed/int64 is torch.float32; the plan's model has torch.int64"):
        fzero.init_state(params, optim.adamw(), plan, seed=0)


def test_the_printed_plan_says_so():
    plan = fzero.zero_plan(3, tree_of(), fzero.fake_mesh({"dp": 2}))
    line = next(line for line in str(plan).splitlines() if line.startswith("fixed/int64"))
    assert "frozen" in line and " 16 " in line  # two of its four numbers
    assert "all_gather" in line and "psum" not in line
