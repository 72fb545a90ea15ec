"""Tests whose results could depend on the machine, run as other machines would: with fewer instructions, cores, or a
lesser file system.

Each environment runs the files that can feel it, in a process of its own, and first makes sure that the environment is
what it says."""

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from fzero.core import processor

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent


def instructions(torch_s, onednn_s, mkl_s):
    """The environment in which the three libraries that compute have no more instructions than these."""
    names = {"ATEN_CPU_CAPABILITY": torch_s, "ONEDNN_MAX_CPU_ISA": onednn_s, "DNNL_MAX_CPU_ISA": onednn_s}
    return {**names, "MKL_CBWR": mkl_s}


# Python runs this when it starts, in the children of a test too.
REFUSING = """
import errno, os
opened = os.open
def refusing(path, flags, *args, **options):
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
    return opened(path, flags, *args, **options)
os.open = refusing
"""
IN_MEMORY = Path("/dev/shm")


class Machine(NamedTuple):
    """Another machine: what must be true on it, in Python, and the files of tests, or file::test, that can feel it."""

    holds: str
    files: tuple[str, ...]
    environment: Mapping[str, str] = MappingProxyType({})
    flag: str = ""  # of the processor, which must have it
    one_core: bool = False
    in_memory: bool = False  # the folders of the tests
    refuses_direct: bool = False  # O_DIRECT, on all file systems


SAME_STEPS = (  # the tests of replay that compute; the others read and word what these found
    "replay::test_a_step_comes_out_as_it_was_from_the_nearest_checkpoint",
    "replay::test_equal_runs_are_equal",
    "replay::test_neither_of_two_runs_reproduces_itself",
)
# What failed when the default tier ran with the instructions of other CPUs, and what promises bits: products of any
# library in another order, loops in C++ against torch's, forms that a CPU lacks.
NUMBERS = (
    *("float8", "largest", "tiled", "cpp_loops", "norm", "cross_entropy", "attention_library", "kept", "token_sums"),
    *("module_lora", "canonical", "flash::test_lengths_and_fewer_queries_than_keys"),
    "adapters::test_magnitudes_of_weights_in_codes_are_those_of_what_the_codes_say",
)
MACHINES = {
    "an old CPU": Machine(
        "torch.backends.cpu.get_cpu_capability() == 'DEFAULT' and not has_small_products(torch.float32)",
        (*NUMBERS, "host_steps", "random_native", "digest", "quantize", "optim_lowbit"),
        instructions("default", "SSE41", "COMPATIBLE"),
        "sse4_1",
    ),
    "AVX2 alone": Machine(
        "torch.backends.cpu.get_cpu_capability() == 'AVX2' and not torch.ops.mkldnn._is_mkldnn_bf16_supported()",
        (*NUMBERS, "tiling", "attention", "bench_machine", *SAME_STEPS, "streaming"),
        instructions("avx2", "AVX2", "AVX2"),
        "avx2",
    ),
    "AVX-512 without units for bfloat16": Machine(
        "torch.backends.cpu.get_cpu_capability() == 'AVX512' and not has_small_products(torch.bfloat16)",
        NUMBERS,
        instructions("avx512", "AVX512_CORE", "AVX512"),
        "avx512f",
    ),
    "one core": Machine(
        "len(os.sched_getaffinity(0)) == 1",
        ("offload_disk", "doctor", "data", "agreement", "measured_run", "plan_time"),
        one_core=True,
    ),
    "four threads": Machine(
        "torch.get_num_threads() == 4",
        ("doctor", "crosscheck", "mesh"),
        {"OMP_NUM_THREADS": "4", "MKL_DYNAMIC": "FALSE"},
    ),
    "folders in memory": Machine(
        "disk_io.file_system(disk_io.mount_point(sys.argv[1])) in disk.MEMORY",
        ("offload_disk", "offload_store", "bench_disk", "checkpoint", "checkpoint_behind"),
        in_memory=True,
    ),
    "no direct transfers": Machine(
        "not serves_direct(Path(sys.argv[1]))",
        ("offload_disk", "offload_store", "offload_run::test_a_run_on_a_disk_is_the_run_in_memory", "bench_disk"),
        refuses_direct=True,
    ),
}
IMPORTS = (
    "import os, sys, torch; from pathlib import Path; from fzero.offload import disk_io; from "
    "fzero.planner.calibrate import disk; "
)
IMPORTS += "from fzero.offload.disk_io import serves_direct; "
IMPORTS += "from fzero.kernels.attention_tiled import has_small_products; "


def split_name(name):
    """(file, ::test or nothing)"""
    file, colons, test = name.partition("::")
    return file, colons + test


def start(command, more):
    # Without CI: budgets of seconds are for this machine.
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | more
    return subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)


@functools.cache
def true_here(folder):
    """The names of the machines that this one is, with nothing changed."""
    said = ", ".join(f"{name!r}: {machine.holds}" for name, machine in MACHINES.items())
    code = f"{IMPORTS}print(*(name for name, holds in {{{said}}}.items() if holds), sep=chr(10))"
    done = start([sys.executable, "-c", code, folder], {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), *sys.path])})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", MACHINES)
def test_the_suite_on_another_machine(name, tmp_path):
    machine, paths = MACHINES[name], [str(TESTS.parent), *sys.path]
    if machine.flag not in processor():
        pytest.skip(f"this processor has no {machine.flag}")
    if machine.in_memory and not os.access(IN_MEMORY, os.W_OK):
        pytest.skip(f"{IN_MEMORY} is not there")
    if machine.refuses_direct:
        (tmp_path / "sitecustomize.py").write_text(REFUSING)
        paths = [str(tmp_path), *paths]

    def run(*command):
        if machine.one_core:
            command = ("taskset", "-c", str(min(os.sched_getaffinity(0))), *command)
        done = start(command, {"PYTHONPATH": os.pathsep.join(paths), **machine.environment})
        assert done.returncode == 0, f"{name}: exit code {done.returncode}\n{done.stdout[-20000:]}{done.stderr[-4000:]}"

    if name in true_here(str(tmp_path.parent)):
        pytest.skip("this machine is such a one: the default tier has run these files on it")
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if machine.in_memory else tmp_path) as folder:
        files = [f"{TESTS}/test_{file}.py{test}" for file, test in map(split_name, machine.files)]
        options = ("-q", "-n0", "-p", "no:cacheprovider", f"--basetemp={folder}/tests")
        # One process looks at the machine and runs the tests: each import of torch on it is seconds.
        code = f"{IMPORTS}assert {machine.holds}; import pytest; sys.exit(pytest.main(sys.argv[2:]))"
        run(sys.executable, "-c", code, folder, *options, *files)
