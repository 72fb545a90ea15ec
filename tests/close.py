"""Comparison of trees of numbers, with a tolerance that must mean something."""

import torch

from fzero.core import pytree


def _wide(leaf):
    leaf = torch.as_tensor(leaf).detach()
    return leaf.to(torch.complex128 if leaf.is_complex() else torch.float64)


def assert_close(actual, expected, rtol=0.0, atol=0.0):
    """Every element satisfies |actual - expected| <= atol + rtol |expected|; trees, leaf by leaf, in float64.

    Raises ValueError for an atol above 1% of the largest expected value of the tree (it would hide a wrong result),
    AssertionError naming the leaf that differs in existence, shape or value. Infinities equal themselves; NaN equals
    nothing."""
    got, want = pytree.named_leaves(actual), pytree.named_leaves(expected)
    assert want, "nothing to compare: the expected tree has no leaves"
    assert list(got) == list(want), f"other leaves: {sorted(set(got) ^ set(want)) or 'the same in another order'}"
    finite = [x[x.isfinite()].abs() for x in (_wide(leaf) for leaf in want.values())]
    largest = max((float(x.max()) for x in finite if x.numel()), default=0.0)
    if atol > 0.01 * largest:
        raise ValueError(
            f"atol is {atol:g}, above 1% of the largest expected value {largest:g}: it would hide a wrong result"
        )
    for name in want:
        a, e = _wide(got[name]), _wide(want[name])
        where = f"leaf {name or '(whole)'}"
        assert a.shape == e.shape, f"{where}: shape {list(a.shape)}, expected {list(e.shape)}"
        error = (a - e).abs()
        bad = ~((error <= atol + rtol * e.abs()) & e.isfinite() | (a == e))
        if bad.any():
            worst = int(torch.where(bad, error.nan_to_num(nan=float("inf")), -1.0).argmax())
            at = list(torch.unravel_index(torch.tensor(worst), a.shape)) if a.dim() else []
            raise AssertionError(
                f"{where}: {int(bad.sum())} of {bad.numel()} elements differ; worst at {[int(i) for i in at]}: "
                f"{a.reshape(-1)[worst].item()!r}, expected {e.reshape(-1)[worst].item()!r} (rtol {rtol:g}, atol "
                f"{atol:g})"
            )


def assert_same(actual, expected):
    """The trees are the same bit for bit (dtypes too), leaf by leaf."""
    got, want = pytree.named_leaves(actual), pytree.named_leaves(expected)
    assert want and list(got) == list(want), f"other leaves: {list(got)}, expected {list(want)}"
    for name in want:
        a, e = got[name], want[name]
        assert a.dtype == e.dtype and a.shape == e.shape, (
            f"leaf {name}: {a.dtype} {list(a.shape)}, expected {e.dtype} {list(e.shape)}"
        )
        assert torch.equal(a, e), f"leaf {name}: {int((a != e).sum())} of {a.numel()} elements differ"


def assert_at_most_twice_the_error(actual, plain, exact):
    """Leaf by leaf, `actual` is at most twice as far from `exact` (float64) as `plain`, what plain torch gives in the
    same dtype: in the root of the mean square, and in the largest element.
    """
    got, base, want = (pytree.named_leaves(tree) for tree in (actual, plain, exact))
    assert want and list(got) == list(base) == list(want)
    for name, e in want.items():
        assert e.dtype == torch.float64 and got[name].dtype == base[name].dtype, name
        ours, theirs = (_wide(x[name]) - e for x in (got, base))
        for size in (lambda x: float(x.square().mean().sqrt()), lambda x: float(x.abs().max())):
            assert size(ours) <= 2.0 * size(theirs), (
                f"leaf {name}: error {size(ours):g}, plain torch's is {size(theirs):g}"
            )
