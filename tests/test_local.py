"""Local steps: members that train apart and agree once in H steps."""

import functools
import json
import math
from pathlib import Path

import launched
import pytest
import ranks
import torch
from close import assert_close, assert_same
from law_cases import FP64
from plan_cases import made
from zero_cases import SIZES, model_of, whole

import fzero
from fzero import local_batch, optim, state_specs
from fzero.checkpoint import restore, save, step_folder
from fzero.core import CPU, pytree
from fzero.planner import devices, rates, slow_link_options, timing
from fzero.planner.timing import Timing, weighted_sum
from fzero.run import build
from fzero.sharding import Local
from fzero.train import init_local, local_specs, make_local_step, synchronize

ROOT = Path(__file__).parent.parent
slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive
INNER = {"SGD": optim.sgd(0.3), "ADAM": optim.chain(optim.clip_by_global_norm(0.5), optim.adam(1e-2, eps=1e-5))}
OUTER = {
    "LocalSGD": optim.sgd(1.0),
    "SlowMo": optim.sgd(0.8, momentum=0.6),
    "DiLoCo": optim.sgd(0.7, momentum=0.9, nesterov=True),
}


def batch(step, rows=8):
    g = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(0, SIZES["vocab_size"], (rows, 8), generator=g) for _ in range(2))
    return {"tokens": tokens, "targets": targets}


def start(mesh, tx, outer, local, stage=0, policy=FP64, name="llama", dropout=0.0):
    """(step, state, plan, specs) of this rank's member."""
    model, tx, outer = model_of(name, dropout=dropout), INNER[tx], OUTER[outer]
    plan = fzero.zero_plan(stage, model, mesh.member(), policy=policy)
    state = init_local(fzero.init_state(model, tx, plan, seed=3), plan, outer)
    inner = fzero.make_train_step(model, tx, plan)
    specs = local_specs(state_specs(plan, tx), plan, outer)
    return make_local_step(inner, plan, outer, mesh["rp"], local), state, plan, specs


def trained(mesh, tx, outer, local, steps, stage=0, dropout=0.0):
    """(whole parameters, whole x_0) of this rank's member after some steps."""
    step, state, plan, specs = start(mesh, tx, outer, local, stage, dropout=dropout)
    for i in range(steps):
        state, _ = step(state, local_batch(batch(i), mesh, 1))
    found = whole(state, specs, plan.mesh)
    return found.params, found.extra["outer"]


def plain_data_parallel(steps):
    model, mesh = model_of("llama", dropout=0.1), fzero.one_process()
    plan = fzero.zero_plan(0, model, mesh, policy=FP64)
    state, step = fzero.init_state(model, INNER["SGD"], plan, seed=3), fzero.make_train_step(model, INNER["SGD"], plan)
    for i in range(steps):
        state, _ = step(state, batch(i))
    return state.params


@pytest.mark.parametrize(
    "sizes, stage",
    [
        ({"rp": 2}, 0),
        pytest.param({"rp": 2, "dp": 2}, 3, marks=exhaustive),
        pytest.param({"rp": 4}, 1, marks=exhaustive),
    ],
)
def test_agreeing_after_every_step_is_plain_data_parallelism(sizes, stage):
    """H = 1, an outer rate of 1 and no momentum: the mean of members after a step of SGD is a step on the mean. Dropout
    is by the rows of the run, so that members do not drop alike."""
    local = Local(every=1)
    results = ranks.run(math.prod(sizes.values()), trained, "SGD", "LocalSGD", local, 4, stage, 0.1, mesh=sizes)
    for params, _ in results:
        assert_close(params, plain_data_parallel(4), rtol=1e-12, atol=1e-12)


# ---- the definition, written out -------------------------------------------------------------------------------------


def nesterov(lr, momentum):
    def update(d, b):
        b = momentum * b + d
        return -lr * (d + momentum * b), b

    return update


def heavy_ball(lr, momentum):
    def update(d, b):
        b = momentum * b + d
        return -lr * b, b

    return update


BY_HAND = {"LocalSGD": heavy_ball(1.0, 0.0), "SlowMo": heavy_ball(0.8, 0.6), "DiLoCo": nesterov(0.7, 0.9)}


