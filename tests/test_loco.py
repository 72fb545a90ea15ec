"""Error feedback of a codec (LoCo): what was sent and what is left is what was owed, whatever happens in between."""

import contextlib
import math
import tempfile
from unittest import mock

import pytest
import ranks
import torch
from checkpoint_cases import assert_same_bits
from close import assert_close, assert_same
from law_cases import FP64
from linear_loss import SCALED, data, first_params, linear
from plan_cases import made
from test_plan_memory import fullest, measured
from zero_cases import batch_for, model_of

import fzero
from fzero import checkpoint, local_batch, optim, state_specs
from fzero.checkpoint import error_lines, restore_state
from fzero.core import pytree
from fzero.kernels import Kernels
from fzero.planner import devices
from fzero.planner.closed_layer import Basis, admits_codec
from fzero.planner.estimate import Candidate
from fzero.planner.step_trace import trace_step
from fzero.run import build, state_bytes
from fzero.sharding import ERROR, ERRORS, Codec, ErrorFeedback, error_feedback
from fzero.sharding.plan_table import error_bytes
from fzero.train import coder_for, coder_of, init_local, meta_state, sdc_check

exhaustive = pytest.mark.exhaustive
STEPS, RATE, BLOCK = 20, 0.25, 16
SKIPPED = (6, 7, 13)  # steps whose gradient is not finite on one rank


# ---- by hand: a loss whose gradient is the batch itself --------------------------------------------------------------


def by_steps(mesh, text, micro_batches, policy, skipped):
    """(parameters, this rank's errors) after STEPS steps."""
    plan = fzero.zero_plan(2, first_params(), mesh, policy=policy, codec=text)
    state = fzero.init_state(first_params(), tx := optim.sgd(RATE), plan, seed=0)
    step = fzero.make_train_step(linear, tx, plan, micro_batches=micro_batches)
    rows = 2 * micro_batches * mesh.data_size
    for i in range(STEPS):
        state, metrics = step(state, local_batch(data(i, rows, skipped), mesh, micro_batches))
        assert bool(metrics.skipped) == (i in skipped)
    return pytree.named_leaves(state.params), errors_in(plan, state)["data"]


def errors_in(plan, state):
    """The errors of a state: what codes stand for, if they rest so."""
    held, coder = state.extra.get(ERRORS, {}), coder_for(plan.codec, "errors", Kernels())
    if coder is None:
        return held
    found = {}
    for hop in [hop for hop in held if not hop.endswith("_scale")]:
        of = {name: (held[hop][name], held[f"{hop}_scale"][name]) for name in held[hop]}
        found[hop] = {name: coder.decode(one, torch.float64, one[0].shape[-1]) for name, one in of.items()}
    return found


def by_hand(n, text, micro_batches, skipped):
    """The same by the method written out: (parameters, {leaf: errors [rows, senders, *layer]}, what was owed, but for
    what the rounding of errors took)."""
    codec = Codec.parse(text)
    coder = coder_of(codec.grads, codec.block, Kernels())

    def at_rest(e):
        return near(e, codec.errors, codec.block) if codec.errors else e

    params = {name: leaf.clone() for name, leaf in pytree.named_leaves(first_params()).items()}
    owed = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
    coded = [name for name in params if name != "b"]
    errors = {name: torch.zeros(stack(params[name], name).shape, dtype=torch.float64) for name in coded}
    errors = {name: e[:, None].repeat(1, n, *[1] * (e.dim() - 1)) for name, e in errors.items()}
    for i in range(STEPS):
        if codec.reset is not None and i % codec.reset == 0:
            errors = {name: torch.zeros_like(e) for name, e in errors.items()}
        batch, new, sums = data(i, 2 * micro_batches * n, skipped), {k: e.clone() for k, e in errors.items()}, {}
        average = {k: codec.loco * e for k, e in errors.items()}
        gone = {name: torch.zeros_like(stack(params[name], name)) for name in coded}
        for name in params:
            parts = batch[name].view(micro_batches, n, 2, *params[name].shape).sum(2)
            if name not in coded:
                sums[name] = parts.sum((0, 1))
                continue
            total = torch.zeros_like(stack(params[name], name))
            for j in range(micro_batches):
                for sender in range(n):
                    for row, g in enumerate(stack(parts[j, sender], name)):
                        h = g + codec.loco * new[name][row, sender]
                        flat = h.reshape(n, -1)
                        sent = coder.decode(coder.encode(flat), torch.float64, flat.shape[1]).view(h.shape)
                        average[name][row, sender] *= 1 - codec.loco  # LoCo's own form
                        average[name][row, sender] += codec.loco * (h - sent)
                        exact = average[name][row, sender] / codec.loco
                        new[name][row, sender] = at_rest(exact)
                        gone[name][row] += exact - new[name][row, sender]
                        if i not in skipped:
                            bound = exact.abs().max() / 254 * 1.0001
                            assert float((exact - new[name][row, sender]).abs().max()) <= bound
                        average[name][row, sender] = codec.loco * new[name][row, sender]
                        total[row] += sent
            sums[name] = total.view(params[name].shape)
        if i in skipped:
            continue
        errors = new
        for name, leaf in params.items():
            leaf -= RATE * sums[name] / (2 * micro_batches * n)
            owed[name] += batch[name].sum(0)
        for name in coded:
            owed[name] -= gone[name].view(params[name].shape)
    return params, errors, owed


