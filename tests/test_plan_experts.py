"""Plans of a mesh with ep: states by the closed form, uneven experts, and the search over ep."""

import json
import math
from dataclasses import replace

import pytest
import ranks
from plan_cases import made
from test_plan_memory import flop, fullest, measured

import fzero
from fzero import models
from fzero.planner import closed_forms, closed_layer, devices, estimate, pipeline_trace, search_result
from fzero.planner.devices import Loads
from fzero.planner.estimate import Candidate, candidates
from fzero.planner.plan_report import total_flop
from fzero.planner.step_trace import trace_step
from fzero.run import build, config_table, machine, segment_numels
from fzero.run.measure.flops import token_flop
from fzero.run.measure.memory_check import numel

H100 = devices.device("h100")
SIZES = {"d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 128, "n_experts": 8, "top_k": 2}
SMALL = {
    "preset": "mixtral-tiny",
    "model": SIZES,
    "train": {"batch": 16, "micro_batch": 2, "compiled": False},
    "precision": {"policy": "bf16"},
    "optim": {"name": "adamw"},
}
LARGE = {**SMALL, "model": {**SIZES, "d_model": 2048, "d_ff": 8192, "n_heads": 16}, "data": {"seq_len": 1024}}
SEARCHED = {**SMALL, "train": {"batch": 16, "compiled": False}}  # without what a search decides
MESH = {"dp": 2, "ep": 4}


@pytest.mark.parametrize("zero", [pytest.param(zero, marks=pytest.mark.exhaustive) for zero in (0, 1, 2)] + [3])
def test_states_by_the_closed_form_are_those_of_the_plan(zero):
    model = models.build(replace(models.preset("mixtral-tiny"), **SIZES))
    plan = fzero.zero_plan(zero, model, fzero.fake_mesh(MESH), policy="bf16")
    found = estimate.estimate_model_states(model.config, MESH, zero=zero)
    assert (found.params, found.grads) == (2 * numel(plan, plan.params), 2 * numel(plan, plan.grads))
    assert (found.master, found.optimizer) == (4 * numel(plan, plan.opt), 8 * numel(plan, plan.opt))
    if zero == 3:  # a layer with a rank's own experts
        assert found.layer_bytes == 2 * max(segment_numels(plan).values())


def test_a_number_of_parameters_has_no_experts_to_split():
    with pytest.raises(ValueError, match="ep=2: of 1000 parameters those of experts are not known; give a model"):
        estimate.estimate_model_states(1000, {"ep": 2})


def uneven_device(factor):
    return replace(H100, loads=Loads(factor))


# ---- traces ----------------------------------------------------------------------------------------------------------

TRACED = {
    "gather": made("mixtral", mesh={"ep": 2}, zero=3, experts="gather"),
    "exchange": made("mixtral", mesh={"ep": 2}, zero=2, experts="exchange:2"),
    "pp": made("mixtral", mesh={"pp": 2, "ep": 2}, zero=1, parts=3, experts="exchange:2", model={"n_layers": 4}),
    "dp": made("mixtral", mesh={"dp": 2, "ep": 2}, zero=3, experts="exchange:2", train_remat="full"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name != "pp")) for name in TRACED]
)
def test_what_is_predicted_of_a_step_over_ep_is_measured(name):
    """To the byte; what an exchange sends depends on the choices, and the plan has an even load."""
    config = TRACED[name]
    found = ranks.run(math.prod(config.mesh.values()), measured, {name: config}, mesh=dict(config.mesh), timeout_s=300)
    for rank, one in enumerate(found):
        timeline, at_rest, rows, counted, _ = one[name]
        trace = trace_step(config, config.mesh, rank=rank)
        assert (trace.state, trace.state_elsewhere) == at_rest
        assert trace.peak.bytes == fullest(timeline).bytes
        known = [[row for row in ledger if row.collective != "exchange_rows"] for ledger in (trace.ledger, rows)]
        assert sorted(known[0]) == sorted(known[1]) and 0 < flop(trace) < counted
        rows_of = [sum(r.calls for r in ledger if r.collective == "exchange_rows") for ledger in (trace.ledger, rows)]
        assert rows_of[0] == rows_of[1] and (name == "gather") == (rows_of[0] == 0)


