"""Schedules against tables of their formulas, within 1e-12."""

from math import cos, exp, inf, log, nan, pi, sqrt

import pytest
import torch

from fzero import optim

F64 = torch.float64

# name -> (schedule, {step: value}): the values are written out from the formulas, by phase.
TABLES = {
    "constant": (optim.constant(0.3), {0: 0.3, 7: 0.3, 10**9: 0.3}),
    "linear": (
        optim.linear(1.0, 0.2, 10),
        {0: 1.0, 1: 0.92, 5: 0.6, 9: 0.28, 10: 0.2, 11: 0.2, 1000: 0.2},
    ),
    "polynomial": (
        optim.polynomial(1.0, 0.1, 10, 2.0),
        {0: 1.0, 1: 0.1 + 0.9 * 0.81, 5: 0.1 + 0.9 * 0.25, 10: 0.1, 12: 0.1},
    ),
    "cosine": (
        optim.cosine(2.0, 8, 0.5),
        {0: 2.0, 2: 0.5 + 1.5 * (1 + sqrt(0.5)) / 2, 4: 1.25, 6: 0.5 + 1.5 * (1 - sqrt(0.5)) / 2, 8: 0.5, 9: 0.5},
    ),
    "exponential": (optim.exponential(3.0, 0.5, 10), {0: 3.0, 10: 1.5, 20: 0.75, 5: 3 * sqrt(0.5), 100: 3 / 1024}),
    "inverse_sqrt": (optim.inverse_sqrt(0.1, 4), {0: 0.1, 12: 0.05, 32: 0.1 / 3, 5: 0.1 * 2 / 3, 396: 0.01}),
    "join": (
        optim.join([optim.constant(5.0), optim.linear(1.0, 0.0, 4), optim.constant(9.0)], [3, 5]),
        {0: 5.0, 2: 5.0, 3: 1.0, 4: 0.75, 5: 9.0, 100: 9.0},
    ),
    "join of equal boundaries": (
        optim.join([optim.constant(1.0), optim.constant(2.0), optim.constant(3.0)], [2, 2]),
        {1: 1.0, 2: 3.0},
    ),
    "warmup": (
        optim.warmup(optim.linear(1.0, 0.0, 10), 4, 0.2),
        {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 5: 0.9, 14: 0.0, 20: 0.0},
    ),
    "warmup of none": (optim.warmup(optim.constant(2.0), 0), {0: 2.0, 1: 2.0}),
    # Vaswani et al. 2017: peak min(t / w, sqrt(w / t))
    "warmup of inverse_sqrt": (
        optim.warmup(optim.inverse_sqrt(1.0, 16), 16),
        {0: 0.0, 4: 0.25, 16: 1.0, 64: 0.5, 100: 0.4, 1600: 0.1},
    ),
    "warmup_cosine": (
        optim.warmup_cosine(1.0, 10, 110, 0.1),
        {0: 0.0, 5: 0.5, 10: 1.0, 60: 0.55, 85: 0.1 + 0.9 * (1 - sqrt(0.5)) / 2, 110: 0.1, 200: 0.1},
    ),
    "one_cycle": (
        optim.one_cycle(1.0, 20, rise=0.4, start_div=10.0, end_div=100.0),
        {
            0: 0.1,
            4: 0.55,
            2: 0.1 + 0.9 * (1 - cos(pi / 4)) / 2,
            8: 1.0,
            14: (1.0 + 0.001) / 2,
            17: 0.001 + 0.999 * (1 + cos(3 * pi / 4)) / 2,
            20: 0.001,
            25: 0.001,
        },
    ),
    "wsd linear": (
        optim.wsd(2.0, 100, 10, 20, end=0.4),
        {0: 0.0, 5: 1.0, 10: 2.0, 50: 2.0, 80: 2.0, 90: 1.2, 95: 0.8, 100: 0.4, 150: 0.4},
    ),
    "wsd sqrt": (
        optim.wsd(1.0, 100, 10, 16, decay="sqrt"),
        {1: 0.1, 84: 1.0, 85: 0.75, 88: 0.5, 93: 0.25, 100: 0.0, 101: 0.0},
    ),
    "wsd cosine": (
        optim.wsd(1.0, 100, 0, 20, decay="cosine"),
        {0: 1.0, 80: 1.0, 85: (1 + sqrt(0.5)) / 2, 90: 0.5, 100: 0.0},
    ),
    "wsd without a decay": (optim.wsd(1.0, 10, 5, 0), {0: 0.0, 1: 0.2, 5: 1.0, 10: 1.0, 11: 1.0}),
    "wsd without a plateau": (optim.wsd(1.0, 10, 5, 5), {0: 0.0, 4: 0.8, 5: 1.0, 6: 0.8, 10: 0.0}),
}
every_schedule = pytest.mark.parametrize("name", TABLES)


