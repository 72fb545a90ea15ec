"""Long sequences on one process under a memory limit: fzero beside plain PyTorch, and the peak beside the plan's.

    python benchmarks/long.py --json benchmarks/results/long.json [--tokens 16384 --tokens 65536]

For each length a step of the model by fzero (the MLP for 1024 tokens at a time, remat full, bfloat16), and one whose
layers take LAYER_TOKENS at a time, each in a process of its own, whose private writable memory (RLIMIT_DATA) may grow
by `--factor` times the planned peak of tensors and BESIDE; then forward and backward pass of the same model as a
torch.nn.Module in bfloat16 with scaled_dot_product_attention and whole logits, with and without torch.utils.checkpoint
around each block, without an optimizer, under the limit of the first. Up to UNLIMITED tokens PyTorch also runs without
a limit, which shows what it takes.
Results are kept as they come; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import turns  # noqa: E402

CHUNK = 1024
LAYER_TOKENS = 4096
BESIDE = 128 << 20  # bytes for what is no tensor: modules imported late, stacks of threads, what libraries keep
UNLIMITED = 16384  # tokens up to which PyTorch runs without a limit too
WARM = 256  # tokens of the step before the measured one
# Freed memory goes back to the system, so that the limit is of memory in use.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}


def status(name: str) -> int:
    """A field of this process's status in bytes: VmData, VmRSS or VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def limit_growth(growth: int) -> None:
    """From here on this process may have `growth` more bytes of private writable memory; 0: no limit."""
    if growth:
        most = status("VmData") + growth
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def config_of(model: str, tokens: int, layer_tokens: int = 0) -> Any:
    """The RunConfig of a step of one row of so many tokens."""
    from fzero.planner.plan import config_for

    settings = {"data.seq_len": tokens, "model.max_len": tokens, "model.mlp_tokens": CHUNK, "train.remat": "full"}
    settings |= {"train.batch": 1, "train.micro_batch": 1, "train.compiled": False, "train.measure_every": 0}
    settings |= {
        "model.layer_tokens": layer_tokens,
        "precision.policy": "bf16",
        "optim.name": "adamw",
        "train.memory_check": False,
    }
    return config_for(model, settings)


