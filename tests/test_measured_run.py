"""What a run records of itself: time by phase and collective, norms by layer, ranks, ledger, memory, profile,
attempts."""

import gzip
import json
import math
import shlex
import time

import pytest
import ranks
import torch
from close import assert_close
from launched import torchrun, write_text
from zero_cases import OPTIMIZERS, batch_for, model_of

import fzero
from fzero import fp64, local_batch
from fzero.cli import main
from fzero.comm import Ledger
from fzero.core import pytree
from fzero.run import recipe, run_folder, steps_of
from fzero.run.measure import flops, norms, step_records
from fzero.run.measure.step_records import Named
from fzero.run.measure.timer import PHASES, Clock, Comm, Times
from fzero.sharding import feeds, pipeline, shapes_of
from fzero.sharding.pipeline import read_schedule, write_schedule

# -- the clock, by hand


class Hand(Clock):
    """A clock whose time, and whose wait for a disk, the test sets."""

    def __init__(self):
        self.time = self.disk = 0.0
        super().__init__(waited=lambda: self.disk)
        self.timestamp = lambda: self.time
        self.last = (0.0, 0.0)

    def pass_(self, seconds, disk=0.0):
        self.time += seconds
        self.disk += disk


def test_each_second_belongs_to_one_phase():
    clock, ledger = Hand(), Ledger()
    with ledger.watched(clock):
        clock.pass_(1)  # rest
        with ledger.phase("data"):
            clock.pass_(2)
        with ledger.phase("forward"):
            clock.pass_(4)
            with ledger.phase("backward"):  # a gather that is started ahead
                clock.start(7, "all_gather", "dp", "w", 96)
                clock.pass_(8)
            clock.wait(7)
            clock.pass_(16)
            clock.done(7)
            clock.pass_(32, disk=5)
        with ledger.phase("update"), ledger.phase("commit"):
            clock.pass_(64)
        with ledger.phase("evaluate"):
            with ledger.phase("forward"):
                clock.start(8, "psum", "tp", "w", 4)
            clock.wait(8)
            clock.pass_(128, disk=100)
            clock.done(8)
    times = clock.pop_times()
    expected = dict.fromkeys(PHASES, 0.0) | {
        "rest": 1,
        "data": 2,
        "forward": 4 + 8 + 32 - 5,
        "io": 5 + 64,
        "comm_exposed": 16,
        "evaluate": 128,
    }
    assert times == Times(255.0, expected, {"dp": Comm(16.0, 8.0)})
    assert times.busy == 1 + 39  # neither data nor waiting nor evaluating
    clock.pass_(3)
    assert clock.pop_times() == Times(3.0, dict.fromkeys(PHASES, 0.0) | {"rest": 3.0}, {})


def test_a_sum_in_two_halves_is_waited_for_twice():
    clock = Hand()
    clock.start(1, "psum", "dp", "w", 8)
    clock.pass_(1)
    clock.wait(1)
    clock.pass_(2)
    clock.done(1)
    clock.pass_(4)
    clock.wait(1)
    clock.pass_(8)
    clock.done(1)
    assert clock.pop_times().comm == {"dp": Comm(exposed=10.0, hidden=5.0)}


def test_a_stretch_is_read_when_the_next_one_is_under_way():
    clock = Hand()
    clock.pass_(1)
    with_phases = clock.cut()
    clock.phases = False  # of a step that is not measured
    clock.enter("evaluate")
    clock.pass_(2)
    clock.start(1, "psum", "dp", "w", 8)
    clock.wait(1)
    without = clock.cut()
    clock.phases = True
    clock.pass_(4)
    clock.leave("evaluate")
    clock.pass_(8)
    assert clock.read(with_phases).phases["rest"] == 1.0
    assert clock.read(without) == Times(2.0, {}, {})
    phases = clock.pop_times().phases
    assert (phases["evaluate"], phases["rest"]) == (4.0, 8.0)  # the phase was entered in a stretch that was not split


