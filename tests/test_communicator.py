"""Links: sums in one order bit for bit, several collectives in flight, the ledger's integers, planning, and the calls
for NCCL."""

import pytest
import ranks
import torch
from close import assert_same
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fzero import all_gather, all_to_all, ppermute, psum, psum_scatter, pvary
from fzero.comm import Ledger, communicator, sent_elements, start_all_gather, start_psum, start_psum_scatter
from fzero.core import tree_sum
from fzero.sharding import fake_mesh


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ---- sums in one order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
def test_tree_sum_is_the_balanced_tree(dtype):
    p = [draw(257, seed=i, dtype=dtype) for i in range(8)]
    kept = [x.clone() for x in p]
    four = (p[0] + p[1]) + (p[2] + p[3])
    expected = {
        1: p[0],
        2: p[0] + p[1],
        3: (p[0] + p[1]) + p[2],
        4: four,
        5: four + p[4],
        6: four + (p[4] + p[5]),
        7: four + ((p[4] + p[5]) + p[6]),
        8: four + ((p[4] + p[5]) + (p[6] + p[7])),
    }
    for n, total in expected.items():
        assert_same(tree_sum(p[:n]), total)
    assert_same(p, kept)
    in_turn = sum(p[1:4], p[0])
    assert not torch.equal(four, in_turn)  # so that the order is seen


def summed(mesh, parts, small):
    """Every way to sum over ranks, for this rank's part."""
    axis, x = mesh["dp"], parts[mesh.rank]
    before, communicator.SMALL_BYTES = communicator.SMALL_BYTES, 1 << 30 if small else 0
    try:
        out = [psum(x, axis), start_psum(x, axis).wait(), all_gather(psum_scatter(x, axis), axis)]
        out += [start_all_gather(start_psum_scatter(x, axis).wait(), axis).wait(), psum(x[:-1], axis)]
        _, vjp = torch.func.vjp(lambda y: pvary(y, axis), x)
        assert_same(x, parts[mesh.rank])
        return [*out, vjp(x)[0]]
    finally:
        communicator.SMALL_BYTES = before


@pytest.mark.parametrize("n", (2, 3, 4))
@pytest.mark.parametrize("small", (True, False), ids=("whole", "pieces"))
def test_sums_over_ranks_are_the_tree_bit_for_bit(n, small):
    for dtype in (torch.float32, torch.bfloat16):
        parts = [draw(12, 7, seed=i, dtype=dtype) for i in range(n)]
        total = tree_sum(parts)
        for got in ranks.run(n, summed, parts, small):
            assert_same(got, [total, total, total, total, total[:-1], total])


# ---- started, and waited for ----------------------------------------------------------------------------------------


def in_flight(mesh, parts):
    axis = mesh["dp"]
    x = [p[mesh.rank] for p in parts]
    pending = [
        start_all_gather(x[0], axis),
        start_psum(x[1], axis),
        start_psum_scatter(x[2], axis),
        start_all_gather(x[3], axis),
    ]
    out = torch.full((axis.size * x[0].shape[0], *x[0].shape[1:]), torch.nan)
    own = out.view(axis.size, *x[0].shape)[axis.rank]
    own.copy_(x[0])
    in_place = start_all_gather(own, axis, out=out)
    results = [p.wait() for p in reversed(pending)][::-1]
    whole = in_place.wait()
    assert whole is out
    with pytest.raises(AssertionError, match="waited for twice"):
        in_place.wait()
    other = torch.empty_like(out)
    assert start_all_gather(x[0], axis, out=other).wait() is other
    for wrong in (out[:-1], out.double(), out.T.contiguous().T):
        with pytest.raises(
            ValueError,
            match=r"all_gather over dp \(4 ranks\) of w: out is .*; it must be contiguous, torch.float32 \[12, 5\]",
        ):
            start_all_gather(x[0], axis, leaf="w", out=wrong)
    return [*results, whole, other]


def test_several_in_flight_waited_for_in_another_order():
    parts = [draw(4, 3, 5, seed=i) for i in (0, 1)] + [draw(4, 8, 5, seed=2), draw(4, 1, 5, seed=3)]
    scattered = tree_sum(list(parts[2])).chunk(4)
    for rank, got in enumerate(ranks.run(4, in_flight, parts)):
        gathered = parts[0].flatten(0, 1)
        assert_same(
            got, [gathered, tree_sum(list(parts[1])), scattered[rank], parts[3].flatten(0, 1), gathered, gathered]
        )


