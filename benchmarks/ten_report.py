"""What ten.py has measured, as a page: the goals, what was to be seen at first contact, every row, every failure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
DATASHEET = {"H100": 989e12, "H200": 989e12}  # dense bf16 FLOP/s
PLANS = Path(__file__).with_name("ten_plans.json")
NO_FIGURE = {"failed", "needs a GPU", "blocking"}  # the last: of a call with one kernel at a time


class Found(NamedTuple):
    """The rows of a sitting, the last of each name, and the plans for its card."""

    rows: dict[tuple[str, str], Row]
    plans: dict[str, Row]

    def row(self, part: str, name: str) -> Row:
        """A row that has figures. Raises LookupError where it has not."""
        row = self.rows[part, name]
        if NO_FIGURE & {*row}:
            raise LookupError(f"{part}: {name}")
        return row

    def of(self, part: str) -> dict[str, Row]:
        """All rows of a part that have figures."""
        return {name: row for (its, name), row in self.rows.items() if its == part and not NO_FIGURE & {*row}}


class Judged(NamedTuple):
    """A figure in words, and whether it is what it should be; None: it only says something."""

    text: str
    reached: bool | None = None


class Goal(NamedTuple):
    """What is to be known. `judge` raises LookupError where it was not measured."""

    what: str
    judge: Callable[[Found], Judged]


def latest(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """The last row of each part and name."""
    return {(row["part"], row["row"]): row for row in rows if "row" in row}


def found_of(rows: Sequence[Row]) -> Found:
    """The rows, with the plans of `ten.py --plans` for their card."""
    table = latest(rows)
    card = str(table.get(("sitting", "begin"), {}).get("card", "")).lower()
    plans = json.loads(PLANS.read_text())["plans"] if PLANS.is_file() else {}
    return Found(table, next((plans[name] for name in plans if name in card), {}))


# ---- goals ----


def _ratio(part: str, ours: str, theirs: str, figure: str, least: float | None, most: float | None) -> Any:
    def judge(found: Found) -> Judged:
        a, b = (found.row(part, name)[figure] for name in (ours, theirs))
        if not b:
            raise LookupError(f"{part}: {figure}")
        good = (least is None or a >= least * b) and (most is None or a <= most * b)
        return Judged(f"{short(a)} / {short(b)} = {a / b:.3f}", good)

    return judge


def _faster(found: Found) -> Judged:
    rate = found.row("124m", "fzero compiled")["tokens_per_s"]
    return Judged(f"{rate:,.0f}", rate >= 402e3)


def _plan_off(planned: str, measured: Callable[[Row], float], most: float) -> Callable[[Found], Judged]:
    def judge(found: Found) -> Judged:
        off = {}
        for name, plan in found.plans.items():
            row = found.rows.get(tuple(name.split(": ")), {})
            if "ms" in row and "captured" not in name and not NO_FIGURE & {*row}:
                off[name] = measured(row) / plan[planned] - 1
        if not off:
            raise LookupError("no row stands beside a plan")
        text = ", ".join(f"{name} {value:+.1%}" for name, value in off.items())
        return Judged(text, max(map(abs, off.values())) <= most)

    return judge


def _offload(name: str) -> Callable[[Found], Judged]:
    def judge(found: Found) -> Judged:
        ms, compute = (found.row("offload", row)["ms"]["median"] for row in (name, "none"))
        moved = found.plans[f"offload: {name}"]["link"]
        rates = [found.row("machine", f"copy {way}")["bytes_per_s"] for way in ("H2D", "D2H")]
        link = max(1e3 * n / rate for n, rate in zip((moved["read"], moved["write"]), rates))
        text = f"{ms:,.0f} ms; link {link:,.0f}, compute {compute:,.0f}: {ms / max(link, compute):.2f}"
        return Judged(text, ms <= 1.3 * max(link, compute))

    return judge


def _races(found: Found) -> Judged:
    rows = {name: row for (part, name), row in found.rows.items() if part == "sanitizer" and "needs a GPU" not in row}
    if not rows:
        raise LookupError("sanitizer")
    wrong = [f"{name}: {row['failed']}" for name, row in rows.items() if "failed" in row]
    return Judged("; ".join(wrong) or f"0 in {', '.join(rows)}", not wrong)


GOALS = (
    Goal("GPT-2 124M, tokens/s >= 402,000 (an H100)", _faster),
    Goal(
        "124M over nn.Module + torch.compile, tokens/s >= 1",
        _ratio("124m", "fzero compiled", "nn.Module", "tokens_per_s", 1.0, None),
    ),
    Goal("its memory over that, <= 0.9", _ratio("124m", "fzero compiled", "nn.Module", "own_bytes", None, 0.9)),
    Goal(
        "Llama 1B over nn.Module + torch.compile, tokens/s >= 1",
        _ratio("1b", "fzero", "nn.Module", "tokens_per_s", 1.0, None),
    ),
    Goal("its memory over that, <= 0.9", _ratio("1b", "fzero", "nn.Module", "own_bytes", None, 0.9)),
    Goal("plans: time within 15%", _plan_off("step_ms", lambda row: row["ms"]["median"], 0.15)),
    Goal("plans: max_memory_allocated within 2%", _plan_off("peak_bytes", lambda row: row["own_bytes"], 0.02)),
    Goal("offload all=host over max(link, compute), <= 1.3", _offload("all")),
    Goal("offload all=host, speculating, over the same", _offload("all speculate")),
    Goal("races", _races),
)


# ---- what is likely at first contact ----


def _no_failure(part: str, *words: str) -> Callable[[Found], Judged]:
    def judge(found: Found) -> Judged:
        rows = {n: r for (p, n), r in found.rows.items() if p == part and any(word in n for word in words)}
        rows = {name: row for name, row in rows.items() if "needs a GPU" not in row}
        if not rows:
            raise LookupError(part)
        wrong = [f"{name}: {row['failed']}" for name, row in rows.items() if "failed" in row]
        worst = max((row.get("times plain", 0.0) for row in rows.values()), default=0.0)
        return Judged("; ".join(wrong) or f"{len(rows)} rows, at most {worst:.2f} times plain torch's error", not wrong)

    return judge


def _float8(name: str) -> Callable[[Found], Judged]:
    def judge(found: Found) -> Judged:
        rows = sorted((row["K"], row[name]) for row in found.of("ops").values() if "K" in row)
        if len(rows) < 3:
            raise LookupError("float8")
        (first, error), *_ = rows
        bounds = [(k, e, min(2**-8, max(error, 2**-14) * math.sqrt(k / first))) for k, e in rows]
        return Judged(", ".join(f"K={k} {e:.1e}" for k, e, _ in bounds), all(e <= bound for _, e, bound in bounds))

    return judge


def _float32_attention(found: Found) -> Judged:
    form = found.row("attention", "124m float32: auto")["form"]
    rates = {
        name.partition(": ")[2]: row["both_tflops"]
        for name, row in found.of("attention").items()
        if name.startswith("124m float32") and "both_tflops" in row
    }
    best = max(rates, key=lambda name: rates[name])
    text = ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())
    return Judged(f"auto takes {form}; TFLOP/s: {text}", rates.get(form, 0.0) >= 0.95 * rates[best])


def _adds_wide(found: Found) -> Judged:
    row = found.row("ops", "adds wide")
    return Judged(str(row["adds wide"]), row["adds wide"])


def _growing(found: Found) -> Judged:
    row = found.row("machine", "free memory")
    grown = {key: row["later"][key] - value for key, value in row["first"].items()}
    text = ", ".join(f"{key} {short(row['first'][key])} {value / 1e9:+.2f} GB" for key, value in grown.items())
    return Judged(f"{text} in {row['s between']} s", all(abs(value) < 2e9 for value in grown.values()))


def _attention(found: Found) -> Judged:
    text, good, rows = [], True, found.of("attention")
    for shape in dict.fromkeys(name.partition(": ")[0] for name in rows):
        forms = {name.partition(": ")[2]: row for name, row in rows.items() if name.startswith(f"{shape}: ")}
        chosen = forms.pop("auto", {}).get("form", "")
        if chosen not in forms or "float32" in shape:
            continue
        same = {name: row["both_tflops"] for name, row in forms.items() if row["repeats"]}
        best = max(same, key=lambda name: same[name], default=chosen)
        good &= same.get(chosen, 0.0) >= 0.95 * same.get(best, 0.0)
        cudnn = (
            f", cudnn {forms['cudnn']['both_tflops']:.0f}{'' if forms['cudnn']['repeats'] else ' (other bits)'}"
            if "cudnn" in forms
            else ""
        )
        text.append(f"{shape}: auto {chosen} {forms[chosen]['both_tflops']:.0f}, best that repeats {best}{cudnn}")
    if not text:
        raise LookupError("attention")
    return Judged("; ".join(text), good)


PAGED = "decode B=32 S=8192: pages"


def _pages(found: Found) -> Judged:
    rate, copy = (found.row(*name)["bytes_per_s"] for name in (("pages", PAGED), ("machine", "copy D2D")))
    rows = {name.partition(": ")[0]: row for name, row in found.of("pages").items() if name.endswith(": pages")}
    other = [name for name, row in rows.items() if not (row["repeats"] and row["alone"])]
    theirs = {name: found.rows.get(("pages", f"{name}: contiguous"), {}).get("us", 0.0) for name in rows}
    times = ", ".join(f"{name} {theirs[name] / row['us']:.2f}" for name, row in rows.items() if theirs[name])
    text = f"{short(rate)}B/s, {rate / copy:.2f} of a copy; speed over contiguous: {times}"
    return Judged(text + f"; other bits: {', '.join(other)}" * bool(other), rate >= 0.7 * copy and not other)


def _event(found: Found) -> Judged:
    row = found.row("machine", "event wait")
    return Judged(
        f"sleeping {row['sleeps_us']:.0f} us, spinning {row['spins_us']:.0f} us", row["sleeps_less_spins_us"] < 50
    )


def _pools(found: Found) -> Judged:
    rows = {name: row for name, row in found.of("offload").items() if "reserved_less_active" in row}
    if not rows:
        raise LookupError("offload")
    text = ", ".join(f"{n} {short(r['reserved_less_active'])} of {short(r['reserved_bytes'])}" for n, r in rows.items())
    return Judged(text, all(row["reserved_less_active"] <= 0.1 * row["reserved_bytes"] for row in rows.values()))


def _failed_capture(found: Found) -> Judged:
    row = found.rows["capture", "failed capture"]
    if "needs a GPU" in row:
        raise LookupError("capture")
    return Judged(row.get("failed", "the steps go on with the bits of issued ones"), "failed" not in row)


CHECKS = (
    Goal("tl.gather in dkv: flash backward beside float64", _no_failure("ops", "attention")),
    Goal("float8 tensorwise: error <= min(2^-8, that of K = 64 times sqrt(K / 64))", _float8("tensorwise")),
    Goal("float8 rowwise: the same", _float8("rowwise")),
    Goal("float8 of experts (tl.dot): the same", _float8("experts")),
    Goal("float32 attention: auto takes what is fastest", _float32_attention),
    Goal("a bf16 product is added to a float32 sum in one call", _adds_wide),
    Goal("a failed capture", _failed_capture),
    Goal("free memory does not move by itself (2 GB)", _growing),
    Goal("attention: auto takes what is fastest and repeats", _attention),
    Goal("pages: decoding 32 rows of 8,192 positions reads >= 0.7 of a copy's bytes/s; equal bits", _pages),
    Goal("Event(blocking=True), a wait beyond spinning, < 50 us", _event),
    Goal("offload: reserved beyond active at the peak, <= 10%", _pools),
)


# ---- the page ----


def short(value: Any) -> str:
    """A number to read."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if abs(value) >= 1e9:
        return f"{value / 1e9:,.2f}G"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def judged(goals: Sequence[Goal], found: Found) -> list[str]:
    """The lines of a table of goals."""
    lines = []
    for goal in goals:
        try:
            if found.rows.get(("sitting", "begin"), {}).get("device", "cuda") != "cuda":
                raise LookupError("there is no GPU")
            text, reached = goal.judge(found)
        except (LookupError, ValueError):
            text, reached = "", None
            verdict = "not measured"
        else:
            verdict = "said" if reached is None else "reached" if reached else "**not reached**"
        lines.append(f"| {goal.what} | {text} | {verdict} |")
    return lines


