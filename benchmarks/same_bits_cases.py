"""The cases of `same_bits.py`: each thing that a redesign moves is in one of them at least, in pairs with others."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 20
DP2, TP2, DP2TP2, RP2DP2 = (("dp", 2),), (("tp", 2),), (("dp", 2), ("tp", 2)), (("rp", 2), ("dp", 2))
STATES = "params=nvme,opt=nvme"


@dataclass(frozen=True)
class Case:
    """A run: what is trained, where, and how; `mesh` without axes is one process."""

    model: str = "llama"
    mesh: tuple[tuple[str, int], ...] = ()
    stage: int = 0
    policy: str = "fp32"
    optimizer: str = "adamw"
    offload: str = ""
    frozen: str | None = None
    reduce: str = "fast"
    sequence: bool = False
    reshard: bool = True
    layers: int = 3
    micro_batches: int = 1
    remat: str = "none"
    compiled: bool = False
    kernels: str = "auto"
    prefetch: int = 1
    donate: bool = True
    update: str = "end"
    average: float = 0.0
    spike: bool = False


CASES: dict[str, Case] = {
    # One process
    "gpt2 dropout micro": Case("gpt2", micro_batches=2),
    "llama pure": Case(donate=False),
    "llama bf16": Case(policy="bf16", micro_batches=4),
    "llama reference kernels": Case(kernels="reference"),
    "llama canonical": Case(reduce="canonical", micro_batches=4),
    "gpt2 fp16": Case("gpt2", policy="fp16", micro_batches=2),
    "mixtral": Case("mixtral", remat="every:2"),
    "mlp sgd": Case("mlp", optimizer="sgd momentum"),
    "lora": Case("lora", frozen=r"^(?!.*_lora_[ab]$)", policy="bf16"),
    "plain function": Case("plain", micro_batches=2, average=0.9),
    "remat full": Case("gpt2", remat="full", policy="bf16"),
    "remat selective": Case(remat="selective:0.5"),
    "compiled": Case("mlp", compiled=True, remat="selective:0.5"),
    "compiled bf16 remat": Case("mlp", compiled=True, policy="bf16", remat="full", micro_batches=2),
    "spike": Case(spike=True, optimizer="sgd"),
    "average": Case(average=0.9, policy="bf16"),
    "average pure": Case("mlp", average=0.9, donate=False, optimizer="lion"),
    "muon": Case(optimizer="muon"),
    "lamb": Case(optimizer="lamb", policy="bf16"),
    "adafactor": Case("gpt2", optimizer="adafactor"),
    "adamw 8bit": Case(optimizer="adamw 8bit", policy="bf16"),
    "adamw bf16": Case(optimizer="adamw bf16"),
    "accumulate": Case("mlp", optimizer="accumulate"),
    "host": Case(policy="bf16", offload="params=host,opt=host,grads=host"),
    "host acts": Case("gpt2", offload="opt=host:0.5,acts=host", remat="full"),
    "nvme": Case(policy="bf16", offload=STATES, micro_batches=2),
    "nvme all": Case("gpt2", policy="bf16", offload=f"{STATES},grads=nvme,acts=nvme", remat="full", micro_batches=2),
    "nvme backward": Case(offload=STATES, update="backward", optimizer="adamw unclipped"),
    "nvme average": Case("mixtral", offload=STATES, average=0.9, policy="bf16"),
    "nvme lion fp16": Case(offload="opt=nvme", optimizer="lion", policy="fp16"),
    # Two
    "dp2 stage 0": Case(mesh=DP2, micro_batches=2),
    "dp2 stage 1 8bit": Case("gpt2", mesh=DP2, stage=1, policy="bf16", optimizer="adamw 8bit"),
    "dp2 stage 2 fp16": Case(mesh=DP2, stage=2, policy="fp16", micro_batches=2),
    "dp2 stage 2 full": Case("mlp", mesh=DP2, stage=2, reduce="once", micro_batches=4, optimizer="lamb"),
    "dp2 stage 3 mixtral": Case("mixtral", mesh=DP2, stage=3, policy="bf16", prefetch=0),
    "dp2 stage 3 canonical": Case(mesh=DP2, stage=3, reduce="canonical", micro_batches=2),
    "dp2 stage 3 whole": Case("gpt2", mesh=DP2, stage=3, reshard=False, prefetch=2, average=0.9, remat="every:2"),
    "dp2 stage 3 muon": Case(mesh=DP2, stage=3, optimizer="muon"),
    "dp2 stage 3 adafactor": Case(mesh=DP2, stage=3, optimizer="adafactor", policy="bf16"),
    "dp2 stage 3 lora": Case("lora", mesh=DP2, stage=3, frozen=r"^(?!.*_lora_[ab]$)"),
    "dp2 stage 3 compiled": Case(mesh=DP2, stage=3, compiled=True),
    "dp2 stage 3 nvme": Case(mesh=DP2, stage=3, policy="bf16", offload=STATES),
    "dp2 stage 3 host average": Case(mesh=DP2, stage=3, policy="bf16", offload="opt=host,grads=host", average=0.9),
    "dp2 stage 3 spike pure": Case("mlp", mesh=DP2, stage=3, donate=False, spike=True, optimizer="sgd"),
    "dp2 stage 3 plain": Case("plain", mesh=DP2, stage=3, micro_batches=2),
    "tp2": Case("gpt2", mesh=TP2, policy="bf16"),
    "tp2 sequence": Case(mesh=TP2, sequence=True, micro_batches=2, remat="full"),
    # Four
    "dp2 tp2 stage 3": Case(mesh=DP2TP2, layers=2, stage=3, policy="bf16", average=0.9),
    "dp2 tp2 stage 2 sequence": Case("gpt2", mesh=DP2TP2, layers=2, stage=2, sequence=True, micro_batches=2),
    "dp2 tp2 stage 1 mixtral": Case("mixtral", mesh=DP2TP2, layers=2, stage=1, micro_batches=2),
    "dp2 tp2 stage 3 muon": Case(mesh=DP2TP2, layers=2, stage=3, optimizer="muon"),
    "dp2 tp2 stage 3 canonical": Case(mesh=DP2TP2, layers=2, stage=3, reduce="canonical", micro_batches=2),
    "rp2 dp2 stage 3": Case(mesh=RP2DP2, layers=2, stage=3, policy="bf16", micro_batches=2),
    "rp2 dp2 stage 1 canonical": Case("gpt2", mesh=RP2DP2, layers=2, stage=1, reduce="canonical", policy="fp16"),
}


# -- the command line

OLD_FLAGS = {"--prompt": "--sample"}  # of `fzero pretrain`: today's name -> the one before it


@functools.cache
def pretrain_help(tree: str) -> str:
    """What `fzero pretrain --help` of the fzero in `tree` prints."""
    command = [sys.executable, "-m", "fzero", "pretrain", "--help"]
    environment = {**os.environ, "PYTHONPATH": tree}
    # In that folder, as -m looks there first.
    return subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def flags_in(tree: str, words: Sequence[str]) -> list[str]:
    """The arguments of `fzero pretrain` with the flags that the fzero in `tree` has."""
    old = {new: name for new, name in OLD_FLAGS.items() if not re.search(rf"{new}\b", pretrain_help(tree))}
    return [old.get(word, word) for word in words]


TEXT = "\n".join(f"line {i}: {i * i} is the square of {i}" for i in range(400))
SMALL = {"n_layers": 2, "d_model": 16, "d_ff": 32, "n_heads": 4, "n_kv_heads": 2}
TINY = (
    *shlex.split("--model llama-tiny --batch 8 --micro-batch 2 --seq-len 16 --precision fp32 --data text.txt"),
    *shlex.split("--peak-tflops 1 --steps 6"),
    *(part for name, size in SMALL.items() for part in ("--set", f"model.{name}={size}")),
    *shlex.split("--set train.compiled=false --set precision.fp32_matmul=default --set train.ema_decay=0.5"),
    *shlex.split("--set train.eval_batches=2 --set train.eval_every=3 --out run"),
)
RESUME = ("--out", "run", "--resume", "--peak-tflops", "1")
# name -> (processes, the arguments of one `fzero pretrain` after another in one folder)
COMMANDS: dict[str, tuple[int, tuple[tuple[str, ...], ...]]] = {
    "cli one process": (1, ((*TINY, "--prompt", ""),)),
    "cli one process nvme resume": (
        1,
        (
            (
                *TINY,
                *shlex.split("--offload params=nvme,opt=nvme --nvme disk --set optim.name=adamw --stop-at 3 --prompt"),
                "",
            ),
            (*RESUME, "--prompt", ""),
        ),
    ),
    "cli dp=2 zero=3 resume": (
        2,
        ((*TINY, *shlex.split("--zero 3 --stop-at 3 --prompt"), ""), (*RESUME, "--prompt", "")),
    ),
}
