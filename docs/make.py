"""Makes the API reference from the docstrings, a page for each public module, and refuses links that lead nowhere, in
it and in the pages of this repository:

python docs/make.py site
"""

import importlib
import sys
import warnings
from pathlib import Path

import pdoc
from links import broken, broken_in_site, pages

import fzero

# The modules of fzero that have a page beside its own. core.prng is fzero.random, core.pytree is fzero.pytree.
PAGES = (
    "optim",
    "models",
    "sharding",
    "sharding.pipeline",
    "checkpoint",
    "generate",
    "data",
    "core.pytree",
    "core.prng",
)


def make(folder: Path) -> None:
    """Write the pages of fzero and PAGES into `folder`; of a module with `__all__` they have the names in it."""
    for module in (fzero, *(importlib.import_module(f"fzero.{name}") for name in PAGES)):
        for name in getattr(module, "__all__", ()):  # loads when first used; pdoc looks into the dict of the module
            getattr(module, name)
    theme = Path(__file__).parent / "theme"
    pdoc.render.configure(show_source=False, template_directory=theme, footer_text=f"fzero {fzero.__version__}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a name that does not resolve would be left out
        # The fields of a NamedTuple are shown with their types as the source has them.
        warnings.filterwarnings("ignore", "Error parsing type annotation")
        # Each with nothing below it; what has a page of its own below another one is named after that one.
        pages = [part for name in PAGES for part in (f"fzero.{name}", f"!fzero.{name}[.]")]
        pdoc.pdoc("fzero", "!fzero[.]", *pages, output_directory=folder)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python docs/make.py FOLDER")
    folder = Path(sys.argv[1])
    make(folder)
    dead = [*(line for page in pages() for line in broken(page)), *broken_in_site(folder)]
    if dead:
        sys.exit("links that lead nowhere:\n" + "\n".join(dead))
