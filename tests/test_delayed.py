"""Delayed updates: the definition written out, what a step of several updates equals, its bubble, and what is refused.

theta[j+1] = theta[j] - u(gradient of the loss of batch j at theta[j-1])
"""

import functools
import math

import pytest
import ranks
import torch
from close import assert_close, assert_same
from launched import rows, write_text
from zero_cases import FP64, OPTIMIZERS, batch_for, model_of, whole

import fzero
from fzero import checkpoint, local_batch, optim, state_specs
from fzero.checkpoint import restore_state
from fzero.core import pytree
from fzero.models import base, forward
from fzero.sharding import Act, Pipeline, pipeline
from fzero.train import meta_state
from fzero.train.update import delayed

UPDATES, ROWS = 6, 24
DELAY = fzero.Execution(update="delayed")
BAD = 2  # the update whose loss is not finite, where a case wants one


@functools.cache
def breaking(name):
    """The model, whose activations are infinite for a batch that begins with two tokens 1."""
    model = model_of(name, dropout=0.0)

    def embed(params, batch, ctx):
        x = model.embed(params, batch, ctx)
        return x * torch.where((batch["tokens"][0, :2] == 1).all(), math.inf, 1.0)

    return model._replace(embed=embed)


def batches(bad=False, rows=ROWS):
    """The batches of all updates."""
    out = [batch_for(j, rows) for j in range(UPDATES)]
    for batch in out:
        batch["tokens"][::, 0] = 0
    if bad:
        out[BAD]["tokens"][:, :2] = 1
    return out


def by_definition(name, tx, now, opt_state, given, late=0):
    """(parameters, the version before, optimizer's state, losses) of one process after the updates of the batches
    `given`; late: the first updates, which are not delayed."""
    model, ctx, before, losses = breaking(name), base.Ctx(dtype=torch.float64), now, []
    for j, batch in enumerate(given):

        def mean(params, batch=batch):
            out = forward.loss(model, params, batch, ctx)
            return out.total / out.num_tokens

        grads, loss = torch.func.grad_and_value(mean)(now if j < late else before)
        losses.append(loss)
        before = now
        if torch.isfinite(loss):
            updates, opt_state = tx.update(grads, opt_state, now)
            now = optim.apply_updates(now, updates)
    return now, before, opt_state, losses


@functools.cache
def written_out(name, optimizer, bad=False, late=0):
    """The same after all updates."""
    plan = fzero.zero_plan(0, breaking(name), fzero.one_process(), policy=FP64)
    state = fzero.init_state(breaking(name), OPTIMIZERS[optimizer], plan, seed=3)
    return by_definition(name, OPTIMIZERS[optimizer], state.params, state.opt_state, batches(bad), late)


def steps_of(mesh, case, bad=False, donate=True):
    """(the function that makes step i of a case, plan, tx, the first state)"""
    name, optimizer, stage, updates, micro, options = case
    model, tx = breaking(name), OPTIMIZERS[optimizer]
    options = dict(options)
    delay_after = options.pop("delay_after", 0)
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64, **options).with_updates(updates, delay_after)
    local = updates * micro
    step = fzero.make_train_step(model, tx, plan, micro_batches=local, execution=DELAY, donate=donate)

    def make(i, state):
        parts = batches(bad)[i * updates : (i + 1) * updates]
        batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        return step(state, local_batch(batch, mesh, local))

    return make, plan, tx, fzero.init_state(model, tx, plan, seed=3)


