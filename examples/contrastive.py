"""A contrastive loss over the whole global batch: every pair is compared with those of all ranks.

Such a loss couples its samples, so a step depends on how the batch is cut. Here it is not cut: each rank gathers the
features of all ranks, and sums the loss of its own rows. The gather's backward pass brings each feature the gradients
of all of them.

python examples/contrastive.py
torchrun --standalone --nproc-per-node 2 examples/contrastive.py    # the same losses
"""

import os

import torch
import torch.nn.functional as F

import fzero
from fzero import optim

mesh = fzero.make_mesh({"dp": int(os.environ.get("WORLD_SIZE", "1"))})
dp = mesh["dp"]


def normalize(x):
    return x / x.norm(dim=-1, keepdim=True)


def loss_of_step(params, batch):
    """(InfoNCE of this rank's rows against the rows of all ranks, number of its rows)."""
    a, b = normalize(batch["a"] @ params["a"]), normalize(batch["b"] @ params["b"])
    all_a, all_b = fzero.all_gather(a, dp, 0), fzero.all_gather(b, dp, 0)
    own = dp.rank * len(a) + torch.arange(len(a))
    scale = params["log_scale"].exp()
    forth, back = (F.cross_entropy(scale * x @ y.T, own, reduction="sum") for x, y in ((a, all_b), (b, all_a)))
    return (forth + back) / 2, len(a)


generator = torch.Generator().manual_seed(0)
hidden = torch.randn(64, 8, generator=generator)
batch = {
    "a": hidden @ torch.randn(8, 16, generator=generator) + 0.1 * torch.randn(64, 16, generator=generator),
    "b": hidden @ torch.randn(8, 16, generator=generator) + 0.1 * torch.randn(64, 16, generator=generator),
}
params = {"a": 0.3 * torch.randn(16, 8, generator=generator), "b": 0.3 * torch.randn(16, 8, generator=generator)}
params["log_scale"] = torch.tensor(1.0)
plan = fzero.zero_plan(2, params, mesh)
tx = optim.adamw(3e-2, weight_decay=0.0)
state = fzero.init_state(params, tx, plan, seed=0)
step = fzero.make_train_step(loss_of_step, tx, plan)  # one micro-batch: its features are those of the whole batch

for i in range(60):
    state, metrics = step(state, fzero.local_batch(batch, mesh))
    if mesh.rank == 0 and i % 20 == 19:
        print(f"step {i + 1}: loss {metrics.loss:.4f}")
assert metrics.loss < 1.0  # log(64) = 4.16 for a guess
mesh.close()
