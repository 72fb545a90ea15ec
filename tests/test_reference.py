"""The API reference that docs/make.py makes has each public name with its whole docstring, and nothing else."""

import html
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fzero
from fzero.sharding import pipeline

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
# module: its page
PAGES = {
    "fzero": "fzero.html",
    **{
        f"fzero.{name}": f"fzero/{name}.html"
        for name in ("optim", "models", "sharding", "checkpoint", "generate", "data")
    },
    "fzero.sharding.pipeline": "fzero/sharding/pipeline.html",
    "fzero.core.pytree": "fzero/core/pytree.html",
    "fzero.core.prng": "fzero/core/prng.html",
}


def public(module):
    """{name: value} of the names of a module that its page must have: those in `__all__`, else all without underscore
    that it defines."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]
    found = {name: getattr(module, name) for name in names}
    return {name: value for name, value in found.items() if not inspect.ismodule(value)}


def squeeze(text):
    """A text without what a renderer may change: blanks, and the marks of code."""
    return re.sub(r"[\s`]+", "", text)


def missing(page, values):
    """A line for each name without a section in the text of a page, and for each function or class of which the section
    does not begin with the whole docstring."""
    sections = {part.partition('"')[0]: part for part in page.split('<section id="')[1:]}
    found = []
    for name, value in values.items():
        _, _, shown = sections.get(name, "").partition('class="docstring">')
        text = squeeze(html.unescape(re.sub(r"<[^>]+>", "", shown)))
        if name not in sections:
            found.append(f"{name}: not on the page")
        elif (inspect.isfunction(value) or inspect.isclass(value)) and not (
            inspect.getdoc(value) and text.startswith(squeeze(inspect.getdoc(value)))
        ):
            found.append(f"{name}: without its docstring")
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "site"
    done = subprocess.run([sys.executable, ROOT / "docs" / "make.py", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_there_is_a_page_for_each_public_module_and_no_other(site):
    pages = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    assert pages == {*PAGES.values(), "index.html"}


@pytest.mark.parametrize("name", PAGES)
def test_each_public_name_has_its_docstring_there(site, name):
    values = public(importlib.import_module(name))
    assert len(values) >= 10 and not missing((site / PAGES[name]).read_text(), values)


def test_what_is_missing_is_named():
    def told():
        """Returns a < b, in `code`."""

    page = '<section id="told"><div class="docstring"><p>Returns a &lt; b,\nin <code>code</code>.</p></div></section>'
    assert missing(page, {"told": told, "kept": 1}) == ["kept: not on the page"]
    assert missing(page.replace("&lt;", "&gt;"), {"told": told}) == ["told: without its docstring"]
    assert missing(page.replace("docstring", "source"), {"told": told}) == ["told: without its docstring"]
    told.__doc__ = None
    assert missing(page, {"told": told}) == ["told: without its docstring"]


def test_all_modules_that_a_user_meets_have_a_page():
    met = (fzero.optim, fzero.models, fzero.sharding, pipeline, fzero.checkpoint, fzero.generate, fzero.data)
    met = (*met, fzero.pytree, fzero.random)
    assert {module.__name__ for module in (fzero, *met)} == set(PAGES)
