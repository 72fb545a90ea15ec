"""What somebody's function has beside its arguments, and what shows that a call changed it.

Variables, attributes of objects and modules, states of generators of random numbers.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import random
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fzero.core import pytree
from fzero.core.graph_tracing import Impure, is_foreign, outside_transforms
from fzero.core.torch_private import FakeTensor


class ClosureState:
    """What a function has beside its arguments: tensors by name, and modules."""

    def __init__(self, collections: bool = True) -> None:
        self.collections = collections
        self.tensors: dict[str, Tensor] = {}
        self.modules: dict[str, nn.Module] = {}
        self.generators: dict[str, Any] = {}
        self.functions: list[Any] = []  # those that were looked at
        self.owners: dict[str, Any] = {}  # objects whose methods they are

    @classmethod
    def from_function(cls, f: Any) -> ClosureState:
        """What a function closes over, reads of its module's names, or is a method of."""
        belongings = cls()
        belongings.note_function(f)
        return belongings

    @classmethod
    def from_module(cls, name: str, module: nn.Module) -> ClosureState:
        """What a module has, and its methods read."""
        belongings = cls()
        belongings.note_module(name, module)
        return belongings

    def constants(self) -> dict[str, Tensor]:
        """The tensors that have values."""
        return {name: x for name, x in self.tensors.items() if not x.is_meta and not isinstance(x, FakeTensor)}

    def note_function(self, f: Any) -> None:
        """Add what a function has."""
        if isinstance(f, functools.partial):
            for i, value in enumerate((*f.args, *f.keywords.values())):
                self.note(f"argument {i} of a partial", value)
            return self.note_function(f.func)
        owner = getattr(f, "__self__", None if inspect.isroutine(f) else f)
        if owner is not None and not inspect.ismodule(owner):
            self.note("self", owner)
            self.note_object(type(owner).__name__, owner)
        f = getattr(f, "__func__", f)
        if inspect.isfunction(f) and f not in self.functions:
            self.functions.append(f)
            names = inspect.getclosurevars(f)
            for name, value in {**names.globals, **names.nonlocals}.items():
                self.note(name, value)
                if is_object(value):
                    self.note_object(name, value)
        return None

    def note_object(self, name: str, owner: Any) -> None:
        """Add an object of somebody's class: its attributes, and what its methods have."""
        if any(owner is registered for registered in self.owners.values()):
            return
        self.owners[name] = owner
        for key, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
            self.note(f"{name}.{key}", value)
        for method in methods(owner):
            self.note_function(method)

    def note(self, name: str, value: Any) -> None:
        """Add a value, and what a tree of them has, or a function of somebody's."""
        if is_generator(owner := getattr(value, "__self__", None)):  # a method of one
            add_unique(self.generators, name, owner)
        if isinstance(value, functools.partial) or (inspect.isroutine(value) and is_foreign(value)):
            return None if of_library(value) else self.note_function(value)
        for leaf_name, leaf in {name: value}.items() if callable(value) else pytree_items(name, value):
            if isinstance(leaf, Tensor):
                add_unique(self.tensors, leaf_name, leaf)
            elif isinstance(leaf, nn.Module):
                self.note_module(leaf_name, leaf)
            elif is_generator(leaf):
                add_unique(self.generators, leaf_name, leaf)
            elif inspect.isroutine(leaf) and is_foreign(leaf) and not of_library(leaf):  # in a table of functions
                self.note_function(leaf)
        return None

    def note_module(self, name: str, module: nn.Module) -> None:
        """Add a module."""
        if any(module is submodule for submodule in self.modules.values()):
            return
        self.modules[name] = module
        for leaf, tensor in [*module.named_parameters(), *module.named_buffers()]:
            self.tensors[f"{name}.{leaf}"] = tensor
        for path, submodule in module.named_modules():
            for key, value in vars(submodule).items():
                dotted = ".".join(filter(None, (name, path, key)))
                if key in BLANK:
                    continue
                if isinstance(value, Tensor | CONTAINERS):
                    self.tensors |= {leaf: x for leaf, x in pytree_items(dotted, value) if isinstance(x, Tensor)}
                elif isinstance(value, functools.partial | types.FunctionType | types.MethodType):
                    self.note(dotted, value)
                elif is_object(value) and is_user_code(type(value)):
                    self.note_object(dotted, value)
        for submodule in {type(submodule): submodule for submodule in module.modules()}.values():
            for method in methods(submodule):
                self.note_function(method)

    def has_mark(self, value: Any) -> bool:
        """Whether a variable is one that a function may count or collect in."""
        if isinstance(value, PLAIN) or not self.collections:
            return isinstance(value, PLAIN)
        return isinstance(value, CONTAINERS | type | Tensor) or is_array(value) or is_counter(value) or is_object(value)

    def marks(self) -> dict[str, Any]:
        """What shows that a variable, an attribute or a generator's state is another one than before, by name."""
        with outside_transforms():
            return self.marks_detached()

    def marks_detached(self) -> dict[str, Any]:
        """`marks`, outside of transforms."""
        marks = {f"the state of {name}": state_of(item) for name, item in self.generators.items()}
        marks["the state of Python's random"] = state_of(random)
        if "numpy.random" in sys.modules:
            marks["the state of numpy.random"] = state_of(sys.modules["numpy.random"])
        for name, module in self.modules.items():
            for path, item in module.named_modules():
                dotted = ".".join(segment for segment in (name, path) if segment)
                attributes = {key: value for key, value in vars(item).items() if key not in BLANK} | item._buffers
                marks |= {f"{dotted}.{key}": mark_of(value) for key, value in attributes.items()}
            for item in {
                item for submodule in module.modules() for item in type(submodule).__mro__ if not of_library(item)
            }:
                members = vars(item).items()
                marks |= {f"{item.__name__}.{key}": mark_of(value) for key, value in members if self.has_mark(value)}
        for name, owner in self.owners.items():
            for prefix, item in ((type(owner).__name__, type(owner)), (name, owner)):
                members = getattr(item, "__dict__", {}).items()
                marks |= {f"{prefix}.{key}": mark_of(value) for key, value in members if self.has_mark(value)}
        for f in self.functions:
            marks |= {name: mark_of(value) for name, value in variables(f) if self.has_mark(value)}
        return marks


