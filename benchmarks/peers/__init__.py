"""The contenders of `benchmarks/single.py`, each with `make(weights, config, dtype, switches) -> step(batch) -> loss`.

`weights` is {name: float32 array} in fzero's llama layout, `batch` is {"tokens", "targets"} of int64 arrays [B, T]; the
loss is the mean over all B*T targets, in nats. A contender is written NAME or NAME+SWITCH+...: `eager+onednn`.
"""
