"""0/1 Adam's local steps: they are the paper's written out and send nothing; checkpoints between two sums."""

import contextlib
import importlib
import math
import tempfile
from unittest import mock

import launched
import pytest
import ranks
import torch
from checkpoint_cases import assert_same_bits
from close import assert_close
from law_cases import FP64
from linear_loss import SCALED, SHAPES, data, first_params
from plan_cases import made
from sign_cases import sign_sum, stack
from zero_cases import model_of

import fzero
from fzero import checkpoint, local_batch, optim, state_specs
from fzero.checkpoint import error_lines, restore_state
from fzero.core import pytree
from fzero.optim import Intervals
from fzero.optim.zero_one_adam import Rule
from fzero.planner import devices, resolve_for, slow_link_options
from fzero.planner import plan as planning
from fzero.run import build
from fzero.sharding import sent_by_link, updates
from fzero.train import meta_state, sum_divergence
from fzero.train.update import InMemoryUpdate

zero_one_adam = importlib.import_module("fzero.optim.zero_one_adam")  # of its name there is a function too

exhaustive = pytest.mark.exhaustive
STEPS, FREEZE, B1, B2, EPS, DECAY = 24, 6, 0.8, 0.9, 1e-6, 0.1
FULL = (0, 1, 2, 4)  # with kappa=2, before FREEZE: in steps 3 and 5 signs of m are sent
SKIPPED = (3, 9, 13)  # steps whose gradient is not finite on one rank


def lr(step):
    """A rate that changes, so that the units of errors matter."""
    return 0.05 * 0.95**step


def method(clip=0.0, every=4, double=4):
    return optim.zero_one_adam(
        lambda count: lr(count.to(torch.float64)), B1, B2, EPS, kappa=2, freeze=FREEZE, weight_decay=DECAY,
        mask="w|u$", clip=clip, sum_every=every, sum_double=double,
    )  # fmt: skip


def quadratic(params, batch):
    """(sum over rows of p^2 / 2 + x p, rows): its gradient depends on where a rank is."""
    named, rows = pytree.named_leaves(params), batch["b"].shape[0]
    return sum((batch[name] * leaf).sum() + 0.5 * rows * leaf.square().sum() for name, leaf in named.items()), rows


def plan_of(mesh, stage, policy=FP64):
    return fzero.zero_plan(stage, first_params(), mesh, policy=policy, codec="grads=1bit,local")


def numbers(step, rows, skipped):
    found = data(step, rows, skipped)
    found["v"][:, 3] = 0.0
    return found


def expected_sum(step, double=4, every=4):
    """Whether a step from FREEZE on sums, as the paper counts: intervals of 1, 2, 4 steps, each for 4 steps."""
    at, length, begin = FREEZE, 1, FREEZE
    while True:
        if at + length - 1 >= step:
            return at + length - 1 == step
        at += length
        if at - begin == double:
            begin, length = at, min(2 * length, every)


# ---- the paper's update, written out ---------------------------------------------------------------------------------


def by_steps(mesh, stage, micro_batches, policy, skipped, clip, meet):
    """(whole parameters, errors, errors of servers and what each has of its own; the bytes of each step by kind)."""
    plan, tx = plan_of(mesh, stage, policy), method(clip)
    state = fzero.init_state(first_params(), tx, plan, seed=0)
    step, sent = fzero.make_train_step(quadratic, tx, plan, micro_batches=micro_batches), []
    for i in range(STEPS):
        mesh.ledger.clear()
        state, metrics = step(
            state, local_batch(numbers(i, 2 * micro_batches * mesh.data_size, skipped), mesh, micro_batches)
        )
        assert bool(metrics.skipped) == (i in skipped)
        rows = [row for row in mesh.ledger.rows() if row.phase not in ("metrics", "check")]
        link = "rp" if mesh["rp"].size > 1 else "dp"
        sent.append(
            [sum(row.bytes for row in rows if row.axis == axis) for axis in (link, "dp" if link == "rp" else "")]
        )
        state = sum_divergence(tx, plan, state) if i == meet else state
    shards = optim.sharded(plan.params, mesh, like=plan.like)
    whole = {name: shards.gather(name, leaf) for name, leaf in pytree.named_leaves(state.params).items()}
    behind = [(t, leaf.layers) for leaf in plan.leaves.values() for t in updates(plan, leaf)]
    gathered = sum(t.elements * t.itemsize * layers for t, layers in behind if "where ranks are" in t.words)
    said = sent_by_link(plan, signs=False)[link][1], plan.sent_by_link()[link][1], gathered
    assert (gathered > 0) == (stage in (1, 2))
    return whole, (state.opt_state.worker, state.opt_state.server, state.opt_state.extra), sent, said


