"""The three forms of one order of summation, against the order written out."""

import pytest
import torch

from fzero.core import TreeSum, tree_sum, tree_sum_rows


def written_out(terms):
    """Complete trees by the binary digits of the number of terms, the last ones added first."""
    if len(terms) == 1:
        return terms[0]
    first = 1 << (len(terms) - 1).bit_length() - 1  # the largest power of two below the number of terms
    return written_out(terms[:first]) + written_out(terms[first:])


@pytest.mark.parametrize("n", (1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16, 21, 32, 33))
def test_the_forms_have_the_same_bits(n):
    rows = (
        torch.randn(n, 50, generator=torch.Generator().manual_seed(n))
        * 10.0 ** torch.arange(-3, 4)[torch.arange(n) % 7, None]
    )
    terms, total = list(rows), TreeSum()
    expected = written_out(terms)
    for term in terms:
        total.add(term.clone())
    assert torch.equal(total.sum(), expected)
    assert torch.equal(tree_sum(terms), expected)
    assert torch.equal(tree_sum_rows(rows), expected)
    assert n < 4 or not torch.equal(rows.flip(0).cumsum(0)[-1], expected)  # another order has other bits


def test_only_owned_terms_are_overwritten():
    rows = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    owned = [False, True, False, False, True, True, False]
    before, terms = rows.clone(), list(rows)
    total = tree_sum(terms, owned)
    assert torch.equal(total, written_out(list(before)))
    for term, old, may_change in zip(terms, before, owned):
        assert may_change or torch.equal(term, old)
    assert total.data_ptr() in {term.data_ptr() for term, own in zip(terms, owned) if own}  # no memory of its own
    tree_sum(terms)
    assert torch.equal(torch.stack(terms), rows)


def test_a_counter_holds_a_term_for_each_binary_digit():
    total, most = TreeSum(), 0
    for i in range(33):
        total.add(torch.tensor(float(i)))
        most = max(most, len(total.trees))
        assert len(total.trees) == (i + 1).bit_count()
    assert most == 5 and total.sum() == 33 * 16
