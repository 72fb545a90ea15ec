"""A report as one self-contained HTML page with its pictures inside, in light or dark colours, and printable.

Its one script says the values under the pointer and switches to logarithmic axes; the page is whole without it.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Mapping

from fzero.report import figures
from fzero.report.elements import Code, Element, Picture, ReportTable
from fzero.report.figures import Drawing
from fzero.report.first_screen import opening
from fzero.report.markdown import note, prefix_of
from fzero.report.sections_compare import sections
from fzero.report.values import Report

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #444; --back: #fff; --shade: #f4f6f8; --line: #ddd;
  --link: #005a8e; --mark: #0072B2; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #a8aeb6; --back: #14171b; --shade: #20252b; --line: #353b43;
    --link: #6cb6e6; --mark: #45a0db; }
}
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { margin: 0 auto; padding: 1rem 1.5rem; max-width: 62rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 2.4rem 0 .8rem; padding-bottom: .2rem; border-bottom: 2px solid var(--mark); }
h3 { font-size: 1.08rem; margin: 1.8rem 0 .6rem; }
p { margin: .6rem 0; }
a { color: var(--link); }
header p { margin: .4rem 0; }
header .wide { margin: .7rem 0; }
.small { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .8rem; }
.small figure { margin: 0; display: flex; flex-direction: column-reverse; justify-content: flex-end; }
.small figcaption { font-weight: 600; margin: 0; }
.note { color: var(--soft); font-size: .88rem; overflow-wrap: anywhere; }
nav { font-size: .9rem; margin: 1rem 0; padding: .5rem .8rem; background: var(--shade); border-radius: 4px; }
nav p { margin: .15rem 0; }
figure { margin: 1rem 0; max-width: 49rem; }
figure img { display: block; width: 100%; height: auto; }
.plot { position: relative; }
.plot i { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft); pointer-events: none; }
.plot output { position: absolute; top: 8%; padding: .2rem .5rem; background: var(--shade); color: var(--ink);
  border: 1px solid var(--line); border-radius: 4px; font-size: .8rem; line-height: 1.35; white-space: pre;
  pointer-events: none; z-index: 1; font-variant-numeric: tabular-nums; }
button { font: inherit; font-size: .82rem; color: var(--link); background: var(--shade); border: 1px solid var(--line);
  border-radius: 4px; padding: .05rem .5rem; cursor: pointer; }
button[aria-pressed=true] { background: var(--mark); color: var(--back); }
figcaption, caption { text-align: left; font-size: .88rem; color: var(--soft); }
caption { padding-bottom: .3rem; font-weight: 600; }
figcaption { margin-top: .2rem; }
/* What does not fit is scrolled to; a shadow at an edge says that there is more behind it. */
.wide { overflow-x: auto; margin: 1rem 0;
  background: linear-gradient(90deg, var(--back) 1rem, transparent 2rem) 0 0 / 2rem 100% no-repeat local,
    linear-gradient(270deg, var(--back) 1rem, transparent 2rem) 100% 0 / 2rem 100% no-repeat local,
    linear-gradient(90deg, var(--line), transparent) 0 0 / .8rem 100% no-repeat scroll,
    linear-gradient(270deg, var(--line), transparent) 100% 0 / .8rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: .86rem; }
th, td { padding: .22rem .7rem .22rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { border-bottom: 1.5px solid var(--soft); vertical-align: bottom; }
td { overflow-wrap: break-word; }
td.long { min-width: 16rem; overflow-wrap: anywhere;
          font-family: "DejaVu Sans Mono", ui-monospace, monospace; font-size: .78rem; }
th.right, td.right { text-align: right; padding-left: .7rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th.right { white-space: normal; }
code { font: .88em "DejaVu Sans Mono", ui-monospace, monospace; overflow-wrap: anywhere; }
pre { font: .78rem/1.4 "DejaVu Sans Mono", ui-monospace, monospace; background: var(--shade); padding: .7rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; font-weight: 600; }
.missing { border-left: 4px solid #E69F00; padding-left: .7rem; }
@media screen and (max-width: 40rem) {
  body { padding: .7rem; }
  table { font-size: .78rem; }
  th, td { padding-right: .4rem; }
  th.right, td.right { padding-left: .4rem; }
  td.long { min-width: 10rem; }
}
@media print {
  @page { margin: 14mm; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav, button, details:not([open]) { display: none; }
  h2, h3 { break-after: avoid; }
  figure, tr { break-inside: avoid; }
  figure img { max-width: 17cm; }
  .wide { overflow: visible; background: none; }
  table { font-size: 7.8pt; }
  th, td { padding-right: .3rem; }
  th.right, td.right { padding-left: .3rem; }
  td.long { min-width: 9rem; font-size: 7pt; }
}
"""
SCRIPT = """
"use strict";
// Of each picture with points: the values under the pointer, and a switch between its axes, linear and logarithmic.
const number = value => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(value);
for (const figure of document.querySelectorAll("figure[data-points]")) {
  const plot = figure.querySelector(".plot"), line = plot.querySelector("i"), says = plot.querySelector("output");
  const images = [...plot.querySelectorAll("img")], button = figure.querySelector("button");
  const points = JSON.parse(figure.dataset.points);
  let shown = 0;
  if (button) {
    button.hidden = false;
    button.onclick = () => {
      shown = 1 - shown;
      images.forEach((image, i) => { image.hidden = i !== shown; });
      button.setAttribute("aria-pressed", shown === 1);
    };
  }
  plot.onpointerleave = () => { says.hidden = line.hidden = true; };
  plot.onpointermove = event => {
    const whole = plot.getBoundingClientRect();
    const left = (event.clientX - whole.left) / whole.width, top = (event.clientY - whole.top) / whole.height;
    const axes = points[shown].find(({box}) => left >= box[0] && left <= box[2] && top >= box[1] && top <= box[3]);
    says.hidden = line.hidden = !axes;
    if (!axes) return;
    const [low, high] = axes.x, part = (left - axes.box[0]) / (axes.box[2] - axes.box[0]);
    const at = axes.log ? low * (high / low) ** part : low + (high - low) * part;
    const away = x => Math.abs(x - at);
    const nearest = axes.xs.map(xs => xs.reduce((best, x, i) => away(x) < away(xs[best]) ? i : best, 0));
    const x = axes.xs[0][nearest[0]];
    const texts = axes.lines.map(([name, which, ys]) => {
      if (which < 0) return `${name}: ${number(ys[0])}`;
      const its = axes.xs[which][nearest[which]], y = ys[nearest[which]];
      return `${name}: ${y === null ? "-" : number(y)}${its === x ? "" : ` (at ${number(its)})`}`;
    });
    says.textContent = [`${axes.name}: ${number(x)}`, ...texts].join("\\n");
    line.style.left = `${100 * left}%`;
    says.style.left = left < .5 ? `calc(${100 * left}% + 10px)` : "";
    says.style.right = left < .5 ? "" : `calc(${100 - 100 * left}% + 10px)`;
  };
}
"""


