"""1-bit Adam: steps are the method written out, what was sent and is left is what was owed, bytes are the plan's."""

import contextlib
import math
import tempfile
from unittest import mock

import launched
import linear_loss
import pytest
import ranks
import torch
from checkpoint_cases import assert_same_bits
from close import assert_close
from law_cases import FP64
from linear_loss import SCALED, SHAPES, first_params, linear
from plan_cases import made
from sign_cases import sign_sum, stack
from zero_cases import batch_for, model_of

import fzero
from fzero import LossScale, all_gather, checkpoint, fp16, local_batch, optim, psum, state_specs
from fzero.checkpoint import error_lines, restore_state
from fzero.core import pytree
from fzero.planner import devices
from fzero.planner.closed_layer import Basis, admits_codec
from fzero.planner.estimate import Candidate, estimate_model_states
from fzero.planner.step_trace import trace_step
from fzero.run import build, state_bytes
from fzero.sharding import SignSums, error_feedback, leaf_plan, sent_by_link
from fzero.train import init_local, meta_state

exhaustive = pytest.mark.exhaustive
STEPS, FREEZE, RATE, B1, B2, EPS, DECAY = 20, 6, 0.05, 0.8, 0.9, 1e-6, 0.1
SKIPPED = (3, 9, 13)  # steps whose gradient is not finite on one rank
BETAS = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": DECAY, "mask": "w|u$"}  # of w and u alone
MAKE = {
    "onebit_adam": lambda clip=0.0, freeze=FREEZE: optim.onebit_adam(RATE, freeze=freeze, clip=clip, **BETAS),
    "onebit_lamb": lambda clip=0.0, freeze=FREEZE: optim.onebit_lamb(RATE, freeze=freeze, clip=clip, **BETAS),
    "zero_one_adam": lambda clip=0.0, freeze=9: optim.zero_one_adam(RATE, kappa=2, freeze=freeze, clip=clip, **BETAS),
}
FULL = {"onebit_adam": range(FREEZE), "onebit_lamb": range(FREEZE), "zero_one_adam": (0, 1, 2, 4, 6)}  # after 6: 10
SCALE = {"onebit_adam": "rms", "onebit_lamb": "rms", "zero_one_adam": "mean"}


# ---- by hand: a loss whose gradient is the batch itself --------------------------------------------------------------


def data(step, rows, skipped):
    found = linear_loss.data(step, rows, skipped)
    found["v"][:, 3] = 0.0  # rows that never have a gradient
    return found


def by_steps(mesh, method, stage, micro_batches, policy, skipped, clip):
    """(whole parameters, this rank's errors and numbers over rp and dp, the m after each step) after STEPS steps."""
    options = {"reduce": "once"} if stage > 1 and mesh["rp"].size == 1 else {}
    plan = fzero.zero_plan(stage, first_params(), mesh, policy=policy, codec="grads=1bit", **options)
    state = fzero.init_state(first_params(), tx := MAKE[method](clip), plan, seed=0)
    step = fzero.make_train_step(linear, tx, plan, micro_batches=micro_batches)
    rows, momenta = 2 * micro_batches * mesh.data_size, []
    for i in range(STEPS):
        state, metrics = step(state, local_batch(data(i, rows, skipped), mesh, micro_batches))
        assert bool(metrics.skipped) == (i in skipped)
        momenta.append({name: m.clone() for name, m in pytree.named_leaves(state.opt_state.m).items() if name != "b"})
    shards = optim.sharded(plan.params, mesh, like=plan.like)
    whole = {name: shards.gather(name, leaf) for name, leaf in pytree.named_leaves(state.params).items()}
    return whole, (state.opt_state.worker, state.opt_state.server, (mesh["rp"].rank, mesh["dp"].rank)), momenta


def norm_of(tree):
    return torch.stack([x.square().sum() for x in tree.values()]).sum().sqrt()


