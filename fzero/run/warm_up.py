"""Compile in a process of its own, while a run reads its data, what every first step here needs: Inductor's precompiled
headers and fzero's C++ forms.

`begin` starts that process if this machine has no such results yet; they stay in Inductor's cache, where the run finds
them. `python -m fzero.run.warm_up` does it at once, for an image of a machine. What fails here is left to the run,
which compiles it again and says why.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import fzero

# Modules with a C++ file that Inductor compiles, one that is compiled soon first.
FORMS = ("small_products", "attention_tiled", "cross_entropy_rows", "optim_cpu")


def cache_folder() -> Path:
    """The folder of Inductor's cache, as torch has it, found without importing torch."""
    if given := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(given)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for its user
        user = str(os.getuid())
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def mark() -> Path:
    """The file that says that a warm-up has ended, for these versions of fzero, torch and Python."""
    versions = f"{fzero.__version__}-{metadata.version('torch')}-{sys.version_info[0]}.{sys.version_info[1]}"
    return cache_folder() / f"fzero-warm-{versions}"


def begin() -> subprocess.Popen | None:
    """Start the warm-up if this machine has had none and can compile; return its process, which nobody needs to wait
    for.

    Ranks of a launcher leave it to the first one of their machine. FZERO_WARM_UP=0 prevents it.
    """
    wanted = os.environ.get("FZERO_WARM_UP", "1") != "0" and os.environ.get("LOCAL_RANK", "0") == "0"
    if not wanted or not any(shutil.which(name) for name in ("g++", "clang++", "c++")) or mark().exists():
        return None
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "fzero.run.warm_up"]
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)


def main() -> None:
    """Compile, then leave the mark."""
    from concurrent.futures import ThreadPoolExecutor
    from importlib import import_module

    import torch

    from fzero.core.compile import jit
    from fzero.core.torch_private import compile_fx_inner  # noqa: F401  (threads may not import Inductor at once)

    torch.set_num_threads(1)
    quick, *modules = (import_module(f"fzero.kernels.{name}") for name in FORMS)
    quick._library()  # alone, as Inductor looks for the CPU's instructions now, which threads may not do at once
    with ThreadPoolExecutor(2) as pool:  # the compiler's processes, of which the first takes longest
        made = [pool.submit(module._library) for module in modules]
        jit(lambda x: torch.sin(x) + 1.0)(torch.ones(64))
        for each in made:
            each.result()
    mark().touch()


if __name__ == "__main__":
    main()
