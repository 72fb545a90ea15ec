"""One start of a run: the inputs of its loop besides the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fzero.run.build import Job, build
from fzero.run.config import RunConfig
from fzero.run.corpus import Say
from fzero.run.ranks.coordinator import Coordinator
from fzero.run.stages import stage_of_step


class Options(NamedTuple):
    """Options of a run that do not change its numbers."""

    stop_at: int | None = None  # end after this step, resumably
    peak_flops: float = 0.0  # peak for MFU, of all processes together; 0: the measured rate of products
    peak_measured: bool = False  # whether that rate was measured at the start
    profile: str = ""  # "FROM-TO": steps of this attempt to trace, from 1 on
    sample: str = "def "  # prompt of the text shown at the end; "" for none
    say: Say = print
    bar: bool = False  # a progress bar on stderr in place of lines
    log: Callable[[int, dict[str, Any]], None] | None = None  # hears of each step on rank 0: its number and its row


class Attempt(NamedTuple):
    """A run that is ready to train: job, folders, processes and options."""

    job: Job
    folder: Path  # of the run
    corpus: Path
    coordinator: Coordinator
    options: Options
    config: RunConfig  # of the whole run, whose `stages` may lie before or behind the one of `job`

    @property
    def last_step(self) -> int:
        """The step after which this attempt ends."""
        steps = self.config.train.steps
        return min(steps, self.options.stop_at or steps)

    def in_stage(self, step: int) -> Attempt:
        """The attempt with the job of the stage that makes the step after `step` steps."""
        config, job = stage_of_step(self.config, step).config, self.job
        if config == job.config:
            return self
        return self._replace(job=build(config, job.mesh, self.folder, nvme=job.nvme, device=job.device))
