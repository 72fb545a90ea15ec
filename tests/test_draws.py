"""Random numbers of somebody's code: where it runs again it draws the same, and in a step by the state's key."""

import datetime
import functools
import itertools
import os
import random
import secrets
import time
import types
import uuid
import weakref
from typing import NamedTuple

import numpy
import pytest
import ranks
import torch
import torch.nn.functional as F

import fzero
from fzero import Remat

slow = pytest.mark.slow
F64 = torch.float64


class Ctx(NamedTuple):
    layer: object = ()


OWN = torch.Generator().manual_seed(7)
NUMPYS, PYTHONS = numpy.random.default_rng(0), random.Random(0)
HOLDER = types.SimpleNamespace(torchs=OWN, numpys=numpy.random.RandomState(0))


def mask_like(w):
    return (torch.rand(w.shape, generator=OWN, dtype=F64) > 0.5) * HOLDER.numpys.rand()


# Each is linear in w, so that <w, gradient> is the value if, and only if, both have the same random numbers.
LINEAR = {
    "F.dropout": lambda w: F.dropout(w, 0.5).sum(),
    "noise": lambda w: (torch.randn_like(w) * w).sum(),
    "a sample of rows": lambda w: w[torch.randperm(len(w))[:5]].sum(),
    "Python's": lambda w: (w * random.random()).sum(),
    "numpy's": lambda w: (w * numpy.random.rand()).sum(),
    "a generator of one's own": lambda w: (torch.rand(w.shape, generator=OWN, dtype=F64) * w).sum(),
    "a generator of numpy's": lambda w: (w * NUMPYS.random()).sum(),
    "a generator of Python's": lambda w: (w * PYTHONS.random()).sum(),
    "a method of one": functools.partial(lambda draw, w: (w * draw()).sum(), functools.partial(PYTHONS.gauss, 1, 1)),
    "an attribute": lambda w: (w * torch.rand(w.shape, generator=HOLDER.torchs, dtype=F64)).sum(),
    "a helper's": lambda w: (w * mask_like(w)).sum(),
    "remat within": lambda w: fzero.remat(lambda w: F.dropout(w, 0.3).sum())(w) + F.dropout(w, 0.3).sum(),
}


def linear_gradient(f, w):
    """(value, <w, gradient>) of a function that is linear in w; random numbers are drawn between the two passes."""
    w = w.detach().requires_grad_()
    value = f(w)
    random.random(), numpy.random.rand(), torch.rand(5, generator=OWN), torch.rand(3)
    NUMPYS.random(), PYTHONS.random(), HOLDER.numpys.rand()
    value.backward()
    return float(value.detach()), float((w.detach() * w.grad).sum())


@pytest.mark.parametrize("policy", ["full", "every:2"])
@pytest.mark.parametrize("name", LINEAR)
def test_a_stack_of_own_draws_recomputes_them(name, policy):
    def f(w):
        block = lambda p, x, ctx: x + LINEAR[name](p["w"])  # noqa: E731
        return fzero.stack(block, {"w": w}, torch.zeros((), dtype=F64), Ctx(), remat=Remat.parse(policy))

    value, product = linear_gradient(f, torch.linspace(1.0, 2.0, 30, dtype=F64).reshape(3, 10))
    assert abs(value - product) < 1e-12


def changing():
    """Functions that change what they depend on, by name."""
    count, left, mean, turns, flag = [0], [3.0, 2.0, 1.0, 5.0], [torch.ones(())], itertools.cycle([1.0, 2.0]), {}

    def counted(w):
        count[0] += 1
        return w.sum() * count[0]

    def averaged(w):
        mean[0] = 0.5 * mean[0] + w.detach().sum()
        return w.sum() * mean[0]

    def first(w):
        rate, flag["seen"] = 2.0 if flag else 1.0, True
        return w.sum() * rate

    return {
        "a count": counted,
        "an average": averaged,
        "the first call": first,
        "a list": lambda w: w.sum() * left.pop(),
        "an iterator": lambda w: w.sum() * next(turns),
        "a clock": lambda w: w.sum() * time.perf_counter(),
    }


@pytest.mark.parametrize("wrap", ["remat", "stack"])
@pytest.mark.parametrize("name", changing())
def test_what_a_recomputation_would_find_changed_is_refused(name, wrap):
    f, w = changing()[name], torch.ones(2, 3, dtype=F64, requires_grad=True)
    block = lambda p, x, ctx: x + f(p["w"])  # noqa: E731
    with pytest.raises(ValueError, match=r"a function that is recomputed .* the second time"):
        if wrap == "remat":
            fzero.remat(f)(w)
        else:
            fzero.stack(block, {"w": w}, torch.zeros((), dtype=F64), Ctx(), remat=Remat.parse("full"))


