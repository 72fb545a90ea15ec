"""Plans with pp against the steps themselves: memory of every rank to the byte, messages, and composed rows."""

import functools

import pytest
import ranks
from plan_cases import made
from test_plan_memory import flop, fullest, measured

from fzero.planner.step_trace import trace_step

FOUR = {"n_layers": 4}
CASES = {
    "1f1b": made(mesh={"pp": 2}, parts=5, model=FOUR),
    "gpipe": made("gpt2", mesh={"pp": 2}, zero=1, parts=4, model=FOUR, pipeline={"schedule": "gpipe", "layout": "3,1"}),
    "interleaved": made(
        mesh={"pp": 2}, parts=6, policy="bf16", model=FOUR, pipeline={"schedule": "interleaved", "chunks": 2}
    ),
    "stage 3": made(mesh={"pp": 2, "dp": 2}, zero=3, parts=4, model=FOUR, train_remat="full"),
    "experts": made("mixtral", mesh={"pp": 2, "dp": 2}, zero=2, parts=3),
    "tp": made("gpt2", mesh={"pp": 2, "tp": 2}, sequence=True, parts=3, model=FOUR),
    "pp4": made(mesh={"pp": 4}, zero=1, parts=6, model=FOUR),
}


@functools.cache
def results(name):
    config = CASES[name]
    n = 4 if name not in ("1f1b", "gpipe", "interleaved") else 2
    found = ranks.run(n, measured, {name: config}, mesh=dict(config.mesh), timeout_s=300)
    return [one[name] for one in found]


@pytest.mark.parametrize("name", CASES)
def test_what_is_predicted_of_every_rank_is_measured(name):
    config = CASES[name]
    for rank, (timeline, at_rest, rows, counted, _) in enumerate(results(name)):
        trace, peak = trace_step(config, config.mesh, rank=rank), fullest(timeline)
        print(rank, trace.peak.bytes, peak.bytes)
        assert (trace.state, trace.state_elsewhere) == at_rest
        assert sorted(trace.ledger) == sorted(rows)
        assert flop(trace) == counted > 0
        assert trace.peak.bytes == peak.bytes, f"rank {rank}\n{peak}\n{trace.peak}"
        assert [(m.phase, m.layer) for m in trace.timeline] == [(m.phase, m.layer) for m in timeline]