def write(report: Report, pictures: Mapping[str, Drawing]) -> str:
    """Format the report as one HTML text. `pictures`: {name with prefix: drawn} of all in its sections."""
    several, body, links = report.compared is not None, [], []
    for i, (run, run_sections) in enumerate(sections(report)):
        name, head = ("All runs" if run is None else run.name), "h3" if several else "h2"
        if several:
            body.append(f'<h2 id="part-{i}">{text(name)}</h2>')
        links.append(
            " · ".join(f'<a href="#part-{i}-{section.name}">{text(section.title)}</a>' for section in run_sections)
        )
        if several:
            links[-1] = f'<a href="#part-{i}"><strong>{text(name)}</strong></a>: {links[-1]}'
        for section in run_sections:
            body.append(f'<section id="part-{i}-{section.name}">\n<{head}>{text(section.title)}</{head}>')
            body += [element_html(element, pictures, prefix_of(report, i), section.title) for element in section.parts]
            body.append("</section>")
    contents = "\n".join(f"<p>{line}</p>" for line in links)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, '
        f'initial-scale=1">\n<title>{html.escape(report.title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{header_html(report, pictures)}\n"
        f'<nav aria-label="Contents">\n{contents}\n</nav>\n<p class="note">{text(note(report))}</p>\n'
        + "\n".join(body)
        + f"\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def header_html(report: Report, pictures: Mapping[str, Drawing]) -> str:
    """The first screen of the page."""
    parts = opening(report).parts
    small = [picture_html(element, pictures[element.name]) for element in parts if isinstance(element, Picture)]
    texts = [element_html(element, {}, "", "") for element in parts if not isinstance(element, Picture)]
    lines = [f"<h1>{html.escape(report.title)}</h1>", *texts, '<div class="small">', *small, "</div>"]
    return "\n".join(["<header>", *lines, "</header>"])


