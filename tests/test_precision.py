"""Dynamic loss scaling against a literal transcription of DeepSpeed's rule, and the policies of dtypes."""

import random as python_random
from dataclasses import replace

import pytest
import ranks
import torch
from close import assert_same

import fzero
from fzero import LossScale, Policy, checkpoint, fp16, optim
from fzero.core import POLICIES, init_scaler, overflow_at_floor, pytree, torch_private, update_scaler


class AtFloor(Exception):
    pass


class Published:
    """DeepSpeed's rule as its documentation and code state it, with its own counters: iterations and the last
    overflow's number."""

    def __init__(self, config):
        self.config, self.scale, self.hysteresis = config, config.init, config.hysteresis
        self.iteration, self.last_overflow = 0, -1

    def update(self, overflow):
        if overflow:
            if self.hysteresis == 1:
                if self.scale == self.config.floor and self.config.at_floor == "raise":
                    raise AtFloor
                self.scale = max(self.scale / self.config.factor, self.config.floor)
            else:
                self.hysteresis -= 1
            self.last_overflow = self.iteration
        elif (self.iteration - self.last_overflow) % self.config.window == 0:
            self.hysteresis = self.config.hysteresis
            self.scale *= self.config.factor
        self.iteration += 1


CONFIGS = {
    "default hysteresis": LossScale(init=2.0**6, window=5, at_floor="hold"),
    "no hysteresis": LossScale(init=2.0**6, window=3, hysteresis=1, at_floor="hold"),
    "window 1": LossScale(init=4.0, window=1, hysteresis=3, at_floor="hold"),
    "factor 4, floor 2": LossScale(init=2.0**9, window=7, factor=4.0, floor=2.0, at_floor="hold"),
}


def trajectory(config, overflows):
    state, seen = init_scaler(config), []
    for overflow in overflows:
        state = update_scaler(config, state, torch.tensor(overflow))
        seen.append((float(state.scale), int(state.hysteresis)))
    return seen


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("rate", (0.05, 0.3, 0.7))
def test_the_trajectory_is_the_published_rule(config, rate):
    draw = python_random.Random(17)
    overflows = [draw.random() < rate for _ in range(100)]
    published, expected = Published(config), []
    for overflow in overflows:
        published.update(overflow)
        expected.append((published.scale, published.hysteresis))
    assert trajectory(config, overflows) == expected
    assert len({scale for scale, _ in expected}) > 2


def test_a_scripted_trajectory_by_hand():
    config = LossScale(init=8.0, window=3, hysteresis=2, floor=1.0, at_floor="hold")
    # What happens                  good  good  good (rises)  overflow (spends)  overflow (falls)  good  good  good
    # (rises, restores)
    script = [False, False, False, True, True, False, False, False]
    assert trajectory(config, script) == [(8, 2), (8, 2), (16, 2), (16, 1), (8, 1), (8, 1), (8, 1), (16, 2)]
    # The window begins anew at an overflow, also at one that the hysteresis absorbs.
    assert trajectory(config, [False, False, True, False, False, False]) == [
        (8, 2),
        (8, 2),
        (8, 1),
        (8, 1),
        (8, 1),
        (16, 2),
    ]
    assert trajectory(config, [True] * 6) == [(8, 1), (4, 1), (2, 1), (1, 1), (1, 1), (1, 1)]


def test_the_defaults_are_the_published_ones():
    assert LossScale() == LossScale(init=65536.0, window=1000, hysteresis=2, floor=1.0, factor=2.0, at_floor="raise")
    assert trajectory(LossScale(), [False] * 1000)[-2:] == [(65536.0, 2), (131072.0, 2)]


def test_the_overflow_at_the_floor_is_the_one_that_would_raise():
    config = LossScale(init=4.0, window=4, hysteresis=2, at_floor="raise")
    published, state = Published(config), init_scaler(config)
    script = [True, False, True, True, False, False, False, False, True, True, True]
    for i, overflow in enumerate(script):
        found = bool(overflow_at_floor(config, state, torch.tensor(overflow)))
        if i == len(script) - 1:
            assert found
            with pytest.raises(AtFloor):
                published.update(overflow)
        else:
            assert not found
            published.update(overflow)
            state = update_scaler(config, state, torch.tensor(overflow))
            assert (float(state.scale), int(state.hysteresis)) == (published.scale, published.hysteresis)
    assert not bool(overflow_at_floor(config, state, torch.tensor(False)))


