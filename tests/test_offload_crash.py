"""Runs with everything on a disk that are ended by SIGKILL at any instant: what is left is exactly one of their
steps."""

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fzero.offload import serves_direct

STEPS = 6  # of offload_worker
MEMORY = Path(
    "/dev/shm"
)  # a kill is the same on a disk and on a file system in memory, which is quicker and less noisy


class Worker:
    """The process of offload_worker.py; `worker(name, **options)` is its answer to a request."""

    def __init__(self, folder):
        path = Path(__file__).parent
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(path.parent), *sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        line = [sys.executable, str(path / "offload_worker.py"), folder]
        self.process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.whole = {}

    def __call__(self, request, **options):
        self.process.stdin.write(f"{json.dumps([request, options])}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.communicate(timeout=30)

    def uninterrupted(self, ranks):
        if ranks not in self.whole:
            self.whole[ranks] = self("uninterrupted", ranks=ranks)
            assert self.whole[ranks]["told"][0] == list(range(STEPS + 1))
        return self.whole[ranks]


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    quick = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and serves_direct(MEMORY)
    where = MEMORY if quick else tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory(dir=where) as folder, contextlib.closing(Worker(folder)) as worker:
        yield worker


@pytest.fixture(scope="module")
def disk_worker():
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Worker(folder)) as worker:
        yield worker


def check(worker, answer, ranks=1):
    """The step found, or None where the run had not made its first version; raises AssertionError where anything is not
    a step's."""
    whole, found = worker.uninterrupted(ranks)["steps"], answer["found"]
    steps = [line for line in answer["told"] if isinstance(line, int)]
    if "refused" in found[0]:
        assert steps == [], f"{steps} had been told, and then: {found[0]}"
        assert "make a new state" in found[0]["refused"] and all(one == found[0] for one in found)
        assert answer["anew"] == list(range(STEPS + 1)), f"the folder is of no use: {answer['anew']}"
        return None
    for rank, one in enumerate(found):
        assert "error" not in one, one["error"]
        assert one["step"] == one["record"] == found[0]["step"]
        assert one["step"] in (max(steps, default=0), max(steps, default=-1) + 1)
        assert one["digest"] == whole[rank][one["step"]], f"not the bits of step {one['step']}"
        assert one["last"] == whole[rank][STEPS], (
            f"going on from step {one['step']} does not give the bits of step {STEPS}"
        )
        for step, digest in one["pinned"].items():
            assert digest and digest == {name: whole[rank][int(step)][name] for name in digest}, (
                f"checkpoint {step} is another state"
            )
    assert not [name for name in answer["left"] if name.startswith("scratch/")]
    return found[0]["step"]


def instants(count, seed, first=0):
    """So many random instants: after how many lines of the run, and for how much longer in steps."""
    return [(i % (STEPS + 1 - first) + first, round(2 * random.Random(f"{seed}{i}").random(), 3)) for i in range(count)]


def kill(worker, instant, **options):
    seconds = worker.uninterrupted(options.get("ranks", 1))["seconds"]
    return worker("killed", since=instant[0], after=instant[1] * seconds / (STEPS + 4), **options)


def few(cases, often):
    """The cases, of which those at the indices `often` run every time and the others in the slow tier."""
    return [case if i in often else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(cases)]


@pytest.mark.parametrize("instant", few(instants(5, "one rank"), (4,)))
def test_a_kill_at_any_instant_leaves_a_step(worker, instant):
    answer = kill(worker, instant)
    assert answer["code"] in (-9, 0)
    check(worker, answer)


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_of_one_of_two_ranks_at_ten_instants(worker, victim):
    found = [
        check(worker, kill(worker, instant, ranks=2, victim=victim), ranks=2)
        for instant in instants(10, f"rank {victim}")
    ]
    print(f"steps found after 10 kills of rank {victim}: {found}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_kill_at_fifty_instants(request, place):
    worker = request.getfixturevalue("worker" if place == "memory" else "disk_worker")
    found = [check(worker, kill(worker, instant)) for instant in instants(50, place)]
    print(f"steps found after 50 kills ({place}): {found}")
    assert len(set(found)) > 3, "the kills are not spread over the run"


# How often a point is passed before: making the store writes one text, its first version two; then each step two. A
# text is synced twice.
PLACES = [
    ("a text is durable", 1),
    ("a text is there", 1),
    ("a text is there", 2),
    ("a text is durable", 3),
    ("a write begins", 50),
    ("a write begins", 200),
    ("all is written", 3),
    ("all is durable", 3),
    ("a text is durable", 6),
    ("a text is there", 6),
    ("a text is written", 13),
    ("a text is durable", 7),
    ("a text is there", 7),
    ("a text is written", 14),
]
EXPECTED = {  # of those whose outcome is certain
    ("a text is durable", 1): None,
    ("a text is there", 1): None,
    ("a text is there", 2): None,
    ("a text is durable", 3): None,
    ("all is written", 3): 1,
    ("all is durable", 3): 1,
    ("a text is durable", 6): 1,
    ("a text is there", 6): 1,
    ("a text is written", 13): 1,
    ("a text is durable", 7): 1,
    ("a text is there", 7): 2,
    ("a text is written", 14): 2,
}


@pytest.mark.parametrize("point", few(PLACES, (1, 7, 12)))
def test_a_kill_inside_a_commit_leaves_the_step_before_or_after(worker, point):
    answer = worker("killed", point=point)
    assert answer["code"] == -9
    step = check(worker, answer)
    assert step == EXPECTED.get(point, step)


@pytest.mark.slow
@pytest.mark.parametrize("victim, instant", [*zip((0, 1), instants(2, "two ranks", first=2))])
def test_a_kill_of_one_of_two_ranks_leaves_a_step_of_both(worker, victim, instant):
    check(worker, kill(worker, instant, ranks=2, victim=victim), ranks=2)


@pytest.mark.parametrize(
    "victim, point",
    [
        (0, ("a text is durable", 6)),
        pytest.param(1, ("a text is durable", 4), marks=pytest.mark.slow),
        pytest.param(1, ("all is durable", 4), marks=pytest.mark.slow),
    ],
)
def test_a_kill_of_one_of_two_ranks_inside_a_commit(worker, victim, point):
    answer = worker("killed", ranks=2, victim=victim, point=point)
    assert answer["code"] == -9
    check(worker, answer, ranks=2)


# Steps 2, 4 and 6 are pinned: the texts of a pin are the 8th, the 13th and the 18th.
@pytest.mark.parametrize(
    "point",
    few(
        [
            ("a pin begins", 2),
            ("a text is written", 15),
            ("a text is durable", 8),
            ("a text is there", 13),
            ("a text is durable", 18),
        ],
        (1, 3),
    ),
)
def test_a_kill_around_a_pin_leaves_the_step_and_its_checkpoints(worker, point):
    answer = worker("killed", point=point, pins=True)
    assert answer["code"] == -9
    check(worker, answer)
    pinned = {int(step) for step in answer["found"][0]["pinned"]}
    assert (
        pinned
        == {
            ("a pin begins", 2): {2},
            ("a text is written", 15): set(),
            ("a text is durable", 8): set(),
            ("a text is there", 13): {2, 4},
            ("a text is durable", 18): {2, 4},
        }[point]
    )


@pytest.mark.slow
@pytest.mark.parametrize("instant", instants(2, "pins", first=4))
def test_a_kill_at_any_instant_leaves_the_checkpoints(worker, instant):
    answer = kill(worker, instant, pins=True)
    check(worker, answer)
    told = [line for line in answer["told"] if isinstance(line, str)]
    assert set(answer["found"][0].get("pinned", ())) or not told
