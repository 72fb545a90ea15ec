"""Loss spikes: the running statistics, and the steps that make no update because of them."""

import functools
import math

import pytest
import ranks
import torch
from close import assert_close, assert_same

import fzero
from fzero import Spike, checkpoint, local_batch, models, optim, reopen_state, state_specs
from fzero.core import precision, pytree
from fzero.offload import DiskTensor, Nvme
from fzero.run import from_table
from fzero.sharding import gather_on_first
from fzero.train import LOSS
from fzero.train.spike import ENTRY
from fzero.train.state import LossStats, init_stats

MESH = fzero.one_process()
SPIKE = Spike(sigmas=1.5, window=3, warmup=4)
NEVER = Spike(sigmas=1.5, window=3, warmup=1000)
SIZES = {"vocab_size": 64, "max_len": 8, "d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 32}
MODEL = models.llama(models.LlamaConfig(**SIZES))
CLIPPED = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
BAD = 6  # the step whose batch is none of the usual ones
POLICIES = {
    "fp32": precision.fp32(),
    "bf16": precision.bf16(),
    "fp16": precision.fp16(precision.LossScale(init=2.0**10, window=3, hysteresis=1)),
}


# -- the statistics


def judged(spike, losses):
    """([whether each of the losses is a spike], the statistics after them)."""
    stats, out = init_stats(), []
    for loss in losses:
        bad, stats = spike.judge(stats, torch.as_tensor(loss, dtype=torch.float64))
        out.append(bool(bad))
    return out, stats


def test_the_statistics_are_those_of_normal_noise_and_forget():
    losses = 3.0 + 0.5 * torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for n in (1, 2, 7, 16):
        _, stats = judged(Spike(sigmas=100.0, window=128, warmup=1000), losses[:n])
        assert_close(stats.mean, losses[:n].mean(), rtol=1e-12)
        assert stats.count == n and stats.mean.dtype == stats.var.dtype == torch.float64
    assert judged(Spike(), losses[:1])[1].var == 0
    _, stats = judged(Spike(sigmas=100.0, window=8 * 4096), losses)  # all of the same weight
    assert_close(stats.var.sqrt(), losses.std(), rtol=0.02)
    # By the formula, in Python's floats.
    mean = dev = 0.0
    for t, loss in enumerate(losses[:200].tolist(), 1):
        r = max(1 / t, 1 / 16)
        d = loss - mean
        mean, dev = mean + r * d, (1 - r) * dev + r * math.sqrt(1 - r) * math.sqrt(math.pi / 2) * abs(d)
    _, stats = judged(Spike(sigmas=100.0, window=128, warmup=1000), losses[:200])
    assert_close(stats.mean, torch.tensor(mean, dtype=torch.float64), rtol=1e-12)
    assert_close(stats.var.sqrt(), torch.tensor(dev, dtype=torch.float64), rtol=1e-12)


SOUND = [1.0, 3.0] * 4


def test_a_spike_is_above_the_bound_of_the_losses_before_it():
    stats = judged(Spike(3.0, 100, 100), SOUND)[1]
    bound = float(stats.mean + 3.0 * stats.var.sqrt())
    assert stats.mean == 2.0 and 4.0 < bound < 7.0
    assert judged(Spike(3.0, 100, 8), [*SOUND, bound - 1e-3])[0][-1] is False
    assert judged(Spike(3.0, 100, 8), [*SOUND, bound + 1e-3])[0][-1] is True
    assert judged(Spike(3.0, 100, 9), [*SOUND, bound + 1e-3])[0][-1] is False  # one loss too few
    assert judged(Spike(3.0, 100, 8), [*SOUND, -50.0])[0][-1] is False  # a good loss is none


def test_a_spike_enters_as_2_deviations_and_what_is_not_finite_does_not():
    spike = Spike(3.0, 100, 8)
    before = judged(spike, SOUND)[1]
    bad, after = judged(spike, [*SOUND, 1e9])
    assert bad[-1] and after.count == 9
    for warmup in (8, 1000):  # in the warm-up too
        entry = [*SOUND, float(before.mean + ENTRY * before.var.sqrt())]
        assert_close(judged(Spike(3.0, 100, warmup), entry)[1], after, rtol=1e-12)
        assert_same(judged(Spike(3.0, 100, warmup), [*SOUND, 1e9])[1], after)
    for loss in (math.inf, math.nan):
        bad, after = judged(spike, [*SOUND, loss])
        assert bad[-1]
        assert_same(after, before)
    assert not judged(spike, [math.nan])[0][-1]  # nothing is judged before the warmup


@pytest.mark.parametrize("growth, noise", [(1.15, 0.02), (1.22, 0.05), (1.5, 0.1), (2.0, 0.1)])
def test_a_loss_that_diverges_over_several_steps_is_a_spike_at_each(growth, noise):
    g = torch.Generator().manual_seed(0)
    curve = torch.cat([torch.full((200,), 2.0), 2.0 * growth ** torch.arange(1.0, 1 + int(10 / math.log(growth)))])
    bad, _ = judged(Spike(), curve * (1 + noise * torch.randn(len(curve), generator=g)))
    assert not any(bad[:200]) and all(bad[202:]), bad[200:]


@pytest.mark.parametrize("step", [8, 20, 49])
def test_an_outlier_in_the_warmup_hides_no_spike(step):
    losses = 0.65 + 0.046 * torch.randn(250, generator=torch.Generator().manual_seed(0))
    losses[step] = 1e5
    for spike in (100, 200):
        assert judged(Spike(), [*losses[:spike], 0.65 + 32 * 0.046])[0] == [False] * spike + [True]
    losses[3] = 1e5  # where deviations are not known yet, after two windows
    assert judged(Spike(), [*losses[:220], 0.65 + 32 * 0.046])[0][-1]


def fallen(steps, start=5.5, end=0.65, over=15.0):
    return end + (start - end) * torch.exp(-torch.arange(steps, dtype=torch.float64) / over)


# The losses of a run without noise, the first step at which a spike is looked for, and the spikes that a change of the
# data may be taken for.
CURVES = {
    "the start of training": (fallen(400), 100, 0),
    "slow training": (3.0 + 8.0 * torch.arange(1, 401, dtype=torch.float64) ** -0.4, 150, 0),
    "finetuning": (fallen(400, 1.2, 0.9, 200.0), 60, 0),
    "a stage with longer sequences": (
        torch.cat([fallen(200), 0.95 - 0.2 * (1 - fallen(200, 1.0, 0.0, 60.0))]),
        320,
        20,
    ),
    "after a rollback": (torch.cat([fallen(150), fallen(150)[120:], fallen(370)[150:]]), 160, 0),
    "--init": (torch.cat([torch.full((3,), 1.4, dtype=torch.float64), fallen(397, 0.9, 0.8, 100.0)]), 60, 0),
}


@pytest.mark.parametrize("window", [100, 30])
@pytest.mark.parametrize("curve", CURVES)
def test_what_lies_before_the_window_hides_no_spike(curve, window):
    """A spike of 32 deviations of the noise would be seen at each step, and noise is none."""
    plain, first, may_be = CURVES[curve]
    noise = torch.randn(len(plain), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spike, stats, spikes = Spike(8.0 if window == 30 else 6.0, window, 50), init_stats(), 0
    for step, loss in enumerate(plain + 0.046 * noise):
        bound = stats.mean + spike.sigmas * stats.var.sqrt()
        assert step < first or plain[step] + 32 * 0.046 > bound, step
        bad, stats = spike.judge(stats, loss)
        spikes += int(bad)
    assert spikes <= may_be


def test_the_loss_of_step_109():
    losses = torch.cat([fallen(79), 0.653 + 0.046 * torch.tensor([1.0, -1.0] * 15, dtype=torch.float64)])
    for spike in (Spike(), Spike(window=30, warmup=30)):
        assert judged(spike, [*losses, 2.116])[0] == [False] * 109 + [True]


def test_losses_that_have_risen_for_good_are_taken_within_tens_of_steps():
    noise = torch.rand(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bad, _ = judged(Spike(), [*(noise[:200]), *(1000.0 + noise[200:])])
    assert not any(bad[:200]) and all(bad[200:206]) and sum(bad) < 50 and not any(bad[250:])


@pytest.mark.parametrize("sigmas, window, most", [(6.0, 100, 48), (2.0, 3, 20), (1.5, 100, 55), (0.5, 20, 22)])
def test_losses_without_noise_that_have_risen_for_good_are_taken(sigmas, window, most):
    spike = Spike(sigmas, window, 50)
    for low, high in ((0.5, 1.0), (0.5, 500.0), (100.0, 101.0), (-1.0, 2.0)):
        bad, _ = judged(spike, [low] * 60 + [high] * 700)
        assert not any(bad[:60]) and bad[60] and sum(bad) <= most + 50 * (high == 500.0), (low, high, sum(bad))
        assert not any(bad[60 + sum(bad) :])  # the new level is no spike from then on
    bad, _ = judged(spike, [0.0] * 60 + [1.0] * 1500)
    assert bad[60] and sum(bad) <= 4 * most
    bad, _ = judged(spike, [0.5] * 60 + [0.5 + 1e-8, 0.5 + 1e-7] * 20)  # rounding
    assert not any(bad)
    bad, after = judged(spike, [0.5] * 60 + [1e9, *[0.5] * 5, 1.0])  # one spike moves them little
    assert [i for i, one in enumerate(bad) if one] == [60, 66] and after.mean < 0.51


def test_judging_maps_over_losses():
    stats = judged(NEVER, [1.0, 3.0, 1.0, 3.0])[1]
    losses = torch.tensor([2.0, 5.0, math.nan, math.inf])
    spike = Spike(2.0, 10, 2)
    bad, after = torch.func.vmap(lambda loss: spike.judge(stats, loss))(losses)
    for i, loss in enumerate(losses):
        one, new = spike.judge(stats, loss)
        assert bad[i] == one
        assert_same(LossStats(*(x[i] for x in after)), new)
    assert bad.tolist() == [False, True, True, True]


NONSENSE = {
    "sigmas": ([0.0, -1.0, math.inf, -math.inf, math.nan, 1e6], r"must be above 0 and below 1e\+06"),
    "window": ([0, 1, -5, 10**9, 10**30], r"must be at least 2 and below 1e\+09"),
    "warmup": ([0, -5, 10**9, 10**30], r"must be at least 1 and below 1e\+09"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_numbers_that_make_no_sense(name):
    values, message = NONSENSE[name]
    for value in values:
        with pytest.raises(ValueError, match=rf"^Spike: {name} is .*; it {message}$"):
            Spike(**{name: value})
        with pytest.raises(ValueError, match=rf"^guard\.{name} is .*; it {message}"):
            from_table({"guard": {"spike": "skip", name: value}})
    for value in (1e30, math.inf, math.nan) if name != "sigmas" else ("6", True):
        with pytest.raises(ValueError, match=rf"^Spike: {name} is .*; it must be a"):
            Spike(**{name: value})


# -- steps


def batch_at(i):
    """The same batch at every step but BAD."""
    g = torch.Generator().manual_seed(1 if i == BAD else 0)
    tokens = torch.randint(0, 64, (8, 9), generator=g)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def in_memory(tree):
    return pytree.map(lambda leaf: leaf.tensor() if isinstance(leaf, DiskTensor) else leaf.clone(), tree)


def trained(
    mesh,
    spike,
    *,
    policy="fp32",
    stage=0,
    micro=1,
    reduce="fast",
    offload="",
    update="end",
    folder=None,
    steps=10,
    donate=True,
):
    """([(loss, skipped, spike)], the state after each step in whole leaves (rank 0's), as on one process)."""
    plan = fzero.zero_plan(stage, MODEL, mesh, reduce=reduce, offload=offload, policy=POLICIES[policy])
    tx = optim.adamw(1e-2) if update == "backward" else CLIPPED
    tx = optim.with_average(tx, 0.9)
    space = Nvme(folder) if offload else None
    state = fzero.init_state(MODEL, tx, plan, seed=0, nvme=space)
    options = {"micro_batches": micro, "execution": fzero.Execution(update=update), "donate": donate}
    step = fzero.make_train_step(MODEL, tx, plan, nvme=space, skip=fzero.Skip(spike=spike), **options)
    log, states = [], []
    for i in range(steps):
        state, metrics = step(state, local_batch(batch_at(i), mesh, micro))
        log.append((float(metrics.loss), bool(metrics.skipped), bool(metrics.spike) if spike else None))
        states.append(in_memory(gather_on_first(in_memory(state), state_specs(plan, tx), mesh)))
    if space is not None:
        last = in_memory(reopen_state(tx, plan, space)) if offload == ALL else None
        space.close()
        if last is not None:
            assert_same(last, states[-1])
    return log, states


ALL = "params=nvme,opt=nvme"


def without(state):
    """What a skipped step leaves alone: parameters, master weights, optimizer state, average."""
    extra = {name: value for name, value in state.extra.items() if name != LOSS}
    return state._replace(step=(), data_cursor=(), scaler=(), extra=extra)


def expect_skipped(log, states, at=BAD):
    assert (
        [i for i, (_, skipped, _) in enumerate(log) if skipped]
        == [at]
        == [i for i, (*_, spike) in enumerate(log) if spike]
    )
    assert_same(without(states[at]), without(states[at - 1]))
    assert int(states[at].step) == at + 1 and int(states[at].data_cursor) == 8 * (at + 1)
    assert states[at].extra[LOSS].count == at + 1
    before, loss = states[at - 1].extra[LOSS], log[at][0]
    bound = before.mean + SPIKE.sigmas * before.var.sqrt()
    assert loss > bound
    entry = min(loss, float(before.mean + ENTRY * before.var.sqrt()))
    assert_close(states[at].extra[LOSS].mean, before.mean + (entry - before.mean) / SPIKE.window, rtol=1e-12)
    # The steps behind it do update.
    assert not torch.equal(states[at + 1].params["embed"]["tokens"], states[at].params["embed"]["tokens"])


@pytest.mark.each_value
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("donate", [True, False])
def test_a_spike_makes_no_update(policy, donate):
    log, states = trained(MESH, SPIKE, policy=policy, micro=2, donate=donate)
    expect_skipped(log, states)
    if policy == "fp16":  # a spike is no overflow: the scale rises through it
        assert states[BAD - 1].scaler.good_steps + 1 == states[BAD].scaler.good_steps


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_judges_and_finds_nothing_has_the_bits_of_one_that_does_not(policy):
    log, states = trained(MESH, NEVER, policy=policy)
    plain, expected = trained(MESH, None, policy=policy)
    assert [row[0] for row in log] == [row[0] for row in plain] and not any(row[1] or row[2] for row in log)
    # The statistics alone differ: a step that judges nothing leaves them.
    judged, plain = (state._replace(extra={}) for state in (states[-1], expected[-1]))
    assert_same(judged, plain)
    assert int(expected[-1].extra[LOSS].count) == 0 and int(states[-1].extra[LOSS].count) == 10


def test_judged_steps_are_resumed_to_the_bit(tmp_path):
    _, states = trained(MESH, SPIKE)
    plan, tx = fzero.zero_plan(0, MODEL, MESH), optim.with_average(CLIPPED, 0.9)
    path = checkpoint.save(tmp_path, states[4], step=5)
    state = checkpoint.restore(path, fzero.init_state(MODEL, tx, plan, seed=9))
    step = fzero.make_train_step(MODEL, tx, plan, skip=fzero.Skip(spike=SPIKE))
    for i in range(5, 10):
        state, _ = step(state, batch_at(i))
    assert_same(state, states[-1])


@pytest.mark.parametrize(
    ("offload", "update"),
    [
        (ALL, "end"),
        (ALL, "backward"),
        *(pytest.param(x, "end", marks=pytest.mark.slow) for x in ("opt=nvme", "opt=host")),
    ],
)
def test_a_spike_makes_no_update_of_an_offloaded_state(offload, update, tmp_path):
    log, states = trained(MESH, SPIKE, offload=offload, update=update, folder=tmp_path / "disk")
    expect_skipped(log, states)


def test_an_early_update_must_be_able_to_undo(tmp_path):
    plan = fzero.zero_plan(0, MODEL, MESH, offload=ALL)
    with pytest.raises(ValueError, match="two slots"):
        space = Nvme(tmp_path, slots=1)
        how, skip = fzero.Execution(update="backward"), fzero.Skip(spike=SPIKE, nonfinite=False)
        fzero.make_train_step(MODEL, optim.sgd(0.1), plan, skip=skip, execution=how, nvme=space)


def on_ranks(mesh, cases):
    out = []
    for case in cases:
        log, states = trained(mesh, SPIKE, micro=8 // mesh.data_size // 2, reduce="canonical", **case)
        out.append((log, states[BAD], states[-1]))
    return out


@functools.cache
def on_one_process(policy):
    return trained(MESH, SPIKE, micro=4, reduce="canonical", policy=policy)


CASES = [{"stage": stage, "policy": policy} for stage, policy in ((0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "bf16"))]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [pytest.param({"dp": 4}, marks=pytest.mark.exhaustive), {"dp": 2, "rp": 2}], ids=str)
def test_all_meshes_judge_alike_to_the_bit(mesh):
    found = ranks.run(4, on_ranks, CASES, mesh=mesh)
    for i, case in enumerate(CASES):
        log, states = on_one_process(case["policy"])
        expect_skipped(log, states)
        for rank in found:
            assert rank[i][0] == log
        assert_same(found[0][i][1], states[BAD])
        assert_same(found[0][i][2], states[-1])
