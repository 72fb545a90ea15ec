"""Configurations whose step is predicted and measured: see test_plan_memory.py."""

from dataclasses import replace

from fzero import models
from fzero.run import config_table

SIZES = {
    "llama": {
        "vocab_size": 256,
        "max_len": 64,
        "d_model": 64,
        "n_layers": 3,
        "d_ff": 128,
        "n_heads": 4,
        "n_kv_heads": 2,
    },
    "gpt2": {"vocab_size": 256, "max_len": 64, "d_model": 64, "n_layers": 3, "d_ff": 128, "n_heads": 4},
    "mixtral": {
        "vocab_size": 256,
        "max_len": 64,
        "d_model": 64,
        "n_layers": 3,
        "d_ff": 64,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_experts": 4,
    },
    "mlp": {"vocab_size": 256, "max_len": 64, "d_model": 64, "n_layers": 3, "d_ff": 128},
}
OFFLOADED = "params=nvme,opt=nvme"


def made(family="llama", optimizer="adamw", policy="fp32", parts=2, ranks=4, mesh=None, model=None, **changes):
    """The config of a small run: `parts` micro-batches of 2 sequences for each data rank."""
    mesh = mesh or {}
    data = mesh.get("dp", 1) * mesh.get("rp", 1) * mesh.get("ep", 1) if mesh else ranks
    table = {
        "preset": "",
        "model": {"family": family, **SIZES[family], **(model or {})},
        "data": {"seq_len": 32},
        "optim": {"name": optimizer},
        "precision": {"policy": policy, "fp32_matmul": "default"},
        "train": {"steps": 10, "batch": 2 * parts * data, "micro_batch": 2, "compiled": False},
        "mesh": mesh or ({"dp": ranks} if ranks > 1 else {}),
    }
    for key, value in changes.items():
        inner, _, name = key.partition("_")
        if inner in table and name:
            table[inner][name] = value
        else:
            table[key] = value
    return config_table.from_table(table)


def with_lora(config, rank=4):
    """The same with LoRA, whose factors alone are trained."""
    return replace(config, model=models.lora(models.build(config.model), rank).config)


# name: (processes, config)
CASES = {
    **{f"{family}-{stage}": (4, made(family, zero=stage)) for family in SIZES for stage in range(4)},
    "bf16-0": (4, made(policy="bf16")),
    "bf16-2": (4, made(policy="bf16", zero=2)),
    "bf16-3": (4, made(policy="bf16", zero=3, parts=1)),
    "fp16-3": (4, made(policy="fp16", zero=3)),
    "dp2tp2": (4, made(mesh={"dp": 2, "tp": 2}, zero=3)),
    "dp2tp2-sequence": (4, made(mesh={"dp": 2, "tp": 2}, zero=2, sequence=True)),
    "gpt2-tp4": (4, made("gpt2", mesh={"tp": 4}, sequence=True)),
    "mixtral-dp2tp2": (4, made("mixtral", mesh={"dp": 2, "tp": 2}, zero=3)),
    "rp2dp2": (4, made(mesh={"rp": 2, "dp": 2}, zero=3)),
    "loco": (4, made(mesh={"dp": 4}, zero=3, codec="grads=int4,loco")),
    "loco-hpz": (4, made("gpt2", mesh={"rp": 2, "dp": 2}, zero=3, policy="bf16", codec="grads=int4,hpz,loco,reset=3")),
    "remat-full": (4, made(zero=3, train_remat="full")),
    "remat-every2": (4, made(zero=3, train_remat="every:2")),
    "remat-every2-1": (4, made(zero=1, train_remat="every:2")),
    "remat-selective": (4, made(zero=3, train_remat="selective:0.5")),
    "once": (4, made(zero=2, reduce="once", parts=3)),
    "prefetch3": (4, made(zero=3, prefetch=3)),
    "reshard-off": (4, made(zero=3, reshard=False)),
    "canonical": (4, made(reduce="canonical", parts=3)),
    "canonical-3": (4, made(reduce="canonical", zero=3, parts=4)),
    "adam8bit": (4, made(zero=1, optim_states="8bit")),
    "adam-bf16": (4, made(zero=1, optim_states="bf16")),
    "lion": (4, made(optimizer="lion", zero=3)),
    "muon": (4, made(optimizer="muon", zero=3)),
    "adafactor": (4, made(optimizer="adafactor", zero=1)),
    "lamb": (4, made(optimizer="lamb", zero=2)),
    "sgd": (4, made(optimizer="sgd", zero=0)),
    "ema": (4, made(zero=3, policy="bf16", train_ema_decay=0.99)),
    "spike": (1, made(ranks=1, guard={"spike": "skip"})),
    "one": (1, made(ranks=1)),
    "one-dropout": (1, made("gpt2", ranks=1, model={"dropout": 0.1}, parts=3)),
    "lora": (4, with_lora(made(policy="bf16", zero=3))),
    "lora-full": (2, with_lora(made("gpt2", ranks=2, zero=1, train_remat="full"))),
    "qwen": (4, made(mesh={"dp": 2, "tp": 2}, zero=3, model_qkv_bias=True, model_qk_norm=True)),
    "one-tiles": (1, made(ranks=1, model_mlp_tiles=4, policy="bf16")),
    "host": (4, made(zero=3, policy="bf16", offload="opt=host,params=host")),
    "nvme": (1, made(ranks=1, policy="bf16", offload=OFFLOADED)),
    "nvme-all": (1, made(ranks=1, policy="bf16", offload=f"{OFFLOADED},grads=nvme,acts=nvme", train_remat="full")),
    "nvme-fp32": (1, made(ranks=1, offload=OFFLOADED, train_ema_decay=0.9)),
    "nvme-backward": (1, made(ranks=1, offload=OFFLOADED, train_update="backward", optim_clip=0.0)),
    "nvme-dp4": (4, made(zero=3, policy="bf16", offload=OFFLOADED)),
    "host-grads": (1, made(ranks=1, policy="bf16", offload="opt=host,grads=host")),
}

# What runs by default: each kind of thing once.
THIN = (
    "llama-3",
    "gpt2-1",
    "mixtral-2",
    "bf16-3",
    "dp2tp2-sequence",
    "rp2dp2",
    "remat-every2",
    "canonical",
    "adam8bit",
    "muon",
    "host",
    "one-dropout",
    "nvme-all",
    "nvme-backward",
    "lora",
    "loco",
)
# And of these, what runs in the slow tier: other families, the other stages and variants.
SLOW = (
    "gpt2-1",
    "canonical",
    "nvme-all",
    "mixtral-2",
    "rp2dp2",
    "remat-every2",
    "adam8bit",
    "one-dropout",
    "dp2tp2-sequence",
    "lora",
)
