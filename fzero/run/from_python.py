"""A whole run from Python: what `fzero pretrain` does, with a function of your own that hears of each step."""

from __future__ import annotations

from pathlib import Path

from fzero.run import loop, pretrain, run_lock
from fzero.run.attempt import Options
from fzero.run.config import RunConfig
from fzero.run.process_settings import settings_restored
from fzero.run.ranks.coordinator import join
from fzero.run.ranks.signals import handlers_restored
from fzero.run.ranks.watchdog import watch


@handlers_restored()
@settings_restored()
def train_run(
    folder: str | Path,
    config: RunConfig | None = None,
    *,
    init: str | Path | None = None,
    options: Options | None = None,
) -> int:
    """Train a new run of `config` in `folder`, or (None) resume the run there; the signal that stopped it, or 0.

    init: the model that a new run starts from, as `--init`; see `tuned_config` of fzero/run/fine_tuning.py.
    options: `Options(log=f)` has f(step, row) called on rank 0 after each step, with the row that metrics.jsonl gets;
    what f raises ends the run. Every process of torchrun calls this, in its main thread.
    When it ends, also by an error, the process has its own threads, way of float32 products, signal handlers and the
    like again; see `settings_restored` of fzero/run/process_settings.py.
    Raises ValueError as `start` and `resume` of fzero/run/pretrain.py.

    >>> import tempfile
    >>> from fzero.run.config_table import from_table
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "text.txt").write_text("a line of text\\n" * 40)
    >>> train = {"steps": 2, "batch": 1, "micro_batch": 1, "compiled": False, "loggers": []}
    >>> table = {"preset": "mlp-tiny", "data": {"path": str(folder / "text.txt"), "seq_len": 4}, "train": train}
    >>> options = Options(say=lambda line: None, sample="", peak_flops=1e12, log=lambda step, row: print(step))
    >>> train_run(folder / "run", from_table(table), options=options)
    1
    2
    0
    """
    options, coordinator = options or Options(), join(**{"hang_s": config.train.hang_s} if config is not None else {})
    if not coordinator.first:
        options = options._replace(say=lambda line: None)
    try:
        with watch(coordinator):
            if config is None:
                ready = pretrain.resume(Path(folder), coordinator, options)
            else:
                start = {"init": Path(init), "grow_vocabulary": False} if init is not None else {}
                ready = pretrain.start(config, Path(folder), coordinator, options, **start)
            stopped = loop.train(*ready) if ready is not None else 0
            if not coordinator.spare:
                coordinator.close(stopped)  # and with it torch.distributed
            return stopped
    finally:
        run_lock.release_all()
