"""What from_module and to_module cannot do is one line that names the module, the tensor or the line of code."""

import contextlib
import random
import re
import warnings

import own_modules
import pytest
import torch
from own_modules import points_of, square_loss
from torch import nn
from torch.nn.utils import spectral_norm, weight_norm

import fzero
from fzero import models, optim
from fzero.sharding import ActivationSplit

slow = pytest.mark.slow


# torch's own word on what these tests refuse.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")


def net(layer, count=3):
    """Linear layers of a user around layers of a kind."""
    return nn.Sequential(nn.Linear(4, 4), *(layer(i) for i in range(count)), nn.Linear(4, 1)).double()


def layer_of(forward, **held):
    """A function that makes layers with this forward pass."""

    class Own(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.linear, self.number = nn.Linear(4, 4), number
            self.register_buffer("count", torch.zeros(()))
            for name, value in held.items():
                setattr(self, name, value)

    Own.forward = forward
    return Own


def of_layers(forward, layer=None):
    """A module of a list of layers with this forward pass."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 1)
            self.layers = nn.ModuleList(map(layer or layer_of(lambda self, x: torch.tanh(self.linear(x))), range(3)))
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("seen", torch.zeros(()))

    Net.forward = forward
    return Net().double()


def through(self, x):
    x = self.before(x)
    for layer in self.layers:
        x = layer(x)
    return self.after(x)


def one_step(model, **plan_options):
    tx = optim.sgd(0.1)
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy="fp64", **plan_options)
    return fzero.make_train_step(model, tx, plan)(fzero.init_state(model, tx, plan, seed=0), points_of(0))[1]


def writes_into_a_buffer(self, x):
    self.count.add_(1)
    return self.linear(x)


def writes_into_its_input(self, x):
    x += self.linear(x)
    return x


def sets_a_buffer(self, x):
    self.seen = self.seen + 1
    return through(self, x)


def sets_its_count(self, x):
    self.count = self.count + 1
    return torch.tanh(self.linear(x) * self.count)


def draws(self, x):
    return self.linear(x) * torch.poisson(torch.ones_like(x))


def counts_its_calls(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return self.linear(x) / self.calls


def keeps_a_tensor(self, x):
    self.beside = self.before(x).sum()
    return through(self, x)


def draws_by_python(self, x):
    return self.linear(x) * random.random()


def looks_up(**options):
    """A function that makes layers that add rows of a table."""

    class Looking(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.linear, self.table = nn.Linear(4, 4), nn.Embedding(5, 4, **options)

        def forward(self, x):
            return self.linear(x) + self.table(torch.arange(len(x)) % 5)

    return Looking


def clamps_a_weight(self, x):
    self.linear.weight.data.clamp_(-1, 1)
    return self.linear(x)


REFUSED = {
    "batch statistics": (
        lambda: net(lambda i: nn.BatchNorm1d(4, track_running_stats=False)).eval(),
        r"1 \(BatchNorm1d\) keeps no running statistics, so that it always .*; use LayerNorm or GroupNorm$",
    ),
    "weight norm by a hook": (
        lambda: net(lambda i: weight_norm(nn.Linear(4, 4))),
        r"1 \(Linear\): torch.nn.utils.weight_norm makes .*remove_weight_norm\(module\) and use .*parametrizations",
    ),
    "spectral norm by a hook": (
        lambda: net(lambda i: spectral_norm(nn.Linear(4, 4))),
        r"1 \(Linear\): torch.nn.utils.spectral_norm makes .*remove_spectral_norm\(module\) and .* in \.eval\(\)$",
    ),
    "batch normalisation": (lambda: net(lambda i: nn.BatchNorm1d(4)), r"1 \(BatchNorm1d\) keeps running statistics"),
    "a tensor that is no buffer": (
        lambda: net(layer_of(lambda self, x: self.linear(x) * self.mask, mask=torch.ones(4))),
        r"its attribute 'mask' is a tensor .*self\.register_buffer\(\"mask\", \.\.\.\)",
    ),
    "numbers that no key draws": (
        lambda: net(layer_of(draws)),
        r"test_module_mistakes\.py:\d+ \(return self.*\): draws random numbers \(aten\.poisson.*draw by F\.dropout",
    ),
    "Python's random numbers": (
        lambda: net(layer_of(draws_by_python)),
        "changes the state of Python's random, and what",
    ),
    "a count of calls": (lambda: net(layer_of(counts_its_calls)), r"changes the module\.1\.calls, and what is no "),
    "a tensor for the loss": (lambda: of_layers(keeps_a_tensor), r"changes the module\.beside, .* is lost; return it"),
    "max_norm": (
        lambda: net(looks_up(max_norm=1.0)),
        r"embedding_renorm_.* writes into the parameter table\.weight of a layer in place",
    ),
    "max_norm outside of the layers": (
        lambda: nn.Sequential(looks_up(max_norm=1.0)(0), *(nn.Linear(4, 4) for _ in range(3))).double(),
        r"writes into the parameter 0\.table\.weight in place",
    ),
    "scale_grad_by_freq": (lambda: net(looks_up(scale_grad_by_freq=True)), "scale_grad_by_freq divides gradients by"),
    "a weight written in place": (
        lambda: net(layer_of(clamps_a_weight)),
        r"clamp_\(-1, 1\)\): .*writes into the parameter linear\.weight of a layer in place",
    ),
    "a buffer written in place": (
        lambda: net(layer_of(writes_into_a_buffer)),
        r"\(self\.count\.add_\(1\)\): aten\.add_\.Tensor writes into the buffer count of a layer",
    ),
    "an input written in place": (
        lambda: net(layer_of(writes_into_its_input)),
        r"\(x \+= self\.linear\(x\)\): .* writes into the input of 1 in place; make a new tensor",
    ),
    "a buffer of a layer that is set": (
        lambda: net(layer_of(sets_its_count)),
        r"the module sets 'count' in its forward pass, and a state that is not a parameter would be lost",
    ),
    "a buffer that is set": (lambda: of_layers(sets_a_buffer), r"the module sets 'seen' in its forward pass"),
    "weights on the meta device": (lambda: net(lambda i: nn.Linear(4, 4)).to("meta"), "0.weight is on the meta device"),
    "weights without a shape": (lambda: nn.Sequential(nn.LazyLinear(4)), "0.weight has no shape yet; call the module"),
    "nothing to train": (
        lambda: net(lambda i: nn.Linear(4, 4)).requires_grad_(False),
        "no parameter of the module req",
    ),
}
CHEAP = {"batch normalisation", "max_norm", "a count of calls", "an input written in place"}


def marked(cases):
    return [pytest.param(*case, id=name, marks=() if name in CHEAP else slow) for name, case in cases.items()]


@pytest.mark.parametrize("make, message", marked(REFUSED))
def test_what_no_step_can_do_is_refused(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        fzero.from_module(make(), square_loss, batch=points_of(0))
    assert "\n" not in str(caught.value)


@slow
def test_without_an_example_the_first_step_refuses():
    with pytest.raises(ValueError, match="draws random numbers"):
        one_step(fzero.from_module(net(layer_of(draws)), square_loss))


def branches(self, x):
    if x.sum() > 0:
        x = -x
    return self.linear(x)


def backwards(self, x):
    x = self.before(x)
    for layer in reversed(self.layers):
        x = layer(x)
    return self.after(x)


def twice(self, x):
    x = self.before(x)
    for layer in [*self.layers, *self.layers]:
        x = layer(x)
    return self.after(x)


def scaled_between(self, x):
    x = self.before(x)
    for layer in self.layers:
        x = self.scale * layer(x)
    return self.after(x)


def other_arguments(self, x):
    x = self.before(x)
    for i, layer in enumerate(self.layers):
        x = layer(x, self.scale * i)
    return self.after(x)


class Cache:
    """What layers put their results into."""

    def __init__(self):
        self.results = []


def with_a_cache(self, x):
    x, cache = self.before(x), Cache()
    for layer in self.layers:
        x = layer(x, cache)
    return self.after(x)


def put_away(self, x, cache):
    cache.results.append(self.linear(x))
    return sum(cache.results[-1:])


def shaped_by_values(self, x):
    return self.linear(x[x[:, 0] > 0]).sum() + x


def same_again(self, x):
    return self.after(self.layers[0](self.before(x)))


def shared_layers():
    module = of_layers(through)
    module.layers[1].linear.weight = module.layers[0].linear.weight
    return module


def hooked_layers():
    module = of_layers(through)
    module.layers[1].register_forward_hook(lambda module, given, out: 2 * out)
    return module


def two_outputs(self, x):
    return self.linear(x), 2 * x


def second_output(self, x):
    x = self.before(x)
    for layer in self.layers:
        x, y = layer(x)
    return self.after(x + y)


WHOLE = {
    "a branch on values": (
        lambda: net(layer_of(branches)),
        r"test_module_mistakes\.py:\d+ \(if x\.sum\(\) > 0:\): without values it raises",
    ),
    "a shape that depends on values": (
        lambda: net(layer_of(shaped_by_values)),
        r"test_module_mistakes\.py:\d+ \(return self\.linear\(x\[x\[:, 0\] > 0\]\).*\): without values it raises",
    ),
    "layers of two kinds": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1))).double(),
        "in the module, layer 1 is not like layer 0: it is a Sequential and not a Linear",
    ),
    "layers of other sizes": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)).double(),
        r"weight has shape \(1, 5\) and not \(5, 4\)",
    ),
    "no list": (lambda: nn.Linear(4, 1).double(), "it has no ModuleList or Sequential of layers"),
    "a number that is used": (
        lambda: net(layer_of(lambda self, x: self.linear(x) / (self.number + 1))),
        "a layer's forward pass uses its number, number",
    ),
    "another order": (lambda: of_layers(backwards), r"layers\.2 is called where layers\.0 comes next"),
    "layers that run twice": (lambda: of_layers(twice), r"layers\.0 is called again after all layers"),
    "work between layers": (lambda: of_layers(scaled_between), r"of layers\.1 is not what the layer before returned"),
    "arguments of its own": (
        lambda: of_layers(other_arguments, layer_of(lambda self, x, s: self.linear(x) + s)),
        r"argument 1 of layers\.1 is another one than that of layers\.0",
    ),
    "a cache": (
        lambda: of_layers(with_a_cache, layer_of(put_away)),
        r"argument 1 of layers\.0 is an object with tensors of its own, Cache; .*use_cache=False",
    ),
    "layers left out": (lambda: of_layers(same_again), r"layers\.1 is never called"),
    "a weight of two layers": (
        shared_layers,
        r"layers\.0\.linear\.weight and layers\.1\.linear\.weight are one tensor",
    ),
    "a hook": (hooked_layers, r"layers\.1 has a hook"),
    "two outputs": (
        lambda: of_layers(second_output, layer_of(two_outputs)),
        r"layers\.0 returns more than one tensor, and the others are used",
    ),
}


@slow
@pytest.mark.parametrize("make, message", [pytest.param(*case, id=name) for name, case in WHOLE.items()])
def test_what_is_no_stack_is_trained_whole_and_the_reason_is_said(make, message):
    module = make()
    with pytest.warns(UserWarning, match=message) as said:
        model = fzero.from_module(module, square_loss, batch=points_of(0))
    assert len(said) == 1 and "it is trained whole, and not layer by layer: " in str(said[0].message)
    assert "\n" not in str(said[0].message)
    total, number = square_loss(module, points_of(0))
    assert abs(float(one_step(model).loss) - float(total.detach() / number)) < 1e-12


def ready_first(self, x):
    if not self.ready:
        self.register_forward_hook(lambda module, args, out: out * 2)
        self.ready = True
    return torch.tanh(self.linear(x))


@pytest.mark.parametrize("layers", [3, 0])
def test_what_a_module_makes_in_its_first_call_is_made_before_a_step(layers):
    """As transformers does, whose modules add hooks where they are first called."""
    layer = layer_of(ready_first, ready=False)
    module = of_layers(through, layer) if layers else layer(0).double()
    if not layers:
        module.linear = nn.Linear(4, 1).double()
    with contextlib.nullcontext() if layers else pytest.warns(UserWarning, match="trained whole"):
        model = fzero.from_module(module, square_loss, batch=points_of(0))
    assert model.config.n_layers == layers
    module(points_of(0)["x"])  # the first call, in which the hook is not there yet
    total, number = square_loss(module, points_of(0))
    assert abs(float(one_step(model).loss) - float(total.detach() / number)) < 1e-12


def test_layers_that_are_named_must_be_a_stack():
    module = net(lambda i: nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"layers='' *: layer 4 is not like layer 0: weight has shape \(1, 4\)"):
        fzero.from_module(module, square_loss, layers="")
    with pytest.raises(ValueError, match=r"layers='layer' is no ModuleList .*did you mean layers.*it has layers"):
        fzero.from_module(of_layers(through), square_loss, layers="layer")
    with pytest.raises(ValueError, match=r"Net cannot be split into layers: layers\.2 is called where"):
        fzero.from_module(of_layers(backwards), square_loss, layers="layers", batch=points_of(0))
    with pytest.raises(ValueError, match=r"layers='layers': layers\.1 has a hook"):
        fzero.from_module(hooked_layers(), square_loss, layers="layers")


@slow
def test_without_an_example_the_first_step_says_why_it_cannot_split():
    model = fzero.from_module(of_layers(backwards), square_loss)
    with pytest.raises(ValueError, match=r"layers\.2 is called where .* give from_module batch=, an example"):
        one_step(model)


def test_arguments_of_other_kinds():
    module = net(lambda i: nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"the module is a dict; give an nn\.Module"):
        fzero.from_module({}, square_loss)
    with pytest.raises(TypeError, match="loss is a str; write a function"):
        fzero.from_module(module, "mse")
    with pytest.raises(TypeError, match="the batch of a model made from a module is a tuple; write"):
        fzero.from_module(module, square_loss, batch=(torch.ones(2, 4), torch.ones(2, 1)))
    with pytest.raises(ValueError, match=r"counts the samples; they have \{'x': 2, 'y': 3\}"):
        fzero.from_module(module, square_loss, batch={"x": torch.ones(2, 4), "y": torch.ones(3, 1)})
    with pytest.raises(ValueError, match="has no logits; put the weights back"):
        model = fzero.from_module(module, square_loss)
        models.logits(model, models.init_params(model, fzero.random.key(0), torch.float64), points_of(0))


@slow
def test_dropout_of_rows_that_are_no_samples():
    class Turned(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.linear(x).T).T

    with pytest.raises(
        ValueError, match=r"\(return self\.drop.*: dropout has an input of shape \[4, 8\] for a batch of 8 s"
    ):
        one_step(fzero.from_module(net(Turned), square_loss))


@slow
def test_tensor_parallelism_needs_rules_that_fit():
    module, loss, _ = own_modules.made("transformer")
    mesh = fzero.fake_mesh({"tp": 2})
    with pytest.raises(ValueError, match=r"tp: 'w_q' finds no nn\.Linear in a layer.*there is q, k, v"):
        fzero.from_module(module, loss, tp={"w_q": "columns"})
    with pytest.raises(ValueError, match="tp: '^q' is 'colwise'; it must be 'columns' or 'rows'".replace("^", r"\^")):
        fzero.from_module(module, loss, tp={"^q": "colwise"})
    with pytest.raises(ValueError, match="tp=2: nothing says what of the module it splits"):
        fzero.zero_plan(0, fzero.from_module(module, loss), mesh)
    with pytest.raises(ValueError, match="Sequential cannot be split into layers"):
        fzero.from_module(nn.Sequential(nn.Linear(4, 1)), square_loss, tp={"0": "rows"})
    model = fzero.from_module(module, loss, tp={"^[qkv]$": "columns", "^o$": "rows"})
    plan = fzero.zero_plan(0, model, mesh)
    assert [str(plan.leaves[f"blocks/{leaf}"].params) for leaf in ("q/weight", "q/bias", "o/weight", "o/bias")] == [
        "[·, ·/tp, ·]",
        "[·, ·/tp]",
        "[·, ·, ·/tp]",
        "[·, ·]",
    ]
    with pytest.raises(ValueError, match="a model made from a module has none; leave sequence=True out"):
        model.prepare(own_modules.tokens_of(0), models.Ctx(split=ActivationSplit(sequence=True)))


@slow
def test_a_batch_that_needs_other_parameters_than_the_example():
    def forward(self, x):
        y = through(self, x)
        return y * self.before.weight.sum() if len(x) > 4 else y

    few = {name: leaf[:4] for name, leaf in points_of(0).items()}
    model = fzero.from_module(of_layers(forward), square_loss, batch=few)
    with pytest.raises(ValueError, match=r"the head uses before\.weight, .*leave `batch` out"):
        one_step(model)
    assert one_step(fzero.from_module(of_layers(forward), square_loss)).loss.isfinite()


def test_weights_go_back_into_their_own_module_alone():
    module = net(lambda i: nn.Linear(4, 4))
    model, tx = fzero.from_module(module, square_loss), optim.sgd(0.1)
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy="fp64")
    state = fzero.init_state(model, tx, plan, seed=0)
    for other, message in (
        (net(lambda i: nn.Linear(4, 4), 4), "the state has 4 layers and the module 5; give"),
        (nn.Linear(4, 1), "the state has layers and the module has none: it has no ModuleList"),
        (
            nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))),
            r"the state has '4\.weight' and the module has not",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            fzero.to_module(state, other)
    wide = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Linear(5, 1))
    with pytest.raises(ValueError, match=re.escape("4.weight: the state has shape [1, 4] and the module [1, 5]")):
        fzero.to_module(state, wide)
    shards = fzero.zero_plan(3, model, fzero.fake_mesh({"dp": 2}), policy="fp64")
    with pytest.raises(ValueError, match=r"write to_module\(state, module, plan\)"):
        fzero.to_module(fzero.init_state(model, tx, shards, seed=0), module)
    with pytest.raises(TypeError, match="the state is a dict; write to_module"):
        fzero.to_module({}, module)


@slow
def test_a_frozen_layer_is_before_the_stack_and_a_mode_is_kept():
    module = net(lambda i: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    module[1].requires_grad_(False)
    module.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fzero.from_module(module, square_loss, batch=points_of(0))
    total, number = square_loss(module, points_of(0))
    assert abs(float(one_step(model).loss) - float(total.detach() / number)) < 1e-12
    plan = fzero.zero_plan(0, model, fzero.one_process())
    assert plan.leaves["blocks/0/weight"].shape == (2, 4, 4) and plan.frozen == {
        f"embed/1/{name}" for name in ("0/weight", "0/bias", "1/weight", "1/bias")
    }
