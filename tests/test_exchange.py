"""Exports of runs: of any mesh, with master weights or an average, from checkpoints and from a disk."""

from pathlib import Path

import pytest
import torch
from close import assert_same
from launched import TINY, torchrun, write_text
from ranks import run
from safetensors.torch import load_file

import fzero
from fzero import checkpoint, models, optim
from fzero.checkpoint import huggingface
from fzero.cli import main
from fzero.core import precision, pytree
from fzero.run import recipe, run_folder, to_table, weights

SIZES = {"vocab_size": 64, "max_len": 16, "d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 24}
CONFIGS = {
    "llama": models.LlamaConfig(**SIZES),
    "gpt2": models.GPT2Config(**{name: size for name, size in SIZES.items() if name != "n_kv_heads"}),
    "mixtral": models.MoEConfig(**SIZES, n_experts=4, top_k=2, capacity_factor=0.0),
}


def state_of(mesh, name, stage, policy):
    """(a state whose master weights, parameters and average differ, its specs)."""
    model = models.build(CONFIGS[name])
    plan, tx = fzero.zero_plan(stage, model, mesh, policy=policy), optim.with_average(optim.adamw(1e-3), 0.9)
    state = fzero.init_state(model, tx, plan, seed=0)
    average = pytree.map(lambda x: x * 3, state.opt_state.average)
    return state._replace(opt_state=state.opt_state._replace(average=average)), fzero.state_specs(plan, tx)


def save_on(mesh, folder, name, stage, bf16):
    state, specs = state_of(mesh, name, stage, precision.bf16() if bf16 else precision.fp32())
    checkpoint.save(
        f"{folder}/{run_folder.CHECKPOINTS}",
        state,
        step=5,
        config=to_table(recipe("", CONFIGS[name])),
        specs=specs,
        mesh=mesh,
    )


@pytest.mark.each_value
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("name", "mesh", "stage"),
    [
        ("llama", {"dp": 2, "tp": 2}, 3),
        ("llama", {"dp": 4}, 1),
        ("gpt2", {"dp": 2, "rp": 2}, 2),
        ("mixtral", {"dp": 4}, 3),
    ],
)
def test_a_run_of_any_mesh(name, mesh, stage, bf16, tmp_path):
    folder = tmp_path / "run"
    run_folder.create_run(folder, recipe("", CONFIGS[name]), None)
    run(4, save_on, str(folder), name, stage, bf16, mesh=mesh)
    state, _ = state_of(fzero.one_process(), name, 0, precision.bf16() if bf16 else precision.fp32())
    for ema in (False, True):
        wanted = state.opt_state.average if ema else state.master if bf16 else state.params
        assert {leaf.dtype for leaf in pytree.leaves(wanted)} == {torch.float32}
        line, passed = weights.export_hf(folder, tmp_path / f"out{ema}", ema=ema)
        assert line.endswith(f"the model of {folder} after step 5") and passed == []
        config, params = huggingface.load_hf(tmp_path / f"out{ema}")
        assert config.d_model == 16
        assert_same(params, wanted)
        huggingface.save_hf(tmp_path / f"whole{ema}", CONFIGS[name], wanted)  # of the tree in memory
        assert_same(
            *(
                dict(sorted(load_file(tmp_path / f"{out}{ema}" / "model.safetensors").items()))
                for out in ("out", "whole")
            )
        )


@pytest.mark.exhaustive
def test_a_run_whose_state_is_on_a_disk(tmp_path):
    write_text(tmp_path)
    flags = ["--precision", "bf16", "--offload", "params=nvme,opt=nvme", "--zero", 3, "--steps", 2, "--prompt", ""]
    torchrun(tmp_path, 2, *TINY, *flags, "--out", "run")
    folder = tmp_path / "run"
    assert (folder / "nvme").is_dir() and not (folder / "checkpoints").exists()
    found = {}
    for ema in (False, True):
        line, passed = weights.export_hf(folder, tmp_path / f"out{ema}", ema=ema)
        assert "after step 2" in line and passed == []
        held = weights.load(folder, wide=True, ema=ema)  # whole leaves
        found[ema] = huggingface.load_hf(tmp_path / f"out{ema}")[1]
        assert_same(found[ema], held.params)
        assert {leaf.dtype for leaf in pytree.leaves(held.params)} == {torch.float32}
    assert not torch.equal(found[False]["head"]["w"], found[True]["head"]["w"])


def test_a_run_of_which_a_part_is_on_a_disk(tmp_path, monkeypatch):
    """The disk has no whole weights then; its checkpoints have."""
    write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    for offload in ("opt=nvme:0.5", "params=nvme:0.5,opt=nvme:0.5"):
        flags = ["--precision", "bf16", "--offload", offload, "--steps", "1", "--prompt", "", "--out", offload]
        with pytest.raises(SystemExit) as ended:
            main.main(["pretrain", *TINY, *flags])
        assert ended.value.code == 0 and (tmp_path / offload / "nvme").is_dir()
        weights.export_hf(Path(offload), tmp_path / "out" / offload)
        held = checkpoint.restore_leaves(
            checkpoint.latest(tmp_path / offload / "checkpoints"), lambda name: name.startswith("master/")
        )
        found = pytree.named_leaves(huggingface.load_hf(tmp_path / "out" / offload)[1])
        assert_same(found, {name: held[f"master/{name}"] for name in found})
        assert {leaf.dtype for leaf in pytree.leaves(weights.load(Path(offload)).params)} == {torch.bfloat16}


def test_one_layer_is_read_at_a_time(tmp_path):
    params = models.init_params(models.build(CONFIGS["mixtral"]), fzero.core.prng.key(0))
    named, asked = pytree.named_leaves(params), []

    def read(name, index):
        asked.append((name, index))
        return named[name][index]

    huggingface.save_hf(tmp_path / "out", CONFIGS["mixtral"], huggingface.Leaves(named, read))
    assert_same(huggingface.load_hf(tmp_path / "out")[1], params)
    assert len(asked) == len(set(asked)), "read twice"
    for name, index in asked:
        assert len(index) == (0 if not name.startswith("blocks/") else 2 if "moe/w_" in name else 1), name


def test_what_cannot_be_exported(tmp_path):
    def refused(said, folder, **options):
        with pytest.raises(ValueError) as what:
            weights.export_hf(folder, tmp_path / "out", **options)
        assert said in str(what.value) and "\n" not in str(what.value)
        assert not (tmp_path / "out").exists()

    refused("no such folder; a run folder has a config.json", tmp_path / "nowhere")
    folder = tmp_path / "run"
    run_folder.create_run(folder, recipe("", CONFIGS["llama"]), None)
    refused("no checkpoint in it", folder)
    params = models.init_params(models.build(CONFIGS["llama"]), fzero.core.prng.key(0))
    checkpoint.save(folder / run_folder.CHECKPOINTS, {"params": params}, step=3)
    refused("keeps no average of the weights (train.ema_decay is 0)", folder, ema=True)
    checkpoint.save(
        folder / run_folder.CHECKPOINTS, {"params": {**params, "head": {"norm": params["head"]["norm"]}}}, step=4
    )
    refused("the model of the run has leaves that are not in it: head/w", folder)
