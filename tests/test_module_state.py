"""What a module has beside its parameters and buffers: tables that it makes while it runs, state that goes from call to
call, records of what it saw, and attributes that cannot be copied.
"""

import copy
import functools
import io
import itertools
import threading
import time
import warnings

import numpy
import pytest
import torch
from torch import nn

import fzero
from fzero import models, optim
from fzero.core import Snapshot

slow = pytest.mark.slow
F64 = torch.float64
TABLES: dict[int, torch.Tensor] = {}
LEFT: dict[str, torch.Tensor] = {}
STEPS = itertools.count()


class Record:
    """An object with a count, and a class with one."""

    calls = 0

    def __init__(self):
        self.count = 0


class Layer(nn.Module):
    def __init__(self, add):
        super().__init__()
        self.linear, self.add = nn.Linear(6, 6), add
        equip(self)

    def forward(self, x):
        return torch.tanh(self.linear(x) + 0.1 * self.add(self, x))


class Net(nn.Module):
    """Three layers, which add `inner` of themselves and of what they are given, behind one that adds `outer`."""

    def __init__(self, outer, inner):
        super().__init__()
        self.before, self.after, self.outer = nn.Linear(3, 6), nn.Linear(6, 1), outer
        self.layers = nn.ModuleList(Layer(inner) for _ in range(3))
        self.register_buffer("seen", torch.ones(6))
        equip(self)

    def forward(self, x):
        x = torch.tanh(self.before(x) + 0.1 * self.outer(self, x))
        for layer in self.layers:
            x = layer(x)
        return self.after(x)


def equip(module):
    """Give a module the attributes of these tests."""
    module.table, module.tables, module.record, module.count, module.bar = None, {}, Record(), 0, None
    module.array, module.history = numpy.zeros(1), []


def nothing(module, x):
    return 0.0


def positions(n):
    return torch.arange(n, dtype=F64)[:, None] / n


def in_a_global(module, x):
    n = x.shape[1]
    if n not in TABLES:
        TABLES[n] = positions(n)
    return TABLES[n]


def in_an_attribute(module, x):
    if module.table is None or len(module.table) < x.shape[1]:
        module.table = torch.arange(x.shape[1], dtype=F64)[:, None] / 10
    return module.table[: x.shape[1]]


def in_a_dict_of_its_own(module, x):
    n = x.shape[1]
    if n not in module.tables:
        module.tables[n] = positions(n)
    return module.tables[n]


def in_a_class(module, x):
    if not hasattr(Record, "table"):
        Record.table = positions(16)
    return Record.table[: x.shape[1]]


@functools.lru_cache
def remembered(n):
    return positions(n)


def by_a_cache(module, x):
    return remembered(x.shape[1])


def closed_over():
    tables = {}

    def in_a_closure(module, x):
        n = x.shape[1]
        if n not in tables:
            tables[n] = positions(n)
        return tables[n]

    return in_a_closure


@pytest.fixture(autouse=True)
def forget():
    """Nothing of another test is in the tables, and nothing of this one stays there."""
    yield
    TABLES.clear(), LEFT.clear(), remembered.cache_clear()
    Record.calls = 0
    if hasattr(Record, "table"):
        del Record.table


def net_of(outer=nothing, inner=nothing):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net(outer, inner).double()


def loss(call, batch):
    return (call(batch["x"]) - batch["y"]).square().sum(), batch["y"].numel()


def batch_of(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, n, size, generator=g, dtype=F64) for name, size in (("x", 3), ("y", 1))}


def losses_of(module, lengths, example=True, **how):
    """The losses of steps with batches of these lengths, by fzero."""
    model, tx = fzero.from_module(module, loss, batch=batch_of(lengths[0]) if example else None), optim.sgd(0.1)
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy="fp64")
    step, state, found = fzero.make_train_step(model, tx, plan, **how), fzero.init_state(model, tx, plan, seed=0), []
    for i, n in enumerate(lengths):
        state, metrics = step(state, batch_of(n, i))
        found.append(float(metrics.loss))
    return found


