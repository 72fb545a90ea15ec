"""torch.distributed.pipelining over gloo: the module of `torch_module.py` cut into stages, eager, with fused AdamW.

fp32 alone. A stage is a module of its own (`PipelineStage`); the loss of a micro-batch is the mean of the last stage's
logits' cross entropy, and gradients are scaled by the number of micro-batches (`scale_grads`). The loss that a step
returns is summed over the ranks by one all_reduce, as a run that reports it does.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

from peers import problem, torch_module

SWITCHES = frozenset({"onednn"})
# By our name: theirs, the stages of a rank, whether they go down the ranks and up again.
SCHEDULES = {
    "gpipe": ("ScheduleGPipe", 1, False),
    "1f1b": ("Schedule1F1B", 1, False),
    "interleaved": ("ScheduleInterleaved1F1B", problem.CHUNKS, False),
    "zb-h1": ("ScheduleInterleavedZeroBubble", 1, False),
    "interleaved-zb": ("ScheduleInterleavedZeroBubble", problem.CHUNKS, False),
    "zb-v": ("ScheduleZBVZeroBubble", 2, True),
    "dualpipe-v": ("ScheduleDualPipeV", 2, True),
}


class Stage(nn.Module):
    """Consecutive blocks of a model, with its embedding if they are the first and its head if they are the last."""

    def __init__(self, model: torch_module.Llama, number: int, count: int):
        super().__init__()
        n = len(model.blocks) // count
        self.embed = model.embed if number == 0 else None
        self.blocks = nn.ModuleList(list(model.blocks)[number * n : (number + 1) * n])
        last = number == count - 1
        self.norm, self.head = (model.norm, model.head) if last else (None, None)
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make(
    weights: dict[str, np.ndarray],
    config: problem.Config,
    dtype: str,
    switches: frozenset[str],
    *,
    schedule: str,
    parts: int,
) -> Callable[[dict[str, np.ndarray]], float]:
    """A training step of this rank: the whole batch -> its loss before the update."""
    problem.reject_unknown_switches("pipelining", switches, SWITCHES)
    if schedule not in SCHEDULES or dtype != "fp32":
        raise ValueError(f"pipelining has {', '.join(SCHEDULES)} in fp32, not {schedule} in {dtype}")
    name, chunks, up_again = SCHEDULES[schedule]
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, count = torch_module.build(weights, config), ranks * chunks
    mine = [rank, count - 1 - rank] if up_again else [rank + ranks * i for i in range(chunks)]
    modules = [Stage(model, number, count) for number in mine]
    del model  # what no stage of this rank has
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(module, i, count, device) for module, i in zip(modules, mine)]
    kind, single = getattr(pipelining, name), name in ("ScheduleGPipe", "Schedule1F1B")
    table = kind(stages[0] if single else stages, n_microbatches=parts, loss_fn=cross_entropy)
    optimizer = torch_module.adamw(nn.ModuleList(modules))
    first, last = 0 in mine, count - 1 in mine

    def step(batch: dict[str, np.ndarray]) -> float:
        tokens, targets = torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["targets"])
        losses: list[Tensor] = []
        given = (tokens,) if first else ()
        if last:
            table.step(*given, target=targets, losses=losses, return_outputs=False)
        else:
            table.step(*given, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = torch.stack([x.detach() for x in losses]).mean() if last else torch.zeros(())
        dist.all_reduce(mean)
        return mean.item()

    return step