@functools.cache
def written_out(method, members, every, steps, after=0):
    """(the parameters on which members agree, those of each), one member after the other in this process."""
    model = model_of("llama", dropout=0.0)
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=FP64)
    states = [fzero.init_state(model, INNER["ADAM"], plan, seed=3) for _ in range(members)]
    step = fzero.make_train_step(model, INNER["ADAM"], plan, donate=False)
    agreed = states[0].params
    momentum = pytree.map(torch.zeros_like, agreed)
    for i in range(steps):
        parts = {name: leaf.chunk(members) for name, leaf in batch(i).items()}
        states = [step(s, {name: leaf[r] for name, leaf in parts.items()})[0] for r, s in enumerate(states)]
        mean = pytree.map(lambda *x: sum(x) / members, *(s.params for s in states))
        if i + 1 <= after:
            agreed = mean
            states = [s._replace(params=agreed) for s in states]
        elif (i + 1) % every == 0:
            d = pytree.map(torch.sub, agreed, mean)
            updates = pytree.map(lambda d, b: BY_HAND[method](d, b)[0], d, momentum)
            momentum = pytree.map(lambda d, b: BY_HAND[method](d, b)[1], d, momentum)
            agreed = pytree.map(torch.add, agreed, updates)
            states = [s._replace(params=agreed) for s in states]
    return agreed, [s.params for s in states]


