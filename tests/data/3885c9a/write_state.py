"""Run by the code of 3885c9a (README.md): a checkpoint of two ranks whose optimizer's state was on a disk, and what
that code itself reads in it."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from offload_worker import digest

import fzero
from fzero import checkpoint, models, optim
from fzero.core import precision
from fzero.train.batch import local_batch


def program(mesh, stage, offload=""):
    model = models.mlp(models.MLPConfig(vocab_size=16, max_len=8, d_model=8, n_layers=2, d_ff=8))
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2, weight_decay=0.1))
    return model, tx, fzero.zero_plan(stage, model, mesh, offload=offload, policy=precision.bf16())


def main(folder, metrics):
    dist.init_process_group("gloo")
    mesh = fzero.make_mesh({"dp": 2}, device="cpu")
    model, tx, plan = program(mesh, 3, "opt=nvme")
    nvme = fzero.Nvme(f"{folder}/store", buffer_bytes=4 << 20)
    step = fzero.make_train_step(model, tx, plan, nvme=nvme)
    state = fzero.init_state(model, tx, plan, seed=0, nvme=nvme)
    for i in range(3):
        rows = torch.randint(0, 16, (4, 9), generator=torch.Generator().manual_seed(i))
        state, _ = step(state, local_batch({"tokens": rows[:, :-1], "targets": rows[:, 1:]}, mesh))
    path = checkpoint.save(f"{folder}/state", state, step=3, specs=fzero.state_specs(plan, tx), mesh=mesh)
    dist.barrier()
    if mesh.rank == 0:
        model, tx, plan = program(fzero.one_process(), 0)
        leaves = digest(checkpoint.restore(path, fzero.init_state(model, tx, plan, seed=1)))
        rows = [json.loads(line) for line in Path(metrics).read_text().splitlines()]
        losses = {f"{row['step']} {key}": row[key] for row in rows[4:] for key in ("loss", "val_loss") if key in row}
        Path(folder, "recorded.json").write_text(json.dumps({"losses": losses, "leaves": leaves}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