def test_layers_are_called_twice_at_first_alone():
    calls = []

    def layer(p, x, ctx):
        calls.append(1)
        return x + p["w"].square().sum()

    w = torch.ones(4, 3, requires_grad=True)
    counts = []
    for _ in range(6):
        calls.clear()
        fzero.stack(layer, {"w": w}, torch.zeros(()), Ctx(), remat=Remat.parse("full")).backward()
        counts.append(len(calls))
    assert counts == [4 + 4 + 2] * 4 + [4 + 4] * 2


def test_a_record_of_what_is_recomputed_is_fine():
    seen = []

    def recorded(w):
        seen.append(float(w.detach().sum()))
        return w.square().sum()

    w = torch.ones(3, requires_grad=True)
    for _ in range(8):
        fzero.remat(recorded)(w).backward()
    assert torch.equal(w.grad, torch.full((3,), 16.0)) and set(seen) == {3.0}


@pytest.mark.parametrize("name", LINEAR)
def test_remat_draws_the_same_again(name):
    value, product = linear_gradient(fzero.remat(LINEAR[name]), torch.linspace(1.0, 2.0, 30, dtype=F64))
    assert abs(value - product) < 1e-12


def test_remat_draws_the_same_again_under_transforms():
    f = fzero.remat(LINEAR["F.dropout"])
    w = torch.linspace(1.0, 2.0, 30, dtype=F64)
    value, tangent = torch.func.jvp(f, (w,), (w,))
    assert float(value) == pytest.approx(float(tangent), abs=1e-12)
    grads, values = torch.vmap(torch.func.grad_and_value(f), randomness="different")(w.expand(3, 30))
    assert (grads @ w - values).abs().max() < 1e-12 and len(set(values.tolist())) == 3
    cubed = fzero.remat(lambda w: (F.dropout(w, 0.5) ** 3).sum())
    torch.manual_seed(3)
    twice = torch.func.grad(lambda w: torch.func.grad(cubed)(w).sum())(w)
    kept = twice != 0
    torch.testing.assert_close(twice[kept], 6 * 8 * w[kept])  # of (2 w)^3, and not of two masks
    assert 5 < int(kept.sum()) < 25


def test_a_backward_pass_leaves_the_generators_as_they_are():
    drawn = []
    for wrap in (lambda f: f, fzero.remat):
        torch.manual_seed(0)
        linear_gradient(wrap(LINEAR["F.dropout"]), torch.ones(30, dtype=F64))
        drawn.append(torch.rand(1))
    assert torch.equal(*drawn)


def block(p, x, ctx):
    return F.dropout(x, 0.5) + F.dropout(p["w"], 0.3)


@pytest.mark.parametrize(
    "policy, compiled",
    [
        ("every:2", False),
        *(
            pytest.param(*case, marks=slow)
            for case in (("full", True), ("selective:0.0", True), ("selective:0.5", False))
        ),
    ],
)
def test_a_stack_draws_the_same_again(policy, compiled):
    def f(w):
        return fzero.stack(
            block, {"w": w}, torch.zeros(16, dtype=F64), Ctx(), remat=Remat.parse(policy), compiled=compiled
        ).sum()

    value, product = linear_gradient(f, torch.linspace(1.0, 2.0, 80, dtype=F64).reshape(5, 16))
    assert abs(value - product) < 1e-12
    w = torch.ones(5, 16, dtype=F64, requires_grad=True)  # twice through one graph
    total = f(w)
    first, again = torch.autograd.grad(total, w, retain_graph=True)[0], torch.autograd.grad(total, w)[0]
    assert torch.equal(first, again)


@pytest.mark.parametrize("wrap", ["remat", "stack"])
def test_autocast_and_the_default_dtype_are_those_of_the_first_run(wrap):
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(2, 8, 8, generator=g), torch.randn(3, 8, generator=g)

    def layer(p, x, ctx):
        return (x @ p["w"]).float().tanh() * torch.ones(()).to(torch.float32) / torch.tensor(3.0).double().float()

    def run(w, policy):
        if wrap == "stack":
            return fzero.stack(layer, {"w": w}, x, Ctx(), remat=Remat.parse(policy)).sum()
        return (fzero.remat(two_layers) if policy == "full" else two_layers)(w)

    def two_layers(w):
        return layer({"w": w[1]}, layer({"w": w[0]}, x, None), None).sum()

    grads = []
    for policy in ("none", "full"):
        w = w.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            total = run(w, policy)
        total.backward()
        grads.append(w.grad)
    assert torch.equal(*grads)


