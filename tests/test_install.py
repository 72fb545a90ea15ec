"""README's commands resolve with every build of torch that we allow, and what they install suffices."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import fzero

ROOT = Path(__file__).resolve().parents[1]
BUILDS = {
    version: build["requires"]
    for version, build in json.loads((ROOT / "tests/torch_builds.json").read_text())["builds"].items()
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = [
    line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")
]
PINNED = [version for version in BUILDS if version.startswith("2.13.0")]
MACHINE = {"platform_system": "Linux", "sys_platform": "linux", "os_name": "posix", "platform_machine": "x86_64"}


def resolve(torch: str, extras: tuple[str, ...], constraints: list[str], python: str) -> dict[str, SpecifierSet]:
    """{package: what all who need it ask of it} of an installation with this build of torch.

    Raises ValueError for a package of which no version is allowed.
    """
    needed = [*PROJECT["dependencies"], *(r for extra in extras for r in PROJECT["optional-dependencies"][extra])]
    asked: dict[str, SpecifierSet] = {}
    for text in [*needed, *BUILDS[torch]]:
        r = Requirement(text)
        if r.marker is None or r.marker.evaluate(MACHINE | {"python_version": python, "extra": ""}):
            asked[r.name] = asked.get(r.name, SpecifierSet()) & r.specifier
    for r in map(Requirement, constraints):
        if r.name in asked:
            asked[r.name] &= r.specifier
    for name, allowed in asked.items():
        # Bounds that allow any version allow 0, one that they name, or the one after it.
        named = [x.version for x in allowed]
        tried = [torch] if name == "torch" else ["0", *named, *(f"{version}.1" for version in named)]
        if not any(allowed.contains(Version(version), prereleases=True) for version in tried):
            raise ValueError(f"torch {torch}: no {name} is {allowed}")
    return asked


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("extras", [(), tuple(PROJECT["optional-dependencies"])])
@pytest.mark.parametrize("torch", PINNED)
def test_the_constraints_resolve_with_every_build_of_the_torch_that_they_pin(torch, extras, python):
    resolve(torch, extras, CONSTRAINTS, python)


@pytest.mark.parametrize("extras", [(), tuple(PROJECT["optional-dependencies"])])
@pytest.mark.parametrize("torch", BUILDS)
def test_the_package_resolves_with_every_build_of_torch_that_it_allows(torch, extras):
    resolve(torch, extras, [], "3.11")


@pytest.mark.parametrize("pin", ["triton==3.9.0", "torch==2.12.0", "setuptools<70"])
def test_what_does_not_resolve_is_noticed(pin):
    with pytest.raises(ValueError, match=pin.partition("=")[0].partition("<")[0]):
        resolve("2.13.0", (), [*CONSTRAINTS, pin], "3.11")


def test_both_builds_are_recorded_and_the_cpu_build_installs_without_triton():
    assert len(PINNED) == 2
    assert "triton" not in resolve("2.13.0+cpu", (), CONSTRAINTS, "3.11")
    assert "triton" in resolve("2.13.0+cpu", ("test",), CONSTRAINTS, "3.11")
    assert "triton" in resolve("2.13.0", (), CONSTRAINTS, "3.11")


def test_every_install_command_of_the_pages_uses_the_constraints():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / ".ci/run"]
    commands = [
        line for page in pages for line in page.read_text().splitlines() if re.search(r"pip install .*\.", line)
    ]
    ours = [line for line in commands if re.search(r" '?\.(\[|'| |$)", line)]
    assert len(ours) >= 3 and all("-c constraints.txt" in line for line in ours), ours


def test_the_oldest_versions_that_are_allowed_are_those_that_are_tested():
    lines = [line for line in (ROOT / ".ci/oldest.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {Requirement(line).name: str(Requirement(line).specifier) for line in lines}
    declared = [Requirement(text) for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]]
    least = {r.name: str(r.specifier).replace(">=", "==") for r in declared if r.name in ("torch", "triton")}
    assert {name: pins[name].removesuffix(".0") for name in least} == least
    assert {Requirement(text).name for text in PROJECT["dependencies"]} - set(pins) == {"crc32c", "zstandard"}
    files = [line.split() for line in (ROOT / ".ci/oldest_tests.txt").read_text().splitlines() if line[0] != "#"]
    assert len(files) > 35 and all((ROOT / name).is_file() and rest in ([], ["slow"]) for name, *rest in files)


def test_names_load_when_first_used_from_the_list_that_checkers_and_editors_read(tmp_path, monkeypatch):
    """By `__init__.pyi` of a package; a name has precedence over the module of that name. Those below a string are for
    contributors."""
    assert (ROOT / "fzero/py.typed").is_file() and {*fzero.__all__, "__version__"} <= {*dir(fzero)}
    package = tmp_path / "lazily"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from fzero.core.packages import attach\n\n__all__ = attach(__name__)\n__version__ = '1'\n"
    )
    (package / "__init__.pyi").write_text(
        "from lazily.adam import adam as adam\nfrom lazily import tables\nnumbers = tables\n__version__: str\n"
        '"""For contributors."""\nfrom lazily.norm import adam as norm_adam\n'
    )
    for name in ("adam", "tables", "clip", "norm"):
        (package / f"{name}.py").write_text("def adam():\n    return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    lazily = importlib.import_module("lazily")
    assert lazily.__all__ == ["adam", "numbers"] and "lazily.adam" not in sys.modules
    importlib.import_module("lazily.adam")
    assert lazily.adam() == 3 and {"adam", "numbers", "__version__"} <= {*dir(lazily)}
    assert lazily.numbers.__name__ == "lazily.tables" and lazily.clip.__name__ == "lazily.clip"
    assert lazily.norm_adam() == 3 and lazily.norm_adam.__module__ == "lazily.norm"
    with pytest.raises(AttributeError, match="module 'lazily' has no attribute 'sgd'"):
        _ = lazily.sgd


@pytest.mark.parametrize("extra", ["tensorboard", "wandb", "hf", "parquet", "test"])
def test_the_extras_exist(extra):
    assert PROJECT["optional-dependencies"][extra]


def test_the_license_is_the_one_that_the_metadata_name():
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE"]
    assert "Apache License" in (ROOT / "LICENSE").read_text().splitlines()[1]


# A machine on which Triton is not installed.
WITHOUT_TRITON = "import sys; sys.modules['triton'] = None; "
EVERYTHING = """
import importlib, pkgutil
import fzero, torch
for module in pkgutil.walk_packages(fzero.__path__, "fzero."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from fzero.cli import aot
from fzero.kernels import glu, custom_operator
assert not custom_operator.INSTALLED and not custom_operator.INTERPRETED
assert custom_operator.triton_runs(torch.ones(1)).endswith("run on cuda")
try:
    next(value for value in vars(glu).values() if isinstance(value, custom_operator.AbsentKernel))[(1,)]
except ImportError as error:
    print(error)
aot.main([])
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "0"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_the_package_loads_without_triton_and_a_launch_says_what_is_missing():
    done = python(WITHOUT_TRITON + EVERYTHING)
    assert done.returncode == 2, done.stderr[-2000:]  # that of aot, which needs it
    assert "Triton is not installed" in done.stdout and "Triton is not installed" in done.stderr


@pytest.mark.slow
def test_a_plan_for_a_gpu_is_the_same_without_triton():
    code = "from fzero.cli.main import main; main(['plan', '--gpu', 'h100', '--set', 'model.n_layers=1'])"
    first, second = python(WITHOUT_TRITON + code), python(code)
    assert first.returncode == second.returncode == 0, first.stderr[-2000:]
    assert first.stdout == second.stdout
