"""The check of compiled kernels: that it sees what it is for. The kernels themselves are checked by `python -m
fzero.kernels.aot`."""

import os
import subprocess
import sys

import pytest
import triton

from fzero.kernels import aot

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
    command = [sys.executable, *(["-c", code] if code else ["-m", "fzero.kernels.aot"]), *arguments]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_kernel_that_falls_short_is_named(tmp_path):
    (tmp_path / "spills.py").write_text(SPILLS)
    code = (
        "import importlib, sys; from fzero.kernels import aot; import spills; name = 'fzero.kernels.spills'; "
        "sys.modules[name] = spills\n"
        "b = next(spills.builds()); old = b._replace(wide_since=(99, 0))\n"
        "for one in (b, old): r = aot.compile_build(aot.ARCHS['sm_90'], 'spills', one); print(r.wrong, '|', r.allowed)"
    )
    status, said = run(code=code, folder=tmp_path)
    now, allowed = said.splitlines()[-2:]
    assert status == 0 and all("bytes spilled, " in line and "no matrix units" in line for line in (now, allowed)), said
    assert now.rstrip().endswith("narrow accesses |") and allowed.endswith(
        "| narrow accesses, as with any Triton before 99.0"
    )


def refused(capsys, pattern):
    with pytest.raises(SystemExit) as ended:
        aot.main([pattern])
    return ended.value.code, capsys.readouterr().err


def test_the_command_refuses_what_it_cannot_do(monkeypatch, capsys):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    code, err = refused(capsys, "no such kernel")
    assert code == 2 and "no kernel's label contains 'no such kernel'" in err
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    code, err = refused(capsys, "swiglu")
    assert code == 2 and "unset it" in err


@pytest.mark.slow
def test_the_command_prints_a_line_for_each_build():
    status, said = run("swiglu 1024")
    assert status == 0 and "_glu_forward swiglu 1024" in said and "2 builds for sm_90, 0 wrong" in said, said