def clipped(m, clip):
    norm = torch.stack([x.square().sum() for x in m.values()]).sum().sqrt()
    by = min(1.0, clip / norm) if clip else 1.0
    return {k: by * x for k, x in m.items()}


def by_hand(n, inside, stage, micro_batches, skipped, clip, meet):
    """The same of n workers, each of so many ranks `inside`: (parameters, e, f, m_i, u_i)."""
    x0 = {name: leaf.clone() for name, leaf in pytree.named_leaves(first_params()).items()}
    x, m, u = [dict(x0) for _ in range(n)], [{k: 0 * p for k, p in x0.items()} for _ in range(n)], None
    v, cut = {k: 0 * p for k, p in x0.items()}, inside if stage else 1
    e = {k: torch.zeros(n, *stack(p, k).shape).double() for k, p in x0.items() if k != "b"}
    f = {k: torch.zeros_like(x[0]) for k, x in e.items()}
    t = moved = 0
    for i in range(STEPS):
        if i in skipped:
            continue
        batch = numbers(i, 2 * micro_batches * n * inside, ())
        rows = {k: b.view(micro_batches, n, inside * 2, *SHAPES[k]).sum((0, 2)) for k, b in batch.items()}
        g = [{k: x[r][k] + rows[k][r] / (2 * micro_batches * inside) for k in x0} for r in range(n)]
        rate, decay = lr(t), {k: lr(t) * DECAY * (k in ("blocks/w", "u")) for k in x0}
        keep, rho = {k: 1 - decay[k] for k in x0}, rate / (1 - B1 ** (t + 1))
        if t < FREEZE:
            total = clipped({k: sum(one[k] for one in g) / n for k in x0}, clip if t in FULL else 0.0)
            if t in FULL:
                m0 = {k: B1 * m[0][k] + (1 - B1) * total[k] for k in x0}
                v, moved = {k: B2 * v[k] + (1 - B2) * total[k] ** 2 for k in x0}, moved + 1
            else:
                m0 = {"b": B1 * m[0]["b"] + (1 - B1) * total["b"]}
                for k in e:
                    terms = torch.stack([stack(B1 * m[0][k] + (1 - B1) * g[r][k], k) / n for r in range(n)])
                    s, e[k], f[k] = sign_sum(n, terms, e[k], f[k], stack(m[0][k] != 0, k), "mean", cut)
                    m0[k] = s.view(x0[k].shape)
                m0 = clipped(m0, clip)
            root = {k: (v[k] / (1 - B2**moved)).sqrt() + EPS for k in x0}
            x0 = {k: keep[k] * x0[k] - torch.where(v[k] > 0, rho * m0[k] / root[k], 0.0) for k in x0}
            x, m = [dict(x0) for _ in range(n)], [dict(m0) for _ in range(n)]
            t, last = t + 1, rho
            continue
        if t == FREEZE:  # from here on errors are of the rate times m
            e, f = ({k: last * x for k, x in owed.items()} for owed in (e, f))
            root = {k: (v[k] / (1 - B2**moved)).sqrt() + EPS for k in x0}
            u, span = [{k: 0 * p for k, p in x0.items()} for _ in range(n)], dict.fromkeys(x0, 0.0)
        for r in range(n):
            m[r] = clipped({k: B1 * m[r][k] + (1 - B1) * g[r][k] for k in x0}, clip)
            for k in x0:
                u[r][k] = keep[k] * u[r][k] + rho * m[r][k]
                x[r][k] = keep[k] * x[r][k] - torch.where(v[k] > 0, rho * m[r][k] / root[k], 0.0)
        span, x0 = {k: keep[k] * s + rho for k, s in span.items()}, {k: keep[k] * p for k, p in x0.items()}
        if expected_sum(t) or i == meet:
            for k in x0:
                mean = sum(one[k] for one in u) / n
                if k != "b":
                    terms = torch.stack([stack(one[k], k) / n for one in u])
                    s, e[k], f[k] = sign_sum(n, terms, e[k], f[k], stack(v[k] != 0, k), "mean", cut)
                    mean = s.view(x0[k].shape)
                x0[k] = x0[k] - torch.where(v[k] > 0, mean / root[k], 0.0)
                for r in range(n):
                    m[r][k], x[r][k], u[r][k] = mean / span[k], x0[k].clone(), 0 * u[r][k]
            span = dict.fromkeys(x0, 0.0)
        t += 1
    return x0, e, f, m, u


