"""Every example in README.md and docs/ runs: python blocks of a page in one namespace, bash blocks with this
environment's commands."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import forked
import pytest

from fzero import models

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import links  # noqa: E402

PAGES = [*ROOT.glob("README.md"), *sorted(ROOT.glob("docs/*.md"))]
# Their examples train, start processes or make many plans: more than five seconds each.
SLOW = (
    "bench",
    "checkpoints",
    "fault",
    "finetune",
    "frameworks",
    "generate",
    "guard",
    "measure",
    "migrate",
    "offload",
    "parallel",
    "plan",
    "pretrain",
    "recipes",
    "replay",
    "report",
    "start",
)
WHOLE = ("recipes",)  # each of their python blocks is a program of its own
KINDS = {"python", "bash", "console", "text", "toml", "json"}  # the first two are executed


class Block(NamedTuple):
    kind: str
    line: int  # of its first line of code
    code: str


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page; raises ValueError for a fence without an end or of an unknown kind."""
    blocks, kind, start, lines = [], None, 0, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = re.fullmatch(r"\s*```(\w*)\s*", line)
        if fence is None:
            lines.append(line)
        elif kind is None:
            kind, start, lines = fence[1], number + 1, []
            if kind not in KINDS:
                raise ValueError(
                    f"{page.name}:{number}: a block of kind {kind!r}; it must be one of {', '.join(sorted(KINDS))}"
                )
        else:
            blocks.append(Block(kind, start, "\n".join(lines) + "\n"))
            kind = None
    if kind is not None:
        raise ValueError(f"{page.name}:{start - 1}: the block has no end")
    return blocks


def missing(block: Block) -> str:
    """The package that the block says it needs and that is not there, or nothing."""
    needs = re.match(r"# needs: ([\w.]+)", block.code)
    return needs[1] if needs and importlib.util.find_spec(needs[1]) is None else ""


def run_python(block: Block, page: Path, namespace: dict) -> None:
    # Empty lines in front, so that a traceback shows the line of the page.
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    exec(code, namespace)


def run_bash(block: Block, page: Path, folder: Path) -> None:
    quick = [forked.programs()] if re.search("(fzero|torchrun) ", block.code) else []
    places = [*quick, str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "PATH": os.pathsep.join(places)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def each_page(pages: list[Path]):
    cases = [pytest.param(page, marks=[pytest.mark.slow] * (page.stem in SLOW), id=page.name) for page in pages]
    return pytest.mark.parametrize("page", cases)


def run_page(page: Path, folder: Path) -> list[str]:
    """Run the page's blocks in order, its python blocks in one namespace unless the page is in WHOLE. Returns what was
    left out, and why. A failure names page and line."""
    namespace, left_out = {"__name__": "__docs__"}, []
    for block in blocks_of(page):
        if missing(block):
            left_out.append(f"{page.name}:{block.line}: needs {missing(block)}, which is not installed")
            continue
        try:
            if block.kind == "python":
                run_python(block, page, {"__name__": "__docs__"} if page.stem in WHOLE else namespace)
            elif block.kind == "bash":
                run_bash(block, page, folder)
        except Exception as error:
            raise AssertionError(
                f"{page.name}:{block.line}: the {block.kind} block fails: {type(error).__name__}: {error}"
            ) from error
    return left_out


@each_page(PAGES[::2])
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    left_out = run_page(page, tmp_path)
    if left_out:
        pytest.skip("; ".join(left_out))


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        (
            "# t\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n",
            AssertionError,
            r"page.md:8: the python block",
        ),
        ("```bash\ntrue\nfalse | cat\n```\n", AssertionError, r"page.md:2: the bash block.*exit code 1"),
        ("```bash\necho $NOT_SET_ANYWHERE\n```\n", AssertionError, r"page.md:2"),
        ("```pyhton\n1 / 0\n```\n", ValueError, r"page.md:1: a block of kind 'pyhton'"),
        ("```\ntext\n```\n", ValueError, r"page.md:1: a block of kind ''"),
        ("```python\nx = 1\n", ValueError, r"page.md:1: the block has no end"),
    ],
)
def test_a_failing_block_is_named_by_page_and_line(text, error, match, tmp_path):
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(error, match=match):
        run_page(tmp_path / "page.md", tmp_path)


def test_what_runs_and_what_does_not(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = [1]\n```\n```console\n$ no-such-command\n```\n```python\n# needs: "
        "no_such_package\nx.append(2)\n```\n"
    )
    (left_out,) = run_page(page, tmp_path)
    assert left_out == "page.md:8: needs no_such_package, which is not installed"
    page.write_text("```bash\npython -c 'import fzero'\necho made > here.txt\n```\n")
    assert run_page(page, tmp_path) == [] and (tmp_path / "here.txt").read_text() == "made\n"