def trained(mesh, cases, bad=False, donate=True):
    """[(the whole state, [(loss, skipped)]) of each case]"""
    out = []
    for case in cases:
        step, plan, tx, state = steps_of(mesh, case, bad, donate)
        log = []
        for i in range(UPDATES // case[3]):
            state, metrics = step(i, state)
            log.append((float(metrics.loss), bool(metrics.skipped)))
        out.append((whole(state, state_specs(plan, tx), mesh), log))
    return out


def is_as_written_out(case, state, bad=False):
    now, before, opt_state, _ = written_out(*case[:2], bad, case[5].get("delay_after", 0) * case[3])
    try:
        assert_close(state.params, now, rtol=1e-10, atol=1e-10)
        assert_close(state.extra["previous"], before, rtol=1e-10, atol=1e-10)
        assert_close(state.opt_state, opt_state, rtol=1e-8, atol=1e-10)
    except AssertionError as error:
        error.add_note(str(case))
        raise


# ---- the definition ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer, donate", (("sgd", True), ("clipped adam", False)))
def test_one_process_is_the_definition(optimizer, donate):
    cases = [("llama", optimizer, 0, updates, micro, {}) for updates, micro in ((1, 1), (3, 2))]
    _, _, _, losses = written_out("llama", optimizer)
    n = torch.tensor([int(batch["mask"].sum()) for batch in batches()])
    for case, (state, log) in zip(cases, trained(fzero.one_process(), cases, donate=donate)):
        is_as_written_out(case, state)
        assert int(state.step) == len(log) and int(state.data_cursor) == UPDATES * ROWS
        sums = [(loss * n).reshape(len(log), -1).sum(1) for loss in (torch.stack(losses), 1.0)]
        assert [loss for loss, _ in log] == pytest.approx((sums[0] / sums[1]).tolist(), rel=1e-12)
    with pytest.raises(AssertionError):  # which the definition without the delay is not
        assert_close(state.params, written_out("llama", optimizer, late=UPDATES)[0], rtol=1e-3, atol=1e-3)


HOST = [
    ("llama", "clipped adam", 0, 3, 2, {"offload": "opt=host"}),
    ("gpt2", "adam", 0, 2, 1, {"offload": "grads=host,opt=host", "delay_after": 1}),
    ("gemma", "muon", 0, 6, 2, {"offload": "opt=host:0.5"}),
]


@pytest.mark.parametrize("bad", (False, True))
def test_with_states_on_the_host_one_process_is_the_definition(bad):
    for case, (state, log) in zip(HOST, trained(fzero.one_process(), HOST, bad)):
        is_as_written_out(case, state, bad)
        assert any(skipped for _, skipped in log) == bad


def test_the_host_updates_while_the_next_gradient_comes(monkeypatch):
    """Two of three updates have units between the layers of the next gradient; the last one has none beside it."""
    events, take, advance = [], delayed.UpdateByUnits.update_next, delayed.ConcurrentUpdate.advance
    monkeypatch.setattr(delayed.UpdateByUnits, "update_next", lambda update: events.append("U") or take(update))
    monkeypatch.setattr(delayed.ConcurrentUpdate, "advance", lambda beside: events.append("L") or advance(beside))
    trained(fzero.one_process(), [("llama", "adam", 0, 3, 2, {"offload": "opt=host"})])
    # The rows of the first units are asked for, and each unit is updated once its share of the ten layers has come.
    beside = "U" + "LLLU" + "LLU" + "LLLU" + "LLU"
    assert "".join(events) == 2 * ("L" * 10 + 2 * beside + "U" * 5)


MESHES = {
    "pp2": ({"pp": 2}, [("gpt2", "clipped adam", 3, 3, 2, {"pipeline": Pipeline(layout="2,1")})]),
    "pp2, more": (
        {"pp": 2},
        [
            ("gemma", "sgd", 3, 2, 4, {"pipeline": Pipeline("interleaved", chunks=2)}),
            ("gemma", "adam", 0, 2, 4, {"pipeline": Pipeline("zb-v", chunks=2)}),
            ("encoder and decoder", "clipped adam", 1, 3, 1, {}),
            ("lora", "adam", 2, 2, 3, {"pipeline": Pipeline(layout="2,1")}),
        ],
    ),
    "pp2 x dp2": (
        {"pp": 2, "dp": 2},
        [("gpt2", "clipped adam", stage, 3, 3, {"pipeline": Pipeline(layout="2,1")}) for stage in range(4)]
        + [("gemma", "sgd", 1, 6, 2, {"reduce": "canonical"}), ("llama", "adam", 2, 2, 2, {"reduce": "once"})],
    ),
    "pp4": (
        {"pp": 4},
        [
            ("gemma", "clipped adam", 0, 2, 6, {}),
            ("gemma", "sgd", 1, 3, 6, {"pipeline": Pipeline("zb-h1")}),
            ("gemma", "adam", 3, 3, 3, {}),
        ],
    ),
    "dp2 x tp2": ({"dp": 2, "tp": 2}, [("llama", "clipped adam", stage, 2, 3, {}) for stage in (0, 2, 3)]),
    "dp2, states on the host": (
        {"dp": 2},
        [
            *(("llama", "clipped adam", stage, 3, 2, {"offload": "opt=host"}) for stage in range(4)),
            ("gpt2", "adam", 2, 2, 2, {"offload": "grads=host,opt=host", "delay_after": 1, "reduce": "canonical"}),
        ],
    ),
    "pp2, states on the host": (
        {"pp": 2},
        [
            ("gpt2", "clipped adam", 0, 3, 2, {"offload": "grads=host,opt=host", "pipeline": Pipeline(layout="2,1")}),
            ("gemma", "adam", 3, 2, 4, {"delay_after": 2, "pipeline": Pipeline("interleaved", chunks=2)}),
        ],
    ),
}
TIERS = {name: () if name == "pp2" else pytest.mark.exhaustive for name in MESHES}


@pytest.mark.parametrize("mesh", [pytest.param(name, marks=TIERS[name]) for name in MESHES])
def test_a_mesh_is_the_definition(mesh):
    """Whatever the schedule, the stage and the updates of a step."""
    sizes, cases = MESHES[mesh]
    results = ranks.run(math.prod(sizes.values()), trained, cases, mesh=sizes, timeout_s=300)
    for case, (state, _) in zip(cases, results[0]):
        is_as_written_out(case, state)
    assert all([log for _, log in result] == [log for _, log in results[0]] for result in results)


def test_a_skipped_update_leaves_the_parameters_and_the_next_gradient_is_taken_at_them():
    cases = [("llama", "adam", 0, 3, 2, {"pipeline": Pipeline(layout="2,1")})]
    for result in ranks.run(2, trained, cases, True, mesh={"pp": 2}):
        for case, (state, log) in zip(cases, result):
            is_as_written_out(case, state, bad=True)
            assert [skipped for _, skipped in log] == [True, False]
    case = ("llama", "adam", 0, 2, 1, {})
    for donate in (True, False):
        ((state, log),) = trained(fzero.one_process(), [case], True, donate)
        is_as_written_out(case, state, bad=True)
        assert [skipped for _, skipped in log] == [False, True, False]


def test_a_step_may_be_transformed():
    """The directional derivative of two steps of two updates is that of the definition."""
    case = ("llama", "sgd", 0, 2, 1, {})
    step, _, tx, state = steps_of(fzero.one_process(), case, donate=False)

    def stepped(params):
        begin = state._replace(params=params, extra={**state.extra, "previous": params})
        return step(1, step(0, begin)[0])[0].params

    def defined(params):
        return by_definition("llama", tx, params, state.opt_state, batches()[:4])[0]

    v = pytree.map(lambda x: torch.sin(torch.arange(x.numel(), dtype=x.dtype)).reshape(x.shape), state.params)
    found, expected = (torch.func.jvp(f, (state.params,), (v,)) for f in (stepped, defined))
    assert_close(found, expected, rtol=1e-9, atol=1e-10)


# ---- saved and resumed ---------------------------------------------------------------------------------------------


def saved(mesh, case, folder):
    """The path of a checkpoint of the first step of a case."""
    step, plan, tx, state = steps_of(mesh, case)
    state, _ = step(0, state)
    return checkpoint.save(folder, state, step=1, specs=state_specs(plan, tx), mesh=mesh)


def restored(case, path, delayed=True):
    """(the state of one process that a checkpoint gives, the function that makes its steps)"""
    step, plan, tx, _ = steps_of(fzero.one_process(), case)
    if not delayed:
        plan = fzero.zero_plan(0, breaking(case[0]), fzero.one_process(), policy=FP64)
    return restore_state.restore_state(path, meta_state(plan, tx), state_specs(plan, tx), plan, None), step


def test_a_checkpoint_has_both_versions_and_goes_on_elsewhere(tmp_path):
    there = ("llama", "adam", 3, 2, 3, {"pipeline": Pipeline(layout="2,1")})
    path, here = ranks.run(2, saved, there, tmp_path, mesh={"pp": 2})[0], ("llama", "adam", 0, 1, 2, {})
    state, step = restored(here, path)
    for i in range(2, UPDATES):
        state, _ = step(i, state)
    is_as_written_out(here, state)
    after, _ = restored(here, path, delayed=False)  # a run that goes on without the delay
    assert set(after.extra) == {"loss"}


@pytest.mark.slow
def test_a_run_may_begin_to_delay_its_updates(tmp_path):
    """Its first gradient is then taken at the parameters, as at the beginning of a run."""
    model, tx = breaking("llama"), OPTIMIZERS["adam"]
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=FP64)
    state = fzero.init_state(model, tx, plan, seed=3)
    path = checkpoint.save(tmp_path, state, step=0, specs=state_specs(plan, tx), mesh=plan.mesh)
    found, _ = restored(("llama", "adam", 0, 1, 1, {}), path)
    assert_same(found.extra["previous"], state.params)
    assert_same(found.params, state.params)


