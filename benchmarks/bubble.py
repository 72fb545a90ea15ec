"""Pipelines whose layers sleep: the bubble of each schedule, measured beside `pipeline.play` with the measured time of
a message.

A layer sleeps in its forward pass, in its gradient by inputs and in its gradient by weights, and computes next to
nothing, so ranks need no core of their own. All ranks make a step of each schedule in turn.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from spawned import answer_of_ranks
from torch import Tensor

import fzero
from fzero import models, optim
from fzero.comm.rank_tables import Receiver, Sender
from fzero.sharding import Mesh
from fzero.sharding.pipeline import FAMILIES, play

CHUNKS = 2  # of the schedules that take several; the model has a layer for each
ROWS, LENGTH, WIDTH = 2, 8, 16  # of a micro-batch


@torch.library.custom_op("bench::sleep", mutates_args=())
def sleep(x: Tensor, seconds: float) -> Tensor:
    """A copy of x, after so many seconds; an operator, as a traced backward pass runs no Python."""
    time.sleep(seconds)
    return x.clone()


@sleep.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


class Sleeping(torch.autograd.Function):
    """x + w, w of x's last dim, whose forward pass and whose gradients by x and by w take so many seconds each."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, seconds: float) -> Tensor:
        return sleep(x + w, seconds)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.seconds = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return sleep(grad, ctx.seconds), sleep(grad.sum((0, 1)), ctx.seconds), None


def sleeping_model(ranks: int, layer_s: float) -> models.Model:
    """An embedding and a head of the smallest size, and layers that sleep."""
    config = models.MLPConfig(vocab_size=8, d_model=WIDTH, d_ff=WIDTH, n_layers=ranks * CHUNKS, max_len=LENGTH)
    return models.mlp(config)._replace(block=lambda p, x, ctx: Sleeping.apply(x, p["scale"], layer_s))


def message_s(mesh: Mesh, repeats: int = 50) -> float:
    """Seconds of a message of a border's size between two ranks: half of a median round trip."""
    axis, x = mesh["pp"], torch.zeros(ROWS, LENGTH, WIDTH)
    assert axis.communicator is not None
    dist.barrier()
    found = [0.0]
    if axis.rank < 2:
        there, here = f"bench:{axis.rank}-{1 - axis.rank}", f"bench:{1 - axis.rank}-{axis.rank}"
        sender = Sender(axis.communicator, 1 - axis.rank, there, 2)
        receiver, shapes = Receiver(axis.communicator, 1 - axis.rank, here), [(tuple(x.shape), x.dtype)]
        for _ in range(repeats):
            receiver.expect(shapes, x.device)
            begin = time.perf_counter()
            if axis.rank == 0:
                sender.send([x])
            receiver.receive()
            if axis.rank == 1:
                sender.send([x])
            found.append((time.perf_counter() - begin) / 2)
        sender.close()
    mine = torch.tensor(statistics.median(found) if axis.rank == 0 else 0.0)
    dist.broadcast(mine, 0)
    return float(mine)


def updates_of(text: str) -> tuple[str, int]:
    """(the schedule, its delayed updates a step) of a text such as 1f1b/4; 0 of 1f1b, whose updates are not delayed."""
    name, _, updates = text.partition("/")
    return name, int(updates or 0)


def make_step(mesh: Mesh, text: str, parts: int, layer_s: float) -> tuple[Any, Callable[[], None]]:
    """(the schedule, a step by it), of so many micro-batches an update."""
    model, tx, (name, updates) = sleeping_model(mesh["pp"].size, layer_s), optim.sgd(0.0), updates_of(text)
    chunks, parts = FAMILIES[name].chunks or CHUNKS, parts * max(1, updates)
    plan = fzero.zero_plan(0, model, mesh, pipeline=fzero.Pipeline(name, chunks=chunks))
    plan = plan.with_updates(updates) if updates else plan
    execution = fzero.Execution(update="delayed" if updates else "end")
    train_step = fzero.make_train_step(model, tx, plan, micro_batches=parts, execution=execution)
    state = fzero.init_state(model, tx, plan, seed=0)
    tokens = torch.zeros(ROWS * parts, LENGTH, dtype=torch.int64)
    batch = fzero.local_batch({"tokens": tokens, "targets": tokens}, mesh, parts)

    def step() -> None:
        nonlocal state
        state, metrics = train_step(state, batch)
        float(metrics.loss)

    return plan.schedule(parts)[0], step


def work(rank: int, order: dict[str, Any], port: int, answer: Connection) -> None:
    """A rank: the figures of each schedule, as `bubbles` returns them."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(order["ranks"]), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    mesh = fzero.make_mesh({"pp": order["ranks"]}, device="cpu")
    made = {name: make_step(mesh, name, order["parts"], order["layer_s"]) for name in order["schedules"]}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    wires, slept = [message_s(mesh)], [lasts(order["layer_s"])]
    for i in range(order["repeats"] + 1):
        for name, (_, step) in made.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[name] += [float(took)] if i else []  # the first tells shapes
        wires.append(message_s(mesh))
        slept.append(lasts(order["layer_s"]))
    answer.send(figures(made, seconds, statistics.median(wires), statistics.median(slept), order))
    mesh.close()


def lasts(seconds: float) -> float:
    """How long the operator of a layer that sleeps so many seconds takes here."""
    x = torch.zeros(ROWS, LENGTH, WIDTH)
    begin = time.perf_counter()
    sleep(x, seconds)
    return time.perf_counter() - begin


def figures(
    made: dict[str, Any], seconds: dict[str, list[float]], wire: float, slept: float, order: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row for each schedule: the step as measured and as played."""
    out = []
    for name, (schedule, _) in made.items():
        layers = order["ranks"] * CHUNKS // len(schedule.stages.ranks)  # of a stage
        one = slept * layers
        cost = {"F": one, "I": one, "W": one, "B": 2 * one}
        played = play(schedule, cost, wire).step
        work_s = order["parts"] * max(1, updates_of(name)[1]) * 3 * slept * CHUNKS
        median = statistics.median(seconds[name])
        out.append(
            {
                "schedule": name,
                "stages": len(schedule.stages.ranks),
                "step_s": seconds[name],
                "median_s": median,
                "spread": (max(seconds[name]) - min(seconds[name])) / median,
                "played_s": played,
                "measured_by_played": median / played,
                "bubble_s": median - work_s,
                "played_bubble_s": played - work_s,
                "message_s": wire,
                "layer_s": slept,
            }
        )
    return out


def bubbles(
    schedules: list[str], ranks: int = 4, parts: int = 8, layer_s: float = 0.03, repeats: int = 5
) -> list[dict[str, Any]]:
    """The figures of each schedule on so many ranks: `measured_by_played` is the quotient of the median step and of
    what `play` says for layers of the measured sleep and messages of the measured time."""
    order = {"ranks": ranks, "parts": parts, "layer_s": layer_s, "repeats": repeats, "schedules": schedules}
    return answer_of_ranks(work, order)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The figures as text."""
    lines = [f"{'schedule':16}{'stages':>7}{'step ms':>10}{'played':>9}{'ratio':>8}{'bubble ms':>11}{'played':>9}"]
    for row in rows:
        lines.append(
            f"{row['schedule']:16}{row['stages']:7}{row['median_s'] * 1e3:10.1f}{row['played_s'] * 1e3:9.1f}"
            f"{row['measured_by_played']:8.3f}{row['bubble_s'] * 1e3:11.1f}{row['played_bubble_s'] * 1e3:9.1f}"
        )
    return lines
