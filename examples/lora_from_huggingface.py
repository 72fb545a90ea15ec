"""Fine-tuning with LoRA from a Hugging Face folder: only the low-rank factors are trained, then merged and written
back.

python examples/lora_from_huggingface.py [FOLDER]    # without FOLDER: a tiny random Llama, made here
"""

import sys
import tempfile
from pathlib import Path

import torch

import fzero
from fzero import models, optim
from fzero.checkpoint import huggingface

if len(sys.argv) > 1:
    folder = Path(sys.argv[1])
else:
    folder = Path(tempfile.mkdtemp(), "tiny")
    sizes = models.LlamaConfig(vocab_size=64, max_len=32, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64)
    huggingface.save_hf(folder, sizes, models.init_params(models.build(sizes), fzero.random.key(0)))

config, weights = huggingface.load_hf(folder)
model = models.lora(models.build(config), rank=4)
plan = fzero.zero_plan(0, model, fzero.one_process(), frozen=models.frozen_leaves(model.config))

# The factors begin as LoRA draws them, everything else as it was loaded.
drawn = fzero.pytree.named_leaves(models.init_params(model, fzero.random.key(1)))
params = fzero.pytree.from_named(
    {**drawn, **fzero.pytree.named_leaves(weights)}, models.init_params(model, fzero.random.key(1))
)
tx = optim.adamw(3e-2)
state = fzero.init_state(params, tx, plan, seed=0)
step = fzero.make_train_step(model, tx, plan)

rows = (torch.arange(8)[:, None] + torch.arange(33)) % config.vocab_size
batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
losses = []
for _ in range(40):
    state, metrics = step(state, batch)
    losses.append(float(metrics.loss))
print(
    f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
    f"{sum(x.numel() for x in fzero.pytree.leaves(plan.trained(plan.like))):,} "
    "trained parameters"
)
assert losses[-1] < losses[0] - 0.1

huggingface.save_hf(folder.with_name("tuned"), config, models.merge(model, state.params))
print(f"written: {folder.with_name('tuned')}")
