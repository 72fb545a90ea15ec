"""Ten minutes on one GPU, in one command:

    python benchmarks/ten.py --seconds 510 --out OUT

It goes through PARTS in their order, each in a group of processes of its own, under one deadline. Every figure is a
line of OUT/results.jsonl as soon as it is measured; OUT/report.md, the goals beside the figures, is written again after
each part. What hangs, crashes or runs out of memory costs its own row: the part goes on behind it in a new process. A
part that does not fit into what is left is skipped. Folders of runs and caches are elsewhere, and go at the end.

A second call, `--before OUT/results.jsonl --failed --out OTHER`, does what has failed again, one kernel at a time
(CUDA_LAUNCH_BLOCKING=1), and then what was skipped. `--device cpu --tiny` runs the same program on sizes that mean
nothing, to find its mistakes where there is no GPU. `--plans benchmarks/ten_plans.json` makes, without one, the plans
that the figures stand beside."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

import ten_report

ROOT = Path(__file__).resolve().parent.parent
CACHES = ROOT / ".ten"  # of compilers, which a second call on the same machine finds; git ignores it
ROW_BYTES = 1 << 20  # of a line of OUT/results.jsonl at most
LOG_BYTES = 12 << 20  # of OUT/log.txt at most; what a part says behind that is dropped
NOT_OURS = "CI", "TRITON_INTERPRET"  # variables of those who test: budgets of files, kernels without a GPU
AGAIN = 75  # the exit code of a process that cannot go on with the rows behind a failed one


class Part(NamedTuple):
    """A part of the sitting. `rows`: "module:function" that yields (row, what measures it); or test files."""

    name: str
    need: float  # seconds: it is skipped where fewer are left
    limit: float  # seconds, after which it is ended
    rows: str | tuple[str, ...]
    beside: bool = False  # it runs together with its neighbours that do; no times are measured in it
    row_limit: float = 60.0  # seconds of one row, after which the part goes on with the next
    environ: dict[str, str] = {}  # noqa: RUF012  (never mutated)
    whole: bool = False  # its rows build on each other: a second call does all of them again
    blocking: bool = False  # in a second call: one kernel at a time, so that an error names its line


LAWS = {"norm": 2, "rope": 1, "glu": 1, "cross_entropy_kernels": 1, "flash": 3, "optim_kernels": 1, "optim_lowbit": 1,
        "float8": 1, "moe_kernels": 1,
        "paged_attention_triton": 1}  # fmt: skip  # files of tests, and the processes that share one
GPU_TESTS = ("attention_library", "communicator", "digest", "moe_kernels", "offload_disk", "plan_target", "quantize")
COMPILED = ("124m fzero", "124m nn.Module", "1b fzero", "1b nn.Module")
FEW_COMPILERS = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}  # a process, of which several are beside each other
SANITIZER = {"TORCH_CUDA_SANITIZER": "1"}
PARTS = (
    Part("machine", 5, 45, "ten_machine:rows"),
    Part("doctor", 10, 60, "ten_machine:doctor_rows", beside=True),
    Part("steps", 30, 105, "ten_steps:rows", beside=True, row_limit=100),
    Part("ops", 30, 105, "ten_ops:rows", beside=True),
    *(
        Part(f"compile {one}", 30, 105, "ten_models:compile_rows", beside=True, row_limit=105, environ=FEW_COMPILERS)
        for one in COMPILED
    ),
    *(Part(f"laws {one}", 20, 105, (f"-n{n}", f"tests/test_{one}.py"), beside=True) for one, n in LAWS.items()),
    Part("marked", 20, 105, ("-n2", "-mgpu", *(f"tests/test_{one}.py" for one in GPU_TESTS)), beside=True),
    Part("124m", 40, 90, "ten_models:gpt2_rows", row_limit=75),
    Part("1b", 50, 120, "ten_models:llama_rows", row_limit=80),
    Part("profile", 25, 50, "ten_models:profile_rows"),
    Part("attention", 15, 40, "ten_ops:attention_rows", row_limit=15),
    Part("pages", 15, 45, "ten_pages:rows", row_limit=20),
    Part("offload", 35, 90, "ten_models:offload_rows", row_limit=30),
    Part("pretrain", 60, 110, "ten_command:rows", row_limit=90, whole=True),
    Part("capture", 20, 45, "ten_models:capture_rows", row_limit=25),
    Part("sanitizer", 10, 40, "ten_steps:sanitizer_rows", beside=True, environ=SANITIZER),
    Part("memcheck", 10, 40, "ten_machine:memcheck_rows", beside=True),
)


class Options(NamedTuple):
    """What all parts are told."""

    device: str
    tiny: bool
    out: Path
    folder: Path  # of this sitting: runs and caches


class Record:
    """OUT's files: figures as lines that are on the disk when `add` returns, and what the parts have said."""

    def __init__(self, out: Path, before: Sequence[dict[str, Any]] = ()) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.begun, self.lock = out, time.monotonic(), threading.RLock()
        self.lines = (out / "results.jsonl").open("a")
        self.log = (out / "log.txt").open("ab", buffering=0)
        self.before, self.found = [*before], [*before]

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self.lines.close()
        self.log.close()

    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begun

    def add(self, part: str, **row: Any) -> None:
        """Enter a row, and echo its beginning."""
        with self.lock:
            row = {**row, "part": part, "t": round(self.now(), 1)}
            line = json.dumps(row)
            if len(line) > ROW_BYTES:
                row = {"part": part, "row": str(row.get("row"))[:200], "failed": f"a row of {len(line):,} bytes"}
                line = json.dumps(row)
            self.found.append(row)
            try:
                self.lines.write(line + "\n")
                self.lines.flush()
                os.fsync(self.lines.fileno())
            except OSError as error:  # a full disk: the echo is what is left
                print(f"results.jsonl: {error}", flush=True)
            print(line if len(line) < 320 else line[:317] + "...", flush=True)

    def say(self, part: str, line: bytes) -> None:
        """Enter a line of a part's output."""
        with self.lock, contextlib.suppress(OSError):
            if self.log.tell() < LOG_BYTES:
                self.log.write(f"[{part}] ".encode() + line[:4000].rstrip(b"\n") + b"\n")

    def report(self) -> None:
        """Write the report anew: whole or as it was. A mistake in it ends nothing: the rows are there."""
        partial = self.out / "report.partial"
        try:
            partial.write_text(ten_report.report(self.found))
            partial.replace(self.out / "report.md")
        except Exception:
            self.say("report", traceback.format_exc().encode())


