"""A watch over the programs of Triton's kernels, in its interpreter. That runs them one after the other, so that what
goes wrong between programs which run at once does not show in its results.

    with watched_programs() as watch:
        op("swiglu")(a, b, impl="triton")
    watch.grids                                 # {"_glu_forward": {(3,)}}

Each launch raises AssertionError, by kernel, program, argument and byte, where
- a program accesses memory outside of the elements of the launch's tensors; it is not touched then. A leaf whose
  address is in a table (kernels.leaf_table) counts as a tensor of the launch.
- a program stores what another loads, stores or updates, be the values equal; or loads what another updates.
- the programs, in reverse or shuffled, leave other bits in any tensor.

It does not see a pointer into one argument that reaches another argument, nor the threads within a program.
"""

import contextlib
import ctypes
import functools
import math
import sys
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from close import assert_close
from triton.runtime import interpreter

NONE = -1
LOADS, STORES, UPDATES = KINDS = ("loads", "stores", "updates")  # the last: atomically
# An access of the one kind and one of the other, of one byte by two programs, are a race.
RACES = ((STORES, STORES), (STORES, LOADS), (STORES, UPDATES), (UPDATES, LOADS))
# What the interpreter does of each kind: where its arguments have the pointers and the mask.
DOORS = {
    "create_masked_load": (LOADS, 0, 1),
    "create_masked_store": (STORES, 0, 2),
    "create_atomic_rmw": (UPDATES, 1, 3),
    "create_atomic_cas": (UPDATES, 0, None),
}
ORDERS = {
    "as they are": lambda count: np.arange(count),
    "in reverse": lambda count: np.arange(count)[::-1],
    "shuffled": lambda count: np.random.default_rng(21).permutation(count),
}


class Argument(NamedTuple):
    """A tensor that the programs of a launch can reach."""

    name: str
    x: torch.Tensor

    def place(self, address):
        kind = f"{str(self.x.dtype).removeprefix('torch.')} {list(self.x.shape)}"
        return f"byte {address - self.x.data_ptr()} of {self.name}, {kind} with strides {list(self.x.stride())}"

    def runs(self):
        """int64 [runs, 2]: where the bytes of the elements begin and end in memory, a row for each unbroken run."""
        size = self.x.element_size()
        dims = sorted((stride * size, n) for stride, n in zip(self.x.stride(), self.x.shape) if n > 1 and stride)
        while dims and dims[0][0] == size:
            size *= dims.pop(0)[1]
        starts = np.array([self.x.data_ptr()])
        for stride, n in dims:
            starts = (starts[:, None] + stride * np.arange(n)).ravel()
        return np.stack((starts, starts + size), 1)


class Memory:
    """The bytes of a launch's arguments, numbered from 0 without gaps in the order of their addresses."""

    def __init__(self, arguments):
        self.arguments = [argument for argument in arguments if argument.x.numel()]
        runs = np.concatenate([argument.runs() for argument in self.arguments])
        runs = runs[np.argsort(runs[:, 0])]
        ends = np.maximum.accumulate(runs[:, 1])
        apart = runs[1:, 0] > ends[:-1]
        self.starts, self.ends = runs[np.r_[True, apart], 0], ends[np.r_[apart, True]]
        sizes = self.ends - self.starts
        self.before = np.cumsum(sizes) - sizes  # bytes before each run
        low, high = int(self.starts[0]), int(self.ends[-1])
        self.whole = np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), np.uint8)
        self.at = np.concatenate([np.arange(start, end) for start, end in zip(self.starts, self.ends)]) - low

    def numbers(self, addresses, size):
        """(the numbers of the bytes of accesses of `size` bytes, the addresses of those outside of all arguments)."""
        run = np.searchsorted(self.starts, addresses, "right") - 1
        inside = (run >= 0) & (addresses + size <= self.ends[run])
        first = (addresses - self.starts[run] + self.before[run])[inside]
        return (first[:, None] + np.arange(size)).ravel(), addresses[~inside]

    def place(self, address):
        """Text: the byte of the argument that an address is in, or nearest to."""

        def distance(argument):
            starts, ends = argument.runs().T
            return int(np.maximum(starts - address, address + 1 - ends).clip(0).min())

        return min(self.arguments, key=distance).place(address)

    def bytes_of(self, names):
        """bool [bytes]: which are in the arguments of these names."""
        within = np.zeros(len(self.at), bool)
        for start, end in (run for argument in self.arguments if argument.name in names for run in argument.runs()):
            first = self.numbers(np.array([start]), 1)[0][0]
            within[first : first + end - start] = True
        return within

    def place_of(self, number):
        return self.place(int(self.at[number] + self.starts[0]))

    def read(self):
        return self.whole[self.at]

    def write(self, numbers, content):
        self.whole[self.at[numbers]] = content[numbers]