def test_what_a_graph_would_draw_anew_is_refused():
    w = torch.ones(30, dtype=F64)
    for f in (
        fzero.remat(LINEAR["F.dropout"]),
        lambda w: fzero.stack(block, {"w": w.reshape(2, 15)}, w[:15] * 0, Ctx(), remat=Remat(every=1)).sum(),
    ):
        with pytest.raises(ValueError, match=r"test_draws\.py:\d+ \(.*draws random numbers \(aten\..*hand them in"):
            fzero.jit(torch.func.grad(f))(w)


# ---- plain losses: the draws are those of the state's key ------------------------------------------------------------

START = {
    "w": torch.linspace(-1.0, 1.0, 6, dtype=F64)[:, None],
    "rows": torch.linspace(1.0, 3.0, 30, dtype=F64).reshape(5, 6),
}
HEADS = torch.nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True).double()
STACKED = torch.nn.LSTM(6, 6, 2, dropout=0.5).double()
NUMPY = numpy.random.default_rng(0)


def batch_of(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 6, generator=g, dtype=F64), "y": torch.randn(8, 1, generator=g, dtype=F64)}


def loss_of(change):
    """A plain loss of what `change` makes of the batch's x."""

    def loss(params, batch):
        return (change(params, batch["x"]) @ params["w"] - batch["y"]).square().sum(), len(batch["x"])

    return loss


def attended(params, x):
    q = x[:, None, None]
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)[:, 0, 0]


KEYED = {
    "F.dropout": lambda p, x: F.dropout(x, 0.5),
    "noise": lambda p, x: x + torch.randn_like(x),
    "remat of a dropout": lambda p, x: fzero.remat(lambda x: F.dropout(x, 0.5))(x * p["w"].T),
    "an alpha dropout": lambda p, x: F.alpha_dropout(x, 0.5, training=True),
    "dropped features": lambda p, x: F.dropout1d(x[..., None], 0.5)[..., 0],
    "a dropout in place": lambda p, x: F.dropout(x * p["w"].T, 0.5, inplace=True),
    "a mask": lambda p, x: x * (torch.rand(x.shape) < 0.5),
    "one number for each row": lambda p, x: x * torch.rand(len(x), 1, dtype=F64),
    "choices": lambda p, x: x * torch.multinomial(x.softmax(-1), 1),
    "choices with replacement": lambda p, x: x * torch.multinomial(x.softmax(-1), 2, replacement=True)[:, :1],
    "coins": lambda p, x: x * torch.bernoulli(x.sigmoid()) + torch.empty_like(x).bernoulli_(0.2),
    "integers": lambda p, x: (
        x * torch.randint(3, x.shape) + torch.randint_like(x, 1, 4) + torch.empty_like(x).random_(5)
    ),
    "normal": lambda p, x: (
        torch.normal(x, 2.0) + torch.normal(0.0, 1.0, x.shape) + torch.empty_like(x).normal_(1.0, 2.0)
    ),
    "a distribution": lambda p, x: torch.distributions.Normal(x, 1.0).rsample(),
    "exponential": lambda p, x: x * torch.empty_like(x).exponential_(2.0) + torch.empty_like(x).uniform_(-1, 1),
    "Gumbel": lambda p, x: F.gumbel_softmax(x, hard=True),
    "attention": attended,
    "heads": lambda p, x: HEADS(x[:, None], x[:, None], x[:, None])[0][:, 0],
}
QUICK = {"F.dropout", "noise", "remat of a dropout"}


def two_steps(loss, micro_batches=1, seed=0):
    """What two steps give, with torch's generators anywhere."""
    tx = fzero.optim.sgd(0.01)
    plan = fzero.zero_plan(0, START, fzero.one_process(), policy="fp64")
    step = fzero.make_train_step(loss, tx, plan, micro_batches=micro_batches)
    state, out = fzero.init_state(START, tx, plan, seed=seed), []
    for number in range(2):
        torch.rand(3)
        state, metrics = step(state, batch_of(number))
        out += [metrics.loss, metrics.grad_norm]
    evaluate = fzero.make_eval_step(loss, plan)
    evaluated = [evaluate(state.params, batch_of()).total for _ in range(2)]
    assert torch.equal(*evaluated)
    return torch.stack(out)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else slow) for n in KEYED])
def test_a_plain_loss_draws_by_the_states_key(name):
    loss = loss_of(KEYED[name])
    first = two_steps(loss)
    assert torch.equal(first, two_steps(loss))
    assert not torch.equal(first, two_steps(loss, seed=1)) and first[0] != first[2]
    torch.testing.assert_close(two_steps(loss, micro_batches=4), first, rtol=1e-12, atol=0)  # however a batch is cut


