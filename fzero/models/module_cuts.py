"""What tensor parallelism splits of a module's layers where nobody said it: found by where the outputs of its linear
layers flow, and proved on numbers.

A group is some linear layers whose outputs are split (columns) and the one that they flow into, whose inputs are
(rows). Proof: a layer with random weights is run whole, and once for each rank with that rank's part of the group. The
ranks' outputs of the row layer must sum to the whole one's, everything after it must be the same, and the gradients of
every parameter and input too. Nothing is communicated: up to the row layer no rank needs another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from inspect import unwrap
from itertools import combinations
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fzero.core import graph_cut, pytree
from fzero.core.readings import names_in
from fzero.models.base import Ctx
from fzero.models.module_calls import (
    Cuts,
    Parts,
    Regions,
    Ways,
    calling,
    divided,
    draws_of,
    is_transposed,
    replaced,
    specs_of,
)

MOST = 1e-4  # the largest difference in float32 over the largest element
LEAST = 1e-2  # of the largest gradient: the least size that a difference of another one is compared with
MOST_NUMBERS, MOST_COLUMNS = 8, 6  # of attributes, and of linear layers, whose subsets are tried
MOST_DIVIDED = 3  # attributes at once


class Probe(NamedTuple):
    """A layer with random numbers in it, as it is called."""

    layer: nn.Module
    linears: Mapping[str, nn.Module]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    args: Any
    kwargs: Any
    rows: int  # samples in the batch

    def call(self, params: Mapping[str, Tensor]) -> Any:
        """What the layer returns with these parameters."""
        return torch.func.functional_call(self.layer, {**params, **self.buffers}, self.args, self.kwargs)


class Group(NamedTuple):
    """Linear layers that are split together, and the numbers of their modules that are divided with them."""

    columns: tuple[str, ...]
    row: str
    numbers: tuple[tuple[str, str], ...] = ()

    @property
    def cuts(self) -> Cuts:
        """The group as Cuts."""
        return Cuts({**dict.fromkeys(self.columns, "columns"), self.row: "rows"}, self.numbers)

    def __str__(self) -> str:
        numbers = ", ".join(".".join(filter(None, number)) for number in self.numbers)
        return f"{', '.join(self.columns)} -> {self.row}" + (f" ({numbers} divided)" if numbers else "")


class Unequal(Exception):
    """Why a group cannot be split."""


def find_cuts(
    ways: Mapping[str, Ways], probes: Callable[[], Mapping[str, list[Probe]]], size: int
) -> tuple[dict[str, Cuts], str]:
    """({stack: what tp of this size splits}, a line about what was found, "" if nothing was looked for).

    ways: {stack: {linear layer: way}}; those that are "auto" are looked for. probes: makes the layers of each kind of a
    stack; without any, nothing is found.
    """
    said = {
        stack: {name: way for name, way in some.items() if way in ("columns", "rows")} for stack, some in ways.items()
    }
    cuts, lines = {stack: Cuts(some) for stack, some in said.items()}, []
    if not any("auto" in some.values() for some in ways.values()):
        return cuts, ""
    for stack, kinds in probes().items():
        free = [name for name, way in ways[stack].items() if way == "auto"]
        groups, whole = groups_of(kinds, free, size)
        for group in groups:
            known = cuts[stack]
            cuts[stack] = Cuts({**known.ways, **group.cuts.ways}, (*known.divided, *group.numbers))
        several = f" of {stack}" if len(ways) > 1 else ""
        number = sum(len(group.columns) + 1 for group in groups)
        found = f": {'; '.join(map(str, groups))}" if groups else ""
        left = "; ".join(f"{', '.join(names)} ({why})" for why, names in by_reason(whole).items())
        lines.append(
            f"splits {number} of {len(free)} linear layers{several} that no rule names{found}"
            + (f". Whole: {left}" if left else "")
        )
    return cuts, "; ".join(lines)


def by_reason(whole: dict[str, str]) -> dict[str, list[str]]:
    """The linear layers that have each reason."""
    return {why: [name for name, other in whole.items() if other == why] for why in whole.values()}


def groups_of(kinds: list[Probe], free: list[str], size: int) -> tuple[list[Group], dict[str, str]]:
    """(the groups of linear layers that tp can split, the reasons of those that stay whole), of a stack's layers."""
    sources = sources_of(kinds[0])
    whole = {name: "its outputs flow into no other linear layer alone" for name in free}
    whole |= {name: "it is not called" for name in free if name not in sources}
    rows = [row for row in free if sources.get(row)]
    elements = {name: kinds[0].linears[name].get_parameter("weight").numel() for name in free}
    taken: dict[str, Group] = {}
    tried: set[str] = set()

    def worth(row: str) -> int:
        return elements[row] + sum(elements[name] for name in sources[row] if name in elements)

    for row in sorted(rows, key=worth, reverse=True):  # the largest first, where several exclude each other
        columns = [name for name in free if name in sources[row] and name not in taken]
        if row in taken or not columns:
            continue
        try:
            group = first_equal(kinds, row, columns, size)
            taken |= dict.fromkeys((*group.columns, group.row), group)
        except Unequal as reason:
            # Of a linear layer in several groups: as a column if it has more outputs than inputs, else as a row.
            said = [name for name in columns if name not in tried or expands(kinds[0].linears[name])]
            said += [row] if row not in tried or not expands(kinds[0].linears[row]) else []
            whole |= dict.fromkeys(said, str(reason))
            tried |= {row, *columns}
    groups = [group for group in dict.fromkeys(taken.values())]
    return sorted(groups, key=lambda group: free.index(group.columns[0])), {
        name: why for name, why in whole.items() if name not in taken
    }


