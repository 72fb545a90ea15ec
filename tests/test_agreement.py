"""The roll call: ranks that run different programs, come late or end are named, on every rank, in one line."""

import contextlib
import math
import os
import time

import pytest
import ranks
import torch
from close import assert_same

import fzero
from fzero import RankError, all_gather, all_to_all, models, optim, ppermute, psum, psum_scatter, pvary
from fzero.core import tree_sum
from fzero.sharding import make_mesh


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mine(mesh, *shape):
    """Another tensor on each rank: the ranks are forks of one process and share its generator's state."""
    return draw(*shape, seed=100 + mesh.rank)


# ---- checked mode ---------------------------------------------------------------------------------------------------


def checked_program(mesh):
    dp, tp = mesh["dp"], mesh["tp"]
    x = mine(mesh, 4, 4)
    with mesh.checked():
        out = psum(all_gather(psum_scatter(x, dp), dp), tp)
        all_to_all(ppermute(x, dp, [(0, 1), (1, 0)]), tp, 0, 1)
        torch.func.grad(lambda x: psum((pvary(x, tp) * (1 + tp.rank)).sum(), tp))(out)
        keys = mesh.store.num_keys()
        for _ in range(5):
            psum(x, dp)
        assert mesh.store.num_keys() - keys <= 4, "the store grows"
    return out


def test_checked_mode_lets_equal_programs_pass():
    plain = sum(draw(4, 4, seed=100 + r) for r in range(4))
    for out in ranks.run(4, checked_program, mesh={"dp": 2, "tp": 2}):
        assert torch.allclose(out, plain, atol=1e-6)


def places(mesh):
    """Where the roll call has this rank: (name and number of the collective begun last, whether it waits, its number at
    a wait)."""
    dp, agreement, x = mesh["dp"], mesh.agreement, mine(mesh, 4)
    psum(x, dp, leaf="v")
    started = dp.communicator.start_all_gather(x, "w")
    between = agreement.last.leaf, agreement.last.number - agreement.number, agreement.waiting
    at, wait = [], torch.distributed.Work.wait
    torch.distributed.Work.wait = lambda self, *args: at.append(agreement.waiting) or wait(self, *args)
    started.wait()
    torch.distributed.Work.wait = wait
    with contextlib.suppress(ValueError), dp.communicator.waiting(agreement.last):
        raise ValueError  # as of a rank that is gone: it waits for nobody then
    return between, {call.leaf for call in at}, agreement.waiting


def test_where_a_rank_is_can_be_seen_by_another_thread():
    for found in ranks.run(2, places):
        assert found == (("w", 0, None), {"w"}, None)


def differing(mesh, what):
    dp, r = mesh["dp"], mesh.rank
    x = mine(mesh, 4, 4)
    try:
        with mesh.checked(), mesh.ledger.phase("forward"):
            psum(x, dp, leaf="before")
            if what == "shape":
                all_gather(x[: 4 - (r == 1)], dp, leaf="w")
            elif what == "collective":
                (psum_scatter if r == 1 else all_gather)(x, dp, leaf="w")
            elif what == "leaf":
                psum(x, dp, leaf="v" if r == 1 else "w")
            elif what == "dtype":
                psum(x.double() if r == 1 else x, dp, leaf="w")
            elif what == "phase":
                with mesh.ledger.phase("backward" if r == 1 else "forward"):
                    psum(x, dp, leaf="w")
    except RankError as error:
        assert mesh.agreement.waiting is None
        return str(error)


