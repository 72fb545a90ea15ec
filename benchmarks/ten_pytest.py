"""A plugin of pytest for ten.py: each failed test is a line `FIGURE {...}` at once, and a line counts those of a file.

A worker in which CUDA is of no use any more ends before its next test, so that xdist starts another one."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from ten_process import die_with_parent, is_sticky

EVERY = 5.0  # seconds between two counts


class Rows:
    """The counts of each file."""

    def __init__(self, config: Any) -> None:
        self.config, self.told, self.spoilt = config, time.monotonic(), False
        self.worker = hasattr(config, "workerinput")
        self.named = any("::" in word for word in config.args)  # tests that failed in an earlier call
        self.files: dict[str, dict[str, Any]] = {}

    def say(self, **row: Any) -> None:
        """A row, on a line of its own."""
        writer = self.config.get_terminal_writer()
        writer.line()
        writer.line("FIGURE " + json.dumps(row))
        writer.flush()

    def counts(self, last: bool) -> None:
        """A row for each file so far."""
        self.told = time.monotonic()
        for file, row in self.files.items():
            failed = {"failed": f"{len(row['failed tests'])} tests"} if row["failed tests"] else {}
            self.say(row=file, **row, **failed, last=last)

    def pytest_runtest_setup(self, item: Any) -> None:
        if self.worker and self.spoilt:
            os._exit(3)

    def pytest_runtest_logreport(self, report: Any) -> None:
        text = getattr(report, "longreprtext", "") if report.failed else ""
        self.spoilt |= is_sticky(text)
        if self.worker:
            return
        row = self.file(report.nodeid.partition("::")[0])
        if report.failed:
            row["failed tests"].append(report.nodeid)
            crash = getattr(report.longrepr, "reprcrash", None)
            self.say(row=report.nodeid, failed=(str(crash.message) if crash else text)[:600])
            self.config.get_terminal_writer().line(text[-4000:])  # pytest itself says it at its end, if it comes to it
        elif report.skipped:
            why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            row["skipped"][why[:120]] = row["skipped"].get(why[:120], 0) + 1
        elif report.when == "call":
            row["passed"] += 1
            if self.named:
                self.say(row=report.nodeid, passed=1)
        if time.monotonic() - self.told > EVERY:
            self.counts(False)

    def file(self, name: str) -> dict[str, Any]:
        """The counts of a file."""
        return self.files.setdefault(name, {"passed": 0, "skipped": {}, "failed tests": []})

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.worker:
            self.say(row=report.nodeid, failed=f"not collected: {str(report.longrepr)[-300:]}")

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        if config.option.collectonly:
            for item in items:
                self.file(item.nodeid.partition("::")[0]).setdefault("collected", 0)
                self.file(item.nodeid.partition("::")[0])["collected"] += 1

    def pytest_sessionfinish(self) -> None:
        if not self.worker:
            self.counts(True)


def pytest_configure(config: Any) -> None:
    if not hasattr(config, "workerinput"):
        die_with_parent()
    config.pluginmanager.register(Rows(config), "ten")
