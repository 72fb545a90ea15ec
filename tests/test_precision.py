"""Dynamic loss scaling against a literal transcription of DeepSpeed's rule, and the policies of dtypes."""

import random as python_random
from dataclasses import replace

import pytest
import torch
from close import assert_same

from fzero.core.precision import POLICIES, LossScale, Policy, fp16, init_scaler, overflow_at_floor, update_scaler


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
