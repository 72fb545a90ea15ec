"""A loss around a module sees what it sees around torch's: gradients of its own, hooks, weights and variables of
outside are those of the module, or are refused by name."""

import types
import warnings

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

import fzero
from fzero import models, optim
from fzero.core import Readings

DATA = [
    {"x": x, "y": x.sum(1, keepdim=True).sin()}
    for x in torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
]


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(5, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.after(x)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.after(torch.tanh(self.before(x)))


def squares(call, batch):
    error = call(batch["x"]) - batch["y"]
    return error.square().sum(), len(error)


def trained(net, loss, *, example=True, between=lambda i: None):
    """(losses, the module afterwards, warnings) of SGD by fzero."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = fzero.from_module(net, loss, batch=DATA[0] if example else None)
        plan, tx = fzero.zero_plan(0, model, fzero.one_process(), policy="fp64"), optim.sgd(0.1)
        state, step = fzero.init_state(model, tx, plan, seed=0), fzero.make_train_step(model, tx, plan)
        losses = []
        for i, batch in enumerate(DATA):
            between(i)
            state, metrics = step(state, batch)
            losses.append(float(metrics.loss))
        own = type(net)().double()
        fzero.to_module(state, own)
    return losses, own, [str(one.message) for one in said]


def expected(net, loss):
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for batch in DATA:
        optimizer.zero_grad()
        total, number = loss(lambda *args: net(*args), batch)
        (total / number).backward()
        optimizer.step()
        losses.append(float(total.detach() / number))
    return losses, net


def nets(kind):
    out = []
    for _ in range(2):
        torch.manual_seed(0)
        out.append(kind().double())
    return out


def expect_torchs(kind, loss):
    """Three steps are torch's; returns the warnings."""
    ours, theirs = nets(kind)
    (losses, own, said), (wanted, net) = trained(ours, loss), expected(theirs, loss)
    assert losses == pytest.approx(wanted, rel=1e-12)
    for p, q in zip(own.parameters(), net.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)
    return said


# ---- gradients and hooks ----


def penalty_by_autograd(call, batch):
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    return slope.square().sum(), len(x)


def slope_by_backward(call, batch):
    x = batch["x"].clone().requires_grad_()
    call(x).sum().backward()
    return (call(batch["x"]) * x.grad.sum()).sum(), len(x)


def penalty_by_func(call, batch):
    slope = vmap(grad(lambda row: call(row[None]).sum()))(batch["x"])
    return slope.square().sum(), len(batch["x"])


class Force(Stack):
    """Minus the gradient of an energy."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        return -torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0][:, :1]


@pytest.mark.parametrize("kind", [Stack, Whole])
def test_gradients_by_autograd_within_a_loss_are_torchs(kind):
    said = expect_torchs(kind, penalty_by_autograd)
    assert kind is Whole or any("asks torch.autograd for gradients, which a traced graph" in line for line in said)


def test_gradients_by_autograd_within_a_module_are_torchs():
    assert any("asks torch.autograd" in line for line in expect_torchs(Force, squares))


@pytest.mark.parametrize("kind", [Stack, Whole])
def test_a_backward_pass_within_a_loss_is_refused(kind):
    with pytest.raises(ValueError, match=r"test_module_losses.py:\d+ .*backward\(\) in a loss, which adds"):
        trained(kind().double(), slope_by_backward)


@pytest.mark.filterwarnings("ignore:Whole. it is trained whole:UserWarning")
def test_gradients_by_autograd_are_refused_where_torch_func_takes_them():
    model = fzero.from_module(Whole().double(), penalty_by_autograd)
    params = models.init_params(model, fzero.random.key(0), torch.float64)
    ctx = models.Ctx(dtype=torch.float64)
    with pytest.raises(ValueError, match=r"test_module_losses.py:\d+ .*torch.autograd in a loss.*use torch.func.grad"):
        torch.func.grad(lambda p: models.loss(model, p, DATA[0], ctx).total)(params)


def test_gradients_by_torch_func_within_a_loss_are_torchs():
    for kind in (Stack, Whole):
        expect_torchs(kind, penalty_by_func)


def test_a_plain_loss_that_asks_autograd_is_refused():
    def loss(params, batch):
        x = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad((x @ params["w"]).sum(), x, create_graph=True)
        return slope.square().sum(), len(x)

    params = {"w": torch.ones(5, 1, dtype=torch.float64)}
    plan, tx = fzero.zero_plan(0, params, fzero.one_process(), policy="fp64"), optim.sgd(0.1)
    with pytest.raises(ValueError, match=r"torch.autograd in a loss"):
        fzero.make_train_step(loss, tx, plan)(fzero.init_state(params, tx, plan, seed=0), DATA[0])


class Hooked(Stack):
    def forward(self, x):
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        if x.requires_grad:
            x.register_hook(lambda g: 0.1 * g)
        return self.after(x)


def hooked_loss(call, batch):
    out = call(batch["x"])
    out.register_hook(lambda g: 0.1 * g)
    return (out - batch["y"]).square().sum(), len(out)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return -0.5 * g


def reversed_loss(call, batch):
    return (Reversed.apply(call(batch["x"])) - batch["y"]).square().sum(), 6


def self_target(call, batch):
    with torch.no_grad():
        target = call(batch["x"] + 0.1)
    return (call(batch["x"]) - target - batch["y"]).square().sum(), 6


def hooked_module():
    net = Stack()
    net.after.register_full_backward_hook(lambda module, inner, outer: (0.3 * inner[0],))
    return net


@pytest.mark.parametrize("kind", [Stack, Whole])
@pytest.mark.parametrize("loss", [hooked_loss, reversed_loss, self_target])
def test_what_a_graph_would_lose_makes_no_stack(kind, loss):
    said = expect_torchs(kind, loss)
    assert kind is Whole or any("which a traced graph would lose" in line or "again" in line for line in said), said


def test_a_hook_outside_of_the_layers_makes_no_stack():
    assert any("a hook on a tensor" in line for line in expect_torchs(Hooked, squares))
    (losses, _, said), (wanted, _) = (f(hooked_module().double(), squares) for f in (trained_alike, expected_alike))
    assert losses == pytest.approx(wanted, rel=1e-12)
    assert any("which a traced graph would lose" in line for line in said)


def trained_alike(net, loss):
    """`trained` of a module whose weights are set."""
    return trained(with_seed(net), loss)


def expected_alike(net, loss):
    return expected(with_seed(net), loss)


def with_seed(net):
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=g, dtype=p.dtype))
    return net


TEACHER = with_seed(Whole().double())


def distilled(call, batch):
    with torch.no_grad():
        target = TEACHER(batch["x"])
    return (call(batch["x"]) - target).square().sum(), 6


def test_a_teacher_is_a_constant_of_the_graph():
    assert expect_torchs(Stack, distilled) == []


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("name", ["before.weight", "layers.0.0.weight"])
def test_a_hook_of_a_parameter_is_refused(register, name):
    net = Stack().double()
    getattr(net.get_parameter(name), register)(lambda g: None)
    with pytest.raises(ValueError, match=f"^{name} has a hook on its gradient"):
        fzero.from_module(net, squares)


# ---- what a loss reads beside its arguments ----


@pytest.mark.parametrize("kind", [Stack, Whole])
@pytest.mark.parametrize("example", [True, False])
def test_the_modules_own_parameters_are_not_read_beside_call(kind, example):
    net = kind().double()

    def loss(call, batch):
        total, number = squares(call, batch)
        return total + net.after.weight.square().sum(), number

    with pytest.raises(ValueError, match=r"reads after.weight of the module itself"):
        trained(net, loss, example=example)
    with pytest.raises(ValueError, match=r"reads after.weight of the module itself"):
        trained(
            net, lambda call, batch: (squares(call, batch)[0] * net.after.weight.tolist()[0][0], 6), example=example
        )
    with pytest.raises((ValueError, AttributeError), match="`call` of a loss has no 'after'"):
        trained(net, lambda call, batch: (call.after.weight.sum(), 1), example=example)


def test_the_modules_frozen_parameters_may_be_read():
    net = Stack().double()
    net.before.requires_grad_(False)
    value = float(net.before.weight.detach().sum())
    losses = trained(net, lambda call, batch: (squares(call, batch)[0] + net.before.weight.sum() * 6, 6))[0]
    plain = trained(net, squares)[0]
    assert losses == pytest.approx([loss + value for loss in plain], rel=1e-12)


RATES = {"now": 1.0}
SCALE = 1.0
HERE = types.ModuleType("constants")
HERE.FACTOR = 1.0


class Settings:
    weight = 1.0

    def __init__(self):
        self.weight, self.seen = 1.0, 0

    def loss(self, call, batch):
        total, number = squares(call, batch)
        return total * self.factor(), number

    def factor(self):
        return self.weight


def by_a_dict(call, batch):
    return squares(call, batch)[0] * RATES["now"], 6


def by_a_global(call, batch):
    return squares(call, batch)[0] * scale(), 6


def scale():
    return SCALE


def by_a_module(call, batch):
    return squares(call, batch)[0] * HERE.FACTOR, 6


class Scaled(Stack):
    def forward(self, x):
        return super().forward(x) * RATES["now"]


def set_of(where, monkeypatch):
    """(loss, kind of module, what changes the variable)."""
    settings = Settings()
    local = [1.0]

    def by_a_cell(call, batch):
        return squares(call, batch)[0] * local[0], 6

    return {
        "dict": (by_a_dict, Stack, lambda: monkeypatch.setitem(RATES, "now", 2.0)),
        "global": (by_a_global, Stack, lambda: monkeypatch.setitem(globals(), "SCALE", 2.0)),
        "module": (by_a_module, Stack, lambda: setattr(HERE, "FACTOR", 2.0)),
        "cell": (by_a_cell, Stack, lambda: local.__setitem__(0, 2.0)),
        "attribute": (settings.loss, Stack, lambda: setattr(settings, "weight", 2.0)),
        "head": (squares, Scaled, lambda: monkeypatch.setitem(RATES, "now", 2.0)),
    }[where]


@pytest.mark.parametrize("where", ["dict", "global", "module", "cell", "attribute", "head"])
def test_a_number_that_a_trace_has_as_a_constant_may_not_change(where, monkeypatch):
    monkeypatch.setattr(HERE, "FACTOR", 1.0)
    loss, kind, change = set_of(where, monkeypatch)
    assert trained(kind().double(), loss)[0]
    with pytest.raises(ValueError, match="has another value than when the loss function was traced"):
        trained(kind().double(), loss, between=lambda i: change() if i == 2 else None)


def test_what_changes_before_the_first_step_counts(monkeypatch):
    ours, theirs = nets(Stack)
    losses = trained(ours, by_a_dict, between=lambda i: monkeypatch.setitem(RATES, "now", 2.0))[0]
    assert losses == pytest.approx(expected(theirs, by_a_dict)[0], rel=1e-12)


CALLS = {"number": 0}


def test_what_a_loss_reads_for_a_line_may_change(capsys):
    settings = Settings()

    def loss(call, batch):
        if settings.seen % 2:
            print("seen")
        return squares(call, batch)[0] * settings.weight, 6

    assert trained(Stack().double(), loss, between=lambda i: setattr(settings, "seen", i))[0]
    assert "seen" in capsys.readouterr().out


def by_item(call, batch):
    return squares(call, batch)[0] * float(TENSOR), 6


def by_name(call, batch):
    return squares(call, batch)[0] * globals()["RATES"]["now"], 6


TENSOR = torch.ones(())


@pytest.mark.parametrize("loss", [by_item, by_name])
def test_a_number_that_is_read_in_another_way_may_not_change_either(loss, monkeypatch):
    def change(i):
        if i == 1:
            monkeypatch.setitem(RATES, "now", 2.0)
            TENSOR.fill_(2.0)

    with pytest.raises(ValueError, match="a number that the loss function reads has another value"):
        trained(Stack().double(), loss, between=change)
    TENSOR.fill_(1.0)


def test_a_loss_may_count_its_calls():
    def loss(call, batch):
        CALLS["number"] += 1
        return squares(call, batch)

    before, CALLS["number"] = CALLS["number"], 0
    model = fzero.from_module(Stack().double(), loss, batch=DATA[0])
    plan, tx = fzero.zero_plan(0, model, fzero.one_process(), policy="fp64"), optim.sgd(0.1)
    state, step = fzero.init_state(model, tx, plan, seed=0), fzero.make_train_step(model, tx, plan)
    half = {name: leaf[:3] for name, leaf in DATA[1].items()}
    for batch in (DATA[0], half, DATA[0], half, DATA[2]):
        state, _ = step(state, batch)
    assert int(state.step) == 5
    CALLS["number"] = before


def test_what_a_loss_does_not_read_may_change():
    settings = Settings()
    assert trained(Stack().double(), settings.loss, between=lambda i: setattr(settings, "seen", i))[0]
    readings = Readings([settings.loss])
    settings.seen = 7
    assert readings.changed() == ""
    settings.weight = 3.0
    assert readings.changed() == "self.weight"


# ---- batches and results ----


@pytest.mark.parametrize("value", [1.0, "a", True])
def test_a_batch_holds_tensors(value):
    with pytest.raises(TypeError, match=r"the batch's lam is .*; a batch is a dict of tensors"):
        fzero.from_module(Stack(), squares, batch={**DATA[0], "lam": value})


def test_rrelu_draws_nothing_in_an_evaluation():
    class Leaky(Stack):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.RReLU()) for _ in range(2))

    ours, theirs = nets(Leaky)
    assert trained(ours.eval(), squares)[0] == pytest.approx(expected(theirs.eval(), squares)[0], rel=1e-12)


def test_sums_and_counts_in_bfloat16_are_added_in_float32():
    def loss(params, batch):
        total = (batch["x"] * params["w"]).sum().bfloat16()
        return total, torch.tensor(129.0).bfloat16() - 0 * total.detach(), {"seen": torch.tensor(257.0).bfloat16()}

    params = {"w": torch.ones(5, dtype=torch.float64)}
    plan, tx = fzero.zero_plan(0, params, fzero.one_process(), policy="fp64"), optim.sgd(0.0)
    batch = {"x": torch.full((6, 5), 8.6, dtype=torch.float64)}
    step = fzero.make_train_step(loss, tx, plan, micro_batches=3)
    metrics = step(fzero.init_state(params, tx, plan, seed=0), batch)[1]
    part = float(torch.tensor(8.6 * 10).bfloat16())
    assert float(metrics.num_tokens) == 3 * float(torch.tensor(129.0).bfloat16())
    assert float(metrics.loss) == pytest.approx(part / float(torch.tensor(129.0).bfloat16()), rel=1e-6)


def test_a_complex_count_is_refused():
    def loss(params, batch):
        return (batch["x"] * params["w"]).sum(), torch.tensor(2.0 + 0j)

    params = {"w": torch.ones(5)}
    plan, tx = fzero.zero_plan(0, params, fzero.one_process()), optim.sgd(0.1)
    with pytest.raises(ValueError, match=r"number of samples is torch.complex64"):
        fzero.make_train_step(loss, tx, plan)(fzero.init_state(params, tx, plan, seed=0), {"x": torch.ones(2, 5)})


def test_the_loss_of_a_plan_is_in_its_dtype_where_that_is_wider():
    model = models.mlp(models.MLPConfig(vocab_size=8))
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    params = fzero.pytree.map(lambda x: x.double(), models.init_params(model, fzero.random.key(0)))
    for policy, dtype in (("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.float32)):
        plan = fzero.zero_plan(0, model, fzero.one_process(), policy=policy)
        total = models.loss(model, params, {"tokens": tokens, "targets": tokens}, models.Ctx(), plan).total
        exact = models.loss(model, params, {"tokens": tokens, "targets": tokens}, models.Ctx(dtype=dtype)).total
        assert torch.equal(total, exact), policy