def norms(x, name):
    """The norm of a leaf, or of each of its layers, to be multiplied with it."""
    return torch.linalg.vector_norm(stack(x, name), dim=tuple(range(1, stack(x, name).dim())), keepdim=True)


class Lamb:
    """What 1-bit LAMB does with a direction."""

    def __init__(self):
        self.fresh, self.average, self.factor = {}, {}, {}

    def scaled(self, k, p, first, r, full, moments):
        m, before, v, correct2, correct_all = moments
        r_norm, layers = norms(r, k), lambda x: stack(x, k)
        if full:
            self.fresh[k] = v
            ratio = (norms(p, k) / r_norm).clamp(0.01, 10.0)
            self.average[k] = 0.9 * self.average.get(k, 0.0) + 0.1 * ratio
            return (ratio * layers(r)).view(p.shape)
        g = (m - B1 * before) / (1 - B1)
        self.fresh[k] = B2 * self.fresh[k] + (1 - B2) * g * g
        quotient = ((v / correct2).sqrt() + EPS) / ((self.fresh[k] / correct_all).sqrt() + EPS)
        factor = torch.stack([x.max() for x in layers(quotient)]).view(r_norm.shape)
        if k in ("blocks/w", "u"):
            share = (norms(first, k) / r_norm).clamp(max=1.0)
            factor = factor * share + 1 - share
        last = self.factor.get(k, torch.ones_like(factor))
        self.factor[k] = torch.minimum(torch.maximum(factor.clamp(0.5, 4.0), 0.9 * last), 1.1 * last)
        return (self.average[k] * self.factor[k] * layers(r)).view(p.shape)


def by_hand(n, method, micro_batches, skipped, clip, inside=1, cut=1):
    """The same by the method written out, of n terms that are each a sum in full over so many ranks `inside`, and are
    cut into so many parts: (parameters, errors, errors of servers)."""
    p = {name: leaf.clone() for name, leaf in pytree.named_leaves(first_params()).items()}
    m, v = ({name: torch.zeros_like(leaf) for name, leaf in p.items()} for _ in range(2))
    e = {name: torch.zeros(n, *stack(p[name], name).shape).double() for name in p if name != "b"}
    f = {name: torch.zeros_like(x[0]) for name, x in e.items()}
    t, moved, lamb = 0, 0, Lamb()
    for i in range(STEPS):
        if i in skipped:
            continue
        batch, before, rows = data(i, 2 * micro_batches * n * inside, ()), dict(m), 2 * inside
        g = {
            k: x.view(micro_batches, n, rows, *SHAPES[k]).sum((0, 2)) / (micro_batches * n * rows)
            for k, x in batch.items()
        }
        full = t in FULL[method]
        if full:
            total = {k: x.sum(0) for k, x in g.items()}
            by = min(1.0, clip / norm_of(total)) if clip else 1.0
            for k in p:
                m[k] = B1 * m[k] + (1 - B1) * by * total[k]
                v[k] = B2 * v[k] + (1 - B2) * (by * total[k]) ** 2
        else:
            for k in p:
                if k == "b":
                    m[k] = B1 * m[k] + (1 - B1) * g[k].sum(0)
                    continue
                terms = torch.stack([stack(B1 * m[k] / n + (1 - B1) * g[k][r], k) for r in range(n)])
                sent, e[k], f[k] = sign_sum(n, terms, e[k], f[k], stack(m[k] != 0, k), SCALE[method], cut)
                m[k] = sent.view(m[k].shape)
            by = min(1.0, clip / norm_of(m)) if clip else 1.0
            m = {k: by * x for k, x in m.items()}
        t, moved = t + 1, moved + full
        for k in p:
            first = (m[k] / (1 - B1**t)) / ((v[k] / (1 - B2**moved)).sqrt() + EPS)
            r = first + DECAY * p[k] * (k in ("blocks/w", "u"))
            if method == "onebit_lamb":
                r = lamb.scaled(k, p[k], first, r, full, (m[k], before[k], v[k], 1 - B2**moved, 1 - B2**t))
            p[k] = p[k] - RATE * r
    return p, e, f