def test_update_vmaps_and_keeps_dtypes():
    config = LossScale(init=8.0, window=2, at_floor="hold")
    script = torch.tensor(
        [[True, True, False, False], [False, False, True, False], [False, True, False, False], [False] * 4]
    )

    def run(overflows):
        state = init_scaler(config)
        for overflow in overflows:
            state = update_scaler(config, state, overflow)
        return state

    batched, single = torch.vmap(run)(script), [run(row) for row in script]
    for i, name in enumerate(batched._fields):
        assert_same(batched[i], torch.stack([s[i] for s in single]))
        assert batched[i].dtype == init_scaler(config)[i].dtype, name
    assert batched.scale.tolist() == [8.0, 16.0, 16.0, 32.0]


def test_the_scale_stays_finite_where_nothing_ever_overflows():
    # At infinity every gradient would be NaN, and half of infinity is infinity: no step would ever succeed again.
    config = LossScale(init=2.0**120, window=1)
    assert [scale for scale, _ in trajectory(config, [False] * 10)] == [2.0 ** min(121 + i, 127) for i in range(10)]
    assert trajectory(config, [False] * 10 + [True, True])[-1] == (2.0**126, 1)


def test_update_is_pure():
    config, overflow = LossScale(), torch.tensor(True)
    state = init_scaler(config)
    update_scaler(config, state, overflow)
    assert_same(state, init_scaler(config))


