"""Resume on another number of processes: fit the mesh, and keep the processes left over as spares."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from fzero.comm.axes import DP, RP, TP, mesh_text
from fzero.run.config.run_config import RunConfig
from fzero.run.config.stages import shared_batch
from fzero.run.setup.coordinator import OVER, STOP, Coordinator, Ended
from fzero.run.setup.signals import stop_signals
from fzero.run.setup.watchdog import BEAT_S, SILENT_S, read_beats


def fit_mesh(
    sizes: Mapping[str, int], processes: int, micro_batches: int, *, canonical: bool = False
) -> dict[str, int]:
    """The sizes of a mesh like `sizes` for this number of processes, or for fewer."""
    out, remaining = {}, processes
    # tp first: a model that does not fit on fewer ranks of tp does not run at all. dp takes what is left.
    for axis in sorted(sizes.keys() - {DP}, key=lambda axis: (axis != TP, axis)):
        out[axis] = max(d for d in range(1, sizes[axis] + 1) if sizes[axis] % d == 0 and d <= remaining)
        remaining //= out[axis]
    copies = out.get(RP, 1)
    # A power of two for canonical sums: their tree over micro-batches is the same for these alone.
    fits = [d for d in range(1, remaining + 1) if micro_batches % (d * copies) == 0 and not (canonical and d & (d - 1))]
    out[DP] = max(fits, default=1)
    return {axis: out[axis] for axis in [*sizes, DP] if out[axis] > 1}


def refit_mesh(config: RunConfig, sizes: Mapping[str, int], processes: int) -> tuple[dict[str, int], str]:
    """(the mesh of `fit_mesh` for the run, a line that describes it)."""
    micro_batches = shared_batch(config.train.batch, config.train.batch_ramp) // config.train.micro_batch
    mesh = fit_mesh(sizes, processes, micro_batches, canonical=config.reduce == "canonical")
    used = math.prod(mesh.values())
    line = f"mesh: {mesh_text(mesh)} for {processes} process{'es' * (processes > 1)}"
    line += f" in place of {mesh_text(sizes)}" if mesh_text(sizes) != mesh_text(mesh) else ""
    line += f"; {micro_batches} micro-batches a step" + (", canonical sums" if config.reduce == "canonical" else "")
    if used < processes:
        spare = f"{used}" if used == processes - 1 else f"{used} to {processes - 1}"
        line += f"; rank {spare} is spare and waits"
    return mesh, line


def stand_by(coordinator: Coordinator) -> int:
    """Wait, as a spare, until the others' run has ended; returns the signal that stopped it, or 0."""
    store = coordinator.store
    assert store is not None  # a spare has others
    heard, last_beats, signalled_at, beat = time.monotonic(), {}, 0.0, 0.0
    with stop_signals() as received:
        while not store.check([OVER]):
            timestamp = time.monotonic()
            if coordinator.reason():
                raise Ended
            if timestamp - beat > BEAT_S:
                beat, beats = timestamp, read_beats(coordinator)
                store.set(f"beat/{coordinator.rank}", "spare")
                # The others live as long as any of their signs changes.
                heard, last_beats = (heard, last_beats) if beats == last_beats and beats else (timestamp, beats)
            if received and not signalled_at:
                signalled_at, heard, coordinator.signalled = timestamp, timestamp, True
                store.set(STOP, str(received[0]))
            if signalled_at and timestamp - heard > SILENT_S:
                return received[0]  # torchrun ends the others too, and did not wait for them
            if 0 < coordinator.hang_s < timestamp - heard:
                raise TimeoutError(
                    f"rank {coordinator.rank}, a spare: no other rank gives a sign of life for {coordinator.hang_s:g} s"
                )
            time.sleep(0.1)
        stopped = int(store.get(OVER))
        coordinator.bye()
        return stopped
