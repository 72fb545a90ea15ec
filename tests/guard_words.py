"""Guard words around tensors, for the C++ loops, which take addresses and which no interpreter watches.

stays_inside(lambda a, b: [glu.swiglu(a, b, impl="cpp")], [a, b])
"""

import contextlib
from unittest import mock

import torch
from close import assert_same

GUARD = 4096  # bytes before a tensor, and as many behind it
FILLS = (0xFF, 0x3C)  # as numbers: NaN and -1; and some that are small and not zero
# torch's functions that make memory, and of those the ones that leave it as it is.
MAKE = {torch: ("empty", "empty_like", "zeros", "zeros_like"), torch.Tensor: ("new_empty", "new_zeros", "contiguous")}
LEAVE = ("empty", "empty_like", "new_empty")


class Guards:
    """The guarded tensors of a context; memory that is made has the fill as well, until it is written."""

    def __init__(self, fill):
        self.fill, self.around = fill, []

    def place(self, x, *, filled=False):
        """x of the same strides between guard words; with the fill itself if `filled`."""
        room = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) + 1 if x.numel() else 0
        size = room * x.element_size()
        buffer = torch.full((size + 2 * GUARD,), self.fill, dtype=torch.uint8)
        self.around.append((buffer, size, f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"))
        there = torch.tensor([], dtype=x.dtype)
        there.set_(buffer.untyped_storage(), GUARD // x.element_size(), x.shape, x.stride())
        return there if filled else there.copy_(x)

    def made(self, plain, name):
        """A function of torch that makes memory, with guard words around it."""

        def make(*given, **options):
            x = plain(*given, **options)
            if type(x) is not torch.Tensor or x.device.type != "cpu" or x.requires_grad or any(x is y for y in given):
                return x
            return self.place(x, filled=name in LEAVE)

        return make

    def check(self):
        for buffer, size, name in self.around:
            at = torch.nonzero(buffer != self.fill)[:, 0] - GUARD
            outside = at[(at < 0) | (at >= size)].tolist()
            assert not outside, f"byte {outside[0]} of a tensor of {size} bytes, {name}, is written"


@contextlib.contextmanager
def guard_words(fill):
    """A context in which torch's functions for new memory put guard words around it, which must last until its end."""
    guards = Guards(fill)
    with contextlib.ExitStack() as stack:
        for where, names in MAKE.items():
            for name in names:
                stack.enter_context(mock.patch.object(where, name, guards.made(getattr(where, name), name)))
        yield guards
    guards.check()


def stays_inside(run, tensors, *, in_place=False):
    """`run(*tensors)`, which gives tensors, writes nothing outside of what it is given and makes, nor into what it is
    given, unless `in_place`; and what it gives depends on nothing outside, nor on what lay in new memory."""
    results = []
    for fill in FILLS:
        with guard_words(fill) as guards:
            given = [guards.place(x) for x in tensors]
            results.append([x.detach().clone() for x in (*run(*given), *given)])
        if not in_place:
            assert_same(results[-1][-len(given) :], list(tensors))
    assert_same(*results)
