"""The examples in the docstrings of the public names run, and every public name has one but for those listed here."""

import doctest
import importlib
import inspect

import pytest
import torch

import fzero

# Public names whose docstring has no example yet. Only ever remove a name from this list.
WITHOUT_EXAMPLE = {
    "fzero.LossScale",
    "fzero.Metrics",
    "fzero.Nvme",
    "fzero.Plan",
    "fzero.PlanReport",
    "fzero.RankError",
    "fzero.Spike",
    "fzero.TrainState",
    "fzero.checkpoint.CheckpointReader",
    "fzero.checkpoint.Damaged",
    "fzero.checkpoint.Leaf",
    "fzero.checkpoint.SaveFailed",
    "fzero.checkpoint.Saved",
    "fzero.checkpoint.Sound",
    "fzero.checkpoint.latest",
    "fzero.fp64",
    "fzero.init_state",
    "fzero.local_batch",
    "fzero.make_check",
    "fzero.make_eval_step",
    "fzero.make_train_step",
    "fzero.optim.AccumulateState",
    "fzero.optim.AdafactorState",
    "fzero.optim.Adam8State",
    "fzero.optim.AdamState",
    "fzero.optim.GradientTransformation",
    "fzero.optim.LambState",
    "fzero.optim.Lion8State",
    "fzero.optim.LionState",
    "fzero.optim.MuonState",
    "fzero.optim.Pass",
    "fzero.optim.SGDState",
    "fzero.optim.ShardedLeaves",
    "fzero.optim.accumulate",
    "fzero.optim.adafactor",
    "fzero.optim.adam",
    "fzero.optim.adamw",
    "fzero.optim.add_decayed_weights",
    "fzero.optim.apply_in_place",
    "fzero.optim.apply_updates",
    "fzero.optim.clip_by_value",
    "fzero.optim.constant",
    "fzero.optim.cosine",
    "fzero.optim.decay_matrices",
    "fzero.optim.ema_init",
    "fzero.optim.ema_update",
    "fzero.optim.exponential",
    "fzero.optim.global_norm",
    "fzero.optim.inverse_sqrt",
    "fzero.optim.join",
    "fzero.optim.lamb",
    "fzero.optim.linear",
    "fzero.optim.lion",
    "fzero.optim.muon",
    "fzero.optim.one_cycle",
    "fzero.optim.polynomial",
    "fzero.optim.sgd",
    "fzero.optim.sharded",
    "fzero.optim.warmup",
    "fzero.optim.warmup_cosine",
    "fzero.optim.wsd",
    "fzero.reopened",
    "fzero.sharding.Axis",
    "fzero.sharding.LeafPlan",
    "fzero.sharding.from_dtensor",
    "fzero.state_specs",
    "fzero.zero_plan",
}


def public_names():
    """{qualified name: object} of the functions and classes in fzero.__all__ and in __all__ of its public modules."""
    found = {}
    for module in (fzero, *(importlib.import_module(f"fzero.{m}") for m in ("optim", "models", "sharding", "checkpoint"))):
        for name in module.__all__:
            value = getattr(module, name)
            if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__.startswith("fzero."):
                found.setdefault(f"{value.__module__}.{value.__qualname__}", (f"{module.__name__}.{name}", value))
    return {shown: value for shown, value in found.values()}


PUBLIC = public_names()


def examples_of(name):
    value = PUBLIC[name]
    package = importlib.import_module(name.rpartition(".")[0])
    globs = {**{n: getattr(package, n) for n in package.__all__}, **vars(inspect.getmodule(value)), "torch": torch, "fzero": fzero}
    return doctest.DocTestFinder(recurse=False).find(value, name, module=False, globs=globs)[0]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_examples_of_public_names_run(name):
    value = PUBLIC[name]
    assert inspect.getdoc(value) and (value.__doc__ or "").strip(), f"{name} has no docstring"
    test = examples_of(name)
    assert bool(test.examples) != (name in WITHOUT_EXAMPLE), (
        f"{name}: add an example to its docstring" if not test.examples else f"{name} has an example: remove it from WITHOUT_EXAMPLE"
    )
    said = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)
    assert not said, "".join(said)


def test_the_list_names_public_names_only():
    assert set(PUBLIC) >= WITHOUT_EXAMPLE


def test_a_wrong_example_fails():
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner().run(test, out=lambda text: None).failed == 1
