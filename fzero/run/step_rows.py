"""The rows of a run's steps: each is written, and judged, when its numbers are in the host's memory.

On a CPU that is at the end of the step. On a GPU the host gives the device the next step first and reads the row of the
one before while that one runs, so that the device never waits for the host. Whatever follows from a row (a rollback, a
stop, the log of a retried batch) then follows one step later, and the update of that step is dropped with its state. A
step whose state is kept, measured or evaluated is read at once, and so is every step of a run with a disk, as a commit
to it cannot be dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fzero.core.gpu import HOST
from fzero.run.attempt import Attempt
from fzero.run.config import RunConfig
from fzero.run.measure.metrics_rows import Meter, StepMeasurement
from fzero.run.measure.timer import ClockSpan
from fzero.run.resume import rollback


class Due(NamedTuple):
    """The work that follows a step beside its row."""

    evaluate: bool
    digest: bool
    measure: bool
    check: bool
    save: bool


def due_after(config: RunConfig, step: int) -> Due:
    """The work that is due after step `step`.

    >>> due_after(RunConfig(), 20)
    Due(evaluate=False, digest=False, measure=True, check=False, save=False)
    """
    t, check_every = config.train, config.guard.check_every

    def every(interval: int) -> bool:
        return interval > 0 and step % interval == 0

    save = every(t.checkpoint_every)
    return Due(
        evaluate=step == t.steps or every(t.eval_every),
        digest=every(t.digest_every),
        measure=every(t.measure_every),
        check=check_every > 0 and (save or every(check_every)),
        save=save,
    )


class PendingRow(NamedTuple):
    """A step whose row is not written yet."""

    measurement: StepMeasurement
    sample: int  # first of its batch
    fields: dict[str, Any]  # that are known already
    stretch: ClockSpan
    recorder: str  # its recorder, or ""


class StepRows:
    """The rows of an attempt, in the order of the steps; a context, which at an error writes the row that is left.

    record: writes a row (None: this rank writes none). tried: first samples of batches under retry.
    defers: whether a row may be read when the next step is under way.
    """

    def __init__(
        self, attempt: Attempt, meter: Meter, record: Callable[[Mapping[str, Any]], None] | None, tried: list[int]
    ) -> None:
        self.attempt, self.meter, self.record, self.tried = attempt, meter, record, tried
        self.defers = attempt.job.device != HOST and attempt.job.nvme is None
        self.skipped = 0  # steps in a row
        self.unread: PendingRow | None = None

    def add(self, measurement: StepMeasurement, sample: int, fields: dict[str, Any], recorder: str) -> None:
        """Enter a step, whose row ends here; it waits for nothing."""
        assert self.unread is None  # settled
        self.unread = PendingRow(measurement, sample, fields, self.meter.cut(measurement.step), recorder)

    def settle(self) -> rollback.Fault | None:
        """Write the row that was added last, if it is not written; returns the Fault of a step that asks for a
        rollback, or None.

        On a GPU it waits for the end of that step, not of one that was given to it since. All ranks call it. Raises
        FloatingPointError as `roll_back_decision` does.
        """
        job, folder, _, coordinator, options, _ = self.attempt
        unread = self.unread
        if unread is None:
            return None
        row = self._write()
        self.skipped = self.skipped + 1 if row["skipped"] else 0
        fault = rollback.roll_back_decision(job.config.guard, row, unread.sample, self.skipped)
        if fault is None and unread.sample in self.tried and not row["skipped"]:
            step = unread.measurement.step
            rollback.record_recovery(folder, step, unread.sample, self.tried, coordinator, options.say)
        return fault

    def _write(self) -> dict[str, Any]:
        unread, self.unread = self.unread, None
        assert unread is not None  # the caller has looked
        measurement, meter = unread.measurement, self.meter
        row = meter.row(measurement) | unread.fields | meter.times(unread.stretch, measurement.step, unread.recorder)
        if self.record is not None:
            self.record(row)
        return row

    def __enter__(self) -> StepRows:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.unread is not None:
            # The error under way is the one to be told: a device that is lost has no numbers to give either.
            with contextlib.suppress(Exception):
                self._write()