def torchs_losses(module, lengths):
    """The same by torch."""
    tx, found = torch.optim.SGD(module.parameters(), 0.1), []
    for i, n in enumerate(lengths):
        total, number = loss(module, batch_of(n, i))
        tx.zero_grad()
        (total / number).backward()
        tx.step()
        found.append(float((total / number).detach()))
    return found


KEPT_BY = {f.__name__: (lambda f=f: f) for f in (in_a_global, in_an_attribute, in_a_dict_of_its_own, in_a_class)}
KEPT_BY |= {"by_a_cache": lambda: by_a_cache, "in_a_closure": closed_over}
CHEAP_WAYS = ("in_a_global", "inner", True), ("by_a_cache", "outer", False)
WAYS = [
    pytest.param(
        make,
        side,
        (6, 6, 4, 6) if example else (4, 6, 4),
        example,
        id=f"{name}-{side}-{'example' if example else 'none'}",
        marks=() if (name, side, example) in CHEAP_WAYS else slow,
    )
    for name, make in KEPT_BY.items()
    for side in ("outer", "inner")
    for example in (True, False)
]


@pytest.mark.parametrize("make, side, lengths, example", WAYS)
def test_tables_that_a_module_makes_are_made_of_real_numbers(make, side, lengths, example):
    module = net_of(**{side: make()})
    plain = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # which says it where a module is trained whole
        found = losses_of(module, lengths, example)
    want = torchs_losses(plain, lengths)
    assert found == pytest.approx(want, rel=1e-12)
    for n in lengths:  # what it made is of use to others, and it is what it was
        assert float(loss(module, batch_of(n))[0].detach()) > 0.0
    assert {type(table) for table in (*TABLES.values(), *module.tables.values())} <= {torch.Tensor}


@slow
@pytest.mark.parametrize("f", [in_a_global, by_a_cache, in_a_dict_of_its_own])
def test_a_module_that_was_called_before_has_its_tables(f):
    for side in ("outer", "inner"):
        module, plain = net_of(**{side: f}), net_of(**{side: f})
        module(batch_of(6)["x"])
        assert losses_of(module, (6, 4, 6)) == pytest.approx(torchs_losses(plain, (6, 4, 6)), rel=1e-12)


@slow
@pytest.mark.parametrize(
    "how", [fzero.Execution(remat="full"), fzero.Execution(compiled=True)], ids=["remat", "compiled"]
)
def test_tables_of_layers_that_are_recomputed_or_compiled(how):
    for f in (in_an_attribute, by_a_cache) if not how.compiled else (in_a_global,):
        found = losses_of(net_of(inner=f), (6, 6), execution=how)
        assert found == pytest.approx(torchs_losses(net_of(inner=f), (6, 6)), rel=1e-9)


def test_gradients_of_examples_of_a_module_with_a_table():
    model = fzero.from_module(net_of(inner=in_a_global), loss)
    params, batch = models.init_params(model, fzero.random.key(0), F64), batch_of(6)

    def total(params, batch):
        return models.loss(model, params, batch, models.Ctx(dtype=F64)).total

    rows = {name: leaf[:, None] for name, leaf in batch.items()}
    each = torch.vmap(torch.func.grad(total), in_dims=(None, 0))(params, rows)
    whole = torch.func.grad(total)(params, batch)
    for a, b in zip(fzero.pytree.leaves(each), fzero.pytree.leaves(whole)):
        torch.testing.assert_close(a.sum(0), b)