@pytest.mark.parametrize(
    "method, sizes, stage, after",
    [
        ("DiLoCo", {"rp": 2}, 0, 3),
        pytest.param("DiLoCo", {"rp": 2}, 0, 0, marks=exhaustive),
        pytest.param("SlowMo", {"rp": 2, "dp": 2}, 3, 0, marks=slow),
        pytest.param("LocalSGD", {"rp": 4}, 0, 0, marks=exhaustive),
        pytest.param("LocalSGD", {"rp": 4}, 0, 6, marks=exhaustive),
        pytest.param("DiLoCo", {"rp": 2, "tp": 2}, 1, 0, marks=exhaustive),
        pytest.param("DiLoCo", {"rp": 2, "pp": 2}, 2, 0, marks=exhaustive),
        pytest.param("DiLoCo", {"rp": 2, "pp": 2}, 2, 3, marks=exhaustive),
        pytest.param("SlowMo", {"rp": 2, "cp": 2}, 3, 0, marks=exhaustive),
        pytest.param("SlowMo", {"rp": 2, "dp": 2}, 3, 3, marks=exhaustive),
    ],
)
def test_members_equal_the_written_out_method(method, sizes, stage, after):
    local = Local(every=3, after=after)
    results = ranks.run(math.prod(sizes.values()), trained, "ADAM", method, local, 10, stage, mesh=sizes)
    agreed, each = written_out(method, sizes["rp"], 3, 10, after)
    mine = [params for params, _ in results]
    for _params, outer in results:
        (x,) = (one.params for one in outer.values())
        assert_close(pytree.from_named(x, agreed), agreed, rtol=1e-9, atol=1e-10)
    # the ranks of a member are next to each other, within those of each stage of a pipeline
    per, stages = len(mine) // sizes["rp"] // sizes.get("pp", 1), sizes.get("pp", 1)
    for r, expected in enumerate(each):
        for stage_rank in range(stages):
            at = stage_rank * (len(mine) // stages) + r * per
            assert_close(mine[at], expected, rtol=1e-9, atol=1e-10)
    assert any((a != b).any() for a, b in zip(pytree.leaves(each[0]), pytree.leaves(each[1])))


def plain_steps(local, steps):
    """[steps, 6]: x, x_0 and the outer momentum of leaves a and b after each step of one member, whose own are -0.1."""
    mesh, params = fzero.one_process(), {"a": torch.zeros(1, dtype=FP64.state), "b": torch.zeros(1, dtype=FP64.state)}
    plan, tx = fzero.zero_plan(0, params, mesh, policy=FP64), optim.sgd(0.1)
    state = init_local(fzero.init_state(params, tx, plan, seed=0), plan, OUTER["DiLoCo"])
    inner = fzero.make_train_step(lambda p, batch: ((p["a"] + p["b"]) * batch["x"]).sum(), tx, plan)
    step, rows = make_local_step(inner, plan, OUTER["DiLoCo"], mesh["rp"], local), []
    for _ in range(steps):
        state, _ = step(state, {"x": torch.ones(1, 1, dtype=FP64.state)})
        at, momentum = {}, {}
        for one in state.extra["outer"].values():
            at |= one.params
            momentum |= {name[-1]: x for name, x in pytree.named_leaves(one.opt_state).items() if x.ndim}
        rows.append(torch.cat([each[name] for each in (state.params, at, momentum) for name in "ab"]))
    return torch.stack(rows)


def plain_steps_by_hand(local, steps):
    """The same, by the formulas."""
    x, at, momentum, rows = 0.0, 0.0, 0.0, []
    for step in range(1, steps + 1):
        x -= 0.1
        if step <= local.after:
            at = x
        elif step % local.every == 0:
            momentum = 0.9 * momentum + at - x
            at -= 0.7 * (at - x + 0.9 * momentum)
            x = at
        rows.append([each for each in (x, at, momentum) for _ in "ab"])
    return torch.tensor(rows, dtype=FP64.state)


POST_LOCAL = [
    Local(every=2, after=4),
    Local(every=4, after=8),
    Local(every=1, after=3),
]


@pytest.mark.parametrize("local", [*POST_LOCAL, Local(every=4)], ids=repr)
def test_members_train_apart_after_so_many_steps(local):
    steps = local.after + 2 * local.every + 2
    assert_close(plain_steps(local, steps), plain_steps_by_hand(local, steps), rtol=1e-12, atol=1e-14)


def late(meet):
    """An outer optimizer whose momentum moves with the means."""

    def moved(*args):
        state = meet(*args)
        outer = {
            number: one._replace(opt_state=pytree.map(lambda x: x + 0.1 * (x.ndim > 0), one.opt_state))
            for number, one in state.extra["outer"].items()
        }
        return state._replace(extra={**state.extra, "outer": outer})

    return moved


MISTAKES = {
    "one too few": ("Local", lambda local: lambda self, step: step < self.after),
    "one too many": ("Local", lambda local: lambda self, step: step <= self.after + 1),
    "the momentum moves": ("average_members", late),
    "x_0 stays": ("average_members", lambda meet: lambda plan, state, *rest: state),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_teeth_of_steps_before_members_train_apart(mistake, monkeypatch):
    from fzero.train import local_steps as module

    where, wrong = MISTAKES[mistake]
    if where == "Local":
        monkeypatch.setattr(Local, "takes_mean", wrong(Local))
    else:
        monkeypatch.setattr(module, where, wrong(getattr(module, where)))
    for local in POST_LOCAL[:2]:
        steps = local.after + 2 * local.every
        assert (plain_steps(local, steps)[-1] - plain_steps_by_hand(local, steps)[-1]).abs().max() > 1e-3


def test_the_sign_of_the_outer_step_is_that_of_descent(monkeypatch):
    """A pseudo-gradient of the other sign leads away: the loss rises."""
    from fzero.train import local_steps as module

    exact = module.difference
    losses = {}
    for name, sign in (("right", 1.0), ("wrong", -1.0)):
        monkeypatch.setattr(
            module, "difference", lambda *args, sign=sign: {n: sign * x for n, x in exact(*args).items()}
        )
        mesh = fzero.one_process()
        step, state, _, _ = start(mesh, "ADAM", "DiLoCo", Local(every=4))
        for _ in range(24):
            state, metrics = step(state, batch(0))
        losses[name] = float(metrics.loss)
    assert losses["right"] < 2.5 < losses["wrong"]


# ---- codes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, bound", [("int4", 0.08), pytest.param("int8", 0.005, marks=exhaustive)])
def test_differences_in_codes_are_near_and_one_on_all_members(kind, bound):
    coded = ranks.run(2, trained, "ADAM", "LocalSGD", Local(every=3, codec=kind), 3, mesh={"rp": 2})
    exact = ranks.run(2, trained, "ADAM", "LocalSGD", Local(every=3), 3, mesh={"rp": 2})
    assert_same(coded[0][0], coded[1][0])
    found, expected = (pytree.named_leaves(one[0][0]) for one in (coded, exact))
    gap = max(float((found[name] - expected[name]).abs().max()) for name in found)
    assert 0 < gap < bound


def bytes_sent(mesh, local, steps):
    step, state, _plan, _ = start(mesh, "ADAM", "DiLoCo", local, stage=3, policy=fzero.fp32())
    mesh.ledger.clear()
    for i in range(steps):
        state, _ = step(state, local_batch(batch(i), mesh, 1))
    sent = sum(row.bytes for row in mesh.ledger.rows() if row.axis == "rp" and row.phase == "outer")
    others = [row for row in mesh.ledger.rows() if row.axis == "rp" and row.phase != "outer"]
    updated = sum(leaf.numel() for leaf in pytree.leaves(state.params))
    return sent, updated, others


def test_members_send_twice_what_they_update_once_in_h_steps():
    for sent, updated, others in ranks.run(4, bytes_sent, Local(every=2), 4, mesh={"rp": 2, "dp": 2}):
        assert sent == 2 * (4 * updated)  # 4 steps are 2 times, and 2 (R-1)/R is 1 with 2 members
        assert not others


# ---- in a plan -------------------------------------------------------------------------------------------------------

NO_TIME = Timing(0.5, {}, {}, {}, {}, {}, {}, {}, {}, {}, 0, "", 0.0)


def config_of(train_steps=10, **local):
    table = {"train_compiled": False, "precision": {"policy": "fp32"}, "train_checkpoint_every": 40}
    return made(mesh={"rp": 2}, local={"method": "diloco", **local}, train_steps=train_steps, **table)


def in_codes(elements):
    """The bytes of a leaf's sum in int4 that each of two ranks sends: codes and scales, halves of both ways."""
    row = (elements + -elements % 32) // 2
    return 2 * (row // 2 + 4 * -(-row // 128))


@pytest.mark.parametrize("codec", ["", "int4"])
def test_a_plan_counts_what_an_agreement_sends(codec):
    config = config_of(codec=codec)
    held = build.like_of(build.build(config, fzero.fake_mesh(config.mesh))).extra["outer"]["0"].params
    each = [leaf.numel() for leaf in pytree.leaves(held)]
    expected = sum(map(in_codes, each)) if codec else 4 * sum(each)
    assert timing.trace_agreement(config, config.mesh, 0, CPU).bytes == expected


def test_a_plan_has_a_members_share_of_its_agreements():
    """Half as often is half the share, and the parts are the step."""
    on = devices.between_nodes(devices.device("h100", ranks_on_node=1), "0.001:0")

    def share(**local):
        config = config_of(**local)
        found = weighted_sum(timing.with_agreements(NO_TIME, config, config.mesh, on, 0))
        parts = sum(found.phases.values()) + sum(found.exposed.values()) + sum(found.waiting.values())
        assert_close(torch.tensor(parts + NO_TIME.step_s), torch.tensor(found.step_s), rtol=1e-6)
        return found.step_s - NO_TIME.step_s, found

    (often, found), (half, _) = share(every=20), share(every=40)
    sent = timing.trace_agreement(config_of(), {"rp": 2}, 0, on.target).bytes
    per_byte = 1 / (on.links[-1].bytes_s * on.efficiency.get("links", 1.0))
    message = sent * per_byte
    assert found.binds == "communication on rp"
    assert 1.0 < (often - half) / (message / 40) < 1.1


def test_a_plan_of_steps_before_members_train_apart_has_both():
    """A step then takes a whole sum without codes, and the mean over the run is by the steps of each."""
    on = devices.between_nodes(devices.device("h100", ranks_on_node=1), "0.001:0")
    both = config_of(train_steps=80, every=20, codec="int4", after=20)
    (apart, most), (first, part) = timing.with_agreements(NO_TIME, both, both.mesh, on, 0)
    assert (part, most) == (20 / 80, 60 / 80) and NO_TIME.step_s < apart.step_s < first.step_s
    sent, coded = (
        timing.trace_agreement(both, both.mesh, 0, on.target, full_mean=each).bytes for each in (True, False)
    )
    assert 1.0 < (first.step_s - NO_TIME.step_s) * on.links[-1].bytes_s * on.efficiency.get("links", 1.0) / sent < 1.1
    assert timing.agreement_bytes(both, both.mesh, 0, on.target) == pytest.approx(coded / 20 * most + sent * part)
    job = build.build(both, fzero.fake_mesh(both.mesh))
    assert f"in each of the first 20 steps they take their mean, {sent:,} bytes over rp" in job.members.text(job.plan)


def test_bytes_are_counted_by_the_links_that_they_pass():
    on = devices.between_nodes(devices.device("h100", ranks_on_node=2), "10")
    inside, outside = (level.name for level in on.links)
    both = rates.ways_of(on, {"dp": 4})["dp"]
    # Of a gather of 4 pieces of 10 bytes, a rank passes on 3; between nodes, through 2 links, those of another node
    assert slow_link_options.by_level(both, "all_gather", 30) == pytest.approx({inside: 30, outside: 10})
    apart = rates.ways_of(on, {"rp": 2, "dp": 2})
    assert slow_link_options.by_level(apart["rp"], "psum", 30) == {outside: 30}
    assert slow_link_options.by_level(apart["dp"], "psum", 30) == {inside: 30}


@slow
def test_a_plan_says_what_would_send_fewer_bytes():
    table = {"train_compiled": False, "precision": {"policy": "bf16"}, "zero": 3, "train_steps": 80}
    found = slow_link_options.fewer_bytes(
        made(mesh={"dp": 4}, optimizer="lion", **table),
        devices.between_nodes(devices.device("h100", ranks_on_node=2), "0.05:5"),
    )
    names = [one.name for one in found.options]
    plain, members = (found.options[names.index(name)] for name in ("as it is", "diloco H=20"))
    assert members.mesh == {"rp": 2, "dp": 2} and not plain.error
    assert members.sent[1] < 0.1 * plain.sent[1] and members.reports[0].step_s < plain.reports[0].step_s
    late = found.options[names.index("localsgd H=20 after 1/2")]  # half of its steps send all
    assert members.sent[1] < late.sent[1] < plain.sent[1] and members.reports[0].step_s < late.reports[0].step_s
    assert found.links() == ["0.05 Gbit/s", "100 Gbit/s", "10 Gbit/s", "1 Gbit/s"]
    steps = [report.step_s for report in plain.reports]
    assert steps[0] > steps[3] > steps[2] > steps[1]
    text = str(found)
    assert all(name in text for name in names) and "measured at small scale, see docs/codec.md" in text
    assert [row["name"] for row in json.loads(found.to_json())["options"]] == names


def test_signs_and_their_local_steps_are_offered_between_nodes():
    adam = {"optimizer": "adamw", "train_compiled": False, "precision": {"policy": "bf16"}}
    for zero in (1, 3):
        found = slow_link_options.options_of(made(zero=zero, **adam), {"dp": 4}, 2)
        signs = {(one.name, one.mesh.get("rp", 1)) for one in found if "optim" in one.settings}
        between = {("onebit_adam", 2), ("zero_one_adam H=16", 2)}
        assert signs == between | ({("onebit_adam", 1)} if zero < 2 else set())
    assert [one.name for one in slow_link_options.options_of(made(mesh={"pp": 4}, **adam), {"pp": 4}, 2)] == [
        "as it is"
    ]


def test_what_a_plan_says_of_losses_was_measured():
    rows = json.loads((ROOT / "benchmarks/results/learning-codecs.json").read_text())["rows"]
    last: dict[str, dict[int, float]] = {}
    for row in rows:
        last.setdefault(row["form"], {})[row["seed"]] = row["val_loss"]["400"]
    whole = {form: of for form, of in last.items() if len(of) == 3}
    plain = whole.get("plain", {})
    apart = {form: sum(of[s] / plain[s] - 1 for s in of) / 3 for form, of in whole.items() if plain and form != "plain"}
    adam = {"optimizer": "adamw", "train_compiled": False, "precision": {"policy": "bf16"}}
    options = [one for zero in (1, 3) for one in slow_link_options.options_of(made(zero=zero, **adam), {"dp": 4}, 2)]
    told = {one.measured for one in options}
    assert {form: round(x, 4) for form, x in apart.items() if form in told} == slow_link_options.MEASURED


def test_a_run_on_one_node_has_no_links_to_ask_about():
    config = made(mesh={"dp": 4}, train_compiled=False, precision={"policy": "bf16"})
    with pytest.raises(ValueError, match="all 4 ranks of dp=4 are on one; give a mesh of more ranks"):
        slow_link_options.fewer_bytes(config, devices.device("h100"))


# ---- members come and go ---------------------------------------------------------------------------------------------


def rounds(mesh, folder, local, first, last, saves):
    """Train from the checkpoint of step `first` (0: from the start) to step `last`; save at the steps of `saves`."""
    step, state, plan, specs = start(mesh, "ADAM", "DiLoCo", local)
    if first:
        state = restore(step_folder(folder, first), state, specs=specs, mesh=plan.mesh)
    for i in range(first, last):
        state, metrics = step(state, local_batch(batch(i), mesh, 1))
        if i + 1 in saves:
            state = synchronize(plan, mesh["rp"], state, local)
            save(folder, state, step=i + 1, specs=specs, mesh=mesh)
    return state, float(metrics.loss)


def met(mesh, local, steps):
    """(whole parameters of this rank's member, x_0 and the outer states) after some steps, and once members agree."""
    step, state, plan, specs = start(mesh, "SGD", "DiLoCo", local)
    for i in range(steps):
        state, _ = step(state, local_batch(batch(i), mesh, 1))
    found = []
    for then in (lambda state: state, lambda state: synchronize(plan, mesh["rp"], state, local)):  # in its buffers
        both = whole(then(state), specs, plan.mesh)
        found.append(pytree.map(torch.clone, (both.params, both.extra["outer"])))
    return found


def test_members_that_agree_have_their_mean_and_the_outer_optimizer_makes_no_update():
    """Another update would apply the outer momentum once more."""
    before, after = zip(*ranks.run(2, met, Local(every=4), 7, mesh={"rp": 2}))
    (apart, outer), (others, _) = before
    mean = pytree.map(lambda a, b: (a + b) / 2, apart, others)
    for params, then in after:
        torch.testing.assert_close(params, mean, rtol=0, atol=1e-14)
        assert_same(params, after[0][0])
        assert_same(then, outer)
    assert any(not torch.equal(a, b) for a, b in zip(pytree.leaves(apart), pytree.leaves(others)))


@pytest.mark.parametrize(
    "local",
    [
        Local(every=3),
        pytest.param(Local(every=4, codec="int8"), marks=exhaustive),
        pytest.param(Local(every=2, after=6), marks=exhaustive),
    ],
    ids=repr,
)
def test_a_run_resumed_where_members_agreed_has_its_bits(local, tmp_path):
    through = ranks.run(2, rounds, tmp_path, local, 0, 10, (5,), mesh={"rp": 2})
    resumed = ranks.run(2, rounds, tmp_path, local, 5, 10, (), mesh={"rp": 2})
    for (state, loss), (same, same_loss) in zip(through, resumed):
        assert loss == same_loss
        assert_same(state, same)


def test_members_leave_and_come_back_where_they_agree(tmp_path):
    """Two members, then one, then four; each time all begin with what the others had, and the loss goes on falling."""
    local, losses = Local(every=3), []
    for n, first, last in ((2, 0, 12), (1, 12, 24), (4, 24, 36)):
        results = ranks.run(n, rounds, tmp_path, local, first, last, (last,), mesh={"rp": n})
        for state, _ in results:
            assert_same(state, results[0][0])
        losses.append(results[0][1])
    assert losses == sorted(losses, reverse=True)
    saved = restore(step_folder(tmp_path, 12), results[0][0])  # whole, on one process
    assert int(saved.step) == 12


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"every": 0}, "local: every is 0; it is the steps between two times, at least 1"),
        ({"codec": "int5"}, "local: codec is 'int5'; it must be one of int8, int4, fp8_e4m3"),
        ({"every": 4, "after": 6}, "local: after is 6; it must be 0 or a multiple of every = 4"),
        ({"every": 4, "after": -4}, "local: after is -4; it must be 0 or a multiple of every = 4"),
    ],
)
def test_bad_options_are_one_line(options, words):
    with pytest.raises(ValueError, match=words):
        Local(**options)


