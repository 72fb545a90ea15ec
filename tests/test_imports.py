"""The order in which folders may import each other, what an import costs, names that do not shadow
Python's own, and the sizes of functions."""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fzero

ROOT = Path(fzero.__file__).parent
# A folder imports only from itself and from folders on a lower floor.
FLOORS = (
    ("core",),
    ("comm", "data"),
    ("sharding", "kernels"),
    ("optim", "models", "offload"),
    ("train",),
    ("checkpoint",),
    ("generate",),
    ("run",),
    ("planner", "report"),
    ("cli",),
    ("__main__",),
)
RUN_FLOORS = ("config", "setup", "measure", "runner")  # of the folders in run/
FLOOR = {name: i for i, names in enumerate(FLOORS) for name in names}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def module_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree_of(path):
    """A file's syntax tree, parsed once for all tests."""
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path):
    """The nodes of a file's syntax tree."""
    return list(ast.walk(tree_of(path)))


@functools.cache
def exists(module):
    base = ROOT.parent.joinpath(*module.split("."))
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()


def imported(path):
    """The modules a file imports, at its top or inside functions, as (dotted name, line): `from fzero import x` gives
    fzero.x."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: a relative import; write it from fzero"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if node.module.split(".")[0] == "fzero" and exists(inner) else node.module), node.lineno


def used(path):
    """The attributes that a file takes from the name `fzero`."""
    nodes = [node for node in nodes_of(path) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "fzero"}


def refusal_of_all(path):
    """Why a file may not import the package itself, which loads anything that is asked of it; "" if it may, as for its
    version alone."""
    return "" if used(path) <= {"__version__"} else "import from fzero's modules, not from the package"


def refusal(mine, other):
    """Why a file of folder `mine` may not import from folder `other`; "" if it may."""
    for name in (mine, other):
        if name not in FLOOR:
            return f"{name} is on no floor of FLOORS; give it one"
    if mine == other or FLOOR[other] < FLOOR[mine]:
        return ""
    if FLOOR[other] == FLOOR[mine]:
        return f"{mine} imports {other}, which is beside it; folders of one floor do not import each other"
    return f"{mine} imports {other}, which is above it"


def test_the_parser_sees_imports_inside_functions(tmp_path):
    source = tmp_path / "some.py"
    source.write_text(
        "import torch\ndef f():\n    from fzero.core import pytree\n    from fzero.sharding.spec import "
        "Spec\n    import fzero.train as t\n"
    )
    assert [name for name, _ in imported(source)] == [
        "torch",
        "fzero.core.pytree",
        "fzero.sharding.spec",
        "fzero.train",
    ]


def test_what_points_upward_or_sideways_is_refused():
    assert refusal("train", "optim") == refusal("train", "train") == ""
    assert "above" in refusal("core", "comm")
    assert "beside" in refusal("planner", "report")
    assert "no floor" in refusal("engine", "core")


def wrong_imports(path):
    """A line for each import of a file that points elsewhere than down."""
    mine = module_of(path).split(".")[1]
    for name, line in imported(path):
        head, *rest = name.split(".")
        if head == "fzero" and (why := refusal(mine, rest[0]) if rest else refusal_of_all(path)):
            yield f"{path.relative_to(ROOT)}:{line}: {why}"


def test_imports_point_one_way():
    wrong = [line for path in FILES for line in wrong_imports(path)]
    assert not wrong, "\n".join(wrong)


def test_the_folders_of_a_run_use_those_before_them():
    floors = [path.parent.name for path in FILES if path.parent.parent == ROOT / "run"]
    assert set(floors) == set(RUN_FLOORS)
    imports = [
        (path.parent.name, name.split(".")[2], f"{path.relative_to(ROOT)}:{line}")
        for path in FILES
        for name, line in imported(path)
        if path.parent.name in RUN_FLOORS and name.startswith("fzero.run.")
    ]
    assert not [row for row in imports if RUN_FLOORS.index(row[1]) > RUN_FLOORS.index(row[0])]


def test_the_folder_map_of_the_contributors_is_this_order():
    text = (ROOT.parent / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `fzero/(\w+)/` \|", text, re.MULTILINE)
    floors = [(str(i), name) for i, names in enumerate(FLOORS, 1) for name in names if (ROOT / name).is_dir()]
    assert rows == floors
    named = re.findall(r"`((?:fzero|tests|docs|benchmarks|examples|\.ci)/[\w./]*)`", text)
    assert len(named) > 30 and not [name for name in named if not (ROOT.parent / name).exists() and "NAME" not in name]


def test_no_import_cycles():
    graph = {module_of(path): {name for name, _ in imported(path) if name.startswith("fzero.")} for path in FILES}
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


def test_the_root_reads_like_a_table_of_contents():
    entries = sorted(
        p.name
        for p in ROOT.iterdir()
        if p.name not in ("__pycache__", "py.typed", "__init__.pyi") and (p.is_file() or any(p.rglob("*.py")))
    )
    folders = [name for names in FLOORS for name in names if name != "__main__"]
    assert entries == sorted([*folders, "__init__.py", "__main__.py"])
    assert len(entries) <= 17


def test_no_file_bears_the_name_of_a_standard_library_module():
    """From inside a folder Python's own modules would otherwise import ours."""
    names = {path.stem for path in FILES} | {path.name for path in ROOT.rglob("*") if path.is_dir()}
    assert not (names - {"__main__"}) & set(sys.stdlib_module_names)