def two_steps_at(mesh, stage, folder=None):
    """Losses and norms of two steps of a plain loss on a rank; with a folder, the second one of a restored state."""
    loss, tx = loss_of(KEYED["F.dropout"]), fzero.optim.sgd(0.01)
    plan = fzero.zero_plan(stage, START, mesh, policy="fp64")
    state, log = fzero.init_state(START, tx, plan, seed=0), []
    for number in range(2):
        torch.manual_seed(5)  # the same on all ranks, and of no use
        state, metrics = fzero.make_train_step(loss, tx, plan)(state, fzero.local_batch(batch_of(number), mesh))
        log += [metrics.loss, metrics.grad_norm]
        if folder is not None and not number:
            path = fzero.checkpoint.save(folder, state, step=1)
            state = fzero.checkpoint.restore(path, fzero.init_state(START, tx, plan, seed=9))
    return torch.stack(log)


@slow
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_draw_their_rows_of_one_mask_and_a_resumed_run_goes_on(stage, tmp_path):
    expected = two_steps(loss_of(KEYED["F.dropout"]))
    for result in ranks.run(2, two_steps_at, stage):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=0)
    assert torch.equal(two_steps_at(fzero.one_process(), stage, tmp_path), expected)


@slow
@pytest.mark.parametrize(
    "shift", [lambda x: torch.rand(()), lambda x: torch.rand(5).sum(), lambda x: torch.randperm(1000)[0]]
)
def test_draws_that_count_no_rows_differ_between_parts_of_a_batch(shift):
    seen = []

    def change(params, x):
        seen.append(float(shift(x)))
        return x

    two_steps(loss_of(change), micro_batches=4)
    assert len(set(seen[:8])) > 4


def test_draws_have_the_distributions_of_torchs():
    from fzero.core import Draws

    n = 20000
    x = torch.ones(n, 2, dtype=F64)
    with Draws(lambda: fzero.random.key(3), n):
        dropped, alpha = F.dropout(x, 0.2), F.alpha_dropout(torch.randn(n, dtype=F64), 0.3, training=True)
        numbers = torch.randint(2, 7, (n,))
        picked = torch.multinomial(torch.tensor([1.0, 2.0, 5.0]), 2)
        many = torch.multinomial(torch.tensor([[1.0, 2.0, 5.0]]).expand(n, 3), 1)
        again = torch.multinomial(torch.tensor([1.0, 2.0, 5.0]), n, replacement=True)
        waits, order = torch.empty(n, dtype=F64).exponential_(4.0), torch.randperm(50)
        small, half = torch.rand(4, dtype=torch.float16), torch.randn(n, dtype=torch.bfloat16)
    assert abs(float((dropped == 0).double().mean()) - 0.2) < 0.01 and float(dropped.max()) == pytest.approx(1.25)
    assert abs(float(alpha.mean())) < 0.03 and abs(float(alpha.var()) - 1.0) < 0.05
    assert numbers.bincount().tolist()[:2] == [0, 0] and (numbers.bincount()[2:] / n - 0.2).abs().max() < 0.02
    for chosen in (many, again):
        assert (chosen.flatten().bincount() / n - torch.tensor([0.125, 0.25, 0.625])).abs().max() < 0.02
    assert len(set(picked.tolist())) == 2 and abs(float(waits.mean()) - 0.25) < 0.01
    assert order.sort().values.tolist() == list(range(50)) and order.tolist() != list(range(50))
    assert small.dtype == torch.float16 and small.max() < 1.0 and half.dtype == torch.bfloat16


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros((), dtype=F64))
        self.norm = torch.nn.BatchNorm1d(6).double()


COUNTING = Counting()
TABLE = torch.nn.Embedding(5, 6, max_norm=1.0, dtype=F64)


def counts(params, x):
    COUNTING.calls += 1
    return x * COUNTING.calls


def counts_of_its_module(params, x):
    global CALLS
    CALLS += 1
    return x * CALLS


class CountsOfItself:
    """A change that counts its calls in an attribute of its own, in one of its class, or in its module."""

    calls = 0

    def __init__(self, mode):
        self.mode, self.calls = mode, 0

    def __call__(self, params, x):
        return x * getattr(self, self.mode)()

    def of_itself(self):
        self.calls += 1
        return self.calls

    def of_its_class(self):
        CountsOfItself.calls += 1
        return CountsOfItself.calls

    def of_its_module(self):
        BOX["calls"] += 1
        return BOX["calls"]


def counts_around():
    calls = 0

    def change(params, x):
        nonlocal calls
        calls += 1
        return x * calls

    return change


