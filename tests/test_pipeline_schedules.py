"""Pipeline schedules against the formulas of their papers, the laws that an executor builds on, and torch's tables."""

import itertools
import random
from types import SimpleNamespace

import pytest
from pipeline_cases import CASES, made, serves
from torch.distributed.pipelining import schedules as of_torch

from fzero.sharding import Act, group_size, pipeline, play

TIMES = ((1, 1, 1), (2, 3, 1), (10, 12, 8), (3, 2, 2), (4, 5, 6))  # of F, I, W


def idle_formula(name, p, m, v, f, i, w):
    """step - m v (F + I + W), in times of one chunk, where a formula is known; else None."""
    b = i + w
    if name in ("gpipe", "1f1b"):
        return (p - 1) * (f + b)
    if name == "interleaved":
        return (p - 1 + (v - 1) * max(0, p - m)) * (f + b)
    if name in ("zb-h1", "interleaved-zb") and m >= p:
        return (p - 1) * max(f, i, f + i - w)
    if name == "zb-h2" and m >= 2 * p - 1:
        return (p - 1) * max(f, i - f, f + i - 2 * w)
    if name == "zb-v" and m >= 2 * p - 1 and 2 * w >= max(f, i):
        return (p - 1) * max(f, i) + max(0, p - 2) * max(0, f - i, w - max(f, i))
    if name == "dualpipe-v" and f == i == w:
        return (p - 1) * f
    return None


def peak_formula(name, p, m, v, r):
    """The most chunks in flight on rank r, None where none is known."""
    g = group_size(p, m)
    return {
        "gpipe": m,
        "1f1b": min(m, p - r),
        "interleaved": min(2 * (p - r - 1) + (v - 1) * g + 1, m * v),
        "zb-h1": min(p, m),
        "zb-h2": min(2 * p - 1, m),
        "interleaved-zb": min(p + (v - 1) * g, m * v),
        "zb-v": 2 * p if m >= 2 * p - 1 else None,
        "dualpipe-v": 2 * p + 1,
    }[name]


def assert_as_published(name, p, m, v, times=TIMES):
    s = made(name, p, m, v)
    pipeline.check(s)
    for f, i, w in times:
        played = play(s, {"F": f, "I": i, "W": w})
        idle, formula = played.step - m * v * (f + i + w), idle_formula(name, p, m, v, f, i, w)
        assert formula is None or idle == formula, (name, p, m, v, (f, i, w), idle, formula)
        assert idle >= (p - 1) * f and max(played.idle) == idle  # the last rank starts after p - 1 forwards
    for r in range(p):
        peak = peak_formula(name, p, m, v, r)
        assert played.peak[r] == peak if peak else played.peak[r] <= 2 * p, (name, p, m, v, r)


def assert_laws(s):
    """What the executor and canonical sums need, written out apart from `check`."""
    p, last = len(s.rows), len(s.stages.ranks) - 1
    for rank, row in enumerate(s.rows):
        for stage in s.stages.chunks(rank):
            for kinds in ("F", "BI", "BW"):
                parts = [act.micro_batch for act in row if act.stage == stage and act.kind in kinds]
                assert parts == list(range(s.parts)), (s.name, rank, stage, kinds)
    acts = {rank: [act for act in row if act.kind != "W"] for rank, row in enumerate(s.rows)}
    for a, b, kinds, away in itertools.product(range(p), range(p), ("F", "BI"), (1, -1)):
        if a != b and away == (1 if kinds == "F" else -1):
            on = s.stages.ranks
            sent = [
                (act.micro_batch, act.stage + away)
                for act in acts[a]
                if act.kind in kinds and 0 <= act.stage + away <= last and on[act.stage + away] == b
            ]
            received = [
                (act.micro_batch, act.stage)
                for act in acts[b]
                if act.kind in kinds and 0 <= act.stage - away <= last and on[act.stage - away] == a
            ]
            assert sent == received, (s.name, a, b, kinds)


def assert_played(s, played, cost, wire):
    """Every act takes its time, and starts as soon as its rank is free and what it needs has arrived."""
    start = {act: t for row, ts in zip(s.rows, played.start) for act, t in zip(row, ts)}
    end = {act: t for row, ts in zip(s.rows, played.end) for act, t in zip(row, ts)}
    on = s.stages.ranks
    for row in s.rows:
        for before, act in zip((None, *row), row):
            arrived = [end[before] if before else 0.0]
            for need in needs_of(s, act, end):
                slow = 0.0 if on[need.stage] == on[act.stage] else wire[min(need.stage, act.stage)]
                arrived.append(end[need] + slow)
            assert start[act] == max(arrived) and end[act] == start[act] + cost[act.kind][act.stage]


