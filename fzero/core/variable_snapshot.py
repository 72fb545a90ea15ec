"""The variables outside of somebody's functions: the numbers and texts that they read, which a trace has as constants,
and all that they can reach and change, with what it had; a Snapshot puts it back.

A function that is traced fills its tables with tensors without values, and one that is called to see what it does
counts.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Collection, Iterable, Iterator
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
        """Add the attributes of a class that these names read, and what its properties do."""
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
    """The numbers, texts and tensors of a value, comparable; None for what has none."""
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


DEEPEST = 6  # values within values
CACHED = type(functools.lru_cache(int))  # a function that remembers what it returned
LARGEST = 1 << 12  # entries of a table that is looked into


class VariableTable(NamedTuple):
    """Variables that are in one dict, list, class, closure or array."""

    name: str
    holder: Any
    names: tuple[str, ...] | None = None  # of those of a module's globals that count; None: all

    def contents(self) -> dict[Any, Any]:
        """What the variables have, by key."""
        holder = self.holder
        if isinstance(holder, dict):
            return dict(holder) if self.names is None else {n: holder[n] for n in self.names if n in holder}
        if isinstance(holder, type):
            return {key: value for key, value in vars(holder).items() if not key.startswith("__")}
        if isinstance(holder, types.CellType):
            return {"cell_contents": holder.cell_contents} if is_filled(holder) else {}
        if is_array(holder):
            return {"": holder.copy()}
        return dict.fromkeys(holder) if isinstance(holder, set) else dict(enumerate(holder))

    def assign(self, contents: dict[Any, Any]) -> None:
        """Let the variables have these contents."""
        holder = self.holder
        if isinstance(holder, dict) and self.names is None:
            holder.clear()
            holder.update(contents)
        elif isinstance(holder, dict):
            for name in self.names or ():
                holder.pop(name, None)
            holder.update(contents)
        elif isinstance(holder, type | types.CellType):
            current = self.contents()
            for name in current.keys() - contents.keys():
                delattr(holder, name)
            for name in contents:
                if name not in current or current[name] is not contents[name]:
                    setattr(holder, name, contents[name])
        elif is_array(holder):
            holder[...] = contents[""]
        else:
            holder.clear()
            holder.update(contents) if isinstance(holder, set) else holder.extend(contents.values())

    def set_number(self, key: Any, value: Any) -> None:
        """Let one of the variables have another value."""
        self.assign({**self.contents(), key: value})


class Snapshot:
    """What the variables had that functions, modules and objects reach, when it was made."""

    def __init__(self, *roots: Any) -> None:
        self.roots = roots
        self.saved: list[tuple[VariableTable, dict[Any, Any]]] = []
        self.caches: list[tuple[Any, Any]] = []  # functions with functools' memory, and how often they had computed
        self.visited: dict[int, Any] = {}
        for root in roots:
            self.walk("the module" if isinstance(root, nn.Module) else "the loss", root, 0)

    def restore(self) -> None:
        """Let all variables have what they had, and functions forget what they have computed since."""
        for variables, contents in self.saved:
            if not same_entries(variables.contents(), contents):
                variables.assign(contents)
        for cache, misses in self.caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()

    def retake(self) -> Snapshot:
        """A Snapshot of the same roots."""
        return Snapshot(*self.roots)

    def values(self) -> dict[str, Any]:
        """The tensors that have values, and the numbers, by the names of their variables."""
        named = (
            (name_of(variables, key), value) for variables, contents in self.saved for key, value in contents.items()
        )
        plain = ((name, x) for name, x in named if type(x) in (int, float, Tensor))
        return {name: x for name, x in plain if not isinstance(x, Tensor) or not x.is_meta}

    def numbers_changed(self) -> Iterator[tuple[VariableTable, Any]]:
        """(variables, key) of each number that is another one now."""
        for variables, contents in self.saved:
            if not is_array(variables.holder) and not isinstance(variables.holder, set):
                for key, value in variables.contents().items():
                    if type(value) in (int, float) and key in contents and contents[key] != value:
                        yield variables, key

    def add(self, name: str, holder: Any, depth: int, names: tuple[str, ...] | None = None) -> None:
        """Add variables, and what their values reach."""
        variables = VariableTable(name, holder, names)
        contents = variables.contents()
        self.saved.append((variables, contents))
        for key, value in contents.items():
            self.walk(name_of(variables, key), value, depth + 1)

    def walk(self, name: str, value: Any, depth: int) -> None:
        """Add the variables that a value reaches."""
        if value is None or isinstance(value, int | float | str | bytes | Tensor | types.ModuleType) or depth > DEEPEST:
            return
        if id(value) in self.visited:
            return
        self.visited[id(value)] = value
        if isinstance(value, functools.partial):
            self.walk(name, (value.func, value.args, value.keywords), depth)
        elif isinstance(value, types.MethodType):
            self.walk(name, (value.__self__, value.__func__), depth)
        elif isinstance(value, types.FunctionType):
            self.walk_function(value, depth)
        elif isinstance(value, CACHED):
            self.caches.append((value, value.cache_info().misses))
            self.walk(name, value.__wrapped__, depth)
        elif isinstance(value, tuple | frozenset):
            for i, item in enumerate(value):
                self.walk(f"{name}[{i}]", item, depth + 1)
        elif isinstance(value, CONTAINERS):
            if len(value) <= LARGEST:
                self.add(name, value, depth)
        elif is_array(value):
            if value.nbytes <= LARGEST * 8 and value.flags.writeable:
                self.saved.append((VariableTable(name, value), {"": value.copy()}))
        elif isinstance(value, type):
            if is_user_code(value):
                self.add(value.__name__, value, depth)
        elif isinstance(value, nn.Module) or is_user_code(type(value)):
            if hasattr(value, "__dict__"):
                self.add(name, vars(value), depth)
            for item in type(value).__mro__:
                self.walk_class(item, depth)

    def walk_class(self, cls: type, depth: int) -> None:
        """Add the variables of a class and of its functions."""
        if is_user_code(cls):
            return self.walk(cls.__name__, cls, depth)
        for value in () if cls.__module__.split(".")[0] in ("torch", "builtins") else vars(cls).values():
            self.caches += [(value, value.cache_info().misses)] if isinstance(value, CACHED) else []
            f = inspect.unwrap(value) if callable(value) else value
            self.caches += caches_of(f) if isinstance(f, types.FunctionType) else ()
        return None

    def walk_function(self, f: types.FunctionType, depth: int) -> None:
        """Add the variables that a function names, of its module and of functions around it."""
        if not is_user_code(f):
            self.caches += caches_of(f)
            return
        used = names_of(f.__code__)
        self.add(f.__name__, f.__globals__, depth, tuple(used))
        for module in [f.__globals__[name] for name in used if name in f.__globals__]:
            if isinstance(module, types.ModuleType) and is_user_code(module):
                self.add(module.__name__, vars(module), depth, tuple(used))
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or ()):
            self.add(name, cell, depth)
        self.walk(f"a default of {f.__name__}", (f.__defaults__, f.__kwdefaults__), depth)
        if vars(f):
            self.add(f.__name__, vars(f), depth)


def name_of(variables: VariableTable, key: Any) -> str:
    """The name of one of these variables, for an error."""
    if isinstance(variables.holder, types.CellType):
        return variables.name
    if variables.names is not None:
        return str(key)
    if variables.name.endswith("._modules") or variables.name.endswith("._buffers"):
        return f"{variables.name.rpartition('.')[0]}.{key}"
    named = isinstance(key, str) and key.isidentifier()
    return f"{variables.name}.{key}" if named else f"{variables.name}[{key!r}]"


def same_entries(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    """Whether two dicts have the same objects, in one order; arrays count by what is in them."""
    pairs = zip(a.values(), b.values())
    return list(a) == list(b) and all(x is y or (is_array(x) and is_array(y) and (x == y).all()) for x, y in pairs)


def is_filled(cell: types.CellType) -> bool:
    """Whether a closure's variable has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def names_of(code: types.CodeType) -> set[str]:
    """The names of variables outside that a function, or one within it, reads or writes."""
    nested = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(names_of, nested))


@functools.lru_cache(maxsize=1 << 14)
def cached_functions(f: types.FunctionType, depth: int = 3) -> tuple[Any, ...]:
    """The functions with a memory that a function of a package calls, and those that its functions call."""
    functions: dict[int, Any] = {}
    for name in names_of(f.__code__) & f.__globals__.keys():
        value = f.__globals__[name]
        if isinstance(value, CACHED):
            functions[id(value)] = value
        elif isinstance(value, types.FunctionType) and depth and (value.__module__ or "").split(".")[0] != "torch":
            functions |= {id(function): function for function in cached_functions(value, depth - 1)}
    return tuple(functions.values())


def caches_of(f: types.FunctionType) -> list[tuple[Any, Any]]:
    """The functions with a memory that a package's function calls, and how often they have computed."""
    return [(function, function.cache_info().misses) for function in cached_functions(f)]