def expands(one: nn.Module) -> bool:
    """Whether a linear layer has more outputs than inputs."""
    out, size = one.get_parameter("weight").shape
    return (out < size) if is_transposed(one) else (out > size)


def first_equal(kinds: list[Probe], row: str, columns: list[str], size: int) -> Group:
    """The first group that equals a whole layer: with all of the columns before fewer, and with few numbers divided;
    raises Unequal with the reason of the largest one.
    """
    reason: Unequal | None = None
    for some in subsets(columns[:MOST_COLUMNS]):
        most = MOST_DIVIDED if len(some) == len(columns) else 0
        for numbers in numbers_of(kinds[0].layer, (*some, row), size, most):
            group = Group(some, row, numbers)
            try:
                for probe in kinds:
                    expect_equal(probe, group, size)
                return group
            except Unequal as error:
                reason = reason or error
    assert reason is not None
    raise reason


def subsets(columns: list[str]) -> Iterator[tuple[str, ...]]:
    """All subsets with something in them, the largest first."""
    for number in range(len(columns), 0, -1):
        yield from combinations(columns, number)


def numbers_of(layer: nn.Module, names: Iterable[str], size: int, most: int) -> Iterator[tuple[tuple[str, str], ...]]:
    """None, one, and up to `most` of the whole-number attributes, divisible by tp, that the code of the modules reads
    which linear layers are in: the number of heads is there, unless it writes -1.
    """
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    numbers = [
        (owner, key)
        for owner in owners
        for key, value in vars(layer.get_submodule(owner)).items()
        if type(value) is int and value > 1 and value % size == 0 and key in read_by(type(layer.get_submodule(owner)))
    ]
    for few in range(most + 1):
        yield from combinations(numbers[:MOST_NUMBERS], few)


def read_by(kind: type) -> set[str]:
    """The names that the methods of a module's class use, but for its constructor."""
    own = [one for one in kind.__mro__ if one not in nn.Module.__mro__]
    methods = [f for one in own for name, f in vars(one).items() if name != "__init__"]
    return {name for f in methods if isinstance(f, FunctionType) for name in names_in(unwrap(f).__code__)}


