"""Every test file has a budget, and a file that takes far more than its own fails the session where CI is set."""

import json
from types import SimpleNamespace

import budgets
import pytest


def report(file, seconds, *marks):
    return SimpleNamespace(location=(f"tests/{file}", 1, "test"), duration=seconds, keywords=dict.fromkeys(marks, 1))


def test_every_file_has_a_budget():
    files = {path.name for path in budgets.FOLDER.glob("test_*.py")}
    table = budgets.read()
    missing, gone = sorted(files - set(table)), sorted(set(table) - files)
    assert not missing, (
        f"without a row in tests/budgets.json: {missing}; run the file, read the seconds at the end of the "
        "run, add them"
    )
    assert not gone, f"budgets.json has rows of files that are not there: {gone}"
    for file, row in table.items():
        assert row and set(row) <= set(budgets.TIERS), file
        assert all(isinstance(seconds, int) and seconds >= 1 for seconds in row.values()), file


def test_every_tier_of_a_file_has_a_budget_and_no_other(request):
    collected, table = request.config.stash[budgets.COLLECTED], budgets.read()
    if {file for file, _ in collected} != set(table):
        pytest.skip("not all test files are collected")
    rows = {(file, tier) for file, row in table.items() for tier in row}
    assert not collected - rows, f"without seconds in tests/budgets.json: {sorted(collected - rows)}"
    assert not rows - collected, f"budgets.json has seconds of tests that are not there: {sorted(rows - collected)}"


def test_the_tiers_fit_into_their_minutes():
    for tier, minutes in (("default", 8), ("slow", 20)):
        assert sum(row.get(tier, 0) for row in budgets.read().values()) / 2 <= 60 * minutes  # of two workers


LATER = ["on", "this", "machine", "and", "60", "s"]


@pytest.mark.parametrize("ci", [True, False])
def test_a_file_far_over_its_budget_fails_the_session_where_ci_is_set(ci):
    plugin = budgets.Budgets({"test_a.py": {"default": 5, "slow": 10}, "test_b.py": {"default": 5}}, fail=ci)
    session = SimpleNamespace(exitstatus=0)
    for each in (
        report("test_a.py", 79.0),
        report("test_a.py", 9.0, "slow"),
        report("test_b.py", 500.0, "exhaustive"),
    ):
        plugin.pytest_runtest_logreport(each)
    plugin.pytest_sessionfinish(session)
    assert session.exitstatus == 0 and plugin.over() == []
    plugin.pytest_runtest_logreport(report("test_a.py", 2.0))
    plugin.pytest_sessionfinish(session)
    assert session.exitstatus == ci and plugin.over() == [("test_a.py", "default")]
    printed = []
    plugin.pytest_terminal_summary(SimpleNamespace(section=printed.append, write_line=printed.append))
    assert [line.split() for line in printed[1::2]] == [
        ["test_a.py", "81.0", "of", "5", "more", "than", "4", "times", "its", "budget", *LATER],
        ["test_a.py", "9.0", "of", "10"],
    ]
    session.exitstatus = 2  # interrupted: stays as it is
    plugin.pytest_sessionfinish(session)
    assert session.exitstatus == 2


def test_a_slow_machine_has_more_time():
    plugin = budgets.Budgets({f"test_{name}.py": {"slow": 100} for name in "abc"}, fail=True)
    for name, seconds in {"a": 600, "b": 150, "c": 250}.items():  # the others took twice their budgets
        plugin.pytest_runtest_logreport(report(f"test_{name}.py", seconds, "slow"))
    assert plugin.over() == []
    plugin.pytest_runtest_logreport(report("test_a.py", 261.0, "slow"))  # 861 > 4 * 2 * 100 + 60
    assert plugin.over() == [("test_a.py", "slow")]


def test_the_file_names_its_machine():
    assert len(json.loads((budgets.FOLDER / "budgets.json").read_text())["machine"]) > 20
