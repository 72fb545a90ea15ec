"""The repeated layers of an nn.Module: which they are, whether they are alike, and one of each kind without memory.

Layers are alike, and one stack, if they are made of the same modules with the same leaves, and only the values of these
differ. Layers of a stack whose other attributes differ (a window of attention, a rate) are of several kinds, each a
program of its own. Attributes that count the layers (`layer_idx`) make no kind; no forward pass may use them.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from fzero.core.pytree import nearest


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
    """The ways to see a module as stacks of layers, the best first: all of the lists at `paths`, or, for None, the runs
    of like neighbours in a ModuleList or Sequential, and next each of them alone, the largest first.

    Raises ValueError for a path that is no list of like layers, and CannotSplit if no path is given and there is no
    such run.
    """
    lists = {
        name: {key: child for key, child in one._modules.items() if child is not None}
        for name, one in module.named_modules()
        if is_list(one)
    }
    if paths is not None:
        return [named([whole_list(module, path, lists) for path in ([paths] if isinstance(paths, str) else paths)])]
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
        apart = not any(a == b or is_within(a, b) or is_within(b, a) for some in several for a in some for b in names)
        if apart and size >= LEAST * largest[0]:
            several.append(names)
    order = [run[1] for run in runs if run[1] in several]
    ways = [order, *([names] for names in several)] if len(several) > 1 else [order]
    found = [named([checked(module, names) for names in some]) for some in ways]
    fit, reason = [], None
    for stacks in found:
        try:
            fit.append(expect_own_parameters(module, stacks))
        except CannotSplit as error:
            reason = error
    if reason is not None and not fit:
        raise reason
    return fit


def named(some: list[Layers]) -> Stacks:
    """The stacks with their names in the parameter tree."""
    return {"blocks" if len(some) == 1 else f"blocks_{i}": layers for i, layers in enumerate(some)}


def is_within(a: str, b: str) -> bool:
    """Whether a module is within another, by their names."""
    return a.startswith(f"{b}.")


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
        unlike = difference(children[0], child, i).leaves
        if unlike:
            raise ValueError(
                f"layers={path!r}: layer {i} is not like layer 0: {unlike}; leave `layers` out, and the longest run of "
                "like layers is the stack"
            )
    layers = checked(module, names)
    try:
        expect_own_parameters(module, named([layers]))
    except CannotSplit as reason:
        raise ValueError(f"layers={path!r}: {reason}") from None
    return layers


def join(*parts: str) -> str:
    """The dotted name of a module in a module."""
    return ".".join(part for part in parts if part)


def runs_of(name: str, named: dict[str, nn.Module]) -> list[tuple[int, list[str]]]:
    """(number of parameters, names of the layers) of each run of two or more like layers of a list."""
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


def expect_own_parameters(module: nn.Module, stacks: Stacks) -> Stacks:
    """The stacks; raises CannotSplit if a layer has a parameter or buffer that is also another's, or has a hook."""
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
    return next((one for layers in stacks.values() for one in layers.names if is_within(name, one)), "")


class Unlike(NamedTuple):
    """The differences between two layers."""

    leaves: str = ""  # in their modules, parameters and buffers, "" for nothing
    code: str = ""  # in what they compute: the same, or other attributes
    counts: tuple[tuple[str, str], ...] = ()  # the attributes that count the layers


def difference(a: nn.Module, b: nn.Module, apart: int = 1) -> Unlike:
    """Find the differences between two layers that are `apart` layers from each other, and the attributes that count
    them.
    """
    if a is b:
        return all_unlike("it is the same module again")
    ours, theirs = dict(a.named_modules()), dict(b.named_modules())
    for name in [*ours, *theirs]:
        kinds = [type(one[name]).__name__ if name in one else "missing" for one in (theirs, ours)]
        if kinds[0] != kinds[1] or type(ours[name]) is not type(theirs[name]):
            return all_unlike(f"{name or 'it'} is {a_or_an(kinds[0])} and not {a_or_an(kinds[1])}")
    for kind in ("named_parameters", "named_buffers"):
        leaves, others = (list(getattr(one, kind)(remove_duplicate=False)) for one in (a, b))
        if [name for name, _ in leaves] != [name for name, _ in others]:
            odd = {name for name, _ in leaves} ^ {name for name, _ in others}
            return all_unlike(f"{min(odd)} is in one of them alone")
        for (name, x), (_, y) in zip(leaves, others):
            for what in ("shape", "dtype", "requires_grad"):
                one, other = getattr(x, what), getattr(y, what)
                if one != other:
                    one, other = (tuple(v) if what == "shape" else v for v in (one, other))
                    return all_unlike(f"{name} has {what} {other} and not {one}")
        firsts = [[[id(leaf) for _, leaf in some].index(id(leaf)) for _, leaf in some] for some in (leaves, others)]
        if firsts[0] != firsts[1]:
            return all_unlike("they share other tensors within themselves")
    counts, code = [], ""
    for name, module in ours.items():
        one, other = (plain_attributes(m) for m in (module, theirs[name]))
        for key in {**one, **other}:
            x, y = one.get(key), other.get(key)
            if type(x) is int and type(y) is int and y - x == apart:
                counts.append((name, key))
            elif not code and not same(x, y):
                code = f"{join(name, key)} is {shown(y)} and not {shown(x)}"
    return Unlike("", code, tuple(counts))


def all_unlike(what: str) -> Unlike:
    """Of layers whose leaves differ in something."""
    return Unlike(what, what)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module beside parameters, buffers and modules."""
    blank = vars(nn.Module())
    return {key: value for key, value in vars(module).items() if key not in blank or key == "training"}


def same(a: Any, b: Any) -> bool:
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
    """A copy of a module whose parameters and buffers are on the meta device; one of transformers keeps no cache."""
    memo: dict[int, Any] = {}
    for leaf in [*module.parameters(), *module.buffers()]:
        blank = torch.empty_like(leaf, device="meta")
        memo[id(leaf)] = nn.Parameter(blank, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else blank
    for value in shared_values(module, memo):
        memo[id(value)] = value
    body = copy.deepcopy(module, memo)
    for one in body.modules():
        config = getattr(one, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False  # type: ignore[union-attr]  # as a step has no use for the keys and values of before
    return body


def shared_values(module: nn.Module, memo: dict[int, Any]) -> list[Any]:
    """The attributes of a module, such as a progress bar or a lock, that cannot be copied, so that a copy has them too.

    Raises ValueError, naming it, for one that has tensors or modules of its own.
    """
    shared = []
    for name, one in module.named_modules():
        for key, value in plain_attributes(one).items():
            if isinstance(value, int | float | str | None):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception as error:  # whatever somebody's object raises
                if not isinstance(value, types.ModuleType) and holds_tensors(value):
                    raise ValueError(
                        f"{name or 'the module'} ({type(one).__name__}): its attribute {key!r}, a "
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
    tensors = any(isinstance(one, torch.Tensor | nn.Module) for one in members)
    return tensors or (depth > 0 and any(holds_tensors(one, depth - 1) for one in members))


def templates_of(module: nn.Module, layers: Layers) -> list[nn.Module]:
    """One layer of each kind, without memory, that stands for all of that kind."""
    made = [without_memory(module.get_submodule(layers.first(kind))) for kind in range(max(layers.kinds) + 1)]
    for layer in made:
        for name, key in layers.counts:
            vars(layer.get_submodule(name))[key] = LayerNumber(join(name, key))
    return made
