"""Each rank trains on rows of its own, dealt as its step takes them; an evaluation is of the rows of all ranks."""

import io
import pickle

import pytest
import ranks
import torch
from close import assert_close
from torch.utils.data import default_collate
from zero_cases import FP64, batch_for, model_of

import fzero
from fzero import optim
from fzero.core import pytree

ROWS = 8
MICRO = "local_batch dealt this batch for micro_batches={} and the step has micro_batches={}, .* write local_batch"
SAME = (
    "ranks 0 and 1 were given the same batch, .* write step\\(state, local_batch\\(batch, mesh, micro_batches=2\\)\\)"
)
FEWER = "rank 0 was given 8 rows and rank 1 4; give every rank as many, as local_batch"


def equal_rows(batch):
    return pytree.map(lambda leaf: leaf[:1].expand(leaf.shape).contiguous(), batch)


TWICE = "ranks 0 and 1 dealt different batches with local_batch, whose rows had all been dealt to them before"
VIEWS = "^batch\\['tokens'\\] was dealt by local_batch: its rows are this rank's; give them to the step as they are"


def saved(leaf):
    """What torch.load reads of a tensor that torch.save wrote."""
    file = io.BytesIO()
    torch.save(leaf, file)
    file.seek(0)
    return torch.load(file)