class Running:
    """A part under way: its process, and the row that it is at."""

    def __init__(self, part: Part, options: Options, record: Record, ends: float) -> None:
        self.part, self.options, self.record, self.ends = part, options, record, ends
        self.begun, self.rows, self.failed, self.last = record.now(), set[str](), set[str](), ""
        self.before = good_rows(part, record)  # of an earlier call: no later figure takes their place
        self.start()

    def start(self) -> None:
        """Start the process for the rows that there are not yet."""
        self.at, self.at_since, self.rows_at_start = "", self.record.now(), len(self.rows)
        self.sofar: dict[str, Any] = {}  # what the row that is under way has said
        self.process = subprocess.Popen(
            command_of(self.part, self.options, self.record, self.rows, self.failed),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
            env=environment(self.part, self.options),
        )
        self.reader = threading.Thread(target=self.read, args=(self.process,), daemon=True)
        self.reader.start()

    def read(self, process: subprocess.Popen[bytes]) -> None:
        """Enter what the process says; a figure may stand behind other text of its line."""
        assert process.stdout is not None
        for line in iter(process.stdout.readline, b""):
            before, figure, text = line.partition(b"FIGURE ")
            try:
                row = json.loads(text) if figure else None
            except (ValueError, RecursionError):
                row = None
            self.last = line.decode(errors="replace").strip()[-200:] or self.last
            if row is None or before.strip():
                self.record.say(self.part.name, before if row else line)
            if isinstance(row, dict) and isinstance(row.get("row", row.get("starts")), str):
                try:
                    self.enter(row)
                except Exception as error:  # a row that nobody expects; the next ones are read
                    self.record.say(self.part.name, f"{error!r} of {line[:300]!r}".encode())
        process.stdout.close()

    def enter(self, row: dict[str, Any]) -> None:
        """Enter a figure, or note which row is under way."""
        self.at_since = self.record.now()
        self.at = row.get("starts", "" if row.get("last", True) else self.at)
        if "starts" in row:
            self.sofar = {}
            return
        if row["row"] in self.before:
            return
        if self.part.blocking:
            row["blocking"] = True  # its times are no figures
        if row.pop("last", True):
            self.rows.add(row["row"])
        elif row["row"] == self.at:
            self.sofar = row
        (self.failed.add if {"failed", "cut"} & {*row} else self.failed.discard)(row["row"])
        self.record.add(self.part.name, **row)

    def kill(self) -> int | str:
        """End the process and what it has started; returns its exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            code = "not ended by SIGKILL"
        self.reader.join(2)
        return code

    def over(self) -> bool:
        """Whether the part has ended; one whose process cannot go on with its next row goes on in a new one."""
        now = self.record.now()
        late, stuck = now > self.ends, self.at and now - self.at_since > self.part.row_limit
        if self.process.poll() is None and not late and not stuck:
            return False
        ended = self.process.poll() is not None
        code, at = self.kill(), self.at
        if at:
            why = f"its process ended with code {code}" if ended else f"not done in {now - self.at_since:.0f} s"
            self.enter(self.sofar | {"row": at, "cut" if self.sofar else "failed": why})
        between = bool(code) and len(self.rows) > self.rows_at_start  # it ended behind a row, and before the next
        if (at or code == AGAIN or between) and not late and isinstance(code, int):
            self.start()
            return False
        failed = f"failed: {', '.join(sorted(self.failed)[:9])}" if self.failed else ""
        wrong = f"exit code {code}: {self.last}" if ended and code else ""
        end = f"ran past its limit{f', in {at}' if at else ''}" if late and not ended else failed or wrong or "ok"
        self.record.add(self.part.name, end=end, s=round(self.record.now() - self.begun, 1))
        return True


def command_of(part: Part, options: Options, record: Record, rows: set[str], failed: set[str]) -> list[str]:
    """The command line of a part, without these rows (some of which failed) and those that an earlier call has."""
    before = [row for row in record.found if row["part"] == part.name and "row" in row]
    if isinstance(part.rows, str):
        done = rows | good_rows(part, record)
        words = ["--rows", part.rows, "--name", part.name, "--device", options.device, *["--tiny"] * options.tiny]
        words += ["--out", str(options.out), "--folder", str(options.folder), "--done", json.dumps(sorted(done))]
        words += ["--failed", json.dumps(sorted(failed))]
        return [sys.executable, str(ROOT / "benchmarks/ten_rows.py"), *words]
    named = [row["row"] for row in ten_report.latest(before).values() if "failed" in row and "::" in row["row"]]
    words = [*part.rows, "--max-worker-restart=1000"]
    if 0 < len(named) <= 50:
        words = [word for word in words if not word.endswith(".py")] + named
    words += [f"--timeout={part.row_limit:g}", "--timeout-method=thread"] if util.find_spec("pytest_timeout") else []
    words += ["--collect-only"] if options.tiny and "marked" not in part.name and "rope" not in part.name else []
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "ten_pytest", *words]


def good_rows(part: Part, record: Record) -> set[str]:
    """The rows of a part that an earlier call has."""
    if part.whole:
        return set()
    before = [row for row in record.before if row["part"] == part.name]
    return {row["row"] for row in ten_report.latest(before).values() if not {"failed", "cut"} & {*row}}


def environment(part: Part, options: Options) -> dict[str, str]:
    """The variables of a part: all parts of a sitting on a GPU share its caches."""
    on_gpu = options.device == "cuda"
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR") if on_gpu else ()
    caches = {name: str(CACHES / name) for name in names}
    paths = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"XDG_CACHE_HOME": str(options.folder / "cache"), "XDG_CONFIG_HOME": str(options.folder / "config")}
    more |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "FZERO_WARM_UP": "0"}
    more |= {"CUDA_LAUNCH_BLOCKING": "1"} if part.blocking else {}
    return (
        {name: value for name, value in os.environ.items() if name not in NOT_OURS}
        | caches
        | more
        | (part.environ if on_gpu else {})
    )


def run_parts(parts: Sequence[Part], options: Options, record: Record, seconds: float) -> None:
    """All parts within so many seconds; whatever happens, nothing that they have started is left behind."""
    running: list[Running] = []

    def wait(everything: bool) -> None:
        while running:
            for one in [one for one in running if one.over()]:
                running.remove(one)
                record.report()
            if not everything:
                return
            time.sleep(0.05)

    try:
        for part in parts:
            if not part.beside:
                wait(True)
            left = seconds - record.now()
            if left < part.need:
                record.add(part.name, end=f"skipped: {max(0.0, left):.0f} s are left, and it takes {part.need:g}")
                continue
            running.append(Running(part, options, record, record.now() + min(part.limit, left)))
            wait(not part.beside)
        wait(True)
    finally:
        for one in running:
            one.kill()
        record.report()


def second_call(parts: Sequence[Part], before: Sequence[dict[str, Any]], failed: bool) -> list[Part]:
    """What an earlier call has not: what failed there first, one kernel at a time if `failed`; then what was
    skipped."""
    ends = {row["part"]: row["end"] for row in before if "end" in row}
    skipped = [part for part in parts if ends.get(part.name, "skipped").startswith("skipped")]
    wrong = [part for part in parts if part not in skipped and ends[part.name] != "ok"]
    wrong = [part._replace(need=min(part.need, 15.0), blocking=failed) for part in wrong]
    return [*wrong, *skipped]


def facts(commit: str) -> dict[str, Any]:
    """What this sitting is of: card, driver, versions, commit, date."""

    def said(*words: str) -> str:
        try:
            return subprocess.run(
                words, capture_output=True, text=True, timeout=20, cwd=ROOT, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return ""

    asked = said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    card, _, driver = asked.partition("\n")[0].partition(", ")
    commit = commit or said("git", "rev-parse", "HEAD") or "unknown"
    found = {"card": card or "none", "driver": driver, "commit": commit, "python": platform.python_version()}
    found |= {name: version(name) for name in ("torch", "triton", "numpy")}
    return found | {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"), "cores": os.cpu_count()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=510, help="the deadline of everything")
    parser.add_argument("--out", type=Path, help="folder of the results, at most 8 files")
    parser.add_argument("--before", type=Path, help="results.jsonl of an earlier call: only what it has not")
    parser.add_argument("--failed", action="store_true", help="with --before: failed rows with CUDA_LAUNCH_BLOCKING=1")
    parser.add_argument("--only", default="", help="names of parts, by commas; all of `laws` and of `compile` by that")
    parser.add_argument("--commit", default=os.environ.get("TEN_COMMIT", ""), help="where the copy has no history")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes that mean nothing")
    parser.add_argument("--plans", type=Path, help="write the plans into this file, and end")
    args = parser.parse_args()
    if args.out is None and args.plans is None:
        parser.error("give --out FOLDER, or --plans FILE")
    if args.failed and args.before is None:
        parser.error("--failed is of an earlier call: give its --before OUT/results.jsonl too")
    if args.before is not None and not args.before.is_file():
        parser.error(f"--before {args.before}: there is no such file")
    names = {name for part in PARTS for name in (part.name, part.name.split()[0])}
    if unknown := {*filter(None, args.only.split(","))} - names:
        parser.error(f"--only {', '.join(sorted(unknown))}: there is no such part; {', '.join(sorted(names))}")
    return args


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier call; a line that was cut is left out, with a word."""
    found = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and "part" in row:
            found.append(row)
        else:
            print(f"{path}: line {number} is no row, and is left out", flush=True)
    return found


def main() -> int:
    args = parse()
    if args.plans:
        import ten_models

        ten_models.write_plans(args.plans, facts(args.commit)["commit"])
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    wanted = [*filter(None, args.only.split(","))]
    parts = [part for part in PARTS if not wanted or {part.name, part.name.split()[0]} & {*wanted}]
    if args.tiny:  # of a machine that may be slow, on which time is no matter
        parts = [part._replace(limit=4 * part.limit, row_limit=4 * part.row_limit) for part in parts]
    before = rows_of(args.before) if args.before else []
    parts = second_call(parts, before, args.failed) if args.before else parts
    scratch = tempfile.TemporaryDirectory(prefix="ten-", ignore_cleanup_errors=True)
    with Record(args.out, before) as record, scratch as folder:
        options = Options(args.device, args.tiny, args.out.resolve(), Path(folder))
        record.add("sitting", row="begin", **facts(args.commit), device=args.device, tiny=args.tiny)
        run_parts(parts, options, record, args.seconds)
        print(ten_report.summary(record.found[len(before) :]), flush=True)
        print(f"{record.now():.0f} s of {args.seconds:g}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
