"""Tokens on their way to experts of other ranks and back: every load, what forms send, and planted mistakes."""

import functools
from unittest import mock

import pytest
import ranks
import torch
from close import assert_close
from torch import Tensor

import fzero
from fzero.core import pytree
from fzero.kernels import moe
from fzero.models import Ctx
from fzero.models import experts as block
from fzero.sharding import ActivationSplit, Axis, Experts, shares
from fzero.sharding.experts import Routed

E, K, B, T, D, F = 8, 2, 2, 4, 4, 5  # of a rank of ep
N = B * T
FORMS = ("gather", "exchange:8", "exchange:8:3")


def choose(load: str, ep: int) -> Tensor:
    """The ids [ep B, T, k] of a load: two experts of each token, unlike ones."""
    g = torch.Generator().manual_seed(5)
    first = torch.randint(0, E, (ep * B, T), generator=g)
    step = torch.randint(1, E, (ep * B, T), generator=g)
    if load == "one expert":  # is the first choice of all
        first, step = torch.full_like(first, 5), torch.full_like(step, 1)
    if load == "no token of the last rank":
        first, step = first % (E // ep), torch.ones_like(step)
        return torch.stack((first, (first + step) % (E // ep)), -1)
    if load == "even":
        first, step = torch.arange(ep * N).reshape(ep * B, T) % E, torch.full_like(step, E // 2)
    return torch.stack((first, (first + step) % E), -1)


LOADS = ("random", "one expert", "no token of the last rank", "even")


@functools.cache
def given(load, ep):
    g = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    p = {"w_gate": draw(E, D, F), "w_up": draw(E, D, F), "w_down": draw(E, F, D)}
    weights = torch.rand(ep * B, T, K, generator=g, dtype=torch.float64)
    return p, draw(ep * B, T, D), choose(load, ep), weights, draw(ep * B, T, D)


def both_passes(f, p, x, weights, cotangent):
    """(result, gradients of p, x and weights)."""
    out, pull = torch.func.vjp(f, p, x, weights)[:2]
    return out, *pull(cotangent)


def expected(load, ep, capacity=0.0):
    p, x, ids, weights, g = given(load, ep)

    def f(p, x, weights):
        return moe.capacity(p, x, ids, weights, capacity) if capacity else moe.dropless(p, x, ids, weights)

    return both_passes(f, p, x, weights, g)


def own_part(t: Tensor, ep: Axis) -> Tensor:
    """The experts of this rank of ep."""
    return t.split(shares(E, ep.size))[ep.rank]


def dispatched(mesh, form, load, capacity=0.0):
    """This rank's part of `expected`, and what the ledger has."""
    ep = mesh["ep"]
    p, x, ids, weights, g = given(load, ep.size)
    own = lambda t: t.chunk(ep.size)[ep.rank]  # noqa: E731
    ctx = Ctx(mesh=mesh, dtype=torch.float64, split=ActivationSplit(experts=Experts.parse(form)))
    f = lambda p, x, weights: block.mixture(p, x, own(ids), weights, ctx, block.ExpertMixture(E, capacity))  # noqa: E731
    out = both_passes(f, pytree.map(lambda t: own_part(t, ep), p), own(x), own(weights), own(g))
    return out, [(row.collective, row.leaf, row.calls, row.elements) for row in mesh.ledger.rows()]


def check(ep, form, load, run=dispatched, capacity=0.0, want=expected):
    found = ranks.run(ep, run, form, load, *((capacity,) if capacity else ()), mesh={"ep": ep})
    for part, whole in zip(zip(*(out for out, _ in found)), want(load, ep, capacity)):
        assert_close(pytree.map(lambda *parts: torch.cat(parts), *part), whole, rtol=1e-12, atol=1e-12)
    return [rows for _, rows in found]


@pytest.mark.parametrize("form", FORMS)
def test_every_load_has_the_mixture_of_one_process_and_its_gradients(form):
    for ep, load in ((ep, load) for ep in (2, 4) for load in LOADS):
        check(ep, form, load)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_ranks_with_other_numbers_of_experts(form):
    """Three ranks have 3, 3 and 2 of the 8."""
    for load in LOADS:
        check(3, form, load)
        if form == "gather":
            check(3, form, load, capacity=1.0)


def test_a_capacity_drops_what_it_drops_on_one_process():
    for load in LOADS:
        check(2, "gather", load, capacity=1.0)


@pytest.mark.parametrize("ep", [2, 4])
def test_a_form_sends_what_its_formula_says(ep):
    """In integers, of an even load; gather sends as much for any. Backward as much as forward."""
    routed = Routed(E, K, D)
    for rows in check(ep, "gather", "even"):
        tokens, routing = (ep - 1) * N * D, (ep - 1) * N * 2 * K
        assert 2 * tokens == N * routed.sent("gather", ep)
        assert sorted(rows) == [
            ("all_gather", "blocks/moe", 2, 2 * tokens),
            ("all_gather", "blocks/moe/router", 1, routing),
            ("psum_scatter", "blocks/moe", 2, 2 * tokens),
            ("psum_scatter", "blocks/moe/router", 1, routing),
        ]
    for rows in check(ep, "exchange:1", "even"):  # a slack of 1 is all that an even load needs
        sent = K * N * D * (ep - 1) // ep
        assert 2 * sent == N * routed.sent("exchange", ep)
        assert sorted(rows) == [
            ("all_gather", "blocks/moe/counts", 1, (ep - 1) * E),
            ("exchange_rows", "blocks/moe", 4, 4 * sent),
        ]


def test_an_exchange_sends_the_rows_for_other_ranks_and_no_more():
    ids, ep = choose("random", 2), 2
    for rank, rows in enumerate(check(ep, "exchange:8", "random")):
        sender = torch.arange(ep).repeat_interleave(B)[:, None, None].expand(ids.shape)
        away, home = ids // (E // ep), sender
        sends = int(((home == rank) & (away != rank)).sum()) * D
        returns = int(((home != rank) & (away == rank)).sum()) * D
        # There and back; and the gradients of what came back and of what went there.
        assert dict((row[0], row[3]) for row in rows)["exchange_rows"] == 2 * (sends + returns)


def test_the_form_that_sends_less_is_chosen():
    """Exchange is cheaper where there are more ranks than choices of a token."""
    for ep in (2, 3, 4, 6, 8):
        routed = Routed(24, 3, D)
        exchange, gather = routed.sent("exchange", ep), routed.sent("gather", ep)
        assert (exchange < gather) == (ep > 3) and (exchange == gather) == (ep == 3)
    model = fzero.models.build(fzero.models.MoEConfig(n_experts=8, top_k=2, d_model=16, n_heads=2, n_kv_heads=1))
    plans = {ep: fzero.zero_plan(0, model, fzero.fake_mesh({"ep": ep})) for ep in (2, 4, 8)}
    forms = {ep: plan.experts.form for ep, plan in plans.items() if plan.experts is not None}
    assert forms == {2: "gather", 4: "exchange", 8: "exchange"}


# ---- refusals --------------------------------------------------------------------------------------------------------


def overfull(mesh):
    try:
        dispatched(mesh, "exchange:1.5", "one expert")
    except ValueError as error:
        return str(error)
    return ""


def test_more_rows_than_there_is_room_for_are_refused_on_every_rank():
    said = ranks.run(2, overfull, mesh={"ep": 2})
    assert said[0] == said[1]
    assert said[0] == (
        "exchange_rows over ep of blocks/moe: rank 1 is sent 32 rows, 2.00 times what each rank sends, and has room "
        "for 24; use a larger slack than exchange:1.5, or gather"
    )


def test_what_cannot_be_is_refused_in_one_line():
    mesh, build = fzero.fake_mesh, fzero.models.build
    sizes = {"d_model": 16, "n_heads": 2, "n_kv_heads": 1}
    moe_of = lambda **more: build(fzero.models.MoEConfig(n_experts=6, top_k=2, **sizes, **more))  # noqa: E731
    for call, said in (
        (lambda: Experts("gater"), r"experts: form is 'gater' \(did you mean gather\?\); use one of gather, exchange"),
        (lambda: Experts.parse("exchange:0.5"), r"experts: slack is 0.5; it is at least 1"),
        (lambda: Experts.parse("exchange:many"), r"experts: slack is 'many'; write a number"),
        (lambda: fzero.zero_plan(0, {"w": torch.zeros(2)}, mesh({"ep": 2})), r"ep=2: ep splits the experts of mixtral"),
        (
            lambda: fzero.zero_plan(0, moe_of(), mesh({"ep": 8})),
            r"ep=8 is more than the 6 experts of a block; use ep=6 at most",
        ),
        (
            lambda: fzero.zero_plan(0, moe_of(capacity_factor=1.0), mesh({"ep": 2})).with_experts("exchange"),
            r"experts exchange: the model has a capacity_factor",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            call()


# ---- planted mistakes ------------------------------------------------------------------------------------------------


def weights_twice():
    real = moe.unpermute
    return mock.patch.object(moe, "unpermute", lambda y, w, *rest, **how: real(y, w * w, *rest, **how))


def counts_transposed():
    real = block.start_exchange_rows
    transposed = lambda x, counts, *rest, **how: real(x, counts.t(), *rest, **how)  # noqa: E731
    return mock.patch.object(block, "start_exchange_rows", transposed)


def other_places():
    real = moe.unpermute
    return mock.patch.object(
        moe, "unpermute", lambda y, w, order, place, **how: real(y, w, order, place.roll(1), **how)
    )


MISTAKES = {f.__name__: f for f in (weights_twice, counts_transposed, other_places)}


def mistaken(mesh, form, load, name):
    with MISTAKES[name]():
        try:
            return dispatched(mesh, form, load)
        except ValueError:  # rows that are not there cannot be sent
            return None


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("form", FORMS)
def test_a_planted_mistake_is_noticed(form, name):
    if (form, name) == ("gather", "counts_transposed"):
        pytest.skip("gather has no counts")
    found = ranks.run(2, mistaken, form, "random", name, mesh={"ep": 2})
    if None in found:  # refused, on every rank
        assert found == [None, None] and name == "counts_transposed"
        return
    with pytest.raises(AssertionError):
        for part, want in zip(zip(*(out for out, _ in found)), expected("random", 2)):
            assert_close(pytree.map(lambda *parts: torch.cat(parts), *part), want, rtol=1e-12, atol=1e-12)
