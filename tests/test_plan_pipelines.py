"""Plans with pp against the steps themselves: memory of every rank to the byte, messages, and composed rows."""

import functools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import ranks
from plan_cases import made
from test_plan_memory import flop, fullest, measured

import fzero
from fzero.planner import device_for, devices, pipeline_trace, with_layout
from fzero.planner.pipeline_report import layer_costs, layout_by_cost
from fzero.planner.plan_report import total_flop
from fzero.planner.step_trace import Transfer, trace_step
from fzero.run.measure.memory_timeline import COMPONENTS
from fzero.sharding import pipeline

FOUR = {"n_layers": 4}
ZB_V = {"schedule": "zb-v", "chunks": 2}
CASES = {
    "1f1b": made(mesh={"pp": 2}, parts=5, model={"n_layers": 2}),
    "gpipe": made("gpt2", mesh={"pp": 2}, zero=1, parts=4, model=FOUR, pipeline={"schedule": "gpipe", "layout": "3,1"}),
    "interleaved": made(
        mesh={"pp": 2}, parts=6, policy="bf16", model=FOUR, pipeline={"schedule": "interleaved", "chunks": 2}
    ),
    "stage 3": made(mesh={"pp": 2, "dp": 2}, zero=3, parts=4, model=FOUR, train_remat="full"),
    "experts": made("mixtral", mesh={"pp": 2, "dp": 2}, zero=2, parts=3),
    "tp": made("gpt2", mesh={"pp": 2, "tp": 2}, sequence=True, parts=3, model=FOUR),
    "pp4": made(mesh={"pp": 4}, zero=1, parts=6, model=FOUR),
    "delayed": made(mesh={"pp": 2}, parts=6, model={"n_layers": 2}, train_update="delayed", train_updates=3),
    "zb-h1": made(mesh={"pp": 2}, parts=5, model={"n_layers": 2}, pipeline={"schedule": "zb-h1"}),
    "zb-v": made(mesh={"pp": 2}, policy="bf16", parts=5, model=FOUR, pipeline=ZB_V),
    "zb-h2": made("gpt2", mesh={"pp": 4}, parts=8, model={**FOUR, "dropout": 0.1}, pipeline={"schedule": "zb-h2"}),
    "interleaved-zb": made(
        mesh={"pp": 2, "dp": 2}, zero=2, parts=6, model=FOUR, pipeline={"schedule": "interleaved-zb", "chunks": 2}
    ),
    "zb-v, stage 3": made(mesh={"pp": 2, "dp": 2}, zero=3, parts=4, model=FOUR, train_remat="full", pipeline=ZB_V),
    "resident": made(mesh={"pp": 2, "dp": 2}, zero=3, parts=6, model=FOUR, resident=1, pipeline=ZB_V, prefetch=0),
    "dualpipe-v": made(
        mesh={"pp": 4}, parts=9, model={"n_layers": 8}, pipeline={"schedule": "dualpipe-v", "chunks": 2}
    ),
}


@functools.cache
def results(name):
    config = CASES[name]
    n = math.prod(config.mesh.values())
    found = ranks.run(n, measured, {name: config}, mesh=dict(config.mesh), timeout_s=300)
    return [one[name] for one in found]


def tiered(cases, quick, later):
    """Of the cases one by default, some in the slow tier and the others when asked for."""
    marks = {
        name: [] if name == quick else pytest.mark.slow if name in later else pytest.mark.exhaustive for name in cases
    }
    return [pytest.param(name, marks=marks[name]) for name in cases]


@pytest.mark.parametrize("name", tiered(CASES, quick="zb-h1", later=("stage 3", "zb-v")))
def test_what_is_predicted_of_every_rank_is_measured(name):
    config = CASES[name]
    for rank, (timeline, at_rest, rows, counted, _) in enumerate(results(name)):
        trace, peak = trace_step(config, config.mesh, rank=rank), fullest(timeline)
        assert (trace.state, trace.state_elsewhere) == at_rest
        assert sorted(trace.ledger) == sorted(rows)
        assert flop(trace) == counted > 0
        assert trace.peak.bytes == peak.bytes, f"rank {rank}\n{peak}\n{trace.peak}"
        assert [(m.phase, m.layer) for m in trace.timeline] == [(m.phase, m.layer) for m in timeline]