@pytest.mark.exhaustive
def test_a_row_over_ep_is_put_together_of_few_acts():
    config = made("mixtral", mesh={"pp": 4, "ep": 2}, zero=2, parts=8, model={"n_layers": 8}, experts="exchange:2")
    found = pipeline_trace.trace(config, config.mesh)
    for pp, row in enumerate(found.ranks):
        whole = trace_step(config, config.mesh, rank=2 * pp)
        assert row.record.parts < found.schedule.parts and row.peak_bytes == whole.peak.bytes
        made_up = pipeline_trace.assemble_trace(row, found.schedule, pp, config, 2 * pp, "")
        assert sorted(made_up.ledger) == sorted(whole.ledger) and total_flop(made_up) == flop(whole)


# ---- uneven experts --------------------------------------------------------------------------------------------------


def test_the_fullest_rank_over_the_mean_by_hand():
    shares = ((0.4, 0.1, 0.3, 0.2), (0.25, 0.25, 0.25, 0.25))
    assert Loads(shares=shares).imbalance(2) == 1.0  # 0.5 and 0.5 in both layers
    assert Loads(shares=shares).imbalance(4) == pytest.approx((4 * 0.4 + 1.0) / 2)
    assert Loads(1.5).imbalance(8) == 1.5 and Loads(1.5).imbalance(1) == 1.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.9", "imbalance is 0.9; the fullest rank over the mean is finite and at least 1"),
        ("nowhere", "imbalance is 'nowhere': no number and no folder of a run; write 1.2, for example"),
    ],
)
def test_another_imbalance_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        Loads.parse(text)


def test_shares_that_ep_does_not_divide_are_refused():
    with pytest.raises(ValueError, match="imbalance: ep=2 does not divide the 3 experts of the shares; give a factor"):
        Loads(shares=((0.5, 0.25, 0.25),)).imbalance(2)


def test_others_wait_for_the_fullest_experts():
    """Products of experts and exchanged rows take longer by the factor, and nothing else does."""
    even, uneven = (fzero.plan(LARGE, MESH, gpu=uneven_device(factor)) for factor in (1.0, 1.5))
    assert uneven.peak_bytes_per_rank == even.peak_bytes_per_rank and uneven.comm == even.comm
    kinds, before = uneven.time["kinds"], even.time["kinds"]
    assert {name for name in kinds if kinds[name] != pytest.approx(before[name])} == {"gemm"}
    assert uneven.time["exposed"]["ep"] > even.time["exposed"]["ep"]
    assert uneven.step_s > even.step_s
    assert "experts: in each layer the fullest rank of ep has 1.5 times the mean rows" in str(uneven)


@pytest.mark.exhaustive
def test_an_imbalance_that_an_exchange_has_no_room_for_is_refused():
    with pytest.raises(
        ValueError, match=r"imbalance 3: the fullest rank of ep=4 is sent so many times.*exchange:2 has"
    ):
        fzero.plan(SMALL, MESH, gpu=uneven_device(3.0))
    assert fzero.plan(SMALL, MESH, gpu=uneven_device(3.0), settings={"experts": "gather"}).fits


@pytest.mark.exhaustive
def test_a_run_s_record_is_taken(tmp_path, fz):
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0, "experts": {"blocks": {"load": [[0.5, 0.2, 0.2, 0.1]]}}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Loads.parse(str(tmp_path)).imbalance(2) == pytest.approx(1.4)
    flags = ["--model", "mixtral-tiny", "--mesh", "ep=2", "--batch", "8", "--set", "train.compiled=false", "--json"]
    code, out, _ = fz("plan", *flags, "--imbalance", str(tmp_path))
    assert code == 0 and "experts: in each layer the fullest rank of ep has 1.4 times" in " ".join(
        json.loads(out)["notes"]
    )
    code, _, err = fz("plan", *flags, "--imbalance", "0.5")
    assert code == 2 and "imbalance is 0.5" in err and err.count("\n") == 1


