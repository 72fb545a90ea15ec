"""Thousands of damaged files in front of every reader of foreign files (tests/foreign_cases.py): each is read, or is
one ValueError or OSError; none hangs, takes a gigabyte, or leads to a file outside of its folder."""

import contextlib
import copy
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import pytest

MUTATIONS, SECONDS, CASE_S, MEMORY = 2500, 60.0, 10, 1 << 30  # of a run with one seed
# Names that lead out of a folder, of files that are there and sound.
OUTSIDE = ("../../outside.safetensors", "../../../../outside", "../../../../../../../../etc/passwd", "/etc/hostname")
VALUES = (
    None, True, False, 0, -1, 1, 2, 2**31, 2**32 + 1, 2**62, 2**63, 2**64, -(2**64), 10**9, 10**30, 0.5, -0.0, 1e308,
    1e-308, float("nan"), float("inf"), "", "x", "0", "..", "../../outside", "/q/fzero-out", "a/b", "\ud800", "\0",
    *OUTSIDE, "x" * 5000, "aten", "float32", "save", "int4", "window:0", "é", [], {}, [1], [0, 0], [-1, 5], ["x"],
    [[]], {"a": 1}, [None],
)  # fmt: skip
DEEP = 100_000


def spots(value, where=()):
    """The paths of all values in nested tables and lists."""
    yield where
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from spots(each, (*where, key))