def counts_in_a_default(params, x, memory=[]):  # noqa: B006
    memory.append(0)
    return x * len(memory)


def counts_in_an_attribute(params, x):
    counts_in_an_attribute.calls = getattr(counts_in_an_attribute, "calls", 0) + 1
    return x * counts_in_an_attribute.calls


class Average:
    """A moving average, as a baseline has it."""

    def __init__(self):
        self.value = torch.ones((), dtype=F64)

    def __call__(self, params, x):
        self.value = 0.9 * self.value + 0.1 * (x @ params["w"]).detach().mean()
        return x * self.value


def counts_in_an_array(params, x):
    ARRAY[0] += 1
    return x * float(ARRAY[0])


CALLS, BOX = 0, {"calls": 0}
SYSTEM = random.SystemRandom()
LINES = (str(number) for number in range(1, 1000))  # as a file that is read on
NUMBERS, ARRAY = itertools.count(1), numpy.ones(1)


def looked_up(params, x, **options):
    return x + F.embedding(torch.arange(len(x)) % 5, params["rows"], **options)


def reads_on(params, x):
    """Counts in a file, of which no variable shows anything."""
    with open(os.environ["COUNTED"], "a+", encoding="utf-8") as file:
        file.write("x")
        return x * file.tell()


class Late:
    """A moving average that the loss depends on from its fourth call on."""

    def __init__(self):
        self.calls, self.value = 0, torch.ones((), dtype=F64)

    def __call__(self, params, x):
        self.calls += 1
        self.value = 0.9 * self.value + 0.1 * (x @ params["w"]).detach().mean()
        return x * self.value if self.calls > 3 else x


OTHER = "two calls of the loss with the same parameters, batch and random numbers of torch gave other values"
SEEDED = r"sets torch's seed and draws random numbers, .*leave the seed out"


def draws_from_a_seed(p, x):
    torch.manual_seed(0)  # that of the whole program too, as is usual
    return x * torch.rand(x.shape[1:])