SETS = [
    part
    for text in ("model.n_layers=2", "model.d_model=16", "model.d_ff=32", "model.n_heads=4", "model.n_kv_heads=2")
    for part in ("--set", text)
]
COMMAND = [
    "pretrain", "--model", "llama-tiny", "--batch", 8, "--micro-batch", 1, "--seq-len", 16, "--precision", "fp32",
    "--data", "text.txt", "--peak-tflops", 1, "--steps", 3, "--prompt", "", *SETS, "--set", "train.compiled=false",
    "--set", "precision.fp32_matmul=default", "--set", "train.eval_batches=1",
]  # fmt: skip
DELAYED = ["--set", "train.update=delayed", "--set", "train.updates=2"]


@pytest.mark.slow
def test_the_command_resumes_as_if_it_had_not_stopped(tmp_path, fz, monkeypatch):
    """And one update a step of half the batch makes the same steps; the ranks of pp are in test_pipelined_command."""
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    for out, more in (("whole", []), ("parts", ["--stop-at", 1])):
        assert fz(*COMMAND, *DELAYED, "--out", out, *more)[0] == 0
    assert fz("pretrain", "--out", "parts", "--resume", "--peak-tflops", 1, "--prompt", "")[0] == 0
    whole, parts = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert [row["step"] for row in whole] == [1, 2, 3] and whole == parts
    names = checkpoint.open_checkpoint(next((tmp_path / "whole" / "checkpoints").glob("step-*"))).leaves
    assert {f"extra/previous/{name.removeprefix('params/')}" for name in names if name.startswith("params/")} <= set(
        names
    )