# ---- the ledger -----------------------------------------------------------------------------------------------------


def test_what_one_rank_sends():
    assert [sent_elements("all_gather", 12, n) for n in (1, 2, 3, 4)] == [0, 6, 8, 9]
    assert [sent_elements("psum", 10, n) for n in (1, 2, 3, 4)] == [0, 10, 14, 15]
    assert sent_elements("psum", 1, 4) == 2 and sent_elements("psum_scatter", 7, 2) == 4  # rounded up
    assert sent_elements("ppermute", 7, 4) == 7 and sent_elements("all_to_all", 8, 4) == 6


def entered(mesh):
    dp, tp, ledger = mesh["dp"], mesh["tp"], mesh.ledger
    x = torch.randn(6, 4)
    with ledger.phase("forward"):
        all_gather(x, dp, leaf="w")
        all_gather(x, dp, 1, leaf="w")
        with ledger.phase("inner"):
            psum(x, tp)
        psum_scatter(x, dp, leaf="v")
    ppermute(x.bfloat16(), tp, [(0, 1)])
    all_to_all(x.double(), tp, 0, 1)
    assert ledger.total(phase="forward", axis="dp")[5:] == (3, 24 + 24 + 12, 4 * 60)
    assert ledger.total(collective="psum") == ("*", "psum", "*", "*", "*", 1, 24, 96)
    assert ledger.total(axis="cp")[5:] == (0, 0, 0)
    rows, text = [tuple(row) for row in ledger.rows()], str(ledger)
    ledger.clear()
    assert ledger.rows() == [] and ledger.total()[5:] == (0, 0, 0)
    return rows, text


def test_the_ledger_counts_integers_by_phase_axis_and_leaf():
    for rank, (rows, text) in enumerate(ranks.run(4, entered, mesh={"dp": 2, "tp": 2})):
        sent = (24, 48) if rank % 2 == 0 else (0, 0)
        assert rows == [
            ("forward", "all_gather", "dp", "w", "float32", 2, 48, 192),
            ("inner", "psum", "tp", "", "float32", 1, 24, 96),
            ("forward", "psum_scatter", "dp", "v", "float32", 1, 12, 48),
            ("", "ppermute", "tp", "", "bfloat16", 1, *sent),
            ("", "all_to_all", "tp", "", "float64", 1, 12, 96),
        ]
        lines = text.splitlines()
        assert lines[0].split() == ["phase", "collective", "axis", "leaf", "dtype", "calls", "elements", "bytes"]
        assert lines[1].split() == ["forward", "all_gather", "dp", "w", "float32", "2", "48", "192"]


def test_the_ledger_goes_back_to_the_phase_before_an_error():
    ledger = Ledger()
    with pytest.raises(KeyError), ledger.phase("a"):
        raise KeyError
    assert ledger.phase_name == ""


# ---- planning -------------------------------------------------------------------------------------------------------