def test_a_block_of_whole_programs_has_nothing_from_the_one_before(tmp_path):
    page = tmp_path / f"{WHOLE[0]}.md"
    page.write_text("```python\nx = 1\n```\n```python\nx\n```\n")
    with pytest.raises(AssertionError, match=r"recipes.md:5: the python block fails: NameError"):
        run_page(page, tmp_path)


def test_every_page_runs_something():
    assert len(PAGES) >= 3
    for page in PAGES:
        assert any(block.kind in ("python", "bash") for block in blocks_of(page)), f"{page.name} has no example"


def test_every_link_leads_somewhere(tmp_path):
    assert {*PAGES, ROOT / "CONTRIBUTING.md"} <= {*links.pages()}
    assert not [line for page in links.pages() for line in links.broken(page)]
    (tmp_path / "a.md").write_text("# One two\n[x](a.md#one-two) [y](a.md#three) [z](b.md) [w](#one)\n")
    assert links.broken(tmp_path / "a.md") == ["a.md: a.md#three", "a.md: b.md#", "a.md: #one"]


def test_a_dead_link_of_the_reference_is_found(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/b.html").write_text('<p id="here"><a href="../a.html#top">up</a><a href="#gone">x</a></p>')
    (tmp_path / "a.html").write_text(
        '<h1 id="top"><a href="sub/b.html#here">b</a><a href="sub/b.html#not">c</a><img src="no.svg"/></h1>'
        '<a href="https://example.org/#x">out</a><a href="data:image/png,x">in</a>'
    )
    assert links.broken_in_site(tmp_path) == ["a.html: sub/b.html#not", "a.html: no.svg", "sub/b.html: #gone"]


def resolves(dotted):
    """Whether a dotted name is a module, or a name in one."""
    first, *rest = dotted.split(".")
    value, path = importlib.import_module(first), first
    for name in rest:
        path = f"{path}.{name}"
        if hasattr(value, name):
            value = getattr(value, name)
        elif isinstance(value, ModuleType) and hasattr(value, "__path__") and importlib.util.find_spec(path):
            value = importlib.import_module(path)
        else:
            return False
    return True


def test_names_of_the_package_in_prose_exist():
    text = "\n".join(
        re.sub(r"```.*?```", "", page.read_text(), flags=re.S) for page in (*PAGES, ROOT / "CONTRIBUTING.md")
    )
    names = set(re.findall(r"`(fzero(?:\.[A-Za-z_]\w*)+)", text)) - {"fzero.glu_backward"}  # an operator in a table
    assert len(names) > 20 and not [name for name in sorted(names) if not resolves(name)]
    assert not resolves("fzero.run.setup.corpus.sample_at") and not resolves("fzero.no_such")


def test_the_first_page_lists_every_page():
    index = (ROOT / "docs/start.md").read_text().partition("## All pages\n")[2].partition("\n## ")[0]
    listed = re.findall(r"\[[^]]*\]\((\w+\.md)\)", index)
    assert sorted([*listed, "start.md"]) == sorted(page.name for page in PAGES[1:])
    assert "](docs/start.md)" in (ROOT / "README.md").read_text()


def test_only_the_first_page_says_how_many_minutes_a_command_takes():
    table = (ROOT / "docs/start.md").read_text().partition("## How long things take")[2].partition("\n## ")[0]
    assert len(re.findall(r"minutes", table)) > 5
    named = re.compile("fifteen minutes|ten.minutes.on.one", re.IGNORECASE)  # the second is a heading
    outside = {page: named.sub("", links.prose(page)) for page in (*PAGES, ROOT / "CONTRIBUTING.md")}
    outside[ROOT / "docs/start.md"] = outside[ROOT / "docs/start.md"].replace(table, "")
    assert not [page.name for page, text in outside.items() if re.search(r"\bminutes?\b", text)]


def test_the_table_of_presets_names_them_all():
    section = (ROOT / "docs" / "models.md").read_text().partition("\n## Presets\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| .* \| (`.*`) \|$", section, re.MULTILINE)
    assert re.findall(r"`([\w.-]+)`", " ".join(cells)) == list(models.PRESETS)


def test_results_of_benchmarks_name_no_folder_of_a_machine():
    files = sorted((ROOT / "benchmarks/results").glob("*.json"))
    commands = {file.name: re.search(r'"command": "(.*)"', file.read_text()) for file in files}
    named = {name: found[1] for name, found in commands.items() if found and re.search(r"(?<![\w.-])/\w", found[1])}
    assert files and not named, f"a path of one machine; write it as docs do, such as peers-env/bin/python: {named}"


def test_the_page_of_the_benchmarks_is_that_of_their_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    summary = importlib.import_module("summary")
    assert summary.PAGE.read_text() == summary.page(), "run: python benchmarks/summary.py"
    for script in ("single", "plan_published"):
        assert f"## {script}\n" in summary.page()
    with pytest.raises(ValueError, match="no line in FIGURES"):
        summary.figures_of("no_such_script")
