"""Text to tokens: `fzero data prepare` beside datatrove, Hugging Face's datasets and litdata.

    python benchmarks/prepare.py --peers PEERS/bin/python --mb 60 --out benchmarks/results/prepare.json

PEERS is an environment with datatrove, datasets, litdata and tokenizers. The text is Python's standard library, as
documents of .jsonl files, again and again with changed names until it is of that size; the tokenizer a BPE of 8,192
tokens, trained on a quarter of it. Every system encodes with the tokenizers library, by one process for each core. They
take turns; a turn is a command from its start to its end, with its imports. `peak_mb` is the largest sum, over the
command's processes, of the memory of each and its share of what they have in common (Pss).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from turns import write_run

HERE = Path(__file__).resolve().parent
FILES, VOCABULARY = 16, 8192
SAMPLED_S = 0.2


def write_texts(folder: Path, size: int) -> None:
    """Write .jsonl files of about `size` bytes together."""
    from fzero.data.sources import find_files, read_documents

    found = find_files(["stdlib"], folder)
    texts = [one.text for one in read_documents(found, "text") if not one.problem]
    files = [(folder / f"{i:02}.jsonl").open("w", encoding="utf-8") for i in range(FILES)]
    written = copy = 0
    with contextlib.ExitStack() as stack:
        for file in files:
            stack.enter_context(file)
        while written < size:
            for i, text in enumerate(texts):
                if copy:  # other words in other places: a copy is no copy for a cache of words
                    text = re.sub(r"\b([a-z]{3,})_", rf"\g<1>{copy}_", text)
                written += files[i % FILES].write(json.dumps({"text": text}) + "\n")
                if written >= size:
                    break
            copy += 1


def memory_of(root: int) -> float:
    """MB of a process and those below it, each with its share of what is common."""
    parents, found = {}, [root]
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    total = 0
    for process in found:
        with contextlib.suppress(OSError, AttributeError):
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1])  # type: ignore[index]
    return total / 1e3


def run(command: list[str], env: dict[str, str]) -> dict[str, Any]:
    """The seconds of a command, its peak of memory, and the tokens that it says it wrote."""
    begin, peak, ended = time.perf_counter(), 0.0, threading.Event()
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def watch() -> None:
        nonlocal peak
        while not ended.wait(SAMPLED_S):
            peak = max(peak, memory_of(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, err = process.communicate()
    seconds = time.perf_counter() - begin
    ended.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{err[-3000:]}")
    said = re.findall(r"^tokens (\d+)$", out, re.M)
    return {"seconds": seconds, "peak_mb": peak, "tokens": int(said[-1]) if said else None}


def turn(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One command of a system."""
    out, texts, tokenizer = folder / "out", str(folder / "texts"), str(folder / "tokenizer.json")
    shutil.rmtree(out, ignore_errors=True)
    env = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parent)}
    if name == "fzero":
        options = ["--out", str(out), "--tokenizer", tokenizer, "--workers", str(args.workers)]
        found = run([sys.executable, "-m", "fzero", "data", "prepare", texts, *options], env)
        meta = json.loads((out / "meta.json").read_text())
        found["tokens"] = sum(split["tokens"] for split in meta["splits"].values())
    else:
        env.pop("PYTHONPATH")
        program = [args.peers, str(HERE / "peers" / "prepare.py"), name, texts, tokenizer, str(out), str(args.workers)]
        found = run(program, env)
    print(f"{name}: {found['seconds']:.1f} s, {found['tokens']:,} tokens, {found['peak_mb']:.0f} MB", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", required=True, help="The python of an environment with the other systems.")
    parser.add_argument("--mb", type=int, default=500, help="The text, in MB.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--systems", default="fzero,datatrove,datasets,litdata")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names, before = args.systems.split(","), os.getloadavg()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "texts").mkdir()
        write_texts(folder / "texts", args.mb * 10**6)
        from fzero.data.tokenizers import train_bpe

        files = sorted((folder / "texts").iterdir())[:4]
        lines = (line for file in files for line in file.read_text(encoding="utf-8").splitlines())
        made = train_bpe((json.loads(line)["text"] for line in lines), VOCABULARY)
        (folder / "tokenizer.json").write_text(made.json, encoding="utf-8")
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for _ in range(args.turns):
            for name in names:
                found[name].append(turn(name, args, folder))
        size = sum(path.stat().st_size for path in (folder / "texts").iterdir())
    counts = {one["tokens"] for turns in found.values() for one in turns}
    if len(counts) != 1:
        raise SystemExit(f"the systems wrote different numbers of tokens: {sorted(counts)}")
    tokens = counts.pop()
    rows = {
        name: {
            "seconds": [round(one["seconds"], 2) for one in turns],
            "tokens_per_s": round(tokens / statistics.median(one["seconds"] for one in turns)),
            "tokens_per_s_from_to": [round(tokens / bound(one["seconds"] for one in turns)) for bound in (max, min)],
            "peak_mb": round(max(one["peak_mb"] for one in turns)),
        }
        for name, turns in found.items()
    }
    print(json.dumps(rows, indent=2))
    if args.out:
        write_run(args.out, before, text_mb=round(size / 1e6), tokens=tokens, workers=args.workers, systems=rows)


if __name__ == "__main__":
    main()
