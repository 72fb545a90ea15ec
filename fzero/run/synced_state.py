"""The state that a run evaluates and saves, where its ranks or members are apart for some steps."""

from __future__ import annotations

from fzero.run.build import Job
from fzero.run.members import MemberStep
from fzero.train.state import TrainState
from fzero.train.update.in_memory import sum_divergence


def agreed(job: Job, state: TrainState, steps: int) -> TrainState:
    """The state once all members agree; after the last of the run's `steps` steps also once ranks that move apart have
    summed what they moved (see `sum_divergence`). In the buffers of `state`; a run without either keeps it as it is.

    Before the last step ranks that move apart keep what they moved beside parameters that are the same on all of them.
    """
    with job.mesh.ledger.phase("checkpoint"):
        if isinstance(job.train_step, MemberStep):
            return job.train_step.agree(state)
        return sum_divergence(job.tx, job.plan, state) if int(state.step) == steps else state
