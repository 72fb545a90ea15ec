"""What tensor parallelism splits of a module's layers where nobody said it.

A group is some linear layers whose outputs are split (columns) and the one that they flow into, whose inputs are
(rows). Proof: a layer with random weights is run whole, and once for each rank with its part of the group. The ranks'
outputs must sum to the whole one's, and everything after it, and the gradients, must be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from inspect import unwrap
from itertools import combinations
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fzero.core import graph_tracing, pytree
from fzero.core.variable_snapshot import names_in
from fzero.models.base import Ctx
from fzero.models.module_tp import (
    CallContext,
    Cuts,
    Regions,
    Ways,
    calling,
    divided,
    draws_of,
    is_transposed,
    replaced,
    specs_of,
    split_dims,
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


class SplitGroup(NamedTuple):
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
    """({stack: what tp of this size splits}, a line about what was found, "" if nothing was looked for)."""
    declared = {
        stack: {name: way for name, way in layer_ways.items() if way in ("columns", "rows")}
        for stack, layer_ways in ways.items()
    }
    cuts, lines = {stack: Cuts(layer_ways) for stack, layer_ways in declared.items()}, []
    if not any("auto" in layer_ways.values() for layer_ways in ways.values()):
        return cuts, ""
    for stack, kinds in probes().items():
        free = [name for name, way in ways[stack].items() if way == "auto"]
        groups, reasons = groups_of(kinds, free, size)
        for group in groups:
            current = cuts[stack]
            cuts[stack] = Cuts({**current.ways, **group.cuts.ways}, (*current.divided, *group.numbers))
        several = f" of {stack}" if len(ways) > 1 else ""
        number = sum(len(group.columns) + 1 for group in groups)
        groups_text = f": {'; '.join(map(str, groups))}" if groups else ""
        uncut_text = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason(reasons).items())
        lines.append(
            f"splits {number} of {len(free)} linear layers{several} that no rule names{groups_text}"
            + (f". Whole: {uncut_text}" if uncut_text else "")
        )
    return cuts, "; ".join(lines)


def by_reason(reasons: dict[str, str]) -> dict[str, list[str]]:
    """The linear layers that have each reason."""
    return {reason: [name for name, text in reasons.items() if text == reason] for reason in reasons.values()}


def groups_of(kinds: list[Probe], free: list[str], size: int) -> tuple[list[SplitGroup], dict[str, str]]:
    """(the groups of linear layers that tp can split, reasons of the others)."""
    sources = sources_of(kinds[0])
    reasons = {name: "its outputs flow into no other linear layer alone" for name in free}
    reasons |= {name: "it is not called" for name in free if name not in sources}
    rows = [row for row in free if sources.get(row)]
    elements = {name: kinds[0].linears[name].get_parameter("weight").numel() for name in free}
    assigned: dict[str, SplitGroup] = {}
    tried: set[str] = set()

    def worth(row: str) -> int:
        return elements[row] + sum(elements[name] for name in sources[row] if name in elements)

    for row in sorted(rows, key=worth, reverse=True):  # the largest first, where several exclude each other
        columns = [name for name in free if name in sources[row] and name not in assigned]
        if row in assigned or not columns:
            continue
        try:
            group = first_equal(kinds, row, columns, size)
            assigned |= dict.fromkeys((*group.columns, group.row), group)
        except Unequal as reason:
            # Of a linear layer in several groups: as a column if it has more outputs than inputs, else as a row.
            affected = [name for name in columns if name not in tried or expands(kinds[0].linears[name])]
            affected += [row] if row not in tried or not expands(kinds[0].linears[row]) else []
            reasons |= dict.fromkeys(affected, str(reason))
            tried |= {row, *columns}
    groups = [group for group in dict.fromkeys(assigned.values())]
    return sorted(groups, key=lambda group: free.index(group.columns[0])), {
        name: text for name, text in reasons.items() if name not in assigned
    }


def expands(module: nn.Module) -> bool:
    """Whether a linear layer has more outputs than inputs."""
    out, size = module.get_parameter("weight").shape
    return (out < size) if is_transposed(module) else (out > size)


def first_equal(kinds: list[Probe], row: str, columns: list[str], size: int) -> SplitGroup:
    """The first group that equals a whole layer, large groups first; raises Unequal with a reason."""
    reason: Unequal | None = None
    for subset in subsets(columns[:MOST_COLUMNS]):
        max_divided = MOST_DIVIDED if len(subset) == len(columns) else 0
        for numbers in numbers_of(kinds[0].layer, (*subset, row), size, max_divided):
            group = SplitGroup(subset, row, numbers)
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


def numbers_of(
    layer: nn.Module, names: Iterable[str], size: int, max_numbers: int
) -> Iterator[tuple[tuple[str, str], ...]]:
    """None, one, up to `max_numbers` of the whole-number attributes, divisible by tp, that the code reads."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    numbers = [
        (owner, key)
        for owner in owners
        for key, value in vars(layer.get_submodule(owner)).items()
        if type(value) is int and value > 1 and value % size == 0 and key in read_by(type(layer.get_submodule(owner)))
    ]
    for count in range(max_numbers + 1):
        yield from combinations(numbers[:MOST_NUMBERS], count)


