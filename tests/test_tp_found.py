"""What tp splits of a module where nobody said it: found by where its linear layers' outputs flow, and proved."""

import functools
import warnings

import pytest
import ranks
import torch
import torch.nn.functional as F
from close import assert_close
from own_modules import V, token_loss, tokens_of
from torch import nn

import fzero
from fzero import optim
from fzero.models import Ctx, module_tp, module_tp_search

D, HORNS, STEPS = 8, 4, 3


class Upright(nn.Module):
    """A linear layer of a class of its own, with its weight as [in, out], that names its outputs."""

    def __init__(self, out, size):
        super().__init__()
        self.weight, self.bias, self.out = (
            nn.Parameter(0.3 * torch.randn(size, out)),
            nn.Parameter(torch.zeros(out)),
            out,
        )

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], self.out)


class Elk(nn.Module):
    """A layer whose names say nothing; its code names the number of heads, and its keys have fewer than its queries."""

    def __init__(self):
        super().__init__()
        self.horns, self.size, self.pairs = HORNS, D // HORNS, HORNS // 2
        self.calm, self.still = nn.LayerNorm(D), nn.LayerNorm(2 * D)
        self.snow, self.river = nn.Linear(D, D, bias=False), nn.Linear(D, D)
        self.moss = nn.ModuleDict({"dry": nn.Linear(D, D // 2), "wet": nn.Linear(D, D // 2)})
        self.wide, self.narrow = Upright(3 * D, D), Upright(D, 3 * D)
        self.first, self.second = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)  # with a norm between them
        self.fused, self.back = nn.Linear(D, 4 * D), nn.Linear(2 * D, D)  # two halves of its outputs
        self.choice, self.unused = nn.Linear(D, 2), nn.Linear(D, D)

    def forward(self, x):
        b, t, _ = x.shape
        h = self.calm(x)
        q = self.snow(h).view(b, t, self.horns, self.size).transpose(1, 2)
        k, v = (
            f(h).view(b, t, self.pairs, self.size).repeat_interleave(2, 2).transpose(1, 2) for f in self.moss.values()
        )
        a = ((q @ k.transpose(-1, -2)) + torch.full((t, t), -1e9, dtype=x.dtype).triu(1)).softmax(-1) @ v
        x = x + self.river(a.transpose(1, 2).reshape(b, t, self.horns * self.size))
        x = x + self.narrow(F.silu(self.wide(x))) * self.choice(x).softmax(-1)[..., :1]
        x = x + self.second(self.still(self.first(x)))
        gate, up = self.fused(x).chunk(2, -1)
        return x + self.back(F.gelu(gate) * up)


class Forest(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaves, self.elks, self.out = nn.Embedding(V, D), nn.ModuleList(Elk() for _ in range(3)), nn.Linear(D, V)

    def forward(self, tokens):
        x = self.leaves(tokens)
        for elk in self.elks:
            x = elk(x)
        return self.out(x)


SPLIT = {"snow": -2, "moss/dry": -2, "moss/wet": -2, "river": -1, "wide": -1, "narrow": -2}  # the dim of the weight


def forest():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Forest().double()


def model_of(tp, batch=True):
    return fzero.from_module(forest(), token_loss, batch=tokens_of(0) if batch else None, tp=tp)


def split_leaves(plan):
    """{linear layer: the dim of its weight that tp splits}"""
    found = {}
    for name, leaf in plan.leaves.items():
        dims = [i - len(leaf.shape) for i, dim in enumerate(leaf.compute.dims) if "tp" in str(dim)]
        if dims and name.endswith("/weight"):
            found[name.removeprefix("blocks/").removesuffix("/weight")] = dims[0]
    return found


def train(mesh, tp, make, stage=0):
    """(parameters after the steps, losses, what tp splits, what was said of it)"""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module, model, tx = forest(), model_of(tp), make()
        plan = fzero.zero_plan(stage, model, mesh, policy="fp64")
        state, log = fzero.init_state(model, tx, plan, seed=0), []
        step = fzero.make_train_step(model, tx, plan)
        for i in range(STEPS):
            state, metrics = step(state, fzero.local_batch(tokens_of(i), mesh))
            log.append(float(metrics.loss))
        fzero.to_module(state, module, plan)
    lines = [str(one.message) for one in said if "tp=" in str(one.message)]
    return {name: p.detach() for name, p in module.named_parameters()}, log, split_leaves(plan), lines


# eps: with Adam's own 1e-8 it would divide gradients that are zero but for rounding by as little.
SGD, ADAM = functools.partial(optim.sgd, 0.3), functools.partial(optim.adamw, 1e-2, eps=1e-4)


@pytest.mark.parametrize(
    ("tp", "make", "stage"),
    [
        ("auto", SGD, 0),
        pytest.param(None, ADAM, 0, marks=pytest.mark.slow),
        pytest.param(None, SGD, 3, marks=pytest.mark.exhaustive),
    ],
)
def test_linears_of_unknown_names_are_split_and_train_as_on_one_process(tp, make, stage):
    expected, losses, nothing, _ = train(fzero.one_process(), tp, make)
    assert not nothing
    for rank, (got, log, split, said) in enumerate(ranks.run(2, train, tp, make, stage, mesh={"tp": 2})):
        assert_close(log, losses, rtol=1e-10)
        assert_close(got, expected, rtol=1e-10, atol=1e-12)
        assert split == SPLIT
        if rank:
            assert not said
            continue
        (line,) = said
        assert "\n" not in line
        for part in (
            "Forest: tp=2 splits 6 of 12 linear layers",
            "snow, moss.dry, moss.wet -> river (horns, pairs divided); wide -> narrow",
            "first, second (test_tp_found.py:",
            "fused, back (what back returns differs from a whole one's by",
            "unused (it is not called)",
        ):
            assert part in line, (part, line)


def found(tp, size=2):
    """(what tp splits, what is said of it)"""
    with pytest.warns(UserWarning, match=f"tp={size} splits") as said:
        plan = fzero.zero_plan(0, model_of(tp), fzero.fake_mesh({"tp": size}))
    return split_leaves(plan), str(said[0].message)


def test_rules_of_the_user_come_first_and_heads_must_divide():
    rules = {"": "auto", "^(snow|moss)": "whole", "^wide$": "columns", "^narrow$": "rows"}
    split, said = found(rules)
    assert split == {"wide": -1, "narrow": -2} and "splits 0 of 7 linear layers that no rule names" in said
    # Three does not divide four heads; it divides the features of the other group.
    split, said = found("auto", 3)
    assert split == {"wide": -1, "narrow": -2}
    assert "snow, river, moss.dry, moss.wet (snow.weight has 8 features, not divisible by tp=3)" in said


def test_nothing_is_found_without_an_example_and_nothing_is_guessed():
    mesh = fzero.fake_mesh({"tp": 2})
    for rules in (None, "auto"):
        with pytest.raises(
            ValueError, match="nothing says what of the module it splits; give from_module batch="
        ) as error:
            fzero.zero_plan(0, model_of(rules, batch=False), mesh)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"tp='all': it must be \"auto\", or rules such as"):
        model_of("all")
    with pytest.warns(UserWarning, match="splits 0 of 6"), pytest.raises(ValueError, match="nothing was found"):
        fzero.zero_plan(0, model_of({"^(unused|choice|first|second|fused|back)$": "auto"}), mesh)


def test_a_wrong_group_is_proved_wrong_by_its_result_or_by_a_gradient():
    model = model_of("auto")
    (probe,) = model.embed.__self__.probes()["blocks"]
    module_tp_search.expect_equal(probe, module_tp_search.SplitGroup(("wide",), "narrow"), 2)
    for columns, row, numbers, reason in (
        (("fused",), "back", (), "what back returns differs"),
        (("snow",), "river", (("", "horns"),), "test_tp_found"),  # whole keys
        (("first",), "second", (), "test_tp_found"),
        (("wide",), "back", (), "inputs of back are not followed|test_tp_found"),
        (("unused",), "narrow", (), "are not followed"),
    ):
        with pytest.raises(module_tp_search.Unequal, match=reason):
            module_tp_search.expect_equal(probe, module_tp_search.SplitGroup(columns, row, numbers), 2)


class Backwards(torch.autograd.Function):
    """y, whose gradient goes through a mean over all features."""

    @staticmethod
    def forward(y):
        return y.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g - g.mean(-1, keepdim=True)


def test_a_gradient_alone_decides_too(monkeypatch):
    silu = F.silu
    monkeypatch.setattr(F, "silu", lambda x, inplace=False: silu(x) + (Backwards.apply(x) - x))
    (probe,) = model_of("auto").embed.__self__.probes()["blocks"]
    with pytest.raises(module_tp_search.Unequal, match=r"the gradient of .* differs from a whole one's"):
        module_tp_search.expect_equal(probe, module_tp_search.SplitGroup(("wide",), "narrow"), 2)


def test_each_size_of_tp_is_looked_for_once():
    model, sizes = model_of({"^(wide|narrow)$": "auto"}), []
    probes = model.embed.__self__.probes
    model.embed.__self__.probes = lambda: (sizes.append(1), probes())[1]
    with pytest.warns(UserWarning, match="tp=2 splits 2 of 2"):
        for _ in range(2):
            fzero.zero_plan(0, model, fzero.fake_mesh({"tp": 2}))
    assert len(sizes) == 1


# ---- mistakes planted into what finds them ---------------------------------------------------------------------------


def wrong_groups(patch):
    test_a_wrong_group_is_proved_wrong_by_its_result_or_by_a_gradient()


def right_groups(patch):
    assert found("auto")[0] == SPLIT


def no_gradients(patch):
    near = module_tp_search.expect_near
    patch.setattr(
        module_tp_search,
        "expect_near",
        lambda what, *rest: None if what.startswith("the gradient") else near(what, *rest),
    )


def first_rank_for_all(patch):
    patch.setattr(module_tp_search, "sum_of", lambda parts: parts[0] * len(parts))


MISTAKES = {
    "differences are not looked at": (lambda patch: patch.setattr(module_tp_search, "MOST", 1e9), wrong_groups),
    "gradients are not compared": (no_gradients, test_a_gradient_alone_decides_too),
    "numbers stay whole": (
        lambda patch: patch.setattr(module_tp_search, "numbers_of", lambda *args: [()]),
        right_groups,
    ),
    "nothing flows": (
        lambda patch: patch.setattr(
            module_tp_search, "sources_of", lambda probe: {name: set() for name in probe.linears}
        ),
        right_groups,
    ),
    "the part of one rank for all": (first_rank_for_all, right_groups),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name, monkeypatch):
    plant, law = MISTAKES[name]
    law(monkeypatch)
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, module_tp_search.Unequal, pytest.fail.Exception)):
        law(monkeypatch)


def test_what_reads_a_part_makes_no_part_of_the_tensor_before_it():
    part, index, mask, written = torch.arange(2.0), torch.arange(2), torch.ones(2, dtype=torch.bool), torch.zeros(2)
    with module_tp.calling(Ctx(), 1) as call:
        call.parts.add((part, index))
        with module_tp.Regions(call):
            results = mask[index], mask & (part > 0)
            written[index] = part
    assert all(x in call.parts for x in (*results, written)) and mask not in call.parts
