"""Classes of generated texts, from Python: the run of `fzero finetune --objective classify`.

A model of bytes that has seen numbers in words and in digits learns which texts end with an even one.

python examples/finetune_classify.py
"""

import json
import tempfile
from pathlib import Path

import torch

from fzero import models
from fzero.run import Options, from_table, run_folder, train_run, tuned_config, weights

place, quiet = Path(tempfile.mkdtemp()), Options(sample="", say=lambda line: None)
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
numbers = [(a * 7 + b) % 10 for a in range(10) for b in range(10)]
(place / "notes.txt").write_text("\n".join(f"{n} is {WORDS[n]} and {WORDS[n]} is {n}" for n in numbers * 4))
texts = [{"text": f"{WORDS[n]} and {i}", "label": "odd" if i % 2 else "even"} for i, n in enumerate(numbers * 2)]
(place / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))

train = {"steps": 40, "batch": 8, "micro_batch": 8, "compiled": False, "eval_every": 10}
base = {"preset": "mlp-tiny", "data": {"path": str(place / "notes.txt"), "seq_len": 32}, "train": train}
train_run(place / "base", from_table({**base, "model": {"max_len": 64}}), options=quiet)

data = {"path": str(place / "texts.jsonl"), "seq_len": 64}
table = {"objective": "classify", "data": data, "train": train, "optim": {"lr": 2e-2}}
train_run(place / "tuned", tuned_config(place / "base", table), init=place / "base", options=quiet)

rows = list(run_folder.read_metrics(place / "tuned"))
for row in rows[::8] + rows[-1:]:
    print(f"step {row['step']:2}: loss {row['loss']:.4f}, accuracy {row['accuracy']:.2f}")
assert rows[-1]["val_accuracy"] > 0.9

trained = weights.load(place / "tuned")
ids = torch.from_numpy(run_folder.read_tokenizer(place / "tuned").encode("two and 31").astype("int64"))
scores = models.logits(trained.model, trained.params, {"tokens": ids[None]})[0, -1]  # at the last token
print(dict(zip(trained.model.config.labels, scores.softmax(-1).tolist())))
assert trained.model.config.labels[scores.argmax()] == "odd"