def near(e, kind, block):
    """A tensor in codes and back."""
    coder = coder_of(kind, block, Kernels())
    return coder.decode(coder.encode(e), torch.float64, e.shape[-1])


def stack(leaf, name):
    return leaf if name.startswith("blocks/") else leaf[None]


def expect_law(n, text, micro_batches, policy=FP64, skipped=(), mistake=None):
    """The steps on n ranks are those by hand, and the sum of what was sent and is left is what was owed."""
    results = ranks.run(n, with_mistake, mistake, text, micro_batches, policy, skipped)
    params, errors, owed = by_hand(n, text, micro_batches, skipped)
    codec, start = Codec.parse(text), pytree.named_leaves(first_params())
    for rank, (found, held) in enumerate(results):
        assert_close({k: found[k] for k in params}, params, rtol=1e-12, atol=1e-12)
        assert_close({k: held[k][:, 0] for k in errors}, {k: e[:, rank] for k, e in errors.items()}, atol=1e-12)
    if codec.reset is None:
        sent = {k: (start[k] - results[0][0][k]) * (2 * micro_batches * n) / RATE for k in errors}
        left = {k: sum(held[k][:, 0] for _, held in results) for k in errors}
        both = {k: sent[k] + left[k].view(sent[k].shape) for k in errors}
        assert_close(both, {k: owed[k] for k in errors}, rtol=1e-11, atol=1e-11)
        assert all(float(x.abs().max()) > 1e-3 for x in left.values())


@pytest.mark.parametrize(
    "n, text, micro_batches, scaled",
    [
        (2, "grads=int4,block=16,loco", 2, True),
        (2, "grads=int4,block=16,loco,reset=8,errors=int8", 2, True),
        pytest.param(4, "grads=int4,block=16,loco,errors=int8", 1, False, marks=exhaustive),
        pytest.param(4, "grads=int8,block=16,loco=1", 1, False, marks=exhaustive),
        pytest.param(2, "grads=int4,block=16,loco=1", 1, False, marks=exhaustive),
        pytest.param(2, "grads=int8,block=16,loco=0.3,reset=7", 2, True, marks=exhaustive),
        pytest.param(4, "grads=int4,block=16,loco,reset=6", 1, True, marks=exhaustive),
        pytest.param(4, "grads=fp8_e4m3,block=32,loco=0.5", 3, False, marks=exhaustive),
        pytest.param(3, "grads=int4,block=16,loco", 1, False, marks=[exhaustive]),
    ],
)
def test_what_is_left_and_was_sent_is_what_was_owed(n, text, micro_batches, scaled):
    if n == 3:  # a dim of 8 does not divide: all leaves travel as they are
        plan = fzero.zero_plan(2, first_params(), fzero.fake_mesh({"dp": 3}), codec=text)
        assert not plan.coded_grads and "travel as they are: those of blocks/w, u, v" in str(plan)
        return
    expect_law(n, text, micro_batches, SCALED if scaled else FP64, SKIPPED if scaled else ())


# ---- planted mistakes ------------------------------------------------------------------------------------------------

AT, SETTLE, PACK = ErrorFeedback.next_error, ErrorFeedback.settle, error_feedback.pack
OTHER = {"u": "v", "v": "u"}


def begun_anew(self, plan, held, unit, step, kept):
    INIT(self, plan, held, torch.ones_like(unit), step, kept)