def expect_law(mesh, method, stage, micro_batches=1, policy=FP64, skipped=(), clip=0.0, mistake=None):
    """The steps on a mesh are those by hand; what was sent and what is left are what was owed."""
    case = method, stage, micro_batches, policy, skipped, clip
    results = ranks.run(math.prod(mesh.values()), with_mistake, mistake, *case, mesh=mesh)
    n, inside = (mesh["rp"], mesh["dp"]) if "rp" in mesh else (mesh["dp"], 1)
    cut = inside if stage else 1
    params, e, f = by_hand(n, method, micro_batches, skipped, clip, inside, cut)
    for found, (worker, server, (rp, dp)), _ in results:
        rank, part = (rp, dp % cut) if "rp" in mesh else (dp, 0)
        assert_close({k: found[k] for k in params}, params, rtol=1e-12, atol=1e-12)
        mine = {k: x[rank].chunk(cut, 1)[part] for k, x in e.items()}
        assert_close({k: worker[k][:, 0] for k in e}, mine, rtol=1e-11, atol=1e-12)
        mine = {k: x.chunk(cut, 1)[part].chunk(n, 1)[rank].reshape(server[k].shape) for k, x in f.items()}
        assert_close(server, mine, rtol=1e-11, atol=1e-12)
    assert all(float(x.abs().max()) > 1e-4 for x in [*e.values(), *f.values()])
    if not clip and "rp" not in mesh:
        expect_nothing_lost(n, method, micro_batches, skipped, results)


def expect_nothing_lost(n, method, micro_batches, skipped, results):
    """b1 m + (1 - b1) g is owed in a step and the new m is sent: the differences add up to the errors."""
    momenta, made = results[0][2], [i for i in range(STEPS) if i not in skipped]
    for name in momenta[0]:
        owed = torch.zeros(SHAPES[name], dtype=torch.float64)
        for before, i in ((made[t - 1], made[t]) for t in range(len(made)) if t not in FULL[method]):
            g = data(i, 2 * micro_batches * n, ())[name].sum(0) / (2 * micro_batches * n)
            owed += B1 * momenta[before][name] + (1 - B1) * g - momenta[i][name]
        left = sum(worker[name][:, 0] for _, (worker, *_), _ in results)
        parts = [stack(server[name], name) for _, (_, server, _), _ in results]
        left = left + torch.cat(parts, 1)
        assert_close(owed.view(left.shape), left, rtol=1e-11, atol=1e-11)


CASES = [
    ({"dp": 2}, 1, 2, {"policy": SCALED, "skipped": SKIPPED}),
    ({"dp": 4}, 0, 1, {"clip": 0.25}),
    ({"dp": 2}, 0, 1, {}),
    ({"dp": 4}, 1, 1, {}),
    ({"dp": 2}, 2, 2, {"clip": 0.25}),
    ({"dp": 4}, 3, 2, {"policy": SCALED, "skipped": SKIPPED}),
    ({"dp": 2}, 3, 1, {}),
    ({"dp": 4}, 2, 1, {}),
    ({"rp": 2, "dp": 2}, 3, 2, {"clip": 0.25}),
    ({"rp": 2, "dp": 2}, 1, 1, {"policy": SCALED, "skipped": SKIPPED}),
    ({"rp": 2, "dp": 2}, 2, 2, {}),
    ({"rp": 4, "dp": 1}, 0, 1, {}),
]
FIRST = {("onebit_adam", 0)}


