"""What holds for every test: one thread, as tests run side by side and small tensors are slower on several.

Without a GPU, Triton's kernels run in its interpreter, which must be asked for before Triton is imported.
"""

import os

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config):
    # Raised once by PyTorch's own decompositions, which the first torch.func.jvp of a process imports.
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.fixture
def fz(capsys):
    """A function that runs the command line: (exit code, stdout, stderr)."""
    from fzero.cli import main

    def run(*args):
        with pytest.raises(SystemExit) as ended:
            main.main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run
