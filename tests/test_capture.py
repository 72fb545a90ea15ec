"""Steps as CUDA graphs on the pretend GPU (pretend_graph.py): with the bits of issued ones, whatever moves from step to
step; refused where the host takes part; and faults that are planted are found."""

import contextlib
import functools
import gc

import pretend_nccl
import pytest
import ranks
import torch
from pretend_gpu import Event, pretend

import fzero
from fzero import init_state, models, optim
from fzero.core import gpu, gpu_copies, precision, pytree
from fzero.planner.plan_text import duration, size
from fzero.train import capture

SIZES = {"vocab_size": 64, "max_len": 16, "d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 32}


def batches(device, number, rows=4):
    """Batches of other tokens for each step."""
    for i in range(number):
        tokens = torch.randint(0, 64, (rows, 8), generator=torch.Generator().manual_seed(i))
        yield {"tokens": tokens.to(device), "targets": tokens.roll(-1, 1).to(device)}


def make(
    device, how="auto", *, policy=None, ema=False, micro_batches=2, remat="none", dropout=0.0, clip=True, **options
):
    """(the state, the step) of a tiny GPT-2 under a schedule."""
    model = models.build(models.GPT2Config(**SIZES, dropout=dropout))
    plan = fzero.zero_plan(
        0, model, options.pop("mesh", None) or fzero.one_process(), policy=policy or precision.fp32()
    )
    tx = optim.adamw(optim.warmup_cosine(3e-3, 3, 100), weight_decay=0.1, impl="reference")
    tx = optim.chain(optim.clip_by_global_norm(0.5), tx) if clip else tx
    tx = optim.with_average(tx, 0.9) if ema else tx
    execution = fzero.Execution(remat=remat, kernels="reference", capture=how, norms=options.pop("norms", False))
    step = fzero.make_train_step(model, tx, plan, micro_batches=micro_batches, execution=execution, **options)
    return init_state(model, tx, plan, seed=0, device=device), step


def host(tree):
    return {name: leaf.to("cpu", copy=True) for name, leaf in pytree.named_leaves(tree).items()}


def run(state, step, given, seen=None):
    """(what each step reports, the state at the end), on the host; `seen` counts the last step alone."""
    out, given = [], [*given]
    for i, batch in enumerate(given):
        if seen is not None and i == len(given) - 1:
            seen.waits.clear()
            seen.kernels.clear()
        state, metrics = step(state, batch)
        if seen is not None and i == len(given) - 1:
            assert not seen.waits and sum(seen.kernels.values()) < 12  # the batch, the graph, the metrics
        out.append((metrics.loss, metrics.grad_norm, metrics.skipped, metrics.loss_scale))
    return [[float(x) for x in row] for row in out], host(state)


def same(a, b):
    """Whether two results of `run` have the same bits."""
    return repr(a[0]) == repr(b[0]) and a[1].keys() == b[1].keys() and all(torch.equal(a[1][n], b[1][n]) for n in b[1])


@pytest.fixture(autouse=True)
def few_steps_before(monkeypatch):
    monkeypatch.setattr(capture, "WARM_UP", 1)


CASES = {
    "dropout, schedule, clip": {"dropout": 0.1, "micro_batches": 1},
    "accumulation, remat, average, norms": {"remat": "full", "ema": True, "norms": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_captured_steps_have_the_bits_of_issued_ones(case):
    steps = 7
    expected = run(*make("cpu", **CASES[case]), batches("cpu", steps))
    with pretend() as seen:
        state, step = make("cuda", **CASES[case])
        found = run(state, step, batches("cuda", steps), seen)
        gc.collect()
        (recorded,) = step.recorded.values()
        assert recorded.graph.replays == steps - 2 and recorded.fixed.keys() < expected[1].keys()
        assert all(name.split("/")[0] not in ("params", "master") for name in recorded.fixed)
    assert same(found, expected)
    assert not seen.races and not seen.freed


# ---- several ranks


def of_ranks(mesh):
    """Of this rank: (whether captured steps have the bits of the CPU's; whether both sent the same bytes; replays;
    races; what is said). Of four ranks those of issued steps: a collective library adds four in an order of its own.
    """
    model = models.build(models.LlamaConfig(**SIZES, n_kv_heads=2))

    def train(mesh, device, how="auto"):
        plan = fzero.zero_plan(3, model, mesh)
        tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, impl="reference"))
        execution = fzero.Execution(kernels="reference", capture=how)
        step = fzero.make_train_step(model, tx, plan, execution=execution)
        given = [pytree.map(lambda x: x.chunk(mesh.data_size)[mesh.data_rank], batch) for batch in batches(device, 4)]
        found = run(init_state(model, tx, plan, seed=0, device=device), step, given)
        sent = [row for row in mesh.ledger.rows() if row.phase in ("forward", "backward", "reduce", "update")]
        mesh.ledger.clear()
        return found, sent, step

    capture.WARM_UP = 1  # of this rank's process
    expected, messages, _ = train(mesh, "cpu")
    if mesh.data_size > 2:
        with pretend(), pretend_nccl.nccl():
            expected, messages, _ = train(pretend_nccl.on_gpus(mesh), "cuda", "off")
    with pretend() as seen, pretend_nccl.nccl():
        found, again, step = train(pretend_nccl.on_gpus(mesh), "cuda")
        (recorded,) = step.recorded.values()
        replays = recorded.graph.replays
    return same(found, expected), messages == again and len(messages) > 5, replays, dict(seen.races), step.news


@pytest.mark.parametrize(
    "number", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.exhaustive)]
)
def test_ranks_capture_their_messages(number):
    for right, sent, replays, races, news in ranks.run(number, of_ranks, mesh={"dp": number}, timeout_s=600.0):
        assert right and sent and replays == 2 and not races and "steps are captured" in news[0]


