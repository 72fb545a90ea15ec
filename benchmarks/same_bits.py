"""Whether a change moved any number: some 60 small runs at a commit and in this working tree, compared bit by bit.

    python benchmarks/same_bits.py 91b3968 --base-cache base.json

Each case makes 20 steps (see same_bits_cases.py). Compared are the losses, the gradients' norms, and the SHA-256 of
every whole leaf of the parameters and of the optimizer state. Some cases are `fzero pretrain` itself, resume included.
It prints a line for each case: equal, or what differs; the exit code is 1 where anything does. The names and signatures
of fzero that these runs use are in same_bits_names.py, and older names of flags in same_bits_cases.py.

Both sides must run on one machine: other cores and libraries have other bits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from same_bits_cases import CASES, COMMANDS

HERE = Path(__file__).resolve().parent
TODAY = HERE.parent
COMPARED = ("losses", "norms", "params", "opt")
Results = dict[str, dict[str, Any]]  # by case


def git(*args: str) -> str:
    """What a git command in this repository prints."""
    return subprocess.run(["git", "-C", str(TODAY), *args], check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit, until the context ends."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "base")
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def run_side(tree: Path, names: list[str], say: str) -> Results:
    """The results of some cases with the fzero of `tree`."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": scratch,
        }
        # Compiled code is the same for the same graph, so both sides may share what was compiled.
        environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment.setdefault(
            "TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"fzero-same-bits-{os.getuid()}"))
        )
        command = [sys.executable, str(HERE / "same_bits_ranks.py"), str(tree), *names]
        results: Results = {}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                result = json.loads(line)
                results[result.pop("case")] = result
                if sys.stderr.isatty():
                    print(f"\r{say}: {len(results)} of {len(names)}", end="", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            print(file=sys.stderr)
        if process.returncode:
            raise SystemExit(f"{say}: the process of the ranks ended with exit code {process.returncode}")
    return results


def machine() -> str:
    """The parts of this machine that bits depend on."""
    model = platform.processor()
    with contextlib.suppress(OSError):
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    return f"torch {torch.__version__} {model}"


def definition(name: str) -> str:
    """What a case is, as text."""
    return repr(CASES.get(name) or COMMANDS[name])


def base_results(base: str, names: list[str], cache: Path | None) -> Results:
    """The results at a commit, of the cache where it has them."""
    commit = git("rev-parse", f"{base}^{{commit}}")
    held = json.loads(cache.read_text()) if cache is not None and cache.exists() else {}
    key = f"{commit} {machine()}"
    # A case that was changed is another case.
    known: Results = {name: r for name, r in held.get(key, {}).items() if name in names and r["is"] == definition(name)}
    missing = [name for name in names if name not in known]
    if missing:
        with checked_out(commit) as tree:
            new = run_side(tree, missing, "base")
        known |= {name: {**result, "is": definition(name)} for name, result in new.items()}
        if cache is not None:
            good = {name: result for name, result in known.items() if "error" not in result}
            cache.write_text(json.dumps({**held, key: {**held.get(key, {}), **good}}))
    return known


def differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, str]:
    """{what differs: where first} between two results of a case."""
    out = {}
    for side, result in (("base", a), ("today", b)):
        if "error" in result:
            out[f"error ({side})"] = result["error"].strip()
    if out:
        return out
    for what in COMPARED:
        x, y = a[what], b[what]
        if x == y:
            continue
        if isinstance(x, dict):
            lost, more = sorted(x.keys() - y.keys()), sorted(y.keys() - x.keys())
            other = [name for name in x if name in y and x[name] != y[name]]
            parts = [
                f"{len(names)} {word}: {', '.join(names[:3])}"
                for names, word in ((other, "differ"), (lost, "lost"), (more, "new"))
                if names
            ]
            out[what] = "; ".join(parts)
        else:
            at = next((i for i, (p, q) in enumerate(zip(x, y)) if p != q), min(len(x), len(y)))
            out[what] = f"from entry {at}: {x[at : at + 1]} and now {y[at : at + 1]}"
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--cases", default="", metavar="REGEX", help="only the cases whose name it matches")
    parser.add_argument("--base-cache", type=Path, metavar="FILE", help="JSON that keeps the results of BASE")
    parser.add_argument(
        "--allow-norms", action="store_true", help="norms of gradients may differ: they are reported only"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON of both sides")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    args = parser.parse_args()
    names = [name for name in (*CASES, *COMMANDS) if re.search(args.cases, name)]
    if not names:
        parser.error(f"no case matches {args.cases!r}; they are: {', '.join((*CASES, *COMMANDS))}")
    if args.list:
        print("\n".join(names))
        return

    began = time.monotonic()
    base = base_results(args.base, names, args.base_cache)
    between = time.monotonic()
    today = run_side(TODAY, names, "today")
    seconds = {"base": round(between - began, 1), "today": round(time.monotonic() - between, 1)}
    if args.out is not None:
        args.out.write_text(
            json.dumps({"machine": machine(), "seconds": seconds, "base": base, "today": today}, indent=1)
        )

    failed, moved_norms = 0, 0
    for name in names:
        found = differing(base[name], today[name])
        allowed = args.allow_norms and list(found) == ["norms"]
        failed += bool(found) and not allowed
        moved_norms += allowed
        print(f"{name:32}  {'equal' if not found else ', '.join(found) + ' differ'}")
        for what, where in found.items():
            print("\n".join(f"    {line}" for line in f"{what}: {where}".splitlines()[-6:]))
    print(
        f"{len(names)} cases, {failed} differ"
        + f", {moved_norms} in norms alone" * bool(moved_norms)
        + f"; seconds: {seconds}"
    )
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
