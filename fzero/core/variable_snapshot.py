"""The variables that somebody's code can reach and change, with what they had; a Snapshot puts it back.

A function that is traced fills its tables with tensors without values, and one that is called to see what it does
counts.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from fzero.core.closure_state import CONTAINERS, is_array, is_user_code

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
        """Add the variables of a class and of its functions; of a package's class the functions with a memory."""
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