def draws_from_a_seed_in_a_fork(p, x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return x * F.dropout(torch.ones(x.shape[1:]), 0.5)


def draws_from_a_state(p, x, state=torch.Generator().manual_seed(0).get_state()):  # noqa: B008
    torch.set_rng_state(state)
    return x * torch.rand(x.shape[1:])


REFUSED = {
    "a clock": (lambda p, x: x * time.time(), OTHER),
    "a counting clock": (lambda p, x: x * time.perf_counter(), OTHER),
    "the time of the process": (lambda p, x: x * time.process_time_ns(), OTHER),
    "a date": (lambda p, x: x * datetime.datetime.now().timestamp(), OTHER),
    "bytes of the system": (lambda p, x: x * int.from_bytes(os.urandom(4)), OTHER),
    "an identifier": (lambda p, x: x * (uuid.uuid4().int % 100003), OTHER),
    "a secret": (lambda p, x: x * secrets.randbelow(100003), OTHER),
    "a generator without a state": (lambda p, x: x * SYSTEM.random(), OTHER),
    "a generator of Python's of its own": (lambda p, x: x * random.Random().random(), OTHER),
    "a generator of numpy's of its own": (lambda p, x: x * numpy.random.default_rng().random(), OTHER),
    "an old generator of numpy's": (lambda p, x: x * numpy.random.RandomState().rand(), OTHER),
    "a mask": (lambda p, x: x * torch.from_numpy(numpy.random.default_rng().random(x.shape) < 0.5), OTHER),
    "torch's seed": (lambda p, x: x * (torch.Generator().seed() % 100003), OTHER),
    "a file that it reads on": (lambda p, x: x * float(next(LINES)), "changes LINES and depends on it"),
    "a file by its name": (reads_on, OTHER),
    "a torch.Generator": (lambda p, x: x * torch.rand(1, generator=OWN), r"\(.*draws from a torch\.Generator"),
    "Python's": (lambda p, x: x * random.choice([1, 2, 3, 4, 5, 6, 7]), "changes the state of Python's random and dep"),
    "numpy's": (lambda p, x: x * numpy.random.rand(), "changes the state of numpy.random and depends"),
    "a generator of numpy": (lambda p, x: x * NUMPY.normal(), "changes the state of NUMPY and depends on it"),
    "another distribution": (lambda p, x: x * torch.poisson(x.abs()), r"test_draws\.py:\d+ .*draws random.*poisson"),
    "within a call of C++": (
        lambda p, x: STACKED(x * p["w"].T)[0],
        r"draws random numbers \(aten\.bernoulli_.*F\.dropout",
    ),
    "a seed": (draws_from_a_seed, SEEDED),
    "a seed in a fork": (draws_from_a_seed_in_a_fork, SEEDED),
    "the state of torch's generator": (draws_from_a_state, SEEDED),
    "a counter": (counts, r"changes COUNTING\.calls and depends on it"),
    "a counter of its module": (counts_of_its_module, "changes CALLS and depends on it"),
    "a counter of its own": (CountsOfItself("of_itself"), r"changes change\.calls and depends on it"),
    "a counter of its class": (CountsOfItself("of_its_class"), r"changes CountsOfItself\.calls and depends on it"),
    "a method's counter": (CountsOfItself("of_its_module"), "changes BOX and depends on it"),
    "a counter around it": (counts_around(), "changes calls and depends on it"),
    "a counter in a default": (counts_in_a_default, "changes a default of counts_in_a_default and depends on it"),
    "a counter in an attribute": (counts_in_an_attribute, r"changes counts_in_an_attribute\.calls and depends on it"),
    "an iterator": (lambda p, x: x * next(NUMBERS), "changes NUMBERS and depends on it"),
    "a moving average": (Average(), r"changes change\.value and depends on it"),
    "an array": (counts_in_an_array, "changes ARRAY and depends on it"),
    "max_norm": (lambda p, x: looked_up(p, x, max_norm=1.0), r"embedding_renorm_.* writes into the parameter rows in"),
    "max_norm of a module": (
        lambda p, x: x + torch.func.functional_call(TABLE, {"weight": p["rows"]}, (torch.arange(len(x)) % 5,)),
        "writes into the parameter rows in place",
    ),
    "scale_grad_by_freq": (
        lambda p, x: looked_up(p, x, scale_grad_by_freq=True),
        "scale_grad_by_freq divides gradients",
    ),
    "the batch": (lambda p, x: x.mul_(2), r"aten\.mul_\.Tensor writes into the batch's x in place"),
    "the data of a parameter": (
        lambda p, x: x + p["w"].data.clamp_(0).T,
        r"clamp_.* writes into the parameter w in pl",
    ),
    "a buffer": (lambda p, x: x + COUNTING.seen.add_(1), r"COUNTING\.seen\.add_\(1\).*writes in place into a param"),
    "running statistics": (
        lambda p, x: COUNTING.norm(x),
        "writes in place into a parameter, or a tensor that is no arg",
    ),
}


ALWAYS = {"numpy's", "max_norm", "a method's counter", "a clock", "a mask", "a seed in a fork"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ALWAYS else slow) for n in REFUSED],
)
def test_what_no_pure_loss_does_is_refused_in_the_first_step(name, tmp_path, monkeypatch):
    monkeypatch.setenv("COUNTED", str(tmp_path / "counted"))
    change, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        two_steps(loss_of(change), micro_batches=4)
    assert "\n" not in str(caught.value)


@slow
def test_attributes_that_are_set_before_they_are_read_are_fine():
    def change(params, x):
        COUNTING.calls += 1  # which the loss does not depend on
        COUNTING.beside = params["w"].sum()
        return x * COUNTING.beside

    assert torch.equal(two_steps(loss_of(change)), two_steps(loss_of(change)))


def test_an_average_that_begins_to_matter_later_is_noticed():
    tx, plan = fzero.optim.sgd(0.01), fzero.zero_plan(0, START, fzero.one_process(), policy="fp64")
    step = fzero.make_train_step(loss_of(Late()), tx, plan, micro_batches=4)
    with pytest.raises(ValueError, match=r"changes change\.calls and depends on it"):
        step(fzero.init_state(START, tx, plan, seed=0), batch_of())


def test_some_calls_are_made_twice_and_no_two_graphs_are_alive():
    """Of the first 64: a loss that logs is called 7 times more, and needs no more memory."""
    alive, most, calls = [], [], []

    def change(params, x):
        calls.append(time.perf_counter())  # which the result does not depend on
        most.append(sum(one() is not None for one in alive))
        x = (x * params["w"].T).exp()  # kept for the backward pass
        alive[:] = [weakref.ref(x)]
        return x

    tx = fzero.optim.sgd(0.01)
    plan = fzero.zero_plan(0, START, fzero.one_process(), policy="fp64")
    step, state = (
        fzero.make_train_step(loss_of(change), tx, plan, micro_batches=8),
        fzero.init_state(START, tx, plan, seed=0),
    )
    for number in range(9):
        state, _ = step(state, batch_of(number))
    assert len(calls) == 72 + 7 and not any(most)