# ---- the bubble ----------------------------------------------------------------------------------------------------


def without_updates(s):
    return s._replace(rows=tuple(tuple(act for act in row if act.kind != "U") for row in s.rows))


@pytest.mark.parametrize("name", ("1f1b", "zb-h1", "zb-h2", "interleaved", "interleaved-zb", "zb-v"))
@pytest.mark.parametrize("p", (2, 4))
def test_the_pipeline_fills_and_empties_once_a_step(name, p):
    """However many updates it makes. At each but the last a rank waits for no more than the act that another rank is in
    the middle of; and no more is in flight than in one update."""
    family = pipeline.FAMILIES[name]
    v, m, updates = family.chunks or 2, 4 * p, 5
    stages = pipeline.layout([1.0] * 16, p, v, family.placement)
    s = pipeline.with_updates(pipeline.schedule(name, stages, m * updates), updates)
    pipeline.check(s)
    assert pipeline.read_schedule(pipeline.write_schedule(s)) == s
    times = {"F": 1.0, "I": 1.0, "W": 1.0}
    once, row, with_u = (
        pipeline.play(one, times) for one in (pipeline.schedule(name, stages, m), without_updates(s), s)
    )
    assert max(row.idle) == pytest.approx(max(once.idle)) and with_u.peak == row.peak
    assert max(with_u.idle) <= max(row.idle) + (updates - 1) * 2.0
    assert max(with_u.idle) < updates * max(once.idle)


