"""Collectives in traced graphs: fake kernels agree with the real ones, nothing is run twice, dropped or moved."""

import itertools

import pytest
import ranks
import torch
from close import assert_close
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx

from fzero import all_gather, all_to_all, ppermute, psum, psum_scatter, pvary
from fzero.comm import communicator_of
from fzero.comm.operators import ops
from fzero.core.graph_passes import chain_in_order, pin_ordered
from fzero.sharding import fake_mesh

F64 = torch.float64


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def operators(mesh):
    dp, tp = mesh["dp"].communicator.number, mesh["tp"].communicator.number
    x = draw(4, 6, seed=mesh.rank)
    samples = [
        (ops.psum, (x, dp, "")),
        (ops.psum, (x[0, 0], tp, "w")),
        (ops.all_gather, (x, dp, "")),
        (ops.psum_scatter, (x, tp, "")),
        (ops.all_to_all, (x, dp, "")),
        (ops.ppermute, (x, dp, [0, 1], "")),
    ]
    for op, (x, *args) in samples:
        before = x.clone()
        out, token = op.after(x, *args, None)
        assert torch.equal(out, op(x, *args)) and torch.equal(x, before) and token.shape == (1,)
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() and out.is_contiguous()
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = [op(mode.from_tensor(x), *args), *op.after(mode.from_tensor(x), *args, mode.from_tensor(token))]
        for fake, real in zip(fakes, (out, out, token)):
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_operators_and_their_fake_kernels():
    ranks.run(4, operators, mesh={"dp": 2, "tp": 2})


def test_a_link_that_is_gone_says_so():
    number = fake_mesh({"dp": 2})["dp"].communicator.number
    with pytest.raises(
        ValueError, match="a traced collective runs on a mesh that is gone; keep the mesh while its functions are used"
    ):
        communicator_of(number)


# ---- a joint graph is split -----------------------------------------------------------------------------------------


def collectives_of(graph):
    return [
        (node.target._schema.name.removeprefix("fzero::"), node.args[-1])
        for node in graph.graph.nodes
        if is_collective(node)
    ]


def is_collective(node):
    return getattr(node.target, "namespace", None) == "fzero"


def joint_graph(dp):
    """Forward and backward of a function whose collectives a partitioner would gladly repeat, or drop."""

    def f(x):
        a = psum(x, dp, leaf="of an input")
        b = all_gather(torch.sin(pvary(a, dp)) * x, dp, leaf="in between")
        psum(x * 2, dp, leaf="not used")
        return torch.tanh(b).sum() * b.sum()

    def joint(primals, tangents):
        out, vjp = torch.func.vjp(f, *primals)
        tangents = [t.view_as(t) for t in tangents]
        # What a block repeats in its backward pass because it did not keep it.
        again = psum(primals[0] * 3, dp, leaf="repeated")
        return [out, again + vjp(*tangents)[0]]

    with torch._subclasses.FakeTensorMode():
        return make_fx(joint)([torch.empty(6, 4, dtype=F64)], [torch.empty((), dtype=F64)])


def named(graph):
    """The graph with its inputs called primals and tangents, as a partitioner wants them."""
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), ("primals_1", "tangents_1")):
        node.name = node.target = name
    graph.graph.set_codegen(torch.fx.graph.CodeGen())
    graph.recompile()
    return graph


@pytest.mark.parametrize("budget", (1.0, 0.1))
def test_a_partitioner_runs_each_collective_once_where_the_program_does(budget):
    mesh = fake_mesh({"dp": 2})
    graph = named(joint_graph(mesh["dp"]))
    expected = collectives_of(graph)
    assert [leaf for _, leaf in expected] == ["of an input", "in between", "not used", "repeated", "in between", ""]
    pin_ordered(graph)
    with functorch_config.patch(activation_memory_budget=budget, cse=False):
        forward, backward = min_cut_rematerialization_partition(graph, (), num_fwd_outputs=1)
    assert collectives_of(forward) == expected[:3]
    assert sorted(collectives_of(backward)) == sorted(expected[3:])


# ---- a graph is compiled --------------------------------------------------------------------------------------------


def test_in_order_chains_the_collectives_of_a_graph():
    mesh = fake_mesh({"dp": 2})
    dp = mesh["dp"]

    def f(x):
        a, b = psum(x, dp, leaf="a"), all_to_all(x * 2, dp, 0, 1, leaf="b")
        ppermute(x, dp, [(0, 1)], leaf="c")
        return [a + 1, b]

    with torch._subclasses.FakeTensorMode():
        graph = make_fx(f)(torch.empty(4, 4))
    assert chain_in_order(graph)
    nodes = [node for node in graph.graph.nodes if is_collective(node)]
    assert [node.target for node in nodes] == [ops.psum.after, ops.all_to_all.after, ops.ppermute.after]
    assert nodes[0].args[-1] is None
    for before, node in itertools.pairwise(nodes):
        assert node.args[-1].args == (before, 1)
    outputs = graph.graph.output_node().args[0]
    assert len(outputs) == 3 and outputs[-1].args == (nodes[-1], 1)
    assert all("val" in node.meta for node in graph.graph.nodes if node.op == "call_function")
    graph.graph.eliminate_dead_code()
    assert len([node for node in graph.graph.nodes if is_collective(node)]) == 3
    with torch._subclasses.FakeTensorMode():
        assert not chain_in_order(make_fx(lambda x: [x + 1])(torch.empty(2)))


def compiled_in_order(mesh):
    """Independent collectives, one of them not used on rank 1, in a graph whose nodes rank 1 has in another fusion."""
    from torch._inductor.compile_fx import compile_fx_inner

    dp, r = mesh["dp"], mesh.rank
    x = draw(8, 8, seed=r)

    def f(x):
        total = psum(x * 2, dp, leaf="a")
        gathered = all_gather(torch.sin(x), dp, leaf="b")
        scattered = psum_scatter(torch.cos(x), dp, leaf="c")
        own = gathered[8 * r : 8 * r + 8]
        return [own * 3 + (total if r == 0 else 1.0), scattered.sum()]

    with torch._subclasses.FakeTensorMode() as mode:
        graph = make_fx(f)(torch.empty(8, 8, dtype=F64))
    assert chain_in_order(graph)
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        run = compile_fx_inner(graph, examples)
    out = list(run([x]))[:-1]
    assert [(row.collective, row.leaf) for row in mesh.ledger.rows()] == [
        ("psum", "a"),
        ("all_gather", "b"),
        ("psum_scatter", "c"),
    ]
    assert_close(out, f(x), rtol=1e-12)


@pytest.mark.slow
def test_compiled_collectives_run_in_the_order_of_the_program():
    ranks.run(2, compiled_in_order)