def odd_results(params, batch):
    """A sum in bfloat16 that is infinite, and a count that is no number of Python's."""
    return (params["w"].sum() * batch["x"].sum()).to(torch.bfloat16) / 0.0, numpy.float32(8.0)


@slow
def test_what_is_the_same_in_two_calls_is_not_refused():
    from fzero.core.purity_checks import equal_values, values_of

    assert len(values_of(odd_results(START, batch_of()))) == 1
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=F64)
    for dtype, less, more in ((F64, 1e-14, 1e-12), (torch.float32, 1e-7, 1e-5), (torch.bfloat16, 4e-3, 0.1)):
        one = x.to(dtype)
        for off, same in ((less, True), (more, False)):
            other = one + (off * one.abs().amax().double()).to(dtype)
            assert equal_values(one, other, False) is same, (dtype, off)
        assert not equal_values(one, one * (1 + 5e-4) if dtype != torch.bfloat16 else one * 1.01, True)
    assert not equal_values(torch.nan, 1.0, False) and not equal_values(torch.ones(()), 1.0, False)
    for some in ([torch.nan, torch.inf, 1.0], [torch.inf], []):
        one = torch.tensor(some)
        assert equal_values(one, one.clone(), False)
    assert not equal_values(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), False)
    assert (
        equal_values(torch.nan, torch.nan, False)
        and not equal_values(8.0, 9.0, False)
        and not equal_values(1, 1.0, False)
    )
    assert equal_values(torch.tensor([1, 2]), torch.tensor([1, 2]), False)
    assert not equal_values(torch.tensor([True]), torch.tensor([False]), False)


@slow
def test_transforms_and_modes_take_a_loss_that_is_made_twice():
    from torch.utils.flop_counter import FlopCounterMode

    tx, loss = fzero.optim.sgd(0.01), loss_of(KEYED["F.dropout"])
    plan = fzero.zero_plan(0, START, fzero.one_process(), policy="fp64")
    state = fzero.init_state(START, tx, plan, seed=0)
    batch = batch_of()
    expected = fzero.make_train_step(loss, tx, plan, donate=False)(state, batch)[1].loss

    def after(scale):
        step = fzero.make_train_step(loss, tx, plan, donate=False)
        return step(state._replace(params={**state.params, "w": state.params["w"] * scale}), batch)[1].loss

    one = torch.ones((), dtype=F64)
    value, tangent = torch.func.jvp(after, (one,), (one,))
    grad = torch.func.grad(after)(one)
    assert value == expected and torch.allclose(grad, tangent) and grad != 0
    torch.testing.assert_close(torch.vmap(after)(torch.ones(2, dtype=F64)), expected.expand(2), rtol=1e-12, atol=0)
    counts, step = [], fzero.make_train_step(loss, tx, plan, donate=False)
    for _ in range(2):  # a call that is counted is made once, also after one that was made twice
        with FlopCounterMode(display=False) as flops:
            assert step(state, batch)[1].loss == expected
        counts.append(flops.get_total_flops())
        step(state, batch)
    assert counts[0] == counts[1] > 0


def two_steps_with_a_sum(mesh, calls):
    """The calls of a loss with a collective, or with one of torch.distributed's, and the bytes that it sent."""
    import torch.distributed as dist

    number = 0

    def loss(params, batch):
        nonlocal number
        number += 1
        features = batch["x"] @ params["w"]
        if calls == "fzero":
            return (features * fzero.psum(features.sum(), mesh["dp"])).sum(), len(features)
        total = features.detach().sum().clone()
        dist.all_reduce(total)
        return (features * total).sum(), len(features)

    tx, plan = fzero.optim.sgd(0.01), fzero.zero_plan(0, START, mesh, policy="fp64")
    state, step = fzero.init_state(START, tx, plan, seed=0), fzero.make_train_step(loss, tx, plan)
    for rows in (4, 4 + 2 * mesh.rank, 4):  # another shape on one rank alone
        state, _ = step(state, {name: leaf[:rows] for name, leaf in batch_of(mesh.rank).items()})
    return number


@slow
@pytest.mark.parametrize("calls", ["fzero", "torch.distributed"])
def test_a_loss_with_collectives_is_called_once(calls):
    assert ranks.run(2, two_steps_with_a_sum, calls, timeout_s=60.0) == [3, 3]


# ---- Models of one's own functions -----------------------------------------------------------------------------------

BASE = fzero.models.mlp(fzero.models.MLPConfig(8, 8, 3, 16))


def own_block(p, x, ctx):
    return BASE.block(p, F.dropout(x, 0.3), ctx)


def own_head(p, x, batch, ctx):
    return BASE.head(p, x + 0.1 * torch.randn_like(x), batch, ctx)


