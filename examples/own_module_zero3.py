"""Your own nn.Module under ZeRO-3: its layers are found, stacked and gathered one at a time; its weights come back.

python examples/own_module_zero3.py
torchrun --standalone --nproc-per-node 2 examples/own_module_zero3.py    # the same losses
"""

import os

import torch
import torch.nn.functional as F
from torch import nn

import fzero


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.drop = nn.Dropout(0.01)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.drop(self.out(h))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


class Net(nn.Module):
    def __init__(self, vocabulary=64, length=32, d=32, layers=3):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, d), nn.Embedding(length, d)
        self.layers = nn.ModuleList(Layer(d, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss(call, batch):
    logits = call(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"), batch["targets"].numel()


torch.manual_seed(0)  # all ranks begin with the same weights
net, tx = Net(), fzero.optim.adamw(1e-2)
rows = (torch.arange(8)[:, None] + torch.arange(33)) % 64  # each token follows from the one before
batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}

mesh = fzero.make_mesh({"dp": int(os.environ.get("WORLD_SIZE", "1"))})
model = fzero.from_module(net, loss, batch=batch)
plan = fzero.zero_plan(3, model, mesh)
state = fzero.init_state(model, tx, plan, seed=0)
step = fzero.make_train_step(model, tx, plan)
for i in range(30):
    state, metrics = step(state, fzero.local_batch(batch, mesh))
    if mesh.rank == 0 and i % 10 == 9:
        print(f"step {i + 1}: loss {metrics.loss:.4f}")
fzero.to_module(state, net, plan)

with torch.no_grad():
    total, number = loss(net.eval(), batch)
if mesh.rank == 0:
    print(f"the module itself: loss {total / number:.4f}")
assert total / number < 1.0  # log(64) = 4.16 for a guess
mesh.close()