# -- norms and times of steps on meshes


def steps_on(mesh, stage, name, reduce="fast", late_s=0.0):
    """([(norms of gradients, norms of parameters, grad_norm, times, their least and most seconds)] of two steps, what
    ranks waited); the last rank is late in each."""
    model = model_of(name, dropout=0.0)
    plan = fzero.zero_plan(stage, model, mesh, reduce=reduce, policy=fp64())
    tx = OPTIMIZERS["adam"]
    state = fzero.init_state(model, tx, plan, seed=3)
    parts = 4 // mesh.data_size
    step = fzero.make_train_step(model, tx, plan, micro_batches=parts, execution=fzero.Execution(norms=True))
    clock, spent, out = Clock(), norms.RankTimes(), []
    with mesh.ledger.watched(clock):
        for i in range(3):
            begin = time.perf_counter()
            clock.pop_times()
            inside = time.perf_counter()
            with mesh.ledger.phase("metrics"):
                time.sleep(late_s if mesh.rank == mesh.size - 1 else 0.0)
            state, metrics = step(state, local_batch(batch_for(i, 24), mesh, parts))
            inside = time.perf_counter() - inside
            times, wall = clock.pop_times(), (inside, time.perf_counter() - begin)
            if i == 0:  # the ranks make sure that they run one program
                continue
            spent.add(times)
            grads = norms.segment_norms(
                norms.sums(metrics.squares), plan.opt, mesh, plan.trained(plan.like), float(metrics.factor)
            )
            params = norms.segment_norms(norms.of_params(state.params), plan.params, mesh, plan.like)
            out.append((grads, params, float(metrics.grad_norm), times, wall))
    return out, spent.gather(mesh)


def direct_norms(name):
    """The same of one process, from a gradient by torch.func.grad and the parameters themselves."""
    model, mesh = model_of(name, dropout=0.0), fzero.one_process()
    plan = fzero.zero_plan(0, model, mesh, policy=fp64())
    tx = OPTIMIZERS["adam"]
    state = fzero.init_state(model, tx, plan, seed=3)
    step = fzero.make_train_step(model, tx, plan, micro_batches=4)
    ctx = fzero.models.base.Ctx(dtype=torch.float64)

    def mean(params, batch):
        loss = fzero.models.forward.loss(model, params, batch, ctx)
        return loss.total / loss.num_tokens

    def by_part(tree):
        named = pytree.named_leaves(tree)
        square = lambda part, i=None: math.sqrt(  # noqa: E731
            sum(float((x if i is None else x[i]).square().sum()) for n, x in named.items() if n.startswith(f"{part}/"))
        )
        layers = next(x for n, x in named.items() if n.startswith("blocks/")).shape[0]
        return {
            "embed": square("embed"),
            "blocks": [square("blocks", i) for i in range(layers)],
            "head": square("head"),
        }

    out = []
    for i in range(3):
        batch = batch_for(i, 24)
        grads = by_part(torch.func.grad(mean)(state.params, batch))
        state, _ = step(state, batch)
        out.append((grads, by_part(state.params)))
    return out[1:]