class Launch:
    """One launch of a kernel: the programs that access each byte, and the order of the present run."""

    def __init__(self, kernel, arguments):
        self.kernel, self.memory, self.order = kernel, Memory(arguments), "as they are"
        self.grid, self.program, self.fault = (1, 1, 1), 0, ""
        shape = (2, len(self.memory.at))  # the first program that accesses a byte, and another one
        self.programs = {kind: np.full(shape, NONE, np.int32) for kind in KINDS}

    def name(self, program):
        return str(tuple(int(i) for i in np.unravel_index(program, self.grid)))

    @functools.cached_property
    def sequences(self):
        return {order: sequence(math.prod(self.grid)) for order, sequence in ORDERS.items()}

    def start(self, turn, grid):
        """The program whose turn it is: its place in the grid."""
        self.grid = grid
        self.program = int(self.sequences[self.order][np.ravel_multi_index(turn, grid)])
        return tuple(int(i) for i in np.unravel_index(self.program, grid))

    def access(self, kind, pointers, mask, size):
        """Note an access; raises before it is made outside of the arguments."""
        addresses = pointers.astype(np.int64)[mask]
        numbers, outside = self.memory.numbers(addresses.ravel(), size)
        if len(outside):
            self.fault = (
                f"{self.kernel}: program {self.name(self.program)} {kind} {size} bytes outside of the launch's "
                f"tensors, at {self.memory.place(int(outside[0]))}"
            )
            raise AssertionError(self.fault)
        if self.order == "as they are":
            first, other = self.programs[kind]
            there = first[numbers]
            first[numbers[there == NONE]] = self.program
            other[numbers[(there != NONE) & (there != self.program)]] = self.program

    def check_races(self, allowed):
        """Raise for races in bytes that are not in the arguments of the names `allowed`."""
        found, skipped = [], self.memory.bytes_of(allowed)
        for one, two in RACES:
            a, b = self.programs[one][:, None], self.programs[two][None]
            apart = (a != NONE) & (b != NONE) & (a != b) & ~skipped
            numbers = np.flatnonzero(apart.any((0, 1)))
            if len(numbers):
                number = numbers[0]
                i, j = np.argwhere(apart[:, :, number])[0]
                p, q = self.name(a[i, 0, number]), self.name(b[0, j, number])
                found.append(
                    f"{self.kernel}: program {p} {one} what program {q} {two}, {self.memory.place_of(number)}; "
                    f"{len(numbers)} bytes in all"
                )
        assert not found, "\n".join(found)

    def check_order(self, first, got, rtol):
        """Raise where the programs in another order left other bits; with an rtol, where other numbers."""
        differs = np.flatnonzero(got != first)
        if len(differs) and rtol is None:
            raise AssertionError(
                f"{self.kernel}: its programs {self.order} leave other bits at {self.memory.place_of(differs[0])}; "
                f"{len(differs)} bytes in all"
            )
        if len(differs):
            results = [argument.x.clone() for argument in self.memory.arguments]
            self.memory.write(differs, first)
            assert_close(results, [argument.x for argument in self.memory.arguments], rtol=rtol, atol=rtol)


