"""How long each test file may take: budgets.json, and the table that is printed at the end of a run.

A budget is in seconds of one of two workers (`-n 2`), for the tests of the default tier and for those marked slow; the
file names the machine on which they were measured. How much slower another machine is shows in the other files of the
session: a file may take MARGIN times its budget on that machine, and SLACK_S more. Beyond that the session fails, if
the environment variable CI is set, as .ci/run does.
"""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
TIERS = ("default", "slow")
MARGIN = 4
SLACK_S = 60  # what a cold cache of compiled code may cost a file, however small its budget


COLLECTED = pytest.StashKey[set]()  # the (file, tier) pairs of this session, with what -m leaves out


def rows_of(items):
    """The (file, tier) pairs that these tests are in; without those that run by hand alone."""
    return {
        (item.path.name, "slow" if item.get_closest_marker("slow") else "default")
        for item in items
        if not item.get_closest_marker("exhaustive")
    }


def read():
    """{file: {tier: seconds}} of budgets.json."""
    return json.loads((FOLDER / "budgets.json").read_text())["seconds"]


class Budgets:
    """A plugin of pytest that adds up the durations of each file's tests and compares the sums with the table."""

    def __init__(self, table, *, fail):
        self.table, self.fail = table, fail
        self.spent = {}  # (file, tier): seconds

    def pytest_runtest_logreport(self, report):
        if "exhaustive" in report.keywords:
            return  # run by hand, as long as it takes
        key = Path(report.location[0]).name, "slow" if "slow" in report.keywords else "default"
        self.spent[key] = self.spent.get(key, 0.0) + report.duration

    def over(self):
        """The (file, tier) pairs that took more than MARGIN times their budgets on this machine and SLACK_S. A file
        without one is not among them."""
        budget = {(file, tier): seconds for file, row in self.table.items() for tier, seconds in row.items()}
        ran = {key: seconds for key, seconds in self.spent.items() if key in budget}

        def slowness(key):
            """What the other files took, over their budgets: 1 on a machine as fast as that of the budgets."""
            others = ran.keys() - {key}
            budgets = sum(budget[other] for other in others)
            return max(1.0, sum(ran[other] for other in others) / budgets) if budgets else 1.0

        return [key for key, seconds in ran.items() if seconds > MARGIN * slowness(key) * budget[key] + SLACK_S]

    def pytest_sessionfinish(self, session):
        if self.fail and self.over() and session.exitstatus == 0:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter):
        over = self.over()
        for tier in TIERS:
            rows = sorted(((s, file) for (file, of), s in self.spent.items() if of == tier), reverse=True)
            if not rows:
                continue
            terminalreporter.section(f"seconds of each file, {tier} tier ({sum(s for s, _ in rows):.0f} in all)")
            width = max(len(file) for _, file in rows)
            for seconds, file in rows:
                budget = self.table.get(file, {}).get(tier)
                line = f"{file:{width}}  {seconds:7.1f}  " + ("no budget" if budget is None else f"of {budget:3d}")
                terminalreporter.write_line(
                    line
                    + f"  more than {MARGIN} times its budget on this machine and {SLACK_S} s" * ((file, tier) in over)
                )
