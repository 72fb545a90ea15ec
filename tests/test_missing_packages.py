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
from fzero.core import packages

ROOT = Path(fzero.__file__).parents[1]
# Of what is installed with fzero, or with torch's CUDA build: all but torch, numpy, einops and click.
WITHOUT = {
    *("crc32c", "zstandard", "triton", "tokenizers", "jinja2", "matplotlib", "tensorstore", "tqdm"),
}
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
from pathlib import Path
import fzero
SUBCLASSES = {"fzero.data.template_sandbox"}  # of a package's classes, imported where a template is met
for module in pkgutil.walk_packages(fzero.__path__, "fzero."):
    if not module.name.endswith("__main__") and module.name not in SUBCLASSES:
        importlib.import_module(module.name)
from fzero.cli.main import main
QUIET = ["--prompt", "", "--peak-tflops", "1"]
TINY = "pretrain --model mlp-tiny --steps 2 --batch 4 --micro-batch 1 --seq-len 16 --precision fp32 --out run"
SETTINGS = "--set train.compiled=false --set precision.fp32_matmul=default --set train.eval_batches=2"
REFUSED = (
    "report run",
    "data prepare text.txt --tokenizer bpe:300 --out corpus",
    "data prepare text.zst --out corpus",
    "data prepare text.parquet --out corpus",
    f"{TINY}2 {SETTINGS} --set train.compress=zstd",
    f"{TINY}2 {SETTINGS} --offload opt=nvme",
)
COMMANDS = ("doctor", f"{TINY} {SETTINGS} --stop-at 1", "pretrain --out run --resume", "ckpt verify run", *REFUSED)
for command in COMMANDS:
    try:
        main([*command.split(), *QUIET * command.startswith("pretrain")])
    except SystemExit as ended:
        assert (ended.code or 0) == 2 * (command in REFUSED), command
assert not Path("run2").exists()
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
    assert not names & {"torch", "numpy", "einops", "click"}
    for suffix in ("txt", "zst", "parquet"):
        (tmp_path / f"text.{suffix}").write_text("some words\n" * 100)
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
    assert "Traceback" not in ran.stderr and "fault" not in ran.stderr
    assert "crc32c         not here: checksums of checkpoints and corpora; by fzero's own loop" in ran.stdout
    for name in {*packages.OPTIONAL} - {"crc32c"}:
        assert f"{name:14} not here: {packages.OPTIONAL[name][0]}" in ran.stdout, name
    for name in ("matplotlib", "tokenizers", "zstandard", "pyarrow", "tensorstore"):
        assert f"needs the package {name}; pip install {name}" in ran.stderr, name
    assert "pictures: none (they: this needs the package matplotlib; pip install matplotlib)" in ran.stdout
    assert "resuming run at step 1 of 2" in ran.stdout
    assert [path.name for path in sorted((tmp_path / "run/checkpoints").iterdir())][-1] == "step-00000002"