INIT = ErrorFeedback.__init__
MISTAKES = {
    "forgotten": (ErrorFeedback, "settle", lambda self, skipped, donate: self.stored),
    "of other rows of the leaf": (error_feedback, "pack", lambda tensors, n, dtype: PACK(tensors, n, dtype).roll(1, 0)),
    "of another layer": (
        ErrorFeedback,
        "next_error",
        lambda self, h, name, row: AT(self, h, name, row ^ (name == "blocks/w")),
    ),
    "of another leaf": (
        ErrorFeedback,
        "next_error",
        lambda self, hop, name, row: AT(self, hop, OTHER.get(name, name), row),
    ),
    "of the step before in each micro-batch": (
        ErrorFeedback,
        "next_error",
        lambda s, hop, name, row: s.stored[hop][name][row, 0],
    ),
    "not undone": (ErrorFeedback, "settle", lambda self, skipped, donate: SETTLE(self, None, donate=donate)),
    "in units of the loss scale": (ErrorFeedback, "__init__", begun_anew),
    "with scales of another block": (
        ErrorFeedback,
        "read",
        lambda self, pieces: READ(self, (pieces[0], pieces[1].roll(1, 0))),
    ),
}
READ = ErrorFeedback.read
QUICK = ("in units of the loss scale", "with scales of another block")


def with_mistake(mesh, mistake, *case):
    with mock.patch.object(*MISTAKES[mistake]) if mistake else contextlib.nullcontext():
        return by_steps(mesh, *case)


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[exhaustive] * (name not in QUICK)) for name in MISTAKES]
)  # fmt: skip
def test_a_mistake_breaks_the_law(mistake):
    text = "grads=int4,block=16,loco" + ",errors=int8" * ("scales" in mistake)
    with pytest.raises(AssertionError):
        expect_law(2, text, 2, SCALED, SKIPPED, mistake)


# ---- every mesh: what each sender encodes, and what is left of it ----------------------------------------------------


