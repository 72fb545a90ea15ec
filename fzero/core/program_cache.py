"""Compiled programs kept from one process to the next, which then neither traces nor imports Inductor.

A program is a graph compiled for the CPU: C++ functions in libraries, and a Python function that calls them. It is kept
only if that function uses nothing but NAMES, its own libraries and torch's products. What runs later is the same text,
so the same numbers.

A wrong answer would be a wrong number, so a question holds all that a trace depends on: `describe` refuses what it
cannot tell apart by value. Only the command, where nobody changes what functions do, calls `allow_programs`.

A graph's C++ loops are one library. Inductor compiles every loop by itself, and each waits seconds for torch's headers.
All loops of a graph in one file take little longer than one; a thread compiles them while the next graph is lowered.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import json
import os
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf, nan
from pathlib import Path
from types import BuiltinFunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import compile_cache
from fzero.core.arguments import SELF_CHECKED
from fzero.core.device import KERNELS

# Graphs of a process after which the headers are precompiled: ten seconds, and then three less for each graph.
FEW = 4
_graphs: list[None] = []
# Before the loops, each of which is in a namespace, where no header may be included for the first time.
_HEADERS = """#include <torch/csrc/inductor/cpp_prefix.h>
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sstream>
#include <cstdlib>
#include <cerrno>
"""


class _Loop(NamedTuple):
    """A source that Inductor has compiled: a C++ function called "kernel"."""

    types: Sequence[str]  # of its arguments
    source: str


_PATCHED = threading.RLock()


@contextlib.contextmanager
def batch_compilation() -> Iterator[None]:
    """A context in which this thread lowers graphs, whose loops compile meanwhile."""
    from fzero.core.torch_private import AsyncCompile

    builds: list[tuple[dict[str, Any], list[str], Future[str]]] = []
    thread_id = threading.get_ident()

    def defer_loop(self: Any, types: Sequence[str], source: str) -> Any:
        return _Loop(types, source) if threading.get_ident() == thread_id else single(self, types, source)

    def begin(self: Any, scope: dict[str, Any]) -> None:
        names = [name for name, value in scope.items() if isinstance(value, _Loop)]
        if names:
            builds.append((scope, names, pool.submit(_builder([scope[name] for name in names]))))
        wait(self, scope)

    with _PATCHED, ThreadPoolExecutor(2) as pool:
        single, wait = AsyncCompile.cpp_pybinding, AsyncCompile.wait
        AsyncCompile.cpp_pybinding, AsyncCompile.wait = defer_loop, begin
        try:
            yield
        finally:
            AsyncCompile.cpp_pybinding, AsyncCompile.wait = single, wait
        for scope, names, library in builds:
            scope.update({name: load_loops(library.result(), f"kernel_{i}") for i, name in enumerate(names)})


def _builder(loops: Sequence[_Loop]) -> Callable[[], str]:
    """The function that compiles loops as one library, or finds it in Inductor's cache, and returns its file."""
    from fzero.core.torch_private import inductor_config

    _graphs.append(None)
    parts = [_bound(loop, f"kernel_{i}") for i, loop in enumerate(loops)]
    # A change of Inductor's config is not for threads: the command is made here, and run there.
    with inductor_config.patch(cpp_cache_precompile_headers=len(_graphs) > FEW):
        build = _cache().load_async("\n".join([_HEADERS, *parts]))
    return lambda: build().file


def _bound(loop: _Loop, name: str) -> str:
    """A loop as a function of the extension module `name`, which has the same name."""
    cache = _cache()
    arguments = ", ".join(f"parse_arg<{kind.replace('const ', '')}>(args, {i})" for i, kind in enumerate(loop.types))
    binding = cache.suffix_template.format(
        arg_len=len(loop.types),
        call_entry_func=f"{name}({arguments}); Py_RETURN_NONE;",
        entry_func=name,
        extra_parse_arg=cache.extra_parse_arg.format(array_len=-1),
    )
    return f"#define kernel {name}\n{loop.source}\n#undef kernel\nnamespace of_{name} {{\n{binding}\n}}"


@functools.cache
def _cache() -> Any:
    """Inductor's cache of C++ libraries with a result that is only its file."""
    from fzero.core.torch_private import CppPythonBindingsCodeCache

    opened = staticmethod(lambda path, key: SimpleNamespace(file=path))
    return type("Loops", (CppPythonBindingsCodeCache,), {"cache": {}, "_load_library_inner": opened})


_LOADED: dict[Any, tuple[str, str]] = {}