@pytest.mark.parametrize(
    "what, mine, other",
    (
        (
            "shape",
            "all_gather over dp (2 ranks) of w in forward, float32 [4, 4]",
            "all_gather over dp (2 ranks) of w in forward, float32 [3, 4]",
        ),
        ("collective", "all_gather over dp (2 ranks) of w", "psum_scatter over dp (2 ranks) of w"),
        ("leaf", "psum over dp (2 ranks) of w", "psum over dp (2 ranks) of v"),
        ("dtype", "of w in forward, float32 [4, 4]", "of w in forward, float64 [4, 4]"),
        ("phase", "of w in forward", "of w in backward"),
    ),
)
def test_ranks_that_run_different_programs(what, mine, other):
    texts = ranks.run(2, differing, what, fresh=True)
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank}: ") and "\n" not in text and text.count("run different programs") == 1
        assert "rank 0 is at #" in text and "rank 1 is at #" in text and mine in text and other in text, text
        assert "give all ranks the same code, config, mesh and shapes of data" in text


def other_axis(mesh, late_s):
    if mesh.rank == 0:
        time.sleep(late_s)  # what rank 1 left for its neighbour over tp has then been read by that over dp
    try:
        with mesh.checked():
            psum(mine(mesh, 3), mesh["dp" if mesh.rank else "tp"], leaf="w")
    except RankError as error:
        return str(error)
    finally:
        time.sleep(0.2)  # let the others read what is left


@pytest.mark.parametrize("late_s", (0.0, 0.5))
def test_ranks_at_collectives_over_different_axes(late_s):
    texts = ranks.run(4, other_axis, late_s, mesh={"dp": 2, "tp": 2}, fresh=True)
    assert texts[1] is None and texts[3] is None
    for rank, neighbour in ((0, 1), (2, 0)):
        text = texts[rank].partition(" (before that")[0]
        assert "rank 0 is at #1 psum over tp (2 ranks) of w" in text, text
        assert f"rank {rank or neighbour} is at #1 psum over dp (2 ranks) of w" in text, text


def late(mesh, check):
    slow = make_mesh({"dp": 2}, timeout_s=1.0, device="cpu")
    dp = slow["dp"]
    with slow.checked():
        psum(mine(mesh, 4), dp, leaf="v")
    if slow.rank == 1:
        time.sleep(2.5)
        return None
    began = time.monotonic()
    try:
        if check:
            with slow.checked(), slow.ledger.phase("forward"):
                all_gather(mine(mesh, 4), dp, leaf="w")
        else:
            all_gather(mine(mesh, 4), dp, leaf="w")
    except RankError as error:
        return str(error), time.monotonic() - began


def test_a_rank_that_does_not_arrive():
    text, seconds = ranks.run(2, late, True, fresh=True)[0]
    assert text == (
        "rank 0: all_gather over dp (2 ranks) of w in forward: rank 1 did not arrive within 1 s; "
        "the last it began is #1 psum over dp (2 ranks) of v, float32 [4]"
    )
    assert 0.9 < seconds < 2.4
    text, seconds = ranks.run(2, late, False, fresh=True)[0]
    assert text == (
        "rank 0: all_gather over dp (2 ranks) of w: rank 1 did not answer within 1 s: it is late, or runs another "
        "program "
        "(mesh.checked() tells)"
    )


def sums_of_the_same(mesh):
    """(message or None) of psums in checked mode; each rank gets the same answer."""
    axis, r = mesh["dp"], mesh.rank

    def answer(x, dtype=torch.float32):
        try:
            with mesh.checked():
                psum(x.to(dtype), axis, leaf="w")
        except ValueError as error:
            return str(error)

    same = torch.arange(1.0, 5.0)
    other = same.clone()
    other[2] += r == axis.size - 1  # on the last rank only
    refused = [answer(same), answer(same, torch.bfloat16), answer(same.view(2, 2).T)]
    passed = [answer(same[:1]), answer(torch.zeros(4)), answer(same, torch.int64), answer(other), answer(same + r)]
    psum(same, axis)
    assert_same(psum(mine(mesh, 3), axis), tree_sum([draw(3, seed=100 + k) for k in range(axis.size)]))
    return refused, passed


@pytest.mark.parametrize("n", (2, 4))
def test_a_sum_of_what_is_the_same_on_all_ranks_is_refused(n):
    for refused, passed in ranks.run(n, sums_of_the_same):
        assert passed == [None] * 5
        for text in refused:
            assert (
                text.startswith(f"psum over dp ({n} ranks) of w: its input, ")
                and f"is the same on all {n} ranks already" in text
            )
            assert "drop the psum" in text