@pytest.mark.parametrize(
    "method, case",
    [pytest.param(m, i, marks=[exhaustive] * ((m, i) not in FIRST)) for m in MAKE for i in range(len(CASES))],
)  # fmt: skip
def test_steps_are_the_method_written_out(method, case):
    mesh, stage, micro_batches, options = CASES[case]
    expect_law(mesh, method, stage, micro_batches, **options)


# ---- planted mistakes ------------------------------------------------------------------------------------------------

SEND, SERVE, ENCODE, SIGNS = SignSums.send, SignSums.serve, error_feedback.encode, SignSums.by_signs
OTHER = {"u": "v", "v": "u"}


def forgets(self, sums, term, worker, server, scale):
    SIGNS(self, sums, term, {k: x.clone() for k, x in worker.items()}, server, scale)


def serves_nothing_later(self, sums, term, worker, server, scale):
    SIGNS(self, sums, term, worker, {k: torch.zeros_like(x) for k, x in server.items()}, scale)


def of_another_leaf(self, sums, term, worker, server, scale):
    SIGNS(self, sums, term, {k: worker[OTHER.get(k, k)] for k in worker}, server, scale)


def with_momentum_of_each(self, sums, term, worker, server, scale):
    more = lambda name: term(name) + B1 * sums[name] * (1 - 1 / self.ranks(name))  # noqa: E731
    SIGNS(self, sums, more, worker, server, scale)


def with_scale_of_another_block(x, mask, scale):
    bits, sizes = ENCODE(x, mask, scale)
    return bits, sizes.roll(1, 0)


def unmasked(self, name, last, term, worker, scale):
    return SEND(self, name, torch.ones_like(last), term, worker, scale)


MISTAKES = {
    "a rank's error forgotten": (SignSums, "by_signs", forgets),
    "a server's error forgotten": (SignSums, "by_signs", serves_nothing_later),
    "the error of another leaf": (SignSums, "by_signs", of_another_leaf),
    "the scale of another block": (error_feedback, "encode", with_scale_of_another_block),
    "rows without a gradient in the mean": (SignSums, "send", unmasked),
    "the momentum once for each rank": (SignSums, "by_signs", with_momentum_of_each),
}


def with_mistake(mesh, mistake, *case):
    with mock.patch.object(*MISTAKES[mistake]) if mistake else contextlib.nullcontext():
        return by_steps(mesh, *case)


@exhaustive
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_breaks_the_law(mistake):
    with pytest.raises(AssertionError):
        expect_law({"dp": 2}, "onebit_adam", 1, 2, SCALED, SKIPPED, mistake=mistake)


# ---- models on every mesh --------------------------------------------------------------------------------------------


KINDS = ("all_to_all", "all_gather")


def noted(notes):
    """`SignSums.send` that adds up what a rank owes."""

    def send(self, name, last, term, worker, scale):
        notes[name] = notes.get(name, 0.0) + term * (last != 0)
        return SEND(self, name, last, term, worker, scale)

    return send


