"""What DeepSpeed leaves behind: `torchrun --nproc-per-node 2 deepspeed_worker.py CASE STAGE FOLDER [FROZEN]`.

Trains a model of hf_cases for two steps on the CPU in bfloat16, writes a checkpoint and the master weights as DeepSpeed
itself gathers them (truth.pt), and converts the checkpoint with deepspeed.checkpoint.ds_to_universal into
FOLDER/universal."""

import os
import subprocess
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from hf_cases import V, theirs


def main(case: str, stage: int, folder: Path, frozen: str = "") -> None:
    torch.set_num_threads(1)
    model = theirs(case).train()
    for name, p in model.named_parameters():
        p.requires_grad_(name != frozen)
    settings = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=settings
    )
    for step in range(2):
        ids = torch.randint(0, V, (1, 16), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()
    engine.save_checkpoint(str(folder), tag="global_step2")
    truth = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters() if p.requires_grad}
    if torch.distributed.get_rank() == 0:
        torch.save(truth, folder / "truth.pt")
        model.config.save_pretrained(folder)
        convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        places = ["--input_folder", str(folder / "global_step2"), "--output_folder", str(folder / "universal")]
        subprocess.run([*convert, *places, "--num_extract_workers", "1", "--num_merge_workers", "1"], check=True)
    torch.distributed.barrier()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