def element_html(element: Element, pictures: Mapping[str, Drawing], prefix: str, heading: str) -> str:
    """A part of a section as HTML; pictures: the drawn ones by prefix and name."""
    if isinstance(element, ReportTable):
        return table_html(element, heading)
    if isinstance(element, Picture):
        drawings = [pictures[prefix + element.name]]
        return picture_html(element, *drawings, *([figures.draw_svg(element.draw, log=True)] if element.log else []))
    if isinstance(element, Code):
        opened, inner = " open" * element.open, html.escape(element.text)
        return f"<details{opened}>\n<summary>{text(element.caption)}</summary>\n<pre>{inner}</pre>\n</details>"
    return f"<p{missing(element)}>{text(element)}</p>" if element else ""


def picture_html(picture: Picture, *drawings: Drawing) -> str:
    """A picture as HTML; a second of `drawings` is that with logarithmic axes, and its points are for the script."""
    images = []
    for i, drawing in enumerate(drawings):
        data = base64.b64encode(drawing.svg.encode()).decode()
        alt = html.escape(picture.alt + " With logarithmic axes." * i)
        images.append(f'<img src="data:image/svg+xml;base64,{data}" alt="{alt}"{" hidden" * i}>')
    button = '<button type="button" aria-pressed="false" hidden>log axes</button>' if len(drawings) > 1 else ""
    caption = f"<figcaption>{text(picture.caption)} {button}</figcaption>".replace(" </figcaption>", "</figcaption>")
    points, says = "", ""
    if all(drawing.points for drawing in drawings):
        table = json.dumps([drawing.points for drawing in drawings], separators=(",", ":"))
        points, says = f' data-points="{html.escape(table)}"', "\n<i hidden></i><output hidden></output>"
    return f'<figure{points}>\n<div class="plot">\n{"".join(images)}{says}\n</div>\n{caption}\n</figure>'


def missing(paragraph: str) -> str:
    """The attribute of a paragraph that lists missing records."""
    return ' class="missing"' if paragraph.startswith("**Not recorded:**") else ""


def table_html(table: ReportTable, heading: str = "") -> str:
    """Format a table in a scrolling box; without its caption if the heading says the same."""

    def row(cells: tuple[str, ...], tag: str) -> str:
        columns = []
        for i, cell in enumerate(cells):
            kind = ' class="right"' if i in table.right else ' class="long"' if len(cell) > 60 and tag == "td" else ""
            scope = ' scope="col"' if tag == "th" else ""
            columns.append(f"<{tag}{scope}{kind}>{text(cell)}</{tag}>")
        return f"<tr>{''.join(columns)}</tr>"

    head = f"<thead>\n{row(table.head, 'th')}\n</thead>\n" if any(table.head) else ""
    rows = "\n".join(row(cells, "td") for cells in table.rows)
    caption = f"<caption>{text(table.caption)}</caption>\n" if table.caption != heading else ""
    return f'<div class="wide"><table>\n{caption}{head}<tbody>\n{rows}\n</tbody>\n</table></div>'


def text(words: str) -> str:
    """Escape a text of a report, with `**strong**` and `code` as in Markdown."""
    safe = html.escape(words)
    safe = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", safe)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", safe)