def trained(mesh, method, name, stage, policy, options):
    """(by leaf the largest difference of what was owed from what was sent and is left; {link: bytes} in the last step
    of the warm-up and in the last one, by the ledger; by the plan; bytes of signs; layers and elements of their leaves)
    of this rank."""
    model, tx, notes, came, sent = model_of(name), MAKE[method](freeze=2), {}, {}, []
    plan = fzero.zero_plan(stage, model, mesh, policy=policy, codec="grads=1bit", **options)
    state = fzero.init_state(model, tx, plan, seed=3)
    step = fzero.make_train_step(model, tx, plan, micro_batches=2)
    with mock.patch.object(SignSums, "send", noted(notes)):
        for i in range(5):
            mesh.ledger.clear()
            state, metrics = step(state, local_batch(batch_for(i, 4 * mesh.data_size), mesh, 2))
            assert not bool(metrics.skipped) and math.isfinite(metrics.grad_norm)
            sent.append([row for row in mesh.ledger.rows() if row.phase not in ("metrics", "check")])
            for leaf, m in pytree.named_leaves(state.opt_state.m).items() if notes else ():
                came[leaf] = came.get(leaf, 0.0) + m
    worst, signs = {}, SignSums(plan)
    assert set(notes) == plan.coded_grads == set(state.opt_state.worker)
    for leaf, owed in notes.items():
        axis, at = signs.axes[leaf], 1 if leaf.startswith("blocks/") else 0
        all_of_it = psum(owed - state.opt_state.worker[leaf].view(owed.shape), axis)
        left = all_gather(state.opt_state.server[leaf].contiguous(), axis, at)
        worst[leaf] = float((all_of_it - came[leaf] - left).abs().max() / all_of_it.abs().max())
    links = {link: found for link, found in plan.sent_by_link().items() if link not in ("tp", "cp")}  # activations too
    said = [{k: sent_by_link(plan, signs=False)[k][1] + 2 * part for k, (part, _) in links.items()}]
    said.append({k: once + 2 * part for k, (part, once) in links.items()})
    mine = leaf_plan.sent_of(plan, mesh["pp"].rank) if plan.stages is not None else ()
    by_table = {
        kind: sum(one.per_step for one in mine if (one.collective, one.itemsize) == (kind, 1)) for kind in KINDS
    }
    found = [{k: sum(row.bytes for row in sent[i] if row.axis == k) for k in links} for i in (1, 4)]
    of_signs = [row for row in sent[4] if row.leaf in plan.coded_grads and row.dtype == "uint8"]
    by_collective = {kind: sum(row.bytes for row in of_signs if row.collective == kind) for kind in KINDS}
    assert by_table == (by_collective if mine else dict.fromkeys(KINDS, 0))
    layers = {leaf: owed.shape[0] if leaf.startswith("blocks/") else 1 for leaf, owed in notes.items()}
    return worst, found, said, by_collective, [(layers[leaf], owed.numel()) for leaf, owed in notes.items()]


PRODUCTS = {
    "dp2": ({"dp": 2}, "llama", 1, FP64, {}),
    "dp4, tied": ({"dp": 4}, "gpt2", 0, FP64, {}),
    "dp2 x tp2": ({"dp": 2, "tp": 2}, "llama", 1, FP64, {"sequence": True}),
    "dp2 x cp2": ({"dp": 2, "cp": 2}, "llama", 1, FP64, {}),
    "dp2, stage 3": ({"dp": 2}, "llama", 3, FP64, {"reduce": "once"}),
    "dp2 x pp2": ({"dp": 2, "pp": 2}, "llama", 1, FP64, {}),
    "rp2 x dp2, stage 3": ({"rp": 2, "dp": 2}, "llama", 3, FP64, {}),
    "rp2 x dp2, stage 2, bf16": ({"rp": 2, "dp": 2}, "llama", 2, "bf16", {}),
    "rp2 x tp2, tied": ({"rp": 2, "dp": 1, "tp": 2}, "gpt2", 1, FP64, {}),
    "rp2 x cp2": ({"rp": 2, "dp": 1, "cp": 2}, "llama", 1, FP64, {}),
    "rp2 x pp2": ({"rp": 2, "dp": 1, "pp": 2}, "llama", 1, FP64, {}),
    "dp2, bf16": ({"dp": 2}, "llama", 1, "bf16", {}),
    "dp2, fp16": ({"dp": 2}, "llama", 0, fp16(LossScale(init=2.0**8)), {}),
}