def observed(notes, original):
    """`ErrorFeedback.coder` that notes what a sender owes and what it sends, by (hop, leaf, row)."""

    def coder(self, plain, link, names, row, n):
        made, hop = original(self, plain, link, names, row, n), "rp" if link == "rp" else "data"

        def encode(terms):
            codes = made.encode(terms)
            sent = plain.decode(codes, torch.float64, terms.shape[1])
            widths = [self.stored[hop][name][row].numel() // n for name in names]
            for name, owed, near in zip(names, terms.split(widths, 1), sent.split(widths, 1)):
                shape = self.stored[hop][name][row, 0].shape
                owed, near = (x.reshape(shape) / self.unit.double() for x in (owed, near))
                so_far = notes.setdefault((hop, name, row), [0.0, 0.0, 0])
                notes[hop, name, row] = [so_far[0] + owed, so_far[1] + near, so_far[2] + 1]
            return codes

        return plain._replace(encode=encode)

    return coder


def trained(mesh, name, codec, micro_batches, options, changes, steps=3):
    """(the largest difference between what was owed and what was sent and is left, of what was owed; the number of
    sends of a step's leaves; hops and senders; what the plan says; errors; their specs) of this rank, for one step."""
    model, tx, notes = model_of(name, **changes), optim.sgd(1e-3), {}
    plan = fzero.zero_plan(options.get("stage", 3), model, mesh, policy=FP64, codec=codec, **options.get("plan", {}))
    state = fzero.init_state(model, tx, plan, seed=3)
    step = fzero.make_train_step(model, tx, plan, micro_batches=micro_batches)
    rows = 4 * micro_batches * mesh.data_size
    with mock.patch.object(ErrorFeedback, "coder", observed(notes, ErrorFeedback.coder)):
        for i in range(steps):
            state, _ = step(state, local_batch(batch_for(i, rows), mesh, micro_batches))
    held, worst = state.extra[ERRORS], 0.0
    for (hop, leaf, row), (owed, sent, _) in notes.items():
        difference = sent + held[hop][leaf][row, 0] - owed
        worst = max(worst, float(difference.abs().max()) / (1e-3 + float(owed.abs().max())))
    rows_here = {(hop, leaf, row) for hop in held for leaf, e in held[hop].items() for row in range(e.shape[0])}
    assert rows_here == set(notes), rows_here ^ set(notes)
    specs = {k: v for k, v in pytree.named_leaves(state_specs(plan, tx)).items() if k.startswith(ERROR)}
    senders = {(leaf.split("/")[2], spec.dims[1]) for leaf, spec in specs.items()}
    sends = {count for *_, count in notes.values()}
    return worst, sends, senders, error_bytes(plan), pytree.named_leaves({"extra": {ERRORS: held}}), specs


EVEN = {"n_experts": 4, "n_kv_heads": 4}
DP = {("data", ("dp",))}
ONCE = {"dp": 2}, "llama", 3, {"stage": 2, "plan": {"reduce": "once"}}, DP, {1}
PRODUCTS = {
    "dp2": ({"dp": 2}, "llama", 2, {}, DP, {2}),
    "dp2, stage 2, summed once": ONCE,
    "dp2, offloaded": ({"dp": 2}, "llama", 2, {"plan": {"offload": "opt=host,grads=host"}}, DP, {2}),
    "dp4": ({"dp": 4}, "gpt2", 1, {}, DP, {1, 2}),  # what embeds is the head too
    "dp2 x cp2": ({"dp": 2, "cp": 2}, "llama", 1, {}, {("data", ("dp", "cp"))}, {1}),
    "dp2 x tp2": ({"dp": 2, "tp": 2}, "llama", 2, {}, DP, {2}),
    "dp2 x tp2, sequence": (
        {"dp": 2, "tp": 2}, "moe dropless", 1, {"plan": {"sequence": True}, "changes": EVEN},
        {("data", ("dp",)), ("data", ("dp", "tp"))}, {1},
    ),
    "dp2 x pp2": ({"dp": 2, "pp": 2}, "llama", 3, {}, DP, {3}),
    "dp2 x pp2, tied": ({"dp": 2, "pp": 2}, "gpt2", 2, {}, DP, {2}),
    "dp2 x rp2": ({"dp": 2, "rp": 2}, "llama", 2, {"hpz": True}, {("data", ("dp", "rp")), ("rp", ("rp",))}, {2, 1}),
    "ep2": (
        {"ep": 2, "dp": 2}, "moe dropless", 1, {"changes": EVEN}, {("data", ("dp", "ep")), ("data", ("dp",))}, {1},
    ),
}  # fmt: skip


FIRST = ("dp2 x rp2",)


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[exhaustive] * (name not in FIRST)) for name in PRODUCTS]
)  # fmt: skip
def test_each_sender_has_its_own_error_on_every_mesh(case):
    sizes, name, micro_batches, options, senders, sends = PRODUCTS[case]
    text = f"grads=int4,block=16,loco{',hpz' * options.get('hpz', False)}"
    n, changes = math.prod(sizes.values()), options.get("changes", {})
    results = ranks.run(n, trained, name, text, micro_batches, options, changes, mesh=sizes, timeout_s=300)
    for worst, counts, links, *_ in results:
        assert worst < 1e-12
        assert (links, counts) == (senders, {steps * 3 for steps in sends})
    held, (*_, specs) = [result[4] for result in results], results[0]
    sizes_held = [sum(x.nbytes for x in leaves.values()) for leaves in held]
    assert max(sizes_held) == results[0][3] and (len(set(sizes_held)) == 1 or "pp" in sizes)
    for leaf, spec in specs.items():
        groups = sdc_check.replicas(spec, fzero.fake_mesh(sizes))
        for group in groups:
            assert all(torch.equal(held[rank][leaf], held[group[0]][leaf]) for rank in group), leaf
        ones = [held[group[0]][leaf] for group in groups if held[group[0]][leaf].numel()]
        assert len({x.double().numpy().tobytes() for x in ones}) == len(ones), leaf  # no two senders have the same


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def made_on(mesh, text, name="llama"):
    model, tx = model_of(name, d_ff=32), optim.adam(1e-2)  # rows of two blocks of 16
    plan = fzero.zero_plan(3, model, mesh, policy=FP64, codec=text)
    return model, tx, plan, fzero.make_train_step(model, tx, plan)


def go(mesh, step, state, first, last):
    for i in range(first, last):
        state, _ = step(state, local_batch(batch_for(i, 16), mesh, 1))
    return state


