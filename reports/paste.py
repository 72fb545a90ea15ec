"""Paste tables and pictures of the reports of this folder into Markdown files between marks, so that no number there is
typed.

    python reports/paste.py            # README.md and docs/*.md of this repository
    python reports/paste.py --check    # change no file; exit code 1 where one is not what the reports say

    <!-- report: NAME TABLE -->
    what is pasted
    <!-- end -->

NAME is a folder of reports, or several as "one+zero3", which are compared; TABLE is a table's name ("summary") or a
picture's file ("loss.svg"), with the run's number in front in a report of several ("2-loss.svg").
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fzero.core.storage import write_text
from fzero.report import report_writer
from fzero.report.report_writer import merge, read
from fzero.report.values import Picture, Report

REPORTS = Path(__file__).resolve().parent
MARK = re.compile(r"^<!-- report: *(\S+) +(\S+) *-->$")
BEGIN, END = re.compile(r"^\s*<!--\s*report\b"), "<!-- end -->"


def paste_text(text: str, page: Path, reports: Path) -> str:
    """The text of the Markdown file `page` with the content of its marks made again from `reports`; marks in code
    blocks are text.

    Raises ValueError naming file and line for a mark that names no report, no table, or has no end.
    """
    out: list[str] = []
    known: dict[str, Report] = {}
    lines = text.split("\n")
    i, fenced = 0, False
    while i < len(lines):
        line, number = lines[i], i + 1
        out.append(line)
        i += 1
        fenced ^= line.lstrip().startswith("```")
        if fenced:
            continue
        if line.strip() == END:
            raise ValueError(f"{page}:{number}: {END} without a mark before it; remove it")
        if not BEGIN.match(line):
            continue
        mark = MARK.match(line.strip())
        if mark is None:
            raise ValueError(f"{page}:{number}: {line.strip()!r} is no mark; write <!-- report: NAME TABLE -->")
        end = next((j for j in range(i, len(lines)) if lines[j].strip() == END or BEGIN.match(lines[j])), len(lines))
        if end == len(lines) or lines[end].strip() != END:
            raise ValueError(f"{page}:{number}: the mark has no end; write {END} after the content it marks")
        out += ["", part_text(*mark.groups(), f"{page}:{number}", page, reports, known), "", lines[end]]
        i = end + 1
    return "\n".join(out)


def part_text(name: str, part: str, where: str, page: Path, reports: Path, known: dict[str, Report]) -> str:
    """The Markdown of one part of the report `name`."""
    there = sorted(path.parent.name for path in reports.glob("*/report.json"))
    for one in name.split("+"):
        if one not in there:
            raise ValueError(
                f"{where}: {reports} has no report {one!r}{nearest(one, there)}; it has {', '.join(there) or 'none'}"
            )
    if name not in known:
        found = [read(reports / one) for one in name.split("+")]
        known[name] = found[0] if len(found) == 1 else merge(found)
    named = report_writer.by_name(known[name])
    if part not in named:
        names = list(named)
        raise ValueError(f"{where}: report {name} has no {part!r}{nearest(part, names)}; it has {', '.join(names)}")
    what, prefix = named[part]
    if isinstance(what, Picture):
        path = Path(os.path.relpath(reports / name / f"{prefix}{what.name}.svg", page.parent)).as_posix()
        return report_writer.picture_text(what, path)
    return report_writer.table_text(what)


def nearest(name: str, names: Sequence[str]) -> str:
    """A hint at the known name that is most like it."""
    close = difflib.get_close_matches(name, names, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def paste(pages: Sequence[Path], reports: Path, *, check: bool = False) -> list[Path]:
    """Make the content of the marks of each page again; returns the pages that were not up to date. check: change
    none."""
    changed = []
    for page in pages:
        if not page.is_file():
            raise ValueError(f"{page}: no such file")
        old = page.read_text(encoding="utf-8")
        new = paste_text(old, page, reports)
        if new != old:
            changed.append(page)
            if not check:
                write_text(page.parent, page.name, new)
    return changed


def main() -> None:
    """Paste into the pages of this repository that have marks, or check them."""
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    root, check = REPORTS.parent, sys.argv[1:] == ["--check"]
    pages = [
        page
        for page in (root / "README.md", *sorted((root / "docs").glob("*.md")))
        if "<!-- report:" in page.read_text()
    ]
    changed = paste(pages, REPORTS, check=check)
    for page in changed:
        print(f"{page}: {'is not what the reports say' if check else 'brought up to date'}")
    sys.exit(1 if check and changed else 0)


if __name__ == "__main__":
    main()