def mfu_lines(found: Found) -> list[str]:
    """Tokens/s, ms, memory and MFU of each contender; MFU by the card's data sheet and by the product measured here."""
    measured = found.rows.get(("machine", "product bf16"), {}).get("flop_per_s")
    card = str(found.rows.get(("sitting", "begin"), {}).get("card", ""))
    sheet = next((rate for name, rate in DATASHEET.items() if name in card), None)
    lines = []
    for part in ("124m", "1b", "offload"):
        for name, row in found.of(part).items():
            if "tokens_per_s" not in row:
                continue
            plan = found.plans.get(f"{part}: {name}", {})
            flop = row["flop_per_s"]
            rates = " ".join(
                f"{flop[kind] / peak:.1%}" for kind in ("full", "causal") for peak in (sheet, measured) if peak
            )
            memory = " / ".join(short(row.get(key, 0)) for key in ("own_bytes", "active_bytes", "reserved_bytes"))
            lines.append(
                f"| {part}: {name} | {row['tokens_per_s']:,.0f} | {row['ms']['median']:.1f} ({row['ms']['min']:.1f} to "
                f"{row['ms']['max']:.1f}) | {row['issued_ms']['median']:.1f} | {memory} | {rates} | "
                f"{plan.get('step_ms', 0):.1f} | {short(plan.get('peak_bytes', 0))} |"
            )
    return lines