def batch_of(vocabulary: int, tokens: int) -> dict[str, Tensor]:
    """One row of random tokens."""
    drawn = torch.randint(0, vocabulary, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
    rest = {"documents": torch.zeros(1, tokens, dtype=torch.int32), "mask": torch.ones(1, tokens, dtype=torch.bool)}
    return {"tokens": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous(), **rest}


def run_fzero(model: str, tokens: int, growth: int, layer_tokens: int = 0) -> dict[str, Any]:
    """{"peak_bytes", "loss"} of a second step, which begins with all that a run keeps between steps."""
    from fzero.run.measure.live_bytes import MemoryTrace, recorded
    from fzero.run.setup import build
    from fzero.sharding import one_process

    config = config_of(model, tokens, layer_tokens)
    limit_growth(growth)
    mesh = one_process()
    job = build.build(config, mesh)
    state = build.first_state(job)
    state, _ = job.train_step(state, batch_of(config.model.vocab_size, WARM))
    batch = batch_of(config.model.vocab_size, tokens)
    record = MemoryTrace(state, batch)
    with recorded(record, mesh.ledger):
        state, metrics = job.train_step(state, batch)
    return {"peak_bytes": record.peak, "loss": float(metrics.loss)}


class Block(nn.Module):
    """A block of a Llama."""

    def __init__(self, c: Any):
        super().__init__()
        d, self.heads, self.groups, self.size = c.d_model, c.n_heads, c.n_kv_heads, c.key_dim
        self.norm_1, self.norm_2 = nn.RMSNorm(d, c.norm_eps), nn.RMSNorm(d, c.norm_eps)
        self.q, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.k, self.v = (nn.Linear(d, self.groups * self.size, bias=False) for _ in range(2))
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((d, c.d_ff), (d, c.d_ff), (c.d_ff, d)))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D] -> x."""
        h = self.norm_1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))

        def turn(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        out = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def run_torch(model: str, tokens: int, growth: int, checkpoint: bool) -> dict[str, Any]:
    """The same of forward and backward pass of the nn.Module."""
    from torch.utils.checkpoint import checkpoint as again

    from fzero import models
    from fzero.kernels.rope import rope_frequencies
    from fzero.run.measure.live_bytes import LiveBytes

    c: Any = models.preset(model)
    limit_growth(growth)
    embed, blocks = nn.Embedding(c.vocab_size, c.d_model), nn.ModuleList(Block(c) for _ in range(c.n_layers))
    norm, head = nn.RMSNorm(c.d_model, c.norm_eps), nn.Linear(c.d_model, c.vocab_size, bias=False)
    whole = nn.ModuleList([embed, blocks, norm, head]).to(torch.bfloat16)
    batch = batch_of(c.vocab_size, tokens)
    angle = torch.arange(tokens)[:, None].float() * rope_frequencies(c.key_dim, c.rope_theta, None)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    with LiveBytes(dict(whole.named_parameters()), batch, cos, sin) as live:
        x = embed(batch["tokens"])
        for block in blocks:
            x = again(block, x, cos, sin, use_reentrant=False) if checkpoint else block(x, cos, sin)
        loss = F.cross_entropy(head(norm(x)).float().flatten(0, 1), batch["targets"].flatten())
        loss.backward()
    return {"peak_bytes": live.peak, "loss": float(loss.detach())}


RUNS = {
    "fzero": run_fzero,
    "fzero, layers in chunks": lambda model, tokens, growth: run_fzero(model, tokens, growth, LAYER_TOKENS),
    "torch": lambda model, tokens, growth: run_torch(model, tokens, growth, False),
    "torch, checkpointed": lambda model, tokens, growth: run_torch(model, tokens, growth, True),
}


def work(who: str, model: str, tokens: int, growth: int) -> None:
    """Run one of RUNS in this process and print what it found; memory that is not given ends it with a line."""
    began = time.perf_counter(), time.process_time()
    try:
        found = {"died": "", **RUNS[who](model, tokens, growth)}
    except (MemoryError, RuntimeError) as error:
        words = str(error).splitlines() or [type(error).__name__]
        if isinstance(error, RuntimeError) and "memory" not in words[0]:
            raise
        found = {"died": words[0][:160]}
    found |= {"seconds": time.perf_counter() - began[0], "cpu_s": time.process_time() - began[1]}
    print(json.dumps({**found, "peak_rss_bytes": status("VmHWM")}), flush=True)


def start(who: str, model: str, tokens: int, growth: int) -> dict[str, Any]:
    """The result of `work` in a process of its own."""
    command = [sys.executable, __file__, "--worker", who, "--model", model, "--tokens", str(tokens)]
    done = subprocess.run(
        [*command, "--growth", str(growth)], capture_output=True, text=True, env={**os.environ, **MALLOC}, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:  # ended by a signal, or where no line could be printed any more
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"died": f"exit {done.returncode}: {last[:160]}", "seconds": None, "cpu_s": None}
    return json.loads(lines[-1])


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama-tiny")
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--factor", type=float, default=1.1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--growth", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    lengths = args.tokens or [16384, 65536]
    if args.worker:
        work(args.worker, args.model, lengths[0], args.growth)
        return
    table: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"runs": {}}
    table |= {
        "command": f"python benchmarks/long.py {' '.join(sys.argv[1:])}",
        "model": args.model,
        "chunk": CHUNK,
        "machine": turns.machine(),
    }

    def keep(key: str, value: dict[str, Any]) -> None:
        table["runs"][key] = value
        print(f"{key}: {json.dumps(value)}", flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(table, indent=1) + "\n")

    from fzero.planner.max_sequence import trace_passes
    from fzero.planner.plan import device_for, resolve_for

    here = device_for("here")
    for tokens in lengths:
        for plan, layer_tokens in (("planned", 0), ("planned, layers in chunks", LAYER_TOKENS)):
            if f"{tokens} {plan}" not in table["runs"]:
                config = resolve_for(config_of(args.model, tokens, layer_tokens), here)
                keep(f"{tokens} {plan}", {"peak_bytes": trace_passes(config, here.target).peak_bytes})
        for who in RUNS:
            plan = "planned, layers in chunks" if "chunks" in who else "planned"
            growth = int(args.factor * table["runs"][f"{tokens} {plan}"]["peak_bytes"]) + BESIDE
            if f"{tokens} {who}" not in table["runs"]:
                keep(f"{tokens} {who}", {"growth_bytes": growth, **start(who, args.model, tokens, growth)})
            if "torch" in who and tokens <= UNLIMITED and f"{tokens} {who}, no limit" not in table["runs"]:
                keep(f"{tokens} {who}, no limit", start(who, args.model, tokens, 0))


if __name__ == "__main__":
    main()
