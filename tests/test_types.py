"""What a type checker knows of a user's program; .ci/run checks the package itself."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fzero

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import fzero
import torch

model = fzero.models.mlp(fzero.models.MLPConfig(4, 8, 1, 2))
tx = fzero.optim.sgd(0.1)
plan = fzero.zero_plan(0, model, fzero.one_process())
state = fzero.init_state(model, tx, plan, seed=0)
state, metrics = fzero.make_train_step(model, tx, plan)(state, {})
reveal_type(metrics.loss)


def double(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * x


reveal_type(fzero.jit(double)(torch.ones(2)))
"""
# Each with what the checker says of it.
MISTAKES = {
    'fzero.zero_plan("0", model, fzero.one_process())': 'parameter "stage"',
    "fzero.zero_plann": '"zero_plann" is not a known attribute',
    "fzero.make_train_step(model, tx, plan, acumulate=2)": 'No parameter named "acumulate"',
    "state.parms": 'Cannot access attribute "parms"',
    "fzero.optim.adamw(1e-3, betas=(0.9, 0.95))": 'No parameter named "betas"',
}


def checked(folder, text):
    """{line of the program: what the checker says of it}, for a program beside an installed fzero."""
    (folder / "program.py").write_text(text)
    (folder / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "basic", "reportUnusedExpression": False})
    )
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    lines = text.splitlines()
    found = json.loads(run.stdout)["generalDiagnostics"]
    return {lines[each["range"]["start"]["line"]]: each["message"].replace("\xa0", " ") for each in found}


@pytest.mark.slow
def test_a_checker_knows_the_type_of_every_public_name(tmp_path):
    names = []
    for name in fzero.__all__:
        value = getattr(fzero, name)
        inner = getattr(value, "__all__", ()) if isinstance(value, ModuleType) else ()
        names += [f"fzero.{name}", *(f"fzero.{name}.{each}" for each in inner)]
    assert len(names) > 150
    said = checked(tmp_path, "import fzero\n" + "\n".join(f"reveal_type({name})" for name in names))
    assert list(said) == [f"reveal_type({name})" for name in names], "not revealed"
    vague = [text for text in said.values() if re.search(r' is "Any"$|Unknown', text)]
    assert not vague, "\n".join(vague)


@pytest.mark.slow
def test_a_checker_finds_a_users_mistakes_and_no_others(tmp_path):
    said = checked(tmp_path, PROGRAM + "\n".join(MISTAKES))
    assert said.pop("reveal_type(metrics.loss)") == 'Type of "metrics.loss" is "Tensor"'
    assert said.pop("reveal_type(fzero.jit(double)(torch.ones(2)))").endswith('is "Tensor"')
    assert said.keys() == MISTAKES.keys()
    for line, part in MISTAKES.items():
        assert part in said[line], (line, said[line])