# ---- what is refused, and what ends a capture: on a loss of two operators


def small(device, how="auto", loss=None, policy=None, **options):
    """(the state, the step) of a plain loss function."""

    def plain(params, batch):
        return (batch["x"].to(params["w"].dtype) @ params["w"]).square().sum(), batch["x"].shape[0]

    params = {"w": torch.arange(1.0, 4.0)}
    plan = fzero.zero_plan(0, params, fzero.one_process(), policy=policy or precision.fp32())
    tx = optim.adamw(0.1, impl="reference")
    step = fzero.make_train_step(loss or plain, tx, plan, execution=fzero.Execution(capture=how), **options)
    return init_state(params, tx, plan, seed=0, device=device), step


def rows(device, number, size=4):
    return [{"x": torch.arange(3.0 * size).view(size, 3).add(i).to(device)} for i in range(number)]


FP16 = precision.fp16(precision.LossScale(init=2.0, window=2, at_floor="hold"))
SKIPPED = {"fp16": {"policy": FP16}, "spikes": {"skip": fzero.Skip(spike=fzero.Spike(warmup=2))}}


@pytest.mark.slow
@pytest.mark.parametrize("case", SKIPPED)
def test_steps_of_a_graph_are_skipped_as_issued_ones_are(case):
    def given(device):
        return [{"x": batch["x"] * (1e4 if i in (4, 5) else 0.1)} for i, batch in enumerate(rows(device, 9))]

    expected = run(*small("cpu", **SKIPPED[case]), given("cpu"))
    assert [skipped for _, _, skipped, _ in expected[0]] == [i in (4, 5) for i in range(9)]
    assert len({scale for *_, scale in expected[0]}) == (1 if case == "spikes" else 3)
    with pretend():
        state, step = small("cuda", **SKIPPED[case])
        assert same(run(state, step, given("cuda")), expected) and step.recorded


@pytest.mark.slow
def test_a_host_that_is_not_waited_for_issues_its_steps(monkeypatch):
    monkeypatch.setattr(Event, "elapsed_time", lambda first, last: 1e6)
    with pretend():
        state, step = small("cuda")
        found = run(state, step, rows("cuda", 4))
    assert step.news[0].startswith("capture: steps are issued one by one: the host issues one in ")
    assert not step.recorded and same(found, run(*small("cpu"), rows("cpu", 4)))


def moving(params, batch):
    """A loss with a number of the host that differs from step to step, and that no call of it changes."""
    return (batch["x"] @ params["w"]).square().sum() * moving.number, batch["x"].shape[0]


def planted(fault, monkeypatch):
    """(results on the pretend GPU, results on the CPU) of captured steps with a fault."""
    kind, number = {}, 5
    if fault == "a number of the host":
        kind["loss"] = moving
    if fault == "a state that has moved":
        monkeypatch.setattr(capture.RecordedStep, "serves", lambda recorded, leaves: True)
    expected, step = small("cpu", **kind)
    for moving.number, batch in enumerate(rows("cpu", number), 1):
        expected, _ = step(expected, batch)
    with pretend():
        state, step = small("cuda", **kind)
        for i, batch in enumerate(rows("cuda", number)):
            moving.number = i + 1
            if i == 3 and fault == "a state that has moved":
                state = state._replace(params={"w": state.params["w"].clone()})
            if i == 3 and fault == "a batch that is not copied":
                key, recorded = next(iter(step.recorded.items()))
                step.recorded[key] = recorded._replace(batch=pytree.map(torch.clone, recorded.batch))
            state, _ = step(state, batch)
        assert step.captures
        return host(state), host(expected)


FAULTS = ["", *(pytest.param(fault, marks=pytest.mark.slow) for fault in (
    "a number of the host", "a state that has moved", "a batch that is not copied"))]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_graph_has_baked_in_is_found(fault, monkeypatch):
    found, expected = planted(fault, monkeypatch)
    assert all(torch.equal(found[name], expected[name]) for name in expected) == (not fault)