# ---- ranks that end -------------------------------------------------------------------------------------------------


def one_ends(mesh, size, why):
    dp, x = mesh["dp"], mine(mesh, size)
    psum(x, dp)
    if mesh.rank == 1:
        if why:
            mesh.fail(f"rank 1: {why}")
        os._exit(3)
    began = time.monotonic()
    errors = []
    for leaf in ("w", "v"):  # the second finds the connection closed at once
        try:
            with mesh.ledger.phase("backward"):
                psum(x, dp, leaf=leaf)
        except RankError as error:
            errors.append(str(error))
    return errors, time.monotonic() - began


@pytest.mark.parametrize("size, why", ((8, ""), (1 << 18, "out of memory")))
def test_a_rank_that_ends_is_named_by_all_others_at_once(size, why):
    results = ranks.run(4, one_ends, size, why, fresh=True)
    assert isinstance(results[1], ranks.Ended) and results[1].code == 3
    for rank in (0, 2, 3):
        errors, seconds = results[rank]
        for leaf, text in zip("wv", errors):
            begin = f"rank {rank}: psum over dp (4 ranks) of {leaf} in backward: rank 1 is gone (connection closed)"
            assert text == begin + (" (before that, rank 1: out of memory)" if why else "")
        assert len(errors) == 2 and seconds < 20


def another_size(mesh):
    slow = make_mesh({"dp": 2}, timeout_s=1.0, device="cpu")
    try:
        all_gather(torch.ones(8 + slow.rank), slow["dp"])
    except RankError as error:
        return str(error)


def test_a_tensor_of_another_size_is_never_taken_for_the_right_one():
    """gloo by itself would leave memory unwritten on one rank, and end the process of the other."""
    for rank, text in enumerate(ranks.run(2, another_size, fresh=True)):
        assert f"rank {rank}: all_gather over dp (2 ranks): rank {1 - rank} " in text and (
            "did not answer" in text or "gone" in text
        )


# ---- a refusal on several ranks -------------------------------------------------------------------------------------

LLAMA = models.LlamaConfig(vocab_size=32, max_len=16, d_model=16, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=16)
ROWS = torch.randint(0, 32, (8, 17), generator=torch.Generator().manual_seed(0))
OTHER = models.build(models.MLPConfig(4, 8, 1, 2))
GOOD = {"tokens": ROWS[:, :-1].contiguous(), "targets": ROWS[:, 1:].contiguous()}


def step_on(mesh, model=None, batch=None, *, stage=3, given=None, again=1, policy="fp32", **options):
    """The parameters after a step, and its loss; it is called as often as `again` says, and refused but for the last
    time."""
    model, tx = models.build(LLAMA) if model is None else model, optim.sgd(0.1)
    plan = fzero.zero_plan(stage, model, mesh, policy=policy)
    state = fzero.init_state(model if given is None else given, tx, plan, seed=0)
    step = fzero.make_train_step(model, tx, plan, **{"micro_batches": 2, **options})
    batch = fzero.local_batch(GOOD, mesh, 2) if batch is None else batch
    for _ in range(again - 1):
        with pytest.raises(ValueError):
            step(state, batch)
    state, metrics = step(state, batch)
    return [x.clone() for x in fzero.pytree.leaves(fzero.full_params(state, plan))], float(metrics.loss)


def evaluation_on(mesh, batch):
    model = models.build(LLAMA)
    plan = fzero.zero_plan(3, model, mesh)
    state = fzero.init_state(model, optim.sgd(0.1), plan, seed=0)
    return fzero.make_eval_step(model, plan)(state.params, batch)


def on_rank(mesh, rank, **wrong):
    """The rank's rows, of which one rank alone has others."""
    batch = fzero.local_batch(GOOD, mesh, 2)
    return {**batch, **{name: make(batch[name]) for name, make in wrong.items()}} if mesh.rank == rank else batch