def change(value, rng):
    """A copy of a JSON value with one thing changed, and its text."""
    value = copy.deepcopy(value)
    where = rng.choice(list(spots(value)))
    new, how = copy.deepcopy(rng.choice(VALUES)), rng.random()
    if not where:
        return json.dumps(new) if how < 0.5 else json.dumps(value)[: rng.randrange(200)]
    held = value
    for key in where[:-1]:
        held = held[key]
    last = where[-1]
    if how < 0.6:
        held[last] = new
    elif how < 0.7:
        del held[last]
    elif how < 0.75 and isinstance(held, dict):
        held[str(new)[:100]] = held.pop(last)
    elif how < 0.8 and isinstance(held, dict):
        held[str(rng.choice(VALUES))[:100]] = new
    elif how < 0.85 and isinstance(held[last], int | float):
        held[last] = rng.choice((-1, 2, 1000, 10**6, 10**12)) * held[last] + rng.choice((0, 1))
    elif how < 0.9 and isinstance(held[last], list):
        held[last] = held[last] * 3 + [new]
    else:
        held[last] = "@@"
        deep = rng.choice(("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * DEEP, "9" * 5000, "1e999"))
        return json.dumps(value).replace('"@@"', deep)
    return json.dumps(value)


def change_toml(text, rng):
    """TOML with one value, line or header changed."""
    lines = text.splitlines()
    i = rng.randrange(len(lines))
    new = rng.choice(VALUES)
    word = (
        json.dumps(new)
        if not isinstance(new, dict | None.__class__)
        else rng.choice(("{a = 1}", "2026-01-01", "[" * DEEP))
    )
    how = rng.random()
    if how < 0.6 and "=" in lines[i]:
        lines[i] = f"{lines[i].partition('=')[0]}= {word}"
    elif how < 0.7:
        lines.insert(i, rng.choice(lines))
    elif how < 0.8:
        lines[i] = re.sub(
            r"\w+", lambda m: m[0] if rng.random() < 0.5 else "a." * rng.choice((1, DEEP)) + "b", lines[i], count=1
        )
    else:
        lines.insert(i, rng.choice(("[a]", "[[model]]", "[model.rope_scaling]", "x = 1", 'model = "x"', "[" * DEEP)))
    return "\n".join(lines)


def change_bytes(data, rng):
    """Bytes with a few flipped, cut, repeated, or put in."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 4))):
        i = rng.randrange(len(data) + 1)
        how = rng.randrange(5)
        if how == 0 and i < len(data):
            data[i] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[i : i + rng.choice((1, 8, 10**6))]
        elif how == 2:
            data[i:i] = data[i : i + rng.choice((1, 50))] * rng.choice((1, 100))
        elif how == 3:
            data[i:i] = rng.choice((b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"1e999", b"-", b"\x1b[2J", b"\r"))
        elif i < len(data):
            data[i] = rng.choice(b'0"{}[]\\\n:,\xff')
    return bytes(data)


def mutate(path, rng):
    """Replace the file by a damaged copy; its checksum, if it has one, is made to agree where that is possible."""
    data = path.read_bytes()
    if rng.random() < 0.2 or path.suffix in (".gz", ".docs", ".txt"):
        new = change_bytes(data, rng)
    elif path.suffix == ".toml":
        new = change_toml(data.decode(), rng).encode("utf-8", "surrogatepass")
    elif path.suffix == ".safetensors":
        length = int.from_bytes(data[:8], "little")
        header = change(json.loads(data[8 : 8 + length]), rng).encode()
        new = len(header).to_bytes(8, "little") + header + data[8 + length :]
    elif path.suffix == ".jsonl":
        lines = data.decode().splitlines()
        i = rng.randrange(len(lines))
        lines[i] = change(json.loads(lines[i]), rng)
        new = "\n".join(lines).encode() + b"\n" * rng.randrange(2)
    else:
        new = change(json.loads(data), rng).encode()
    path.write_bytes(new)


class Opened:
    """The files that Python opens, makes, moves or removes, while it is on, outside of `folder`."""

    LOOKED_AT = (
        "/proc/",
        "/sys/",
        "/dev/",
        "/etc/",
        "/usr/",
        sys.prefix,
        sys.base_prefix,
        str(Path(__file__).parents[1]),
    )

    def __init__(self):
        self.folder, self.outside = None, []
        sys.addaudithook(self.hook)

    def hook(self, event, args):
        if self.folder is None or event not in (
            "open",
            "os.remove",
            "os.rename",
            "os.mkdir",
            "os.rmdir",
            "os.link",
            "os.symlink",
        ):
            return
        for name in args[:2] if event in ("os.rename", "os.link", "os.symlink") else args[:1]:
            if isinstance(name, str | bytes):
                path = os.path.realpath(os.fsdecode(name))
                reads = event == "open" and isinstance(args[2], int) and not args[2] & (os.O_WRONLY | os.O_RDWR)
                if (
                    not path.startswith(self.folder)
                    and not (reads and path.startswith(self.LOOKED_AT))
                    and path != os.devnull
                ):
                    self.outside.append(f"{event} {path}")


def lay_bait(base):
    """Put files where names with .. lead, beside the readers' folders: a reader that follows such a name opens them."""
    for name, bait in (
        ("hf-shards/model/model-00001-of-*", "outside.safetensors"),
        ("checkpoint/c/*/arrays/w", "outside"),
    ):
        for path in base.glob(name):
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, base / bait)


def fuzz(count, seconds, seed, only=""):
    """Run mutations in this process; return (number of them, number that were refused, the failures)."""
    import foreign_cases

    warnings.simplefilter("ignore")
    rng, opened, failures = random.Random(seed), Opened(), []
    base = Path(os.path.realpath(tempfile.mkdtemp(prefix="fzero-fuzz-")))
    readers = {name: reader for name, reader in foreign_cases.READERS.items() if only in name}
    for name, reader in readers.items():
        (base / name).mkdir()
        reader.make(base / name)
        for file in reader.files:
            reader.sign(base / name / file)
        reader.read(base / name)  # what it imports is imported before files are counted
    lay_bait(base)
    sound = {(n, f): (base / n / f).read_bytes() for n, r in readers.items() for f in r.files}
    targets = [key for key in sound for _ in range(1 if key[0] in ("run", "report") else 3)]
    made = refused = 0
    end = time.monotonic() + seconds

    def alarm(number, frame):
        raise TimeoutError("hangs")

    signal.signal(signal.SIGALRM, alarm)
    while made < count and time.monotonic() < end:
        name, file = rng.choice(targets)
        path, reader = base / name / file, readers[name]
        made += 1
        mutate(path, rng)
        if rng.random() < 0.7:
            with contextlib.suppress(Exception):
                reader.sign(path)
        damaged = path.read_bytes()
        before, opened.folder = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, str(base / name)
        signal.alarm(CASE_S)
        problem = ""
        try:
            reader.read(base / name)
        except (TimeoutError, MemoryError) as error:
            problem = repr(error)
        except (ValueError, OSError) as error:
            refused += 1
            problem = "an error without a text" if not str(error) else ""
        except BaseException:
            problem = traceback.format_exc(limit=-4)
        finally:
            signal.alarm(0)
            opened.folder = None
        if opened.outside:
            problem += f"outside: {opened.outside[:3]}"
            opened.outside.clear()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if grown > 300_000:
            problem += f"took {grown / 1e6:.1f} GB"
        if problem:
            failures.append([f"{name} {file}", problem, repr(damaged[:300])])
        path.write_bytes(sound[name, file])
    shutil.rmtree(base, ignore_errors=True)
    return made, refused, failures


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.exhaustive if seed else pytest.mark.slow) for seed in range(4)]
)
def test_no_damaged_file_leads_to_a_traceback_a_hang_or_another_file(seed):
    code = f"import json, test_fuzz; print(json.dumps(test_fuzz.fuzz({MUTATIONS}, {SECONDS}, {seed})))"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
    # Its own peak: ru_maxrss begins at that of the process that started it.
    peak = "; print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
    done = subprocess.run(
        [sys.executable, "-c", limit + code + peak],
        cwd=Path(__file__).parent, capture_output=True, text=True, timeout=3 * SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    *_, found, peak = done.stdout.splitlines()
    made, refused, failures = json.loads(found)
    assert not failures, "\n\n".join("\n".join(one) for one in failures[:5])
    assert made >= MUTATIONS / 2 and refused > made / 3, (made, refused)
    assert int(peak) * 1024 < MEMORY, peak