def test_tables_that_two_versions_do_not_allow_are_refused():
    stages = pipeline.layout([1.0] * 4, 4)
    s = pipeline.with_updates(pipeline.schedule("1f1b", stages, 12), 3)
    with pytest.raises(ValueError, match="rank 0 comes to 0F16 before it has ended those of micro-batches 0-7"):
        pipeline.with_updates(pipeline.schedule("gpipe", stages, 24), 3)
    with pytest.raises(ValueError, match="5 updates cannot share 12 micro-batches evenly"):
        pipeline.with_updates(pipeline.schedule("1f1b", stages, 12), 5)
    later = [act for act in s.rows[1] if act != Act("U", 0, 1)]
    last = [*(act for act in later if act.kind != "U"), *(Act("U", i, 1) for i in range(3))]
    for wrong, words in (
        (later, "rank 1 has the updates 1U1 1U2; every rank has the same"),
        ([Act("U", 0, 1), *later], "an update follows the backwards of its micro-batches"),
        (last, "an update follows the backwards of its micro-batches"),
    ):
        with pytest.raises(ValueError, match=words):
            pipeline.check(s._replace(rows=(s.rows[0], tuple(wrong), *s.rows[2:])))
    five = pipeline.schedule("1f1b", stages, 5)
    two = tuple((*row, Act("U", 0, rank), Act("U", 1, rank)) for rank, row in enumerate(five.rows))
    with pytest.raises(ValueError, match="has 2 updates, which cannot share 5 micro-batches evenly"):
        pipeline.check(five._replace(rows=two))


# ---- what is said and refused --------------------------------------------------------------------------------------


def test_the_plan_says_that_there_are_two_versions():
    model = model_of("llama", dropout=0.0)
    plan = fzero.zero_plan(3, model, fzero.fake_mesh({"dp": 2}), policy="bf16").with_updates(4)
    state = meta_state(plan, optim.adamw())
    size = sum(leaf.nbytes for leaf in pytree.leaves(state.extra["previous"]))
    assert size == sum(leaf.nbytes for leaf in pytree.leaves(state.params)) > 0
    assert f"delayed updates, 4 a step: gradients are taken at the parameters before the last update; a rank holds {size:,} " in str(plan)  # fmt: skip  # noqa: E501
    assert "an update; sums of gradients" in str(plan) and "delayed" not in str(fzero.zero_plan(3, model, plan.mesh))


MODEL = model_of("llama", dropout=0.0)
REFUSED = {
    "no second version": (dict(), dict(execution=DELAY), "the plan has 0 delayed updates"),
    "another update": (dict(delayed=1), dict(), 'update="end" and the plan has 1 delayed updates'),
    "offload": (dict(delayed=1, offload="params=host"), dict(execution=DELAY), "both versions .* on the device"),
    "a disk": (dict(delayed=1, offload="opt=nvme"), dict(execution=DELAY), "has its opt in memory 'nvme'"),
    "loss scale": (dict(delayed=1, policy="fp16"), dict(execution=DELAY), "scales the loss"),
    "uneven": (dict(delayed=2), dict(execution=DELAY, micro_batches=3), "cannot share them evenly"),
    "no number": (dict(delayed=-1), dict(execution=DELAY), "updates is -1; it must be a whole number"),
    "resident": (
        dict(delayed=1), dict(execution=fzero.Execution(resident=1, update="delayed")), 'update="delayed" writes to',
    ),
    "too far ahead": (
        dict(delayed=3, pipeline=Pipeline("gpipe"), mesh={"pp": 2}), dict(execution=DELAY, micro_batches=6),
        "schedule gpipe with 3 updates of 2 micro-batches: rank 0 comes to 0F4 before it has ended those of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_one_line(case):
    plan, step, words = REFUSED[case]
    plan = dict(plan)
    stage, mesh = (3 if case == "resident" else 0), fzero.fake_mesh(plan.pop("mesh", {"dp": 2}))
    with pytest.raises(ValueError, match=words) as error:
        updates = plan.pop("delayed", 0)
        made = fzero.zero_plan(stage, MODEL, mesh, **plan)
        fzero.make_train_step(MODEL, optim.adamw(), made.with_updates(updates) if updates else made, **step)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "args, words",
    (
        (["--set", "train.updates=2"], "train.updates is 2 and train.update is end; use train.update=delayed"),
        ([*DELAYED, "--offload", "opt=nvme"], "train.update is delayed and offload is 'opt=nvme'"),
        (["--set", "train.delay_after=2"], "train.delay_after is 2 and train.update is end; use train.update=delayed"),
        ([*DELAYED, "--precision", "fp16"], "train.update is delayed and precision.policy is fp16"),
        ([*DELAYED[:3], "train.updates=3"], "train.updates is 3, and a step has 8 micro-batches"),
        ([*DELAYED[:3], "train.updates=0"], "train.updates is 0"),
    ),
)
def test_what_the_command_refuses_is_one_line(tmp_path, fz, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    code, _, err = fz(*COMMAND, *args, "--out", "run")
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
