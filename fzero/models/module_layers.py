"""The repeated layers of an nn.Module, one of each kind without memory, and its buffers.

Layers are alike, and one stack, if they are made of the same modules with the same leaves. Those whose other attributes
differ (a window, a rate) are of several kinds, each a program of its own. Attributes that count the layers
(`layer_idx`) make no kind; no forward pass may use them.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from fzero.core import graph_tracing
from fzero.core.pytree import nearest


class Constants:
    """Tensors that no training changes, kept on the devices where they are used."""

    # saved: the names of those that a state_dict has: the floating ones of them are weights, and have the dtype of the
    # computation. The others, such as the frequencies of rotary embeddings, keep the dtype that the module gave them.
    def __init__(self, leaves: dict[str, Tensor], saved: Collection[str]):
        self.leaves = leaves
        self.weights = {name for name, leaf in leaves.items() if name in saved and leaf.is_floating_point()}
        self.by_device: dict[Any, dict[str, Tensor]] = {}

    def to_device(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors on a device, for a computation in this dtype."""
        if (device, dtype) not in self.by_device:
            with graph_tracing.outside_transforms(), torch.no_grad():
                self.by_device[device, dtype] = {
                    name: leaf.to(device, self.dtype_of(name, dtype)) for name, leaf in self.leaves.items()
                }
        return self.by_device[device, dtype]

    def blank(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The same without memory and values."""
        return {n: blank({n: x}, device, self.dtype_of(n, dtype))[n] for n, x in self.leaves.items()}

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a tensor for a computation in `dtype`."""
        return dtype if name in self.weights else self.leaves[name].dtype


def stacked_buffers(module: nn.Module, layers: Sequence[str], saved: Collection[str]) -> Constants:
    """The buffers of a stack's layers, [L, ...], or [1, ...] where all are equal."""
    names = [name for name, _ in module.get_submodule(layers[0]).named_buffers()]
    stacked = {name: torch.stack([module.get_buffer(f"{layer}.{name}").detach() for layer in layers]) for name in names}
    buffers = {name: x[:1] if (x == x[:1]).all() else x for name, x in stacked.items()}
    return Constants(buffers, {name for name in names if f"{layers[0]}.{name}" in saved})


def blank(tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Tensors of these shapes without memory, floating ones in `dtype`."""

    def expand_blank(x: Tensor) -> Tensor:
        kind = dtype if dtype is not None and x.is_floating_point() else x.dtype
        return torch.zeros((), dtype=kind, device=device).expand(x.shape)

    return {name: expand_blank(x) for name, x in tensors.items()}


def layer_buffer(stacked: Tensor, layer: Any, first: int) -> Tensor:
    """The buffer of a layer by its number, or the one that all share."""
    return stacked[0] if stacked.shape[0] == 1 else stacked.index_select(0, (layer - first).reshape(1))[0]


def any_numbers(shape: Sequence[int], rows: int | None = None) -> Tensor:
    """Random numbers of the size of weights, in so many rows that repeat."""
    if len(shape) < 2:
        return 0.5 + 0.5 * torch.randn(shape)
    short_shape = (shape[0] if rows is None else min(rows, shape[0]), *shape[1:])
    return (torch.randn(short_shape) / shape[-1] ** 0.5).expand(shape)


NEAR = 1e-3  # of the largest number: what products of other shapes may differ by in float32


def any_rows(shape: torch.Size) -> Tensor:
    """Random numbers in place of a leaf, with the memory of a row and a column."""
    if len(shape) != 2:
        return any_numbers(shape)
    return torch.randn(shape[0] + shape[1]).as_strided(tuple(shape), (1, 1))


def differ(a: Tensor, b: Tensor) -> bool:
    """Whether numbers differ by more than rounding."""
    return not bool((a - b).abs().max() <= NEAR * b.abs().max())


class CannotSplit(ValueError):
    """The reason why a module cannot be cut into layers; it can still be trained whole."""


class Layers(NamedTuple):
    """The layers of a module that become one stack."""

    names: tuple[str, ...]  # of the modules, in the order of a forward pass
    kinds: tuple[int, ...]  # the kind of each layer, counted in the order in which they first come
    counts: tuple[tuple[str, str], ...]  # (module within a layer, its attribute) that only count the layers

    @property
    def turns(self) -> tuple[int, ...]:
        """The shortest series of kinds that the layers take in turn."""
        kinds = self.kinds
        periods = (n for n in range(1, len(kinds) + 1) if all(k == kinds[i % n] for i, k in enumerate(kinds)))
        return kinds[: next(periods)]

    def first(self, kind: int) -> str:
        """The name of the first layer of a kind."""
        return self.names[self.kinds.index(kind)]


Stacks = dict[str, Layers]  # by the name of the stack in the parameter tree, in the order of a forward pass
LEAST = 0.1  # of the parameters of the largest stack, that a second one has


def choices(module: nn.Module, paths: str | Sequence[str] | None = None) -> list[Stacks]:
    """The ways to see a module as stacks of layers, the best first; raises CannotSplit or ValueError."""
    lists = {
        name: {key: child for key, child in child._modules.items() if child is not None}
        for name, child in module.named_modules()
        if is_list(child)
    }
    if paths is not None:
        return [named([full_list(module, path, lists) for path in ([paths] if isinstance(paths, str) else paths)])]
    runs = [run for name, children in lists.items() for run in runs_of(name, children)]
    if not runs:
        unlike = next(((name, children) for name, children in lists.items() if len(children) > 1), None)
        reason = "it has no ModuleList or Sequential of layers"
        if unlike is not None:
            name, (first, second, *_) = unlike[0], unlike[1].values()
            reason = f"in {name or 'the module'}, layer 1 is not like layer 0: {difference(first, second).leaves}"
        raise CannotSplit(reason)
    # The first of the largest: an outer list before the lists within it.
    largest = max(runs, key=lambda run: run[0])
    several: list[list[str]] = []
    for size, names in sorted(runs, key=lambda run: -run[0]):
        disjoint = not any(
            a == b or is_within(a, b) or is_within(b, a) for entries in several for a in entries for b in names
        )
        if disjoint and size >= LEAST * largest[0]:
            several.append(names)
    order = [run[1] for run in runs if run[1] in several]
    ways = [order, *([names] for names in several)] if len(several) > 1 else [order]
    stack_choices = [named([checked(module, names) for names in entries]) for entries in ways]
    fit, reason = [], None
    for stacks in stack_choices:
        try:
            fit.append(expect_unshared_parameters(module, stacks))
        except CannotSplit as error:
            reason = error
    if reason is not None and not fit:
        raise reason
    return fit


def named(layers_list: list[Layers]) -> Stacks:
    """The stacks with their names in the parameter tree."""
    return {"blocks" if len(layers_list) == 1 else f"blocks_{i}": layers for i, layers in enumerate(layers_list)}


def is_within(a: str, b: str) -> bool:
    """Whether a module is within another, by their names."""
    return a.startswith(f"{b}.")


def is_list(module: nn.Module) -> bool:
    """Whether a module is a list of modules."""
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def full_list(module: nn.Module, path: str, lists: dict[str, dict[str, nn.Module]]) -> Layers:
    """All layers of the list at `path`; raises ValueError if there is none, or they are not alike."""
    if path not in lists:
        names = ", ".join(name or '""' for name in lists) or "none"
        raise ValueError(
            f"layers={path!r} is no ModuleList or Sequential of the module{nearest(path, lists)}; it has {names}"
        )
    names, children = [join(path, name) for name in lists[path]], list(lists[path].values())
    if not list(module.get_submodule(path).parameters()):
        raise ValueError(f"layers={path!r} has no layers with parameters; name another list")
    for i, child in enumerate(children[1:], 1):
        unlike = difference(children[0], child, i).leaves
        if unlike:
            raise ValueError(
                f"layers={path!r}: layer {i} is not like layer 0: {unlike}; leave `layers` out, and the longest run of "
                "like layers is the stack"
            )
    layers = checked(module, names)
    try:
        expect_unshared_parameters(module, named([layers]))
    except CannotSplit as reason:
        raise ValueError(f"layers={path!r}: {reason}") from None
    return layers


def join(*parts: str) -> str:
    """The dotted name of a module in a module."""
    return ".".join(word for word in parts if word)


def runs_of(name: str, named: dict[str, nn.Module]) -> list[tuple[int, list[str]]]:
    """(number of parameters, names of the layers) of each run of like layers."""
    runs, start, names, children = [], 0, list(named), list(named.values())
    for end in range(1, len(children) + 1):
        if end < len(children) and not difference(children[start], children[end], end - start).leaves:
            continue
        size = sum(p.numel() for p in children[start].parameters()) * (end - start)
        if end - start > 1 and size:
            runs.append((size, [join(name, child) for child in names[start:end]]))
        start = end
    return runs


def checked(module: nn.Module, names: list[str]) -> Layers:
    """The Layers of these names, which are alike."""
    firsts: list[int] = []  # of each kind
    kinds: list[int] = []
    counts: dict[tuple[str, str], None] = {}
    for i, name in enumerate(names):
        for kind, first in enumerate(firsts):
            unlike = difference(module.get_submodule(names[first]), module.get_submodule(name), i - first)
            if not unlike.code:
                kinds.append(kind)
                counts |= dict.fromkeys(unlike.counts)
                break
        else:
            kinds.append(len(firsts))
            firsts.append(i)
    return Layers(tuple(names), tuple(kinds), tuple(counts))


def expect_unshared_parameters(module: nn.Module, stacks: Stacks) -> Stacks:
    """The stacks; raises CannotSplit for shared parameters or buffers, and hooks."""
    places: dict[int, list[str]] = {}
    for kind in (module.named_parameters, module.named_buffers):
        for name, leaf in kind(remove_duplicate=False):
            places.setdefault(id(leaf), []).append(name)
    for names in places.values():
        holders = {layer_of(stacks, name) for name in names}
        if len(holders) > 1:
            raise CannotSplit(f"{names[0]} and {names[1]} are one tensor, in more than one layer or outside of them")
    for layers in stacks.values():
        for name in layers.names:
            if any(vars(module.get_submodule(name))[hooks] for hooks in HOOKS):
                raise CannotSplit(f"{name} has a hook, which would run outside of the layers")
    return stacks


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def layer_of(stacks: Stacks, name: str) -> str:
    """The layer that a name is in, "" for none."""
    return next((layer for layers in stacks.values() for layer in layers.names if is_within(name, layer)), "")


class Unlike(NamedTuple):
    """The differences between two layers."""

    leaves: str = ""  # in their modules, parameters and buffers, "" for nothing
    code: str = ""  # in what they compute: the same, or other attributes
    counts: tuple[tuple[str, str], ...] = ()  # the attributes that count the layers


def difference(a: nn.Module, b: nn.Module, distance: int = 1) -> Unlike:
    """The differences between two layers `distance` apart, and the attributes that count them."""
    if a is b:
        return all_unlike("it is the same module again")
    a_modules, theirs = dict(a.named_modules()), dict(b.named_modules())
    for name in [*a_modules, *theirs]:
        kinds = [type(first[name]).__name__ if name in first else "missing" for first in (theirs, a_modules)]
        if kinds[0] != kinds[1] or type(a_modules[name]) is not type(theirs[name]):
            return all_unlike(f"{name or 'it'} is {a_or_an(kinds[0])} and not {a_or_an(kinds[1])}")
    for kind in ("named_parameters", "named_buffers"):
        leaves, b_leaves = (list(getattr(first, kind)(remove_duplicate=False)) for first in (a, b))
        if [name for name, _ in leaves] != [name for name, _ in b_leaves]:
            odd = {name for name, _ in leaves} ^ {name for name, _ in b_leaves}
            return all_unlike(f"{min(odd)} is in one of them alone")
        for (name, x), (_, y) in zip(leaves, b_leaves):
            for property in ("shape", "dtype", "requires_grad"):
                first, second = getattr(x, property), getattr(y, property)
                if first != second:
                    first, second = (tuple(v) if property == "shape" else v for v in (first, second))
                    return all_unlike(f"{name} has {property} {second} and not {first}")
        firsts = [
            [[id(leaf) for _, leaf in entries].index(id(leaf)) for _, leaf in entries] for entries in (leaves, b_leaves)
        ]
        if firsts[0] != firsts[1]:
            return all_unlike("they share other tensors within themselves")
    counts, code = [], ""
    for name, module in a_modules.items():
        first, second = (plain_attributes(m) for m in (module, theirs[name]))
        for key in {**first, **second}:
            x, y = first.get(key), second.get(key)
            if type(x) is int and type(y) is int and y - x == distance:
                counts.append((name, key))
            elif not code and not equal_values(x, y):
                code = f"{join(name, key)} is {short_text(y)} and not {short_text(x)}"
    return Unlike("", code, tuple(counts))


def all_unlike(reason: str) -> Unlike:
    """Of layers whose leaves differ in something."""
    return Unlike(reason, reason)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module beside parameters, buffers and modules."""
    blank = vars(nn.Module())
    return {key: value for key, value in vars(module).items() if key not in blank or key == "training"}


def equal_values(a: Any, b: Any) -> bool:
    """Whether two attributes of modules have one value: equal, or made of equal ones."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, nn.Module):  # compared as the layers are
        return not difference(a, b).code
    if isinstance(a, torch.Tensor):  # of a table
        return a.dtype == b.dtype and not a.is_meta and torch.equal(a, b)
    if isinstance(a, types.FunctionType):
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
        return (
            a.__code__ is b.__code__
            and equal_values(cells[0], cells[1])
            and equal_values(a.__defaults__, b.__defaults__)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal_values, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal_values(a[key], b[key]) for key in a)
    try:
        if a == b:
            return True
    except Exception:  # an object of someone else's, whose == may do anything
        return False
    return type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__") and equal_values(vars(a), vars(b))


def short_text(value: Any) -> str:
    """An attribute's value, short."""
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__} of other values"


def a_or_an(kind: str) -> str:
    """A kind of module with its article."""
    return kind if kind == "missing" else f"a{'n' * (kind[0] in 'AEIOU')} {kind}"


class LayerNumber:
    """In place of an attribute that counts the layers, on which nothing may depend."""

    def __init__(self, name: str):
        self.name = name

    def _used(self, *_: Any) -> NoReturn:
        raise CannotSplit(
            f"a layer's forward pass uses its number, {self.name}, and all layers are one program (in transformers a "
            "cache of keys and values does: call it with use_cache=False)"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = __int__ = __float__ = __index__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __truediv__ = __rtruediv__ = _used
    __floordiv__ = __pow__ = __neg__ = __format__ = __str__ = _used

    def __deepcopy__(self, memo: Any) -> LayerNumber:
        return self


def without_memory(module: nn.Module) -> nn.Module:
    """A copy of a module on the meta device; one of transformers keeps no cache."""
    memo: dict[int, Any] = {}
    for leaf in [*module.parameters(), *module.buffers()]:
        blank = torch.empty_like(leaf, device="meta")
        memo[id(leaf)] = nn.Parameter(blank, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else blank
    for value in shared_values(module, memo):
        memo[id(value)] = value
    body = copy.deepcopy(module, memo)
    for child in body.modules():
        config = getattr(child, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False  # type: ignore[union-attr]  # as a step has no use for the keys and values of before
    return body


def shared_values(module: nn.Module, memo: dict[int, Any]) -> list[Any]:
    """The attributes of a module that cannot be copied, such as a lock; raises ValueError for tensors."""
    shared = []
    for name, child in module.named_modules():
        for key, value in plain_attributes(child).items():
            if isinstance(value, int | float | str | None):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception as error:  # whatever somebody's object raises
                if not isinstance(value, types.ModuleType) and holds_tensors(value):
                    raise ValueError(
                        f"{name or 'the module'} ({type(child).__name__}): its attribute {key!r}, a "
                        f"{type(value).__name__} with tensors or modules of its own, cannot be copied "
                        f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); take it out of "
                        "the module, or give its class a __deepcopy__"
                    ) from None
                shared.append(value)
    return shared


def holds_tensors(value: Any, depth: int = 4) -> bool:
    """Whether an object, or one that it has, has a tensor or a module as an attribute."""
    members = list(value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ())
    members += vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    tensors = any(isinstance(member, torch.Tensor | nn.Module) for member in members)
    return tensors or (depth > 0 and any(holds_tensors(member, depth - 1) for member in members))


def templates_of(module: nn.Module, layers: Layers) -> list[nn.Module]:
    """One layer of each kind, without memory, that stands for all of that kind."""
    templates = [without_memory(module.get_submodule(layers.first(kind))) for kind in range(max(layers.kinds) + 1)]
    for layer in templates:
        for name, key in layers.counts:
            vars(layer.get_submodule(name))[key] = LayerNumber(join(name, key))
    return templates
