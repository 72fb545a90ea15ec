"""Plan before you run: what a run needs of memory, links and time, on GPUs that are not here.

python examples/plan_before_you_run.py
"""

import fzero

config = {
    "preset": "llama-8b",
    "train": {"batch": 64, "micro_batch": 1, "remat": "full"},
    "data": {"seq_len": 4096},
    "precision": {"policy": "bf16"},
    "zero": 3,
}
report = fzero.plan(config, {"dp": 8}, gpu="h100")
print(report)
assert report.step_s and set(report.comm_bytes_per_axis) == {"dp"}

small = {
    "preset": "llama-tiny",
    "train": {"batch": 8, "micro_batch": 1, "compiled": False},
    "precision": {"policy": "fp32"},
}
by_stage = {
    zero: fzero.plan({**small, "zero": zero}, {"dp": 4}, gpu="h100").peak_bytes_per_rank for zero in (0, 1, 2, 3)
}
print("peak bytes of a rank by ZeRO stage:", by_stage)
assert by_stage[3] < by_stage[0]
