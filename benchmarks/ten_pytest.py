"""A plugin of pytest for ten.py: each failed test is a line `FIGURE {...}` at once, and a line counts those of a file.

A worker in which CUDA is of no use any more ends before its next test, so that xdist starts another one."""

from __future__ import annotations

import json
import os
import time
from typing import Any

STICKY = ("illegal memory access", "device-side assert", "launch failure", "misaligned address", "CUDA error")
EVERY = 5.0  # seconds between two counts


class Rows:
    """The counts of each file."""

    def __init__(self, config: Any) -> None:
        self.config, self.told, self.spoilt = config, time.monotonic(), False
        self.worker = hasattr(config, "workerinput")
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
        self.spoilt |= any(words in text for words in STICKY)
        if self.worker:
            return
        row = self.file(report.nodeid.partition("::")[0])
        if report.failed:
            row["failed tests"].append(report.nodeid)
            self.say(row=report.nodeid, failed=" | ".join(text.splitlines()[-2:])[-400:])
        elif report.skipped:
            why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            row["skipped"][why[:120]] = row["skipped"].get(why[:120], 0) + 1
        elif report.when == "call":
            row["passed"] += 1
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
    config.pluginmanager.register(Rows(config), "ten")
