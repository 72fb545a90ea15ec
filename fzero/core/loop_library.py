"""The C++ loops of compiled graphs, as one library for each graph.

Inductor compiles every loop by itself, and each waits seconds for torch's headers. All loops of a graph in one file
take little longer than one; a thread compiles them while the next graph is lowered.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import BuiltinFunctionType, SimpleNamespace
from typing import Any, NamedTuple

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
            scope.update({name: load(library.result(), f"kernel_{i}") for i, name in enumerate(names)})


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
def load(file: str, name: str) -> Callable[..., None]:
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
