"""A module through `fzero.from_module` beside the same module under torch.compile and FSDP2, in one sitting.

    python benchmarks/modules.py --out benchmarks/results/modules.json
    python benchmarks/modules.py --config tiny --batch 4 --smoke

The module is `peers/torch_module.py`, a plain Llama: through the adapter with compiled blocks beside torch.compile of
the whole, on one process; and on two ranks at stage 3 beside FSDP2, at its defaults and with the switches that make it
do what ours does. How the figures are taken: see `single.py` and `zero.py`, whose sittings these are.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import single
import zero
from peers import problem
from turns import LOSS_TOLERANCE

ALONE = ["module", "compile"]
RANKS = ["module-3", "fsdp2", "fsdp2+compile+reshard-root"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="small-v256", choices=problem.CONFIGS)
    parser.add_argument("--dtype", default="fp32", choices=LOSS_TOLERANCE)
    parser.add_argument("--batch", type=int, default=4, help="sequences per step, over all ranks; even")
    parser.add_argument("--cores", type=int, default=2, help="threads of one process, and cores that two ranks share")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock, at least 2")
    parser.add_argument("--repeats", type=int, default=9, help="rounds of one step each, at least 9")
    parser.add_argument("--smoke", action="store_true", help="2 rounds: whether everything runs, not how fast it is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    for name, least in (("cores", 1), ("warmup", 2), ("repeats", 9)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: must be at least {least}")
    if args.batch < 2 or args.batch % 2:
        parser.error(f"--batch {args.batch}: must be even")
    args.repeats = 2 if args.smoke else args.repeats
    return args


def main() -> None:
    args = parse()
    alone = argparse.Namespace(**vars(args), threads=args.cores, contenders=",".join(ALONE))
    runs = [single.compare(args.config, args.dtype, alone)]
    print(single.table(runs[-1]) + "\n", flush=True)
    ranks = argparse.Namespace(**vars(args), peer_python={}, skip_absent=False)
    runs.append(zero.compare(args.config, args.dtype, 2, RANKS, {}, ranks))
    print(zero.table(runs[-1]), flush=True)
    if args.out:
        zero.write_runs(args.out, shlex.join(["python", "benchmarks/modules.py", *sys.argv[1:]]), runs)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"modules.py: {error}")