class Origins(TorchFunctionMode):
    """A mode in which a result comes from the linear layers that what it is computed with comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, Parts] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for name in self.names(args, kwargs):
            # What is written into comes from there too.
            self.of[name].add((out, args[:1] if func in WRITES or getattr(func, "__name__", "").endswith("_") else ()))
        return out

    def names(self, *trees: Any) -> list[str]:
        """The linear layers that something in these trees comes from."""
        leaves = [leaf for leaf in pytree.leaves(trees) if isinstance(leaf, Tensor)]
        return [name for name, some in self.of.items() if any(leaf in some for leaf in leaves)]


WRITES = {Tensor.__setitem__}


def sources_of(probe: Probe) -> dict[str, set[str]]:
    """{a linear layer that is called: those whose outputs flow into it without another one between}."""
    found: dict[str, set[str]] = {}
    origins = Origins()

    def note(name: str, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
        found.setdefault(name, set()).update(origins.names(x))
        y = forward(x).clone()
        for some in origins.of.values():
            some.remove(y)
        origins.of.setdefault(name, Parts()).add(y)
        return y

    noted = [(one, "forward", partial(note, name, vars(one)["forward"])) for name, one in probe.linears.items()]
    with torch.no_grad(), calling(Ctx(dtype=torch.float32), probe.rows, draws=draws_of), replaced(noted), origins:
        probe.call(probe.params)
    return found


class Pass(NamedTuple):
    """A run of a layer: the products of the row layer, what the layer returns, and the gradients of both together."""

    products: list[Tensor]
    out: list[Tensor]
    grads: dict[str, Tensor]


def expect_equal(probe: Probe, group: Group, size: int) -> None:
    """Raise Unequal with the reason if the ranks' parts of a group are not the whole."""
    specs = specs_of(probe.layer, group.cuts)
    dims = {name: text.split(", ").index(part) - 1 for name, text in specs.items() for part in split_dims(text)}
    for name, dim in dims.items():
        if probe.params[name].shape[dim] % size:
            raise Unequal(f"{name} has {probe.params[name].shape[dim]} features, not divisible by tp={size}")
    mine = [{n: probe.params[n].chunk(size, dim)[rank].contiguous() for n, dim in dims.items()} for rank in range(size)]
    with torch.no_grad():  # most of what cannot be split fails here
        run(probe, group, size, {**probe.params, **mine[0]}, mine[0], [], [])
    whole = run(probe, group, 1, probe.params, {}, [], [])
    weights = [torch.cos(torch.arange(float(y.numel()))).reshape(y.shape) for y in whole.out]
    given = [y.detach().requires_grad_() for y in whole.products]
    # The gradient that the row layer's outputs get, from a run with them as inputs.
    after = run(probe, group, 1, probe.params, {}, given, [])
    total = torch.stack([(y * w).sum() for y, w in zip(after.out, weights)]).sum()
    seeds = [
        torch.zeros_like(y) if g is None else g
        for y, g in zip(given, torch.autograd.grad(total, given, allow_unused=True) if total.requires_grad else ())
    ]
    if not seeds or not any(map(torch.any, seeds)):
        raise Unequal(f"what the layer returns does not depend on {group.row}")
    whole = run(probe, group, 1, probe.params, {}, given, seeds)
    parts = [run(probe, group, size, {**probe.params, **one}, one, given, seeds) for one in mine]
    for part in parts:
        expect_near("what the layer returns", part.out, whole.out)
        if len(part.products) != len(whole.products):
            raise Unequal(f"{group.row} is called more or less often with a part")
    for i, y in enumerate(whole.products):
        expect_near(f"what {group.row} returns", [sum_of([part.products[i] for part in parts])], [y])
    # A gradient that is 0 but for rounding, such as that of a key's bias, is compared with the others' size.
    least = LEAST * max(size_of(g) for g in whole.grads.values())
    for name, g in whole.grads.items():
        some = [part.grads[name] for part in parts]
        together = torch.cat(some, dims[name]) if name in dims else sum_of(some)
        expect_near(f"the gradient of {name}", [together], [g], least)