COPIES = {
    "clones": torch.clone,
    "another dtype": lambda leaf: leaf.to(torch.float64 if leaf.is_floating_point() else torch.int32).to(leaf.dtype),
    "slices of clones": lambda leaf: leaf.clone()[: ROWS // 2],
    "joined": lambda leaf: torch.cat([leaf[:2], leaf[2:]]),
    "in another order": lambda leaf: leaf.flip(0),
    "indexed": lambda leaf: leaf[torch.arange(len(leaf))],
    "stacked": lambda leaf: torch.stack(list(leaf)),
    "collated": lambda leaf: default_collate(list(leaf)),
    "pickled": lambda leaf: pickle.loads(pickle.dumps(leaf)),
    "saved": saved,
    "an array": lambda leaf: torch.from_numpy(leaf.numpy().copy()),
}


def dealt_twice(change):
    return lambda batch, mesh, m: fzero.local_batch(pytree.map(change, fzero.local_batch(batch, mesh)), mesh, m)


def joined(batch, mesh, m):
    first, other = fzero.local_batch(batch, mesh), fzero.local_batch(batch_for(1, ROWS), mesh)
    return fzero.local_batch(pytree.map(lambda a, b: torch.cat([a, b]), first, other), mesh, m)


def first_half(batch, mesh, m):  # rank 0 has been dealt these rows before, and it is no mistake
    fzero.local_batch(batch, mesh)
    return fzero.local_batch(pytree.map(lambda leaf: leaf[: ROWS // 2].clone(), batch), mesh, m)


DEALS = {  # how a batch comes to the ranks -> what a step with two micro-batches says
    "dealt": (lambda batch, mesh, m: fzero.local_batch(batch, mesh, m), ""),
    "dealt for one micro-batch": (lambda batch, mesh, m: fzero.local_batch(batch, mesh), MICRO.format(1, 2)),
    "dealt for four": (lambda batch, mesh, m: fzero.local_batch(batch, mesh, 4), MICRO.format(4, 2)),
    "dealt for one, in copies": (
        lambda batch, mesh, m: pytree.map(torch.clone, fzero.local_batch(batch, mesh)),
        MICRO.format(1, 2),
    ),
    **{f"twice, {name}": (dealt_twice(change), TWICE) for name, change in COPIES.items()},
    "twice, of two batches": (joined, TWICE),
    "twice, as it is": (dealt_twice(lambda leaf: leaf), VIEWS),
    "twice, a view": (dealt_twice(lambda leaf: leaf[: ROWS // 2]), VIEWS),
    "a part of the batch": (first_half, ""),
    "all forget": (lambda batch, mesh, m: batch, SAME),
    "all forget, in copies": (lambda batch, mesh, m: pytree.map(torch.clone, batch), SAME),
    "rank 0 forgets": (lambda batch, mesh, m: batch if mesh.rank == 0 else fzero.local_batch(batch, mesh, m), FEWER),
    "equal rows that were dealt": (lambda batch, mesh, m: fzero.local_batch(equal_rows(batch), mesh, m), ""),
    "zeros": (lambda batch, mesh, m: pytree.map(torch.zeros_like, batch), ""),
    "by hand": (lambda batch, mesh, m: pytree.map(lambda leaf: leaf[mesh.rank :: 2], batch), ""),
}


def outcome(mesh, name):
    """What a step says to the batch of a deal; "" if it takes it."""
    params = {"w": torch.arange(20.0, dtype=torch.float64)}

    def loss(params, batch):
        return params["w"][batch["targets"]].square().sum(), batch["mask"].sum()

    plan, tx = fzero.zero_plan(2, params, mesh, policy=FP64), optim.sgd(0.1)
    step = fzero.make_train_step(loss, tx, plan, micro_batches=2)
    state = fzero.init_state(params, tx, plan, seed=0)
    try:
        step(state, DEALS[name][0](batch_for(0, ROWS), mesh, 2))
    except ValueError as error:
        return str(error)
    return ""


def outcomes(mesh):
    return [outcome(mesh, name) for name in DEALS]


def test_a_step_refuses_rows_that_are_not_its_own():
    for found in ranks.run(2, outcomes):
        for said, (_, expected) in zip(found, DEALS.values()):
            assert (said == "") == (expected == ""), (said, expected)
            if expected:
                with pytest.raises(ValueError, match=expected):
                    raise ValueError(said)


def of_a_loader(mesh):
    """A step of a run, whose loader has dealt equal rows: data of one row for each data rank."""
    model = model_of("gpt2", dropout=0.0)
    plan, tx = fzero.zero_plan(2, model, mesh, policy=FP64), optim.sgd(0.1)
    step = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(_dealt=True))
    state = fzero.init_state(model, tx, plan, seed=0)
    _, metrics = step(state, batch_for(0, ROWS))
    return float(metrics.num_tokens)


def test_tiny_data_of_a_run_may_give_two_ranks_the_same_rows():
    assert ranks.run(2, of_a_loader) == [2 * of_a_loader(fzero.one_process())] * 2


def unlike_over_tp(mesh):
    model = model_of("gpt2", dropout=0.0)
    plan, tx = fzero.zero_plan(0, model, mesh, policy=FP64), optim.sgd(0.1)
    step = fzero.make_train_step(model, tx, plan)
    state = fzero.init_state(model, tx, plan, seed=0)
    with pytest.raises(ValueError, match=r"^ranks 0 and 1 are of one tp group and were given different batches; give"):
        step(state, batch_for(mesh.rank, ROWS))
    step(state, batch_for(7, ROWS))


def test_the_ranks_of_a_tp_group_have_the_same_rows():
    ranks.run(2, unlike_over_tp, mesh={"tp": 2})


def test_alone_a_rank_has_all_rows_for_any_number_of_micro_batches():
    model = model_of("gpt2", dropout=0.0)
    plan, tx = fzero.zero_plan(0, model, fzero.one_process(), policy=FP64), optim.sgd(0.1)
    step = fzero.make_train_step(model, tx, plan, micro_batches=2)
    step(fzero.init_state(model, tx, plan, seed=0), fzero.local_batch(batch_for(0, ROWS), plan.mesh))


def evaluations(mesh, stage):
    """(the sums of all ranks, this rank's) of a model and of a function."""
    model, out = model_of("gpt2", dropout=0.0), []
    params = {"w": torch.arange(20.0, dtype=torch.float64)}

    def loss(params, batch):
        return params["w"][batch["targets"]].sum(), batch["mask"].sum(), {"first": params["w"][batch["tokens"]].sum()}

    for program, source in ((model, model), (loss, params)):
        plan, tx = fzero.zero_plan(stage, source, mesh, policy=FP64), optim.sgd(0.1)
        state, batch = fzero.init_state(source, tx, plan, seed=0), fzero.local_batch(batch_for(0, ROWS), mesh, 2)
        for options in ({}, {"reduce": False}):
            out.append(fzero.make_eval_step(program, plan, **options)(state.params, batch))
    return out


@pytest.mark.parametrize("stage", (0, 3))
def test_an_evaluation_is_of_all_ranks(stage):
    alone = evaluations(fzero.one_process(), 0)
    found = ranks.run(2, evaluations, stage)
    for i in (0, 2):
        for by_rank in found:
            assert_close(by_rank[i], alone[i], rtol=1e-12)
            assert int(by_rank[i].num_tokens) == int(alone[i].num_tokens)
    for i in (1, 3):
        parts = [by_rank[i] for by_rank in found]
        assert int(parts[0].num_tokens) != int(parts[1].num_tokens)
        assert_close(pytree.map(torch.add, *parts), alone[i], rtol=1e-12)
