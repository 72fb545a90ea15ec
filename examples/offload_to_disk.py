"""Offload to a disk: parameters, gradients and optimizer state rest in files, the numbers are the same, and a killed
run resumes.

python examples/offload_to_disk.py [FOLDER]
"""

import sys
import tempfile

import torch

import fzero
from fzero import models, optim

folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
mesh = fzero.one_process()
model = models.gpt2(models.GPT2Config(vocab_size=64, max_len=32, d_model=32, n_layers=4, n_heads=4, d_ff=128))
tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
rows = torch.arange(4)[:, None] + torch.arange(33)
batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def train(plan, state, steps, nvme=None):
    step, losses = fzero.make_train_step(model, tx, plan, nvme=nvme), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    return losses


in_memory = fzero.zero_plan(0, model, mesh)
expected = train(in_memory, fzero.init_state(model, tx, in_memory, seed=0), 6)

on_disk = fzero.zero_plan(0, model, mesh, offload="params=nvme,opt=nvme,grads=nvme")
nvme = fzero.Nvme(folder)
found = train(on_disk, fzero.init_state(model, tx, on_disk, seed=0, nvme=nvme), 3, nvme)
nvme.close()  # or the process is killed: the last complete step is in the folder

nvme = fzero.Nvme(folder)
found += train(on_disk, fzero.reopen_state(tx, on_disk, nvme), 3, nvme)
nvme.close()

print("in memory:", expected)
print("on a disk:", found)
assert found == expected
