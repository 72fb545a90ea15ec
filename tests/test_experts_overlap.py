"""What is computed beside an exchange: in which order, and with the numbers of the form without."""

from types import SimpleNamespace

import pytest
import ranks
import torch
from close import assert_close, assert_same
from test_expert_parallel import equals_one_process, options_of
from test_experts_dispatch import E, given, own_part

import fzero
from fzero.comm import start_exchange_rows
from fzero.core import compile, pytree, vjp_pair
from fzero.core.graph_passes import chain_in_order, keeps_order
from fzero.models import Ctx
from fzero.models import experts as block
from fzero.sharding import ActivationSplit, Experts

ROWS, WIDTH = 4, 3
EVENTS = []


@torch.library.custom_op("overlap_test::mark", mutates_args=())
def mark(x: torch.Tensor, what: str) -> torch.Tensor:
    """A copy of x; notes that it was made."""
    EVENTS.append(what)
    return x.clone()


@mark.register_fake
def _(x, what):
    return torch.empty_like(x)


class Marked(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return mark(x, "forward")

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return mark(grad, "backward")


class Watch:
    """Notes when an exchange starts, and when it is waited for."""

    def __init__(self):
        self.rows = set()

    def start(self, number, collective, *_):
        if collective == "exchange_rows":
            self.rows.add(number)
            EVENTS.append("start")

    def wait(self, number):
        if number in self.rows:
            EVENTS.append("wait")

    def done(self, number):
        pass

    enter = leave = at = done


def events_of(mesh, compiled):
    """(events of both passes, results and gradients) of an exchange with something beside it and something behind."""
    counts = torch.tensor([[1, 3], [2, 2]])

    def f(x, w, counts):
        rows = start_exchange_rows(x @ w, counts, mesh["ep"], 2 * ROWS)
        beside = Marked.apply(x @ w.t()) @ w
        return ((rows.wait() @ w).tanh().sum(0) + beside.sin().sum(0),)

    g = torch.Generator().manual_seed(mesh["ep"].rank)
    x, w = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((ROWS, WIDTH), (WIDTH, WIDTH)))
    pair = vjp_pair.vjp_pair(f, 2, compiled=compiled)
    out, residuals = pair.forward([x, w, counts])
    pair.backward(residuals, [torch.ones_like(out[0])])  # compiled, and traced
    watch = Watch()
    mesh.ledger.watches = [*mesh.ledger.watches, watch]
    EVENTS.clear()
    out, residuals = pair.forward([x, w, counts])
    grads = pair.backward(residuals, [torch.ones_like(out[0])])
    mesh.ledger.watches = [other for other in mesh.ledger.watches if other is not watch]
    return list(EVENTS), out, grads


def both(mesh):
    return [events_of(mesh, compiled) for compiled in (False, True)]


def test_what_is_beside_an_exchange_is_computed_between_its_start_and_the_wait():
    """Of the transposed exchange in the backward pass too, eager and compiled, where a compiler moves products next to
    their use."""
    for eager, compiled in ranks.run(2, both, mesh={"ep": 2}):
        for events, *_ in (eager, compiled):
            assert events == ["start", "forward", "wait", "start", "backward", "wait"]
        assert_close(compiled[1:], eager[1:], rtol=1e-12, atol=1e-12)


def chained(beside=True):
    """(the graph of an exchange over a planned mesh with a product beside it, chained; the product of what is sent)."""
    mesh = fzero.fake_mesh({"ep": 2})
    mode = compile.fake_mode()

    def f(x, w, counts):
        sent = x @ w
        rows = start_exchange_rows(sent, counts, mesh["ep"], 2 * ROWS)
        if not beside:
            return (rows.wait() + 1.0,)
        more = (x.sin() @ w)[None]
        return rows.wait() + 1.0, more + 1.0

    given = [torch.empty(ROWS, WIDTH), torch.empty(WIDTH, WIDTH), torch.empty(2, 2, dtype=torch.int64)]
    graph = compile.trace(lambda primals, _: list(f(*primals)), compile.fakes_of(given, mode), [], mode)
    assert chain_in_order(graph)
    return graph.graph


def test_a_wait_in_a_graph_holds_what_is_sent_and_what_is_beside():
    """So that neither a buffer that is being sent is used again, nor a product moved behind the wait."""
    graph = chained()
    (wait,) = (node for node in graph.nodes if node.target is torch.ops.fzero.wait_rows.after)
    (start,) = (node for node in graph.nodes if node.target is torch.ops.fzero.start_rows.after)
    first, second = (node for node in graph.nodes if node.target is torch.ops.aten.mm.default)
    assert start.args[0] is first and wait.args[1] == [first, second]
    assert wait.args[-1].args == (start, 1), "the token of the start"
    assert keeps_order(SimpleNamespace(graph=graph))  # else Inductor's order for peak memory may move the start


