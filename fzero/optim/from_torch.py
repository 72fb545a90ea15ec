"""An optimizer class of torch, or anyone's, as a transformation: its own step runs on pieces of the leaves.

What the class keeps is found by running it on a small parameter: tensors of its shape become trees of the state, single
numbers are one for all leaves. A class whose step on two parts has not the bits of its step on the whole is refused.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.device import kind_of
from fzero.core.pytree import Tree
from fzero.optim.base import GradientTransformation, Pass, Schedule, distinct, lr_at
from fzero.optim.combine import Mask, check_mask, decay_predicate
from fzero.optim.leafwise import flat_pieces, rows_of, without_partial
from fzero.sharding.spec import Spec

NUMBERS = {int: torch.int64, float: torch.float64, bool: torch.bool}


class TorchState(NamedTuple):
    """The state of `from_torch`.

    >>> from_torch(torch.optim.SGD, 0.1, momentum=0.9).init({"w": torch.zeros(2)})
    TorchState(count=tensor(0), numbers={}, slots={'momentum_buffer': {'w': tensor([0., 0.])}})
    """

    count: Tensor  # int64 0-dim: steps made
    numbers: dict[str, Tensor]  # by the class's names: 0-dim, one for all leaves
    slots: dict[str, Tree]  # by the class's names: like the params


class InitialState(NamedTuple):
    """The state that a class keeps for a parameter, before its first step."""

    numbers: dict[str, tuple[Tensor, type | None]]  # (value, the Python type if it is no tensor)
    slots: dict[str, float | None]  # the number that it is filled with; None: a copy of the parameter


@checked("kind")
def from_torch(
    kind: Callable[..., torch.optim.Optimizer],
    lr: float | Tensor | Schedule | None = None,
    *,
    mask: Mask = None,
    **options: Any,
) -> GradientTransformation:
    """Return the transformation that an elementwise torch.optim.Optimizer class makes, with its own arithmetic.

    u = the parameter after kind([parameter], lr=lr, **options).step(), minus the parameter before. `apply` gives the
    very bits of the class, in place, piece by piece.

    kind: SGD, Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad, Adadelta, Adamax, ASGD or Rprop of torch.optim, or a class
    of your own whose step treats every element alike. lr: a number, a 0-dim tensor, or a schedule; None is the class's
    default. mask: which leaves have the option weight_decay (a regex over names, a predicate (name, leaf), None for
    all). options: of the class. The state is kept in the parameters' dtype.

    On a GPU a schedule's number is awaited once a step. The class runs outside of torch.func: no vmap, no gradient
    through the update.
    Raises ValueError for a class that is not elementwise (LBFGS, Muon, Adafactor, SparseAdam) or whose first step
    differs from the others (SGD with dampening), and TypeError for what is no such class; what it says of options.

    >>> tx, params = from_torch(torch.optim.RMSprop, 0.1, alpha=0.75), {"w": torch.tensor([1.0, 1.0])}
    >>> updates, state = tx.update({"w": torch.tensor([2.0, -8.0])}, tx.init(params), params)
    >>> updates["w"]  # -0.1 g / √(0.25 g²)
    tensor([-0.2000,  0.2000])
    """
    if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
        label = f"a {type(kind).__name__}" if isinstance(kind, torch.optim.Optimizer) else repr(kind)
        raise TypeError(f"from_torch: {label} is no class of torch.optim; write from_torch(torch.optim.AdamW, 1e-3)")
    decays = decay_predicate(mask)
    if lr is None:
        lr = float(kind([torch.zeros(1)], **options).defaults["lr"])
    make = functools.partial(kind, **options)
    initial_state = probe(kind.__name__, functools.partial(make, lr=0.1 if callable(lr) else float(lr)))
    other_state = probe(kind.__name__, functools.partial(make, lr=0.2)) if callable(lr) else None
    if other_state is not None and initial_values(other_state) != initial_values(initial_state):
        raise ValueError(f"from_torch: the state of {kind.__name__} begins with its learning rate; give lr as a number")

    def init(params: Tree) -> Tree:
        check_mask(f"from_torch({kind.__name__})", mask)(params)
        leaves = pytree.leaves(params)
        device = leaves[0].device if leaves else None
        slots = {
            name: pytree.map(lambda p, v=value: slot_of(p, v), params) for name, value in initial_state.slots.items()
        }
        numbers = {name: value.to(device, copy=True) for name, (value, _) in initial_state.numbers.items()}
        return TorchState(torch.zeros((), dtype=torch.int64, device=device), numbers, slots)

    def spec(specs: Tree) -> Tree:
        state: Any = TorchState  # of Specs in the places of tensors
        slots = {name: pytree.map(without_partial, specs) for name in initial_state.slots}
        return state(Spec(), dict.fromkeys(initial_state.numbers, Spec()), slots)

    @torch.no_grad()
    def in_place(grads: Tree, state: Tree, params: Tree, options: Pass) -> tuple[Tree, Tree]:
        if not options.adds:
            return update(grads, state, params)
        names = list(initial_state.slots)
        pieces: dict[bool, list[Sequence[Tensor]]] = {True: [], False: []}
        for row in rows_of(distinct(grads), [state.slots[name] for name in names], params):
            cut = flat_pieces(row.name, (row.g.to(row.p.dtype), *row.slots, row.p))
            pieces[decays(row.name, row.p)].extend(cut)
        # Numbers move without a leaf as well, as on ranks that have one.
        if initial_state.numbers and not any(pieces.values()):
            pieces[True] = [[state.count.new_zeros(1, dtype=torch.float32) for _ in ("g", *names, "p")]]
        rate = float(lr_at(lr, state.count)) if callable(lr) else float(lr)
        numbers = (
            run(make, initial_state, rate, pieces, names, state.numbers) if any(pieces.values()) else state.numbers
        )
        return params, TorchState(state.count + 1, numbers, state.slots)

    @torch.no_grad()
    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        new = pytree.map(lambda p: p.clone(memory_format=torch.contiguous_format), params)
        slots = pytree.map(lambda s: s.clone(memory_format=torch.contiguous_format), state.slots)
        new, state = in_place(pytree.map(torch.clone, grads), state._replace(slots=slots), new, Pass())
        return pytree.map(lambda new_param, param: new_param - param, new, params), state

    return GradientTransformation(init, update, spec, unit="row", in_place=in_place)


def slot_of(p: Tensor, value: float | None) -> Tensor:
    """A slot before the first step: filled with a number, or (None) a copy of the parameter."""
    return p.clone() if value is None else p.new_full(p.shape, value) if not p.is_meta else p.new_zeros(p.shape)


def run(
    make: Callable[..., torch.optim.Optimizer],
    initial_state: InitialState,
    lr: float,
    pieces: Mapping[bool, Sequence[Sequence[Tensor]]],
    names: Sequence[str],
    numbers: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """One step of the class on (g, *slots, p), which it overwrites; returns its numbers after it.

    pieces: those that decay, and those that do not.
    """
    groups, leaf_slots = [], {}
    for decay, tensors in pieces.items():
        leaves = []
        for g, *slots, p in tensors:
            leaf = p.detach()
            leaf.grad = g
            leaves.append(leaf)
            leaf_slots[leaf] = dict(zip(names, slots))
        groups += [{"params": leaves, **({} if decay else {"weight_decay": 0.0})}] if leaves else []
    device = next(iter(leaf_slots)).device
    optimizer = make(groups, lr=lr)
    if kind_of(next(iter(leaf_slots))) != "cpu" and "capturable" in optimizer.defaults:
        for group in optimizer.param_groups:  # its counts are on the device, and not waited for
            group["capturable"] = True
    for leaf, slots in leaf_slots.items():
        values = {
            n: v.clone() if py is None else py(v.item()) for n, (v, py) in with_values(initial_state, numbers).items()
        }
        optimizer.state[leaf] = {**values, **slots}
    optimizer.step()
    for leaf, slots in leaf_slots.items():
        for name, slot in slots.items():
            result = optimizer.state[leaf][name]
            if result is not slot:  # the class made a new tensor
                slot.copy_(result)
    result = optimizer.state[next(iter(leaf_slots))]
    return {n: torch.as_tensor(result[n], dtype=v.dtype, device=device) for n, (v, _) in initial_state.numbers.items()}


def with_values(initial_state: InitialState, numbers: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, type | None]]:
    """The numbers of a state with the types in which the class keeps them."""
    return {name: (numbers[name], python) for name, (_, python) in initial_state.numbers.items()}


def initial_values(initial_state: InitialState) -> tuple[list[float], list[float | None]]:
    """The values that a state begins with."""
    return [float(value) for value, _ in initial_state.numbers.values()], list(initial_state.slots.values())


class _First(dict[str, Any]):
    """The state of a parameter, which remembers the first value of each entry."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
        super().__setitem__(key, value)