def read_by(kind: type) -> set[str]:
    """The names that the methods of a module's class use, but for its constructor."""
    classes = [cls for cls in kind.__mro__ if cls not in nn.Module.__mro__]
    methods = [f for cls in classes for name, f in vars(cls).items() if name != "__init__"]
    return {name for f in methods if isinstance(f, FunctionType) for name in names_in(unwrap(f).__code__)}


def sources_of(probe: Probe) -> dict[str, set[str]]:
    """{a linear layer that is called: those whose outputs flow into it without another one between}."""
    sources: dict[str, set[str]] = {}

    def follow(source: str, call: CallContext, name: str, forward: Callable[..., Tensor], x: Tensor) -> Tensor:
        sources.setdefault(name, set()).update({source} if x in call.parts else ())
        y = forward(x).clone()
        (call.parts.add if name == source else call.parts.remove)(y)
        return y

    for source in probe.linears:
        with torch.no_grad(), calling(Ctx(dtype=torch.float32), probe.rows, draws=draws_of) as call:
            followed = [
                (module, "forward", partial(follow, source, call, name, vars(module)["forward"]))
                for name, module in probe.linears.items()
            ]
            with replaced(followed), Regions(call):
                probe.call(probe.params)
    return sources


def gradients(total: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The gradients of a sum; 0 where it does not depend on a leaf."""
    return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))


class ProbeRun(NamedTuple):
    """A run of a layer: the products of the row layer, what follows, the result, parameters and inputs."""

    products: list[Tensor]
    row_outputs: list[Tensor]
    out: list[Tensor]
    leaves: dict[str, Tensor]

    def grads(self, seeds: list[Tensor]) -> dict[str, Tensor]:
        """The gradients of all leaves, from those of the products."""
        total = torch.stack([(y * g).sum() for y, g in zip(self.products, seeds)]).sum()
        return dict(zip(self.leaves, gradients(total, list(self.leaves.values()))))


def expect_equal(probe: Probe, group: SplitGroup, size: int) -> None:
    """Raise Unequal with the reason if the ranks' parts of a group are not the whole."""
    specs = specs_of(probe.layer, group.cuts)
    dims = {name: dim for name, text in specs.items() for dim in split_dims(text)}
    for name, dim in dims.items():
        if probe.params[name].shape[dim] % size:
            raise Unequal(f"{name} has {probe.params[name].shape[dim]} features, not divisible by tp={size}")
    shards = [
        {n: probe.params[n].chunk(size, dim)[rank].contiguous() for n, dim in dims.items()} for rank in range(size)
    ]
    with torch.no_grad():  # most of what cannot be split fails here
        run(probe, group, size, shards[0])
    full = run(probe, group, 1, {})
    total = torch.stack(
        [(y * torch.cos(torch.arange(float(y.numel()))).reshape(y.shape)).sum() for y in full.out]
    ).sum()
    # The gradient that the row layer's outputs get.
    seeds = gradients(total, full.row_outputs) if total.requires_grad else []
    if not any(map(torch.any, seeds)):
        raise Unequal(f"what the layer returns does not depend on {group.row}")
    parts = [run(probe, group, size, shard, full.row_outputs) for shard in shards]
    for piece in parts:
        expect_near("what the layer returns", piece.out, full.out)
        if len(piece.products) != len(full.products):
            raise Unequal(f"{group.row} is called more or less often with a part")
    for i, y in enumerate(full.products):
        expect_near(f"what {group.row} returns", [sum_of([piece.products[i] for piece in parts])], [y])
    full_grads, rank_grads = full.grads(seeds), [piece.grads(seeds) for piece in parts]
    # A gradient that is 0 but for rounding, such as that of a key's bias, is compared with the others' size.
    min_size = LEAST * max(map(size_of, full_grads.values()))
    for name, g in full_grads.items():
        pieces = [grads[name] for grads in rank_grads]
        combined = torch.cat(pieces, dims[name]) if name in dims else sum_of(pieces)
        expect_near(f"the gradient of {name}", [combined], [g], min_size)


def run(
    probe: Probe, group: SplitGroup, size: int, shards: Mapping[str, Tensor], row_outputs: Sequence[Tensor] = ()
) -> ProbeRun:
    """A layer, of which a rank has these parts of parameters; nothing follows from what the row layer returns but by
    `row_outputs`, those of a whole layer, or ones like its own.

    Raises Unequal with the line where the layer fails.
    """
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in {**probe.params, **shards}.items()}
    inputs, treedef = pytree.flatten((probe.args, probe.kwargs))
    for i, leaf in enumerate(inputs):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            inputs[i] = leaves[f"input {i}"] = leaf.detach().clone().requires_grad_()
    args, kwargs = pytree.unflatten(inputs, treedef)
    products: list[Tensor] = []
    cut_outputs = list(row_outputs)
    layer = probe.linears[group.row]

    def row(x: Tensor) -> Tensor:
        if shards and x not in call.parts:
            raise Unequal(f"the inputs of {group.row} are not followed to {', '.join(group.columns)}")
        w, bias = cast(Tensor, layer.weight), cast(Tensor | None, getattr(layer, "bias", None))
        products.append(F.linear(x, w.t() if is_transposed(layer) else w))
        if len(products) > len(cut_outputs):
            cut_outputs.append(products[-1].detach().requires_grad_())
        # Whole again, and a tensor of its own.
        y = cut_outputs[len(products) - 1].clone()
        y = y if bias is None else y + bias.detach()
        call.parts.remove(y)
        return y

    try:
        with calling(Ctx(dtype=torch.float32), probe.rows, cuts=group.cuts, draws=draws_of) as call:
            call.parts.add([leaves[name] for name in shards])
            with divided(probe.layer, group.cuts, size), replaced([(layer, "forward", row)]), Regions(call):
                out = probe._replace(args=args, kwargs=kwargs).call({n: leaves[n] for n in probe.params})
    except Unequal:
        raise
    except Exception as error:  # whatever the module's own code raises for other shapes
        location, text = graph_tracing.line(error), str(error).strip().split("\n")[0]
        raise Unequal(": ".join(filter(None, (location, text)))) from error
    outputs = [leaf for leaf in pytree.leaves(out) if isinstance(leaf, Tensor)]
    if any(leaf in call.parts for leaf in outputs):
        raise Unequal("a part of its outputs leaves the layer")
    return ProbeRun(products, cut_outputs, [leaf for leaf in outputs if leaf.is_floating_point()], leaves)


def sum_of(tensors: list[Tensor]) -> Tensor:
    """The sum of the ranks' tensors; raises Unequal if their shapes differ."""
    if len({leaf.shape for leaf in tensors}) > 1:
        raise Unequal("the ranks' parts have other shapes")
    return torch.stack(tensors).sum(0)


def size_of(x: Tensor) -> float:
    """The size of the largest element."""
    return float(x.detach().abs().max()) if x.numel() else 0.0


def expect_near(subject: str, actual: list[Tensor], expected: list[Tensor], min_size: float = 0.0) -> None:
    """Raise Unequal unless tensors equal others, but for rounding; min_size: their least size."""
    for x, y in zip(actual, expected):
        if x.shape != y.shape:
            raise Unequal(f"{subject} is {list(x.shape)} and whole {list(y.shape)}")
        distance = size_of(x - y) / (max(size_of(y), min_size) or 1.0)
        if not distance <= MOST:
            raise Unequal(f"{subject} differs from a whole one's by {distance:.0e}")
