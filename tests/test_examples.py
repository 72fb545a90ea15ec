"""The programs of examples/ run as they are, and the list in their README is the folder's."""

import ast
import functools
import os
import re
import subprocess
import tempfile
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ON_RANKS = ("zero3_torchrun", "own_module_zero3", "dp_sgd", "contrastive")
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}


@functools.cache
def alone(path):
    """What the example prints on one process, run once for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        return output_of([f"{forked.programs()}/script", path], folder)


def output_of(command, folder):
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.slow] * (p.stem != "own_loss")) for p in EXAMPLES], ids=lambda p: p.stem
)
def test_it_runs(path):
    assert alone(path)


DRAWS = {"rand", "randn", "randint", "randperm", "normal", "multinomial", "bernoulli", "normal_", "uniform_", "random_"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_every_draw_has_its_generator(path):
    """An example that asserts what it reached does the same work each time it is run."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr in DRAWS:
            ours = ast.unparse(call.func.value).endswith("random")  # fzero.random takes a key
            assert ours or any(word.arg == "generator" for word in call.keywords), ast.unparse(call)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_RANKS)
def test_two_ranks_print_what_one_process_prints(name, tmp_path):
    path = ROOT / "examples" / f"{name}.py"
    one = [float(x) for x in re.findall(r"loss (\d+\.\d+)", alone(path))]
    launch = [f"{forked.programs()}/torchrun", "--standalone", "--nproc-per-node", "2", path]
    two = [float(x) for x in re.findall(r"loss (\d+\.\d+)", output_of(launch, tmp_path))]
    # The noise of DP-SGD is drawn by shard, so only its first step is the same.
    count = 1 if name == "dp_sgd" else len(one)
    assert one and two[:count] == pytest.approx(one[:count], abs=2e-4)


def test_a_module_of_ones_own_takes_twelve_lines_at_stage_3_on_any_number_of_ranks():
    """Counted are the lines outside of the module and its loss that name fzero or what it made, but those that print,
    and those that look at the end."""
    path = ROOT / "examples" / "own_module_zero3.py"
    text, made, lines = path.read_text(), {"fzero"}, set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and "fzero." in ast.unparse(node.value):
            made |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        for name in ast.walk(node):
            imports = isinstance(name, ast.Import) and name.names[0].name == "fzero"
            uses = isinstance(name, ast.Name) and name.id in made and not within_print(node, name)
            if imports or uses:
                lines.add(name.lineno)
    shown = [line for i, line in enumerate(text.splitlines(), 1) if i in lines]
    assert {"state", "step", "plan", "model", "mesh", "tx"} <= made and "import fzero" in shown
    assert len(shown) <= 12, "\n".join(shown)


def within_print(node, name):
    """Whether a name only serves what is printed: within a call of print, or the condition of one."""
    shows = [
        one
        for one in ast.walk(node)
        if (isinstance(one, ast.Call) and ast.unparse(one.func) == "print")
        or (isinstance(one, ast.If) and all(ast.unparse(part).startswith("print(") for part in one.body))
    ]
    return any(name in ast.walk(one) for one in shows)


def test_their_page_lists_them_all():
    assert set(re.findall(r"\((\w+)\.py\)", (ROOT / "examples/README.md").read_text())) == {
        path.stem for path in EXAMPLES
    }
