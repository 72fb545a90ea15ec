"""Cross entropy over a vocabulary that tp shards, against one process and plain torch."""

import pytest
import ranks
import torch
from close import assert_at_most_twice_the_error, assert_close, assert_same

from fzero import pvary
from fzero.kernels import linear_cross_entropy as ce
from fzero.sharding import one_process

F64 = torch.float64
D, V = 8, 16
ONE = one_process()
N, CHUNKS = 23, {"6 chunks": 4, "1 chunk": 100, "1 token a chunk": 0}


def cross_entropy_inputs(dtype=F64):
    g = torch.Generator().manual_seed(5)
    x, w = (torch.randn(shape, generator=g, dtype=F64).to(dtype) for shape in ((N, D), (V, D)))
    return x, w, torch.randint(0, V, (N,), generator=g), torch.rand(N, generator=g) < 0.7


def cross_entropy(mesh, inputs, rows, compiled=False, scale=1.7):
    """{"loss", "dx", "dw", "again", "alone"} of this rank: dx whole (summed as the entrance of the region does)."""
    x, w, targets, mask = inputs
    tp = mesh["tp"]
    w = w.chunk(tp.size)[tp.rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ce.CHUNK_BYTES, "cpu", rows * w.shape[0] * x.dtype.itemsize)

        def f(x, w):
            return ce.linear_cross_entropy(pvary(x, tp), w, targets, mask, axis=tp, compiled=compiled)

        loss, vjp = torch.func.vjp(f, x, w)
        (dx, dw), again = (vjp(torch.tensor(s, dtype=loss.dtype)) for s in (scale, 2 * scale))
        return {"loss": loss, "dx": dx, "dw": dw, "again": again[0], "alone": f(x, w)}


@pytest.mark.parametrize("n", (2, 4))
@pytest.mark.parametrize("rows", CHUNKS.values(), ids=CHUNKS)
def test_cross_entropy_of_a_sharded_vocabulary(n, rows):
    x, w, targets, mask = cross_entropy_inputs()
    position = torch.arange(N)
    some = mask
    for mask in (some, position >= 0, position < 0, position == N - 1):
        expected = cross_entropy(ONE, (x, w, targets, mask), 100)
        got = ranks.run(n, cross_entropy, (x, w, targets, mask), rows, mesh={"tp": n})
        whole = {**got[0], "dw": torch.cat([part["dw"] for part in got])}
        if mask.any():
            assert_close(whole, expected, rtol=1e-12, atol=1e-13)
            assert float(whole["dx"][~mask].abs().sum()) == 0.0
        else:
            assert_same(whole, expected)
        for part in got:
            assert_same([part[key] for key in ("loss", "dx", "alone")], [whole[key] for key in ("loss", "dx", "alone")])


@pytest.mark.parametrize("compiled", (False, True), ids=("", "compiled"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_a_sharded_vocabulary_has_at_most_twice_the_error_of_plain_torch(dtype, compiled):
    x, w, targets, mask = cross_entropy_inputs(dtype)
    got = ranks.run(2, cross_entropy, (x, w, targets, mask), 100, compiled, 1.0, mesh={"tp": 2})

    def gradients(dtype):
        dx, dw = torch.func.grad(ce.reference, argnums=(0, 1))(x.to(dtype), w.to(dtype), targets, mask)
        return {"dx": dx, "dw": dw}

    whole = {"dx": got[0]["dx"], "dw": torch.cat([part["dw"] for part in got])}
    assert_at_most_twice_the_error(whole, gradients(dtype), gradients(F64))
    exact = ce.reference(x.to(F64), w.to(F64), targets, mask)
    assert got[0]["loss"].dtype == torch.float32
    assert_close(got[0]["loss"], exact, rtol={torch.bfloat16: 2e-3, torch.float32: 2e-6}[dtype])


def test_logits_of_any_size_over_a_sharded_vocabulary():
    x, w, targets, mask = cross_entropy_inputs(torch.float32)
    got = ranks.run(2, cross_entropy, (1000.0 * x, w, targets, mask), 4, mesh={"tp": 2})
    assert all(bool(t.isfinite().all()) for part in got for t in part.values())
    assert_close(got[0]["loss"], ce.reference(1000.0 * x.double(), w.double(), targets, mask), rtol=1e-5)


TERMS = {"z_loss": 0.02, "smoothing": 0.2, "cap": 3.0, "ignore_index": 5}


def every_term(mesh, inputs, impl):
    """(loss, dx summed over the ranks, dw of this rank's rows) with every term of the loss."""
    x, w, targets, mask = inputs
    tp = mesh["tp"]

    def f(x, w):
        return ce.linear_cross_entropy(pvary(x, tp), w, targets, mask, axis=tp, compiled=False, impl=impl, **TERMS)

    loss, vjp = torch.func.vjp(f, x, w.chunk(tp.size)[tp.rank])
    return loss, *vjp(torch.ones_like(loss))


@pytest.mark.parametrize("impl", ("reference", "chunked", "triton"))
def test_every_term_over_a_sharded_vocabulary(impl):
    g = torch.Generator().manual_seed(6)
    dtype = torch.float32 if impl == "triton" else F64
    x, w = (torch.randn(shape, generator=g, dtype=F64) for shape in ((N, D), (2 * 11, D)))
    targets, mask = torch.randint(0, 2 * 11, (N,), generator=g), torch.rand(N, generator=g) < 0.7
    targets = torch.where(mask, targets, 10**12)  # what does not count may be anything
    expected = every_term(ONE, (x, w, targets, mask), "reference")
    (loss, dx, dw), (other, _, dw_other) = ranks.run(
        2, every_term, (x.to(dtype), w.to(dtype), targets, mask), impl, mesh={"tp": 2}
    )
    assert_same(loss, other)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if impl == "triton" else {"rtol": 1e-12, "atol": 1e-13}
    assert_close((loss, dx, torch.cat((dw, dw_other))), expected, **tolerance)