def needs_of(s, act, there):
    kind, part, stage = act
    backward = next((one for k in "BI" if (one := Act(k, part, stage + 1)) in there), None)
    forward = Act("F", part, stage)
    found = {"F": [Act("F", part, stage - 1)], "W": [Act("I", part, stage)]}.get(kind, [forward, backward])
    return [one for one in found if one in there]


# ---- the families ----


@pytest.mark.parametrize(("name", "v"), CASES)
def test_idle_time_and_chunks_in_flight_are_as_published(name, v):
    for p, m in itertools.product((1, 2, 3, 5), (1, 2, 5, 10)):
        if serves(name, p, m, v):
            assert_as_published(name, p, m, v, TIMES[:3])


@pytest.mark.exhaustive
@pytest.mark.parametrize("p", range(1, 17))
@pytest.mark.parametrize(("name", "v"), CASES)
def test_every_number_of_ranks_micro_batches_and_chunks(name, v, p):
    for m in range(1, 65):
        if serves(name, p, m, v):
            assert_as_published(name, p, m, v, TIMES[m % len(TIMES) :][:1])
            assert_laws(made(name, p, m, v))


@pytest.mark.parametrize(("name", "v"), CASES)
def test_acts_and_messages_come_in_the_order_of_micro_batches(name, v):
    for p, m in ((1, 3), (2, 4), (3, 6), (3, 7), (5, 11), (5, 10)):
        if serves(name, p, m, v):
            assert_laws(made(name, p, m, v))


def random_times(s, draw):
    stages = len(s.stages.ranks)
    cost = {kind: [draw.choice((0.0, draw.random(), 9 * draw.random())) for _ in range(stages)] for kind in "FBIW"}
    return cost, [draw.choice((0.0, 3 * draw.random())) for _ in range(stages - 1)]


@pytest.mark.parametrize(("name", "v"), CASES)
def test_any_times_are_played_to_the_end(name, v):
    draw = random.Random(0)
    for p, m in ((2, 4), (3, 6), (4, 9)):
        if serves(name, p, m, v):
            s = made(name, p, m, v)
            cost, wire = random_times(s, draw)
            assert_played(s, play(s, cost, wire), cost, wire)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "v"), CASES)
def test_a_thousand_random_times(name, v):
    draw = random.Random(1)
    for _ in range(1000):
        p = draw.randint(1, 8)
        s = made(name, p, draw.choice([m for m in range(1, 25) if serves(name, p, m, v)]), v)
        cost, wire = random_times(s, draw)
        assert_played(s, play(s, cost, wire), cost, wire)


def test_a_pair_takes_its_own_time():
    """DualPipe's (p-1)(F&B + B - 3W), where F, I and W are equal."""
    for p, together in itertools.product((2, 3, 4, 8), (20, 24, 30)):
        s = made("dualpipe-v", p, 3 * p, 2)
        assert max(play(s, {"F": 10, "I": 10, "W": 10, "F&B": together}).idle) == (p - 1) * (together + 20 - 30)
        assert all(one.stage != other.stage for one, other in s.pairs) and s.pairs
    assert not made("zb-v", 4, 8, 2).pairs


def test_one_rank_computes_without_a_pause():
    s = made("1f1b", 1, 3, 1)
    assert [str(act) for act in s.rows[0]] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]
    assert play(s, {"F": 1.0, "B": 2.0}).idle == (0.0,)


# ---- torch's tables ----


def torch_rows(kind, p, m, v, **more):
    have = SimpleNamespace(
        pp_group_size=p, num_stages=p * v, _num_stages=p * v, n_local_stages=v, _n_microbatches=m, **more
    )
    return [kind._calculate_single_rank_operations(have, rank) for rank in range(p)]


def cells(rows):
    return "\n".join(",".join("" if act is None else str(act) for act in row) for row in rows)


TORCH = {
    "zb-v": (of_torch.ScheduleZBVZeroBubble, 2, ((2, 3), (4, 7), (4, 12), (3, 2))),
    "dualpipe-v": (of_torch.ScheduleDualPipeV, 2, ((2, 4), (4, 8), (4, 11), (5, 12))),
    "interleaved": (of_torch.ScheduleInterleaved1F1B, 3, ((2, 4), (4, 8), (3, 12))),
}


@pytest.mark.parametrize("name", TORCH)
def test_the_tables_of_torch_are_read_and_are_ours(name):
    kind, v, cases = TORCH[name]
    for p, m in cases:
        size = group_size(p, m) or 1
        rows = torch_rows(kind, p, m, v, microbatches_per_round=size, number_of_rounds=m // size)
        s = pipeline.read_schedule(cells(rows), costs=[1.0] * (p * v))
        assert (s.rows, s.pairs, s.stages) == (*made(name, p, m, v)[3:], made(name, p, m, v).stages)
