"""The repeated layers of an nn.Module: which they are, whether they are alike, and one of them without memory.

Layers are alike if they differ in the values of their parameters and buffers alone. Attributes that count the layers
(`layer_idx`) may differ as well, unless a forward pass uses them.
"""

from __future__ import annotations

import copy
import types
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from fzero.core.pytree import nearest


class CannotSplit(ValueError):
    """The reason why a module cannot be cut into layers; it can still be trained whole."""


class Layers(NamedTuple):
    """The layers of a module that become one stack."""

    names: tuple[str, ...]  # of the modules, in the order of a forward pass
    counts: tuple[tuple[str, str], ...]  # (module within a layer, its attribute) that only count the layers


def find_layers(module: nn.Module, path: str | None = None) -> Layers:
    """The layers of `module`: all of the list at `path`, or, for None, the run of like neighbours in a ModuleList or
    Sequential that has the most parameters.

    Raises ValueError for a path that is no list of like layers, and CannotSplit if no path is given and there is no
    such run.
    """
    lists = {
        name: {key: child for key, child in one._modules.items() if child is not None}
        for name, one in module.named_modules()
        if is_list(one)
    }
    if path is not None:
        return whole_list(module, path, lists)
    runs = [run for name, children in lists.items() for run in runs_of(name, children)]
    if not runs:
        unlike = next(((name, children) for name, children in lists.items() if len(children) > 1), None)
        reason = "it has no ModuleList or Sequential of layers"
        if unlike is not None:
            name, (first, second, *_) = unlike[0], unlike[1].values()
            reason = f"in {name or 'the module'}, layer 1 is not like layer 0: {difference(first, second)[0]}"
        raise CannotSplit(reason)
    # The first of the largest: an outer list before the lists within it.
    names = max(runs, key=lambda run: run[0])[1]
    return expect_own_parameters(module, checked(module, names))


def is_list(module: nn.Module) -> bool:
    """Whether a module is a list of modules."""
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def whole_list(module: nn.Module, path: str, lists: dict[str, dict[str, nn.Module]]) -> Layers:
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
        unlike = difference(children[0], child, i)[0]
        if unlike:
            raise ValueError(
                f"layers={path!r}: layer {i} is not like layer 0: {unlike}; leave `layers` out, and the longest run of "
                "like layers is the stack"
            )
    try:
        return expect_own_parameters(module, checked(module, names))
    except CannotSplit as reason:
        raise ValueError(f"layers={path!r}: {reason}") from None


def join(*parts: str) -> str:
    """The dotted name of a module in a module."""
    return ".".join(part for part in parts if part)


def runs_of(name: str, named: dict[str, nn.Module]) -> list[tuple[int, list[str]]]:
    """(number of parameters, names of the layers) of each run of two or more like layers of a list."""
    runs, start, names, children = [], 0, list(named), list(named.values())
    for end in range(1, len(children) + 1):
        if end < len(children) and not difference(children[start], children[end], end - start)[0]:
            continue
        size = sum(p.numel() for p in children[start].parameters()) * (end - start)
        if end - start > 1 and size:
            runs.append((size, [join(name, child) for child in names[start:end]]))
        start = end
    return runs


def checked(module: nn.Module, names: list[str]) -> Layers:
    """The Layers of these names, which are alike."""
    first = module.get_submodule(names[0])
    counts: dict[tuple[str, str], None] = {}
    for i, name in enumerate(names[1:], 1):
        counts |= dict.fromkeys(difference(first, module.get_submodule(name), i)[1])
    return Layers(tuple(names), tuple(counts))


def expect_own_parameters(module: nn.Module, layers: Layers) -> Layers:
    """The layers; raises CannotSplit if one has a parameter or buffer that is also another's, or has a hook."""
    places: dict[int, list[str]] = {}
    for kind in (module.named_parameters, module.named_buffers):
        for name, leaf in kind(remove_duplicate=False):
            places.setdefault(id(leaf), []).append(name)
    for names in places.values():
        holders = {layer_of(layers, name) for name in names}
        if len(holders) > 1:
            raise CannotSplit(f"{names[0]} and {names[1]} are one tensor, in more than one layer or outside of them")
    for name in layers.names:
        layer = module.get_submodule(name)
        if any(vars(layer)[hooks] for hooks in HOOKS):
            raise CannotSplit(f"{name} has a hook, which would run outside of the layers")
    return layers


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def layer_of(layers: Layers, name: str) -> str:
    """The layer that a name is in, "" for none."""
    return next((layer for layer in layers.names if name.startswith(f"{layer}.")), "")


