"""A report as one self-contained HTML page with its pictures inside and no script, in light colours and printable."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping

from fzero.report.markdown import note, prefix_of
from fzero.report.parts import Code, Picture, Table
from fzero.report.sections_compare import sections
from fzero.report.values import Report

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 60rem; background: #fff; color: #1a1a1a;
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem; }
h2 { font-size: 1.3rem; margin: 2.4rem 0 .8rem; padding-bottom: .2rem; border-bottom: 2px solid #0072B2; }
h3 { font-size: 1.08rem; margin: 1.8rem 0 .6rem; }
p { margin: .6rem 0; }
a { color: #005a8e; }
.note { color: #444; font-size: .88rem; overflow-wrap: anywhere; }
nav { font-size: .9rem; margin: 1rem 0; padding: .5rem .8rem; background: #f4f6f8; border-radius: 4px; }
nav p { margin: .15rem 0; }
figure { margin: 1rem 0; }
figure img { display: block; width: 100%; max-width: 49rem; height: auto; }
figcaption, caption { text-align: left; font-size: .88rem; color: #333; }
caption { padding-bottom: .3rem; font-weight: 600; }
figcaption { margin-top: .2rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .86rem; }
th, td { padding: .22rem .7rem .22rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #ddd; }
thead th { border-bottom: 1.5px solid #333; vertical-align: bottom; }
td { overflow-wrap: break-word; }
td.long { min-width: 16rem; overflow-wrap: anywhere;
          font-family: "DejaVu Sans Mono", ui-monospace, monospace; font-size: .78rem; }
th.right, td.right { text-align: right; padding-left: .7rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th.right { white-space: normal; }
code { font: .88em "DejaVu Sans Mono", ui-monospace, monospace; overflow-wrap: anywhere; }
pre { font: .78rem/1.4 "DejaVu Sans Mono", ui-monospace, monospace; background: #f6f6f6; padding: .7rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; }
.missing { border-left: 4px solid #E69F00; padding-left: .7rem; }
@media print {
  @page { margin: 14mm; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav, details:not([open]) { display: none; }
  h2, h3 { break-after: avoid; }
  figure, tr { break-inside: avoid; }
  figure img { max-width: 17cm; }
  .wide { overflow: visible; }
  table { font-size: 7.8pt; }
  th, td { padding-right: .3rem; }
  th.right, td.right { padding-left: .3rem; }
  td.long { min-width: 9rem; font-size: 7pt; }
}
"""


def write(report: Report, pictures: Mapping[str, str]) -> str:
    """Format the report as one HTML text. `pictures`: {name with prefix: SVG text} of all its pictures."""
    several, body, links = report.compared is not None, [], []
    for i, (run, found) in enumerate(sections(report)):
        name, head = ("All runs" if run is None else run.name), "h3" if several else "h2"
        if several:
            body.append(f'<h2 id="part-{i}">{text(name)}</h2>')
        links.append(" · ".join(f'<a href="#part-{i}-{section.name}">{text(section.title)}</a>' for section in found))
        if several:
            links[-1] = f'<a href="#part-{i}"><strong>{text(name)}</strong></a>: {links[-1]}'
        for section in found:
            body.append(f'<section id="part-{i}-{section.name}">\n<{head}>{text(section.title)}</{head}>')
            body += [part_html(part, pictures, prefix_of(report, i), section.title) for part in section.parts]
            body.append("</section>")
    contents = "\n".join(f"<p>{line}</p>" for line in links)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, '
        f'initial-scale=1">\n<title>{html.escape(report.title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(report.title)}</h1>\n"
        f'<p class="note">{text(note(report))}</p>\n<nav aria-label="Contents">\n{contents}\n</nav>\n'
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def part_html(part: str | Table | Picture | Code, pictures: Mapping[str, str], prefix: str, heading: str) -> str:
    """A part of a section as HTML; pictures: their SVG texts by prefix and name."""
    if isinstance(part, Table):
        return table_html(part, heading)
    if isinstance(part, Picture):
        data = base64.b64encode(pictures[prefix + part.name].encode()).decode()
        image = f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(part.alt)}">'
        return f"<figure>\n{image}\n<figcaption>{text(part.caption)}</figcaption>\n</figure>"
    if isinstance(part, Code):
        return f"<details>\n<summary>{text(part.caption)}</summary>\n<pre>{html.escape(part.text)}</pre>\n</details>"
    return f"<p{missing(part)}>{text(part)}</p>" if part else ""


def missing(part: str) -> str:
    """The attribute of a paragraph that lists missing records."""
    return ' class="missing"' if part.startswith("**Not recorded:**") else ""


def table_html(table: Table, heading: str = "") -> str:
    """Format a table in a scrolling box; without its caption if the heading says the same."""

    def row(cells: tuple[str, ...], tag: str) -> str:
        made = []
        for i, cell in enumerate(cells):
            kind = ' class="right"' if i in table.right else ' class="long"' if len(cell) > 60 and tag == "td" else ""
            scope = ' scope="col"' if tag == "th" else ""
            made.append(f"<{tag}{scope}{kind}>{text(cell)}</{tag}>")
        return f"<tr>{''.join(made)}</tr>"

    head = f"<thead>\n{row(table.head, 'th')}\n</thead>\n" if any(table.head) else ""
    rows = "\n".join(row(cells, "td") for cells in table.rows)
    caption = f"<caption>{text(table.caption)}</caption>\n" if table.caption != heading else ""
    return f'<div class="wide"><table>\n{caption}{head}<tbody>\n{rows}\n</tbody>\n</table></div>'


def text(words: str) -> str:
    """Escape a text of a report, with `**strong**` and `code` as in Markdown."""
    safe = html.escape(words)
    safe = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", safe)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", safe)