@pytest.mark.parametrize(
    "wrong",
    [{"floor": 0.0}, {"init": 0.5}, {"factor": 1.0}, {"window": 0}, {"hysteresis": 0}, {"init": float("nan")}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_loss_scale_that_cannot_work_is_refused(wrong):
    with pytest.raises(ValueError, match=r"loss scale: .*needs init >= floor > 0"):
        LossScale(**wrong)


def test_at_floor_is_raise_or_hold():
    with pytest.raises(ValueError, match="at_floor is 'ignore'; it must be raise or hold"):
        LossScale(at_floor="ignore")


def test_policies():
    table = {
        name: (p.param, p.compute, p.reduce, p.accumulate, p.state, p.has_master, p.loss_scale is not None)
        for name, p in ((name, make()) for name, make in POLICIES.items())
    }
    f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
    assert table == {
        "fp32": (f32, f32, f32, f32, f32, False, False),
        "fp64": (f64, f64, f64, f64, f64, False, False),
        "bf16": (bf16, bf16, f32, f32, f32, True, False),
        "fp16": (f16, f16, f32, f32, f32, True, True),
        "bf16_float8": (bf16, bf16, f32, f32, f32, True, False),
        "bf16_float8_gather": (bf16, bf16, f32, f32, f32, True, False),
        "bf16_float8_rowwise": (bf16, bf16, f32, f32, f32, True, False),
    }
    assert {name: make().matmul for name, make in POLICIES.items() if make().matmul} == {
        "bf16_float8": "float8_tensorwise",
        "bf16_float8_gather": "float8_tensorwise",
        "bf16_float8_rowwise": "float8_rowwise",
    }
    with pytest.raises(ValueError, match="policy odd: matmul is 'float8'; it must be one of"):
        Policy("odd", matmul="float8")
    with pytest.raises(ValueError, match="policy odd: gather is 'float9'; it must be '' or 'float8'"):
        Policy("odd", gather="float9")
    with pytest.raises(ValueError, match=r"policy odd: gather is 'float8', which serves .*matmul is 'float8_rowwise'"):
        replace(POLICIES["bf16_float8_rowwise"](), name="odd", gather="float8")
    assert all(make().name == name for name, make in POLICIES.items())
    assert fp16(LossScale(window=3)).loss_scale.window == 3


# -- parameters and their master weights

SIZES = {"blocks/w": (2, 8, 8), "scale": (8,), "head": (16, 8)}


def weights(seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return pytree.nest({name: torch.randn(size, generator=g).to(dtype) for name, size in SIZES.items()})


def squares(params, batch):
    x = batch["x"].to(params["scale"].dtype)
    for w in params["blocks"]["w"]:
        x = torch.tanh(x @ w) * params["scale"]
    return (x @ params["head"].T).float().square().sum() * 1e-3, x.shape[0]


def rows(mesh):
    return fzero.local_batch({"x": torch.linspace(-1, 1, 64).reshape(8, 8)}, mesh)


def read_back(tree):
    return pytree.map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.tensor(), tree)


class Trained:
    """A state after two steps, and what makes others."""

    def __init__(self, mesh, policy, stage=0, offload="", folder=None, **options):
        self.tx = optim.with_average(optim.adamw(1e-2), 0.5)
        self.plan = fzero.zero_plan(stage, weights(0), mesh, policy=policy, offload=offload)
        self.nvme = fzero.Nvme(folder) if "nvme" in offload else None
        self.step = self.new_step(**options)
        self.state, self.batch = self.begin(1), rows(mesh)
        for _ in range(2):
            self.state, _ = self.step(self.state, self.batch)

    def new_step(self, **options):
        return fzero.make_train_step(squares, self.tx, self.plan, nvme=self.nvme, **options)

    def begin(self, seed):
        return fzero.init_state(weights(seed), self.tx, self.plan, seed=0, nvme=self.nvme)


def edited(params, name, element):
    leaves = {n: leaf.clone() for n, leaf in pytree.named_leaves(params).items()}
    leaves[name].view(-1)[element] += 1.0
    return pytree.from_named(leaves, params)


@pytest.mark.parametrize("policy", ("bf16", "fp16"))
@pytest.mark.parametrize("options", ({}, {"donate": False}), ids=("donated", "pure"))
def test_parameters_that_are_not_the_rounding_of_their_masters_are_named(policy, options, tmp_path):
    run = Trained(fzero.one_process(), POLICIES[policy](), **options)
    other = weights(5, run.plan.policy.param)
    average = pytree.map(lambda leaf: leaf.to(run.plan.policy.param), run.state.opt_state.average)
    wrong = {
        "blocks/w": other,
        "scale": edited(run.state.params, "scale", 3),
        "head": edited(run.state.params, "head", -1),
        r"\w+(/w)?": average,
    }
    for step in (run.step, run.new_step(**options)):  # the one that made the state, and another one's first
        for name, params in wrong.items():
            with pytest.raises(ValueError, match=f"^params/{name} is not the rounding of .* fzero.with_params"):
                step(run.state._replace(params=params), run.batch)
    right = fzero.with_params(run.state, pytree.map(torch.clone, run.state.params), run.plan)
    right, _ = run.step(right, run.batch)
    with torch.no_grad():
        right.params["scale"][0] += 1.0  # in place
    with pytest.raises(ValueError, match=r"^params/scale is not the rounding of its master weights, .*: 1 of 8 elem"):
        run.step(right, run.batch)

    path = checkpoint.save(tmp_path, run.begin(3), step=0)
    like = run.begin(4)
    for keep in ("master/.*", "params/head", "(master|opt_state/.*)/head"):
        with pytest.raises(ValueError, match=r"^.*step-0+: params/(blocks/w|head) is not .*, of what restore\("):
            checkpoint.restore(path, like, retain=keep)
    restored = checkpoint.restore(path, like.params, prefix="params")
    first, _ = run.step(fzero.with_params(like, restored, run.plan), run.batch)
    assert_same(first.params["head"] - restored["head"] == 0, torch.zeros(16, 8, dtype=torch.bool))
    later, _ = run.step(run.begin(5), run.batch)
    checkpoint.restore(path, later.params, prefix="params", out=later.params)  # into its memory
    with pytest.raises(ValueError, match=r"^params/.* is not the rounding of its master weights"):
        run.step(later, run.batch)


NAN, INF = float("nan"), float("inf")
GIVEN = {  # what with_params is given as one leaf of 4 numbers, and what the error says
    "meta": (lambda: torch.ones(4, device="meta"), "b: is on the meta device and has no values"),
    "fake": (
        lambda: torch_private.FakeTensorMode().from_tensor(torch.ones(4)),
        "b: is on the meta device and has no values",
    ),
    "freed": (lambda: freed(torch.ones(4)), "b: was freed and has no values"),
    "lazy": (lambda: torch.nn.UninitializedParameter(), "b: is an uninitialized parameter of a lazy module"),
    "int": (lambda: torch.ones(4, dtype=torch.int64), "b: is torch.int64 and the state has torch.bfloat16"),
    "bool": (lambda: torch.ones(4, dtype=torch.bool), "b: is torch.bool and the state has"),
    "codes": (lambda: torch.ones(4, dtype=torch.int8), "b: is torch.int8 and the state has"),
    "nan": (lambda: torch.tensor([1, NAN, 1, 1]), "b: 1 or more of 4 values are not finite, such as nan"),
    "inf": (lambda: torch.tensor([1.0, 1, 1, -INF]), "b: 1 or more of 4 values are not finite, such as -inf"),
    "nan of 8 bits": (lambda: torch.tensor([1, NAN, 1, 1]).to(torch.float8_e5m2), "b: 1 or more .* such as nan"),
    "large": (
        lambda: torch.full((4,), 1e300, dtype=torch.float64),
        "such as 1e.300, which torch.bfloat16 does",
    ),
    "complex": (lambda: torch.ones(4, dtype=torch.complex64), "leaf 'b' .* is torch.complex64"),
    "sparse": (lambda: torch.ones(4).to_sparse(), "leaf 'b' .* is torch.sparse_coo; give leaf.to_dense"),
    "array": (lambda: torch.ones(4).numpy(), "leaf 'b' .* is a ndarray, not a tensor"),
    "nothing": (lambda: None, "leaf 'b' .* is a NoneType, not a tensor"),
    "long": (lambda: torch.ones(5), r"b: is \[5\]; the state has \[4\]: a tree of other shapes"),
    "table": (lambda: {"c": torch.ones(4)}, "missing b; extra b/c"),
    "list": (lambda: [torch.ones(4)], "missing b; extra b/0"),
}
TREES = {
    "empty": ({}, "has no leaves"),
    "leaf": (torch.ones(4), "missing a, b; extra a single leaf, no tree"),
    "tuple": ((torch.ones(2), torch.ones(4)), "missing a, b; extra 0, 1"),
    "extra": ({"a": torch.ones(2), "b": torch.ones(4), "c": torch.ones(1)}, "extra c"),
}


def freed(leaf):
    leaf.untyped_storage().resize_(0)
    return leaf


def test_what_is_no_tree_of_new_parameters_is_refused_by_its_leaf():
    """And the state is as it was; what has values is taken as it comes."""
    params, tx = {"a": torch.zeros(2), "b": torch.zeros(4)}, optim.sgd(0.1)
    plan = fzero.zero_plan(0, params, fzero.one_process(), policy=fzero.bf16())
    state = fzero.init_state(params, tx, plan, seed=0)
    cases = [({"a": torch.ones(2), "b": make()}, text) for make, text in GIVEN.values()] + [*TREES.values()]
    for given, text in cases:
        with pytest.raises((ValueError, TypeError), match=text) as raised:
            fzero.with_params(state, given, plan)
        assert str(raised.value).count("\n") == 0 and not any(state.params["b"])
    shared = torch.full((4,), 2.0, requires_grad=True)
    for leaf in (shared, shared * 1, torch.nn.Parameter(shared.double()), shared.to(torch.float8_e4m3fn), shared.half(),
                 torch.full((1,), 2.0).expand(4)):  # fmt: skip
        found = fzero.with_params(state, {"a": shared[:2], "b": leaf}, plan)
        assert found.params["b"].tolist() == found.master["b"].tolist() == [2.0] * 4
        assert not found.params["b"].requires_grad and not found.master["b"].requires_grad
    # A frozen leaf, such as a mask, may be infinite, and one of whole numbers is of its dtype.
    params = {"a": torch.zeros(2), "b": torch.zeros(4), "ids": torch.arange(3)}
    plan = fzero.zero_plan(0, params, fzero.one_process(), policy=fzero.bf16(), frozen="^b$")
    state = fzero.init_state(params, tx, plan, seed=0)
    given = {"a": torch.ones(2), "b": torch.tensor([0.0, -INF, 0, 0]), "ids": torch.arange(3) + 1}
    assert fzero.with_params(state, given, plan).params["ids"].tolist() == [1, 2, 3]
    for name, leaf, text in (
        ("b", torch.tensor([0, NAN, 0, 0]), "b: 1 or more"),
        ("ids", torch.ones(3), "ids: is torch"),
    ):
        with pytest.raises(ValueError, match=text):
            fzero.with_params(state, {**given, name: leaf}, plan)


def refusals_of(mesh):
    """What each rank says of leaves that are wrong on one rank alone."""
    params, tx, said = {"a": torch.zeros(2, 3), "b": torch.zeros(8, 2)}, optim.sgd(0.1), []
    plan = fzero.zero_plan(3, params, mesh, policy=fzero.bf16())
    state, first = fzero.init_state(params, tx, plan, seed=0), mesh["dp"].rank == 0
    part = torch.ones(state.params["b"].shape)
    for wrong, right in ((part[:1], part), (part * NAN, part), (part.to("meta"), part), (torch.ones(8, 2), part)):
        with pytest.raises(ValueError) as raised:
            fzero.with_params(state, {"a": torch.ones(2, 3), "b": wrong if first else right}, plan)
        said.append(str(raised.value))
    found = fzero.with_params(state, {"a": torch.ones(2, 3), "b": part}, plan)
    return said, bool(found.params["b"].all())


@pytest.mark.slow
def test_what_one_rank_is_given_is_refused_on_all():
    (first, whole), (second, _) = ranks.run(2, refusals_of)
    assert whole
    for text, wanted in zip(
        first, ("is [1, 2]; the state has [8, 2] or [4, 2]", "not finite", "meta", "and a shard on")
    ):
        assert wanted in text, text
    assert ["another rank" in text for text in second] == [True, True, True, False] and "and a shard on" in second[3]


def begun_from(mesh, policy, stage, offload, folder):
    """(what a state with other parameters does in two steps, what one made of them does) for the ways to give them."""
    found = []
    for i, layout in enumerate(("whole", "at rest", "as updated")):
        run = Trained(mesh, POLICIES[policy](), stage, offload, folder / f"{i}")
        given = {
            "whole": lambda: weights(5),
            "at rest": lambda run=run: pytree.map(lambda leaf: leaf * 0.5, read_back(run.state.params)),
            "as updated": lambda run=run: read_back(run.state.opt_state.average),
        }[layout]()
        state = fzero.with_params(run.state, given, run.plan, nvme=run.nvme)
        losses = []
        for _ in range(2):
            state, metrics = run.step(state, run.batch)
            losses.append(float(metrics.loss))
        found.append(losses)
        if run.nvme is not None:
            run.nvme.close()
    return found


WAYS = ((1, ""), (1, "params=nvme,opt=nvme"), (2, "opt=host"), (3, "params=host,opt=host"), (3, "opt=nvme"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*its file system refuses direct transfers:UserWarning")
def test_a_state_takes_other_parameters_at_every_stage_in_every_memory(tmp_path):
    alone = begun_from(fzero.one_process(), "bf16", 0, "", tmp_path / "alone")
    for stage, offload in WAYS:
        for found in ranks.run(2, begun_from, "bf16", stage, offload, tmp_path / f"{stage}-{offload}"):
            for given, wanted in zip(found, alone, strict=True):
                assert given == pytest.approx(wanted, rel=2e-2), (stage, offload)