Unlike = tuple[str, list[tuple[str, str]]]  # (what differs, "" for nothing; the attributes that count)


def difference(a: nn.Module, b: nn.Module, apart: int = 1) -> Unlike:
    """What differs between two layers that are `apart` layers from each other, and what counts them."""
    if a is b:
        return "it is the same module again", []
    ours, theirs = dict(a.named_modules()), dict(b.named_modules())
    for name in [*ours, *theirs]:
        kinds = [type(one[name]).__name__ if name in one else "missing" for one in (theirs, ours)]
        if kinds[0] != kinds[1] or type(ours[name]) is not type(theirs[name]):
            return f"{name or 'it'} is {a_or_an(kinds[0])} and not {a_or_an(kinds[1])}", []
    for kind in ("named_parameters", "named_buffers"):
        leaves, others = (list(getattr(one, kind)(remove_duplicate=False)) for one in (a, b))
        if [name for name, _ in leaves] != [name for name, _ in others]:
            odd = {name for name, _ in leaves} ^ {name for name, _ in others}
            return f"{min(odd)} is in one of them alone", []
        for (name, x), (_, y) in zip(leaves, others):
            for what in ("shape", "dtype", "requires_grad"):
                one, other = getattr(x, what), getattr(y, what)
                if one != other:
                    one, other = (tuple(v) if what == "shape" else v for v in (one, other))
                    return f"{name} has {what} {other} and not {one}", []
        firsts = [[[id(leaf) for _, leaf in some].index(id(leaf)) for _, leaf in some] for some in (leaves, others)]
        if firsts[0] != firsts[1]:
            return "they share other tensors within themselves", []
    counts = []
    for name, module in ours.items():
        one, other = (plain_attributes(m) for m in (module, theirs[name]))
        for key in {**one, **other}:
            x, y = one.get(key), other.get(key)
            if type(x) is int and type(y) is int and y - x == apart:
                counts.append((name, key))
            elif not same(x, y):
                return f"{join(name, key)} is {shown(y)} and not {shown(x)}", []
    return "", counts


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds beside parameters, buffers and modules."""
    blank = vars(nn.Module())
    return {key: value for key, value in vars(module).items() if key not in blank or key == "training"}


def same(a: Any, b: Any) -> bool:
    """Whether two attributes of modules have one value: equal, or made of equal ones."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (torch.Tensor, nn.Module)):  # compared as the layers are
        return isinstance(a, nn.Module) and not difference(a, b)[0]
    if isinstance(a, types.FunctionType):
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
        return a.__code__ is b.__code__ and same(cells[0], cells[1]) and same(a.__defaults__, b.__defaults__)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    try:
        if a == b:
            return True
    except Exception:  # an object of someone else's, whose == may do anything
        return False
    return type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__") and same(vars(a), vars(b))


def shown(value: Any) -> str:
    """An attribute's value, short."""
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__} of other values"


def a_or_an(kind: str) -> str:
    """A kind of module with its article."""
    return kind if kind == "missing" else f"a{'n' * (kind[0] in 'AEIOU')} {kind}"


class LayerNumber:
    """In place of an attribute that counts the layers: all layers run one program, which cannot depend on it."""

    def __init__(self, name: str):
        self.name = name

    def _used(self, *_: Any) -> NoReturn:
        raise CannotSplit(f"a layer's forward pass uses its number, {self.name}, and all layers are one program")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __bool__ = __int__ = __float__ = __index__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __truediv__ = __rtruediv__ = _used
    __floordiv__ = __pow__ = __neg__ = __format__ = __str__ = _used

    def __deepcopy__(self, memo: Any) -> LayerNumber:
        return self


def without_memory(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers are on the meta device."""
    memo: dict[int, Any] = {}
    for leaf in [*module.parameters(), *module.buffers()]:
        blank = torch.empty_like(leaf, device="meta")
        memo[id(leaf)] = nn.Parameter(blank, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else blank
    return copy.deepcopy(module, memo)


def template_of(module: nn.Module, layers: Layers) -> nn.Module:
    """One layer of the module, without memory, that stands for all of them."""
    layer = without_memory(module.get_submodule(layers.names[0]))
    for name, key in layers.counts:
        vars(layer.get_submodule(name))[key] = LayerNumber(join(name, key))
    return layer
