"""The examples in the docstrings of the public names run, and every public name has one."""

import ast
import doctest
import importlib
import inspect
from pathlib import Path

import pytest
import torch

import fzero


def public_names():
    """{qualified name: object} of the functions and classes in fzero.__all__ and in __all__ of its public modules."""
    found = {}
    for module in (
        fzero,
        *(
            importlib.import_module(f"fzero.{m}")
            for m in ("optim", "models", "sharding", "sharding.pipeline", "checkpoint", "generate")
        ),
    ):
        for name in module.__all__:
            value = getattr(module, name)
            if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__.startswith("fzero."):
                found.setdefault(f"{value.__module__}.{value.__qualname__}", (f"{module.__name__}.{name}", value))
    return {shown: value for shown, value in found.values()}


PUBLIC = public_names()
DEFINED = {f"{value.__module__}.{value.__qualname__}" for value in PUBLIC.values()}
PACKAGE = Path(fzero.__file__).parent


def examples_of(name):
    value = PUBLIC[name]
    package = importlib.import_module(name.rpartition(".")[0])
    globs = {
        **{n: getattr(package, n) for n in package.__all__},
        **vars(inspect.getmodule(value)),
        "torch": torch,
        "fzero": fzero,
    }
    return doctest.DocTestFinder(recurse=False).find(value, name, module=False, globs=globs)[0]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_examples_of_public_names_run(name):
    value = PUBLIC[name]
    assert inspect.getdoc(value) and (value.__doc__ or "").strip(), f"{name} has no docstring"
    test = examples_of(name)
    assert test.examples, f"{name}: add an example to its docstring"
    said = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)
    assert not said, "".join(said)


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/*.py")}))
def test_examples_of_helpers_run(folder):
    wrong, options = [], doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        if ">>>" not in path.read_text():
            continue
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        package, module = importlib.import_module(name.rpartition(".")[0]), importlib.import_module(name)
        names = {n: getattr(package, n) for n in getattr(package, "__all__", ())}
        for test in doctest.DocTestFinder().find(module, extraglobs={**names, "torch": torch, "fzero": fzero}):
            if test.name not in DEFINED:  # those are above
                test.globs.update(vars(module))
                doctest.DocTestRunner(optionflags=options).run(test, out=wrong.append)
    assert not wrong, "".join(wrong)


def test_a_wrong_example_fails():
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner().run(test, out=lambda text: None).failed == 1


def test_every_public_function_and_class_says_what_it_is():
    bare = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not bare, bare
