"""Optimizers of torch and of one's own: the bits of the class, and on ranks what they are on one process."""

import pytest
import ranks
import torch
import zero_cases
from close import assert_close, assert_same

import fzero
from fzero import checkpoint, optim, state_specs
from fzero.checkpoint import restore_state
from fzero.core import pytree
from fzero.offload import DiskTensor, Nvme
from fzero.sharding import Spec
from fzero.train import meta_state

T = torch.optim
CLASSES = {
    "SGD": (T.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "plain SGD": (T.SGD, {}),
    "Adam": (T.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (T.AdamW, {"betas": (0.8, 0.9)}),
    "NAdam": (T.NAdam, {}),
    "RAdam": (T.RAdam, {"weight_decay": 0.1}),
    "RMSprop": (T.RMSprop, {"momentum": 0.5, "centered": True}),
    "Adagrad": (T.Adagrad, {"initial_accumulator_value": 0.3, "lr_decay": 0.1}),
    "Adadelta": (T.Adadelta, {}),
    "Adamax": (T.Adamax, {}),
    "ASGD": (T.ASGD, {}),
    "Rprop": (T.Rprop, {}),
}


def draws(seed):
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(5, 3, generator=g).double(), "b": {"c": torch.randn((), generator=g).double()}}


@pytest.mark.parametrize("name", CLASSES)
def test_it_is_the_class(name):
    kind, options = CLASSES[name]
    tx, start = optim.from_torch(kind, 0.05, **options), draws(0)
    theirs = [leaf.clone().requires_grad_() for leaf in pytree.leaves(start)]
    reference = kind(theirs, lr=0.05, **options)
    pure, placed = start, pytree.map(torch.clone, start)
    state, placed_state = tx.init(pure), tx.init(placed)
    for step in range(8):
        grads = draws(step + 1)
        for leaf, g in zip(theirs, pytree.leaves(grads)):
            leaf.grad = g.clone()
        reference.step()
        placed, placed_state = optim.apply_in_place(tx, pytree.map(torch.clone, grads), placed_state, placed)
        kept = pytree.map(torch.clone, (grads, state, pure))
        updates, after = tx.update(grads, state, pure)
        assert all(map(torch.equal, pytree.leaves((grads, state, pure)), pytree.leaves(kept)))  # it is pure
        pure, state = optim.apply_updates(pure, updates), after
    assert all(torch.equal(a, b.detach()) for a, b in zip(pytree.leaves(placed), theirs))
    assert_close(pure, placed, rtol=1e-12, atol=1e-12)


def test_a_schedule_and_a_mask_are_its_groups():
    schedule, start = optim.linear(0.3, 0.0, 6), draws(0)
    tx, params = optim.from_torch(T.AdamW, schedule, weight_decay=0.5, mask="^a$"), start
    theirs = [leaf.clone().requires_grad_() for leaf in pytree.leaves(start)]
    reference = T.AdamW([{"params": [theirs[0]]}, {"params": [theirs[1]], "weight_decay": 0.0}], weight_decay=0.5)
    state = tx.init(params)
    for step in range(5):
        for leaf, g in zip(theirs, pytree.leaves(draws(step))):
            leaf.grad = g.clone()
        for group in reference.param_groups:
            group["lr"] = float(schedule(step))
        reference.step()
        params, state = optim.apply_in_place(tx, draws(step), state, params)
    assert all(torch.equal(a, b.detach()) for a, b in zip(pytree.leaves(params), theirs))


@pytest.mark.parametrize(
    ("kind", "lr", "options", "said"),
    [
        (T.LBFGS, 0.1, {}, "LBFGS cannot step on gradients alone"),
        (T.SparseAdam, 0.1, {}, "SparseAdam cannot step on gradients alone"),
        (T.Muon, 0.1, {}, "Muon with these options is not elementwise"),
        (T.Adafactor, 0.1, {}, "Adafactor is not elementwise: it keeps 'row_var'"),
        (T.SGD, 0.1, {"momentum": 0.9, "dampening": 0.5}, "its first step differs"),
        (T.Rprop, optim.constant(0.1), {}, "the state of Rprop begins with its learning rate"),
        (T.Adam, -1.0, {}, "Invalid learning rate"),
    ],
)
def test_what_is_not_elementwise_is_refused_by_name(kind, lr, options, said):
    with pytest.raises(ValueError, match=said):
        optim.from_torch(kind, lr, **options)


def test_what_is_no_class_is_refused():
    with pytest.raises(TypeError, match="write from_torch"):
        optim.from_torch("Adam", 0.1)


def heavy_ball(lr, momentum):
    """A transformation of one's own: init, update, spec and nothing else."""
    return optim.GradientTransformation(
        init=lambda params: pytree.map(torch.zeros_like, params),
        update=lambda grads, state, params: (
            pytree.map(lambda g, m: -lr * (g + momentum * m).tanh(), grads, state),
            pytree.map(lambda g, m: momentum * m + g, grads, state),
        ),
        spec=lambda specs: specs,
    )


OWN = {
    "own": heavy_ball(0.1, 0.9),
    "clipped RMSprop": optim.chain(optim.clip_by_global_norm(0.5), optim.from_torch(T.RMSprop, 1e-2, momentum=0.9)),
}


def in_layers(sizes):
    """heavy_ball, which notes the elements that each call of its update is given."""
    plain = heavy_ball(0.1, 0.9)

    def update(grads, state, params):
        sizes.append(sum(g.numel() for g in pytree.leaves(grads)))
        return plain.update(grads, state, params)

    return plain._replace(update=update)


def drawn(seed):
    g = torch.Generator().manual_seed(seed)
    shapes = {"blocks/w": (5, 3, 4), "blocks/b": (5, 3), "embed": (7, 4)}
    return pytree.nest({name: torch.randn(shape, generator=g).double() for name, shape in shapes.items()})


def counted():
    """A transformation whose state has a count, and two moments that begin as one tensor, as the parameters."""

    def update(grads, state, params):
        step, (m, start) = state["step"] + 1, state["of"]
        m = pytree.map(lambda m, g: 0.9 * m + g, m, grads)
        pull = pytree.map(lambda m, p, s: -0.1 / step * m - 0.01 * (p - s), m, params, start)
        return pull, {"step": step, "of": (m, start)}

    def init(params):
        return {"step": torch.zeros((), dtype=torch.int64), "of": (params, params)}

    return optim.GradientTransformation(init, update, lambda specs: {"step": Spec(), "of": (specs, specs)})


@pytest.mark.parametrize("make", [lambda: heavy_ball(0.1, 0.9), counted], ids=["moments", "a count"])
def test_init_update_and_spec_give_an_update_in_place_with_the_bits_of_the_pure_one(make):
    tx, pure = make(), drawn(0)
    placed = pytree.map(torch.clone, pure)
    held = pytree.leaves(placed)
    pure_state, state = tx.init(pure), tx.init(placed)
    for step in range(4):
        updates, pure_state = tx.update(drawn(step + 1), pure_state, pure)
        pure = optim.apply_updates(pure, updates)
        placed, state = optim.apply_in_place(tx, drawn(step + 1), state, placed)
    assert_same(placed, pure)
    assert_same(state, pure_state)
    assert all(a is b for a, b in zip(pytree.leaves(placed), held))


def test_its_temporaries_have_the_size_of_a_layer():
    sizes, params = [], drawn(0)
    tx = in_layers(sizes)
    state = tx.init(params)
    held = pytree.leaves(state)
    _, after = optim.apply_in_place(tx, drawn(1), state, params)
    assert sizes == [12] * 5 + [3] * 5 + [28]
    assert all(a is b for a, b in zip(pytree.leaves(after), held))


def by_order(tx, grads, state, params):
    updates, new = tx.update(grads, pytree.unflatten(state, pytree.flatten(params)[1]), params)
    return updates, pytree.leaves(new)


@pytest.mark.parametrize(
    "change",
    [
        lambda tx: tx._replace(unit="tree"),
        lambda tx: tx._replace(needs="tree"),
        lambda tx: tx._replace(  # a state that is told apart by its order alone
            init=lambda params: pytree.leaves(tx.init(params)),
            update=lambda g, s, p: by_order(tx, g, s, p),
        ),
    ],
    ids=["unit", "needs", "no names"],
)
def test_what_sees_the_whole_tree_is_given_it(change):
    sizes, params = [], drawn(0)
    tx = change(in_layers(sizes))
    placed, _ = optim.apply_in_place(tx, drawn(1), tx.init(params), pytree.map(torch.clone, params))
    assert sizes == [60 + 15 + 28]
    plain = heavy_ball(0.1, 0.9)
    assert_same(placed, optim.apply_updates(params, plain.update(drawn(1), plain.init(params), params)[0]))


def offloaded(mesh, name, offload, folder, stop):
    """The state after three steps at stage 3, of which the last were made from a checkpoint by another state."""
    zero_cases.OPTIMIZERS.update(OWN)
    model, tx = zero_cases.model_of("llama", dropout=0.0), zero_cases.OPTIMIZERS[name]
    plan = fzero.zero_plan(3, model, mesh, policy=zero_cases.FP64, offload=offload)
    states = []
    for part, steps in enumerate((range(stop), range(stop, 3))):
        nvme = Nvme(folder / f"{part}") if "nvme" in offload else None
        step = fzero.make_train_step(model, tx, plan, nvme=nvme)
        if part == 0:
            state = fzero.init_state(model, tx, plan, seed=3, nvme=nvme)
        else:
            like, specs = meta_state(plan, tx), state_specs(plan, tx)
            state = restore_state.restore_state(states[0], like, specs, plan, nvme)
        for i in steps:
            state, _ = step(state, fzero.local_batch(zero_cases.batch_for(i, 24), mesh))
        if part == 0:
            states.append(checkpoint.save(folder / "saved", state, step=stop, specs=state_specs(plan, tx), mesh=mesh))
    in_memory = pytree.map(lambda x: x.tensor() if isinstance(x, DiskTensor) else x, state)
    return zero_cases.whole(in_memory, state_specs(plan, tx), mesh)


SLOW = (("own", "params=nvme,opt=nvme"), ("clipped RMSprop", "opt=host"))
OFFLOADED = [(name, offload) for name in OWN for offload in ("", "opt=host", "params=nvme,opt=nvme")]


@pytest.mark.parametrize(
    ("name", "offload"),
    [pytest.param(*case, marks=pytest.mark.slow if case in SLOW else pytest.mark.exhaustive) for case in OFFLOADED],
)
def test_offloaded_and_resumed_it_is_one_process(name, offload, tmp_path):
    expected, _ = trained(fzero.one_process(), [(("llama", name, 0, 2), {"steps": 3})])[0]
    for state in ranks.run(2, offloaded, name, offload, tmp_path, 2):
        assert_close(state.params, expected.params, rtol=1e-10, atol=1e-10)
        assert_close(state.opt_state, expected.opt_state, rtol=1e-8, atol=1e-10)


def trained(mesh, cases):
    zero_cases.OPTIMIZERS.update(OWN)
    return zero_cases.trained_whole(mesh, cases)


def test_on_two_ranks_at_every_stage_it_is_one_process():
    cases = [(("llama", name, stage, 2), {"steps": 2}) for name in OWN for stage in (0, 1, 2, 3)]
    results = ranks.run(2, trained, cases)[0]
    expected = trained(fzero.one_process(), [(("llama", name, 0, 2), {"steps": 2}) for name in OWN])
    for (case, _), (state, log) in zip(cases, results):
        one, one_log = expected[list(OWN).index(case[1])]
        assert_close(log, one_log, rtol=1e-10, atol=1e-12)
        assert_close(state.params, one.params, rtol=1e-10, atol=1e-10)
        assert_close(state.opt_state, one.opt_state, rtol=1e-8, atol=1e-10)