def waiting(params, batch):
    total = (batch["x"] @ params["w"]).square().sum()
    return total * (2.0 if float(total.detach()) > 0 else 1.0), batch["x"].shape[0]


def test_a_wait_ends_the_capture_by_its_line_and_the_steps_go_on():
    with pretend() as seen:
        state, step = small("cuda", loss=waiting)
        found = run(state, step, rows("cuda", 5))
        assert seen.current == 0 and not seen.allocating and not any(seen.pools.values()) and len(seen.pools) == 1
        assert not seen.races and not seen.freed
    assert same(found, run(*small("cpu", loss=waiting), rows("cpu", 5)))
    _, refused = step.news
    assert refused.startswith(
        "capture: steps are issued one by one: a step cannot be recorded: operation not permitted when stream is "
        "capturing: item, in `"
    )


@pytest.mark.parametrize("why", ["a wait", "an error of Python", "work of another stream", ""])
def test_after_a_recording_the_stream_and_the_memory_are_those_of_before(why):
    device = torch.device("cuda", 0)
    with pretend() as seen:
        x, beside = torch.ones(3, device=device), torch.cuda.Stream(device)

        def work():
            y = x + 1
            if why == "a wait":
                y.sum().item()
            if why == "an error of Python":
                raise ValueError(why)
            if why == "work of another stream":
                torch.cuda.current_stream(device).wait_stream(beside)
            return y

        with torch.cuda.stream(beside):
            with pytest.raises((RuntimeError, ValueError)) if why else contextlib.nullcontext():
                graph, y = gpu.record_graph(work, device)
            assert seen.current == beside.number and seen.recording is None
        assert seen.current == 0 and not seen.allocating
        assert [*seen.pools.values()] == ([0] if why else [1])
        if not why:
            again, _ = gpu.record_graph(work, device, pool_graph=graph)
            assert [*seen.pools.values()] == [2] and again.pool() == graph.pool()
            graph.replay()
            assert y.tolist() == [2.0] * 3


def test_a_recording_that_fails_leaves_the_ledger_as_it_was():
    def sending(params, batch):
        mesh.ledger.add("all_reduce", "dp", "w", torch.float32, 5)
        return waiting(params, batch)

    with pretend():
        state, step = small("cuda", loss=sending)
        mesh = step.mesh
        run(state, step, rows("cuda", 5))
    assert mesh.ledger.total().calls == 5 and len(step.news) == 2


def test_an_error_is_told_by_where_it_began():
    try:
        try:
            torch.ones(2) @ torch.ones(3)
        finally:
            raise RuntimeError("the capture was not ended")
    except RuntimeError as error:
        told = capture.cause_of(error)
    assert (
        told.startswith("inconsistent tensor size")
        and "in `torch.ones(2) @ torch.ones(3)` (" in told
        and "tests/test_capture.py:" in told
    )


@pytest.mark.slow
def test_each_shape_of_a_batch_has_a_graph_up_to_a_number(monkeypatch):
    monkeypatch.setattr(capture, "GRAPHS", 2)
    sizes = [4, 4, 2, 2, 3, 3, 2, 4, 3]
    given = lambda device: [rows(device, i + 1, size)[i] for i, size in enumerate(sizes)]  # noqa: E731
    with pretend() as seen:
        state, step = small("cuda")
        found = run(state, step, given("cuda"))
        gc.collect()
        assert not seen.races and not seen.freed
        assert [one.graph.replays for one in step.recorded.values()] == [2, 2]
    assert same(found, run(*small("cpu"), given("cpu")))
    assert step.news[1:] == ["capture: a step on x [4, 3] is issued: 2 other shapes have a graph already"]


@pytest.mark.slow
def test_a_donated_state_stays_where_it_is():
    """A graph has the addresses of what it reads and writes: all leaves stay from step to step, but for the counts of
    steps that are issued.
    """
    with pretend():
        state, step = make("cuda", policy=precision.POLICIES["bf16"](), ema=True)
        counts, moved = {"step", "data_cursor", "opt_state/inner/1/count"}, []

        def places():
            return {name: leaf.under.data_ptr() for name, leaf in pytree.named_leaves(state).items()}

        for batch in batches("cuda", 6):
            before = places()
            state, _ = step(state, batch)
            moved.append({name for name, place in places().items() if place != before[name]})
        (one,) = step.recorded.values()
        assert one.graph.replays >= 3 and all(names <= counts for names in moved)
        assert not any(moved[1 - one.graph.replays :]) and len(set(before.values())) > 30