class Watch:
    """What a watch has seen. grids: {kernel: those of its launches}."""

    def __init__(self, races, sums):
        self.races, self.sums, self.grids, self.leaves = races, sums, {}, {}
        self.launch: Any = None

    def arguments(self, given):
        """The tensors of a launch, and the leaves whose addresses are in its tables."""
        found = []
        for name, value in given.items():
            for part in value if isinstance(value, tuple) else (value,):
                x = getattr(part, "base", part)  # of a wrapper, or a descriptor
                found += [Argument(name, x.detach())] if isinstance(x, torch.Tensor) else []
        for table in [argument.x for argument in found if argument.x.dtype == torch.int64]:
            found += [self.leaves[address] for address in table.unique().tolist() if address in self.leaves]
        assert all(argument.x.device.type == "cpu" for argument in found), "what the interpreter runs is watched alone"
        return found

    def run(self, plain, executor, args, kwargs):
        """Run a launch in every order."""
        given, kernel = dict(zip(executor.arg_names, args)) | kwargs, executor.fn.__name__
        launch = self.launch = Launch(kernel, self.arguments(given))
        memory, before, first = launch.memory, launch.memory.read(), None
        try:
            for launch.order in ORDERS:
                plain(executor, *args, **kwargs)
                got = memory.read()
                if first is None:
                    first, written = got, np.flatnonzero(got != before)
                    launch.check_races([name for of, name in self.races if of == kernel])
                launch.check_order(first, got, self.sums.get(kernel))
                if math.prod(launch.grid) == 1:
                    break
                memory.write(written, before)
        except interpreter.InterpreterError as error:
            raise AssertionError(launch.fault) if launch.fault else error from None
        finally:
            self.launch = None
        memory.write(written, first)
        grid = launch.grid[: len(executor.grid)] if isinstance(executor.grid, tuple) else launch.grid
        self.grids.setdefault(kernel, set()).add(grid)

    def wrapped_launch(self, plain):
        return lambda executor, *args, **kwargs: self.run(plain, executor, args, kwargs)

    def wrapped_turn(self, plain):
        return lambda builder, *turn: plain(builder, *self.launch.start(turn, builder.grid_dim))

    def wrapped_access(self, plain, kind, pointers, mask):
        def access(builder, *given, **more):
            size = max(1, given[pointers].get_element_ty().primitive_bitwidth // 8)
            places = np.asarray(given[pointers].data)
            lanes = np.ones_like(places, bool) if mask is None else np.asarray(given[mask].data)
            self.launch.access(kind, places, lanes, size)
            return plain(builder, *given, **more)

        return access

    def wrapped_row(self, plain):
        def leaf_row(leaf, moments):
            state = {f"state {i}": x for i, x in enumerate(leaf.state)}
            for name, x in {"g": leaf.g, "p": leaf.p, "copy": leaf.copy, **state}.items():
                if x is not None:
                    self.leaves[x.data_ptr()] = Argument(f"{name} of a leaf", x.detach())
            return plain(leaf, moments)

        return leaf_row


@contextlib.contextmanager
def watched_programs(races=None, sums=None):
    """A context in which every launch of the interpreter is watched, given as a Watch.

    races: {(kernel, argument): why what programs do to one byte of it at once is no mistake}. sums: {kernel: the
    relative tolerance of numbers that it adds up atomically}, whose last bits depend on the order.
    """
    assert all((races or {}).values()), "a race is allowed for a reason"
    watch, builder = Watch(races or {}, sums or {}), interpreter.InterpreterBuilder
    patches = [
        (interpreter.GridExecutor, "__call__", watch.wrapped_launch),
        (builder, "set_grid_idx", watch.wrapped_turn),
        *((builder, name, functools.partial(watch.wrapped_access, kind=kind, pointers=pointers, mask=mask))
          for name, (kind, pointers, mask) in DOORS.items()),
        *((module, "leaf_row", watch.wrapped_row) for name, module in list(sys.modules.items())
          if name.startswith("fzero.kernels.") and hasattr(module, "leaf_row")),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for where, name, wrapped in patches:
            stack.enter_context(mock.patch.object(where, name, wrapped(getattr(where, name))))
        yield watch
