"""A step keeps to the device of its state: the meta device stands for a GPU, as it mixes with the CPU no more than that
does."""

import pytest
import torch

import fzero
from fzero import models, optim
from fzero.core import precision, pytree

SIZES = {"vocab_size": 64, "max_len": 32, "d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 64}
MODELS = {
    "gpt2": models.GPT2Config(**SIZES, dropout=0.1),
    "llama": models.LlamaConfig(**SIZES, n_kv_heads=2),
    "moe": models.MoEConfig(**SIZES, n_kv_heads=2, n_experts=4, capacity_factor=1.5),
}
OPTIMIZERS = {
    "lion": optim.chain(optim.clip_by_global_norm(1.0), optim.lion(optim.warmup_cosine(3e-3, 10, 100))),
    "muon": optim.by_label(
        {"muon": optim.muon(0.02), "sgd": optim.sgd(1e-3, 0.9)}, ((r"^blocks/.*/w_", "muon"), (".*", "sgd"))
    ),
}


CASES = (("gpt2", "lion", 1, "none", "bf16"), ("llama", "muon", 2, "full", "fp16"), ("moe", "lion", 1, "none", "fp32"))


@pytest.mark.parametrize("model, optimizer, micro_batches, remat, policy", CASES)
def test_nothing_leaves_the_device(model, optimizer, micro_batches, remat, policy):
    mesh, model, tx, policy = (
        fzero.one_process(),
        models.build(MODELS[model]),
        optim.with_average(OPTIMIZERS[optimizer], 0.9),
        precision.POLICIES[policy](),
    )
    if policy.loss_scale:
        policy = precision.fp16(precision.LossScale(at_floor="hold"))
    plan = fzero.zero_plan(0, model, mesh, policy=policy)
    state = fzero.init_state(model, tx, plan, seed=0, device="meta")
    options = {"micro_batches": micro_batches, "skip": fzero.Skip(nonfinite=False)}
    step = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(remat=remat), **options)
    tokens = torch.zeros(4, 16, dtype=torch.int64, device="meta")
    before = {name: leaf.shape for name, leaf in pytree.named_leaves(state).items()}
    state, metrics = step(state, {"tokens": tokens, "targets": tokens})
    assert {name: leaf.shape for name, leaf in pytree.named_leaves(state).items()} == before
    assert {leaf.device.type for leaf in pytree.leaves((state, metrics))} == {"meta"}
    fzero.make_eval_step(model, plan)(state.params, {"tokens": tokens, "targets": tokens})