@pytest.mark.slow
def test_a_state_from_elsewhere_is_recorded_again_and_a_donated_one_is_refused():
    with pretend():
        state, step = small("cuda")
        for batch in rows("cuda", 4):
            state, _ = step(state, batch)
        (first,) = step.recorded.values()
        state = pytree.map(torch.clone, state)  # as a restored one
        for batch in rows("cuda", 6)[4:]:
            old, (state, _) = state, step(state, batch)
        (second,) = step.recorded.values()
        assert first is not second and second.graph.replays == 1
        found = host(state)
        with pytest.raises(ValueError, match="donated"):
            step(old, rows("cuda", 1)[0])
    expected = run(*small("cpu"), rows("cpu", 6))[1]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def put(x, memory):
    memory.copy_(x)


class Look:
    """A watcher of a ledger that wants to hear all."""

    def __getattr__(self, name):
        if name == "phases":
            raise AttributeError
        return lambda *args: None


@pytest.mark.slow
def test_a_step_that_is_looked_into_or_behind_a_checkpoint_is_issued():
    params = {"w": torch.arange(1.0, 4.0)}
    mesh = fzero.one_process()
    plan, tx = fzero.zero_plan(0, params, mesh), optim.adamw(0.1, impl="reference")
    with pretend() as seen:
        step = fzero.make_train_step(
            lambda params, batch: ((batch["x"] @ params["w"]).square().sum(), 4),
            tx,
            plan,
            execution=fzero.Execution(capture="auto"),
        )
        state = init_state(params, tx, plan, seed=0, device="cuda")
        for i, batch in enumerate(rows("cuda", 7)):
            if i == 4:
                out = torch.empty(3, pin_memory=True)
                reading = gpu_copies.SnapshotReader(state.params["w"].device)
                copied = reading.copy(state.params["w"], out, functools.partial(put, state.params["w"]))
                reading.end()
                before = state.params["w"].to("cpu", copy=True)
            with mesh.ledger.watched(Look()) if i == 5 else contextlib.nullcontext():
                state, _ = step(state, batch)
        (recorded,) = step.recorded.values()
        assert recorded.graph.replays == 3 and not seen.races
        assert torch.equal(copied.finish(), before)
        found = host(state)
    expected = run(*small("cpu"), rows("cpu", 7))[1]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


REFUSED = {
    "donate=False": {"donate": False},
    "offload opt=host": {"offload": "opt=host"},
    "offload acts=host": {"offload": "acts=host"},
    "loss scale is at its floor": {"policy": precision.fp16()},
    "cannot update in one pass": {"tx": optim.accumulate(optim.sgd(0.1), 2)},
}


@pytest.mark.parametrize("why", REFUSED)
def test_why_a_step_is_not_captured(why):
    case = {"donate": True, "tx": optim.adamw(0.1), **REFUSED[why]}
    model = models.build(models.LlamaConfig(**SIZES, n_kv_heads=2))
    where = {"offload": case["offload"]} if "offload" in case else {}
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=case.get("policy", precision.fp32()), **where)
    assert why in capture.refusal_of(plan, case["tx"], case["donate"])
    usual = fzero.zero_plan(0, model, fzero.one_process())
    assert capture.refusal_of(usual, optim.with_average(optim.adamw(0.1), 0.9), True) == ""


@pytest.mark.slow
def test_a_refused_step_says_so_once_and_other_words_are_refused():
    with pretend():
        state, step = small("cuda", donate=False)
        found = run(state, step, rows("cuda", 2))
    assert step.news == [
        "capture: steps are issued one by one: donate=False: each step makes its state in other memory; capture=off "
        "is the same without this line"
    ]
    assert same(found, run(*small("cpu", "off", donate=False), rows("cpu", 2)))
    with pytest.raises(ValueError, match="capture is 'on'; it must be one of auto, off"):
        fzero.Execution(capture="on")


@pytest.mark.slow
def test_a_plan_says_what_a_graph_saves_and_what_it_keeps():
    def notes(**settings):
        usual = {"train.compiled": False, "precision.policy": "bf16", "optim.name": "adamw"}
        report = fzero.plan("mlp-tiny", gpu="h100", settings=usual | settings)
        return report, [note for note in report.notes if note.startswith("capture: ")]

    report, (note,) = notes(**{"train.capture": "auto"})
    assert f" of {duration(report.step_s)}, as one graph it takes " in note and "; auto captures it; " in note
    kept = report.peak_bytes_per_rank - sum(n for name, n in report.state_bytes.items() if name != "grads")
    assert f"its graph keeps {size(kept)}, and" in note
    alone = (report.time["bound"]["compute"] + report.time["bound"]["memory"]) / (1.0 - report.device.lost)
    assert f"takes {duration(alone)}; " in note and alone < report.step_s / 2
    assert notes()[1] == []
    assert notes(**{"train.capture": "auto", "offload": "opt=host"})[1] == [
        "capture: steps are issued one by one: offload opt=host: the host takes part in a step"
    ]