def library_of(loop: Any) -> tuple[str, str] | None:
    """(the file, the name) of a loop that this process has loaded; None for anything else."""
    return _LOADED.get(loop) if isinstance(loop, BuiltinFunctionType) else None


@functools.cache
def load_loops(file: str, name: str) -> Callable[..., None]:
    """The function `name` of a library of loops, which is the only one of an extension module of this name."""
    from fzero.core.torch_private import dynamo_guards

    # A module asks the environment for a function of torch.
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(dynamo_guards._torchinductor_pyobject_tensor_data_ptr)
    spec = importlib.util.spec_from_file_location(f"fzero_{Path(file).stem.partition('.')[0]}.{name}", file)
    assert spec is not None and spec.loader is not None  # as it is a file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loop = getattr(module, name)
    _LOADED[loop] = (file, name)
    return loop


Run = Callable[[list[Tensor]], Sequence[Tensor]]  # empties its list
# What the Python function of a kept program may use: the beginning of Inductor's module, by the same names.
NAMES: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch,
    "aten": lambda: torch.ops.aten,
    "device": lambda: torch.device,
    "inf": lambda: inf,
    "nan": lambda: nan,
    "assert_size_stride": lambda: _guards().assert_size_stride,
    "assert_alignment": lambda: _guards().assert_alignment,
    "empty_strided_cpu": lambda: _guards()._empty_strided_cpu,
    "reinterpret_tensor": lambda: _guards()._reinterpret_tensor,
}


class StoredProgram(NamedTuple):
    """A compiled graph as a text and libraries."""

    text: str  # of the class Runner, whose method `call` runs it
    kernels: dict[str, tuple[str, str]]  # the name of a C++ loop in the text -> the file of its library, its name there
    products: list[str]  # the functions of torch that the text calls as attributes of extern_kernels
    modules: list[str]  # those that define the operators that the text calls


def program_question(identity: Any, inputs: Sequence[Tensor]) -> str | None:
    """The question whose answer is the compiled programs of `identity` for such inputs; None if there is none."""
    # A process that changes what functions of this package do (a test, a form of one's own) would ask the same question
    # and mean another one.
    plain = all(type(t) is Tensor and t.device.type == "cpu" and t.layout == torch.strided for t in inputs)
    if not (compile_cache.programs_allowed() and plain):
        return None
    try:
        described = describe(identity)
    except ValueError:
        return None
    products = getattr(torch.backends.mkldnn, "matmul", None)  # some versions have no such switch
    settings = (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        getattr(products, "fp32_precision", ""),
    )
    shapes = [(tuple(t.shape), t.stride(), str(t.dtype)) for t in inputs]
    question = {
        "package": compile_cache.package_digest(),
        "what": described,
        "inputs": shapes,
        "settings": str(settings),
    }
    question["environment"] = compile_cache.environment_variables()
    return json.dumps(compile_cache.platform_facts() | question, sort_keys=True)


def describe(value: Any, depth: int = 0) -> Any:
    """Values of JSON that differ if two values would be traced differently: of numbers, texts, dtypes, trees of them,
    frozen dataclasses, and functions of this package with what they close over. An object of a class that is OPAQUE is
    told apart by its class alone: no program that contains one is kept.

    Raises ValueError for anything else.

    >>> describe((1, True, torch.float32))
    ['tuple', ['int', '1'], ['bool', 'True'], ['dtype', 'torch.float32']]
    """
    kind: Any = type(value)
    inner = functools.partial(describe, depth=depth + 1)
    if depth > 20:
        raise ValueError("values are nested too deep, perhaps without end")
    if kind in (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device):
        return [kind.__name__, str(value)]
    if isinstance(value, type):
        return ["type", f"{value.__module__}.{value.__qualname__}"]
    if kind in (tuple, list) or (issubclass(kind, tuple) and hasattr(kind, "_fields") and _ours(kind)):
        return [_name(kind), *map(inner, value)]
    if kind in (dict, types.MappingProxyType):
        return ["dict", *([inner(key), inner(item)] for key, item in value.items())]
    if getattr(kind, "OPAQUE", False) and _ours(kind):
        return [_name(kind)]
    if kind is functools.partial:
        return ["partial", inner(value.func), inner(value.args), inner(value.keywords)]
    if kind is types.FunctionType and hasattr(value, SELF_CHECKED):  # it checks arguments, which no trace sees
        return inner(inspect.unwrap(value))
    if kind is types.FunctionType and _ours(value):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        captured = (value.__defaults__, value.__kwdefaults__, cells)
        return [_name(value), _code(value.__code__), *map(inner, captured)]
    settings: Any = getattr(kind, "__dataclass_params__", None)
    if settings is not None and settings.frozen and _ours(kind):
        instance: Any = value
        fields = [field.name for field in dataclasses.fields(instance) if field.compare]
        return [_name(kind), *(inner(getattr(value, name)) for name in fields)]
    raise ValueError(f"{value!r} is not told apart by value")


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}" if _ours(value) else value.__name__