LONG = {
    "1f1b": made(mesh={"pp": 2}, parts=9, model={"n_layers": 2}),
    "1f1b of 4": made(mesh={"pp": 4}, parts=9, model=FOUR),
    "uneven": made(mesh={"pp": 4}, zero=1, parts=12, model={"n_layers": 6}, pipeline={"layout": "1,2,2,1"}),
    "gpipe": made("gpt2", mesh={"pp": 2}, parts=8, model={**FOUR, "dropout": 0.1}, pipeline={"schedule": "gpipe"}),
    "interleaved": made(
        mesh={"pp": 4},
        parts=16,
        policy="bf16",
        model={"n_layers": 8},
        pipeline={"schedule": "interleaved", "chunks": 2},
    ),
    "stage 3": made(mesh={"pp": 4, "dp": 2}, zero=3, parts=8, model=FOUR, train_remat="full"),
    "stage 2": made("mixtral", mesh={"pp": 4, "dp": 2}, zero=2, parts=8, model={"n_layers": 8}),
    "once": made(mesh={"pp": 2, "dp": 2}, zero=1, parts=7, model=FOUR, reduce="once"),
    "zb-h1": made(mesh={"pp": 2}, parts=9, model={"n_layers": 2}, pipeline={"schedule": "zb-h1"}),
    "zb-h1, stage 3": made(
        mesh={"pp": 4, "dp": 2}, zero=3, parts=10, model={"n_layers": 8}, pipeline={"schedule": "zb-h1"}
    ),
    "zb-h1, tp": made(mesh={"pp": 2, "tp": 2}, parts=8, model=FOUR, sequence=True, pipeline={"schedule": "zb-h1"}),
    "zb-h2": made("gpt2", mesh={"pp": 4}, parts=14, model={**FOUR, "dropout": 0.1}, pipeline={"schedule": "zb-h2"}),
    "zb-v": made(mesh={"pp": 2}, parts=9, model=FOUR, pipeline=ZB_V),
    "zb-v of 4": made(mesh={"pp": 4}, policy="bf16", parts=16, model={"n_layers": 8}, pipeline=ZB_V),
    "interleaved-zb": made(
        mesh={"pp": 2, "dp": 2},
        zero=1,
        parts=10,
        model=FOUR,
        reduce="once",
        pipeline={"schedule": "interleaved-zb", "chunks": 2},
    ),
    "resident": made(mesh={"pp": 2, "dp": 2}, zero=3, parts=9, model=FOUR, resident=1),
    "resident, interleaved": made(
        mesh={"pp": 2, "dp": 2},
        zero=3,
        parts=16,
        model=FOUR,
        resident=1,
        pipeline={"schedule": "interleaved", "chunks": 2},
    ),
    "resident, zb-v": made(mesh={"pp": 2, "dp": 2}, zero=3, parts=12, model=FOUR, resident=1, pipeline=ZB_V),
    "dualpipe-v": made(
        mesh={"pp": 4}, parts=16, model={"n_layers": 8}, pipeline={"schedule": "dualpipe-v", "chunks": 2}
    ),
}


def passes(trace):
    """The moments until the last backward pass ends."""
    end = max(i for i, m in enumerate(trace.timeline) if m.phase == "backward")
    return [(m.phase, m.layer, m.bytes) for m in trace.timeline[: end + 1]]