def counts(name):
    """A function of a module and of x that counts, and depends on it."""

    def by_a_number(module, x):
        module.count += 1
        return float(module.count)

    def by_a_dict(module, x):
        module.tables["n"] = module.tables.get("n", 0) + 1
        return float(module.tables["n"])

    def by_a_class(module, x):
        Record.calls += 1
        return float(Record.calls)

    def by_an_object(module, x):
        module.record.count += 1
        return float(module.record.count)

    def by_an_array(module, x):
        module.array += 1
        return float(module.array[0])

    def by_an_iterator(module, x):
        return float(next(STEPS))

    def by_a_list(module, x):
        module.history.append(1)
        return float(len(module.history))

    def after_many_calls(module, x):
        module.count += 1
        return 1.0 if module.count > 500 else 0.0

    def by_a_seed(module, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return torch.rand(6, dtype=F64)

    def by_a_clock(module, x):
        return time.perf_counter() % 1

    return locals()[name]


HIDDEN = {
    "by_a_number": r"changes the module\.{}count",
    "by_a_dict": r"changes the module\.{}tables",
    "by_a_class": r"changes Record",
    "by_an_object": r"changes the module\.{}record",
    "by_an_array": r"changes the module\.{}array",
    "by_an_iterator": r"changes STEPS",
    "by_a_list": r"changes the module\.{}history",
    "after_many_calls": r"changes the module\.{}count",
    "by_a_seed": r"sets torch's seed and draws random numbers",
    "by_a_clock": r"two calls of the module with the same parameters and batch give different results \(a clock",
}
CHEAP = {("by_a_class", "outer"), ("by_a_clock", "inner"), ("by_an_iterator", "outer"), ("after_many_calls", "inner")}


@pytest.mark.parametrize(
    "name, side",
    [
        pytest.param(name, side, marks=() if (name, side) in CHEAP else slow)
        for name in HIDDEN
        for side in ("outer", "inner")
    ],
)
def test_state_that_a_result_depends_on_is_refused_by_name(name, side):
    message = HIDDEN[name].format(r"layers\.0\." if side == "inner" else "")
    module = net_of(**{side: counts(name)})
    with pytest.raises(ValueError, match=message) as caught:
        fzero.from_module(module, loss, batch=batch_of(6))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        losses_of(module, (6,), example=False)


def sets_the_data(module, x):
    module.seen.data = module.seen + 1
    return module.seen


def branches_too(f):
    """The same of a module that is trained whole, as it branches on values."""

    def both(module, x):
        return f(module, x) if float(x.detach().sum()) < 1e9 else 0.0

    return both


@slow
@pytest.mark.parametrize("name", HIDDEN)
def test_the_same_of_a_module_that_is_trained_whole(name):
    with pytest.warns(UserWarning, match="trained whole"), pytest.raises(ValueError, match=HIDDEN[name].format("")):
        losses_of(net_of(outer=branches_too(counts(name))), (6,))


@slow
def test_a_buffer_whose_data_is_set_in_a_module_that_is_trained_whole():
    module = net_of(outer=sets_the_data)
    module.layers = module.layers[:1]
    with pytest.warns(UserWarning, match="trained whole"), pytest.raises(ValueError, match="data of the buffer seen"):
        losses_of(module, (6,))


def test_a_buffer_whose_data_is_set_is_refused():
    with pytest.raises(
        ValueError, match="sets the data of the module's seen, and a state that is no parameter is lost"
    ):
        fzero.from_module(net_of(outer=sets_the_data), loss, batch=batch_of(6))


def records_a_mean(module, x):
    module.history.append(float(x.detach().mean()))
    return 0.0


def records_its_calls(module, x):
    module.count += 1
    module.history.append(x.shape[1])
    module.record.count = module.count
    return 0.0


@pytest.mark.parametrize(
    "f, side",
    [
        pytest.param(f, side, marks=() if (f, side) == (records_a_mean, "inner") else slow)
        for f in (records_a_mean, records_its_calls)
        for side in ("outer", "inner")
    ],
)
def test_a_record_that_no_result_depends_on_is_fine(f, side):
    whole = f is records_a_mean  # as it asks for values
    with pytest.warns(UserWarning, match="trained whole") if whole else warnings.catch_warnings():
        found = losses_of(net_of(**{side: f}), (6, 4, 6))
    assert found == pytest.approx(torchs_losses(net_of(), (6, 4, 6)), rel=1e-12)


def leaves_its_mean(module, x):
    LEFT["mean"] = x.detach().mean()
    return 0.0


@slow
def test_what_layers_read_of_the_rest_of_a_module_is_no_stack():
    """A tensor that each call leaves in a table, and that layers read, is in no layer's arguments."""
    for called in (False, True):
        module = net_of(leaves_its_mean, lambda module, x: LEFT["mean"])
        if called:
            module(batch_of(6)["x"])
        with pytest.warns(UserWarning, match=r"trained whole.*(LEFT|KeyError)"):
            found = losses_of(module, (6, 6))
        assert found == pytest.approx(torchs_losses(copy.deepcopy(module), (6, 6)), rel=1e-12)


def made_of_weights(module, x):
    if module.table is None:
        module.table = module.linear.weight.detach().mean()
    return module.table


def made_of_activations(module, x):
    if module.count == 0:
        module.count = float(x.detach().mean())
    return module.count


@pytest.mark.parametrize("f", [made_of_weights, pytest.param(made_of_activations, marks=slow)])
def test_what_the_first_call_makes_of_weights_is_made_of_the_modules_own(f):
    """The numbers in place of the weights in a real call beside a trace are none of the module's."""
    module = net_of(inner=f)
    with pytest.warns(UserWarning, match=r"trained whole.*: its first call makes .* of parameters"):
        found = losses_of(module, (6, 6, 6))
    assert found == pytest.approx(torchs_losses(net_of(inner=f), (6, 6, 6)), rel=1e-12)


class Stubborn:
    """An object that nobody can copy. beside: what it has."""

    def __init__(self, beside=None):
        self.lock, self.beside, self.seen = threading.Lock(), beside, 0

    def update(self):
        self.seen += 1


def updates_a_bar(module, x):
    if module.bar is not None:
        module.bar.update()
    return 0.0


def bar_of(kind):
    if kind == "tqdm":
        return pytest.importorskip("tqdm").tqdm(total=9, file=io.StringIO())
    return Stubborn()


@pytest.mark.parametrize("kind", ["an object", pytest.param("tqdm", marks=slow)])
def test_attributes_that_cannot_be_copied_are_shared(kind):
    module = net_of(inner=updates_a_bar)
    for layer in module.layers:
        layer.bar = bar_of(kind)
    assert losses_of(module, (6, 4)) == pytest.approx(torchs_losses(net_of(), (6, 4)), rel=1e-12)


def test_an_attribute_with_the_module_in_it_that_cannot_be_copied_is_named():
    module = net_of()
    module.bar = Stubborn(module)
    message = (
        r"the module \(Net\): its attribute 'bar', a Stubborn with .* cannot be copied \(TypeError: .*lock.*take it"
    )
    with pytest.raises(ValueError, match=message) as caught:
        fzero.from_module(module, loss, batch=batch_of(6))
    assert "\n" not in str(caught.value)


def test_a_snapshot_puts_back_every_variable_that_a_function_reaches():
    """Alone, since a trace and the check for state both hide what the other would leave."""
    module, cell, names = net_of(), 1.0, {"a"}
    tensor = torch.ones(2)

    def run(add=[1]):  # noqa: B006  # a default that functions share is what is tried
        nonlocal cell
        cell, module.count, module.array[0] = cell + 1, module.count + 1, module.array[0] + 1
        module.history.append(cell), names.add(cell), add.append(cell)
        TABLES[len(TABLES)], Record.calls, Record.table = tensor, Record.calls + 1, tensor
        module.layers[1].tables["x"] = module.record.count = cell
        run.calls = cell
        return remembered(3)

    def state():
        layer, record = module.layers[1], {name: x for name, x in vars(Record).items() if not callable(x)}
        computed = remembered.cache_info().currsize
        own = module.count, float(module.array[0]), list(module.history), module.record.count
        return own, cell, names.copy(), dict(TABLES), record, dict(layer.tables), vars(run).copy(), computed, [*DEFAULT]

    (DEFAULT,) = run.__defaults__
    run.calls = 0
    first = state()
    snapshot = Snapshot(run)
    run(), run()
    second = state()
    assert all(x != y for x, y in zip(first, second)), [x == y for x, y in zip(first, second)]
    snapshot.restore()
    assert state() == first
