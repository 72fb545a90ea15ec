"""The page of a report: its first screen, its pictures in light and dark, and the values under the pointer."""

import html.parser
import itertools
import json
import math
import re
import statistics
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from matplotlib.ticker import FixedLocator
from reported import make_run, make_runs

from fzero.report import (
    ReportTable,
    bars,
    compare,
    curves,
    figures,
    first_screen,
    report_writer,
    run_reader,
    sections,
    values,
)
from fzero.report.bars import ACTS
from fzero.report.values import Picture
from fzero.run import run_folder

SMALL = ("small_loss", "small_lr", "small_throughput", "small_memory")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("runs"))


class Page(html.parser.HTMLParser):
    """Collects the tags of a page, and fails where one is not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("href", "src", "action", "data", "srcset", "poster")]
        if tag not in ("meta", "img", "br", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    """The folder of a report with all its pictures."""
    folder = tmp_path_factory.mktemp("written")
    report_writer.write(
        report_writer.gather([runs / "dp2tp2", runs / "old"], title='A <title> & "more"', command="fzero report x"),
        folder,
    )
    return folder


def test_the_page_is_whole_and_needs_nothing_else(written):
    text = (written / "report.html").read_text()
    found = Page()
    found.feed(text)
    found.close()
    assert found.open == [] and len(set(found.ids)) == len(found.ids)
    for link in found.links:
        assert (link.startswith("#") and link[1:] in found.ids) or link.startswith("data:image/svg+xml;base64,"), link[
            :80
        ]
    assert not {tag for tag, _ in found.tags} & {"link", "iframe", "object", "base"}
    assert [attrs for tag, attrs in found.tags if tag == "script"] == [{}]
    assert not re.search(r"@import|url\(|\b(fetch|import|XMLHttpRequest|eval)\(|https?:", text)
    images = [attrs for tag, attrs in found.tags if tag == "img"]
    twice = [image for image in images if image["alt"].endswith("With logarithmic axes.")]
    assert len(twice) == 3 and all("hidden" in image for image in twice)
    assert len(images) == len(list(written.glob("*.svg"))) + len(twice)
    assert all(len(image["alt"]) > 40 for image in images)
    said = " ".join(" ".join(found.text).split())
    for words in (
        'A <title> & "more"',
        "0123456789abcdef",
        "A Processor of Some Kind 9000",
        "torch 2.13.0+cpu",
        "Not recorded:",
        "--steps 40",
    ):
        assert words in said, words
    assert "@media print" in text and 'lang="en"' in text


def test_the_pictures_stand_alone(written):
    for path in written.glob("*.svg"):
        root = ET.fromstring(path.read_text())
        assert root.tag.endswith("svg")
        for element in root.iter():
            for name, value in element.attrib.items():
                assert not (name.endswith("href") and not value.startswith(("#", "data:"))), (path.name, value[:60])
        assert path.stat().st_size < 100_000
    words = "".join(ET.fromstring((written / "1-loss.svg").read_text()).itertext())
    assert "validation (last 2.228, perplexity 9.29)" in words and "loss (nats per token)" in words


def test_a_picture_is_shortened_in_its_tags_alone():
    assert figures.short("M 0 172.8 L 561.6 172.8 L 561.6 0 L 0 0 z") == "M0 172.8H561.6V0H0z"
    assert figures.short("M 1 2 C 3 4 5 6 7 8 L 7 9 L 8 10") == "M1 2C3 4 5 6 7 8V9L8 10"
    assert figures.tag('<g id="a" x="1.2345">') == '<g x="1.2">'
    assert figures.tag('<path id="a" d="M 0.041 0\nL 0 1"/>') == '<path id="a" d="M0 0V1"/>'
    assert figures.tag('<text transform="rotate(-90 1 2)">') == '<text transform="rotate(-90 1 2)">'


def pictures_of(report):
    return [part for _, _, part in report_writer.all_elements(report) if isinstance(part, Picture)]


def test_every_axis_has_a_name_and_a_unit(runs):
    report = report_writer.gather([runs / "zero3", runs / "one", runs / "dp2tp2"])
    drawn = pictures_of(report)
    names = {part.name for part in drawn}
    assert names >= {
        "loss",
        "throughput",
        "memory",
        "time",
        "time_steps",
        "communication",
        "grad_norms",
        "param_norms",
        "stragglers",
    }
    assert names >= {"losses", "speeds", "scaling"}
    for part in drawn:
        figure = part.draw()
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                locator, words = axis.get_major_locator(), []
                if isinstance(locator, FixedLocator):
                    words = axis.get_major_formatter().format_ticks(locator.locs)
                named = any(re.search("[a-z]", word) for word in words)  # what it tells apart is written at its ticks
                label = axis.get_label().get_text()
                assert (
                    named
                    or not axis.get_visible()
                    or axes.get_label() == "<colorbar>"
                    or re.search(r"\S \(.+\)$", label)
                ), (
                    part.name,
                    label,
                )
        assert part.alt.endswith(".") and len(part.alt) > 40


def luminance(colour):
    r, g, b = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("table", [figures.COMPONENTS, figures.PHASES, ACTS], ids=["components", "phases", "acts"])
def test_neighbours_differ_in_print(table):
    looks = list(table.values())
    assert len(set(looks)) == len(looks)
    for one, other in itertools.pairwise(looks):
        assert one[1] != other[1] or abs(luminance(one[0]) - luminance(other[0])) > 0.15, (one, other)
    styles = [style for _, style, _ in figures.LINES]
    assert len(set(styles)) == len(styles) and len({marker for *_, marker in figures.LINES}) == len(styles)


def test_the_same_values_have_the_same_bytes(runs, written):
    report = report_writer.gather([runs / "dp2tp2"])
    for part in pictures_of(report):
        if part.name in ("loss", "memory", "communication"):
            assert figures.svg(part.draw) == (written / f"1-{part.name}.svg").read_text()
    assert report_writer.json_text(report) == report_writer.json_text(report_writer.gather([runs / "dp2tp2"]))


def test_the_predicted_line_follows_the_measured_places(runs):
    run = run_reader.read_run(runs / "zero3")
    measured = run.memory["timeline"]
    predicted = [{**m, "at": 3 * m["at"] ** 2} for m in measured]  # the same moments, counted otherwise
    assert bars.align(predicted, measured) == pytest.approx(bars.along(measured))
    between = [
        *predicted[:3],
        {**predicted[3], "op": "another", "at": (predicted[2]["at"] + predicted[3]["at"]) / 2},
        *predicted[3:],
    ]
    x = bars.align(between, measured)
    assert x[2] < x[3] < x[4] and x == sorted(x)
    assert bars.align(predicted, []) == bars.along(predicted)


# ---- the first screen ----


def edit(folder, file, change):
    """Change every object of a file of JSON lines."""
    rows = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    for i, row in enumerate(rows):
        change(i, row)
    (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def opened(*folders):
    """(the paragraphs, {row's name: {column: cell}}, the names of the pictures) of the first screen of runs."""
    parts = first_screen.opening(report_writer.gather(folders)).parts
    texts = [part for part in parts if isinstance(part, str)]
    (table,) = [part for part in parts if hasattr(part, "rows")]
    cells = {row[0]: dict(zip(table.head, row)) for row in table.rows}
    return texts, cells, [part.name for part in parts if isinstance(part, Picture)]


def test_the_first_screen_says_what_became_of_a_run(tmp_path):
    folder = make_run(tmp_path / "run", dp=2)
    edit(folder, "attempts.jsonl", lambda i, line: i == 1 and line.update(first_step=0))
    (folder / "attempts.jsonl").write_text((folder / "attempts.jsonl").read_text().splitlines(keepends=True)[0])
    rows = list(run_folder.read_metrics(folder))
    (text,), cells, names = opened(folder)
    val = rows[-1]["val_loss"]
    assert "made 40 of 40 steps (40,960 tokens) on 2 processes" in text and "Nothing failed" in text
    assert first_screen.duration(sum(row["wall_s"] for row in rows)) in text
    assert f"{values.digits(val)} (perplexity {values.digits(math.exp(val))})" in text
    assert cells["measured"]["validation loss"] == values.digits(val)
    assert cells["measured"]["perplexity"] == values.digits(math.exp(val))
    run = run_reader.read_run(folder)
    speed = next(q for q in run.quantities if q.name == "tokens_per_s")
    shown = [values.format_quantity(v, "tokens/s") for v in (speed.measured, speed.predicted)]
    assert [cells[name]["throughput"] for name in ("measured", "predicted")] == shown
    assert tuple(names) == SMALL


@pytest.mark.parametrize("names", [["zero3"], ["zero3", "one"]])
def test_the_text_begins_with_the_first_screen_of_the_page(names, runs):
    report = report_writer.gather([runs / name for name in names])
    begin, sections = report_writer.to_markdown(report).split("\n\nWritten by fzero ")
    parts = first_screen.opening(report).parts
    assert begin.startswith(f"# {report.title}\n\n{parts[0]}\n\n")
    (table,) = [part for part in parts if isinstance(part, ReportTable)]
    assert f"\n\n{table.caption}:\n\n{report_writer.table_text(table)}\n" in begin
    row = begin.splitlines()[-1]
    assert re.findall(r"\]\((\S+)\)", row) == [f"{name}.svg" for name in SMALL]
    assert "| Loss | Learning rate | Throughput | Memory of a rank |\n" in begin and "small_" not in sections
    assert report_writer.by_name(report)["final"] == (table, "") and [*report_writer.by_name(report)][:2] == [
        "final",
        "small_loss.svg",
    ]


FAILED = {
    "it ended 12 steps before its end": lambda folder: run_folder.cut_metrics(folder, 28),
    "the loss of 1 step was not finite": lambda folder: edit(
        folder, "metrics.jsonl", lambda i, row: i == 6 and row.update(loss=None)
    ),
    "the update of 2 steps was skipped": lambda folder: edit(
        folder, "metrics.jsonl", lambda i, row: row.update(skipped=i in (3, 4))
    ),
    "it rolled back from step 9 to 4 (the loss is a spike)": lambda folder: (folder / "skips.json").write_text(
        json.dumps(
            {
                "skips": [], "tried": [], "back_to": None, "behind": 0, "in_a_row": 0,
                "rollbacks": [{"step": 9, "to": 4, "sample": 64, "why": "the loss is a spike", "left_out": False}],
            }
        )
    ),
    "it was started 2 times": lambda folder: None,
}  # fmt: skip


@pytest.mark.parametrize("said", FAILED)
def test_the_first_screen_says_what_failed(said, tmp_path):
    folder, whole = make_run(tmp_path / "run"), make_run(tmp_path / "whole")
    if "started" not in said:
        for one in (folder, whole):
            lines = (one / "attempts.jsonl").read_text().splitlines(keepends=True)
            (one / "attempts.jsonl").write_text(lines[0])
    FAILED[said](folder)
    (text,), _, _ = opened(folder)
    assert text.endswith(f": {said}.") or text.endswith(f" {said[0].upper()}{said[1:]}.")
    assert "Nothing failed" not in text and ("started" in said or "Nothing failed" in opened(whole)[0][0])
    assert any(said[1:] in line for line in opened(folder, whole)[0][1:])


def test_runs_are_compared_at_equal_tokens(tmp_path):
    short, long = make_run(tmp_path / "short", steps=30), make_run(tmp_path / "long", steps=60, dp=1)
    edit(long, "metrics.jsonl", lambda i, row: "val_loss" in row and row.update(val_loss=row["val_loss"] - 0.5))
    edit(short, "metrics.jsonl", lambda i, row: i == 29 and row.pop("val_loss"))
    texts, cells, _ = opened(short, long)
    rows = {folder: list(run_folder.read_metrics(folder)) for folder in (short, long)}
    at = values.digits(rows[long][29]["val_loss"])
    assert cells["long"]["validation loss"] == at and cells["short"]["validation loss"].endswith(" (at 20,480)")
    assert cells["long"]["perplexity"] == values.digits(math.exp(rows[long][29]["val_loss"]))
    mean = statistics.fmean(row["loss"] for row in rows[long][27:30])
    assert cells["long"]["training loss"] == values.digits(mean)
    assert "after 30,720 tokens, which all have seen, the least validation loss is that of long, " + at in texts[0]


def test_runs_that_cannot_be_compared_are_not(tmp_path):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    assert "is that of one and two, " in opened(one, two)[0][0]
    environment = json.loads((two / "environment.json").read_text())
    (two / "environment.json").write_text(json.dumps({**environment, "tokenizer": "bpe:300"}))
    text = opened(one, two)[0][0]
    assert "tokenizers differ" in text and "least" not in text


def test_samples_are_in_the_page_and_a_damaged_one_is_named(tmp_path):
    folder = make_run(tmp_path / "run", steps=6)
    text = "def <f>():\n```\n````"
    for sample in ("before", text):
        run_folder.add_sample(folder, 6, "def ", sample)
    report = report_writer.gather([folder])
    (sample,) = [part for section in sections.chapters(report)[0].sections for part in section.parts
                 if getattr(part, "name", "") == "sample"]  # fmt: skip
    assert sample.text == text and "<pre>def &lt;f&gt;():" in report_writer.fill(
        "elements.html", "element_of", sample, "", []
    )
    written = report_writer.to_markdown(report)
    assert f"\n`````text\n{text}\n`````\n" in written and "before" not in written
    (folder / "samples.jsonl").write_text('{"step": 6, "prompt": "def "}\n')
    with pytest.raises(ValueError, match=r"samples.jsonl:1: text is missing"):
        run_reader.read_run(folder)


# ---- curves ----


@pytest.mark.parametrize("count", [1, 2, 19, 40, 700])
def test_running_means_have_no_lag(count):
    line = [3.0 + 2 * i for i in range(count)]
    noisy = [v + math.sin(5.3 * i**1.5) for i, v in enumerate(line)]
    assert figures.smooth(line) == pytest.approx(line)
    if count >= 40:
        rest = [statistics.pstdev(a - b for a, b in zip(of, line)) for of in (noisy, figures.smooth(noisy))]
        assert rest[1] < 0.7 * rest[0]


def test_the_last_running_mean_is_not_the_last_value():
    """A spike in the last step moves the end of the line by its part of a window, not to the spike."""
    flat, spike = [2.0] * 400, [2.0] * 399 + [3.0]
    assert figures.smooth(flat)[-1] == pytest.approx(2.0) and figures.smooth(spike)[-1] < 2.25


def test_attempts_are_marked_where_they_begin(runs):
    run = run_reader.read_run(runs / "zero3")
    assert compare.starts(run.series, run.attempts) == [(20 * 1024, 2)]
    begins = [{"first_step": 0}, {"first_step": 3}, {"first_step": 3}, {"first_step": 9}]
    series = {"step": list(range(1, 13)), "tokens": [10 * n for n in range(1, 13)]}
    assert compare.starts(series, begins) == [(30, 3), (90, 4)]  # the second made no step
    assert compare.starts({"step": series["step"]}, begins) == [(3, 3), (9, 4)]
    (axes,) = curves.loss(run).axes
    assert [line.get_xdata() for line in axes.lines if line.get_transform() is not axes.transData] == [[20480] * 2]
    assert "attempt 2" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("count", [1, 2, 10, 40, 1000])
@pytest.mark.parametrize("far", [0, 1, 30])
def test_a_few_slow_steps_do_not_stretch_the_axis(count, far):
    usual = [1.0 + 0.01 * (i % 7) for i in range(count)]
    slow = min(far, count // 20)
    times = [50.0 + i for i in range(slow)] + usual[slow:]
    ceiling = bars.highest_shown(times)
    assert sum(t > ceiling for t in times) == slow and ceiling < 1.3
    many = [50.0] * (count // 5) + usual[count // 5 :]  # such as evaluations
    ceiling = bars.highest_shown(many)
    assert sum(t > ceiling for t in many) == count // 5 and ceiling < 3.3


def test_the_picture_of_all_steps_says_what_it_cuts_off(runs):
    run = run_reader.read_run(runs / "one")  # its first step takes five times as long as the others
    (axes,) = bars.time_steps(run).axes
    assert axes.get_title(loc="left").startswith("1 of 40 steps are longer; the longest, step 1, ")
    times = [sum(v[i] or 0.0 for n, v in run.series.items() if n.startswith("phases.")) for i in range(40)]
    assert times[0] > bars.highest_shown(times) >= max(times[1:])


@pytest.mark.parametrize("count", [1, 40, 5000])
def test_a_long_run_has_no_larger_picture(count, runs):
    steps = [1024 * i for i in range(1, count + 1)]
    values = [2.0 + math.sin(i) for i in steps]
    run = run_reader.read_run(runs / "one")
    run = run._replace(series={"step": steps, "loss": values, "val_loss": values}, attempts=[])
    for figure in (curves.loss(run), curves.losses(report_writer.gather([runs / "one"])._replace(runs=[run]))):
        (axes,) = figure.axes
        whole = [line for line in axes.lines if line.get_marker() != "None"]
        assert all(len(steps[:: line.get_markevery()]) < 2 * figures.MARKS for line in whole) and whole
        assert all(len(line.get_xdata()) <= figures.POINTS for line in axes.lines if line not in whole)


# ---- under the pointer ----


@pytest.mark.parametrize("log", [False, True], ids=["linear", "logarithmic"])
def test_the_points_of_a_picture_are_its_values(runs, log):
    run = run_reader.read_run(runs / "one")
    figure = curves.loss(run)
    ((axes,),) = [[one for one in figures.draw_svg(lambda: figure, log=log).points]]
    (there,) = figure.axes
    lines = {name: (axes["xs"][which], y) for name, which, y in axes["lines"]}
    seen = [(x, y) for x, y in zip(run.series["tokens"], run.series["val_loss"]) if y is not None]
    assert lines["training, each step"][0] == run.series["tokens"]
    assert lines["training, each step"][1] == pytest.approx(run.series["loss"], rel=1e-4)
    assert lines["validation"][1] == pytest.approx([y for _, y in seen], rel=1e-4)
    assert axes["log"] is log and axes["name"] == "tokens seen"
    for x in run.series["tokens"]:  # as the script of the page has it, where matplotlib draws it
        low, high = axes["x"]
        part = math.log(x / low) / math.log(high / low) if log else (x - low) / (high - low)
        at = axes["box"][0] + part * (axes["box"][2] - axes["box"][0])
        place = figure.transFigure.inverted().transform(there.transData.transform((x, 3.0)))
        assert at == pytest.approx(place[0], abs=2e-4)
    corner = figure.transFigure.inverted().transform(there.transAxes.transform((1.0, 1.0)))
    assert axes["box"][1:3] == pytest.approx([1 - corner[1], corner[0]], abs=2e-4) and axes["box"][3] > 0.8


def test_the_page_has_the_points_of_its_pictures(written):
    found = Page()
    found.feed((written / "report.html").read_text())
    tables = [json.loads(attrs["data-points"]) for tag, attrs in found.tags if "data-points" in attrs]
    assert all(axes["lines"] for table in tables for one in table for axes in one)
    switched = [table for table in tables if len(table) == 2]
    buttons = [attrs for tag, attrs in found.tags if tag == "button"]
    assert len(buttons) == len(switched) == 3 and all("hidden" in attrs for attrs in buttons)
    for linear, log in switched:
        assert [one["lines"] for one in linear] == [one["lines"] for one in log]
        assert not linear[0]["log"] and log[0]["log"]


def test_an_installation_has_the_templates():
    """Each file of the package that is no module is matched by a pattern of pyproject.toml."""
    root = Path(report_writer.__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["fzero"]
    shipped = {path for pattern in patterns for path in (root / "fzero").glob(pattern)}
    kinds = {".html", ".md", ".css", ".js"}
    templates = {path for path in (root / "fzero").rglob("*") if path.suffix in kinds}
    assert len(templates) >= 6 and templates <= shipped


def test_the_lines_of_the_script_are_whole():
    """A line that ends inside a text of the script would make all of it void."""
    script = (Path(report_writer.__file__).parent / "templates/page.js").read_text()
    for line in script.splitlines():
        assert line.count('"') % 2 == line.count("`") % 2 == 0, line
    assert all(script.count(a) == script.count(b) for a, b in ("()", "[]", "{}"))


# ---- dark ----


def contrast(one, other):
    """The contrast of two colours as WCAG 2 defines it."""

    def light(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_lines_and_words_are_legible_in_light_and_dark():
    back = figures.DARK["fill"][figures.WHITE]
    lines = [colour for colour, *_ in figures.LINES] + [figures.GREY, figures.DIM, figures.PREDICTED["color"]]
    for colour in lines:
        assert contrast(figures.DARK["stroke"].get(colour, colour), back) >= 3, colour
        assert contrast(colour, figures.WHITE) >= 2, colour
    assert contrast(figures.DARK["fill"][figures.BLACK], back) > 7
    for table in (figures.COMPONENTS, figures.PHASES):
        areas = [figures.DARK["fill"].get(colour, colour) for colour, _ in table.values()]
        assert all(contrast(area, back) >= 2 for area in areas)
        looks = [(area, hatch) for area, (_, hatch) in zip(areas, table.values())]
        assert len(set(looks)) == len(looks)


def test_every_picture_has_its_dark_colours(written):
    """Each colour of DARK that a picture has is replaced by a rule of its own; black areas too, which have no fill."""
    for path in written.glob("*.svg"):
        text = path.read_text()
        (rules,) = re.findall(r"@media screen and \(prefers-color-scheme: dark\)\{(.*?\})\}", text)
        for what, colours in figures.DARK.items():
            for light, dark in colours.items():
                assert f'[style*="{what}: {light.lower()}"]{{{what}:{dark}!important}}' in rules
        assert 'g>path[style]:not([style*="fill"]){fill:' in rules and rules.startswith("text,")
        root = ET.fromstring(text)
        styles = [element.get("style", "") for element in root.iter()]
        assert any("fill: #ffffff" in style for style in styles), "a background that dark replaces"
        for style in styles:
            assert "rgb(" not in style and not re.search("(fill|stroke):#", style), "a form that no rule matches"
