"""The import graph of the package by the entries of its root: boxes, floors, arrows, and arrows that point upward.

    python benchmarks/import_graph.py                  # this tree
    python benchmarks/import_graph.py 91b3968 HEAD     # commits, side by side

A box is an entry of `fzero/`: a folder, or a file beside them (`__init__.py`, which imports by name when asked, is
none). An arrow is a pair of boxes of which one imports the other, wherever in its files the import stands. The floor of
a box is one above the highest that it imports from, boxes that import each other in a circle sharing one. An arrow is
upward if it closes such a circle."""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Graph(NamedTuple):
    """Boxes of a package and which imports which."""

    entries: int  # of the package's root
    lines: int  # of its Python files
    arrows: dict[str, set[str]]  # box -> the boxes that it imports


def read_graph(package: Path) -> Graph:
    """The graph of the package in this folder."""
    arrows: dict[str, set[str]] = {}
    lines = 0
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        lines += text.count("\n")
        box = path.relative_to(package).parts[0].removesuffix(".py")
        if box == "__init__":
            continue
        found = arrows.setdefault(box, set())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            found |= {name.split(".")[1] for name in names if name.startswith(f"{package.name}.")}
    for box, found in arrows.items():
        found &= set(arrows) - {box}
    entries = [p for p in package.iterdir() if p.is_file() or any(p.rglob("*.py"))]
    return Graph(len(entries), lines, arrows)


def reachable(arrows: dict[str, set[str]], box: str) -> set[str]:
    """All boxes that a box imports, directly or through others."""
    seen: set[str] = set()
    todo = [box]
    while todo:
        for other in arrows[todo.pop()] - seen:
            seen.add(other)
            todo.append(other)
    return seen


def count(graph: Graph) -> dict[str, int]:
    """The figures of a graph."""
    below = {box: reachable(graph.arrows, box) for box in graph.arrows}
    floors: dict[str, int] = {}

    def floor(box: str) -> int:
        if box not in floors:
            circle = {other for other in below[box] if box in below[other]}
            under = {other for one in {box, *circle} for other in graph.arrows[one]} - circle - {box}
            floors[box] = 1 + max((floor(other) for other in under), default=0)
        return floors[box]

    return {
        "entries of the root": graph.entries,
        "boxes": len(graph.arrows),
        "floors": max(floor(box) for box in graph.arrows),
        "arrows": sum(len(found) for found in graph.arrows.values()),
        "upward": sum(box in below[other] for box, found in graph.arrows.items() for other in found),
        "lines": graph.lines,
    }


def at_commit(commit: str) -> dict[str, int]:
    """The figures of the package at a commit."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "fzero"], capture_output=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        return count(read_graph(Path(folder, "fzero")))


def main() -> None:
    """Print a table: a row for each figure, a column for each commit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commits", nargs="*", help="Commits to count; without any this tree.")
    commits = parser.parse_args().commits
    columns = {commit: at_commit(commit) for commit in commits} or {"this tree": count(read_graph(ROOT / "fzero"))}
    print(f"{'':20}" + "".join(f"{name:>12}" for name in columns))
    for figure in next(iter(columns.values())):
        print(f"{figure:20}" + "".join(f"{found[figure]:>12,}" for found in columns.values()))


if __name__ == "__main__":
    main()