def probe(name: str, make: Callable[..., torch.optim.Optimizer]) -> InitialState:
    """The state that a class keeps, found by steps on a small parameter; raises ValueError if parts give other bits."""
    draw = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(4, 6, generator=draw).double() for _ in range(4))
    full = start.clone()
    optimizer = make([full])
    try:
        records: defaultdict[Tensor, _First] = defaultdict(_First)
        if full in optimizer.state:  # made by the constructor
            for key, value in optimizer.state[full].items():
                records[full][key] = value
        optimizer.state = records
        for g in grads:
            full.grad = g.clone()
            optimizer.step()
    except (TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(f"from_torch: {name} cannot step on gradients alone: {_line(error)}") from None
    first = {key: value for key, value in records[full].first.items() if records[full][key] is not None}
    initial_state = InitialState({}, {})
    for key, value in first.items():
        if isinstance(value, Tensor) and value.shape == start.shape:
            # What is no constant is made by the first step: zero before it, if the comparison below agrees.
            constant = bool((value == value.flatten()[0]).all())
            initial_state.slots[key] = (
                float(value.flatten()[0]) if constant else None if torch.equal(value, start) else 0.0
            )
        elif isinstance(value, Tensor) and value.dim() == 0:
            initial_state.numbers[key] = (value, None)
        elif type(value) in NUMBERS:
            initial_state.numbers[key] = (torch.tensor(value, dtype=NUMBERS[type(value)]), type(value))
        else:
            raise ValueError(f"from_torch: {name} is not elementwise: it keeps {key!r}, a {_shape_of(value)}")
    for dim in (0, 1):
        halves = [half.clone() for half in start.split(2, dim)]
        slots = [[slot_of(half, value) for value in initial_state.slots.values()] for half in halves]
        numbers = {key: value for key, (value, _) in initial_state.numbers.items()}
        for g in grads:
            half_pieces = [(g, *s, p) for g, s, p in zip((x.clone() for x in g.split(2, dim)), slots, halves)]
            numbers = run(
                lambda groups, lr: make(groups),
                initial_state,
                0.0,
                {True: half_pieces},
                list(initial_state.slots),
                numbers,
            )
        if not torch.equal(torch.cat(halves, dim), full):
            raise ValueError(
                f"from_torch: {name} with these options is not elementwise, or its first step differs from the others; "
                "write a GradientTransformation, or use one of fzero.optim"
            )
    return initial_state


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _shape_of(value: Any) -> str:
    return f"tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