def part_of(x, name, cut, rank):
    """The part of a leaf [layers, ...] that one of so many ranks updates."""
    return x.chunk(cut, 1)[rank]


def expect_law(sizes, stage, micro_batches=1, policy=FP64, skipped=(), clip=0.0, meet=None, mistake=None):
    n, inside = sizes.get("rp", sizes["dp"]), sizes["dp"] if "rp" in sizes else 1
    found = ranks.run(
        math.prod(sizes.values()), with_mistake, mistake, stage, micro_batches, policy, skipped, clip, meet, mesh=sizes
    )
    params, e, f, m, u = by_hand(n, inside, stage, micro_batches, skipped, clip, meet)
    seen = set()
    for whole, (worker, server, extra), sent, said in found:
        assert_close({k: whole[k] for k in params}, params, rtol=1e-11, atol=1e-11)
        for k in e:  # which worker it is, and which part of it, by what it keeps
            near = [
                (r, j)
                for r in range(n)
                for j in range(inside if stage else 1)
                if worker[k][:, 0].allclose(part_of(e[k][r], k, inside if stage else 1, j), rtol=1e-9, atol=1e-10)
            ]
            assert len(near) == 1, k
            (r, j), cut = near[0], inside if stage else 1
            seen.add((k, r, j))
            for key, terms in (("own", m), ("moved", u)):
                mine = extra[key][k][:, 0]
                assert_close(mine, part_of(stack(terms[r][k], k), k, cut, j), rtol=1e-10, atol=1e-11)
            assert_close(
                server[k], part_of(part_of(f[k], k, cut, j), k, n, r).reshape(server[k].shape), rtol=1e-10, atol=1e-11
            )
        expect_bytes(sent, said, skipped)
    assert len(seen) == len(e) * n * (inside if stage else 1)
    assert all(float(x.abs().max()) > 1e-6 for x in [*e.values(), *f.values(), *u[0].values()])
    assert float((m[0]["u"] - m[1]["u"]).abs().max()) > 1e-3  # the run ends between two sums


def expect_bytes(sent, said, skipped):
    """A step sends in full, signs, or nothing at all; inside of a node as in the first one, and where the rank is."""
    t = 0
    for i, (size, inside) in enumerate(sent):
        if i in skipped:
            assert size == 0
            continue
        if t > FREEZE and not expected_sum(t - 1):
            assert inside == sent[0][1] + said[2], t
        kind = 0 if t in FULL else 1 if t < FREEZE or expected_sum(t) else None
        assert size == (0 if kind is None else said[kind]), t
        t += 1
    assert [expected_sum(t) for t in range(FREEZE, t)].count(False) > 6


CASES = {
    # A sum more behind the second local step of four, so that the next sum is of the other two.
    "dp2, fp16's scale": ({"dp": 2}, 0, 2, {"policy": SCALED, "skipped": SKIPPED, "meet": 18}),
    "dp4, clipped": ({"dp": 4}, 0, 1, {"clip": 0.25}),
    "rp2 x dp2, stage 0": ({"rp": 2, "dp": 2}, 0, 1, {}),
    "rp2 x dp2, stage 1": ({"rp": 2, "dp": 2}, 1, 2, {"clip": 0.25}),
    "rp2 x dp2, stage 2": ({"rp": 2, "dp": 2}, 2, 2, {"policy": SCALED, "skipped": SKIPPED}),
    "rp2 x dp2, stage 3": ({"rp": 2, "dp": 2}, 3, 2, {}),
    "rp4, stage 3": ({"rp": 4, "dp": 1}, 3, 1, {}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[exhaustive] * (case != "dp2, fp16's scale")) for case in CASES]
)
def test_steps_are_the_paper_written_out(case):
    sizes, stage, micro_batches, options = CASES[case]
    expect_law(sizes, stage, micro_batches, **options)


# ---- planted mistakes ------------------------------------------------------------------------------------------------

RATE, MOVE, ADD_UP = Rule.rate, zero_one_adam.move, zero_one_adam.add_up


