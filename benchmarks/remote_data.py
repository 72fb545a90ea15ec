"""Rows a second of a corpus at a URL, with a cold and with a warm cache, beside the same corpus in a folder.

    python benchmarks/remote_data.py [--mb 64] [--seq-len 1024] [--batch 16] [--steps 200] [--latency 0.05]
        [--failing 0.05] [--cache-mb N] [--url s3://bucket/corpus] [--out FILE]

Makes a corpus of text of its own, of so many MB, and reads it by file://; or reads the one at --url, a copy of which is
at --local. Each request is answered --latency seconds later than it would be, and --failing of them fail and are asked
again. --cache-mb: without one the corpus fits. The three readers take turns, --rounds times; the cold one begins with
an empty cache each time. A reader begins eight batches ahead, as a run does, and makes nothing of its batches; the
figure is the best of its rounds. Every batch is compared with the local one, outside of the time."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from turns import write_run

from fzero import data
from fzero.core.storage import Objects
from fzero.run.setup.corpus import AHEAD


class Later:
    """A request that is answered some time after it was made, and may fail then."""

    def __init__(self, future: Any, latency: float, fails: bool) -> None:
        self.future, self.ready, self.fails = future, time.monotonic() + latency, fails

    def done(self) -> bool:
        """Whether the answer is there."""
        return time.monotonic() >= self.ready and self.future.done()

    def result(self, timeout: float) -> Any:
        """The answer, as tensorstore's futures give it."""
        time.sleep(max(0.0, self.ready - time.monotonic()))
        if self.fails:
            raise ValueError("UNAVAILABLE: a planted error")
        return self.future.result(timeout)


def delay(latency: float, failing: float) -> list[int]:
    """Make every read of an object late, and some fail; returns a list whose number counts them."""
    begin, rng, count = Objects.begin_read, random.Random(0), [0]

    def begin_read(self: Objects, name: str, start: int = 0, end: int | None = None) -> Any:
        count[0] += 1
        return Later(begin(self, name, start, end), latency, rng.random() < failing)

    Objects.begin_read = begin_read  # pyright: ignore[reportAttributeAccessIssue]
    return count


def write_corpus(folder: Path, mb: float) -> Path:
    """A corpus of random words, of so many MB."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(5000)]
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(max(20, round(mb * 1e6 / 3000))):
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=460))}) + "\n")
    data.prepare(folder / "text.jsonl", folder / "corpus")
    return folder / "corpus"


def rows_a_second(stream: data.TokenStream, steps: int, kept: list[Any]) -> float:
    """Rows a second of the first batches of a stream, which go to `kept`."""
    begun = time.perf_counter()
    for step in range(steps):
        if not step:
            stream.begin(0, AHEAD * stream.batch)
        stream.begin((step + AHEAD) * stream.batch, stream.batch)
        kept.append(stream.batch_at(step))
    return steps * stream.batch / (time.perf_counter() - begun)


def measure(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    """The figures of all readers."""
    local = Path(args.local) if args.local else write_corpus(home, args.mb)
    data.link_url(args.url or f"file://{local.absolute()}", home / "linked")
    size = int(args.cache_mb * 1e6) if args.cache_mb else 4 * (local / "train.bin").stat().st_size + (8 << 20)
    reading, requests = data.Reading(home / "cache", size), delay(args.latency, args.failing)
    best, asked, pieces = dict.fromkeys(("local", "cold", "warm"), 0.0), {"cold": 0, "warm": 0}, 0
    for _ in range(args.rounds):
        batches: dict[str, list[Any]] = {name: [] for name in best}
        shutil.rmtree(home / "cache", ignore_errors=True)
        for name in best:
            tokens = data.open_tokens(local if name == "local" else home / "linked", "train", reading)
            pieces = getattr(tokens.tokens, "piece", pieces)
            before = requests[0]
            stream = data.TokenStream(tokens, args.seq_len, args.batch)
            best[name] = max(best[name], rows_a_second(stream, args.steps, batches[name]))
            asked |= {name: requests[0] - before} if name != "local" else {}
        for name in ("cold", "warm"):
            for ours, theirs in zip(batches[name], batches["local"], strict=True):
                assert all(torch.equal(ours[key], theirs[key]) for key in theirs), f"{name}: another batch"
    return {
        "arguments": vars(args),
        "piece_bytes": pieces,
        "cache_bytes": size,
        "requests": asked,
        "rows_per_s": best,
        "of_local": {name: best[name] / best["local"] for name in ("cold", "warm")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("mb", 64.0), ("latency", 0.05), ("failing", 0.05), ("cache-mb", 0.0)):
        parser.add_argument(f"--{name}", type=float, default=value)
    for name, value in (("seq-len", 1024), ("batch", 16), ("steps", 200), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name in ("url", "local", "out"):
        parser.add_argument(f"--{name}", default="")
    args = parser.parse_args()
    if bool(args.url) != bool(args.local):
        parser.error("--url and --local go together: the same corpus there and here")
    torch.set_num_threads(1)
    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as home:
        found = measure(args, Path(home))
    print(json.dumps(found, indent=1))
    if args.out:
        write_run(Path(args.out), before, **found)


if __name__ == "__main__":
    main()