def test_a_mesh_for_planning_counts_what_would_be_sent():
    mesh = fake_mesh({"dp": 4, "tp": 2}, rank=5)
    dp, tp = mesh["dp"], mesh["tp"]

    def program(x):
        y = all_gather(psum_scatter(x, dp, 1, leaf="w"), tp, 0)
        return psum(ppermute(all_to_all(y, dp, 0, 1), dp, [(2, 3), (0, 1)]), tp)

    def sent():
        return [(r.collective, r.axis, r.elements) for r in mesh.ledger.rows()]

    expected = [
        ("psum_scatter", "dp", 12 * 8 * 3 // 4),
        ("all_gather", "tp", 24),
        ("all_to_all", "dp", 36),
        ("ppermute", "dp", 48),
    ]
    with FakeTensorMode():
        out = program(torch.empty(12, 8))
        assert isinstance(out, torch._subclasses.FakeTensor) and out.shape == (6, 8)
        assert sent() == [*expected, ("psum", "tp", 48)]
        pending = [
            start_all_gather(torch.empty(3, 5), dp),
            start_psum_scatter(torch.empty(8, 5), dp),
            start_psum(torch.empty(3), tp),
        ]
        assert [tuple(p.wait().shape) for p in pending] == [(12, 5), (2, 5), (3,)]
        assert mesh.ledger.total(collective="all_gather", axis="dp").elements == 45
        mesh.ledger.clear()
        graph = make_fx(program)(torch.empty(12, 8))
        assert sent() == []  # traced is not run
        graph(torch.empty(12, 8))
        assert sent() == [*expected, ("psum", "tp", 48)]
    mesh.ledger.clear()
    with mesh.checked():  # there is nobody to compare with
        assert program(torch.empty(12, 8, device="meta")).shape == (6, 8) and len(sent()) == 5


# ---- NCCL -----------------------------------------------------------------------------------------------------------


def native(mesh, parts, ordered):
    """What NCCL is asked for, asked of gloo."""
    ours, r, n = mesh["dp"].communicator, mesh.rank, mesh.size
    options = {"ledger": mesh.ledger, "agreement": ours.agreement, "group": ours.group, "ordered": ordered}
    link = communicator.Communicator("dp", ours.ranks, transport="nccl", **options)
    x, total = parts[r], tree_sum(parts)
    out = torch.zeros(n * x.shape[0], *x.shape[1:])
    own = out.view(n, *x.shape)[r].copy_(x)
    with mesh.checked():
        pending = [
            link.start_all_gather(x),
            link.start_all_gather(own, out=out),
            link.start_psum_scatter(x),
            link.start_psum(x),
        ]
        pending += [link.start_all_to_all(x), link.start_ppermute(x, [(0, 1)])]
    got = [p.wait() for p in pending]
    for a, b in ((got[2], total.chunk(n)[r]), (got[3], total)):
        assert torch.equal(a, b) if ordered else torch.allclose(a, b, atol=1e-6)
    assert got[1] is out and got[3] is not x
    assert_same(got[:2], [torch.cat(parts)] * 2)
    assert_same(got[4], torch.cat([p.chunk(n)[r] for p in parts]))
    assert_same(got[5], parts[0] if r == 1 else torch.zeros_like(x))


@pytest.mark.parametrize("ordered", (False, True))
def test_the_calls_for_nccl(ordered):
    ranks.run(4, native, [draw(8, 5, seed=i) for i in range(4)], ordered)


def different_programs(mesh):
    """The ranks of pp make unlike numbers of calls over dp before they meet."""
    rows, pp = [torch.ones(3) for _ in range(1 + 2 * mesh["pp"].rank)], mesh["pp"]
    with mesh.checked():
        for row in rows:
            psum(row * mesh["dp"].rank, mesh["dp"])
        return psum(torch.full((2,), float(mesh.rank)), pp, leaf="met").tolist()


def test_the_ranks_of_pp_may_make_unlike_numbers_of_calls():
    """Messages are numbered by axis: numbered by process, those of one call would have other numbers on each rank."""
    assert ranks.run(4, different_programs, mesh={"pp": 2, "dp": 2}) == [[2.0, 2.0], [4.0, 4.0]] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("ordered", (False, True))
def test_nccl_with_one_rank(ordered):
    """NCCL takes one process for each GPU: with one of each every collective is the identity, through its own code."""
    dist = torch.distributed
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        agreement = communicator.ProgramAgreement(store, 0, 60.0)
        link = communicator.Communicator(
            "dp",
            [0],
            transport="nccl",
            ledger=Ledger(),
            agreement=agreement,
            group=dist.group.WORLD,
            ordered=ordered,
        )
        x = torch.randn(6, 5, device="cuda")
        with agreement.checked():
            started = [
                link.start_all_gather(x),
                link.start_all_gather(x, out=torch.empty_like(x)),
                link.start_psum_scatter(x),
            ]
            started += [link.start_all_to_all(x), link.start_ppermute(x, [(0, 0)])]
        started += [link.start_psum(x), link.start_psum(x.bfloat16())]
        for pending in started[:-1]:
            assert_same(pending.wait(), x)
        assert_same(started[-1].wait(), x.bfloat16())
    finally:
        dist.destroy_process_group()
