"""What a run compiles ahead: in a process of its own, once a machine; Inductor's instructions are the same ones."""

import os
import subprocess
import sys

import pytest

from fzero.core import compile_cache
from fzero.run import warm_up


@pytest.fixture
def cold(monkeypatch, tmp_path):
    """A machine that has compiled nothing; returns what was started."""
    started = []
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("FZERO_WARM_UP", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: started.append(command) or command)
    return started


def test_a_cold_machine_is_warmed_up_once(cold):
    assert warm_up.begin() and cold == [[sys.executable, "-m", "fzero.run.setup.warm_up"]]
    warm_up.mark().touch()
    assert warm_up.begin() is None and len(cold) == 1


@pytest.mark.parametrize(("name", "value"), [("FZERO_WARM_UP", "0"), ("LOCAL_RANK", "1"), ("PATH", "")])
def test_who_does_not_start_it(cold, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert warm_up.begin() is None and cold == []


def test_the_cache_is_inductors(monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert str(compile_cache.cache_folder()) == default_cache_dir()


ISA = """
from fzero.core.compile_cache import trust_vector_flags
from torch._inductor import config, cpu_vec_isa
if {trust}:
    trust_vector_flags()
    assert config.cpp.vec_isa_ok or cpu_vec_isa.platform.machine() != "x86_64"
isa = cpu_vec_isa.pick_vec_isa()
print(isa, isa.build_arch_flags(), isa.build_macro())
"""


@pytest.mark.slow
def test_the_instructions_are_those_that_inductor_finds(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found = [
        subprocess.run([sys.executable, "-c", ISA.format(trust=trust)], env=environment, capture_output=True, text=True)
        for trust in (False, True)
    ]
    assert [run.returncode for run in found] == [0, 0] and found[0].stdout == found[1].stdout != ""


@pytest.mark.slow
def test_a_warm_up_leaves_its_mark_and_the_libraries_of_a_run(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "fzero.run.setup.warm_up"], env=environment, check=True, timeout=300)
    cache = tmp_path / "cache"
    assert (cache / warm_up.mark().name).exists() and len(list(cache.rglob("*.so"))) == 4
    assert not list(tmp_path.rglob("*.gch"))  # the headers take longer than the few loops of a run
