"""What holds for every test: one thread, as tests run side by side and small tensors are slower on several.

Without a GPU, Triton's kernels run in its interpreter, which must be asked for before Triton is imported.
tiers.py says which cases of a test are slow, budgets.py how long a test file may take.
"""

import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

import budgets
import pytest
import tiers
import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("FZERO_WARM_UP", "0")  # each test that trains would start a process
memory = "/dev/shm"  # folders of tests: a disk takes milliseconds for each file that is to be safe on it
if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 8 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", memory)
os.environ["FZERO_PLAN_CACHE"] = "0"  # no plan of a test is answered from, or kept in, the user's cache
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
gc.disable()  # until all tests are collected: a quarter of that time is for looking at modules that stay


def pytest_configure(config):
    # Raised once by PyTorch's own decompositions, which the first torch.func.jvp of a process imports.
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script` is deprecated:DeprecationWarning")
    # Of the interpreter of Triton 3.6, which PyTorch 2.11 comes with; numpy 2.4 makes it an error.
    config.addinivalue_line(
        "filterwarnings", "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
    )
    if not hasattr(config, "workerinput"):  # in the process that hears of every test, not in the workers of xdist
        config.pluginmanager.register(budgets.Budgets(budgets.read(), fail=bool(os.environ.get("CI"))), "budgets")
    # xdist's order of files is that of their numbers of tests, which says little about their durations.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves tests out
def pytest_collection_modifyitems(config, items):
    """Mark the slow cases, and put the files in the order of their budgets, the longest first: so no worker waits long
    at the end."""
    tiers.mark(items)
    config.stash[budgets.COLLECTED] = budgets.rows_of(items)
    slow = config.option.markexpr == "slow"
    if slow:  # which a whole product may be as well
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    table = budgets.read()
    items.sort(key=lambda item: -table.get(item.path.name, {}).get("slow" if slow else "default", 0))


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def global_generator():
    """Tests draw the same numbers whatever ran before them: one that fails fails again."""
    # For devices that are not there torch.manual_seed puts three formatted tracebacks into a list, longer at each test.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True, scope="session")
def pictures():
    """The function that writes the pictures of a run at its end, which takes longer than the steps of a test's run: a
    test of pictures puts it back."""
    from fzero.report import curves

    write_pictures = curves.write_pictures
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "write_pictures", lambda folder: [])
        yield write_pictures


@pytest.fixture
def disk_path():
    """A folder for a test of disks, which `tmp_path` may not be on."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def fz(capsys, monkeypatch):
    """A function that runs the command line: (exit code, stdout, stderr). On a slow machine too stderr has no lines of
    progress."""
    from fzero.cli import main, process

    monkeypatch.setattr(process, "EVERY", 1e6)

    def run(*args):
        with pytest.raises(SystemExit) as ended:
            main.main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run