@pytest.mark.parametrize("name", tiered(LONG, quick="1f1b", later=("zb-v",)))
def test_a_row_is_put_together_of_few_acts(name):
    config = LONG[name]
    found = pipeline_trace.trace(config, config.mesh)
    stride = math.prod(config.mesh.values()) // config.mesh["pp"]
    for pp, row in enumerate(found.ranks):
        whole = trace_step(config, config.mesh, rank=pp * stride)
        assert row.record.parts < found.schedule.parts
        assert row.peak_bytes == whole.peak.bytes
        made_up = pipeline_trace.assemble_trace(row, found.schedule, pp, config, pp * stride, "")
        assert sorted(made_up.ledger) == sorted(whole.ledger)
        assert (made_up.state, made_up.tokens, made_up.rank) == (whole.state, whole.tokens, whole.rank)
        assert (made_up.peak.phase, made_up.peak.bytes) == (whole.peak.phase, whole.peak.bytes)
        # By where it was freed a storage is one of activations or workspace, which the record of a split row may not
        # tell; the rest is equal.
        slack = 0.01 * whole.peak.bytes if any(act.kind == "W" for act in found.schedule.rows[pp]) else 0
        assert all(abs(made_up.peak.parts[c] - whole.peak.parts[c]) <= slack for c in COMPONENTS)
        assert total_flop(made_up) == flop(whole)
        assert passes(made_up) == passes(whole)
    assert len(found.ranks) == config.mesh["pp"]


@pytest.mark.slow
def test_the_schedule_is_played_with_the_times_of_acts():
    config = made(mesh={"pp": 4}, policy="bf16", parts=8, model={"n_layers": 8})
    report = fzero.plan(config)
    facts = report.pipeline
    f, b = (np.array([one[kind] for one in facts["acts_s"]]) for kind in "FB")
    assert (f > 0).all() and (b > 0).all() and b[3] > b[1]  # the head
    s = pipeline.schedule("1f1b", pipeline.layout([1.0] * 8, 4), 8)
    played = pipeline.play(s, {"F": list(f), "B": list(b)}, wire=facts["wire_s"])
    assert played.step == pytest.approx(facts["row_s"], rel=0.05)  # the first and last micro-batches differ
    assert sum(report.time["phases"].values()) + sum(report.time["exposed"].values()) == pytest.approx(report.step_s)
    assert [one["in_flight"] for one in facts["ranks"]] == [4, 3, 2, 1]
    assert report.peak_bytes_per_rank == max(one["peak_bytes"] for one in facts["ranks"])
    assert facts["layout"] == "2,2,2,2" and "pipeline: 1f1b of 4 ranks" in str(report)
    alone = fzero.plan(made(ranks=1, policy="bf16", parts=8, model={"n_layers": 8}))
    assert report.pass_flop_per_step == alone.pass_flop_per_step
    assert json.loads(report.to_json())["pipeline"]["ranks"][0]["layers"] == [2]


