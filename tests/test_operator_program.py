"""A function as the calls of its operators computes what the function does, for other tensors of the same shapes."""

import torch
from close import assert_same

from fzero.core.operator_program import operators_of
from fzero.kernels.linear import linear_product


def test_operators_are_those_of_the_function_and_constants_are_made_once():
    calls = []

    def f(tensors):
        calls.append(len(tensors))
        x, table, index = tensors
        angles = torch.arange(4.0).cos()  # a constant
        table.index_copy_(0, index, x.view(1, 4))
        low, high = (x * angles).view(2, 2).unbind(0)
        product = linear_product(x.view(2, 2).view(1, 4), table[:, :3].T.contiguous().view(-1)[:8].view(4, 2))
        return [torch.cat([low, high]) + x.view(1, 4)[0], x.view(1, 4) * 2.0, product.view(2)]

    def tensors(seed):
        draw = torch.Generator().manual_seed(seed)
        return [torch.randn(4, generator=draw), torch.zeros(3, 4), torch.tensor([seed % 3])]

    run = operators_of(f, tensors(0))
    for seed in (1, 2):
        ours, theirs = tensors(seed), tensors(seed)
        assert_same(list(run(*ours)), f(theirs))
        assert_same(ours, theirs)  # what is written in place too
    assert len(calls) == 3  # one trace, and the two calls above


def test_a_function_that_needs_values_has_no_such_program():
    assert operators_of(lambda tensors: [tensors[0][: int(tensors[1])]], [torch.ones(4), torch.tensor(2)]) is None