def saved(mesh, folder, text, on):
    """The errors of this rank after 3 steps, saved; and the state of 2 more."""
    model, tx, plan, step = made_on(mesh, text)
    state = go(mesh, step, fzero.init_state(model, tx, plan, seed=3), 0, 3)
    checkpoint.save(folder, state, step=3, specs=state_specs(plan, tx), mesh=mesh)
    held = pytree.map(torch.clone, errors_in(plan, state))
    return held, go(mesh, step, state, 3, 5) if on else None


def resumed(mesh, folder, text, on):
    _, tx, plan, step = made_on(mesh, text)
    path = checkpoint.latest(folder)
    like = meta_state(plan, tx)
    state = restore_state.restore_state(path, like, state_specs(plan, tx), plan, None)
    held = pytree.map(torch.clone, errors_in(plan, state))
    return held, go(mesh, step, state, 3, 5) if on else None, error_lines(path, plan)


def sums_of(results, sizes):
    """{leaf: the sum over senders of its errors, all hops together, layer by layer}; on meshes of dp, and dp x rp."""
    found = {}
    for rank, result in enumerate(results):
        for hop, leaves in result[0].items():
            for name, leaf in leaves.items():
                total = leaf.sum(1) if name.startswith("blocks/") else leaf.sum((0, 1))[None]
                if hop == "rp":  # a rank has the part of a layer that it keeps over dp
                    whole = total.new_zeros(total.shape[0], total.shape[1] * sizes["dp"], *total.shape[2:])
                    at = rank % sizes["dp"] * total.shape[1]
                    whole[:, at : at + total.shape[1]] = total
                    total = whole
                found[name] = found.get(name, 0) + total
    return found


LOCO = "grads=int4,block=16,loco"
LOCO8 = f"{LOCO},errors=int8"


@pytest.mark.parametrize(
    "before, after, lines",
    [
        (
            ({"dp": 4}, LOCO),
            ({"dp": 2}, LOCO),
            "leaves of errors were other ranks', or in other codes; each rank begins",
        ),
        (({"dp": 2}, LOCO8), ({"dp": 4}, LOCO8), "were other ranks', or in other codes"),
        pytest.param(({"dp": 2}, LOCO8), ({"dp": 2}, LOCO), "in other codes", marks=exhaustive),
        pytest.param(({"dp": 2}, LOCO), ({"dp": 2}, LOCO8), "in other codes", marks=exhaustive),
        pytest.param(({"dp": 2}, LOCO8), ({"dp": 2}, LOCO8.replace("=16", "=32")), "in other codes", marks=exhaustive),
        pytest.param(({"dp": 2}, LOCO), ({"dp": 4}, LOCO), "were other ranks'", marks=exhaustive),
        pytest.param(({"dp": 2, "rp": 2}, f"{LOCO},hpz"), ({"dp": 2}, LOCO), "were other ranks'", marks=exhaustive),
        pytest.param(({"dp": 2}, LOCO), ({"dp": 2, "rp": 2}, f"{LOCO},hpz"), "were other ranks'", marks=exhaustive),
    ],
)
def test_other_senders_share_what_was_owed(before, after, lines, tmp_path):
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        old = ranks.run(math.prod(before[0].values()), saved, folder, before[1], False, mesh=before[0])
        new = ranks.run(math.prod(after[0].values()), resumed, folder, after[1], True, mesh=after[0])
    owed, there = sums_of(old, before[0]), sums_of(new, after[0])
    if "errors" in after[1]:  # each share is rounded to within half a scale, of a block's largest number
        for name, of in owed.items():
            assert float((there[name] - of).abs().max()) <= float(of.abs().max()) / 254 * 1.0001
    else:
        assert_close(there, owed, rtol=1e-12, atol=1e-13)
    other = before[0] != after[0] or ("errors" in before[1]) != ("errors" in after[1])
    for held, _, said in new:
        assert len(said) == 1 and lines in said[0]
        for name, leaf in held["data"].items():  # equal shares; but rows of one block have the same codes in both
            assert (other or leaf.shape[-1] > 16) == torch.equal(leaf, new[0][0]["data"][name]) or held is new[0][0]


@pytest.mark.parametrize("text", [LOCO, pytest.param(LOCO8, marks=pytest.mark.slow)])
def test_a_run_resumed_on_its_mesh_has_the_same_bits(text, tmp_path):
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        old = ranks.run(2, saved, folder, text, True)
        new = ranks.run(2, resumed, folder, text, True)
        plain = ranks.run(2, resumed, folder, "grads=int4,block=16", True)
    for (held, went_on), (restored, again, said) in zip(old, new):
        assert not said
        assert_same(restored, held)
        assert_same_bits(again, went_on)
    for held, state, said in plain:
        assert not held and ERRORS not in state.extra
        assert len(said) == 1 and "errors of rounded gradients of 9 leaves, which are dropped" in said[0]


