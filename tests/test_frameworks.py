"""fzero's step in the loops of Lightning Fabric and Accelerate: the programs of docs/frameworks.md on two processes;
their loaders resumed."""

import itertools
import os
import re
import subprocess
import warnings
from pathlib import Path

import forked
import pytest
import test_docs
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from fzero import data

ROOT = Path(__file__).parent.parent
BLOCKS = test_docs.blocks_of(ROOT / "docs/frameworks.md")
PROGRAMS = {re.match(r"# needs: (\w+)", block.code)[1]: block.code for block in BLOCKS}


def output_of(command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("package", PROGRAMS)
def test_on_two_processes_they_end_where_one_does(package, tmp_path):
    pytest.importorskip(package)
    (tmp_path / "program.py").write_text(PROGRAMS[package])
    launch = [f"{forked.programs()}/torchrun", "--standalone", "--nproc-per-node", "2", "program.py"]
    two = re.findall(r"loss (\d\.\d+)", output_of(launch, tmp_path))
    if package == "lightning_fabric":  # Accelerate's shuffling has no seed there
        one = re.findall(r"loss (\d\.\d+)", output_of([f"{forked.programs()}/script", "program.py"], tmp_path))
        assert [float(x) for x in two] == pytest.approx([float(x) for x in one], abs=2e-4) and len(one) == 1
        assert len((tmp_path / "fabric/lightning_logs/version_0/metrics.csv").read_text().splitlines()) == 41


def batches_of(loader, count):
    return [batch[0].tolist() for batch in itertools.islice(loader, count)]


def plain(seed=3):
    samples = TensorDataset(torch.arange(24))
    return DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples, 1, 0, seed=seed))


def test_a_loader_of_fabric_counts_epochs_itself_and_is_refused_on_resume():
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    whole = batches_of(data.from_loader(plain()), 20)
    assert batches_of(data.from_loader(fabric.setup_dataloaders(plain())), 20) == whole
    with pytest.raises(ValueError, match="_FabricDataLoader set its sampler to epoch 1 and this is epoch 2"):
        next(data.from_loader(fabric.setup_dataloaders(plain()), 48))


@pytest.mark.parametrize("stateful", [False, True], ids=["counted", "by its state"])
def test_a_loader_of_accelerate_resumes(stateful):
    accelerate = pytest.importorskip("accelerate")
    if stateful:
        pytest.importorskip("torchdata")

    def make():
        config = accelerate.DataLoaderConfiguration(use_stateful_dataloader=stateful)
        with warnings.catch_warnings():  # torchdata 0.11 asks torch 2.13 for what is deprecated there
            warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
            return accelerate.Accelerator(cpu=True, dataloader_config=config).prepare(plain())

    whole = batches_of(data.from_loader(make()), 20)
    assert whole == batches_of(data.from_loader(plain()), 20)
    for killed in range(15):
        batches = data.from_loader(make())
        assert batches_of(batches, killed) == whole[:killed]
        saved = batches.state_dict() if stateful else None
        again = data.from_loader(make(), 4 * killed, saved=saved)
        if stateful and killed and killed % 6 == 0:  # Accelerate reads a batch ahead, and at the end begins again
            with pytest.raises(ValueError, match=r"begins its epoch again .* resume by counting"):
                next(again)
        else:
            assert batches_of(again, 5) == whole[killed : killed + 5], killed
