"""How much memory imports and an export need: `migrate_worker.py FOLDER` prints what, and the bytes that the process
grew by at most.

By the kernel's high-water mark (VmHWM in /proc/self/status), which is set back before each.
"""

import gc
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from fzero import models
from fzero.checkpoint import huggingface
from fzero.core import prng, pytree
from fzero.run import weights

SIZES = models.LlamaConfig(vocab_size=4096, max_len=256, d_model=512, n_layers=16, n_heads=8, n_kv_heads=8, d_ff=1408)
SMALL = models.LlamaConfig(vocab_size=64, max_len=64, d_model=32, n_layers=2, n_heads=2, n_kv_heads=2, d_ff=64)


def said(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])


def grown(action) -> int:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = said("VmRSS")
    action()
    return said("VmHWM") - before


def make(folder: Path, sizes) -> None:
    params = models.init_params(models.build(sizes), prng.key(0))
    huggingface.save_hf(folder / "hf", sizes, params)
    weights = load_file(folder / "hf" / "model.safetensors")
    dcp.save({"model": weights}, checkpoint_id=folder / "dcp", no_dist=True)
    for name, weight in weights.items():
        (folder / "universal" / "zero" / name).mkdir(parents=True)
        torch.save(weight.reshape(-1), folder / "universal" / "zero" / name / "fp32.pt")
    states = {"param_shapes": [{name: weight.shape for name, weight in weights.items()}]}
    torch.save(states, folder / "universal" / "mp_rank_00_model_states.pt")
    print("whole", sum(leaf.nbytes for leaf in pytree.leaves(params)))
    print("leaf", max(leaf.nbytes for leaf in pytree.leaves(params)))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # that this is one process
    sys.stdout, shown = open(folder / "small.txt", "w"), sys.stdout  # noqa: SIM115
    work(folder / "small", SMALL)  # what is loaded at first use
    sys.stdout = shown
    work(folder / "large", SIZES)


def work(folder: Path, sizes) -> None:
    make(folder, sizes)
    for kind in ("hf", "dcp", "universal"):
        peak = grown(
            lambda kind=kind: weights.import_weights(
                folder / kind, folder / f"run-{kind}", folder / "hf" / "config.json"
            )
        )
        print(kind, peak)
    print("export", grown(lambda: weights.export_hf(folder / "run-universal", folder / "out")))
    ours, theirs = load_file(folder / "out" / "model.safetensors"), load_file(folder / "hf" / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
