"""What a search decides cannot be set beside it, and how its result is started (fzero/planner/launch.py)."""

import os
import re
import shlex
import subprocess
import tomllib

import pytest

from fzero import search
from fzero.planner import launch
from fzero.planner.estimate import Candidate
from fzero.run import from_table, to_table

# A value of every key that a search decides, as it is set and as a flag says it.
VALUES = {
    **{f"mesh.{axis}": 2 for axis in ("dp", "rp", "tp", "pp", "cp", "ep")},
    "zero": 2,
    "train.remat": "full",
    "offload": "opt=host",
    "train.micro_batch": 2,
    "sequence": True,
    "pipeline.schedule": "gpipe",
}


def test_the_table_is_what_a_candidate_changes():
    base = from_table({"preset": "llama-tiny"})
    other = Candidate(2, 2, 2, 3, "full", "opt=host", 1, 2, "interleaved", 2).apply_to(base)
    mine, theirs = to_table(base), to_table(other)
    changed = {key for key in mine if mine[key] != theirs[key]} - {"train"}
    changed |= {f"train.{key}" for key in mine["train"] if mine["train"][key] != theirs["train"][key]}
    assert (
        changed
        == set(launch.DECIDED)
        == {name.partition(".")[0] if name.startswith(("mesh", "pipeline")) else name for name in VALUES}
    )


@pytest.mark.parametrize("key", VALUES)
def test_what_a_search_decides_is_refused_wherever_it_is_set(fz, tmp_path, key):
    value = VALUES[key]
    text = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
    (tmp_path / "run.toml").write_text(f"{key} = {text}\n")
    for given, said in ((["--set", f"{key}={text}"], "--set"), (["--config", tmp_path / "run.toml"], "run.toml")):
        code, out, err = fz("plan", "--search", "--world-size", "2", *given)
        assert (code, out) == (2, "") and err.count("\n") == 1
        assert re.search(rf"{re.escape(said)} gives {key}={value}, and a search decides", err), err
    with pytest.raises(ValueError, match=rf"settings gives {key}="):
        search("mlp-tiny", 1, settings={key: value})
    if not key.startswith("mesh."):
        with pytest.raises(ValueError, match=rf"the config gives {key}="):
            part, _, name = key.partition(".")
            search({"preset": "mlp-tiny", part: {name: value} if name else value}, 1)


def test_a_config_of_a_run_says_that_its_own_do_not_count(fz, tmp_path):
    from fzero.run import to_json

    (tmp_path / "config.json").write_text(to_json(from_table({"preset": "mlp-tiny", "mesh": {"dp": 2}})))
    code, _, err = fz("plan", "--search", "--world-size", "0", "--config", tmp_path / "config.json")
    assert code == 2  # of --world-size
    code, _, err = fz("plan", "--search", "--world-size", "3", "--config", tmp_path / "config.json", "--batch", "4")
    assert "fzero: --search decides mesh, zero," in err and "config.json do not count" in err


@pytest.mark.parametrize(
    ("ranks", "on_node", "start"),
    [
        (1, 8, "fzero pretrain"),
        (4, 8, "torchrun --nproc-per-node 4 -m fzero pretrain"),
        (16, 8, "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id a"),
        (12, 8, "torchrun --nnodes 2 --nproc-per-node 6 "),
        (7, 4, "torchrun --nnodes 7 --nproc-per-node 1 "),
    ],
)
def test_the_command_for_one_and_for_several_machines(ranks, on_node, start):
    command = launch.launch_command("a b/a.toml", ranks, on_node)
    assert command.startswith(start) and command.endswith("fzero pretrain --config 'a b/a.toml'")
    nodes, each = launch.machines(ranks, on_node)
    assert nodes * each == ranks and each <= on_node


def test_torchrun_takes_every_flag_of_the_command():
    from torch.distributed.run import get_args_parser

    words = shlex.split(launch.launch_command("best.toml", 16, 8))
    found = get_args_parser().parse_args(words[1:])
    assert (found.nnodes, found.nproc_per_node, found.rdzv_backend, found.rdzv_id) == ("2", "8", "c10d", "best")
    assert found.module and [found.training_script, *found.training_script_args][:2] == ["fzero", "pretrain"]


SRUN = """#!/bin/bash
exec "$@"
"""
TORCHRUN = """#!/bin/bash
printf '%s\\n' "$@" > said
"""


@pytest.mark.parametrize(("ranks", "on_node", "gpu"), [(16, 8, True), (4, 8, True), (1, 8, False)])
def test_a_script_for_slurm_starts_the_command_on_its_machines(tmp_path, ranks, on_node, gpu):
    """The script is run with stand-ins for Slurm's programs and for torchrun."""
    text = launch.slurm_script("best.toml", ranks, on_node, gpu=gpu)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert int(asked["nodes"]) * int(asked.get("gpus-per-node", 1)) == ranks and asked["ntasks-per-node"] == "1"
    programs = {
        "srun": SRUN,
        "torchrun": TORCHRUN,
        "fzero": TORCHRUN,
        "scontrol": "#!/bin/bash\necho 'node 7'\necho node8\n",
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(body)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(text)
    variables = {**os.environ, "SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[7-8]"}
    variables["PATH"] = f"{tmp_path}:{variables['PATH']}"
    subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=variables, check=True)
    said = (tmp_path / "said").read_text().split("\n")
    assert "best.toml" in said and said[-3:-1] == ["runs/best", "--auto-resume"]
    if ranks == 16:
        assert said[said.index("--rdzv-endpoint") + 1] == "node 7:29500" and said[said.index("--rdzv-id") + 1] == "41"


def test_slurm_needs_a_config_to_start(fz):
    for given, message in ((["--search", "--world-size", "1", "--slurm", "job.sh"], "--slurm needs --out"),
                           (["--slurm", "job.sh"], "--slurm is for --search")):  # fmt: skip
        code, _, err = fz("plan", *given)
        assert code == 2 and message in err


@pytest.mark.slow
def test_a_search_writes_the_command_and_the_script(fz, tmp_path):
    small = ["--model", "mlp-tiny", "--batch", "32", "--seq-len", "32", "--precision", "bf16", "--top", "1"]
    files = ["--tokens", "1e6", "--out", tmp_path / "best.toml", "--slurm", tmp_path / "job.sh"]
    code, _, err = fz("plan", "--search", "--world-size", "16", *small, "--set", "train.compiled=false", *files)
    assert code == 0, err
    assert tomllib.loads((tmp_path / "best.toml").read_text())["train"]["steps"] == 977  # 1e6 / (32 x 32)
    assert "start it on each of 2 machines, of which HOST is one with: torchrun --nnodes 2 --nproc-per-node 8" in err
    assert "#SBATCH --nodes=2" in (tmp_path / "job.sh").read_text() and f"sbatch {tmp_path / 'job.sh'}" in err