def uses_torch_pytrees(path):
    users = [name for name, _ in imported(path) if "pytree" in name and not name.startswith("fzero.")]
    names = [node for node in nodes_of(path) if isinstance(node, ast.Attribute) and node.attr == "_pytree"]
    named = [node for node in nodes_of(path) if isinstance(node, ast.alias) and node.name.endswith("pytree")]
    return bool(users or names or any(node.name != "pytree" for node in named))


def test_only_pytree_imports_torch_pytrees():
    assert [str(path.relative_to(ROOT)) for path in FILES if uses_torch_pytrees(path)] == ["core/pytree.py"]


def test_only_numa_asks_linux_for_the_cores_of_a_process():
    """Other systems have no such function: who needs their number calls `numa.cores`."""
    users = [path for path in FILES for node in nodes_of(path) if getattr(node, "attr", "").startswith("sched_")]
    assert {str(path.relative_to(ROOT)) for path in users} == {"core/host_memory.py"}


def after_import(module):
    code = f"import sys, {module}; print(sorted({{name.split('.')[0] for name in sys.modules}}))"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return ast.literal_eval(run.stdout)


@pytest.mark.parametrize("module", ("fzero", "fzero.cli.main"))
def test_import_waits_for_no_heavy_library(module):
    heavy = {"torch", "numpy", "tokenizers", "matplotlib", "tensorstore", "transformers", "jax", "safetensors"}
    assert not heavy & set(after_import(module))


@pytest.mark.slow
def test_a_run_waits_for_no_library_that_its_first_step_does_not_use():
    """Where blocks were compiled by an earlier run: sympy is what torch's compiler and DTensor bring."""
    found = set(after_import("fzero.run.runner.loop, fzero.run.runner.pretrain"))
    assert "torch" in found
    assert not {"sympy", "networkx", "matplotlib", "tensorstore", "transformers", "jinja2", "jax"} & found


# What few runs use, beside the updates of UPDATE_MODULES: what asks for a feature loads its file.
DELETABLE = {
    "train": ("spike", "sdc_check", "local_steps"),
    "models": ("dropping", "module_tp_search"),
    "data": ("curriculum",),
    "run": ("setup/members", "setup/elastic"),
    "optim": ("onebit", "zero_one_adam", "adafactor"),
    "planner": ("slow_link_options",),
    "checkpoint": ("convert/upcycle",),
}
RUN = "pretrain --data text.txt --out run --model llama-tiny --steps 2 --batch 2 --micro-batch 2 --seq-len 8"
COMMANDS = ((f"{RUN} --set train.compiled=false", "2 steps in"), ("plan --model llama-tiny", "a step, predicted"))


