"""Training goes on from checkpoints bit for bit; for kills see test_checkpoint_kill.py, for other meshes test_checkpoint_ranks.py."""

import pytest
import torch
from close import assert_same

import fzero
from fzero import checkpoint, optim
from fzero.core import precision
from fzero.models import GPT2Config, gpt2

MESH = fzero.one_process()
MODEL = gpt2(GPT2Config(vocab_size=17, max_len=8, d_model=8, n_layers=2, n_heads=2, d_ff=16, dropout=0.2, init_std=0.3))
OPTIMIZERS = {"sgd": lambda: optim.sgd(0.1, 0.9, nesterov=True), "adamw": lambda: optim.adamw(optim.cosine(1e-2, 20), weight_decay=0.1)}
# A loss scale that rises every third step, and that overflows on the way.
POLICIES = {
    "fp32": precision.fp32(),
    "bf16": precision.bf16(),
    "fp16": precision.fp16(precision.LossScale(init=2.0**15, window=3, hysteresis=1)),
}


def start(optimizer, policy, seed=0):
    tx = OPTIMIZERS[optimizer]()
    plan = fzero.zero_plan(0, MODEL, MESH, policy=POLICIES[policy])
    step = fzero.make_train_step(MODEL, tx, plan, ema_decay=0.9)
    return step, fzero.init_state(MODEL, tx, plan, seed=seed, ema=True)


def train(step, state, steps):
    """The state after so many steps more; the batch is a function of the state's own position."""
    losses = []
    for _ in range(steps):
        g = torch.Generator().manual_seed(int(state.data_cursor))
        tokens = torch.randint(0, 17, (4, 9), generator=g)
        state, metrics = step(state, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
        losses.append((float(metrics.loss), bool(metrics.skipped), float(metrics.loss_scale)))
    return state, losses


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ten_and_ten_steps_are_twenty_bit_for_bit(optimizer, policy, tmp_path):
    step, state = start(optimizer, policy)
    whole, losses = train(step, state, 20)
    _, state = start(optimizer, policy)
    half, first = train(step, state, 10)
    path = checkpoint.save(tmp_path, half, step=10)
    again, like = start(optimizer, policy, seed=99)
    resumed, second = train(again, checkpoint.restore(path, like), 10)
    assert first + second == losses
    assert_same(resumed, whole)
    assert int(whole.step) == 20 and losses[0] != losses[10]
    if policy == "fp16":
        assert any(skipped for _, skipped, _ in second) and len({scale for *_, scale in second}) > 1