# ---- the search ------------------------------------------------------------------------------------------------------

FEW = {"train.remat": ("none",), "offload": ("",), "zero": (3,), "train.micro_batch": (1,), "pipeline": ("1f1b",)}


def test_candidates_have_ep_where_it_divides_the_experts():
    c = config_table.from_table(SEARCHED)
    every = list(candidates(c, 8, 8, FEW))
    assert {x.ep for x in every} == {1, 2, 4, 8} and all(x.pp * x.dp * x.rp * x.ep * x.tp == 8 for x in every)
    assert any(x.ep == 2 and x.pp == 2 and x.tp == 2 for x in every), "EP x PP x TP"
    assert all(x.rp == 1 for x in every if x.ep > 1)
    assert {x.ep for x in candidates(replace(c, model=models.preset("llama-tiny")), 8, 8, FEW)} == {1}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [{"dp": 2, "ep": 4}, {"ep": 8}])
def test_a_sketch_is_near_the_trace(mesh):
    config = machine.resolve_auto(config_table.from_table(LARGE), H100.target)
    c = Candidate(mesh.get("dp", 1), 1, 1, 3, "none", "", 2, ep=mesh["ep"])
    sketch = closed_forms.sketch_candidate(closed_layer.Basis(config, H100, 8), c)
    report = fzero.plan(c.apply_to(config), c.mesh)
    assert sketch.bytes == pytest.approx(report.peak_bytes_per_rank, rel=0.4)
    assert sketch.step_s == pytest.approx(report.step_s, rel=0.5)
    assert sketch.time["communication on ep"] == pytest.approx(report.time["exposed"]["ep"], rel=0.5)
    slow = closed_forms.sketch_candidate(closed_layer.Basis(config, uneven_device(1.5), 8), c)
    assert slow.step_s > sketch.step_s and slow.memory == sketch.memory


@pytest.mark.exhaustive
def test_a_search_finds_a_mesh_with_ep():
    found = fzero.search(SEARCHED, 4, choices={**FEW, "mesh.ep": (4,), "mesh.pp": (1,)}, top=1, gpu=uneven_device(1.2))
    best = found.best[0]
    assert best.candidate.ep == 4 and found.config.mesh == {"ep": 4} and "ep=4" in str(found)
    assert any("1.2 times the mean rows" in note for note in best.report.notes)
    assert search_result.choices(best.candidate)["ep"] == "ep=4"
    with pytest.raises(ValueError, match="no candidate has room for this imbalance"):
        fzero.search(SEARCHED, 4, choices={**FEW, "mesh.ep": (4,), "mesh.pp": (1,)}, top=1, gpu=uneven_device(3.0))


def test_the_part_of_experts_is_that_of_the_counted_flops():
    config = config_table.from_table({"preset": "mixtral-8x7b", "mesh": {"ep": 8}})
    config = machine.resolve_auto(config, H100.target)
    job, c = build.build(config, fzero.fake_mesh({"ep": 8})), config.model
    mine = 6 * c.top_k * c.d_model * c.d_ff  # a token's: three products
    rest = 2 * (2 * c.d_model**2 + 2 * c.d_model * c.d_model * c.n_kv_heads // c.n_heads)
    rest += 2 * (8 + 2) * c.d_model  # the router, and two norms
    attention = 2 * config.data.seq_len * c.d_model  # causal: half of queries by keys, and by values
    assert token_flop(job).experts == pytest.approx(mine / (mine + rest + attention), rel=1e-6)
