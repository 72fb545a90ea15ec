"""The numbers and texts that functions read of variables outside of them, which a trace has as constants."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Collection, Iterable
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from fzero.core.closure_state import BLANK, CONTAINERS, PLAIN, is_array, is_object, is_user_code, methods, of_library
from fzero.core.graph_tracing import is_foreign


class VariableSource(NamedTuple):
    """A variable, or an attribute of an object."""

    name: str
    owner: Any  # a dict of variables, the cell of one, or an object
    key: str

    def value(self) -> Any:
        """Its value now; None if it has none."""
        try:
            return self.owner.get(self.key) if isinstance(self.owner, dict) else getattr(self.owner, self.key, None)
        except ValueError:  # of an empty cell
            return None


class Readings:
    """What functions, and those that they call by name, read when this was made.

    >>> rates = {"now": 0.1}
    >>> readings = Readings([lambda x: rates["now"] * x])
    >>> rates["now"] = 0.2
    >>> readings.changed()
    'rates'
    """

    def __init__(self, functions: Iterable[Any], excluded: Collection[Any] = ()) -> None:
        self.excluded, self.visited = excluded, dict[Any, Any]()  # with what keeps an id from being another's
        self.sources: dict[tuple[int, str], VariableSource] = {}
        for f in functions:
            self.follow("", f, frozenset())
        named = [(source, constants_in(source.value())) for source in self.sources.values()]
        self.values = [(source, value) for source, value in named if value is not None]

    def changed(self) -> str:
        """The name of the first variable that has another value now, "" for none."""
        return next((source.name for source, value in self.values if constants_in(source.value()) != value), "")

    def discard(self, name: str) -> None:
        """Take a variable out."""
        self.values = [(source, value) for source, value in self.values if source.name != name]

    def visit(self, f: Any, owner: Any = None) -> None:
        """Add what a function reads. owner: the object or module whose method it is."""
        if not isinstance(f, FunctionType) or f in self.excluded or not is_foreign(f) or not self.is_new(f, owner):
            return
        names, read = frozenset(names_in(f.__code__)), inspect.getclosurevars(f)
        cells = zip(f.__code__.co_freevars, f.__closure__ or ())
        sources = [VariableSource(name, f.__globals__, name) for name in read.globals]
        sources += [VariableSource(name, cell, "cell_contents") for name, cell in cells]
        sources += [VariableSource(f"a default of {f.__name__}", f, key) for key in ("__defaults__", "__kwdefaults__")]
        sources += [VariableSource(f"{f.__name__}.{key}", f, key) for key in vars(f).keys() & names]
        imported_within = read.unbound & sys.modules.keys()
        sources += [VariableSource(name, sys.modules, name) for name in imported_within]
        for source in sources:
            self.add(source, names)
        if owner is not None:
            self.attributes("self", owner, names)

    def is_new(self, *key: Any) -> bool:
        """Whether these objects did not come before."""
        return self.visited.setdefault(tuple(map(id, key)), key) is key

    def add(self, source: VariableSource, names: frozenset[str]) -> None:
        """Add a variable, and what is read of its value by these names."""
        self.sources.setdefault((id(source.owner), source.key), source)
        self.follow(source.name, source.value(), names)

    def follow(self, name: str, value: Any, names: frozenset[str]) -> None:
        """Add what is read of a value by these names, or by calling it."""
        if isinstance(value, functools.partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                self.follow(name, item, names)
        elif isinstance(value, MethodType):
            self.visit(value.__func__, value.__self__)
        elif isinstance(value, FunctionType):
            self.visit(value)
        elif isinstance(value, ModuleType):
            for key in names & vars(value).keys() if is_user_code(value) and self.is_new(value, names) else ():
                self.add(VariableSource(f"{name}.{key}", vars(value), key), names)
        elif isinstance(value, nn.Module):
            for item in value.modules():
                self.visit(type(item).forward, item)
        elif isinstance(value, type):
            self.class_attributes(value, names)
        elif is_object(value):
            self.attributes(name, value, names)

    def attributes(self, name: str, owner: Any, names: frozenset[str]) -> None:
        """Add the attributes of an object that these names read, and what its methods of these names do."""
        if not self.is_new(owner, names):
            return
        for method in methods(owner):
            if method.__name__ in names or method.__name__ == "__call__":
                self.visit(method, owner)
        slots = {key for kind in type(owner).__mro__ for key in vars(kind).get("__slots__", ())}
        for key in names & (getattr(owner, "__dict__", {}).keys() | slots) - BLANK:
            self.add(VariableSource(f"{name}.{key}", owner, key), names)
        self.class_attributes(type(owner), names, owner)

    def class_attributes(self, kind: type, names: frozenset[str], owner: Any = None) -> None:
        """Add the attributes of a class that these names read, and what its properties do. owner: an object of it."""
        for base in kind.__mro__ if self.is_new(kind, names, owner) else ():
            for key in names & vars(base).keys() if not of_library(base) else ():
                value = vars(base)[key]
                if isinstance(value, property):
                    self.visit(value.fget, owner)
                elif not inspect.isroutine(value):
                    self.add(VariableSource(f"{base.__name__}.{key}", base, key), names)


def names_in(code: CodeType) -> set[str]:
    """The names of attributes and globals that code uses, with what is defined within it."""
    nested = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*nested)


def constants_in(value: Any, depth: int = 4) -> Any:
    """The numbers, texts and tensors of a value, as something that can be compared; None for what has none."""
    if isinstance(value, PLAIN):
        return type(value).__name__, repr(value)
    if isinstance(value, Tensor):
        return "Tensor", id(value)
    if is_array(value) and value.nbytes < 1 << 16:
        return "array", value.tobytes()
    if not depth or not isinstance(value, CONTAINERS) or len(value) >= 64:
        return None
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    entries = [(repr(key), constants_in(item, depth - 1)) for key, item in inner]
    return [pair for pair in entries if pair[1] is not None] or None