@pytest.mark.parametrize(
    "n, sizes, stage, reduce",
    [(1, {}, 0, "fast"), (2, {"dp": 2}, 3, "fast"), (2, {"tp": 2}, 0, "fast"), (2, {"dp": 2}, 2, "canonical")],
)
def test_norms_and_times_of_steps(n, sizes, stage, reduce):
    name = "llama"
    run = steps_on(fzero.one_process(), stage, name, reduce) if n == 1 else None
    results = [run] if n == 1 else ranks.run(n, steps_on, stage, name, reduce, mesh=sizes)
    expected = direct_norms(name)
    for steps, _ in results:
        for (grads, params, norm, times, wall), (direct_grads, direct_params) in zip(steps, expected, strict=True):
            assert list(grads) == list(params) == ["embed", "blocks", "head"]
            for part in grads:
                assert_close(grads[part], direct_grads[part], rtol=1e-10, atol=1e-12)
                assert_close(params[part], direct_params[part], rtol=1e-10, atol=1e-12)
            flat = [grads["embed"], *grads["blocks"], grads["head"]]
            assert math.sqrt(sum(x * x for x in flat)) == pytest.approx(norm, rel=1e-12)
            assert (
                sum(times.phases.values()) == pytest.approx(times.wall, abs=1e-9)
                and 0 < wall[0] <= times.wall <= wall[1]
            )
            assert all(times.phases[name] > 0 for name in ("forward", "backward", "metrics", "update", "rest"))
            assert set(times.comm) == set(sizes)
            assert sum(comm.exposed for comm in times.comm.values()) == pytest.approx(
                times.phases["comm_exposed"], abs=1e-9
            )
            assert all(comm.hidden > 0 and comm.exposed > 0 for comm in times.comm.values())


def test_norms_without_a_leaf_or_a_number():
    mesh, like = (
        fzero.one_process(),
        {"embed": {"w": torch.zeros(2)}, "blocks": {"a": torch.zeros(2, 3)}, "head": {"w": torch.zeros(1)}},
    )
    specs = pytree.map(lambda leaf: fzero.sharding.Spec(), like)
    here = {"blocks": {"a": torch.tensor([[3.0, 0, 4.0], [math.inf, 0, 0]])}, "head": {"w": torch.tensor([2.0])}}
    found = norms.segment_norms(norms.of_params({**here, "embed": {"w": "on a disk"}}), specs, mesh, like, 2.0)
    assert found == {"blocks": [10.0, None], "embed": None, "head": 4.0}


def test_a_late_rank_is_the_straggler():
    results = ranks.run(2, steps_on, 3, "llama", "fast", 0.3)
    assert results[0][1] == results[1][1]
    said = results[0][1]
    assert said["steps"] == 2 and said["straggler"] == 1 and said["behind"] > norms.BEHIND
    assert (
        said["busy_s"][1] > 0.6 and said["comm_s"][0] > said["comm_s"][1] and said["comm_s"][0] > 0.3
    )  # rank 0 waits for it


def test_who_is_slowest():
    assert norms.find_straggler([3.0]) == (None, 1.0)
    assert norms.find_straggler([1.0, 1.04]) == (None, 1.04)
    assert norms.find_straggler([1.0, 2.0, 1.1, 0.9]) == (1, 2.0)


# -- the command