@every_schedule
def test_schedule_equals_its_table(name):
    schedule, table = TABLES[name]
    for step, value in table.items():
        for given in (step, torch.tensor(step), torch.tensor(step, dtype=torch.int32)):
            got = schedule(given)
            assert got.dtype == F64 and got.dim() == 0
            assert abs(got.item() - value) <= 1e-12 * max(1.0, abs(value)), (step, got.item(), value)


@every_schedule
def test_schedule_of_many_steps_and_under_vmap(name):
    schedule, table = TABLES[name]
    steps, values = torch.tensor(list(table)), torch.tensor(list(table.values()), dtype=F64)
    torch.testing.assert_close(schedule(steps), values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.func.vmap(schedule)(steps), values, rtol=1e-12, atol=1e-12)
    before = steps.clone()
    schedule(steps)
    assert torch.equal(steps, before)


@pytest.mark.parametrize(
    "make",
    [
        optim.constant,
        lambda peak: optim.linear(peak, 0.1, 10),
        lambda peak: optim.polynomial(peak, 0.1, 10, 1.5),
        lambda peak: optim.cosine(peak, 10),
        lambda peak: optim.exponential(peak, 0.9, 3),
        lambda peak: optim.inverse_sqrt(peak, 4),
        lambda peak: optim.warmup_cosine(peak, 4, 10),
        lambda peak: optim.one_cycle(peak, 10),
        lambda peak: optim.wsd(peak, 10, 2, 5),
    ],
)
@pytest.mark.parametrize("step", [0, 3, 7, 12])
def test_peaks_may_be_batched_and_differentiated(make, step):
    peaks = torch.tensor([0.1, 1.0, 3.0], dtype=F64)
    expected = torch.stack([make(peak)(step) for peak in peaks.tolist()])
    torch.testing.assert_close(torch.func.vmap(lambda peak: make(peak)(step))(peaks), expected, rtol=1e-12, atol=1e-15)
    slope = torch.func.grad(lambda peak: make(peak)(step))(peaks[1])
    assert abs(slope - (expected[2] - expected[0]) / 2.9) < 1e-12  # every schedule is affine in its peak


def test_exponential_far_out_neither_overflows_nor_loses_digits():
    got = optim.exponential(1.0, 0.999, 7)(10**6).item()
    assert abs(got / exp(10**6 / 7 * log(0.999)) - 1) < 1e-12
    assert optim.exponential(1.0, 0.5, 1)(10**6).item() == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.linear(1.0, 0.0, -1), "linear: steps is -1"),
        (lambda: optim.linear(1.0, 0.0, 0), "linear: steps is 0"),
        (lambda: optim.linear(nan, 0.0, 5), "linear: start is nan"),
        (lambda: optim.constant(inf), "constant: value is inf"),
        (lambda: optim.constant("0.1"), "constant: value is '0.1'"),
        (lambda: optim.cosine(1.0, 2.5), "cosine: steps is 2.5; it must be a whole number"),
        (lambda: optim.cosine(1.0, True), "cosine: steps is True"),
        (lambda: optim.polynomial(1.0, 0.0, 10, 0.0), "polynomial: power is 0.0; it must be > 0"),
        (lambda: optim.exponential(1.0, 0.0, 10), "exponential: rate is 0.0; it must be > 0"),
        (lambda: optim.exponential(1.0, 0.5, 0), "exponential: steps is 0"),
        (lambda: optim.inverse_sqrt(1.0, 0), "inverse_sqrt: scale is 0"),
        (lambda: optim.join([optim.constant(1.0)], [3]), "join: 1 schedules and 1 boundaries"),
        (lambda: optim.join([optim.constant(1.0)] * 3, [5, 3]), r"join: boundaries are \[5, 3\]; they must ascend"),
        (lambda: optim.join([optim.constant(1.0)] * 2, [-3]), r"join: boundaries\[0\] is -3"),
        (lambda: optim.warmup(optim.constant(1.0), -2), "warmup: steps is -2"),
        (lambda: optim.warmup_cosine(1.0, 100, 100), "warmup_cosine: warmup_steps=100 leaves nothing of steps=100"),
        (lambda: optim.warmup_cosine(1.0, -1, 100), "warmup_cosine: warmup_steps is -1"),
        (lambda: optim.one_cycle(1.0, 100, rise=1.0), "one_cycle: rise is 1.0"),
        (lambda: optim.one_cycle(1.0, 100, start_div=0.0), "one_cycle: start_div is 0.0"),
        (lambda: optim.wsd(1.0, 100, 60, 50), "wsd: warmup_steps=60 and decay_steps=50 are longer than steps=100"),
        (lambda: optim.wsd(1.0, 100, 10, -5), "wsd: decay_steps is -5"),
        (
            lambda: optim.wsd(1.0, 100, 10, 50, decay="exp"),
            "wsd: decay is 'exp'; it must be one of linear, sqrt, cosine",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()