@exhaustive
@pytest.mark.parametrize("case", PRODUCTS)
def test_nothing_is_lost_on_any_mesh(case):
    sizes, name, stage, policy, options = PRODUCTS[case]
    n = math.prod(sizes.values())
    results = ranks.run(n, trained, "onebit_adam", name, stage, policy, options, mesh=sizes, timeout_s=300)
    data = sizes.get("rp", n // sizes.get("tp", 1) // sizes.get("pp", 1))
    scale = 8 if policy is FP64 else 4
    for worst, found, said, signs, leaves in results:
        assert max(worst.values()) < (1e-11 if policy is FP64 else 1e-3)
        if "pp" not in sizes:  # where the plan's table says what each rank sends
            assert found == said  # in the last step of the warm-up, and in the last one
        each = sum(elements // 8 + layers * data * scale for layers, elements in leaves) * (data - 1) // data
        assert signs == {"all_to_all": each, "all_gather": each}


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def made_on(mesh, stage):
    model, tx = model_of("llama"), optim.with_average(optim.onebit_adam(1e-2, freeze=2), 0.9)
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64, codec="grads=1bit")
    return model, tx, plan, fzero.make_train_step(model, tx, plan)


def go(mesh, step, state, first, last):
    for i in range(first, last):
        state, _ = step(state, local_batch(batch_for(i, 8), mesh, 1))
    return state


def owed_of(state):
    """Copies of (errors of this rank, errors of what it serves, m) of leaves that are sent by signs."""
    inner = state.opt_state.inner
    found = [pytree.named_leaves(tree) for tree in (inner.worker, inner.server, inner.m)]
    return [{k: x.clone() for k, x in leaves.items() if k in inner.worker} for leaves in found]


def saved(mesh, folder, stage):
    """The errors of this rank after 4 steps, saved; and the state of 2 more."""
    model, tx, plan, step = made_on(mesh, stage)
    state = go(mesh, step, fzero.init_state(model, tx, plan, seed=3), 0, 4)
    checkpoint.save(folder, state, step=4, specs=state_specs(plan, tx), mesh=mesh)
    return owed_of(state), go(mesh, step, state, 4, 6)


def resumed(mesh, folder, stage, mistake=None):
    _, tx, plan, step = made_on(mesh, stage)
    path, like = checkpoint.latest(folder), meta_state(plan, tx)
    with mock.patch.object(restore_state, "read_share", SHARES[mistake]) if mistake else contextlib.nullcontext():
        state = restore_state.restore_state(path, like, state_specs(plan, tx), plan, None)
    return owed_of(state), go(mesh, step, state, 4, 6), error_lines(path, plan, pytree.names(like))


READ = restore_state.read_share
SHARES = {
    "each rank has all of it": lambda held, sources, whole, *rest: READ(held, sources, whole, *rest) * whole[1],
    "that of one rank": lambda held, sources, *rest: torch.zeros_like(READ(held, sources, *rest)),
    "that of another leaf": lambda held, sources, *rest: READ(
        held, [source.replace("mlp/w_up", "mlp/w_gate") for source in sources], *rest
    ),
}


def all_owed(results):
    """{leaf: what all ranks owe of it}."""
    found = {}
    for name in results[0][0][0]:
        worker = sum(owed[0][name][:, 0] for owed, *_ in results)
        found[name] = worker + torch.cat([stack(owed[1][name], name) for owed, *_ in results], 1)
    return found


@exhaustive
def test_a_resumed_run_goes_on_bit_by_bit_and_loses_nothing_elsewhere():
    with tempfile.TemporaryDirectory() as folder:
        before = ranks.run(2, saved, folder, 1)
        for (_, went_on), (_, state, said) in zip(before, ranks.run(2, resumed, folder, 1)):
            assert_same_bits(state, went_on)
            assert said == []
        after = ranks.run(4, resumed, folder, 0)
        assert (
            "leaves of errors were other ranks', or in other codes; each rank begins with its share" in after[0][2][0]
        )
        expect_kept(before, after)
        for mistake in SHARES:
            with pytest.raises(AssertionError):
                expect_kept(before, ranks.run(4, resumed, folder, 0, mistake))
        assert_close(after[0][0][2], before[0][0][2], rtol=0, atol=0)  # m is whole on every rank
        alone = ranks.run(1, resumed, folder, 1)[0]
        assert alone[0][:2] == [{}, {}] and "which are dropped: the run keeps none" in alone[2][0]


def expect_kept(before, after):
    """What all ranks owe together is what those before them did."""
    was, now = all_owed(before), all_owed(after)
    assert was.keys() == now.keys()
    for name in was:
        assert_close(now[name], was[name], rtol=1e-12, atol=1e-14)
        assert float(now[name].abs().max()) > 0


@exhaustive
@pytest.mark.parametrize("method", MAKE)
def test_a_command_resumes_bit_by_bit(tmp_path, method):
    args = [*launched.TINY, "--steps", 8, "--mesh", "dp=2", "--zero", 1]
    for value in (f"optim.name={method}", "optim.freeze_steps=3", "train.checkpoint_every=4", "guard.check_every=4"):
        args += ["--set", value]
    said = launched.expect_resumed_equals_whole(tmp_path, 2, args, 5)
    assert "codec grads=1bit: the optimizer sends signs of " in said


def not_donated(mesh):
    """The states of steps that keep their input, and that do not."""
    out = []
    for donate in (True, False):
        model, tx, plan, _ = made_on(mesh, 1)
        step = fzero.make_train_step(model, tx, plan, donate=donate)
        state = go(mesh, step, fzero.init_state(model, tx, plan, seed=3), 0, 3)
        before = pytree.map(torch.clone, state.opt_state)
        after = go(mesh, step, state, 3, 4)
        if not donate:
            assert_same_bits(state.opt_state, before)
        out.append(after)
    return out


@exhaustive
def test_a_step_that_keeps_its_input_gives_the_same():
    for donated, kept in ranks.run(2, not_donated):
        assert_close(kept.params, donated.params, rtol=1e-9, atol=1e-11)
        assert_close(kept.opt_state, donated.opt_state, rtol=1e-8, atol=1e-10)


# ---- configs and plans of runs ---------------------------------------------------------------------------------------


@exhaustive
def test_a_config_has_the_codec_of_its_optimizer():
    config = made(optimizer="onebit_adam", mesh={"dp": 2}, zero=1)
    job = build.build(config, fzero.fake_mesh(config.mesh))
    assert job.plan.codec.signs and job.tx.sums.makes and config.codec == ""
    held = state_bytes(job, build.like_of(job))[0]["opt"]
    said = estimate_model_states(config.model, config.mesh, zero=1, precision="fp32", optimizer="onebit_adam").optimizer
    assert 0 <= said / held - 1 < 0.02  # the estimate takes norms for leaves that are sent by signs


def test_configs_that_do_not_go_together_are_one_line():
    for options, words in (
        ({"codec": "grads=int4"}, "sends signs of its momentum, and codec is grads=int4; leave --codec out"),
        (
            {"optim_freeze_steps": 10},
            "optim.freeze_steps is 10 and train.steps 10, so that onebit_lamb would never send",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            made(optimizer="onebit_lamb", mesh={"dp": 2}, **options)
    with pytest.raises(ValueError, match=r"codec is grads=1bit and optim.name is adamw, which makes no sums"):
        made(codec="grads=1bit", mesh={"dp": 2})


@exhaustive
def test_a_search_tries_the_stages_and_meshes_that_signs_have():
    basis = Basis(made(optimizer="zero_one_adam", ranks=2), devices.device("h100"), 2, {})
    taken = [(zero, rp, off) for zero in range(4) for rp in (1, 2) for off in ("", "opt=host", "acts=host")
             if admits_codec(basis, Candidate(2, rp, 1, zero, "none", off, 2))]  # fmt: skip
    meshes = [(0, 1), (0, 2), (1, 1), (1, 2), (2, 2), (3, 2)]  # stages 2 and 3 sum over dp within each replica
    assert taken == [(zero, rp, off) for zero, rp in meshes for off in ("", "acts=host")]


@exhaustive
def test_a_plan_counts_what_a_step_sends():
    config = made(optimizer="onebit_adam", mesh={"dp": 2}, zero=0)
    trace, plan = trace_step(config, config.mesh), build.build(config, fzero.fake_mesh(config.mesh)).plan
    sent = sum(row.bytes for row in trace.ledger if row.axis == "dp" and row.phase in ("reduce", "update"))
    assert sent == plan.sent_by_link()["dp"][1]


# ---- bad input -------------------------------------------------------------------------------------------------------

MATRIX = {"w": torch.zeros(16, 8)}


@pytest.mark.parametrize(
    "sizes, stage, options, words",
    [
        ({"dp": 2}, 2, {}, 'stage 2 sums each micro-batch into shards; use reduce="once", or stage 0 or 1'),
        ({"dp": 2}, 1, {"offload": "opt=host"}, "w rests in memory 'host', which is updated layer by layer"),
        ({"dp": 2}, 1, {"offload": "opt=nvme"}, "w rests in memory 'nvme', which is updated layer by layer"),
        ({"dp": 2}, 1, {"reduce": "canonical"}, 'reduce="canonical" promises the same bits on every mesh'),
    ],
)
def test_plans_without_signs_are_one_line(sizes, stage, options, words):
    with pytest.raises(ValueError, match=words) as found:
        fzero.zero_plan(stage, MATRIX, fzero.fake_mesh(sizes), codec="grads=1bit", **options)
    assert str(found.value).startswith("codec grads=1bit: ") and "\n" not in str(found.value)


@pytest.mark.parametrize("text", ["grads=1bit,loco", "grads=1bit,params=int8", "grads=1bit,hpz", "grads=1bit,block=64"])
def test_other_codecs_beside_signs_are_one_line(text):
    with pytest.raises(ValueError, match="codec: grads is 1bit, whose optimizer has errors and scales of its own"):
        fzero.zero_plan(3, MATRIX, fzero.fake_mesh({"dp": 2}), codec=text, reduce="once")
    with pytest.raises(ValueError, match=r"params is '1bit'.*; it must be one of int8, int4, fp8_e4m3"):
        fzero.zero_plan(3, MATRIX, fzero.fake_mesh({"dp": 2}), codec="params=1bit")


def test_experts_over_ep_are_one_line():
    model = model_of("moe dropless", n_experts=4)
    with pytest.raises(ValueError, match=r"ep=2 shards the experts .*, whose sums are over fewer ranks"):
        fzero.zero_plan(1, model, fzero.fake_mesh({"ep": 2}), codec="grads=1bit")


def test_plan_and_optimizer_go_together():
    mesh, tx = fzero.fake_mesh({"dp": 2}), optim.onebit_adam(freeze=3)
    signs, full = (fzero.zero_plan(1, MATRIX, mesh, codec=codec) for codec in ("grads=1bit", None))
    for other in (optim.adamw(), optim.chain(optim.clip_by_global_norm(1.0), tx)):
        with pytest.raises(
            ValueError, match=r"leaves sums of gradients to the optimizer, and this one makes none; use op"
        ):
            fzero.make_train_step(linear, other, signs)
    with pytest.raises(ValueError, match=r'sends signs .*; write zero_plan\(\.\.\., codec="grads=1bit"\)'):
        fzero.make_train_step(linear, tx, full)
    with pytest.raises(
        ValueError, match="delayed updates: codec grads=1bit keeps the errors of one gradient at a time"
    ):
        signs.with_updates(1)
    with pytest.raises(ValueError, match="local steps: codec grads=1bit keeps errors that are of one member"):
        init_local(fzero.init_state(MATRIX, tx, signs, seed=0), signs, optim.sgd(1.0))
    with pytest.raises(ValueError, match="onebit_adam: freeze is 0; it must be a whole number of at least 1"):
        optim.onebit_adam(freeze=0)