TINY = shlex.split(
    "--model mlp-tiny --batch 4 --micro-batch 2 --seq-len 16 --data text.txt --peak-tflops 1 --prompt ''"
)
TINY += shlex.split(
    "--set train.compiled=false --set precision.policy=fp32 --set precision.fp32_matmul=default --set "
    "train.eval_every=4"
)
TINY += shlex.split("--set train.measure_every=3 --set train.eval_batches=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one process, stopped once and resumed, with a profile."""
    path = tmp_path_factory.mktemp("measured")
    write_text(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for args in (
            [*TINY, "--steps", "12", "--stop-at", "9", "--profile", "2-3"],
            ["--resume", "--peak-tflops", "1", "--prompt", ""],
        ):
            with pytest.raises(SystemExit) as ended:
                main.main(["pretrain", *args, "--out", "run"])
            assert ended.value.code == 0
    return path / "run"


def test_a_row_adds_up(run):
    rows = list(run_folder.read_metrics(run))
    assert len(rows) == 12
    for row in rows:
        assert list(row["phases"]) == list(PHASES) and sum(row["phases"].values()) == pytest.approx(
            row["wall_s"], abs=1e-6
        )
        evaluated = row["phases"]["evaluate"]
        assert (evaluated > 0) == ("val_loss" in row) and row["step_s"] <= row["wall_s"] and row["comm"] == {}
        assert (
            row["data_s"] >= row["phases"]["data"] - 1e-4 and row["phases"]["forward"] > 0 < row["phases"]["backward"]
        )
        assert ("grad_norms" in row) == ("ranks" in row) == ("param_norms" in row) == (row["step"] % 3 == 0)
        assert (
            row["mfu_causal"] == row["mfu"] == row["hfu"] == row["hfu_causal"]
        )  # it has no attention, and recomputes nothing
    assert {row["step"]: row["recorded"] for row in rows if "recorded" in row} == {
        2: "profile",
        3: "profile",
        8: "memory",
    }
    assert [row["ranks"]["steps"] for row in rows if "ranks" in row] == [1, 3, 2, 3]  # without those that were recorded
    assert rows[9]["phases"]["checkpoint"] < rows[9]["wall_s"]
    for row in rows:
        if "grad_norms" in row:
            flat = [row["grad_norms"]["embed"], *row["grad_norms"]["blocks"], row["grad_norms"]["head"]]
            assert math.sqrt(sum(x * x for x in flat)) == pytest.approx(row["grad_norm"], rel=1e-5)


def test_attempts_are_lines(run):
    first, second = run_folder.read_attempts(run)
    assert (first["attempt"], first["first_step"], second["attempt"], second["first_step"]) == (1, 0, 2, 9)
    assert first["mesh"]["dp"] == first["processes"] == 1 and first["peak_flops"] == 1e12 and not first["peak_measured"]
    assert first["commit"] == "" or len(first["commit"]) == 40
    assert (
        first["config"]["data"]["seq_len"] == 16
        and first["tokens_per_step"] == 64
        and len(first["machine"]["host"]) == 12
    )
    assert first["config_sha256"] == second["config_sha256"]


def test_the_memory_of_a_step(run):
    said = json.loads((run / step_records.MEMORY).read_text())
    assert (said["attempt"], said["step"], said["rank"]) == (1, 8, 0)
    start, peak = said["timeline"][0], said["peak"]
    params = sum(
        leaf.numel() for leaf in pytree.leaves(shapes_of(fzero.models.build(run_folder.read_config(run).model)))
    )
    assert start["parts"]["params"] == said["state"]["params"] == 4 * params
    assert peak["bytes"] == max(moment["bytes"] for moment in said["timeline"]) > start["bytes"]
    assert all(sum(moment["parts"].values()) == moment["bytes"] for moment in said["timeline"])
    assert {"forward", "backward", "update"} <= {moment["phase"] for moment in said["timeline"]}
    assert (
        peak["bytes"] < said["rss_peak_bytes"] and said["allocator_peak_bytes"] is None
    )  # only a GPU's allocator counts its peak


def nested(events):
    """Raise AssertionError where two ranges of a thread overlap and neither holds the other."""
    open_ranges = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while open_ranges and open_ranges[-1]["ts"] + open_ranges[-1]["dur"] <= event["ts"]:
            open_ranges.pop()
        end = event["ts"] + event["dur"]
        assert not open_ranges or end <= open_ranges[-1]["ts"] + open_ranges[-1]["dur"] + 1e-3, event["name"]
        open_ranges.append(event)


def named_ranges(path):
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    assert "host_name" not in trace
    return trace["traceEvents"], [e for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]


def test_the_profile_names_the_phases(run):
    events, named = named_ranges(run / "trace.json.gz")
    nested(named)
    names = {event["name"] for event in named}
    assert {
        "step 2",
        "step 3",
        "data",
        "forward",
        "forward embed",
        "forward blocks/1",
        "backward blocks/0",
        "metrics",
        "update",
    } <= names
    assert "step 1" not in names and "step 4" not in names
    steps = [event for event in named if event["name"].startswith("step ")]
    for event in named:
        if event["name"] in ("forward", "backward", "update"):
            assert any(s["ts"] <= event["ts"] and event["ts"] + event["dur"] <= s["ts"] + s["dur"] for s in steps)
    assert any(event.get("cat") == "cpu_op" and event["name"] == "aten::mm" for event in events)


def test_which_steps_are_recorded():
    assert step_records.select_steps(10, 100, True) == step_records.StepSelection(12, 18, (0, 0))
    assert step_records.select_steps(10, 11, True) == step_records.StepSelection(11, 0, (0, 0))
    assert step_records.select_steps(0, 100, False, (3, 5)) == step_records.StepSelection(0, 0, (3, 5))
    assert (
        step_records.select_steps(0, 100, True, (7, 9)).memory == 10
        and step_records.select_steps(0, 9, True, (7, 9)).memory == 0
    )
    assert [step_records.StepSelection(2, 8, (3, 4)).recorder_of(i) for i in (0, 2, 3, 4, 8)] == [
        "",
        "",
        "profile",
        "profile",
        "memory",
    ]
    assert steps_of("3-5", 10) == (13, 15) and steps_of("4", 0) == (4, 4)
    for wrong in ("", "5-3", "0-2", "a", "2-", "-2"):
        with pytest.raises(ValueError, match="is not of the form FROM-TO"):
            steps_of(wrong, 0)


@pytest.mark.slow
def test_the_passes_of_a_pipeline_of_two_ranks_are_recorded(tmp_path):
    """By the order of what they need, over both ranks' clocks: what a message carries begins behind its sender's
    end."""
    write_text(tmp_path)
    layers = recipe("mlp-tiny").model.n_layers
    text = write_schedule(pipeline.schedule("1f1b", pipeline.layout([1.0] * layers, 2), parts=2))
    (tmp_path / "mine.txt").write_text(text)
    torchrun(tmp_path, 2, *TINY, "--mesh", "pp=2", "--schedule", "mine.txt", "--steps", 3, "--out", "run")
    assert run_folder.read_config(tmp_path / "run").pipeline.schedule == text
    rows = list(run_folder.read_metrics(tmp_path / "run"))
    assert [len(row["grad_norms"]["blocks"]) for row in rows if "grad_norms" in row] == [layers]
    record = json.loads((tmp_path / "run" / "pipeline.json").read_text())
    assert (record["step"], record["schedule"]) == (3, text)
    s, when = read_schedule(text), {}
    for row, start, end in zip(s.rows, record["start"], record["end"], strict=True):
        when |= dict(zip(row, zip(start, end, strict=True), strict=True))
        moments = [moment for pair in zip(start, end) for moment in pair]
        assert moments == sorted(moments) and moments[0] > 0
    for source, target in feeds(s).items():
        # A receive may end while the act behind the send has begun: both are within the sender's next act.
        assert when[target][0] > when[source][0], (source, target)
    assert sum(rows[2]["phases"].values()) >= max(record["end"][0]) - record["start"][0][0]


@pytest.mark.slow
def test_what_is_recorded_of_two_ranks(tmp_path):
    write_text(tmp_path)
    torchrun(tmp_path, 2, "--zero", 3, *TINY, "--steps", 8, "--profile", "3", "--out", "run")
    run = tmp_path / "run"
    rows = list(run_folder.read_metrics(run))
    for row in rows:
        assert set(row["comm"]) == {"dp"}
        assert row["comm"]["dp"]["exposed"] == pytest.approx(row["phases"]["comm_exposed"], abs=1e-9)
    said = rows[5]["ranks"]
    assert [len(said[name]) for name in norms.COLUMNS] == [2] * 4 and said["steps"] == 2 + (
        rows[2]["ranks"]["steps"] == 2
    )
    (attempt,) = run_folder.read_attempts(run)
    assert attempt["processes"] == 2 and attempt["zero"] == 3 and attempt["mesh"]["dp"] == 2
    # The ledger of a step is what the same step on a mesh of fake ranks enters, to the byte.
    ledger = json.loads((run / step_records.LEDGER).read_text())
    assert (ledger["step"], ledger["rank"]) == (2, 0) and "rms_norm=" in ledger["kernels"]
    program = fzero.run.setup.build.build(run_folder.read_config(run), fzero.sharding.fake_mesh({"dp": 2}))
    assert ledger["rows"] == [row._asdict() for row in planned_rows(program)]
    events, named = named_ranges(run / "trace.json.gz")
    nested(named)
    assert "wait dp" in {event["name"] for event in named}
    begun, ended = ({e["id"]: e for e in events if e.get("ph") == ph and e.get("cat") == "dp"} for ph in "be")
    step = next(event for event in named if event["name"] == "step 3")
    assert begun.keys() == ended.keys() and begun
    for number, event in begun.items():
        assert event["name"].startswith(("all_gather ", "psum_scatter ", "psum ", "all_to_all "))
        assert event["ts"] <= ended[number]["ts"] and step["ts"] - 1e3 <= event["ts"] <= step["ts"] + step["dur"] + 1e3


def planned_rows(program):
    """The rows of a step on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    t, length = program.config.train, program.config.data.seq_len
    with FakeTensorMode(allow_non_fake_inputs=True):
        micro_batches = fzero.run.setup.build.local_micro_batches(program.config, program.mesh)
        skip, execution = fzero.Skip(nonfinite=False), fzero.Execution(norms=True)
        step = fzero.make_train_step(
            program.model, program.tx, program.plan, skip=skip, execution=execution, micro_batches=micro_batches
        )
        rows = t.batch // program.mesh.data_size
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        batch = {"tokens": tokens, "targets": tokens, "mask": tokens > 0, "documents": tokens}
        if not program.config.data.within_documents:
            del batch["documents"]
        step(fzero.run.setup.build.first_state(program), batch)
    return program.mesh.ledger.rows()


# -- what else


def test_named_ranges_close_in_order():
    named, entered = Named(), []
    named._push = lambda kind, name: (entered.append(name), named.ranges.append((kind, name, None)))
    named._pop = lambda: named.ranges.pop()[0]
    ledger = Ledger()
    with ledger.watched(named), ledger.phase("forward"):
        ledger.reach("embed", None)
        ledger.reach("blocks", 0)
        with ledger.phase("reduce"):
            pass
        ledger.reach("blocks", 1)
        assert [name for _, name, _ in named.ranges] == ["forward", "forward blocks/1"]
    assert named.ranges == [] and entered == [
        "forward",
        "forward embed",
        "forward blocks/0",
        "reduce",
        "forward blocks/1",
    ]


def test_flops_of_what_is_computed_again():
    table = {"preset": "llama-tiny", "train": {"compiled": False, "steps": 1}, "precision": {"policy": "fp32"}}
    table |= {
        "model": {"n_layers": 2, "d_model": 64, "d_ff": 128, "n_heads": 4, "n_kv_heads": 2},
        "data": {"seq_len": 32},
    }
    programs = {
        remat: fzero.run.setup.build.build(
            fzero.run.config.config_table.apply_table(
                fzero.run.config.config_table.from_table(table), {"train": {"remat": remat}}
            )
        )
        for remat in ("none", "full")
    }
    counts = {remat: flops.token_flop(program) for remat, program in programs.items()}
    none, full = counts["none"], counts["full"]
    assert none.hardware == none.model == full.model and none.hardware_causal == none.model_causal == full.model_causal
    c, like = programs["full"].model.config, pytree.named_leaves(programs["full"].plan.like)
    layers, width = (
        sum(leaf.numel() for name, leaf in like.items() if name.startswith("blocks/")),
        c.n_layers * 32 * c.d_model,
    )
    assert (
        full.hardware - full.model == 2 * layers + 4 * width
        and full.hardware_causal - full.model_causal == 2 * layers + 2 * width
    )