def test_a_plan_that_sums_over_members_is_refused():
    mesh = fzero.fake_mesh({"rp": 2})
    plan = fzero.zero_plan(0, model_of("llama"), mesh)
    with pytest.raises(ValueError, match=r"the plan sums gradients over rp=2; make it, .* with mesh.member\(\)"):
        make_local_step(lambda state, batch: (state, None), plan, OUTER["DiLoCo"], mesh["rp"], Local())


# ---- runs ------------------------------------------------------------------------------------------------------------


def set_all(*values):
    return [part for value in values for part in ("--set", value)]


@exhaustive
@pytest.mark.parametrize(
    "mesh, values",
    [
        ("dp=1,rp=2", ["local.method=diloco"]),
        ("dp=1,rp=2", ["local.method=slowmo", "local.codec=int4"]),
        ("dp=2,rp=2", ["local.method=diloco", "zero=3"]),
        ("dp=1,rp=2", ["local.method=diloco", "local.after=2"]),
        ("dp=1,rp=2", ["local.method=slowmo", "local.after=6", "local.codec=int4"]),
    ],
)
def test_a_command_with_members_resumes_bit_by_bit(tmp_path, mesh, values):
    n, common = math.prod(int(size[-1]) for size in mesh.split(",")), set_all("local.every=2", *values)
    args = [
        *launched.TINY,
        "--steps",
        8,
        "--mesh",
        mesh,
        *common,
        *set_all("train.checkpoint_every=4", "optim.name=adamw"),
    ]
    launched.write_text(tmp_path)
    said = launched.torchrun(tmp_path, n, *args, "--out", "whole", "--prompt", "")
    assert "local steps: 2 members over rp agree once in 2 steps; a rank sends" in said
    launched.torchrun(tmp_path, n, *args, "--out", "parts", "--prompt", "", "--stop-at", 4)
    launched.torchrun(tmp_path, n, "--out", "parts", "--resume", "--prompt", "")
    assert launched.rows(tmp_path / "whole") == launched.rows(tmp_path / "parts")
    assert launched.hashes(tmp_path / "whole") == launched.hashes(tmp_path / "parts")
    losses = [row["loss"] for row in launched.rows(tmp_path / "whole")]
    assert losses[-1] < losses[0]