def refusing(at):
    """A model whose layers refuse their input at the call of this number, while leaves of later layers are gathered."""
    model, calls = models.build(LLAMA), []

    def block(params, x, ctx):
        calls.append(1)
        if len(calls) == at:
            raise ValueError("this layer takes no such input")
        return model.block(params, x, ctx)

    return model._replace(block=block)


def out_of(tokens):
    return tokens.index_fill(1, torch.tensor([3]), 40)


LOW = fzero.LossScale(init=2.0**60, floor=2.0**60, hysteresis=1)
MET = {  # by the place of the refusal: (what is refused on the ranks of a mesh, the error)
    "plan": (lambda mesh: step_on(mesh, policy="fp12"), "fp12"),
    "state": (lambda mesh: step_on(mesh, given=OTHER), "unlike the expected one|missing"),
    "step": (lambda mesh: step_on(mesh, micro_batches=0), "micro_batches"),
    "rows": (lambda mesh: step_on(mesh, batch={k: x[:3] for k, x in GOOD.items()}), "3 rows"),
    "rows of rank 1": (lambda mesh: step_on(mesh, batch=on_rank(mesh, 1, tokens=lambda x: x[:1])), "rows"),
    "a token of rank 1": (lambda mesh: step_on(mesh, batch=on_rank(mesh, 1, tokens=out_of)), r"is 40; a token"),
    "a dtype of rank 0": (lambda mesh: step_on(mesh, batch=on_rank(mesh, 0, tokens=torch.Tensor.float)), "tokens"),
    "an evaluation of rank 1": (lambda mesh: evaluation_on(mesh, on_rank(mesh, 1, tokens=out_of)), r"is 40; a token"),
    "a list of rank 0": (lambda mesh: step_on(mesh, batch=on_rank(mesh, 0, tokens=torch.Tensor.tolist)), "tokens"),
    "the first layer": (lambda mesh: step_on(mesh, refusing(1)), "takes no such input"),
    "a later layer": (lambda mesh: step_on(mesh, refusing(5)), "takes no such input"),
    "the floor": (lambda mesh: step_on(mesh, policy=fzero.fp16(LOW)), "at its floor"),
}


def after_refusals(mesh, places):
    """By the place of a refusal (whether a step after it is the one before it, how this rank's error reads)."""
    expected, loss = step_on(mesh)
    found = {}
    for place in places:
        refused, said = MET[place]
        with pytest.raises((ValueError, TypeError, FloatingPointError), match=said) as error:
            refused(mesh)
        text = str(error.value)
        del error  # whose frames hold what was begun
        params, again = step_on(mesh)
        found[place] = again == loss and all(map(torch.equal, params, expected)), text
    return found


SOME = ("rows of rank 1", "an evaluation of rank 1", "a later layer")
CASES = [pytest.param({"dp": 2}, SOME, id="dp2 some")] + [
    pytest.param(sizes, tuple(MET), id=str(sizes), marks=pytest.mark.exhaustive)
    for sizes in ({"dp": 2}, {"tp": 2, "cp": 2}, {"dp": 2, "tp": 2})
]


@pytest.mark.parametrize("sizes, places", CASES)
def test_after_a_refusal_on_all_ranks_or_one_all_go_on(sizes, places):
    results = ranks.run(math.prod(sizes.values()), after_refusals, places, mesh=sizes, timeout_s=60.0)
    for place in places:
        assert all(found[place][0] for found in results), place
        if " of rank " in place:
            one = int(place[-1])
            texts = [found[place][1].removeprefix(f"rank {one}: ") for found in results]
            assert texts == [results[one][place][1]] * len(results)


def refused_again(mesh):
    step_on(mesh, batch=on_rank(mesh, 1, tokens=out_of), again=3)


def test_a_refused_first_step_is_looked_at_again():
    with pytest.raises(ValueError, match="is 40; a token"):
        ranks.run(2, refused_again, timeout_s=30.0)