def steps_of(model, micro_batches=1, donate=True, **execution):
    g = torch.Generator().manual_seed(0)
    batch = {name: torch.randint(0, 8, (8, 4), generator=g) for name in ("tokens", "targets")}
    tx, how = fzero.optim.sgd(0.1), fzero.Execution(**execution)
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy="fp64")
    step = fzero.make_train_step(model, tx, plan, micro_batches=micro_batches, execution=how, donate=donate)
    state, out = fzero.init_state(model, tx, plan, seed=0), []
    for _ in range(2):
        torch.rand(2)
        state, metrics = step(state, batch)
        out += [metrics.loss, metrics.grad_norm]
    evaluate = fzero.make_eval_step(model, plan)
    assert torch.equal(evaluate(state.params, batch).total, evaluate(state.params, batch).total)
    return torch.stack(out)


@pytest.mark.parametrize(
    "options",
    [
        {"remat": "every:2", "micro_batches": 4},
        *(
            pytest.param({"compiled": True, "remat": policy}, marks=slow)
            for policy in ("none", "full", "selective:0.5")
        ),
        pytest.param({"donate": False}, marks=slow),
    ],
    ids=str,
)
def test_a_model_of_ones_own_draws_by_the_states_key(options):
    model = BASE._replace(block=own_block, head=own_head).with_traits(draws=True)
    expected = steps_of(model)
    assert torch.equal(expected, steps_of(model))
    torch.testing.assert_close(steps_of(model, **options), expected, rtol=1e-11, atol=0)


def draws_over(mesh, parts):
    """The errors of models of which one part draws, by that part."""
    said = {}
    for name, change in parts.items():
        model = BASE._replace(**{name: change}).with_traits(draws=True)
        plan = fzero.zero_plan(0, model, mesh, policy="fp64", sequence=mesh["tp"].size > 1)
        tx = fzero.optim.sgd(0.1)
        step, state = fzero.make_train_step(model, tx, plan), fzero.init_state(model, tx, plan, seed=0)
        batch = {name: torch.ones(2, 8, dtype=torch.int64) for name in ("tokens", "targets")}
        try:
            step(state, batch)
        except ValueError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_a_model_of_ones_own_may_not_draw_for_parts_of_sequences(axis):
    for found in ranks.run(2, draws_over, {"block": own_block, "head": own_head}, mesh={axis: 2}):
        assert f"the model's block draws random numbers, and {axis}=2" in found["block"], found
        assert "splits sequences, each part of which would have the same" in found["block"]
        assert "the model's head draws" in found["head"] or "own head does not add up" in found["head"]


def test_a_model_without_a_key_may_not_draw():
    with pytest.raises(ValueError, match=r"the model's block draws random .* model\.with_traits\(draws=True\)"):
        steps_of(BASE._replace(block=own_block))


@slow
@pytest.mark.parametrize(
    "write", [lambda p, x: p["w_in"].mul_(0.5), lambda p, x: x.mul_(2), lambda p, x: p["w_in"].data.clamp_(0)]
)
def test_a_model_of_ones_own_may_not_write(write):
    def block(p, x, ctx):
        write(p, x)
        return BASE.block(p, x, ctx)

    with pytest.raises(
        ValueError, match=r"test_draws\.py:\d+ .* writes? in(to the block's argument .*)? in place|in place"
    ):
        steps_of(BASE._replace(block=block))


def test_what_has_no_setup_context_is_one_line_that_says_what_to_do():
    """A Function of torch.distributions, or of a user, under torch.func."""
    params, mesh, tx = {"w": torch.ones(4)}, fzero.one_process(), fzero.optim.sgd(0.1)
    plan = fzero.zero_plan(0, params, mesh)

    def loss(params, batch):
        drawn = torch.distributions.Dirichlet(params["w"] + 1).rsample()
        return (drawn * batch["x"]).sum(), torch.tensor(4.0)

    with pytest.raises(ValueError, match=r"torch.autograd.Function without setup_context.*by the batch.*Dirichlet"):
        fzero.make_train_step(loss, tx, plan)(fzero.init_state(params, tx, plan, seed=0), {"x": torch.ones(4)})


def test_a_step_without_the_disk_of_its_plan_is_refused_when_it_is_made():
    params = {"w": torch.ones(4)}
    plan = fzero.zero_plan(0, params, fzero.one_process(), policy=fzero.bf16(), offload="opt=nvme")
    with pytest.raises(ValueError, match=r"^the plan puts a part of the state on a disk; give nvme="):
        fzero.make_train_step(lambda params, batch: (params["w"].sum(), torch.tensor(1.0)), fzero.optim.sgd(0.1), plan)
