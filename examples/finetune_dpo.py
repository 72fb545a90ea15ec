"""Direct preference optimization on generated pairs, from Python: the run of `fzero finetune --objective dpo`.

A model of bytes that has seen numbers in words and in digits learns to prefer digits.

python examples/finetune_dpo.py
"""

import json
import tempfile
from pathlib import Path

from fzero.run import Options, from_table, run_folder, train_run, tuned_config

place, quiet = Path(tempfile.mkdtemp()), Options(sample="", say=lambda line: None)
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
numbers = [(a * 7 + b) % 10 for a in range(10) for b in range(10)]
(place / "notes.txt").write_text("\n".join(f"{n} is {WORDS[n]} and {WORDS[n]} is {n}" for n in numbers * 4))
pairs = [{"prompt": f"write {n}, {m}: ", "chosen": f"{n}{m}", "rejected": f"{WORDS[n]} {WORDS[m]}"}
         for n, m in zip(numbers, numbers[3:])]  # fmt: skip
(place / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

train = {"steps": 20, "batch": 8, "micro_batch": 8, "compiled": False, "eval_every": 10}
base = {"preset": "mlp-tiny", "data": {"path": str(place / "notes.txt"), "seq_len": 32}, "train": train}
train_run(place / "base", from_table({**base, "model": {"max_len": 64}}), options=quiet)

table = {
    "objective": "dpo",
    "dpo": {"beta": 0.1},
    "data": {"path": str(place / "pairs.jsonl"), "seq_len": 64},
    "train": train,
    "optim": {"lr": 3e-3},
}
config = tuned_config(place / "base", table, lora={"rank": 8, "targets": "/w_"})
train_run(place / "tuned", config, init=place / "base", options=quiet)

rows = list(run_folder.read_metrics(place / "tuned"))
for row in rows[::5] + rows[-1:]:
    print(f"step {row['step']:2}: loss {row['loss']:.4f}, margin {row['margin']:.4f}, accuracy {row['accuracy']:.2f}")
assert abs(rows[0]["loss"] - 0.6931) < 1e-3  # ln 2: it is its own reference
assert rows[-1]["margin"] > 0.1 and rows[-1]["val_accuracy"] == 1.0