def test_a_graph_with_nothing_beside_an_exchange_may_be_in_another_order():
    graph = chained(beside=False)
    assert not keeps_order(SimpleNamespace(graph=graph))


# ---- the shared expert -----------------------------------------------------------------------------------------------


def mixed(mesh, form):
    """(result, gradients) of a mixture with something beside it, and with the same added after it."""
    ep = mesh["ep"]
    p, x, ids, weights, g = given("random", ep.size)
    own = lambda t: t.chunk(ep.size)[ep.rank]  # noqa: E731
    ctx = Ctx(mesh=mesh, dtype=torch.float64, split=ActivationSplit(experts=Experts.parse(form)))
    p = {**pytree.map(lambda t: own_part(t, ep), p), "shared": p["w_up"][0] @ p["w_down"][0]}

    def after(p, x, weights):
        return block.mixture(p, x, own(ids), weights, ctx, block.ExpertMixture(E)) + x.sin() @ p["shared"]

    def beside(p, x, weights):
        return block.mixture(p, x, own(ids), weights, ctx, block.ExpertMixture(E), lambda: x.sin() @ p["shared"])

    out = []
    for f in (after, beside):
        result, pull = torch.func.vjp(f, p, own(x), own(weights))[:2]
        out.append((result, *pull(own(g))))
    return out


@pytest.mark.parametrize("form", ["gather", "exchange:8", pytest.param("exchange:8:2", marks=pytest.mark.slow)])
def test_what_is_beside_has_the_bits_of_what_is_added_after(form):
    for after, beside in ranks.run(2, mixed, form, mesh={"ep": 2}):
        assert_same(beside, after)


def per_sample(mesh):
    """Gradients of the rows of a batch dim through an exchange: by vmap, and one after the other."""
    counts, g = torch.tensor([[1, 3], [2, 2]]), torch.Generator().manual_seed(mesh["ep"].rank)
    xs = torch.randn(5, ROWS, WIDTH, generator=g, dtype=torch.float64)

    def f(x):
        return start_exchange_rows(x, counts, mesh["ep"], 2 * ROWS).wait().sin().sum()

    tangent = torch.func.jvp(torch.func.grad(f), (xs[0],), (xs[1],))[1]
    hvp = torch.func.grad(lambda x: (torch.func.grad(f)(x) * xs[1]).sum())(xs[0])
    return torch.func.vmap(torch.func.grad(f))(xs), torch.stack([torch.func.grad(f)(x) for x in xs]), tangent, hvp


def test_a_started_exchange_composes_with_transforms():
    for by_vmap, one_by_one, tangent, hvp in ranks.run(2, per_sample, mesh={"ep": 2}):
        assert_close(by_vmap, one_by_one, rtol=1e-12, atol=1e-12)
        assert_close(tangent, hvp, rtol=1e-12, atol=1e-12)
        assert tangent.abs().max() > 0.1


# ---- parts -----------------------------------------------------------------------------------------------------------


def too_many_parts(mesh):
    with pytest.raises(ValueError, match="experts: parts is 9, and a rank has 8 tokens; use fewer parts"):
        mixed(mesh, "exchange:8:9")


def test_more_parts_than_tokens_are_refused():
    ranks.run(2, too_many_parts, mesh={"ep": 2})


CASES = {
    "parts": ("moe dropless", "clipped adam", 3, 2, options_of("exchange:1:2")),
    "parts, remat": ("deepseek", "adam", 2, 1, {**options_of("exchange:1:2"), "remat": "full"}),
    "shared, remat": ("deepseek", "clipped adam", 3, 2, {**options_of("exchange:1"), "remat": "full"}),
    "three uneven parts": ("moe dropless", "adam", 1, 1, {**options_of("exchange:1:7"), "of": 5}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.exhaustive] * (c != "parts, remat")) for c in CASES]
)
def test_steps_equal_those_of_one_process(case):
    equals_one_process("ep2", [CASES[case]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["exchange:1", "exchange:1:2"])
def test_compiled_steps_equal_those_of_one_process(form):
    equals_one_process("ep2", [("deepseek", "adam", 3, 2, {**options_of(form), "compiled": True})], steps=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["pp2 x ep2", pytest.param("ep2 x tp2", marks=pytest.mark.slow)])
def test_meshes_equal_one_process(mesh):
    more = {"sequence": True} if "tp" in mesh else {}
    equals_one_process(mesh, [("deepseek", "adam", 2, 2, options_of("exchange:1:2", **more))])