TWO = {"schedule": "interleaved", "chunks": 2}


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"mesh": {"pp": 5}}, "pp=5 with 1 chunk a rank has 5 stages, and the model has 4 layers"),
        ({"mesh": {"pp": 2}, "pipeline": {"layout": "3,2"}}, "layout 3,2 has 5 layers in 2 stages"),
        ({"mesh": {"pp": 4}, "parts": 11, "pipeline": TWO, "model": {"n_layers": 8}}, "10 or 12 would do"),
        ({"mesh": {"pp": 2}, "parts": 3, "pipeline": {"schedule": "dualpipe-v", "chunks": 2}}, "needs at least 4"),
    ],
)  # fmt: skip
def test_what_a_run_refuses_is_refused_before_anything_is_traced(wrong, said, monkeypatch):
    monkeypatch.setattr(pipeline_trace, "record_of", lambda *args: pytest.fail("traced"))
    with pytest.raises(ValueError, match=said) as error:
        pipeline_trace.trace(made(**{"model": FOUR, **wrong}), wrong["mesh"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_last_gradient_leaves_before_sums_over_data_ranks_are_waited_for(stage):
    """Else the stage before would wait for the sums of every stage behind it."""
    config = made(mesh={"pp": 2, "dp": 2}, zero=stage, parts=2, model={"n_layers": 2})
    transfers = [e for e in trace_step(config, config.mesh, rank=2).events if isinstance(e, Transfer)]
    sent = max(i for i, e in enumerate(transfers) if (e.kind, e.event, e.phase) == ("message", "start", "backward"))
    sums = ("psum", "psum_scatter")
    waited = [i for i, e in enumerate(transfers) if (e.axis, e.event) == ("dp", "wait") and e.kind in sums]
    assert len(waited) > 2 and sent < min(waited)


def test_the_layout_by_cost_counts_embedding_head_and_all_chunks_of_a_rank():
    s = pipeline.schedule("1f1b", pipeline.layout([1.0] * 32, 4), 8)
    acts = [{"F": 8.0, "B": 16.0}] * 3 + [{"F": 10.5, "B": 21.0}]
    cut = layout_by_cost(s, acts)
    assert [len(layers) for layers in cut.stages.layers] == [8, 9, 9, 6]
    assert cut.takes == pytest.approx(9 / 10.5)
    around = pipeline.schedule("zb-v", pipeline.layout([1.0] * 16, 2, 2, "v"), 8)
    split = [{"F": 4.0, "I": 5.0, "W": 3.0}] * 3 + [{"F": 6.0, "I": 7.5, "W": 4.5}]
    cut = layout_by_cost(around, split)  # the first rank has 4 + 4 layers, and a head as long as two
    first, second, third, last = (len(layers) for layers in cut.stages.layers)
    assert first + second + third + last == 16 and max(first, second, third, last + 2) == 5
    assert cut.takes == pytest.approx(max(first + last + 2, second + third) / 10)


WIDE = {"d_model": 1024, "d_ff": 2816, "vocab_size": 65536, "max_len": 2048, "n_layers": 6}  # a head as long as layers
HEAD = made(mesh={"pp": 2}, policy="bf16", parts=4, model=WIDE, data_seq_len=2048)


def test_layers_are_cut_by_their_own_seconds():
    """The costs are those of the acts of a plan; the plan by cost has the numbers that they give, and waits less."""
    device = devices.device("h100")
    costs, even = layer_costs(HEAD, HEAD.mesh, device), fzero.plan(HEAD)
    assert len(costs.layers) == 6 and costs.head > 2 * costs.layers[0] > 2 * costs.embed > 0
    first, last = (sum(acts.values()) for acts in even.pipeline["acts_s"])
    assert sum(costs.layers[:3]) + costs.embed == pytest.approx(first, rel=0.1)
    assert sum(costs.layers[3:]) + costs.head == pytest.approx(last, rel=0.1)
    by_cost = fzero.plan(HEAD, settings={"pipeline.layout": "cost"})
    cut = pipeline.split_layers(costs.layers, (0, 1), costs.embed, costs.head)
    named = ",".join(str(len(layers)) for layers in cut.layers)
    assert by_cost.pipeline["layout"] == by_cost.config.pipeline.layout == named != "3,3"
    assert max(one["busy_s"] for one in by_cost.pipeline["ranks"]) < max(
        one["busy_s"] for one in even.pipeline["ranks"]
    )
    assert by_cost.step_s < even.step_s


def test_layers_that_differ_have_costs_of_their_own():
    """Those of the two stacks of deepseek, the first one without experts, in the order of a forward pass."""
    config = made(policy="bf16", ranks=1, mesh={"pp": 2})
    config = replace(config, model=replace(fzero.models.preset("deepseek-tiny"), vocab_size=64, n_layers=3))
    costs = layer_costs(config, config.mesh, devices.device("h100"))
    assert config.model.n_dense == 1 and len(costs.layers) == 3
    assert costs.layers[0] < min(costs.layers[1:])


@pytest.mark.parametrize(
    "change, gpu, said",
    (
        ({"mesh": {"dp": 2}}, "h100", "layout is cost, and the mesh has no pp"),
        ({"pipeline": {"layout": "cost", "schedule": "0F0 0B0 \n 1F0 1B0"}}, "h100", "is a table; give it a line of"),
        ({"mesh": {"pp": 9}}, "h100", "pp=9 with 1 chunk a rank has 9 stages, and the model has 3 layers"),
        ({}, "here", "and the rates of this machine, not measured are unknown; run fzero bench"),
    ),
)
def test_a_layout_by_cost_that_cannot_be_is_one_line(change, gpu, said, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    config = made(**{"mesh": {"pp": 2}, "pipeline": {"layout": "cost"}, **change})
    with pytest.raises(ValueError, match=said) as error:
        with_layout(config, config.mesh, device_for(gpu))
    assert "\n" not in str(error.value)
