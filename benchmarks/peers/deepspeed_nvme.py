"""DeepSpeed on a disk: its aio handle, and training with ZeRO-Infinity's optimizer states on NVMe. A process that
`nvme.py` drives.

    DS_ACCELERATOR=cpu python -m peers.deepspeed_nvme        (in the folder `benchmarks`; needs libaio's headers to
    build)

The handle's settings are the sizes of fio's: 4 MiB blocks, 8 deep; and its own thread each for reading and writing, as
its pipelined swapper has them. "locked" is memory of its `new_cpu_locked_tensor`, "ordinary" is torch's.

Training is stage 3 on one process with DeepSpeedCPUAdam: "deepspeed" at the defaults of its `offload_optimizer` and
`aio` sections, "deepspeed+tuned" with reads and writes pipelined, 8 MiB blocks and two threads a transfer (huge pages
are the driver's to give, by the environment). Both have sub-groups and buckets of a layer: at its defaults a sub-group
holds 1e9 elements, the whole model at once. It also swaps gradients: 16 bytes a parameter each way in fp32, against 12.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peers import problem, torch_module
from peers.disk_engines import counters, serve, since

PLANES = 3  # master, m, v
BUCKET = 12_000_000  # elements: about a layer of the model
SHIPPED_AIO = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}
TUNED_AIO = SHIPPED_AIO | {"block_size": 8 << 20, "intra_op_parallelism": 2}


def aio(order: dict[str, Any]) -> dict[str, Callable]:
    """The operations of `nvme.py` through two aio handles, one to read and one to write."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    blocks, plane_bytes, locked = order["blocks"], order["plane_bytes"], "locked" in order["contender"]
    module = AsyncIOBuilder().load()
    reader, writer = (module.aio_handle(4 << 20, 8, False, True, 1) for _ in range(2))
    source, target = (str(Path(order["folder"]) / name) for name in ("a.bin", "b.bin"))

    def plane() -> torch.Tensor:
        if locked:
            return reader.new_cpu_locked_tensor(plane_bytes, torch.empty(0, dtype=torch.uint8))
        return torch.empty(plane_bytes, dtype=torch.uint8)

    ring = [[plane().fill_(slot) for _ in range(PLANES)] for slot in range(4)]
    at_once = blocks if locked else 1  # an ordinary tensor costs a locked copy for every transfer submitted

    def start(transfer: Callable, path: str, block: int) -> None:
        for k, x in enumerate(ring[block % len(ring)]):
            transfer(x, path, (block * PLANES + k) * plane_bytes)

    def run(reading: bool, writing: bool) -> None:
        for first in range(0, blocks, at_once):
            for block in range(first, first + at_once):
                if reading:
                    start(reader.async_pread, source, block)
                if writing:
                    start(writer.async_pwrite, target, block)
            for handle, used in ((reader, reading), (writer, writing)):
                if used:
                    handle.wait()

    def stream(compute_s: float) -> None:
        """As its pipelined swapper does it: block i + 1 is read and block i - 1 written while i is computed."""
        start(reader.async_pread, source, 0)
        for block in range(blocks):
            reader.wait()
            if block + 1 < blocks:
                start(reader.async_pread, source, block + 1)
            time.sleep(compute_s)
            if block:
                writer.wait()
            start(writer.async_pwrite, target, block)
        writer.wait()

    return {
        "read": lambda _: run(True, False),
        "write": lambda _: run(False, True),
        "mixed": lambda _: run(True, True),
        "stream": stream,
    }


def settings(order: dict[str, Any], switches: list[str]) -> dict[str, Any]:
    """DeepSpeed's config."""
    offload: dict[str, Any] = {
        "device": "nvme",
        "nvme_path": f"{order['folder']}/{order['contender']}",
        "buffer_count": 5,
    }
    if "tuned" in switches:
        offload |= {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
    zero = {"stage": 3, "offload_optimizer": offload, "sub_group_size": BUCKET, "reduce_bucket_size": BUCKET}
    zero |= {"stage3_prefetch_bucket_size": BUCKET, "stage3_max_live_parameters": 3 * BUCKET}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "aio": TUNED_AIO if "tuned" in switches else SHIPPED_AIO,
    }
    if order["dtype"] != "fp32":
        bf16 = {"enabled": True}
        if order["dtype"] == "bf16-states":
            bf16 |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        config["bf16"] = bf16
    return config


def training(order: dict[str, Any]) -> dict[str, Callable]:
    """{"step": batch number -> loss, and the cost of `engine.step`}."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    _, *switches = order["contender"].split("+")
    config = problem.Config(**order["config"])
    torch.set_num_threads(order["threads"])
    deepspeed.init_distributed("gloo", verbose=False)
    model = torch_module.build(problem.weights(config, order["seed"]), config)
    betas, fp32_states = (problem.BETA_1, problem.BETA_2), order["dtype"] != "bf16-states"
    optimizer = DeepSpeedCPUAdam(
        model.parameters(),
        problem.LR,
        betas=betas,
        eps=problem.EPS,
        weight_decay=problem.WEIGHT_DECAY,
        fp32_optimizer_states=fp32_states,
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(order, switches))

    def step(number: int) -> dict[str, float]:
        batch = problem.batch_at(config, order["batch"], order["seed"], number)
        loss = engine(torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["targets"]))
        engine.backward(loss)
        before = counters()
        engine.step()
        return since(before, "optimizer_") | {"loss": loss.item()}

    return {"step": step}


def versions() -> dict[str, str]:
    import deepspeed

    return {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "numpy": np.__version__}


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    serve({"disk": aio, "steps": training}, versions)
