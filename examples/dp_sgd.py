"""DP-SGD under ZeRO-3: the gradient of each example is clipped by its own norm, summed, and noise is added.

Abadi et al. 2016, "Deep learning with differential privacy", algorithm 1. Parameters stay sharded; torch.func goes
through the gathers.

    torchrun --standalone --nproc-per-node 2 examples/dp_sgd.py
"""

import os

import torch

import fzero
from fzero import models, optim, pytree

CLIP, NOISE, LR, EXAMPLES = 1.0, 0.01, 0.5, 8

mesh = fzero.make_mesh({"dp": int(os.environ.get("WORLD_SIZE", "1"))})
model = models.llama(
    models.LlamaConfig(vocab_size=32, max_len=16, d_model=32, n_layers=2, n_heads=2, n_kv_heads=2, d_ff=64)
)
plan = fzero.zero_plan(3, model, mesh)
tx = optim.sgd(LR)
params = fzero.init_state(model, tx, plan, seed=0).params  # this rank's shards
ctx = models.Ctx(mesh=mesh)
rows = (torch.arange(EXAMPLES)[:, None] + torch.arange(17)) % 32
tokens, targets = rows[:, :-1], rows[:, 1:]
# All ranks run all examples, since every gather needs all ranks; each example counts on one of them.
mine = (torch.arange(EXAMPLES) % mesh["dp"].size == mesh["dp"].rank).float()


def loss_of_one(params, tokens, targets, counts):
    out = models.loss(model, params, {"tokens": tokens[None], "targets": targets[None]}, ctx, plan)
    return counts * out.total / out.num_tokens, out.total / out.num_tokens


shards = optim.sharded(plan.opt, mesh, like=plan.like)  # norms that count each element once, over all ranks
per_example = torch.func.vmap(torch.func.grad(loss_of_one, has_aux=True), (None, 0, 0, 0))

for step in range(10):
    grads, losses = per_example(params, tokens, targets, mine)  # leaves [EXAMPLES, shard]
    norms = torch.stack([shards.norm(pytree.map(lambda g, i=i: g[i], grads)) for i in range(EXAMPLES)])
    scale = (CLIP / norms).clamp(max=1.0)
    key = fzero.random.fold_in(fzero.random.key(1), str(mesh.rank))  # a shard's noise is its own

    def private(name, g, key=key, scale=scale, step=step):
        noise = fzero.random.normal(fzero.random.fold_in(key, f"{name}/{step}"), g.shape[1:])
        return (torch.tensordot(scale, g, dims=1) + CLIP * NOISE * noise) / EXAMPLES

    params = pytree.map(lambda p, g: p - LR * g, params, pytree.map_named(private, grads))
    if mesh.rank == 0:
        print(
            f"step {step + 1}: mean loss {losses.mean():.4f}, largest norm of an example's gradient {norms.max():.2f}"
        )
mesh.close()
