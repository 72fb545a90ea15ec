"""Links that lead nowhere: in the pages of this repository, and in the API reference that make.py writes.

python docs/links.py
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parent.parent


def pages() -> list[Path]:
    """The pages of this repository."""
    folders = (".", "docs", "examples", "benchmarks/results", "reports")
    return [page for folder in folders for page in sorted((ROOT / folder).glob("*.md"))]


def prose(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return re.sub(r"^\s*```.*?^\s*```\s*$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def broken(page: Path) -> list[str]:
    """The links of a page that lead to no file, or to no heading of one."""
    found = []
    for path, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", prose(page)):
        target = page.parent / path if path else page
        if not path.startswith("http") and (not target.exists() or (anchor and anchor not in anchors(target))):
            found.append(f"{page.name}: {path}#{anchor}")
    return found


class Parsed(HTMLParser):
    """The links and the ids of a page in HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.ids.add(value)


def broken_in_site(folder: Path) -> list[str]:
    """The links of all pages in HTML below a folder that lead to no file of it, or to no id of one."""
    parsed = {path.resolve(): Parsed(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    found = []
    for page, of_page in parsed.items():
        for link in dict.fromkeys(of_page.links):
            if re.match(r"[a-z]+:|//", link):  # of another site, or data:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / unquote(path)).resolve() if path else page
            there = parsed[target].ids if target in parsed else set()
            if not target.is_file() or (anchor and unquote(anchor) not in there):
                found.append(f"{page.relative_to(folder.resolve())}: {link}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(line for page in pages() for line in broken(page)) or 0)
