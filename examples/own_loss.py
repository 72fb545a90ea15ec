"""Your own loss over your own parameters: a robust regression, where a tree of tensors and a function are all that is
needed.

python examples/own_loss.py
"""

import torch

import fzero
from fzero import optim

generator = torch.Generator().manual_seed(0)
x = torch.randn(512, 8, generator=generator)
true_w = torch.arange(8.0)
y = x @ true_w + 0.1 * torch.randn(512, generator=generator)
y[::10] += 50.0  # outliers


def loss(params, batch):
    """(sum of the Huber losses, number of rows): the step divides once, whatever the micro-batches and ranks."""
    residual = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return torch.nn.functional.huber_loss(residual, torch.zeros_like(residual), reduction="sum"), len(residual)


params = {"w": torch.zeros(8), "b": torch.zeros(())}
plan = fzero.zero_plan(0, params, fzero.one_process())
tx = optim.adamw(0.1, weight_decay=0.0)
state = fzero.init_state(params, tx, plan, seed=0)
step = fzero.make_train_step(loss, tx, plan, micro_batches=4)

for _ in range(300):
    state, metrics = step(state, {"x": x, "y": y})

print(f"loss {metrics.loss:.3f}; w {[round(float(w), 2) for w in state.params['w']]}")
assert torch.allclose(state.params["w"], true_w, atol=0.2)