@pytest.mark.slow
def test_what_few_runs_use_is_in_files_that_nothing_else_needs(tmp_path):
    """Tests that do not name them pass in a copy of the package without them, and so do commands."""
    from fzero.train.step import UPDATE_MODULES

    shutil.copytree(ROOT, tmp_path / "fzero", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT.parent / "pyproject.toml", tmp_path)
    (tmp_path / "tests").symlink_to(ROOT.parent / "tests")
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 50)
    assert len(UPDATE_MODULES) == 3
    updates = [f"update/{name}" for name in UPDATE_MODULES.values()]
    for folder, names in DELETABLE.items():
        for name in (*names, *updates * (folder == "train")):
            (tmp_path / f"fzero/{folder}/{name}.py").unlink()
    files = ["tests/test_donate.py", "tests/test_streaming.py", "-k", "not training_on_from"]  # which names a check
    tests = ["pytest", "-q", "-n0", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for words, command in ((" passed", tests), *((words, ["fzero", *text.split()]) for text, words in COMMANDS)):
        command = [sys.executable, "-m", *command]
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0 and words in run.stdout, run.stdout + run.stderr


# Files that a run of two steps of mlp-tiny on one CPU does not import.
EXOTIC = """
    models.llama models.gpt2 models.deepseek models.mixtral models.lora models.preference kernels.attention
    kernels.attention_ring kernels.float8 kernels.moe kernels.quantize kernels.rope optim.lamb offload.store
    optim.deepspeed_schedules checkpoint.restore_state checkpoint.convert.peft data.preferences train.local_steps
    train.update.offloaded run.setup.weights run.setup.elastic
"""
MOST_IMPORTED = 225
PLAIN_RUN = """
import pathlib, sys
from click.testing import CliRunner
from fzero.cli.main import cli
pathlib.Path("text.txt").write_text("To be, or not to be, that is the question. " * 50)
args = "pretrain --model mlp-tiny --steps 2 --batch 2 --micro-batch 2 --seq-len 8 --precision fp32 --data text.txt"
args += " --set train.compiled=false --set train.measure_every=0 --out run --peak-tflops 1"
result = CliRunner().invoke(cli, [*args.split(), "--prompt", ""], catch_exceptions=False)
assert result.exit_code == 0, result.output
print([name for name in sys.modules if name.startswith("fzero")])
"""


@pytest.mark.slow
def test_a_plain_run_imports_what_it_uses(tmp_path):
    command, paths = [sys.executable, "-c", PLAIN_RUN], {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    run = subprocess.run(command, cwd=tmp_path, env=paths, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    imported_names = ast.literal_eval(run.stdout.splitlines()[-1])
    assert not {f"fzero.{name}" for name in EXOTIC.split()} & set(imported_names)
    assert len(imported_names) <= MOST_IMPORTED
    assert all(exists(f"fzero.{name}") for name in EXOTIC.split())


def test_every_public_name_loads():
    for name in fzero.__all__:
        assert getattr(fzero, name) is not None, name
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = fzero.Trainer


def names_of(module):
    """The names that a module binds, or the stub of a package imports."""
    path = ROOT.parent.joinpath(*module.split(".")).with_suffix(".py")
    nodes = nodes_of(path if path.exists() else path.with_suffix("") / "__init__.pyi")
    return {getattr(node, "asname", None) or getattr(node, "name", None) or getattr(node, "id", None) for node in nodes}


def test_what_a_package_offers_exists():
    """Names load when first used, so that no import of a package fails because of a name that moved."""
    stubs = sorted(ROOT.rglob("__init__.pyi"))
    assert len(stubs) > 20
    missing = [
        f"{stub.relative_to(ROOT)}:{node.lineno}: {node.module} has no {alias.name}; say where it is now"
        for stub in stubs
        for node in nodes_of(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if not exists(f"{node.module}.{alias.name}")
        and not (node.module != module_of(stub) and exists(node.module) and alias.name in names_of(node.module))
    ]
    assert not missing, "\n".join(missing)


@functools.cache
def imports_from(path):
    return [node for node in nodes_of(path) if isinstance(node, ast.ImportFrom)]


def names_used_of(package):
    """The names that files outside of a package import from it, and those that any file takes as its attributes."""
    parent, _, name = package.rpartition(".")
    names = set()
    for path in FILES:
        imports = imports_from(path)
        if not f"{module_of(path)}.".startswith(f"{package}."):
            inner = [node for node in imports if f"{node.module}.".startswith(f"{package}.")]
            names |= {alias.name for node in inner for alias in node.names if node.module != "fzero.core.torch_private"}
        aliases = {
            a.asname or a.name for node in imports if node.module == parent for a in node.names if a.name == name
        }
        attributes = [node for node in nodes_of(path) if aliases and isinstance(node, ast.Attribute)]
        names |= {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id in aliases}
    return names


def test_a_package_offers_contributors_what_other_packages_use():
    """And nothing else: the names below the string of its stub, beside those for users."""
    wrong = []
    for stub in ROOT.rglob("*/__init__.pyi"):
        package = module_of(stub)
        users, contributors = (
            {line.split()[-1] for line in text.splitlines() if line.startswith("from ")}
            for text in stub.read_text().split('"""')[::2]
        )
        used = names_used_of(package) - users
        wrong += [f"{stub.relative_to(ROOT)}: {name} is missing" for name in used - contributors - {"__all__"}]
        wrong += [f"{stub.relative_to(ROOT)}: {name} is used by no other package" for name in contributors - used]
    assert not wrong, "\n".join(sorted(wrong))


MOST_LINES, MOST_PARAMETERS = 80, 8
# Kernels take pointers and strides, optimizers their hyperparameters, commands their flags.
MANY_PARAMETERS = ("kernels", "optim", "cli")
# Three arguments, and keywords that each are a subject.
EXCEPTIONS = {("sharding/zero_stages.py", "zero_plan"): 10}


def too_large(path, folder):
    """A line for each function of a file with too many lines or parameters."""
    for node in nodes_of(path):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines, a = node.end_lineno - node.lineno + 1, node.args
        names = [one.arg for one in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        most = EXCEPTIONS.get((folder, node.name), MOST_PARAMETERS)
        if lines > MOST_LINES:
            yield f"{folder}:{node.lineno}: {node.name} has {lines} lines; at most {MOST_LINES}"
        if count > most and folder.split("/")[0] not in MANY_PARAMETERS:
            yield f"{folder}:{node.lineno}: {node.name} has {count} parameters; at most {most}"


def test_functions_are_short_and_have_few_parameters():
    wrong = [line for path in FILES for line in too_large(path, path.relative_to(ROOT).as_posix())]
    assert not wrong, "\n".join(wrong)


def test_a_large_function_is_found(tmp_path):
    names = ", ".join("abcdefghi")
    many, long = f"def f({names}):\n    pass\n", "def f():\n" + "    pass\n" * 80
    for text, folder, expected in (
        (many, "run/some.py", "run/some.py:1: f has 9 parameters; at most 8"),
        (many, "kernels/some.py", None),
        (f"class C:\n    def f(self, {names[:-3]}):\n        pass\n", "run/some.py", None),
        (long, "cli/some.py", "cli/some.py:1: f has 81 lines; at most 80"),
    ):
        source = tmp_path / f"{len(text)}{folder.replace(chr(47), chr(45))}"
        source.write_text(text)
        assert [*too_large(source, folder)] == ([] if expected is None else [expected])


def test_no_test_file_changes_a_table_that_it_imports():
    """Files of tests share a process: what one adds to another's cases, a third one runs."""
    changed = []
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text())
        imported = {
            name.asname or name.name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names
        }
        for node in tree.body:
            if isinstance(node, ast.AugAssign):
                targets = [node.target]
            elif isinstance(node, ast.Assign):
                targets = [target for target in node.targets if not isinstance(target, ast.Name)]
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                targets = [node.value.func.value] if isinstance(node.value.func, ast.Attribute) else []
            else:
                targets = []
            roots = {next((n.id for n in ast.walk(target) if isinstance(n, ast.Name)), "") for target in targets}
            changed += [f"{path.name}:{node.lineno}" for _ in roots & imported]
    assert not changed


# Words that say nothing of what a value is. `out` is the field's word for a result.
STOP_WORDS = set(
    re.findall(
        r"\w+",
        """me my myself we our ours ourselves you your yours he him his she her it its they them their what
        which who whom this that these those am was were be been being have has had having do does did doing
        an the but because until of at by about against between into through during before after above below
        to up down on off over under again further then once here there when where why how all any both each
        few more most other some such no nor only own same so than too very can will just should now""",
    )
)
VAGUE_WORDS = set(
    re.findall(
        r"\w+",
        """found made one kept held told rest given taken drawn moved settled owed left late coming begun gone
        said known mine others whole part place room rooms home away back beside apart together least many
        still seen looked wanted asked answers news shown sees tell keep put take""",
    )
)


def bound_names(path):
    """The names of variables and parameters of a file, once for each binding."""
    for node in nodes_of(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def test_names_are_nouns_of_the_field():
    names = [(name, path.relative_to(ROOT)) for path in FILES for name in bound_names(path)]
    assert len(names) > 10_000
    for words in (STOP_WORDS, VAGUE_WORDS):
        bad = [f"{path}: {name}" for name, path in names if name in words]
        assert len(bad) <= 0.01 * len(names), bad


def test_a_class_name_exists_once():
    paths = {}
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                paths.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in paths.items() if len(places) > 1} == {}
