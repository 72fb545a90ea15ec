"""ZeRO-3 under torchrun: parameters, gradients and optimizer state are sharded over the processes; the program does not
change.

python examples/zero3_torchrun.py
torchrun --standalone --nproc-per-node 2 examples/zero3_torchrun.py    # the same losses
"""

import os

import torch

import fzero
from fzero import models, optim

mesh = fzero.make_mesh({"dp": int(os.environ.get("WORLD_SIZE", "1"))})
model = models.llama(
    models.LlamaConfig(vocab_size=64, max_len=32, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64)
)
plan = fzero.zero_plan(3, model, mesh)
tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.warmup_cosine(1e-2, 5, 30), weight_decay=0.1))
state = fzero.init_state(model, tx, plan, seed=0)
step = fzero.make_train_step(model, tx, plan, micro_batches=2)

if mesh.rank == 0:
    print(plan)
start = torch.arange(8)[:, None]
for i in range(30):
    rows = (start + i + torch.arange(33)) % 64  # each token follows from the one before
    batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
    state, metrics = step(state, fzero.local_batch(batch, mesh, micro_batches=2))
    if mesh.rank == 0 and i % 10 == 9:
        print(f"step {i + 1}: loss {metrics.loss:.4f}, gradient norm {metrics.grad_norm:.4f}")
assert metrics.loss < 3.5  # log(64) = 4.16 for a guess
mesh.close()