def keeps_units(rule, shards, g, params, state, decays):
    errors = [*state.worker.values(), *state.server.values()]
    kept = [x.clone() for x in errors]
    updates = MOVE(rule, shards, g, params, state, decays)
    for x, before in zip(errors, kept):
        x.copy_(before)
    return updates


def keeps_steps(most):
    def add_up(rule, shards, params, state, *rest):
        state.extra["since"].copy_(torch.clamp(state.extra["since"], *most))
        ADD_UP(rule, shards, params, state, *rest)

    return add_up


MISTAKES = {
    "gradients at what all have": (InMemoryUpdate, "with_local_params", lambda self, state: state),
    "errors of u in the units of m": (zero_one_adam, "move", keeps_units),
    "the rate of another step": (Rule, "rate", lambda self, count: RATE(self, count - 1)),
    "momentum by the last rate alone": (zero_one_adam, "add_up", keeps_steps((None, 1))),
    "momentum by the rates before the last sum": (zero_one_adam, "add_up", keeps_steps((4, None))),
    "no decay of what was moved": (Rule, "decay", lambda self, count, decays: 0.0 * RATE(self, count)),
}


def with_mistake(mesh, mistake, *case):
    with mock.patch.object(*MISTAKES[mistake]) if mistake else contextlib.nullcontext():
        return by_steps(mesh, *case)


@exhaustive
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_breaks_the_law(mistake):
    with pytest.raises(AssertionError):
        expect_law({"dp": 2}, 0, mistake=mistake)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def go(mesh, step, state, first, last):
    for i in range(first, last):
        state, _ = step(state, local_batch(numbers(i, 8, ()), mesh, 1))
    return state


def steps_of(mesh, stage):
    plan, tx = plan_of(mesh, stage), optim.with_average(method(every=4, double=0), 0.9)
    return plan, tx, fzero.make_train_step(quadratic, tx, plan)


def saved(mesh, folder, stage):
    """What this rank has of its own after 9 steps, one step into an interval of 4, saved; and the state of 5 more."""
    plan, tx, step = steps_of(mesh, stage)
    state = go(mesh, step, fzero.init_state(first_params(), tx, plan, seed=0), 0, 9)
    checkpoint.save(folder, state, step=9, specs=state_specs(plan, tx), mesh=mesh)
    return own_of(mesh, plan, state), go(mesh, step, state, 9, 14)


def own_of(mesh, plan, state):
    """{(kind, leaf): what a rank has of its own [layers or 1, 1, ...], whole over dp}; copies."""
    shards = optim.sharded(plan.opt, mesh, like=plan.like)
    found = {}
    for kind in ("own", "moved"):
        for name, x in state.opt_state.inner.extra[kind].items():
            mine = x.view(pytree.named_leaves(state.opt_state.inner.v)[name].shape)
            found[kind, name] = (shards.gather(name, mine) if mesh["rp"].size > 1 else mine).clone()
    return found


def resumed(mesh, folder, stage):
    plan, tx, step = steps_of(mesh, stage)
    path, like = checkpoint.latest(folder), meta_state(plan, tx)
    state = restore_state.restore_state(path, like, state_specs(plan, tx), plan, None)
    return own_of(mesh, plan, state), go(mesh, step, state, 9, 14), error_lines(path, plan, pytree.names(like))


@exhaustive
@pytest.mark.parametrize("sizes, stage", [({"dp": 2}, 0), ({"rp": 2, "dp": 2}, 3)])
def test_a_run_resumes_between_two_sums_bit_by_bit_and_elsewhere_with_the_means(sizes, stage):
    n = math.prod(sizes.values())
    with tempfile.TemporaryDirectory() as folder:
        before = ranks.run(n, saved, folder, stage, mesh=sizes)
        for (own, went_on), (read, state, said) in zip(before, ranks.run(n, resumed, folder, stage, mesh=sizes)):
            assert_same_bits(state, went_on)
            assert_same_bits(read, own)
            assert said == []
        for mesh in ({"dp": 4}, {"rp": 2, "dp": 1}, {"dp": 1}):
            after = ranks.run(math.prod(mesh.values()), resumed, folder, 0, mesh=mesh)
            as_many, lines = mesh.get("rp", mesh["dp"]) == sizes.get("rp", sizes["dp"]), after[0][2]
            assert lines == [] if as_many else "and with the mean of what each had of its own" in lines[0]
            for key in before[0][0]:
                means = [torch.stack([own[key] for own, *_ in results]).mean(0) for results in (before, after)]
                assert_close(means[1], means[0], rtol=1e-12, atol=1e-14)
                assert float(means[0].abs().max()) > 0