def split_dims(text: str) -> list[str]:
    """The dims of a spec's text that tp splits."""
    return [part for part in text.split(", ") if "/tp" in part]


def run(
    probe: Probe,
    group: Group,
    size: int,
    params: Mapping[str, Tensor],
    mine: Mapping[str, Tensor],
    given: list[Tensor],
    seeds: list[Tensor],
) -> Pass:
    """A layer with these parameters, of which some are a rank's part.

    given: what takes the place of the row layer's products in the rest of the layer; none: they do. seeds: the
    gradients of the products, from which those of all parameters and inputs are made; none: none are.
    Raises Unequal with the line where the layer fails.
    """
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
    inputs, treedef = pytree.flatten((probe.args, probe.kwargs))
    for i, leaf in enumerate(inputs):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            inputs[i] = leaves[f"input {i}"] = leaf.detach().clone().requires_grad_()
    args, kwargs = pytree.unflatten(inputs, treedef)
    products: list[Tensor] = []
    layer = probe.linears[group.row]

    def row(x: Tensor) -> Tensor:
        if mine and x not in call.parts:
            raise Unequal(f"the inputs of {group.row} are not followed to {', '.join(group.columns)}")
        w, bias = cast(Tensor, layer.weight), cast(Tensor | None, getattr(layer, "bias", None))
        y = F.linear(x, w.t() if is_transposed(layer) else w)
        products.append(y)
        if len(products) <= len(given):
            y = given[len(products) - 1]
        # Whole again, and a tensor of its own.
        y = y.clone() if bias is None else y + bias.detach()
        call.parts.remove(y)
        return y

    try:
        with calling(Ctx(dtype=torch.float32), probe.rows, cuts=group.cuts, draws=draws_of) as call:
            call.parts.add([leaves[name] for name in mine])
            with divided(probe.layer, group.cuts, size), replaced([(layer, "forward", row)]), Regions(call):
                out = probe._replace(args=args, kwargs=kwargs).call({n: leaves[n] for n in params})
        found = [leaf for leaf in pytree.leaves(out) if isinstance(leaf, Tensor)]
        if any(leaf in call.parts for leaf in found):
            raise Unequal("a part of its outputs leaves the layer")
        grads = {}
        if seeds:
            total = torch.stack([(y * g).sum() for y, g in zip(products, seeds)]).sum()
            some = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
            grads = {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), some)}
        return Pass(products, [leaf for leaf in found if leaf.is_floating_point()], grads)
    except Unequal:
        raise
    except Exception as error:  # whatever the module's own code raises for other shapes
        at, text = graph_cut.line(error), str(error).strip().split("\n")[0]
        raise Unequal(": ".join(filter(None, (at, text)))) from error


def sum_of(some: list[Tensor]) -> Tensor:
    """The sum of the ranks' tensors; raises Unequal if their shapes differ."""
    if len({leaf.shape for leaf in some}) > 1:
        raise Unequal("the ranks' parts have other shapes")
    return torch.stack(some).sum(0)


def size_of(x: Tensor) -> float:
    """The size of the largest element."""
    return float(x.detach().abs().max()) if x.numel() else 0.0


def expect_near(what: str, found: list[Tensor], expected: list[Tensor], least: float = 0.0) -> None:
    """Raise Unequal unless tensors equal others, but for rounding. least: what counts as their size if it is less."""
    for x, y in zip(found, expected):
        if x.shape != y.shape:
            raise Unequal(f"{what} is {list(x.shape)} and whole {list(y.shape)}")
        apart = size_of(x - y) / (max(size_of(y), least) or 1.0)
        if not apart <= MOST:
            raise Unequal(f"{what} differs from a whole one's by {apart:.0e}")