def begun(mesh, folder):
    model, tx, plan, step = made_on(mesh, "grads=int4,block=16")
    state = go(mesh, step, fzero.init_state(model, tx, plan, seed=3), 0, 2)
    checkpoint.save(folder, state, step=2, specs=state_specs(plan, tx), mesh=mesh)
    return resumed(mesh, folder, LOCO, False)[::2]


def test_a_checkpoint_without_errors_begins_with_none(tmp_path):
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        for held, said in ranks.run(2, begun, folder):
            assert len(held["data"]) == 9 and not any(float(x.abs().max()) for x in pytree.leaves(held))
            assert len(said) == 1 and "they begin at 0" in said[0]


# ---- other ways to step ----------------------------------------------------------------------------------------------


def not_donated(mesh):
    """The states of steps that keep their input, and that do not; and the input."""
    out = []
    for donate in (True, False):
        model, tx, plan, _ = made_on(mesh, LOCO)
        state = fzero.init_state(model, tx, plan, seed=3)
        step = fzero.make_train_step(model, tx, plan, donate=donate)
        state = go(mesh, step, state, 0, 2)
        before = pytree.map(torch.clone, state.extra[ERRORS])
        addresses = [leaf.data_ptr() for leaf in pytree.leaves(state.extra[ERRORS])]
        after = go(mesh, step, state, 2, 3)
        assert donate == ([leaf.data_ptr() for leaf in pytree.leaves(after.extra[ERRORS])] == addresses)
        if not donate:
            assert_same(state.extra[ERRORS], before)
        out.append(after)
    return out


def test_errors_stay_where_they_are_unless_the_state_is_kept():
    for donated, kept in ranks.run(2, not_donated):
        assert_close(kept.params, donated.params, rtol=1e-10, atol=1e-12)
        assert_close(kept.extra[ERRORS], donated.extra[ERRORS], rtol=1e-9, atol=1e-10)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, words",
    [
        (
            "params=int8,loco",
            "loco is 0.8 and grads is not given, whose errors it keeps; write params=int8,grads=int4,loco=0.8",
        ),
        ("grads=int4,loco=0", "codec: loco is 0.0; it must be above 0 and at most 1"),
        ("grads=int4,loco=1.5", "codec: loco is 1.5; it must be above 0 and at most 1"),
        ("grads=int4,loco=", "codec 'grads=int4,loco=': 'loco=' has another form"),
        ("grads=int4,loco=x", "codec 'grads=int4,loco=x': 'loco=x' has another form"),
        (
            "grads=int4,reset=8",
            "reset is 8 and loco is not given, whose errors it drops; write grads=int4,loco=0.8,reset=8",
        ),
        (
            "grads=int4,errors=int8",
            "errors is 'int8'; it is how the errors of loco rest: write grads=int4,loco=0.8,errors=",
        ),
        ("grads=int4,loco,errors=int4", "codec: errors is 'int4'; it is how the errors of loco rest"),
        ("grads=int4,loco,reset=0", "codec: reset is 0; it is a number of steps, at least 1"),
        ("grads=int4,loco,loco=1", "'loco=1' is not one of .* each once"),
    ],
)
def test_texts_that_do_not_fit_are_one_line(text, words):
    with pytest.raises(ValueError, match=words) as found:
        Codec.parse(text)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("text", ["grads=int4,loco=0.8", "grads=int8,hpz,block=64,loco=0.25,reset=512,errors=int8"])
def test_a_codec_is_its_text(text):
    assert str(Codec.parse(text)) == text


PARAMS = {"blocks/w": torch.zeros(2, 8, 32)}


@pytest.mark.parametrize(
    "sizes, options, words",
    [
        ({"dp": 2, "rp": 2}, {}, "sums over rp=2 are rounded on their way back too; write hpz"),
        ({"dp": 2}, {"offload": "opt=nvme"}, "states rest on a disk, which has each step complete without them"),
    ],
)
def test_plans_that_keep_no_errors_are_one_line(sizes, options, words):
    with pytest.raises(ValueError, match=words) as found:
        fzero.zero_plan(3, PARAMS, fzero.fake_mesh(sizes), codec=LOCO, **options)
    assert str(found.value).startswith("codec grads=int4,block=16,loco=0.8: ") and "\n" not in str(found.value)