@exhaustive
def test_a_command_resumes_between_two_sums(tmp_path):
    args = [*launched.TINY, "--steps", 10, "--mesh", "dp=2", "--zero", 0, "--set", "optim.name=zero_one_adam"]
    for value in ("optim.freeze_steps=3", "optim.sum_every=4", "train.checkpoint_every=2", "guard.check_every=4"):
        args += ["--set", value]
    said = launched.expect_resumed_equals_whole(tmp_path, 2, args, 5)
    assert (
        "codec grads=1bit,local: the optimizer sends signs of " in said
        and "local steps send none of it over dp" in said
    )
    since = {}  # step of a checkpoint -> the steps since its last sum; the sum of the run's last step is one more
    for step in (8, 10):
        path = checkpoint.step_folder(tmp_path / "whole/checkpoints", step)
        with contextlib.closing(checkpoint.open_checkpoint(path)) as held:
            since[step] = int(held.read("opt_state/inner/extra/since"))
    assert since == {8: 1, 10: 0}


def not_donated(mesh):
    """The states of steps that keep their input, and that do not."""
    out = []
    for donate in (True, False):
        plan, tx = plan_of(mesh, 0), method()
        step = fzero.make_train_step(quadratic, tx, plan, donate=donate)
        state = go(mesh, step, fzero.init_state(first_params(), tx, plan, seed=0), 0, 12)
        before = pytree.map(torch.clone, state.opt_state)
        after = go(mesh, step, state, 12, 13)
        if not donate:
            assert_same_bits(state.opt_state, before)
        out.append(after)
    return out


@exhaustive
def test_a_step_that_keeps_its_input_gives_the_same():
    for donated, kept in ranks.run(2, not_donated):
        assert_close(kept.params, donated.params, rtol=1e-12, atol=1e-13)
        assert_close(kept.opt_state, donated.opt_state, rtol=1e-12, atol=1e-13)


# ---- on one process, in a config, and bad input ----------------------------------------------------------------------


def test_one_process_alone_sums_what_it_moved():
    tx = optim.zero_one_adam(0.1, 0.5, 0.9, freeze=1, sum_every=2, weight_decay=0.0)
    params, one = {"w": torch.ones(2, dtype=torch.float64)}, torch.ones(2, dtype=torch.float64)
    state, x = tx.init(params), []
    for _ in range(3):
        x.append(tx.sums.local(state, params))
        updates, state = tx.update({"w": one}, state, params)
        params = optim.apply_updates(params, updates)
    assert x[:2] == [None, None]  # together before the first local step
    rates = [0.1 / (1 - 0.5 ** (t + 1)) for t in range(3)]
    moved = [rates[1] * 0.75, rates[1] * 0.75 + rates[2] * 0.875]  # v is as in the first step, where v-hat is 1
    assert_close(x[2]["w"], (1 - 0.1 - moved[0]) * one, rtol=1e-7, atol=0)
    assert_close(params["w"], (1 - 0.1 - moved[1]) * one, rtol=1e-7, atol=0)
    assert_close(state.extra["own"]["w"], moved[1] / (rates[1] + rates[2]) * one, rtol=1e-12, atol=0)


def test_a_sum_behind_the_last_step_is_that_of_a_step_that_sums():
    def steps(every, meet):
        inner = optim.zero_one_adam(lr_of, 0.5, 0.9, freeze=1, sum_every=every, weight_decay=0.1)
        tx, params = optim.with_average(inner, 0.9), {"w": torch.tensor([1.0, -3.0], dtype=torch.float64)}
        plan = fzero.zero_plan(0, params, fzero.one_process(), policy=FP64, codec="grads=1bit,local")
        step, state = fzero.make_train_step(quadratic, tx, plan), fzero.init_state(params, tx, plan, seed=0)
        for i in range(4):
            state, _ = step(state, {name: torch.full((2, 2), i + 1.0).double() for name in ("w", "b")})
        return sum_divergence(tx, plan, state) if meet else state

    lr_of = lambda count: lr(count.to(torch.float64))  # noqa: E731
    summed, apart, met = steps(3, False), steps(7, False), steps(7, True)
    assert_close(met.params, summed.params, rtol=1e-14, atol=0)
    assert_close(met.opt_state, summed.opt_state, rtol=1e-14, atol=0)
    assert float((apart.params["w"] - summed.params["w"]).abs().max()) > 0.05
    assert summed.opt_state.inner.extra["since"] == 0 and apart.opt_state.inner.extra["since"] == 3


