"""Private names of torch: all of them in one file, each of them there in the torch that is installed."""

import ast
import functools
from pathlib import Path

import pytest
import torch

import fzero
from fzero.core import torch_private

ROOT = Path(fzero.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "torch_private.py")


@functools.cache
def text_of(path):
    return path.read_text()


def name_of(node):
    """The dotted name of an attribute of `torch`; "" for any other."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(["torch", *reversed(parts)]) if isinstance(node, ast.Name) and node.id == "torch" else ""


def private_names(source):
    """The dotted names of torch with a part that begins with an underscore, as (name, line); operators of torch.ops are
    not counted."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [name_of(node)]
        for name in names:
            first, *parts = name.split(".")
            private = any(part.startswith("_") and not part.startswith("__") for part in parts)
            if first == "torch" and private and parts[0] != "ops":
                yield name, node.lineno


def users(name):
    """The files of the package that use a name of torch_private."""
    return [
        str(path.relative_to(ROOT)) for path in FILES if "torch_private" in (text := text_of(path)) and name in text
    ]


def test_private_names_are_seen():
    source = (
        "import torch._dynamo\nfrom torch.utils import _pytree\ntorch._C._f(torch.ops.aten._to_copy, "
        "torch.add)\nx._cdata"
    )
    assert [name for name, _ in private_names(source)] == [
        "torch._dynamo",
        "torch.utils._pytree",
        "torch._C._f",
        "torch._C",
    ]


def test_no_other_file_names_what_is_private_to_torch():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}" for path in FILES for name, line in private_names(text_of(path))
    ]
    assert not found, f"{'; '.join(found)}: enter it in core/torch_private.py and use it from there"


def test_each_name_is_in_this_torch_and_used():
    where = {name: users(name) for name in torch_private.NAMES}
    assert not [name for name, files in where.items() if not files], "used by no file; remove it"
    missing = []
    for name, place in torch_private.NAMES.items():
        try:
            torch_private.resolve(name)
        except ImportError as error:
            missing.append(f"{place}, which {', '.join(where[name])} uses: {error}")
    assert not missing, f"torch {torch.__version__} lacks " + "; ".join(missing)


def test_a_missing_name_is_one_line(monkeypatch):
    monkeypatch.setitem(torch_private.NAMES, "gone", "torch._inductor.config:no_such_name")
    with pytest.raises(
        ImportError, match=r"torch [\d.]+\S* has no torch._inductor.config.no_such_name, which fzero uses"
    ):
        torch_private.gone  # noqa: B018
    with pytest.raises(AttributeError, match="no_such"):
        torch_private.no_such  # noqa: B018
