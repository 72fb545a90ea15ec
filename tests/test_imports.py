"""The order in which modules may import each other, and what an import costs."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import fzero

ROOT = Path(fzero.__file__).parent
# A module imports only from its own group or an earlier one.
GROUPS = (
    ("pytree", "native", "target", "random", "digest", "signals", "meeting"),
    ("ledger", "rollcall"),
    ("links", "operators", "lowered"),
    ("collectives",),
    ("autodiff", "compile", "sharding", "kernels"),
    ("optim", "offload", "models", "streaming", "tiling"),
    ("precision", "spikes", "gradients", "update", "update_streamed", "update_early", "update_delayed"),
    ("state", "stored", "init", "weights"),
    ("train", "backward", "crosscheck"),
    (
        "checkpoint",
        "data",
        "clock",
        "profile",
        "config",
        "huggingface",
        "huggingface_names",
        "huggingface_import",
        "migrate",
        "tables",
        "tensorfile",
    ),
    ("reshard",),
    ("runs",),
    ("inspect", "report"),
    ("differences",),
    ("program", "capacity", "sample", "doctor", "corpus", "team"),
    ("planner", "bench"),
    ("watchdog", "again"),
    ("elastic",),
    ("kept", "saving", "guard", "evaluate", "norms", "stragglers", "attempts", "recorded", "rows"),
    ("pretrain", "exchange"),
    ("replay",),
    ("bisect",),
    ("cli_config", "cli_bench", "cli_ckpt", "cli_plan", "cli_report", "cli", "__main__"),
)
GROUP = {name: i for i, names in enumerate(GROUPS) for name in names}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def module_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def exists(module):
    base = ROOT.parent.joinpath(*module.split("."))
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()


def imported(path):
    """The modules a file imports, at its top or inside functions, as (dotted name, line): `from fzero import x` gives fzero.x."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: a relative import; write it from fzero"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if node.module.split(".")[0] == "fzero" and exists(inner) else node.module), node.lineno


def used(path):
    """The attributes that a file takes from the name `fzero`."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "fzero"}


def test_the_parser_sees_imports_inside_functions(tmp_path):
    source = tmp_path / "some.py"
    source.write_text(
        "import torch\ndef f():\n    from fzero import pytree\n    from fzero.sharding.spec import Spec\n    import fzero.train as t\n"
    )
    assert [name for name, _ in imported(source)] == ["torch", "fzero.pytree", "fzero.sharding.spec", "fzero.train"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    mine = module_of(path).split(".")[1]
    assert mine in GROUP, f"{mine} has no place in the order of imports; give it one"
    for name, line in imported(path):
        head, *rest = name.split(".")
        if head == "fzero":
            if not rest:  # the package itself, which loads anything that is asked of it: for its version alone
                assert used(path) <= {"__version__"}, f"{path.name}:{line}: import from fzero's modules, not from the package"
                continue
            assert rest[0] in GROUP, f"{rest[0]} has no place in the order of imports; give it one"
            assert GROUP[rest[0]] <= GROUP[mine], f"{path.name}:{line}: {mine} imports {name}, which comes after it"


def test_no_import_cycles():
    graph = {module_of(path): {name for name, _ in imported(path) if name.startswith("fzero.")} for path in FILES}
    # A package's own parts are imported by its __init__; what is outside goes by the package.
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            path.append(module)
            for other in sorted(graph[module] - {module}):
                visit(other)
            done.add(path.pop())

    for module in graph:
        visit(module)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_pytree_imports_torch_pytrees(path):
    users = [name for name, _ in imported(path) if "pytree" in name and not name.startswith("fzero.")]
    names = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute) and node.attr == "_pytree"]
    named = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.alias) and node.name.endswith("pytree")]
    mine = path == ROOT / "pytree.py"
    assert mine or (not users and not names and all(node.name == "pytree" for node in named))


def after_import(module):
    code = f"import sys, {module}; print(sorted({{name.split('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return ast.literal_eval(run.stdout)


@pytest.mark.parametrize("module", ("fzero", "fzero.cli"))
def test_import_waits_for_no_heavy_library(module):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not there")
    heavy = {"torch", "numpy", "tokenizers", "matplotlib", "tensorstore", "transformers", "jax", "safetensors"}
    assert not heavy & set(after_import(module))


def test_every_public_name_loads():
    for name in fzero.__all__:
        if name in fzero._MODULES and not exists(f"fzero.{name}"):
            continue
        assert getattr(fzero, name) is not None, name
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = fzero.Trainer
