"""The check of compiled kernels: that it sees what it is for. The kernels themselves are checked by `python -m
fzero.cli.aot`."""

import os
import subprocess
import sys

import pytest
import triton

from fzero.cli import aot
from fzero.kernels import aot as kernels

SPILLS = """
import triton
import triton.language as tl

from fzero.kernels.aot import Build

@triton.jit
def heavy(X, OUT, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at * 3, mask=at < n)
    tl.store(OUT + at * 3, tl.cumsum(tl.exp(x - tl.max(x, 0)), 0), mask=at < n)

def builds():
    signature = {"X": "*fp32", "OUT": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    yield Build("heavy", "heavy", signature, {}, {"BLOCK": 4096, "num_warps": 4, "maxnreg": 24}, matrix=True)
"""


def run(*arguments, code=None, folder=None):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *(["-c", code] if code else ["-m", "fzero.cli.aot"]), *arguments]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_kernel_that_falls_short_is_named(tmp_path):
    (tmp_path / "spills.py").write_text(SPILLS)
    code = (
        "import importlib, sys; import spills; name = 'fzero.kernels.spills'; "
        "sys.modules[name] = spills\n"
        "from fzero.kernels import aot\n"
        "print(aot.compile_build(aot.ARCHS['sm_90'], 'spills', next(spills.builds())).wrong)"
    )
    status, said = run(code=code, folder=tmp_path)
    found = said.splitlines()[-1]
    assert status == 0 and "bytes spilled, " in found and "no matrix units" in found, said
    assert found.endswith("narrow accesses")


HEAVY = """
import importlib, sys; import spills; sys.modules["fzero.kernels.spills"] = spills
from fzero.kernels import aot
build = next(spills.builds())._replace(matrix=False, wide=False)
spilled = aot.compile_build(aot.ARCHS["sm_90"], "spills", build).spilled
here, elsewhere = aot.VERSION, (3, 5)
for version, label, most in (
    (here, "heavy", spilled), (here, "heavy", spilled - 1), (elsewhere, "heavy", spilled), (here, "heav", spilled)
):
    aot.KNOWN_SPILLS = {version: {label: most}}
    print(aot.compile_build(aot.ARCHS["sm_90"], "spills", build).wrong or "sound")
"""


@pytest.mark.slow
def test_a_known_spill_is_of_one_version_one_build_and_at_most_its_bytes(tmp_path):
    (tmp_path / "spills.py").write_text(SPILLS)
    status, said = run(code=HEAVY, folder=tmp_path)
    sound, *wrong = said.splitlines()
    assert status == 0 and sound == "sound", said
    assert len(wrong) == 3 and all(line.endswith("bytes spilled") for line in wrong), said


def test_known_spills_are_of_builds_that_there_are():
    labels = {build.label for _, build in kernels.builds(kernels.ARCHS["sm_90"])}
    assert all(version >= (3, 6) for version in kernels.KNOWN_SPILLS)
    for table in kernels.KNOWN_SPILLS.values():
        assert set(table) <= labels and all(0 < most <= 256 for most in table.values())


PROMOTES = """
import re, triton
from fzero.kernels import aot, moe_float8
arch, compile, found = aot.ARCHS["sm_90"], triton.compile, []
triton.compile = lambda *given, **options: found.append(compile(*given, **options)) or found[-1]
for build in (next(b for b in moe_float8.builds(arch.gpu) if b.kernel == name) for name in
              ("_grouped_float8", "_grouped_float8_dw")):
    assert not aot.compile_build(arch, "moe_float8", build).wrong
    sums = build.config["BLOCK_M"] * build.config["BLOCK_N"] // (32 * build.config["num_warps"])
    print(len(re.findall(r"add[.](?:rn[.])?f32", found[-1].asm["ptx"])) // sums)
"""


def test_sums_of_float8_products_go_to_float32_registers_in_each_pass():
    """Once for each block of K: the matrix units of Hopper keep 14 bits or so of what they add up."""
    status, said = run(code=PROMOTES)
    assert (status, said.split()) == (0, ["1", "1"]), said


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        aot.main(arguments)
    return ended.value.code, capsys.readouterr().err


def test_the_command_refuses_what_it_cannot_do(monkeypatch, capsys):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    code, err = refused(capsys, "no such kernel", "--part", "kernels")
    assert code == 2 and "no kernel's label contains 'no such kernel'" in err
    code, err = refused(capsys, "--part", "inductor", "--arch", "gfx942")
    assert code == 2 and "not known here; choose sm_90, sm_80" in err
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    code, err = refused(capsys, "swiglu")
    assert code == 2 and "unset it" in err


def test_the_second_architecture_has_one_model_unless_it_is_chosen():
    assert aot._models("sm_90", chosen=False) == aot._models("sm_80", chosen=True) == ["llama", "gpt2", "mixtral"]
    assert aot._models("sm_80", chosen=False) == ["llama"] and aot._models("gfx942", chosen=True) == []


@pytest.mark.slow
def test_the_command_prints_a_line_for_each_build():
    status, said = run("ward swiglu 1024", "--part", "kernels")
    assert status == 0 and "_glu_forward swiglu 1024" in said and "2 builds for sm_90, 0 wrong" in said, said


GENERATED = """
import functools
from concurrent.futures import Future

import torch

from fzero.cli import aot as command
from fzero.core.vjp_pair import vjp_pair
from fzero.core.device import FakeDevice, Target
from fzero.planner import fake_inductor

class Here:  # in place of a pool of processes
    def __init__(self, **_): pass
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def submit(self, f, *args):
        done = Future()
        done.set_result(f(*args))
        return done

sources = {}
with FakeDevice(Target("cuda", 132, (9, 0), "H200"), lower=functools.partial(fake_inductor._lower, sources)) as mode:
    pair = vjp_pair(lambda x: [torch.exp(x) * 2], 1, compiled=True)
    pair.forward([torch.zeros(64, 64, device=mode.device)])
name, source = next(iter(sources))
bad = source.replace("tl.store(", "tl.stor(")
kinds = [fake_inductor.Generated("sm_90", "llama", i, name, text) for i, text in enumerate((source, bad))]
command.Pool = Here
fake_inductor.generate_kernels = lambda model, arch: kinds if model == "llama" else []
print("exit code", command.main(["--part", "inductor", "--arch", "sm_90"]))
"""


@pytest.mark.slow
def test_a_generated_kernel_that_does_not_compile_is_named():
    status, said = run(code=GENERATED)
    good, bad = (
        next(line for line in said.splitlines() if line.startswith(f"inductor sm_90 llama {i} ")) for i in "01"
    )
    assert status == 0 and "WRONG" not in good and int(good.split()[5]) > 0, said
    assert "WRONG: does not compile: " in bad and "stor" in bad.rpartition("compile: ")[2], said
    assert "2 builds for sm_90, 1 wrong\nexit code 1" in said
