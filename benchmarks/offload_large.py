"""Training what does not fit: a Llama whose states are several times the memory that its process may have.

    python benchmarks/offload_large.py --nvme DIR [--model llama-1b --steps 3 --fraction 0.25 ...]

The process gets RLIMIT_DATA (all private memory that it may write: heap and anonymous maps) of a fraction of the
states' bytes, and then runs `fzero pretrain`. Prints and writes the peak of resident memory, the bytes moved and the
tokens per second."""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import turns  # noqa: E402


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvme", type=Path, required=True, help="a folder on the disk; it is emptied")
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--fraction", type=float, default=0.25, help="of the states' bytes that the process may have")
    parser.add_argument("--offload", default="params=nvme,opt=nvme,grads=nvme,acts=nvme")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    from fzero import models
    from fzero.run.measure import memory_check
    from fzero.run.setup import build, run_folder

    layers = {
        key: int(n)
        for key, _, n in (value.removeprefix("model.").partition("=") for value in args.set)
        if key == "n_layers"
    }
    config = models.preset(args.model)
    config = type(config)(
        **{**config.__dict__, "vocab_size": args.vocab, "tied": False, "max_len": args.seq_len, **layers}
    )
    count = models.num_params(models.build(config))
    states = 16 * count  # bfloat16 parameters and gradients, float32 master weights and two moments
    limit = int(args.fraction * states)
    print(
        f"{args.model}: {count:,} parameters, {states / 1e9:.2f} GB of states; the process may have {limit / 1e9:.2f} "
        "GB (RLIMIT_DATA)"
    )
    shutil.rmtree(args.nvme, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=args.nvme.parent) as folder:
        run = Path(folder, "run")
        command = [
            sys.executable,
            "-m",
            "fzero",
            "pretrain",
            "--model",
            args.model,
            "--data",
            str(HERE.parent / "fzero"),
            "--out",
            str(run),
            "--steps",
            str(args.steps + 1),
            "--stop-at",
            str(args.steps),
            "--batch",
            str(args.batch),
            "--micro-batch",
            "1",
            "--seq-len",
            str(args.seq_len),
            "--precision",
            "bf16",
            "--remat",
            "full",
            "--offload",
            args.offload,
            "--nvme",
            str(args.nvme),
            "--set",
            f"model.vocab_size={args.vocab}",
            "--set",
            "model.tied=false",
            "--set",
            f"model.max_len={args.seq_len}",
            "--set",
            "train.eval_every=0",
            "--set",
            "train.log_every=1",
            "--prompt",
            "",
            "--peak-tflops",
            "1",
            *[part for value in args.set for part in ("--set", value)],
        ]

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

        subprocess.run(command, check=True, preexec_fn=limited)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        made = build.build(run_folder.read_config(run), None, run)
        predicted = {
            "memory": memory_check.PROCESS + sum(memory_check.memory_needed(made)),
            "disk": memory_check.disk_needed(made),
        }
        disk = sum(path.stat().st_blocks * 512 for path in args.nvme.rglob("*") if path.is_file())
    shutil.rmtree(args.nvme, ignore_errors=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    later = rows[1:] or rows
    keys = ("disk_read_bytes", "disk_written_bytes", "disk_wait_s", "step_s", "tokens_per_s")
    result = {
        "parameters": count,
        "states_bytes": states,
        "limit_bytes": limit,
        "peak_rss_bytes": peak,
        "predicted_memory_bytes": predicted["memory"],
        "disk_bytes_after": disk,
        "predicted_disk_bytes": predicted["disk"],
        "losses": [row["loss"] for row in rows],
        **{key: sorted(row[key] for row in later)[len(later) // 2] for key in keys},
        "command": sys.argv,
        "machine": turns.machine(),
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
