"""fzero starts, trains, saves and resumes without a package that only some features need."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import fzero

ROOT = Path(fzero.__file__).parents[1]
WITHOUT = {"crc32c", "zstandard", "triton"}  # of what is installed with fzero, or with torch's CUDA build
# Its folder is the first of the path: what every process of Python there runs at its start.
BLOCKING = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) if hasattr(finder, "find_spec") else finder for finder in sys.meta_path]
"""
PROGRAM = """
import importlib, pkgutil, runpy, sys
import fzero
for module in pkgutil.walk_packages(fzero.__path__, "fzero."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from fzero.cli.main import main
QUIET = ["--prompt", "", "--peak-tflops", "1"]
TINY = "pretrain --model mlp-tiny --steps 2 --batch 4 --micro-batch 1 --seq-len 16 --precision fp32 --out run"
SETTINGS = "--set train.compiled=false --set precision.fp32_matmul=default --set train.eval_batches=2"
for command in ("doctor", f"{TINY} {SETTINGS} --stop-at 1", "pretrain --out run --resume", "ckpt verify run"):
    try:
        main([*command.split(), *QUIET * command.startswith("pretrain")])
    except SystemExit as ended:
        assert not ended.code, command
assert not BLOCKED & {name.partition(".")[0] for name in sys.modules}
"""


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def required():
    """The distributions that `pip install fzero` brings along, but for WITHOUT and what only these need."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found, left = set(), [Requirement(text) for text in dependencies]
    while left:
        one = left.pop()
        name = canonical(one.name)
        if name in found or name in WITHOUT or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        try:
            texts = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        left += [Requirement(text) for text in texts]
    return found


def blocked():
    """The modules of every other distribution that is installed here."""
    needed, modules = required(), metadata.packages_distributions()
    others = {name for name, of in modules.items() if not {canonical(one) for one in of} & {*needed, "fzero", "pip"}}
    return {name for name in others | WITHOUT if name.isidentifier() and name not in sys.stdlib_module_names}


def test_a_run_needs_nothing_but_its_dependencies(tmp_path):
    names = blocked()
    assert names >= WITHOUT | {"pytest"}
    assert not names & {"torch", "numpy", "einops", "tensorstore", "click", "tqdm", "jinja2", "matplotlib"}
    (tmp_path / "sitecustomize.py").write_text(f"BLOCKED = {sorted(names)}\n{BLOCKING}")
    where = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "XDG_CACHE_HOME": str(tmp_path), "FZERO_WARM_UP": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", f"BLOCKED = set({sorted(names)})\n{PROGRAM}"],
        cwd=tmp_path,
        env={**os.environ, **where},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "crc32c         not here: checksums of checkpoints and corpora; by fzero's own loop" in ran.stdout
    assert "zstandard      not here: texts in .zst files, train.compress = zstd; those are refused" in ran.stdout
    assert "resuming run at step 1 of 2" in ran.stdout
    assert [path.name for path in sorted((tmp_path / "run/checkpoints").iterdir())][-1] == "step-00000002"