def test_updates_that_keep_no_errors_are_one_line():
    model, tx, mesh = model_of("llama"), optim.adam(1e-2), fzero.fake_mesh({"dp": 2})
    plan = fzero.zero_plan(3, model, mesh, codec=LOCO, offload="opt=host")
    for update in ("backward", "speculate"):
        with pytest.raises(ValueError, match=f'update="{update}" updates layers before the step is decided'):
            fzero.make_train_step(model, tx, plan, execution=fzero.Execution(update=update))
    plan = fzero.zero_plan(3, model, mesh, codec=LOCO)
    with pytest.raises(ValueError, match=r"delayed updates: codec .* keeps the errors of one gradient at a time"):
        plan.with_updates(1)
    with pytest.raises(ValueError, match=r"local steps: codec .* keeps errors that are of one member"):
        init_local(fzero.init_state(model, tx, plan, seed=0), plan, optim.sgd(1.0))
    other = fzero.init_state(model, tx, fzero.zero_plan(3, model, mesh, codec="grads=int4"), seed=0)
    step = fzero.make_train_step(model, tx, plan)
    with pytest.raises(ValueError, match="the state was not made for the plan's codec"):
        step(other, local_batch(batch_for(0, 8), mesh, 1))


def test_a_plan_says_what_errors_take():
    plan = fzero.zero_plan(3, PARAMS, fzero.fake_mesh({"dp": 2}), codec="grads=int4,loco")
    assert "a rank holds 2,048 bytes of errors in float32, and as many again in a step" in str(plan)
    assert error_bytes(plan) == 4 * 2 * 8 * 32  # of each parameter on every rank, whatever dp is
    plan = fzero.zero_plan(3, PARAMS, fzero.fake_mesh({"dp": 2}), codec="grads=int4,block=16,loco,errors=int8")
    assert "a rank holds 640 bytes of errors in int8, and as many again in a step" in str(plan)
    assert error_bytes(plan) == 2 * 8 * (32 + 4 * 2)  # a code each, and scales


def test_rows_of_codes_are_not_cut_within_blocks():
    model, mesh = model_of("llama"), fzero.fake_mesh({"dp": 2, "tp": 2})
    with pytest.raises(ValueError, match=r"are cut into parts of \d elements, which blocks of 16 do not divide"):
        fzero.zero_plan(2, model, mesh, codec=LOCO8)


# ---- plans of pipelines ----------------------------------------------------------------------------------------------

PIPELINED = {"mesh": {"dp": 2, "pp": 2}, "zero": 2, "codec": "grads=int8,loco=1"}


def test_a_plan_with_pp_counts_the_errors_of_its_rank():
    config = made(**PIPELINED)
    trace = trace_step(config, config.mesh, rank=2)
    job = build.build(config, fzero.fake_mesh(config.mesh, rank=2))
    held = state_bytes(job, build.like_of(job))[0]["errors"]
    assert trace.state["errors"] == held == error_bytes(job.plan)  # the second stage has two of three layers


def test_a_search_tries_the_stages_and_meshes_of_a_codec():
    basis = Basis(made(codec="grads=int8,loco", ranks=2), devices.device("h100"), 2, {})
    taken = [(zero, rp, off) for zero in range(4) for rp in (1, 2) for off in ("", "opt=host", "opt=nvme")
             if admits_codec(basis, Candidate(2, rp, 1, zero, "none", off, 2))]  # fmt: skip
    assert taken == [(2, 1, ""), (2, 1, "opt=host"), (3, 1, ""), (3, 1, "opt=host")]


@exhaustive
def test_the_peak_of_each_rank_of_pp_is_measured():
    config = made(**PIPELINED)
    found = ranks.run(4, measured, {"loco": config}, mesh=config.mesh, timeout_s=300)
    for rank, of_rank in enumerate(found):
        timeline, at_rest, rows, *_ = of_rank["loco"]
        trace = trace_step(config, config.mesh, rank=rank)
        assert ((trace.state, trace.state_elsewhere), trace.ledger) == (at_rest, tuple(rows))
        assert trace.peak.bytes == fullest(timeline).bytes
