"""fzero's disk offload beside fio, tensorstore and DeepSpeed on one disk, in one sitting.

    python benchmarks/nvme.py --deepspeed PYTHON --out benchmarks/results/nvme.json
    python benchmarks/nvme.py --sections disk --smoke

Two sections. `disk` moves the same bytes by every engine: read; write; both at once ("mixed"); the optimizer's stream
(read block i + 1, write block i - 1), with no computation and with one that waits 1.5 times as long as fio's mixed I/O
takes, as a GPU would ("bound"). `steps` trains one model whose optimizer states are on the disk, ours and DeepSpeed's
ZeRO-Infinity; no speed is printed unless the losses of the warm-up steps agree. Contenders take turns, one operation
each a round, in an order that rotates; ratios are between figures of the same round, since a shared disk drifts within
minutes. GB is 1e9 bytes.

The page cache flatters nobody: all but tensorstore's writes pass it by (O_DIRECT); what is written counts until it is
synced (DeepSpeed does not sync, and is not asked to); before each operation the files are evicted (posix_fadvise) and
mincore must find them gone; and the kernel's count of what a process read from the disk must be what was asked for. fio
has huge-page buffers, without which it is two to three times slower.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import sys
from pathlib import Path

from nvme_contenders import CONTENDERS, DEFAULT, NOTES
from nvme_disk import disk_section, disk_table
from nvme_steps import steps_section, steps_table
from peers.disk_engines import RING
from turns import machine


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sections", default="disk,steps", help="comma list of disk, steps")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path.cwd(),
        help="where the files are made, on the disk in question (default: here)",
    )
    parser.add_argument(
        "--deepspeed", metavar="PYTHON", help="the Python with DeepSpeed; without it DeepSpeed is left out"
    )
    parser.add_argument(
        "--contenders", help=f"disk: comma list of {', '.join(CONTENDERS['disk'])}; fio must be among them"
    )
    listed = f"{', '.join(CONTENDERS['steps'])} (default: {', '.join(DEFAULT['steps'])})"
    parser.add_argument("--step-contenders", help=f"steps: comma list of {listed}")
    parser.add_argument("--blocks", type=int, default=24, help="disk: blocks, of three planes each")
    parser.add_argument("--plane-mb", type=int, default=16, help="disk: MiB of a plane")
    parser.add_argument("--layers", type=int, default=18, help="steps: layers of 11.8M parameters")
    parser.add_argument("--tokens", type=int, default=32, help="steps: tokens of a step")
    parser.add_argument("--dtype", default="bf16", help="steps: comma list of fp32, bf16, bf16-states")
    parser.add_argument("--offload", default="opt=nvme", help="steps: what of ours is on the disk")
    parser.add_argument(
        "--buffer-mb", type=int, default=512, help="steps: MiB of our buffers; DeepSpeed's are 570 where tuned"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock, at least 2")
    parser.add_argument("--repeats", type=int, default=7, help="rounds, at least 5")
    parser.add_argument(
        "--smoke", action="store_true", help="2 small rounds: whether everything runs, not how fast it is"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write, after every section")
    args = parser.parse_args()
    for name, least in (
        ("blocks", RING),
        ("plane_mb", 8),
        ("layers", 1),
        ("tokens", 1),
        ("threads", 1),
        ("warmup", 2),
        ("repeats", 5),
    ):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    if args.plane_mb % 8:
        parser.error(f"--plane-mb {args.plane_mb}: must be a multiple of 8")
    for flag, value, allowed in (
        ("sections", args.sections, CONTENDERS),
        ("contenders", args.contenders or "fio", CONTENDERS["disk"]),
        ("step-contenders", args.step_contenders or "fio", CONTENDERS["steps"]),
        ("dtype", args.dtype, ("fp32", "bf16", "bf16-states")),
    ):
        for part in value.split(","):
            if part not in allowed:
                parser.error(f"--{flag}: {part!r} is not one of {', '.join(allowed)}")
    chosen = {"disk": args.contenders, "steps": args.step_contenders}
    for section, given in chosen.items():
        names = given.split(",") if given else list(DEFAULT[section])
        chosen[section] = [
            name for name in names if args.deepspeed or given or CONTENDERS[section][name][0] != "deepspeed"
        ]
        if any(CONTENDERS[section][name][0] == "deepspeed" for name in chosen[section]) and not args.deepspeed:
            parser.error("DeepSpeed is asked for: give its --deepspeed PYTHON")
    args.contenders, args.step_contenders = chosen["disk"], chosen["steps"]
    if "fio" not in args.contenders:
        parser.error("--contenders: fio must be among them, ratios are to it")
    if all(name == "fio" for name in args.step_contenders):
        parser.error("--step-contenders: none of them trains")
    args.python = {"fzero": sys.executable, "deepspeed": args.deepspeed}
    if args.smoke:
        args.repeats, args.blocks, args.layers = 2, 2 * RING, min(args.layers, 4)
    return args


def main() -> None:
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("nvme.py: ended by SIGTERM")
    )  # the files are removed all the same
    args = parse()
    hidden = {"--deepspeed": "PYTHON", "--folder": "FOLDER"}  # where somebody keeps things is not part of the result
    given = [hidden.get(before, part) for before, part in zip(["", *sys.argv[1:]], sys.argv[1:])]
    command = shlex.join(["python", "benchmarks/nvme.py", *given])
    sittings = [(disk_section, disk_table, (args,))] if "disk" in args.sections else []
    sittings += (
        [(steps_section, steps_table, (dtype, args)) for dtype in args.dtype.split(",")]
        if "steps" in args.sections
        else []
    )
    runs = []
    for section, table, given_to in sittings:
        load = os.getloadavg()
        run = section(*given_to)
        run |= {
            "notes": {name: NOTES[name] for name in run["versions"]},
            "load_average": {"before": load, "after": os.getloadavg()},
        }
        runs.append(run)
        print("\n".join([table(run), *(f"{name}: {note}" for name, note in run["notes"].items())]) + "\n", flush=True)
        if args.out:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(
                json.dumps({"command": command, "date": now, "machine": machine(), "runs": runs}, indent=1) + "\n"
            )


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"nvme.py: {error}")