def summary(rows: Sequence[Row]) -> str:
    """A line for each part: its seconds, and how it ended."""
    ends = [row for row in rows if "end" in row]
    return "\n".join(f"{row['part']:28} {row.get('s', 0):6} s  {row['end']}" for row in ends)


def report(rows: Sequence[Row]) -> str:
    """The page."""
    found = found_of(rows)
    begin = found.rows.get(("sitting", "begin"), {})
    wrong = [(f"- {part}: {name}", row) for (part, name), row in found.rows.items() if {"failed", "cut"} & {*row}]
    failed = [f"{what}: {row.get('failed') or row['cut']}" for what, row in wrong]
    head = ", ".join(f"{key} {value}" for key, value in begin.items() if key not in ("part", "row", "t"))
    return "\n".join(
        [
            "# Ten minutes",
            *("", head, ""),
            *("## Goals", "", "| goal | figure | |", "| --- | --- | --- |", *judged(GOALS, found), ""),
            *("## At first contact", "", "| check | figure | |", "| --- | --- | --- |", *judged(CHECKS, found), ""),
            *("## Steps", "", "MFU: full and causal, each by the data sheet and by the product measured here.", ""),
            "| contender | tokens/s | ms (least to most) | issued | own, active, reserved | MFU | planned ms | peak |",
            *("| --- " * 8 + "|", *mfu_lines(found), ""),
            *("## Failures", "", *(failed or ["none"]), ""),
            *("## Parts", "", "```text", summary(rows), "```", ""),
        ]
    )