def test_a_config_has_its_codec_and_first_local_step():
    config = made(optimizer="zero_one_adam", mesh={"dp": 2}, zero=0, optim_sum_every=4)
    job = build.build(config, fzero.fake_mesh(config.mesh))
    assert str(job.plan.codec) == "grads=1bit,local" and job.tx.sums.local is not None


MATRIX = {"w": torch.zeros(16, 8)}
LOCAL = "grads=1bit,local"


def on(sizes, stage=0, codec=LOCAL, model=MATRIX):
    return fzero.zero_plan(stage, model, fzero.fake_mesh(sizes), codec=codec)


def step_with(codec, **options):
    return fzero.make_train_step(quadratic, optim.zero_one_adam(freeze=2, **options), on({"dp": 2}, codec=codec))


BAD = {
    "sum_every is 4, which is of the steps after v has moved last": lambda: optim.zero_one_adam(sum_every=4),
    "sum_every is 0; it must be a whole number": lambda: optim.zero_one_adam(freeze=2, sum_every=0),
    "sum_double is 12 and sum_every 6": lambda: optim.zero_one_adam(freeze=2, sum_every=6, sum_double=12),
    "sum_double is 6 and sum_every 4": lambda: optim.zero_one_adam(freeze=2, sum_every=4, sum_double=6),
    "sum_double is 2 and sum_every 4": lambda: made(optimizer="zero_one_adam", optim_sum_every=4, optim_sum_double=2),
    "local leaves sums to an optimizer that sends signs": lambda: on({"dp": 2}, codec="grads=int4,local"),
    "each rank moves parameters and momentum of its own, and stage 1 shares": lambda: on({"dp": 2}, 1),
    "and with pp=2 leaves outside of the layers": lambda: on({"dp": 2, "pp": 2}, model=model_of("llama")),
    "this one sums in each step; use optim.zero_one_adam": lambda: step_with(LOCAL),
    "the optimizer makes local steps, between which": lambda: step_with("grads=1bit", sum_every=2),
    "and the plan sums gradients in each; write zero_plan": lambda: step_with(None, sum_every=2),
}


@pytest.mark.parametrize("words", BAD)
def test_what_does_not_go_together_is_one_line(words):
    with pytest.raises(ValueError, match=words) as found:
        BAD[words]()
    assert "\n" not in str(found.value)


# ---- plans -----------------------------------------------------------------------------------------------------------


@exhaustive
def test_a_plan_of_local_steps_has_their_share_of_the_sums():
    slow, sizes = devices.between_nodes(devices.device("h100", ranks_on_node=2), "0.05:5"), {"rp": 2, "dp": 2}
    reports = []
    for every in (1, 2, 4):
        config = made(optimizer="zero_one_adam", mesh=sizes, zero=3, parts=1, optim_sum_every=every)
        reports.append(planning.reports_of(resolve_for(config, slow), sizes, slow)(slow))
    each, second, fourth = (report.step_s for report in reports)
    assert each > second > fourth
    # Of t = local + (sum - local) x the part of the 10 steps that sum: 2 before the first local one, and 4 or 2 then.
    local = 3 * fourth - 2 * second
    assert 0.9 < (second - local) / (0.6 * (each - local)) < 1.1
    once = sum(once for _, once in build.build(reports[2].config, fzero.fake_mesh(sizes)).plan.sent_by_link().values())
    assert "makes no sum, and has its share of the time of those that do over the run: 4 of 10 steps send" in str(
        reports[2]
    )
    between = [slow_link_options.sent_by_level(report, sizes, slow)[1] for report in reports]
    metrics = 3 * between[2] - 2 * between[1]
    assert between[1] - metrics == pytest.approx(0.6 * (between[0] - metrics), rel=0.05) and between[2] < once


@pytest.mark.parametrize("every, double", [(1, 0), (3, 0), (4, 0), (4, 4), (8, 16), (2, 6)])
def test_sums_of_a_run_are_counted_as_they_are_made(every, double):
    intervals = Intervals(3, every, double)
    for steps in range(3, 80):
        assert intervals.count_sums(steps) == sum(bool(intervals.sums(torch.tensor(i))) for i in range(3, steps))