def _ours(value: Any) -> bool:
    return value.__module__.split(".")[0] == "fzero"


def _code(code: types.CodeType) -> list[Any]:
    # The package's digest stands for its text: this tells functions of one line apart.
    inner = [_code(constant) if isinstance(constant, types.CodeType) else repr(constant) for constant in code.co_consts]
    return [code.co_firstlineno, code.co_code.hex(), list(code.co_names), inner]


def program_of(run: Any) -> StoredProgram | None:
    """The program of a graph that Inductor has compiled; None if it is of a form that cannot be kept."""
    source, call = getattr(run, "source_code", ""), getattr(run, "current_callable", None)
    plain = not (getattr(run, "constants", True) or getattr(run, "inputs_to_check", True))
    if not (plain and source and isinstance(call, types.MethodType)):
        return None
    from fzero.core.torch_private import extern_kernels

    body, scope = ast.parse(source).body, call.__func__.__globals__
    lines = {ast.unparse(node) for node in body}
    runners = [node for node in body if isinstance(node, ast.ClassDef) and node.name == "Runner"]
    if len(runners) != 1 or not {"runner = Runner(partitions=[])", "call = runner.call"} <= lines:
        return None
    used, products = _global_names(runners[0])
    kernels = {}
    for name in used - {"extern_kernels", *NAMES, *vars(builtins)}:
        location = library_of(scope.get(name))
        if location is None:
            return None
        kernels[name] = location
    if any(getattr(torch, name, None) is not getattr(extern_kernels, name) for name in products):
        return None
    modules = {KERNELS[name] for name in _operators(runners[0]) if name in KERNELS}
    return StoredProgram(ast.unparse(runners[0]), kernels, sorted(products), sorted(modules))


def _global_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """(the global names that functions in a tree use, the attributes of extern_kernels among them)."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    local = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    local |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    products = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "extern_kernels"
    }
    return {node.id for node in names} - local, products


def _operators(tree: ast.AST) -> set[str]:
    """The operators fzero::NAME that are called in a tree."""
    names = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {f"fzero::{name.split('.')[3]}" for name in names if name.startswith("torch.ops.fzero.")}


def load(program: StoredProgram) -> Run | None:
    """The function of a program; None if it calls an operator that this process does not have."""
    for module in program.modules:
        importlib.import_module(module)
    if any(not hasattr(torch.ops.fzero, name.removeprefix("fzero::")) for name in _operators(ast.parse(program.text))):
        return None
    products = types.SimpleNamespace(**{name: getattr(torch, name) for name in program.products})
    names: dict[str, Any] = {name: make() for name, make in NAMES.items()}
    names["extern_kernels"] = products
    names |= {name: load_loops(*location) for name, location in program.kernels.items()}
    exec(compile(program.text, f"<a kept program of {len(program.kernels)} loops>", "exec"), names)
    return names["Runner"](partitions=[]).call


def _guards() -> Any:
    from fzero.core.torch_private import dynamo_guards

    return dynamo_guards


class CachedPrograms(NamedTuple):
    """The kept answer to a question."""

    programs: tuple[Run, ...] | None  # None: they could not be kept, and have to be traced
    facts: dict[str, Any]


def load_programs(question: str | None) -> CachedPrograms | None:
    """The answer kept for a question; None without one, or if a library is gone."""
    answer = compile_cache.load_answer(question) if question is not None else None
    if answer is None:
        return None
    if answer["programs"] is None:
        return CachedPrograms(None, answer["facts"])
    try:
        runs = tuple(run for fields in answer["programs"] if (run := load(StoredProgram(**fields))) is not None)
    except (ImportError, OSError):
        return None
    return CachedPrograms(runs, answer["facts"]) if len(runs) == len(answer["programs"]) else None


def store_programs(question: str | None, runs: Sequence[Any], facts: Mapping[str, Any]) -> None:
    """Keep compiled graphs, or at least that they were compiled here, for a question."""
    if question is None:
        return
    programs = [program for run in runs if (program := program_of(run)) is not None]
    is_complete = len(programs) == len(runs)
    files = sorted({file for program in programs for file, _ in program.kernels.values()}) if is_complete else []
    compile_cache.store(
        question, {"programs": [p._asdict() for p in programs] if is_complete else None, "facts": dict(facts)}, files
    )
