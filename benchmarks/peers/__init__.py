"""The contenders of `single.py` and `zero.py`, each with `make(weights, config, dtype, switches) -> step(batch) ->
loss`.

`weights` is {name: float32 array} in fzero's llama layout, `batch` is {"tokens", "targets"} of int64 arrays [B, T]; the
loss is the mean over all B*T targets, in nats. In a group of ranks it is the mean over the rank's own
rows (fzero: over all rows). A contender is written NAME, NAME-STAGE or NAME+SWITCH+...: `eager+onednn`.
"""