@exhaustive
def test_a_command_with_plain_members_is_the_command_without(tmp_path):
    launched.write_text(tmp_path)
    args = [*launched.TINY, "--steps", 6, *set_all("optim.name=sgd", "optim.clip=0", "optim.momentum=0")]
    one = set_all("local.method=localsgd", "local.every=1")
    launched.torchrun(tmp_path, 2, *args, "--mesh", "dp=1,rp=2", *one, "--out", "members", "--prompt", "")
    launched.torchrun(tmp_path, 2, *args, "--mesh", "dp=1,rp=2", "--out", "plain", "--prompt", "")
    found, expected = ([row["loss"] for row in launched.rows(tmp_path / run)] for run in ("members", "plain"))
    assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"mesh": {"dp": 2}}, "local.method is diloco, and its members are the ranks of rp, which is 1"),
        ({"train_checkpoint_every": 30}, "checkpoints are of steps after which members agree; make it a multiple"),
        ({"local": {"every": 5}}, "local says how members agree and local.method is empty"),
        ({"local": {"method": "slowmo", "lr": 0}}, "local.lr is 0.0; it must be above 0"),
        ({"local": {"method": "localsgd", "lr": 0.5}}, "local.method is localsgd, which takes the mean of the members"),
        ({"local": {"method": "diloko"}}, "local.method is 'diloko' .did you mean diloco"),
        ({"local": {"method": "diloco", "after": 30}}, "local: after is 30; it must be 0 or a multiple of every = 20"),
        ({"local": {"method": "diloco", "after": 1000}}, "so that members would never train apart; use fewer, a mult"),
        ({"local": {"after": 20}}, "local says how members agree and local.method is empty"),
        ({"train_capture": "auto"}, "train.capture is auto: a recorded step has no agreement in it"),
        ({"guard": {"check_every": 40}}, "guard.check_every is 40: ranks compute each other's micro-batches"),
        ({"optimizer": "onebit_adam"}, "optim.name is onebit_adam, whose errors are of one member"),
    ],
)
def test_configs_with_members_that_do_not_fit_are_one_line(changes, words):
    table = {"mesh": {"rp": 2}, "local": {"method": "diloco"}, "train_checkpoint_every": 40, **changes}
    with pytest.raises(ValueError, match=words) as found:
        made(**table)
    assert "\n" not in str(found.value)


def test_a_plan_of_a_run_with_members_is_that_of_one():
    config = made(mesh={"rp": 2, "dp": 2}, local={"method": "diloco"}, train_checkpoint_every=40, zero=1)
    job = build.build(config, fzero.fake_mesh(config.mesh))
    assert (job.plan.sizes["rp"], job.mesh["rp"].size, job.mesh.size) == (1, 2, 4)
    like, specs = build.like_of(job), build.specs_of(job)
    assert pytree.names(like) == pytree.names(specs) and "extra/outer/0/params/embed/tokens" in pytree.names(like)
    # x_0 of what a rank updates, in float32, both ways
    held = sum(leaf.numel() for leaf in pytree.leaves(like.extra["outer"]["0"].params))
    assert f"a rank sends {2 * 4 * held // 2:,} bytes over rp" in job.members.text(job.plan)