def add_unique(table: dict[str, Any], name: str, value: Any) -> None:
    """Add a value by its name, or by another one if that has another value already."""
    while table.get(name, value) is not value:
        name = f"{name}'"
    table[name] = value


class Changed(Impure):
    """A module's attribute is another one after a call."""


@contextlib.contextmanager
def expect_unchanged(name: str, module: nn.Module) -> Iterator[None]:
    """Raise Changed if an attribute of a module is another one after what runs within."""
    state = ClosureState(collections=False)  # in which a module's code may record what it sees
    state.note_module(name, module)
    initial_marks = state.marks()
    yield
    changed = first_change(initial_marks, state.marks())
    if changed:
        raise Changed(
            f"the forward pass changes {changed}, and what is no parameter is lost; return it, draw random numbers by "
            "torch, and hand in by the batch what changes"
        )


def first_change(previous: dict[str, Any], current: dict[str, Any]) -> str:
    """The first name whose mark is another one than before, "" for none."""
    names = (name for name in {**previous, **current} if not (name not in previous and name.startswith("the state of")))
    return next((name for name in names if previous.get(name, current) != current.get(name, previous)), "")


def new_tensors(previous: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """The names whose marks have a tensor that they had not before."""
    changed = (name for name in current if previous.get(name, ()) != current[name])
    return [name for name in changed if tensors_of(current[name]) - tensors_of(previous.get(name, ()))]


def tensors_of(mark: Any) -> set[Any]:
    """The tensors in a mark."""
    if not isinstance(mark, tuple):
        return set()
    return {mark} if mark[:1] == ("Tensor",) else set().union(*map(tensors_of, mark))


def state_of(generator: Any) -> Any:
    """The state of a generator of random numbers, as something that can be compared."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.SystemRandom):
        return None  # it has none
    if hasattr(generator, "getstate"):
        return generator.getstate()
    return repr(
        flatten_state(generator.get_state()) if hasattr(generator, "get_state") else generator.bit_generator.state
    )


def flatten_state(state: tuple[Any, ...]) -> list[Any]:
    """A state of numpy's with its array as a list."""
    return [element.tolist() if hasattr(element, "tolist") else element for element in state]


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of random numbers: torch's, Python's or numpy's."""
    numpy = sys.modules.get("numpy.random")
    kinds = (torch.Generator, random.Random, *((numpy.RandomState, numpy.Generator) if numpy else ()))
    return isinstance(value, kinds)


BLANK = frozenset(vars(nn.Module()))
PLAIN = int | float | str | bytes
LIBRARIES = ("builtins", "torch", "numpy", "transformers", "fzero")  # whose variables no result depends on
INSTALLED = (sysconfig.get_path("stdlib") + "/", "site-packages", "dist-packages")  # in the names of packages' files


def of_library(value: Any) -> bool:
    """Whether a function or a class is of a library."""
    return (getattr(value, "__module__", None) or "").split(".")[0] in LIBRARIES


def is_user_code(value: Any) -> bool:
    """Whether a function or a class is somebody's code, and not an installed package's."""
    code = getattr(value, "__code__", None)
    file = code.co_filename if code is not None else file_of(value)
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    return name.split(".")[0] not in LIBRARIES and not any(folder in file for folder in INSTALLED)


def file_of(value: Any) -> str:
    """The file of a class or module, "" if there is none."""
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
    return getattr(module, "__file__", None) or ""


def is_object(value: Any) -> bool:
    """Whether a value is an object of somebody's class, neither a module nor a class."""
    return not of_library(type(value)) and not isinstance(value, nn.Module | types.ModuleType | type)


def methods(owner: Any) -> list[Any]:
    """The functions of an object's class and of those that it inherits from, but for libraries'."""
    classes = [base for base in type(owner).__mro__ if not of_library(base)]
    return [value for base in classes for value in vars(base).values() if inspect.isfunction(value)]


def variables(f: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables outside of a function that it reads or writes, by name."""
    names = inspect.getclosurevars(f)
    for name, value in {**names.globals, **names.nonlocals}.items():
        yield name, value
        if inspect.ismodule(value):
            yield from ((f"{name}.{key}", vars(value)[key]) for key in names.unbound if key in vars(value))
    yield f"a default of {f.__name__}", (f.__defaults__, f.__kwdefaults__)
    yield from ((f"{f.__name__}.{key}", value) for key, value in vars(f).items())


def pytree_items(name: str, value: Any) -> list[tuple[str, Any]]:
    """The leaves of a value with names."""
    leaves = pytree.leaves(value)
    return [(name if leaf is value else f"{name}[{i}]", leaf) for i, leaf in enumerate(leaves)]


def mark_of(value: Any, depth: int = 2) -> Any:
    """What shows that an attribute has another value. depth: of objects within objects that are looked into."""
    kind = type(value).__name__
    if isinstance(value, PLAIN | type(None)):
        return kind, repr(value)
    if isinstance(value, Tensor):
        return kind, id(value), value._version if not value.is_inference() else 0
    if is_array(value):
        return kind, id(value), value.tobytes() if value.nbytes < 1 << 16 else 0
    if isinstance(value, CONTAINERS):
        inner = value.values() if isinstance(value, dict) else value
        return kind, len(value), tuple(mark_of(x, depth) for x in inner) if len(value) < 64 else id(value)
    if isinstance(value, types.GeneratorType):
        return kind, id(value), value.gi_frame is not None and value.gi_frame.f_lasti, repr(value.gi_yieldfrom)
    if is_counter(value):
        return kind, id(value), repr(value)
    if depth and not of_library(value if isinstance(value, type) else type(value)):
        slots = [name for member in inspect.getmro(type(value)) for name in vars(member).get("__slots__", ())]
        members = {**{name: getattr(value, name, None) for name in slots}, **getattr(value, "__dict__", {})}
        return kind, id(value), tuple((key, mark_of(member, depth - 1)) for key, member in members.items())
    return kind, id(value)


CONTAINERS = list | tuple | dict | set | frozenset | collections.deque


def is_array(value: Any) -> bool:
    """Whether a value is an array of numpy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind != "O"


def is_counter(value: Any) -> bool:
    """Whether a value is an iterator that shows how far it is: of itertools, or a generator."""
    return isinstance(value, types.GeneratorType | itertools.count | itertools.cycle | itertools.repeat)
