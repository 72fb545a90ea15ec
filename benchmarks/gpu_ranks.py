"""Ranks that share one GPU, for a machine that has no more: their steps beside those of one process.

    torchrun --standalone --nproc-per-node 2 benchmarks/gpu_ranks.py

NCCL takes a GPU for each rank, and gloo sends the host's memory alone; so each message goes by a copy in the host's
memory, and everything else is as with several GPUs. The exit code is 1 if the losses of a stage differ from those of
one process by more than their roundings."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fzero
from fzero import models, optim
from fzero.core import gpu

NEAR = 1e-5  # fp32: a sum over ranks has another order
STAGES = (0, 1, 2, 3)


class Arriving:
    """A message that is received in the host's memory, and copied to the device when it is waited for."""

    def __init__(self, work: Any, host: Tensor, out: Tensor) -> None:
        self.work, self.host, self.out = work, host, out

    def wait(self, *timeout: Any) -> None:
        self.work.wait(*timeout)
        self.out.copy_(self.host)


@contextlib.contextmanager
def by_the_host() -> Iterator[None]:
    """A context in which gloo's messages may be tensors of a GPU."""
    send, receive = dist.isend, dist.irecv

    def isend(x: Tensor, **options: Any) -> Any:
        return send(x.to(gpu.HOST), **options)

    def irecv(x: Tensor, **options: Any) -> Any:
        if not x.is_cuda:
            return receive(x, **options)
        host = torch.empty(x.shape, dtype=x.dtype, device=gpu.HOST)
        return Arriving(receive(host, **options), host, x)

    dist.isend, dist.irecv = isend, irecv
    try:
        yield
    finally:
        dist.isend, dist.irecv = send, receive


def losses(
    mesh: fzero.Mesh, device: torch.device, stage: int, tiny: bool, steps: int = 4, kernels: str = "auto"
) -> list[float]:
    """The losses and norms of some steps of a small Llama in fp32."""
    sizes = {"vocab_size": 64, "max_len": 16, "d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "d_ff": 32}
    if not tiny:
        sizes |= {"vocab_size": 4096, "max_len": 256, "d_model": 512, "n_layers": 4, "n_heads": 8, "d_ff": 1408}
    model = models.build(models.LlamaConfig(**sizes))
    plan = fzero.zero_plan(stage, model, mesh)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, impl=kernels))
    state = fzero.init_state(model, tx, plan, seed=0, device=device)
    step = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(kernels=kernels))
    shape = (8, sizes["max_len"])
    tokens = torch.randint(0, sizes["vocab_size"], shape, generator=torch.Generator().manual_seed(1))
    batch, found = {"tokens": tokens, "targets": tokens.roll(-1, 1)}, []
    own = {name: x.to(device) for name, x in fzero.local_batch(batch, mesh).items()}
    for _ in range(steps):
        state, metrics = step(state, own)
        found += [metrics.loss, metrics.grad_norm]
    return [float(x) for x in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes that mean nothing")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    device = gpu.HOST
    if args.device == "cuda":
        device = torch.device("cuda", 0)  # of all ranks
        gpu.select_device(device)
    mesh = fzero.make_mesh({"dp": dist.get_world_size()}, device="cpu")
    expected, failed = losses(fzero.one_process(), device, 0, args.tiny), []
    for stage in STAGES:
        with by_the_host():
            found = losses(mesh, device, stage, args.tiny)
        apart = max(abs(a - b) / abs(b) for a, b in zip(found, expected))
        failed += [stage] * (apart > NEAR)
        if mesh.rank == 0:
            print(f"stage {stage} on {mesh.size} ranks: {found}, apart from one process by {apart:.1e}", flush=True)
    mesh.close()
    dist.destroy_process_group()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
