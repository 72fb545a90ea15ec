"""GPT-2 from scratch: a model is a function of parameters, and any loss function trains. Reads its own library's
source.

python examples/gpt2_from_scratch.py
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange

import fzero
from fzero import optim

D, H, L, T, V = 64, 4, 2, 64, 256  # model, heads, layers, sequence, vocabulary (bytes)


def init(key):
    shapes = {"tokens": (V, D), "places": (T, D)} | {
        f"block{i}/{name}": shape
        for i in range(L)
        for name, shape in {"qkv": (D, 3 * D), "out": (D, D), "up": (D, 4 * D), "down": (4 * D, D)}.items()
    }
    return {name: 0.02 * fzero.random.normal(fzero.random.fold_in(key, name), shape) for name, shape in shapes.items()}


def block(p, i, x):
    q, k, v = rearrange(F.layer_norm(x, (D,)) @ p[f"block{i}/qkv"], "b t (n h k) -> n b h t k", n=3, h=H)
    x = (
        x
        + rearrange(F.scaled_dot_product_attention(q, k, v, is_causal=True), "b h t k -> b t (h k)")
        @ p[f"block{i}/out"]
    )
    return x + F.gelu(F.layer_norm(x, (D,)) @ p[f"block{i}/up"], approximate="tanh") @ p[f"block{i}/down"]


def loss(p, batch):
    x = p["tokens"][batch["tokens"]] + p["places"]
    for i in range(L):
        x = block(p, i, x)
    logits = F.layer_norm(x, (D,)) @ p["tokens"].T
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"), batch["targets"].numel()


params = init(fzero.random.key(0))
plan = fzero.zero_plan(0, params, fzero.one_process())
tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(optim.warmup_cosine(3e-3, 10, 100)))
state = fzero.init_state(params, tx, plan, seed=0)
step = fzero.make_train_step(loss, tx, plan)

text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()
generator = torch.Generator().manual_seed(0)
losses = []
for i in range(100):
    starts = torch.randint(0, len(text) - T - 1, (8,), generator=generator).tolist()
    rows = torch.stack([text[s : s + T + 1] for s in starts])
    state, metrics = step(state, {"tokens": rows[:, :-1], "targets": rows[:, 1:]})
    losses.append(float(metrics.loss))
    if i % 20 == 19:  # the mean, as a batch of 512 bytes is noisy
        print(f"step {i + 1}: {sum(losses[-20:]) / 20:.3f} nats per byte")
assert sum(losses[-20:]) / 20 < losses[0] - 2
