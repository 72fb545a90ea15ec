"""Find the DiskSettings that suit a disk, for `fzero bench disk`, by the rates of disk_rates.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fzero.offload.buffer_pool import BufferPool
from fzero.offload.disk_io import DiskSettings, file_system, load_settings, mount_point, save_settings
from fzero.planner.calibrate.disk_rates import (
    ANCHOR_BLOCK,
    ANCHOR_THREADS,
    FIO_DEPTH,
    KINDS,
    MB,
    Files,
    Rate,
    anchor,
    cached_fraction,
    engine,
    fio,
    has_fio,
    open_files,
)

BLOCKS = tuple(m * MB for m in (1, 2, 4, 8, 16))
THREADS = (1, 2, 4)  # readers or writers that are tried
DEPTHS = (1, 2, 4)  # requests under way, for each thread
DEPTH = 2  # requests under way for each thread
CLOSE = 0.95  # rates above this fraction of each other count as equal: disks are no steadier
NOISY = 1.5  # how much the raw rates may vary during a measurement whose best settings are kept


class DiskMeasurement(NamedTuple):
    """One way to use the disk, and its rates by kind, without kinds that were not measured."""

    name: str
    rates: dict[str, Rate]
    settings: DiskSettings | None = None
    depth: int = DEPTH


class SweepResult(NamedTuple):
    """The result of `sweep`."""

    anchors: list[DiskMeasurement]
    rows: list[DiskMeasurement]  # of our own DiskIO
    best: DiskMeasurement
    spread: float  # the largest ratio between two measurements of an anchor


def named(settings: DiskSettings, depth: int = DEPTH) -> str:
    """Format the settings for the table."""
    size = settings.block_bytes
    return f"{size // MB} MiB, {settings.readers} + {settings.writers} threads" + (
        f", depth {depth}" if depth != DEPTH else ""
    )


def sweep(
    files: Files,
    seconds: float,
    *,
    blocks: Sequence[int] = BLOCKS,
    threads: Sequence[int] = THREADS,
    depths: Sequence[int] = DEPTHS,
    rounds: int = 3,
    say: Callable[[DiskMeasurement], None] = lambda row: None,
) -> SweepResult:
    """The rates of the anchors and of DiskIO by block sizes, readers and writers, and depths."""
    blocks = [block for block in blocks if block <= files.size]
    buffers = BufferPool(
        2 * max(ANCHOR_THREADS * min(ANCHOR_BLOCK, files.size), max(threads) * max(depths) * max(blocks))
    )
    fill = buffers.allocate((buffers.size,), torch.uint8)  # a disk may write zeros faster
    fill.view.view(-1, 2 * MB).copy_(torch.randint(0, 256, (2 * MB,), dtype=torch.uint8))
    del fill
    anchors: dict[str, dict[str, list[Rate]]] = {}

    def measure(settings: DiskSettings, depth: int = DEPTH) -> DiskMeasurement:
        return DiskMeasurement(
            named(settings, depth),
            {k: engine(files, buffers, settings, depth, KINDS[k], seconds) for k in KINDS},
            settings,
            depth,
        )

    def measure_anchors() -> None:
        for kind, writes in KINDS.items():
            ways = {
                f"raw O_DIRECT, {ANCHOR_THREADS} threads a kind": lambda writes=writes: anchor(
                    files, buffers, writes, seconds
                )
            }
            if has_fio():
                ways[f"fio, libaio, depth {FIO_DEPTH} a kind"] = lambda writes=writes: fio(files, writes, seconds)
            for name, rate in ways.items():
                anchors.setdefault(name, {}).setdefault(kind, []).append(rate())

    rows: list[DiskMeasurement] = []

    def add(row: DiskMeasurement) -> None:
        rows.append(row)
        say(row)

    for block in blocks:
        measure_anchors()
        for count in threads:
            add(measure(DiskSettings(block, count, count)))
    measured = choose(rows).settings
    assert measured is not None  # anchors are not among the rows
    block = measured.block_bytes
    for readers in threads:
        for writers in threads:
            if readers != writers:
                add(measure(DiskSettings(block, readers, writers)))
    finals = _finals(rows, blocks, rounds, measure, measure_anchors)
    best = choose(finals)
    assert best.settings is not None  # as of all finals
    rows = [next((final for final in finals if final.settings == row.settings), row) for row in rows]
    for depth in depths:
        if depth != DEPTH:
            add(measure(best.settings, depth=depth))
    medians = [
        DiskMeasurement(name, {kind: median(measured) for kind, measured in kinds.items()})
        for name, kinds in anchors.items()
    ]
    spread = max(max(measured).gbs / min(measured).gbs for kinds in anchors.values() for measured in kinds.values())
    return SweepResult(medians, rows, best, spread)


def _finals(
    rows: Sequence[DiskMeasurement],
    blocks: Sequence[int],
    rounds: int,
    measure: Callable[[DiskSettings], DiskMeasurement],
    measure_anchors: Callable[[], None],
) -> list[DiskMeasurement]:
    """The four best rows and the defaults, measured again: the medians of `rounds` alternating rounds."""
    finalists = [row.settings for row in sorted(rows, key=_score)[-4:] if row.settings is not None]
    default = DiskSettings()
    if default.block_bytes in blocks and default not in finalists:
        finalists.append(default)
    repeats: dict[DiskSettings, list[DiskMeasurement]] = {settings: [] for settings in finalists}
    for _ in range(rounds):
        measure_anchors()
        for settings in finalists:
            repeats[settings].append(measure(settings))
    return [
        DiskMeasurement(
            measurements[0].name, {kind: median([row.rates[kind] for row in measurements]) for kind in KINDS}, settings
        )
        for settings, measurements in repeats.items()
    ]


def median(rates: Sequence[Rate]) -> Rate:
    """The medians of both fields."""
    return Rate(*(statistics.median(figure) for figure in zip(*rates)))


def _score(row: DiskMeasurement) -> float:
    return math.prod(rate.gbs for rate in row.rates.values()) ** (1 / len(row.rates))


def choose(rows: Sequence[DiskMeasurement]) -> DiskMeasurement:
    """Of the rows within 5% of the fastest the defaults, else the one of the least CPU time."""
    close = [row for row in rows if _score(row) >= CLOSE * max(map(_score, rows))]
    return min(close, key=lambda row: (row.settings != DiskSettings(), row.rates["mixed"].cpu_s_per_gb))


def choose_depth(rows: Sequence[DiskMeasurement]) -> int:
    """The smallest depth within 5% of the fastest."""
    return min(row.depth for row in rows if _score(row) >= CLOSE * max(map(_score, rows)))


def table(result: SweepResult) -> str:
    """The rates as text: GB/s, the ratio to the faster anchor, and CPU seconds per GB."""
    bar = {kind: max(row.rates[kind].gbs for row in result.anchors) for kind in KINDS}
    lines = [f"{'':34}" + "".join(f"{title:>15}" for title in ("read", "write", "read+write")) + f"{'CPU s/GB':>10}"]
    for row in (*result.anchors, *result.rows):
        cells = [f"{row.rates[k].gbs:8.2f}  ({row.rates[k].gbs / bar[k]:.2f})"[-15:].rjust(15) for k in KINDS]
        chosen = row.settings == result.best.settings and row.depth == result.best.depth
        lines.append(
            f"{row.name:34}{''.join(cells)}{row.rates['mixed'].cpu_s_per_gb:10.4f}{'  <- best' if chosen else ''}"
        )
    return "\n".join(lines)


def bench_disk(
    folder: Path, *, size: int, seconds: float, write_config: bool, progress: Callable[[str], None] = lambda line: None
) -> str:
    """Measure the disk of `folder` with two files of `size` bytes, save the best settings; return a text."""
    if write_config and folder.exists():
        load_settings(folder)  # reports an invalid file now instead of a minute later
    with open_files(folder, size) as files:
        mount = mount_point(folder)

        def say(row: DiskMeasurement) -> None:
            progress(f"{row.name}: {', '.join(f'{kind} {rate.gbs:.2f}' for kind, rate in row.rates.items())} GB/s")

        result = sweep(files, seconds, say=say)
        cached_ratio = cached_fraction(files)
    best, busy = result.best, result.spread > NOISY
    assert best.settings is not None  # as of all rows of a sweep
    enough = choose_depth([row for row in result.rows if row.settings == best.settings])
    lines = [
        (
            f"{folder}, on {mount} ({file_system(mount) or 'unknown'}): two files of {size / 1e9:.2f} GB, {seconds:g} "
            "s for each figure"
        ),
        table(result),
        "GB/s (ratio to the fastest of the first lines); the CPU time is for simultaneous reading and writing.",
        "page cache: bypassed (O_DIRECT)"
        + ("" if cached_ratio is None else f"; afterwards it held {100 * cached_ratio:.0f}% of the files")
        + ". Caches of a host or of the drive itself are unknown.",
        *([] if has_fio() else ["fio is not installed; with it the bar is the faster of two."]),
        *([f"the disk was busy: its raw rates varied by {result.spread:.1f}x meanwhile; measure again."] * busy),
        f"best: {named(best.settings)}; a depth of {enough} (requests under way for each thread) is enough.",
    ]
    if busy:
        lines.append("no settings were written: others would be the best on a disk that is not busy")
    elif write_config:
        path = save_settings(mount, best.settings, {kind: rate.gbs for kind, rate in best.rates.items()})
        lines.append(f'written to {path}, [disk."{mount}"]')
    else:
        lines.append("no settings were written (--no-write-config)")
    return "\n".join(lines)
